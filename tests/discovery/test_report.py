"""What the report is for: training with its gauges, source that runs, a larger instance, a command line."""

import pickle
import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gauge_optax as go
from gauge_optax.discovery.__main__ import main
from gauge_optax.discovery.calls import Call
from gauge_optax.discovery.report import Report
from models import lm
from tests import quick
from tests.discovery.axes_nets import attention, flat, heads
from tests.discovery.nets import CONFIGS, unrolled
from tests.discovery.test_layouts import drawn, inputs
from tests.refusals import refused
from tests.twins import normal

TINY = CONFIGS["llama"]
INPUTS = np.random.default_rng(0).standard_normal((4, 6))


@pytest.fixture(scope="module")
def report() -> Report:
    net = unrolled(TINY)
    return go.discover(net.fn, net.params, net.batches, progress=False)


def test_the_report_is_lines_that_name_every_gauge(report: Report) -> None:
    lines = str(report).splitlines()
    assert lines[0] == "7 gauges" and "1 more in report.whole, which make a training step dearer" in lines
    assert str(report).count("moves the outputs by") >= 8
    for held in report.held:
        assert held.residual < 1e-9 and held.change < 1e-9 and held.exponents
    (rescale,) = [held for held in report.held if held.gauge.name == "rescale"]
    assert rescale.exponents["blocks/1/mlp/up/kernel"] == -rescale.exponents["blocks/1/mlp/down/kernel"] != 0


def test_gauges_of_a_small_instance_on_a_larger_one(report: Report) -> None:
    large = replace(TINY, d_model=24, layers=5, heads=8, kv_heads=4, d_head=6, d_ff=30)
    shapes = jax.eval_shape(lambda: unrolled(large).params)
    rebound = report.rebind(shapes, head=4)
    assert go.product(rebound.whole).dim(shapes) == go.product(lm.whole_gauges(large)).dim(shapes)
    assert go.product(rebound.gauges).dim(shapes) == go.product(lm.gauges(large, linear=True)).dim(shapes)
    for lengths, said in ((dict(head=3), "remedy"), (dict(heads=4), "no gauge states a length of heads")):
        with pytest.raises(ValueError, match=said):
            report.rebind(shapes, **lengths)


def grouped(d: int, heads: int, keys: int, basis: int) -> dict[str, np.ndarray]:
    """Flat kernels of attention: `heads` of queries, `keys` of keys and values."""
    return drawn({"query": (d, heads * basis), "out": (heads * basis, d)} | dict.fromkeys(
        ("key", "value"), (d, keys * basis)))


def attend(p: Any, x: jax.Array) -> jax.Array:
    """Two heads of keys, each read by two heads of queries."""
    query, key, value = (heads(x[None] @ p[name], count) for name, count in (("query", 4), ("key", 2), ("value", 2)))
    return jnp.sin(flat(attention(query, *(jnp.repeat(y, 2, 2) for y in (key, value)))) @ p["out"])


@pytest.fixture(scope="module")
def of_heads() -> Report:
    return go.discover(attend, grouped(8, 4, 2, 4), inputs(2, 5, 8), "loss", progress=False)


@pytest.mark.parametrize(("given", "remedy"), [
    ({"head": 4}, "basis=6, head=4"), ({"basis": 6}, "basis=6, head=4"), ({}, "basis=..., head=..."),
    ({"heads": 4, "head": 4}, "basis=6, head=4")], ids=str)
def test_lengths_that_a_larger_instance_needs_are_named(given: dict[str, int], remedy: str, of_heads: Report) -> None:
    with refused("", f"write rebind(params, {remedy})"):
        of_heads.rebind(grouped(24, 12, 4, 6), **given)


def test_one_gauge_is_a_list_and_only_a_report_of_discover_has_a_certificate(of_heads: Report) -> None:
    assert of_heads.code(of_heads.gauges[0]) == of_heads.code(of_heads.gauges[:1])
    with refused("no gauges"):
        of_heads.code("heads")  # type: ignore[arg-type]
    stored = pickle.loads(pickle.dumps(of_heads))
    assert stored == of_heads and repr(stored.axes) == repr(of_heads.axes)
    for other in (stored, of_heads.rebind(grouped(24, 12, 4, 6), basis=6, head=4)):
        with refused("certificate: ", "go.measure.census"):
            _ = other.certificate


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


@pytest.mark.slow_rows("a wide*")
@pytest.mark.parametrize(("fn", "shapes", "larger", "there"), [
    (lambda p, x: jnp.tanh(x @ p["a"]) * jnp.tanh(jnp.sum(p["w1"] * p["w2"], -1)),
     {"a": (4, 2), "w1": (2, 3), "w2": (2, 3)}, {"w1": (2, 5), "w2": (2, 5)}, ["head_rotation", "rescale"]),
    (lambda p, x: jnp.tanh(x @ p["w1"] @ p["w2"]), {"w1": (4, 6), "w2": (6, 3)}, {"w1": (8, 6)}, ["head_linear"]),
], ids=["two vectors per head", "a wide layer without activation"])
def test_of_matrices_that_few_rows_do_not_determine_optimizers_take_a_part(
    fn: Any, shapes: Any, larger: Any, there: list[str]
) -> None:
    report = go.discover(fn, params := drawn(shapes), inputs(2, 8, 4), "predictions", progress=False)
    assert ([g.name for g in report.gauges], [g.name for g in report.whole]) == (
        ["head_rotation", "rescale"], ["head_linear"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tx = go.quotient(optax.adamw(0.01), report.gauges)
        tx.init(params)
        go.plan(tx, params, report=report)
    assert [g.name for g in report.rebind(drawn(shapes | larger)).gauges] == there


NET = """
import jax, numpy as np
rng = np.random.default_rng(0)
params = {'up': rng.normal(size=(4, 3)), 'down': rng.normal(size=(3, 2))}
def build():
    return lambda p, x: jax.nn.relu(x @ p['up']) @ p['down'], params, list(rng.normal(size=(2, 5, 4)))
"""


@pytest.mark.slow
def test_the_command_line_prints_source_that_runs(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(NET)
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


@pytest.mark.parametrize(("body", "said"), [
    ("return 1, 2", "it returns 2 values, not (fn, params, batches)"), ("return 3", "it returns int, not"),
    ("raise ValueError('mine')", None), ("return (lambda p, x: undefined), {'a': np.ones(2)}, [1.0, 2.0]", None)])
def test_the_command_line_says_what_build_must_return(
    body: str, said: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An error of the user's own code keeps its traceback."""
    (tmp_path / "built.py").write_text(f"import numpy as np\ndef build():\n    {body}\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "built", raising=False)
    with pytest.raises(SystemExit if said else (ValueError, NameError)):
        main(["built:build"])
    assert (said or "") in capsys.readouterr().err


def mlp(p: Any, x: Any) -> Any:
    return jax.nn.relu(x @ p["up"]) @ p["down"]


def entropy(p: Any, x: Any) -> Any:
    labels = jnp.arange(len(x)) % 3
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(mlp(p, x)), labels[:, None], 1))


@pytest.mark.parametrize("outputs", [None, "logits"])
def test_logits_that_the_caller_has_not_named_are_said(outputs: Any) -> None:
    """Here each of the numbers of the batch looks up one of five rows. The indices of all rows are no tokens."""
    params, tokens = drawn({"table": (5, 4), "head": (4, 5)}), [np.arange(5), np.arange(5)[::-1]]
    report = go.discover(lambda p, t: jnp.tanh(p["table"][t]) @ p["head"], params, tokens, outputs, progress=False)
    assert report.outputs == "logits" and ("outputs taken for logits" in str(report)) == (outputs is None)
    links = go.discover(lambda p, x: x @ jnp.tanh(p["table"][jnp.arange(5)]) @ p["head"], params, inputs(2, 5, 5),
                        outputs, progress=False)
    assert links.outputs == outputs and "outputs taken for" not in str(links)


@pytest.mark.parametrize(("fn", "outputs", "shown", "last"), [
    (mlp, "logits", "logits", "_ token"), (mlp, "predictions", "predictions", "_ neuron"), (mlp, None, None, None),
    (lambda p, x: jax.nn.softmax(mlp(p, x)), None, "logprobs", "_ token"), (entropy, None, "loss", "_ token"),
    (lambda p, x: jnp.mean(jnp.square(mlp(p, x) - 1.0)), None, "loss", "_ neuron"),
], ids=["logits", "predictions", "arrays", "softmax", "cross-entropy", "squares"])
def test_what_no_softmax_follows_has_no_shift(fn: Any, outputs: Any, shown: str | None, last: str | None) -> None:
    """The function shows a softmax, a cross-entropy, one column; of plain arrays the report asks what they are."""
    report = go.discover(fn, drawn({"up": (4, 6), "down": (6, 3)}), inputs(2, 8, 4), outputs, progress=False)
    names = ["rescale", "logit_shift"] if last == "_ token" else ["rescale"]
    neurons = {"up": "_ neuron"} | ({"down": last} if last else {})
    assert (report.outputs, [g.name for g in report.gauges], report.neurons) == (shown, names, neurons)
    assert ("outputs='logits'" in str(report)) == (shown is None) == ("down" in report.undecided)


def _blocks(p: Any, x: Any) -> jax.Array:
    for w in p["blocks"]:
        x = x + jax.nn.relu(x @ w["a"]) @ w["b"]
    return jnp.tanh(x @ p["head"])


def _of_layers(count: int) -> Any:
    layers = [normal(k, {"a": (6, 8), "b": (8, 6)}) for k in range(count)]
    return {"blocks": layers, **normal(9, {"head": (6, 5)})}


def test_a_report_on_two_layers_reads_the_matrices_of_four_and_refuses_a_tree_without_them() -> None:
    """The layers that were not searched had no matrices: Optax's Muon stepped them by Adam."""
    report = go.discover(_blocks, _of_layers(2), [INPUTS, INPUTS + 1.0], "predictions", progress=False)
    numbers = report.muon_dimension_numbers(_of_layers(4))
    assert all(layer == numbers["blocks"][0] and None not in layer.values() for layer in numbers["blocks"])
    assert len(report.rebind(_of_layers(4)).gauges) == len(report.gauges)
    with refused("no kernel of the report in this tree", "blocks/{i}/a"):
        report.muon_dimension_numbers(_of_layers(2)["blocks"][0])


@pytest.mark.parametrize("scanned", [True, False])
def test_a_report_on_one_layer_does_not_speak_of_three(scanned: bool) -> None:
    """Its gauges bound the three: one scale moved the kernels of all layers, and the loss changed."""

    def fn(p: Any, x: Any) -> jax.Array:
        if not scanned:
            return _blocks(p, x)
        x = jax.lax.scan(lambda h, w: (h + jax.nn.relu(h @ w["a"]) @ w["b"], None), x, p["blocks"])[0]
        return jnp.tanh(x @ p["head"])

    one, three = (_of_layers(count) for count in (1, 3))
    if scanned:
        one, three = (p | {"blocks": jax.tree.map(lambda *x: jnp.stack(x), *p["blocks"])} for p in (one, three))
    report = go.discover(fn, one, [INPUTS, INPUTS + 1.0], "predictions", progress=False)
    with refused("the length 1" if scanned else "a layer that the report does not have", "at least two layers"):
        report.rebind(three)
