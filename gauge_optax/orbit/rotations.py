"""Rules of `rotate` for each kind of part: draw a random rotation, check an element, restrict a part to one leaf.

Heads and the residual stream have random and Hadamard rotations. Rotary planes have random angles only. All other parts
raise an error. A part restricted to one leaf has only the blocks of that leaf, so that `rotate` has only one leaf in
float64 at a time. Each of the three tasks is one `singledispatch` function, with a default for all parts and versions
for some classes.
References: QuaRot (Ashkboos et al. 2024), §4; SpinQuant (Liu et al. 2024), §3.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from gauge_optax.errors import binding_error
from gauge_optax.gauges.bound import Bound
from gauge_optax.gauges.torus import random_angles
from gauge_optax.linalg import direction_tolerance, haar, matmul, transpose
from gauge_optax.orbit.hadamard import hadamard_with_ones, randomized_hadamard, require_even
from gauge_optax.parts.heads import Planes, Rotation
from gauge_optax.parts.part import Anchor, Part, name_of
from gauge_optax.parts.sizes import Stretch
from gauge_optax.parts.stream import Stream


@functools.singledispatch
def random_rotation(part: Part[Any], key: jax.Array, by: str) -> Any:
    """Draws a rotation for a part; `by` is "random" or "hadamard". Raises ValueError if the part has none."""
    raise binding_error(
        name_of(part),
        "no rotation",
        f"{name_of(part)} in the list of go.orbit.rotate",
        "rotations of heads or of the stream",
        "take it out of the list; go.orbit.canonicalize moves scales and shifts",
    )


@random_rotation.register
def _random_heads(part: Rotation, key: jax.Array, by: str) -> jax.Array:
    if by == "hadamard":
        require_even(name_of(part), part.blocks, part.size)
        return randomized_hadamard(key, part.shape, part.size)
    return haar(key, (*part.shape, part.size, part.size))


@random_rotation.register
def _random_angles(part: Planes, key: jax.Array, by: str) -> jax.Array:
    if by == "hadamard":
        raise binding_error(
            name_of(part),
            "no Hadamard rotation",
            "rotary planes, which turn one by one",
            "rotations of whole heads",
            "write by='random', or take it out of the list: under rotary embeddings, by='hadamard' can rotate heads "
            "between values and outputs only",
        )
    return random_angles(key, part.shape, 1.0)


@random_rotation.register
def _random_stream(part: Stream, key: jax.Array, by: str) -> jax.Array:
    if by == "random":
        size = part.size - part.keeps_ones
        return part.embedded(haar(key, (*part.shape, size, size)))
    require_even(name_of(part), part.blocks, part.size, 4 if part.keeps_ones else 2)
    if part.keeps_ones:
        return jnp.broadcast_to(hadamard_with_ones(key, part.size), (*part.shape, part.size, part.size))
    return randomized_hadamard(key, part.shape, part.size)


@functools.singledispatch
def misfit(part: Part[Any], e: Any) -> tuple[jax.Array | float, str]:
    """How far an array is from being an element, such as max |RRᵀ − 1|, and what an element is, in words.

    The default is 0: any array is an element.
    """
    return 0.0, ""


@misfit.register
def _misfit_of_heads(part: Rotation, e: jax.Array) -> tuple[jax.Array | float, str]:
    return jnp.max(jnp.abs(matmul(e, transpose(e)) - part.identity())), "rotation"


@misfit.register
def _misfit_of_stretch(part: Stretch, e: jax.Array) -> tuple[jax.Array | float, str]:
    product = matmul(e[..., 0, :, :], e[..., 1, :, :])  # with its inverse
    return jnp.max(jnp.abs(product - jnp.eye(e.shape[-1], dtype=e.dtype))), "matrix with an inverse"


@misfit.register
def _misfit_of_stream(part: Stream, e: jax.Array) -> tuple[jax.Array | float, str]:
    error = jnp.max(jnp.abs(matmul(e, transpose(e)) - jnp.eye(part.size, dtype=e.dtype)))
    moved = jnp.max(jnp.abs(jnp.sum(e, -2) - 1.0))
    return jnp.maximum(error, moved) if part.keeps_ones else error, "rotation"


def checked_element(caller: str, on_tree: Bound, expected: Any, element: Any) -> tuple[Any, ...]:
    """Checks an element that a user gives, and returns it as a tuple of one element per gauge.

    Args:
      caller: the name of the public function, for messages.
      on_tree: the bound gauges.
      expected: the identity of these gauges, or its shapes and dtypes.
      element: a tuple or list of one element per gauge; for one gauge, also the gauge's own element.

    Raises:
      ValueError: an element of other gauges; matrices that are not orthogonal where the gauge rotates, or that have no
        inverse where it is `head_linear`.
    """
    found, wanted = (jax.tree.map(jnp.shape, tree) for tree in (element, expected))
    if len(wanted) == 1 and found == wanted[0]:
        element, found = (element,), (found,)
    if found not in (wanted, list(wanted)):
        raise binding_error(
            caller, "an element of other gauges", f"{found}", f"{wanted}",
            "pass an element that go.orbit.choose, go.orbit.align or go.product(gauges).sample returned for this list",
        )
    element = tuple(jax.tree.map(lambda x, e: jnp.asarray(x, e.dtype), tuple(element), expected))
    for gauge, copies, value in zip(on_tree.gauges, on_tree.copies, element, strict=True):
        for copy, own in zip(copies, gauge._split(copies, value), strict=True):
            for part, own_element in zip(copy.parts, copy.split(own), strict=True):
                error, kind = misfit(part, own_element)
                if not error <= direction_tolerance(jnp.dtype(jnp.float32)):  # also for NaN
                    raise binding_error(
                        copy.gauge, f"an element that is no {kind}, of '{part.blocks[0].path}'",
                        f"its product with its transpose or inverse is {float(error):.1e} from the identity",
                        f"a {kind}",
                        "pass the orthogonal factor of a QR decomposition, or what go.orbit.choose returned",
                    )
    return element


@functools.singledispatch
def with_blocks(part: Part[Any], change: Callable[[Anchor], Anchor]) -> Any:
    """Returns the part with its blocks replaced by change(blocks)."""
    return dataclasses.replace(part, blocks=change(part.blocks))


@with_blocks.register
def _rotation_with_blocks(part: Rotation, change: Callable[[Anchor], Anchor]) -> Any:
    return dataclasses.replace(part, blocks=change(part.blocks), seen=())  # `act` does not use `seen`


@with_blocks.register
def _stretch_with_blocks(part: Stretch, change: Callable[[Anchor], Anchor]) -> Any:
    left, right = (dataclasses.replace(side, blocks=change(side.blocks)) for side in (part.left, part.right))
    return dataclasses.replace(part, blocks=change(part.blocks), left=left, right=right)


@with_blocks.register
def _stream_with_blocks(part: Stream, change: Callable[[Anchor], Anchor]) -> Any:
    scales = tuple((scale, change(behind)) for scale, behind in part.scales)
    return dataclasses.replace(part, blocks=change(part.blocks), scales=scales)


@functools.singledispatch
def on_leaf(part: Part[Any], path: str, number: int) -> tuple[Any, dict[str, str]]:
    """Restricts a part to one leaf, whose path becomes "".

    Args:
      part: the part.
      path: the path of a leaf that it moves.
      number: the part's number among those that move this leaf. Names contain it, so that no two parts share a name.

    Returns:
      The restricted part, and name → path for the other leaves whose values its action uses. The part does not contain
      the layer's path or label, so that equal leaves of several layers have equal parts and share a compiled program.
    """

    def alone(blocks: Anchor) -> Anchor:
        return tuple(dataclasses.replace(block, path="") for block in blocks if block.path == path)

    return dataclasses.replace(with_blocks(part, alone), label=""), {}


@on_leaf.register
def _stream_on_leaf(part: Stream, path: str, number: int) -> tuple[Any, dict[str, str]]:
    """Restricts the stream's rotation. Its action on a leaf also uses the scales of the norms in front of the leaf."""
    alone, _ = on_leaf.dispatch(Part)(part, path, number)
    passed = [(scale, behind) for scale, behind in alone.scales if behind]
    read = {f"norm{number}.{k}": scale.path for k, (scale, _) in enumerate(passed)}
    scales = tuple(
        (dataclasses.replace(scale, path=name), behind) for name, (scale, behind) in zip(read, passed, strict=True)
    )
    return dataclasses.replace(alone, scales=scales, seen=()), read
