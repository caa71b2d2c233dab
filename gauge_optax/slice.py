"""The slice: a set of weights with one point per function, and the maps between it and the stored weights.

A *gauge* is a group whose *elements* change weights and keep the function. Take the hidden units of a ReLU network with
weights `up` and `down`: for any α > 0 per unit (*channel*), up·α and down/α compute the same function. The library
computes α from the *anchor*, here `up`: a channel whose `up` column has the norm 3 *reads* as α = 3. (If units have
biases, α multiplies these too, and the anchor is `up` and the biases together.)

On a tree, a gauge consists of *parts*, one or two per layer. A part has one of three roles: a *size* multiplies, as α
does; a *constant* adds; a *turn* rotates. Sizes are read from norms, constants from means, turns from polar factors.

* The *slice* is the set of points that read as the identity: here, all `up` columns have the norm 1.
* The *frame* F of a point θ is the element that the point reads as.
* The *slice point* is θ̂ = F⁻¹·θ, here up/3 and down·3; F maps it back to θ = F·θ̂. *Twins* are weights that elements of
  the gauges move into each other. They compute one function, and have one slice point.
* To *fix* a point near the slice is to read its constants and sizes again, and to apply the inverses of their elements.
* To *hold* a step is to remove the part of it that rotates heads. This stands in place of a fix, because rotations are
  read at `init` alone. The rotation of the residual stream is held only if its gauge says `hold=True`.
* The *orbit* of a point is the set of points that elements move it to. Every tangent (a small change of the weights) is
  the sum of a *vertical* part, along the orbit, and a *horizontal* part. Fix and hold leave a step's horizontal part.

Whatever the order of a list of gauges, F = constants · sizes · turns: turns act first and constants last. Within a
role, a part is read after the others that move its anchor were undone (`parts.order`). A step has five stages:

    θ̂ = F⁻¹·θ      ĝ = Fᵀ·g      u = inner(ĝ, θ̂)      θ̂′ = fix(θ̂ + u)      step = F·hold(θ̂′ − θ̂)

Here g is the gradient at θ, `inner` is the wrapped optimizer, and Fᵀ is the transpose of the derivative of x ↦ F·x at
θ̂. `Slice.enter` computes θ̂ and returns it as an `Undone`, whose `pull` computes ĝ and whose `push` computes the step.
`fix` and `hold` are methods of `Slice`. All of them are loops over parts. References: Fels and Olver 1999, moving
frames; docs/design.md §3.
"""

import dataclasses
import functools
import itertools
import operator
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from gauge_optax.binding import Block, leaves_by_path, with_leaves
from gauge_optax.errors import binding_error
from gauge_optax.linalg import real_dtype, roundoff
from gauge_optax.parts import heads
from gauge_optax.parts.order import Place, anchor_key, by_label, check_commute, in_order, others_of, turns_by_class
from gauge_optax.parts.part import Arrays, Constant, Part, Size, Turn, changed, moves, name_of, overlaps
from gauge_optax.xla import recomputed_after

VERSION = 6  # version of the meaning of optimizer states; a state of another version raises an error

Elements = dict[str, Any]
"""Part label → element."""


class Frame(NamedTuple):
    """The frame of a point. A state holds the frame of the weights at `init`.

    Attributes:
      elements: the frame F: part label → element.
      live: label of a size → a boolean per channel, (*shape): True if the anchor that `Slice.sizes` has for the size is
        not zero there. `fix` fixes these channels alone.
      frozen: the paths of leaves that never change, as the keys of a dict: these are static under `jit`.
    """

    elements: Elements
    live: dict[str, jax.Array]
    frozen: dict[str, tuple[()]] = {}  # noqa: RUF012  a NamedTuple's default; nobody writes to it


class UndonePart(NamedTuple):
    """A part that was undone on the way from a point to its slice point: the inverse of its element was applied.

    Attributes:
      part: the part.
      element: its element.
      outside: the point before the part was undone.
      at: the point after the part was undone.
    """

    part: Any
    element: Any
    outside: Arrays
    at: Arrays


class Undone(NamedTuple):
    """A slice point, with the maps that move points, steps and gradients to the slice or back.

    Attributes:
      point: the slice point θ̂ = F⁻¹·θ. A leaf that is bound as `1+` (a norm's scale that is stored less one) has the
        1 added.
      parts: the parts that were undone, in this order.
    """

    point: Arrays
    parts: tuple[UndonePart, ...]

    def pull(self, g: Arrays) -> Arrays:
        """The slice gradient Fᵀ·g of a gradient at θ."""
        for part, e, _, at in self.parts:
            g = part.pull(e, g, at)
        return g

    def push(self, u: Arrays) -> Arrays:
        """F·(θ̂ + u) − F·θ̂: the step of the stored weights for a step u from the slice point."""
        for part, e, _, at in reversed(self.parts):
            u = part.push(e, u, at)
        return u

    def enter_step(self, u: Arrays) -> Arrays:
        """F⁻¹·(θ + u) − F⁻¹·θ: the step from the slice point for a step u of the stored weights. Inverts `push`."""
        for part, e, outside, _ in self.parts:
            u = part.push(part.inverse(e), u, outside)
        return u

    def enter(self, x: Arrays) -> Arrays:
        """F⁻¹·x for another point x. Unlike `Part.undo`, it sets no roundoff to zero, so that it is differentiable."""
        for part, e, _, _ in self.parts:
            x = part.act(part.inverse(e), x)
        return x

    def leave(self, x: Arrays) -> Arrays:
        """F·x for another point x."""
        for part, e, _, _ in reversed(self.parts):
            x = part.act(e, x)
        return x


@dataclasses.dataclass(frozen=True)
class Slice:
    """All parts of a list of gauges on one tree, sorted. It is static: made from paths, shapes and dtypes.

    Attributes:
      constants: the constants, in the order in which they are undone.
      sizes: the sizes, in the order in which they are undone, each with the one anchor that `fix` reads at every step.
      later: the sizes' other anchors. If a channel's anchor in `sizes` is zero at `init`, the channel is read from one
        of these. A *channel* is one index of the named axes of a part: one hidden unit, say.
      turns: pairs of a class of turns and the turns of this class, in the order in which they are undone.
      free: parts without a role (permutations), which no optimizer notices.
      completed_sizes: labels of sizes whose anchor is a norm's scale that a turn uses but does not change
        (`Part.passes`). A gradient that the turn moves to the slice (`pull`) lacks a term at the scale, because the
        turn depends on the scale. `Size.completed` computes the scale's gradient from those of the size's other leaves.
      not_fixed: labels of parts that change a frozen leaf. They stay in F as they were read at `init`; `fix` and `hold`
        leave them alone.
      following: labels of sizes one of whose leaves has a less precise dtype than the anchor. What the anchor gains in
        a step would be rounded away if it moved to this leaf. So the anchor keeps it, and F changes by it.
      without_norm_scale: pairs of a turn and the path of a norm's scale. The turn uses the scale (`Part.passes`), but
        no size makes it 1 on the slice.
      divided: pairs of the label of a constant that is divided by a norm's scale, and the sizes that move this scale,
        each with the block that it moves.
    """

    constants: tuple[Place, ...]
    sizes: tuple[Place, ...]
    later: tuple[Place, ...]
    turns: tuple[tuple[type[Any], tuple[Any, ...]], ...]
    free: tuple[Any, ...] = ()
    completed_sizes: frozenset[str] = frozenset()
    not_fixed: frozenset[str] = frozenset()
    following: frozenset[str] = frozenset()
    without_norm_scale: tuple[tuple[Any, str], ...] = ()
    divided: tuple[tuple[str, tuple[tuple[Any, Block], ...]], ...] = ()

    @classmethod
    def of(
        cls, parts: Sequence[Part[Any]], dtypes: Mapping[str, Any] | None = None, frozen: frozenset[str] = frozenset()
    ) -> "Slice":
        """Makes the slice of some parts: sorts them by role and order, and checks that they commute.

        Args:
          parts: the parts of all gauges of a list, in any order.
          dtypes: leaf path → dtype.
          frozen: paths of leaves that never change.

        Raises:
          ValueError: parts that do not commute, or parts that no order fits, because each is read from leaves that
            another of them moves.
        """
        kept = [part for p in parts if (part := p.beside_frozen(frozen)) is not None]
        kept = [p.beside([q for q in kept if q is not p]) for p in kept]
        check_commute(kept)
        constants: list[Any] = [p for p in kept if isinstance(p, Constant)]
        sizes: list[Any] = [p for p in kept if isinstance(p, Size)]
        turns: list[Any] = [p for p in kept if isinstance(p, Turn)]
        bits = {p: jnp.finfo(d).nmant for p, d in (dtypes or {}).items() if jnp.issubdtype(d, jnp.floating)}
        not_fixed = frozenset(p.label for p in kept if frozen & set(changed(p)))
        following = frozenset(p.label for p in sizes if bits and p.follows(bits)) - not_fixed
        first = in_order(sizes)
        at_one = {anchor_key(place.anchor): place.part.label for place in first}
        without_norm_scale = tuple((t, b.path) for t in turns for b in t.passes if anchor_key((b,)) not in at_one)
        # A turn moves steps as if every norm's scale γ that it uses were 1. `fix` makes γ 1 at every step, and
        # multiplies kernels by γ. If it may not (γ is frozen, or more precise than the kernels), the turn is dropped.
        stuck = not_fixed | following
        turns = [t for t in turns if not stuck & {at_one.get(anchor_key((b,)), "") for b in t.passes}]
        completed = frozenset(at_one[anchor_key((b,))] for t in turns for b in t.passes if anchor_key((b,)) in at_one)
        later = [
            Place(p, anchor, others_of(p, anchor, sizes))
            for p, used, _ in reversed(first)
            for anchor in p.anchors
            if not {*anchor} <= {*used}
        ]
        places = in_order(constants)
        passed = ((p, tuple(b for b in anchor if b in p.passes)) for p, anchor, _ in places)
        return cls(
            constants=tuple(places),
            sizes=tuple(first),
            later=tuple(later),
            turns=turns_by_class(turns),
            free=tuple(p for p in sorted(kept, key=by_label) if not isinstance(p, Constant | Size | Turn)),
            completed_sizes=completed,
            not_fixed=not_fixed,
            following=following,
            without_norm_scale=without_norm_scale,
            divided=tuple((p.label, moved) for p, scale in passed if (moved := others_of(p, scale, sizes))),
        )

    @functools.cached_property
    def parts(self) -> tuple[Any, ...]:
        """All parts with a role, in the order in which they are undone."""
        turns = (turn for _, turns in self.turns for turn in turns)
        return (*(x.part for x in self.constants), *(x.part for x in self.sizes), *turns)

    @property
    def by_role(self) -> tuple[tuple[Any, ...], ...]:
        """The constants, the sizes and the turns, each in the order in which they are undone."""
        first, last = len(self.constants), len(self.constants) + len(self.sizes)
        return self.parts[:first], self.parts[first:last], self.parts[last:]

    @property
    def acting(self) -> tuple[Any, ...]:
        """All parts, in the order in which they act on a point: turns, sizes, constants, permutations."""
        return (*reversed(self.parts), *self.free)

    @functools.cached_property
    def heads(self) -> tuple[Any, ...]:
        """The turns of heads and of rotary planes, without the turn of the residual stream."""
        return heads.among(self.parts)

    # Trees ------------------------------------------------------------------------------------------------

    @functools.cached_property
    def blocks(self) -> tuple[Block, ...]:
        """Every block that a part changes, or uses without changing it (`Part.passes`)."""
        return tuple(b for p in (*self.parts, *self.free) for b in (*p.blocks, *p.passes))

    @functools.cached_property
    def added(self) -> Mapping[str, float | np.ndarray]:
        """Bound leaf path → what is added to the stored leaf to get its value: 1 for axes that start with `1+`, else 0.

        It is an array of the leaf's shape if only some blocks of the leaf are `1+`.
        """
        by_path: dict[str, list[Block]] = {}
        for b in self.blocks:
            by_path.setdefault(b.path, []).append(b)
        added: dict[str, float | np.ndarray] = {}
        for path, blocks in by_path.items():
            added[path] = float(blocks[0].one_plus)
            if len({b.one_plus for b in blocks}) > 1:
                added[path] = np.zeros(blocks[0].shape)
                for b in sorted(blocks, key=lambda b: b.one_plus):
                    added[path] = b.write(added[path], np.full(b.view_shape, float(b.one_plus)))
        return added

    def values(self, params: Any) -> Arrays:
        """Bound leaves of a point in the computing dtype, with 1 added where the leaf stores its value less one."""
        vectors = self.vectors(params)
        return {p: vectors[p] + added if np.any(added) else vectors[p] for p, added in self.added.items()}

    def vectors(self, tree: Any) -> Arrays:
        """Bound leaves of a tangent or cotangent in the computing dtype. Raises ValueError if some are absent."""
        leaves, dtype = leaves_by_path(tree), real_dtype()
        for block in self.blocks:
            shape = jnp.shape(leaves[block.path]) if block.path in leaves else None
            pairs = zip(reversed(shape or ()), reversed(block.shape), strict=False)
            # A leaf of the tree may be a single number, as preconditioners often store; it stands for all entries.
            if shape is None or len(shape) > len(block.shape) or any(n not in (1, m) for n, m in pairs):
                absent = shape is None
                raise binding_error(
                    "gauges",
                    f"{'no update' if absent else 'an update of another shape'} for '{block.path}'",
                    f"a tree with {', '.join(list(leaves)[:3])}" if absent else f"{shape}",
                    f"{block.shape}, the parameter's",
                    "pass gradients or updates of the very parameters that are passed as params",
                )
            if isinstance(leaves[block.path], jax.ShapeDtypeStruct):
                raise binding_error(
                    "gauges", f"a shape without values for '{block.path}'", "a jax.ShapeDtypeStruct", "an array",
                    "pass arrays; jax.eval_shape(function, tree) computes shapes of results from shapes")
            if jnp.iscomplexobj(leaves[block.path]):  # a cast would drop the imaginary part
                raise binding_error(
                    "gauges", f"a complex update for '{block.path}'", str(jnp.result_type(leaves[block.path])),
                    "real numbers, as the parameter's", "take the real part: jnp.real(update)")
        return {b.path: jnp.broadcast_to(jnp.asarray(leaves[b.path], dtype), b.shape) for b in self.blocks}

    def checked(self, frame: Frame) -> Elements:
        """The elements of a frame. Raises ValueError for a frame that was made with other gauges or on other leaves."""
        labels, expected = frame.elements.keys(), {part.label for part in self.parts}
        if labels == expected:
            return frame.elements
        versions = {label.rpartition(".v")[2].split(" ")[0] for label in labels}
        if versions - {str(VERSION)}:
            found = f"states of version {', '.join(sorted(versions))}"
            problem, remedy = "a state of another version of this library", "start anew by tx.init(params)"
            raise binding_error("gauges", problem, found, f"version {VERSION}", remedy)
        shapes = self.leaves_by_label()
        raise binding_error(
            "gauges",
            "a state of other gauges",
            f"in the state {', '.join(sorted(labels)) or 'none'}",
            f"of the optimizer {', '.join(f'{label} (on {text})' for label, text in shapes.items()) or 'none'}",
            "give the optimizer the gauges that its state was made with, on leaves of those shapes; "
            "or start anew by tx.init(params)",
        )

    def leaves_by_label(self) -> dict[str, str]:
        """Part label → its leaves and their shapes, as messages show them: "up (3, 4), down (4, 3)"."""
        leaves = {p.label: {b.path: b.shape for b in p.blocks} for p in self.parts}
        return {label: ", ".join(f"{path} {n}" for path, n in of_part.items()) for label, of_part in leaves.items()}

    def check_norms(self) -> None:
        """Raises ValueError if a turn uses a norm's scale that no size makes 1. The turn's `push` assumes that it is 1.

        A `rescale` in place of `norm_scale` is not enough: it leaves a negative scale at −1.
        """
        ones = {anchor_key(anchor) for part, anchor, _ in self.sizes if part.is_one_at(anchor)}
        for turn, block in ((t, b) for _, turns in self.turns for t in turns for b in t.passes):
            if anchor_key((block,)) not in ones:
                raise binding_error(
                    name_of(turn), f"the norm's scale '{block.path}' is not divided out", "no norm_scale of it",
                    "the go.norm_scale gauge of that norm",
                    "add it to the list of gauges, in place of any rescale of the same scale")

    def require_first(self, name: str, inside: "Slice", again: bool, remedy: str) -> None:
        """Raises ValueError unless all parts of this slice may be undone before those of a transformation inside.

        The transformation inside, such as a second `quotient`, sees slice points of this slice. A part p of this slice
        and a part q inside may use the same entries only if p has an earlier role in the order constants, sizes, turns.
        This is the order in which one slice that contained both parts would undo them. With another order, what p
        reads would depend on the element of q, and twins would have different slice points.

        Args:
          name: the public function that made the transformation inside.
          inside: the slice of the transformation inside.
          again: whether the transformation inside may have parts of this slice again. At a point of this slice they
            read as the identity.
          remedy: what to write instead.
        """
        for role, parts in enumerate(inside.by_role):
            for p, q in itertools.product(itertools.chain(*self.by_role[role:]), parts):
                pairs = itertools.product((*p.blocks, *p.passes), (*q.blocks, *q.passes))
                shared = [a.path for a, b in pairs if a.path == b.path and overlaps(a, b)]
                if shared and not (again and q in self.parts):
                    raise binding_error(
                        name,
                        f"inside a quotient that moves '{shared[0]}' too",
                        f"{name_of(p)} outside, {name_of(q)} inside",
                        "gauges of different leaves outside and inside; on one leaf, a gauge outside that adds and "
                        "one inside that multiplies or rotates, or one that multiplies and one that rotates",
                        remedy,
                    )
        check_commute([*self.parts, *(q for q in inside.parts if q not in self.parts)])

    # Entering the slice, fixing a point and holding a step --------------------------------------------------

    def enter(self, f: Elements, x: Arrays) -> Undone:
        """The slice point θ̂ = F⁻¹·θ, with the maps between θ and θ̂. Parts without an element in `f` are not undone."""
        undone = []
        for part in self.parts:
            if part.label in f:
                outside, x = x, part.undo(f[part.label], x)
                undone.append(UndonePart(part, f[part.label], outside, x))
        return Undone(x, tuple(undone))

    def act(self, f: Elements, x: Arrays) -> Arrays:
        """f·x: turns act first, then sizes, then constants, and parts without a role last."""
        for part in self.acting:
            x = part.act(f[part.label], x) if part.label in f else x
        return x

    def without_heads(self, f: Elements) -> Elements:
        """F without the rotations of heads. If only the rest of F is undone, heads keep their stored basis."""
        turned = {turn.label for turn in self.heads}
        return {label: e for label, e in f.items() if label not in turned}

    def fix(
        self, x: Arrays, live: Mapping[str, jax.Array], left: Collection[str] = ()
    ) -> tuple[Elements, Arrays]:
        """Moves a point near the slice onto it, along its orbit.

        Args:
          x: the point: the leaves that gauges bind, by path.
          live: label of a size → which channels to fix, (*shape) booleans, as in `Frame`.
          left: labels of constants that stay where they are.

        Returns:
          By label of a `Size`, the element that was undone; and the point on the slice.
        """
        for part, anchor, _ in self.constants:
            if part.label not in (*self.not_fixed, *left):
                # A norm's scale γ that was zero at `init` grows from 0, not from 1. While γ is small, a constant that
                # is divided by γ would be many times the step. So γ counts as zero here, and nothing is divided by it.
                scales = dict(self.divided).get(part.label)
                x = part.undo(part.read(anchor, _masked(x, scales, live) if scales else x), x)
        growth: Elements = {}
        for part, anchor, _ in self.sizes:
            if part.label not in self.not_fixed:
                growth[part.label], _ = part.read(anchor, x, live[part.label], near=True)
                x = part.undo(growth[part.label], x)
        return growth, x

    def hold(self, x: Arrays, u: Arrays) -> tuple[Arrays, dict[Any, Any]]:
        """Removes the part of a step that rotates heads, and the residual stream if its gauge says `hold=True`.

        The end point moves along its orbit alone, so that its function stays the same for steps of any size, and stays
        on the slice. Rotations that change a frozen leaf are not removed.

        Returns:
          The step, and turn → what turned the end point back, see `Turn.hold`.
        """
        backs: dict[Any, Any] = {}
        return self._over_turns(operator.attrgetter("hold"), x, u, self.not_fixed, backs=backs), backs

    def project_turning(self, x: Arrays, u: Arrays, into: Mapping[Any, jax.Array] | None = None) -> Arrays:
        """Removes the part along rotations from a tangent. For `into` see `Turn.project`."""
        return self._over_turns(operator.attrgetter("project"), x, u, into=into)

    def project_turning_dual(self, x: Arrays, g: Arrays) -> Arrays:
        """The transpose of `project_turning`, for a cotangent."""
        for turn_class, turns in reversed(self.turns):
            g = turn_class.project_dual(turns, x, g)
        return g

    def _over_turns(
        self, method: Callable[[Any], Any], x: Arrays, u: Arrays, alone: frozenset[str] = frozenset(), **options: Any
    ) -> Arrays:
        """Applies a method of every class of turns to the turns without a label in `alone`."""
        done: list[jax.Array] = []
        for turn_class, turns in self.turns:
            chosen = [turn for turn in turns if turn.label not in alone]
            paths = sorted({path for turn in chosen for path in changed(turn)})
            # For a class that comes last, XLA computes the point again. Otherwise it would keep a copy of the point in
            # memory while it computes the other classes. No number changes.
            again = {path: x[path] for path in paths} if turn_class.last and done else {}
            if chosen:
                u = method(turn_class)(chosen, x | (recomputed_after(done, again) if again else {}), u, **options)
            done = [u[path] for path in paths]
        return u

    # Gradients that are zero by invariance -------------------------------------------------------------------

    def quiet(self, x: Arrays, g: Arrays, without_constants: bool = True) -> Arrays:
        """A slice gradient with zeros in place of roundoff, where the gradient of every invariant loss is zero.

        It also computes anew the gradients of norms' scales that turns use, see `Size.completed`.

        Args:
          x: the slice point.
          g: the slice gradient.
          without_constants: True sets the part of the gradient along constants to zero. This part is roundoff, unless
            the loss has a penalty on weights.
        """
        for part, _, _ in self.sizes:
            g = part.completed(x, g) if part.label in self.completed_sizes else g
        g = self.centred(g) if without_constants else g
        for _, turns in self.turns:
            for turn in turns:
                g = turn.quiet(g)
        return g

    def centred(self, vector: Arrays) -> Arrays:
        """Subtracts the part along constants from a tangent or cotangent."""
        for part, _, _ in self.constants:
            vector = part.quiet(vector)
        return vector

    def least_signal(self, x: Arrays, gradient: Any) -> jax.Array | None:
        """The absolute value below which an entry of any leaf's gradient is roundoff at the slice point `x`.

        While the output layer is constant over classes, the gradients of all other leaves are zero, up to roundoff. An
        optimizer that divides gradients by their size would turn that roundoff into a full step. The result is 0 if the
        output layer is not constant. It is None if no gauge moves the kernel of an output layer that trains: if
        one is frozen at zero, the gradients of other leaves are no roundoff but come from another output layer.
        """
        leaves = leaves_by_path(gradient)
        trained = [part for part, _, _ in self.constants if part.label not in self.not_fixed]
        sizes = [size for part in trained if (size := part.reference_gradient(x, leaves)) is not None]
        return roundoff(real_dtype()) * jnp.stack(sizes).max() if sizes else None

    def without_roundoff(self, x: Arrays, gradient: Any) -> Any:
        """Sets the entries of a gradient (a whole tree) whose absolute value is below `least_signal` to zero."""
        least = self.least_signal(x, gradient)
        if least is None:
            return gradient
        arrays = {p: jnp.asarray(y) for p, y in leaves_by_path(gradient).items()}  # a leaf may be a Python number
        leaves = {p: y for p, y in arrays.items() if jnp.issubdtype(y.dtype, jnp.floating)}
        kept = {}
        for path, y in leaves.items():
            small = jnp.abs(jnp.asarray(y, least.dtype)) < least  # float8 compares with no other dtype
            kept[path] = jax.lax.select(small, jnp.zeros_like(y), y)
        return with_leaves(gradient, kept)

    # Reading a point --------------------------------------------------------------------------------------

    def read(
        self,
        x: Arrays,
        turning: bool = True,
        reader: Callable[[type[Turn]], Any] = lambda kind: kind.read_all,
    ) -> Frame:
        """The frame of any point. A channel whose anchors are all zero reads as the identity.

        Args:
          x: the point: the leaves that gauges bind, by path.
          turning: whether to read rotations. If False, the result has no elements of turns.
          reader: takes a class of turns, and returns the function (turns, x) ↦ elements that reads turns of this class,
            or None to leave them out.
        """
        f: Elements = {}
        for part, anchor, _ in self.constants:
            f[part.label] = part.read(anchor, x)
            x = part.undo(f[part.label], x)
        sizes, live, x = self._read_sizes(x)
        f |= sizes
        for turn_class, turns in self.turns if turning else ():
            method = reader(turn_class)
            if method is None:
                continue
            read = dict(zip(turns, method(turns, x), strict=True))
            f |= {turn.label: e for turn, e in read.items()}
            # Turns that are read later may have rows that these turns move: the rows of heads, for example, lie in the
            # basis of the residual stream. These turns are therefore undone first.
            rest = [turn for _, others in self.turns for turn in others if turn.label not in f]
            for turn in turns:
                x = turn.undo(read[turn], x) if any(moves(turn, other.blocks) for other in rest) else x
        return Frame(f, live)

    def _read_sizes(self, x: Arrays) -> tuple[Elements, dict[str, jax.Array], Arrays]:
        """The elements of sizes, the live channels as in `Frame`, and the point after the sizes were undone.

        In this point, every channel that could be read is on the slice. A channel whose anchors are all zero cannot be
        read, so that nothing gives its entries in other blocks the same values in twins. They are set to zero: what is
        read from the point later is then the same for twins.
        """
        f = {part.label: part.identity() for part, _, _ in self.sizes}
        known = {part.label: jnp.zeros(part.shape, bool) for part, _, _ in self.sizes}
        live: dict[str, jax.Array] = {}
        for part, anchor, others in self.sizes + self.later:
            # An entry that another size moves counts as zero until that size's channel has been read and undone.
            e, new = part.read(anchor, _masked(x, others, known), ~known[part.label], near=False)
            live.setdefault(part.label, new)
            f[part.label], known[part.label] = part.compose(f[part.label], e), known[part.label] | new
            x = part.undo(e, x)
        # Every anchor is read again with the entries that were left out above, because `fix` reads all entries.
        for part, anchor, _ in self.sizes:
            e, _ = part.read(anchor, x, live[part.label], near=True)
            f[part.label], x = part.compose(f[part.label], e), part.undo(e, x)
        return f, live, _masked(x, [(part, b) for part, _, _ in self.sizes for b in part.blocks], known)

    def seen(self, x: Arrays) -> Arrays:
        """A point after its constants and sizes were undone, with zeros in channels that could not be read."""
        for part, anchor, _ in self.constants:
            x = part.undo(part.read(anchor, x), x)
        return self._read_sizes(x)[2]

    # Vertical and horizontal ------------------------------------------------------------------------------

    def unturned_slice_point(self, params: Any) -> tuple[Frame, Undone]:
        """The frame without turns, and the point after its constants and sizes were undone.

        Heads and the residual stream keep the basis in which they are stored.
        """
        values = self.values(params)
        frame = self.read(values, turning=False)
        return frame, self.enter(frame.elements, values)

    def horizontal_at(self, params: Any, vector: Any, dual: bool = False) -> Arrays:
        """The horizontal part of a tangent or cotangent at any point.

        A tangent is moved to the slice, projected there by `horizontal`, and moved back. A cotangent (`dual`) is mapped
        by the transpose of this: the product of the result with every vertical tangent is zero. Returns bound leaves.
        """
        (_, live, _), entered = self.unturned_slice_point(params)
        values, vectors, point = self.values(params), self.vectors(vector), entered.point

        out: Arrays
        if dual:
            inside = jax.vjp(entered.leave, point)[1](vectors)[0]
            across = jax.vjp(lambda x: self._fixed(x, live), point)[1](self.project_turning_dual(point, inside))[0]
            out = jax.vjp(entered.enter, values)[1](across)[0]
        else:
            inside = jax.jvp(entered.enter, (values,), (vectors,))[1]
            out = jax.jvp(entered.leave, (point,), (self.horizontal(point, inside, live),))[1]
        return out

    def horizontal(self, x: Arrays, u: Arrays, live: Mapping[str, jax.Array]) -> Arrays:
        """The horizontal part of a tangent at a slice point: the derivative of `fix`, then `project_turning`."""
        return self.project_turning(x, jax.jvp(lambda y: self._fixed(y, live), (x,), (u,))[1])

    def _fixed(self, x: Arrays, live: Mapping[str, jax.Array]) -> Arrays:
        """Fixes a point by differentiable operations. Unlike `fix`, it does not skip the parts in `not_fixed`."""
        for part, anchor, _ in self.constants:
            x = part.act(part.inverse(part.read(anchor, x)), x)
        for part, anchor, _ in self.sizes:
            e, _ = part.read(anchor, x, live[part.label], near=True)
            x = part.act(part.inverse(e), x)
        return x


def _masked(x: Arrays, moved: Iterable[tuple[Any, Block]], known: Mapping[str, jax.Array]) -> Arrays:
    """A point with zeros at all entries that a part moves in channels that are not `known`.

    `moved` has pairs of a part and a block that it moves.
    """
    out = dict(x)
    for part, b in moved:
        out[b.path] = out[b.path] * b.spread(part.named, known[part.label].astype(real_dtype()), elsewhere=1.0)
    return out
