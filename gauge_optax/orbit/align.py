"""Aligns weights: moves one set of weights along its orbit to where it is nearest to another set.

Two trained networks, or two sets of weights of one network, differ by what nobody chose: the order of units, the basis
of heads and of the residual stream, the sizes of channels. `align` finds the element g of a list of gauges for which
g·b is nearest to a, in the sum of squares over the leaves that the gauges bind. The function of b does not change.

* For one gauge, given all others, the nearest element has a closed form or is a small problem (`orbit.nearest`):
  Procrustes for rotations, an assignment for permutations, least squares for constants, one variable per channel for
  scales. The gauges take turns until the distance no longer falls. No round makes it larger, so that rounds end.
* That ends in a local minimum, and the start decides in which. One start is b itself. The other first moves both sets
  of weights to their slice points, where scales, shifts and the shapes of GL are gone and only rotations and
  permutations are left. There the residual stream is rotated by those leaves that no other gauge rotates or renumbers;
  then heads are matched, each pair after the rotation that suits it best, and units; then heads are rotated. For two
  sets of weights of one function, every one of these answers is exact. The nearer end of both starts is returned.

All of it is deterministic. References: Ainsworth, Hayase and Srinivasa, Git Re-Basin, §3; Schönemann 1966 (Procrustes).
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from gauge_optax.binding import leaf_shape, leaves_by_path, overlap
from gauge_optax.errors import binding_error
from gauge_optax.gauges.gauge import Element, Gauge, Gauges, Product, product
from gauge_optax.gauges.instance import Arrays
from gauge_optax.linalg import real_dtype, roundoff
from gauge_optax.orbit.kinds import Stage, compact, is_constant, stage
from gauge_optax.orbit.nearest import nearest
from gauge_optax.orbit.renumber import carried, matched, renumbers, responses
from gauge_optax.slice import Slice

Fn = Callable[[Any, Any], Any]


def align(a: Any, b: Any, gauges: Gauges, batches: Sequence[Any] | None = None, fn: Fn | None = None) -> Element:
    """The element g for which `act(g, b)` is nearest to a: the least sum of squares over the leaves that gauges bind.

    Args:
      a: parameters.
      b: parameters with the same structure and shapes.
      gauges: a gauge, or a sequence of them. Permutations of units, heads or experts are the gauge `permutation`.
      batches: if given, units and heads are matched by what they do on these batches, not by their weights.
      fn: the model, fn(params, batch), an array or a tree of them; with `batches`.

    Returns:
      The element: a dict for one gauge, a tuple for a sequence. Act with it by `go.product(gauges).act(element, b)`.

    Raises:
      ValueError: trees that differ in structure or shapes; gauges that do not bind to them; `batches` without `fn`, or
        a function that does not take parameters and one batch.

    By weights, the sum of squares falls in every round, and the result is a local minimum; for two sets of weights of
    one function it is zero. By activations, the order of units and heads is found first and kept, by the assignment
    with the largest sum of correlations. A unit's numbers are the derivatives of fn, in 8 fixed random directions of
    its outputs per batch, by the logs of the sizes of the unit's blocks. They do not change under any other gauge, so
    that no rotation or scale has to be known. The other gauges are then aligned by weights.

    >>> gauges = [
    ...     go.rescale({"up": "_ channel"}, {"down": "channel _"}),
    ...     go.permutation({"up": "_ channel", "down": "channel _"}),
    ... ]
    >>> a = {"up": jnp.array([[1.0, -2.0, 3.0]]), "down": jnp.array([[1.0], [0.5], [2.0]])}
    >>> group = go.product(gauges)
    >>> b = group.act(group.sample(jax.random.key(0), a), a)
    >>> nearest = group.act(go.align(a, b, gauges), b)
    >>> bool(jnp.allclose(nearest["up"], a["up"], atol=1e-5))
    True

    Reference: Git Re-Basin, §3.1 (activations) and §3.2 (weights). Deviations: rotations, scales and all other gauges
      beside permutations; derivatives, which no other gauge changes, in place of activations.
    """
    group = product(gauges)
    check_same_tree("align", a, b)
    check_fn("align", batches, fn)
    s = Slice.of(group.parts, a)
    known = _by_responses(s, a, b, list(batches or ()), fn) if fn is not None else {}
    reached = _from_slice(s, a, b, known)
    if reached.distance > _roundoff(reached.target):  # otherwise both have one function, and nothing is nearer
        reached = min(reached, _from_itself(s, a, b, known), key=lambda path: path.distance)
    elements = group._packed(s.to_elements(reached.elements()))
    return elements[0] if isinstance(gauges, Gauge) and not isinstance(gauges, Product) else elements


class _Path:
    """The way from b along its orbit: the point that was reached, and the moves that led there.

    Attributes:
      slice: all instances.
      start: bound leaves of b, as values.
      target: those of a.
      point: those of the point that was reached.
      moves: one element per instance, in the order of the list; None for constants, which are found at the end.
    """

    def __init__(self, s: Slice, start: Arrays, target: Arrays) -> None:
        self.slice, self.start, self.target, self.point = s, start, target, start
        self.moves = [None if is_constant(i) else i.identity() for i in s.instances]

    @property
    def distance(self) -> float:
        """The sum of squares between the point and the target."""
        return squared_distance(self.point, self.target)

    def move(self, number: int, e: Any) -> None:
        """Acts with an element of one instance on the point."""
        instances = self.slice.instances
        self.point = instances[number].act(e, self.point)
        if is_constant(instances[number]):
            return
        # The new move acts last. To stand at its place it passes the moves behind it: h·g = (h·g·h⁻¹)·h.
        for k in reversed(range(number + 1, len(instances))):
            if not is_constant(instances[k]):
                self.moves[k] = carried(instances[number], e, instances[k], self.moves[k])
                e = carried(instances[k], instances[k].inverse(self.moves[k]), instances[number], e)
        self.moves[number] = instances[number].compose(e, self.moves[number])

    def kept(self) -> tuple[Arrays, list[Any]]:
        """What `back_to` needs to undo all later moves."""
        return self.point, list(self.moves)

    def back_to(self, kept: tuple[Arrays, list[Any]]) -> None:
        """Undoes all moves since `kept`."""
        self.point, self.moves = kept[0], list(kept[1])

    def elements(self) -> list[Any]:
        """One element per instance that together, in the order of the list, take b to the point.

        Constants are read from the mean, or the bias, that they change: before and after their place in the list. What
        stands before depends on earlier constants, what stands after on later ones. They are therefore computed in
        rounds; each constant depends on few others, so that few rounds are enough. Where two gauges share a direction
        (position embeddings can gain one number per row in two ways), a reading does not tell which of them to take:
        then least squares over all leaves of each constant follow.
        """
        elements = [
            i.identity() if is_constant(i) else e for i, e in zip(self.slice.instances, self.moves, strict=True)
        ]
        if not any(map(is_constant, self.slice.instances)):
            return elements

        def read(instance: Any, before: Arrays, after: Arrays) -> Any:
            return instance.compose(instance.read_mean(after), instance.inverse(instance.read_mean(before)))

        for find in (read, lambda instance, before, after: nearest(instance, after, before)):
            error = float("inf")
            while True:
                candidates, reached = self._constants(elements, find)
                last, error = error, squared_distance(reached, self.point)
                if error < last:
                    elements = candidates
                if error <= _roundoff(self.point):
                    return elements
                if error > 0.9 * last:
                    break
        return elements

    def _constants(self, elements: Sequence[Any], find: Callable[..., Any]) -> tuple[list[Any], Arrays]:
        """One round: elements with every constant found anew, and the point that they take b to.

        Args:
          elements: one per instance.
          find: (instance, point before it, point after it) to its element.
        """
        pairs, after, behind = list(enumerate(self.slice.instances)), self.point, {}
        for k, instance in reversed(pairs):
            behind[k] = after
            after = instance.enter(elements[k], after)
        updated, point = list(elements), self.start
        for k, instance in pairs:
            if is_constant(instance):
                updated[k] = find(instance, point, behind[k])
            point = instance.act(updated[k], point)
        return updated, point


def _roundoff(point: Arrays) -> float:
    """The squared distance from a point below which another one counts as the same."""
    return roundoff(real_dtype()) ** 2 * sum(float(jnp.sum(jnp.square(x))) for x in point.values())


def _order(s: Slice) -> list[int]:
    """The order in which gauges take turns: what others are compared by comes first.

    The residual stream comes first, then what renumbers units and heads, then rotations of heads, then all the rest. Of
    two permutations on common leaves, the one with the larger share of other leaves comes first.
    """
    instances = s.instances
    waiting = [k for k, i in enumerate(instances) if stage(i) is Stage.UNITS]
    order: list[int] = []
    while waiting:

        def share(k: int) -> float:
            others = [instances[j] for j in waiting if j != k and not renumbers(instances[k], instances[j])]
            hidden = [b for b in instances[k].blocks if any(overlap(b, x) for o in others for x in o.blocks)]
            return len(hidden) / len(instances[k].blocks)

        order.append(min(waiting, key=share))
        waiting.remove(order[-1])

    rest = [k for k in range(len(instances)) if k not in order]
    return sorted([*order, *rest], key=lambda k: stage(instances[k]))


def _from_itself(s: Slice, a: Any, b: Any, known: Mapping[int, Any]) -> _Path:
    """The path that starts at b as it is stored."""
    path = _Path(s, s.values(b), s.values(a))
    for number, e in known.items():
        path.move(number, e)
    _take_turns(path, [k for k in _order(s) if k not in known], on_slice=False)
    return path


def _from_slice(s: Slice, a: Any, b: Any, known: Mapping[int, Any]) -> _Path:
    """The path that leads over the slice points of both."""
    to, of = (s.nearest_slice_point(x) for x in (a, b))
    path = _Path(s, s.values(b), dict(to.point))
    for number in reversed(range(len(s.instances))):
        path.move(number, s.instances[number].inverse(of.elements[number]))
    path.point = dict(of.point)
    for number, e in known.items():
        path.move(number, e)
    free = [k for k in _order(s) if k not in known]
    undetermined = [k for k in free if compact(s.instances[k]) is not None]
    _move_each(path, undetermined, "all", on_slice=True)
    _take_turns(path, undetermined, on_slice=True)
    for number, e in enumerate(to.elements):
        path.move(number, e)
    path.target = s.values(a)
    _take_turns(path, free, on_slice=False)
    return path


def _take_turns(path: _Path, numbers: Sequence[int], on_slice: bool) -> None:
    """Rounds of `_move_each` until the distance no longer falls.

    A round matches heads, each pair after the rotation that suits it best. Where this makes the distance larger,
    because heads have other leaves too, a round with the rotations as they are is tried.
    """
    for _ in range(_MOST_ROUNDS):
        before, kept = path.distance, path.kept()
        if before <= _roundoff(path.target):
            return
        for unknown in ("renumbered", "none"):
            _move_each(path, numbers, unknown, on_slice)
            if path.distance < (1.0 - _LEAST_FALL) * before:
                break
            path.back_to(kept)
        else:
            return


def _move_each(path: _Path, numbers: Sequence[int], unknown: str, on_slice: bool) -> None:
    """Moves the point by the nearest element of each of these instances in turn.

    Args:
      path: the path, which becomes longer.
      numbers: positions of instances, in the order in which they take turns.
      unknown: which elements later in that order count as unknown: "all", "renumbered" (those that this one renumbers)
        or "none".
      on_slice: whether to move by rotations and permutations alone.
    """
    for at, number in enumerate(numbers):
        instance, later = path.slice.instances[number], [path.slice.instances[k] for k in numbers[at + 1 :]]
        counted = [i for i in later if unknown == "all" or (unknown == "renumbered" and renumbers(instance, i))]
        others = [x for x in map(compact, counted) if x is not None]
        part = compact(instance) if on_slice else None
        if part is not None:
            e = instance.from_turn(nearest(part, path.target, path.point, others))
        else:
            e = nearest(instance, path.target, path.point, others)
        kept, before = path.kept(), _distance_on(path, instance.paths)
        path.move(number, e)
        if not others and not _distance_on(path, instance.paths) <= before:  # a NaN is no improvement either
            path.back_to(kept)


def _distance_on(path: _Path, paths: Sequence[str]) -> float:
    return squared_distance(path.point, {p: path.target[p] for p in paths})


def squared_distance(point: Arrays, target: Arrays) -> float:
    """The sum of squares of the difference, over the leaves of `target`."""
    return sum(float(jnp.sum(jnp.square(point[path] - x))) for path, x in target.items())


# By activations -----------------------------------------------------------------------------------------


def _by_responses(s: Slice, a: Any, b: Any, batches: Sequence[Any], fn: Fn) -> dict[int, Any]:
    """Position of an instance → the element that matches its units by their responses."""
    (of_a, grads_a), (of_b, grads_b) = ((s.values(x), _gradients(s, x, batches, fn)) for x in (a, b))
    known: dict[int, Any] = {}
    for number in _order(s):
        instance = s.instances[number]
        first, second = (
            [rows for y in grads if (rows := responses(instance, x, y)) is not None]
            for x, grads in ((of_a, grads_a), (of_b, grads_b))
        )
        if not first:
            continue
        e = matched(instance, jnp.concatenate(first, -1), jnp.concatenate(second, -1))
        known[number] = e
        of_b, grads_b = instance.act(e, of_b), [instance.act(e, x) for x in grads_b]
    return known


def _gradients(s: Slice, params: Any, batches: Sequence[Any], fn: Fn) -> list[Arrays]:
    """The gradients of fixed random combinations of a function's outputs, several per batch."""

    @jax.jit
    def pulled(params: Any, batch: Any) -> list[Any]:
        outputs, pull = jax.vjp(lambda p: fn(p, batch), params)
        treedef: Any
        leaves, treedef = jax.tree.flatten(outputs)
        keys = jax.random.split(jax.random.key(0), (_DIRECTIONS, max(1, len(leaves))))
        drawn = [[jax.random.normal(k, x.shape, x.dtype) for k, x in zip(row, leaves, strict=False)] for row in keys]
        return [pull(treedef.unflatten(row))[0] for row in drawn]

    return [s.vectors(gradient) for batch in batches for gradient in pulled(params, batch)]


# Checks -------------------------------------------------------------------------------------------------


def check_same_tree(name: str, a: Any, b: Any) -> None:
    """Raises ValueError where two trees differ in their paths or shapes.

    Args:
      name: of the function that the user called.
      a: a tree.
      b: another.
    """
    first, second = ({path: leaf_shape(x) for path, x in leaves_by_path(tree).items()} for tree in (a, b))
    for path in dict.fromkeys((*first, *second)):
        if first.get(path) != second.get(path):
            there, wanted = (
                f"{x[path]}" if path in x else f"no leaf '{path}' among {len(x)} leaves" for x in (second, first)
            )
            raise binding_error(
                name, f"two trees that differ at '{path}'", f"{there} in the second", f"{wanted}, as in the first",
                "pass two sets of weights of one architecture",
            )  # fmt: skip


def check_fn(name: str, batches: Sequence[Any] | None, fn: Fn | None) -> None:
    """Raises ValueError for a function without batches, batches without one, and a function of other arguments.

    Args:
      name: of the function that the user called.
      batches: what the function is called with.
      fn: the function of parameters and a batch.
    """
    if (fn is None) != (batches is None) or (batches is not None and not len(batches)):
        raise binding_error(
            name, "batches and a function come together", f"fn={fn!r} and batches={batches!r:.60}",
            "both, with at least one batch, or neither",
            f"write {name}(..., batches=[batch], fn=lambda params, batch: ...)",
        )  # fmt: skip
    try:
        _ = fn is None or inspect.signature(fn).bind(None, None)
    except TypeError as error:
        raise binding_error(
            name, "a function of other arguments", f"{inspect.signature(fn)}",  # type: ignore[arg-type]
            "a function of parameters and one batch", "write fn=lambda params, batch: model(params, *batch)",
        ) from error  # fmt: skip


_MOST_ROUNDS = 100
_LEAST_FALL = 1e-3  # the share of the squared distance that a round has to save
_DIRECTIONS = 8
