"""Blocks that are zero: nothing is divided by them, and they leave zero."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gauge_optax as go
from gauge_optax.binding import leaves_by_path, with_leaves
from models import lm
from tests.quick import jit

VOCAB, LENGTH, STEPS, RATE = 32, 13, 200, 1e-3
CONFIG = lm.llama_config(
    vocab=VOCAB, d_model=16, layers=2, heads=2, kv_heads=2, d_head=8, d_ff=32, max_len=LENGTH, zero_out=True
)


@functools.cache
def _setting() -> tuple[Any, Callable[..., Any], Callable[..., Any]]:
    """Start, and compiled runs of ddc_adamw and AdamW over all batches: losses, and which leaves are not zero."""
    params, loss = lm.params_and_loss(CONFIG, jax.random.key(1))

    def runner(tx: optax.GradientTransformation) -> Callable[[Any, jax.Array], Any]:
        def step(carry: Any, batch: jax.Array) -> Any:
            params, state = carry
            value, grads = jax.value_and_grad(loss)(params, batch)
            updates, state = tx.update(grads, state, params)
            params = optax.apply_updates(params, updates)
            return (params, state), (value, {p: jnp.any(x != 0) for p, x in leaves_by_path(params).items()})

        def run(params: Any, batches: jax.Array) -> Any:
            _, (losses, moved) = jax.lax.scan(step, (params, tx.init(params)), batches)
            return losses, moved

        return jit(run)

    return (
        params,
        runner(go.ddc_adamw(RATE, lm.gauges(CONFIG), weight_decay=0.1)),
        runner(optax.adamw(RATE, weight_decay=0.1)),
    )


def chain_of_tokens(steps: int) -> jax.Array:
    """Batches of a fixed Markov chain with few likely successors: something a small model learns in 200 steps."""
    rng = np.random.default_rng(0)
    cumulative = rng.dirichlet(np.full(VOCAB, 0.05), size=VOCAB).cumsum(1)
    tokens = np.zeros((steps, 16, LENGTH), np.int32)
    tokens[:, :, 0] = rng.integers(0, VOCAB, (steps, 16))
    for t in range(1, LENGTH):
        draw = rng.random((steps, 16, 1))
        tokens[:, :, t] = np.minimum((cumulative[tokens[:, :, t - 1]] < draw).sum(-1), VOCAB - 1)
    return jnp.asarray(tokens)


def test_zero_initialised_outputs_leave_zero_and_catch_up() -> None:
    params, ddc, adamw = _setting()
    batches = chain_of_tokens(STEPS)
    zero = [p for p, x in leaves_by_path(params).items() if not np.any(x)]
    assert {p.split("/", 2)[2] for p in zero} == {"attn/out/kernel", "mlp/down/kernel"}
    losses, moved = ddc(params, batches)
    plain, _ = adamw(params, batches)
    assert all(moved[p][4] for p in zero), "still zero after 5 steps"
    assert np.all(np.isfinite(losses))
    ratio = float(losses[-20:].mean() / plain[-20:].mean())
    print(f"loss after {STEPS} steps from zero outputs: {ratio:.3f} of AdamW's")
    assert float(plain[0]) > 1.5 * float(plain[-20:].mean()), "AdamW learned nothing here: nothing is compared"
    assert ratio <= 1.02


@pytest.mark.parametrize(
    "leaf", ["final_norm/scale", "blocks/0/norm1/scale", "lm_head/kernel", "blocks/1/attn/query/kernel"]
)
@pytest.mark.parametrize("whole", [True, False])
def test_zero_weights_give_finite_updates(leaf: str, whole: bool) -> None:
    params, ddc, _ = _setting()
    value = leaves_by_path(params)[leaf]
    params = with_leaves(params, {leaf: jnp.zeros_like(value) if whole else value.at[0].set(0.0)})
    losses, _ = ddc(params, chain_of_tokens(STEPS))
    assert np.all(np.isfinite(losses))
    assert losses[-20:].mean() < losses[0]
