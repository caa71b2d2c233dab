"""Weight standardization: a layer's neurons centred, of norm 1, times a gain that is learnt.

The network then sees neither the size nor the mean of a kernel's neurons: each is scale- and shift-invariant, whatever
follows it. Qiao et al. 2019; with gains as in Rotational Equilibrium, App. K.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from models.wrapping import called_with, inputs_of, wrapped

EPS = 1e-12


def standardized(kernel: jax.Array, fan_in: tuple[int, ...]) -> jax.Array:
    """Neurons of mean 0 and norm 1; `fan_in` are the axes of one."""
    centred = kernel - jnp.mean(kernel, fan_in, keepdims=True)
    return centred * jax.lax.rsqrt(jnp.sum(jnp.square(centred), fan_in, keepdims=True) + EPS)


class WeightStandardized(nnx.Module):
    """A layer with a `kernel`, whose call sees the standardized one times `gain`.

    Attributes:
      layer: as it was, `nnx.Linear`, `nnx.Conv` or any module that reads its own `kernel`.
      gain: one per neuron, at first its norm without the mean, so that the function changes by the mean alone.

    >>> layer = nnx.Linear(8, 3, rngs=nnx.Rngs(0))
    >>> one = WeightStandardized(layer, "_ channel")
    >>> one(jnp.ones((2, 8))).shape, one.gain.shape
    ((2, 3), (3,))
    """

    def __init__(self, layer: nnx.Module, axes: str) -> None:
        """`axes` of the kernel, in order: `_` is what a neuron sums over, as in gauges."""
        kernel = layer.kernel[...]  # type: ignore[attr-defined]
        self.layer, self.fan_in = layer, inputs_of(axes, kernel)
        centred = kernel - jnp.mean(kernel, self.fan_in, keepdims=True)
        self.gain = nnx.Param(jnp.sqrt(jnp.sum(jnp.square(centred), self.fan_in)))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The layer's, with the kernel that the network sees."""
        gain = jnp.expand_dims(self.gain[...], self.fan_in)
        kernel = self.layer.kernel[...]  # type: ignore[attr-defined]
        return called_with(self.layer, standardized(kernel, self.fan_in) * gain, *args, **kwargs)


def standardize(model: nnx.Module, axes: Mapping[str, str]) -> None:
    """Wraps, in place, every module in `model` whose attribute name is listed.

    Args:
      model: of any depth.
      axes: attribute name of a layer → axes of its kernel.

    >>> class Two(nnx.Module):
    ...     def __init__(self, rngs):
    ...         self.up, self.down = nnx.Linear(4, 8, rngs=rngs), nnx.Linear(8, 4, rngs=rngs)
    >>> model = Two(nnx.Rngs(0))
    >>> standardize(model, {"up": "_ channel"})
    >>> type(model.up).__name__, type(model.down).__name__
    ('WeightStandardized', 'Linear')
    """
    wrapped(model, axes, WeightStandardized)
