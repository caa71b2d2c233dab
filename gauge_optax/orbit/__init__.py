"""Chooses a point of an orbit: one of the many sets of weights that compute a function."""
