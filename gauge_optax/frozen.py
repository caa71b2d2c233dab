"""Finds the leaves that an Optax transformation never changes, whatever the gradients are, from its jaxpr.

Optax freezes leaves in many ways: `set_to_zero` in a partition, `freeze`, `selective_transform`, a learning rate of
zero, a mask in `jnp.where`. In all of them the update is zero by construction. One abstract run of the jaxpr is
therefore enough, in which every array is either unknown or known to be one number everywhere, such as zero or True.
"""

import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gauge_optax.binding import leaves_by_path, mask_by_path, values_at, with_leaves
from gauge_optax.errors import binding_error, warn
from gauge_optax.traced import loop_counts
from gauge_optax.transformation import unrecorded

_SEARCHED = {"value", "grad", "value_fn"}  # arguments of line searches; `_traced` fills in some loss for them
_HYPERPARAMETERS = "hyperparams"  # the field of Optax's states whose numbers users change between steps
# Names of primitives whose result has the numbers of the first operand, and of others whose result is zero if the first
# operand is zero, if any operand is, or if all are.
_SAME = frozenset(
    "copy copy_p stop_gradient broadcast_in_dim reshape transpose squeeze expand_dims slice rev reduce_max reduce_min "
    "reduce_and reduce_or sharding_constraint reshard".split()
)
_ZERO_OF_FIRST = frozenset(
    "neg sign abs sqrt tanh sin asin atan sinh asinh atanh expm1 log1p square cbrt erf real imag conj floor ceil round "
    "bitcast_convert_type reduce_precision dynamic_slice gather reduce_sum reduce_prod cumsum cummax cummin cumprod "
    "integer_pow div".split()
)
_ZERO_OF_ANY = frozenset(("mul", "dot_general", "conv_general_dilated", "and"))
_ZERO_OF_ALL = frozenset(
    ("add", "add_any", "sub", "max", "min", "concatenate", "pad", "or", "dynamic_update_slice", "atan2", "scatter")
)
# Primitives of masks and bounds. Their result is known if both operands are.
_OF_NUMBERS: Mapping[str, Callable[[Any, Any], Any]] = {
    "eq": operator.eq, "ne": operator.ne, "lt": operator.lt, "le": operator.le, "gt": operator.gt, "ge": operator.ge,
    "max": max, "min": min, "and": lambda a, b: int(a) & int(b), "or": lambda a, b: int(a) | int(b),
}
_Known = float | None
"""The number that an array has everywhere; None if that is not known."""


def frozen_leaves(
    name: str, inner: Any, params: Any, extra: Mapping[str, Any] | None = None, said: bool = False, masks: bool = True
) -> frozenset[str]:
    """Returns the paths of leaves whose updates are zero at every step of a run.

    An array of the state counts as zero if it is zero after `init` and every `update` leaves it zero, as Adam's moments
    behind `optax.freeze` do. The learning rate 0.0 counts as zero. One from a schedule, from `optax.inject_hyperparams`
    or in a JAX array without axes does not, because later steps may have another one. If such an array makes the
    updates of some leaves zero and not of others, it may also be a mask's entry, and a warning names a leaf.

    Args:
      name: name of the public function, for messages.
      inner: the transformation. It is traced, and not run.
      params: the parameters; only their shapes and dtypes are used.
      extra: further arguments of `update`, with their values. None if they are not known yet, as at `init`: then their
        defaults count, or some loss where `update` needs one.
      said: whether the user has named the frozen leaves, so that an update that cannot be traced is no error.
      masks: whether `inner` may have a mask of the user's. If not, there is no warning: such an array can then only be
        a rate, as in `quotient_muon`.

    Returns:
      The paths.

    Raises:
      ValueError: a transformation with `optax.masked` or `optax.partition` that cannot be traced.
    """
    if not all(hasattr(leaf, "dtype") or isinstance(leaf, int | float | complex) for leaf in jax.tree.leaves(params)):
        return frozenset()  # a tree that `init` refuses
    # Without shardings: on a mesh with explicit axes, products of sharded types would have to say where results are.
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), jax.eval_shape(lambda p: p, params))
    paths = list(leaves_by_path(shapes))
    if len(paths) != len(jax.tree.leaves(shapes)):
        return frozenset()
    start = jax.make_jaxpr(inner.init)(shapes)
    state = jax.eval_shape(inner.init, shapes)
    step = _traced(name, inner, shapes, state, extra, said)
    if step is None:
        return frozenset()
    unknown: list[_Known] = [None] * len(paths)
    fixed = [_HYPERPARAMETERS not in jax.tree_util.keystr(keys) for keys, _ in jax.tree.leaves_with_path(state)]

    def found(consts: Sequence[Any]) -> frozenset[str]:
        at_first = _outputs(start.jaxpr, start.consts, unknown)
        kept = [0.0 if a == 0.0 and b else None for a, b in zip(at_first, fixed, strict=True)]
        while True:
            out = _outputs(step.jaxpr, consts, [*unknown, *kept, *unknown])
            updates, after = out[: len(paths)], out[len(paths) :]
            both = [_either(a, b) for a, b in zip(kept, after, strict=True)]
            if both == kept:
                return frozenset(path for path, value in zip(paths, updates, strict=True) if value == 0.0)
            kept = both

    frozen = found(step.consts)
    if extra is None and masks and not said and any(map(_may_change, step.consts)):
        others = found([np.asarray(x) if _may_change(x) else x for x in step.consts])
        for path in sorted(beside_others(others, params) - frozen)[:1]:
            by_frozen = (
                f"; or say it: quotient(..., frozen=go.tools.by_path({{'{path}': True}}, default=False)); frozen=False "
                "says that all leaves train")
            warn(binding_error(
                name, f"'{path}' trains, although its updates are zero now",
                "a JAX array without axes that is 0.0, such as a rate that later steps may change, or a mask's entry",
                "Python numbers for what never changes",
                "write a mask's entries as 0.0 or False, without jnp" + (by_frozen if name == "quotient" else "")))
    return frozen


def beside_others(found: frozenset[str], params: Any) -> frozenset[str]:
    """Returns what `frozen_leaves` has found, but no leaf if the optimizer never changes any, as at a rate of zero.

    It is for wrappers that move weights themselves and leave frozen leaves alone. Where the optimizer never changes any
    leaf, the user wants the wrapper's own moves.
    """
    return frozenset() if found >= set(leaves_by_path(params)) else found


def said_to_be_frozen(name: str, frozen: Any, params: Any) -> frozenset[str]:
    """Returns the paths at which a mask is True: a tree or prefix of booleans, or a callable from parameters to one.

    Raises ValueError for a mask of another structure.
    """
    if frozen is None:
        return frozenset()
    frozen = values_at(frozen, params)  # outside of `try`: an error in the user's function is raised as it is
    try:
        mask = mask_by_path(frozen, params)
    except (ValueError, TypeError) as error:
        path = next(iter(leaves_by_path(params)), "")
        raise binding_error(
            name,
            "a mask `frozen` that does not fit the tree",
            f"leaves {', '.join(list(leaves_by_path(frozen))[:6]) or 'none'}",
            "booleans in a tree or prefix of the parameters' structure, or a callable that makes one",
            f'write frozen=go.tools.by_path({{"{path}": True}}, default=False)',
        ) from error
    return frozenset(path for path, flag in mask.items() if flag)


def require_still_frozen(
    name: str, inner: Any, stored: Collection[str], said: Collection[str], usual: Collection[str], params: Any,
    extra: Mapping[str, Any], keeping: str = "",
) -> None:
    """Raises ValueError if a step trains a leaf that is frozen according to its state, or freezes one that is not.

    Args:
      name: name of the public function, for the message.
      inner: the transformation.
      stored: the leaves that never change, as the state says.
      said: the leaves that the user calls frozen. They count as frozen whatever the arguments of this `update` are.
      usual: the leaves that never change, as the optimizer says: `said`, and those that `frozen_leaves` finds.
      params: the parameters.
      extra: the further arguments of this `update`. Those of line searches change nothing.
      keeping: what to write instead to keep the moments of the state; "" if nothing does.
    """
    every = set(leaves_by_path(params))

    def differences(now: Collection[str]) -> tuple[set[str], set[str]]:
        # If all leaves count as frozen now, as at a rate of zero, this is a step of length zero and no difference.
        return set(stored) - set(now), set() if every <= set(now) else set(now) - set(stored)

    opened, closed = differences(usual)
    if opened or closed:
        path, was, does = (min(opened), "freezes", "trains") if opened else (min(closed), "trains", "freezes")
        raise binding_error(
            name, f"a state of other frozen leaves, at '{path}'", f"a state whose run {was} '{path}'",
            f"a state of this optimizer, which {does} it", f"start anew, state = tx.init(params){keeping}; or write "
            f"an optimizer that {was} '{path}'")
    if extra.keys() <= _SEARCHED:
        return
    arguments = ", ".join(f"{argument}=" for argument in extra)
    both = differences({*said, *frozen_leaves(name, inner, params, extra)})
    for paths, does, other in zip(both, ("trains", "freezes"), ("frozen", "trained"), strict=True):
        if paths:
            raise binding_error(
                name,
                f"an argument of this update {does} '{min(paths)}', which is {other} without it",
                f"{arguments} with another value than its default, which counts at `init`",
                "leaves that train at every step or at none",
                f"give {arguments} the default in `inner` that trains all leaves of the run, and make an optimizer and "
                "a state per set of leaves that train",
            )


def zero_frozen(updates: Any, frozen: Collection[str]) -> Any:
    """Returns updates with constant zeros for frozen leaves, so that `frozen_leaves` of an outer wrapper finds them."""
    if not frozen:
        return updates
    leaves = leaves_by_path(updates)
    return with_leaves(updates, {path: jnp.zeros_like(leaves[path]) for path in frozen})


def _traced(
    name: str, inner: Any, shapes: Any, state: Any, known: Mapping[str, Any] | None, said: bool
) -> Any:
    """Returns the jaxpr of an update; None if it cannot be traced and has no masks that could freeze leaves."""
    # Line searches need a loss. Any will do, because only updates that are zero for every loss count.
    searching = {"value": 0.0, "grad": None, "value_fn": lambda p: sum(jax.tree.leaves(jax.tree.map(_sum, p)))}
    error: Exception | None = None
    for extra in ({}, searching) if known is None else (known,):

        def update(g: Any, s: Any, p: Any, extra: Mapping[str, Any] = extra) -> Any:
            given = {**extra, "grad": g} if "grad" in extra else extra
            return inner.update(g, s, p, **given)

        try:
            # `optax.inject_hyperparams` makes its optimizer anew inside every update. The new optimizer runs this trace
            # inside the update, which `go.check` may be recording.
            with unrecorded():
                return jax.make_jaxpr(update)(shapes, state, shapes)
        except Exception as failed:  # of any class: if the update is wrong, it raises again when the user calls it
            error = failed
    structure = str(jax.tree.structure(state))
    if not said and ("Masked" in structure or "Partition" in structure):
        looks = isinstance(error, jax.errors.ConcretizationTypeError)  # as a schedule with an `if` does
        raise binding_error(
            name,
            "cannot see which leaves `inner` freezes",
            f"{type(error).__name__}: {str(error)[:200]}",
            "an update that can be traced with gradients, a state and parameters alone",
            ("let schedules compute with jnp: jnp.where(count < 5, 0.1, 0.01) in place of an `if`" if looks else
             "give every further argument of its update a default")
            + (", or say it: quotient(..., frozen=mask), True for what never changes" if name == "quotient" else ""),
        ) from error
    return None


def _sum(x: Any) -> Any:
    return jax.numpy.sum(x)


def _outputs(jaxpr: Any, consts: Sequence[Any], inputs: Sequence[_Known]) -> list[_Known]:
    """Returns what is known of the outputs of a jaxpr, given what is known of its inputs."""
    from jax.extend.core import Literal  # here, because it imports Pallas

    known = dict(zip(jaxpr.invars, inputs, strict=True))
    known |= {var: _number(value) for var, value in zip(jaxpr.constvars, consts, strict=True)}

    def of(atom: Any) -> _Known:
        return _number(atom.val) if isinstance(atom, Literal) else known[atom]

    for equation in jaxpr.eqns:
        given = [of(atom) for atom in equation.invars]
        known |= dict(zip(equation.outvars, _results(equation, given), strict=True))
    return [of(atom) for atom in jaxpr.outvars]


def _results(equation: Any, given: list[_Known]) -> list[_Known]:
    """Returns what is known of the results of one equation, given what is known of its operands."""
    kind, options, count = equation.primitive.name, equation.params, len(equation.outvars)
    if any(getattr(atom.aval, "size", 1) == 0 for atom in equation.invars):
        return [None] * count  # the product of no numbers is 1, and the maximum of none is infinite
    if (kind == "integer_pow" and options["y"] <= 0) or (kind == "gather" and _fills(options)):
        return [None] * count
    if kind == "optimization_barrier":
        return given
    if kind in _SAME:
        return [given[0]]
    if kind == "convert_element_type":
        with np.errstate(all="ignore"):  # no warning for a bound that is infinite in the new dtype
            return [None if given[0] is None else float(np.real(np.asarray(given[0]).astype(options["new_dtype"])))]
    if kind == "not":
        return [None if given[0] is None or equation.outvars[0].aval.dtype != bool else 1.0 - given[0]]
    if kind in _OF_NUMBERS and given[0] is not None and given[1] is not None:
        return [float(_OF_NUMBERS[kind](*given))]
    if kind in _ZERO_OF_FIRST:
        return [_zero_if(given[0] == 0.0)] * count
    if kind in _ZERO_OF_ANY:
        return [_zero_if(0.0 in given)]
    if kind in _ZERO_OF_ALL:
        return [_zero_if(all(x == 0.0 for x in given))]
    if kind == "clamp":
        low, x, high = given
        return [None if x is None or low is None or high is None else min(max(x, low), high)]
    if kind == "select_n":
        return [_either(*given[1:]) if given[0] is None else given[1 + int(given[0])]]
    if kind == "cond":
        branches = options["branches"]
        taken = branches if given[0] is None else [branches[min(max(int(given[0]), 0), len(branches) - 1)]]
        return [_either(*results) for results in zip(*(_closed(branch, given[1:]) for branch in taken), strict=True)]
    if kind == "scan":
        return _repeated(options["jaxpr"], given, *loop_counts(options))
    if kind == "while":
        constants = options["body_nconsts"]
        return _repeated(options["body_jaxpr"], given[options["cond_nconsts"] :], constants, len(given))
    inside = next((options[key] for key in ("jaxpr", "call_jaxpr", "fun_jaxpr") if key in options), None)
    if inside is not None and len(getattr(inside, "jaxpr", inside).invars) == len(given):
        return _closed(inside, given)
    return [None] * count


def _repeated(closed: Any, given: list[_Known], constants: int, carried: int) -> list[_Known]:
    """Returns what is known of the results of a loop.

    A carried array is known if it is known before the loop and one iteration leaves it as it is. The loop may have no
    iteration.

    Args:
      closed: the body of the loop.
      given: what is known of the inputs of the loop: constants, carried arrays, then scanned arrays.
      constants: number of constants.
      carried: number of carried arrays.
    """
    fixed, carry, rest = given[:constants], given[constants : constants + carried], given[constants + carried :]
    while True:
        out = _closed(closed, [*fixed, *carry, *rest])
        both = [_either(a, b) for a, b in zip(carry, out, strict=False)]
        if both == carry:
            return [*carry, *out[carried:]]
        carry = both


def _closed(closed: Any, given: list[_Known]) -> list[_Known]:
    return _outputs(getattr(closed, "jaxpr", closed), getattr(closed, "consts", ()), given)


def _either(first: _Known, *others: _Known) -> _Known:
    """What is known of an array that is one of several: its number if it is the same in all of them."""
    return first if all(x == first for x in others) else None


def _zero_if(condition: bool) -> _Known:
    return 0.0 if condition else None


def _fills(gather: Mapping[str, Any]) -> bool:
    """Whether a gather may put other numbers than zero where an index is out of bounds."""
    return "FILL" in str(gather["mode"]).upper() and gather.get("fill_value") != 0


def _may_change(value: Any) -> bool:
    """Whether a constant may be another number at later steps, such as a rate that `inject_hyperparams` holds."""
    known = isinstance(value, jax.Array) and not isinstance(value, jax.core.Tracer)
    return known and value.ndim == 0 and jnp.issubdtype(value.dtype, jnp.number)


def _number(value: Any) -> _Known:
    """What is known of a constant."""
    if isinstance(value, jax.core.Tracer) or jnp.issubdtype(getattr(value, "dtype", bool), jax.dtypes.extended):
        return None  # an unknown number, or a typed key of random numbers
    if _may_change(value):
        return None
    array = np.asarray(value)
    if not array.size:
        return None
    first = array.flat[0]
    return float(np.real(first)) if np.isreal(first) and np.all(array == first) else None
