"""Axes strings that say which entries of a leaf form one weight vector (a neuron, a head, a whole layer).

Named axes count vectors, and `_` marks the axes that one vector spans. An axis name may have different lengths in two
leaves, unlike in the blocks of a gauge: vectors of two leaves have nothing in common.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from gauge_optax.binding import Axes, Block, BlockSpec, bind, block_specs, frozen_sizes, leaves_by_path, overlap
from gauge_optax.binding.axes import parse_axes
from gauge_optax.binding.specs import check_specs
from gauge_optax.errors import binding_error
from gauge_optax.linalg import real_dtype
from gauge_optax.transformation import in_dtype_of, updates_at

Leaves = Mapping[str, Any]
"""Leaves by path."""

Specs = tuple[tuple[BlockSpec, tuple[tuple[str, int], ...]], ...]
"""Per axes string that the user wrote: the parsed string, and the user's `sizes` of the axis names in it."""


@dataclasses.dataclass(frozen=True)
class Selection:
    """All vectors that one axes string selects from one leaf.

    Attributes:
      block: the leaf, and where in it the vectors are stored.
      pattern: the path pattern that matched the leaf.
      axes: the axes of `view` that one vector spans.
      length: the number of entries of one vector.
    """

    block: Block
    pattern: str
    axes: tuple[int, ...]
    length: int

    def view(self, leaves: Leaves) -> jax.Array:
        """Returns the selected entries of updates or gradients, in the computing dtype."""
        return self.block.view(jnp.asarray(leaves[self.block.path], real_dtype()))

    def value(self, leaves: Leaves) -> jax.Array:
        """Returns the selected weights: the stored numbers, plus 1 if the axes string begins with `1+`."""
        return self.view(leaves) + 1.0 if self.block.one_plus else self.view(leaves)

    def norm(self, leaves: Leaves) -> jax.Array:
        """Returns the norm of every vector, shaped like the named axes."""
        return jnp.sqrt(jnp.sum(jnp.square(self.value(leaves)), self.axes))

    def spread(self, x: Any) -> jax.Array:
        """Reshapes an array with one number per vector to broadcast against `view`; a scalar stays a scalar."""
        shape = [1 if k in self.axes else n for k, n in enumerate(self.block.view_shape)]
        return x.reshape(shape) if jnp.ndim(x) else jnp.asarray(x, real_dtype())


def parse(name: str, argument: str, axes: Mapping[str, Axes], sizes: Mapping[str, int] | None) -> Specs:
    """Parses the user's axes strings and checks them as far as possible without a tree.

    Args:
      name: name of the transformation, for errors.
      argument: the name of its argument `axes`, for errors.
      axes: path → axes string, or a tuple of them for ranges of a leaf.
      sizes: axis name → length, for axes whose lengths do not follow from a leaf's shape; None for {}.

    Returns:
      Per axes string: the parsed string, and the entries of `sizes` that it contains.

    Raises:
      ValueError: malformed axes; a name in `sizes` that no axes string contains.
    """
    if not isinstance(axes, Mapping) or not axes:
        block_specs(name, argument, axes)  # raises
    # One string at a time, because `block_specs` requires that all strings of a call have the same names.
    listed = [(p, x if isinstance(x, tuple) and x else (x,)) for p, x in axes.items()]
    specs = [spec for pattern, own in listed for one in own for spec in block_specs(name, argument, {pattern: one})]
    lengths = frozen_sizes(name, sizes)
    check_specs(name, specs, lengths, joined=True, partial=(argument,))  # only that `sizes` has no unknown name
    names = [{part.name for part in parse_axes(name, spec.pattern, spec.axes).items} for spec in specs]
    return tuple((spec, tuple(n for n in lengths if n[0] in own)) for spec, own in zip(specs, names, strict=True))


def resolve(name: str, specs: Specs, tree: Any, kept: Any = None) -> list[Selection]:
    """Resolves axes strings on a tree.

    Args:
      name: name of the transformation, for errors.
      specs: the result of `parse`.
      tree: the parameters.
      kept: numbers per vector in a state, as `by_axes` returns them; None for no check.

    Returns:
      One selection per axes string and leaf that it matches. The selections of one leaf are adjacent, in the order of
      `specs`.

    Raises:
      ValueError: an axes string that matches no leaf; a leaf that `optax.MaskedNode` hides; ranks or lengths that do
        not fit; an entry that two axes strings select; a state (`kept`) that was made for other vectors.
    """
    by_path: dict[str, list[Selection]] = {}
    for spec, sizes in specs:
        for block in (copy.blocks[0] for copy in bind(name, (spec,), sizes, tree, apart=True)):
            on_leaf = by_path.setdefault(block.path, [])
            for other in on_leaf:
                if overlap(block, other.block):
                    raise binding_error(
                        name, f"an entry in two vectors of '{block.path}'",
                        f"\"{other.block.axes}\" and \"{block.axes}\"", "every entry of a leaf in one vector",
                        "drop one, or select different entries with 'name=3' or 'name=0:4'",
                    )
            axes = tuple(k for k, label in enumerate(block.labels) if label == "_")
            length = math.prod(block.view_shape[k] for k in axes)
            on_leaf.append(Selection(block, spec.pattern, axes, length))
    selections = [selection for on_leaf in by_path.values() for selection in on_leaf]
    if kept is not None:
        _require_same(name, selections, kept)
    return selections


def moved(
    name: str, selections: Sequence[Selection], rule: Callable[..., Sequence[Any]], updates: Any, params: Any,
    *kept: Any,
) -> tuple[Any, ...]:
    """Calls a function, `rule`, on the vectors of each selection, and puts its results into the updates.

    All transformations of weight vectors compute their steps by it.

    Args:
      name: name of the transformation, for errors.
      selections: the vectors, from `resolve`.
      rule: (selection, weights, updates, *numbers per vector) → (new updates, *new numbers per vector). Weights and
        updates are shaped like `selection.view`, numbers per vector like the named axes.
      updates: the updates that come in.
      params: the parameters.
      kept: numbers per vector in a state, as `by_axes` returns them; one argument of `rule` each.

    Returns:
      The updates with the vectors' entries replaced, in the wider dtype of updates and parameters; then the new numbers
      per vector.
    """
    leaves, tangents = leaves_by_path(params), updates_at(name, (x.block.path for x in selections), updates, params)
    changed = dict[str, jax.Array]()
    after: list[Sequence[Any]] = []
    for x in selections:
        step, *numbers = rule(x, x.value(leaves), x.view(tangents), *(own[x.block.path][x.block.axes] for own in kept))
        leaf = changed.get(x.block.path, jnp.asarray(tangents[x.block.path], real_dtype()))
        changed[x.block.path] = x.block.write(leaf, step)
        after.append(numbers)
    return in_dtype_of(updates, changed, params), *(by_axes(selections, column) for column in zip(*after, strict=True))


def by_axes(selections: Sequence[Selection], arrays: Sequence[Any]) -> dict[str, dict[str, Any]]:
    """Returns leaf path → axes string → array, from one array per selection."""
    kept: dict[str, dict[str, Any]] = {}
    for selection, array in zip(selections, arrays, strict=True):
        kept.setdefault(selection.block.path, {})[selection.block.axes] = array
    return kept


def _require_same(name: str, selections: Sequence[Selection], kept: Any) -> None:
    """Raises ValueError if a state was made for other vectors.

    It compares axes strings too, because the shapes of a square kernel's arrays cannot tell rows from columns.
    """
    named = [tuple(n for k, n in enumerate(x.block.view_shape) if k not in x.axes) for x in selections]
    expected, found = by_axes(selections, named), jax.tree.map(jnp.shape, kept)
    if found != expected:
        found = found if isinstance(found, Mapping) else {"": found}
        path = next(p for p in {**expected, **found} if found.get(p) != expected.get(p))
        raise binding_error(
            name, f"a state that was made for other vectors, at '{path}'", f"shapes {found.get(path, 'of no vectors')}",
            f"shapes {expected.get(path, 'of no vectors')}",
            "write state = tx.init(params), or give the axes that it was made with",
        )


class Clock(NamedTuple):
    """What the counters of a state say about one step around an optimizer with a learning rate η.

    A step whose rate is zero says nothing about the length of updates in units of the rate: averages of it wait.

    Attributes:
      rate: η.
      inverse: 1/η; 0 for a rate of zero.
      tracked: the number of steps so far whose rate was not zero, with this one.
      memory: β, the decay of averages; 1 for a rate of zero.
      correction: 1 − β^tracked, by which an average that began at zero is divided.
    """

    rate: jax.Array
    inverse: jax.Array
    tracked: jax.Array
    memory: jax.Array
    correction: jax.Array

    @classmethod
    def read(cls, state: Any, learning_rate: optax.ScalarOrSchedule, beta: float | jax.Array) -> "Clock":
        """Reads the fields `count` and `tracked` of a state."""
        rate = at(learning_rate, state.count)
        moving = rate != 0
        tracked = state.tracked + moving.astype(jnp.int32)
        inverse = jnp.where(moving, 1.0 / jnp.where(moving, rate, 1.0), 0.0)
        correction = 1.0 - jnp.asarray(beta, real_dtype()) ** jnp.maximum(tracked, 1)
        return cls(rate, inverse, tracked, jnp.where(moving, beta, 1.0), correction)


def rounding(selection: Selection, updates: Any) -> float:
    """Returns the share of its length by which rounding can turn an update, twice a machine epsilon.

    The epsilon is that of the coarser of two dtypes: that of the update and that of the computation.
    """
    dtypes = leaves_by_path(updates)[selection.block.path].dtype, real_dtype()
    return 2.0 * max(float(jnp.finfo(dtype).eps) for dtype in dtypes)


def at(value: optax.ScalarOrSchedule, count: Any) -> jax.Array:
    """Returns a number or the value of a schedule, cast to the computing dtype: schedules may return float32 under x64.
    """
    return jnp.asarray(value(count) if callable(value) else value, real_dtype())
