"""Norm, step and rotation of a random walk beside their predictions: five optimizers (Rotational Equilibrium, Fig. 9).

    python -m examples.studies rotational_walk

The layer of `models/random_walk.py`, 128 neurons of 128 inputs, batches of 32, 15,000 steps. Readings are means over
windows of 100 steps. Adam + ℓ₂ is not at rest by then, so that it has a row of 60,000 steps too; Lion has a row with
even inputs, AdamW one with a shorter memory, and Muon one that the paper does not have.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import gauge_optax as go
from examples.studies import harness, report
from examples.studies.harness import Result
from gauge_optax.norms.equilibrium import Equilibrium
from models import random_walk

WINDOW = 100
NEAR = 0.05
NEURONS = 4  # drawn one by one


@dataclass(frozen=True)
class Config:
    """The paper's sizes and rates (Tables 4 and App. K)."""

    steps: int = 15_000
    width: int = 128
    batch: int = 32


class Arm(NamedTuple):
    """One optimizer: its kind for predictions, η, λ, and how many times the steps."""

    kind: str
    learning_rate: float
    weight_decay: float
    longer: int = 1
    even: bool = False
    b2: float = 0.999

    def make(self) -> optax.GradientTransformation:
        """The optimizer."""
        lr, decay = self.learning_rate, self.weight_decay
        if self.kind == "adamw":
            return optax.adamw(lr, b2=self.b2, weight_decay=decay)
        if self.kind == "lion":
            return optax.lion(lr, weight_decay=decay)
        if self.kind == "muon":
            return optax.contrib.muon(lr, weight_decay=decay, ns_steps=8)
        plain = optax.sgd(lr, momentum=0.9) if self.kind == "sgdm" else optax.adam(lr)
        return optax.chain(optax.add_decayed_weights(decay), plain)


ARMS = {
    "SGDM": Arm("sgdm", 0.5, 1e-4),
    "AdamW": Arm("adamw", 1.25e-2, 8e-2),
    "AdamW, b2 = 0.95": Arm("adamw", 1.25e-2, 8e-2, b2=0.95),
    "Adam + l2": Arm("adam_l2", 7.813e-4, 1.25e-4),
    "Adam + l2, 60,000 steps": Arm("adam_l2", 7.813e-4, 1.25e-4, longer=4),
    "Lion": Arm("lion", 5e-4, 1.0),
    "Lion, even inputs": Arm("lion", 5e-4, 1.0, even=True),
    "Muon": Arm("muon", 2e-3, 0.5),
}


def readings(c: Config, arm: Arm, seed: int) -> dict[str, np.ndarray]:
    """Means over windows, (windows, neurons): norm, rotation, rms_update, and what predictions need."""
    tx = go.measure.track_rotation({"w": "channel _"}, arm.make(), every=1)
    first, key = jax.random.split(jax.random.key(seed))
    walk, weights = random_walk.start(first, c.width, c.width, arm.even)

    @jax.jit
    def window(carry: tuple[Any, Any], keys: jax.Array) -> tuple[tuple[Any, Any], dict[str, jax.Array]]:
        def step(carry: tuple[Any, Any], key: jax.Array) -> tuple[tuple[Any, Any], dict[str, jax.Array]]:
            params, state = carry
            grads = {"w": random_walk.noise(walk, params["w"], key, c.batch)}
            updates, after = tx.update(grads, state, params)
            figures = {name: optax.tree.get(after, name)["w"] for name in ("norm", "rotation", "rms_update")}
            unit = jnp.square(grads["w"] * figures["norm"][:, None])
            signed = _signed(arm, state, grads["w"])
            # The step without its decay.
            pure = updates["w"] + (arm.learning_rate * arm.weight_decay * params["w"] if arm.kind != "sgdm" else 0.0)
            figures |= {"unit": unit, "first": jnp.abs(signed), "second": jnp.square(signed)}
            figures["pure"] = jnp.sum(jnp.square(pure), 1)
            squares = {name: jnp.square(figures[name]) for name in ("norm", "rms_update")}
            return (optax.apply_updates(params, updates), after), figures | squares

        carry, figures = jax.lax.scan(step, carry, keys)
        return carry, jax.tree.map(lambda x: x.mean(0), figures)

    params = {"w": weights}
    carry, kept = (params, tx.init(params)), []
    for block in jax.random.split(key, (c.steps * arm.longer // WINDOW, WINDOW)):
        carry, figures = window(carry, block)
        kept.append(jax.device_get(figures))
    stacked = {name: np.stack([one[name] for one in kept]) for name in kept[0]}
    stacked |= {name: np.sqrt(stacked[name]) for name in ("norm", "rms_update", "pure")}
    return stacked | {"start": np.linalg.norm(weights, axis=1)}


def _signed(arm: Arm, state: Any, gradient: jax.Array) -> jax.Array:
    """What Lion takes the sign of."""
    if arm.kind != "lion":
        return jnp.zeros_like(gradient)
    return 0.9 * optax.tree.get(state, "mu")["w"] + 0.1 * gradient


def predicted(c: Config, arm: Arm, at: dict[str, np.ndarray], aligned: bool = False) -> Equilibrium:
    """Per neuron, from what the run's last third measured."""
    rates: dict[str, Any] = {"learning_rate": arm.learning_rate, "weight_decay": arm.weight_decay}
    predict = functools.partial(go.measure.predict_equilibrium, arm.kind, **rates)
    if arm.kind == "sgdm":
        return predict(gradient_norm=np.sqrt(at["unit"].sum(-1)))
    if arm.kind == "adam_l2":
        return predict(dim=c.width, gradient_roots=np.sqrt(at["unit"]).sum(-1))
    if arm.kind == "muon":
        size = np.sqrt(np.sum(at["pure"] ** 2)) / arm.learning_rate  # five polynomials do not end at 1
        whole = predict(shape=(c.width, c.width), update_norm=size)
        share = c.width**-0.5  # of the matrix's norm, a neuron's
        return whole._replace(norm=whole.norm * share, rms_update=whole.rms_update * share)
    alignment = np.sqrt(np.mean(at["first"] ** 2 / at["second"], -1)) if aligned else None
    return predict(dim=c.width, sign_alignment=alignment)


def measured(c: Config, name: str, seeds: Sequence[int]) -> dict[str, Any]:
    """Curves of the first seed, and the last third's means over predictions, for every seed."""
    arm, out = ARMS[name], dict[str, Any]()
    for seed in seeds:
        curves = readings(c, arm, seed)
        at = {key: x[len(x) * 2 // 3 :].mean(0) for key, x in curves.items() if key != "start"}
        plain, aligned = predicted(c, arm, at), predicted(c, arm, at, aligned=True)
        law = None if arm.kind == "adam_l2" else _law(arm, curves, plain)
        found = {
            "norm": at["norm"].mean() / np.mean(plain.norm),
            "rotation": at["rotation"].mean() / np.mean(plain.rotation),
            "step": at["pure"].mean() / np.mean(plain.rms_update),
            "aligned_norm": at["norm"].mean() / np.mean(aligned.norm),
            "aligned_rotation": at["rotation"].mean() / np.mean(aligned.rotation),
            "transient": np.nan if law is None else np.max(np.abs(curves["norm"].mean(1) / law - 1.0)),
        }
        if arm.kind == "lion":
            found["alignment"] = np.sqrt(np.mean(at["first"] ** 2 / at["second"]))
            found["pooled_alignment"] = np.mean(at["first"].mean(-1) / np.sqrt(at["second"].mean(-1)))
        for key, x in found.items():
            out.setdefault(key, []).append(float(x))
        if seed == seeds[0]:
            out["curves"] = {key: {"neurons": curves[key][:, :NEURONS].T, "mean": curves[key].mean(1),
                                   "predicted": float(np.mean(getattr(plain, key)))} for key in ("norm", "rotation")}
            out["curves"]["norm"] |= {} if law is None else {"transient": law}
    return out


def _law(arm: Arm, curves: dict[str, np.ndarray], rest: Equilibrium) -> np.ndarray:
    """Eq. (16) at the middle of each window, the mean over neurons."""
    power, kept = 2, 1 - arm.learning_rate * arm.weight_decay
    if arm.kind == "sgdm":
        power, kept = 4, 1 - arm.learning_rate * arm.weight_decay / 0.1
    share = kept ** (power * (np.arange(len(curves["norm"])) + 0.5) * WINDOW)[:, None]
    return np.mean((share * curves["start"] ** power + (1 - share) * rest.norm**power) ** (1 / power), 1)


def figure(result: Result, path: Path) -> None:
    """Norm and rotation along the walk: neurons, their mean, the prediction."""
    names = [name for name in ARMS if "60,000" not in name]
    fig, axes = report.plt.subplots(2, len(names), figsize=(3.1 * len(names), 5.6), layout="constrained")
    for column, name in zip(axes.T, names, strict=True):
        curves = result["cells"][name]["curves"]
        for axis, key in zip(column, ("norm", "rotation"), strict=True):
            curve, steps = curves[key], np.arange(len(curves[key]["mean"])) * WINDOW
            for neuron in curve["neurons"]:
                axis.plot(steps, neuron, lw=0.8, alpha=0.7)
            axis.plot(steps, curve["mean"], color="black", lw=1.4, label="mean of the layer")
            axis.axhline(curve["predicted"], color="tab:red", ls="--", label="predicted")
            if "transient" in curve:
                axis.plot(steps, curve["transient"], color="tab:red", ls=":", label="Eq. (16)")
            if key == "rotation":
                axis.set_ylim(0, 2.0 * curve["predicted"])
                axis.set_xlabel("step")
            axis.set_title(name if key == "norm" else "", fontsize=10)
        column[0].set_ylim(bottom=0)
    axes[0, 0].set_ylabel("norm of a neuron")
    axes[1, 0].set_ylabel("rotation per step, rad")
    axes[0, 0].legend(fontsize=7)
    report.save_as_is(fig, path)


def section(result: Result) -> str:
    """The table, and what it says."""
    rows = [[name, *(report.span(cell[key], ".3f") for key in ("norm", "rotation", "step")),
             f"{max(cell['transient']):.1%}" if np.isfinite(cell["transient"][0]) else "no closed form"]
            for name, cell in result["cells"].items()]
    accurate = [
        all(abs(x - 1.0) <= NEAR for key in ("norm", "rotation") for x in cell[key])
        for name, cell in result["cells"].items() if name != "Muon"  # which the paper does not have
    ]
    lion = result["cells"]["Lion"]
    pooled = [a * (2 / np.pi) ** 0.5 / b for a, b in zip(lion["norm"], lion["pooled_alignment"], strict=True)]
    return "\n\n".join([
        f"{len(result['seeds'])} seeds, float32, {result['machine']}. Measured over predicted, means over the layer "
        "and the last third of the run; the last column is the largest distance of the mean norm from Eq. (16).",
        report.plain([["", "norm", "rotation", "step", "transient"], *rows]),
        "Eq. (16) takes v to be what g² is on average. With β₂ = 0.999 v remembers 1,000 steps, twice as long as the "
        "norm takes to change, so that a shrinking gradient is divided by too much and the norm grows more slowly.",
        report.paper("predictions \"accurately describe the steady state\"", accurate,
                     f"norm and rotation over the prediction, within {NEAR:.0%} on all seeds", "rows")
        + " Adam + ℓ₂ is not at rest after 15,000 steps: neurons of large gradients take longest, and four times the "
        "steps bring it nearer to its prediction.",
        "Lion: the sign acts coordinate by coordinate, so that coordinates of different variance change nothing: the "
        f"paper's formula is off by {max(abs(x - 1) for x in lion['norm']):.1%} with normal γ_in. An alignment pooled "
        f"over coordinates, ‖n‖₁/(√C·‖n‖₂), is {report.span(lion['pooled_alignment'], '.3f')} there and would predict "
        f"a norm that the measured one exceeds by a factor of {report.span(pooled, '.3f')}; taken coordinate by "
        f"coordinate it is {report.span(lion['alignment'], '.3f')}, and norm and rotation come to "
        f"{report.span(lion['aligned_norm'], '.3f')} and {report.span(lion['aligned_rotation'], '.3f')} of the "
        "prediction. Muon is not in the paper; its prediction is Lion's with a polar factor in the sign's place.",
    ])


STUDY = harness.Study(
    __doc__, "rotational_walk", harness.by_name(ARMS, lambda c, args, name: measured(c, name, args.seeds)), section,
    figure, config=Config(), seeds=(0, 1, 2), digits=5,
)
