"""Each model's own gauges: each keeps the loss and moves something; the switches build what they say."""

import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import gauge_optax as go
from examples.studies import twins_benchmark
from models import gpt2, grokking, linen_mha, lm, modular, multipliers
from models.linen_multipliers import Multiplied, fold, multiply
from models.weight_standardization import WeightStandardized
from tests.cases import lm_parts
from tests.quick import jit

TINY: dict[str, Any] = dict(vocab=11, d_model=6, layers=1, heads=2, kv_heads=2, d_head=4, d_ff=5, max_len=5)

GPT: dict[str, dict[str, Any]] = {
    "gpt": {"layers": 2}, "gpt/no_bias": {"bias": False}, "gpt/one_plus": {"norm_one_plus": True},
    "gpt/gelu": {"mlp": "gelu"}, "gpt/relu2": {"mlp": "relu2"}, "gpt/tied": {"tied": True},
    "gpt/tied/no_bias": {"tied": True, "bias": False}, "gpt/qk_norm": {"qk_norm": True}, "gpt/mqa": {"kv_heads": 1},
    "gpt/orthogonal": {"d_head": 3, "init": "orthogonal"}, "gpt/zero_out": {"zero_out": True},
}
LLAMA: dict[str, dict[str, Any]] = {
    "llama": {"layers": 2}, "llama/gqa": {"heads": 4}, "llama/bias": {"bias": True},
    "llama/one_plus": {"norm_one_plus": True}, "llama/qk_norm": {"heads": 4, "qk_norm": True},
    "llama/qk_norm/one_plus": {"qk_norm": True, "norm_one_plus": True, "bias": True},
    "llama/relu2/tied": {"mlp": "relu2", "tied": True},
}
LM_CONFIGS = {name: lm.LMConfig(**TINY | switches) for name, switches in GPT.items()}
LM_CONFIGS |= {name: lm.llama_config(**TINY | switches) for name, switches in LLAMA.items()}
MHA_CONFIG = linen_mha.MHAConfig(vocab=11, d_model=6, layers=2, heads=2, d_ff=5, max_len=5)
GROKKING = {
    "one block": grokking.GrokConfig(p=7, d_model=8, heads=2, d_ff=12),
    "two blocks, rotary": grokking.GrokConfig(p=7, d_model=8, heads=2, d_ff=12, mlp="relu2", layers=2, rope=True),
}
MODULAR = twins_benchmark.Config(modulus=7, width=8, heads=2)
# With multipliers. The head gauge stands alone: where they are traded channel by channel, it is a part of that, and no
# list may have one dimension twice.
MULTIPLIED = {
    "gpt2, plain": lambda config: [*gpt2.kernel_gauges(config), *multipliers.traded_gauges(config)],
    "gpt2, all switches": lambda config: [*gpt2.kernel_gauges(config), *multipliers.traded_gauges(config)],
    "gpt2, head gauge, all switches": lambda config: [multipliers.head_gauge(config)],
}


def case(name: str) -> tuple[Any, Callable[[Any], jax.Array], list[Any]]:
    """Parameters in general position (no zero bias, no unit scale), the loss or the logits of a batch, the gauges."""
    generator, key = np.random.default_rng(0), jax.random.key(0)
    tokens, config = jnp.asarray(generator.integers(11, size=(3, 6))), (LM_CONFIGS | GROKKING).get(name)
    read: Callable[[Any], jax.Array]
    if name == "linen":
        model, gauges = functools.partial(linen_mha.params_and_loss, MHA_CONFIG, key), linen_mha.gauges(MHA_CONFIG)
        shapes, loss = jax.eval_shape(lambda: model()[0]), model()[1]
        read = lambda p: loss(p, tokens)  # noqa: E731
    elif name in MULTIPLIED:
        switches = {"bias": True, "rope": True, "kv_heads": 1} if "switches" in name else {"rope": False}
        config = gpt2.config(**TINY | switches)
        graph, state = nnx.split(nnx.eval_shape(lambda: gpt2.build(config, nnx.Rngs(0))))
        shapes, gauges = nnx.to_pure_dict(state), MULTIPLIED[name](config)
        read = lambda p: lm.loss_fn(nnx.merge(graph, p), tokens)  # noqa: E731
    elif name == "modular":
        shapes, gauges = jax.eval_shape(functools.partial(modular.init, MODULAR), key), modular.gauges()[:-1]
        read = functools.partial(modular.logits, MODULAR, tokens=twins_benchmark.pairs(MODULAR, 0)[2])
    elif isinstance(config, grokking.GrokConfig):
        shapes, gauges = jax.eval_shape(functools.partial(grokking.init, config), key), grokking.gauges(config)
        read = functools.partial(grokking.loss, config, pairs=grokking.data(config, 0)[0])
    else:
        (shapes, loss), gauges = lm_parts(LM_CONFIGS[name]), lm.gauges(LM_CONFIGS[name])
        read = lambda p: loss(p, tokens)  # noqa: E731

    def drawn(x: Any) -> jax.Array:
        return jnp.asarray(0.5 * generator.normal(size=x.shape) + (1.0 if len(x.shape) == 1 else 0.0), float)

    return jax.tree.map(drawn, shapes), jit(read), gauges


@pytest.mark.slow_rows("linen", "gpt/*", "llama/[!q]*", "one block", "gpt2, plain")
@pytest.mark.parametrize("name", [*LM_CONFIGS, "linen", "modular", *GROKKING, *MULTIPLIED])
def test_every_gauge_keeps_what_is_read(name: str, x64: None) -> None:
    params, read, gauges = case(name)
    go.testing.assert_invariant(read, params, gauges, jax.random.key(2), rtol=1e-12)
    assert all(gauge.dim(params) > 0 for gauge in gauges)
    assert float(jnp.std(read(params))) > 0.05 or read(params).shape == ()
    if name == "two blocks, rotary":
        with pytest.raises(AssertionError, match="head_rotation"):
            whole = grokking.gauges(GROKKING[name], full_rotation=True)
            go.testing.assert_invariant(read, params, whole, jax.random.key(2))


def test_switches_decide_the_gauges() -> None:
    def kinds(**switches: Any) -> list[str]:
        return [gauge.name for gauge in lm.gauges(lm.LMConfig(**TINY, **switches))]

    assert len(kinds()) == 7 and kinds(rope=True) != kinds()
    assert len(kinds(mlp="gelu")) == len(kinds(tied=True)) == 6  # With tied tables the bias alone still shifts.
    assert len(kinds(tied=True, bias=False)) == 5 and len(kinds(qk_norm=True)) == 9


def test_kernels_start_as_the_switches_say() -> None:
    """Orthogonal heads have no preferred basis; with `zero_out` both writers start at zero."""
    attn, block = (
        lm.params_and_loss(LM_CONFIGS[name], jax.random.key(0))[0]["blocks"][0]
        for name in ("gpt/orthogonal", "gpt/zero_out")
    )
    for name, equation in (("query", "dhe,dhf->hef"), ("out", "hed,hfd->hef")):
        kernel = attn["attn"][name]["kernel"]
        np.testing.assert_allclose(jnp.einsum(equation, kernel, kernel), np.stack([np.eye(3)] * 2), atol=1e-5)
    assert not block["attn"]["out"]["kernel"].any() and not block["mlp"]["down"]["kernel"].any()


def test_a_standardized_layer_sees_neither_size_nor_mean(x64: None) -> None:
    graph, state = nnx.split(WeightStandardized(nnx.Linear(8, 3, rngs=nnx.Rngs(0)), "_ channel"))
    x, params = np.random.default_rng(0).normal(size=(5, 8)), nnx.to_pure_dict(state)
    layer, kernel = params["layer"], params["layer"]["kernel"]
    expected = x @ (kernel - kernel.mean(0)) + layer["bias"]
    for moved, tolerance in ((kernel, 1e-5), (3.0 * kernel + jnp.array([1.0, -2.0, 0.5]), 1e-6)):
        found = nnx.merge(graph, params | {"layer": layer | {"kernel": moved}})(jnp.asarray(x))
        np.testing.assert_allclose(found, expected, rtol=tolerance, atol=tolerance)
        expected = found


@pytest.mark.parametrize("name", ["llama/gqa", "gpt", "linen"])
def test_no_prediction_sees_the_future(name: str) -> None:
    tokens, changed = jnp.array([[1, 2, 3, 4, 5]]), jnp.array([[1, 2, 3, 9, 5]])
    if name == "linen":
        params, _ = linen_mha.params_and_loss(MHA_CONFIG, jax.random.key(0))
        model: Any = functools.partial(linen_mha.MHADecoder(MHA_CONFIG).apply, {"params": params})
    else:
        model = lm.build(LM_CONFIGS[name], nnx.Rngs(0))
    before, after = model(tokens), model(changed)
    np.testing.assert_allclose(before[:, :3], after[:, :3], rtol=1e-6)
    assert jnp.abs(before[:, 3:] - after[:, 3:]).min(axis=1).max() > 1e-6


# Multipliers in Linen --------------------------------------------------------------------------------


class Heads(nn.Module):
    """Two layers with an axis of heads between them, as they are or behind multipliers."""

    multiplied: bool

    @nn.compact
    def __call__(self, x: jax.Array) -> Any:
        def layer(name: str, inputs: int, outputs: Any) -> nn.Module:
            dense = functools.partial(nn.DenseGeneral, outputs, axis=tuple(range(-inputs, 0)), param_dtype=x.dtype)
            return Multiplied(dense(), inputs, name=name) if self.multiplied else dense(name=name)

        return layer("out", 2, 5)(jnp.tanh(layer("value", 1, (2, 3))(x)) + layer("key", 1, (2, 3))(x))


def test_wrapped_layers_and_multiplied_parameters_are_one_function_with_these_gauges(x64: None) -> None:
    rng = np.random.default_rng(1)
    x, wrapped, plain = jnp.asarray(rng.normal(size=(2, 4, 5))), Heads(True), Heads(False)
    alone, params = (model.init(jax.random.key(0), x)["params"] for model in (plain, wrapped))
    multiplied = multiply(alone, {"value": 1, "key": 1, "out": 2})
    assert jax.tree.map(jnp.shape, multiplied) == jax.tree.map(jnp.shape, params)
    params = jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape), x.dtype), params)
    found, expected = map(np.asarray, (wrapped.apply({"params": params}, x), plain.apply({"params": fold(params)}, x)))
    np.testing.assert_allclose(found, expected, rtol=1e-12)
    gauges = [go.rescale({"value/rows": "head channel"}, {"value/layer/kernel": "_ head channel"}),
              go.rescale({"out/columns": "head channel"}, {"out/layer/kernel": "head channel _"})]
    loss = lambda p: jnp.sum(jnp.sin(jnp.asarray(wrapped.apply({"params": p}, x))))  # noqa: E731
    go.testing.assert_invariant(loss, params, gauges, jax.random.key(0))
