"""A plain run goes on as a quotient run: moments move by what they are, and wrong states are refused."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gauge_optax as go
from tests.quick import jit
from tests.refusals import refused
from tests.tolerances import tolerance
from tests.twins import normal, trained

NORM = go.norm_scale({"norm": "channel"}, {"up": "channel _"})
UNIT = go.rescale({"up": "_ channel"}, {"down": "channel _"})
SHIFT = go.logit_shift({"head": "_ vocab"})
TURN = go.head_rotation({"value": "_ head basis", "out": "head basis _"})
SCALES = [NORM, UNIT, SHIFT]


def _params() -> Any:
    shapes = {"norm": (4,), "up": (4, 5), "down": (5, 3), "head": (4, 6), "value": (4, 2, 3), "out": (2, 3, 4)}
    return jax.tree.map(lambda x: x + 0.5, normal(0, shapes))


def _loss(p: Any) -> jax.Array:
    x = jnp.linspace(-1.0, 1.0, 12).reshape(3, 4)
    hidden = jax.nn.relu((x * p["norm"]) @ p["up"]) @ p["down"]
    heads = jnp.einsum("nd,dhe,hef->nf", x, p["value"], p["out"])
    return jnp.sum(jnp.square(hidden)) + jnp.sum(jnp.square(jax.nn.log_softmax(heads @ p["head"])))


def _far(a: Any, b: Any) -> float:
    return max(float(np.max(np.abs(np.subtract(x, y)))) for x, y in zip(*map(jax.tree.leaves, (a, b)), strict=True))


def test_a_moment_is_moved_by_constants_before_sizes(x64: None) -> None:
    """A norm's bias flows through a kernel that the norm's scale multiplies."""
    params = normal(0, {"norm": (4,), "shift": (4,), "up": (4, 5), "bias": (5,), "down": (5, 3)})
    gauges = [
        go.norm_scale({"norm": "channel", "shift": "channel"}, {"up": "channel _"}),
        go.bias_absorption({"shift": "channel"}, {"up": "channel _"}, {"bias": "_"}),
        go.rescale({"up": "_ channel", "bias": "channel"}, {"down": "channel _"}),
    ]

    def loss(p: Any) -> jax.Array:
        x = jnp.linspace(-1.0, 1.0, 12).reshape(3, 4) * p["norm"] + p["shift"]
        return jnp.sum(jnp.square(jax.nn.relu(x @ p["up"] + p["bias"]) @ p["down"]))

    def moments(p: Any) -> Any:
        _, state = inner.update(jax.grad(loss)(p), inner.init(p), p)
        return go.orbit.from_state(state, inner, gauges, p).inner_state

    inner, group = optax.trace(0.9), go.product(gauges)
    twin = group.act(group.sample(jax.random.key(1), params), params)
    assert float(loss(twin)) == pytest.approx(float(loss(params)))
    assert _far(moments(twin), moments(params)) <= tolerance("quotient_twins")


def test_a_state_on_the_slice_goes_on_as_it_is(x64: None) -> None:
    """Where the frame is the identity, the next step is the plain optimizer's, but for coming back to the slice."""
    inner = optax.adamw(1e-5, weight_decay=0.0)
    group, start = go.product(SCALES), _params()
    start = group.act(group.inverse(group.read(start)), start)
    _, state = trained(inner, _loss, start, 3)
    plain, _ = inner.update(jit(jax.grad(_loss))(start), state, start)
    tx = go.quotient(inner, SCALES)
    ours, _ = tx.update(jit(jax.grad(_loss))(start), go.orbit.from_state(state, inner, SCALES, start), start)
    moved = [float(_loss(optax.apply_updates(start, u)) - _loss(start)) for u in (ours, plain)]
    assert moved[0] == pytest.approx(moved[1], rel=1e-3)


def test_heads_keep_their_basis(x64: None) -> None:
    inner = optax.adamw(1e-2)
    params, state = trained(inner, _loss, _params(), 3)
    own = go.orbit.from_state(state, inner, [TURN], params)
    assert _far(own.inner_state, state) == 0.0
    (frame,) = own.frame.elements.values()
    assert _far(frame, TURN.identity(params)) == 0.0
    updates, _ = go.quotient(inner, [TURN]).update(jit(jax.grad(_loss))(params), own, params)
    assert all(bool(jnp.all(jnp.isfinite(x))) for x in jax.tree.leaves(updates))


def test_a_state_of_another_optimizer_is_refused(x64: None) -> None:
    params = _params()
    with refused("not a state of this optimizer", "from_state"):
        go.orbit.from_state(optax.sgd(0.1).init(params), optax.adamw(1e-2), SCALES, params)


def test_what_mixes_entries_is_refused_or_reset(x64: None) -> None:
    linear = go.head_linear({"value": "_ head basis"}, {"out": "head basis _"})
    inner = optax.adamw(1e-2)
    params, state = trained(inner, _loss, _params(), 3)
    with pytest.raises(ValueError, match="second moments"):
        go.orbit.from_state(state, inner, [linear], params)
    own = go.orbit.from_state(state, inner, [linear], params, on_unknown="reset")
    assert float(jnp.max(jnp.abs(own.inner_state[0].nu["value"]))) == 0.0


def test_an_unpinned_run_goes_on_from_a_plain_state(x64: None) -> None:
    inner = optax.adamw(1e-2)
    params, state = trained(inner, _loss, _params(), 3)
    gradient = jit(jax.grad(_loss))(params)
    tx = go.quotient(inner, SCALES, pin=False)
    converted = go.orbit.from_state(state, inner, SCALES, params, pin=False)
    assert jax.tree.structure(converted) == jax.tree.structure(tx.init(params))
    ours, _ = tx.update(gradient, converted, params)
    pinned = go.orbit.from_state(state, inner, SCALES, params)
    same, _ = go.quotient(inner, SCALES).update(gradient, pinned, params)
    assert _far(ours, same) <= 1e-12, "at its first step the optimizer is on the slice either way"
    with pytest.raises(ValueError, match="pin=True"):
        tx.update(gradient, pinned, params)
