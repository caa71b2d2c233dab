"""A learning-rate sweep of AdamW and ddc_adamw on the demo's language model, and which piece of ddc_adamw does what.

    python -m examples.learning_rates               # an hour on one CPU core; killed, it goes on where it was
    python -m examples.learning_rates --full        # a wider model; wants an accelerator

A cell is one arm, peak rate and seed (initial weights and order of the data). The sweep comes first; then every
ablation, at the best rate of the arm it changes. Finished cells are kept in learning_rates.json and not trained
again; learning_rates.png is drawn at the end. Prints

    rate             adamw          ddc_adamw      ddc_adamw, radial_scale=4
    0.0003           1.943 ± 0.011  1.846 ± 0.007  1.832 ± 0.006
    0.0007           1.675 ± 0.017  1.613 ± 0.010  1.602 ± 0.010
    0.0017           1.512 ± 0.012  1.480 ± 0.012  1.474 ± 0.012
    0.004            1.439 ± 0.002  1.434 ± 0.011  1.421 ± 0.013
    0.01             1.431 ± 0.008  1.458 ± 0.010  1.447 ± 0.015
    best / adamw's   1.0000         1.0021         0.9928
    runs not finite  0 of 15        0 of 15        0 of 15
    at the floor     0 of 10,560    0 of 10,560    0 of 10,560
    stuck there      0 of 10,560    0 of 10,560    0 of 10,560

and the table of the ablations.
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
from tqdm import tqdm

import gauge_optax as go
from examples import data, study
from models import lm

matplotlib.use("Agg")
import matplotlib.pyplot as plt

Params = Any
Cell = dict[str, Any]
"""What one arm did at one rate from one seed, as the JSON has it."""
Result = dict[str, Any]
"""The JSON: a header, and `cells` by `key`."""
Build = Callable[[optax.ScalarOrSchedule, Sequence[Any]], optax.GradientTransformation]

RATES = (3e-4, 7e-4, 1.7e-3, 4e-3, 1e-2)
SEEDS = (42, 142, 242)
WARMUP = 20
DECAY = 0.1
FLOOR = 1e-2  # of the mean of its gauge's channels at the start: the library's floor of a joint scale
AT_FLOOR = 1.05  # floors; a channel no larger is at the floor
SETTINGS = ("steps", "every", "batch", "length", "held_out", "width", "layers")
FULL = {"width": 512, "layers": 6, "length": 256, "batch": 32}


def adamw(weight_decay: float = DECAY) -> Build:
    """The other side of every comparison."""
    return lambda rate, _: optax.adamw(rate, weight_decay=weight_decay)


def ddc(*kinds: str, weight_decay: float = DECAY, **options: Any) -> Build:
    """ddc_adamw, on the gauges of these kinds alone, or on all."""

    def build(rate: optax.ScalarOrSchedule, gauges: Sequence[Any]) -> optax.GradientTransformation:
        chosen = [gauge for gauge in gauges if not kinds or gauge.name in kinds]
        return go.ddc_adamw(rate, chosen, weight_decay=weight_decay, **options)

    return build


ARMS: dict[str, Build] = {
    "adamw": adamw(),
    "ddc_adamw": ddc(),
    "ddc_adamw, radial_scale=4": ddc(radial_scale=4.0),
}
ABLATIONS: dict[str, Build] = {
    'radial="log"': ddc(radial="log"),
    "radial_scale=0": ddc(radial_scale=0.0),
    'v_mode="per_head_scalar"': ddc(v_mode="per_head_scalar"),
    'v_mode="none"': ddc(v_mode="none"),
    "norm scales only": ddc("norm_scale"),
    "rescale only": ddc("rescale"),
    "rotations only": ddc("rope_torus", "head_rotation"),
    "logit shift only": ddc("logit_shift"),
    "no decay": ddc(weight_decay=0.0),
    "adamw, no decay": adamw(weight_decay=0.0),
}


def base_of(ablation: str) -> str:
    """The arm that an ablation changes."""
    return "adamw" if ablation.startswith("adamw") else "ddc_adamw"


# Training -----------------------------------------------------------------------------------------


class Lab(NamedTuple):
    """One arm, compiled once: the rate is an argument, so that no rate compiles anew."""

    init: Callable[[Params], Any]
    train: Callable[[Params, Any, np.ndarray, jax.Array], tuple[Params, Any, jax.Array]]


def lab(build: Build, loss: Callable[..., jax.Array], gauges: Sequence[Any], steps: int) -> Lab:
    """Initialisation, and a stretch of training on stacked batches."""
    shape = optax.warmup_cosine_decay_schedule(0.1, 1.0, warmup_steps=min(WARMUP, steps // 2), decay_steps=steps)

    def optimizer(rate: float | jax.Array) -> optax.GradientTransformation:
        return build(lambda n: rate * shape(n), gauges)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def train(params: Params, state: Any, batches: jax.Array, rate: jax.Array) -> tuple[Params, Any, jax.Array]:
        tx = optimizer(rate)

        def step(carry: tuple[Params, Any], tokens: jax.Array) -> tuple[tuple[Params, Any], jax.Array]:
            params, state = carry
            value, grads = jax.value_and_grad(loss)(params, tokens)
            updates, state = tx.update(grads, state, params)
            return (optax.apply_updates(params, updates), state), value

        (params, state), losses = jax.lax.scan(step, (params, state), batches)
        return params, state, losses

    return Lab(jax.jit(optimizer(1.0).init), train)


def joint_scales(gauges: Sequence[Any]) -> Callable[[Params], dict[str, jax.Array]]:
    """Compiled: the joint scale s = ρ_up^p·ρ_down of every channel with two sides, by its instance's first leaf.

    s depends on the function alone, so that AdamW's channels are held against the same floor.
    """
    group = go.product(gauges)

    def scales(params: Params) -> dict[str, jax.Array]:
        bound = group.bound(params)
        framed = bound.values(group.act(group.balance(params), params))
        squares = {path: jnp.square(x) for path, x in framed.items()}
        found = {}
        for instance in bound.system.instances:
            up, down = instance.norms(instance.sides(squares))
            if instance.down:
                found[instance.paths[0]] = up**instance.degree * down
        return found

    return jax.jit(scales)


class Bench:
    """Model, data and measurements that all cells share."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.config = lm.llama_config(
            vocab=data.VOCAB, d_model=args.width, layers=args.layers, heads=4, kv_heads=2,
            d_head=args.width // 4, d_ff=3 * args.width, max_len=args.length,
        )  # fmt: skip
        _, self.loss = lm.params_and_loss(self.config, jax.random.key(0))
        self.gauges = lm.gauges(self.config)
        self.scales = joint_scales(self.gauges)
        # The same held-out text for every seed, and more of it than in the demo: arms differ by parts of a percent.
        self.held_out = data.batches(args.length, args.held_out * args.batch, args.data)[1]
        self.evaluate = jax.jit(self.loss)

    @functools.cache  # noqa: B019 - one bench lives as long as the program
    def lab(self, arm: str) -> Lab:
        """The compiled arm."""
        return lab((ARMS | ABLATIONS)[arm], self.loss, self.gauges, self.args.steps)

    def scales_of(self, params: Params) -> dict[str, np.ndarray]:
        """Joint scales on the host: the weights they came from will be donated."""
        return {path: np.asarray(s) for path, s in self.scales(params).items()}


def train_cell(bench: Bench, arm: str, rate: float, seed: int) -> Cell:
    """Train once, looking at losses and channels every `--every` steps."""
    args, began = bench.args, time.monotonic()
    train = data.batches(args.length, args.batch, args.data, seed)[0]
    params, _ = lm.params_and_loss(bench.config, jax.random.key(seed))
    init, stretch = bench.lab(arm)
    state, looks, losses = init(params), [bench.scales_of(params)], []
    for start in range(0, args.steps, args.every):
        batches = np.stack([train[n] for n in range(start, min(start + args.every, args.steps))])
        params, state, values = stretch(params, state, batches, jnp.float32(rate))
        losses.append(np.asarray(values))
        looks.append(bench.scales_of(params))
    every = np.concatenate(losses)
    finite = np.isfinite(every).all() and all(bool(jnp.isfinite(x).all()) for x in jax.tree.leaves(params))
    return {
        "validation": float(np.mean([bench.evaluate(params, x) for x in bench.held_out])),
        "training": [round(float(x.mean()), 4) for x in losses],
        "worst": float(every.max()),
        "finite": bool(finite),
        **channel_report(looks),
        "seconds": round(time.monotonic() - began, 1),
    }


def channel_report(looks: Sequence[dict[str, np.ndarray]]) -> Cell:
    """How many channels stand at the floor of their joint scale, or below it.

    Args:
      looks: joint scales by leaf, at the start and at every check.

    Returns:
      `channels`, all of them; `at_floor`, how many are there at each check; `stuck`, by leaf, those that were there
      at every check of the last quarter of the run; `least`, the smallest scale at the end, in floors.
    """
    floors = {path: FLOOR * s.mean() for path, s in looks[0].items()}
    low = [{path: ~(s > AT_FLOOR * floors[path]) for path, s in look.items()} for look in looks[1:]]  # NaN is low
    last = low[-max(1, len(low) // 4) :]
    stuck = {path: int(np.logical_and.reduce([look[path] for look in last]).sum()) for path in floors}
    return {
        "channels": sum(s.size for s in looks[0].values()),
        "at_floor": [int(sum(x.sum() for x in look.values())) for look in low],
        "stuck": {path: count for path, count in stuck.items() if count},
        "least": float(f"{min(float((s / floors[path]).min()) for path, s in looks[-1].items()):.3g}"),
    }


# Results ------------------------------------------------------------------------------------------


def key(arm: str, rate: float, seed: int) -> str:
    """A cell's name in the JSON."""
    return f"{arm} | {rate:g} | {seed}"


def validation(result: Result, arm: str) -> dict[float, dict[int, float]]:
    """Rate → seed → validation loss, rates and seeds ascending."""
    keys = [(own, float(rate), int(seed)) for own, rate, seed in (name.split(" | ") for name in result["cells"])]
    found: dict[float, dict[int, float]] = {}
    for _, rate, seed in sorted(k for k in keys if k[0] == arm):
        found.setdefault(rate, {})[seed] = result["cells"][key(arm, rate, seed)]["validation"]
    return found


def best(result: Result, arm: str) -> tuple[float, float]:
    """Least validation loss, mean over seeds, and the rate that has it."""
    means = {rate: float(np.mean(list(seeds.values()))) for rate, seeds in validation(result, arm).items()}
    return min((loss, rate) for rate, loss in means.items() if np.isfinite(loss))


def changes(result: Result, ablation: str) -> tuple[float, list[float]]:
    """The rate of an ablation, and by how many percent it is above the arm that it changes, seed by seed."""
    [(rate, losses)] = validation(result, ablation).items()
    base = validation(result, base_of(ablation))[rate]
    return rate, [100 * (loss / base[seed] - 1) for seed, loss in losses.items()]


def table(result: Result) -> str:
    """Validation loss by rate, mean and standard deviation over seeds; the best of every arm, and its channels."""
    losses = {arm: validation(result, arm) for arm in ARMS}
    rows = [["rate", *ARMS]]
    for rate in losses["adamw"]:
        seeds = [list(losses[arm][rate].values()) for arm in ARMS]
        rows.append([f"{rate:g}", *(f"{np.mean(x):.3f} ± {np.std(x):.3f}" for x in seeds)])
    cells = {arm: [cell for name, cell in result["cells"].items() if name.split(" | ")[0] == arm] for arm in ARMS}
    rows += [
        ["best / adamw's", *(f"{best(result, arm)[0] / best(result, 'adamw')[0]:.4f}" for arm in ARMS)],
        ["runs not finite", *(f"{sum(not c['finite'] for c in cells[arm])} of {len(cells[arm])}" for arm in ARMS)],
        ["at the floor", *(_share(cells[arm], lambda c: c["at_floor"][-1]) for arm in ARMS)],
        ["stuck there", *(_share(cells[arm], lambda c: sum(c["stuck"].values())) for arm in ARMS)],
    ]
    return _columns(rows)


def _share(cells: Sequence[Cell], count: Callable[[Cell], int]) -> str:
    return f"{sum(map(count, cells)):,} of {sum(cell['channels'] for cell in cells):,}"


def ablation_table(result: Result) -> str:
    """What every ablation does to the validation loss, at the best rate of the arm that it changes."""
    rows = [["ablation", "rate", "change, seed by seed"]]
    for arm in _ablated(result):
        rate, percent = changes(result, arm)
        rows.append([arm, f"{rate:g}", "  ".join(f"{x:+.2f} %" for x in percent)])
    return _columns(rows)


def section(result: Result) -> str:
    """Both tables, and what they say."""
    c, seeds = result["settings"], next(iter(validation(result, "adamw").values()))
    ours, theirs = best(result, "ddc_adamw"), best(result, "adamw")
    return "\n\n".join(
        [
            f"The demo's model (d = {c['width']}, {c['layers']} layers), {c['steps']:,} steps of {c['batch']} × "
            f"{c['length']} bytes, {WARMUP} steps of warm-up, cosine to zero, decay {DECAY}. Validation loss in nats "
            f"per byte, mean ± standard deviation over seeds {', '.join(map(str, seeds))}; float32, "
            f"{result['machine']}. The floor is {FLOOR:g} of the mean joint scale of a gauge's channels at the start; "
            f"stuck is a channel that was there at every look in the last quarter of a run.",
            f"```\n{table(result)}\n```",
            f"The best of ddc_adamw, at {ours[1]:g}, is {100 * (ours[0] / theirs[0] - 1):+.2f} % from AdamW's best, at "
            f"{theirs[1]:g}. What a change does to the validation loss, at the best rate of the arm that it changes "
            f"(less is better):",
            f"```\n{ablation_table(result)}\n```",
        ]
    )


def _ablated(result: Result) -> list[str]:
    return [arm for arm in ABLATIONS if validation(result, arm)]


def _columns(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) + 2 for column in zip(*rows, strict=True)]
    return "\n".join("".join(x.ljust(w) for x, w in zip(row, widths, strict=True)).rstrip() for row in rows)


def figure(result: Result, path: Path) -> None:
    """Validation loss against the rate, and what every ablation does to it."""
    fig, (curves, bars) = plt.subplots(1, 2, figsize=(13, 4.8), layout="constrained", width_ratios=(1.2, 1))
    for arm, color in zip(ARMS, ("tab:red", "tab:blue", "tab:cyan"), strict=True):
        losses = validation(result, arm)
        values = np.array([list(seeds.values()) for seeds in losses.values()])
        curves.semilogx(list(losses), values.mean(1), ".-", color=color, label=arm)
        curves.fill_between(list(losses), values.min(1), values.max(1), color=color, alpha=0.2, lw=0)
    curves.set(title="Validation loss by peak rate", xlabel="peak learning rate", ylabel="nats per byte")
    curves.set_xticks(list(losses), [f"{rate:g}" for rate in losses])
    curves.set_xticks([], minor=True)
    curves.grid(alpha=0.3)
    curves.legend(title="mean; shaded: least to largest of the seeds")
    ablations = _ablated(result)
    for row, arm in enumerate(ablations):
        _, percent = changes(result, arm)
        bars.barh(row, np.mean(percent), color="tab:red" if base_of(arm) == "adamw" else "tab:blue", alpha=0.5)
        bars.plot(percent, [row] * len(percent), "k.", ms=4)
    bars.set_yticks(range(len(ablations)), ablations)
    bars.invert_yaxis()
    bars.axvline(0, color="black", lw=0.8)
    bars.set(title="Changes at the best rate", xlabel="change of the validation loss, %  (points: seeds)")
    bars.grid(alpha=0.3, axis="x")
    fig.savefig(path, dpi=120)
    plt.close(fig)


# Command line -------------------------------------------------------------------------------------


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Command line; the defaults are the committed sweep."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, help="text to train on; default: the standard library's sources")
    parser.add_argument("--out", type=Path, default=Path("outputs/learning_rates"))
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--every", type=int, default=100, help="steps between two looks at the channels")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--held-out", type=int, default=8, help="validate on 8 batches this many times as large")
    parser.add_argument("--width", type=int, default=64, help="d_model")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--rates", type=float, nargs="+", default=RATES)
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    parser.add_argument("--ablations", nargs="*", choices=ABLATIONS, default=tuple(ABLATIONS))
    parser.add_argument("--full", action="store_true", help="a wider model: " + str(FULL))
    args = parser.parse_args(argv)
    if args.full:
        vars(args).update(FULL)
    return args


def header(args: argparse.Namespace) -> Result:
    """What must agree before two cells may stand in one table."""
    settings = {name: getattr(args, name) for name in SETTINGS} | {"data": args.data and args.data.name}
    versions = {"jax": jax.__version__, "optax": optax.__version__}
    return {"study": "learning_rates", "settings": settings, "machine": study.machine(), "versions": versions}


def train_cells(bench: Bench, path: Path, result: Result, cells: Sequence[tuple[str, float, int]]) -> None:
    """Train those cells that `result` does not have yet, saving each."""
    missing = [cell for cell in cells if key(*cell) not in result["cells"]]
    for arm, rate, seed in tqdm(missing, unit="run"):
        cell = train_cell(bench, arm, rate, seed)
        result["cells"][key(arm, rate, seed)] = cell
        study.write(path, result)
        tqdm.write(f"{key(arm, rate, seed)}: validation {cell['validation']:.4f}, stuck {sum(cell['stuck'].values())}")


# Elsewhere than on a CPU the default is shorter floats in matrix products.
@jax.default_matmul_precision("highest")
def main(argv: Sequence[str] | None = None) -> Result:
    """Run what is missing, print the tables, write JSON and figure."""
    args = parse(argv)
    path = args.out / "learning_rates.json"
    result, bench = study.load(path, header(args)), Bench(args)
    sweep = [(arm, rate, seed) for seed in args.seeds for rate in args.rates for arm in ARMS]
    train_cells(bench, path, result, sweep)
    print(table(result))
    rates = {arm: best(result, base_of(arm))[1] for arm in args.ablations}
    ablations = [(arm, rates[arm], seed) for seed in args.seeds for arm in args.ablations]
    train_cells(bench, path, result, ablations)
    print(ablation_table(result))
    figure(result, path.with_suffix(".png"))
    print(f"wrote {path} and {path.with_suffix('.png')}")
    return result


if __name__ == "__main__":
    main()
