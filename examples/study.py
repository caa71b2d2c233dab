"""Runs a study: each of its arms from each seed, with a progress bar; leaves a JSON file, a figure and a table.

The JSON keeps every finished run, and a checkpoint beside it the state of the run under way, so that a killed study
goes on where it stopped and ends with the file that an unbroken one writes. A study is a `Study`, a frozen dataclass of
sizes with a `steps` field, a `figure` and a `section`:

    config, args = study.parse(__doc__, Config(), FULL, argv)
    return study.run(build(config), config, args, figure, section)
"""

import argparse
import dataclasses
import itertools
import json
import os
import re
import time
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from tqdm import tqdm

from examples import cli

Params = Any
Data = Any
Loss = Callable[[Params, Data], jax.Array]
Observe = Callable[[Params, Params, Data], dict[str, jax.Array]]
Cell = dict[str, Any]
"""One run: `final`, the last reading, and `curves`, all readings, each a list per observed quantity."""
Result = dict[str, Any]
"""What the JSON holds: a header, and `cells[arm][seed]`."""
Config = TypeVar("Config")

SEEDS = (42, 142, 242)
READINGS = 100
DIGITS = 6
SAVE_EVERY = 30.0
"""Seconds between checkpoints of a run under way."""


@dataclasses.dataclass(frozen=True)
class Arm:
    """An optimizer, and the loss it minimises and what is observed where these are not the study's own."""

    tx: optax.GradientTransformation
    loss: Loss | None = None
    observe: Observe | None = None


@dataclasses.dataclass(frozen=True)
class Study:
    """What is compared, on what.

    Attributes:
      name: of the JSON and PNG files.
      arms: by name, in the order of the table.
      make: seed → initial parameters and data; shapes may not depend on the seed, so that seeds share one program.
      loss: of (parameters, batch).
      observe: (initial parameters, parameters, data) → named scalars, read some hundred times along a run.
      batch: (data, step) → batch; by default everything, at each step.
    """

    name: str
    arms: Mapping[str, Arm]
    make: Callable[[int], tuple[Params, Data]]
    loss: Loss
    observe: Observe
    batch: Callable[[Data, jax.Array], Any] = lambda data, step: data


# Command line ---------------------------------------------------------------------------------------


def parse(
    doc: str | None, quick: Config, full: Config, argv: Sequence[str] | None
) -> tuple[Config, argparse.Namespace]:
    """The sizes, each of which is an option, and the options that all studies have."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=cli.Help)
    parser.add_argument("--out", type=Path, help="JSON and PNG; default: outputs/studies, or outputs/full")
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS))
    parser.add_argument("--full", action="store_true", help="the paper's sizes")
    parser.add_argument("--arms", nargs="+", metavar="ARM", help="only these; the others can be run later")
    parser.add_argument("--stop-after", type=int, help="leave after this many runs, as if killed")
    names = [field.name for field in dataclasses.fields(quick)]  # type: ignore[arg-type]
    for name in names:
        kind, sizes = type(getattr(quick, name)), f"{getattr(quick, name)}; full: {getattr(full, name)}"
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, help=f"default: {sizes}")
    args = parser.parse_args(argv)
    args.out = args.out or Path("outputs") / ("full" if args.full else "studies")
    given = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    return dataclasses.replace(full if args.full else quick, **given), args  # type: ignore[type-var]


# One run ----------------------------------------------------------------------------------------------


def rms(x: jax.Array) -> jax.Array:
    """Root of the mean square."""
    return jnp.sqrt(jnp.mean(jnp.square(x)))


def advance(study: Study, arm: Arm) -> Callable[..., tuple[Params, Any]]:
    """One compiled program for any number of steps of one arm, whatever the seed."""
    loss = arm.loss or study.loss

    @jax.jit
    def steps(params: Params, state: Any, data: Data, first: int, last: int) -> tuple[Params, Any]:
        def step(n: jax.Array, carry: tuple[Params, Any]) -> tuple[Params, Any]:
            params, state = carry
            grads = jax.grad(loss)(params, study.batch(data, n))
            updates, state = arm.tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        return jax.lax.fori_loop(first, last, step, (params, state))

    return steps


def run_cell(
    study: Study, arm: Arm, go_on: Callable[..., Any], seed: int, steps: int, progress: tqdm, saved: Path
) -> Cell:
    """Train one arm from one seed, reading what the study observes at equal distances; goes on from `saved`."""
    start, data = study.make(seed)
    carry = start, jax.jit(arm.tx.init)(start)
    observe = jax.jit(arm.observe or study.observe)
    at = np.unique(np.linspace(0, steps, min(READINGS, steps) + 1).astype(int)).tolist()
    if saved.exists():
        carry, readings = restore(saved, carry)
        progress.update(at[len(readings) - 1])
    else:
        readings = [_reading(observe(start, start, data))]
    wrote = time.monotonic()
    for first, last in itertools.pairwise(at[len(readings) - 1 :]):
        carry = go_on(*carry, data, first, last)
        readings.append(_reading(observe(start, carry[0], data)))
        progress.update(last - first)
        progress.set_postfix({key: f"{x:.3g}" for key, x in readings[-1].items() if "loss" in key})
        if time.monotonic() - wrote > SAVE_EVERY:
            save(saved, carry, readings)
            wrote = time.monotonic()
    curves = {key: [reading[key] for reading in readings] for key in readings[0]}
    return {"final": {key: curve[-1] for key, curve in curves.items()}, "curves": {"step": at} | curves}


def _reading(observed: Mapping[str, jax.Array]) -> dict[str, float]:
    return {key: rounded(x) for key, x in observed.items()}


def rounded(x: Any) -> float:
    """As many digits as the JSON keeps."""
    return float(f"{float(x):.{DIGITS}g}")


def save(path: Path, carry: Any, readings: Sequence[Mapping[str, float]]) -> None:
    """Writes a run's state and readings: all of it or nothing."""
    unfinished = path.with_suffix(".tmp")
    path.parent.mkdir(parents=True, exist_ok=True)
    with unfinished.open("wb") as file:
        np.savez(file, *map(np.asarray, jax.tree.leaves(carry)), readings=json.dumps(readings))
    os.replace(unfinished, path)


def restore(path: Path, like: Any) -> tuple[Any, list[dict[str, float]]]:
    """The state and the readings that `save` wrote."""
    with np.load(path) as file:
        readings = json.loads(str(file["readings"]))
        leaves = [jnp.asarray(file[f"arr_{k}"]) for k in range(len(jax.tree.leaves(like)))]
    return jax.tree.unflatten(jax.tree.structure(like), leaves), readings


# All runs ---------------------------------------------------------------------------------------------


def machine() -> str:
    """The kind of machine, for a result's header."""
    device = jax.devices()[0]
    return f"{os.cpu_count()}-core CPU" if device.platform == "cpu" else device.device_kind


def header(name: str, arms: Iterable[str], config: Any, args: argparse.Namespace) -> Result:
    """Everything that must agree before two runs may stand in one table."""
    return {
        "study": name,
        "settings": dataclasses.asdict(config),
        "arms": list(arms),
        "seeds": args.seeds,
        "machine": machine(),
        "versions": versions(),
    }


def versions() -> dict[str, str]:
    """Of jax, optax and the sources here: the examples run from a checkout, installed or not."""
    project = Path(__file__).parent.parent / "pyproject.toml"
    version = str(tomllib.loads(project.read_text())["project"]["version"])
    return {"gauge_optax": version, "jax": jax.__version__, "optax": optax.__version__}


def load(path: Path, head: Result) -> Result:
    """The finished runs at `path`, if there are any and they were made under this header."""
    if not path.exists():
        return head | {"cells": {}}
    result = json.loads(path.read_text())
    other = [key for key in head if result.get(key) != head[key]]
    if other:
        raise ValueError(
            f"{path} holds runs under other {' and '.join(other)}\n"
            f"  found:    {[result.get(key) for key in other]}\n"
            f"  expected: {[head[key] for key in other]}\n"
            f"  remedy:   delete it, or give another --out"
        )
    return result


def write(path: Path, result: Result) -> None:
    """Write all of it or nothing: a killed writer leaves the file before."""
    text = json.dumps(result, indent=1)
    text = re.sub(r"\[\s([^\[\]{}]*)\]", lambda numbers: f"[{' '.join(numbers[1].split())}]", text)
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".tmp")
    unfinished.write_text(text + "\n")
    os.replace(unfinished, path)


def chosen(args: argparse.Namespace, arms: Iterable[str]) -> list[str]:
    """The arms to run: those of `--arms`, or all."""
    arms = list(arms)
    if unknown := [arm for arm in args.arms or () if arm not in arms]:
        raise SystemExit(f"--arms: unknown {unknown}; the arms are {arms}")
    return args.arms or arms


def complete(path: Path, result: Result) -> bool:
    """Whether all arms are there; says which are not."""
    seeds, cells = set(map(str, result["seeds"])), result["cells"]
    if absent := [arm for arm in result["arms"] if not seeds <= cells.get(arm, {}).keys()]:
        print(f"wrote {path}; the figure and the table follow when these arms are run too: {', '.join(absent)}")
    return not absent


def fill(
    path: Path,
    head: Result,
    cell: Callable[[str, int], Cell],
    stop_after: int | None = None,
    arms: Sequence[str] | None = None,
) -> Result | None:
    """Makes the missing cells of a study whose cells are no training curves, saving each.

    Args:
      path: of the JSON.
      head: a header with `arms` and `seeds`.
      cell: (arm, seed) → what the JSON keeps of it.
      stop_after: leave after so many cells, as if killed.
      arms: only these; by default all of the header.

    Returns:
      The result, or None if told to stop before the end.
    """
    result = load(path, head)
    cells = result["cells"]
    wanted = head["arms"] if arms is None else arms
    missing = [(arm, seed) for arm in wanted for seed in head["seeds"] if str(seed) not in cells.get(arm, {})]
    for arm, seed in tqdm(missing[:stop_after], unit="run", mininterval=1):
        cells.setdefault(arm, {})[str(seed)] = cell(arm, seed)
        write(path, result)
    return None if stop_after is not None and stop_after < len(missing) else result


def run_cells(
    name: str,
    arms: Iterable[str],
    config: Any,
    args: argparse.Namespace,
    cell: Callable[[str, int], Cell],
    figure: Callable[[Result, Path], None],
    section: Callable[[Result], str],
) -> Result | None:
    """`fill`, then draw and print. None if told to stop before the end."""
    path = args.out / f"{name}.json"
    head = header(name, arms, config, args)
    result = fill(path, head, cell, args.stop_after, chosen(args, head["arms"]))
    if result is not None and complete(path, result):
        figure(result, path.with_suffix(".png"))
        print(section(result))
        print(f"wrote {path} and {path.with_suffix('.png')}")
    return result


def run(
    study: Study,
    config: Any,
    args: argparse.Namespace,
    figure: Callable[[Result, Path], None],
    section: Callable[[Result], str],
) -> Result | None:
    """Make the missing runs, saving each; with all arms there, draw and print. None if told to stop before the end."""
    wanted = chosen(args, study.arms)
    path = args.out / f"{study.name}.json"
    result = load(path, header(study.name, study.arms, config, args))
    cells = result["cells"]
    missing = [(arm, seed) for arm in wanted for seed in args.seeds if str(seed) not in cells.get(arm, {})]
    write(path, result)  # with its header, which checkpoints have not
    with tqdm(total=len(missing) * config.steps, unit="step", mininterval=1) as progress:
        programs: dict[str, Any] = {}
        for name, seed in missing[: args.stop_after]:
            progress.set_description(f"{name}, seed {seed}")
            arm = study.arms[name]
            programs[name] = programs.get(name) or advance(study, arm)
            saved = path.with_name(f"{study.name}-{list(study.arms).index(name)}-{seed}.npz")
            cell = run_cell(study, arm, programs[name], seed, config.steps, progress, saved)
            cells.setdefault(name, {})[str(seed)] = cell
            write(path, result)
            saved.unlink(missing_ok=True)
    if args.stop_after is not None and args.stop_after < len(missing):
        return None
    if not complete(path, result):
        return result
    figure(result, path.with_suffix(".png"))
    print(section(result))
    print(f"wrote {path} and {path.with_suffix('.png')}")
    return result
