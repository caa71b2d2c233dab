"""`go.lora`: the pairs of every naming and layout, and nothing else."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import gauge_optax as go
from gauge_optax.discovery.calls import bound_copies

Blocks = set[tuple[str, ...]]


def ones(*shape: int) -> np.ndarray:
    return np.ones(shape)


def found(params: Any, **options: Any) -> Blocks:
    """(path, axes, path, axes, ...) of the blocks of every instance."""
    out: Blocks = set()
    for gauge in go.lora(params, **options):
        assert go.tools.to_json(gauge).count('"kind": "head_linear"') == 1
        copies = bound_copies(gauge, params)
        out |= {tuple(text for block in blocks for text in (block.path, block.axes)) for _, _, blocks in copies}
    return out


def test_qwix_with_a_rank_per_layer() -> None:
    params = {"layers": [{
        "query": {"kernel": ones(8, 2, 4), "kernel_lora_a": ones(8, r), "kernel_lora_b": ones(r, 8)},
        "einsum": {"w_lora_a": ones(8, r), "w_lora_b": ones(r, 2, 4)},
        "out": {"w_lora_a": ones(2, 4, r), "w_lora_b": ones(r, 8)},
    } for r in (2, 3)]}
    axes = {"query/kernel": ("_ basis", "basis _"), "einsum/w": ("_ basis", "basis _ _"),
            "out/w": ("_ _ basis", "basis _")}
    assert found(params) == {(f"layers/{i}/{path}_lora_a", left, f"layers/{i}/{path}_lora_b", right)
                             for i in range(2) for path, (left, right) in axes.items()}
    assert len(go.lora(params)) == 3, "layers are captures"
    assert go.product(go.lora(params)).dim(params) == 3 * (4 + 9)


AT = "base_model.model.layers.{}.q_proj.lora_{}.default.weight"
TREES: dict[str, tuple[Any, Blocks]] = {
    "PEFT, names with dots": (
        {AT.format(i, x): ones(*s) for i, r in enumerate((2, 5)) for x, s in (("A", (r, 8)), ("B", (8, r)))},
        {(AT.format(i, "A"), "basis _", AT.format(i, "B"), "_ basis") for i in range(2)}),
    "PEFT, embedding": (
        {"lora_embedding_A": ones(2, 50), "lora_embedding_B": ones(8, 2)},
        {("lora_embedding_A", "basis _", "lora_embedding_B", "_ basis")}),
    "PEFT, convolution, and a square pair": (
        {"conv": {"lora_A": {"weight": ones(2, 3, 3, 3)}, "lora_B": {"weight": ones(8, 2, 1, 1)}},
         "q": {"lora_A": {"default": {"weight": ones(4, 4)}}, "lora_B": {"default": {"weight": ones(4, 4)}}}},
        {("conv/lora_A/weight", "basis _ _ _", "conv/lora_B/weight", "_ basis _ _"),
         ("q/lora_A/default/weight", "basis _", "q/lora_B/default/weight", "_ basis")}),
    "Flax NNX": (
        nnx.state(nnx.LoRA(6, 2, 7, rngs=nnx.Rngs(0)), nnx.LoRAParam), {("lora_a", "_ basis", "lora_b", "basis _")}),
    "a bias of A moves with it": (
        {"lora_a": {"kernel": ones(8, 2), "bias": ones(2)}, "lora_b": {"kernel": ones(2, 8), "bias": ones(8)}},
        {("lora_a/kernel", "_ basis", "lora_a/bias", "basis", "lora_b/kernel", "basis _")}),
    "no layers of an autoencoder or an MLP, and no matrices of other names": (
        {"a": {"kernel": ones(8, 2)}, "b": {"kernel": ones(2, 8)}, "mlp": {"up": ones(8, 16), "down": ones(16, 8)},
         "ssm": {"A": ones(6, 6), "B": ones(6, 6)}, "gate": {"a": ones(5), "b": ones(5)},
         "unlike": {"a": ones(4, 5), "b": ones(6, 7)}, "lora": {"alpha": ones(2, 2)},
         "q": {"lora": {"a": ones(8, 2), "b": ones(2, 8)}}},
        {("q/lora/a", "_ basis", "q/lora/b", "basis _")}),
}


@pytest.mark.parametrize("name", TREES)
def test_pairs_of_a_tree(name: str) -> None:
    params, blocks = TREES[name]
    assert found(params) == blocks


@pytest.mark.parametrize(("shapes", "axes"), [
    (((16, 4), (4, 32)), ("_ basis", "basis _")),
    (((4, 16), (32, 4)), ("basis _", "_ basis")),
    (((16, 4), (4, 16)), ("_ basis", "basis _")),
    (((4, 16), (16, 4)), ("basis _", "_ basis")),  # both layouts fit: the one of lower rank
    (((5, 8, 2), (5, 2, 6)), ("layer _ basis", "layer basis _")),
    (((5, 3, 8, 2), (5, 3, 2, 6)), ("layer layer1 _ basis", "layer layer1 basis _")),
    (((5, 8, 2), (2, 6)), ("_ _ basis", "basis _")),  # experts with one B, as Qwix's einsum makes them
])
@pytest.mark.parametrize("names", [("a", "b"), ("A", "B"), ("lora_a", "lora_b"), ("lora_down", "lora_up")])
def test_layouts_by_shape(shapes: Any, axes: tuple[str, str], names: tuple[str, str]) -> None:
    params = {"m": {name: ones(*shape) for name, shape in zip(names, shapes, strict=True)}}
    assert found(params) == {(f"m/{names[0]}", axes[0], f"m/{names[1]}", axes[1])}


def test_axes_of_a_module_by_hand() -> None:
    params = {"moe": {"w_lora_a": ones(8, 5, 2), "w_lora_b": ones(2, 5, 6)},
              "q": {"w_lora_a": ones(8, 2), "w_lora_b": ones(2, 6)}}
    assert found(params, axes={"**/moe": ("_ expert basis", "basis expert _")}) == {
        ("moe/w_lora_a", "_ expert basis", "moe/w_lora_b", "basis expert _"),
        ("q/w_lora_a", "_ basis", "q/w_lora_b", "basis _")}


def test_decay_of_half_on_each_factor_decays_the_product_once(x64: None) -> None:
    rng = np.random.default_rng(0)
    params = {"lora_a": jnp.asarray(rng.standard_normal((8, 2))), "lora_b": jnp.asarray(rng.standard_normal((2, 6)))}
    tx = go.quotient_adamw(0.1, go.lora(params), weight_decay=0.5 * 0.2)
    updates, _ = tx.update(jax.tree.map(jnp.zeros_like, params), tx.init(params), params)
    after = optax.apply_updates(params, updates)
    expected = (1 - 0.1 * 0.5 * 0.2) ** 2 * params["lora_a"] @ params["lora_b"]
    np.testing.assert_allclose(after["lora_a"] @ after["lora_b"], expected, rtol=1e-12)
