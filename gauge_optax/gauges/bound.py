"""`Bound`: a list of gauges on one tree. It is what `go.bind` returns, and what everything inside the library works on.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax

from gauge_optax.binding import Block, leaf_shape, leaves_by_path, with_leaves
from gauge_optax.binding.bind import require_no_absent_leaf
from gauge_optax.binding.leaves import shown_and_hidden
from gauge_optax.binding.paths import match
from gauge_optax.errors import binding_error, kind_of
from gauge_optax.gauges.by_action import UserCopy
from gauge_optax.gauges.copies import Copy
from gauge_optax.linalg import near_power_of_two, real_dtype, safe_divide, unit_and_size
from gauge_optax.parts.constants import ReadShift
from gauge_optax.parts.part import Arrays, Part, changed, name_of
from gauge_optax.parts.stream import Stream
from gauge_optax.slice import Elements, Frame, Slice
from gauge_optax.transformation import require_key
from gauge_optax.xla import varying_together

Params = TypeVar("Params")


@dataclasses.dataclass(frozen=True, repr=False)
class Bound:
    """Gauges that are bound to a tree. It holds no array; its methods take parameters of that tree.

    Attributes:
      gauges: the gauges, in the order of the list.
      copies: per gauge, its copies on the tree: one per layer, or per other capture of its paths.
      slice: the parts of the gauges (small groups, one or two per copy), sorted. It lacks those that optimizers cannot
        use, see `whole`.
      single: True if `go.bind` got one gauge. An element is then that gauge's own; otherwise it is a tuple with one
        element per gauge.
    """

    gauges: tuple[Any, ...]
    copies: tuple[tuple[Copy, ...], ...]
    slice: Slice
    single: bool = False

    # What a user calls ------------------------------------------------------------------------------------

    def act(self, element: Any, params: Params) -> Params:
        """The function-preserving move g·θ.

        Whatever the list's order, rotations of all gauges act first, then scales, then shifts.

        Args:
          element: g, in the form that `read` returns: one gauge's element, or a tuple with one element per gauge.
          params: θ.

        Returns:
          Parameters like `params`, every leaf in its dtype.
        """
        require_nonzero_norms("act", self.whole, leaves_by_path(params))
        return self.stored(self.whole.act(self.elements(element), self.whole.values(params)), params)

    def read(self, params: Any) -> Any:
        """The frame of a point: the element F with θ = F·θ̂, where θ̂ is the slice point.

        Args:
          params: θ (values are read).
        """
        require_nonzero_norms("read", self.whole, leaves_by_path(params))
        return self.public(self.whole.read(self.whole.values(params)).elements)

    def slice_point(self, params: Params) -> Params:
        """The slice point θ̂ = F⁻¹·θ: weights of the same function that all twins of θ have in common.

        Args:
          params: θ (values are read).

        Returns:
          Parameters like `params`.
        """
        require_nonzero_norms("slice_point", self.whole, leaves_by_path(params))
        x = self.whole.values(params)
        return self.stored(self.whole.enter(self.whole.read(x).elements, x).point, params)

    def random_twin(self, key: jax.Array, params: Params, scale: float = 1.0) -> Params:
        """Weights of the same function, moved by a random element.

        Args:
          key: a PRNG key.
          params: the weights.
          scale: size of the move: 1 moves log-sizes by up to 1 and takes rotations from the Haar measure.
        """
        require_key("random_twin", key)
        if self.single:
            return self.act(self.gauges[0].sample(key, params, scale), params)
        keys = jax.random.split(key, max(1, len(self.gauges)))
        return self.act(tuple(g.sample(k, params, scale) for g, k in zip(self.gauges, keys, strict=False)), params)

    @property
    def dim(self) -> int:
        """The dimension of the orbit: how many independent directions of weights the gauges' moves have."""
        return sum(copy.dim for copies in self.copies for copy in copies)

    def __repr__(self) -> str:
        rows = [("gauge", "leaves", "copies", "directions")]
        for gauge, copies in zip(self.gauges, self.copies, strict=True):
            paths = list(dict.fromkeys(path for copy in copies for part in copy.parts for path in changed(part)))
            leaves = ", ".join(paths[:2]) + (f", … ({len(paths)})" if len(paths) > 2 else "")
            rows.append((gauge.name, leaves, str(len(copies)), str(sum(copy.dim for copy in copies))))
        rows.append(("all", f"{len(self.whole.added)} leaves", "", str(self.dim)))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return "\n".join("  ".join(x.ljust(n) for x, n in zip(row, widths, strict=True)).rstrip() for row in rows)

    def asymmetry(self, params: Any, grads: Any) -> tuple[dict[str, jax.Array], ...]:
        """How far each gauge is from being a symmetry of the loss, judged from one gradient.

        If a gauge keeps the loss, the gradient's product with every direction of the orbit is zero. For a shift, these
        products are sums of the gradient over `vocab`; for a scale they are ⟨up, g_up⟩ − p·⟨down, g_down⟩. The result
        is the norm of all products of a gauge, divided by the root mean square of this norm for random gradients. In
        every leaf, the random gradients are about as large as the given gradient.

        Args:
          params: θ, at which the gradient was taken.
          grads: the gradient, a tree like `params`.

        Returns:
          Per gauge, a dict from copies ("i=0") to numbers: about roundoff for a symmetry, 0.1 to 1 for a gauge that is
          none.
        """
        return tuple(_asymmetry(gauge, params, grads) for gauge in self.gauges)

    # Elements ---------------------------------------------------------------------------------------------

    @functools.cached_property
    def whole(self) -> Slice:
        """The slice with all parts of the gauges.

        The attribute `slice` lacks two kinds of parts, which optimizers cannot use: those that would change a frozen
        leaf whenever another leaf takes a step, and rotations of the residual stream past a norm whose scale `fix`
        cannot keep at 1.
        """
        parts = [part for copies in self.copies for copy in copies for part in copy.parts]
        kept = {part.label for part in self.slice.acting}
        return self.slice if kept == {part.label for part in parts} else Slice.of(parts)

    def elements(self, element: Any) -> Elements:
        """Splits an element, in the form that `read` returns, into elements of the parts, by label: the same move.

        Raises ValueError for an element of other gauges, or of other shapes.
        """
        out: Elements = {}
        alone = self.single or (len(self.gauges) == 1 and isinstance(element, Mapping))
        values = (element,) if alone else element
        if not isinstance(values, tuple | list) or len(values) != len(self.gauges):
            raise binding_error(
                "gauges", "an element of another list of gauges",
                kind_of(values) + (f" of {len(values)}" if isinstance(values, tuple | list) else ""),
                f"a tuple of {len(self.gauges)}, one element per gauge", _REMEDY)
        for gauge, copies, value in zip(self.gauges, self.copies, values, strict=True):
            _require_element(gauge, copies, value)
            for copy, own in zip(copies, gauge._split(copies, value), strict=True):
                out |= {part.label: e for part, e in zip(copy.parts, copy.split(own), strict=True)}
        return out

    def public(self, elements: Mapping[str, Any]) -> Any:
        """Joins elements of the parts, by label, to an element in the form that `read` returns.

        A part without an element gets the identity.
        """
        return self.by_gauge(lambda copy: copy.join(_of_copy(copy, elements)))

    def coordinates(self, elements: Mapping[str, Any]) -> Any:
        """Per gauge, the coordinates of a point on its orbit, from the elements of its frame.

        The change of the coordinates along a run is the drift.
        """
        return self.by_gauge(lambda copy: copy.coordinate(_of_copy(copy, elements)))

    def by_gauge(self, value: Callable[[Copy], Any]) -> Any:
        """Calls a function for every copy and returns the results in the structure of a public element.

        A copy for which the function returns None is left out.
        """
        pairs = zip(self.gauges, self.copies, strict=True)
        values = tuple(gauge._join(copies, [value(copy) for copy in copies]) for gauge, copies in pairs)
        return values[0] if self.single else values

    def stored(self, x: Arrays, params: Params) -> Params:
        """The tree `params` with the values `x` of bound leaves, in the dtypes of the leaves.

        From leaves that store their value less one (`1+`), the one is subtracted.
        """
        leaves, added = leaves_by_path(params), self.whole.added
        values = {p: y - added[p] if np.any(added[p]) else y for p, y in x.items()}
        return with_leaves(params, {p: y.astype(jnp.result_type(leaves[p])) for p, y in values.items()})


_REMEDY = "take an element from identity(params), read(params) or sample(key, params) of the same gauges"


def _shapes(tree: Any) -> dict[str, tuple[int, ...]]:
    return {jax.tree_util.keystr(keys): np.shape(x) for keys, x in jax.tree.leaves_with_path(tree)}


@functools.lru_cache(maxsize=64)  # without a cache, every `act` outside `jit` would trace the identity anew
def _shapes_of_identity(gauge: Any, copies: tuple[Copy, ...]) -> dict[str, tuple[int, ...]]:
    return _shapes(jax.eval_shape(lambda: gauge._join(copies, [copy.identity() for copy in copies])))


def _require_element(gauge: Any, copies: tuple[Copy, ...], element: Any) -> None:
    """Raises ValueError unless the element has the keys and shapes of the gauge's identity.

    The element of a user's own gauge is not checked, because it may have any form.
    """
    if any(isinstance(copy, UserCopy) for copy in copies):
        return
    found, expected = _shapes(element), _shapes_of_identity(gauge, copies)
    if found != expected:
        keys = [key for key in {**expected, **found} if found.get(key) != expected.get(key)]
        wrong, right = (
            ", ".join(f"{key or 'an array'} {own[key]}" if key in own else f"no {key}" for key in keys[:3])
            for own in (found, expected)
        )
        raise binding_error(gauge.name, "an element of other copies or shapes", wrong, right, _REMEDY)


def _of_copy(copy: Copy, elements: Mapping[str, Any]) -> list[Any]:
    return [elements[p.label] if p.label in elements else p.identity() for p in copy.parts]


def bound(gauges: Sequence[Any], params: Any, frozen: frozenset[str] = frozenset(), single: bool = False) -> Bound:
    """Binds gauges to a tree.

    Args:
      gauges: the gauges of a product.
      params: the tree; shapes are enough.
      frozen: paths of leaves that never change.
      single: see `Bound`.

    Raises:
      ValueError: a gauge whose paths or axes do not fit the tree, or gauges that do not commute.
    """
    _require_unpacked(gauges, params)
    shown, hidden = shown_and_hidden(params)
    leaves = tuple((path, leaf_shape(leaf), getattr(leaf, "dtype", None)) for path, leaf in shown.items())
    try:
        if all(gauge._by_paths for gauge in gauges):
            return _by_shapes(tuple(gauges), leaves, hidden, frozen, single)
        return _sliced(tuple(gauges), tuple(gauge._copies(params) for gauge in gauges), leaves, frozen, single)
    except ValueError:
        for gauge in gauges:  # a leaf that is None is in no dict of leaves; it may explain the error
            require_no_absent_leaf(gauge.name, getattr(gauge, "specs", ()), params)
        raise


def slice_of_frame(frame: Frame, params: Any) -> Slice:
    """The slice that the frame of an optimizer state belongs to.

    A state holds the labels of parts, but not the parts. This function looks them up among all parts that were bound in
    this process. A label contains a checksum of all that its part binds, and therefore stands for one part.

    Args:
      frame: the frame.
      params: a tree that it belongs to.

    Raises:
      ValueError: a label of a part that was not bound in this process.
    """
    unknown = [label for label in frame.elements if label not in _PARTS]
    if unknown:
        raise binding_error(
            "gauges", f"a frame of gauges that are not known yet, '{unknown[0]}'", "a restored state",
            "gauges that were bound to this tree", "call jax.eval_shape(tx.init, params) first"
        )
    dtypes = {path: getattr(leaf, "dtype", None) for path, leaf in leaves_by_path(params).items()}
    known = tuple((path, dtype) for path, dtype in dtypes.items() if dtype is not None)
    return _of_labels(tuple(frame.elements), known, frozenset(frame.frozen))


def _asymmetry(gauge: Any, params: Any, grads: Any) -> dict[str, jax.Array]:
    b = gauge._bound(params)
    s, (copies,) = b.whole, b.copies
    require_nonzero_norms("asymmetry", s, leaves_by_path(params))
    # The squares of gradients of 1e-20 or 1e20 are out of the range of float32. The asymmetry does not depend on the
    # size of gradients, so that they are divided by the largest entry.
    real = [y for y in map(jnp.asarray, leaves_by_path(grads).values()) if jnp.issubdtype(y.dtype, jnp.floating)]
    real = [jnp.asarray(y, real_dtype()) for y in real]
    most = jnp.max(jnp.stack([jnp.max(jnp.abs(y), initial=0.0) for y in real]))
    x, g = s.values(params), {path: safe_divide(y, most) for path, y in s.vectors(grads).items()}
    pairings = _by_generators(gauge, b, params, x) or _by_projection(s, copies, params, grads)

    def sizes(covector: Arrays) -> dict[str, jax.Array]:
        return {key: _norm(jax.tree.leaves(of_copy)) for key, of_copy in pairings(covector).items()}

    # `norms` has the root mean square that random gradients get in every leaf. It is that of the given gradient there,
    # without the gradient's part along constants. If it is so small that it may be roundoff, it is raised to
    # `_LEAST_SHARE` of the root mean square over all leaves. If it is zero, it becomes that of all leaves.
    entries = sum(y.size for y in real)
    total = jnp.sqrt(sum((jnp.sum(jnp.square(safe_divide(y, most))) for y in real), jnp.zeros(())) / entries)
    across = {path: jnp.sqrt(jnp.mean(jnp.square(y))) for path, y in s.centred(g).items()}
    norms = {p: jnp.where(y > 0, jnp.maximum(y, _LEAST_SHARE * total), total) for p, y in across.items()}

    def nth(number: jax.Array) -> dict[str, jax.Array]:
        """The norm of all products, per copy: of the gradient for number 0, else of a random gradient."""
        keys = jax.random.split(jax.random.fold_in(jax.random.key(0), number), len(g))
        drawn = {p: jax.random.normal(k, g[p].shape, g[p].dtype) for p, k in zip(sorted(g), keys, strict=True)}
        return sizes({p: jnp.where(number == 0, y, norms[p] * drawn[p]) for p, y in g.items()})

    # `map` takes the gradients one by one, so that one program is compiled and one random gradient is in memory.
    found = jax.lax.map(nth, jnp.arange(1 + _DRAWS))
    # Products of weights of 1e-20 have squares out of the range of float32, too.
    of_random = {key: unit_and_size(y[1:], 0) for key, y in found.items()}
    usual = {key: size[0] * jnp.sqrt(jnp.mean(jnp.square(unit))) for key, (unit, size) in of_random.items()}
    return {key: safe_divide(y[0], usual[key]) for key, y in found.items()}


def _norm(arrays: Sequence[jax.Array]) -> jax.Array:
    """The root of the sum of squares over all arrays, whose squares may be out of the range of their dtype."""
    arrays = [jnp.asarray(y, real_dtype()) for y in arrays]
    most = [jnp.max(jnp.abs(y), initial=0.0) for y in arrays]
    unit = near_power_of_two(jnp.max(jnp.stack([jnp.zeros(()), *most])))
    return unit * jnp.sqrt(sum((jnp.sum(jnp.square(y / unit)) for y in arrays), jnp.zeros(())))


def _by_generators(gauge: Any, b: Bound, params: Any, x: Arrays) -> Callable[[Arrays], dict[str, Any]] | None:
    """A function that returns a cotangent's products with the directions along the orbit, per copy.

    It is None for a gauge without coordinates (`algebra`).
    """
    try:
        zero = gauge.algebra(params)
    except ValueError:  # a user's gauge without `algebra`
        return None
    if not isinstance(zero, dict):
        return None
    if not zero or not any(y.size for y in jax.tree.leaves(zero)):
        return lambda covector: {}

    def moved(coordinates: Any) -> Arrays:
        return b.whole.act(b.elements(gauge.exponential(coordinates, params, near=True)), x)

    # Inside `shard_map`, JAX sums the derivative by a constant over devices. So `zero` is marked as varying, like `x`.
    transposed = jax.vjp(moved, varying_together(zero, x)[0])[1]
    return lambda covector: transposed(covector)[0]


def _by_projection(
    s: Slice, copies: Sequence[Copy], params: Any, grads: Any
) -> Callable[[Arrays], dict[str, Any]]:
    """A function that returns the vertical part of a cotangent, per copy. It needs no coordinates, only the slice."""
    paths = {copy.key: dict.fromkeys(p for part in copy.parts for p in changed(part)) for copy in copies}

    def vertical(covector: Arrays) -> dict[str, Any]:
        across = s.horizontal_at(params, with_leaves(grads, covector), dual=True)
        return {key: {p: covector[p] - across[p] for p in of_copy} for key, of_copy in paths.items()}

    return vertical


_DRAWS = 4
# The random gradients of `_asymmetry` have, in every leaf, the root mean square of the given gradient there. Where this
# is less than `_LEAST_SHARE` of the root mean square over all leaves, it may be roundoff, and is raised to that share.
_LEAST_SHARE = 0.01
_Leaves = tuple[tuple[str, tuple[int, ...], Any], ...]


@functools.lru_cache(maxsize=64)  # while an update is traced, it asks for the same slice several times
def _by_shapes(
    gauges: tuple[Any, ...], leaves: _Leaves, hidden: tuple[str, ...], frozen: frozenset[str], single: bool
) -> Bound:
    """Does what `bound` does, with a cache, for gauges whose copies depend on paths, shapes and dtypes alone."""
    tree = {path: 0.0 if dtype is None else jax.ShapeDtypeStruct(shape, dtype) for path, shape, dtype in leaves}
    masked = dict.fromkeys(hidden, optax.MaskedNode())
    return _sliced(gauges, tuple(gauge._copies(tree | masked) for gauge in gauges), leaves, frozen, single)


_PARTS: dict[str, Part[Any]] = {}  # by label; only `slice_of_frame` reads it


@functools.lru_cache(maxsize=64)
def _of_labels(labels: tuple[str, ...], dtypes: tuple[tuple[str, Any], ...], frozen: frozenset[str]) -> Slice:
    return Slice.of([_PARTS[label] for label in labels], dict(dtypes), frozen)


@functools.lru_cache(maxsize=64)
def _sliced(
    gauges: tuple[Any, ...],
    copies: tuple[tuple[Copy, ...], ...],
    leaves: _Leaves,
    frozen: frozenset[str],
    single: bool,
) -> Bound:
    parts = [part for group in copies for copy in group for part in copy.parts]
    dtypes = {path: dtype for path, _, dtype in leaves if dtype is not None}
    s = Slice.of(parts, dtypes, frozen)
    _PARTS.update({part.label: part for part in s.parts})
    return Bound(gauges, copies, s, single)


def _require_unpacked(gauges: Sequence[Any], params: Any) -> None:
    """Raises ValueError if a gauge binds a leaf that `orbit.pack` made, which lacks rows that the gauge would move."""
    nodes = jax.tree.leaves(params, is_leaf=lambda node: hasattr(node, "packed_path"))
    paths = dict.fromkeys(node.packed_path for node in nodes if hasattr(node, "packed_path"))
    for gauge, path in itertools.product(gauges, paths):
        if any(match(gauge.name, spec.pattern, path) is not None for spec in getattr(gauge, "specs", ())):
            raise binding_error(
                gauge.name, f"binds the packed leaf '{path}'", "a leaf without its constant rows", "whole leaves",
                "take this gauge out of the list for packed trees; or pass go.orbit.unpack(packed)")


@functools.singledispatch
def divides_by(part: Part[Any]) -> tuple[Block, ...]:
    """The blocks by which `act` of the part divides: norms' scales, which must therefore not be zero."""
    return ()


@divides_by.register
def _norms_before_readers(part: Stream) -> tuple[Block, ...]:
    return part.passes


@divides_by.register
def _norm_before_kernels(part: ReadShift) -> tuple[Block, ...]:
    return part.scale


def require_nonzero_norms(name: str, s: Slice, leaves: Mapping[str, Any]) -> None:
    """Raises ValueError if a norm's scale has a zero and a part, such as a rotation of the stream, divides by it.

    Args:
      name: the name of the public function, for messages.
      s: the slice.
      leaves: the parameters by path. Tracers are not checked, because they have no values.
    """
    for block in dict.fromkeys(block for part in s.parts for block in divides_by(part)):
        scale = leaves[block.path]
        # This process has neither the values of a tracer nor those on devices of other processes.
        if isinstance(scale, jax.core.Tracer) or not getattr(scale, "is_fully_addressable", True):
            continue
        if not np.all(np.asarray(block.view(scale)) + block.one_plus):
            raise binding_error(
                name, f"a norm that hides a channel, '{block.path}'", "a scale of zero", "scales that are not zero",
                "take residual_rotation and norm_read_shift out of the list, or give the channel a small scale",
            )


def require_readings_without_turns(name: str, s: Slice) -> None:
    """Raises ValueError if a size is read from kernels behind a norm's scale γ that no gauge brings to 1.

    A rotation R of the residual stream moves such a kernel W to γ⁻¹·Rᵀ·γ·W, whose columns have other norms unless γ is
    1. What is read from these norms would then differ between twins, and so would their slice points.

    Args:
      name: the name of the public function, for messages.
      s: the slice.
    """
    for turn, path in s.without_norm_scale:
        behind = {block.path for scale, readers in turn.scales if scale.path == path for block in readers}
        for part, anchor, _ in s.sizes:
            if found := [block.path for block in anchor if block.path in behind]:
                raise binding_error(
                    name, f"no norm_scale for the scale '{path}' in front of '{found[0]}'",
                    f"{name_of(turn)} rotates the input of '{found[0]}', whose norm {name_of(part)} depends on",
                    f"a go.norm_scale of '{path}' in the list",
                    f"add go.norm_scale of '{path}'; if scale_invariant binds '{path}', bind '{found[0]}' there",
                )
