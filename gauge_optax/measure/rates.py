"""Rates at which a trajectory approaches its minimum: fits a measured value as a power of the remaining length.

A minimum is *singular* if the loss is flatter than a quadratic function along some direction. It has the *order* k
along a direction if the KL divergence at a distance ε from it is proportional to ε^(2k). The Fisher information along
the direction is then proportional to ε^(2k−2). At a regular minimum k is 1. If a trajectory approaches the minimum
along one direction, the Fisher information is therefore a power of the remaining length (`quotient_arc_length`), and
the exponent shows k. The fit also tests whether the values follow a power at all. If the exponent changes on the way,
or the values do not fall, the result is "unreadable", with the reason.
Reference: DDC §2.1, Theorem 1 (iii), §5.1, App. C.4 and C.5.
"""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from scipy.special import stdtrit

from gauge_optax.binding import in_single_or_better, real_leaves
from gauge_optax.errors import binding_error, counted, kind_of
from gauge_optax.gauges.gauge import Gauges, Product, product
from gauge_optax.linalg import unit_and_size
from gauge_optax.measure._metric import (
    check_at,
    perpendicular,
    read_elements,
    require_frame,
    require_solved,
    stored,
    ways,
)
from gauge_optax.orbit._align import check_same_tree
from gauge_optax.slice import Elements
from gauge_optax.transformation import (
    in_interval,
    on_any_mesh,
    require_arrays,
    require_number,
    require_real,
    require_traceable,
)

_LEAST_POINTS = 8  # with fewer points, two halves cannot be compared
_NORMAL = 3.0  # the exponents of two halves may differ by this many standard errors by chance


class PowerLaw(NamedTuple):
    """A fit of values ∝ lengths^exponent, or the reason why there is none.

    Attributes:
      readable: whether `power_law` accepts the fit: the exponent is about the same number in the whole window.
      exponent: the fitted exponent; NaN if nothing can be fitted.
      interval: the 95 % confidence interval of the exponent; (−inf, inf) if unreadable.
      halves: the exponents of the half that is far from the minimum and of the half that is near.
      points: the number of fitted points.
      reason: why the fit is unreadable; "" if it is readable.
    """

    readable: bool
    exponent: float
    interval: tuple[float, float]
    halves: tuple[float, float]
    points: int
    reason: str

    def __str__(self) -> str:
        low, high = self.interval
        return f"{self.exponent:.3f} [{low:.3f}, {high:.3f}]" if self.readable else f"unreadable: {self.reason}"


class KLOrder(NamedTuple):
    """The order k of a minimum along a direction.

    Attributes:
      readable: whether the power law is readable.
      order: k; NaN if unreadable.
      interval: the 95 % confidence interval of k.
      fit: the power law from which k is computed.
    """

    readable: bool
    order: float
    interval: tuple[float, float]
    fit: PowerLaw

    def __str__(self) -> str:
        low, high = self.interval
        return f"{self.order:.3f} [{low:.3f}, {high:.3f}]" if self.readable else f"unreadable: {self.fit.reason}"


class RateTable(dict[tuple[str, str], PowerLaw]):
    """A dict, (layer, observable) → the observable's power law; `print` shows a table with a row per layer."""

    @property
    def readable(self) -> int:
        """The number of readable fits."""
        return sum(fit.readable for fit in self.values())

    def __str__(self) -> str:
        layers, observables = (list(dict.fromkeys(key[k] for key in self)) for k in (0, 1))
        rows = [["layer", *map(str, observables)]]
        for layer in layers:
            cells = [self.get((layer, observable)) for observable in observables]
            shown = ["" if x is None else f"{x.exponent:.2f}" if x.readable else f"({x.reason})" for x in cells]
            rows.append([str(layer), *shown])
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ("  ".join(cell.ljust(n) for cell, n in zip(row, widths, strict=True)).rstrip() for row in rows)
        return "\n".join([*lines, f"{self.readable} of {len(self)} cells readable"])


# Lengths ----------------------------------------------------------------------------------------------------


@on_any_mesh
def quotient_arc_length(points: Sequence[Any], gauges: Gauges, end: Any = None, at: str = "balanced") -> np.ndarray:
    """Measures, from each point of a trajectory, how long the rest of it is, without the motion along orbits.

    Every point is moved to the point of its orbit that `at` names. What is left of the motion along orbits, such as a
    rotation of heads, is then removed from each step between two points.

    Args:
      points: parameters on the way, in order; the last one is the minimum, or near it.
      gauges: a gauge or a sequence of them.
      end: the minimum, if it is known; its distance from the last point is added.
      at: "balanced", the point of least norm on each orbit, or "slice", where anchors have norm 1.

    Returns:
      One length per point, in descending order; the last is 0, or the distance to `end`. Trajectories of twins have the
      same lengths. The lengths of steps are summed, whatever their direction. If an optimizer oscillates, its way is
      therefore longer than its distance from the minimum.

    Raises:
      ValueError: fewer than two points, or points that differ in structure or shapes; heads from which no frame can be
        read, such as padded heads of `head_linear`; bindings that do not fit; a user's gauge without the method
        `algebra`; channels or heads of so different sizes that the part along the orbit is not found; another `at`.

    >>> gauge = go.rescale({"up": "_ channel"}, {"down": "channel _"})
    >>> pairs = [(4.0, 1.0), (2.0, 0.5), (10.0, 0.1)]
    >>> path = [{"up": jnp.full((1, 1), a), "down": jnp.full((1, 1), b)} for a, b in pairs]
    >>> # At balanced points, from (2, 2) to (1, 1); and along the orbit.
    >>> lengths = go.measure.quotient_arc_length(path, gauge)
    >>> [round(float(x), 3) for x in lengths]
    [1.414, 0.0, 0.0]

    Reference: DDC §2.1, the quotient arc length. Deviation: no rule that picks one rotation of the heads per point is
    smooth in the weights. The part of every step that rotates heads is therefore removed instead, to first order.
    """
    check_at("quotient_arc_length", at)
    if not isinstance(points, Iterable) or isinstance(points, Mapping):
        raise binding_error(
            "quotient_arc_length", "points that are no sequence", kind_of(points),
            "parameter trees in order", "pass [start, ..., end], one tree for each point")
    points = [*points, *([] if end is None else [end])]
    if len(points) < 2:
        raise binding_error(
            "quotient_arc_length", "too few points", counted(len(points), "point"), "at least two",
            "record more of the trajectory"
        )
    require_arrays("quotient_arc_length", points)
    require_traceable("quotient_arc_length", *points)
    group = product(gauges)
    for point in points:
        check_same_tree("quotient_arc_length", points[0], point)
        require_frame("quotient_arc_length", group, point)
    frame = read_elements(group, points[0])
    steps = []
    for pair in itertools.pairwise(points):
        length = _step(group, at, frame, *pair)
        require_solved("quotient_arc_length", length, [real_leaves("quotient_arc_length", point) for point in pair])
        steps.append(float(length))
    lengths = np.concatenate([np.cumsum(steps[::-1])[::-1], [0.0]])
    return lengths if end is None else lengths[:-1]


@partial(jax.jit, static_argnums=(0, 1))
def _step(group: Product, at: str, frame: Elements, before: Any, after: Any) -> jax.Array:
    """The length of a step between two points, without its part along the orbit; `frame` has the heads' basis."""
    s = group._bound(before).slice
    ends = []
    for params in (before, after):
        free = {p: in_single_or_better(x) for p, x in real_leaves("quotient_arc_length", params).items()}
        ends.append(free | stored(s, ways(group, params, at, frame)[-1].point))
    step = perpendicular(group, ends[0], jax.tree.map(jnp.subtract, ends[1], ends[0]))
    unit, size = unit_and_size(jnp.concatenate([jnp.ravel(x) for x in step.values()]), 0)
    return size[0] * jnp.linalg.norm(unit)


# Power laws -------------------------------------------------------------------------------------------------


def power_law(
    lengths: Any, values: Any, *, window: tuple[float, float] = (0.0, np.inf), drift: float = 0.1, span: float = 2.0
) -> PowerLaw:
    """Fits values ∝ lengths^exponent, and tests whether the exponent is the same across the window.

    The fit is unreadable in five cases:

    * there are fewer than 8 points;
    * the lengths span less than a factor of `span`;
    * the values are not positive, or do not fall toward the minimum;
    * the exponents of the window's two halves differ by more than `drift` times the fitted exponent, and this
      difference is either more than chance allows (three standard errors) or more than half of the exponent;
    * because of noise, the 95 % interval reaches farther than half of the exponent to each side.

    Args:
      lengths: distances from the minimum, (count,), such as those of `quotient_arc_length`; zeros are left out.
      values: the values measured at these distances, (count,).
      window: the least and the largest length that are fitted.
      drift: how much the exponents of the halves may differ, as a share of the exponent.
      span: the least ratio of the largest length to the smallest.

    Returns:
      The exponent with a 95 % interval, or the reason why there is none. The interval allows for noise in the logarithm
      of the values that is correlated from point to point, as far as the residuals show the correlation ρ of
      neighbouring points. *Measured* on 400 draws each, for exponents 1, 2 and 4 with noise of 10 %
      (`tests/measure/test_rates.py` has some): of the readable fits, the interval covers the exponent in 94 to 97 %
      without correlation. From 30 points on it does in 93 to 94 % for ρ = 0.6, in 86 to 92 % for ρ = 0.8, and in 80 to
      91 % for ρ = 0.9; with 10 points in 81 to 88 % for ρ = 0.6, and in 76 to 84 % for ρ = 0.9. It covers least for the
      exponent 1, where up to half of the fits are unreadable. If the exponents of the halves differ by more than three
      standard errors, half of the excess is added on each side.

    Raises:
      ValueError: arrays of different lengths, or of complex numbers; a `window` that is no two numbers in order; a
        `drift` below 0 or a `span` below 1; tracers, as inside `jit`.

    >>> lengths = jnp.logspace(0, -2, 30)
    >>> print(go.measure.power_law(lengths, 3.0 * lengths**2))
    2.000 [2.000, 2.000]
    >>> print(go.measure.power_law(lengths, lengths**2 + 0.01))
    unreadable: the exponent drifts from 1.76 to 0.24

    Reference: DDC App. C.5, where a fit is readable if the values fall toward the minimum. Deviation: any fall would
    then count as a power law; here the exponent must also be the same in both halves of the window.
    """
    require_arrays("power_law", lengths, values)
    ends = list(window) if np.shape(window) == (2,) else []
    if not ends or not all(in_interval(end, "[-inf, inf]") for end in ends) or ends[0] >= ends[1]:
        raise binding_error(
            "power_law", "bad window", f"window={window!r}", "two numbers, the least and the largest length that count",
            "pass window=(0.0, np.inf) for all lengths")
    require_number("power_law", "drift", drift, "[0, inf]", "pass drift=0.1")
    require_number("power_law", "span", span, "[1, inf)", "pass span=2.0")
    for name, given in (("lengths", lengths), ("values", values)):
        require_real("power_law", name, given)
    x, y = np.asarray(lengths, np.float64).ravel(), np.asarray(values, np.float64).ravel()
    if x.shape != y.shape:
        raise binding_error(
            "power_law", "arrays that do not belong together", f"{x.size} lengths and {y.size} values",
            "one value per length", "pass what was read at the same points",
        )
    if not np.isfinite(x).all():
        return _unreadable("lengths that are not finite", len(x))
    kept = (x > 0) & (x >= window[0]) & (x <= window[1])
    x, y = x[kept], y[kept]
    if len(x) < _LEAST_POINTS:
        return _unreadable(counted(len(x), "point"), len(x))
    if not (np.isfinite(y).all() and (y > 0).all()):
        return _unreadable("values that are not positive", len(x))
    if x.max() < span * x.min():
        return _unreadable(f"lengths span a factor of {x.max() / x.min():.2f}", len(x))
    order = np.argsort(-x, kind="stable")
    log_x, log_y = np.log(x[order]), np.log(y[order])
    far = log_x >= 0.5 * (log_x[0] + log_x[-1])
    if min(far.sum(), (~far).sum()) < _LEAST_POINTS // 2:
        far = np.arange(len(x)) < len(x) // 2
    if not all(np.ptp(log_x[half]) > 0 for half in (far, ~far)):
        return _unreadable("too few different lengths", len(x))
    slope, error, half = _line(log_x, log_y)
    (first, first_error, _), (last, last_error, _) = _line(log_x[far], log_y[far]), _line(log_x[~far], log_y[~far])
    power_law = partial(PowerLaw, exponent=slope, halves=(first, last), points=len(x))
    unknown = (-np.inf, np.inf)
    if slope - _quantile(len(x) - 2) * error <= 0:
        return power_law(readable=False, interval=unknown, reason="values do not fall")
    apart, chance = abs(first - last), float(np.hypot(first_error, last_error))
    if apart > drift * slope and apart > min(_NORMAL * chance, 0.5 * slope):
        reason = f"the exponent drifts from {first:.2f} to {last:.2f}"
        return power_law(readable=False, interval=unknown, reason=reason)
    if half > 0.5 * slope:
        return power_law(readable=False, interval=unknown, reason="too much noise")
    half += 0.5 * max(0.0, apart - _NORMAL * chance)
    return power_law(readable=True, interval=(slope - half, slope + half), reason="")


def kl_order(
    lengths: Any,
    values: Any,
    of: str = "fisher",
    window: tuple[float, float] = (0.0, np.inf),
    drift: float = 0.1,
    span: float = 2.0,
) -> KLOrder:
    """Computes the order k of a minimum from a fit: KL ∝ length^(2k), Fisher ∝ length^(2k−2).

    Args:
      lengths: distances from the minimum along the approach, (count,).
      values: the Fisher information along the approach at these distances, or the KL divergence, (count,).
      of: "fisher" if `values` are the Fisher information, "kl" if they are the KL divergence.
      window: the least and the largest length that are fitted.
      drift: how much the exponents of the halves may differ, as a share of the exponent; see `power_law`.
      span: the least ratio of the largest length to the smallest.

    Returns:
      k with an interval, or "unreadable". At a regular minimum the Fisher information does not fall, and its fit is
      unreadable: use of="kl", which gives k = 1.

    Raises:
      ValueError: another `of`; the errors of `power_law`.

    >>> lengths = jnp.logspace(0, -2, 30)
    >>> print(go.measure.kl_order(lengths, lengths**2))
    2.000 [2.000, 2.000]
    >>> print(go.measure.kl_order(lengths, lengths**2, of="kl"))
    1.000 [1.000, 1.000]

    Reference: DDC §2.1.
    """
    if of not in ("fisher", "kl"):
        raise binding_error("kl_order", "no such values", f"of={of!r}", "'fisher' or 'kl'", 'pass of="fisher"')
    fit = power_law(lengths, values, window=window, drift=drift, span=span)
    shift = 1.0 if of == "fisher" else 0.0
    low, high = fit.interval
    order = shift + 0.5 * fit.exponent if fit.readable else float("nan")
    return KLOrder(fit.readable, order, (shift + 0.5 * low, shift + 0.5 * high), fit)


def rate_table(
    lengths: Any,
    observables: Mapping[str, Mapping[str, Any]],
    window: tuple[float, float] = (0.0, np.inf),
    drift: float = 0.1,
    span: float = 2.0,
) -> RateTable:
    """Fits a power law for each layer and observable. Where a fit is unreadable, the table shows the reason.

    Args:
      lengths: distances from the minimum, (count,).
      observables: layer → observable → its values at these distances, (count,).
      window: the least and the largest length that are fitted.
      drift: how much the exponents of the halves may differ, as a share of the exponent; see `power_law`.
      span: the least ratio of the largest length to the smallest.

    Returns:
      The table.

    Raises:
      ValueError: observables that are no dictionaries of values in a dictionary; the errors of `power_law`.

    >>> lengths = jnp.logspace(0, -2, 30)
    >>> read = {"mlp": {"σ_min": lengths**2, "rank": 1.0 / lengths}}
    >>> read["head"] = {"σ_min": lengths}
    >>> print(go.measure.rate_table(lengths, read))
    layer  σ_min  rank
    mlp    2.00   (values do not fall)
    head   1.00
    2 of 3 cells readable

    Reference: DDC §5.1 and App. C.5, whose table has 65 fits.
    """
    if not isinstance(observables, Mapping) or not all(isinstance(read, Mapping) for read in observables.values()):
        raise binding_error(
            "rate_table", "observables that are no layers with values by name", repr(observables)[:60],
            "a dictionary of dictionaries", "pass {layer: {observable: values}}")
    return RateTable({
        (layer, name): power_law(lengths, values, window=window, drift=drift, span=span)
        for layer, read in observables.items() for name, values in read.items()
    })


def _line(x: np.ndarray, y: np.ndarray) -> tuple[float, float, float]:
    """The slope of a straight line, its standard error, and half the width of its 95 % interval.

    Error and width allow for noise that is correlated from point to point. The error is for tests of whether two slopes
    differ. For it, the correlation is taken as 0.9 at most, because points on a curve have correlated residuals too.
    """
    centred, count = x - x.mean(), len(x)
    square = float(centred @ centred)
    slope = float(centred @ y) / square
    rest = y - y.mean() - slope * centred
    both = float(rest @ rest)
    along = float(rest[:-1] @ rest[1:]) / both if both > 0 else 0.0
    white = float(np.sqrt(both / max(1, count - 2) / square))
    error = white * _stretch(min(max(along + 2 / count, 0.0), 0.9))
    # A fitted line leaves residuals whose correlation ρ is too small by about (2 + 4ρ)/n.
    along = min(max((along + 2 / count) / max(1 - 4 / count, 0.1), 0.0), 0.97)
    alone = count * (1 - along) / (1 + along)  # the number of uncorrelated points that would determine it as well
    return slope, error, _quantile(max(alone - 2, 1.0)) * white * _stretch(along)


def _stretch(correlation: float) -> float:
    """By how much the standard error of a slope grows if the noise is correlated from point to point."""
    return float(np.sqrt((1.0 + correlation) / (1.0 - correlation)))


def _quantile(degrees: float) -> float:
    """The two-sided 95 % quantile of Student's t."""
    return float(stdtrit(degrees, 0.975))


def _unreadable(reason: str, points: int) -> PowerLaw:
    nan = float("nan")
    return PowerLaw(False, nan, (-np.inf, np.inf), (nan, nan), points, reason)
