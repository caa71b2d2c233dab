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
from models import linen_mha, lm
from tests.cases import lm_parts
from tests.quick import jit

TINY: dict[str, Any] = dict(vocab=11, d_model=6, layers=1, heads=2, kv_heads=2, d_head=4, d_ff=5, max_len=5)

LM_CONFIGS = {
    "gpt": lm.LMConfig(**TINY | {"layers": 2}),
    "gpt/no_bias": lm.LMConfig(**TINY, bias=False),
    "gpt/one_plus": lm.LMConfig(**TINY, norm_one_plus=True),
    "gpt/gelu": lm.LMConfig(**TINY, mlp="gelu"),
    "gpt/relu2": lm.LMConfig(**TINY, mlp="relu2"),
    "gpt/tied": lm.LMConfig(**TINY, tied=True),
    "gpt/tied/no_bias": lm.LMConfig(**TINY, tied=True, bias=False),
    "gpt/qk_norm": lm.LMConfig(**TINY, qk_norm=True),
    "gpt/mqa": lm.LMConfig(**TINY | {"kv_heads": 1}),
    "gpt/orthogonal": lm.LMConfig(**TINY | {"d_head": 3}, init="orthogonal"),
    "gpt/zero_out": lm.LMConfig(**TINY, zero_out=True),
    "llama": lm.llama_config(**TINY | {"layers": 2}),
    "llama/gqa": lm.llama_config(**TINY | {"heads": 4}),
    "llama/bias": lm.llama_config(**TINY, bias=True),
    "llama/one_plus": lm.llama_config(**TINY, norm_one_plus=True),
    "llama/qk_norm": lm.llama_config(**TINY | {"heads": 4}, qk_norm=True),
    "llama/qk_norm/one_plus": lm.llama_config(**TINY, qk_norm=True, norm_one_plus=True, bias=True),
    "llama/relu2/tied": lm.llama_config(**TINY, mlp="relu2", tied=True),
}
MHA_CONFIG = linen_mha.MHAConfig(vocab=11, d_model=6, layers=2, heads=2, d_ff=5, max_len=5)

Case = tuple[Any, Callable[[Any], jax.Array], list[Any]]


def _case(name: str) -> Case:
    """Parameters in general position (no zero bias, no unit scale), the loss on one batch, the gauges."""
    generator = np.random.default_rng(0)
    tokens = generator.integers(11, size=(3, 6))
    if name == "linen":
        _, loss = linen_mha.params_and_loss(MHA_CONFIG, jax.random.key(1))
        shapes = jax.eval_shape(lambda: linen_mha.params_and_loss(MHA_CONFIG, jax.random.key(1))[0])
        gauges = linen_mha.gauges(MHA_CONFIG)
    else:
        shapes, loss = lm_parts(LM_CONFIGS[name])
        gauges = lm.gauges(LM_CONFIGS[name])

    def drawn(x: Any) -> jax.Array:
        return jnp.asarray(0.5 * generator.normal(size=x.shape) + (1.0 if len(x.shape) == 1 else 0.0), float)

    return jax.tree.map(drawn, shapes), lambda p: loss(p, tokens), gauges


def _change(a: Any, b: Any) -> float:
    """Largest absolute difference of two trees."""
    return max(jax.tree.leaves(jax.tree.map(lambda x, y: float(np.max(np.abs(np.asarray(x) - np.asarray(y)))), a, b)))


@pytest.mark.slow_rows("linen", "gpt/*", "llama/[!q]*")
@pytest.mark.parametrize("name", [*LM_CONFIGS, "linen"])
def test_every_gauge_keeps_the_loss(name: str) -> None:
    with jax.enable_x64(True):
        params, loss, gauges = _case(name)
        each = [*gauges, go.product(gauges)]

        def moved(p: Any) -> Any:
            points = [g.act(g.sample(jax.random.key(i), p), p) for i, g in enumerate(each)]
            return jax.tree.map(lambda *leaves: jnp.stack(leaves), p, *points)

        points = jit(moved)(params)
        losses = np.asarray(jit(lambda points: jax.lax.map(loss, points))(points))
        for i, gauge in enumerate(each):
            assert _change(params, jax.tree.map(lambda x, i=i: np.asarray(x)[i + 1], points)) > 1e-3, gauge
            np.testing.assert_allclose(losses[i + 1], losses[0], rtol=1e-12, err_msg=str(gauge))


@pytest.mark.slow_rows("linen", "llama")
@pytest.mark.parametrize("name", ["llama", "gpt", "linen"])
def test_a_wrong_move_changes_the_loss(name: str) -> None:
    """The check above can fail: the same elements do not keep the loss if one leaf is left behind."""
    with jax.enable_x64(True):
        params, loss, gauges = _case(name)
        loss = jax.jit(loss)
        before = float(loss(params))
        for i, gauge in enumerate(gauges[:-1]):
            moved = gauge.act(gauge.sample(jax.random.key(i), params, scale=1.0), params)
            leaves, treedef = jax.tree.flatten(moved)
            old = jax.tree.leaves(params)
            # The last leaf that moved is a kernel or a scale; the first may be a key bias: no loss sees it.
            left = max(n for n, (x, y) in enumerate(zip(old, leaves, strict=True)) if (x != y).any())
            leaves[left] = old[left]
            assert abs(float(loss(jax.tree.unflatten(treedef, leaves))) - before) > 1e-6, gauge


def test_switches_decide_the_gauges() -> None:
    def kinds(**switches: Any) -> list[str]:
        return [gauge.name for gauge in lm.gauges(lm.LMConfig(**TINY, **switches))]

    assert len(kinds()) == 7
    assert len(kinds(mlp="gelu")) == 6
    assert len(kinds(tied=True)) == 6  # The bias alone still shifts.
    assert len(kinds(tied=True, bias=False)) == 5
    assert len(kinds(qk_norm=True)) == 9
    assert kinds(rope=True) != kinds()


@pytest.mark.parametrize("name", LM_CONFIGS)
def test_shapes(name: str) -> None:
    config = LM_CONFIGS[name]
    params, loss = lm.params_and_loss(config, jax.random.key(0))
    d, h, k, e, f = config.d_model, config.heads, config.kv_heads, config.d_head, config.d_ff
    attn, mlp = params["blocks"][0]["attn"], params["blocks"][0]["mlp"]
    assert attn["query"]["kernel"].shape == (d, h, e)
    assert attn["key"]["kernel"].shape == attn["value"]["kernel"].shape == (d, k, e)
    assert attn["out"]["kernel"].shape == (h, e, d)
    assert mlp["up"]["kernel"].shape == (d, f)
    assert mlp["down"]["kernel"].shape == (f, d)
    assert ("gate" in mlp) == (config.mlp == "swiglu")
    assert ("bias" in attn["query"]) == ("bias" in mlp["up"]) == config.bias
    assert ("kernel" in params.get("lm_head", {})) != config.tied
    assert ("pos" in params) != config.rope
    assert ("q_norm" in attn) == config.qk_norm
    assert all(x.dtype == jnp.float32 for x in jax.tree.leaves(params))
    value = jax.eval_shape(loss, params, jnp.zeros((2, 6), jnp.int32))
    assert value.shape == () and value.dtype == jnp.float32


def test_orthogonal_heads_have_no_preferred_basis() -> None:
    params, _ = lm.params_and_loss(LM_CONFIGS["gpt/orthogonal"], jax.random.key(0))
    attn = params["blocks"][0]["attn"]
    gram = jnp.einsum("dhe,dhf->hef", attn["query"]["kernel"], attn["query"]["kernel"])
    np.testing.assert_allclose(gram, jnp.broadcast_to(jnp.eye(3), gram.shape), atol=1e-5)
    gram = jnp.einsum("hed,hfd->hef", attn["out"]["kernel"], attn["out"]["kernel"])
    np.testing.assert_allclose(gram, jnp.broadcast_to(jnp.eye(3), gram.shape), atol=1e-5)


def test_zero_out_starts_both_writers_at_zero() -> None:
    params, _ = lm.params_and_loss(LM_CONFIGS["gpt/zero_out"], jax.random.key(0))
    block = params["blocks"][0]
    assert not block["attn"]["out"]["kernel"].any()
    assert not block["mlp"]["down"]["kernel"].any()


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
