"""The studies of GaugeFix-LRM: the gauges of their networks; what the committed tables say."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import gauge_optax as go
from examples.studies import gaugefix_lrm
from models import gpt2, lm, multipliers


def committed(name: str) -> Any:
    """Cells, each of three seeds whose losses are finite."""
    results = Path(__file__).parent.parent / "examples" / "results"
    cells = json.loads((results / f"{name}.json").read_text())["cells"]
    assert all(np.isfinite(cell["loss"]).all() and len(cell["loss"]) == 3 for cell in cells.values())
    return cells


def test_the_committed_table_says_what_is_written_below_it() -> None:
    cells = committed("gaugefix_lrm")
    for every in (1, 10, 100):
        assert max(cells[f"B, every {every}, float32"]["end"]) <= 3.5e-7
        assert max(cells[f"B, every {every}, float32"]["drift"]) <= 3.6e-7, "of 2,000 steps, 8 heads and 3 seeds"
        assert max(cells[f"B, every {every}, bfloat16"]["end"]) <= 3.5e-7, "right after a fix"
    for arm in ("A", "C"):
        assert max(cells[f"{arm}, float32"]["drift"]) <= 3.5e-7 and min(cells[f"{arm}, bfloat16"]["drift"]) > 1e-4
    for dtype in gaugefix_lrm.PRECISIONS:
        assert max(cells[f"cap, {dtype}"]["product"]) < 1.05 < min(cells[f"C, {dtype}"]["product"])
        np.testing.assert_allclose(cells[f"fix, {dtype}"]["product"], 1.0, rtol=1e-5)


# Networks that drift --------------------------------------------------------------------------------------


NETWORKS: dict[str, dict[str, Any]] = {
    "plain": {},
    "biases": {"bias": True},
    "rotary": {"rope": True},
    "grouped": {"kv_heads": 2},
    "all three": {"bias": True, "rope": True, "kv_heads": 2},
}
"""Name → switches of the configuration, as in the stored runs."""


@pytest.mark.slow_rows("[!a]*")
@pytest.mark.parametrize("network", NETWORKS)
def test_the_gauges_of_every_network_hold(network: str, x64: None) -> None:
    sizes = {"vocab": 11, "d_model": 8, "layers": 1, "heads": 2, "kv_heads": 2, "d_head": 4, "d_ff": 8, "max_len": 8}
    switches = NETWORKS[network]
    config = gpt2.config(**sizes | switches | ({"kv_heads": 1} if "kv_heads" in switches else {}))
    graph, state = nnx.split(nnx.eval_shape(lambda: gpt2.build(config, nnx.Rngs(0))))
    rng = np.random.default_rng(0)
    tokens = jnp.asarray(rng.integers(11, size=(2, 8)))
    params = jax.tree.map(
        lambda x: jnp.asarray(0.5 * rng.normal(size=x.shape) + (len(x.shape) == 1)), nnx.to_pure_dict(state)
    )
    # The head gauge stands alone: where multipliers are traded channel by channel, it is a part of that, and no list
    # may have one dimension twice.
    for gauges in ([*gpt2.kernel_gauges(config), *multipliers.traded_gauges(config)], [multipliers.head_gauge(config)]):
        go.testing.assert_invariant(
            lambda p: lm.loss_fn(nnx.merge(graph, p), tokens), params, gauges, jax.random.key(0)
        )


def test_sums_of_gradients_agree_where_their_entries_do_not() -> None:
    cells = committed("gaugefix_networks")
    assert max(max(cell["sums"]) for cell in cells.values()) < 1e-5
    for network, gap in {"plain": 3e-7, "biases": 0.05, "rotary": 0.65, "grouped": 0.55}.items():
        assert max(cells[f"{network}, C, rate 0.003, 300 steps"]["entries"]) == pytest.approx(gap, rel=0.1), network
