"""Learning rate against decay at a fixed product, and what warm-up is for (Fig. 4, 5, 16 and 17).

    python -m examples.studies rotational_rates

Digits, and the demo language model. At a fixed product of rate and decay the angle of rest is one; what differs is how
fast all else steps, and the way to rest. `RV` turns by that angle from the first step on.
"""

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import optax

import gauge_optax as go
from examples.studies import digits, harness, report, text
from examples.studies.harness import Result
from models.digits import NET, DigitsConfig, neurons

Cell = dict[str, Any]

PRODUCT = 1e-3
DIGITS_RATES: Sequence[float] = (3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1)
LM_RATES: Sequence[float] = (1e-3, 3e-3, 1e-2, 3e-2)
WARM_RATES: Sequence[float] = (3e-3, 1e-2, 3e-2)
SGD_RATES: Sequence[float] = (0.1, 0.3, 1.0, 3.0)
LM_DECAY, SGD_DECAY = 0.1, 5e-4


def lm_rotational(rate: Any, decay: Any) -> optax.GradientTransformation:
    """RV-AdamW on every neuron of the blocks, with gains, since nothing normalises them."""
    return go.norms.rotational_adamw(rate, text.neurons(), weight_decay=decay, mask=text.kernels, gain=optax.adam(rate))


def adamw(rate: Any, decay: Any) -> optax.GradientTransformation:
    """Decay of matrices alone."""
    return optax.adamw(rate, weight_decay=decay, mask=text.kernels)


def rotational(rate: Any, decay: Any, net: DigitsConfig = NET) -> optax.GradientTransformation:
    """RV-AdamW on the hidden layers."""
    return go.norms.rotational_adamw(rate, neurons(net), weight_decay=decay, mask=text.kernels)


def sgdm(rate: Any, decay: Any) -> optax.GradientTransformation:
    """Momentum, decay added to the gradient."""
    return optax.chain(optax.add_decayed_weights(decay, text.kernels), optax.sgd(rate, 0.9))


def rotational_sgdm(rate: Any, decay: Any) -> optax.GradientTransformation:
    """RV-SGDM on the hidden layers."""
    return go.norms.rotational_sgdm(rate, neurons(NET), weight_decay=decay, mask=text.kernels)


def on_digits(make: digits.Make, pairs: Sequence[tuple[float, float]], warmup: float, seeds: Sequence[int]) -> Cell:
    """Losses of every pair, (pairs, seeds), and what the first layer does."""
    task = digits.Task(warmup=warmup)
    trained = digits.train(task, make, pairs, seeds, digits.rotations(task.net))
    curves = trained.observed[:, 0, ::20, 0]
    return {"loss": trained.loss, "norm": curves[..., 2], "rotation": curves[..., 0]}


def on_text(make: text.Make, pairs: Sequence[tuple[float, float]], warmup: float, seeds: Sequence[int]) -> Cell:
    """Losses of every pair, (pairs, seeds)."""
    return {"loss": text.train(text.Task(warmup=warmup), make, pairs, seeds)[0]}


def cells() -> dict[str, Callable[[Sequence[int]], Cell]]:
    """By name: the arm, its rates, with warm-up or without, as functions of the seeds."""
    made: dict[str, Any] = {}
    for name, make, make_lm in (("AdamW", adamw, adamw), ("RV-AdamW", rotational, lm_rotational)):
        for task, on, arm, rates in (("digits", on_digits, make, DIGITS_RATES), ("LM", on_text, make_lm, LM_RATES)):
            pairs = [(rate, PRODUCT / rate) for rate in rates]
            made[f"product, {task}, {name}"] = functools.partial(on, arm, pairs, 0.1)
    warmed = {
        "LM, AdamW": (on_text, adamw, WARM_RATES, LM_DECAY),
        "LM, RV-AdamW": (on_text, lm_rotational, WARM_RATES, LM_DECAY),
        "digits, SGDM": (on_digits, sgdm, SGD_RATES, SGD_DECAY),
        "digits, RV-SGDM": (on_digits, rotational_sgdm, SGD_RATES, SGD_DECAY),
    }
    for (name, (on, arm, rates, decay)), warmup in itertools.product(warmed.items(), (0.0, 0.1)):
        made[f"warm-up {warmup:g}, {name}"] = functools.partial(on, arm, [(rate, decay) for rate in rates], warmup)
    return made


LOSSES = {"digits": "test", "LM": "validation"}


def finite(cell: Cell) -> np.ndarray:
    """Losses by rate and seed, infinite where a run was lost."""
    losses = np.asarray(cell["loss"], float)
    return np.where(np.isfinite(losses), losses, np.inf)


def _table(rates: Sequence[float], cells: Mapping[str, Cell]) -> str:
    """A row per name, a column per rate: means over seeds."""
    rows = [[name, *(f"{x:.4f}" for x in finite(cell).mean(1))] for name, cell in cells.items()]
    return report.plain([["", *(f"{rate:g}" for rate in rates)], *rows])


def gains_of_warmup(cells: dict[str, Cell], task: str, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Losses without warm-up over those with it, less one: of means, by rate; and by seed.

    Of the latter, both are at the rate that is best in the mean.
    """
    by_warmup = [finite(cells[f"warm-up {warmup:g}, {task}, {name}"]) for warmup in (0.0, 0.1)]
    by_rate = [losses.mean(1) for losses in by_warmup]
    by_seed = [losses[np.argmin(of_rates)] for losses, of_rates in zip(by_warmup, by_rate, strict=True)]
    return by_rate[0] / by_rate[1] - 1.0, by_seed[0] / by_seed[1] - 1.0


def figure(result: Result, path: Path) -> None:
    """Losses by rate, and norm and rotation on the way for three rates."""
    cells = result["cells"]
    fig, axes = report.plt.subplots(2, 3, figsize=(12, 6.6), layout="constrained")
    for axis, (task, rates, names) in zip(
        (axes[0, 0], axes[0, 1]), (("digits", DIGITS_RATES, "test"), ("LM", LM_RATES, "validation")), strict=True
    ):
        for name, color in (("AdamW", "black"), ("RV-AdamW", "tab:blue")):
            losses = np.asarray(cells[f"product, {task}, {name}"]["loss"])
            axis.errorbar(rates, losses.mean(1), losses.std(1, ddof=1), marker="o", color=color, label=name)
        axis.set(xscale="log", title=f"{task}: {names} loss, rate · decay = {PRODUCT:g}", xlabel="learning rate")
        axis.legend(fontsize=8)
    for axis, key in zip((axes[0, 2], axes[1, 2]), ("norm", "rotation"), strict=True):
        for name, style in (("AdamW", "-"), ("RV-AdamW", ":")):
            for k in (0, 2, 4):
                curve = np.asarray(cells[f"product, digits, {name}"][key][k])
                label = f"{name}, {DIGITS_RATES[k]:g}"
                axis.plot(np.arange(len(curve)) * 20, curve, style, color=report.COLORS[k], label=label)
        axis.set(title=f"digits, layer 1: {key}", xlabel="step", yscale="log")
        axis.legend(fontsize=6)
    for axis, (task, rates, arms) in zip(
        axes[1, :2],
        (("LM", WARM_RATES, ("AdamW", "RV-AdamW")), ("digits", SGD_RATES, ("SGDM", "RV-SGDM"))),
        strict=True,
    ):
        for name, color in zip(arms, ("black", "tab:blue"), strict=True):
            for warmup, style in ((0.0, "--"), (0.1, "-")):
                losses = np.asarray(cells[f"warm-up {warmup:g}, {task}, {name}"]["loss"])
                drawn = {"ls": style, "color": color, "label": f"{name}, {'with' if warmup else 'without'}"}
                axis.errorbar(rates, losses.mean(1), losses.std(1, ddof=1), marker="o", **drawn)
        axis.set(xscale="log", yscale="log", title=f"{task}: with and without warm-up", xlabel="learning rate")
        axis.legend(fontsize=7)
    report.save_as_is(fig, path)


def section(result: Result) -> str:
    """The tables, and what they say."""
    cells, out = result["cells"], [f"{len(result['seeds'])} seeds, float32, {result['machine']}."]
    for task, rates in (("digits", DIGITS_RATES), ("LM", LM_RATES)):
        names = ("AdamW", "RV-AdamW")
        out.append(f"{task}, rate times decay {PRODUCT:g}, by rate:")
        out.append(_table(rates, {name: cells[f"product, {task}, {name}"] for name in names}))
        by_seed = [finite(cells[f"product, {task}, {name}"]) for name in names]
        wide = [x.max(0) / x.min(0) - 1.0 for x in by_seed]
        out.append(report.paper("the rotational variant depends less on the rate at a fixed product",
                                list(wide[1] < wide[0]),
                                f"the {LOSSES[task]} loss of the worst over that of the best rate")
                   + f" It is AdamW {report.span([100 * x for x in wide[0]], '+.1f')} %, RV-AdamW "
                   f"{report.span([100 * x for x in wide[1]], '+.1f')} %, smallest to largest seed.")
    for task, rates, names in (("LM", WARM_RATES, ("AdamW", "RV-AdamW")), ("digits", SGD_RATES, ("SGDM", "RV-SGDM"))):
        out.append(f"{task}, with and without warm-up over a tenth of the run, by rate:")
        out.append(_table(rates, {f"{name}, {said}": cells[f"warm-up {warmup}, {task}, {name}"] for name in names
                                  for warmup, said in (("0", "without"), ("0.1", "with"))}))
        gains, best = zip(*(gains_of_warmup(cells, task, name) for name in names), strict=True)
        by = f"{LOSSES[task]} loss without warm-up over that with it, each at its best rate"
        out.append(
            f"Without warm-up the best rate loses {best[0].mean():+.1%} ({names[0]}) and {best[1].mean():+.1%} "
            f"({names[1]}), means over seeds; over rates {report.span([100 * x for x in gains[0]], '.1f')} % and "
            f"{report.span([100 * x for x in gains[1]], '.1f')} %. "
            + report.paper(f"{names[0]} gains from warm-up", list(best[0] > 0), f"{by}, above 1")
            + " "
            + report.paper(f"{names[1]} gains less from it", list(best[1] < best[0]), by)
        )
    return "\n\n".join(out)


CELLS = cells()
STUDY = harness.Study(
    __doc__, "rotational_rates", harness.by_name(CELLS, lambda _, args, name: CELLS[name](args.seeds)), section, figure,
    seeds=(0, 1, 2), digits=5,
    settings=lambda _: {
        "product": PRODUCT, "rates": [DIGITS_RATES, LM_RATES, WARM_RATES, SGD_RATES], "decays": [LM_DECAY, SGD_DECAY],
    },
)
