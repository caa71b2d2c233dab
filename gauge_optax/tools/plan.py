"""`plan`: a table of what an optimizer, or a list of gauges, does to each leaf of a tree.

Gauges and copies (one copy of a gauge per layer) come from the bindings, and bytes from the state. The rule of a leaf,
such as "Adam", comes from the optimizer if it tells its rules, and otherwise from the names of fields in its state.
Decay is measured on one update with zero gradients.
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

from gauge_optax.binding import leaf_shape, leaves_by_path
from gauge_optax.discovery.calls import bound_copies, template
from gauge_optax.errors import binding_error, kind_of, warn
from gauge_optax.gauges.gauge import Gauge, product
from gauge_optax.parts.matrices import matrices_of
from gauge_optax.transformation import GaugeTransformation, LeafRule, own_settings, require_report, require_traceable
from gauge_optax.wrapped import walk
from gauge_optax.xla import quick_options, unseen

_ROUNDOFF = 1e-12  # a step below this share of a leaf's norm is roundoff, in float64
_DECAY = (
    "decay per step: the share of a leaf's norm that the first step removes where the gradient is zero; "
    "blank for a leaf that is zero today, whose decay cannot be measured"
)


class LeafPlan(NamedTuple):
    """The row of one leaf.

    Attributes:
      leaf: the leaf's path.
      shape: the leaf's shape.
      gauges: one text per gauge that binds the leaf: name, copy (such as "i=0") and named axes with their lengths.
      matrices: the matrices into which the optimizer divides the leaf, as "count × (rows, columns)"; if it does not
        tell, those that `quotient_muon` would make. "" for vectors.
      rule: how the leaf's update is made: "Adam", "polar" (an orthogonalized momentum, as in Muon), "momentum", or
        "gradient" if the state has nothing for the leaf. If the optimizer does not tell, these are names of the state's
        fields. "" if `plan` got a list of gauges.
      decay: share of the leaf's norm that the first step removes if all gradients are zero (1e-5 for a learning rate of
        1e-3 and a weight decay of 0.01). None if it cannot be measured: for a leaf that is zero now, for shapes
        without values, for a list of gauges, or if updates need more arguments, such as the loss of a line search.
      state_bytes: bytes of the arrays in the state that have the leaf's path and shape.
      axes: the leaf's axes string in a report of `discover`, such as "_ neuron" for a matrix of inputs and outputs; ""
        without a report, and for vectors.
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
    """The row of one gauge: how many copies it has, and on which leaves.

    Attributes:
      gauge: the gauge's name.
      leaves: the path patterns of its blocks.
      instances: the number of copies: one per combination of captures, each with its own element.
      axes: named axes of a copy with their lengths. Each index along them (each head, each channel) moves by itself.
      dim: the number of directions along the orbit, of all copies together.
      joint: a warning if one element moves several leaves, or several indices of an axis, that look like layers; ""
        otherwise.
    """

    gauge: str
    leaves: tuple[str, ...]
    instances: int
    axes: str
    dim: int
    joint: str


@dataclasses.dataclass(frozen=True, repr=False)
class Plan:
    """The result of `plan`. It prints as two tables and notes.

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
        """A sentence for each gauge that moves several layers by one element."""
        return tuple(f"{g.gauge} of {', '.join(g.leaves)}: {g.joint}" for g in self.gauges if g.joint)

    def table(self) -> list[tuple[str, ...]]:
        """Rows of text, headings first. Empty columns are left out, and so is decay if no leaf decays."""
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
        """The tables and notes as Markdown."""
        tables, notes = self._tables_and_notes()
        texts = []
        for table in tables:
            head, *rows = (" | ".join(cell.replace("|", "\\|") for cell in row) for row in table)
            texts.append("\n".join([f"| {head} |", "|" + "---|" * len(table[0]), *(f"| {row} |" for row in rows)]))
        return "\n\n".join([*texts, *notes])

    def json(self) -> str:
        """The rows of both tables, the unbound leaves and the warnings as JSON."""
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
    """Joins rows of cells to lines, and pads the cells so that columns are aligned.

    >>> print(aligned([("leaf", "shape"), ("a", "(2, 3)")]))
    leaf  shape
    a     (2, 3)
    """
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in table)


def plan(
    tx_or_gauges: optax.GradientTransformation | optax.MultiSteps | Gauge | Sequence[Gauge],
    params: Any,
    *,
    report: Any = None,
) -> Plan:
    """Returns one table of what happens to every leaf: gauges, copies, matrices, rule, decay, state.

    If axes or patterns have `_` or `**` in place of a layer axis or of `{i}`, a gauge moves several layers by one
    element. This raises no error, because it may be what the user wants. The plan warns of it, unless `report` has
    found the same gauge.

    Args:
      tx_or_gauges: an optimizer with gauges, in any wrapper of optax; or a gauge, or a list of gauges.
      params: a tree of arrays, or of ShapeDtypeStructs, for which decay is not measured.
      report: the result of `discover` for the function. If given, the table has a column with the axes that the
        function uses.

    Returns:
      The plan: print it, or call `markdown()` or `json()`.

    Raises:
      ValueError: a gauge does not fit the tree; an optimizer has no gauges, or a leaf that is no array.

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
    while isinstance(tx_or_gauges, optax.MultiSteps):  # its first update is always zero: look at the optimizer inside
        tx_or_gauges = tx_or_gauges._opt
    tx = tx_or_gauges if isinstance(tx_or_gauges, optax.GradientTransformation) else None
    gauges = [] if not tx_or_gauges else list(product(tx_or_gauges).gauges) if tx is None else gauges_of(tx)
    if not gauges:
        raise binding_error(
            "plan", "no gauges", kind_of(tx_or_gauges), "gauges, or an optimizer that was made with some",
            "pass go.quotient(...) or a list of gauges")
    require_report("plan", report)
    leaves, matrices = leaves_by_path(params), matrices_of(product(gauges)._bound(params).slice.parts)
    texts = {path: reading.text for path, reading in matrices.items()}
    labels: dict[str, dict[str, None]] = {}
    proved = () if report is None else (*report.gauges, *report.turning)
    gauge_plans = tuple(_gauge_plan(gauge, params, leaves, labels, gauge in proved) for gauge in gauges)
    with warnings.catch_warnings(record=True) as told:  # `init` is traced twice; each warning is shown once, below
        warnings.simplefilter("always")
        # Tracing `tx.init` takes a fifth of the time. Meanwhile XLA compiles in a thread of its own.
        with ThreadPoolExecutor(1) as compiler:
            still = None if tx is None else _without_gradient(tx, params, compiler)
            rules, sizes = ({}, {}) if tx is None else _state_of(tx, params, leaves)
            decay = {} if still is None else _decay_of(still(), leaves)
    for text in dict.fromkeys(str(warning.message) for warning in told):
        warn(text)
    # The state does not show which matrices of a leaf the optimizer orthogonalizes. Leave the text empty, unless the
    # optimizer itself tells (`said_by`).
    texts |= {path: "" for path, rule in rules.items() if rule == "polar"}
    for path, said in ({} if tx is None else said_by(tx, params)).items():
        # If the state's fields contradict what the optimizer says, a partition has given the leaf to another optimizer.
        # The fields then count.
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
        warn(f"plan: {text}")
    return result


def _axes_of(report: Any, path: str) -> str:
    """The axes string of a leaf in a report, "undecided", or "" if the report does not have the leaf."""
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
    """Leaf path → rule, as the outermost transformation that has rules tells it; {} if none or several have rules.

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


def _gauge_plan(
    gauge: Any, params: Any, leaves: Mapping[str, Any], labels: dict[str, dict[str, None]], proved: bool
) -> GaugePlan:
    """Returns the row of a gauge, and adds a text about the gauge to `labels` for each leaf that it binds.

    Args:
      gauge: the gauge.
      params: the parameters.
      leaves: path → leaf of `params`.
      labels: leaf path → texts, the keys of a dict. The function adds to it.
      proved: whether `discover` has found the gauge. If True, the row has no warning about leaves that one element
        moves together.
    """
    copies, axes = bound_copies(gauge, params), list[str]()
    for key, sizes, blocks in copies:
        axes.append(", ".join(f"{name} {n}" for name, n in sizes.items()))
        text = " ".join([gauge.name, *([f"[{key}]"] if key else []), *([f"({axes[-1]})"] if axes[-1] else [])])
        for block in blocks:
            labels.setdefault(block.path, {})[text] = None
    patterns = [spec.pattern for spec in gauge.specs] if hasattr(gauge, "specs") else [b.path for b in copies[0][2]]
    joint = "" if proved or not hasattr(gauge, "specs") else _joint([blocks for _, _, blocks in copies], leaves)
    texts = tuple(dict.fromkeys(patterns)), len(copies), " or ".join(dict.fromkeys(axes))
    return GaugePlan(gauge.name, *texts, gauge.dim(params), joint)


def _joint(copies: Sequence[Sequence[Any]], leaves: Mapping[str, Any]) -> str:
    """A warning if one element of a gauge moves several leaves, or indices, that look like layers; "" otherwise."""
    nodes: dict[str, list[tuple[int, ...]]] = {}
    for path, leaf in leaves.items():
        nodes.setdefault(path.split("/")[0], []).append(leaf_shape(leaf))
    layers = {}  # scanned layers: top-level nodes all of whose leaves, stacked vectors too, have the same first length
    for node, shapes in nodes.items():
        lengths, ranks = {s[0] if s else 0 for s in shapes}, {len(s) for s in shapes}
        if len(shapes) > 2 and len(lengths) == 1 and len(ranks) > 1 and min(ranks) > 1:
            layers[node] = lengths.pop()
    for blocks in copies:
        if any(template(b.path) == b.path and b.path.split("/")[0] not in layers for b in blocks):
            continue  # with a leaf outside the layers, such as the embedding table, one element for all layers is right
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
    """Rule and bytes per leaf, from the fields of the state that are trees like the parameters, such as moments."""
    shapes = {path: tuple(jnp.shape(leaf)) for path, leaf in leaves.items()}

    def mirrors(node: Any) -> Iterator[tuple[str, str, dict[str, Any]]]:
        """Yields (class name, field, path → array) for the fields whose leaves have parameters' paths and shapes."""
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
    """Returns a function that computes the first update for zero gradients, in float64; None for shapes without values.

    The update is traced here and compiled by `compiler` in another thread; it runs when the caller calls the function.
    """
    if any(isinstance(leaf, jax.ShapeDtypeStruct | jax.core.Tracer) for leaf in jax.tree.leaves(params)):
        return None
    require_traceable("plan", params)

    def double(leaf: Any) -> Any:
        return np.asarray(leaf, np.float64) if jnp.issubdtype(jnp.result_type(leaf), jnp.floating) else leaf

    first = lambda p: tx.update(jax.tree.map(jnp.zeros_like, p), tx.init(p), p)[0]  # noqa: E731
    doubles = unseen(jax.tree.map(double, params))
    with own_settings(wide=True):  # float32 cannot tell a decay of 1e-6 per step from roundoff
        try:
            traced = jax.jit(first).lower(doubles)
        except (TypeError, KeyError) as error:
            if isinstance(error, TypeError) and "required keyword-only argument" not in str(error):
                raise
            return None  # an update that needs more, such as the loss of a line search
    program = compiler.submit(traced.compile, compiler_options=quick_options())

    def run() -> Any:
        with own_settings(wide=True):
            return jax.tree.map(np.asarray, program.result()(doubles))

    return run


def _decay_of(update: Any, leaves: Mapping[str, Any]) -> dict[str, float]:
    """Leaf path → ‖update‖/‖leaf‖, for an update with zero gradients. Leaves that are zero are left out."""
    steps = {path: float(np.linalg.norm(step)) for path, step in leaves_by_path(update).items()}
    shares = {}
    for path, leaf in leaves.items():
        size = float(np.linalg.norm(np.abs(np.asarray(leaf)).astype(np.float64)))
        if size > 0:
            shares[path] = steps[path] / size if steps[path] > _ROUNDOFF * size else 0.0
    return shares
