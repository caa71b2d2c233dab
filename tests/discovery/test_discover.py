"""What `go.discover` finds in nets whose gauges are known: all of them by span, and nothing that fails anew."""

from typing import Any

import jax
import numpy as np
import pytest

import gauge_optax as go
from gauge_optax.discovery.report import Report
from tests.discovery.nets import CONFIGS, FORMS, Net
from tests.oracles import orbit, outside

QUICK = {("llama", "unrolled", True), ("gpt", "scanned", False)}
ROWS = [
    pytest.param(name, form, linear, marks=[] if (name, form, linear) in QUICK else [pytest.mark.slow])
    for name in CONFIGS
    for form in FORMS
    for linear in (False, True)
    if form == "unrolled" or name in ("gpt", "llama", "qwen", "gemma3")
]


def found(net: Net, **options: Any) -> Report:
    return go.discover(net.fn, net.params, net.batches, progress=False, **options)


def near(params: Any, seed: int) -> Any:
    """A float64 point that discovery has not seen."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda x: np.asarray(x, np.float64) + 0.3 * rng.standard_normal(np.shape(x)), params)


@pytest.mark.parametrize(("name", "form", "linear"), ROWS)
def test_every_gauge_of_the_hand_list_by_span(name: str, form: str, linear: bool) -> None:
    net = FORMS[form](CONFIGS[name])
    report = found(net, linear=linear)
    with jax.enable_x64(True):
        point = near(net.params, 5)
        whole = orbit(report.gauges, point)
        for gauge in net.gauges(linear):
            assert outside(orbit([gauge], point), whole) < 1e-6, gauge
        assert outside(whole, orbit(net.gauges(linear), point)) < 1e-6
        tokens = np.random.default_rng(9).integers(0, CONFIGS[name].vocab, (3, 6))
        fn = jax.jit(lambda p: jax.nn.log_softmax(net.fn(p, tokens)))
        product = go.product(report.gauges)
        moved = jax.jit(lambda p: product.act(product.sample(jax.random.key(3), p), p))(point)
        before = np.asarray(fn(point))
        assert np.linalg.norm(np.asarray(fn(moved)) - before) <= 1e-9 * np.linalg.norm(before)
    assert eval(report.code(), {"go": go}) == report.gauges
    assert not report.ungauged and not report.rejected


def test_flat_directions_are_named_where_they_are_not_asked_for() -> None:
    net = FORMS["scanned"](CONFIGS["gpt"])
    report = found(net, whole=False)
    assert {gauge.name for gauge in report.gauges} == {"norm_scale", "head_rotation", "rescale", "logit_shift"}
    assert dict(report.ungauged) == UNGAUGED


# What holds in a LayerNorm net beside its gauges; all proved by finite moves.
STREAM = ("attn/out/bias", "attn/out/kernel", "mlp/down/bias", "mlp/down/kernel")
READ = [("attn/key",), ("attn/query", "bias"), ("attn/value", "bias"), ("mlp/up", "bias")]
UNGAUGED = {
    "a bias that flows into the biases behind it": (
        "blocks/attn/value/bias + blocks/attn/out/bias",
        "blocks/norm1/bias + blocks/attn/query/bias + blocks/attn/value/bias",
        "blocks/norm2/bias + blocks/mlp/up/bias",
        "final_norm/bias + lm_head/bias",
    ),
    "a direction that a centred norm hides from the kernel behind it": (
        *(" + ".join(f"blocks/{own[0]}/{leaf}" for leaf in ("kernel", *own[1:])) for own in READ),
        "lm_head/kernel + lm_head/bias",
    ),
    "a bias without effect": ("blocks/attn/key/bias",),
    "one vector on every row of several leaves": ("embed/embedding + pos/embedding",),
    "a constant along an axis that only centred norms read": (
        *(f"blocks/{path}" for path in STREAM),
        "embed/embedding",
        "pos/embedding",
    ),
}
