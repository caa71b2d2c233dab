"""Second moments in 16 and 8 bits: rounding has the right mean, averages follow, runs stay close to the optimizer's."""

from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gauge_optax as go
from benchmarks.timing import nbytes
from gauge_optax.optimizers.compress import compressed, decompressed
from tests.quick import jit
from tests.refusals import each_refused
from tests.twins import normal, stepper, structure, train

Tree = Any
DTYPES = ("bfloat16", "uint8")
COMPRESS = go.links.compress_second_moments
GAUGE = go.rescale({"up": "_ channel"}, {"down": "channel _"})


def _moments(tx: Any, squares: np.ndarray) -> tuple[Any, jax.Array]:
    """The state after gradients whose squares are given, (steps, entries), and v as the optimizer reads it."""
    params = {"w": jnp.zeros(squares.shape[1])}

    @jit
    def run(squares: jax.Array) -> Any:
        def step(state: Any, square: jax.Array) -> tuple[Any, None]:
            return tx.update({"w": jnp.sqrt(square)}, state, params)[1], None

        return jax.lax.scan(step, tx.init(params), squares)[0]

    state = run(jnp.asarray(squares, jnp.float32))
    inner = decompressed(state) if hasattr(state, "tops") else state
    return state, optax.tree.get(inner, "nu")["w"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_rounding_goes_to_both_neighbours_and_has_the_right_mean(dtype: str) -> None:
    size = 0.3  # not a stored number
    squares = np.full((1, 20_000), size)
    squares[0, 0] = 1.0  # the largest, from which codes are counted
    stored = np.asarray(_moments(COMPRESS(optax.scale_by_rms(decay=0.0), dtype), squares)[1][1:], float)
    below, above = np.unique(stored)
    spread = {"bfloat16": 2.0**-7, "uint8": 2.0 ** (1 / 8) - 1}[dtype]
    assert below < size < above <= below * (1 + spread) * (1 + 1e-5)
    error = ((size - below) * (above - size) / len(stored)) ** 0.5
    assert abs(stored.mean() - size) < 4 * error


@pytest.mark.parametrize(("dtype", "largest"), [("bfloat16", 0.08), ("uint8", 0.35)])
def test_averages_follow_gradients_that_shrink(dtype: str, largest: float) -> None:
    draw = np.random.default_rng(0).normal(size=(4000, 500))
    squares = np.square(draw) * np.where(np.arange(4000) < 1000, 1.0, 0.01)[:, None]
    tx = optax.scale_by_rms(decay=0.999)
    exact, found = (np.asarray(_moments(each, squares)[1], float) for each in (tx, COMPRESS(tx, dtype)))
    assert abs(found.mean() / exact.mean() - 1) < 0.1 * largest + 0.02
    assert np.sqrt(np.mean(np.square(np.sqrt(found / exact) - 1))) < largest

    def nearest(v: jax.Array, square: jax.Array) -> tuple[jax.Array, None]:
        return (0.999 * v + 0.001 * square).astype(jnp.bfloat16).astype(jnp.float32), None

    stuck = jax.lax.scan(nearest, jnp.zeros(500), jnp.asarray(squares, jnp.float32))[0]
    assert float(jnp.mean(stuck)) > 3 * exact.mean(), "rounding to the nearest would do as well"


def test_codes_of_zero_of_what_is_too_small_and_of_no_number() -> None:
    codes, bits = (COMPRESS(optax.scale_by_rms(decay=0.0), dtype) for dtype in ("uint8", "bfloat16"))
    state, v = _moments(codes, np.array([[0.0, 1.0, 2.0**-40, 4.0]]))
    assert optax.tree.get(state, "nu")["w"].tolist()[:2] == [0, 231] and v[0] == 0 and v[1] == 1 and v[2] < 1e-8
    assert bool(jnp.all(jnp.isnan(_moments(codes, np.array([[1.0, np.nan]]))[1])))
    signed = compressed(jnp.int32(0), optax.ScaleByRmsState(nu=jnp.array([-1.0, 2.0])), "uint8")
    assert bool(jnp.all(jnp.isnan(decompressed(signed).nu)))
    assert _moments(codes, np.zeros((2, 3)))[1].tolist() == [0, 0, 0]
    assert np.isinf(_moments(bits, np.array([[np.inf]]))[1][0])


def test_states_are_smaller() -> None:
    params = normal(0, {"up": (64, 128), "down": (128, 64), "value": (64, 4, 16), "out": (4, 16, 64)}, jnp.float32)
    gauges = [GAUGE, go.head_rotation({"value": "_ head basis", "out": "head basis _"})]
    entries, adam = sum(x.size for x in jax.tree.leaves(params)), nbytes(optax.adamw(1e-3).init(params))
    for tx in (optax.adamw(1e-3), go.quotient(optax.adamw(1e-3), gauges), go.ddc_adamw(1e-3, gauges)):
        whole, *small = (nbytes(t.init(params)) for t in (tx, *(COMPRESS(tx, dtype) for dtype in DTYPES)))
        assert whole - small[0] > 1.95 * entries and whole - small[1] > 2.9 * entries
        assert max(small) < adam, "the state is no smaller than AdamW's"


ADAMW = optax.adamw(1e-2)
OPTIMIZERS = {"adamw": ADAMW, "quotient": go.quotient(ADAMW, GAUGE), "ddc_adamw": go.ddc_adamw(1e-2, GAUGE)}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_losses_are_those_of_the_optimizer_and_twins_stay_together(name: str, dtype: str) -> None:
    tx, element = COMPRESS(OPTIMIZERS[name], dtype), {"": jnp.linspace(-2.0, 2.0, 8)}
    plain, small = _train(OPTIMIZERS[name]), _train(tx)
    assert plain[-1] < 0.2 * plain[0] and abs(small[-1] / plain[-1] - 1) < 0.1
    assert small[-1] != plain[-1]
    assert _train(tx) == small, "a run cannot be repeated"
    if name != "adamw":
        ours, adamw = abs(_train(tx, element)[-1] / small[-1] - 1), [_train(ADAMW, g)[-1] for g in (None, element)]
        assert abs(adamw[0] / adamw[1] - 1) > max(0.05, 10 * ours)


@pytest.mark.parametrize(("dtype", "rtol"), [("bfloat16", 2.0**-7), ("uint8", 0.1)])
def test_moments_are_transported_as_numbers(dtype: str, rtol: float) -> None:
    params = {"up": jnp.ones((4, 8)), "down": jnp.ones((8, 2))}
    tx, element = COMPRESS(optax.adam(0.1), dtype), {"": jnp.linspace(-1.0, 1.0, 8)}
    grads = jax.tree.map(lambda x: 1.0 + jnp.arange(x.size, dtype=x.dtype).reshape(x.shape), params)
    state = tx.update(grads, tx.init(params), params)[1]
    before, after = (decompressed(x) for x in (state, go.orbit.transport(state, params, GAUGE, element)))
    expected = go.orbit.transport(before, params, GAUGE, element)
    for path in params:
        stayed, found, wanted = (optax.tree.get(x, "nu")[path] for x in (before, after, expected))
        np.testing.assert_allclose(found, wanted, rtol=rtol)
        assert not np.allclose(found, stayed, rtol=0.3)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rare_small_gradients_take_no_large_steps(dtype: str) -> None:
    """As those of rare tokens beside frequent ones: a second moment rounded to zero would make them m/eps."""
    params = {"w": jnp.zeros(64)}
    tx = COMPRESS(optax.adam(1.0), dtype)

    @jit
    def run() -> jax.Array:
        def step(state: Any, n: jax.Array) -> tuple[Any, jax.Array]:
            rare = jnp.where(n % 50 == 0, 1e-4, 0.0)
            updates, state = tx.update({"w": jnp.full(64, rare).at[0].set(1.0)}, state, params)
            return state, jnp.max(jnp.abs(updates["w"]))

        return jnp.max(jax.lax.scan(step, tx.init(params), jnp.arange(300))[1])

    assert 0.9 < float(run()) < 1.5


@pytest.mark.parametrize("dtype", DTYPES)
def test_states_of_numpy_and_of_no_leaves_and_of_bfloat16_parameters(dtype: str) -> None:
    params, tx = {"w": jnp.arange(1.0, 5.0)}, COMPRESS(optax.adam(0.1), dtype)
    state = tx.init(params)
    restored = jax.device_get(state)
    chex.assert_trees_all_equal(*(tx.update(params, s, params)[0] for s in (state, restored)))
    assert structure(decompressed(restored)) == structure(decompressed(state))
    assert tx.update({}, tx.init({}), {})[0] == {}
    half, tx = {"w": params["w"].astype(jnp.bfloat16)}, COMPRESS(optax.amsgrad(0.1), dtype)
    chex.assert_trees_all_equal_dtypes(tx.update(half, tx.init(half), half)[1], tx.init(half))
    whole = optax.masked(tx, go.tools.by_path({"packed": False}, default=True)) if dtype == "uint8" else tx
    assert np.all(whole.update(PACKED, whole.init(PACKED), PACKED)[0]["w"] < -0.09)


def test_two_streams_round_to_different_sides() -> None:
    state = {"moments": optax.ScaleByRmsState(nu=jnp.full(1000, 0.3))}
    first, second = (compressed(jnp.int32(3), state, "bfloat16", stream).inner_state["moments"].nu for stream in (0, 1))
    assert 0.3 < float(jnp.mean(first == second)) < 0.7


def test_float64_is_left_alone(x64: None) -> None:
    params = {"w": jnp.ones(3, jnp.float64)}
    tx, same = COMPRESS(optax.adam(0.1), "uint8"), optax.adam(0.1)
    updates, state = tx.update(params, tx.init(params), params)
    assert optax.tree.get(state, "nu")["w"].dtype == jnp.float64
    np.testing.assert_array_equal(updates["w"], same.update(params, same.init(params), params)[0]["w"])


class _Named(NamedTuple):
    nu: jax.Array


WEIGHTS = {"w": jnp.ones(2)}
PACKED = WEIGHTS | {"packed": jnp.zeros(5, jnp.uint8)}
BAD_FIELD = "compress_second_moments(.|\n)*no field nu that may be rounded"
test_mistakes_are_told = each_refused([
    (lambda: COMPRESS(optax.adam), "compress_second_moments(.|\n)*call it"),
    (lambda: COMPRESS(optax.adam(0.1), "int4"), "compress_second_moments(.|\n)*write dtype='bfloat16'"),
    (lambda: COMPRESS(optax.lion(0.1)).init(WEIGHTS), BAD_FIELD),
    (lambda: COMPRESS(optax.rmsprop(0.1, centered=True)).init(WEIGHTS), BAD_FIELD),
    (lambda: COMPRESS(optax.contrib.sophia(0.1)).init(WEIGHTS), BAD_FIELD),  # codes have no sign
    (lambda: COMPRESS(optax.adam(0.1), "uint8").init(PACKED), "bytes(.|\n)*at 'packed'(.|\n)*dtype='bfloat16'"),
    (lambda: COMPRESS(optax.sm3(0.1)).init(WEIGHTS), BAD_FIELD),  # its `nu` is a first moment
    (lambda: COMPRESS(COMPRESS(optax.adam(0.1))).init(WEIGHTS),
     "compress_second_moments(.|\n)*around the whole optimizer"),
    (lambda: COMPRESS(optax.adam(0.1)).init(_Named(jnp.ones(2))), "compress_second_moments(.|\n)*rename it"),
])


def _train(tx: Any, element: Tree | None = None, steps: int = 200) -> list[float]:
    """Losses of a network of eight ReLU units, from one of its twins where an element is given."""
    draw = np.random.default_rng(0).normal
    params = {"up": jnp.asarray(draw(size=(4, 8)), jnp.float32), "down": jnp.asarray(draw(size=(8, 2)), jnp.float32)}
    params, x = params if element is None else GAUGE.act(element, params), jnp.asarray(draw(size=(64, 4)), jnp.float32)

    def loss(p: Tree) -> jax.Array:
        return jnp.mean(jnp.square(jax.nn.relu(x @ p["up"]) @ p["down"] - jnp.sin(x[:, :2])))

    return [float(value) for value in train(jit(tx.init), stepper(tx, loss), params, steps)[1]]
