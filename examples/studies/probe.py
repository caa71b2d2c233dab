"""One probe for two networks: a linear readout of one seed's residual stream, carried to another seed's.

    python -m examples.studies probe --out examples/results      # minutes on two CPU cores; killed, it goes on
    python -m examples.studies probe --steps 20 --only "seeds 42, 142"     # to try it

Two small Llamas (`examples.merge`) are trained from two seeds. A linear probe reads the kind of the next byte (letter,
digit, …) from the residual stream behind a block of the first network. The streams of two seeds have different bases,
so that the probe says nothing about the second network. A rotation of the stream is a gauge: `go.orbit.align` finds
the one that takes the second network nearest to the first, by weights alone, and `go.orbit.canonicalize` gives both a
basis of their own. The probe is read again after each. A twin of the first network, moved by a random element of all
gauges, is the control: there alignment has to give the probe its accuracy back.

Finished pairs are kept in probe.json; probe.png is drawn at the end, and the table printed.
"""

import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import gauge_optax as go
from examples import data, merge
from examples.studies import harness, report
from examples.studies.harness import Result
from examples.studies.starts import BATCH, LENGTH
from models import lm

Params = Any

NET = "llama"
PAIRS = ("seeds 42, 142", "seeds 42, 242", "seeds 142, 242", "twins of 42", "twins of 142")
KINDS = ("lower case", "upper case", "digit", "space", "line end", "other")
ARMS = ("as it is", "all gauges", "permutations", "canonical", "by activations", "trained there")
RIDGE, BATCHES = 1e-2, 24  # of the probe; batches of 8 × 64 bytes that it is fitted on


def kind(tokens: np.ndarray) -> np.ndarray:
    """Bytes → positions in `KINDS`."""
    ranges = [("a", "z"), ("A", "Z"), ("0", "9"), (" ", " "), ("\n", "\n")]
    found = np.full(tokens.shape, len(ranges))
    for number, (first, last) in enumerate(ranges):
        found[(tokens >= ord(first)) & (tokens <= ord(last))] = number
    return found


@functools.cache
def stream() -> Any:
    """(params, tokens) → the residual stream behind every block, each (tokens, d)."""
    graph, _ = nnx.split(lm.build(merge.LLAMA, nnx.Rngs(0)))

    @jax.jit
    def run(params: Params, tokens: jax.Array) -> list[jax.Array]:
        return [x.reshape(-1, x.shape[-1]) for x in nnx.merge(graph, params).streams(tokens)[1:]]

    return run


def fitted(x: np.ndarray, classes: np.ndarray) -> np.ndarray:
    """Ridge regression of one-hot classes on a stream and a constant, (d + 1, classes)."""
    x = np.concatenate([x, np.ones((len(x), 1))], 1)
    gram = x.T @ x + RIDGE * len(x) * np.diag(np.append(np.mean(x[:, :-1] ** 2) * np.ones(x.shape[1] - 1), 0.0))
    return np.asarray(np.linalg.solve(gram, x.T @ np.eye(len(KINDS))[classes]))


def accuracy(probe: np.ndarray, x: np.ndarray, classes: np.ndarray) -> float:
    """The share of bytes whose kind the probe tells."""
    return float(np.mean(np.argmax(x @ probe[:-1] + probe[-1], 1) == classes))


def carried(x: np.ndarray, to: np.ndarray) -> np.ndarray:
    """The rotation times a number that takes a stream nearest to another one on the same text (Procrustes)."""
    u, sizes, vt = np.linalg.svd(x.T @ to)
    return np.asarray(u @ vt * (np.sum(sizes) / np.sum(x**2)))


def run_pair(pair: str, steps: int) -> dict[str, Any]:
    """Block → arm → accuracy on held-out text; how sure a guess is that always says the commonest kind."""
    own = merge.net(NET)
    gauges = [*own.whole, *own.order]
    group = go.product(gauges)
    if pair.startswith("twins"):
        first = merge.trained(NET, int(pair.split()[-1]), steps)
        second = group.act(group.sample(jax.random.key(1), first), first)
    else:
        first, second = merge.networks(NET, pair, steps)
    train, held = data.batches(LENGTH, BATCH, seed=7)
    fit, test = np.concatenate([train[n] for n in range(BATCHES)]), np.concatenate(held)

    def read(params: Params, tokens: np.ndarray) -> list[np.ndarray]:
        return [np.asarray(x, np.float64) for x in stream()(params, jnp.asarray(tokens[:, :-1]))]

    to_fit, to_test = (kind(tokens[:, 1:]).ravel() for tokens in (fit, test))
    canonical = [go.orbit.canonicalize(p, gauges) for p in (first, second)]
    moved = {
        "as it is": (first, second),
        "all gauges": (first, group.act(go.orbit.align(first, second, gauges), second)),
        "permutations": (first, go.product(own.order).act(go.orbit.align(first, second, own.order), second)),
        "canonical": tuple(canonical),
        "trained there": (second, second),
    }
    done: dict[str, Any] = {}
    for arm, (from_, to) in moved.items():
        probes = [fitted(x, to_fit) for x in read(from_, fit)]
        found = [accuracy(p, x, to_test) for p, x in zip(probes, read(to, test), strict=True)]
        done[arm] = [round(x, 4) for x in found]
    # The best that one rotation of the stream can do: it sees activations, and a rotation per block.
    pairs = zip(read(first, fit), read(second, fit), read(second, test), strict=True)
    found = [accuracy(fitted(a, to_fit), x @ carried(b, a), to_test) for a, b, x in pairs]
    done["by activations"] = [round(x, 4) for x in found]
    done["commonest"] = round(float(np.max(np.bincount(to_test)) / len(to_test)), 4)
    return done


# Results ------------------------------------------------------------------------------------------


def accuracies(result: Result, kind_of_pair: str) -> dict[str, np.ndarray]:
    """Arm → (pairs, blocks)."""
    cells = [cell for key, cell in result["cells"].items() if key.startswith(kind_of_pair)]
    return {arm: np.array([cell[arm] for cell in cells]) for arm in ARMS if cells}


def table(result: Result) -> str:
    """Markdown: a row per kind of pair and block, a column per arm."""
    lines = [["pairs", "stream behind", *ARMS]]
    for name in ("seeds", "twins"):
        found = accuracies(result, name)
        for block in range(merge.LLAMA.layers if found else 0):
            shown = [f"{100 * x[:, block].mean():.1f} ± {100 * x[:, block].std():.1f}" for x in found.values()]
            lines.append([f"{len(found[ARMS[0]])} of {name}", f"block {block + 1}", *shown])
    return report.markdown(lines)


def section(result: Result) -> str:
    """Its part of the page of all results."""
    guess = 100 * np.mean([cell["commonest"] for cell in result["cells"].values()])
    about = (
        "A linear probe reads the kind of the next byte (lower case, upper case, digit, space, line end, other) from "
        "the first network's residual stream. The table has its accuracy on the second network's stream in per cent, "
        "mean ± standard deviation over pairs; the function of neither network changes. *As it is*: without any move. "
        "*All gauges*: the second network aligned to the first by weights, `lm.whole_gauges` with permutations. "
        "*Permutations*: of units and heads alone, which do not move the stream. *Canonical*: both in their canonical "
        "weights. *By activations*: the second stream turned by the one rotation, per block, that takes it nearest to "
        "the first on the same text; no gauge. *Trained there*: a probe of the second network's own. The commonest "
        f"kind is {guess:.1f} % of bytes. The networks are those of the section on merging, "
        f"{result['settings']['steps']} steps, {result['machine']}."
    )
    said = []
    found = accuracies(result, "seeds")
    if found:
        plain, best, own = (100 * found[arm].mean(0) for arm in ("as it is", "all gauges", "trained there"))
        for block, (a, b, c) in enumerate(zip(plain, best, own, strict=True)):
            gains = 100 * (found["all gauges"] - found["as it is"])[:, block]
            said.append(
                f"Behind block {block + 1}, alignment takes the probe from {a:.1f} to {b:.1f} % on average, by "
                f"{', '.join(f'{x:+.0f}' for x in gains)} points in the pairs, which share seeds; a probe that was "
                f"trained there has {c:.1f} %. {int(np.sum(100 * found['all gauges'][:, block] < guess))} of "
                f"{len(gains)} end below the commonest kind."
            )
        turned, own_mean = (100 * found[arm].mean() for arm in ("by activations", "trained there"))
        said.append(
            f"A rotation that sees activations reaches {turned:.1f} % over both blocks, against "
            f"{100 * found['all gauges'].mean():.1f} % by weights: "
            + (
                "there is a rotation that carries the probe, and weights alone do not find it."
                if turned > own_mean - 2
                else "no one rotation carries the probe."
            )
        )
        worse = found["canonical"].mean() < found["all gauges"].mean()
        said.append(
            f"Canonical weights do {'worse' if worse else 'better'} than alignment "
            f"({100 * found['canonical'].mean():.1f} % over both blocks): the eigenbases of two seeds have one order "
            "and one rule for signs, and need not have one meaning."
        )
    twins = accuracies(result, "twins")
    if twins:
        gap = 100 * np.max(np.abs(twins["all gauges"] - twins["trained there"]))
        said.append(f"Twins: after alignment the probe is at most {gap:.1f} points from one that was trained there.")
    return f"{about}\n\n{table(result)}\n\n" + " ".join(said)


def figure(result: Result, path: Path) -> None:
    """Accuracy per arm: a panel per kind of pair, a bar per block, a dot per pair."""
    fig, axes = report.plt.subplots(1, 2, figsize=(10, 4), layout="constrained", sharey=True)
    for axis, name in zip(axes, ("seeds", "twins"), strict=True):
        found = accuracies(result, name)
        for block in range(merge.LLAMA.layers if found else 0):
            places = np.arange(len(ARMS)) + 0.38 * block
            values = [100 * x[:, block] for x in found.values()]
            axis.bar(places, [x.mean() for x in values], 0.36, color=f"C{block}", label=f"behind block {block + 1}")
            for place, x in zip(places, values, strict=True):
                axis.plot(np.full(len(x), place), x, ".", color="black", ms=4)
        guess = 100 * np.mean([c["commonest"] for c in result["cells"].values()])
        axis.axhline(guess, color="gray", lw=1, ls="--", label="commonest kind")
        axis.set(title=f"pairs of {name}", xticks=np.arange(len(ARMS)) + 0.19)
        axis.set_xticklabels(ARMS, rotation=20)
        axis.grid(axis="y", alpha=0.3)
    axes[0].set_ylabel("accuracy of the probe, %")
    axes[0].legend(fontsize=8, loc="lower right")
    report.save_as_is(fig, path)


STUDY = harness.Study(
    __doc__, "probe", harness.by_name(PAIRS, lambda c, args, pair: run_pair(pair, c.steps)), section, figure,
    config=merge.Config(), seeds=None, partial=True,
    settings=lambda c: {"steps": c.steps, "ridge": RIDGE, "batches": BATCHES},
)
