"""What every error of the library has: what was found, what is expected, and a remedy."""

import contextlib
import re
from collections.abc import Iterator

import pytest


@contextlib.contextmanager
def refused(match: str, *words: str) -> Iterator[None]:
    """A `ValueError` that fits this pattern, has its three parts, and says these words."""
    with pytest.raises(ValueError) as error:
        yield
    text = str(error.value)
    assert re.search(match, text), text
    for word in ("found:", "expected:", "remedy:", *words):
        assert word in text, f"{word!r} is not in:\n{text}"
