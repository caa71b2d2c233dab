"""`choose`: the least objective on an orbit, where it is known in closed form, by several optimizers, and resumed."""

import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

import gauge_optax as go
from tests.cases import FLAT_CASES, GAUGE_CASES
from tests.gauges.user_gauges import Translation
from tests.orbit.test_canonicalize import apart, keeps, whole
from tests.quick import rows
from tests.refusals import each_refused, refused
from tests.twins import normal, normal_like

Tree = Any


def squares(p: Tree) -> jax.Array:
    return sum((jnp.sum(jnp.square(x)) for x in jax.tree.leaves(p)), jnp.zeros(()))


OPTIMIZERS = {"adam": (None, 400), "lbfgs": (optax.lbfgs(), 40), "sgd": (optax.sgd(0.01, momentum=0.9), 40)}


@pytest.mark.parametrize(("optimizer", "steps"), OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_the_least_norm_is_the_balanced_point(optimizer: Any, steps: int, x64: None) -> None:
    """GL of a pair: the closed form of `balance` is what the search finds."""
    params, gauge = normal(0, {"a": (6, 3), "b": (3, 5)}), go.head_linear({"a": "_ basis"}, {"b": "basis _"})
    element = go.orbit.choose(squares, params, gauge, optimizer, steps=steps, progress=False)
    found = gauge.act(element, params)
    assert float(squares(found)) < 0.95 * float(squares(params))
    np.testing.assert_allclose(squares(found), squares(gauge.act(gauge.balance(params), params)), rtol=1e-3)
    np.testing.assert_allclose(found["a"] @ found["b"], params["a"] @ params["b"], atol=1e-12)


CASES = [c for c in (*FLAT_CASES, *GAUGE_CASES) if not c.name.startswith(("user_gauge", "scale_invariant"))]
QUICK = (
    "head_linear/value_out", "residual_rotation/plain", "rope_linear/half", "norm_read_shift/one_plus_bias",
    "bias_absorption/norm", "rope_torus/half", "key_bias/fused",
)


@rows(CASES, QUICK)
def test_every_kind_goes_towards_a_twin_and_keeps_the_function(case: Any, x64: None) -> None:
    """The distance from a twin that is near falls for every kind of gauge; the loss is what it was."""
    gauge, params = go.product(case.gauges()), case.params(jax.random.key(1))
    near = optax.tree.scale(0.1, normal_like(0, gauge.algebra(params)))
    twin = gauge.act(gauge.exponential(near, params), params)

    def distance(p: Tree) -> jax.Array:
        return squares(jax.tree.map(jnp.subtract, p, twin))

    found = gauge.act(go.orbit.choose(distance, params, gauge, optax.adam(0.01), steps=30, progress=False), params)
    assert float(distance(found)) < 0.5 * float(distance(params))
    assert keeps(case.loss, params, found)


@pytest.mark.slow
def test_a_search_is_resumed_where_it_was_saved(tmp_path: Path) -> None:
    """Batches and keys depend on the step's number: 6 steps are 3 steps, a checkpoint, and 3 steps."""
    gauges, params = whole("llama")

    def objective(p: Tree, batch: jax.Array, key: jax.Array) -> jax.Array:
        embedding = p["embed"]["embedding"]
        kept = jnp.where(jax.random.bernoulli(key, 0.8, embedding.shape), embedding, 0.0)[batch]
        return jnp.sum(kept**4) + jnp.sum(p["lm_head"]["kernel"] ** 4)

    rotations = [gauge for gauge in gauges if gauge.name.endswith("rotation")]
    options = dict[str, Any](batches=list(np.random.default_rng(1).integers(0, 7, (4, 5))), key=jax.random.key(0))
    search = functools.partial(go.orbit.choose, objective, params, rotations, **options, return_state=True)
    straight, state = search(steps=6)
    _, half = search(steps=3)
    with ocp.StandardCheckpointer() as saver:
        saver.save(tmp_path / "half", half)
        saver.wait_until_finished()
        loaded = saver.restore(tmp_path / "half", half)
    again, last = search(steps=6, state=loaded)
    jax.tree.map(np.testing.assert_array_equal, (straight, state), (again, last))
    assert int(last.step) == 6 and apart(straight, half.element) > 1e-3


UNIT = go.rescale({"up": "_ channel"}, {"down": "channel _"})
PARAMS = {"up": jnp.full((1, 2), 4.0), "down": jnp.ones((2, 1))}


def test_a_start_and_an_early_stop(capsys: pytest.CaptureFixture[str]) -> None:
    balanced = UNIT.balance(PARAMS)
    element, state = go.orbit.choose(squares, PARAMS, UNIT, steps=100, start=balanced, patience=5, return_state=True)
    assert int(state.step) == 6 and apart(element, balanced) < 1e-6
    assert "choose" in capsys.readouterr().err
    # An iterator of batches, and the last element: with batches, no value is comparable with another.
    options = dict[str, Any](batches=iter([1.0, 2.0, 3.0]), progress=False, return_state=True)
    element, state = go.orbit.choose(lambda p, x: squares(p) * x, PARAMS, UNIT, steps=3, **options)
    assert apart(element, state.element[0]) == 0.0


@pytest.mark.parametrize("alone", [False, True])
def test_a_start_for_one_gauge_may_stand_in_a_tuple(alone: bool) -> None:
    """The list or the gauge alone decides the form of the result."""
    balanced = UNIT.balance(PARAMS)
    for start in (balanced, (balanced,), [jax.tree.map(np.asarray, balanced)]):
        found = go.orbit.choose(squares, PARAMS, UNIT if alone else [UNIT], steps=0, start=start, progress=False)
        assert apart(found, balanced if alone else (balanced,)) == 0.0


def test_a_users_gauge_needs_coordinates() -> None:
    params = {"token": jnp.ones((5, 2)), "position": jnp.arange(6.0).reshape(3, 2)}
    with refused(r"(?s)no method algebra.*algebra\(params\)"):
        go.orbit.choose(squares, params, Translation("token", "position"), progress=False)

    class WithAlgebra(Translation):
        def algebra(self, params: Any) -> Any:
            return self.identity(params)

        def exponential(self, coordinates: Any, params: Any, near: bool = False) -> Any:
            return coordinates

    gauge = WithAlgebra("token", "position")
    element = go.orbit.choose(squares, params, gauge, optax.adam(0.1), steps=200, progress=False)
    moved = gauge.act(element, params)
    np.testing.assert_allclose(jnp.sum(moved["token"], 0), jnp.sum(moved["position"], 0), atol=1e-2)


HEAD = go.head_rotation({"q": "_ basis", "k": "_ basis"})


def chosen(objective: Any, params: Tree = PARAMS, gauges: Any = UNIT, **options: Any) -> Any:
    return go.orbit.choose(objective, params, gauges, progress=False, **options)


test_bad_input_is_refused = each_refused([
    (lambda: chosen(lambda p, batch: squares(p)), "(?s)does not take these arguments.*pass batches="),
    *((functools.partial(chosen, lambda p, batch: squares(p) * batch, batches=batches), f"(?s)no batch for {said}")
      for batches, said in [([], "step 0"), (np.zeros((0, 3)), "step 0"), ({}.values(), "step 0"),
                            (iter([1.0, 2.0]), r"step 2.*batches=list\(batches\)")]),
    (lambda: chosen(squares, start={"": jnp.ones(3)}), r"(?s)an element of other gauges.*\(2,\).*go.orbit.choose"),
    (lambda: chosen(squares, start=()), "an element of other gauges"),
    (lambda: chosen(lambda p, batch: squares(p), batches={"x": 1.0}), "batches is a dict"),
    (lambda: chosen(squares, steps=2.5), "bad steps"),
    (lambda: chosen(squares, tolerance=np.nan), "bad tolerance"),
    (lambda: chosen(squares, patience=-1), "bad patience"),
    (lambda: chosen(3), "an objective that is no function"),
    (lambda: chosen(lambda p: (squares(p), p)), "no scalar"),
    (lambda: chosen(lambda p: jnp.int32(1)), "no scalar"),
    (lambda: chosen(squares, optimizer=0.1), "optimizer is no transformation"),
    (lambda: chosen(squares, normal(0, {"q": (5, 3), "k": (5, 3)}), HEAD, start={"": jnp.ones((3, 3))}), "no rotation"),
    (lambda: chosen(squares, batches=[1.0]), "does not take these arguments"),
    (lambda: chosen(lambda p: p["up"]), r"(?s)no scalar.*shape \(1, 2\)"),
    (lambda: chosen(lambda p: squares(p) * jnp.nan), "(?s)not finite, at step 0.*lower the learning rate"),
])
