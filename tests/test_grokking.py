"""The grokking testbed: its network beside a plain one, its summary of a run, its queue of runs."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from examples.studies import grokking as example
from models import grokking
from models.lm import ACTIVATIONS, rotary
from tests.test_models import GROKKING, case


def _plainly(c: grokking.GrokConfig, p: Any, tokens: jax.Array) -> jax.Array:
    """The same network with every projection made for every pair and position."""

    def norm(q: Any, x: jax.Array) -> jax.Array:
        x = x - jnp.mean(x, -1, keepdims=True)
        return x / jnp.sqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-5) * q["scale"] + q["bias"]

    x = p["embed"]["embedding"][tokens]
    x = x if c.rope else x + p["pos"]["embedding"]
    for block in p["blocks"].values():
        y, attn, mlp = norm(block["norm1"], x), block["attn"], block["mlp"]
        q, k, v = (jnp.einsum("btd,dhe->bthe", y, attn[name]["kernel"]) for name in ("query", "key", "value"))
        q, k = (rotary(q), rotary(k)) if c.rope else (q, k)
        scores = jnp.einsum("bqhe,bkhe->bhqk", q, k) / jnp.sqrt(q.shape[-1])
        weights = jax.nn.softmax(jnp.where(jnp.tri(2, dtype=bool), scores, -jnp.inf))
        x = x + jnp.einsum("bhqk,bkhe,hed->bqd", weights, v, attn["out"]["kernel"])
        hidden = ACTIVATIONS[c.mlp](norm(block["norm2"], x) @ mlp["up"]["kernel"] + mlp["up"]["bias"])
        x = x + hidden @ mlp["down"]["kernel"] + mlp["down"]["bias"]
    return x[:, -1] @ p["lm_head"]["kernel"]


@pytest.mark.slow_rows("one block")
@pytest.mark.parametrize("name", GROKKING)
def test_each_number_is_projected_once_and_the_logits_are_the_plain_ones(name: str, x64: None) -> None:
    c, params = GROKKING[name], case(name)[0]
    (tokens, _), _ = grokking.data(c, 0)
    expected = _plainly(c, params, tokens)
    np.testing.assert_allclose(grokking.logits(c, params, tokens), expected, rtol=1e-11, atol=1e-12)
    assert float(jnp.std(expected)) > 0.1


def test_grokking_is_sustained_and_falls_after_it_are_collapses() -> None:
    accuracy = [0.1, 0.96, 0.2, *[0.97] * 12, 0.5, 0.4, 0.99, 0.3, 0.99]
    said = example.summary(accuracy, 100)
    assert (said["grokked"], said["collapses"], said["below"], said["lowest"]) == (300, 2, 3, 0.3)
    assert example.summary([0.96] * 5, 100)["grokked"] == float("inf")


def test_the_best_cell_of_a_grid_is_known_when_the_grid_is_done() -> None:
    first, *others = example.grid_cells("AdamW")
    assert len({first, *others}) == 6
    means = {cell.name: {"final": {"mean": 0.5 - 0.1 * abs(number - 2)}} for number, cell in enumerate(others)}
    assert example.best({"grid": {"AdamW": means}}, "AdamW") is None
    means[first.name] = {"final": {"mean": 0.1}}
    assert example.best({"grid": {"AdamW": means}}, "AdamW") == others[2]
