"""Masks and labels from path patterns, for `optax.masked`, `optax.partition` and decay masks. Not here: bindings."""

from collections.abc import Callable, Mapping
from typing import Any

from gauge_optax.binding.paths import binding_error, leaf_shape, leaves_by_path, match, nearest, with_leaves

_NONE = object()


def by_path(values: Mapping[str, Any], default: Any = _NONE) -> Callable[[Any], Any]:
    """A function from a tree to one like it that says, by path, what each leaf gets: a mask, or labels.

    Args:
      values: path pattern, as in gauges, → value; the first that matches a leaf counts.
      default: value of leaves that no pattern matches; without one each leaf must have a pattern.

    Returns:
      What `optax.masked`, `optax.partition` and `mask=` take. Calling it raises ValueError for a pattern that matches
      no leaf, and for a leaf without a value.

    >>> params = {"blocks": [{"kernel": jnp.ones((2, 2)), "bias": jnp.ones(2)}], "head": {"kernel": jnp.ones((2, 3))}}
    >>> go.by_path({"**/bias": False}, default=True)(params)
    {'blocks': [{'bias': False, 'kernel': True}], 'head': {'kernel': True}}
    >>> labels = go.by_path({"head/**": "head", "**": "body"})
    >>> tx = optax.partition({"head": optax.adamw(1e-4), "body": optax.adamw(1e-3)}, labels)
    """

    def of(params: Any) -> Any:
        paths = leaves_by_path(params)
        found: dict[str, Any] = {}
        for pattern, value in values.items():
            own = [path for path in paths if match("by_path", pattern, path) is not None]
            if not own and paths:
                close = nearest(pattern, {path: leaf_shape(x) for path, x in paths.items()}, 0)
                raise binding_error(
                    "by_path", f"no leaf matches '{pattern}'", f"nearest {', '.join(path for path, _ in close)}",
                    "a pattern of some leaf's path", "correct it, or leave it out")
            found = {**dict.fromkeys(own, value), **found}
        left = [path for path in paths if path not in found]
        if left and default is _NONE:
            raise binding_error(
                "by_path", f"no pattern for '{left[0]}'", f"{len(left)} leaves without a value", "one for every leaf",
                "give a default, or '**' last")
        return with_leaves(params, {**dict.fromkeys(left, default), **found})

    return of
