"""A vision transformer under weight decay that prunes its spare width: AdamW beside DDC-AdamW (DDC, §5.9 and C.10).

    python -m examples.studies vit            # 8 × 8 digits; some minutes on 2 CPU cores

The paper trains 100 classes of ImageNet for 50,000 steps on an accelerator and reports at one weight decay: a lower
validation loss with DDC, level accuracy, and far more dead units; AdamW needs twice the decay to compress at all. Its
text lost the rate, the decays and the size of images: ours are a sweep of decays at one rate, and 797 of scikit-learn's
digits to train on. A hidden unit is *dead* if no patch of no training image makes it
positive. DDC has the multiplicative gauges alone: scales of LayerNorms, and the rescaling of squared-ReLU units.
"""

import dataclasses
import functools
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

import gauge_optax as go
from examples.studies import harness, report
from examples.studies.harness import Arm, Result, Training
from models import digits, vit
from models.vit import Params, ViTConfig

Images = tuple[jax.Array, jax.Array]
DECAYS = (0.3, 1.0, 2.0)


@dataclasses.dataclass(frozen=True)
class Config:
    """Sizes."""

    steps: int = 3_000
    batch: int = 32
    learning_rate: float = 2e-3
    side: int = 8
    patch: int = 2
    width: int = 32
    depth: int = 2
    heads: int = 4
    hidden: int = 128


@functools.cache
def images() -> tuple[Images, Images]:
    """Digits (n, 8, 8, 1) with labels, to train on and held out."""
    train, test = ((jnp.asarray(x.reshape(-1, 8, 8, 1)), jnp.asarray(y)) for x, y in digits.data())
    return train, test


def loss(net: ViTConfig, params: Params, batch: Images) -> jax.Array:
    """Mean cross-entropy."""
    images, labels = batch
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(vit.logits(net, params, images), labels))


Data = tuple[Images, Images, jax.Array]


def make(net: ViTConfig, seed: int) -> tuple[Params, Data]:
    """A start, and the images with the key of batches."""
    return vit.init(net, jax.random.key(seed)), (*images(), jax.random.key_data(jax.random.key(1000 + seed)))


def batch(c: Config, data: Data, step: jax.Array) -> Images:
    """Random training images."""
    (images, labels), _, key = data
    at = jax.random.randint(jax.random.fold_in(jax.random.wrap_key_data(key), step), (c.batch,), 0, len(labels))
    return images[at], labels[at]


READ = 256  # images that activations are read from


def observe(net: ViTConfig, start: Params, params: Params, data: Data) -> dict[str, jax.Array]:
    """Losses, accuracy, dead units, and the spectrum of the stream behind the last block."""
    (images, labels), (held_out, answers), _ = data
    inside = vit.features(net, params, images[:READ])
    stream = inside["stream"].reshape(-1, net.d_model)
    outputs = vit.logits(net, params, held_out)
    return {
        "train_loss": loss(net, params, (images[:READ], labels[:READ])),
        "loss": jnp.mean(optax.softmax_cross_entropy_with_integer_labels(outputs, answers)),
        "accuracy": jnp.mean(jnp.argmax(outputs, -1) == answers),
        "dead_units": jnp.sum(jax.vmap(go.measure.dead_units)(inside["hidden"])).astype(jnp.float32),
        "smallest": go.measure.smallest_singular_value(stream) * len(stream) ** -0.5,
        "effective_rank": go.measure.effective_rank(stream),
    }


def build(c: Config) -> Training:
    """Both optimizers at every decay."""
    net = ViTConfig(c.side, c.patch, 1, digits.CLASSES, c.width, c.depth, c.heads, c.hidden)
    arms = {}
    for decay in DECAYS:
        arms[f"AdamW, decay {decay:g}"] = Arm(optax.adamw(c.learning_rate, weight_decay=decay))
        ours = go.ddc_adamw(c.learning_rate, vit.multiplicative_gauges(), weight_decay=decay)
        arms[f"DDC-AdamW, decay {decay:g}"] = Arm(ours)
    return Training(
        arms, functools.partial(make, net), functools.partial(loss, net), functools.partial(observe, net),
        functools.partial(batch, c),
    )


def _decay(arm: str) -> float:
    return float(arm.rpartition(" ")[2])


def figure(result: Result, path: Path) -> None:
    """Loss, dead units and the smallest singular value at the end over the decay, and the loss along the run."""
    fig, (losses, dead, smallest, along) = report.panels(4, "A vision transformer under weight decay", grid=True)
    panels = ((losses, "loss", "Validation loss at the end", "nats"),
              (dead, "dead_units", "Dead hidden units", "units"),
              (smallest, "smallest", "Smallest singular value of the stream", "per square root of rows"))
    for name, color in (("DDC-AdamW", "tab:blue"), ("AdamW", "tab:red")):
        arms = [arm for arm in result["arms"] if arm.startswith(name)]
        for axis, key, title, unit in panels:
            for n, seed in enumerate(map(str, result["seeds"])):
                ends = [result["cells"][arm][seed]["final"][key] for arm in arms]
                axis.plot([_decay(arm) for arm in arms], ends, "o-", color=color, lw=1.2, label=None if n else name)
            axis.set(title=title, xlabel="weight decay", ylabel=unit, xscale="log")
            axis.set_xticks(DECAYS, [f"{x:g}" for x in DECAYS])
            axis.minorticks_off()
        for arm, style in zip(arms, (":", "--", "-"), strict=True):
            curves = next(iter(result["cells"][arm].values()))["curves"]
            along.plot(curves["step"], curves["loss"], style, color=color, lw=1.2, label=f"decay {_decay(arm):g}")
    losses.set_yscale("log")
    dead.set_yscale("symlog", linthresh=1.0)
    dead.set_ylim(bottom=-0.2)
    smallest.set_yscale("log")
    along.set(title="Validation loss along the run, first seed", xlabel="step", ylabel="nats", yscale="log")
    along.legend(fontsize=8, ncols=2)
    dead.legend()
    report.save_as_is(fig, path)


def section(result: Result) -> str:
    """The table, and what it says."""
    table = report.table(result, {
        "validation loss": report.column(result, "loss", ".3f"),
        "its least along the run": report.column(result, "loss", ".3f", report.smallest),
        "accuracy": report.column(result, "accuracy", ".3f"),
        "training loss": report.column(result, "train_loss"),
        "dead units": report.column(result, "dead_units", ".0f"),
        "smallest singular value": report.column(result, "smallest"),
        "effective rank": report.column(result, "effective_rank", ".1f"),
    })
    c = result["settings"]
    about = (f"797 digits of 8 × 8, the other 1,000 held out; {c['depth']} blocks of width {c['width']}, {c['hidden']} "
             f"hidden units each, {c['steps']:,} steps of {c['batch']} images at the rate {c['learning_rate']:g}. "
             f"{report.made_with(result)} Singular values are of the stream behind the last block, a row per patch of "
             f"{READ} training images, over the square root of the rows.")
    return "\n\n".join([about, table, " ".join(sentences(result))])


PAIRS = [(f"DDC-AdamW, decay {x:g}", f"AdamW, decay {x:g}") for x in DECAYS]


def sentences(result: Result) -> Iterator[str]:
    """The paper's findings, case by case: a case is a decay and a seed."""

    def less(key: str, ours: int = 0) -> list[bool]:
        """Whether DDC, or with `ours` 1 AdamW, ends below the other."""
        return [x for pair in PAIRS for x in report.less(result, pair[ours], pair[1 - ours], key)]

    cases, harder = "pairs of a decay and a seed", "DDC compresses harder at matched decay"
    yield report.paper("at matched decay DDC ends at a lower validation loss than AdamW", less("loss"),
                       "validation loss at the end", cases)
    ours, theirs = (min(np.mean(report.final(result, pair[k], "loss")) for pair in PAIRS) for k in (0, 1))
    yield (f"Each at its best decay, the mean validation loss is {ours:.3f} with DDC and {theirs:.3f} with AdamW.")
    yield report.paper(harder, less("dead_units", 1), "number of dead units", cases)
    for key, by in (("smallest", "smallest singular value"), ("effective_rank", "effective rank")):
        yield report.paper(harder, less(key), f"{by} of the stream behind the last block", cases)


STUDY = harness.Study(__doc__, "vit", harness.trained(build), section, figure, config=Config(),
                       settings=lambda c: dataclasses.asdict(c) | {"images": "", "held_out": 0.1})
