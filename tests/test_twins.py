"""Two weight sets that are one function stay one function: the whole product group at once, on real models.

One compiled step per model and dtype serves every check: decay is traced.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gauge_optax as go
from gauge_optax.binding import leaves_by_path, with_leaves
from gauge_optax.measure.motion import balanced_drift, balanced_motion
from models import lm
from tests.quick import jit
from tests.tolerances import tolerance

pytestmark = pytest.mark.slow  # minutes of compiling; test_slice.py keeps twins of `quotient` in the quick tests

SIZES: dict[str, Any] = dict(vocab=11, d_model=6, layers=1, heads=2, kv_heads=2, d_head=4, d_ff=7, max_len=6)
CONFIGS = {
    "gpt": lm.LMConfig(**SIZES | {"d_head": 3}),
    "gpt/orthogonal": lm.LMConfig(**SIZES | {"d_head": 3}, init="orthogonal"),
    "llama": lm.llama_config(**SIZES | {"heads": 4}),
}
RATE = 3e-3
SCALE_GAUGES = ("rescale", "norm_scale", "logit_shift")
KEY_BIASES = ("attn", "key", "bias")
TOKENS = jax.random.randint(jax.random.key(0), (6, 7), 0, SIZES["vocab"])
Step = Callable[..., tuple[Any, Any, jax.Array]]


class Setting(NamedTuple):
    """A model in general position, its gauges, and compiled functions."""

    params: Any
    gauges: list[go.Gauge]
    init: Callable[[Any], Any]
    step: Step
    adamw: Step


@pytest.mark.parametrize("decay", [0.1, 0.0])
@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("name", CONFIGS)
def test_ddc_keeps_twins_together(name: str, dtype: str, decay: float) -> None:
    with jax.enable_x64(dtype == "float64"):
        setting = make(name, dtype)
        group = go.product(setting.gauges)
        element = group.sample(jax.random.key(3), setting.params)
        twin = group.act(element, setting.params)
        assert apart(setting.params, twin) > 0.5, "the twins are the same weights"

        ours, losses = train(setting.step, setting.init, setting.params, decay)
        theirs, twin_losses = train(setting.step, setting.init, twin, decay)
        _, plain = train(setting.adamw, optax.adamw(1.0).init, setting.params, decay)
        _, plain_twin = train(setting.adamw, optax.adamw(1.0).init, twin, decay)

        assert relative(plain_twin, plain) > 1e-3, "AdamW keeps these twins together too: nothing is shown"
        assert losses[-1] < losses[0]
        assert relative(twin_losses, losses) <= tolerance("twin_loss", dtype)
        worst = leaf_errors(group.act(element, ours), theirs)
        print(f"loss {relative(twin_losses, losses):.1e}, leaves {max(worst.values()):.1e}")
        assert max(worst.values()) <= tolerance("twins", dtype), worst


@pytest.mark.parametrize("name", ["gpt", "llama"])
def test_coordinates_stand_still_for_a_thousand_float32_steps(name: str) -> None:
    setting = make(name, "float32")
    group = go.product(setting.gauges)
    element = group.sample(jax.random.key(3), setting.params)
    for start in (setting.params, group.act(element, setting.params)):
        ours, turned = walk(setting, setting.step, setting.init, start)
        plain, plainly_turned = walk(setting, setting.adamw, optax.adamw(1.0).init, start)
        found, beside = largest(balanced_drift(start, ours, group)), largest(balanced_drift(start, plain, group))
        print(f"{name}: drift {found:.1e} (AdamW {beside:.1e}), turned {turned:.1e} (AdamW {plainly_turned:.1e})")
        assert beside > 1e-2 and plainly_turned > 1e-2
        assert found <= tolerance("drift", "float32")
        assert turned <= tolerance("drift", "float32")


@pytest.mark.parametrize("heads", ["orthogonal", "equal_pair", "rank_one", "zero"])
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_degenerate_heads_stay_one_function(heads: str, dtype: str) -> None:
    """Spectra on which an eigenbasis would follow nothing; rotations alone, so that the frame keeps them degenerate."""
    with jax.enable_x64(dtype == "float64"):
        setting = _make("gpt", dtype, ("head_rotation",))
        group = go.product(setting.gauges)
        start = with_heads(setting.params, HEADS[heads])
        element = group.sample(jax.random.key(5), start)
        twin = group.act(element, start)
        assert heads == "zero" or apart(start, twin) > 0.1
        ours, losses = train(setting.step, setting.init, start, 0.1)
        theirs, twin_losses = train(setting.step, setting.init, twin, 0.1)
        assert np.all(np.isfinite(losses))
        assert relative(twin_losses, losses) <= tolerance("twin_loss", dtype)
        worst = leaf_errors(group.act(element, ours), theirs)
        assert max(worst.values()) <= tolerance("twins", dtype), worst


@functools.cache
def _make(name: str, dtype: str, kinds: tuple[str, ...] = ()) -> Setting:
    config = CONFIGS[name]
    params, loss = lm.params_and_loss(config, jax.random.key(1))
    gauges = [g for g in lm.gauges(config) if not kinds or g.name in kinds]
    params = jax.tree.map(lambda x: x.astype(dtype), params)
    if config.init == "normal":
        leaves, treedef = jax.tree.flatten(params)
        keys = jax.random.split(jax.random.key(2), len(leaves))
        params = treedef.unflatten(
            [x + 0.2 * jax.random.normal(k, x.shape, x.dtype) for x, k in zip(leaves, keys, strict=True)]
        )

    def stepper(make: Callable[..., optax.GradientTransformation]) -> Step:
        @jit
        def step(params: Any, state: Any, rate: jax.Array, decay: jax.Array) -> Any:
            value, grads = jax.value_and_grad(loss)(params, TOKENS)
            updates, state = make(rate, decay).update(grads, state, params)
            return optax.apply_updates(params, updates), state, value

        return step

    def ours(rate: Any, decay: Any) -> optax.GradientTransformation:
        return go.ddc_adamw(rate, gauges, weight_decay=decay)

    adamw = stepper(lambda rate, decay: optax.adamw(rate, weight_decay=decay))
    return Setting(params, gauges, jit(ours(1.0, 0.0).init), stepper(ours), adamw)


def make(name: str, dtype: str) -> Setting:
    """A setting; the orthogonal start shares the compiled step of the other, which has the same shapes."""
    if name != "gpt/orthogonal":
        return _make(name, dtype)
    params, _ = lm.params_and_loss(CONFIGS[name], jax.random.key(1))
    return _make("gpt", dtype)._replace(params=jax.tree.map(lambda x: x.astype(dtype), params))


def train(step: Step, init: Callable[[Any], Any], params: Any, decay: float, steps: int = 20) -> tuple[Any, np.ndarray]:
    state, losses = init(params), []
    for _ in range(steps):
        params, state, loss = step(params, state, RATE, decay)
        losses.append(float(loss))
    return params, np.array(losses)


def walk(setting: Setting, step: Step, init: Callable[[Any], Any], params: Any) -> tuple[Any, float]:
    """A thousand steps, and the largest accumulated turn of a head."""
    motion = jit(lambda p, q: balanced_motion(p, jax.tree.map(jnp.subtract, q, p), setting.gauges))
    state, total = init(params), None
    for _ in range(1000):
        after, state, _ = step(params, state, 1e-3, 0.1)
        turned = [
            part
            for gauge, part in zip(setting.gauges, motion(params, after), strict=True)
            if gauge.name not in SCALE_GAUGES
        ]
        total = turned if total is None else jax.tree.map(jnp.add, total, turned)
        params = after
    return params, largest(total)


def with_heads(params: Any, change: Callable[[jax.Array], jax.Array]) -> Any:
    """`params` with every query and key kernel changed, and no bias on them."""
    leaves = leaves_by_path(params)
    kernels = {p: change(x) for p, x in leaves.items() if p.endswith(("query/kernel", "key/kernel"))}
    biases = {p: jnp.zeros_like(x) for p, x in leaves.items() if p.endswith(("query/bias", "key/bias"))}
    return with_leaves(params, kernels | biases)


def _columns(w: jax.Array, scales: tuple[float, ...]) -> jax.Array:
    """Kernels (d, heads, e) with orthogonal columns of these lengths."""
    columns = jnp.eye(w.shape[0], w.shape[2], dtype=w.dtype) * jnp.array(scales, w.dtype)
    return jnp.broadcast_to(columns[:, None], w.shape)


HEADS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "orthogonal": lambda w: _columns(w, (1.0, 1.0, 1.0)),
    "equal_pair": lambda w: _columns(w, (1.0, 1.0, 2.0)),
    "rank_one": lambda w: w[:, :, :1] * jnp.ones_like(w),
    "zero": jnp.zeros_like,
}


def leaf_errors(a: Any, b: Any) -> dict[str, float]:
    """Relative difference per leaf, without key biases: their gradient is zero, they move by rounding (DESIGN §5)."""
    theirs = leaves_by_path(b)
    return {
        p: relative(np.asarray(theirs[p]), np.asarray(x))
        for p, x in leaves_by_path(a).items()
        if not p.endswith("/".join(KEY_BIASES))
    }


def apart(a: Any, b: Any) -> float:
    return max(leaf_errors(a, b).values())


def relative(found: np.ndarray, expected: np.ndarray) -> float:
    size = float(np.linalg.norm(expected))
    return float(np.linalg.norm(found - expected)) / (size or 1.0)  # a leaf of zeros is compared as it is


def largest(tree: Any) -> float:
    return max(float(jnp.max(jnp.abs(x))) for x in jax.tree.leaves(tree))


@pytest.mark.parametrize("zero", ["norm", "row"])
def test_a_channel_that_comes_alive_late_moves_no_logit(zero: str) -> None:
    """Anchoring changes a channel's frame; the shift of the leaf it scales must stay where it is."""
    with jax.enable_x64(True):
        keys = jax.random.split(jax.random.key(4), 3)
        params = {"norm": jnp.ones(4), "head": jax.random.normal(keys[0], (4, 5))}
        if zero == "norm":
            params["norm"] = jnp.zeros(4)
        else:
            params["head"] = params["head"].at[0].set(0.7)  # constant: nothing but shift
        x, y = jax.random.normal(keys[1], (16, 4)), jnp.arange(16) % 5
        gauges = [go.norm_scale({"norm": "channel"}, {"head": "channel _"}), go.logit_shift({"head": "_ vocab"})]

        def loss(p: Any) -> jax.Array:
            return optax.softmax_cross_entropy_with_integer_labels(x * p["norm"] @ p["head"], y).mean()

        tx = go.ddc_adamw(3e-2, gauges, weight_decay=0.0)
        go.testing.assert_equivariant_step(tx, loss, params, gauges, keys[2], steps=20)
        state, after = tx.init(params), params
        for _ in range(20):
            updates, state = jit(tx.update)(jax.grad(loss)(after), state, after)
            after = optax.apply_updates(after, updates)
        settled = optax.tree_utils.tree_get(state[-1], "settled")
        assert all(bool(jnp.all(s)) for s in settled), "no channel came alive: nothing is shown"
        moved = after["head"].mean(1) - params["head"].mean(1)
        assert float(jnp.max(jnp.abs(moved))) <= tolerance("drift", "float64")


def test_zero_gradients_move_nothing() -> None:
    """With two shifts on one leaf, whichever way they are bound."""
    params = {"w": jax.random.normal(jax.random.key(0), (2, 3, 5)) + 1.0}
    slots = [go.logit_shift({"w": f"slot={n} _ vocab"}) for n in (0, 1)]
    for gauges in (slots, [go.logit_shift({"w": ("slot=0 _ vocab", "slot=1 _ vocab")})]):
        tx = go.ddc_adamw(1e-2, gauges, weight_decay=0.0)
        updates, _ = tx.update(jax.tree.map(jnp.zeros_like, params), tx.init(params), params)
        assert float(jnp.max(jnp.abs(updates["w"]))) < 1e-6
