"""Where learnable multipliers drift: networks that part queries' multipliers from keys' (GaugeFix-LRM).

    python -m examples.studies gaugefix_networks                   # half an hour on one core

In the network of `gaugefix_lrm` multipliers that start equal get equal gradients. Three networks part them, and one has
all three causes: biases, which no multiplier scales; rotary embeddings, where logits see products of two entries of a
pair; grouped queries, where one multiplier of keys faces several of queries. The sum of r·∂L/∂r over a head, biases in,
is the same on both sides in every network. Entry by entry both sides differ by 3e-7 in the plain one, and by
5, 65 and 55 % in these three (medians over heads and steps), and Adam divides entry by entry.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from examples.studies import harness, report
from examples.studies.gaugefix_lrm import SEEDS, Arm, Cell, program, small, trained
from examples.studies.harness import Result
from models import lm

NETWORKS: dict[str, dict[str, Any]] = {
    "plain": {},
    "biases": {"bias": True},
    "rotary": {"rope": True},
    "grouped": {"kv_heads": 2},
    "all three": {"bias": True, "rope": True, "kv_heads": 2},
}
"""Name → switches of the configuration; two query heads per key head are *grouped*."""
NETWORK_ARMS = {
    "A": Arm("A", {}),
    "C": Arm("C", {}),
    **{f"B, every {n}": Arm("B", {"every": n}) for n in (1, 100)},
    **{f"B, every {n}, stale": Arm("B", {"every": n, "transport": False}) for n in (1, 100)},
    "quotient": Arm("C", {}, quotient={}),
    "quotient, balanced": Arm("C", {}, quotient={"rest": "balanced"}),
}
RATE, FAST, SHORT, LONG = 3e-3, 1e-2, 300, 2_000
NETWORK_RUNS = [
    *((network, arm, RATE, SHORT) for network in NETWORKS for arm in NETWORK_ARMS),
    *((network, arm, FAST, SHORT) for network in NETWORKS for arm in ("A", "C", "B, every 1", "B, every 100")),
    *(("all three", arm, RATE, LONG) for arm in NETWORK_ARMS),
]
"""Network, arm, peak rate and steps: all arms in a short run, some at a higher rate, all in a long run."""


def sides(config: lm.LMConfig, tree: Any) -> list[tuple[dict[str, jax.Array], dict[str, jax.Array]]]:
    """Per layer what the gauge moves on either side, multipliers and biases, as (key heads, query heads each, e)."""
    shape = (config.kv_heads, -1, config.d_head)

    def of(layer: Any) -> dict[str, jax.Array]:
        found = {"rows": layer["rows"].reshape(shape)}
        return found | ({"bias": layer["layer"]["bias"].reshape(shape)} if config.bias else {})

    blocks = [tree["blocks"][k]["attn"] for k in range(config.layers)]
    return [(of(block["query"]), of(block["key"])) for block in blocks]


def observed(config: lm.LMConfig) -> Callable[[Any, Any, Any], dict[str, jax.Array]]:
    """Of one step, (layers, key heads): the coordinates after it, and how both sides' gradients differ before it."""

    def squares(side: dict[str, jax.Array]) -> jax.Array:
        return sum((jnp.sum(x * x, (1, 2)) for x in side.values()), jnp.zeros(config.kv_heads))

    def of(params: Any, grads: Any, after: Any) -> dict[str, jax.Array]:
        kept: dict[str, list[jax.Array]] = {name: [] for name in ("query", "key", "sides", "entries", "sums")}
        for query, key in sides(config, after):
            for name, side in (("query", query), ("key", key)):
                kept[name].append(0.5 * jnp.log(jnp.mean(side["rows"] ** 2, (1, 2))))
            kept["sides"].append(0.5 * jnp.log(squares(query) / squares(key)))
        # What the logarithm of an entry sees of the gradient: r·∂L/∂r.
        scaled = jax.tree.map(jnp.multiply, sides(config, params), sides(config, grads))
        for query, key in scaled:
            apart, of_keys = jnp.broadcast_arrays(query["rows"] - key["rows"], key["rows"])
            kept["entries"].append(jnp.sqrt(squares({"rows": apart}) / squares({"rows": of_keys})))
            sums = [sum(jnp.sum(x, (1, 2)) for x in side.values()) for side in (query, key)]
            size = sum(jnp.sum(jnp.abs(x), (1, 2)) for x in key.values())
            kept["sums"].append(jnp.abs(sums[0] - sums[1]) / size)
        return {name: jnp.stack(x) for name, x in kept.items()}

    return of


def network_cell(name: str, arm: str, rate: float, steps: int, seeds: Sequence[int]) -> Cell:
    """One arm on one network, per seed: the largest drift of each coordinate, the last, products, loss, gradients."""
    task = small(steps, rate, **NETWORKS[name])
    compiled = program(task, NETWORK_ARMS[arm], "float32", observed(task.config))
    out: Cell = {key: [] for key in ("loss", "product", "entries", "sums")}
    for seed in seeds:
        params = compiled.start(seed)[0]
        start = observed(task.config)(params, params, params)
        kept, losses = trained(task, compiled, seed, steps)
        ratio, anchor = kept["query"] - kept["key"], kept["query"] - start["query"]
        places = {"ratio": ratio, "anchor": anchor, "sides": kept["sides"] - start["sides"]}
        drifts = {key: np.abs(np.asarray(x)).max((1, 2)) for key, x in places.items()}
        for key, drift in drifts.items():
            out.setdefault(key, []).append(float(drift.max()))
            out.setdefault(f"{key}_end", []).append(float(drift[-1]))
        out["product"].append(float(np.exp(kept["query"] + kept["key"])[-1].mean()))
        # A head whose gradient vanishes has no direction to compare: the median over heads, layers and steps.
        out["entries"].append(float(np.median(kept["entries"])))
        out["sums"].append(float(np.median(kept["sums"])))
        out["loss"].append(float(losses[0]))
        if seed == seeds[0]:
            out["curves"] = {key: drift[:: max(1, steps // 100)] for key, drift in drifts.items()}
    return out


def cell_name(network: str, arm: str, rate: float, steps: int) -> str:
    """Of a run of `NETWORK_RUNS`."""
    return f"{network}, {arm}, rate {rate:g}, {steps} steps"


DRAWN = [arm for arm in NETWORK_ARMS if "stale" not in arm]
"""With stale moments curves are those without."""


def figure(result: Result, path: Path) -> None:
    """Along the short runs, a column per network: Eq. (3) above, what the gauge reads below."""
    fig, axes = report.plt.subplots(
        2, len(NETWORKS), figsize=(3.1 * len(NETWORKS), 6.6), layout="constrained", sharex=True, sharey=True
    )
    for column, network in zip(axes.T, NETWORKS, strict=True):
        for k, arm in enumerate(DRAWN):
            curves = result["cells"][cell_name(network, arm, RATE, SHORT)]["curves"]
            style = {"color": report.plt.get_cmap("tab10")(k), "lw": 3.0 if arm == "A" else 1.3, "label": arm}
            for axis, key in zip(column, ("ratio", "anchor"), strict=True):
                at = np.arange(len(curves[key])) * (SHORT // len(curves[key])) + 1
                axis.plot(at, np.maximum(curves[key], 1e-8), **style)
        column[0].set(title=network, yscale="log")
        column[1].set_xlabel("step")
        for axis in column:
            axis.grid(alpha=0.3)
    axes[0, 0].set_ylabel("|log(s_Q/s_K)|, largest of all heads")
    axes[1, 0].set_ylabel("change of log s_Q, largest of all heads")
    handles, labels = axes[0, 0].get_legend_handles_labels()
    fig.legend(handles, labels, loc="outside lower center", ncols=len(labels))
    report.save_as_is(fig, path)


SHOWN = {network: (network, SHORT) for network in NETWORKS} | {f"all three, {LONG:,} steps": ("all three", LONG)}
"""Name in the table → network and steps."""


def per_seed(cells: dict[str, Cell], run: str, arm: str, key: str, rate: float = RATE) -> np.ndarray:
    """A number of every seed; `run` is one of `SHOWN`."""
    network, steps = SHOWN[run]
    return np.asarray(cells[cell_name(network, arm, rate, steps)][key])


def most(cells: dict[str, Cell], arm: str, key: str) -> dict[str, float]:
    """The largest over seeds, by run."""
    return {run: float(per_seed(cells, run, arm, key).max()) for run in SHOWN}


def section(result: Result) -> str:
    """Tables of the three coordinates, and what they say beside the paper's claims."""
    cells = result["cells"]
    rows = [[run, arm, *(f"{most(cells, arm, key)[run]:.1e}" for key in ("ratio", "ratio_end", "anchor", "sides")),
             report.spread(per_seed(cells, run, arm, "product").tolist()),
             report.spread(per_seed(cells, run, arm, "loss").tolist(), ".4f"),
             report.spread(_less_a(cells, run, arm).tolist(), "+.4f").replace("± +", "± ")]
            for run in SHOWN for arm in NETWORK_ARMS]
    why = [[network, *(f"{most(cells, 'C', key)[network]:.1e}" for key in ("entries", "sums")),
            *(report.listed(per_seed(cells, network, "C", "ratio", rate).tolist(), ".1e") for rate in (RATE, FAST))]
           for network in NETWORKS]
    head = ["network", "arm", "log(s_Q/s_K)", "at the end", "log s_Q", "log‖Q side‖ − log‖K side‖", "s_Q·s_K",
            "validation loss", "less A's"]
    return "\n\n".join([
        f"The same network with what parts multipliers: *biases*, *rotary* embeddings, *grouped* queries (two heads "
        f"per key head), all three. {SHORT} steps at rate {RATE:g}, and {LONG:,} steps of the last; "
        f"{len(result['seeds'])} seeds, float32, {result['machine']}. A, B, C, stale as in the section above; "
        "*quotient* is C inside `go.quotient`, *balanced* with `rest=\"balanced\"`. Three coordinates of the stored "
        "weights, each the largest over heads, layers, steps and seeds: |log(s_Q/s_K)| of the multipliers, Eq. (3); "
        "the change of log s_Q, which the gauge reads; the change of log‖Q side‖ − log‖K side‖, which "
        "`rest=\"balanced\"` holds, where a side is multipliers and biases.",
        report.plain([head, *rows]),
        "Why there, under C. *Entries*: how far r·∂L/∂r of queries is from that of keys, entry by entry, relative to "
        "the latter (Euclidean over a key head and its query heads; the median over heads, layers and steps). *Sums*: "
        "the same of their sums over a head, with biases, which the gauge makes equal: plain gradient flow would not "
        "move the difference of the sides' squares. Adam divides entry by entry, so that unequal entries get steps "
        "whose sums differ. The last two columns have |log(s_Q/s_K)| by seed.",
        report.plain([["network", "entries", "sums", f"rate {RATE:g}", f"rate {FAST:g}"], *why]),
        _on_drift(cells), _on_losses(cells), _on_quotients(cells),
    ])


def _less_a(cells: dict[str, Cell], run: str, arm: str) -> np.ndarray:
    """Losses less A's, by seed."""
    return per_seed(cells, run, arm, "loss") - per_seed(cells, run, "A", "loss")


def _apart(gaps: np.ndarray) -> bool:
    """Whether the mean over seeds is further from zero than two standard deviations."""
    return bool(abs(gaps.mean()) > 2.0 * gaps.std(ddof=1))


def _on_drift(cells: dict[str, Cell]) -> str:
    """The paper's claims on the ratio of multipliers, and on their product."""
    ratio = {arm: most(cells, arm, "ratio") for arm in NETWORK_ARMS}
    drifting = [run for run, x in ratio["C"].items() if x >= 1e-3]
    every_step = [x <= 1e-6 for arm in ("B, every 1", "B, every 1, stale") for x in ratio[arm].values()]
    between = ratio["B, every 100"].values()
    products = [[per_seed(cells, run, arm, "product") for arm in ("B, every 1", "A")] for run in SHOWN]
    by, cases = "|log(s_Q/s_K)|", "runs"
    return " ".join([
        report.paper("without control multipliers of queries and keys drift apart",
                     [run in drifting for run in SHOWN], f"{by} under C, 1e-3 or more", cases),
        f"The runs are: {', '.join(drifting) or 'none'}.",
        report.paper("a fix at every step leaves 3.5e-7", every_step, f"{by}, at most 1e-6",
                     "runs, half of them with stale moments"),
        report.paper("so do fixes 100 steps apart", [x <= 1e-6 for x in between],
                     f"{by} between fixes, at most 1e-6", cases),
        f"Right after the last of these fixes it is {max(most(cells, 'B, every 100', 'ratio_end').values()):.1e} at "
        f"most, before it up to {max(between):.1e}.",
        report.paper("decay of 2e-3 hardly holds the drift back",
                     [ratio["A"][run] > 0.5 * ratio["C"][run] for run in drifting],
                     f"{by}, under A more than half of that under C", "runs that drift"),
        report.paper("without decay products grow further", [np.mean(a - b) > 0 for a, b in products],
                     "the mean of s_Q·s_K at the end, under B above that under A", cases),
    ])


def _on_losses(cells: dict[str, Cell]) -> str:
    """The paper's claims on what fixing does to the loss."""
    gaps = {arm: {run: _less_a(cells, run, arm) for run in SHOWN} for arm in NETWORK_ARMS if arm != "A"}
    rarely, always = (list(gaps[f"B, every {n}"].values()) for n in (100, 1))
    best = [x.mean() < min(0.0, y.mean()) and _apart(x) and _apart(x - y) for x, y in zip(rarely, always, strict=True)]
    far = {arm: ", ".join(run for run, x in by_run.items() if _apart(x)) for arm, by_run in gaps.items()}
    named = "; ".join(f"{arm} ({runs})" for arm, runs in far.items() if runs)
    by, cases = "validation loss, by two standard deviations of the gap", "runs"
    return " ".join([
        report.paper("fixes 100 steps apart have a lower loss than A and than fixes at every step", best, by, cases),
        report.paper("fixes at every step have a higher loss than A",
                     [x.mean() > 0.0 and _apart(x) for x in always], by, cases),
        f"Further from A's validation loss than two standard deviations of the gap: {named or 'no arm'}. The largest "
        f"gap of a mean is {max(abs(x.mean()) for by_run in gaps.values() for x in by_run.values()):.4f}.",
    ])


def _on_quotients(cells: dict[str, Cell]) -> str:
    """What `quotient` holds, in which coordinate."""
    ratio, free, balanced = (most(cells, arm, "ratio") for arm in ("quotient", "C", "quotient, balanced"))
    biased = {run for run, (network, _) in SHOWN.items() if "bias" in NETWORKS[network]}

    def apart(one: str, other: str) -> float:
        gaps = [per_seed(cells, run, one, "loss") - per_seed(cells, run, other, "loss") for run in SHOWN]
        return float(np.abs(gaps).max())

    return ("`quotient` holds what its gauge reads: log s_Q changes by at most "
            f"{max(most(cells, 'quotient', 'anchor').values()):.1e}. By |log(s_Q/s_K)| it moves by "
            f"{report.span(list(ratio.values()), '.1e')}, further than C in {sum(ratio[x] > free[x] for x in SHOWN)} "
            f"of {len(SHOWN)} runs: keys take all growth of the product. `rest=\"balanced\"` holds log‖Q side‖ − log‖K "
            f"side‖ to {max(most(cells, 'quotient, balanced', 'sides').values()):.1e}. Without biases that is "
            f"|log(s_Q/s_K)|, which stays within {max(balanced[x] for x in SHOWN if x not in biased):.1e}; with biases "
            f"it is not, and reaches {max(balanced[x] for x in biased):.1e}. Losses under both rests differ by "
            f"{apart('quotient', 'quotient, balanced'):.1e} at most, from C's by {apart('quotient', 'C'):.1e}: "
            "multipliers start at 1, which is their point on the slice.")


RUNS = {cell_name(*run): run for run in NETWORK_RUNS}
STUDY = harness.Study(
    __doc__, "gaugefix_networks", harness.by_name(RUNS, lambda _, args, name: network_cell(*RUNS[name], args.seeds)),
    section, figure, seeds=SEEDS, digits=5,
    settings=lambda _: {"runs": [list(run) for run in NETWORK_RUNS], "networks": NETWORKS},
)
