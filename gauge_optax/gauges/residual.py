"""Residual rotation: O(d) acting on the residual stream, on everything that writes to it and reads from it.

Every layer adds to one stream x of d channels. For an orthogonal R let all writers (embeddings, output kernels,
biases) compute x·R, and let all readers undo it: W_write ↦ W·R, W_read ↦ Rᵀ·W. An RMSNorm without a scale commutes with
every R; a LayerNorm commutes with those that keep the vector of ones, which make O(d−1). One R serves all layers: the
skip connections tie them together (van Nierop, §4.4).

A norm's scale γ does not commute with R. It can be moved into the readers first: with γ = 1 the rotation is plain. As a
move of stored leaves it is W_read ↦ γ⁻¹·Rᵀ·γ·W, and for the norm's bias β ↦ γ·((β/γ)·R). Both orders of it and
`norm_scale` give the same weights. Slice coordinates have γ = 1; so that the rotation acts there, it must stand before
`norm_scale` in a list of gauges whose shifts do not commute with it.

* Reading: the polar factor of CᵀE, with C fixed noise. E are the leaves that no other gauge rotates, above all the
  embedding; under LayerNorm E is first projected off the ones vector.
* The vertical part of a tangent U is W·A on every writer and Aᵀ·W on every reader, with the antisymmetric A that solves
  M·A + A·M = EᵀU − UᵀE, M = EᵀE: the rotation that E shows, so that rotations of heads can be removed afterwards.

Cost of a step under `quotient`: three products of a kernel with a d × d matrix for every kernel. With `hold=True` there
is one more, and the solution of the equation above.
Reference: van Nierop, Eq. (6)-(16), (17); docs/design.md §10. Deviation: O(d) in place of SO(d), which adds no
dimension; norm scales are part of the action, where the paper has none.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from gauge_optax.binding import Axes, Block, overlap
from gauge_optax.errors import binding_error
from gauge_optax.gauges.gauge import BlockGauge, Gauges, block_gauge, product
from gauge_optax.gauges.heads import BASIS, Heads
from gauge_optax.gauges.instance import Arrays, Effect, Instance
from gauge_optax.gauges.rotation import lyapunov
from gauge_optax.gauges.scale import Scale
from gauge_optax.linalg import (
    haar,
    matmul,
    nearly_orthogonal,
    real_dtype,
    skew,
    skew_exponential,
    svd,
    transpose,
)

READ, WRITE = "read", "write"


def residual_rotation(
    read: Mapping[str, Axes],
    write: Mapping[str, Axes],
    norms: Gauges = (),
    *,
    centred: bool = False,
    hold: bool = False,
    sizes: Mapping[str, int] | None = None,
) -> BlockGauge:
    """O(d) acting on the residual stream; O(d−1), which keeps the vector of ones, where LayerNorms read it.

    Args:
      read: path → axes of every kernel that reads the stream; `basis` is the stream's axis, `_` the others:
        `{"blocks/{i}/attn/query/kernel": "basis _ _", "lm_head/kernel": "basis _"}`. All layers share one rotation,
        whatever the captures are.
      write: path → axes of every leaf that writes to it: embeddings, output kernels, their biases. Norms' biases are
        not listed.
      norms: the `norm_scale` gauges of the norms between the stream and its readers, as far as the norms have scales.
        Their biases move with the rotation.
      centred: whether the norms subtract the mean, as LayerNorm does.
      hold: whether optimizers keep the rotation from drifting. It costs a d × d equation per step; without it the
        drift is that of the wrapped optimizer.
      sizes: lengths of axes inside `(a b)` that no other block fixes.

    Returns:
      A frozen, hashable gauge; it holds no array. Elements are {"": R}, (d, d), W ↦ W·R.

    Raises:
      ValueError: malformed axes, norms that are no `norm_scale`, at once; any mismatch with the tree, when first seen.

    >>> gauge = go.residual_rotation({"head": "basis _"}, {"embedding": "_ basis"})
    >>> params = {"embedding": jnp.ones((7, 4)), "head": jnp.ones((4, 7))}
    >>> gauge.dim(params)  # 4·3/2
    6

    Reference: van Nierop, Eq. (6)-(17). Not a symmetry of a tied embedding behind a norm with a scale, of norms after a
    layer (unless every one of them is a reader's), or of anything that reads single channels.
    """
    norms = product(norms).parts if norms else ()
    for norm in norms:
        if not isinstance(norm, BlockGauge) or norm.kind is not Scale or norm.name != "norm_scale":
            raise binding_error(
                "residual_rotation", "norms that are no norm_scale", repr(norm).splitlines()[0],
                "the go.norm_scale gauges of the norms that the rotation passes",
                "pass norms=[go.norm_scale(...), ...]",
            )  # fmt: skip
    roles, options = {READ: read, WRITE: write}, {"norms": norms, "centred": centred, "hold": hold}
    return block_gauge("residual_rotation", ResidualRotation, roles, sizes, **options)


class SignedRotation(NamedTuple):
    """An element inside the library.

    Attributes:
      matrix: R, (d, d).
      signs: ±1, shaped like the scale, for every norm with a scale: the scale itself in slice coordinates.
    """

    matrix: jax.Array
    signs: tuple[jax.Array, ...]


@dataclasses.dataclass(frozen=True)
class ResidualRotation(Heads):
    """The one instance: an orthogonal matrix, (d, d).

    Attributes:
      scales: pairs of a norm's scale and the blocks behind it: its readers, which γ multiplies, and its bias, which γ
        divides.
      keeps_ones: whether the rotation keeps the vector of ones.
      held: whether optimizers hold it.
      seen: the blocks that it is read from, because no other gauge rotates them.
    """

    scales: tuple[tuple[Block, tuple[Block, ...]], ...] = ()
    keeps_ones: bool = False
    held: bool = False
    seen: tuple[Block, ...] = ()

    effect: ClassVar[Effect] = "orthogonal"
    rigid: ClassVar[str | None] = BASIS
    joined: ClassVar[bool] = True
    composes: ClassVar[bool] = False
    of_heads: ClassVar[bool] = False
    breaks: ClassVar[str] = (
        "a reader or a writer that is not listed, a norm with a scale that is not in `norms`, a tied embedding behind "
        "such a norm, a LayerNorm without `centred=True`, or a norm behind a layer"
    )

    @classmethod
    def of(
        cls,
        gauge: str,
        key: str,
        named: tuple[str, ...],
        sizes: Mapping[str, int],
        blocks: Any,
        norms: Sequence[Scale] = (),
        centred: bool = False,
        hold: bool = False,
    ) -> "ResidualRotation":
        """The instance of a binding's blocks, with the instances of its norms."""
        if named:
            raise binding_error(
                gauge, f"a named axis '{named[0]}'", f"axes {', '.join(named)}", "one rotation for the whole stream",
                "write '_' for every axis but basis; one rotation serves all layers and heads",
            )  # fmt: skip
        moved, scales = list(blocks), []
        for norm in norms:
            scale, *biases = norm.up
            behind = [dataclasses.replace(b, role=WRITE) for b in biases]
            for reader in norm.down:
                if any(b.role == READ and overlap(b, reader) for b in blocks):
                    behind.append(dataclasses.replace(reader, role=READ))
            stream = _stream_axis(norm, blocks)
            moved += [dataclasses.replace(b, role=WRITE, labels=_renamed(b.labels, stream)) for b in biases]
            scales.append((scale, tuple(behind)))
        return cls(gauge, "", (), (), tuple(moved), sizes[BASIS], tuple(scales), centred, hold, tuple(moved))

    def beside(self, others: Sequence[Instance]) -> "ResidualRotation":
        turned = [b for i in others if i.turn is not None and i is not self for b in i.blocks]
        free = tuple(b for b in self.blocks if not any(b.path == t.path and overlap(b, t) for t in turned))
        return dataclasses.replace(self, seen=free or self.blocks)

    @staticmethod
    def axis_sizes(named: tuple[str, ...], element: jax.Array) -> dict[str, int]:
        """Lengths of axes, read off an element."""
        return {BASIS: element.shape[-1]}

    @property
    def turn(self) -> "ResidualRotation":
        return self

    @property
    def context(self) -> tuple[Block, ...]:
        return tuple(scale for scale, _ in self.scales)

    @property
    def divided(self) -> tuple[Block, ...]:
        return self.context

    @property
    def dim(self) -> int:
        size = self.size - self.keeps_ones
        return size * (size - 1) // 2

    def sample(self, key: jax.Array, scale: float, leaves: Mapping[str, Any]) -> jax.Array:
        size = self.size - self.keeps_ones
        if scale >= 1:
            return self.whole(haar(key, (size, size)))
        normal = jax.random.normal(key, (size, size), real_dtype())
        return self.whole(skew_exponential(scale * (normal - transpose(normal)) / (2 * size) ** 0.5))

    def algebra(self) -> jax.Array:
        size = self.size - self.keeps_ones
        return jnp.zeros((size, size), real_dtype())

    def exponential(self, coordinates: jax.Array, near: bool = False) -> jax.Array:
        generator = skew(coordinates)
        eye = jnp.eye(len(generator), dtype=generator.dtype)
        return self.whole(eye + generator if near else skew_exponential(generator))

    def normalized(self, element: jax.Array) -> jax.Array:
        return self.whole(nearly_orthogonal(self.restricted(element)))

    # The group: rotations multiply, signs stay ----------------------------------------------------------

    def identity(self) -> SignedRotation:
        ones = tuple(jnp.ones(scale.view_shape, real_dtype()) for scale, _ in self.scales)
        return SignedRotation(jnp.eye(self.size, dtype=real_dtype()), ones)

    @staticmethod
    def inverse(e: SignedRotation) -> SignedRotation:
        return e._replace(matrix=transpose(e.matrix))

    @classmethod
    def inverse_element(cls, element: jax.Array) -> jax.Array:
        return transpose(element)

    @staticmethod
    def compose(a: SignedRotation, b: SignedRotation) -> SignedRotation:
        return SignedRotation(matmul(b.matrix, a.matrix), b.signs)

    @classmethod
    def compose_elements(cls, a: jax.Array, b: jax.Array) -> jax.Array:
        return matmul(b, a)

    def to_element(self, e: SignedRotation) -> jax.Array:
        return e.matrix

    def from_element(self, element: jax.Array) -> SignedRotation:
        return self.identity()._replace(matrix=element)

    @staticmethod
    def matrix(e: SignedRotation) -> jax.Array:
        return e.matrix

    # The action -----------------------------------------------------------------------------------------

    def act(self, e: SignedRotation, point: Arrays) -> Arrays:
        return point | self._conjugated(point, e.matrix, self.gammas(point))

    def enter(self, e: SignedRotation, point: Arrays) -> Arrays:
        return self.act(self.inverse(e), point)

    def push(self, e: SignedRotation, tangent: Arrays) -> Arrays:
        # Slice coordinates: the scales of norms are ±1, and no step changes them.
        return tangent | self._conjugated(tangent, e.matrix, e.signs)

    def pull(self, e: SignedRotation, cotangent: Arrays) -> Arrays:
        return cotangent | self._conjugated(cotangent, transpose(e.matrix), e.signs)

    def _conjugated(self, vector: Arrays, matrix: jax.Array, gammas: Sequence[jax.Array]) -> Arrays:
        """The leaves that the instance moves, rotated between the multiplication by norms' scales and its inverse."""
        inside = self.scaled(vector, gammas)
        return self.scaled(inside | self.turned(inside, matrix), gammas, back=True)

    def scaled(self, vector: Arrays, gammas: Sequence[jax.Array], back: bool = False) -> Arrays:
        """Readers multiplied, and norms' biases divided, by the scales of their norms; the inverse if `back`."""
        out = dict(vector)
        for gamma, (scale, behind) in zip(gammas, self.scales, strict=True):
            for block in behind:
                rows = block.view(out[block.path])
                shared = [label for label in block.labels if label in scale.labels]
                sizes = dict(zip(scale.labels, gamma.shape, strict=True))
                laid = jnp.transpose(gamma, [scale.labels.index(label) for label in shared])
                laid = laid.reshape([sizes.get(label, 1) for label in block.labels])
                times = (block.role == READ) != back
                out[block.path] = block.write(out[block.path], rows * laid if times else rows / laid)
        return {path: out[path] for path in self.paths}

    def gammas(self, point: Arrays) -> list[jax.Array]:
        """The scales of norms at a point, (d,) each, or (layers, d) where layers are stacked."""
        return [scale.view(point[scale.path]) for scale, _ in self.scales]

    # Reading and holding --------------------------------------------------------------------------------

    def restricted(self, matrix: jax.Array) -> jax.Array:
        """HᵀMH for a (d, d) matrix, H an orthonormal basis of what is orthogonal to the ones; M if not `keeps_ones`."""
        if not self.keeps_ones:
            return matrix
        return reflected(reflected(matrix, -1), -2)[1:, 1:]

    def whole(self, matrix: jax.Array) -> jax.Array:
        """H·M·Hᵀ + 1·1ᵀ/d for an orthogonal (d − 1, d − 1) matrix: the inverse of `restricted`."""
        if not self.keeps_ones:
            return matrix
        whole = jnp.zeros((self.size, self.size), matrix.dtype).at[1:, 1:].set(matrix).at[0, 0].set(1.0)
        return reflected(reflected(whole, -1), -2)

    @classmethod
    def read_all(cls, turns: Sequence[Any], point: Arrays) -> list[Any]:
        return [turn._read(point) for turn in turns]

    def _read(self, point: Arrays) -> SignedRotation:
        gammas = self.gammas(point)
        mixed = dataclasses.replace(self, blocks=self.seen).mixed_rows(self.scaled(point, gammas))
        u, _, vt = svd(self.restricted(mixed)[None])
        return self.with_signs(self.whole(matmul(u, vt)[0]), gammas)

    @staticmethod
    def with_signs(matrix: jax.Array, gammas: Sequence[jax.Array]) -> SignedRotation:
        signs = tuple(jnp.where(gamma < 0, -1.0, 1.0).astype(real_dtype()) for gamma in gammas)
        return SignedRotation(matrix, signs)

    @classmethod
    def project(
        cls, turns: Sequence[Any], point: Arrays, vector: Arrays, into: Mapping[Any, jax.Array] | None = None
    ) -> Arrays:
        return cls._without_rotation(turns, point, vector, dual=False)

    @classmethod
    def project_dual(cls, turns: Sequence[Any], point: Arrays, vector: Arrays) -> Arrays:
        return cls._without_rotation(turns, point, vector, dual=True)

    @classmethod
    def _without_rotation(cls, turns: Sequence[Any], point: Arrays, vector: Arrays, dual: bool) -> Arrays:
        """Removes the rotation that `seen` shows from all blocks of a tangent; the transpose of that if `dual`."""
        out = dict(vector)
        for turn in turns:
            seen = dataclasses.replace(turn, blocks=turn.seen)
            measured, moved = (turn, seen) if dual else (seen, turn)
            gammas = turn.gammas(point)
            # A cotangent is multiplied where a tangent is divided.
            inside, values = turn.scaled(out, gammas, back=dual), turn.scaled(point, gammas)
            gram, moment = turn.restricted(seen.gram(values, values)), turn.restricted(measured.gram(values, inside))
            generator = lyapunov(gram, -moment, steps=_STEPS)
            if turn.keeps_ones:
                generator = turn.whole(generator) - turn.whole(jnp.zeros_like(generator))
            out |= turn.scaled(inside | moved.added(inside, values, generator), gammas, back=not dual)
        return out

    @classmethod
    def hold(cls, turns: Sequence[Any], point: Arrays, step: Arrays) -> Arrays:
        return cls.project([turn for turn in turns if turn.held], point, step)

    @classmethod
    def without_roundoff(cls, turns: Sequence[Any], cotangent: Arrays) -> Arrays:
        return cotangent


_STEPS = 200


def _stream_axis(norm: Scale, blocks: Sequence[Block]) -> str:
    """The name that a norm's gauge gives to the stream's axis; of stacked layers the norm names their axis too."""
    for reader in norm.down:
        for block in blocks:
            if block.role == READ and overlap(block, reader) and block.split == reader.split:
                return reader.split_labels[block.split_labels.index(BASIS)]
    return norm.named[-1]


def _renamed(labels: Sequence[str], stream: str) -> tuple[str, ...]:
    """The labels of a norm's bias, with the stream's axis as the basis, and no other name."""
    return tuple(BASIS if label == stream else "_" for label in labels)


def reflected(matrix: jax.Array, axis: int) -> jax.Array:
    """The matrix times the reflection that swaps the first unit vector and the ones of length one, along an axis."""
    size = matrix.shape[axis]
    normal = jnp.full(size, -1.0 / size**0.5, matrix.dtype).at[0].add(1.0)
    unit = normal / jnp.sqrt(jnp.sum(jnp.square(normal)))
    along = jnp.tensordot(matrix, unit, ((axis,), (0,)))
    return matrix - 2.0 * (along[..., :, None] * unit if axis == -1 else unit[:, None] * along[None, :])
