"""Finds running statistics of BatchNorm in a tree: means and variances of the outputs of the kernel in front of it.

They are no weights. If a move scales a kernel whose outputs a BatchNorm normalizes, the function stays the same in
training mode. In evaluation mode it changes, because the running statistics are still those of the old outputs.
"""

import functools
import re
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from gauge_optax.binding import leaves_by_path
from gauge_optax.errors import binding_error, counted
from gauge_optax.parts.constants import Mean
from gauge_optax.parts.part import Part, changed
from gauge_optax.parts.permutation import Permutation
from gauge_optax.parts.sizes import Factor
from gauge_optax.slice import Slice

_PAIRS = (
    ("running_mean", "running_var"), ("moving_mean", "moving_variance"), ("moving_mean", "moving_var"),
    ("ra_mean", "ra_var"), ("mean_ema", "var_ema"),
)
_BESIDE = ("mean", "var")  # these are statistics only beside a scale or a bias, or in a module whose name says "norm"
_AFFINE = {"scale", "bias", "weight", "offset", "gamma", "beta"}
_NORM = re.compile("norm|bn|batch_?stats|batch_?stat", re.IGNORECASE)
_OF_AVERAGES = re.compile(r"(_ema)/(average|hidden)$")  # Haiku keeps a statistic's average in a module of its own
_COLLECTIONS = re.compile(r"^(params|batch_stats)/")
_REMEDY = (
    "pass trained weights alone, nnx.state(model, nnx.Param) or variables['params'], and make the statistics anew "
    "afterwards, from some batches in training mode"
)


def statistics_of(tree: Any) -> dict[str, tuple[int, ...]]:
    """Path → shape of the leaves whose names say that they are running statistics."""
    leaves = {path: tuple(np.shape(leaf)) for path, leaf in leaves_by_path(tree).items()}
    by_parent: dict[str, dict[str, list[str]]] = {}
    for path in leaves:
        parent, name = _parent_and_name(path)
        by_parent.setdefault(parent, {}).setdefault(name, []).append(path)

    def found() -> Iterator[str]:
        for parent, names in by_parent.items():
            pairs = [pair for pair in _PAIRS if names.keys() >= set(pair)]
            if names.keys() >= set(_BESIDE) and (names.keys() & _AFFINE or _NORM.search(parent)):
                pairs.append(_BESIDE)
            yield from (path for pair in pairs for name in pair for path in names[name])

    return {path: leaves[path] for path in found()}


def _parent_and_name(path: str) -> tuple[str, str]:
    """Splits a path into the leaf's module and its name there.

    Frameworks write paths differently: NNX appends `value`, PyTorch separates names by dots, Haiku writes `/~/`.
    """
    *parent, name = re.split("[/.]", _OF_AVERAGES.sub(r"\1", path.removesuffix("/value").replace("/~/", "/")))
    return "/".join(parent), name


@functools.singledispatch
def outputs_before_a_norm(part: Part[Any]) -> tuple[int, ...]:
    """The shape of the outputs that a part changes, if it is a symmetry only because a norm follows; () otherwise."""
    return ()


@outputs_before_a_norm.register
def _scale_without_a_partner(part: Factor) -> tuple[int, ...]:
    return () if part.down else part.shape


@outputs_before_a_norm.register
def _bias_alone(part: Mean) -> tuple[int, ...]:
    return () if part.along else part.blocks[0].shape


@functools.singledispatch
def permutes_others_of(part: Part[Any], path: str) -> bool:
    """Whether a part permutes other leaves of the norm to which the statistic at `path` belongs."""
    return False


@permutes_others_of.register
def _with_the_statistic(part: Permutation, path: str) -> bool:
    own, *others = (_COLLECTIONS.sub("", _parent_and_name(p)[0]) for p in (path, *changed(part)))
    return own in others


def require_no_statistics_behind(name: str, s: Slice, params: Any) -> None:
    """Raises ValueError if a move changes outputs whose running statistics are in the tree and stay as they are.

    Args:
      name: the name of the public function, for messages.
      s: the slice of the gauges that move.
      params: the tree.
    """
    statistics = statistics_of(params)
    for part in (*s.parts, *s.free) if statistics else ():
        width = outputs_before_a_norm(part)[-1:]
        left = [
            p for p, shape in statistics.items()
            if p not in changed(part) and ((width and shape[-1:] == width) or permutes_others_of(part, p))
        ]
        if left:
            raise binding_error(
                name, f"running statistics that a move of '{part.blocks[0].path}' leaves behind, '{left[0]}'",
                f"{counted(len(statistics), 'statistic')} in the tree", "a tree of trained weights alone",
                f"leave this gauge out of the list, or let a permutation bind '{left[0]}' too; or {_REMEDY}")


def require_no_statistics(name: str, trees: Sequence[Any]) -> None:
    """Raises ValueError for trees with running statistics, because their mean does not fit the mean of the weights."""
    for path in (path for tree in trees for path in statistics_of(tree)):
        raise binding_error(
            name, f"running statistics, '{path}'", "means and variances of the outputs of other weights",
            "trees of trained weights alone",
            _REMEDY)
