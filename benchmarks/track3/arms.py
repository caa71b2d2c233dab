"""The arms: an optimizer by name, its sweep's middle rate, and the five ways to run it."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import optax

import gauge_optax as go
from benchmarks.track3 import optimizers as of
from benchmarks.track3.optimizers import NEURONS, Link, Rate

Gauges = Sequence[go.Gauge]
Build = Callable[[Rate, jax.Array, Gauges], Link]

PLAIN, QUOTIENT, FREE, ROTATIONAL, BOTH = "plain", "quotient", "quotient, free", "rotational", "both"
WAYS = (PLAIN, QUOTIENT, FREE, ROTATIONAL, BOTH)
"""`free` is `pin=False`. Rotational arms turn each neuron by the rate at a fixed norm; `both` does so on the slice."""


Start = Callable[[Any, str], Any]


class Arm(NamedTuple):
    """An optimizer.

    Attributes:
      build: makes it, from a schedule, a decay and the network's gauges.
      middle: the middle of its first three rates.
      ways: those that make sense.
      start: changes initial weights, given the start's name; most arms leave them as they are.
    """

    build: Build
    middle: float
    ways: tuple[str, ...] = WAYS
    start: Start = lambda params, name: params


def _plain(make: Callable[[Rate, jax.Array], Link]) -> Build:
    return lambda rate, decay, gauges: make(rate, decay)


def _max_norm(make: Callable[[Rate, jax.Array], Link]) -> Build:
    return lambda rate, decay, gauges: go.max_norm(make(rate, decay), NEURONS, learning_rate=rate)


def _max_norm_muon(rate: Rate, decay: jax.Array, gauges: Gauges) -> Link:
    """The library's, which is on the slice by itself."""
    return go.max_norm_muon(rate, gauges, NEURONS, weight_decay=decay, adam_weight_decay=decay)


ADAM, MUON = 4e-3, 4e-2
ON_THE_SLICE = (PLAIN, QUOTIENT, FREE)  # an optimizer that controls norms itself has no rotational variant
ARMS: Mapping[str, Arm] = {
    "AdamW": Arm(_plain(of.adamw), ADAM),
    "Muon": Arm(_plain(of.muon), MUON),
    "Muon, per head": Arm(_plain(lambda rate, decay: of.muon(rate, decay, 1)), MUON),
    "Muon, pairs of heads": Arm(_plain(lambda rate, decay: of.muon(rate, decay, 2)), MUON),
    "MuonH": Arm(_plain(of.muonh), MUON, ON_THE_SLICE),
    "NorMuon": Arm(_plain(of.normuon), MUON),
    "SOAP": Arm(_plain(of.soap), ADAM),
    "SOAP-Muon": Arm(_plain(of.soap_muon), MUON),
    "PolarAdamW": Arm(_plain(of.polar_adamw), MUON),
    "symmetry-compatible": Arm(_plain(of.symmetric), MUON),
    "AdamW, relative steps": Arm(of.relative_adamw, ADAM),
    "AdamW, natural steps": Arm(_max_norm(of.adamw), MUON, ON_THE_SLICE),
    "Muon, natural steps": Arm(_max_norm(of.muon), MUON, ON_THE_SLICE),
    "max_norm_muon": Arm(_max_norm_muon, MUON, (PLAIN,)),
}


MUP = Arm(_plain(of.mup_adamw), ADAM, (PLAIN,), of.mup_start)
"""AdamW by muP's rules: at a width of 64 it is AdamW."""


def optimizer(arm: Arm, way: str, rate: Rate, decay: jax.Array, gauges: Gauges) -> optax.GradientTransformation:
    """An arm, run in one of the five ways.

    Args:
      arm: one of `ARMS`.
      way: one of `WAYS`.
      rate: the schedule, from steps to the rate.
      decay: of weights.
      gauges: those of the network.
    """
    tx = arm.build(rate, decay, gauges)
    if way in (ROTATIONAL, BOTH):
        tx = go.rotational(tx, NEURONS, learning_rate=rate, weight_decay=0.0, eta_r=rate)
    if way == PLAIN or way == ROTATIONAL:
        return tx
    return go.quotient(tx, gauges, pin=way != FREE)
