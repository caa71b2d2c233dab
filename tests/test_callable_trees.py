"""Parameters whose tree can be called, as equinox's modules can: every optimizer takes the steps of a plain dict.

Optax calls labels and masks that are callable. A tree of labels that is made from such parameters is callable too.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import gauge_optax as go
from tests.cases import with_masks
from tests.tolerances import tolerance
from tests.twins import normal, trained

Tree = Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Net:
    """A module without a framework."""

    up: Any
    bias: Any
    down: Any

    def __call__(self, x: jax.Array) -> jax.Array:
        return jnp.asarray(jax.nn.relu(x @ self.up + self.bias) @ self.down)


LEAVES = jax.tree.map(lambda x: x / 3, normal(0, {"up": (4, 8), "bias": (8,), "down": (8, 3)}))
X, Y = normal(1, {"x": (16, 4), "y": (16, 3)}).values()
GAUGE = go.rescale({"up": "_ channel", "bias": "channel"}, {"down": "channel _"})
KERNELS = {"up": "_ neuron", "down": "_ neuron"}
RATE = 0.01
# Each gets a mask, which some do not take.
OPTIMIZERS: dict[str, Callable[[Any], optax.GradientTransformation]] = with_masks(GAUGE, KERNELS) | {
    "scale_by_scaled_polar": lambda _: optax.chain(
        go.links.scale_by_scaled_polar(GAUGE), optax.scale(-RATE), go.gauge_retract(GAUGE)
    ),
    "gauge_fix": lambda mask: go.orbit.gauge_fix(optax.adamw(RATE, mask=mask), GAUGE),
    "max_norm": lambda _: go.norms.max_norm(optax.sgd(RATE), KERNELS, learning_rate=RATE),
    "rotational_adamw": lambda mask: go.norms.rotational_adamw(RATE, KERNELS, mask=mask),
    "rotational_sgdm": lambda mask: go.norms.rotational_sgdm(RATE, KERNELS, mask=mask),
    "rotational_lion": lambda mask: go.norms.rotational_lion(RATE, KERNELS, mask=mask),
    "hyperball": lambda _: optax.chain(optax.sgd(RATE), go.norms.hyperball(KERNELS)),
    "by_path": lambda _: optax.adamw(RATE, mask=go.tools.by_path({"bias": False}, default=True)),
}


@pytest.mark.slow_rows("*-function")
@pytest.mark.parametrize("kind", ["tree", "function"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_module_takes_the_steps_of_a_dict(name: str, kind: str) -> None:
    """Five steps, with a mask as a tree, which is callable then, and as a function."""
    function = lambda tree: jax.tree.map(lambda _: True, tree)  # noqa: E731
    found = []
    for tree in (LEAVES, Net(**LEAVES)):
        tx = OPTIMIZERS[name](function if kind == "function" else function(tree))
        module = (lambda p: Net(**p)) if isinstance(tree, dict) else (lambda p: p)
        found.append(trained(tx, lambda p, of=module: jnp.mean(jnp.square(of(p)(X) - Y)), tree, 5)[0])
    plain, own = found
    for path, start in LEAVES.items():
        moved = float(jnp.linalg.norm(plain[path] - start))
        assert moved > 1e-4
        assert float(jnp.linalg.norm(getattr(own, path) - plain[path])) <= tolerance("twins", "float32") * moved
