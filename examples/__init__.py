"""Runnable examples; start each from the repository's root: `python -m examples.demo`."""
