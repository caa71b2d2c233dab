"""Second moments of rotated leaves: where on a head's basis a variance lives, per `v_mode`.

Here: body coordinates, per-head means, which directions are divided. Not here: the leaves that no rotation binds, whose
Adam is elementwise.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from gauge_optax._sequence import in_turn
from gauge_optax.gauges._basis import Group, HeadBasis, body_frame, degenerate, grouped, live_directions
from gauge_optax.gauges._head import BASIS, HeadBlock, HeadInstance
from gauge_optax.gauges._scale import Values
from gauge_optax.gauges._split import Bound
from gauge_optax.linalg import eigenvalue_cutoff, inverse_sqrt_by_products, matmul, real_dtype, transpose
from gauge_optax.transforms._heads import turned
from gauge_optax.transforms._here import Adam

Arrays = dict[str, jax.Array]
V_MODES = ("body_frame_topk", "body_frame", "per_head_scalar", "per_head_matrix", "none")
_MATRIX_FLOOR = 3e-2  # of √‖V‖_F: directions with less variance than its square are stepped no further
_ROUNDING = 1e3  # machine epsilons of a head's RMS gradient below which a gradient counts as rounding


class BodyFrame(NamedTuple):
    """A group's stored eigenbasis and the frame in which its second moments are kept.

    Attributes:
      basis: eigenvectors and eigenvalues at the last refresh.
      frame: U, (instances, *shape, d, d); () for the modes that need none (Orbax saves no empty array).
      outer: second moment gᵀg/rows of every block, (instances, blocks, *shape, d, d), under "per_head_matrix"; else ().
    """

    basis: HeadBasis
    frame: Any
    outer: Any


def uses_frame(v_mode: str) -> bool:
    """Whether a mode keeps its second moment in body coordinates."""
    return v_mode in ("body_frame", "body_frame_topk")


def init_frames(
    bound: Bound,
    hat: Values,
    bases: Sequence[HeadBasis],
    v_mode: str,
    live_threshold: float | jax.Array,
) -> tuple[BodyFrame, ...]:
    """Body frames of a starting point."""
    cut = threshold_of(v_mode, live_threshold)

    def made(vectors: jax.Array, group: Group, basis: HeadBasis) -> BodyFrame:
        frame = body_frame(group, hat, basis._replace(vectors=vectors), cut) if uses_frame(v_mode) else ()
        return BodyFrame(basis, frame, _outer(group, hat) * 0.0 if v_mode == "per_head_matrix" else ())

    return in_turn(made, [basis.vectors for basis in bases], grouped(bound.heads), bases)


def threshold_of(v_mode: str, live_threshold: float | jax.Array) -> float | jax.Array:
    """Which directions a mode keeps: `body_frame` all but those that are zero up to rounding.

    Rounding is all their gradient; divided by its own root it would become a step, off the saddle that a rank-deficient
    head is: twins of rank-1 heads were 0.96 apart after 20 float64 steps, and are now 9e-16.
    """
    return live_threshold if v_mode == "body_frame_topk" else eigenvalue_cutoff(real_dtype())


def carried_by(old: jax.Array, new: jax.Array) -> jax.Array:
    """What second moments are multiplied by to reach a new frame: R∘R, R = U_oldᵀ·U_new.

    The reference's |R| (DDC B.8) reads two ways: |v·R| is not equivariant, and v·|R| is but makes v grow (by 20 to 37 %
    in 20 steps). The square keeps every row's total, and needs no signs.
    """
    return jnp.square(matmul(transpose(old), new))


def to_body(bound: Bound, frames: Sequence[BodyFrame], values: Values) -> Arrays:
    """Rotated leaves in body coordinates, all others as they are."""
    out = dict(values)
    for group, frame in zip(grouped(bound.heads), frames, strict=True):
        out |= turned(group, out, frame.frame)
    return out


def from_body(bound: Bound, frames: Sequence[BodyFrame], values: Values) -> Arrays:
    """The inverse of `to_body` on kept directions."""
    out = dict(values)
    for group, frame in zip(grouped(bound.heads), frames, strict=True):
        out |= turned(group, out, transpose(frame.frame))
    return out


def divided_directions(group: Group, frame: BodyFrame, live_threshold: float | jax.Array) -> jax.Array:
    """Mask (instances, *shape, d) of the body directions that are divided by √v; the others follow momentum alone."""
    live = live_directions(frame.basis.values, live_threshold)
    return live | degenerate(frame.basis.values, live_threshold)[..., None]


def on_blocks(
    bound: Bound,
    values: Values,
    change: Callable[[int, int, HeadInstance, HeadBlock, jax.Array], jax.Array],
) -> Arrays:
    """Rotated leaves with every block's view replaced by change(group index, instance index, instance, block, view)."""
    out = dict(values)
    for at, group in enumerate(grouped(bound.heads)):
        for number, head in enumerate(group):
            for block in head.blocks:
                path = block.block.path
                out[path] = block.write(out[path], change(at, number, head, block, block.view(out[path])))
    return out


def above_rounding(bound: Bound, roots: Values, nu: Values, adams: Mapping[str, Adam]) -> Arrays:
    """Roots of second moments, raised by 1e3 machine epsilons of the head's RMS gradient.

    Some rows of a head have no gradient at all (a key bias without rotary), and rounding of relative size 1e-7 in its
    place. Divided by its own root it would become a full step, and the horizontal projection would spread that over the
    head: in float32 twins came apart by 7e-4 in the loss within 20 steps, by 1.4e-7 with this floor.

    Args:
      bound: the product.
      roots: √v̂ + eps per leaf that is divided.
      nu: v per leaf, rotated leaves in the coordinates of their mode; of leaves that are not divided, what v would be.
      adams: hyperparameters per leaf.

    Returns:
      The roots, raised on rotated leaves.
    """
    tiny, out = _ROUNDING * float(jnp.finfo(real_dtype()).eps), dict(roots)
    for head in bound.rotations:
        for block in (b for b in head.blocks if b.block.path in roots):
            path = block.block.path
            floor = tiny * jnp.sqrt(adams[path].unbiased_variance(head.mean(nu)))
            spread = head.along_basis(block, jnp.broadcast_to(floor[..., None], (*head.shape, head.size)))
            out[path] = block.write(out[path], block.view(out[path]) + spread)
    return out


def _outer(group: Group, seen: Values) -> jax.Array:
    """gᵀg/rows of every block of every instance."""
    return jnp.stack([
        jnp.stack([h.block_gram(b, seen[b.block.path], seen[b.block.path]) / h.rows(b) for b in h.blocks])
        for h in group
    ])  # fmt: skip


def divided_by_matrix(
    bound: Bound, frames: Sequence[BodyFrame], mean: Values, seen: Values, adams: Mapping[str, Adam]
) -> tuple[Arrays, tuple[BodyFrame, ...]]:
    """Rotated leaves of a first moment times (V̂ + floor)^(−1/2), V the d×d second moment of each block of each head.

    Args:
      bound: the product.
      frames: stored second moments.
      mean: bias-corrected first moment.
      seen: this step's gradient.
      adams: hyperparameters per leaf.

    Returns:
      All leaves with the rotated ones divided, and the new second moments. V moves with the head by conjugation, so no
      frame is needed (DDC B.8, Proposition 14).

    Deviations: no eigendecomposition; and the reference's floor ε² amplifies rounding in V's small directions by up to
    1/ε: twins were 4e-3 apart after 50 float32 steps, 4e-5 after 20 in float64. With (3e-2)²·‖V‖_F the condition number
    is at most 1.1e3, and they agree to 2e-6 and 6e-14. Losses after 200 steps do not tell 1e-3 from 1e-1.
    """
    out, fresh = dict(mean), []
    for group, frame in zip(grouped(bound.heads), frames, strict=True):
        adam = adams[group[0].paths[0]]
        past = jnp.where(adam.step == 1, 0.0, frame.outer)
        outer = adam.b2 * past + (1 - adam.b2) * _outer(group, seen)
        factors = _on_live(_inverse_roots(group, adam, adam.unbiased_variance(outer)), frame.basis)
        for head, own in zip(group, factors, strict=True):
            for block, factor in zip(head.blocks, own, strict=True):
                path = block.block.path
                out[path] = block.write(out[path], head.turn_view(block, block.view(mean[path]), factor))
        fresh.append(frame._replace(outer=outer))
    return out, tuple(fresh)


def _inverse_roots(group: Group, adam: Adam, outer: jax.Array) -> jax.Array:
    """(V̂ + floor)^(−1/2) of every block of every head; `outer` is (instances, blocks, *shape, d, d)."""
    rows = jnp.array([group[0].rows(b) for b in group[0].blocks], outer.dtype)
    # Some blocks have no gradient at all (a key bias without rotary): their rounding is measured against the head.
    pooled = jnp.tensordot(rows / jnp.sum(rows), outer, (0, 1))[:, None]
    size = jnp.maximum(*(jnp.linalg.norm(x, axis=(-2, -1), keepdims=True) for x in (outer, pooled)))
    floor = jnp.square(adam.eps + _MATRIX_FLOOR * jnp.sqrt(size)) + adam.eps_root
    damped = outer + floor * jnp.eye(outer.shape[-1], dtype=outer.dtype)
    return inverse_sqrt_by_products(damped, _MATRIX_FLOOR**2)


def _on_live(factors: jax.Array, basis: HeadBasis) -> jax.Array:
    """1 + (factors − 1)·P, P the projector on directions of the head that are not zero: those follow momentum alone.

    An invariant loss has no gradient there but rounding, which the factors would amplify: twins of rank-1 heads were
    1e-8 apart after 20 float64 steps, 7e-16 with P. Rotary planes are left alone: what turns in a plane without
    reflections may have a gradient across its only direction.
    """
    if factors.shape[-1] == 2:
        return factors
    live = live_directions(basis.values, eigenvalue_cutoff(factors.dtype))
    projector = matmul(basis.vectors * live[..., None, :].astype(factors.dtype), transpose(basis.vectors))
    eye = jnp.eye(factors.shape[-1], dtype=factors.dtype)
    return eye + matmul(factors - eye, projector[:, None])


def per_head_mean(head: HeadInstance, block: HeadBlock, view: jax.Array) -> jax.Array:
    """A block's view with every entry replaced by its head's mean."""
    axes = tuple(k for k, label in enumerate(block.labels) if label == BASIS or label not in head.named)
    return jnp.broadcast_to(jnp.mean(view, axes, keepdims=True), view.shape)
