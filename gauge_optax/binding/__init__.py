"""Path patterns and named axes, and what they mean on a concrete tree. Nothing in this folder holds an array."""

from gauge_optax.binding.bind import Matched, bind, copy_key
from gauge_optax.binding.leaves import (
    Block,
    bind_leaf,
    has_dtype,
    in_single_or_better,
    inexact_leaves,
    is_empty,
    laid_out,
    leaf_shape,
    leaves_by_path,
    mask_by_path,
    overlap,
    real_leaves,
    shared_leaves,
    shown_and_hidden,
    values_at,
    with_leaves,
)
from gauge_optax.binding.paths import hidden_match, match, nearest
from gauge_optax.binding.specs import Axes, BlockSpec, block_specs, check_specs, frozen_sizes, group_axes

__all__ = [
    "Axes",
    "Block",
    "BlockSpec",
    "Matched",
    "bind",
    "bind_leaf",
    "block_specs",
    "check_specs",
    "copy_key",
    "frozen_sizes",
    "group_axes",
    "has_dtype",
    "hidden_match",
    "in_single_or_better",
    "inexact_leaves",
    "is_empty",
    "laid_out",
    "leaf_shape",
    "leaves_by_path",
    "mask_by_path",
    "match",
    "nearest",
    "overlap",
    "real_leaves",
    "shared_leaves",
    "shown_and_hidden",
    "values_at",
    "with_leaves",
]
