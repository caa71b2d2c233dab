"""What does not belong together is refused: states of other gauges, leaves of other shapes, numbers or lists."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gauge_optax as go
from gauge_optax.gauges.gauge import Gauge

Tree = Any
RESCALE = go.rescale({"up": "_ channel"}, {"down": "channel _"})
OTHER = go.rescale({"gate": "_ channel"}, {"under": "channel _"})
TURN = go.head_rotation({"heads": "_ head basis"})
ALONE = go.scale_invariant({"gate": "_ channel"})
GAUGES: list[Gauge] = [RESCALE, OTHER, TURN]
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


def _params(**other: Any) -> Tree:
    generator = np.random.default_rng(0)
    shapes = SHAPES | {path: x for path, x in other.items() if isinstance(x, tuple)}
    tree = {path: jnp.asarray(generator.normal(size=shape), jnp.float32) for path, shape in shapes.items()}
    return tree | {path: x for path, x in other.items() if not isinstance(x, tuple)}


@pytest.mark.filterwarnings("ignore:an empty list of gauges")
@pytest.mark.parametrize("name", FRAMED)
@pytest.mark.parametrize("gauges", [GAUGES[:2], [], [RESCALE, TURN, ALONE]], ids=["fewer", "none", "others"])
def test_a_state_of_another_list_is_refused(name: str, gauges: list[Gauge]) -> None:
    params = _params()
    state = FRAMED[name](GAUGES).init(params)
    with pytest.raises(ValueError, match=r"a state of other gauges\n.*rescale\[\]\..*\n.*expected.*\n.*remedy"):
        FRAMED[name](gauges).update(params, state, params)


@pytest.mark.parametrize("name", FRAMED)
def test_a_state_goes_on_under_the_same_list_in_another_order(name: str) -> None:
    params, gradient = _params(), jax.tree.map(jnp.cos, _params())
    state = FRAMED[name](GAUGES).init(params)
    expected, after = FRAMED[name](GAUGES).update(gradient, state, params)
    found, also = FRAMED[name](GAUGES[::-1]).update(gradient, state, params)
    assert jax.tree.structure(also) == jax.tree.structure(after)
    for x, y in zip(jax.tree.leaves((found, also)), jax.tree.leaves((expected, after)), strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("name", FRAMED)
@pytest.mark.parametrize(
    ("other", "found"),
    [
        ({"up": (3, 5), "down": (5, 2)}, "a state of other gauges"),
        ({"heads": (3, 8)}, "head_rotation: wrong rank at 'heads'"),
    ],
    ids=["resized", "reshaped"],
)
def test_a_state_of_other_shapes_is_refused(name: str, other: dict[str, Any], found: str) -> None:
    params, tx = _params(**other), FRAMED[name](GAUGES)
    with pytest.raises(ValueError, match=found):
        tx.update(params, tx.init(_params()), params)


def test_a_state_of_another_version_is_refused() -> None:
    tx, params = FRAMED["quotient"](GAUGES), _params()
    state: Any = tx.init(params)
    older = {label.rpartition(".v")[0] + ".v2": x for label, x in state.frame.elements.items()}
    state = state._replace(frame=state.frame._replace(elements=older))
    with pytest.raises(ValueError, match=r"another version of this library\n.*version 2\n.*version 4\n.*tx.init"):
        tx.update(params, state, params)


def test_the_opposite_grams_state_too() -> None:
    tx, params = go.links.scale_by_opposite_gram(GAUGES, every=2), _params()
    state = tx.init(params)
    with pytest.raises(ValueError, match="scale_by_opposite_gram: a state of other gauges"):
        go.links.scale_by_opposite_gram(GAUGES[:1], every=2).update(params, state, params)


@pytest.mark.parametrize("name", ALL)
def test_a_gauge_given_twice_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=r"product: a gauge given twice\n  found:    rescale\('up', 'down'\)\n"):
        ALL[name]([RESCALE, TURN, RESCALE]).init(_params())


@pytest.mark.parametrize("name", ALL)
def test_shapes_in_place_of_parameters(name: str) -> None:
    """Where values are read, a clear error; elsewhere the state. `jax.eval_shape` gives the state's shapes for all."""
    tx, shapes = ALL[name](GAUGES), jax.eval_shape(_params)
    assert jax.tree.structure(jax.eval_shape(tx.init, shapes)) == jax.tree.structure(tx.init(_params()))
    if name in FRAMED:
        with pytest.raises(ValueError, match=rf"{name}: init was called with shapes alone\n.*\n.*\n.*jax.eval_shape"):
            tx.init(shapes)
    else:
        assert jax.tree.map(jnp.shape, tx.init(shapes)) == jax.tree.map(jnp.shape, tx.init(_params()))


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("dtype", ["complex64", "int32", "bool"])
def test_bound_leaves_are_real(name: str, dtype: str) -> None:
    with pytest.raises(ValueError, match=rf"rescale: not on real numbers: 'up'\n.*{dtype}"):
        ALL[name](GAUGES).init(_params(up=jnp.ones((3, 4), dtype)))


@pytest.mark.parametrize("name", ["quotient", "gauge_retract", *sorted(set(ALL) - set(FRAMED))])
@pytest.mark.parametrize("free", [jnp.arange(3), jnp.ones(3) + 1.0j], ids=["int32", "complex64"])
def test_other_leaves_are_left_to_the_inner(name: str, free: jax.Array) -> None:
    tx, params = ALL[name](GAUGES), _params(free=free)
    theirs = {"quotient": optax.adamw(0.1), "gauge_fix": optax.sgd(0.1)}
    theirs |= {"add_gauge_decay": optax.add_decayed_weights(0.1)}
    alone = theirs.get(name, optax.identity())
    found, _ = tx.update(params, tx.init(params), params)
    expected, _ = alone.update(params, alone.init(params), params)
    if name != "add_gauge_decay" or jnp.iscomplexobj(free):  # which keeps the dtype of updates, Optax's does not
        assert found["free"].dtype == expected["free"].dtype
        np.testing.assert_array_equal(found["free"], expected["free"])


def test_ddc_names_a_complex_leaf() -> None:
    with pytest.raises(ValueError, match="scale_by_ddc: a complex leaf 'free'"):
        go.ddc_adamw(0.1, GAUGES).init(_params(free=jnp.ones(3) + 1.0j))


@pytest.mark.parametrize("name", sorted(set(ALL) - {"gauge_fix", "add_gauge_decay"}))
def test_updates_of_other_shapes_are_refused(name: str) -> None:
    tx, params = ALL[name](GAUGES), _params()
    with pytest.raises(ValueError, match=r"an update of another shape for 'up'\n.*\(3, 5\)\n.*\(3, 4\)"):
        tx.update(_params(up=(3, 5)), tx.init(params), params)
