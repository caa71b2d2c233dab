"""Small classifiers of 8 × 8 digits. Their normalisations decide which weights are scale-invariant.

The leaves are layers/{i}/kernel (inputs, outputs), layers/{i}/bias, head/kernel and head/bias. In the CNN, kernels are
(9 · channels, outputs), because they multiply 3 × 3 patches. With `standardized`, the leaves of a layer are
layers/{i}/layer/kernel, layers/{i}/layer/bias and layers/{i}/gain. Norms have no parameters.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from sklearn.datasets import load_digits

from models.weight_standardization import WeightStandardized

CLASSES, SIDE = 10, 8


@dataclass(frozen=True)
class DigitsConfig:
    """Sizes and switches of a classifier.

    `norm` is the normalisation before each ReLU: over features ("layer"), over the batch ("batch"), or "none". With
    `standardized`, layers are those of `models.weight_standardization`.
    """

    kind: Literal["mlp", "cnn"] = "mlp"
    width: int = 64
    depth: int = 2
    norm: Literal["none", "layer", "batch"] = "layer"
    standardized: bool = False


NET = DigitsConfig()


class Dense(nnx.Module):
    """A dense layer with a kernel (inputs, outputs) and a bias."""

    def __init__(self, inputs: int, outputs: int, rngs: nnx.Rngs) -> None:
        self.kernel = nnx.Param(nnx.initializers.lecun_normal()(rngs.params(), (inputs, outputs)))
        self.bias = nnx.Param(jnp.zeros(outputs))

    def __call__(self, x: jax.Array) -> jax.Array:
        """x·kernel + bias."""
        return x @ self.kernel[...] + self.bias[...]


def patches(x: jax.Array, stride: int) -> jax.Array:
    """Cuts images (batch, h, w, c), padded by zeros, into 3 × 3 windows: (batch, h/stride, w/stride, 9·c)."""
    padded = jnp.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))
    rows, columns = x.shape[1], x.shape[2]
    moved = [
        padded[:, i : i + rows : stride, j : j + columns : stride] for i in range(3) for j in range(3)
    ]
    return jnp.concatenate(moved, -1)


class Digits(nnx.Module):
    """A classifier: images (batch, 64) → logits (batch, 10)."""

    def __init__(self, c: DigitsConfig, rngs: nnx.Rngs) -> None:
        self.kind, self.norm = c.kind, c.norm
        sizes = [SIDE * SIDE if c.kind == "mlp" else 1, *[c.width] * c.depth]
        fan = 9 if c.kind == "cnn" else 1
        made = [Dense(fan * a, b, rngs) for a, b in itertools.pairwise(sizes)]
        self.layers = nnx.List([WeightStandardized(x, "_ channel") if c.standardized else x for x in made])
        positions = 1 if c.kind == "mlp" else (SIDE // 2 ** (c.depth - 1)) ** 2
        self.head = Dense(positions * c.width, CLASSES, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """The logits of images."""
        if self.kind == "cnn":
            x = x.reshape(-1, SIDE, SIDE, 1)
        for number, layer in enumerate(self.layers):
            x = layer(x if self.kind == "mlp" else patches(x, 1 if number == 0 else 2))
            x = jax.nn.relu(self._normalised(x))
        return self.head(x.reshape(x.shape[0], -1))

    def _normalised(self, x: jax.Array) -> jax.Array:
        if self.norm == "none":
            return x
        over = tuple(range(1, x.ndim)) if self.norm == "layer" else tuple(range(x.ndim - 1))
        x = x - jnp.mean(x, over, keepdims=True)
        return x * jax.lax.rsqrt(jnp.mean(jnp.square(x), over, keepdims=True) + 1e-8)


Params = Any
Loss = Callable[[Params, tuple[jax.Array, jax.Array]], jax.Array]


def make(c: DigitsConfig) -> tuple[Callable[[jax.Array], Params], Callable[[Params, jax.Array], jax.Array]]:
    """Returns two functions: init(key) → parameters, a nested dict; logits(params, images) → an array (batch, 10)."""
    graph, _ = nnx.split(Digits(c, nnx.Rngs(0)))

    def init(key: jax.Array) -> Params:
        return nnx.to_pure_dict(nnx.split(Digits(c, nnx.Rngs(key)))[1])

    def logits(params: Params, images: jax.Array) -> jax.Array:
        return nnx.merge(graph, params)(images)

    return init, logits


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """The cross-entropy of logits and labels, averaged over the batch."""
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def neurons(c: DigitsConfig) -> dict[str, str]:
    """Path of every hidden layer's kernel → axes string, for functions that act on each neuron's vector of weights."""
    return {f"layers/{i}/{'layer/' if c.standardized else ''}kernel": "_ channel" for i in range(c.depth)}


def data(train: int = 797, seed: int = 0) -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
    """Returns two pairs (images, labels): `train` digits to train on, and the others to test on.

    Pixels are shifted and scaled to mean 0 and standard deviation 1.
    """
    digits = load_digits()
    order = np.random.default_rng(seed).permutation(len(digits.target))
    images, labels = digits.data[order].astype(np.float32), digits.target[order].astype(np.int32)
    images = (images - images.mean()) / images.std()
    return (images[:train], labels[:train]), (images[train:], labels[train:])
