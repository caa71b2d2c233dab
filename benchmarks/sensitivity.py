"""How much optimizers notice which of many equivalent weight sets they train: a table of `measure.gauge_sensitivity`.

    python -m benchmarks.sensitivity
    python -m benchmarks.sensitivity --optimizers "optax.adamw optax.contrib.muon gauge_optax.ddc_adamw"
    python -m benchmarks.sensitivity --condition 10 --steps 5 --out outputs/sensitivity

Every optimizer trains one attention layer from several weight sets of one function. The table says by how much the
steps differ in the products that the layer's function depends on: 0 if the optimizer sees the function alone. An
optimizer is the dotted name of a function that takes a learning_rate; one with an argument `gauges` gets the layer's.
"""

import dataclasses
import importlib
import inspect
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import gauge_optax as go
from examples.studies import harness, report

OPTIMIZERS = "optax.sgd optax.adamw optax.lion optax.adafactor optax.contrib.muon gauge_optax.quotient_adamw " \
    "gauge_optax.quotient_muon"

# The layer ----------------------------------------------------------------------------------------

MODEL, HEADS, HEAD = 16, 2, 8
BATCH, LENGTH = 4, 8
_SIDES = (
    ({"query/kernel": "_ head basis", "query/bias": "_ head basis"}, {"key/kernel": "_ head basis"}),
    ({"value/kernel": "_ head basis", "value/bias": "_ head basis"}, {"out/kernel": "head basis _"}),
)


class Attention(NamedTuple):
    """A multi-head attention layer without rotary positions, its loss, what it represents and its symmetries.

    Attributes:
      params: a starting point, in the default floating dtype.
      loss_fn: params → mean squared error on fixed random sequences.
      represent: params → per head, the two products that the layer's function depends on, W_Q·W_Kᵀ and W_V·W_O with
        biases as one more row, (heads, 1 + model, model).
      groups: "O", the rotations of the two head bases, and "GL", all their linear changes.
    """

    params: Any
    loss_fn: Callable[[Any], jax.Array]
    represent: Callable[[Any], Any]
    groups: Mapping[str, tuple[go.Gauge, ...]]


def attention(key: jax.Array) -> Attention:
    """A layer with random weights and data, both drawn from this PRNG key."""
    weights, inputs, targets = jax.random.split(key, 3)
    keys = iter(jax.random.split(weights, 6))
    x, y = (jax.random.normal(k, (BATCH, LENGTH, MODEL)) for k in (inputs, targets))

    def drawn(*shape: int) -> jax.Array:
        return jax.random.normal(next(keys), shape) / MODEL**0.5

    # A bias is stored as a row, (1, heads, d_h), so that Muon too reads one matrix per head. There is no key bias: it
    # adds a constant to all scores of a query and has no gradient, and Adam would turn its roundoff into steps.
    params = {
        "query": {"kernel": drawn(MODEL, HEADS, HEAD), "bias": drawn(1, HEADS, HEAD)},
        "key": {"kernel": drawn(MODEL, HEADS, HEAD)},
        "value": {"kernel": drawn(MODEL, HEADS, HEAD), "bias": drawn(1, HEADS, HEAD)},
        "out": {"kernel": drawn(HEADS, HEAD, MODEL)},
    }

    def loss_fn(params: Any) -> jax.Array:
        def project(linear: Any) -> jax.Array:
            return _einsum("blm,mhd->blhd", x, linear["kernel"]) + linear.get("bias", 0.0)

        q, k, v = (project(params[name]) for name in ("query", "key", "value"))
        attended = jax.nn.softmax(_einsum("bqhd,bkhd->bhqk", q, k) / HEAD**0.5)
        outputs = _einsum("blhd,hdm->blm", _einsum("bhqk,bkhd->bqhd", attended, v), params["out"]["kernel"])
        return jnp.mean(jnp.square(outputs - y))

    def represent(params: Any) -> Any:
        queries, values = (jnp.concatenate([params[n]["kernel"], params[n]["bias"]]) for n in ("query", "value"))
        return {
            "QK": _einsum("mhd,nhd->hmn", queries, params["key"]["kernel"]),
            "VO": _einsum("mhd,hdn->hmn", values, params["out"]["kernel"]),
        }

    groups = {
        "O": tuple(go.head_rotation(left | right) for left, right in _SIDES),
        "GL": tuple(go.head_linear(left, right) for left, right in _SIDES),
    }
    return Attention(params, loss_fn, represent, groups)


def _einsum(spec: str, a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.einsum(spec, a, b, precision=jax.lax.Precision.HIGHEST)


# Measuring ----------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Config:
    """Optimizers, and what their rows share; `condition` is the largest one of the elements of GL(d_h)."""

    optimizers: str = OPTIMIZERS
    learning_rate: float = 1e-3
    samples: int = 8
    condition: float = 100.0
    steps: int = 1
    seed: int = 0
    float32: bool = False

    @property
    def scales(self) -> dict[str, float]:
        """The size of group elements, by group."""
        return {"O": 1.0, "GL": 0.5 * math.log(self.condition)}


def measured(c: Config) -> harness.Result:
    """A row per optimizer."""
    with jax.enable_x64(not c.float32):
        layer, elements = jax.random.split(jax.random.key(c.seed))
        model = attention(layer)
        rows = {name: {x: cell(c, model, elements, x, name) for x in c.scales} for name in c.optimizers.split()}
        return {"arguments": dataclasses.asdict(c), "dtype": jnp.zeros(()).dtype.name, "optimizers": rows}


def cell(c: Config, model: Attention, key: jax.Array, group: str, name: str) -> dict[str, Any]:
    """How much the step's motion differs between equal weights, or the words in which these gauges were refused."""
    module, _, last = name.rpartition(".")
    factory = getattr(importlib.import_module(module), last)
    gauges, options = model.groups[group], dict[str, Any](learning_rate=c.learning_rate)
    names = inspect.signature(factory).parameters
    if "gauges" in names:
        options["gauges"] = gauges
    if "muon_weight_dimension_numbers" in names:  # so that `optax.contrib.muon` reads every head as a matrix
        options["muon_weight_dimension_numbers"] = go.product(model.groups["O"]).muon_dimension_numbers
    try:
        found = go.measure.gauge_sensitivity(
            factory(**options), model.loss_fn, model.params, gauges, represent=model.represent, key=key,
            num_samples=c.samples, scale=c.scales[group], steps=c.steps,
        )
    except ValueError as error:
        return {"refused": str(error)}
    return {"relative_change": np.asarray(found.relative_change, float).tolist(), "mean": float(found.mean),
            "max": float(found.max)}


# Page ---------------------------------------------------------------------------------------------


def page(result: harness.Result) -> str:
    """Optimizers down; mean and maximum per group across."""
    c = Config(**result["arguments"])
    groups = {"O": "O(d_h)", "GL": f"GL(d_h), condition <= {c.condition:g}"}
    rows, refused = [["optimizer", *(f"{group}, {x}" for group in groups.values() for x in ("mean", "max"))]], []
    for name, cells in result["optimizers"].items():
        rows.append([name, *(f"{x[k]:.2g}" if k in x else "refused" for x in cells.values() for k in ("mean", "max"))])
        refused += [f"{name} refused {groups[x]}: {cells[x]['refused']}" for x in cells if "refused" in cells[x]]
    return "\n\n".join([
        "# How much optimizers notice the representative",
        f"Relative change of the represented motion between equivalent weights: attention, {HEADS} heads of {HEAD}, "
        f"{result['dtype']}; {c.samples} equivalent weights, {c.steps} steps, learning rate {c.learning_rate:g}, seed "
        f"{c.seed}.", report.markdown(rows), *refused,
    ]) + "\n"


if __name__ == "__main__":
    harness.once(__doc__, "sensitivity", measured, page, Config(), Path("outputs/benchmarks"))
