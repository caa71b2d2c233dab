"""What `go.discover` makes of random small transformers: one answer for every seed, no crash, nothing unexplained.

    python -m benchmarks.fuzz                      # 200 functions, three seeds each
    python -m benchmarks.fuzz --first 200 --count 50

A number draws a function from the grammar of `models/random_decoders.py`. Each function is searched with several
seeds. All must give the same source for `report.gauges` and `report.whole`; and the certificate of the first must leave
no dead direction unexplained, if the report has no symmetry without a gauge. Finished numbers stay in
results/fuzz.json.
"""

import argparse
import dataclasses
import time
from typing import Any

import jax

import gauge_optax as go
from benchmarks.timing import benchmark
from examples.studies import harness
from models.random_decoders import built, drawn


def tried(number: int, seeds: int, certificate: bool = True) -> dict[str, Any]:
    """One function's row: what is wrong with it ("" if nothing), and figures."""
    spec = drawn(number)
    net, started = built(spec), time.perf_counter()
    reports, wrong = [], []
    for seed in range(seeds):
        try:
            reports.append(go.discover(net.fn, net.params, net.batches, "logits", seed=seed, progress=False))
        except Exception as error:  # whatever it is, it is a finding
            wrong.append(f"seed {seed}: {type(error).__name__}: {str(error)[:200]}")
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
        if certificate:
            try:
                counts = first.certificate
            except Exception as error:
                wrong.append(f"certificate: {type(error).__name__}: {str(error)[:200]}")
            else:
                exact = counts.gap[0] < 1e-13 and counts.gap[1] > 1e3 * counts.gap[0]
                row |= {"dead": counts.dead, "explained": counts.explained, "unexplained": counts.unexplained}
                row |= {"gap": list(counts.gap), "exact": exact}
                if counts.unexplained and exact and not first.ungauged:
                    shares = {path: round(x, 2) for path, x in counts.by_leaf.items() if x > 0.005}
                    wrong.append(f"{counts.unexplained} unexplained, gap {counts.gap}: {shares}")
    return row | {"wrong": wrong, "seconds": round(time.perf_counter() - started, 1)}


@dataclasses.dataclass(frozen=True)
class Config:
    """The numbers to try, the seeds of each, and of how many functions one gets a certificate."""

    first: int = 0
    count: int = 200
    seeds: int = 3
    every: int = 1


def cells(c: Config, args: argparse.Namespace) -> harness.Cells:
    """A function per number; what it has compiled is forgotten after it."""

    def make(c: Config, args: argparse.Namespace, name: str) -> dict[str, Any]:
        row = tried(int(name), c.seeds, int(name) % c.every == 0)
        jax.clear_caches()
        return row

    return harness.by_name(map(str, range(c.first, c.first + c.count)), make, "")(c, args)


def section(rows: dict[str, Any]) -> str:
    """How many functions have a finding, and which."""
    bad = [number for number, row in rows.items() if row["wrong"]]
    return "\n".join([*(f"{number}: {rows[number]['wrong']}" for number in bad),
                      f"{len(rows)} functions; {len(bad)} with a finding: {', '.join(bad)}"])


STUDY = benchmark(__doc__, "fuzz", cells, section, page=None, config=Config())

if __name__ == "__main__":
    harness.main(STUDY)
