"""How much optimizers notice which of many equivalent weight sets they train: tables of `measure.gauge_sensitivity`.

    python -m benchmarks.sensitivity
    python -m benchmarks.sensitivity --optimizers optax.adamw optax.contrib.muon gauge_optax.ddc_adamw
    python -m benchmarks.sensitivity --condition 10 --steps 5 --json sensitivity.json

Every optimizer trains one attention layer from several weight sets of one function. The table says by how much the
steps differ in the products that the layer's function depends on: 0 if the optimizer sees the function alone. A second
table does the same for clipping by the global norm, which differs between these weight sets, but not on the slice.
"""

import argparse
import difflib
import importlib
import inspect
import itertools
import json
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax

import gauge_optax as go
from gauge_optax.measure.sensitivity import Sensitivity

Factory = Callable[..., optax.GradientTransformation]
Json = dict[str, Any]

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


# The program --------------------------------------------------------------------------------------


class Setting(NamedTuple):
    """What every row of the tables shares.

    Attributes:
      model: the layer.
      key: a PRNG key for the equivalent weights, which are the same in every row.
      rate: the learning rate.
      samples: how many equivalent weight sets.
      scales: size of the group elements, by group.
      names: what the groups are called in the tables.
      steps: how many steps are taken before the difference is read.
    """

    model: Attention
    key: jax.Array
    rate: float
    samples: int
    scales: Mapping[str, float]
    names: Mapping[str, str]
    steps: int


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, prints the tables and writes the JSON.

    Args:
      argv: arguments; by default the process's.

    Returns:
      The exit code. Bad arguments raise `SystemExit` with code 2.
    """
    parser = _parser()
    args = parser.parse_args(argv)
    try:
        if args.json is not None and not args.json.parent.is_dir():
            raise ValueError(f"--json: no directory '{args.json.parent}'")
        factories = {name: _optimizer(name) for name in args.optimizers}
    except ValueError as error:
        parser.error(str(error))
    report: Json = {"arguments": {name: value for name, value in vars(args).items() if name != "json"}}
    with jax.enable_x64(not args.float32):
        layer, elements = jax.random.split(jax.random.key(args.seed))
        scales = {"O": 1.0, "GL": 0.5 * math.log(args.condition)}
        names = {"O": "O(d_h)", "GL": f"GL(d_h), condition <= {args.condition:g}"}
        setting = Setting(attention(layer), elements, args.learning_rate, args.samples, scales, names, args.steps)
        title = (
            "Relative change of the represented motion between equivalent weights",
            f"attention, {HEADS} heads of {HEAD}, {jnp.zeros(()).dtype.name}; equivalent weights: {args.samples}, "
            f"steps: {args.steps}, learning rate: {args.learning_rate:g}, seed: {args.seed}",
        )
        for line in itertools.chain(title, _optimizers(setting, factories, report), _clipping(setting, report)):
            sys.stdout.write(f"{line}\n")
            sys.stdout.flush()
    if args.json is not None:
        args.json.write_text(json.dumps(report, indent=2) + "\n")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.sensitivity",
        description="How much optimizers notice the representative: relative change of what their steps do to the "
        "head products of an attention layer, between weights that are one function.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "--optimizers", nargs="+", default=list(OPTIMIZERS), metavar="NAME",
        help="dotted names of functions that take a learning_rate; those with an argument `gauges` get the layer's",
    )
    parser.add_argument("--learning-rate", type=_above(float, 0.0), default=1e-3, metavar="RATE", help="learning rate")
    parser.add_argument("--samples", type=_above(int, 0), default=8, help="how many equivalent weights")
    parser.add_argument(
        "--condition", type=_above(float, 1.0), default=100.0,
        help="largest condition number of the elements of GL(d_h); those of O(d_h) are uniform",
    )
    parser.add_argument("--steps", type=_above(int, 0), default=1, help="how many steps before the motion is read")
    parser.add_argument("--seed", type=int, default=0, help="of the layer, its data and the equivalent weights")
    parser.add_argument("--float32", action="store_true", help="measure in float32 instead of float64")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to this file, too")
    return parser


def _above(kind: type[int] | type[float], least: float) -> Callable[[str], float]:
    """A parser of finite numbers above `least`; argparse reports the error that it raises."""

    def parse(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not least < value < math.inf:
            noun = "a whole number" if kind is int else "a number"
            raise argparse.ArgumentTypeError(f"{text!r} is not {noun} above {least:g}")
        return value

    return parse


def _optimizer(name: str) -> Factory:
    """The function behind a dotted name, which a learning rate and gauges must be enough to call."""
    path, _, last = name.rpartition(".")
    if not path:
        raise ValueError(f"no optimizer '{name}': write its module too, as in optax.{name or 'adamw'}")
    try:
        module = importlib.import_module(path)
    except ModuleNotFoundError as error:
        if not f"{path}.".startswith(f"{error.name}."):
            raise
        raise ValueError(f"no optimizer '{name}': there is no module '{error.name}'") from error
    factory: Any = getattr(module, last, None)
    if not callable(factory):
        near = difflib.get_close_matches(last, [n for n, value in vars(module).items() if callable(value)], 1)
        hint = f"; did you mean {path}.{near[0]}?" if near else ""
        raise ValueError(f"no optimizer '{name}': '{path}' has no function '{last}'{hint}")
    parameters = inspect.signature(factory).parameters
    if "learning_rate" not in parameters:
        raise ValueError(f"'{name}' is no optimizer: it takes no learning_rate")
    rest = [p for p in parameters.values() if p.name not in ("learning_rate", "gauges")]
    required = [p.name for p in rest if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    if required:
        raise ValueError(f"'{name}' needs {', '.join(required)} too: write a function that takes a learning_rate only")
    return cast(Factory, factory)


# Measuring ----------------------------------------------------------------------------------------


def _optimizers(setting: Setting, factories: Mapping[str, Factory], report: Json) -> Iterator[str]:
    """The first table, a line as soon as it is measured; the figures go to the report."""
    rows = report["optimizers"] = {}
    yield from _head(setting.names.values(), factories)
    for name, factory in factories.items():
        rows[name] = {group: _cell(setting, group, factory) for group in setting.names}
        yield _row(setting.names.values(), factories, name, rows[name].values())
    for name, row in rows.items():
        for group, cell in row.items():
            if "refused" in cell:
                yield f"\n{name} refused {setting.names[group]}: {cell['refused']}"


def _cell(setting: Setting, group: str, factory: Factory) -> Json:
    """One optimizer under one group, or the words in which the optimizer refused these gauges."""
    gauges, names = setting.model.groups, inspect.signature(factory).parameters
    options: Json = {"learning_rate": setting.rate}
    if "gauges" in names:
        options["gauges"] = gauges[group]
    if "muon_weight_dimension_numbers" in names:  # so that `optax.contrib.muon` reads every head as a matrix
        options["muon_weight_dimension_numbers"] = go.product(gauges["O"]).muon_dimension_numbers
    try:
        return _measured(setting, group, factory(**options))
    except ValueError as error:
        return {"refused": str(error)}


def _measured(setting: Setting, group: str, tx: optax.GradientTransformation) -> Json:
    def plain(result: Sensitivity) -> Json:
        return {
            "relative_change": np.asarray(result.relative_change, float).tolist(),
            "mean": float(result.mean),
            "max": float(result.max),
            "per_gauge": [plain(part) for part in result.per_gauge],
        }

    model = setting.model
    return plain(go.measure.gauge_sensitivity(
        tx, model.loss_fn, model.params, model.groups[group], represent=model.represent, key=setting.key,
        num_samples=setting.samples, scale=setting.scales[group], steps=setting.steps,
    ))


def _clipping(setting: Setting, report: Json) -> Iterator[str]:
    """The second table, under the linear changes of basis: rotations leave every norm alone."""
    gauges = setting.model.groups["GL"]
    raw, on_slice = _gradient_norms(setting)
    most = 0.5 * min(*raw, *on_slice)
    report["clipping"] = {"raw_norms": raw, "slice_norms": on_slice, "max_norm": most, "optimizers": {}}
    ranges = [f"{min(values):.3g} to {max(values):.3g}" for values in (raw, on_slice)]
    yield f"\nClipping at norm {most:.2g}"
    yield f"gradient norms of the equivalent weights under GL(d_h): raw {ranges[0]}, on the slice {ranges[1]}"
    clip, sgd = optax.clip_by_global_norm(most), optax.sgd(setting.rate)
    chains = {
        "clip_by_global_norm, sgd": optax.chain(clip, sgd),
        "clip_by_global_norm, scale_by_opposite_gram, sgd": optax.chain(
            clip, go.links.scale_by_opposite_gram(gauges), sgd
        ),
        "quotient(clip_by_global_norm, sgd)": go.quotient(optax.chain(clip, sgd), gauges),
    }
    yield from _head([setting.names["GL"]], chains)
    for name, tx in chains.items():
        cell = report["clipping"]["optimizers"][name] = _measured(setting, "GL", tx)
        yield _row([setting.names["GL"]], chains, name, [cell])


def _gradient_norms(setting: Setting) -> tuple[list[float], list[float]]:
    """The gradient's global norm, raw and on the slice, at θ and at all equivalent weights."""
    model, group = setting.model, go.product(setting.model.groups["GL"])
    keys = jax.random.split(setting.key, setting.samples)
    # The inner transformation keeps the norm of the gradient that it gets as its state.
    tx = go.quotient(
        optax.GradientTransformation(lambda _: jnp.zeros(()), lambda g, *_: (g, optax.tree.norm(g))), group
    )

    def norms(params: Any) -> tuple[jax.Array, jax.Array]:
        grads = jax.grad(model.loss_fn)(params)
        _, state = tx.update(grads, tx.init(params), params)
        return optax.tree.norm(grads), state.inner_state

    def at_all_points(params: Any) -> tuple[jax.Array, jax.Array]:
        twins = jax.vmap(lambda k: group.act(group.sample(k, params, setting.scales["GL"]), params))(keys)
        return jax.vmap(norms)(jax.tree.map(lambda p, twin: jnp.concatenate([p[None], twin]), params, twins))

    raw, on_slice = jax.jit(at_all_points)(model.params)
    return np.asarray(raw, float).tolist(), np.asarray(on_slice, float).tolist()


# The tables' lines: optimizers down; mean and maximum per group across ----------------------------


def _head(groups: Iterable[str], names: Iterable[str]) -> Iterator[str]:
    """An empty line, the groups, what stands below them."""
    groups = list(groups)
    width = max(map(len, ("optimizer", *names)))
    yield f"\n{'':{width}}" + "".join(f"{group:>{_width(group) + 10}}" for group in groups)
    yield f"{'optimizer':{width}}" + "".join(f"{'mean':>{_width(group)}}{'max':>10}" for group in groups)


def _row(groups: Iterable[str], names: Iterable[str], name: str, cells: Iterable[Json]) -> str:
    """One optimizer."""

    def entry(cell: Json, field: str) -> str:
        return f"{cell[field]:.2g}" if field in cell else "refused"

    columns = (
        f"{entry(cell, 'mean'):>{_width(group)}}{entry(cell, 'max'):>10}"
        for group, cell in zip(groups, cells, strict=True)
    )
    return f"{name:{max(map(len, ('optimizer', *names)))}}" + "".join(columns)


def _width(group: str) -> int:
    """Width of the first of a group's two columns, so that its heading fits above both."""
    return max(10, len(group) + 2 - 10)


if __name__ == "__main__":
    sys.exit(main())
