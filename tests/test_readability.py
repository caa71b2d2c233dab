"""How much of the package one update passes through: the budget of a reader."""

import pytest

from benchmarks import readability


@pytest.fixture(scope="module")
def rows() -> dict[str, dict[str, int]]:
    return readability.rows()


def test_an_update_of_quotient_is_short(rows: dict[str, dict[str, int]]) -> None:
    assert 0 < rows["quotient"]["files"] <= 10
    assert 0 < rows["quotient"]["functions"] <= 80
    assert 0 < rows["quotient"]["nouns"] <= 15


def test_plain_ddc_passes_few_files(rows: dict[str, dict[str, int]]) -> None:
    assert rows["quotient"]["files"] < rows["ddc_adamw, plain"]["files"] <= 14
