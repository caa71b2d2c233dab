"""`discover`: searches for the symmetries of a function, proves them by finite moves, and writes them as gauges.

The function is traced, and `trace` finds the axes on which groups could act. At random points `search` and `offsets`
look for moves of the weights to which all gradients of the outputs are orthogonal. `write` turns each such move into a
`Call` of a gauge's constructor. A gauge holds if a random finite move of it changes the outputs by no more than
roundoff (`prove`). `instance` does all this in stages. A large function is searched on a small *instance*, the same
function with shorter axes and fewer layers. The gauges are then proved again on the large function.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from tqdm import tqdm

from gauge_optax.binding import leaves_by_path, match, with_leaves
from gauge_optax.discovery import checks
from gauge_optax.discovery.axes import LeafAxes, Mappings, read_axes
from gauge_optax.discovery.calls import REST, TRAINING, template
from gauge_optax.discovery.census import Census
from gauge_optax.discovery.certificate import certified
from gauge_optax.discovery.checks import Outputs
from gauge_optax.discovery.cut import Unlike
from gauge_optax.discovery.groups import STILL
from gauge_optax.discovery.instance import in_order, refuted, search_instance
from gauge_optax.discovery.layers import Shallow, shallower
from gauge_optax.discovery.lift import in_double
from gauge_optax.discovery.prove import Held, Prover
from gauge_optax.discovery.reach import Uncovered, of_no_key_bias, unreached, without_gradient
from gauge_optax.discovery.shrink import LARGE, smaller
from gauge_optax.discovery.sketch import DRAWS, Function, Leaves, generic_point, squared_gradients
from gauge_optax.discovery.trace import traced_once, walked
from gauge_optax.errors import binding_error
from gauge_optax.gauges.gauge import Gauge, Gauges, listed_gauges, product
from gauge_optax.transformation import on_any_mesh, require_no_tracers
from gauge_optax.xla import unseen

_REACH = 2  # to find the entries that a large tree's batches reach, gradients are taken at no more than so many points
# Longer sums have more roundoff, so that a large tree gets a larger limit than `STILL`. Under moves of gauges that
# hold, the outputs of a GPT of 124 million parameters change by 1.3e-12.
_STILL_AT_SIZE = 10 * STILL


@dataclasses.dataclass(frozen=True, repr=False)
class Report(Mappings):
    """The result of `discover`.

    Attributes:
      held: the gauges that hold, with their evidence.
      nearly: gauges whose finite moves change the outputs by less than ten times `near`, relative to their size, for
        example because of a norm's eps. Of the candidates, the twelve that are nearest to symmetries are tried. A gauge
        whose change is near the limit may be in the list for one seed and not for another.
      rejected: candidates that a finite move refutes, or that the library cannot bind, alone or along with `held`, with
        reasons. Also leaves of which gradients do not show how the outputs depend on them, as behind a `stop_gradient`.
      dead: leaves whose values do not affect the outputs.
      uncovered: entries of leaves that no batch uses, such as rows of an embedding; nothing is known about them.
      ungauged: symmetries that hold but that no gauge of the library describes: a kind, in words → for each symmetry of
        this kind, the leaves that it moves.
      census: the function that computes `certificate`.
      axes: which axes of each leaf are inputs and outputs. Printed, it is the source of `neurons` and `embeddings`.
      outputs: the kind of outputs that `fn` returns: as the caller stated it, or else as `discover` inferred it from
        the function. None if it is unknown; then every change of the outputs counted.
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
    _shapes: Mapping[str, tuple[int, ...]] = dataclasses.field(default_factory=dict, compare=False)  # of the whole tree

    @functools.cached_property
    def certificate(self) -> Census:
        """How many directions of the weights change no output, and how many of these the gauges explain.

        The first access computes it, by `go.measure.census` at a random point: in seconds for 2,000 parameters, in a
        minute for 6,000. In larger trees it counts the directions inside blocks of entries, a lower bound. After ten
        minutes it counts no further block. If `discover` searched a small instance of the tree, the directions of that
        instance are counted. The inputs are the batches of `discover` and random batches made of their numbers. A
        progress bar is shown if `discover` showed one. Raises what `go.measure.census` raises, and a ValueError if
        `discover` did not make the report.
        """
        if self.census is None:
            raise binding_error(
                "certificate", "no function whose directions could be counted",
                "a report of rebind, a report that was pickled, or one that discover did not make",
                "the report of discover",
                "write go.measure.census(fn, params, batches, report.whole)")
        return self.census()

    @property
    def gauges(self) -> list[Gauge]:
        """The gauges for optimizers: scales, shifts of logits, matrices of heads. They hardly slow a training step.

        If two leaves enter the function through their product, one may be multiplied by an invertible matrix and the
        other by its inverse. `whole` has a gauge for all these matrices. But if both leaves have fewer rows than the
        matrix, as two vectors have, their values do not determine the matrix, and an optimizer cannot use that gauge.
        This list then has two gauges in its place: a rotation of both leaves, and one scale.
        """
        return [held.gauge for held in self._trained]

    @property
    def turning(self) -> list[Gauge]:
        """All of `gauges`, where gauges of all invertible matrices of heads are replaced by gauges of rotations.

        `max_norm_muon` takes this list, because other matrices change the norms of neurons, which it bounds.
        """
        return [held.call.turning().gauge() for held in self._trained]

    @property
    def _trained(self) -> list[Held]:
        held = [one for one in self.held if one.call.kind in TRAINING]
        return [part for one in held for part in (
            [one._replace(call=call, gauge=call.gauge()) for call in one.call.trained] or [one])]

    @property
    def whole(self) -> tuple[Gauge, ...]:
        """Every gauge that holds, for `census`, `canonicalize`, `rotate` and `align`.

        It contains `gauges`, the rotation of the residual stream, and the constants that norms and biases hide. Where
        `gauges` has a rotation and a scale in place of all invertible matrices, `whole` has the matrices.
        """
        return tuple(held.gauge for held in self.held)

    def code(self, gauges: Gauges | None = None) -> str:
        """A list of gauges as a Python expression that uses the library as `go`.

        Args:
          gauges: a gauge or several; None for `report.gauges`.

        Returns:
          The source of a Python list.
        """
        listed = self.gauges if gauges is None else listed_gauges(gauges)
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
          ValueError: a gauge does not fit the tree, or contains a range of an axis (`head=0:4`), which fits the small
            instance only; an axis has length 1 in the small instance and is longer in `params`; the report names each
            layer by its number, and `params` has further layers; `sizes` names an axis whose length no gauge states.
        """
        shapes = {path: tuple(np.shape(leaf)) for path, leaf in leaves_by_path(params).items()}
        self._require_alike(shapes)
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
        return dataclasses.replace(self, held=_readable(moved, params), nearly=(), census=None, _shapes=shapes)

    def _require_alike(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Raises ValueError for a larger tree with axes or layers about which the searched tree shows nothing."""
        for path, small in self._shapes.items():
            large = shapes.get(path, small)
            if any(n == 1 < m for n, m in zip(small, large, strict=False)):
                raise binding_error(
                    "rebind", f"an axis of '{path}' that had the length 1", f"{small} in the small tree, now {large}",
                    "axes longer than 1: of one layer or head, no gauge can say that there may be more",
                    "call discover on an instance with at least two layers and two heads")
        named = {path for one in self.held for path in one.call.paths} | {*self.neurons, *self.embeddings}
        patterns = [path for path in named if "{" in path or "*" in path]
        single = {template(path) for path in named if path in self._shapes}
        for path in shapes:
            if path not in self._shapes and template(path) in single and not any(
                    match("rebind", pattern, path) is not None for pattern in patterns):
                raise binding_error(
                    "rebind", f"a layer that the report does not have, '{path}'",
                    "a report that names each layer, as of one layer", "a report with patterns such as {i}",
                    "call discover on an instance with at least two layers that are alike")

    def __getstate__(self) -> dict[str, Any]:
        """What `pickle` stores: all but the function that computes `certificate`. A certificate that is there stays."""
        return self.__dict__ | {"census": None}

    def __repr__(self) -> str:
        return str(self)

    def __str__(self) -> str:
        rest = [held for held in self.held if held.call.kind in REST]
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
            ("symmetries without a gauge", [f"{kind}: {'; '.join(where)}" for kind, where in self.ungauged.items()]),
            ("axes that the function does not decide", [f"{path}: {why}" for path, why in self.undecided.items()]),
            ("the function does not show what its outputs are, so that every change of them counted",
             [asked] * (self.outputs is None)),
            ("outputs taken for logits, as many per token as its table has rows",
             ["pass outputs='predictions' if no softmax follows: then their shift is a change"] * self._assumed),
        ):
            rows += [title] * bool(items) + [f"  {item}" for item in items]
        return "\n".join(rows)


@on_any_mesh
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
      batches: at least two values that `fn` accepts. Together they should use all entries of the leaves that training
        uses, such as rows of an embedding, and all experts.
      outputs: what `fn` returns. With "logits", outputs count as unchanged if one number is added to all entries along
        the last axis, because a softmax follows; with "predictions" (of a regression, or of a sigmoid's logit),
        "logprobs" or "loss", every change counts. By default `discover` looks at the function. If each token of a batch
        looks up one of V rows of a table and has V outputs, these are taken for logits, unless the rows are V long too,
        and the report says so. If the outputs come from a softmax or are single numbers, every change counts. Other
        arrays, such as `model(x)` of images, may be logits or predictions. Then every change counts, so that no gauge
        is false, and the report asks you to pass `outputs`.
      near: limit for near symmetries. A move is tested as one if the change of the outputs that the gradients predict
        is below this share of the change that the same leaves would make if each moved on its own.
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
    with checks.own_points(), tqdm(total=8, desc="discover", disable=not progress, leave=False) as bar:
        if shallow is not None:
            with contextlib.suppress(Unlike):
                return _discovered(fn, params, shallow, batches, outputs, near, seed, bar)
            bar.reset(total=8)
        return _discovered(fn, params, None, batches, outputs, near, seed, bar)


def _as_read(leaf: Any) -> Any:
    """Casts a NumPy array to the dtype in which JAX reads it: 32 bits in place of 64, unless x64 is enabled.

    Any other leaf is returned as it is.
    """
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
      outputs: the kind of outputs that fn returns, if the user states it.
      near: as in `discover`.
      seed: seed of everything random.
      bar: the progress bar.

    Raises:
      Unlike: a gauge that holds with fewer layers does not hold with all layers.
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
        found = search_instance(on_few, tree, leaves, given, trace, near, seed, bar)
    held, uncovered = _readable(found.held, tree), of_no_key_bias(found.uncovered, found.held, tree)
    report = Report(**found._replace(held=held, uncovered=uncovered)._asdict())
    census = functools.partial(certified, on_few, tree, leaves, given, report.whole, seed, not bar.disable)
    assumed = asked and outputs == "logits"
    whole = {path: tuple(np.shape(leaf)) for path, leaf in leaves_by_path(params).items()}
    report = dataclasses.replace(report, census=census, axes=axes, outputs=outputs, _assumed=assumed, _shapes=whole)
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
        # A near symmetry that moves only some of three equal layers is a coincidence. It says nothing about all layers.
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
    """A function that returns only the outputs that `discover` compares, with log-probabilities in place of logits."""
    return traced_once(lambda leaves, batch: checks.compared(double(leaves, batch), outputs))


def _readable(held: Sequence[Held], params: Any) -> tuple[Held, ...]:
    """Sets `Call.trained` of gauges whose elements the leaves do not determine: what optimizers take in their place.

    Args:
      held: the gauges.
      params: the tree that they bind to; shapes are enough.
    """
    found = [one._replace(call=dataclasses.replace(one.call, trained=one.call.readable(params))) for one in held]
    trained = [call.gauge() for one in found if one.call.kind in TRAINING for call in one.call.trained or (one.call,)]
    if any(one.call.trained for one in found):
        try:
            product(trained)._bound(params).slice.check_norms()
        except ValueError:  # in a product with the other gauges, these calls have no block as an anchor
            return tuple(one._replace(call=dataclasses.replace(one.call, trained=())) for one in held)
    return tuple(found)


def _carried(
    report: Report, full: Callable[[int], int], fn: Function, params: Any, batches: Sequence[Any], near: float,
    seed: int, bar: Any,
) -> Report:
    """Turns the report on a small instance into one on the large instance, where every gauge is proved again.

    The entries that no batch reaches are looked for again on the large instance, because one index of the small
    instance stands for several of the large one.

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
        """The user's leaves in float64. One after the other is changed by `moved`, and moves from host to device.

        In this way no second copy of a large tree is in memory.
        """
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
        doubtful = [path for path, mask in without_gradient(squares, prover.points[0]).items() if mask.any()]
        if not doubtful:
            break
    _, dead, uncovered, _ = unreached(prover, squares, rng)
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
                failed.append(refuted(call, change, prover))
    held, refused = prover.together(in_order(proved))
    rejected = [*report.rejected, *failed, *refused]
    return dataclasses.replace(
        report, held=_readable(held, params), nearly=tuple(nearly), rejected=tuple(rejected), dead=tuple(dead),
        uncovered=of_no_key_bias(uncovered, held, params))


