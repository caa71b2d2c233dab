"""Transformations that run on the slice or move weights along orbits."""
