"""One training run: a Llama on bytes of text, from a start, with an arm; compiled once per network and arm."""

import functools
import math
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.track3 import arms
from benchmarks.track3.arms import Arm
from examples.studies import harness, starts
from models import lm

WARMUP = 20


class Task(NamedTuple):
    """A network and its data.

    Attributes:
      size: d_model.
      layers: number of blocks.
      warmup: steps over which the rate rises from a tenth of its peak.
      batch: sequences.
      longest: the most steps of a run.
      length: tokens of a sequence.
      config: of a network that is not `starts.model(size, layers)`.
      prose: whether the text is English and not Python's sources.
    """

    size: int
    layers: int = 2
    warmup: int = WARMUP
    batch: int = starts.BATCH
    longest: int = 400
    length: int = starts.LENGTH
    config: lm.LMConfig | None = None
    prose: bool = False

    @property
    def model(self) -> lm.LMConfig:
        """The network's sizes and switches."""
        return self.config or starts.model(self.size, self.layers)

    def batches(self, seed: int) -> np.ndarray:
        """Of all steps."""
        return starts.batches(self.longest, seed, self.batch, self.length, self.prose)

    def held_out(self) -> np.ndarray:
        """Batches that no run trains on."""
        return starts.held_out(self.length, starts.HELD_OUT * starts.BATCH * starts.LENGTH // self.length, self.prose)

    def train(
        self, arm: Arm, way: str, start: str, steps: int, decay: float, rate: float | Sequence[float], seed: int
    ) -> dict[str, Any]:
        """One run: its validation loss, None where it is not finite, and its seconds without compiling."""
        params = arm.start(starts.initial_of(self.model, start, seed), start)
        inputs = params, self.batches(seed), self.held_out()
        compiled, began = program(self, arm, way), time.monotonic()
        loss = float(compiled(*inputs, jnp.asarray(rate, jnp.float32), jnp.float32(decay), jnp.int32(steps)))
        seconds = round(time.monotonic() - began, 1)
        return {"validation": harness.rounded(loss) if math.isfinite(loss) else None, "seconds": seconds}


@functools.lru_cache(maxsize=3)
def program(task: Task, arm: Arm, way: str) -> Any:
    """The compiled run: start, steps, rate and decay are its arguments."""
    config = task.model
    params, loss = lm.params_and_loss(config, jax.random.key(0))
    gauges = lm.gauges(config)

    def run(
        params: Any, batches: jax.Array, held_out: jax.Array, rate: jax.Array, decay: jax.Array, steps: jax.Array
    ) -> jax.Array:
        def schedule(n: jax.Array) -> jax.Array:
            warm = jnp.minimum(1.0, 0.1 + 0.9 * n / task.warmup) if task.warmup else 1.0
            done = jnp.clip((n - task.warmup) / (steps - task.warmup), 0.0, 1.0)
            return rate * warm * 0.5 * (1.0 + jnp.cos(jnp.pi * done))

        tx = arms.optimizer(arm, way, schedule, decay, gauges)

        params, _ = harness.descend(tx, loss, (params, tx.init(params)), lambda n: batches[n], 0, steps)
        return jax.lax.map(functools.partial(loss, params), held_out).mean()

    rate = jnp.zeros((arm.kinds,) if arm.kinds else (), jnp.float32)
    inputs = params, task.batches(0), task.held_out(), rate, jnp.float32(0), jnp.int32(1)
    return jax.jit(run).lower(*inputs).compile()
