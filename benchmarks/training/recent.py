"""Optimizers of 2025 and 2026 for the comparison `benchmarks.tuned`, written from papers and public descriptions.

A schedule (`rate`) returns two learning rates, one for matrices and one for all other leaves.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

import gauge_optax as go
from benchmarks.training import links as of
from benchmarks.training.links import Link, Rate, Tree
from gauge_optax import linalg


def other_leaves(matrices: Link, rate: Rate, decay: jax.Array) -> Link:
    """Uses an optimizer for matrices, and AdamW with the second rate for all other leaves."""
    return of.split(matrices, of.adamw(lambda n: rate(n)[1], decay))


def _stepped(links: list[Link], rate: Rate, decay: jax.Array) -> Link:
    return optax.chain(*links, optax.add_decayed_weights(decay), optax.scale_by_learning_rate(lambda n: rate(n)[0]))


def normuon(rate: Rate, decay: jax.Array) -> Link:
    """NorMuon: Muon with each neuron's update divided by its running size.

    Reference: Li et al. 2025, arXiv 2510.05491.
    """
    return other_leaves(_stepped([of.momentum(), of.orthogonalised(), of.neurons_alike()], rate, decay), rate, decay)


def muonh(rate: Rate, decay: jax.Array, neurons: bool = False) -> Link:
    """MuonH: Muon that keeps the Frobenius norm of every kernel.

    With `neurons`, each neuron's update is first divided by its running size (NorMuonH).

    Reference: Wen et al. 2026, arXiv 2606.16899; `its_start` makes the initial kernels of their public runs.
    """
    links = [of.momentum(), of.orthogonalised(), *([of.neurons_alike()] if neurons else [])]
    first = lambda n: rate(n)[0]  # noqa: E731
    links += [optax.scale_by_learning_rate(first), go.norms.hyperball(of.MATRICES, learning_rate=first)]
    return other_leaves(optax.chain(*links), rate, decay)


def its_start(params: Tree, start: str) -> Tree:
    """Initial kernels as in MuonH's public runs, if `start` is "lecun". For other starts, `params` are returned.

    The runs multiply PyTorch's default kernels, whose standard deviation is 1/√(3·inputs): attention's output by 1.25,
    the first layer of an MLP by 1.5, and its last layer by 3.
    """
    if start != "lecun":
        return params
    factors = {"attn/out": 1.25, "mlp/up": 1.5, "mlp/gate": 1.5, "mlp/down": 3.0}

    def one(path: Any, x: jax.Array) -> jax.Array:
        if not of.is_matrix(path):
            return x
        name = "/".join(of.joined(path).split("/")[2:4])
        return x * factors.get(name, 1.0) / 3**0.5

    return jax.tree_util.tree_map_with_path(one, params)


def symmetric(rate: Rate, decay: jax.Array) -> Link:
    """A rule of steps for each kind of leaf, which commutes with the symmetries of this kind.

    * Attention gets Muon.
    * In an MLP, updates are orthogonalised; then each unit's part (a column of gate and up, a row of down) is divided
      by its root mean square. This commutes with permutations of units.
    * In the table of embeddings and the head, each token's momentum is divided by its root mean square. This commutes
      with permutations of tokens and with rotations of the stream.
    * Vectors get AdamW.

    Reference: Lau and Su 2026, arXiv 2605.18106. Their variants are many; this is the one with a rule per leaf.
    """
    units = {"gate": 1, "up": 1, "down": 0}

    def of_units(path: str) -> int | None:
        return units.get(path.split("/")[-2])

    def of_tokens(path: str) -> int | None:
        return {"embedding": 0, "kernel": 1}.get(path.split("/")[-1])

    first, second = (lambda n: rate(n)[0]), (lambda n: rate(n)[1])
    # An update of a unit with root mean square 1 is √inputs times as long as one from an orthogonal matrix.
    evened = optax.chain(_rows_alike(of_units), of.by_path(_as_long_as_orthogonal))
    matrices = optax.chain(
        of.momentum(), of.orthogonalised(), evened, optax.add_decayed_weights(decay),
        optax.scale_by_learning_rate(first),
    )
    tokens = optax.chain(
        of.momentum(), _rows_alike(of_tokens), optax.add_decayed_weights(decay), optax.scale_by_learning_rate(second)
    )

    def labels(params: Tree) -> Tree:
        def label(path: Any, x: jax.Array) -> str:
            return "matrices" if of.is_matrix(path) else "tokens" if x.ndim == 2 else "vectors"

        return jax.tree_util.tree_map_with_path(label, params)

    return optax.partition({"matrices": matrices, "tokens": tokens, "vectors": of.adamw(second, decay)}, labels)


def _rows_alike(axis: Callable[[str], int | None]) -> Link:
    """Divides each row of an update by its root mean square.

    Args:
      axis: path of a leaf → the axis that counts its rows; None to leave the leaf's update as it is.
    """

    def one(path: str, x: jax.Array) -> jax.Array:
        rows = axis(path)
        if rows is None:
            return x
        others = tuple(k for k in range(x.ndim) if k != rows)
        return x / (jnp.sqrt(jnp.mean(jnp.square(x), others, keepdims=True)) + 1e-12)

    return of.by_path(one)


def _as_long_as_orthogonal(path: str, x: jax.Array) -> jax.Array:
    """Scales the update of an MLP's kernel to the Frobenius norm that `orthogonalised` would give it."""
    if x.ndim != 2:
        return x
    rows, columns = x.shape
    length = (min(rows, columns) * max(1.0, columns / rows)) ** 0.5
    return x * length / (jnp.linalg.norm(x) + of.TINY)


# Compositional Muon ------------------------------------------------------------------------------------

_PARTNERS = {"query": "key", "key": "query", "value": "out", "out": "value"}
_DAMPING = 1e-3


def compositional(rate: Rate, decay: jax.Array) -> Link:
    """Compositional Muon: kernels of attention step by the spectral norm of the product of two kernels in each head.

    The pairs are queries and keys, and values and outputs. The momentum of one kernel is multiplied by the inverse root
    of its partner's Gram matrix, before its polar factor is taken and after that; each kernel makes half of the step.
    Queries, keys and values have a matrix per head, the output has one matrix. All other kernels get Muon.

    Reference: Keigwin et al. 2026, the public description of Compositional Muon (half split; hybrid for the output). It
    names no damping; here a thousandth of the mean eigenvalue is added to Gram matrices.
    """

    def update(updates: Tree, params: Tree) -> Tree:
        weights = {of.joined(path): x for path, x in jax.tree.leaves_with_path(params)}

        def one(path: Any, x: jax.Array) -> jax.Array:
            block, name, _ = of.joined(path).rsplit("/", 2)
            if name not in _PARTNERS:
                return of.polar_step(of.joined(path), x)
            other = _heads_first(_PARTNERS[name], weights[f"{block}/{_PARTNERS[name]}/kernel"])
            gram = linalg.matmul(other, other.swapaxes(1, 2))
            damping = _DAMPING * jnp.trace(gram, axis1=1, axis2=2)[:, None, None] / gram.shape[1]
            root = linalg.inverse_sqrt_by_products(gram + damping * jnp.eye(gram.shape[1]), 1e-4)
            whitened = linalg.matmul(root, _heads_first(name, x))
            matrices = whitened.reshape(-1, whitened.shape[2]) if name == "out" else whitened
            step = 0.5 * linalg.matmul(root, linalg.polar(matrices).reshape(whitened.shape))
            return step if name == "out" else step.transpose(2, 0, 1)

        return jax.tree_util.tree_map_with_path(one, updates)

    return other_leaves(_stepped([of.momentum(), optax.stateless(update)], rate, decay), rate, decay)


def _heads_first(name: str, x: jax.Array) -> jax.Array:
    """The kernel of an attention layer with its axes in the order (heads, size, d)."""
    return x if name == "out" else x.transpose(1, 2, 0)


# Muown ------------------------------------------------------------------------------------------------


class MuownState(NamedTuple):
    """State of `muown`: gains and directions of every kernel (inputs × outputs), and their moments."""

    gain: Tree
    direction: Tree
    momentum: Tree
    adam: optax.OptState


def muown(rate: Rate, decay: jax.Array, beta: float = of.MOMENTUM) -> Link:
    """Muown: each neuron's weights are a gain times a normalised direction. Adam steps gains, Muon steps directions.

    A step of directions is 0.2·√max(inputs, outputs) times the polar factor. It makes the norm of a direction grow, so
    that later steps rotate it less. Gains have the second rate, and weight decay.

    Reference: Lion et al. 2026, arXiv 2605.10797. Their later runs also set the norms of directions by a schedule,
    which is left out here.
    """
    adam = optax.chain(
        optax.scale_by_adam(b1=0.9, b2=0.95), optax.add_decayed_weights(decay),
        optax.scale_by_learning_rate(lambda n: rate(n)[1]),
    )
    step = optax.chain(of.by_path(lambda path, x: linalg.polar(x) * 0.2 * max(x.shape) ** 0.5),
                       optax.scale_by_learning_rate(lambda n: rate(n)[0]))

    def init(params: Tree) -> tuple[MuownState, optax.OptState]:
        gain = jax.tree.map(_norms, params)
        return MuownState(gain, params, jax.tree.map(jnp.zeros_like, params), adam.init(gain)), step.init(params)

    def update(updates: Tree, state: tuple[MuownState, Any], params: Tree = None) -> tuple[Tree, Any]:
        (gain, direction, momentum, moments), steps = state
        norms = jax.tree.map(_norms, direction)
        unit = jax.tree.map(linalg.safe_divide, direction, norms)
        along = jax.tree.map(lambda g, u: jnp.sum(g * u, 0, keepdims=True), updates, unit)
        across = jax.tree.map(
            lambda g, u, a, c, r: (g - u * a) * linalg.safe_divide(c, r), updates, unit, along, gain, norms)
        momentum = jax.tree.map(lambda m, g: beta * m + g, momentum, across)
        moves, steps = step.update(jax.tree.map(lambda m, g: beta * m + g, momentum, across), steps)
        direction = optax.apply_updates(direction, moves)
        changes, moments = adam.update(along, moments, gain)
        gain = optax.apply_updates(gain, changes)
        new = jax.tree.map(lambda c, v: c * linalg.safe_divide(v, _norms(v)), gain, direction)
        return jax.tree.map(jnp.subtract, new, params), (MuownState(gain, direction, momentum, moments), steps)

    return other_leaves(of.as_matrices(optax.GradientTransformation(init, update)), rate, decay)


def _norms(x: jax.Array) -> jax.Array:
    """The norms of the columns of a matrix, inputs × outputs."""
    return jnp.linalg.norm(x, axis=0, keepdims=True)


# Aurora, Scion ----------------------------------------------------------------------------------------


def aurora(rate: Rate, decay: jax.Array) -> Link:
    """Aurora: Muon, but if a matrix is not square, the rows (or columns) of the polar factor get equal norms.

    Reference: the description of Aurora's record in the public comparison of optimizers (May 2026): polar(D·G) of a
    tall G with a diagonal D from a damped fixed point; three rounds, an exponent of 0.25.
    """

    def one(path: str, x: jax.Array) -> jax.Array:
        inputs, outputs = x.shape
        tall = x if inputs >= outputs else x.T
        factor = _leverage_free(tall) if inputs != outputs else linalg.polar(tall)
        return (factor if inputs >= outputs else factor.T) * max(1.0, outputs / inputs) ** 0.5

    return other_leaves(of.as_matrices(_stepped([of.momentum(), of.by_path(one)], rate, decay)), rate, decay)


def _leverage_free(tall: jax.Array, rounds: int = 3, exponent: float = 0.25) -> jax.Array:
    rows, columns = tall.shape
    scale = linalg.safe_divide(jnp.ones(()), jnp.linalg.norm(tall, axis=1, keepdims=True))
    factor = linalg.polar(scale * tall)
    for _ in range(rounds - 1):
        squares = jnp.sum(jnp.square(factor), 1, keepdims=True)
        scale = scale * linalg.safe_divide(jnp.full((), columns / rows), squares) ** exponent
        factor = linalg.polar(scale * tall)
    return factor


def scion(rate: Rate, decay: jax.Array) -> Link:
    """Scion: steps of length 1, in a norm that depends on the kind of leaf.

    It is the spectral norm for kernels, the root mean square of each token's row for the table of embeddings, and for
    the head the largest entry times the width.

    Reference: Pethick et al. 2025, arXiv 2502.07529, with their average over ten gradients. With weight decay it is
    their constrained variant, with the radius 1/decay.
    """

    def of_other(path: str, x: jax.Array) -> jax.Array:
        if path.startswith("lm_head"):
            return jnp.sign(x) / x.shape[0]
        return linalg.safe_divide(x, jnp.sqrt(jnp.mean(jnp.square(x), -1, keepdims=True)))

    average = optax.ema(0.9, debias=False)
    rest = optax.chain(average, of.by_path(of_other), optax.add_decayed_weights(decay),
                       optax.scale_by_learning_rate(lambda n: rate(n)[1]))
    return of.split(_stepped([average, of.orthogonalised()], rate, decay), rest)


# Averages of weights ----------------------------------------------------------------------------------


class LookaheadState(NamedTuple):
    """State of `ema_nesterov`.

    It has the inner state, the average of steps, the multiple of it by which the point of gradients is ahead, the
    largest learning rate so far, and the count.
    """

    inner: optax.OptState
    average: Tree
    ahead: jax.Array
    peak: jax.Array
    count: jax.Array  # type: ignore[assignment]


def ema_nesterov(inner: Link, rate: Rate, reach: float = 0.6, gamma: float = 0.99) -> Link:
    """EMA-Nesterov: gradients are taken at a point ahead of the weights, in the direction of a long average of steps.

    The distance is proportional to the learning rate, from when the rate falls below 0.97 of its peak until it falls
    below 0.15. On a cosine this is the window of the public runs (16 to 76 % of the steps). Outside of this window,
    gradients are taken at the weights.

    Reference: arXiv 2605.25395, and the description of its record with Muon in the public comparison.
    """

    def init(params: Tree) -> LookaheadState:
        zero = jnp.zeros(())
        return LookaheadState(
            inner.init(params), jax.tree.map(jnp.zeros_like, params), zero, zero, jnp.zeros((), jnp.int32))

    def update(updates: Tree, state: LookaheadState, params: Tree = None) -> tuple[Tree, LookaheadState]:
        moves, wrapped = inner.update(updates, state.inner, params)
        # `params` are the point ahead. Compute how far the weights themselves have moved since the last step.
        moved = jax.tree.map(lambda move, m: move + state.ahead * m, moves, state.average)
        average = jax.tree.map(lambda m, x: gamma * m + (1 - gamma) * x, state.average, moved)
        count = state.count + 1
        now = rate(count)[0]
        peak = jnp.maximum(state.peak, now)
        share = now / peak
        ahead = jnp.where((share < 0.97) & (share > 0.15), reach * share, 0.0)
        return jax.tree.map(lambda move, m: move + ahead * m, moves, average), LookaheadState(
            wrapped, average, ahead, peak, count)

    return optax.GradientTransformation(init, update)


class TailState(NamedTuple):
    """State of `tail_average`.

    It has the inner state, the average, the step at which it began (0 before), the largest learning rate so far, and
    the count.
    """

    inner: optax.OptState
    average: Tree
    began: jax.Array
    peak: jax.Array
    count: jax.Array  # type: ignore[assignment]


def tail_average(inner: Link, rate: Rate, blend: float = 0.6) -> Link:
    """Tail average: the last step moves weights towards their running average over the end of the run.

    The average begins when the rate has fallen to 0.06 of its peak (on a cosine, after 84 % of the steps). Its time
    constant is a sixteenth of the steps until then. The table of embeddings is not averaged.

    Reference: the description of "Tail-EMA" in the public comparison of optimizers (June 2026).
    """

    def init(params: Tree) -> TailState:
        zero = jnp.zeros((), jnp.int32)
        return TailState(inner.init(params), params, zero, jnp.zeros(()), zero)

    def update(updates: Tree, state: TailState, params: Tree = None) -> tuple[Tree, TailState]:
        moves, wrapped = inner.update(updates, state.inner, params)
        weights = optax.apply_updates(params, moves)
        count = state.count + 1
        now = rate(count)[0]
        peak = jnp.maximum(state.peak, now)
        begins = (state.began == 0) & (now < 0.06 * peak)
        began = jnp.where(begins, count, state.began)
        pace = jnp.where(begins | (began == 0), 1.0, 16.0 / jnp.maximum(began, 16))
        average = jax.tree.map(lambda e, x: e + pace * (x - e), state.average, weights)
        share = jnp.where(now <= 1e-6 * peak, blend, 0.0)

        def last(path: Any, move: jax.Array, e: jax.Array, x: jax.Array) -> jax.Array:
            return move if of.joined(path).startswith("embed") else move + share * (e - x)

        return jax.tree_util.tree_map_with_path(last, moves, average, weights), TailState(
            wrapped, average, began, peak, count)

    return optax.GradientTransformation(init, update)


Build = Callable[[Rate, jax.Array, Any], Link]


def even_pace(build: Build, least: float, most: float) -> Build:
    """Bounds the relative step of each neuron, |step|/|weights|, between `least` and `most` times the learning rate."""

    def made(rate: Rate, decay: jax.Array, gauges: Any) -> Link:
        inner = build(rate, decay, gauges)

        def update(updates: Tree, state: Any, params: Tree = None) -> tuple[Tree, Any]:
            count, kept = state
            moves, kept = inner.update(updates, kept, params)

            def one(path: Any, u: jax.Array, x: jax.Array) -> jax.Array:
                if not of.is_matrix(path):
                    return u
                length, norm = (jnp.sqrt(jnp.sum(jnp.square(y), of.inputs(path), keepdims=True)) for y in (u, x))
                pace = rate(count)[0] * norm
                return u * linalg.safe_divide(jnp.clip(length, least * pace, most * pace), length)

            return jax.tree_util.tree_map_with_path(one, moves, params), (count + 1, kept)

        return optax.GradientTransformation(lambda params: (jnp.zeros((), jnp.int32), inner.init(params)), update)

    return made


def ahead(build: Build) -> Build:
    """Wraps the optimizer of an arm by `ema_nesterov`."""
    return lambda rate, decay, gauges: ema_nesterov(build(rate, decay, gauges), rate)


def averaged(build: Build) -> Build:
    """Wraps the optimizer of an arm by `tail_average`."""
    return lambda rate, decay, gauges: tail_average(build(rate, decay, gauges), rate)
