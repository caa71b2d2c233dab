"""equivariant: whatever runs inside, twins are one function, because the inner optimizer is handed the same numbers."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gauge_optax as go
from gauge_optax.binding import leaves_by_path
from gauge_optax.gauges._moves import move_cotangent, move_tangent
from tests.quick import jit

Tree = Any

INNER: dict[str, Callable[[], optax.GradientTransformation]] = {
    "adamw": lambda: optax.adamw(1e-2, weight_decay=0.1),
    "lion": lambda: optax.lion(1e-2),
    "adafactor": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=3),
    "muon": lambda: optax.contrib.muon(1e-2),
    "clip_sgd": lambda: optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(1.0)),
}
UNIT = go.rescale({"up/kernel": "_ channel", "up/bias": "channel"}, {"down": "channel _"})
VALUE = {"value/kernel": "_ head basis", "value/bias": "head basis"}
OUT = {"out": "head basis _"}
GROUPS = {
    "orthogonal": [UNIT, go.head_rotation(VALUE | OUT), go.head_rotation({"a": "_ basis", "b": "basis _"})],
    "linear": [UNIT, go.head_linear(VALUE, OUT), go.head_linear({"a": "_ basis"}, {"b": "basis _"})],
}
SHAPES: Tree = {
    "value": {"kernel": (6, 2, 3), "bias": (2, 3)},
    "out": (2, 3, 6),
    "up": {"kernel": (6, 5), "bias": (5,)},
    "down": (5, 6),
    "a": (6, 4),
    "b": (4, 6),
}


def _normal(seed: int) -> Tree:
    draw = np.random.default_rng(seed).normal
    return jax.tree.map(lambda shape: jnp.asarray(draw(size=shape)), SHAPES, is_leaf=lambda x: isinstance(x, tuple))


def _loss(p: Tree) -> jax.Array:
    x = jnp.asarray(np.random.default_rng(9).normal(size=(8, 6)), p["a"].dtype)
    heads = jnp.einsum("nd,dhe->nhe", x, p["value"]["kernel"]) + p["value"]["bias"]
    x = x + jnp.tanh(jnp.einsum("nhe,hef->nf", heads, p["out"]))
    x = x + jnp.tanh(jax.nn.relu(x @ p["up"]["kernel"] + p["up"]["bias"]) @ p["down"])
    return jnp.mean(jnp.square(x + x @ p["a"] @ p["b"] - 0.3))


def _train(tx: optax.GradientTransformation, *starts: Tree, steps: int = 20) -> list[Tree]:
    @jit
    def step(params: Tree, state: Tree) -> tuple[Tree, Tree]:
        updates, state = tx.update(jax.grad(_loss)(params), state, params)
        return optax.apply_updates(params, updates), state

    ends = []
    for params in starts:
        state = tx.init(params)
        for _ in range(steps):
            params, state = step(params, state)
        ends.append(params)
    return ends


def _error(found: Tree, expected: Tree) -> float:
    a, b = leaves_by_path(found), leaves_by_path(expected)
    return max(float(jnp.linalg.norm(a[p] - x) / jnp.linalg.norm(x)) for p, x in b.items())


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("name", INNER)
def test_twins_are_one_function(name: str, group: str, x64: None) -> None:
    """Under O(d_h) with log-scales of ±1, and under GL(d_h) at condition 100 with scales of ±2.3."""
    gauges, params = go.product(GROUPS[group]), _normal(0)
    element = gauges.sample(jax.random.key(1), params, 1.0 if group == "orthogonal" else 2.303)
    twin = gauges.act(element, params)
    plain = [gauges.act(element, p) if n == 0 else p for n, p in enumerate(_train(INNER[name](), params, twin))]
    assert _error(*plain) > 1e-2, f"{name} sees no difference by itself"
    ours, theirs = _train(go.equivariant(INNER[name](), gauges), params, twin)
    error = _error(gauges.act(element, ours), theirs)
    print(f"{name} {group}: {error:.1e}")
    assert error <= 1e-10
    assert float(_loss(ours)) < float(_loss(params))


def test_shifts_and_norms_are_framed_too(x64: None) -> None:
    """An affine gauge, and a scale that moves its shift."""
    gauges = go.product([
        go.norm_scale({"norm": "1+ channel"}, {"head": "channel _"}),
        go.logit_shift({"head": "_ vocab", "bias": "vocab"}),
    ])  # fmt: skip
    draw = np.random.default_rng(3).normal
    params = {"norm": jnp.asarray(draw(size=6)), "head": jnp.asarray(draw(size=(6, 7))), "bias": jnp.ones(7)}

    def loss(p: Tree) -> jax.Array:
        x = jnp.asarray(np.random.default_rng(4).normal(size=(5, 6)))
        logits = x * (1.0 + p["norm"]) @ p["head"] + p["bias"]
        return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, jnp.arange(5)))

    element = gauges.sample(jax.random.key(0), params)
    tx, ends = go.equivariant(optax.adamw(1e-2, weight_decay=0.1), gauges), []
    for p in (params, gauges.act(element, params)):
        state = tx.init(p)
        for _ in range(5):
            updates, state = tx.update(jax.grad(loss)(p), state, p)
            p = optax.apply_updates(p, updates)
        ends.append(p)
    assert _error(gauges.act(element, ends[0]), ends[1]) <= 1e-12


def test_instances_on_one_leaf_have_frames_of_their_own(x64: None) -> None:
    """Queries and keys under rotary, values under GL, in one kernel."""
    gauges = go.product([
        go.rope_torus({"qkv": ("_ (qkv=0 head basis)", "_ (qkv=1 head basis)")}, sizes={"qkv": 3, "head": 2}),
        go.head_linear({"qkv": "_ (qkv=2 head basis)"}, {"out": "(head basis) _"}, sizes={"qkv": 3, "head": 2}),
    ])  # fmt: skip
    draw = np.random.default_rng(0).normal
    params = {"qkv": jnp.asarray(draw(size=(6, 24))), "out": jnp.asarray(draw(size=(8, 6)))}
    grads = jax.tree.map(lambda x: jnp.sin(3.0 * x), params)
    tx = go.equivariant(optax.adam(1e-2), gauges)
    element = gauges.sample(jax.random.key(0), params)
    here, _ = tx.update(grads, tx.init(params), params)
    twin = gauges.act(element, params)
    there, _ = tx.update(move_cotangent(gauges, element, params, grads), tx.init(twin), twin)
    assert _error(there, move_tangent(gauges, element, params, here)) <= 1e-10


def test_a_zero_side_leaves_the_frame_to_the_other(x64: None) -> None:
    """LoRA's B = 0: no balanced representative, and yet a frame."""
    gauge, params = go.product(GROUPS["linear"]), _normal(0)
    params = params | {"b": jnp.zeros((4, 6)), "down": jnp.zeros((5, 6))}
    element = gauge.sample(jax.random.key(1), params, 2.303)
    ours, theirs = _train(go.equivariant(INNER["adamw"](), gauge), params, gauge.act(element, params))
    assert _error(gauge.act(element, ours), theirs) <= 1e-10


def test_a_head_without_a_frame_is_refused() -> None:
    """Rank 2 of 3 on both sides."""
    params = _normal(0)
    params = params | {"value": {"kernel": params["value"]["kernel"].at[..., 0].set(0.0), "bias": jnp.zeros((2, 3))}}
    params = params | {"out": params["out"].at[:, 0].set(0.0)}
    tx = go.equivariant(optax.sgd(0.1), GROUPS["linear"])
    with pytest.raises(ValueError, match="no frame at 'value/kernel'") as error:
        tx.init(params)
    for part in ("2 of 2 heads", "expected:", "on_degenerate='identity'"):
        assert part in str(error.value)
    assert any(bool(jnp.any(jnp.isnan(x))) for x in jax.tree.leaves(jax.jit(tx.init)(params).gauges))
    calm = functools.partial(go.equivariant, on_degenerate="identity")(optax.sgd(0.1), GROUPS["linear"])
    (end,) = _train(calm, params, steps=2)
    assert all(bool(jnp.all(jnp.isfinite(x))) for x in jax.tree.leaves(end))


def test_heads_wider_than_the_model_have_no_frame() -> None:
    """Both sides have rank 4 of 6: neither fixes what the other lacks."""
    gauge = go.head_linear({"query": "_ head basis"}, {"key": "_ head basis"})
    draw = np.random.default_rng(0).normal
    params = {name: jnp.asarray(draw(size=(4, 2, 6)), jnp.float32) for name in ("query", "key")}
    with pytest.raises(ValueError, match="no frame at 'query'"):
        go.equivariant(optax.sgd(0.1), gauge).init(params)


def test_extra_arguments_reach_the_inner_transformation() -> None:
    seen = []

    def update(updates: Tree, state: Tree, params: Tree = None, **extra: Any) -> tuple[Tree, Tree]:
        seen.append(extra["value"])
        return updates, state

    tx = go.equivariant(optax.GradientTransformationExtraArgs(lambda _: (), update), UNIT)
    params = _normal(0)
    tx.update(params, tx.init(params), params, value=3.0)
    assert seen == [3.0]
