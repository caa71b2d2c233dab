"""A language model trained far past the point of fit: who over-fits, and what rates can be read (DDC, §5.1 and C.5).

    OPENBLAS_NUM_THREADS=1 XLA_FLAGS=--xla_cpu_multi_thread_eigen=false python -m examples.studies overtraining_lm
    python -m examples.studies overtraining_lm --full     # the paper's size: a GPU

The first takes some minutes on 2 CPU cores. With the threads that it turns off, matrices this small wait for each other
and a reading of singular values takes up to fifty times as long on a busy machine.

A Llama-like decoder sees a slice of text so often that it knows it by heart; the text behind the slice is held out.
Five arms of the paper: AdamW and DDC-AdamW at one rate and decay; Muon with the textbook's Newton-Schulz on whole
kernels; the orthogonaliser of DDC-Muon, one matrix per head, without a gauge, as the control; and DDC-Muon. The last
three step by 0.2 times the rate in root mean square. Three controls ask what the gauge does on the Adam base:
`quotient` around AdamW, which decays slice points as AdamW decays weights; DDC without the scales of norms; and AdamW
without decay.

A *cell* is a residual node, behind a block, and an observable of its activations. It is *readable* if the observable
falls as a power of a length that goes to zero (`go.measure.rate_table`). The length here is the square root of the
training loss, which no gauge changes. The paper trains 75 million parameters on 10 million tokens of FineWeb-edu,
15,000 steps of 16 × 1,024 tokens; its text lost the decay and the rates. Here tokens are bytes of Python's standard
library.

Rates are from a sweep on seed 42 of the two bases, each with its rate by the least validation loss along the run:
AdamW 3.187 at 0.001, 3.097 at 0.003, 3.175 at 0.01; textbook Muon 3.205 at 0.001, 3.114 at 0.003, 3.140 at 0.01, 3.160
at 0.03. The training loss at the end would choose 0.001 for both, the smallest rate tried (AdamW 0.121, 0.165 and
0.194; Muon 0.112, 0.136, 0.189 and 0.374). The decay was not swept.
"""

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import gauge_optax as go
from examples import data
from examples.studies import baselines, harness, report
from examples.studies.harness import Arm, Result, Training
from examples.studies.report import Panel
from models import lm
from models.lm import LMConfig

Params = Any
Data = tuple[jax.Array, jax.Array, jax.Array]


@dataclass(frozen=True)
class Config:
    """Sizes, and rates for the two bases. `text` is the number of bytes to learn by heart."""

    steps: int = 800
    batch: int = 8
    length: int = 32
    text: int = 4_096
    held_out: int = 8_192
    width: int = 48
    layers: int = 3
    heads: int = 6
    kv_heads: int = 2
    hidden: int = 128
    adam_rate: float = 3e-3
    muon_rate: float = 3e-3
    decay: float = 0.1

    @property
    def network(self) -> LMConfig:
        """The network."""
        return lm.llama_config(
            vocab=data.VOCAB, d_model=self.width, layers=self.layers, heads=self.heads, kv_heads=self.kv_heads,
            d_head=self.width // self.heads, d_ff=self.hidden,
        )


FULL = Config(
    steps=15_000, batch=16, length=1_024, text=10_000_000, held_out=500_000, width=768, layers=12, hidden=2_048,
    adam_rate=6e-4, muon_rate=6e-4,
)
ADAMW, DDC, MUON, POLAR, DDC_MUON = "AdamW", "DDC-AdamW", "Muon", "Muon per head, no gauge", "DDC-Muon"
QUOTIENT, NO_NORMS, NO_DECAY = "quotient(AdamW)", "DDC-AdamW, norms left out", "AdamW, no decay"


def build(c: Config) -> Training:
    """The paper's five arms, and three controls."""
    gauges = lm.gauges(c.network)
    arms = {
        ADAMW: Arm(optax.adamw(c.adam_rate, weight_decay=c.decay)),
        DDC: Arm(go.ddc_adamw(c.adam_rate, gauges, weight_decay=c.decay)),
        MUON: Arm(baselines.muon(c.muon_rate, c.decay)),
        POLAR: Arm(baselines.muon(c.muon_rate, c.decay, per_head=True)),
        DDC_MUON: Arm(
            go.ddc_muon(c.muon_rate, gauges, weight_decay=c.decay, adam_weight_decay=c.decay, consistent_rms=0.2)
        ),
    }
    rest = [gauge for gauge in gauges if gauge.name != "norm_scale"]
    arms |= {
        QUOTIENT: Arm(go.quotient(optax.adamw(c.adam_rate, weight_decay=c.decay), gauges)),
        NO_NORMS: Arm(go.ddc_adamw(c.adam_rate, rest, weight_decay=c.decay)),
        NO_DECAY: Arm(optax.adamw(c.adam_rate, weight_decay=0.0)),
    }
    graph, _ = nnx.split(lm.build(c.network, nnx.Rngs(0)))
    _, loss = lm.params_and_loss(c.network, jax.random.key(0))
    return Training(arms, functools.partial(make, c), loss, functools.partial(observe, graph),
                    functools.partial(batch, c))


@functools.cache
def _text(c: Config) -> tuple[np.ndarray, np.ndarray]:
    """Windows to learn by heart, and windows held out, from later in the text."""
    tokens = data.read_bytes()

    def windows(first: int, count: int) -> np.ndarray:
        cut = tokens[first : first + count // c.length * c.length + 1].astype(np.int32)
        return np.stack([cut[k : k + c.length + 1] for k in range(0, len(cut) - 1, c.length)])

    middle = len(tokens) // 2
    return windows(middle, c.text), windows(middle + 2 * c.text, c.held_out)


def make(c: Config, seed: int) -> tuple[Params, Data]:
    """A start, and both texts with the key of batches."""
    known, new = _text(c)
    params, _ = lm.params_and_loss(c.network, jax.random.key(seed))
    return params, (jnp.asarray(known), jnp.asarray(new), jax.random.key_data(jax.random.key(1000 + seed)))


def batch(c: Config, data: Data, step: jax.Array) -> jax.Array:
    """Random windows of the known text."""
    known, _, key = data
    at = jax.random.randint(jax.random.fold_in(jax.random.wrap_key_data(key), step), (c.batch,), 0, len(known))
    return known[at]


NEAR = 0.06  # the same, for controls that are not meant to be equal
SAME = 0.02  # losses that differ by less, relatively, count as equal
READ = 32  # windows of either text that are read


def observe(graph: Any, start: Params, params: Params, data: Data) -> dict[str, jax.Array]:
    """Losses and accuracies on both texts, and of every block's stream the smallest singular value and the rank."""
    model = nnx.merge(graph, params)
    read = {}
    for name, windows in (("train_", data[0][:READ]), ("", data[1][: 4 * READ])):
        _, *streams = model.streams(windows[:, :-1])
        logits, targets = model.logits(streams[-1]), windows[:, 1:]
        read[f"{name}loss"] = jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, targets))
        read[f"{name}accuracy"] = jnp.mean(jnp.argmax(logits, -1) == targets)
        for number, x in enumerate(streams if name else ()):
            stream = x.reshape(-1, x.shape[-1])
            smallest = go.measure.smallest_singular_value(stream)
            read[f"smallest {number}"] = smallest * len(stream) ** -0.5
            read[f"rank {number}"] = go.measure.effective_rank(stream)
    return read


# What a run says --------------------------------------------------------------------------------------


def gap(result: Result, arm: str) -> list[float]:
    """Validation loss less training loss at the end, per seed."""
    both = zip(report.final(result, arm, "loss"), report.final(result, arm, "train_loss"), strict=True)
    return [a - b for a, b in both]


def readable(result: Result, arm: str) -> list[int]:
    """How many cells have a rate, per seed."""
    counts = []
    for cell in result["cells"][arm].values():
        curves = cell["curves"]
        lengths = np.sqrt(np.maximum(curves["train_loss"], 1e-30))
        layers = Config(**result["settings"]).layers
        observables = {
            f"block {n}": {key: np.asarray(curves[f"{key} {n}"]) for key in ("smallest", "rank")} for n in range(layers)
        }
        counts.append(go.measure.rate_table(lengths, observables).readable)
    return counts


def figure(result: Result, path: Path) -> None:
    """Losses, and the last block's stream."""
    c = Config(**result["settings"])
    last = c.layers - 1
    report.figure(
        f"A small Llama learns {c.text:,} bytes by heart, validation loss rises: a line per seed",
        Panel("train_loss", "Loss on the text learnt", ylabel="nats per byte"),
        Panel("loss", "Loss on text held out", "linear", ylabel="nats per byte"),
        Panel(f"smallest {last}", "Smallest singular value behind the last block", ylabel="per square root of rows"),
        Panel(f"rank {last}", "Effective rank behind the last block", "linear"),
    )(result, path)


def section(result: Result) -> str:
    """The table, and what it says."""
    c = Config(**result["settings"])
    last = c.layers - 1
    table = report.table(result, {
        "training loss": report.column(result, "train_loss"),
        "validation loss": report.column(result, "loss", ".2f"),
        "its least along the run": report.column(result, "loss", ".2f", report.smallest),
        "gap": lambda arm: report.listed(gap(result, arm), ".2f"),
        "training accuracy": report.column(result, "train_accuracy", ".2f"),
        "validation accuracy": report.column(result, "accuracy", ".2f"),
        "smallest singular value": report.column(result, f"smallest {last}"),
        "effective rank": report.column(result, f"rank {last}", ".1f"),
        f"readable cells of {2 * c.layers}": lambda arm: report.listed(readable(result, arm), ".0f"),
    })
    about = (f"{c.layers} blocks of width {c.width}, {c.heads} query and {c.kv_heads} key-value heads; {c.text:,} "
             f"bytes, {c.steps:,} steps of {c.batch} × {c.length} ({c.steps * c.batch * c.length / c.text:.0f} "
             f"epochs), decay {c.decay:g}, rates {c.adam_rate:g} (Adam) and {c.muon_rate:g} (Muon). "
             f"{report.made_with(result)}")
    return "\n\n".join([about, table, " ".join(sentences(result))])


def sentences(result: Result) -> Iterator[str]:
    """The paper's findings, and which part of DDC changes the validation loss on the Adam base."""

    def level(one: str, other: str, within: float) -> list[bool]:
        """Whether two arms end at one validation loss, seed by seed."""
        ratios = report.ratios(report.final(result, one, "loss"), report.final(result, other, "loss"))
        return [abs(x - 1.0) <= within for x in ratios]

    def near(one: str, other: str) -> str:
        return report.on_seeds(level(one, other, NEAR))

    gaps = [a / b for a, b in zip(gap(result, DDC), gap(result, ADAMW), strict=True)]
    yield report.paper("DDC holds the gap between validation and training loss to a ninth of AdamW's (0.67 and 5.88)",
                       [x <= 0.2 for x in gaps], "gap at the end, at most a fifth of AdamW's")
    yield f"The gap under DDC is {report.span(gaps)} times AdamW's."
    for claim, ours, theirs in (
        ("DDC ends at a lower validation loss than AdamW", DDC, ADAMW),
        ("on Muon the gauge ends at a lower validation loss than the textbook's", DDC_MUON, MUON),
        ("on Muon the gauge ends at a lower validation loss than its orthogonaliser alone", DDC_MUON, POLAR),
    ):
        yield report.paper(claim, report.less(result, ours, theirs, "loss"), "validation loss")
    yield report.paper("the orthogonaliser alone ends at the textbook's validation loss", level(POLAR, MUON, SAME),
                       f"validation loss, to {SAME:.0%}")
    cells = {arm: readable(result, arm) for arm in result["arms"]}
    yield report.paper("rates can be read in more cells under DDC than under AdamW",
                       [a > b for a, b in zip(cells[DDC], cells[ADAMW], strict=True)], "number of readable cells")
    if not any(map(any, cells.values())):
        yield "No cell of any arm is readable, so this statistic does not separate the arms at this size."
    yield (f"Where it comes from, to {NEAR:.0%} of the validation loss at the end: {NO_DECAY}, ends at DDC-AdamW's "
           f"{near(NO_DECAY, DDC)}; {NO_NORMS}, ends at AdamW's {near(NO_NORMS, ADAMW)}, and {QUOTIENT} too "
           f"{near(QUOTIENT, ADAMW)}. A norm and its reader share one scale. DDC decays it once, AdamW on both sides: "
           "so AdamW decays the size of the logits twice.")


STUDY = harness.Study(__doc__, "overtraining_lm", harness.trained(build), section, figure, config=Config(), full=FULL)
