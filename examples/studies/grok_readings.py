"""What studies of grokking share: when a run groks, what is read along a deep one, and the sweep of its rates."""

import argparse
import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

import gauge_optax as go
from examples.studies import harness, report
from examples.studies.harness import Cells, Result, Run, Training
from examples.studies.report import Column
from models import grokking
from models.grokking import GrokConfig, Params

GROKKED = 0.95
KEPT = 10  # readings for which accuracy stays up, for a run to have grokked
RATES = (1e-3, 3e-3, 1e-2)
SWEEP_SEED = 42
WINDOW = 10  # readings before and after that a running median takes
SHOWN = f"running medians of {2 * WINDOW + 1} readings, a line per seed"
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


def swings(result: Result) -> str:
    """How high accuracy gets along the runs, and how low it falls after that."""
    said = []
    for arm in result["arms"]:
        curves = [cell["curves"]["test_accuracy"] for cell in result["cells"][arm].values()]
        highest, after = [max(x) for x in curves], [min(x[x.index(max(x)) :]) for x in curves]
        said.append(f"{arm} {report.listed(highest, '.2f')}, then {report.listed(after, '.2f')}")
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
    return go.ddc_muon(rate, gauges, weight_decay=decay, adam_weight_decay=decay, consistent_rms=0.2,
                       labels={f"blocks/{{i}}/mlp/{name}/kernel": "muon" for name in ("up", "down")})


def reading(start: Params, params: Params, data: Data, c: GrokConfig, block: int) -> dict[str, jax.Array]:
    """Losses, accuracies, and `activations`, for a `harness.Training` to observe.

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


# Rates ------------------------------------------------------------------------------------------------


def best(swept: Mapping[str, Mapping[str, float]]) -> Rates:
    """The best rate of each base optimizer.

    >>> best({"Muon": {"0.001": 0.5, "0.01": 0.7}})
    {'Muon': 0.01}
    """
    return {base: float(max(scores, key=lambda rate: scores[rate])) for base, scores in swept.items()}


def cells(
    build: Callable[[Any, Rates], Training], bases: Mapping[str, str], config: Any, args: argparse.Namespace
) -> Cells:
    """First the sweep of each base optimizer's learning rate with one seed, then all arms at the best rates.

    A rate's score is the mean test accuracy along `sweep_steps` steps. Scores stand in the JSON as `rates`.

    Args:
      build: (sizes, rates) → the training runs.
      bases: from the name of a base optimizer to the arm that is run for it.
      config: the sizes, with `sweep_steps`.
      args: the command line.
    """
    case = build(config, dict.fromkeys(bases, RATES[0]))

    def rated(base: str, rate: float) -> harness.Arm:
        def optimizer(learning_rate: Any) -> optax.GradientTransformation:
            return build(config, dict.fromkeys(bases, learning_rate)).arms[bases[base]].tx

        # The state has the rate, so that all rates share one program.
        return dataclasses.replace(case.arms[bases[base]], tx=optax.inject_hyperparams(optimizer)(rate))

    program = functools.cache(lambda base: harness.advance(case, rated(base, RATES[0])))
    at_best = functools.cache(lambda *rates: harness.runs_of(build(config, dict(rates)), args.seeds, config.steps))

    def score(run: Run, base: str, rate: float) -> float:
        cell = harness.run_cell(case, rated(base, rate), program(base), SWEEP_SEED, config.sweep_steps, run.saved)
        accuracy = cell["curves"]["test_accuracy"]
        return float(f"{sum(accuracy) / len(accuracy):.4g}")

    def trained(run: Run, address: harness.Address) -> Any:
        return at_best(*best(run.result["rates"]).items())[address](run)

    made: dict[harness.Address, Callable[[Run], Any]] = {
        ("rates", base, f"{rate:g}"): functools.partial(score, base=base, rate=rate) for base in bases for rate in RATES
    }
    runs = harness.runs_of(case, args.seeds, config.steps)
    return made | {address: functools.partial(trained, address=address) for address in runs}


def swept(result: Result) -> str:
    """How the rates were chosen, in words."""
    chosen = best(result["rates"])
    each = [f"{base} {chosen[base]:g} ({', '.join(f'{x:.3f} at {rate}' for rate, x in scores.items())})"
            for base, scores in result["rates"].items()]
    edges = [base for base, rate in chosen.items() if rate == max(RATES)]
    beyond = f" Larger rates were not tried, although the largest is best for {' and '.join(edges)}." if edges else ""
    return (f"Learning rate by mean test accuracy along {result['settings']['sweep_steps']:,} steps with seed "
            f"{SWEEP_SEED}: {'; '.join(each)}.{beyond}")


def columns(result: Result) -> dict[str, Column]:
    """Those of a deep network: when it groks, then medians over the last quarter of the run."""
    settled = functools.partial(report.column, result, at=report.settled)

    def grokked(arm: str) -> str:
        return " / ".join("never" if at == math.inf else f"{at:,.0f}" for at in grokked_at(result, arm))

    return {
        f"{GROKKED:.0%} from step": grokked,
        "accuracy": settled("test_accuracy", ".3f"),
        "train loss": settled("train_loss"),
        "test loss": settled("test_loss"),
        "singular value": settled("activations"),
    }


def sizes(c: GrokConfig) -> str:
    """The network and its task, in words."""
    return (f"Addition modulo {c.p} from {c.share:.0%} of all pairs, full batch, {c.layers} blocks with rotary "
            f"positions, width {c.d_model}, {c.heads} heads, hidden {c.d_ff}")
