"""Tests for `check` whether an optimizer takes two weight sets of one function to one function. It needs no loss."""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from gauge_optax.binding import leaves_by_path, with_leaves
from gauge_optax.gauges.bound import bound
from gauge_optax.linalg import real_dtype
from gauge_optax.transformation import GaugeTransformation, in_computing_dtype, on_any_mesh
from gauge_optax.wrapped import walk
from gauge_optax.xla import one_program, quick_noise

_SCALE = 0.7  # the size of the random element between the twins: factors of up to 2, and turns by about a right angle
_LARGE = 2.0**20  # a gradient this many times larger is above the limit of every clip; a power of two rounds nothing
# Twins have parted if they differ by more than `_PARTED` times a step, and by more than `_ROUNDED` times what roundoff
# of weights and gradients does to one of them (`_ROUNDED_THERE` if they are compared on the slice). Measured on 15
# gauges of tests/cases.py in float32: at most 2.2 times under a quotient of Adam or Muon, and at least 17 times where a
# clip of entries stands in front of it.
_PARTED, _ROUNDED, _ROUNDED_THERE = 1e-3, 10.0, 4.0


def parted(tx: optax.GradientTransformation, params: Any, grads: Any, frozen: frozenset[str]) -> str | None:
    """The leaf in which twins differ most after an optimizer's steps; None if the steps keep them together.

    Twins are weight sets θ and g·θ of one function. If steps depend on the function alone, they lead from them to
    weights θ_t and g·θ_t. The gradient at g·θ follows from that at θ. Four steps are taken: with the given gradient,
    with noise of its size, and twice with noise so large that every clip acts. If the twins seem to part, the steps are
    also taken from a third point, which is θ changed by roundoff. It shows how much of the difference is roundoff.

    Args:
      tx: the optimizer; the gauges are those of the quotients inside it.
      params: θ.
      grads: a gradient at θ.
      frozen: paths of the leaves that never change.

    >>> gauge = go.rescale({"up": "_ channel"}, {"down": "channel _"})
    >>> params = {"up": jnp.ones((2, 3)), "down": jnp.ones((3, 2))}
    >>> grads = jax.tree.map(lambda x: x * jnp.arange(1.0, 4.0) if x.shape[1] == 3 else x, params)
    >>> inner = go.quotient_adamw(1e-2, gauge)
    >>> parted(inner, params, grads, frozenset())
    >>> parted(optax.chain(optax.clip(0.1), inner), params, grads, frozenset())
    'down'
    """
    gauges = _gauges_of_quotients(tx)
    if not gauges:
        return None
    params, grads = map(_computed, (params, grads))
    init, update, step = one_program(tx.init), one_program(tx.update), one_program(optax.apply_updates)
    moved = on_any_mesh(one_program(functools.partial(_moved, gauges)))
    on_slice = on_any_mesh(one_program(functools.partial(_on_slice, gauges)))
    elements = on_any_mesh(one_program(functools.partial(_elements, gauges, frozen)))(params)
    across = on_any_mesh(one_program(functools.partial(_across, gauges)))
    eps = float(jnp.finfo(real_dtype()).eps)
    shake, noise = (on_any_mesh(one_program(function)) for function in (noisy, _noise))
    kinds = (1.0, 2), (_LARGE, 3), (_LARGE, 4)

    def farthest(names: Sequence[str]) -> str | None:
        points = {"one": params, "twin": moved(elements, params, grads)[0], "rounded": shake(params, eps, 1)}
        points = {name: points[name] for name in names}
        states = {name: init(point) for name, point in points.items()}
        for number in range(1 + len(kinds)):
            gradient = across(points["one"], noise(grads, *kinds[number - 1]) if number else grads)
            given = {"one": gradient, "twin": moved(elements, points["one"], gradient)[1]}
            if "rounded" in names:
                given["rounded"] = shake(gradient, eps, 5 + number)
            sizes = {}
            for name in names:
                updates, states[name] = update(given.pop(name), states[name], points[name])
                before, points[name] = points[name], step(points[name], updates)
                sizes[name] = _norm(_distances(points[name], before))
            ends = [points["twin"], *(moved(elements, points[name], gradient)[0] for name in names if name != "twin")]
            if _beyond(_ROUNDED, sizes["twin"], *ends):
                # A `gauge_fix` moves both twins to the same point of the orbit, and not to θ_t and g·θ_t. Compare slice
                # points, which are equal if both are weights of one function.
                return _beyond(_ROUNDED_THERE, 0.0, *map(on_slice, ends))
        return None

    # Two runs are usually enough, and need less memory. The run from the third point follows only if the twins part.
    return farthest(("one", "twin")) and farthest(("one", "rounded", "twin"))


def _beyond(times: float, step: float, twin: Any, one: Any, rounded: Any = None) -> str | None:
    """The leaf in which a twin differs most from where it should be; None if the difference is small enough.

    Args:
      times: how many times the difference that roundoff makes is small enough.
      step: the norm of the twin's step. `_PARTED` times this is small enough too.
      twin: the twin.
      one: where the twin should be.
      rounded: where the point that was changed by roundoff leads to; None if there is none.
    """
    apart, roundoff = _distances(twin, one), {} if rounded is None else _distances(rounded, one)
    least = max(_PARTED * step, times * _norm(roundoff))
    return max(apart, key=lambda path: apart[path]) if np.isfinite(least) and _norm(apart) > least else None


def _gauges_of_quotients(tx: Any) -> list[Any]:
    """The gauges of every `quotient` and every link of DDC in `tx`.

    Other transformations with gauges only measure or move weights, and do not keep twins together.
    """
    gauges: dict[Any, None] = {}

    def keep(thing: Any) -> bool:
        ours = isinstance(thing, GaugeTransformation) and (thing.inner is not None or thing.linked is not None)
        gauges.update(dict.fromkeys(thing.gauges) if ours else {})
        return ours

    walk(tx, keep)
    return list(gauges)


def _elements(gauges: Sequence[Any], frozen: frozenset[str], params: Any) -> list[Any]:
    """A random element of each gauge. It is the identity for copies that optimizers leave alone (frozen leaves)."""
    b, made = bound(tuple(gauges), params, frozen), list[Any]()
    acting = {part.label for part in b.slice.acting}
    for number, (gauge, copies) in enumerate(zip(gauges, b.copies, strict=True)):
        element, still = gauge.sample(jax.random.key(number), params, _SCALE), gauge.identity(params)
        left = [copy.key for copy in copies if any(part.label not in acting for part in copy.parts)]
        if left:
            element = element | {key: still[key] for key in left} if isinstance(element, dict) else still
        made.append(element)
    return made


def _moved(gauges: Sequence[Any], elements: Sequence[Any], params: Any, grads: Any) -> tuple[Any, Any]:
    """Returns g·θ and the gradient at g·θ: the given gradient at θ, pulled back along the move from g·θ to θ."""
    for gauge, element in zip(gauges, elements, strict=True):
        params = gauge.act(element, params)

        def back(real: Any, gauge: Any = gauge, element: Any = element, params: Any = params) -> Any:
            return _real(gauge.act(gauge.inverse(element), with_leaves(params, real)))

        grads = with_leaves(grads, jax.vjp(back, _real(params))[1](_real(grads))[0])
    return params, grads


def _across(gauges: Sequence[Any], params: Any, grads: Any) -> Any:
    """Makes a covector one that a gradient could be: its product with every tangent along the orbit becomes zero."""
    whole = bound(tuple(gauges), params).whole

    def horizontal(tangent: Any) -> Any:
        return _real(tangent) | dict(whole.horizontal_at(params, with_leaves(params, tangent)))

    return with_leaves(grads, jax.vjp(horizontal, _real(grads))[1](_real(grads))[0])


def _on_slice(gauges: Sequence[Any], params: Any) -> Any:
    """The point of the slice on the orbit of the parameters."""
    whole = bound(tuple(gauges), params).whole
    x = whole.values(params)
    return with_leaves(params, _real(params) | dict(whole.enter(whole.read(x).elements, x).point))


def _real(tree: Any) -> dict[str, Any]:
    return {path: x for path, x in leaves_by_path(tree).items() if jnp.issubdtype(jnp.result_type(x), jnp.floating)}


def _computed(tree: Any) -> Any:
    """A tree of arrays whose real leaves have the dtype in which gauges compute."""
    arrays = jax.tree.map(jnp.asarray, tree)
    return with_leaves(arrays, {path: in_computing_dtype(x) for path, x in _real(arrays).items()})


def noisy(tree: Any, size: float | jax.Array, seed: int | jax.Array) -> Any:
    """The tree with every real entry multiplied by 1 + a random number of magnitude at most `size`."""

    def shaken(x: jax.Array, seed: Any) -> jax.Array:
        wide = in_computing_dtype(x)  # JAX multiplies no 8-bit float with another
        return (wide * (1.0 + size * quick_noise(wide, seed))).astype(x.dtype)

    return _drawn(tree, seed, shaken)


def _noise(grads: Any, most: jax.Array, seed: jax.Array) -> Any:
    """Noise of very different sizes, some of which a clip cuts off.

    An entry is the largest gradient of its leaf, times a random sign and factor. Factors lie between 1/`most` and
    `most`, times a number below 1.
    """

    def noise(x: jax.Array, seed: jax.Array) -> jax.Array:
        return jnp.max(jnp.abs(x), initial=0.0) * most ** quick_noise(x, seed + 1000) * quick_noise(x, seed)

    return _drawn(grads, seed, noise)


def _drawn(tree: Any, seed: Any, entries: Callable[[jax.Array, Any], jax.Array]) -> Any:
    """The tree with every real leaf x replaced by entries(x, seed), where each leaf gets its own seed."""
    leaves = enumerate(_real(tree).items())
    return with_leaves(tree, {path: entries(x, 2000 * seed + number) for number, (path, x) in leaves})


def _distances(a: Any, b: Any) -> dict[str, float]:
    """Leaf path → the norm of the difference of two trees."""
    others = _real(b)
    return {path: float(np.linalg.norm(np.subtract(x, others[path], dtype=np.float64))) for path, x in _real(a).items()}


def _norm(distances: Mapping[str, float]) -> float:
    return math.hypot(*distances.values())
