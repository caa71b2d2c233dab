"""Running statistics of BatchNorm in a tree: means and variances that belong to the weights in front of them.

They are no weights. A move that scales a kernel whose outputs a BatchNorm normalizes keeps the function in training,
and leaves the statistics of other outputs behind for evaluation.
"""

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from gauge_optax.binding import leaves_by_path
from gauge_optax.errors import binding_error
from gauge_optax.parts.part import Part, changed
from gauge_optax.parts.sizes import Factor
from gauge_optax.slice import Slice

_PAIRS = (("running_mean", "running_var"), ("moving_mean", "moving_variance"), ("moving_mean", "moving_var"))
_BESIDE = ("mean", "var")  # these are statistics only beside a scale or a bias, or in a collection of statistics
_COLLECTION = "batch_stats"
_REMEDY = (
    "pass trained weights alone, nnx.state(model, nnx.Param) or variables['params'], and make the statistics anew "
    "afterwards, from some batches in training mode"
)


def statistics_of(tree: Any) -> dict[str, tuple[int, ...]]:
    """Path → shape of the leaves that are running statistics by their names."""
    leaves = {path: tuple(np.shape(leaf)) for path, leaf in leaves_by_path(tree).items()}
    by_parent: dict[str, set[str]] = {}
    for path in leaves:
        parent, _, name = path.rpartition("/")
        by_parent.setdefault(parent, set()).add(name)

    def found() -> Iterator[str]:
        for parent, names in by_parent.items():
            pairs = [pair for pair in _PAIRS if names >= set(pair)]
            if names >= set(_BESIDE) and (names & {"scale", "bias", "weight"} or _COLLECTION in parent.split("/")):
                pairs.append(_BESIDE)
            yield from (f"{parent}/{name}".lstrip("/") for pair in pairs for name in pair)

    return {path: leaves[path] for path in found()}


@functools.singledispatch
def needs_a_norm_behind(part: Part[Any]) -> bool:
    """Whether a part keeps the function only because a norm of its outputs follows."""
    return False


@needs_a_norm_behind.register
def _scale_without_a_partner(part: Factor) -> bool:
    return not part.down


def require_no_statistics_behind(name: str, s: Slice, params: Any) -> None:
    """Raises ValueError where a move would leave running statistics in the tree behind.

    Args:
      name: of the public function, for messages.
      s: the gauges that move, on the tree.
      params: the tree.
    """
    statistics = statistics_of(params)
    for part in filter(needs_a_norm_behind, s.parts if statistics else ()):
        left = [p for p, shape in statistics.items() if shape[-1:] == part.shape[-1:] and p not in changed(part)]
        if left:
            raise binding_error(
                name, f"running statistics that a move of '{part.blocks[0].path}' leaves behind, '{left[0]}'",
                f"{len(statistics)} statistics in the tree", "a tree of trained weights alone",
                f"leave this scale_invariant out of the list; or {_REMEDY}")


def require_no_statistics(name: str, trees: Sequence[Any]) -> None:
    """Raises ValueError for running statistics, which are not those of a mean of weights."""
    for path in (path for tree in trees for path in statistics_of(tree)):
        raise binding_error(
            name, f"running statistics, '{path}'", "means and variances of the outputs of other weights",
            "trees of trained weights alone",
            _REMEDY)
