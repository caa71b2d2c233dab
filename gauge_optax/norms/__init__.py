"""Optimizers and links that set the norm of every weight vector, or the angle by which a step turns it."""

from gauge_optax.norms._hyperball import hyperball
from gauge_optax.norms._max_norm import max_norm
from gauge_optax.norms._rotational import rotational
from gauge_optax.norms.aliases import rotational_adamw, rotational_lion, rotational_sgdm

__all__ = ["hyperball", "max_norm", "rotational", "rotational_adamw", "rotational_lion", "rotational_sgdm"]
