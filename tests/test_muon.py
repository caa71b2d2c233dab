"""Muon inside a quotient: one matrix per head, or several, beside what Optax does with the same matrices."""

import ast
import dataclasses
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax.contrib import MuonDimensionNumbers

import gauge_optax as go
from gauge_optax.optimizers.polar import polar_of
from models import latent
from tests.cases import _normal
from tests.refusals import complaint, refused
from tests.tolerances import tolerance
from tests.twins import driven, furthest, normal

GAUGE = go.head_rotation({"value": "_ head basis", "back": "head basis _"})
SHAPES = {"value": (6, 4, 3), "back": (4, 3, 6)}


def _run(tx: optax.GradientTransformation, trees: list[Any]) -> Any:
    """The weights that start as the first of these trees, after a step with every other one."""
    return driven(tx, trees[0], trees[1:])[0]


@pytest.mark.parametrize("per_matrix", [1, 4])
def test_steps_are_those_of_optax_on_the_same_matrices(per_matrix: int) -> None:
    """Without turns taken out: heads one by one, and all in one matrix."""
    one = {"value": MuonDimensionNumbers(0, 2), "back": MuonDimensionNumbers(1, 2)}
    whole = {"value": MuonDimensionNumbers(0, (1, 2)), "back": MuonDimensionNumbers((0, 1), 2)}
    plain = optax.contrib.muon(0.1, muon_weight_dimension_numbers=lambda _: one if per_matrix == 1 else whole)
    ours = go.quotient_muon(0.1, GAUGE, heads_per_matrix=per_matrix, hold=False)
    trees = [normal(seed, SHAPES, jnp.float32) for seed in range(3)]
    expected, found = (_run(tx, trees) for tx in (plain, ours))
    for name, start in trees[0].items():
        error = jnp.linalg.norm(found[name] - expected[name]) / jnp.linalg.norm(expected[name] - start)
        assert float(error) <= tolerance("twins", "float32")


# Latent attention, gates, experts ---------------------------------------------------------------------

LATENT = latent.LatentConfig()
FUSED = dataclasses.replace(LATENT, fused=True)
# Of 2 heads: how many matrices, of how many rows and columns. By hand, from the tree in `models/latent.py`.
ROUTED = {
    "attn/q_a/kernel": (1, 8, 7), "attn/q_b/kernel": (2, 7, 5), "attn/kv_a/kernel": (1, 8, 8),
    "attn/kv_b/kernel": (2, 6, 7), "attn/gate/kernel": (2, 8, 4), "attn/out/kernel": (2, 4, 8),
    "moe/gate": (3, 8, 5), "moe/up": (3, 8, 5), "moe/gate_up": (6, 8, 5), "moe/down": (3, 5, 8),
}


@pytest.mark.parametrize("config", [LATENT, FUSED], ids=["split", "fused"])
@pytest.mark.parametrize("order", [1, -1])
def test_latent_attention_and_experts_are_routed_by_hand(config: latent.LatentConfig, order: int) -> None:
    """Whatever the order of the gauges; the router is Adam's, because a logit shift binds it."""
    params, gauges = _normal(config.shapes, jax.random.key(0)), latent.gauges(config)[::order]
    sizes = {"head": config.heads} if config.fused else None
    polar = polar_of("test", "standard", None, 0.9, 1e-8, "width", latent.muon_labels(config), sizes=sizes)
    read: Any = polar.matrices(go.product(gauges)._bound(params).slice, params)
    expected = {path: ROUTED[path] for path in config.shapes if len(config.shapes[path]) > 1 and "router" not in path}
    assert {path: (m.count, m.fan_in, m.fan_out) for path, m in read.items()} == expected
    # In a matrix of two heads, the entries behind the axis of heads join it.
    kernel, pair = params["attn"]["gate"]["kernel"], read["attn/gate/kernel"].grouped("attn/gate/kernel", 2)
    np.testing.assert_array_equal(pair.view(kernel), kernel.reshape(1, 8, 8))
    np.testing.assert_array_equal(pair.leaf(pair.view(kernel)), kernel)


# Fused kernels whose ranges gauges bind ------------------------------------------------------------------

WIDTHS = {"q": 32, "k": 8, "v": 8}
HEADS = {"head": 2}
LABELLED = {"qkv": ("_ _=0:32", "_ _=32:40", "_ _=40:48")}
NORM, NORM_APART = (
    go.norm_scale({"norm": "channel"}, dict.fromkeys(readers, "channel _")) for readers in (["qkv"], WIDTHS)
)
# Fused or not: a norm's readers, and rotations of two heads of unequal sizes: 4 key heads' worth of queries.
ATTENTION: dict[bool, list[go.Gauge]] = {
    True: [
        NORM, go.head_rotation({"qkv": ("_ (head _ basis)=0:32", "_ (head basis)=32:40")}, sizes=HEADS),
        go.head_rotation({"qkv": "_ (head basis)=40:48", "out": "(head basis) _"}, sizes=HEADS),
    ],
    False: [
        NORM_APART, go.head_rotation({"q": "_ (head _ basis)", "k": "_ (head basis)"}, sizes=HEADS),
        go.head_rotation({"v": "_ (head basis)", "out": "(head basis) _"}, sizes=HEADS),
    ],
}
# A gated MLP of unequal parts: a norm reads both, a rescale binds the second alone.
GATE: dict[bool, list[go.Gauge]] = {
    True: [NORM, go.rescale({"qkv": "_ channel=40:48"}, {"out": "channel _"})],
    False: [NORM_APART, go.rescale({"v": "_ channel"}, {"out": "channel _"})],
}


def _fused(tree: dict[str, jax.Array]) -> dict[str, jax.Array]:
    others = {name: x for name, x in tree.items() if name not in WIDTHS}
    return {"qkv": jnp.concatenate([tree[name] for name in WIDTHS], -1), **others}


def _tree(seed: int) -> dict[str, jax.Array]:
    shapes = {"norm": (16,), "out": (8, 16)} | {name: (16, width) for name, width in WIDTHS.items()}
    return {name: x / 4 + (name == "norm") for name, x in normal(seed, shapes).items()}


ROTATED = ATTENTION[True][::2]
MAKERS: dict[str, Any] = {
    "quotient_muon": lambda gauges, **options: go.quotient_muon(0.05, gauges, **options),
    "quotient_muon, rms": lambda gauges, **options: go.quotient_muon(0.05, gauges, consistent_rms=0.2, **options),
    "ddc_muon": lambda gauges, **options: go.ddc_muon(0.05, gauges, **options),
    "scale_by_scaled_polar": lambda gauges, **options: optax.chain(
        go.links.scale_by_scaled_polar(gauges, **options), go.links.scale_by_relative_rms(gauges), optax.scale(-0.05),
        go.gauge_retract(gauges),
    ),
}
# In stacked layers, lone ranges along the first axis of a kernel: gate and up of unequal parts.
RANGES = [
    go.rescale({"both": f"layer channel={span} _"}, {f"{name}_down": "layer channel _"})
    for name, span in (("gate", "0:10"), ("up", "10:16"))
]
APART = [go.rescale({name: "layer channel _"}, {f"{name}_down": "layer channel _"}) for name in ("gate", "up")]
OF_LAYERS = {"gate": (2, 10, 8), "up": (2, 6, 8), "gate_down": (2, 10, 8), "up_down": (2, 6, 8)}


def _joined(tree: Any) -> Any:
    down = {name: x for name, x in tree.items() if "down" in name}
    return down | {"both": jnp.concatenate([tree["gate"], tree["up"]], 1)}


# Of a fused tree and of the split one: the optimizers, the trees, and how a split tree is fused.
FUSIONS: dict[str, tuple[Any, Any, Callable[[int], Any], Callable[[Any], Any]]] = {
    **{name: (make(ATTENTION[True]), make(ATTENTION[False]), _tree, _fused) for name, make in MAKERS.items()},
    # A norm reads all, a rescale binds one range: whether the rest is one matrix or two is for the user to say.
    **{f"{name}, labels": (make(GATE[True], labels=LABELLED), make(GATE[False]), _tree, _fused)
       for name, make in MAKERS.items() if "polar" not in name},
    # Labels of other ranges beside a rotation: without queries and keys.
    "a rotation's label": (
        go.quotient_muon(0.05, ATTENTION[True][::2], labels={"qkv": LABELLED["qkv"][:2]}),
        go.quotient_muon(0.05, ATTENTION[False][::2]), _tree, _fused),
    "stacked": (
        go.quotient_muon(0.05, RANGES), go.quotient_muon(0.05, APART), lambda seed: normal(seed, OF_LAYERS), _joined),
}


@pytest.mark.slow_rows("ddc_muon*", "scale_by_*", "quotient_muon, *", "a rotation's label")
@pytest.mark.parametrize("name", FUSIONS)
def test_fused_kernels_get_the_steps_of_split_ones(name: str, x64: None) -> None:
    """Three steps; the same function in two trees."""
    of_fused, of_split, draw, fuse = FUSIONS[name]
    trees = [draw(seed) for seed in range(4)]
    start, one = fuse(trees[0]), _run(of_fused, list(map(fuse, trees)))
    assert furthest(one, start) > 0.01
    for path, x in fuse(_run(of_split, trees)).items():
        moved = float(jnp.linalg.norm(x - start[path]))
        assert float(jnp.linalg.norm(x - one[path])) <= 1e-9 * moved, path


@pytest.mark.parametrize("gauge", [
    go.head_rotation({"qkv": ("_ (head basis)=8:16", "_ (head basis)=32:40")}, sizes=HEADS),
    go.head_rotation({"out": "(head basis)=4:8 _"}, sizes=HEADS), ROTATED,
], ids=["between", "rows", "behind"])
def test_the_label_that_an_error_writes_is_taken(gauge: Any) -> None:
    tree = _fused(_tree(0))
    said = complaint(lambda: go.quotient_muon(0.05, gauge).init(tree))
    labels = ast.literal_eval(re.findall(r"labels=(\{.*?\})", said)[0])
    go.quotient_muon(0.05, gauge, labels=labels).init(tree)


OF_LATENT = {"gauges": latent.gauges(LATENT), "labels": latent.muon_labels(LATENT)}
OF_FUSED = {"gauges": latent.gauges(FUSED), "labels": latent.muon_labels(FUSED)}
# What is given, and what the error says.
MISTAKES: list[tuple[dict[str, Any], str]] = [
    ({"gauges": GAUGE, "heads_per_matrix": 3}, "heads_per_matrix=3 at '"),
    ({"gauges": GAUGE, "heads_per_matrix": 0}, "heads_per_matrix=0 at '"),
    ({"gauges": GAUGE, "heads_per_matrix": 2.0}, "heads_per_matrix is no integer"),
    (OF_LATENT | {"sizes": {"heads": 2}}, "unknown axis in sizes 'heads'"),
    (OF_FUSED | {"sizes": {"head": 3}}, "head=3 from sizes"),
    (OF_LATENT | {"labels": {"attn/gate/kernel": "head _ size"}}, "describes no matrices"),
    (OF_LATENT | {"labels": {"attn/gate/kernel": "_ _ _"}}, "describes no matrices"),
    (OF_LATENT | {"labels": {"attn/q_b/kernel": "_ head _"}}, "rotations say which matrices there are"),
    (OF_LATENT | {"labels": {"attn/gate/kernel": "_ head"}}, "axes"),
    (OF_LATENT | {"labels": {"attn/gate/kernel": "_ (head"}}, "malformed"),
    (OF_LATENT | {"labels": {"attn/gates/kernel": "_ head _"}}, "no leaf matches"),
    (OF_LATENT | {"labels": {"attn/gate/kernel": "matrix"}}, "axes such as"),
    ({"gauges": ROTATED, "labels": LABELLED}, "rotations say which matrices there are"),
    ({"gauges": GATE[True]}, "nothing says which matrices 'qkv' holds beside its ranges"),
    ({"gauges": GATE[True]}, "640 of 768 entries"),
    ({"gauges": NORM, "labels": {"qkv": LABELLED["qkv"][:2]}}, "nothing says which matrices 'qkv' holds"),
    ({"gauges": NORM, "labels": {"qkv": (*LABELLED["qkv"], "_ _=0:4")}}, "nothing says which matrices 'qkv' holds"),
]


@pytest.mark.parametrize(("given", "text"), MISTAKES)
def test_what_describes_no_matrices_is_refused(given: dict[str, Any], text: str) -> None:
    of_latent = _normal((FUSED if given["gauges"] is OF_FUSED["gauges"] else LATENT).shapes, jax.random.key(0))
    with refused("", text):
        go.quotient_muon(0.05, **given).init(normal(0, SHAPES) | _fused(_tree(0)) | of_latent)


def test_a_traced_number_of_heads_is_refused() -> None:
    with pytest.raises(ValueError, match="static_args"):
        optax.inject_hyperparams(go.quotient_muon)(0.1, GAUGE, heads_per_matrix=2).init(normal(0, SHAPES))


# The size of gradients ------------------------------------------------------------------------------------

TINY: dict[str, Any] = MAKERS | {
    "ddc_muon, log": lambda gauges: go.ddc_muon(0.05, gauges, radial="log"),
    "ddc_muon, balanced": lambda gauges: go.ddc_muon(0.05, gauges, rest="balanced"),
    "max_norm_muon": lambda gauges: go.max_norm_muon(0.05, gauges, {"a": "_ c", "b": "_ c"}),
    "hyperball": lambda _: optax.chain(
        optax.scale(-1.0), go.norms.hyperball({"a": "_ c", "b": "_ _"}, learning_rate=0.05)),
}


BOUND = {
    "rescale": go.rescale({"a": "_ channel"}, {"b": "channel _"}),
    "heads": go.head_rotation({"a": "_ (head basis)", "b": "(head basis) _"}, sizes={"head": 2}),
}


@pytest.mark.slow_rows(
    "*_muon, *", "*-float64-*", "*-bfloat16-rescale", "[!q]*-bfloat16-heads", "*-float32-heads", "[qs]*-rescale")
@pytest.mark.parametrize("gauge", BOUND)
@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
@pytest.mark.parametrize("name", TINY)
def test_steps_do_not_depend_on_the_size_of_gradients(name: str, dtype: str, gauge: str) -> None:
    """Three steps with gradients down to 1e-30, whose squares are no float32; none moves without a gradient."""

    def draw(seed: int, size: float) -> Any:
        return jax.tree.map(lambda x: (size * x / 3).astype(dtype), normal(seed, {"a": (6, 8), "b": (8, 5)}))

    with jax.enable_x64(dtype == "float64"):
        sizes = (1.0, 1e-12, 1e-30, 1e6, 0.0)
        after = [_run(TINY[name](BOUND[gauge]), [draw(0, 1.0), *(draw(n, size) for n in (2, 4, 6))]) for size in sizes]
        close = {"bfloat16": 6e-2, "float32": 2e-5, "float64": 1e-6}[dtype]
        for leaf, start in draw(0, 1.0).items():
            moved = float(jnp.linalg.norm((after[0][leaf] - start).astype(float)))
            assert moved > 0.01
            for other in after[1:4]:
                assert float(jnp.linalg.norm((other[leaf] - after[0][leaf]).astype(float))) <= close * moved
            np.testing.assert_allclose(after[4][leaf].astype(float), start.astype(float), atol=3e-6)
