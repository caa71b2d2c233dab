"""Uses of `align`: the distance of two functions, the mean of several networks, and the line between two networks."""

from collections.abc import Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from gauge_optax.binding import inexact_leaves, leaves_by_path, with_leaves
from gauge_optax.errors import binding_error, kind_of
from gauge_optax.gauges.gauge import Gauges, Product, product
from gauge_optax.linalg import norm_of, real_dtype
from gauge_optax.orbit._align import align, check_same_tree
from gauge_optax.states.statistics import require_no_statistics, require_no_statistics_behind
from gauge_optax.transformation import in_computing_dtype, in_dtype_of, in_interval, on_any_mesh, require_arrays

Params = TypeVar("Params")


@on_any_mesh
def distance(a: Any, b: Any, gauges: Gauges) -> float:
    """Returns how far two functions are apart: the relative distance of their slice points after alignment.

    Args:
      a: parameters.
      b: parameters with the same structure and shapes.
      gauges: a gauge, or a sequence of them.

    Returns:
      ‖â − g·b̂‖/‖â‖ over all leaves of real or complex numbers. Here â and b̂ are the slice points of a and b; g is the
      element that `align` returns for them. For two sets of weights of one function the number is zero, up to roundoff,
      unless permutations of heads are nested beside a `head_linear` (see `align`).
      If `align` finds the nearest element, the number depends on the two functions alone, because slice points do not
      depend on the scales and constants that gauges can change. If `align` ends in another local minimum, the number is
      larger.

    Raises:
      ValueError: the errors of `align`.

    >>> gauge = go.rescale({"up": "_ channel"}, {"down": "channel _"})
    >>> a = {"up": jnp.array([[1.0, 2.0]]), "down": jnp.array([[3.0], [1.0]])}
    >>> b = {"up": jnp.array([[2.0, 1.0]]), "down": jnp.array([[1.5], [2.0]])}
    >>> round(go.orbit.distance(a, b, gauge), 4)  # one function
    0.0
    """
    require_arrays("distance", a, b)
    check_same_tree("distance", a, b)
    group = product(gauges)
    require_no_statistics_behind("distance", group._bound(a).whole, a)
    first, second = (_slice_point(group, x) for x in (a, b))
    return relative_difference(group.act(align(first, second, group), second), first)


def average(trees: Sequence[Params], gauges: Gauges) -> Params:
    """Returns the mean of several sets of weights, after all of them have been aligned to the first.

    Args:
      trees: parameters, all of one structure and of the same shapes.
      gauges: a gauge, or a sequence of them.

    Returns:
      Parameters, every leaf in the dtype of the first tree; leaves that are no real or complex numbers are those of the
      first.

    Raises:
      ValueError: no trees; the errors of `align`.

    All trees are aligned to the first, and not to a mean of other trees. The result then does not depend on the order
    of the other trees, and every tree is aligned to a trained network.

    >>> gauge = go.permutation({"up": "_ channel", "down": "channel _"})
    >>> a = {"up": jnp.array([[1.0, 2.0]]), "down": jnp.array([[3.0], [4.0]])}
    >>> b = {"up": jnp.array([[2.5, 1.0]]), "down": jnp.array([[4.0], [3.0]])}
    >>> go.orbit.average([a, b], gauge)["up"].round(2).tolist()
    [[1.0, 2.25]]

    Reference: Git Re-Basin, §3; deviation: its Algorithm 3 (MergeMany) aligns each tree to the mean of the others.
    """
    if not isinstance(trees, Sequence) or not trees:
        raise binding_error(
            "average", "no list of trees", f"an empty {type(trees).__name__}" if isinstance(trees, Sequence) else
            kind_of(trees), "at least one tree of parameters", "pass [params_a, params_b]",
        )
    require_no_statistics("average", trees)
    return _average(*trees, group=product(gauges))


@on_any_mesh
def _average(first: Params, *others: Params, group: Product) -> Params:
    aligned = [first, *(group.act(align(first, tree, group), tree) for tree in others)]
    leaves = [leaves_by_path(tree) for tree in aligned]
    same = {path: jnp.stack([in_computing_dtype(tree[path]) for tree in leaves]) for path in inexact_leaves(first)}
    means = {path: jnp.mean(stack, 0) for path, stack in same.items()}
    return in_dtype_of(first, means)


def interpolate(a: Params, b: Params, t: float | jax.Array) -> Params:
    """Returns the point (1 − t)·a + t·b of the line between two sets of weights. Align b to a first.

    Args:
      a: parameters.
      b: parameters with the same structure and shapes.
      t: 0 for a, 1 for b; a number or an array without axes.

    Returns:
      Parameters, every leaf in the dtype that it has in a; leaves that are no real or complex numbers are those of a.

    Raises:
      ValueError: trees that differ in structure or shapes; a `t` that is no real number, or has axes.

    >>> go.orbit.interpolate({"w": jnp.zeros(2)}, {"w": jnp.ones(2)}, 0.25)["w"].tolist()
    [0.25, 0.25]
    """
    check_same_tree("interpolate", a, b)
    require_no_statistics("interpolate", [a])
    if not in_interval(t, "[-inf, inf]"):
        raise binding_error(
            "interpolate", "a `t` that is no single number",
            f"an array of {t.dtype}, shape {jnp.shape(t)}" if hasattr(t, "dtype") else f"t={t!r}",
            "a real number, or an array of one without axes",
            "pass one number, such as 0.5, and call it once for each",
        )
    start, end = inexact_leaves(a), leaves_by_path(b)
    t = t if isinstance(t, int | float) else jnp.asarray(t, real_dtype())  # in bfloat16, 1 − t and t would not add to 1
    between = {path: (1.0 - t) * in_computing_dtype(x) + t * in_computing_dtype(end[path]) for path, x in start.items()}
    return in_dtype_of(a, between)


def relative_difference(value: Any, expected: Any) -> float:
    """‖value − expected‖/‖expected‖ over all leaves of real or complex numbers; ‖value‖ if `expected` is zero."""
    leaves = {path: in_computing_dtype(x) for path, x in inexact_leaves(expected).items()}
    pairs = leaves_by_path(value)
    apart, size = norm_of(in_computing_dtype(pairs[p]) - x for p, x in leaves.items()), norm_of(leaves.values())
    return apart / size if size else apart


def _slice_point(group: Any, params: Any) -> Any:
    """The slice point as a tree like `params`. Rotations are not undone: heads keep their stored basis."""
    s = group._bound(params).whole
    _, entered = s.unturned_slice_point(params)
    return with_leaves(params, {path: x - s.added[path] for path, x in entered.point.items()})
