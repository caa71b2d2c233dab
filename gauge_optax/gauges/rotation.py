"""Head rotation: O(d_h) acting on the basis of an attention head.

Scores q·kᵀ depend on W_Q·W_Kᵀ alone and outputs on W_V·W_O alone, so one orthogonal R that rotates the basis of both
factors does not change the function. Stack the rows of all blocks to W (rows × d_h): a bias is one more row, W_O enters
as its transpose. The vertical tangents are W·A for antisymmetric A: d_h(d_h−1)/2 dimensions per head.

* Reading: let C be a fixed random matrix (rows × d_h). The polar factor Q of CᵀW obeys Q(W·R) = Q(W)·R. No reading is
  continuous everywhere (CᵀW may lose rank), so it is taken once, at `init`. In float32, CᵀW nearly loses a direction
  of W in 0.3 % of heads of 32 dimensions and in 6 % of those of 128 (normal weights, 300 heads). Those take another C.
* Hold: the vertical part of a step U is W·A, where A solves M·A + A·M = WᵀU − UᵀW with M = WᵀW.

A closed path of horizontal steps can return with a rotated head (holonomy), so no function of the weights measures
rotation: the turning of a head is the accumulated vertical part of its steps. Not a symmetry under rotary embeddings or
QK-norm. Reference: the paper DDC (docs/design.md §4), §3.2 and B.8; Lemma 25 for grouped queries.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from gauge_optax.binding import Axes, Block
from gauge_optax.errors import binding_error
from gauge_optax.gauges.gauge import BlockGauge, block_gauge
from gauge_optax.gauges.hadamard import randomized_hadamard
from gauge_optax.gauges.heads import BASIS, Heads, by_size, stack_heads, unstack_heads
from gauge_optax.gauges.instance import Arrays, Effect, Instance, apart_from
from gauge_optax.gauges.matrices import Matrices, head_matrices
from gauge_optax.linalg import (
    HIGHEST,
    eigenbasis,
    haar,
    matmul,
    nearly_orthogonal,
    noise,
    orthogonal_factor,
    real_dtype,
    safe_divide,
    skew,
    skew_exponential,
    svd,
    transpose,
)


def head_rotation(blocks: Mapping[str, Axes], *, sizes: Mapping[str, int] | None = None) -> BlockGauge:
    """O(d_h) acting on every head: the `basis` axis of each block turns by that head's rotation.

    Args:
      blocks: path → axes of all leaves sharing the basis (queries with keys, or values with outputs, and biases). One
        `basis` axis of length d_h; `head` indexes the group; `_` is summed.
      sizes: lengths of axes inside `(a b)` that no other block fixes.

    Returns:
      A frozen, hashable gauge; it holds no array. Elements are R, `(*named, d_h, d_h)`, W ↦ W·R.

    Raises:
      ValueError: malformed axes, at once; any mismatch with the tree, when it is first seen.

    >>> params = {"q": jnp.ones((6, 2, 3)), "k": jnp.ones((6, 2, 3))}
    >>> # 2 heads × 3 planes.
    >>> go.head_rotation({"q": "_ head basis", "k": "_ head basis"}).dim(params)
    6

    Reference: DDC §3.2. Not a symmetry under RoPE (`rope_torus`) or QK-norm (`scale_invariant`).
    """
    return block_gauge("head_rotation", Rotation, {"blocks": blocks}, sizes)


@dataclasses.dataclass(frozen=True)
class Rotation(Heads):
    """One instance: an orthogonal matrix per head, (*shape, d_h, d_h)."""

    effect: ClassVar[Effect] = "orthogonal"
    rigid: ClassVar[str | None] = BASIS
    breaks: ClassVar[str] = (
        "rotary embeddings (rope_torus) or QK-norm (scale_invariant), a bias that is not listed, or the index or order "
        "of a fused kernel, qkv=1 for qkv=0, (basis head) for (head basis)"
    )

    @classmethod
    def of(cls, gauge: str, key: str, named: tuple[str, ...], sizes: Mapping[str, int], blocks: Any) -> "Rotation":
        """The instance of a binding's blocks."""
        return cls(gauge, key, named, tuple(sizes[name] for name in named), tuple(blocks), sizes[BASIS])

    @staticmethod
    def axis_sizes(named: tuple[str, ...], element: jax.Array) -> dict[str, int]:
        """Lengths of axes, read off an element."""
        return dict(zip((*named, BASIS), element.shape, strict=False))

    @property
    def dim(self) -> int:
        return self.heads * self.size * (self.size - 1) // 2

    def identity(self) -> jax.Array:
        return jnp.broadcast_to(jnp.eye(self.size, dtype=real_dtype()), (*self.shape, self.size, self.size))

    @staticmethod
    def inverse(e: jax.Array) -> jax.Array:
        return transpose(e)

    @staticmethod
    def compose(a: jax.Array, b: jax.Array) -> jax.Array:
        return matmul(b, a)  # W ↦ (W·b)·a

    def sample(self, key: jax.Array, scale: float, leaves: Mapping[str, Any]) -> jax.Array:
        shape = (*self.shape, self.size, self.size)
        if scale >= 1:
            return haar(key, shape)
        normal = jax.random.normal(key, shape, real_dtype())
        return skew_exponential(scale * (normal - transpose(normal)) / math.sqrt(2 * self.size))

    def rotation(self, key: jax.Array, by: str) -> jax.Array:
        if by == "hadamard":
            require_even(self.gauge, self.blocks, self.size)
            return randomized_hadamard(key, self.shape, self.size)
        return haar(key, (*self.shape, self.size, self.size))

    def algebra(self) -> jax.Array:
        return jnp.zeros((*self.shape, self.size, self.size), real_dtype())

    def exponential(self, coordinates: jax.Array, near: bool = False) -> jax.Array:
        generator = skew(coordinates)
        return self.identity() + generator if near else skew_exponential(generator)

    def misfit(self, element: jax.Array) -> jax.Array:
        return jnp.max(jnp.abs(matmul(element, transpose(element)) - self.identity()))

    def normalized(self, element: jax.Array) -> jax.Array:
        return nearly_orthogonal(element)

    def act(self, e: jax.Array, point: Arrays) -> Arrays:
        return point | self.turned(point, e)

    def pull(self, e: jax.Array, cotangent: Arrays) -> Arrays:
        # The adjoint is the transpose, also where W has less than full rank: there `e` is a partial isometry, without
        # an inverse.
        return cotangent | self.turned(cotangent, transpose(e))

    @property
    def turn(self) -> "Rotation":
        return self

    @staticmethod
    def matrix(e: jax.Array) -> jax.Array:
        return e

    def matrices(self, block: Block) -> tuple[int, Matrices | None]:
        return 0, head_matrices(block)

    def nearest(self, target: Arrays, point: Arrays, others: Sequence[Instance] = ()) -> jax.Array:
        """See `Instance`: the polar factor of the cross-moment WᵀT (orthogonal Procrustes)."""
        seen = dataclasses.replace(self, blocks=apart_from(self.blocks, others))
        return orthogonal_factor(seen.gram(point, target))

    # Reading and holding: heads of one size are one batch, in all layers --------------------------

    @classmethod
    def read_all(cls, turns: Sequence["Rotation"], point: Arrays) -> list[jax.Array]:
        factors: dict[Rotation, jax.Array] = {}
        for same in by_size(turns):
            paths = sorted({path for turn in same for path in turn.paths})
            polar = _polar_factors(tuple(same), {path: point[path] for path in paths})
            factors |= zip(same, unstack_heads(polar, same), strict=True)
        return [factors[turn] for turn in turns]

    @classmethod
    def eigenbases(cls, turns: Sequence["Rotation"], point: Arrays) -> list[jax.Array]:
        read: dict[Rotation, jax.Array] = {}
        for same in by_size(turns):
            grams = stack_heads([turn.gram(point, point) for turn in same])
            mixed = stack_heads([turn.mixed_rows(point) for turn in same])
            for turn, basis in zip(same, unstack_heads(eigenbasis(grams, mixed), same), strict=True):
                largest = turn.largest_entries(turn.turned(point, basis))
                read[turn] = transpose(basis * jnp.where(largest < 0, -1.0, 1.0)[..., None, :])
        return [read[turn] for turn in turns]

    @classmethod
    def project(
        cls, turns: Sequence["Rotation"], point: Arrays, vector: Arrays, into: Mapping[Any, jax.Array] | None = None
    ) -> Arrays:
        out = dict(vector)
        for same in by_size(turns):
            gram = stack_heads([turn.gram(point, point) for turn in same])
            moment = stack_heads([turn.gram(point, vector) for turn in same])
            basis = None if into is None else stack_heads([into[turn] for turn in same])
            if basis is not None:
                # The equation is solved on the slice, because the residual error of the iteration depends on the basis.
                gram, moment = (matmul(matmul(transpose(basis), x), basis) for x in (gram, moment))
            # Per rotation, only products read the solution: XLA then compiles one program for all layers.
            for turn, generator in zip(same, unstack_heads(lyapunov(gram, -moment), same), strict=True):
                if into is not None:
                    generator = matmul(matmul(into[turn], generator), transpose(into[turn]))
                out |= turn.added(out, point, generator)
        return out


def require_even(gauge: str, blocks: Sequence[Block], size: int, multiple: int = 2) -> None:
    """Raises ValueError for a size without a Hadamard factor."""
    if size % multiple:
        raise binding_error(
            gauge, f"no Hadamard rotation at '{blocks[0].path}'", f"{size} dimensions", f"a multiple of {multiple}",
            "write by='random'",
        )  # fmt: skip


_Readings = tuple[jax.Array, jax.Array, jax.Array]
_MOST_READINGS = 4  # a head of less than full rank uses all of them, because every C loses a direction


@functools.partial(jax.jit, static_argnums=0)  # outside jit, a loop would be compiled anew at every call
def _polar_factors(turns: tuple[Rotation, ...], point: Arrays) -> jax.Array:
    """The polar factors of CᵀW for heads of one size, (heads, d_h, d_h), each with the first C that loses no direction.

    Where W itself has less than full rank, the first C that keeps the most directions is used. The factor is then a
    partial isometry, because directions that are roundoff have no polar factor.
    """

    def with_noise(number: jax.Array) -> tuple[jax.Array, jax.Array]:
        u, sizes, vt = svd(stack_heads([turn.mixed_rows(point, number) for turn in turns]))
        live = sizes > noise(sizes.dtype) * sizes[..., :1]
        return matmul(u * live[..., None, :].astype(u.dtype), vt), jnp.sum(live, -1)

    def again(carry: _Readings) -> _Readings:
        number, factors, ranks = carry
        others, their_ranks = with_noise(number)
        better = their_ranks > ranks
        return number + 1, jnp.where(better[:, None, None], others, factors), jnp.maximum(ranks, their_ranks)

    def unfinished(carry: _Readings) -> jax.Array:
        number, _, ranks = carry
        return (number < _MOST_READINGS) & jnp.any(ranks < turns[0].size)

    first = (jnp.uint32(1), *with_noise(jnp.uint32(0)))
    return jax.lax.while_loop(unfinished, again, first)[1]


_Solving = tuple[jax.Array, jax.Array, jax.Array, jax.Array]


def lyapunov(m: jax.Array, k: jax.Array, steps: int = 24) -> jax.Array:
    """The antisymmetric solution A of M·A + A·M = K − Kᵀ, by conjugate gradients preconditioned by the diagonal.

    It uses matrix products alone, because an eigendecomposition of M, as in `linalg.lyapunov`, would take most of the
    time of a step.

    Args:
      m: (…, d, d), symmetric positive semi-definite.
      k: (…, d, d), any.
      steps: the largest number of iterations. In exact arithmetic d(d − 1)/2 are enough for every M.

    Returns:
      A (…, d, d), antisymmetric. The solution of a head that has converged does not change any more.
    """
    size = m.shape[-1]
    diagonal = jnp.diagonal(m, axis1=-2, axis2=-1)
    weight = safe_divide(jnp.ones(()), diagonal[..., :, None] + diagonal[..., None, :])

    def inner(a: jax.Array, b: jax.Array) -> jax.Array:
        # This is an einsum, because on a CPU a sum over the last two axes takes longer than the products of a step.
        return jnp.einsum("...ij,...ij->...", a, b, precision=HIGHEST)[..., None, None]

    def step(carry: _Solving, _: None) -> tuple[_Solving, None]:
        solution, residual, direction, energy = carry
        product = matmul(m, direction)  # direction D is antisymmetric: D·M = −(M·D)ᵀ, ⟨D, M·D + D·M⟩ = 2⟨D, M·D⟩
        rate = jnp.where(energy > done, safe_divide(energy, 2.0 * inner(direction, product)), 0.0)
        residual = residual - rate * (product - transpose(product))
        scaled = weight * residual
        fresh = inner(residual, scaled)
        return (solution + rate * direction, residual, scaled + safe_divide(fresh, energy) * direction, fresh), None

    # The upper triangle is mirrored, because the arrays that XLA computes, above all on a mesh, can have a symmetric
    # part of roundoff. The iteration cannot reduce such a part, and would amplify it.
    above = jnp.triu(k - transpose(k), 1)
    residual = above - transpose(above)
    scaled = weight * residual
    energy = inner(residual, scaled)
    done = energy * jnp.square(0.1 * jnp.finfo(m.dtype).eps)
    start = (jnp.zeros_like(k), residual, scaled, energy)
    (solution, *_), _ = jax.lax.scan(step, start, length=min(steps, 2 + size * (size - 1) // 2))
    return solution
