"""The dense float64 oracle: explicit orbit tangents, an explicit frame, an explicit projector.

It knows a gauge by `act` and the structure of its elements alone: nothing here reads a binding, a block or a frame of
the library. Tangents come from differentiating `act` along every coordinate of an element; exponents from the same
derivative at parameters 1 and 0, since `act` is affine; the frame from Newton's method on the log-scales; the projector
from an SVD. Meant for at most a few hundred parameters.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from gauge_optax.gauges.gauge import Gauge
from tests.quick import jit

_SKEW, _CENTRED, _SHIFT, _SCALE, _ANGLE, _FULL = "skew", "centred", "shift", "scale", "angle", "full"
_MODULUS = "modulus and angle"  # in turns
_KINDS = {"head_rotation": _SKEW, "rope_torus": _ANGLE, "head_linear": _FULL, "rope_linear": _MODULUS}
_KINDS |= dict.fromkeys(("logit_shift", "translation"), _SHIFT)
_MOST_STEPS = 200


@dataclass(frozen=True)
class Dense:
    """A point's orbit, written out. Entries are the parameters in the order of `ravel_pytree`.

    Attributes:
      tangents: (entries, coordinates), the derivative of `act` at the identity.
      offset: (entries,), what the value exceeds the stored number by.
      frame: (scale coordinates,), f of the balanced frame.
      basis: (entries, rank), an orthonormal basis of the tangents in the frame.
    """

    tangents: np.ndarray
    offset: np.ndarray
    frame: np.ndarray
    basis: np.ndarray

    @property
    def rank(self) -> int:
        """Vertical dimensions."""
        return self.basis.shape[1]

    def vertical(self, tangent: np.ndarray) -> np.ndarray:
        """The part of a tangent (entries,) along an orbit without sizes, whose frame changes no length."""
        assert self.frame.size == 0
        return self.basis @ (self.basis.T @ tangent)


def dense(gauge: Gauge, params: Any) -> Dense:
    """The oracle of a gauge, or of a product, at a point in float64."""
    if any(part.name == "head_linear" for part in getattr(gauge, "gauges", (gauge,))):
        return _dense_linear(gauge, params)
    flat, unravel = ravel_pytree(params)
    kinds, element = _coordinates(gauge, params)
    probes = jnp.stack([flat, jnp.ones_like(flat), jnp.zeros_like(flat)])

    def moved(coordinates: jax.Array) -> jax.Array:
        act = functools.partial(gauge.act, element(coordinates))
        return jax.vmap(lambda x: ravel_pytree(act(unravel(x)))[0])(probes)

    derivative = np.asarray(jit(jax.jacfwd(moved))(jnp.zeros(len(kinds))))
    tangents, scales = derivative[0], kinds == _SCALE
    exponents = (derivative[1] - derivative[2])[:, scales]
    offset = _offset(exponents, derivative[2][:, scales])
    values = np.asarray(flat) + offset
    constants = tangents[:, kinds == _SHIFT]  # orthogonal to what is centred
    values = values - constants @ np.linalg.lstsq(constants, values, rcond=None)[0]
    frame = balanced_frame(values, exponents)
    basis = _range(tangents * np.exp(-exponents @ frame)[:, None])
    return Dense(tangents, offset, frame, basis)


def orbit(gauges: Sequence[Gauge], params: Any) -> np.ndarray:
    """Orbit tangents of several gauges at a point, side by side: (entries, coordinates)."""

    def tangents(gauge: Gauge) -> np.ndarray:
        kinds, element = _coordinates(gauge, params)
        moved = jax.jacfwd(lambda c: ravel_pytree(gauge.act(element(c), params))[0])
        return np.asarray(jit(moved)(jnp.zeros(len(kinds))))

    empty = np.zeros((ravel_pytree(params)[0].size, 0))
    return np.concatenate([empty, *map(tangents, gauges)], axis=1)


def outside(tangents: np.ndarray, span: np.ndarray) -> float:
    """The part of some tangents that is not in the span of others, of their norm."""
    basis = _range(span)
    return float(np.linalg.norm(tangents - basis @ (basis.T @ tangents)) / np.linalg.norm(tangents))


def _dense_linear(gauge: Gauge, params: Any) -> Dense:
    """Newton's method on the norm over the orbit, through `act` alone: scales and linear gauges, no shifts, no `1+`."""
    flat, unravel = ravel_pytree(params)
    kinds, element = _coordinates(gauge, params)
    assert set(kinds) <= {_FULL, _SCALE}

    def moved(coordinates: jax.Array, x: jax.Array) -> jax.Array:
        return ravel_pytree(gauge.act(element(coordinates), unravel(x)))[0]

    def energy(coordinates: jax.Array, x: jax.Array) -> jax.Array:
        return 0.5 * jnp.sum(jnp.square(moved(coordinates, x)))

    slopes = jit(lambda x: (jax.grad(energy)(still, x), jax.hessian(energy)(still, x)))
    tangents, moves, value = jit(jax.jacfwd(moved)), jit(moved), jit(energy)
    still, x, frame = jnp.zeros(len(kinds)), flat, np.zeros(len(kinds))
    for _ in range(_MOST_STEPS):
        gradient, hessian = map(np.asarray, slopes(x))
        step = np.linalg.lstsq(hessian, -gradient, rcond=1e-12)[0]
        size = min(1.0, 0.3 / max(np.max(np.abs(step)), 1e-300))  # well inside where 1 + step is invertible
        while np.max(np.abs(size * step)) > 1e-3 and float(value(size * step, x)) > float(value(still, x)):
            size *= 0.5
        x, frame = moves(size * step, x), frame - size * step
        if np.max(np.abs(step)) < 1e-14:
            break
    at, offset = np.asarray(tangents(still, flat)), np.zeros(flat.size)
    return Dense(at, offset, frame[kinds == _SCALE], _range(tangents(still, x)))


def balanced_frame(values: np.ndarray, exponents: np.ndarray) -> np.ndarray:
    """f that minimises ½‖e^(−w·f)·θ‖² over the log-scales, by damped Newton steps.

    A scale without partner (no negative exponent) has no minimum; n·f for its n entries is added: RMS 1.
    """
    alone = (exponents >= 0).all(0)
    volume = np.where(alone, (exponents > 0).sum(0), 0.0)

    def energy(f: np.ndarray) -> float:
        return 0.5 * float(np.sum((values * np.exp(-exponents @ f)) ** 2)) + float(volume @ f)

    f = np.zeros(exponents.shape[1])
    for _ in range(_MOST_STEPS):
        squares = (values * np.exp(-exponents @ f)) ** 2
        gradient = volume - exponents.T @ squares
        hessian = 2.0 * exponents.T @ (squares[:, None] * exponents)
        step = np.linalg.lstsq(hessian, -gradient, rcond=None)[0]
        size = 1.0
        while np.max(np.abs(size * step), initial=0.0) > 1e-3 and energy(f + size * step) > energy(f):
            size *= 0.5  # never near the minimum, where the energy is all rounding
        f = f + size * step
        if np.max(np.abs(step), initial=0.0) < 1e-15:
            break
    return f


def _offset(exponents: np.ndarray, at_zero: np.ndarray) -> np.ndarray:
    """What an entry's value exceeds it by: an entry that stores 0 moves at rate w·offset."""
    rate = np.abs(exponents).sum(1)
    signed = (np.sign(exponents) * at_zero).sum(1)
    return np.where(rate > 0, signed / np.where(rate > 0, rate, 1.0), 0.0)


def _range(matrix: np.ndarray) -> np.ndarray:
    """Orthonormal basis of the column space."""
    u, s, _ = np.linalg.svd(matrix, full_matrices=False)
    return u[:, s > 1e-10 * np.max(s, initial=0.0)]


def _coordinates(gauge: Gauge, params: Any) -> tuple[np.ndarray, Callable[[jax.Array], Any]]:
    """The kind of every coordinate of an element, and coordinates ↦ element, to first order at the identity."""
    parts, identity = getattr(gauge, "gauges", (gauge,)), gauge.identity(params)
    whole = identity if isinstance(identity, tuple) else (identity,)
    arrays = [(_kind(part), x) for part, own in zip(parts, whole, strict=True) for x in jax.tree.leaves(own)]
    counts = [_count(kind, x.shape) for kind, x in arrays]

    def element(coordinates: jax.Array) -> Any:
        pieces = jnp.split(coordinates, np.cumsum(counts)[:-1])
        leaves = [_array(kind, x, c) for (kind, x), c in zip(arrays, pieces, strict=True)]
        return jax.tree.unflatten(jax.tree.structure(identity), leaves)

    kinds: list[str] = []
    for (kind, _), count in zip(arrays, counts, strict=True):
        kinds += [_SCALE, _ANGLE] * (count // 2) if kind == _MODULUS else [kind] * count
    return np.array(kinds), element


def _kind(gauge: Any) -> str:
    if gauge.name == "residual_rotation":
        return _CENTRED if dict(gauge.options)["centred"] else _SKEW
    return _KINDS.get(gauge.name, _SCALE)


def _count(kind: str, shape: tuple[int, ...]) -> int:
    if kind in (_SKEW, _CENTRED):
        return int(np.prod(shape[:-2])) * (shape[-1] * (shape[-1] - 1) // 2)
    return int(np.prod(shape))


def _array(kind: str, identity: jax.Array, coordinates: jax.Array) -> jax.Array:
    if kind not in (_SKEW, _CENTRED):
        return coordinates.reshape(identity.shape) + (identity if kind == _FULL else 0.0)
    size = identity.shape[-1]
    rows, columns = np.triu_indices(size, 1)
    values = coordinates.reshape((*identity.shape[:-2], len(rows)))
    upper = jnp.zeros(identity.shape).at[..., rows, columns].set(values)
    skew = upper - jnp.swapaxes(upper, -1, -2)
    if kind == _CENTRED:  # it keeps the vector of ones; the coordinates have more dimensions than the group
        skew = skew - skew.mean(-1, keepdims=True)
        skew = skew - skew.mean(-2, keepdims=True)
    return identity + skew


# Small matrices -----------------------------------------------------------------------------------


def lyapunov(m: np.ndarray, k: np.ndarray) -> np.ndarray:
    """The least-norm solution of M·A + A·M = 2K, as one linear system."""
    eye = np.eye(len(m))
    system = np.kron(m, eye) + np.kron(eye, m)
    return np.linalg.lstsq(system, 2.0 * k.reshape(-1), rcond=1e-13)[0].reshape(m.shape)


def exponential(a: np.ndarray) -> np.ndarray:
    """exp(A) of a skew matrix, from the eigenvectors of the Hermitian matrix i·A."""
    values, vectors = np.linalg.eigh(1j * a)
    return ((vectors * np.exp(-1j * values)) @ vectors.conj().T).real
