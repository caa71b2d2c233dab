"""Reads weights that the optimizer inside a `quotient` keeps, such as averages, and restarts that optimizer's state.

A `quotient` has two coordinate systems: the user has the stored weights θ; the inner optimizer sees the slice point
θ̂ = F⁻¹·θ, where the group element F is the frame in the state. A function of the inner state and of weights,
such as the evaluation weights of schedule-free methods, has to be computed on the slice. Its result is then moved back
by F.
"""

from collections.abc import Callable
from typing import Any

import jax
import optax

from gauge_optax.binding import leaves_by_path, structures_apart, with_leaves
from gauge_optax.errors import binding_error, counted
from gauge_optax.gauges.bound import slice_of_frame
from gauge_optax.optimizers._quotient import QuotientState
from gauge_optax.optimizers.compress import compressed_like, with_numbers
from gauge_optax.slice import Elements, Slice, Undone
from gauge_optax.transformation import cast_like, layout, require_params
from gauge_optax.wrapped import wrapped_by

Fn = Callable[[Any, Any], Any]


def evaluate(fn: Fn, state: Any, params: Any) -> Any:
    """Applies a function of the inner state and the weights on the slice, and moves the result back to stored weights.

    Args:
      fn: (inner state, weights) → weights, such as `optax.contrib.schedule_free_eval_params`, or `lambda s, p: s.slow`
        for weights that the inner optimizer keeps. It gets the state of the optimizer inside the `quotient`, and the
        weights that this optimizer sees. If second moments are stored compressed, `fn` gets them in float32, in the
        optimizer's usual state and not in a `CompressedState`.
      state: the state of the optimizer, with one `quotient` (or an alias of it) somewhere inside.
      params: the stored weights θ that the state belongs to.

    Returns:
      The weights that `fn` returned, moved by F to stored weights: a tree like `params`. Leaves that `optax.masked` or
      `optax.partition` hides from the quotient are returned as they are in `params`.

    Raises:
      ValueError: a state without a `quotient`, or with several; a state whose gauges have not been bound to any tree in
        this process; weights of another structure from `fn`.

    >>> gauge = go.rescale({"up": "_ channel"}, {"down": "channel _"})
    >>> params = {"up": jnp.full((1, 2), 3.0), "down": jnp.ones((2, 1))}
    >>> tx = go.quotient(optax.contrib.schedule_free_sgd(0.1), gauge)
    >>> state = tx.init(params)
    >>> averaged = go.orbit.evaluate(optax.contrib.schedule_free_eval_params, state, params)
    >>> averaged["up"].round(4)  # before the first step, the weights themselves
    Array([[3., 3.]], dtype=float32)

    Reference: Defazio et al. 2024 for schedule-free methods; docs/design.md §3 for the maps.
    """
    require_params("evaluate", params)
    inside, whole = _one_quotient("evaluate", with_numbers(state)), params
    params = _as_seen(state, inside, params)

    def on_slice(inside: Any, params: Any) -> Any:
        entered, seen = _points(inside, params)
        made = fn(inside.inner_state, with_leaves(params, seen.point))
        if apart := structures_apart(made, params):
            raise binding_error(
                "evaluate", "fn returns no weights", apart[0], f"the structure of params: {apart[1]}",
                "return one tree of weights, such as state.z or optax.contrib.schedule_free_eval_params(state, params)")
        s = _slice(inside, params)
        values = entered.leave(seen.leave(s.vectors(made)))
        stored = {path: x - s.added[path] for path, x in values.items()}
        return with_leaves(made, cast_like(stored, params))

    made = layout(params).run(on_slice, inside, params, like=params)
    return made if params is whole else with_leaves(whole, leaves_by_path(made))


def restart(
    tx: optax.GradientTransformation, state: Any, params: Any, choose: Callable[[Any, Any], Any] | None = None
) -> Any:
    """Restarts the inner optimizer of a `quotient` at the current slice point. The frame stays the same.

    Use it in place of `tx.init(params)`, which would also compute a new frame. Moments of the old state that `choose`
    keeps belong to the coordinates of the old frame.

    Args:
      tx: the optimizer, with one `quotient` (or an alias of it) somewhere inside.
      state: its state.
      params: the stored weights θ.
      choose: (old inner state, fresh inner state) → inner state, which keeps a part of the old one, for example
        `lambda old, new: (old[0]._replace(nu=new[0].nu), *old[1:])`. By default all of it is fresh. If second moments
        are stored compressed, `choose` gets them in float32, in the optimizer's usual state.

    Returns:
      A state like `state`, in which second moments are compressed again if they were.

    Raises:
      ValueError: an optimizer or a state without a `quotient`, or with several; another structure from `choose`.

    >>> gauge = go.rescale({"up": "_ channel"}, {"down": "channel _"})
    >>> params = {"up": jnp.full((1, 2), 3.0), "down": jnp.ones((2, 1))}
    >>> tx = go.quotient_adamw(0.1, gauge)
    >>> _, state = tx.update(params, tx.init(params), params)
    >>> fresh = go.orbit.restart(tx, state, params)
    >>> int(state.inner_state[0].count), int(fresh.inner_state[0].count)
    (1, 0)

    Reference: docs/design.md §3.
    """
    require_params("restart", params)
    stored, state = state, with_numbers(state)
    inside = _one_quotient("restart", state)
    inner = wrapped_by(tx, "inner", "linked")
    if len(inner) != 1:
        raise _no_quotient("restart", "an optimizer", len(inner))
    params = _as_seen(state, inside, params)

    def fresh(inside: Any, params: Any) -> Any:
        entered, seen = _points(inside, params)
        new = with_numbers(inner[0].init(with_leaves(params, (entered if choose is None else seen).point)))
        kept = new if choose is None else choose(inside.inner_state, new)
        return inside._replace(inner_state=kept)

    made = layout(params).run(fresh, inside, params)
    if apart := structures_apart(made.inner_state, inside.inner_state):
        raise binding_error(
            "restart", "another structure of the inner state", *apart,
            "give restart the optimizer that made the state" if choose is None else
            "let choose return a state with the structure of its second argument")
    if choose is None and inside.offset:  # a fresh inner optimizer starts at the slice point, without an offset
        parts = (part for part in _slice(inside, params).parts if part.label in inside.offset)
        made = made._replace(offset={part.label: part.identity() for part in parts})
    renewed = jax.tree.map(lambda node: made if _is_quotient(node) else node, state, is_leaf=_is_quotient)
    return compressed_like(stored, renewed)


def _slice(inside: Any, params: Any) -> Slice:
    return slice_of_frame(inside.frame, params)


def _points(inside: Any, params: Any) -> tuple[Undone, Undone]:
    """The slice point, and the point that the inner optimizer sees, each with the maps back to where it came from.

    The two points are equal, unless the `quotient` has `pin=False`: then they differ by the state's `offset`.
    """
    s = _slice(inside, params)
    f: Elements = s.checked(inside.frame)
    entered = s.enter(f, s.values(params))
    return entered, s.enter(inside.offset, entered.point)


def _as_seen(state: Any, inside: Any, params: Any) -> Any:
    """The tree that the quotient sees: `params`, with `MaskedNode`s where Optax's wrappers hide leaves from it.

    A state does not hold the mask. But below a `MaskedState`, the trees of the inner state that are like `params`, such
    as moments, have a `MaskedNode` for every hidden leaf. A leaf that no such tree has is hidden, unless a gauge binds
    it: the inner optimizer may also mask leaves itself.
    """
    outer = [node for node in jax.tree.leaves(state, is_leaf=_is_mask_state) if _is_mask_state(node)]
    if not any(map(_is_quotient, jax.tree.leaves(outer, is_leaf=_is_quotient))):
        return params
    paths = with_leaves(params, {path: path for path in leaves_by_path(params)})

    def pieces(node: Any) -> list[tuple[bool, Any]]:
        """Matches a node of the state with the tree of paths. Returns [] if the node is not a tree like `params`.

        Otherwise there is one pair per leaf of the node: whether the leaf is a `MaskedNode`, and the leaf's path (for a
        `MaskedNode` that stands for a whole subtree, the subtree of paths).
        """
        structure: Any
        nodes, structure = jax.tree.flatten(node, is_leaf=_is_masked)
        try:
            pairs = [(_is_masked(x), at) for x, at in zip(nodes, structure.flatten_up_to(paths), strict=True)]
        except (ValueError, TypeError):
            return []
        alike = all(masked or isinstance(at, str) for masked, at in pairs) and not all(masked for masked, _ in pairs)
        return pairs if alike else []

    trees = [node for node in jax.tree.leaves(inside.inner_state, is_leaf=lambda x: bool(pieces(x))) if pieces(node)]
    if not trees:
        return params
    shown = {at for tree in trees for masked, at in pieces(tree) if not masked}
    shown |= set(_slice(inside, params).added)
    leaves = leaves_by_path(params)

    def hidden(at: Any) -> Any:
        """The subtree of `params` at these paths; one `MaskedNode` if all of its leaves are hidden."""
        if not shown & set(jax.tree.leaves(at)):
            return optax.MaskedNode()
        return jax.tree.map(lambda path: leaves[path] if path in shown else optax.MaskedNode(), at)

    structure: Any = jax.tree.structure(trees[0], is_leaf=_is_masked)
    return structure.unflatten([hidden(at) for _, at in pieces(trees[0])])


def _is_masked(node: Any) -> bool:
    return isinstance(node, optax.MaskedNode)


def _is_mask_state(node: Any) -> bool:
    return isinstance(node, optax.MaskedState)


def _is_quotient(node: Any) -> bool:
    return isinstance(node, QuotientState)


def _one_quotient(name: str, state: Any) -> Any:
    found = [node for node in jax.tree.leaves(state, is_leaf=_is_quotient) if _is_quotient(node)]
    if len(found) != 1:
        raise _no_quotient(name, "a state", len(found))
    return found[0]


def _no_quotient(name: str, what: str, count: int) -> ValueError:
    return binding_error(
        name, f"{what} with {counted(count, 'quotient')}", f"{count}", "one, in any wrapper of Optax",
        "pass the part of a partition or chain that has one, such as state.inner_states['body'] (restart: with the "
        "optimizer of this part)" if count else
        "make the optimizer by go.quotient(optimizer, gauges); a restored state needs the structure of "
        "jax.eval_shape(tx.init, params)")
