"""What `go.measure.track` costs: whole training steps with it and without, in turns.

    python -m benchmarks.metrics                              # ten minutes on 2 CPU cores
    python -m benchmarks.metrics --only "demo, 16 x 64"       # model, sequences x tokens

A step is loss, gradient, update and `apply_updates`, compiled as one, parameters and state donated. Every fourth step
is a record here; the table says what that makes of the default, one record in `EVERY` steps. Writes
benchmarks/results/metrics.json and metrics.md.
"""

from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from tqdm import tqdm

import gauge_optax as go
from benchmarks.timing import host, prepared
from examples.studies import harness
from models import lm

OUT = Path(__file__).parent / "results"
EVERY, EACH, MOST = 20, 4, 1.02


class Size(NamedTuple):
    """A model, its batch, and how many periods are timed."""

    config: lm.LMConfig
    batch: int
    periods: int


def _gpt2(length: int) -> lm.LMConfig:
    return lm.LMConfig(
        vocab=50257, d_model=768, layers=12, heads=12, kv_heads=12, d_head=64, d_ff=3072, max_len=length
    )


SIZES = {
    "demo, 16 x 64": Size(
        lm.llama_config(vocab=256, d_model=64, layers=2, heads=4, kv_heads=2, d_head=16, d_ff=192, max_len=64), 16, 40
    ),
    "gpt2, 1 x 128": Size(_gpt2(128), 1, 4),
    "gpt2, 4 x 256": Size(_gpt2(256), 4, 1),
}


def measured(size: Size) -> dict[str, Any]:
    """Milliseconds of a plain step, a step that records, one that does not; and ratios to plain, in turns."""
    params, loss = lm.params_and_loss(size.config, jax.random.key(0))
    tokens = np.random.default_rng(0).integers(0, size.config.vocab, (size.batch, size.config.max_len + 1))
    gauges = lm.gauges(size.config)
    plain_tx = go.quotient_adamw(1e-4, gauges)
    optimizers = {"plain": plain_tx, "tracked": go.measure.track(plain_tx, gauges, every=EACH)}
    arms = {name: prepared(tx, params, tokens, loss) for name, tx in optimizers.items()}
    del params
    for number in tqdm(range(EACH * (size.periods + 1)), unit="step", desc=f"d = {size.config.d_model}"):
        for arm in arms.values():
            seconds = arm.run(tokens)
            if number >= EACH:
                arm.seconds.append(seconds)
    plain, tracked = (np.array(arms[name].seconds).reshape(-1, EACH) for name in ("plain", "tracked"))
    base = np.median(plain)
    record, other = (float(np.median((tracked / plain)[:, k])) for k in (slice(0, 1), slice(1, None)))
    at = int(optax.tree.get(arms["tracked"].state, "recorded_at"))
    return {
        "step_ms": 1e3 * float(base),
        "record": record,
        "other": other,
        "last_record": at,
        "compile_s": {name: round(arm.compile_seconds, 1) for name, arm in arms.items()},
    }


def page(result: dict[str, Any]) -> str:
    """Markdown: a row per size."""
    lines = [
        "# What `go.measure.track` costs", "",
        f"`python -m benchmarks.metrics`: {result['host']}; float32; `quotient_adamw` inside. Times: whole steps, in "
        f"units of the same step without it, in turns; held to {MOST} at one record in {EVERY} steps.", "",
        f"| model, batch | step ms | a record | other steps | each step | 10 | {EVERY} | 100 | compile s, without and "
        "with |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, ms in result["sizes"].items():
        mean = {n: (ms["record"] + (n - 1) * ms["other"]) / n for n in (1, 10, EVERY, 100)}
        ratios = [f"{x:.3f}" + " **missed**" * (n == EVERY and x > MOST) for n, x in mean.items()]
        compiled = " and ".join(map(str, ms["compile_s"].values()))
        cells = [name, f"{ms['step_ms']:.1f}", f"{ms['record']:.3f}", f"{ms['other']:.3f}", *ratios, compiled]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


STUDY = harness.Study(
    __doc__, "metrics", harness.by_name(SIZES, lambda c, args, name: measured(SIZES[name]), "sizes"), page, page=page,
    seeds=None, precision=None, head=lambda _: {"sizes": {}, "host": host()}, folder=OUT, partial=True,
)

if __name__ == "__main__":
    harness.main(STUDY)
