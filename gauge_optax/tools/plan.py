"""`plan`: what an optimizer, or a list of gauges, does to each leaf of a tree, as one table.

Gauges and copies come from the bindings, and bytes from the state. Rules are what the optimizer says of itself; where
it says nothing they come from the state, too. Decay is measured on one update with zero gradients.
"""

from __future__ import annotations

import dataclasses
import json
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from gauge_optax.binding import leaves_by_path
from gauge_optax.discovery.calls import bound_copies, template
from gauge_optax.errors import binding_error
from gauge_optax.gauges.gauge import Gauge, product
from gauge_optax.parts.matrices import matrices_of
from gauge_optax.transformation import GaugeTransformation, LeafRule
from gauge_optax.wrapped import walk
from gauge_optax.xla import quick_options

_ROUNDOFF = 1e-12  # of a leaf's norm, in float64
_DECAY = (
    "decay per step: the share of a leaf's norm that the first step removes where the gradient is zero; "
    "blank for a leaf that is zero today, whose decay cannot be measured"
)


class LeafPlan(NamedTuple):
    """One row.

    Attributes:
      leaf: normalised path.
      shape: its shape.
      gauges: what binds it: name, copy and named axes with their lengths.
      matrices: how the optimizer reads it, as "count × (rows, columns)", if it says so, and else how Muon would; "" for
        vectors.
      rule: what makes its update: Adam, polar, momentum, a bare gradient; "" for a list of gauges.
      decay: share of the leaf's norm that the first step removes where the gradient is zero (1e-5: a learning rate of
        1e-3 times a weight decay of 0.01). None where it cannot be measured: for a leaf that is zero today, shapes
        without values, a list of gauges.
      state_bytes: size of the state that mirrors it.
      axes: what a report of `discover` says of its axes, "_ neuron" for a matrix of inputs and outputs; "" without one,
        and for vectors.
    """

    leaf: str
    shape: tuple[int, ...]
    gauges: tuple[str, ...]
    matrices: str
    rule: str
    decay: float | None
    state_bytes: int
    axes: str = ""


class GaugePlan(NamedTuple):
    """One gauge: how many copies of its group there are, and on what.

    Attributes:
      gauge: its name.
      leaves: its patterns.
      instances: copies, one per combination of captures; each has its own element.
      axes: named axes of a copy with their lengths; each index has its own element too.
      dim: dimensions of all copies together.
      joint: what shares one element though it looks like layers; "" if nothing does.
    """

    gauge: str
    leaves: tuple[str, ...]
    instances: int
    axes: str
    dim: int
    joint: str


@dataclasses.dataclass(frozen=True, repr=False)
class Plan:
    """See `plan`.

    Attributes:
      leaves: a row per leaf, in tree order.
      gauges: a row per gauge, in list order.
      unbound: leaves that no gauge binds.
    """

    leaves: tuple[LeafPlan, ...]
    gauges: tuple[GaugePlan, ...]
    unbound: tuple[str, ...]

    @property
    def warnings(self) -> tuple[str, ...]:
        """Gauges that move several layers by one element."""
        return tuple(f"{g.gauge} of {', '.join(g.leaves)}: {g.joint}" for g in self.gauges if g.joint)

    def table(self) -> list[tuple[str, ...]]:
        """Rows of text, headings first. A column in which nothing stands is left out, and decay where there is none."""
        leaves = self.leaves
        columns: dict[str, list[str]] = {
            "leaf": [row.leaf for row in leaves],
            "shape": [str(row.shape) for row in leaves],
            "axes": [row.axes for row in leaves],
            "gauges": [", ".join(row.gauges) for row in leaves],
            "matrices": [row.matrices for row in leaves],
            "rule": [row.rule for row in leaves],
            "decay per step": ["" if row.decay is None else f"{row.decay:.2g}" for row in leaves] * self._decays,
            "state bytes": [str(row.state_bytes) if row.rule else "" for row in leaves],
        }
        told = {name: texts for name, texts in columns.items() if any(texts) or name == "gauges"}
        return [tuple(told), *zip(*told.values(), strict=True)]

    @property
    def _decays(self) -> bool:
        return any(row.decay for row in self.leaves)

    def markdown(self) -> str:
        """The tables in Markdown."""
        tables, notes = self._tables_and_notes()
        texts = []
        for table in tables:
            head, *rows = (" | ".join(cell.replace("|", "\\|") for cell in row) for row in table)
            texts.append("\n".join([f"| {head} |", "|" + "---|" * len(table[0]), *(f"| {row} |" for row in rows)]))
        return "\n\n".join([*texts, *notes])

    def json(self) -> str:
        """The same as JSON."""
        rows = {"leaves": [row._asdict() for row in self.leaves], "gauges": [row._asdict() for row in self.gauges]}
        return json.dumps({**rows, "unbound": self.unbound, "warnings": self.warnings}, indent=1)

    def _tables_and_notes(self) -> tuple[list[list[tuple[str, ...]]], list[str]]:
        gauges: list[tuple[str, ...]] = [("gauge", "leaves", "instances", "axes", "dimensions")]
        gauges += [(g.gauge, ", ".join(g.leaves), str(g.instances), g.axes, str(g.dim)) for g in self.gauges]
        notes = [_DECAY] if self._decays else []
        notes += [f"in no gauge: {', '.join(self.unbound)}"] if self.unbound else []
        return [self.table(), gauges], notes + [f"joint: {text}" for text in self.warnings]

    def __repr__(self) -> str:
        return str(self)

    def __str__(self) -> str:
        tables, notes = self._tables_and_notes()
        return "\n\n".join([*map(aligned, tables), *notes])


def aligned(table: Sequence[Sequence[str]]) -> str:
    """Rows of text whose columns start at the same places.

    >>> print(aligned([("leaf", "shape"), ("a", "(2, 3)")]))
    leaf  shape
    a     (2, 3)
    """
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in table)


def plan(
    tx_or_gauges: optax.GradientTransformation | Gauge | Sequence[Gauge], params: Any, *, report: Any = None
) -> Plan:
    """One table of what happens to every leaf: gauges, copies, matrices, rule, decay, state.

    A gauge that moves several layers by one element (`_` or `**` in place of a layer axis or of `{i}`) passes every
    assertion; the plan names it and warns.

    Args:
      tx_or_gauges: an optimizer with gauges, in any wrapper of optax, or a gauge or list of them.
      params: the tree: arrays, or ShapeDtypeStructs, for which decay is not measured.
      report: what `discover` returned for the function: the table gets a column of the axes that it uses.

    Returns:
      The plan: print it, or call `markdown()` or `json()`.

    Raises:
      ValueError: a gauge does not fit the tree; an optimizer has no gauges.

    >>> params = {"up": jnp.ones((2, 3)), "down": jnp.ones((3, 4)), "bias": jnp.ones(4)}
    >>> gauges = [go.rescale({"up": "_ channel"}, {"down": "channel _"})]
    >>> print(go.plan(gauges, params))
    leaf  shape   gauges               matrices
    bias  (4,)
    down  (3, 4)  rescale (channel 3)  1 × (3, 4)
    up    (2, 3)  rescale (channel 3)  1 × (2, 3)
    <BLANKLINE>
    gauge    leaves    instances  axes       dimensions
    rescale  up, down  1          channel 3  3
    <BLANKLINE>
    in no gauge: bias
    """
    tx = tx_or_gauges if isinstance(tx_or_gauges, optax.GradientTransformation) else None
    gauges = [] if not tx_or_gauges else list(product(tx_or_gauges).gauges) if tx is None else gauges_of(tx)
    if not gauges:
        raise binding_error(
            "plan", "no gauges", f"a {type(tx_or_gauges).__name__}", "gauges, or an optimizer that was made with some",
            "pass go.quotient(...) or a list of gauges")
    leaves, matrices = leaves_by_path(params), matrices_of(product(gauges)._bound(params).slice.parts)
    texts = {path: reading.text for path, reading in matrices.items()}
    labels: dict[str, dict[str, None]] = {}
    gauge_plans = tuple(_gauge_plan(gauge, params, leaves, labels) for gauge in gauges)
    with warnings.catch_warnings(record=True) as told:  # `init` is called twice
        warnings.simplefilter("always")
        # XLA compiles in a thread of its own while the state is traced here, which a fifth of the time goes into.
        with ThreadPoolExecutor(1) as compiler:
            still = None if tx is None else _without_gradient(tx, params, compiler)
            rules, sizes = ({}, {}) if tx is None else _state_of(tx, params, leaves)
            decay = {} if still is None else _decay_of(still(), leaves)
    for text in dict.fromkeys(str(warning.message) for warning in told):
        warnings.warn(text, stacklevel=2)
    # How an optimizer reads a matrix is not in its state: gauges say how `quotient_muon` would.
    texts |= {path: "" for path, rule in rules.items() if rule == "polar"}
    for path, said in ({} if tx is None else said_by(tx, params)).items():
        # Another optimizer, behind a partition, may have the leaf: then the state has other fields.
        if (said.rule == "Adam") == (rules.get(path) == "Adam"):
            rules[path], texts[path] = said
    rows = tuple(
        LeafPlan(
            path, tuple(jnp.shape(leaf)), tuple(labels.get(path, ())), texts.get(path, ""),
            rules.get(path, "" if tx is None else "gradient"), decay.get(path), sizes.get(path, 0),
            _axes_of(report, path))
        for path, leaf in leaves.items()
    )
    result = Plan(rows, gauge_plans, tuple(path for path in leaves if path not in labels))
    for text in result.warnings:
        warnings.warn(f"plan: {text}", stacklevel=2)
    return result


def _axes_of(report: Any, path: str) -> str:
    """What a report says of a leaf's axes."""
    found = None if report is None else report.axes.of(path)
    if found is None:
        return "undecided" if report is not None and path in report.undecided else ""
    return found[1] if isinstance(found[1], str) else " + ".join(found[1])


def gauges_of(tx: Any) -> list[Any]:
    """The gauges of an optimizer, in the order of appearance, each once.

    >>> gauges_of(optax.chain(go.quotient_adamw(1e-3, go.logit_shift({"head": "_ vocab"})), optax.scale(0.5)))
    [go.logit_shift(
      blocks={'head': '_ vocab'},
    )]
    """
    gauges: dict[Gauge, None] = {}

    def keep(thing: Any) -> bool:
        if isinstance(thing, GaugeTransformation):
            gauges.update(dict.fromkeys(thing.gauges))
        if isinstance(thing, Gauge):
            gauges.update(dict.fromkeys(product(thing).gauges))
        return isinstance(thing, Gauge)

    walk(tx, keep)
    return list(gauges)


def said_by(tx: Any, params: Any) -> Mapping[str, LeafRule]:
    """What the outermost transformation that knows says of every leaf; nothing where several stand side by side.

    >>> said_by(optax.sgd(1e-3), {"head": jnp.ones((2, 3))})
    {}
    """
    found: list[Any] = []

    def keep(thing: Any) -> bool:
        rules = getattr(thing, "rules", None) if isinstance(thing, GaugeTransformation) else None
        found.extend([] if rules is None else [rules])
        return rules is not None

    walk(tx, keep)
    one = found[0] if len({id(rules) for rules in found}) == 1 else None
    return {} if one is None else one(params)


def _gauge_plan(gauge: Any, params: Any, leaves: Mapping[str, Any], labels: dict[str, dict[str, None]]) -> GaugePlan:
    """The row of a gauge; adds its label to those of the leaves that it binds."""
    copies, axes = bound_copies(gauge, params), list[str]()
    for key, sizes, blocks in copies:
        axes.append(", ".join(f"{name} {n}" for name, n in sizes.items()))
        text = " ".join([gauge.name, *([f"[{key}]"] if key else []), *([f"({axes[-1]})"] if axes[-1] else [])])
        for block in blocks:
            labels.setdefault(block.path, {})[text] = None
    patterns = [spec.pattern for spec in gauge.specs] if hasattr(gauge, "specs") else [b.path for b in copies[0][2]]
    joint = _joint([blocks for _, _, blocks in copies], leaves) if hasattr(gauge, "specs") else ""
    texts = tuple(dict.fromkeys(patterns)), len(copies), " or ".join(dict.fromkeys(axes))
    return GaugePlan(gauge.name, *texts, gauge.dim(params), joint)


def _joint(copies: Sequence[Sequence[Any]], leaves: Mapping[str, Any]) -> str:
    """What one element of a gauge moves though it looks like layers."""
    nodes: dict[str, list[tuple[int, ...]]] = {}
    for path, leaf in leaves.items():
        nodes.setdefault(path.split("/")[0], []).append(tuple(jnp.shape(leaf)))
    layers = {}  # top-level nodes whose leaves all begin with one length, vectors among them: scanned layers
    for node, shapes in nodes.items():
        lengths, ranks = {s[0] if s else 0 for s in shapes}, {len(s) for s in shapes}
        if len(shapes) > 2 and len(lengths) == 1 and len(ranks) > 1 and min(ranks) > 1:
            layers[node] = lengths.pop()
    for blocks in copies:
        if any(template(b.path) == b.path and b.path.split("/")[0] not in layers for b in blocks):
            continue  # a leaf outside the layers, such as the table, is theirs in common: they have one stream
        equal: dict[tuple[Any, ...], list[str]] = {}
        for b in blocks:
            equal.setdefault((b.argument, b.axes, template(b.path), b.shape), []).append(b.path)
        for paths in equal.values():
            if len(paths) > 1:
                count = f"{len(paths)} equal leaves, {paths[0]} to {paths[-1]}"
                return f"one element moves {count}: write {{i}} in place of their number"
        length = layers.get(blocks[0].path.split("/")[0]) if blocks else None
        free = (b.path.split("/")[0] in layers and b.labels and b.split_labels[0] == "_" and len(b.groups[0]) == 1
                for b in blocks)
        if length and all(free):
            return f"one element moves all {length} layers of {blocks[0].path}: name the axis, as in 'layer ...'"
    return ""


def _state_of(
    tx: Any, params: Any, leaves: Mapping[str, Any]
) -> tuple[dict[str, str], dict[str, int]]:
    """Rule and bytes per leaf, from the fields of the state that mirror the parameters."""
    shapes = {path: tuple(jnp.shape(leaf)) for path, leaf in leaves.items()}

    def mirrors(node: Any) -> Iterator[tuple[str, str, dict[str, Any]]]:
        """Fields whose trees have leaves of the parameters' paths and shapes: named tuple, field and tree."""
        items = list(node.values()) if isinstance(node, Mapping) else node if isinstance(node, tuple | list) else ()
        for field, value in zip(getattr(node, "_fields", [""] * len(items)), items, strict=True):
            tree = leaves_by_path(value) if field and jax.tree.leaves(value) and not isinstance(value, tuple) else {}
            if tree and all(shapes.get(path) == tuple(jnp.shape(leaf)) for path, leaf in tree.items()):
                yield type(node).__name__.lower(), field, tree
            else:
                yield from mirrors(value)

    fields: dict[str, set[str]] = {}
    kinds: dict[str, str] = {}
    sizes: dict[str, int] = {}
    for kind, field, tree in mirrors(jax.eval_shape(tx.init, params)):
        for path, leaf in tree.items():
            fields.setdefault(path, set()).add(field)
            kinds[path] = kinds.get(path, "") + " " + kind
            sizes[path] = sizes.get(path, 0) + leaf.size * leaf.dtype.itemsize
    rules = {}
    for path, names in fields.items():
        if "polar" in kinds[path] or "muon" in kinds[path]:
            rules[path] = "Adam" if "nu" in names else "polar"
        else:
            rules[path] = "Adam" if {"mu", "nu"} <= names else ", ".join(sorted(names))
    return rules, sizes


def _without_gradient(tx: Any, params: Any, compiler: Executor) -> Callable[[], Any] | None:
    """Returns what gives the first update where gradients are zero, in float64; None for shapes without values.

    It is traced here, compiled by `compiler`, and run by the caller.
    """
    if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(params)):
        return None

    def double(leaf: Any) -> Any:
        return np.asarray(leaf, np.float64) if jnp.issubdtype(jnp.result_type(leaf), jnp.floating) else leaf

    first = lambda p: tx.update(jax.tree.map(jnp.zeros_like, p), tx.init(p), p)[0]  # noqa: E731
    doubles = jax.tree.map(double, params)
    with jax.enable_x64(True):  # float32 cannot tell a decay of 1e-6 per step from roundoff
        traced = jax.jit(first).lower(doubles)
    program = compiler.submit(traced.compile, compiler_options=quick_options())

    def run() -> Any:
        with jax.enable_x64(True):
            return jax.tree.map(np.asarray, program.result()(doubles))

    return run


def _decay_of(update: Any, leaves: Mapping[str, Any]) -> dict[str, float]:
    """The share of each leaf's norm that an update removes. A leaf that is zero has none though it may decay later."""
    steps = {path: float(np.linalg.norm(step)) for path, step in leaves_by_path(update).items()}
    shares = {}
    for path, leaf in leaves.items():
        size = float(np.linalg.norm(np.asarray(leaf, np.float64)))
        if size > 0:
            shares[path] = steps[path] / size if steps[path] > _ROUNDOFF * size else 0.0
    return shares
