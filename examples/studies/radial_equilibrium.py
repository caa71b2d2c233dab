"""Where weight decay takes a scale that the loss wants to grow (DDC, B.7 and C.14).

    python -m examples.studies radial_equilibrium

One unit of joint scale s = ‖up‖^p·‖down‖ under the loss −log s, which always pushes s up, so that Adam's normalised
step is 1. On the slice ‖up‖ stays at the 1 that it reads as the identity, and s is ‖down‖, √n long for n entries of
size 1, so that a step moves it by lr·√n. On the linear scale decay and loss balance at s* = √n/((p+1)·wd), with
`match="horizontal"` at √n/((p²+1)·wd); on the log scale, where a step is lr·√(p²+1), log s falls by
lr·((p+1)·wd − √(p²+1)) each step. Prints s at the end beside what is predicted.
"""

import functools
import math
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp

import gauge_optax as go
from examples.studies import harness, report
from examples.studies.harness import Arm, Result, Training
from examples.studies.report import Panel

Params = dict[str, jax.Array]
DEGREES = (1, 2)
MATCHES = ("adamw", "horizontal")
RADIALS = ("linear", "log")


@dataclass(frozen=True)
class Config:
    """Ours; the paper states the equilibrium without a run of its own."""

    steps: int = 1200
    rows: int = 4
    learning_rate: float = 1e-2
    weight_decay: float = 1.0
    b2: float = 0.99  # The gradient changes until s rests; a memory of 1,000 steps would be waited for.


def joint_scale(params: Params, degree: int) -> jax.Array:
    """‖up‖^p·‖down‖."""
    return size(params["up"]) ** degree * size(params["down"])


def size(x: jax.Array) -> jax.Array:
    """‖x‖, of entries whose squares leave float32's range too."""
    largest = jnp.max(jnp.abs(x))
    return largest * jnp.linalg.norm(x / largest)


def loss(params: Params, data: None, degree: int) -> jax.Array:
    """−log s."""
    return -jnp.log(joint_scale(params, degree))


def make(c: Config, seed: int) -> tuple[Params, None]:
    """A unit of s near 1."""
    up, down = jax.random.normal(jax.random.key(seed), (2, c.rows)) * c.rows**-0.5
    return {"up": up, "down": down}, None


def observe(start: Params, params: Params, data: None) -> dict[str, jax.Array]:
    """The logarithm of s for either degree: s itself leaves float32's range."""
    return {f"log_s{degree}": jnp.log(joint_scale(params, degree)) for degree in DEGREES}


def arm_name(radial: str, degree: int, match: str) -> str:
    """As in the table."""
    return f"{radial}, p = {degree}, {match}"


def decay_rate(c: Config, degree: int, match: str) -> float:
    """What decay takes off log s per unit of learning rate."""
    return (degree + 1 if match == "adamw" else degree**2 + 1) * c.weight_decay


def build(c: Config) -> Training:
    """Both coordinates, degrees and matches."""
    arms = {}
    for radial in RADIALS:
        for degree in DEGREES:
            gauge = go.rescale(up={"up": "_"}, down={"down": "_"}, degree=degree)
            for match in MATCHES:
                tx = go.ddc_adamw(
                    c.learning_rate, gauge, b2=c.b2, weight_decay=c.weight_decay, match=match, radial=radial
                )
                arms[arm_name(radial, degree, match)] = Arm(tx, functools.partial(loss, degree=degree))
    return Training(arms, functools.partial(make, c), functools.partial(loss, degree=1), observe)


def errors(result: Result) -> dict[str, list[float]]:
    """Per linear arm and seed, the relative distance of s from its predicted equilibrium."""
    c = Config(**result["settings"])
    errors_of = {}
    for degree in DEGREES:
        for match in MATCHES:
            arm = arm_name("linear", degree, match)
            ends = report.final(result, arm, f"log_s{degree}")
            errors_of[arm] = [math.exp(end) * decay_rate(c, degree, match) / c.rows**0.5 - 1.0 for end in ends]
    return errors_of


def falls(result: Result) -> dict[str, list[float]]:
    """Per log arm and seed, the change of log s per step on its way down, relative to the predicted one."""
    c = Config(**result["settings"])
    ratios = {}
    for degree in DEGREES:
        for match in MATCHES:
            arm = arm_name("log", degree, match)
            kept = [cell["curves"] for cell in result["cells"][arm].values()]
            slopes = [_fitted_slope(curves["step"], curves[f"log_s{degree}"]) for curves in kept]
            predicted = -c.learning_rate * (decay_rate(c, degree, match) - math.hypot(1.0, degree))
            ratios[arm] = [rate / predicted for rate in slopes]
    return ratios


def _fitted_slope(steps: list[int], values: list[float]) -> float:
    """Between the first reading and the last above −6."""
    last = max(n for n, value in enumerate(values) if value > -6)
    return (values[last] - values[0]) / max(1, steps[last] - steps[0])


def figure(result: Result, path: Path) -> None:
    """log s along the run, with the predicted ends."""
    c = Config(**result["settings"])
    title = "A scale that the loss pushes up, under decay: linear settles, log collapses"
    fig, axes = report.panels(2, title, grid=True)
    for axis, degree in zip(axes, DEGREES, strict=True):
        named = {f"{radial}, {match}": arm_name(radial, degree, match) for radial in RADIALS for match in MATCHES}
        part = {"arms": list(named), "cells": {name: result["cells"][arm] for name, arm in named.items()}}
        report.curves(axis, part, Panel(f"log_s{degree}", f"p = {degree}; dotted: predicted", "linear", "log s"))
        for match in MATCHES:
            axis.axhline(math.log(c.rows**0.5 / decay_rate(c, degree, match)), color="gray", ls=":", zorder=9)
    report.save(fig, path)


def section(result: Result) -> str:
    """The table, and what it says."""
    c = Config(**result["settings"])
    off, slopes = errors(result), falls(result)
    ends = {arm: report.final(result, arm, f"log_s{2 if 'p = 2' in arm else 1}") for arm in result["arms"]}
    columns = {
        "log s at the end": lambda arm: report.listed(ends[arm], ".3f"),
        "beside the prediction": lambda arm: (
            f"s off by {max(abs(x) for x in off[arm]):.0e} of it"
            if arm in off
            else f"falls {report.span(slopes[arm], '.3f')} times as fast"
        ),
    }
    worst = max(abs(x) for seeds in off.values() for x in seeds)
    collapse = all(max(end) < -5 for arm, end in ends.items() if arm in slopes)
    return "\n\n".join([
        f"One unit, loss −log s, {c.steps:,} steps, learning rate {c.learning_rate}, weight decay "
        f"{c.weight_decay}, b2 {c.b2}. {report.made_with(result)}",
        report.table(result, columns),
        f"The linear scale settles at √n/((p+1)·wd), or √n/((p²+1)·wd) with `horizontal`, to {worst:.0e} "
        f"({'within' if worst < 0.02 else 'NOT within'} 2 %); the log scale "
        f"{'collapses' if collapse else 'does NOT collapse'}.",
    ])

STUDY = harness.Study(__doc__, "radial_equilibrium", harness.trained(build), section, figure, config=Config())
