"""gauge_optax: Optax transformations that see the function a network computes, not the coordinates it is written in."""

from gauge_optax import measure, testing
from gauge_optax.binding.masks import by_path
from gauge_optax.binding.names import axes_by_name
from gauge_optax.discovery.report import discover
from gauge_optax.gauges.base import Gauge
from gauge_optax.gauges.linear import head_linear, rope_linear
from gauge_optax.gauges.product import product
from gauge_optax.gauges.rescale import multiplier_balance, norm_scale, rescale, scale_invariant
from gauge_optax.gauges.rotation import head_rotation
from gauge_optax.gauges.shift import logit_shift
from gauge_optax.gauges.torus import rope_torus
from gauge_optax.measure.balance import track_balance
from gauge_optax.measure.live import track
from gauge_optax.optimizers._quotient import quotient
from gauge_optax.optimizers.aliases import ddc_adamw, ddc_muon, quotient_adamw, quotient_muon
from gauge_optax.optimizers.decay import add_gauge_decay
from gauge_optax.optimizers.fix import gauge_fix
from gauge_optax.optimizers.opposite_gram import scale_by_opposite_gram
from gauge_optax.optimizers.relative import scale_by_relative_rms
from gauge_optax.rotation.aliases import rotational_adamw, rotational_lion, rotational_sgdm
from gauge_optax.rotation.hyperball import hyperball
from gauge_optax.rotation.rotational import rotational
from gauge_optax.rotation.tracker import track_rotation
from gauge_optax.states.from_state import from_state
from gauge_optax.states.transport import transport
from gauge_optax.tools.as_json import from_json, to_json
from gauge_optax.tools.lora import lora
from gauge_optax.tools.plan import plan
from gauge_optax.transforms.ddc import scale_by_ddc
from gauge_optax.transforms.polar import scale_by_scaled_polar
from gauge_optax.transforms.project import gauge_project
from gauge_optax.transforms.retract import gauge_retract

__all__ = [
    "Gauge", "add_gauge_decay", "axes_by_name", "by_path", "ddc_adamw", "ddc_muon", "discover", "from_json",
    "from_state", "gauge_fix", "gauge_project", "gauge_retract", "head_linear", "head_rotation", "hyperball",
    "logit_shift", "lora", "measure", "multiplier_balance", "norm_scale", "plan", "product", "quotient",
    "quotient_adamw", "quotient_muon", "rescale", "rope_linear", "rope_torus", "rotational", "rotational_adamw",
    "rotational_lion", "rotational_sgdm", "scale_by_ddc", "scale_by_opposite_gram", "scale_by_relative_rms",
    "scale_by_scaled_polar", "scale_invariant", "testing", "to_json", "track", "track_balance", "track_rotation",
    "transport",
]  # fmt: skip
