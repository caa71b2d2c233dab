"""Eight rotary blocks that learn addition: which rotation to hold, and what minimum is reached (DDC, C.7 and C.8).

    python -m examples.studies depth8            # half an hour on one CPU core
    python -m examples.studies depth8 --full     # the paper's size: a GPU

Five arms. Muon has one matrix per kernel. The scaled polar factor without a gauge has one matrix per head, and so have
the two gauge arms: they differ from it by the gauges of queries and keys and of values and outputs alone, and from each
other by the gauge of queries and keys alone. Rotary positions leave the rotations of planes a symmetry, the torus; the
full rotation is none, and a control. The last arm is Muon whose steps leave dead directions of kernels alone.

The paper multiplies a polar factor by the root mean square of its moment (B.10). Here all arms multiply it by a number
that makes the root mean square of a step 0.2 times the learning rate. The polar factor of a head commutes with the
head's rotations, so that no body frame is kept, and none is renewed as it drifts. A sequence is a pair of numbers; the
paper's sequences have 128 tokens. Its text lost the prime, the width, the share of pairs to train on, the weight decay
and the learning rates: these are ours. Share and decay were tried on Muon alone, until it generalised late. The Fisher
information is read in the three arms of C.8.
"""

import functools
import statistics
from dataclasses import dataclass

import jax

from examples.studies import baselines, grok_readings, harness, report
from examples.studies.grok_readings import GROKKED, SHOWN, WINDOW, Data, Rates
from examples.studies.harness import Arm, Result, Training
from examples.studies.report import Panel
from models import grokking
from models.grokking import GrokConfig, Params

MUON, POLAR = "Muon", "scaled polar, no gauge"
FULL_ROTATION, TORUS, MASKED = "full-rotation gauge", "RoPE-torus gauge", "Muon, dead directions masked"
READ_AT_THE_MINIMUM = (MUON, TORUS, MASKED)
"""The arms of C.8."""
BASES = {"Muon": MUON, "scaled polar": POLAR}
FARTHER, NEAR = 10.0, 0.02  # how much larger an eigenvalue is called farther, and accuracies this close count as one
ACCURACY = "accuracy on held-out pairs, the median over the last quarter"
FISHER, LEAST = "the smallest eigenvalue of the Fisher information", "the smallest singular value"


@dataclass(frozen=True)
class Config:
    """Smaller than the paper's, so that 15 runs take minutes."""

    steps: int = 2500
    sweep_steps: int = 2500
    p: int = 23
    width: int = 32
    heads: int = 4
    layers: int = 8
    share: float = 0.55
    weight_decay: float = 2.0

    @property
    def network(self) -> GrokConfig:
        """The network."""
        return GrokConfig(self.p, self.width, self.heads, 4 * self.width, self.layers, rope=True, share=self.share)


FULL = Config(steps=5000, sweep_steps=5000, p=113, width=128, share=0.3)


def build(c: Config, rates: Rates) -> Training:
    """Muon, the scaled polar factor, the two gauges on it, and the control of dead directions."""
    network, decay, polar = c.network, c.weight_decay, rates["scaled polar"]
    muon, fisher = baselines.muon(rates["Muon"], decay), functools.partial(observe, c=network)
    arms = {
        MUON: Arm(muon, observe=fisher),
        POLAR: Arm(baselines.muon(polar, decay, per_head=True)),
        FULL_ROTATION: Arm(grok_readings.gauged(polar, decay, grokking.rotations(network, full_rotation=True))),
        TORUS: Arm(grok_readings.gauged(polar, decay, grokking.rotations(network)), observe=fisher),
        MASKED: Arm(baselines.dead_directions_masked(muon, lambda path: "blocks" in path and path.endswith("kernel")),
                    observe=fisher),
    }
    make, loss = functools.partial(grok_readings.make, network), functools.partial(grok_readings.loss, c=network)
    return Training(arms, make, loss, functools.partial(grok_readings.reading, c=network, block=c.layers - 1))


def observe(start: Params, params: Params, data: Data, c: GrokConfig) -> dict[str, jax.Array]:
    """What the arms of C.8 read: the Fisher too."""
    numbers = grok_readings.reading(start, params, data, c, c.layers - 1)
    return numbers | {"fisher": grok_readings.output_fisher(params, data, c)}


figure = report.figure(
    lambda result: f"Addition modulo {result['settings']['p']}, 8 rotary blocks: {SHOWN}",
    Panel("test_accuracy", "Accuracy on held-out pairs", "linear", window=WINDOW),
    Panel("test_loss", "Loss on held-out pairs", ylabel="nats", window=WINDOW),
    Panel("fisher", "Smallest eigenvalue of the Fisher in the logits (three arms)", window=WINDOW,
          arms=READ_AT_THE_MINIMUM),
    Panel("activations", "Smallest singular value behind the last block", ylabel="per √rows", window=WINDOW),
)


def section(result: Result) -> str:
    """The table, and what it says."""
    c = Config(**result["settings"])
    fisher = report.column(result, "fisher", at=report.settled)
    columns = grok_readings.columns(result)
    columns["Fisher"] = lambda arm: fisher(arm) if arm in READ_AT_THE_MINIMUM else "not read"
    return "\n\n".join([
        f"{grok_readings.sizes(c.network)}, {c.steps:,} steps, weight decay {c.weight_decay}. "
        f"{grok_readings.swept(result)} {report.made_with(result)}",
        "Each column after the first is the median over the last quarter of the run. The singular value is the "
        "smallest one of the residual stream behind the last block, over all pairs, divided by the root of their "
        "number; the Fisher column is the smallest eigenvalue of the Fisher information in the logits, without "
        "their common shift.",
        report.table(result, columns),
        f"{_decomposition(result)} {_grokking(result)}",
        _minimum(result),
    ])


def _decomposition(result: Result) -> str:
    """C.7: does each part of the gauge add accuracy?"""
    steps = {
        "the scaled polar factor without a gauge ends at a higher accuracy than Muon": (MUON, POLAR),
        "the full-rotation gauge adds to that": (POLAR, FULL_ROTATION),
        "the RoPE-torus gauge ends above the full rotation": (FULL_ROTATION, TORUS),
        "the RoPE-torus gauge ends above Muon": (MUON, TORUS),
        "the RoPE-torus gauge ends above the polar factor without a gauge": (POLAR, TORUS),
    }
    torus, full = (statistics.pvariance(report.settled(result, arm, "test_accuracy")) for arm in (TORUS, FULL_ROTATION))
    return " ".join([
        *(report.paper(finding, report.less(result, *arms, "test_accuracy", report.settled), ACCURACY)
          for finding, arms in steps.items()),
        report.paper("the torus halves the variance between seeds", [torus <= 0.5 * full],
                     f"the variance of that accuracy, {report.number(torus)} and {report.number(full)}", "studies"),
    ])


def _grokking(result: Result) -> str:
    """C.7: who groks?"""
    groks = {arm: [x < float("inf") for x in grok_readings.grokked_at(result, arm)] for arm in result["arms"]}
    by = f"whether {GROKKED:.0%} stay for {grok_readings.KEPT} readings"
    each = ", ".join(f"{arm} {sum(count)}" for arm, count in groks.items())
    return " ".join([report.paper("with the RoPE-torus gauge all seeds grok", groks[TORUS], by),
                     report.paper("with the full rotation too", groks[FULL_ROTATION], by),
                     report.paper("Muon fails on two of three seeds", [not x for x in groks[MUON]], by),
                     f"Seeds that grok, of {len(result['seeds'])}: {each}.",
                     grok_readings.swings(result),
                     "Beside such swings a difference of some hundredths between medians says little."])


def _minimum(result: Result) -> str:
    """C.8: what minimum, and is it the gauge's doing?"""

    def beside_muon(key: str, arm: str = TORUS) -> list[float]:
        return report.ratios(report.settled(result, arm, key), report.settled(result, MUON, key), least=1e-30)

    accuracies = (report.settled(result, arm, "test_accuracy") for arm in (MASKED, MUON))
    apart, times = [abs(a - b) for a, b in zip(*accuracies, strict=True)], beside_muon("fisher")
    return " ".join([
        report.paper(f"the RoPE-torus gauge ends {FARTHER:g} times further off the singular floor than Muon",
                     [x >= FARTHER for x in times], f"{FISHER} in the logits"),
        f"It is {report.listed(times)} times Muon's.",
        report.paper("the gauge ends at a lower loss than Muon", [x < 1 for x in beside_muon("test_loss")],
                     "test loss"),
        report.paper("the gauge compresses the activations", [x < 1 for x in beside_muon("activations")],
                     f"{LEAST} of the stream behind the last block"),
        report.paper("masking dead directions ends where Muon does", [x <= NEAR for x in apart],
                     f"{ACCURACY}, to {NEAR}"),
        f"The masked arm's smallest eigenvalue is {report.listed(beside_muon('fisher', MASKED))} times Muon's.",
    ])


STUDY = harness.Study(
    __doc__, "depth8", functools.partial(grok_readings.cells, build, BASES), section, figure, config=Config(), full=FULL
)
