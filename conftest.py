"""At the root because the package's doctests, too, need these names."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--suite", choices=("quick", "core", "parts", "studies"), default=None,
        help="one suite (tests/suites.py), or quick: the core and a sample of the others",
    )


@pytest.fixture(autouse=True)
def _doctest_names(doctest_namespace: dict[str, Any]) -> None:
    import gauge_optax as go

    doctest_namespace.update(go=go, jax=jax, jnp=jnp, optax=optax)
