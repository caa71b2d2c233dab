"""Runs a study: makes the cells that are missing, saves each in a JSON, then draws the figure and prints the tables.

    python -m examples.studies NAME --out examples/results       # if it is killed, the same command goes on
    python -m examples.studies NAME --only "AdamW | *"           # some of the cells
    python -m examples.studies NAME --show                       # figure and tables of the cells that are finished

A *study* compares *arms*, most often optimizers, on a problem. A *cell* is one result in its JSON, most often one arm
from one seed. A module with a study has a variable `STUDY`, which says what the cells are and how they become a figure
and text. Several processes may fill one file.
"""

import argparse
import contextlib
import dataclasses
import fcntl
import functools
import importlib
import itertools
import json
import math
import os
import re
import time
import tomllib
import zlib
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from tqdm import tqdm

from examples import cli

Params = Any
Data = Any
Loss = Callable[[Params, Data], jax.Array]
Observe = Callable[[Params, Params, Data], Mapping[str, jax.Array]]
Schedule = Callable[[Any], Any]
"""Step → rate."""
Result = dict[str, Any]
"""The content of a study's JSON: a header, and the finished cells."""
Address = tuple[str, ...]
"""The keys that lead to a cell in a `Result`, from the outside in, such as ("cells", "AdamW", "42")."""

SEEDS = (42, 142, 242)
READINGS = 100
DIGITS = 6
SAVE_EVERY = 30.0
"""Seconds between checkpoints of a run."""


class Run(NamedTuple):
    """What the function that makes a cell gets: the result so far, and the path for a checkpoint of the cell."""

    result: Result
    saved: Path


Cells = Mapping[Address, Callable[[Run], Any]]
"""Address of a cell → the function that makes it."""


@dataclasses.dataclass(frozen=True)
class Study:
    """A study: its cells, and how they become a figure and text.

    Attributes:
      doc: the help text of the command line.
      name: the name of the JSON and PNG files. If files depend on sizes, a function: sizes → name.
      cells: (sizes, command line) → the cells. Or it returns a function: result so far → the cells to make next.
      section: result → its Markdown.
      figure: (result, path) draws the result to the path; None for a study without a figure.
      page: result → a Markdown page that is written beside the JSON; None for none.
      config: the sizes (numbers such as steps and widths), a frozen dataclass. Each is an option of the command line.
      full: the sizes for the option `--full`; None if there is none.
      seeds: the default seeds; None for a study without seeds.
      settings: sizes → those that must be equal for two runs that share a file.
      head: sizes → a header in place of the usual one.
      folder: the default folder for results, in place of outputs/studies.
      precision: the precision of matrix products. None is the device's default, which on accelerators is shorter
        floats: two runs that should be equal then differ by their rounding.
      digits: the number of digits to which the numbers of a cell are rounded.
      partial: whether figure and section can be made if some cells are missing.
    """

    doc: str | None
    name: str | Callable[[Any], str]
    cells: Callable[[Any, argparse.Namespace], Cells | Callable[[Result], Cells]]
    section: Callable[[Result], str]
    figure: Callable[[Result, Path], object] | None = None
    page: Callable[[Result], str] | None = None
    config: Any = None
    full: Any = None
    seeds: Sequence[int] | None = SEEDS
    settings: Callable[[Any], Mapping[str, Any]] = lambda config: dataclasses.asdict(config) if config else {}
    head: Callable[[Any], Result] | None = None
    folder: Path | None = None
    precision: str | None = "highest"
    digits: int | None = None
    partial: bool = False

    def named(self, config: Any) -> str:
        """The name of the study's files for these sizes."""
        return self.name if isinstance(self.name, str) else self.name(config)


def find(name: str) -> Study:
    """The study of a module in `examples/studies`, or of an example."""
    folder = "examples.studies" if (Path(__file__).parent / f"{name}.py").exists() else "examples"
    study: Study = importlib.import_module(f"{folder}.{name}").STUDY
    return study


# Command line -------------------------------------------------------------------------------------------


def parse(study: Study, argv: Sequence[str] | None) -> tuple[Any, argparse.Namespace]:
    """Parses the command line: the sizes, each of which is an option, and the options that all studies have."""
    parser = argparse.ArgumentParser(description=study.doc, formatter_class=cli.Help)
    places = study.folder or "outputs/studies, or outputs/full"
    parser.add_argument("--out", type=Path, help=f"folder of what is written; default: {places}")
    if study.seeds is not None:
        parser.add_argument("--seeds", type=int, nargs="+", default=list(study.seeds))
    parser.add_argument("--only", nargs="+", metavar="CELL", help="patterns such as 'AdamW | *': the cells to make")
    parser.add_argument("--stop-after", type=int, help="leave after this many cells, as if killed")
    parser.add_argument("--show", action="store_true", help="make no cell")
    if study.full is not None:
        parser.add_argument("--full", action="store_true", help="the paper's sizes")
    fields = () if study.config is None else dataclasses.fields(study.config)
    sizes = {x.name: getattr(study.config, x.name) for x in fields}
    for name, size in sizes.items():
        more = "" if study.full is None else f"; full: {getattr(study.full, name)}"
        option = f"--{name.replace('_', '-')}"
        if isinstance(size, bool):
            parser.add_argument(option, action="store_const", const=True)
        else:
            parser.add_argument(option, type=type(size), help=f"default: {size}{more}")
    args = parser.parse_args(argv)
    at_full = getattr(args, "full", False)
    args.out = args.out or study.folder or Path("outputs") / ("full" if at_full else "studies")
    given = {name: getattr(args, name) for name in sizes if getattr(args, name) is not None}
    config = study.full if at_full else study.config
    return (dataclasses.replace(config, **given) if given else config), args


def main(study: Study, argv: Sequence[str] | None = None) -> Result:
    """Makes and saves the missing cells; then draws and prints the finished ones."""
    config, args = parse(study, argv)
    path = args.out / f"{study.named(config)}.json"
    cells = study.cells(config, args)
    wanted = cells if callable(cells) else lambda result: cells
    empty = header(study, config, args, {} if callable(cells) else cells)
    result = load(path, {} if args.show and path.exists() else empty)
    if not args.show:
        with jax.default_matmul_precision(study.precision):
            result = fill(path, result, wanted, args, study.digits)
    missing = [_label(address) for address in wanted(result) if not done(result, address)]
    if missing:
        print(f"{path}: {len(missing)} cells are not made, {missing[0]} the first of them")
    if not missing or (study.partial and result != empty):
        shown(study, path, result)
    return result


def once(
    doc: str | None, name: str, measured: Callable[[Any], Result], page: Callable[[Result], str], config: Any,
    folder: Path, argv: Sequence[str] | None = None,
) -> Result:
    """Makes a result that does not consist of cells, by `measured(sizes)`, and writes and prints it.

    The sizes come from the command line.
    """
    study = Study(doc, name, lambda config, args: {}, page, page=page, config=config, seeds=None, folder=folder)
    config, args = parse(study, argv)
    result, path = measured(config), args.out / f"{name}.json"
    write(path, result)
    shown(study, path, result)
    return result


def shown(study: Study, path: Path, result: Result) -> None:
    """Draws the figure of a result, writes its page, and prints its section."""
    text = study.section(result)
    if study.figure is not None:
        study.figure(result, path.with_suffix(".png"))
    if study.page is not None:
        path.with_suffix(".md").write_text(study.page(result))
    print(text)
    print(f"wrote {path}" + f" and {path.with_suffix('.png')}" * (study.figure is not None))


# The file -------------------------------------------------------------------------------------------------


def machine() -> str:
    """The kind of this machine, for the header of a result."""
    device = jax.devices()[0]
    return f"{os.cpu_count()}-core CPU" if device.platform == "cpu" else device.device_kind


def versions() -> dict[str, str]:
    """The versions of jax, of optax and of this project, which is read from pyproject.toml: it may not be installed."""
    project = Path(__file__).parents[2] / "pyproject.toml"
    version = str(tomllib.loads(project.read_text())["project"]["version"])
    return {"gauge_optax": version, "jax": jax.__version__, "optax": optax.__version__}


def header(study: Study, config: Any, args: argparse.Namespace, cells: Cells) -> Result:
    """The header of a result: everything that must be equal for two runs that share a file."""
    if study.head is not None:
        return study.head(config)
    settings = json.loads(json.dumps(study.settings(config)))
    head: Result = {"study": study.named(config), "settings": settings}
    if arms := list(dict.fromkeys(arm for where, arm, *seed in cells if where == "cells" and seed)):
        head["arms"] = arms
    if study.seeds is not None:
        head["seeds"] = args.seeds
    return head | {"machine": machine(), "versions": versions(), "cells": {}}


def load(path: Path, head: Result) -> Result:
    """The result at `path`, or `head` if there is no file. Raises ValueError if the file has another header.

    Older files lack some keys of the header, and some versions. Only the keys that a file has are compared.
    """
    if not path.exists():
        return head
    result: Result = json.loads(path.read_text())

    expected = {key: x for key, x in head.items() if key in result and not isinstance(x, dict)}
    for key in ("settings", "versions"):
        expected |= {key: {name: head[key].get(name) for name in result[key]}} if key in head and key in result else {}
    other = [key for key in expected if result[key] != expected[key]]
    if other:
        raise ValueError(
            f"{path} holds runs under other {' and '.join(other)}\n"
            f"  found:    {[result[key] for key in other]}\n"
            f"  expected: {[expected[key] for key in other]}\n"
            f"  remedy:   delete it, or give another --out"
        )
    return result


def write(path: Path, result: Result) -> None:
    """Writes a result as JSON, all of it or nothing: if the process is killed meanwhile, the old file stays."""
    text = json.dumps(result, indent=1)
    text = re.sub(r"\[\s([^\[\]{}]*)\]", lambda numbers: f"[{' '.join(numbers[1].split())}]", text)
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".tmp")
    unfinished.write_text(text + "\n")
    os.replace(unfinished, path)


def rounded(x: Any, digits: int | None = DIGITS) -> Any:
    """Converts arrays, numbers and trees of them to what JSON can hold, with floats rounded to `digits` digits."""
    if isinstance(x, Mapping):
        return {key: rounded(y, digits) for key, y in x.items()}
    if isinstance(x, list | tuple):
        return [rounded(y, digits) for y in x]
    if isinstance(x, np.ndarray | np.generic | jax.Array):
        return rounded(np.asarray(x, float).tolist(), digits)
    return float(f"{x:.{digits}g}") if isinstance(x, float) and digits is not None else x


@contextlib.contextmanager
def _locked(path: Path, wait: bool = True) -> Iterator[bool]:
    """Holds a lock on a file, and yields whether it could be had. The lock ends with the process, even a killed one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        yield True
        path.unlink(missing_ok=True)


def done(result: Result, address: Address) -> bool:
    """Whether a result has this cell."""
    for key in address:
        if key not in result:
            return False
        result = result[key]
    return True


def save(path: Path, address: Address, cell: Any) -> Result:
    """Adds a cell to the file. The file is read again first, because other processes may have added cells."""
    with _locked(path.with_suffix(".lock")):
        result: Result = json.loads(path.read_text())
        *outer, last = address
        functools.reduce(lambda inside, key: inside.setdefault(key, {}), outer, result)[last] = cell
        write(path, result)
    return result


# Cells ----------------------------------------------------------------------------------------------------


def fill(
    path: Path, result: Result, wanted: Callable[[Result], Cells], args: argparse.Namespace, digits: int | None = None
) -> Result:
    """Makes the missing cells that no other process is making, one after the other, up to `args.stop_after` of them."""
    if not path.exists():
        write(path, result)
    if args.only and not _chosen(wanted(result), args.only):
        raise SystemExit(f"--only: no cell is called {args.only}; cells are {[_label(x) for x in wanted(result)][:40]}")
    taken: set[Address] = set()
    with tqdm(unit="cell", mininterval=1) as progress:
        while todo := {x: make for x, make in _chosen(wanted(result), args.only).items() if not done(result, x)}:
            progress.total = progress.n + len(todo)
            address = next((x for x in todo if x not in taken), None)
            if progress.n == args.stop_after or address is None:  # other processes make the rest
                break
            progress.set_description(_label(address))
            own = f"{path.stem}-{zlib.crc32(_label(address).encode()):08x}"
            with _locked(path.with_name(f"{own}.lock"), wait=False) as free:
                result = json.loads(path.read_text())
                if free and not done(result, address):
                    saved = path.with_name(f"{own}.npz")
                    result = save(path, address, rounded(todo[address](Run(result, saved)), digits))
                    saved.unlink(missing_ok=True)
                    progress.update()
                elif not free:
                    taken.add(address)
    return result


TABLES = ("cells", "rows", "sizes", "cases")
"""Keys of a result under which cells stand. They are left out of the names of cells."""


def _label(address: Address) -> str:
    return " | ".join(address[1:] if address[0] in TABLES else address)


def _chosen(cells: Cells, only: Sequence[str] | None) -> Cells:
    """The cells whose name fits one of the patterns `only`; all cells if it is None."""
    return {x: make for x, make in cells.items() if only is None or any(fnmatchcase(_label(x), p) for p in only)}


def by_seed(
    arms: Sequence[str] | Callable[[Any], Sequence[str]], make: Callable[[Any, str, int], Any]
) -> Callable[[Any, argparse.Namespace], Cells]:
    """One cell per arm and seed, made by make(sizes, arm, seed). `arms` may be a function of the sizes."""

    def cells(config: Any, args: argparse.Namespace) -> Cells:
        pairs = itertools.product(arms(config) if callable(arms) else arms, args.seeds)
        return {
            ("cells", arm, str(seed)): lambda run, arm=arm, seed=seed: make(config, arm, seed)  # type: ignore[misc]
            for arm, seed in pairs
        }

    return cells


def by_name(
    names: Iterable[str], make: Callable[[Any, argparse.Namespace, str], Any], where: str = "cells"
) -> Callable[[Any, argparse.Namespace], Cells]:
    """One cell per name, which has all seeds, made by make(sizes, command line, name).

    The cells stand under the key `where` of the result, or in the result itself if `where` is "".
    """

    def cells(config: Any, args: argparse.Namespace) -> Cells:
        found = {((where, name) if where else (name,)): name for name in names}
        return {x: lambda run, name=name: make(config, args, name) for x, name in found.items()}  # type: ignore[misc]

    return cells


# Training runs --------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Arm:
    """An optimizer, and the loss that it minimises if that is not the loss of the problem."""

    tx: optax.GradientTransformation
    loss: Loss | None = None


@dataclasses.dataclass(frozen=True)
class Training:
    """A problem, and the arms that are trained on it from every seed.

    Attributes:
      arms: name → arm, in the order of the table.
      make: seed → initial parameters and data. Shapes may not depend on the seed, so that seeds share one program.
      loss: (parameters, data) → loss. Every step uses all of the data.
      observe: (initial parameters, parameters, data) → named scalars, measured at many steps of a run.
    """

    arms: Mapping[str, Arm]
    make: Callable[[int], tuple[Params, Data]]
    loss: Loss
    observe: Observe


def trained(build: Callable[[Any], Training]) -> Callable[[Any, argparse.Namespace], Cells]:
    """The cells of a study of training runs. A cell has `final`, the last measurement, and `curves`, all of them."""

    def cells(config: Any, args: argparse.Namespace) -> Cells:
        training = build(config)
        program = functools.cache(lambda name: advance(training, training.arms[name]))

        def make(run: Run, name: str, seed: int) -> Any:
            return run_cell(training, training.arms[name].tx, program(name), seed, config.steps, run.saved)

        pairs = itertools.product(training.arms, args.seeds)
        return {("cells", name, str(seed)): functools.partial(make, name=name, seed=seed) for name, seed in pairs}

    return cells


def advance(training: Training, arm: Arm) -> Callable[..., tuple[Params, Any]]:
    """Returns a compiled function that takes any number of steps of one arm, for all seeds."""
    loss = arm.loss or training.loss

    @jax.jit
    def steps(params: Params, state: Any, data: Data, first: int, last: int) -> tuple[Params, Any]:
        return descend(arm.tx, loss, (params, state), lambda n: data, first, last)

    return steps


def descend(
    tx: optax.GradientTransformation, loss: Callable[..., jax.Array], carry: tuple[Params, Any],
    batch: Callable[[jax.Array], Any], first: Any, last: Any,
) -> tuple[Params, Any]:
    """Parameters and state after the steps from number `first` to `last`. Call it inside `jit`."""

    def step(n: jax.Array, carry: tuple[Params, Any]) -> tuple[Params, Any]:
        params, state = carry
        updates, state = tx.update(jax.grad(loss)(params, batch(n)), state, params)
        return optax.apply_updates(params, updates), state

    return jax.lax.fori_loop(first, last, step, carry)


def run_cell(
    training: Training, tx: optax.GradientTransformation, go_on: Callable[..., Any], seed: int, steps: int, saved: Path
) -> Any:
    """Trains one arm from one seed, and measures `training.observe` at regular steps. `saved` is its checkpoint."""
    start, data = training.make(seed)
    observe = jax.jit(training.observe)
    at = np.unique(np.linspace(0, steps, min(READINGS, steps) + 1).astype(int)).tolist()
    _, readings = along(
        at, (start, jax.jit(tx.init)(start)), lambda carry, first, last: go_on(*carry, data, first, last),
        lambda carry: rounded(observe(start, carry[0], data)), saved,
    )
    curves = {key: [reading[key] for reading in readings] for key in readings[0]}
    return {"final": {key: curve[-1] for key, curve in curves.items()}, "curves": {"step": at} | curves}


def along(
    at: Sequence[int], carry: Any, go_on: Callable[[Any, int, int], Any], read: Callable[[Any], dict[str, float]],
    saved: Path,
) -> tuple[Any, list[dict[str, float]]]:
    """Trains to the last of the steps `at`. Returns the end of the run, and the measurements at all of these steps.

    It saves checkpoints to `saved`, and goes on from there if the file exists.
    """
    if saved.exists():
        carry, readings = restore(saved, carry)
    else:
        readings = [read(carry)]
    wrote = time.monotonic()
    with tqdm(total=at[-1], initial=at[len(readings) - 1], unit="step", mininterval=1, leave=False) as progress:
        for first, last in itertools.pairwise(at[len(readings) - 1 :]):
            carry = go_on(carry, first, last)
            readings.append(read(carry))
            progress.update(last - first)
            progress.set_postfix({key: f"{x:.3g}" for key, x in readings[-1].items() if "loss" in key})
            if time.monotonic() - wrote > SAVE_EVERY:
                keep(saved, carry, readings)
                wrote = time.monotonic()
    return carry, readings


def keep(path: Path, carry: Any, readings: Sequence[Mapping[str, float]]) -> None:
    """Writes a checkpoint, the state and measurements of a run, all of it or nothing."""
    unfinished = path.with_suffix(".tmp")
    path.parent.mkdir(parents=True, exist_ok=True)
    with unfinished.open("wb") as file:
        np.savez(file, *map(np.asarray, jax.tree.leaves(carry)), readings=json.dumps(readings))
    os.replace(unfinished, path)


def restore(path: Path, like: Any) -> tuple[Any, list[dict[str, float]]]:
    """Reads the state and the measurements that `keep` wrote. The state is structured like `like`."""
    with np.load(path) as file:
        readings = json.loads(str(file["readings"]))
        leaves = [jnp.asarray(file[f"arr_{k}"]) for k in range(len(jax.tree.leaves(like)))]
    return jax.tree.unflatten(jax.tree.structure(like), leaves), readings


def rms(x: jax.Array) -> jax.Array:
    """The root mean square of an array."""
    return jnp.sqrt(jnp.mean(jnp.square(x)))


def scanned(
    tx: optax.GradientTransformation, loss: Callable[..., jax.Array], params: Params, batches: Any
) -> tuple[Params, jax.Array]:
    """Trains on stacked batches. Returns the last parameters, and the loss of each batch. Call it inside `jit`."""

    def step(carry: tuple[Any, Any], batch: Any) -> tuple[tuple[Any, Any], jax.Array]:
        params, state = carry
        value, grads = jax.value_and_grad(loss)(params, batch)
        updates, state = tx.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), value

    (params, _), losses = jax.lax.scan(step, (params, tx.init(params)), batches)
    return params, losses


# Sweeps of a rate -----------------------------------------------------------------------------------------

Group = tuple[Any, ...]
"""What one sweep of learning rates is about, such as (size, start, arm)."""
# The ratio of neighbouring rates; the number of rates at first; how many may be added on either side.
RATIO, RATES, LONGER = 2.5, 4, 3


class Sweep(NamedTuple):
    """The sweep of peak learning rates for a group. It ends when the best rate has a worse neighbour on both sides."""

    group: Group
    first: float

    @property
    def rates(self) -> dict[int, float]:
        """Number → rate, to two digits, for every rate that may be tried. The sweep begins with the numbers 0 to 3."""
        return {n: float(f"{self.first * RATIO**n:.2g}") for n in range(-LONGER, RATES + LONGER)}

    def losses(self, result: Result) -> dict[float, list[float]]:
        """Rate → validation losses of all seeds (inf if a run diverged). Rates that lack a seed are left out."""
        losses = {}
        for rate in self.rates.values():
            cells = [result["cells"].get(key((*self.group, rate, seed))) for seed in result["seeds"]]
            if all(cells):
                losses[rate] = [cell["validation"] if cell["finite"] else math.inf for cell in cells]
        return losses

    def missing(self, result: Result) -> list[Group]:
        """The cells (group, rate, seed) to train next: the first rates, then neighbours that the best one lacks."""
        losses = self.losses(result)
        means = {n: float(np.mean(losses[rate])) for n, rate in self.rates.items() if rate in losses}
        wanted = [n for n in range(RATES) if n not in means] or climb(means, 0, self.rates)
        cells = [(*self.group, self.rates[n], seed) for n in wanted for seed in result["seeds"]]
        return [cell for cell in cells if key(cell) not in result["cells"]]


def at_rates(
    build: Callable[[Schedule], optax.GradientTransformation], loss: Callable[..., Loss], inputs: Sequence[Any],
    warmup: int,
) -> Callable[..., Any]:
    """A compiled function for all peak rates: (initial weights, batches, held-out batches, rate) → its losses.

    It returns the loss of every batch, and the validation loss at the end.

    Args:
      build: schedule → optimizer. The schedule is a warm-up from a tenth of the peak, and then a cosine to zero.
      loss: (initial weights, further inputs) → a function of weights and a batch, which returns their loss.
      inputs: examples of initial weights, batches and held-out batches, and then of the further inputs of `loss`, such
        as weights that are not trained.
      warmup: the number of steps of the warm-up, but at most half of the run.
    """
    steps = len(inputs[1])
    shape = optax.warmup_cosine_decay_schedule(0.1, 1.0, warmup_steps=min(warmup, steps // 2), decay_steps=steps)

    def run(start: Params, batches: jax.Array, held_out: jax.Array, *more: Any) -> tuple[jax.Array, jax.Array]:
        *given, rate = more
        own = loss(start, *given)
        params, losses = scanned(build(lambda n: rate * shape(n)), own, start, batches)
        return losses, jax.lax.map(functools.partial(own, params), held_out).mean()

    return jax.jit(run).lower(*inputs, jnp.float32(0)).compile()


def scored(compiled: Callable[..., Any], inputs: Sequence[Any], rate: float, keys: Sequence[str]) -> dict[str, Any]:
    """Makes one run of `at_rates`, and returns the numbers `keys` of it.

    They are losses (None if the run diverged), whether it is finite, and seconds of the clock and of the CPU.
    """
    began, computed = time.monotonic(), time.process_time()
    losses, validation = jax.device_get(compiled(*inputs, jnp.float32(rate)))
    finite = bool(np.isfinite(losses).all() and np.isfinite(validation))
    found = {
        "validation": float(validation) if finite else None,
        "training": float(losses[-50:].mean()) if finite else None,
        "finite": finite,
        "seconds": round(time.monotonic() - began, 1),
        "cpu_seconds": round(time.process_time() - computed, 1),
    }
    return {key: found[key] for key in keys}


def swept(sweeps: Sequence[Sweep], train: Callable[[Group], Any]) -> Callable[[Result], Cells]:
    """Returns a function from the result so far to the cells that sweeps need next.

    `train` makes a cell from (group, rate, seed).
    """
    return lambda result: keyed([cell for sweep in sweeps for cell in sweep.missing(result)], train)


def keyed(cells: Sequence[Group], train: Callable[[Group], Any]) -> Cells:
    """Gives each cell its address, which ends in its `key`."""
    return {("cells", key(cell)): lambda run, cell=cell: train(cell) for cell in cells}  # type: ignore[misc]


def key(cell: Group) -> str:
    """The key in the JSON of a cell (group, rate, seed)."""
    *group, rate, seed = cell
    return " | ".join([*map(str, group), f"{rate:g}", str(seed)])


def loss_of(result: Result, cell: Group) -> float | None:
    """The loss of a finished run, infinite where it diverged; None if it is not finished."""
    done = result["cells"].get(key(cell))
    return None if done is None else math.inf if done["validation"] is None else done["validation"]


def best(losses: Mapping[float, Sequence[float]]) -> float:
    """The rate with the least mean loss."""
    return min(losses, key=lambda rate: float(np.mean(losses[rate])))


def climb(losses: Mapping[int, float], first: int, numbers: Container[int]) -> list[int]:
    """The numbers of the rates of a grid to try next: the neighbours of the best one, if they were not tried yet.

    Args:
      losses: number of a rate → loss, for the rates that were tried.
      first: the number to begin with.
      numbers: the numbers that may be tried.

    >>> climb({}, 1, range(4)), climb({1: 2.0}, 1, range(4)), climb({0: 2.2, 1: 2.0, 2: 2.1}, 1, range(4))
    ([1], [0, 2], [])
    """
    best = min(losses, key=lambda n: losses[n]) if losses else first
    wanted = (best - 1, best + 1) if losses else (best,)
    return [n for n in wanted if n in numbers and n not in losses]


def best_for_all(swept: Sequence[Mapping[float, float]]) -> tuple[float, float]:
    """The one rate that is best for all sweeps, and the most that its loss is above the best loss of a sweep.

    Only rates that every sweep has are compared, by that largest difference.

    >>> best_for_all([{0.1: 2.0, 0.2: 2.5}, {0.1: 1.25, 0.2: 1.0}])
    (0.1, 0.25)
    """
    common = set.intersection(*(set(rates) for rates in swept))
    worst = {rate: max(rates[rate] - min(rates.values()) for rates in swept) for rate in common}
    rate = min(worst, key=lambda rate: worst[rate])
    return rate, worst[rate]
