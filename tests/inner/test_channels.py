"""Sums along scale channels, off leaves as they lie, against the same off the slice."""

from typing import Any

import jax
import numpy as np
import pytest

import gauge_optax as go
import gauge_optax.slice as slices
from gauge_optax.inner.channels import Measured, as_they_lie, inverse_of, without_lengths
from tests.tolerances import tolerance

# Layers scanned; gate and up in one kernel, of which a norm scales all rows and a rescaling the columns of up.
GAUGES = [
    go.norm_scale(
        scale={"norm/scale": "layer channel"}, into={"mlp/gate_up": "layer _ channel _", "skip": "layer channel _"}
    ),
    go.rescale(up={"mlp/gate_up": "layer half=1 _ channel"}, down={"mlp/down": "layer channel _"}, degree=1),
    go.rescale(up={"mlp/gate_up": "layer half=0 _ channel"}, down={"after": "layer channel _"}, degree=2),
]
SHAPES = {
    "norm": {"scale": (2, 3)},
    "mlp": {"gate_up": (2, 2, 3, 5), "down": (2, 5, 3)},
    "skip": (2, 3, 4),
    "after": (2, 5, 2),
}


def _tree(seed: int) -> Any:
    leaves, structure = jax.tree.flatten(SHAPES, is_leaf=lambda x: isinstance(x, tuple))
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    return jax.tree.unflatten(structure, [jax.random.normal(k, s) for k, s in zip(keys, leaves, strict=True)])


@pytest.mark.parametrize("shifted", [False, True], ids=["scales alone", "a shift on one leaf"])
def test_sums_off_leaves_as_they_lie(shifted: bool, x64: None) -> None:
    """A leaf that a shift moves too has no sums of its own: taken off the slice, the same comes out."""
    group = go.product([*GAUGES, *([go.logit_shift({"skip": "layer _ vocab"})] if shifted else [])])
    params, grads = _tree(0), _tree(1)
    on = group.chart(params)
    frame = slices.read(on, params)
    motions = slices.motions(on, frame)
    point = slices.enter(motions, on.joint.values(params))
    gradient = slices.enter_dual(on, motions, on.joint.vectors(grads))
    origin = slices.origin(on, frame, point, gradient)._replace(params=params, updates=grads)

    def left(origin: slices.Origin | None) -> tuple[Any, Any]:
        carriers, anchors, pairs = as_they_lie(on, origin, {} if origin is None else origin.by_reading(on))
        known: list[Measured] = [(own, inverse_of(own.squares(point))) for own in carriers + anchors]
        assert all(own.lying for own, _ in known) == (origin is not None and not shifted)
        # A step is a vector as good as any: there are no pairs that would make its sums.
        lefts = [without_lengths(known, point, gradient, given) for given in (pairs, None)]
        return [x for _, x in known], lefts

    for found, expected in zip(*map(jax.tree.leaves, (left(origin), left(None))), strict=True):
        np.testing.assert_allclose(found, expected, rtol=tolerance("oracle"), atol=tolerance("oracle"))
