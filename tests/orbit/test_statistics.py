"""Running statistics of BatchNorm beside weights that move: no function leaves them behind without a word."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import gauge_optax as go
from gauge_optax.states.statistics import statistics_of
from tests.refusals import refused

KEYS = jax.random.split(jax.random.key(0), 3)
X = jax.random.normal(KEYS[0], (256, 6))
KERNELS = [jax.random.normal(key, (6, 5)) for key in KEYS[1:]]
ONES, NORM = jnp.ones(5), {"scale": jnp.ones(5), "bias": jnp.zeros(5)}
STATISTICS = {"mean": jnp.linspace(-1.0, 1.0, 5), "var": jnp.arange(1.0, 6.0)}
KERNEL = go.scale_invariant({"kernel": "_ channel"})
# What stands beside the kernel.
TREES: dict[str, Any] = {
    "nnx": {"norm": NORM | STATISTICS},
    "linen": {"norm": NORM, "batch_stats": {"norm": STATISTICS}},
    "torch": {"norm": NORM | {"running_mean": ONES, "running_var": ONES}},
    "keras": {"norm": NORM | {"moving_mean": ONES, "moving_variance": ONES}},
    "haiku": {"bn": {"scale": ONES, "offset": ONES}}
    | {f"bn/~/{name}_ema": {"average": ONES, "counter": jnp.zeros((), int)} for name in ("mean", "var")},
    "names of PyTorch": {"bn1.weight": ONES, "bn1.running_mean": ONES, "bn1.running_var": ONES},
    "without an affine part": {"bn": STATISTICS},
    "gamma": {"b": {"gamma": ONES} | STATISTICS},
}
NET = TREES["nnx"] | {"kernel": KERNELS[0], "out": KERNELS[1].T}


@pytest.mark.parametrize("name", TREES)
def test_a_move_that_leaves_statistics_behind_is_refused(name: str) -> None:
    tree = TREES[name] | {"kernel": KERNELS[0]}
    assert len(statistics_of(tree)) == 2
    calls = {
        "canonicalize": lambda: go.orbit.canonicalize(tree, KERNEL),
        "gauge_fix": lambda: go.orbit.gauge_fix(optax.sgd(0.1), KERNEL).init(tree),
        "choose": lambda: go.orbit.choose(lambda p: jnp.sum(p["kernel"] ** 2), tree, KERNEL, steps=1),
        "average": lambda: go.orbit.average([tree, tree], KERNEL),
        "interpolate": lambda: go.orbit.interpolate(tree, tree, 0.5),
        "align": lambda: go.orbit.align(tree, tree, KERNEL),
        "distance": lambda: go.orbit.distance(tree, tree, KERNEL),
    }
    for function, call in calls.items():
        with refused(f"^{function}: running statistics", "variables['params']"):
            call()


def test_what_does_not_disturb_statistics_passes() -> None:
    behind = go.rescale({"norm/scale": "channel", "norm/bias": "channel"}, {"out": "channel _"})
    # The norm's affine part trades with the next kernel, behind the statistics.
    go.orbit.canonicalize(NET, behind)
    go.orbit.gauge_fix(optax.sgd(0.1), behind).init(NET)
    prior = STATISTICS | {"kernel": KERNELS[0]}  # no norm beside them
    assert statistics_of(prior) == {}
    go.orbit.average([prior, prior], KERNEL)
    go.orbit.canonicalize({"kernel": KERNELS[0], "norm": NORM}, KERNEL)


def test_a_permutation_and_a_bias_leave_statistics_behind_too() -> None:
    """Of units whose norm's scale is permuted, and of a bias that a norm's mean removes in training."""
    tree, norm = NET | {"bias": jnp.arange(5.0)}, {"norm/scale": "channel", "norm/bias": "channel"}
    units = {"kernel": "_ channel", "out": "channel _", **norm}
    for gauge, leaf in ((go.permutation(units), "kernel"), (go.key_bias({"bias": "_"}), "bias")):
        with refused(f"statistics that a move of '{leaf}' leaves behind, 'norm/mean'"):
            go.orbit.canonicalize(tree, gauge)
    whole = go.permutation(units | {"norm/mean": "channel", "norm/var": "channel"})

    def evaluated(p: Any) -> jax.Array:
        norm = p["norm"]
        hidden = (X @ p["kernel"] - norm["mean"]) / jnp.sqrt(norm["var"] + 1e-5) * norm["scale"] + norm["bias"]
        return jax.nn.relu(hidden) @ p["out"]

    before, after = evaluated(tree), evaluated(go.orbit.canonicalize(tree, whole))
    assert jnp.linalg.norm(after - before) < 1e-5 * jnp.linalg.norm(before)
    elsewhere = tree | {"up": KERNELS[0], "down": KERNELS[1].T}
    go.orbit.canonicalize(elsewhere, go.permutation({"up": "_ channel", "down": "channel _"}))
