"""Gauges found from the function alone: index spaces of its jaxpr, null spaces of gradients, finite moves as proof."""
