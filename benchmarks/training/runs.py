"""One training run: a decoder on bytes of text, from a start, with an optimizer; compiled once per network and arm."""

import functools
import math
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import gauge_optax as go
from benchmarks.training.links import Link, Rate
from examples.studies import harness, starts
from models import lm

Gauges = Sequence[go.Gauge]
Build = Callable[[Rate, jax.Array, Gauges], Link]
Start = Callable[[Any, str], Any]


class Arm(NamedTuple):
    """An optimizer of a comparison.

    Attributes:
      build: makes it, from a schedule of two rates (of matrices, and of all other leaves), a decay and the network's
        gauges.
      start: changes initial weights, given the start's name; most arms leave them as they are.
    """

    build: Build
    start: Start = lambda params, name: params


class Task(NamedTuple):
    """A network and its data.

    Attributes:
      config: sizes and switches of the network.
      warmup: steps over which the rate rises from a tenth of its peak.
      batch: sequences.
      longest: the most steps of a run.
      length: tokens of a sequence.
      prose: whether the text is English and not Python's sources.
    """

    config: lm.LMConfig
    warmup: int
    longest: int
    batch: int = starts.BATCH
    length: int = 128
    prose: bool = False

    def batches(self, seed: int) -> np.ndarray:
        """Of all steps."""
        return starts.batches(self.longest, seed, self.batch, self.length, self.prose)

    def held_out(self) -> np.ndarray:
        """Batches that no run trains on."""
        return starts.held_out(self.length, starts.HELD_OUT * starts.BATCH * starts.LENGTH // self.length, self.prose)

    def train(self, arm: Arm, start: str, decay: float, rates: tuple[float, float], seed: int) -> dict[str, Any]:
        """One run: its validation loss, None where it is not finite, and its seconds without compiling."""
        params = arm.start(starts.initial_of(self.config, start, seed), start)
        inputs = params, self.batches(seed), self.held_out()
        compiled, began = program(self, arm), time.monotonic()
        loss = float(compiled(*inputs, jnp.asarray(rates, jnp.float32), jnp.float32(decay), jnp.int32(self.longest)))
        seconds = round(time.monotonic() - began, 1)
        return {"validation": harness.rounded(loss) if math.isfinite(loss) else None, "seconds": seconds}


@functools.lru_cache(maxsize=3)
def program(task: Task, arm: Arm) -> Any:
    """The compiled run: start, rates, decay and steps are its arguments."""
    params, loss = lm.params_and_loss(task.config, jax.random.key(0))
    gauges = lm.gauges(task.config)

    def run(
        params: Any, batches: jax.Array, held_out: jax.Array, rates: jax.Array, decay: jax.Array, steps: jax.Array
    ) -> jax.Array:
        def schedule(n: jax.Array) -> jax.Array:
            warm = jnp.minimum(1.0, 0.1 + 0.9 * n / task.warmup) if task.warmup else 1.0
            done = jnp.clip((n - task.warmup) / (steps - task.warmup), 0.0, 1.0)
            return rates * warm * 0.5 * (1.0 + jnp.cos(jnp.pi * done))

        tx = arm.build(schedule, decay, gauges)
        params, _ = harness.descend(tx, loss, (params, tx.init(params)), lambda n: batches[n], 0, steps)
        return jax.lax.map(functools.partial(loss, params), held_out).mean()

    inputs = params, task.batches(0), task.held_out(), jnp.zeros(2), jnp.float32(0), jnp.int32(1)
    return jax.jit(run).lower(*inputs).compile()
