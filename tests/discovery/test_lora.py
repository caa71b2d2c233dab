"""`go.lora`: the pairs of every naming and layout, and nothing else."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import gauge_optax as go
from gauge_optax.binding import leaves_by_path, with_leaves
from gauge_optax.discovery.calls import bound_copies


def ones(*shape: int) -> np.ndarray:
    return np.ones(shape)


def found(params: Any, **options: Any) -> set[tuple[tuple[str, str], ...]]:
    """(path, axes) of every block, a tuple per instance."""
    out = set()
    for gauge in go.lora(params, **options):
        assert go.tools.to_json(gauge).count('"kind": "head_linear"') == 1
        out |= {tuple((block.path, block.axes) for block in blocks) for _, _, blocks in bound_copies(gauge, params)}
    return out


def pair(a: str, axes_a: str, b: str, axes_b: str) -> tuple[tuple[str, str], ...]:
    return (a, axes_a), (b, axes_b)


QWIX = {
    "layers": [
        {
            "query": {"kernel": ones(8, 2, 4), "kernel_lora_a": ones(8, r), "kernel_lora_b": ones(r, 8)},
            "einsum": {"w_lora_a": ones(8, r), "w_lora_b": ones(r, 2, 4)},
            "out": {"w_lora_a": ones(2, 4, r), "w_lora_b": ones(r, 8)},
        }
        for r in (2, 3)
    ]
}
PEFT = {
    f"base_model.model.layers.{i}.q_proj.lora_{x}.default.weight": ones(*shape)
    for i, r in enumerate((2, 5))
    for x, shape in (("A", (r, 8)), ("B", (8, r)))
}


def test_qwix_with_a_rank_per_layer() -> None:
    expected = set()
    for i in range(2):
        at = f"layers/{i}"
        expected |= {
            pair(f"{at}/query/kernel_lora_a", "_ basis", f"{at}/query/kernel_lora_b", "basis _"),
            pair(f"{at}/einsum/w_lora_a", "_ basis", f"{at}/einsum/w_lora_b", "basis _ _"),
            pair(f"{at}/out/w_lora_a", "_ _ basis", f"{at}/out/w_lora_b", "basis _"),
        }
    assert found(QWIX) == expected
    assert len(go.lora(QWIX)) == 3, "layers are captures"
    assert go.product(go.lora(QWIX)).dim(QWIX) == 3 * (4 + 9)


def test_peft_flat_and_nested() -> None:
    at = "base_model.model.layers.{}.q_proj.lora_{}.default.weight"
    assert found(PEFT) == {pair(at.format(i, "A"), "basis _", at.format(i, "B"), "_ basis") for i in range(2)}
    nested = {
        "q_proj": {"lora_A": {"default": {"weight": ones(4, 4)}}, "lora_B": {"default": {"weight": ones(4, 4)}}},
        "embed": {"lora_embedding_A": ones(2, 50), "lora_embedding_B": ones(8, 2)},
        "conv": {"lora_A": {"weight": ones(2, 3, 3, 3)}, "lora_B": {"weight": ones(8, 2, 1, 1)}},
    }
    assert found(nested) == {
        pair("q_proj/lora_A/default/weight", "basis _", "q_proj/lora_B/default/weight", "_ basis"),
        pair("embed/lora_embedding_A", "basis _", "embed/lora_embedding_B", "_ basis"),
        pair("conv/lora_A/weight", "basis _ _ _", "conv/lora_B/weight", "_ basis _ _"),
    }


@pytest.mark.parametrize(
    ("shapes", "axes"),
    [
        (((16, 4), (4, 32)), ("_ basis", "basis _")),
        (((4, 16), (32, 4)), ("basis _", "_ basis")),
        (((16, 4), (4, 16)), ("_ basis", "basis _")),
        (((4, 16), (16, 4)), ("basis _", "_ basis")),  # both layouts fit: the one of lower rank
        (((5, 8, 2), (5, 2, 6)), ("layer _ basis", "layer basis _")),
        (((5, 3, 8, 2), (5, 3, 2, 6)), ("layer layer1 _ basis", "layer layer1 basis _")),
        (((5, 8, 2), (2, 6)), ("_ _ basis", "basis _")),  # experts with one B, as Qwix's einsum makes them
    ],
)
@pytest.mark.parametrize("names", [("a", "b"), ("A", "B"), ("lora_a", "lora_b"), ("lora_down", "lora_up")])
def test_layouts_by_shape(shapes: Any, axes: tuple[str, str], names: tuple[str, str]) -> None:
    params = {"m": {name: ones(*shape) for name, shape in zip(names, shapes, strict=True)}}
    assert found(params) == {pair(f"m/{names[0]}", axes[0], f"m/{names[1]}", axes[1])}


def test_nothing_else() -> None:
    others = {
        "a": {"kernel": ones(8, 2)}, "b": {"kernel": ones(2, 8)},  # two layers of an autoencoder
        "ssm": {"A": ones(6, 6), "B": ones(6, 6)}, "gate": {"a": ones(5), "b": ones(5)},
        "unlike": {"a": ones(4, 5), "b": ones(6, 7)}, "lora": {"alpha": ones(2, 2)},
    }
    params = others | {"q": {"lora": {"a": ones(8, 2), "b": ones(2, 8)}}}
    assert found(params) == {pair("q/lora/a", "_ basis", "q/lora/b", "basis _")}


def test_a_bias_of_the_first_factor_moves_with_it() -> None:
    params = {
        "lora_a": {"kernel": ones(8, 2), "bias": ones(2)}, "lora_b": {"kernel": ones(2, 8), "bias": ones(8)}
    }
    assert found(params) == {
        (("lora_a/kernel", "_ basis"), ("lora_a/bias", "basis"), ("lora_b/kernel", "basis _"))
    }


def test_axes_of_a_module_by_hand() -> None:
    params = {"moe": {"w_lora_a": ones(8, 5, 2), "w_lora_b": ones(2, 5, 6)}, "q": {"w_lora_a": ones(8, 2),
              "w_lora_b": ones(2, 6)}}
    assert found(params, axes={"**/moe": ("_ expert basis", "basis expert _")}) == {
        pair("moe/w_lora_a", "_ expert basis", "moe/w_lora_b", "basis expert _"),
        pair("q/w_lora_a", "_ basis", "q/w_lora_b", "basis _"),
    }


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"w": ones(3, 4)}, ["no pair of factors", "leaves w"]),
        ({"m": {"lora_a": ones(8, 2)}}, ["without its partner, 'm/lora_a'", "no leaf 'm/lora_b'"]),
        ({"m": {"lora_up": ones(8, 2)}}, ["without its partner, 'm/lora_up'", "no leaf 'm/lora_down'"]),
        ({"lora_a": optax.MaskedNode(), "lora_b": ones(2, 8)}, ["without its partner, 'lora_b'"]),
        ({"m": {"lora_a": ones(8, 2), "lora_b": ones(3, 8)}}, ["unequal rank", "(8, 2) and (3, 8)"]),
        ({"m": {"lora_a": ones(2, 8, 2), "lora_b": ones(2, 2, 8)}},
         ["ambiguous axes of 'm/lora_a'", "axes={'m': ('layer _ basis', 'layer basis _')}"]),
        ({"m": {"lora_a": ones(8, 5, 2), "lora_b": ones(2, 5, 8)}},
         ["ambiguous axes of 'm/lora_a'", "axes={'m': ('_ layer basis', 'basis layer _')}"]),
    ],
)
def test_errors(params: Any, words: list[str]) -> None:
    with pytest.raises(ValueError) as error:
        go.lora(params)
    text = str(error.value)
    assert all(word in text for word in [*words, "found:", "expected:", "remedy:"]), text


class Adapted(nnx.Module):
    """Two frozen layers with adapters of ranks 2 and 3."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        def adapted(m: int, rank: int, n: int) -> nnx.LoRA:
            start = nnx.initializers.lecun_normal()
            return nnx.LoRA(m, rank, n, base_module=nnx.Linear(m, n, rngs=rngs), b_initializer=start, rngs=rngs)

        self.layers = nnx.List([adapted(6, 2, 7), adapted(7, 3, 4)])

    def __call__(self, x: jax.Array) -> jax.Array:
        for layer in self.layers:
            x = jnp.tanh(layer(x))
        return x


def _loss(model: Adapted) -> jax.Array:
    x = jnp.asarray(np.random.default_rng(0).standard_normal((9, 6)), model.layers[0].lora_a[...].dtype)
    return jnp.mean(jnp.square(model(x) - 0.3))


def _trained(params: Any, make: Callable[[Any], Any], steps: int = 20) -> Any:
    model = Adapted(nnx.Rngs(0))
    state = nnx.state(model, nnx.LoRAParam)
    nnx.update(model, jax.tree.map(lambda x: x, with_leaves(state, params)))
    optimizer = nnx.Optimizer(model, make(nnx.state(model, nnx.LoRAParam)), wrt=nnx.LoRAParam)

    @nnx.jit
    def step(model: Adapted, optimizer: Any) -> None:
        optimizer.update(model, nnx.grad(_loss, argnums=nnx.DiffState(0, nnx.LoRAParam))(model))

    for _ in range(steps):
        step(model, optimizer)
    leaves = leaves_by_path(nnx.state(model, nnx.LoRAParam))
    return [leaves[f"layers/{i}/lora_a"] @ leaves[f"layers/{i}/lora_b"] for i in range(2)]


@pytest.mark.slow_rows("[!q]*", "quotient_adamw")
@pytest.mark.parametrize(
    "make",
    [
        lambda gauges: go.quotient_adamw(1e-2, gauges),
        lambda gauges: go.quotient_muon(1e-2, gauges, weight_decay=0.1),
        lambda gauges: go.quotient(optax.adafactor(1e-2), gauges),
    ],
    ids=["quotient_adamw", "quotient_muon", "adafactor"],
)
def test_twins_of_an_nnx_optimizer_at_condition_100(make: Callable[[Any], Any], x64: None) -> None:
    model = Adapted(nnx.Rngs(0))
    params = {p: np.asarray(x, np.float64) for p, x in leaves_by_path(nnx.state(model, nnx.LoRAParam)).items()}
    rng, twin = np.random.default_rng(1), dict(params)
    for i, r in enumerate((2, 3)):
        left, right = (np.linalg.qr(rng.standard_normal((r, r)))[0] for _ in range(2))
        s = left @ np.diag(np.logspace(-1, 1, r)) @ right
        twin[f"layers/{i}/lora_a"] = params[f"layers/{i}/lora_a"] @ s
        twin[f"layers/{i}/lora_b"] = np.linalg.solve(s, params[f"layers/{i}/lora_b"])

    def gap(make: Callable[[Any], Any]) -> float:
        pairs = zip(_trained(params, make), _trained(twin, make), strict=True)
        return max(float(jnp.linalg.norm(x - y) / jnp.linalg.norm(x)) for x, y in pairs)

    assert gap(lambda _: optax.adamw(1e-2)) > 1e-2
    assert gap(lambda state: make(go.lora(state))) <= 1e-10


def test_masked_beside_other_parameters(x64: None) -> None:
    params = {"kernel": jnp.ones((8, 6)), "lora_a": jnp.ones((8, 2)) + jnp.eye(8, 2), "lora_b": jnp.zeros((2, 6))}
    adapters = {"kernel": False, "lora_a": True, "lora_b": True}
    tx = optax.masked(go.quotient_adamw(1e-2, go.lora(params)), adapters)
    grads = jax.tree.map(jnp.ones_like, params)
    updates, _ = jax.jit(tx.update)(grads, tx.init(params), params)
    assert float(jnp.abs(updates["lora_b"]).min()) > 0
    np.testing.assert_array_equal(updates["kernel"], grads["kernel"])


def test_decay_of_half_on_each_factor_decays_the_product_once(x64: None) -> None:
    rng = np.random.default_rng(0)
    params = {"lora_a": jnp.asarray(rng.standard_normal((8, 2))), "lora_b": jnp.asarray(rng.standard_normal((2, 6)))}
    tx = go.quotient_adamw(0.1, go.lora(params), weight_decay=0.5 * 0.2)
    updates, _ = tx.update(jax.tree.map(jnp.zeros_like, params), tx.init(params), params)
    after = optax.apply_updates(params, updates)
    expected = (1 - 0.1 * 0.5 * 0.2) ** 2 * params["lora_a"] @ params["lora_b"]
    np.testing.assert_allclose(after["lora_a"] @ after["lora_b"], expected, rtol=1e-12)


def test_an_mlp_called_up_and_down_is_no_adapter() -> None:
    mlp = {"up": jnp.zeros((8, 16)), "down": jnp.zeros((16, 8))}
    params = {"mlp": mlp, "q": {"lora_a": jnp.zeros((8, 2)), "lora_b": jnp.zeros((2, 8))}}
    assert [sorted(spec.pattern for spec in gauge.specs) for gauge in go.lora(params)] == [["q/lora_a", "q/lora_b"]]
    named = {"lora_down": jnp.zeros((8, 2)), "lora_up": jnp.zeros((2, 8))}
    assert [sorted(spec.pattern for spec in gauge.specs) for gauge in go.lora(named)] == [["lora_down", "lora_up"]]
