"""Census: counts the directions in weight space that change no output, and how many of them gauges explain.

A direction is *dead* at a point if no output changes along it, to first order: it lies in the null space of the
Jacobian. The directions along orbits of gauges are dead by design. A census counts both, and their difference shows
whether a gauge is missing. Reference: docs/design.md §3, "What else is dead"; van Nierop, Eq. (17), has formulas for
the dimensions of two of the groups.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from gauge_optax.binding import leaves_by_path, real_leaves, with_leaves
from gauge_optax.discovery import checks
from gauge_optax.discovery.blocks import (
    BlockCount,
    add_trials,
    dead_in_blocks,
    inaccuracy,
    parted,
    pulled_back,
    rank_of,
    too_few,
    upper_bound,
)
from gauge_optax.discovery.checks import Outputs
from gauge_optax.discovery.lift import in_double
from gauge_optax.discovery.sketch import Trial, untrue, with_constants
from gauge_optax.errors import binding_error
from gauge_optax.gauges.gauge import Gauge, Gauges, product
from gauge_optax.linalg import singular_vectors
from gauge_optax.transformation import (
    listed,
    require_choice,
    require_count,
    require_function,
    require_no_tracers,
    require_number,
)
from gauge_optax.xla import jit_unfused, quick_options, unseen

_SEEN = 1e-8  # if outputs change by more than this along an orbit, relatively, the gauge is no symmetry here
_CHUNK = 128  # rows of the Jacobian that are computed at once
_MOST = 12_000  # models of at most so many parameters are counted at once, larger ones in blocks
_SHOWN = 12  # leaves in a figure, at most
_STEPS = 64  # Lanczos steps for the upper bound
_SPAN = 1e-9  # a direction in which rows have a singular value below this share of the largest is not in their span


class GaugeCount(NamedTuple):
    """One gauge's row of a census.

    Attributes:
      name: the gauge's name, with the paths that it binds.
      dim: dimensions of its orbit at this point.
      alone: how many of these dimensions the orbits of the other gauges do not span; in a census with `blocks`, `dim`.
      seen: how much the outputs change along a direction of its orbit, the largest change of all directions that were
        tried. It is divided by the change along a random direction of the same length, and is roundoff if the gauge is
        a symmetry.
    """

    name: str
    dim: int
    alone: int
    seen: float


class Census(NamedTuple):
    """What `census` counts at one point.

    Attributes:
      parameters: entries of all floating-point leaves.
      rank: the rank of the Jacobian of the outputs; with `blocks`, an upper bound of it, see `dead`.
      dead: parameters − rank; with `blocks`, a lower bound of the number of dead directions. It is too large if two
        gauges make the same move, because each then counts all its dimensions, and `overlap` is 0.
      explained: dead directions in the span of all orbits; with `blocks`, the sum of the dimensions of
        the orbits along which the outputs do not change.
      overlap: the sum of the orbits' dimensions, less the dimension of their span; with `blocks`, 0.
      unreached: dead directions that no gauge explains, along entries on which no output depends for these batches;
        with `blocks`, 0.
      unexplained: all other dead directions that no gauge explains; with `blocks`, those that were found in a block.
      by_leaf: leaf path → its share of the unexplained directions; the shares add up to `unexplained`.
      gauges: one `GaugeCount` per gauge.
      gap: the largest singular value that was counted as zero, and the smallest that was not, both divided by the
        largest of all; with `blocks`, those of the block in which the two are closest.
      blocks: the blocks in which directions were counted; () if all parameters were counted at once.
      bound: an upper bound for the number of all dead directions, and its standard error; None if it was not asked for.
      skipped: names of blocks that were not counted, and why: the time ended, or one index of an axis has more entries
        than `block`. Their dead directions are not in these numbers.
      constant: leaves whose gradients are not derivatives of the outputs, such as those behind a `stop_gradient`. The
        outputs change with them, though no gradient shows how. They were held constant: no direction that changes them
        counts as dead.
    """

    parameters: int
    rank: int
    dead: int
    explained: int
    overlap: int
    unreached: int
    unexplained: int
    by_leaf: Mapping[str, float]
    gauges: tuple[GaugeCount, ...]
    gap: tuple[float, float]
    blocks: tuple[BlockCount, ...] = ()
    bound: tuple[float, float] | None = None
    skipped: tuple[str, ...] = ()
    constant: tuple[str, ...] = ()

    def __str__(self) -> str:
        in_blocks = bool(self.blocks or self.skipped)
        alone = ["" if in_blocks else f"{g.alone:6d}" for g in self.gauges]
        rows = [f"{'gauge':44} {'orbit':>6} {'' if in_blocks else 'alone':>6} {'outputs change by':>18}"]
        rows += [f"{g.name[:44]:44} {g.dim:6d} {x:6} {g.seen:18.1e}" for g, x in zip(self.gauges, alone, strict=True)]
        gap = f"(singular values {self.gap[0]:.0e} | {self.gap[1]:.0e})"
        if in_blocks:
            rows += ["", f"{'block':64} {'entries':>8} {'dead':>6} {'unreached':>10} {'unexplained':>12}"]
            rows += [
                f"{b.name[:64]:64} {b.size:8d} {b.dead:6d} {b.unreached:10d} {b.unexplained:12d}" for b in self.blocks
            ]
            rows += [
                "",
                f"{self.parameters} parameters, at least {self.dead} dead directions: {self.explained} along orbits, "
                f"{self.unexplained} unexplained in blocks {gap}",
            ]
            if self.skipped:
                names = ", ".join(self.skipped[:3]) + (", …" if len(self.skipped) > 3 else "")
                rows += [f"a lower bound: {len(self.skipped)} blocks were not counted ({names})"]
        else:
            rows += [
                "",
                f"{self.parameters} parameters, rank {self.rank}: {self.dead} dead directions {gap}",
                f"{self.explained} explained by orbits (overlap {self.overlap}), "
                f"{self.unreached} not reached by the batches, {self.unexplained} unexplained",
            ]
        if self.constant:
            rows += [f"held constant, because gradients do not show how outputs change: {', '.join(self.constant)}"]
        if wrong := [g.name for g in self.gauges if g.seen > _SEEN]:
            rows += [f"no symmetries here, because outputs change along their orbits: {'; '.join(wrong)}"]
        if self.bound is not None:
            rows += [f"at most {self.bound[0]:.0f} ± {self.bound[1]:.0f} dead directions, by random probes"]
        leaves = sorted(((x, path) for path, x in self.by_leaf.items() if x > 0.01), reverse=True)
        rows += [f"  {path}: {share:.2f}" for share, path in leaves]
        return "\n".join(rows)

    def plot(self, axes: Any = None) -> Any:
        """Draws the dead directions: a bar per gauge, and red bars for those that no gauge explains.

        Args:
          axes: matplotlib axes; a new figure by default.

        Returns:
          The axes.
        """
        import matplotlib.pyplot as plt  # an extra, which only figures need

        rows: list[tuple[str, float, str]] = [(g.name, g.dim, "tab:blue") for g in self.gauges if g.dim]
        rows += [("not reached by the batches", self.unreached, "0.5")] if self.unreached else []
        lost = sorted(((x, path) for path, x in self.by_leaf.items() if x >= 0.05), reverse=True)[:_SHOWN]
        rows += [("no gauge explains, in all", self.unexplained, "crimson")]
        rows += [(f"of these, in {path}", share, "lightcoral") for share, path in lost]
        height = 1.2 + 0.27 * len(rows)
        axes = plt.subplots(figsize=(9, height), layout="constrained")[1] if axes is None else axes
        names, lengths, colours = zip(*rows, strict=True)
        names = tuple(name if len(name) <= 60 else f"{name[:58]} …" for name in names)
        drawn = axes.barh(range(len(rows)), lengths, color=colours)
        labels = [f"{x:,.1f}" if isinstance(x, float) else f"{x:,}" for x in lengths]
        axes.bar_label(drawn, labels, padding=3, fontsize=8)
        axes.set_yticks(range(len(rows)), names, fontsize=8)
        axes.set_ylim(len(rows) - 0.4, -0.6)
        axes.margins(x=0.12)
        axes.set_axisbelow(True)
        least = "at least " if self.blocks or self.skipped else ""
        axes.set(
            xlabel="dimensions",
            title=f"Of {self.parameters:,} dimensions {least}{self.dead:,} change no output; "
            f"gauges explain {self.explained:,}",
        )
        if self.overlap:
            axes.set_xlabel(f"dimensions (gauges share {self.overlap}, which stand in several bars)")
        return axes


def census(
    fn: Callable[[Any, Any], Any],
    params: Any,
    batches: Sequence[Any],
    gauges: Gauges,
    outputs: Outputs | None = None,
    *,
    cutoff: float = 1e-10,
    whole: int = _MOST,
    block: int = 2_000,
    probes: int = 0,
    seed: int = 0,
    progress: bool = True,
    seconds: float = math.inf,
) -> Census:
    """Counts the dead directions of a function at a point, and those that gauges explain.

    In a model of at most `whole` parameters, all dead directions are counted. In a larger model they are counted in
    *blocks* of entries, while all other entries stay constant. A block consists of a few hidden units, channels of the
    residual stream or entries of heads, in all leaves that have these, or of the small leaves of a layer. A symmetry is
    found if all entries that it moves fit in one block. A symmetry that moves all entries, such as a rotation of a wide
    residual stream, is missed.

    Args:
      fn: pure function (params, batch) to outputs, an array or a tree of them; called in float64.
      params: the point, a tree of arrays. Take trained or random weights: zeros and equal numbers have further dead
        directions.
      batches: values that `fn` accepts. Together they need at least as many output numbers as the model has parameters.
        With blocks they need as many as a block has entries, and more tokens than any kernel has rows: with fewer, some
        changes of a kernel change none of its outputs.
      gauges: the gauges that should explain the dead directions.
      outputs: as in `discover`: with "logits", a number that is added to all entries along the last axis is no change.
        By default "logits" if the gauges have a `logit_shift`, else what the function shows.
      cutoff: singular values below this share of the largest count as zero. There may be no gap at the cutoff, because
        the outputs hardly change along some (*flat*) directions. Then only values below the widest gap under the cutoff
        count as zero.
      whole: the most parameters that are counted at once. Time grows with the cube of their number, from a minute for
        6,000 to ten minutes and 7 GiB for 12,000.
      block: the most entries of a block, in models of more than `whole` parameters. Time grows with its cube.
      probes: number of random directions for an upper bound of all dead directions, at least 2; 0 for no bound. The
        bound counts flat directions as well as dead ones: it is useful for thousands of parameters, and says little
        about a million. It needs `matfree`, which `pip install "gauge_optax[measure]"` installs.
      seed: seed of random combinations of outputs, blocks and directions.
      progress: True shows a bar.
      seconds: time after which no further block is counted. The census then says that its count is a lower bound, and
        names the blocks that it lacks. A model of up to `whole` parameters is counted at once, however long that takes.

    Returns:
      The counts; `print` shows them as a table, `.plot()` draws them.

    Raises:
      ValueError: no batches, a dict of them, or too few outputs; an unknown kind of `outputs`; a single probe, which
        has no standard error, or `probes` that is no count; a `cutoff` that is not between 0 and 1; a `block` so
        small that not one index of any axis fits in it; a negative seed; parameters without floating-point arrays; a
        function without gradients.
      ImportError: probes without `matfree`.

    >>> def fn(p, x):
    ...     return jax.nn.relu(x @ p["up"]) @ p["down"]
    >>> params = {
    ...     "up": jnp.cos(jnp.arange(6.0)).reshape(2, 3),
    ...     "down": jnp.sin(jnp.arange(12.0)).reshape(3, 4),
    ... }
    >>> x = jnp.sin(jnp.arange(80.0)).reshape(40, 2)
    >>> relu = go.rescale({"up": "_ channel"}, {"down": "channel _"})
    >>> counts = go.measure.census(fn, params, [x], [relu], outputs="loss", progress=False)
    >>> counts.dead, counts.explained, counts.unexplained
    (3, 3, 0)

    Reference: docs/design.md §3.
    """
    batches = listed("census", batches)
    require_no_tracers("census", params, batches)
    if not batches:
        raise binding_error("census", "no batches", "an empty list", "at least one batch", "pass a list of batches")
    if outputs is not None:
        require_choice("census", "outputs", outputs, get_args(Outputs))
    require_count("census", "probes", probes, 0)
    if probes == 1:
        raise binding_error(
            "census", "too few probes", f"probes={probes}", "0, or at least 2, for a standard error", "pass probes=2"
        )
    require_function("census", "fn", fn, "params, batch")
    require_number("census", "cutoff", cutoff, "(0, 1)", "leave it at 1e-10")
    require_count("census", "whole", whole, 0)
    require_count("census", "block", block, 1)
    if not (isinstance(seconds, float) and seconds == math.inf):
        require_number("census", "seconds", seconds, "[0, inf)", "leave it out for no limit")
    checks.check_seed("census", seed)
    checks.check_batches("census", batches)
    params, batches = unseen((params, batches))
    dtypes = {p: jnp.result_type(x) for p, x in real_leaves("census", params).items() if checks.is_float(x)}
    with checks.own_points():
        arrays = {p: x for p, x in real_leaves("census", params).items() if checks.is_float(x)}
        if not arrays or any(isinstance(x, jax.ShapeDtypeStruct) for x in arrays.values()):
            kinds = "shapes" if arrays else ", ".join([*leaves_by_path(params)][:6]) or "an empty tree"
            raise binding_error(
                "census", "no floating-point arrays in params", kinds, "floating-point arrays with values",
                "pass the trained or random weights, such as nnx.state(model) or variables['params']")
        stored = {p: np.asarray(x, np.float64) for p, x in arrays.items()}
        total, parts = sum(x.size for x in stored.values()), product(gauges).gauges if gauges else ()
        plain = in_double(lambda x, batch: fn(with_leaves(params, x), batch), stored, dtypes, batches[0])
        if outputs is None and any(part.name == "logit_shift" for part in parts):
            outputs = "logits"
        outputs = outputs or checks.shown_outputs(plain, stored, batches[0])

        def double(leaves: Mapping[str, Any], batch: Any) -> list[Any]:
            return checks.compared(plain(leaves, batch), outputs)

        rng, point = np.random.default_rng(seed), with_leaves(params, stored)
        counted = _in_blocks if total > whole else _whole
        deadline = time.monotonic() + seconds
        with checks.gradients_named("census"):
            result = counted(double, stored, point, batches, parts, cutoff, block, rng, progress, deadline)
        if probes:
            whole_fn = with_constants(double, result.constant)
            result = result._replace(bound=upper_bound(whole_fn, stored, batches, probes, _STEPS, rng, progress))
    return result


def _whole(
    fn: Callable[..., Any], stored: Mapping[str, np.ndarray], point: Any, batches: Sequence[Any],
    gauges: Sequence[Gauge], cutoff: float, block: int, rng: np.random.Generator, progress: bool, deadline: float,
) -> Census:
    """The census of all parameters at once."""
    total = sum(x.size for x in stored.values())
    trials = list[Trial]()
    jacobian = _jacobian(fn, stored, batches, total, rng, progress, trials)
    if held := untrue(jax.jit(fn, compiler_options=quick_options()), trials, rng.spawn(1)[0]):
        jacobian = _jacobian(with_constants(fn, held), stored, batches, total, rng, progress, trials)
    sizes, right = singular_vectors(jacobian)
    rank = rank_of(sizes, cutoff)
    dead = right[rank:]
    orbits = [_orbit(gauge, point, stored, rng) for gauge in gauges]
    scale = float(np.linalg.norm(jacobian)) / math.sqrt(total) or 1.0
    counts = _counts(gauges, orbits, jacobian, scale)

    basis = _basis(orbits, total)
    singular = sizes / (sizes[0] or 1.0)  # sizes[0] is 0 if the outputs depend on no leaf at all
    least = float(singular[rank - 1]) if rank else 1.0
    inexact = inaccuracy(least)
    # If a gauge is no symmetry of the function, its orbit is not dead, or only in part. Only the dead part is counted.
    inside = len(basis) - len(_basis([basis - (basis @ dead.T) @ dead], total, absolute=inexact))
    unreached = np.flatnonzero(np.abs(jacobian).max(0) <= cutoff * scale)
    wider = _basis([basis, np.eye(total)[unreached]], total)
    rest = _basis([dead - (dead @ wider.T) @ wider], total, absolute=inexact)
    return Census(
        total, rank, total - rank, inside, sum(len(x) for x in orbits) - len(basis),
        total - rank - inside - len(rest), len(rest), _by_leaf(rest, stored), tuple(counts),
        (float(singular[rank]) if rank < total else 0.0, least), constant=tuple(held),
    )


def _in_blocks(
    fn: Callable[..., Any], stored: Mapping[str, np.ndarray], point: Any, batches: Sequence[Any],
    gauges: Sequence[Gauge], cutoff: float, block: int, rng: np.random.Generator, progress: bool, deadline: float,
) -> Census:
    """The census of a large model: counts dead directions in blocks, and tests one random direction of each orbit."""
    total = sum(x.size for x in stored.values())
    counts, rest, skipped, held = dead_in_blocks(
        fn, stored, point, batches, gauges, cutoff, block, rng, progress, deadline)
    rest = _basis([rest], total, absolute=1e-3)  # two blocks may contain the same direction
    seen = _seen(with_constants(fn, held), stored, point, batches, gauges, rng)
    dims = [gauge.dim(point) for gauge in gauges]
    explained = sum(n for n, x in zip(dims, seen, strict=True) if x <= _SEEN)
    dead_in_all = explained + len(rest)
    return Census(
        total, total - dead_in_all, dead_in_all, explained, 0, 0, len(rest), _by_leaf(rest, stored),
        tuple(GaugeCount(g._description, n, n, x) for g, n, x in zip(gauges, dims, seen, strict=True)),
        min((count.gap for count in counts), key=lambda gap: gap[1] / max(gap[0], 1e-300), default=(0.0, 1.0)),
        tuple(counts), skipped=tuple(skipped), constant=tuple(held),
    )


def _seen(
    fn: Callable[..., Any], stored: Mapping[str, np.ndarray], point: Any, batches: Sequence[Any],
    gauges: Sequence[Gauge], rng: np.random.Generator,
) -> list[float]:
    """Per gauge, how much the outputs change along a random direction of its orbit.

    It is divided by the change along a random direction of all weights, of the same length.
    """

    @jit_unfused
    def pushed(leaves: Any, batch: Any, tangent: Any) -> jax.Array:
        _, change = jax.jvp(lambda p: list(fn(p, batch)), (leaves,), (tangent,))
        seen, moved = (jnp.stack([jnp.sum(jnp.square(x)) for x in part]) for part in (change, tangent.values()))
        return jnp.sum(seen) / jnp.sum(moved)

    def change(tangent: Mapping[str, Any]) -> float:
        return math.sqrt(sum(float(pushed(dict(stored), batch, dict(tangent))) for batch in batches))

    drawn = {path: rng.standard_normal(x.shape) for path, x in stored.items()}
    scale, changes = change(drawn) or 1.0, []
    for gauge in gauges:
        vertical = leaves_by_path(jax.jit(gauge.vertical)(point, with_leaves(point, drawn)))
        changes.append(change({path: vertical[path] for path in stored}) / scale)
    return changes


def _by_leaf(basis: np.ndarray, stored: Mapping[str, np.ndarray]) -> dict[str, float]:
    """Path → the leaf's share of an orthonormal basis (rows): the sum of squares of the entries in the leaf."""
    return {path: float(x.sum()) for path, x in parted(np.square(basis).sum(0), stored).items()}


def _jacobian(
    fn: Callable[..., Any], stored: Mapping[str, np.ndarray], batches: Sequence[Any], total: int,
    rng: np.random.Generator, progress: bool, trials: list[Trial],
) -> np.ndarray:
    """Gradients of random combinations of each batch's outputs, (rows, parameters), in place of the whole Jacobian.

    A few of them are appended to `trials`.
    """
    shapes = [jax.eval_shape(fn, stored, batch) for batch in batches]
    sizes = [sum(x.size for x in of_batch) for of_batch in shapes]
    if sum(sizes) < total:
        raise too_few(sum(sizes), f"{total:,} parameters")

    # With somewhat more rows than parameters, random combinations keep the rank.
    needed = [min(size, math.ceil((total + 64) * size / sum(sizes))) for size in sizes]
    chunks = math.ceil(max(needed) / _CHUNK)
    pulled, chunk, rows = pulled_back(fn), math.ceil(max(needed) / chunks), []
    for batch, of_batch, size, count in zip(batches, shapes, sizes, needed, strict=True):
        for _ in tqdm(range(0, count, chunk), desc="census", disable=not progress, leave=False):
            weights = [rng.standard_normal((chunk, *x.shape)) / math.sqrt(size) for x in of_batch]
            gradients = pulled(dict(stored), batch, weights)
            add_trials(trials, stored, batch, weights, gradients)
            rows.append(np.concatenate([np.asarray(gradients[path]).reshape(chunk, -1) for path in stored], 1))
    jacobian = np.concatenate(rows)
    if not np.isfinite(jacobian).all():
        raise binding_error(
            "census", "derivatives of the outputs that are not finite", "NaN or infinity", "numbers",
            "look for a leaf or a batch in which there is one")
    return jacobian


def _orbit(gauge: Gauge, params: Any, stored: Mapping[str, np.ndarray], rng: np.random.Generator) -> np.ndarray:
    """An orthonormal basis of a gauge's orbit directions at a point, as rows."""
    count = gauge.dim(params) + 8

    @jax.jit
    def along(leaves: Any, directions: Any) -> jax.Array:
        point = with_leaves(params, leaves)

        def of(t: Any) -> dict[str, Any]:
            parts = leaves_by_path(gauge.vertical(point, with_leaves(params, t)))
            return {path: parts[path] for path in stored}

        vertical = jax.vmap(of)(directions)
        return jnp.concatenate([vertical[path].reshape(count, -1) for path in stored], 1)

    directions = {path: rng.standard_normal((count, *x.shape)) for path, x in stored.items()}
    return _basis([np.asarray(along(dict(stored), directions))], sum(x.size for x in stored.values()))


def _basis(parts: Sequence[np.ndarray], total: int, absolute: float = 0.0) -> np.ndarray:
    """An orthonormal basis, as rows, of the span of the rows of `parts`.

    It lacks the directions along which the rows have singular values up to `absolute`, or up to `_SPAN` relative to the
    largest.
    """
    rows = np.concatenate([*parts, np.zeros((0, total))])
    if not len(rows) or not np.abs(rows).max(initial=0.0):
        return np.zeros((0, total))
    sizes, right = singular_vectors(rows, full=False)
    basis: np.ndarray = right[sizes > max(_SPAN * sizes[0], absolute)]
    return basis


def _counts(
    gauges: Sequence[Gauge], orbits: Sequence[np.ndarray], jacobian: np.ndarray, scale: float
) -> list[GaugeCount]:
    """One row of the table per gauge, for a model that is counted at once.

    Args:
      gauges: the gauges.
      orbits: an orthonormal basis of each gauge's orbit directions, as rows.
      jacobian: the Jacobian of the outputs, or random combinations of its rows, (rows, parameters).
      scale: the RMS change of the outputs along all directions of length 1, by which changes along orbits are divided.
    """
    total = jacobian.shape[1]
    whole = len(_basis(orbits, total))
    counts = []
    for number, (gauge, orbit) in enumerate(zip(gauges, orbits, strict=True)):
        others = len(_basis([*orbits[:number], *orbits[number + 1 :]], total))
        seen = np.linalg.norm(orbit @ jacobian.T, axis=1).max(initial=0.0) / scale
        counts.append(GaugeCount(gauge._description, len(orbit), whole - others, float(seen)))
    return counts
