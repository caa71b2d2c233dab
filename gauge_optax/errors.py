"""The form of every error: what is wrong, what was found, what was expected, and what to write instead."""

import sys
import warnings


def binding_error(gauge: str, problem: str, found: str, expected: str, remedy: str) -> ValueError:
    """The error for arguments or a tree that do not fit; every message has these four parts.

    Args:
      gauge: name of the function that the user called, such as a gauge's constructor.
      problem: what is wrong, with the path, pattern or argument in quotes.
      found: what the tree or the call holds.
      expected: what it should hold.
      remedy: what to write instead.

    Returns:
      A `ValueError` to raise.

    >>> from gauge_optax.errors import binding_error
    >>> print(binding_error("rescale", "no leaf matches 'up'", "nothing", "a leaf", "write 'mlp/up'"))
    rescale: no leaf matches 'up'
      found:    nothing
      expected: a leaf
      remedy:   write 'mlp/up'
    """
    lines = (f"{gauge}: {problem}", f"found:    {found}", f"expected: {expected}", f"remedy:   {remedy}")
    return ValueError("\n  ".join(" ".join(line.splitlines()) for line in lines))


def warn(message: ValueError | str) -> None:
    """Warns with a message, at the line outside the library that led here."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and str(frame.f_globals.get("__name__")).split(".")[0] == "gauge_optax":
        frame, level = frame.f_back, level + 1
    warnings.warn(str(message), stacklevel=level)
