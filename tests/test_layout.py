"""On a mesh whose axes are explicit everything of ours takes the steps that it takes without, and lays them out alike.

One device is enough: the types are those of many. What many do with them is `test_sharding`'s.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import gauge_optax as go
from models import lm
from tests.cases import TRANSFORM_CASES, VARIANTS, _lm_params
from tests.test_conformance import ON_VECTORS
from tests.twins import driven, normal

LLAMA = lm.llama_config(vocab=8, d_model=8, layers=1, heads=2, kv_heads=1, d_head=4, d_ff=12)
GAUGES: list[Any] = lm.gauges(LLAMA)
# Vectors are bound without `sizes`, which heads in groups need.
UNGROUPED = [gauge for gauge in GAUGES if not any("(" in spec.axes for spec in gauge.specs)]
ALL = [case for case in TRANSFORM_CASES if case.name not in VARIANTS and not case.linear]
KINDS = {case.name.split("/")[0]: case for case in reversed(ALL)}


def _same(found: Any, expected: Any) -> None:
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(x, y, rtol=2e-5, atol=2e-6)


@pytest.mark.slow_rows("[!rhgst]*", "gauge_[!f]*", "track", "scale_by_[!o]*", "rotational*", "hold*", "track_r*")
@pytest.mark.parametrize("name", KINDS)
def test_explicit_axes_change_nothing(name: str) -> None:
    """The last axis of every leaf is dealt out."""
    params = _lm_params(LLAMA, jax.random.key(0))
    gradient = jax.tree.map(jnp.sin, params)
    tx = KINDS[name].make(UNGROUPED if name.startswith(ON_VECTORS) else GAUGES)
    expected = driven(tx, params, [gradient, gradient])
    mesh = jax.make_mesh((1,), ("tp",), axis_types=(AxisType.Explicit,))
    last = jax.tree.map(lambda x: NamedSharding(mesh, PartitionSpec(*[None] * (x.ndim - 1), "tp")), params)
    with jax.set_mesh(mesh):
        found = driven(tx, jax.device_put(params, last), 2 * [jax.device_put(gradient, last)])
    _same(found, expected)
    for x, sharding in zip(jax.tree.leaves(found[0]), jax.tree.leaves(last), strict=True):
        assert x.sharding.spec == sharding.spec


@pytest.mark.slow_rows("drift", "pack")
@pytest.mark.parametrize("tool", [go.orbit.canonicalize, go.orbit.pack, go.measure.drift])
def test_tools_too(tool: Any) -> None:
    """What they do on eight devices is a part of `tests.sharded`."""
    gauge = go.head_linear({"v": "_ head basis"}, {"o": "head basis _"})
    params = normal(0, {"v": (5, 2, 3), "o": (2, 3, 5)}, jnp.float32)
    mesh, times = jax.make_mesh((1,), ("tp",), axis_types=(AxisType.Explicit,)), 2 if tool is go.measure.drift else 1
    with jax.set_mesh(mesh):
        specs = {"v": PartitionSpec(None, "tp"), "o": PartitionSpec("tp")}
        dealt = {path: jax.device_put(x, NamedSharding(mesh, specs[path])) for path, x in params.items()}
        found = tool(*[dealt] * times, gauge)
    _same(found, tool(*[params] * times, gauge))


def test_discover_takes_batches_that_are_dealt_out() -> None:
    """The types of a search's own arrays do not name a layout, and JAX refused a ReLU of both."""
    params = normal(0, {"up": (4, 6), "down": (6, 3)}, jnp.float32)
    mesh, rows = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Explicit,)), normal(1, {"x": (2, 8, 4)})["x"]
    with jax.set_mesh(mesh):
        batches = [jax.device_put(x, NamedSharding(mesh, PartitionSpec("data"))) for x in rows]
        report = go.discover(
            lambda p, x: jax.nn.relu(x @ p["up"]) @ p["down"], params, batches, "predictions", progress=False)
    assert report.gauges == [go.rescale({"up": "_ channel"}, {"down": "channel _"})]
