"""`check`: a preflight before training, which tells what would otherwise go wrong without a word.

Everything here is measured on the user's own tree, state and gradient. A gradient of the loss that is trained proves or
refutes every gauge, because that of an invariant loss has no part along an orbit.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from gauge_optax.binding import leaves_by_path, with_leaves
from gauge_optax.discovery.lift import in_double
from gauge_optax.errors import binding_error
from gauge_optax.frozen import frozen_leaves
from gauge_optax.gauges.bound import bound
from gauge_optax.linalg import real_dtype
from gauge_optax.parts.part import changed
from gauge_optax.slice import Frame
from gauge_optax.tools.mappings import require_no_contradiction
from gauge_optax.tools.plan import gauges_of, said_by
from gauge_optax.transformation import LeafRule, at_once, require_gradients, require_params, require_values
from gauge_optax.wrapped import transformations_of
from gauge_optax.xla import quick_options

# The largest asymmetry that roundoff explains, by the bits of a gradient's mantissas: tests/tolerances.py has the
# measured sizes of both sides.
_ROUNDOFF = {52: 1e-8, 23: 3e-5, 10: 3e-2, 7: 5e-2}
_ALL_ROUNDED = 0.95  # share of a leaf's entries whose update its dtype rounds away
_OTHER_SIZE = 0.3  # how far logs of sizes may be from those of a frame, beyond the first step
_OTHER_WEIGHTS = 0.05  # the relative difference of a state at the first step that is no roundoff
_NOISE = 1e-5  # relative size of a perturbation under which a state's arrays have to be stable to be compared
_CANCELLED = 20.0  # by how much more roundoff there is where a sum of large terms is zero, as in a key bias
_TIMES_ROUNDOFF = 16.0
_FAST = 0.1  # share of a matrix that one step of Adam may be long beside Muon
_NO_RULE = LeafRule("")
_FEW = 64  # fewer entries than this do not show in what precision they were computed
_MOST_ENTRIES = 4096  # of each leaf, that are looked at for that
_TRAILING = 4  # zeros at the end of most mantissas: they were computed in less precision than they are stored in
_HALF = 20  # bits that a mean of numbers in half precision may have


@dataclasses.dataclass(frozen=True, repr=False)
class Report:
    """What `check` found, all of it in order. Printed, it is a table and notes.

    Attributes:
      asymmetries: (gauge, its leaves, number): the largest asymmetry among the copies of each gauge.
      limit: what roundoff explains at the precision of the gradient.
      precision: that precision, in words.
      frozen: paths of leaves that never change. Gauges that move one of them and another leaf are left alone.
      notes: sentences about what cannot be told from this gradient, or deserves a look.
    """

    asymmetries: tuple[tuple[str, str, float], ...]
    limit: float
    precision: str
    frozen: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def __repr__(self) -> str:
        rows = [("gauge", "leaves", "asymmetry"), *((g, leaves, f"{x:.1e}") for g, leaves, x in self.asymmetries)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        table = ["  ".join(x.ljust(n) for x, n in zip(row, widths, strict=True)).rstrip() for row in rows]
        limit = f"limit: {self.limit:.0e}, the roundoff of {self.precision}"
        frozen = [f"left alone, because they never change: {', '.join(self.frozen)}"] if self.frozen else []
        return "\n".join([*table, limit, *frozen, *self.notes])


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
      loss_fn: (params) or (params, batch) → loss. If it is given, the gauges are checked by its gradient in float64,
        which shows smaller penalties than `grads` does; dropout has to be switched off for that.
      batch: the second argument of `loss_fn`; None if it has none.
      report: what `discover` returned for the function. If it is given, `neurons` and `embeddings` of `max_norm_muon`
        are compared with the axes that the function uses.

    Returns:
      A report; print it.

    Raises:
      ValueError: something would go wrong without a word in training: a gauge that is no symmetry of the loss; a state
        that was made for other weights; weights above the bound of `max_norm`; a matrix that Adam steps at Muon's rate;
        a leaf that is frozen outside the wrapper that moves its partners; an update that its leaf's dtype rounds away;
        axes of a leaf that contradict the report.

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
    if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves((params, grads, state))):
        raise binding_error(
            "check", "called inside jit", "tracers", "arrays, whose values it looks at",
            "call go.check once, outside jit, before training")
    gauges, frozen = gauges_of(tx), _frozen_in(state)
    _require_no_mask_outside(tx, gauges, params, frozen)
    limit, precision = (_ROUNDOFF[52], "float64") if loss_fn is not None else _precision(grads)
    shares = _shares(gauges, params, grads, frozen, loss_fn, batch)
    for gauge, copies in zip(gauges, shares, strict=True):
        for copy, share in copies.items():
            if not share.number <= (limit if share.real else _CANCELLED * limit):
                raise _no_symmetry(gauge.name, copy, share, limit, precision)
    notes = [f"{precision} hides penalties below {limit:.0%} of a gradient; loss_fn= and batch= show them"] * (
        limit > 1e-2 and bool(gauges)
    )
    notes += [note for copies in shares for share in copies.values() for note in share.notes()]
    _require_state_of(tx, state, params)
    for said in (said for held in transformations_of(tx) for said in held.preflight(params)):
        if isinstance(said, ValueError):
            raise said
        notes.append(said)
    notes += [] if report is None else require_no_contradiction(state, params, report)
    notes += _require_steps_that_count(tx, state, params, grads)
    return Report(tuple(map(_row, gauges, shares)), limit, precision, tuple(sorted(frozen)), tuple(notes))


class _Share(NamedTuple):
    """What one copy of a gauge has of a gradient.

    Attributes:
      number: its asymmetry.
      leaves: what it moves.
      zero: those of them whose whole gradient is zero, if the gradient of another one is not.
      real: whether its leaves have another gradient than along constants. That of a key bias is what cancels in a sum.
    """

    number: float
    leaves: tuple[str, ...]
    zero: tuple[str, ...]
    real: bool

    def notes(self) -> list[str]:
        return [
            f"the gradient of '{path}' is zero here; if the loss never trains it (stop_gradient), {_say_frozen(path)}"
            for path in self.zero
        ]


def _row(gauge: Any, copies: Mapping[str, _Share]) -> tuple[str, str, float]:
    if not copies:  # all of them are left alone, or the group has no directions
        return gauge.name, "left alone", 0.0
    paths = list(dict.fromkeys(path for share in copies.values() for path in share.leaves))
    leaves = ", ".join(paths[:2]) + (f", … ({len(paths)})" if len(paths) > 2 else "")
    return gauge.name, leaves, max(share.number for share in copies.values())


# Gauges and gradients -------------------------------------------------------------------------------------


def _shares(
    gauges: Sequence[Any], params: Any, grads: Any, frozen: frozenset[str], loss_fn: Any, batch: Any
) -> list[dict[str, _Share]]:
    """Per gauge, copy → its share of the gradient, without the copies that a frozen leaf leaves alone."""
    zero = {p for p, g in leaves_by_path(grads).items() if not np.any(np.asarray(g)) and p not in frozen}
    by_gauge = _asymmetries(gauges, params, grads) if loss_fn is None else _in_double(gauges, params, loss_fn, batch)
    shares = []
    for gauge, numbers in zip(gauges, by_gauge, strict=True):
        b, of_gauge = bound((gauge,), params), {}
        across, (copies,) = b.whole.centred(b.whole.vectors(grads)), b.copies
        for copy in copies:
            paths = tuple(dict.fromkeys(path for part in copy.parts for path in changed(part)))
            still = tuple(path for path in paths if path in zero) if not zero >= set(paths) else ()
            real = any(bool(jnp.any(across[path])) for path in paths)
            if copy.key in numbers and not frozen & set(paths):
                of_gauge[copy.key] = _Share(float(numbers[copy.key]), paths, still, real)
        shares.append(of_gauge)
    return shares


def _asymmetries(gauges: Sequence[Any], params: Any, grads: Any) -> list[Mapping[str, Any]]:
    """Per gauge, copy → asymmetry."""
    arrays = jax.tree.map(jnp.asarray, (params, grads))
    return list(jax.device_get(at_once(_asymmetry_of_each, (tuple(gauges),), *arrays)))


def _asymmetry_of_each(gauges: Sequence[Any], params: Any, grads: Any) -> list[Mapping[str, Any]]:
    return [bound((gauge,), params).asymmetry(params, grads)[0] for gauge in gauges]


def _in_double(gauges: Sequence[Any], params: Any, loss_fn: Callable[..., Any], batch: Any) -> list[Mapping[str, Any]]:
    """As `_asymmetries`, of the gradient of a function that is evaluated in float64."""

    def fn(leaves: Any, batch: Any) -> list[Any]:
        p = with_leaves(params, leaves)
        return [loss_fn(p) if batch is None else loss_fn(p, batch)]

    dtypes = {path: jnp.result_type(leaf) for path, leaf in leaves_by_path(params).items()}
    with jax.enable_x64(True):
        doubled = {
            path: np.asarray(leaf, np.float64 if jnp.issubdtype(dtypes[path], jnp.floating) else None)
            for path, leaf in leaves_by_path(params).items()
        }
        lifted = in_double(fn, doubled, dtypes, batch)
        real = {path: x for path, x in doubled.items() if jnp.issubdtype(x.dtype, jnp.floating)}
        gradient = jax.jit(jax.grad(lambda x: jnp.sum(lifted(doubled | x, batch)[0])), compiler_options=quick_options())
        zeros = {path: np.zeros_like(x) for path, x in doubled.items()}
        grads = with_leaves(params, zeros | gradient(real))
        return _asymmetries(gauges, with_leaves(params, doubled), grads)


def _precision(grads: Any) -> tuple[float, str]:
    """The asymmetry that roundoff explains at the precision of a gradient, and that precision in words.

    Weights in float32 may have gradients that were computed in bfloat16. Their mantissas end in zeros.
    """
    leaves = [np.asarray(x) for x in jax.tree.leaves(grads) if jnp.issubdtype(jnp.result_type(x), jnp.floating)]
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
    """Per nonzero entry, the bits of its mantissa up to the last that is set."""
    kind = np.dtype(np.float64) if x.dtype == np.float64 else np.dtype(np.float32)
    width = int(jnp.finfo(kind).nmant)
    entries = x.astype(kind).ravel()
    entries = entries[np.isfinite(entries) & (entries != 0)][:_MOST_ENTRIES]
    mantissas = entries.view(np.uint64 if width == 52 else np.uint32).astype(np.uint64) & np.uint64(2**width - 1)
    lowest = mantissas & (~mantissas + np.uint64(1))  # the last bit that is set, or 0
    return np.where(mantissas == 0, 0, width - np.log2(np.maximum(lowest, 1)).astype(int))


def _no_symmetry(name: str, copy: str, share: _Share, limit: float, precision: str) -> ValueError:
    leaves = ", ".join(f"'{path}'" for path in share.leaves[:3]) + (", …" if len(share.leaves) > 3 else "")
    where = f" of copy '{copy}'" if copy else ""
    stopped = [f"; if the loss never trains '{path}' (stop_gradient), {_say_frozen(path)}" for path in share.zero[:1]]
    return binding_error(
        "check", f"{name} on {leaves} is no symmetry of the loss that made these gradients",
        f"an asymmetry{where} of {share.number:.2g}",
        f"at most {limit:.0e}, the roundoff of {precision}",
        f"take this {name} out of the list, or take out of the loss what sees it: a penalty on these weights, on "
        f"logits or on activations, or another reader of these leaves{''.join(stopped)}",
    )


def _say_frozen(path: str) -> str:
    return f"say so: go.quotient(..., frozen=go.by_path({{'{path}': True}}, default=False))"


# Frozen leaves --------------------------------------------------------------------------------------------


def _frozen_in(state: Any) -> frozenset[str]:
    """The leaves that states of this library say never change."""

    def says(node: Any) -> bool:
        return isinstance(getattr(node, "frozen", None), dict)

    found = set[str]()
    for node in filter(says, jax.tree.leaves(state, is_leaf=says)):
        found |= set(node.frozen) | _frozen_in([value for field, value in node._asdict().items() if field != "frozen"])
    return frozenset(found)


def _require_no_mask_outside(tx: Any, gauges: Sequence[Any], params: Any, frozen: frozenset[str]) -> None:
    """Raises ValueError where a mask behind a step drops what one side of a gauge was to take."""
    outside = frozen_leaves("check", tx, params) - frozen
    for gauge in gauges if outside else ():
        for copy in bound((gauge,), params).copies[0]:
            paths = {path for part in copy.parts for path in changed(part)}
            if outside & paths and not outside >= paths:
                still, other = min(outside & paths), min(paths - outside)
                raise binding_error(
                    "check", f"'{still}' is frozen outside the optimizer that moves {gauge.name}",
                    f"a step that is zero on '{still}' after a step that {gauge.name} shares with '{other}'",
                    "a mask inside, so that the other leaf trains as it would alone",
                    "put the mask inside, go.quotient(optax.partition({'t': inner, 'f': optax.set_to_zero()}, labels), "
                    f"gauges), or {_say_frozen(still)}")


# States ---------------------------------------------------------------------------------------------------


def _require_state_of(tx: Any, state: Any, params: Any) -> None:
    """Raises ValueError for a state that was made for other weights.

    At the first step, all of its arrays are those of `tx.init(params)`. Later, the sizes of its frames are.
    """
    fresh = tx.init(params)
    pairs = list(zip(jax.tree.leaves_with_path(state), jax.tree.leaves(fresh), strict=False))
    if len(jax.tree.leaves(state)) != len(jax.tree.leaves(fresh)) or any(
        jnp.shape(a) != jnp.shape(b) for (_, a), b in pairs
    ):
        raise binding_error(
            "check", "a state of another optimizer, or of another tree", f"{len(jax.tree.leaves(state))} arrays",
            f"{len(jax.tree.leaves(fresh))} arrays, as tx.init(params) makes", "write state = tx.init(params)")
    started = all(np.array_equal(a, b) for (_, a), b in pairs if jnp.issubdtype(jnp.result_type(a), jnp.integer))
    if not started:
        return _require_sizes(state, fresh)
    for (keys, a), b, c in zip((p for p, _ in pairs), jax.tree.leaves(fresh), _disturbed(tx, params), strict=True):
        if not jnp.issubdtype(jnp.result_type(a), jnp.floating):
            continue
        size = float(np.linalg.norm(np.asarray(b, np.float64)))
        # A head with equal eigenvalues has no basis of its own: roundoff chooses one, and it proves nothing.
        off, least = (float(np.linalg.norm(np.asarray(x, np.float64) - np.asarray(b, np.float64))) for x in (a, c))
        if off > max(_OTHER_WEIGHTS * size, least / _NOISE * 1e-2) and size > 0:
            raise _other_weights(jax.tree_util.keystr(keys), off / size)
    return None


def _disturbed(tx: Any, params: Any) -> list[Any]:
    """The arrays of a state at weights that differ by roundoff."""

    def moved(key: jax.Array, leaf: Any) -> Any:
        real = jnp.issubdtype(jnp.result_type(leaf), jnp.floating)
        return (leaf * (1.0 + _NOISE * jax.random.normal(key, jnp.shape(leaf)))).astype(leaf.dtype) if real else leaf

    leaves, structure = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(0), max(1, len(leaves)))
    arrays = map(jnp.asarray, leaves)
    return jax.tree.leaves(tx.init(jax.tree.unflatten(structure, map(moved, keys, arrays))))


def _require_sizes(state: Any, fresh: Any) -> None:
    """Raises ValueError where the sizes of a frame are not those of the weights."""
    is_frame = lambda node: isinstance(node, Frame)  # noqa: E731
    both = ([n for n in jax.tree.leaves(x, is_leaf=is_frame) if is_frame(n)] for x in (state, fresh))
    for kept, read in zip(*both, strict=True):
        for label, live in ({} if kept.frozen else kept.live).items():
            a, b = (np.asarray(frame.elements[label]) for frame in (kept, read))
            off = np.abs(a - b) / np.maximum(np.maximum(np.abs(a), np.abs(b)), np.finfo(np.float64).tiny)
            known = np.asarray(live & read.live[label])
            number = float(np.mean(off[known])) if off.shape == known.shape and known.any() else 0.0
            if number > _OTHER_SIZE:
                raise _other_weights(label, number)


def _other_weights(where: str, off: float) -> ValueError:
    return binding_error(
        "check", "the state was made for other weights", f"'{where}' is {off:.2g} of its size away from these weights'",
        "the frame and the state of the parameters that are passed", "write state = tx.init(params)")


# Updates --------------------------------------------------------------------------------------------------


def _require_steps_that_count(tx: Any, state: Any, params: Any, grads: Any) -> list[str]:
    """Raises ValueError where the dtype of a leaf rounds its update away; returns sentences."""
    rules, leaves = said_by(tx, params), leaves_by_path(params)
    polar = any("polar" in rule.rule for rule in rules.values())
    coarse = any(jnp.finfo(x.dtype).nmant < jnp.finfo(real_dtype()).nmant for x in leaves.values() if _is_real(x))
    if not polar and not coarse:  # what float32 rounds away is roundoff
        return []
    try:
        updates, _ = jax.jit(tx.update, compiler_options=quick_options())(grads, state, params)
    except TypeError:
        return ["the first update was not looked at, because the optimizer needs further arguments"]
    # Where a leaf stores γ − 1, roundoff is that of γ.
    added: dict[str, Any] = {}
    for gauge in gauges_of(tx):
        added |= bound((gauge,), params).whole.added
    for (path, leaf), update in zip(leaves.items(), jax.tree.leaves(updates), strict=True):
        if not _is_real(leaf):
            continue
        # What is roundoff where updates are computed, as that of an anchor, is no update.
        least = _TIMES_ROUNDOFF * float(jnp.finfo(real_dtype()).eps)
        u, p = (np.asarray(x, np.float64) for x in (update, leaf))
        moving = np.abs(u) > least * (np.abs(p) + added.get(path, 0.0))
        if rules.get(path, _NO_RULE).rule == "Adam" and polar and sum(n > 1 for n in p.shape) > 1:
            _require_slow(path, u, p)
        stuck = moving & (np.asarray(optax.apply_updates(leaf, update)) == np.asarray(leaf))
        if moving.any() and stuck.sum() > _ALL_ROUNDED * moving.sum():
            raise binding_error(
                "check", f"the update of '{path}' is rounded away by {jnp.result_type(leaf)}",
                f"{stuck.sum() / moving.sum():.1%} of its entries stay what they are",
                f"at most {_ALL_ROUNDED:.0%}",
                f"keep '{path}' in float32 while it is trained, or take a larger learning rate")
    return []


def _is_real(leaf: Any) -> bool:
    return bool(jnp.issubdtype(jnp.result_type(leaf), jnp.floating))


def _require_slow(path: str, u: np.ndarray, p: np.ndarray) -> None:
    """Raises ValueError for a matrix that Adam steps at a rate which is meant for orthogonalized steps."""
    share = float(np.linalg.norm(u) / max(np.linalg.norm(p), np.finfo(np.float64).tiny))
    if _FAST < share and np.any(p):
        raise binding_error(
            "check", f"Adam steps the matrix '{path}' at Muon's rate", f"a step of {share:.0%} of its size",
            f"at most {_FAST:.0%}", "give Adam a rate of its own, adam_learning_rate=1e-3, or list the matrix for Muon")
