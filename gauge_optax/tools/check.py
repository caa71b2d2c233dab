"""`check`: a preflight, which raises errors for mistakes that training itself would not report.

Everything here is measured on the user's own tree, state and gradient. If a gauge is a symmetry of the loss, the
gradient has no part along the gauge's orbit, the set of weights to which the gauge can move these weights. That part,
relative to its size for random vectors, is the *asymmetry*. If it is beyond roundoff, the gauge is wrong. If leaves or
gradients are zero, this test says nothing, and a note says so.
"""

import dataclasses
import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax

from gauge_optax.binding import leaves_by_path, structures_apart, with_leaves
from gauge_optax.binding.paths import natural_key
from gauge_optax.discovery.lift import in_double
from gauge_optax.errors import binding_error
from gauge_optax.frozen import frozen_leaves, require_still_frozen
from gauge_optax.gauges.bound import bound, require_nonzero_norms
from gauge_optax.gauges.by_action import broken_law
from gauge_optax.linalg import real_dtype
from gauge_optax.parts.part import changed
from gauge_optax.slice import Frame
from gauge_optax.tools.mappings import require_no_contradiction
from gauge_optax.tools.plan import aligned, gauges_of, said_by
from gauge_optax.tools.twins import noisy, parted
from gauge_optax.transformation import (
    LeafRule,
    in_computing_dtype,
    on_any_mesh,
    own_settings,
    recording,
    require_arrays,
    require_function,
    require_gradients,
    require_no_tracers,
    require_params,
    require_report,
    require_scalar,
    require_values,
)
from gauge_optax.wrapped import preflight_of, transformations_of, wrapped_by
from gauge_optax.xla import jit_unfused, one_program, unseen

# Bits of the mantissas of a gradient → the largest asymmetry that roundoff explains. tests/tolerances.py has measured
# asymmetries of right and of wrong gauges.
_ROUNDOFF = {52: 1e-8, 23: 3e-5, 10: 3e-2, 7: 5e-2}
_ALL_ROUNDED = 0.95  # an error if the dtype rounds away the update of more than this share of a leaf's entries
# A state was made for other weights if it differs from `tx.init(params)` by more than these shares. During a run, the
# sizes in a frame are compared (`_OTHER_SIZE`, mean over channels); before the first step, every array is compared by
# its norm (`_OTHER_WEIGHTS`).
_OTHER_SIZE = 0.3
_OTHER_WEIGHTS = 0.05
_NOISE = 1e-5  # weights are changed by this share, to see which arrays of `tx.init` react strongly to small changes
_CANCELLED = 20.0  # a gradient whose terms cancel, as that of a key bias, may exceed the limit by this factor
_TIMES_ROUNDOFF = 16.0  # a step of at most this number times eps times the weight is roundoff
_OF_USUAL = 1e-2  # a leaf that a gauge binds: ‖step‖/‖leaf‖ below this share of the median over all leaves is roundoff
_SIGNAL = 1e-6  # a leaf's gradient below this share of the largest one is roundoff
# Consider the leaves that one copy of a gauge moves. A leaf's step is roundoff if (step / largest step of these leaves)
# is below this share of (gradient / largest gradient of these leaves).
_QUIET = 1e-4
_FAST = 0.1  # with Muon in the optimizer, a step of Adam on a matrix may have at most this share of the matrix's norm
_NO_RULE = LeafRule("")
_FEW = 64  # the precision of a gradient is not judged from fewer entries than this
_MOST_ENTRIES = 4096  # the precision is judged from at most this number of entries of each leaf
_TRAILING = 4  # more zeros at the end of the median mantissa show that it was computed in a coarser dtype than stored
_HALF = 20  # numbers from half precision, averaged or not, use at most this number of bits of the mantissa


@dataclasses.dataclass(frozen=True, repr=False)
class Report:
    """The result of `check` if nothing is wrong. It prints as a table and notes.

    Attributes:
      asymmetries: per gauge (name, its leaves, number). The number is the largest asymmetry among the gauge's copies
        (one copy per layer): the gradient's part along the orbit, relative to that of random vectors.
      limit: the largest asymmetry that roundoff explains at the precision of the gradient.
      precision: that precision, in words.
      frozen: paths of leaves that never change. An optimizer leaves the copies of gauges with such a leaf alone.
      notes: sentences about cases that this gradient cannot decide, or that deserve a look.
    """

    asymmetries: tuple[tuple[str, str, float], ...]
    limit: float
    precision: str
    frozen: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def __repr__(self) -> str:
        rows = [("gauge", "leaves", "asymmetry"), *((g, leaves, f"{x:.1e}") for g, leaves, x in self.asymmetries)]
        limit = f"limit: {self.limit:.0e}, the roundoff of {self.precision}"
        frozen = [f"left alone, because they never change: {', '.join(self.frozen)}"] if self.frozen else []
        return "\n".join([aligned(rows), limit, *frozen, *self.notes])


def check(
    tx: optax.GradientTransformation,
    state: Any,
    params: Any,
    grads: Any,
    *,
    loss_fn: Callable[..., Any] | None = None,
    batch: Any = None,
    report: Any = None,
) -> Report:
    """Checks an optimizer with gauges once, before training and outside `jit`. It changes nothing.

    Args:
      tx: the optimizer, in any wrapper of Optax.
      state: its state, `tx.init(params)`.
      params: the parameters.
      grads: the gradient of the loss that is trained, penalties and dropout included, a tree like `params`. An average
        of a few batches has less roundoff.
      loss_fn: (params) or (params, batch) → loss. If given, the gauges are checked by its gradient in float64, which
        shows smaller penalties than `grads` does. Switch off dropout in it. In this check, trained leaves that are zero
        get random values. While they are zero, as LoRA's B is at the start, no gradient shows that a gauge pairs the
        wrong leaves.
      batch: the second argument of `loss_fn`; None if it has none.
      report: the result of `discover` for the function. If given, `neurons` and `embeddings` of `max_norm_muon` are
        compared with the axes that the function uses.

    Returns:
      A report; print it.

    Raises:
      ValueError: the optimizer cannot be seen inside a wrapper, such as a class of your own; or training would go wrong
        without an error: a gauge that is no symmetry of the loss; a state that was made for other weights or other
        frozen leaves; weights above a bound on norms; a matrix that Adam steps at Muon's learning rate; a leaf that is
        frozen in part, or by a mask outside the wrapper whose gauge moves it; an update that its leaf's dtype rounds
        away; a gradient that is not finite; a loss that is no scalar; axes of a leaf that contradict the report.

    >>> gauge = go.rescale({"up": "_ channel"}, {"down": "channel _"})
    >>> params = {"up": jnp.array([[1.0, -2.0]]), "down": jnp.array([[0.5], [1.5]])}
    >>> loss = lambda p: jnp.sum(
    ...     (jax.nn.relu(jnp.array([[1.0], [-1.0]]) @ p["up"]) @ p["down"] - 2.0) ** 2
    ... )
    >>> tx = go.quotient_adamw(1e-3, gauge)
    >>> state = tx.init(params)
    >>> report = go.check(tx, state, params, jax.grad(loss)(params))
    >>> report.asymmetries[0][:2]
    ('rescale', 'up, down')
    >>> penalized = lambda p: loss(p) + 0.1 * jnp.sum(p["up"] ** 2)
    >>> try:
    ...     go.check(tx, state, params, jax.grad(penalized)(params))
    ... except ValueError as error:
    ...     print(str(error).splitlines()[0])
    check: rescale on 'up', 'down' is no symmetry of the loss that made these gradients

    Reference: docs/guides/preflight.md, with every message.
    """
    require_params("check", params)
    require_values("check", params)
    require_gradients("check", grads)
    require_arrays("check", params, grads)
    require_no_tracers("check", state)
    jax.block_until_ready((state, params, grads))
    if loss_fn is not None:
        with_batch = "pass batch= as well, or write loss_fn=lambda params: loss(params, batch)"
        require_function("check", "loss_fn", loss_fn, "params" if batch is None else "params, batch", with_batch)
    elif batch is not None:
        raise binding_error(
            "check", "a batch without a loss", f"batch={type(batch).__name__}, loss_fn=None", "both, or neither",
            "pass loss_fn=lambda params, batch: ... as well, or leave batch out")
    require_report("check", report)
    _require_finite(grads)
    _require_seen(tx, state)
    gauges, frozen = gauges_of(tx), _frozen_in(state)
    # This comes before the gradient is tested. With a state that was made for other frozen leaves, the wrong copies of
    # gauges would be tested, and a right gauge could look wrong.
    require_still_frozen("check", tx, frozen, (), _frozen_in(jax.eval_shape(tx.init, params)), params, {})
    for gauge in gauges:
        _require_laws(gauge, params)
    _require_no_mask_outside(tx, gauges, params, frozen)
    limit, precision = (_ROUNDOFF[52], "float64") if loss_fn is not None else _precision(grads)
    shares = _shares(gauges, params, grads, frozen, loss_fn, batch)
    for gauge, copies in zip(gauges, shares, strict=True):
        for copy, share in copies.items():
            if not share.number <= (limit if share.real else _CANCELLED * limit):
                raise _no_symmetry(gauge.name, copy, share, limit, precision)
    notes = [] if gauges else ["this optimizer has no gauges, so that no symmetry was tested"]
    if limit > 1e-2 and gauges:
        notes.append(f"roundoff of {precision} hides penalties below {limit:.0%} of a gradient; loss_fn= and batch= "
                     "show them")
    for gauge, copies in zip(gauges, shares, strict=True):
        notes += [note for share in copies.values() for note in share.notes(gauge.name, limit)]
    notes += _forgotten(gauges, params, grads, frozen) if loss_fn is None else []
    _require_state_of(tx, state, params)
    for said in preflight_of(tx)(params):
        if isinstance(said, ValueError):
            raise said
        notes.append(said)
    notes += [] if report is None else require_no_contradiction(state, params, report)
    while isinstance(tx, optax.MultiSteps):  # its first update is always zero: look at the optimizer inside
        tx, state = tx._opt, state.inner_opt_state
    notes += _require_none_frozen_unseen(tx, state, params, grads, gauges, frozen)
    notes += _parting(tx, params, grads, frozen)
    notes += _require_steps_that_count(tx, state, params, grads)
    notes += _inflated(tx, gauges, params, frozen)
    return Report(tuple(map(_row, gauges, shares)), limit, precision, tuple(sorted(frozen)), tuple(notes))


class _Share(NamedTuple):
    """The part of a gradient along the orbit of one copy of a gauge (the gauge in one layer, for example).

    Attributes:
      number: the asymmetry of the copy.
      leaves: paths of the leaves that the copy moves.
      zero: the leaves among them whose whole gradient is zero; () if the gradients of all of them are.
      real: whether the gradient of some leaf is more than its part along constants (parts that add something, such as a
        number to all logits). If False, as for a key bias, the terms of the gradient cancel, and what is left has more
        roundoff.
      told: whether this gradient can show that the gauge is wrong. It cannot if each leaf is zero or has the gradient
        zero, as LoRA's factors at B = 0.
    """

    number: float
    leaves: tuple[str, ...]
    zero: tuple[str, ...]
    real: bool
    told: bool

    def notes(self, name: str, limit: float) -> list[str]:
        said = [
            f"the gradient of '{path}' is zero here; if the loss never trains it (stop_gradient), {_say_frozen(path)}"
            for path in self.zero
        ]
        where = f"{name} on '{self.leaves[0]}'"
        if not self.told:
            said.append(
                f"{where} could not be tested, because its leaves or their gradients are zero: check it again after a "
                "few steps, or with loss_fn= and batch=")
        elif self.number > limit:
            said.append(f"{where} has no gradient but roundoff, or is no symmetry: loss_fn= and batch= show which")
        return said


def _copies(gauge: Any, params: Any) -> Iterator[tuple[Any, tuple[str, ...]]]:
    """The copies of a gauge, each with the leaves that it moves."""
    for copy in bound((gauge,), params).copies[0]:
        yield copy, tuple(dict.fromkeys(path for part in copy.parts for path in changed(part)))


def _row(gauge: Any, copies: Mapping[str, _Share]) -> tuple[str, str, float]:
    if not copies:  # every copy has a frozen leaf, or the group has no vertical directions
        return gauge.name, "left alone", 0.0
    paths = list(dict.fromkeys(path for share in copies.values() for path in share.leaves))
    leaves = ", ".join(paths[:2]) + (f", … ({len(paths)})" if len(paths) > 2 else "")
    return gauge.name, leaves, max(share.number for share in copies.values())


def _require_laws(gauge: Any, params: Any) -> None:
    """Raises ValueError for a gauge of a user's class whose methods break a law, such as read(g·θ) = g·read(θ)."""
    law = broken_law(gauge, params)
    if law is not None:
        raise binding_error(
            "check", f"the methods of {gauge.name} break a law of groups and their readings", f"not true: {law}",
            "that it holds for all elements g and parameters θ",
            "see the table of docs/guides/gauge.md; a group that is no addition needs identity, inverse and compose")


def _require_finite(grads: Any) -> None:
    for path, leaf in leaves_by_path(grads).items():
        if _is_real(leaf) and not np.all(np.isfinite(np.asarray(leaf, np.float64))):
            raise binding_error(
                "check", f"a gradient that is not finite, '{path}'", "NaN or infinity", "numbers",
                "look at the loss of this batch; in float16, scale the loss so that its gradient does not overflow")


# Gauges and gradients -------------------------------------------------------------------------------------


def _shares(
    gauges: Sequence[Any], params: Any, grads: Any, frozen: frozenset[str], loss_fn: Any, batch: Any
) -> list[dict[str, _Share]]:
    """Per gauge: copy → its `_Share` of the gradient. Copies with a frozen leaf are left out."""
    for gauge in gauges:  # `tx.init` checks this too, but not if it is called inside `jit`
        require_nonzero_norms("check", bound((gauge,), params, frozen).slice, leaves_by_path(params))
    none = {p for p, g in leaves_by_path(grads).items() if not np.any(np.asarray(g))}
    empty = {p for p, x in leaves_by_path(params).items() if _is_real(x) and not np.any(np.asarray(x))}
    zero = none - frozen
    if loss_fn is None:
        numbers_of = _asymmetries(gauges, params, grads)
    else:
        numbers_of = _in_double(gauges, params, loss_fn, batch, empty - none - frozen)
    shares = []
    for gauge, (numbers, nonzero) in zip(gauges, numbers_of, strict=True):
        of_gauge = {}
        for copy, paths in _copies(gauge, params):
            still = tuple(path for path in paths if path in zero) if not zero >= set(paths) else ()
            real = any(bool(nonzero[path]) for path in paths)
            if copy.key in numbers and not frozen & set(paths):
                number = float(numbers[copy.key])
                told = loss_fn is not None or number > 0 or not none | empty >= set(paths)
                of_gauge[copy.key] = _Share(number, paths, still, real, told)
        shares.append(of_gauge)
    return shares


def _forgotten(gauges: Sequence[Any], params: Any, grads: Any, frozen: frozenset[str]) -> list[str]:
    """A note on trained leaves that are zero and that no gauge multiplies, such as a bias missing from a gauge.

    If a gauge should multiply such a leaf, the gradient at zero does not show it: zero times any number is zero.
    """
    if not gauges:
        return []
    multiplied = set[str]()
    for s in (bound((gauge,), params).whole for gauge in gauges):
        adding = {part.label for part, *_ in s.constants}
        multiplied |= {path for part in s.parts if part.label not in adding for path in changed(part)}
    zero = {path for path, x in leaves_by_path(params).items() if _is_real(x) and not np.any(np.asarray(x))}
    trained = {path for path, g in leaves_by_path(grads).items() if np.any(np.asarray(g))}
    paths = sorted((zero & trained) - frozen - multiplied, key=natural_key)
    if not paths:
        return []
    named = ", ".join(f"'{path}'" for path in paths[:3]) + (f" and {len(paths) - 3} more" if len(paths) > 3 else "")
    return [
        f"zero at the start, and multiplied by no gauge: {named}. Whether a gauge should multiply them was not tested, "
        "because zero stays zero: pass loss_fn= and batch=, or check again after a few steps"
    ]


_Numbers = list[tuple[Mapping[str, Any], Mapping[str, Any]]]


@on_any_mesh
def _asymmetries(gauges: Sequence[Any], params: Any, grads: Any) -> _Numbers:
    """Per gauge two mappings: copy → asymmetry, and leaf → whether its gradient is more than its part along constants.

    Constants are parts that add something to leaves, such as a number to all logits.
    """

    def of_each(params: Any, grads: Any) -> _Numbers:
        numbers: _Numbers = []
        for gauge in gauges:
            b = bound((gauge,), params)
            across = b.whole.centred(b.whole.vectors(grads))
            numbers.append((b.asymmetry(params, grads)[0], {path: jnp.any(x) for path, x in across.items()}))
        return numbers

    arrays = jax.tree.map(jnp.asarray, (params, grads))
    return cast(_Numbers, jax.device_get(one_program(of_each)(*arrays)))


def _in_double(
    gauges: Sequence[Any], params: Any, loss_fn: Callable[..., Any], batch: Any, empty: Collection[str]
) -> _Numbers:
    """Returns what `_asymmetries` returns, for the gradient of `loss_fn` in float64.

    Trained leaves that are zero (`empty`) get random values. While they are zero, as LoRA's B is at the start, no
    gradient shows that a gauge pairs the wrong leaves.
    """
    draw = np.random.default_rng(0).normal

    def fn(leaves: Any, batch: Any) -> list[Any]:
        p = with_leaves(params, leaves)
        loss = loss_fn(p) if batch is None else loss_fn(p, batch)
        require_scalar("check", loss)
        return [loss]

    params, batch = unseen((params, batch))
    dtypes = {path: jnp.result_type(leaf) for path, leaf in leaves_by_path(params).items()}
    with own_settings(wide=True):
        doubled = {
            path: np.asarray(leaf, np.float64 if jnp.issubdtype(dtypes[path], jnp.floating) else None)
            for path, leaf in leaves_by_path(params).items()
        }
        doubled |= {path: 0.1 * draw(size=doubled[path].shape) for path in sorted(empty)}
        lifted = in_double(fn, doubled, dtypes, batch)
        real = {path: x for path, x in doubled.items() if _is_real(x)}
        of_leaves = jax.grad(lambda x: jnp.sum(lifted(doubled | x, batch)[0]))
        gradient = jit_unfused(of_leaves)
        zeros = {path: np.zeros_like(x) for path, x in doubled.items()}
        grads = with_leaves(params, zeros | gradient(real))
        return _asymmetries(gauges, with_leaves(params, doubled), grads)


def _precision(grads: Any) -> tuple[float, str]:
    """The largest asymmetry that roundoff explains at the precision of a gradient, and that precision in words.

    A gradient that is stored in float32 may have been computed in bfloat16. Its mantissas then end in zeros.
    """
    leaves = [np.asarray(x) for x in jax.tree.leaves(grads) if _is_real(x)]
    coarse = min((x.dtype for x in leaves), key=lambda dtype: jnp.finfo(dtype).nmant, default=np.dtype(np.float64))
    used = np.concatenate([_used_bits(x) for x in leaves] or [np.zeros(0)])
    if used.size >= _FEW and np.median(used) < jnp.finfo(coarse).nmant - _TRAILING:
        bits = float(np.median(used))
        dtype = np.dtype(np.float32) if bits > _HALF else np.dtype(jnp.bfloat16)
        return _ROUNDOFF[int(jnp.finfo(dtype).nmant)], f"a gradient that was computed in {dtype.name}"
    fast = jax.default_backend() != "cpu" and coarse == np.float32
    if fast and getattr(jax.config, "jax_default_matmul_precision", None) not in ("highest", "float32"):
        return _ROUNDOFF[7], "matrix products of an accelerator in less than float32"
    return _ROUNDOFF[int(jnp.finfo(coarse).nmant)], coarse.name


def _used_bits(x: np.ndarray) -> np.ndarray:
    """Per nonzero entry, the number of bits of its mantissa up to the last one that is set."""
    kind = np.dtype(np.float64) if x.dtype == np.float64 else np.dtype(np.float32)
    width = int(jnp.finfo(kind).nmant)
    entries = x.astype(kind).ravel()
    entries = entries[np.isfinite(entries) & (entries != 0)][:_MOST_ENTRIES]
    mantissas = entries.view(np.uint64 if width == 52 else np.uint32).astype(np.uint64) & np.uint64(2**width - 1)
    lowest = mantissas & (~mantissas + np.uint64(1))  # a number with only the last set bit of the mantissa, or 0
    return np.where(mantissas == 0, 0, width - np.log2(np.maximum(lowest, 1)).astype(int))


def _no_symmetry(name: str, copy: str, share: _Share, limit: float, precision: str) -> ValueError:
    leaves = ", ".join(f"'{path}'" for path in share.leaves[:3]) + (", …" if len(share.leaves) > 3 else "")
    where = f" at {copy}" if copy else ""
    stopped = [f"; if the loss never trains '{path}' (stop_gradient), {_say_frozen(path)}" for path in share.zero[:1]]
    return binding_error(
        "check", f"{name} on {leaves} is no symmetry of the loss that made these gradients",
        f"an asymmetry{where} of {share.number:.2g}",
        f"at most {limit:.0e}, the roundoff of {precision}",
        f"take this {name} out of the list, or take out of the loss what sees it: a penalty on these weights, on "
        "logits or on activations, or another reader of these leaves; take the gradient at these very parameters"
        f"{''.join(stopped)}",
    )


def _say_frozen(path: str) -> str:
    return (
        f"say so: go.quotient(optimizer, gauges, frozen=go.tools.by_path({{'{path}': True}}, default=False)); other "
        "optimizers have no frozen=")


# Frozen leaves --------------------------------------------------------------------------------------------


def _frozen_in(state: Any) -> frozenset[str]:
    """Paths of the leaves that never change, which states of this library keep in their field `frozen`."""

    def says(node: Any) -> bool:
        return isinstance(getattr(node, "frozen", None), dict)

    found = set[str]()
    for node in filter(says, jax.tree.leaves(state, is_leaf=says)):
        found |= set(node.frozen) | _frozen_in([value for field, value in node._asdict().items() if field != "frozen"])
    return frozenset(found)


def _require_no_mask_outside(tx: Any, gauges: Sequence[Any], params: Any, frozen: frozenset[str]) -> None:
    """Raises ValueError if a mask outside sets the step of some leaves of a copy to zero, and not that of others.

    The gauge shares a step among these leaves. If one share is dropped afterwards, the weights do not compute the
    function to which the step of the inner optimizer led.
    """
    outside = frozen_leaves("check", tx, params, masks=False) - frozen  # no warning: `init` gave it
    for gauge in gauges if outside else ():
        for _, paths in _copies(gauge, params):
            if not outside.isdisjoint(paths) and not outside.issuperset(paths):
                still, other = min(outside.intersection(paths)), min(set(paths) - outside)
                raise binding_error(
                    "check", f"'{still}' is frozen, but outside the optimizer with the gauge {gauge.name}",
                    f"a step that is zero on '{still}' after a step that {gauge.name} shares with '{other}'",
                    "a mask inside, so that no step is shared with a frozen leaf",
                    "put the mask inside, go.quotient(optax.partition({'t': inner, 'f': optax.set_to_zero()}, labels), "
                    f"gauges), or {_say_frozen(still)}")


def _require_none_frozen_unseen(
    tx: Any, state: Any, params: Any, grads: Any, gauges: Sequence[Any], frozen: frozenset[str]
) -> list[str]:
    """Raises ValueError for leaves or entries that are frozen without being recorded in a state of this library.

    The step of a whole leaf can also be zero because its learning rate is zero, or because of a warm-up. Then no error
    is raised, and a sentence about it is returned.
    """

    def update(grads: Any, state: Any, params: Any) -> Any:
        with recording() as recorded:
            tx.update(grads, state, params)
        return recorded

    try:
        program = one_program(update)
        recorded = program(grads, state, params) if gauges else []
        # A second update, with the negative gradient. An entry that a mask freezes is zero in both updates. A step that
        # happens to round to zero is not.
        others = program(one_program(_negative)(grads), state, params) if gauges else []
    except jax.errors.UnexpectedTracerError:
        return ["not tested: whether leaves are frozen that the state does not list, because a wrapper calls an "
                "optimizer with gauges inside jax.lax.cond or a loop; check that optimizer too, go.check(inner, "
                "inner.init(params), params, grads)"]
    except Exception as error:  # the optimizer may need further arguments, or run only inside a loop
        return ["not tested: whether leaves are frozen that the state does not list, because the update raised "
                f"{type(error).__name__}"]
    most = {path: _most(leaf) for path, leaf in leaves_by_path(grads).items()}
    zero = {path for path, leaf in leaves_by_path(params).items() if not _most(leaf)}
    notes = dict[str, None]()
    for number, ((given, steps, point), (_, other, _)) in enumerate(zip(recorded, others, strict=True)):
        g, u, v, at = (leaves_by_path(tree) if tree is not None else {} for tree in (given, steps, other, point))
        for gauge in gauges:
            for copy, moved in _copies(gauge, params):
                paths = [p for p in moved if p in g]
                if frozen & set(paths) or len(paths) < 2:
                    continue
                sizes = {p: _most(g[p]) for p in paths}
                still = [p for p in paths if not sizes[p] and most[p] > _SIGNAL * max(most.values())]
                # Later links of a chain (number > 0) get gradients without their part along orbits. For a leaf with one
                # entry per channel, such as a norm's scale, this part may be the whole gradient. Its gradient is then
                # zero although the leaf is not frozen.
                single = {b.path for part in copy.parts for b in part.blocks if b.view_shape == part.shape}
                still = [p for p in still if number == 0 or p not in single]
                if steps is None:
                    if still and any(sizes.values()):
                        raise _frozen_unseen(still[0], f"in front of the optimizer with {gauge.name}", "gradient")
                    continue
                moves = {p: _most(u[p]) for p in paths}
                for p in (p for p in paths if max(moves.values()) and sizes[p] > 0 and p not in zero):
                    share = moves[p] / max(moves.values())
                    x, y = np.asarray(g[p]), np.maximum(np.abs(np.asarray(u[p])), np.abs(np.asarray(v[p])))
                    # Do not judge steps that are as small as roundoff of the weights. An optimizer that averages
                    # weights returns differences of weights, in which small steps round to zero.
                    seen = moves[p] > _TIMES_ROUNDOFF * float(jnp.finfo(real_dtype()).eps) * np.abs(np.asarray(at[p]))
                    if 0 < share < _QUIET * min(1.0, sizes[p] / max(sizes.values())):
                        raise _frozen_unseen(p, f"but for roundoff of its step, inside {gauge.name}", "step")
                    if moves[p] and np.any((y == 0) & seen & (np.abs(x) > 0.1 * sizes[p])):
                        raise _frozen_unseen(p, f"in part, inside {gauge.name}", "step")
                    if not moves[p]:
                        notes[f"the first step of '{p}' is zero; if it stays so, {_say_frozen(p)}"] = None
        size, weights = (
            sum(float(np.sum(np.square(np.asarray(x, np.float64)))) for x in leaves.values() if _is_real(x))
            for leaves in (u, at)
        )
        if wrapped_by(tx, "inner") and size > weights > 0:
            notes["the first step inside quotient is longer than the weights: put the learning rate inside, "
                  "go.quotient(optax.chain(link, optax.scale_by_learning_rate(rate)), gauges)"] = None
    return list(notes)


def _negative(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: -leaf if _is_real(leaf) else leaf, tree)


def _most(leaf: Any) -> float:
    return float(np.max(np.abs(np.asarray(leaf, np.float64)), initial=0.0)) if _is_real(leaf) else 0.0


def _frozen_unseen(path: str, how: str, what: str) -> ValueError:
    return binding_error(
        "check", f"'{path}' is frozen {how}",
        f"a {what} of '{path}' that is made zero, while other leaves of a gauge keep theirs",
        "a mask of whole leaves inside, which says what stays",
        "put the mask inside, go.quotient(optax.partition({'t': inner, 'f': optax.set_to_zero()}, labels), gauges), or "
        f"{_say_frozen(path)}; a leaf that is frozen in part needs this gauge left out, or leaves of its own")


def _parting(tx: Any, params: Any, grads: Any, frozen: frozenset[str]) -> list[str]:
    """A note if the optimizer makes two weight sets of one function compute different functions.

    The cause is a link in front of the `quotient`, behind it or around it, that sees more than the function.
    """
    try:
        path = parted(tx, params, grads, frozen)
    except Exception as error:  # further arguments, or weights at which `init` refuses a twin
        return ["not tested: whether this optimizer keeps two weight sets of one function together, because a step "
                f"raised {type(error).__name__}"]
    return [] if path is None else [
        "this optimizer leads two weight sets of one function to different functions; they differ most in "
        f"'{path}': a link outside the gauges, such as a clip, a penalty, noise or SAM, sees more than the function. "
        "Put it inside: "
        "go.quotient(optax.chain(optax.clip_by_global_norm(1.0), inner), gauges)"]


# States ---------------------------------------------------------------------------------------------------


def _require_seen(tx: Any, state: Any) -> None:
    """Raises ValueError if `state` has states of this library, but a wrapper hides their transformations in `tx`."""
    is_ours = lambda node: type(node).__module__.startswith("gauge_optax.")  # noqa: E731
    ours = [type(node).__name__ for node in jax.tree.leaves(state, is_leaf=is_ours) if is_ours(node)]
    if ours and not transformations_of(tx):
        raise binding_error(
            "check", "an optimizer inside a wrapper that hides its gauges", f"a {ours[0]} in the state, and no gauge",
            "Optax's wrappers, or functions that hold the optimizer in their closures",
            "check the optimizer inside: go.check(inner, inner.init(params), params, grads)")


def _require_state_of(tx: Any, state: Any, params: Any) -> None:
    """Raises ValueError for a state that was made for other weights.

    Before the first step, all arrays of the state have to be near those of `tx.init(params)`. Later, only the elements
    of `Size` parts that the state's frames hold have to be near those of `tx.init(params)`.
    """
    init = one_program(tx.init)
    fresh = init(params)
    pairs = list(zip(jax.tree.leaves_with_path(state), jax.tree.leaves(fresh), strict=False))
    apart = structures_apart(state, fresh) or next(
        ((f"{jax.tree_util.keystr(k)} of {jnp.shape(a)}", f"{jnp.shape(b)}") for (k, a), b in pairs
         if jnp.shape(a) != jnp.shape(b)), None)
    if apart:
        raise binding_error(
            "check", "a state of another optimizer, or of another tree", *apart,
            "write state = tx.init(params), or restore a checkpoint into jax.eval_shape(tx.init, params)")
    # `started` is True if this looks like the state before the first step. A run has begun if a counter has changed. In
    # a state without counters, as that of momentum, it has begun if an array outside frames has changed. If there are
    # no such arrays either, only the sizes in frames are compared.
    counted = [p for p in pairs if jnp.issubdtype(jnp.result_type(p[1]), jnp.integer)]
    kept = [p for p in pairs if ".frame." not in jax.tree_util.keystr(p[0][0])]
    started = all(np.array_equal(a, b) for (_, a), b in counted or kept)
    if not started or not (counted or kept):
        return _require_sizes(state, fresh, _OTHER_SIZE if counted else _OTHER_WEIGHTS)
    shaken = on_any_mesh(one_program(functools.partial(noisy, size=_NOISE, seed=0)))(params)
    disturbed = jax.tree.leaves(init(shaken))
    for (keys, a), b, c in zip((p for p, _ in pairs), jax.tree.leaves(fresh), disturbed, strict=True):
        if not _is_real(a):
            continue
        size = float(np.linalg.norm(np.asarray(b, np.float64)))
        # Some arrays are decided by roundoff, such as the eigenbasis of a head with equal eigenvalues: for disturbed
        # weights, `init` makes a very different array (`c`). Such an array may differ from that of `init` here too.
        off, least = (float(np.linalg.norm(_difference(x, b))) for x in (a, c))
        if off > max(_OTHER_WEIGHTS * size, least / _NOISE * 1e-2) and size > 0:
            raise _other_weights(jax.tree_util.keystr(keys), off / size)
    return None


def _difference(a: Any, b: Any) -> np.ndarray:
    """a − b, but 0 where both are the same infinity, as in a state that keeps the best loss so far."""
    x, y = np.asarray(a, np.float64), np.asarray(b, np.float64)
    return np.subtract(x, y, out=np.zeros_like(x), where=x != y)


def _require_sizes(state: Any, fresh: Any, most: float) -> None:
    """Raises ValueError if the sizes (scales) in a frame differ from those of the weights, in the mean over channels.

    Args:
      state: the state, at any step.
      fresh: `tx.init(params)`, whose frames are those of the weights.
      most: the largest mean relative difference that a part may have.
    """
    is_frame = lambda node: isinstance(node, Frame)  # noqa: E731
    both = ([n for n in jax.tree.leaves(x, is_leaf=is_frame) if is_frame(n)] for x in (state, fresh))
    for kept, read in zip(*both, strict=True):
        for label, live in ({} if kept.frozen else kept.live).items():
            a, b = (np.asarray(frame.elements[label]) for frame in (kept, read))
            off = np.abs(a - b) / np.maximum(np.maximum(np.abs(a), np.abs(b)), np.finfo(np.float64).tiny)
            known = np.asarray(live & read.live[label])
            number = float(np.mean(off[known])) if off.shape == known.shape and known.any() else 0.0
            if number > most:
                raise _other_weights(label, number)


def _other_weights(where: str, off: float) -> ValueError:
    return binding_error(
        "check", "the state was made for other weights", f"{where} differs by {off:.2g} from that of tx.init(params)",
        "a state that tx.init made for these parameters", "write state = tx.init(params)")


# Updates --------------------------------------------------------------------------------------------------


def _require_steps_that_count(tx: Any, state: Any, params: Any, grads: Any) -> list[str]:
    """Raises ValueError if a leaf's dtype rounds its update away. Returns notes on updates that were not tested."""
    rules, leaves = said_by(tx, params), leaves_by_path(params)
    polar = any("polar" in rule.rule for rule in rules.values())
    kinds = [jnp.finfo(jnp.result_type(x)) for x in leaves.values() if _is_real(x)]
    coarse = any(kind.nmant < jnp.finfo(real_dtype()).nmant for kind in kinds)
    if not polar and not coarse:  # no dtype is coarser than the arithmetic, and no rate is meant for Muon
        return []
    try:
        updates, _ = one_program(tx.update)(grads, state, params)
    except Exception:  # of any class, as an update may fail in any way if an argument such as a loss is missing
        return ["the first update was not looked at, because the optimizer needs further arguments"]
    # A leaf that stores γ − 1 is moved as γ, so that roundoff is relative to γ.
    added, moved = dict[str, Any](), False
    for gauge in gauges_of(tx):
        added |= bound((gauge,), params).whole.added
    pairs = {
        path: (np.asarray(update, np.float64), np.asarray(leaf, np.float64))
        for (path, leaf), update in zip(leaves.items(), jax.tree.leaves(updates), strict=True) if _is_real(leaf)
    }
    shares = {path: _ratio(u, p) for path, (u, p) in pairs.items()}
    usual = float(np.median(list(shares.values()) or [0.0]))
    for path, leaf in leaves.items():
        # On a leaf that a gauge binds, a step that is tiny beside the steps of other leaves is roundoff of the gauge's
        # moves. An example is an anchor, the leaf whose scale the gauge keeps fixed.
        if path not in pairs or (path in added and shares[path] < _OF_USUAL * usual):
            continue
        least = _TIMES_ROUNDOFF * float(jnp.finfo(real_dtype()).eps)
        u, p = pairs[path]
        moving = np.abs(u) > least * (np.abs(p) + added.get(path, 0.0))
        if rules.get(path, _NO_RULE).rule == "Adam" and polar and sum(n > 1 for n in p.shape) > 1:
            _require_slow(path, u, p)
        stuck = moving & ((p + u).astype(jnp.result_type(leaf)) == p)
        moved |= bool(moving.any())
        if moving.any() and stuck.sum() > _ALL_ROUNDED * moving.sum():
            raise binding_error(
                "check", f"the update of '{path}' is rounded away by {jnp.result_type(leaf)}",
                f"{stuck.sum() / moving.sum():.1%} of its entries stay what they are",
                f"at most {_ALL_ROUNDED:.0%}",
                f"keep '{path}' in float32 while it is trained, or take a larger learning rate")
    if not moved:
        return ["the first update is zero, as in a warm-up: what later ones lose to roundoff was not seen"]
    return []


def _inflated(tx: Any, gauges: Sequence[Any], params: Any, frozen: frozenset[str]) -> list[str]:
    """Notes on leaves that grow where the gradient is zero, because weight decay acts on an anchor beside them.

    An anchor is the leaf from which a gauge's scale is computed. The gauge keeps its size fixed: what decay takes from
    the anchor, the gauge gives back by a factor that also multiplies the other leaves of the anchor's side, so that
    these grow. Only a norm's scale or a multiplier has such leaves beside it; elsewhere the anchor is the whole side.
    The growth is measured in the second step of a fresh state, because the first step may move weights to a norm or to
    a balance. Leaves that are zero get random values.
    """
    slices = [bound((gauge,), params).whole for gauge in gauges]
    anchored = [(anchor, part) for s in slices for part, anchor, _ in s.sizes]
    beside = {b.path: anchor[0].path for anchor, part in anchored for b in part.blocks
              if b.argument == anchor[0].argument and b not in anchor}
    if not beside:
        return []
    draw, added = np.random.default_rng(0).normal, dict[str, Any]()
    for s in slices:
        added |= s.added
    leaves = {path: np.asarray(x) for path, x in leaves_by_path(params).items() if _is_real(x) and np.size(x)}
    zero = {path for path, x in leaves.items() if path not in frozen and not np.any(x)}
    start = with_leaves(params, {p: in_computing_dtype(0.1 * draw(size=x.shape) if p in zero else x)
                                 for p, x in leaves.items()})

    def growths(p: Any) -> dict[str, jax.Array]:
        state, still, before, updates = tx.init(p), jax.tree.map(jnp.zeros_like, p), p, p
        for _ in range(2):
            before, (updates, state) = p, tx.update(still, state, p)
            p = optax.apply_updates(p, updates)
        pairs = zip(*(leaves_by_path(tree).items() for tree in (before, updates)), strict=True)
        return {path: jnp.vdot(u, x) / jnp.vdot(x, x) for (path, x), (_, u) in pairs if path in leaves}

    try:
        found = {path: float(x) for path, x in one_program(growths)(start).items()}
    except (TypeError, ValueError):  # further arguments, or a start at which `init` refuses random values
        return []
    least = max(_LEAST_GROWTH, -0.05 * min(found.values(), default=0.0))
    return [
        f"without a gradient '{path}' grows by {found[path]:.0e} of its size in a step: what decay takes from "
        f"'{anchor}', the gauge gives back to this leaf too. Let decay act on both or on neither "
        "(docs/guides/recipes.md)"
        for path, anchor in beside.items() if not np.any(added[path]) and found.get(path, 0.0) > least
    ]


_LEAST_GROWTH = 1e-6  # share of a leaf's size by which it grows in a step; less is roundoff of float32


def _ratio(u: np.ndarray, p: np.ndarray) -> float:
    return float(np.linalg.norm(u) / max(np.linalg.norm(p), np.finfo(np.float64).tiny))


def _is_real(leaf: Any) -> bool:
    return bool(jnp.issubdtype(jnp.result_type(leaf), jnp.floating))


def _require_slow(path: str, u: np.ndarray, p: np.ndarray) -> None:
    """Raises ValueError if Adam's step on a matrix is so large that its learning rate must be meant for Muon."""
    share = _ratio(u, p)
    if _FAST < share and np.any(p):
        raise binding_error(
            "check", f"Adam steps the matrix '{path}' at Muon's rate", f"a step of {share:.0%} of its size",
            f"at most {_FAST:.0%}", "give Adam a rate of its own, adam_learning_rate=1e-3, or list the matrix for Muon")
