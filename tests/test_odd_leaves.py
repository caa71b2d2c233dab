"""Every public function on trees with an odd leaf: the answer of the tree without it, or a ValueError that names it.

A public function that stands in none of the tables fails a test, and so does a leaf for which a call raises anything
else, or changes what it was not asked to change. Optimizers also take trees that can be called, and
of several precisions: float32 scales beside bfloat16 kernels train at rates that bfloat16 rounds away.
"""

import dataclasses
import functools
import itertools
import re
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gauge_optax as go
from gauge_optax.binding import has_dtype, inexact_leaves, leaves_by_path
from tests.cases import DISCRETE_CASES, FLAT_CASES, GAUGE_CASES, TRANSFORM_CASES, with_masks
from tests.refusals import each_refused
from tests.tolerances import tolerance
from tests.twins import normal, structure, trained, walk

Tree = Any
SHAPES: dict[str, Any] = {"up": (3, 4), "down": (4, 3), "value": (3, 2, 2), "out": (2, 2, 3), "head": (3, 5)}
NET, OTHER, STEP = (normal(seed, SHAPES, jnp.float32) for seed in range(3))
X, KEY = normal(3, {"x": (20, 3)}, jnp.float32)["x"], jax.random.key(0)
UNIT = go.rescale({"up": "_ channel"}, {"down": "channel _"})
TURN = go.head_rotation({"value": "_ head basis", "out": "head basis _"})
LINEAR = go.head_linear({"value": "_ head basis"}, {"out": "head basis _"})
G = [UNIT, TURN, go.logit_shift({"head": "_ vocab"})]
m, orbit = go.measure, go.orbit


def fn(p: Tree, x: jax.Array = X) -> jax.Array:
    if getattr(p["up"], "shape", ()) != (3, 4) or not jnp.issubdtype(p["up"].dtype, jnp.floating):
        raise ValueError("a function of the user's does not take 'up'; remedy: none")
    up, down, value, out, head = (jnp.asarray(p[name], jnp.float32) for name in SHAPES)
    heads = jnp.einsum("nd,dhe->nhe", jax.nn.relu(x @ up) @ down, value)
    return jax.nn.log_softmax(jnp.einsum("nhe,hed->nd", heads, out) @ head)


def loss(p: Tree, x: jax.Array = X) -> jax.Array:
    return -jnp.mean(fn(p, x)[:, 0])


# Odd leaves ---------------------------------------------------------------------------------------------------

ONE = jnp.full(2, 0.5)
BESIDE: dict[str, Any] = {
    "bfloat16": jnp.ones(3, jnp.bfloat16), "float16": jnp.full(3, 6e4, jnp.float16), "counter": jnp.int32(7),
    "float8": jnp.ones(3, jnp.float8_e4m3fn), "mask": jnp.array([True, False]), "none": None, "integer": 3,
    "float": 0.5, "numpy": np.ones(2, np.float32), "scalar": np.float32(2), "empty": jnp.zeros((0, 2)),
    "keys": {0: ONE, 1: jnp.ones((1, 1))}, "shared": [ONE, ONE], "nan": jnp.array([1.0, jnp.nan]),
    "complex": jnp.array([3 + 4j]), "python complex": 1j, "key": jax.random.key(7), "function": jax.nn.relu,
}  # fmt: skip
ALONE = {name: BESIDE.pop(name) for name in ("nan", "complex", "python complex", "key", "function")}  # some refuse them
FLOATS = {name: x for name, x in BESIDE.items() if name not in ("counter", "mask", "integer")}
CROWDS = {"all": BESIDE, "floats": FLOATS, **ALONE}
INSIDE: dict[str, Callable[[jax.Array], Any]] = {
    "numpy": np.asarray, "bfloat16": lambda x: x.astype(jnp.bfloat16), "complex": lambda x: x + 1j,
    "integers": lambda x: x.astype(int), "key": lambda x: jax.random.split(KEY, x.shape), "none": lambda x: None,
    "float": lambda x: 0.5, "no channels": lambda x: x[:, :0], "float8": lambda x: x.astype(jnp.float8_e4m3fn),
    "float64": lambda x: np.asarray(x, np.float64),
}


def beside(leaf: Any) -> list[Tree]:
    return [{**tree, "odd": leaf} for tree in (NET, OTHER, STEP)]


# Functions ----------------------------------------------------------------------------------------------------

TX = go.quotient(optax.adam(0.1), G)


def state(p: Tree, g: Tree, tx: Any) -> Any:
    return tx.update(g, tx.init(p), p)[1]


def adam(mu: Tree, nu: Tree) -> optax.ScaleByAdamState:
    """A state; Optax makes none for a key or a function."""
    numbers = lambda x: has_dtype(x) and not jnp.issubdtype(jnp.result_type(x), jax.dtypes.extended)  # noqa: E731
    mu, nu = (jax.tree.map(lambda x: jnp.asarray(x) if numbers(x) else x, tree) for tree in (mu, nu))
    return optax.ScaleByAdamState(jnp.int32(1), mu, jax.tree.map(lambda x: jnp.abs(x) if numbers(x) else x, nu))


def recorded(p: Tree) -> None:
    with tempfile.TemporaryDirectory() as folder:
        m.Recorder(Path(folder) / "run", {"odd": lambda p: p}, every=1, steps=1, progress=False).record(0, p)


def calls(p: Tree, q: Tree, g: Tree) -> dict[str, Callable[[], Any]]:
    """Of parameters, of others, and of a tangent, gradient or update. The first eight return parameters."""
    return {
        "bind": lambda: go.bind(G, p).random_twin(KEY, p), "canonicalize": lambda: orbit.canonicalize(p, G),
        "rotate": lambda: orbit.rotate(p, TURN, fn=fn, batch=X), "untie": lambda: orbit.untie(p, "up", "new"),
        "unpack": lambda: orbit.unpack(orbit.pack(p, LINEAR)), "average": lambda: orbit.average([p, p], G),
        "interpolate": lambda: orbit.interpolate(p, p, 0.5),
        "evaluate": lambda: orbit.evaluate(lambda inner, point: point, TX.init(p), p),
        "product": lambda: go.product(G).horizontal(p, g), "align": lambda: orbit.align(p, q, G),
        "choose": lambda: orbit.choose(lambda p: -loss(p) ** 2 - p["down"].sum(), p, UNIT, steps=2, progress=False),
        "distance": lambda: orbit.distance(p, p, G), "restart": lambda: orbit.restart(TX, TX.init(p), p).frame,
        "transport": lambda: orbit.transport(state(p, g, TX), p, G, go.product(G).sample(KEY, p)),
        "from_state": lambda: orbit.from_state(
            (optax.TraceState(adam(p, p).mu), optax.EmptyState()), optax.sgd(0.1, 0.9), UNIT, p).frame,
        **dict.fromkeys(("pack", "packed_dot"), lambda: orbit.packed_dot(X, orbit.pack(p, LINEAR)["value"])),
        "packed_rows": lambda: orbit.packed_rows(orbit.pack(p, LINEAR)), "drift": lambda: m.drift(p, q, G),
        "by_path": lambda: go.tools.by_path({"up": 1}, default=0)(p)["up"], "redundancy": lambda: m.redundancy(G, p),
        "census": lambda: m.census(fn, p, [X], G, "logits", progress=False).explained,
        "EmpiricalFisher": lambda: m.EmpiricalFisher(fn, p, [X], [jnp.arange(20) % 5], only=["up", "down"]).dense(),
        "Fisher": lambda: m.Fisher(fn, p, [X], KEY, 9_000, only="up").dense(),
        "GGN": lambda: m.GGN(fn, p, [X]).blocks()["up"], "Hessian": lambda: m.Hessian(loss, p, [X], only="up").dense(),
        "directional_fisher": lambda: m.directional_fisher(m.GGN(fn, p, [X], only="down"), g),
        "quotient_fisher": lambda: m.quotient_fisher(m.GGN(fn, p, [X], only=list(SHAPES)), G).eigenvalues(),
        "adam_factors": lambda: m.adam_factors(adam(g, p)).momentum["down"], "barrier": lambda: m.barrier(loss, p, q),
        "adam_precondition": lambda: m.adam_precondition(adam(p, p), lambda p: g)(p, g)["down"],
        "gauge_fraction": lambda: m.gauge_fraction(p, G, g), "step_leakage": lambda: m.step_leakage(UNIT, p, g),
        "gauge_sensitivity": lambda: m.gauge_sensitivity(
            optax.sgd(0.1), loss, p, UNIT, represent=fn, key=KEY, num_samples=2),
        "leakage_along": lambda: m.leakage_along(functools.partial(m.step_leakage, UNIT), [(p, g), (q, g)]),
        "llc": lambda: m.llc(loss, p, [X], KEY, UNIT, n_beta=1.0, lr=1e-4, num_draws=2, num_chains=1).initial_loss,
        "quotient_arc_length": lambda: m.quotient_arc_length([p, q], G), "Recorder": lambda: recorded(p),
        "rescale_leakage": lambda: m.rescale_leakage(UNIT, p, g, g),
        "rotation_leakage": lambda: m.rotation_leakage(TURN, p, g, g),
        "second_order_leakage": lambda: m.second_order_leakage(lambda p: p, lambda p, g: g, p, TURN),
        "slice_norms": lambda: m.slice_norms(p, g, g, G).update_norm["up"],
        "vertical_motion": lambda: m.vertical_motion(p, g, G),
        "assert_invariant": lambda: go.testing.assert_invariant(loss, p, UNIT, KEY, rtol=0.1),
        "assert_horizontal": lambda: go.testing.assert_horizontal(go.product(G).horizontal(p, g), p, G, rtol=0.1),
        "assert_equivariant_step": lambda: go.testing.assert_equivariant_step(
            go.quotient(optax.sgd(0.1), UNIT), loss, p, UNIT, KEY, steps=1, rtol=0.1),
        "discover": lambda: len(go.discover(fn, p, [X, X + 1], "logprobs", progress=False).gauges),
        "lora": lambda: len(go.lora({"lora_a": p["up"], "lora_b": p["down"], "odd": p.get("odd")})),
        "plan": lambda: str(go.plan(go.quotient(optax.sgd(0.1), G), p)).count("rescale"),
        "check": lambda: len(go.check(TX, TX.init(p), p, g, loss_fn=loss).asymmetries),
    }


CALLS = list(calls(NET, OTHER, STEP))
PARAMETERS = CALLS[:8]
CASES: tuple[Any, ...] = (*GAUGE_CASES, *FLAT_CASES, *DISCRETE_CASES, *TRANSFORM_CASES)
FIRST: dict[str, Any] = {case.name.split("/")[0]: case for case in reversed(CASES)}
GAUGES = [name for name, case in FIRST.items() if hasattr(case, "gauges") and name not in ("product", "user_gauge")]
OPTIMIZERS = [name for name, case in FIRST.items() if hasattr(case, "make")]
LEFT_OUT = {
    "takes no tree": "Gauge to_json from_json transformer_redundancy corrected predict_equilibrium predicted_drift "
    "kl_order power_law rate_table axes_by_name",
    "takes bare arrays, below": "axis_alignment dead_units effective_rank gram_evolution smallest_singular_value",
    "modules": "orbit norms links tools measure testing",
}
SLOW = (  # what takes a second
    "GGN-*", "check-*", "llc-*", "discover-*", "quotient_arc_length-*", "quotient_fisher-*", "average-*", "transport-*",
    "census-*", "align-all", "rotation_leakage-all", "slice_norms-all", "adam_*-all", "unpack-all", "*_motion-all",
    "step_leakage-all", "*Fisher-all", "track", "track_rotation", "*_muon", "compress_*", "rotational_*",
    "head_linear", "rope_linear", "residual_rotation",
)


def test_every_public_function_has_a_row() -> None:
    modules = [getattr(go, name) for name in ("orbit", "norms", "links", "tools", "measure")]
    public = {*go.__all__, *itertools.chain(*(module.__all__ for module in modules))}
    public |= {name for name in vars(go.testing) if name.startswith("assert_")}
    rows = [*CALLS, *GAUGES, *OPTIMIZERS, *itertools.chain(*map(str.split, LEFT_OUT.values()))]
    assert public == set(rows) and len(rows) == len(set(rows))


def numbers(tree: Tree) -> dict[str, np.ndarray]:
    """The numbers of a result, by path, without those of odd leaves."""
    found = {jax.tree_util.keystr(keys): leaf for keys, leaf in jax.tree_util.tree_leaves_with_path(tree)}
    return {path: np.asarray(x, np.float64) for path, x in found.items() if "odd" not in path}


@functools.cache
def expected(name: str) -> dict[str, np.ndarray]:
    return numbers(calls(NET, OTHER, STEP)[name]())


REFUSED = object()
TRACED = "llc EmpiricalFisher Fisher GGN Hessian directional_fisher quotient_fisher quotient_arc_length".split()
STATES = "evaluate restart transport adam_factors adam_precondition gauge_sensitivity second_order_leakage".split()
# Which calls refuse a leaf beside the gauges; all others take it.
REFUSED_BESIDE = {
    "all": ["gauge_sensitivity", "second_order_leakage", "lora", "assert_equivariant_step", "Recorder"],
    "floats": ["lora", "Recorder"], "nan": ["average", "align", "distance", "check", "assert_equivariant_step"],
    **{kind: [*TRACED, "census", "discover", "Recorder"] for kind in ("complex", "python complex")},
    "key": [*STATES, "slice_norms", "plan", "check", "assert_equivariant_step", "Recorder"],
    "function": [*TRACED, *STATES, "choose", "from_state", "slice_norms", "plan", "check", "Recorder",
                 "assert_invariant", "assert_horizontal", "assert_equivariant_step"],
}
# Which calls do not read 'up', and may take one that a gauge cannot move.
NOT_READ = {
    "unpack", "interpolate", "pack", "packed_dot", "packed_rows", "by_path", "adam_factors", "adam_precondition",
    "Recorder", "rotation_leakage", "second_order_leakage", "lora", "untie",
}


def refused_by_name(call: Callable[[], Any], *words: str) -> Any:
    """What a call returns; REFUSED if it raises an error with a remedy that has one of the words in it."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", np.exceptions.ComplexWarning)
        warnings.filterwarnings("error", "Explicitly requested dtype")
        try:
            return call()
        except (ValueError, AssertionError) as error:  # the latter of go.testing
            assert "remedy:" in str(error) and any(re.search(rf"\b{word}", str(error)) for word in words), repr(error)
            return REFUSED


def same(found: Any, leaf: Any) -> bool:
    """Whether a leaf is what it was: of one kind and dtype, with one value."""
    if not hasattr(leaf, "dtype") or jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
        return bool(type(found) is type(leaf) and found == leaf)
    kinds = isinstance(found, jax.Array) == isinstance(leaf, jax.Array) and found.dtype == leaf.dtype
    one, other = (np.asarray(x).astype(np.complex128) for x in (found, leaf))
    return bool(kinds and np.array_equal(one, other, equal_nan=True))


def same_numbers(name: str, found: Any, rtol: float, atol: float, nan: bool = False) -> None:
    """Those of the trees without odd leaves; some may be NaN, if a leaf is, but no other numbers."""
    assert numbers(found).keys() == expected(name).keys()
    for path, x in numbers(found).items():
        if not (nan and np.isnan(x).any()):
            np.testing.assert_allclose(x, expected(name)[path], rtol=rtol, atol=atol, err_msg=path)


@pytest.mark.slow_rows("*-floats", "*-nan", "*-complex", "*-python complex", "*-key", *SLOW)
@pytest.mark.parametrize("kind", CROWDS)
@pytest.mark.parametrize("name", CALLS)
def test_leaves_beside_the_gauges(name: str, kind: str) -> None:
    leaf = CROWDS[kind]
    found = refused_by_name(calls(*beside(leaf))[name], "odd")
    assert (found is REFUSED) == (name in REFUSED_BESIDE[kind])
    if found is REFUSED:
        return
    same_numbers(name, found, 2e-4, 2e-5, kind == "nan")
    for path, x in leaves_by_path({"odd": leaf}).items() if name in PARAMETERS else ():
        if name in ("average", "interpolate") and inexact_leaves({"odd": x}):
            x = jnp.asarray(x)  # a mean is an array
        assert same(leaves_by_path(found)[path], x), path


CLOSE = {"numpy": 1e-4, "float64": 1e-4, "bfloat16": 0.02, "float8": 0.2}  # of the largest entry of a result


@pytest.mark.slow
@pytest.mark.parametrize("kind", INSIDE)
@pytest.mark.parametrize("name", CALLS)
def test_one_leaf_inside_a_gauge(name: str, kind: str) -> None:
    odd = SHAPES if kind == "float64" else ("up",)
    trees = [{**tree, **{path: INSIDE[kind](tree[path]) for path in odd}} for tree in (NET, OTHER, STEP)]
    found = refused_by_name(calls(*trees)[name], r"up\b", "odd", "lora_")
    if kind not in CLOSE:
        assert found is REFUSED or name in NOT_READ
        return
    for path, x in numbers(found).items():
        size = np.max(np.abs(expected(name)[path]), initial=1e-30)
        np.testing.assert_allclose(x, expected(name)[path], rtol=0, atol=CLOSE[kind] * size, err_msg=path)
    if kind in ("numpy", "float64") and name in PARAMETERS:  # a leaf that moved has JAX's dtype without 64 bits
        assert all(x.dtype == jnp.float32 for x in jax.tree.leaves(found) if isinstance(x, jax.Array))


# Gauges and optimizers ----------------------------------------------------------------------------------------


@pytest.mark.slow_rows(*SLOW)
@pytest.mark.parametrize("name", [*GAUGES, "user_gauge"])
def test_gauges_leave_a_crowd_of_leaves_alone(name: str) -> None:
    gauges, params = FIRST[name].gauges(), FIRST[name].params(KEY)
    b = go.bind(gauges, params)
    element = b.read(params) if name != "permutation" else go.product(gauges).sample(KEY, params)
    crowd = BESIDE | {kind: leaf for kind, leaf in ALONE.items() if kind != "nan"}
    found = go.bind(gauges, {**params, "odd": crowd}).act(element, {**params, "odd": crowd})
    for path, x in numbers(b.act(element, params)).items():
        np.testing.assert_array_equal(numbers(found)[path], x)
    assert all(same(leaves_by_path(found["odd"])[path], x) for path, x in leaves_by_path(crowd).items())


def updated(name: str, params: Tree, _: Tree, gradient: Tree) -> Tree:
    tx = FIRST[name].make(G)
    return tx.update(gradient, tx.init(params), params)[0]


@pytest.mark.slow_rows(*SLOW)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_take_leaves_beside_the_gauges(name: str) -> None:
    """Traced alone, which compiles nothing. All refuse a key and a function, and some a complex leaf."""
    for odd, leaf in CROWDS.items():
        trees = beside(leaf)
        traced = functools.partial(jax.eval_shape, functools.partial(updated, name, *trees))
        updates = refused_by_name(traced, "odd")
        assert updates is not REFUSED or odd in ("key", "function") or (
            "complex" in odd and ("ddc" in name or "scaled_polar" in name))
        assert updates is REFUSED or structure(updates) == structure(trees[0])


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_step_as_without_the_odd_leaves(name: str) -> None:
    found, plain = numbers(updated(name, *beside(BESIDE))), numbers(updated(name, NET, OTHER, STEP))
    for path, x in plain.items():
        np.testing.assert_allclose(found[path], x, rtol=2e-4, atol=2e-5, err_msg=path)


# Arguments ----------------------------------------------------------------------------------------------------

DECIDES_BY_VALUES = (
    "rotate", "untie", "average", "choose", "align", "distance", "census", "quotient_fisher", "barrier", "discover",
    "gauge_sensitivity", "quotient_arc_length", "check", "assert_invariant", "assert_horizontal",
    "assert_equivariant_step",
)


@pytest.mark.parametrize("name", DECIDES_BY_VALUES)
def test_what_decides_by_values_says_so_under_jit(name: str) -> None:
    with pytest.raises(ValueError, match=r"(?s)called inside jit.*outside jit"):
        jax.jit(lambda *trees: calls(*trees)[name]() and None)(NET, OTHER, STEP)


def _llc(batches: Any = (X,), **counts: Any) -> Any:
    return m.llc(loss, NET, batches, KEY, n_beta=1.0, lr=1e-4, **counts)


def half(**leaves: Any) -> Tree:
    """Constant leaves of float16: name → (the constant, *shape)."""
    return {name: jnp.full(shape, size, "float16") for name, (size, *shape) in leaves.items()}


INTO, HEAD = go.norm_scale({"s": "channel"}, {"w": "channel _"}), go.head_rotation({"w": "_ basis", "v": "basis _"})
SCALED, PAIR = dict(s=(60, 4), w=(2000, 4, 3)), go.head_linear({"w": "_ basis"}, {"v": "basis _"})
test_an_overflow_of_float16_is_refused = each_refused({
    "canonicalize": (lambda: orbit.canonicalize(half(**SCALED), INTO), "'w' overflows float16"),
    "donated": (lambda: orbit.canonicalize(half(**SCALED), INTO, donate=True), "'w' overflows float16"),
    "rotate": (lambda: orbit.rotate(half(w=(6e4, 2, 2), v=(1, 2, 2)), HEAD), "'w' overflows float16"),
    "untie": (lambda: orbit.untie(half(w=(3e4, 3, 2), s=(4, 2)), "w", "new", "s"), "'new' overflows float16"),
    "pack": (lambda: orbit.pack(half(w=(3e4, 2, 1), v=(3e4, 1, 2)), PAIR, size=1.0), "'v' overflows float16"),
})

Z, EMPTY = jnp.ones((2, 2)) + 1j, X[:0]
def _with(make: Any, name: str, number: Any) -> Callable[[], Any]:
    return functools.partial(make, 0.1, UNIT, **{name: number})


test_odd_arguments_are_refused = each_refused({
    "llc burn-in": (lambda: _llc(num_burnin_steps=-1), "num_burnin_steps"),
    "llc draws": (lambda: _llc(num_draws=2.0), "num_draws"),
    "llc batches": (lambda: _llc([None]), "no arrays"),
    "GGN rows": (lambda: m.GGN(fn, NET, [X, EMPTY]), "no outputs for batch 1"),
    "Fisher rows": (lambda: m.Fisher(fn, NET, [EMPTY], KEY), "no outputs for batch 0"),
    "EmpiricalFisher rows": (lambda: m.EmpiricalFisher(fn, NET, [EMPTY], [jnp.zeros(0, int)]), "for batch 0"),
    **{f"EmpiricalFisher {kind}": (
        functools.partial(m.EmpiricalFisher, fn, NET, [X], [jnp.full(20, 0.5, kind)]),
        f"(?s)no class.*{kind}.*integers") for kind in ("float32", "bool")},
    "Fisher NaN": (lambda: m.Fisher(fn, NET, [X * jnp.nan], KEY), "not finite"),
    "GGN NaN": (lambda: m.GGN(fn, NET, [X * jnp.nan]).eigenvalues(), "not finite"),
    "census NaN": (lambda: m.census(fn, NET, [X * jnp.nan], G, "logits", progress=False), "not finite"),
    "average of a generator": (lambda: orbit.average((x for x in [NET]), G), "a generator"),  # type: ignore[arg-type]
    **{name: (functools.partial(getattr(m, name), Z), "complex64")
       for name in ("effective_rank", "smallest_singular_value", "dead_units", "axis_alignment")},
    "gram_evolution": (lambda: m.gram_evolution(Z, Z.real, Z.real, Z.real), "left.*complex64|complex numbers in left"),
    "gauge_fraction": (lambda: m.gauge_fraction(NET, G, {**STEP, "up": STEP["up"] * 1j}), "complex update for 'up'"),
    **{f"{name} of shapes": (functools.partial(tool, jax.eval_shape(lambda: NET)), f"{name}: a shape without values")
       for name, tool in (("canonicalize", lambda s: orbit.canonicalize(s, G)), ("gauges", lambda s: UNIT.read(s)),
                          ("align", lambda s: orbit.align(NET, s, G)))},
    **{f"{make.__name__} {name}": (_with(make, name, number), f"bad {name}") for make, name, number in (
        (go.quotient_adamw, "b2", 1.0), (go.quotient_adamw, "eps", -1.0), (go.quotient_muon, "beta", 1.0),
        (go.ddc_adamw, "b1", 1.0), (go.ddc_adamw, "eps", jnp.nan), (go.ddc_adamw, "weight_decay", None))},
    "quotient_adamw rate": (lambda: go.quotient_adamw("0.1", UNIT), "bad learning_rate"),
    "untie": (lambda: orbit.untie({0: {"e": NET["up"]}, 1: NET["down"]}, "0/e", "head"), "keys that are no strings"),
})  # fmt: skip


def test_odd_arguments_are_taken(tmp_path: Path) -> None:
    untied = orbit.untie({0: {"e": NET["up"]}, 1: NET["down"]}, "0/e", "0/head")
    assert untied.keys() == {0, 1} and untied[0].keys() == {"e", "head"}
    far = {**NET, "odd": jnp.full(2, -6e4, jnp.float16)}
    assert orbit.distance({**NET, "odd": -far["odd"]}, far, UNIT) == pytest.approx(2.0, rel=1e-6)
    huge = {**STEP, "up": 1e30 * STEP["up"]}
    ggn = m.GGN(fn, NET, [X], only="up")
    assert float(m.directional_fisher(ggn, huge)) == pytest.approx(float(m.directional_fisher(ggn, STEP)), rel=1e-4)
    assert jnp.isnan(m.directional_fisher(ggn, {**STEP, "up": jnp.nan * STEP["up"]}))
    for text in ('{"loss": 1.0}\n', "hello\n", "hello", "[1]\n"):
        (tmp_path / "run").write_text(text)
        with pytest.raises(ValueError, match="of another run"):
            m.Recorder(tmp_path / "run", {"loss": float}, every=1, steps=1)
        assert (tmp_path / "run").read_text() == text


@pytest.mark.skipif(not hasattr(optax.contrib, "galore"), reason="a newer Optax's optimizer")
def test_a_state_without_a_rule_is_kept_or_named() -> None:
    tx = optax.contrib.galore(0.1, rank=3)
    kept = orbit.transport(tx.init(NET), NET, UNIT, UNIT.sample(KEY, NET), "keep")
    assert structure(kept) == structure(tx.init(NET))
    with pytest.raises(ValueError, match=r"no rule for GaLoreState of '(up|down)'"):
        orbit.transport(tx.init(NET), NET, UNIT, UNIT.sample(KEY, NET))


# Trees that can be called, as equinox's modules can --------------------------------------------------------------
# Optax calls labels and masks that are callable. A tree of labels that is made from such parameters is callable too.


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Net:
    """A module without a framework."""

    up: Any
    bias: Any
    down: Any

    def __call__(self, x: jax.Array) -> jax.Array:
        return jnp.asarray(jax.nn.relu(x @ self.up + self.bias) @ self.down)


NETWORK = jax.tree.map(lambda x: x / 3, normal(0, {"up": (4, 8), "bias": (8,), "down": (8, 3)}))
INPUTS, TARGETS = normal(1, {"x": (16, 4), "y": (16, 3)}).values()
NEURONS = go.rescale({"up": "_ channel", "bias": "channel"}, {"down": "channel _"})
VECTORS = {"up": "_ neuron", "down": "_ neuron"}
RATE = 0.01
# Each gets a mask, which some do not take.
MASKED: dict[str, Callable[[Any], optax.GradientTransformation]] = with_masks(NEURONS, VECTORS) | {
    "scale_by_scaled_polar": lambda _: optax.chain(
        go.links.scale_by_scaled_polar(NEURONS), optax.scale(-RATE), go.gauge_retract(NEURONS)),
    "gauge_fix": lambda mask: go.orbit.gauge_fix(optax.adamw(RATE, mask=mask), NEURONS),
    "max_norm": lambda _: go.norms.max_norm(optax.sgd(RATE), VECTORS, learning_rate=RATE),
    "rotational_adamw": lambda mask: go.norms.rotational_adamw(RATE, VECTORS, mask=mask),
    "rotational_sgdm": lambda mask: go.norms.rotational_sgdm(RATE, VECTORS, mask=mask),
    "rotational_lion": lambda mask: go.norms.rotational_lion(RATE, VECTORS, mask=mask),
    "hyperball": lambda _: optax.chain(optax.sgd(RATE), go.norms.hyperball(VECTORS)),
    "by_path": lambda _: optax.adamw(RATE, mask=go.tools.by_path({"bias": False}, default=True)),
}


@pytest.mark.slow_rows("*-function", "rotational_[al]*", "scale_by_*", "max_norm-*", "ddc_adamw-*", "*_muon-*")
@pytest.mark.parametrize("kind", ["tree", "function"])
@pytest.mark.parametrize("name", MASKED)
def test_a_module_takes_the_steps_of_a_dict(name: str, kind: str) -> None:
    """Five steps, with a mask as a tree, which is callable then, and as a function."""

    def everything(tree: Tree) -> Tree:
        return jax.tree.map(lambda _: True, tree)

    def error(tree: Tree) -> jax.Array:
        net = Net(**tree) if isinstance(tree, dict) else tree
        return jnp.mean(jnp.square(net(INPUTS) - TARGETS))

    plain, own = (
        trained(MASKED[name](everything if kind == "function" else everything(tree)), error, tree, 5)[0]
        for tree in (NETWORK, Net(**NETWORK))
    )
    for path, start in NETWORK.items():
        moved = float(jnp.linalg.norm(plain[path] - start))
        assert moved > 1e-4
        assert float(jnp.linalg.norm(getattr(own, path) - plain[path])) <= tolerance("twins", "float32") * moved


# Trees of several precisions -------------------------------------------------------------------------------------

FEATURES, KERNEL, DOWN = normal(0, {"x": (64, 8), "kernel": (8, 16), "down": (16, 4)}).values()
KERNEL, DOWN = (KERNEL / 3).astype(jnp.bfloat16), (DOWN / 4).astype(jnp.bfloat16)


def _up(x: jax.Array) -> jax.Array:
    return x.astype(jnp.float32)


def _scaled(p: Any) -> jax.Array:
    return (FEATURES * p["scale"]) @ _up(p["k"])


def _gated(p: Any) -> jax.Array:
    return _scaled(p) * jax.nn.sigmoid(_scaled(p | {"k": p["l"]}))


def _units(p: Any) -> jax.Array:
    return jax.nn.relu((FEATURES * p.get("scale", 1.0)) @ _up(p["k"])) @ _up(p["down"])


def _multiplied(p: Any) -> jax.Array:
    return FEATURES @ (_up(p["k"]) * p["factor"])


NORM = go.norm_scale({"scale": "channel"}, {"k": "channel _"})
TWO = go.norm_scale({"scale": "channel"}, {"k": "channel _", "l": "channel _"})
KERNELS = go.rescale({"k": "_ channel"}, {"down": "channel _"})
# Parameters, float32 factors beside bfloat16 kernels; what they compute; gauges.
ROWS: dict[str, tuple[Any, Callable[[Any], jax.Array], Any]] = {
    "norm": ({"scale": jnp.ones(8), "k": KERNEL}, _scaled, NORM),
    "1 + scale": ({"scale": jnp.zeros(8), "k": KERNEL}, lambda p: _scaled(p | {"scale": 1 + p["scale"]}),
                  go.norm_scale({"scale": "1+ channel"}, {"k": "channel _"})),
    "a scale of two kernels": ({"scale": jnp.ones(8), "k": KERNEL, "l": KERNEL[:, ::-1]}, _gated, TWO),
    "multiplier": ({"factor": jnp.ones(16), "k": KERNEL}, _multiplied,
                   go.rescale({"factor": "channel"}, {"k": "_ channel"})),
    "one multiplier": ({"factor": jnp.ones(1), "k": KERNEL}, _multiplied, go.rescale({"factor": "_"}, {"k": "_ _"})),
    "a coarse anchor": ({"k": KERNEL, "down": DOWN.astype(jnp.float32)}, _units, KERNELS),
    "norm and units": ({"scale": jnp.ones(8), "k": KERNEL, "down": DOWN}, _units, [NORM, KERNELS]),
}


@functools.cache
def moved(name: str, **options: Any) -> float:
    """How far the function moves in 200 steps of AdamW, relative to its size; inside a quotient if it has options."""
    start, function, gauges = ROWS[name]
    before, adamw = function(start), optax.adamw(1e-4)
    tx = go.quotient(adamw, gauges, **options) if options else adamw
    params, _ = trained(tx, lambda p: jnp.mean((function(p) - 1.3 * before) ** 2), start, 200)
    assert jax.tree.map(lambda x: x.dtype, params) == jax.tree.map(lambda x: x.dtype, start)
    return float(jnp.linalg.norm(function(params) - before) / jnp.linalg.norm(before))


@pytest.mark.slow_rows("[!n]*-[!a]*")
@pytest.mark.parametrize("options", [{"pin": True}, {"pin": False}, {"rest": "balanced"}],
                         ids=["anchor", "pin=False", "balanced"])
@pytest.mark.parametrize("name", ROWS)
def test_a_quotient_moves_the_function_as_its_optimizer_does(name: str, options: dict[str, Any]) -> None:
    """A rate of 1e-4 is below half of bfloat16's spacing for most entries."""
    assert moved(name, **options) >= 0.9 * moved(name)


def test_an_anchor_that_decays_stays_near_a_kernel_that_rounds() -> None:
    """The scale in float32 takes all decay. In 2,000 steps it would shrink to e⁻²⁰, and the kernel grow by e²⁰."""
    params = {"scale": jnp.ones(4), **normal(0, {"up": (4, 6)}, jnp.bfloat16)}
    tx = go.quotient_adamw(0.1, go.norm_scale({"scale": "channel"}, {"up": "channel _"}), weight_decay=0.1)
    nothing = jax.tree.map(lambda x: jnp.zeros((2000, *x.shape), x.dtype), params)
    after = jax.tree.map(lambda x: x[-1], walk(tx, params, nothing)[0])
    assert 2.0**-9 <= float(jnp.min(after["scale"])) <= float(jnp.max(after["scale"])) <= 1.0
    assert float(jnp.max(jnp.abs(after["up"]))) <= 2.0**9 * float(jnp.max(jnp.abs(params["up"])))


def test_a_free_leaf_of_eight_bits_trains_beside_a_shift() -> None:
    """No other dtype compares with float8."""
    params = {"head": jnp.ones((3, 4)), "free": jnp.ones(4, jnp.float8_e4m3fn)}
    tx = go.quotient(optax.sgd(0.5), go.logit_shift({"head": "_ vocab"}))
    updates, _ = tx.update(jax.tree.map(jnp.ones_like, params), tx.init(params), params)
    assert updates["free"].dtype == jnp.float8_e4m3fn and float(updates["free"].astype(jnp.float32).sum()) == -2.0
