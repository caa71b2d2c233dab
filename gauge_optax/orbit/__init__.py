"""Works on orbits: an orbit is the set of all weights to which gauges can move given weights; all compute one function.

The functions here choose a point of an orbit, and move weights and optimizer states to it.
"""

from gauge_optax.orbit._align import align
from gauge_optax.orbit._canonicalize import canonicalize
from gauge_optax.orbit._choose import choose
from gauge_optax.orbit._pack import pack, packed_dot, packed_rows, unpack
from gauge_optax.orbit._rotate import rotate
from gauge_optax.orbit.merge import average, distance, interpolate
from gauge_optax.orbit.tied import untie
from gauge_optax.states.evaluate import evaluate, restart
from gauge_optax.states.fix import gauge_fix
from gauge_optax.states.from_state import from_state
from gauge_optax.states.hold_products import hold_products
from gauge_optax.states.transport import transport

__all__ = [  # noqa: RUF022  by what a user wants
    # Choose the point of an orbit that serves a purpose.
    "canonicalize", "rotate", "untie", "choose",
    # Align two sets of weights, and merge them.
    "align", "distance", "average", "interpolate",
    # Move weights while they are trained, and optimizer states with them.
    "gauge_fix", "hold_products", "transport", "evaluate", "restart", "from_state",
    # Pack heads: store, multiply and train fewer numbers.
    "pack", "unpack", "packed_rows", "packed_dot",
]
