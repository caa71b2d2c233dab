"""What a feed-forward block is for: addition of digits beside addition modulo a prime (DDC, C.13, after C.14).

    OPENBLAS_NUM_THREADS=1 XLA_FLAGS=--xla_cpu_multi_thread_eigen=false python -m examples.studies digit_addition
    python -m examples.studies digit_addition --full     # the paper's steps and prime

The first takes some minutes on 2 CPU cores; without these settings a reading of singular values waits for threads.

Two tasks, AdamW and DDC-AdamW with all gauges on each. Addition modulo a prime has a circuit that can route around the
feed-forward block; the paper finds that DDC lets weight decay prune the block, and that this is why activations end at
a lower effective rank than AdamW's. Addition of numbers written as digits is memorised, has no such circuit, and there
DDC's rank is the higher one.

The *pruning test* takes a trained network without its feed-forward block and reads how much it still knows. The *scale*
of the block is the mean over hidden units of |γ ∘ u|²·|d|, with the LayerNorm's scale γ, the unit's incoming weights u
and its outgoing ones d: no gauge changes it. Ranks are read behind the attention and behind the block. The paper runs
one seed for 10,000 steps; its text lost the prime, the rate and the decay, and says nothing of the digits: ours are
below. The rate is from a sweep of AdamW on seed 42 over 1,000 steps, by the mean along the run of two accuracies, on
held-out pairs and on the digits to memorise: 0.508 at 0.001, 0.578 at 0.003, 0.506 at 0.01. The decay was not swept.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import gauge_optax as go
from examples.studies import harness, report
from examples.studies.harness import Arm, Loss, Observe, Result, Training
from examples.studies.report import Panel
from models import grokking, lm
from models.grokking import GrokConfig

Params = Any
Data = tuple[Any, Any]
Problem = tuple[Sequence[go.Gauge], Callable[[int], tuple[Params, Data]], Loss, Observe]
MODULAR, DIGITS = "modular", "digits"
ADAMW, DDC = "AdamW", "DDC-AdamW"


@dataclass(frozen=True)
class Config:
    """Sizes; `sums` is the number of additions of digits to memorise."""

    steps: int = 2_000
    p: int = 31
    share: float = 0.5
    width: int = 64
    hidden: int = 256
    heads: int = 4
    places: int = 3
    sums: int = 128
    rate: float = 3e-3
    decay: float = 1.0


FULL = Config(steps=10_000, p=113, share=0.3, width=128, hidden=512, sums=2_048, rate=1e-3)


# The tasks --------------------------------------------------------------------------------------------


def modular(c: Config) -> Problem:
    """Addition modulo p by the network of `models/grokking.py`, with squared ReLU."""
    network = GrokConfig(p=c.p, d_model=c.width, heads=c.heads, d_ff=c.hidden, mlp="relu2", share=c.share)

    def read(params: Params, pairs: grokking.Pairs) -> dict[str, jax.Array]:
        block = params["blocks"][0]
        inside = grokking.features(network, params, pairs[0])
        added = jnp.square(jax.nn.relu(inside["hidden"])) @ block["mlp"]["down"]["kernel"]
        after = inside["streams"][-1]
        before = after - added - block["mlp"]["down"]["bias"]
        return readings(before, after, lambda x: x @ params["lm_head"]["kernel"], pairs[1], block)

    def make(seed: int) -> tuple[Params, Data]:
        return grokking.init(network, jax.random.key(seed)), grokking.data(network, seed)

    def loss(params: Params, data: Data) -> jax.Array:
        return grokking.loss(network, params, data[0])

    return grokking.gauges(network), make, loss, functools.partial(observe, read)


VOCAB, PLUS, EQUALS = 12, 10, 11


def digits(c: Config) -> Problem:
    """Addition of numbers of `places` digits by one block of `models/lm.py`; the sum's digits are predicted."""
    length = 3 * c.places + 2  # a + b = sum, which has a digit more; the last one is no input
    network = lm.LMConfig(
        vocab=VOCAB, d_model=c.width, layers=1, heads=c.heads, kv_heads=c.heads, d_head=c.width // c.heads,
        d_ff=c.hidden, max_len=length, mlp="relu2",
    )
    graph, _ = nnx.split(lm.build(network, nnx.Rngs(0)))
    answer = slice(2 * c.places + 1, None)  # positions behind which a digit of the sum stands

    def streams(params: Params, tokens: jax.Array) -> tuple[jax.Array, jax.Array, Callable[..., jax.Array]]:
        model = nnx.merge(graph, params)
        embedding, block = model.embed.embedding[...], model.blocks[0]
        x = embedding[tokens[:, :-1]] + params["pos"]["embedding"]
        before = x + block.attn(block.norm1(x))
        after = before + block.mlp(block.norm2(before))
        return before[:, answer], after[:, answer], lambda x: model.lm_head(model.final_norm(x), embedding)

    def loss(params: Params, data: Data) -> jax.Array:
        _, after, out = streams(params, data[0])
        labels = data[0][:, 1:][:, answer]
        return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(out(after), labels))

    def read(params: Params, tokens: jax.Array) -> dict[str, jax.Array]:
        before, after, out = streams(params, tokens)
        return readings(before, after, out, tokens[:, 1:][:, answer], params["blocks"][0])

    def make(seed: int) -> tuple[Params, Data]:
        return lm.params_and_loss(network, jax.random.key(seed))[0], sums(c, seed)

    return lm.gauges(network), make, loss, functools.partial(observe, read)


def sums(c: Config, seed: int) -> tuple[jax.Array, jax.Array]:
    """Rows of digits `a + b = sum`, to memorise and held out."""
    numbers = np.random.default_rng(seed).integers(0, 10**c.places, (2 * c.sums, 2))

    def written(x: np.ndarray, places: int) -> np.ndarray:
        return x[:, None] // 10 ** np.arange(places)[::-1] % 10

    columns = [written(numbers[:, 0], c.places), np.full((len(numbers), 1), PLUS), written(numbers[:, 1], c.places),
               np.full((len(numbers), 1), EQUALS), written(numbers.sum(1), c.places + 1)]
    rows = jnp.asarray(np.concatenate(columns, 1))
    return rows[: c.sums], rows[c.sums :]


def build(c: Config) -> Training:
    """Both tasks, each under both optimizers at one rate and decay."""
    arms: dict[str, Arm] = {}
    for task, (gauges, make, loss, read) in ((MODULAR, modular(c)), (DIGITS, digits(c))):
        optimizers = {
            ADAMW: optax.adamw(c.rate, b2=0.98, weight_decay=c.decay),
            DDC: go.ddc_adamw(c.rate, gauges, b2=0.98, weight_decay=c.decay),
        }
        arms |= {f"{task}, {name}": Arm(tx, loss, read, make) for name, tx in optimizers.items()}
    return Training(arms, make, loss, read)


# What is read -----------------------------------------------------------------------------------------


def readings(
    before: jax.Array, after: jax.Array, out: Callable[[jax.Array], jax.Array], labels: jax.Array, block: Params
) -> dict[str, jax.Array]:
    """Losses and accuracies with the feed-forward block and without it, its scale, and ranks on both sides of it."""
    found = {}
    for name, stream in (("", after), ("pruned_", before)):
        logits = out(stream)
        found[f"{name}loss"] = jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, labels))
        found[f"{name}accuracy"] = jnp.mean(jnp.argmax(logits, -1) == labels)
    incoming = jnp.linalg.norm(block["norm2"]["scale"][:, None] * block["mlp"]["up"]["kernel"], axis=0)
    outgoing = jnp.linalg.norm(block["mlp"]["down"]["kernel"], axis=1)
    found["scale"] = jnp.mean(jnp.square(incoming) * outgoing)
    for name, stream in (("rank_before", before), ("rank_after", after)):
        found[name] = go.measure.effective_rank(stream.reshape(-1, stream.shape[-1]))
    return found


def observe(
    read: Callable[..., dict[str, jax.Array]], start: Params, params: Params, data: Data
) -> dict[str, jax.Array]:
    """All readings on the training data, and loss and accuracies on the data held out."""
    train, test = (read(params, part) for part in data)
    return train | {f"test_{key}": test[key] for key in ("loss", "accuracy", "pruned_accuracy")}


# Results ----------------------------------------------------------------------------------------------

SPARE = 0.05  # how much accuracy the pruned network may lose for the block to count as dispensable


figure = report.figure("Addition modulo a prime and of digits: the feed-forward block under weight decay",
                       Panel("rank_after", "Effective rank behind the block", "linear"),
                       Panel("scale", "Scale of the block"),
                       Panel("test_accuracy", "Accuracy held out", "linear"),
                       Panel("pruned_accuracy", "Training accuracy without the block", "linear"))


def section(result: Result) -> str:
    """The table, and what it says."""
    c = Config(**result["settings"])
    table = report.table(result, {
        "training accuracy": report.column(result, "accuracy", ".2f"),
        "held out": report.column(result, "test_accuracy", ".2f"),
        "training, without the block": report.column(result, "pruned_accuracy", ".2f"),
        "held out, without the block": report.column(result, "test_pruned_accuracy", ".2f"),
        "scale of the block": report.column(result, "scale"),
        "rank before the block": report.column(result, "rank_before", ".1f", report.settled),
        "rank behind it": report.column(result, "rank_after", ".1f", report.settled),
    })
    about = (f"Addition modulo {c.p} from {c.share:.0%} of all pairs, and of two numbers of {c.places} digits from "
             f"{c.sums} examples; one block of width {c.width}, {c.steps:,} steps with all examples, rate {c.rate:g}, "
             f"decay {c.decay:g}. Ranks are medians over the last quarter of the run, of activations on the training "
             f"data. {report.made_with(result)}")
    return "\n\n".join([about, table, " ".join(sentences(result))])


def sentences(result: Result) -> Iterator[str]:
    """The paper's findings."""
    nodes = {"rank_before": "effective rank before the block", "rank_after": "effective rank behind the block"}
    for key, by in nodes.items():
        for task, lower, higher, finding in (
            (MODULAR, DDC, ADAMW, "on addition modulo a prime DDC ends at a lower rank than AdamW"),
            (DIGITS, ADAMW, DDC, "on addition of digits DDC ends at a higher rank than AdamW"),
        ):
            less = report.less(result, f"{task}, {lower}", f"{task}, {higher}", key, report.settled)
            yield report.paper(finding, less, by)
    for arm in result["arms"]:
        pairs = zip(report.final(result, arm, "accuracy"), report.final(result, arm, "pruned_accuracy"), strict=True)
        lost = [a - b for a, b in pairs]
        yield (f"Without its block, {arm} loses {report.span(lost, '.2f')} of training accuracy: at most {SPARE:g} "
               f"{report.on_seeds([x <= SPARE for x in lost])}.")
    smaller = report.less(result, f"{MODULAR}, {DDC}", f"{MODULAR}, {ADAMW}", "scale")
    yield report.paper("the gauge lets weight decay collapse the block", smaller, "scale of the block, beside AdamW's")

STUDY = harness.Study(__doc__, "digit_addition", harness.trained(build), section, figure, config=Config(), full=FULL)
