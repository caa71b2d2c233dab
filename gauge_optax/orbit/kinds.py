"""The kinds of gauges that alignment tells apart: constants, rotations and permutations, and all others.

Constants are additions, whose elements depend on the moves of all other gauges. Rotations and permutations are compact:
a slice point does not determine them, because no size or mean can be read from them.
"""

import enum
import functools

from gauge_optax.gauges.absorption import Absorption
from gauge_optax.gauges.by_action import ActionInstance
from gauge_optax.gauges.embedding_shift import Translation
from gauge_optax.gauges.instance import Instance
from gauge_optax.gauges.key_bias import Constant
from gauge_optax.gauges.linear import Linear
from gauge_optax.gauges.permutation import Permutation
from gauge_optax.gauges.read_shift import ReadShift
from gauge_optax.gauges.residual import ResidualRotation
from gauge_optax.gauges.rope_linear import ComplexScale
from gauge_optax.gauges.rotation import Rotation
from gauge_optax.gauges.shift import Shift
from gauge_optax.gauges.torus import Torus
from gauge_optax.gauges.write_shift import WriteShift


class Stage(enum.IntEnum):
    """When an instance takes its turn in a round of alignment: what others are compared by comes first."""

    STREAM = 0
    UNITS = 1
    HEADS = 2
    SIZES = 3
    CONSTANTS = 4


@functools.singledispatch
def stage(instance: Instance) -> Stage:
    """When an instance takes its turn: sizes, where no rule says otherwise."""
    return Stage.SIZES


@stage.register
def _rotates_the_stream(instance: ResidualRotation) -> Stage:
    return Stage.STREAM


@stage.register
def _permutes(instance: Permutation) -> Stage:
    return Stage.UNITS


@stage.register
def _turns_heads(instance: Rotation | Torus | Linear | ComplexScale) -> Stage:
    return Stage.HEADS


@stage.register
def _adds(instance: Shift | WriteShift | ReadShift | Constant | Translation | Absorption) -> Stage:
    return Stage.CONSTANTS


@stage.register
def _known_by_action(instance: ActionInstance) -> Stage:
    """A user's gauge says by its `effect` alone that it permutes."""
    return Stage.UNITS if instance.effect == "permutation" else Stage.SIZES


def is_constant(instance: Instance) -> bool:
    """Whether an instance adds constants, so that its elements depend on the moves of all others."""
    return stage(instance) is Stage.CONSTANTS


@functools.singledispatch
def compact(instance: Instance) -> Instance | None:
    """The part of an instance that a slice point leaves undetermined, rotations or permutations; or None."""
    return instance if stage(instance) <= Stage.HEADS else None


@compact.register
def _its_rotation(instance: Linear | ComplexScale) -> Instance:
    return instance.turn
