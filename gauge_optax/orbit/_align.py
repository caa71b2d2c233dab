"""Aligns weights: moves one set of weights along its orbit to where it is nearest to another set.

Two trained networks, or two sets of weights of one network, differ in ways that have no effect: the order of units, the
basis of heads and of the residual stream, the sizes of channels. `align` finds the element g of a list of gauges for
which g·b is nearest to a, in the sum of squares over the leaves that the gauges bind. The function of b does not
change.

* A gauge consists of parts, one or two per layer. If all other parts stay, the nearest element of one part has a closed
  form or is a small problem (`orbit.nearest`): Procrustes for rotations, an assignment for permutations, least squares
  for constants (which add to weights), one variable per channel for scales. The parts take turns until the distance no
  longer falls. No round makes it larger, so that rounds end.
* This ends in a local minimum, which depends on the start. `align` therefore tries two starts, and returns the result
  that is nearer to a. One start is b itself. The other is the slice point of b, where scales and constants have
  standard values (`gauge_optax.slice`). For two sets of weights of one function, slice points differ by rotations and
  permutations alone. `align` finds these first: it rotates the residual stream (judged by the leaves that no other
  gauge rotates or renumbers), then matches units and heads (each pair of heads after the rotation that brings the two
  nearest), then rotates heads. If both compute one function, each of these steps is exact.

All of it is deterministic. References: Ainsworth, Hayase and Srinivasa, Git Re-Basin, §3; Schönemann 1966 (Procrustes).
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from gauge_optax.binding import has_dtype, inexact_leaves, leaf_shape, leaves_by_path, overlap
from gauge_optax.errors import binding_error, warn
from gauge_optax.gauges.bound import require_nonzero_norms, require_readings_without_turns
from gauge_optax.gauges.gauge import Element, Gauges, bind
from gauge_optax.gauges.unread import no_frame, unread
from gauge_optax.linalg import norm_of, real_dtype, roundoff
from gauge_optax.orbit.kinds import Stage, is_compact, is_constant, stage
from gauge_optax.orbit.nearest import in_range, nearest
from gauge_optax.orbit.renumber import carried, matched, renumbers, responses
from gauge_optax.parts.part import Arrays, Part, changed
from gauge_optax.slice import Elements, Slice
from gauge_optax.states.statistics import require_no_statistics_behind
from gauge_optax.transformation import listed, on_any_mesh, require_arrays, require_function

Fn = Callable[[Any, Any], Any]


@on_any_mesh
def align(a: Any, b: Any, gauges: Gauges, batches: Iterable[Any] | None = None, fn: Fn | None = None) -> Element:
    """The element g for which `act(g, b)` is nearest to a, in the sum of squares over the leaves that gauges bind.

    Args:
      a: the parameters to come near to. They are not moved.
      b: the parameters to move, with the same structure and shapes.
      gauges: a gauge, or a sequence of them. Permutations of units, heads or experts are the gauge `permutation`.
      batches: if given, units and heads are matched by their effect on the outputs for these batches, not by their
        weights.
      fn: the model: fn(params, batch) returns an array or a tree of arrays. Needed with `batches`.

    Returns:
      The element: a dict for one gauge, a tuple for a sequence. Act with it by `go.product(gauges).act(element, b)`.

    Raises:
      ValueError: trees that differ in structure or shapes; gauges that do not bind to them; `batches` without `fn`, or
        a function that does not take parameters and one batch.

    Without `batches`, the sum of squares falls in every round, and the result is a local minimum. For two sets of
    weights of one function the minimum is zero, with one exception: permutations that are nested beside a
    `head_linear`, such as one of groups of query heads and one of the heads inside a group. `align` may miss these.

    With `batches`, the order of units and heads is found first and kept; the other gauges are then aligned by weights.
    To find the order, 8 fixed random combinations of fn's outputs are taken per batch. A unit is described by the
    derivatives of these combinations with respect to the log of the unit's size, one for each of its blocks. Rotations
    and scales do not change these derivatives, and therefore need not be known yet. The order is the assignment with
    the largest sum of correlations between matched units. Units that do not affect fn's outputs are matched by weights.

    >>> gauges = [
    ...     go.rescale({"up": "_ channel"}, {"down": "channel _"}),
    ...     go.permutation({"up": "_ channel", "down": "channel _"}),
    ... ]
    >>> a = {"up": jnp.array([[1.0, -2.0, 3.0]]), "down": jnp.array([[1.0], [0.5], [2.0]])}
    >>> group = go.product(gauges)
    >>> b = group.act(group.sample(jax.random.key(0), a), a)
    >>> nearest = group.act(go.orbit.align(a, b, gauges), b)
    >>> bool(jnp.allclose(nearest["up"], a["up"], atol=1e-5))
    True

    Reference: Git Re-Basin, §3.1 (activations) and §3.2 (weights). Deviations: not only permutations are aligned, but
      also rotations, scales and all other gauges; units are matched by derivatives in place of activations.
    """
    require_arrays("align", a, b)
    on_tree = bind(gauges, a)
    check_same_tree("align", a, b)
    for name, tree in (("a", a), ("b", b)):
        for path, leaf in inexact_leaves(tree).items():
            if not jnp.isfinite(leaf).all():
                raise binding_error(
                    "align", f"'{path}' of {name} is not finite", "NaN or an infinity", "finite weights",
                    "align an earlier checkpoint: this run has diverged",
                )
    given: Any = batches if batches is None or hasattr(batches, "ndim") else listed("align", batches)
    check_fn("align", given, fn)
    s = on_tree.whole
    require_no_statistics_behind("align", s, b)
    require_readings_without_turns("align", s)
    for params in (a, b):
        require_nonzero_norms("align", s, leaves_by_path(params))
    for part in {part.label: part for part, _, _ in s.sizes}.values():
        if count := max(int(unread(part, x, x) or 0) for x in (s.values(a), s.values(b))):
            warn(no_frame("align", part, count, "align only rotates these heads"))
    known = _by_responses(s, a, b, given, fn) if fn is not None else {}
    reached = _from_slice(s, a, b, known)
    if reached.distance > _roundoff(reached.target):  # else both compute one function, and the distance is zero already
        reached = min(reached, _from_itself(s, a, b, known), key=lambda path: path.distance)
    return on_tree.public(reached.elements())


class _Path:
    """The way from b along its orbit: the point that was reached, and the moves that led there.

    Attributes:
      parts: all parts, in the order in which they act: turns, sizes, constants, permutations.
      start: bound leaves of b, path → array.
      target: bound leaves of a.
      point: bound leaves at the point that was reached.
      moves: part label → element. Constants have no entry, because `elements` computes theirs at the end.
    """

    def __init__(self, s: Slice, start: Arrays, target: Arrays) -> None:
        self.parts, self.start, self.target, self.point = s.acting, start, target, start
        self.moves: Elements = {part.label: part.identity() for part in s.acting if not is_constant(part)}
        self._anchors = {part: anchor for part, anchor, _ in s.constants}

    @property
    def distance(self) -> float:
        """The sum of squares between the point and the target."""
        return squared_distance(self.point, self.target)

    def move(self, part: Part[Any], e: Any) -> None:
        """Acts with an element of one part on the point."""
        self.point = part.act(e, self.point)
        if part.label not in self.moves:
            return
        # The new element h acts last, but its place is before each element g of a later part. Since
        # h·g = (h·g·h⁻¹)·h, it may act first if h·g·h⁻¹ takes the place of g.
        for other in reversed(self.parts[self.parts.index(part) + 1 :]):
            if other.label in self.moves:
                value = carried(part, e, other, self.moves[other.label])
                e = carried(other, other.inverse(value), part, e)
                self.moves[other.label] = value
        self.moves[part.label] = part.compose(e, self.moves[part.label])

    def kept(self) -> tuple[Arrays, Elements]:
        """Returns the point and the moves so far, from which `back_to` undoes all later moves."""
        return self.point, dict(self.moves)

    def back_to(self, kept: tuple[Arrays, Elements]) -> None:
        """Undoes all moves since `kept`."""
        self.point, self.moves = kept[0], dict(kept[1])

    def elements(self) -> Elements:
        """Returns the elements, by label, that together take b to the point.

        `moves` has no constants (parts that add to weights). They are computed here. The element of a constant is the
        difference of two readings of its anchor, the block that it is read from (often its mean): that just after the
        constant acts less that just before. The reading before depends on constants that act earlier, the one after on
        those that act later. Constants are therefore computed in rounds; few are enough, because each depends on few
        others. Readings do not determine the elements if two gauges can make the same move (both can add one number per
        row to the position embeddings). For these, further rounds fit each constant to all its leaves by least squares.
        """
        constants = {part.label: part.identity() for part in self._anchors}
        elements = self.moves | constants
        if not constants:
            return elements

        def read(part: Any, before: Arrays, after: Arrays) -> Any:
            own, new = (part.read(self._anchors[part], x) for x in (before, after))
            return part.compose(new, part.inverse(own))

        for find in (read, lambda part, before, after: nearest(part, after, before)):
            # The error may grow for some rounds, until those constants are right on which the others depend.
            candidates, least, waited = elements, float("inf"), 0
            while waited < _PATIENCE:
                candidates, reached = self._constants(candidates, find)
                error = squared_distance(reached, self.point)
                waited = waited + 1 if not error < 0.9 * least else 0
                if error < least:
                    elements, least = candidates, error
                if error <= _roundoff(self.point):
                    return elements
        return elements

    def _constants(self, elements: Elements, find: Callable[..., Any]) -> tuple[Elements, Arrays]:
        """One round: computes every constant again. Returns all elements, and the point to which they move b.

        Args:
          elements: part label → element, for all parts.
          find: (part, point before it acts, point after it acted) → the part's element.
        """
        after, behind = self.point, {}
        for part in reversed(self.parts):
            behind[part] = after
            after = part.undo(elements[part.label], after)
        updated, point = dict(elements), self.start
        for part in self.parts:
            if part in self._anchors:
                updated[part.label] = find(part, point, behind[part])
            point = part.act(updated[part.label], point)
        return updated, point


def _roundoff(point: Arrays) -> float:
    """The largest squared distance from `point` that roundoff explains. A point that is nearer counts as equal."""
    return (roundoff(real_dtype()) * norm_of(point.values())) ** 2


def _order(s: Slice) -> list[Any]:
    """The order in which parts take turns: a part comes before those whose best element depends on it.

    Rotations of streams come first, then permutations of units and heads, then rotations of heads, then
    sizes, then constants. If two permutations share blocks, the one with the smaller fraction of shared blocks comes
    first.
    """
    waiting = [part for part in s.acting if stage(part) is Stage.UNITS]
    order: list[Any] = []
    while waiting:

        def share(part: Part[Any]) -> float:
            others = [other for other in waiting if other is not part and not renumbers(part, other)]
            hidden = [b for b in part.blocks if any(overlap(b, x) for other in others for x in other.blocks)]
            return len(hidden) / len(part.blocks)

        order.append(min(waiting, key=share))
        waiting.remove(order[-1])

    # Streams keep the order of `s.parts`: if two streams rotate one kernel, the rotation of the second is read after
    # that of the first was undone.
    streams = [part for part in s.parts if stage(part) is Stage.STREAM]
    chosen = [*streams, *order]
    return sorted([*chosen, *(part for part in s.acting if part not in chosen)], key=stage)


def _from_itself(s: Slice, a: Any, b: Any, known: Mapping[Any, Any]) -> _Path:
    """Moves the stored weights of b nearer to a, part by part, and returns the moves.

    The elements of `known` (part → element) act first and stay as they are. Then the other parts are improved in turn.
    """
    path = _Path(s, s.values(b), s.values(a))
    for part, e in known.items():
        path.move(part, e)
    _take_turns(path, [part for part in _order(s) if part not in known])
    return path


def _from_slice(s: Slice, a: Any, b: Any, known: Mapping[Any, Any]) -> _Path:
    """Moves b to its slice point, then near to the slice point of a, and from there to a; returns the moves.

    Only rotations and permutations are sought on the slice. The step from the slice to a uses the scales and constants
    of a. The elements of `known` (part → element) act at the slice point of b and are not changed later.
    """
    there, here = (s.unturned_slice_point(x)[1] for x in (a, b))
    path = _Path(s, s.values(b), dict(there.point))
    for part, e, _, _ in here.parts:
        path.move(part, part.inverse(e))
    path.point = dict(here.point)
    for part, e in known.items():
        path.move(part, e)
    free = [part for part in _order(s) if part not in known]
    undetermined = [part for part in free if is_compact(part)]
    _move_each(path, undetermined, before_others=True)
    _take_turns(path, undetermined)
    for part, e, _, _ in reversed(there.parts):
        path.move(part, e)
    path.target = s.values(a)
    _take_turns(path, free)
    return path


def _take_turns(path: _Path, parts: Sequence[Any]) -> None:
    """Repeats rounds of `_move_each` until the distance no longer falls."""
    for _ in range(_MOST_ROUNDS):
        before, kept = path.distance, path.kept()
        if before <= _roundoff(path.target):
            return
        _move_each(path, parts)
        if not path.distance < (1.0 - _LEAST_FALL) * before:
            path.back_to(kept)
            return


def _move_each(path: _Path, parts: Sequence[Any], before_others: bool = False) -> None:
    """Moves the point by the nearest element of each of these parts in turn.

    Args:
      path: the path, to which the moves are added.
      parts: the parts, in the order in which they take turns.
      before_others: if True, the element of each part should depend as little as possible on later rotations and
        permutations in `parts`, whose elements are not known yet (see `others` in `nearest`). The distance may grow
        until these later parts have moved as well.
    """
    for at, part in enumerate(parts):
        others = [other for other in parts[at + 1 :] if before_others and is_compact(other)]
        kept, before = path.kept(), _distance_on(path, changed(part))
        path.move(part, nearest(part, *in_range(part, path.target, path.point), others))
        if not others and not _distance_on(path, changed(part)) <= before:  # a NaN is no improvement either
            path.back_to(kept)


def _distance_on(path: _Path, paths: Sequence[str]) -> float:
    return squared_distance(path.point, {p: path.target[p] for p in paths})


def squared_distance(point: Arrays, target: Arrays) -> float:
    """The sum of squares of the difference, over the leaves of `target`."""
    return norm_of(point[path] - x for path, x in target.items()) ** 2


# By activations -----------------------------------------------------------------------------------------


def _by_responses(s: Slice, a: Any, b: Any, batches: Sequence[Any], fn: Fn) -> dict[Any, Any]:
    """Permutation → the element that matches the units of b to those of a, by the derivatives of `responses`."""
    (of_a, grads_a), (of_b, grads_b) = ((s.values(x), _gradients(s, x, batches, fn)) for x in (a, b))
    known: dict[Any, Any] = {}
    for part in _order(s):
        first, second = (
            [rows for y in grads if (rows := responses(part, x, y)) is not None]
            for x, grads in ((of_a, grads_a), (of_b, grads_b))
        )
        if not any(rows.any() for rows in first):
            continue  # no output depends on these units: `align` matches them by their weights later
        known[part] = matched(part, jnp.concatenate(first, -1), jnp.concatenate(second, -1))
        of_b, grads_b = part.act(known[part], of_b), [part.act(known[part], x) for x in grads_b]
    return known


def _gradients(s: Slice, params: Any, batches: Sequence[Any], fn: Fn) -> list[Arrays]:
    """The gradients of fixed random combinations of a function's outputs, `_DIRECTIONS` per batch."""

    @jax.jit
    def pulled(params: Any, batch: Any) -> list[Any]:
        def numbers(p: Any) -> list[Any]:
            return [x for x in jax.tree.leaves(fn(p, batch)) if jnp.issubdtype(jnp.result_type(x), jnp.inexact)]

        outputs, pull = jax.vjp(numbers, params)
        if not outputs:
            raise binding_error(
                "align", "fn returns nothing to compare", "no floating-point output", "floating-point outputs",
                "return logits from fn, and not tokens",
            )
        keys = jax.random.split(jax.random.key(0), (_DIRECTIONS, len(outputs)))
        drawn = [[jax.random.normal(k, x.shape, x.dtype) for k, x in zip(row, outputs, strict=True)] for row in keys]
        return [pull(row)[0] for row in drawn]

    found = [s.vectors(gradient) for batch in batches for gradient in pulled(params, batch)]
    numbers = [x for gradient in found for x in gradient.values()]
    if not all(bool(jnp.isfinite(x).all()) for x in numbers):
        raise binding_error(
            "align", "derivatives of fn that are not finite", "NaN or an infinity", "finite outputs and derivatives",
            "leave masked entries out of what fn returns",
        )
    if not any(bool(x.any()) for x in numbers):
        raise binding_error(
            "align", "fn does not depend on the leaves of these gauges", "derivatives that are all zero",
            "a function of its first argument, the parameters", "write fn=lambda params, batch: model(params, batch)",
        )
    return found


# Checks -------------------------------------------------------------------------------------------------


def check_same_tree(name: str, a: Any, b: Any) -> None:
    """Raises ValueError where two trees differ in their paths or shapes, or one is complex and the other real.

    Args:
      name: the name of the function that the user called, for the message.
      a: a tree.
      b: another tree.
    """
    leaves = [leaves_by_path(tree) for tree in (a, b)]
    first, second = ({path: leaf_shape(x) for path, x in tree.items()} for tree in leaves)
    for path in dict.fromkeys((*first, *second)):
        if first.get(path) != second.get(path):
            there, wanted = (
                f"{x[path]}" if path in x else f"no leaf '{path}' among {len(x)} leaves" for x in (second, first)
            )
            raise binding_error(
                name, f"two trees that differ at '{path}'", f"{there} in the second", f"{wanted}, as in the first",
                "pass two sets of weights of one architecture",
            )
        kinds = ["complex" if jnp.iscomplexobj(tree[path]) else "real" for tree in leaves if has_dtype(tree[path])]
        if len(set(kinds)) > 1:  # a cast would drop the imaginary part
            raise binding_error(
                name, f"two trees that differ at '{path}'", f"{kinds[1]} numbers in the second",
                f"{kinds[0]} numbers, as in the first", "cast the real one: x.astype(complex)")


def check_fn(name: str, batches: Sequence[Any] | None, fn: Fn | None) -> None:
    """Raises ValueError if only one of `batches` and `fn` is given, or if `fn` does not take parameters and a batch.

    Args:
      name: the name of the function that the user called, for the message.
      batches: the batches to call `fn` with, or None.
      fn: a function of parameters and a batch, or None.
    """
    if hasattr(batches, "ndim"):
        raise binding_error(
            name, "batches is one array", f"an array of shape {jnp.shape(jnp.asarray(batches))}", "a list of batches",
            "write batches=[batch]",
        )
    if (fn is None) != (batches is None) or (batches is not None and not len(batches)):
        raise binding_error(
            name, "batches and a function come together", f"fn={fn!r} and batches={batches!r:.60}",
            "both, with at least one batch, or neither",
            f"write {name}(..., batches=[batch], fn=lambda params, batch: ...)",
        )
    if fn is not None:
        require_function(name, "fn", fn, "params, batch")


_MOST_ROUNDS = 100
_LEAST_FALL = 1e-3  # the share by which a round has to lower the squared distance
_PATIENCE = 4  # the search for constants ends after this many rounds without progress
_DIRECTIONS = 8  # random combinations of outputs per batch
