"""Searches one instance of a function for its gauges, in three stages: gradients, null spaces, finite moves.

`report` decides which instance is searched, the user's function or a smaller one of the same form. The kinds of moves
that are tried are in `search`, `offsets` and `stream`.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from gauge_optax.discovery import offsets, scaled_products, search
from gauge_optax.discovery.calls import REST, TRAINING, Call, merge_layers
from gauge_optax.discovery.groups import STILL, ZERO, Symmetry, independent
from gauge_optax.discovery.prove import Held, Prover
from gauge_optax.discovery.reach import Uncovered, unreached, without_gradient
from gauge_optax.discovery.sketch import DRAWS, Function, Gradients, Leaves, generic_point, positive_kernels
from gauge_optax.discovery.stream import passed, rotation_call, stream_rotations
from gauge_optax.discovery.trace import Trace
from gauge_optax.discovery.write import Unwritable, shift_call, write_shift_calls, written

_POINTS = 5  # points at which gradients are taken: units that are dead at one point seem free to move there
_CLOSE = 12  # by their gradients many moves are nearly symmetries; at most so many are tested by a finite move
_ROWS = 1.5  # gradients per column of a candidate's matrix (`search`); fewer than 1 leave null vectors by chance


class Found(NamedTuple):
    """What the search of an instance finds; the attributes are those of `Report`.

    >>> Found((), (), (), ("unused",), (), {}).dead
    ('unused',)
    """

    held: tuple[Held, ...]
    nearly: tuple[Held, ...]
    rejected: tuple[str, ...]
    dead: tuple[str, ...]
    uncovered: tuple[Uncovered, ...]
    ungauged: Mapping[str, tuple[str, ...]]


def search_instance(
    fn: Function, params: Any, leaves: Leaves, batches: Sequence[Any], trace: Trace, near: float, seed: int, bar: Any
) -> Found:
    """Searches one instance, large or small, and proves its gauges.

    Args:
      fn: (leaves, batch) to a list of outputs, in float64.
      params: the tree that gauges bind to.
      leaves: its float64 leaves by path.
      batches: at least two.
      trace: the walk over the jaxpr of fn.
      near: as in `discover`.
      seed: seed of everything random.
      bar: the progress bar.

    Returns:
      What it found.
    """
    one = _Search(fn, params, leaves, batches, trace, near, seed)
    bar.set_postfix_str("gradients")
    one.observe(bar)
    bar.set_postfix_str("null spaces")
    masks, dead, uncovered = one.without_effect()
    exact, close = one.symmetries(masks)
    bar.update()
    bar.set_postfix_str("finite moves")
    proved, nearly = one.proved(exact, close)
    of_stream, additions = one.proved_of_stream(proved, exact, masks)
    held = one.held([*proved, *of_stream], additions)
    bar.update()
    ungauged = {kind: tuple(where) for kind, where in one.ungauged.items()}
    return Found(tuple(held), tuple(nearly), tuple(one.rejected), tuple(dead), tuple(uncovered), ungauged)


class _Search:
    """What the stages of one search share. The arguments are those of `search_instance`.

    Attributes:
      rejected: texts on moves that change the outputs, although gradients or the function's form suggest that they do
        not.
      ungauged: symmetries for which the library has no gauge: kind, in words → texts with the leaves that each moves.
    """

    def __init__(
        self, fn: Function, params: Any, leaves: Leaves, batches: Sequence[Any], trace: Trace, near: float, seed: int
    ) -> None:
        self._params, self._leaves, self._trace, self._near, self._seed = params, leaves, trace, near, seed
        self.rejected, self.ungauged = list[str](), dict[str, list[str]]()
        self._prover = Prover(fn, params, batches)
        self._prover.check_outputs(leaves)
        self._signed = positive_kernels(fn, leaves, batches[0], self._rng(21))
        self._prover.place_at((self._point(1, k) for k in range(100, 100 + DRAWS)), own=leaves)

        self._tried = search.candidates(trace, leaves)
        self._flows, self._shifts = offsets.flows(trace, leaves), offsets.Shifts(trace, leaves)
        self._gradients = Gradients(fn, batches)
        columns = max([*(len(one.columns) for one in self._tried), *(flow.columns for flow in self._flows)])
        self._rows = max(24, int(_ROWS * columns) + 8)
        # At one point there are at most as many independent gradients as output numbers in all batches. A scalar loss
        # has few, and therefore needs more points.
        self._at_once = min(-(-self._rows // _POINTS), self._gradients.outputs(leaves) * len(batches))
        self._untrue, self._unseen = list[str](), dict[str, str]()
        self._squares = {path: np.zeros(leaf.shape) for path, leaf in leaves.items()}

    def _rng(self, *purpose: int) -> np.random.Generator:
        return np.random.default_rng([self._seed, *purpose])

    def _point(self, *purpose: int, free: frozenset[str] = frozenset()) -> Leaves:
        """A random point near the given leaves. Entries of the leaves in `_signed` and `free` get random signs."""
        return generic_point(self._leaves, self._rng(*purpose), self._signed | free)

    # Gradients ------------------------------------------------------------------------------------

    def observe(self, bar: Any) -> None:
        """Takes gradients at random points, and passes them to all candidates, flows and shifts."""
        bar.total = bar.n + 3 + (count := -(-self._rows // self._at_once))
        if self._prover.untrue(self._gradients, self._at_once, self._rng(26)):
            self._gradients.compute_unfused()
            self._untrue = self._prover.untrue(self._gradients, self._at_once, self._rng(27))

        def point_at(number: int) -> Leaves:
            groups = len(self._tried)
            bar.set_postfix_str(f"gradients at point {number + 1} of {count}, for {groups} groups of motions")
            bar.update(number < count)
            return self._point(1, number)

        self._observe(point_at, 0, (2, 3))
        # Units that are dead at all points would look free to move. Other signs of their kernels' entries wake them up.
        masks = without_gradient(self._squares, self._prover.points[0])
        if hidden := {path for path, mask in masks.items() if mask.any() and self._leaves[path].ndim > 1
                      if self._prover.change_of_entries(path, mask, self._rng(22), turn=True) > STILL}:
            self._observe(lambda number: self._point(23, number, free=frozenset(hidden)), 1000, (24, 25))

    def _observe(self, points: Callable[[int], Leaves], first: int, purposes: tuple[int, int]) -> None:
        for k, point, gradient in search.sketched(
                self._tried, self._gradients, self._at_once, self._rows, points, self._squares, self._rng, purposes):
            self._shifts.observe(gradient)
            for n, flow in enumerate(self._flows):
                flow.observe(point, gradient, self._rng(9, first + k, n))

    # Null spaces ----------------------------------------------------------------------------------

    def without_effect(self) -> tuple[dict[str, np.ndarray], list[str], list[Uncovered]]:
        """Masks of the entries without a gradient, by path; leaves without effect; entries that no batch reaches."""
        masks, dead, uncovered, self._unseen = unreached(self._prover, self._squares, self._rng(4))
        self.rejected += self._unseen.values()
        if untrue := [path for path in self._untrue if not masks[path].all()]:
            self.rejected.append(
                f"{', '.join(untrue)}: gradients that are not the derivatives of the outputs (a straight-through "
                "estimator, stop_gradient?), so that symmetries that move these leaves may be missing")
        return masks, dead, uncovered

    def symmetries(self, masks: Mapping[str, np.ndarray]) -> tuple[list[Symmetry], list[Symmetry]]:
        """The symmetries that are exact by the gradients, and the near ones; those that others contain are left out."""
        found = [symmetry for one in self._tried for symmetry in one.solve(self._squares, masks, self._near)]
        point = self._point(1, 0)
        exact = independent([s for s in found if s.residual < ZERO], point, self._rng(7), dead=masks)
        close = [s for s in found if s.residual >= ZERO]
        limit = sorted([*(s.residual for s in close), *[np.inf] * _CLOSE])[_CLOSE - 1]
        return exact, independent([s for s in close if s.residual <= limit], point, self._rng(8), exact)

    # Finite moves ---------------------------------------------------------------------------------

    def proved(self, exact: Sequence[Symmetry], close: Sequence[Symmetry]) -> tuple[list[Held], list[Held]]:
        """The gauges of symmetries, and of shifts of logits, that finite moves confirm; and those that nearly hold."""
        prover, trace, near = self._prover, self._trace, self._near
        # The anchor of a norm's gauge should be the norm's scale, and not its bias, which may be zero.
        positive = {path for path, x in self._leaves.items() if (x > 0).all() or path not in trace.added}
        claims, unwritten = _claims(exact, trace, positive, prover)
        for reason, symmetry in unwritten:
            self._without_gauge(reason, symmetry)
        for places, residual in self._shifts.solve(softmax=True):
            claims.append(_Claim(shift_call(places), {view.path: 1.0 for view, _ in places}, residual))
        proved, failed = _proved(prover, claims, STILL, self._rng(5))
        # The gradients show these gauges as exact, but a finite move changes the outputs. If it changes them a little,
        # the gauges are tried again as near symmetries.
        little = [call for call, change in failed if change <= 10 * near]
        almost = [claim for claim in claims if any(claim.call is call for call in little)]
        turning = {id(claim.call): claim.symmetry for claim in claims if claim.call.kind == "head_rotation"}
        self.rejected += [
            refuted(call, change, prover) for call, change in failed if change > 10 * near
            if not self._without_gauge("rotations whose reflections are no symmetries", turning.get(id(call)))]
        larger, _ = _claims(close, trace, positive, prover)
        almost = [claim for claim in almost if not any(claim.call.within(one.call) for one in larger)]
        nearly, _ = _proved(prover, [*almost, *larger], 10 * near, self._rng(6))
        return proved, nearly

    def _without_gauge(self, reason: str, symmetry: Symmetry | None) -> bool:
        """Lists a symmetry in `ungauged` if a finite move confirms it; returns whether."""
        points = self._prover.points
        if symmetry is None or self._prover.change([symmetry.moved(x, self._rng(20)) for x in points]) > STILL:
            return False
        self.ungauged.setdefault(reason, []).append(", ".join(sorted(symmetry.paths)))
        return True

    def proved_of_stream(
        self, proved: Sequence[Held], exact: Sequence[Symmetry], masks: Mapping[str, np.ndarray]
    ) -> tuple[list[Held], list[_Addition]]:
        """The proved gauges that rotate or shift residual streams, and the additions for which no gauge was proved.

        An addition whose gauge failed the proof because of a clip, as in ReLU6, is not returned: it is no symmetry.

        Args:
          proved: the gauges of other symmetries.
          exact: these symmetries.
          masks: by path, masks of entries without a gradient.
        """
        matrices = [set(symmetry.paths) for symmetry in exact if symmetry.family == "linear"]
        still = {path: mask for path, mask in masks.items() if path not in self._unseen}
        additions = _additions(self._trace, still, self._flows, self._shifts, self._prover.points[0], matrices)
        norms = passed([one.call for one in proved if one.call.kind == "norm_scale"], self._params)
        turns = _rotations_of_stream(
            self._trace, self._leaves, self._gradients, self._at_once, norms, self._params, exact, masks, self._rng,
            self.ungauged)
        calls = offsets.merged_reads([addition.call for addition in additions if addition.call is not None])
        flat = [_Claim(call, dict.fromkeys(call.paths, 1.0), 0.0) for call in calls]
        found, failed = _proved(self._prover, [*turns, *flat], STILL, self._rng(17))
        self.rejected += [
            refuted(call, change, self._prover) for call, change in failed
            if np.isfinite(change) or self._prover.misfit(call)]
        clipped = [call for call, _ in self._prover.clipped]
        local = [call for call, _ in failed if not any(call is one for one in clipped)]  # failed, but not by a clip
        return found, [one for one in additions if one.call is None or any(one.call.within(call) for call in local)]

    def held(self, proved: Sequence[Held], additions: Sequence[_Addition]) -> list[Held]:
        """The gauges that hold together, in a report's order. Adds to `ungauged` what holds and no gauge makes."""
        held, refused = self._prover.together(in_order(proved))
        self.rejected += refused
        along_orbits = self._prover.along_orbits(held)
        for addition in additions:
            where = self.ungauged.get(addition.kind, [])
            # Each kind is a special case of the one before it, if it moves the same leaves: a change of a stream's
            # mean, for instance, adds a vector with equal entries. It is then not listed again.
            kinds = [offsets.COMMON_ROW, offsets.ABSORBED, offsets.ON_STREAM, offsets.PAST_NORMS, offsets.ONE_NUMBER]
            before = kinds[: kinds.index(addition.kind) + 1] if addition.kind in kinds else [addition.kind]
            if set(addition.where.split(" + ")) in (
                    set(one.split(" + ")) for kind in before for one in self.ungauged.get(kind, [])):
                continue
            moved = [addition.move(point) for point in self._prover.points] if addition.move is not None else []
            if not moved or (self._prover.change(moved) <= STILL and not along_orbits(moved[0])):
                self.ungauged[addition.kind] = [*where, addition.where]
        return held


class _Claim(NamedTuple):
    """A gauge before its proof, made for `symmetry` if that is given. `exponents` and `residual` are as in `Held`."""

    call: Call
    exponents: Mapping[str, float]
    residual: float
    symmetry: Symmetry | None = None


def in_order(held: Sequence[Held]) -> list[Held]:
    """Gauges in the order of a report."""
    return sorted(held, key=lambda one: (*TRAINING, *REST).index(one.call.kind))


class _Addition(NamedTuple):
    """An addition to leaves that norms or biases hide (`offsets`).

    Attributes:
      kind: what it is, in words.
      where: the leaves that it moves, in words.
      call: the call of its gauge; None if there is none.
      move: point → the point after a finite move; None if gradients are proof enough.
    """

    kind: str
    where: str
    call: Call | None
    move: Callable[[Leaves], Leaves] | None


def _additions(
    trace: Trace, dead: Mapping[str, np.ndarray], flows: Sequence[offsets.Flow], shifts: offsets.Shifts,
    point: Leaves, matrices: Sequence[set[str]],
) -> list[_Addition]:
    """The additions to leaves to which all gradients of the outputs are orthogonal.

    Args:
      trace: the walk over the function's jaxpr.
      dead: by path, masks of entries without effect.
      flows: kinds of additions (`offsets.flows`) that have got the gradients.
      shifts: constants along axes (`offsets.Shifts`) that have got the gradients.
      point: any point; an addition is made there to see which leaves it moves.
      matrices: for each symmetry under all invertible matrices, the leaves that it moves. A shift of a stream's mean
        that moves exactly these leaves is left out, because the symmetry contains it.
    """
    additions = []
    for places, _ in shifts.solve(softmax=False):
        kind = "a constant along an axis that only centred norms read"
        additions += [_Addition(kind, call.paths[0], call, None) for call in write_shift_calls(places)]
        additions += [_Addition(scaled_products.KIND, where, None, move)
                      for where, move in scaled_products.turned_products(shifts, places)]
    for k, flow in enumerate(flows):
        for row in flow.solve():
            if flow.kind == offsets.PAST_NORMS and set(flow.paths(row, point)) in matrices:
                continue
            call = None
            with contextlib.suppress(Unwritable):
                call = flow.call(row)
            where = " + ".join(flow.paths(row, point))
            additions.append(_Addition(flow.kind, where, call, functools.partial(flow.moved, row, seed=k)))
    hidden = {path for one in additions if one.call is not None and one.call.kind == "norm_write_shift"
              for path in one.call.paths}
    traded = [one.call.paths for one in additions if one.call is not None and one.call.kind == "embedding_shift"]
    for path, axes in shifts.constants():
        if any(path in paths and hidden & set(paths) for paths in traded):
            # The moves of two gauges add up to this one: an `embedding_shift` moves the constant to a second leaf, and
            # a `norm_write_shift` removes it there, because a norm hides it.
            continue
        kind = "one constant on all entries, which norms that subtract a mean, or a softmax, hide"
        call = Call("norm_write_shift", {"tied": {path: axes}}) if axes else None
        additions.append(_Addition(kind, path, call, functools.partial(_raised, path)))
    unread = [offsets.unread_bias_call(trace, path, mask) for path, mask in dead.items() if mask.any()]
    additions += [_Addition("a bias without effect", one.paths[0], one, None) for one in unread if one is not None]
    return additions


def _raised(path: str, point: Leaves) -> Leaves:
    """A point at which one constant, the leaf's root mean square, is added to all entries of a leaf."""
    return {**point, path: point[path] + np.sqrt(np.mean(np.square(point[path])))}


def _rotations_of_stream(
    trace: Trace, leaves: Leaves, gradients: Gradients, at_once: int, norms: Sequence[Call], params: Any,
    before: Sequence[Symmetry], dead: Mapping[str, np.ndarray], rng: Callable[..., np.random.Generator],
    ungauged: dict[str, list[str]],
) -> list[_Claim]:
    """Claims for the rotations of the residual stream (`stream`); adds those without a gauge to `ungauged`."""
    claims = []
    matrices = {path for one in before if one.family not in ("diagonal", "per_plane") for path in one.paths}
    for symmetry in stream_rotations(trace, leaves, gradients, at_once, _ROWS, norms, params, before, dead, rng):
        try:
            call = rotation_call(symmetry, trace, norms, params)
            if not call.norms and symmetry.family == "orthogonal" and matrices.isdisjoint(symmetry.paths):
                call = written(symmetry, trace.layer_spaces(), ())  # not a stream: a plain rotation of a few leaves
        except Unwritable as reason:
            ungauged.setdefault(str(reason), []).append(", ".join(sorted(symmetry.paths)))
        else:
            claims.append(_Claim(call, dict.fromkeys(sorted(symmetry.paths), 1.0), symmetry.residual))
    return claims


def refuted(call: Call, change: float, prover: Prover) -> str:
    """A row of the report on a gauge that cannot be bound to the parameters, or whose moves change the outputs."""
    if (misfit := prover.misfit(call)) is not None:
        return f"{call.kind} of {', '.join(call.paths)}: no gauge can bind it ({misfit})"
    where = next((f" {where}: a clip ends it" for one, where in prover.clipped if one is call), "")
    return f"{call.kind} of {', '.join(call.paths)}: moves the outputs by {change:.1e}{where}"


def _claims(
    symmetries: Sequence[Symmetry], trace: Trace, positive: set[str], prover: Prover
) -> tuple[list[_Claim], list[tuple[str, Symmetry]]]:
    """Claims (gauges to be proved) of symmetries, and the symmetries that have no gauge, each with the reason."""
    claims, unwritten = [], list[tuple[str, Symmetry]]()
    kernels = {kernel for _, kernel in trace.vector_reads}
    for symmetry in symmetries:
        signs = {"covector": -1.0}
        exponents = {t.piece.path: round(t.exponent * signs.get(t.mode, 1.0), 6) for t in symmetry.terms}
        try:
            call = written(symmetry, trace.layer_spaces(), positive, kernels)
        except Unwritable as reason:
            unwritten.append((str(reason), symmetry))
            continue
        if (misfit := prover.misfit(call)) is None:
            claims.append(_Claim(call, exponents, symmetry.residual, symmetry))
        else:  # for example a recurrent kernel, on both of whose axes one scale acts
            unwritten.append((f"a move that no gauge can bind ({misfit})", symmetry))
    return claims, unwritten


def _proved(
    prover: Prover, claims: Sequence[_Claim], most: float, rng: np.random.Generator
) -> tuple[list[Held], list[tuple[Call, float]]]:
    """Gauges whose finite moves change the outputs by at most `most`, and the calls of the others with their change.

    Claims for several layers are merged into one gauge first. If this gauge fails, its claims are proved one by one. A
    claim that fails is tried again with only the elements that are connected with the identity: in front of a ReLU, for
    instance, a norm's scale may have positive factors alone.
    """
    evidence = {id(claim.call): claim for claim in claims}

    def held(call: Call, group: Sequence[Call], change: float) -> Held:
        merged = [evidence[id(one)] for one in group]
        exponents = {path: exponent for claim in merged for path, exponent in claim.exponents.items()}
        parts = tuple(held(one, [one], change) for one in group) if len(group) > 1 else ()
        return Held(call.gauge(), call, exponents, max(claim.residual for claim in merged), change, parts)

    merged = merge_layers([claim.call for claim in claims], prover.same_leaves)
    changes = prover.changes([call for call, _ in merged], rng)
    again = [call for (_, group), change in zip(merged, changes, strict=True) if change > most for call in group]
    retried = list(zip(again, prover.changes(again, rng), strict=True))
    proved = [held(*pair, change) for pair, change in zip(merged, changes, strict=True) if change <= most]
    proved += [held(call, [call], change) for call, change in retried if change <= most]
    failed = [(call, change) for call, change in retried if change > most]
    if smaller := {id(call): one for call, _ in failed if (one := prover.connected(call)) is not None}:
        more, still = _proved(prover, [evidence[k]._replace(call=one) for k, one in smaller.items()], most, rng)
        refused = {id(call) for call, _ in still}
        kept = {k for k, one in smaller.items() if id(one) not in refused}
        proved, failed = proved + more, [(call, change) for call, change in failed if id(call) not in kept]
    return proved, failed
