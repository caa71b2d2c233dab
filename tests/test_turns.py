"""Components of one kind in one loop do what they do one after the other."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gauge_optax as go
from gauge_optax.transforms import _turns
from models import lm

LAYERS = 3
CONFIG = lm.LMConfig(vocab=7, d_model=6, layers=LAYERS, heads=2, kv_heads=2, d_head=3, d_ff=5, max_len=5)
OPTIMIZERS = {
    "ddc_adamw": lambda: go.ddc_adamw(1e-2, lm.gauges(CONFIG), weight_decay=0.1),
    "ddc_adamw, vertical": lambda: go.ddc_adamw(1e-2, lm.gauges(CONFIG), vertical="adam"),
    "ddc_muon": lambda: go.ddc_muon(1e-2, lm.gauges(CONFIG), labels={"blocks/1/attn/out/kernel": "adam"}),
}


def _trained(name: str) -> tuple[Any, str]:
    """Parameters and state after a few steps, and the traced step."""
    params, loss = lm.params_and_loss(CONFIG, jax.random.key(0))
    params = jax.tree.map(lambda x: x.astype(jnp.float64), params)
    tokens = jax.random.randint(jax.random.key(1), (3, 6), 0, CONFIG.vocab)
    tx = OPTIMIZERS[name]()

    def step(params: Any, state: Any) -> tuple[Any, Any]:
        updates, state = tx.update(jax.grad(loss)(params, tokens), state, params)
        return optax.apply_updates(params, updates), state

    carry = params, jax.jit(tx.init)(params)
    program = str(jax.make_jaxpr(step)(*carry))
    compiled = jax.jit(step)
    for _ in range(3):
        carry = compiled(*carry)
    return carry, program


SLOW = ("ddc_adamw", "ddc_muon", "ddc_adamw, vertical")


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow if n in SLOW else ()) for n in OPTIMIZERS])
def test_a_loop_over_layers_is_its_layers(name: str, x64: None, monkeypatch: pytest.MonkeyPatch) -> None:
    unrolled, straight = _trained(name)
    monkeypatch.setattr(_turns, "_MOST_UNROLLED", 1)
    looped, program = _trained(name)
    length = 2 if "muon" in name else LAYERS  # the layer with a label of its own is of another kind
    assert f"length={length}" in program and f"length={length}" not in straight
    for a, b in zip(jax.tree.leaves(looped), jax.tree.leaves(unrolled), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-13)


def test_large_layers_are_not_stacked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_turns, "_MOST_UNROLLED", 1)
    monkeypatch.setattr(_turns, "_MOST_STACKED", 1)
    tx = go.ddc_adamw(1e-2, go.rescale({"{i}/up": "_ channel"}, {"{i}/down": "channel _"}))
    params = {str(k): {"up": jnp.ones((2, 3)), "down": jnp.ones((3, 2))} for k in range(3)}
    assert "length=3" not in str(jax.make_jaxpr(tx.update)(params, tx.init(params), params))
