"""How much steps of optimizers depend on which of many equivalent weight sets is trained (`measure.gauge_sensitivity`).

    python -m benchmarks.sensitivity
    python -m benchmarks.sensitivity --optimizers "optax.adamw optax.contrib.muon gauge_optax.ddc_adamw"
    python -m benchmarks.sensitivity --condition 10 --steps 5 --out outputs/sensitivity

Every optimizer trains one attention layer from several weight sets of one function. The table says how much the steps
differ in the products that the layer's function depends on. The number is 0 if steps depend on the function alone. An
optimizer is given as the dotted name of a function with an argument `learning_rate`. If the function also has an
argument `gauges`, it gets the layer's gauges.
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
    """A multi-head attention layer without rotary positions: its weights, its loss, and its symmetries.

    Attributes:
      params: initial weights, in the default floating dtype.
      loss_fn: params → mean squared error on fixed random sequences.
      represent: params → for each head the two products that the layer's function depends on, W_Q·W_Kᵀ and W_V·W_O.
        Biases are one more row of a kernel, so that a product is (heads, 1 + model, model).
      groups: name of a group → gauges. "O" has rotations of the basis of queries and keys, and of that of values and
        outputs; "GL" has all invertible changes of these bases.
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

    # A bias is stored as a row, (1, heads, d_h), so that it is a matrix per head for Muon too. There is no key bias. It
    # would add a constant to all scores of a query, so that its gradient is zero but for roundoff, which Adam would
    # turn into steps.
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
    """The optimizers, and settings for all. `condition` is the largest condition number of elements of GL(d_h)."""

    optimizers: str = OPTIMIZERS
    learning_rate: float = 1e-3
    samples: int = 8
    condition: float = 100.0
    steps: int = 1
    seed: int = 0
    float32: bool = False

    @property
    def scales(self) -> dict[str, float]:
        """Group → the size of its random elements (the argument `scale` of `sample`)."""
        return {"O": 1.0, "GL": 0.5 * math.log(self.condition)}


def measured(c: Config) -> harness.Result:
    """Makes the result: one row per optimizer."""
    with jax.enable_x64(not c.float32):
        layer, elements = jax.random.split(jax.random.key(c.seed))
        model = attention(layer)
        rows = {name: {x: cell(c, model, elements, x, name) for x in c.scales} for name in c.optimizers.split()}
        return {"arguments": dataclasses.asdict(c), "dtype": jnp.zeros(()).dtype.name, "optimizers": rows}


def cell(c: Config, model: Attention, key: jax.Array, group: str, name: str) -> dict[str, Any]:
    """How much steps from weight sets of one function differ, or the error if the optimizer refuses these gauges."""
    module, _, last = name.rpartition(".")
    factory = getattr(importlib.import_module(module), last)
    gauges, options = model.groups[group], dict[str, Any](learning_rate=c.learning_rate)
    names = inspect.signature(factory).parameters
    if "gauges" in names:
        options["gauges"] = gauges
    if "muon_weight_dimension_numbers" in names:  # so that `optax.contrib.muon` has a matrix per head
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
    """The results as a Markdown page. Its table has a row per optimizer, and mean and maximum for each group."""
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
