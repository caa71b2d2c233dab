"""The studies of GaugeFix-LRM: a killed run goes on to the same numbers; what the committed tables say."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import gauge_optax as go
from examples.studies import gaugefix_lrm, gaugefix_networks
from models import gpt2, multipliers

RESULT = Path(__file__).parent.parent / "examples" / "results" / "gaugefix_lrm.json"
TINY = {"vocab": 64, "d_model": 8, "layers": 1, "heads": 2, "kv_heads": 2, "d_head": 4, "d_ff": 8, "max_len": 8}
FULL = gpt2.config


def test_the_committed_table_says_what_is_written_below_it() -> None:
    cells = json.loads(RESULT.read_text())["cells"]
    assert all(np.isfinite(cell["loss"]).all() and len(cell["loss"]) == 3 for cell in cells.values())
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

every_network = pytest.mark.parametrize("network", gaugefix_networks.NETWORKS)


def _parts(network: str) -> tuple[Any, Any, Any]:
    """A tiny one in general position: configuration, parameters, loss."""
    switches = gaugefix_networks.NETWORKS[network]
    config = FULL(**(TINY | {"vocab": 11} | switches | ({"kv_heads": 1} if "kv_heads" in switches else {})))
    graph, state = nnx.split(gpt2.build(config, nnx.Rngs(0)))
    leaves, treedef = jax.tree.flatten(nnx.to_pure_dict(state))
    rng = np.random.default_rng(0)
    params = treedef.unflatten([jnp.asarray(0.5 * rng.normal(size=x.shape) + (x.ndim == 1)) for x in leaves])
    tokens = jnp.asarray(rng.integers(11, size=(2, 8)))

    def loss(p: Any) -> jax.Array:
        logits = nnx.merge(graph, p)(tokens[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    return config, params, loss


@pytest.mark.slow_rows("[!a]*")
@every_network
def test_the_gauges_of_every_network_hold(network: str, x64: None) -> None:
    config, params, loss = _parts(network)
    # The head gauge stands alone: where multipliers are traded channel by channel, it is a part of that, and no list
    # may have one dimension twice.
    for gauges in ([*gpt2.kernel_gauges(config), *multipliers.traded_gauges(config)], [multipliers.head_gauge(config)]):
        go.testing.assert_invariant(loss, params, gauges, jax.random.key(0))


def test_the_committed_networks_drift_where_their_section_says() -> None:
    cells = json.loads((RESULT.parent / "gaugefix_networks.json").read_text())["cells"]
    assert list(cells) == [gaugefix_networks.cell_name(*run) for run in gaugefix_networks.NETWORK_RUNS]
    assert all(np.isfinite(cell["loss"]).all() and len(cell["loss"]) == 3 for cell in cells.values())
    for network, arm, rate, steps in gaugefix_networks.NETWORK_RUNS:
        cell = cells[gaugefix_networks.cell_name(network, arm, rate, steps)]
        assert max(cell["sums"]) < 1e-5
        if arm == "C":
            assert max(cell["ratio"]) < 1e-6 if network == "plain" else min(cell["ratio"]) > 1e-3
            assert max(cell["entries"]) < 1e-5 if network == "plain" else min(cell["entries"]) > 1e-3
        if arm in ("B, every 1", "B, every 1, stale"):
            assert max(cell["ratio"]) < 1e-6
        if arm == "quotient":
            assert max(cell["anchor"]) < 1e-5 and min(cell["ratio"]) > 1e-3
        if arm == "quotient, balanced":
            assert max(cell["sides"]) < 1e-5 and min(cell["anchor"]) > 1e-3


def test_the_docstring_has_the_measured_gaps_of_entries() -> None:
    cells = json.loads((RESULT.parent / "gaugefix_networks.json").read_text())["cells"]
    said = {"plain": 3e-7, "biases": 0.05, "rotary": 0.65, "grouped": 0.55}
    for network, gap in said.items():
        name = gaugefix_networks.cell_name(network, "C", gaugefix_networks.RATE, gaugefix_networks.SHORT)
        assert max(cells[name]["entries"]) == pytest.approx(gap, rel=0.1), network
    assert all(f"{x}" in (gaugefix_networks.__doc__ or "") for x in ("3e-7", "5, 65 and 55 %"))
