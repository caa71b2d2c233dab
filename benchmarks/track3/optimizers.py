"""The optimizers of the comparison: links that Optax lacks, and how each arm is put together from links.

A kernel counts as one matrix, inputs × outputs: (d, heads·size) for queries, keys and values, (heads·size, d) for
attention's output. The embedding, the head and all vectors get AdamW at a share of the matrices' rate, in every arm.
Nothing in this file knows a gauge; `arms.py` wraps what stands here.
"""

import importlib
import math
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import optax

import gauge_optax as go
from examples.studies import kronecker
from gauge_optax import linalg

Tree = Any
Rate = Callable[[jax.Array], jax.Array]
Link: TypeAlias = optax.GradientTransformation

ADAM_SHARE = 0.5  # of the matrices' rate, for the other leaves of arms that treat matrices in a special way
MOMENTUM = 0.95
_TINY = 1e-30

NEURONS: Mapping[str, str] = {
    **{f"blocks/{{i}}/attn/{name}/kernel": "_ head neuron" for name in ("query", "key", "value")},
    "blocks/{i}/attn/out/kernel": "_ _ neuron",
    **{f"blocks/{{i}}/mlp/{name}/kernel": "_ neuron" for name in ("up", "gate", "down")},
}
"""A vector per neuron: the weights of its inputs."""
TOKENS: Mapping[str, str] = {"lm_head/kernel": "_ token"}
"""The unembedding's neurons."""
EMBEDDINGS: Mapping[str, str] = {"embed/embedding": "token _"}
"""A vector per token."""
MATRICES: Mapping[str, str] = {path: "_ " * len(axes.split()) for path, axes in NEURONS.items()}
"""A vector per kernel."""


def joined(path: Any) -> str:
    """A key path as text."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def is_matrix(path: Any) -> bool:
    """Whether a leaf is a kernel of attention or MLP."""
    where = joined(path)
    return where.startswith("blocks") and where.endswith("kernel")


def inputs(path: Any) -> tuple[int, ...]:
    """The axes of a kernel that count a neuron's inputs."""
    first, _, *rest = joined(path).split("/")
    axes = NEURONS["/".join([first, "{i}", *rest])].split()
    return tuple(axis for axis, name in enumerate(axes) if name == "_")


def by_path(change: Callable[[str, jax.Array], jax.Array]) -> Link:
    """A link without state that maps every update, given its path; leaves that a partition hides are passed by."""
    return optax.stateless(
        lambda updates, params: jax.tree_util.tree_map_with_path(lambda path, x: change(joined(path), x), updates)
    )


# Links ------------------------------------------------------------------------------------------------


def orthogonalised(heads: int | None = None) -> Link:
    """Every kernel's update becomes its polar factor, times √(outputs/inputs) where there are more outputs.

    Args:
      heads: how many heads of attention make one matrix; None for all of them.

    Reference: Jordan et al. 2024 (Muon), with Optax's factor.
    """

    def one(path: str, x: jax.Array) -> jax.Array:
        if x.ndim == 3 and heads is not None:
            return _per_group(path, x, heads)
        rows = 2 if x.ndim == 3 and "/out/" in path else 1
        return _polar(x.reshape(math.prod(x.shape[:rows]), -1)).reshape(x.shape)

    return by_path(one)


def _polar(matrices: jax.Array) -> jax.Array:
    rows, columns = matrices.shape[-2:]
    return linalg.polar(matrices) * max(1.0, columns / rows) ** 0.5


def _per_group(path: str, x: jax.Array, heads: int) -> jax.Array:
    """(d, h, e) as h/heads matrices of (d, heads·e); (h, e, d) as as many of (heads·e, d)."""
    if "/out/" in path:
        count, e, d = x.shape
        return _polar(x.reshape(count // heads, heads * e, d)).reshape(x.shape)
    d, count, e = x.shape
    groups = x.reshape(d, count // heads, heads * e).swapaxes(0, 1)
    return _polar(groups).swapaxes(0, 1).reshape(x.shape)


class TokensState(NamedTuple):
    """The number of steps, and each column's average squared length."""

    count: jax.Array  # type: ignore[assignment]
    square: Tree


def tokens_alike(beta: float = 0.95) -> Link:
    """Every column of a matrix over the root of its average squared length: what `max_norm` does, without a bound."""

    def squares(tree: Tree) -> Tree:
        return jax.tree.map(lambda x: jnp.sum(jnp.square(x), 0), tree)

    def init(params: Tree) -> TokensState:
        return TokensState(jnp.zeros((), jnp.int32), jax.tree.map(jnp.zeros_like, squares(params)))

    def update(updates: Tree, state: TokensState, params: Tree = None) -> tuple[Tree, TokensState]:
        count = state.count + 1
        square = jax.tree.map(lambda new, old: beta * old + (1 - beta) * new, squares(updates), state.square)
        even = jax.tree.map(lambda x, v: linalg.safe_divide(x, jnp.sqrt(v / (1 - beta**count))), updates, square)
        return even, TokensState(count, square)

    return optax.GradientTransformation(init, update)


class NeuronState(NamedTuple):
    """Average mean square of each neuron's update, like the leaves with axes of length 1 for inputs."""

    square: Tree


def neurons_alike(b2: float = 0.95) -> Link:
    """NorMuon's second half: every neuron's update over its own running size; the kernel's update keeps its length.

    Reference: Li et al. 2025, arXiv 2510.05491, Algorithm 1.
    """

    def init(params: Tree) -> NeuronState:
        def zeros(path: Any, x: jax.Array) -> jax.Array:
            return jnp.zeros_like(jnp.sum(x, inputs(path), keepdims=True))

        return NeuronState(jax.tree_util.tree_map_with_path(zeros, params))

    def update(updates: Tree, state: NeuronState, params: Tree = None) -> tuple[Tree, NeuronState]:
        def average(path: Any, x: jax.Array, square: jax.Array) -> jax.Array:
            return b2 * square + (1 - b2) * jnp.mean(jnp.square(x), inputs(path), keepdims=True)

        def divided(x: jax.Array, square: jax.Array) -> jax.Array:
            even = x / (jnp.sqrt(square) + 1e-8)
            return even * jnp.linalg.norm(x) / (jnp.linalg.norm(even) + _TINY)

        square = jax.tree_util.tree_map_with_path(average, updates, state.square)
        return jax.tree.map(divided, updates, square), NeuronState(square)

    return optax.GradientTransformation(init, update)


def rows_alike(axis: Callable[[str], int | None]) -> Link:
    """Divides each row of an update by its root mean square, a row being what is left when `axis` is fixed.

    Args:
      axis: a leaf's path → its axis of rows; None to leave the update alone.

    Reference: Lau and Su 2026, arXiv 2605.18106: a table of embeddings commutes with orders of its rows and rotations
      of its columns, a matrix of hidden units with orders of units.
    """

    def one(path: str, x: jax.Array) -> jax.Array:
        rows = axis(path)
        if rows is None:
            return x
        others = tuple(k for k in range(x.ndim) if k != rows)
        return x / (jnp.sqrt(jnp.mean(jnp.square(x), others, keepdims=True)) + 1e-12)

    return by_path(one)


# Whole optimizers -------------------------------------------------------------------------------------


def split(matrices: Link, rest: Link) -> Link:
    """One optimizer for kernels of attention and MLP, another for all other leaves."""

    def labels(params: Tree) -> Tree:
        return jax.tree_util.tree_map_with_path(lambda path, _: "matrices" if is_matrix(path) else "rest", params)

    return optax.partition({"matrices": matrices, "rest": rest}, labels)


def adamw(rate: Rate, decay: jax.Array) -> Link:
    """Optax's, with the momentum of language models."""
    return optax.adamw(rate, b2=0.95, weight_decay=decay)


BASE_WIDTH = 64
"""The width at which a rate that depends on the width is the swept rate itself."""


def mup_adamw(rate: Rate, decay: jax.Array) -> Link:
    """AdamW by muP's rules: kernels and the head step by the rate times 64/d, all other leaves by the rate itself.

    Reference: Yang et al. 2022, arXiv 2203.03466, Table 3. Decay is not scaled; heads are of one size, so that the
    scores' factor stays.
    """

    def narrowed(updates: Tree, params: Tree) -> Tree:
        width = params["embed"]["embedding"].shape[1]

        def one(path: Any, x: jax.Array) -> jax.Array:
            return x * (BASE_WIDTH / width) if joined(path).endswith("kernel") else x

        return jax.tree_util.tree_map_with_path(one, updates)

    return optax.chain(
        optax.scale_by_adam(b2=0.95), optax.stateless(narrowed), optax.add_decayed_weights(decay),
        optax.scale_by_learning_rate(rate),
    )


def mup_start(params: Tree, start: str) -> Tree:
    """The head of a LeCun-normal start at muP's size, a factor √(64/d) smaller; other starts as they are."""
    if start != "lecun":
        return params
    width = params["embed"]["embedding"].shape[1]
    return params | {"lm_head": {"kernel": params["lm_head"]["kernel"] * (BASE_WIDTH / width) ** 0.5}}


def muon_like(
    rate: Rate, decay: jax.Array, before: Link, heads: int | None = None, after: Link | None = None,
    last: Link | None = None,
) -> Link:
    """Momentum or another preconditioner, polar factors, decay, rate; AdamW elsewhere.

    Args:
      rate: of matrices.
      decay: of all leaves.
      before: what makes the update that is orthogonalised.
      heads: as in `orthogonalised`.
      after: a link behind that.
      last: a link behind the rate.
    """
    links = [before, orthogonalised(heads), *([after] if after else [])]
    links += [optax.add_decayed_weights(decay), optax.scale_by_learning_rate(rate), *([last] if last else [])]
    return split(optax.chain(*links), adamw(lambda n: ADAM_SHARE * rate(n), decay))


def momentum() -> Link:
    """Nesterov's, as in Muon."""
    return optax.trace(MOMENTUM, nesterov=True)


def muon(rate: Rate, decay: jax.Array, heads: int | None = None) -> Link:
    """Muon, one matrix per kernel or per group of heads."""
    return muon_like(rate, decay, momentum(), heads)


def normuon(rate: Rate, decay: jax.Array) -> Link:
    """Muon with neurons alike."""
    return muon_like(rate, decay, momentum(), after=neurons_alike())


def muonh(rate: Rate, decay: jax.Array) -> Link:
    """Muon on spheres: each kernel keeps its Frobenius norm, and turns by the rate. Only other leaves decay.

    Reference: Wen et al. 2026, arXiv 2606.16899.
    """
    return muon_like(rate, decay, momentum(), last=go.norms.hyperball(MATRICES, learning_rate=rate))


def soap_muon(rate: Rate, decay: jax.Array) -> Link:
    """Muon of SOAP's steps."""
    return muon_like(rate, decay, kronecker_soap())


def polar_adamw(rate: Rate, decay: jax.Array) -> Link:
    """Muon of Adam's steps. Reference: Zhang 2026, arXiv 2605.07067."""
    return muon_like(rate, decay, optax.scale_by_adam(b1=MOMENTUM, b2=0.95))


def kronecker_soap() -> Link:
    """SOAP without a rate; the eigenbases are renewed every ten steps."""
    return kronecker.kronecker(kronecker.basis, 10, adam=True)


def soap(rate: Rate, decay: jax.Array) -> Link:
    """SOAP for kernels, AdamW at the same rate elsewhere."""
    matrices = optax.chain(kronecker_soap(), optax.add_decayed_weights(decay), optax.scale_by_learning_rate(rate))
    return split(matrices, adamw(rate, decay))


def psgd(rate: Rate, decay: jax.Array) -> Link:
    """PSGD with Kronecker factors for kernels, AdamW at the same rate elsewhere. Needs `psgd-jax` (the extra `peers`).

    Reference: Li 2018, arXiv 1512.04202; the package's defaults.
    """
    kron = kron_module()
    links = [kron.scale_by_kron(), optax.add_decayed_weights(decay), optax.scale_by_learning_rate(rate)]
    return split(as_matrices(optax.chain(*links)), adamw(rate, decay))


def kron_module() -> Any:
    """The package's module, which imports a name that Optax 0.2.8 has moved, without using it."""
    sys.modules.setdefault("optax._src.clipping", types.ModuleType("optax._src.clipping"))
    sys.modules["optax._src"].clipping = sys.modules["optax._src.clipping"]  # type: ignore[attr-defined]
    return importlib.import_module("psgd_jax.kron")


def as_matrices(inner: Link) -> Link:
    """Shows `inner` every kernel as one matrix, inputs × outputs."""

    def flat(tree: Tree) -> Tree:
        def one(path: Any, x: jax.Array) -> jax.Array:
            return x.reshape(math.prod(x.shape[axis] for axis in inputs(path)), -1)

        return jax.tree_util.tree_map_with_path(one, tree)

    def update(updates: Tree, state: Any, params: Tree = None) -> tuple[Tree, Any]:
        moves, state = inner.update(flat(updates), state, flat(params))
        return jax.tree.map(lambda move, x: move.reshape(x.shape), moves, updates), state

    return optax.GradientTransformation(lambda params: inner.init(flat(params)), update)


def symmetric(rate: Rate, decay: jax.Array, others: Rate | None = None) -> Link:
    """Rules that commute with each leaf's symmetry: Muon in attention, and orders of units and of tokens elsewhere.

    Gate and up are orthogonalised and their units made alike, down likewise along its inputs; rows of the embedding and
    columns of the head, which are tokens, step by their momentum over its root mean square. Vectors get AdamW. Tokens
    and vectors step by `others`, by default at a share of the rate.

    Reference: Lau and Su 2026, arXiv 2605.18106. Their variants are many; this is the one with a rule per leaf.
    """
    units = {"gate": 1, "up": 1, "down": 0}

    def of_units(path: str) -> int | None:
        return units.get(path.split("/")[-2])

    def of_tokens(path: str) -> int | None:
        return {"embedding": 0, "kernel": 1}.get(path.split("/")[-1])

    share = others or (lambda n: ADAM_SHARE * rate(n))
    # A unit's update of root mean square 1 is √inputs as long as that of an orthogonal matrix.
    evened = optax.chain(rows_alike(of_units), by_path(_as_long_as_orthogonal))
    matrices = optax.chain(
        momentum(), orthogonalised(), evened, optax.add_decayed_weights(decay), optax.scale_by_learning_rate(rate)
    )
    tokens = optax.chain(
        momentum(), rows_alike(of_tokens), optax.add_decayed_weights(decay), optax.scale_by_learning_rate(share)
    )

    def labels(params: Tree) -> Tree:
        def label(path: Any, x: jax.Array) -> str:
            return "matrices" if is_matrix(path) else "tokens" if x.ndim == 2 else "vectors"

        return jax.tree_util.tree_map_with_path(label, params)

    return optax.partition({"matrices": matrices, "tokens": tokens, "vectors": adamw(share, decay)}, labels)


def _as_long_as_orthogonal(path: str, x: jax.Array) -> jax.Array:
    """Scales an MLP kernel's update to the length of its polar factor as `orthogonalised` returns it."""
    if x.ndim != 2:
        return x
    rows, columns = x.shape
    length = (min(rows, columns) * max(1.0, columns / rows)) ** 0.5
    return x * length / (jnp.linalg.norm(x) + _TINY)


def max_norm_adamw(rate: Rate, decay: jax.Array) -> Link:
    """AdamW; every neuron steps by the rate and stays in the unit ball."""
    return go.norms.max_norm(adamw(rate, decay), NEURONS, learning_rate=rate)


def max_norm_kernels(rate: Rate, decay: jax.Array) -> Link:
    """Muon; every neuron steps by the rate and stays in the unit ball; embedding and head get AdamW."""
    return go.norms.max_norm(muon(rate, decay), NEURONS, learning_rate=rate)


def max_norm_muon(rate: Rate, decay: jax.Array) -> Link:
    """`go.max_norm_muon` without `quotient`: tokens step by their momentum, those of the embedding in a ball."""
    table = optax.chain(momentum(), optax.scale_by_learning_rate(rate))
    head = optax.chain(momentum(), tokens_alike(), optax.scale_by_learning_rate(rate))
    matrices = optax.chain(
        momentum(), orthogonalised(), optax.add_decayed_weights(decay), optax.scale_by_learning_rate(rate)
    )

    def labels(params: Tree) -> Tree:
        def label(path: Any, x: jax.Array) -> str:
            kinds = {"embed": "table", "lm_head": "head"}
            return "matrices" if is_matrix(path) else kinds.get(joined(path).split("/")[0], "vectors")

        return jax.tree_util.tree_map_with_path(label, params)

    vectors = adamw(lambda n: ADAM_SHARE * rate(n), jnp.float32(0))
    inner = optax.partition({"matrices": matrices, "table": table, "head": head, "vectors": vectors}, labels)
    neurons = go.norms.max_norm(inner, NEURONS, learning_rate=rate, beta=0.95)

    def whole(params: Tree) -> Link:
        bound = params["embed"]["embedding"].shape[1] ** 0.5
        return go.norms.max_norm(neurons, EMBEDDINGS, learning_rate=rate, bound=bound, beta=0.95)

    def update(updates: Tree, state: Any, params: Tree = None) -> tuple[Tree, Any]:
        return whole(params).update(updates, state, params)

    return optax.GradientTransformation(lambda params: whole(params).init(params), update)


def relative_adamw(rate: Rate, decay: jax.Array, gauges: Sequence[go.Gauge]) -> Link:
    """AdamW with steps in units of the kernels they step."""
    return optax.chain(
        optax.scale_by_adam(b2=0.95), go.links.scale_by_relative_rms(gauges), optax.add_decayed_weights(decay),
        optax.scale_by_learning_rate(rate),
    )
