"""What imbalanced rotation costs: Adam + l2, layer norm alone, and neurons slowed on purpose (Fig. 6, 7 and 18).

    python -m examples.studies rotational_balance

Digits, an MLP of two hidden layers of 64. Every arm has its rate and its decay swept, and stands with its best pair of
them. `slowed` turns a share of neurons f times more slowly; `special` is Adam + l2's direction at AdamW's angle.
"""

import functools
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax

import gauge_optax as go
from examples.studies import digits, harness, report
from examples.studies.harness import Result
from examples.studies.rotational_rates import Cell, adamw, rotational
from examples.studies.text import kernels as matrices
from models.digits import DigitsConfig, neurons

RATES = (3e-3, 1e-2, 3e-2, 1e-1)
DECAYS = (0.01, 0.05, 0.2, 1.0)
L2 = (1e-6, 1e-5, 1e-4, 1e-3)
NET, HALF, QUARTER = DigitsConfig(), DigitsConfig(width=32), DigitsConfig(width=16)
STANDARDIZED = DigitsConfig(standardized=True)


def adam_l2(rate: Any, decay: Any) -> optax.GradientTransformation:
    """Decay added to the gradient."""
    return optax.chain(optax.add_decayed_weights(decay, matrices), optax.adam(rate))


def special(rate: Any, decay: Any, l2: float | None = None) -> optax.GradientTransformation:
    """Adam + l2's direction, with `decay` as its l2 unless another is given, AdamW's angle; the head gets AdamW."""

    def hidden(params: Any) -> Any:
        return {"layers": matrices(params["layers"]), "head": {"kernel": False, "bias": False}}

    def head(params: Any) -> Any:
        return jax.tree.map(lambda all_of, is_hidden: all_of and not is_hidden, matrices(params), hidden(params))

    added = optax.add_decayed_weights(decay if l2 is None else l2, hidden)
    inner = optax.chain(added, optax.adamw(rate, weight_decay=decay, mask=head))
    return go.norms.rotational(inner, neurons(NET), learning_rate=rate, weight_decay=decay)


def slowed(rate: Any, decay: Any, share: float, factor: float) -> optax.GradientTransformation:
    """RV-AdamW with this share of every layer's neurons turning `factor` times more slowly."""
    cut = round(NET.width * (1.0 - share))
    inner = optax.adamw(rate, weight_decay=decay, mask=matrices)
    angle = lambda count: (2.0 * rate(count) * decay * 0.1 / 1.9) ** 0.5  # noqa: E731
    parts = [(f"_ channel=0:{cut}", angle), (f"_ channel={cut}:{NET.width}", lambda n: angle(n) / factor)]
    for axes, schedule in parts:
        blocks = dict.fromkeys(neurons(NET), axes)
        if not axes.endswith("=0:0"):
            inner = go.norms.rotational(inner, blocks, learning_rate=rate, weight_decay=decay, eta_r=schedule)
    return inner


ARMS: dict[str, tuple[DigitsConfig, digits.Make, Sequence[float]]] = {
    "AdamW": (NET, adamw, DECAYS),
    "Adam + l2": (NET, adam_l2, L2),
    "AdamW, standardized": (STANDARDIZED, adamw, DECAYS),
    "RV-AdamW": (NET, rotational, DECAYS),
    "special RV, l2 = decay": (NET, special, DECAYS),
    "special RV, l2 = 1e-4": (NET, functools.partial(special, l2=1e-4), DECAYS),
    **{
        f"slowed, p = {p:g}, f = {f:g}": (NET, functools.partial(slowed, share=p, factor=f), DECAYS)
        for p, f in [(0.1, 10.0), (0.25, 10.0), (0.5, 10.0), (0.9, 10.0), (0.5, 2.0), (0.5, 3.0)]
    },
    "RV-AdamW, width 32": (HALF, functools.partial(rotational, net=HALF), DECAYS),
    "RV-AdamW, width 16": (QUARTER, functools.partial(rotational, net=QUARTER), DECAYS),
}
WATCHED = ("AdamW", "Adam + l2", "AdamW, standardized", "RV-AdamW")


def measured(name: str, seeds: Sequence[int]) -> Cell:
    """The sweep, and at its best pair how layers and neurons turn."""
    net, make, decays = ARMS[name]
    pairs, task = list(itertools.product(RATES, decays)), digits.Task(net=net)
    swept = digits.train(task, make, pairs, seeds)
    at = digits.best(swept.loss)
    out: Cell = {
        "sweep": swept.loss.mean(1).reshape(len(RATES), -1), "best": list(pairs[at]), "loss": swept.loss[at],
        "accuracy": swept.accuracy[at],
    }
    if name in WATCHED:
        observed = digits.train(task, make, [pairs[at]], seeds, digits.rotations(net)).observed[0]
        late = observed[:, task.steps // 4 : task.steps * 3 // 4].mean(1)
        out["layers_apart"] = late[:, :, 0].max(1) / late[:, :, 0].min(1)
        out["neurons_apart"] = (late[:, :, 1] / late[:, :, 0]).mean(1)
        out["rotation"] = observed[0, ::10, :, 0].T
    return out


def figure(result: Result, path: Path) -> None:
    """Sweeps of AdamW and Adam + l2, how layers turn, and losses by imbalance."""
    cells = result["cells"]
    fig, axes = report.plt.subplots(1, 4, figsize=(15, 3.6), layout="constrained")
    for axis, name in zip(axes[:2], ("AdamW", "Adam + l2"), strict=True):
        sweep = np.asarray(cells[name]["sweep"], float)
        image = axis.imshow(sweep, cmap="viridis_r", vmin=0.05, vmax=0.12, origin="lower", aspect="auto")
        axis.set_xticks(range(sweep.shape[1]), [f"{x:g}" for x in ARMS[name][2]])
        axis.set_yticks(range(len(RATES)), [f"{x:g}" for x in RATES])
        axis.set(title=f"{name}: test loss", xlabel="decay", ylabel="learning rate")
        for (i, j), value in np.ndenumerate(sweep):
            axis.text(j, i, f"{value:.3f}", ha="center", va="center", fontsize=7, color="white")
    fig.colorbar(image, ax=axes[1])
    for name in WATCHED:
        for k, curve in enumerate(cells[name]["rotation"]):
            color = report.COLORS[WATCHED.index(name)]
            style = {"color": color, "ls": ("-", "--")[k], "label": name if k == 0 else None}
            axes[2].plot(np.arange(len(curve)) * 10, curve, **style)
    axes[2].set(title="mean rotation; layer 1 solid, 2 dashed", xlabel="step", ylabel="rad", yscale="log")
    axes[2].legend(fontsize=7)
    names = [name for name in cells if name.startswith(("slowed", "RV"))]
    report.by_row(axes[3], {name: cells[name]["loss"] for name in names})
    axes[3].set(title="best test loss", xlabel="mean and deviation over seeds")
    report.save_as_is(fig, path)


def section(result: Result) -> str:
    """The table, and what it says."""
    cells = result["cells"]
    rows = []
    for name, cell in cells.items():
        apart = [report.span(cell[key], ".2f") if key in cell else "" for key in ("layers_apart", "neurons_apart")]
        rows.append([name, report.spread(cell["loss"], ".4f"), f"{np.mean(cell['accuracy']):.2%}",
                     "{:g}, {:g}".format(*cell["best"]), *apart])
    head = ["", "test loss", "accuracy", "rate, decay", "fastest over slowest layer", "spread over neurons"]
    loss = {name: np.asarray(cell["loss"]) for name, cell in cells.items()}
    plain, even = loss["AdamW"], loss["RV-AdamW"]
    gap, closed = loss["Adam + l2"] - plain, loss["special RV, l2 = 1e-4"] - plain
    worst, half = loss["slowed, p = 0.5, f = 10"], loss["RV-AdamW, width 32"]
    wrapped = loss["AdamW, standardized"]
    return "\n\n".join([
        f"{len(result['seeds'])} seeds, float32, {result['machine']}; best of {len(RATES)} rates and {len(DECAYS)} "
        "decays each. Rotation over the middle half of the run.",
        report.plain([head, *rows]),
        report.paper("AdamW is better than Adam + ℓ₂", list(gap > 0), "test loss")
        + f" The gap is {report.spread(list(gap), '+.4f')} here.",
        report.paper("Adam + ℓ₂'s direction at AdamW's angle is as good as AdamW", list(closed < np.abs(gap)),
                     "test loss, nearer to AdamW's than Adam + ℓ₂'s is or below it")
        + f" It is {report.spread(list(closed), '+.4f')} away with the l2 that is Adam + ℓ₂'s best; with AdamW's decay "
        "for an l2, as in the paper, l2 swamps these gradients.",
        report.paper("balanced rotation is better than imbalanced, tuned", list(worst > even), "test loss")
        + f" Half of the neurons ten times slower: {report.spread(list(worst - even), '+.4f')}; half as many neurons: "
        f"{report.spread(list(half - even), '+.4f')}.",
        report.paper("weight standardization on top of layer norm helps", list(wrapped < plain), "test loss")
        + f" {report.spread(list(wrapped - plain), '+.4f')}; the rotational variant: "
        f"{report.spread(list(even - plain), '+.4f')}.",
    ])


STUDY = harness.Study(
    __doc__, "rotational_balance", harness.by_name(ARMS, lambda _, args, name: measured(name, args.seeds)), section,
    figure, seeds=(0, 1, 2, 3, 4, 5), digits=5,
    settings=lambda _: {"rates": RATES, "decays": DECAYS, "l2": L2, "steps": digits.Task().steps},
)
