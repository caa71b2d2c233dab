"""`rotational` around Optax's AdamW, SGD and Lion, with the argument names and defaults of these optimizers."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from gauge_optax.binding import Axes, is_empty, leaves_by_path, with_leaves
from gauge_optax.norms import vectors
from gauge_optax.norms._rotational import named_rotational

Scalar = float | jax.Array


def rotational_adamw(
    learning_rate: optax.ScalarOrSchedule,
    blocks: Mapping[str, Axes],
    b1: Scalar = 0.9,
    b2: Scalar = 0.999,
    eps: Scalar = 1e-8,
    eps_root: Scalar = 0.0,
    mu_dtype: Any = None,
    weight_decay: optax.ScalarOrSchedule = 1e-4,
    mask: Any = None,
    *,
    nesterov: bool = False,
    eta_r: optax.ScalarOrSchedule | None = None,
    beta: Scalar = 0.9,
    center: bool = True,
    gain: optax.GradientTransformation | None = None,
    sizes: Mapping[str, int] | None = None,
) -> optax.GradientTransformationExtraArgs:
    """`rotational` around `optax.adamw`: by default every vector turns by √(2ηλ·(1 − β₁)/(1 + β₁)) radians a step.

    Args:
      learning_rate: η, a number or a schedule.
      blocks: path → axes of the vectors that turn, see `rotational`.
      b1: as in `optax.adamw`.
      b2: as in `optax.adamw`.
      eps: as in `optax.adamw`.
      eps_root: as in `optax.adamw`.
      mu_dtype: as in `optax.adamw`.
      weight_decay: λ, which decides the angle of `blocks` and decays every other leaf that `mask` names.
      mask: as in `optax.adamw`.
      nesterov: as in `optax.adamw`.
      eta_r: see `rotational`.
      beta: see `rotational`.
      center: see `rotational`.
      gain: see `rotational`.
      sizes: see `rotational`.

    Returns:
      The optimizer. Its `update` needs `params`.

    Raises:
      ValueError: as `rotational`.

    >>> params = {"kernel": jnp.array([[1.0, 0.0], [0.0, 2.0], [-1.0, -2.0]])}
    >>> blocks = {"kernel": "_ channel"}
    >>> tx = go.norms.rotational_adamw(0.01, blocks, weight_decay=0.5, beta=0.0)
    >>> step, _ = tx.update({"kernel": jnp.eye(3, 2)}, tx.init(params), params)
    >>> moved = optax.apply_updates(params, step)["kernel"]
    >>> inner = jnp.sum(moved * params["kernel"], axis=0)
    >>> cosine = inner / jnp.sum(jnp.square(moved), axis=0)
    >>> jnp.round(1e3 * jnp.arccos(cosine)).tolist()  # √(2 · 0.01 · 0.5 · 0.1/1.9)
    [23.0, 23.0]

    Reference: Kosson et al. 2024, Algorithm 1 and Table 1 (RV-AdamW).
    """
    inner = optax.adamw(learning_rate, b1, b2, eps, eps_root, mu_dtype, weight_decay, mask, nesterov=nesterov)
    return named_rotational(
        "rotational_adamw", inner, blocks, sizes, learning_rate, weight_decay, eta_r, beta, center, gain, 1e-8, b1
    )


def rotational_sgdm(
    learning_rate: optax.ScalarOrSchedule,
    blocks: Mapping[str, Axes],
    momentum: Scalar = 0.9,
    nesterov: bool = False,
    accumulator_dtype: Any = None,
    weight_decay: optax.ScalarOrSchedule = 1e-4,
    mask: Any = None,
    *,
    eta_r: optax.ScalarOrSchedule | None = None,
    beta: Scalar = 0.9,
    eps: Scalar = 0.0,
    center: bool = True,
    gain: optax.GradientTransformation | None = None,
    sizes: Mapping[str, int] | None = None,
) -> optax.GradientTransformationExtraArgs:
    """`rotational` around SGD with momentum: by default every vector turns by √(2ηλ/(1 + α)) radians a step.

    Args:
      learning_rate: η, a number or a schedule.
      blocks: path → axes of the vectors that turn, see `rotational`.
      momentum: α, as in `optax.sgd`.
      nesterov: as in `optax.sgd`; Table 1 has no separate angle for it.
      accumulator_dtype: as in `optax.sgd`.
      weight_decay: λ, which decides the angle of `blocks`. For all other entries of leaves that `mask` names, λ times
        the weights is added to the gradient.
      mask: which leaves decay, as in `optax.add_decayed_weights`.
      eta_r: see `rotational`.
      beta: see `rotational`.
      eps: see `rotational`. The default 0 makes steps independent of the scale of the loss; the paper has 1e-8.
      center: see `rotational`.
      gain: see `rotational`.
      sizes: see `rotational`.

    Returns:
      The optimizer. Its `update` needs `params`.

    Raises:
      ValueError: as `rotational`.

    >>> tx = go.norms.rotational_sgdm(0.1, {"**/kernel": "_ channel"}, weight_decay=5e-4)

    Reference: Kosson et al. 2024, Algorithm 1 and Table 1 (RV-SGDM). Deviation: `eps`.
    """
    specs = vectors.parse("rotational_sgdm", "blocks", blocks, sizes)
    decay = optax.add_decayed_weights(weight_decay, mask)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        if is_empty(params):
            return decay.update(updates, state, params)
        leaves, still = leaves_by_path(params), dict[str, Any]()
        for block in (x.block for x in vectors.resolve("rotational_sgdm", specs, params)):
            leaf = still.get(block.path, jnp.asarray(leaves[block.path]))  # vectors that turn do not decay
            still[block.path] = block.write(leaf, jnp.zeros(block.view_shape, leaf.dtype))
        return decay.update(updates, state, with_leaves(params, still))

    sgd = optax.sgd(learning_rate, momentum, nesterov, accumulator_dtype)
    inner = optax.chain(optax.GradientTransformation(decay.init, update), sgd)
    return named_rotational(
        "rotational_sgdm", inner, blocks, sizes, learning_rate, weight_decay, eta_r, beta, center, gain, eps, momentum
    )


def rotational_lion(
    learning_rate: optax.ScalarOrSchedule,
    blocks: Mapping[str, Axes],
    b1: Scalar = 0.9,
    b2: Scalar = 0.99,
    mu_dtype: Any = None,
    weight_decay: optax.ScalarOrSchedule = 1e-3,
    mask: Any = None,
    *,
    eta_r: optax.ScalarOrSchedule | None = None,
    beta: Scalar = 0.9,
    center: bool = True,
    gain: optax.GradientTransformation | None = None,
    sizes: Mapping[str, int] | None = None,
) -> optax.GradientTransformationExtraArgs:
    """`rotational` around `optax.lion`: by default every vector turns by √(πηλγ) radians a step.

    Args:
      learning_rate: η, a number or a schedule.
      blocks: path → axes of the vectors that turn, see `rotational`.
      b1: as in `optax.lion`.
      b2: as in `optax.lion`.
      mu_dtype: as in `optax.lion`.
      weight_decay: λ, which decides the angle of `blocks` and decays every other leaf that `mask` names.
      mask: as in `optax.lion`.
      eta_r: see `rotational`.
      beta: see `rotational`.
      center: see `rotational`.
      gain: see `rotational`.
      sizes: see `rotational`.

    Returns:
      The optimizer. Its `update` needs `params`.

    Raises:
      ValueError: as `rotational`.

    >>> tx = go.norms.rotational_lion(5e-4, {"**/kernel": "_ channel"}, weight_decay=1.0)

    Reference: Kosson et al. 2024, Algorithm 1 and Table 1 (RV-Lion); `measure.predict_equilibrium` defines γ.
    """
    inner = optax.lion(learning_rate, b1, b2, mu_dtype, weight_decay, mask)
    return named_rotational(
        "rotational_lion", inner, blocks, sizes, learning_rate, weight_decay, eta_r, beta, center, gain, 1e-8, b1, b2
    )
