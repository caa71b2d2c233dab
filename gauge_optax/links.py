"""Further links for `optax.chain`. `gauge_project`, `scale_by_ddc`, `add_gauge_decay`, `gauge_retract` are in `go`."""

from gauge_optax.ddc.links import scale_by_scaled_polar
from gauge_optax.norms.links import keep_norms_below, scale_by_vector_norm
from gauge_optax.optimizers.compress import compress_second_moments
from gauge_optax.optimizers.muon import scale_by_polar
from gauge_optax.optimizers.opposite_gram import scale_by_opposite_gram
from gauge_optax.optimizers.relative import scale_by_relative_rms

__all__ = [  # noqa: RUF022  by what a user wants
    # Muon with a bound on norms (`max_norm_muon`), link by link.
    "scale_by_polar", "scale_by_vector_norm", "keep_norms_below",
    # Others.
    "scale_by_scaled_polar", "scale_by_opposite_gram", "scale_by_relative_rms", "compress_second_moments",
]
