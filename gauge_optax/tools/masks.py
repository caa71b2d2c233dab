"""Masks and labels from path patterns, for `optax.masked`, `optax.partition` and `mask=` arguments."""

from collections.abc import Callable, Mapping
from typing import Any

from gauge_optax.binding.leaves import leaf_shape, leaves_by_path, with_leaves
from gauge_optax.binding.paths import match, no_match
from gauge_optax.errors import binding_error, counted, kind_of

_NO_DEFAULT = object()  # None is a value that a user may want


def by_path(values: Mapping[str, Any], default: Any = _NO_DEFAULT) -> Callable[[Any], Any]:
    """Makes a function that turns a tree into a mask, or into labels, by the paths of its leaves.

    Args:
      values: path pattern (as in gauges) → value. If several patterns match a leaf, the first gives its value.
      default: the value of leaves that no pattern matches. Without a default, every leaf must match a pattern.

    Returns:
      A function from a tree to a tree of the same structure, as `optax.masked`, `optax.partition` and `mask=` take it.
      Calling it raises ValueError if a pattern matches no leaf, or a leaf has no value.

    Raises:
      ValueError: `values` that is no dictionary.

    >>> params = {
    ...     "blocks": [{"kernel": jnp.ones((2, 2)), "bias": jnp.ones(2)}],
    ...     "head": {"kernel": jnp.ones((2, 3))},
    ... }
    >>> go.tools.by_path({"**/bias": False}, default=True)(params)
    {'blocks': [{'bias': False, 'kernel': True}], 'head': {'kernel': True}}
    >>> labels = go.tools.by_path({"head/**": "head", "**": "body"})
    >>> tx = optax.partition({"head": optax.adamw(1e-4), "body": optax.adamw(1e-3)}, labels)
    """

    if not isinstance(values, Mapping):
        raise binding_error(
            "by_path", "'values' that are no dictionary", kind_of(values), "path pattern → value",
            "write by_path({'**/bias': False}, default=True)")
    values = dict(values)  # as they are now: the function may be called after they change

    def tree_of_values(params: Any) -> Any:
        leaves = leaves_by_path(params)
        out: dict[str, Any] = {}
        for pattern, value in values.items():
            paths = [path for path in leaves if match("by_path", pattern, path) is not None]
            # `optax.tree.map_params` passes trees without leaves; no pattern can match there.
            if leaves and not paths:
                shapes = {path: leaf_shape(leaf) for path, leaf in leaves.items()}
                absent = f"take '{pattern}' out if the tree has no such leaf"
                raise no_match("by_path", pattern, shapes, 0, "the path of at least one leaf", absent=absent)
            for path in paths:
                out.setdefault(path, value)
        missing = [path for path in leaves if path not in out]
        if missing and default is _NO_DEFAULT:
            raise binding_error(
                "by_path",
                f"no pattern for '{missing[0]}'",
                f"{counted(len(missing), 'leaf', 'leaves')} without a value",
                "one for every leaf",
                "give a default, or '**' last",
            )
        return with_leaves(params, dict.fromkeys(missing, default) | out)

    return tree_of_values
