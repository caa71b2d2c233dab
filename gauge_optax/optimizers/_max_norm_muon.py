"""`max_norm_muon`: Muon inside `quotient`, whose weight vectors have steps of one average length and bounded norms.

The optimizer is a partition of leaves. A kernel's step is the polar factor of its momentum. The step of a table of
tokens is its momentum. For both, links of `norms.links` before and after the learning rate set the lengths of steps and
bound the norms of weights. All other leaves take Adam.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import optax

from gauge_optax.binding import Axes, block_specs, is_empty, leaf_shape, leaves_by_path
from gauge_optax.binding.axes import parse_axes
from gauge_optax.errors import binding_error, warn
from gauge_optax.gauges.bound import bound as slice_of
from gauge_optax.gauges.gauge import Gauge, Gauges, Product
from gauge_optax.linalg import Coefficients
from gauge_optax.norms import vectors
from gauge_optax.norms.links import norms_below, require_beta, require_bound, vector_norm
from gauge_optax.optimizers._quotient import group_of, quotient_for, require_rate_first
from gauge_optax.optimizers.muon import muon, readings_of_neurons
from gauge_optax.optimizers.polar import polar_of, rotated_or_scaled
from gauge_optax.parts.matrices import TOKEN, Reading, matrices_of
from gauge_optax.transformation import GaugeTransformation, require_moments, require_rates

Scalar = float | jax.Array
_NAME = "max_norm_muon"
_MEMORY = 0.95  # decay of the average of squared lengths


@runtime_checkable
class Found(Protocol):
    """The four attributes of a report of `go.discover` that an optimizer needs."""

    @property
    def turning(self) -> Sequence[Gauge]:
        """The gauges for training; their elements on heads are rotations only, not general invertible matrices."""

    @property
    def neurons(self) -> Mapping[str, Axes]:
        """Path → axes string of every kernel, such as "_ neuron"."""

    @property
    def embeddings(self) -> Mapping[str, Axes]:
        """Path → axes string of every table of tokens, such as "token _"."""

    @property
    def undecided(self) -> Mapping[str, str]:
        """Path → why the network's function does not determine the leaf's axes.

        A leaf that is in none of the three mappings is no kernel.
        """


def max_norm_muon(
    learning_rate: optax.ScalarOrSchedule,
    gauges: Gauges | Found,
    neurons: Mapping[str, Axes] | None = None,
    embeddings: Mapping[str, Axes] | None = None,
    ns_coeffs: Coefficients = "standard",
    ns_steps: int | None = None,
    beta: Scalar = 0.95,
    eps: Scalar = 1e-8,
    weight_decay: optax.ScalarOrSchedule = 0.0,
    weight_decay_mask: Any = None,
    mu_dtype: Any = None,
    *,
    nesterov: bool = True,
    adam_b1: Scalar = 0.9,
    adam_b2: Scalar = 0.95,
    adam_eps_root: Scalar = 0.0,
    adam_weight_decay: optax.ScalarOrSchedule = 0.0,
    adam_learning_rate: optax.ScalarOrSchedule | None = None,
    bound: Scalar = 1.0,
    sizes: Mapping[str, int] | None = None,
    hold: bool = True,
    pin: bool = False,
    rest: str = "anchor",
) -> GaugeTransformation:
    """`quotient` around Muon whose weight vectors have steps of a set average length, and bounded norms.

    Take the peak rate 0.02·√(1,000/steps). In sweeps of five rates, in 250 to 4,000 steps of 8 × 128 bytes, at widths
    64 to 256 and depths 3 and 8, it costs at most 0.0 % of the best of the five (benchmarks/results/rates.md). At width
    512, in 200 steps, the best rate was half as high (benchmarks/results/transfer.md). With equal budgets of tuning,
    from three starts, the loss is 1.8 %, 1.8 % and 1.9 % below Muon's after 1,000 steps of a Llama of 3 layers and
    width 128, and 3.4 % below Muon's, untuned, on another network and text; in 4,000 steps, at width 256 and with 8
    layers the two are level (benchmarks/results/tuned.md). In an independent run of 1,000 steps, one seed per start, it
    was 0.6 to 2.4 % ahead of a tuned Muon at a rate of 0.02, and level or behind at 0.04. Larger models were not tried.

    The *unit* of a vector is the norm that it has at the usual start: 1 for a neuron, whose weights have variance
    1/inputs, and √d for a token in a table of embeddings, with d entries of size 1. The average length of a vector's
    steps is the learning rate times `bound` times its unit. No vector may become longer than `bound` times its unit,
    which replaces weight decay; only the tokens of an unembedding have no bound. Kernels step along the polar factor of
    their momentum, as whole matrices. Tokens step along their momentum itself: a polar factor treats rotations of
    tokens into each other as a symmetry of their table, but only permutations are one. All other leaves get Adam.

    Args:
      learning_rate: a number or a schedule.
      gauges: a gauge or a sequence of gauges; or the report of `go.discover`, which has gauges, neurons and embeddings:
        `go.max_norm_muon(0.02, report)`. Its gauges are `report.turning`, which acts on heads by rotations only,
        because other invertible matrices would change the norms that this optimizer bounds.
      neurons: path → axes of kernels, by default the report's mapping: `_` are a neuron's inputs, and named axes count
        neurons, as in `"_ neuron"` for (inputs, outputs) and `"_ head neuron"` for (inputs, heads, size). A kernel is
        one matrix; axes named `layer` or `expert` count matrices. The neurons of an unembedding are tokens: write `"_
        token"`.
      embeddings: path → axes of the tables that have a vector `_` per input token, such as `"token _"`.
      ns_coeffs: see `scale_by_scaled_polar`.
      ns_steps: see `scale_by_scaled_polar`.
      beta: decay of the first moment of matrices and tokens.
      eps: see `scale_by_scaled_polar`.
      weight_decay: decoupled decay of matrices: a step subtracts learning rate · weight_decay · weights. It is
        rarely needed, because norms are bounded.
      weight_decay_mask: where `weight_decay` decays, as in `optax.contrib.muon`. A callable gets the slice point
        at `init`, and updates on the slice later, as in Optax; both are the same for all weights of one function.
      mu_dtype: dtype of the first moment; by default at least float32 for leaves that gauges bind, and the leaf's own
        dtype for all others.
      nesterov: whether to use Nesterov momentum, for all leaves.
      adam_b1: decay of Adam's first moments.
      adam_b2: decay of Adam's second moments.
      adam_eps_root: added inside the root of Adam's second moment.
      adam_weight_decay: decoupled decay of the leaves that Adam steps.
      adam_learning_rate: learning rate of the leaves that Adam steps; by default half of `learning_rate`.
      bound: the largest norm of a vector in its unit; lengths of steps are multiplied by it. See `keep_norms_below`.
      sizes: axis name → length, for axes in parentheses, `(a b)`, whose lengths do not follow from a leaf's shape.
      hold: see `quotient`.
      pin: see `quotient`.
      rest: see `quotient`.

    Returns:
      The optimizer. Its `update` needs `params`.

    Raises:
      ValueError: the errors of `keep_norms_below` and `quotient`; neurons that describe no matrix; a path in both
        mappings; a leaf of which the mappings list only some entries.

    For a fused kernel, list the ranges of its matrices: `("_ (head unit)=0:32", "_ (head unit)=32:40")`. Leaves that
    neither mapping lists get Adam with `eps`; `init` warns if some of them are matrices.

    >>> gauge = go.rescale({"up": "_ channel"}, {"down": "channel _"})
    >>> params = {"up": jnp.full((2, 3), 0.5**0.5), "down": jnp.zeros((3, 2))}
    >>> tx = go.max_norm_muon(0.02, gauge, {"up": "_ neuron", "down": "_ neuron"})
    >>> grads = {"up": jnp.zeros((2, 3)), "down": -jnp.ones((3, 2))}
    >>> step, _ = tx.update(grads, tx.init(params), params)
    >>> jnp.linalg.norm(step["down"], axis=0).round(3)  # from zero, by the learning rate
    Array([0.02, 0.02], dtype=float32)

    Reference: Jordan et al. 2024 (Muon); here every vector of its step is scaled to one average length. Lau and Su
      2026, arXiv 2605.18106, for tokens: they divide a token's momentum by its present norm; here it is divided by an
      average over steps of its norm, so that the steps of a token that no batch contains fade. `optax.contrib.muon` for
      names, and for defaults except those of Adam's rate and b2.
    """
    require_rate_first(_NAME, learning_rate, gauges)
    require_rates(_NAME, weight_decay=weight_decay, adam_weight_decay=adam_weight_decay)
    if adam_learning_rate is not None:
        require_rates(_NAME, adam_learning_rate=adam_learning_rate)
    require_moments(_NAME, adam_b1=adam_b1, adam_b2=adam_b2, adam_eps_root=adam_eps_root)
    undecided = None
    if isinstance(gauges, Found):
        undecided = gauges.undecided if neurons is None else None
        neurons = gauges.neurons if neurons is None else neurons
        embeddings = gauges.embeddings if embeddings is None else embeddings
        gauges = gauges.turning
    elif neurons is None:
        raise binding_error(
            _NAME, "no neurons", "gauges without a mapping", "path → axes of every kernel, or a report of go.discover",
            "write go.max_norm_muon(rate, go.discover(fn, params, batches)), or neurons={'up/kernel': '_ neuron', ...}")
    group = group_of(_NAME, learning_rate, gauges)
    require_bound(_NAME, bound)
    require_beta(_NAME, beta)
    listed = Listed.parse(neurons or {}, embeddings or {}, sizes)
    polar = polar_of(_NAME, ns_coeffs, ns_steps, beta, eps, "width", None)

    def matrices(params: Any) -> dict[str, Reading]:
        return readings_of_neurons(_NAME, listed.on(params)[0])

    def tokens(params: Any) -> list[str]:
        return [selection.block.path for selection in listed.on(params)[1]]

    def paced(own: vectors.Specs, bounded: vectors.Specs) -> tuple[optax.GradientTransformation, ...]:
        """Returns the links that follow a direction: they set a length per vector, the learning rate, and norm bounds.

        A token's step is its momentum divided by an average of the momentum's norm. While no batch contains the token,
        the momentum falls by the factor 0.95 a step and the average only by √0.95, so that the steps fade.

        Args:
          own: the vectors whose steps get a length.
          bounded: those of them whose norms are bounded.
        """
        rate = optax.scale_by_learning_rate(learning_rate)
        lengths = [vector_norm(_NAME, own, _MEMORY, lambda x: bound * listed.unit(x))] if own else []
        return *lengths, rate, *([norms_below(_NAME, bounded, bound, listed.unit)] if bounded else [])

    of_matrices = paced(listed.kernels, listed.kernels)
    if listed.kernels:
        of_matrices = *_decayed(of_matrices[0], weight_decay, weight_decay_mask), *of_matrices[1:]
    # The tokens of an unembedding have no bound: adding one vector to all of them changes their norms but not the loss.
    of_tokens = optax.chain(*paced(listed.unembeddings + listed.tables, listed.tables))
    adam_rate = _half(learning_rate) if adam_learning_rate is None else adam_learning_rate
    adam = optax.adamw(adam_rate, adam_b1, adam_b2, eps, adam_eps_root, mu_dtype, adam_weight_decay, nesterov=nesterov)
    inner = muon(matrices, polar, nesterov, mu_dtype, of_matrices, adam, (tokens, of_tokens))
    made = quotient_for(_NAME, inner, group, hold=hold, pin=pin, rest=rest)
    with_rate = adam_learning_rate is not None

    def init(params: Any) -> Any:
        state = made.init(params)
        for error in _unlisted(group, listed, undecided, params, with_rate):
            warn(error)
        return state

    def preflight(params: Any) -> Sequence[str | ValueError]:
        unlisted = _unlisted(group, listed, undecided, params, with_rate)
        return [*(map(str, unlisted) if with_rate else unlisted), *made.preflight(params)]

    tx = GaugeTransformation(init, made.update, made.gauges, made.rules, preflight)
    init.made_by = tx  # type: ignore[attr-defined]  # `optax.chain` keeps only the two functions of `tx`
    return tx


class Listed(NamedTuple):
    """The vectors that the user's two mappings list, sorted into three kinds.

    Attributes:
      kernels: neurons of matrices.
      unembeddings: neurons of an output layer, one per token: their axes have the name `token`.
      tables: vectors of input tokens, in tables of embeddings.
    """

    kernels: vectors.Specs
    unembeddings: vectors.Specs
    tables: vectors.Specs

    @classmethod
    def parse(
        cls, neurons: Mapping[str, Axes], embeddings: Mapping[str, Axes], sizes: Mapping[str, int] | None
    ) -> "Listed":
        """Parses both mappings. Raises ValueError for an argument that is no mapping, bad axes, or a path in both."""
        arguments: dict[str, Any] = {"neurons": neurons, "embeddings": embeddings}
        for argument, mapping in arguments.items():
            if not isinstance(mapping, Mapping):
                block_specs(_NAME, argument, mapping)  # raises
        if both := neurons.keys() & embeddings.keys():
            raise binding_error(
                _NAME, f"'{min(both)}' in two mappings", "neurons and embeddings", "one of them",
                "list a tied embedding in embeddings alone",
            )
        specs = vectors.parse(_NAME, "neurons", {**neurons, **embeddings}, sizes)
        tables = tuple(spec for spec in specs if spec[0].pattern in embeddings)
        named = [(spec, {part.name for part in parse_axes(_NAME, spec[0].pattern, spec[0].axes).items})
                 for spec in specs if spec not in tables]
        return cls(
            tuple(spec for spec, names in named if TOKEN not in names),
            tuple(spec for spec, names in named if TOKEN in names), tables,
        )

    def unit(self, selection: vectors.Selection) -> float:
        """Returns the norm that these vectors have at the usual start."""
        of_table = any(spec.pattern == selection.pattern for spec, _ in self.tables)
        return math.sqrt(selection.length) if of_table else 1.0

    def on(self, params: Any) -> tuple[list[vectors.Selection], list[vectors.Selection]]:
        """Returns the vectors of a tree: neurons of matrices, and tokens.

        Raises ValueError if only some entries of a leaf are listed, if a leaf has both tokens and neurons, or if tokens
        have no vectors.
        """
        neurons = vectors.resolve(_NAME, self.kernels, params)
        tokens = vectors.resolve(_NAME, self.unembeddings + self.tables, params)
        by_path: dict[str, list[vectors.Selection]] = {}
        for selection in (*neurons, *tokens):
            by_path.setdefault(selection.block.path, []).append(selection)
        for path, own in by_path.items():
            axes, size = ", ".join(f'"{x.block.axes}"' for x in own), math.prod(own[0].block.shape)
            if own[0] in neurons and own[-1] in tokens:
                raise binding_error(
                    _NAME, f"tokens and neurons in one leaf '{path}'", f"axes {axes}", "one of them, not 2",
                    "give the table of tokens a leaf of its own",
                )
            if (count := sum(math.prod(x.block.view_shape) for x in own)) != size:
                raise binding_error(
                    _NAME, f"'{path}' is listed in part", f"{count} of {size} entries, axes {axes}",
                    "every entry of a leaf in one vector: each range of a fused kernel is a matrix of its own",
                    "list the other ranges too",
                )
        for block in (x.block for x in tokens if not 0 < len(x.axes) < len(x.block.view_shape)):
            raise binding_error(
                _NAME, f"the tokens of '{block.path}' have no vectors", f"axes \"{block.axes}\"",
                "'_' for the entries of a token's vector, beside the name that counts tokens",
                f'write "_ {TOKEN}" for (inputs, tokens), or "{TOKEN} _" for a table of (tokens, entries)',
            )
        return neurons, tokens


def _unlisted(
    group: Product, listed: Listed, undecided: Collection[str] | None, params: Any, adam_has_a_rate: bool
) -> list[ValueError]:
    """Returns an error about the matrices that no mapping lists; nothing if there is none.

    A matrix is a leaf with at least two axes that are longer than 1. A leaf that gauges treat as a bias or as a norm's
    scale is no matrix. If the mappings are those of a report of `go.discover`, only leaves in `undecided` count as
    matrices, because the report knows that a stack of biases, for instance, is none.
    """
    if is_empty(params):
        return []
    s = slice_of(group.gauges, params).slice
    own = {selection.block.path for selections in listed.on(params) for selection in selections}
    known = rotated_or_scaled(s) - matrices_of(s.parts).keys() | own
    shapes = {path: leaf_shape(leaf) for path, leaf in leaves_by_path(params).items() if path not in known}
    matrices = {path: shape for path, shape in shapes.items() if sum(length > 1 for length in shape) > 1
                and (undecided is None or path in undecided)}
    return [binding_error(
        _NAME, f"no mapping lists {len(matrices)} {'matrix' if len(matrices) == 1 else 'matrices'}",
        ", ".join(f"'{path}' {shape}" for path, shape in matrices.items()),
        "every kernel and table in neurons or embeddings: Adam steps all other leaves, at "
        + ("its own rate" if adam_has_a_rate else "half of the learning rate"),
        "list the leaf, or give Adam a rate of its own: adam_learning_rate=1e-3",
    )] if matrices else []


def _decayed(
    lengths: optax.GradientTransformation, weight_decay: optax.ScalarOrSchedule, mask: Any
) -> tuple[optax.GradientTransformation, optax.GradientTransformation]:
    """Returns two links: one that counts the steps of decay, and `lengths` followed by the decay of weights.

    `lengths` scales the update of each vector to a set length. If the decay came before it, the decay of a neuron
    without a gradient would be scaled up to a whole step. The first link passes updates on unchanged, and holds the
    state of the decay: in states that users have stored, this state comes before that of `lengths`.
    """
    counting = optax.add_decayed_weights(weight_decay, mask)

    def count(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        return updates, counting.update(updates, state, params)[1]

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        updates, after = lengths.update(updates, state, params)
        now = weight_decay(state.count) if callable(weight_decay) else weight_decay
        decay = optax.add_decayed_weights(now, mask)
        return decay.update(updates, decay.init(params), params)[0], after

    return optax.GradientTransformation(counting.init, count), optax.GradientTransformation(lengths.init, update)


def _half(learning_rate: optax.ScalarOrSchedule) -> optax.ScalarOrSchedule:
    schedule = learning_rate
    return (lambda count: 0.5 * schedule(count)) if callable(schedule) else 0.5 * schedule
