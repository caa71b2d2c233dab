"""Whether an optimizer with gauges keeps weights of one function together. `check` asks it; no loss is needed."""

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

_SCALE = 0.7  # of the element between the twins: factors of up to 2, and turns by about a right angle
_LARGE = 2.0**20  # so many times a usual gradient is above the limit of every clip; a power of two rounds nothing
# Twins have parted if they differ by more than this share of a step, and by more than this many times what roundoff of
# weights and gradients does to one of them. Measured on 15 gauges of tests/cases.py in float32: at most 2.2 times
# under a quotient of Adam or Muon, and at least 17 times where a clip of entries stands in front of it.
_PARTED, _ROUNDED, _ROUNDED_THERE = 1e-3, 10.0, 4.0


def parted(tx: optax.GradientTransformation, params: Any, grads: Any, frozen: frozenset[str]) -> str | None:
    """The leaf in which twins differ most after an optimizer's steps; None if the steps keep them together.

    Twins are weight sets θ and g·θ of one function. Steps that see the function alone lead to θ_t and g·θ_t. The
    gradient at g·θ follows from that at θ. Four steps are taken: with the given gradient, with noise of its size, and
    twice with noise so large that every clip acts. If the twins seem to part, a third run, from where roundoff moves θ,
    shows what roundoff explains.

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
                # A `gauge_fix` leads twins to one point of the orbit, where they stay together.
                return _beyond(_ROUNDED_THERE, 0.0, *map(on_slice, ends))
        return None

    # Mostly the runs without roundoff decide, and hold less in memory at once.
    return farthest(("one", "twin")) and farthest(("one", "rounded", "twin"))


def _beyond(times: float, step: float, twin: Any, one: Any, rounded: Any = None) -> str | None:
    """The leaf in which a twin differs most from where it should be, `one`; None if its step or roundoff explains that.
    """
    apart, roundoff = _distances(twin, one), {} if rounded is None else _distances(rounded, one)
    least = max(_PARTED * step, times * _norm(roundoff))
    return max(apart, key=lambda path: apart[path]) if np.isfinite(least) and _norm(apart) > least else None


def _gauges_of_quotients(tx: Any) -> list[Any]:
    """The gauges of every `quotient` and every link of DDC in `tx`; other transformations only measure or move weights.
    """
    gauges: dict[Any, None] = {}

    def keep(thing: Any) -> bool:
        ours = isinstance(thing, GaugeTransformation) and (thing.inner is not None or thing.linked is not None)
        gauges.update(dict.fromkeys(thing.gauges) if ours else {})
        return ours

    walk(tx, keep)
    return list(gauges)


def _elements(gauges: Sequence[Any], frozen: frozenset[str], params: Any) -> list[Any]:
    """A random element of each gauge, which is the identity for copies that optimizers leave alone."""
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
    """g·θ and the gradient there: the given one, of θ, pulled back along the move from g·θ to θ."""
    for gauge, element in zip(gauges, elements, strict=True):
        params = gauge.act(element, params)

        def back(real: Any, gauge: Any = gauge, element: Any = element, params: Any = params) -> Any:
            return _real(gauge.act(gauge.inverse(element), with_leaves(params, real)))

        grads = with_leaves(grads, jax.vjp(back, _real(params))[1](_real(grads))[0])
    return params, grads


def _across(gauges: Sequence[Any], params: Any, grads: Any) -> Any:
    """A covector less what it says of motions along orbits, as the gradient of a function says nothing of them."""
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
    """The tree, every real entry changed by a random share of at most `size` of itself."""

    def shaken(x: jax.Array, seed: Any) -> jax.Array:
        return (in_computing_dtype(x) * (1.0 + size * quick_noise(x, seed))).astype(x.dtype)

    return _drawn(tree, seed, shaken)


def _noise(grads: Any, most: jax.Array, seed: jax.Array) -> Any:
    """Noise that is up to `most` times as large or small as each leaf of a gradient, so that some of it is clipped."""

    def noise(x: jax.Array, seed: jax.Array) -> jax.Array:
        return jnp.max(jnp.abs(x), initial=0.0) * most ** quick_noise(x, seed + 1000) * quick_noise(x, seed)

    return _drawn(grads, seed, noise)


def _drawn(tree: Any, seed: Any, entries: Callable[[jax.Array, Any], jax.Array]) -> Any:
    """The tree with `entries` of each real leaf and a seed of its own."""
    leaves = enumerate(_real(tree).items())
    return with_leaves(tree, {path: entries(x, 2000 * seed + number) for number, (path, x) in leaves})


def _distances(a: Any, b: Any) -> dict[str, float]:
    """Leaf path → the norm of the difference of two trees."""
    others = _real(b)
    return {path: float(np.linalg.norm(np.subtract(x, others[path], dtype=np.float64))) for path, x in _real(a).items()}


def _norm(distances: Mapping[str, float]) -> float:
    return math.hypot(*distances.values())
