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
from tests.discovery.nets import CONFIGS, Net, unrolled
from tests.discovery.test_layouts import REST

TINY = CONFIGS["llama"]


@pytest.fixture(scope="module")
def found() -> tuple[Net, Report]:
    net = unrolled(TINY)
    return net, go.discover(net.fn, net.params, net.batches, progress=False)


@pytest.mark.slow
def test_twins_under_discovered_gauges() -> None:
    """Of the demo's model: the same promise as with the hand list, and AdamW alone breaks it."""
    name = "llama"
    params, loss = twins.start_of(name, "float32"), twins.loss_of(name)
    fn = lambda p, tokens: lm_logits(name, p, tokens)  # noqa: E731
    report = go.discover(fn, params, [twins.TOKENS[:3, :-1], twins.TOKENS[3:, :-1]], progress=False)
    group = go.product(report.gauges)
    with jax.enable_x64(True):
        start = twins.start_of(name, "float64")
        config = twins.CONFIGS[name]
        assert group.dim(start) == go.product(lm.gauges(config, linear=True)).dim(start)
        tx = go.quotient(optax.adamw(3e-3), report.gauges)
        twins.check_twins("discovered", group, quick.jit(tx.init), twins.stepper(tx, loss), start, "float64")
        alone = optax.adamw(3e-3)
        with pytest.raises(AssertionError):
            twins.check_twins("alone", group, alone.init, twins.stepper(alone, loss), start, "float64")


def lm_logits(name: str, params: object, tokens: object) -> jax.Array:
    graph = nnx.split(nnx.eval_shape(lambda: lm.build(twins.CONFIGS[name], nnx.Rngs(0))))[0]
    return nnx.merge(graph, params)(tokens)


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
    rng = np.random.default_rng(0)
    columns = {"query": heads * basis, "key": keys * basis, "value": keys * basis}
    shapes = {name: (d, n) for name, n in columns.items()} | {"out": (heads * basis, d)}
    return {name: rng.normal(size=shape) / d**0.5 for name, shape in shapes.items()}


def attend(p: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    """Two heads of keys, each read by two heads of queries."""
    query = (x @ p["query"]).reshape(len(x), 2, 2, -1)
    key, value = ((x @ p[name]).reshape(len(x), 2, -1) for name in ("key", "value"))
    scores = jax.nn.softmax(jax.numpy.einsum("qhre,khe->hrqk", query, key))
    return jax.numpy.sin(jax.numpy.einsum("hrqk,khe->qhre", scores, value).reshape(len(x), -1) @ p["out"])


def test_lengths_that_a_larger_instance_needs_are_named() -> None:
    batches = list(np.random.default_rng(1).normal(size=(2, 5, 8)))
    report = go.discover(attend, grouped(8, 4, 2, 4), batches, "loss", progress=False)
    assert "sizes={'basis': 4, 'head': 2}" in report.code()
    large = grouped(24, 12, 4, 6)
    for given, remedy in (
        ({"head": 4}, "rebind(params, basis=6, head=4)"),
        ({"basis": 6}, "rebind(params, basis=6, head=4)"),
        ({}, "rebind(params, basis=..., head=...)"),
        ({"heads": 4}, "rebind(params, basis=..., head=...)"),
        ({"heads": 4, "head": 4}, "rebind(params, basis=6, head=4)"),
    ):
        with pytest.raises(ValueError, match=r"found: .*\n *expected: .*\n *remedy: ") as error:
            report.rebind(large, **given)
        assert f"write {remedy}" in str(error.value)
    with pytest.raises(ValueError, match="no leaf matches 'key'"):
        report.rebind({"query": grouped(8, 4, 2, 4)["query"]})
    right = report.rebind(large, head=4, basis=6)
    assert go.product(right.whole).dim(large) == 2 * 4 * 6 * 6


def test_a_range_is_the_small_instances_own() -> None:
    call = next(c for c in (report_call(g) for g in REST) if c is not None)
    with pytest.raises(ValueError, match="a range that belongs to another instance"):
        call.rebound({}, {})


def report_call(gauge: object) -> Call | None:
    specs = getattr(gauge, "specs", ())
    if not any(":" in spec.axes for spec in specs):
        return None
    roles: dict[str, dict[str, str]] = {}
    for spec in specs:
        roles.setdefault(spec.argument, {})[spec.pattern] = spec.axes
    return Call(getattr(gauge, "name", ""), roles, {}, dict(getattr(gauge, "sizes", ())))


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
        refused = run(argument, tmp_path)
        assert refused.returncode == 2 and complaint in refused.stderr and "Traceback" not in refused.stderr


def test_a_seed_gives_one_report(found: tuple[Net, Report]) -> None:
    def fn(p: dict[str, jax.Array], x: jax.Array) -> jax.Array:
        return jax.nn.relu(x @ p["up"]) @ p["down"]

    rng = np.random.default_rng(0)
    params = {"up": rng.normal(size=(4, 3)), "down": rng.normal(size=(3, 2))}
    batches = list(rng.normal(size=(2, 5, 4)))
    reports = [go.discover(fn, params, batches, "loss", seed=seed, progress=False) for seed in (0, 0, 1)]
    assert str(reports[0]) == str(reports[1]) and reports[0].gauges == reports[2].gauges


def test_what_no_softmax_follows_has_no_shift() -> None:
    """The function shows a softmax, a cross-entropy, one column; of plain arrays the report asks what they are."""
    params = {"up": np.random.default_rng(0).normal(size=(4, 6)), "down": np.random.default_rng(1).normal(size=(6, 3))}
    batches = list(np.random.default_rng(2).normal(size=(2, 8, 4)))

    def fn(p: Any, x: Any) -> Any:
        return jax.nn.relu(x @ p["up"]) @ p["down"]

    def entropy(p: Any, x: Any) -> Any:
        labels = jnp.arange(len(x)) % 3
        return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(fn(p, x)), labels[:, None], 1))

    both, one, axes = ["rescale", "logit_shift"], ["rescale"], {"up": "_ neuron"}
    token, neuron = axes | {"down": "_ token"}, axes | {"down": "_ neuron"}
    for function, outputs, shown, names, neurons in (
        (fn, "logits", "logits", both, token),
        (fn, "predictions", "predictions", one, neuron),
        (fn, None, None, one, axes),
        (lambda p, x: jax.nn.softmax(fn(p, x)), None, "logprobs", both, token), (entropy, None, "loss", both, token),
        (lambda p, x: jnp.mean(jnp.square(fn(p, x) - 1.0)), None, "loss", one, neuron),
    ):
        report = go.discover(function, params, batches, outputs, progress=False)  # type: ignore[arg-type]
        assert (report.outputs, [g.name for g in report.gauges], report.neurons) == (shown, names, neurons)
        assert ("outputs='logits'" in str(report)) == (shown is None) == ("down" in report.undecided)
    with pytest.raises(ValueError, match="outputs='predictions' for a regression"):
        go.discover(lambda p, x: fn(p, x)[..., :1], params, batches, "logits", progress=False)
