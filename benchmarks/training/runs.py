"""Training runs of a decoder on bytes of text, from a kind of start. Each network and arm is compiled once."""

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
      build: (schedule, decay, gauges of the network) → optimizer. The schedule returns two learning rates, one for
        matrices and one for all other leaves.
      start: (initial weights, name of the start) → the initial weights of this arm. Most arms do not change them.
    """

    build: Build
    start: Start = lambda params, name: params


class Task(NamedTuple):
    """A network and its data.

    Attributes:
      config: the configuration of the network.
      warmup: the number of steps in which the learning rate rises from a tenth of its peak to the peak.
      batch: the number of sequences of a batch.
      longest: the number of steps of a run.
      length: the number of tokens of a sequence.
      prose: whether the text is English. If False, it is Python's sources.
    """

    config: lm.LMConfig
    warmup: int
    longest: int
    batch: int = starts.BATCH
    length: int = 128
    prose: bool = False

    def batches(self, seed: int) -> np.ndarray:
        """The training batches of all steps, stacked."""
        return starts.batches(self.longest, seed, self.batch, self.length, self.prose)

    def held_out(self) -> np.ndarray:
        """The validation batches, stacked. No run is trained on them."""
        return starts.held_out(self.length, starts.HELD_OUT * starts.BATCH * starts.LENGTH // self.length, self.prose)

    def train(self, arm: Arm, start: str, decay: float, rates: tuple[float, float], seed: int) -> dict[str, Any]:
        """Makes one run. Returns its validation loss (None if it is not finite), and its seconds without compiling."""
        params = arm.start(starts.initial_of(self.config, start, seed), start)
        inputs = params, self.batches(seed), self.held_out()
        compiled, began = program(self, arm), time.monotonic()
        loss = float(compiled(*inputs, jnp.asarray(rates, jnp.float32), jnp.float32(decay), jnp.int32(self.longest)))
        seconds = round(time.monotonic() - began, 1)
        return {"validation": harness.rounded(loss) if math.isfinite(loss) else None, "seconds": seconds}


@functools.lru_cache(maxsize=3)
def program(task: Task, arm: Arm) -> Any:
    """The compiled run of a network and an arm. Its arguments are initial weights, data, rates, decay and steps."""
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
