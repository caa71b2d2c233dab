"""Twenty-four rotary blocks that learn addition: does a gauge make grokking reliable at depth? (DDC, §5.6 and C.6).

    python -m examples.studies depth24           # half an hour on one CPU core
    python -m examples.studies depth24 --full    # the paper's size: a GPU

Muon, and DDC's Muon under the torus gauge of rotary queries and keys and the rotation gauge of values and outputs, each
with two activations, GELU and squared ReLU. Muon has one matrix per kernel, and under the gauges one per head. As in
the paper no other gauge is on at this depth. Counts the seeds that end at full accuracy, and reads the smallest
singular value of the residual stream behind the middle block.

The paper's second cohort renews a body frame where a head's Gram matrix has drifted. The polar factor of a head
commutes with its rotations, so that Muon on the slice keeps no body frame and has no such choice (`go.ddc_adamw` has
one, `refresh_drift`): the two cohorts are one here. Every step takes all pairs, where the paper takes 4,096 tokens in
sequences of 128. Its text lost the prime, the width, the share of pairs to train on, the weight decay, the learning
rates and what it calls full accuracy: these are ours. All arms have the learning rate that suits plain Muon best.
"""

import functools
from dataclasses import dataclass
from typing import Literal

from examples.studies import baselines, grok_readings, harness, report
from examples.studies.grok_readings import SHOWN, WINDOW, Rates
from examples.studies.harness import Arm, Result, Training
from examples.studies.report import Panel
from models import grokking
from models.grokking import GrokConfig

Activation = Literal["gelu", "relu2"]
ACTIVATIONS: dict[Activation, str] = {"gelu": "GELU", "relu2": "squared ReLU"}
MUON, TORUS = "Muon", "RoPE-torus gauge"
FULL_ACCURACY = 0.99
ACCURACY = f"accuracy on held-out pairs, the median over the last quarter, of {FULL_ACCURACY:.0%} or more"


@dataclass(frozen=True)
class Config:
    """Smaller than the paper's, so that 12 runs take minutes."""

    steps: int = 1000
    sweep_steps: int = 1000
    p: int = 17
    width: int = 32
    heads: int = 4
    layers: int = 24
    share: float = 0.6
    weight_decay: float = 2.0

    def network(self, activation: Activation) -> GrokConfig:
        """The network."""
        return GrokConfig(
            self.p, self.width, self.heads, 4 * self.width, self.layers, activation, rope=True, share=self.share
        )


FULL = Config(steps=6000, sweep_steps=6000, p=113, width=128, share=0.3)


def arm_of(optimizer: str, activation: Activation) -> str:
    """The name of an arm."""
    return f"{optimizer}, {ACTIVATIONS[activation]}"


BASES = {"Muon": arm_of(MUON, "gelu")}


def build(c: Config, rates: Rates) -> Training:
    """Two optimizers by two activations."""
    arms, decay = {}, c.weight_decay
    for activation in ACTIVATIONS:
        network = c.network(activation)
        loss = functools.partial(grok_readings.loss, c=network)
        observe = functools.partial(grok_readings.reading, c=network, block=c.layers // 2 - 1)
        gauged = grok_readings.gauged(rates["Muon"], decay, grokking.rotations(network))
        arms[arm_of(MUON, activation)] = Arm(baselines.muon(rates["Muon"], decay), loss, observe)
        arms[arm_of(TORUS, activation)] = Arm(gauged, loss, observe)
    return Training(arms, functools.partial(grok_readings.make, network), loss, observe)


figure = report.figure(
    lambda result: f"Addition modulo {result['settings']['p']}, 24 rotary blocks: {SHOWN}",
    Panel("test_accuracy", "Accuracy on held-out pairs", "linear", window=WINDOW),
    Panel("train_loss", "Loss on the pairs to train on", ylabel="nats", window=WINDOW),
    Panel("activations", "Smallest singular value behind the middle block", ylabel="per √rows", window=WINDOW),
)


def section(result: Result) -> str:
    """The table, and what it says."""
    c = Config(**result["settings"])
    return "\n\n".join([
        f"{grok_readings.sizes(c.network('gelu'))}, {c.steps:,} steps, weight decay {c.weight_decay}. "
        f"{grok_readings.swept(result)} This rate, plain Muon's with GELU, is that of all arms. "
        f"{report.made_with(result)}",
        "Each column after the first is the median over the last quarter of the run. The singular value is the "
        f"smallest one of the residual stream behind block {c.layers // 2}, over all pairs, divided by the root of "
        "their number.",
        report.table(result, grok_readings.columns(result)),
        _verdicts(result),
    ])


def _verdicts(result: Result) -> str:
    """C.6: seeds to full accuracy, and the stream's smallest singular value."""

    def of_both(key: str) -> list[list[float]]:
        """Under the gauge and under Muon, all activations and seeds."""
        return [[x for activation in ACTIVATIONS for x in report.settled(result, arm_of(optimizer, activation), key)]
                for optimizer in (TORUS, MUON)]

    accuracies, streams = of_both("test_accuracy"), of_both("activations")
    times = report.ratios(streams[0], streams[1], least=1e-30)
    ours, theirs = ([x >= FULL_ACCURACY for x in of_arm] for of_arm in accuracies)
    sentences = [
        report.paper("with the gauge nearly every seed groks to full accuracy", ours, ACCURACY, "runs"),
        report.paper("with Muon none does", [not x for x in theirs], ACCURACY, "runs"),
        f"Runs that do, of {len(theirs)}: {sum(ours)} with the gauge and {sum(theirs)} with Muon.",
        "" if any(ours + theirs) else "So this size does not tell the arms apart by that count.",
        grok_readings.swings(result),
        report.paper("the gauge ends at the higher accuracy", [a > b for a, b in zip(*accuracies, strict=True)],
                     "accuracy on held-out pairs, the median over the last quarter, seed by seed", "runs"),
        report.paper("the gauge compresses the activations inside", [x < 1 for x in times],
                     "the smallest singular value of the stream behind the middle block", "runs"),
        f"It is {report.listed(times)} times Muon's.",
    ]
    return " ".join(filter(None, sentences))


STUDY = harness.Study(
    __doc__, "depth24", functools.partial(grok_readings.cells, build, BASES), section, figure, config=Config(),
    full=FULL,
)
