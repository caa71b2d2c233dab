"""On a mesh whose axes are explicit everything of ours takes the steps that it takes without, and lays them out alike.

One device is enough: the types are those of many. What many do with them is `test_sharding`'s.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import gauge_optax as go
from models import lm
from tests.quick import jit

Tree = Any
LLAMA = lm.llama_config(vocab=8, d_model=8, layers=1, heads=2, kv_heads=1, d_head=4, d_ff=12)
GAUGES = lm.gauges(LLAMA)
NEURONS = {"blocks/{i}/mlp/up/kernel": "_ channel", "blocks/{i}/attn/query/kernel": "_ head channel"}
ONE_PER_LEAF = [gauge for gauge in GAUGES if gauge.name != "norm_scale"]
ADAM = optax.adam(1e-2)

ROWS: dict[str, Callable[[], optax.GradientTransformation]] = {
    "gauge_project": lambda: go.gauge_project(GAUGES),
    "gauge_retract": lambda: optax.chain(ADAM, go.gauge_retract(GAUGES)),
    "add_gauge_decay": lambda: optax.chain(ADAM, go.add_gauge_decay(0.1, GAUGES)),
    "gauge_fix": lambda: go.orbit.gauge_fix(ADAM, GAUGES, every=2),
    "scale_by_opposite_gram": lambda: go.links.scale_by_opposite_gram(ONE_PER_LEAF, every=2, damping=1e-3),
    "scale_by_scaled_polar": lambda: go.links.scale_by_scaled_polar(GAUGES),
    "ddc_adamw": lambda: go.ddc_adamw(1e-2, GAUGES),
    "rotational_adamw": lambda: go.norms.rotational_adamw(1e-2, NEURONS),
    "hyperball": lambda: optax.chain(ADAM, go.norms.hyperball(NEURONS)),
    "track": lambda: go.measure.track(ADAM, GAUGES, every=2),
    "track_balance": lambda: optax.chain(ADAM, go.measure.track_balance(GAUGES, every=2)),
    "track_rotation": lambda: go.measure.track_rotation(NEURONS, ADAM, every=2),
}


def _steps(tx: optax.GradientTransformation, params: Tree, gradient: Tree) -> tuple[Tree, Tree]:
    state, update = jit(tx.init)(params), jit(tx.update)
    for _ in range(2):
        updates, state = update(gradient, state, params)
        params = optax.apply_updates(params, updates)
    return params, state


@pytest.mark.slow_rows("gauge_[!f]*", "track", "scale_by_scaled_polar", "ddc_adamw", "add_gauge_decay")
@pytest.mark.parametrize("name", ROWS)
def test_explicit_axes_change_nothing(name: str) -> None:
    """The last axis of every leaf is dealt out."""
    params, _ = lm.params_and_loss(LLAMA, jax.random.key(0))
    gradient = jax.tree.map(jnp.sin, params)
    expected = _steps(ROWS[name](), params, gradient)
    mesh = jax.make_mesh((1,), ("tp",), axis_types=(AxisType.Explicit,))
    last = jax.tree.map(lambda x: NamedSharding(mesh, PartitionSpec(*[None] * (x.ndim - 1), "tp")), params)
    with jax.set_mesh(mesh):
        found = _steps(ROWS[name](), jax.device_put(params, last), jax.device_put(gradient, last))
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(x, y, rtol=2e-5, atol=2e-6)
    for x, sharding in zip(jax.tree.leaves(found[0]), jax.tree.leaves(last), strict=True):
        assert x.sharding.spec == sharding.spec
