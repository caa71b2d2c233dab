from gauge_optax.gauges.gauge import Gauge
from gauge_optax.gauges.linear import head_linear
from gauge_optax.gauges.rope_linear import rope_linear
from gauge_optax.gauges.product import product
from gauge_optax.gauges.scale import multiplier_balance, norm_scale, rescale, scale_invariant
from gauge_optax.gauges.rotation import head_rotation
from gauge_optax.gauges.shift import logit_shift
from gauge_optax.gauges.torus import rope_torus
from gauge_optax.optimizers._quotient import quotient
from gauge_optax.optimizers.aliases import ddc_adamw, ddc_muon, quotient_adamw, quotient_muon
from gauge_optax.optimizers.decay import add_gauge_decay
from gauge_optax.optimizers.links import gauge_project, gauge_retract, scale_by_ddc, scale_by_scaled_polar
from gauge_optax.optimizers.relative import scale_by_relative_rms
