"""Masks and labels by path: the first pattern counts, none is idle, no leaf is forgotten."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import gauge_optax as go

PARAMS = {"blocks": [{"kernel": jnp.ones((2, 2)), "bias": jnp.ones(2)}] * 2, "head": {"kernel": jnp.ones((2, 3))}}


def test_the_first_pattern_counts() -> None:
    values = {"blocks/1/**": "last", "**/bias": "bias", "blocks/{i}/kernel": "kernel"}
    assert go.tools.by_path(values, default="rest")(PARAMS) == {
        "blocks": [{"kernel": "kernel", "bias": "bias"}, {"kernel": "last", "bias": "last"}], "head": {"kernel": "rest"}
    }


def test_in_partition_masked_and_nnx() -> None:
    labels = go.tools.by_path({"head/**": "head", "**": "body"})
    tx = optax.partition({"head": optax.sgd(1.0), "body": optax.sgd(0.1)}, labels)
    updates, _ = tx.update(PARAMS, tx.init(PARAMS), PARAMS)
    assert float(updates["head"]["kernel"][0, 0]) == -1.0
    assert float(updates["blocks"][0]["bias"][0]) == pytest.approx(-0.1)
    decayed = optax.adamw(0.1, weight_decay=0.1, mask=go.tools.by_path({"**/bias": False}, default=True))
    zeros = jax.tree.map(jnp.zeros_like, PARAMS)
    updates, _ = decayed.update(zeros, decayed.init(PARAMS), PARAMS)
    assert float(updates["blocks"][0]["bias"][0]) == 0 > float(updates["blocks"][0]["kernel"][0, 0])
    model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    masked = optax.masked(optax.sgd(1.0), go.tools.by_path({"bias": True}, default=False))
    optimizer = nnx.Optimizer(model, masked, wrt=nnx.Param)
    optimizer.update(model, nnx.state(model, nnx.Param))


@pytest.mark.parametrize(
    ("values", "words"),
    [({"**/bais": 1, "**": 2}, "no leaf matches '**/bais'"), ({"**/bias": 1}, "no pattern for 'blocks/0/kernel'")],
)
def test_errors(values: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError) as error:
        go.tools.by_path(values)(PARAMS)
    assert words in str(error.value) and "remedy:" in str(error.value)
