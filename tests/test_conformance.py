"""What every Optax transformation must put up with: each row of `TRANSFORM_CASES` against one matrix of checks.

One tiny tree holds every kind of gauge; gradients are fixed noise, since no model is needed to see a dtype change or
a retrace. Compiling is what takes time here: rows run compiled once each, wrappers around them are only traced, and
what a wrapper computes is checked on `ddc_adamw` with a short list of gauges.
"""

import copy
import functools
import operator
import pickle
from collections.abc import Callable
from typing import Any, TypeAlias

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx, serialization
from flax.core import FrozenDict
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import gauge_optax as go
from gauge_optax.binding import leaves_by_path
from gauge_optax.tools.plan import gauges_of
from tests.cases import TRANSFORM_CASES, TransformCase
from tests.programs import primitives
from tests.quick import jit
from tests.refusals import refused
from tests.tolerances import tolerance
from tests.twins import driven, normal_like, structure

Tree = Any
Transformation: TypeAlias = optax.GradientTransformationExtraArgs

SHAPES: dict[str, dict[str, tuple[int, ...]]] = {
    "norm": {"scale": (3,)}, "up": {"kernel": (3, 4), "bias": (4,)}, "down": {"kernel": (4, 3)},
    "value": {"kernel": (3, 2, 3)}, "out": {"kernel": (2, 3, 3)}, "query": {"kernel": (3, 2, 2)},
    "key": {"kernel": (3, 2, 2)}, "normed": {"kernel": (3, 2)}, "head": {"kernel": (3, 5), "bias": (5,)},
    "free": {"kernel": (2,)},
}
NORM = go.norm_scale({"norm/scale": "channel"}, {"up/kernel": "channel _", "value/kernel": "channel _ _"})
UNIT = go.rescale({"up/kernel": "_ channel", "up/bias": "channel"}, {"down/kernel": "channel _"})
TURN = go.head_rotation({"value/kernel": "_ head basis", "out/kernel": "head basis _"})
TORUS = go.rope_torus({"query/kernel": "_ head basis", "key/kernel": "_ head basis"})
NORMED = go.scale_invariant({"normed/kernel": "_ channel"})
SHIFT = go.logit_shift({"head/kernel": "_ vocab", "head/bias": "vocab"})
EVERY_KIND = [NORM, UNIT, TURN, TORUS, NORMED, SHIFT]
SHORT = [UNIT, TURN]  # what the wrappers get: compiles and traces in a fraction

name = operator.attrgetter("name")
rows = pytest.mark.parametrize("case", TRANSFORM_CASES, ids=name)
FIRST_OF_ITS_KIND = {c.name.split("/")[0]: c.name for c in reversed(TRANSFORM_CASES)}.values()


@pytest.fixture(autouse=True)
def _fresh_trace_counter() -> None:
    """Chex counts traces by a function's source, over all tests."""
    chex.clear_trace_counter()


# Trees --------------------------------------------------------------------------------------------


def _abstract(dtype: Any) -> Tree:
    return jax.tree.map(lambda s: jax.ShapeDtypeStruct(s, dtype), SHAPES, is_leaf=lambda s: isinstance(s, tuple))


def _params(dtype: Any = jnp.float32) -> Tree:
    return normal_like(0, _abstract(dtype))


def _signature(tree: Tree) -> Tree:
    """Structure, shapes, dtypes: what must not change from step to step."""
    return jax.tree.structure(tree), [(x.shape, x.dtype) for x in jax.tree.leaves(tree)]


def _finite(tree: Tree) -> bool:
    return all(bool(jnp.all(jnp.isfinite(x))) for x in jax.tree.leaves(tree))


def _close(found: Tree, expected: Tree) -> None:
    dtype = next(x.dtype for x in jax.tree.leaves(expected) if jnp.issubdtype(x.dtype, jnp.floating))
    chex.assert_trees_all_close(found, expected, rtol=tolerance("optax", dtype), atol=tolerance("optax", dtype))


def _traced(tx: Transformation, params: Tree) -> Tree:
    """Traces `init` and two updates: states keep their signature, updates have the dtypes of the parameters."""
    abstract = jax.eval_shape(lambda: params)
    state = jax.eval_shape(tx.init, abstract)
    updates, after = jax.eval_shape(tx.update, abstract, state, abstract)
    assert _signature(after) == _signature(state)
    assert _signature(updates) == _signature(abstract)
    return state


# Rows ---------------------------------------------------------------------------------------------


ON_VECTORS = (
    "hyperball", "max_norm", "rotational", "track_rotation", "scale_by_polar", "scale_by_vector_norm",
    "keep_norms_below",
)


@rows
def test_a_transformation_says_which_gauges_it_holds(case: TransformCase) -> None:
    tx, kind = case.make(EVERY_KIND), case.name.split("/")[0]
    init, update = tx
    assert (init, update) == (tx.init, tx.update)
    if kind in ON_VECTORS or kind.startswith("rotational"):
        assert tx.gauges == ()
    elif case.factory is getattr(go, kind) or kind in ("compress_second_moments", "max_norm_muon"):
        assert tx.gauges == tuple(case.of_its_kind(EVERY_KIND))
    else:  # these rows choose some of the gauges, or write others for the same leaves
        assert UNIT in tx.gauges
    assert copy.copy(tx).gauges == tx._replace().gauges == tx.gauges and tx._replace().preflight is tx.preflight
    assert gauges_of(optax.chain(optax.clip(1.0), optax.masked(tx, True))) == list(tx.gauges)


def test_wrappers_hold_what_they_wrap_too() -> None:
    inner = go.quotient(optax.adam(0.01), [UNIT])
    assert go.measure.track(inner, go.product([NORM, UNIT])).gauges == (NORM, UNIT)
    assert go.orbit.gauge_fix(inner, [NORM]).gauges == (NORM, UNIT)
    assert go.links.compress_second_moments(optax.adam(0.01)).gauges == ()


# Compiled once per row; what other rows of a kind compute is checked where their options are.
compiled = [c for c in TRANSFORM_CASES if c.linear or c.name in FIRST_OF_ITS_KIND]
marked = [c if c in compiled else pytest.param(c, marks=pytest.mark.slow) for c in TRANSFORM_CASES]


@pytest.mark.slow_rows("quotient_muon/linear", "[!qdg]*", "g*", "ddc_*", "quotient_adamw/*")
@pytest.mark.parametrize("case", marked, ids=name)
def test_three_donated_steps_in_bfloat16(case: TransformCase) -> None:
    """Traced once, state of one signature from `eval_shape` of `init` on, all finite, every buffer donated."""
    tx, params = case.make(EVERY_KIND), _params(jnp.bfloat16)
    expected, shapes = _signature(jax.eval_shape(tx.init, params)), _signature(params)

    @functools.partial(jit, donate_argnums=(0, 1, 2))
    @chex.assert_max_traces(n=1)
    def step(grads: Tree, state: Tree, params: Tree) -> tuple[Tree, Tree, Tree]:
        updates, state = tx.update(grads, state, params)
        return updates, state, optax.apply_updates(params, updates)

    state = jit(tx.init)(params)
    assert _signature(state) == expected
    for n in range(3):
        updates, state, params = step(normal_like(n + 1, params), state, params)
        assert _signature(state) == expected and _signature(updates) == _signature(params) == shapes
        assert _finite((updates, state, params))


@pytest.mark.slow_rows("[!dq]*-float64", "*-float32", "[!cdmq]*-coarse")  # float32 is the dtype of all other tests here
@pytest.mark.parametrize("precision", ["mixed", "coarse", "float64", "float32"])
@rows
def test_dtypes_are_kept(case: TransformCase, precision: str) -> None:
    """Of trees of several precisions too; float32 is kept while float64 is possible.

    Where gradients are coarser than parameters, a step that moves weights along an orbit is not rounded to them.
    """
    if precision == "coarse":
        tx, params = case.make(EVERY_KIND), _abstract(jnp.float32)
        state = jax.eval_shape(tx.init, params)
        updates, after = jax.eval_shape(tx.update, _abstract(jnp.bfloat16), state, params)
        assert _signature(after) == _signature(state)
        if "quotient" in case.name:
            moved = go.bind(EVERY_KIND, params).slice.added
            assert {x.dtype for path, x in leaves_by_path(updates).items() if path in moved} == {jnp.dtype("float32")}
        return
    if precision == "mixed":
        kernels = {m: {"kernel": x["kernel"].astype("bfloat16")} for m, x in _params().items() if "kernel" in x}
        _traced(case.make(EVERY_KIND), {m: x | kernels.get(m, {}) for m, x in _params().items()})
        return
    with jax.enable_x64(True):
        _traced(case.make(EVERY_KIND if precision == "float64" else SHORT), _params(precision))


@rows
def test_update_without_params_is_refused(case: TransformCase) -> None:
    tx, params = case.make(SHORT), _params()
    with refused("without params", case.name.split("/")[0]):
        tx.update(params, jax.eval_shape(tx.init, params))


@rows
def test_formats_restore_states_bit_by_bit(case: TransformCase) -> None:
    params = _params()
    tx, draw = case.make(EVERY_KIND), np.random.default_rng(0)
    shapes = jax.eval_shape(tx.init, params)
    state = jax.tree.map(lambda x: draw.integers(64, size=x.shape).astype(x.dtype), shapes)
    stored = serialization.from_bytes(shapes, serialization.to_bytes(state))
    for restored in (stored, pickle.loads(pickle.dumps(state)), copy.deepcopy(state)):
        chex.assert_trees_all_equal(restored, state)


# One run per device -------------------------------------------------------------------------------


def _on_each_device(function: Callable[..., Tree]) -> Callable[..., Tree]:
    """In `shard_map`, of trees with an axis of devices in front. Types are those of any number of devices."""
    mesh = jax.make_mesh((1,), ("device",), axis_types=(AxisType.Auto,))
    own = lambda *trees: jax.tree.map(lambda x: x[None], function(*jax.tree.map(lambda x: x[0], trees)))  # noqa: E731
    return jax.shard_map(own, mesh=mesh, in_specs=P("device"), out_specs=P("device"))


def _ahead(params: Tree) -> Tree:
    return jax.tree.map(lambda x: x[None], params)


def _two_steps(case: TransformCase, params: Tree) -> Tree:
    tx = case.make(EVERY_KIND)
    state = tx.init(params)
    first, after = tx.update(params, state, params)
    assert jax.tree.map(jax.typeof, state) == jax.tree.map(jax.typeof, after)
    return first, tx.update(params, after, params)[0]


@pytest.mark.slow_rows("track*/*", "*/codes", "scale_by_[ds]*/*", "*_adamw/linear", "rotational_*")
@rows
def test_every_device_may_have_weights_of_its_own(case: TransformCase) -> None:
    """The types of a state, which say over which devices it varies, are from `init` on those of every step.

    No step has a sum over devices.
    """
    each = _on_each_device(functools.partial(_two_steps, case))
    assert not [name for name in primitives(jax.make_jaxpr(each)(_ahead(_params())).jaxpr) if "psum" in name]


@pytest.mark.slow_rows("[a-fh-pr-z]*", "quotient*/*")
@rows
def test_every_device_may_have_gradients_of_its_own_alone(case: TransformCase) -> None:
    params, tx = _params(), case.make(EVERY_KIND)
    state = tx.init(params)
    jax.eval_shape(_on_each_device(lambda gradient: tx.update(gradient, state, params)[0]), _ahead(params))


@pytest.mark.slow_rows("gauge_fix/*")
@pytest.mark.parametrize(
    "case", [c for c in TRANSFORM_CASES if c.name in ("gauge_fix/adam", "scale_by_opposite_gram/stale")], ids=name
)
def test_on_its_device_a_run_computes_the_same(case: TransformCase) -> None:
    steps = functools.partial(_two_steps, case)
    each = jit(_on_each_device(steps))(_ahead(_params()))
    _close(jax.tree.map(lambda x: x[0], each), steps(_params()))


# Containers ---------------------------------------------------------------------------------------


CONTAINERS: dict[str, Callable[[Tree], Tree]] = {  # but a dict, which is a bare wrapper's
    "frozen_dict": FrozenDict, "tuple": lambda params: tuple(params[module] for module in SHAPES),
    "nnx_state": lambda params: nnx.State(jax.tree.map(nnx.Param, params)),
}


def _in(container: str) -> list[go.Gauge]:
    """A gauge by the paths that the container gives."""
    up, down = map([*SHAPES].index, ("up", "down")) if container == "tuple" else ("up", "down")
    return [go.rescale({f"{up}/kernel": "_ channel", f"{up}/bias": "channel"}, {f"{down}/kernel": "channel _"})]


@pytest.mark.slow_rows("tuple-[b-z]*", "frozen_dict-[b-z]*")
@rows
@pytest.mark.parametrize("container", CONTAINERS)
def test_containers_are_taken_and_given_back(container: str, case: TransformCase) -> None:
    _traced(case.make(_in(container)), CONTAINERS[container](_params()))


def _steps(tx: Transformation, params: Tree, gradients: list[Tree]) -> tuple[Tree, Tree]:
    """Sum of the updates of several steps, and the last state."""
    end, state = driven(tx, params, gradients)
    return jax.tree.map(jnp.subtract, end, params), state


# Wrappers, traced ---------------------------------------------------------------------------------


def _everything_but(*modules: str) -> Tree:
    """A mask that hides these modules."""
    return {m: dict.fromkeys(leaves, m not in modules) for m, leaves in SHAPES.items()}


def _injected(case: TransformCase) -> Transformation:
    return optax.inject_hyperparams(case.factory)(gauges=case.of_its_kind(SHORT), **case.options)


def _partitioned(case: TransformCase) -> Transformation:
    """Each gauge with its own leaves, and Adam for the rest."""
    of = {"up": "unit", "down": "unit", "value": "turn", "out": "turn"}
    labels = {m: dict.fromkeys(leaves, of.get(m, "rest")) for m, leaves in SHAPES.items()}
    parts = {"unit": case.make([UNIT]), "turn": case.make([TURN]), "rest": optax.scale_by_adam()}
    return optax.partition(parts, labels)


WRAPPERS: dict[str, Callable[[TransformCase], Transformation]] = {
    "bare": lambda case: case.make(SHORT),
    "inject_hyperparams": _injected,
    "MultiSteps": lambda case: optax.MultiSteps(case.make(SHORT), every_k_schedule=2).gradient_transformation(),
    "masked": lambda case: optax.masked(case.make(SHORT), _everything_but("free", "head")),
    "partition": _partitioned,
    "apply_if_finite": lambda case: optax.apply_if_finite(case.make(SHORT), max_consecutive_errors=5),
}
SHAPED_LIKE_PARAMS = {".mu", ".nu", ".trace", ".columns", ".acc_grads"}


@pytest.mark.slow_rows("partition-*", "apply_if_finite-[b-z]*", "MultiSteps-[!adq]*", "masked-[!aq]*")
@rows
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_wrappers_keep_signatures_and_map_params(wrapper: str, case: TransformCase) -> None:
    tx = WRAPPERS[wrapper](case)
    state = _traced(tx, _params())
    other = functools.partial(jax.tree.map, lambda leaf: "other")  # gets the gauges' part whole
    mapped = optax.tree.map_params(tx, lambda leaf: "params", state, transform_non_params=other)
    assert structure(mapped) == structure(state)
    for path, tag in jax.tree.leaves_with_path(mapped):
        fields = SHAPED_LIKE_PARAMS & {str(key) for key in path}
        assert tag == ("params" if fields else "other"), jax.tree_util.keystr(path)


@pytest.mark.parametrize("case", [c for c in TRANSFORM_CASES if c.factory in (go.scale_by_ddc, go.ddc_adamw)], ids=name)
def test_map_params_gives_moments_the_specs_of_their_leaves(case: TransformCase) -> None:
    """What sharding code does."""
    tx, specs = case.make(EVERY_KIND), {m: {n: f"{m}/{n}" for n in leaves} for m, leaves in SHAPES.items()}
    mapped = optax.tree_utils.tree_map_params(tx, lambda leaf, spec: spec, jax.eval_shape(tx.init, _params()), specs)
    for moment in ("mu", "nu"):
        assert optax.tree_utils.tree_get(mapped, moment) == specs


def _complaint(case: TransformCase, gauge: str) -> tuple[str, str]:
    """Who complains, and what it asks for. Vectors are bound to leaves by themselves: there is no gauge to name."""
    if case.name.startswith("hold_products"):
        return "rescale", "own gauge list"  # in that row's list rotations are scales per head
    bound = "head_linear" if case.linear and gauge == "head_rotation" else gauge
    on_vectors = not case.name.startswith("max_norm_muon")  # which is wrapped in `quotient`
    by_itself = next((name for name in ON_VECTORS if on_vectors and case.name.startswith(name)), None)
    return (by_itself, "own axes") if by_itself else (bound, "own gauge list")


@rows
@pytest.mark.parametrize(("hidden", "gauge"), [
    (("down",), "rescale"), (("value",), "head_rotation"), (("value", "out"), "head_rotation")  # the last one whole
])
def test_a_mask_through_a_gauge_is_refused(hidden: tuple[str, ...], gauge: str, case: TransformCase) -> None:
    tx = optax.masked(case.make(SHORT), _everything_but(*hidden))
    with refused("MaskedNode", *_complaint(case, gauge), f"{hidden[0]}/kernel"):
        tx.init(_params())


# Wrappers, computed -------------------------------------------------------------------------------

OPTIMIZER = next(c for c in TRANSFORM_CASES if c.name == "ddc_adamw/number")


def _gradients(*seeds: int, dtype: Any = jnp.float32) -> list[Tree]:
    return [normal_like(seed, _params(dtype)) for seed in seeds]


@functools.cache
def _plain() -> tuple[Tree, Tree]:
    """Motion and state after two steps of the optimizer by itself."""
    return _steps(OPTIMIZER.make(SHORT), _params(), _gradients(1, 2))


@pytest.mark.slow_rows("ddc_adamw/number")
@pytest.mark.parametrize(
    "case", [c for c in TRANSFORM_CASES if c.factory in (go.add_gauge_decay, go.ddc_adamw)], ids=name
)
def test_injected_hyperparameters_compute_the_same(case: TransformCase, x64: None) -> None:
    """Schedules among them: at every step they are worth what they are to the transformation itself.

    In float64, since 1 − b2 of a float32 b2 is off by 1e-5.
    """
    params, gradients = _params(jnp.float64), _gradients(1, 2, dtype=jnp.float64)
    _close(_steps(_injected(case), params, gradients)[0], _steps(case.make(SHORT), params, gradients)[0])


@pytest.mark.slow
def test_changed_hyperparameters_do_not_retrace() -> None:
    tx, params = _injected(OPTIMIZER), _params()
    step = jit(chex.assert_max_traces(tx.update, n=1))
    state = jit(tx.init)(params)
    first, _ = step(params, state, params)
    changed = {"learning_rate": 0.0, "weight_decay": 0.3, "b1": 0.5, "b2": 0.9, "refresh_drift": 0.0, "radial_scale": 4}
    assert set(changed) < set(state.hyperparams)
    hyperparams = state.hyperparams | {n: jnp.float32(x) for n, x in changed.items()}
    updates, _ = step(params, state._replace(hyperparams=hyperparams), params)
    assert optax.tree.norm(updates) < 1e-5 < optax.tree.norm(first)


@pytest.mark.slow
def test_injected_hyperparameters_of_bfloat16_parameters_stay_float32() -> None:
    """By default they take the parameters' dtype, in which b2 = 0.999 is 1."""
    tx = optax.inject_hyperparams(go.ddc_adamw, hyperparam_dtype=jnp.float32)(0.01, SHORT)
    motion, state = _steps(tx, _params(jnp.bfloat16), _gradients(1, 2, dtype=jnp.bfloat16))
    assert _finite((motion, state)) and float(optax.tree.norm(motion)) > 0
    assert state.hyperparams["b2"].dtype == jnp.float32 and state.hyperparams["b2"] < 1
    assert {x.dtype for x in jax.tree.leaves(motion)} == {jnp.dtype(jnp.bfloat16)}


@pytest.mark.slow
def test_multi_steps_make_one_step_of_the_mean_gradient() -> None:
    apart = jax.tree.map(lambda x: 0.5 * x, normal_like(3, _params()))
    halves = [jax.tree.map(way, g, apart) for g in _gradients(1, 2) for way in (jnp.add, jnp.subtract)]
    _close(_steps(WRAPPERS["MultiSteps"](OPTIMIZER), _params(), halves)[0], _plain()[0])


def test_masked_leaves_pass_and_the_others_do_not_notice() -> None:
    found, state = _steps(WRAPPERS["masked"](OPTIMIZER), _params(), _gradients(1, 2))
    raw, hidden = jax.tree.map(jnp.add, *_gradients(1, 2)), ("free", "head")
    _close(found, {m: raw[m] if m in hidden else x for m, x in _plain()[0].items()})
    shown = {path for path in leaves_by_path(raw) if not path.startswith(hidden)}
    assert set(leaves_by_path(optax.tree_utils.tree_get(state, "mu"))) == shown


def test_partitions_do_not_notice_each_other() -> None:
    """Each gauge alone, its leaves shared with no other, moves as in the product."""
    found, _ = _steps(_partitioned(OPTIMIZER), _params(), _gradients(1, 2))
    _close(*({m: x[m] for m in ("up", "down", "value", "out")} for x in (found, _plain()[0])))


@pytest.mark.parametrize("bad", [jnp.nan, jnp.inf])
def test_bad_gradients_never_reach_the_state(bad: float) -> None:
    good, later = _gradients(1, 2)
    poisoned = good | {"value": {"kernel": good["value"]["kernel"].at[0, 0, 0].set(bad)}}
    motion, state = _steps(WRAPPERS["apply_if_finite"](OPTIMIZER), _params(), [good, poisoned, later])
    _close((motion, state.inner_state), _plain())
    assert state.total_notfinite == 1 and bool(state.last_finite)
