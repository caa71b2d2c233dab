"""Running statistics of BatchNorm beside weights that move: no function leaves them behind without a word."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import gauge_optax as go
from gauge_optax.states.statistics import statistics_of
from tests.refusals import refused

KEYS = jax.random.split(jax.random.key(0), 4)
X = jax.random.normal(KEYS[0], (256, 6))


def _tree(names: tuple[str, str], inside: str) -> Any:
    kernel = jax.random.normal(KEYS[1], (6, 5))
    hidden = X @ kernel
    statistics = {names[0]: hidden.mean(0), names[1]: hidden.var(0)}
    norm = {"scale": jnp.ones(5), "bias": jnp.zeros(5)}
    layer = {"kernel": kernel, "norm": norm | statistics if inside == "norm" else norm}
    return layer | ({} if inside == "norm" else {inside: {"norm": statistics}})


def _normalized(p: Any, x: jax.Array, mean: jax.Array, var: jax.Array) -> jax.Array:
    return jax.nn.relu((x - mean) / jnp.sqrt(var + 1e-5) * p["norm"]["scale"] + p["norm"]["bias"])


KERNELS = [jax.random.normal(key, (6, 5)) for key in KEYS[1:3]]
KERNEL = go.scale_invariant({"kernel": "_ channel"})
TREES = {
    "nnx": _tree(("mean", "var"), "norm"),
    "linen": _tree(("mean", "var"), "batch_stats"),
    "torch": _tree(("running_mean", "running_var"), "norm"),
    "keras": _tree(("moving_mean", "moving_variance"), "norm"),
    "haiku": {
        "kernel": KERNELS[0],
        "bn": {"scale": jnp.ones(5), "offset": jnp.zeros(5)},
        **{f"bn/~/{name}_ema": {"average": jnp.ones(5), "counter": jnp.zeros((), int)} for name in ("mean", "var")},
    },
    "names of PyTorch": {
        "kernel": KERNELS[0],
        "bn1.weight": jnp.ones(5), "bn1.running_mean": jnp.zeros(5), "bn1.running_var": jnp.ones(5),
    },
    "without an affine part": {"kernel": KERNELS[0], "bn": {"mean": jnp.zeros(5), "var": jnp.ones(5)}},
    "gamma": {"kernel": KERNELS[0], "b": {"gamma": jnp.ones(5), "mean": jnp.zeros(5), "var": jnp.ones(5)}},
}


@pytest.mark.parametrize("name", TREES)
def test_a_move_that_leaves_statistics_behind_is_refused(name: str) -> None:
    tree = TREES[name]
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


def test_the_refusal_is_about_something() -> None:
    """Without it, evaluation would be wrong, though training is not."""
    tree = TREES["nnx"]
    moved = KERNEL.act({"": jnp.linspace(-1, 1, 5)}, tree)
    hidden = [X @ tree["kernel"], X @ moved["kernel"]]
    trained = [_normalized(p, h, h.mean(0), h.var(0)) for p, h in zip((tree, moved), hidden, strict=True)]
    norm = tree["norm"]  # the statistics of both
    evaluated = [_normalized(p, h, norm["mean"], norm["var"]) for p, h in zip((tree, moved), hidden, strict=True)]
    assert jnp.linalg.norm(trained[0] - trained[1]) < 1e-4 * jnp.linalg.norm(trained[0])
    assert jnp.linalg.norm(evaluated[0] - evaluated[1]) > 0.2 * jnp.linalg.norm(evaluated[0])


def test_what_does_not_disturb_statistics_passes() -> None:
    tree = TREES["nnx"] | {"out": jax.random.normal(KEYS[2], (5, 3))}
    behind = go.rescale({"norm/scale": "channel", "norm/bias": "channel"}, {"out": "channel _"})
    go.orbit.canonicalize(tree, behind)  # the norm's affine part trades with the next kernel, behind the statistics
    go.orbit.gauge_fix(optax.sgd(0.1), behind).init(tree)
    prior = {"mean": jnp.zeros(3), "var": jnp.ones(3), "kernel": jnp.ones((6, 3))}  # no norm beside them
    assert statistics_of(prior) == {}
    go.orbit.average([prior, prior], go.scale_invariant({"kernel": "_ channel"}))
    without = {"kernel": tree["kernel"], "norm": {k: tree["norm"][k] for k in ("scale", "bias")}}
    go.orbit.canonicalize(without, KERNEL)


def test_a_permutation_and_a_bias_leave_statistics_behind_too() -> None:
    """Of units whose norm's scale is permuted, and of a bias that a norm's mean removes in training."""
    tree = TREES["nnx"] | {"bias": jnp.arange(5.0), "out": KERNELS[1].T}
    norm = {"norm/scale": "channel", "norm/bias": "channel"}
    units = go.permutation({"kernel": "_ channel", **norm, "out": "channel _"})
    for gauge, leaf in ((units, "kernel"), (go.key_bias({"bias": "_"}), "bias")):
        with pytest.raises(ValueError, match=f"statistics that a move of '{leaf}' leaves behind, 'norm/mean'"):
            go.orbit.canonicalize(tree, gauge)
    statistics = {"norm/mean": "channel", "norm/var": "channel"}
    whole = go.permutation({"kernel": "_ channel", **norm, **statistics, "out": "channel _"})
    before, after = tree, go.orbit.canonicalize(tree, whole)
    ends = [_normalized(p, X @ p["kernel"], p["norm"]["mean"], p["norm"]["var"]) @ p["out"] for p in (before, after)]
    assert jnp.linalg.norm(ends[0] - ends[1]) < 1e-5 * jnp.linalg.norm(ends[0])
    elsewhere = tree | {"up": KERNELS[0], "down": KERNELS[1].T}
    go.orbit.canonicalize(elsewhere, go.permutation({"up": "_ channel", "down": "channel _"}))
