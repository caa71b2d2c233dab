"""All measurements on one accelerator, in one command of nine minutes: times, memory, training steps, training runs.

    python -m benchmarks.accelerator --out benchmarks/results            # if it is killed, the same command goes on
    python -m benchmarks.accelerator --only "step | *"                   # some of the cells
    python -m benchmarks.accelerator --width 64 --layers 1 --steps 4 --out outputs/dry   # a dry run on a CPU

There are four kinds of cells. `update` times the update of an optimizer, in turns with the one that it is compared with
(its base), and counts its memory. `step` times a training step of GPT-2 124M. `train` trains a Llama of 30M parameters
on bytes of text, with each of four optimizers at each of three rates. `twins` trains a small network from two weight
sets of one function.

Most of the time is compiling. On an H100 that ran eight other processes, XLA needed three minutes to choose a program
for one product of float32 matrices. With `XLA_FLAGS=--xla_gpu_enable_triton_gemm=false`, each of GPT-2's updates
compiled in 7 to 30 seconds. With `JAX_COMPILATION_CACHE_DIR`, a second call does not compile again.
"""

import argparse
import functools
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import gauge_optax as go
from benchmarks import compare, tuned
from benchmarks.sizes import SIZES, Case, Size, case
from benchmarks.timing import host
from benchmarks.training.links import Link, Rate
from benchmarks.training.runs import Arm, Gauges, Task
from examples.studies import harness
from examples.studies.harness import Result
from examples.studies.report import markdown
from models import lm

SEED, TWIN_STEPS, TWIN_RATE = 42, 20, 1e-2
RATES: Mapping[str, tuple[float, ...]] = {
    "max_norm_muon": (0.02, 0.04, 0.08), "Muon": (0.01, 0.02, 0.04), "quotient_muon": (0.01, 0.02, 0.04),
    "AdamW": (1e-3, 2e-3, 4e-3),
}
"""Optimizer → the learning rates of matrices. All other leaves have half of it; with AdamW, they have the same rate."""


@dataclass(frozen=True)
class Sizes:
    """Sizes of the measurements. A dry run makes them smaller.

    Attributes:
      width: d_model of every network; 0 leaves each network as it is.
      layers: number of blocks of every network; 0 leaves each network as it is.
      repeats: rounds in which updates are timed.
      step_repeats: rounds in which whole steps are timed.
      steps: steps of a training run.
    """

    width: int = 0
    layers: int = 0
    repeats: int = 20
    step_repeats: int = 8
    steps: int = 300

    def of(self, name: str) -> Size:
        """The model with this name in `SIZES`, with the width and layers of a dry run if they are given."""
        return SIZES[name].at(self.width, self.layers)

    def task(self) -> Task:
        """The training problem: a Llama of 30M parameters, with batches of 32 × 256 bytes."""
        config = tuned.llama(self.width or 768, self.layers or 4)
        length = 64 if self.width else 256
        return tuned.task_of(config, self.steps)._replace(batch=4 if self.width else 32, length=length)


the_case = functools.lru_cache(maxsize=1)(case)  # a GPU takes half a minute to make GPT-2's, which four cells share


# What is measured -----------------------------------------------------------------------------------------


def updates(sizes: Sizes, name: str, block: str) -> dict[str, Any]:
    """Times and memory of the updates of one block (a group of optimizers that are timed in turns), for one model."""
    sized = the_case(sizes.of(name))
    made = compare.timed(chosen(sized, block), sized, sizes.repeats)
    base = next(iter(made.values()))
    return {n: compare.row(update, base) | {"peak_mb": update.peak_bytes / 1e6} for n, update in made.items()}


def steps(sizes: Sizes, name: str, block: str) -> dict[str, Any]:
    """Times of whole training steps of one block: loss, gradient and update as one compiled function."""
    sized = the_case(sizes.of(name))
    assert sized.tokens is not None
    batch, length = sized.tokens.shape
    rows = compare.step_columns(chosen(sized, block), sized, sizes.step_repeats)
    return {"batch": batch, "length": length - 1, "rows": rows}


def chosen(sized: Case, block: str) -> compare.Block:
    """The optimizers of a block of `benchmarks.compare` without variants.

    One variant is kept, the base with float32 products, because our optimizers have that precision.
    """
    rows = compare.blocks(sized)[block].items()
    return {name: tx for name, tx in rows if "," not in name or name.endswith("float32 products")}


def _quotient_muon(rate: Rate, decay: jax.Array, gauges: Gauges) -> Link:
    return go.quotient_muon(
        lambda n: rate(n)[0], gauges, weight_decay=decay, adam_weight_decay=decay, adam_b2=0.95,
        adam_learning_rate=lambda n: rate(n)[1],
    )


ARMS: Mapping[str, Arm] = {**{name: own.arm for name, own in tuned.ARMS.items()}, "quotient_muon": Arm(_quotient_muon)}
DECAY = 0.1
"""The weight decay of every optimizer but `max_norm_muon`, which needs none."""


def train(sizes: Sizes, arm: str, rate: float) -> dict[str, Any]:
    """Makes one training run, with the device's default precision of matrix products, as is usual in training."""
    task, other = sizes.task(), rate if arm == "AdamW" else rate / 2
    decay = 0.0 if arm == "max_norm_muon" else DECAY
    return task.train(ARMS[arm], "lecun", decay, (rate, other), SEED)


def twins(sizes: Sizes, precision: str) -> dict[str, float]:
    """Optimizer → the largest difference of two twins' losses along a run, relative to the loss.

    Twins are two weight sets of one function: a start, and the same start moved by a random element of all symmetries.
    The network is smooth, with SwiGLU; its twins' losses differ by 1e-6. With ReLU and a width of 32, one unit came so
    close to 0 in step 10 that roundoff switched it on in one of the twins, and ten steps later the losses differed by
    4e-3.
    """
    toy = sizes.of("toy")
    sized = the_case(replace(toy, config=replace(toy.config, mlp="swiglu")))
    assert sized.loss is not None and sized.tokens is not None
    loss, tokens, group = sized.loss, sized.tokens, go.product(sized.gauges)
    other = jax.jit(lambda params: group.act(group.sample(jax.random.key(SEED), params), params))(sized.params)

    @functools.partial(jax.jit, static_argnums=0)
    def run(tx: optax.GradientTransformation, start: Any) -> jax.Array:
        return harness.scanned(tx, loss, start, jnp.stack([tokens] * TWIN_STEPS))[1]

    optimizers = {
        "optax.adamw": optax.adamw(1e-3), "quotient(optax.adamw)": go.quotient(optax.adamw(1e-3), sized.gauges),
        "ddc_adamw": go.ddc_adamw(1e-3, sized.gauges), "optax.contrib.muon": sized.muon(TWIN_RATE),
        "quotient_muon": sized.quotient_muon(TWIN_RATE), "ddc_muon": sized.ddc_muon(TWIN_RATE),
        "max_norm_muon": sized.max_norm_muon(TWIN_RATE),
    }
    with jax.default_matmul_precision(precision):
        losses = {name: np.asarray([run(tx, sized.params), run(tx, other)]) for name, tx in optimizers.items()}
    return {name: float(np.max(np.abs(x[1] / x[0] - 1.0))) for name, x in losses.items()}


# Study ----------------------------------------------------------------------------------------------------


def cells(sizes: Sizes, args: argparse.Namespace) -> harness.Cells:
    """All cells, the most important ones first, because the machine may not be available until the end."""
    asked: dict[str, Any] = {}
    for block in ("adam", "muon"):
        asked[f"update | gpt2 | {block}"] = functools.partial(updates, sizes, "gpt2", block)
    for block in ("adam", "muon"):
        asked[f"step | gpt2 | {block}"] = functools.partial(steps, sizes, "gpt2", block)
    for precision in ("highest", "default"):
        asked[f"twins | {precision}"] = functools.partial(twins, sizes, precision)
    for arm, rates in RATES.items():
        for rate in rates:
            asked[f"train | {arm} | {rate:g}"] = functools.partial(train, sizes, arm, rate)
    for name, block in (("1b_layer", "adam"), ("1b_layer", "muon"), ("attention", "muon"), ("toy", "adam"),
                        ("toy", "muon"), ("gpt2", "beside")):
        asked[f"update | {name} | {block}"] = functools.partial(updates, sizes, name, block)
    return {("cells", name): lambda run, make=make: make() for name, make in asked.items()}  # type: ignore[misc]


def named(result: Result, kind: str) -> Iterator[tuple[str, str, Any]]:
    """Yields the finished cells of one kind, as (first word after the kind, last word of the name, cell)."""
    for name, cell in result["cells"].items():
        first, *rest = name.split(" | ")
        if first == kind:
            yield rest[0], rest[-1], cell


def update_rows(result: Result) -> Iterator[list[str]]:
    """The rows of the table of updates: one per size and optimizer."""
    for size, _, rows in named(result, "update"):
        for name, x in rows.items():
            yield [size, name, f"{x['ms']:.3g}", "{:.2f} ({:.2f}–{:.2f})".format(x["ratio"][1], *x["ratio"][::2]),
                   f"{x['peak_mb']:.0f}", f"{x['state_mb']:.0f}"]


def step_rows(result: Result) -> Iterator[list[str]]:
    """The rows of the table of training steps: one per optimizer."""
    for size, _, cell in named(result, "step"):
        for name, x in cell["rows"].items():
            low, middle, high = x["step_ratio"]
            yield [size, f"{cell['batch']} × {cell['length']}", name, f"{x['step_ms']:.4g}",
                   f"{middle:.3f} ({low:.3f}–{high:.3f})"]


def train_rows(result: Result) -> Iterator[list[str]]:
    """The rows of the table of training runs: one per optimizer, with the best loss, and the losses at all rates."""
    for arm in RATES:
        runs = {float(rate): x for name, rate, x in named(result, "train") if name == arm}
        losses = {rate: math.inf if x["validation"] is None else x["validation"] for rate, x in runs.items()}
        if losses:
            best = min(losses, key=lambda rate: losses[rate])
            sweep = ", ".join(f"{rate:g}: {loss:.4f}" for rate, loss in sorted(losses.items()))
            yield [arm, f"{losses[best]:.4f}", f"{best:g}", sweep]


def twin_rows(result: Result) -> Iterator[list[str]]:
    """The rows of the table of twins: one per precision and optimizer."""
    for precision, _, rows in named(result, "twins"):
        for name, x in rows.items():
            yield [precision, name, f"{x:.1e}"]


def section(result: Result) -> str:
    """The results as Markdown: a table for each kind of cell, of the cells that are finished."""
    own, sizes = result["settings"], result["settings"]["sizes"]
    tables = (
        ("update", "**Updates.** Gradients to new parameters; a block's optimizers ran in turns, and a ratio is the "
         "median over rounds (quartiles) of the time in units of the block's first. Products of `optax.contrib.muon` "
         "are at the device's default precision, which is shorter than float32 on most GPUs; those of ours are "
         "float32. Peak: by the compiler's plan.",
         ["size", "optimizer", "ms", "ratio", "peak MB", "state MB"], update_rows),
        ("step", "**Steps.** Loss, gradient and update as one compiled function, products of the loss at the device's "
         "default precision.", ["size", "batch", "optimizer", "ms", "ratio"], step_rows),
        ("train", f"**Training.** {sizes['steps']} steps on bytes of text from LeCun-normal kernels, a warm-up over a "
         "twentieth and a cosine to zero; one seed, products at the device's default precision. Validation loss in "
         f"nats per byte by peak rate; all leaves but matrices have half of it, decay {DECAY:g}; AdamW has one rate "
         f"and that decay, `max_norm_muon` no decay. {own['parameters'] / 1e6:.1f}M parameters.",
         ["optimizer", "loss", "at rate", "sweep"], train_rows),
        ("twins", f"**Twins.** Two weight sets of one small function, {TWIN_STEPS} steps: the largest relative "
         "difference of their losses, by the precision of products.",
         ["precision", "optimizer", "difference"], twin_rows),
    )
    flags = f"; `XLA_FLAGS={own['flags']}`" if own.get("flags") else ""
    parts = [f"{own['host']}{flags}; float32; what is compared ran in one process."]
    for kind, about, heads, rows in tables:
        found = list(rows(result))
        parts += [about, markdown([heads, *found])] if found else [f"Not run yet: `{kind}`."]
    return "\n\n".join(parts)


def settings(sizes: Sizes) -> dict[str, Any]:
    """The part of the header that must be equal for two runs that share a file."""
    config = sizes.task().config
    shapes = jax.eval_shape(lambda: lm.params_and_loss(config, jax.random.key(0))[0])
    count = sum(x.size for x in jax.tree.leaves(shapes))
    return {"sizes": asdict(sizes), "parameters": count, "host": host(), "flags": os.environ.get("XLA_FLAGS", "")}


STUDY = harness.Study(
    __doc__, lambda sizes: f"accelerator_{compare.device()}", cells, section, seeds=None, config=Sizes(),
    settings=settings, precision=None, partial=True, digits=6,
    page=lambda result: f"# One accelerator\n\n`python -m benchmarks.accelerator`. {section(result)}\n",
)

if __name__ == "__main__":
    harness.main(STUDY)
