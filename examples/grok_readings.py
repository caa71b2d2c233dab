"""What studies of grokking share: when a run groks, what is read along a deep one, and the sweep of its rates."""

import argparse
import dataclasses
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from matplotlib.axes import Axes
from tqdm import tqdm

import gauge_optax as go
from examples import report, study
from examples.report import Column, Result
from models import grokking
from models.grokking import GrokConfig, Params

GROKKED = 0.95
KEPT = 10  # readings for which accuracy stays up, for a run to have grokked
RATES = (1e-3, 3e-3, 1e-2)
SWEEP_SEED = 42
WINDOW = 10  # readings before and after that a running median takes
Data = tuple[grokking.Pairs, grokking.Pairs]
Rates = Mapping[str, float]
"""From the name of a base optimizer to its learning rate."""


def grok_reading(accuracy: Sequence[float]) -> int | None:
    """The number of the reading at which a run groks: the first of 95 % that the next ones keep.

    >>> grok_reading([0.1, 0.96, 0.2, *[0.97] * 11])
    3
    """
    up = [x >= GROKKED for x in accuracy]
    return next((k for k in range(len(up) - KEPT) if all(up[k : k + KEPT + 1])), None)


def grokked_at(result: Result, arm: str) -> list[float]:
    """The step at which a run groks, per seed; infinite where it does not."""
    curves = [cell["curves"] for cell in result["cells"][arm].values()]
    readings = [grok_reading(curve["test_accuracy"]) for curve in curves]
    return [math.inf if at is None else curve["step"][at] for at, curve in zip(readings, curves, strict=True)]


def grokked_column(result: Result) -> Column:
    """The same for a table."""
    return lambda arm: " / ".join("never" if at == math.inf else f"{at:,.0f}" for at in grokked_at(result, arm))


def swings(result: Result) -> str:
    """How high accuracy gets along the runs, and how low it falls after that."""
    said = []
    for arm in result["arms"]:
        curves = [cell["curves"]["test_accuracy"] for cell in result["cells"][arm].values()]
        after = [min(curve[curve.index(max(curve)) :]) for curve in curves]
        said.append(
            f"{arm} {report.listed([max(curve) for curve in curves], '.2f')}, then {report.listed(after, '.2f')}"
        )
    return f"The highest accuracy of each run and the lowest after it: {'; '.join(said)}."


def make(c: GrokConfig, seed: int) -> tuple[Params, Data]:
    """A start, and the pairs to train and to test on."""
    return jax.jit(grokking.init, static_argnums=0)(c, jax.random.key(seed)), grokking.data(c, seed)


def loss(params: Params, data: Data, c: GrokConfig) -> jax.Array:
    """On the pairs to train on."""
    return grokking.loss(c, params, data[0])


def gauged(rate: float, decay: float, gauges: Sequence[go.Gauge]) -> optax.GradientTransformation:
    """DDC's Muon under gauges of heads: the step of `baselines.muon(..., per_head=True)`, and the gauges' part.

    No gauge binds the MLPs' kernels; Muon takes them all the same.
    """
    return go.ddc_muon(
        rate, gauges, weight_decay=decay, adam_weight_decay=decay, consistent_rms=0.2,
        labels={f"blocks/{{i}}/mlp/{name}/kernel": "muon" for name in ("up", "down")},
    )


def reading(start: Params, params: Params, data: Data, c: GrokConfig, block: int) -> dict[str, jax.Array]:
    """Losses, accuracies, and `activations`, for a `study.Study` to observe.

    `activations` is the smallest singular value of the residual stream behind a block, a row per pair (of all pairs),
    over the root of the number of rows.

    Args:
      start: not read.
      params: of the network.
      data: pairs to train and to test on.
      c: the network.
      block: the number of the block whose stream is read, from 0.
    """
    del start
    stream = grokking.features(c, params, _tokens(data))["streams"][block]
    numbers = {
        f"{part}_{key}": read(c, params, pairs)
        for part, pairs in zip(("train", "test"), data, strict=True)
        for key, read in (("loss", grokking.loss), ("accuracy", grokking.accuracy))
    }
    return numbers | {"activations": jnp.linalg.svd(stream, compute_uv=False)[-1] / len(stream) ** 0.5}


def output_fisher(params: Params, data: Data, c: GrokConfig) -> jax.Array:
    """The smallest eigenvalue of the Fisher information in the logits, but for the zero of their common shift.

    The mean of diag q − q·qᵀ over all pairs, for probabilities q: the exact mean over labels, of which the paper's
    Monte Carlo sum is an estimate.
    """
    q = jax.nn.softmax(grokking.logits(c, params, _tokens(data)))
    return jnp.linalg.eigvalsh(jnp.diag(jnp.mean(q, 0)) - q.T @ q / len(q))[1]


def _tokens(data: Data) -> jax.Array:
    return jnp.concatenate([tokens for tokens, _ in data])


def medians(
    axis: Axes, result: Result, key: str, title: str, scale: str = "log", ylabel: str = "", arms: Sequence[str] = ()
) -> None:
    """Running medians of a quantity that swings, a line per seed, for all arms or some."""
    for arm, color in report.colors(result["arms"]).items():
        for n, cell in enumerate(result["cells"][arm].values() if arm in (arms or result["arms"]) else ()):
            values = cell["curves"][key]
            around = (values[max(0, k - WINDOW) : k + WINDOW + 1] for k in range(len(values)))
            middle = [statistics.median(window) for window in around]
            axis.plot(cell["curves"]["step"], middle, color=color, lw=1.3, alpha=0.8, label=None if n else arm)
    axis.set(title=title, xlabel="step", ylabel=ylabel, yscale=scale)
    axis.grid(alpha=0.3)


# Rates ------------------------------------------------------------------------------------------------


def best(swept: Mapping[str, Mapping[str, float]]) -> Rates:
    """The best rate of each base optimizer.

    >>> best({"Muon": {"0.001": 0.5, "0.01": 0.7}})
    {'Muon': 0.01}
    """
    return {base: float(max(scores, key=lambda rate: scores[rate])) for base, scores in swept.items()}


def sweep(
    build: Callable[[Any, Rates], study.Study], bases: Mapping[str, str], config: Any, args: argparse.Namespace
) -> Rates:
    """Chooses each base optimizer's learning rate with one seed, by the mean test accuracy along `sweep_steps` steps.

    The scores stand in the study's JSON as `rates`, so that a killed sweep goes on, and no score is made twice.

    Args:
      build: (sizes, rates) → the study.
      bases: from the name of a base optimizer to the arm that is run for it.
      config: the sizes, with `sweep_steps`.
      args: from `study.parse`.

    Returns:
      The best rates.
    """
    case = build(config, dict.fromkeys(bases, RATES[0]))
    path = args.out / f"{case.name}.json"
    result = study.load(path, study.header(case.name, case.arms, config, args))
    scores = result.setdefault("rates", {base: {} for base in bases})
    missing = [(base, rate) for base in bases for rate in RATES if f"{rate:g}" not in scores[base]]
    programs: dict[str, Any] = {}
    with tqdm(total=len(missing) * config.sweep_steps, unit="step", mininterval=1) as progress:
        for base, rate in missing:
            progress.set_description(f"{base}, rate {rate:g}")

            def optimizer(learning_rate: Any, base: str = base) -> optax.GradientTransformation:
                return build(config, dict.fromkeys(bases, learning_rate)).arms[bases[base]].tx

            # The state has the rate, so that all rates share one program.
            arm = dataclasses.replace(
                case.arms[bases[base]], tx=optax.inject_hyperparams(optimizer, static_args="base")(rate)
            )
            programs[base] = programs.get(base) or study.advance(case, arm)
            saved = path.with_name(f"{case.name}-{base}-{rate:g}.npz")
            cell = study.run_cell(case, arm, programs[base], SWEEP_SEED, config.sweep_steps, progress, saved)
            accuracy = cell["curves"]["test_accuracy"]
            scores[base][f"{rate:g}"] = float(f"{sum(accuracy) / len(accuracy):.4g}")
            study.write(path, result)
            saved.unlink(missing_ok=True)
    return best(scores)


def swept(result: Result) -> str:
    """How the rates were chosen, in words."""
    chosen = best(result["rates"])
    each = [
        f"{base} {chosen[base]:g} ({', '.join(f'{x:.3f} at {rate}' for rate, x in scores.items())})"
        for base, scores in result["rates"].items()
    ]
    edges = [base for base, rate in chosen.items() if rate == max(RATES)]
    beyond = f" Larger rates were not tried, although the largest is best for {' and '.join(edges)}." if edges else ""
    return (
        f"Learning rate by mean test accuracy along {result['settings']['sweep_steps']:,} steps with seed "
        f"{SWEEP_SEED}: {'; '.join(each)}.{beyond}"
    )


def sizes(c: GrokConfig) -> str:
    """The network and its task, in words."""
    return (
        f"Addition modulo {c.p} from {c.share:.0%} of all pairs, full batch, {c.layers} blocks with rotary positions, "
        f"width {c.d_model}, {c.heads} heads, hidden {c.d_ff}"
    )
