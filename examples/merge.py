"""Merging: how much the loss rises on the line between two networks, before and after alignment.

    python -m examples.merge --out examples/results      # a quarter of an hour on two CPU cores; killed, it goes on
    python -m examples.merge --steps 20 --only "digits: *"      # to try it

Three networks: an MLP on digits (two ReLU layers of 64), a decoder on bytes of text with LayerNorms, ReLU and learned
positions (2 layers, d = 64, 4 heads), and one with RMSNorms, rotary embeddings, SwiGLU and two query heads per key
head. There are three kinds of pairs. *seeds*: two seeds (of the initial weights and of the order of the data), trained
by AdamW. *AdamW and Muon*: two seeds, the second of which Muon trains. *fine-tunings*: one trained network, which is
trained further in two orders of the data.

The second network of a pair is aligned to the first (`go.orbit.align`). An *arm* is the list of gauges that may move
it. In one arm, the element is learned afterwards (`go.orbit.choose`): 100 steps of Adam minimize the training loss of
the mean of both networks. The barrier is the largest rise of the held-out loss above the chord between both ends, at λ
= 0, 0.1, …, 1 of the line (`go.measure.barrier`). Finished pairs are kept in merge.json and not trained again. At the
end merge.png is drawn, and the table is printed.
"""

import dataclasses
import functools
import itertools
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import gauge_optax as go
from examples import data
from examples.studies import baselines, harness, report
from examples.studies.harness import Result
from examples.studies.starts import BATCH, DECAY, LENGTH, WARMUP, batches, held_out
from models import digits, lm

Params = Any

RATE = 1.6e-3
MUON_RATE, LEARNED, LEARNING_RATE = 8e-3, 100, 3e-3
MATCHED = 8  # the number of batches by which `align` matches units in the arm "all, matched by use"
GPT, LLAMA = lm.LMConfig(vocab=data.VOCAB), lm.llama_config(vocab=data.VOCAB, kv_heads=2)
MLP = digits.DigitsConfig(norm="none")


class Net(NamedTuple):
    """A network and its data.

    Attributes:
      initial: seed → initial parameters.
      logits: (parameters, batch) → logits.
      loss: (parameters, batch) → loss.
      batches: (steps, seed) → training batches, stacked.
      held_out: held-out batches, stacked.
      order: the gauges that permute units and heads.
      inner: the gauges that rotate inside a head; () for the MLP.
      whole: all gauges but the permutations.
    """

    initial: Callable[[int], Params]
    logits: Callable[[Params, Any], jax.Array]
    loss: Callable[[Params, Any], jax.Array]
    batches: Callable[[int, int], Any]
    held_out: Any
    order: Sequence[go.Gauge]
    inner: Sequence[go.Gauge]
    whole: Sequence[go.Gauge]


def decoder(config: lm.LMConfig) -> Net:
    """A decoder of this configuration on bytes of text."""
    graph, _ = nnx.split(lm.build(config, nnx.Rngs(0)))
    return Net(
        lambda seed: lm.params_and_loss(config, jax.random.key(seed))[0],
        lambda params, tokens: nnx.merge(graph, params)(tokens[:, :-1]),
        lm.params_and_loss(config, jax.random.key(0))[1], batches, held_out(), lm.permutations(config),
        [gauge for gauge in lm.gauges(config) if gauge.name in ("head_rotation", "rope_torus")],
        lm.whole_gauges(config),
    )


def classifier() -> Net:
    """The MLP on digits. A batch is a pair (images, labels)."""
    init, logits = digits.make(MLP)
    train, test = digits.data()

    def batches(steps: int, seed: int) -> Any:
        picks = np.random.default_rng(seed).integers(len(train[1]), size=(steps, 64))
        return train[0][picks], train[1][picks]

    order, scales = [], []
    for layer, after in (("layers/0", "layers/1"), ("layers/1", "head")):
        up, down = {f"{layer}/kernel": "_ channel", f"{layer}/bias": "channel"}, {f"{after}/kernel": "channel _"}
        order.append(go.permutation(up | down))
        scales.append(go.rescale(up, down))
    return Net(
        lambda seed: init(jax.random.key(seed)), lambda params, batch: logits(params, batch[0]),
        lambda p, batch: digits.cross_entropy(logits(p, batch[0]), batch[1]), batches, tuple(x[None] for x in test),
        order, [], [*scales, go.logit_shift({"head/kernel": "_ vocab", "head/bias": "vocab"})],
    )


NETS: dict[str, Callable[[], Net]] = {
    "digits": classifier, "gpt": lambda: decoder(GPT), "llama": lambda: decoder(LLAMA),
}
net = functools.cache(lambda name: NETS[name]())
ARMS = ("plain", "permutations", "rotations per head", "all gauges", "all, matched by use", "all, learned")
KINDS = ("seeds", "AdamW and Muon", "fine-tunings")
_NONE = 0.01  # a barrier below this, in nats, counts as no barrier
PAIRS = (*(f"{kind} {pair}" for kind in KINDS[:2] for pair in ("42, 142", "42, 242", "142, 242")),
         "fine-tunings of 42", "fine-tunings of 142")


@functools.cache
def program(name: str, muon: bool = False) -> Callable[[Params, Any], Params]:
    """A compiled function: (initial parameters, batches) → the trained parameters."""

    def run(params: Params, batches: Any) -> Params:
        steps = jax.tree.leaves(batches)[0].shape[0]
        rate = MUON_RATE if muon else RATE
        shape = optax.warmup_cosine_decay_schedule(0.0, rate, warmup_steps=min(WARMUP, steps // 2), decay_steps=steps)
        tx = baselines.muon(shape, DECAY) if muon else optax.adamw(shape, weight_decay=DECAY)
        return harness.scanned(tx, net(name).loss, params, batches)[0]

    return jax.jit(run)


@functools.cache
def trained(name: str, seed: int, steps: int, muon: bool = False) -> Params:
    """The trained network of a seed."""
    return program(name, muon)(net(name).initial(seed), net(name).batches(steps, seed))


def networks(name: str, pair: str, steps: int) -> tuple[Params, Params]:
    """The two networks of a pair. `pair` is its name, such as "seeds 42, 142"."""
    numbers = [int(word) for word in pair.replace(",", "").split() if word.isdigit()]
    if not pair.startswith("fine-tunings"):
        return trained(name, numbers[0], steps), trained(name, numbers[1], steps, muon="Muon" in pair)
    start = trained(name, numbers[0], steps)
    first, second = (program(name)(start, net(name).batches(steps, seed)) for seed in (1, 2))
    return first, second


def aligned(name: str, arm: str, a: Params, b: Params) -> Params:
    """The second network b, aligned to a by the gauges of one arm; "all, learned" then lowers the loss half-way."""
    if arm == "plain":
        return b
    own = net(name)
    lists: dict[str, Sequence[go.Gauge]] = {"permutations": own.order, "rotations per head": [*own.inner, *own.order]}
    gauges = lists.get(arm, [*own.whole, *own.order])

    def stream(number: int, seed: int) -> list[Any]:
        batches = own.batches(number, seed)
        return [jax.tree.map(lambda x, n=n: x[n], batches) for n in range(number)]

    def half_way(moved: Params, batch: Any) -> jax.Array:
        return own.loss(go.orbit.interpolate(a, moved, 0.5), batch)

    matched: dict[str, Any] = {"batches": stream(MATCHED, 0), "fn": own.logits} if arm == "all, matched by use" else {}
    group, element = go.product(gauges), go.orbit.align(a, b, gauges, **matched)
    if arm == "all, learned":
        tx = optax.adam(optax.cosine_decay_schedule(LEARNING_RATE, LEARNED))
        element = go.orbit.choose(
            half_way, b, group, tx, steps=LEARNED, batches=stream(LEARNED, 1), start=element, progress=False)
    return group.act(element, b)


def run_pair(name: str, pair: str, steps: int) -> dict[str, Any]:
    """Arm → losses along the line, the barrier, the relative distance of the weights, and the seconds of alignment."""
    a, b = networks(name, pair, steps)

    @jax.jit
    def loss(params: Params) -> jax.Array:
        return jnp.mean(jax.lax.map(functools.partial(net(name).loss, params), net(name).held_out))

    def norm(tree: Params) -> float:
        return float(optax.tree.norm(tree))

    done = {}
    for arm in (arm for arm in ARMS if arm != "rotations per head" or net(name).inner):
        began = time.monotonic()
        end = aligned(name, arm, a, b)
        seconds = round(time.monotonic() - began, 1)
        losses = [float(loss(go.orbit.interpolate(a, end, k / 10))) for k in range(11)]
        done[arm] = {"losses": [round(x, 4) for x in losses], "barrier": round(go.measure.barrier(loss, a, end), 4),
                     "apart": round(norm(optax.tree.sub(end, a)) / norm(a), 4), "seconds": seconds}
    return done


# Results ------------------------------------------------------------------------------------------


def _of(result: Result, name: str, kind: str) -> list[dict[str, Any]]:
    return [cell for key, cell in result["cells"].items() if key.startswith(f"{name}: {kind}")]


def barriers(result: Result, name: str, kind: str) -> dict[str, np.ndarray]:
    """Arm → the barriers of all pairs of this kind, for arms that every pair has."""
    cells = _of(result, name, kind)
    return {arm: np.array([x[arm]["barrier"] for x in cells]) for arm in ARMS if cells and all(arm in x for x in cells)}


def table(result: Result) -> str:
    """A Markdown table of barriers: a row per network and kind of pair, a column per arm."""
    lines = [["net", "pairs", "held-out loss", *ARMS]]
    for name, kind in itertools.product(result["settings"]["nets"], KINDS):
        if cells := _of(result, name, kind):
            found = {arm: f"{x.mean():.3f} ± {x.std():.3f}" for arm, x in barriers(result, name, kind).items()}
            ends = np.mean([cell["plain"]["losses"][k] for cell in cells for k in (0, -1)])
            lines.append([name, f"{len(cells)} of {kind}", f"{ends:.3f}", *(found.get(arm, "") for arm in ARMS)])
    return report.markdown(lines)


def section(result: Result) -> str:
    """The section of this study on the page of all results."""
    settings = result["settings"]
    about = (
        "The second of two networks is moved along its orbit to where it is nearest to the first; its function does "
        "not change. The table has the *barrier*: the largest rise of the held-out loss above the chord, on the line "
        "from one network to the other, mean ± standard deviation over pairs. AdamW where nothing else is said, "
        f"{settings['steps']} steps, float32, {result['machine']}. *digits*: an MLP with two ReLU layers of 64. "
        "*gpt*: a decoder on bytes of text, 2 layers, d = 64, LayerNorm, ReLU, learned positions, 4 heads. *llama*: "
        "the same size, RMSNorm, rotary, SwiGLU, two query heads per key head. *Seeds* differ in initial weights and "
        "in the order of the data. *Fine-tunings* start from one trained network and see the data in two orders. "
        "*Permutations*: of units and heads, as in Git Re-Basin. *Rotations per head*: these, and the rotations inside "
        "heads. *All gauges*: `lm.whole_gauges`, the rotation of the residual stream among them. *Matched by use*: "
        f"units and heads are matched by what they do on {MATCHED} batches, all other gauges by weights. *Learned*: "
        f"from *all gauges*, {LEARNED} steps of Adam on the group's coordinates lower the training loss half-way. "
        f"*AdamW and Muon*: two seeds, of which Muon trains the second, at a rate of {MUON_RATE}."
    )
    said = []
    for name, kind in itertools.product(settings["nets"], KINDS):
        found = {arm: x.mean() for arm, x in barriers(result, name, kind).items()}
        if found and found["plain"] < _NONE:
            said.append(f"{name}, {kind}: there is hardly a barrier to begin with, {found['plain']:.4f}.")
        elif found:
            best = min(found, key=lambda arm: found[arm])
            higher = " and ".join(f"*{arm}*" for arm in found if found[arm] > found["plain"])
            said.append(
                f"{name}, {kind}: the lowest mean barrier is that of *{best}*, {found[best] / found['plain']:.0%} of "
                f"the plain one{f'; that of {higher} is higher than the plain one' if higher else ''}."
            )
    return f"{about}\n\n{table(result)}\n\n" + " ".join(said)


def figure(result: Result, path: Path) -> None:
    """Draws the loss along the line: a row of panels per kind of pair, a column per network, a curve per arm.

    Curves are means over pairs.
    """
    nets = [name for name in result["settings"]["nets"] if _of(result, name, "")]
    size = (4.4 * len(nets), 10)
    fig, axes = report.plt.subplots(len(KINDS), len(nets), figsize=size, layout="constrained", squeeze=False)
    for axis, (kind, name) in zip(axes.flat, itertools.product(KINDS, nets), strict=True):
        for number, arm in enumerate(barriers(result, name, kind)):
            curves, color = np.array([cell[arm]["losses"] for cell in _of(result, name, kind)]), f"C{ARMS.index(arm)}"
            axis.plot(np.linspace(0, 1, 11), curves.mean(0), ".-", color=color, label=arm, zorder=number)
            axis.fill_between(np.linspace(0, 1, 11), curves.min(0), curves.max(0), color=color, alpha=0.12, lw=0)
        axis.set(title=f"{name}, {kind}", xlabel="λ", ylabel="held-out loss")
        axis.grid(alpha=0.3)
    report.save(fig, path)


@dataclasses.dataclass(frozen=True)
class Config:
    """The number of training steps."""

    steps: int = 400


STUDY = harness.Study(
    __doc__, "merge",
    harness.by_name([f"{name}: {pair}" for name in NETS for pair in PAIRS],
                    lambda c, args, name: run_pair(name.partition(": ")[0], name.partition(": ")[2], c.steps)),
    section, figure, config=Config(), seeds=None, partial=True,
    settings=lambda c: {
        "steps": c.steps, "nets": list(NETS), "rate": RATE, "decay": DECAY, "batch": BATCH, "length": LENGTH,
    },
)

if __name__ == "__main__":
    harness.main(STUDY)
