"""Heads packed for training: does a network with identity blocks in its heads end where the plain one ends?

    python -m examples.packed --out examples/results      # half an hour on two CPU cores; killed, it goes on
    python -m examples.packed --steps 30 --arms plain packed       # to try it

A decoder of 2 layers (LayerNorm, GELU, learned positions, biases, 4 heads of 16) on bytes of text. `go.orbit.pack`
leaves d_h² numbers per head out of the queries and as many out of the values. AdamW then trains what is left, from the
same function as the plain run. A cell is one arm, peak rate and seed (initial weights and order of the data). A sweep
of rates goes on until the best mean over seeds has a worse neighbour on both sides. Finished cells are kept in
packed.json and not trained again. packed.png is drawn at the end, and the table printed.

"packed" is `go.orbit.pack` as it is by default. "shared" says that all heads leave out the same rows, "identity" that
the block is exactly the identity (`size=1.0`). "quotient" is AdamW inside `go.quotient`, with the gauges that bind no
packed leaf.
"""

import argparse
import functools
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import optax

import gauge_optax as go
from examples import cli, data, study
from examples.sweep import RATIO, Cell, Result, Sweep, best, fill, key, markdown, trained
from models import lm

matplotlib.use("Agg")
import matplotlib.pyplot as plt

CONFIG = lm.LMConfig(vocab=data.VOCAB, mlp="gelu")
STEPS, SEEDS, FIRST = 400, (42, 142, 242), 1.6e-3
BATCH, LENGTH, HELD_OUT = 8, 64, 8  # sequences, tokens in each; validation is on 8 batches 8 times as large
WARMUP, DECAY = 20, 0.1
REFERENCE = "plain"


class Arm(NamedTuple):
    """How the heads are packed, None for not at all; whether AdamW is inside `quotient`; a colour."""

    options: dict[str, Any] | None
    quotient: bool
    color: str


ARMS = {
    "plain": Arm(None, False, "tab:red"),
    "packed": Arm({}, False, "tab:blue"),
    "packed, identity": Arm({"size": 1.0}, False, "tab:cyan"),
    "packed, shared": Arm({"shared": True}, False, "tab:green"),
    "packed, shared, identity": Arm({"shared": True, "size": 1.0}, False, "tab:olive"),
    "packed, quotient": Arm({}, True, "tab:purple"),
}


def gauges() -> tuple[list[go.Gauge], list[go.Gauge]]:
    """The gauges that are packed away, and those of the others that bind no packed leaf."""
    everything = lm.gauges(CONFIG, linear=True)
    packed = [gauge for gauge in everything if gauge.name == "head_linear"]
    leaves = ("attn/query", "attn/key", "attn/value", "attn/out")
    kept = [gauge for gauge in everything if not any(name in repr(gauge) for name in leaves)]
    return packed, kept


@functools.cache
def batches(steps: int, seed: int) -> np.ndarray:
    """All batches of a run, stacked."""
    train = data.batches(LENGTH, BATCH, seed=seed)[0]
    return np.stack([train[n] for n in range(steps)])


@functools.cache
def held_out() -> np.ndarray:
    """The same for every cell."""
    return np.stack(data.batches(LENGTH, HELD_OUT * BATCH)[1])


@functools.cache
def initial(arm: str, seed: int) -> Any:
    """The initial parameters, packed if the arm says so."""
    params, _ = lm.params_and_loss(CONFIG, jax.random.key(seed))
    options = ARMS[arm].options
    return params if options is None else go.orbit.pack(params, gauges()[0], **options)


@functools.lru_cache(maxsize=4)
def program(arm: str, seed: int, steps: int) -> Callable[..., tuple[jax.Array, jax.Array]]:
    """Compiled once for all rates: (initial parameters, batches, held-out batches, rate) → losses, validation loss."""
    _, loss = lm.params_and_loss(CONFIG, jax.random.key(0))
    shape = optax.warmup_cosine_decay_schedule(0.1, 1.0, warmup_steps=min(WARMUP, steps // 2), decay_steps=steps)

    def run(params: Any, batches: jax.Array, held_out: jax.Array, rate: jax.Array) -> tuple[jax.Array, jax.Array]:
        tx: Any = optax.adamw(lambda n: rate * shape(n), weight_decay=DECAY)
        tx = go.quotient(tx, gauges()[1]) if ARMS[arm].quotient else tx
        return trained(tx, lambda p, tokens: loss(go.orbit.unpack(p), tokens), params, batches, held_out)

    inputs = initial(arm, seed), batches(steps, seed), held_out(), jnp.float32(0)
    if ARMS[arm].quotient:
        tx, start = go.quotient(optax.adamw(1e-3), gauges()[1]), inputs[0]
        go.check(tx, tx.init(start), start, jax.grad(lambda p: loss(go.orbit.unpack(p), inputs[2][0]))(start))
    return jax.jit(run).lower(*inputs).compile()


def train_cell(cell: Cell, steps: int) -> dict[str, Any]:
    """Train once: losses, None where they are not finite; how many numbers are trained."""
    arm, rate, seed = cell
    params, began = initial(arm, seed), time.monotonic()
    losses, validation = jax.device_get(
        program(arm, seed, steps)(params, batches(steps, seed), held_out(), jnp.float32(rate))
    )
    finite = bool(np.isfinite(losses).all() and np.isfinite(validation))
    return {
        "validation": float(validation) if finite else None,
        "training": float(losses[-50:].mean()) if finite else None,
        "finite": finite,
        "parameters": sum(x.size for x in jax.tree.leaves(params)),
        "seconds": round(time.monotonic() - began, 1),
    }


# Results ------------------------------------------------------------------------------------------


def sweeps(result: Result) -> dict[str, dict[float, list[float]]]:
    """Arm → rate → validation losses, seed by seed, for arms with a finished rate."""
    found = {arm: Sweep((arm,), FIRST).losses(result) for arm in ARMS}
    return {arm: losses for arm, losses in found.items() if losses}


def table(result: Result) -> str:
    """Markdown: every arm at its best rate, beside the plain one at its own."""
    lines = [["arm", "parameters", "rate", "validation loss", "to plain's, %", "not finite"]]
    found = sweeps(result)
    plain = np.array(found[REFERENCE][best(found[REFERENCE])]) if REFERENCE in found else np.nan
    for arm, losses in found.items():
        cells = [result["cells"][key((arm, rate, seed))] for rate in losses for seed in result["seeds"]]
        at = np.array(losses[best(losses)])
        change = 100 * (at / plain - 1)
        lines.append([
            arm, f"{cells[0]['parameters']:,}", f"{best(losses):g}", f"{at.mean():.4f} ± {at.std():.4f}",
            "" if arm == REFERENCE else f"{change.mean():+.2f} ± {change.std():.2f}",
            f"{sum(not cell['finite'] for cell in cells)} of {len(cells)}",
        ])
    return markdown(lines)


def section(result: Result) -> str:
    """Its part of the page of all results."""
    found = sweeps(result)
    plain = np.array(found[REFERENCE][best(found[REFERENCE])])
    ends = {arm: np.array(losses[best(losses)]) for arm, losses in found.items() if arm != REFERENCE}
    within = {arm: abs(np.mean(x) - np.mean(plain)) <= np.hypot(np.std(x), np.std(plain)) for arm, x in ends.items()}
    saved = 2 * CONFIG.layers * CONFIG.heads * CONFIG.d_head**2
    about = (
        "A decoder of 2 layers and 4 heads of 16 (GELU, learned positions) on bytes of text, "
        f"{result['settings']['steps']} steps, {len(result['seeds'])} seeds, {result['machine']}, float32. "
        "`go.orbit.pack` "
        f"leaves 2 · layers · heads · d_h² = {saved:,} numbers out, and AdamW trains what is left. By default every "
        "head leaves out rows of its own, and `pack` chooses the number on the diagonal. *Shared*: all heads leave out "
        "the same rows (`shared=True`). *Identity*: that number is 1 (`size=1.0`). *Quotient*: AdamW inside "
        "`go.quotient`, with the gauges that bind no packed leaf. Every arm at the best rate of its own sweep (rates "
        f"are a factor of {RATIO} apart), mean ± standard deviation over seeds."
    )
    inside = ", ".join(f"*{arm}*" for arm, holds in within.items() if holds) or "no arm"
    outside = ", ".join(f"*{arm}*" for arm, holds in within.items() if not holds) or "no arm"
    said = (
        "An arm's mean loss differs from the plain one's by at most the standard deviation over seeds (of both runs "
        f"together): {inside}. By more: {outside}."
    )
    return f"{about}\n\n{table(result)}\n\n{said}"


def figure(result: Result, path: Path) -> None:
    """Validation loss by rate, a line per arm and a band over seeds; and each arm at its best, seed by seed."""
    found = sweeps(result)
    fig, (left, right) = plt.subplots(1, 2, figsize=(12, 4.6), layout="constrained")
    for number, (arm, losses) in enumerate(found.items()):
        values, color = np.array(list(losses.values())), ARMS[arm].color
        left.plot(list(losses), values.mean(1), ".-", color=color, label=arm)
        left.fill_between(list(losses), values.min(1), values.max(1), color=color, alpha=0.15, lw=0)
        at = losses[best(losses)]
        right.plot([number] * len(at), at, "o", color=color, alpha=0.7)
        right.plot([number - 0.25, number + 0.25], [np.mean(at)] * 2, color=color)
    ticks = sorted({rate for losses in found.values() for rate in losses})
    lowest = min(float(np.mean(losses[best(losses)])) for losses in found.values())
    left.set(xscale="log", xlabel="peak learning rate", ylabel="validation loss, nats per byte", title="by rate")
    left.set_ylim(0.98 * lowest, 1.1 * lowest)
    left.set_xticks(ticks, [f"{rate:g}" for rate in ticks], fontsize=8)
    left.set_xticks([], minor=True)
    left.legend(loc="upper left")
    right.set(title="at each arm's best rate: seeds, and their mean", ylabel="validation loss, nats per byte")
    right.set_xticks(range(len(found)), list(found), rotation=20, ha="right")
    for axis in (left, right):
        axis.grid(alpha=0.3)
    fig.savefig(path, dpi=100)
    plt.close(fig)


# Command line -------------------------------------------------------------------------------------


@jax.default_matmul_precision("highest")  # elsewhere than on a CPU the default is shorter floats
def main(argv: Sequence[str] | None = None) -> Result:
    """Run what is missing, print the table, write JSON and figure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=cli.Help)
    parser.add_argument("--out", type=Path, default=Path("outputs/packed"))
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS), metavar="ARM", help=", ".join(ARMS))
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS))
    parser.add_argument("--steps", type=int, default=STEPS)
    args = parser.parse_args(argv)
    settings = {"steps": args.steps, "batch": BATCH, "length": LENGTH, "held_out": HELD_OUT, "decay": DECAY}
    head = {"study": "packed", "settings": settings, "seeds": args.seeds, "machine": study.machine()}
    path = args.out / "packed.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    result = study.load(path, head | {"versions": {"jax": jax.__version__, "optax": optax.__version__}})
    result = fill(path, result, [Sweep((arm,), FIRST) for arm in args.arms], lambda x: train_cell(x, args.steps))
    print(table(result))
    figure(result, path.with_suffix(".png"))
    print(f"wrote {path} and {path.with_suffix('.png')}")
    return result


if __name__ == "__main__":
    main()
