"""Small models in general position and from odd starts, and twins of them trained side by side."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from gauge_optax.binding import leaves_by_path, with_leaves
from models import lm
from tests.quick import jit
from tests.tolerances import tolerance

Tree = Any

SIZES: dict[str, Any] = dict(vocab=11, d_model=6, layers=1, heads=2, kv_heads=2, d_head=4, d_ff=7, max_len=6)
CONFIGS = {
    "gpt": lm.LMConfig(**SIZES | {"d_head": 3}),
    "llama": lm.llama_config(**SIZES | {"heads": 4}),
    "qk_norm": lm.llama_config(**SIZES | {"heads": 4}, qk_norm=True),
    "relu2": lm.LMConfig(**SIZES, mlp="relu2", norm_one_plus=True),
    "mqa": lm.LMConfig(**SIZES | {"kv_heads": 1}),
    "llama_bias": lm.llama_config(**SIZES | {"bias": True}),
}
TOKENS = jax.random.randint(jax.random.key(0), (6, 7), 0, SIZES["vocab"])


@functools.cache
def loss_of(name: str) -> Callable[[Tree], jax.Array]:
    _, loss = lm.params_and_loss(CONFIGS[name], jax.random.key(1))
    return lambda p: loss(p, TOKENS)


def start_of(name: str, dtype: str) -> Tree:
    """Weights in general position."""
    params, _ = lm.params_and_loss(CONFIGS[name], jax.random.key(1))
    leaves, treedef = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(2), len(leaves))
    noisy = [x + 0.2 * jax.random.normal(k, x.shape) for x, k in zip(leaves, keys, strict=True)]
    return treedef.unflatten([x.astype(dtype) for x in noisy])


def stepper(tx: optax.GradientTransformation, loss: Callable[[Tree], jax.Array]) -> Any:
    @jit
    def step(params: Tree, state: Tree) -> tuple[Tree, Tree, jax.Array]:
        value, grads = jax.value_and_grad(loss)(params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    return step


def train(init: Any, step: Any, params: Tree, steps: int = 20) -> tuple[Tree, np.ndarray]:
    state, losses = init(params), []
    for _ in range(steps):
        params, state, loss = step(params, state)
        losses.append(float(loss))
    return params, np.array(losses)


def apart(a: Tree, b: Tree) -> dict[str, float]:
    """Relative distance of every leaf, key biases in."""
    return {
        path: float(jnp.linalg.norm(x - y)) / (float(jnp.linalg.norm(y)) or 1.0)
        for (path, x), y in zip(leaves_by_path(a).items(), leaves_by_path(b).values(), strict=True)
    }


ODD: dict[str, Callable[[str, jax.Array], jax.Array]] = {
    "zero_outputs": lambda p, x: jnp.zeros_like(x) if p.endswith(("out/kernel", "down/kernel")) else x,
    "zero_head": lambda p, x: jnp.zeros_like(x) if p == "lm_head/kernel" else x,
    "constant_head": lambda p, x: jnp.broadcast_to(x[:, :1], x.shape) if p == "lm_head/kernel" else x,
    "zero_up": lambda p, x: jnp.zeros_like(x) if p.endswith("up/kernel") else x,
    "dead_unit": lambda p, x: (
        x.at[:, 2].set(0.0)
        if p.endswith("up/kernel")
        else x.at[2].set(0.0) if p.endswith(("down/kernel", "up/bias")) else x
    ),
    "rank_one_heads": lambda p, x: (
        x[..., :1] * jnp.ones_like(x) if p.endswith(("query/kernel", "key/kernel"))
        else jnp.zeros_like(x) if p.endswith(("query/bias", "key/bias")) else x
    ),
    "zero_queries_and_keys": lambda p, x: jnp.zeros_like(x) if "query" in p or "key" in p else x,
    "sizes_of_a_million": lambda p, x: (
        1e6 * x if p.endswith(("up/kernel", "up/bias", "value/kernel", "value/bias"))
        else 1e-6 * x if p.endswith(("down/kernel", "out/kernel")) else x
    ),
}  # fmt: skip


def odd(start: str, params: Tree) -> Tree:
    return with_leaves(params, {p: ODD[start](p, x) for p, x in leaves_by_path(params).items()})


def check_twins(
    label: str, group: Any, init: Any, step: Any, params: Tree, dtype: str, slack: float = 1.0
) -> None:
    """Trains a point and its twin, and compares every leaf and every loss."""
    g = group.sample(jax.random.key(3), params)
    twin = group.act(g, params)
    ours, losses = train(init, step, params)
    theirs, twin_losses = train(init, step, twin)
    errors = apart(theirs, group.act(g, ours))
    worst = max(errors, key=lambda path: errors[path])
    print(f"{label} {dtype}: {errors[worst]:.1e} at {worst}, loss {np.max(np.abs(twin_losses - losses)):.1e}")
    assert np.all(np.isfinite(losses)) and losses[-1] < losses[0]
    assert errors[worst] <= slack * tolerance("quotient_twins", dtype), errors
    assert np.max(np.abs(twin_losses / losses - 1.0)) <= slack * tolerance("quotient_loss", dtype)
