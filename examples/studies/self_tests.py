"""Equivariance self-tests (DDC, C.15, Tables 3 and 7): does a run from g·θ take the same functions as a run from θ?

    python -m examples.studies self_tests            # three minutes on one core
    python -m examples.studies self_tests --full     # ten times the steps

There is one small problem for every construction of Table 3, and for the gauges of gated layers, grouped queries (A.6)
and rotary heads. It is trained from θ and from g·θ with a random element g: 20 steps in float64, 50 in float32. The
*gap* is the largest relative difference of a leaf between g·θ_t and the other run. For comparison there is AdamW's gap
from the same two starts.

DDC keeps the second moment v of a rotated head in the eigenbasis of its Gram matrix. When the basis changes from U_old
to U_new, with R = U_oldᵀ·U_new, its section B.8 says: rotate by R, "m exact, v |.|". If this means v ← |v·R|, the two
runs come apart as under AdamW, because v then depends on the signs of the first basis, which the machine chose. If it
means v ← v·|R|, the two runs stay together, but the rows of |R| sum to more than 1, so that v grows. The library takes
v ← v·(R∘R). The rows "B.8" below are the paper's pseudocode with each of the three. Prints the gap after the last step,
the largest of three seeds (for AdamW the smallest, in float64):

    construction                float64, 20 steps  float32, 50 steps  AdamW
    CE shift, bias              3.7e-16            2.7e-07            1.3e-03
    CE shift, row               3.0e-16            2.4e-07            1.1e-02
    ReLU rescale                5.3e-16            5.9e-07            2.7e-01
    SwiGLU rescale              7.3e-16            4.3e-07            2.2e-01
    LayerNorm scale             2.0e-15            4.0e-07            2.7e-01
    chained ReLU                1.5e-15            4.2e-07            1.4e-01
    chained ReLU, per unit      1.1e-15            1.0e-06            2.7e-01
    rotation, none              7.4e-16            3.9e-07            2.7e-01
    rotation, per_head_scalar   6.8e-16            3.6e-07            2.7e-01
    rotation, per_head_matrix   8.2e-16            4.2e-07            2.7e-01
    rotation, body_frame        2.6e-15            1.5e-06            2.7e-01
    rotation, body_frame_topk   2.6e-15            1.5e-06            2.7e-01
    rotation, grouped queries   3.3e-15            1.7e-06            2.5e-01
    torus of rotary heads       2.6e-15            2.0e-06            2.6e-01
    B.8, |v·R|                  4.4e-01            3.4e-01            2.7e-01
    B.8, v·|R|                  1.2e-15            2.3e-06            2.7e-01
    B.8, v·(R∘R)                1.8e-15            1.7e-06            2.7e-01

and writes self_tests.json and self_tests.png to outputs/studies. Shifts change AdamW's steps through weight decay only.
"""

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

import gauge_optax as go
from examples.studies import harness, report
from examples.studies.harness import Result
from examples.studies.table3 import FULL, TRANSPORTS, Config, Params, Problem, build

Gaps = dict[str, dict[str, list[float]]]
"""A cell: precision → "ours" or "adamw" → the gap before the first step and after each step."""

PRECISIONS = ("float64", "float32")


# Twins --------------------------------------------------------------------------------------------------


def start(problem: Problem, seed: int) -> tuple[Params, Params, Any]:
    """θ, g·θ and g. θ is drawn by NumPy, so that both precisions start from the same numbers."""
    draw = np.random.default_rng(seed).normal
    params = {
        name: jnp.asarray(draw(size=shape) / shape[-2:][0] ** 0.5 + (name == "scale"), float)
        for name, shape in problem.shapes.items()
    }
    group = go.product(problem.gauges)
    element = group.sample(jax.random.key(seed), params)
    return params, group.act(element, params), element


@functools.cache
def program(c: Config, row: str, precision: str, which: str) -> Callable[[Params, Params, Any], jax.Array]:
    """A compiled function for all seeds: (θ, g·θ, g) → the gap before the first step and after each step."""
    problem, make = build(c)[row]
    steps, rate = (c.steps64, c.rate64) if precision == "float64" else (c.steps32, c.rate32)
    tx = optax.adamw(rate, weight_decay=c.weight_decay) if which == "adamw" else make(rate, problem.gauges)
    group = go.product(problem.gauges)

    def apart(element: Any, params: Params, twin: Params) -> jax.Array:
        moved = group.act(element, params)
        return jnp.max(jnp.stack([jnp.linalg.norm(moved[p] - twin[p]) / jnp.linalg.norm(moved[p]) for p in moved]))

    def step(element: Any, twins: Any, _: None) -> tuple[Any, jax.Array]:
        after = []
        for params, state in twins:
            updates, state = tx.update(jax.grad(problem.loss)(params), state, params)
            after.append((optax.apply_updates(params, updates), state))
        return after, apart(element, after[0][0], after[1][0])

    @jax.jit
    def run(ours: Params, theirs: Params, element: Any) -> jax.Array:
        twins = [(params, tx.init(params)) for params in (ours, theirs)]
        _, gaps = jax.lax.scan(functools.partial(step, element), twins, None, steps)
        return jnp.concatenate([apart(element, ours, theirs)[None], gaps])

    return run


def cell(c: Config, row: str, seed: int) -> Gaps:
    """Makes one cell: the gaps of one construction and of AdamW, from one seed, in both precisions."""
    found: Gaps = {}
    for precision in PRECISIONS:
        with jax.enable_x64(precision == "float64"):
            begin = start(build(c)[row].problem, seed)
            runs = {which: program(c, row, precision, which)(*begin) for which in ("ours", "adamw")}
        found[precision] = {which: np.asarray(gaps).tolist() for which, gaps in runs.items()}
    return found


# Results ------------------------------------------------------------------------------------------------


def last(result: Result, row: str, precision: str, which: str) -> list[float]:
    """The gap after the last step, for every seed."""
    return [gaps[precision][which][-1] for gaps in result["cells"][row].values()]


def lines(result: Result) -> Iterator[list[str]]:
    """The rows of the table: per construction, how far twins end apart.

    Of the seeds, it has the one for which they end farthest apart, and for AdamW the one for which they end nearest.
    """
    steps = [result["settings"][f"steps{precision[-2:]}"] for precision in PRECISIONS]
    yield ["construction", *(f"{p}, {n} steps" for p, n in zip(PRECISIONS, steps, strict=True)), "AdamW"]
    for row in result["arms"]:
        worst = [max(last(result, row, precision, "ours")) for precision in PRECISIONS]
        yield [row, *(f"{x:.1e}" for x in worst), f"{min(last(result, row, 'float64', 'adamw')):.1e}"]


def section(result: Result) -> str:
    """The results as Markdown: a table, and sentences about it."""
    rows = [[cell.replace("|", r"\|") for cell in row] for row in lines(result)]
    library = [row for row in result["arms"] if kind(row) == LIBRARY]
    worst = [max(max(last(result, row, precision, "ours")) for row in library) for precision in PRECISIONS]
    readings = [f"{how}: {report.span(last(result, f'B.8, {how}', 'float64', 'ours'))}" for how in TRANSPORTS]
    said = (f"Twins θ and g·θ; the largest relative gap of a leaf after the last step, mapped back by g, over seeds "
            f"{', '.join(map(str, result['seeds']))} (for AdamW the smallest, in float64). The library's worst is "
            f"{worst[0]:.1e} in float64, {worst[1]:.1e} in float32. In float64, B.8 with its second moment carried as "
            f"{'; as '.join(readings)}.")
    return f"{said}\n\n{report.plain(rows)}"


# Figure -------------------------------------------------------------------------------------------------

LIBRARY, ADAMW = "gauge_optax, every gauge", "AdamW, same twins"
COLORS = {ADAMW: "tab:red", LIBRARY: "tab:blue", "|v·R|": "tab:orange", "v·|R|": "tab:green", "v·(R∘R)": "tab:purple"}
LIMITS = {"float64": 1e-8, "float32": 1e-4}
LEAST = 1e-17


def kind(row: str) -> str:
    """The kind of a row, which decides its colour: the library, or one of the three meanings of B.8."""
    return row.removeprefix("B.8, ") if row.startswith("B.8") else LIBRARY


def figure(result: Result, path: Path) -> None:
    """Draws the gap along the run, in each precision, and the gap of each construction after the last step."""
    fig, (*runs, ends) = report.plt.subplots(1, 3, figsize=(17, 5.6), layout="constrained", width_ratios=(1, 1, 1.15))
    fig.suptitle("θ and g·θ are one function. How far do their runs come apart?")
    for axis, precision in zip(runs, PRECISIONS, strict=True):
        _along(axis, result, precision)
    _at_the_end(ends, result)
    named = {f"B.8 with v ← {name}" if name in TRANSPORTS else name: color for name, color in COLORS.items()}
    handles = [Line2D([], [], color=color, lw=2, label=name) for name, color in named.items()]
    handles.append(Line2D([], [], color="gray", ls=":", label="what the tests allow: 1e-8, 1e-4"))
    fig.legend(handles=handles, loc="outside lower center", ncols=len(handles))
    report.save_as_is(fig, path)


def _along(axis: Axes, result: Result, precision: str) -> None:
    for row in result["arms"]:
        lines = {kind(row): "ours"} | ({ADAMW: "adamw"} if kind(row) == LIBRARY else {})
        for gaps in result["cells"][row].values():
            for name, which in lines.items():
                axis.plot(np.maximum(gaps[precision][which], LEAST), color=COLORS[name], lw=1, alpha=0.5)
    axis.axhline(LIMITS[precision], color="gray", ls=":")
    axis.set(title=f"{precision}, every seed", xlabel="step", yscale="log", ylim=(LEAST, 10))
    axis.set_ylabel("largest relative gap of a leaf, mapped back by g")
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    axis.grid(alpha=0.3)


def _at_the_end(axis: Axes, result: Result) -> None:
    rows = list(result["arms"])
    for at, row in enumerate(rows):
        for precision, marker in zip(PRECISIONS, "os", strict=True):
            for which, color in (("adamw", COLORS[ADAMW]), ("ours", COLORS[kind(row)])):
                gaps = np.maximum(last(result, row, precision, which), LEAST)
                axis.plot(gaps, [at] * len(gaps), marker, color=color, ms=5, alpha=0.6)
    for precision in PRECISIONS:
        axis.axvline(LIMITS[precision], color="gray", ls=":")
    axis.set(title="After the last step: ● float64, ■ float32", xscale="log", xlim=(LEAST, 10), xlabel="gap")
    report.rows(axis, rows)
    axis.grid(alpha=0.3)


STUDY = harness.Study(
    __doc__, "self_tests", harness.by_seed(lambda c: list(build(c)), cell), section, figure, config=Config(), full=FULL,
    digits=3,
)
