"""The ladder of `go.links.scale_by_opposite_gram`: how far each rung leaves equal weights apart, and what it costs.

    OPENBLAS_NUM_THREADS=1 python -m benchmarks.opposite_gram           # two minutes on 2 CPU cores
    python -m benchmarks.opposite_gram --layers 1 --width 64 --repeats 4 --only full raw

One OpenBLAS thread: from factors of 64 columns more have nothing to gain, and beside another process they have waited
for each other up to 29 s in place of 0.1 s.

Twins: a softmax attention layer in float64, and the same layer moved by an S of condition 100 per head. The error is
that of the represented motion, of W_Q·W_Kᵀ and W_V·W_O, from one step or from many. Times: updates of the attention
kernels of d = 768 in float32, in turns with `optax.adamw`'s in one process.
Writes benchmarks/results/opposite_gram.json and opposite_gram.md.
"""

import argparse
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from tqdm import tqdm

import gauge_optax as go
from benchmarks.timing import host, in_turns, prepared

Tree = Any
Link = Callable[[Sequence[go.Gauge]], optax.GradientTransformation]

WIDTH, HEADS, HEAD, LENGTH, BATCH, CONDITION = 16, 2, 4, 8, 4, 100.0
SLOW, FAST, ADAM, DECAY = 0.01, 0.1, 0.01, 0.1
GAUGES = (
    go.head_linear({"{i}/query": "_ head basis"}, {"{i}/key": "_ head basis"}),
    go.head_linear({"{i}/value": "_ head basis"}, {"{i}/out": "head basis _"}),
)


# Rungs --------------------------------------------------------------------------------------------


class LiteralState(NamedTuple):
    """State of `literal`: updates so far."""

    count: jax.Array  # type: ignore[assignment]


def literal(gauges: Sequence[go.Gauge], every: int) -> optax.GradientTransformationExtraArgs:
    """The other reading of "every k steps": increments are corrected at every k-th update and raw in between."""
    whole = go.links.scale_by_opposite_gram(gauges)

    def update_fn(updates: Tree, state: LiteralState, params: Tree = None, **extra: Any) -> tuple[Tree, LiteralState]:
        del extra
        corrected = jax.lax.cond(
            state.count % every == 0, lambda: whole.update(updates, whole.init(params), params)[0], lambda: updates
        )
        return corrected, LiteralState(state.count + 1)

    return optax.GradientTransformationExtraArgs(lambda params: LiteralState(jnp.zeros((), jnp.int32)), update_fn)


def corrected(**options: Any) -> Link:
    """One rung."""
    return lambda gauges: go.links.scale_by_opposite_gram(gauges, **options)


def rung(name: str) -> Link:
    """A line of the table: "every k" and "literally every k" for any k, else a key of `_RUNGS`."""
    if name.startswith("literally every "):
        return lambda gauges: literal(gauges, period(name))
    return corrected(every=period(name)) if name.startswith("every ") else _RUNGS[name]


def period(name: str) -> int:
    """At how many updates once a rung does all of its work."""
    return int(name.split()[-1]) if "every " in name else 1


_RUNGS: dict[str, Link] = {
    "full": corrected(),
    "damped, relative 1e-3": corrected(damping=1e-3),
    "damped, relative 1e-1": corrected(damping=1e-1),
    "damped, absolute 1e-3": corrected(damping=1e-3, damping_mode="absolute"),
    "diagonal": corrected(diagonal=True),
    "raw": lambda gauges: optax.identity(),
}
NAMES = (*list(_RUNGS)[:-1], "every 4", "every 16", "literally every 4", "literally every 16", "raw")


def sgd(link: Link, rate: float) -> optax.GradientTransformation:
    """Corrected gradients."""
    return optax.chain(link(GAUGES), optax.sgd(rate))


def adamw(link: Link, rate: float = ADAM) -> optax.GradientTransformation:
    """Corrected Adam; the decay, θ itself, is a tangent as it stands."""
    return optax.chain(
        optax.scale_by_adam(), link(GAUGES), optax.add_decayed_weights(DECAY), optax.scale_by_learning_rate(rate)
    )


COLUMNS: dict[str, Callable[[Link], optax.GradientTransformation]] = {
    "sgd_once": lambda link: sgd(link, SLOW),
    "sgd": lambda link: sgd(link, SLOW),
    "sgd_fast": lambda link: sgd(link, FAST),
    "adamw": adamw,
}
"""What is done with a rung; the first for one step."""


# Twins --------------------------------------------------------------------------------------------


def kernels(layers: int, width: int, heads: int, head: int, dtype: Any) -> Tree:
    """Attention kernels whose Gram matrices have eigenvalues near 1."""
    rng = np.random.default_rng(0)

    def drawn(*shape: int) -> jax.Array:
        return jnp.asarray(rng.normal(size=shape) / width**0.5, dtype)

    return {
        str(i): {n: drawn(width, heads, head) for n in ("query", "key", "value")} | {"out": drawn(heads, head, width)}
        for i in range(layers)
    }


def attention(kernel: Tree, x: jax.Array) -> jax.Array:
    """One layer of softmax attention."""
    query, key, value = (jnp.einsum("ntd,dhe->nthe", x, kernel[n]) for n in ("query", "key", "value"))
    weights = jax.nn.softmax(jnp.einsum("nthe,nshe->nhts", query, key))
    return jnp.einsum("nhts,nshe,hed->ntd", weights, value, kernel["out"])


def problem() -> tuple[Tree, Tree, Callable[[Tree], jax.Array]]:
    """Weights, their twin, and a loss: the outputs of another layer."""
    params = kernels(1, WIDTH, HEADS, HEAD, jnp.float64)
    rng = np.random.default_rng(1)
    x = jnp.asarray(rng.normal(size=(BATCH, LENGTH, WIDTH)))
    teacher = {n: jnp.asarray(rng.normal(size=k.shape) / WIDTH**0.5) for n, k in params["0"].items()}
    target = attention(teacher, x)
    sizes = np.geomspace(CONDITION**-0.5, CONDITION**0.5, HEAD)

    def matrix() -> np.ndarray:
        left, right = (np.linalg.qr(rng.normal(size=(HEADS, HEAD, HEAD)))[0] for _ in range(2))
        return np.asarray(left * sizes @ right)

    twin = params
    for gauge in GAUGES:
        twin = gauge.act({"i=0": jnp.asarray(matrix())}, twin)
    return params, twin, lambda p: 0.5 * jnp.mean(jnp.sum(jnp.square(attention(p["0"], x) - target), -1))


def represented(params: Tree) -> jax.Array:
    """W_Q·W_Kᵀ and W_V·W_O of every head."""
    layer = params["0"]
    scores = jnp.einsum("dhe,fhe->hdf", layer["query"], layer["key"])
    return jnp.stack((scores, jnp.einsum("dhe,hef->hdf", layer["value"], layer["out"])))


def trajectory(
    tx: optax.GradientTransformation, loss: Callable[[Tree], jax.Array], steps: int
) -> Callable[[Tree], tuple[jax.Array, jax.Array]]:
    """Represented motion after some steps, and the loss there."""

    def step(_: int, carry: tuple[Tree, Tree]) -> tuple[Tree, Tree]:
        params, state = carry
        updates, state = tx.update(jax.grad(loss)(params), state, params)
        return optax.apply_updates(params, updates), state

    def run(params: Tree) -> tuple[jax.Array, jax.Array]:
        last, _ = jax.lax.fori_loop(0, steps, step, (params, tx.init(params)))
        return represented(last) - represented(params), loss(last)

    return jax.jit(run)


def apart(tx: optax.GradientTransformation, steps: int) -> dict[str, float | None]:
    """How far the represented motions of twins are apart, relative to the first's, and both losses; None: diverged."""
    params, twin, loss = problem()
    run = trajectory(tx, loss, steps)
    (motion, loss_end), (other, twin_end) = run(params), run(twin)
    figures = {
        "error": float(jnp.linalg.norm(motion - other) / jnp.linalg.norm(motion)),
        "start": float(loss(params)), "loss": float(loss_end), "twin_loss": float(twin_end),
    }
    return {name: x if np.isfinite(x) else None for name, x in figures.items()}


def trajectories(link: Link, steps: int) -> dict[str, Any]:
    """`apart` of one rung, by column."""
    return {column: apart(make(link), 1 if column == "sgd_once" else steps) for column, make in COLUMNS.items()}


# Times --------------------------------------------------------------------------------------------


def times(name: str, params: Tree, repeats: int) -> dict[str, float]:
    """Milliseconds of an update of a rung's `adamw`, and its ratio to `optax.adamw`'s in the same round.

    Rounds with an inverse and rounds without have their own medians; the figure is what both come to per update.
    """
    txs = optax.adamw(1e-6, weight_decay=DECAY), adamw(rung(name), 1e-6)
    base, row = (prepared(tx, params, params) for tx in txs)
    in_turns({"optax.adamw": base, name: row}, params, repeats, warm=0)
    every, rounds = period(name), np.arange(repeats)
    counts = rounds > 0  # the first calls are slower
    due = counts & (rounds % every == 0)

    def amortised(x: np.ndarray) -> float:
        stale = np.median(x[counts & ~due]) if every > 1 else 0.0
        return float((np.median(x[due]) + (every - 1) * stale) / every)

    seconds, of_base = np.array(row.seconds), np.array(base.seconds)
    return {
        "ms": 1e3 * amortised(seconds), "ratio": amortised(seconds / of_base),
        "adamw_ms": 1e3 * float(np.median(of_base[1:])), "compile_s": row.compile_seconds,
    }


# Page ---------------------------------------------------------------------------------------------


def table(result: dict[str, Any]) -> str:
    """The JSON as Markdown."""
    steps = result["steps"]
    lines = [
        "# The ladder of `scale_by_opposite_gram`",
        "",
        f"`python -m benchmarks.opposite_gram`: {result['host']}, jax {result['jax']}, OPENBLAS_NUM_THREADS "
        f"{result['openblas_threads']}, load {result['load']:.1f} at the start. Twins: softmax attention (d = {WIDTH}, "
        f"{HEADS} heads of {HEAD}), float64, moved by S of condition {CONDITION:.0f} per head; error of the "
        "represented motion (W_Q·W_Kᵀ, W_V·W_O), relative to that of the first. SGD at learning rate "
        f"{SLOW}, one step and {steps}, and {steps} at {FAST}; AdamW (Adam's increments corrected, then decay {DECAY}) "
        f"at {ADAM}, {steps} steps. Times: Adam, correction, decay on {result['leaves']} attention kernels of "
        f"d = {result['width']} in heads of 64, float32, in units of "
        f"`optax.adamw`'s update in the same of {result['repeats']} rounds, inverses shared out over the updates that "
        'they serve. "Every k": the inverse is computed at every k-th update and kept; "literally": increments are '
        "corrected at every k-th update and raw in between. Raw: no correction.",
        "",
        f"| rung | SGD, 1 step | SGD, {steps} | SGD at {FAST}, {steps} | AdamW, {steps} | update ms | of adamw's |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, row in result["rungs"].items():
        errors = (row[column]["error"] for column in COLUMNS)
        shown = " | ".join("diverges" if x is None else f"{x:.1e}" for x in errors)
        lines.append(f"| {name} | {shown} | {row['ms']:.1f} | {row['ratio']:.1f} |")
    losses = [
        f"{name} {row['adamw']['loss']:.2f} and {_shown(row['adamw']['twin_loss'])}"
        for name, row in result["rungs"].items()
        if name in ("full", "raw")
    ]
    if losses:
        start = next(iter(result["rungs"].values()))["adamw"]["start"]
        lines += [
            "",
            f"AdamW's losses after {steps} steps, at the first and at its twin, from {start:.2f}: {'; '.join(losses)}. "
            "Adam's increments do not grow with the gradient, so a whole inverse Gram matrix overcorrects them: where "
            "S is a number s, the raw motion has a part in s⁻¹ and one in s, the corrected one in s and in s⁻¹.",
        ]
    return "\n".join(lines) + "\n"


def _shown(number: float | None) -> str:
    return "not finite" if number is None else f"{number:.2f}"


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--layers", type=int, default=3, help="of four kernels each")
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--repeats", type=int, default=33)
    parser.add_argument("--steps", type=int, default=20, help="of each trajectory")
    parser.add_argument("--only", nargs="*", default=list(NAMES), help='lines of the table; of "every k" any k')
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    args = parser.parse_args(argv)
    if args.repeats <= max(map(period, args.only)):
        parser.error("--repeats: more rounds than the longest period, one of which does not count")
    return args


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Measure every rung, print and write the table."""
    args = parse(argv)
    result: dict[str, Any] = {
        "host": host(), "jax": jax.__version__, "load": os.getloadavg()[0],
        "openblas_threads": os.environ.get("OPENBLAS_NUM_THREADS", "not set"), "leaves": 4 * args.layers,
        "width": args.width, "repeats": args.repeats, "steps": args.steps,
    }
    params = kernels(args.layers, args.width, args.width // 64, 64, jnp.float32)
    timed = {name: times(name, params, args.repeats) for name in tqdm(args.only, unit="rung")}
    with jax.enable_x64(True):
        result["rungs"] = {
            name: trajectories(rung(name), args.steps) | timed[name] for name in tqdm(args.only, unit="rung")
        }
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "opposite_gram.json").write_text(json.dumps(result, indent=1))
    (args.out / "opposite_gram.md").write_text(table(result))
    print(table(result))
    return result


if __name__ == "__main__":
    main()
