"""What `discover` finds in architectures that pip installs: small random instances, no weights.

    pip install "transformers<5" equinox
    python -m examples.released            # minutes; goes on where it was stopped; --only GPT-2 BERT runs some

Writes examples/results/released.json and released.md. The modules are called as they are, in float32 and with the casts
that they have.
"""

import argparse
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import gauge_optax as go
from examples.studies import harness
from examples.studies.report import bare

RESULT = Path("examples/results/released.json")
DECODER = dict(vocab_size=13, hidden_size=16, intermediate_size=12, num_hidden_layers=2, num_attention_heads=4,
               num_key_value_heads=2, max_position_embeddings=8)
OLD = dict(vocab_size=13, n_positions=8, n_embd=16, n_layer=2, n_head=2, n_inner=12)
ENCODER = dict(vocab_size=13, hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=12,
               max_position_embeddings=12)
BART = dict(vocab_size=13, d_model=8, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
            decoder_attention_heads=2, encoder_ffn_dim=12, decoder_ffn_dim=12, max_position_embeddings=8,
            decoder_start_token_id=0)
# name → transformers' model, configuration, its arguments
MODELS: Mapping[str, tuple[str, str, Mapping[str, Any]]] = {
    "GPT-2": ("FlaxGPT2LMHeadModel", "GPT2Config", OLD),
    "GPT-J": ("FlaxGPTJForCausalLM", "GPTJConfig", OLD | {"rotary_dim": 4}),
    "GPT-Neo": ("FlaxGPTNeoForCausalLM", "GPTNeoConfig", dict(
        vocab_size=13, hidden_size=8, num_layers=2, attention_types=[[["global", "local"], 1]], num_heads=2,
        intermediate_size=12, max_position_embeddings=8, window_size=4)),
    "Llama": ("FlaxLlamaForCausalLM", "LlamaConfig", DECODER),
    "Mistral": ("FlaxMistralForCausalLM", "MistralConfig", DECODER),
    "Gemma": ("FlaxGemmaForCausalLM", "GemmaConfig", DECODER | {"num_key_value_heads": 1, "head_dim": 4}),
    "OPT": ("FlaxOPTForCausalLM", "OPTConfig", dict(
        vocab_size=13, hidden_size=8, ffn_dim=12, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=8, word_embed_proj_dim=8)),
    "BLOOM": ("FlaxBloomForCausalLM", "BloomConfig", dict(vocab_size=13, hidden_size=8, n_layer=2, n_head=2)),
    "BERT": ("FlaxBertForMaskedLM", "BertConfig", ENCODER),
    "RoBERTa": ("FlaxRobertaForMaskedLM", "RobertaConfig", ENCODER),
    "BART": ("FlaxBartForConditionalGeneration", "BartConfig", BART),
    "ViT": ("FlaxViTForImageClassification", "ViTConfig", dict(
        hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=12, image_size=8, patch_size=4,
        num_labels=5)),
    "ResNet": ("FlaxResNetForImageClassification", "ResNetConfig", dict(
        embedding_size=4, hidden_sizes=[4, 6], depths=[1, 1], layer_type="basic", num_labels=5)),
}
Built = tuple[Callable[[Any, Any], Any], Any, list[np.ndarray]]


def of_transformers(model: str, config: str, options: Mapping[str, Any]) -> Built:
    """Function, parameters and batches of one of transformers' Flax models."""
    import transformers

    rng = np.random.default_rng(0)
    image = {"ViT": 8, "ResN": 16}.get(model[4:7] if "ViT" in model else model[4:8], 0)
    shape = {"input_shape": (1, image, image, 3)} if image else {}
    whole = getattr(transformers, model)(getattr(transformers, config)(**options), seed=0, **shape)
    module = whole.module
    if image:
        variables = {"params": whole.params} if "batch_stats" not in whole.params else whole.params
        return lambda p, x: module.apply(p, x).logits, variables, list(rng.normal(size=(2, 2, image, image, 3)))

    def fn(params: Any, tokens: Any) -> Any:
        mask, places = jnp.ones_like(tokens), jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        call = {"Bert": (tokens, mask, jnp.zeros_like(tokens), places, None), "Bloom": (tokens, mask)}
        arguments = next((x for name, x in call.items() if name.lower() in model.lower()), (tokens, mask, places))
        if "Bart" in model:
            arguments = (tokens, mask, tokens[:, ::-1], mask, places, places)
        return module.apply({"params": params}, *arguments).logits

    return fn, whole.params, list(rng.integers(2, 13, (2, 2, 6)))


def of_equinox() -> Built:
    """An equinox module: attention and a ReLU network over a sequence of vectors."""
    import equinox as eqx

    keys = jax.random.split(jax.random.key(0), 2)
    attention = eqx.nn.MultiheadAttention(2, 8, use_query_bias=True, use_value_bias=True, key=keys[0])
    params, static = eqx.partition((attention, eqx.nn.MLP(8, 4, 12, 2, key=keys[1])), eqx.is_inexact_array)

    def fn(p: Any, x: Any) -> Any:
        attend, mlp = eqx.combine(p, static)
        return jax.vmap(jax.vmap(mlp))(jax.vmap(lambda row: row + attend(row, row, row))(x))

    return fn, params, list(np.random.default_rng(0).normal(size=(2, 3, 5, 8)))


def measure(name: str) -> dict[str, Any]:
    """One architecture's report."""
    with jax.enable_x64(False):
        fn, params, batches = of_equinox() if name == "equinox" else of_transformers(*MODELS[name])
    began = time.perf_counter()
    report = go.discover(fn, params, batches, "logits", progress=False)
    assert eval(report.code(), {"go": go}) == report.gauges
    return {
        "leaves": len(jax.tree.leaves(params)),
        "seconds": round(time.perf_counter() - began, 1),
        "gauges": [held.call.kind for held in report.held],
        "change": max((held.change for held in report.held), default=0.0),
        "nearly": [held.call.kind for held in report.nearly],
        "rejected": list(report.rejected),
        "ungauged": {kind: len(where) for kind, where in report.ungauged.items()},
        "report": str(report),
        "code": report.code(report.whole),
    }


def section(results: Mapping[str, Any]) -> str:
    """The table."""
    rows: list[list[Any]] = [["architecture", "leaves", "s", "gauges", "largest change", "nearly", "no gauge"]]
    for name, result in results.items():
        if "error" in result:
            rows.append([name, "", "", result["error"], "", "", ""])
            continue
        count = ", ".join(f"{result['gauges'].count(kind)} {kind}" for kind in dict.fromkeys(result["gauges"]))
        rest = "; ".join(f"{n} × {kind}" for kind, n in result["ungauged"].items())
        numbers = result["leaves"], result["seconds"], count, f"{result['change']:.0e}", len(result["nearly"])
        rows.append([name, *numbers, rest])
    return f"Small random instances, no weights; 2 CPU cores. [Every report](released.md).\n\n{bare(rows)}"


def markdown(results: Mapping[str, Any]) -> str:
    """Every report."""
    shown = {name: result["report"] for name, result in results.items() if "report" in result}
    reports = [f"## {name}\n\n```text\n{report}\n```\n" for name, report in shown.items()]
    about = (
        "`go.discover` finds the symmetries of a model. This page shows what it prints for small instances of\n"
        "released architectures: the gauges, what holds nearly, and symmetries that no gauge expresses."
    )
    return "\n".join(["# Released architectures", "", about, "", *reports])


def attempted(config: None, args: argparse.Namespace, name: str) -> dict[str, Any]:
    """The same, or what went wrong; to try that again, delete its entry."""
    try:
        return measure(name)
    except (ImportError, TypeError, AttributeError, ValueError) as error:
        return {"error": f"{type(error).__name__}: {str(error).splitlines()[0]}"}


STUDY = harness.Study(
    __doc__, "released", harness.by_name([*MODELS, "equinox"], attempted, ""), section, page=markdown, seeds=None,
    precision=None, head=lambda _: {}, folder=RESULT.parent, partial=True,
)

if __name__ == "__main__":
    harness.main(STUDY)
