"""How much of a preconditioned step is along the orbits, and which property of the preconditioner causes it.

The gradient g of an invariant loss has no part along an orbit. Adam's step D⊙g, with the entrywise preconditioner D,
has one, because D differs from entry to entry: the step *leaks*. The leakage is linear in D. D is the sum of three
terms: its mean over a channel or head, the difference of each tensor's mean from that mean, and the difference of each
entry from its tensor's mean. The functions below return the leakage of each term. All these numbers use the Euclidean
metric, as two lemmas of the paper on Dead-Direction Conditioners (DDC) do: Lemma 7 for scales, Lemma 10 for rotations.
`motion.vertical_motion` measures instead how a step changes the coordinate that a slice keeps constant, and
`second_order` has the part that a step of finite size adds.
"""

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from gauge_optax.errors import binding_error, kind_of
from gauge_optax.gauges.gauge import Element, Gauges, product
from gauge_optax.linalg import lyapunov, near_power_of_two, safe_divide, skew, unit_and_size
from gauge_optax.parts.heads import BASIS, PLANE, Planes, Rotation
from gauge_optax.parts.part import Part
from gauge_optax.parts.sizes import Factor
from gauge_optax.transformation import in_computing_dtype, require_choice, require_function, require_real

Arrays = Mapping[str, jax.Array]

RESCALE, ROTATION = "rescale_leakage", "rotation_leakage"
"""The names of the functions that compute Lemma 7 and Lemma 10."""


@functools.singledispatch
def lemma_of(part: Part[Any]) -> str | None:
    """The name of the function that computes the lemma about leakage along this kind of part; None without a lemma.

    A rotation of the residual stream has none. It acts on kernels through the norms' scales, and under LayerNorm it
    keeps the vector of ones. The lemma and `Orbit.rates` assume that the tangents are W·A for every skew matrix A,
    which is then false.
    """
    return None


@lemma_of.register
def _of_factors(part: Factor) -> str:
    return RESCALE


@lemma_of.register(Rotation)
@lemma_of.register(Planes)
def _of_turns(part: Part[Any]) -> str:
    return ROTATION


class StepLeakage(NamedTuple):
    """The motion of a step along an orbit; both fields have the structure of the gauge's element.

    A *generator* is a change of log α for scales, a skew matrix for rotations of heads, or a change of an angle. Each
    generator a gives one tangent of the orbit.

    Attributes:
      measured: for every generator a, Σ a·measured is the inner product of the step with the tangent that a gives.
      rate: the generator whose tangent is the step's vertical part. If θ moves by −lr·step, it moves along the orbit by
        −lr·rate.
    """

    measured: Element
    rate: Element


class RescaleLeakage(NamedTuple):
    """Leakage along a scale's orbit, one number per channel; measured = of_gradient + per_tensor + residual.

    Attributes:
      measured: Σ_up θ·D·g − p·Σ_down θ·D·g, with the gauge's degree p. To first order −lr·measured is the change of
        ½(‖up‖² − p·‖down‖²), which gradient flow conserves.
      of_gradient: the leakage due to the mean of D over the channel. It is zero for the gradient of an invariant loss.
      per_tensor: the leakage due to the differences between D's mean over each tensor and its mean over the channel.
      residual: the leakage due to the differences between each entry of D and its tensor's mean. With means="entries" a
        tensor of n entries contributes n·Cov(θ·g, D), times 1 for `up` and −p for `down`.
      rate: the step's motion along the orbit as a rate of log α, see `StepLeakage`.
    """

    measured: Element
    of_gradient: Element
    per_tensor: Element
    residual: Element
    rate: Element


class RotationLeakage(NamedTuple):
    """Leakage along a head's orbit, a skew matrix per head or a number per plane.

    As for scales, measured = of_gradient + per_tensor + residual.

    Attributes:
      measured: skew(S), where S is the sum of θᵀ(D⊙g) over the head's tensors; for a plane S₀₁ − S₁₀.
      of_gradient: the leakage due to the mean of D over the head. It is zero for the gradient of an invariant loss.
      per_tensor: the leakage due to the differences between D's mean over each tensor and its mean over the head.
      residual: the leakage due to the differences between each entry of D and its tensor's mean.
      covariance: the part of `residual` due to differences between each entry of D and its column's mean. With
        means="entries", a tensor of n rows contributes skew(S), where S_ij is n times the covariance over rows of
        θ_i·g_j and D_j, for columns i and j.
      bound: Lemma 10's bound on the Frobenius norm of `measured`, one number per head or plane.
      rate: the step's motion along the orbit, as a skew matrix or as the rate of an angle; see `StepLeakage`.
    """

    measured: Element
    of_gradient: Element
    per_tensor: Element
    residual: Element
    covariance: Element
    bound: Element
    rate: Element


class Orbit:
    """One gauge's orbit through one point, in the Euclidean metric.

    Everything is computed from the derivative of the gauge's action at the identity, so that no kind of gauge needs a
    formula here. Generators and inner products have the structure of an element: one array per copy of the gauge (one
    layer, say), with a number per channel or plane, or a matrix per head.

    Args:
      caller: the name of the public function, for messages.
      gauges: one gauge.
      params: the point.
      lemmas: the results of `lemma_of` that are accepted. Any other gauge, or several gauges, raise ValueError.

    The weights of each channel, head or plane are divided by a number of about their size, because float32 cannot hold
    the squares of 1e-20 or 1e20. Tangents are linear in the weights, so that results are multiplied or divided by these
    numbers again. The numbers are powers of two, so that this rounds no result.

    Attributes:
      named: copy → names of the axes that count its channels, heads or planes.
      blocks: copy → the blocks that it moves.
      vectors: a function from a tangent or cotangent tree to its leaves that the gauge moves, path → array.
    """

    def __init__(self, caller: str, gauges: Gauges, params: Any, lemmas: tuple[str, ...]) -> None:
        parts = product(gauges).gauges
        bounds = [part._bound(params) for part in parts]
        found = {lemma_of(part) for b in bounds for copies in b.copies for copy in copies for part in copy.parts}
        if len(parts) != 1 or not found <= set(lemmas):
            raise binding_error(
                caller, "another kind of gauge", ", ".join(part.name for part in parts) or "no gauges",
                "one gauge of the kind that this measure reads",
                "pass one gauge at a time: scales have `rescale_leakage`, head_rotation and rope_torus have "
                "`rotation_leakage`, both `step_leakage`; other gauges have none",
            )
        (b,) = bounds
        (copies,) = b.copies
        self.named = {copy.key: copy.named for copy in copies}
        self.blocks = {copy.key: copy.blocks for copy in copies}
        self.vectors, identity = b.slice.vectors, parts[0].identity(params)
        point, self._sizes = self.units(b.slice.values(params))

        def act(element: Element) -> Arrays:
            return b.slice.act(b.elements(element), point)

        _, self._push = jax.linearize(act, identity)
        _, self._pull = jax.vjp(act, identity)
        self._matrices = {key for key, x in identity.items() if x.ndim > len(self.named[key])}
        # `push` maps a generator to its tangent of the orbit, and `pull` maps a vector to its inner products with these
        # tangents. The generator 1 per channel gives the tangents themselves. For a head, the identity matrix gives W.
        unit = {key: x if key in self._matrices else jnp.ones_like(x) for key, x in identity.items()}
        self._gram = self._pull(self._push(unit))[0]  # ‖tangent‖² per channel or plane, WᵀW per head

    def units(self, vectors: Arrays) -> tuple[dict[str, jax.Array], Element]:
        """Divides the entries of each channel, head or plane by one number: a power of two of about their largest size.

        Returns:
          The quotients, with zeros for entries that the gauge does not move; and the numbers, 1 for a channel of zeros.
        """
        sizes, shares = dict[str, jax.Array](), dict.fromkeys(vectors, jnp.zeros(()))
        for key, blocks in self.blocks.items():
            sums = sum((b.total(self.named[key], jnp.abs(vectors[b.path])) for b in blocks), jnp.zeros(()))
            sizes[key] = near_power_of_two(sums)
            for b in blocks:
                share = b.spread(self.named[key], 1.0 / sizes[key])
                shares[b.path] = shares[b.path] + vectors[b.path] * share
        return shares, sizes

    def _pairing(self, step: Arrays) -> Element:
        pulled = self._pull(dict(step))[0]
        # The derivative by a rotation matrix may be any matrix. Generators are skew, so that only its skew part counts
        # in inner products with them.
        return {key: skew(x) if key in self._matrices else x for key, x in pulled.items()}

    def pairing(self, step: Arrays) -> Element:
        """Inner products of a step with the orbit's tangents, one per generator; a skew matrix for full rotations."""
        return _times(self._pairing(step), self._sizes)

    def rates(self, step: Arrays) -> Element:
        """The generator of a step's vertical part: by how much the step moves log α, the head's basis or the angle."""
        pairing = self._pairing(step)
        heads = [key for key in pairing if key in self._matrices]
        # The tangent W·A that is nearest to the step solves WᵀW·A + A·WᵀW = 2·pairing.
        turns = [lyapunov(self._gram[key], pairing[key]) for key in heads]
        numbers = {key: safe_divide(x, self._gram[key]) for key, x in pairing.items() if key not in heads}
        inverse = {key: 1.0 / size for key, size in self._sizes.items()}
        return _times(numbers | dict(zip(heads, turns, strict=True)), inverse)

    def norms(self, element: Element, along: bool = False) -> Element:
        """The Frobenius norm of an element, one number per channel, head or plane.

        Args:
          element: an array per copy.
          along: if True, the element is a generator, and the norm is that of the vertical vector that it generates.
        """
        axes = {key: tuple(range(len(self.named[key]), x.ndim)) for key, x in element.items()}
        units = {key: unit_and_size(x, axes[key]) for key, x in element.items()}
        unit = {key: x for key, (x, _) in units.items()}
        other = self._pull(self._push(unit))[0] if along else unit
        sums = {key: jnp.sum(x * other[key], axes[key]) for key, x in unit.items()}
        roots = {key: jnp.sqrt(jnp.maximum(x, 0.0)) for key, x in sums.items()}
        sizes = {key: jnp.squeeze(size, axes[key]) for key, (_, size) in units.items()}
        return _times(_times(roots, sizes), self._sizes) if along else _times(roots, sizes)


def _times(element: Element, sizes: Element) -> Element:
    """Multiplies each channel's, head's or plane's part of an element by its own number."""
    return {key: x * sizes[key].reshape(sizes[key].shape + (1,) * (x.ndim - sizes[key].ndim))
            for key, x in element.items()}


def step_leakage(gauge: Gauges, params: Any, step: Any) -> StepLeakage:
    """Measures the leakage of any optimizer's step: its motion along one gauge's orbits.

    Args:
      gauge: one gauge of scales, `head_rotation` or `rope_torus`.
      params: the point.
      step: a tangent, the output of any `scale_by_…`; θ moves by −lr·step.

    Returns:
      Inner products with the orbit's tangents, and the generator of the vertical part.

    Raises:
      ValueError: several gauges or one of another kind, bindings that do not fit.

    >>> gauge = go.rescale({"up": "_ _"}, {"down": "_ _"})
    >>> params = {"up": jnp.full((2, 2), 2.0), "down": jnp.ones((2, 2))}
    >>> float(go.measure.step_leakage(gauge, params, params).measured[""])  # 4·2² − 4·1²
    12.0
    """
    orbit = Orbit("step_leakage", gauge, params, (RESCALE, ROTATION))
    tangent = orbit.vectors(step)
    return StepLeakage(orbit.pairing(tangent), orbit.rates(tangent))


def rescale_leakage(
    gauge: Gauges, params: Any, gradient: Any, preconditioner: Any, means: str = "entries"
) -> RescaleLeakage:
    """Lemma 7: how much a coordinate-wise preconditioner leaks along a scale's orbits, and which of its terms leaks.

    Args:
      gauge: one `rescale`, `norm_scale` or `scale_invariant`.
      params: the point.
      gradient: a cotangent. It may be a first moment; the vertical part of that moment then shows in `of_gradient`.
      preconditioner: D, same structure, every leaf broadcastable to the parameter's shape.
      means: how D is averaged over a tensor. "entries" is the lemma's plain mean. "gradient" weights entries by g²,
        which gives the number d with the least ‖D⊙g − d·g‖. Use "gradient" if there are entries without gradient: under
        Adam they have D = 1/eps, about 1e8. In a plain mean this number dominates, and it appears with opposite signs
        in `per_tensor` and `residual` (*measured*: 1e6 times the leakage, on a tiny model with two dead units).

    Returns:
      The leakage and its terms, each in the structure of the gauge's element: one number per channel.

    Raises:
      ValueError: several gauges or one of another kind, other means, bindings that do not fit.

    >>> gauge = go.rescale({"up": "_ channel"}, {"down": "channel _"})
    >>> params = {"up": jnp.array([[1.0], [1.0]]), "down": jnp.array([[2.0]])}
    >>> # The gradient of a rescale-invariant loss: 1·1 + 1·3 = 2·2.
    >>> gradient = {"up": jnp.array([[1.0], [3.0]]), "down": jnp.array([[2.0]])}
    >>> leakage = go.measure.rescale_leakage(
    ...     gauge, params, gradient, {"up": jnp.array([[1.0], [2.0]]), "down": 1.0})
    >>> [float(x[""][0]) for x in leakage[:4]]  # 7 − 4 = 0 + (1.5 − 1)·4 + 2·Cov
    [3.0, 0.0, 2.0, 1.0]

    Reference: DDC Lemma 7, Remark 9. A block is here the part of a leaf that belongs to the channel. Block b has the
    weights θ_b and the mean d̄_b of D; d̄ is the mean over all blocks; w_b is 1 for `up` and −p for `down`. Then
    `per_tensor` is Σ_b w_b·(d̄_b − d̄)·⟨θ_b, g_b⟩, for any degree p and any number of blocks. With two blocks and a
    horizontal g this is the lemma's (d̄_up − d̄_down)·⟨θ_up, g_up⟩. The lemma says that it is zero if and only if the
    weights are aligned so that d̄_up = d̄_down, but it is also zero if ⟨θ_up, g_up⟩ = 0.
    """
    fields = _lemma(RESCALE, gauge, params, gradient, preconditioner, means)
    return RescaleLeakage(**fields)


def rotation_leakage(
    gauge: Gauges, params: Any, gradient: Any, preconditioner: Any, means: str = "entries"
) -> RotationLeakage:
    """Lemma 10: how much a coordinate-wise preconditioner leaks along a head's orbit, and which of its terms leaks.

    Args:
      gauge: one `head_rotation` or `rope_torus`.
      params: the point.
      gradient: a cotangent. It may be a first moment; the vertical part of that moment then shows in `of_gradient`.
      preconditioner: D, same structure, every leaf broadcastable to the parameter's shape.
      means: how D is averaged over a tensor, "entries" or "gradient"; see `rescale_leakage`.

    Returns:
      The leakage and its terms in the structure of the gauge's element: skew matrices `(*named, d_h, d_h)`, which are
      ½(S − Sᵀ) with S = Σ θᵀ(D⊙g), or numbers `(*named, d_h/2)` for a torus.

    Raises:
      ValueError: several gauges or one of another kind, other means, bindings that do not fit.

    >>> gauge = go.head_rotation({"q": "_ basis", "k": "_ basis"})
    >>> params = {"q": jnp.array([[1.0, 0.0]]), "k": jnp.array([[0.0, 1.0]])}
    >>> gradient = {"q": jnp.array([[0.0, 2.0]]), "k": jnp.array([[2.0, 0.0]])}
    >>> leakage = go.measure.rotation_leakage(gauge, params, gradient, {"q": 3.0, "k": 1.0})
    >>> [float(x[""][0, 1]) for x in leakage[:4]]  # (3 − 1)·skew(qᵀg)₀₁
    [2.0, 0.0, 2.0, 0.0]

    Reference: DDC Lemma 10; here also for grouped queries and tori. The lemma writes its residual as a covariance of
    column pairs. That holds if deviations of D have mean zero in every column. The lemma's deviations are from a
    tensor's mean, and have mean zero over the tensor only. The difference, `residual` − `covariance`, is the sum over
    tensors of skew(θᵀg·diag(c − d̄)), where c has the means of D over columns, and d̄ is the mean over the tensor.
    """
    fields = _lemma(ROTATION, gauge, params, gradient, preconditioner, means)
    return RotationLeakage(**fields)


def _lemma(
    lemma: str, gauge: Gauges, params: Any, gradient: Any, preconditioner: Any, means: str
) -> dict[str, Element]:
    """Computes the fields of a lemma, name → element: splits D into its terms, and measures each term's leakage."""
    require_choice(lemma, "means", means, ("entries", "gradient"))
    orbit = Orbit(lemma, gauge, params, (lemma,))
    gradients, d = orbit.vectors(gradient), orbit.vectors(preconditioner)
    d = {path: jnp.broadcast_to(d[path], g.shape) for path, g in gradients.items()}
    shares, _ = orbit.units(gradients)
    weights = {path: jnp.square(shares[path]) if means == "gradient" else jnp.ones_like(g)
               for path, g in gradients.items()}

    def average(named: Mapping[str, tuple[str, ...]], joint: bool = False) -> dict[str, jax.Array]:
        """Averages D over each block's entries of one channel, head or plane; with `joint`, over all blocks at once."""
        out = dict.fromkeys(d, jnp.zeros(()))
        for key, blocks in orbit.blocks.items():
            counts = [b.total(named[key], weights[b.path]) for b in blocks]
            sums = [b.total(named[key], weights[b.path] * d[b.path]) for b in blocks]
            if joint:
                counts, sums = ([sum(x[1:], x[0])] * len(blocks) for x in (counts, sums))
            for block, total, count in zip(blocks, sums, counts, strict=True):
                out[block.path] = out[block.path] + block.spread(named[key], safe_divide(total, count))
        return out

    overall, by_tensor = average(orbit.named, joint=True), average(orbit.named)
    step = {path: d[path] * g for path, g in gradients.items()}
    between = {path: (by_tensor[path] - overall[path]) * g for path, g in gradients.items()}
    fields = {
        "measured": orbit.pairing(step),
        "of_gradient": orbit.pairing({path: overall[path] * g for path, g in gradients.items()}),
        "per_tensor": orbit.pairing(between),
        "residual": orbit.pairing({path: (d[path] - by_tensor[path]) * g for path, g in gradients.items()}),
        "rate": orbit.rates(step),
    }
    if lemma == ROTATION:
        columns = {key: (*(name for name in named if name != PLANE), BASIS) for key, named in orbit.named.items()}
        by_column = average(columns)
        fields["covariance"] = orbit.pairing({p: (d[p] - by_column[p]) * g for p, g in gradients.items()})
        # By the triangle inequality, ‖measured‖ is at most the sum of the norms of its terms. Here each block's part of
        # `per_tensor` is one term. With two blocks and a horizontal gradient, the norms of both parts add up to the
        # lemma's |d̄_Q − d̄_K|·‖skew(θ_Qᵀg_Q)‖.
        bounds = [orbit.norms(fields["of_gradient"]), orbit.norms(fields["residual"])]
        for number in range(max(map(len, orbit.blocks.values()))):
            inside = dict.fromkeys(d, jnp.zeros(()))
            for blocks in orbit.blocks.values():
                for block in blocks[number : number + 1]:
                    inside[block.path] = inside[block.path] + block.spread((), jnp.ones(()))
            bounds.append(orbit.norms(orbit.pairing({path: inside[path] * x for path, x in between.items()})))
        fields["bound"] = jax.tree.map(lambda *norms: sum(norms[1:], norms[0]), *bounds)
    return fields


# Along a trajectory -------------------------------------------------------------------------------


def leakage_along(measure: Callable[..., Any], trajectory: Iterable[Sequence[Any]]) -> Any:
    """Computes a measure at every point of a trajectory, and stacks the results along a first axis.

    Args:
      measure: the measure, called as `measure(*point)`. Wrap it in `jax.jit`, because it is called at every point.
      trajectory: points, each a tuple of the measure's arguments. If `measure` is `rescale_leakage` with a given gauge,
        they are (params, gradient, preconditioner).

    Returns:
      The result of `measure`, every array with a first axis over points.

    Raises:
      ValueError: a trajectory without points, or points that are no tuples.

    >>> gauge = go.rescale({"up": "_ _"}, {"down": "_ _"})
    >>> points = [
    ...     ({"up": jnp.full((1, 1), x), "down": jnp.ones((1, 1))},) * 2 for x in (1.0, 2.0)
    ... ]
    >>> measure = jax.jit(lambda params, step: go.measure.step_leakage(gauge, params, step))
    >>> go.measure.leakage_along(measure, points).measured[""].tolist()
    [0.0, 3.0]

    Reference: DDC Remarks 8 and 12.
    """
    results = []
    for point in trajectory if isinstance(trajectory, Iterable) else [trajectory]:
        if not isinstance(point, tuple | list):
            raise binding_error(
                "leakage_along", "a point that is no tuple of arguments", kind_of(point),
                "what the measure takes", "pass [(params, gradient, preconditioner), ...], or [(params,), ...]")
        require_function("leakage_along", "measure", measure, ", ".join(f"x{number}" for number in range(len(point))))
        results.append(measure(*point))
    if not results:
        raise binding_error(
            "leakage_along", "an empty trajectory", "no points", "at least one tuple of what the measure takes",
            "collect points while training; an iterator can be read once only",
        )
    return jax.tree.map(lambda *x: jnp.stack(x), *results)


def predicted_drift(rates: Element, learning_rate: float | jax.Array) -> Element:
    """Returns the motion along the orbits that leakage predicts after every step: −Σ lr·rate.

    Args:
      rates: the field `rate` of a measure's result, with a first axis over steps, which `leakage_along` makes.
      learning_rate: one number, or one per step.

    Returns:
      Running sums over steps, in the structure of `rates`, in float32, or float64 under x64. Compare them with `drift`,
      or for rotations with the running sum of `vertical_motion`.

    Raises:
      ValueError: `rates` without an axis over steps; a learning rate that is no real number, such as a schedule;
        another number of learning rates than of steps.

    >>> go.measure.predicted_drift({"": jnp.array([1.0, 2.0, -1.0])}, 0.5)[""].tolist()
    [-0.5, -1.5, -1.0]

    Reference: DDC Remark 8. Per step, the error of this sum is of second order in lr (`second_order_leakage`).
    """
    given: Any = learning_rate
    if callable(given):
        raise binding_error(
            "predicted_drift", "a learning rate that is no real number", repr(learning_rate),
            "a number, or an array of one per step", "call a schedule first: jax.vmap(schedule)(jnp.arange(steps))")
    require_real("predicted_drift", "learning_rate", learning_rate)

    def accumulated(rate: jax.Array) -> jax.Array:
        if not jnp.ndim(rate) or jnp.shape(learning_rate) not in ((), (1,), jnp.shape(rate)[:1]):
            raise binding_error(
                "predicted_drift", "learning rates that do not belong to these steps",
                f"shape {jnp.shape(learning_rate)} for rates of shape {jnp.shape(rate)}",
                "one number, or one per step, the first axis of the rates", "pass one number, such as 1e-3",
            )
        rate = in_computing_dtype(rate)  # the learning rate is cast to this dtype, which must not be an integer
        sizes = jnp.broadcast_to(jnp.asarray(learning_rate, rate.dtype), rate.shape[:1])
        return -jnp.cumsum(sizes.reshape(-1, *[1] * (rate.ndim - 1)) * rate, axis=0)

    return jax.tree.map(accumulated, rates)
