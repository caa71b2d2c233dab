"""When parts take their turn in alignment, which is a matter of their roles."""

import enum
import functools
from typing import Any

from gauge_optax.gauges.by_action import PermutationOfUser
from gauge_optax.parts.part import Constant, Part, Size, Turn
from gauge_optax.parts.stream import Stream


class Stage(enum.IntEnum):
    """When a part takes its turn in a round of alignment: one comes before those whose answers depend on it."""

    STREAM = 0
    UNITS = 1
    HEADS = 2
    SIZES = 3
    CONSTANTS = 4


@functools.singledispatch
def stage(part: Part[Any]) -> Stage:
    """When a part takes its turn. Parts without a role permute."""
    return Stage.UNITS


@stage.register
def _turns(part: Turn) -> Stage:
    return Stage.HEADS


@stage.register
def _turns_the_stream(part: Stream) -> Stage:
    return Stage.STREAM


@stage.register
def _multiplies(part: Size) -> Stage:
    return Stage.SIZES


@stage.register
def _renumbers(part: PermutationOfUser) -> Stage:
    return Stage.UNITS


@stage.register
def _adds(part: Constant) -> Stage:
    return Stage.CONSTANTS


def is_constant(part: Part[Any]) -> bool:
    """Whether a part adds, so that its element depends on the moves of all others."""
    return stage(part) is Stage.CONSTANTS


def is_compact(part: Part[Any]) -> bool:
    """Whether a part rotates or permutes, which a slice point leaves undetermined: no size or mean is read from it."""
    return stage(part) <= Stage.HEADS
