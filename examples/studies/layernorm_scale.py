"""A LayerNorm and its readout (DDC, C.3): AdamW moves scale from the norm to the weights, DDC does not.

    python -m examples.studies layernorm_scale

(γ ∘ normalised x) W stays the same when an entry of γ is multiplied and the row of W behind it is divided by the same
number, one number per channel c. Prints the final losses, and how far two coordinates of these scales have moved. For
the gauge's, log γ_c, it prints the root mean square and the largest change over channels. For the paper's, log γ_c −
log‖W_c‖, it prints the root mean square change. That coordinate also changes if ‖W_c‖ alone grows. This changes
the product γ_c·‖W_c‖ and the outputs, so that it is no drift.
"""

import functools
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
    channels: int = 32
    outputs: int = 16
    scale: float = 2.0  # γ at the start; not 1, so that log γ is not zero there
    learning_rate: float = 1e-2
    weight_decay: float = 1e-3
    strong_decay: float = 1e-1


FULL = Config(channels=64, outputs=32)


def network(params: Params, x: jax.Array) -> jax.Array:
    """The network: (γ ∘ normalised x) W."""
    return jax.nn.standardize(x, epsilon=1e-5) * params["gamma"] @ params["w"]


def loss(params: Params, data: Data) -> jax.Array:
    """The mean squared error."""
    x, y = data
    return jnp.mean(jnp.square(network(params, x) - y))


def make(c: Config, seed: int) -> tuple[Params, Data]:
    """Draws the initial weights of the student, inputs, and the teacher's outputs for them."""
    keys = jax.random.split(jax.random.key(seed), 4)
    student, teacher = (jax.random.normal(key, (c.channels, c.outputs)) * c.channels**-0.5 for key in keys[:2])
    gamma = 1.0 + 0.5 * jax.random.uniform(keys[2], (c.channels,))
    x = jax.random.normal(keys[3], (c.samples, c.channels))
    start = {"gamma": jnp.full(c.channels, c.scale), "w": student}
    return start, (x, network({"gamma": gamma, "w": teacher}, x))


BALANCED, PRINTED, PAPERS = "DDC, balanced rest", "DDC, as printed", "log γ − log‖W‖"
GAUGE = go.norm_scale({"gamma": "channel"}, into={"w": "channel _"})


def log_ratio(params: Params) -> jax.Array:
    """The paper's coordinate, log|γ_c| − log‖W_c‖, for every channel."""
    return jnp.log(jnp.abs(params["gamma"])) - jnp.log(jnp.linalg.norm(params["w"], axis=1))


def observe(start: Params, params: Params, data: Data) -> dict[str, jax.Array]:
    """What is measured along a run: the loss, and how far coordinates have moved."""
    moved = go.measure.drift(start, params, GAUGE)[0][""]
    drifts = {"drift": rms(moved), "largest_drift": jnp.max(jnp.abs(moved))}
    return drifts | {"loss": loss(params, data), "ratio": rms(log_ratio(params) - log_ratio(start))}


def build(c: Config) -> Training:
    """The arms: AdamW and DDC with two strengths of decay, DDC with rest="balanced", and DDC as the paper prints it."""
    arms = {
        "AdamW": Arm(optax.adamw(c.learning_rate, weight_decay=c.weight_decay)),
        "DDC": Arm(go.ddc_adamw(c.learning_rate, GAUGE, weight_decay=c.weight_decay)),
        "AdamW, strong decay": Arm(optax.adamw(c.learning_rate, weight_decay=c.strong_decay)),
        "DDC, strong decay": Arm(go.ddc_adamw(c.learning_rate, GAUGE, weight_decay=c.strong_decay)),
        BALANCED: Arm(go.ddc_adamw(c.learning_rate, GAUGE, weight_decay=c.weight_decay, rest="balanced")),
        PRINTED: Arm(go.ddc_adamw(c.learning_rate, GAUGE, weight_decay=c.weight_decay, preset="paper")),
    }
    return Training(arms, functools.partial(make, c), loss, observe)


figure = report.figure("LayerNorm and readout: scale traded between γ and W",
                       Panel("loss", "Training loss", ylabel="mean squared error"),
                       Panel("drift", "Drift of what the gauge reads, rms over channels", drift=True))


def section(result: Result) -> str:
    """The results as Markdown: a table, and sentences about it."""
    c = Config(**result["settings"])
    columns = {
        "final loss": report.column(result, "loss"),
        "drift, rms over channels": report.column(result, "drift", at=report.largest),
        "drift, largest channel": report.column(result, "largest_drift", at=report.largest),
        "log γ − log‖W‖, rms": report.column(result, "ratio", at=report.largest),
    }
    return "\n\n".join([
        f"{c.channels} channels into {c.outputs} outputs, {c.samples} samples, γ = {c.scale:g} at the start, "
        f"{c.steps:,} steps, learning rate {c.learning_rate}, weight decay {c.weight_decay} (strong: "
        f"{c.strong_decay}). {report.made_with(result)}",
        report.table(result, columns),
        f"{report.containment(result, 'AdamW', 'DDC', 'drift', 'log γ')} Under strong decay: "
        f"{report.containment(result, 'AdamW, strong decay', 'DDC, strong decay', 'drift', 'log γ')}",
        f"In the paper's coordinate, {PAPERS}, {report.farther(result, 'DDC', 'AdamW', 'ratio')}: at the anchor's "
        f"rest W takes all growth. {report.containment(result, 'AdamW', BALANCED, 'ratio', PAPERS)} "
        f"{report.containment(result, 'AdamW', PRINTED, 'ratio', PAPERS)}",
    ])

STUDY = harness.Study(__doc__, "layernorm_scale", harness.trained(build), section, figure, config=Config(), full=FULL)
