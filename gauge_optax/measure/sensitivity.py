"""How much optimizers notice the representative: `gauge_sensitivity`, and its table for a list of them.

    python -m gauge_optax.measure.sensitivity
    python -m gauge_optax.measure.sensitivity --optimizers optax.adamw optax.contrib.muon gauge_optax.ddc_adamw
    python -m gauge_optax.measure.sensitivity --condition 10 --steps 5 --json sensitivity.json

Every optimizer takes its steps on one attention layer from weights that are one function, and the table says by how
much the steps differ in the products that the layer's function depends on: 0 if the optimizer sees the function. A
second table does the same for clipping by the global norm, which differs between these weights, but not on the slice.

Here: the program. Not here: the measure (`_sensitivity`) and the layer (`_attention`).
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

from gauge_optax.gauges.product import product
from gauge_optax.linalg import real_dtype
from gauge_optax.measure._attention import HEAD, HEADS, Attention, attention
from gauge_optax.measure._sensitivity import Sensitivity, gauge_sensitivity
from gauge_optax.optimizers._quotient import quotient

__all__ = ["Sensitivity", "gauge_sensitivity", "main"]

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
_OPPOSITE_GRAM = "gauge_optax.scale_by_opposite_gram"


class Setting(NamedTuple):
    """What every row of the tables shares.

    Attributes:
      model: the layer.
      key: of the representatives; the same ones in every row.
      rate: the learning rate.
      samples: how many representatives.
      scales: size of the elements, by group.
      names: what the groups are called in the tables.
      steps: how many steps before the difference is read.
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
      The exit code. Bad arguments leave by `SystemExit` with code 2.
    """
    parser = _parser()
    args = parser.parse_args(argv)
    try:
        if args.json is not None and not args.json.parent.is_dir():
            raise ValueError(f"--json: no directory '{args.json.parent}'")
        factories = {name: _optimizer(name) for name in args.optimizers}
        opposite_gram = _resolve(_OPPOSITE_GRAM)
    except ValueError as error:
        parser.error(str(error))
    report: Json = {"arguments": {name: value for name, value in vars(args).items() if name != "json"}}
    with jax.enable_x64(not args.float32):
        setting = _setting(args)
        lines = (_title(args), _optimizers(setting, factories, report), _clipping(setting, opposite_gram, report))
        for line in itertools.chain(*lines):
            sys.stdout.write(f"{line}\n")
            sys.stdout.flush()
    if args.json is not None:
        args.json.write_text(json.dumps(report, indent=2) + "\n")
    return 0


# Arguments ----------------------------------------------------------------------------------------


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m gauge_optax.measure.sensitivity",
        description="How much optimizers notice the representative: relative change of what their steps do to the "
        "head products of an attention layer, between weights that are one function.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "--optimizers", nargs="+", default=list(OPTIMIZERS), metavar="NAME",
        help="dotted names of functions that take a learning_rate; those with an argument `gauges` get the layer's",
    )  # fmt: skip
    parser.add_argument("--learning-rate", type=_above(float, 0.0), default=1e-3, metavar="RATE", help="learning rate")
    parser.add_argument("--samples", type=_above(int, 0), default=8, help="how many equivalent weights")
    parser.add_argument(
        "--condition", type=_above(float, 1.0), default=100.0,
        help="largest condition number of the elements of GL(d_h); those of O(d_h) are uniform",
    )  # fmt: skip
    parser.add_argument("--steps", type=_above(int, 0), default=1, help="how many steps before the motion is read")
    parser.add_argument("--seed", type=int, default=0, help="of the layer, its data and the equivalent weights")
    parser.add_argument("--float32", action="store_true", help="measure in float32 instead of float64")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to this file, too")
    return parser


def _above(kind: type[int] | type[float], least: float) -> Callable[[str], float]:
    """A finite number above this; argparse turns the error into its own."""

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
    """The optimizer behind a dotted name: a function that a learning rate and gauges are enough to call."""
    factory = _resolve(name)
    parameters = inspect.signature(factory).parameters
    if "learning_rate" not in parameters:
        raise ValueError(f"'{name}' is no optimizer: it takes no learning_rate")
    given = [p for p in parameters.values() if p.name not in ("learning_rate", "gauges")]
    others = [p.name for p in given if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    if others:
        raise ValueError(f"'{name}' needs {', '.join(others)} too: write a function that takes a learning_rate only")
    return factory


def _resolve(name: str) -> Factory:
    """The function behind a dotted name; raises ValueError in words for the user."""
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
        near = difflib.get_close_matches(last, [n for n, own in vars(module).items() if callable(own)], 1)
        hint = f"; did you mean {path}.{near[0]}?" if near else ""
        raise ValueError(f"no optimizer '{name}': '{path}' has no function '{last}'{hint}")
    return cast(Factory, factory)


# Measuring ----------------------------------------------------------------------------------------


def _setting(args: argparse.Namespace) -> Setting:
    layer, elements = jax.random.split(jax.random.key(args.seed))
    scales = {"O": 1.0, "GL": 0.5 * math.log(args.condition)}
    names = {"O": "O(d_h)", "GL": f"GL(d_h), condition <= {args.condition:g}"}
    return Setting(attention(layer), elements, args.learning_rate, args.samples, scales, names, args.steps)


def _cell(setting: Setting, group: str, factory: Factory) -> Json:
    """One optimizer under one group; an optimizer that has no answer to these gauges says so in its own words."""
    try:
        return _measured(setting, group, _made(setting, group, factory))
    except ValueError as error:
        return {"refused": str(error)}


def _made(setting: Setting, group: str, factory: Factory) -> optax.GradientTransformation:
    """The optimizer for one column; `optax.contrib.muon` is told that every head is a matrix."""
    model, names = setting.model, inspect.signature(factory).parameters
    options: Json = {"learning_rate": setting.rate}
    if "gauges" in names:
        options["gauges"] = model.groups[group]
    if "muon_weight_dimension_numbers" in names:
        options["muon_weight_dimension_numbers"] = product(model.groups["O"]).muon_dimension_numbers
    return factory(**options)


def _measured(setting: Setting, group: str, tx: optax.GradientTransformation) -> Json:
    model = setting.model
    found = gauge_sensitivity(
        tx, model.loss_fn, model.params, model.groups[group], represent=model.represent, key=setting.key,
        num_samples=setting.samples, scale=setting.scales[group], steps=setting.steps,
    )  # fmt: skip
    return _plain(found)


def _plain(found: Sensitivity) -> Json:
    return {
        "relative_change": np.asarray(found.relative_change, float).tolist(),
        "mean": float(found.mean),
        "max": float(found.max),
        "per_gauge": [_plain(own) for own in found.per_gauge],
    }


def _chains(setting: Setting, opposite_gram: Factory, most: float) -> dict[str, optax.GradientTransformation]:
    """Clipping before a step that sees coordinates, before one that does not, and on the slice."""
    gauges = setting.model.groups["GL"]
    clip, sgd = optax.clip_by_global_norm(most), optax.sgd(setting.rate)
    return {
        "clip_by_global_norm, sgd": optax.chain(clip, sgd),
        "clip_by_global_norm, scale_by_opposite_gram, sgd": optax.chain(clip, opposite_gram(gauges), sgd),
        "quotient(clip_by_global_norm, sgd)": quotient(optax.chain(clip, sgd), gauges),
    }


def _gradient_norms(setting: Setting) -> tuple[list[float], list[float]]:
    """The gradient's global norm, raw and on the slice, at θ and at its representatives."""
    model, group = setting.model, product(setting.model.groups["GL"])
    keys = jax.random.split(setting.key, setting.samples)
    # Inside, a transformation whose state is the norm of what it was given.
    tx = quotient(optax.GradientTransformation(lambda _: jnp.zeros(()), lambda g, *_: (g, optax.tree.norm(g))), group)

    def norms(params: Any) -> tuple[jax.Array, jax.Array]:
        grads = jax.grad(model.loss_fn)(params)
        _, state = tx.update(grads, tx.init(params), params)
        return optax.tree.norm(grads), state.inner_state

    def everywhere(params: Any) -> tuple[jax.Array, jax.Array]:
        twins = jax.vmap(lambda k: group.act(group.sample(k, params, setting.scales["GL"]), params))(keys)
        return jax.vmap(norms)(jax.tree.map(lambda p, twin: jnp.concatenate([p[None], twin]), params, twins))

    raw, on_slice = jax.jit(everywhere)(model.params)
    return np.asarray(raw, float).tolist(), np.asarray(on_slice, float).tolist()


# Text ---------------------------------------------------------------------------------------------


def _title(args: argparse.Namespace) -> Iterator[str]:
    yield "Relative change of the represented motion between equivalent weights"
    yield (
        f"attention, {HEADS} heads of {HEAD}, {real_dtype().name}; equivalent weights: {args.samples}, "
        f"steps: {args.steps}, learning rate: {args.learning_rate:g}, seed: {args.seed}"
    )


def _optimizers(setting: Setting, factories: Mapping[str, Factory], report: Json) -> Iterator[str]:
    """Lines as they are measured; the figures go to the report."""
    found = report["optimizers"] = {}
    table = _Table.of(setting.names.values(), factories)
    yield from table.head()
    for name, factory in factories.items():
        found[name] = {group: _cell(setting, group, factory) for group in setting.names}
        yield table.row(name, found[name].values())
    for name, row in found.items():
        for group, cell in row.items():
            if "refused" in cell:
                yield f"\n{name} refused {setting.names[group]}: {cell['refused']}"


def _clipping(setting: Setting, opposite_gram: Factory, report: Json) -> Iterator[str]:
    """The same for clipping, under the linear changes of basis: rotations keep every norm."""
    raw, on_slice = _gradient_norms(setting)
    most = 0.5 * min(*raw, *on_slice)
    report["clipping"] = {"raw_norms": raw, "slice_norms": on_slice, "max_norm": most, "optimizers": {}}
    yield f"\nClipping at norm {most:.2g}"
    yield f"gradient norms of the equivalent weights under GL(d_h): raw {_range(raw)}, on the slice {_range(on_slice)}"
    chains = _chains(setting, opposite_gram, most)
    table = _Table.of([setting.names["GL"]], chains)
    yield from table.head()
    for name, tx in chains.items():
        cell = report["clipping"]["optimizers"][name] = _measured(setting, "GL", tx)
        yield table.row(name, [cell])


def _range(values: Sequence[float]) -> str:
    return f"{min(values):.3g} to {max(values):.3g}"


class _Table(NamedTuple):
    """Optimizers down; mean and maximum per group across.

    Attributes:
      groups: heading of every pair of columns.
      width: of the column of names.
    """

    groups: tuple[str, ...]
    width: int

    @classmethod
    def of(cls, groups: Iterable[str], names: Iterable[str]) -> "_Table":
        return cls(tuple(groups), max(map(len, ("optimizer", *names))))

    def head(self) -> Iterator[str]:
        """An empty line, the groups, what is below them."""
        widths = [sum(pair) for pair in self._pairs()]
        yield f"\n{'':{self.width}}" + "".join(f"{g:>{w}}" for g, w in zip(self.groups, widths, strict=True))
        yield self._line("optimizer", ["mean", "max"] * len(self.groups))

    def row(self, name: str, cells: Iterable[Json]) -> str:
        """One optimizer."""
        return self._line(name, [_shown(cell, field) for cell in cells for field in ("mean", "max")])

    def _pairs(self) -> list[tuple[int, int]]:
        """Widths of the two columns of every group: its heading fits above them."""
        return [(max(10, len(g) + 2 - 10), 10) for g in self.groups]

    def _line(self, name: str, entries: Sequence[str]) -> str:
        widths = itertools.chain(*self._pairs())
        return f"{name:{self.width}}" + "".join(f"{x:>{w}}" for x, w in zip(entries, widths, strict=True))


def _shown(cell: Json, field: str) -> str:
    return f"{cell[field]:.2g}" if field in cell else "refused"


if __name__ == "__main__":
    sys.exit(main())
