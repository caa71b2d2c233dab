"""Trains one network twice, from two sets of weights that compute the same function: which optimizer notices?

    python -m examples.demo                                  # or `make demo`; about two minutes on 2 CPU cores
    python -m examples.demo --data book.txt --steps 1000

The second set of weights is the first one after a random move by all gauges of the network: units are rescaled and
heads rotated, so that other numbers compute the same function. From there AdamW takes other steps and trains another
network. `quotient(optax.adamw)` and `ddc_adamw` train the same network twice. The example prints

                     the two losses differ by, at                validation loss
    optimizer        step 1     step 10    step 100   drift      run 1      run 2
    adamw            2.4e-02    7.5e-02    3.1e-02    5.7e-01    1.9319     1.9103
    quotient(adamw)  4.8e-07    0.0e+00    4.8e-07    2.6e-07    1.9253     1.9253
    ddc_adamw        0.0e+00    0.0e+00    9.5e-07    3.5e-07    1.9233     1.9233

and writes twins.png and twins.json to outputs/demo.
"""

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import optax
from tqdm import tqdm

import gauge_optax as go
from examples import cli, data
from models import lm

matplotlib.use("Agg")
import matplotlib.pyplot as plt

Params = Any
Loss = Callable[[Params, jax.Array], jax.Array]
Run = dict[str, Any]
"""Results of one optimizer in both runs, as in the JSON. Entry n of `losses` and `gap` is measured after n steps."""

DRIFT_EVERY = 10
GAP_STEPS = (1, 10, 100)
SMOOTHING = 15
ROUNDING = 2.0**-22
"""The spacing of float32 numbers between 2 and 4: two different losses in this range differ by at least this much."""


def optimizers(steps: int, gauges: Sequence[go.Gauge]) -> dict[str, optax.GradientTransformation]:
    """AdamW; AdamW inside `quotient`, as the README recommends; DDC's Adam. All have the same schedule and decay."""
    rate = optax.warmup_cosine_decay_schedule(3e-4, 3e-3, warmup_steps=min(20, steps // 2), decay_steps=steps)
    return {
        "adamw": optax.adamw(rate, weight_decay=0.1),
        "quotient(adamw)": go.quotient(optax.adamw(rate, weight_decay=0.1), gauges),
        "ddc_adamw": go.ddc_adamw(rate, gauges, weight_decay=0.1),
    }


def largest(tree: Any) -> jax.Array:
    """The largest absolute value of all entries of a tree."""
    return jnp.max(jnp.stack([jnp.max(jnp.abs(leaf)) for leaf in jax.tree.leaves(tree)]))


def train_twins(
    tx: optax.GradientTransformation, starts: Sequence[Params], loss: Loss, gauges: Sequence[go.Gauge],
    args: argparse.Namespace
) -> Run:
    """Trains from each start on the same batches, and records losses and drift.

    Drift is how far scales and shifts, which have no effect on the function, move from the start.
    """
    train, held_out = data.batches(args.length, args.batch, args.data)

    @jax.jit
    def step(params: Params, state: Any, tokens: jax.Array) -> tuple[Params, Any, jax.Array]:
        value, grads = jax.value_and_grad(loss)(params, tokens)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    moved = jax.jit(lambda start, params: largest(go.measure.drift(start, params, gauges)))
    evaluate = jax.jit(loss)
    twins, states = list(starts), [tx.init(start) for start in starts]
    go.check(tx, states[0], starts[0], jax.grad(loss)(starts[0], train[0]))
    losses, drift = np.zeros((2, args.steps + 1)), {}
    for n in tqdm(range(args.steps + 1), unit="step", mininterval=1):
        if n % DRIFT_EVERY == 0:
            drift[n] = max(float(moved(*pair)) for pair in zip(starts, twins, strict=True))
        for t in range(2):
            if n == args.steps:  # the loss of the final weights, after which no step is taken
                losses[t, n] = evaluate(twins[t], train[n])
            else:
                twins[t], states[t], losses[t, n] = step(twins[t], states[t], train[n])
    validation = [float(np.mean([evaluate(params, x) for x in held_out])) for params in twins]
    return {"validation": validation, "drift": drift, "gap": np.abs(losses[0] - losses[1]).tolist(),
            "losses": losses.tolist()}


def table(runs: dict[str, Run]) -> str:
    """Numbers from the figure, as a text table under two lines of headings."""
    steps = [n for n in GAP_STEPS if n < len(runs["adamw"]["gap"])]
    rows = [["optimizer", *(f"step {n}" for n in steps), "drift", "run 1", "run 2"]]
    for name, run in runs.items():
        numbers = [*(run["gap"][n] for n in steps), max(run["drift"].values())]
        rows.append([name, *(f"{x:.1e}" for x in numbers), *(f"{x:.4f}" for x in run["validation"])])
    above = f"{'':17}{'the two losses differ by, at':<{11 * (len(steps) + 1)}}validation loss"
    return "\n".join([above, *(row[0].ljust(17) + "".join(f"{x:<11}" for x in row[1:]).rstrip() for row in rows)])


def figure(runs: dict[str, Run], path: Path) -> None:
    """Draws three panels: all losses, the difference between the losses of an optimizer's two runs, and drift."""
    fig, (losses, gap, drift) = plt.subplots(1, 3, figsize=(13, 4.6), layout="constrained")
    fig.suptitle(
        "Every optimizer trains twice, from two sets of weights that compute the same function.\n"
        "AdamW's two runs become different networks. Inside quotient, and under ddc_adamw, the two runs stay one."
    )
    for (name, run), color in zip(runs.items(), ("tab:red", "tab:blue", "tab:green"), strict=True):
        for number, twin in enumerate(run["losses"], start=1):
            smooth = np.convolve(twin, np.ones(SMOOTHING) / SMOOTHING, mode="valid")
            at = np.arange(len(smooth)) + SMOOTHING / 2
            # Run 1 is a broad pale line, run 2 a thin dashed one on top: both are visible where they agree.
            line = {"lw": 1.6, "ls": (0, (4, 4))} if number == 2 else {"lw": 3.5, "alpha": 0.4}
            losses.plot(at, smooth, color=color, label=f"{name}, run {number}", **line)
        gap.semilogy(np.maximum(run["gap"], ROUNDING), color=color, label=name, lw=1)
        at_drift, moved = list(run["drift"])[1:], list(run["drift"].values())[1:]
        drift.semilogy(at_drift, np.maximum(moved, 1e-8), ".-", color=color, label=name)
    gap.axhline(ROUNDING, color="gray", ls=":", label="float32 cannot show less")
    losses.set(title=f"Training loss (mean over {SMOOTHING} steps)", ylabel="nats per byte")
    gap.set(title="Difference of the two runs' losses", ylabel="nats per byte, on the same batch")
    drift.set(title="Drift: motion that changes no output", ylabel="largest change of a log-scale or a shift")
    gap.set_ylim(top=30)  # room for the legend
    for axis, place in ((losses, "upper right"), (gap, "upper right"), (drift, "center right")):
        axis.set_xlabel("step")
        axis.legend(loc=place)
        axis.grid(alpha=0.3)
    fig.savefig(path, dpi=120)
    plt.close(fig)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parses the command line. With the defaults, this is the demo."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=cli.Help)
    parser.add_argument("--data", type=Path, help="text to train on; default: the standard library's sources")
    parser.add_argument("--out", type=Path, default=Path("outputs/demo"))
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--width", type=int, default=64, help="d_model")
    parser.add_argument("--layers", type=int, default=2)
    return parser.parse_args(argv)


# On accelerators, matrix products use shorter floats by default. The two runs would then differ by their rounding.
@jax.default_matmul_precision("highest")
def main(argv: Sequence[str] | None = None) -> dict[str, Run]:
    """Runs the comparison, prints the table, and writes figure and JSON."""
    args = parse(argv)
    config = lm.llama_config(
        vocab=data.VOCAB, d_model=args.width, layers=args.layers, heads=4, kv_heads=2,
        d_head=args.width // 4, d_ff=3 * args.width, max_len=args.length)
    params, loss = lm.params_and_loss(config, jax.random.key(0))
    gauges = lm.gauges(config)
    group = go.product(gauges)
    twin = group.act(group.sample(jax.random.key(1), params, scale=1.0), params)

    count = sum(leaf.size for leaf in jax.tree.leaves(params))
    print(f"A Llama of {count:,} parameters, {args.steps} steps of {args.batch} × {args.length} bytes.")
    print(f"Moves along {group.dim(params):,} directions change no output; run 2 starts from weights so moved.")
    runs = {}
    for name, tx in optimizers(args.steps, gauges).items():
        print(f"{name}: run 1 and run 2, side by side")
        runs[name] = train_twins(tx, (params, twin), loss, gauges, args)
    print(table(runs))
    print("Losses are in nats per byte; those that differ are of one training batch.")
    print("drift: how far weights moved without changing any output, the largest change of a log-scale or a shift.")

    args.out.mkdir(parents=True, exist_ok=True)
    figure(runs, args.out / "twins.png")
    (args.out / "twins.json").write_text(json.dumps(runs, indent=1))
    print(f"wrote {args.out}/twins.png and {args.out}/twins.json")
    return runs


if __name__ == "__main__":
    main()
