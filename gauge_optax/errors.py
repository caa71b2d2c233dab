"""The form of every error: what is wrong, what was found, what was expected, and what to write instead."""


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
    return ValueError("\n  ".join(lines))
