"""One gauge's orbit at one point, in the Euclidean metric: what a step does along it.

Here: pairings of a step with the orbit tangents, and the rates of motion they mean. Not here: why a step has them
(`leakage`), what becomes of them in a finite step (`second_order`).
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from gauge_optax.binding import binding_error
from gauge_optax.gauges._head import HeadInstance
from gauge_optax.gauges._scale import ScaleInstance, Values
from gauge_optax.gauges.base import Effect, Element, Gauge, Gauges
from gauge_optax.gauges.bound import Arrays, Bound
from gauge_optax.gauges.product import product
from gauge_optax.linalg import lyapunov, matmul, safe_divide, skew
from gauge_optax.xla import in_turn

SCALES: tuple[Effect, ...] = ("diagonal",)
ROTATIONS: tuple[Effect, ...] = ("orthogonal",)
_REMEDY = {
    SCALES: "pass one go.rescale, go.norm_scale or go.scale_invariant; rotations have `rotation_leakage`",
    ROTATIONS: "pass one go.head_rotation or go.rope_torus; scales have `rescale_leakage`",
    SCALES + ROTATIONS: "pass one scale or rotation gauge at a time",
}


class Orbit(NamedTuple):
    """A gauge at a point.

    Attributes:
      gauge: the gauge.
      own: its instances.
      point: bound leaves.
      identity: the gauge's element that moves nothing.
    """

    gauge: Gauge
    own: Bound
    point: Arrays
    identity: Element

    def pairing(self, step: Values) -> Element:
        """⟨orbit tangent, step⟩ for every generator, read off the gauge's action and nothing else.

        Args:
          step: a tangent per bound leaf.

        Returns:
          L in the structure of an element, ⟨a's tangent, step⟩ = Σ a·L over the entries of a generator a; skew for
          full rotations.
        """

        def moved(element: Element) -> Arrays:
            values = self.gauge.move(self.own, element, {p: self.point[p] for p in self.own.offset})
            return {p: values[p] for p in self.own.offset}

        found = jax.vjp(moved, self.identity)[1]({p: step[p] for p in self.own.offset})[0]
        full = {h.key for h in self.own.rotations if not is_torus(h)}
        return {key: skew(x) if key in full else x for key, x in found.items()}

    def rates(self, step: Values) -> Element:
        """The generator of a step's vertical part: how fast log α, the head's basis, the angle move.

        Args:
          step: a tangent per bound leaf.

        Returns:
          The structure of an element; skew for full rotations.
        """
        heads = self.own.rotations
        grams = [h.gram(self.point, self.point) for h in heads]
        turns = in_turn(lyapunov, grams, [skew(h.gram(self.point, step)) for h in heads])
        found = {h.key: x[..., 0, 1] if is_torus(h) else x for h, x in zip(heads, turns, strict=True)}
        if self.own.scales:
            pairing = self.pairing(step)
            found |= {i.key: safe_divide(pairing[i.key], self._square(i)) for i in self.own.scales}
        return found

    def _square(self, instance: ScaleInstance) -> jax.Array:
        """‖orbit tangent‖² of every channel."""
        up, down = instance.sides({p: jnp.square(self.point[p]) for p in instance.paths})
        return up + instance.degree**2 * down

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
        gram = head.gram(self.point, self.point)
        return jnp.sqrt(jnp.maximum(jnp.sum(matmul(gram, generator) * generator, (-2, -1)), 0.0))


def orbit_at(gauge: Gauge, params: Any) -> Orbit:
    """The orbit of a gauge at a point."""
    own = gauge.bound(params)
    return Orbit(gauge, own, own.values(params), gauge.identity(params))


def one_gauge(caller: str, gauge: Gauges, effects: tuple[Effect, ...]) -> Gauge:
    """The one gauge with these effects that a measure asks for; raises ValueError for any other, or for several."""
    parts = product(gauge).parts
    if len(parts) != 1 or parts[0].effect not in effects:
        raise binding_error(
            caller,
            "another kind of gauge",
            ", ".join(part.name for part in parts) or "no gauges",
            "one gauge of the kind that this measure reads",
            _REMEDY[effects],
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
