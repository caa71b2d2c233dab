"""A tied model with a head of its own computes what it did, and then its stream rotates."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gauge_optax as go

V, D, F = 11, 8, 12
TOKENS = np.arange(12).reshape(2, 6) % V


def _model(norm: str, dtype: Any = jnp.float64) -> tuple[Any, Any]:
    """Parameters and function(params, tokens) of one gated layer; `norm` is "rms", "layer" or "1+"."""
    keys = iter(jax.random.split(jax.random.key(0), 9))

    def normal(*shape: int) -> jax.Array:
        return (jax.random.normal(next(keys), shape) / shape[0] ** 0.5).astype(dtype)

    scales = {name: normal(D) + (0.0 if norm == "1+" else 1.5) for name in ("norm", "final")}
    params = {"embed": {"table": 3.0 * normal(V, D)}, "gate": normal(D, F), "up": normal(D, F), "down": normal(F, D)}
    params |= scales | ({"bias": normal(D)} if norm == "layer" else {})

    def fn(p: Any, tokens: Any) -> jax.Array:
        def normed(x: jax.Array, name: str) -> jax.Array:
            centred = x - jnp.mean(x, -1, keepdims=True) if norm == "layer" else x
            unit = centred / jnp.sqrt(jnp.mean(centred**2, -1, keepdims=True))
            return unit * (p[name] + (1.0 if norm == "1+" else 0.0))

        x = p["embed"]["table"][tokens]
        h = normed(x, "norm")
        x = x + (jax.nn.silu(h @ p["gate"]) * (h @ p["up"])) @ p["down"]
        x = normed(x, "final") + p.get("bias", 0.0)
        return x @ (p["lm_head"]["kernel"] if "lm_head" in p else p["embed"]["table"].T)

    return params, fn


def _untied(params: Any, norm: str) -> Any:
    options = dict(one_plus=norm == "1+", bias="bias" if norm == "layer" else None)
    return go.orbit.untie(params, "embed/table", "lm_head/kernel", "final", **options)


def _stream(norm: str, untied: bool) -> go.Gauge:
    one = "1+ channel" if norm == "1+" else "channel"
    norms = [go.norm_scale({"norm": one}, {"gate": "channel _", "up": "channel _"})]
    if untied:
        norms.append(go.norm_scale({"final": one}, {"lm_head/kernel": "channel _"}))
    read = {"gate": "basis _", "up": "basis _"} | ({"lm_head/kernel": "basis _"} if untied else {})
    return go.residual_rotation(read, {"embed/table": "_ basis", "down": "_ basis"}, norms=norms)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("norm", ["rms", "1+", "layer"])
def test_the_function_stays(norm: str) -> None:
    params, fn = _model(norm)
    untied = _untied(params, norm)
    np.testing.assert_allclose(fn(untied, TOKENS), fn(params, TOKENS), rtol=1e-12, atol=1e-12)
    assert set(untied) == {*params, "lm_head"} and "lm_head" not in params
    assert float(jnp.max(jnp.abs(untied["final"] - (0.0 if norm == "1+" else 1.0)))) == 0.0


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("norm", ["rms", "1+"])
def test_then_the_stream_rotates_and_a_tied_table_does_not(norm: str) -> None:
    params, fn = _model(norm)
    untied = _untied(params, norm)
    rotated = go.orbit.rotate(untied, _stream(norm, untied=True), "random", fn=fn, batch=TOKENS)
    np.testing.assert_allclose(fn(rotated, TOKENS), fn(untied, TOKENS), rtol=1e-11, atol=1e-11)
    assert float(jnp.max(jnp.abs(rotated["down"] - untied["down"]))) > 0.1
    # The table as a writer alone: without the function the weights are wrong, with it they are refused.
    wrong = go.orbit.rotate(params, _stream(norm, untied=False), "random")
    assert float(jnp.max(jnp.abs(fn(wrong, TOKENS) - fn(params, TOKENS)))) > 0.1
    with pytest.raises(ValueError, match=r"another function[\s\S]*go\.orbit\.untie"):
        go.orbit.rotate(params, _stream(norm, untied=False), "random", fn=fn, batch=TOKENS)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_roundoff_of_the_weights_is_no_other_function(dtype: str) -> None:
    params, fn = _model("rms", dtype)
    untied = _untied(params, "rms")
    assert untied["lm_head"]["kernel"].dtype == dtype
    rotated = go.orbit.rotate(untied, _stream("rms", untied=True), fn=fn, batch=TOKENS)
    assert rotated["down"].dtype == dtype


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("embed", "head", "final"), "no leaf at table='embed'"),
        (("gate", "head", "final"), "'final' does not fit the table 'gate'"),
        (("final", "head"), "no table at 'final'"),
        (("embed/table", "up", "final"), "a leaf at head='up'"),
        (("embed/table", "up/kernel", "final"), "no place for a leaf at 'up/kernel'"),
    ],
)
def test_errors(arguments: tuple[str, ...], words: str) -> None:
    params, _ = _model("rms", jnp.float32)
    with pytest.raises(ValueError, match=words):
        go.orbit.untie(params, *arguments)


def test_a_bias_is_not_divided_by_zero() -> None:
    params, _ = _model("layer", jnp.float32)
    with pytest.raises(ValueError, match="a scale of zero at 'final'"):
        _untied(params | {"final": params["final"].at[3].set(0.0)}, "layer")
