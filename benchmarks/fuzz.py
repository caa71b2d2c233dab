"""Tests `go.discover` on random small transformers: no crash, the same result for every seed, nothing unexplained.

    python -m benchmarks.fuzz                      # 200 functions, three seeds each
    python -m benchmarks.fuzz --first 200 --count 50

`models/random_decoders.py` makes a function from every number. `discover` searches each function with several seeds.
All seeds must give the same code for `report.gauges` and `report.whole`. The certificate of the first seed, which
counts dead directions, must leave none unexplained, unless the report names a symmetry without a gauge. Finished
numbers stay in results/fuzz.json.
"""

import argparse
import contextlib
import dataclasses
import time
from collections.abc import Iterator
from typing import Any

import jax

import gauge_optax as go
from benchmarks.timing import benchmark
from examples.studies import harness
from models.random_decoders import built, drawn


def tried(number: int, seeds: int, certificate: bool = True) -> dict[str, Any]:
    """Tests one function. Returns a row: what is wrong ("" if nothing is), and numbers."""
    jax.clear_caches()  # frees the programs of the function before
    spec = drawn(number)
    net, started = built(spec), time.perf_counter()
    reports, wrong = [], []

    @contextlib.contextmanager
    def noted(what: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # any exception is a finding
            wrong.append(f"{what}: {type(error).__name__}: {str(error)[:200]}")

    for seed in range(seeds):
        with noted(f"seed {seed}"):
            reports.append(go.discover(net.fn, net.params, net.batches, "logits", seed=seed, progress=False))
    answers = {(repr(report.gauges), repr(report.whole), repr(sorted(report.ungauged))) for report in reports}
    if len(answers) > 1:
        wrong.append(f"{len(answers)} answers: {[[g.name for g in report.whole] for report in reports]}")
    row: dict[str, Any] = {"spec": dataclasses.asdict(spec), "seeds": seeds}
    if reports:
        first = reports[0]
        worst = max((held.change for held in first.held), default=0.0)
        row |= {"whole": [gauge.name for gauge in first.whole], "rejected": list(first.rejected), "moves": worst}
        row["ungauged"] = {kind: list(where) for kind, where in first.ungauged.items()}
        row["nearly"] = len({repr([held.gauge for held in report.nearly]) for report in reports})
        if not certificate:
            return row | {"wrong": wrong}
        with noted("certificate"):
            counts = first.certificate
            exact = counts.gap[0] < 1e-13 and counts.gap[1] > 1e3 * counts.gap[0]
            row |= {key: getattr(counts, key) for key in ("dead", "explained", "unexplained")}
            row |= {"gap": list(counts.gap), "exact": exact}
            if counts.unexplained and exact and not first.ungauged:
                shares = {path: round(x, 2) for path, x in counts.by_leaf.items() if x > 0.005}
                wrong.append(f"{counts.unexplained} unexplained, gap {counts.gap}: {shares}")
    return row | {"wrong": wrong, "seconds": round(time.perf_counter() - started, 1)}


@dataclasses.dataclass(frozen=True)
class Config:
    """The first number and how many numbers to try, and the seeds of each."""

    first: int = 0
    count: int = 200
    seeds: int = 3


def cells(c: Config, args: argparse.Namespace) -> harness.Cells:
    """One cell per number."""
    numbers = map(str, range(c.first, c.first + c.count))
    return harness.by_name(numbers, lambda c, args, name: tried(int(name), c.seeds), "")(c, args)


def section(rows: dict[str, Any]) -> str:
    """Text that says how many functions have a finding, and which."""
    bad = [number for number, row in rows.items() if row["wrong"]]
    return "\n".join([*(f"{number}: {rows[number]['wrong']}" for number in bad),
                      f"{len(rows)} functions; {len(bad)} with a finding: {', '.join(bad)}"])


STUDY = benchmark(__doc__, "fuzz", cells, section, page=False, config=Config())

if __name__ == "__main__":
    harness.main(STUDY)
