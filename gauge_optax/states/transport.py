"""Moves an optimizer's state when its parameters move along an orbit: from θ to g·θ.

If weights move by W ↦ W·S, averages of gradients move as cotangents, by S⁻ᵀ, and averages of updates as tangents, by S.
Second moments of entries (Adam's `nu`) are multiplied by the square of the factor of their entry's gradient. Where a
gauge mixes entries, they have no rule. Whether a state averages gradients or updates follows from its place in a chain
of transformations: for each leaf, states up to the first preconditioner, whose own are included, average gradients, and
later states average updates.
References: "When Equivalent Weights Train Differently" ("the post") §7; docs/design.md §1.
"""

import collections
from typing import Any

import jax
import jax.numpy as jnp

from gauge_optax.binding import is_empty, leaves_by_path, with_leaves
from gauge_optax.errors import binding_error
from gauge_optax.gauges.gauge import Element, Gauge, Gauges, Product, product
from gauge_optax.optimizers.compress import compressed, decompressed, dtype_of
from gauge_optax.states.moves import Move, moving_part
from gauge_optax.states.rules import RULES, Outgoing, Rule
from gauge_optax.transformation import layout, require_choice

ON_UNKNOWN = ("error", "reset", "keep")


def transport(opt_state: Any, params: Any, gauge: Gauges, element: Element, on_unknown: str = "error") -> Any:
    """Moves an optimizer's state from θ to g·θ.

    Args:
      opt_state: state of an optimizer of this library or of Optax, of a chain or of a wrapper around one.
      params: θ before or after the move; only shapes are used.
      gauge: a gauge or a sequence of them. States of this library do not hold their gauges: pass the list that the
        optimizer was given.
      element: g. A dict for one gauge; for a product or a sequence, the tuple of its gauges' elements, with the
        identity for gauges that do not move. Under `jit` an identity is not recognized as such: it may raise the errors
        that any other element raises.
      on_unknown: what to do with second moments of entries that a change of basis mixes, and with arrays shaped like a
        moved leaf in states without a rule. "error" raises, "keep" leaves them, "reset" sets all moments of that leaf
        to zero, but not Adam's count. If the count is high, no bias correction makes up for moments that start at zero:
        with b1=0.9, b2=0.999 the leaf's steps are 3 times as long as usual at first, 6.6 times after 12 steps, and
        twice after 290 steps. Warm up, or restart the count as well.

    Returns:
      The state, with the same structure, shapes and dtypes, and on a mesh with explicit axes the same shardings.

    Raises:
      ValueError: an unknown `on_unknown`; an element that is not one of this gauge's; a state of this library that was
        made with other gauges; with "error", a state without a rule. Radii of `hyperball` raise under "reset" too.

    First moments in Optax's states count as averages of gradients, unless a state earlier in the chain has
    preconditioned the leaf (Adam and its family, Lion, Muon, RMS, …): then they count as averages of updates. Adamax
    and ADOPT keep other averages in a state of Adam's class, and this function wrongly treats them as Adam's: leave
    their leaves out, or make a new state for them. Transformations without a state (`optax.scale_by_sign`,
    `add_decayed_weights` before a trace) cannot be seen in the chain's state, and are ignored. If optimizers under
    `optax.partition` have a list of gauges each, move their states one by one.

    >>> gauge = go.rescale({"up": "_ channel"}, {"down": "channel _"})
    >>> params = {"up": jnp.ones((1, 1)), "down": jnp.ones((1, 1))}
    >>> tx = optax.adam(0.1)
    >>> _, state = tx.update(
    ...     {"up": jnp.full((1, 1), 3.0), "down": jnp.ones((1, 1))}, tx.init(params), params
    ... )
    >>> moved = go.orbit.transport(state, params, gauge, {"": jnp.log(jnp.array([2.0]))})
    >>> moments = [
    ...     moved[0].mu["up"] / state[0].mu["up"],
    ...     moved[0].nu["up"] / state[0].nu["up"],
    ... ]
    >>> # Weights double: gradients, and with them first moments, halve.
    >>> [round(float(x[0, 0]), 3) for x in moments]
    [0.5, 0.25]

    Reference: the post's §7. Deviation: the post moves first moments like weights, which is right for buffers of
      updates. Averages of gradients are cotangents (moved like weights, they are off by 0.95 under rescalings of
      log-size 1: docs/design.md §1).
    """
    require_choice("transport", "on_unknown", on_unknown, ON_UNKNOWN)
    if is_empty(params):
        return opt_state
    group = product(gauge)
    elements = (element,) if isinstance(gauge, Gauge) and not isinstance(gauge, Product) else element

    def moved(opt_state: Any, params: Any, elements: Any) -> Any:
        expected = jax.tree.map(jnp.shape, jax.eval_shape(group.identity, params))
        if not isinstance(elements, tuple) or jax.tree.map(jnp.shape, elements) != expected:
            raise binding_error(
                "transport", "not an element of this gauge", f"shapes {jax.tree.map(jnp.shape, elements)}",
                f"{expected}",
                "pass what its sample, balance or identity returns: a dict for one gauge, a tuple for a sequence",
            )
        parts = tuple(moving_part(part, x, params) for part, x in zip(group.gauges, elements, strict=True))
        return transported_state(Move(parts, params, on_unknown), opt_state)

    return layout((opt_state, params, elements)).run(moved, opt_state, params, elements, like=opt_state)


def transported_state(move: Move, opt_state: Any) -> Any:
    """Returns the state at g·θ, for a `Move` whose effects have been determined already."""
    return _walk(move, opt_state, frozenset(), "the state")[0]


def _walk(move: Move, node: Any, outgoing: Outgoing, owner: str, path: str = "") -> tuple[Any, Outgoing]:
    """Moves a node of a state and all below it.

    Args:
      move: the move.
      node: the node.
      outgoing: paths of the leaves whose input to this node is an update, and no gradient.
      owner: name of the nearest NamedTuple around the node, for messages.
      path: keys from that NamedTuple's field to the node, joined by "/".

    Returns:
      The node at g·θ, and the paths of the leaves whose output from this node is an update.
    """
    kind = type(node)
    rules = {"gauge_optax": _OUR_RULES, "optax": _OPTAX_RULES}.get(kind.__module__.partition(".")[0], {})
    if kind.__name__ in rules:
        return rules[kind.__name__](move, node, outgoing)
    if isinstance(node, tuple) and hasattr(node, "_fields"):
        # The fields of a wrapper are not applied one after the other, as links of a chain are. Each gets the wrapper's
        # input.
        walked = [_walk(move, x, outgoing, kind.__name__) for x in node]
        return kind._make(x for x, _ in walked), outgoing.union(*(after for _, after in walked))
    if kind in (tuple, list):  # a chain
        links = []
        for number, link in enumerate(node):
            new, outgoing = _walk(move, link, outgoing, owner, f"{path}/{number}".lstrip("/"))
            links.append(new)
        return kind(links), outgoing
    if kind is collections.OrderedDict:  # an `optax.named_chain`
        named_links: dict[str, Any] = {}
        for key, link in node.items():
            named_links[key], outgoing = _walk(move, link, outgoing, owner, f"{path}/{key}".lstrip("/"))
        return kind(named_links), outgoing
    if kind is dict:
        branches = {key: _walk(move, x, outgoing, owner, f"{path}/{key}".lstrip("/")) for key, x in node.items()}
        return {key: x for key, (x, _) in branches.items()}, outgoing.union(*(after for _, after in branches.values()))
    treedef: Any
    children, treedef = jax.tree_util.tree_flatten_with_path(node, is_leaf=lambda x: x is not node)  # one level
    if all(keys for keys, _ in children):  # another container
        paths = [f"{path}/{jax.tree_util.keystr(keys, simple=True, separator='/')}".lstrip("/") for keys, _ in children]
        walked = [_walk(move, x, outgoing, owner, at) for (_, x), at in zip(children, paths, strict=True)]
        return treedef.unflatten([x for x, _ in walked]), outgoing.union(*(after for _, after in walked))

    # The node is an array without a rule. Its path, or else its shape, says to which leaf it may belong.
    if not jnp.issubdtype(jnp.result_type(node), jnp.inexact):
        return node, outgoing
    shape = jnp.shape(node)
    named = [leaf for leaf in move.shapes if f"/{leaf}/" in f"/{path}/"]
    same_shape = [leaf for leaf in move.moved if shape and move.shapes[leaf] == shape]
    hit = max(named, key=len) if named else next(iter(same_shape), "")
    if hit not in move.moved:
        return node, outgoing
    if move.on_unknown == "error":
        what = f"{owner}{f' at {path}' if path else ''}, which may be of '{hit}',"
        raise move.refuse(what, move.moved[hit], f"an array of shape {shape} in a state without a rule")
    return jnp.zeros_like(node) if move.on_unknown == "reset" else node, outgoing | {hit}


# Optax's states -------------------------------------------------------------------------------------

# Name of a state's class → field → the power of entries that the field averages. Keys are names, because some classes
# are not public, and an installed Optax may lack some.
_POWERS: dict[str, dict[str, int]] = {
    "TraceState": {"trace": 1},
    "EmaState": {"ema": 1},
    "ApplyEvery": {"grad_acc": 1},
    "ScaleByAdamState": {"mu": 1, "nu": 2},
    "ScaleByAmsgradState": {"mu": 1, "nu": 2, "nu_max": 2},
    "ScaleByBeliefState": {"mu": 1, "nu": 2},
    "ScaleByAdanState": {"m": 1, "v": 1, "g": 1, "n": 2},
    "ScaleByAdaDeltaState": {"e_g": 2, "e_x": 2},
    "ScaleByRmsState": {"nu": 2},
    "ScaleByRmsWithCountState": {"nu": 2},
    "ScaleByRStdDevState": {"mu": 1, "nu": 2},
    "ScaleByRStdDevWithCountState": {"mu": 1, "nu": 2},
    "ScaleByRssState": {"sum_of_squares": 2},
    "ScaleByLionState": {"mu": 1},
    "ScaleByAdemamixState": {"m1": 1, "m2": 1, "nu": 2},
    "ScaleBySimplifiedAdEMAMixState": {"m": 1, "n": 2},
    "MuonState": {"mu": 1},
}
_ACCUMULATING = ("TraceState", "EmaState", "ApplyEvery")  # gradients leave these as gradients; the others precondition
_OF_OUTPUT = ("e_x",)  # the fields that average outputs: AdaDelta averages the squares of the updates that it makes


def _averages(move: Move, state: Any, outgoing: Outgoing) -> tuple[Any, Outgoing]:
    name, powers = type(state).__name__, _POWERS[type(state).__name__]
    leaves = {field: leaves_by_path(getattr(state, field)) for field in powers}
    paths = frozenset(path for averages in leaves.values() for path in averages)
    entrywise = [field for field, power in powers.items() if power > 1]
    mixed = move.binders("orthogonal", "linear") if entrywise else {}
    mixed = {path: gauge for path, gauge in mixed.items() if path in paths}
    if mixed and move.on_unknown == "error":
        path, gauge = next(iter(mixed.items()))
        content = "second moments of entries, which a change of basis mixes"
        raise move.refuse(f"{name}.{entrywise[0]} of '{path}'", gauge, content)
    new: dict[str, Any] = {}
    for field, power in powers.items():
        moved = move.averages(leaves[field], paths if field in _OF_OUTPUT else outgoing, power)
        if move.on_unknown == "reset":
            moved |= {path: jnp.zeros_like(x) for path, x in leaves[field].items() if path in mixed}
        new[field] = with_leaves(getattr(state, field), moved)
    return state._replace(**new), outgoing if name in _ACCUMULATING else outgoing | paths


def _multi_steps(move: Move, state: Any, outgoing: Outgoing) -> tuple[Any, Outgoing]:
    """Moves the accumulated gradients by `outgoing`, as what enters this node: the optimizer has not seen them yet."""
    accumulated = with_leaves(state.acc_grads, move.averages(leaves_by_path(state.acc_grads), outgoing))
    inner, after = _walk(move, state.inner_opt_state, outgoing, "MultiStepsState")
    return state._replace(inner_opt_state=inner, acc_grads=accumulated), after


def _injected(move: Move, state: Any, outgoing: Outgoing) -> tuple[Any, Outgoing]:
    """Moves the inner state alone: hyperparameters are no moments, even if one has the name of a leaf."""
    inner, after = _walk(move, state.inner_state, outgoing, type(state).__name__)
    return state._replace(inner_state=inner), after


def _projected(move: Move, state: Any, outgoing: Outgoing) -> tuple[Any, Outgoing]:
    """Keeps moments that GaLore has projected to fewer rows or columns. Raises ValueError if their leaves move."""
    paths = leaves_by_path(state.projector)
    moved = next((path for path in paths if path in move.moved), None)
    if moved is not None and move.on_unknown != "keep":
        raise move.refuse(
            f"{type(state).__name__} of '{moved}'", move.moved[moved], "moments of projected gradients",
            "write on_unknown='keep' to leave them until the next projection, or train with go.quotient(tx, gauges), "
            "whose state moves exactly",
        )
    return state, outgoing | set(paths)


def _compressed(move: Move, state: Any, outgoing: Outgoing) -> tuple[Any, Outgoing]:
    """Decompresses second moments to float32, moves them, and rounds them to the stored dtype again, as a step does."""
    inner, after = _walk(move, decompressed(state), outgoing, "CompressedState")
    return compressed(state.count, inner, dtype_of(state), stream=1), after


_OUR_RULES: dict[str, Rule] = RULES | {"CompressedState": _compressed}
_OPTAX_RULES: dict[str, Rule] = {
    **dict.fromkeys(_POWERS, _averages),
    "MultiStepsState": _multi_steps,
    "GaLoreState": _projected,
    "InjectHyperparamsState": _injected,
    "InjectStatefulHyperparamsState": _injected,
}
