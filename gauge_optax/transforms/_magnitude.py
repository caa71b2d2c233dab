"""How large the two sides of a scale are together: what fixing a gauge leaves open, and weight decay used to hold.

The gauge of `rescale` and `multiplier_balance` trades a factor between two sides; the product of their root mean
squares is not its business. Here that product is held, capped or decayed, by a factor on both sides alike: their ratio
stays with the gauge. That changes the function, on purpose.

Here: by which factor. Not here: when, and how an optimizer's state goes along (`fix`).
Reference: GaugeFix-LRM §4.4 and §5, whose future direction this is.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from gauge_optax.binding import Axes, binding_error
from gauge_optax.gauges._scale import log_sizes
from gauge_optax.gauges.base import Element, Gauge
from gauge_optax.gauges.rescale import scale_invariant, two_sided

Number = float | jax.Array
KINDS = ("free", "decay", "cap", "fix")


class Magnitude(NamedTuple):
    """What becomes of s_up·s_down, per channel.

    Attributes:
      kind: "free"; "decay", shrunk at each step; "cap", kept below a bound; "fix", kept as at `init`.
      cap: the bound.
      decay: by which share the product shrinks in a step.
    """

    kind: str = "free"
    cap: Number | None = None
    decay: Number | None = None

    def factors(self, before: Element, after: Element, start: Element) -> Element:
        """log of the factor on either side, from log-products before the step, after it, and at `init`."""

        def factor(*logs: jax.Array) -> jax.Array:
            whole = functools.reduce(jnp.logical_and, map(jnp.isfinite, logs))
            was, now, at_first = (jnp.where(whole, x, 0.0) for x in logs)
            return jnp.where(whole, 0.5 * (self._wanted(was, now, at_first) - now), 0.0)

        return jax.tree.map(factor, before, after, start)

    def _wanted(self, before: jax.Array, after: jax.Array, start: jax.Array) -> jax.Array:
        if self.kind == "fix":
            return start
        if self.kind == "decay":
            return after + jnp.log1p(-jnp.asarray(self.decay, after.dtype))
        # s = cap·σ(z): far below the bound z moves as log s does, and no step leads past it.
        bound = jnp.log(jnp.asarray(self.cap, after.dtype))
        below = jnp.minimum(before - bound, -1e-3)
        place = below - jnp.log(-jnp.expm1(below)) + (after - before)
        return bound - jnp.logaddexp(0.0, -place)


def checked(name: str, gauges: Sequence[Gauge], magnitude: Magnitude) -> None:
    """Raises ValueError for numbers that are missing or out of range, and for gauges without two sides."""
    kind, cap, decay = magnitude
    wrong = {
        "cap": kind == "cap" and (cap is None or not _positive(cap)),
        "decay": kind == "decay" and (decay is None or not _positive(decay) or not _positive(1.0 - decay)),
    }
    if any(wrong.values()):
        raise binding_error(
            name, f"magnitude='{kind}' without a number", f"cap={cap!r}, decay={decay!r}",
            "cap, a positive bound of s_up·s_down; decay, the share between 0 and 1 that it loses in a step",
            "give cap= for 'cap', decay= for 'decay'",
        )  # fmt: skip
    if (kind != "cap" and cap is not None) or (kind != "decay" and decay is not None):
        raise binding_error(
            name, f"a number that magnitude='{kind}' does not take", f"cap={cap!r}, decay={decay!r}",
            "cap for 'cap' alone, decay for 'decay' alone", "leave it out",
        )  # fmt: skip
    for gauge in gauges if kind != "free" else ():
        if not two_sided(gauge):
            raise binding_error(
                name, f"magnitude='{kind}' of a gauge without two sides", gauge.name,
                "rescale, norm_scale or multiplier_balance",
                "give gauge_fix these alone, and the rest a gauge_fix of its own",
            )  # fmt: skip


def _positive(x: Any) -> bool:
    return isinstance(x, jax.core.Tracer) or float(x) > 0.0


def both_sides(gauge: Any) -> Gauge:
    """The gauge that scales both sides of another alike, with elements of the same keys and shapes."""
    blocks: dict[str, Axes] = {}
    for spec in gauge.specs:
        known = blocks.get(spec.pattern, ())
        blocks[spec.pattern] = (*((known,) if isinstance(known, str) else known), spec.axes)
    single = {pattern: axes[0] if len(axes) == 1 else axes for pattern, axes in blocks.items()}
    return scale_invariant(single, sizes=dict(gauge.sizes))


def log_products(gauge: Gauge, params: Any) -> Element:
    """log s_up + log s_down per channel, s root mean squares; minus infinity, and left alone, where a side is zero."""
    bound = gauge.bound(params)
    return {key: up + down for key, (up, down) in log_sizes(bound.scales, bound.values(params)).items()}
