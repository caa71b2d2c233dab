"""Running statistics of BatchNorm beside weights that move: no function leaves them behind without a word."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import gauge_optax as go
from gauge_optax.gauges.statistics import statistics_of

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


KERNEL = go.scale_invariant({"kernel": "_ channel"})
TREES = {
    "nnx": _tree(("mean", "var"), "norm"),
    "linen": _tree(("mean", "var"), "batch_stats"),
    "torch": _tree(("running_mean", "running_var"), "norm"),
    "keras": _tree(("moving_mean", "moving_variance"), "norm"),
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
    }
    for function, call in calls.items():
        with pytest.raises(ValueError, match=f"^{function}: running statistics") as caught:
            call()
        assert "variables['params']" in str(caught.value)


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
