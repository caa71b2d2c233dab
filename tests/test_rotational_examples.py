"""Studies of rotational equilibrium: nets are invariant where they say, claims hold."""

import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

from examples.studies import rotational_networks
from models.weight_standardization import WeightStandardized


def test_a_standardized_layer_sees_neither_size_nor_mean(x64: None) -> None:
    graph, state = nnx.split(WeightStandardized(nnx.Linear(8, 3, rngs=nnx.Rngs(0)), "_ channel"))
    x, params = np.random.default_rng(0).normal(size=(5, 8)), nnx.to_pure_dict(state)
    layer, kernel = params["layer"], params["layer"]["kernel"]
    expected = x @ (kernel - kernel.mean(0)) + layer["bias"]
    for moved, tolerance in ((kernel, 1e-5), (3.0 * kernel + jnp.array([1.0, -2.0, 0.5]), 1e-6)):
        found = nnx.merge(graph, params | {"layer": layer | {"kernel": moved}})(jnp.asarray(x))
        np.testing.assert_allclose(found, expected, rtol=tolerance, atol=tolerance)
        expected = found


def committed(name: str) -> Any:
    results = Path(__file__).parent.parent / "examples" / "results"
    return json.loads((results / f"{name}.json").read_text())["cells"]


def test_the_walks_rest_where_predicted() -> None:
    """The promise: 2 % for SGDM and AdamW, 6 % for Adam + l2, 3 % for Lion; three seeds."""
    cells = committed("rotational_walk")
    most = {"SGDM": 0.02, "AdamW": 0.02, "Adam + l2": 0.06, "Lion": 0.03, "Lion, even inputs": 0.03, "Muon": 0.06}
    for name, bound in most.items():
        keys = ("norm", "rotation", *(("aligned_norm", "aligned_rotation") if name == "Lion" else ()))
        assert len(cells[name]["norm"]) == 3
        assert max(abs(x - 1) for key in keys for x in cells[name][key]) <= bound, name
    assert max(cells["AdamW, b2 = 0.95"]["transient"]) <= 0.05


def test_trained_layers_are_near_table_1() -> None:
    for name, cell in committed("rotational_networks").items():
        if "no decay" not in name:
            ratios = [rotational_networks.ratios(layer, True) for layer in cell["layers"].values()]
            assert 0.75 < np.min(ratios) and np.max(ratios) < 1.25, name
