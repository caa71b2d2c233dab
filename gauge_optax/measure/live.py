"""`track` records in an optimizer's state how its steps move along orbits. Read the records by `optax.tree.get`.

Norms are taken in slice coordinates, where all weight sets of one function have the same norms. For a point θ, its
gradient g and a step u, the slice coordinates are θ̂ = F⁻¹·θ, ĝ = Fᵀ·g and û = F⁻¹·u. Here F is the frame of θ itself,
and not the frame from `init`. docs/design.md §3 explains both.

There is one exception. A `residual_rotation` turns a kernel behind a norm by a matrix that contains the norm's scale.
A step of the scale therefore turns the kernel, too. Two weight sets that differ by such a rotation have the same norms
of parameters, but three kinds of numbers may differ: the gradient's norm on the scale, the update's norms on the leaves
behind the norm (its kernels and its bias), and `relevant_share`, which sums over these leaves.
"""

import functools
import itertools
import json
import math
from collections.abc import Collection, KeysView, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from gauge_optax.binding import leaves_by_path
from gauge_optax.errors import binding_error
from gauge_optax.gauges.gauge import Gauges, Product, product
from gauge_optax.linalg import real_dtype, safe_divide, unit_and_size
from gauge_optax.measure._recording import recorded
from gauge_optax.measure.motion import turning
from gauge_optax.parts.part import Arrays
from gauge_optax.slice import Elements, Slice
from gauge_optax.transformation import (
    GaugeTransformation,
    checked_inner,
    in_computing_dtype,
    layout,
    placeholder,
    require_every,
    require_gauges_of_state,
    require_numbers,
    transformation,
    updates_at,
    with_gauges_of,
)
from gauge_optax.xla import zeros_of

LAYERS = ("layer",)


class Figures(NamedTuple):
    """Arrays with names, packed into one array: a hundred scalars in a state would slow down every step.

    Names are read as those of a dict: `figures["up"]`, `figures.items()`, `dict(figures)`. A loop over the figures
    themselves goes over the two fields, as Optax, Flax and Orbax expect it of a NamedTuple in a state.

    Attributes:
      packed: the entries of all arrays, one array after the other, (total size,).
      layout: a dict with one key, a JSON text with the names and shapes of the arrays in this order. A dict without
        arrays is static under `jit`, and every file format can store it.

    >>> from gauge_optax.measure.live import Figures
    >>> figures = Figures.of({"up": jnp.ones(()), "down": jnp.array([2.0, 3.0])})
    >>> dict(figures)
    {'up': Array(1., dtype=float32), 'down': Array([2., 3.], dtype=float32)}
    """

    packed: jax.Array
    layout: dict[str, tuple[()]]

    @classmethod
    def of(cls, named: Mapping[str, jax.Array]) -> "Figures":
        """Packs a mapping of names to arrays, in the dtype in which gauges compute."""
        flat = [jnp.ravel(x).astype(real_dtype()) for x in named.values()]
        packed = jnp.concatenate(flat) if flat else jnp.zeros(0, real_dtype())
        return cls(packed, {json.dumps([(name, jnp.shape(x)) for name, x in named.items()]): ()})

    def keys(self) -> KeysView[str]:
        """The names."""
        return _places(*self.layout).keys()

    def values(self) -> list[jax.Array]:
        """The arrays."""
        return [x for _, x in self.items()]

    def items(self) -> list[tuple[str, jax.Array]]:
        """The names, each with its array."""
        places = _places(*self.layout).items()
        return [(name, self.packed[place].reshape(shape)) for name, (place, shape) in places]

    def __getitem__(self, name: Any) -> Any:
        if not isinstance(name, str):
            return tuple.__getitem__(self, name)
        place, shape = _places(*self.layout)[name]
        return self.packed[place].reshape(shape)

    def __contains__(self, name: object) -> bool:
        return name in self.keys()


@functools.cache
def _places(layout: str) -> dict[str, tuple[slice, tuple[int, ...]]]:
    """Name → where in the packed array its entries are, and the shape of its array."""
    named = json.loads(layout)
    stops = list(itertools.accumulate(math.prod(shape) for _, shape in named))
    starts = [0, *stops]
    return {name: (slice(*ends), tuple(shape)) for (name, shape), *ends in zip(named, starts, stops, strict=False)}


class SliceNorms(NamedTuple):
    """Norms in slice coordinates, leaf path → norm. A leaf with an axis of layers has one norm per layer.

    All weight sets of one function have the same norms, with one exception. Two sets that differ by a
    `residual_rotation` past norms with scales may have different numbers in three places: `gradient_norm` of these
    scales, `update_norm` of the leaves behind them, and `relevant_share`.

    Attributes:
      parameter_norm: ‖θ̂‖.
      gradient_norm: ‖ĝ‖.
      update_norm: ‖û‖.
      relevant_share: a²/(a² + v²), where a is the norm of û's horizontal part, and v that of its vertical part, over
        all leaves. It is 1 for a horizontal step, and 0 for a vertical step, which does not change the function. The
        two parts need not be perpendicular, so that a² + v² need not be ‖û‖².
    """

    parameter_norm: Figures
    gradient_norm: Figures
    update_norm: Figures
    relevant_share: jax.Array


class Metrics(NamedTuple):
    """The record that `track` took last; see `SliceNorms` for the norms.

    Attributes:
      recorded_at: the number of the recorded step, from 0.
      drift: "gauge/layer" → the largest change, since `init`, of a log-scale or shift that is read from the anchors.
      turning: "gauge/layer" → the angle in radians by which the step turns each head: the root of the sum of the
        squared angles of the head's planes. It is NaN where `vertical_motion` is NaN.
      parameter_norm: norms of the parameters before the step.
      gradient_norm: norms of the gradient that the optimizer got.
      update_norm: norms of the update that it returned.
      relevant_share: the share of the update that is not along the orbit, see `SliceNorms`.
      asymmetry: "gauge/layer" → the part of the gradient along the orbit, as in `go.check`. It is about roundoff,
        unless a term of the loss, such as a penalty, breaks the gauge.
    """

    recorded_at: jax.Array
    drift: Figures
    turning: Figures
    parameter_norm: Figures
    gradient_norm: Figures
    update_norm: Figures
    relevant_share: jax.Array
    asymmetry: Figures


class TrackState(NamedTuple):
    """State of `track`.

    Attributes:
      inner_state: the optimizer's state.
      taken: number of steps so far.
      start: the log-scales and shifts that were read from the anchors at `init`. Drift is the difference from them.
      metrics: the last record.
      gauges: a dict with the key "place in the list: label" and the value () for every gauge: the gauges' names as a
        pytree without arrays.
    """

    inner_state: optax.OptState
    taken: jax.Array
    start: Any
    metrics: Metrics
    gauges: dict[str, tuple[()]]


def track(
    inner: optax.GradientTransformation,
    gauges: Gauges,
    *,
    every: int | np.integer[Any] | jax.Array = 20,
    layers: Collection[str] = LAYERS,
) -> GaugeTransformation:
    """Runs an optimizer unchanged, and records drift, turning, norms on the slice and the asymmetry of gradients.

    Read a record by name, wherever it is in a state: `optax.tree.get(state, "drift")`, or all of it by
    `optax.tree.get(state, "metrics")`.

    Args:
      inner: any optimizer, with gauges or without. Its updates are returned unchanged.
      gauges: a gauge or a sequence of them.
      every: number of steps between records; the first step is recorded. A record takes as long as up to two updates.
      layers: names of axes that count scanned layers. Every index of such an axis has its own numbers.

    Returns:
      The transformation. Its `update` needs `params`.

    Raises:
      ValueError: `every` that is no positive int; `layers` that are no names; bindings that do not fit the tree;
        `update` without params.

    >>> gauge = go.rescale({"up": "_ channel"}, {"down": "channel _"})
    >>> params = {"up": jnp.ones((2, 3)), "down": jnp.full((3, 1), 0.5)}
    >>> tx = optax.chain(
    ...     optax.clip_by_global_norm(1.0),
    ...     go.measure.track(optax.adam(0.1), gauge, every=1),
    ... )
    >>> state = tx.init(params)
    >>> for _ in range(3):
    ...     updates, state = tx.update(
    ...         {"up": jnp.ones((2, 3)), "down": jnp.ones((3, 1))}, state, params
    ...     )
    ...     params = optax.apply_updates(params, updates)
    >>> # Two steps of -0.1: log 0.8.
    >>> round(float(optax.tree.get(state, "drift")["rescale"]), 3)
    -0.223
    >>> round(float(optax.tree.get(state, "relevant_share")), 3)
    0.581

    Reference: docs/design.md §2, §3.
    """
    require_every("track", every)
    _require_names("track", layers)
    group, inner = product(gauges), checked_inner("track", inner)

    def init(params: optax.Params) -> TrackState:
        sharding = layout(params)
        start = sharding.run(group.coordinates, params)
        shapes = jax.eval_shape(lambda p, s: sharding.run(_metrics, group, layers, p, s, p, p, 0), params, start)
        return TrackState(inner.init(params), jnp.zeros((), jnp.int32), start, zeros_of(shapes), _known(group, params))

    def update(updates: Any, state: TrackState, params: Any, **extra: Any) -> tuple[Any, TrackState]:
        known, leaves = _known(group, params), group._bound(params).slice.leaves_by_label()
        require_gauges_of_state("track", state.gauges, known, leaves)

        def step(gradient: optax.Updates) -> tuple[optax.Updates, optax.OptState]:
            return inner.update(gradient, state.inner_state, params, **extra)

        def record(steps: optax.Updates) -> Metrics:
            return _metrics(group, layers, params, state.start, updates, steps, state.taken)

        steps, inner_state, metrics = recorded(step, record, state.metrics, updates, state.taken, every)
        taken = optax.safe_increment(state.taken)
        return steps, state._replace(inner_state=inner_state, taken=taken, metrics=metrics)

    def empty(params: Any) -> TrackState:
        return TrackState(inner.init(params), *(placeholder(),) * 4)  # type: ignore[arg-type]

    return transformation("track", init, update, TrackState, empty, gauges=with_gauges_of(inner, group.gauges))


def slice_norms(
    params: Any, gradient: Any, update: Any, gauges: Gauges, *, layers: Collection[str] = LAYERS
) -> SliceNorms:
    """Norms of a point, its gradient and a step from there, in slice coordinates, per leaf.

    Args:
      params: the point before the step.
      gradient: a cotangent, same structure.
      update: a tangent, same structure.
      gauges: a gauge or a sequence of them.
      layers: names of axes that count scanned layers. Every index of such an axis has its own norm.

    Returns:
      The norms. All weight sets of one function have the same norms, up to roundoff; `SliceNorms` has an exception for
      `residual_rotation`.

    Raises:
      ValueError: bindings that do not fit the tree; a gradient or an update of another shape; `layers` that are no
        names.

    >>> gauge = go.rescale({"up": "_ channel"}, {"down": "channel _"})
    >>> params = {"up": jnp.full((4, 1), 6.0), "down": jnp.ones((1, 1))}
    >>> norms = go.measure.slice_norms(params, params, params, gauge).parameter_norm
    >>> # `up` is the anchor, of norm 1 on the slice.
    >>> {path: round(float(x), 3) for path, x in norms.items()}
    {'down': 12.0, 'up': 1.0}
    """
    for tree in (params, gradient, update):
        require_numbers("slice_norms", tree)
    _require_names("slice_norms", layers)
    for tree in (gradient, update):
        updates_at("slice_norms", leaves_by_path(tree).keys() & leaves_by_path(params).keys(), tree, params)
    return _slice_norms(product(gauges)._bound(params).slice, layers, params, gradient, update)[0]


def _require_names(name: str, layers: Any) -> None:
    """Raises ValueError unless `layers` is a collection of names. In a single string, every letter would be a name."""
    if isinstance(layers, str) or not (isinstance(layers, Collection) and all(isinstance(x, str) for x in layers)):
        raise binding_error(
            name, "bad layers", f"layers={layers!r}", "names of axes in a tuple", 'pass layers=("layer",)')


def _slice_norms(
    s: Slice, layers: Collection[str], params: Any, gradient: Any, update: Any
) -> tuple[SliceNorms, Elements, Arrays, Arrays]:
    """Returns the norms; the frame (without rotations) and slice point of `params`; and û of the bound leaves."""
    (elements, live, _), entered = s.unturned_slice_point(params)
    slice_gradient = entered.pull(s.vectors(gradient))
    slice_update: Arrays = jax.jvp(entered.enter, (s.values(params),), (s.vectors(update),))[1]

    across = s.horizontal(entered.point, slice_update, live)
    along = {path: x - across[path] for path, x in slice_update.items()}
    free = {path: jnp.abs(in_computing_dtype(x)) for path, x in leaves_by_path(update).items() if path not in along}
    # A tiny or huge step would have squares of 0 or infinity.
    most = jnp.max(jnp.stack([jnp.max(x, initial=0.0) for x in free.values()] + [
        jnp.max(jnp.abs(x), initial=0.0) for part in (across, along) for x in part.values()]))
    relevant, lost = (
        sum((jnp.sum(jnp.square(safe_divide(x, most.astype(x.dtype)))) for x in part.values()), start=jnp.zeros(()))
        for part in (across | free, along)
    )
    share = 1.0 - safe_divide(lost, relevant + lost)

    layer_axes: dict[str, int] = {}  # leaf path → the axis that counts layers
    for block in s.blocks:
        names = block.split_labels
        for axis, group in enumerate(block.groups):
            if len(group) == 1 and names[group[0]] in layers:
                layer_axes[block.path] = axis

    def norms(tree: Any, bound: Arrays) -> Figures:
        named = {}
        for path, leaf in leaves_by_path(tree).items():
            x = jnp.abs(in_computing_dtype(bound.get(path, leaf)))
            summed = tuple(axis for axis in range(x.ndim) if axis != layer_axes.get(path))
            x, most = unit_and_size(x, summed)
            named[path] = jnp.squeeze(most, summed) * jnp.sqrt(jnp.sum(jnp.square(x), summed))
        return Figures.of(named)

    by_leaf = (norms(params, entered.point), norms(gradient, slice_gradient), norms(update, slice_update))
    return SliceNorms(*by_leaf, share), elements, entered.point, slice_update


def _metrics(
    group: Product, layers: Collection[str], params: Any, start: Any, gradient: Any, update: Any, step: Any
) -> Metrics:
    b = group._bound(params)
    norms, elements, point, slice_update = _slice_norms(b.slice, layers, params, gradient, update)
    drift, turns = Arrays(), Arrays()
    coordinates, angles = b.coordinates(elements), turning(b, point, slice_update)
    for label, copies, now, at_init, angle in zip(labels(group), b.copies, coordinates, start, angles, strict=True):
        named = {copy.key: copy.named for copy in copies}
        for key, x in jax.tree.map(jnp.subtract, now, at_init).items():
            if isinstance(x, Mapping):  # a shift has an array per leaf
                for path, shift in leaves_by_path(x).items():
                    drift[labelled(label, f"{key}/{path}" if key else path)] = _extreme(shift, None)
            else:
                names = [*named.get(key, ()), *[""] * x.ndim][: x.ndim]
                drift[labelled(label, key)] = _extreme(x, tuple(k for k in range(x.ndim) if names[k] not in layers))
        turns |= {labelled(label, key): x for key, x in angle.items()}
    pairs = zip(labels(group), b.asymmetry(params, gradient), strict=True)
    asymmetry = {labelled(label, key): x for label, of_gauge in pairs for key, x in of_gauge.items()}
    return Metrics(
        jnp.asarray(step, jnp.int32), Figures.of(drift), Figures.of(turns), *norms, asymmetry=Figures.of(asymmetry)
    )


def _known(group: Product, params: Any) -> dict[str, tuple[()]]:
    """The value of `TrackState.gauges`: an empty entry per gauge, keyed by its place in the list and a label.

    `update` refuses a state with other keys. Records name a gauge by its place ("rescale0"), and the label says which
    leaves it binds.
    """
    return {f"{at}: {copies[0].parts[0].label}": () for at, copies in enumerate(group._bound(params).copies)}


def labels(group: Product) -> list[str]:
    """Names of a product's gauges. Names that occur several times get a number."""
    names = [part.name for part in group.gauges]
    return [name if names.count(name) == 1 else f"{name}{names[:k].count(name)}" for k, name in enumerate(names)]


def labelled(gauge: str, layer: str) -> str:
    """The key of a recorded number: "gauge/layer", or the gauge alone if it has no layers."""
    return f"{gauge}/{layer}" if layer else gauge


def _extreme(x: jax.Array, axes: tuple[int, ...] | None) -> jax.Array:
    """The entry of largest magnitude over `axes` (all if None), with its sign."""
    high, low = jnp.max(x, axes), jnp.min(x, axes)
    return jnp.where(high > -low, high, low)
