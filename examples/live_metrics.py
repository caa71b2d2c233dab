"""Shows during training how an optimizer moves weights in directions that have no effect on the network.

    python -m examples.live_metrics                                  # AdamW, a minute on 2 CPU cores
    python -m examples.live_metrics --optimizer quotient_adamw       # adds its curves to the same folder
    python -m examples.live_metrics --stop-after 150                 # stops; without the option, the run goes on

`go.measure.track` wraps an optimizer without changing its steps. Every tenth step it writes a record to its state,
which `optax.tree.get` reads. Each line of <optimizer>.jsonl is one record. metrics.png draws all runs of the folder:
how far scales and shifts have drifted, by which angle a step rotates heads, and which share of a step the loss depends
on. The progress bar shows the loss.
"""

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import matplotlib
import numpy as np
import optax
from tqdm import tqdm

import gauge_optax as go
from examples import common, data
from models import lm

matplotlib.use("Agg")
import matplotlib.pyplot as plt

OPTIMIZERS: dict[str, Callable[[Any, Sequence[go.Gauge]], optax.GradientTransformation]] = {
    "adamw": lambda rate, _: optax.adamw(rate, weight_decay=0.1),
    "quotient_adamw": lambda rate, gauges: go.quotient_adamw(rate, gauges, weight_decay=0.1),
    "ddc_adamw": lambda rate, gauges: go.ddc_adamw(rate, gauges, weight_decay=0.1),
}
COLORS = dict(zip(OPTIMIZERS, ("tab:red", "tab:blue", "tab:green"), strict=True))


def create(config: lm.LMConfig, args: argparse.Namespace) -> tuple[Any, Any, Callable[..., Any], Callable[..., Any]]:
    """Returns the parameters, the optimizer, the loss, and the jitted training step."""
    params, loss_fn = lm.params_and_loss(config, jax.random.key(args.seed))
    warmup = min(20, args.steps // 2)
    rate = optax.warmup_cosine_decay_schedule(0.0, args.rate, warmup_steps=warmup, decay_steps=args.steps)
    gauges = lm.gauges(config)
    tx = go.measure.track(OPTIMIZERS[args.optimizer](rate, gauges), gauges, every=args.every)

    @jax.jit
    def step(params: Any, state: Any, tokens: jax.Array) -> tuple[Any, Any, jax.Array]:
        loss, grads = jax.value_and_grad(loss_fn)(params, tokens)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    return params, tx, loss_fn, step


def record(state: Any, loss: float) -> dict[str, Any]:
    """The last record in an optimizer's state, with the loss, as JSON."""
    metrics = optax.tree.get(state, "metrics")
    named = {field: {k: np.asarray(v).tolist() for k, v in getattr(metrics, field).items()} for field in
             ("drift", "turning", "parameter_norm", "gradient_norm", "update_norm")}
    share = float(metrics.relevant_share)
    return {"step": int(metrics.recorded_at), "loss": round(loss, 6), "relevant_share": share, **named}


def figure(out: Path) -> None:
    """Draws the records of all runs in a folder."""
    fig, axes = plt.subplots(1, 3, figsize=(13, 3.6), layout="constrained")
    for path in sorted(out.glob("*.jsonl")):
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        step, color = [row["step"] for row in rows], COLORS.get(path.stem)
        drifted = [max(abs(x) for drifts in row["drift"].values() for x in np.ravel(drifts)) for row in rows]
        turned = [np.mean(np.concatenate([np.ravel(x) for x in row["turning"].values()])) for row in rows]
        for axis, values in zip(axes, (drifted, turned, [row["relevant_share"] for row in rows]), strict=True):
            axis.plot(step, values, color=color, label=path.stem)
    titles = ("largest drift of an anchor, log-scale", "mean turn of a head in one step, rad",
              "share of a step that the loss notices")
    for axis, title in zip(axes, titles, strict=True):
        axis.set(title=title, xlabel="step")
        axis.grid(alpha=0.3)
    for axis in axes[:2]:
        axis.set_yscale("symlog", linthresh=1e-7)
    axes[2].set_ylim(0, 1.05)
    axes[0].legend()
    fig.savefig(out / "metrics.png", dpi=120)
    plt.close(fig)


def main(argv: Sequence[str] | None = None) -> list[dict[str, Any]] | None:
    """Trains from the latest checkpoint, if there is one, and returns the records.

    Returns None if `--stop-after` ends the run before `--steps`.
    """
    parser = common.options(__doc__, "live_metrics")
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="adamw")
    parser.add_argument("--every", type=int, default=10, help="steps between records")
    args = parser.parse_args(argv)
    config = lm.llama_config(
        vocab=data.VOCAB, d_model=args.width, layers=args.layers, heads=4, kv_heads=2,
        d_head=args.width // 4, d_ff=3 * args.width, max_len=args.length,
    )
    train, _ = data.batches(args.length, args.batch, args.data)
    params, tx, loss_fn, step = create(config, args)
    state = tx.init(params)

    checkpoints = common.Checkpoints(args.out / args.optimizer)
    path, losses, rows = args.out / f"{args.optimizer}.jsonl", list[float](), list[dict[str, Any]]()
    saved = checkpoints.restore(jax.eval_shape(lambda: (params, state)))
    if saved is not None:
        (params, state), losses = saved
        rows = [row for line in path.read_text().splitlines() if (row := json.loads(line))["step"] < len(losses)]
        print(f"resuming after step {len(losses)}")
    else:
        print(go.check(tx, state, params, jax.jit(jax.grad(loss_fn))(params, train[0])))

    last = min(args.steps, args.stop_after or args.steps)
    with path.open("w") as lines, tqdm(initial=len(losses), total=args.steps, unit="step") as progress:
        lines.writelines(json.dumps(row) + "\n" for row in rows)
        progress.set_postfix_str("compiling")
        for n in range(len(losses), last):
            params, state, loss = step(params, state, train[n])
            losses.append(float(loss))
            progress.set_postfix_str(f"loss {losses[-1]:.3f}", refresh=False)
            progress.update()
            if n % args.every == 0:
                rows.append(record(state, losses[-1]))
                lines.write(json.dumps(rows[-1]) + "\n")
            if (n + 1) % args.save_every == 0 or n + 1 == last:
                lines.flush()
                checkpoints.save(n + 1, (params, state), losses)
    checkpoints.close()
    if last < args.steps:
        print(f"stopped after step {last}; the same command without --stop-after goes on from here")
        return None
    figure(args.out)
    print(f"loss {np.mean(losses[-20:]):.4f} over the last 20 steps; wrote {path} and {args.out / 'metrics.png'}")
    return rows


if __name__ == "__main__":
    main()
