"""Proof by finite moves: a gauge's random element, through the library, at points and on batches of its own.

Here: what the outputs do. Not here: which gauges are asked (`write`).
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gauge_optax.binding import binding_error, leaves_by_path, with_leaves
from gauge_optax.discovery import checks
from gauge_optax.discovery.calls import Call, Held, alternatives
from gauge_optax.discovery.sketch import Leaves
from gauge_optax.gauges.base import BoundGauge
from gauge_optax.gauges.linear import head_linear, rope_linear
from gauge_optax.gauges.product import product
from gauge_optax.gauges.rescale import multiplier_balance, norm_scale, rescale, scale_invariant
from gauge_optax.gauges.rotation import head_rotation
from gauge_optax.gauges.shift import logit_shift
from gauge_optax.gauges.torus import rope_torus

CONSTRUCTORS: Mapping[str, Callable[..., BoundGauge]] = {
    f.__name__: f
    for f in (
        head_linear, head_rotation, logit_shift, multiplier_balance, norm_scale, rescale, rope_linear, rope_torus,
        scale_invariant,
    )
}  # fmt: skip

_NOTICED = 1e-5  # relative change of the outputs by what is no symmetry
_ADDRESS = re.compile("0x[0-9a-f]+")


def constructed(call: Call) -> BoundGauge:
    """The gauge of a call."""
    return CONSTRUCTORS[call.kind](*call.roles.values(), **call.options, sizes=call.sizes or None)


def rebound(call: Call, params: Any, sizes: Mapping[str, int]) -> BoundGauge:
    """The gauge of a call on another tree, with other lengths of the axes that it states."""
    ranges = [axes for own in call.roles.values() for axes in own.values() if ":" in str(axes)]
    if ranges:
        raise binding_error(
            call.kind, f"a range of another instance on '{call.paths[0]}'", str(ranges[0]), "axes without ranges",
            "call discover on this instance, or write the range by hand")
    gauge = constructed(dataclasses.replace(call, sizes={name: sizes.get(name, n) for name, n in call.sizes.items()}))
    gauge.dim(params)
    return gauge


class Prover:
    """A function with the points and batches at which gauges are proved.

    Args:
      fn: (leaves, batch) to a list of outputs.
      params: the tree that gauges bind to.
      batches: at least two.
      points: at least two, other than those of the sketch.
    """

    def __init__(
        self, fn: Callable[..., Any], params: Any, batches: Sequence[Any], points: Sequence[Leaves]
    ) -> None:
        self._fn, self._params, self.points = fn, params, points
        self._batches = list(batches)[:2]
        self._call = jax.jit(fn)
        self._before: list[list[list[np.ndarray]]] = []

    def check_outputs(self, leaves: Leaves) -> None:
        """Raises where outputs are not finite or differ between two calls, at the given leaves and at the points."""
        for point in (leaves, *self.points):
            for batch in self._batches:
                found = self._outputs(point, batch)
                checks.check_finite(found, lambda p=point, b=batch: checks.first_not_finite(self._fn, p, b))  # type: ignore[misc]
        once = self._outputs(leaves, self._batches[0])
        checks.check_repeatable(once, self._outputs(leaves, self._batches[0]))
        if self._traced(leaves) != self._traced(leaves):  # a key or a counter outside fn: two programs
            again = [np.asarray(x) for x in jax.jit(lambda p, b: self._fn(p, b))(leaves, self._batches[0])]
            checks.check_repeatable(once, again)
        self._before = [[self._outputs(point, batch) for batch in self._batches] for point in self.points]

    def _traced(self, leaves: Leaves) -> tuple[str, bytes]:
        """The program as text, and its constants."""
        closed = jax.make_jaxpr(lambda p, b: self._fn(p, b))(leaves, self._batches[0])
        keys = [jnp.issubdtype(jnp.result_type(x), jax.dtypes.prng_key) for x in closed.consts]
        numbers = [jax.random.key_data(x) if key else x for x, key in zip(closed.consts, keys, strict=True)]
        return _ADDRESS.sub("", str(closed)), b"".join(np.asarray(x).tobytes() for x in numbers)

    def _outputs(self, leaves: Leaves, batch: Any) -> list[np.ndarray]:
        return [np.asarray(x) for x in self._call(leaves, batch)]

    def change(self, moved: Sequence[Leaves]) -> float:
        """Largest relative change of an output, the points replaced."""
        worst = 0.0
        for point, before in zip(moved, self._before, strict=True):
            for batch, old in zip(self._batches, before, strict=True):
                for x, y in zip(self._outputs(point, batch), old, strict=True):
                    size = float(np.linalg.norm(y))
                    change = float(np.linalg.norm(x - y)) / (size if size > 0 else 1.0)
                    worst = max(worst, change if np.isfinite(change) else np.inf)
        return worst

    def change_of_entries(self, path: str, entries: np.ndarray, rng: np.random.Generator) -> float:
        """What new values of some entries of a leaf do."""

        def moved(point: Leaves) -> Leaves:
            leaf = point[path]
            size = float(np.sqrt(np.mean(np.square(leaf))))
            return {**point, path: np.where(entries, leaf + size * rng.standard_normal(leaf.shape), leaf)}

        return self.change([moved(point) for point in self.points])

    def changes(self, calls: Sequence[Call], rng: np.random.Generator) -> list[float]:
        """What a random element of each gauge does; infinite where the library refuses the gauge.

        Also infinite where a move of the same leaves and size that is no symmetry is not noticed: that proves nothing.
        """
        gauges = [self._bound(call) for call in calls]
        known = [gauge for gauge in gauges if gauge is not None]
        if not known:
            return [np.inf] * len(calls)

        def act(key: jax.Array, leaves: Mapping[str, Any]) -> list[Mapping[str, Any]]:
            tree = with_leaves(self._params, leaves)
            keys = jax.random.split(key, len(known))
            moved = [
                leaves_by_path(gauge.act(gauge.sample(k, tree), tree)) for gauge, k in zip(known, keys, strict=True)
            ]
            bound = [{b.path for i in gauge.binding(tree).instances for b in i.blocks} for gauge in known]
            return [{p: x for p, x in own.items() if p in paths} for own, paths in zip(moved, bound, strict=True)]

        run = jax.jit(act)
        seeds = rng.integers(2**31, size=len(self.points))
        moved = [run(jax.random.key(int(s)), point) for s, point in zip(seeds, self.points, strict=True)]
        found = iter([self._proof([one[k] for one in moved], rng) for k in range(len(known))])
        return [np.inf if gauge is None else next(found) for gauge in gauges]

    def _proof(self, moved: Sequence[Mapping[str, Any]], rng: np.random.Generator) -> float:
        whole = [{**point, **own} for point, own in zip(self.points, moved, strict=True)]

        def shaken(point: Leaves, own: Mapping[str, Any]) -> Leaves:
            sizes = {p: np.sqrt(np.mean(np.square(np.asarray(x) - point[p]))) for p, x in own.items()}
            return {**point, **{p: point[p] + size * rng.standard_normal(point[p].shape) for p, size in sizes.items()}}

        control = self.change([shaken(point, own) for point, own in zip(self.points, moved, strict=True)])
        return self.change(whole) if control > _NOTICED else np.inf

    def _bound(self, call: Call) -> BoundGauge | None:
        try:
            gauge = constructed(call)
            gauge.dim(self._params)
        except ValueError:
            return None
        return gauge

    def binds_alike(self, call: Call, group: Sequence[Call]) -> bool:
        """Whether a merged call binds the same leaves, as often, as the calls that it stands for."""
        if len(group) == 1:
            return True
        one, others = self._bound(call), [self._bound(other) for other in group]
        if one is None or any(other is None for other in others):
            return False

        def paths(gauge: Any) -> list[tuple[str, ...]]:
            bound = gauge.binding(self._params)
            return [tuple(sorted(block.path for block in i.blocks)) for i in bound.instances]

        return sorted(paths(one)) == sorted(p for other in others for p in paths(other))

    def together(self, held: Sequence[Held]) -> tuple[list[Held], list[str]]:
        """Gauges that the library takes as one product, in order, and why it refuses the others.

        Readings need an order in which no gauge acts on an anchor that is read before it: where the list has none,
        another anchor is tried, and merged layers one by one.
        """
        kept: list[Held] = []
        refused = []
        for one in held:
            found = self._beside(kept, [one]) or self._beside(kept, list(one.parts))
            if found is None:
                refused.append(f"{one}: {self._refusal([*kept, one])}")
            kept += found or []
        return kept, refused

    def _beside(self, kept: Sequence[Held], new: Sequence[Held]) -> list[Held] | None:
        """The new gauges with anchors that fit beside those kept; None where there are none."""
        done: list[Held] = []
        for one in new:
            tried = ([h for c in alternatives(one.call) for h in [one._replace(call=c, gauge=constructed(c))]])
            fits = next((h for h in [one, *tried] if self._refusal([*kept, *done, h]) is None), None)
            if fits is None:
                return None
            done.append(fits)
        return done or None

    def _refusal(self, held: Sequence[Held]) -> str | None:
        try:
            jax.eval_shape(product([h.gauge for h in held]).read, self._params)
        except ValueError as error:
            return str(error).splitlines()[0]
        return None
