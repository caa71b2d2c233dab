"""Balance: the move to the point of least norm on an orbit.

A scale of degree p is balanced where ‖up‖² = p·‖down‖², and a linear gauge where both of its factors have the same
Gram matrix (Kempf–Ness). While all other parts stay as they are, the element that balances one part has a closed form.
Parts that share leaves are balanced one after the other, again and again, until none changes. Rotations change no norm.
A shift is balanced where its mean is zero. The other gauges that add (`embedding_shift`, `bias_absorption` and
`norm_read_shift`) are not balanced: their element is the identity, because a point that reads as zero is not the point
of least norm. Reference: docs/design.md §6.
"""

import functools
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from gauge_optax.gauges.by_action import OfUser
from gauge_optax.linalg import balance, real_dtype, triangular_factor
from gauge_optax.parts.constants import Mean
from gauge_optax.parts.order import others_of
from gauge_optax.parts.part import Anchor, Arrays, Part, changed
from gauge_optax.parts.sizes import Factor, Stretch
from gauge_optax.slice import Elements, Slice
from gauge_optax.xla import while_loop

_MOST_ROUNDS = 200
_Carry = tuple[tuple[Any, ...], Arrays, jax.Array, jax.Array]


@functools.singledispatch
def balanced(part: Part[Any], x: Arrays) -> Any:
    """The element e with x = e·y, where y is the point of least norm that this part alone can reach from x.

    It is the identity if there is no such point. Two kinds of scales are balanced otherwise: a scale without a second
    side to a root mean square of 1, and multipliers to equal root mean squares.
    """
    return part.identity()


@balanced.register
def _of_factor(part: Factor, x: Arrays) -> jax.Array:
    (up, entries), (down, entries_down) = _log_norms(part, x)
    if not part.down:
        return jnp.where(up > -jnp.inf, jnp.exp(up - 0.5 * math.log(entries)), 1.0)
    p, own = part.degree, math.log(entries / entries_down) if part.by_entry else 0.0
    whole = (up > -jnp.inf) & (down > -jnp.inf)
    ratio = jnp.where(whole, up, 0.0) - jnp.where(whole, down, 0.0)
    return jnp.where(whole, jnp.exp((2.0 * ratio - own - math.log(p)) / (2.0 * (1.0 + p))), 1.0)


@balanced.register
def _of_stretch(part: Stretch, x: Arrays) -> jax.Array:
    root = balance(triangular_factor(part.left.stacked(x)), triangular_factor(part.right.stacked(x)))
    return jnp.stack([root.power(-1.0), root.power(1.0)], -3)


@balanced.register
def _of_user(part: OfUser, x: Arrays) -> Any:
    return part.inverse(part.gauge.balance(part.tree(x)))


def _log_norms(part: Factor, x: Mapping[str, jax.Array]) -> tuple[tuple[jax.Array, int], tuple[jax.Array, int]]:
    """For the up and the down side of a scale: the logarithm of a channel's norm, (*shape), and its entry count.

    It is minus infinity for a channel of zeros, and NaN for one that is not finite. For multipliers, only the side's
    first block counts, because their balance compares its root mean square.
    """

    def of_side(side: Anchor) -> tuple[jax.Array, int]:
        blocks, zero = side[:1] if part.by_entry else side, jnp.zeros(part.shape, real_dtype())
        # Divided by the sum of its absolute entries, a channel has squares that neither underflow nor overflow.
        size = sum((b.total(part.named, jnp.abs(x[b.path])) for b in blocks), zero)
        size = jnp.where(size == 0, 1.0, size)
        shares = ((b, x[b.path] / b.spread(part.named, size, elsewhere=1.0)) for b in blocks)
        square = sum((b.total(part.named, jnp.square(share)) for b, share in shares), zero)
        empty = square == 0
        norm = jnp.where(empty, -jnp.inf, jnp.log(size) + 0.5 * jnp.log(jnp.where(empty, 1.0, square)))
        return norm, sum(b.entries(part.named) for b in blocks)

    return of_side(part.up), of_side(part.down)


def log_sizes(part: Any, x: Mapping[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Logarithms of the root mean squares of a scale's two sides, per channel.

    Args:
      part: a `Factor` with two sides.
      x: a point.

    Returns:
      The logarithms of the up side and of the down side, (*shape) each; minus infinity on both sides for a channel that
      is zero on one, NaN for one that is not finite. For multipliers, only the first block of each side counts.
    """
    up, down = (norm - 0.5 * math.log(entries) for norm, entries in _log_norms(part, x))
    empty = jnp.isneginf(up) | jnp.isneginf(down)
    return jnp.where(empty, -jnp.inf, up), jnp.where(empty, -jnp.inf, down)


def balance_beside(gauge: Any, params: Any, frozen: frozenset[str] = frozenset()) -> Any:
    """The public element that balances a point: its `act` leads to the point of least norm.

    Copies of the gauge that move a frozen leaf get the identity.

    Args:
      gauge: a `SliceGauge`.
      params: the point.
      frozen: paths of leaves that never change.
    """
    b = gauge._bound(params)
    s = Slice.of([part for part in b.whole.acting if not frozen & set(changed(part))]) if frozen else b.slice
    elements = b.public(balanced_elements(s, s.values(params)))
    return gauge._balancing(jax.tree.map(jnp.real, elements))  # sizes are positive here, so their logarithms are real


def balanced_elements(s: Slice, x: Arrays) -> Elements:
    """The elements f, by label, with x = f·y, where y is the point of least norm on the orbit of x.

    Of the parts that add (constants), only a `Mean` is balanced. The others get the identity, and y is the point of
    least norm that the rest of the parts reach.
    """
    f: Elements = {}
    for part, anchor, _ in s.constants:
        f[part.label] = part.read(anchor, x) if isinstance(part, Mean) else part.identity()
        x = part.undo(f[part.label], x)
    return f | dict(zip([part.label for part, _, _ in s.sizes], _rounds(s, x), strict=True))


@functools.partial(jax.jit, static_argnums=0)  # outside jit, a loop would be compiled anew at every call
def _rounds(s: Slice, x: Arrays) -> tuple[Any, ...]:
    parts = [part for part, _, _ in s.sizes]
    others = [[q for q, _ in others_of(part, part.blocks, parts)] for part in parts]
    # Once all scales are balanced, one step balances a `Stretch` exactly. So its change counts for convergence only if
    # it shares a leaf with another part that mixes entries (`along`), such as another `Stretch`.
    decide = [not part.along or any(q.along for q in own) for part, own in zip(parts, others, strict=True)]

    def one_round(carry: _Carry) -> _Carry:
        elements, point, _, count = carry
        moved, new = jnp.zeros((), real_dtype()), list(elements)
        for number, part in enumerate(parts):
            alone = part.act(new[number], point)
            e = balanced(part, alone)
            if decide[number]:
                moved = jnp.maximum(moved, _change(part, e, new[number]))
            new[number], point = e, part.undo(e, alone)
        return tuple(new), point, moved, count + 1

    tolerance = 32.0 * float(jnp.finfo(real_dtype()).eps)
    start = tuple(part.identity() for part in parts), x, jnp.asarray(jnp.inf, real_dtype()), jnp.int32(0)
    if not any(others):
        return one_round(start)[0]
    return while_loop(lambda c: (c[2] > tolerance) & (c[3] < _MOST_ROUNDS), one_round, start)[0]


def _change(part: Part[Any], new: Any, old: Any) -> jax.Array:
    """The largest relative change of an element: of a matrix relative to its largest entry, of a number to itself."""

    def of_leaf(y: jax.Array, z: jax.Array) -> jax.Array:
        size = jnp.max(jnp.abs(y), (-2, -1), keepdims=True) if part.along else jnp.abs(z)
        return jnp.max(jnp.abs(y - z) / size, initial=0.0)

    return jnp.max(jnp.stack(jax.tree.leaves(jax.tree.map(of_leaf, new, old))))
