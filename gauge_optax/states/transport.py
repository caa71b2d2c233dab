"""An optimizer's state carried along when its parameters are moved by hand: what was learned at θ, said at g·θ.

Averages of gradients move as cotangents, by S⁻ᵀ; buffers of updates move as weights do, by S. Second moments of entries
take the square of a factor, and where a gauge mixes entries nothing true can be said of them. A chain is read in its
order: what comes after a preconditioner averages updates, leaf by leaf.

Here: the walk through a state, and the rules of Optax's. Not here: the rules of our own states (`_transport_own`), what
a move does to one array (`_transport_move`), the move of the parameters themselves (`Gauge.act`).
References: "When Equivalent Weights Train Differently" §7; docs/design.md §1.
"""

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from gauge_optax.binding import binding_error, is_empty, leaves_by_path, with_leaves
from gauge_optax.gauges.gauge import Element, Gauge, Gauges, Product, product
from gauge_optax.gauges.instance import Arrays
from gauge_optax.states.moves import Move, moving_part
from gauge_optax.states.rules import RULES, Outgoing, Rule
from gauge_optax.transformation import require_choice

ON_UNKNOWN = ("error", "reset", "keep")


def transport(opt_state: Any, params: Any, gauge: Gauges, element: Element, on_unknown: str = "error") -> Any:
    """The state of an optimizer at θ, carried to g·θ.

    Args:
      opt_state: of an optimizer of ours or of Optax's, of a chain or of a wrapper around one.
      params: θ before or after the move; shapes only.
      gauge: a gauge or a sequence of them. A state of ours does not know its gauges: give it the list that its
        optimizer was given.
      element: g. A dict for one gauge; for a product or a sequence the tuple of its gauges' elements, with the identity
        for those that do not move; traced, it cannot be told from any other.
      on_unknown: what becomes of second moments of entries that a change of basis mixes, and of arrays shaped like a
        moved leaf in states that have no rule here. "error" refuses, "keep" leaves them, "reset" sets all moments of
        that leaf to zero. Adam's bias correction is spent by then, so that with b1=0.9, b2=0.999 the leaf's steps are
        3 times as long at first, 6.6 times after 12, and twice after 290: warm up, or restart the count as well.

    Returns:
      The state, same structure, shapes and dtypes.

    Raises:
      ValueError: another `on_unknown`; an element that is not one of this gauge's; a state of ours that was made with
        other gauges; with "error", what has no rule. Radii of `hyperball` are refused under "reset" too.

    First moments of Optax's: gradients' until a state earlier in the chain has preconditioned the leaf (Adam and its
    family, Lion, Muon, RMS, …), updates' from then on. Adamax and ADOPT keep other averages in Adam's state, which
    cannot be told from it: leave their leaves out, or start them afresh. Of transformations without a state
    (`optax.scale_by_sign`, `add_decayed_weights` before a trace) nothing can be told. States under `optax.partition`
    with a list of gauges each are carried one by one.

    >>> gauge = go.rescale({"up": "_ channel"}, {"down": "channel _"})
    >>> params = {"up": jnp.ones((1, 1)), "down": jnp.ones((1, 1))}
    >>> tx = optax.adam(0.1)
    >>> _, state = tx.update({"up": jnp.full((1, 1), 3.0), "down": jnp.ones((1, 1))}, tx.init(params), params)
    >>> moved = go.transport(state, params, gauge, {"": jnp.log(jnp.array([2.0]))})
    >>> moments = [moved[0].mu["up"] / state[0].mu["up"], moved[0].nu["up"] / state[0].nu["up"]]
    >>> [round(float(x[0, 0]), 3) for x in moments]  # weights times 2: gradients, and with them moments, times 1/2
    [0.5, 0.25]

    Reference: the post's §7. Deviation: its first moments transform like weights. That holds for buffers of updates;
      averages of gradients are cotangents (docs/design.md §1: off by 0.95 under rescalings of log-size 1 otherwise).
    """
    require_choice("transport", "on_unknown", on_unknown, ON_UNKNOWN)
    if is_empty(params):
        return opt_state
    group = product(gauge)
    elements = (element,) if isinstance(gauge, Gauge) and not isinstance(gauge, Product) else element
    _check_element(group, elements, params)
    parts = tuple(moving_part(part, x, params) for part, x in zip(group.parts, elements, strict=True))
    return carried(Move(parts, params, on_unknown), opt_state)


def carried(move: Move, opt_state: Any) -> Any:
    """`transport`, of a move of which more is known than its element says."""
    return _walk(move, opt_state, frozenset(), _Place("the state", ""))[0]


def _check_element(group: Product, element: Element, params: Any) -> None:
    expected = jax.tree.map(jnp.shape, jax.eval_shape(group.identity, params))
    if not isinstance(element, tuple) or jax.tree.map(jnp.shape, element) != expected:
        raise binding_error(
            "transport", "not an element of this gauge", f"shapes {jax.tree.map(jnp.shape, element)}", f"{expected}",
            "pass what its sample, balance or identity returns: a dict for one gauge, a tuple for a sequence",
        )  # fmt: skip


# The walk -------------------------------------------------------------------------------------------


class _Place(NamedTuple):
    """Where in a state the walk is.

    Attributes:
      owner: the nearest NamedTuple.
      path: keys since that one's field, joined by "/".
    """

    owner: str
    path: str

    def at(self, key: str) -> "_Place":
        """One container further in."""
        return self._replace(path=f"{self.path}/{key}" if self.path else key)


def _walk(move: Move, node: Any, outgoing: Outgoing, place: _Place) -> tuple[Any, Outgoing]:
    """A part of a state at g·θ, and the leaves of which updates come out of it."""
    rule = _rule_of(type(node))
    if rule is not None:
        return rule(move, node, outgoing)
    if _is_record(node):
        # A wrapper's fields do not follow one another; what is inside one sees what the wrapper sees.
        found = [_walk(move, x, outgoing, _Place(type(node).__name__, "")) for x in node]
        return type(node)._make(x for x, _ in found), outgoing.union(*(after for _, after in found))
    if type(node) in (tuple, list):
        links = []
        for number, link in enumerate(node):
            new, outgoing = _walk(move, link, outgoing, place.at(str(number)))
            links.append(new)
        return type(node)(links), outgoing
    if type(node) is dict:
        branches = {key: _walk(move, x, outgoing, place.at(str(key))) for key, x in node.items()}
        return {key: x for key, (x, _) in branches.items()}, outgoing.union(*(after for _, after in branches.values()))
    return _walk_others(move, node, outgoing, place)


def _walk_others(move: Move, node: Any, outgoing: Outgoing, place: _Place) -> tuple[Any, Outgoing]:
    """Arrays, and containers that are no part of a chain's structure."""
    treedef: Any
    pairs, treedef = jax.tree_util.tree_flatten_with_path(node, is_leaf=_is_record)
    found = []
    for keys, leaf in pairs:
        own = place.at(jax.tree_util.keystr(keys, simple=True, separator="/")) if keys else place
        found.append(_walk(move, leaf, outgoing, own) if _is_record(leaf) else _array(move, leaf, outgoing, own))
    return treedef.unflatten([x for x, _ in found]), outgoing.union(*(after for _, after in found))


def _is_record(node: Any) -> bool:
    return isinstance(node, tuple) and hasattr(node, "_fields")


def _array(move: Move, array: Any, outgoing: Outgoing, place: _Place) -> tuple[Any, Outgoing]:
    """An array that no rule speaks of; it may be of a leaf, by its path or its shape."""
    if not jnp.issubdtype(jnp.result_type(array), jnp.inexact):
        return array, outgoing
    moved, shape = move.moved, jnp.shape(array)
    named = [path for path in move.shapes if f"/{path}/" in f"/{place.path}/"]
    like = [path for path in moved if shape and move.shapes[path] == shape]
    hit = max(named, key=len) if named else next(iter(like), "")
    if hit not in moved:
        return array, outgoing
    if move.on_unknown == "error":
        what = f"{place.owner}{f' at {place.path}' if place.path else ''}, which may be of '{hit}',"
        raise move.refuse(what, moved[hit], f"an array of shape {shape} in a state without a rule")
    return jnp.zeros_like(array) if move.on_unknown == "reset" else array, outgoing | {hit}


# Optax's states -------------------------------------------------------------------------------------


class _Average(NamedTuple):
    """What a field averages.

    Attributes:
      power: of every entry; 1 for vectors.
      made: whether of what the transformation puts out, rather than of what comes in.
    """

    power: int
    made: bool = False


_FIRST, _SECOND, _SECOND_OF_STEPS = _Average(1), _Average(2), _Average(2, made=True)

# State → its averages. What accumulates hands on what comes in; what preconditions makes updates of gradients.
_ACCUMULATING: dict[str, dict[str, _Average]] = {
    "TraceState": {"trace": _FIRST},
    "EmaState": {"ema": _FIRST},
    "ApplyEvery": {"grad_acc": _FIRST},
}
_PRECONDITIONING: dict[str, dict[str, _Average]] = {
    "ScaleByAdamState": {"mu": _FIRST, "nu": _SECOND},
    "ScaleByAmsgradState": {"mu": _FIRST, "nu": _SECOND, "nu_max": _SECOND},
    "ScaleByBeliefState": {"mu": _FIRST, "nu": _SECOND},
    "ScaleByAdanState": {"m": _FIRST, "v": _FIRST, "g": _FIRST, "n": _SECOND},
    "ScaleByAdaDeltaState": {"e_g": _SECOND, "e_x": _SECOND_OF_STEPS},
    "ScaleByRmsState": {"nu": _SECOND},
    "ScaleByRmsWithCountState": {"nu": _SECOND},
    "ScaleByRStdDevState": {"mu": _FIRST, "nu": _SECOND},
    "ScaleByRStdDevWithCountState": {"mu": _FIRST, "nu": _SECOND},
    "ScaleByRssState": {"sum_of_squares": _SECOND},
    "ScaleByLionState": {"mu": _FIRST},
    "ScaleByAdemamixState": {"m1": _FIRST, "m2": _FIRST, "nu": _SECOND},
    "ScaleBySimplifiedAdEMAMixState": {"m": _FIRST, "n": _SECOND},
    "MuonState": {"mu": _FIRST},
}


def _averages(fields: Mapping[str, _Average], preconditions: bool, move: Move, state: Any, outgoing: Outgoing) -> Any:
    leaves = {name: leaves_by_path(getattr(state, name)) for name in fields}
    paths = frozenset(path for own in leaves.values() for path in own)
    entrywise = [name for name, average in fields.items() if average.power > 1]
    mixed = move.binders("orthogonal", "linear") if entrywise else {}
    mixed = {path: gauge for path, gauge in mixed.items() if path in paths}
    if mixed and move.on_unknown == "error":
        path, gauge = next(iter(mixed.items()))
        what = f"{type(state).__name__}.{entrywise[0]} of '{path}'"
        raise move.refuse(what, gauge, "second moments of entries, which a change of basis mixes")
    new: dict[str, Any] = {}
    for name, average in fields.items():
        after = paths if average.made else outgoing
        moved = move.vectors if average.power == 1 else functools.partial(_entries, move, average.power)
        found = moved(leaves[name], after)
        if move.on_unknown == "reset":
            found |= {path: jnp.zeros_like(x) for path, x in leaves[name].items() if path in mixed}
        new[name] = with_leaves(getattr(state, name), found)
    return state._replace(**new), outgoing | paths if preconditions else outgoing


def _entries(move: Move, power: int, leaves: Arrays, outgoing: Outgoing) -> Arrays:
    return move.entries(leaves, power, outgoing)


def _multi_steps(move: Move, state: Any, outgoing: Outgoing) -> tuple[Any, Outgoing]:
    """What it gathers comes in from before the optimizer inside it."""
    gathered = with_leaves(state.acc_grads, move.vectors(leaves_by_path(state.acc_grads), outgoing))
    inner, after = _walk(move, state.inner_opt_state, outgoing, _Place("MultiStepsState", ""))
    return state._replace(inner_opt_state=inner, acc_grads=gathered), after


def _injected(move: Move, state: Any, outgoing: Outgoing) -> tuple[Any, Outgoing]:
    """Hyperparameters may be called what a leaf is called."""
    inner, after = _walk(move, state.inner_state, outgoing, _Place(type(state).__name__, ""))
    return state._replace(inner_state=inner), after


# By name: not all of them are public, and none is imported where this Optax does not have it.
_OPTAX_RULES: dict[str, Rule] = {
    **{name: functools.partial(_averages, fields, False) for name, fields in _ACCUMULATING.items()},
    **{name: functools.partial(_averages, fields, True) for name, fields in _PRECONDITIONING.items()},
    "MultiStepsState": _multi_steps,
    "InjectHyperparamsState": _injected,
    "InjectStatefulHyperparamsState": _injected,
}


def _rule_of(state: type) -> Rule | None:
    if state.__module__.startswith("gauge_optax."):
        return RULES.get(state.__name__)
    return _OPTAX_RULES.get(state.__name__) if state.__module__.startswith("optax.") else None
