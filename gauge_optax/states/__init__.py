"""Moves optimizer states along with weights that an element moves, and converts plain states to those of `quotient`."""
