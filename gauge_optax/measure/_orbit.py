"""One gauge's orbit at one point, in one metric: what a step does along it.

Here: pairings of a step with the orbit tangents, and the rates of motion they mean. Not here: why a step has them
(`leakage`), what becomes of them in a finite step (`second_order`).
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from gauge_optax.binding import binding_error
from gauge_optax.gauges import _split
from gauge_optax.gauges._head import HeadInstance
from gauge_optax.gauges._scale import Values
from gauge_optax.gauges._split import Arrays, Bound, Point
from gauge_optax.gauges.base import BoundGauge, Element, Gauges
from gauge_optax.gauges.product import product
from gauge_optax.gauges.rescale import Rescale
from gauge_optax.gauges.rotation import TurningGauge
from gauge_optax.linalg import matmul, real_dtype, skew

SCALES, ROTATIONS = (Rescale,), (TurningGauge,)
_REMEDY = {
    SCALES: "pass one go.rescale, go.norm_scale or go.scale_invariant; rotations have `rotation_leakage`",
    ROTATIONS: "pass one go.head_rotation or go.rope_torus; scales have `rescale_leakage`",
    SCALES + ROTATIONS: "pass one scale or rotation gauge at a time; `frame` takes the whole list",
}


class Orbit(NamedTuple):
    """A gauge at a point, in the metric of a frame.

    Attributes:
      gauge: the gauge.
      own: its instances.
      metric: the instances of every gauge of the frame; `own` in the Euclidean metric.
      point: θ̂; in the Euclidean metric its frame is f = 0.
      identity: the gauge's element that moves nothing.
    """

    gauge: BoundGauge
    own: Bound
    metric: Bound
    point: Point
    identity: Element

    def step_in(self, step: Any) -> Arrays:
        """A tangent in the frame."""
        return self.point.tangent_in(self.metric.vectors(step))

    def pairing(self, framed: Values) -> Element:
        """⟨orbit tangent, step⟩ for every generator, read off the gauge's action and nothing else.

        Args:
          framed: in-frame step per bound leaf.

        Returns:
          L in the structure of an element, ⟨a's tangent, step⟩ = Σ a·L over the entries of a generator a; skew for
          full rotations.
        """

        def moved(element: Element) -> Arrays:
            values = self.gauge.move(self.own, element, {p: self.point.hat[p] for p in self.own.offset})
            return {p: values[p] for p in self.own.offset}

        found = jax.vjp(moved, self.identity)[1]({p: framed[p] for p in self.own.offset})[0]
        full = {h.key for h in self.own.rotations if not is_torus(h)}
        return {key: skew(x) if key in full else x for key, x in found.items()}

    def rates(self, framed: Values) -> Element:
        """The generator of a step's vertical part: how fast log α, the head's basis, the angle move.

        Args:
          framed: in-frame step per leaf of the metric.

        Returns:
          The structure of an element; skew for full rotations.
        """
        found = _split.vertical_coordinates(self.metric, self.point, framed)
        scales = dict(zip(self.metric.scales, found.scales, strict=True))
        heads = dict(zip(self.metric.rotations, found.heads, strict=True))
        turns = {h.key: heads[h][..., 0, 1] if is_torus(h) else heads[h] for h in self.own.rotations}
        return {i.key: scales[i] for i in self.own.scales} | turns

    def sizes(self, rates: Element) -> dict[str, jax.Array]:
        """How long the vertical vectors with these rates are, per channel, head or plane, up to a factor of the point.

        Args:
          rates: the structure of an element.

        Returns:
          Instance → sizes, the shape of the named axes; planes count one by one.
        """
        full = {h.key: h for h in self.own.rotations if not is_torus(h)}
        return {key: self._turn_size(full[key], x) if key in full else jnp.abs(x) for key, x in rates.items()}

    def _turn_size(self, head: HeadInstance, generator: jax.Array) -> jax.Array:
        gram = head.gram(self.point.hat, self.point.hat)
        return jnp.sqrt(jnp.maximum(jnp.sum(matmul(gram, generator) * generator, (-2, -1)), 0.0))


def orbit_at(gauge: BoundGauge, params: Any, frame: Gauges | None) -> Orbit:
    """The orbit of a gauge at a point.

    Args:
      gauge: the gauge.
      params: the point.
      frame: the gauges whose joint frame is the metric, `gauge` among them; None for the Euclidean metric.

    Returns:
      The orbit.
    """
    own, identity = gauge.bound(params), gauge.identity(params)
    if frame is None:
        still = tuple(jnp.zeros(i.shape, real_dtype()) for i in own.scales)
        return Orbit(gauge, own, own, _split.at(own, own.values(params), still), identity)
    group = product(frame)
    metric = group.bound(params)
    if not {*own.scales, *own.rotations} <= {*metric.scales, *metric.rotations}:
        raise binding_error(
            gauge.name,
            f"the frame does not hold the gauge of '{next(iter(own.offset))}'",
            ", ".join(part.name for part in group.parts) or "no gauges",
            f"a list of gauges with this {gauge.name} in it",
            "pass the optimizer's own list as `frame`, and the gauge out of that list",
        )
    return Orbit(gauge, own, metric, _split.at(metric, metric.values(params)), identity)


def one_gauge(caller: str, gauge: Gauges, kinds: tuple[type[BoundGauge], ...]) -> BoundGauge:
    """The one gauge of these kinds that a measure asks for; raises ValueError for any other, or for several."""
    parts = product(gauge).parts
    if len(parts) != 1 or not isinstance(parts[0], kinds):
        raise binding_error(
            caller,
            "another kind of gauge",
            ", ".join(part.name for part in parts) or "no gauges",
            "one gauge of the kind that this measure reads",
            _REMEDY[kinds],
        )
    return parts[0]


def is_torus(head: HeadInstance) -> bool:
    """Whether the instance is one of planes, whose elements are angles."""
    return head.blocks[0].pairing is not None


def turning_pairing(head: HeadInstance, gram: jax.Array) -> jax.Array:
    """The pairing that θ̂ᵀX makes: its skew part, or the number that multiplies an angle."""
    return gram[..., 0, 1] - gram[..., 1, 0] if is_torus(head) else skew(gram)


def turning_size(head: HeadInstance, pairing: jax.Array) -> jax.Array:
    """Frobenius norm of a head's pairing; of a plane's, the absolute value."""
    return jnp.abs(pairing) if is_torus(head) else jnp.linalg.norm(pairing, axis=(-2, -1))
