"""Compares the axes that a user gave to `max_norm_muon` (neurons, embeddings) with those that the function uses."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from gauge_optax.binding import Block, BlockSpec, bind_leaf, leaves_by_path
from gauge_optax.discovery.report import Report
from gauge_optax.errors import binding_error
from gauge_optax.parts.matrices import COUNTING, TOKEN

# An axis that counts matrices (`layer`, `expert`) is compared index by index if it has at most this length. A longer
# axis is compared as a whole.
_MOST_ALIKE = 4096
Kinds = tuple[Any, ...]
"""What the axes of one matrix of a leaf hold: see `_kinds`."""


def require_no_contradiction(state: Any, params: Any, report: Report) -> list[str]:
    """Compares the axes that a user gave to `max_norm_muon`, or to `max_norm` or `rotational`, with those in a report.

    They are read from the optimizer's state, from its fields `length`.

    Args:
      state: the state of any optimizer.
      params: the parameters.
      report: the report of `discover` for the same tree.

    Returns:
      Sentences about leaves that cannot be compared, and about matrices that the user's mappings do not list.

    Raises:
      ValueError: a leaf is listed with other axes than those that the function uses, or is no matrix and no table.
    """
    leaves, notes, listed = leaves_by_path(params), list[str](), _listed(state)
    for path, by_axes in listed.items():
        shape = tuple(jnp.shape(leaves[path]))
        own, told = tuple(by_axes), report.axes.of(path)
        said = ", ".join(f'"{text}"' for text in own)
        if path in report.undecided:
            notes.append(f"the function does not decide the axes of '{path}', which is listed as {said}")
        elif told is None:
            raise binding_error(
                "check", f"'{path}' is no matrix and no table", f"axes {said}",
                "kernels that the function contracts with data, and tables of which it takes rows",
                f"take '{path}' out of neurons and embeddings: Adam steps it")
        else:
            pattern, axes = told
            texts = (axes,) if isinstance(axes, str) else axes
            try:
                expected = _matrices(path, shape, dict.fromkeys(texts))
            except ValueError:
                notes.append(f"'{path}' has shape {shape}, which the report's axes {axes!r} do not fit")
                continue
            if expected != _matrices(path, shape, by_axes):
                mapping = "embeddings" if pattern in report.embeddings else "neurons"
                raise binding_error(
                    "check", f"the axes of '{path}' are not those that the function uses", f"{said} on shape {shape}",
                    ", ".join(f'"{text}"' for text in texts),
                    f"write {mapping}={{{pattern!r}: {axes!r}, ...}}, or take report.{mapping}")
    missing = {path: told[1] for path in leaves if listed and path not in listed and (told := report.axes.of(path))}
    return notes + [f"Adam steps '{path}', of which the function says {axes!r}" for path, axes in missing.items()]


def _listed(state: Any) -> dict[str, Mapping[str, Any]]:
    """Leaf path → axes string → an array with one number per vector, from all states with a field `length`.

    Only the keys count here: they are the axes strings that the user gave. The numbers are average lengths of updates,
    or norms at `init`.
    """

    def says(node: Any) -> bool:
        kept = getattr(node, "length", None)
        return isinstance(kept, Mapping) and all(isinstance(by_axes, Mapping) for by_axes in kept.values())

    found: dict[str, Mapping[str, Any]] = {}
    for node in filter(says, jax.tree.leaves(state, is_leaf=says)):
        found |= node.length
    return found


def _matrices(path: str, shape: tuple[int, ...], by_axes: Mapping[str, Any]) -> set[Kinds]:
    """Says for each matrix of a leaf what its axes are for (inputs, outputs, …), according to axes strings.

    Two strings that divide the leaf into the same matrices give equal results. The names of axes make no difference,
    except those for tokens and those that count matrices.

    Args:
      path: the leaf's path.
      shape: the leaf's shape.
      by_axes: axes string → an array whose shape has the lengths of the named axes, or None.

    Returns:
      A set with one item per matrix, as `_kinds` makes them.
    """
    found: set[Kinds] = set()
    for text, lengths in by_axes.items():
        names = [word.strip("()").split("=")[0] for word in text.split()]
        spec, sizes = BlockSpec("neurons", path, text), dict[str, int]()
        if lengths is not None:
            named = [name for name, word in zip(names, text.split(), strict=True) if name != "_" and not _picks(word)]
            sizes = dict(zip(named, jnp.shape(lengths), strict=True))
        found |= _kinds(bind_leaf("check", spec, path, shape, sizes, "sizes"))
    return found


def _picks(word: str) -> bool:
    """Whether a word of an axes string selects one index, as `name=3` does."""
    return word.strip("()").partition("=")[2].isdigit()


def _kinds(block: Block) -> set[Kinds]:
    """Returns one tuple per matrix of a leaf, with one entry per axis of the leaf, which says what the axis holds.

    An axes string may split an axis of the leaf into pieces. The entry of an axis is a tuple of its pieces, each as
    (use, length, selection). A use is "inputs", "outputs", tokens, "count" or "index"; a selection is None for a whole
    piece.
    """
    options: list[list[Any]] = []
    for axis, group in enumerate(block.groups):
        parts: list[list[Any]] = []
        for k in group:
            label, size = block.split_labels[k], block.split[k]
            index = block.picks[k]
            kind = ("index" if isinstance(index, int) else "inputs" if label == "_" else
                    "count" if label in COUNTING else TOKEN if label == TOKEN else "outputs")
            picked = index if isinstance(index, int) or index != ((0, size),) else None
            if size > 1 and parts and parts[-1][0] == kind and parts[-1][2] is picked is None:
                parts[-1][1] *= size
            elif size > 1:
                parts.append([kind, size, picked])
        if block.window[axis] is not None and len(parts) == 1:
            parts[0] = [parts[0][0], block.shape[axis], (block.window[axis],)]
        if len(parts) == 1 and parts[0][0] == "count" and parts[0][2] is None and parts[0][1] <= _MOST_ALIKE:
            options.append([(("index", parts[0][1], i),) for i in range(parts[0][1])])
        else:
            options.append([tuple(map(tuple, parts))])
    return set(itertools.product(*options))
