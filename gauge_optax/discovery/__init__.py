"""Finds a function's gauges: its jaxpr and its gradients suggest them, random finite moves of weights prove them."""
