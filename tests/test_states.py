"""What does not belong together is refused: states of other gauges, leaves of other shapes, a seed for a key."""

import functools
import inspect
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gauge_optax as go
from gauge_optax.gauges.gauge import Gauge
from gauge_optax.slice import VERSION
from models import lm_sharding
from tests.cases import GAUGE_CASES
from tests.gauges.user_gauges import Trade
from tests.refusals import complaint, each_refused, refused
from tests.twins import normal

Tree = Any
RESCALE = go.rescale({"up": "_ channel"}, {"down": "channel _"})
TURN = go.head_rotation({"heads": "_ head basis"})
GAUGES: list[Gauge] = [RESCALE, go.rescale({"gate": "_ channel"}, {"under": "channel _"}), TURN]
SHAPES = {"up": (3, 4), "down": (4, 2), "gate": (3, 4), "under": (4, 2), "heads": (3, 2, 4)}
FRAMED: dict[str, Callable[[list[Gauge]], optax.GradientTransformation]] = {
    "quotient": lambda g: go.quotient(optax.adamw(0.1), g),
    "quotient_muon": lambda g: go.quotient_muon(0.1, g),
    "ddc_adamw": lambda g: go.ddc_adamw(0.1, g),
    "ddc_muon": lambda g: go.ddc_muon(0.1, g),
    "scale_by_ddc": go.scale_by_ddc,
    "scale_by_scaled_polar": go.links.scale_by_scaled_polar,
    "gauge_retract": go.gauge_retract,
}
ALL = FRAMED | {
    "gauge_project": go.gauge_project,
    "gauge_fix": lambda g: go.orbit.gauge_fix(optax.sgd(0.1), g),
    "scale_by_opposite_gram": lambda g: go.links.scale_by_opposite_gram(g, every=2),
    "add_gauge_decay": lambda g: go.add_gauge_decay(0.1, g),
}
TAKERS = ALL | {
    "track": lambda g: go.measure.track(optax.sgd(0.1), g),
    "hold_products": lambda g: go.orbit.hold_products(optax.sgd(0.1), [x for x in g if x is not TURN], "init"),
}


def _params(**other: Any) -> Tree:
    """Weights, with other shapes or other leaves where they are given."""
    shapes = SHAPES | {path: x for path, x in other.items() if isinstance(x, tuple)}
    return normal(0, shapes, jnp.float32) | {path: x for path, x in other.items() if not isinstance(x, tuple)}


@functools.cache
def _state(name: str) -> Tree:
    return ALL[name](GAUGES).init(_params())


OTHER_GAUGES = r"a state of other gauges\n.*rescale\[\]\..*\n.*expected.*\n.*remedy"
OTHERS: dict[str, tuple[list[Gauge], dict[str, Any], str]] = {  # gauges, shapes, and what is said
    "fewer": (GAUGES[:1], {}, "a state of other gauges"),
    "none": ([], {}, OTHER_GAUGES),
    "others": ([RESCALE, TURN, go.scale_invariant({"gate": "_ channel"})], {}, OTHER_GAUGES),
    "swapped": ([TURN, go.rescale({"up": "_ channel"}, {"under": "channel _"}),
                 go.rescale({"gate": "_ channel"}, {"down": "channel _"})], {}, "a state of other gauges"),
    "resized": (GAUGES, {"up": (3, 5), "down": (5, 2)}, "a state of other gauges"),
    "reshaped": (GAUGES, {"heads": (3, 8)}, "head_rotation: wrong rank at 'heads'"),
}


@pytest.mark.filterwarnings("ignore:an empty list of gauges")
@pytest.mark.parametrize(("name", "other"), [
    *((name, other) for name in FRAMED for other in OTHERS),
    *((name, other) for name in ("scale_by_opposite_gram", "track", "hold_products") for other in ("fewer", "swapped")),
])
def test_a_state_of_other_gauges_or_shapes_is_refused(name: str, other: str) -> None:
    gauges, shapes, said = OTHERS[other]
    params = _params(**shapes)
    with refused(said):
        TAKERS[name](gauges).update(params, TAKERS[name](GAUGES).init(_params()), params)


class Unit(go.Gauge):
    """The scale of one hidden unit, by its action: a class that is no dataclass."""

    name, effect = "unit", "diagonal"

    def __init__(self, unit: int) -> None:
        self.unit = unit

    def act(self, element: Any, params: Any) -> Any:
        alpha = jnp.exp(element * (jnp.arange(4) == self.unit))
        return params | {"up": params["up"] * alpha, "down": params["down"] / alpha[:, None]}

    def read(self, params: Any) -> Any:
        return jnp.log(jnp.linalg.norm(params["up"][:, self.unit]))


class Lazy(Unit):
    """The same with a number that it computes when it is first asked for."""

    size = functools.cached_property(lambda self: 4)


def test_a_gauge_that_has_computed_a_number_keeps_its_state() -> None:
    gauge, params = Lazy(0), _params(up=(3, 4), down=(4, 2))
    tx = go.quotient(optax.adam(0.1), gauge)
    state = tx.init(params)
    assert gauge.size == 4
    tx.update(params, state, params)


def _parts(part: int) -> Gauge:
    axes = "(part=0 head _) _"
    return go.rescale({"u": axes}, {"d": axes}, sizes={"part": part, "head": 2})


def _paired(first: str, second: str) -> Gauge:
    return go.bias_absorption({"gate_bias": "_i"}, {"up": "_i _", "gate": "_i _"}, {first: "_", second: "_"})


@pytest.mark.parametrize(("gauge", "other"), [
    (_parts(3), _parts(2)), (Unit(0), Unit(3)), (_paired("c", "e"), _paired("e", "c")),
], ids=["sizes", "attributes", "pairs"])
def test_a_state_of_the_same_leaves_read_in_another_way_is_refused(gauge: Gauge, other: Gauge) -> None:
    """A label stands for one part. `evaluate` finds parts by it among all that the process has bound."""
    params = _params(u=(24, 3), d=(24, 3), gate_bias=(3,), c=(4,), e=(4,))
    tx, wrong = (go.quotient(optax.adam(0.1), x) for x in (gauge, other))
    with refused("a state of other gauges"):
        wrong.update(params, tx.init(params), params)


def test_a_record_of_the_same_list_in_another_order_is_refused() -> None:
    """It would give the figures of one `rescale` under the name of another."""
    track, params = TAKERS["track"], _params()
    with refused("track: a state of other gauges", "is on up (3, 4)", "in that order"):
        track([GAUGES[1], RESCALE]).update(params, track([RESCALE, GAUGES[1]]).init(params), params)


@pytest.mark.slow_rows("ddc_adamw")
@pytest.mark.parametrize("name", FRAMED)
def test_a_state_goes_on_under_the_same_list_in_another_order(name: str) -> None:
    params, gradient = _params(), jax.tree.map(jnp.cos, _params())
    expected, found = (FRAMED[name](order).update(gradient, _state(name), params) for order in (GAUGES, GAUGES[::-1]))
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_a_state_of_another_version_is_refused() -> None:
    tx, params = FRAMED["quotient"](GAUGES), _params()
    state: Any = tx.init(params)
    older = {label.rpartition(".v")[0] + ".v2": x for label, x in state.frame.elements.items()}
    with refused(rf"another version of this library\n.*version 2\n.*version {VERSION}\n.*tx.init"):
        tx.update(params, state._replace(frame=state.frame._replace(elements=older)), params)


@pytest.mark.parametrize("name", ALL)
def test_a_gauge_given_twice_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=r"product: a gauge given twice\n  found:    rescale\('up', 'down'\)\n"):
        ALL[name]([RESCALE, TURN, RESCALE]).init(_params())


@pytest.mark.parametrize("name", ALL)
def test_shapes_in_place_of_parameters(name: str) -> None:
    """Where values are read, a clear error, and elsewhere the state; `jax.eval_shape` gives its shapes for all."""
    tx, shapes = ALL[name](GAUGES), jax.eval_shape(_params)
    if name in FRAMED:
        with refused(rf"{name}: init was called with shapes alone\n.*\n.*\n.*jax.eval_shape"):
            tx.init(shapes)
    else:
        assert jax.tree.map(jnp.shape, tx.init(shapes)) == jax.tree.map(jnp.shape, tx.init(_params()))


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("dtype", ["complex64", "int32", "bool"])
def test_bound_leaves_are_real(name: str, dtype: str) -> None:
    with pytest.raises(ValueError, match=rf"rescale: not on real numbers: 'up'\n.*{dtype}"):
        ALL[name](GAUGES).init(_params(up=jnp.ones((3, 4), dtype)))


THEIRS = {"quotient": optax.adamw(0.1), "gauge_fix": optax.sgd(0.1), "add_gauge_decay": optax.add_decayed_weights(0.1)}


@pytest.mark.parametrize("name", ["quotient", "gauge_retract", *sorted(set(ALL) - set(FRAMED))])
@pytest.mark.parametrize("free", [jnp.arange(3), jnp.ones(3) + 1.0j], ids=["int32", "complex64"])
def test_other_leaves_are_left_to_the_inner(name: str, free: jax.Array) -> None:
    params, both = _params(free=free), (ALL[name](GAUGES), THEIRS.get(name, optax.identity()))
    found, expected = (tx.update(params, tx.init(params), params)[0]["free"] for tx in both)
    if name == "add_gauge_decay" and not jnp.iscomplexobj(free):  # it keeps the dtype of updates, Optax's does not
        assert found.dtype == free.dtype
    else:
        assert found.dtype == expected.dtype
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("name", sorted(set(ALL) - {"gauge_fix", "add_gauge_decay"}))
def test_updates_of_other_shapes_are_refused(name: str) -> None:
    tx, params = ALL[name](GAUGES), _params()
    with pytest.raises(ValueError, match=r"an update of another shape for 'up'\n.*\(3, 5\)\n.*\(3, 4\)"):
        tx.update(_params(up=(3, 5)), tx.init(params), params)


# What a user passes by mistake --------------------------------------------------------------------


PARAMS = {"up": jnp.ones((2, 3)), "down": jnp.ones((3, 4))}


@pytest.mark.parametrize("name", ["quotient", "ddc_adamw", "quotient_muon", "track"])
def test_gradients_of_integers(name: str) -> None:
    tx, params = TAKERS[name]([RESCALE]), PARAMS | {"n": jnp.arange(3)}
    grads = jax.grad(lambda p: jnp.sum(p["up"] @ p["down"]), allow_int=True)(params)
    with refused(f"{name}: no gradient for 'n'", "float0", "optax.masked"):
        tx.update(grads, tx.init(params), params)


ON_UP: dict[str, Callable[[], Any]] = {
    "hyperball": lambda: go.norms.hyperball({"up": "_ n"}),
    "keep_norms_below": lambda: go.links.keep_norms_below({"up": "_ n"}),
    "scale_by_polar": lambda: go.links.scale_by_polar({"up": "_ n"}),
    "scale_by_vector_norm": lambda: go.links.scale_by_vector_norm({"up": "_ n"}),
    "scale_by_relative_rms": lambda: go.links.scale_by_relative_rms(RESCALE),
    "add_gauge_decay": lambda: go.add_gauge_decay(0.1, RESCALE),
    "ddc_adamw": lambda: go.ddc_adamw(0.1, RESCALE),
}


@pytest.mark.parametrize("name", ON_UP)
def test_an_update_that_is_absent_or_of_another_shape(name: str) -> None:
    """They were a KeyError and a TypeError about a reshape, without the name of the leaf."""
    tx = ON_UP[name]()
    state = tx.init(PARAMS)
    for update, said in ((None, "no update"), (jnp.ones((1, 3)), "an update of another shape")):
        with refused(f"{name}: {said} for 'up'", "(2, 3)"):
            tx.update(PARAMS | {"up": update}, state, PARAMS)


def test_a_leaf_without_a_gauge_may_have_no_update() -> None:
    """`optax.add_decayed_weights` takes None too, and Optax's Adam does not."""
    params = PARAMS | {"free": jnp.ones(2)}
    for name in ("add_gauge_decay", "scale_by_relative_rms", "hyperball", "scale_by_polar"):
        tx = ON_UP[name]()
        assert tx.update(params | {"free": None}, tx.init(params), params)[0]["free"] is None
    with refused("ddc_adamw: no update for 'free'"):
        ON_UP["ddc_adamw"]().update(params | {"free": None}, ON_UP["ddc_adamw"]().init(params), params)


@pytest.mark.parametrize(("name", "state"), [
    ("quotient", optax.adamw(0.1).init(PARAMS)), ("quotient", None),
    ("quotient", go.quotient(optax.sgd(0.1, momentum=0.9), RESCALE).init(PARAMS)),
    ("ddc_adamw", TAKERS["quotient"]([RESCALE]).init(PARAMS)), ("track", optax.adam(0.1).init(PARAMS)),
    ("add_gauge_decay", ()),  # its one field is `count`, as a method of every tuple is called
])
def test_a_state_of_another_optimizer(name: str, state: Any) -> None:
    text = complaint(lambda: TAKERS[name]([RESCALE]).update(PARAMS, state, PARAMS))
    assert text.startswith(f"{name}: a state of another optimizer") and "tx.init(params)" in text
    assert "PyTreeDef" not in text
    assert ("from_state" in text) == (name == "quotient" and type(state) is tuple)  # only there it applies


@pytest.mark.parametrize(
    ("pin", "frozen"), [(True, None), (False, None), (True, lambda p: {"up": True, "down": False})])
def test_the_conversion_that_an_error_names_works(pin: bool, frozen: Any) -> None:
    inner, gauges, params = optax.adam(0.1), RESCALE, PARAMS  # the names that the remedy has
    tx, state = go.quotient(inner, gauges, pin=pin, frozen=frozen), inner.init(params)
    (call,) = re.findall(r"go\.orbit\.from_state\(.*?\)", complaint(lambda: tx.update(params, state, params)))
    names = {"go": go, "state": state, "inner": inner, "gauges": gauges, "params": params, "frozen": frozen}
    tx.update(params, eval(call, names), params)


def test_an_error_of_the_optimizer_inside_is_its_own() -> None:
    def broken(updates: Any, state: Any, params: Any = None) -> Any:
        raise KeyError("mine")

    tx = go.quotient(optax.GradientTransformation(lambda params: (), broken), RESCALE)
    with pytest.raises(KeyError, match="mine"):
        tx.update(PARAMS, tx.init(PARAMS), PARAMS)


def _sum(p: Any, x: Any = 1.0) -> Any:
    return jnp.sum(x * jnp.sum(p["up"]))


def _outputs(p: Any, x: Any) -> Any:
    return x @ p["up"] @ p["down"]


SGD, INPUTS = optax.sgd(0.1), [jnp.ones((2, 2))]
KEYED: dict[str, Callable[[Any], Any]] = {
    "assert_invariant": lambda key: go.testing.assert_invariant(_sum, PARAMS, RESCALE, key),
    "assert_equivariant_step": lambda key: go.testing.assert_equivariant_step(SGD, _sum, PARAMS, RESCALE, key),
    "sample": lambda key: RESCALE.sample(key, PARAMS),
    "sample of a product": lambda key: go.product([RESCALE, go.logit_shift({"down": "_ vocab"})]).sample(key, PARAMS),
    "sample of a user's gauge": lambda key: Trade("up", "down").sample(key, PARAMS),
    "random_twin": lambda key: go.bind(RESCALE, PARAMS).random_twin(key, PARAMS),
    "choose": lambda key: go.orbit.choose(lambda p, k: _sum(p), PARAMS, RESCALE, key=key, progress=False),
    "rotate": lambda key: go.orbit.rotate({"heads": jnp.ones((3, 2, 4))}, TURN, key=key),
    "Fisher": lambda key: go.measure.Fisher(_outputs, PARAMS, INPUTS, key),
    "lanczos": lambda key: go.measure.GGN(_outputs, PARAMS, INPUTS).lanczos(key, 2),
    "trace": lambda key: go.measure.GGN(_outputs, PARAMS, INPUTS).trace(key),
    "llc": lambda key: go.measure.llc(_sum, PARAMS, [0.0], key, n_beta=1.0, lr=0.1),
    "gauge_sensitivity": lambda key: go.measure.gauge_sensitivity(SGD, _sum, PARAMS, RESCALE, represent=_sum, key=key),
}


@pytest.mark.parametrize("name", KEYED)
@pytest.mark.parametrize("key", [3, jnp.int32(3), jnp.ones(2), jax.random.split(jax.random.key(0))])
def test_what_is_no_key_is_named_with_its_remedy(name: str, key: Any) -> None:
    with refused("no PRNG key", *(["jax.random.key(3)"] if isinstance(key, int) else ["an array of", "key(0)"])):
        KEYED[name](key)


NOT_CALLED = r"inner is no transformation(.|\n)*call it: adam\(learning_rate\)"
QUOTIENT, DDC = (TAKERS[name]([RESCALE]) for name in ("quotient", "ddc_adamw"))
NO_ARRAY = r"a leaf that is no array of numbers, 'act'(.|\n)*eqx\.filter"
test_what_is_given_by_mistake_is_named = each_refused([
    (lambda: DDC.init(PARAMS | {"free": jnp.ones(3) + 1.0j}), "scale_by_ddc: a complex leaf 'free'"),
    (lambda: QUOTIENT.init(PARAMS | {"act": jax.nn.relu}), f"quotient: {NO_ARRAY}"),
    (lambda: DDC.init(PARAMS | {"act": jax.nn.relu}), f"ddc_adamw: {NO_ARRAY}"),
    (lambda: lm_sharding.make_mesh(64, 2), r"a mesh of 64x2 devices(.|\n)*jax_num_cpu_devices"),
    (lambda: go.discover(_sum, PARAMS, INPUTS * 2, seed=jax.random.key(3)),  # type: ignore[arg-type]
     r"discover: bad seed(.|\n)*seed=0"),
    (lambda: go.links.compress_second_moments([SGD]),
     r"compress_second_moments: inner is no transformation(.|\n)*optax.chain\(\*optimizers\)"),
    (lambda: go.quotient(optax.adam, RESCALE), NOT_CALLED),
    (lambda: go.measure.track(optax.adam, RESCALE), NOT_CALLED),
    (lambda: go.measure.track_rotation({"up": "_ c"}, optax.adam), NOT_CALLED),
])


def test_every_gauge_says_what_breaks_it() -> None:
    ours = [case.gauges()[0] for case in GAUGE_CASES if not case.name.startswith(("product", "user"))]
    assert [gauge for gauge in ours if gauge.breaks == go.Gauge.breaks] == []


def test_the_usual_mistake_with_a_gauge_is_named() -> None:
    """The logits themselves for the loss; a norm that stores its scale less one."""
    with pytest.raises(AssertionError, match="logits themselves move: return the loss, or log-probabilities"):
        shift = go.logit_shift({"down": "_ vocab"})
        go.testing.assert_invariant(lambda p: p["up"] @ p["down"], PARAMS, shift, jax.random.key(0))
    norm, params = go.norm_scale({"up": "channel _"}, {"down": "channel _"}), PARAMS | {"down": jnp.ones((2, 4))}
    with pytest.raises(AssertionError, match=r"stores its scale less one \(1\+"):
        go.testing.assert_invariant(_sum, params, norm, jax.random.key(0))


@pytest.mark.parametrize("take", [
    go.norms.hyperball, go.norms.max_norm, go.norms.rotational, go.norms.rotational_sgdm, go.norms.rotational_adamw,
    go.links.scale_by_polar, go.links.scale_by_vector_norm, go.links.keep_norms_below, go.max_norm_muon,
    go.measure.track_rotation,
])
def test_axes_that_are_missing_are_called_as_the_function_calls_them(take: Callable[..., Any]) -> None:
    own = inspect.signature(take).parameters
    (name,) = {"axes", "blocks", "neurons"} & own.keys()
    given = {"inner": optax.sgd(0.1), "learning_rate": 0.1, "weight_decay": 0.1, "gauges": RESCALE, name: {}}
    assert f"write {name}={{" in complaint(lambda: take(**{key: x for key, x in given.items() if key in own}))
