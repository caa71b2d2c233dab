"""Multiplies each factor's increment by the inverse Gram matrix of the opposite factor.

Many pairs of factors (A, B) store one product M = A·Bᵀ: for every invertible S, so do A·S and B·S⁻ᵀ. Increments U_A and
U_B move M by U_A·Bᵀ + A·U_Bᵀ. If U_A = G·B is a gradient, with G the gradient for M, this motion differs from pair to
pair, because U_A is a cotangent: at A·S it is U_A·S⁻ᵀ. The corrected increment U_A·(BᵀB)⁻¹ is a tangent: at A·S it is
multiplied by S, as A is, so that all pairs move M by the same amount. The two sides of a scale are treated in the same
way, per channel.
References: "When Equivalent Weights Train Differently" ("the post") §3, §7; docs/design.md §5.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from gauge_optax.binding import Block, leaves_by_path, overlap
from gauge_optax.errors import binding_error, warn
from gauge_optax.gauges.bound import bound
from gauge_optax.gauges.gauge import Gauges, Product, product
from gauge_optax.gauges.unread import heads_without_frame
from gauge_optax.linalg import inverse_gram_beside, real_dtype
from gauge_optax.optimizers._quotient import require_first_outside
from gauge_optax.optimizers.sides import channel_sides, matrix_sides
from gauge_optax.parts.heads import BASIS
from gauge_optax.parts.part import changed, name_of
from gauge_optax.slice import Slice
from gauge_optax.transformation import (
    GaugeTransformation,
    in_dtype_of,
    in_dtypes_of_state,
    layout,
    placeholder,
    require_choice,
    require_every,
    require_gauges_of_state,
    require_number,
    transformation,
)
from gauge_optax.xla import cond, zeros_of

Arrays = dict[str, jax.Array]
Pair = tuple[jax.Array, jax.Array]

_NAME = "scale_by_opposite_gram"


class OppositeInverses(NamedTuple):
    """What the increments of each side are multiplied by: inverses of the opposite side's Gram matrices.

    Attributes:
      scales: label of a scale with two sides → a pair of arrays with a number per channel: the first multiplies
        increments of `up`, the second those of `down`.
      linear: label of a linear gauge's part → a pair of arrays with a matrix per head, (*shape, d, d): the first
        multiplies increments of `left`, the second those of `right`. With `diagonal`, they have the diagonals of these
        matrices, (*shape, d).
    """

    scales: dict[str, Pair]
    linear: dict[str, Pair]


class ScaleByOppositeGramState(NamedTuple):
    """State of `scale_by_opposite_gram`; both fields are () with every=1.

    Attributes:
      gauges: the `OppositeInverses` that were computed last.
      age: number of updates that used them, int32; 0 if the next update computes new ones.
    """

    gauges: Any
    age: Any


def scale_by_opposite_gram(
    gauges: Gauges,
    damping: float | jax.Array = 0.0,
    damping_mode: str = "relative",
    diagonal: bool = False,
    every: int | np.integer[Any] | jax.Array = 1,
) -> GaugeTransformation:
    r"""Multiplies each factor's increments by the inverse Gram matrix of the opposite factor.

    In a chain, put it after an optimizer's scaling and before decoupled decay; the learning rate may be before or
    after it. For every `head_linear`, the matrix A has all rows of the left blocks, biases included, and B all rows of
    the right blocks. With the Gram matrices H_A = AᵀA and H_B = BᵀB and the damping λ, the increments become

    .. math:: U_A \mapsto U_A (H_B + \lambda)^{-1}, \qquad U_B \mapsto U_B (H_A + \lambda)^{-1}.

    Gauges that move a scale between two sides (`rescale`, `norm_scale`, the moduli of `rope_linear`) are treated per
    channel, with a 1 × 1 Gram matrix: the steps are U_up·(ρ_down² + λ)^(−1/p) and U_down·(ρ_up² + λ)^(−p), where ρ are
    the norms of a channel's sides and p is the degree. Rotations, shifts and `scale_invariant` have no opposite side:
    leaves that only these bind pass unchanged.

    Gradients and their moving averages are cotangents: U_A ↦ U_A·S⁻ᵀ under A ↦ A·S, B ↦ B·S⁻ᵀ. The factor
    H_B⁻¹ ↦ Sᵀ·H_B⁻¹·S makes them tangents, exactly: without damping, the product A·Bᵀ of twins takes the same step for
    every S. Increments that do not grow with the gradient (of Adam, or a polar factor) are overcorrected. If S is a
    number s, the raw motion of A·Bᵀ is a sum of a part that grows like s and a part that grows like 1/s, and the
    correction only exchanges the two. *Measured* in 20 steps of AdamW, for S of condition number 100: the motions of
    A·Bᵀ of twins are 1.9 apart without the correction, and 3.1 with it. `go.quotient` is exact for such increments.

    Args:
      gauges: a gauge or a sequence of gauges.
      damping: a number from which λ follows. With λ > 0 the correction is exact only if S is a rotation; with
        "relative", S may also be a rotation times a number, as it always is for the channels of a scale.
      damping_mode: with "relative", λ is damping·tr(H)/d, a share of the mean eigenvalue; with "absolute", λ is
        `damping`.
      diagonal: if True, the diagonal of each Gram matrix, the squared norms of the opposite factor's columns, stands in
        place of the matrix. This is exact only if S is diagonal.
      every: the number of updates from one computation of the inverses to the next; the state keeps them in between.
        An old inverse still makes tangents, because the S that maps one twin to the other is constant along their runs.
        This is how we read the post's "periodic full correction"; read literally, it would leave the increments between
        two computations uncorrected. *Measured* after 20 steps of SGD, for S of condition number 100: the motions of
        twins are 2e-13 apart with every=16, 8.3 by the literal reading, and 7.9 without a correction; at ten times the
        learning rate they are 2e-13 apart with every=16, and the other two diverge.

    Returns:
      A transformation of raw increments of factors (cotangents, such as gradients) into tangents. If a Gram matrix is
      singular, its pseudo-inverse is used, in the basis in which the columns of the other factor are orthonormal. So
      the step is still the same for every S, and increments of a factor whose opposite is 0 become 0. If both factors
      of a head have less than full rank, no multiple of the increments is a tangent, unless both are 0, and the step
      depends on S. An update takes 12 times as long as one of `optax.adamw` (12 kernels of d = 768, CPU), 6 times with
      every=16, twice with `diagonal`.

    Warns:
      UserWarning: at `init`, heads of which both factors have less than full rank, if one of them is not 0.

    Raises:
      ValueError: when called, a damping that is negative, an unknown mode, or an `every` that is no positive integer;
        when it first gets a tree, an entry that two gauges with two sides bind, or bindings that do not fit; `update`
        without params.

    >>> gauge = go.rescale({"a": ""}, {"b": ""})
    >>> balanced = {"a": jnp.array(1.0), "b": jnp.array(0.5)}
    >>> twin = {"a": jnp.array(16.0), "b": jnp.array(0.03125)}
    >>> def product_after_a_step(tx, p):
    ...     grads = jax.grad(lambda p: 0.5 * (p["a"] * p["b"] - 1) ** 2)(p)
    ...     p = optax.apply_updates(p, tx.update(grads, tx.init(p), p)[0])
    ...     return round(float(p["a"] * p["b"]), 3)
    >>> [product_after_a_step(optax.sgd(0.1), p) for p in (balanced, twin)]
    [0.564, 13.301]
    >>> tx = optax.chain(go.links.scale_by_opposite_gram(gauge), optax.sgd(0.1))
    >>> [product_after_a_step(tx, p) for p in (balanced, twin)]
    [0.605, 0.605]

    Without damping, steps are divided by the smallest singular values of a factor. Choose a damping above 0 if the
    product at the optimum has a smaller rank than d, the number of the factors' columns.

    Reference: "When Equivalent Weights Train Differently" §3, and §7 for `diagonal` and `every`. Deviation: the Gram
      matrix, whose condition number is the square of its factor's, is never formed; damping is relative by default.
    """
    require_choice(_NAME, "damping_mode", damping_mode, ("relative", "absolute"))
    require_number(_NAME, "damping", damping, "[0, inf)", "write damping=0.0, or 1e-3 of the mean eigenvalue")
    require_every(_NAME, every)
    group = product(gauges)
    # Under `inject_hyperparams`, `every` is traced. The state must then have one form for all values of `every`.
    always = not isinstance(every, jax.Array) and every == 1

    def inverses_at(s: Slice, params: Any) -> OppositeInverses:
        return _inverses(s, s.centred(s.values(params)), damping, damping_mode == "relative", diagonal)

    def init(params: optax.Params) -> ScaleByOppositeGramState:
        s, sharding = _checked_slice(group, params), layout(params)
        require_first_outside(_NAME, s)
        with sharding.left_open():
            stored = sharding.drop(params)
            if not diagonal and isinstance(damping, int | float) and damping == 0:
                but, leaves = "the steps of these heads depend on how their product is split", leaves_by_path(stored)
                for sentence in heads_without_frame(_NAME, s, None, leaves, but):
                    warn(sentence)
            if always:
                return ScaleByOppositeGramState((), ())
            zeros = zeros_of(jax.eval_shape(lambda p: inverses_at(s, p), stored))
        return sharding.restore(ScaleByOppositeGramState(zeros, jnp.zeros((), jnp.int32)))

    def update(updates: Any, state: ScaleByOppositeGramState, params: Any, **extra: Any) -> tuple[Any, Any]:
        s = _checked_slice(group, params)
        if always:
            inverses = inverses_at(s, params)
        else:
            expected = jax.eval_shape(lambda: inverses_at(s, params))
            require_gauges_of_state(_NAME, state.gauges, expected, s.leaves_by_label())
            kept = in_dtypes_of_state(state.gauges, state.gauges)
            renewed = lambda: in_dtypes_of_state(kept, inverses_at(s, params))  # noqa: E731
            inverses = cond(state.age == 0, renewed, lambda: kept)
            state = ScaleByOppositeGramState(inverses, jnp.where(state.age + 1 < every, state.age + 1, 0))
        return in_dtype_of(updates, _corrected(s, inverses, s.vectors(updates))), state

    def empty(params: Any) -> ScaleByOppositeGramState:
        return ScaleByOppositeGramState((), ()) if always else ScaleByOppositeGramState(placeholder(), jnp.int32(0))

    return transformation(_NAME, init, update, ScaleByOppositeGramState, empty, gauges=group.gauges)


def two_sides(s: Slice) -> tuple[list[Any], list[Any]]:
    """Returns the parts with two opposite sides: first those that multiply by numbers, then those that do by matrices.
    """
    scales = [i for i in s.parts if channel_sides(i) is not None]
    return scales, [i for i in s.parts if matrix_sides(i) is not None]


def _checked_slice(group: Product, params: Any) -> Slice:
    """Returns the slice. Raises ValueError if two gauges with two sides bind one entry: it has two opposite factors."""
    s = bound(group.gauges, params).slice
    scales, linear = two_sides(s)
    earlier: list[tuple[str, Block]] = []
    for part in scales + linear:
        for block in part.blocks:
            for gauge, other in earlier:
                if overlap(block, other):
                    raise binding_error(
                        _NAME, f"two opposite factors for '{block.path}'",
                        f"a side of {gauge} and a side of {name_of(part)}",
                        "at most one gauge with two sides per entry",
                        "drop one from this list; or write go.quotient(tx, gauges), which takes both",
                    )
        earlier += [(name_of(part), block) for block in part.blocks]
    return s


def _inverses(
    s: Slice, point: Mapping[str, jax.Array], damping: float | jax.Array, relative: bool, diagonal: bool
) -> OppositeInverses:
    def added(trace: jax.Array, size: int) -> jax.Array:
        """Returns λ, which is added to the eigenvalues of a Gram matrix of this trace and `size`."""
        return damping * (trace / size if relative else jnp.ones_like(trace))

    scales, linear = two_sides(s)
    channels: dict[str, Pair] = {}
    for part in scales:
        up, down = _squares(part, point)
        p = float(part.degree)
        channels[part.label] = _power(down + added(down, 1), -1.0 / p), _power(up + added(up, 1), -p)
    sides = [side for part in linear for side in _sides(part)[::-1]]
    inverses: dict[int, jax.Array] = {}
    if diagonal:
        for number, side in enumerate(sides):
            totals = [block.total((*side.named, BASIS), jnp.square(point[block.path])) for block in side.blocks]
            squares = sum(totals[1:], totals[0])
            inverses[number] = _power(squares + added(jnp.sum(squares, -1), side.size)[..., None], -1.0)
    else:
        factors = [side.stacked(point) for side in sides]
        # Pairs of a factor and its opposite factor, whose increments are multiplied by the inverse of the first's Gram
        # matrix.
        pairs = [(x, factors[k ^ 1]) for k, x in enumerate(factors)]
        shapes = [(x.shape, own.shape) for x, own in pairs]
        for pair in dict.fromkeys(shapes):
            # Pairs with the same shapes make one batch, so that XLA compiles one decomposition for all layers.
            numbers = [k for k, x in enumerate(shapes) if x == pair]
            rows, own = (jnp.stack(x) for x in zip(*(pairs[k] for k in numbers), strict=True))
            batch = inverse_gram_beside(rows, own, added(jnp.sum(jnp.square(rows), (-2, -1)), pair[0][-1]))
            inverses |= zip(numbers, batch, strict=True)
    return OppositeInverses(channels, {x.label: (inverses[2 * k], inverses[2 * k + 1]) for k, x in enumerate(linear)})


def _sides(part: Any) -> tuple[Any, Any]:
    """Returns both factors of a part of `two_sides`: blocks of a scale, or the rows of a linear gauge."""
    pair: Any = channel_sides(part) or matrix_sides(part)
    return pair[0], pair[1]


def _squares(scale: Any, point: Mapping[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Returns the sums of squares of `up` and of `down`, one number per channel each."""
    zero = jnp.zeros(scale.shape, real_dtype())
    up, down = (sum((b.total(scale.named, jnp.square(point[b.path])) for b in x), zero) for x in _sides(scale))
    return up, down


def _power(x: jax.Array, exponent: float) -> jax.Array:
    """Returns x^exponent, and 0 where that is no finite number."""
    power = x**exponent
    return jnp.where(jnp.isfinite(power), power, 0.0)


def _corrected(s: Slice, inverses: OppositeInverses, vectors: Arrays) -> Arrays:
    """Returns path → corrected increments, for the leaves that parts with two sides move."""
    scales, linear = two_sides(s)
    out = dict(vectors)
    for part in scales:
        for blocks, numbers in zip(_sides(part), inverses.scales[part.label], strict=True):
            for block in blocks:
                out[block.path] = out[block.path] * block.spread(part.named, numbers, elsewhere=1.0)
    for part in linear:
        for side, matrix in zip(_sides(part), inverses.linear[part.label], strict=True):
            if matrix.ndim == len(side.shape) + 2:
                out |= side.turned(out, matrix)
                continue
            for block in side.blocks:
                rows = block.rows(out[block.path]) * side.along_basis(block, matrix)
                out[block.path] = block.write(out[block.path], rows)
    return {path: out[path] for part in scales + linear for path in changed(part)}
