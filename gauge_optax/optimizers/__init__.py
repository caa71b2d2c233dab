"""Optimizers that run on the slice (`quotient` and the aliases around it), and links that respect gauges."""
