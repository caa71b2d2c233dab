"""Norms and rotations of trained networks, beside the predictions of Table 1 of Rotational Equilibrium.

    python -m examples.studies rotational_networks

The study measures the norm of a layer's neurons and their rotation per step, and what explains the difference from the
prediction (the paper's Fig. 3, 10 to 12, 14, 15). Training is AdamW at a constant rate, with decay and without. The
networks are the demo's language model, as it is and weight-standardized; and classifiers of digits with batch norm (so
that every filter is scale-invariant), with weight standardization, and without any normalisation. Three in ten labels
of digits are drawn at random at each step, because gradients would vanish once all labels are learnt.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import gauge_optax as go
from examples.studies import harness, report, starts
from examples.studies.harness import Result
from gauge_optax.binding import leaves_by_path
from models import digits, lm
from models.digits import DigitsConfig, neurons
from models.weight_standardization import standardize

Cell = dict[str, Any]

LM_STEPS, DIGITS_STEPS, EVERY = 1_200, 3_000, 10
BATCH, NOISE = 64, 0.3  # images of a batch; the share of their labels that is drawn at random
NEAR, STILL = 0.1, 0.1
FIGURES = ("norm", "rotation", "decay", "square", "weight_gradient", "gradient_momentum")


class Net(NamedTuple):
    """A network, its learning rate and weight decay. `cnn` is None for the language model."""

    cnn: DigitsConfig | None
    standardized: bool
    learning_rate: float
    weight_decay: float


CNN = DigitsConfig(kind="cnn", width=16, norm="batch")
NETS = {
    "LM": Net(None, False, 5e-3, 0.5),
    "LM, standardized": Net(None, True, 5e-3, 0.5),
    "LM, no decay": Net(None, False, 5e-3, 0.0),
    "LM, standardized, no decay": Net(None, True, 5e-3, 0.0),
    "digits, batch norm": Net(CNN, False, 1e-2, 0.1),
    "digits, standardized": Net(DigitsConfig(kind="cnn", width=16, norm="none", standardized=True), True, 1e-2, 0.1),
    "digits, no norm": Net(DigitsConfig(kind="cnn", width=16, norm="none"), False, 1e-2, 0.1),
    "digits, batch norm, no decay": Net(CNN, False, 1e-2, 0.0),
}


def fan_in(axes: str) -> tuple[int, ...]:
    """The axes of a kernel that a neuron sums over."""
    return tuple(k for k, name in enumerate(axes.split()) if name == "_")


def observer(net: Net, axes: Mapping[str, str]) -> Callable[..., dict[str, jax.Array]]:
    """Returns a function that measures one step: path of a layer → the quantities `FIGURES`, averaged over neurons."""
    rate = net.weight_decay if net.weight_decay else 1.0

    def of(params: Any, grads: Any, state: Any, updates: Any, after: Any) -> dict[str, jax.Array]:
        leaves, gradients, moves = (leaves_by_path(tree) for tree in (params, grads, updates))
        before, square = (leaves_by_path(optax.tree.get(s, key)) for s, key in ((state, "mu"), (after, "nu")))
        corrected = 1.0 - 0.999 ** jnp.asarray(optax.tree.get(after, "ScaleByAdamState").count, jnp.float32)
        kept = {}
        for path, over in axes.items():
            w, g, move = leaves[path], gradients[path], moves[path]
            fan = fan_in(over)

            def dot(a: jax.Array, b: jax.Array, fan: tuple[int, ...] = fan) -> jax.Array:
                return jnp.sum(a * b, fan)

            scaled = g / (jnp.sqrt(square[path] / corrected) + 1e-8)
            size, along = dot(w, w), dot(w, move) / dot(w, w)
            across = jnp.sqrt(jnp.maximum(dot(move, move) - along**2 * size, 0.0))
            entries = w.size / size.size
            kept[path] = jnp.stack([
                jnp.sqrt(size).mean(), jnp.arctan2(across, (1.0 + along) * jnp.sqrt(size)).mean(),
                (net.weight_decay + dot(w, scaled) / size).mean() / rate, (dot(scaled, scaled) / entries).mean(),
                _cosine(w, g, dot).mean(), _cosine(g, before[path], dot).mean(),
            ])
        return kept

    return of


def _cosine(a: jax.Array, b: jax.Array, dot: Callable[..., jax.Array]) -> jax.Array:
    return dot(a, b) / jnp.sqrt(jnp.maximum(dot(a, a) * dot(b, b), 1e-38))


def along(
    net: Net, loss: Callable[[Any, Any], jax.Array], axes: Mapping[str, str], params: Any, batches: Any
) -> dict[str, jax.Array]:
    """Trains on stacked batches. Returns path → (windows, `FIGURES`): means over windows of `EVERY` steps.

    Call it inside `jit`.
    """
    decays = jax.tree.map(lambda x: x.ndim > 1, params)
    tx, observe = optax.adamw(net.learning_rate, weight_decay=net.weight_decay, mask=decays), observer(net, axes)

    def step(carry: tuple[Any, Any], batch: Any) -> tuple[tuple[Any, Any], Any]:
        params, state = carry
        grads = jax.grad(loss)(params, batch)
        updates, after = tx.update(grads, state, params)
        return (optax.apply_updates(params, updates), after), observe(params, grads, state, updates, after)

    def window(carry: tuple[Any, Any], batches: Any) -> tuple[tuple[Any, Any], Any]:
        carry, kept = jax.lax.scan(step, carry, batches)
        return carry, jax.tree.map(lambda x: x.mean(0), kept)

    windows = jax.tree.map(lambda x: x.reshape(-1, EVERY, *x.shape[1:]), batches)
    return jax.lax.scan(window, (params, tx.init(params)), windows)[1]


ATTENTION = dict.fromkeys(("query", "key", "value"), "_ head channel") | {"out": "_ _ channel"}
MLP = dict.fromkeys(("up", "gate", "down"), "_ channel")
"""Name of a kernel of the language model → axes string, where `_` are the axes that a neuron sums over."""


def of_language_model(net: Net, seeds: Sequence[int]) -> tuple[dict[str, np.ndarray], dict[str, int]]:
    """Trains the language model. Returns path → (seeds, windows, `FIGURES`), and path → entries of a neuron."""
    config, inside = lm.llama_config(), "layer/kernel" if net.standardized else "kernel"
    axes = {
        f"blocks/{k}/{block}/{name}/{inside}": over
        for k in range(config.layers) for block, kernels in (("attn", ATTENTION), ("mlp", MLP))
        for name, over in kernels.items()
    }

    def build(seed: int) -> tuple[Any, Any]:
        model = lm.build(config, nnx.Rngs(seed))
        if net.standardized:
            standardize(model, ATTENTION | MLP)
        graph, state = nnx.split(model)
        return graph, nnx.to_pure_dict(state)

    graph, _ = build(0)

    def loss(params: Any, tokens: jax.Array) -> jax.Array:
        return lm.loss_fn(nnx.merge(graph, params), tokens)

    run = jax.jit(functools.partial(along, net, loss, axes))
    runs = [jax.device_get(run(build(seed)[1], starts.batches(LM_STEPS, seed))) for seed in seeds]
    entries = {path: config.d_ff if "mlp/down" in path else config.d_model for path in axes}
    return jax.tree.map(lambda *x: np.stack(x), *runs), entries


def of_digits(net: Net, config: DigitsConfig, seeds: Sequence[int]) -> tuple[dict[str, np.ndarray], dict[str, int]]:
    """Trains a classifier of digits. Returns what `of_language_model` returns."""
    init, logits = digits.make(config)
    (images, labels), _ = digits.data()
    order = np.stack([np.random.default_rng(s).integers(0, len(labels), (DIGITS_STEPS, BATCH)) for s in seeds])
    targets = np.stack([_redrawn(labels[rows], seed) for rows, seed in zip(order, seeds, strict=True)])
    params = jax.vmap(init)(jnp.stack([jax.random.key(seed) for seed in seeds]))

    def loss(params: Any, batch: tuple[jax.Array, jax.Array]) -> jax.Array:
        return digits.cross_entropy(logits(params, jnp.asarray(images)[batch[0]]), batch[1])

    axes = neurons(config)
    kept = jax.jit(jax.vmap(functools.partial(along, net, loss, axes)))(params, (order, targets))
    return jax.device_get(kept), {path: 9 if "/0/" in path else 9 * config.width for path in axes}


def _redrawn(labels: np.ndarray, seed: int) -> np.ndarray:
    """The labels, of which a share `NOISE` is drawn at random, so that gradients do not vanish at the end."""
    draw = np.random.default_rng([seed, 1])
    other = draw.integers(0, digits.CLASSES, labels.shape)
    return np.where(draw.random(labels.shape) < NOISE, other, labels)


def measured(name: str, seeds: Sequence[int]) -> Cell:
    """Trains one network. Returns per layer curves of the first seed, and means over the last third of each run."""
    net = NETS[name]
    kept, entries = of_language_model(net, seeds) if net.cnn is None else of_digits(net, net.cnn, seeds)
    out: Cell = {"layers": {}}
    for path, curves in kept.items():
        rest = go.measure.predict_equilibrium(
            "adamw", learning_rate=net.learning_rate, weight_decay=net.weight_decay or np.nan, dim=entries[path],
            second_order=True,
        )
        means = curves[:, curves.shape[1] * 2 // 3 :].mean(1)
        out["layers"][path] = {key: means[:, k] for k, key in enumerate(FIGURES)} | {
            "predicted": [float(rest.norm), float(rest.rotation)] if net.weight_decay else [],
            "curves": {"norm": curves[0, :, 0], "rotation": curves[0, :, 1]},
        }
    return out


def ratios(layer: Cell, corrected: bool) -> tuple[np.ndarray, np.ndarray]:
    """Norm and rotation of a layer, divided by their predictions, for every seed.

    If `corrected`, the prediction uses the measured effective decay λ_e and size of g/√v (Eq. 96 to 98).
    """
    norm, rotation = layer["predicted"]
    turn = np.sqrt(np.maximum(layer["decay"], 1e-6)) if corrected else 1.0
    size = np.sqrt(layer["square"]) if corrected else 1.0
    return np.asarray(layer["norm"]) / (norm * size / turn), np.asarray(layer["rotation"]) / (rotation * turn)


def figure(result: Result, path: Path) -> None:
    """Draws norm and rotation, divided by their predictions, along training, with a curve per layer."""
    names = [name for name in NETS if "no decay" not in name]
    fig, axes = report.plt.subplots(2, len(names), figsize=(3.2 * len(names), 5.4), layout="constrained", sharex="col")
    for column, name in zip(axes.T, names, strict=True):
        for layer, layer_result in result["cells"][name]["layers"].items():
            for axis, key, rest in zip(column, ("norm", "rotation"), layer_result["predicted"], strict=True):
                curve = np.asarray(layer_result["curves"][key])
                axis.plot(np.arange(len(curve)) * EVERY, curve / rest, lw=0.9, label=layer.removesuffix("/kernel"))
        for axis, key in zip(column, ("norm", "rotation"), strict=True):
            axis.axhline(1.0, color="black", ls="--", lw=1)
            axis.set_ylim(0, 2.5)
            axis.set_title(name if key == "norm" else "", fontsize=10)
        column[1].set_xlabel("step")
    axes[0, 0].set_ylabel("norm / predicted")
    axes[1, 0].set_ylabel("rotation / predicted")
    report.save_as_is(fig, path)


HEAD = (
    "", "norm", "rotation", "norm, corrected", "rotation, corrected", "λ_e/λ", "E‖g/√v‖²/C", "cos(ω, g)", "cos(g, m)",
)


def _row(name: str, layers: Mapping[str, Cell]) -> list[str]:
    pairs = [[ratios(layer, corrected) for layer in layers.values()] for corrected in (False, True)]
    spans = [report.span(np.concatenate(x).tolist(), ".2f") for pair in pairs for x in zip(*pair, strict=True)]
    by = [np.concatenate([np.asarray(layer[key]) for layer in layers.values()]).tolist() for key in FIGURES[2:]]
    return [name, *spans, *(report.span(x, ".2f") for x in by)]


def _without_decay(name: str, layers: Mapping[str, Cell]) -> str:
    turned, norms = ([np.asarray(layer["curves"][key]) for layer in layers.values()] for key in ("rotation", "norm"))
    left = report.span([x[-1] / x[len(x) // 20] for x in turned], ".2f")
    times = report.span([x[-1] / x[0] for x in norms], ".1f")
    return f"{name}: rotation falls to {left} of what it was after a twentieth of the run, norms grow {times}-fold"


def section(result: Result) -> str:
    """The results as Markdown: tables, and sentences about them."""
    cells = result["cells"]
    rows = [_row(name, cell["layers"]) for name, cell in cells.items() if NETS[name].weight_decay]
    still = [_without_decay(name, cell["layers"]) for name, cell in cells.items() if not NETS[name].weight_decay]
    return "\n\n".join([
        f"{len(result['seeds'])} seeds, float32, {result['machine']}; measured over predicted, smallest to largest "
        "over layers and seeds, last third of the run. Corrected: by the λ_e and C_err measured (Eq. 96 to 98).",
        report.plain([HEAD, *rows]),
        " ".join(_verdicts(cells)),
        "Without decay: " + ". ".join(still) + ". " + report.paper(
            "without decay rotation approaches zero", _left(cells),
            f"rotation at the end over that after a twentieth of the run, below {STILL:g}", "layers of the first seed",
        ),
    ])


INVARIANT = ("LM, standardized", "digits, batch norm", "digits, standardized")
"""Networks whose function does not depend on the norms of their neurons."""


def _verdicts(cells: Mapping[str, Cell]) -> list[str]:
    """Sentences on the paper's claims about layers with decay. A case is a layer and a seed."""

    def off(names: Sequence[str], which: int, corrected: bool) -> np.ndarray:
        """How far norm (`which` = 0) or rotation (1) is from its prediction: |log| of their ratio, for every case."""
        found = [ratios(layer, corrected)[which] for name in names for layer in cells[name]["layers"].values()]
        return np.abs(np.log(np.concatenate(found)))

    others, said = [name for name in cells if NETS[name].weight_decay and name not in INVARIANT], []
    for k, key in enumerate(("norm", "rotation")):
        near = off(INVARIANT, k, False) <= np.log1p(NEAR)
        said.append(("scale-invariant layers rest where Table 1 says", near,
                     f"{key} over its prediction, within {NEAR:.0%}"))
    for k, key in enumerate(("norm", "rotation")):
        said.append(("other layers are off by the radial part of their gradient",
                     off(others, k, True) < off(others, k, False),
                     f"{key} over its prediction, nearer to 1 when corrected by λ_e and C_err"))
    aligned = np.concatenate([layer["gradient_momentum"] for layer in cells["LM"]["layers"].values()])
    said.append(("a transformer's gradient is aligned negatively with its momentum", aligned < 0,
                 "the sign of cos(g, m) of the LM"))
    return [report.paper(finding, list(holds), by, "layers and seeds") for finding, holds, by in said]


def _left(cells: Mapping[str, Cell]) -> list[bool]:
    """For every layer without decay: whether its neurons have nearly stopped rotating at the end."""
    layers = [x for name, cell in cells.items() if not NETS[name].weight_decay for x in cell["layers"].values()]
    turned = [layer["curves"]["rotation"] for layer in layers]
    return [bool(x[-1] < STILL * x[len(x) // 20]) for x in turned]


STUDY = harness.Study(
    __doc__, "rotational_networks", harness.by_name(NETS, lambda _, args, name: measured(name, args.seeds)), section,
    figure, seeds=(0, 1, 2), digits=5,
    settings=lambda _: {
        "steps": [LM_STEPS, DIGITS_STEPS],
        "nets": {name: [net.learning_rate, net.weight_decay] for name, net in NETS.items()},
    },
)
