"""Learnable multipliers under decay, gauge fixing, neither, and with their size held (GaugeFix-LRM).

    python -m examples.studies gaugefix_lrm                                  # CPU size, an hour on one core
    python -m examples.studies gaugefix_lrm --only "A, *" "B, every 1, *" --steps 200 --out outputs/try     # to try it
    python -m examples.studies gaugefix_lrm --train train.bin --val val.bin --steps 20000 --only "*bfloat16"

A GPT-2 on text: two layers on bytes, or with `--train` and `--val` the paper's 124M on tokens, files of 16-bit integers
as nanoGPT writes them, on an accelerator. A: decay on all multipliers. B: none on those of queries and keys, which are
fixed every N steps, their moments carried along; "stale": left where they were, as the paper has it. C: neither. cap,
fix, decay: B with the product s_Q·s_K held, which the paper asks for in its §5. none: no multipliers at all. bfloat16:
forward and backward in it; weights, optimizer and the loss of the logits in float32.

In this network nothing drifts but by rounding: logits see r_Q·r_K entry by entry, so that multipliers that start equal
get equal gradients. `gaugefix_networks` trains networks that part them.
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


@dataclasses.dataclass(frozen=True)
class Config:
    """Steps, the files of tokens of a full run, and the sequences of one of its micro-batches."""

    steps: int = 2_000
    train: str = ""
    val: str = ""
    sequences: int = 12

    @property
    def task(self) -> "Task":
        """What is trained."""
        files = Path(self.train), Path(self.val)
        return full(files, self.steps, self.sequences) if self.train else small(self.steps)


class Arm(NamedTuple):
    """One condition of the comparison.

    Attributes:
      which: "A", "B", "C" as in `multipliers.condition`, or "none" for a model without multipliers.
      fixing: keyword arguments of `gauge_fix`.
      held: keyword arguments of `hold_products`; None where products are free.
      quotient: keyword arguments of `quotient` around the optimizer; None without it.
    """

    which: str
    fixing: dict[str, Any]
    held: dict[str, Any] | None = None
    quotient: dict[str, Any] | None = None


def arms(rate: float) -> dict[str, Arm]:
    """Everything that is compared; `rate` is the peak learning rate, which decay is times."""
    fixed = {f"B, every {n}": Arm("B", {"every": n}) for n in (1, 10, 100, 1000)}
    stale = {f"B, every {n}, stale": Arm("B", {"every": n, "transport": False}) for n in (1, 100)}
    held: dict[str, dict[str, Any]] = {
        "cap": {"kind": "cap", "cap": CAP},
        "fix": {"kind": "init"},
        "decay": {"kind": "decay", "decay": 2e-3 * rate},
    }
    return {
        "none": Arm("none", {}),
        "A": Arm("A", {}),
        **fixed,
        **stale,
        "C": Arm("C", {}),
        **{name: Arm("B", {}, options) for name, options in held.items()},
    }


class Task(NamedTuple):
    """What is trained, on what, for how long.

    Attributes:
      config: of the model.
      steps: of the optimizer.
      rate: at its peak, after a tenth of the steps; a tenth of it at the end.
      window: steps between evaluations.
      batches: (step, seed) → tokens (micro-batches, sequences, time + 1); gradients are averaged over the first.
      held_out: the same without seeds.
      settings: what else two runs must agree in before they may stand in one table.
    """

    config: lm.LMConfig
    steps: int
    rate: float
    window: int
    batches: Callable[[int, int], np.ndarray]
    held_out: np.ndarray
    settings: dict[str, Any] = {}  # noqa: RUF012


LENGTH, BATCH = 32, 8


def small(steps: int, rate: float = 3e-3, **switches: Any) -> Task:
    """Two layers on bytes of text; `switches` of the model's configuration."""
    sizes = {"d_model": 48, "layers": 2, "heads": 4, "kv_heads": 4, "d_head": 12, "d_ff": 192}
    drawn = functools.cache(lambda seed: data.batches(LENGTH, BATCH, seed=seed)[0])
    held_out = np.stack(data.batches(LENGTH, 8 * BATCH)[1])
    config = gpt2.config(vocab=data.VOCAB, max_len=LENGTH, **(sizes | switches))
    window = _window(steps, max(1, steps // 20))
    return Task(config, steps, rate, window, lambda n, seed: drawn(seed)[n][None], held_out)


def full(files: Sequence[Path], steps: int, sequences: int) -> Task:
    """The paper's, on tokens in files."""
    config, batch, most = gpt2.config(), 480, 40
    train, held = (data.Windows(np.memmap(path, np.uint16, "r"), config.max_len) for path in files)
    if batch % sequences:
        raise ValueError(f"--sequences {sequences} does not divide a batch of {batch}: take 12, 16, 24, 32")

    def tokens(step: int, seed: int) -> np.ndarray:
        chosen = np.random.default_rng((seed, step)).integers(0, len(train), batch)
        return np.stack([train[k] for k in chosen]).reshape(batch // sequences, sequences, -1)

    held_out = np.stack([held[k] for k in range(min(most * sequences, len(held) // sequences * sequences))])
    settings = {"files": [f"{path.resolve()}, {path.stat().st_size}" for path in files], "sequences": sequences}
    held_out = held_out.reshape(-1, sequences, held_out.shape[-1])
    return Task(config, steps, 6e-4, _window(steps, 500), tokens, held_out, settings)


def _window(steps: int, most: int) -> int:
    """The longest window that divides the steps."""
    return max(n for n in range(1, most + 1) if steps % n == 0)


def schedule(task: Task) -> optax.Schedule:
    """Warm-up over a tenth, cosine to a tenth, as in the paper."""
    warm = max(1, task.steps // 10)

    def at(count: Any) -> jax.Array:
        along = jnp.clip((count - warm) / max(1, task.steps - warm), 0.0, 1.0)
        return task.rate * jnp.minimum(1.0, (count + 1) / warm) * (0.55 + 0.45 * jnp.cos(jnp.pi * along))

    return at


# Training -----------------------------------------------------------------------------------------------


def plain(rate: optax.Schedule) -> optax.GradientTransformationExtraArgs:
    """AdamW as the conditions have it."""
    matrices = lambda params: jax.tree.map(lambda x: x.ndim > 1, params)  # noqa: E731
    adamw = optax.adamw(rate, b2=0.95, weight_decay=multipliers.MATRIX_DECAY, mask=matrices)
    return optax.chain(optax.clip_by_global_norm(1.0), adamw)


class Program(NamedTuple):
    """Compiled once for all seeds: parameters and state of a seed, one step, the validation loss."""

    start: Callable[[int], Any]
    step: Callable[..., Any]
    evaluate: Callable[..., Any]


def program(task: Task, arm: Arm, dtype: str, observe: Callable[[Any, Any, Any], Any] | None = None) -> Program:
    """Of one arm. A step gives (parameters, state) and (gradient norm, drift, mean product).

    Args:
      task: the model, and for how long.
      arm: the optimizer.
      dtype: of forward and backward.
      observe: (parameters, gradients, parameters after the step) → what a step gives instead.
    """
    multiplied = arm.which != "none"
    make = functools.partial(gpt2.build, task.config, multiplied=multiplied)
    graph, _ = nnx.split(nnx.eval_shape(lambda: make(nnx.Rngs(0))))
    gauge = multipliers.head_gauge(task.config)
    tx = plain(schedule(task))
    if multiplied:
        tx = multipliers.condition(arm.which, schedule(task), gauge, arm.held, **arm.fixing)
        tx = tx if arm.quotient is None else go.quotient(tx, gauge, **arm.quotient)
        tx = optax.chain(tx, go.measure.track_balance(gauge))

    def loss(params: Any, tokens: jax.Array) -> jax.Array:
        low = jax.tree.map(lambda x: x.astype(dtype), params)
        logits = nnx.merge(graph, low)(tokens[:, :-1]).astype(jnp.float32)
        return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]))

    def gradient(params: Any, batch: jax.Array) -> Any:
        if len(batch) == 1:
            return jax.grad(loss)(params, batch[0])
        add = lambda total, tokens: (jax.tree.map(jnp.add, total, jax.grad(loss)(params, tokens)), None)  # noqa: E731
        total, _ = jax.lax.scan(add, jax.tree.map(jnp.zeros_like, params), batch)
        return jax.tree.map(lambda x: x / len(batch), total)

    @functools.partial(jax.jit, donate_argnums=0)
    def step(carry: Any, batch: jax.Array) -> Any:
        params, state = carry
        grads = gradient(params, batch)
        updates, state = tx.update(grads, state, params)
        after = optax.apply_updates(params, updates)
        if observe is not None:
            return (after, state), observe(params, grads, after)
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


def trained(task: Task, compiled: Program, seed: int, saved: Path) -> np.ndarray:
    """Per window: loss at its end, largest gradient norm, mean, largest and last drift, product at its end."""
    recorded: list[Any] = []

    def go_on(carry: Any, first: int, last: int) -> Any:
        recorded.clear()
        for n in range(first, last):
            carry, figures = compiled.step(carry, task.batches(n, seed))
            recorded.append(figures)
        return carry

    def read(carry: Any) -> dict[str, float]:
        if not recorded:
            return {}
        norm, drift, product = np.stack(jax.device_get(recorded)).T
        loss = float(compiled.evaluate(carry[0], task.held_out))
        found = {"norm": norm.max(), "mean": drift.mean(), "most": drift.max(), "last": drift[-1], "end": product[-1]}
        return {"loss": loss} | {key: float(x) for key, x in found.items()}

    at = range(0, task.steps + 1, task.window)
    carry, curves = harness.along(at, compiled.start(seed), go_on, read, saved)
    harness.keep(saved, carry, curves)  # until all seeds are done
    return np.array([list(window.values()) for window in curves[1:]]).T


def measured(task: Task, name: str, dtype: str, seeds: Sequence[int], run: Run) -> Cell:
    """One arm, all seeds."""
    compiled = program(task, arms(task.rate)[name], dtype)
    out: Cell = {key: [] for key in ("loss", "best", "drift", "mean_drift", "end", "product", "spike")}
    files = {seed: run.saved.with_name(f"{run.saved.stem}-{seed}.npz") for seed in seeds}
    for seed, file in files.items():
        loss, norm, mean_drift, drift, last, product = trained(task, compiled, seed, file)
        late = norm[len(norm) // 2 :]
        ends = {
            "loss": loss[-1], "best": np.nanmin(loss), "drift": drift.max(), "mean_drift": mean_drift.mean(),
            "end": last[-1], "product": product[-1], "spike": late.max() / np.median(late),
        }
        for key, value in ends.items():
            out[key].append(float(value))
        if seed == seeds[0]:
            out["curves"] = {"loss": loss, "drift": drift, "product": product, "norm": norm}
    for file in files.values():
        file.unlink()
    return out


# Results ------------------------------------------------------------------------------------------------


def figure(result: Result, path: Path) -> None:
    """Losses as in the paper's Figure 2, drift by frequency as in its Figure 3, drift and product along the run."""
    cells = result["cells"]
    names = list(dict.fromkeys(name.rsplit(", ", 1)[0] for name in cells))
    fig, axes = report.plt.subplots(2, 2, figsize=(12, 8.5), layout="constrained")
    losses, largest, drifts, products = axes.flat
    for dtype, mark, hue, shift in (("float32", "o", "tab:blue", -0.13), ("bfloat16", "s", "tab:red", 0.13)):
        shown = {k: cells[f"{name}, {dtype}"] for k, name in enumerate(names) if f"{name}, {dtype}" in cells}
        for k, cell in shown.items():
            values = np.asarray(cell["loss"])
            losses.errorbar(
                values.mean(), k + shift, xerr=values.std(ddof=1) if values.size > 1 else 0.0, fmt=mark, color=hue
            )
            largest.scatter(np.asarray(cell["drift"]) + 1e-8, np.full(values.size, k + shift), color=hue, marker=mark)
    for axis in (losses, largest):
        report.rows(axis, names)
        axis.grid(alpha=0.3)
    losses.set(title="validation loss; blue float32, red bfloat16", xlabel="nats")
    largest.set(title="largest drift of a run, Eq. (3)", xscale="log")
    low = "bfloat16" if any(name.endswith("bfloat16") for name in cells) else "float32"
    for k, name in enumerate(names):
        if name == "none" or f"{name}, {low}" not in cells:
            continue
        curves, color = cells[f"{name}, {low}"]["curves"], report.plt.get_cmap("tab20")(k)
        at = np.arange(1, len(curves["drift"]) + 1) * (result["settings"]["steps"] // len(curves["drift"]))
        drifts.plot(at, np.asarray(curves["drift"]) + 1e-8, label=name, color=color)
        products.plot(at, curves["product"], label=name, color=color)
    drifts.set(title=f"drift, largest of a window, {low}, first seed", yscale="log", xlabel="step")
    products.set(title=f"mean of s_Q·s_K, {low}, first seed", xlabel="step")
    if products.lines:
        products.legend(fontsize=7)
    report.save_as_is(fig, path)


def section(result: Result) -> str:
    """Tables as the paper's 1 and 2, and what they say beside its."""
    cells = result["cells"]

    def read(name: str, text: str) -> str:
        return "–" if name.startswith("none") else text

    rows = [
        [name, report.spread(cell["loss"], ".4f"), f"{np.mean(cell['best']):.4f}",
         read(name, f"{max(cell['drift']):.1e}"), read(name, f"{np.mean(cell['mean_drift']):.1e}"),
         read(name, f"{max(cell['end']):.1e}"), read(name, report.spread(cell["product"], ".3f")),
         f"{max(cell['spike']):.1f}"]
        for name, cell in cells.items()
    ]
    about = f"{len(result['seeds'])} seeds, {result['settings']['steps']} steps, {result['machine']}."
    head = ["", "validation loss", "best", "largest drift", "mean drift", "at the end", "s_Q·s_K", "spike"]
    explained = "Drift: Eq. (3), over heads, layers, all steps and seeds; product: at the end; spike: the largest "
    explained += "gradient norm of a window in the second half over the median of these."
    return "\n\n".join([f"{about} {explained}", report.plain([head, *rows]), told(cells)])


def told(cells: dict[str, Cell]) -> str:
    """What the numbers say beside the paper's, precision by precision."""
    complete = [dtype for dtype in PRECISIONS if all(f"{name}, {dtype}" in cells for name in arms(1.0))]
    if not complete:
        return ""
    names = [name for name in arms(1.0) if name != "A"]
    losses = [
        [name, *(report.spread(_gaps(cells, name, dtype), "+.4f").replace("± +", "± ") for dtype in complete)]
        for name in names
    ]
    bad = [name for name, cell in cells.items() if not np.isfinite(cell["loss"]).all()]
    spiky = max(cells, key=lambda name: max(cells[name]["spike"]))
    return "\n\n".join([
        "Validation loss less A's, seed by seed:",
        report.plain([["", *complete], *losses]),
        *(_told(cells, dtype) for dtype in complete),
        "Drift in float32 is rounding in this network: logits see the products r_Q·r_K entry by entry, so that "
        "multipliers that start equal get equal gradients and stay equal. The next section has networks that part "
        "them. The paper's numbers: 0.052 under A; under C 0.047 in its table and 0.053 in its text; under B 3.5e-7 "
        "for up to 100 steps between fixes. Products of 2.5 under A, 3 under B. Losses less A's: B +0.044, C +0.019, "
        "every 100 steps −0.031 (best, one seed); one seed of B unstable by its table, two by its text.",
        _verdicts(cells, complete),
        f"Not finite: {', '.join(bad) or 'none'}. Largest spike: {max(cells[spiky]['spike']):.1f}, {spiky}.",
    ])


def _told(cells: dict[str, Cell], dtype: str) -> str:
    def of(name: str, key: str) -> list[float]:
        return cells[f"{name}, {dtype}"][key]

    fixed = [f"B, every {n}" for n in (1, 10, 100, 1000)]
    between = ", ".join(f"{max(of(name, 'drift')):.1e}" for name in fixed)
    after = max(max(of(name, "end")) for name in fixed)
    products = ", ".join(f"{name} {np.mean(of(name, 'product')):.3f}" for name in ("A", "C", *HELD))
    gaps = {name: _gaps(cells, name, dtype) for name in arms(1.0) if name != "A"}
    apart = [name for name, x in gaps.items() if len(x) > 1 and abs(np.mean(x)) > 2.0 * np.std(x, ddof=1)]
    return (
        f"**{dtype}.** Largest drift: A {max(of('A', 'drift')):.1e}, C {max(of('C', 'drift')):.1e}, B at N = 1, 10, "
        f"100, 1000 {between} along the run, at most {after:.1e} at its end, right after a fix. Product at the end, "
        f"from 1: {products} (cap is at {CAP}). Further from A's loss than two standard deviations of the gap: "
        f"{', '.join(apart) or 'no arm'}."
    )


def _verdicts(cells: dict[str, Cell], complete: Sequence[str]) -> str:
    """The paper's claims, precision by precision."""

    def drift(name: str, dtype: str, key: str = "drift") -> float:
        return float(max(cells[f"{name}, {dtype}"][key]))

    def less(name: str, than: str, dtype: str) -> bool:
        gaps = np.subtract(*(cells[f"{arm}, {dtype}"]["loss"] for arm in (name, than)))
        return bool(np.mean(gaps) < -2.0 * np.std(gaps, ddof=1))

    def product(name: str, dtype: str) -> float:
        return float(np.mean(cells[f"{name}, {dtype}"]["product"]))

    largest, cases = "the largest |log(s_Q/s_K)|", "precisions"
    loss = "validation loss, by two standard deviations of the gap"
    return " ".join([
        report.paper("multipliers drift apart where nothing fixes them", [drift("C", x) >= 1e-2 for x in complete],
                     f"{largest}, 1e-2 or more", cases),
        report.paper("decay hardly holds them back", [drift("A", x) > 0.5 * drift("C", x) > 5e-7 for x in complete],
                     f"{largest}, under A more than half of that under C, rounding aside", cases),
        report.paper("fixes at every step leave 3.5e-7", [drift("B, every 1", x) <= 1e-6 for x in complete],
                     f"{largest}, at most 1e-6", cases),
        report.paper("so do fixes 100 steps apart", [drift("B, every 100", x) <= 1e-6 for x in complete],
                     f"{largest} between fixes, at most 1e-6", cases),
        report.paper("products grow further without decay",
                     [product("B, every 1", x) > product("A", x) for x in complete], "the mean of s_Q·s_K", cases),
        report.paper("fixes at every step cost loss", [less("A", "B, every 1", x) for x in complete], loss, cases),
        report.paper("fixes 100 steps apart are better than A and than fixes at every step",
                     [less("B, every 100", "A", x) and less("B, every 100", "B, every 1", x) for x in complete],
                     loss, cases),
        report.paper("fixes at every step are unstable late in training",
                     [max(cells[f"B, every 1, {x}"]["spike"]) >= 50.0 for x in complete],
                     "the largest gradient norm of a window over the median, 50 or more", cases),
    ])


def _gaps(cells: dict[str, Cell], name: str, dtype: str) -> list[float]:
    return [float(x) for x in np.subtract(cells[f"{name}, {dtype}"]["loss"], cells[f"A, {dtype}"]["loss"])]


def cells(c: Config, args: argparse.Namespace) -> harness.Cells:
    """All arms in both precisions."""
    task = c.task
    return {
        ("cells", f"{arm}, {dtype}"): functools.partial(measured, task, arm, dtype, args.seeds)
        for arm in arms(task.rate) for dtype in PRECISIONS
    }


def settings(c: Config) -> dict[str, Any]:
    """What must agree before two runs may stand in one table."""
    task = c.task
    sizes = {"steps": task.steps, "rate": task.rate, "width": task.config.d_model, "layers": task.config.layers}
    return sizes | task.settings


STUDY = harness.Study(
    __doc__, lambda c: "gaugefix_lrm_full" if c.train else "gaugefix_lrm", cells, section, figure, config=Config(),
    seeds=SEEDS, settings=settings, digits=5,
)
