"""Does an optimizer keep a block that the task needs (DDC, C.14)? Sparse parity, with strong weight decay.

    python -m examples.studies sparse_parity

relu(γ ∘ LayerNorm(x W1 + b1)) W2 + b2 learns the parity of the first few bits of its input, from all inputs at once.
The function stays the same if γ_c is multiplied and row c of W2 is divided by a number, so that only the joint scale
s_c = |γ_c|·‖W2_c‖ counts. DDC steps it as one coordinate. If this is log s_c ("log"), decay takes 2·wd·lr per step and
Adam can give back at most √2·lr: from wd = 0.71 on, the loss cannot outweigh decay. If it is s_c itself ("linear"), the
two balance. There are three strengths of decay. Prints accuracy, the mean of s_c (gain), the share of units with s_c
below an absolute floor (dead), and how far the gauge's coordinate log|γ_c| has moved over the units.
"""

import functools
import math
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import optax

import gauge_optax as go
from examples.studies import baselines, harness, report
from examples.studies.harness import Arm, Result, Training, rms
from examples.studies.report import Panel

Params = dict[str, jax.Array]
Data = tuple[jax.Array, jax.Array]
SOLVED, CHANCE = 0.99, 0.55
LEAK = "the rms of log|γ| over live units"
CHANCE_LOSS, NEAR = math.log(2.0), 0.02


@dataclass(frozen=True)
class Config:
    """Sizes. The paper gives the number of steps only. The other numbers are our choice."""

    steps: int = 10_000
    bits: int = 10
    parity: int = 3
    hidden: int = 128
    learning_rate: float = 1e-3
    weight_decay: float = 1.0
    dead: float = 1e-3  # a unit counts as dead if its s_c is below this
    weak_decay: float = 0.5
    strong_decay: float = 2.0


FULL = Config(bits=12, hidden=256)


def network(params: Params, x: jax.Array) -> jax.Array:
    """The network: relu(γ ∘ LayerNorm(x W1 + b1)) W2 + b2."""
    hidden = jax.nn.relu(jax.nn.standardize(x @ params["up"] + params["up_bias"], epsilon=1e-5) * params["gamma"])
    return hidden @ params["down"] + params["bias"]


def loss(params: Params, data: Data) -> jax.Array:
    """The mean cross-entropy."""
    x, y = data
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(network(params, x), y))


def make(c: Config, seed: int) -> tuple[Params, Data]:
    """Draws initial weights. The data is every input of ±1, with the parity of its first bits."""
    up, bias, down = jax.random.split(jax.random.key(seed), 3)
    x = 2.0 * ((jnp.arange(2**c.bits)[:, None] >> jnp.arange(c.bits)) & 1) - 1.0
    params = {
        "up": jax.random.normal(up, (c.bits, c.hidden)) * c.bits**-0.5,
        "up_bias": jax.random.normal(bias, (c.hidden,)),
        "gamma": jnp.ones(c.hidden),
        "down": jax.random.normal(down, (c.hidden, 2)) * c.hidden**-0.5,
        "bias": jnp.zeros(2),
    }
    return params, (x, (jnp.prod(x[:, : c.parity], axis=1) > 0).astype(jnp.int32))


def sides(params: Params) -> tuple[jax.Array, jax.Array]:
    """|γ_c| and ‖W2_c‖, plus a tiny number, so that their logarithms exist."""
    return jnp.abs(params["gamma"]) + 1e-30, jnp.linalg.norm(params["down"], axis=1) + 1e-30


def observe(start: Params, params: Params, data: Data, c: Config) -> dict[str, jax.Array]:
    """What is measured along a run: loss, accuracy, the joint scales, and how far coordinates have moved."""
    x, y = data
    (gamma, down), (gamma0, _) = sides(params), sides(start)
    moved, live = jnp.log(gamma / gamma0), gamma * down >= c.dead
    return {
        "loss": loss(params, data),
        "accuracy": jnp.mean(jnp.argmax(network(params, x), axis=1) == y),
        "gain": jnp.mean(gamma * down),
        "dead": 1.0 - jnp.mean(live),
        "drift": rms(moved),
        "live_drift": jnp.sqrt(jnp.sum(jnp.square(moved) * live) / jnp.maximum(1, jnp.sum(live))),
    }


def build(c: Config) -> Training:
    """The arms: AdamW and Muon without a gauge, AdamW with 1 + γ, and variants of DDC.

    DDC steps the joint scale by its value or by its logarithm, in the library's or the paper's form, with Adam or Muon,
    and with Adam at three strengths of decay.
    """
    gauge = go.norm_scale({"gamma": "channel"}, into={"down": "channel _"})
    rate, decay = c.learning_rate, c.weight_decay
    # No gauge binds `up`. The label makes DDC-Muon orthogonalize it all the same, as Muon without a gauge does.
    muon = functools.partial(
        go.ddc_muon, rate, gauge, labels={"up": "muon"}, weight_decay=decay, adam_weight_decay=decay
    )
    arms = {
        "AdamW": Arm(optax.adamw(rate, weight_decay=decay)),
        "Muon": Arm(optax.contrib.muon(rate, weight_decay=decay, adam_weight_decay=decay)),
        "AdamW, 1 + γ": Arm(baselines.one_plus_adamw(rate, lambda path: path == "gamma", decay)),
        "DDC, linear": Arm(go.ddc_adamw(rate, gauge, weight_decay=decay)),
        "DDC, log": Arm(go.ddc_adamw(rate, gauge, weight_decay=decay, radial="log")),
        "DDC as printed, linear": Arm(go.ddc_adamw(rate, gauge, weight_decay=decay, preset="paper")),
        "DDC as printed, log": Arm(go.ddc_adamw(rate, gauge, weight_decay=decay, radial="log", preset="paper")),
        "DDC-Muon, linear": Arm(muon()),
        "DDC-Muon, log": Arm(muon(radial="log")),
    }
    for other in (c.weak_decay, c.strong_decay):
        for radial in ("linear", "log"):
            tx = go.ddc_adamw(rate, gauge, weight_decay=other, radial=radial)
            arms[_swept(radial, other)] = Arm(tx)
    return Training(arms, functools.partial(make, c), loss, functools.partial(observe, c=c))


def _swept(radial: str, decay: float) -> str:
    return f"DDC, {radial}, decay {decay:g}"


def figure(result: Result, path: Path) -> None:
    """Draws accuracy, gain and drift of all arms, but not those that sweep the strength of decay."""
    DRAWN(result | {"arms": [arm for arm in result["arms"] if "decay" not in arm]}, path)


DRAWN = report.figure("Sparse parity: a block that the task needs, under weight decay",
                      Panel("accuracy", "Accuracy", "linear"),
                      Panel("gain", "Gain: joint scale, mean over units"),
                      Panel("live_drift", "Drift of log|γ|, rms over live units", drift=True))


def section(result: Result) -> str:
    """The results as Markdown: a table, and sentences about it."""
    c = Config(**result["settings"])
    columns = {
        "final accuracy": report.column(result, "accuracy", ".3f"),
        "final loss": report.column(result, "loss"),
        "gain": report.column(result, "gain"),
        "dead units": report.column(result, "dead", ".0%"),
        "drift at the end, rms over units": report.column(result, "drift"),
        "the same over live units": report.column(result, "live_drift"),
    }
    return "\n\n".join([
        f"Parity of {c.parity} of {c.bits} bits, {2**c.bits:,} inputs, {c.hidden} units, {c.steps:,} steps, "
        f"learning rate {c.learning_rate}, weight decay {c.weight_decay}, dead below {c.dead:g}. "
        f"{report.made_with(result)}",
        report.table(result, columns),
        f"{_split(result)} {_sweep(result)} {_muon(result)} {_leak(result)}",
    ])


def _ends(result: Result, arm: str, between: str = ", ") -> str:
    """Words that say with which accuracy and gain an arm ends."""
    accuracy, gain = (report.final(result, arm, key) for key in ("accuracy", "gain"))
    return f"accuracy {report.span(accuracy, '.3f')}{between}gain {report.span(gain)}"


def _by_scale(result: Result, ours: str) -> tuple[list[bool], list[bool], str]:
    """For DDC or DDC-Muon: whether "linear" solves the task, whether "log" ends at chance, and the dead units of "log".
    """
    kept = [x > SOLVED for x in report.final(result, f"{ours}, linear", "accuracy")]
    lost = [x < CHANCE for x in report.final(result, f"{ours}, log", "accuracy")]
    return kept, lost, report.span(report.final(result, f"{ours}, log", "dead"), ".0%")


def _muon(result: Result) -> str:
    """Sentences that say whether the findings on "linear" and "log" hold with Muon too."""
    kept, lost, dead = _by_scale(result, "DDC-Muon")
    return " ".join([report.paper("on a Muon base the linear scale keeps the block", kept, "final accuracy"),
                     report.paper("there the log scale drops accuracy to chance", lost, "final accuracy"),
                     f"The log arm ends at {_ends(result, 'DDC-Muon, log')}, {dead} of units dead."])


def _split(result: Result) -> str:
    """Sentences that say whether the coordinate of the joint scale decides the outcome, as in the paper.

    If "log" does not fall to chance, they also say whether the cause is the library's deviation from the paper.
    """
    kept, lost, dead = _by_scale(result, "DDC")
    coin = [abs(x / CHANCE_LOSS - 1) < NEAR for x in report.final(result, "DDC, log", "loss")]
    linear, log = (report.final(result, f"DDC as printed, {radial}", "accuracy") for radial in ("linear", "log"))
    cause = ("So it is not the size of our steps across a channel, which does not shrink with its length, that ends "
             "the fall; the cause is open." if min(log) >= CHANCE else
             "So our steps across a channel, which do not shrink with its length, are what ends the fall.")
    return " ".join([
        report.paper("the linear scale keeps the block at full accuracy", kept, "final accuracy"),
        report.paper("the log scale collapses the block", coin, "final loss, at that of a coin, log 2"),
        report.paper("there accuracy drops to chance too", lost, "final accuracy"),
        f"With {dead} of its units dead the log arm ends at {_ends(result, 'DDC, log', ' and ')}; the larger of "
        "two logits can be read off however small they are. With appendix B as printed, where all steps are relative "
        f"to a channel's length, the log arm ends at {_ends(result, 'DDC as printed, log', ' and ')}, the "
        f"linear one at {report.span(linear, '.3f')}. {cause}",
    ])


def _sweep(result: Result) -> str:
    """A sentence that says how DDC ends at the other strengths of decay."""
    c = Config(**result["settings"])
    said = [f"at {decay:g} the {radial} arm ends at {_ends(result, _swept(radial, decay))}"
            for radial in ("linear", "log") for decay in (c.weak_decay, c.strong_decay)]
    return f"By strength of decay: {'; '.join(said)}."


def _leak(result: Result) -> str:
    """Sentences that say how far AdamW with 1 + γ drifts, which keeps the block too."""
    kept = [x > SOLVED for x in report.final(result, "AdamW, 1 + γ", "accuracy")]
    leaks, ours = (report.final(result, arm, "live_drift") for arm in ("AdamW, 1 + γ", "DDC, linear"))
    times = report.ratios(leaks, ours)
    return (f"AdamW with 1 + γ keeps the block {report.on_seeds(kept)}, and in {LEAK} drifts {report.span(times)} "
            "times as far as DDC on the linear scale. "
            f"{report.paper('four orders of magnitude further', [x > 1e4 for x in times], LEAK)}")


STUDY = harness.Study(__doc__, "sparse_parity", harness.trained(build), section, figure, config=Config(), full=FULL)
