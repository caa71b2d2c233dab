"""Fine-tuning with LoRA: which optimizer, from which start, at which rank, at which rate?

    python -m examples.lora --out examples/results        # about two hours on one CPU core; killed, it goes on
    python -m examples.lora --ranks 2 --steps 50 --arms adamw quotient_adamw            # to try it
    python -m examples.lora --out examples/results --plan           # what is missing, without training

A Llama of 2 layers is trained on the standard library's sources, then frozen; adapters on all its attention and MLP
kernels learn the prose of the interpreter's own reference. Every start is the same function, the pretrained one: the
kernels give back what the product of the factors adds. "B = 0" is the usual one; "balanced" has orthonormal factors of
one size; "badly scaled" is balanced moved by a matrix of condition 100, B larger than A by 100: the same product in
other coordinates, so that a rule that does not notice coordinates trains both alike. The adapters' product is added as
it is (alpha = rank). Decay of 0.1 on the product is split: half of it on each factor.

A cell is a rank, start, arm, peak rate and seed (factors and order of the data). Losses are validation losses in nats
per byte, mean ± standard deviation over seeds.
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
from examples.lora_rules import lora_muon, lora_rite
from examples.sweep import RATIO, Cell, Result, Sweep, best, fill, key, markdown, trained
from models import lm

matplotlib.use("Agg")
import matplotlib.pyplot as plt

Params = Any
Group = tuple[int, str, str]
"""Rank, start, arm: one sweep."""
Schedule = Callable[[Any], Any]

WIDTH, BATCH, LENGTH, HELD_OUT = 64, 8, 64, 8  # validation is on 8 batches 8 times as large
PRETRAINING, STEPS, WARMUP = 600, 200, 10
RANKS, SEEDS = (2, 8, 32), (42, 142, 242)
STARTS = ("B = 0", "balanced", "badly scaled")
DECAY, SIZE, LORA_PLUS = 0.1, 0.3, 16.0  # of the product; singular values of a balanced start's; LoRA+'s λ


# Arms ---------------------------------------------------------------------------------------------


class Arm(NamedTuple):
    """An optimizer of adapters, its sweep's first rate, a colour."""

    first: float
    color: str
    build: Callable[[Schedule, Sequence[go.Gauge]], optax.GradientTransformation]


def lora_plus(rate: Schedule, _: Any) -> optax.GradientTransformation:
    """AdamW whose rate for B is 16 times A's (Hayou et al. 2024)."""
    rates = {"lora_a": rate, "lora_b": lambda n: LORA_PLUS * rate(n)}
    label = functools.partial(jax.tree_util.tree_map_with_path, lambda path, _: path[-1].key)
    return optax.partition({name: adamw(schedule) for name, schedule in rates.items()}, label)


def decayed(inner: Callable[[Schedule], optax.GradientTransformation]) -> Callable[..., Any]:
    """A rule with decoupled decay after it."""

    def build(rate: Schedule, _: Any) -> optax.GradientTransformation:
        decay = optax.chain(optax.add_decayed_weights(DECAY / 2), optax.scale_by_learning_rate(rate))
        return _sum(inner(rate), decay)

    return build


def _sum(one: optax.GradientTransformation, decay: optax.GradientTransformation) -> optax.GradientTransformation:
    def update(grads: Any, state: Any, params: Any = None) -> Any:
        steps, inner_state = one.update(grads, state[0], params)
        more, kept = decay.update(jax.tree.map(jnp.zeros_like, grads), state[1], params)
        return jax.tree.map(jnp.add, steps, more), (inner_state, kept)

    return optax.GradientTransformation(lambda params: (one.init(params), decay.init(params)), update)


adamw = functools.partial(optax.adamw, weight_decay=DECAY / 2)

ARMS = {
    "adamw": Arm(2.5e-3, "tab:red", lambda rate, _: adamw(rate)),
    "lora_plus": Arm(6e-4, "tab:orange", lora_plus),
    "lora_rite": Arm(2.5e-2, "tab:olive", decayed(lora_rite)),
    "lora_muon": Arm(2.5e-2, "tab:brown", decayed(lora_muon)),
    "quotient_adamw": Arm(2.5e-3, "tab:blue", lambda rate, g: go.quotient_adamw(rate, g, weight_decay=DECAY / 2)),
    "quotient_muon": Arm(4e-3, "tab:purple", lambda rate, g: go.quotient_muon(rate, g, weight_decay=DECAY / 2)),
    "quotient_muon-none": Arm(
        1e-2, "tab:pink", lambda rate, g: go.quotient_muon(rate, g, weight_decay=DECAY / 2, scale="none")
    ),
}


# The model ----------------------------------------------------------------------------------------


def model() -> lm.LMConfig:
    """Heads of 16."""
    sizes = dict(vocab=data.VOCAB, d_model=WIDTH, layers=2, heads=WIDTH // 16, kv_heads=WIDTH // 16, d_head=16)
    return lm.llama_config(**sizes, d_ff=3 * WIDTH, max_len=LENGTH)


@functools.cache
def pretrained(steps: int) -> Params:
    """The weights that all cells begin with."""
    params, loss = lm.params_and_loss(model(), jax.random.key(0))
    rate = optax.warmup_cosine_decay_schedule(3e-4, 3e-3, warmup_steps=min(20, steps // 2), decay_steps=steps)
    tx = optax.adamw(rate, weight_decay=0.1)
    train = data.batches(LENGTH, 2 * BATCH)[0]

    @jax.jit
    def step(carry: Any, tokens: jax.Array) -> Any:
        params, state = carry
        updates, state = tx.update(jax.grad(loss)(params, tokens), state, params)
        return optax.apply_updates(params, updates), state

    carry = (params, tx.init(params))
    for n in range(steps):
        carry = step(carry, train[n])
    return carry[0]


def is_adapted(path: str) -> bool:
    """Whether a leaf gets an adapter."""
    return path.startswith("blocks/") and path.endswith("/kernel")


def kernels(params: Params) -> dict[str, jax.Array]:
    """The adapted kernels by path, as matrices (in, out)."""
    leaves = {jax.tree_util.keystr(p, simple=True, separator="/"): x for p, x in jax.tree.leaves_with_path(params)}
    rows = {path: -1 if path.endswith("out/kernel") else len(x) for path, x in leaves.items() if is_adapted(path)}
    return {path: leaves[path].reshape(n, -1) if n > 0 else leaves[path].reshape(-1, WIDTH) for path, n in rows.items()}


def adapters(base: Params, rank: int, start: str, seed: int) -> Params:
    """Factors of every adapted kernel: {path: {"lora_a": (in, rank), "lora_b": (rank, out)}}."""
    draw, move = (np.random.default_rng([seed, rank, *which]) for which in ((), (1,)))

    def one(kernel: jax.Array) -> dict[str, jax.Array]:
        rows, columns = kernel.shape
        a, b = draw.standard_normal((rows, rank)) / np.sqrt(rows), np.zeros((rank, columns))
        if start != "B = 0":
            size = np.sqrt(SIZE)
            a, b = (np.linalg.qr(draw.standard_normal((n, rank)))[0] * size for n in (rows, columns))
            b = b.T
        if start == "badly scaled":
            left, right = (np.linalg.qr(move.standard_normal((rank, rank)))[0] for _ in range(2))
            s = left @ np.diag(np.logspace(-1, 1, rank)) @ right / 10
            a, b = a @ s, np.linalg.solve(s, b)
        return {"lora_a": jnp.asarray(a, jnp.float32), "lora_b": jnp.asarray(b, jnp.float32)}

    return {path: one(kernel) for path, kernel in kernels(base).items()}


def adapted(base: Params, start: Params, factors: Params) -> Params:
    """The model's weights: kernels plus what the product has become."""

    def one(path: Any, x: jax.Array) -> jax.Array:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        if name not in factors:
            return x
        now, then = (p[name]["lora_a"] @ p[name]["lora_b"] for p in (factors, start))
        return x + (now - then).reshape(x.shape)

    return jax.tree_util.tree_map_with_path(one, base)


# Training -----------------------------------------------------------------------------------------


@functools.cache
def batches(steps: int, seed: int) -> np.ndarray:
    """All batches of a run, stacked."""
    train = data.batches(LENGTH, BATCH, seed=seed, tokens=data.read_prose())[0]
    return np.stack([train[n] for n in range(steps)])


@functools.cache
def held_out() -> np.ndarray:
    """The same for every cell."""
    return np.stack(data.batches(LENGTH, 2 * HELD_OUT, tokens=data.read_prose())[1])


@functools.cache
def program(arm: str, rank: int, steps: int, pretraining: int) -> Callable[..., tuple[jax.Array, jax.Array]]:
    """Compiled once: (factors, batches, held-out batches, rate) → training losses, validation loss."""
    base, (_, loss) = pretrained(pretraining), lm.params_and_loss(model(), jax.random.key(0))
    shape = optax.warmup_cosine_decay_schedule(0.1, 1.0, warmup_steps=min(WARMUP, steps // 2), decay_steps=steps)
    example = adapters(base, rank, STARTS[0], 0)
    gauges = go.lora(example)

    def run(start: Params, batches: jax.Array, held_out: jax.Array, rate: jax.Array) -> tuple[jax.Array, jax.Array]:
        tx = ARMS[arm].build(lambda n: rate * shape(n), gauges)

        def of(factors: Params, tokens: jax.Array) -> jax.Array:
            return loss(adapted(base, start, factors), tokens)

        return trained(tx, of, start, batches, held_out)

    tx = ARMS[arm].build(lambda n: ARMS[arm].first * shape(n), gauges)
    grads = jax.grad(lambda factors: loss(adapted(base, example, factors), held_out()[0]))(example)
    go.check(tx, tx.init(example), example, grads)
    return jax.jit(run).lower(example, batches(steps, SEEDS[0]), held_out(), jnp.float32(0)).compile()


def train_cell(cell: Cell, steps: int, pretraining: int) -> dict[str, Any]:
    """Train once: losses, None where they are not finite; seconds of the CPU without compiling."""
    rank, start, arm, rate, seed = cell
    run = program(arm, rank, steps, pretraining)
    inputs = adapters(pretrained(pretraining), rank, start, seed), batches(steps, seed), held_out()
    computed = time.process_time()
    losses, validation = jax.device_get(run(*inputs, jnp.float32(rate)))
    finite = bool(np.isfinite(losses).all() and np.isfinite(validation))
    return {
        "validation": float(validation) if finite else None,
        "training": float(losses[-50:].mean()) if finite else None,
        "finite": finite,
        "cpu_seconds": round(time.process_time() - computed, 1),
    }


# Results ------------------------------------------------------------------------------------------


def swept(group: Group) -> Sweep:
    """The sweep of a group."""
    return Sweep(group, ARMS[group[2]].first)


def groups(result: Result) -> list[Group]:
    """The sweeps that have a finished rate."""
    chosen = [(rank, start, arm) for rank in RANKS for start in STARTS for arm in ARMS]
    return [group for group in chosen if swept(group).losses(result)]


def table(result: Result) -> str:
    """Markdown: a row per rank and arm, a column per start: loss at the best rate."""
    lines = [["rank", "arm", *STARTS, "CPU s"]]
    done = groups(result)
    for rank, arm in dict.fromkeys((rank, arm) for rank, _, arm in done):
        cells, seconds = [], []
        for start in STARTS:
            losses = swept((rank, start, arm)).losses(result)
            if not losses:
                cells.append("")
                continue
            at = best(losses)
            cells.append(f"{np.mean(losses[at]):.4f} ± {np.std(losses[at]):.4f} at {at:g}")
            runs = [result["cells"][key((rank, start, arm, rate, s))] for rate in losses for s in result["seeds"]]
            seconds += [cell["cpu_seconds"] for cell in runs]
        lines.append([str(rank), arm, *cells, f"{np.median(seconds):.1f}"])
    return markdown(lines)


def transfer(result: Result) -> str:
    """Markdown: what one rate for all ranks and starts costs beside the best of each."""
    lines = [["arm", "one rate for all", "mean excess", "largest excess", "rates of the sweeps' best"]]
    done = groups(result)
    for arm in dict.fromkeys(arm for _, _, arm in done):
        sweeps = [swept(group).losses(result) for group in done if group[2] == arm]
        means = [{rate: float(np.mean(x)) for rate, x in losses.items()} for losses in sweeps]
        shared = set.intersection(*map(set, means))
        excess = {r: [100 * (mean[r] / min(mean.values()) - 1) for mean in means] for r in shared}
        if not excess:
            continue
        at = min(excess, key=lambda rate: float(np.mean(excess[rate])))
        rates = sorted(best(losses) for losses in sweeps)
        lines.append([
            arm, f"{at:g}", f"{np.mean(excess[at]):.1f} %", f"{np.max(excess[at]):.1f} %",
            f"{rates[0]:g}" if rates[0] == rates[-1] else f"{rates[0]:g} to {rates[-1]:g}",
        ])
    return markdown(lines)


def section(result: Result) -> str:
    """Its part of the page of all results."""
    settings = result["settings"]
    about = (
        f"A Llama of 2 layers (d = {WIDTH}), {settings['pretraining']} steps on Python sources, then frozen; "
        f"adapters on its 14 kernels learn English prose in {settings['steps']} steps. {len(result['seeds'])} seeds, "
        f"{result['machine']}; validation loss before: {result['before']:.4f}. Loss at each sweep's best rate; rates "
        f"are a factor of {RATIO} apart."
    )
    return f"{about}\n\n{table(result)}\n\nOne rate for every rank and start:\n\n{transfer(result)}"


def figure(result: Result, path: Path) -> None:
    """Validation loss by rate: a row per start, a column per rank, a line per arm."""
    done = groups(result)
    rows, columns = ([x for x in axis_values if any(x in g for g in done)] for axis_values in (STARTS, RANKS))
    fig, axes = plt.subplots(
        len(rows), len(columns), figsize=(4.4 * len(columns), 3.2 * len(rows)), layout="constrained", squeeze=False,
        sharex=True, sharey=True,
    )
    for rank, start, arm in done:
        losses = swept((rank, start, arm)).losses(result)
        axis, values = axes[rows.index(start), columns.index(rank)], np.array(list(losses.values()))
        axis.plot(list(losses), values.mean(1), ".-", color=ARMS[arm].color, label=arm)
        axis.fill_between(list(losses), values.min(1), values.max(1), color=ARMS[arm].color, alpha=0.2, lw=0)
        axis.set(title=f"rank {rank}, {start}", xlabel="peak learning rate", ylabel="nats per byte", xscale="log")
        axis.grid(alpha=0.3)
    least = min(float(np.mean(x)) for group in done for x in swept(group).losses(result).values())
    axes[0, 0].set_ylim(least - 0.02, result["before"])
    axes[0, 0].legend(fontsize=8)
    fig.savefig(path, dpi=100)
    plt.close(fig)


# Command line -------------------------------------------------------------------------------------


# Elsewhere than on a CPU the default is shorter floats in matrix products.
@jax.default_matmul_precision("highest")
def main(argv: Sequence[str] | None = None) -> Result:
    """Run what is missing, print the tables, write JSON and figure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=cli.Help)
    parser.add_argument("--out", type=Path, default=Path("outputs/lora"), help="JSON and PNG")
    parser.add_argument("--ranks", type=int, nargs="+", choices=RANKS, default=list(RANKS))
    parser.add_argument("--starts", nargs="+", choices=STARTS, default=list(STARTS))
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS))
    parser.add_argument("--steps", type=int, default=STEPS, help="of fine-tuning")
    parser.add_argument("--pretraining", type=int, default=PRETRAINING, help="steps before")
    parser.add_argument("--plan", action="store_true", help="print what is missing, and the tables of what is not")
    args = parser.parse_args(argv)
    chosen: list[Group] = [(rank, start, arm) for rank in args.ranks for start in args.starts for arm in args.arms]
    path, settings = args.out / "lora.json", {"steps": args.steps, "pretraining": args.pretraining, "batch": BATCH}
    head = {"study": "lora", "settings": settings, "seeds": args.seeds, "machine": study.machine()}
    result = study.load(path, head | {"versions": {"jax": jax.__version__, "optax": optax.__version__}})
    if args.plan:
        for group in chosen:
            print(f"{' | '.join(map(str, group))}: {len(swept(group).missing(result)) or 'nothing'} missing")
    else:
        if "before" not in result:
            result["before"] = float(before(args.pretraining))
            study.write(path, result)
        sweeps = [swept(group) for group in chosen]
        result = fill(path, result, sweeps, lambda cell: train_cell(cell, args.steps, args.pretraining))
        figure(result, path.with_suffix(".png"))
        print(f"wrote {path} and {path.with_suffix('.png')}")
    print(f"{table(result)}\n\n{transfer(result)}")
    return result


def before(pretraining: int) -> jax.Array:
    """The pretrained model's validation loss on the prose."""
    loss = lm.params_and_loss(model(), jax.random.key(0))[1]
    return jax.jit(lambda p, x: jax.lax.map(functools.partial(loss, p), x).mean())(pretrained(pretraining), held_out())


if __name__ == "__main__":
    main()
