"""What rotating asks of each kind of gauge: a random rotation, whether an element is one, and the move of one leaf.

Heads and the residual stream have random and Hadamard rotations, rotary planes random angles alone; all other gauges
are refused. The instance on one leaf moves that leaf as the whole instance does, so that `rotate` holds one leaf in
float64 at a time. Each question is one rule: a default that holds for every instance, and what a class answers.
References: QuaRot (Ashkboos et al. 2024), §4; SpinQuant (Liu et al. 2024), §3.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from gauge_optax.binding import Block
from gauge_optax.errors import binding_error
from gauge_optax.gauges.instance import Instance
from gauge_optax.gauges.linear import Linear
from gauge_optax.gauges.residual import ResidualRotation
from gauge_optax.gauges.rope_linear import ComplexScale
from gauge_optax.gauges.rotation import Rotation
from gauge_optax.gauges.torus import Torus
from gauge_optax.linalg import haar, matmul, transpose
from gauge_optax.orbit.hadamard import hadamard_with_ones, randomized_hadamard, require_even


@functools.singledispatch
def random_rotation(instance: Instance, key: jax.Array, by: str) -> Any:
    """A random public element that rotates, by "random" or "hadamard". Raises ValueError where there is none."""
    raise binding_error(
        instance.gauge,
        "no rotation",
        f"{instance.gauge} in the list of go.rotate",
        "rotations of heads or of the stream",
        "take it out of the list; go.canonicalize moves scales and shifts",
    )


@random_rotation.register
def _random_heads(instance: Rotation, key: jax.Array, by: str) -> jax.Array:
    if by == "hadamard":
        require_even(instance.gauge, instance.blocks, instance.size)
        return randomized_hadamard(key, instance.shape, instance.size)
    return haar(key, (*instance.shape, instance.size, instance.size))


@random_rotation.register
def _random_angles(instance: Torus, key: jax.Array, by: str) -> jax.Array:
    if by == "hadamard":
        raise binding_error(
            instance.gauge,
            "no Hadamard rotation",
            "rotary planes, which turn one by one",
            "rotations of whole heads",
            "take it out of the list; rotary embeddings leave the values of heads alone free to rotate",
        )
    return instance.sample(key, 1.0, {})


@random_rotation.register
def _random_factors(instance: Linear, key: jax.Array, by: str) -> jax.Array:
    return random_rotation(instance.turn, key, by)


@random_rotation.register
def _random_phases(instance: ComplexScale, key: jax.Array, by: str) -> jax.Array:
    return instance.from_turn(random_rotation(instance.turn, key, by))


@random_rotation.register
def _random_stream(instance: ResidualRotation, key: jax.Array, by: str) -> jax.Array:
    if by == "random":
        return instance.sample(key, 1.0, {})
    require_even(instance.gauge, instance.blocks, instance.size, 4 if instance.keeps_ones else 2)
    if instance.keeps_ones:
        return hadamard_with_ones(key, instance.size)
    return randomized_hadamard(key, (), instance.size)


@functools.singledispatch
def misfit(instance: Instance, element: Any) -> jax.Array | float:
    """How far a public element is from the group, relative to 1; 0 where every array of its shape is in it."""
    return 0.0


@misfit.register
def _misfit_of_heads(instance: Rotation, element: jax.Array) -> jax.Array:
    return jnp.max(jnp.abs(matmul(element, transpose(element)) - instance.identity()))


@misfit.register
def _misfit_of_stream(instance: ResidualRotation, element: jax.Array) -> jax.Array:
    error = jnp.max(jnp.abs(matmul(element, transpose(element)) - jnp.eye(instance.size, dtype=element.dtype)))
    moved = jnp.max(jnp.abs(jnp.sum(element, 0) - 1.0))
    return jnp.maximum(error, moved) if instance.keeps_ones else error


@functools.singledispatch
def on_leaf(instance: Instance, path: str) -> tuple[Any, dict[str, str]]:
    """The instance on one leaf, with the path "" there, and the paths of the leaves that its action reads, by name.

    It says nothing of layers, so that equal leaves of several layers have equal instances.
    """
    return _alone(instance, path), {}


@on_leaf.register
def _stream_on_leaf(instance: ResidualRotation, path: str) -> tuple[Any, dict[str, str]]:
    """Beside the leaf, the action reads the scales of the norms before it."""
    read: dict[str, str] = {}
    scales: list[tuple[Block, tuple[Block, ...]]] = []
    for scale, behind in instance.scales:
        passed = tuple(dataclasses.replace(block, path="") for block in behind if block.path == path)
        if passed:
            name = f"norm{len(scales)}"
            scales.append((dataclasses.replace(scale, path=name), passed))
            read[name] = scale.path
    return dataclasses.replace(_alone(instance, path), scales=tuple(scales), seen=()), read


def _alone(instance: Any, path: str) -> Any:
    blocks = tuple(dataclasses.replace(block, path="") for block in instance.blocks if block.path == path)
    return dataclasses.replace(instance, key="", blocks=blocks)


@functools.singledispatch
def with_blocks(instance: Instance, change: Callable[[Block], Block]) -> Any:
    """The instance with every block that it moves changed."""
    return dataclasses.replace(instance, blocks=tuple(map(change, instance.blocks)))


@with_blocks.register
def _stream_with_blocks(instance: ResidualRotation, change: Callable[[Block], Block]) -> Any:
    scales = tuple((scale, tuple(map(change, behind))) for scale, behind in instance.scales)
    return dataclasses.replace(instance, blocks=tuple(map(change, instance.blocks)), scales=scales)
