"""Curvature at a point as linear operators: `Hessian`, `GGN`, `Fisher`, `EmpiricalFisher` and `quotient_fisher`.

An operator is a symmetric matrix with one row per parameter. It is known by its products with vectors, each of which
takes one forward and one backward derivative. `dense` and `blocks` make arrays of small operators. `lanczos` and
`trace` need no such array; `trace` uses matfree, an optional dependency. The names of the classes are those of
curvlinops.

The Fisher information is F = E[s·sᵀ]. The score s is the gradient of a log-likelihood, with labels that the *model*
draws. `EmpiricalFisher` takes the labels of the data instead. Unless the model fits these exactly, that matrix depends
on the residuals too (Kunstner et al. 2019). Along an orbit no output changes, so that F has one zero eigenvalue per
dimension of the orbit. `quotient_fisher` removes these: it is F on the tangents perpendicular to the orbit, at the
point of the orbit that has the least norm. All weights of one function have the same such point, up to rotations, which
change no eigenvalue.
"""

from __future__ import annotations

import dataclasses
import importlib
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from gauge_optax.binding import in_single_or_better, leaves_by_path, real_leaves, with_leaves
from gauge_optax.binding.paths import match
from gauge_optax.errors import binding_error, counted, kind_of, warn
from gauge_optax.gauges.gauge import Gauges, Product, product
from gauge_optax.linalg import matmul, roundoff, safe_divide, singular_vectors, symmetric_eigen, unit_and_size
from gauge_optax.measure._metric import (
    across,
    across_dual,
    check_at,
    perpendicular,
    point_of,
    require_frame,
    require_solved,
    tangent_of,
)
from gauge_optax.transformation import (
    listed,
    require_arrays,
    require_batches,
    require_count,
    require_function,
    require_key,
    require_scalar,
    require_traceable,
    with_hash,
)
from gauge_optax.xla import summed_apart

_PER_DIMENSION = 100  # labels per parameter by default: the DDC paper asks for N ≥ 100·d labels
_CHUNK = 64  # columns of a dense matrix that are computed at once
_MOST = 20_000  # rows of a dense matrix
_ROWS = 2**22  # class probabilities that are in memory at once while labels are drawn

Leaves = dict[str, jax.Array]


class _Arrays(NamedTuple):
    """The arrays of an operator.

    Attributes:
      params: the point.
      leaves: path → leaf of `params`, for the selected leaves.
      batches: inputs of the function.
      labels: per batch, the third argument of the operator's `Curve`: labels, shares of labels or moments of residuals;
        None for `Hessian` and `GGN`, which use no labels.
    """

    params: Any
    leaves: Leaves
    batches: list[Any]
    labels: list[Any]


# A function of (outputs, change of outputs, labels) that returns C·change for each row of outputs. The matrix C is the
# second derivative of the loss by the outputs, or the mean over labels of s·sᵀ, where s is the loss's gradient by the
# outputs.
Curve = Callable[[jax.Array, jax.Array, Any], jax.Array]


# Curvature of the loss in the outputs ------------------------------------------------------------------------


def _softmax(outputs: jax.Array, change: jax.Array, _: Any) -> jax.Array:
    """(diag p − p·pᵀ)·change, for the probabilities p: the exact mean over labels."""
    p = jax.nn.softmax(outputs)
    return p * (change - summed_apart(jnp.sum(p * change, -1, keepdims=True)))


def _softmax_of_labels(outputs: jax.Array, change: jax.Array, shares: jax.Array) -> jax.Array:
    """Σ_c f_c·(p − e_c)·(p − e_c)ᵀ·change: the mean over drawn labels.

    e_c is the one-hot vector of class c, and f_c the share of drawn labels that are c; `shares` is f, (…, classes).
    """
    p = jax.nn.softmax(outputs)
    mean = summed_apart(jnp.sum(p * change, -1, keepdims=True))
    of_labels = summed_apart(jnp.sum(shares * change, -1, keepdims=True))
    return p * (mean - of_labels) + shares * (change - mean)


def _softmax_of_data(outputs: jax.Array, change: jax.Array, labels: jax.Array) -> jax.Array:
    score = jax.nn.softmax(outputs) - jax.nn.one_hot(labels, outputs.shape[-1], dtype=outputs.dtype)
    return score * summed_apart(jnp.sum(score * change, -1, keepdims=True))


def _gaussian(outputs: jax.Array, change: jax.Array, _: Any) -> jax.Array:
    return change


def _gaussian_of_labels(outputs: jax.Array, change: jax.Array, moments: jax.Array) -> jax.Array:
    """The mean of ε·εᵀ over drawn residuals ε, (…, outputs, outputs), times the change."""
    return jnp.einsum("...ij,...j->...i", moments, change)


def _gaussian_of_data(outputs: jax.Array, change: jax.Array, labels: jax.Array) -> jax.Array:
    score = outputs - labels
    return score * summed_apart(jnp.sum(score * change, -1, keepdims=True))


_CURVES: Mapping[str, tuple[Curve, Curve, Curve]] = {
    "softmax": (_softmax, _softmax_of_labels, _softmax_of_data),
    "gaussian": (_gaussian, _gaussian_of_labels, _gaussian_of_data),
}


def _curves(name: str, likelihood: str) -> tuple[Curve, Curve, Curve]:
    if likelihood not in list(_CURVES):
        raise binding_error(
            name, f"unknown likelihood '{likelihood}'", repr(likelihood), " or ".join(map(repr, _CURVES)),
            'pass likelihood="softmax" for logits, "gaussian" for regression',
        )
    return _CURVES[likelihood]


# Products ---------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Rule:
    """What an operator consists of besides arrays. It is static under `jit`, so that one program serves all points."""

    fn: Callable[[Any, Any], Any]
    curve: Curve | None  # None for the Hessian
    gauges: Product | None = None  # only for a `Quotient`

    def multiply(self, tangent: Leaves, arrays: _Arrays) -> Leaves:
        """The product with a vector. Vector and product are path → array."""
        leaves = {path: arrays.leaves[path] for path in tangent}
        total = jax.tree.map(jnp.zeros_like, tangent)
        count = 0
        for batch, labels in zip(arrays.batches, arrays.labels, strict=True):

            def outputs(p: Leaves, batch: Any = batch) -> Any:
                return self.fn(with_leaves(arrays.params, p), batch)

            if self.curve is None:
                _, part = jax.jvp(jax.grad(outputs), (leaves,), (tangent,))
                count += 1
            else:
                value, push = jax.linearize(outputs, leaves)
                bent = self.curve(value, push(tangent), labels)
                (part,) = jax.linear_transpose(push, tangent)(bent.astype(value.dtype))
                count += math.prod(value.shape[:-1])
            total = jax.tree.map(jnp.add, total, part)
        total = jax.tree.map(lambda x: x / count, total)
        # The product is perpendicular to orbits up to roundoff; this removes the roundoff.
        return total if self.gauges is None else across_dual(self.gauges, arrays.params, total)


@partial(jax.jit, static_argnums=0)
def _multiply(rule: _Rule, tangent: Leaves, arrays: _Arrays) -> Leaves:
    return rule.multiply(tangent, arrays)


@partial(jax.jit, static_argnums=0)
def _multiply_all(rule: _Rule, tangents: Leaves, arrays: _Arrays) -> Leaves:
    return jax.vmap(lambda tangent: rule.multiply(tangent, arrays))(tangents)


@partial(jax.jit, static_argnums=0)
def _perpendicular(rule: _Rule, tangent: Leaves, arrays: _Arrays) -> Leaves:
    return perpendicular(_group(rule), arrays.params, tangent)


@partial(jax.jit, static_argnums=0)
def _across_all(rule: _Rule, tangents: Leaves, arrays: _Arrays) -> Leaves:
    return jax.vmap(lambda tangent: across(_group(rule), arrays.params, tangent))(tangents)


def _group(rule: _Rule) -> Product:
    """The gauges of a `Quotient`'s rule; no gauges for other operators."""
    return product(() if rule.gauges is None else rule.gauges)


def _tridiagonal(
    multiply: Callable[[jax.Array], jax.Array], fresh: Callable[[jax.Array | int], jax.Array], steps: int
) -> tuple[jax.Array, jax.Array]:
    """Lanczos: an orthonormal basis (steps, d), and the matrix in this basis, which is tridiagonal.

    Each vector is the product of the matrix with the vector before it, less the part in the span of all vectors so far.
    If only roundoff is left, the matrix maps the span to itself, and a random vector comes next. Without this rule,
    roundoff would come next. It may lie in the span, and eigenvalues that were found already would be found again.

    Args:
      multiply: vector (d,) → its product with the matrix.
      fresh: number → a random vector (d,).
      steps: the number of vectors.
    """

    def unit_outside(x: jax.Array, basis: jax.Array) -> tuple[jax.Array, jax.Array]:
        for _ in range(2):  # after one subtraction, roundoff of the size of that in x may still lie in the span
            x = x - matmul(matmul(basis, x), basis)
        x, most = unit_and_size(x, 0)
        length = jnp.linalg.norm(x)
        return safe_divide(x, length), most[0] * length

    def step(k: jax.Array, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        basis, diagonal, beside, vector = state
        basis, image = basis.at[k].set(vector), multiply(vector)
        diagonal, (after, length) = diagonal.at[k].set(matmul(vector, image)), unit_outside(image, basis)
        largest = jnp.maximum(jnp.max(jnp.abs(diagonal)), jnp.max(beside))
        exhausted = length <= roundoff(length.dtype) * largest  # False for NaN, so that it is passed on
        after = jax.lax.cond(exhausted, lambda: unit_outside(fresh(k + 1), basis)[0], lambda: after)
        return basis, diagonal, beside.at[k].set(jnp.where(exhausted, 0.0, length)), after

    first, _ = unit_outside(start := fresh(0), jnp.zeros((1, start.size), start.dtype))
    none, nowhere = jnp.zeros(steps, start.dtype), jnp.zeros((steps, start.size), start.dtype)
    basis, diagonal, beside, _ = jax.lax.fori_loop(0, steps, step, (nowhere, none, none, first))
    return basis, jnp.diag(diagonal) + jnp.diag(beside[:-1], 1) + jnp.diag(beside[:-1], -1)


# Operators --------------------------------------------------------------------------------------------------


class Eigen(NamedTuple):
    """Some eigenvalues of an operator.

    Attributes:
      values: in descending order.
      vectors: the eigenvectors, one per row, (values, d); None if they were not asked for.
    """

    values: jax.Array
    vectors: jax.Array | None


class Estimate(NamedTuple):
    """An estimate from random probes.

    Attributes:
      mean: the mean over the probes.
      error: the standard error of that mean.
    """

    mean: float
    error: float


class Operator:
    """A symmetric matrix that is known by its products with vectors; see `Hessian`, `GGN`, `Fisher`.

    Rows and columns are the entries of the selected leaves, in the order of the tree; `paths` names the leaves.

    Attributes:
      name: the name of the class, for messages.
      shape: (d, d), with d the number of selected entries.
      paths: paths of the selected leaves.
    """

    def __init__(self, name: str, rule: _Rule, arrays: _Arrays) -> None:
        """See the classes; `operator @ vector` multiplies."""
        self.name, self._rule, self._arrays = name, rule, arrays
        self.paths = tuple(arrays.leaves)
        self._cuts = np.cumsum([x.size for x in arrays.leaves.values()])
        self.shape = (int(self._cuts[-1]), int(self._cuts[-1]))

    def __matmul__(self, vector: jax.Array | np.ndarray) -> jax.Array:
        """The product with a vector (d,), or with the columns of a matrix (d, k)."""
        self._check_length(vector, 2)
        if jnp.ndim(vector) == 1:
            return self._flat(_multiply(self._rule, self._split(vector), self._arrays))
        columns = jnp.asarray(vector).T
        chunks = [columns[at : at + _CHUNK] for at in range(0, len(columns), _CHUNK)]
        split = jax.vmap(self._split)
        parts = [jax.vmap(self._flat)(_multiply_all(self._rule, split(x), self._arrays)) for x in chunks]
        return jnp.concatenate(parts).T

    def ravel(self, tree: Any) -> jax.Array:
        """Flattens the selected leaves of a tree, which is like the parameters, and joins them to one vector (d,).

        Raises ValueError if the tree lacks a selected leaf, or has one of another shape or of complex numbers.
        """
        leaves = leaves_by_path(tree)
        for path, x in self._arrays.leaves.items():
            shape = jnp.shape(leaves[path]) if path in leaves else None
            if shape != x.shape or jnp.iscomplexobj(leaves[path]):
                found = f"leaves {', '.join(list(leaves)[:6]) or 'of no path'}"
                raise binding_error(
                    self.name, f"no leaf '{path}' like that of the parameters",
                    found if shape is None else f"shape {shape} of {jnp.result_type(leaves[path])}",
                    f"a leaf of real numbers, shape {x.shape}", "pass a tree like the parameters, such as a step",
                )
        return self._flat({path: jnp.asarray(leaves[path], x.dtype) for path, x in self._arrays.leaves.items()})

    def unravel(self, vector: jax.Array | np.ndarray) -> Any:
        """Converts a vector (d,) to a tree like the parameters; leaves that are not selected are zero.

        Raises ValueError for a vector of another length.
        """
        self._check_length(vector, 1)
        zeros = jax.tree.map(jnp.zeros_like, self._arrays.params)
        return with_leaves(zeros, self._split(vector))

    def dense(self) -> jax.Array:
        """The matrix as an array (d, d)."""
        if self.shape[0] > _MOST:
            raise binding_error(
                self.name, "too large for an array", f"{self.shape[0]:,} rows", f"at most {_MOST:,}",
                'select leaves by only="path", call .blocks(), or take .lanczos(key, steps)',
            )
        matrix = self @ jnp.eye(self.shape[0], dtype=self._dtype)
        return 0.5 * (matrix + matrix.T)

    def blocks(self) -> dict[str, jax.Array]:
        """The diagonal blocks: path → (n, n), for selected leaves of n ≤ 20,000 entries. Larger ones are left out."""
        by_path = {}
        for path, end, leaf in zip(self.paths, self._cuts, self._arrays.leaves.values(), strict=True):
            at = slice(int(end) - leaf.size, int(end))
            if leaf.size <= _MOST:
                chunks = [jnp.zeros((leaf.size, 0), self._dtype)]
                for first in range(0, leaf.size, _CHUNK):
                    count = min(_CHUNK, leaf.size - first)
                    unit = jnp.zeros((self.shape[0], count), self._dtype)
                    unit = unit.at[at.start + first + np.arange(count), np.arange(count)].set(1.0)
                    chunks.append((self @ unit)[at])
                block = jnp.concatenate(chunks, 1)
                by_path[path] = 0.5 * (block + block.T)
        return by_path

    def eigenvalues(self) -> np.ndarray:
        """All eigenvalues in descending order, from the dense matrix. Raises ValueError if it is not finite."""
        return np.linalg.eigvalsh(self._finite(self.dense()))[::-1]

    # Without an array of d × d ------------------------------------------------------------------------------

    def lanczos(self, key: jax.Array, steps: int, vectors: bool = False) -> Eigen:
        """Eigenvalues by Lanczos from a random start, with full reorthogonalization; the largest converge first.

        Args:
          key: a PRNG key.
          steps: the number of products with the operator, at least 1; more than d count as d. Each adds one or two
            vectors of d numbers to the memory in use.
          vectors: whether to return eigenvectors, which take as much memory again.

        Returns:
          One approximate eigenvalue (Ritz value) per step. If the operator maps the span of the vectors so far to
          itself, as it does once `steps` exceeds its rank, a random vector perpendicular to this span comes next.
          Further values are those of the operator outside the span: zeros beyond its rank, and repeated eigenvalues.

        Raises:
          ValueError: no PRNG key; fewer steps than 1.
        """
        require_key(self.name, key)
        require_count(self.name, "steps", steps, 1)
        steps = min(int(steps), self._most_steps())

        def run(key: jax.Array, arrays: _Arrays) -> tuple[jax.Array, jax.Array | None]:
            basis, small = _tridiagonal(
                lambda vector: self._flat(self._rule.multiply(self._split(vector), arrays)),
                lambda number: self._probe(jax.random.fold_in(key, number), jax.random.normal, arrays), steps,
            )
            small, size = unit_and_size(small, (0, 1))
            values, turn = symmetric_eigen(small)
            return values * size[0], matmul(turn.T, basis) if vectors else None

        return Eigen(*jax.jit(run)(key, self._arrays))

    def trace(self, key: jax.Array, probes: int = 16) -> Estimate:
        """Estimates the trace by Hutchinson's method, with one product per probe and one probe at a time in memory.

        Args:
          key: a PRNG key.
          probes: the number of random vectors of entries ±1, at least 2.

        Returns:
          The mean and its standard error.

        Raises:
          ImportError: matfree is not installed.
          ValueError: fewer than two probes.
        """
        require_key(self.name, key)
        require_count(self.name, "probes", probes, 2)  # one has no standard error
        integrand = _matfree("stochtrace").monte_carlo_trace()
        run = jax.jit(lambda probe, arrays: integrand(self._rule.multiply, probe, arrays))
        return self._estimate(key, probes, run)

    # Inside -------------------------------------------------------------------------------------------------

    def _check_length(self, vector: Any, axes: int) -> None:
        """Raises ValueError unless the vector is an array of real numbers with d rows and at most `axes` axes."""
        if jnp.iscomplexobj(vector):
            raise binding_error(
                self.name, "a complex vector", f"{jnp.result_type(vector)}", "real numbers",
                "pass its real and its imaginary part, one by one",
            )
        if jnp.shape(vector)[:1] != self.shape[:1] or jnp.ndim(vector) > axes:
            raise binding_error(
                self.name, "a vector of another length", f"shape {jnp.shape(vector)}",
                f"({self.shape[0]},)" + (f", or ({self.shape[0]}, k)" if axes == 2 else ""),
                "make it of a tree by `operator.ravel(tree)`",
            )

    @property
    def _dtype(self) -> Any:
        return jnp.result_type(*self._arrays.leaves.values())

    def _flat(self, leaves: Leaves) -> jax.Array:
        return jnp.concatenate([jnp.ravel(leaves[path]) for path in self.paths])

    def _split(self, vector: jax.Array | np.ndarray) -> Leaves:
        parts = jnp.split(jnp.asarray(vector, self._dtype), self._cuts[:-1])
        shaped = zip(self._arrays.leaves.items(), parts, strict=True)
        return {path: part.reshape(leaf.shape).astype(leaf.dtype) for (path, leaf), part in shaped}

    def _probe(self, key: jax.Array, draw: Callable[..., jax.Array], arrays: _Arrays) -> jax.Array:
        """A random vector (d,) in the space on which the operator with these arrays acts."""
        return draw(key, (self.shape[0],), dtype=self._dtype)

    def _most_steps(self) -> int:
        return self.shape[0]

    def _finite(self, matrix: jax.Array) -> np.ndarray:
        """A matrix on the host. Raises ValueError under `jit`, and if there is a NaN or an infinity in it."""
        require_arrays(self.name, matrix)
        if not np.all(np.isfinite(host := np.asarray(matrix))):
            raise binding_error(
                self.name, "a matrix that is not finite", "NaN or infinity", "numbers",
                "look for a leaf or a batch in which there is one, or for an overflow in the function",
            )
        return host

    def _estimate(self, key: jax.Array, probes: int, run: Callable[[Leaves, _Arrays], jax.Array]) -> Estimate:
        drawn = (self._probe(x, jax.random.rademacher, self._arrays) for x in jax.random.split(key, probes))
        estimates = np.array([float(run(self._split(x), self._arrays)) for x in drawn])
        return Estimate(float(estimates.mean()), float(estimates.std(ddof=1)) / math.sqrt(probes))


class Hessian(Operator):
    """The Hessian of the mean of a loss over batches.

    Args:
      loss: (params, batch) → scalar, twice differentiable. It is compiled as by `jax.jit`: a later change of a global
        or an attribute that it reads is not seen.
      params: the point; leaves of lower precision than float32 are converted to float32.
      batches: values that `loss` accepts.
      only: one or several path patterns of the selected leaves, as in gauges ("blocks/{i}/mlp/up/kernel"); all floating
        leaves by default. All other leaves stay constant.

    Raises:
      ValueError: no batch; a path that no leaf has; a loss that is no scalar.

    >>> hessian = go.measure.Hessian(
    ...     lambda p, x: jnp.mean((x @ p["w"]) ** 2), {"w": jnp.ones(2)}, [jnp.eye(2)]
    ... )
    >>> hessian.dense()
    Array([[1., 0.],
           [0., 1.]], dtype=float32)
    """

    def __init__(
        self,
        loss: Callable[[Any, Any], jax.Array],
        params: Any,
        batches: Sequence[Any],
        *,
        only: str | Sequence[str] | None = None,
    ) -> None:
        """See the class."""
        batches = listed("Hessian", batches)
        arrays = _arrays("Hessian", params, batches, only)
        require_function("Hessian", "loss", loss, "params, batch")
        for batch in batches:
            require_scalar("Hessian", jax.eval_shape(loss, arrays.params, batch))
        super().__init__("Hessian", _Rule(with_hash(loss), None), arrays._replace(labels=[None] * len(batches)))


class GGN(Operator):
    """The generalized Gauss–Newton matrix Jᵀ·H·J.

    J is the Jacobian of the outputs by the parameters, and H the Hessian of the negative log-likelihood by the outputs.
    For both likelihoods Jᵀ·H·J is the Fisher information with the exact mean over labels. Each row of outputs, such as
    that of a token, has one label; the matrix is the mean over all rows of all batches.

    Args:
      fn: (params, batch) → outputs (…, classes), or (…, outputs). It is compiled as by `jax.jit`: a later change of a
        global or an attribute that it reads is not seen.
      params: the point; leaves of lower precision than float32 are converted to float32.
      batches: values that `fn` accepts.
      likelihood: "softmax", or "gaussian" of variance 1, whose loss is ½·‖outputs − labels‖² per row.
      only: path pattern of the selected leaves, as for `Hessian`.

    Raises:
      ValueError: no batch; a path that no leaf has; another likelihood.

    >>> params, x = {"w": jnp.zeros((1, 2))}, jnp.ones((3, 1))
    >>> ggn = go.measure.GGN(lambda p, x: x @ p["w"], params, [x])
    >>> # diag p − p·pᵀ with p = (½, ½).
    >>> ggn.dense()
    Array([[ 0.25, -0.25],
           [-0.25,  0.25]], dtype=float32)

    Reference: Schraudolph 2002; Martens 2020, §8.
    """

    def __init__(
        self,
        fn: Callable[[Any, Any], jax.Array],
        params: Any,
        batches: Sequence[Any],
        likelihood: str = "softmax",
        *,
        only: str | Sequence[str] | None = None,
    ) -> None:
        """See the class."""
        curve, batches = _curves("GGN", likelihood)[0], listed("GGN", batches)
        arrays = _arrays("GGN", params, batches, only)
        _output_shapes("GGN", fn, arrays)
        super().__init__("GGN", _Rule(with_hash(fn), curve), arrays._replace(labels=[None] * len(batches)))


class Fisher(Operator):
    """The Fisher information on given inputs: the mean of s·sᵀ over labels that the model draws, with the score s.

    A product with a vector costs the same for any number of labels, because it uses only a summary of the labels of
    each row: the share of each class for "softmax", the mean of ε·εᵀ over the drawn residuals ε for "gaussian".

    Args:
      fn: (params, batch) → outputs (…, classes), or (…, outputs). It is compiled as by `jax.jit`: a later change of a
        global or an attribute that it reads is not seen.
      params: the point; leaves of lower precision than float32 are converted to float32.
      batches: values that `fn` accepts.
      key: a PRNG key, from which labels are drawn.
      samples: the number of labels in all, at least one per row of outputs; 100 per selected parameter by default.
      likelihood: "softmax", or "gaussian" of variance 1.
      only: path pattern of the selected leaves, as for `Hessian`.

    Attributes:
      samples: the number of labels that were drawn.

    Raises:
      ValueError: no batch; a path that no leaf has; another likelihood; `samples` that is no integer from 1.

    If `samples` is below 100 per selected parameter, there is a warning, because the smallest eigenvalues are then too
    small. For d parameters, N labels and scores of unit covariance, whose exact eigenvalues are all 1, the eigenvalues
    of the mean range from (1 − √(d/N))² to (1 + √(d/N))².

    >>> params, x = {"w": jnp.zeros((1, 2))}, jnp.ones((3, 1))
    >>> key = jax.random.key(0)
    >>> fisher = go.measure.Fisher(lambda p, x: x @ p["w"], params, [x], key, 10**6)
    >>> exact = jnp.array([[0.25, -0.25], [-0.25, 0.25]])
    >>> bool(jnp.allclose(fisher.dense(), exact, atol=1e-3))
    True

    Reference: Kunstner, Balles and Hennig 2019; DDC App. C, which makes all measurements with N ≥ 100·d.
    """

    def __init__(
        self,
        fn: Callable[[Any, Any], jax.Array],
        params: Any,
        batches: Sequence[Any],
        key: jax.Array,
        samples: int | None = None,
        likelihood: str = "softmax",
        *,
        only: str | Sequence[str] | None = None,
    ) -> None:
        """See the class."""
        curve, batches = _curves("Fisher", likelihood)[1], listed("Fisher", batches)
        require_key("Fisher", key)
        if isinstance(samples, str):
            raise binding_error(
                "Fisher", "bad samples", f"samples={samples!r}", "a number of labels", f"write likelihood={samples!r}"
            )
        if samples is not None:
            require_count("Fisher", "samples", samples, 1)
        require_arrays("Fisher", params, batches, key)
        arrays = _arrays("Fisher", params, batches, only)
        size = sum(x.size for x in arrays.leaves.values())
        if samples is not None and samples < _PER_DIMENSION * size:
            warn(
                f"Fisher: {samples:,} labels for {size:,} parameters, fewer than {_PER_DIMENSION} each: small "
                f"eigenvalues come out too small; pass samples={_PER_DIMENSION * size:_}, or none for that number"
            )
        # One batch of outputs at a time is in memory.
        rows = sum(math.prod(shape[:-1]) for shape in _output_shapes("Fisher", fn, arrays))
        each = max(1, -(-(samples or _PER_DIMENSION * size) // rows))
        rng, run = np.random.default_rng(np.asarray(jax.random.key_data(key)).ravel()), jax.jit(with_hash(fn))
        draw = _label_shares if likelihood == "softmax" else _noise_moments
        labels = [jnp.asarray(draw(run(arrays.params, batch), each, rng), self._of(arrays)) for batch in batches]
        super().__init__("Fisher", _Rule(with_hash(fn), curve), arrays._replace(labels=labels))
        self.samples = each * rows

    @staticmethod
    def _of(arrays: _Arrays) -> Any:
        return jnp.result_type(*arrays.leaves.values())


class EmpiricalFisher(Operator):
    """The mean of s·sᵀ over the labels of the data, with the score s. It is no Fisher information.

    The Fisher information takes labels that the model draws. This matrix depends on how far outputs are from labels.

    Args:
      fn: (params, batch) → outputs (…, classes), or (…, outputs). It is compiled as by `jax.jit`: a later change of a
        global or an attribute that it reads is not seen.
      params: the point; leaves of lower precision than float32 are converted to float32.
      batches: values that `fn` accepts.
      labels: one array per batch: classes (…) for "softmax", targets (…, outputs) for "gaussian".
      likelihood: "softmax", or "gaussian" of variance 1.
      only: path pattern of the selected leaves, as for `Hessian`.

    Raises:
      ValueError: no batch; labels that do not fit the batches, or are no integers for "softmax"; a path that no leaf
        has; another likelihood.

    >>> fn = lambda p, x: x @ p["w"]
    >>> x, labels = jnp.ones((3, 1)), jnp.zeros(3, int)
    >>> fisher = go.measure.EmpiricalFisher(fn, {"w": jnp.zeros((1, 2))}, [x], [labels])
    >>> fisher.dense()
    Array([[ 0.25, -0.25],
           [-0.25,  0.25]], dtype=float32)

    Reference: Kunstner, Balles and Hennig 2019, on the difference from the Fisher information.
    """

    def __init__(
        self,
        fn: Callable[[Any, Any], jax.Array],
        params: Any,
        batches: Sequence[Any],
        labels: Sequence[Any],
        likelihood: str = "softmax",
        *,
        only: str | Sequence[str] | None = None,
    ) -> None:
        """See the class."""
        curve, batches = _curves("EmpiricalFisher", likelihood)[2], listed("EmpiricalFisher", batches)
        labels = listed("EmpiricalFisher", labels, "labels")
        arrays = _arrays("EmpiricalFisher", params, batches, only)
        if len(labels) > len(batches):
            raise binding_error(
                "EmpiricalFisher", "labels without a batch",
                f"{len(labels)} arrays for {counted(len(batches), 'batch', 'batches')}",
                "one array of labels per batch", "pass one array of labels per batch",
            )
        for number, outputs in enumerate(_output_shapes("EmpiricalFisher", fn, arrays)):
            expected = outputs[:-1] if likelihood == "softmax" else outputs
            shape = jnp.shape(labels[number]) if number < len(labels) else None
            if shape != expected:
                raise binding_error(
                    "EmpiricalFisher", f"labels do not fit batch {number}", "none" if shape is None else f"{shape}",
                    f"an array of shape {expected}", "pass one array of labels per batch",
                )
            if likelihood == "softmax" and not jnp.issubdtype(kind := jnp.asarray(labels[number]).dtype, jnp.integer):
                raise binding_error(
                    "EmpiricalFisher", f"labels that are no classes in batch {number}", f"{kind}", "integers",
                    "pass [jnp.asarray(x, int) for x in labels]",
                )
            if jnp.iscomplexobj(labels[number]):
                raise binding_error(
                    "EmpiricalFisher", f"complex labels for batch {number}", f"{jnp.result_type(labels[number])}",
                    "real numbers", "pass real and imaginary parts as outputs of their own",
                )
            if likelihood == "softmax" and not isinstance(labels[number], jax.core.Tracer):
                classes, values = outputs[-1], np.asarray(labels[number])
                if not ((0 <= values) & (values < classes)).all():
                    raise binding_error(
                        "EmpiricalFisher", f"labels that are no classes in batch {number}",
                        f"numbers from {values.min()} to {values.max()}", f"numbers from 0 to {classes - 1}",
                        "leave padded positions out of what fn returns and of the labels",
                    )
        super().__init__("EmpiricalFisher", _Rule(with_hash(fn), curve), arrays._replace(labels=labels))


class Quotient(Operator):
    """The result of `quotient_fisher`: an operator at one point of an orbit, on the vectors perpendicular to the orbit.

    These vectors form a space of `dim` dimensions. Products, `lanczos` and `trace` write them with all d entries;
    products lie in the space again. `dense` and `eigenvalues` use the orthonormal basis `basis()` of the space, in
    which the matrix has `dim` rows.

    Attributes:
      dim: d minus the number of dimensions of the orbit. It is computed from a dense matrix of d rows, when it is read
        for the first time.
    """

    def __init__(self, name: str, rule: _Rule, arrays: _Arrays, enter: Callable[[Any], Any]) -> None:
        """See `quotient_fisher`."""
        super().__init__(name, rule, arrays)
        self._enter = enter
        self._basis: jax.Array | None = None

    @property
    def dim(self) -> int:
        """See the class."""
        return len(self.basis())

    def basis(self) -> jax.Array:
        """An orthonormal basis of the vectors perpendicular to the orbit, (dim, d)."""
        if self._basis is None:
            if self.shape[0] > _MOST:
                raise binding_error(
                    self.name, "too large for a basis", f"{self.shape[0]:,} rows", f"at most {_MOST:,}",
                    "take .lanczos(key, steps)",
                )
            eye = jnp.eye(self.shape[0], dtype=self._dtype)
            rows = [eye[at : at + _CHUNK] for at in range(0, len(eye), _CHUNK)]
            across = [
                jax.vmap(self._flat)(_across_all(self._rule, jax.vmap(self._split)(x), self._arrays)) for x in rows
            ]
            # `along` is Rᵀ, where R projects onto the tangents of the orbit.
            along = self._finite(eye - jnp.concatenate(across)).astype(np.float64)
            # The singular values of a projection are 0 or at least 1. The value 0 belongs to vectors perpendicular to
            # the orbit.
            sizes, right = singular_vectors(along)
            self._basis = jnp.asarray(right[sizes < 0.5], self._dtype)
        return self._basis

    def dense(self) -> jax.Array:
        """The matrix in the basis `basis()`, (dim, dim)."""
        basis = self.basis()
        matrix = basis @ (self @ basis.T)
        return 0.5 * (matrix + matrix.T)

    def enter(self, tangent: Any) -> jax.Array:
        """Moves a tangent from the given parameters to the operator's point, and makes it perpendicular to the orbit.

        Args:
          tangent: a tree like the parameters, such as a step.

        Returns:
          A vector (d,). It is the same for all weights of one function, if the tangents move with the weights.

        Raises:
          ValueError: a tree that does not fit; a user's gauge without the method `algebra`; channels or heads of so
            different sizes that the part along the orbit is not found.
        """
        entered = self.ravel(self._enter(tangent))
        across = self._flat(_perpendicular(self._rule, self._split(entered), self._arrays))
        if not isinstance(across, jax.core.Tracer):
            require_solved(self.name, across, entered, self._arrays.leaves)
        return across

    def _probe(self, key: jax.Array, draw: Callable[..., jax.Array], arrays: _Arrays) -> jax.Array:
        return self._flat(_perpendicular(self._rule, self._split(super()._probe(key, draw, arrays)), arrays))

    def _most_steps(self) -> int:
        # The perpendicular vectors have this many dimensions, or more if gauges share directions. Lanczos vectors
        # beyond all dimensions would be roundoff.
        gauges = product(self._rule.gauges or ())
        return max(1, self.shape[0] - gauges.dim(self._arrays.params))


def quotient_fisher(operator: Operator, gauges: Gauges, at: str = "balanced") -> Quotient:
    """Restricts a Fisher operator to the vectors perpendicular to the orbit, at one point of the orbit.

    Its eigenvalues are those of the given operator at that point, without the zeros that the gauges explain. They are
    the same for all weights of one function, because all of these have the same such point (up to rotations).

    Args:
      operator: a `GGN`, `Fisher` or `EmpiricalFisher`. A `Fisher` keeps the labels that it has drawn.
      gauges: a gauge or a sequence of them. They must bind selected leaves alone.
      at: "balanced", the point of least norm, or "slice", where the anchors have norm 1. If a channel dies, both of its
        sides go to zero at the balanced point, and its eigenvalues with them. At the slice point the anchor keeps its
        norm, so that the eigenvalues for changes of the other side do not fall.

    Returns:
      The operator. A product with a vector (d,) is perpendicular to the orbit. `dense()` and `eigenvalues()` use an
      orthonormal basis of `dim` vectors, the rows of `basis()`. `enter(tangent)` moves a tangent to the operator's
      point.

    Raises:
      ValueError: a `Hessian`, which away from a minimum is not zero along orbits; gauges that bind leaves which are not
        selected; heads from which no frame can be read, such as padded heads of `head_linear`; bindings that do not
        fit; another `at`.

    >>> fn = lambda p, x: jax.nn.relu(x @ p["up"]) @ p["down"]
    >>> params = {"up": jnp.full((1, 1), 9.0), "down": jnp.full((1, 1), 1.0)}
    >>> ggn = go.measure.GGN(fn, params, [jnp.ones((4, 1))], "gaussian")
    >>> relu = go.rescale({"up": "_ channel"}, {"down": "channel _"})
    >>> # At the balanced point up = down = 3: 3² + 3². At the slice point up = 1, down = 9.
    >>> balanced = go.measure.quotient_fisher(ggn, relu)
    >>> slice_point = go.measure.quotient_fisher(ggn, relu, "slice")
    >>> [round(float(x.eigenvalues()[0]), 3) for x in (balanced, slice_point)]
    [18.0, 82.0]

    Reference: DDC §2.1, the quotient Fisher information. As in the paper, the vectors are perpendicular to the orbit.
    This differs from `Gauge.horizontal`, whose results are tangents of the slice, which need not be perpendicular.
    """
    group, name = product(gauges), "quotient_fisher"
    check_at(name, at)
    _require_operator(name, operator)
    if operator._rule.curve is None or isinstance(operator, Quotient):
        raise binding_error(
            name, "no operator with zeros along orbits", operator.name, "a GGN, Fisher or EmpiricalFisher",
            "pass go.measure.GGN(fn, params, batches)",
        )
    params = operator._arrays.params
    s = group._bound(params).slice
    outside = [path for path in s.added if path not in operator.paths]
    if outside:
        raise binding_error(
            name, f"a gauge moves '{outside[0]}', which is not selected", f"the leaves {', '.join(operator.paths[:6])}",
            "all leaves that the gauges bind", "leave out `only`, or that gauge",
        )
    require_frame(name, group, params)
    point = point_of(group, at, params)
    dtypes = {path: x.dtype for path, x in operator._arrays.leaves.items()}
    point = {path: x.astype(dtypes[path]) for path, x in point.items()}

    def enter(tangent: Any) -> Any:
        inside = tangent_of(group, at, params, tangent)
        return with_leaves(tangent, {path: x.astype(dtypes[path]) for path, x in inside.items()})

    arrays = operator._arrays._replace(params=with_leaves(params, point), leaves=operator._arrays.leaves | point)
    return Quotient(f"{name} of {operator.name}", dataclasses.replace(operator._rule, gauges=group), arrays, enter)


def directional_fisher(operator: Operator, direction: Any) -> jax.Array:
    """Returns the curvature along one direction u: ⟨u, F·u⟩/⟨u, u⟩, with the operator F.

    Args:
      operator: any operator of this module. For a `Quotient`, the direction is moved to the operator's point, and its
        part along the orbit is removed, so that all weights of one function give the same number.
      direction: a tree like the operator's parameters, such as a step; leaves that are not selected do not count.

    Returns:
      A number; 0 for a direction of zero.

    Raises:
      ValueError: a tree that lacks a selected leaf, or has one of another shape.

    >>> fn = lambda p, x: x @ p["w"]
    >>> params, x = {"w": jnp.ones((2, 1))}, jnp.diag(jnp.array([1.0, 3.0]))
    >>> ggn = go.measure.GGN(fn, params, [x], "gaussian")
    >>> float(go.measure.directional_fisher(ggn, {"w": jnp.array([[0.0], [2.0]])}))
    4.5

    Reference: DDC §5.8, which measures this number before and after one step.
    """
    _require_operator("directional_fisher", operator)
    vector = operator.enter(direction) if isinstance(operator, Quotient) else operator.ravel(direction)
    most = jnp.max(jnp.abs(vector), initial=0.0)
    vector = vector / jnp.where(most == 0, 1.0, most)  # so that no square overflows
    square = vector @ vector
    zero = square == 0  # false for NaN, so that NaN is passed on
    return jnp.where(zero, 0.0, (vector @ (operator @ vector)) / jnp.where(zero, 1.0, square))


def _require_operator(name: str, operator: Any) -> None:
    if not isinstance(operator, Operator):
        raise binding_error(
            name, "no operator", kind_of(operator), "a GGN, Fisher, EmpiricalFisher or Hessian",
            "pass go.measure.GGN(fn, params, batches)")


# Arrays -----------------------------------------------------------------------------------------------------


def _arrays(name: str, params: Any, batches: Sequence[Any], only: str | Sequence[str] | None) -> _Arrays:
    """Collects the arrays of an operator, with an empty list of labels; `only` selects the leaves."""
    if not batches:
        raise binding_error(name, "no batches", "an empty list", "at least one batch", "pass a list of batches")
    require_traceable(name, params)
    require_batches(name, batches)
    leaves = {path: in_single_or_better(x) for path, x in real_leaves(name, params).items()}
    patterns = only if only is None else [only] if isinstance(only, str) else listed(name, only, "only")
    if patterns is not None and not all(isinstance(pattern, str) for pattern in patterns):
        raise binding_error(name, "only is no list of paths", f"only={only!r:.60}", "paths of leaves",
                            "pass only=['up']")
    selected = leaves
    if patterns is not None:
        hits = {pattern: [path for path in leaves if match(name, pattern, path) is not None] for pattern in patterns}
        for pattern, paths in hits.items():
            if not paths:
                raise binding_error(
                    name, f"no leaf matches '{pattern}'", f"leaves {', '.join(list(leaves)[:6])}", "a path of a leaf",
                    "write a path, with {i} for a part that varies",
                )
        chosen = {path for paths in hits.values() for path in paths}
        selected = {path: x for path, x in leaves.items() if path in chosen}
    if not any(x.size for x in selected.values()):
        raise binding_error(
            name, "no entries to differentiate by", f"empty leaves: {', '.join(list(selected)[:6]) or 'none'}",
            "a floating-point leaf with entries", "pass parameters, or select others",
        )
    return _Arrays(with_leaves(params, leaves), selected, list(batches), [])


def _output_shapes(name: str, fn: Callable[[Any, Any], Any], arrays: _Arrays) -> list[tuple[int, ...]]:
    """Returns the shape of the outputs for each batch. Raises ValueError for outputs without rows or columns."""
    require_function(name, "fn", fn, "params, batch")
    shapes = []
    for number, batch in enumerate(arrays.batches):
        outputs = jax.eval_shape(fn, arrays.params, batch)
        shape = getattr(outputs, "shape", ())
        if not shape or not math.prod(shape):
            raise binding_error(
                name, f"no outputs for batch {number}", f"an array of shape {shape}" if shape else f"{outputs}",
                "an array (…, outputs) of one row or more", "leave out empty batches, and let fn return one array",
            )
        if not jnp.issubdtype(outputs.dtype, jnp.floating):
            raise binding_error(
                name, f"outputs that are no real numbers for batch {number}", f"{outputs.dtype}", "a floating dtype",
                "let fn return logits, or what a regression predicts",
            )
        shapes.append(shape)
    return shapes


def _label_shares(outputs: jax.Array, each: int, rng: np.random.Generator) -> np.ndarray:
    """Draws `each` labels per row of logits, and returns the share of each class, (…, classes)."""
    flat = np.asarray(outputs).reshape(-1, outputs.shape[-1])
    if not np.all(np.isfinite(flat.max(1))):
        raise binding_error(
            "Fisher", "outputs that are not finite", "NaN or infinity in a row", "rows whose largest logit is finite",
            "look for a leaf or a batch in which there is one; −inf for some classes is allowed")
    shares = np.empty(flat.shape, np.float32 if flat.dtype != np.float64 else np.float64)
    step = max(1, _ROWS // flat.shape[1])
    for at in range(0, len(flat), step):
        logits = flat[at : at + step].astype(np.float64)
        p = np.exp(logits - logits.max(1, keepdims=True))
        shares[at : at + step] = rng.multinomial(each, p / p.sum(1, keepdims=True)) / each
    return shares.reshape(outputs.shape)


def _noise_moments(outputs: jax.Array, each: int, rng: np.random.Generator) -> np.ndarray:
    """Draws `each` standard normal vectors ε per row, and returns the mean of ε·εᵀ, (…, outputs, outputs)."""
    *rows, size = outputs.shape
    if each < size:
        noise = rng.standard_normal((*rows, size, each))
    else:  # Bartlett 1933: the sum of `each` ε·εᵀ has the distribution of L·Lᵀ for a random triangular matrix L
        noise = np.tril(rng.standard_normal((*rows, size, size)), -1)
        at = np.arange(size)
        noise[..., at, at] = np.sqrt(rng.chisquare(each - at, (*rows, size)))
    return noise @ np.swapaxes(noise, -1, -2) / each


def _matfree(module: str) -> Any:
    try:
        return importlib.import_module(f"matfree.{module}")  # an optional dependency, for estimates of the trace alone
    except ImportError:
        raise ImportError(
            "fisher: estimates of the trace need matfree, which is not installed\n"
            '  remedy:   pip install "gauge_optax[measure]", or take .dense()'
        ) from None
