"""`untie` gives a separate head to a model that computes its logits with its table of embeddings (a tied table).

A tied table embeds tokens in the residual stream. It also computes logits from the stream, after the final norm's scale
has multiplied it. A rotation of the stream rotates the table, and the logits then stay the same only if that scale is
1. With a separate head, whose rows have taken over the scale, every rotation of the stream is a symmetry.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gauge_optax.binding import leaves_by_path, with_leaves
from gauge_optax.errors import binding_error, kind_of
from gauge_optax.transformation import overflow_check, require_arrays

_NAME = "untie"


def untie(
    params: Any, table: str, head: str, scale: str | None = None, *, bias: str | None = None, one_plus: bool = False
) -> Any:
    """Returns weights of the same function with a separate head and a final norm whose scale is 1.

    You have to change the model's code: it must compute logits by `x @ head` in place of `x @ table.T`.

    Args:
      params: nested dictionaries of arrays.
      table: path of the embeddings, (vocab, d).
      head: path of the new leaf, (d, vocab), such as "lm_head/kernel".
      scale: path of the final norm's scale, (d,), which moves into the head; None if the norm has none.
      bias: path of the final norm's bias, (d,), which is divided by the scale.
      one_plus: whether the norm multiplies by 1 plus the stored scale, as Gemma's norms do.

    Returns:
      Parameters with one more leaf, in the table's dtype. Products are computed in float64 and rounded once.

    Raises:
      ValueError: no such leaf, shapes that do not fit, a `head` that is no path, exists already or has leaves below it,
        parameters that are no dictionaries, one leaf as scale and bias, a bias together with a scale of zero in some
        channel, or a leaf of float16 that overflows.

    >>> embed = jnp.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    >>> params = {"embed": embed, "norm": jnp.array([2.0, 10.0])}
    >>> untied = go.orbit.untie(params, table="embed", head="head", scale="norm")
    >>> untied["head"].tolist()
    [[2.0, 6.0, 10.0], [20.0, 40.0, 60.0]]
    >>> untied["norm"].tolist()
    [1.0, 1.0]

    Reference: SpinQuant (Liu et al. 2024), §3, unties the head before it rotates; QuaRot, §4, folds norms' scales.
    """
    leaves = leaves_by_path(params)
    require_arrays(_NAME, params)
    if not isinstance(head, str) or not all(head.split("/")):
        raise binding_error(_NAME, "no path for the head", f"head={head!r}", "keys, joined by /",
                            "write head='lm_head/kernel'")
    if not isinstance(one_plus, bool | np.bool_):
        raise binding_error(_NAME, "bad one_plus", f"one_plus={one_plus!r}", "True or False", "pass one_plus=False")
    if scale is not None and scale == bias:
        raise binding_error(_NAME, "one leaf as scale and as bias", f"'{scale}'", "two leaves", "leave bias out")
    for argument, path in (("table", table), ("scale", scale), ("bias", bias)):
        if path is not None and path not in leaves:
            raise binding_error(
                _NAME, f"no leaf at {argument}='{path}'", ", ".join(list(leaves)[:6]), "the path of a leaf",
                "take the path from the tree, with / between keys")
    if len(rows := np.shape(leaves[table])) != 2:
        raise binding_error(_NAME, f"no table at '{table}'", f"shape {rows}", "(vocab, d)", "give the table of tokens")
    for path in (table, scale, bias):
        if path is not None and not jnp.issubdtype(kind := jnp.result_type(leaves[path]), jnp.floating):
            raise binding_error(
                _NAME, f"not on real numbers: '{path}'", f"a leaf of {kind}", "floating-point leaves",
                "give the paths of trained weights")
    for path in (scale, bias):
        if path is not None and np.shape(leaves[path]) != rows[1:]:
            raise binding_error(
                _NAME, f"'{path}' does not fit the table '{table}'", f"shape {np.shape(leaves[path])}",
                f"{rows[1:]}, one number per channel of the stream", "give the final norm's, not a layer's stack")
    if taken := [path for path in leaves if f"{path}/".startswith(f"{head}/")]:
        raise binding_error(
            _NAME, f"a leaf at head='{head}'", f"'{taken[0]}' of shape {np.shape(leaves[taken[0]])}", "a new path",
            "write a path that params do not have; if this leaf is the head, the model is untied already")
    if bias is not None and scale is None:
        raise binding_error(_NAME, "a bias without a scale", f"bias='{bias}'", "scale='…', which divides it",
                            "leave bias out: it stays what it is")

    def wide(path: str) -> np.ndarray:
        return np.asarray(leaves[path]).astype(np.float64)

    factor = np.ones(rows[1]) if scale is None else wide(scale) + one_plus
    moved = {head: (wide(table) * factor).T}
    if scale is not None:
        moved[scale] = np.full(rows[1], 0.0 if one_plus else 1.0)
    if bias is not None:
        if not np.all(factor):
            raise binding_error(
                _NAME, f"a scale of zero at '{scale}'", f"0 in channel {int(np.argmin(np.abs(factor)))}",
                f"no zero, because '{bias}' is divided by it",
                "set it to a small number, such as 1e-3, first: this changes the outputs a little")
        moved[bias] = wide(bias) / factor
    dtypes = {path: jnp.result_type(leaves[path if path in leaves else table]) for path in moved}
    placed = {path: jnp.asarray(x).astype(dtypes[path]) for path, x in moved.items()}
    overflow_check(_NAME, {path: leaves.get(path, leaves[table]) for path in placed})(placed)
    return _with_leaf(with_leaves(params, {p: x for p, x in placed.items() if p != head}), head, placed[head])


def _with_leaf(tree: Any, path: str, leaf: jax.Array, depth: int = 0) -> Any:
    """Returns a copy of nested dictionaries with one more leaf at `path`, whose first `depth` keys lead to `tree`."""
    above, (key, *rest) = path.split("/")[:depth], path.split("/")[depth:]
    if not isinstance(tree, Mapping):
        raise binding_error(
            _NAME, f"no place for a leaf at '{path}'",
            kind_of(tree) + (f" at '{'/'.join(above)}'" if above else ""), "nested dictionaries",
            f"give head a path that is not below '{'/'.join(above)}'" if above else
            "pass nnx.to_pure_dict(nnx.state(model)), or a dictionary, and give the result to the untied model")
    own: Any = {str(k): k for k in tree}.get(key, key)  # a key of the tree may be an integer
    if own not in tree and tree and not all(isinstance(k, str) for k in tree):
        raise binding_error(
            _NAME, f"no place for a leaf at '{path}'", f"keys that are no strings, such as {next(iter(tree))!r}",
            f"a dictionary of strings for the new key '{key}'", "give head a path below a dictionary of strings")
    of: Any = dict if isinstance(tree, dict) else type(tree)  # such as Flax's FrozenDict and State
    below = tree[own] if own in tree else of({})
    return of({**tree, own: _with_leaf(below, path, leaf, depth + 1) if rest else leaf})
