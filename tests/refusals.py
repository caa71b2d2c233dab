"""What every error of the library has: what was found, what is expected, and a remedy."""

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pytest

FOUR_PARTS = re.compile(r"\w+: [^\n]+\n  found:    \S[^\n]*\n  expected: \S[^\n]*\n  remedy:   \S[^\n]*")


def complaint(call: Callable[[], Any]) -> str:
    """The text of the `ValueError` that a call raises: exactly four lines, one part in each."""
    with pytest.raises(ValueError) as error:
        call()
    assert FOUR_PARTS.fullmatch(str(error.value)), str(error.value)
    return str(error.value)


@contextlib.contextmanager
def refused(match: str, *words: str) -> Iterator[None]:
    """A `ValueError` that fits this pattern, has its three parts, and says these words."""
    with pytest.raises(ValueError) as error:
        yield
    text = str(error.value)
    assert re.search(match, text), text
    for word in ("found:", "expected:", "remedy:", *words):
        assert word in text, f"{word!r} is not in:\n{text}"


Rows = Sequence[tuple[Callable[[], Any], str]]


def each_refused(rows: Rows | Mapping[str, tuple[Callable[[], Any], str]]) -> Callable[..., None]:
    """A test of rows, with names or without: each call raises a `ValueError` that has its three parts and fits."""
    pairs, names = (rows.values(), rows) if isinstance(rows, Mapping) else (rows, None)

    @pytest.mark.parametrize(("call", "said"), pairs, ids=names)
    def test(call: Callable[[], Any], said: str) -> None:
        with refused(said):
            call()

    return test
