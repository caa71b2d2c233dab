"""Batched small-matrix kernels: the only module whose JAX code calls LAPACK, and one policy of precision and cutoffs.

Every function takes stacks of matrices (…, rows, columns) with small sides. None knows of heads, leaves or gauges.
Functions that call LAPACK run matrix by matrix on CPU, for the reason that `serial` gives.
"""

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import scipy.linalg
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from gauge_optax.errors import binding_error

T = TypeVar("T")
Scalar = float | jax.Array
Schedule = tuple[tuple[float, ...], ...]
Coefficients = str | Sequence[float] | Sequence[Sequence[float]] | np.ndarray

HIGHEST = jax.lax.Precision.HIGHEST

# Presets of `polar`: the coefficients (a, b, c) of a·σ + b·σ³ + c·σ⁵, or (a, b, c, d) of a polynomial of degree 7. A
# preset is one tuple, which serves every step, or a tuple per step.
_DION: Schedule = ((4.0848, -6.8946, 2.9270), (3.9505, -6.3029, 2.6377), (3.7418, -5.5913, 2.3037))
_DION += ((2.8769, -3.1427, 1.2046), (2.8366, -3.0525, 1.2012))
# Amsel et al., Polar Express (2025), Alg. 1: each step approximates 1 best on the interval to which the steps before it
# take [1e-3, 1] (minimax). All steps but the last act on σ/1.01.
_AMSEL: Schedule = ((8.205160, -22.901935, 16.460725), (4.066395, -2.861154, 0.518400))
_AMSEL += ((3.909595, -2.823352, 0.525037), (3.285564, -2.415302, 0.485294), (2.300652, -1.668904, 0.418807))
# Computed for this package in the same way, from [1e-2, 1.02]. The last step has degree 7, which leaves an error of
# 3.3e-3; a fourth step of degree 5 would leave 1.25e-2.
_SHARP: Schedule = ((7.942388, -22.287293, 15.823857), (3.646512, -2.729101, 0.537362), (2.675817, -1.989036, 0.453936))
_SHARP += ((2.284817, -2.390803, 1.424108, -0.321191),)
NS_PRESETS: Mapping[str, Any] = dict(standard=(3.4445, -4.775, 2.0315), dion=_DION, polar_express=_AMSEL, sharp=_SHARP)


# Precision and cutoffs ----------------------------------------------------------------------------


def real_dtype() -> jnp.dtype:
    """Returns the dtype in which gauges compute: float32, or float64 under x64, whatever dtype parameters have.

    >>> real_dtype()
    dtype('float32')
    """
    return jnp.asarray(0.0).dtype


def roundoff(dtype: jnp.dtype) -> float:
    """Returns 64 machine epsilons: a sum that is smaller than this times its terms counts as roundoff of zero."""
    return 64.0 * float(jnp.finfo(dtype).eps)


def direction_tolerance(dtype: jnp.dtype) -> float:
    """Returns 1,000 machine epsilons. If a vector's norm, relative to others, is below this, its direction is roundoff.
    """
    return 1e3 * float(jnp.finfo(dtype).eps)


def eigenvalue_cutoff(dtype: jnp.dtype) -> float:
    """Returns the share of the largest eigenvalue below which one counts as zero: 1e-6 in float32, 1e-12 in float64."""
    return 1e-12 if dtype == jnp.float64 else 1e-6


def equal_eigenvalues(dtype: jnp.dtype) -> float:
    """Returns the gap, relative to the largest eigenvalue, up to which two count as equal: √ε, 1.5e-8 in float64.

    Roundoff turns eigenvectors by the angle ε divided by the relative gap. For a gap of √ε, this angle is √ε.
    """
    return float(jnp.finfo(dtype).eps) ** 0.5


def rank_cutoff(dtype: jnp.dtype) -> float:
    """Returns the share of a column that must be independent of other columns: 1e-4 in float32, 1e-12 in float64.

    If less of a factor's column is independent, the factor counts as less than full rank. The share is larger than
    `eigenvalue_cutoff`, because steps of one factor divide by the other factor's singular values: one that is roundoff
    would give such a step an arbitrary length. *Measured*: with 1e-6 in place of 1e-4, twins of float32 LoRA factors
    under a rank-one target were 0.9 apart.
    """
    return 1e-12 if dtype == jnp.float64 else 1e-4


# Products and parts -------------------------------------------------------------------------------


def matmul(a: jax.Array, b: jax.Array) -> jax.Array:
    """Multiplies at full precision. By default, accelerators are off by 1e-3, and symmetries would be off as much."""
    return jnp.matmul(a, b, precision=HIGHEST)


def transpose(a: jax.Array) -> jax.Array:
    """Swaps the last two axes."""
    return jnp.swapaxes(a, -1, -2)


def skew(a: jax.Array) -> jax.Array:
    """Returns the antisymmetric part (a − aᵀ)/2 of every matrix."""
    return 0.5 * (a - transpose(a))


def symmetric(a: jax.Array) -> jax.Array:
    """Returns the symmetric part (a + aᵀ)/2 of every matrix."""
    return 0.5 * (a + transpose(a))


def safe_divide(a: jax.Array, b: jax.Array) -> jax.Array:
    """Returns a/b, and 0 where b is 0."""
    empty = b == 0
    # The inner `where` keeps NaN out of the branch that is not taken, whose derivative JAX computes all the same.
    return jnp.where(empty, 0.0, a / jnp.where(empty, 1.0, b))


def unit_and_size(x: jax.Array, axes: int | tuple[int, ...]) -> tuple[jax.Array, jax.Array]:
    """Divides arrays by their largest absolute entry, so that their squares neither underflow nor overflow.

    Args:
      x: any array.
      axes: the axes of one array; all others count arrays.

    Returns:
      x/max|x|, or zeros for an array of zeros; and max|x|, with `axes` kept at length 1.

    >>> unit_and_size(jnp.array([3e-30, -4e-30]), 0)[0].round(2).tolist()
    [0.75, -1.0]
    """
    size = jnp.max(jnp.abs(x), axes, keepdims=True, initial=0.0)
    return safe_divide(x, size), size


def near_power_of_two(size: jax.Array) -> jax.Array:
    """Returns a power of two near a size: numbers divided by it are not rounded, and their squares stay in range.

    Args:
      size: numbers that are not negative. Of 0 the result is 1. The derivative is zero.

    >>> near_power_of_two(jnp.array([3e-30, 0.0, 3.0])).tolist()[1:]
    [1.0, 4.0]
    """
    most = jnp.finfo(size.dtype).maxexp - 28  # so that the inverse is a number as well
    exponent = jnp.clip(jnp.frexp(jax.lax.stop_gradient(size))[1], -most, most)
    return jnp.ldexp(jnp.ones_like(size), exponent)


def norm_of(arrays: Iterable[jax.Array]) -> float:
    """Returns the root of the sum of squares over all arrays, as a number of Python: its square may be no float32.

    Entries are divided by about the largest, so that no square overflows or underflows. They are not divided by the
    largest itself: of 1e38 the inverse, by which XLA multiplies, is 0 in float32.

    >>> [f"{norm_of([jnp.array([3 * x, 4 * x])]):.1e}" for x in (1e-30, 1e30)]
    ['5.0e-30', '5.0e+30']
    """
    given = [*arrays]
    size = near_power_of_two(jnp.max(jnp.stack([jnp.zeros(()), *(jnp.max(jnp.abs(x), initial=0.0) for x in given)])))
    return float(size) * sum(float(jnp.sum(jnp.square(jnp.abs(x / size)))) for x in given) ** 0.5


def root_mean_square(weight: Any, old: jax.Array, new: jax.Array) -> jax.Array:
    """Returns √(w·old² + (1 − w)·new²) without underflow or overflow of the squares.

    Args:
      weight: w, the weight of the old square.
      old: a root mean square so far, not negative.
      new: the value that joins the mean, not negative.

    >>> round(1e30 * float(root_mean_square(0.5, jnp.float32(1e-30), jnp.float32(7e-30))), 3)
    5.0
    """
    size = jnp.maximum(old, new)
    parts = jnp.square(safe_divide(old, size)), jnp.square(safe_divide(new, size))
    return size * jnp.sqrt(weight * parts[0] + (1.0 - weight) * parts[1])


# LAPACK -------------------------------------------------------------------------------------------

# Outside `jit`, a loop would be compiled anew at every call; inside, these functions are as if they had no `jit`.
_compiled_once = functools.partial(jax.jit, inline=True)


def serial(make: Callable[..., T], *matrices: jax.Array) -> T:
    """Returns make(*matrices); on CPU it calls `make` for one matrix after the other.

    This avoids a deadlock. One thread of XLA:CPU's pool runs a batched LAPACK call: it hands matrices to the other
    threads of the pool and waits for them. If there are as many such calls at once as threads (two gauges on two cores,
    one call per virtual device), they wait for each other forever. A call for a single matrix needs no other thread.
    *Measured* on two cores for 48 to 288 matrices of sizes 32 to 64: results equal those of a batched call bit for bit,
    and take up to twice as long.

    Args:
      make: takes matrices with any number of leading axes, and returns arrays that have these axes in front.
      matrices: (…, rows, columns), with equal leading axes.

    Returns:
      The arrays that `make` returns.

    >>> serial(lambda m: jnp.trace(m, axis1=-2, axis2=-1), jnp.ones((2, 3, 4, 4))).shape
    (2, 3)
    """
    lead = matrices[0].shape[:-2]
    if not lead:
        return make(*matrices)
    flat = [x.reshape(-1, *x.shape[-2:]) for x in matrices]
    made = jax.lax.platform_dependent(*flat, cpu=functools.partial(_one_by_one, make), default=make)
    return jax.tree.map(lambda x: x.reshape(*lead, *x.shape[1:]), made)


def _one_by_one(make: Callable[..., T], *stacks: jax.Array) -> T:
    """Calls `make` for one matrix of the stacks after the other, and returns the stacked results.

    Every device of a mesh does this for the matrices that it holds. XLA by itself does not divide a loop, and would
    send all matrices to all devices. In a sharded `ddc_adamw`, these would be as many bytes as a kernel has.

    Args:
      make: takes one matrix of every stack, and returns a tree of arrays.
      stacks: (n, rows, columns).

    Returns:
      The tree, with n in front of every array.
    """

    def loop(*stacks: jax.Array) -> T:
        return jax.lax.map(lambda single: make(*single), stacks)

    def partition(mesh: Any, args: Sequence[Any], result: Any) -> tuple[Any, Callable[..., T], Any, Any]:
        leading = P(*_spec(args[0])[:1])
        return mesh, loop, *jax.tree.map(lambda _: NamedSharding(mesh, leading), (result, tuple(args)))

    shapes = [*stacks, *jax.tree.leaves(jax.eval_shape(loop, *stacks))]
    # "n a0 b0, n a1 b1 -> n a2": the leading axis may be divided among devices, all others are whole.
    whole = [[f"{'abcd'[axis]}{number}" for axis in range(x.ndim - 1)] for number, x in enumerate(shapes)]
    names = [" ".join(["n", *axes]) for axes in whole]
    rule = f"{', '.join(names[: len(stacks)])} -> {', '.join(names[len(stacks) :])}"
    return _partitioned(loop, partition, rule, tuple(itertools.chain(*whole)))(*stacks)


def _partitioned(
    function: Callable[..., T], partition: Callable[..., Any], rule: str, whole: tuple[str, ...] = ()
) -> Callable[..., T]:
    """Returns `function` divided among the devices of a mesh by `custom_partitioning`.

    It adds two rules that `custom_partitioning` lacks: one for `vmap`, by which the stacks get more matrices, and one
    for derivatives.

    Args:
      function: takes stacks, (n, rows, columns), and returns a tree of arrays with n in front.
      partition: says what each device computes, as the `partition` of `custom_partitioning`.
      rule: the names of all axes, as the `sharding_rule` of `custom_partitioning`.
      whole: the names of axes that are never divided.
    """

    wide = bool(jax.config.read("jax_enable_x64"))

    def of_a_device(*call: Any) -> tuple[Any, ...]:
        mesh, divided, *shardings = partition(*call)
        # XLA calls `partition` after the trace, outside the `enable_x64` context of the trace. So `wide` keeps the
        # setting.
        return mesh, lambda *stacks: _in_width(wide, divided, *stacks), *shardings

    @jax.custom_batching.custom_vmap
    def divided(*stacks: jax.Array) -> T:
        call = custom_partitioning(function)
        call.def_partition(of_a_device, sharding_rule=rule, need_replication_factors=whole)
        return call(*stacks)

    differentiable = jax.custom_jvp(divided)
    differentiable.defjvp(lambda primals, tangents: jax.jvp(function, primals, tangents))

    @divided.def_vmap
    def _(size: int, batched: Sequence[bool], *stacks: jax.Array) -> tuple[T, T]:
        flat = [x if b else jnp.broadcast_to(x, (size, *x.shape)) for x, b in zip(stacks, batched, strict=True)]
        made = differentiable(*(x.reshape(-1, *x.shape[2:]) for x in flat))
        made = jax.tree.map(lambda x: x.reshape(size, -1, *x.shape[1:]), made)
        return made, jax.tree.map(lambda _: True, made)

    return differentiable


def _in_width(wide: bool, function: Callable[..., T], *stacks: jax.Array) -> T:
    with jax.enable_x64(wide):
        return function(*stacks)


@_compiled_once
def svd(m: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the thin U, Σ (descending) and Vᵀ of m = U·Σ·Vᵀ; see `serial`."""
    u, sizes, vt = serial(lambda x: tuple(jnp.linalg.svd(x, full_matrices=False)), m)
    return u, sizes, vt


@jax.jit  # outside jit, `serial` would be lowered anew at every call
def orthogonal_factor(m: jax.Array) -> jax.Array:
    """Returns U·Vᵀ of m = U·Σ·Vᵀ, the orthogonal R with the largest ⟨m, R⟩ (Procrustes).

    >>> orthogonal_factor(jnp.array([[0.0, -2.0], [3.0, 0.0]])).round(4).tolist()
    [[0.0, -1.0], [1.0, 0.0]]
    """
    u, _, vt = svd(m)
    return matmul(u, vt)


@_compiled_once
def qr(m: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the thin Q and R of m = Q·R; see `serial`."""
    q, r = serial(lambda x: tuple(jnp.linalg.qr(x)), m)
    return q, r


@_compiled_once
def triangular_factor(rows: jax.Array) -> jax.Array:
    """Returns the triangular factor R of A = Q·R; see `serial`.

    Args:
      rows: A, (…, m, d).

    Returns:
      (…, d, d), upper triangular; where m < d its last rows are zero.

    >>> jnp.abs(triangular_factor(jnp.array([[3.0, 0.0], [4.0, 5.0]]))).round(4).tolist()
    [[5.0, 4.0], [0.0, 3.0]]
    """
    missing = max(0, rows.shape[-1] - rows.shape[-2])
    padded = jnp.pad(rows, [(0, 0)] * (rows.ndim - 2) + [(0, missing), (0, 0)])
    return serial(lambda x: jnp.linalg.qr(x, mode="r"), padded)


@jax.jit  # outside jit, the loop would be compiled anew at every call
def inverse(m: jax.Array) -> jax.Array:
    """Returns m⁻¹ of invertible matrices; see `serial`."""
    return serial(jnp.linalg.inv, m)


@jax.jit  # outside jit, the loop would be compiled anew at every call
def determinant(m: jax.Array) -> jax.Array:
    """Returns the determinants, (…), of square matrices; see `serial`.

    >>> round(float(determinant(jnp.diag(jnp.array([2.0, -3.0])))), 3)
    -6.0
    """
    return serial(jnp.linalg.det, m)


@jax.jit  # outside jit, the loop would be compiled anew at every call
def independent_rows(matrices: jax.Array) -> jax.Array:
    """Chooses d row numbers such that these rows are far from linearly dependent in every matrix of a group.

    The method is pivoted Gram–Schmidt. In every matrix, a row has a part orthogonal to all rows picked before; each
    pick maximizes the product of the lengths of these parts over the group.

    Args:
      matrices: (…, group, m, d), with m ≥ d.

    Returns:
      Row numbers (…, d), which the matrices of a group share.

    >>> rows = jnp.array([[1.0, 0.0], [5.0, 0.1], [0.0, 2.0]])
    >>> independent_rows(rows[None]).tolist()
    [1, 2]
    """
    lead, (length, size) = matrices.shape[:-3], matrices.shape[-2:]
    tiny = jnp.finfo(matrices.dtype).tiny

    def pick(k: jax.Array, carry: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
        rest, free, picks = carry
        squares = jnp.sum(jnp.square(rest), -1)
        scores = jnp.sum(jnp.log(jnp.maximum(squares, tiny)), -2)
        row = jnp.argmax(jnp.where(free, scores, -jnp.inf), -1)
        chosen = jnp.take_along_axis(rest, row[..., None, None, None], -2)
        across = chosen * safe_divide(jnp.ones(()), jnp.sqrt(jnp.sum(jnp.square(chosen), -1, keepdims=True)))
        rest = rest - jnp.sum(rest * across, -1, keepdims=True) * across
        free = free & (jnp.arange(length) != row[..., None])
        return rest, free, picks.at[..., k].set(row.astype(jnp.int32))

    start = matrices, jnp.ones((*lead, length), bool), jnp.zeros((*lead, size), jnp.int32)
    return jax.lax.fori_loop(0, size, pick, start)[2]


@_compiled_once
def solve(a: jax.Array, b: jax.Array) -> jax.Array:
    """Returns a⁻¹·b for (…, d, d) and (…, d, k) with equal leading axes; see `serial`."""
    return serial(jnp.linalg.solve, a, b)


@_compiled_once
def symmetric_eigen(m: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns eigenvalues (descending) and eigenvectors (columns) of symmetric matrices; see `serial`.

    Args:
      m: (…, d, d), symmetric.

    Returns:
      Values (…, d) in descending order and vectors (…, d, d).

    >>> values, vectors = symmetric_eigen(jnp.array([[2.0, 1.0], [1.0, 2.0]]))
    >>> [round(float(v), 5) for v in values]
    [3.0, 1.0]
    """
    if m.shape[-1] == 2:
        # This closed form needs no LAPACK call, of which rotary planes and heads of two dimensions would need many.
        half_gap, mean = 0.5 * (m[..., 0, 0] - m[..., 1, 1]), 0.5 * (m[..., 0, 0] + m[..., 1, 1])
        radius = jnp.sqrt(half_gap**2 + m[..., 0, 1] ** 2)
        angle = 0.5 * jnp.arctan2(m[..., 0, 1], half_gap)
        return jnp.stack([mean + radius, mean - radius], -1), rotation_2x2(angle)
    values, vectors = serial(lambda x: tuple(jnp.linalg.eigh(x)), m)
    return values[..., ::-1], vectors[..., ::-1]


@jax.custom_jvp
@jax.jit  # outside jit, a loop would be compiled anew at every call
def eigenbasis(gram: jax.Array, mixed: jax.Array) -> jax.Array:
    """Returns an orthonormal basis V of eigenvectors of WᵀW that turns with W: W·R has the basis Rᵀ·V.

    Args:
      gram: WᵀW, (…, d, d).
      mixed: CᵀW, (…, d, d), for a generic constant C.

    Returns:
      V, (…, d, d), by descending eigenvalues. WᵀW fixes neither the signs of V, nor its columns for equal eigenvalues.
      They are chosen by K = (CᵀW)ᵀ, which turns with W. Column j of V has a positive product with column j of K. If
      several columns of V have equal eigenvalues, the same columns of K are projected onto the eigenspace, and the
      orthonormal basis that is nearest to the projections is taken. Eigenvalues count as equal if they differ by at
      most `equal_eigenvalues` of the largest. A matrix of zeros has the identity. The derivative is the one along
      matrices whose equal eigenvalues stay equal, as the zeros of a head with more dimensions than rows do.

    >>> w = jnp.array([[3.0, 0.0], [0.0, 5.0]])
    >>> jnp.abs(eigenbasis(w.T @ w, w)).round(4).tolist()
    [[0.0, 1.0], [1.0, 0.0]]
    """
    values, vectors = symmetric_eigen(gram)
    inside, size, _ = _within_eigenspaces(values, matmul(transpose(vectors), transpose(mixed)))
    # The polar factor of a block-diagonal matrix has the polar factors of its blocks. Blocks are first divided by their
    # norms, so that the roundoff of large ones does not disturb small ones.
    u, _, vt = svd(safe_divide(inside, size))
    basis = nearly_orthogonal(matmul(vectors, matmul(u, vt)))  # removes the roundoff of the three factors
    # Eigenvectors of zeros may be the identity with its columns reversed: two calls would undo each other.
    return jnp.where(jnp.any(gram != 0, (-2, -1), keepdims=True), basis, jnp.eye(gram.shape[-1], dtype=basis.dtype))


def _within_eigenspaces(values: jax.Array, m: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns a matrix's blocks for equal eigenvalues, the norm of each row's block, and which entries are in a block.

    Args:
      values: eigenvalues, (…, d), descending.
      m: (…, d, d).
    """
    apart = values[..., :-1] - values[..., 1:] > equal_eigenvalues(values.dtype) * values[..., :1]
    space = jnp.cumsum(jnp.pad(apart, [(0, 0)] * (apart.ndim - 1) + [(1, 0)]), -1)
    same = space[..., :, None] == space[..., None, :]
    inside = jnp.where(same, m, 0.0)
    squares = jnp.sum(jnp.square(inside), -1, keepdims=True)
    return inside, jnp.sqrt(matmul(same.astype(squares.dtype), squares)), same


@eigenbasis.defjvp
def _turn_of_eigenbasis(
    primals: tuple[jax.Array, jax.Array], tangents: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    (gram, mixed), (gram_dot, mixed_dot) = primals, tangents
    basis, (values, _) = eigenbasis(gram, mixed), symmetric_eigen(gram)
    inside, size, same = _within_eigenspaces(values, matmul(transpose(basis), transpose(mixed)))
    # The derivative of V is V·Ω. With G for `gram` and Λ for its eigenvalues, GV = VΛ determines Ω between eigenspaces.
    # (JAX's rule for eigenvectors divides by gaps that may be zero.)
    gaps = jnp.where(same, 1.0, values[..., None, :] - values[..., :, None])
    between = jnp.where(same, 0.0, matmul(matmul(transpose(basis), gram_dot), basis) / gaps)
    # Within an eigenspace, M = VᵀK is symmetric, and stays so when K changes. Let N be the change of M that comes from
    # K and from V's turn between eigenspaces. Then Ω solves MΩ + ΩM = N − Nᵀ.
    added = matmul(transpose(between), matmul(transpose(basis), transpose(mixed)))
    added = jnp.where(same, added + matmul(transpose(basis), transpose(mixed_dot)), 0.0)
    within = lyapunov(safe_divide(inside, size), skew(safe_divide(added, size)))
    moves = jnp.any(gram != 0, (-2, -1), keepdims=True)
    return basis, jnp.where(moves, matmul(basis, between + jnp.where(same, within, 0.0)), 0.0)


def rotation_2x2(angle: jax.Array) -> jax.Array:
    """Returns [[cos, −sin], [sin, cos]] for every angle (radians)."""
    c, s = jnp.cos(angle), jnp.sin(angle)
    return jnp.stack([jnp.stack([c, -s], -1), jnp.stack([s, c], -1)], -2)


# On the host --------------------------------------------------------------------------------------


def singular_vectors(rows: np.ndarray, full: bool = True) -> tuple[np.ndarray, np.ndarray]:
    """Singular values and right singular vectors of one large matrix of NumPy.

    Args:
      rows: (m, n), finite.
      full: True returns n values and vectors, of which the values after the first min(m, n) are zeros; False returns
        min(m, n).

    Returns:
      Values, descending, and vectors as rows.
    """
    if len(rows) > rows.shape[1]:
        rows = np.asarray(np.linalg.qr(rows, mode="r"))  # R has the same values and vectors
    try:
        _, values, right = np.linalg.svd(rows, full_matrices=full)
    except np.linalg.LinAlgError:
        # LAPACK's fast routine (gesdd) did not converge on a finite matrix of 1,848 columns on two threads. SciPy also
        # has the slower one (gesvd), which takes ten times as long.
        _, values, right = scipy.linalg.svd(rows, full_matrices=full, lapack_driver="gesvd")
    return np.concatenate([values, np.zeros(len(right) - len(values))]), right


# The Lyapunov equation ----------------------------------------------------------------------------


def lyapunov(m: jax.Array, k: jax.Array) -> jax.Array:
    """Returns the skew solution A of M·A + A·M = 2K, by one eigendecomposition of M.

    Args:
      m: (…, d, d), symmetric positive semi-definite.
      k: (…, d, d), antisymmetric.

    Returns:
      A (…, d, d), antisymmetric. In the eigenbasis of M, entry (i, j) is zero if λ_i + λ_j is below the eigenvalue
      cutoff times the largest eigenvalue.

    Reference: DDC B.8. The sum is compared with the cutoff, not each eigenvalue: if one of the two is above the cutoff,
    the equation for their entry is well-posed.

    >>> m, k = jnp.diag(jnp.array([3.0, 1.0, 1.0])), skew(jnp.arange(9.0).reshape(3, 3))
    >>> a = lyapunov(m, k)
    >>> bool(jnp.allclose(m @ a + a @ m, 2 * k, atol=1e-5))
    True
    """
    if m.shape[-1] == 2:
        # There is one pair of eigenvalues, and its sum is the trace.
        return safe_divide(2.0 * k, jnp.trace(m, axis1=-2, axis2=-1)[..., None, None])
    values, vectors = symmetric_eigen(m)
    # Roundoff leaves symmetric parts, which the division by small sums of eigenvalues would amplify.
    rotated = skew(matmul(matmul(transpose(vectors), k), vectors))
    return skew(matmul(matmul(vectors, 2.0 * rotated * inverse_pair_sums(values)), transpose(vectors)))


_Solving = tuple[jax.Array, jax.Array, jax.Array, jax.Array]


@functools.partial(jax.custom_jvp, nondiff_argnums=(2,))
@functools.partial(_compiled_once, static_argnames="steps")
def lyapunov_by_products(m: jax.Array, k: jax.Array, steps: int = 24) -> jax.Array:
    """Returns the skew solution A of M·A + A·M = K − Kᵀ, by conjugate gradients preconditioned by the diagonal.

    It uses matrix products alone. The eigendecomposition that `lyapunov` uses would take most of the time of an
    optimizer's step.

    Args:
      m: (…, d, d), symmetric positive semi-definite.
      k: (…, d, d), any.
      steps: the largest number of iterations. In exact arithmetic d(d − 1)/2 are enough for every M.

    Returns:
      A (…, d, d), antisymmetric. The iteration leaves the solution of a matrix alone once it has converged.
    """
    size = m.shape[-1]
    diagonal = jnp.diagonal(m, axis1=-2, axis2=-1)
    weight = safe_divide(jnp.ones(()), diagonal[..., :, None] + diagonal[..., None, :])

    def inner(a: jax.Array, b: jax.Array) -> jax.Array:
        # This is an einsum, because on a CPU a `sum` over the last two axes takes longer than an iteration's products.
        return jnp.einsum("...ij,...ij->...", a, b, precision=HIGHEST)[..., None, None]

    def step(carry: _Solving, _: None) -> tuple[_Solving, None]:
        solution, residual, direction, energy = carry
        product = matmul(m, direction)  # direction D is antisymmetric: D·M = −(M·D)ᵀ, ⟨D, M·D + D·M⟩ = 2⟨D, M·D⟩
        rate = jnp.where(energy > done, safe_divide(energy, 2.0 * inner(direction, product)), 0.0)
        residual = residual - rate * (product - transpose(product))
        scaled = weight * residual
        fresh = inner(residual, scaled)
        return (solution + rate * direction, residual, scaled + safe_divide(fresh, energy) * direction, fresh), None

    # k − kᵀ is antisymmetric to the last bit only if the compiler takes k and kᵀ from one array. If it computes k
    # twice, as it may on a mesh, a symmetric part of the size of roundoff is left, which the iteration cannot reduce
    # and would amplify. So the upper triangle is mirrored.
    above = jnp.triu(k - transpose(k), 1)
    residual = above - transpose(above)
    scaled = weight * residual
    energy = inner(residual, scaled)
    done = energy * jnp.square(0.1 * jnp.finfo(m.dtype).eps)
    start = (jnp.zeros_like(k), residual, scaled, energy)
    return jax.lax.scan(step, start, length=min(steps, 2 + size * (size - 1) // 2))[0][0]


@lyapunov_by_products.defjvp
def _lyapunov_derivative(steps: int, at: tuple[Any, Any], along: tuple[Any, Any]) -> tuple[jax.Array, jax.Array]:
    """The derivative dA solves M·dA + dA·M = dR − dRᵀ, where dR = dK − dM·A.

    Derivatives of the iteration itself are NaN once it has converged. If M is not positive definite along K, for
    example after a step that is larger than the weights, the iteration does not start. Then A = 0 and dA = 0.
    """
    (m, k), (dm, dk) = at, along
    solution = lyapunov_by_products(m, k, steps)
    unsolved = jnp.all(solution == 0, (-2, -1)) & jnp.any(k != transpose(k), (-2, -1))
    above = jnp.triu((r := dk - matmul(dm, solution)) - transpose(r), 1)

    def applied(x: jax.Array) -> jax.Array:
        product = matmul(m, x)
        return product - transpose(product)

    derivative = jax.lax.custom_linear_solve(
        applied, above - transpose(above), lambda _, x: lyapunov_by_products(m, 0.5 * x, steps), symmetric=True)
    return solution, jnp.where(unsolved[..., None, None], 0.0, derivative)


@functools.partial(_compiled_once, static_argnames="steps")
def rotation_back(m: jax.Array, cross: jax.Array, steps: int = 12) -> jax.Array:
    """Returns R − 1 for the rotation R that turns the end of a step back, so that the step does not rotate its rows.

    A step takes the rows W to W + U. The step from W to (W + U)·R does not rotate them if the matrix Wᵀ(W + U)R is
    symmetric. Newton's method solves this; each round multiplies R by a rotation, so that R is orthogonal up to
    roundoff even where the method does not converge.

    Args:
      m: WᵀW, (…, d, d).
      cross: WᵀU, (…, d, d).
      steps: how many iterations `lyapunov_by_products` may take in each round.

    Returns:
      R − 1, (…, d, d). A round turns by at most about 0.2 radians. In float32, directions in which W has less than
      about 1 % of its usual size turn less: there, W hardly tells a rotation from other steps.

    >>> w = jnp.array([[1.0, 0.0], [0.0, 2.0], [1.0, 1.0]])
    >>> turn = jnp.array([[0.995, 0.1], [-0.1, 0.995]])  # by 0.1 radians
    >>> back = rotation_back(w.T @ w, w.T @ (w @ turn - w))
    >>> bool(jnp.allclose(turn @ (jnp.eye(2) + back), jnp.eye(2), atol=1e-3))
    True
    """
    eps = float(jnp.finfo(m.dtype).eps)
    # M is damped, because in a direction in which W is zero, roundoff would be divided by roundoff.
    least = math.sqrt(eps) / m.shape[-1] * jnp.trace(m, axis1=-2, axis2=-1)[..., None, None]
    damped = m + least * jnp.eye(m.shape[-1], dtype=m.dtype)

    def one_round(back: jax.Array, _: None) -> tuple[jax.Array, None]:
        # Wᵀ(W + U)R without the symmetric WᵀW, which would round small steps away.
        end = cross + matmul(m + cross, back)
        x = 0.5 * lyapunov_by_products(damped + 0.5 * (end + transpose(end)), -end, steps)
        # The rotation is the Cayley transform (1 − X)⁻¹(1 + X) = 1 + 2X(1 − X)⁻¹, and (1 − X)⁻¹ =
        # (1 + X)(1 + X²)(1 + X⁴)… This product converges fast, because X is scaled down if ‖X²‖_F, an upper bound of
        # ‖X²‖, is larger than `most`.
        power, most = matmul(x, x), 2.0**-6
        scale = most / jnp.sqrt(jnp.maximum(jnp.sum(jnp.square(power), (-2, -1), keepdims=True), most**2))
        x, power = jnp.sqrt(scale) * x, scale * power
        series = jnp.eye(m.shape[-1], dtype=m.dtype) + x
        while most > eps:
            series, power, most = series + matmul(series, power), matmul(power, power), most**2
        turn = 2.0 * matmul(x, series)
        return back + turn + matmul(back, turn), None

    return jax.lax.scan(one_round, jnp.zeros_like(m), length=2 if eps > 1e-10 else 3)[0]


def inverse_pair_sums(values: jax.Array) -> jax.Array:
    """Returns 1/(λ_i + λ_j), and 0 where the sum is below the eigenvalue cutoff times the largest eigenvalue.

    Args:
      values: (…, d) eigenvalues of a positive semi-definite matrix.

    Returns:
      (…, d, d).
    """
    values = jnp.maximum(values, 0.0)
    sums = values[..., :, None] + values[..., None, :]
    floor = eigenvalue_cutoff(values.dtype) * jnp.max(values, -1)[..., None, None]
    return jnp.where(sums > floor, 1.0 / jnp.where(sums > floor, sums, 1.0), 0.0)


# Inverse roots and polar factors by products ------------------------------------------------------


def inverse_sqrt_by_products(m: jax.Array, least: float) -> jax.Array:
    """Returns M^{−1/2} of positive definite matrices by matrix products alone (closed form at d = 2).

    Args:
      m: (…, d, d), symmetric positive semi-definite.
      least: the result is exact if λ_min/‖M‖_F is at least this. It sets the number of iterations (7 at 1e-3, float32).

    Returns:
      (…, d, d), finite for any eigenvalues: one below `least`·‖M‖_F gives less than λ^{−1/2}, and M = 0 gives 0.

    Every iterate is a polynomial in M with coefficients that rotations do not change. If M becomes RᵀMR, for a rotation
    R, every iterate thus becomes Rᵀ·(iterate)·R, even before convergence. This holds up to roundoff of ε·‖M‖/λ_min,
    which rounding M itself would cost as well.

    Reference: Higham, Functions of Matrices (2008), Eq. (6.35), the coupled Newton–Schulz iteration. Deviation:
    each iteration is scaled as by Chen & Chow (2014), for eigenvalues of M/‖M‖_F in [`least`, 1], which halves their
    number.

    >>> m = jnp.diag(jnp.array([4.0, 1.0, 0.25]))
    >>> inverse_sqrt_by_products(m, 1e-2).round(4).tolist()
    [[0.5, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 2.0]]
    """
    return _inverse_root(m, least)[0]


def _inverse_root(m: jax.Array, least: float) -> tuple[jax.Array, jax.Array]:
    """Returns `inverse_sqrt_by_products(m, least)`, and its eigenvalue where M has the eigenvalue 0, (…, 1, 1)."""
    eye = jnp.broadcast_to(jnp.eye(m.shape[-1], dtype=m.dtype), m.shape)
    if m.shape[-1] == 2:
        # By Cayley–Hamilton for M^{1/2}, M^{−1/2} = (adj M + √det M)/(√det M·√(tr M + 2√det M)).
        trace, det = (x[..., None, None] for x in (jnp.trace(m, axis1=-2, axis2=-1), jnp.linalg.det(m)))
        root = jnp.sqrt(jnp.maximum(det, 0.0))
        divisor = jnp.maximum(root, 0.5 * math.sqrt(least) * trace)
        unit = safe_divide(jnp.ones(()), divisor * jnp.sqrt(trace + 2.0 * root))
        return ((trace + divisor) * eye - m) * unit, (trace + divisor) * unit
    size = jnp.linalg.norm(m, axis=(-2, -1), keepdims=True)
    root, inverse_root, largest = safe_divide(m, size), eye, 1.0
    # The square roots of all eigenvalues lie in [low, 1]. Each round maps x to cx(3 − c²x²)/2, with the c that brings
    # both ends of the interval equally close to 1.
    low = math.sqrt(least)
    while 1.0 - low > float(jnp.finfo(m.dtype).eps):
        scale = math.sqrt(3.0 / (1.0 + low + low * low))
        step = scale * (1.5 * eye - 0.5 * scale**2 * matmul(inverse_root, root))
        root, inverse_root, largest = matmul(root, step), matmul(step, inverse_root), 1.5 * scale * largest
        low = 0.5 * scale * low * (3.0 - (scale * low) ** 2)
    unit = safe_divide(jnp.ones(()), jnp.sqrt(size))
    return inverse_root * unit, largest * unit


def root_and_inverse(m: jax.Array, least: float) -> tuple[jax.Array, jax.Array]:
    """Returns a symmetric S with S² = M, and S⁻¹, by matrix products alone. S⁻¹ is the inverse of S for every M.

    Args:
      m: (…, d, d), symmetric positive semi-definite, not 0.
      least: S² = M if λ_min/‖M‖_F is at least this. For a smaller eigenvalue λ of M, S has one above √λ, so that the
        condition number of S is at most about 4/√`least`.

    Returns:
      S and S⁻¹, (…, d, d). Roundoff leaves less in S⁻¹·S − 1 than in S·S⁻¹ − 1.

    >>> root, inverse_root = root_and_inverse(jnp.diag(jnp.array([4.0, 1.0, 0.0])), 1e-2)
    >>> bool(jnp.allclose(root @ inverse_root, jnp.eye(3), atol=1e-5))
    True
    """
    inverse_root, largest = _inverse_root(m, least)
    eye = jnp.broadcast_to(jnp.eye(m.shape[-1], dtype=m.dtype), m.shape)
    if m.shape[-1] == 2:
        adjugate = jnp.trace(inverse_root, axis1=-2, axis2=-1)[..., None, None] * eye - inverse_root
        return adjugate / jnp.linalg.det(inverse_root)[..., None, None], inverse_root
    # `inverse_root`, S⁻¹, is inexact for small eigenvalues λ of M: its eigenvalue r is less than λ^{−1/2} there. M·S⁻¹
    # is then no inverse of S⁻¹: the product of both has the eigenvalue λr² = 1 − e. Let r₀ be the largest r, that at
    # λ = 0. If e/r₀ is added to M·S⁻¹, the product differs from 1 by at most 8 % for every λ, and every step of
    # Newton's method for the inverse squares this difference.
    root = matmul(m, inverse_root)
    root, most = root + (eye - matmul(inverse_root, root)) / largest, 0.1
    while most > float(jnp.finfo(m.dtype).eps):
        root, most = root + matmul(root, eye - matmul(inverse_root, root)), most**2
    return root, inverse_root


def polar(m: jax.Array, ns_coeffs: Coefficients = "standard", ns_steps: int = 5, eps: Scalar = 1e-8) -> jax.Array:
    """Returns an approximation of the polar factor U·Vᵀ of M = U·Σ·Vᵀ, by matrix products: Newton–Schulz iterations.

    It is U·f(Σ/(‖M‖_F + eps))·Vᵀ, where f, a composition of odd polynomials, one per step, has values near 1.

    Args:
      m: M, (…, rows, cols), tall or wide.
      ns_coeffs: a key of `NS_PRESETS`; or one tuple (a, b, c) or (a, b, c, d) for every step; or one tuple per step.
      ns_steps: number of steps where one tuple serves them all.
      eps: added to the norm ‖M‖_F.

    Returns:
      (…, rows, cols) in the dtype of `m`, computed in float32 or better; M = 0 gives 0.

    Raises:
      ValueError: an unknown preset, or coefficients of no step.

    For σ/‖M‖_F ≥ 1e-2, f is in [0.68, 1.14] ("standard"), [0.977, 1.032] ("dion"), [0.876, 1.124] ("polar_express"),
    [0.996, 1.004] ("sharp"); below that it is in (0, 1.21]. *Measured* with float32 and 64 as the smaller side: for a
    rotation R, polar(M·R) and polar(M)·R differ by 9e-5 if M has rank one, and by 6e-5 for other ranks and condition
    numbers up to 1e3. If all steps shared one Gram matrix, they would differ by 6e-3.

    Reference: DDC B.10; Jordan et al., Muon (2024), X ← X·p(XᵀX). Deviation: let h be the smaller side, d the larger
    one, and G the h×h Gram matrix. The steps act on G alone, Q ← Q·p(G) and G ← G·p(G)², and X·Q follows at the end. A
    fresh Gram matrix is computed where roundoff would grow too large. Five float32 steps cost 4d·h² + 14h³ in place of
    10d·h² + 5h³ multiplications; "polar_express" costs 2d·h² more. On a mesh no device gathers the whole matrix; see
    `_orthogonalised`.

    >>> polar(jnp.diag(jnp.array([4.0, 1.0, 0.05])), "sharp").round(2).tolist()
    [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]]
    """
    return _polar(ns_schedule(ns_coeffs, ns_steps), m, eps)


@functools.partial(jax.jit, static_argnums=0)  # jit traces matrices of one shape, such as those of all layers, once
def _polar(schedule: Schedule, m: jax.Array, eps: Scalar) -> jax.Array:
    if not m.size:
        return m
    wide = m.shape[-2] < m.shape[-1]
    x = (transpose(m) if wide else m).astype(jnp.promote_types(m.dtype, jnp.float32))
    x = safe_divide(x, jnp.linalg.norm(x, axis=(-2, -1), keepdims=True) + eps)
    x = _orthogonalised(schedule, x.reshape(-1, *x.shape[-2:])).reshape(x.shape)
    return (transpose(x) if wide else x).astype(m.dtype)


def _orthogonalised(schedule: Schedule, x: jax.Array) -> jax.Array:
    """Returns X after the steps of a schedule, for a stack of tall matrices that may be divided among devices.

    If the columns of a matrix are divided, XLA by itself would send the whole matrix to every device. Here each device
    exchanges its columns for a share of the rows (an all-to-all, in which it receives as many entries as it holds). The
    devices add up their parts of the h×h Gram matrix (h² entries), and exchange the rows of the result back.

    Args:
      schedule: the polynomials of the iteration, one per step.
      x: (n, rows, h), rows ≥ h, singular values at most 1.

    Returns:
      (n, rows, h).
    """
    steps = functools.partial(_stepped, schedule)

    def partition(mesh: Any, args: Sequence[Any], result: Any) -> tuple[Any, Callable[..., jax.Array], Any, Any]:
        del result
        n, rows, columns = (*_spec(args[0]), None, None, None)[:3]
        over, exchanged = _mesh_axes(rows), _mesh_axes(columns)
        parts = math.prod(mesh.shape[axis] for axis in exchanged)

        def on_one_device(x: jax.Array) -> jax.Array:
            if not exchanged:
                return steps(x, over)
            height = x.shape[1]
            # Rows of zeros give every device the same number of rows. They do not change the Gram matrix.
            x = jnp.pad(x, ((0, 0), (0, -height % parts), (0, 0)))
            x = steps(jax.lax.all_to_all(x, exchanged, 1, 2, tiled=True), (*over, *exchanged))
            return jax.lax.all_to_all(x, exchanged, 2, 1, tiled=True)[:, :height]

        sharding = NamedSharding(mesh, P(n, rows, columns))
        return mesh, on_one_device, sharding, (sharding,)

    return _partitioned(lambda x: steps(x), partition, "n r h -> n r h")(x)


def _spec(x: Any) -> tuple[Any, ...]:
    """Returns the names of mesh axes that divide an argument of a `partition`: none if XLA knows no mesh.

    That is so for a program whose arguments are host arrays, inside `jax.set_mesh`.
    """
    return tuple(getattr(x.sharding, "spec", ()))


def _mesh_axes(entry: Any) -> tuple[str, ...]:
    """Returns the names in one entry of a `PartitionSpec`, which is None, a name or a tuple."""
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def _stepped(schedule: Schedule, x: jax.Array, over: tuple[str, ...] = ()) -> jax.Array:
    """Returns a stack of tall matrices X after the steps of a schedule. The mesh axes `over` divide the rows of X."""
    epsilon = float(jnp.finfo(x.dtype).eps)
    phases = _phases(schedule, epsilon**-0.25)
    for number, phase in enumerate(phases):
        gram = matmul(transpose(x), x)
        q = _composed(jax.lax.psum(gram, over) if over else gram, phase)
        # An estimate of the relative roundoff of X·Q, a sum of h terms, after all later steps have amplified it. It is
        # largest for matrices of rank one.
        error = 0.2 * epsilon * math.sqrt(x.shape[-1]) * math.prod(map(_amplification, phases[number:]))
        x = _split_matmul(x, q, _amplification(phase)) if error > 1e-4 else matmul(x, q)
    return x


def ns_schedule(ns_coeffs: Coefficients, ns_steps: int) -> Schedule:
    """Returns the coefficients of every step from the arguments of `polar`.

    Raises:
      ValueError: an unknown preset, or coefficients of no step.
    """
    chosen: Any = NS_PRESETS.get(ns_coeffs, ()) if isinstance(ns_coeffs, str) else ns_coeffs
    chosen = chosen if hasattr(chosen, "__len__") else ()
    steps = [chosen] * ns_steps if len(chosen) and np.ndim(chosen[0]) == 0 else chosen
    if not len(steps) or min(map(len, steps)) < 2:
        presets = ", ".join(map(repr, NS_PRESETS))
        raise binding_error(
            "polar", "bad ns_coeffs", f"{ns_coeffs!r}, ns_steps={ns_steps}",
            f"one of {presets}; (a, b, c) and ns_steps ≥ 1; or one (a, b, c) per step", "write ns_coeffs='standard'",
        )
    return tuple(tuple(map(float, step)) for step in steps)


def _phases(schedule: Schedule, most: float) -> list[Schedule]:
    """Splits a schedule into runs of steps that share one Gram matrix, from the last step backwards.

    The roundoff of a Gram matrix grows as the square of the factor by which its run amplifies small singular values.
    No run of several steps may therefore amplify by more than `most`.
    """
    phases = [schedule[-1:]]
    for step in schedule[-2::-1]:
        joined = (step, *phases[0])
        phases[:1] = [joined] if _amplification(joined) <= most else [(step,), phases[0]]
    return phases


def _amplification(phase: Schedule) -> float:
    """Returns the factor by which these steps multiply the smallest singular values."""
    return math.prod(abs(step[0]) for step in phase)


def _composed(gram: jax.Array, phase: Schedule) -> jax.Array:
    """Returns the Q with which these steps take X to X·Q, where gram = XᵀX.

    It takes 4 matrix products for a step of degree 5, and 1 for the first step.
    """
    q = factor = eye = jnp.eye(gram.shape[-1], dtype=gram.dtype)
    for number, step in enumerate(phase):
        gram = symmetric(matmul(matmul(gram, factor), factor)) if number else gram
        factor = step[-2] * eye + step[-1] * gram
        for coefficient in step[-3::-1]:
            factor = coefficient * eye + matmul(gram, factor)
        q = matmul(q, factor) if number else factor
    return q


def _split_matmul(x: jax.Array, q: jax.Array, size: float) -> jax.Array:
    """Returns x·q for ‖x‖ ≤ 2 and ‖q‖ ≤ size, with less roundoff than a plain product has.

    Both matrices are split into their leading 11 bits and the rest. The product of the leading bits is exact in
    float32, and the other products are small, and so is their roundoff.
    """
    grain, unit = 2.0 ** (math.ceil(math.log2(size)) - 11), 2.0**-11
    x_head, q_head = jnp.round(x / unit) * unit, jnp.round(q / grain) * grain
    return matmul(x_head, q_head) + (matmul(x, q - q_head) + matmul(x - x_head, q_head))


# Rotations and their generators -------------------------------------------------------------------


@functools.partial(jax.jit, static_argnums=1)  # outside jit, the loop would be compiled anew at every call
def haar(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Returns random orthogonal matrices of this shape, (…, d, d), from the Haar measure on O(d)."""
    q, r = qr(jax.random.normal(key, shape, real_dtype()))
    # LAPACK chooses the signs of columns. With a positive diagonal of R the Q of a normal matrix is Haar.
    signs = jnp.sign(jnp.diagonal(r, axis1=-2, axis2=-1))
    return q * signs[..., None, :]


def nearly_orthogonal(r: jax.Array) -> jax.Array:
    """Returns the orthogonal matrix nearest to an `r` that is orthogonal up to roundoff.

    The error is of second order in this roundoff.
    """
    return 1.5 * r - 0.5 * matmul(matmul(r, transpose(r)), r)


@_compiled_once
def matrix_exponential(a: jax.Array) -> jax.Array:
    """Returns exp(A) of matrices (…, d, d), which are rotations where A is antisymmetric; see `serial`."""
    return serial(jax.scipy.linalg.expm, a)


def orthogonal_logarithm(r: jax.Array) -> jax.Array:
    """Returns the antisymmetric logarithm of rotations without an eigenvalue −1.

    The polar factor of 1 + R is the square root of R. Three square roots divide the angles by eight. The logarithm of
    the result is 2·artanh of its Cayley transform, by the series of artanh, and eight times it is the logarithm of R.

    Args:
      r: (…, d, d), orthogonal with determinant 1.

    Returns:
      (…, d, d) antisymmetric A with exp(A) = r and |angles| < π.
    """
    eye = jnp.broadcast_to(jnp.eye(r.shape[-1], dtype=r.dtype), r.shape)
    for _ in range(3):
        r = orthogonal_factor(eye + r)
    power = total = cayley = skew(solve(eye + r, r - eye))
    square = matmul(cayley, cayley)
    for order in range(3, 22, 2):
        power = matmul(power, square)
        total = total + power / order
    return 16.0 * total


# Factor pairs -------------------------------------------------------------------------------------
# A factor of A·Bᵀ is (…, rows, d) with d small. Its rank and singular values are computed from its triangular factor R,
# never from the Gram matrix RᵀR, whose condition number is the square of that of R.


def full_rank(r: jax.Array) -> jax.Array:
    """Returns whether a factor's columns are linearly independent, from its triangular factor.

    Args:
      r: (…, d, d), upper triangular.

    Returns:
      (…,) booleans: False if a column is zero or, up to `rank_cutoff`, a linear combination of the columns before it.
      Each column is compared with its own size alone.
    """
    size = jnp.linalg.norm(r, axis=-2)
    independent_part = jnp.abs(jnp.diagonal(r, axis1=-2, axis2=-1))
    return jnp.all(independent_part > rank_cutoff(r.dtype) * size, -1)


class Balance(NamedTuple):
    """The symmetric positive S that balances a pair of factors, by its eigenvectors and eigenvalues.

    Attributes:
      vectors: the orthonormal eigenvectors of S as columns, (…, d, d).
      logs: the logarithms of its eigenvalues, (…, d).
    """

    vectors: jax.Array
    logs: jax.Array

    def power(self, exponent: float | jax.Array) -> jax.Array:
        """Returns S^exponent, (…, d, d)."""
        return matmul(self.vectors * jnp.exp(exponent * self.logs)[..., None, :], transpose(self.vectors))


def balance(left: jax.Array, right: jax.Array) -> Balance:
    """Returns the S with which A·S and B·S⁻ᵀ have the same Gram matrix, and the least norm of all factors of A·Bᵀ.

    Args:
      left: triangular factor R_A of A = Q_A·R_A, (…, d, d).
      right: triangular factor R_B of B = Q_B·R_B, (…, d, d).

    Returns:
      S; the identity if A or B has less than full rank, because no S balances such a pair.

    S = (H_A⁻¹ # H_B)^{1/2}, where H_A and H_B are the Gram matrices and # is the geometric mean. It is computed by two
    singular value decompositions. With R_A·R_Bᵀ = U·Σ·Vᵀ, every balanced pair is (Q_A·U·Σ^{1/2}·O, Q_B·V·Σ^{1/2}·O) for
    an orthogonal O. So S·Oᵀ = R_A⁻¹·U·Σ^{1/2}, and S is the symmetric factor of the polar decomposition of this matrix.

    Reference: docs/design.md §6; # is the geometric mean of positive matrices (Ando).

    >>> s = balance(jnp.diag(jnp.array([4.0, 1.0])), jnp.diag(jnp.array([1.0, 9.0]))).power(1.0)
    >>> s.round(4).tolist()  # sizes 4·½ = 1/½ and 1·3 = 9/3
    [[0.5, 0.0], [0.0, 3.0]]
    """
    complete = (full_rank(left) & full_rank(right))[..., None, None]
    left, right = (jnp.where(complete, x, jnp.eye(x.shape[-1], dtype=x.dtype)) for x in (left, right))
    u, sizes, _ = svd(matmul(left, transpose(right)))
    _, values, vectors = svd(matmul(transpose(u), left) / jnp.sqrt(sizes)[..., :, None])
    return Balance(transpose(vectors), -jnp.log(values))


def inverse_gram(rows: jax.Array, damping: float | jax.Array = 0.0) -> jax.Array:
    """Returns (AᵀA + λ)⁻¹, or the pseudo-inverse of AᵀA if λ = 0 and A has less than full rank.

    Args:
      rows: A, (…, m, d).
      damping: λ, absolute: a number or (…,).

    Returns:
      (…, d, d), symmetric. Columns are scaled to unit vectors before ranks are determined, so that no column is dropped
      because it is smaller than others. Without damping, columns of zeros give zeros, and so do columns below 1e-13 in
      float32 (1e-142 in float64), whose inverse squares would overflow.

    If the unit columns have a condition number of up to about 1e2 in float32 and 1e6 in float64, matrix products are
    enough: the result is J·Jᵀ, where J makes the columns of A·J orthonormal. Otherwise let [A; √λ·I] = Q·R·D, where D
    are the norms of its columns. The result is (R·D)⁻¹·(R·D)⁻ᵀ, by singular values if R may be singular.

    >>> inverse = inverse_gram(jnp.array([[1e3, 0.0], [0.0, 1e-3], [0.0, 0.0]]))
    >>> (inverse * jnp.array([[1e6, 1.0], [1.0, 1e-6]])).round(4).tolist()
    [[1.0, 0.0], [0.0, 1.0]]
    """
    root, _ = _root_of_inverse_gram(rows, damping)
    return matmul(root, transpose(root))


def inverse_gram_beside(rows: jax.Array, own: jax.Array, damping: float | jax.Array = 0.0) -> jax.Array:
    """Returns (BᵀB + λ)⁻¹ for the factor B of a product A·Bᵀ; a pseudo-inverse if λ = 0 and B has no full rank.

    If λ = 0, B has less than full rank and A has full rank, the result X is the pseudo-inverse in the basis in which
    the columns of A are orthonormal. For the same product in another basis, (A·S, B·S⁻ᵀ), the result is therefore
    Sᵀ·X·S, as for an inverse. This does not hold for a pseudo-inverse that is taken in the stored basis, which is the
    result only if A has less than full rank as well.

    Args:
      rows: B, (…, m, d).
      own: A, (…, n, d).
      damping: λ, absolute: a number or (…,).

    Returns:
      X, (…, d, d), symmetric.

    >>> a, b = jnp.array([[1.0, 0.0], [0.0, 1.0]]), jnp.array([[0.5, 0.0]])
    >>> s, s_inverse = jnp.array([[1.0, 1.0], [0.0, 1.0]]), jnp.array([[1.0, -1.0], [0.0, 1.0]])
    >>> (s.T @ inverse_gram_beside(b, a) @ s).round(3).tolist()
    [[4.0, 4.0], [4.0, 4.0]]
    >>> inverse_gram_beside(b @ s_inverse.T, a @ s).round(3).tolist()
    [[4.0, 4.0], [4.0, 4.0]]
    """
    root, full = _root_of_inverse_gram(rows, damping)
    return jax.lax.cond(jnp.all(full), _as_it_is, _turned, matmul(root, transpose(root)), full, rows, own)


# The branches are functions of this module: outside `jit`, JAX would compile functions within functions at every call.


def _as_it_is(inverse: jax.Array, *_: jax.Array) -> jax.Array:
    return inverse


def _turned(inverse: jax.Array, full: jax.Array, rows: jax.Array, own: jax.Array) -> jax.Array:
    """Returns `inverse`, but the pseudo-inverse of `inverse_gram_beside` where only A, not B, has full rank."""
    t = triangular_factor(own)
    _, usable = _root_of_inverse_gram(t)
    turned = matmul(matmul(transpose(t), inverse_gram(matmul(rows, transpose(t)))), t)
    return jnp.where((~full & usable)[..., None, None], turned, inverse)


def _root_of_inverse_gram(rows: jax.Array, damping: float | jax.Array = 0.0) -> tuple[jax.Array, jax.Array]:
    """Returns Y with Y·Yᵀ = `inverse_gram(rows, damping)`, and whether the matrix has full rank, (…,) booleans."""
    squares = jnp.sum(jnp.square(rows), -2)
    added = jnp.broadcast_to(jnp.asarray(damping, rows.dtype)[..., None], squares.shape)
    norms = jnp.sqrt(squares + added)
    nonzero = norms > float(jnp.finfo(rows.dtype).tiny) ** 0.5 / eigenvalue_cutoff(rows.dtype)
    norms = jnp.where(nonzero, norms, 1.0)
    below = jnp.sqrt(added)[..., None] * jnp.eye(rows.shape[-1], dtype=rows.dtype)
    root, exact = _root_by_products(jnp.concatenate([rows, below], -2))
    enough = exact & jnp.all(nonzero)
    return jax.lax.cond(enough, _root_of_full_rank, _root_by_qr, root, rows, added, norms, nonzero)


def _root_by_products(rows: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns J such that rows·J has orthonormal columns, except for zero ones, and whether all J are exact enough."""
    size = jnp.linalg.norm(rows, axis=-2, keepdims=True)
    inverse_size = safe_divide(jnp.ones_like(size), size)
    unit = rows * inverse_size
    first = inverse_sqrt_by_products(matmul(transpose(unit), unit), 1e-12 if rows.dtype == jnp.float64 else 1e-5)
    root = transpose(inverse_size) * first
    # The first pass leaves roundoff of ε times the squared condition number. After it, the Gram matrix of the columns
    # is near the identity, and a second pass removes this roundoff.
    columns = matmul(rows, root)
    gram = matmul(transpose(columns), columns)
    second = inverse_sqrt_by_products(gram, 0.1 / math.sqrt(gram.shape[-1]))
    error = matmul(matmul(second, gram), second) - jnp.eye(gram.shape[-1], dtype=gram.dtype)
    return matmul(root, second), jnp.all(jnp.abs(error) < 1e-3)


def _root_of_full_rank(root: jax.Array, *others: jax.Array) -> tuple[jax.Array, jax.Array]:
    return root, jnp.all(others[-1], -1)


def _root_by_qr(
    _: jax.Array, rows: jax.Array, added: jax.Array, norms: jax.Array, nonzero: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns Y with Y·Yᵀ = (AᵀA + λ)⁻¹, by a QR decomposition, and whether the matrix has full rank.

    Args:
      rows: A, (…, m, d).
      added: λ, (…, d).
      norms: the norms of the columns of [A; √λ·I], (…, d); 1 for zero columns.
      nonzero: which columns are not zero, (…, d) booleans.
    """
    size, cutoff = rows.shape[-1], eigenvalue_cutoff(rows.dtype)
    # For every zero column, a unit row is appended that is orthogonal to all other columns, so that R is invertible.
    below = jnp.where(nonzero, jnp.sqrt(added) / norms, 1.0)[..., None] * jnp.eye(size, dtype=rows.dtype)
    r = triangular_factor(jnp.concatenate([jnp.where(nonzero, 1.0 / norms, 0.0)[..., None, :] * rows, below], -2))
    eye = jnp.broadcast_to(jnp.eye(size, dtype=r.dtype), r.shape)
    complete = full_rank(r)
    root = jax.scipy.linalg.solve_triangular(jnp.where(complete[..., None, None], r, eye), eye)
    # ‖R‖·‖R⁻¹‖ bounds the condition number of R from above. If it is below 1/cutoff, no singular value is cut off.
    complete &= jnp.linalg.norm(root, axis=(-2, -1)) * size**0.5 < 1.0 / cutoff
    root = root / norms[..., :, None]

    def pseudo() -> tuple[jax.Array, jax.Array]:
        _, sizes, vt = svd(r)
        kept = (sizes > cutoff * sizes[..., :1])[..., None, :]
        vectors = transpose(vt) / norms[..., :, None]
        inverse_root = jnp.where(kept, vectors / jnp.where(kept, sizes[..., None, :], 1.0), 0.0)
        # The division by `norms` moves the columns of `inverse_root` out of A's row space. The vectors that were not
        # kept span A's null space. The parts of the columns in this space are removed. In the QR, its vectors come
        # first, so that the zero columns after them do not mix in.
        null = qr(jnp.where(kept, 0.0, vectors)[..., ::-1])[0] * ~kept[..., ::-1]
        inverse_root = inverse_root - matmul(null, matmul(transpose(null), inverse_root))
        return jnp.where(complete[..., None, None], root, inverse_root), complete | jnp.all(kept, (-2, -1))

    root, full = jax.lax.cond(jnp.all(complete), lambda: (root, complete), pseudo)
    return jnp.where(nonzero[..., :, None], root, 0.0), full & jnp.all(nonzero, -1)
