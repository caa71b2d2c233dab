"""From three usual starts: does an optimizer inside `quotient` train at least as well as the same optimizer alone?

    python -m examples.studies starts --out examples/results    # hours on one CPU core; killed, it goes on
    python -m examples.studies starts --out examples/results --show         # the table, without training
    python -m examples.studies starts --steps 50 --only "64 | * | adamw | *" "64 | * | lion | *"       # to try it

A Llama of 2 layers (RMSNorm, rotary, SwiGLU) learns bytes of text. The starts: LeCun-normal kernels; every matrix
normal with standard deviation 0.02; zero outputs (attention's out, the MLP's down, the head). An *arm* is an optimizer;
its *plain* arm is the same optimizer without gauges. A *cell* is one size, start, arm, peak learning rate and seed (of
the initial weights and of the order of the data). A sweep of rates goes on, by at most three rates on either side,
until the best mean over seeds has a worse neighbour on both. Finished cells are kept in starts.json and not trained
again; several processes may fill one file. At the end starts.png is drawn, and the table is printed.

"-free" is `pin=False`, which is the default of `quotient_muon`; "-pinned" is `pin=True`.

In "muon", all heads of a kernel are one matrix; in "muon-heads", each head is one. In all arms with Muon, Adam steps
the leaves that are no matrices, with half of Muon's rate. (With a fifth, Adam would be too slow in arms whose best rate
is lower.) Losses are validation losses in nats per byte, mean ± standard deviation over seeds. The ratio to the plain
arm is computed seed by seed.
"""

import argparse
import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from optax.contrib import MuonDimensionNumbers

import gauge_optax as go
from examples import data
from examples.studies import harness, report
from examples.studies.harness import RATIO, Group, Result, Schedule, Sweep, best, key
from models import lm

Params = Any

STEPS = {64: 400, 128: 300}  # size (d_model) → steps of a run
STARTS = ("lecun", "0.02", "zero outputs")
BATCH, LENGTH, HELD_OUT = 8, 64, 8  # sequences, tokens in each; validation batches have HELD_OUT * BATCH sequences
WARMUP, DECAY = 20, 0.1
ADAM_SHARE = 0.5  # the learning rate of leaves that Adam steps, as a share of Muon's rate


# Arms ---------------------------------------------------------------------------------------------


class Arm(NamedTuple):
    """An optimizer (`build`), the arm without gauges that it is compared with, its first rate, and its colour."""

    plain: str
    first: float
    color: str
    build: Callable[[Schedule, Sequence[go.Gauge]], optax.GradientTransformation]


def relative(rate: Schedule, gauges: Sequence[go.Gauge]) -> optax.GradientTransformation:
    """AdamW whose steps are multiplied by the size of the kernel that they step."""
    return optax.chain(optax.scale_by_adam(),
                       go.links.scale_by_relative_rms(gauges),
                       optax.add_decayed_weights(DECAY),
                       optax.scale_by_learning_rate(rate))


adamw = functools.partial(optax.adamw, weight_decay=DECAY)
lion = functools.partial(optax.lion, weight_decay=DECAY)


def muon(rate: Schedule, per_head: bool = False) -> optax.GradientTransformation:
    """Muon without gauges for the kernels of attention and MLP, AdamW for all other leaves.

    A kernel is one matrix or, with `per_head`, has one matrix per head.
    """
    axes = functools.partial(muon_axes, per_head=per_head)
    return optax.contrib.muon(rate, muon_weight_dimension_numbers=axes, **shared(rate))


def shared(rate: Schedule) -> dict[str, Any]:
    """The arguments that all arms with Muon share."""
    return dict(weight_decay=DECAY, adam_weight_decay=DECAY, adam_learning_rate=lambda n: ADAM_SHARE * rate(n))


def muon_axes(params: Params, per_head: bool = False) -> Params:
    """For every leaf the axes of its matrices, as `optax.contrib.muon` takes them; None for leaves that Adam steps."""
    wide, tall = (2, 1) if per_head else ((1, 2), (0, 1))
    axes = dict.fromkeys(("query", "key", "value"), MuonDimensionNumbers(0, wide))
    axes |= dict.fromkeys(("up", "gate", "down"), MuonDimensionNumbers(0, 1)) | {"out": MuonDimensionNumbers(tall, 2)}

    def of(path: tuple[Any, ...], _: jax.Array) -> MuonDimensionNumbers | None:
        module, name = jax.tree_util.keystr(path, simple=True, separator="/").split("/")[-2:]
        return axes.get(module) if name == "kernel" else None

    return jax.tree_util.tree_map_with_path(of, params)


ARMS = {
    "adamw": Arm("adamw", 1.6e-3, "tab:red", lambda rate, _: adamw(rate)),
    "quotient-adamw": Arm("adamw", 1.6e-3, "tab:blue", lambda rate, gauges: go.quotient(adamw(rate), gauges)),
    "quotient-adamw-free": Arm("adamw", 1.6e-3, "tab:purple", lambda rate, g: go.quotient(adamw(rate), g, pin=False)),
    "ddc_adamw": Arm("adamw", 1.6e-3, "tab:green", lambda rate, g: go.ddc_adamw(rate, g, weight_decay=DECAY)),
    "relative": Arm("adamw", 1.6e-3, "tab:orange", relative),
    "quotient-relative": Arm("adamw", 1.6e-3, "tab:cyan", lambda rate, g: go.quotient(relative(rate, g), g)),
    "muon": Arm("muon", 1.6e-2, "tab:red", lambda rate, _: muon(rate)),
    "quotient-muon": Arm("muon", 1.6e-2, "tab:blue", lambda rate, gauges: go.quotient(muon(rate), gauges)),
    "quotient-muon-free": Arm("muon", 1.6e-2, "tab:purple", lambda rate, g: go.quotient(muon(rate), g, pin=False)),
    "muon-heads": Arm("muon-heads", 1.6e-2, "tab:red", lambda rate, _: muon(rate, per_head=True)),
    "quotient_muon": Arm("muon-heads", 1.6e-2, "tab:purple", lambda rate, g: go.quotient_muon(rate, g, **shared(rate))),
    "quotient_muon-pinned": Arm(
        "muon-heads", 1.6e-2, "tab:blue", lambda rate, g: go.quotient_muon(rate, g, pin=True, **shared(rate))
    ),
    "ddc_muon": Arm("muon", 1.6e-2, "tab:green", lambda rate, gauges: go.ddc_muon(rate, gauges, **shared(rate))),
    "lion": Arm("lion", 4e-4, "tab:red", lambda rate, _: lion(rate)),
    "quotient-lion": Arm("lion", 4e-4, "tab:blue", lambda rate, gauges: go.quotient(lion(rate), gauges)),
    "quotient-lion-free": Arm("lion", 4e-4, "tab:purple", lambda rate, g: go.quotient(lion(rate), g, pin=False)),
}


SHOWN = ("quotient-adamw", "ddc_adamw", "quotient-muon-free", "quotient_muon", "quotient-lion")  # in the summary

# Training -----------------------------------------------------------------------------------------


def model(size: int, layers: int = 2) -> lm.LMConfig:
    """The configuration of the model with d_model = `size`, and heads of size 16."""
    sizes = dict(vocab=data.VOCAB, d_model=size, layers=layers, heads=size // 16, kv_heads=size // 16, d_head=16)
    return lm.llama_config(**sizes, d_ff=3 * size, max_len=LENGTH)


def initial(size: int, start: str, seed: int, layers: int = 2) -> Params:
    """The initial weights of `model(size, layers)` for this kind of start."""
    return initial_of(model(size, layers), start, seed)


def initial_of(config: lm.LMConfig, start: str, seed: int) -> Params:
    """The initial weights of a model with this configuration, for this kind of start."""
    config = dataclasses.replace(config, zero_out=start == "zero outputs")
    params, _ = lm.params_and_loss(config, jax.random.key(seed))
    if start == "zero outputs":
        params["lm_head"]["kernel"] = jnp.zeros_like(params["lm_head"]["kernel"])
    if start == "0.02":
        leaves, tree = jax.tree.flatten(params)
        keys = jax.random.split(jax.random.key(seed), len(leaves))
        drawn = [0.02 * jax.random.normal(key, x.shape) for key, x in zip(keys, leaves, strict=True)]
        params = jax.tree.unflatten(tree, [n if x.ndim >= 2 else x for n, x in zip(drawn, leaves, strict=True)])
    return params


@functools.cache
def batches(steps: int, seed: int, batch: int = BATCH, length: int = LENGTH, prose: bool = False) -> np.ndarray:
    """The training batches of a run, stacked."""
    train = data.batches(length, batch, seed=seed, tokens=data.read_prose() if prose else None)[0]
    return np.stack([train[n] for n in range(steps)])


@functools.cache
def held_out(length: int = LENGTH, batch: int = HELD_OUT * BATCH, prose: bool = False) -> np.ndarray:
    """The validation batches, stacked. They are the same for every cell, because arms differ by parts of a percent."""
    return np.stack(data.batches(length, batch, tokens=data.read_prose() if prose else None)[1])


@functools.cache
def program(arm: str, size: int, steps: int) -> Callable[..., Any]:
    """The compiled runs of one arm and size, for all learning rates."""
    params, loss = lm.params_and_loss(model(size), jax.random.key(0))
    gauges, inputs = lm.gauges(model(size)), (params, batches(steps, harness.SEEDS[0]), held_out())
    return harness.at_rates(lambda rate: ARMS[arm].build(rate, gauges), lambda _: loss, inputs, WARMUP)


def train_cell(cell: Group, steps: int) -> dict[str, Any]:
    """Trains one cell, and returns its losses and times."""
    size, start, arm, rate, seed = cell
    inputs = initial(size, start, seed), batches(steps, seed), held_out()
    keys = "validation", "training", "finite", "seconds", "cpu_seconds"
    return harness.scored(program(arm, size, steps), inputs, rate, keys)


# Results ------------------------------------------------------------------------------------------


def swept(group: Group) -> Sweep:
    """The sweep of learning rates for a group: a size, a start and an arm."""
    return Sweep(group, ARMS[group[2]].first)


def groups(result: Result) -> list[Group]:
    """The groups (size, start, arm) whose sweeps have at least one finished rate."""
    return [(d, start, arm) for d in STEPS for start in STARTS for arm in ARMS if swept((d, start, arm)).losses(result)]


def table(result: Result) -> str:
    """A Markdown table of every arm at its best rate, compared with its plain arm at the plain arm's best rate."""
    lines = [["d", "start", "arm", "loss", "at rate", "by plain's", "not finite", "CPU s"]]
    for size, start, arm in groups(result):
        losses, plain = (swept((size, start, name)).losses(result) for name in (arm, ARMS[arm].plain))
        cells = [result["cells"][key((size, start, arm, rate, seed))] for rate in losses for seed in result["seeds"]]
        at = best(losses)
        ratio = np.divide(losses[at], plain[best(plain)]) if plain else np.array([math.nan])
        lines += [[
            str(size), start, arm, f"{np.mean(losses[at]):.4f} ± {np.std(losses[at]):.4f}",
            f"{at:g}" + ", an end" * (at in (min(losses), max(losses))), f"{ratio.mean():.4f} ± {ratio.std():.4f}",
            f"{sum(not cell['finite'] for cell in cells)} of {len(cells)}",
            f"{np.median([cell['cpu_seconds'] for cell in cells]):.1f}",
        ]]
    return report.markdown(lines)


def summary(result: Result) -> str:
    """A Markdown table with a row per size, start and plain arm, which says how much the arms of `SHOWN` gain on it."""
    lines = [["d", "start", "plain", "loss", "beside it: best of its own sweep"]]
    for size, start, plain in (group for group in groups(result) if ARMS[group[2]].plain == group[2]):
        arms = [plain, *(arm for arm in SHOWN if ARMS[arm].plain == plain)]
        sweeps = {arm: swept((size, start, arm)).losses(result) for arm in arms}
        ends = {arm: np.array(losses[best(losses)]) for arm, losses in sweeps.items() if losses}
        base = ends.pop(plain)
        ratios = {arm: 100 * (losses / base - 1) for arm, losses in ends.items()}
        gains = [f"`{arm}` {x.mean():+.1f} ± {x.std():.1f} %" for arm, x in ratios.items()]
        lines.append([str(size), start, f"`{plain}`", f"{base.mean():.3f} ± {base.std():.3f}", "; ".join(gains) or "–"])
    return report.plain(lines)


def section(result: Result) -> str:
    """The section of this study on the page of all results."""
    steps = " and ".join(f"{n} steps at d = {d}" for d, n in result["settings"]["steps"].items())
    about = f"A Llama of 2 layers on bytes of text, {steps}, {len(result['seeds'])} seeds, {result['machine']}."
    terms = ("The starts: LeCun-normal kernels; standard deviation 0.02 in every kernel; zero in the head and in the "
             "kernels that write into the residual stream. *Plain* is the optimizer of Optax without this library. "
             "*Muon* steps each kernel as one matrix, *muon-heads* each head as one. An arm with *free* in its name "
             "runs with `pin=False`, which is the default of `quotient_muon`; *pinned* says `pin=True`.")
    grid = f"Rates are a factor of {RATIO} apart: a finer sweep would move differences of a percent or two."
    short = ("Every optimizer at the best rate of its own sweep; the last column is its difference to the plain one's "
             "loss, seed by seed; less is better.")
    ratio = "All arms. *By plain's*: the ratio of an arm's best to that of the plain arm's own sweep, seed by seed."
    return f"{about} {terms} {grid}\n\n{short}\n\n{summary(result)}\n\n{ratio}\n\n{table(result)}"


def figure(result: Result, path: Path) -> None:
    """Draws validation loss over rates: a row of panels per size and plain arm, a column per start, a curve per arm."""
    sweeps = {group: swept(group).losses(result) for group in groups(result)}
    rows = list(dict.fromkeys((size, ARMS[arm].plain) for size, _, arm in sweeps))
    fig, axes = report.plt.subplots(
        len(rows), len(STARTS), figsize=(13, 3 * len(rows)), sharex="row", layout="constrained", squeeze=False
    )
    for (size, plain), row in zip(rows, axes, strict=True):
        shown = {group: x for group, x in sweeps.items() if (group[0], ARMS[group[2]].plain) == (size, plain)}
        bests = [float(np.mean(losses[best(losses)])) for losses in shown.values()]
        for (_, start, arm), losses in shown.items():
            report.by_rate(row[STARTS.index(start)], losses, ARMS[arm].color, arm)
        for start, axis in zip(STARTS, row, strict=True):
            axis.set(title=f"d = {size}, {start}", ylim=(0.98 * min(bests), 1.2 * max(bests)))
            report.at_rates(axis, [rate for losses in shown.values() for rate in losses])
            if axis.lines:
                axis.legend()
    report.save_as_is(fig, path)


@dataclasses.dataclass(frozen=True)
class Config:
    """The number of steps for every size; 0 means those of `STEPS`."""

    steps: int = 0


def cells(c: Config, args: argparse.Namespace) -> Callable[[Result], harness.Cells]:
    """The cells that the sweeps of all groups need next."""
    sweeps = [swept((size, start, arm)) for size in STEPS for start in STARTS for arm in ARMS]
    return harness.swept(sweeps, lambda cell: train_cell(cell, c.steps or STEPS[cell[0]]))


STUDY = harness.Study(
    __doc__, "starts", cells, section, figure, config=Config(), partial=True,
    settings=lambda c: {"steps": {str(d): c.steps or n for d, n in STEPS.items()}, "batch": BATCH, "length": LENGTH,
                        "held_out": HELD_OUT},
)
