"""What misled a search for symmetries, one test each; most show what is found where the guard is taken away."""

import contextlib
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gauge_optax as go
from gauge_optax.discovery import checks, instance, prove, reach, report, sketch
from gauge_optax.discovery.calls import Call
from gauge_optax.discovery.report import Report
from gauge_optax.xla import jit_unfused
from tests import refusals
from tests.discovery.axes_nets import attention, flat
from tests.discovery.test_layouts import D, V, check

RNG = np.random.default_rng(0)
BATCHES = list(RNG.normal(size=(2, 7, D)))


def normal(*shape: int) -> np.ndarray:
    return RNG.normal(size=shape).astype(np.float32)


def mlp(p: Any, x: Any, act: Any = jax.nn.relu) -> jax.Array:
    return act(x @ p["up"]["kernel"] + p["up"]["bias"]) @ p["down"]["kernel"]


MLP = {"up": {"kernel": normal(D, 5), "bias": normal(5)}, "down": {"kernel": normal(5, 3)}}
RELU = go.rescale({"up/kernel": "_ channel", "up/bias": "channel"}, {"down/kernel": "channel _"})


def found(fn: Any, params: Any, batches: Any = BATCHES, outputs: Any = "loss", **options: Any) -> Report:
    return go.discover(fn, params, batches, outputs, progress=False, **options)


# The user's own weights, and far from them -----------------------------------------------------------


X6 = list(RNG.normal(size=(2, 12, 6)))
PAIR = {"up": normal(6, 5), "down": normal(5, 4)}
PAIR_RELU = go.rescale({"up": "_ channel"}, {"down": "channel _"})


def pair(p: Any, x: Any, act: Any = jax.nn.relu) -> jax.Array:
    return act(x @ p["up"]) @ p["down"]


@pytest.mark.slow_rows("1")
@pytest.mark.parametrize("seed", range(2))
def test_a_mask_among_the_parameters(seed: int) -> None:
    """Noise in proportion to its size would switch all classes off, and everything in front of it."""
    params = {**PAIR, "mask": np.array([0, -1e9, 0, 0, 0], np.float32)}
    report = found(lambda p, x: jnp.sin(jax.nn.softmax(x @ p["up"] + p["mask"]) @ p["down"]), params, X6, seed=seed)
    assert not report.gauges and not report.dead and {u.path for u in report.uncovered} == {"up", "down", "mask"}


@pytest.mark.parametrize(("name", "fn"), {
    "rescale": lambda p, x: jnp.minimum(pair(p, x), 20.0) + pair(p, x, lambda y: jnp.clip(y, 0.0, 20.0)),
    "logit_shift": lambda p, x: jnp.clip(pair(p, x, jnp.tanh), -50.0, 50.0),
    "head_linear": lambda p, x: jnp.sin(jnp.clip(x @ p["up"], -30.0, 30.0) @ p["down"]),
    "scale_invariant": lambda p, x: (y := pair(p, x, jnp.tanh)) / jnp.linalg.norm(y, axis=-1, keepdims=True).clip(0.05),
}.items())
def test_what_a_clip_ends_is_no_gauge(name: str, fn: Any) -> None:
    report = found(fn, PAIR, X6, "logits" if name == "logit_shift" else "loss")
    assert not report.gauges and any(x.startswith(name) and "a clip ends it" in x for x in report.rejected), report


@pytest.mark.parametrize("seed", range(2))
def test_a_clip_that_only_a_large_factor_shows(seed: int) -> None:
    """Where all leaves are large, the tanh is saturated; a clip of the stream ends the rotation of the stream."""
    def fn(p: Any, x: Any) -> jax.Array:
        return jnp.tanh(x @ p["up"] * jnp.minimum(p["scale"], 20.0)) @ p["down"]

    def stream(p: Any, x: Any) -> jax.Array:
        x = jnp.clip(x @ p["up"], -60.0, 60.0)
        return jnp.tanh(x / jnp.linalg.norm(x, axis=-1, keepdims=True) @ p["read"])

    def free(p: Any, x: Any) -> jax.Array:
        return jnp.tanh(x @ p["up"] * p["scale"]) @ p["down"]

    free_report, report = (found(f, PAIR | {"scale": np.ones(())}, X6, seed=seed) for f in (free, fn))
    assert [gauge.name for gauge in free_report.gauges] == ["rescale"]
    assert not report.gauges and not report.nearly
    report = found(stream, {"up": PAIR["up"], "read": normal(5, 4)}, X6, seed=seed)
    assert not report.whole and len(report.rejected) == 2


def test_a_claim_on_the_stream_that_no_gauge_can_bind_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was left out of the report without a word."""
    claims = instance.offsets.merged_reads
    unfit = Call("embedding_shift", {"token": {"up": "_ _ channel"}, "position": {"down": "_ channel"}})
    monkeypatch.setattr(instance.offsets, "merged_reads", lambda calls: [*claims(calls), unfit])
    report = found(pair, PAIR, X6)
    assert PAIR_RELU in report.gauges
    (row,) = report.rejected
    assert row.startswith("embedding_shift of up, down: no gauge can bind it (embedding_shift: "), row


@pytest.mark.parametrize("size", [100.0, 3000.0])
def test_large_logits_are_no_mask(size: float) -> None:
    params = {"up": PAIR["up"], "down": size * PAIR["down"]}
    for seed in range(2):
        report = found(pair, params, X6, "logits", seed=seed)
        assert {"rescale", "logit_shift"} == {gauge.name for gauge in report.gauges} and not report.rejected


@pytest.mark.slow_rows("-1000000000.0", "-3.4*")
@pytest.mark.parametrize("mask", [-1e4, -1e9, float(np.finfo(np.float32).min), -np.inf])
def test_classes_that_a_mask_rules_out(mask: float) -> None:
    report = found(lambda p, x: jnp.where(jnp.arange(4) < 3, pair(p, x), mask), PAIR, X6, "logits")
    assert report.gauges == [PAIR_RELU, go.logit_shift({"down": "_ vocab"})] and not report.rejected, report


@pytest.mark.slow_rows("<lambda>")
@pytest.mark.parametrize("start", [jnp.ones, lambda shape: jax.random.uniform(jax.random.key(0), shape)])
def test_positive_kernels_on_positive_inputs(start: Any) -> None:
    """No ReLU would ever be off, and matrices would do."""
    params = {"up": start((6, 5)), "down": start((5, 4)), "bias": jnp.full(5, 0.1)}
    report = found(lambda p, x: jnp.sin(jax.nn.relu(x @ p["up"] + p["bias"]) @ p["down"]), params, list(np.abs(X6)))
    assert report.gauges == [go.rescale({"up": "_ channel", "bias": "channel"}, {"down": "channel _"})], report


def test_a_nan_at_a_point_of_the_search_ends_nothing() -> None:
    """Units that are all dead in front of a norm, under JAX's switch that ends a program at the first NaN."""
    def fn(p: Any, x: Any) -> jax.Array:
        units = jax.nn.relu(x @ p["up"])
        return units / jnp.linalg.norm(units, axis=-1, keepdims=True) @ p["down"]

    with jax.debug_nans(True):
        assert [gauge.name for gauge in found(fn, {"up": normal(6, 5), "down": normal(5, 4)}, X6).whole] == [
            "scale_invariant"]


def test_units_that_are_dead_at_every_point_live_with_other_signs() -> None:
    """Inputs are positive, and a unit's weights negative: half of their size as noise does not switch it on."""
    params = {**PAIR, "up": np.concatenate([np.full((6, 1), -1.0, np.float32), PAIR["up"][:, 1:]], 1)}
    report = found(lambda p, x: jnp.sin(pair(p, x)), params, list(np.abs(X6)))
    assert report.gauges == [PAIR_RELU] and not report.rejected and not report.uncovered, report


def test_a_leaf_of_which_the_sign_alone_counts_is_not_dead() -> None:
    def fn(p: Any, x: Any) -> jax.Array:
        y = p["size"] * (x @ p["up"])
        return jnp.sin(y / jnp.sqrt(jnp.mean(y**2, -1, keepdims=True)) @ p["down"])

    assert not found(fn, {**PAIR, "size": jnp.ones(())}, X6).dead


def test_products_of_complex_numbers_are_right_without_fusion() -> None:
    def fn(x: Any, y: Any) -> jax.Array:
        return (jnp.swapaxes(jnp.fft.fft(jnp.swapaxes(x, 1, 2)), 1, 2)[None] * y).real

    x, y = RNG.normal(size=(3, 6, 4)), RNG.normal(size=(1, 3, 6, 4))
    with jax.enable_x64(True):
        np.testing.assert_allclose(jit_unfused(fn)(x, y), (np.fft.fft(x, axis=1) * y).real, atol=1e-12)


@pytest.mark.slow
def test_long_convolutions_of_hyena_have_gradients() -> None:
    """Compiled without fusion, products of complex numbers were wrong, and no gauge seemed to be a symmetry."""

    def fn(p: Any, x: Any) -> jax.Array:
        length, positions = x.shape[1], np.arange(x.shape[1])[:, None]
        filters = (jnp.sin(np.cos(positions * np.arange(4)) @ p["speed"]) @ p["filter"]).reshape(length, 2, 4)
        y, *gates = jnp.split(x @ p["in"], 3, -1)
        for k, gate in enumerate(gates):
            spectra = jnp.fft.rfft(y * gate, 2 * length, axis=1), jnp.fft.rfft(filters[:, k], 2 * length, axis=0)[None]
            y = jnp.fft.irfft(spectra[0] * spectra[1], 2 * length, axis=1)[:, :length] + p["skip"][k] * y
        return jnp.sin(y @ p["out"])

    params = {"speed": normal(4, 4), "filter": normal(4, 8), "in": normal(D, 12), "skip": normal(2, 4)}
    certificate = found(fn, params | {"out": normal(4, 3)}, list(RNG.normal(size=(2, 4, 6, D)))).certificate
    assert not certificate.constant and max(gauge.seen for gauge in certificate.gauges) < 1e-9


@pytest.mark.slow_rows("pixels")
@pytest.mark.parametrize("shape", [(4, 6), (4, 2, 3)], ids=["points", "pixels"])
def test_a_maximum_behind_a_norm_has_gradients(shape: tuple[int, ...]) -> None:
    """Compiled with fusion, no entry equals the maximum: the gradients are 0/0. An optimizer's steps are true, too."""

    def fn(p: Any, x: Any) -> jax.Array:
        y = (x @ p["in"]) - jnp.mean(x @ p["in"], -1, keepdims=True)
        y = y * jax.lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + 1e-6) * p["scale"] + p["bias"]
        return jnp.sin(jnp.max(jax.nn.relu(y), range(1, len(shape))) @ p["out"])

    params = {"in": normal(D, 5), "scale": np.ones(5), "bias": 0.1 * normal(5), "out": normal(5, 3)}
    batches = list(RNG.normal(size=(2, *shape, D)))
    report = found(fn, params, batches)
    assert [own.gauge.name for own in report.held] == ["rescale", "norm_write_shift"] and not report.rejected
    with jax.enable_x64(True):
        tx, key = go.quotient(optax.adamw(1e-2), report.gauges), jax.random.key(0)
        loss = lambda p: jnp.mean(jnp.square(fn(p, batches[0])))  # noqa: E731
        go.testing.assert_equivariant_step(tx, loss, params, report.gauges, key)
        go.check(tx, tx.init(params), params, jax.grad(loss)(params), loss_fn=loss)


def test_gradients_that_are_scaled_are_named() -> None:
    """By 5 %; GLM shrinks the gradients of its embedding so."""

    def fn(p: Any, x: Any) -> jax.Array:
        y = jax.nn.relu(x @ p["up"])
        return jnp.concatenate([y @ p["down"], (0.95 * y + jax.lax.stop_gradient(0.05 * y)) @ p["other"]], -1)

    for seed in range(3):
        (said,) = found(fn, PAIR | {"other": normal(5, 3)}, X6, seed=seed).rejected
        assert said.startswith("up: gradients that are not the derivatives"), said


def test_gradients_that_are_no_derivatives_are_named() -> None:
    def fn(p: Any, x: Any) -> jax.Array:
        rounded = jnp.round(7 * p["up"] / (size := jnp.abs(p["up"]).max(0))) * size / 7
        return jnp.sin(pair({**p, "up": p["up"] + jax.lax.stop_gradient(rounded - p["up"])}, x))

    (said,) = found(fn, PAIR, X6).rejected
    assert said.startswith("up: gradients that are not the derivatives"), said


def test_a_loop_without_a_known_end_is_named() -> None:
    def fn(p: Any, x: Any) -> jax.Array:
        return jax.lax.while_loop(lambda s: s[1] < 3, lambda s: (jnp.tanh(s[0] @ p["up"].T @ p["up"]), s[1] + 1),
                                  (x @ p["up"], 0))[0]

    with refusals.refused("fn has no gradients", "fori_loop"):
        found(fn, PAIR, X6)


@pytest.mark.slow
def test_a_certificate_draws_inputs_with_derivatives() -> None:
    """A norm of units that are all dead has none; and keys of random numbers are no arrays to draw from."""

    def fn(p: Any, b: Any) -> jax.Array:
        y = pair(p, b["x"] * jax.random.bernoulli(b["key"], 0.7, (12, 6)))
        return jnp.sin(y / jnp.maximum(jnp.linalg.norm(y, axis=-1, keepdims=True), 1e-6))

    draw = np.random.default_rng(3).normal  # with others, most inputs may have no derivatives
    params = {"up": draw(size=(6, 3)), "down": draw(size=(3, 4))}
    batches = [{"x": x, "key": jax.random.key(k)} for k, x in enumerate(X6)]
    assert found(fn, params, batches).certificate.dead >= 3


@pytest.mark.parametrize("rows", [(4, 4), (4, 3), (2, 6), (12, 12)])
def test_a_certificate_of_batches_of_several_sizes_or_of_equal_ones(rows: tuple[int, int]) -> None:
    batches = [X6[0], X6[0]] if rows == (12, 12) else [x[:n] for x, n in zip(X6, rows, strict=True)]
    report = found(pair, PAIR, batches, "logits")
    with pytest.warns(UserWarning, match="pass different batches") if rows == (12, 12) else contextlib.nullcontext():
        certificate = report.certificate
    assert rows == (12, 12) or certificate.dead == certificate.explained == 10


def test_a_certificate_where_an_input_is_missing_in_one_batch() -> None:
    def fn(p: Any, batch: Any) -> jax.Array:
        return pair(p, batch[0]) if batch[1] is None else pair(p, batch[0]) * batch[1]

    certificate = found(fn, PAIR, [(X6[0], None), (X6[1], np.ones((12, 4)))], "predictions").certificate
    assert certificate.dead == certificate.explained == 5


def test_a_certificate_draws_rows_with_one_sum_whole() -> None:
    """Six one-hot inputs have 24 outputs."""
    batches = list(np.eye(6)[RNG.integers(0, 6, (2, 40))])
    certificate = found(lambda p, x: pair(p, x, jnp.tanh), PAIR, batches, "predictions").certificate
    assert certificate.parameters - certificate.rank == 50 - 24


def test_a_certificate_draws_no_index_beyond_the_end_of_a_table() -> None:
    """Triples of a head, a relation and a tail: there are six entities and three relations."""

    def fn(p: Any, triples: Any) -> jax.Array:
        head, relation, tail = (triples[:, k] for k in range(3))
        return jnp.sum(p["entity"][head] * p["relation"][relation] * p["entity"][tail], -1)

    batches = [RNG.integers(0, (6, 3, 6), (30, 3)) for _ in range(2)]
    params = {"entity": normal(6, 4), "relation": normal(3, 4)}
    certificate = found(fn, params, batches, "predictions").certificate
    assert certificate.dead == certificate.explained == 4 and certificate.gauges[0].seen < 1e-9


def test_an_encoder_as_wide_as_its_table_is_long_says_nothing_of_logits() -> None:
    def fn(p: Any, tokens: Any) -> jax.Array:
        return p["table"][tokens] + pair(p, p["table"][tokens])

    params = {"table": normal(8, 8), "up": normal(8, 5), "down": normal(5, 8)}
    assert found(fn, params, list(RNG.integers(8, size=(2, 4, 6))), None).outputs is None


# Points -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("start", [0.0, 1.0])
def test_a_start_of_zeros_or_ones_makes_no_symmetry(start: float, monkeypatch: pytest.MonkeyPatch) -> None:
    params = {"up": {"kernel": normal(D, 5), "bias": np.zeros(5)}, "down": {"kernel": np.full((5, 3), start)}}
    check(mlp, params, BATCHES, [RELU], outputs="loss")
    monkeypatch.setattr(instance, "generic_point", lambda leaves, rng, signed=(): dict(leaves))
    blind = found(mlp, params)
    assert blind.dead or blind.rejected or blind.ungauged or blind.gauges != [RELU]


@pytest.mark.parametrize("shape", [(3,), ()])
def test_a_layer_behind_a_tiny_scale_keeps_its_gauges(shape: tuple[int, ...]) -> None:
    """A LayerScale near zero: no output would show whether the layer's units are rescaled."""
    got = found(lambda p, x: x[..., :3] + p["gamma"] * mlp(p, x), {**MLP, "gamma": np.full(shape, 1e-8)})
    assert RELU in got.gauges and len(got.gauges) == 2 and not got.rejected, got


def test_dead_units_make_no_symmetry() -> None:
    """Of these units a batch reaches few, and not all at one point."""
    params = {**MLP, "up": {"kernel": normal(D, 5), "bias": np.full(5, -4.0)}}
    check(mlp, params, BATCHES, [RELU], outputs="loss")


def test_statistics_that_must_stay_positive_do() -> None:
    """A batch norm in evaluation: its scale and its variance trade factors, its mean goes with what comes in."""

    def fn(p: Any, x: Any) -> jax.Array:
        y = (x @ p["w"] - p["mean"]) / jnp.sqrt(p["var"]) * p["scale"]
        return jnp.tanh(y) @ p["out"]

    variance = np.abs(normal(5)) + 0.1
    assert (sketch.generic_point({"var": variance}, RNG)["var"] > 0).all()
    got = found(fn, {"w": normal(D, 5), "mean": normal(5), "out": normal(5, 3), "var": variance, "scale": np.ones(5)})
    assert [set(own.exponents) for own in got.held] == [{"w", "mean", "scale"}]
    assert got.ungauged == {"a scale with exponents 1, 2": ("scale, var",)}  # no gauge moves two leaves one way


# What batches and gradients do not tell ------------------------------------------------------------


def test_rows_that_no_batch_reaches_are_uncovered_and_not_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    fn, batches = lambda p, tokens: mlp(p["mlp"], p["embed"][tokens]), [np.array([[0, 1, 2]]), np.array([[2, 3, 3]])]
    params = {"embed": normal(V, D), "mlp": MLP}
    got = found(fn, params | {"unused": normal(4)}, batches)
    assert [(u.path, u.entries, u.of) for u in got.uncovered] == [("embed", (V - 4) * D, V * D)]
    assert got.dead == ("unused",) and "56 of 88 entries of embed" in str(got)
    monkeypatch.setattr(reach, "_DEAD", -1.0)
    assert not found(fn, params, batches).uncovered


def test_what_stands_behind_stop_gradient_is_not_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    def fn(p: Any, x: Any) -> jax.Array:
        return mlp(p, x) * jax.lax.stop_gradient(p["gain"])

    got = found(fn, {**MLP, "gain": normal(3)})
    assert not got.dead and any("gain: no gradient" in text for text in got.rejected)
    assert all("gain" not in own.exponents for own in got.held)
    monkeypatch.setattr(prove.Prover, "change_of_entries", lambda *args, **turn: 0.0)
    assert found(fn, {**MLP, "gain": normal(3)}).dead == ("gain",)


def test_a_symmetry_of_gradients_alone_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    """down is read twice, once behind stop_gradient: gradients see the rescale, values do not keep it."""

    def fn(p: Any, x: Any) -> jax.Array:
        return mlp(p, x) + jax.lax.stop_gradient(jnp.sum(p["down"]["kernel"] ** 2))

    got = found(fn, MLP)
    assert not got.gauges and any("rescale" in text for text in got.rejected)
    monkeypatch.setattr(prove.Prover, "changes", lambda self, calls, rng: [0.0] * len(calls))
    assert found(fn, MLP).gauges == [RELU]


def test_eps_is_nearly_with_its_figure() -> None:
    """What is only nearly so with an eps: the size of the kernel ahead, and no entry of it alone."""

    def fn(p: Any, x: Any, eps: float = 1e-6) -> jax.Array:
        y = x @ p["w"]
        return y * jax.lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + eps) @ p["out"]

    params, turn = {"w": normal(D, 5), "out": normal(5, 3)}, go.head_rotation({"w": "_ basis", "out": "basis _"})
    got = found(fn, params)
    assert [gauge.name for gauge in got.gauges] == ["head_rotation"]
    (almost,) = [own for own in got.nearly if set(own.exponents) == {"w"}]
    assert 1e-9 < almost.change < 1e-4 and almost.gauge.name == "scale_invariant"
    assert not found(fn, params, near=0).nearly
    exact = check(lambda p, x: fn(p, x, 0.0), params, BATCHES, [go.scale_invariant({"w": "_ _"}), turn], outputs="loss")
    assert not exact.nearly and not exact.rejected


def test_a_scale_before_a_relu_takes_no_negative_factor() -> None:
    """`norm_scale` has negative ones: the canonical form of a negative scale was another function."""

    def fn(p: Any, x: Any, act: Any = jax.nn.relu) -> jax.Array:
        y = x @ p["w"]
        return act(y / jnp.sqrt(jnp.mean(y * y, -1, keepdims=True)) * p["scale"] + p["bias"]) @ p["out"]

    params = {"w": normal(D, 5), "scale": np.array([1, -2, 1, -1, 2.0]), "bias": normal(5), "out": normal(5, 3)}
    got, linear = found(fn, params), found(lambda p, x: fn(p, x, lambda y: y), params)
    assert [gauge.name for gauge in got.gauges] == ["scale_invariant", "rescale"] and not got.rejected
    assert "norm_scale" in [gauge.name for gauge in linear.gauges]
    moved = go.orbit.canonicalize(params, got.gauges)
    np.testing.assert_allclose(fn(moved, BATCHES[0]), fn(params, BATCHES[0]), rtol=1e-5, atol=1e-5)


def test_rotations_without_reflections() -> None:
    """Of vectors in a plane they are a `rope_torus`; of vectors in space they are named. They were rejected."""

    def fn(p: Any, x: Any) -> jax.Array:
        a, b = x @ p["a"], x @ p["b"]
        if a.shape[-1] == 2:
            return jnp.stack([(a * b).sum(-1), a[:, 0] * b[:, 1] - a[:, 1] * b[:, 0]], -1)
        c = x @ p["c"]
        return jnp.stack([(a * b).sum(-1), (a * a).sum(-1), (b * c).sum(-1), (jnp.cross(a, b) * c).sum(-1)], -1)

    plane = found(fn, {"a": normal(D, 2), "b": normal(D, 2)})
    assert "rope_torus" in [gauge.name for gauge in plane.gauges] and not plane.rejected
    space = found(fn, {"a": normal(D, 3), "b": normal(D, 3), "c": normal(D, 3)})
    assert ("a, b, c",) in space.ungauged.values() and not space.gauges and not space.rejected


def test_a_dead_bias_between_two_layers_of_a_stream_stays() -> None:
    """In front of a BatchNorm that trains. It moved with the inputs of its kernel, and an evaluation noticed."""

    def norm(y: jax.Array, p: Any) -> jax.Array:
        y = y - y.mean((0, 1), keepdims=True)
        return y / jnp.sqrt((y * y).mean((0, 1), keepdims=True)) * p["scale"]

    def fn(p: Any, x: Any) -> jax.Array:
        x = jax.nn.relu(norm(x @ p["in"], p["norm"]))
        return jax.nn.relu(x + norm(x @ p["b"]["kernel"] + p["b"]["bias"], p["b"])).mean(1) @ p["out"]

    block = {"kernel": normal(4, 4), "bias": normal(4), "scale": normal(4)}
    params = {"in": normal(3, 4), "norm": {"scale": normal(4)}, "b": block, "out": normal(4, 5)}
    report = found(fn, params, list(RNG.normal(size=(2, 6, 5, 3))))
    assert "b/bias" in report.dead
    assert go.rescale({"b/scale": "channel", "norm/scale": "channel"},
                      {"b/kernel": "channel _", "out": "channel _"}) in report.gauges


def test_a_rotation_of_a_stream_beside_a_scale_of_its_readers() -> None:
    """As in CLIP. The scale was that of the norm's scale as a whole, with which no rotation could be read."""
    params, batches = {"emb": normal(9, 6), "g": normal(6), "w": normal(6, 4)}, list(RNG.integers(0, 9, (2, 8, 4)))

    def fn(p: Any, t: Any) -> jax.Array:
        x = p["emb"][t] - p["emb"][t].mean(-1, keepdims=True)
        y = (x / jnp.sqrt(jnp.mean(x * x, -1, keepdims=True)) * p["g"]) @ p["w"]
        return y / jnp.sqrt(jnp.mean(y * y, -1, keepdims=True)) @ jnp.asarray(ROWS)

    report = found(fn, params, batches)
    assert "residual_rotation" in [g.name for g in report.whole] and not report.rejected
    assert go.scale_invariant({"w": "_ _"}) in report.gauges
    wrong = [go.scale_invariant({"g": "_"}), *(g for g in report.whole if g.name != "scale_invariant")]
    for tool in (lambda: go.orbit.canonicalize(params, wrong), lambda: go.orbit.align(params, params, wrong)):
        with pytest.raises(ValueError, match="no norm_scale for the scale 'g' in front of 'w'"):
            tool()


ROWS = normal(4, 7)


def test_units_that_feed_themselves_have_a_scale_without_a_gauge() -> None:
    """It was rejected, as if it moved the outputs by infinity."""
    params = {"in": normal(D, 5), "again": normal(5, 5), "out": normal(5, 3)}

    def fn(p: Any, x: Any) -> jax.Array:
        h = jax.nn.relu(x @ p["in"])
        return jax.nn.relu(h @ p["again"] + x @ p["in"]) @ p["again"] @ p["out"]

    report = found(fn, params)
    assert not report.gauges and not report.rejected
    assert list(report.ungauged.values()) == [("again, in, out",)] and "overlapping blocks on 'again'" in str(report)


@pytest.mark.parametrize("seed", range(3))
def test_an_eps_as_small_as_roundoff_is_nearly_too(seed: int) -> None:
    """For some seeds it changes the outputs by less than what counts as roundoff, as with Flax's WeightNorm."""

    def fn(p: Any, x: Any) -> jax.Array:
        up, down = (w / (jnp.linalg.norm(w, axis=0) + 1e-12) for w in (p["up"], p["down"]))
        return jnp.tanh(x @ up) @ down

    got = found(fn, {"up": normal(D, 6), "down": normal(6, 4)}, seed=seed)
    assert not got.gauges and {path for own in got.nearly for path in own.exponents} == {"up", "down"}


def test_a_cast_hides_the_gauge_from_a_search_in_its_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    """`test_lift` shows that it is found."""
    monkeypatch.setattr(report, "in_double", lambda fn, *_: fn)
    rounded = lambda h: jax.nn.relu(h).astype(jnp.bfloat16).astype(h.dtype)  # noqa: E731
    assert not found(lambda p, x: mlp(p, x, rounded), MLP).gauges


# Outputs ------------------------------------------------------------------------------------------


def test_logits_hide_their_shift_unless_they_are_called_logits() -> None:
    params = {"head": normal(D, V), "bias": normal(V)}

    def fn(p: Any, x: Any) -> jax.Array:
        return x @ p["head"] + p["bias"]

    check(fn, params, BATCHES, [go.logit_shift({"head": "_ vocab", "bias": "vocab"})], outputs="logits")
    assert not found(fn, params, outputs="logprobs").gauges
    assert not found(lambda p, x: 3.0 * jnp.tanh(fn(p, x) / 3.0), params, outputs="logits").gauges


# Nets without symmetries, and layers that differ ---------------------------------------------------


def test_a_net_without_symmetries_has_no_gauge() -> None:
    got = found(lambda p, x: jnp.sin(mlp(p, x, jax.nn.gelu)), MLP)
    assert not got.gauges and not got.ungauged and not got.nearly and got.code() == "[\n]"


def test_heads_in_another_order_share_no_basis() -> None:
    def fn(p: Any, x: Any) -> jax.Array:
        q, k, v = (jnp.einsum("td,dhe->the", x, p[name])[None] for name in "qkv")
        return flat(attention(q, jnp.tanh(k), v)) @ p["o"]

    params = {name: normal(D, 2, 3) for name in "qkv"} | {"o": normal(6, 4)}
    assert [own.gauge.name for own in found(fn, params).held] == ["head_linear"]
    mixed = found(lambda p, x: fn({**p, "v": p["v"].transpose(0, 2, 1).reshape(D, 2, 3)}, x), params)
    (held,) = mixed.held  # the sizes of the two leaves as wholes
    assert held.gauge.name == "rescale" and set(held.exponents) == {"v", "o"} and "v': '_ _ _'" in repr(held.gauge)


def test_a_capture_matches_the_layers_that_have_the_symmetry_and_no_others() -> None:
    def fn(p: Any, x: Any) -> jax.Array:
        for layer, act in zip(p["layers"], (jax.nn.relu, jax.nn.gelu, jax.nn.relu), strict=True):
            x = x + act(x @ layer["up"]) @ layer["down"]
        return jnp.sin(x)

    params = {"layers": [{"up": normal(D, 5), "down": normal(5, D)} for _ in range(3)]}
    hand = [go.rescale({f"layers/{k}/up": "_ channel"}, {f"layers/{k}/down": "channel _"}) for k in (0, 2)]
    assert len(check(fn, params, BATCHES, hand, outputs="loss").gauges) == 2
    alike = found(lambda p, x: sum(jax.nn.relu(x @ q["up"]) @ q["down"] for q in p["layers"]), params)
    assert "layers/{i}/up" in alike.code() and len(alike.gauges) == 1


@pytest.mark.parametrize("dtype", [float, jnp.bfloat16])
def test_a_reduction_to_a_number_is_no_call_of_its_function(dtype: Any) -> None:
    def fn(p: Any, x: Any) -> jax.Array:
        return jax.lax.reduce((x[0] @ p["up"]).astype(dtype), np.zeros((), dtype), jnp.hypot, (0,)).astype(float)

    (gauge,) = found(fn, {"up": normal(D, 5)}).whole
    assert gauge.name == "head_rotation"


def test_integers_keys_and_missing_leaves_stay_what_they_are() -> None:
    params = {**MLP, "steps": np.int32(3), "absent": None, "mask": np.array([True, False, True])}
    assert found(lambda p, x: mlp(p, x) * p["mask"] * p["steps"], params).gauges == [RELU]


@pytest.mark.parametrize("made", [
    lambda x: jnp.where(x[:, :1] > 0, 1, 0), lambda x: jnp.where(x[:, :1] > 0, 1.0, 0.5), lambda x: jnp.asarray(0.5)])
def test_weakly_typed_arrays_in_a_batch(made: Any) -> None:
    """Under x64 the type that JAX names for them has 64 bits; in a loop's carry of 16 bits they have to stay weak."""
    def fn(p: Any, batch: Any) -> jax.Array:
        start = jnp.ones((), jnp.bfloat16 if batch[1].dtype == jnp.float32 else jnp.int32)
        kept, _ = jax.lax.scan(lambda c, _: (c * batch[1], None), start + 0 * batch[1], None, 2)
        return mlp(p, batch[0]) * kept

    assert found(fn, MLP, [(jnp.float32(x), made(x)) for x in BATCHES]).gauges == [RELU]


# What is refused -----------------------------------------------------------------------------------


def refused(*words: str, fn: Any = mlp, params: Any = MLP, **options: Any) -> None:
    with refusals.refused("discover: ", *words):
        found(fn, params, **options)


def test_dropout_is_no_function(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = itertools.count()

    def fn(p: Any, x: Any) -> jax.Array:
        return mlp(p, x * np.random.default_rng(next(calls)).integers(2, size=x.shape))

    refused("two calls of fn differ", fn=fn)
    monkeypatch.setattr(checks, "check_repeatable", lambda one, other: None)
    assert found(fn, MLP).gauges == [RELU]  # of whichever mask each trace drew


@pytest.mark.parametrize(("arguments", "problem"), [
    (dict(params={"steps": np.arange(3)}), "no floating-point leaves"),
    (dict(params={**MLP, "u{i}": np.ones(2)}), "no pattern can name 'u{i}'"),
    (dict(batches=BATCHES[:1]), "too few batches"), (dict(batches=BATCHES[0]), "batches is one array"),
    (dict(outputs="probabilities"), "unknown outputs 'probabilities'"), (dict(near=2.0), "bad near 2.0"),
    (dict(near="1e-3"), "bad near"),
    (dict(seed=-1), "bad seed -1"), (dict(batches=[BATCHES[0][:0], BATCHES[1]]), "outputs without entries"),
    (dict(fn=lambda p, x: mlp(p, x)[:0]), "outputs without entries"),
    (dict(fn=lambda p, x: jax.pure_callback(np.tanh, x, x * p["up"]["bias"][0])), "by jax.custom_jvp"),
    (dict(fn=lambda p, x: mlp(p, x).sum(), outputs="logits"), "outputs that are no logits"),
    (dict(fn=lambda p, x: mlp(p, x)[:, :1], outputs="logits"), "outputs='predictions' for a regression"),
    (dict(fn=lambda p, x: mlp(p, x)[:, 0], outputs="logits"), "one number per example"),
    (dict(fn=lambda p, x: {"logits": mlp(p, x), "value": mlp(p, x)[:, 0]}, outputs="logits"), "not all are logits"),
    (dict(fn=lambda p, x: x.shape[0]), "no floating-point outputs"),
    (dict(fn=lambda p, x: (mlp(p, x), 1j * mlp(p, x))), "complex outputs"),
    (dict(batches={"train": BATCHES[0], "test": BATCHES[1]}), "pass list(batches.values())"),
    (dict(batches=[(x, "a") for x in BATCHES], fn=lambda p, x: mlp(p, x[0])), "no array in batch 0 at [1]"),
    (dict(batches=[(x, True) for x in BATCHES], fn=lambda p, x: mlp(p, x[0]) if x[1] else x[0]), "let fn capture it"),
    (dict(fn=jax.tree_util.Partial(lambda w: w, np.ones((2, 2)))), "fn is a module"),
    (dict(fn=lambda p, x: mlp(p, x).at[0].apply(jnp.sin)), "by jax.custom_jvp"),
    (dict(params={**MLP, "phase": np.ones(2, complex)}), "a complex leaf 'phase'"),
])
def test_arguments_that_say_nothing(arguments: dict[str, Any], problem: str) -> None:
    refused(problem, **arguments)


def test_the_bar_is_shown_and_can_be_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    go.discover(mlp, MLP, BATCHES, "loss")
    assert "discover" in capsys.readouterr().err
    assert str(found(mlp, MLP)) == str(found(mlp, MLP)), "a seed gives one report"
    assert capsys.readouterr().err == ""
