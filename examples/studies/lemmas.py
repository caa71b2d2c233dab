"""Statements of DDC's section 4 and appendix A that a computation can contradict, one row of a table each.

    python -m examples.studies lemmas            # three minutes on one core

* Lemma 17: how far the eigenbasis of a head turns in a step, and what that does to a moment that only follows signs;
* Theorem 1 (iii): whether the order of a minimum can be read along a run;
* Theorem 1 (iv), Lemma 23: how far a run at rate η is from the flow that it follows, and whether it leaves the slice;
* Remark 8: what drift along orbits does to a read in stored coordinates;
* Remark 12: two runs that differ in one switch, the removal of the part of a step that only rotates heads.

Heads are those of the one-layer attention of the self-tests (C.15), pairs u, v those of the diagonal network (C.4). The
text that we have of the paper has lost the constants of its formulas; the bounds below state theirs. Everything is in
float64.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import gauge_optax as go
from examples.studies import diagonal_network, harness, report, self_tests, table3
from examples.studies.digits import observed
from examples.studies.harness import Result
from examples.studies.minimum import in_float64

Params = dict[str, jax.Array]
Cell = dict[str, Any]
Verdict = tuple[str, str, bool]
"""What was measured, what it is held against, and whether it holds."""


@dataclass(frozen=True)
class Config:
    """Lengths of the runs."""

    steps: int = 200  # of Lemma 17
    rate: float = 1e-3
    toggled: int = 1000  # steps of Remark 12
    sgd: int = 4000
    adamw: int = 1000
    ddc: int = 1000
    finest: int = 4096  # steps of the run that stands for the flow


FULL = Config()
GAUGE = diagonal_network.GAUGE
NONZERO = diagonal_network.Config().nonzero
ORDER = 2.0  # of a minimum of u·v at u = v = 0
CLOSE = 0.05  # reads of the order within this share count as right
ROUNDING = 1e-10


def _run(tx: optax.GradientTransformation, loss: Callable[[Params], jax.Array], params: Params, steps: int) -> Any:
    """The end, and before every step the point and the state of the chain's first link."""

    def kept(params: Params, gradient: Params, state: Any, *_: Any) -> Any:
        return params, state[0] if type(state) is tuple else ()

    def whole(params: Params) -> Any:
        step = observed(tx, lambda params, _: loss(params), kept)
        (end, _), way = jax.lax.scan(step, (params, tx.init(params)), None, steps)
        return end, way

    return jax.jit(whole)(params)


# Lemma 17: the eigenbasis of a head ------------------------------------------------------------------------


def body_frame(c: Config, seed: int) -> Cell:
    """Along a run: the turn of every head's eigenbasis against √2·‖ΔM‖/γ, and the error of moments without the turn."""
    problem = table3.attention(table3.Config())
    params, _, _ = self_tests.start(problem, seed)
    tx = optax.chain(table3.b8("v·(R∘R)"), optax.scale_by_learning_rate(c.rate))
    _, (way, states) = _run(tx, problem.loss, params, c.steps)
    turns, bounds, moments, swaps, apart, totals = [], [], [], 0, 0, []
    for pair in table3.PAIRS:
        grams = np.asarray(jax.vmap(lambda p, pair=pair: table3.gram(p, p, pair))(way))
        for head in range(grams.shape[1]):
            gradient_part = np.asarray(states.mu[pair[0]])[:, head]
            followed, largest, widest = 0.0, 0.0, 0.0
            for before, after, moment in zip(grams[:-1, head], grams[1:, head], gradient_part[1:], strict=False):
                (values, old), (_, new) = np.linalg.eigh(before), np.linalg.eigh(after)
                change, gap = after - before, float(np.diff(values).min())
                overlap = old.T @ new
                pinned = new * np.sign(np.diag(overlap))
                bound = float(2**0.5 * np.linalg.norm(change) / gap)
                turn = old.T @ pinned
                error = float(np.linalg.norm(moment @ turn - moment))
                largest, widest = max(largest, float(np.linalg.norm(moment))), max(widest, bound)
                # Moments forget: what a step adds to the error is multiplied by β₁ at the next.
                followed = 0.9 * followed + error
                if np.linalg.norm(change, 2) >= 0.5 * gap:
                    apart += 1
                    continue
                swaps += int((np.abs(overlap).argmax(0) != np.arange(len(values))).any())
                turns.append(float(np.linalg.norm(pinned - old)))
                bounds.append(bound)
                moments.append(error / max(bound * float(np.linalg.norm(moment)), 1e-300))
            totals.append(followed / (c.steps * widest * largest))
    ratios = np.array(turns) / np.array(bounds)
    shown = np.argsort(bounds)[:: max(1, len(bounds) // 80)]
    return {
        "largest_ratio": float(ratios.max()), "swaps": swaps, "separated": len(turns), "not_separated": apart,
        "largest_moment_ratio": max(moments), "largest_total_ratio": max(totals),
        "turns": [turns[k] for k in shown], "bounds": [bounds[k] for k in shown],
    }


# The diagonal network --------------------------------------------------------------------------------------


def _start(seed: int) -> tuple[Params, Callable[[Params], jax.Array]]:
    params, data = diagonal_network.make(diagonal_network.Config(), seed)
    data = in_float64(data)
    return in_float64(params), lambda p: diagonal_network.loss(p, data)


def _arms(c: Config) -> dict[str, tuple[optax.GradientTransformation, int]]:
    """The optimizers and their numbers of steps; until a pair's product is 1 % of the start, or so far."""
    rates = diagonal_network.Config()
    ddc = functools.partial(go.ddc_adamw, 1e-4, GAUGE, weight_decay=0.0)
    return {
        "SGD": (optax.sgd(rates.sgd_rate), c.sgd),
        "AdamW": (optax.adamw(rates.learning_rate, weight_decay=0.0), c.adamw),
        "DDC": (ddc(), c.ddc),
        "DDC, balanced rest": (ddc(rest="balanced"), c.ddc),
    }


def _pairs(p: Params, x: jax.Array) -> jax.Array:
    return (x @ (p["u"] * p["v"]))[:, None]


def _approach(last: int, points: int = 30) -> np.ndarray:
    """The steps that are read, up to the last."""
    return np.unique(np.linspace(0, last, points).astype(int))


def readable(c: Config, seed: int) -> Cell:
    """The order from the quotient Fisher along each arm's run, pair by pair, against the quotient arc length."""
    params, loss = _start(seed)
    found: Cell = {}
    for name, (tx, steps) in _arms(c).items():
        if name == "DDC, balanced rest":
            continue  # on the quotient it is DDC
        _, (way, _) = _run(tx, loss, params, steps)
        dead = {key: np.asarray(x)[:, NONZERO:] for key, x in way.items()}
        sizes = np.abs(dead["u"] * dead["v"]).sum(1)
        last = int(np.argmin(sizes)) if name == "DDC" else steps - 1  # then it oscillates
        single, together = [[pair] for pair in range(0, dead["u"].shape[1], 8)], slice(None)
        fits = [_order({key: x[_approach(last)][:, pairs] for key, x in dead.items()}) for pairs in (*single, together)]
        right = [fit.readable and abs(fit.order - ORDER) <= CLOSE * ORDER for fit in fits]
        found |= {f"{name}, right": sum(right[:-1]), f"{name}, together": int(right[-1]), "pairs": len(single)}
        found[f"{name}, exponents"] = [fits[-1].fit.halves[0], fits[-1].fit.halves[1]]
    return found


def _order(way: Params) -> Any:
    """The order of these pairs along a run, (points, pairs) each of u and v."""
    points = [{key: jnp.asarray(x[at]) for key, x in way.items()} for at in range(len(way["u"]))]
    curvature = []
    for point in points:
        ggn = go.measure.GGN(_pairs, point, [jnp.eye(point["u"].size)], "gaussian")
        quotient = go.measure.quotient_fisher(ggn, GAUGE)
        curvature.append(float(go.measure.directional_fisher(quotient, point)))
    lengths = go.measure.quotient_arc_length(points, GAUGE, end=jax.tree.map(jnp.zeros_like, points[0]))
    return go.measure.kl_order(lengths, curvature)


def discrete(c: Config, seed: int) -> Cell:
    """Ends of runs at rates η from one start after one time, beside the flow; moments have one memory in time."""
    params, loss = _start(seed)
    time, fast, slow = 0.006, 0.0015, 0.015  # memory of the first and of the second moment, in units of η·steps

    def end(start: Params, steps: int) -> Params:
        eta = time / steps
        tx = go.ddc_adamw(eta, GAUGE, b1=1.0 - eta / fast, b2=1.0 - eta / slow, weight_decay=0.0)
        return _run(tx, loss, start, steps)[0]

    def product(p: Params) -> jax.Array:
        return p["u"] * p["v"]

    flow, counts = product(end(params, c.finest)), [4, 8, 16, 32, 64, 128, 256]
    ends = {count: end(params, count) for count in counts}
    errors = [float(jnp.linalg.norm(product(ends[count]) - flow)) for count in counts]
    rates = [time / count - time / c.finest for count in counts]  # the fine run is itself off by its own rate
    twin = GAUGE.act(GAUGE.sample(jax.random.key(seed), params), params)
    theirs = end(twin, counts[0])
    drifts = [go.measure.drift(params, x, GAUGE)[0][""] for x in ends.values()]
    gap = jnp.linalg.norm(product(theirs) - product(ends[counts[0]])) / jnp.linalg.norm(product(theirs))
    return {
        "errors": errors, "rates": rates, "memory": fast,
        "slope": float(np.polyfit(np.log(rates[2:]), np.log(errors[2:]), 1)[0]),
        "excess": [a / b / (errors[-1] / rates[-1]) - 1 for a, b in zip(errors, rates, strict=True)],
        "drift": max(float(jnp.abs(x).max()) for x in drifts), "twins": float(gap),
    }


def path_noise(c: Config, seed: int) -> Cell:
    """Exponents of the Fisher along a direction that is fixed in stored coordinates, in each pair's own length."""
    params, loss = _start(seed)
    found: Cell = {}
    for name, (tx, steps) in _arms(c).items():
        _, (way, _) = _run(tx, loss, params, steps)
        u, v = (np.asarray(way[key])[:, NONZERO:] for key in "uv")
        at_start = np.stack([u[0], v[0]]) / np.hypot(u[0], v[0])
        sizes = np.abs(u * v)
        stored, own, scatter = [], [], []
        for pair in range(u.shape[1]):
            small = sizes[:, pair] < 0.01 * sizes[0, pair]
            at = _approach(int(small.argmax()) if small.any() else len(sizes) - 1)
            lengths = np.sqrt(2.0 * sizes[at, pair])  # of the balanced pair from (0, 0)
            read = np.square(v[at, pair] * at_start[0, pair] + u[at, pair] * at_start[1, pair])
            line = np.polyfit(np.log(lengths), np.log(read), 1)
            scatter.append(float(np.std(np.log(read) - np.polyval(line, np.log(lengths)))))
            stored.append(float(line[0]))
            own.append(float(np.polyfit(np.log(lengths), np.log(2.0 * sizes[at, pair]), 1)[0]))
            if not pair:
                found |= {f"{name}, lengths": lengths.tolist(), f"{name}, read": read.tolist()}
        ratio = np.log(np.abs(u / v))
        spread = np.sqrt(np.mean(np.square(ratio - ratio[0]), 1))
        found |= {
            f"{name}, mean": float(np.mean(stored)), f"{name}, spread": float(np.std(stored)),
            f"{name}, scatter": float(np.mean(scatter)), f"{name}, on the quotient": float(np.mean(own)),
            f"{name}, drift": float(spread[-1]),
        }
        if name == "AdamW":
            steps_taken = np.arange(10, 101)
            growth = np.polyfit(np.log(steps_taken), np.log(spread[10:101] ** 2), 1)[0] if len(spread) > 100 else 0.0
            found["growth"] = float(growth)
    return found


# Remark 12: the switch -------------------------------------------------------------------------------------

# What has one second moment, and how the figure calls that.
SHARES = {"entry": "entry (body frame)", "tensor": "tensor", "head": "head"}


def toggle(c: Config, seed: int) -> Cell:
    """Two runs per second moment, with and without the projection: what the switch moves."""
    problem = table3.attention(table3.Config())
    params, _, _ = self_tests.start(problem, seed)
    found: Cell = {}
    for share in SHARES:
        ends = []
        for project in (True, False):
            tx = optax.chain(table3.b8("v·(R∘R)", share, project), optax.scale_by_learning_rate(c.rate))
            ends.append(_run(tx, problem.loss, params, c.toggled)[0])
        scores = [jnp.einsum("hde,hfe->hdf", p["query"], p["key"]) for p in ends]
        queries = [p["query"] for p in ends]
        for what, (on, off) in (("query", queries), ("scores", scores)):
            found[f"{share}, {what}"] = float(jnp.linalg.norm(on - off) / jnp.linalg.norm(on))
    return found


# Cells and rows --------------------------------------------------------------------------------------------

FLOW = "Theorem 1 (iv), Lemma 23"
CHECKS: dict[str, Callable[[Config, int], Cell]] = {
    "Lemma 17": body_frame,
    "Theorem 1 (iii)": readable,
    FLOW: discrete,
    "Remark 8": path_noise,
    "Remark 12": toggle,
}


def cell(c: Config, name: str, seed: int) -> Cell:
    """One check from one seed, in float64."""
    with jax.enable_x64(True):
        return CHECKS[name](c, seed)


def _below(value: float, bound: float, form: str = ".2g") -> Verdict:
    return f"{value:{form}}", f"≤ {bound:g}", value <= bound


def _near(value: float, expected: float, within: float) -> Verdict:
    return f"{value:.3f}", f"{expected:g} ± {within:g}", abs(value - expected) <= within


def _beside(x: float, y: float, form: str = ".2g") -> Verdict:
    """The first less than a tenth of the second."""
    return f"{x:{form}}", f"< {0.1 * y:{form}}", x < 0.1 * y


def _together(found: Cell, name: str, expected: bool) -> Verdict:
    """The exponents far from the minimum and near it: a power law has one."""
    far, near = found[f"{name}, exponents"]
    right = bool(found[f"{name}, together"])
    return f"ℓ^{far:.2f} to ℓ^{near:.2f}", "2 and 2" if expected else "no power law of 2", right == expected


def _counted(found: Cell, name: str) -> Verdict:
    right = found[f"{name}, right"]
    return f"{right} of {found['pairs']} pairs", "all", right == found["pairs"]


ROWS: list[tuple[str, str, Callable[[Cell], Verdict]]] = [
    ("Lemma 17", "(i) with signs pinned, the eigenbasis turns by at most √2·‖ΔM‖/γ in a step: largest share of it",
     lambda x: _below(x["largest_ratio"], 1.0)),
    ("Lemma 17", "(ii) if ‖ΔM‖₂ < γ/2, pinning takes no eigenvector for another: how many",
     lambda x: (f"{x['swaps']} of {x['separated']:,}", "0", x["swaps"] == 0)),
    ("Lemma 17", "Remark 18: the condition of Lemma 17 (ii) holds in every step: share of steps and heads without",
     lambda x: _below(x["not_separated"] / (x["not_separated"] + x["separated"]), 0.0, ".1%")),
    ("Lemma 17", "(iii) a moment that follows signs alone is off by at most √2·‖ΔM‖/γ of itself: largest share of it",
     lambda x: _below(x["largest_moment_ratio"], 1.0)),
    ("Lemma 17", "(iv) after T steps by at most T times the largest of these: largest share of it",
     lambda x: _below(x["largest_total_ratio"], 1.0)),
    ("Theorem 1 (iii)", "DDC's run reads k = 2 pair by pair (quotient Fisher against quotient length, within 5 %)",
     lambda x: _counted(x, "DDC")),
    ("Theorem 1 (iii)", "SGD's run reads k = 2 pair by pair", lambda x: _counted(x, "SGD")),
    ("Theorem 1 (iii)", "AdamW's run does not read k = 2 pair by pair",
     lambda x: (f"{x['AdamW, right']} of {x['pairs']} pairs", "none", x["AdamW, right"] == 0)),
    ("Theorem 1 (iii)", "DDC's run reads k = 2 of all pairs together", lambda x: _together(x, "DDC", True)),
    ("Theorem 1 (iii)", "SGD's run reads k = 2 of all pairs together", lambda x: _together(x, "SGD", True)),
    ("Theorem 1 (iii)", "AdamW's run does not read k = 2 of all pairs together",
     lambda x: _together(x, "AdamW", False)),
    (FLOW, "Theorem 1 (iv): DDC's distance from its flow, in u·v, is of first order in η: exponent",
     lambda x: _near(x["slope"], 1.0, 0.1)),
    (FLOW, "Lemma 23 (i): for η far below the memory τ of moments the order is all: excess, τ/16",
     lambda x: _below(abs(x["excess"][4]), 0.05, ".1%")),
    (FLOW, "Lemma 23 (ii): at η = τ a further term is comparable: excess",
     lambda x: (f"{x['excess'][0]:.0%}", "> 10%", x["excess"][0] > 0.1)),
    (FLOW, "Lemma 23 (iii): at any η no part of it is along the orbit: largest change of log‖u‖ of a pair",
     lambda x: _below(x["drift"], ROUNDING, ".0e")),
    (FLOW, "Lemma 23 (iii): twins stay one run at η = τ: gap in u·v",
     lambda x: _below(x["twins"], ROUNDING, ".0e")),
    ("Remark 8", "AdamW's drift, squared, grows at least like the number of steps (10 to 100): exponent",
     lambda x: (f"{x['growth']:.2f}", "≥ 1", x["growth"] >= 1.0)),
    ("Remark 8", "AdamW's stored read keeps the exponent 2 on average",
     lambda x: _near(x["AdamW, mean"], 2.0, 2.0 * CLOSE)),
    ("Remark 8", "AdamW's stored read scatters from pair to pair; DDC's with a balanced rest less than a tenth as much",
     lambda x: _beside(x["DDC, balanced rest, spread"], x["AdamW, spread"])),
    ("Remark 8", "SGD's stored read scatters less than a tenth as much as AdamW's",
     lambda x: _beside(x["SGD, spread"], x["AdamW, spread"])),
    ("Remark 8", "DDC's with a balanced rest reads 2 in stored coordinates",
     lambda x: _near(x["DDC, balanced rest, mean"], 2.0, 2.0 * CLOSE)),
    ("Remark 12", "the switch moves the queries under the body frame, more than 1 %",
     lambda x: (f"{x['entry, query']:.3f}", "> 0.01", x["entry, query"] > 0.01)),
    ("Remark 12", "the switch moves the scores W_Q·W_Kᵀ, which no rotation moves, more than 1 %",
     lambda x: (f"{x['entry, scores']:.3f}", "> 0.01", x["entry, scores"] > 0.01)),
    ("Remark 12", "with one second moment per tensor it moves the queries a sixth as far or less",
     lambda x: (f"{x['tensor, query']:.3f}", f"≤ {x['entry, query'] / 6:.3f}",
                x["tensor, query"] <= x["entry, query"] / 6)),
    ("Remark 12", "with one second moment per head it moves nothing (Lemma 10, ii): queries",
     lambda x: _below(x["head, query"], ROUNDING, ".0e")),
]


# Results ---------------------------------------------------------------------------------------------------


def section(result: Result) -> str:
    """The table, and what it says."""
    lines, failed = [["statement", "measured", "held against", "holds"]], []
    for name, statement, row in ROWS:
        measured, bounds, holds = zip(*(row(found) for found in result["cells"][name].values()), strict=True)
        shown = [x[0] if len(set(x)) == 1 else " / ".join(x) for x in (measured, bounds)]
        count = f"all {len(holds)} seeds" if all(holds) else f"{sum(holds) or 'NONE'} of {len(holds)} seeds"
        failed += [] if all(holds) else [f"{_titled(name, statement)} ({count})"]
        lines.append([_titled(name, statement), *shown, count])
    listed = "; ".join(failed) if failed else "none"
    return "\n\n".join([
        "Heads of the attention of C.15; pairs u·v of the diagonal network of C.4. Seeds "
        f"{', '.join(map(str, result['seeds']))}; float64, {result['machine']}. M is a head's Gram matrix, γ the "
        "smallest gap of its eigenvalues, τ the memory of the first moment in units of η times steps. The paper's "
        "constants are lost in the text that we have: those of the third column are ours.",
        report.plain(lines),
        f"Statements that fail on a seed: {listed}.",
        "Pair by pair and on the quotient the curvature is 2·|u·v| and the length √(2·|u·v|), whatever the optimizer: "
        "a run reads 2 unless it turns back, AdamW's too. All pairs together have one exponent only if they die at one "
        f"speed. DDC's do, as they start from one product; SGD's and AdamW's do not. {_stored(result)} "
        f"{_switch(result)}",
    ])


def _titled(name: str, statement: str) -> str:
    """The statement behind the name of what it is part of, if it does not name that itself."""
    return statement if statement.startswith(("Lemma", "Theorem", "Remark")) else f"{name}: {statement}"


def _stored(result: Result) -> str:
    found = result["cells"]["Remark 8"].values()
    means = {name: report.span([x[f"{name}, mean"] for x in found], ".2f") for name in _arms(Config())}
    return (
        "In stored coordinates, along the direction of the start, the Fisher's exponents are "
        + ", ".join(f"{mean} ({name})" for name, mean in means.items())
        + " on average over pairs, where the balanced point reads 2. SGD conserves u² − v², not log|u| − log|v|, and "
        "the ratio runs away as u·v dies; at the anchor's rest v takes all of it. Exponents of stored reads are right "
        "only where that ratio is held, or on the quotient."
    )


def _switch(result: Result) -> str:
    found = list(result["cells"]["Remark 12"].values())
    moved = report.span([x["entry, query"] for x in found], ".3f")
    times = report.span([x["entry, query"] / x["tensor, query"] for x in found], ".1f")
    return (
        f"Remark 12's switch moves the queries by {moved} of their norm in the body frame, {times} times as far as "
        "with one second moment per tensor; the paper has 0.122 and six, on a larger network (§5.5)."
    )


def figure(result: Result, path: Path) -> None:
    """Turns beside their bound, the distance from the flow, stored reads, the switch."""
    fig, (turns, flow, stored, switch) = report.panels(4, "What the lemmas say, and what is measured", grid=True)
    for found in result["cells"]["Lemma 17"].values():
        turns.plot(found["bounds"], found["turns"], ".", ms=3, color="tab:blue", alpha=0.5)
    ends = np.array([x for found in result["cells"]["Lemma 17"].values() for x in found["bounds"]])
    turns.plot([ends.min(), ends.max()], [ends.min(), ends.max()], "k:", lw=1, label="the bound")
    turns.set(title="Lemma 17: turn of a head's eigenbasis", xscale="log", yscale="log", xlabel="√2·‖ΔM‖/γ")
    turns.set_ylabel("‖turn‖ in a step")
    for number, found in enumerate(result["cells"][FLOW].values()):
        label = None if number else "DDC"
        flow.plot(
            np.array(found["rates"]) / found["memory"], found["errors"], "o-", ms=4, color="tab:blue", label=label
        )
    shares = np.array(found["rates"]) / found["memory"]
    flow.plot(shares, shares / shares[-1] * found["errors"][-1], "k:", lw=1, label="first order")
    flow.set(title="Theorem 1 (iv): distance from the flow", xscale="log", yscale="log", xlabel="η/τ")
    flow.set_ylabel("‖u·v − that of the flow‖")
    first = next(iter(result["cells"]["Remark 8"].values()))
    for name, color in zip(_arms(Config()), ("tab:orange", "tab:red", "tab:green", "tab:blue"), strict=True):
        lengths, read = np.array(first[f"{name}, lengths"]), np.array(first[f"{name}, read"])
        stored.plot(lengths, read, color=color, label=name)
    stored.plot(lengths, np.square(lengths), "k:", lw=1, label="exponent 2")
    stored.set(title="Remark 8: Fisher in stored coordinates", xscale="log", yscale="log")
    stored.xaxis.set_minor_formatter("")
    stored.set(xlabel="length of the balanced pair", ylabel="along the start's direction, one pair")
    for number, found in enumerate(result["cells"]["Remark 12"].values()):
        for at, share in enumerate(SHARES):
            for what, marker, color in (("query", "o", "tab:blue"), ("scores", "s", "tab:orange")):
                label = None if number or at else what
                switch.plot(at, max(found[f"{share}, {what}"], 1e-16), marker, color=color, label=label)
    switch.set(title="Remark 12: what the projection moves", yscale="log", ylabel="relative distance of two runs")
    switch.set_xlabel("what has one second moment")
    switch.set_xticks(range(len(SHARES)), list(SHARES.values()))
    for axis in (turns, flow, stored, switch):
        axis.legend(fontsize=8)
    report.save_as_is(fig, path)


STUDY = harness.Study(
    __doc__, "lemmas", harness.by_seed(list(CHECKS), cell), section, figure, config=Config(), full=FULL,
    digits=harness.DIGITS,
)
