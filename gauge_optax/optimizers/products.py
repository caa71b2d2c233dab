"""How large the two sides of a scale are together: what fixing a gauge leaves open, and weight decay used to hold.

The gauge of `rescale` and `multiplier_balance` trades a factor between two sides; the product of their root mean
squares is not its business. Here that product is held, capped or decayed, by a factor on both sides alike: their ratio
stays with the gauge. That changes the function, on purpose.

Here: by which factor. Not here: when, and how an optimizer's state goes along (`fix`).
Reference: GaugeFix-LRM §4.4 and §5, whose future direction this is.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from gauge_optax.binding import Axes, binding_error
from gauge_optax.gauges._scale import log_sizes
from gauge_optax.gauges.base import Element, Gauge
from gauge_optax.gauges.rescale import keeps_product, scale_invariant

Number = float | jax.Array
KINDS = ("free", "decay", "cap", "fix")


class HeldProducts(NamedTuple):
    """What "fix" holds products at.

    Attributes:
      logs: of s_up·s_down at `init`, per gauge under the paths of its leaves, joined by " + ".
    """

    logs: Any


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
        "cap": kind == "cap" and not _number(cap),
        "decay": kind == "decay" and not (_number(decay) and _number(1.0 - decay)),  # type: ignore[operator]
    }
    if any(wrong.values()):
        raise binding_error(
            name, f"magnitude='{kind}' without a number", f"cap={cap!r}, decay={decay!r}",
            "cap, one positive bound of s_up·s_down; decay, the share between 0 and 1 that it loses in a step",
            "give cap= for 'cap', decay= for 'decay'",
        )  # fmt: skip
    if (kind != "cap" and cap is not None) or (kind != "decay" and decay is not None):
        raise binding_error(
            name, f"a number that magnitude='{kind}' does not take", f"cap={cap!r}, decay={decay!r}",
            "cap for 'cap' alone, decay for 'decay' alone", "leave it out",
        )  # fmt: skip
    for gauge in gauges if kind != "free" else ():
        if not keeps_product(gauge):
            raise binding_error(
                name, f"magnitude='{kind}' of a gauge without two sides of one degree", gauge.name,
                "rescale of degree 1, norm_scale or multiplier_balance, whose balance leaves the product alone",
                "give gauge_fix these alone, and the rest a gauge_fix of its own",
            )  # fmt: skip


def _number(x: Any) -> bool:
    """Whether it is one positive number, as far as can be told: under `inject_hyperparams` it is traced."""
    if isinstance(x, jax.core.Tracer):
        return True
    real = isinstance(x, int | float | jax.Array | np.ndarray | np.floating) and not jnp.ndim(x)
    return real and bool(0 < x < math.inf)


def check_apart(name: str, gauges: Sequence[Gauge], params: Any) -> None:
    """Raises ValueError for gauges that share a leaf: a factor for the one would change the product of the other."""
    found: dict[str, str] = {}
    for gauge in gauges:
        for path in gauge.bound(params).offset:
            if path in found:
                raise binding_error(
                    name, f"sizes of two gauges with '{path}'", f"{found[path]} and {gauge.name}", "one gauge per leaf",
                    "give gauge_fix the gauge whose product is meant alone, and the rest a gauge_fix of its own",
                )  # fmt: skip
            found[path] = gauge.name


def both_sides(gauge: Any) -> Gauge:
    """The gauge that scales both sides of another alike, with elements of the same keys and shapes."""
    blocks: dict[str, Axes] = {}
    for spec in gauge.specs:
        known = blocks.get(spec.pattern, ())
        blocks[spec.pattern] = (*((known,) if isinstance(known, str) else known), spec.axes)
    single = {pattern: axes[0] if len(axes) == 1 else axes for pattern, axes in blocks.items()}
    return scale_invariant(single, sizes=dict(gauge.sizes))


def held_products(gauges: Sequence[Gauge], params: Any) -> HeldProducts:
    """What they are now."""
    return HeldProducts({" + ".join(g.bound(params).offset): log_products(g, params) for g in gauges})


def in_logits(largest: Element, before: Element, after: Element) -> tuple[Element, Element]:
    """The same two in units of the largest logits seen before the step: these grow as the product does."""

    def seen(x: jax.Array, was: jax.Array) -> jax.Array:
        return jnp.where(x > 0, jnp.log(jnp.where(x > 0, x, 1.0)), -jnp.inf).astype(was.dtype)

    logs = jax.tree.map(seen, largest, before)
    return logs, jax.tree.map(lambda log, was, now: log + (now - was), logs, before, after)


def log_products(gauge: Gauge, params: Any) -> Element:
    """log s_up + log s_down per channel, s root mean squares; minus infinity, and left alone, where a side is zero."""
    bound = gauge.bound(params)
    return {key: up + down for key, (up, down) in log_sizes(bound.scales, bound.values(params)).items()}
