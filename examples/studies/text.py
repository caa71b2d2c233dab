"""Trains the demo language model at given rates and seeds, one program for all of them.

The model is a Llama of two layers on bytes of text, d = 64, from LeCun-normal kernels, with weight standardization or
without. Each study says what it compares.
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from examples.studies import starts
from examples.studies.digits import Make, Warmed, observed
from models import lm
from models.weight_standardization import standardize

Params = Any
KERNELS = {
    "query": "_ head channel", "key": "_ head channel", "value": "_ head channel", "out": "_ _ channel",
    "up": "_ channel", "gate": "_ channel", "down": "_ channel",
}
"""Attribute name → axes of its neurons."""


@dataclass(frozen=True)
class Task(Warmed):
    """How long, and whether kernels are weight-standardized."""

    standardized: bool = False


def neurons(standardized: bool = False) -> dict[str, str]:
    """Path → axes of every neuron in the blocks."""
    inside = "layer/kernel" if standardized else "kernel"
    where = {name: "attn" if name in ("query", "key", "value", "out") else "mlp" for name in KERNELS}
    return {f"blocks/{{i}}/{where[name]}/{name}/{inside}": axes for name, axes in KERNELS.items()}


@functools.cache
def model(standardized: bool) -> tuple[Callable[[int], Params], Callable[..., jax.Array]]:
    """(init of a seed, loss of parameters and tokens)."""
    config = lm.llama_config()

    def build(seed: int) -> lm.LM:
        made = lm.build(config, nnx.Rngs(seed))
        if standardized:
            standardize(made, KERNELS)
        return made

    graph, _ = nnx.split(build(0))

    def loss(params: Params, tokens: jax.Array) -> jax.Array:
        return lm.loss_fn(nnx.merge(graph, params), tokens)

    return lambda seed: nnx.to_pure_dict(nnx.split(build(seed))[1]), loss


def kernels(params: Params) -> Params:
    """A mask of what decays: matrices, not norms, gains and biases."""
    return jax.tree.map(lambda x: x.ndim > 1, params)


def train(
    task: Task, make: Make, pairs: Sequence[tuple[float, float]], seeds: Sequence[int],
    observe: Callable[..., Any] | None = None, every: int = 10,
) -> tuple[np.ndarray, Any]:
    """Validation loss of every pair of rate and decay, from every seed, and what `observe` gave along the run.

    Args:
      task: steps and schedule.
      make: (learning rate, weight decay) → an optimizer.
      pairs: learning rates and decays.
      seeds: of parameters and batches.
      observe: (params, gradient, state, updates, state after) → arrays; means over `every` steps are kept.
      every: see there.

    Returns:
      (pairs, seeds) losses; a tree of (pairs, seeds, windows, …), None without `observe`.
    """
    init, loss = model(task.standardized)

    @jax.jit
    def run(params: Params, batches: jax.Array, held_out: jax.Array, rate: Any, decay: Any) -> tuple[Any, Any]:
        tx = make(task.schedule(rate), decay)
        step = observed(tx, loss, observe)

        def window(carry: tuple[Any, Any], tokens: jax.Array) -> tuple[tuple[Any, Any], Any]:
            carry, kept = jax.lax.scan(step, carry, tokens)
            return carry, jax.tree.map(lambda x: x.mean(0), kept)

        windows = batches.reshape(-1, every, *batches.shape[1:])
        (params, _), kept = jax.lax.scan(window, (params, tx.init(params)), windows)
        return jax.lax.map(functools.partial(loss, params), held_out).mean(), kept

    held_out, runs = starts.held_out(), []
    for (rate, decay), seed in itertools.product(pairs, seeds):
        batches = starts.batches(task.steps, seed)
        runs.append(jax.device_get(run(init(seed), batches, held_out, jnp.float32(rate), jnp.float32(decay))))
    losses = np.array([x for x, _ in runs]).reshape(len(pairs), len(seeds))
    kept = jax.tree.map(lambda *x: np.stack(x).reshape(len(pairs), len(seeds), *x[0].shape), *[y for _, y in runs])
    return losses, kept
