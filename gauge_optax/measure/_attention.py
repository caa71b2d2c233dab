"""An attention layer to measure optimizers on: multi-head, no rotary, biased queries and values, in plain JAX.

Scores see W_Q·W_Kᵀ of a head and outputs W_V·W_O, a bias being one more row of the factor it belongs to (§1 of "When
Equivalent Weights Train Differently"). Biases are stored as that row, (1, heads, d_h), so that Muon too reads one
matrix per head. There is no key bias: a constant over keys has no gradient, and Adam turns its rounding into motion.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from gauge_optax.gauges.base import Gauge
from gauge_optax.gauges.linear import head_linear
from gauge_optax.gauges.rotation import head_rotation
from gauge_optax.linalg import HIGHEST, real_dtype

MODEL, HEADS, HEAD = 16, 2, 8
BATCH, LENGTH = 4, 8

_SCORES = (
    {"query/kernel": "_ head basis", "query/bias": "_ head basis"},
    {"key/kernel": "_ head basis"},
)
_OUTPUTS = (
    {"value/kernel": "_ head basis", "value/bias": "_ head basis"},
    {"out/kernel": "head basis _"},
)


class Attention(NamedTuple):
    """The layer, its loss, what it represents and its symmetries.

    Attributes:
      params: a starting point, in `real_dtype()`.
      loss_fn: params → mean squared error on fixed random sequences.
      represent: params → per head, the two products that the layer's function depends on.
      groups: "O", the rotations of the two head bases, and "GL", all their linear changes.
    """

    params: Any
    loss_fn: Callable[[Any], jax.Array]
    represent: Callable[[Any], Any]
    groups: Mapping[str, tuple[Gauge, ...]]


def attention(key: jax.Array) -> Attention:
    """A layer with random weights and data.

    Args:
      key: a PRNG key for both.

    Returns:
      The layer.
    """
    weights, inputs, targets = jax.random.split(key, 3)
    shape = (BATCH, LENGTH, MODEL)
    x, y = jax.random.normal(inputs, shape, real_dtype()), jax.random.normal(targets, shape, real_dtype())
    groups = {
        "O": tuple(head_rotation(left | right) for left, right in (_SCORES, _OUTPUTS)),
        "GL": tuple(head_linear(left, right) for left, right in (_SCORES, _OUTPUTS)),
    }
    return Attention(_init(weights), lambda params: jnp.mean(jnp.square(_apply(params, x) - y)), _represent, groups)


def _init(key: jax.Array) -> Any:
    inner = (MODEL, HEADS, HEAD)
    keys = iter(jax.random.split(key, 6))

    def drawn(*shape: int) -> jax.Array:
        return jax.random.normal(next(keys), shape, real_dtype()) / MODEL**0.5

    return {
        "query": {"kernel": drawn(*inner), "bias": drawn(1, HEADS, HEAD)},
        "key": {"kernel": drawn(*inner)},
        "value": {"kernel": drawn(*inner), "bias": drawn(1, HEADS, HEAD)},
        "out": {"kernel": drawn(HEADS, HEAD, MODEL)},
    }


def _apply(params: Any, x: jax.Array) -> jax.Array:
    """Inputs (batch, length, model) → outputs of the same shape."""
    queries, values = (_project(x, params[name]) for name in ("query", "value"))
    keys = _einsum("blm,mhd->blhd", x, params["key"]["kernel"])
    weights = jax.nn.softmax(_einsum("bqhd,bkhd->bhqk", queries, keys) / HEAD**0.5)
    mixed = _einsum("bhqk,bkhd->bqhd", weights, values)
    return _einsum("blhd,hdm->blm", mixed, params["out"]["kernel"])


def _represent(params: Any) -> Any:
    """M_QK and M_VO per head, (heads, 1 + model, model)."""
    queries, values = (_rows(params[name]) for name in ("query", "value"))
    return {
        "QK": _einsum("mhd,nhd->hmn", queries, params["key"]["kernel"]),
        "VO": _einsum("mhd,hdn->hmn", values, params["out"]["kernel"]),
    }


def _project(x: jax.Array, linear: Any) -> jax.Array:
    return _einsum("blm,mhd->blhd", x, linear["kernel"]) + linear["bias"]


def _rows(linear: Any) -> jax.Array:
    return jnp.concatenate([linear["kernel"], linear["bias"]])


def _einsum(spec: str, a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.einsum(spec, a, b, precision=HIGHEST)
