"""The update rules of LoRA-RITE and LoRA-Muon, to which this library's optimizers are compared.

Both take trees of pairs {"lora_a": (in, rank), "lora_b": (rank, out)}. The product of the two factors is trained in the
same way if A·S and S⁻¹·B take the place of A and B.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax


class RiteState(NamedTuple):
    """State of `lora_rite`: one entry per factor, in the shape of the parameters' tree.

    Attributes:
      taken: the number of steps taken.
      mean: first moments, in the other factor's orthonormal basis.
      second: second moments in that basis, (rank, rank).
      escaped: how much of the second moments was lost when they were projected from one basis to the next.
      basis: the factors' orthonormal bases at the last step.
    """

    taken: jax.Array
    mean: Any
    second: Any
    escaped: Any
    basis: Any


def lora_rite(
    learning_rate: optax.ScalarOrSchedule, b1: float = 0.9, b2: float = 0.999, eps: float = 1e-12
) -> optax.GradientTransformation:
    """LoRA-RITE's rule on pairs {"lora_a": (in, rank), "lora_b": (rank, out)}: Adam with a matrix second moment.

    Let the other factor have the polar decomposition (orthonormal basis) · (stretch). A factor's gradient is divided by
    that stretch. Moments are kept in that basis; when the basis changes, they are projected onto the new one. Steps are
    divided by the stretch again.

    Reference: Yen et al. 2025, "LoRA Done RITE", Algorithm 1. Deviation: the basis is from a polar decomposition, and
      not from QR; directions in which a factor is zero do not move the other factor.
    """

    def init(params: optax.Params) -> RiteState:
        square = jax.tree.map(lambda x: jnp.zeros((min(x.shape),) * 2, x.dtype), params)
        return RiteState(
            jnp.zeros((), jnp.int32),
            _by_pair(lambda p: p | {"lora_b": p["lora_b"].T}, jax.tree.map(jnp.zeros_like, params)), square,
            jax.tree.map(lambda x: jnp.zeros((), x.dtype), params),
            _by_pair(lambda p: {"lora_a": _polar(p["lora_a"])[0], "lora_b": _polar(p["lora_b"].T)[0]}, params)
        )

    def one(kept: Any, before: Any, after: Any, divide: Any, grad: Any, n: Any) -> Any:
        mean, second, escaped = kept
        turn = after.T @ before
        plain, moved = grad @ divide, turn @ second @ turn.T
        gone = jnp.max(jnp.linalg.eigvalsh(second) - jnp.linalg.eigvalsh(moved))
        escaped = b2 * (escaped + jnp.maximum(gone, 0.0))
        second = b2 * moved + (1 - b2) * plain.T @ plain
        size = (second + escaped * jnp.eye(len(second), dtype=second.dtype)) / (1 - b2**n)
        mean = b1 * mean @ turn.T + (1 - b1) * plain @ _inverse_sqrt(size, eps)
        return mean, second, escaped, -mean / (1 - b1**n) @ divide

    def update(updates: Any, state: RiteState, params: Any = None) -> tuple[Any, RiteState]:
        taken = optax.safe_increment(state.taken)

        def pair(params: Any, grads: Any, *kept: Any) -> Any:
            a, b = params["lora_a"], params["lora_b"].T
            (basis_a, over_a), (basis_b, over_b) = _polar(a), _polar(b)
            rows, columns = (tuple(x["lora_a"] for x in kept), tuple(x["lora_b"] for x in kept))
            n = taken.astype(a.dtype)
            left = one(rows[:3], columns[3], basis_b, over_b, grads["lora_a"], n)
            right = one(columns[:3], rows[3], basis_a, over_a, grads["lora_b"].T, n)
            return left, right, (basis_a, basis_b)

        kept = (state.mean, state.second, state.escaped, state.basis)
        done = _by_pair(pair, params, updates, *kept)

        def part(get: Callable[[Any], tuple[Any, Any]]) -> Any:
            return _by_pair(lambda _, d: dict(zip(("lora_a", "lora_b"), get(d), strict=True)), params, done)

        mean, second, escaped = (part(lambda d, k=k: (d[0][k], d[1][k])) for k in range(3))  # type: ignore[misc]
        steps = part(lambda d: (d[0][3], d[1][3].T))
        return steps, RiteState(taken, mean, second, escaped, part(lambda d: d[2]))

    rate = optax.scale_by_learning_rate(learning_rate, flip_sign=False)
    return optax.chain(optax.GradientTransformation(init, update), rate)


def lora_muon(learning_rate: optax.ScalarOrSchedule, beta: float = 0.95) -> optax.GradientTransformation:
    """LoRA-Muon's rule on pairs {"lora_a", "lora_b"}: ΔA·B and A·ΔB are each half of a Muon step of the product A·B.

    With H_B = B·Bᵀ and M the momentum of A's gradient: ΔA = −η/2·polar(M·H_B^{−1/2})·H_B^{−1/2}. The rule for B is the
    same with A and B exchanged.

    Reference: Cesista et al. 2026 (arXiv 2606.12921). Deviation: polar factors are exact, directions in which a factor
      is zero do not move the other factor, and weight decay is added separately.
    """

    def pair(params: Any, mean: Any) -> Any:
        over_a, over_b = _polar(params["lora_a"])[1], _polar(params["lora_b"].T)[1]
        left, right = mean["lora_a"] @ over_b, mean["lora_b"].T @ over_a
        return {"lora_a": 0.5 * _polar(left)[0] @ over_b, "lora_b": (0.5 * _polar(right)[0] @ over_a).T}

    def divided(updates: Any, params: Any) -> Any:
        return _by_pair(pair, params, updates)

    return optax.chain(
        optax.trace(beta, nesterov=True), optax.stateless(divided), optax.scale_by_learning_rate(learning_rate)
    )


def _is_pair(node: Any) -> bool:
    return isinstance(node, dict) and "lora_a" in node


def _by_pair(make: Callable[..., Any], *trees: Any) -> Any:
    return jax.tree.map(make, *trees, is_leaf=_is_pair)


def _polar(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The polar factor Q of x = Q·P, (n, rank), and the pseudo-inverse of the stretch P."""
    inverse = _inverse_sqrt(x.T @ x, float(jnp.finfo(x.dtype).eps))
    return x @ inverse, inverse


def _inverse_sqrt(m: jax.Array, least: float) -> jax.Array:
    """M^{−1/2}, but zero for eigenvalues below the share `least` of the largest one."""
    values, vectors = jnp.linalg.eigh(m)
    live = values > least * jnp.max(values)
    return (vectors * jnp.where(live, 1 / jnp.sqrt(jnp.where(live, values, 1.0)), 0.0)) @ vectors.T
