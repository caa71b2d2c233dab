"""`discover`: searches for the symmetries of a function, proves them by finite moves, and writes them as gauges.

The function is traced, and `trace` finds the axes on which groups could act. At random points `search` and `offsets`
look for moves that no gradient of the outputs sees. `write` makes each a `Call` of a gauge's constructor. A gauge holds
if a random finite move of it changes the outputs by no more than roundoff (`prove`). If a function is large, a small
instance of it is searched, and the gauges are proved again on the large one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from tqdm import tqdm

from gauge_optax.binding import leaves_by_path, with_leaves
from gauge_optax.discovery import checks, offsets, scaled_products, search
from gauge_optax.discovery.axes import LeafAxes, Mappings, read_axes
from gauge_optax.discovery.calls import Call, merge_layers
from gauge_optax.discovery.census import Census
from gauge_optax.discovery.certificate import certified
from gauge_optax.discovery.checks import Outputs
from gauge_optax.discovery.cut import Unlike
from gauge_optax.discovery.groups import STILL, ZERO, Symmetry, independent
from gauge_optax.discovery.layers import Shallow, shallower
from gauge_optax.discovery.lift import in_double
from gauge_optax.discovery.prove import Held, Prover
from gauge_optax.discovery.shrink import LARGE, smaller
from gauge_optax.discovery.sketch import (
    DRAWS,
    Function,
    Gradients,
    Leaves,
    generic_point,
    positive_kernels,
    root_mean_square,
    squared_gradients,
)
from gauge_optax.discovery.stream import passed, rotation_call, stream_rotations
from gauge_optax.discovery.trace import Trace, traced_once, walked
from gauge_optax.discovery.write import Unwritable, shift_call, write_shift_calls, written
from gauge_optax.errors import binding_error
from gauge_optax.gauges.gauge import Gauge, Gauges, product
from gauge_optax.transformation import own_settings, require_no_tracers
from gauge_optax.xla import unseen

_POINTS = 5  # points with gradients: at one alone, units may be dead, and their moves only seem to be symmetries
_CLOSE = 12  # by their gradients many symmetries nearly hold; at most so many are tried by a finite move
_REACH = 2  # gradients at so many points, at most, show which entries of a large instance its batches reach
_ROWS = 1.5  # gradients per column of `search`: fewer gradients than columns leave null vectors by chance
_STILL_AT_SIZE = 10 * STILL  # sums are longer at full size: outputs of a GPT of 124 million parameters move by 1.3e-12
_DEAD = 1e-11  # an entry of a leaf has no effect if its gradient, relative to the median of all entries, is smaller
# The order in which a report lists gauges: first those that optimizers take, then those that make a step dearer.
_TRAINING = ("norm_scale", "scale_invariant", "head_rotation", "head_linear", "rope_torus", "rope_linear", "rescale",
             "logit_shift")
_REST = ("residual_rotation", "norm_read_shift", "norm_write_shift", "embedding_shift", "key_bias", "bias_absorption")


class Uncovered(NamedTuple):
    """How many of a leaf's entries no batch reaches (`entries` of `of`), such as rows of an embedding or experts.

    >>> Uncovered("table", 3, 7).entries
    3
    """

    path: str
    entries: int
    of: int


class _Claim(NamedTuple):
    """A gauge before its proof; `exponents` and `residual` are those of `Held`."""

    call: Call
    exponents: Mapping[str, float]
    residual: float


@dataclasses.dataclass(frozen=True, repr=False)
class Report(Mappings):
    """The result of `discover`.

    Attributes:
      held: the gauges that hold, with their evidence.
      nearly: gauges whose finite moves change the outputs by less than ten times `near`, relative to their size, for
        example because of a norm's eps.
      rejected: candidates that a finite move refutes, or that the library cannot bind along with `held`, with reasons.
      dead: leaves whose values do not affect the outputs.
      uncovered: entries of leaves that no batch reaches; nothing is known about them.
      ungauged: symmetries that hold and have no gauge: kind, in words → the leaves of each such symmetry.
      census: computes `certificate`.
      axes: which axes of each leaf are inputs and outputs. Its text is the source of `neurons` and `embeddings`.
      outputs: what `fn` returns, as the caller said or as the function shows. It is None if neither was the case. Then
        every change of the outputs counted.
    """

    held: tuple[Held, ...]
    nearly: tuple[Held, ...]
    rejected: tuple[str, ...]
    dead: tuple[str, ...]
    uncovered: tuple[Uncovered, ...]
    ungauged: Mapping[str, tuple[str, ...]]
    census: Callable[[], Census] | None = dataclasses.field(default=None, repr=False, compare=False)
    axes: LeafAxes = LeafAxes()  # noqa: RUF009  it is frozen
    outputs: Outputs | None = None
    _assumed: bool = False  # whether a softmax of the outputs was assumed, and not stated by the caller

    @functools.cached_property
    def certificate(self) -> Census:
        """How many directions of the weights change no output, and how many of these the gauges explain.

        The first access computes it, by `go.measure.census` at a random point: in seconds for 2,000 parameters, in a
        minute for 6,000. In larger trees it counts the directions inside blocks of entries, a lower bound. After ten
        minutes it counts no further block. If `discover` searched a small instance of the tree, the directions of that
        instance are counted. The inputs are the batches, and new ones drawn from the numbers in them. It shows a bar if
        `discover` does. Raises what `go.measure.census` raises, and a ValueError if `discover` did not make the report.
        """
        if self.census is None:
            raise binding_error(
                "certificate", "no function whose directions could be counted",
                "a report of rebind, which proves nothing, or one that discover did not make", "the report of discover",
                "write go.measure.census(fn, params, batches, report.whole)")
        return self.census()

    @property
    def gauges(self) -> list[Gauge]:
        """The gauges for optimizers: scales, shifts of logits, matrices of heads. They make a step hardly dearer.

        Where two factors have fewer rows than columns, as two vectors have, an optimizer cannot read the matrix that
        `whole` has for them. Here they have a rotation and one scale.
        """
        return [held.gauge for held in self._trained]

    @property
    def turning(self) -> list[Gauge]:
        """All of `gauges`, with rotations of heads in place of any invertible matrices.

        `max_norm_muon` takes this list, because other matrices change the norms of neurons, which it bounds.
        """
        return [held.call.turning().gauge() for held in self._trained]

    @property
    def _trained(self) -> list[Held]:
        held = [one for one in self.held if one.call.kind in _TRAINING]
        return [part for one in held for part in (
            [one._replace(call=call, gauge=call.gauge()) for call in one.call.trained] or [one])]

    @property
    def whole(self) -> tuple[Gauge, ...]:
        """Every gauge that holds, for `census`, `canonicalize`, `rotate` and `align`.

        It contains `gauges`, with all matrices where `gauges` has a rotation and a scale of factors of few rows; the
        rotation of the residual stream; and the constants that norms and biases hide.
        """
        return tuple(held.gauge for held in self.held)

    def code(self, gauges: Gauges | None = None) -> str:
        """A list of gauges as a Python expression that uses the library as `go`.

        Args:
          gauges: a gauge or several; None for `report.gauges`.

        Returns:
          The source of a list.
        """
        listed = self.gauges if gauges is None else [gauges] if isinstance(gauges, Gauge) else gauges
        return "\n".join(["[", *(textwrap.indent(repr(gauge), "  ") + "," for gauge in listed), "]"])

    def rebind(self, params: Any, **sizes: int) -> Report:
        """The same gauges on a larger instance of the same architecture. It proves nothing anew.

        Paths and axes stay as they are. Lengths that `report.code()` shows as `sizes=` change: state all of them,
        because `rebind` reads shapes alone and cannot tell two heads of 8 from four heads of 4.

        Args:
          params: the larger tree; shapes are enough.
          **sizes: the larger instance's lengths of the axes that the gauges' `sizes` name (`head=32`).

        Returns:
          A report whose `gauges` and `whole` bind to `params`.

        Raises:
          ValueError: a gauge does not fit the tree, or contains a range of an axis, which holds for the small instance
            only, or `sizes` names an axis whose length no gauge states.
        """
        stated = {f"{name}={n}" for held in self.held for name, n in held.call.sizes.items()}
        names = {text.split("=")[0] for text in stated}
        if unknown := sizes.keys() - names:
            fitting = {n: x for held in self.held for n, x in held.call.lengths(params, sizes).items() if n in names}
            lengths = ", ".join(f"{name}={fitting.get(name, '...')}" for name in sorted(names))
            raise binding_error(
                "rebind", f"no gauge states a length of {', '.join(sorted(unknown))}",
                f"stated lengths: {', '.join(sorted(stated)) or 'none'}",
                "lengths that the gauges state; all others are read from the larger tree's shapes",
                f"write rebind(params{lengths and ', '}{lengths})")
        calls = [held.call.rebound(params, sizes) for held in self.held]
        moved = [held._replace(gauge=c.gauge(), call=c, parts=()) for held, c in zip(self.held, calls, strict=True)]
        return dataclasses.replace(self, held=_readable(moved, params), nearly=(), census=None)

    def __repr__(self) -> str:
        return str(self)

    def __str__(self) -> str:
        rest = [held for held in self.held if held.call.kind in _REST]
        count = len(self._trained)
        rows = [f"{count} gauge{'s' * (count != 1)}"] + [f"  {held}" for held in self._trained]
        asked = "pass outputs='logits' if a softmax of them follows, which hides a shift; else outputs='predictions'"
        for title, items in (
            (f"{len(rest)} more in report.whole, which make a training step dearer", rest),
            ("in report.whole as all invertible matrices, of which factors of few rows show a rotation and a scale",
             [held for held in self.held if held.call.trained]),
            ("nearly gauges: the outputs change a little, for example because of a norm's eps", self.nearly),
            ("rejected candidates", self.rejected),
            ("leaves that do not affect the outputs", self.dead),
            ("not reached by any batch", [f"{u.entries} of {u.of} entries of {u.path}" for u in self.uncovered]),
            ("symmetries without a gauge", [f"{kind}: {', '.join(where)}" for kind, where in self.ungauged.items()]),
            ("axes that the function does not decide", [f"{path}: {why}" for path, why in self.undecided.items()]),
            ("the function does not show what its outputs are, so that every change of them counted",
             [asked] * (self.outputs is None)),
            ("outputs taken for logits, as many per token as its table has rows",
             ["pass outputs='predictions' if no softmax follows: then their shift is a change"] * self._assumed),
        ):
            rows += [title] * bool(items) + [f"  {item}" for item in items]
        return "\n".join(rows)


def discover(
    fn: Callable[[Any, Any], Any], params: Any, batches: Sequence[Any], outputs: Outputs | None = None,
    near: float = 1e-3, seed: int = 0, progress: bool = True,
) -> Report:
    """Finds the gauges of a function, and proves each by a random finite move, which must not change the outputs.

    Args:
      fn: pure function (params, batch) to outputs, an array or a tree of them; called in float64.
      params: its parameters, any pytree, such as a dict, an NNX or an equinox module; shapes (`jax.eval_shape`) are
        enough. Large trees are searched on a small instance, with shorter axes and with three of many layers that are
        alike in a list or dict; every gauge is proved on `params`.
      batches: at least two values that `fn` accepts; together they should reach what training reaches.
      outputs: what `fn` returns. With "logits", outputs count as unchanged if one number is added to all entries along
        the last axis, because a softmax follows; with "predictions" (of a regression, or of a sigmoid's logit),
        "logprobs" or "loss", every change counts. By default `discover` looks at the function. If each token of a batch
        looks up one of V rows of a table and has V outputs, these are taken for logits, unless the rows are V long too,
        and the report says so. If the outputs come from a softmax or are single numbers, every change counts. Other
        arrays, such as `model(x)` of images, may be logits or predictions. Then every change counts, so that no gauge
        is false, and the report asks you to pass `outputs`.
      near: a move is tested as nearly a symmetry if, by the gradients, it changes the outputs by less than this,
        relative to the change if its leaves moved each on its own.
      seed: seed of the random points, projections of outputs, and moves.
      progress: whether to show a bar.

    Returns:
      The report: `report.gauges` is a list for `go.quotient`, `report.code()` is its source; `report.whole` has every
      gauge.

    Raises:
      ValueError: an NNX module that holds one variable under two paths; no floating-point leaves; complex leaves or
        outputs; outputs that are not finite or differ between two calls; an operation that has no float64 version,
        named with its line; fewer than two batches; an unknown kind of outputs; "logits" for one number per example.

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

    Reference: ours; docs/design.md, "Gauges found".
    """
    require_no_tracers("discover", params, batches)
    batches = unseen(checks.checked_batches(batches, outputs, near, seed))
    checks.check_modules(params)
    params = jax.tree.map(_as_read, params)
    checks.check_function(fn, params, batches)
    tree = leaves_by_path(params)
    checks.check_paths(tree)
    shallow = shallower(fn, params, batches[0]) if sum(map(np.size, tree.values())) > LARGE else None
    with own_settings(wide=True), tqdm(total=8, desc="discover", disable=not progress, leave=False) as bar:
        if shallow is not None:
            with contextlib.suppress(Unlike):
                return _discovered(fn, params, shallow, batches, outputs, near, seed, bar)
            bar.reset(total=8)
        return _discovered(fn, params, None, batches, outputs, near, seed, bar)


def _as_read(leaf: Any) -> Any:
    """A NumPy array in the dtype in which a program reads it, without 64 bits unless they are enabled; or the leaf."""
    return leaf.astype(jax.dtypes.canonicalize_dtype(leaf.dtype), copy=False) if isinstance(leaf, np.ndarray) else leaf


def _discovered(
    fn: Callable[[Any, Any], Any], params: Any, shallow: Shallow | None, batches: Sequence[Any],
    outputs: Outputs | None, near: float, seed: int, bar: Any,
) -> Report:
    """Makes the report of `discover`, and searches the function with fewer layers if `shallow` is given.

    Args:
      fn: function of params and a batch.
      params: the whole tree.
      shallow: the function and its tree with fewer layers; None to search the whole function.
      batches: at least two.
      outputs: what fn returns, if the user says it.
      near: as in `discover`.
      seed: seed of everything random.
      bar: the progress bar.

    Raises:
      Unlike: a gauge that holds with fewer layers does not hold with all.
    """
    searched, tree = (fn, params) if shallow is None else (shallow.fn, shallow.tree)
    leaves = checks.double_leaves(tree, seed)
    bar.set_postfix_str("tracing")
    double = _in_double(searched, tree, leaves, batches[0])
    asked = outputs is None
    outputs = outputs or checks.shown_outputs(double, leaves, batches[0])
    by_leaves = _comparable(double, outputs)
    trace = walked(by_leaves, leaves, batches[0])
    if outputs == "logits":
        checks.check_classes([x.shape for x in jax.eval_shape(by_leaves, leaves, batches[0])], trace.returned)
    axes = read_axes(by_leaves, leaves, batches[0], trace, asked=outputs is None)
    small, on_few, given = smaller(by_leaves, trace, leaves, batches), by_leaves, batches
    bar.update()
    if small is not None:
        tree, leaves, given, on_few = with_leaves(tree, small.leaves), small.leaves, small.batches, small.fn
        trace = walked(on_few, leaves, given[0])
    with checks.gradients_named("discover"):
        report = _searched(on_few, tree, leaves, given, trace, near, seed, bar)
    census = functools.partial(certified, on_few, tree, leaves, given, report.whole, seed, not bar.disable)
    assumed = asked and outputs == "logits"
    report = dataclasses.replace(report, census=census, axes=axes, outputs=outputs, _assumed=assumed)
    if small is None and shallow is None:
        return report
    del leaves
    if shallow is not None:
        shapes = {path: jax.ShapeDtypeStruct(x.shape, np.float64) for path, x in leaves_by_path(params).items()
                  if checks.is_float(x)}
        by_leaves = _comparable(_in_double(fn, params, shapes, batches[0]), outputs)
        report = _of_all_layers(report, shallow, params)
    carried = _carried(report, small.full if small is not None else int, by_leaves, params, batches, near, seed, bar)
    if shallow is not None and len(carried.held) < len(report.held):
        raise Unlike
    return carried


def _of_all_layers(report: Report, shallow: Shallow, params: Any) -> Report:
    """Turns the report on three layers into one on all layers, whose gauges are still to be proved.

    Args:
      report: the report on the shallow tree.
      shallow: the tree with fewer layers.
      params: the whole tree.

    Raises:
      Unlike: a gauge moves only some of the layers that are equal.
    """
    held = [one._replace(call=shallow.of_all_layers(one.call, params)) for one in report.held]
    nearly = []
    for one in report.nearly:
        # A near symmetry that moves only some of three equal layers is chance, and says nothing about all layers.
        with contextlib.suppress(Unlike):
            nearly.append(one._replace(call=shallow.of_all_layers(one.call, params)))
    rejected = tuple(dict.fromkeys(map(shallow.with_captures, report.rejected)))
    ungauged = {kind: shallow.of_all(where) for kind, where in report.ungauged.items()}
    return dataclasses.replace(
        report, held=tuple(held), nearly=tuple(nearly), axes=shallow.axes(report.axes, params), ungauged=ungauged,
        rejected=rejected)


def _in_double(fn: Callable[[Any, Any], Any], tree: Any, shapes: Any, batch: Any) -> Function:
    """A function of (tree, batch) as a function of (leaves by path, batch), in float64."""
    dtypes = {path: x.dtype for path, x in leaves_by_path(tree).items() if path in shapes}
    return in_double(lambda leaves, batch: fn(with_leaves(tree, leaves), batch), shapes, dtypes, batch)


def _comparable(double: Function, outputs: Outputs | None) -> Function:
    """The function that returns those of a function's outputs that are compared; logits as log-probabilities."""
    return traced_once(lambda leaves, batch: checks.compared(double(leaves, batch), outputs))


def _searched(
    fn: Function, params: Any, leaves: Leaves, batches: Sequence[Any], trace: Trace, near: float, seed: int, bar: Any
) -> Report:
    """Searches one instance, large or small, and proves its gauges.

    Args:
      fn: (leaves, batch) to a list of outputs, in float64.
      params: the tree that gauges bind to.
      leaves: its float64 leaves by path.
      batches: at least two.
      trace: the walk over fn.
      near: as in `discover`.
      seed: seed of everything random.
      bar: the progress bar.

    Returns:
      The report.
    """

    def rng(*purpose: int) -> np.random.Generator:
        return np.random.default_rng([seed, *purpose])

    prover = Prover(fn, params, batches)
    prover.check_outputs(leaves)
    signed = positive_kernels(fn, leaves, batches[0], rng(21))
    prover.place_at((generic_point(leaves, rng(1, k), signed) for k in range(100, 100 + DRAWS)), own=leaves)

    bar.set_postfix_str("gradients")
    tried = search.candidates(trace, leaves)
    flows, shifts = offsets.flows(trace, leaves), offsets.Shifts(trace, leaves)
    gradients = Gradients(fn, batches)
    columns = max([*(len(one.columns) for one in tried), *(flow.columns for flow in flows)])
    rows = max(24, int(_ROWS * columns) + 8)
    # At one point no more gradients are independent than the batches have outputs: a scalar loss needs more points.
    at_once = min(-(-rows // _POINTS), gradients.outputs(leaves) * len(batches))
    bar.total = bar.n + 3 + (count := -(-rows // at_once))
    untrue = prover.untrue(gradients, at_once, rng(26))
    if untrue:
        gradients.compute_unfused()
        untrue = prover.untrue(gradients, at_once, rng(27))
    squares = {path: np.zeros(leaf.shape) for path, leaf in leaves.items()}

    def point_at(number: int) -> Leaves:
        bar.set_postfix_str(f"gradients at point {number + 1} of {count}, for {len(tried)} groups of motions")
        bar.update(number < count)
        return generic_point(leaves, rng(1, number), signed)

    def observe(points: Callable[[int], Leaves], first: int, purposes: tuple[int, int]) -> None:
        for k, point, gradient in search.sketched(tried, gradients, at_once, rows, points, squares, rng, purposes):
            shifts.observe(gradient)
            for n, flow in enumerate(flows):
                flow.observe(point, gradient, rng(9, first + k, n))

    observe(point_at, 0, (2, 3))
    # Units that are dead at every point would look free to move; with other signs of their kernels they live.
    masks = _without_gradient(squares, prover.points[0])
    if hidden := {path for path, mask in masks.items() if mask.any() and leaves[path].ndim > 1
                  if prover.change_of_entries(path, mask, rng(22), turn=True) > STILL}:
        observe(lambda number: generic_point(leaves, rng(23, number), signed | hidden), 1000, (24, 25))

    bar.set_postfix_str("null spaces")
    masks, dead, uncovered, rejected = _unreached(prover, squares, rng(4))
    if untrue := [path for path in untrue if not masks[path].all()]:
        rejected.append(
            f"{', '.join(untrue)}: gradients that are not the derivatives of the outputs (a straight-through "
            "estimator, stop_gradient?), so that symmetries that move these leaves may be missing")
    symmetries = [symmetry for one in tried for symmetry in one.solve(squares, masks, near)]
    point = generic_point(leaves, rng(1, 0), signed)
    exact = independent([s for s in symmetries if s.residual < ZERO], point, rng(7), dead=masks)
    close = [s for s in symmetries if s.residual >= ZERO]
    limit = sorted([*(s.residual for s in close), *[np.inf] * _CLOSE])[_CLOSE - 1]
    close = independent([s for s in close if s.residual <= limit], point, rng(8), exact)
    bar.update()

    bar.set_postfix_str("finite moves")
    # A norm's gauge is to have the norm's scale as its anchor, and not the bias, which may be zero.
    positive = {path for path, x in leaves.items() if (x > 0).all() or path not in trace.added}
    claims, unwritten = _claims(exact, trace, positive)
    ungauged = dict[str, list[str]]()
    for reason, symmetry in unwritten:
        if prover.change([symmetry.moved(point, rng(20)) for point in prover.points]) <= STILL:
            ungauged.setdefault(reason, []).append(", ".join(sorted(symmetry.paths)))
    for places, residual in shifts.solve(softmax=True):
        claims.append(_Claim(shift_call(places), {view.path: 1.0 for view, _ in places}, residual))
    proved, failed = _proved(prover, claims, STILL, rng(5))
    # The gradients show these gauges as exact, but a finite move changes the outputs. If it changes them a little, the
    # gauges are tried again as near symmetries.
    almost = [claim for claim in claims if any(claim.call is call and change <= 10 * near for call, change in failed)]
    rejected += [_refuted(call, change, prover) for call, change in failed if change > 10 * near]
    larger, _ = _claims(close, trace, positive)
    almost = [claim for claim in almost if not any(claim.call.within(one.call) for one in larger)]
    nearly, _ = _proved(prover, [*almost, *larger], 10 * near, rng(6))
    matrices = [set(symmetry.paths) for symmetry in exact if symmetry.family == "linear"]
    additions = _additions(trace, masks, flows, shifts, prover.points[0], matrices)
    norms = passed([one.call for one in proved if one.call.kind == "norm_scale"], params)
    turns = _rotations_of_stream(trace, leaves, gradients, at_once, norms, params, exact, masks, rng, ungauged)
    calls = offsets.merged_reads([addition.call for addition in additions if addition.call is not None])
    flat = [_Claim(call, dict.fromkeys(call.paths, 1.0), 0.0) for call in calls]
    more, failed = _proved(prover, [*turns, *flat], STILL, rng(17))
    rejected += [_refuted(call, change, prover) for call, change in failed if np.isfinite(change)]
    proved += more
    local = [call for call, _ in failed if not any(call is one for one, _ in prover.clipped)]  # no clip ends these
    additions = [one for one in additions if one.call is None or any(one.call.within(call) for call in local)]
    held, refused = prover.together(_sorted(proved))
    along_orbits = prover.along_orbits(held)
    for addition in additions:
        where = ungauged.get(addition.kind, [])
        vectors = ungauged.get(offsets.ON_STREAM, []) if addition.kind == offsets.PAST_NORMS else []
        if addition.where in (*where, *vectors):
            continue  # an addition of any vector to these leaves is listed, and includes that of a constant
        moved = [addition.move(point) for point in prover.points] if addition.move is not None else []
        if not moved or (prover.change(moved) <= STILL and not along_orbits(moved[0])):
            ungauged[addition.kind] = [*where, addition.where]
    bar.update()
    kinds = {kind: tuple(where) for kind, where in ungauged.items()}
    return Report(
        _readable(held, params), tuple(nearly), (*rejected, *refused), tuple(dead), tuple(uncovered), kinds)


def _readable(held: Sequence[Held], params: Any) -> tuple[Held, ...]:
    """The gauges with what optimizers take in place of those whose elements cannot be read from the leaves.

    Args:
      held: the gauges.
      params: the tree that they bind to; shapes are enough.
    """
    found = [one._replace(call=dataclasses.replace(one.call, trained=one.call.readable(params))) for one in held]
    trained = [call.gauge() for one in found if one.call.kind in _TRAINING for call in one.call.trained or (one.call,)]
    if any(one.call.trained for one in found):
        try:
            product(trained)._bound(params).slice.check_norms()
        except ValueError:  # the other gauges leave these no anchor
            return tuple(one._replace(call=dataclasses.replace(one.call, trained=())) for one in held)
    return tuple(found)


def _sorted(held: Sequence[Held]) -> list[Held]:
    return sorted(held, key=lambda one: (*_TRAINING, *_REST).index(one.call.kind))


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
    """The additions to leaves that no gradient sees.

    Args:
      trace: the walk.
      dead: by path, masks of entries without effect.
      flows: kinds of additions, which have observed the gradients.
      shifts: constants along an axis, which have observed the gradients.
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
            continue  # two gauges make this move: one moves the constant to a second leaf, and there a norm hides it
        kind = "one constant on all entries of a table, which a centred norm and a softmax hide"
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
                call = written(symmetry, trace.layer_spaces(), ())  # no stream, but one rotation of a few leaves
        except Unwritable as reason:
            ungauged.setdefault(str(reason), []).append(", ".join(sorted(symmetry.paths)))
        else:
            claims.append(_Claim(call, dict.fromkeys(sorted(symmetry.paths), 1.0), symmetry.residual))
    return claims


def _carried(
    report: Report, full: Callable[[int], int], fn: Function, params: Any, batches: Sequence[Any], near: float,
    seed: int, bar: Any,
) -> Report:
    """Turns the report on a small instance into one on the large instance, where every gauge is proved again.

    The entries that no batch reaches are found anew, because one index of the small instance stands for several.

    Args:
      report: the report on the small instance, with paths and captures that fit all layers.
      full: a length of the small instance → the length of the large one that it stands for.
      fn: (leaves, batch) to a list of outputs, in float64, of the large instance.
      params: the large tree.
      batches: the batches of the large instance.
      near: as in `discover`.
      seed: seed of everything random.
      bar: the progress bar.
    """
    rng = np.random.default_rng([seed, 12])
    bar.set_postfix_str("the large instance")

    def on_device(moved: Callable[[Leaves], Leaves]) -> Leaves:
        """The given leaves in float64, moved and put on the device one by one, so that a large tree is held once."""
        gc.collect()  # arrays that a trace captured are in reference cycles
        jax.device_put(0.0).block_until_ready()  # jax frees deleted arrays only at its next call
        gc.collect()
        leaves, out = checks.double_leaves(params, seed), dict[str, Any]()
        for path in list(leaves):
            out |= jax.device_put(moved({path: leaves.pop(path)}))
        return out

    prover = Prover(fn, params, batches, large=True)
    prover.check_outputs(on_device(lambda leaf: leaf))
    squares, doubtful = dict[str, np.ndarray](), list(leaves_by_path(params))
    for _ in range(_REACH):
        prover.place_at((on_device(lambda leaf: generic_point(leaf, rng)) for _ in range(DRAWS)), count=1)
        asked = [path for path in prover.points[0] if path in doubtful]
        for path, square in squared_gradients(fn, batches, prover.points[0], rng, asked).items():
            squares[path] = squares[path] + square if path in squares else square
        doubtful = [path for path, mask in _without_gradient(squares, prover.points[0]).items() if mask.any()]
        if not doubtful:
            break
    _, dead, uncovered, _ = _unreached(prover, squares, rng)
    del squares
    nearly, proved, failed = list[Held](), list[Held](), list[str]()
    for claims, limit, kept in ((report.held, _STILL_AT_SIZE, proved), (report.nearly, 10 * near, nearly)):
        for one in claims:
            call = one.call.scaled(full)
            bar.set_postfix_str(f"finite move of {call.kind}: {call.paths[0]}")
            change = prover.changes([call], rng)[0]
            if change <= limit:
                kept.append(one._replace(gauge=call.gauge(), call=call, change=change, parts=()))
            elif limit == _STILL_AT_SIZE:
                failed.append(_refuted(call, change, prover))
    held, refused = prover.together(_sorted(proved))
    rejected = [*report.rejected, *failed, *refused]
    return dataclasses.replace(
        report, held=_readable(held, params), nearly=tuple(nearly), rejected=tuple(rejected), dead=tuple(dead),
        uncovered=tuple(uncovered))


def _unreached(
    prover: Prover, squares: Leaves, noise: np.random.Generator
) -> tuple[dict[str, np.ndarray], list[str], list[Uncovered], list[str]]:
    """Classifies the entries without a gradient, by whether new values of them change the outputs all the same.

    Args:
      prover: measures how much new values change the outputs.
      squares: sums of squared gradients by leaf.
      noise: source of the new values.

    Returns:
      Masks of these entries by path; leaves without effect on the outputs; entries that no batch reaches; and, as text,
      leaves whose new values do change the outputs.
    """
    masks = _without_gradient(squares, prover.points[0])
    dead, uncovered, rejected = list[str](), list[Uncovered](), list[str]()
    for path, mask in masks.items():
        if not mask.any():
            continue
        change = prover.change_of_entries(path, mask, noise, turn=bool(mask.all()))
        if change > STILL:  # for example, stop_gradient hides a value from gradients and not from the outputs
            which = "" if mask.all() else f" at {mask.sum()} of {mask.size} entries"
            why = "stop_gradient?" if mask.all() else "dead units, stop_gradient?"
            rejected.append(f"{path}: no gradient{which} ({why}), but its values move the outputs by {change:.1e}")
        elif mask.all():
            dead.append(path)
        else:
            uncovered.append(Uncovered(path, int(mask.sum()), mask.size))
    return masks, dead, uncovered, rejected


def _without_gradient(squares: Leaves, point: Leaves) -> dict[str, np.ndarray]:
    """Masks, by path, of the entries whose gradients are roundoff compared with the median over all entries.

    Args:
      squares: sums of squared gradients by leaf.
      point: a point. Gradients are taken with respect to entries divided by the leaf's size there: that of a number of
        1e12, which the function divides by as much, is no roundoff.
    """
    sizes = {path: root_mean_square(np.asarray(point[path])) or 1.0 for path in squares}
    step = 1 + sum(x.size for x in squares.values()) // 4_000_000  # a sample of the entries gives the median
    sample = np.concatenate([sizes[path] * np.sqrt(x.ravel()[::step]) for path, x in squares.items()])
    typical = np.median(sample[sample > 0]) if (sample > 0).any() else 0.0
    return {path: np.sqrt(x) <= _DEAD * typical / sizes[path] for path, x in squares.items()}


def _refuted(call: Call, change: float, prover: Prover) -> str:
    where = next((f" {where}: a clip ends it" for one, where in prover.clipped if one is call), "")
    return f"{call.kind} of {', '.join(call.paths)}: moves the outputs by {change:.1e}{where}"


def _claims(
    symmetries: Sequence[Symmetry], trace: Trace, positive: set[str]
) -> tuple[list[_Claim], list[tuple[str, Symmetry]]]:
    """Symmetries as claims, and those that have no gauge, each with the reason."""
    claims, unwritten = [], list[tuple[str, Symmetry]]()
    for symmetry in symmetries:
        signs = {"covector": -1.0}
        exponents = {t.piece.path: round(t.exponent * signs.get(t.mode, 1.0), 6) for t in symmetry.terms}
        try:
            call = written(symmetry, trace.layer_spaces(), positive)
        except Unwritable as reason:
            unwritten.append((str(reason), symmetry))
        else:
            claims.append(_Claim(call, exponents, symmetry.residual))
    return claims, unwritten


def _proved(
    prover: Prover, claims: Sequence[_Claim], most: float, rng: np.random.Generator
) -> tuple[list[Held], list[tuple[Call, float]]]:
    """Gauges whose finite moves change the outputs by at most `most`, and the calls of the others with their change.

    Claims for several layers are merged into one gauge first. If this fails, they are proved one by one.
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
    return proved, [(call, change) for call, change in retried if change > most]
