"""The arms: an optimizer by name, its sweep's middle rate, and the five ways to run it."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import optax

import gauge_optax as go
from benchmarks.track3 import optimizers as of
from benchmarks.track3.optimizers import EMBEDDINGS, NEURONS, TOKENS, Link, Rate

Gauges = Sequence[go.Gauge]
Build = Callable[[Rate, jax.Array, Gauges], Link]

PLAIN, QUOTIENT, FREE, ROTATIONAL, BOTH = "plain", "quotient", "quotient, free", "rotational", "both"
WAYS = (PLAIN, QUOTIENT, FREE, ROTATIONAL, BOTH)
"""`free` is `pin=False`. Rotational arms turn each neuron by the rate at a fixed norm; `both` does so on the slice."""
PINNED, LOOSE, ONCE = (PLAIN, QUOTIENT, ROTATIONAL, BOTH), (PLAIN, FREE, ROTATIONAL, BOTH), (PLAIN, FREE)
"""Muon's arms run with `pin=False`, which is `quotient_muon`'s default; AdamW and Muon themselves run both ways."""


Start = Callable[[Any, str], Any]


class Arm(NamedTuple):
    """An optimizer.

    Attributes:
      build: makes it, from a schedule, a decay and the network's gauges.
      middle: the middle of its rates.
      ways: those to run.
      pin: what `both` passes to `quotient`.
      start: changes initial weights, given the start's name; most arms leave them as they are.
      ready: what `FREE` runs instead of `quotient` around `build`: a function of the library that is both.
      kinds: how many rates the schedule returns, one for each kind of leaf; 0 where it returns a number.
    """

    build: Build
    middle: float
    ways: tuple[str, ...] = PINNED
    pin: bool = True
    start: Start = lambda params, name: params
    ready: Build | None = None
    kinds: int = 0


def _plain(make: Callable[[Rate, jax.Array], Link]) -> Build:
    return lambda rate, decay, gauges: make(rate, decay)


def _max_norm_muon(rate: Rate, decay: jax.Array, gauges: Gauges) -> Link:
    return go.max_norm_muon(rate, gauges, {**NEURONS, **TOKENS}, EMBEDDINGS, weight_decay=decay)


def _muon(make: Callable[[Rate, jax.Array], Link], ways: tuple[str, ...] = LOOSE) -> Arm:
    return Arm(_plain(make), MUON, ways, pin=False)


ADAM, MUON = 4e-3, 4e-2
# An optimizer that sets the length of steps itself has no rotational variant of its own.
ARMS: Mapping[str, Arm] = {
    "AdamW": Arm(_plain(of.adamw), ADAM, WAYS),
    "Muon": _muon(of.muon, WAYS),
    "Muon, per head": _muon(lambda rate, decay: of.muon(rate, decay, 1)),
    "Muon, pairs of heads": _muon(lambda rate, decay: of.muon(rate, decay, 2)),
    "MuonH": _muon(of.muonh, ONCE),
    "NorMuon": _muon(of.normuon),
    "SOAP": Arm(_plain(of.soap), ADAM),
    "SOAP-Muon": _muon(of.soap_muon),
    "PolarAdamW": _muon(of.polar_adamw),
    "symmetry-compatible": _muon(of.symmetric),
    "PSGD Kron": Arm(_plain(of.psgd), ADAM),
    "AdamW, relative steps": Arm(of.relative_adamw, ADAM, (PLAIN, QUOTIENT)),
    "AdamW, max_norm": Arm(_plain(of.max_norm_adamw), MUON, (PLAIN, QUOTIENT)),
    "Muon, max_norm": _muon(of.max_norm_kernels, ONCE),
    "max_norm_muon": _muon(of.max_norm_muon, ONCE)._replace(ready=_max_norm_muon),
}


MUP = Arm(_plain(of.mup_adamw), ADAM, (PLAIN,), start=of.mup_start)
"""AdamW by muP's rules: at a width of 64 it is AdamW."""


def _falling_rate(rate: Rate, decay: jax.Array, gauges: Gauges) -> Link:
    def of_width(params: Any) -> Link:
        factor = (of.BASE_WIDTH / params["embed"]["embedding"].shape[1]) ** 0.5
        return _max_norm_muon(lambda n: factor * rate(n), decay, gauges)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        return of_width(params).update(updates, state, params)

    return optax.GradientTransformation(lambda params: of_width(params).init(params), update)


FALLING = Arm(_falling_rate, MUON, (PLAIN,))
"""`max_norm_muon` with every rate times √(64/d): at a width of 64 it is `max_norm_muon`."""


def optimizer(arm: Arm, way: str, rate: Rate, decay: jax.Array, gauges: Gauges) -> optax.GradientTransformation:
    """An arm, run in one of the five ways.

    Args:
      arm: one of `ARMS`.
      way: one of `WAYS`.
      rate: the schedule, from steps to the rate.
      decay: of weights.
      gauges: those of the network.
    """
    if way == FREE and arm.ready is not None:
        return arm.ready(rate, decay, gauges)
    tx = arm.build(rate, decay, gauges)
    if way in (ROTATIONAL, BOTH):
        tx = go.norms.rotational(tx, NEURONS, learning_rate=rate, weight_decay=0.0, eta_r=rate)
    if way == PLAIN or way == ROTATIONAL:
        return tx
    return go.quotient(tx, gauges, pin=arm.pin if way == BOTH else way == QUOTIENT)
