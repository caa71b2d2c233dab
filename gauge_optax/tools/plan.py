"""`plan`: what an optimizer, or a list of gauges, does to each leaf of a tree, as one table.

Here: what bindings and states say; decay is measured on one update without gradients. Not here: whether a gauge holds
(`report`).
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from gauge_optax.binding import binding_error, leaves_by_path
from gauge_optax.gauges._matrices import Matrices, matrices_of
from gauge_optax.gauges.base import Gauge
from gauge_optax.gauges.product import product

Unbound = Literal["allow", "warn", "error"]
_COLUMNS = ("leaf", "shape", "gauges", "matrices", "rule", "decay", "state bytes")
_ROUNDING = 1e-12  # of a leaf, in float64
_CLOSURES = 12  # how deep a transformation's functions are looked into


class LeafPlan(NamedTuple):
    """One row.

    Attributes:
      leaf: normalised path.
      shape: its shape.
      gauges: what binds it: name, instance and named axes with their lengths.
      matrices: how Muon reads it, as "count × (rows, columns)"; "" for vectors.
      rule: what steps it: Adam, polar, momentum, a bare gradient; "" of a list of gauges.
      decay: share of itself that an update without gradients takes off; None where nothing was measured.
      state_bytes: of the state that mirrors it.
    """

    leaf: str
    shape: tuple[int, ...]
    gauges: tuple[str, ...]
    matrices: str
    rule: str
    decay: float | None
    state_bytes: int


class GaugePlan(NamedTuple):
    """One gauge: how many copies of its group there are, and on what.

    Attributes:
      gauge: its name.
      leaves: the patterns it was given.
      instances: copies, one per combination of captures; each has its own element.
      axes: named axes of an instance with their lengths: each index has its own element too.
      dim: dimensions of all instances together.
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
      unbound: leaves in no gauge.
    """

    leaves: tuple[LeafPlan, ...]
    gauges: tuple[GaugePlan, ...]
    unbound: tuple[str, ...]

    @property
    def warnings(self) -> tuple[str, ...]:
        """Gauges that move several layers by one element."""
        return tuple(f"{g.gauge} of {', '.join(g.leaves)}: {g.joint}" for g in self.gauges if g.joint)

    def table(self) -> list[tuple[str, ...]]:
        """Rows of text, headings first."""
        return [_COLUMNS, *(_texts(row) for row in self.leaves)]

    def markdown(self) -> str:
        """The tables in Markdown."""
        tables = []
        for table in (self.table(), self._gauge_table()):
            head, *rows = (" | ".join(cell.replace("|", "\\|") for cell in row) for row in table)
            tables.append("\n".join([f"| {head} |", "|" + "---|" * len(table[0]), *(f"| {row} |" for row in rows)]))
        return "\n\n".join([*tables, *self._notes()])

    def json(self) -> str:
        """The same as JSON."""
        return json.dumps(
            {
                "leaves": [row._asdict() for row in self.leaves],
                "gauges": [row._asdict() for row in self.gauges],
                "unbound": self.unbound,
                "warnings": self.warnings,
            },
            indent=1,
        )

    def _gauge_table(self) -> list[tuple[str, ...]]:
        rows = [(g.gauge, ", ".join(g.leaves), str(g.instances), g.axes, str(g.dim)) for g in self.gauges]
        return [("gauge", "leaves", "instances", "axes", "dimensions"), *rows]

    def _notes(self) -> list[str]:
        notes = [f"in no gauge: {', '.join(self.unbound)}"] if self.unbound else []
        return notes + [f"joint: {text}" for text in self.warnings]

    def __repr__(self) -> str:
        return str(self)

    def __str__(self) -> str:
        return "\n\n".join(["\n".join(_aligned(t)) for t in (self.table(), self._gauge_table())] + self._notes())


def plan(
    tx_or_gauges: optax.GradientTransformation | Gauge | Sequence[Gauge], params: Any, *, unbound: Unbound = "allow"
) -> Plan:
    """One table of what happens to every leaf: gauges, instances, matrices, rule, decay, state.

    A gauge that moves several layers by one element (`_` or `**` in place of a layer axis or of `{i}`) passes every
    assertion; here it is named, and warned of.

    Args:
      tx_or_gauges: an optimizer of gauges, in any wrapper of optax, or a gauge or list of them.
      params: the tree; arrays, or ShapeDtypeStructs, of which decay is not measured.
      unbound: what to do about leaves in no gauge: nothing, a warning, or an error.

    Returns:
      The plan: print it, or call `markdown()` or `json()`.

    Raises:
      ValueError: a gauge that does not fit the tree, an optimizer without gauges, leaves in no gauge under "error".

    >>> params = {"up": jnp.ones((2, 3)), "down": jnp.ones((3, 4)), "bias": jnp.ones(4)}
    >>> gauges = [go.rescale({"up": "_ channel"}, {"down": "channel _"})]
    >>> print(go.plan(gauges, params))
    leaf  shape   gauges                matrices    rule  decay  state bytes
    bias  (4,)
    down  (3, 4)  rescale (channel 3)   1 × (3, 4)
    up    (2, 3)  rescale (channel 3)   1 × (2, 3)
    <BLANKLINE>
    gauge    leaves    instances  axes       dimensions
    rescale  up, down  1          channel 3  3
    <BLANKLINE>
    in no gauge: bias
    """
    if unbound not in ("allow", "warn", "error"):
        raise binding_error(
            "plan", f"unknown unbound {unbound!r}", repr(unbound), "'allow', 'warn' or 'error'", "leave it out")
    tx = tx_or_gauges if isinstance(tx_or_gauges, optax.GradientTransformation) else None
    gauges = _gauges_of(tx) if tx is not None else _parts(tx_or_gauges)
    if not gauges:
        raise binding_error(
            "plan", "no gauges", f"a {type(tx_or_gauges).__name__}", "gauges, or an optimizer made with some",
            "pass go.quotient(...) or a list of gauges")
    group, leaves = product(gauges), leaves_by_path(params)
    bound = {block.path for gauge in gauges for block in gauge.bound(params).blocks}
    free = tuple(path for path in leaves if path not in bound)
    matrices, labels = matrices_of(group.bound(params)), _labels(gauges, params)
    state = {} if tx is None else _state_of(tx, params, leaves, matrices)
    decay = {} if tx is None else _decay_of(tx, params, leaves)

    def row(path: str) -> LeafPlan:
        rule, size = state.get(path, ("" if tx is None else "gradient", 0))
        own = tuple(labels.get(path, ())), _matrix_text(matrices.get(path))
        return LeafPlan(path, tuple(jnp.shape(leaves[path])), *own, rule, decay.get(path), size)

    found = Plan(tuple(map(row, leaves)), tuple(_gauge_plan(gauge, params, leaves) for gauge in gauges), free)
    _complain(found, unbound)
    return found


def _complain(found: Plan, unbound: str) -> None:
    for text in found.warnings:
        warnings.warn(f"plan: {text}", stacklevel=3)
    if found.unbound and unbound == "error":
        raise binding_error(
            "plan", f"{len(found.unbound)} leaves in no gauge", ", ".join(found.unbound[:6]), "a gauge on every leaf",
            "bind them, or leave unbound='allow': they are stepped as the wrapped optimizer steps them")
    if found.unbound and unbound == "warn":
        warnings.warn(f"plan: in no gauge: {', '.join(found.unbound)}", stacklevel=3)


# Gauges -------------------------------------------------------------------------------------------


def _parts(gauges: Any) -> list[Any]:
    return list(product(gauges).parts)


def _gauges_of(tx: Any) -> list[Any]:
    """The gauges that a transformation's functions close over, each once, in the order met."""
    found: dict[Gauge, None] = {}
    seen: set[int] = set()

    def look(thing: Any, depth: int) -> None:
        if depth > _CLOSURES or id(thing) in seen:
            return
        seen.add(id(thing))
        if isinstance(thing, Gauge):
            found.update(dict.fromkeys(_parts(thing)))
        elif isinstance(thing, list | tuple):
            for item in thing:
                look(item, depth + 1)
        elif isinstance(thing, Mapping):
            for item in thing.values():
                look(item, depth + 1)
        elif dataclasses.is_dataclass(thing) and not isinstance(thing, type):
            for field in dataclasses.fields(thing):
                look(getattr(thing, field.name), depth + 1)
        else:
            for cell in getattr(thing, "__closure__", None) or ():
                look(cell.cell_contents, depth + 1)
            for name in ("__wrapped__", "func", "args", "keywords", "__self__"):
                look(getattr(thing, name, None), depth + 1)

    look(tx, 0)
    return list(found)


def _labels(gauges: Sequence[Any], params: Any) -> dict[str, list[str]]:
    out: dict[str, list[str]] = {}
    for gauge in gauges:
        for key, axes, paths in _instances(gauge, params):
            text = " ".join([gauge.name, *([f"[{key}]"] if key else []), *([f"({axes})"] if axes else [])])
            for path in paths:
                own = out.setdefault(path, [])
                own += [text] if text not in own else []
    return out


def _instances(gauge: Any, params: Any) -> Iterator[tuple[str, str, list[str]]]:
    """Key, named axes and leaves of each instance; one of all leaves where only the action is known."""
    if not hasattr(gauge, "binding"):
        yield "", "", [block.path for block in gauge.bound(params).blocks]
        return
    binding = gauge.binding(params)
    for instance in binding.instances:
        sizes = zip(binding.named, instance.shape(binding.named), strict=True)
        yield instance.key, ", ".join(f"{name} {n}" for name, n in sizes), [block.path for block in instance.blocks]


def _gauge_plan(gauge: Any, params: Any, leaves: Mapping[str, Any]) -> GaugePlan:
    instances = list(_instances(gauge, params))
    patterns = dict.fromkeys(spec.pattern for spec in gauge.specs) if hasattr(gauge, "specs") else instances[0][2]
    axes = list(dict.fromkeys(axes for _, axes, _ in instances))
    joint = _joint(gauge, params, leaves) if hasattr(gauge, "binding") else ""
    return GaugePlan(gauge.name, tuple(patterns), len(instances), " or ".join(axes), gauge.dim(params), joint)


def _joint(gauge: Any, params: Any, leaves: Mapping[str, Any]) -> str:
    """What one element of a gauge moves though it looks like layers."""
    stacked = _stacked(leaves)
    for instance in gauge.binding(params).instances:
        alike: dict[tuple[Any, ...], list[str]] = {}
        for block in instance.blocks:
            kind = block.role, block.axes, re.sub("[0-9]+", "#", block.path), block.shape
            alike.setdefault(kind, []).append(block.path)
        for same in alike.values():
            if len(same) > 1:
                leaves_ = f"{len(same)} equal leaves, {same[0]} to {same[-1]}"
                return f"one element moves {leaves_}: write {{i}} for their number"
        first = [block for block in instance.blocks if stacked.get(block.path.split("/")[0])]
        free = [b for b in first if b.labels and b.split_labels[0] == "_" and len(b.groups[0]) == 1]
        if first and len(free) == len(instance.blocks):
            length = stacked[first[0].path.split("/")[0]]
            return f"one element moves all {length} layers of {first[0].path}: name the axis, as in 'layer …'"
    return ""


def _stacked(leaves: Mapping[str, Any]) -> dict[str, int]:
    """Top-level nodes whose leaves all begin with one length, vectors among them: layers that are scanned over."""
    shapes: dict[str, list[tuple[int, ...]]] = {}
    for path, leaf in leaves.items():
        shapes.setdefault(path.split("/")[0], []).append(tuple(jnp.shape(leaf)))
    out = {}
    for node, own in shapes.items():
        lengths, ranks = {s[0] if s else 0 for s in own}, {len(s) for s in own}
        if len(own) > 2 and len(lengths) == 1 and len(ranks) > 1 and min(ranks) > 1:
            out[node] = lengths.pop()
    return out


def _matrix_text(own: Matrices | None) -> str:
    if own is None:
        return ""
    return f"{math.prod(own.split[k] for k in own.batch)} × ({own.fan_in}, {own.fan_out})"


# States -------------------------------------------------------------------------------------------


def _state_of(
    tx: Any, params: Any, leaves: Mapping[str, Any], matrices: Mapping[str, Matrices]
) -> dict[str, tuple[str, int]]:
    """Rule and bytes per leaf, from the fields of the state that mirror the parameters."""
    fields: dict[str, list[tuple[str, str, int]]] = {}
    state = jax.eval_shape(tx.init, params)
    for kind, field, tree in _mirrors(state, {p: tuple(jnp.shape(x)) for p, x in leaves.items()}):
        for path, leaf in tree.items():
            fields.setdefault(path, []).append((kind, field, leaf.size * leaf.dtype.itemsize))
    heads = {path for path, own in matrices.items() if own.heads is not None}
    return {path: (_rule(own, path in heads), sum(size for *_, size in own)) for path, own in fields.items()}


def _rule(fields: Sequence[tuple[str, str, int]], heads: bool) -> str:
    names, kinds = {field for _, field, _ in fields}, " ".join(kind for kind, _, _ in fields).lower()
    if "polar" in kinds or "muon" in kinds:
        return "Adam" if "nu" in names else "per-head polar" if heads else "polar"
    if {"mu", "nu"} <= names:
        return "Adam"
    return ", ".join(sorted(names))


def _mirrors(node: Any, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Fields of named tuples whose trees have leaves of the parameters' paths and shapes, with the tuple's name."""
    if isinstance(node, tuple) and hasattr(node, "_fields"):
        for field, value in zip(node._fields, node, strict=True):
            own = leaves_by_path(value) if jax.tree.leaves(value) and not isinstance(value, tuple) else {}
            if own and all(shapes.get(path) == tuple(jnp.shape(leaf)) for path, leaf in own.items()):
                yield type(node).__name__, field, own
            else:
                yield from _mirrors(value, shapes)
    elif isinstance(node, tuple | list):
        for item in node:
            yield from _mirrors(item, shapes)
    elif isinstance(node, Mapping):
        for item in node.values():
            yield from _mirrors(item, shapes)


def _decay_of(tx: Any, params: Any, leaves: Mapping[str, Any]) -> dict[str, float]:
    """The share of each leaf that an update without gradients takes off; nothing of shapes alone."""
    if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves.values()):
        return {}
    still = jax.jit(lambda p: tx.update(jax.tree.map(jnp.zeros_like, p), tx.init(p), p)[0])
    with jax.enable_x64(True):  # decay of 1e-6 a step is not to be told from float32's rounding
        steps = leaves_by_path(still(jax.tree.map(_double, params)))
        taken = {path: float(np.linalg.norm(np.asarray(step))) for path, step in steps.items()}
    sizes = {path: float(np.linalg.norm(np.asarray(leaf, np.float64))) for path, leaf in leaves.items()}
    shares = {path: taken[path] / size if size > 0 else 0.0 for path, size in sizes.items()}
    return {path: share if share > _ROUNDING else 0.0 for path, share in shares.items()}


def _double(leaf: Any) -> Any:
    return np.asarray(leaf, np.float64) if jnp.issubdtype(jnp.result_type(leaf), jnp.floating) else leaf


# Text ---------------------------------------------------------------------------------------------


def _texts(row: LeafPlan) -> tuple[str, ...]:
    decay = "" if row.decay is None else f"{row.decay:.2g}"
    size = str(row.state_bytes) if row.rule else ""
    return row.leaf, str(row.shape), ", ".join(row.gauges), row.matrices, row.rule, decay, size


def _aligned(table: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[k]) for row in table) for k in range(len(table[0]))]
    return ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in table]
