"""The package of version 0.2 beside this one, in one process: the same updates to 1e-12, on the whole register.

    python -m benchmarks.side_by_side                 # every row; minutes
    python -m benchmarks.side_by_side --only quotient --rows gpt

Takes 20 float64 steps of every optimizer on every row of `tests/cases.py` that it accepts, from random, zero-output and
dead-channel starts, and prints the largest difference of any leaf relative to its norm. The old sources are taken from
the repository's history under another name. Kept until the release that replaces 0.2.

A run can amplify roundoff: Newton–Schulz makes any direction of a matrix near zero as large as the others. Where a
difference is above the tolerance, the old package is run again with gradients that differ by a relative 1e-15. The
largest of its own differences is printed beside ours, and ours may be `AMPLIFIED` times as large.
"""

import argparse
import functools
import importlib
import io
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from tqdm import tqdm

import gauge_optax as new
from tests.cases import GAUGE_CASES, GaugeCase

REVISION = "d2b521b"
"""The last commit of version 0.2."""
STEPS = 20
TOLERANCE = 1e-12
PERTURBED = 1e-15
AMPLIFIED = 10.0


def old_package() -> Any:
    """Version 0.2 as the package `gauge_optax_old`."""
    folder = Path(tempfile.mkdtemp())
    archive = subprocess.run(["git", "archive", REVISION, "gauge_optax"], capture_output=True, check=True).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as files:
        files.extractall(folder, filter="data")
    (folder / "gauge_optax").rename(folder / "gauge_optax_old")
    for path in (folder / "gauge_optax_old").rglob("*.py"):
        path.write_text(path.read_text().replace("gauge_optax", "gauge_optax_old"))
    sys.path.insert(0, str(folder))
    return importlib.import_module("gauge_optax_old")


def rebuilt(gauge: Any, package: Any) -> Any:
    """A gauge of this package as one of another version."""
    roles: dict[str, dict[str, Any]] = {}
    for spec in gauge.specs:
        blocks = roles.setdefault(spec.role, {})
        axes = blocks.get(spec.pattern)
        blocks[spec.pattern] = spec.axes if axes is None else (*((axes,) if isinstance(axes, str) else axes), spec.axes)
    options = {name: value for name, value in gauge.options if name != "by_entry"}
    return getattr(package, gauge.name)(*roles.values(), sizes=dict(gauge.sizes), **options)


def optimizers(go: Any, gauges: Sequence[Any]) -> dict[str, Callable[[], optax.GradientTransformation]]:
    """What is compared."""
    return {
        "quotient": lambda: go.quotient(optax.adamw(1e-2, weight_decay=0.1), gauges),
        "quotient, free": lambda: go.quotient(optax.adamw(1e-2, weight_decay=0.1), gauges, hold=False, pin=False),
        "quotient_muon": lambda: go.quotient_muon(1e-2, gauges),
        "ddc_adamw": lambda: go.ddc_adamw(1e-2, gauges, weight_decay=0.1),
        "ddc_muon": lambda: go.ddc_muon(1e-2, gauges, weight_decay=0.1),
        "gauge_fix": lambda: go.orbit.gauge_fix(optax.sgd(1e-2, momentum=0.9), gauges, on_unknown="keep"),
    }


def transported(go: Any, gauges: Sequence[Any], element: Any, gradient: Callable[[Any], Any], params: Any) -> Any:
    """Adam's state after three steps, moved by an element as far as its moments can move."""
    tx = optax.adam(1e-2)

    @jax.jit
    def run(params: Any) -> Any:
        start, state = params, tx.init(params)
        for _ in range(3):
            updates, state = tx.update(gradient(params), state, params)
            params = optax.apply_updates(params, updates)
        return go.orbit.transport(state, start, gauges, element, on_unknown="keep")

    return run(params)


def starts(case: GaugeCase) -> Iterator[tuple[str, Any]]:
    """The row's own point, the same with the last leaf zero, and with one channel of every leaf zero."""
    params = case.params(jax.random.key(1))
    treedef: Any
    leaves, treedef = jax.tree.flatten(params)
    yield "random", params
    yield "zero outputs", treedef.unflatten([*leaves[:-1], jnp.zeros_like(leaves[-1])])
    yield "dead channel", treedef.unflatten([x.at[..., 0].set(0.0) if x.ndim else x for x in leaves])


def trained(tx: optax.GradientTransformation, gradient: Callable[[Any], Any], params: Any) -> Any:
    """Parameters after all steps."""

    @jax.jit
    def step(params: Any, state: Any) -> tuple[Any, Any]:
        updates, state = tx.update(gradient(params), state, params)
        return optax.apply_updates(params, updates), state

    state = jax.jit(tx.init)(params)
    for _ in range(STEPS):
        params, state = step(params, state)
    return params


def made_and_trained(make: Callable[[], optax.GradientTransformation], gradient: Any, params: Any) -> Any:
    """Makes the optimizer and trains with it: both may refuse."""
    return trained(make(), gradient, params)


def perturbed(gradient: Callable[[Any], Any], seed: int) -> Callable[[Any], Any]:
    """The same gradient, with every entry multiplied by 1 + `PERTURBED` times a fixed normal number."""

    def inexact(params: Any) -> Any:
        treedef: Any
        leaves, treedef = jax.tree.flatten(gradient(params))
        keys = jax.random.split(jax.random.key(seed), len(leaves))
        noise = [jax.random.normal(key, x.shape, x.dtype) for key, x in zip(keys, leaves, strict=True)]
        return treedef.unflatten([x * (1.0 + PERTURBED * n) for x, n in zip(leaves, noise, strict=True)])

    return inexact


def difference(ours: Any, theirs: Any) -> float:
    """The largest over leaves, relative to the leaf."""
    worst = 0.0
    for x, y in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        size = max(float(np.linalg.norm(y)), 1e-30)
        worst = max(worst, float(np.linalg.norm(np.asarray(x) - np.asarray(y))) / size)
    return worst


def attempt(make: Callable[[], Any]) -> Any:
    """A result, or the first line of what is said in its place."""
    try:
        return make()
    except ValueError as error:
        return str(error).splitlines()[0]


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints a line per comparison that differs, and the largest difference; 1 where one is above the tolerance."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[], help="optimizers")
    parser.add_argument("--rows", nargs="*", default=[], help="parts of names of rows")
    parser.add_argument("--starts", nargs="*", default=[], help="starts")
    chosen = parser.parse_args(arguments)
    jax.config.update("jax_enable_x64", True)
    old, worst, count, excused, failed = old_package(), 0.0, 0, 0, 0
    rows = [case for case in GAUGE_CASES if case.loss is not None and not case.name.startswith("user_gauge")]
    rows = [case for case in rows if not chosen.rows or any(part in case.name for part in chosen.rows)]
    with tqdm(rows) as bar:
        for case in bar:
            bar.set_description(case.name)
            gauges = case.gauges()
            lists = [[rebuilt(g, go) for g in gauges] for go in (new, old)]
            pairs = [optimizers(go, gs) for go, gs in zip((new, old), lists, strict=True)]
            for start, params in starts(case):
                for name in [*pairs[0], "transport"]:
                    if (chosen.only and name not in chosen.only) or (chosen.starts and start not in chosen.starts):
                        continue
                    gradient: Any = jax.grad(case.loss)  # type: ignore[arg-type]
                    if name == "transport":
                        element = new.product(gauges).sample(jax.random.key(2), params)
                        packages = zip((new, old), lists, strict=True)
                        runs = [functools.partial(transported, go, g, element=element) for go, g in packages]
                    else:
                        runs = [functools.partial(made_and_trained, p[name]) for p in pairs]
                    ends = [attempt(functools.partial(run, gradient=gradient, params=params)) for run in runs]
                    count += 1
                    if any(isinstance(x, str) for x in ends):
                        off = 0.0 if all(isinstance(x, str) for x in ends) else np.inf
                        said = " | ".join(x if isinstance(x, str) else "" for x in ends)
                    else:
                        off, said = difference(*ends), ""
                    if off <= TOLERANCE:
                        worst = max(worst, off)
                        continue
                    if not said:
                        again = [runs[1](gradient=perturbed(gradient, seed), params=params) for seed in range(3)]
                        amplified = max(difference(end, ends[1]) for end in again)
                        said = f"0.2 against itself, gradients perturbed by {PERTURBED:.0e}: {amplified:.1e}"
                        if off <= AMPLIFIED * amplified:
                            excused += 1
                            bar.write(f"{off:.1e}  {name:16}{case.name:32}{start}  ill-conditioned; {said}")
                            continue
                    failed += 1
                    bar.write(f"{off:.1e}  {name:16}{case.name:32}{start}  DIFFERENT; {said}")
    print(
        f"{count} comparisons on {len(rows)} rows; largest difference {worst:.1e} (limit {TOLERANCE:.0e}), "
        f"without {excused} ill-conditioned runs; {failed} different"
    )
    return int(failed > 0)


if __name__ == "__main__":
    raise SystemExit(main())
