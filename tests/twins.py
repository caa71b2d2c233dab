"""Small models in general position and from odd starts, and twins of them trained side by side."""

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from gauge_optax.binding import leaves_by_path, with_leaves
from models import lm
from tests.cases import lm_parts
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
TOKENS = np.random.default_rng(0).integers(SIZES["vocab"], size=(6, 7))


def normal(seed: int, shapes: Mapping[str, tuple[int, ...]], dtype: Any = float) -> dict[str, jax.Array]:
    """Unit normals of these shapes, drawn one after another by numpy."""
    draw = np.random.default_rng(seed).normal
    return {name: jnp.asarray(draw(size=shape), dtype) for name, shape in shapes.items()}


def normal_like(seed: int, tree: Tree) -> Tree:
    """The same for every leaf of a tree, of its shape and dtype."""
    draw = np.random.default_rng(seed).normal
    return jax.tree.map(lambda x: jnp.asarray(draw(size=x.shape), x.dtype), tree)


@functools.cache
def loss_of(name: str) -> Callable[[Tree], jax.Array]:
    loss = lm_parts(CONFIGS[name])[1]
    return lambda p: loss(p, TOKENS)


def start_of(name: str, dtype: str) -> Tree:
    """Weights in general position, of the sizes in use: by numpy, which compiles nothing."""
    shapes = lm_parts(CONFIGS[name])[0]
    generator = np.random.default_rng(1)

    def drawn(path: str, shape: tuple[int, ...]) -> jax.Array:
        fan_in = np.prod(shape[:-1]) if "out" in path else shape[0]
        size = np.hypot(0.2, fan_in**-0.5) if path.endswith("kernel") else 0.2
        centre = 1.0 if path.endswith("scale") and not CONFIGS[name].norm_one_plus else 0.0
        return jnp.asarray(centre + size * generator.normal(size=shape), dtype)

    return with_leaves(shapes, {path: drawn(path, x.shape) for path, x in leaves_by_path(shapes).items()})


@functools.lru_cache(maxsize=2)
def stepper(tx: optax.GradientTransformation, loss: Callable[[Tree], Any]) -> Any:
    """(params, state) → both after a step, and the loss before it; compiled once for a point and its twin."""

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


def trained(tx: optax.GradientTransformation, loss: Callable[[Tree], Any], params: Tree, steps: int) -> Any:
    """Weights and state after some steps."""
    step, state = stepper(tx, loss), tx.init(params)
    for _ in range(steps):
        params, state, _ = step(params, state)
    return params, state


def driven(
    tx: optax.GradientTransformation, params: Tree, gradients: Iterable[Tree], state: Tree = None
) -> tuple[Tree, Tree]:
    """Weights and state after a step with each of these gradients, from a state or from a new one."""
    state, update = jit(tx.init)(params) if state is None else state, jit(tx.update)
    for grads in gradients:
        updates, state = update(grads, state, params)
        params = optax.apply_updates(params, updates)
    return params, state


def walk(tx: optax.GradientTransformation, params: Tree, gradients: Tree) -> tuple[Tree, Tree]:
    """The weights before every step and after the last, and the last state; gradients are stacked by step."""

    def step(carry: Any, grads: Tree) -> Any:
        params, state = carry
        updates, state = tx.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), params

    def run(params: Tree, gradients: Tree) -> Any:
        (last, state), before = jax.lax.scan(step, (params, tx.init(params)), gradients)
        return jax.tree.map(lambda a, b: jnp.concatenate([a, b[None]]), before, last), state

    return jit(run)(params, gradients)


def structure(tree: Tree) -> Any:
    """The structure of a tree, to compare: jaxlib has no stubs, and mypy knows no `==` of what jax returns."""
    return jax.tree.structure(tree)


def apart(a: Tree, b: Tree) -> dict[str, float]:
    """Relative distance of every leaf, key biases in."""
    ours, theirs = leaves_by_path(a), leaves_by_path(b)
    assert ours.keys() == theirs.keys()
    arrays = ((path, np.asarray(x, np.float64), np.asarray(theirs[path], np.float64)) for path, x in ours.items())
    found = {path: float(np.linalg.norm(x - y) / (np.linalg.norm(y) or 1.0)) for path, x, y in arrays}
    assert np.all(np.isfinite([*found.values()])), found  # Python's `max` passes over a NaN that does not come first
    return found


def furthest(a: Tree, b: Tree) -> float:
    """The largest of these distances."""
    return max(apart(a, b).values())


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
}


def odd(start: str, params: Tree) -> Tree:
    return with_leaves(params, {p: ODD[start](p, x) for p, x in leaves_by_path(params).items()})


@functools.cache
def _sampler_and_action(group: Any) -> tuple[Callable[[Tree], Any], Callable[[Any, Tree], Tree]]:
    return jit(lambda params: group.sample(jax.random.key(3), params)), jit(group.act)


def element_of(group: Any, params: Tree, dtype: str) -> Any:
    """An element large enough to matter, drawn in float64: one program for both precisions."""
    with jax.enable_x64(True):
        exact = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
        return jax.tree.map(lambda x: np.asarray(x, dtype), _sampler_and_action(group)[0](exact))


def an_ulp_off(params: Tree) -> Tree:
    """Every weight up or down by its last digit."""
    generator = np.random.default_rng(0)

    def shaken(x: jax.Array) -> jax.Array:
        return (x * (1 + float(jnp.finfo(x.dtype).eps) * generator.choice([-1.0, 1.0], size=x.shape))).astype(x.dtype)

    return jax.tree.map(shaken, params)


def check_twins(
    label: str, group: Any, init: Any, step: Any, params: Tree, dtype: str, slack: float = 1.0, loss_slack: float = 1.0
) -> None:
    """Trains a point and its twin, and compares every leaf and every loss.

    Where they part further than they may, so must the run itself if its start is off by an ulp: a tenth as far, and ten
    times the tolerance is the most.
    """
    act, g = _sampler_and_action(group)[1], element_of(group, params, dtype)
    ours, losses = train(init, step, params)
    assert furthest(act(g, params), params) > 0.05, "the twin is the point"
    theirs, twin_losses = train(init, step, act(g, params))
    errors, loss = apart(theirs, act(g, ours)), float(np.max(np.abs(twin_losses / losses - 1.0)))
    worst = max(errors, key=lambda path: errors[path])
    print(f"{label} {dtype}: {errors[worst]:.1e} at {worst}, loss {loss:.1e}")
    assert np.all(np.isfinite(losses)) and losses[-1] < losses[0]
    most, most_loss = slack * tolerance("quotient_twins", dtype), slack * loss_slack * tolerance("quotient_loss", dtype)
    if errors[worst] > most or loss > most_loss:
        shaken, shaken_losses = train(init, step, an_ulp_off(params))
        ulp, ulp_loss = max(apart(shaken, ours).values()), float(np.max(np.abs(shaken_losses / losses - 1.0)))
        print(f"{label} {dtype}: an ulp of the start parts it by {ulp:.1e}, loss {ulp_loss:.1e}")
        most, most_loss = (max(x, min(10 * x, 10 * roundoff)) for x, roundoff in ((most, ulp), (most_loss, ulp_loss)))
    assert errors[worst] <= most, errors
    assert loss <= most_loss
