"""Further links of a chain, beside `gauge_project`, `scale_by_ddc`, `add_gauge_decay` and `gauge_retract`."""

from gauge_optax.ddc.links import scale_by_scaled_polar
from gauge_optax.optimizers.compress import compress_second_moments
from gauge_optax.optimizers.opposite_gram import scale_by_opposite_gram
from gauge_optax.optimizers.relative import scale_by_relative_rms

__all__ = ["compress_second_moments", "scale_by_opposite_gram", "scale_by_relative_rms", "scale_by_scaled_polar"]
