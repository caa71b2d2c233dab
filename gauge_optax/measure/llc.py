"""The local learning coefficient: how much of the parameter space near a minimum has a low loss.

Near a minimum w* with the loss loss*, the volume of {loss < loss* + ε} falls like ε^λ, up to logarithms. λ is the local
learning coefficient: d/2 at a regular minimum of d parameters, and less at a singular one. Samples from exp(−nβ·loss)
near the minimum have a mean excess loss of λ/nβ, where n is the number of data and β an inverse temperature. They are
drawn by stochastic gradient Langevin dynamics, with a pull back to the minimum:

    Δw = −(lr/2)·(nβ·∇loss(w) + localization·(w − w*)) + √lr·noise

λ itself is the same at all weights of one function. The estimate without gauges is not, because steps, noise and pull
depend on the scale of each leaf. With gauges, the chain starts from the point of least norm on the orbit of w*, and
after every step it moves along the orbit, back to the slice through that point. The pull is then toward the orbit of
w*, noise along orbits has no effect, and all weights of one function get the same number.

Away from a minimum, in mid-training or at a saddle, the mean excess loss does not give λ: the samples find losses below
that of w*, and the number is too small, often negative. To detect this, descents without noise start from w* and from
the end of every chain. If they find losses so far below loss* that the estimate, taken relative to them, would be
larger by more than a quarter, `at_minimum` is False.
References: Lau et al. 2023, arXiv:2308.12108, Eq. (13) and Alg. 1; Watanabe 2009. The names of the arguments are those
of devinterp.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from gauge_optax.binding import in_single_or_better, real_leaves, with_leaves
from gauge_optax.errors import binding_error
from gauge_optax.gauges.gauge import Gauges, Product, product
from gauge_optax.linalg import real_dtype
from gauge_optax.measure._metric import Leaves, stored, ways
from gauge_optax.transformation import (
    listed,
    require_batches,
    require_count,
    require_function,
    require_key,
    require_number,
    require_scalar,
    require_traceable,
    with_hash,
)

_LARGE = 10**7  # with more parameters, chains run one after the other, because each needs memory of its own


class LLC(NamedTuple):
    """Estimates of a local learning coefficient.

    Attributes:
      mean: the mean of the estimates of all chains.
      std: the standard deviation over chains; 0 for one chain.
      per_chain: one estimate per chain, (chains,).
      losses: the loss at every draw, (chains, draws). Check that it does not stay below `initial_loss`, and that it has
        stopped rising at the end: otherwise the estimate is not to be trusted.
      initial_loss: the loss at the given parameters, as the mean over batches.
      lowest_loss: the lowest mean loss over batches that a search found: on a line along the gradient, by a descent
        from the given parameters, or by one from the end of a chain; at most `initial_loss`.
      at_minimum: whether `mean` may be read as a learning coefficient. If a search finds a loss lower than
        `initial_loss`, an estimate relative to it would be larger by n_beta times the fall. True if this increase is at
        most a quarter of `mean`, both for the searches from the given parameters and on average for the descents from
        the ends of chains. False at a saddle, in mid-training, if chains left for a lower basin, and if a chain
        diverges, so that a loss is not finite. True is no proof: a descent takes at most 200 steps, and may not
        get far along directions of a curvature below 1/(200·lr·n_beta).
    """

    mean: jax.Array
    std: jax.Array
    per_chain: jax.Array
    losses: jax.Array
    initial_loss: jax.Array
    lowest_loss: jax.Array
    at_minimum: jax.Array


def llc(
    loss: Callable[[Any, Any], jax.Array],
    params: Any,
    batches: Sequence[Any],
    key: jax.Array,
    gauges: Gauges | None = None,
    *,
    n_beta: float,
    lr: float,
    localization: float = 1.0,
    num_chains: int = 4,
    num_draws: int = 200,
    num_burnin_steps: int = 0,
    num_steps_bw_draws: int = 1,
) -> LLC:
    """Estimates the local learning coefficient at a minimum, by Langevin dynamics.

    Args:
      loss: (params, batch) → scalar, the mean negative log-likelihood of the batch. It is compiled as by `jax.jit`: a
        later change of a global or an attribute that it reads is not seen.
      params: the minimum, floating leaves in float32 or better.
      batches: values that `loss` accepts, all of one structure and of the same shapes. A step takes a random one.
      key: a PRNG key.
      gauges: a gauge or a sequence of them, for the gauge-invariant estimate; None for the plain estimate.
      n_beta: n·β, the number of data times the inverse temperature; Watanabe's choice is n/log n.
      lr: step size of the chain. The chain is stable if lr·n_beta·curvature < 4, and it is exact as lr goes to zero.
      localization: the strength of the pull toward the minimum, or toward its orbit.
      num_chains: the number of independent chains.
      num_draws: the number of losses that are read per chain.
      num_burnin_steps: the number of steps before the first draw.
      num_steps_bw_draws: the number of steps per draw.

    Returns:
      n_beta·(mean loss − loss at the minimum), per chain and as the mean over chains. Both losses of a draw are those
      of its batch, so that differences between batches cancel. If `at_minimum` is False, `mean` is no learning
      coefficient.

    Raises:
      ValueError: a loss that is no scalar; no batch, or batches that differ in shape; counts below 1; an `n_beta` or
        `lr` that is no positive number, or a negative `localization`; bindings that do not fit.

    >>> quadratic = lambda p, x: 0.5 * jnp.mean(jnp.sum((x * p["w"]) ** 2, -1))
    >>> estimate = go.measure.llc(
    ...     quadratic, {"w": jnp.zeros(4)}, [jnp.ones((1, 4))], jax.random.key(0),
    ...     n_beta=1e3, lr=1e-4, num_draws=5000, num_burnin_steps=500,
    ... )
    >>> # A regular minimum of 4 parameters: d/2.
    >>> bool(abs(estimate.mean - 2.0) < 0.2), bool(estimate.at_minimum)
    (True, True)

    Reference: Lau et al. 2023. Deviation: the gauge-invariant estimate is new in this package. It estimates the same λ,
    because the loss is constant along orbits. Channels that are zero at w* are sampled as without gauges. If heads have
    less than full rank at w*, their rotation has no frame there, so that twins by this rotation can get different
    estimates.
    """
    require_key("llc", key)
    require_traceable("llc", params)
    require_function("llc", "loss", loss, "params, batch")
    batches = listed("llc", batches)
    require_batches("llc", batches)
    if not jax.tree.leaves(batches) or any(
        jax.tree.map(jnp.shape, x) != jax.tree.map(jnp.shape, batches[0]) for x in batches[1:]
    ):
        raise binding_error(
            "llc", "batches that cannot be stacked", "different shapes" if jax.tree.leaves(batches) else "no arrays",
            "one batch or more, of arrays that are alike in shape",
            "drop the last, smaller batch; for a loss without batches pass [0.0]",
        )
    counts = {"num_chains": num_chains, "num_draws": num_draws, "num_steps_bw_draws": num_steps_bw_draws}
    for name, count in {**counts, "num_burnin_steps": num_burnin_steps}.items():
        require_count("llc", name, count, int(name in counts))
    sizes: dict[str, tuple[Any, str]] = {
        "n_beta": (n_beta, "n / math.log(n)"), "lr": (lr, "1e-6"), "localization": (localization, "1.0")}
    for name, (size, usual) in sizes.items():
        # localization=0 is allowed: without the pull, a chain may leave the minimum, but it is still a chain.
        require_number("llc", name, size, "[0, inf)" if name == "localization" else "(0, inf)", f"pass {name}={usual}")
    # A float64 of NumPy or JAX would promote the point. Python's floats, and a tracer of the point's dtype, do not.
    of_leaves = (in_single_or_better(x).dtype for x in real_leaves("llc", params).values())
    least = min(of_leaves, key=lambda dtype: jnp.finfo(dtype).bits, default=real_dtype())
    given: list[Any] = [n_beta, lr, localization]
    numbers = tuple(jnp.asarray(x, least) if isinstance(x, jax.core.Tracer) else float(x) for x in given)
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *batches)
    keys = jax.random.split(key, num_chains)
    losses, excess, initial, found = _chains(
        with_hash(loss), None if gauges is None else product(gauges), (num_draws, num_burnin_steps, num_steps_bw_draws),
        params, stacked, keys, numbers,
    )
    per_chain = numbers[0] * jnp.mean(excess, 1)
    mean, std = jnp.mean(per_chain), jnp.std(per_chain, ddof=int(num_chains > 1))
    falls = jnp.maximum(initial - found, 0.0)
    fall = jnp.maximum(jnp.max(falls[:2]), jnp.mean(falls[2:]))
    fall = fall - 8 * jnp.finfo(losses.dtype).eps * jnp.abs(initial)  # a fall of this size may be roundoff
    finite = jnp.all(jnp.isfinite(losses)) & jnp.all(jnp.isfinite(falls))
    at_minimum = finite & (numbers[0] * fall <= 0.25 * jnp.maximum(mean, 0.0))
    lowest = jnp.minimum(initial, jnp.min(found))
    return LLC(mean, std, per_chain, losses, initial, lowest, at_minimum)


class _Chart(NamedTuple):
    """The set in which a chain moves: leaves that gauges bind stay on the slice through the starting point.

    Attributes:
      start: the first point, path → leaf.
      back: (point before a step, point after it) → the latter, moved along its orbit back to the set.
      tree: a function from a point to parameters.
    """

    start: Leaves
    back: Callable[[Leaves, Leaves], Leaves]
    tree: Callable[[Leaves], Any]


def _chart(params: Any, group: Product | None) -> _Chart:
    # In bfloat16, steps of a chain would be rounded away.
    leaves = {path: in_single_or_better(x) for path, x in real_leaves("llc", params).items()}
    params = with_leaves(params, leaves)
    if group is None:
        return _Chart(leaves, lambda before, after: after, lambda point: with_leaves(params, point))
    s = group._bound(params).slice
    values = s.values(params)
    _, to_balanced = ways(group, params, "balanced")
    live = s.read(values, turning=False).live

    def back(before: Leaves, after: Leaves) -> Leaves:
        # The slice through the balanced point is the gauges' slice, moved by one element: undo that move, fix and hold
        # the step there, and redo the move.
        here, there = (to_balanced.leave({p: x[p] for p in values}) for x in (before, after))
        _, fixed = s.fix(there, live)
        step, _ = s.hold(here, {p: fixed[p] - here[p] for p in values})
        return after | to_balanced.enter({p: here[p] + step[p] for p in values})

    start = leaves | to_balanced.point
    return _Chart(start, back, lambda point: with_leaves(params, point | stored(s, {p: point[p] for p in values})))


@partial(jax.jit, static_argnums=(0, 1, 2))
def _chains(
    loss: Callable[[Any, Any], jax.Array], group: Product | None, counts: tuple[int, int, int], params: Any,
    stacked: Any, keys: jax.Array, sizes: tuple[float, float, float],
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Runs the chains and the searches for lower losses.

    Returns:
      The losses at the draws, (chains, draws); by how much each is above the loss of the same batch at the start; the
      loss at the start; and the lowest losses of 2 + chains searches. The first search is on a line from the start
      along the gradient, the second is a descent from the start, and the others are descents from the ends of the
      chains.
    """
    num_draws, num_burnin_steps, num_steps_bw_draws = counts
    n_beta, lr, localization = sizes
    chart = _chart(params, group)
    number = len(jax.tree.leaves(stacked)[0])

    def at(point: Leaves, batch: Any) -> jax.Array:
        value = loss(chart.tree(point), batch)
        require_scalar("llc", value)
        return value

    at_start = jax.lax.map(lambda batch: at(chart.start, batch), stacked)

    def step(point: Leaves, key: jax.Array) -> tuple[Leaves, tuple[jax.Array, jax.Array]]:
        which, noise = jax.random.split(key)
        drawn_batch = jax.random.randint(which, (), 0, number)
        batch = jax.tree.map(lambda x: x[drawn_batch], stacked)
        value, gradient = jax.value_and_grad(at)(point, batch)
        drawn = zip(point, jax.random.split(noise, len(point)), strict=True)
        after = {
            path: x - 0.5 * lr * (n_beta * gradient[path] + localization * (x - chart.start[path]))
            + jnp.sqrt(lr) * jax.random.normal(noise_key, x.shape, x.dtype)
            for (path, noise_key), x in zip(drawn, point.values(), strict=True)
        }
        return chart.back(point, after), (value, value - at_start[drawn_batch])

    def draw(point: Leaves, key: jax.Array) -> tuple[Leaves, tuple[jax.Array, jax.Array]]:
        point, (values, above) = jax.lax.scan(step, point, jax.random.split(key, num_steps_bw_draws))
        return point, (values[-1], above[-1])

    def chain(key: jax.Array) -> tuple[Leaves, tuple[jax.Array, jax.Array]]:
        burnin, rest = jax.random.split(key)
        point, _ = jax.lax.scan(step, chart.start, jax.random.split(burnin, num_burnin_steps))
        return jax.lax.scan(draw, point, jax.random.split(rest, num_draws))

    def mean_of(function: Callable[[Any], Any]) -> Any:
        return jax.tree.map(lambda x: jnp.mean(x, 0), jax.lax.map(function, stacked))

    def full(point: Leaves) -> jax.Array:
        return mean_of(lambda batch: at(point, batch))

    def descend(point: Leaves, key: jax.Array) -> jax.Array:
        """The lower of two losses: at a point, and after a descent from there with momentum and shrinking steps."""

        def down(state: tuple[Leaves, Leaves], x: tuple[jax.Array, jax.Array]) -> tuple[tuple[Leaves, Leaves], None]:
            (point, velocity), (share, key) = state, x
            batch = jax.tree.map(lambda x: x[jax.random.randint(key, (), 0, number)], stacked)
            gradient = jax.grad(at)(point, batch)
            velocity = jax.tree.map(lambda v, g: 0.9 * v - 0.5 * lr * n_beta * g, velocity, gradient)
            after = jax.tree.map(lambda w, v: w + share.astype(w.dtype) * v, point, velocity)
            return (chart.back(point, after), velocity), None

        steps = min(200, num_burnin_steps + num_draws * num_steps_bw_draws)
        shares = 1.0 - jnp.arange(steps) / steps
        start = point, jax.tree.map(jnp.zeros_like, point)
        (end, _), _ = jax.lax.scan(down, start, (shares, jax.random.split(key, steps)))
        ends = full(point), full(end)
        # A descent that diverges does not count. If the chain has diverged, the loss at `point` is not finite.
        return jnp.minimum(ends[0], jnp.where(jnp.isnan(ends[1]), jnp.inf, ends[1]))

    def along_gradient() -> jax.Array:
        """The lowest loss on a line along the gradient. Finds lower losses even if `lr` is too large for a descent."""
        gradient = mean_of(lambda batch: jax.grad(at)(chart.start, batch))
        sizes = lr * n_beta * 4.0 ** -jnp.arange(12)

        def after(size: jax.Array) -> jax.Array:
            point = jax.tree.map(lambda w, g: w - size.astype(w.dtype) * g, chart.start, gradient)
            return full(chart.back(chart.start, point))

        return jnp.nanmin(jax.lax.map(after, sizes))

    large = sum(x.size for x in chart.start.values()) > _LARGE
    each: Callable[..., Any] = jax.lax.map if large else lambda function, of: jax.vmap(function)(of)
    ends, (losses, excess) = each(chain, keys)
    starts = jax.tree.map(lambda x, end: jnp.concatenate([x[None], end]), chart.start, ends)
    found = each(lambda x: descend(*x), (starts, jax.random.split(jax.random.fold_in(keys[0], 0), len(keys) + 1)))
    return losses, excess, jnp.mean(at_start), jnp.concatenate([along_gradient()[None], found])
