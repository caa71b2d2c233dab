"""The problems on which optimizers are compared: parameters, gauges, gradients, and the leaves that Muon steps."""

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import optax

import gauge_optax as go
from benchmarks.training.links import EMBEDDINGS, NEURONS, TOKENS, joined
from examples.studies.starts import muon_axes
from models import lm

Tree = Any


@dataclass(frozen=True)
class Size:
    """A model, given by its configuration.

    Attributes:
      about: one line for the table.
      config: the configuration of the model.
      batch: sequences of a whole training step, on a CPU and on an accelerator; 0 if whole steps are not timed.
      length: tokens of a sequence, on a CPU and on an accelerator.
      attention_only: whether the problem has only the attention kernels of the model.
    """

    about: str
    config: lm.LMConfig
    batch: tuple[int, int] = (0, 0)
    length: tuple[int, int] = (0, 0)
    attention_only: bool = False

    def at(self, width: int, layers: int) -> "Size":
        """The same architecture with another width and number of layers (0: the model's own), to try a command."""
        c = dataclasses.replace(self.config, layers=layers or self.config.layers)
        if not width:
            return dataclasses.replace(self, config=c)
        d_head = min(c.d_head, width // 2)
        heads = width // d_head
        c = dataclasses.replace(
            c, d_model=width, heads=heads, kv_heads=heads, d_head=d_head, d_ff=width * c.d_ff // c.d_model,
            vocab=min(c.vocab, 64), max_len=min(c.max_len, 64),
        )
        return dataclasses.replace(self, config=c, length=(min(self.length[0], 16), min(self.length[1], 16)))


GPT2 = lm.LMConfig(vocab=50257, d_model=768, layers=12, heads=12, kv_heads=12, d_head=64, d_ff=3072, max_len=1024,
                   mlp="gelu", tied=True)
SIZES = {
    "toy": Size(
        "2 layers of d = 128, LayerNorm, ReLU MLP, biases, untied head",
        lm.LMConfig(vocab=256, d_model=128, layers=2, heads=4, kv_heads=4, d_head=32, d_ff=512, max_len=1024),
        batch=(8, 8), length=(64, 64)),
    "gpt2": Size(
        "GPT-2 124M: 12 layers of d = 768, LayerNorm, GELU MLP, biases, tied head of 50,257",
        GPT2, batch=(4, 8), length=(256, 1024)),
    "1b_layer": Size(
        "one layer of a 1B Llama: d = 2048, 16 heads of 128, rotary, RMSNorm, SwiGLU of 8192, vocabulary of 256",
        lm.llama_config(vocab=256, d_model=2048, layers=1, heads=16, kv_heads=16, d_head=128, d_ff=8192),
        batch=(4, 8), length=(256, 1024)),
    "attention": Size(
        "the 48 attention kernels of GPT-2 124M: 12 layers of query, key, value and output, d = 768, 12 heads; "
        "gradients drawn at random and made horizontal, as those of a loss are",
        GPT2, attention_only=True),
}


LABELS = {"blocks/{i}/mlp/{layer}/kernel": "muon"}
"""Labels for `ddc_muon`. Without them, Adam would step the kernels that no gauge binds: those of an MLP with a GELU."""


@dataclass(frozen=True)
class Case:
    """What optimizers get for one size. `loss` and `tokens` are None without whole steps. `ddc_muon` gets `labels`."""

    params: Tree
    grads: Tree
    gauges: Sequence[go.Gauge]
    loss: Callable[[Tree, Tree], jax.Array] | None = None
    tokens: jax.Array | None = None
    labels: Mapping[str, str] = field(default_factory=dict)

    def muon(self, rate: float, per_head: bool = False) -> optax.GradientTransformation:
        """`optax.contrib.muon`, which orthogonalizes the leaves of `muon_axes`."""
        return optax.contrib.muon(rate, muon_weight_dimension_numbers=muon_axes(self.params, per_head))

    def quotient_muon(self, rate: float) -> optax.GradientTransformation:
        """`quotient_muon`, which orthogonalizes the same leaves."""
        return go.quotient_muon(rate, self.gauges, labels=self.labels)

    def ddc_muon(self, rate: float) -> optax.GradientTransformation:
        """`ddc_muon`, which orthogonalizes the same leaves."""
        return go.ddc_muon(rate, self.gauges, labels=self.labels)

    def max_norm_muon(self, rate: float) -> optax.GradientTransformation:
        """`max_norm_muon` for the same leaves and for the tables of tokens, which have a bound of their own."""
        neurons, tables = (self._present(of) for of in ({**NEURONS, **TOKENS}, EMBEDDINGS))
        # Neither mapping has the table of positions: Adam steps it too, with `adam_learning_rate`.
        return go.max_norm_muon(rate, self.gauges, neurons, tables, adam_learning_rate=rate / 2)

    def rotational_adamw(self, rate: float) -> optax.GradientTransformation:
        """`rotational_adamw`, which rotates every neuron of the kernels. All other leaves get AdamW."""
        return go.norms.rotational_adamw(rate, self._present(NEURONS), weight_decay=0.1)

    def hold_products(self, inner: optax.GradientTransformation) -> optax.GradientTransformation:
        """Wraps an optimizer by `hold_products`, with a cap on products of norms' scales and kernels behind them."""
        scales = [gauge for gauge in self.gauges if gauge.name == "norm_scale"]
        return go.orbit.hold_products(inner, scales, "cap", cap=10.0)

    def _present(self, axes: Mapping[str, str]) -> dict[str, str]:
        leaves = jax.tree_util.tree_leaves_with_path(self.params)
        paths = {re.sub(r"/\d+/", "/{i}/", joined(path)) for path, _ in leaves}
        return {path: text for path, text in axes.items() if path in paths}


def case(size: Size) -> Case:
    """Makes the parameters, gradients and gauges of a size, and a loss and a batch if it has a whole step."""
    c = size.config
    if size.attention_only:
        params, drawn = (attention_kernels(c, jax.random.key(seed)) for seed in (0, 1))
        gauges = [gauge for gauge in lm.gauges(dataclasses.replace(c, bias=False)) if gauge.name == "head_rotation"]
        # Remove the part of the random gradients along orbits. The gradient of a loss has no such part either, and with
        # it our optimizers would do more work.
        project = go.gauge_project(gauges)
        grads = jax.jit(lambda drawn, params: project.update(drawn, project.init(params), params)[0])(
            jax.tree.map(lambda x: 1e-3 * x, drawn), params)
        return Case(params, grads, gauges)
    params, loss = lm.params_and_loss(c, jax.random.key(0))
    batch, length = (x[jax.default_backend() != "cpu"] for x in (size.batch, size.length))
    few = jax.random.randint(jax.random.key(1), (2, 1 + min(64, length)), 0, c.vocab)
    tokens = jax.random.randint(jax.random.key(2), (batch, 1 + length), 0, c.vocab)
    grads = jax.block_until_ready(jax.jit(jax.grad(loss))(params, few))
    return Case(params, grads, lm.gauges(c), loss, tokens, LABELS)


def attention_kernels(config: lm.LMConfig, key: jax.Array) -> Tree:
    """Draws the attention kernels of all layers, normal with variance 1/d."""
    d, h, e = config.d_model, config.heads, config.d_head
    shapes = {"query": (d, h, e), "key": (d, h, e), "value": (d, h, e), "out": (h, e, d)}
    keys = iter(jax.random.split(key, config.layers * len(shapes)))

    def drawn(shape: tuple[int, ...]) -> Tree:
        return {"kernel": jax.random.normal(next(keys), shape) * d**-0.5}

    return {"blocks": [{"attn": {n: drawn(shape) for n, shape in shapes.items()}} for _ in range(config.layers)]}
