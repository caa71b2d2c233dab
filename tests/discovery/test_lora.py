"""`go.lora`: the pairs of every naming and layout, bound so that the function stays, or refused by name."""

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.traverse_util import unflatten_dict

import gauge_optax as go
from gauge_optax.binding import leaves_by_path
from gauge_optax.discovery.calls import bound_copies
from tests import twins
from tests.refusals import complaint, refused

Tree = Any
Blocks = set[tuple[str, ...]]


def drawn(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape)


def peft(a: np.ndarray, b: np.ndarray, **more: Any) -> Tree:
    """A module with PEFT's names."""
    return {"lora_A": {"default": {"weight": a}}, "lora_B": {"default": {"weight": b}}, **more}


def factors(module: Tree) -> tuple[np.ndarray, np.ndarray]:
    return module["lora_A"]["default"]["weight"], module["lora_B"]["default"]["weight"]


A, B = drawn(0, 3, 8), drawn(1, 6, 3)
JAX_PAIR = {"lora_a": A.T, "lora_b": B.T}


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
        "query": {"kernel": np.ones((8, 2, 4)), "kernel_lora_a": np.ones((8, r)), "kernel_lora_b": np.ones((r, 8))},
        "einsum": {"w_lora_a": np.ones((8, r)), "w_lora_b": np.ones((r, 2, 4))},
        "out": {"w_lora_a": np.ones((2, 4, r)), "w_lora_b": np.ones((r, 8))},
    } for r in (2, 3)]}
    axes = {"query/kernel": ("_ basis", "basis _"), "einsum/w": ("_ basis", "basis _ _"),
            "out/w": ("_ _ basis", "basis _")}
    assert found(params) == {(f"layers/{i}/{path}_lora_a", left, f"layers/{i}/{path}_lora_b", right)
                             for i in range(2) for path, (left, right) in axes.items()}
    assert len(go.lora(params)) == 3 and dim(params) == 3 * (4 + 9), "layers are captures"


AT = "base_model.model.layers.{}.q_proj.lora_{}.default.weight"
TREES: dict[str, tuple[Any, Blocks]] = {
    "PEFT, names with dots": (
        {AT.format(i, x): np.ones(s) for i, r in enumerate((2, 5)) for x, s in (("A", (r, 8)), ("B", (8, r)))},
        {(AT.format(i, "A"), "basis _", AT.format(i, "B"), "_ basis") for i in range(2)}),
    "PEFT, convolution, and a square pair": (
        {"conv": peft(np.ones((2, 3, 3, 3)), np.ones((8, 2, 1, 1))), "q": peft(np.ones((4, 4)), np.ones((4, 4)))},
        {("conv/lora_A/default/weight", "basis _ _ _", "conv/lora_B/default/weight", "_ basis _ _"),
         ("q/lora_A/default/weight", "basis _", "q/lora_B/default/weight", "_ basis")}),
    "Flax NNX": (nnx.state(nnx.LoRA(6, 2, 7, rngs=nnx.Rngs(0)), nnx.LoRAParam),
                 {("lora_a", "_ basis", "lora_b", "basis _")}),
    "no layers of an autoencoder or an MLP, and no matrices of other names": (
        {"a": {"kernel": A.T}, "b": {"kernel": B.T}, "mlp": {"up": A.T, "down": B.T}, "lora": {"alpha": B.T @ B},
         "ssm": {"A": np.ones((6, 6)), "B": np.ones((6, 6))}, "gate": {"a": np.ones(5), "b": np.ones(5)},
         "unlike": {"a": np.ones((4, 5)), "b": np.ones((6, 7))}, "q": {"lora": {"a": A.T, "b": B.T}}},
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
    params = {"m": {name: np.ones(shape) for name, shape in zip(names, shapes, strict=True)}}
    assert found(params) == {(f"m/{names[0]}", axes[0], f"m/{names[1]}", axes[1])}


def test_axes_of_a_module_by_hand() -> None:
    params = {"moe": {"w_lora_a": drawn(0, 8, 5, 2), "w_lora_b": drawn(1, 2, 5, 6)}, "q": JAX_PAIR}
    assert found(params, axes={"**/moe": ("_ expert basis", "basis expert _")}) == {
        ("moe/w_lora_a", "_ expert basis", "moe/w_lora_b", "basis expert _"),
        ("q/lora_a", "_ basis", "q/lora_b", "basis _")}


def test_decay_of_half_on_each_factor_decays_the_product_once(x64: None) -> None:
    params = jax.tree.map(jnp.asarray, JAX_PAIR)
    tx = go.quotient_adamw(0.1, go.lora(params), weight_decay=0.5 * 0.2)
    after, _ = twins.driven(tx, params, [jax.tree.map(jnp.zeros_like, params)])
    expected = (1 - 0.1 * 0.5 * 0.2) ** 2 * params["lora_a"] @ params["lora_b"]
    np.testing.assert_allclose(after["lora_a"] @ after["lora_b"], expected, rtol=1e-12)


# What adapters hold beside two factors ----------------------------------------------------------------


def dim(params: Tree, **options: Any) -> int:
    return go.product(go.lora(params, **options)).dim(params)


def moved(gauges: list[go.Gauge], params: Tree, function: Callable[[Tree], jax.Array]) -> float:
    """How far a random element moves the function, and that it moves the leaves."""
    group = go.product(gauges)
    there = group.act(group.sample(jax.random.key(9), params, 0.5), params)
    changed = zip(leaves_by_path(params).values(), leaves_by_path(there).values(), strict=True)
    assert max(float(jnp.max(jnp.abs(x - y))) for x, y in changed) > 0.1
    before = function(params)
    return float(jnp.max(jnp.abs(function(there) - before)) / jnp.max(jnp.abs(before)))


def text_of(params: Tree, *words: str, **options: Any) -> str:
    """What a refusal says, which has its three parts and these words."""
    text = complaint(lambda: go.lora(params, **options))
    assert all(word in text for word in ("lora: ", *words)), text
    return text


# Layouts that are bound ---------------------------------------------------------------------------------

KERNEL, X, IDS = drawn(7, 6, 8), drawn(8, 5, 8), np.array([0, 3, 19])

def by_experts(params: Tree) -> jax.Array:
    """PEFT's `target_parameters`: A is experts first, B experts last."""
    a, b = factors(params["experts"])
    return jnp.einsum("ore,eri->eoi", b.reshape(5, 2, 3), a.reshape(3, 2, 8))


def dora(p: Tree) -> jax.Array:
    """As many outputs as ranks; scaled as rslora does it."""
    a, b = factors(p)
    weight = KERNEL[:3] + 2.0 / np.sqrt(3) * b @ a
    norm = jnp.linalg.norm(weight, axis=1, keepdims=True)
    return X @ (p["lora_magnitude_vector"]["default"]["weight"][:, None] * weight / norm).T


def qwix_dora(p: Tree) -> jax.Array:
    weight = KERNEL.T + p["w_lora_a"] @ p["w_lora_b"]
    return X @ (p["w_dora_m"] * weight / jnp.linalg.norm(weight, axis=0))


def biased(p: Tree) -> jax.Array:
    a, b = p["lora_A"]["default"], p["lora_B"]["default"]
    return (X @ a["weight"].T + a["bias"]) @ b["weight"].T + b["bias"]


LOHA = {f"hada_w{k}_{x}": drawn(k + 2 * (x == "b"), *s) for k in (1, 2) for x, s in (("a", (6, 3)), ("b", (3, 8)))}
EXPERTS = {"experts": peft(drawn(0, 6, 8), drawn(1, 5, 6))}
SAID: dict[str, Any] = {"axes": {"**/experts": ("(expert basis) _", "_ (basis expert)")}, "sizes": {"expert": 3}}
BOUND: dict[str, tuple[Tree, Callable[[Tree], jax.Array], int]] = {
    "dora": (peft(A, drawn(1, 3, 3), lora_magnitude_vector={"default": {"weight": drawn(2, 3)}}), dora, 9),
    "dora, Qwix": ({"w": KERNEL.T, "w_lora_a": A.T, "w_lora_b": B.T, "w_dora_m": drawn(2, 6)}, qwix_dora, 9),
    "embedding, rank is the vocabulary": (
        {"lora_embedding_A": {"default": drawn(0, 20, 20)}, "lora_embedding_B": {"default": drawn(1, 20, 20)}},
        lambda p: p["lora_embedding_A"]["default"].T[IDS] @ p["lora_embedding_B"]["default"].T, 400),
    "embedding, flax": (
        {"lora_embedding_a": drawn(0, 20, 3), "lora_embedding_b": B.T, "embedding": drawn(2, 20, 8)},
        lambda p: (p["lora_embedding_a"] @ p["lora_embedding_b"])[IDS], 9),
    "loha": (LOHA, lambda p: (p["hada_w1_a"] @ p["hada_w1_b"]) * (p["hada_w2_a"] @ p["hada_w2_b"]), 18),
    "lokr": (
        {"lokr_w1": drawn(0, 2, 2), "lokr_w2_a": drawn(1, 6, 2), "lokr_w2_b": drawn(2, 2, 4)},
        lambda p: jnp.kron(p["lokr_w1"], p["lokr_w2_a"] @ p["lokr_w2_b"]), 4),
    "two adapters": (
        {"lora_A": {"default": {"weight": drawn(0, 3, 8)}, "other": {"weight": drawn(1, 2, 8)}},
         "lora_B": {"default": {"weight": drawn(2, 6, 3)}, "other": {"weight": drawn(3, 6, 2)}}},
        lambda p: jnp.stack([p["lora_B"][k]["weight"] @ p["lora_A"][k]["weight"] for k in p["lora_A"]]), 13),
    "biases of A and of B, outputs as many as ranks": (
        {"lora_A": {"default": {"weight": drawn(0, 3, 8), "bias": drawn(1, 3)}},
         "lora_B": {"default": {"weight": drawn(2, 3, 3), "bias": drawn(3, 3)}}}, biased, 9),
    "a scale for all": (
        JAX_PAIR | {"scaling": np.array(2.0), "lora_alpha": np.ones((1,))},
        lambda p: p["scaling"] * p["lora_alpha"] * (p["lora_a"] @ p["lora_b"]), 9),
    "experts with an axis of their own": (
        peft(drawn(0, 4, 2, 8), drawn(1, 4, 5, 2)), lambda p: jnp.einsum("eri,eor->eoi", *factors(p)), 16),
}


@pytest.mark.parametrize("name", BOUND)
def test_a_random_element_leaves_the_function(x64: None, name: str) -> None:
    params, function, dimension = BOUND[name]
    assert dim(params) == dimension and moved(go.lora(params), params, function) < 1e-9


def test_experts_in_two_matrices_need_a_group_each(x64: None) -> None:
    """One group for all, and the axes of A on B, would move the function."""
    assert dim(EXPERTS, **SAID) == 3 * 4 and moved(go.lora(EXPERTS, **SAID), EXPERTS, by_experts) < 1e-9
    one = go.lora(EXPERTS, axes={"**/experts": ("basis _", "_ basis")})
    assert moved(one, EXPERTS, by_experts) > 0.1
    exchanged = go.lora(EXPERTS, axes={"**/experts": ("(expert basis) _", "_ (expert basis)")}, sizes={"expert": 3})
    assert moved(exchanged, EXPERTS, by_experts) > 0.1


def test_experts_of_several_modules() -> None:
    params = {f"model.layers.{k}.mlp.experts.lora_{x}.default.weight": drawn(k, *shape)
              for k in (0, 1) for x, shape in (("A", (6, 8)), ("B", (5, 6)))}
    (gauge,) = go.lora(params, **SAID)
    assert gauge.dim(params) == go.product(go.tools.from_json(go.tools.to_json(gauge))).dim(params) == 2 * 3 * 4


# What stands between the factors ------------------------------------------------------------------------

BETWEEN: dict[str, Tree] = {
    "m.q.lora_E.default": {f"m.q.lora_{x}.default": v for x, v in (("A", A), ("B", B), ("E", drawn(2, 3, 1)))},
    "lora_xs/default": peft(A, B, lora_xs={"default": drawn(2, 9)}),  # a mixer in one row
    "vera_lambda_d": {"A": A, "B": B, "vera_lambda_d": drawn(2, 3), "vera_lambda_b": drawn(3, 6)},
    "task_gate": JAX_PAIR | {"task_gate": drawn(2, 4, 3)},
    "adapter/norm/scale": {
        "adapter": {"lora_a": {"kernel": A.T}, "norm": {"scale": drawn(2, 3)}, "lora_b": {"kernel": B.T}}},
    "lora_A/scale": {"lora_A": {"weight": A, "scale": drawn(2, 3)}, "lora_B": {"weight": B}},
    "q/core": {"q": {"kernel": drawn(4, 8, 6), "lora": {"a": A.T, "b": B.T}, "core": drawn(2, 3, 3)}},
    "weight": JAX_PAIR | {"weight": drawn(2, 3, 3)},
    "lora_magnitude/default": peft(A, B, lora_magnitude={"default": drawn(2, 3)}),  # one per rank, unlike DoRA's
    "lora_e": {"lora_a": drawn(0, 5, 8, 3), "lora_b": drawn(1, 5, 3, 6), "lora_e": drawn(2, 5, 3)},  # scanned
    "hada_t1": {**LOHA, "hada_t1": drawn(2, 3, 3, 2, 2)},
    "lora_E/default": {"layers": [{"q": peft(A, B)} for _ in range(2)], "lora_E": {"default": drawn(2, 3)}},
    "lora_M/q/w": {f"lora_{x}": {"q": {"w": v}} for x, v in (("A", A.T), ("B", B.T), ("M", drawn(2, 3, 3)))},
}
WITHOUT = ["GL(rank) is no symmetry", "pass the tree without this adapter"]


def pair(a: tuple[int, ...], b: tuple[int, ...]) -> Tree:
    return {"m": {"lora_a": drawn(0, *a), "lora_b": drawn(1, *b)}}


@pytest.mark.parametrize(("params", "words", "options"), [
    *((params, [f"'{leaf}' stands between '", *WITHOUT], {}) for leaf, params in BETWEEN.items()),
    ({"q": {"vera_lambda_d": drawn(0, 3), "vera_lambda_b": drawn(1, 6)}}, ["no pair of factors", "leaves q/vera"], {}),
    ({"m": {"lora_a": A.T}}, ["without its partner, 'm/lora_a'", "no leaf 'm/lora_b'"], {}),
    ({"m": {"lora_up": A.T}}, ["without its partner, 'm/lora_up'", "no leaf 'm/lora_down'"], {}),
    ({"lora_a": optax.MaskedNode(), "lora_b": B.T}, ["without its partner, 'lora_b'"], {}),
    (pair((8, 0), (0, 6)), ["without entries, 'm/lora_a' and 'm/lora_b'", "without this adapter"], {}),
    (pair((8, 2), (2, 0)) | {"m/kernel": drawn(2, 8, 6)}, ["without entries"], {}),
    (pair((8, 2), (3, 8)), ["unequal rank", "(8, 2) and (3, 8)",
                            "if their rank is 8, write axes={'m': ('basis _', '_ basis')}"], {}),
    (pair((8, 2), (3, 7)), ["unequal rank", "two factors of one product"], {}),
    (pair((3, 3, 4, 3), (1, 1, 2, 4)), ["unequal rank", "axes={'m': ('_ _ basis _', '_ _ _ basis')}"], {}),
    (pair((2, 8, 2), (2, 2, 8)), ["ambiguous axes of 'm/lora_a'", "{'m': ('layer _ basis', 'layer basis _')}"], {}),
    (pair((8, 5, 2), (2, 5, 8)), ["ambiguous axes of 'm/lora_a'", "{'m': ('_ layer basis', 'basis layer _')}"], {}),
    ({"m": {"lora_A": drawn(0, 4, 4), "lora_B": drawn(1, 4, 4)}}, ["ambiguous axes of 'm/lora_A'"], {}),
    ({"m": peft(drawn(0, 3, 2, 8), drawn(1, 3, 3, 2))}, ["ambiguous axes of 'm/lora_A/default/weight'"], {}),
    ({"delora_A": A, "delora_B": B}, ["factors of another method, 'delora_A' and 'delora_B'"], {}),
    ({"poly_lora_A": drawn(0, 1, 2, 8, 3), "poly_lora_B": drawn(1, 1, 2, 3, 6)}, ["factors of another method"], {}),
    ({"hada_w1_a": drawn(0, 2, 8), "hada_w1_b": drawn(1, 2, 9)}, ["no product of two factors, 'hada_w1_a'"], {}),
    (EXPERTS, ["axes for '**/expert', which is no module"], {"axes": {"**/expert": SAID["axes"]["**/experts"]}}),
    *((EXPERTS, ["bad axes"], {"axes": axes}) for axes in (["**"], {"**": "_ basis"}, {"**": ("_ basis",)})),
    *((EXPERTS, ["malformed size of 'expert'"], {**SAID, "sizes": {"expert": size}}) for size in (0, "3", 1.5)),
    (EXPERTS, ["sizes for 'experts', which is no axis"], {**SAID, "sizes": {"expert": 3, "experts": 3}}),
    *(({"experts": {**EXPERTS["experts"], "lora_E": {"default": drawn(2, length, 1)}}},
       ["'experts/lora_E/default' stands between"], SAID) for length in (2, 6)),
])
def test_what_is_refused_by_name(params: Tree, words: list[str], options: dict[str, Any]) -> None:
    with refused("lora: ", *words):
        go.lora(params, **options)


REMEDIES: dict[str, tuple[Tree, Callable[[Tree], Any]]] = {
    "lora_E/default": (
        {"lora_A": {"default": A}, "lora_B": {"default": B}, "lora_E": {"default": drawn(2, 3, 1)}},
        lambda p: p["lora_B"]["default"] @ (p["lora_E"]["default"] * p["lora_A"]["default"])),
    "lora_m": (JAX_PAIR | {"lora_m": drawn(2, 3, 3)}, lambda p: p["lora_a"] @ p["lora_m"] @ p["lora_b"]),
    "lora_mixer/default/weight": (
        peft(A, B, lora_mixer={"default": {"weight": drawn(2, 3, 3)}}),
        lambda p: factors(p)[1] @ p["lora_mixer"]["default"]["weight"] @ factors(p)[0]),
}


@pytest.mark.parametrize("leaf", REMEDIES)
def test_the_remedy_can_be_typed_and_is_right(x64: None, leaf: str) -> None:
    """The last call is for a leaf that stands elsewhere: the gauge that is refused is no symmetry here."""
    params, product = REMEDIES[leaf]
    text = text_of(params, f"'{leaf}' stands between '", "if it stands elsewhere")
    *right, wrong = (eval(call, {"go": go}) for call in re.findall(r"go\.\w+\(\{[^}]*\}, \{[^}]*\}\)", text))
    lists = [[gauge] for gauge in right] if "no list takes both" in text else [right]
    assert len(right) == 2 and all(moved(gauges, params, product) < 1e-9 for gauges in lists)
    assert all(go.quotient_adamw(1e-3, gauges).init(params) for gauges in lists)
    assert moved([wrong], params, product) > 0.1


# What shapes do not tell --------------------------------------------------------------------------------


@pytest.mark.parametrize("module", ["experts", "mlp.experts.base_layer", "moe", "block_sparse_moe", "expert_ffn"])
def test_experts_without_a_word_are_refused(module: str) -> None:
    params: Tree = unflatten_dict({tuple(module.split(".")): EXPERTS["experts"]})
    said = f"axes={{'{module.replace('.', '/')}': ('(expert basis) _', '_ (basis expert)')}}"
    text = text_of(params, "may hold the factors of all experts", said)
    one, several = (re.search(rf"{at}, axes=(\{{.*?\}})[;,]", text) for at in ("for one adapter", "experts"))
    assert one and dim(params, axes=eval(one[1])) == 36
    assert several and dim(params, axes=eval(several[1]), sizes={"expert": 3}) == 12


def test_in_the_layout_of_jax_too() -> None:
    """Here by names with dots in place of modules."""
    params = {f"mlp.experts.w_lora_{x}": drawn(0, *shape) for x, shape in (("a", (8, 6)), ("b", (6, 5)))}
    text_of(params, "may hold the factors of all experts", "('_ (expert basis)', '(basis expert) _')")
    assert dim(params, axes={"mlp/experts": ("_ (expert basis)", "(expert basis) _")}, sizes={"expert": 3}) == 12


@pytest.mark.parametrize("module", [
    "experts.0.w1", "moe.gate", "moe.router", "mlp.shared_expert.up_proj", "expert_3.up", "olmoe.layers.0.mlp.up"])
def test_a_pair_of_a_single_module_near_experts_is_bound(module: str) -> None:
    params = {f"{module}.lora_A.default.weight": drawn(0, 3, 8), f"{module}.lora_B.default.weight": drawn(1, 5, 3)}
    assert dim(params) == 9


def test_the_kernel_tells_how_many_experts_there_are() -> None:
    """A fused kernel that has no telling name, and with it the number."""
    params = {"mlp": {**EXPERTS["experts"], "base_layer": {"w": drawn(2, 3, 8, 5)}}}
    words = ("hold the factors of several experts", "3 times as many", "'mlp/base_layer/w' (3, 8, 5)")
    said = re.search(r"each other, (axes=.*?, sizes=\{.*?\});", text_of(params, *words))
    assert said and dim(params, **eval(f"dict({said[1]})")) == 12
    plain = {"experts": {**EXPERTS["experts"], "base_layer": {"weight": drawn(2, 5, 8)}}}
    assert dim(plain) == 36, "one pair, as the kernel shows"


def test_blocks_on_a_diagonal(x64: None) -> None:
    """BD-LoRA, whose A holds the blocks of a block-diagonal matrix."""
    params = peft(drawn(0, 4, 4), drawn(1, 12, 4), base_layer={"weight": drawn(2, 12, 8)})
    text = text_of({"q": params}, "several blocks", "sizes={'block': 2}")
    said = re.search(r"diagonal, (axes=.*?, sizes=\{.*?\});", text)

    def product(p: Tree) -> jax.Array:
        a, b = factors(p["q"])
        return b @ jax.scipy.linalg.block_diag(a[:2], a[2:])

    assert said and moved(go.lora({"q": params}, **eval(f"dict({said[1]})")), {"q": params}, product) < 1e-9
    assert moved(go.lora({"q": peft(*factors(params))}), {"q": params}, product) > 0.1


def test_scanned_layers_of_experts_are_refused_or_told(x64: None) -> None:
    params = {"layers": {"experts": peft(drawn(0, 4, 6, 8), drawn(1, 4, 5, 6))}}
    text = text_of(params, "may hold the factors of all experts of a layer")
    front, layers = re.findall(r"axes=(\{.*?\})[;,]", text)
    assert dim(params, axes=eval(front)) == 4 * 36
    gauges = go.lora(params, axes=eval(layers), sizes={"expert": 3})
    assert go.product(gauges).dim(params) == 4 * 3 * 4

    def function(p: Tree) -> jax.Array:
        a, b = factors(p["layers"]["experts"])
        return jnp.einsum("lore,leri->leoi", b.reshape(4, 5, 2, 3), a.reshape(4, 3, 2, 8))

    assert moved(gauges, params, function) < 1e-9
    assert dim({"layers": [params["layers"]]}) == 4 * 36


def test_a_whole_model_is_bound_without_a_word() -> None:
    """Leaves of the rank's length in other places: norms, kernels and biases as wide as the rank."""
    square = {"lora_a": drawn(0, 3, 3), "lora_b": drawn(1, 3, 3)}
    quantized = {"array": {"qvalue": drawn(3, 8, 6), "scale": drawn(4, 3, 6)}}
    layer = {
        "attention": {"q_einsum": {"w": drawn(0, 4, 8, 3), "w_lora_a": A.T, "w_lora_b": drawn(2, 3, 4, 3)},
                      "q_norm": {"scale": drawn(5, 3)}},
        "narrow": {"kernel": drawn(6, 3, 3), "bias": drawn(7, 3), **square},
        "quantized": {"kernel": quantized, "kernel_lora_a": A.T, "kernel_lora_b": B.T},
        "nested": {"base_module": {"kernel": drawn(12, 8, 3), "bias": drawn(13, 3)}, "lora_a": A.T,
                   "lora_b": square["lora_b"]},
    }
    assert dim({"layers": [layer, layer], "norm": {"scale": drawn(16, 3)}, "alpha": drawn(17, 3)}) == 2 * 4 * 9
