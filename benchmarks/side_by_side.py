"""The package as it was before its core became parts beside this one, in one process: the same updates to 1e-12.

    python -m benchmarks.side_by_side                 # every row; an hour of one core; killed, it goes on
    python -m benchmarks.side_by_side --only quotient --rows gpt
    python -m benchmarks.side_by_side --show

Takes 20 float64 steps of every optimizer on every row of `tests/cases.py` that it accepts, from random, zero-output and
dead-channel starts, and compares every leaf, relative to its norm; `transport`, `canonicalize` and `align` are compared
by what they return. The old sources are taken from the repository's history under another name.

The scales of norms start positive: the old package kept their signs, and this one's slice has γ = +1.

A run can amplify roundoff: Newton–Schulz makes any direction of a matrix near zero as large as the others. Where a
difference is above the tolerance, the old package is run again with gradients, or weights, that differ by a relative
1e-15. The largest of its own differences stands beside ours, and ours may be `AMPLIFIED` times as large.
"""

import argparse
import functools
import importlib
import inspect
import io
import json
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from tqdm import tqdm

import gauge_optax as new
from gauge_optax.binding import leaves_by_path, match
from tests.cases import FLAT_CASES, GAUGE_CASES, GaugeCase

REVISION = "374c5b0"
"""The last commit whose gauges were instances with switches; parts of three roles came after it."""
STEPS = 20
TOLERANCE = 1e-12
PERTURBED = 1e-15
AMPLIFIED = 10.0
EPS = 1e-20
"""Of Muon: the old package added it to a norm, this one in units of the largest entry; small enough to mean nothing."""
LEAST_FALL = 1e-3
"""The share of the squared distance that a round of `align` has to save, in both packages."""
SMALL = 1e-3
"""Leaves with a smaller norm are compared by the difference over this one: a canonical scale stored less one is 0."""
ADDED = {"residual", "tied"}
"""Roles that gauges got since: the old package cannot make a row with one."""
OUT = Path("benchmarks/results/side_by_side.json")

Tree = Any
Gradient = Callable[[Tree], Tree]
Run = Callable[[Gradient, Tree], Tree]


def old_package() -> Any:
    """The old sources as the package `gauge_optax_old`."""
    folder = Path(tempfile.mkdtemp())
    archive = subprocess.run(["git", "archive", REVISION, "gauge_optax"], capture_output=True, check=True).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as files:
        files.extractall(folder, filter="data")
    (folder / "gauge_optax").rename(folder / "gauge_optax_old")
    for path in (folder / "gauge_optax_old").rglob("*.py"):
        path.write_text(path.read_text().replace("gauge_optax", "gauge_optax_old"))
    sys.path.insert(0, str(folder))
    old: Any = importlib.import_module("gauge_optax_old")
    old.orbit = old  # what stands in modules today stood at the top
    return old


def rebuilt(gauge: Any, package: Any) -> Any:
    """A gauge of this package as one of another version."""
    roles: dict[str, dict[str, Any]] = {}
    for spec in gauge.specs:
        blocks = roles.setdefault(spec.argument, {})
        axes = blocks.get(spec.pattern)
        blocks[spec.pattern] = spec.axes if axes is None else (*((axes,) if isinstance(axes, str) else axes), spec.axes)
    make = getattr(package, gauge.name)
    options = {name: value for name, value in gauge.options if name in inspect.signature(make).parameters}
    if "norms" in options:
        options["norms"] = [rebuilt(norm, package) for norm in options["norms"]]
    return make(*roles.values(), sizes=dict(gauge.sizes), **options)


def runs(go: Any, gauges: Sequence[Any], element: Any, other: Tree) -> Mapping[str, Callable[[], Run]]:
    """What is compared, each made by a function, because construction may refuse.

    Args:
      go: the package.
      gauges: the row's, in that package.
      element: what `transport` moves by.
      other: what `align` leads towards the start.
    """
    return {
        "quotient": lambda: trains(go.quotient(optax.adamw(1e-2, weight_decay=0.1), gauges)),
        "pin=False": lambda: trains(
            go.quotient(optax.adamw(1e-2, weight_decay=0.1), gauges, hold=False, pin=False)
        ),
        "quotient_muon": lambda: trains(go.quotient_muon(1e-2, gauges, eps=EPS)),
        "ddc_adamw": lambda: trains(go.ddc_adamw(1e-2, gauges, weight_decay=0.1)),
        "ddc_muon": lambda: trains(go.ddc_muon(1e-2, gauges, weight_decay=0.1, eps=EPS)),
        "gauge_fix": lambda: trains(go.orbit.gauge_fix(optax.sgd(1e-2, momentum=0.9), gauges, on_unknown="keep")),
        "transport": lambda: moves_a_state(go, gauges, element),
        "canonicalize": lambda: lambda gradient, params: go.orbit.canonicalize(params, gauges),
        "align": lambda: lambda gradient, params: go.product(gauges).act(go.orbit.align(params, other, gauges), other),
    }


def trains(tx: optax.GradientTransformation) -> Run:
    """Parameters after all steps; one program serves all starts."""
    initial, updated = jax.jit(tx.init), jax.jit(lambda *args: stepped(tx, *args))

    def run(gradient: Gradient, params: Tree) -> Tree:
        state = initial(params)
        for _ in range(STEPS):
            params, state = updated(gradient(params), state, params)
        return params

    return run


def stepped(tx: optax.GradientTransformation, grads: Tree, state: Tree, params: Tree) -> tuple[Tree, Tree]:
    """Parameters and state after a step."""
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state


def moves_a_state(go: Any, gauges: Sequence[Any], element: Any) -> Run:
    """Adam's state after three steps, moved by an element as far as its moments can move."""
    tx = optax.adam(1e-2)

    def run(gradient: Gradient, start: Tree) -> Tree:
        params, state = start, tx.init(start)
        for _ in range(3):
            params, state = stepped(tx, gradient(params), state, params)
        return go.orbit.transport(state, start, gauges, element, on_unknown="keep")

    return run


def starts(case: GaugeCase) -> Iterator[tuple[str, Tree]]:
    """The row's own point, the same with the last leaf zero, and with one channel of every leaf zero."""
    params = positive(case, case.params(jax.random.key(1)))
    treedef: Any
    leaves, treedef = jax.tree.flatten(params)
    yield "random", params
    yield "zero outputs", treedef.unflatten([*leaves[:-1], jnp.zeros_like(leaves[-1])])
    yield "dead channel", treedef.unflatten([x.at[..., 0].set(0.0) if x.ndim else x for x in leaves])


def positive(case: GaugeCase, params: Tree) -> Tree:
    """The point with the sizes of all norms' scales."""
    norms: list[Any] = [gauge for gauge in case.gauges() if gauge.name == "norm_scale"]
    specs = [spec for norm in norms for spec in norm.specs if spec.argument == "up"]

    def size(path: str, x: jax.Array) -> jax.Array:
        for spec in specs:
            if match("norm_scale", spec.pattern, path) is not None:
                offset = 1.0 if str(spec.axes).startswith("1+") else 0.0
                return jnp.abs(x + offset) - offset
        return x

    paths = leaves_by_path(params)
    return jax.tree.unflatten(jax.tree.structure(params), [size(path, x) for path, x in paths.items()])


def perturbed(tree: Tree, seed: int) -> Tree:
    """The same, with every entry multiplied by 1 + `PERTURBED` times a fixed normal number."""
    treedef: Any
    leaves, treedef = jax.tree.flatten(tree)
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    noise = [jax.random.normal(key, x.shape, x.dtype) for key, x in zip(keys, leaves, strict=True)]
    return treedef.unflatten([x * (1.0 + PERTURBED * n) for x, n in zip(leaves, noise, strict=True)])


def difference(ours: Tree, theirs: Tree) -> float:
    """The largest over leaves, relative to the leaf."""
    worst = 0.0
    for x, y in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        size = max(float(np.linalg.norm(y)), SMALL)
        worst = max(worst, float(np.linalg.norm(np.asarray(x) - np.asarray(y))) / size)
    return worst


def distance(a: Tree, b: Tree) -> float:
    """The root of the sum of squares over all leaves."""
    return float(optax.global_norm(jax.tree.map(jnp.subtract, a, b)))


def attempt(make: Callable[[], Any]) -> Any:
    """A result, or the first line of what is said in its place."""
    try:
        return make()
    except (ValueError, TypeError) as error:
        return str(error).splitlines()[0]


def compared(name: str, pair: Sequence[Any], gradient: Gradient, params: Tree) -> dict[str, Any]:
    """One comparison: how far the two ends are apart, and what explains it.

    Args:
      name: of what is compared. `align` may also end elsewhere, as near to its target or nearer: parts take turns in
        another order, until a round saves less than a thousandth, and the group has the signs of norms' scales now.
      pair: this package's run and the old one's, or what was said in their places.
      gradient: of the row's loss.
      params: the start.
    """
    ends = [run if isinstance(run, str) else attempt(functools.partial(run, gradient, params)) for run in pair]
    refused = [end for end in ends if isinstance(end, str)]
    if len(refused) == 2:
        return {"outcome": "both refuse", "said": refused[0]}
    if refused:
        side = "this" if isinstance(ends[0], str) else "the old"
        return {"outcome": f"only {side} refuses", "said": refused[0]}
    off = difference(*ends)
    if off <= TOLERANCE:
        return {"outcome": "same", "off": off}
    if name == "align":
        ours, theirs = (distance(end, params) ** 2 for end in ends)
        return {"outcome": "as near" if ours < (1.0 + LEAST_FALL) * theirs else "different", "off": off}
    again = [
        pair[1](lambda p, seed=seed: perturbed(gradient(p), seed), perturbed(params, seed + 10)) for seed in range(3)
    ]
    amplified = max(difference(end, ends[1]) for end in again)
    outcome = "ill-conditioned" if off <= AMPLIFIED * amplified else "different"
    return {"outcome": outcome, "off": off, "amplified": amplified}


def summary(cells: Mapping[str, Mapping[str, Any]]) -> str:
    """One line per optimizer, then every comparison that is not the same."""
    outcomes = (
        "same", "as near", "both refuse", "only the old refuses", "ill-conditioned", "only this refuses", "different",
    )  # fmt: skip
    lines = []
    for name in dict.fromkeys(key.split(" | ")[1] for key in cells):
        mine = [cell for key, cell in cells.items() if key.split(" | ")[1] == name]
        counts = {outcome: sum(cell["outcome"] == outcome for cell in mine) for outcome in outcomes}
        worst = max((cell["off"] for cell in mine if cell["outcome"] == "same"), default=0.0)
        lines.append(f"{name:14} " + ", ".join(f"{n} {o}" for o, n in counts.items() if n) + f"; same to {worst:.1e}")
    for key, cell in cells.items():
        if cell["outcome"] not in ("same", "as near", "both refuse"):
            figures = " ".join(f"{name} {cell[name]:.1e}" for name in ("off", "amplified") if name in cell)
            lines.append(f"{cell['outcome']:21} {key}: {cell.get('said', '')}{figures}")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Fills the JSON and prints the summary; 1 where a comparison differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[], help="optimizers")
    parser.add_argument("--rows", nargs="*", default=[], help="parts of names of rows")
    parser.add_argument("--show", action="store_true", help="only what is in the JSON")
    chosen = parser.parse_args(arguments)
    cells: dict[str, Any] = json.loads(OUT.read_text())["cells"] if OUT.exists() else {}
    if not chosen.show:
        jax.config.update("jax_enable_x64", True)
        fill(cells, chosen.only, chosen.rows)
    print(summary(cells))
    return int(any(cell["outcome"] in ("different", "only this refuses") for cell in cells.values()))


def fill(cells: dict[str, Any], only: Sequence[str], parts: Sequence[str]) -> None:
    """Runs what is not in the cells yet, and writes the JSON after every optimizer of every row."""
    old = old_package()
    rows = [case for case in (*GAUGE_CASES, *FLAT_CASES) if case.loss and not case.name.startswith("user_gauge")]
    rows = [case for case in rows if not parts or any(part in case.name for part in parts)]
    with tqdm(rows) as bar:
        for case in bar:
            bar.set_description(case.name)
            gauges: Sequence[Any] = case.gauges()
            if {spec.argument for gauge in gauges for spec in gauge.specs} & ADDED:
                continue
            points, gradient = dict(starts(case)), jax.jit(jax.grad(case.loss))  # type: ignore[arg-type]
            element = new.product(gauges).sample(jax.random.key(2), points["random"])
            other = positive(case, case.params(jax.random.key(3)))
            both = [runs(go, [rebuilt(g, go) for g in gauges], element, other) for go in (new, old)]
            for name in both[0]:
                if (only and name not in only) or f"{case.name} | {name} | dead channel" in cells:
                    continue
                pair = [attempt(side[name]) for side in both]
                for start, params in points.items():
                    cells[f"{case.name} | {name} | {start}"] = compared(name, pair, gradient, params)
                OUT.write_text(json.dumps({"revision": REVISION, "steps": STEPS, "cells": cells}, indent=1))


if __name__ == "__main__":
    raise SystemExit(main())
