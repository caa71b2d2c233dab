"""Twins of a transformer trained by the protocol of "The Loss Does Not See the Basis, but Adam Does".

    python -m examples.studies twins_benchmark            # about an hour on two cores

Two sets of weights of one function, *twins*, are trained side by side. Devender Singh (arXiv 2608.05136, section 6 and
appendix D.5) writes the queries and keys of every head in another orthonormal basis ("rotated"), trains both sets on
addition modulo 47 from 40 % of all pairs, full batch, and measures how far the logits differ on the pairs that were
held out. There are two controls: a twin in the same basis ("same"), and one whose queries and keys differ by noise of
1e-7 ("noise"), which shows how much a method enlarges rounding. We add a fourth twin ("every symmetry"), moved also by
the gauges of values and outputs and of norms' scales.

The network is the paper's: two blocks of width 64 without a causal mask, RMSNorms, SiLU, no biases, three tokens (two
numbers and an equals sign). Learning rates of Adam, Muon and of Adam with one second moment for all entries are the
paper's, without weight decay. Lion and SOAP are not in the paper, and have our rates. Weights and pairs are drawn by
other random numbers than the paper's, so that results agree in size only.
"""

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import gauge_optax as go
from examples.studies import baselines, harness, kronecker, report
from examples.studies.harness import Result
from models.modular import ModularConfig, gauges, init, logits

Tree = Any
Cell = dict[str, Any]


@dataclass(frozen=True)
class Config(ModularConfig):
    """Sizes. The defaults are those of the paper."""

    steps: int = 1500
    share: float = 0.4  # the share of all pairs to train on


CHECKS = (1, 10, 50, 100, 300, 600, 1000, 1500)
NOISE = 1e-7


# The task ---------------------------------------------------------------------------------------------


def pairs(c: Config, seed: int) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Returns tokens and sums to train on, and then those that are held out."""
    order = np.random.default_rng(seed).permutation(c.modulus**2)
    tokens = np.stack([*np.divmod(order, c.modulus), np.full_like(order, c.modulus)], 1)
    sums, cut = tokens[:, :2].sum(1) % c.modulus, int(c.share * len(order))
    return jnp.asarray(tokens[:cut]), jnp.asarray(sums[:cut]), jnp.asarray(tokens[cut:]), jnp.asarray(sums[cut:])


# Arms -------------------------------------------------------------------------------------------------


def _muon() -> optax.GradientTransformation:
    """Muon as in the paper: Newton-Schulz steps without a factor for the shape, for kernels of blocks.

    All other leaves get Adam with a learning rate of 1e-3.
    """

    def of(path: Any, x: jax.Array) -> optax.contrib.MuonDimensionNumbers | None:
        where = jax.tree_util.keystr(path, simple=True, separator="/")
        inputs = x.ndim - 1 if "out" in where else 1
        return optax.contrib.MuonDimensionNumbers(tuple(range(inputs)), tuple(range(inputs, x.ndim)))

    def labels(params: Tree) -> Tree:
        def one(path: Any, x: jax.Array) -> str:
            where = jax.tree_util.keystr(path, simple=True, separator="/")
            return "matrix" if "blocks" in where and "kernel" in where else "other"

        return jax.tree.map_with_path(one, params)

    def numbers(params: Tree) -> Tree:
        return jax.tree.map_with_path(of, params)

    matrix = optax.contrib.scale_by_muon(beta=0.9, nesterov=False, weight_dimension_numbers=numbers)
    return optax.partition({"matrix": optax.chain(matrix, optax.scale(-0.02)), "other": optax.adam(1e-3)}, labels)


PLAIN: Mapping[str, Callable[[], optax.GradientTransformation]] = {
    "Adam": lambda: optax.adam(1e-3),
    "Lion": lambda: optax.lion(3e-4, weight_decay=0.0),
    "SOAP": lambda: kronecker.soap(1e-3, 10),
    "Muon": _muon,
}
CONTROLS: Mapping[str, Callable[[], optax.GradientTransformation]] = {
    "Adam, one scalar for all": lambda: baselines.shared_scalar_adam(3e-3),
}
ARMS = [wrapped for name in PLAIN for wrapped in (name, f"quotient({name})")] + ["DDC-AdamW", *CONTROLS]
PUBLISHED: Mapping[str, Mapping[int, tuple[float, float]]] = {
    "Adam": {1: (3.4e-3, 5.4e-3), 100: (0.56, 0.67), 1500: (0.69, 0.80)},
    "Muon": {1: (2.3e-7, 2.4e-7), 1500: (0.80, 0.86)},
    "Adam, one scalar for all": {1: (1.5e-7, 2.1e-7), 100: (2.6e-6, 4.1e-6), 1500: (3.0e-6, 4.3e-6)},
}
"""Optimizer → steps → the smallest and the largest drift of the logits of rotated twins in the paper's published logs.

The logs are from a CPU in float32, of six, two and three pairs of twins.
"""


def optimizer(c: Config, arm: str) -> optax.GradientTransformation:
    """The optimizer of an arm's name, such as "Adam" or "quotient(Adam)"."""
    if arm == "DDC-AdamW":
        return go.ddc_adamw(1e-3, gauges(), weight_decay=0.0)
    name = arm.removeprefix("quotient(").removesuffix(")")
    inner = (PLAIN | CONTROLS)[name]()  # type: ignore[operator]
    return inner if name == arm else go.quotient(inner, gauges())


# One pair of twins ------------------------------------------------------------------------------------


class Readings(NamedTuple):
    """Measurements of one run, at the start and after each number of steps in `CHECKS`.

    Attributes:
      logits: the logits of the held-out pairs, (measurements, pairs, modulus).
      products: the product of query and key kernel of each head, (measurements, blocks · heads, d, d).
      accuracy: the accuracy on the held-out pairs at the end.
    """

    logits: np.ndarray
    products: np.ndarray
    accuracy: float


SINGLE, DOUBLE = "float32", "float64"
TWINS: Mapping[str, Sequence[str]] = {
    SINGLE: ("same", "noise", "rotated"),
    DOUBLE: ("noise", "rotated", "every symmetry"),
}
"""Dtype → kinds of twins. "every symmetry" is without the shift of the logits, because logits are compared."""


def twin(c: Config, kind: str, params: Tree, key: jax.Array) -> Tree:
    """A twin of this kind (see the module's docstring): weights of the same function, or nearly so for "noise"."""
    if kind == "same":
        return params
    if kind == "noise":
        keys = iter(jax.random.split(key, 2 * c.blocks))

        def noisy(path: Any, x: jax.Array) -> jax.Array:
            where = jax.tree_util.keystr(path, simple=True, separator="/")
            chosen = "attn/query" in where or "attn/key" in where
            return x + NOISE * jax.random.normal(next(keys), x.shape, x.dtype) if chosen else x

        return jax.tree.map_with_path(noisy, params)
    group = go.product(gauges()[:1] if kind == "rotated" else gauges()[:-1])
    return group.act(group.sample(key, params), params)


def checks(c: Config) -> list[int]:
    """The numbers of steps after which runs are measured."""
    return sorted({n for n in CHECKS if n <= c.steps} | {c.steps})


@functools.cache
def program(c: Config, arm: str, wide: bool) -> Callable[..., tuple[Tree, Any]]:
    """A compiled function that takes a number of steps.

    `wide` only makes the cache keep the programs for float32 and for float64 apart.
    """
    tx = optimizer(c, arm)

    def loss(params: Tree, data: tuple[jax.Array, jax.Array]) -> jax.Array:
        return optax.softmax_cross_entropy_with_integer_labels(logits(c, params, data[0]), data[1]).mean()

    @jax.jit
    def go_on(params: Tree, state: Any, tokens: jax.Array, sums: jax.Array, steps: jax.Array) -> tuple[Tree, Any]:
        return harness.descend(tx, loss, (params, state), lambda n: (tokens, sums), 0, steps)

    return go_on


def run(c: Config, arm: str, params: Tree, data: Sequence[jax.Array], wide: bool) -> Readings:
    """Trains one of two twins, and returns its measurements."""
    tokens, sums, held_out, answers = data
    state = jax.jit(optimizer(c, arm).init)(params)
    read = jax.jit(functools.partial(logits, c))
    seen, products, before = [np.asarray(read(params, held_out))], [_products(params)], 0
    for n in checks(c):
        params, state = program(c, arm, wide)(params, state, tokens, sums, jnp.int32(n - before))
        seen.append(np.asarray(read(params, held_out)))
        products.append(_products(params))
        before = n
    accuracy = float(np.mean(seen[-1].argmax(-1) == np.asarray(answers)))
    return Readings(np.stack(seen), np.stack(products), accuracy)


def _products(params: Tree) -> np.ndarray:
    heads = [block["attn"] for block in params["blocks"].values()]
    kernels = [[np.asarray(x[name]["kernel"]) for name in ("query", "key")] for x in heads]
    return np.concatenate([np.einsum("dhe,che->hdc", query, key) for query, key in kernels])


def drifts(a: Readings, b: Readings) -> dict[str, list[float]]:
    """Relative distances of two runs at each measurement: of the logits, and of heads' products (their mean)."""

    def apart(x: np.ndarray, y: np.ndarray) -> np.ndarray:
        """The distance of arrays over their last two axes, relative to the mean of both norms."""
        norms = np.linalg.norm(x, axis=(-2, -1)) + np.linalg.norm(y, axis=(-2, -1))
        return 2.0 * np.linalg.norm(x - y, axis=(-2, -1)) / norms

    return {
        "logits": [float(f"{x:.3g}") for x in apart(a.logits, b.logits)],
        "products": [float(f"{x:.3g}") for x in apart(a.products, b.products).mean(-1)],
    }


def cell(c: Config, arm: str, seed: int) -> Cell:
    """Makes one cell: the distances of all twins of one arm from one seed, in both dtypes."""
    found: Cell = {"step": [0, *checks(c)]}
    for dtype, kinds in TWINS.items():
        with jax.enable_x64(dtype == DOUBLE):
            start, data = jax.jit(functools.partial(init, c))(jax.random.key(seed)), pairs(c, seed)
            runs = {}
            for kind in ("", *kinds):
                first = twin(c, kind, start, jax.random.key(1000 + seed)) if kind else start
                runs[kind] = run(c, arm, first, data, dtype == DOUBLE)
        found[dtype] = {
            kind: drifts(runs[""], runs[kind]) | {"accuracy": float(f"{runs[kind].accuracy:.4g}")} for kind in kinds
        }
    return found


# Results ----------------------------------------------------------------------------------------------

SLICE = 1e-9
"""A drift in float64 below this counts as rounding that was enlarged by the steps."""


def values(result: Result, arm: str, dtype: str, kind: str, step: int) -> list[float]:
    """The drift of the logits after this number of steps, for every seed."""
    cells = result["cells"][arm].values()
    return [x[dtype][kind]["logits"][x["step"].index(step)] for x in cells]


def section(result: Result) -> str:
    """The results as Markdown: a table, and sentences about it."""
    c = Config(**result["settings"])
    middle, end = (max(n for n in CHECKS if n <= min(limit, c.steps)) for limit in (100, c.steps))
    absent = [arm for arm in result["arms"] if arm not in result["cells"]]
    lines = [[
        "arm", f"{SINGLE}, rotated: 1", str(middle), str(end), f"noise: {end}",
        f"{DOUBLE}, rotated: {middle}", str(end), f"noise: {end}", f"every symmetry: {middle}", str(end),
        "published, rotated",
    ]]
    columns = [
        (SINGLE, "rotated", 1), (SINGLE, "rotated", middle), (SINGLE, "rotated", end), (SINGLE, "noise", end),
        (DOUBLE, "rotated", middle), (DOUBLE, "rotated", end), (DOUBLE, "noise", end),
        (DOUBLE, "every symmetry", middle), (DOUBLE, "every symmetry", end),
    ]
    for arm in (arm for arm in result["arms"] if arm in result["cells"]):
        of_paper = [f"{step}: {low:.1e} to {high:.1e}" for step, (low, high) in PUBLISHED.get(arm, {}).items()]
        shown = [report.listed(values(result, arm, *column), ".0e") for column in columns]
        lines.append([arm, *shown, "; ".join(of_paper) or "–"])
    return "\n\n".join([
        f"Addition modulo {c.modulus} from {c.share:.0%} of all pairs, full batch, two blocks of width {c.width}, "
        f"{c.steps:,} steps without decay. A number is the relative distance of the logits of two twins on the pairs "
        f"held out, after so many steps. *Rotated*: queries and keys of every head in another basis. *Noise*: both "
        f"differ by {NOISE:g}. *Every symmetry*: bases, norm scales, values and outputs. {report.made_with(result)}",
        report.markdown(lines),
        " ".join(sentences(result, middle, end)),
        *([f"Not run yet: {', '.join(absent)}."] if absent else []),
    ])


LOGITS = "relative distance of the logits"


def sentences(result: Result, middle: int, end: int) -> Iterator[str]:
    """Sentences about the numbers in the table."""
    same = [x for arm in result["cells"] for x in values(result, arm, SINGLE, "same", end)]
    equal = report.on_seeds([x == 0.0 for x in same], "pairs")
    yield f"Two runs from the same weights end at the same logits, bit by bit, {equal}."
    for step in (1, middle, end):
        low, high = PUBLISHED["Adam"].get(step, (math.nan, math.nan))
        near = [low / 2 <= x <= 2 * high for x in values(result, "Adam", SINGLE, "rotated", step)]
        steps = f"{step} step{'s' * (step > 1)}"
        yield report.paper(
            f"under Adam rotated twins are {low:.2g} to {high:.2g} apart after {steps}", near,
            f"{LOGITS}, within a factor of two",
        )
    if end in PUBLISHED["Muon"]:
        (low, high), drift = PUBLISHED["Muon"][end], values(result, "Muon", SINGLE, "rotated", end)
        yield report.paper(
            f"under Muon, which has the symmetry, {SINGLE} drives rotated twins {low:.2g} to {high:.2g} apart",
            [low / 2 <= x <= 2 * high for x in drift], f"{LOGITS} after {end} steps, within a factor of two",
        )
    for arm in (arm for arm in (*(f"quotient({name})" for name in PLAIN), "DDC-AdamW") if arm in result["cells"]):
        early, late, noise = (
            values(result, arm, DOUBLE, kind, step)
            for kind, step in (("every symmetry", middle), ("every symmetry", end), ("noise", end))
        )
        held = [x <= SLICE for x in late]
        more = "" if all(held) else (
            f"; what it does to rounding it does to noise of {NOISE:g}, whose twins end {report.span(noise)} apart"
        )
        yield (
            f"Under {arm} twins by every symmetry are {report.span(early)} apart after {middle} steps in {DOUBLE} and "
            f"{report.span(late)} after {end} (at most {SLICE:g} {report.on_seeds(held)}){more}."
        )


def figure(result: Result, path: Path) -> None:
    """Draws the drift along the run, with a panel per optimizer and dtype."""
    fig, axes = report.plt.subplots(2, len(PLAIN), figsize=(3.6 * len(PLAIN), 6.4), layout="constrained", sharex=True,
                             sharey=True)
    fig.suptitle("Two sets of weights of one function, trained alike: how far their logits part")
    for row, dtype in zip(axes, (SINGLE, DOUBLE), strict=True):
        for axis, name in zip(row, PLAIN, strict=True):
            lines = [
                (name, "rotated", "tab:red", "-", "another basis"),
                (name, "noise", "tab:red", ":", f"noise of {NOISE:g}"),
                (f"quotient({name})", "rotated", "tab:blue", "-", "another basis, inside quotient"),
                (f"quotient({name})", "every symmetry", "tab:cyan", "--", "every symmetry, inside quotient"),
                (f"quotient({name})", "noise", "tab:blue", ":", f"noise of {NOISE:g}, inside quotient"),
            ]
            for arm, kind, color, style, label in lines:
                for n, cell in enumerate(result["cells"].get(arm, {}).values() if kind in TWINS[dtype] else ()):
                    drift = [max(x, 1e-17) for x in cell[dtype][kind]["logits"][1:]]
                    axis.plot(cell["step"][1:], drift, style, color=color, lw=1.4, label=None if n else label)
            for step, bounds in PUBLISHED.get(name, {}).items() if dtype == SINGLE else ():
                axis.plot([step] * 2, bounds, "k_-", lw=3, label="published")
            axis.set(title=f"{name}, {dtype}", xscale="log", yscale="log")
            axis.grid(alpha=0.3)
    for axis in axes[-1]:
        axis.set_xlabel("step")
    for axis in axes[:, 0]:
        axis.set_ylabel("relative distance of the logits")
    report.save(fig, path)

STUDY = harness.Study(__doc__, "twins_benchmark", harness.by_seed(ARMS, cell), section, figure, config=Config())
