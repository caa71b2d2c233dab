"""Census: the rank of a function's Jacobian beside the span of its gauges' orbits.

A direction is *dead* at a point if no output changes along it, to first order: it lies in the null space of the
Jacobian. The directions along orbits are dead by design. A census counts both, so that what no gauge explains is seen.
Reference: docs/design.md §5, "More dead directions"; van Nierop, Eq. (17), counts two of the groups by formula.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from gauge_optax.binding import binding_error, leaves_by_path, with_leaves
from gauge_optax.discovery import checks
from gauge_optax.discovery.checks import Outputs
from gauge_optax.discovery.lift import in_double
from gauge_optax.gauges.gauge import Gauge, Gauges, product

_CHUNK = 128  # rows of the Jacobian that are computed at once
_MOST = 12_000  # parameters; the Jacobian is dense
_SPAN = 1e-9  # relative size below which a direction lies in the span of others


class GaugeCount(NamedTuple):
    """One gauge's part of a census.

    Attributes:
      name: of the gauge, with the paths that it binds.
      dim: dimensions of its orbit at this point.
      alone: of these, dimensions that no other gauge of the list spans.
      seen: the largest change of the outputs along its orbit, relative to that along a random direction.
    """

    name: str
    dim: int
    alone: int
    seen: float


class Census(NamedTuple):
    """What `census` counts at one point.

    Attributes:
      parameters: entries of all floating-point leaves.
      rank: the rank of the Jacobian of the outputs.
      dead: parameters − rank.
      explained: dead directions in the span of all orbits.
      overlap: how much the orbits' dimensions add up to beyond their span.
      unreached: dead directions, not explained, along entries that the batches do not reach.
      unexplained: all other dead directions.
      by_leaf: leaf path → its share of the unexplained directions; they add up to `unexplained`.
      gauges: one `GaugeCount` per gauge.
      gap: the largest singular value that was counted as zero, and the smallest that was not, relative to the largest.
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

    def __str__(self) -> str:
        rows = [f"{'gauge':44} {'orbit':>6} {'alone':>6} {'outputs change by':>18}"]
        rows += [f"{g.name[:44]:44} {g.dim:6d} {g.alone:6d} {g.seen:18.1e}" for g in self.gauges]
        rows += [
            "",
            f"{self.parameters} parameters, rank {self.rank}: {self.dead} dead directions "
            f"(singular values {self.gap[0]:.0e} | {self.gap[1]:.0e})",
            f"{self.explained} explained by orbits (overlap {self.overlap}), "
            f"{self.unreached} not reached by the batches, {self.unexplained} unexplained",
        ]
        leaves = sorted(((x, path) for path, x in self.by_leaf.items() if x > 0.01), reverse=True)
        rows += [f"  {path}: {share:.2f}" for share, path in leaves]
        return "\n".join(rows)

    def plot(self, axes: Any = None) -> Any:
        """Draws the parameters as one bar: useful, explained by each gauge, not reached, unexplained.

        Args:
          axes: matplotlib axes; a new figure by default.

        Returns:
          The axes.
        """
        import matplotlib.pyplot as plt  # an extra, which only figures need

        axes = plt.subplots(figsize=(9, 1.8), layout="constrained")[1] if axes is None else axes
        parts: list[tuple[str, int, Any]] = [("useful", self.rank, "0.85")]
        shades = plt.get_cmap("tab20")
        parts += [(g.name.split("(")[0], g.alone, shades(k % 20)) for k, g in enumerate(self.gauges) if g.alone]
        shared = self.explained - sum(g.alone for g in self.gauges)
        parts += [("several gauges", shared, "0.6"), ("not reached", self.unreached, "0.4")]
        parts += [("unexplained", self.unexplained, "crimson")]
        left = 0
        for name, length, colour in parts:
            if length:
                axes.barh(0, length, left=left, color=colour, label=f"{name} {length}", edgecolor="white")
                left += length
        axes.set(yticks=[], xlabel="dimensions of the parameter space", xlim=(0, self.parameters))
        axes.legend(ncols=4, fontsize=8, loc="lower center", bbox_to_anchor=(0.5, 1.0))
        return axes


def census(
    fn: Callable[[Any, Any], Any],
    params: Any,
    batches: Sequence[Any],
    gauges: Gauges,
    outputs: Outputs = "logits",
    *,
    cutoff: float = 1e-10,
    seed: int = 0,
    progress: bool = True,
) -> Census:
    """Counts the dead directions of a function at a point, and those that gauges explain.

    Args:
      fn: pure function (params, batch) to outputs, an array or a tree of them; called in float64.
      params: the point; arrays. Take trained or random weights: zeros and equal numbers have directions of their own.
      batches: values that `fn` accepts. Together they need at least as many output numbers as there are parameters.
      gauges: the gauges that should explain the dead directions.
      outputs: as in `discover`: with "logits", a number that is added to all entries along the last axis is no change.
      cutoff: singular values below this share of the largest count as zero.
      seed: of projections and directions.
      progress: whether to show a bar.

    Returns:
      The counts; `print` shows them as a table, `.plot()` draws them.

    Raises:
      ValueError: more than 12,000 parameters, of which the dense Jacobian would be too large; too few outputs.

    >>> def fn(p, x):
    ...     return jax.nn.relu(x @ p["up"]) @ p["down"]
    >>> params = {
    ...     "up": jnp.cos(jnp.arange(6.0)).reshape(2, 3),
    ...     "down": jnp.sin(jnp.arange(12.0)).reshape(3, 4),
    ... }
    >>> x = jnp.sin(jnp.arange(80.0)).reshape(40, 2)
    >>> relu = go.rescale({"up": "_ channel"}, {"down": "channel _"})
    >>> found = go.census(fn, params, [x], [relu], outputs="loss", progress=False)
    >>> found.dead, found.explained, found.unexplained
    (3, 3, 0)

    Reference: docs/design.md §5.
    """
    batches = list(batches)
    with jax.enable_x64(True):
        stored = {p: np.asarray(x, np.float64) for p, x in leaves_by_path(params).items() if _floating(x)}
        total = sum(x.size for x in stored.values())
        if total > _MOST:
            raise binding_error(
                "census", f"{total:,} parameters", "a Jacobian that would not fit in memory", f"at most {_MOST:,}",
                "take a small instance of the model, with the same layers and shorter axes",
            )  # fmt: skip

        def compared(leaves: Mapping[str, Any], batch: Any) -> list[Any]:
            return checks.compared(fn(with_leaves(params, leaves), batch), outputs)

        dtypes = {path: x.dtype for path, x in leaves_by_path(params).items() if path in stored}
        double = in_double(compared, stored, dtypes, batches[0])
        rng = np.random.default_rng(seed)
        jacobian = _jacobian(double, stored, batches, total, rng, progress)
        sizes, right = _right_vectors(jacobian)
        kept = sizes > cutoff * sizes[0]
        rank, dead = int(kept.sum()), right[int(kept.sum()) :]
        orbits = [_orbit(gauge, with_leaves(params, stored), stored, rng) for gauge in product(gauges).parts]
        scale = float(np.linalg.norm(jacobian)) / math.sqrt(total)
        counts = _counts(product(gauges).parts, orbits, jacobian, scale)

        basis = _basis(orbits, total)
        inside = int(np.linalg.matrix_rank(basis @ dead.T, _SPAN)) if len(basis) and len(dead) else 0
        unreached = np.flatnonzero(np.abs(jacobian).max(0) <= cutoff * scale)
        wider = _basis([basis, np.eye(total)[unreached]], total)
        rest = _basis([dead - (dead @ wider.T) @ wider], total, absolute=1e-6)
        shares = np.split(np.square(rest).sum(0), np.cumsum([x.size for x in stored.values()])[:-1])
    singular = np.concatenate([sizes, np.zeros(total - len(sizes))]) / sizes[0]
    return Census(
        total, rank, total - rank, inside, sum(len(x) for x in orbits) - len(basis),
        total - rank - inside - len(rest), len(rest),
        {path: float(x.sum()) for path, x in zip(stored, shares, strict=True)}, tuple(counts),
        (float(singular[rank]) if rank < total else 0.0, float(singular[rank - 1])),
    )  # fmt: skip


def _floating(leaf: Any) -> bool:
    return jnp.issubdtype(getattr(leaf, "dtype", np.int32), jnp.floating)


def _jacobian(
    fn: Callable[..., Any], stored: Mapping[str, np.ndarray], batches: Sequence[Any], total: int,
    rng: np.random.Generator, progress: bool,
) -> np.ndarray:  # fmt: skip
    """Rows of the Jacobian: gradients of random combinations of the outputs of each batch, (rows, parameters)."""

    def flat(leaves: Any, batch: Any) -> jax.Array:
        return jnp.concatenate([jnp.ravel(x) for x in fn(leaves, batch)])

    sizes = [jax.eval_shape(flat, stored, batch).size for batch in batches]
    if sum(sizes) < total:
        raise binding_error(
            "census", f"{sum(sizes):,} output numbers", f"{total:,} parameters", "more outputs than parameters",
            "pass more batches, or larger ones",
        )  # fmt: skip

    @jax.jit
    def pulled(leaves: Any, batch: Any, weights: jax.Array) -> jax.Array:
        _, pull = jax.vjp(lambda p: flat(p, batch), leaves)
        gradients = jax.vmap(lambda w: pull(w)[0])(weights)
        return jnp.concatenate([gradients[path].reshape(len(weights), -1) for path in leaves], 1)

    # Somewhat more rows than parameters: random combinations lose no rank.
    needed = [math.ceil((total + 64) * n / sum(sizes)) for n in sizes]
    rows = []
    for batch, size, count in zip(batches, sizes, needed, strict=True):
        count = min(count, size)
        for start in tqdm(range(0, count, _CHUNK), desc="census", disable=not progress, leave=False):
            weights = rng.standard_normal((min(_CHUNK, count - start), size)) / math.sqrt(size)
            rows.append(np.asarray(pulled(dict(stored), batch, weights)))
    return np.concatenate(rows)


def _right_vectors(matrix: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Singular values, descending, and all right singular vectors as rows."""
    # A QR first: R has as many rows as there are parameters, which halves the work.
    upper = np.linalg.qr(matrix, mode="r")
    _, sizes, right = np.linalg.svd(upper, full_matrices=True)
    return sizes, right


def _orbit(gauge: Gauge, params: Any, stored: Mapping[str, np.ndarray], rng: np.random.Generator) -> np.ndarray:
    """An orthonormal basis of a gauge's orbit directions at a point, as rows."""
    count = gauge.dim(params) + 8

    @jax.jit
    def along(leaves: Any, directions: Any) -> jax.Array:
        point = with_leaves(params, leaves)
        vertical = jax.vmap(lambda t: leaves_by_path(gauge.vertical(point, with_leaves(params, t))))(directions)
        return jnp.concatenate([vertical[path].reshape(count, -1) for path in stored], 1)

    directions = {path: rng.standard_normal((count, *x.shape)) for path, x in stored.items()}
    return _basis([np.asarray(along(dict(stored), directions))], sum(x.size for x in stored.values()))


def _basis(parts: Sequence[np.ndarray], total: int, absolute: float = 0.0) -> np.ndarray:
    """An orthonormal basis of the span of rows, as rows."""
    rows = np.concatenate([*parts, np.zeros((0, total))])
    if not len(rows) or not np.abs(rows).max(initial=0.0):
        return np.zeros((0, total))
    _, sizes, right = np.linalg.svd(rows, full_matrices=False)
    basis: np.ndarray = right[sizes > max(_SPAN * sizes[0], absolute)]
    return basis


def _counts(
    gauges: Sequence[Gauge], orbits: Sequence[np.ndarray], jacobian: np.ndarray, scale: float
) -> list[GaugeCount]:
    """The rows of the table."""
    total = jacobian.shape[1]
    whole = len(_basis(orbits, total))
    counts = []
    for number, (gauge, orbit) in enumerate(zip(gauges, orbits, strict=True)):
        others = len(_basis([*orbits[:number], *orbits[number + 1 :]], total))
        seen = np.linalg.norm(orbit @ jacobian.T, axis=1).max(initial=0.0) / scale
        counts.append(GaugeCount(gauge._description, len(orbit), whole - others, float(seen)))
    return counts
