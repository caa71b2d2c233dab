"""Learnable multipliers under decay, gauge fixing, neither, and with their size held (GaugeFix-LRM).

    python -m examples.gaugefix_lrm                                  # CPU size, an hour on one core
    python -m examples.gaugefix_lrm --arms A "B, every 1" --steps 200 --out outputs/try          # to try it
    python -m examples.gaugefix_lrm --networks                       # where multipliers drift, half an hour
    python -m examples.gaugefix_lrm --full train.bin val.bin --precisions bfloat16               # on an accelerator

A GPT-2 on text: two layers on bytes, or with `--full` the paper's 124M on tokens, files of 16-bit integers as nanoGPT
writes them. A: decay on all multipliers. B: none on those of queries and keys, which are fixed every N steps, their
moments carried along; "stale": left where they were, as the paper has it. C: neither. cap, fix, decay: B with the
product s_Q·s_K held, which the paper asks for in its §5. none: no multipliers at all. bfloat16: forward and backward in
it; weights, optimizer and the loss of the logits in float32. Killed, it goes on after the last arm, with `--full` after
the last evaluation.

In that network nothing drifts but by rounding: logits see r_Q·r_K entry by entry, so that multipliers that start equal
get equal gradients. `--networks` trains three that part them, and all three at once: biases, which no multiplier
scales; rotary embeddings, where logits see products of two entries of a pair; grouped queries, where one multiplier of
keys faces several of queries. The sum of r·∂L/∂r over a head, biases in, is the same on both sides in every network.
Entry by entry both sides differ by 3e-7 in the plain one, and by 5, 65 and 55 % in these three (medians over heads and
steps), and Adam divides entry by entry.
"""

import argparse
import functools
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from tqdm import tqdm

import gauge_optax as go
from examples import data, grid, report
from examples.common import Checkpoints
from examples.grid import Cell, Result
from models import gpt2, lm, multipliers

SEEDS = (42, 123, 456)
PRECISIONS = ("float32", "bfloat16")
CAP, HELD = 1.05, ("cap", "fix", "decay")


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


class Run(NamedTuple):
    """What is trained, on what, for how long.

    Attributes:
      config: of the model.
      steps: of the optimizer.
      rate: at its peak, after a tenth of the steps; a tenth of it at the end.
      window: steps between evaluations.
      batches: (step, seed) → tokens (micro-batches, sequences, time + 1); gradients are averaged over the first.
      held_out: the same without seeds.
      folder: where checkpoints go, or None.
      settings: what two runs must agree in before one goes on where the other stopped.
    """

    config: lm.LMConfig
    steps: int
    rate: float
    window: int
    batches: Callable[[int, int], np.ndarray]
    held_out: np.ndarray
    folder: Path | None = None
    settings: dict[str, Any] = {}  # noqa: RUF012


LENGTH, BATCH = 32, 8


def small(steps: int, rate: float = 3e-3, **switches: Any) -> Run:
    """Two layers on bytes of text; `switches` of the model's configuration."""
    sizes = {"d_model": 48, "layers": 2, "heads": 4, "kv_heads": 4, "d_head": 12, "d_ff": 192}
    drawn = functools.cache(lambda seed: data.batches(LENGTH, BATCH, seed=seed)[0])
    held_out = np.stack(data.batches(LENGTH, 8 * BATCH)[1])
    config = gpt2.config(vocab=data.VOCAB, max_len=LENGTH, **(sizes | switches))
    return Run(config, steps, rate, _window(steps, max(1, steps // 20)), lambda n, seed: drawn(seed)[n][None], held_out)


def full(files: Sequence[Path], steps: int, sequences: int, folder: Path) -> Run:
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
    return Run(config, steps, 6e-4, _window(steps, 500), tokens, held_out, folder, settings | {"steps": steps})


def _window(steps: int, most: int) -> int:
    """The longest window that divides the steps."""
    return max(n for n in range(1, most + 1) if steps % n == 0)


def schedule(run: Run) -> optax.Schedule:
    """Warm-up over a tenth, cosine to a tenth, as in the paper."""
    warm = max(1, run.steps // 10)

    def at(count: Any) -> jax.Array:
        along = jnp.clip((count - warm) / max(1, run.steps - warm), 0.0, 1.0)
        return run.rate * jnp.minimum(1.0, (count + 1) / warm) * (0.55 + 0.45 * jnp.cos(jnp.pi * along))

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


def program(run: Run, arm: Arm, dtype: str, observe: Callable[[Any, Any, Any], Any] | None = None) -> Program:
    """Of one arm. A step gives (parameters, state) and (gradient norm, drift, mean product).

    Args:
      run: the model, and for how long.
      arm: the optimizer.
      dtype: of forward and backward.
      observe: (parameters, gradients, parameters after the step) → what a step gives instead.
    """
    multiplied = arm.which != "none"
    make = functools.partial(gpt2.build, run.config, multiplied=multiplied)
    graph, _ = nnx.split(nnx.eval_shape(lambda: make(nnx.Rngs(0))))
    gauge = multipliers.head_gauge(run.config)
    tx = plain(schedule(run))
    if multiplied:
        tx = multipliers.condition(arm.which, schedule(run), gauge, arm.held, **arm.fixing)
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


def trained(run: Run, compiled: Program, seed: int, name: str) -> np.ndarray:
    """Per window: loss at its end, largest gradient norm, mean, largest and last drift, product at its end."""
    carry = compiled.start(seed)
    curves: list[Any] = []
    folder = None if run.folder is None else run.folder / f"{name}, {seed}".replace(", ", "_")
    kept = None if folder is None else Checkpoints(folder)
    if kept is not None and (saved := kept.restore(carry)) is not None:
        carry, (settings, *curves) = saved
        if settings != run.settings:
            raise ValueError(
                f"{folder} holds another run\n  found:    {settings}\n  expected: {run.settings}\n"
                "  remedy:   delete it, or give another --out"
            )
    bar = tqdm(total=run.steps, initial=run.window * len(curves), desc=f"{name}, seed {seed}", leave=False)
    for first in range(run.window * len(curves), run.steps, run.window):
        recorded = []
        for n in range(first, first + run.window):
            carry, figures = compiled.step(carry, run.batches(n, seed))
            recorded.append(figures)
            bar.update()
        norm, drift, product = np.stack(jax.device_get(recorded)).T
        value = float(compiled.evaluate(carry[0], run.held_out))
        drifts = [float(x) for x in (drift.mean(), drift.max(), drift[-1])]
        curves.append([value, float(norm.max()), *drifts, float(product[-1])])
        bar.set_postfix(loss=f"{value:.4f}", drift=f"{drift[-1]:.1e}")
        if kept is not None:
            kept.save(first + run.window, carry, [run.settings, *curves])
    bar.close()
    if kept is not None:
        kept.close()
    return np.asarray(curves).T


def measured(run: Run, name: str, dtype: str, seeds: Sequence[int]) -> Cell:
    """One arm, all seeds."""
    compiled = program(run, arms(run.rate)[name], dtype)
    out: Cell = {key: [] for key in ("loss", "best", "drift", "mean_drift", "end", "product", "spike")}
    for seed in seeds:
        loss, norm, mean_drift, drift, last, product = trained(run, compiled, seed, f"{name}, {dtype}")
        late = norm[len(norm) // 2 :]
        ends = {
            "loss": loss[-1], "best": np.nanmin(loss), "drift": drift.max(), "mean_drift": mean_drift.mean(),
            "end": last[-1], "product": product[-1], "spike": late.max() / np.median(late),
        }
        for key, value in ends.items():
            out[key].append(float(value))
        if seed == seeds[0]:
            out["curves"] = {"loss": loss, "drift": drift, "product": product, "norm": norm}
    return out


def done(run: Run, name: str, dtype: str, seeds: Sequence[int]) -> Cell:
    """`measured`, and its checkpoints gone."""
    out = measured(run, name, dtype, seeds)
    for folder in run.folder.glob(f"{name}_{dtype}_*".replace(", ", "_")) if run.folder else ():
        shutil.rmtree(folder)
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
        axis.set_yticks(range(len(names)), names)
        axis.invert_yaxis()
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
    grid.save(fig, path)


def section(result: Result) -> str:
    """Tables as the paper's 1 and 2, and what they say beside its."""
    cells = result["cells"]

    def read(name: str, text: str) -> str:
        return "–" if name.startswith("none") else text

    rows = [
        [name, grid.spread(cell["loss"], ".4f"), f"{np.mean(cell['best']):.4f}",
         read(name, f"{max(cell['drift']):.1e}"), read(name, f"{np.mean(cell['mean_drift']):.1e}"),
         read(name, f"{max(cell['end']):.1e}"), read(name, grid.spread(cell["product"], ".3f")),
         f"{max(cell['spike']):.1f}"]
        for name, cell in cells.items()
    ]
    about = f"{len(result['seeds'])} seeds, {result['settings']['steps']} steps, {result['machine']}."
    head = ["", "validation loss", "best", "largest drift", "mean drift", "at the end", "s_Q·s_K", "spike"]
    explained = "Drift: Eq. (3), over heads, layers, all steps and seeds; product: at the end; spike: the largest "
    explained += "gradient norm of a window in the second half over the median of these."
    return "\n\n".join([f"{about} {explained}", grid.table(head, rows), told(cells)])


def told(cells: dict[str, Cell]) -> str:
    """What the numbers say beside the paper's, precision by precision."""
    complete = [dtype for dtype in PRECISIONS if all(f"{name}, {dtype}" in cells for name in arms(1.0))]
    if not complete:
        return ""
    names = [name for name in arms(1.0) if name != "A"]
    losses = [
        [name, *(grid.spread(_gaps(cells, name, dtype), "+.4f").replace("± +", "± ") for dtype in complete)]
        for name in names
    ]
    bad = [name for name, cell in cells.items() if not np.isfinite(cell["loss"]).all()]
    spiky = max(cells, key=lambda name: max(cells[name]["spike"]))
    return "\n\n".join([
        "Validation loss less A's, seed by seed:",
        grid.table(["", *complete], losses),
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


# Networks that drift -------------------------------------------------------------------------------------


NETWORKS: dict[str, dict[str, Any]] = {
    "plain": {},
    "biases": {"bias": True},
    "rotary": {"rope": True},
    "grouped": {"kv_heads": 2},
    "all three": {"bias": True, "rope": True, "kv_heads": 2},
}
"""Name → switches of the configuration; two query heads per key head are *grouped*."""
NETWORK_ARMS = {
    "A": Arm("A", {}),
    "C": Arm("C", {}),
    **{f"B, every {n}": Arm("B", {"every": n}) for n in (1, 100)},
    **{f"B, every {n}, stale": Arm("B", {"every": n, "transport": False}) for n in (1, 100)},
    "quotient": Arm("C", {}, quotient={}),
    "quotient, balanced": Arm("C", {}, quotient={"rest": "balanced"}),
}
RATE, FAST, SHORT, LONG = 3e-3, 1e-2, 300, 2_000
NETWORK_RUNS = [
    *((network, arm, RATE, SHORT) for network in NETWORKS for arm in NETWORK_ARMS),
    *((network, arm, FAST, SHORT) for network in NETWORKS for arm in ("A", "C", "B, every 1", "B, every 100")),
    *(("all three", arm, RATE, LONG) for arm in NETWORK_ARMS),
]
"""Network, arm, peak rate and steps: all arms in a short run, some at a higher rate, all in a long run."""


def sides(config: lm.LMConfig, tree: Any) -> list[tuple[dict[str, jax.Array], dict[str, jax.Array]]]:
    """Per layer what the gauge moves on either side, multipliers and biases, as (key heads, query heads each, e)."""
    shape = (config.kv_heads, -1, config.d_head)

    def of(layer: Any) -> dict[str, jax.Array]:
        found = {"rows": layer["rows"].reshape(shape)}
        return found | ({"bias": layer["layer"]["bias"].reshape(shape)} if config.bias else {})

    blocks = [tree["blocks"][k]["attn"] for k in range(config.layers)]
    return [(of(block["query"]), of(block["key"])) for block in blocks]


def observed(config: lm.LMConfig) -> Callable[[Any, Any, Any], dict[str, jax.Array]]:
    """Of one step, (layers, key heads): the coordinates after it, and how both sides' gradients differ before it."""

    def squares(side: dict[str, jax.Array]) -> jax.Array:
        return sum((jnp.sum(x * x, (1, 2)) for x in side.values()), jnp.zeros(config.kv_heads))

    def of(params: Any, grads: Any, after: Any) -> dict[str, jax.Array]:
        kept: dict[str, list[jax.Array]] = {name: [] for name in ("query", "key", "sides", "entries", "sums")}
        for query, key in sides(config, after):
            for name, side in (("query", query), ("key", key)):
                kept[name].append(0.5 * jnp.log(jnp.mean(side["rows"] ** 2, (1, 2))))
            kept["sides"].append(0.5 * jnp.log(squares(query) / squares(key)))
        # What the logarithm of an entry sees of the gradient: r·∂L/∂r.
        scaled = jax.tree.map(jnp.multiply, sides(config, params), sides(config, grads))
        for query, key in scaled:
            apart, of_keys = jnp.broadcast_arrays(query["rows"] - key["rows"], key["rows"])
            kept["entries"].append(jnp.sqrt(squares({"rows": apart}) / squares({"rows": of_keys})))
            sums = [sum(jnp.sum(x, (1, 2)) for x in side.values()) for side in (query, key)]
            size = sum(jnp.sum(jnp.abs(x), (1, 2)) for x in key.values())
            kept["sums"].append(jnp.abs(sums[0] - sums[1]) / size)
        return {name: jnp.stack(x) for name, x in kept.items()}

    return of


def network_cell(name: str, arm: str, rate: float, steps: int, seeds: Sequence[int]) -> Cell:
    """One arm on one network, per seed: the largest drift of each coordinate, the last, products, loss, gradients."""
    run = small(steps, rate, **NETWORKS[name])
    compiled = program(run, NETWORK_ARMS[arm], "float32", observed(run.config))
    out: Cell = {key: [] for key in ("loss", "product", "entries", "sums")}
    for seed in seeds:
        carry = compiled.start(seed)
        start = observed(run.config)(carry[0], carry[0], carry[0])
        recorded = []
        for n in range(steps):
            carry, figures = compiled.step(carry, run.batches(n, seed))
            recorded.append(figures)
        kept = jax.tree.map(lambda *x: np.stack(x), *jax.device_get(recorded))
        ratio, anchor = kept["query"] - kept["key"], kept["query"] - start["query"]
        places = {"ratio": ratio, "anchor": anchor, "sides": kept["sides"] - start["sides"]}
        drifts = {key: np.abs(np.asarray(x)).max((1, 2)) for key, x in places.items()}
        for key, drift in drifts.items():
            out.setdefault(key, []).append(float(drift.max()))
            out.setdefault(f"{key}_end", []).append(float(drift[-1]))
        out["product"].append(float(np.exp(kept["query"] + kept["key"])[-1].mean()))
        # A head whose gradient vanishes has no direction to compare: the median over heads, layers and steps.
        out["entries"].append(float(np.median(kept["entries"])))
        out["sums"].append(float(np.median(kept["sums"])))
        out["loss"].append(float(compiled.evaluate(carry[0], run.held_out)))
        if seed == seeds[0]:
            out["curves"] = {key: drift[:: max(1, steps // 100)] for key, drift in drifts.items()}
    return out


def cell_name(network: str, arm: str, rate: float, steps: int) -> str:
    """Of a run of `NETWORK_RUNS`."""
    return f"{network}, {arm}, rate {rate:g}, {steps} steps"


DRAWN = [arm for arm in NETWORK_ARMS if "stale" not in arm]
"""With stale moments curves are those without."""


def networks_figure(result: Result, path: Path) -> None:
    """Along the short runs, a column per network: Eq. (3) above, what the gauge reads below."""
    fig, axes = report.plt.subplots(
        2, len(NETWORKS), figsize=(3.1 * len(NETWORKS), 6.6), layout="constrained", sharex=True, sharey=True
    )
    for column, network in zip(axes.T, NETWORKS, strict=True):
        for k, arm in enumerate(DRAWN):
            curves = result["cells"][cell_name(network, arm, RATE, SHORT)]["curves"]
            style = {"color": report.plt.get_cmap("tab10")(k), "lw": 3.0 if arm == "A" else 1.3, "label": arm}
            for axis, key in zip(column, ("ratio", "anchor"), strict=True):
                at = np.arange(len(curves[key])) * (SHORT // len(curves[key])) + 1
                axis.plot(at, np.maximum(curves[key], 1e-8), **style)
        column[0].set(title=network, yscale="log")
        column[1].set_xlabel("step")
        for axis in column:
            axis.grid(alpha=0.3)
    axes[0, 0].set_ylabel("|log(s_Q/s_K)|, largest of all heads")
    axes[1, 0].set_ylabel("change of log s_Q, largest of all heads")
    handles, labels = axes[0, 0].get_legend_handles_labels()
    fig.legend(handles, labels, loc="outside lower center", ncols=len(labels))
    grid.save(fig, path)


SHOWN = {network: (network, SHORT) for network in NETWORKS} | {f"all three, {LONG:,} steps": ("all three", LONG)}
"""Name in the table → network and steps."""


def per_seed(cells: dict[str, Cell], run: str, arm: str, key: str, rate: float = RATE) -> np.ndarray:
    """A number of every seed; `run` is one of `SHOWN`."""
    network, steps = SHOWN[run]
    return np.asarray(cells[cell_name(network, arm, rate, steps)][key])


def most(cells: dict[str, Cell], arm: str, key: str) -> dict[str, float]:
    """The largest over seeds, by run."""
    return {run: float(per_seed(cells, run, arm, key).max()) for run in SHOWN}


def networks_section(result: Result) -> str:
    """Tables of the three coordinates, and what they say beside the paper's claims."""
    cells = result["cells"]
    rows = [
        [run, arm, *(f"{most(cells, arm, key)[run]:.1e}" for key in ("ratio", "ratio_end", "anchor", "sides")),
         grid.spread(per_seed(cells, run, arm, "product").tolist()),
         grid.spread(per_seed(cells, run, arm, "loss").tolist(), ".4f"),
         grid.spread(_less_a(cells, run, arm).tolist(), "+.4f").replace("± +", "± ")]
        for run in SHOWN for arm in NETWORK_ARMS
    ]
    why = [
        [network, *(f"{most(cells, 'C', key)[network]:.1e}" for key in ("entries", "sums")),
         *(report.listed(per_seed(cells, network, "C", "ratio", rate).tolist(), ".1e") for rate in (RATE, FAST))]
        for network in NETWORKS
    ]
    head = ["network", "arm", "log(s_Q/s_K)", "at the end", "log s_Q", "log‖Q side‖ − log‖K side‖", "s_Q·s_K",
            "validation loss", "less A's"]
    return "\n\n".join([
        f"The same network with what parts multipliers: *biases*, *rotary* embeddings, *grouped* queries (two heads "
        f"per key head), all three. {SHORT} steps at rate {RATE:g}, and {LONG:,} steps of the last; "
        f"{len(result['seeds'])} seeds, float32, {result['machine']}. A, B, C, stale as in the section above; "
        "*quotient* is C inside `go.quotient`, *balanced* with `rest=\"balanced\"`. Three coordinates of the stored "
        "weights, each the largest over heads, layers, steps and seeds: |log(s_Q/s_K)| of the multipliers, Eq. (3); "
        "the change of log s_Q, which the gauge reads; the change of log‖Q side‖ − log‖K side‖, which "
        "`rest=\"balanced\"` holds, where a side is multipliers and biases.",
        grid.table(head, rows),
        "Why there, under C. *Entries*: how far r·∂L/∂r of queries is from that of keys, entry by entry, relative to "
        "the latter (Euclidean over a key head and its query heads; the median over heads, layers and steps). *Sums*: "
        "the same of their sums over a head, with biases, which the gauge makes equal: plain gradient flow would not "
        "move the difference of the sides' squares. Adam divides entry by entry, so that unequal entries get steps "
        "whose sums differ. The last two columns have |log(s_Q/s_K)| by seed.",
        grid.table(["network", "entries", "sums", f"rate {RATE:g}", f"rate {FAST:g}"], why),
        _on_drift(cells), _on_losses(cells), _on_quotients(cells),
    ])


def _less_a(cells: dict[str, Cell], run: str, arm: str) -> np.ndarray:
    """Losses less A's, by seed."""
    return np.subtract(*(per_seed(cells, run, name, "loss") for name in (arm, "A")))


def _apart(gaps: np.ndarray) -> bool:
    """Whether the mean over seeds is further from zero than two standard deviations."""
    return bool(abs(gaps.mean()) > 2.0 * gaps.std(ddof=1))


def _on_drift(cells: dict[str, Cell]) -> str:
    """The paper's claims on the ratio of multipliers, and on their product."""
    ratio = {arm: most(cells, arm, "ratio") for arm in NETWORK_ARMS}
    drifting = [run for run, x in ratio["C"].items() if x >= 1e-3]
    every_step = [x for arm in ("B, every 1", "B, every 1, stale") for x in ratio[arm].values()]
    between = ratio["B, every 100"].values()
    grown = [
        np.mean(np.subtract(*(per_seed(cells, run, arm, "product") for arm in ("B, every 1", "A")))) for run in SHOWN
    ]
    by, cases = "|log(s_Q/s_K)|", "runs"
    return " ".join([
        report.paper("without control multipliers of queries and keys drift apart",
                     [run in drifting for run in SHOWN], f"{by} under C, 1e-3 or more", cases),
        f"The runs are: {', '.join(drifting) or 'none'}.",
        report.paper("a fix at every step leaves 3.5e-7", [x <= 1e-6 for x in every_step],
                     f"{by}, at most 1e-6", "runs, half of them with stale moments"),
        report.paper("so do fixes 100 steps apart", [x <= 1e-6 for x in between],
                     f"{by} between fixes, at most 1e-6", cases),
        f"Right after the last of these fixes it is {max(most(cells, 'B, every 100', 'ratio_end').values()):.1e} at "
        f"most, before it up to {max(between):.1e}.",
        report.paper("decay of 2e-3 hardly holds the drift back",
                     [ratio["A"][run] > 0.5 * ratio["C"][run] for run in drifting],
                     f"{by}, under A more than half of that under C", "runs that drift"),
        report.paper("without decay products grow further", [x > 0 for x in grown],
                     "the mean of s_Q·s_K at the end, under B above that under A", cases),
    ])


def _on_losses(cells: dict[str, Cell]) -> str:
    """The paper's claims on what fixing does to the loss."""
    gaps = {arm: {run: _less_a(cells, run, arm) for run in SHOWN} for arm in NETWORK_ARMS if arm != "A"}
    rarely, always = gaps["B, every 100"], gaps["B, every 1"]
    best = [x.mean() < min(0.0, y.mean()) and _apart(x) and _apart(x - y)
            for x, y in zip(rarely.values(), always.values(), strict=True)]
    far = {arm: [run for run, x in by_run.items() if _apart(x)] for arm, by_run in gaps.items()}
    named = [f"{arm} ({', '.join(runs)})" for arm, runs in far.items() if runs]
    by, cases = "validation loss, by two standard deviations of the gap", "runs"
    return " ".join([
        report.paper("fixes 100 steps apart have a lower loss than A and than fixes at every step", best, by, cases),
        report.paper("fixes at every step have a higher loss than A",
                     [x.mean() > 0.0 and _apart(x) for x in always.values()], by, cases),
        "Further from A's validation loss than two standard deviations of the gap: "
        f"{'; '.join(named) or 'no arm'}. The largest gap "
        f"of a mean is {max(abs(x.mean()) for by_run in gaps.values() for x in by_run.values()):.4f}.",
    ])


def _on_quotients(cells: dict[str, Cell]) -> str:
    """What `quotient` holds, in which coordinate."""
    ratio, free = (most(cells, arm, "ratio") for arm in ("quotient", "C"))
    further = sum(ratio[run] > free[run] for run in SHOWN)
    balanced = most(cells, "quotient, balanced", "ratio")
    parted = {biased: [balanced[run] for run, (name, _) in SHOWN.items() if ("bias" in NETWORKS[name]) == biased]
              for biased in (False, True)}
    rests = [per_seed(cells, run, arm, "loss") for run in SHOWN for arm in ("quotient", "quotient, balanced")]
    gap = max(float(np.abs(a - b).max()) for a, b in zip(rests[::2], rests[1::2], strict=True))
    from_c = max(float(np.abs(x - per_seed(cells, run, "C", "loss")).max())
                 for x, run in zip(rests[::2], SHOWN, strict=True))
    return (
        "`quotient` holds what its gauge reads: log s_Q changes by at most "
        f"{max(most(cells, 'quotient', 'anchor').values()):.1e}. By |log(s_Q/s_K)| it moves by "
        f"{report.span(list(ratio.values()), '.1e')}, further than C in {further} of {len(SHOWN)} runs: keys take all "
        'growth of the product. `rest="balanced"` holds log‖Q side‖ − log‖K side‖ to '
        f"{max(most(cells, 'quotient, balanced', 'sides').values()):.1e}. Without biases that is |log(s_Q/s_K)|, "
        f"which stays within {max(parted[False]):.1e}; with biases it is not, and reaches {max(parted[True]):.1e}. "
        f"Losses under both rests differ by {gap:.1e} at most, from C's by {from_c:.1e}: multipliers start at 1, which "
        "is their point on the slice."
    )


# Command line -------------------------------------------------------------------------------------------


def options(parser: argparse.ArgumentParser) -> None:
    """Beside those of every experiment."""
    parser.add_argument("--full", type=Path, nargs=2, metavar=("TRAIN", "VAL"), help="GPT-2 124M on these files")
    parser.add_argument("--networks", action="store_true", help="the networks whose multipliers drift, instead")
    parser.add_argument("--steps", type=int, help="default: 2,000, with --full 20,000")
    parser.add_argument("--sequences", type=int, default=12, help="of a micro-batch, with --full")
    parser.add_argument("--arms", nargs="+", choices=list(arms(1.0)), metavar="ARM", help=", ".join(arms(1.0)))
    parser.add_argument("--precisions", nargs="+", choices=PRECISIONS, default=list(PRECISIONS))


def networks_experiment() -> grid.Experiment:
    """`NETWORK_RUNS`."""
    cells = {cell_name(*run): functools.partial(network_cell, *run) for run in NETWORK_RUNS}
    settings = {"runs": [list(run) for run in NETWORK_RUNS], "networks": NETWORKS}
    return grid.Experiment("gaugefix_networks", settings, cells, networks_figure, networks_section)


def experiment(args: argparse.Namespace) -> grid.Experiment:
    """All arms in both precisions, or those asked for; with `--networks`, `NETWORK_RUNS`."""
    if args.networks:
        given = [f"--{name}" for name in ("full", "steps", "arms") if getattr(args, name)]
        if given:
            raise ValueError(f"--networks has its own runs, `NETWORK_RUNS`: leave {', '.join(given)} out")
        return networks_experiment()
    name = "gaugefix_lrm_full" if args.full else "gaugefix_lrm"
    if args.full:
        run = full(args.full, args.steps or 20_000, args.sequences, args.out / "checkpoints")
    else:
        run = small(args.steps or 2_000)
    settings = {"steps": run.steps, "rate": run.rate, "width": run.config.d_model, "layers": run.config.layers}
    settings |= run.settings
    cells = {
        f"{arm}, {dtype}": functools.partial(done, run, arm, dtype)
        for arm in args.arms or arms(run.rate)
        for dtype in args.precisions
    }
    return grid.Experiment(name, settings, cells, figure, section)


def main(argv: Sequence[str] | None = None) -> Result:
    """Runs it."""
    return grid.main(__doc__, experiment, argv, SEEDS, options)


if __name__ == "__main__":
    main()
