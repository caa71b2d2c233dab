"""Proof by finite moves: a random element of a gauge, applied by the library, must not change the outputs."""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from gauge_optax.binding import leaves_by_path, with_leaves
from gauge_optax.binding.axes import parse_axes
from gauge_optax.discovery import checks
from gauge_optax.discovery.calls import REST, TRAINING, Call, bound_copies
from gauge_optax.discovery.draws import drawn_by_numpy
from gauge_optax.discovery.groups import STILL
from gauge_optax.discovery.sketch import Function, Gradients, Leaves, finite_points, masked, root_mean_square
from gauge_optax.gauges.disconnected import disconnected
from gauge_optax.gauges.gauge import Gauge, product
from gauge_optax.xla import quick_options

_NOTICED = 1e-5  # a move proves a gauge only if noise as large as the move changes the outputs by more than this share
_CLIPPED = 1e-3  # in the tests with `_FAR`, a relative change above this is surely no roundoff
# A clip, as in ReLU6, acts only on large numbers. A gauge is therefore also tested at leaves that are so many times as
# large, and with moves that multiply and divide by so much.
_FAR = 64.0
# An eps of 1e-12, as in BERT's norms, changes the outputs by about as much as roundoff does. At leaves that are
# multiplied by `_NEAR`, an eps changes them by more, and roundoff by no more than before. Gauges whose moves change the
# outputs by more than `_DOUBTFUL` are tested there too. They fail if the change there is above `_EPS`.
_NEAR, _DOUBTFUL, _EPS = 2.0**-12, 1e-14, 100 * STILL
# Relative noise on large leaves, as small as roundoff. If it changes the outputs, as behind a sine of large numbers,
# then the test with large leaves says nothing.
_ROUNDED = 1e-13
# Kinds whose action depends only on the leaves that they move. The tests with `_FAR` and `_NEAR` multiply these leaves
# alone, and are made for these kinds alone.
_ALONE = frozenset(("norm_scale", "scale_invariant", "head_rotation", "head_linear", "rope_torus", "rope_linear",
                    "rescale", "logit_shift", "key_bias", "embedding_shift", "multiplier_balance", "residual_scale",
                    "norm_write_shift", "residual_rotation"))
# Kinds whose elements are added to leaves.
_ADDING = frozenset((*REST, "logit_shift")) - {"residual_rotation"}
# Kinds whose elements are logarithms of factors.
_FACTORS = frozenset(("norm_scale", "scale_invariant", "rescale", "multiplier_balance", "residual_scale"))
_SHORT = 1e-5  # `along_orbits` makes this fraction of a move, as a small step in its direction
# A gauge has one copy per layer, for instance. If there are more copies than this, one program of all moves would
# compile for longer than the moves run operation by operation. In a large instance, where gauges are proved one by one
# and most operations have run before, both take equally long at 24 layers.
_MANY, _MANY_LARGE = 60, 16
_ALONG = 1e-3  # a step is along an orbit if it moves the slice point by less than this, relative to its own length
_SLIGHT = 1e-2  # the scale of a move that shows its tangent, together with its inverse


class Held(NamedTuple):
    """A gauge with its evidence.

    Attributes:
      gauge: the gauge.
      call: its constructor with arguments.
      exponents: leaf path → the exponent with which an element acts on it. For groups of matrices the sign tells
        leaves that the matrix multiplies from those that its inverse multiplies.
      residual: by how much, according to the gradients, its motion changes the outputs, relative to the change if its
        leaves moved each on its own; roundoff for a symmetry.
      change: largest relative change of the outputs under a random finite move, over points and batches.
      parts: a `Held` for every layer, if the gauge merges layers; else ().

    >>> call = Call("logit_shift", {"blocks": {"head": "_ vocab"}})
    >>> print(Held(call.gauge(), call, {"head": 1.0}, 0.0, 1e-15))
    logit_shift: head  (moves the outputs by 1.0e-15)
    """

    gauge: Gauge
    call: Call
    exponents: Mapping[str, float]
    residual: float
    change: float
    parts: tuple[Held, ...] = ()

    def __str__(self) -> str:
        paths = ", ".join(dict.fromkeys(self.call.paths))
        return f"{self.call.kind}: {paths}  (moves the outputs by {self.change:.1e})"


class Prover:
    """A function with the points and batches at which gauges are proved.

    Args:
      fn: (leaves, batch) to a list of outputs.
      params: the tree that gauges bind to.
      batches: at least two.
      large: True if clips and norms' eps, which the small instance has shown, are not looked for again.

    >>> fn = lambda p, x: [jax.nn.relu(x @ p["up"]) @ p["down"]]
    >>> tree = {"up": np.ones((2, 3)), "down": np.ones((3, 2))}
    >>> rng, calls = np.random.default_rng(0), [Call("rescale", {"up": {"up": "_ c"}, "down": {"down": "c _"}})]
    >>> with jax.enable_x64(True):
    ...     prover = Prover(fn, tree, [rng.normal(size=(4, 2)) for _ in range(2)])
    ...     prover.place_at([tree, tree])
    ...     print(prover.changes(calls, rng)[0] < 1e-12)
    True
    """

    def __init__(self, fn: Function, params: Any, batches: Sequence[Any], large: bool = False) -> None:
        self._large = large
        self._own: Leaves | None = None
        self._fn, self._params, self._batches = fn, params, list(batches)[:2]
        self._call = jax.jit(fn, compiler_options=quick_options())
        self.points: list[Leaves] = []
        self.clipped: list[tuple[Call, str]] = []
        self._before: list[list[list[np.ndarray]]] = []

    def _outputs(self, leaves: Leaves, batch: Any) -> list[np.ndarray]:
        return [np.asarray(x) for x in self._call(leaves, batch)]

    def _finite_outputs(self, leaves: Leaves) -> list[list[np.ndarray]]:
        """The outputs of every batch; raises where some are not finite."""
        outputs = [self._outputs(leaves, batch) for batch in self._batches]
        for out, batch in zip(outputs, self._batches, strict=True):
            checks.check_finite(out, self._fn, leaves, batch)
        return outputs

    def check_outputs(self, leaves: Leaves) -> None:
        """Raises where the outputs of the given leaves are not finite or differ between two calls."""
        first = self._finite_outputs(leaves)[0]
        # A second trace reads anew whatever fn takes from outside its arguments, such as a key or a counter.
        again = jax.jit(lambda p, b: inspect.unwrap(self._fn)(p, b), compiler_options=quick_options())
        for call in (self._call, again):
            checks.check_repeatable(first, [np.asarray(x) for x in call(leaves, self._batches[0])])

    def place_at(self, points: Iterable[Leaves], count: int = 2, own: Leaves | None = None) -> None:
        """Sets the attribute `points`, where gauges are proved, to the first `count` points with finite outputs.

        Raises if there are fewer.

        Args:
          points: candidates, none of which is a point at which gradients are taken.
          count: how many points to keep.
          own: the user's weights, which become the last point, because a gauge has to hold there too.
        """
        self.points = []  # large ones are freed before others are drawn
        self.points = finite_points(self._call, self._batches, points, count)
        self._own = own
        self.points += [] if own is None else [own]
        self._before = [self._finite_outputs(point) for point in self.points]

    def change(self, moved: Sequence[Leaves]) -> float:
        """Largest relative change of an output array over points and batches, if `moved` replaces the points."""
        worst = 0.0
        for start, point, before in zip(self.points, moved, self._before, strict=True):
            # At the user's weights a move may divide by a zero, such as a norm's scale.
            if start is self._own and not all(np.isfinite(x).all() for p, x in point.items() if x is not start[p]):
                continue
            for batch, outputs in zip(self._batches, before, strict=True):
                pairs = zip(self._outputs(point, batch), outputs, strict=True)
                worst = max([worst, *(_relative_change(x, y) for x, y in pairs)])
        return worst

    def change_of_entries(self, path: str, entries: np.ndarray, rng: np.random.Generator, turn: bool) -> float:
        """The change of the outputs (`change`) that new values make where the mask `entries` of a leaf is true.

        The new values are the old ones plus noise and, with `turn`, also the old ones with the other sign, because some
        functions read only the signs of a leaf.
        """
        shaken, turned = list[Leaves](), list[Leaves]()
        for point in self.points:
            leaf = point[path]
            noise = root_mean_square(np.asarray(leaf)) * rng.standard_normal(leaf.shape)
            shaken.append({**point, path: np.where(entries, leaf + noise, leaf)})
            turned.append({**point, path: np.where(entries, -leaf, leaf)})
        return max(self.change(shaken), self.change(turned) if turn else 0.0)

    def untrue(self, gradients: Gradients, count: int, rng: np.random.Generator) -> list[str]:
        """The leaves whose gradients are not derivatives at two of the points: `Gradients.untrue`."""
        return gradients.untrue(self._call, self.points[:2], count, rng)

    def _change_at(self, times: float, moved: Mapping[str, Any], rng: np.random.Generator) -> float:
        """The change of the outputs if the leaves in `moved`, `times` as large as at the first point, get these values.

        It is 0 for outputs that are not finite, and for outputs that depend on the last digits of these leaves.
        """
        worst = 0.0
        if times == 1.0:  # the outputs at the point itself are known, and do not depend on last digits
            point = {**self.points[0], **moved}
            for batch, before in zip(self._batches, self._before[0], strict=True):
                changes = map(_relative_change, self._outputs(point, batch), before)
                worst = max([worst, *(x for x in changes if np.isfinite(x))])
            return worst
        start = {path: times * self.points[0][path] for path in moved}
        rounded = {path: x * (1.0 + _ROUNDED * rng.standard_normal(x.shape)) for path, x in start.items()}
        for batch in self._batches:
            ends = [self._outputs({**self.points[0], **some}, batch) for some in (start, rounded, moved)]
            for y, *others in zip(*ends, strict=True):
                noise, change = (_relative_change(x, y) for x in others)
                worst = max(worst, change if noise < _CLIPPED * _CLIPPED and np.isfinite(change) else 0.0)
        return worst

    def changes(self, calls: Sequence[Call], rng: np.random.Generator) -> list[float]:
        """The change of the outputs that a random element of each gauge makes; infinite if the library refuses a gauge.

        It is also infinite if noise of the same size on the same leaves does not change the outputs, because then an
        unchanged output proves nothing. A `key_bias` is exempt, because it says that no output depends on its leaves.
        """
        gauges = [self._bound(call) for call in calls]
        accepted = [gauge for gauge in gauges if gauge is not None]
        bound = [call for call, gauge in zip(calls, gauges, strict=True) if gauge is not None]
        unread = [call.kind == "key_bias" for call in bound]

        def act(key: jax.Array, leaves: Mapping[str, Any], far: float) -> list[Mapping[str, Any]]:
            tree, out = with_leaves(self._params, leaves), list[Mapping[str, Any]]()
            for gauge, k in zip(accepted, jax.random.split(key, len(accepted)), strict=True):
                e = gauge.sample(k, tree)
                if gauge.name in _FACTORS:
                    e = jax.tree.map(lambda x: jnp.where(far == 0.0, x, jnp.copysign(math.log(_FAR), x) * far), e)
                before, moved = leaves_by_path(tree), leaves_by_path(gauge.act(disconnected(gauge, e), tree))
                out.append({path: moved[path] for path in leaves if moved[path] is not before[path]})
            return out

        def acted(seed: int, leaves: Mapping[str, Any], far: float) -> list[Mapping[str, Any]]:
            return act(jax.random.key(seed), leaves, far)

        copies = sum(len(of_one) for gauge in accepted for of_one in gauge._bound(self._params).copies)
        if accepted and copies <= (_MANY_LARGE if self._large else _MANY):
            acted = drawn_by_numpy(act, self.points[0], 0.0)

        def proofs() -> Iterator[float]:
            seeds = [int(x) for x in rng.integers(2**31, size=len(self.points))]
            runs = [acted(s, point, 0.0) for s, point in zip(seeds, self.points, strict=True)]

            @functools.cache
            def moved_at(times: float, far: float = 0.0) -> list[Mapping[str, Any]]:
                return acted(seeds[0], {path: times * x for path, x in self.points[0].items()}, far)

            for n, (free, call, results) in enumerate(zip(unread, bound, zip(*runs, strict=True), strict=True)):
                moved, shaken = [dict(point) for point in self.points], [dict(point) for point in self.points]
                for k, (point, result) in enumerate(zip(self.points, results, strict=True)):
                    moved[k] |= result
                    for path, x in result.items():
                        size = np.sqrt(np.mean(np.square(np.asarray(x) - point[path])))
                        shaken[k][path] = jax.device_put(point[path] + size * rng.standard_normal(point[path].shape))
                change = self.change(moved) if free or self.change(shaken) > _NOTICED else np.inf
                alone = call.kind in _ALONE and not self._large
                far = [(_FAR, 0.0, f"where these leaves are {_FAR:.0f} times as large")] if alone else []
                if alone and call.kind in _FACTORS and change <= STILL:  # a norm's eps acts if a factor is small
                    far += [(1.0, sign, f"under factors of {_FAR:.0f}") for sign in (1.0, -1.0)]
                for times, sign, where in far:
                    there = self._change_at(times, moved_at(times, sign)[n], rng) if change <= _CLIPPED else 0.0
                    if there > _CLIPPED:
                        self.clipped.append((call, where))
                        change = there
                if alone and _DOUBTFUL < change <= STILL and self._change_at(_NEAR, moved_at(_NEAR)[n], rng) > _EPS:
                    change = np.nextafter(STILL, 1.0)
                yield change

        results = proofs()
        return [np.inf if gauge is None else next(results) for gauge in gauges]

    def along_orbits(self, held: Sequence[Held]) -> Callable[[Leaves], bool]:
        """A function of a point: whether the step to it from the first of `points` starts along the gauges' orbits.

        All points of an orbit have one slice point. A small step along an orbit therefore moves the slice point by
        about the square of the step, and any other step by about the step itself. Gauges that add to leaves are tried
        first: most steps are along their orbits, and their slice points compile in 0.7 s, those of all in 7 s (a GPT of
        two layers, one CPU core).
        """
        added = [h for h in held if h.call.kind in _ADDING]
        tests = [self._along([h.gauge for h in some]) for some in (added, held) if some]
        return lambda moved: any(test(moved) for test in tests)

    def _along(self, gauges: Sequence[Gauge]) -> Callable[[Leaves], bool]:
        start, whole = self.points[0], product(gauges)._bound(self._params).slice

        @functools.partial(jax.jit, compiler_options=quick_options())
        def slice_point(leaves: Leaves) -> Mapping[str, jax.Array]:
            x = whole.values(with_leaves(self._params, leaves))
            still = {path: jnp.asarray(leaf) for path, leaf in leaves.items()}  # no gauge moves leaves that x lacks
            return {**still, **whole.enter(whole.read(x).elements, x).point}

        def distance(one: Mapping[str, Any], other: Mapping[str, Any]) -> float:
            return math.sqrt(sum(np.square(np.asarray(one[path]) - np.asarray(other[path])).sum() for path in start))

        before = functools.cache(lambda: slice_point(start))

        def along(moved: Leaves) -> bool:
            near = {path: x + _SHORT * (moved[path] - x) for path, x in start.items()}
            return distance(slice_point(near), before()) < _ALONG * distance(near, start)

        return along

    def misfit(self, call: Call) -> str | None:
        """Why the gauge of a call does not fit the tree; None where it does."""
        try:
            call.gauge().dim(self._params)
        except ValueError as error:
            return str(error).splitlines()[0]
        return None

    def connected(self, call: Call) -> Call | None:
        """`Call.connected` of a call; None if the call does not fit the tree."""
        return None if self.misfit(call) else call.connected(self._params)

    def _bound(self, call: Call) -> Gauge | None:
        """The gauge of a call; None where it does not fit the tree."""
        return None if self.misfit(call) else call.gauge()

    def same_leaves(self, merged: Call, group: Sequence[Call]) -> bool:
        """Whether a merged call binds the same leaves, and as often, as the calls that it replaces."""

        def paths(calls: Sequence[Call]) -> list[list[str]]:
            gauges = [self._bound(call) for call in calls]
            copies = [copy for gauge in gauges if gauge is not None for copy in bound_copies(gauge, self._params)]
            return sorted(sorted(block.path for block in blocks) for _, _, blocks in copies)

        return paths([merged]) == paths(group)

    def together(self, held: Sequence[Held]) -> tuple[list[Held], list[str]]:
        """The gauges that the library accepts as one product, and a text on each gauge that it refuses.

        If the library refuses the product of all, one gauge gets another anchor, or else is dropped. If neither helps
        for any gauge, they are added one by one. A refused gauge has no text if the accepted ones make its moves.
        """
        kept, refused = self._accepted(held)
        along = self.along_orbits(kept) if refused else None
        # If the accepted gauges already make the moves of a refused one, nothing is missing. Some moves are found
        # twice, such as those of biases whose channels a norm divides into groups.
        return kept, [f"{one}: {reason}" for one, reason in refused if not (along and along(self._slightly_moved(one)))]

    def _slightly_moved(self, one: Held) -> Leaves:
        """The first of `points` after a small random step along a gauge's orbit.

        The step is half the difference of a move and its inverse. A move alone leaves the tangent by its square, which
        looks large to `along_orbits` if an anchor, such as a number that is stored less one, is nearly zero.
        """
        tree = with_leaves(self._params, self.points[0])
        element = one.gauge.sample(jax.random.key(0), tree, _SLIGHT)
        there, back = (leaves_by_path(one.gauge.act(x, tree)) for x in (element, one.gauge.inverse(element)))
        return {path: x + (there[path] - back[path]) / 2 for path, x in self.points[0].items()}

    def _accepted(self, held: Sequence[Held]) -> tuple[list[Held], list[tuple[Held, str | None]]]:
        """The gauges that the library accepts as one product, and the others with the reasons why it refuses them."""
        reason = self._refusal(held)
        if reason is None:
            return list(held), []
        dropped: tuple[list[Held], list[tuple[Held, str | None]]] | None = None
        dims = [one.gauge.dim(self._params) if one.call.kind in TRAINING else 0 for one in held]
        # Mostly a single gauge is the reason, and one of several may be dropped. The order of preference is: first a
        # gauge of one matrix without heads (behind a learned query, it and the matrices of heads move the same kernel),
        # then the last gauge of those that optimizers do not take, then the gauge of the smallest dimension.
        for k in sorted(range(len(held)), key=lambda k: (not _is_one_matrix(held[k].call), dims[k], -k)):
            one, before, after = held[k], held[:k], held[k + 1 :]
            for other in itertools.chain(_with_other_anchors(one), _on_readers(one, [*before, *after])):
                if self._refusal([*before, other, *after]) is None:
                    return [*before, other, *after], []
            if dropped is None and self._refusal([*before, *after]) is None:
                dropped = [*before, *after], [(one, reason)]
        return dropped or self._one_by_one(held)

    def _one_by_one(self, held: Sequence[Held]) -> tuple[list[Held], list[tuple[Held, str | None]]]:
        """The gauges that the library accepts in one product with those kept before, and why it refuses the others.

        If it refuses a gauge, the same gauge is tried with other anchors, and then as one gauge per layer.
        """
        kept: list[Held] = []
        refused = list[tuple[Held, str | None]]()

        def beside(new: Sequence[Held]) -> list[Held]:
            done: list[Held] = []
            for one in new:
                choices = (one, *_with_other_anchors(one))
                fitting = next((h for h in choices if self._refusal([*kept, *done, h]) is None), None)
                if fitting is None:
                    return []
                done.append(fitting)
            return done

        for one in held:
            fitting = beside([one]) or beside(one.parts)
            if not fitting:
                refused.append((one, self._refusal([*kept, one])))
            kept += fitting
        return kept, refused

    def _refusal(self, held: Sequence[Held]) -> str | None:
        if not held:
            return None
        try:
            product([h.gauge for h in held])._bound(self._params).slice.check_norms()  # optimizers need it
        except ValueError as error:
            return str(error).splitlines()[0]
        return None


def _relative_change(x: np.ndarray, y: np.ndarray) -> float:
    """‖x − y‖/‖y‖. If y has entries of a mask (`masked`), the larger ratio: of these entries, or of all others."""
    apart = masked(y)
    changes = []
    with np.errstate(over="ignore", invalid="ignore"):  # far from the user's weights outputs may be infinite
        for part in (apart, ~apart):
            size = float(np.linalg.norm(y[part]))
            changes.append(float(np.linalg.norm(x[part] - y[part])) / (size if size > 0 else 1.0))
    return max(change if np.isfinite(change) else np.inf for change in changes)


def _is_one_matrix(call: Call) -> bool:
    """Whether the elements are invertible matrices, and no axis counts matrices, such as that of heads or layers."""
    texts = (x if isinstance(x, tuple) else (x,) for blocks in call.roles.values() for x in blocks.values())
    items = (item for text in itertools.chain.from_iterable(texts) for item in parse_axes(call.kind, "", text).items)
    return call.kind == "head_linear" and {item.name for item in items if item.pick is None} <= {"_", "basis"}


def _with_other_anchors(one: Held) -> Iterator[Held]:
    for call in one.call.alternatives():
        yield one._replace(call=call, gauge=call.gauge())


def _on_readers(one: Held, others: Sequence[Held]) -> Iterator[Held]:
    """Yields the gauge of one factor on all of a norm's parameters as one factor on the kernels that read the norm.

    The norm's own gauge moves factors from the norm's parameters to these kernels. In a product with it, the two forms
    therefore make the same moves. A rotation of the stream needs the second form, because the norm's own gauge has its
    anchor in the norm's scale.
    """
    if one.call.kind != "scale_invariant":
        return
    whole = dict.fromkeys(one.call.paths, "_")
    for norm in (other.call for other in others if other.call.kind == "norm_scale"):
        if whole == dict(one.call.roles["blocks"]) and whole.keys() == norm.roles["scale"].keys():
            blocks = {path: str(axes).replace("channel", "_") for path, axes in norm.roles["into"].items()}
            call = Call("scale_invariant", {"blocks": blocks}, {}, norm.sizes)
            with contextlib.suppress(ValueError):
                yield one._replace(call=call, gauge=call.gauge(), exponents=dict.fromkeys(blocks, 1.0), parts=())
