"""Methods of others, to compare with: Z-loss, norms' scales stored less one, orthogonal gradients, Optax's Muon."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

_TINY = 1e-30


def z_loss(logits: jax.Array, strength: float) -> jax.Array:
    """strength · mean (log Σ exp logits)²: a penalty on the common level of logits. PaLM has the strength 1e-4.

    Reference: de Brébisson and Vincent 2016; Chowdhery et al. 2022 §5.
    """
    return strength * jnp.mean(jnp.square(jax.nn.logsumexp(logits, axis=-1)))


def one_plus_adamw(
    learning_rate: optax.ScalarOrSchedule, is_scale: Callable[[str], bool], weight_decay: float, **adam: Any
) -> optax.GradientTransformation:
    """AdamW as on a network whose norms store their scale less one (δ), for parameters that store the scale itself (γ).

    With γ = 1 + δ, the gradients with respect to γ and δ are equal. Decay of δ towards 0 is decay of γ towards 1.

    Args:
      learning_rate: a number or a schedule.
      is_scale: path of a leaf, joined by "/" → whether the leaf is a norm's scale.
      weight_decay: decoupled decay of all leaves.
      **adam: as in `optax.scale_by_adam`.

    Returns:
      The optimizer. Its `update` needs `params`.
    """

    def decay(updates: optax.Updates, params: optax.Params) -> optax.Updates:
        def one(path: Any, update: jax.Array, value: jax.Array) -> jax.Array:
            rest = 1.0 if is_scale(jax.tree_util.keystr(path, simple=True, separator="/")) else 0.0
            return update + weight_decay * (value - rest)

        return jax.tree.map_with_path(one, updates, params)

    return optax.chain(optax.scale_by_adam(**adam), optax.stateless(decay), optax.scale_by_learning_rate(learning_rate))


def orthogonal_gradient() -> optax.GradientTransformation:
    """Removes from each leaf's gradient its component along the weights, and keeps the gradient's norm (OrthoGrad).

    It is the first link of a chain. In the removed direction, weights only grow, and so do the logits of a network that
    is homogeneous. This changes the loss: the direction is not one that a gauge removes.

    Reference: Prieto et al. 2025, "Grokking at the edge of numerical stability".
    """

    def one(gradient: jax.Array, weight: jax.Array) -> jax.Array:
        along = jnp.vdot(weight, gradient) / (jnp.vdot(weight, weight) + _TINY)
        across = gradient - along * weight
        return across * jnp.linalg.norm(gradient) / (jnp.linalg.norm(across) + _TINY)

    return optax.stateless(lambda updates, params: jax.tree.map(one, updates, params))


def muon(
    learning_rate: optax.ScalarOrSchedule, weight_decay: float, per_head: bool = False
) -> optax.GradientTransformation:
    """Optax's Muon with steps of AdamW's size. Vectors, embeddings and the head get AdamW.

    Args:
      learning_rate: a number or a schedule.
      weight_decay: decoupled decay of all leaves.
      per_head: whether each head of attention is a matrix of its own. If False, a whole kernel is one matrix.
    """

    def matrices(params: Any) -> Any:
        def of(path: Any, x: jax.Array) -> optax.contrib.MuonDimensionNumbers | None:
            where = jax.tree_util.keystr(path, simple=True, separator="/")
            if x.ndim < 2 or "embed" in where or "pos" in where or "head" in where:
                return None
            if per_head and x.ndim == 3:  # (heads, entries, d) for attention's output, else (d, heads, entries)
                return optax.contrib.MuonDimensionNumbers((1,) if "out" in where else (0,), (2,))
            inputs = x.ndim - 1 if "out" in where else 1
            return optax.contrib.MuonDimensionNumbers(tuple(range(inputs)), tuple(range(inputs, x.ndim)))

        return jax.tree.map_with_path(of, params)

    return optax.contrib.muon(
        learning_rate, weight_decay=weight_decay, adam_learning_rate=learning_rate, adam_weight_decay=weight_decay,
        consistent_rms=0.2, muon_weight_dimension_numbers=matrices,
    )


class SharedScalarState(NamedTuple):
    """State of `shared_scalar_adam`: number of steps, first moments, and one average of all squared gradients."""

    number: jax.Array
    mu: Any
    nu: jax.Array


def shared_scalar_adam(learning_rate: float, b1: float = 0.9, b2: float = 0.999) -> optax.GradientTransformation:
    """Adam with one second moment for all entries of all leaves. Its steps rotate with the weights in every rotation.

    Reference: Singh 2026, arXiv 2608.05136, section 7 (the family of optimizers there, at p = 0, root mean square).

    Args:
      learning_rate: a number.
      b1: decay of first moments.
      b2: decay of the second moment.
    """

    def init(params: Any) -> SharedScalarState:
        return SharedScalarState(jnp.int32(0), jax.tree.map(jnp.zeros_like, params), jnp.zeros(()))

    def update(updates: Any, state: SharedScalarState, params: Any = None) -> tuple[Any, SharedScalarState]:
        leaves, number = jax.tree.leaves(updates), state.number + 1
        square = sum(jnp.sum(jnp.square(x)) for x in leaves) / sum(x.size for x in leaves)
        mu = jax.tree.map(lambda m, g: b1 * m + (1 - b1) * g, state.mu, updates)
        nu = b2 * state.nu + (1 - b2) * square
        size = jnp.sqrt(nu / (1 - b2**number)) + 1e-8
        step = jax.tree.map(lambda m: -learning_rate * m / (1 - b1**number) / size, mu)
        return step, SharedScalarState(number, mu, nu)

    return optax.GradientTransformation(init, update)


def more_decay(rate: float, chosen: Callable[[str], bool]) -> optax.GradientTransformation:
    """More weight decay for some leaves, as the last link of a chain.

    It is a control experiment of DDC, C.9: a gauge brings decay along for the leaves that it binds. Is this decay
    enough to explain its effect?

    Args:
      rate: learning rate times weight decay.
      chosen: path of a leaf, joined by "/" → whether the leaf gets more decay.
    """

    def one(path: Any, update: jax.Array, value: jax.Array) -> jax.Array:
        return update - rate * value if chosen(jax.tree_util.keystr(path, simple=True, separator="/")) else update

    return optax.stateless(lambda updates, params: jax.tree.map_with_path(one, updates, params))


def dead_directions_masked(
    inner: optax.GradientTransformation, chosen: Callable[[str], bool], floor: float = 1e-3
) -> optax.GradientTransformation:
    """An optimizer whose steps do not change kernels in their dead directions: the control experiment of DDC, C.8.

    A direction of a kernel's inputs is dead if its singular value is below `floor` times the largest one.

    Args:
      inner: a whole optimizer.
      chosen: path of a leaf, joined by "/" → whether the leaf's steps are masked. The first axis of the leaf is that of
        its inputs; attention's output kernel has its inputs on the first two axes.
      floor: the threshold. The paper's text does not give its number.
    """

    def masked(path: Any, update: jax.Array, value: jax.Array) -> jax.Array:
        where = jax.tree_util.keystr(path, simple=True, separator="/")
        if not chosen(where):
            return update
        outputs = value.shape[-1] if "out" in where or value.ndim == 2 else value.shape[1] * value.shape[2]
        matrix, step = value.reshape(-1, outputs), update.reshape(-1, outputs)
        wide = matrix.shape[0] <= outputs
        gram = matrix @ matrix.T if wide else matrix.T @ matrix
        squares, vectors = jnp.linalg.eigh(gram)
        dead = vectors * (squares < floor**2 * squares[-1])
        removed = dead @ (dead.T @ step) if wide else (step @ dead) @ dead.T
        return update - removed.reshape(update.shape)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        updates, state = inner.update(updates, state, params)
        return jax.tree.map_with_path(masked, updates, params), state

    return optax.GradientTransformation(inner.init, update)
