"""gauge_optax: optimizers whose steps depend on the function that a network computes, not on the weights that store it.
"""

import importlib
from typing import TYPE_CHECKING, Any

# Each name is imported when it is first asked for, so that a script loads no more than it uses. Type checkers and
# editors read the first list, Python the second.
if TYPE_CHECKING:
    from gauge_optax import links, measure, norms, orbit, testing, tools
    from gauge_optax.ddc.aliases import ddc_adamw, ddc_muon
    from gauge_optax.ddc.links import gauge_project, gauge_retract, scale_by_ddc
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
    from gauge_optax.optimizers._max_norm_muon import max_norm_muon
    from gauge_optax.optimizers._quotient import quotient
    from gauge_optax.optimizers.aliases import quotient_adamw, quotient_muon
    from gauge_optax.optimizers.decay import add_gauge_decay
    from gauge_optax.tools.check import check
    from gauge_optax.tools.lora import lora
    from gauge_optax.tools.plan import plan
else:
    _MODULES = ("orbit", "norms", "links", "tools", "measure", "testing")
    _NAMES = {
        "ddc.aliases": "ddc_adamw ddc_muon",
        "ddc.links": "gauge_project gauge_retract scale_by_ddc",
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
        "optimizers._max_norm_muon": "max_norm_muon",
        "optimizers._quotient": "quotient",
        "optimizers.aliases": "quotient_adamw quotient_muon",
        "optimizers.decay": "add_gauge_decay",
        "tools.check": "check",
        "tools.lora": "lora",
        "tools.plan": "plan",
    }
    _MODULE_OF = {name: module for module, names in _NAMES.items() for name in names.split()}

    def __getattr__(name: str) -> Any:
        """Imports a public name or module when it is first used. `go.orbit.rotate`, say, is also `go.rotate`."""
        if name in _MODULES:
            return importlib.import_module(f"gauge_optax.{name}")
        if name in _MODULE_OF:
            found = getattr(importlib.import_module(f"gauge_optax.{_MODULE_OF[name]}"), name)
        else:
            modules = (importlib.import_module(f"gauge_optax.{module}") for module in _MODULES[:-1])
            held = [module for module in modules if not name.startswith("_") and name in module.__all__]
            if not held:
                raise AttributeError(f"module 'gauge_optax' has no attribute '{name}'")
            found = getattr(held[0], name)
        globals()[name] = found
        return found

    def __dir__() -> list[str]:
        return list(__all__)


# The API reference (docs) has the same groups.
__all__ = [  # noqa: RUF022  by what a user wants
    # Train with your optimizer, on the slice.
    "quotient", "quotient_adamw", "quotient_muon", "max_norm_muon", "ddc_adamw", "ddc_muon",
    # Say which symmetries a model has.
    "Gauge", "bind", "bias_absorption", "embedding_shift", "head_linear", "head_rotation", "key_bias", "logit_shift",
    "multiplier_balance", "norm_read_shift", "norm_scale", "norm_write_shift", "permutation", "product",
    "rescale", "residual_rotation", "residual_scale", "rope_linear", "rope_torus", "scale_invariant",
    # Find them, and look at a run before it starts.
    "discover", "lora", "plan", "check",
    # The links of DDC, in the order of a chain.
    "gauge_project", "scale_by_ddc", "add_gauge_decay", "gauge_retract",
    # Modules: points of an orbit, norms, further links, paths and JSON, measures, assertions.
    "orbit", "norms", "links", "tools", "measure", "testing",
]
