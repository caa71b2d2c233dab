"""The optimizer inside Flax NNX, Flax Linen and Orbax does what it does on a plain dict."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from flax.training.train_state import TrainState

import gauge_optax as go
from models import lm
from tests.quick import jit
from tests.test_conformance import EVERY_KIND, _params
from tests.tolerances import tolerance
from tests.twins import furthest, structure, trained

Tree = Any

CONFIG = lm.llama_config(vocab=11, d_model=6, layers=2, heads=2, kv_heads=2, d_head=4, d_ff=5, max_len=5)
TOKENS: Any = np.random.default_rng(0).integers(11, size=(3, 6))
# Kept where rounding is not blown up: here it is the frameworks that are compared, not Adam.
OPTIONS: dict[str, Any] = {"learning_rate": 0.01, "eps": 1e-3, "weight_decay": 0.1}


def _close(found: Tree, expected: Tree) -> None:
    """Leaf by leaf, relative to the leaf's norm: another compilation rounds otherwise."""
    chex.assert_trees_all_equal_shapes_and_dtypes(found, expected)
    assert furthest(found, expected) <= tolerance("twins", jnp.float32)


# NNX ----------------------------------------------------------------------------------------------


@nnx.jit
def _nnx_step(model: lm.LM, optimizer: nnx.Optimizer) -> None:
    optimizer.update(model, nnx.grad(lm.loss_fn)(model, TOKENS))


@pytest.mark.slow
@pytest.mark.parametrize("mask", [None, lambda params: jax.tree.map(lambda x: x.ndim > 1, params)], ids=["-", "mask"])
def test_nnx_optimizer_takes_the_steps_of_a_plain_dict(mask: Any) -> None:
    """`init` sees boxes, `update` bare arrays."""
    tx, model = go.ddc_adamw(**OPTIONS, gauges=lm.gauges(CONFIG), mask=mask), lm.build(CONFIG, nnx.Rngs(0))
    graphdef, start = nnx.split(model)
    loss = lambda params: lm.loss_fn(nnx.merge(graphdef, params), TOKENS)  # noqa: E731
    expected, state = trained(tx, loss, nnx.to_pure_dict(start), 2)
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    for _ in range(2):
        _nnx_step(model, optimizer)
    _close(nnx.to_pure_dict(nnx.state(model, nnx.Param)), expected)
    own = nnx.as_pure(optimizer.opt_state)
    chex.assert_trees_all_equal_shapes_and_dtypes(jax.tree.leaves(own), jax.tree.leaves(state))


# Linen --------------------------------------------------------------------------------------------


class Unit(nn.Module):
    """A ReLU layer and what reads it; `boxed` leaves carry the names of mesh axes."""

    boxed: bool

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        draw = nn.initializers.lecun_normal()
        kernel = nn.with_partitioning(draw, (None, "model")) if self.boxed else draw
        x = nn.relu(nn.Dense(5, name="up", kernel_init=kernel)(x))
        return nn.Dense(4, name="down", kernel_init=kernel)(x)


UNIT = go.rescale({"up/kernel": "_ channel", "up/bias": "channel"}, {"down/kernel": "channel _"})
INPUTS = np.random.default_rng(0).normal(size=(8, 4))


@pytest.mark.parametrize("boxed", [False, True])
def test_linen_train_state_takes_the_steps_of_a_plain_dict(boxed: bool) -> None:
    model, tx = Unit(boxed), go.ddc_adamw(gauges=UNIT, **OPTIONS)
    params = model.init(jax.random.key(0), INPUTS)["params"]
    assert isinstance(params["up"]["kernel"], nn.Partitioned) == boxed

    def loss(params: Tree) -> jax.Array:
        return jnp.mean(jnp.square(jnp.asarray(model.apply({"params": params}, INPUTS)) - INPUTS))

    @jit
    def step(state: TrainState) -> TrainState:
        return state.apply_gradients(grads=jax.grad(loss)(state.params))

    state = TrainState.create(apply_fn=model.apply, params=params, tx=tx)
    for _ in range(2):
        state = step(state)
    assert isinstance(state.params["up"]["kernel"], nn.Partitioned) == boxed
    _close(nn.unbox(state.params), trained(tx, loss, nn.unbox(params), 2)[0])


# Orbax --------------------------------------------------------------------------------------------


def test_a_quotient_that_was_killed_goes_on_to_the_bit(tmp_path: Path) -> None:
    """All that the second run has of the first is what is on disk, and shapes."""
    gauges = [*EVERY_KIND, go.head_linear({"a": "_ basis"}, {"b": "basis _"})]
    params = _params() | {"a": jnp.ones((3, 4)) + jnp.eye(3, 4), "b": jnp.ones((4, 3)) - jnp.eye(4, 3)}

    def start() -> tuple[optax.GradientTransformationExtraArgs, Callable[..., tuple[Tree, Tree]]]:
        tx = go.quotient(optax.adamw(0.01, weight_decay=0.1), gauges, pin=False)

        def step(params: Tree, state: Tree) -> tuple[Tree, Tree]:
            updates, state = tx.update(jax.tree.map(jnp.sin, params), state, params)
            return optax.apply_updates(params, updates), state

        return tx, jit(step)

    tx, step = start()
    run = [(params, jit(tx.init)(params))]
    for _ in range(4):
        run.append(step(*run[-1]))

    tx, step = start()
    shapes = jax.eval_shape(lambda: params)
    with ocp.CheckpointManager(tmp_path / "checkpoints") as manager:
        manager.save(1, args=ocp.args.StandardSave(run[2]))
        manager.wait_until_finished()
        found = manager.restore(1, args=ocp.args.StandardRestore((shapes, jax.eval_shape(tx.init, shapes))))
    assert structure(found) == structure(run[2])
    for expected in run[2:]:
        chex.assert_trees_all_equal(found, expected)
        found = step(*found)
