"""What every test may ask for: float64 that ends with the test, and a watch that it did end."""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import pytest


@pytest.fixture(autouse=True)
def _x64_restored() -> Iterator[None]:
    """No test starts in, or leaves behind, another precision than the process began with."""
    assert jnp.zeros(()).dtype == jnp.float32, "a test before this one left x64 on"
    yield
    assert jnp.zeros(()).dtype == jnp.float32, "this test left x64 on"


@pytest.fixture
def x64() -> Iterator[None]:
    """float64 for the length of one test."""
    with jax.enable_x64(True):
        yield
