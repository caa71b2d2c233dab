"""Grokking with all of DDC's control arms (§5.4-5.6, C.9, C.11, C.12): when test accuracy rises, and whether it stays.

    python -m examples.studies grokking --p 59            # some hours on 2 CPU cores
    python -m examples.studies grokking                   # p = 113, the paper's network; idle hours, or a GPU
    python -m examples.studies grokking --p 59 --show     # the figure and the table of the runs that are done
    python -m examples.studies grokking --hidden 128      # the width sweep of C.9: a JSON per width

An *arm* is an optimizer. Runs are made arm by arm. First an arm is trained with one seed on a grid of learning rates
and weight decays, for `--grid-steps` steps. Its best cell of the grid is the one with the highest mean test accuracy
over all steps: accuracy swings, so that one measurement, or the first long rise, says little. Then the arm trains
`--steps` steps with every seed at its best cell. A run *groks* at the first measurement of at least 95 % test accuracy
after which ten further measurements are that high. It *collapses* whenever accuracy falls below 95 % after that.

Several processes may fill one JSON. Two processes that use one core each
(`XLA_FLAGS=--xla_cpu_multi_thread_eigen=false`) are faster than one process on two cores.
"""

import argparse
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import gauge_optax as go
from examples.studies import baselines, harness, report
from examples.studies.harness import Result, Run
from models import grokking
from models.grokking import GrokConfig, Params

NAME = "grokking"
BEST_SEED = 42
POINTS = 201  # the number of points of a curve in the JSON
GROKKED = 0.95
KEPT = 10  # a run has grokked if accuracy stays above `GROKKED` for this many further measurements


@dataclasses.dataclass(frozen=True)
class Config:
    """Sizes of the study: the modulus `p`, `hidden` units of the MLP, and a measurement every `every` steps."""

    p: int = 113
    mlp: str = "relu"
    hidden: int = 512
    steps: int = 20_000
    grid_steps: int = 5_000
    every: int = 100

    @property
    def network(self) -> GrokConfig:
        """The configuration of the network."""
        return GrokConfig(p=self.p, mlp=self.mlp, d_ff=self.hidden)  # type: ignore[arg-type]

    @property
    def name(self) -> str:
        """The name of the JSON and of the figure. It contains what differs from the paper's network."""
        differs = [getattr(self, key) for key in ("p", "mlp", "hidden") if getattr(self, key) != getattr(Config, key)]
        return "_".join(map(str, [NAME, *differs]))


class Cell(NamedTuple):
    """One run: an arm, its learning rate, weight decay and seed."""

    arm: str
    rate: float
    decay: float
    seed: int

    @property
    def name(self) -> str:
        """The key of this run in the JSON."""
        return f"{self.arm.replace(' ', '_').replace(',', '')}_{self.rate:g}_{self.decay:g}_{self.seed}"


# Arms -------------------------------------------------------------------------------------------------

Knob = Any
"""A learning rate or a weight decay, as a number or an array. With arrays, all cells of an arm share one program."""
Maker = Callable[[GrokConfig, Knob, Knob], optax.GradientTransformation]
B2 = 0.98


def _adamw(rate: Knob, decay: Knob) -> optax.GradientTransformation:
    return optax.adamw(rate, b2=B2, weight_decay=decay)


NEURONS: Mapping[str, str] = {
    **{f"blocks/{{i}}/attn/{name}/kernel": "_ head channel" for name in ("query", "key", "value")},
    "blocks/{i}/attn/out/kernel": "_ _ channel",
    "blocks/{i}/mlp/up/kernel": "_ channel",
    "blocks/{i}/mlp/down/kernel": "_ channel",
}
ARMS: Mapping[str, Maker] = {
    "AdamW": lambda c, rate, decay: _adamw(rate, decay),
    "AdamW, logit shift alone": lambda c, rate, decay: go.quotient(_adamw(rate, decay), grokking.shift()),
    "quotient AdamW": lambda c, rate, decay: go.quotient(_adamw(rate, decay), grokking.gauges(c)),
    "DDC-AdamW": lambda c, rate, decay: go.ddc_adamw(rate, grokking.gauges(c), b2=B2, weight_decay=decay),
    "DDC-AdamW, as printed": lambda c, rate, decay: go.ddc_adamw(
        rate, grokking.gauges(c), b2=B2, weight_decay=decay, preset="paper"
    ),
    "rotational AdamW": lambda c, rate, decay: go.norms.rotational_adamw(rate, NEURONS, b2=B2, weight_decay=decay),
    "Muon": lambda c, rate, decay: baselines.muon(rate, decay),
    "Muon, per head": lambda c, rate, decay: baselines.muon(rate, decay, per_head=True),
    "Muon, logit shift alone": lambda c, rate, decay: go.quotient(baselines.muon(rate, decay), grokking.shift()),
    "Muon, attention decay doubled": lambda c, rate, decay: optax.chain(
        baselines.muon(rate, decay), baselines.more_decay(rate * decay, lambda path: "/attn/" in path)
    ),
    "Muon, dead directions masked": lambda c, rate, decay: baselines.dead_directions_masked(
        baselines.muon(rate, decay), lambda path: "blocks" in path and path.endswith("kernel")
    ),
    "quotient Muon": lambda c, rate, decay: go.quotient(baselines.muon(rate, decay), grokking.gauges(c), pin=False),
    "quotient Muon, rotations not held": lambda c, rate, decay: go.quotient(
        baselines.muon(rate, decay), grokking.gauges(c), pin=False, hold=False
    ),
    "quotient Muon, pinned": lambda c, rate, decay: go.quotient(baselines.muon(rate, decay), grokking.gauges(c)),
    "DDC-Muon": lambda c, rate, decay: go.ddc_muon(
        rate, grokking.gauges(c), weight_decay=decay, adam_weight_decay=decay, consistent_rms=0.2
    ),
}
RATES, DECAYS = (1e-3, 3e-3, 1e-2), (1.0, 3.0)


# One run ----------------------------------------------------------------------------------------------


@functools.cache
def program(config: Config, arm: str) -> tuple[Callable[..., Any], Callable[..., tuple[Params, Any]]]:
    """Two compiled functions of one arm, for all rates, decays and seeds: the initial state, and `every` steps."""
    c = config.network

    @jax.jit
    def init(params: Params, rate: jax.Array, decay: jax.Array) -> Any:
        return ARMS[arm](c, rate, decay).init(params)

    @jax.jit
    def advance(
        params: Params, state: Any, train: grokking.Pairs, rate: jax.Array, decay: jax.Array
    ) -> tuple[Params, Any]:
        loss = functools.partial(grokking.loss, c)
        return harness.descend(ARMS[arm](c, rate, decay), loss, (params, state), lambda n: train, 0, config.every)

    return init, advance


@functools.partial(jax.jit, static_argnums=0)
def reading(
    c: GrokConfig, start: Params, params: Params, train: grokking.Pairs, test: grokking.Pairs
) -> dict[str, jax.Array]:
    """A measurement: losses, accuracies, and how far weights have moved in directions that no output depends on.

    `anchor` is the root mean square change of our gauges' coordinates, log γ and log ‖up's column‖ per channel. `ratio`
    is that of the paper's coordinates, log γ − log ‖up's row‖ and p·log ‖up's column‖ − log ‖down's row‖, where p is
    the degree of the activation. `shift` is the norm of the part of the output kernel's change that all classes share,
    relative to the kernel at the start.
    """
    scales = [gauge for gauge in grokking.gauges(c) if gauge.name in ("norm_scale", "rescale")]
    moved = [x for element in go.measure.drift(start, params, scales) for x in jax.tree.leaves(element)]
    ratios = [x - y for x, y in zip(_ratios(c, params), _ratios(c, start), strict=True)]
    head, first = params["lm_head"]["kernel"], start["lm_head"]["kernel"]
    shifted = jnp.mean(head - first, 1)
    return {
        "train_loss": grokking.loss(c, params, train),
        "test_loss": grokking.loss(c, params, test),
        "train_accuracy": grokking.accuracy(c, params, train),
        "test_accuracy": grokking.accuracy(c, params, test),
        "anchor": harness.rms(jnp.concatenate([x.ravel() for x in moved])),
        "ratio": harness.rms(jnp.concatenate(ratios)),
        "shift": jnp.linalg.norm(shifted) * c.p**0.5 / jnp.linalg.norm(first),
    }


def _ratios(c: GrokConfig, params: Params) -> list[jax.Array]:
    """The paper's coordinates of scales: log γ − log ‖up's row‖, and p·log ‖up's column‖ − log ‖down's row‖."""
    ratios = []
    for block in params["blocks"].values():
        up, down = block["mlp"]["up"]["kernel"], block["mlp"]["down"]["kernel"]
        gamma, unit, out = (
            jnp.log(x + 1e-30)
            for x in (jnp.abs(block["norm2"]["scale"]), jnp.linalg.norm(up, axis=0), jnp.linalg.norm(down, axis=1))
        )
        degree = 2 if c.mlp == "relu2" else 1
        ratios += [gamma - jnp.log(jnp.linalg.norm(up, axis=1) + 1e-30), unit * degree - out]
    return ratios


@functools.partial(jax.jit, static_argnums=0)
def last_reading(c: GrokConfig, params: Params) -> dict[str, jax.Array]:
    """Statistics of the activations on all pairs, at the end of a run.

    They are the effective rank of the stream, the share of dead units, the share of dead directions of the MLP's
    activations, and how well dead directions agree with single units (`alignment`, 1 if each is one unit).
    """
    tokens = jnp.stack(jnp.divmod(jnp.arange(c.p**2), c.p), 1)
    inside = grokking.features(c, params, tokens)
    active = jax.nn.relu(inside["hidden"])
    _, sizes, directions = jnp.linalg.svd(active.T @ active, hermitian=True)
    dead = sizes < DEAD * sizes[0]
    largest = jnp.max(jnp.square(directions), 1)
    return {
        "effective_rank": go.measure.effective_rank(inside["streams"][-1]),
        "dead_units": jnp.mean(go.measure.dead_units(inside["hidden"])),
        "dead_directions": jnp.mean(dead),
        "alignment": jnp.sum(largest * dead) / jnp.maximum(jnp.sum(dead), 1),
    }


DEAD = 1e-8  # eigenvalues of the activations' Gram matrix below this share of the largest count as dead directions


def run_cell(run: Run, config: Config, cell: Cell, of_grid: bool = False) -> dict[str, Any]:
    """Trains one run to its end, from its checkpoint if there is one. Runs of a grid are shorter and keep no curves."""
    c, (init, advance) = config.network, program(config, cell.arm)
    knobs = jnp.asarray(cell.rate, jnp.float32), jnp.asarray(cell.decay, jnp.float32)
    start = jax.jit(functools.partial(grokking.init, c))(jax.random.key(cell.seed))
    train, test = grokking.data(c, cell.seed)
    at = range(0, (config.grid_steps if of_grid else config.steps) + config.every, config.every)
    (params, _), curves = harness.along(
        at, (start, init(start, *knobs)), lambda carry, first, last: advance(*carry, train, *knobs),
        lambda carry: {key: float(x) for key, x in reading(c, start, carry[0], train, test).items()}, run.saved,
    )
    final = summary([x["test_accuracy"] for x in curves], config.every) | curves[-1] | last_reading(c, params)
    kept: dict[str, Any] = {"final": {key: _number(float(x)) for key, x in final.items()}}
    kept["final"] |= {"rate": cell.rate, "decay": cell.decay}
    if not of_grid:
        points = np.unique(np.linspace(0, len(curves) - 1, min(POINTS, len(curves))).astype(int)).tolist()
        kept["curves"] = {"step": [k * config.every for k in points]}
        kept["curves"] |= {key: [harness.rounded(curves[k][key]) for k in points] for key in curves[0]}
    return kept


# What a run says --------------------------------------------------------------------------------------


def grok_reading(accuracy: Sequence[float]) -> int | None:
    """The index of the measurement at which a run groks (see the module's docstring); None if it does not.

    >>> grok_reading([0.1, 0.96, 0.2, *[0.97] * 11])
    3
    """
    up = [x >= GROKKED for x in accuracy]
    return next((k for k in range(len(up) - KEPT) if all(up[k : k + KEPT + 1])), None)


def summary(accuracy: Sequence[float], every: int) -> dict[str, float]:
    """Numbers of a run: mean test accuracy, steps until it groks (inf if never), and what happens after that.

    The latter are the number of collapses, the number of measurements below 95 %, and the lowest accuracy.

    >>> summary([0.25, *[1.0] * 12, 0.5, 0.25, 1.0], 100)
    {'mean': 0.875, 'grokked': 100, 'collapses': 1, 'below': 2, 'lowest': 0.25}
    """
    at, mean = grok_reading(accuracy), sum(accuracy) / len(accuracy)
    if at is None:
        return {"mean": mean, "grokked": math.inf, "collapses": 0, "below": 0, "lowest": math.nan}
    up = [x >= GROKKED for x in accuracy[at:]]
    falls = sum(before and not after for before, after in itertools.pairwise(up))
    lowest = min(accuracy[at:])
    return {"mean": mean, "grokked": at * every, "collapses": falls, "below": up.count(False), "lowest": lowest}


def _number(x: float) -> float | None:
    return float(f"{x:.6g}") if math.isfinite(x) else None


# The queue --------------------------------------------------------------------------------------------


def grid_cells(arm: str) -> list[Cell]:
    """The runs of an arm's grid: all learning rates and weight decays, with one seed."""
    return [Cell(arm, rate, decay, BEST_SEED) for rate, decay in itertools.product(RATES, DECAYS)]


def best(result: Result, arm: str) -> Cell | None:
    """The cell of an arm's grid with the highest mean accuracy; None if the grid is not finished."""
    met, cells = result.get("grid", {}).get(arm, {}), grid_cells(arm)
    if any(cell.name not in met for cell in cells):
        return None
    return max(cells, key=lambda cell: met[cell.name]["final"]["mean"])


def queue(c: Config, args: argparse.Namespace) -> Callable[[Result], harness.Cells]:
    """The runs to make, arm by arm: first those of its grid; when the grid is finished, those of all seeds."""

    def wanted(result: Result) -> harness.Cells:
        runs: dict[harness.Address, Callable[[Run], Any]] = {}
        for arm in ARMS:
            for cell in grid_cells(arm):
                runs["grid", arm, cell.name] = functools.partial(run_cell, config=c, cell=cell, of_grid=True)
            if (chosen := best(result, arm)) is not None:
                for seed in args.seeds:
                    own = chosen._replace(seed=seed)
                    runs["cells", arm, str(seed)] = functools.partial(run_cell, config=c, cell=own)
        return runs

    return wanted


# Figure and table -------------------------------------------------------------------------------------


def figure(result: Result, path: Path) -> None:
    """Draws the test accuracy of each arm, a curve per seed, and marks the collapses after a run has grokked."""
    count, columns = len(result["cells"]), min(4, len(result["cells"]))
    rows = -(-count // columns)
    fig, grid = report.plt.subplots(
        rows, columns, figsize=(3.4 * columns, 2.3 * rows + 0.6), layout="constrained", squeeze=False, sharex=True,
        sharey=True,
    )
    fig.suptitle("Test accuracy: when it rises, and whether it stays")
    for axis in grid.flat[count:]:
        axis.set_visible(False)
    for axis, (arm, cells) in zip(grid.flat, result["cells"].items(), strict=False):
        for seed, cell in cells.items():
            axis.plot(cell["curves"]["step"], cell["curves"]["test_accuracy"], lw=1.0, label=f"seed {seed}")
        axis.axhline(GROKKED, color="0.7", lw=0.8, zorder=0)
        axis.set_title(arm, fontsize=9)
        axis.set_ylim(-0.02, 1.02)
        axis.set_xlabel("steps")
        axis.legend(fontsize=6, loc="lower right")
    report.save_as_is(fig, path)


def section(result: Result) -> str:
    """The results as Markdown: a table, and sentences about it."""
    c = Config(**result["settings"])
    rows: list[Sequence[Any]] = [["arm", "rate, decay", "seeds", *COLUMNS]]
    for arm, cells in result["cells"].items():
        finals = [cell["final"] for cell in cells.values()]
        shown = (", ".join(_shown(x, key, form) for x in finals) for key, form in COLUMNS.values())
        rows.append([arm, f"{finals[0]['rate']:g}, {finals[0]['decay']:g}", len(finals), *shown])
    rates, decays = (", ".join(f"{x:g}" for x in numbers) for numbers in (RATES, DECAYS))
    about = (f"Addition modulo {c.p} from {GrokConfig().share:.0%} of all pairs, full batch, one block of width "
             f"{GrokConfig().d_model} with {c.hidden} units ({c.mlp}), {c.steps:,} steps, a reading every {c.every}. "
             f"Rates {rates} and decays {decays}, chosen per arm by the mean accuracy along {c.grid_steps:,} steps "
             f"with seed {BEST_SEED}. A number per seed. {report.made_with(result)}")
    return "\n\n".join([about, report.bare(rows), " ".join(sentences(result))])


COLUMNS = {
    "grokked at": ("grokked", ".0f"), "collapses": ("collapses", ".0f"), "readings below 95 %": ("below", ".0f"),
    "lowest after": ("lowest", ".3f"), "final accuracy": ("test_accuracy", ".3f"), "shift of logits": ("shift", ".1e"),
    "drift, ours": ("anchor", ".1e"), "drift, paper's": ("ratio", ".1e"), "effective rank": ("effective_rank", ".1f"),
    "dead units": ("dead_units", ".2f"), "alignment": ("alignment", ".2f"),
}
OF_THE_CURVE = ("grokked", "collapses", "below", "lowest")
"""Statistics from a run's curve, valid even if the run diverges. The other statistics come from its last weights."""


def _shown(final: Mapping[str, Any], key: str, form: str) -> str:
    """A number of a run as text; "–" if it was computed from weights that are NaN, where even a zero means nothing."""
    void = final[key] is None or (diverged(final) and key not in OF_THE_CURVE)
    return "–" if void else format(final[key], form)


def diverged(final: Mapping[str, Any]) -> bool:
    """Whether a run ends with a loss that is not finite."""
    return final["train_loss"] is None


SHIFT = "the norm of the output kernel's mean over classes"
HELD, TURNING = "quotient Muon", "quotient Muon, rotations not held"
MATCHED = "Muon, attention decay doubled"


def sentences(result: Result) -> Iterator[str]:
    """Sentences that compare the numbers with the paper's claims and with public runs."""
    cells = result["cells"]

    def finals(arm: str, key: str) -> list[float]:
        return [x["final"][key] for x in cells.get(arm, {}).values()]

    if {"AdamW", "DDC-AdamW"} <= cells.keys():
        pairs = zip(finals("DDC-AdamW", "shift"), finals("AdamW", "shift"), strict=False)
        held = [ours <= 1e-4 * theirs for ours, theirs in pairs]
        yield report.paper("DDC holds the logit shift", held, f"{SHIFT}, to 1e-4 of AdamW's")
    never, falls, steady = [], [], []
    for arm in cells:
        grokked = [x is not None for x in finals(arm, "grokked")]
        fell = [x > 0 for x in finals(arm, "collapses")]
        if not all(grokked):
            never.append(f"{arm} ({grokked.count(False)} of {len(grokked)} seeds)")
        if any(fell):
            falls.append(f"{arm} ({sum(fell)} of {sum(grokked)} seeds that grok)")
        elif all(grokked):
            steady.append(arm)
    if {"DDC-Muon", MATCHED} <= cells.keys():
        pairs = zip(finals("DDC-Muon", "alignment"), finals(MATCHED, "alignment"), strict=False)
        yield report.paper("the gauge's dead directions lie nearer to axes than those of Muon with matched decay",
                           [a > b for a, b in pairs], "axis alignment of the hidden layer's dead directions")
    if {HELD, TURNING} <= cells.keys():
        last = [finals(arm, "test_accuracy") for arm in (HELD, TURNING)]
        more = sum(x > y for x, y in zip(*last, strict=False))
        yield (f"Muon inside quotient ends at a test accuracy of {report.span(last[0])} where rotations of heads are "
               f"held and {report.span(last[1])} where they are not: higher with them held on {more} of {len(last[0])} "
               "seeds.")
    yield on_the_grids(result)
    yield f"Test accuracy falls below {GROKKED:.0%} again after grokking: {', '.join(falls) or 'in no arm'}."
    yield f"Arms that grok with every seed and stay there: {', '.join(steady) or 'none'}."
    ends = {arm: sum(diverged(x["final"]) for x in runs.values()) for arm, runs in cells.items()}
    if told := ", ".join(f"{arm} ({n} of {len(cells[arm])} seeds)" for arm, n in ends.items() if n):
        yield f"Arms whose loss is not finite in the end: {told}; what is read from their last weights is left out."
    yield f"Arms that do not grok in {result['settings']['steps']:,} steps: {', '.join(never) or 'none'}."


def on_the_grids(result: Result) -> str:
    """Sentences that say in how many cells of its grid each arm groks, and in how many of these it never collapses."""
    told = []
    for arm, cells in result["grid"].items():
        finals = [x["final"] for x in cells.values() if x["final"]["grokked"] is not None]
        if len(cells) == len(grid_cells(arm)):
            told.append(f"{arm} {len(finals)} and {sum(x['collapses'] == 0 for x in finals)}")
    steps = result["settings"]["grid_steps"]
    return (f"Cells of the grid (of {len(RATES) * len(DECAYS)}) that grok in {steps:,} steps with seed {BEST_SEED}, "
            f"and those of them that never collapse: {'; '.join(told) or 'no grid is done'}.")


STUDY = harness.Study(__doc__, lambda c: c.name, queue, section, figure, config=Config(), partial=True)
