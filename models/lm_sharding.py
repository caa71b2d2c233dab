"""How the parameters of `models.lm` are sharded over a mesh.

A mesh has the axes "data" and "model". `AXES` names the axes of every leaf, and a layout maps these names to mesh axes:
"dp" (every device has all parameters), "fsdp" (the model's width is divided over "data"), "tp" (heads, hidden units and
vocabulary are divided over "model"), "fsdp_tp" (both).

Axes called "_", such as a head's basis, are never divided, so that a rotation mixes only entries of one device. Only
sums per channel and Gram matrices per head cross devices.
"""

import re
from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

# Pattern → names of the axes of the leaves whose path contains the pattern. The first pattern that fits counts.
AXES: tuple[tuple[str, str], ...] = (
    (r"(query|key|value)/kernel", "width heads _"),
    (r"(query|key|value)/bias", "heads _"),
    (r"[qk]_norm/scale", "_"),
    (r"out/kernel", "heads _ width"),
    (r"(up|gate)/kernel", "width hidden"),
    (r"(up|gate)/bias", "hidden"),
    (r"down/kernel", "hidden width"),
    (r"lm_head/kernel", "width vocab"),
    (r"lm_head/bias", "vocab"),
    (r"embedding", "_ width"),
    (r"norm|bias", "width"),
)

_SPLIT = {"heads": "model", "hidden": "model", "vocab": "model"}
LAYOUTS: Mapping[str, Mapping[str, str]] = {
    "dp": {},
    "fsdp": {"width": "data"},
    "tp": _SPLIT,
    "fsdp_tp": {"width": "data", **_SPLIT},
}


def make_mesh(data: int, model: int, *, kind: AxisType = AxisType.Auto) -> Mesh:
    """A mesh of the first data · model devices. If its axes are not explicit, XLA chooses the sharding of updates."""
    devices = jax.devices()[: data * model]
    if len(devices) < data * model:
        raise ValueError(
            f"a mesh of {data}x{model} devices\n"
            f"  found:    {len(devices)} {devices[0].platform} devices\n"
            f"  expected: {data * model}\n"
            f"  remedy:   a smaller mesh; or, first of all, jax.config.update('jax_num_cpu_devices', {data * model})"
        )
    return jax.make_mesh((data, model), ("data", "model"), axis_types=(kind, kind), devices=devices)


def partition(layout: str, path: str) -> P:
    """The mesh axis (or None) of every axis of the leaf at a path such as `blocks/0/norm1/scale`."""
    names = next(axes for pattern, axes in AXES if re.search(pattern, path)).split()
    return P(*(LAYOUTS[layout].get(name) for name in names))


def shardings(params: Any, mesh: Mesh, layout: str) -> Any:
    """A `NamedSharding` for every leaf of a nested dict of arrays, or of their shapes."""

    def placed(keys: tuple[Any, ...], leaf: Any) -> NamedSharding:
        del leaf
        return NamedSharding(mesh, partition(layout, jax.tree_util.keystr(keys, simple=True, separator="/")))

    return jax.tree_util.tree_map_with_path(placed, params)
