"""`discover`: the symmetries of a function, found, proved by finite moves, and written as gauges.

Here: the order of the steps, what is refused, and the report. Not here: the steps (`trace`, `sketch`, `search`,
`write`).
"""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
from tqdm import tqdm

from gauge_optax.binding import binding_error, with_leaves
from gauge_optax.discovery import affine, checks, search
from gauge_optax.discovery.calls import Call, Held, merge_layers
from gauge_optax.discovery.motions import ZERO, Symmetry, independent
from gauge_optax.discovery.nulls import solve
from gauge_optax.discovery.prove import Prover, constructed, rebound
from gauge_optax.discovery.rules import RULES
from gauge_optax.discovery.search import Candidate
from gauge_optax.discovery.sketch import Gradients, Leaves, generic_point
from gauge_optax.discovery.trace import Walked, walk
from gauge_optax.discovery.write import Unwritable, shift_call, written
from gauge_optax.gauges.base import Gauge

Outputs = Literal["logits", "logprobs", "loss"]
POINTS = 5
_ROWS = 1.5  # rows of gradients for each column, so that no null vector is an accident
_DEAD = 1e-11  # of a typical entry's gradient
_ORDER = ("norm_scale", "scale_invariant", "head_rotation", "head_linear", "rope_torus", "rope_linear", "rescale",
          "logit_shift")  # fmt: skip


class Uncovered(NamedTuple):
    """Entries that no batch reaches: rows of an embedding, positions, experts."""

    path: str
    entries: int
    of: int


@dataclasses.dataclass(frozen=True, repr=False)
class Report:
    """What `discover` found.

    Attributes:
      gauges: those that held, ready for `go.quotient`.
      held: the same with their evidence.
      nearly: gauges broken by less than `near`, as by a norm's eps, with the change they make.
      rejected: candidates that a finite move refuted, or that the library cannot bind beside the others, and why.
      dead: leaves whose values do not matter.
      uncovered: entries that no batch reaches; nothing is known of them.
      ungauged: symmetries that hold and have no gauge: kind → where.
    """

    held: tuple[Held, ...]
    nearly: tuple[Held, ...]
    rejected: tuple[str, ...]
    dead: tuple[str, ...]
    uncovered: tuple[Uncovered, ...]
    ungauged: Mapping[str, tuple[str, ...]]

    @property
    def gauges(self) -> list[Gauge]:
        """The gauges that held."""
        return [held.gauge for held in self.held]

    def code(self) -> str:
        """The gauges as Python source, an expression in `go`."""
        return "\n".join(["[", *(textwrap.indent(held.call.source(), "  ") + "," for held in self.held), "]"])

    def rebind(self, params: Any, **sizes: int) -> list[Gauge]:
        """The gauges on a larger instance of the same architecture.

        Captures and named axes carry over as they are; lengths inside parentheses do not.

        Args:
          params: the larger tree; shapes are enough.
          **sizes: lengths by axis name, for those that the small instance's gauges state (`head=32`).

        Returns:
          Gauges that bind to it.

        Raises:
          ValueError: a gauge that does not fit; a range of an axis, which is the small instance's own; a length of an
            axis that no gauge states.
        """
        stated = {name for held in self.held for name in held.call.sizes}
        if unknown := sizes.keys() - stated:
            raise binding_error(
                "rebind", f"no gauge states a length of {', '.join(sorted(unknown))}",
                f"stated: {', '.join(sorted(stated)) or 'none'}", "axes that the gauges' `sizes` name",
                "leave it out: other lengths are read off the larger tree's shapes")
        return [rebound(held.call, params, sizes) for held in self.held]

    def __repr__(self) -> str:
        return str(self)

    def __str__(self) -> str:
        rows = [f"{len(self.held)} gauges"] + [f"  {held}" for held in self.held]
        for title, items in (
            ("nearly", self.nearly),
            ("rejected", self.rejected),
            ("dead leaves", self.dead),
            ("not reached", [f"{u.entries} of {u.of} entries of {u.path}" for u in self.uncovered]),
            ("no gauge for", [f"{kind}: {', '.join(where)}" for kind, where in self.ungauged.items()]),
        ):
            rows += [title] * bool(items) + [f"  {item}" for item in items]
        return "\n".join(rows)


def discover(
    fn: Callable[[Any, Any], Any],
    params: Any,
    batches: Sequence[Any],
    outputs: Outputs = "logits",
    linear: bool = False,
    near: float = 1e-3,
    seed: int = 0,
    progress: bool = True,
) -> Report:
    """Finds the gauges of a function: nothing is written by hand, and everything returned was proved by finite moves.

    Args:
      fn: pure function (params, batch) to outputs, an array or a tree of them; called in float64.
      params: its parameters, any pytree; a small instance of an architecture tells as much as a large one.
      batches: at least two of what `fn` takes; together they should reach what training reaches.
      outputs: "logits": what `fn` returns matters up to a constant along the last axis; "logprobs" or "loss": as it is.
      linear: GL(d_h), and what of it commutes with rotary, in place of the rotations in them.
      near: largest singular value, of a column, that is reported as nearly a symmetry.
      seed: of points, projections and elements.
      progress: whether to show a bar.

    Returns:
      The report; `report.gauges` is what `go.quotient` takes, `report.code()` its source.

    Raises:
      ValueError: no floating-point leaves, outputs that are not finite, differ between two calls or are computed in
        less than double precision, a batch too few, an unknown kind of outputs.

    >>> def fn(p, x):
    ...     return jax.nn.relu(x @ p["up"]) @ p["down"]
    >>> params = {"up": jnp.ones((2, 3)), "down": jnp.ones((3, 4))}
    >>> x, y = jnp.sin(jnp.arange(16.0)).reshape(2, 4, 2)
    >>> report = go.discover(fn, params, [x, y], outputs="loss", progress=False)
    >>> print(report.code())
    [
      go.rescale(
        up={'up': '_ channel'},
        down={'down': 'channel _'},
      ),
    ]

    Reference: ours; docs/design.md, "Gauges found". Not found: symmetries that no entry of an index space carries
    (SO(d) of a residual stream under norms with scales).
    """
    batches = checks.listed(batches)
    checks.check_arguments(outputs, batches, near, seed)
    with jax.enable_x64(True):
        discovery = _Discovery(fn, params, batches, outputs, linear, near, seed)
        with tqdm(total=4 + POINTS, desc="discover", disable=not progress, leave=False) as bar:
            return discovery.run(bar)


class _Discovery:
    """One call of `discover`."""

    def __init__(
        self, fn: Any, params: Any, batches: Sequence[Any], outputs: str, linear: bool, near: float, seed: int
    ) -> None:
        self.params, self.linear, self.near, self.seed = params, linear, near, seed
        self.leaves = checks.double_leaves(params)
        self.batches = [checks.double_batch(batch) for batch in batches]

        def by_leaves(leaves: Mapping[str, Any], batch: Any) -> Any:
            return checks.compared(fn(with_leaves(params, leaves), batch), outputs)

        self.fn = by_leaves

    def rng(self, *what: int) -> np.random.Generator:
        """A generator of its own for each purpose."""
        return np.random.default_rng([self.seed, *what])

    def run(self, bar: Any) -> Report:
        bar.set_postfix_str("tracing")
        walked = self._walk()
        bar.update()
        prover = Prover(self.fn, self.params, self.batches, [self._point(100), self._point(101)])
        prover.check_outputs(self.leaves)
        bar.set_postfix_str("gradients")
        tried = search.candidates(walked, self.leaves)
        flows = affine.flows(walked, self.leaves)
        squares, shifts = self._observe(walked, tried, flows, bar)
        bar.set_postfix_str("null spaces")
        dead, uncovered, asleep, rejected = self._dead(squares, prover)
        held, nearly = self._solve(tried, squares, asleep)
        bar.update()
        bar.set_postfix_str("finite moves")
        layers = tuple(walked.trace.spaces.key(axis) for axis in walked.trace.stacked)
        writer = _Writer(prover, self.linear, layers, [p for p, x in self.leaves.items() if (x > 0).all()])
        proved = writer.prove([*writer.calls(held), *shift_calls(shifts.found())], ZERO, self.rng(5))
        closely = _Writer(prover, self.linear, layers, writer.positive)
        almost = closely.prove(closely.calls(nearly), 10 * self.near, self.rng(6))
        rejected += [f"{call.kind} of {', '.join(call.paths)}: moves by {change:.1e}" for call, change in writer.failed]
        kept, refused = prover.together(sorted(proved, key=lambda h: _ORDER.index(h.call.kind)))
        ungauged = {**writer.ungauged, **affine.unseen(flows, prover.points, prover.change), **_constants(shifts)}
        bar.update()
        return Report(tuple(kept), tuple(almost), (*rejected, *refused), dead, uncovered, ungauged)

    def _point(self, k: int) -> Leaves:
        return generic_point(self.leaves, self.rng(1, k))

    def _walk(self) -> Walked:
        names = list(self.leaves)

        def positional(*leaves: Any) -> Any:
            return self.fn(dict(zip(names, leaves, strict=True)), self.batches[0])

        walked = walk(jax.make_jaxpr(positional)(*self.leaves.values()), RULES)
        checks.check_precision(walked.trace.low)
        return walked

    def _observe(
        self, walked: Walked, tried: Sequence[Candidate], flows: Sequence[affine.Flow], bar: Any
    ) -> tuple[Leaves, search.Shifts]:
        gradients = Gradients(self.fn, self.batches)
        columns = max([*(len(one.columns) for one in tried), *(flow.columns for flow in flows)])
        rows = max(24, int(_ROWS * columns) + 8)
        at_once = min(-(-rows // POINTS), gradients.outputs(self.leaves) * len(self.batches))
        points = -(-rows // at_once)
        bar.total = 4 + points
        squares = {path: np.zeros(leaf.shape) for path, leaf in self.leaves.items()}
        shifts = search.Shifts(walked, self.leaves)
        for k in range(points):
            point = self._point(k)

            def watched(point: Leaves = point, k: int = k) -> Iterator[Leaves]:
                for chunk in gradients.at(point, at_once, self.rng(2, k)):
                    affine.observe(flows, point, [chunk], [self.seed, 9, k])
                    yield chunk

            found = search.observe(tried, shifts, point, watched(), [self.seed, 3, k])
            squares = {path: squares[path] + found[path] for path in squares}
            bar.update()
        return squares, shifts

    def _dead(
        self, squares: Leaves, prover: Prover
    ) -> tuple[tuple[str, ...], tuple[Uncovered, ...], dict[str, np.ndarray], list[str]]:
        sizes = {path: np.sqrt(x) for path, x in squares.items()}
        live = np.concatenate([x[x > 0] for x in sizes.values()])
        asleep = {path: x <= _DEAD * (np.median(live) if live.size else 0.0) for path, x in sizes.items()}
        dead, uncovered, rejected = [], [], []
        for path, entries in asleep.items():
            if not entries.any():
                continue
            change = prover.change_of_entries(path, entries, self.rng(4))
            if change > ZERO:
                rejected.append(f"{path}: no gradient (stop_gradient?), but its value moves by {change:.1e}")
            elif entries.all():
                dead.append(path)
            else:
                uncovered.append(Uncovered(path, int(entries.sum()), entries.size))
        return tuple(dead), tuple(uncovered), asleep, rejected

    def _solve(
        self, tried: Sequence[Candidate], squares: Leaves, asleep: Mapping[str, np.ndarray]
    ) -> tuple[list[Symmetry], list[Symmetry]]:
        found = [symmetry for one in tried for symmetry in solve(one, squares, asleep, self.near)]
        exact = [symmetry for symmetry in found if symmetry.residual < ZERO]
        point = self._point(0)
        kept = independent(exact, point, self.rng(7))
        both = independent([s for s in found if s.residual >= ZERO], point, self.rng(8), kept)
        return kept, both


def _constants(shifts: search.Shifts) -> dict[str, tuple[str, ...]]:
    hidden = [view.path for views, _ in shifts.found(read=True) for view, _ in views]
    return {"a constant along an axis that only centred norms read": tuple(dict.fromkeys(hidden))} if hidden else {}


def shift_calls(shifts: Sequence[Any]) -> list[tuple[Call, dict[str, float], float]]:
    """Calls of shifts along one space each, with exponents and residual."""
    return [(shift_call(views), {view.path: 1.0 for view, _ in views}, residual) for views, residual in shifts]


class _Writer:
    """Symmetries as gauges that held, and what could not be written."""

    def __init__(
        self, prover: Prover, linear: bool, layers: Sequence[tuple[int, ...]], positive: Sequence[str]
    ) -> None:
        self._prover, self._linear, self._layers, self.positive = prover, linear, layers, positive
        self._ungauged: dict[str, list[str]] = {}
        self.failed: list[tuple[Call, float]] = []

    @property
    def ungauged(self) -> Mapping[str, tuple[str, ...]]:
        """Kind → where."""
        return {kind: tuple(where) for kind, where in self._ungauged.items()}

    def calls(self, found: Sequence[Symmetry]) -> list[tuple[Call, dict[str, float], float]]:
        """What can be written."""
        out = []
        for symmetry in found:
            signs = {"covector": -1.0}
            exponents = {t.piece.path: round(t.exponent * signs.get(t.mode, 1.0), 6) for t in symmetry.terms}
            try:
                out.append((written(symmetry, self._linear, self._layers, self.positive), exponents, symmetry.residual))
            except Unwritable as reason:
                self._ungauged.setdefault(str(reason), []).append(", ".join(sorted(symmetry.paths)))
        return out

    def prove(
        self, calls: Sequence[tuple[Call, dict[str, float], float]], most: float, rng: np.random.Generator
    ) -> list[Held]:
        """Those whose finite moves change the outputs by at most `most`; merged layers fall apart where they fail."""
        evidence = {id(call): (exponents, residual) for call, exponents, residual in calls}
        merged = merge_layers([call for call, _, _ in calls])
        merged = [(one, group) for call, group in merged for one, group in self._same(call, group)]
        changes = self._prover.changes([call for call, _ in merged], rng)
        again = [c for (_, group), change in zip(merged, changes, strict=True) if change > most for c in group]
        alone = self._prover.changes(again, rng)
        done = [(call, group, change) for (call, group), change in zip(merged, changes, strict=True) if change <= most]
        done += [(call, [call], change) for call, change in zip(again, alone, strict=True) if change <= most]
        self.failed += [(call, change) for call, change in zip(again, alone, strict=True) if change > most]
        return [self._held(call, group, evidence, change) for call, group, change in done]

    def _held(
        self, call: Call, group: Sequence[Call], evidence: Mapping[int, tuple[dict[str, float], float]], change: float
    ) -> Held:
        parts = () if len(group) == 1 else tuple(self._held(own, [own], evidence, change) for own in group)
        exponents = {path: e for own in group for path, e in evidence[id(own)][0].items()}
        residual = max(evidence[id(own)][1] for own in group)
        return Held(constructed(call), call, exponents, residual, change, parts)

    def _same(self, call: Call, group: list[Call]) -> list[tuple[Call, list[Call]]]:
        """A merged call where it binds exactly what its group does."""
        return [(call, group)] if self._prover.binds_alike(call, group) else [(one, [one]) for one in group]
