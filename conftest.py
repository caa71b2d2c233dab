"""At the root because the package's doctests, too, need these names."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest


@pytest.fixture(autouse=True)
def _doctest_names(doctest_namespace: dict[str, Any]) -> None:
    import gauge_optax as go

    doctest_namespace.update(go=go, jax=jax, jnp=jnp, optax=optax)
