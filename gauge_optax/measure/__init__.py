"""Measurements that take gauges, weights, gradients and steps. They work with any optimizer."""

from gauge_optax.discovery.census import census
from gauge_optax.measure.adam import adam_factors, adam_precondition
from gauge_optax.measure.balance import track_balance
from gauge_optax.measure.barrier import barrier
from gauge_optax.measure.fisher import (
    GGN,
    EmpiricalFisher,
    Fisher,
    Hessian,
    directional_fisher,
    quotient_fisher,
)
from gauge_optax.measure.leakage import leakage_along, predicted_drift, rescale_leakage, rotation_leakage, step_leakage
from gauge_optax.measure.live import slice_norms, track
from gauge_optax.measure.llc import llc
from gauge_optax.measure.motion import drift, vertical_motion
from gauge_optax.measure.rates import kl_order, power_law, quotient_arc_length, rate_table
from gauge_optax.measure.recorder import Recorder
from gauge_optax.measure.redundancy import redundancy, transformer_redundancy
from gauge_optax.measure.rotation import track_rotation
from gauge_optax.measure.second_order import second_order_leakage
from gauge_optax.measure.sensitivity import gauge_sensitivity
from gauge_optax.measure.shrink import gram_evolution
from gauge_optax.measure.spectra import (
    axis_alignment,
    dead_units,
    effective_rank,
    gauge_fraction,
    smallest_singular_value,
)
from gauge_optax.norms.equilibrium import corrected, predict_equilibrium

__all__ = [  # noqa: RUF022  by what a user wants
    # Watch a run.
    "track", "track_balance", "track_rotation", "Recorder",
    # Count dead directions.
    "census", "redundancy", "transformer_redundancy",
    # Measure.
    "EmpiricalFisher", "Fisher", "GGN", "Hessian", "adam_factors", "adam_precondition", "axis_alignment", "barrier",
    "corrected", "dead_units", "directional_fisher", "drift", "effective_rank", "gauge_fraction",
    "gauge_sensitivity", "gram_evolution", "kl_order", "leakage_along", "llc", "power_law", "predict_equilibrium",
    "predicted_drift", "quotient_arc_length", "quotient_fisher", "rate_table", "rescale_leakage",
    "rotation_leakage", "second_order_leakage", "slice_norms", "smallest_singular_value",
    "step_leakage", "vertical_motion",
]
