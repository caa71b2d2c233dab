"""Weight standardization: each neuron's weights are centred, divided by their norm, and multiplied by a learnt gain.

A neuron's weights are those of one output of a kernel. The network sees neither their norm nor their mean, so that the
function does not change if they are scaled or shifted, whatever layer follows. References: Qiao et al. 2019; the gains
are as in Rotational Equilibrium, App. K.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from models.wrapping import called_with, inputs_of, wrapped

EPS = 1e-12


def standardized(kernel: jax.Array, fan_in: tuple[int, ...]) -> jax.Array:
    """Centres the weights of every neuron and divides them by their norm. A neuron sums over the axes `fan_in`."""
    centred = kernel - jnp.mean(kernel, fan_in, keepdims=True)
    return centred * jax.lax.rsqrt(jnp.sum(jnp.square(centred), fan_in, keepdims=True) + EPS)


class WeightStandardized(nnx.Module):
    """Calls a layer with its standardized kernel times `gain` in place of its kernel.

    Attributes:
      layer: the layer: `nnx.Linear`, `nnx.Conv` or any module that uses its own `kernel`. It is not changed.
      gain: one number per neuron. It starts as the norm of the neuron's centred weights, so that at the start only the
        neurons' means are lost.

    >>> layer = nnx.Linear(8, 3, rngs=nnx.Rngs(0))
    >>> one = WeightStandardized(layer, "_ channel")
    >>> one(jnp.ones((2, 8))).shape, one.gain.shape
    ((2, 3), (3,))
    """

    def __init__(self, layer: nnx.Module, axes: str) -> None:
        """Wraps a layer. `axes` has a word per axis of its kernel: `_` for axes that a neuron sums over."""
        kernel = layer.kernel[...]  # type: ignore[attr-defined]
        self.layer, self.fan_in = layer, inputs_of(axes, kernel)
        centred = kernel - jnp.mean(kernel, self.fan_in, keepdims=True)
        self.gain = nnx.Param(jnp.sqrt(jnp.sum(jnp.square(centred), self.fan_in)))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The output of the layer, computed with the standardized kernel."""
        gain = jnp.expand_dims(self.gain[...], self.fan_in)
        kernel = self.layer.kernel[...]  # type: ignore[attr-defined]
        return called_with(self.layer, standardized(kernel, self.fan_in) * gain, *args, **kwargs)


def standardize(model: nnx.Module, axes: Mapping[str, str]) -> None:
    """Wraps, in place, every module in `model` whose attribute name is listed.

    Args:
      model: the model. Layers at any depth are found.
      axes: attribute name of a layer → axes string of its kernel.

    >>> class Two(nnx.Module):
    ...     def __init__(self, rngs):
    ...         self.up, self.down = nnx.Linear(4, 8, rngs=rngs), nnx.Linear(8, 4, rngs=rngs)
    >>> model = Two(nnx.Rngs(0))
    >>> standardize(model, {"up": "_ channel"})
    >>> type(model.up).__name__, type(model.down).__name__
    ('WeightStandardized', 'Linear')
    """
    wrapped(model, axes, WeightStandardized)
