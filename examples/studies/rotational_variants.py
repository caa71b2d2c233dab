"""Rotational variants beside their baselines, with the baseline's own rates, and their options (Tables 2, 3; Fig. 19).

    python -m examples.studies rotational_variants

AdamW, SGDM and Lion on digits, AdamW on the demo language model. The baseline has the best pair of a sweep; `no decay`
and `zero-shot` take that pair; `few-shot` sweeps the decay alone.
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import optax

import gauge_optax as go
from examples.studies import digits, harness, report, text
from examples.studies.harness import Result
from examples.studies.rotational_rates import Cell, adamw, lm_rotational, rotational, rotational_sgdm, sgdm
from models.digits import NET, neurons

Make = Callable[[Any, Any], optax.GradientTransformation]


def lion(rate: Any, decay: Any) -> optax.GradientTransformation:
    """Decay of matrices alone."""
    return optax.lion(rate, weight_decay=decay, mask=text.kernels)


def rotational_lion(rate: Any, decay: Any) -> optax.GradientTransformation:
    """RV-Lion on the hidden layers."""
    return go.norms.rotational_lion(rate, neurons(NET), weight_decay=decay, mask=text.kernels)


PAIRS: dict[str, tuple[str, Make, Make, Sequence[float], Sequence[float]]] = {
    "digits, AdamW": ("digits", adamw, rotational, (3e-3, 1e-2, 3e-2), (0.01, 0.03, 0.1, 0.3)),
    "digits, SGDM": ("digits", sgdm, rotational_sgdm, (0.03, 0.1, 0.3), (1e-4, 3e-4, 1e-3, 3e-3)),
    "digits, Lion": ("digits", lion, rotational_lion, (3e-4, 1e-3, 3e-3), (0.03, 0.1, 0.3, 1.0)),
    "LM, AdamW": ("LM", adamw, lm_rotational, (5e-3, 1e-2, 2e-2), (0.1, 0.3)),
}
LM_FEW = (0.03, 0.1, 0.3)
RATE, DECAY = 1e-2, 0.1
OPTIONS: dict[str, dict[str, Any]] = {
    "neurons, β = 0.9, centred": {},
    **{f"β = {beta:g}": {"beta": beta} for beta in (0.0, 0.5, 0.99, 0.999)},
    "not centred": {"center": False},
    "layers": {"layers": True},
    "layers, not centred": {"layers": True, "center": False},
}


def losses(task: str, make: Make, pairs: Sequence[tuple[float, float]], seeds: Sequence[int]) -> np.ndarray:
    """(pairs, seeds)."""
    if task == "LM":
        return text.train(text.Task(), make, pairs, seeds)[0]
    return digits.train(digits.Task(), make, pairs, seeds).loss


def compared(name: str, seeds: Sequence[int]) -> Cell:
    """Baseline, no decay, zero-shot, few-shot."""
    task, make, variant, rates, decays = PAIRS[name]
    pairs = list(itertools.product(rates, decays))
    swept = losses(task, make, pairs, seeds)
    at = digits.best(swept)
    rate, decay = pairs[at]
    few = list(LM_FEW if task == "LM" else decays)
    few += [decay] if decay not in few else []
    by_decay = losses(task, variant, [(rate, other) for other in few], seeds)
    best = digits.best(by_decay)
    return {
        "pair": [rate, decay], "baseline": swept[at], "no decay": losses(task, make, [(rate, 0.0)], seeds)[0],
        "zero-shot": by_decay[few.index(decay)], "few-shot": by_decay[best], "few-shot decay": few[best],
    }


def optioned(name: str, task: str, seeds: Sequence[int]) -> Cell:
    """RV-AdamW with these options, its decay swept on digits."""
    options = dict(OPTIONS[name])
    blocks = text.neurons() if task == "LM" else neurons(NET)
    if options.pop("layers", False):
        blocks = {path: " ".join("_" for _ in axes.split()) for path, axes in blocks.items()}

    def make(rate: Any, decay: Any) -> optax.GradientTransformation:
        gain = optax.adam(rate) if task == "LM" else None
        return go.norms.rotational_adamw(rate, blocks, weight_decay=decay, mask=text.kernels, gain=gain, **options)

    decays = (DECAY,) if task == "LM" else (0.01, 0.03, DECAY, 0.3, 1.0)
    by_decay = losses(task, make, [(RATE, decay) for decay in decays], seeds)
    at = digits.best(by_decay)
    return {"loss": by_decay[at], "decay": decays[at]}


COLUMNS = ("baseline", "no decay", "zero-shot", "few-shot")


def figure(result: Result, path: Path) -> None:
    """Losses over the baseline's, and by option."""
    fig, axes = report.plt.subplots(1, 3, figsize=(13, 3.8), layout="constrained")
    for k, name in enumerate(PAIRS):
        cell = result["cells"][name]
        base = np.mean(cell["baseline"])
        values = np.array([cell[column] for column in COLUMNS]) / base
        axes[0].errorbar(np.arange(4) + 0.1 * k, values.mean(1), values.std(1, ddof=1), fmt="o", label=name)
    axes[0].set_xticks(range(4), COLUMNS)
    axes[0].axhline(1.0, color="gray", ls=":")
    axes[0].set(title="loss over the baseline's", ylim=(0.8, 1.4))
    axes[0].legend(fontsize=7)
    for axis, task in zip(axes[1:], ("digits", "LM"), strict=True):
        report.by_row(axis, {name: result["cells"][f"{task}: {name}"]["loss"] for name in OPTIONS})
        axis.set(title=f"{task}, RV-AdamW: loss by option")
    report.save_as_is(fig, path)


def section(result: Result) -> str:
    """The tables, and what they say."""
    cells, rows, said = result["cells"], [], []
    for name in PAIRS:
        cell = cells[name]
        rate, decay = cell["pair"]
        rows.append([f"{name}, {rate:g}, {decay:g}", *(report.spread(cell[column], ".4f") for column in COLUMNS),
                     f"{cell['few-shot decay']:g}"])
        base = np.mean(cell["baseline"])
        zero, few, none = (np.mean(cell[column]) / base - 1 for column in ("zero-shot", "few-shot", "no decay"))
        said.append(f"{name} {zero:+.1%} zero-shot, {few:+.1%} few-shot, {none:+.1%} without decay")
    level = "held-out loss, at most a standard deviation over seeds above the baseline's"
    options = [[name, *(report.spread(cells[f"{task}: {name}"]["loss"], ".4f") for task in ("digits", "LM"))]
               for name in OPTIONS]
    return "\n\n".join([
        f"{len(result['seeds'])} seeds, float32, {result['machine']}; loss on held-out data.",
        report.plain([["rate and decay of the baseline", *COLUMNS, "few-shot decay"], *rows]),
        "Over the baseline: " + "; ".join(said) + ".",
        " ".join([
            report.paper("variants match their baselines zero-shot in most cases",
                         [_level(cells[name], "zero-shot") for name in PAIRS], level, "tasks"),
            report.paper("variants match them in all cases when tuned a little",
                         [_level(cells[name], "few-shot") for name in PAIRS], level, "tasks"),
            report.paper("without decay networks are worse (1 point of accuracy on CIFAR-10, 0.03 of GPT-2's loss)",
                         [not _level(cells[name], "no decay") for name in PAIRS],
                         "held-out loss, above the baseline's by more than that deviation", "tasks"),
        ]),
        f"Options of RV-AdamW at rate {RATE:g}; on digits each with the best of five decays:",
        report.plain([["", "digits", "LM"], *options]),
        " ".join(_stable(cells, task) for task in ("digits", "LM")),
    ])


STABLE = 0.05


def _level(cell: Cell, column: str) -> bool:
    """Whether a column's mean is at most a standard deviation over seeds, of both together, above the baseline's."""
    values, base = np.asarray(cell[column]), np.asarray(cell["baseline"])
    return bool(values.mean() - base.mean() <= np.hypot(values.std(ddof=1), base.std(ddof=1)))


def _stable(cells: dict[str, Cell], task: str) -> str:
    """Whether options matter on one task."""
    means = {name: float(np.mean(cells[f"{task}: {name}"]["loss"])) for name in OPTIONS}
    default, *others = means.values()
    return report.paper(f"on {task}, results stay stable over β, centring and granularity",
                        [abs(x / default - 1.0) <= STABLE for x in others],
                        f"held-out loss, within {STABLE:.0%} of the default's", "options")


CELLS: dict[str, Callable[[Sequence[int]], Cell]] = {
    **{name: functools.partial(compared, name) for name in PAIRS},
    **{f"{task}: {name}": functools.partial(optioned, name, task) for task in ("digits", "LM") for name in OPTIONS},
}
STUDY = harness.Study(
    __doc__, "rotational_variants", harness.by_name(CELLS, lambda _, args, name: CELLS[name](args.seeds)), section,
    figure, seeds=(0, 1, 2), digits=5,
    settings=lambda _: {
        "pairs": {name: [rates, decays] for name, (_, _, _, rates, decays) in PAIRS.items()}, "options": list(OPTIONS),
    },
)
