"""Quantization: what a choice of weights on the orbit does to the loss after rounding to few bits.

    python -m examples.quantize --out examples/results    # an hour on two CPU cores; killed, it goes on
    python -m examples.quantize --steps 20 --searched 3 --only "adamw: 42"     # to try it

A small Llama (RMSNorm, rotary, SwiGLU, grouped queries) learns bytes of text, by AdamW and by Muon, from five seeds.
Then its weights are moved along their orbit, so that the function stays, and rounded: symmetric grids, one per output
channel for weights and one per token for activations, as W4A16, W3A16, W4A4 and W8A8 (bits of weights, of activations).
The embedding, the head and the products inside attention are not rounded. Weights are taken *as trained*; with
*planted* outliers: the stream in its principal axes, and three channels behind each norm 20 times larger, with rows of
their readers as much smaller; and *grown*: trained from an embedding in which one channel begins at 8 for every token,
so that the stream itself has an outlier, which no norm's scale takes out. The arms:

* plain: the weights as they are;
* folded: norm scales folded into their readers (`go.orbit.canonicalize`);
* R1: and the residual stream rotated by a random Hadamard matrix (`go.orbit.rotate`);
* R1+R2: and the values of each head;
* chosen: rotations and scales by gradient (`go.orbit.choose`), from R1+R2: 60 steps of Adam on the divergence between
  the rounded and the exact network, with rounding taken as the identity in derivatives, on 8 sequences of the training
  data.

Finished runs are kept in quantize.json; quantize.png is drawn at the end, and the table printed.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
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
from examples.studies.harness import Result
from models import lm

Params = Any

CONFIG = lm.llama_config(vocab=data.VOCAB, d_model=64, layers=3, heads=4, kv_heads=2, d_head=16, d_ff=192)
SEEDS = (42, 142, 242, 342, 442)
RATES = {"adamw": 8e-3, "muon": 1.6e-2}
BATCH, LENGTH, DECAY, WARMUP = 8, 64, 0.1, 30
FORMATS = {"W4A16": (4, 16), "W3A16": (3, 16), "W4A4": (4, 4), "W8A8": (8, 8)}
ARMS = ("plain", "folded", "R1", "R1+R2", "chosen")
STARTS = ("as trained", "planted", "grown")
_EXACT = 16  # bits from which nothing is rounded
_LARGER, _CHANNELS = 20.0, 3  # of the planted outliers
_GROWN = 8.0  # where the outlier of the stream begins


# A network that rounds ----------------------------------------------------------------------------


def rounded(x: jax.Array, axes: int | tuple[int, ...], bits: jax.Array) -> jax.Array:
    """x on a symmetric grid of 2ᵇ − 1 levels, one grid per slice along these axes; derivatives are the identity's."""
    step = jnp.max(jnp.abs(x), axes, keepdims=True) / (2.0 ** (bits - 1) - 1) + 1e-12
    return x + jax.lax.stop_gradient(jnp.where(bits < _EXACT, jnp.round(x / step) * step - x, 0.0))


def rounding(bits: Sequence[Any], seen: list[jax.Array] | None = None) -> Callable[..., jax.Array]:
    """A product of a rounded kernel, a grid per output, and rounded activations, a grid per token.

    Args:
      bits: of weights and of activations; 16 for no rounding.
      seen: gets the activations of every product.
    """

    def product(equation: str, x: jax.Array, kernel: jax.Array) -> jax.Array:
        if seen is not None:
            seen.append(x)
        inputs, output = equation.split("->")
        pair = inputs.split(",")
        summed = (set(pair[0]) & set(pair[1])) - set(output)
        axes = [tuple(n for n, letter in enumerate(letters) if letter in summed) for letters in pair]
        return jnp.einsum(equation, rounded(x, axes[0], jnp.asarray(bits[1])),
                          rounded(kernel, axes[1], jnp.asarray(bits[0])))

    return product


GRAPH, _ = nnx.split(nnx.eval_shape(lambda: lm.build(CONFIG, nnx.Rngs(0))))


def logits(params: Params, tokens: jax.Array, bits: tuple[Any, Any], seen: list[jax.Array] | None = None) -> jax.Array:
    """Those of `models.lm`, with rounded products in its blocks; see `rounding`."""
    model, product = nnx.merge(GRAPH, params), rounding(bits, seen)
    for block in model.blocks:
        for layer in (*vars(block.attn).values(), *vars(block.mlp).values()):
            if isinstance(layer, lm.Linear):
                layer.product = product
    out: jax.Array = model(tokens)
    return out


@jax.jit
def loss(params: Params, batches: jax.Array, bits: Any) -> jax.Array:
    """Mean cross-entropy over stacked batches of tokens."""

    def of(tokens: jax.Array) -> jax.Array:
        out = logits(params, tokens[:, :-1], bits)
        return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(out, tokens[:, 1:]))

    return jnp.mean(jax.lax.map(of, batches))


@jax.jit
def divergence(params: Params, exact: Params, tokens: jax.Array, bits: Any) -> jax.Array:
    """Mean of KL(exact ‖ rounded) per token."""
    p, q = (jax.nn.log_softmax(logits(x, tokens, b)) for x, b in ((exact, (_EXACT, _EXACT)), (params, bits)))
    return jnp.mean(jnp.sum(jnp.exp(p) * (p - q), -1))


@jax.jit
def statistics(params: Params, tokens: jax.Array) -> dict[str, jax.Array]:
    """Largest excess kurtosis behind a norm; signal over rounding error at 4 bits, decibels (means)."""
    seen: list[jax.Array] = []
    logits(params, tokens, (_EXACT, _EXACT), seen)

    def kurtosis(x: jax.Array) -> jax.Array:
        x = x - jnp.mean(x)
        return jnp.mean(x**4) / jnp.mean(x**2) ** 2 - 3.0

    def sqnr(x: jax.Array, axis: int) -> jax.Array:
        return 10 * jnp.log10(jnp.sum(x**2) / jnp.sum((x - rounded(x, axis, jnp.asarray(4))) ** 2))

    kernels = [
        own["kernel"].reshape(-1, CONFIG.d_model) if name == "out" else own["kernel"]
        for block in params["blocks"].values() for part in ("attn", "mlp") for name, own in block[part].items()
    ]
    return {
        # A block has seven products; its norms are read by the first and by the fifth.
        "kurtosis": jnp.max(jnp.stack([kurtosis(x) for x in [*seen[0::7], *seen[4::7]]])),
        "SQNR of activations": jnp.mean(jnp.stack([sqnr(x.reshape(*x.shape[:2], -1), -1) for x in seen])),
        "SQNR of weights": jnp.mean(jnp.stack([sqnr(x, 0) for x in kernels])),
    }


# Points of the orbit ------------------------------------------------------------------------------


def optimizer(name: str, steps: int) -> optax.GradientTransformation:
    """AdamW, or Optax's Muon with one matrix per kernel; warm-up, then a cosine to zero."""
    rate = optax.warmup_cosine_decay_schedule(0.0, RATES[name], min(WARMUP, steps // 2), steps)
    return optax.adamw(rate, weight_decay=DECAY) if name == "adamw" else baselines.muon(rate, DECAY)


@functools.cache
def program(name: str, steps: int) -> Any:
    """Trains from parameters, over stacked batches; compiled once."""
    tx, plain = optimizer(name, steps), lm.params_and_loss(CONFIG, jax.random.key(0))[1]
    return jax.jit(lambda params, batches: harness.scanned(tx, plain, params, batches)[0])


GAUGES = lm.whole_gauges(CONFIG, linear=False)
NORMS, STREAM = ([g for g in GAUGES if g.name == name] for name in ("norm_scale", "residual_rotation"))
VALUES = [g for g in GAUGES if g.name == "head_rotation"]
SCALES = [g for g in GAUGES if g.name == "rescale"]


def planted(params: Params) -> Params:
    """The same function with outliers: the stream in principal axes, and channels of norms 20 times larger."""
    params = go.orbit.canonicalize(params, [*NORMS, *STREAM])
    group = go.product(NORMS)

    def larger(logs: jax.Array) -> jax.Array:
        return logs.at[..., :_CHANNELS].set(jnp.log(_LARGER))

    return group.act(jax.tree.map(larger, group.identity(params)), params)


def points(params: Params) -> dict[str, Params]:
    """Arm → weights of the same function; all but the chosen ones."""
    folded = go.orbit.canonicalize(params, NORMS)
    turned = go.orbit.rotate(folded, STREAM)
    return {"plain": params, "folded": folded, "R1": turned, "R1+R2": go.orbit.rotate(turned, VALUES)}


def chosen(params: Params, bits: tuple[int, int], batches: Sequence[jax.Array], steps: int) -> Params:
    """The point at which rounding to these bits changes the outputs least, from `params`, whose norms are folded.

    Scales behind norms are free again, and so are the rotations and the factors between up and down.
    """
    group = go.product([*STREAM, *NORMS, *VALUES, *SCALES])

    def objective(moved: Params, batch: Any) -> jax.Array:
        exact, tokens, bits = batch
        return divergence(moved, exact, tokens, bits)

    tx = optax.adam(optax.cosine_decay_schedule(1e-2, max(1, steps)))
    given = [(params, tokens[:, :-1], jnp.asarray(bits)) for tokens in batches]
    element = go.orbit.choose(objective, params, group, tx, steps=steps, batches=given, progress=False)
    return group.act(element, params)


def run_cell(name: str, seed: int, steps: int, searched: int) -> dict[str, Any]:
    """Start → the exact loss, and arm → the rise of the loss per format, and statistics."""
    train, held = data.batches(LENGTH, BATCH, seed=seed)
    stacked = np.stack([train[n] for n in range(steps)])
    initial = lm.params_and_loss(CONFIG, jax.random.key(seed))[0]
    embedding = {"embedding": initial["embed"]["embedding"].at[:, 0].set(_GROWN)}
    held_out, search = jnp.asarray(np.stack(held)), [jnp.asarray(train[steps + n]) for n in range(4)]
    done = {}
    for start in STARTS:
        params = program(name, steps)(initial | {"embed": embedding} if start == "grown" else initial, stacked)
        params = planted(params) if start == "planted" else params
        exact = float(loss(params, held_out, (_EXACT, _EXACT)))
        arms = points(params)
        rows: dict[str, Any] = {arm: statistics(p, held_out[0][:, :-1]) for arm, p in arms.items()}
        rows = {arm: {key: round(float(x), 3) for key, x in row.items()} for arm, row in rows.items()}
        rows["chosen"] = {}
        for label, bits in FORMATS.items():
            best = chosen(arms["R1+R2"], bits, search, searched)
            moved = abs(float(loss(best, held_out, (_EXACT, _EXACT))) - exact)
            assert moved < 1e-3, f"the function moved by {moved}"
            for arm, p in [*arms.items(), ("chosen", best)]:
                rows[arm][label] = round(float(loss(p, held_out, bits)) - exact, 5)
        done[start] = {"loss": round(exact, 5), "arms": rows}
    return done


# Results ------------------------------------------------------------------------------------------


def rises(result: Result, name: str, start: str, label: str) -> dict[str, np.ndarray]:
    """Arm → the rise of the loss in one format, seed by seed."""
    cells = [cell for key, cell in result["cells"].items() if key.startswith(f"{name}: ")]
    return {arm: np.array([cell[start]["arms"][arm][label] for cell in cells]) for arm in ARMS if cells}


def table(result: Result) -> str:
    """Markdown: a row per optimizer, start and format, a column per arm."""
    lines = [["optimizer", "weights", "bits", *ARMS]]
    for name in result["settings"]["optimizers"]:
        for start in STARTS:
            for label in FORMATS:
                found = rises(result, name, start, label)
                if found:
                    lines.append([name, start, label, *(f"{x.mean():.4f} ± {x.std():.4f}" for x in found.values())])
    return report.markdown(lines)


def spread(result: Result) -> str:
    """Markdown: kurtosis and signal over error, a row per optimizer, start and arm."""
    columns = ("kurtosis", "SQNR of activations", "SQNR of weights")
    sizes = [f"{column}, dB" for column in columns[1:]]
    lines = [["optimizer", "weights", "arm", "largest excess kurtosis behind a norm", *sizes]]
    for name in result["settings"]["optimizers"]:
        cells = [cell for key, cell in result["cells"].items() if key.startswith(f"{name}: ")]
        for start in STARTS:
            for arm in ARMS[:-1] if cells else ():
                values = [np.mean([cell[start]["arms"][arm][c] for cell in cells]) for c in columns]
                lines.append([name, start, arm, *(f"{x:.1f}" for x in values)])
    return report.markdown(lines)


def verdicts(result: Result) -> str:
    """One sentence per claim of the papers, from the numbers."""
    said = []

    def compare(claim: str, start: str, labels: Sequence[str], better: str, worse: str) -> None:
        cells = []
        for name in result["settings"]["optimizers"]:
            for label in labels:
                found = rises(result, name, start, label)
                if found:
                    won = int(np.sum(found[better] < found[worse]))
                    ratio = float(found[better].mean() / found[worse].mean())
                    cells.append((won == len(found[better]), f"{name} {label} {ratio:.2f} ({won})"))
        if cells:
            shows = sum(shown for shown, _ in cells)
            said.append(
                f"- {claim}, {start}: by the rise of the held-out loss, this shows in {shows} of {len(cells)} cells. "
                f"Rise under *{better}* over that under *{worse}*: {', '.join(text for _, text in cells)}."
            )

    few = [label for label in FORMATS if label != "W8A8"]  # with 8 bits, hardly any loss is left to save
    for start in STARTS:
        compare("A rotation of the stream helps (QuaRot)", start, few, "R1", "folded")
        compare("It helps against the weights as they are", start, few, "R1", "plain")
        compare("Rotations of values help too (QuaRot)", start, few, "R1+R2", "R1")
        compare("Chosen points beat a random one (SpinQuant; scales are chosen too)", start, few, "chosen", "R1+R2")
        compare("Folding norms helps (SmoothQuant's case, not its scales)", start, list(FORMATS), "folded", "plain")
    eight = [
        x.mean() for name in result["settings"]["optimizers"] for start in STARTS
        for arm, x in rises(result, name, start, "W8A8").items() if (arm, start) != ("plain", "planted")
    ]
    if eight:
        said.append(f"- W8A8 costs at most {max(eight):.4f} nats, except as planted: too little to compare arms by.")
    return "\n".join(said)


def section(result: Result) -> str:
    """Its part of the page of all results."""
    settings = result["settings"]
    cells = len(result["cells"])
    about = (
        "Weights are moved along their orbit, so that no output changes, and then rounded. The table has the rise of "
        "the held-out loss, in nats per byte, mean ± standard deviation over seeds. W4A16: four bits for weights, a "
        "grid per output channel; activations exact. W4A4: and four bits for activations, a grid per token. Embedding, "
        f"head and attention's scores are exact. A Llama of {CONFIG.layers} layers, d = {CONFIG.d_model}, "
        f"{settings['steps']} steps, {cells} runs, {result['machine']}. *Planted*: the stream in its principal axes, "
        f"and {_CHANNELS} channels behind each norm {_LARGER:.0f} times larger, their readers' rows smaller. *Grown*: "
        f"trained from an embedding whose first channel begins at {_GROWN:g} for every token. *Folded*: norm scales "
        "in their readers. *R1*: a random Hadamard rotation of the stream. *R2*: of values, per head. "
        f"*Chosen*: rotations and scales by gradient, {settings['searched']} steps from R1+R2."
    )
    why = (
        "A ratio below 1 is an improvement; behind it stands the number of seeds in which the first of both arms had "
        "the lower loss. A claim *shows* in a cell if by the rise of the held-out loss the first arm is better in all "
        "seeds, as in 1 of 32 cells by chance. The planted channels are "
        "scales of norms, which folding takes out exactly; what R1 gains beyond is over the principal axes, not over "
        "these channels. The grown channel is in the stream, where folding does not reach it. The random rotation is "
        "one draw for all seeds; the chosen one is searched for each format. Muon's networks reach a lower loss, so "
        "that rises compare arms, not optimizers."
    )
    return f"{about}\n\n{table(result)}\n\n{why}\n\n{verdicts(result)}\n\n{spread(result)}"


def figure(result: Result, path: Path) -> None:
    """Rise of the loss: a row per start, a column per format, a bar per arm and optimizer."""
    names = [n for n in result["settings"]["optimizers"] if rises(result, n, STARTS[0], "W4A4")]
    fig, axes = report.plt.subplots(len(STARTS), len(FORMATS), figsize=(12, 9), layout="constrained")
    for row, start in zip(axes, STARTS, strict=True):
        for axis, label in zip(row, FORMATS, strict=True):
            for k, name in enumerate(names):
                found = rises(result, name, start, label)
                places = np.arange(len(ARMS)) + 0.38 * k
                axis.bar(places, [x.mean() for x in found.values()], 0.36, color=f"C{k}", label=name)
                for place, x in zip(places, found.values(), strict=True):
                    axis.plot(np.full(len(x), place), x, ".", color="black", ms=3)
            axis.set(title=f"{label}, {start}", xticks=np.arange(len(ARMS)) + 0.19)
            axis.set_xticklabels(ARMS, rotation=35)
            axis.grid(axis="y", alpha=0.3)
        row[0].set_ylabel("rise of the held-out loss, nats")
    axes[0][0].legend(frameon=False)
    report.save_as_is(fig, path)


@dataclasses.dataclass(frozen=True)
class Config:
    """Steps of training, and of the search for a point."""

    steps: int = 600
    searched: int = 60


CELLS = {f"{name}: {seed}": (name, seed) for seed in SEEDS for name in RATES}
STUDY = harness.Study(
    __doc__, "quantize", harness.by_name(CELLS, lambda c, args, name: run_cell(*CELLS[name], c.steps, c.searched)),
    section, figure, config=Config(), seeds=None, partial=True,
    settings=lambda c: {
        "steps": c.steps, "searched": c.searched, "optimizers": list(RATES), "rates": RATES, "decay": DECAY,
        "batch": BATCH, "length": LENGTH,
    },
)

if __name__ == "__main__":
    harness.main(STUDY)
