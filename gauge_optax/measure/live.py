"""What an optimizer does to gauges while it runs, in its own state: `track`, read by `optax.tree.get`.

Norms are taken in slice coordinates, where weight sets of one function have the same ones: θ̂ = F⁻¹·θ, ĝ = Fᵀ·g,
û = F⁻¹·u, F the frame of the point itself. docs/design.md §3.

Here: figures of one step, and the wrapper that keeps them. Not here: what drift and turning are (`motion`).
"""

import functools
import math
from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

import gauge_optax.gauges.chart as charts
from gauge_optax.binding import is_empty, leaves_by_path
from gauge_optax.checks import (
    require_every,
    require_gradients,
    require_own,
    require_params,
    require_transformation,
    with_own_state,
)
from gauge_optax.gauges._head import PLANE, HeadInstance
from gauge_optax.gauges._linear import LinearReading
from gauge_optax.gauges.base import Element, Gauges
from gauge_optax.gauges.bound import Bound
from gauge_optax.gauges.product import Product, product
from gauge_optax.linalg import real_dtype
from gauge_optax.measure._recording import recorded
from gauge_optax.measure.motion import small_turns
from gauge_optax.meshes import layout

Arrays = dict[str, jax.Array]

LAYERS = ("layer",)


@jax.tree_util.register_pytree_with_keys_class
class Figures(Mapping[str, jax.Array]):
    """Numbers by name, in one array: a hundred scalars in a state would cost more than what they say.

    Attributes:
      packed: all of them, behind each other.
      names: name and shape of each.

    >>> from gauge_optax.measure.live import Figures
    >>> found = Figures.of({"up": jnp.ones(()), "down": jnp.array([2.0, 3.0])})
    >>> dict(found)
    {'up': Array(1., dtype=float32), 'down': Array([2., 3.], dtype=float32)}
    """

    def __init__(self, packed: jax.Array, names: tuple[tuple[str, tuple[int, ...]], ...]) -> None:
        self.packed, self.names = packed, names

    @classmethod
    def of(cls, named: Mapping[str, jax.Array]) -> "Figures":
        """Packs them."""
        flat = [jnp.ravel(x).astype(real_dtype()) for x in named.values()]
        packed = jnp.concatenate(flat) if flat else jnp.zeros(0, real_dtype())
        return cls(packed, tuple((name, jnp.shape(x)) for name, x in named.items()))

    def __getitem__(self, name: str) -> jax.Array:
        start = 0
        for own, shape in self.names:
            stop = start + math.prod(shape)
            if own == name:
                return self.packed[start:stop].reshape(shape)
            start = stop
        raise KeyError(name)

    def __iter__(self) -> Iterator[str]:
        return (name for name, _ in self.names)

    def __len__(self) -> int:
        return len(self.names)

    def __repr__(self) -> str:
        return f"Figures({dict(self)})"

    def tree_flatten_with_keys(self) -> tuple[Any, Any]:
        """For JAX."""
        return ((jax.tree_util.GetAttrKey("packed"), self.packed),), self.names

    @classmethod
    def tree_unflatten(cls, names: Any, children: Any) -> "Figures":
        """For JAX."""
        return cls(children[0], names)


class SliceNorms(NamedTuple):
    """Norms in slice coordinates, by leaf; a leaf with an axis of layers has one per layer.

    Attributes:
      parameter_norm: ‖θ̂‖.
      gradient_norm: ‖ĝ‖.
      update_norm: ‖û‖.
      relevant_share: of ‖û‖², what is not along the orbit, over all leaves: 1 for a step that only changes the
        function, 0 for one that only changes coordinates.
    """

    parameter_norm: Figures
    gradient_norm: Figures
    update_norm: Figures
    relevant_share: jax.Array


class Metrics(NamedTuple):
    """What `track` keeps of the step that it recorded last; see `SliceNorms` for the norms.

    Attributes:
      recorded_at: that step's number, from 0.
      drift: largest change of what a gauge's anchors read, since `init`, by "gauge/instance"; log-scales and shifts.
      turning: by how much the step turns every head, by "gauge/instance": radians, the root of the sum over planes.
      parameter_norm: before the step.
      gradient_norm: of what the optimizer was given.
      update_norm: of what it gave.
      relevant_share: of the update.
    """

    recorded_at: jax.Array
    drift: Figures
    turning: Figures
    parameter_norm: Figures
    gradient_norm: Figures
    update_norm: Figures
    relevant_share: jax.Array


class TrackState(NamedTuple):
    """State of `track`.

    Attributes:
      inner_state: of the optimizer.
      taken: steps so far.
      start: what anchors read at `init`.
      metrics: of the step recorded last.
    """

    inner_state: optax.OptState
    taken: jax.Array
    start: Any
    metrics: Metrics


def track(
    inner: optax.GradientTransformation,
    gauges: Gauges,
    *,
    every: int | jax.Array = 20,
    layers: Collection[str] = LAYERS,
) -> optax.GradientTransformationExtraArgs:
    """Runs an optimizer as it is, and records what it does to gauges: drift, turning, norms on the slice.

    Read it anywhere in a state, by name: `optax.tree.get(state, "drift")`, or all at once by
    `optax.tree.get(state, "metrics")`.

    Args:
      inner: any transformation, `quotient` or not: updates pass through unchanged.
      gauges: a gauge or a sequence of them, meaning their product.
      every: steps between records, the first step among them. A record costs up to two updates.
      layers: names of axes that are kept apart: scanned layers.

    Returns:
      The transformation. Its `update` needs `params`.

    Raises:
      ValueError: `every` that is no positive int; bindings that do not fit the tree; `update` without params.

    >>> gauge = go.rescale({"up": "_ channel"}, {"down": "channel _"})
    >>> params = {"up": jnp.ones((2, 3)), "down": jnp.full((3, 1), 0.5)}
    >>> tx = optax.chain(optax.clip_by_global_norm(1.0), go.track(optax.adam(0.1), gauge, every=1))
    >>> state = tx.init(params)
    >>> for _ in range(3):
    ...     updates, state = tx.update({"up": jnp.ones((2, 3)), "down": jnp.ones((3, 1))}, state, params)
    ...     params = optax.apply_updates(params, updates)
    >>> round(float(optax.tree.get(state, "drift")["rescale"]), 3)  # two steps of -0.1: log 0.8
    -0.223
    >>> round(float(optax.tree.get(state, "relevant_share")), 3)
    0.581

    Reference: docs/design.md §2, §3.
    """
    require_every("track", every)
    require_transformation("track", inner)
    group, inner, kept = product(gauges), optax.with_extra_args_support(inner), tuple(layers)

    def figures(params: optax.Params, *given: Any) -> Metrics:
        return layout(params).run(functools.partial(_metrics, group, kept), params, *given)

    def init_fn(params: optax.Params) -> TrackState:
        if is_empty(params):
            return TrackState(inner.init(params), *(jnp.zeros(()),) * 3)  # type: ignore[arg-type]
        start = layout(params).run(group.coordinates, params)
        shapes = jax.eval_shape(lambda p, s: figures(p, s, p, p, 0), params, start)
        metrics = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        return TrackState(inner.init(params), jnp.zeros((), jnp.int32), start, metrics)

    def update_fn(
        updates: optax.Updates, state: TrackState, params: optax.Params | None = None, **extra: Any
    ) -> tuple[optax.Updates, TrackState]:
        require_params("track", params)
        require_gradients("track", updates)
        require_own("track", state, TrackState)

        def update(gradient: optax.Updates) -> tuple[optax.Updates, optax.OptState]:
            with with_own_state("track", inner, state.inner_state, params):
                return inner.update(gradient, state.inner_state, params, **extra)

        def record(steps: optax.Updates) -> Metrics:
            return figures(params, state.start, updates, steps, state.taken)

        steps, inner_state, metrics = recorded(update, record, state.metrics, updates, state.taken, every)
        return steps, TrackState(inner_state, optax.safe_increment(state.taken), state.start, metrics)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def slice_norms(
    params: Any, gradient: Any, update: Any, gauges: Gauges, *, layers: Collection[str] = LAYERS
) -> SliceNorms:
    """Norms of a point, its gradient and a step there, in slice coordinates, by leaf.

    Args:
      params: the point before the step.
      gradient: a cotangent like it.
      update: a tangent like it.
      gauges: a gauge or a sequence of them, meaning their product.
      layers: names of axes that are kept apart.

    Returns:
      The norms. All are the same for every weight set of one function, up to its own rounding.

    Raises:
      ValueError: bindings that do not fit the tree.

    >>> gauge = go.rescale({"up": "_ channel"}, {"down": "channel _"})
    >>> params = {"up": jnp.full((4, 1), 6.0), "down": jnp.ones((1, 1))}
    >>> found = go.measure.slice_norms(params, params, params, gauge).parameter_norm
    >>> {path: round(float(x), 3) for path, x in found.items()}  # up is the anchor, of norm 1 on the slice
    {'down': 12.0, 'up': 1.0}
    """
    on = product(gauges).chart(params)
    return _slice_norms(_entered(on, params, gradient, update), params, gradient, update, layers)


class _Entered(NamedTuple):
    """A step in slice coordinates: the tree's chart, the point with its frame, ĝ and û of bound leaves."""

    on: charts.Chart
    here: charts.Nearest
    gradient: Arrays
    update: Arrays


def _entered(on: charts.Chart, params: Any, gradient: Any, update: Any) -> _Entered:
    here = charts.nearest(on, params)
    dual = charts.pulled(here.out, on.joint.vectors(gradient))
    return _Entered(on, here, dual, charts.pushed(here.back, on.joint.vectors(update)))


def _slice_norms(own: _Entered, params: Any, gradient: Any, update: Any, layers: Collection[str]) -> SliceNorms:
    across = charts.horizontal(own.on, own.here.point, own.here.masks, own.update)
    along = {path: x - across[path] for path, x in own.update.items()}
    free = {path: jnp.asarray(x, real_dtype()) for path, x in leaves_by_path(update).items() if path not in along}
    relevant, lost = _squares(across | free), _squares(along)
    axes = _layer_axes(own.on.joint.blocks, layers)
    return SliceNorms(
        _norms(params, own.here.point, axes),
        _norms(gradient, own.gradient, axes),
        _norms(update, own.update, axes),
        1.0 - lost / jnp.maximum(relevant + lost, jnp.finfo(lost.dtype).tiny),
    )


def _metrics(
    group: Product, layers: tuple[str, ...], params: Any, start: Any, gradient: Any, update: Any, step: Any
) -> Metrics:
    own = _entered(group.chart(params), params, gradient, update)
    values = own.on.joint.values(params)
    turns = small_turns(own.on, own.here.point, own.update)
    drift, turning = Arrays(), Arrays()
    for label, (part, bound), element, then in zip(labels(group), own.on.parts, own.here.element, start, strict=True):
        change = jax.tree.map(jnp.subtract, part.coordinates_of(bound, element, values), then)
        drift |= {labelled(label, key): x for key, x in _drifts(bound, change, layers)}
        turning |= {labelled(label, head.key): _angle(head, turns[head]) for head in bound.rotations}
        turning |= {labelled(label, i.key): _angle(i.left, turns[LinearReading(i).turned]) for i in bound.linear}
    norms = _slice_norms(own, params, gradient, update, layers)
    return Metrics(jnp.asarray(step, jnp.int32), Figures.of(drift), Figures.of(turning), *norms)


def labels(group: Product) -> list[str]:
    """Names of gauges, numbered where one occurs again."""
    names = [part.name for part in group.parts]
    return [name if names.count(name) == 1 else f"{name}{names[:k].count(name)}" for k, name in enumerate(names)]


def labelled(gauge: str, instance: str) -> str:
    """Name of a figure: "gauge/instance", or the gauge alone where it has one instance."""
    return f"{gauge}/{instance}" if instance else gauge


def _drifts(bound: Bound, change: Element, layers: tuple[str, ...]) -> list[tuple[str, jax.Array]]:
    named = {i.key: i.named for i in bound.scales}
    out = []
    for key, x in change.items():
        if key in named:
            apart = [k for k, name in enumerate(named[key]) if name in layers]
            out.append((key, _extreme(x, tuple(k for k in range(x.ndim) if k not in apart))))
        else:
            out += [(f"{key}/{p}" if key else p, _extreme(y, None)) for p, y in leaves_by_path(x).items()]
    return out


def _extreme(x: jax.Array, axes: tuple[int, ...] | None) -> jax.Array:
    """The entry of largest size, with its sign."""
    high, low = jnp.max(x, axes), jnp.min(x, axes)
    return jnp.where(high > -low, high, low)


def _angle(head: HeadInstance, turn: jax.Array) -> jax.Array:
    """Radians of a skew logarithm (*named, d, d), the root of the sum over planes."""
    squares = jnp.sum(jnp.square(turn), (-2, -1)) / 2
    return jnp.sqrt(jnp.sum(squares, -1) if head.named[-1:] == (PLANE,) else squares)


def _layer_axes(blocks: Any, layers: Collection[str]) -> dict[str, int]:
    """Leaf path → the axis that counts layers."""
    found: dict[str, int] = {}
    for block in blocks:
        labels = block.split_labels
        for axis, group in enumerate(block.groups):
            if len(group) == 1 and labels[group[0]] in layers:
                found[block.path] = axis
    return found


def _norms(tree: Any, bound: Mapping[str, jax.Array], axes: Mapping[str, int]) -> Figures:
    def norm(path: str, x: jax.Array) -> jax.Array:
        return jnp.sqrt(jnp.sum(jnp.square(x), tuple(k for k in range(x.ndim) if k != axes.get(path))))

    dtype = real_dtype()
    named = {path: norm(path, jnp.asarray(bound.get(path, x), dtype)) for path, x in leaves_by_path(tree).items()}
    return Figures.of(named)


def _squares(arrays: Arrays) -> jax.Array:
    return sum((jnp.sum(jnp.square(x)) for x in arrays.values()), start=jnp.zeros(()))
