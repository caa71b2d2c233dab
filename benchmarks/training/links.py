"""Transformations for the optimizers of `recent.py`: some that Optax lacks, and functions that choose leaves for them.

A kernel counts as one matrix, inputs × outputs: (d, heads·size) for queries, keys and values, (heads·size, d) for
attention's output. Nothing in this file uses gauges.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import optax

from gauge_optax import linalg

Tree = Any
Rate = Callable[[jax.Array], jax.Array]
Link: TypeAlias = optax.GradientTransformation

MOMENTUM = 0.95
TINY = 1e-30

NEURONS: Mapping[str, str] = {
    **{f"blocks/{{i}}/attn/{name}/kernel": "_ head neuron" for name in ("query", "key", "value")},
    "blocks/{i}/attn/out/kernel": "_ _ neuron",
    **{f"blocks/{{i}}/mlp/{name}/kernel": "_ neuron" for name in ("up", "gate", "down")},
}
"""Path of a kernel → axes string by which each neuron has one vector, the weights of its inputs."""
TOKENS: Mapping[str, str] = {"lm_head/kernel": "_ token"}
"""The same for the head: one vector per token."""
EMBEDDINGS: Mapping[str, str] = {"embed/embedding": "token _"}
"""The same for the table of embeddings: one vector per token."""
MATRICES: Mapping[str, str] = {path: "_ " * len(axes.split()) for path, axes in NEURONS.items()}
"""The same kernels as `NEURONS`, but with each kernel as a single vector."""


def joined(path: Any) -> str:
    """A key path as text, with its keys joined by "/"."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def is_matrix(path: Any) -> bool:
    """Whether a leaf is a kernel of attention or MLP."""
    where = joined(path)
    return where.startswith("blocks") and where.endswith("kernel")


def inputs(path: Any) -> tuple[int, ...]:
    """The axes of a kernel that a neuron sums over."""
    first, _, *rest = joined(path).split("/")
    axes = NEURONS["/".join([first, "{i}", *rest])].split()
    return tuple(axis for axis, name in enumerate(axes) if name == "_")


def by_path(change: Callable[[str, jax.Array], jax.Array]) -> Link:
    """A link without a state that replaces each update x by change(path, x). It skips leaves that a partition hides."""
    return optax.stateless(
        lambda updates, params: jax.tree_util.tree_map_with_path(lambda path, x: change(joined(path), x), updates)
    )


# Links ------------------------------------------------------------------------------------------------


def orthogonalised() -> Link:
    """Replaces every kernel's update by its polar factor, times √(outputs/inputs) if there are more outputs.

    Reference: Jordan et al. 2024 (Muon), with Optax's factor for the shape.
    """

    return by_path(polar_step)


def polar_step(path: str, x: jax.Array) -> jax.Array:
    """What `orthogonalised` does with the update of one kernel."""
    matrix = x.reshape(math.prod(x.shape[: 2 if x.ndim == 3 and "/out/" in path else 1]), -1)
    rows, columns = matrix.shape
    return (linalg.polar(matrix) * max(1.0, columns / rows) ** 0.5).reshape(x.shape)


class NeuronState(NamedTuple):
    """State of `neurons_alike`: per leaf, running averages of the mean square of each neuron's update.

    The arrays have axes of length 1 in place of inputs.
    """

    square: Tree


def neurons_alike(b2: float = 0.95) -> Link:
    """NorMuon's second half: divides each neuron's update by its running size, and keeps the norm of a kernel's update.

    Reference: Li et al. 2025, arXiv 2510.05491, Algorithm 1.
    """

    def init(params: Tree) -> NeuronState:
        def zeros(path: Any, x: jax.Array) -> jax.Array:
            return jnp.zeros_like(jnp.sum(x, inputs(path), keepdims=True))

        return NeuronState(jax.tree_util.tree_map_with_path(zeros, params))

    def update(updates: Tree, state: NeuronState, params: Tree = None) -> tuple[Tree, NeuronState]:
        def average(path: Any, x: jax.Array, square: jax.Array) -> jax.Array:
            return b2 * square + (1 - b2) * jnp.mean(jnp.square(x), inputs(path), keepdims=True)

        def divided(x: jax.Array, square: jax.Array) -> jax.Array:
            even = x / (jnp.sqrt(square) + 1e-8)
            return even * jnp.linalg.norm(x) / (jnp.linalg.norm(even) + TINY)

        square = jax.tree_util.tree_map_with_path(average, updates, state.square)
        return jax.tree.map(divided, updates, square), NeuronState(square)

    return optax.GradientTransformation(init, update)


# Which leaves a link takes -----------------------------------------------------------------------------


def split(matrices: Link, rest: Link) -> Link:
    """One optimizer for kernels of attention and MLP, another for all other leaves."""

    def labels(params: Tree) -> Tree:
        return jax.tree_util.tree_map_with_path(lambda path, _: "matrices" if is_matrix(path) else "rest", params)

    return optax.partition({"matrices": matrices, "rest": rest}, labels)


def adamw(rate: Rate, decay: jax.Array) -> Link:
    """Optax's AdamW, with b2=0.95 as is usual for language models."""
    return optax.adamw(rate, b2=0.95, weight_decay=decay)


def momentum() -> Link:
    """Nesterov's momentum, as in Muon."""
    return optax.trace(MOMENTUM, nesterov=True)


def as_matrices(inner: Link) -> Link:
    """Wraps a link so that it gets every kernel as one matrix, inputs × outputs."""

    def flat(tree: Tree) -> Tree:
        def one(path: Any, x: jax.Array) -> jax.Array:
            return x.reshape(math.prod(x.shape[axis] for axis in inputs(path)), -1)

        return jax.tree_util.tree_map_with_path(one, tree)

    def update(updates: Tree, state: Any, params: Tree = None) -> tuple[Tree, Any]:
        moves, state = inner.update(flat(updates), state, flat(params))
        return jax.tree.map(lambda move, x: move.reshape(x.shape), moves, updates), state

    return optax.GradientTransformation(lambda params: inner.init(flat(params)), update)
