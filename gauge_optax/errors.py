"""The form of every error: what is wrong, what was found, what was expected, and what to write instead."""

import sys
import warnings
from typing import Any


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


def kind_of(value: Any) -> str:
    """Names the class of a value, with its article, for the part `found` of a message.

    >>> from gauge_optax.errors import kind_of
    >>> [kind_of(x) for x in (3, {}, None, jnp.ones(2))]
    ['an int', 'a dict', 'None', 'an array']
    """
    if value is None:
        return "None"
    name = "array" if hasattr(value, "dtype") and hasattr(value, "shape") else type(value).__name__
    return f"{'an' if name[0] in 'aeiouAEIO' else 'a'} {name}"


def counted(number: int, one: str, more: str = "") -> str:
    """Writes a number with its noun.

    >>> from gauge_optax.errors import counted
    >>> counted(1, "leaf", "leaves"), counted(2, "leaf", "leaves"), counted(0, "batch", "batches")
    ('1 leaf', '2 leaves', '0 batches')
    """
    return f"{number} {one if number == 1 else more or one + 's'}"


def warn(message: ValueError | str) -> None:
    """Warns with a message, at the line outside the library that led here."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and str(frame.f_globals.get("__name__")).split(".")[0] == "gauge_optax":
        frame, level = frame.f_back, level + 1
    warnings.warn(str(message), stacklevel=level)
