"""What the report is for: training with its gauges, source that runs, a larger instance, a command line."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import gauge_optax as go
from gauge_optax.discovery.calls import Call
from gauge_optax.discovery.report import Report
from models import lm
from tests import quick, twins
from tests.discovery.axes_nets import attention, flat, heads
from tests.discovery.nets import CONFIGS, Net, unrolled
from tests.discovery.test_layouts import drawn
from tests.refusals import refused

TINY = CONFIGS["llama"]


@pytest.fixture(scope="module")
def found() -> tuple[Net, Report]:
    net = unrolled(TINY)
    return net, go.discover(net.fn, net.params, net.batches, progress=False)


@pytest.mark.slow
def test_twins_under_discovered_gauges() -> None:
    """Of the demo's model: the same promise as with the hand list, and AdamW alone breaks it."""
    config, loss = twins.CONFIGS["llama"], twins.loss_of("llama")
    graph = nnx.split(nnx.eval_shape(lambda: lm.build(config, nnx.Rngs(0))))[0]
    batches = [twins.TOKENS[:3, :-1], twins.TOKENS[3:, :-1]]
    report = go.discover(
        lambda p, tokens: nnx.merge(graph, p)(tokens), twins.start_of("llama", "float32"), batches, progress=False)
    group = go.product(report.gauges)
    with jax.enable_x64(True):
        start = twins.start_of("llama", "float64")
        assert group.dim(start) == go.product(lm.gauges(config, linear=True)).dim(start)
        tx, alone = go.quotient(optax.adamw(3e-3), report.gauges), optax.adamw(3e-3)
        twins.check_twins("discovered", group, quick.jit(tx.init), twins.stepper(tx, loss), start, "float64")
        with pytest.raises(AssertionError):
            twins.check_twins("alone", group, alone.init, twins.stepper(alone, loss), start, "float64")


def test_the_report_is_lines_that_name_every_gauge(found: tuple[Net, Report]) -> None:
    _, report = found
    lines = str(report).splitlines()
    assert lines[0] == "7 gauges" and "1 more in report.whole, which make a training step dearer" in lines
    assert len([line for line in lines if "moves the outputs by" in line]) >= 8
    for held in report.held:
        assert held.residual < 1e-9 and held.change < 1e-9 and held.exponents
    (rescale,) = [held for held in report.held if held.gauge.name == "rescale"]
    assert rescale.exponents["blocks/1/mlp/up/kernel"] == -rescale.exponents["blocks/1/mlp/down/kernel"] != 0


def test_gauges_of_a_small_instance_on_a_larger_one(found: tuple[Net, Report]) -> None:
    _, report = found
    large = replace(TINY, d_model=24, layers=5, heads=8, kv_heads=4, d_head=6, d_ff=30)
    shapes = jax.eval_shape(lambda: unrolled(large).params)
    rebound = report.rebind(shapes, head=4)
    assert go.product(rebound.whole).dim(shapes) == go.product(lm.whole_gauges(large)).dim(shapes)
    assert go.product(rebound.gauges).dim(shapes) == go.product(lm.gauges(large, linear=True)).dim(shapes)
    with pytest.raises(ValueError, match="remedy"):
        report.rebind(shapes, head=3)
    with pytest.raises(ValueError, match="no gauge states a length of heads"):
        report.rebind(shapes, heads=4)


def grouped(d: int, heads: int, keys: int, basis: int) -> dict[str, np.ndarray]:
    """Flat kernels of attention: `heads` of queries, `keys` of keys and values."""
    rows = {"query": heads * basis, "key": keys * basis, "value": keys * basis}
    return drawn({name: (d, n) for name, n in rows.items()} | {"out": (heads * basis, d)})


def attend(p: Any, x: jax.Array) -> jax.Array:
    """Two heads of keys, each read by two heads of queries."""
    query, key, value = (heads(x[None] @ p[name], count) for name, count in (("query", 4), ("key", 2), ("value", 2)))
    return jnp.sin(flat(attention(query, *(jnp.repeat(y, 2, 2) for y in (key, value)))) @ p["out"])


@pytest.fixture(scope="module")
def of_heads() -> Report:
    batches = list(np.random.default_rng(1).normal(size=(2, 5, 8)))
    return go.discover(attend, grouped(8, 4, 2, 4), batches, "loss", progress=False)


@pytest.mark.parametrize(("given", "remedy"), [
    ({"head": 4}, "basis=6, head=4"), ({"basis": 6}, "basis=6, head=4"), ({}, "basis=..., head=..."),
    ({"heads": 4}, "basis=..., head=..."), ({"heads": 4, "head": 4}, "basis=6, head=4"),
], ids=str)
def test_lengths_that_a_larger_instance_needs_are_named(given: dict[str, int], remedy: str, of_heads: Report) -> None:
    with refused("", f"write rebind(params, {remedy})"):
        of_heads.rebind(grouped(24, 12, 4, 6), **given)


def test_a_larger_instance_of_flat_kernels(of_heads: Report) -> None:
    assert "sizes={'basis': 4, 'head': 2}" in of_heads.code()
    large = grouped(24, 12, 4, 6)
    assert go.product(of_heads.rebind(large, head=4, basis=6).whole).dim(large) == 2 * 4 * 6 * 6
    with pytest.raises(ValueError, match="no leaf matches 'key'"):
        of_heads.rebind({"query": large["query"]})
    with pytest.raises(ValueError, match="a range that belongs to another instance"):
        Call("rescale", {"up": {"gate_up": "_ channel=10:20"}, "down": {"down": "channel _"}}).rebound({}, {})


def run(argument: str, path: Path) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "gauge_optax.discovery", argument, "--outputs", "loss"]
    return subprocess.run(command, cwd=path, env=quick.environment(), capture_output=True, text=True, timeout=200)


@pytest.mark.slow
def test_the_command_line_prints_source_that_runs(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(
        "import jax, numpy as np\n"
        "rng = np.random.default_rng(0)\n"
        "params = {'up': rng.normal(size=(4, 3)), 'down': rng.normal(size=(3, 2))}\n"
        "def build():\n"
        "    return lambda p, x: jax.nn.relu(x @ p['up']) @ p['down'], params, list(rng.normal(size=(2, 5, 4)))\n"
    )
    done = run("net:build", tmp_path)
    assert done.returncode == 0, done.stderr
    report, source = done.stdout.split("\n\n", 1)
    assert report.startswith("1 gauge\n  rescale: up, down")
    names: dict[str, Any] = {"go": go}
    exec(source, names)
    assert names["gauges"] == names["whole"] == [go.rescale({"up": "_ channel"}, {"down": "channel _"})]
    assert names["neurons"] == {"up": "_ neuron", "down": "_ neuron"} and names["embeddings"] == {}
    for argument, complaint in (("net", "write module:function"), ("net:none", "no attribute 'none'")):
        failed = run(argument, tmp_path)
        assert failed.returncode == 2 and complaint in failed.stderr and "Traceback" not in failed.stderr


def mlp(p: Any, x: Any) -> Any:
    return jax.nn.relu(x @ p["up"]) @ p["down"]


def entropy(p: Any, x: Any) -> Any:
    labels = jnp.arange(len(x)) % 3
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(mlp(p, x)), labels[:, None], 1))


@pytest.mark.parametrize(("fn", "outputs", "shown", "last"), [
    (mlp, "logits", "logits", "_ token"), (mlp, "predictions", "predictions", "_ neuron"), (mlp, None, None, None),
    (lambda p, x: jax.nn.softmax(mlp(p, x)), None, "logprobs", "_ token"), (entropy, None, "loss", "_ token"),
    (lambda p, x: jnp.mean(jnp.square(mlp(p, x) - 1.0)), None, "loss", "_ neuron"),
], ids=["logits", "predictions", "arrays", "softmax", "cross-entropy", "squares"])
def test_what_no_softmax_follows_has_no_shift(fn: Any, outputs: Any, shown: str | None, last: str | None) -> None:
    """The function shows a softmax, a cross-entropy, one column; of plain arrays the report asks what they are."""
    params, batches = drawn({"up": (4, 6), "down": (6, 3)}), list(np.random.default_rng(2).normal(size=(2, 8, 4)))
    report = go.discover(fn, params, batches, outputs, progress=False)
    names = ["rescale", "logit_shift"] if last == "_ token" else ["rescale"]
    neurons = {"up": "_ neuron"} | ({"down": last} if last else {})
    assert (report.outputs, [g.name for g in report.gauges], report.neurons) == (shown, names, neurons)
    assert ("outputs='logits'" in str(report)) == (shown is None) == ("down" in report.undecided)
