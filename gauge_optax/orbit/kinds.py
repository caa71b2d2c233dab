"""The order in which parts take turns in `align`. It depends on the class of a part."""

import enum
import functools
from typing import Any

from gauge_optax.gauges.by_action import PermutationOfUser
from gauge_optax.parts.part import Constant, Part, Size, Turn
from gauge_optax.parts.stream import Stream


class Stage(enum.IntEnum):
    """The stages of a round of alignment, in order. The best elements of a stage depend on those of earlier stages."""

    STREAM = 0
    UNITS = 1
    HEADS = 2
    SIZES = 3
    CONSTANTS = 4


@functools.singledispatch
def stage(part: Part[Any]) -> Stage:
    """The stage at which a part takes its turn. Parts that are no `Turn`, `Size` or `Constant` are permutations."""
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
    """Whether a part adds a constant. Its best element then depends on the moves of all other parts."""
    return stage(part) is Stage.CONSTANTS


def is_compact(part: Part[Any]) -> bool:
    """Whether a part rotates or permutes.

    Slice points, as `align` uses them, have no freedom of scales and constants left. Those of two weight sets of one
    function may still differ by such rotations and permutations.
    """
    return stage(part) <= Stage.HEADS
