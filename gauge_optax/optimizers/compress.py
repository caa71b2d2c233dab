"""Stores the second moments of any optimizer in one or two bytes per entry; the optimizer itself computes in float32.

Rounding to the nearest stored number would fail. If an average changes in a step by less than half the distance
between two stored numbers, it would stay as it is: at b2 = 0.999, Adam's v would never fall. Here every entry is
rounded up or down at random, such that its expected value is exact. In one byte there is one exception: a positive
entry below the smallest positive number that a byte can stand for is always rounded up to that number. The random
numbers are hashed from the entry's position and the step, so that a run can be repeated.

*Measured* on 4,000 averages v of squared normal numbers, after 3,000 steps and 3,000 more with numbers a tenth as
large. The root mean square of the relative error of √v is 5 % in two bytes and 23 % in one at b2 = 0.999, and 0.6 % and
8 % at 0.98; the mean of v is off by 0.3 % at most. Rounded to the nearest, v ends 26 times too large in two bytes at
0.999, and 361 times in one at 0.98. On a Llama of two layers of width 64 (400 steps, three seeds, b2 = 0.999) the
validation loss of AdamW and `ddc_adamw` differs from the loss without compression by at most 0.2 % in two bytes and
0.8 % in one, in either direction.
References: Dettmers et al. 2022, arXiv:2110.02861 (one byte per entry, to the nearest); Gupta et al. 2015,
arXiv:1502.02551 (rounding at random).
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from gauge_optax.binding import leaves_by_path
from gauge_optax.errors import binding_error
from gauge_optax.transformation import (
    GaugeTransformation,
    checked_inner,
    in_dtype_of,
    require_choice,
    transformation,
)
from gauge_optax.xla import hashed_positions

_NAME = "compress_second_moments"
_PER_OCTAVE = 8  # code 255 stands for the power of two above the leaf's largest entry, 247 for half of it, and 0 for 0
# States whose field `nu` is not rounded. Optimizers with the first two divide by √(ν − μ²), and rounding ν could make
# this difference negative. Sophia's ν averages entries of the Hessian's diagonal, and SM3's is a first moment: both may
# be negative.
_NOT_ROUNDED = ("ScaleByRStdDevState", "ScaleByRStdDevWithCountState", "SophiaState", "ScaleBySM3State")
_STORED = ("bfloat16", "uint8")


class CompressedState(NamedTuple):
    """State of `compress_second_moments`.

    Attributes:
      count: steps so far, int32.
      tops: with one byte per entry, the number that the largest code stands for in each compressed leaf, a power of
        two: an array (leaves,). With two bytes per entry, ().
      inner_state: the state of the wrapped optimizer, with its fields `nu` in bfloat16, or as codes in uint8.
    """

    count: jax.Array  # type: ignore[assignment]
    tops: Any
    inner_state: Any


def compress_second_moments(
    inner: optax.GradientTransformation, dtype: str = "bfloat16"
) -> GaugeTransformation:
    """Wraps an optimizer so that its state holds second moments in 16 or 8 bits per entry, rounded at random.

    Args:
      inner: any Optax transformation, a whole optimizer or a link. Its second moments are the fields `nu` of its
        states. Optax's Adam, NAdam, RMSProp, AdaBelief and Muon and `ddc_adamw` have such fields, inside `quotient`
        too. All other fields stay as they are. The following second moments are not rounded either: those in float64,
        those from which a squared mean is subtracted (centered RMSProp), and the fields `nu` of Sophia and SM3, which
        may be negative. Put `optax.apply_if_finite` around the result, not inside.
      dtype: "bfloat16", or "uint8" for codes of 255 positive numbers and zero. The largest number is the power of two
        above the leaf's largest entry, and there are 8 per factor of two, so that they span a factor of 3.6e9. Smaller
        positive entries are stored as the smallest of these numbers and not as zero, which makes their steps shorter.
        One negative, infinite or NaN entry makes its whole leaf NaN.

    Returns:
      The optimizer. Its updates have the dtypes of the gradients, or those of the parameters where they are wider.

    Raises:
      ValueError: an `inner` that is no transformation; an unknown `dtype`; at `init`, a state without a field `nu` that
        may be rounded, a state that is compressed already, parameters in a NamedTuple with a field `nu`, and, with
        dtype="uint8", a leaf that `inner` steps and that is itself uint8, such as packed weights; `update` without
        params.

    >>> params = {"w": jnp.ones(1000)}
    >>> tx = go.links.compress_second_moments(optax.adamw(1e-3), "uint8")
    >>> state = tx.init(params)
    >>> _, state = tx.update({"w": jnp.ones(1000)}, state, params)
    >>> optax.tree.get(state, "nu")["w"].dtype
    dtype('uint8')

    Reference: Dettmers et al. 2022. Deviation: rounding at random, and one scale per leaf in place of one per block.
      Around `quotient`, the runs of twins are equal up to these roundings only: two numbers that differ in their last
      digit may be rounded to different sides.
    """
    require_choice(_NAME, "dtype", dtype, _STORED)
    inner = checked_inner(_NAME, inner)

    def init(params: optax.Params) -> CompressedState:
        state = inner.init(params)
        if not list(_second_moments(state)):
            raise binding_error(
                _NAME, "no second moments to compress", "no field nu that may be rounded",
                "an optimizer that averages squares of gradients, such as optax.adamw", f"leave {_NAME} out",
            )
        codes = [path for nu in _second_moments(state) for path, x in leaves_by_path(nu).items() if _is_byte(x)]
        if codes and dtype == "uint8":
            raise binding_error(
                _NAME, f"second moments of bytes, which look like codes, at '{codes[0]}'",
                "an optimizer that steps leaves of uint8", "floating-point leaves",
                f"write dtype='bfloat16', or put optax.masked(..., go.tools.by_path({{'{codes[0]}': False}}, "
                "default=True)) around it",
            )
        if any(isinstance(node, CompressedState) for node in jax.tree.leaves(state, is_leaf=_is_compressed)):
            raise binding_error(
                _NAME, "an optimizer that is compressed already", "a CompressedState inside", "one compression",
                f"write {_NAME} once, around the whole optimizer",
            )
        if list(_second_moments(params)):
            raise binding_error(
                _NAME, "parameters that look like second moments", "a NamedTuple with a field nu in the parameters",
                "another name of that field", "rename it, or pass the parameters as a dict",
            )
        return compressed(jnp.zeros((), jnp.int32), state, dtype)

    def update(updates: Any, state: CompressedState, params: Any, **extra: Any) -> tuple[Any, CompressedState]:
        before = decompressed(state)
        steps, after = inner.update(updates, before, params, **extra)
        steps = in_dtype_of(updates, leaves_by_path(steps), params)
        # For bfloat16 parameters `before` has second moments in float32, and `inner` may return other dtypes: the
        # state's dtypes must not change.
        inner_state = jax.tree.map(_in_dtype_of, before, after)
        return steps, compressed(optax.safe_increment(state.count), inner_state, dtype)

    def empty(params: Any) -> CompressedState:
        return CompressedState(jnp.zeros((), jnp.int32), jnp.zeros(0) if dtype == "uint8" else (), inner.init(params))

    return transformation(_NAME, init, update, CompressedState, empty, gauges=inner.gauges)


def compressed(count: jax.Array, state: Any, dtype: str, stream: int = 0) -> CompressedState:
    """Rounds the second moments of a state at random; `count` and `stream` are the seed of the random numbers.

    If a state is rounded twice at one count, use two values of `stream`. With the same random numbers, both roundings
    of an entry would go to one side.

    >>> state = optax.scale_by_adam().init({"w": jnp.ones(4)})
    >>> compressed(jnp.zeros((), jnp.int32), state, "uint8").inner_state.nu["w"].dtype
    dtype('uint8')
    """
    tops: list[jax.Array] = []
    number = stream * 1_000_003

    def stored(x: Any) -> Any:
        nonlocal number
        if not _is_rounded(x):
            return x
        number += 1
        chances = hashed_positions(jnp.shape(x), number, count)
        if dtype == "bfloat16":
            return _to_bfloat16(x.astype(jnp.float32), chances)
        codes, top = _to_codes(x.astype(jnp.float32), chances)
        tops.append(top)
        return codes

    inner_state = _with_second_moments(state, stored)
    return CompressedState(count, jnp.stack(tops) if tops else jnp.zeros(0) if dtype == "uint8" else (), inner_state)


def decompressed(state: CompressedState) -> Any:
    """Returns the state of the wrapped optimizer, with second moments in float32.

    >>> state = optax.scale_by_adam().init({"w": jnp.ones(4)})
    >>> decompressed(compressed(jnp.zeros((), jnp.int32), state, "bfloat16")).nu["w"]
    Array([0., 0., 0., 0.], dtype=float32)
    """
    tops = iter(() if isinstance(state.tops, tuple) else jnp.unstack(jnp.asarray(state.tops)))

    def read(x: Any) -> Any:
        if _is_byte(x) and dtype_of(state) == "uint8":
            return _size_of_code(x, next(tops))
        return x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x

    return _with_second_moments(state.inner_state, read)


def with_numbers(state: Any) -> Any:
    """Returns a state in which every `CompressedState` is replaced by the state inside, with moments in float32.

    >>> state = optax.chain(compress_second_moments(optax.scale_by_adam(), "uint8")).init({"w": jnp.ones(4)})
    >>> with_numbers(state)[0].nu["w"].dtype
    dtype('float32')
    """
    return jax.tree.map(lambda x: decompressed(x) if _is_compressed(x) else x, state, is_leaf=_is_compressed)


def compressed_like(stored: Any, state: Any) -> Any:
    """Compresses a state, in which second moments are numbers, where `stored`, of the same optimizer, is compressed."""

    def again(node: Any, x: Any) -> Any:
        return compressed(node.count, x, dtype_of(node), stream=2) if _is_compressed(node) else x

    return jax.tree.map(again, stored, state, is_leaf=_is_compressed)


def dtype_of(state: CompressedState) -> str:
    """Returns the argument `dtype` of the transformation that made a state.

    >>> dtype_of(compress_second_moments(optax.adam(0.1), "uint8").init({"w": jnp.ones(4)}))
    'uint8'
    """
    return "bfloat16" if isinstance(state.tops, tuple) else "uint8"


# Where second moments are -----------------------------------------------------------------------------


def _has_second_moments(node: Any) -> bool:
    return "nu" in getattr(node, "_fields", ()) and type(node).__name__ not in _NOT_ROUNDED


def _is_compressed(node: Any) -> bool:
    return isinstance(node, CompressedState)


def _in_dtype_of(before: Any, after: Any) -> Any:
    """Returns the array `after` in the dtype of the array `before`."""
    changed = jnp.result_type(after) != jnp.result_type(before)
    return jnp.asarray(after, jnp.result_type(before)) if changed else after


def _second_moments(state: Any) -> Iterator[Any]:
    """Yields all fields `nu` of a state."""
    for node in jax.tree.leaves(state, is_leaf=_has_second_moments):
        if _has_second_moments(node):
            yield node.nu
            yield from _second_moments([x for field, x in zip(node._fields, node, strict=True) if field != "nu"])


def _with_second_moments(state: Any, change: Callable[[Any], Any]) -> Any:
    """Returns the state with `change` applied to every array of its fields `nu`."""

    def at(node: Any) -> Any:
        if not _has_second_moments(node):
            return node
        others = {field: x for field, x in zip(node._fields, node, strict=True) if field != "nu"}
        return node._replace(nu=jax.tree.map(change, node.nu), **_with_second_moments(others, change))

    return jax.tree.map(at, state, is_leaf=_has_second_moments)


def _is_rounded(x: Any) -> bool:
    return jnp.result_type(x) in (jnp.float32, jnp.bfloat16, jnp.float16)


def _is_byte(x: Any) -> bool:
    return bool(jnp.result_type(x) == jnp.uint8)


# Numbers ----------------------------------------------------------------------------------------------


def _to_bfloat16(x: jax.Array, chances: jax.Array) -> jax.Array:
    """Rounds at random: adds 16 random bits to a float32 and cuts its lower 16 bits off.

    The chance that this rounds up is the number in the lower 16 bits of `x`, divided by 2¹⁶.
    """
    pattern = jax.lax.bitcast_convert_type(x, jnp.uint32) + (chances & 0xFFFF)
    cut = jax.lax.bitcast_convert_type(pattern & jnp.uint32(0xFFFF0000), jnp.float32)
    return jnp.where(jnp.isfinite(x), cut, x).astype(jnp.bfloat16)


def _to_codes(x: jax.Array, chances: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns codes of entries, and the power of two that the largest code stands for; NaN if an entry has no code."""
    _, exponent = jnp.frexp(jnp.max(x, initial=0.0))
    top = jnp.ldexp(jnp.float32(1.0), jnp.minimum(exponent, 127))
    # Otherwise an infinite or NaN entry would look finite, and a negative one would be zero.
    top = jnp.where(jnp.all(jnp.isfinite(x) & (x >= 0)), top, jnp.nan)
    place = jnp.log2(jnp.maximum(x / top, jnp.finfo(jnp.float32).tiny)) * _PER_OCTAVE + 255.0
    lower = jnp.clip(jnp.floor(place), 0.0, 254.0)
    below, above = (_size_of_code(code, top) for code in (lower, lower + 1.0))
    share = (x - below) / (above - below)
    code = lower + (share * 2.0**24 > (chances >> 8).astype(jnp.float32)).astype(jnp.float32)
    # A positive entry is never stored as zero: Adam would divide its first moment by eps alone.
    return jnp.where((x > 0) & (code < 1), 1.0, code).astype(jnp.uint8), top


def _size_of_code(code: jax.Array, top: jax.Array) -> jax.Array:
    """The number that a code stands for."""
    code = code.astype(jnp.float32)
    return jnp.where(code > 0, top * jnp.exp2((code - 255.0) / _PER_OCTAVE), 0.0 * top)
