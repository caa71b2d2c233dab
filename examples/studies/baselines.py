"""What others do, to compare with: Z-loss, scales stored less one, orthogonal gradients, Optax's Muon."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

_TINY = 1e-30


def z_loss(logits: jax.Array, strength: float) -> jax.Array:
    """strength · mean (log Σ exp logits)²: a pull on the logits' common level, 1e-4 in PaLM.

    Reference: de Brébisson and Vincent 2016; Chowdhery et al. 2022 §5.
    """
    return strength * jnp.mean(jnp.square(jax.nn.logsumexp(logits, axis=-1)))


def one_plus_adamw(
    learning_rate: optax.ScalarOrSchedule, is_scale: Callable[[str], bool], weight_decay: float, **adam: Any
) -> optax.GradientTransformation:
    """AdamW on a network whose norms store their scale less one, for parameters that store it whole.

    With γ = 1 + δ both have one gradient, and decaying δ towards 0 is decaying γ towards 1.

    Args:
      learning_rate: a number or a schedule.
      is_scale: from a leaf's path, joined by "/", to whether it is a norm's scale.
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
    """Each leaf's gradient without its component along the weights, as long as before (OrthoGrad).

    First in a chain. It removes the direction in which weights only grow, and with them the logits of a network that is
    homogeneous: not a symmetry of the loss, and not the directions that a gauge holds.

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
    """Optax's Muon, AdamW for vectors, embeddings and the head; steps of AdamW's size.

    Args:
      learning_rate: a number or a schedule.
      weight_decay: decoupled decay of all leaves.
      per_head: one matrix per head of attention, in place of one per kernel.
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


def more_decay(rate: float, chosen: Callable[[str], bool]) -> optax.GradientTransformation:
    """Last in a chain: more decay for some leaves. A control for the decay that a gauge bundles (DDC, C.9).

    Args:
      rate: learning rate times weight decay.
      chosen: whether a leaf is meant, by its path, joined by "/".
    """

    def one(path: Any, update: jax.Array, value: jax.Array) -> jax.Array:
        return update - rate * value if chosen(jax.tree_util.keystr(path, simple=True, separator="/")) else update

    return optax.stateless(lambda updates, params: jax.tree.map_with_path(one, updates, params))


def dead_directions_masked(
    inner: optax.GradientTransformation, chosen: Callable[[str], bool], floor: float = 1e-3
) -> optax.GradientTransformation:
    """An optimizer whose steps leave alone the directions that a kernel hardly uses: DDC's control of C.8.

    A direction of a kernel's inputs is dead if its singular value is below `floor` times the largest one.

    Args:
      inner: a whole optimizer.
      chosen: whether a leaf is meant, by its path, joined by "/". Its first axis is that of its inputs, but for
        attention's output kernel, whose first two are.
      floor: the threshold. The paper's text lost its number.
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
