"""gauge_optax: Optax transformations that see the function a network computes, not the coordinates it is written in."""

import importlib
from typing import TYPE_CHECKING, Any

# Each name is imported when it is first asked for, so that a script loads no more than it uses. Type checkers and
# editors read the first list, Python the second.
if TYPE_CHECKING:
    from gauge_optax import measure, testing
    from gauge_optax.binding.masks import by_path
    from gauge_optax.binding.names import axes_by_name
    from gauge_optax.ddc.aliases import ddc_adamw, ddc_muon
    from gauge_optax.ddc.links import gauge_project, gauge_retract, scale_by_ddc, scale_by_scaled_polar
    from gauge_optax.discovery.census import census
    from gauge_optax.discovery.report import discover
    from gauge_optax.gauges.absorption import bias_absorption
    from gauge_optax.gauges.embedding_shift import embedding_shift
    from gauge_optax.gauges.gauge import Gauge, bind, product
    from gauge_optax.gauges.linear import head_linear
    from gauge_optax.gauges.permutation import permutation
    from gauge_optax.gauges.read_shift import norm_read_shift
    from gauge_optax.gauges.residual import residual_rotation
    from gauge_optax.gauges.rope_linear import rope_linear
    from gauge_optax.gauges.rotation import head_rotation
    from gauge_optax.gauges.scale import multiplier_balance, norm_scale, rescale, residual_scale, scale_invariant
    from gauge_optax.gauges.shift import key_bias, logit_shift, norm_write_shift
    from gauge_optax.gauges.torus import rope_torus
    from gauge_optax.measure.balance import track_balance
    from gauge_optax.measure.live import track
    from gauge_optax.measure.redundancy import redundancy, transformer_redundancy
    from gauge_optax.measure.rotation import track_rotation
    from gauge_optax.norms.aliases import rotational_adamw, rotational_lion, rotational_sgdm
    from gauge_optax.norms.hyperball import hyperball
    from gauge_optax.norms.max_norm import max_norm
    from gauge_optax.norms.rotational import rotational
    from gauge_optax.optimizers._quotient import quotient
    from gauge_optax.optimizers.aliases import max_norm_muon, quotient_adamw, quotient_muon
    from gauge_optax.optimizers.compress import compress_second_moments
    from gauge_optax.optimizers.decay import add_gauge_decay
    from gauge_optax.optimizers.opposite_gram import scale_by_opposite_gram
    from gauge_optax.optimizers.relative import scale_by_relative_rms
    from gauge_optax.orbit.align import align
    from gauge_optax.orbit.canonicalize import canonicalize
    from gauge_optax.orbit.choose import choose
    from gauge_optax.orbit.merge import average, distance, interpolate
    from gauge_optax.orbit.pack import pack, packed_dot, packed_rows, unpack
    from gauge_optax.orbit.rotate import rotate
    from gauge_optax.states.evaluate import evaluate, restart
    from gauge_optax.states.fix import gauge_fix
    from gauge_optax.states.from_state import from_state
    from gauge_optax.states.hold_products import hold_products
    from gauge_optax.states.transport import transport
    from gauge_optax.tools.as_json import from_json, to_json
    from gauge_optax.tools.check import check
    from gauge_optax.tools.lora import lora
    from gauge_optax.tools.plan import plan
else:
    _MODULES = ("measure", "testing")
    _NAMES = {
        "binding.masks": "by_path",
        "binding.names": "axes_by_name",
        "ddc.aliases": "ddc_adamw ddc_muon",
        "ddc.links": "gauge_project gauge_retract scale_by_ddc scale_by_scaled_polar",
        "discovery.census": "census",
        "discovery.report": "discover",
        "gauges.absorption": "bias_absorption",
        "gauges.embedding_shift": "embedding_shift",
        "gauges.gauge": "Gauge bind product",
        "gauges.linear": "head_linear",
        "gauges.permutation": "permutation",
        "gauges.read_shift": "norm_read_shift",
        "gauges.residual": "residual_rotation",
        "gauges.rope_linear": "rope_linear",
        "gauges.rotation": "head_rotation",
        "gauges.scale": "multiplier_balance norm_scale rescale residual_scale scale_invariant",
        "gauges.shift": "key_bias logit_shift norm_write_shift",
        "gauges.torus": "rope_torus",
        "measure.balance": "track_balance",
        "measure.live": "track",
        "measure.redundancy": "redundancy transformer_redundancy",
        "measure.rotation": "track_rotation",
        "norms.aliases": "rotational_adamw rotational_lion rotational_sgdm",
        "norms.hyperball": "hyperball",
        "norms.max_norm": "max_norm",
        "norms.rotational": "rotational",
        "optimizers._quotient": "quotient",
        "optimizers.aliases": "max_norm_muon quotient_adamw quotient_muon",
        "optimizers.compress": "compress_second_moments",
        "optimizers.decay": "add_gauge_decay",
        "optimizers.opposite_gram": "scale_by_opposite_gram",
        "optimizers.relative": "scale_by_relative_rms",
        "orbit.align": "align",
        "orbit.canonicalize": "canonicalize",
        "orbit.choose": "choose",
        "orbit.merge": "average distance interpolate",
        "orbit.pack": "pack packed_dot packed_rows unpack",
        "orbit.rotate": "rotate",
        "states.evaluate": "evaluate restart",
        "states.fix": "gauge_fix",
        "states.from_state": "from_state",
        "states.hold_products": "hold_products",
        "states.transport": "transport",
        "tools.as_json": "from_json to_json",
        "tools.check": "check",
        "tools.lora": "lora",
        "tools.plan": "plan",
    }
    _MODULE_OF = {name: module for module, names in _NAMES.items() for name in names.split()}

    def __getattr__(name: str) -> Any:
        """Imports a public name, or one of the two public modules."""
        if name in _MODULES:
            return importlib.import_module(f"gauge_optax.{name}")
        if name not in _MODULE_OF:
            raise AttributeError(f"module 'gauge_optax' has no attribute '{name}'")
        found = globals()[name] = getattr(importlib.import_module(f"gauge_optax.{_MODULE_OF[name]}"), name)
        return found

    def __dir__() -> list[str]:
        return list(__all__)


# The reference has the same groups.
__all__ = [  # noqa: RUF022  by what a user wants
    # Train with your optimizer, on the slice.
    "quotient", "quotient_adamw", "quotient_muon", "max_norm_muon", "ddc_adamw", "ddc_muon",
    "from_state", "evaluate", "restart", "compress_second_moments",
    # Say which symmetries a model has.
    "Gauge", "bind", "bias_absorption", "embedding_shift", "head_linear", "head_rotation", "key_bias", "logit_shift",
    "multiplier_balance", "norm_read_shift", "norm_scale", "norm_write_shift", "permutation", "product",
    "rescale", "residual_rotation", "residual_scale", "rope_linear", "rope_torus", "scale_invariant",
    # Find them, write them down, look at a run before it starts.
    "discover", "lora", "plan", "check", "to_json", "from_json", "axes_by_name", "by_path",
    # Move weights along orbits, and optimizer states with them.
    "gauge_fix", "hold_products", "transport",
    # Choose the point of an orbit that serves a purpose.
    "canonicalize", "rotate", "choose",
    # Align two sets of weights, and merge them.
    "align", "distance", "average", "interpolate",
    # Pack heads: store, multiply and train fewer numbers.
    "pack", "unpack", "packed_rows", "packed_dot",
    # Control rotation and norms.
    "rotational", "rotational_adamw", "rotational_lion", "rotational_sgdm", "hyperball",
    "max_norm",
    # Links of a chain.
    "gauge_project", "scale_by_ddc", "scale_by_scaled_polar", "scale_by_relative_rms", "scale_by_opposite_gram",
    "add_gauge_decay", "gauge_retract",
    # Watch a run, measure, assert.
    "track", "track_balance", "track_rotation", "census", "redundancy", "transformer_redundancy", "measure",
    "testing",
]
