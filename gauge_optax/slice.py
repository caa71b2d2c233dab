"""The slice: a set of weights with one point per function, and the maps between it and the stored weights.

A *gauge* is a group whose *elements* change weights and keep the function. Take the hidden units of a ReLU network with
weights `up` and `down`: for any α > 0 per unit (*channel*), up·α and down/α compute the same function. A scale is read
from a block, its *anchor*, here `up`: a channel whose `up` column has the norm 3 *reads* as α = 3. Shifts are read from
a mean, rotations from the polar factor of a matrix.

* The *slice* is the set of points that read as the identity: here, all `up` columns have the norm 1.
* The *frame* F of a point θ is the element that the point reads as. It maps the slice to the point: θ = F·θ̂.
* The *slice point* is θ̂ = F⁻¹·θ, here up/3 and down·3. Twins, weight sets of one function, have one slice point.
* The *orbit* of a point is the set of points that elements move it to. A tangent along it is *vertical*; the projection
  that the slice defines splits every tangent into a vertical and a *horizontal* part.
* To *fix* a point near the slice is to read its scales and shifts again, and to apply the inverse of that element.
* To *hold* a step is to remove the part that rotates heads: rotations are read at `init` alone, and are not fixed.

An optimizer step in slice coordinates, with F kept from `init`, has five parts:

    θ̂ = F⁻¹·θ      ĝ = Fᵀ·g      u = inner(ĝ, θ̂)      θ̂′ = fix(θ̂ + u)      step = F·hold(θ̂′ − θ̂)

The methods `enter`, `enter_dual`, `fix`, `hold` and `leave` compute them, for any list of gauges. `Slice` treats all
instances (`gauges.instance`) alike and does not depend on their classes.
References: Fels and Olver 1999, moving frames; docs/design.md §3.
"""

import dataclasses
import functools
import itertools
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, NewType

import jax
import jax.numpy as jnp
import numpy as np
import optax

from gauge_optax.binding import Block, leaf_shape, leaves_by_path, overlap, with_leaves
from gauge_optax.binding.bind import require_no_absent_leaf
from gauge_optax.binding.paths import match, shown_and_hidden
from gauge_optax.errors import binding_error
from gauge_optax.gauges.instance import Anchor, Arrays, Instance, Turn
from gauge_optax.linalg import real_dtype, roundoff
from gauge_optax.xla import recomputed_after

VERSION = 3  # version of what states mean; a state of another version raises an error

SlicePoint = NewType("SlicePoint", dict[str, jax.Array])
"""Leaves of θ̂ that a gauge binds. They hold the value γ where the stored leaf is γ − 1."""

SliceTangent = NewType("SliceTangent", dict[str, jax.Array])
"""Bound leaves of a difference of slice points, such as a step."""

SliceCotangent = NewType("SliceCotangent", dict[str, jax.Array])
"""Bound leaves of a gradient with respect to θ̂."""


class Frame(NamedTuple):
    """What a state keeps of the point at `init`.

    Attributes:
      elements: the frame F, one element per instance: gauge label (`Slice.labels`) → instance key → element.
      live: one mask of channels per instance with anchors, in the order of `Slice.order`. A channel is live if its
        first anchor was not zero at `init`; only live channels are fixed at every step.
      ratios: under `quotient(..., rest="balanced")`, `log_ratios` of the slice point at `init`; else ().
      start: the elements at `init`, if steps change `elements`; else ().
    """

    elements: dict[str, dict[str, Any]]
    live: tuple[jax.Array, ...]
    ratios: tuple[jax.Array, ...] = ()
    start: Any = ()


class Place(NamedTuple):
    """One entry of `Slice.order`: which instance is read, and from which of its anchors.

    Attributes:
      number: position of the instance in `Slice.instances`.
      anchor: the blocks that the instance is read from.
      others: positions and blocks of the other instances that move entries of this anchor.
    """

    number: int
    anchor: Anchor
    others: tuple[tuple[int, Block], ...]


class Order(NamedTuple):
    """The order in which anchors are read, see `Slice.order`.

    Attributes:
      first: every instance with anchors once, from the anchor that is read at every step.
      later: the other anchors, for channels whose first anchor is zero at `init`.
    """

    first: tuple[Place, ...]
    later: tuple[Place, ...]


@dataclasses.dataclass(frozen=True)
class Slice:
    """All instances of a list of gauges on one tree. Static: made from paths and shapes.

    Attributes:
      parts: each gauge with its instances, in the order in which gauges act.
      affine: whether all moves are affine. If not, steps and gradients move by the maps between points.
    """

    parts: tuple[tuple[Any, tuple[Any, ...]], ...]
    affine: bool = True

    @classmethod
    def of(cls, gauges: Sequence[Any], params: Any) -> "Slice":
        """Binds gauges to a tree. Raises ValueError where a binding does not fit, or gauges do not commute."""
        _require_unpacked(gauges, params)
        shown, hidden = shown_and_hidden(params)
        leaves = tuple((path, leaf_shape(leaf), getattr(leaf, "dtype", None)) for path, leaf in shown.items())
        try:
            if all(gauge._by_paths for gauge in gauges):
                return _bound(tuple(gauges), leaves, hidden)
            return _checked(tuple((gauge, gauge._instances(params)) for gauge in gauges))
        except ValueError:
            for gauge in gauges:  # a leaf that is None has no path: only now is it worth a search
                require_no_absent_leaf(gauge.name, getattr(gauge, "specs", ()), params)
            raise

    # Leaves ---------------------------------------------------------------------------------------------

    @functools.cached_property
    def instances(self) -> tuple[Any, ...]:
        """The instances of all gauges, in the order in which they act."""
        return tuple(instance for _, instances in self.parts for instance in instances)

    @functools.cached_property
    def blocks(self) -> tuple[Block, ...]:
        """Every block that an instance moves, or that its action reads."""
        return tuple(block for instance in self.instances for block in (*instance.blocks, *instance.context))

    @functools.cached_property
    def added(self) -> Mapping[str, float | np.ndarray]:
        """Bound leaf path → its value minus its stored number: 1 for axes that start with `1+`, else 0.

        It is an array where only some blocks of a leaf are `1+`.
        """
        by_path: dict[str, list[Block]] = {}
        for block in self.blocks:
            by_path.setdefault(block.path, []).append(block)
        added: dict[str, float | np.ndarray] = {}
        for path, blocks in by_path.items():
            added[path] = float(blocks[0].one_plus)
            if len({block.one_plus for block in blocks}) > 1:
                added[path] = np.zeros(blocks[0].shape)
                for block in blocks:
                    added[path] = block.write(added[path], np.full(block.view_shape, float(block.one_plus)))
        return added

    def values(self, params: Any) -> Arrays:
        """Bound leaves of a point as values in the computing dtype."""
        vectors = self.vectors(params)
        return {p: vectors[p] + added if np.any(added) else vectors[p] for p, added in self.added.items()}

    def vectors(self, tree: Any) -> Arrays:
        """Bound leaves of a tangent or cotangent in the computing dtype. Raises ValueError for a tree that differs."""
        leaves, dtype = leaves_by_path(tree), real_dtype()
        for block in self.blocks:
            shape = jnp.shape(leaves[block.path]) if block.path in leaves else None
            pairs = zip(reversed(shape or ()), reversed(block.shape), strict=False)
            # A number may stand for a whole leaf, as a preconditioner's often does.
            if shape is None or len(shape) > len(block.shape) or any(n not in (1, m) for n, m in pairs):
                raise binding_error(
                    "gauges", f"no update for '{block.path}'" if shape is None else
                    f"an update of another shape for '{block.path}'",
                    f"a tree with {', '.join(list(leaves)[:3])}" if shape is None else f"{shape}",
                    f"{block.shape}, the parameter's",
                    "pass gradients or updates of the very parameters that are passed as params",
                )  # fmt: skip
        return {path: jnp.asarray(leaves[path], dtype) for path in self.added}

    # The frame ------------------------------------------------------------------------------------------

    @functools.cached_property
    def labels(self) -> tuple[str, ...]:
        """One label per gauge: its place in the list, its name, a checksum of its blocks, and `VERSION`."""
        labels = []
        for number, (gauge, instances) in enumerate(self.parts):
            blocks = [(b.path, b.axes, b.shape) for i in instances for b in i.blocks]
            checksum = zlib.crc32(f"{gauge._checksum_text} {blocks}".encode())
            labels.append(f"{number:03d}.{gauge.name}.{checksum:08x}.v{VERSION}")
        return tuple(labels)

    def check_labels(self, labels: Collection[str]) -> None:
        """Raises ValueError where a state with these labels was made with other gauges, or on other leaves."""
        if set(labels) == set(self.labels):
            return
        versions = {label.rpartition(".v")[2] for label in labels}
        if versions - {str(VERSION)}:
            raise binding_error(
                "gauges", "a state of another version of this library",
                f"states of version {', '.join(sorted(versions))}", f"version {VERSION}",
                "start anew by tx.init(params), or load it with the version that made it",
            )  # fmt: skip
        mine = [
            f"{label} (on {', '.join(f'{path} {shape}' for path, shape in {b.path: b.shape for i in instances for b in i.blocks}.items())})"  # noqa: E501
            for label, (_, instances) in zip(self.labels, self.parts, strict=True)
        ]
        raise binding_error(
            "gauges", "a state of other gauges", f"in the state {', '.join(sorted(labels)) or 'none'}",
            f"of the optimizer {', '.join(mine) or 'none'}",
            "give the optimizer the list that its state was made with, in that order and on leaves of those "
            "shapes; or start anew by tx.init(params)",
        )  # fmt: skip

    def frame(self, elements: Sequence[Any], masks: Sequence[jax.Array]) -> Frame:
        """Makes a frame of elements, one per instance, and of masks of the channels read, one per place of `order`."""
        by_instance, labelled = iter(elements), {}
        for label, (_, instances) in zip(self.labels, self.parts, strict=True):
            labelled[label] = {i.key: next(by_instance) for i in instances}
        return Frame(labelled, tuple(masks[: len(self.order.first)]))

    def elements(self, frame: Frame) -> tuple[Any, ...]:
        """F, one element per instance. Raises ValueError for the frame of other gauges."""
        self.check_labels(frame.elements)
        parts = zip(self.labels, self.parts, strict=True)
        return tuple(frame.elements[label][i.key] for label, (_, instances) in parts for i in instances)

    def to_elements(self, elements: Sequence[Any]) -> tuple[Any, ...]:
        """One public element per gauge, from internal elements, one per instance."""
        by_instance = iter(elements)
        return tuple(
            gauge._join(instances, [i.to_element(next(by_instance)) for i in instances])
            for gauge, instances in self.parts
        )

    def from_elements(self, elements: Sequence[Any]) -> tuple[Any, ...]:
        """The inverse of `to_elements`."""
        pairs = zip(self.parts, elements, strict=True)
        return tuple(
            i.from_element(x) for (gauge, instances), element in pairs
            for i, x in zip(instances, gauge._split(instances, element), strict=True)
        )  # fmt: skip

    # Into the slice and out -----------------------------------------------------------------------------

    @functools.cached_property
    def move_order(self) -> tuple[int, ...]:
        """The positions of instances, in the order in which they move points, tangents and cotangents.

        Shifts keep their place in the list, because the instances after a shift move it. Between two shifts all
        instances commute, and scales come last: then `enter` undoes them first, in the same pass over memory as the
        matrix product that undoes a rotation.
        """
        shifts = [i.effect == "shift" or i.keeps_place for i in self.instances]
        keys = [
            (2 * sum(shifts[:k]) + shift, self.instances[k].effect == "diagonal") for k, shift in enumerate(shifts)
        ]
        return tuple(sorted(range(len(keys)), key=keys.__getitem__))

    def _moves(self, elements: Sequence[Any], turning: bool) -> Iterator[tuple[Any, Any]]:
        """Instances with their elements, in the order of `move_order`; `turning=False` skips those that only rotate."""
        for number in self.move_order:
            instance = self.instances[number]
            if turning or instance.turn is not instance:
                yield instance, elements[number]

    def enter(self, elements: Sequence[Any], point: Arrays, turning: bool = True) -> SlicePoint:
        """The slice point θ̂ = F⁻¹·θ. With `turning=False`, heads keep the basis in which they are stored."""
        for instance, e in reversed(list(self._moves(elements, turning))):
            point = instance.enter(e, point)
        return SlicePoint(point)

    def enter_tangent(self, elements: Sequence[Any], tangent: Arrays, point: SlicePoint) -> SliceTangent:
        """F⁻¹·u for a tangent u at the stored point F·θ̂."""
        if not self.affine:
            stored = self.leave_point(elements, point)
            return SliceTangent(jax.jvp(lambda x: dict(self.enter(elements, x)), (stored,), (tangent,))[1])
        for instance, e in reversed(list(self._moves(elements, True))):
            tangent = instance.push(instance.inverse(e), tangent)
        return SliceTangent(tangent)

    def enter_step(self, elements: Sequence[Any], step: Arrays, point: SlicePoint) -> SliceTangent:
        """The step between slice points that `leave` turns into this step from F·θ̂."""
        if self.affine:
            return self.enter_tangent(elements, step, point)
        end = self.enter(elements, jax.tree.map(jnp.add, self.leave_point(elements, point), step))
        return SliceTangent(jax.tree.map(jnp.subtract, dict(end), dict(point)))

    def enter_dual(
        self,
        elements: Sequence[Any],
        gradient: Arrays,
        point: SlicePoint,
        turning: bool = True,
        without_shifts: bool = True,
    ) -> SliceCotangent:
        """The slice gradient ĝ = Fᵀ·g, without the roundoff in entries that are zero for every invariant loss.

        Args:
          elements: the frame F, one element per instance.
          gradient: bound leaves of the gradient at the stored point.
          point: the slice point.
          turning: whether to rotate heads to the slice's basis.
          without_shifts: whether to remove the part along shifts. Only a loss with a penalty on weights has one.
        """
        gradient = self.pulled(elements, gradient, point, turning)
        for norm, block in self.divided:
            gradient = norm.completed(dict(point), gradient, block)
        gradient = self.centred(gradient) if without_shifts else gradient
        for kind, turns in self.turns_by_kind:
            gradient = kind.without_roundoff(turns, gradient)
        return SliceCotangent(gradient)

    @functools.cached_property
    def divided(self) -> tuple[tuple[Any, Block], ...]:
        """The scales of norms that affine gauges pass, each with the instance that makes it 1 on the slice.

        Raises ValueError for a scale without such an instance, and for one that acts before the gauge that passes it:
        transformations need both. A gauge alone moves weights by the scales that they have.
        """
        pairs: dict[str, tuple[Any, Block]] = {}
        for at, instance in enumerate(self.instances):
            for block in instance.divided if instance.affine else ():
                norms = [
                    (number, i) for number, i in enumerate(self.instances)
                    if i.anchors and i.log_step and i.anchors[0] == (dataclasses.replace(block, role="up"),)
                ]  # fmt: skip
                if not norms:
                    raise binding_error(
                        instance.gauge, f"the norm's scale '{block.path}' is not divided out", "no norm_scale of it",
                        "the go.norm_scale gauge of that norm in the same list", "add it behind this gauge",
                    )  # fmt: skip
                number, norm = norms[0]
                between = self.instances[number : at + 1]
                if any(i.effect == "shift" or i.keeps_place for i in between):
                    raise binding_error(
                        instance.gauge, f"acts after norm_scale of '{block.path}'", "a later place in the list",
                        f"{instance.gauge} before that norm_scale", "move it to the front of the list of gauges",
                    )  # fmt: skip
                pairs[block.path] = norm, dataclasses.replace(block, role="up")
        return tuple(pairs.values())

    def check_norms(self) -> None:
        """Raises what `divided` raises."""
        _ = self.divided

    def leave(
        self, elements: Sequence[Any], tangent: SliceTangent, point: SlicePoint, turning: bool = True
    ) -> Arrays:
        """F·(θ̂ + u) − F·θ̂ for a step u from a slice point: the step of the stored weights."""
        vector: Arrays = dict(tangent)
        if not self.affine:
            end = SlicePoint(jax.tree.map(jnp.add, dict(point), vector))
            return jax.tree.map(jnp.subtract, self.leave_point(elements, end), self.leave_point(elements, point))
        for instance, e in self._moves(elements, turning):
            vector = instance.push(e, vector)
        return vector

    def leave_point(self, elements: Sequence[Any], point: SlicePoint) -> Arrays:
        """The inverse of `enter`: F·θ̂, as values of the bound leaves."""
        values: Arrays = dict(point)
        for instance, e in zip(self.instances, elements, strict=True):
            values = instance.act(e, values)
        return values

    def log_ratios(self, point: SlicePoint) -> tuple[jax.Array, ...]:
        """log ‖up‖ − p·log ‖down‖ of every scale with two sides, per channel."""
        ratios = (instance.log_ratio(dict(point)) for instance in self.instances)
        return tuple(ratio for ratio in ratios if ratio is not None)

    def with_log_ratios(self, elements: Sequence[Any], changes: Sequence[jax.Array]) -> tuple[Any, ...]:
        """Elements that add these numbers, in the order of `log_ratios`, to the ratios of the points they lead to."""
        left = iter(changes)
        return tuple(
            i.with_log_ratio(e, next(left)) if i.sides is not None and i.turn is None else e
            for i, e in zip(self.instances, elements, strict=True)
        )

    def centred(self, vector: Arrays) -> Arrays:
        """Subtracts the part along shifts from a point, tangent or cotangent."""
        for instance in self.instances:
            vector = instance.centred(vector)
        return vector

    def least_signal(self, point: SlicePoint, gradient: Any) -> jax.Array | None:
        """The size below which gradients of all leaves are roundoff at this point; None where there is no such size.

        While the output layer is constant over classes, the gradients of all other leaves are zero, up to roundoff. An
        optimizer that divides gradients by their size would turn that roundoff into a full step.
        """
        leaves = leaves_by_path(gradient)
        sizes = [size for i in self.instances if (size := i.signal(dict(point), leaves)) is not None]
        return roundoff(real_dtype()) * jnp.stack(sizes).max() if sizes else None

    def without_roundoff(self, point: SlicePoint, gradient: Any) -> Any:
        """Sets the entries of a gradient (a whole tree) that are below `least_signal` to zero."""
        least = self.least_signal(point, gradient)
        if least is None:
            return gradient
        arrays = {p: jnp.asarray(x) for p, x in leaves_by_path(gradient).items()}  # a leaf may be a Python number
        leaves = {p: x for p, x in arrays.items() if jnp.issubdtype(x.dtype, jnp.floating)}
        kept = {p: jax.lax.select(jnp.abs(x) < least, jnp.zeros_like(x), x) for p, x in leaves.items()}
        return with_leaves(gradient, kept)

    # On the slice -----------------------------------------------------------------------------------------

    def fix(self, point: Arrays, live: Sequence[jax.Array]) -> SlicePoint:
        """Moves a point near the slice onto it, along its orbit: resets the sizes of anchors, and shifts to zero.

        Args:
          point: bound leaves.
          live: which channels to fix, one mask per place of `order.first`.
        """
        return SlicePoint(self.centred(self._sized(point, live)))

    def _sized(self, point: Arrays, live: Sequence[jax.Array]) -> Arrays:
        for place, mask in zip(self.order.first, live, strict=False):
            instance = self.instances[place.number]
            e, _ = instance.read(place.anchor, point, mask, near=True)
            point = instance.enter(e, point)
            # A constant may be moved into a leaf that is zero on the slice, such as a key bias: it is read as zero.
            point = self.centred(point) if instance.keeps_place else point
        return point

    def hold(self, point: SlicePoint, tangent: SliceTangent) -> SliceTangent:
        """Removes the part of a step that rotates heads: exactly where that has a closed form, else to first order."""
        return SliceTangent(self._over_turns(dict(point), dict(tangent), lambda kind: kind.hold))

    def project_turning(self, point: Arrays, vector: Arrays, into: Mapping[Any, jax.Array] | None = None) -> Arrays:
        """Removes the part along rotations from a tangent. For `into` see `Turn.project`."""
        return self._over_turns(point, vector, lambda kind: functools.partial(kind.project, into=into))

    def project_turning_dual(self, point: Arrays, cotangent: Arrays) -> Arrays:
        """The transpose of `project_turning`."""
        for kind, turns in reversed(self.turns_by_kind):
            cotangent = kind.project_dual(turns, point, cotangent)
        return cotangent

    def _over_turns(
        self, point: Arrays, vector: Arrays, change: Callable[[Any], Callable[..., Arrays]]
    ) -> Arrays:
        done: list[jax.Array] = []
        for kind, turns in self.turns_by_kind:
            paths = sorted({path for turn in turns for path in turn.paths})
            # A point that is computed entry by entry is cheap to compute twice. This keeps XLA from holding a copy in
            # memory while the rotations before it are computed.
            again = {path: point[path] for path in paths} if kind.entrywise and done else {}
            vector = change(kind)(turns, point | (recomputed_after(done, again) if again else {}), vector)
            done = [vector[path] for path in paths]
        return vector

    @functools.cached_property
    def turns(self) -> tuple[Any, ...]:
        """The `turn`s of all instances that rotate heads."""
        return tuple(i.turn for i in self.instances if i.turn is not None and i.turn.of_heads)

    @functools.cached_property
    def turns_by_kind(self) -> tuple[tuple[Any, tuple[Any, ...]], ...]:
        """Each class of rotations with its `turn`s: the residual stream first, moves entry by entry last."""
        turns = [i.turn for i in self.instances if i.turn is not None]
        kinds: list[type[Turn]] = sorted(dict.fromkeys(map(type, turns)), key=lambda k: (k.of_heads, k.entrywise))
        return tuple((kind, tuple(turn for turn in turns if type(turn) is kind)) for kind in kinds)

    # Reading a point --------------------------------------------------------------------------------------

    def read(
        self,
        values: Arrays,
        turning: bool = True,
        reader: Callable[[type[Turn]], Any] = lambda kind: kind.read_all,
        means: bool = True,
    ) -> "FrameOfPoint":
        """The frame of any point. A channel whose anchors are all zero reads as the identity.

        Args:
          values: bound leaves.
          turning: whether to read rotations. If False, they are the identity.
          reader: class of rotations → its method that reads them; None for rotations that are to be the identity.
          means: whether to read shifts. If False, `with_means` is to follow.
        """
        elements, masks, point = self._read_sizes(self.centred(values))
        for kind, turns in self.turns_by_kind if turning else ():
            method = reader(kind)
            if method is None:
                continue
            read = dict(zip(turns, method(turns, point), strict=True))
            for number, instance in enumerate(self.instances):
                if instance.turn in read:
                    turn = instance.from_turn(read[instance.turn])
                    elements[number] = instance.compose(elements[number], turn) if instance.anchors else turn
                    # Heads are read where the residual stream has its slice basis, because their rows lie in it.
                    point = point if instance.turn.of_heads else instance.enter(turn, point)
        return FrameOfPoint(self.with_means(elements, values) if means else tuple(elements), tuple(masks))

    def with_means(self, elements: Sequence[Any], values: Arrays) -> tuple[Any, ...]:
        """Reads the shifts into a copy of `elements`: each one after every instance that acts after it is undone."""
        elements = list(elements)
        if not any(i.effect == "shift" or i.keeps_place for i in self.instances):
            return tuple(elements)
        for number in reversed(range(len(elements))):
            instance = self.instances[number]
            mean = instance.read_mean(values)
            elements[number] = elements[number] if mean is None else mean
            values = instance.enter(elements[number], values)
        return tuple(elements)

    def _read_sizes(self, point: Arrays) -> tuple[list[Any], list[jax.Array], Arrays]:
        """Elements of instances with anchors, the mask of channels each place read, and the point without both.

        In the returned point, channels that were read are on the slice, and channels that could not be read are zero.
        """
        elements = [instance.identity() for instance in self.instances]
        read = {place.number: jnp.zeros(self.instances[place.number].shape, bool) for place in self.order.first}
        masks = []
        for place in self.order.first + self.order.later:
            instance, visible = self.instances[place.number], dict(point)
            # An entry that another instance moves counts only once that instance's channel has been read and undone:
            # before that, its size differs between twins.
            for number, block in place.others:
                if self.instances[number].keeps_place:
                    continue  # it is always read
                mask = read[number].astype(real_dtype())
                factor = block.spread(self.instances[number].named, mask, elsewhere=1.0)
                visible[block.path] = visible[block.path] * factor
            e, new = instance.read(place.anchor, visible, ~read[place.number], near=False)
            masks.append(new)
            elements[place.number] = instance.where(new, e, elements[place.number])
            read[place.number] = read[place.number] | new
            point = instance.enter(e, point)
            point = self.centred(point) if instance.keeps_place else point
        # Every anchor is read again with the entries that were left out above, because `fix` reads all entries.
        for place, mask in zip(self.order.first, masks, strict=False):
            instance = self.instances[place.number]
            e, _ = instance.read(place.anchor, point, mask, near=True)
            elements[place.number] = instance.compose(elements[place.number], e)
            point = instance.enter(e, point)
            point = self.centred(point) if instance.keeps_place else point
        # Rotations are read from the returned point. Channels that no anchor could read are set to zero there, because
        # their entries differ between twins.
        for number, mask in read.items():
            instance = self.instances[number]
            for block in () if instance.keeps_place else instance.blocks:
                factor = block.spread(instance.named, mask.astype(real_dtype()), elsewhere=1.0)
                point = point | {block.path: point[block.path] * factor}
        return elements, masks, point

    @functools.cached_property
    def order(self) -> Order:
        """The order in which anchors are read. It does not depend on the order of the gauges.

        The first tuple reads every instance from its first anchor, as soon as all other instances that move that anchor
        are read. The second goes backwards over the other anchors, so that a channel whose first anchor is zero is read
        from its readers. Raises ValueError for instances that wait for each other with all of their anchors.
        """
        sized = [number for number, instance in enumerate(self.instances) if instance.anchors]
        by_path: dict[str, list[tuple[int, Block]]] = {}
        for number in sized:
            for block in self.instances[number].blocks:
                by_path.setdefault(block.path, []).append((number, block))

        def matters(number: int, other: int) -> bool:
            """Whether what an instance reads depends on another one, for an anchor that both of them move.

            A constant that keeps its place is read along an axis on which all others are constant, but for the norms
            that it passes: scales and matrices on other axes move the constant as they move the anchor.
            """
            one, two = self.instances[number], self.instances[other]
            passed = (overlap(b, d) for d in one.divided for b in two.blocks if b.path == d.path)
            return not one.keeps_place or two.keeps_place or any(passed)

        def place(number: int, anchor: Anchor) -> Place:
            pairs = ((j, b, a) for a in anchor for j, b in by_path.get(a.path, ()) if j != number)
            shared = ((j, b, a) for j, b, a in pairs if matters(number, j))
            return Place(number, anchor, tuple(dict.fromkeys((j, b) for j, b, a in shared if overlap(a, b))))

        waiting = sorted(sized, key=lambda k: [f"{b.path} {b.axes}" for b in self.instances[k].blocks])
        first: list[Place] = []
        done: set[int] = set()
        level, most = 0, max((len(self.instances[k].anchors) for k in waiting), default=0)
        while waiting:
            # Later anchors (`level` > 0) are tried only where instances would wait for each other.
            anchors = [(k, self.instances[k].anchors) for k in waiting]
            offered = [place(k, levels[level]) for k, levels in anchors if level < len(levels)]
            ready = [x for x in offered if {j for j, _ in x.others} <= done]
            if not ready and level + 1 >= most:
                raise self._cycle(waiting)
            first += ready if level == 0 else ready[:1]
            done = {x.number for x in first}
            waiting = [k for k in waiting if k not in done]
            level = 0 if ready else level + 1
        later = [
            place(x.number, anchor)
            for x in reversed(first) for anchor in self.instances[x.number].anchors if anchor != x.anchor
        ]  # fmt: skip
        return Order(tuple(first), tuple(later))

    def _cycle(self, waiting: Sequence[int]) -> ValueError:
        instances = [self.instances[k] for k in waiting]
        names = ", ".join(f"{i.gauge}[{i.key}]" for i in instances)
        return binding_error(
            instances[0].gauge, f"cyclic gauges at '{instances[0].blocks[0].path}'",
            f"every leaf of {names} is shared with another of them",
            "an order in which each gauge has a leaf whose other gauges come earlier",
            "drop one gauge of the cycle, or train it with its own transformation",
        )  # fmt: skip

    def coordinates(self, values: Arrays, elements: Sequence[Any]) -> tuple[Any, ...]:
        """The coordinates whose change is drift, per gauge: log-scales and means. The point reads as `elements`."""
        by_instance = iter(elements)
        return tuple(
            gauge._join(instances, [i.coordinate(next(by_instance), values) for i in instances])
            for gauge, instances in self.parts
        )

    # Vertical and horizontal ------------------------------------------------------------------------------

    def horizontal(self, point: Arrays, masks: Sequence[jax.Array], tangent: Arrays) -> Arrays:
        """The part of a tangent across the orbit at a slice point: the derivative of `fix`, then `project_turning`.

        Args:
          point: bound leaves of the slice point; heads may have any basis.
          masks: which channels were read, one mask per place of `order.first`.
          tangent: bound leaves.
        """
        # The tangent itself is centred, because `centred` has no derivative at a point that is constant along `vocab`.
        _, moved = jax.jvp(lambda values: self._sized(values, masks), (point,), (tangent,))
        return self.project_turning(point, self.centred(moved))

    def horizontal_dual(self, point: Arrays, masks: Sequence[jax.Array], cotangent: Arrays) -> Arrays:
        """The transpose of `horizontal`: a gradient whose product with every vertical tangent is zero."""
        _, pull = jax.vjp(lambda values: self._sized(values, masks), point)
        out: Arrays = pull(self.centred(self.project_turning_dual(point, cotangent)))[0]
        return out

    def nearest_slice_point(self, params: Any) -> "NearestSlicePoint":
        """The slice point on the orbit of `params`, with heads in the basis in which they are stored."""
        values = self.values(params)
        elements, masks = self.read(values, turning=False)
        return NearestSlicePoint(elements, self.enter(elements, values), masks)

    def horizontal_at(self, params: Any, vector: Any, dual: bool = False) -> Arrays:
        """The horizontal part of a tangent, or of a cotangent, at any point: bound leaves."""
        near, vectors = self.nearest_slice_point(params), self.vectors(vector)
        if any(i.divided for i in self.instances):  # among them all that are not affine
            return self._horizontal_of_conjugates(self.values(params), near, vectors, dual)
        if dual:
            inside = self.pulled(near.elements, vectors, near.point)
            across = self.horizontal_dual(dict(near.point), near.masks, inside)
            for instance, e in self._moves(near.elements, True):
                across = instance.pull(instance.inverse(e), across)
            return across
        inside = dict(self.enter_tangent(near.elements, vectors, near.point))
        across = self.horizontal(dict(near.point), near.masks, inside)
        return self.leave(near.elements, SliceTangent(across), near.point)

    def _horizontal_of_conjugates(
        self, values: Arrays, near: "NearestSlicePoint", vectors: Arrays, dual: bool
    ) -> Arrays:
        """As `horizontal_at`, for moves that depend on a norm's scale, which any vector may change."""
        point = dict(near.point)

        def enter(x: Arrays) -> Arrays:
            return dict(self.enter(near.elements, x))

        def leave(x: Arrays) -> Arrays:
            return self.leave_point(near.elements, SlicePoint(x))

        if dual:
            across = self.horizontal_dual(point, near.masks, jax.vjp(leave, point)[1](vectors)[0])
            out: Arrays = jax.vjp(enter, values)[1](across)[0]
            return out
        inside = jax.jvp(enter, (values,), (vectors,))[1]
        return jax.jvp(leave, (point,), (self.horizontal(point, near.masks, inside),))[1]

    def pulled(self, elements: Sequence[Any], cotangent: Arrays, point: SlicePoint, turning: bool = True) -> Arrays:
        """Fᵀ·g at a slice point, without what `enter_dual` changes after it."""
        if not self.affine:
            out: Arrays = jax.vjp(lambda x: self.leave_point(elements, x), point)[1](cotangent)[0]
            return dict(out)
        for instance, e in reversed(list(self._moves(elements, turning))):
            cotangent = instance.pull(e, cotangent)
        return cotangent

    # Balance ----------------------------------------------------------------------------------------------

    def balanced(self, params: Any) -> tuple[Any, ...]:
        """The element, per instance, that maps the point of least norm on the orbit to this point."""
        values = self.values(params)
        return self.with_means(_balanced(self, self.centred(values)), values)

    # Whether gauges commute -------------------------------------------------------------------------------

    def check(self) -> None:
        """Raises ValueError where two gauges do not commute, or stand in an order in which they cannot be read."""
        self._check_targets()
        by_path: dict[str, list[tuple[Instance, Block]]] = {}
        for instance in self.instances:
            for block in instance.blocks:
                by_path.setdefault(block.path, []).append((instance, block))
        for path, moves in by_path.items():
            for at, (instance, block) in enumerate(moves):
                for other, second in moves[:at]:
                    if other is not instance and overlap(block, second):
                        reason = _clash(instance, block, other, second) or _clash(other, second, instance, block)
                        if reason is not None:
                            raise binding_error(
                                instance.gauge, f"does not commute with {other.gauge} on '{path}'", *reason,
                                "drop one of the two from this list",
                            )  # fmt: skip


    def _check_targets(self) -> None:
        """Raises ValueError where a constant is moved into a leaf that was read before: it has to be moved first.

        Elements are read from the last gauge of a list to the first.
        """
        for at, instance in enumerate(self.instances):
            zeroed = [a for later in self.instances[at:] if later.targets for a in later.anchors[0]]
            if not instance.targets or any(overlap(x, y) for x in zeroed for y in instance.context if x.path == y.path):
                continue  # what it moves is zero by then
            for other in self.instances[at + 1 :]:
                if not (other.effect == "shift" or other.keeps_place):
                    continue
                moved = [b.path for b in other.blocks for t in instance.targets if b.path == t.path and overlap(b, t)]
                if moved and other is not instance and instance.gauge != other.gauge:
                    raise binding_error(
                        instance.gauge, f"moves '{moved[0]}' after {other.gauge} was read from it", "an earlier place",
                        f"{instance.gauge} behind {other.gauge}", f"list {other.gauge} first",
                    )  # fmt: skip


class FrameOfPoint(NamedTuple):
    """The frame of any point, as `Slice.read` returns it.

    Attributes:
      elements: one per instance, in the order of `Slice.instances`.
      masks: per place of `Slice.order`, which channels were read there.
    """

    elements: tuple[Any, ...]
    masks: tuple[jax.Array, ...]


class NearestSlicePoint(NamedTuple):
    """The slice point on the orbit of a point, with heads in the basis that the point has.

    Attributes:
      elements: F, one per instance, which maps the slice point to the point; rotations are the identity.
      point: bound leaves of the slice point.
      masks: per place of `Slice.order`, which channels were read there.
    """

    elements: tuple[Any, ...]
    point: SlicePoint
    masks: tuple[jax.Array, ...]


_Leaves = tuple[tuple[str, tuple[int, ...], Any], ...]


@functools.lru_cache(maxsize=64)  # an update asks for the same slice several times per trace
def _bound(gauges: tuple[Any, ...], leaves: _Leaves, hidden: tuple[str, ...]) -> Slice:
    """The slice of gauges whose instances depend on paths, shapes and dtypes alone."""
    tree = {path: 0.0 if dtype is None else jax.ShapeDtypeStruct(shape, dtype) for path, shape, dtype in leaves}
    masked = dict.fromkeys(hidden, optax.MaskedNode())
    return _checked(tuple((gauge, gauge._instances(tree | masked)) for gauge in gauges))


@functools.lru_cache(maxsize=64)
def _checked(parts: tuple[tuple[Any, tuple[Any, ...]], ...]) -> Slice:
    everything = tuple(i for _, instances in parts for i in instances)
    parts = tuple((gauge, tuple(i.beside(everything) for i in instances)) for gauge, instances in parts)
    checked = Slice(parts, affine=all(i.affine for _, instances in parts for i in instances))
    checked.check()
    return checked


def _require_unpacked(gauges: Sequence[Any], params: Any) -> None:
    """Raises ValueError where a gauge binds a leaf that a packed tree lacks rows of, which it could not move."""
    nodes = jax.tree.leaves(params, is_leaf=lambda node: hasattr(node, "packed_path"))
    paths = dict.fromkeys(node.packed_path for node in nodes if hasattr(node, "packed_path"))
    for gauge, path in itertools.product(gauges, paths):
        if any(match(gauge.name, spec.pattern, path) is not None for spec in getattr(gauge, "specs", ())):
            raise binding_error(
                gauge.name, f"binds the packed leaf '{path}'", "a leaf without its constant rows", "whole leaves",
                "take this gauge out of the list for packed trees; or pass go.unpack(packed)",
            )  # fmt: skip


def _clash(rigid: Any, block: Block, scale: Any, scaled: Block) -> tuple[str, str] | None:
    """Returns what was found and what was expected where two instances do not commute; None where they do."""
    known_by_action = [i for i in (rigid, scale) if i.known_by_action]
    if known_by_action:
        if all(i.commutes for i in known_by_action):
            return None
        return (
            "a gauge known by its action alone, which cannot be told to commute",
            "leaves that no other gauge of the list binds, or a gauge that says `commutes = True`",
        )
    if rigid.turn is not None and scale.turn is not None:
        # Rotations of two axes of a leaf commute, as those of the residual stream and of heads do.
        if rigid.rigid and scale.rigid and not varies_along(scaled, (*scale.named, scale.rigid), block, rigid.rigid):
            return None
        return "the same entries turned by two gauges", "at most one rotation or linear gauge per entry"
    if any((dataclasses.replace(x, role="up"),) in scale.anchors for x in rigid.divided):
        return None  # the rotation acts where this norm's scale is 1
    if rigid.rigid is not None and scale.log_step and varies_along(scaled, scale.named, block, rigid.rigid):
        return (
            f"the axis that {rigid.gauge} needs constant is scaled entry by entry",
            f"scales of {scale.gauge} constant along `{rigid.rigid}`",
        )
    return None


def varies_along(scaled: Block, named: tuple[str, ...], rigid_block: Block, rigid: str) -> bool:
    """Whether entries that differ only along the axis `rigid` of one block differ in a named index of another one.

    Args:
      scaled: a block.
      named: names of its axes.
      rigid_block: another block of the same leaf.
      rigid: name of one of its axes.
    """
    fixed = {*rigid_block.names, "_"} - {rigid}
    for axis in range(len(rigid_block.shape)):
        groups, channels = rigid_block.axis_ids(axis, fixed), scaled.axis_ids(axis, set(named))
        used = groups >= 0
        pairs = np.unique(np.stack([groups[used], channels[used]]), axis=1)
        if pairs.shape[1] > len(np.unique(groups[used])):
            return True
    return False


_MOST_ROUNDS = 200
_Carry = tuple[tuple[Any, ...], Arrays, jax.Array, jax.Array]


@functools.partial(jax.jit, static_argnums=0)  # outside jit, a loop would be compiled anew at every call
def _balanced(on_tree: Slice, values: Arrays) -> tuple[Any, ...]:
    """The elements of `Slice.balanced`, shifts apart: where instances share leaves, in rounds until none changes.

    A scale is balanced where ‖up‖² = p·‖down‖², a linear gauge where both factors have one Gram matrix (Kempf–Ness).
    Each has a closed form while the others are constant. Reference: docs/design.md §6.
    """
    sized = [number for number, instance in enumerate(on_tree.instances) if instance.anchors]
    blocks = [(number, block) for number in sized for block in on_tree.instances[number].blocks]
    coupled = any(a != b and overlap(x, y) for at, (a, x) in enumerate(blocks) for b, y in blocks[:at])

    def one_round(carry: _Carry) -> _Carry:
        elements, point, _, count = carry
        moved, balancing = jnp.zeros((), real_dtype()), list(elements)
        for number in sized:
            instance = on_tree.instances[number]
            alone = instance.act(balancing[number], point)
            new = instance.balanced(alone)
            # A balanced matrix is exact as soon as all scales are, so that their changes alone decide convergence.
            if instance.turn is None or instance.log_step:
                changes = jax.tree.map(lambda x, y: jnp.max(jnp.abs(x - y), initial=0.0), new, balancing[number])
                moved = jnp.maximum(moved, jnp.max(jnp.stack(jax.tree.leaves(changes))))
            balancing[number], point = new, instance.enter(new, alone)
        return tuple(balancing), point, moved, count + 1

    tolerance = 32.0 * float(jnp.finfo(real_dtype()).eps)
    start = tuple(i.identity() for i in on_tree.instances), values, jnp.asarray(jnp.inf, real_dtype()), jnp.int32(0)
    if not coupled:
        return one_round(start)[0]
    return jax.lax.while_loop(lambda c: (c[2] > tolerance) & (c[3] < _MOST_ROUNDS), one_round, start)[0]
