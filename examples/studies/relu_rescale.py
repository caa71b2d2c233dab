"""ReLU teacher and student (DDC, C.2): AdamW moves scale from one layer to the other, DDC does not.

    python -m examples.studies relu_rescale

relu(x W1) W2 stays the same when a column of W1 is multiplied and the matching row of W2 divided by the same number.
The paper has one such number for the pair of layers (`block`); the library's usual gauge has one per hidden unit
(`channel`). Prints the final losses, and how far two coordinates of these scales have moved, for the layers and for
every unit. One is the gauge's, log‖W1‖. The other is the paper's, log‖W1‖ − log‖W2‖. It also changes if W2
alone grows. This changes the product of both norms and the outputs, so that it is no drift.
"""

import functools
import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import optax

import gauge_optax as go
from examples.studies import harness, report
from examples.studies.harness import Arm, Result, Training, rms
from examples.studies.report import Panel

Params = dict[str, jax.Array]
Data = tuple[jax.Array, jax.Array]


@dataclass(frozen=True)
class Config:
    """Sizes. The paper gives the numbers of samples and steps only. The others, and the rates, are our choice."""

    steps: int = 4000
    samples: int = 128
    inputs: int = 16
    hidden: int = 32
    outputs: int = 8
    start: float = 0.5  # standard deviation of the student's weights, relative to the teacher's
    learning_rate: float = 1e-2
    weight_decay: float = 1e-3


FULL = Config(inputs=32, hidden=64, outputs=16)


def network(params: Params, x: jax.Array) -> jax.Array:
    """The network: relu(x W1) W2."""
    return jax.nn.relu(x @ params["w1"]) @ params["w2"]


def loss(params: Params, data: Data) -> jax.Array:
    """The mean squared error."""
    x, y = data
    return jnp.mean(jnp.square(network(params, x) - y))


def weights(c: Config, key: jax.Array, size: float) -> Params:
    """Draws normal weights of variance size²/fan-in."""
    first, second = jax.random.split(key)
    return {
        "w1": size * jax.random.normal(first, (c.inputs, c.hidden)) * c.inputs**-0.5,
        "w2": size * jax.random.normal(second, (c.hidden, c.outputs)) * c.hidden**-0.5,
    }


def make(c: Config, seed: int) -> tuple[Params, Data]:
    """Draws the initial weights of the student, inputs, and the teacher's outputs for them."""
    student, teacher, inputs = jax.random.split(jax.random.key(seed), 3)
    x = jax.random.normal(inputs, (c.samples, c.inputs))
    return weights(c, student, c.start), (x, network(weights(c, teacher, 1.0), x))


PAPERS = "log‖W1‖ − log‖W2‖"
BALANCED, PRINTED, PRINTED_UNITS = "DDC channel, balanced rest", "DDC block, as printed", "DDC channel, as printed"
GAUGES = {
    "block": go.rescale(up={"w1": "_ _"}, down={"w2": "_ _"}),
    "channel": go.rescale(up={"w1": "_ channel"}, down={"w2": "channel _"}),
}


def log_ratio(params: Params) -> jax.Array:
    """The paper's coordinate, log‖W1‖ − log‖W2‖, for every hidden unit."""
    return jnp.log(jnp.linalg.norm(params["w1"], axis=0) / jnp.linalg.norm(params["w2"], axis=1))


def observe(start: Params, params: Params, data: Data) -> dict[str, jax.Array]:
    """What is measured along a run: the loss, and how far the gauges' coordinates and the ratios have moved."""
    drifts = {f"{name}_drift": rms(go.measure.drift(start, params, gauge)[0][""]) for name, gauge in GAUGES.items()}
    layers = (jnp.log(jnp.linalg.norm(p["w1"]) / jnp.linalg.norm(p["w2"])) for p in (params, start))
    return drifts | {
        "loss": loss(params, data),
        "ratio": rms(log_ratio(params) - log_ratio(start)),
        "layer_ratio": jnp.abs(next(layers) - next(layers)),
    }


def build(c: Config) -> Training:
    """The arms: AdamW; DDC with either gauge; DDC with rest="balanced"; the paper's printed DDC with either gauge."""
    rate, decay = c.learning_rate, c.weight_decay
    arms = {
        "AdamW": Arm(optax.adamw(rate, weight_decay=decay)),
        "DDC block": Arm(go.ddc_adamw(rate, GAUGES["block"], weight_decay=decay)),
        "DDC channel": Arm(go.ddc_adamw(rate, GAUGES["channel"], weight_decay=decay)),
        BALANCED: Arm(go.ddc_adamw(rate, GAUGES["channel"], weight_decay=decay, rest="balanced")),
        PRINTED: Arm(go.ddc_adamw(rate, GAUGES["block"], weight_decay=decay, preset="paper")),
        PRINTED_UNITS: Arm(go.ddc_adamw(rate, GAUGES["channel"], weight_decay=decay, preset="paper")),
    }
    return Training(arms, functools.partial(make, c), loss, observe)


figure = report.figure("ReLU teacher and student: scale traded between two layers",
                       Panel("loss", "Training loss", ylabel="mean squared error"),
                       Panel("block_drift", "Drift of what the layers' gauge reads", drift=True),
                       Panel("channel_drift", "Drift of what the units' gauge reads, rms", drift=True))


def section(result: Result) -> str:
    """The results as Markdown: a table, and sentences about it."""
    c = Config(**result["settings"])
    columns = {
        "final loss": report.column(result, "loss"),
        "drift, layer pair": report.column(result, "block_drift", at=report.largest),
        "drift, per unit (rms)": report.column(result, "channel_drift", at=report.largest),
        "log‖W1‖ − log‖W2‖, layers": report.column(result, "layer_ratio", at=report.largest),
        "log‖W1‖ − log‖W2‖ per unit (rms)": report.column(result, "ratio", at=report.largest),
    }
    adamw, printed = (report.largest(result, arm, "layer_ratio") for arm in ("AdamW", PRINTED))
    dead = [not math.isfinite(x) for x in report.largest(result, PRINTED_UNITS, "ratio")]
    ends = (report.final(result, arm, "loss") for arm in (PRINTED_UNITS, "DDC channel"))
    losses = [a / b for a, b in zip(*ends, strict=True)]
    return "\n\n".join([
        f"{c.inputs}-{c.hidden}-{c.outputs} ReLU network, {c.samples} samples, {c.steps:,} steps, learning rate "
        f"{c.learning_rate}, weight decay {c.weight_decay}. {report.made_with(result)}",
        report.table(result, columns),
        f"{report.containment(result, 'AdamW', 'DDC block', 'block_drift', 'log‖W1‖ of the layer')} "
        f"{report.containment(result, 'AdamW', 'DDC channel', 'channel_drift', 'log‖W1‖ per unit')} "
        "Each binding holds its own coordinate: the one that is not bound is free to move.",
        f"In the paper's coordinate, {PAPERS}, per unit, "
        f"{report.farther(result, 'DDC channel', 'AdamW', 'ratio')}: at the anchor's rest W2 takes all growth. "
        f"{report.containment(result, 'AdamW', BALANCED, 'ratio', f'{PAPERS} per unit')} "
        f"As printed, with one number per layer, it moves by {report.span(printed)} where AdamW moves by "
        f"{report.span(adamw)}: a relative step across a direction lengthens a tensor to second order. As printed "
        f"and per unit, the ratio of some units becomes infinite {report.on_seeds(dead)} (they die), and the loss "
        f"is {report.span(losses)} times that of *DDC channel*. Losses of one binding under both rests are equal "
        "to rounding in float64 (`tests/test_rest.py`); after 4,000 steps in float32 they are those of the table.",
    ])

STUDY = harness.Study(__doc__, "relu_rescale", harness.trained(build), section, figure, config=Config(), full=FULL)
