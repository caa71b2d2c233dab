"""`go.plan`: what the table says of each leaf, and the mistakes that it names."""

import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gauge_optax as go
from models import lm
from tests.discovery.nets import CONFIGS, near, scanned, unrolled
from tests.refusals import each_refused

LLAMA = CONFIGS["llama"]


def llama() -> object:
    return jax.tree.map(lambda x: np.asarray(x, np.float32), near(unrolled(LLAMA).params, 1))


def test_an_optimizer_leaf_by_leaf() -> None:
    params, gauges = llama(), lm.gauges(LLAMA)
    found = go.plan(optax.chain(optax.clip(1.0), go.quotient(optax.adamw(0.5, weight_decay=0.25), gauges)), params)
    own = {row.leaf: row for row in found.leaves}
    query = own["blocks/1/attn/query/kernel"]
    assert query.gauges == ("norm_scale [i=1] (channel 8)", "rope_torus [i=1] (head 2)")
    assert (query.shape, query.matrices, query.rule) == ((8, 4, 4), "4 × (8, 4)", "Adam")
    assert query.state_bytes == 2 * 4 * 8 * 4 * 4
    assert own["embed/embedding"].decay == pytest.approx(0.125, rel=1e-6) and own["final_norm/scale"].decay == 0.0
    assert found.unbound == ("embed/embedding",) and not found.warnings
    assert [(g.gauge, g.instances, g.axes, g.dim) for g in found.gauges][3] == ("rope_torus", 2, "head 2", 8)
    assert sum(g.dim for g in found.gauges) == go.product(gauges).dim(params)


def test_an_optimizer_says_how_it_reads_a_leaf() -> None:
    """max_norm_muon reads whole kernels where gauges name heads; fused ranges, tokens and what nothing lists."""
    params = {"q": jnp.ones((8, 8)), "fused": jnp.ones((8, 12)), "table": jnp.ones((5, 8)), "free": jnp.ones((3, 4))}
    gauge = go.head_rotation({"q": "_ (head basis)", "fused": "_ (head basis)=0:8"}, sizes={"head": 2})
    neurons: dict[str, Any] = {"q": "_ unit", "fused": ("_ unit=0:8", "_ unit=8:12")}
    tx = optax.chain(optax.clip(1.0), go.max_norm_muon(0.1, gauge, neurons, {"table": "token _"}))
    with pytest.warns(UserWarning, match=r"no mapping lists 1 matrix\n.*'free'") as told:
        found = {row.leaf: (row.matrices, row.rule) for row in go.plan(tx, params).leaves}
    assert len(told) == 1
    assert found == {"q": ("1 × (8, 8)", "polar"), "fused": ("1 × (8, 8) + 1 × (8, 4)", "polar"),
                     "table": ("", "momentum"), "free": ("", "Adam")}
    labels = {"fused": "adam"}
    for tx in (go.quotient_muon(0.1, gauge, labels=labels, rest="balanced"), go.ddc_muon(0.1, gauge, labels=labels),
               optax.chain(optax.clip(1.0), go.quotient_muon(0.1, gauge, labels=labels))):
        found = {row.leaf: (row.matrices, row.rule) for row in go.plan(tx, params).leaves}
        assert found["q"] == ("2 × (8, 4)", "per-head polar") and found["fused"] == found["table"] == ("", "Adam")


def test_what_no_optimizer_says_comes_from_the_state() -> None:
    """Optax's Muon reads whole kernels, and a partition may leave a leaf to another optimizer."""
    params = {"q": jnp.ones((8, 8)), "k": jnp.ones((8, 8)), "other": jnp.ones((3, 4))}
    gauge = go.head_rotation({"q": "_ (head basis)", "k": "_ (head basis)"}, sizes={"head": 2})
    plan = go.plan(go.quotient(optax.contrib.muon(0.1), gauge), params)
    assert {(row.rule, row.matrices) for row in plan.leaves} == {("polar", "")}
    tx = optax.partition({"muon": go.quotient_muon(0.1, gauge), "sgd": optax.sgd(0.1)},
                         {"q": "muon", "k": "muon", "other": "sgd"})
    rules = {row.leaf: row.rule for row in go.plan(tx, params).leaves}
    assert rules == {"q": "per-head polar", "k": "per-head polar", "other": "gradient"}


def tracked(learning_rate: float, gauges: Any) -> Any:
    return go.measure.track(go.quotient_adamw(learning_rate, gauges), gauges)


@pytest.mark.parametrize("make", [go.ddc_adamw, optax.inject_hyperparams(go.quotient_adamw), tracked])
def test_gauges_are_found_in_aliases_and_behind_injected_hyperparameters(make: Any) -> None:
    gauges, shapes = lm.gauges(LLAMA), jax.eval_shape(lambda: unrolled(LLAMA).params)
    found = go.plan(make(learning_rate=0.1, gauges=gauges), shapes)
    assert [row.gauge for row in found.gauges] == [gauge.name for gauge in gauges]
    assert all(row.decay is None and row.rule == "Adam" for row in found.leaves)


def test_text_markdown_and_json_say_the_same() -> None:
    found = go.plan(lm.gauges(LLAMA), llama())
    table, data = found.markdown(), json.loads(found.json())
    for row in found.leaves:
        assert f"| {row.leaf} | {row.shape} |" in table and row.leaf in str(found)
    assert data["leaves"][0]["leaf"] == found.leaves[0].leaf and data["unbound"] == ["embed/embedding"]
    assert data["gauges"][0]["instances"] == 2


def test_two_stars_in_place_of_a_capture_or_of_layers_are_named() -> None:
    """One element for all layers, where a free axis stands in place of theirs, too."""
    joint = go.norm_scale({"**/norm2/scale": "channel"}, {"**/gate/kernel": "channel _", "**/up/kernel": "channel _"})
    with pytest.warns(UserWarning, match="one element moves 2 equal leaves, blocks/0/norm2/scale to blocks/1/norm2"):
        found = go.plan([joint], llama())
    assert found.gauges[0].instances == 1 and "joint: norm_scale" in str(found)
    net = scanned(LLAMA)
    assert not go.plan(net.gauges(False), net.params).warnings
    joint = go.rescale({"blocks/mlp/up/kernel": "_ _ channel"}, {"blocks/mlp/down/kernel": "_ channel _"})
    with pytest.warns(UserWarning, match="one element moves all 2 layers of blocks/mlp/up/kernel: name the axis"):
        assert go.plan([joint], net.params).gauges[0].dim == LLAMA.d_ff


def test_an_update_whose_decay_cannot_be_measured_has_a_plan() -> None:
    """It needs the loss: a plan has no batch."""
    params, unit = {"up": jnp.ones((2, 3)), "down": jnp.ones((3, 2))}, go.rescale({"up": "_ c"}, {"down": "c _"})
    by_name = optax.GradientTransformationExtraArgs(
        lambda p: optax.EmptyState(), lambda u, s, p=None, **extra: (u, extra["value"] and s))
    for tx in (go.quotient(optax.lbfgs(), unit), optax.chain(go.quotient(optax.adam(0.1), unit), by_name)):
        assert [row.decay for row in go.plan(tx, params).leaves] == [None, None]
    adamw = go.quotient_adamw(0.1, unit, weight_decay=0.5)
    assert go.plan(optax.MultiSteps(adamw, 4), params).leaves == go.plan(adamw, params).leaves


test_what_has_no_gauges_is_refused = each_refused([
    (lambda: go.plan(optax.adam(0.1), {"w": jnp.ones(3)}), "no gauges"),
    (lambda: go.plan([], {"w": jnp.ones(3)}), "no gauges"),
    (lambda: go.plan(go.key_bias({"w": "_"}), {"w": jnp.ones(3)}, report="all"), "plan: no report"),
])
