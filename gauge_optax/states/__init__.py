"""Moves an optimizer's state when a gauge moves its weights, and converts a plain state to one of `quotient`."""
