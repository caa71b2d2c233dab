"""Learnable multipliers under weight decay, gauge fixing, neither, or control of their product (GaugeFix-LRM).

    python -m examples.studies gaugefix_lrm                                  # an hour on one core
    python -m examples.studies gaugefix_lrm --only "A, *" "B, every 1, *" --steps 200 --out outputs/try     # to try it

A GPT-2 of two layers learns bytes of text (the paper's has 124M parameters). Rows and columns of its kernels have
learnable multipliers (`models.multipliers`). The conditions:

* A: weight decay on all multipliers.
* B: no decay on multipliers of queries and keys, but every N steps `gauge_fix` balances their sizes s_Q and s_K, and
  moves Adam's moments along. "stale": moments are not moved, as in the paper.
* C: no decay on multipliers of queries and keys, and no gauge fixing.
* cap, fix, decay: B, with the product s_Q·s_K controlled by `hold_products`, as the paper suggests in its §5.
* none: no multipliers at all.

With bfloat16, forward and backward passes are in it; weights, optimizer and the loss of the logits are in float32.

In this network the ratio of s_Q and s_K drifts by rounding alone: logits depend on r_Q·r_K entry by entry, so that
multipliers that start equal get equal gradients. The former study `gaugefix_networks` had networks in which they
differ.
"""

import argparse
import dataclasses
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import gauge_optax as go
from examples import data
from examples.studies import harness, report
from examples.studies.harness import Result, Run
from models import gpt2, lm, multipliers

Cell = dict[str, Any]

SEEDS = (42, 123, 456)
PRECISIONS = ("float32", "bfloat16")
CAP, HELD = 1.05, ("cap", "fix", "decay")
RATE = 3e-3  # the peak learning rate


@dataclasses.dataclass(frozen=True)
class Config:
    """The number of steps of a run."""

    steps: int = 2_000


class Arm(NamedTuple):
    """One condition of the comparison.

    Attributes:
      which: "A", "B", "C" as in `multipliers.condition`, or "none" for a model without multipliers.
      fixing: keyword arguments of `gauge_fix`.
      held: keyword arguments of `hold_products`; None if the product s_Q·s_K is not controlled.
    """

    which: str
    fixing: dict[str, Any]
    held: dict[str, Any] | None = None


def arms(rate: float) -> dict[str, Arm]:
    """Name → every condition that is compared. `rate` is the peak learning rate, by which decay is multiplied."""
    return {
        "none": Arm("none", {}),
        "A": Arm("A", {}),
        **{f"B, every {n}": Arm("B", {"every": n}) for n in (1, 10, 100, 1000)},
        **{f"B, every {n}, stale": Arm("B", {"every": n, "transport": False}) for n in (1, 100)},
        "C": Arm("C", {}),
        "cap": Arm("B", {}, {"kind": "cap", "cap": CAP}),
        "fix": Arm("B", {}, {"kind": "init"}),
        "decay": Arm("B", {}, {"kind": "decay", "decay": 2e-3 * rate}),
    }


class Task(NamedTuple):
    """A model, its data, and the length of its training.

    Attributes:
      config: the model's configuration.
      steps: the number of training steps.
      rate: the peak learning rate. It is reached after a tenth of the steps, and falls to a tenth of it at the end.
      batches: (step, seed) → tokens (sequences, time + 1).
      held_out: held-out batches of the same kind, stacked.
    """

    config: lm.LMConfig
    steps: int
    rate: float
    batches: Callable[[int, int], np.ndarray]
    held_out: np.ndarray


LENGTH, BATCH = 32, 8


def small(steps: int) -> Task:
    """The task of this study: a GPT-2 of two layers on bytes of text."""
    sizes = {"d_model": 48, "layers": 2, "heads": 4, "kv_heads": 4, "d_head": 12, "d_ff": 192}
    drawn = functools.cache(lambda seed: data.batches(LENGTH, BATCH, seed=seed)[0])
    config = gpt2.config(vocab=data.VOCAB, max_len=LENGTH, **sizes)
    return Task(config, steps, RATE, lambda n, seed: drawn(seed)[n], np.stack(data.batches(LENGTH, 8 * BATCH)[1]))


def schedule(task: Task) -> optax.Schedule:
    """The paper's learning rate: warm-up over a tenth of the steps, then a cosine to a tenth of the peak."""
    warm = max(1, task.steps // 10)

    def at(count: Any) -> jax.Array:
        along = jnp.clip((count - warm) / max(1, task.steps - warm), 0.0, 1.0)
        return task.rate * jnp.minimum(1.0, (count + 1) / warm) * (0.55 + 0.45 * jnp.cos(jnp.pi * along))

    return at


# Training -----------------------------------------------------------------------------------------------


def plain(rate: optax.Schedule) -> optax.GradientTransformationExtraArgs:
    """AdamW for a model without multipliers, with the same settings as in `multipliers.condition`."""
    matrices = lambda params: jax.tree.map(lambda x: x.ndim > 1, params)  # noqa: E731
    adamw = optax.adamw(rate, b2=0.95, weight_decay=multipliers.MATRIX_DECAY, mask=matrices)
    return optax.chain(optax.clip_by_global_norm(1.0), adamw)


class Program(NamedTuple):
    """Functions of one condition, compiled once for all seeds: the start of a seed, one step, the validation loss."""

    start: Callable[[int], Any]
    step: Callable[..., Any]
    evaluate: Callable[..., Any]


def program(task: Task, arm: Arm, dtype: str) -> Program:
    """Compiles the program of one condition, with forward and backward passes in `dtype`.

    A step returns its carry (parameters and state), and an array: gradient norm, drift, mean product s_Q·s_K.
    """
    multiplied = arm.which != "none"
    make = functools.partial(gpt2.build, task.config, multiplied=multiplied)
    graph, _ = nnx.split(nnx.eval_shape(lambda: make(nnx.Rngs(0))))
    gauge = multipliers.head_gauge(task.config)
    tx = plain(schedule(task))
    if multiplied:
        tx = multipliers.condition(arm.which, schedule(task), gauge, arm.held, **arm.fixing)
        tx = optax.chain(tx, go.measure.track_balance(gauge))

    def loss(params: Any, tokens: jax.Array) -> jax.Array:
        low = jax.tree.map(lambda x: x.astype(dtype), params)
        logits = nnx.merge(graph, low)(tokens[:, :-1]).astype(jnp.float32)
        return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]))

    @functools.partial(jax.jit, donate_argnums=0)
    def step(carry: Any, batch: jax.Array) -> Any:
        params, state = carry
        grads = jax.grad(loss)(params, batch)
        updates, state = tx.update(grads, state, params)
        after = optax.apply_updates(params, updates)
        drift, product = jnp.zeros(()), jnp.ones(())
        if multiplied:
            drift, product = optax.tree.get(state, "drift"), jnp.mean(optax.tree.get(state, "product").packed)
        return (after, state), jnp.stack([optax.tree.norm(grads), drift, product])

    @jax.jit
    def evaluate(params: Any, held_out: jax.Array) -> jax.Array:
        return jax.lax.map(functools.partial(loss, params), held_out).mean()

    @jax.jit
    def start(key: jax.Array) -> Any:
        params = nnx.to_pure_dict(nnx.split(make(nnx.Rngs(key)))[1])
        return params, tx.init(params)

    return Program(lambda seed: start(jax.random.key(seed)), step, evaluate)


def trained(task: Task, compiled: Program, seed: int, window: int) -> tuple[np.ndarray, np.ndarray]:
    """Trains from one seed. Returns the numbers of all steps, stacked, and the validation loss every `window` steps."""
    carry, recorded, losses = compiled.start(seed), [], []
    for n in range(task.steps):
        carry, figures = compiled.step(carry, task.batches(n, seed))
        recorded.append(figures)
        if (n + 1) % window == 0:
            losses.append(float(compiled.evaluate(carry[0], task.held_out)))
    return np.stack(jax.device_get(recorded)), np.array(losses)


def measured(task: Task, name: str, dtype: str, seeds: Sequence[int], run: Run) -> Cell:
    """Trains one condition from all seeds, and returns its numbers. Curves have one point per window of steps."""
    compiled = program(task, arms(task.rate)[name], dtype)
    window = next(n for n in range(max(1, task.steps // 20), 0, -1) if task.steps % n == 0)
    out: Cell = {key: [] for key in ("loss", "best", "drift", "mean_drift", "end", "product", "spike")}
    for seed in seeds:
        figures, loss = trained(task, compiled, seed, window)
        norms, drifts, products = (x.reshape(-1, window) for x in figures.T)
        norm, drift, late = norms.max(1), drifts.max(1), norms.max(1)[len(norms) // 2 :].astype(float)
        ends = {
            "loss": loss[-1], "best": np.nanmin(loss), "drift": drift.max(),
            "mean_drift": drifts.mean(1).astype(float).mean(), "end": drifts[-1, -1], "product": products[-1, -1],
            "spike": late.max() / np.median(late),
        }
        for key, value in ends.items():
            out[key].append(float(value))
        if seed == seeds[0]:
            out["curves"] = {"loss": loss, "drift": drift, "product": products[:, -1], "norm": norm}
    return out


# Results ------------------------------------------------------------------------------------------------


def figure(result: Result, path: Path) -> None:
    """Draws losses (the paper's Figure 2), drift over N (its Figure 3), and drift and product along the run."""
    cells, names = result["cells"], list(arms(1.0))
    fig, axes = report.plt.subplots(2, 2, figsize=(12, 8.5), layout="constrained")
    losses, largest, drifts, products = axes.flat
    for dtype, mark, hue, shift in (("float32", "o", "tab:blue", -0.13), ("bfloat16", "s", "tab:red", 0.13)):
        for k, name in enumerate(names):
            cell = cells[f"{name}, {dtype}"]
            deviation = np.std(cell["loss"], ddof=1)
            losses.errorbar(np.mean(cell["loss"]), k + shift, xerr=deviation, fmt=mark, color=hue)
            height = np.full(len(cell["drift"]), k + shift)
            largest.scatter(np.asarray(cell["drift"]) + 1e-8, height, color=hue, marker=mark)
    for axis in (losses, largest):
        report.rows(axis, names)
        axis.grid(alpha=0.3)
    for k, name in enumerate(names[1:], 1):
        curves, color = cells[f"{name}, bfloat16"]["curves"], report.plt.get_cmap("tab20")(k)
        at = np.arange(1, len(curves["drift"]) + 1) * (result["settings"]["steps"] // len(curves["drift"]))
        drifts.plot(at, np.asarray(curves["drift"]) + 1e-8, label=name, color=color)
        products.plot(at, curves["product"], label=name, color=color)
    losses.set(title="validation loss; blue float32, red bfloat16", xlabel="nats")
    largest.set(title="largest drift of a run, Eq. (3)", xscale="log")
    drifts.set(title="drift, largest of a window, bfloat16, first seed", yscale="log", xlabel="step")
    products.set(title="mean of s_Q·s_K, bfloat16, first seed", xlabel="step")
    products.legend(fontsize=7)
    report.save_as_is(fig, path)


def section(result: Result) -> str:
    """The results as Markdown: tables like the paper's 1 and 2, and sentences that compare them with the paper's."""
    cells = result["cells"]
    rows = []
    for name, cell in cells.items():
        read = [f"{max(cell['drift']):.1e}", f"{np.mean(cell['mean_drift']):.1e}", f"{max(cell['end']):.1e}",
                report.spread(cell["product"], ".3f")]
        rows.append([name, report.spread(cell["loss"], ".4f"), f"{np.mean(cell['best']):.4f}",
                     *(["–"] * 4 if name.startswith("none") else read), f"{max(cell['spike']):.1f}"])
    head = ["", "validation loss", "best", "largest drift", "mean drift", "at the end", "s_Q·s_K", "spike"]
    losses = [[name, *(report.spread(_gaps(cells, name, dtype), "+.4f").replace("± +", "± ") for dtype in PRECISIONS)]
              for name in arms(1.0) if name != "A"]
    bad = [name for name, cell in cells.items() if not np.isfinite(cell["loss"]).all()]
    spiky = max(cells, key=lambda name: max(cells[name]["spike"]))
    return "\n\n".join([
        f"{len(result['seeds'])} seeds, {result['settings']['steps']} steps, {result['machine']}. Drift: Eq. (3), over "
        "heads, layers, all steps and seeds; product: at the end; spike: the largest gradient norm of a window in the "
        "second half over the median of these.",
        report.plain([head, *rows]),
        "Validation loss less A's, seed by seed:",
        report.plain([["", *PRECISIONS], *losses]),
        *(_told(cells, dtype) for dtype in PRECISIONS),
        "Drift in float32 is rounding in this network: logits see the products r_Q·r_K entry by entry, so that "
        "multipliers that start equal get equal gradients and stay equal. The next section has networks that part "
        "them. The paper's numbers: 0.052 under A; under C 0.047 in its table and 0.053 in its text; under B 3.5e-7 "
        "for up to 100 steps between fixes. Products of 2.5 under A, 3 under B. Losses less A's: B +0.044, C +0.019, "
        "every 100 steps −0.031 (best, one seed); one seed of B unstable by its table, two by its text.",
        _verdicts(cells),
        f"Not finite: {', '.join(bad) or 'none'}. Largest spike: {max(cells[spiky]['spike']):.1f}, {spiky}.",
    ])


def _told(cells: dict[str, Cell], dtype: str) -> str:
    def most(name: str, key: str) -> float:
        return max(cells[f"{name}, {dtype}"][key])

    fixed = [f"B, every {n}" for n in (1, 10, 100, 1000)]
    between = ", ".join(f"{most(name, 'drift'):.1e}" for name in fixed)
    ends = {name: np.mean(cells[f"{name}, {dtype}"]["product"]) for name in ("A", "C", *HELD)}
    gaps = {name: _gaps(cells, name, dtype) for name in arms(1.0) if name != "A"}
    apart = [name for name, x in gaps.items() if abs(np.mean(x)) > 2.0 * np.std(x, ddof=1)]
    return (f"**{dtype}.** Largest drift: A {most('A', 'drift'):.1e}, C {most('C', 'drift'):.1e}, B at N = 1, 10, 100, "
            f"1000 {between} along the run, at most {max(most(name, 'end') for name in fixed):.1e} at its end, right "
            f"after a fix. Product at the end, from 1: {', '.join(f'{name} {x:.3f}' for name, x in ends.items())} (cap "
            f"is at {CAP}). Further from A's loss than two standard deviations of the gap: "
            f"{', '.join(apart) or 'no arm'}.")


def _verdicts(cells: dict[str, Cell]) -> str:
    """Sentences that say, for each precision, whether the paper's claims hold here."""

    def drift(name: str) -> np.ndarray:
        return np.array([max(cells[f"{name}, {dtype}"]["drift"]) for dtype in PRECISIONS])

    def less(name: str, than: str) -> np.ndarray:
        pairs = [[cells[f"{arm}, {dtype}"]["loss"] for arm in (name, than)] for dtype in PRECISIONS]
        gaps = [np.subtract(*pair) for pair in pairs]
        return np.array([np.mean(x) < -2.0 * np.std(x, ddof=1) for x in gaps])

    always, rarely = "B, every 1", "B, every 100"
    ends = [[np.mean(cells[f"{arm}, {dtype}"]["product"]) for arm in (always, "A")] for dtype in PRECISIONS]
    grown = [fixed > decayed for fixed, decayed in ends]
    spikes = [max(cells[f"{always}, {dtype}"]["spike"]) >= 50.0 for dtype in PRECISIONS]
    better = less(rarely, "A") & less(rarely, always)
    hardly = (drift("A") > 0.5 * drift("C")) & (0.5 * drift("C") > 5e-7)
    largest, loss = "the largest |log(s_Q/s_K)|", "validation loss, by two standard deviations of the gap"
    return " ".join(report.paper(finding, list(holds), by, "precisions") for finding, holds, by in [
        ("multipliers drift apart where nothing fixes them", drift("C") >= 1e-2, f"{largest}, 1e-2 or more"),
        ("decay hardly holds them back", hardly, f"{largest}, under A more than half of that under C, rounding aside"),
        ("fixes at every step leave 3.5e-7", drift(always) <= 1e-6, f"{largest}, at most 1e-6"),
        ("so do fixes 100 steps apart", drift(rarely) <= 1e-6, f"{largest} between fixes, at most 1e-6"),
        ("products grow further without decay", grown, "the mean of s_Q·s_K"),
        ("fixes at every step cost loss", less("A", always), loss),
        ("fixes 100 steps apart are better than A and than fixes at every step", better, loss),
        ("fixes at every step are unstable late in training", spikes,
         "the largest gradient norm of a window over the median, 50 or more"),
    ])


def _gaps(cells: dict[str, Cell], name: str, dtype: str) -> list[float]:
    return [float(x) for x in np.subtract(cells[f"{name}, {dtype}"]["loss"], cells[f"A, {dtype}"]["loss"])]


def cells(c: Config, args: argparse.Namespace) -> harness.Cells:
    """The cells: every condition in both precisions, each with all seeds."""
    task = small(c.steps)
    return {
        ("cells", f"{arm}, {dtype}"): functools.partial(measured, task, arm, dtype, args.seeds)
        for arm in arms(task.rate) for dtype in PRECISIONS
    }


STUDY = harness.Study(__doc__, "gaugefix_lrm", cells, section, figure, config=Config(), seeds=SEEDS, digits=5,
                      settings=lambda c: {"steps": c.steps, "rate": RATE, "width": 48, "layers": 2})
