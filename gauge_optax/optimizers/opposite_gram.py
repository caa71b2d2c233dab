"""The post's correction: each factor's increment times the inverse Gram matrix of the opposite factor.

With M = A·Bᵀ, the represented motion U_A·Bᵀ + A·U_Bᵀ of raw increments depends on which of many equal pairs (A, B)
holds M. A gradient is U_A = G·B, a cotangent; U_A·(BᵀB)⁻¹ moves like A under every S in GL(d), a tangent, and the
dependence is gone.

Here: the correction for matrices (`head_linear`) and for channels (scales with two sides), damping, approximations. Not
here: optimizers that are equivariant whatever they do (`quotient`), the inverse itself (`factors`).
References: "When Equivalent Weights Train Differently" §3, §7; docs/design.md §5.
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from gauge_optax.binding import Block, binding_error, overlap
from gauge_optax.gauges.gauge import Gauges, product
from gauge_optax.gauges.heads import BASIS
from gauge_optax.linalg import inverse_gram
from gauge_optax.slice import Slice
from gauge_optax.transformation import in_dtype_of, placeholder, require_choice, require_every, transformation

Arrays = dict[str, jax.Array]
Pair = tuple[jax.Array, jax.Array]

_NAME = "scale_by_opposite_gram"


class OppositeInverses(NamedTuple):
    """What each side's increments are multiplied by: an inverse of the opposite side's Gram matrix.

    Attributes:
      scales: per scale instance with two sides a number per channel for up and one for down, shaped like its axes.
      linear: per linear instance a matrix for left and one for right, (*shape, d, d); their diagonals, (*shape, d).
    """

    scales: tuple[Pair, ...]
    linear: tuple[Pair, ...]


class ScaleByOppositeGramState(NamedTuple):
    """State of `scale_by_opposite_gram`; both are () with every=1.

    Attributes:
      gauges: the last `OppositeInverses`.
      age: updates since they were computed, int32; 0 where the next update computes new ones.
    """

    gauges: Any
    age: Any


class _Rule(NamedTuple):
    """How a Gram matrix is inverted."""

    damping: float | jax.Array
    relative: bool
    diagonal: bool

    def added(self, squares: jax.Array, size: int) -> jax.Array:
        """λ from tr(H), (*shape)."""
        return self.damping * (squares / size if self.relative else jnp.ones_like(squares))


def scale_by_opposite_gram(
    gauges: Gauges,
    damping: float | jax.Array = 0.0,
    damping_mode: str = "relative",
    diagonal: bool = False,
    every: int | jax.Array = 1,
) -> optax.GradientTransformationExtraArgs:
    r"""Multiplies each factor's increments by the inverse Gram matrix of the opposite factor.

    After an optimizer's scaling, before or after the learning rate; decoupled decay comes after it. Per `head_linear`,
    with H_A = AᵀA over all rows of the left blocks, biases among them, and H_B likewise,

    .. math:: U_A \mapsto U_A (H_B + \lambda)^{-1}, \qquad U_B \mapsto U_B (H_A + \lambda)^{-1}.

    Scales traded between two sides (`rescale`, `norm_scale`, the moduli of `rope_linear`) get the same per channel, a
    1 × 1 Gram matrix: U_up·(ρ_down² + λ)^(−1/p), U_down·(ρ_up² + λ)^(−p) with ρ the norms of a channel's sides, p the
    degree. Rotations, shifts and `scale_invariant` have no opposite side: what they alone bind passes unchanged.

    Gradients are cotangents, U_A ↦ U_A·S⁻ᵀ under A ↦ A·S, B ↦ B·S⁻ᵀ; so are their moving averages. H_B⁻¹ ↦ Sᵀ·H_B⁻¹·S
    makes them tangents, exactly: undamped, twins take the same represented step, whatever S. Around other increments
    this is a wrapper. Those that do not grow with the gradient (Adam's, a polar factor's) it overcorrects: where S is a
    number s, their represented motion has a part in s⁻¹ and one in s; corrected, one in s and one in s⁻¹. *Measured* at
    condition 100, 20 steps of AdamW: twins' motions are 1.9 apart raw, 3.1 corrected. `go.quotient` is exact there.

    Args:
      gauges: a gauge or a sequence of them, meaning their product.
      damping: λ. Above 0 the correction is exact under rotations alone; "relative", under one size for all columns
        too, and so for channels.
      damping_mode: "relative" to the mean eigenvalue: damping·tr(H)/d; "absolute": damping itself.
      diagonal: of each Gram matrix only the diagonal is inverted: the squared norms of the opposite factor's columns.
        Exact under diagonal S alone.
      every: at how many updates once the inverse is computed; in between it is kept in the state. That is our reading
        of the post's "periodic full correction": twins keep their S, so an old inverse still makes tangents. The
        literal one leaves increments raw in between. *Measured* at condition 100, 20 steps of SGD: 2e-13 with
        every=16, literally 8.3, raw 7.9; at ten times the learning rate 2e-13, and the others diverge.

    Returns:
      A transformation of raw factor increments (gradients: cotangents) into tangents. A Gram matrix of less than full
      rank has a pseudo-inverse: increments of a factor whose opposite is 0 become 0. Of `optax.adamw`'s update it takes
      12 times as long (12 kernels of d = 768, CPU), 6 times with every=16, twice with `diagonal`.

    Raises:
      ValueError: a damping that is negative, another mode, an `every` that is no positive integer, here; an entry
        that two gauges with two sides bind, bindings that do not fit, when a tree is first seen; `update` without
        params.

    >>> gauge = go.rescale({"a": ""}, {"b": ""})
    >>> balanced = {"a": jnp.array(1.0), "b": jnp.array(0.5)}
    >>> twin = {"a": jnp.array(16.0), "b": jnp.array(0.03125)}
    >>> def product_after_a_step(tx, p):
    ...     grads = jax.grad(lambda p: 0.5 * (p["a"] * p["b"] - 1) ** 2)(p)
    ...     p = optax.apply_updates(p, tx.update(grads, tx.init(p), p)[0])
    ...     return round(float(p["a"] * p["b"]), 3)
    >>> [product_after_a_step(optax.sgd(0.1), p) for p in (balanced, twin)]
    [0.564, 13.301]
    >>> tx = optax.chain(go.scale_by_opposite_gram(gauge), optax.sgd(0.1))
    >>> [product_after_a_step(tx, p) for p in (balanced, twin)]
    [0.605, 0.605]

    Undamped it divides by what a factor has least of: where the optimum has fewer ranks than the factors, damp it.

    Reference: "When Equivalent Weights Train Differently" §3, and §7 for `diagonal` and `every`. Deviation: the Gram
      matrix, whose condition is the square of its factor's, is never formed; damping is relative unless said.
    """
    require_choice(_NAME, "damping_mode", damping_mode, ("relative", "absolute"))
    _check_damping(damping)
    require_every(_NAME, every)
    group, rule = product(gauges), _Rule(damping, damping_mode == "relative", diagonal)
    # An array counts as one both where it is known and where it is traced: the state has one form.
    always = not isinstance(every, jax.Array) and every == 1

    def init(params: optax.Params) -> ScaleByOppositeGramState:
        s = Slice.of(group.parts, params)
        _check_shared(s)
        if always:
            return ScaleByOppositeGramState((), ())
        shapes = jax.eval_shape(lambda p: _inverses(s, s.centred(s.values(p)), rule), params)
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        return ScaleByOppositeGramState(zeros, jnp.zeros((), jnp.int32))

    def update(updates: Any, state: ScaleByOppositeGramState, params: Any, **extra: Any) -> tuple[Any, Any]:
        s = Slice.of(group.parts, params)
        _check_shared(s)

        def fresh() -> OppositeInverses:
            return _inverses(s, s.centred(s.values(params)), rule)

        inverses = fresh() if always else None
        if inverses is None:
            _check_kept(state.gauges, jax.eval_shape(fresh))
            inverses = jax.lax.cond(state.age == 0, fresh, lambda: state.gauges)
            state = ScaleByOppositeGramState(inverses, jnp.where(state.age + 1 < every, state.age + 1, 0))
        return in_dtype_of(updates, _corrected(s, inverses, s.vectors(updates))), state

    def empty(params: Any) -> ScaleByOppositeGramState:
        return ScaleByOppositeGramState((), ()) if always else ScaleByOppositeGramState(placeholder(), jnp.int32(0))

    return transformation(_NAME, init, update, ScaleByOppositeGramState, empty)


# Inverses -----------------------------------------------------------------------------------------------


def two_sides(s: Slice) -> tuple[list[Any], list[Any]]:
    """The instances with an opposite factor: scales, and those whose factors are matrices."""
    sided = [i for i in s.instances if i.sides is not None]
    return [i for i in sided if i.log_step], [i for i in sided if not i.log_step]


def _inverses(s: Slice, point: Mapping[str, jax.Array], rule: _Rule) -> OppositeInverses:
    scales, linear = two_sides(s)
    channels = []
    for instance in scales:
        up, down = instance.squared_sides(point)
        degree = float(instance.degree_of_decay)
        channels.append((_power(down + rule.added(down, 1), -1.0 / degree), _power(up + rule.added(up, 1), -degree)))
    sides = [side for instance in linear for side in instance.sides[::-1]]
    inverses: list[jax.Array] = []
    if rule.diagonal:
        for side in sides:
            named = (*side.named, BASIS)
            totals = [block.total(named, jnp.square(point[block.path])) for block in side.blocks]
            squares = sum(totals[1:], totals[0])
            inverses.append(_power(squares + rule.added(jnp.sum(squares, -1), side.size)[..., None], -1.0))
    else:
        factors = [side.stacked(point) for side in sides]
        batches: dict[int, jax.Array] = {}
        for shape in dict.fromkeys(x.shape for x in factors):  # factors of one shape in one batch
            numbers = [k for k, x in enumerate(factors) if x.shape == shape]
            rows = jnp.stack([factors[k] for k in numbers])
            batch = inverse_gram(rows, rule.added(jnp.sum(jnp.square(rows), (-2, -1)), shape[-1]))
            batches |= zip(numbers, batch, strict=True)
        inverses = [batches[k] for k in range(len(sides))]
    return OppositeInverses(tuple(channels), tuple(zip(inverses[::2], inverses[1::2], strict=True)))


def _power(x: jax.Array, exponent: float) -> jax.Array:
    """x^exponent, 0 where that is no number."""
    power = x**exponent
    return jnp.where(jnp.isfinite(power), power, 0.0)


# Increments ---------------------------------------------------------------------------------------------


def _corrected(s: Slice, inverses: OppositeInverses, vectors: Arrays) -> Arrays:
    """The leaves that a corrected instance binds."""
    scales, linear = two_sides(s)
    out = dict(vectors)
    for instance, channels in zip(scales, inverses.scales, strict=True):
        for blocks, numbers in zip(instance.sides, channels, strict=True):
            for block in blocks:
                out[block.path] = out[block.path] * block.spread(instance.named, numbers, elsewhere=1.0)
    for instance, matrices in zip(linear, inverses.linear, strict=True):
        for side, matrix in zip(instance.sides, matrices, strict=True):
            if matrix.ndim == len(side.shape) + 2:
                out |= side.turned(out, matrix)
                continue
            for block in side.blocks:
                rows = block.rows(out[block.path]) * side.along_basis(block, matrix)
                out[block.path] = block.write(out[block.path], rows)
    return {path: out[path] for instance in scales + linear for path in instance.paths}


# Complaints ---------------------------------------------------------------------------------------


def _check_shared(s: Slice) -> None:
    """Raises ValueError where two corrected instances bind an entry: it has no single opposite factor."""
    earlier: list[tuple[str, Block]] = []
    for instance in [*two_sides(s)[0], *two_sides(s)[1]]:
        for block in instance.blocks:
            for gauge, other in earlier:
                if overlap(block, other):
                    raise binding_error(
                        _NAME, f"two opposite factors for '{block.path}'",
                        f"a side of {gauge} and a side of {instance.gauge}",
                        "at most one gauge with two sides per entry",
                        "drop one from this list; or write go.quotient(tx, gauges), which takes both",
                    )  # fmt: skip
        earlier += [(instance.gauge, block) for block in instance.blocks]


def _check_kept(kept: Any, fresh: Any) -> None:
    found, expected = (jax.tree.map(jnp.shape, inverses) for inverses in (kept, fresh))
    if found != expected:
        raise binding_error(
            _NAME, "a state of other gauges", f"{found}", f"{expected}",
            "give it the list that its state was made with, on leaves of those shapes; or start anew: tx.init(params)",
        )  # fmt: skip


def _check_damping(damping: Any) -> None:
    if isinstance(damping, jax.core.Tracer) and damping.ndim == 0:
        return
    try:
        fits = not isinstance(damping, bool | str) and np.ndim(damping) == 0 and 0 <= float(damping) < math.inf
    except (TypeError, ValueError):
        fits = False
    if not fits:
        raise binding_error(
            _NAME, "bad damping", repr(damping), "a number that is not negative",
            "write damping=0.0, or 1e-3 of the mean eigenvalue",
        )  # fmt: skip
