"""A vision transformer under weight decay that prunes its spare width: AdamW beside DDC-AdamW (DDC, §5.9 and C.10).

    python -m examples.studies vit                                   # 8 × 8 digits; some minutes on 2 CPU cores
    python -m examples.studies vit --full --images DIR               # the paper's network; DIR has a folder per class

The paper trains 100 classes of ImageNet for 50,000 steps on an accelerator and reports at one weight decay: a lower
validation loss with DDC, level accuracy, and far more dead units; AdamW needs twice the decay to compress at all. Its
text lost the rate, the decays and the size of images: ours are a sweep of decays at one rate, a share of images held
out, and 797 of scikit-learn's digits to train on. A hidden unit is *dead* if no patch of no training image makes it
positive. DDC has the multiplicative gauges alone: scales of LayerNorms, and the rescaling of squared-ReLU units.
"""

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from PIL import Image

import gauge_optax as go
from examples.studies import harness, report
from examples.studies.harness import Arm, Result, Training
from models import digits, vit
from models.vit import Params, ViTConfig

Images = tuple[jax.Array, jax.Array]
DECAYS = (0.3, 1.0, 2.0)


@dataclass(frozen=True)
class Config:
    """Sizes. `images` is a folder that has a folder of images per class; without it, digits."""

    steps: int = 3_000
    batch: int = 32
    learning_rate: float = 2e-3
    side: int = 8
    patch: int = 2
    width: int = 32
    depth: int = 2
    heads: int = 4
    hidden: int = 128
    images: str = ""
    held_out: float = 0.1  # share of a folder's images; digits have their own split


FULL = Config(steps=50_000, batch=256, learning_rate=1e-3, side=224, patch=16, width=256, depth=6, heads=8, hidden=1024)


@functools.cache
def load(folder: str, side: int, held_out: float) -> tuple[Images, Images, int]:
    """Images (n, side, side, channels) with labels, to train on and held out, and the number of classes.

    Args:
      folder: with a folder of images per class, read in colour and resized; "" for digits.
      side: of the images.
      held_out: share that is held out, drawn with one seed.

    Raises:
      ValueError: the folder has no folder with an image; digits with another side.
    """
    if not folder:
        if side != digits.SIDE:
            raise ValueError(f"digits have a side of {digits.SIDE}, not {side}: pass --images DIR, or --side 8")
        parts = [(jnp.asarray(x.reshape(-1, side, side, 1)), jnp.asarray(y)) for x, y in digits.data()]
        return parts[0], parts[1], digits.CLASSES
    classes = sorted(path for path in Path(folder).iterdir() if path.is_dir())
    found = [(path, n) for n, of_class in enumerate(classes) for path in sorted(of_class.iterdir()) if path.is_file()]
    if not found:
        raise ValueError(f"{folder} has no images: one folder per class is expected, with the images of the class")
    pixels = np.stack([_read(path, side) for path, _ in found])
    pixels = (pixels - pixels.mean()) / pixels.std()
    order = np.random.default_rng(0).permutation(len(found))
    labels, cut = np.array([n for _, n in found], np.int32), round(held_out * len(found))
    train, test = ((jnp.asarray(pixels[at]), jnp.asarray(labels[at])) for at in (order[cut:], order[:cut]))
    return train, test, len(classes)


def _read(path: Path, side: int) -> np.ndarray:
    with Image.open(path) as image:
        return np.asarray(image.convert("RGB").resize((side, side)), np.float32)


def network(c: Config) -> ViTConfig:
    """The network for the images."""
    (images, _), _, classes = load(c.images, c.side, c.held_out)
    return ViTConfig(c.side, c.patch, images.shape[-1], classes, c.width, c.depth, c.heads, c.hidden)


def loss(net: ViTConfig, params: Params, batch: Images) -> jax.Array:
    """Mean cross-entropy."""
    images, labels = batch
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(vit.logits(net, params, images), labels))


Data = tuple[Images, Images, jax.Array]


def make(c: Config, net: ViTConfig, seed: int) -> tuple[Params, Data]:
    """A start, and the images with the key of batches."""
    train, test, _ = load(c.images, c.side, c.held_out)
    return vit.init(net, jax.random.key(seed)), (train, test, jax.random.key_data(jax.random.key(1000 + seed)))


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
    net = network(c)
    arms = {}
    for decay in DECAYS:
        arms[f"AdamW, decay {decay:g}"] = Arm(optax.adamw(c.learning_rate, weight_decay=decay))
        ours = go.ddc_adamw(c.learning_rate, vit.multiplicative_gauges(), weight_decay=decay)
        arms[f"DDC-AdamW, decay {decay:g}"] = Arm(ours)
    return Training(
        arms, functools.partial(make, c, net), functools.partial(loss, net), functools.partial(observe, net),
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
    c = Config(**result["settings"])
    table = report.table(result, {
        "validation loss": report.column(result, "loss", ".3f"),
        "its least along the run": report.column(result, "loss", ".3f", report.smallest),
        "accuracy": report.column(result, "accuracy", ".3f"),
        "training loss": report.column(result, "train_loss"),
        "dead units": report.column(result, "dead_units", ".0f"),
        "smallest singular value": report.column(result, "smallest"),
        "effective rank": report.column(result, "effective_rank", ".1f"),
    })
    data = f"images of {Path(c.images).name}" if c.images else "797 digits of 8 × 8, the other 1,000 held out"
    about = (f"{data}; {c.depth} blocks of width {c.width}, {c.hidden} hidden units each, {c.steps:,} steps of "
             f"{c.batch} images at the rate {c.learning_rate:g}. {report.made_with(result)} Singular values are of the "
             f"stream behind the last block, a row per patch of {READ} training images, over the square root of the "
             "rows.")
    return "\n\n".join([about, table, " ".join(sentences(result))])


PAIRS = [(f"DDC-AdamW, decay {x:g}", f"AdamW, decay {x:g}") for x in DECAYS]
CASES = "pairs of a decay and a seed"


def less(result: Result, key: str) -> list[bool]:
    """Whether DDC ends below AdamW, case by case."""
    return [is_less for ours, theirs in PAIRS for is_less in report.less(result, ours, theirs, key)]


def verdict(result: Result) -> str:
    """Table 4's F7."""
    claim = "at matched decay DDC ends at a lower validation loss than AdamW"
    return report.paper(claim, less(result, "loss"), "validation loss at the end", CASES)


def sentences(result: Result) -> Iterator[str]:
    """The paper's three findings."""
    yield verdict(result)
    best = {
        name: min(np.mean(report.final(result, arm, "loss")) for arm in result["arms"] if arm.startswith(name))
        for name in ("DDC-AdamW", "AdamW")
    }
    yield (f"Each at its best decay, the mean validation loss is {best['DDC-AdamW']:.3f} with DDC and "
           f"{best['AdamW']:.3f} with AdamW.")
    dead = [more for ours, theirs in PAIRS for more in report.less(result, theirs, ours, "dead_units")]
    yield report.paper("DDC compresses harder at matched decay", dead, "number of dead units", CASES)
    for key, by in (("smallest", "smallest singular value"), ("effective_rank", "effective rank")):
        claim = "DDC compresses harder at matched decay"
        yield report.paper(claim, less(result, key), f"{by} of the stream behind the last block", CASES)

STUDY = harness.Study(__doc__, "vit", harness.trained(build), section, figure, config=Config(), full=FULL)
