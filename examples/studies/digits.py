"""Trains digits at many rates and from many seeds in one program.

The nets and the data are in `models/digits.py`; each study says what it compares.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from models import digits

Params = Any
Make = Callable[[optax.Schedule, jax.Array], optax.GradientTransformation]
"""(learning rate, weight decay) → an optimizer."""


@dataclass(frozen=True)
class Warmed:
    """How long, and how the rate goes: warm-up over a share of the steps, then a cosine to zero, or constant."""

    steps: int = 400
    warmup: float = 0.1
    constant: bool = False

    def schedule(self, rate: Any) -> optax.Schedule:
        """The learning rate by step."""
        warm = int(self.warmup * self.steps)

        def at(count: Any) -> jax.Array:
            rising = jnp.minimum(1.0, (count + 1) / max(1, warm))
            along = jnp.clip((count - warm) / max(1, self.steps - warm), 0.0, 1.0)
            return rate * rising * (1.0 if self.constant else 0.5 * (1.0 + jnp.cos(jnp.pi * along)))

        return at


@dataclass(frozen=True)
class Task(Warmed):
    """With `label_noise` that share of labels is drawn anew at every step: gradients stay noise after all is learnt."""

    net: digits.DigitsConfig = digits.NET
    steps: int = 800
    batch: int = 64
    label_noise: float = 0.0


def observed(
    tx: optax.GradientTransformation, loss: Callable[..., jax.Array], observe: Callable[..., Any] | None
) -> Callable[[tuple[Any, Any], Any], tuple[tuple[Any, Any], Any]]:
    """A step to be scanned, which keeps what `observe` gives of (params, gradient, state, updates, state after)."""

    def step(carry: tuple[Any, Any], batch: Any) -> tuple[tuple[Any, Any], Any]:
        params, state = carry
        grads = jax.grad(loss)(params, batch)
        updates, after = tx.update(grads, state, params)
        kept = None if observe is None else observe(params, grads, state, updates, after)
        return (optax.apply_updates(params, updates), after), kept

    return step


class Trained(NamedTuple):
    """Of every pair of rate and decay, from every seed: arrays (pairs, seeds, …).

    Attributes:
      loss: on the test images.
      accuracy: there.
      observed: what `observe` gave, (pairs, seeds, steps, …); None without it.
    """

    loss: np.ndarray
    accuracy: np.ndarray
    observed: Any


def train(
    task: Task, make: Make, pairs: Sequence[tuple[float, float]], seeds: Sequence[int],
    observe: Callable[..., Any] | None = None,
) -> Trained:
    """Trains all.

    Args:
      task: net, steps, schedule.
      make: the optimizer.
      pairs: learning rates and decays.
      seeds: of parameters and batches.
      observe: (params, gradient, state, updates, state after) → arrays to keep of each step.
    """
    init, logits = digits.make(task.net)
    (images, labels), (test_images, test_labels) = digits.data()
    held_out = jnp.asarray(test_images), jnp.asarray(test_labels)
    order = np.stack([np.random.default_rng(s).integers(0, len(labels), (task.steps, task.batch)) for s in seeds])
    targets = np.stack([_targets(labels[rows], task.label_noise, s) for rows, s in zip(order, seeds, strict=True)])
    params = jax.vmap(init)(jnp.stack([jax.random.key(s) for s in seeds]))

    def loss(params: Params, batch: tuple[jax.Array, jax.Array]) -> jax.Array:
        return digits.cross_entropy(logits(params, jnp.asarray(images)[batch[0]]), batch[1])

    def one(params: Params, data: tuple[jax.Array, jax.Array], rate: Any, decay: Any) -> tuple[Any, Any, Any]:
        tx = make(task.schedule(rate), decay)
        (params, _), kept = jax.lax.scan(observed(tx, loss, observe), (params, tx.init(params)), data)
        outputs = logits(params, held_out[0])
        right = jnp.mean(jnp.argmax(outputs, -1) == held_out[1])
        return digits.cross_entropy(outputs, held_out[1]), right, kept

    seeded = jax.vmap(one, (0, 0, None, None))
    rates, decays = (jnp.asarray(x) for x in zip(*pairs, strict=True))
    trained = jax.jit(jax.vmap(seeded, (None, None, 0, 0)))(params, (order, targets), rates, decays)
    return Trained(*jax.device_get(trained))


def best(losses: np.ndarray) -> int:
    """The number of the pair with the least mean over seeds, of those whose runs are all finite."""
    return int(np.argmin(np.where(np.isfinite(losses), losses, np.inf).mean(1)))


def _targets(labels: np.ndarray, noise: float, seed: int) -> np.ndarray:
    draw = np.random.default_rng([seed, 1])
    other = draw.integers(0, digits.CLASSES, labels.shape)
    return np.where(draw.random(labels.shape) < noise, other, labels)


def layers(tree: Any, net: digits.DigitsConfig) -> list[Any]:
    """The hidden layers' kernels."""
    return [x["layer"]["kernel"] if net.standardized else x["kernel"] for _, x in sorted(tree["layers"].items())]


def rotations(net: digits.DigitsConfig) -> Callable[..., Any]:
    """For `observe`: mean and deviation over neurons of the angle turned, and the mean norm: (layers, 3)."""

    def of(params: Params, grads: Any, state: Any, updates: Any, after: Any) -> jax.Array:
        del grads, state, after
        kept = []
        for weights, move in zip(layers(params, net), layers(updates, net), strict=True):
            angle, norm = turned(weights, move)
            kept.append(jnp.stack([angle.mean(), angle.std(), norm.mean()]))
        return jnp.stack(kept)

    return of


def turned(weights: jax.Array, move: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Angles between columns before and after, and norms before."""
    square = jnp.sum(jnp.square(weights), 0)
    along = jnp.sum(weights * move, 0) / square
    across = jnp.linalg.norm(move - along * weights, axis=0)
    return jnp.arctan2(across, (1.0 + along) * jnp.sqrt(square)), jnp.sqrt(square)


