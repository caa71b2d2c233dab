"""Grokking with every control arm (DDC, §5.4-5.6, C.9, C.11, C.12): when an arm groks, and whether it stays there.

    python -m examples.grokking --quick            # p = 59; some hours on 2 CPU cores
    python -m examples.grokking --jobs 2           # p = 113, the paper's network; idle hours, or a GPU
    python -m examples.grokking --quick --show     # the figure and the table of the runs that are done

A queue of runs, arm by arm. First an arm meets a grid of learning rates and weight decays with one seed; a run ends
where it has grokked or after `--grid-steps`. Then it trains `--steps` steps with every seed at its best cell. A run
groks at the first reading of 95 % test accuracy that the next ten readings keep, and collapses where accuracy falls
below 95 % after that. Every run writes a checkpoint twice a minute and goes on from it, so that the queue may be killed
at any moment; several queues may share a folder.
"""

import argparse
import concurrent.futures
import dataclasses
import fcntl
import functools
import itertools
import json
import math
import multiprocessing
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from tqdm import tqdm

import gauge_optax as go
from examples import baselines, cli, report, study
from examples.grok_readings import GROKKED, grok_reading
from examples.report import Result
from models import grokking
from models.grokking import GrokConfig, Params

NAME = "grokking"
BEST_SEED = 42
POINTS = 100  # of a curve in the JSON


@dataclasses.dataclass(frozen=True)
class Config:
    """Sizes of the study; `p` numbers, readings every `every` steps."""

    p: int = 113
    mlp: str = "relu"
    steps: int = 20_000
    grid_steps: int = 10_000
    every: int = 100

    @property
    def network(self) -> GrokConfig:
        """The network."""
        return GrokConfig(p=self.p, mlp=self.mlp)  # type: ignore[arg-type]


QUICK = Config(p=59, grid_steps=5_000)


class Cell(NamedTuple):
    """One run."""

    arm: str
    rate: float
    decay: float
    seed: int

    @property
    def name(self) -> str:
        """Of its files."""
        return f"{self.arm.replace(' ', '_').replace(',', '')}_{self.rate:g}_{self.decay:g}_{self.seed}"


# Arms -------------------------------------------------------------------------------------------------

Knob = Any
"""A rate or a decay: a number, or an array, so that all cells of an arm share one program."""
Maker = Callable[[GrokConfig, Knob, Knob], optax.GradientTransformation]
B2 = 0.98


def _adamw(rate: Knob, decay: Knob) -> optax.GradientTransformation:
    return optax.adamw(rate, b2=B2, weight_decay=decay)


def _muon(rate: Knob, decay: Knob, per_head: bool = False) -> optax.GradientTransformation:
    return baselines.muon(rate, decay, per_head=per_head)


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
    "rotational AdamW": lambda c, rate, decay: go.rotational_adamw(rate, NEURONS, b2=B2, weight_decay=decay),
    "Muon": lambda c, rate, decay: _muon(rate, decay),
    "Muon, per head": lambda c, rate, decay: _muon(rate, decay, per_head=True),
    "Muon, logit shift alone": lambda c, rate, decay: go.quotient(_muon(rate, decay), grokking.shift()),
    "Muon, attention decay doubled": lambda c, rate, decay: optax.chain(
        _muon(rate, decay), baselines.more_decay(rate * decay, lambda path: "/attn/" in path)
    ),
    "Muon, dead directions masked": lambda c, rate, decay: baselines.dead_directions_masked(
        _muon(rate, decay), lambda path: "blocks" in path and path.endswith("kernel")
    ),
    "quotient Muon": lambda c, rate, decay: go.quotient(_muon(rate, decay), grokking.gauges(c)),
    "quotient Muon, rotations not held": lambda c, rate, decay: go.quotient(
        _muon(rate, decay), grokking.gauges(c), hold=False
    ),
    "DDC-Muon": lambda c, rate, decay: go.ddc_muon(
        rate, grokking.gauges(c), weight_decay=decay, adam_weight_decay=decay, consistent_rms=0.2
    ),
}
RATES, DECAYS = (1e-3, 3e-3, 1e-2), (0.3, 1.0, 3.0)


# One run ----------------------------------------------------------------------------------------------


class Program(NamedTuple):
    """What one arm compiles: `advance` over some steps, `read` the curves, `end` the last reading."""

    init: Callable[..., Any]
    advance: Callable[..., tuple[Params, Any]]
    read: Callable[..., dict[str, jax.Array]]
    end: Callable[..., dict[str, jax.Array]]


@functools.cache
def program(config: Config, arm: str) -> Program:
    """The compiled program of one arm, whatever the rate, the decay and the seed."""
    c = config.network

    @jax.jit
    def init(params: Params, rate: jax.Array, decay: jax.Array) -> Any:
        return ARMS[arm](c, rate, decay).init(params)

    @jax.jit
    def advance(
        params: Params, state: Any, train: grokking.Pairs, rate: jax.Array, decay: jax.Array
    ) -> tuple[Params, Any]:
        tx = ARMS[arm](c, rate, decay)

        def step(_: jax.Array, carry: tuple[Params, Any]) -> tuple[Params, Any]:
            params, state = carry
            updates, state = tx.update(jax.grad(functools.partial(grokking.loss, c))(params, train), state, params)
            return optax.apply_updates(params, updates), state

        return jax.lax.fori_loop(0, config.every, step, (params, state))

    return Program(
        init, advance, jax.jit(functools.partial(reading, c)), jax.jit(functools.partial(last_reading, c))
    )


def reading(
    c: GrokConfig, start: Params, params: Params, train: grokking.Pairs, test: grokking.Pairs
) -> dict[str, jax.Array]:
    """Losses, accuracies, and how far coordinates that no output shows have gone.

    `anchor` is the root mean square change of what our gauges read, log γ and log ‖up‖ per channel; `ratio` that of the
    paper's coordinates, log γ − log ‖up's row‖ and log ‖up's column‖ − p·log ‖down's row‖; `shift` the norm of the mean
    over classes of the output kernel's change, relative to the kernel at the start.
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
        "anchor": study.rms(jnp.concatenate([x.ravel() for x in moved])),
        "ratio": study.rms(jnp.concatenate(ratios)),
        "shift": jnp.linalg.norm(shifted) * c.p**0.5 / jnp.linalg.norm(first),
    }


def _ratios(c: GrokConfig, params: Params) -> list[jax.Array]:
    """The paper's coordinates of scales: log ‖W₁‖ − p·log ‖W₂‖ per channel."""
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


def last_reading(c: GrokConfig, params: Params) -> dict[str, jax.Array]:
    """Of the activations on all pairs: effective rank, dead units, and whether dead directions are axes."""
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


DEAD = 1e-8  # of the largest eigenvalue of the activations' Gram matrix


def run_cell(config: Config, cell: Cell, folder: Path, steps: int, stop_when_grokked: bool, position: int) -> bool:
    """Trains one run to its end, from its checkpoint if there is one. False if another process has it."""
    done, saved = folder / f"{cell.name}.json", folder / f"{cell.name}.npz"
    if finished(folder, cell, steps) is not None:
        return True
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"{cell.name}.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # let go of when the process ends, however it ends
        except BlockingIOError:
            return False
        c, compiled = config.network, program(config, cell.arm)
        knobs = jnp.asarray(cell.rate, jnp.float32), jnp.asarray(cell.decay, jnp.float32)
        start = jax.jit(functools.partial(grokking.init, c))(jax.random.key(cell.seed))
        train, test = grokking.data(c, cell.seed)
        carry = start, compiled.init(start, *knobs)
        curves = [{key: float(x) for key, x in compiled.read(start, start, train, test).items()}]
        if saved.exists():
            carry, curves = study.restore(saved, carry)
        wrote = time.monotonic()
        with tqdm(total=steps, initial=(len(curves) - 1) * config.every, desc=cell.name, position=position, leave=False,
                  mininterval=1, unit="step") as bar:  # fmt: skip
            while (len(curves) - 1) * config.every < steps:
                carry = compiled.advance(*carry, train, *knobs)
                read = compiled.read(start, carry[0], train, test)
                curves.append({key: float(x) for key, x in read.items()})
                bar.update(config.every)
                bar.set_postfix({key: f"{curves[-1][key]:.3g}" for key in ("train_loss", "test_loss", "test_accuracy")})
                if stop_when_grokked and _grokked(curves):
                    break
                if time.monotonic() - wrote > study.SAVE_EVERY:
                    study.save(saved, carry, curves)
                    wrote = time.monotonic()
        last = {key: float(x) for key, x in compiled.end(carry[0]).items()}
        whole = stop_when_grokked and _grokked(curves)
        study.write(done, {
            "steps": steps if whole else (len(curves) - 1) * config.every, "every": config.every, "last": last,
            "curves": {key: [float(f"{x[key]:.5g}") for x in curves] for key in curves[0]},
        })  # fmt: skip
        saved.unlink(missing_ok=True)
    return True


# What a run says --------------------------------------------------------------------------------------


def _grokked(curves: Sequence[Mapping[str, float]]) -> bool:
    return grok_reading([x["test_accuracy"] for x in curves]) is not None


def summary(record: Mapping[str, Any]) -> dict[str, float]:
    """One run in numbers: steps to grok (inf), collapses, readings below 95 % after it, final readings."""
    rows = [dict(zip(record["curves"], values, strict=True)) for values in zip(*record["curves"].values(), strict=True)]
    at = grok_reading(record["curves"]["test_accuracy"])
    after = [x["test_accuracy"] >= GROKKED for x in rows[at:]] if at is not None else []
    falls = sum(a and not b for a, b in itertools.pairwise(after))
    lowest = min((x["test_accuracy"] for x in rows[at:]), default=math.nan) if at is not None else math.nan
    return rows[-1] | record["last"] | {
        "grokked": math.inf if at is None else at * record["every"],
        "collapses": falls, "below": after.count(False), "lowest": lowest,
    }  # fmt: skip


def finished(folder: Path, cell: Cell, steps: int) -> dict[str, Any] | None:
    """The record of a run that is done."""
    path = folder / f"{cell.name}.json"
    record: dict[str, Any] | None = json.loads(path.read_text()) if path.exists() else None
    return record if record is not None and record["steps"] >= steps else None


def grid_cells(arm: str) -> list[Cell]:
    """The runs of an arm's grid."""
    return [Cell(arm, rate, decay, BEST_SEED) for rate, decay in itertools.product(RATES, DECAYS)]


def best(config: Config, folder: Path, arm: str) -> Cell | None:
    """The cell of an arm's grid that groks first, or ends with the lowest test loss; None before the grid is done."""
    records = [(cell, finished(folder / "grid", cell, config.grid_steps)) for cell in grid_cells(arm)]
    if any(record is None for _, record in records):
        return None
    scores = {cell: summary(record) for cell, record in records if record is not None}
    return min(scores, key=lambda cell: (scores[cell]["grokked"], _finite(scores[cell]["test_loss"])))


def _finite(x: float) -> float:
    return x if math.isfinite(x) else math.inf


# The queue --------------------------------------------------------------------------------------------


def work(config: Config, cell: Cell, folder: Path, steps: int, stop: bool) -> bool:
    """One task of a worker process."""
    identity = multiprocessing.current_process()._identity
    return run_cell(config, cell, folder, steps, stop, position=identity[-1] if identity else 1)


def run_queue(config: Config, arms: Sequence[str], seeds: Sequence[int], folder: Path, jobs: int) -> None:
    """Makes all missing runs: arm by arm its grid, then its seeds."""
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(jobs, context) as pool:

        def make(cells: Sequence[Cell], into: Path, steps: int, stop: bool, name: str) -> None:
            running = [pool.submit(work, config, cell, into, steps, stop) for cell in cells]
            for one in tqdm(concurrent.futures.as_completed(running), total=len(cells), desc=name, unit="run"):
                one.result()

        for arm in arms:
            make(grid_cells(arm), folder / "grid", config.grid_steps, True, f"{arm}, grid")
            if (cell := best(config, folder, arm)) is not None:
                make([cell._replace(seed=seed) for seed in seeds], folder, config.steps, False, f"{arm}, seeds")


def collect(config: Config, arms: Sequence[str], seeds: Sequence[int], folder: Path) -> Result:
    """All runs that are done as one result, in the form that `report` reads."""
    cells: dict[str, dict[str, Any]] = {}
    grid: dict[str, Any] = {}
    for arm in arms:
        records = {cell: finished(folder / "grid", cell, config.grid_steps) for cell in grid_cells(arm)}
        grid[arm] = {
            f"{cell.rate:g}, {cell.decay:g}": _number(summary(record)["grokked"])
            for cell, record in records.items() if record is not None
        }  # fmt: skip
        chosen = best(config, folder, arm)
        for seed in seeds:
            record = None if chosen is None else finished(folder, chosen._replace(seed=seed), config.steps)
            if chosen is None or record is None:
                continue
            final = {key: _number(x) for key, x in summary(record).items()}
            count = len(record["curves"]["test_accuracy"])
            at = np.unique(np.linspace(0, count - 1, min(POINTS, count)).astype(int)).tolist()
            curves = {key: [values[k] for k in at] for key, values in record["curves"].items()}
            steps = {"step": [k * config.every for k in at]}
            cells.setdefault(arm, {})[str(seed)] = {
                "final": final | {"rate": chosen.rate, "decay": chosen.decay}, "curves": steps | curves,
            }  # fmt: skip
    return {
        "study": NAME, "settings": dataclasses.asdict(config), "arms": list(cells), "seeds": list(seeds),
        "grid": grid, "machine": study.machine(), "versions": study.versions(), "cells": cells,
    }  # fmt: skip


def _number(x: float) -> float | None:
    return float(f"{x:.6g}") if math.isfinite(x) else None


# Figure and table -------------------------------------------------------------------------------------


def figure(result: Result, path: Path) -> None:
    """Test accuracy of each arm, a line per seed, with the collapses after it grokked."""
    fig, axes = report.grid_of_panels(len(result["arms"]), "Test accuracy: when it rises, and whether it stays")
    for axis, arm in zip(axes, result["arms"], strict=True):
        for cell in result["cells"][arm].values():
            axis.plot(cell["curves"]["step"], cell["curves"]["test_accuracy"], lw=1.0)
        axis.axhline(GROKKED, color="0.7", lw=0.8, zorder=0)
        axis.set_title(arm, fontsize=9)
        axis.set_ylim(-0.02, 1.02)
    report.save(fig, path)


def section(result: Result) -> str:
    """The table, and what it says."""
    c = Config(**result["settings"])
    heads = (
        "arm", "rate, decay", "seeds", "grokked at", "collapses", "readings below 95 %", "lowest after",
        "final accuracy", "shift of logits", "drift, ours", "drift, paper's", "effective rank", "dead units",
        "alignment",
    )  # fmt: skip
    rows = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for arm, cells in result["cells"].items():
        finals = [cell["final"] for cell in cells.values()]

        def shown(key: str, form: str, finals: Sequence[Mapping[str, Any]] = finals) -> str:
            return ", ".join("–" if x[key] is None else format(x[key], form) for x in finals)

        cells_of_row = [
            arm, f"{finals[0]['rate']:g}, {finals[0]['decay']:g}", len(finals), shown("grokked", ".0f"),
            shown("collapses", ".0f"), shown("below", ".0f"), shown("lowest", ".3f"), shown("test_accuracy", ".3f"),
            shown("shift", ".1e"), shown("anchor", ".1e"), shown("ratio", ".1e"), shown("effective_rank", ".1f"),
            shown("dead_units", ".2f"), shown("alignment", ".2f"),
        ]  # fmt: skip
        rows.append("| " + " | ".join(map(str, cells_of_row)) + " |")
    rates, decays = (", ".join(f"{x:g}" for x in numbers) for numbers in (RATES, DECAYS))
    about = (
        f"Addition modulo {c.p} from {GrokConfig().share:.0%} of all pairs, full batch, one block of width "
        f"{GrokConfig().d_model} ({c.mlp}), {c.steps:,} steps, a reading every {c.every}. Rates {rates} and decays "
        f"{decays}, chosen per arm with one seed by the first grokking. A number per seed. {report.made_with(result)}"
    )
    return "\n\n".join([about, "\n".join(rows), " ".join(sentences(result))])


SHIFT = "the norm of the output kernel's mean over classes"


def sentences(result: Result) -> Iterator[str]:
    """What the numbers say of the paper's claims and of public runs."""
    cells = result["cells"]

    def finals(arm: str, key: str) -> list[float]:
        return [x["final"][key] for x in cells.get(arm, {}).values()]

    if {"AdamW", "DDC-AdamW"} <= cells.keys():
        limit = [1e-4 * x for x in finals("AdamW", "shift")]
        held = [x <= y for x, y in zip(finals("DDC-AdamW", "shift"), limit, strict=False)]
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
        yield verdict(result)
    yield f"Test accuracy falls below {GROKKED:.0%} again after grokking: {', '.join(falls) or 'in no arm'}."
    yield f"Arms that grok with every seed and stay there: {', '.join(steady) or 'none'}."
    yield f"Arms that do not grok in {result['settings']['steps']:,} steps: {', '.join(never) or 'none'}."


MATCHED = "Muon, attention decay doubled"


def verdict(result: Result) -> str:
    """Table 4's F2; needs both arms."""
    both = [[x["final"]["alignment"] for x in result["cells"][arm].values()] for arm in ("DDC-Muon", MATCHED)]
    higher = [a > b for a, b in zip(*both, strict=False)]
    return report.paper(
        "the gauge's dead directions lie nearer to axes than those of Muon with matched decay", higher,
        "axis alignment of the hidden layer's dead directions",
    )  # fmt: skip


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the queue, then draws and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=cli.Help)
    parser.add_argument("--quick", action="store_true", help="p = 59")
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), metavar="ARM", help=f"of: {'; '.join(ARMS)}")
    parser.add_argument("--seeds", type=int, nargs="+", default=list(study.SEEDS))
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--out", type=Path, help="runs, JSON and PNG; default: outputs/grokking, with p in its name")
    parser.add_argument("--show", action="store_true", help="draw and print what is done, and run nothing")
    for field in dataclasses.fields(Config):
        kind = type(field.default)
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=kind, help=f"default: {field.default}")
    args = parser.parse_args(argv)
    given = {f.name: getattr(args, f.name) for f in dataclasses.fields(Config) if getattr(args, f.name) is not None}
    config = dataclasses.replace(QUICK if args.quick else Config(), **given)
    out = args.out or Path("outputs") / f"grokking_{config.p}"
    arms = args.arms or list(ARMS)
    if not args.show:
        run_queue(config, arms, args.seeds, out, args.jobs)
    result = collect(config, arms, args.seeds, out)
    path = out / f"{NAME}.json"
    study.write(path, result)
    if result["cells"]:
        figure(result, path.with_suffix(".png"))
        print(section(result))
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
