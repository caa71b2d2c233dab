"""Measurements that read gauges and treat an optimizer as a black box."""

from gauge_optax.measure.motion import drift, vertical_motion

__all__ = ["drift", "vertical_motion"]
