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
from models import lm
from tests.cases import FLAT_CASES, GAUGE_CASES, lm_parts
from tests.gauges.user_gauges import Translation
from tests.orbit.test_canonicalize import apart

Tree = Any

LINEAR = go.head_linear({"a": "_ basis"}, {"b": "basis _"})


def squares(p: Tree) -> jax.Array:
    return sum((jnp.sum(jnp.square(x)) for x in jax.tree.leaves(p)), jnp.zeros(()))


def normal(*shapes: tuple[int, ...]) -> list[jax.Array]:
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.normal(size=shape), float) for shape in shapes]


@pytest.mark.parametrize(
    "optimizer", [None, optax.lbfgs(), optax.sgd(0.01, momentum=0.9)], ids=["adam", "lbfgs", "sgd"]
)
def test_the_least_norm_is_the_balanced_point(optimizer: Any, x64: None) -> None:
    """GL of a pair: the closed form of `balance` is what the search finds."""
    params = dict(zip("ab", normal((6, 3), (3, 5)), strict=True))
    element = go.orbit.choose(
        squares, params, LINEAR, optimizer, steps=40 if optimizer is not None else 400, progress=False
    )
    found, least = LINEAR.act(element, params), LINEAR.act(LINEAR.balance(params), params)
    np.testing.assert_allclose(float(squares(found)), float(squares(least)), rtol=1e-3)
    assert float(squares(found)) < 0.95 * float(squares(params))
    np.testing.assert_allclose(found["a"] @ found["b"], params["a"] @ params["b"], atol=1e-12)


CASES = [
    case for case in (*FLAT_CASES, *GAUGE_CASES)
    if case.name not in ("user_gauge/translation", "scale_invariant/kernel", "scale_invariant/kernel_bias")
]
QUICK = ("head_linear/value_out", "residual_rotation/plain", "rope_linear/half",
         "norm_read_shift/one_plus_bias", "bias_absorption/norm", "rope_torus/half",
         "key_bias/fused")


@pytest.mark.parametrize("case", [
    pytest.param(case, id=case.name, marks=() if case.name in QUICK else pytest.mark.slow) for case in CASES
])
def test_every_kind_goes_towards_a_twin_and_keeps_the_function(case: Any, x64: None) -> None:
    """The distance from a twin that is near falls for every kind of gauge; the loss is what it was."""
    gauge, params = go.product(case.gauges()), case.params(jax.random.key(1))
    rng = np.random.default_rng(0)
    near = jax.tree.map(lambda x: jnp.asarray(0.1 * rng.normal(size=x.shape)), gauge.algebra(params))
    twin = gauge.act(gauge.exponential(near, params), params)

    def distance(p: Tree) -> jax.Array:
        return squares(jax.tree.map(jnp.subtract, p, twin))

    element = go.orbit.choose(distance, params, gauge, optax.adam(0.01), steps=30, progress=False)
    found = gauge.act(element, params)
    assert float(distance(found)) < 0.5 * float(distance(params))
    loss = float(case.loss(params))
    assert abs(float(case.loss(found)) - loss) <= 1e-12 * abs(loss)


LLAMA = lm.llama_config(vocab=7, d_model=8, layers=1, heads=2, kv_heads=2, d_head=4, d_ff=5, max_len=4)


@functools.cache
def llama() -> Tree:
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda x: jnp.asarray(0.4 * rng.normal(size=x.shape), jnp.float32), lm_parts(LLAMA)[0])


def rounding(p: Tree, batch: jax.Array, key: jax.Array) -> jax.Array:
    """A stand-in for what quantization loses: the size of the largest weights, on random columns."""
    kept = jax.random.bernoulli(key, 0.8, p["embed"]["embedding"].shape)
    embedding = jnp.where(kept, p["embed"]["embedding"], 0.0)[batch]
    kernels = (p["lm_head"]["kernel"], p["blocks"][0]["attn"]["value"]["kernel"])
    return jnp.sum(embedding**4) + sum(jnp.sum(kernel**4) for kernel in kernels)


ROTATIONS = [gauge for gauge in lm.whole_gauges(LLAMA, linear=False) if gauge.name.endswith("rotation")]


@pytest.mark.slow
def test_a_search_is_resumed_where_it_was_saved(tmp_path: Path) -> None:
    """Batches and keys depend on the step's number: 6 steps are 3 steps, a checkpoint, and 3 steps."""
    batches = np.random.default_rng(1).integers(0, 7, (4, 5))
    search = functools.partial(
        go.orbit.choose, rounding, llama(), ROTATIONS, batches=list(batches), key=jax.random.key(0), progress=False,
        return_state=True,
    )
    whole, state = search(steps=6)
    _, half = search(steps=3)
    with ocp.StandardCheckpointer() as saver:
        saver.save(tmp_path / "half", half)
        saver.wait_until_finished()
        loaded = saver.restore(tmp_path / "half", half)
    again, last = search(steps=6, state=loaded)
    for x, y in zip(jax.tree.leaves((whole, state)), jax.tree.leaves((again, last)), strict=True):
        np.testing.assert_array_equal(x, y)
    assert int(last.step) == 6 and apart(whole, half.element) > 1e-3


def test_a_start_and_an_early_stop(capsys: pytest.CaptureFixture[str]) -> None:
    gauge = go.rescale({"up": "_ channel"}, {"down": "channel _"})
    params = {"up": jnp.full((1, 2), 4.0), "down": jnp.ones((2, 1))}
    balanced = gauge.balance(params)
    element, state = go.orbit.choose(squares, params, gauge, steps=100, start=balanced, patience=5, return_state=True)
    assert int(state.step) == 6 and apart(element, balanced) < 1e-6
    assert "choose" in capsys.readouterr().err
    # An iterator of batches, and the last element: with batches, no value is comparable with another.
    element, state = go.orbit.choose(
        lambda p, batch: squares(p) * batch, params, gauge, steps=3, batches=iter([1.0, 2.0, 3.0]), progress=False,
        return_state=True,
    )
    assert apart(element, state.element[0]) == 0.0


def test_a_users_gauge_needs_coordinates() -> None:
    params = {"token": jnp.ones((5, 2)), "position": jnp.arange(6.0).reshape(3, 2)}
    with pytest.raises(ValueError, match=r"(?s)no method algebra.*algebra\(params\)"):
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


def test_bad_input_is_refused() -> None:
    gauge = go.rescale({"up": "_ channel"}, {"down": "channel _"})
    params = {"up": jnp.full((1, 2), 4.0), "down": jnp.ones((2, 1))}
    with pytest.raises(ValueError, match=r"(?s)does not take these arguments.*pass batches="):
        go.orbit.choose(lambda p, batch: squares(p), params, gauge, progress=False)
    with pytest.raises(ValueError, match=r"(?s)does not take these arguments"):
        go.orbit.choose(squares, params, gauge, batches=[1.0], progress=False)
    with pytest.raises(ValueError, match=r"(?s)no scalar.*shape \(1, 2\)"):
        go.orbit.choose(lambda p: p["up"], params, gauge, progress=False)
    with pytest.raises(ValueError, match=r"(?s)not finite, at step 0.*lower the learning rate"):
        go.orbit.choose(lambda p: squares(p) * jnp.nan, params, gauge, progress=False)
