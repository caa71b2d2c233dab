"""Each model's own gauges: each keeps the loss and moves something; the switches build what they say."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import gauge_optax as go
from examples.studies import twins_benchmark
from gauge_optax.binding import leaves_by_path
from models import grokking, linen_mha, lm, modular
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


def case(name: str) -> tuple[Any, Callable[[Any], jax.Array], list[Any]]:
    """Parameters in general position (no zero bias, no unit scale), the loss or the logits of a batch, the gauges."""
    generator, key = np.random.default_rng(0), jax.random.key(0)
    tokens, config = generator.integers(11, size=(3, 6)), (LM_CONFIGS | GROKKING).get(name)
    read: Callable[[Any], jax.Array]
    if name == "linen":
        model, gauges = functools.partial(linen_mha.params_and_loss, MHA_CONFIG, key), linen_mha.gauges(MHA_CONFIG)
        shapes, loss = jax.eval_shape(lambda: model()[0]), model()[1]
        read = functools.partial(loss, tokens=tokens)
    elif name == "modular":
        shapes, gauges = jax.eval_shape(functools.partial(modular.init, MODULAR), key), modular.gauges()[:-1]
        read = functools.partial(modular.logits, MODULAR, tokens=twins_benchmark.pairs(MODULAR, 0)[2])
    elif isinstance(config, grokking.GrokConfig):
        shapes, gauges = jax.eval_shape(functools.partial(grokking.init, config), key), grokking.gauges(config)
        read = functools.partial(grokking.loss, config, pairs=grokking.data(config, 0)[0])
    else:
        (shapes, loss), gauges = lm_parts(LM_CONFIGS[name]), lm.gauges(LM_CONFIGS[name])
        read = functools.partial(loss, tokens=tokens)

    def drawn(x: Any) -> jax.Array:
        return jnp.asarray(0.5 * generator.normal(size=x.shape) + (1.0 if len(x.shape) == 1 else 0.0), float)

    return jax.tree.map(drawn, shapes), jit(read), gauges


@pytest.mark.slow_rows("linen", "gpt/*", "llama/[!q]*", "one block")
@pytest.mark.parametrize("name", [*LM_CONFIGS, "linen", "modular", *GROKKING])
def test_every_gauge_keeps_what_is_read(name: str, x64: None) -> None:
    params, read, gauges = case(name)
    go.testing.assert_invariant(read, params, gauges, jax.random.key(2), rtol=1e-12)
    assert float(jnp.std(read(params))) > 0.05 or read(params).shape == ()
    if name == "two blocks, rotary":
        with pytest.raises(AssertionError, match="head_rotation"):
            whole = grokking.gauges(GROKKING[name], full_rotation=True)
            go.testing.assert_invariant(read, params, whole, jax.random.key(2))


@pytest.mark.slow_rows("linen", "llama")
@pytest.mark.parametrize("name", ["llama", "gpt", "linen"])
def test_a_wrong_move_changes_the_loss(name: str, x64: None) -> None:
    """The check above can fail: the same elements do not keep the loss if one leaf is left behind."""
    params, loss, gauges = case(name)
    old = jax.tree.leaves(params)
    for i, gauge in enumerate(gauges[:-1]):
        moved = gauge.act(gauge.sample(jax.random.key(i), params, scale=1.0), params)
        leaves, treedef = jax.tree.flatten(moved)
        # The last leaf that moved is a kernel or a scale; the first may be a key bias: no loss sees it.
        left = max(n for n, (x, y) in enumerate(zip(old, leaves, strict=True)) if (x != y).any())
        leaves[left] = old[left]
        assert abs(float(loss(jax.tree.unflatten(treedef, leaves)) - loss(params))) > 1e-6, gauge


def test_switches_decide_the_gauges() -> None:
    def kinds(**switches: Any) -> list[str]:
        return [gauge.name for gauge in lm.gauges(lm.LMConfig(**TINY, **switches))]

    assert len(kinds()) == 7 and kinds(rope=True) != kinds()
    assert len(kinds(mlp="gelu")) == len(kinds(tied=True)) == 6  # With tied tables the bias alone still shifts.
    assert len(kinds(tied=True, bias=False)) == 5 and len(kinds(qk_norm=True)) == 9


@pytest.mark.parametrize("name", LM_CONFIGS)
def test_shapes(name: str) -> None:
    config = LM_CONFIGS[name]
    params, loss = lm.params_and_loss(config, jax.random.key(0))
    shapes = {path.removeprefix("blocks/0/"): x.shape for path, x in leaves_by_path(params).items()}
    d, h, k, e, f = config.d_model, config.heads, config.kv_heads, config.d_head, config.d_ff
    assert shapes == shapes | {
        "attn/query/kernel": (d, h, e), "attn/key/kernel": (d, k, e), "attn/value/kernel": (d, k, e),
        "attn/out/kernel": (h, e, d), "mlp/up/kernel": (d, f), "mlp/down/kernel": (f, d),
    }
    switches = {
        "mlp/gate/kernel": config.mlp == "swiglu", "attn/query/bias": config.bias, "mlp/up/bias": config.bias,
        "lm_head/kernel": not config.tied, "pos/embedding": not config.rope, "attn/q_norm/scale": config.qk_norm,
    }
    assert {path: path in shapes for path in switches} == switches
    value = jax.eval_shape(loss, params, jnp.zeros((2, 6), jnp.int32))
    assert value.shape == () and {x.dtype for x in [value, *jax.tree.leaves(params)]} == {jnp.dtype("float32")}


def test_orthogonal_heads_have_no_preferred_basis() -> None:
    attn = lm.params_and_loss(LM_CONFIGS["gpt/orthogonal"], jax.random.key(0))[0]["blocks"][0]["attn"]
    for name, equation in (("query", "dhe,dhf->hef"), ("out", "hed,hfd->hef")):
        gram = jnp.einsum(equation, attn[name]["kernel"], attn[name]["kernel"])
        np.testing.assert_allclose(gram, jnp.broadcast_to(jnp.eye(3), gram.shape), atol=1e-5)


def test_zero_out_starts_both_writers_at_zero() -> None:
    block = lm.params_and_loss(LM_CONFIGS["gpt/zero_out"], jax.random.key(0))[0]["blocks"][0]
    assert not block["attn"]["out"]["kernel"].any() and not block["mlp"]["down"]["kernel"].any()


@pytest.mark.parametrize("name", ["llama/gqa", "gpt", "linen"])
def test_no_prediction_sees_the_future(name: str) -> None:
    tokens, changed = jnp.array([[1, 2, 3, 4, 5]]), jnp.array([[1, 2, 3, 9, 5]])
    if name == "linen":
        params, _ = linen_mha.params_and_loss(MHA_CONFIG, jax.random.key(0))
        model = functools.partial(linen_mha.MHADecoder(MHA_CONFIG).apply, {"params": params})
    else:
        model = lm.build(LM_CONFIGS[name], nnx.Rngs(0))
    before, after = model(tokens), model(changed)
    np.testing.assert_allclose(before[:, :3], after[:, :3], rtol=1e-6)
    assert jnp.abs(before[:, 3:] - after[:, 3:]).min(axis=1).max() > 1e-6


@pytest.mark.parametrize(
    ("switches", "message"), [({"kv_heads": 3}, "multiple"), ({"d_head": 3, "rope": True}, "even")]
)
def test_impossible_sizes_are_refused(switches: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        lm.LMConfig(**TINY | switches)
