"""Fine-tuning with LoRA: which optimizer, from which start, at which rank, at which rate?

    python -m examples.lora --out examples/results        # about two hours on one CPU core; killed, it goes on
    python -m examples.lora --steps 50 --only before "2 | * | adamw | *" "2 | * | quotient_adamw | *"   # to try it
    python -m examples.lora --out examples/results --show           # the tables, without training

A Llama of 2 layers is trained on the standard library's sources, then frozen. Adapters on all its attention and MLP
kernels then learn the English text of Python's reference. There are three starts for the factors A and B. "B = 0" is
the usual one. "balanced" has orthonormal factors of one size. "badly scaled" is the balanced start, moved by a matrix
of condition 100 that makes B about 100 times as large as A. It has the same product A·B, so that a rule that depends on
the product alone trains both starts alike. With every start, training begins at the pretrained function, because the
initial product is subtracted from the kernels. The product is added without a factor (alpha = rank). A weight decay of
0.1 on the product is split into halves for A and B.

An *arm* is an optimizer. A *cell* is one run: a rank, start, arm, peak rate and seed (of the factors and of the order
of the data). Losses are validation losses in nats per byte, mean ± standard deviation over seeds.
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

import gauge_optax as go
from examples.lora_rules import lora_muon, lora_rite
from examples.studies import harness, report
from examples.studies.harness import RATIO, SEEDS, Group, Result, Run, Schedule, Sweep, best, key
from examples.studies.starts import BATCH, batches, held_out, model
from models import lm

Params = Any
WIDTH, HELD_OUT = 64, 8  # d_model; validation is on 8 batches, which are twice as large as those of training
WARMUP = 10
RANKS = (2, 8, 32)
STARTS = ("B = 0", "balanced", "badly scaled")
# Weight decay of the product A·B; the singular values of the product in a balanced start; LoRA+'s λ.
DECAY, SIZE, LORA_PLUS = 0.1, 0.3, 16.0


# Arms ---------------------------------------------------------------------------------------------


class Arm(NamedTuple):
    """An optimizer of adapters (`build`), the first learning rate of its sweep, and its colour in figures."""

    first: float
    color: str
    build: Callable[[Schedule, Sequence[go.Gauge]], optax.GradientTransformation]


def lora_plus(rate: Schedule, _: Any) -> optax.GradientTransformation:
    """AdamW whose learning rate for B is 16 times that for A (LoRA+, Hayou et al. 2024)."""
    rates = {"lora_a": rate, "lora_b": lambda n: LORA_PLUS * rate(n)}
    label = functools.partial(jax.tree_util.tree_map_with_path, lambda path, _: path[-1].key)
    return optax.partition({name: adamw(schedule) for name, schedule in rates.items()}, label)


def decayed(inner: Callable[[Schedule], optax.GradientTransformation]) -> Callable[..., Any]:
    """Adds decoupled weight decay to a rule. The steps of both are summed."""

    def build(rate: Schedule, _: Any) -> optax.GradientTransformation:
        rule, decay = inner(rate), optax.chain(
            optax.add_decayed_weights(DECAY / 2), optax.scale_by_learning_rate(rate))

        def update(grads: Any, state: Any, params: Any = None) -> Any:
            steps, first = rule.update(grads, state[0], params)
            more, second = decay.update(optax.tree.zeros_like(grads), state[1], params)
            return optax.tree.add(steps, more), (first, second)

        return optax.GradientTransformation(lambda params: (rule.init(params), decay.init(params)), update)

    return build


adamw = functools.partial(optax.adamw, weight_decay=DECAY / 2)

ARMS = {
    "adamw": Arm(2.5e-3, "tab:red", lambda rate, _: adamw(rate)),
    "lora_plus": Arm(6e-4, "tab:orange", lora_plus),
    "lora_rite": Arm(2.5e-2, "tab:olive", decayed(lora_rite)),
    "lora_muon": Arm(2.5e-2, "tab:brown", decayed(lora_muon)),
    "quotient_adamw": Arm(2.5e-3, "tab:blue", lambda rate, g: go.quotient_adamw(rate, g, weight_decay=DECAY / 2)),
    "quotient_muon": Arm(4e-3, "tab:purple", lambda rate, g: go.quotient_muon(rate, g, weight_decay=DECAY / 2)),
    "quotient_muon-none": Arm(
        1e-2, "tab:pink", lambda rate, g: go.quotient_muon(rate, g, weight_decay=DECAY / 2, scale="none")),
}


# The model ----------------------------------------------------------------------------------------


@functools.cache
def pretrained(steps: int) -> Params:
    """The pretrained weights, with which all cells begin."""
    params, loss = lm.params_and_loss(model(WIDTH), jax.random.key(0))
    rate = optax.warmup_cosine_decay_schedule(3e-4, 3e-3, warmup_steps=min(20, steps // 2), decay_steps=steps)
    tx = optax.adamw(rate, weight_decay=0.1)
    return jax.jit(lambda *inputs: harness.scanned(tx, loss, *inputs)[0])(params, batches(steps, 0, 2 * BATCH))


def named(path: Any) -> str:
    """The path of a leaf, with its keys joined by "/"."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def kernels(params: Params) -> dict[str, jax.Array]:
    """Path → kernel as a matrix (in, out), for all kernels that have adapters."""
    leaves = {named(path): x for path, x in jax.tree.leaves_with_path(params)}
    return {path: x.reshape(-1, WIDTH) if path.endswith("out/kernel") else x.reshape(len(x), -1)
            for path, x in leaves.items() if path.startswith("blocks/") and path.endswith("/kernel")}


def adapters(base: Params, rank: int, start: str, seed: int) -> Params:
    """Draws the factors of every adapted kernel: {path: {"lora_a": (in, rank), "lora_b": (rank, out)}}."""
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
    """The model's weights: kernels, plus the product of their factors, less that product at the start."""

    def one(path: Any, x: jax.Array) -> jax.Array:
        if named(path) not in factors:
            return x
        now, then = (p[named(path)]["lora_a"] @ p[named(path)]["lora_b"] for p in (factors, start))
        return x + (now - then).reshape(x.shape)

    return jax.tree_util.tree_map_with_path(one, base)


# Training -----------------------------------------------------------------------------------------


def prose(steps: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """The training batches of a run, and the validation batches, which are the same for every cell."""
    return batches(steps, seed, prose=True), held_out(batch=2 * HELD_OUT, prose=True)


@functools.cache
def program(arm: str, rank: int, steps: int, pretraining: int) -> Callable[..., Any]:
    """A compiled function of (factors, batches, held-out batches, rate), for all rates, starts and seeds of an arm."""
    base, (_, loss) = pretrained(pretraining), lm.params_and_loss(model(WIDTH), jax.random.key(0))
    example = adapters(base, rank, STARTS[0], 0)
    gauges = go.lora(example)

    def of(start: Params) -> Callable[[Params, jax.Array], jax.Array]:
        return lambda factors, tokens: loss(adapted(base, start, factors), tokens)

    tx, inputs = ARMS[arm].build(lambda n: ARMS[arm].first, gauges), (example, *prose(steps, SEEDS[0]))
    go.check(tx, tx.init(example), example, jax.grad(of(example))(example, inputs[2][0]))
    return harness.at_rates(lambda rate: ARMS[arm].build(rate, gauges), of, inputs, WARMUP)


def train_cell(cell: Group, steps: int, pretraining: int) -> dict[str, Any]:
    """Trains one cell, and returns its losses and times."""
    rank, start, arm, rate, seed = cell
    inputs = adapters(pretrained(pretraining), rank, start, seed), *prose(steps, seed)
    keys = "validation", "training", "finite", "cpu_seconds"
    return harness.scored(program(arm, rank, steps, pretraining), inputs, rate, keys)


# Results ------------------------------------------------------------------------------------------


def swept(group: Group) -> Sweep:
    """The sweep of learning rates for a group: a rank, a start and an arm."""
    return Sweep(group, ARMS[group[2]].first)


def groups(result: Result) -> list[Group]:
    """The groups (rank, start, arm) whose sweeps have at least one finished rate."""
    chosen = [(rank, start, arm) for rank in RANKS for start in STARTS for arm in ARMS]
    return [group for group in chosen if swept(group).losses(result)]


def table(result: Result) -> str:
    """A Markdown table of the losses at each sweep's best rate: a row per rank and arm, a column per start."""
    lines = [["rank", "arm", *STARTS, "CPU s"]]
    for rank, arm in dict.fromkeys((rank, arm) for rank, _, arm in groups(result)):
        sweeps = {start: swept((rank, start, arm)).losses(result) for start in STARTS}
        bests = {start: (losses[best(losses)], best(losses)) for start, losses in sweeps.items() if losses}
        shown = {x: f"{np.mean(losses):.4f} ± {np.std(losses):.4f} at {at:g}" for x, (losses, at) in bests.items()}
        runs = [(start, arm, rate, seed) for start in STARTS for rate in sweeps[start] for seed in result["seeds"]]
        seconds = np.median([result["cells"][key((rank, *run))]["cpu_seconds"] for run in runs])
        lines.append([str(rank), arm, *(shown.get(start, "") for start in STARTS), f"{seconds:.1f}"])
    return report.markdown(lines)


def transfer(result: Result) -> str:
    """A Markdown table: how much higher losses are with one rate for all ranks and starts than with the best rates."""
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
        adds = f"{np.mean(excess[at]):.1f} %", f"{np.max(excess[at]):.1f} %"
        lines.append([arm, f"{at:g}", *adds, report.span([best(losses) for losses in sweeps], "g")])
    return report.markdown(lines)


def section(result: Result) -> str:
    """The section of this study on the page of all results."""
    settings = result["settings"]
    about = (
        f"A Llama of 2 layers (d = {WIDTH}), {settings['pretraining']} steps on Python sources, then frozen; "
        f"adapters on its 14 kernels learn English prose in {settings['steps']} steps. {len(result['seeds'])} seeds, "
        f"{result['machine']}; validation loss before: {result['before']:.4f}. Loss at each sweep's best rate; rates "
        f"are a factor of {RATIO} apart."
    )
    return f"{about}\n\n{table(result)}\n\nOne rate for every rank and start:\n\n{transfer(result)}"


def figure(result: Result, path: Path) -> None:
    """Draws validation loss over rates: a row of panels per start, a column per rank, a line per arm."""
    done = groups(result)
    rows, columns = ([x for x in axis_values if any(x in g for g in done)] for axis_values in (STARTS, RANKS))
    size = (4.4 * len(columns), 3.2 * len(rows))
    fig, axes = report.plt.subplots(
        len(rows), len(columns), figsize=size, layout="constrained", squeeze=False, sharex=True, sharey=True)
    sweeps = {group: swept(group).losses(result) for group in done}
    for (rank, start, arm), losses in sweeps.items():
        axis = axes[rows.index(start), columns.index(rank)]
        report.by_rate(axis, losses, ARMS[arm].color, arm)
        axis.set_title(f"rank {rank}, {start}")
    least = min(float(np.mean(x)) for losses in sweeps.values() for x in losses.values())
    axes[0, 0].set_ylim(least - 0.02, result["before"])
    axes[0, 0].legend(fontsize=8)
    report.save_as_is(fig, path)


# Command line -------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Config:
    """The number of steps of fine-tuning, and of pretraining."""

    steps: int = 200
    pretraining: int = 600


def before(run: Run, pretraining: int) -> float:
    """The validation loss on the English text, before fine-tuning."""
    loss = lm.params_and_loss(model(WIDTH), jax.random.key(0))[1]
    mean = jax.jit(lambda p, x: jax.lax.map(functools.partial(loss, p), x).mean())
    return float(mean(pretrained(pretraining), prose(1, 0)[1]))


def cells(c: Config, args: argparse.Namespace) -> Callable[[Result], harness.Cells]:
    """The cells to make: the loss before fine-tuning, and the runs that the sweeps need next."""
    sweeps = [swept((rank, start, arm)) for rank in RANKS for start in STARTS for arm in ARMS]
    wanted = harness.swept(sweeps, lambda cell: train_cell(cell, c.steps, c.pretraining))
    return lambda result: {("before",): functools.partial(before, pretraining=c.pretraining), **wanted(result)}


STUDY = harness.Study(
    __doc__, "lora", cells, section, figure, config=Config(), partial=True,
    settings=lambda c: {"steps": c.steps, "pretraining": c.pretraining, "batch": BATCH})

if __name__ == "__main__":
    harness.main(STUDY)
