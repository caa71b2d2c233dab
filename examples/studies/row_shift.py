"""The logit shift of a grokking transformer (DDC, C.1): which optimizers move what no output of the readout depends on.

    python -m examples.studies row_shift            # some minutes on one core
    python -m examples.studies row_shift --full     # the paper's size: a GPU, or hours

A one-block transformer learns (a + b) mod p (Nanda et al. 2023) with full batches. Adding one vector to every column of
the unembedding, (d, vocab), adds one number to all logits, which the softmax removes. Adam moves weights in this
direction all the same. The usual remedy is a loss on the level of logits (Z-loss). The gauge removes the direction from
steps. Prints for each arm how far the mean column has moved from its start (relative to its norm there), its norm at
the end, accuracies and losses.
"""

import functools
import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import optax

import gauge_optax as go
from examples.studies import baselines, harness, report
from examples.studies.harness import Arm, Result, Training
from examples.studies.report import Panel

Params = dict[str, jax.Array]
Data = dict[str, jax.Array]
GROKKED = 0.9
MODE = "the mean column of the unembedding"


@dataclass(frozen=True)
class Config:
    """Sizes, smaller than the paper's, so that 15 runs take minutes."""

    steps: int = 4000
    modulus: int = 41
    width: int = 32
    heads: int = 4
    hidden: int = 128
    train_share: float = 0.7
    learning_rate: float = 1e-3
    b2: float = 0.98
    weight_decay: float = 1.0
    z_palm: float = 1e-4
    z_strong: float = 1e-1  # the paper's text does not give its value


FULL = Config(steps=8000, modulus=113, width=128, hidden=512, train_share=0.3)


def weights(c: Config, key: jax.Array) -> Params:
    """The initial weights: normal matrices of variance 1/fan-in. Every LayerNorm has a scale and a bias."""
    square = dict.fromkeys(("query", "key", "value", "out"), (c.width, c.width))
    shapes = {"embed": (c.modulus, c.width), "position": (2, c.width), **square, "up": (c.width, c.hidden),
              "down": (c.hidden, c.width), "unembed": (c.width, c.modulus)}
    fan_in = {name: c.width if name in ("embed", "position") else shape[0] for name, shape in shapes.items()}
    keys = dict(zip(shapes, jax.random.split(key, len(shapes)), strict=True))
    params = {name: jax.random.normal(keys[name], shape) * fan_in[name] ** -0.5 for name, shape in shapes.items()}
    params |= {f"{norm}_scale": jnp.ones(c.width) for norm in ("norm1", "norm2")}
    params |= {"up_bias": jnp.zeros(c.hidden), "down_bias": jnp.zeros(c.width)}
    return params | {f"{norm}_bias": jnp.zeros(c.width) for norm in ("norm1", "norm2")}


def logits(params: Params, pairs: jax.Array, heads: int) -> jax.Array:
    """The logits of the sum, (batch, p), at the second position of pairs of numbers (batch, 2)."""

    def norm(x: jax.Array, name: str) -> jax.Array:
        return jax.nn.standardize(x, epsilon=1e-5) * params[f"{name}_scale"] + params[f"{name}_bias"]

    def split(x: jax.Array) -> jax.Array:
        return x.reshape(*x.shape[:-1], heads, -1)

    # Attention has only 2p different inputs (a number at a position). Project each once, and look them up for all
    # pairs.
    table = params["embed"] + params["position"][:, None]
    read = norm(table, "norm1")
    key, value = (split(read @ params[name]) for name in ("key", "value"))
    query = split(read[1] @ params["query"])
    key, value = (jnp.stack([x[0][pairs[:, 0]], x[1][pairs[:, 1]]], axis=1) for x in (key, value))
    scores = jnp.einsum("bhe,bthe->bht", query[pairs[:, 1]], key) * key.shape[-1] ** -0.5
    mixed = jnp.einsum("bht,bthe->bhe", jax.nn.softmax(scores, axis=-1), value)
    x = table[1][pairs[:, 1]] + mixed.reshape(len(pairs), -1) @ params["out"]
    hidden = jax.nn.relu(norm(x, "norm2") @ params["up"] + params["up_bias"])
    return (x + hidden @ params["down"] + params["down_bias"]) @ params["unembed"]


def make(c: Config, seed: int) -> tuple[Params, Data]:
    """Draws initial weights, and divides all pairs into those to train on and those to test on."""
    start, split = jax.random.split(jax.random.key(seed))
    pairs = jnp.stack(jnp.meshgrid(*2 * [jnp.arange(c.modulus)]), axis=-1).reshape(-1, 2)
    pairs = jax.random.permutation(split, pairs)
    cut = int(c.train_share * len(pairs))
    return weights(c, start), {"train": pairs[:cut], "test": pairs[cut:]}


def cross_entropy(out: jax.Array, pairs: jax.Array) -> jax.Array:
    """The cross-entropy of logits with the sums of the pairs as labels, averaged over pairs."""
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(out, jnp.sum(pairs, axis=1) % out.shape[-1]))


def loss(params: Params, data: Data, c: Config, z_strength: float = 0.0) -> jax.Array:
    """The cross-entropy plus a Z-loss of this strength."""
    out = logits(params, data["train"], c.heads)
    total = cross_entropy(out, data["train"])
    return total + baselines.z_loss(out, z_strength) if z_strength else total


def observe(start: Params, params: Params, data: Data, c: Config) -> dict[str, jax.Array]:
    """What is measured along a run: losses, accuracies, and the unembedding's mean column relative to its start."""
    numbers: dict[str, jax.Array] = {}
    for part in ("train", "test"):
        out = logits(params, data[part], c.heads)
        right = jnp.argmax(out, axis=-1) == jnp.sum(data[part], axis=1) % c.modulus
        numbers |= {f"{part}_loss": cross_entropy(out, data[part]), f"{part}_accuracy": jnp.mean(right)}
    before, now = (jnp.mean(tree["unembed"], axis=1) for tree in (start, params))
    size = jnp.linalg.norm(before)
    return numbers | {"drift": jnp.linalg.norm(now - before) / size, "mode": jnp.linalg.norm(now) / size}


def build(c: Config) -> Training:
    """The arms: AdamW, AdamW with a weak and a strong Z-loss, OrthoGrad with Adam, and DDC with this one gauge."""
    shift = go.logit_shift({"unembed": "_ vocab"})
    adamw = optax.adamw(c.learning_rate, b2=c.b2, weight_decay=c.weight_decay)
    plain = functools.partial(loss, c=c)
    arms = {
        "AdamW": Arm(adamw),
        "AdamW, PaLM Z-loss": Arm(adamw, functools.partial(plain, z_strength=c.z_palm)),
        "AdamW, strong Z-loss": Arm(adamw, functools.partial(plain, z_strength=c.z_strong)),
        # Without decay, as its authors run it: OrthoGrad removes the gradients that would balance the decay of weights.
        "OrthoGrad + Adam": Arm(optax.chain(baselines.orthogonal_gradient(), optax.adam(c.learning_rate, b2=c.b2))),
        "DDC": Arm(go.ddc_adamw(c.learning_rate, shift, b2=c.b2, weight_decay=c.weight_decay)),
    }
    return Training(arms, functools.partial(make, c), plain, functools.partial(observe, c=c))


figure = report.figure(
    "Modular addition: the direction that shifts all logits alike",
    Panel("test_accuracy", "Test accuracy", "linear"),
    Panel("mode", "Norm of the mean column, relative to its start", ylabel="‖mean‖ / ‖mean at 0‖"),
    Panel("drift", "Distance of the mean column from its start", ylabel="relative to its norm there", drift=True),
)


def section(result: Result) -> str:
    """The results as Markdown: a table, and sentences about it."""
    c = Config(**result["settings"])
    columns = {
        "drift": report.column(result, "drift", at=report.largest),
        "mode's norm at the end": report.column(result, "mode"),
        "train loss, settled": report.column(result, "train_loss", at=report.settled),
        "test accuracy, settled": report.column(result, "test_accuracy", ".3f", report.settled),
    }
    return "\n\n".join([
        f"One block, p = {c.modulus}, d = {c.width}, {c.heads} heads, hidden {c.hidden}, trained on "
        f"{c.train_share:.0%} of the pairs, {c.steps:,} steps, learning rate {c.learning_rate}, b2 {c.b2}, weight "
        f"decay {c.weight_decay}; Z-loss {c.z_palm:g}, and {c.z_strong:g} as the strong one (the paper's is lost). "
        f"{report.made_with(result)}",
        "Drift and norm are relative to the norm at the start; settled is the median over the last quarter.",
        report.table(result, columns),
        f"{report.containment(result, 'AdamW', 'DDC', 'drift', MODE, 'train_loss', report.settled)} "
        f"{_parted(result)} {_leak(result, c)} {_z_losses(result)}",
    ])


def _parted(result: Result) -> str:
    """A sentence that says until which step AdamW and DDC train the same function."""
    steps = []
    for ours, theirs in zip(*(result["cells"][arm].values() for arm in ("DDC", "AdamW")), strict=True):
        losses = zip(ours["curves"]["train_loss"], theirs["curves"]["train_loss"], strict=True)
        apart = [n for n, (a, b) in zip(ours["curves"]["step"], losses, strict=True) if abs(a / b - 1) > 0.1]
        steps.append(apart[0] if apart else ours["curves"]["step"][-1])
    return ("Without rounding the two would have one loss curve, since the step's other part is AdamW's (a test has it "
            f"in float64); in float32 they agree within 10 % up to step {report.listed(steps, ',d')}.")


def _leak(result: Result, c: Config) -> str:
    decayed = math.exp(-c.learning_rate * c.weight_decay * c.steps)
    mode = report.final(result, "AdamW", "mode")
    return f"Decay alone would leave {decayed:.2g} of AdamW's mean column; it ends at {report.span(mode)}, leaked in."


def _z_losses(result: Result) -> str:
    palm, strong = (f"AdamW, {which} Z-loss" for which in ("PaLM", "strong"))
    growth = {arm: _beside_adamw(result, arm) for arm in (palm, strong)}
    fails = [accuracy < GROKKED for accuracy in report.settled(result, strong, "test_accuracy")]
    contained = [small < 1 and fail for small, fail in zip(growth[strong], fails, strict=True)]
    return " ".join([
        f"The mode ends {report.span(growth[palm])} times as large under PaLM's Z-loss as under plain AdamW, "
        f"{report.span(growth[strong])} times under the strong one, which fails to grok {report.on_seeds(fails)}.",
        report.paper("PaLM's Z-loss grows the mode more than no remedy at all", [x > 1 for x in growth[palm]],
                     f"the norm of {MODE} at the end"),
        report.paper("strong Z-loss contains the mode only by failing to grok", contained,
                     f"that norm, below AdamW's, and test accuracy, below {GROKKED}"),
    ])


def _beside_adamw(result: Result, arm: str) -> list[float]:
    return report.ratios(report.final(result, arm, "mode"), report.final(result, "AdamW", "mode"))

STUDY = harness.Study(__doc__, "row_shift", harness.trained(build), section, figure, config=Config(), full=FULL)
