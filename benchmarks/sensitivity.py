"""How much optimizers notice which of many equivalent weight sets they train: tables of `measure.gauge_sensitivity`.

    python -m benchmarks.sensitivity
    python -m benchmarks.sensitivity --optimizers "optax.adamw optax.contrib.muon gauge_optax.ddc_adamw"
    python -m benchmarks.sensitivity --condition 10 --steps 5 --out outputs/sensitivity

Every optimizer trains one attention layer from several weight sets of one function. The table says by how much the
steps differ in the products that the layer's function depends on: 0 if the optimizer sees the function alone. A second
table does the same for clipping by the global norm, which differs between these weight sets, but not on the slice. An
optimizer is the dotted name of a function that takes a learning_rate; one with an argument `gauges` gets the layer's.
"""

import dataclasses
import importlib
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import gauge_optax as go
from examples.studies import harness, report
from examples.studies.harness import Result
from gauge_optax.measure.sensitivity import Sensitivity

Cell = dict[str, Any]

OPTIMIZERS = (
    "optax.sgd",
    "optax.adamw",
    "optax.lion",
    "optax.adafactor",
    "optax.contrib.muon",
    "gauge_optax.quotient_adamw",
    "gauge_optax.quotient_muon",
)

# The layer ----------------------------------------------------------------------------------------

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
        "O": tuple(go.head_rotation(left | right) for left, right in (_SCORES, _OUTPUTS)),
        "GL": tuple(go.head_linear(left, right) for left, right in (_SCORES, _OUTPUTS)),
    }
    return Attention(params, loss_fn, represent, groups)


def _einsum(spec: str, a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.einsum(spec, a, b, precision=jax.lax.Precision.HIGHEST)


# Measuring ----------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Config:
    """Optimizers, and what their rows share; `condition` is the largest one of the elements of GL(d_h)."""

    optimizers: str = " ".join(OPTIMIZERS)
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


def measured(c: Config) -> Result:
    """Both tables."""
    with jax.enable_x64(not c.float32):
        layer, elements = jax.random.split(jax.random.key(c.seed))
        model = attention(layer)
        return {
            "arguments": dataclasses.asdict(c),
            "dtype": jnp.zeros(()).dtype.name,
            "optimizers": {
                name: {group: row(c, model, elements, group, name) for group in c.scales}
                for name in c.optimizers.split()
            },
            "clipping": clipping(c, model, elements),
        }


def row(c: Config, model: Attention, key: jax.Array, group: str, name: str) -> Cell:
    """One optimizer under one group, or the words in which the optimizer refused these gauges."""
    module, _, last = name.rpartition(".")
    factory = getattr(importlib.import_module(module), last)
    names, options = inspect.signature(factory).parameters, dict[str, Any](learning_rate=c.learning_rate)
    if "gauges" in names:
        options["gauges"] = model.groups[group]
    if "muon_weight_dimension_numbers" in names:  # so that `optax.contrib.muon` reads every head as a matrix
        options["muon_weight_dimension_numbers"] = go.product(model.groups["O"]).muon_dimension_numbers
    try:
        return sensitivity(c, model, key, group, factory(**options))
    except ValueError as error:
        return {"refused": str(error)}


def sensitivity(c: Config, model: Attention, key: jax.Array, group: str, tx: optax.GradientTransformation) -> Cell:
    """How much the step's motion differs between equal weights."""

    def plain(result: Sensitivity) -> Cell:
        return {
            "relative_change": np.asarray(result.relative_change, float).tolist(),
            "mean": float(result.mean),
            "max": float(result.max),
            "per_gauge": [plain(part) for part in result.per_gauge],
        }

    return plain(go.measure.gauge_sensitivity(
        tx, model.loss_fn, model.params, model.groups[group], represent=model.represent, key=key,
        num_samples=c.samples, scale=c.scales[group], steps=c.steps,
    ))


def clipping(c: Config, model: Attention, key: jax.Array) -> Cell:
    """The second table, under the linear changes of basis: rotations leave every norm alone."""
    gauges = model.groups["GL"]
    raw, on_slice = gradient_norms(c, model, key)
    most = 0.5 * min(*raw, *on_slice)
    clip, sgd = optax.clip_by_global_norm(most), optax.sgd(c.learning_rate)
    chains = {
        "clip_by_global_norm, sgd": optax.chain(clip, sgd),
        "clip_by_global_norm, scale_by_opposite_gram, sgd": optax.chain(
            clip, go.links.scale_by_opposite_gram(gauges), sgd
        ),
        "quotient(clip_by_global_norm, sgd)": go.quotient(optax.chain(clip, sgd), gauges),
    }
    found = {name: sensitivity(c, model, key, "GL", tx) for name, tx in chains.items()}
    return {"raw_norms": raw, "slice_norms": on_slice, "max_norm": most, "optimizers": found}


def gradient_norms(c: Config, model: Attention, key: jax.Array) -> tuple[list[float], list[float]]:
    """The gradient's global norm, raw and on the slice, at θ and at all equivalent weights."""
    group, keys = go.product(model.groups["GL"]), jax.random.split(key, c.samples)
    # The inner transformation keeps the norm of the gradient that it gets as its state.
    tx = go.quotient(
        optax.GradientTransformation(lambda _: jnp.zeros(()), lambda g, *_: (g, optax.tree.norm(g))), group
    )

    def norms(params: Any) -> tuple[jax.Array, jax.Array]:
        grads = jax.grad(model.loss_fn)(params)
        _, state = tx.update(grads, tx.init(params), params)
        return optax.tree.norm(grads), state.inner_state

    def at_all_points(params: Any) -> tuple[jax.Array, jax.Array]:
        twins = jax.vmap(lambda k: group.act(group.sample(k, params, c.scales["GL"]), params))(keys)
        return jax.vmap(norms)(jax.tree.map(lambda p, twin: jnp.concatenate([p[None], twin]), params, twins))

    raw, on_slice = jax.jit(at_all_points)(model.params)
    return np.asarray(raw, float).tolist(), np.asarray(on_slice, float).tolist()


# Page ---------------------------------------------------------------------------------------------


def page(result: Result) -> str:
    """Both tables: optimizers down; mean and maximum per group across."""
    c, clipped = Config(**result["arguments"]), result["clipping"]
    general = f"GL(d_h), condition <= {c.condition:g}"
    heads = [f"{group}, {x}" for group in ("O(d_h)", general) for x in ("mean", "max")]
    rows = [
        [name, *(x for cell in cells.values() for x in _shown(cell))] for name, cells in result["optimizers"].items()
    ]
    clips = [[name, *_shown(cell)] for name, cell in clipped["optimizers"].items()]
    ranges = [f"{min(x):.3g} to {max(x):.3g}" for x in (clipped["raw_norms"], clipped["slice_norms"])]
    refused = [
        f"{name} refused {general if group == 'GL' else 'O(d_h)'}: {cell['refused']}"
        for name, cells in result["optimizers"].items() for group, cell in cells.items() if "refused" in cell
    ]
    return "\n\n".join([
        "# How much optimizers notice the representative",
        f"Relative change of the represented motion between equivalent weights: attention, {HEADS} heads of {HEAD}, "
        f"{result['dtype']}; {c.samples} equivalent weights, {c.steps} steps, learning rate {c.learning_rate:g}, seed "
        f"{c.seed}.",
        report.markdown([["optimizer", *heads], *rows]), *refused,
        f"Clipping at norm {clipped['max_norm']:.2g}. Gradient norms of the equivalent weights under GL(d_h): raw "
        f"{ranges[0]}, on the slice {ranges[1]}.",
        report.markdown([["optimizer", *heads[2:]], *clips]),
    ]) + "\n"


def _shown(cell: Cell) -> list[str]:
    return [f"{cell[field]:.2g}" if field in cell else "refused" for field in ("mean", "max")]


def main(argv: Sequence[str] | None = None) -> Result:
    """Measures, prints the tables, writes JSON and page."""
    return harness.once(__doc__, "sensitivity", measured, page, Config(), Path("outputs/benchmarks"), argv)


if __name__ == "__main__":
    main()
