"""Muon inside a quotient: one matrix per head, or several, beside what Optax does with the same matrices."""

import ast
import dataclasses
import re
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
from tests.twins import driven, normal

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


def _latent(config: latent.LatentConfig, seed: int) -> Any:
    """Weights; a fused tree has the numbers of the split one."""
    tree = _normal(dataclasses.replace(config, fused=False).shapes, jax.random.key(seed))
    if config.fused:
        attn, moe = tree["attn"], tree["moe"]
        for name in ("q_b", "kv_b", "gate"):
            attn[name]["kernel"] = attn[name]["kernel"].reshape(attn[name]["kernel"].shape[0], -1)
        attn["out"]["kernel"] = attn["out"]["kernel"].reshape(-1, config.d_model)
        moe["gate_up"] = jnp.concatenate([moe.pop("gate"), moe.pop("up")], -1)
    return tree


def _sizes(config: latent.LatentConfig) -> dict[str, int] | None:
    return {"head": config.heads} if config.fused else None


@pytest.mark.parametrize("config", [LATENT, FUSED], ids=["split", "fused"])
@pytest.mark.parametrize("order", [1, -1])
def test_latent_attention_and_experts_are_routed_by_hand(config: latent.LatentConfig, order: int) -> None:
    """Whatever the order of the gauges; the router is Adam's, because a logit shift binds it."""
    params, gauges = _latent(config, 0), latent.gauges(config)[::order]
    polar = polar_of("test", "standard", None, 0.9, 1e-8, "width", latent.muon_labels(config), sizes=_sizes(config))
    read = polar.matrices(go.product(gauges)._bound(params).slice, params)
    expected = {path: ROUTED[path] for path in config.shapes if len(config.shapes[path]) > 1 and "router" not in path}
    assert {path: (m.count, m.fan_in, m.fan_out) for path, m in read.items()} == expected
    # In a matrix of two heads, the entries behind the axis of heads join it.
    kernel, pair = params["attn"]["gate"]["kernel"], read["attn/gate/kernel"].grouped("attn/gate/kernel", 2)
    np.testing.assert_array_equal(pair.view(kernel), kernel.reshape(1, 8, 8))
    np.testing.assert_array_equal(pair.leaf(pair.view(kernel)), kernel)


@pytest.mark.slow
def test_fused_kernels_get_the_steps_of_split_ones(x64: None) -> None:
    """Three steps; the same function in two trees."""
    split, fused = (
        _run(go.quotient_muon(0.1, latent.gauges(c), labels=latent.muon_labels(c), sizes=_sizes(c)),
             [_latent(c, seed) for seed in range(4)])
        for c in (LATENT, FUSED)
    )
    for name in ("q_a", "q_b", "kv_a", "kv_b", "gate", "out"):
        a, b = (tree["attn"][name]["kernel"] for tree in (split, fused))
        np.testing.assert_allclose(a.reshape(b.shape), b, atol=1e-11)
    both = jnp.concatenate([split["moe"]["gate"], split["moe"]["up"]], -1)
    np.testing.assert_allclose(both, fused["moe"]["gate_up"], atol=1e-11)


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
BETWEEN = go.head_rotation({"qkv": ("_ (head basis)=8:16", "_ (head basis)=32:40")}, sizes=HEADS)
BY_ROWS = go.head_rotation({"out": "(head basis)=4:8 _"}, sizes=HEADS)
MAKERS: dict[str, Any] = {
    "quotient_muon": lambda gauges, **options: go.quotient_muon(0.05, gauges, **options),
    "quotient_muon, rms": lambda gauges, **options: go.quotient_muon(0.05, gauges, consistent_rms=0.2, **options),
    "ddc_muon": lambda gauges, **options: go.ddc_muon(0.05, gauges, **options),
    "scale_by_scaled_polar": lambda gauges, **options: optax.chain(
        go.links.scale_by_scaled_polar(gauges, **options), go.links.scale_by_relative_rms(gauges), optax.scale(-0.05),
        go.gauge_retract(gauges),
    ),
}


def _after(tx: optax.GradientTransformation, fused: bool) -> dict[str, jax.Array]:
    """The weights after three steps, fused."""
    trees = [_tree(seed) for seed in range(4)]
    return _run(tx, [_fused(tree) for tree in trees]) if fused else _fused(_run(tx, trees))


def _same(one: Any, two: Any, start: Any) -> None:
    for name, x in one.items():
        moved = float(jnp.linalg.norm(x - start[name]))
        assert float(jnp.linalg.norm(x - two[name])) <= 1e-9 * moved, name


@pytest.mark.slow_rows("[!q]*", "quotient_muon, rms")
@pytest.mark.parametrize("name", MAKERS)
def test_ranges_of_heads_get_the_steps_of_split_kernels(name: str, x64: None) -> None:
    one, two = (_after(MAKERS[name](ATTENTION[fused]), fused) for fused in (True, False))
    _same(one, two, _fused(_tree(0)))


@pytest.mark.slow_rows("quotient_muon, rms")
@pytest.mark.parametrize("name", [name for name in MAKERS if "polar" not in name])
def test_labels_say_what_gauges_leave_open(name: str, x64: None) -> None:
    """A norm reads all, a rescale binds one range: whether the rest is one matrix or two is for the user to say."""
    fused, split = MAKERS[name](GATE[True], labels=LABELLED), MAKERS[name](GATE[False])
    _same(_after(fused, True), _after(split, False), _fused(_tree(0)))
    with refused("nothing says which matrices 'qkv' holds beside its ranges", "640 of 768 entries", "labels="):
        MAKERS[name](GATE[True]).init(_fused(_tree(0)))


@pytest.mark.parametrize("gauge", [BETWEEN, BY_ROWS, ROTATED], ids=["between", "rows", "behind"])
def test_the_label_that_an_error_writes_is_taken(gauge: Any) -> None:
    tree = _fused(_tree(0))
    said = complaint(lambda: go.quotient_muon(0.05, gauge).init(tree))
    labels = ast.literal_eval(re.findall(r"labels=(\{.*?\})", said)[0])
    go.quotient_muon(0.05, gauge, labels=labels).init(tree)


def test_labels_of_other_ranges_stand_beside_a_rotation(x64: None) -> None:
    fused, split = (ATTENTION[fused][::2] for fused in (True, False))  # without queries and keys
    tx = go.quotient_muon(0.05, fused, labels={"qkv": LABELLED["qkv"][:2]})
    _same(_after(tx, True), _after(go.quotient_muon(0.05, split), False), _fused(_tree(0)))


OF_LATENT = {"gauges": latent.gauges(LATENT), "labels": latent.muon_labels(LATENT)}
OF_FUSED = {"gauges": latent.gauges(FUSED), "labels": latent.muon_labels(FUSED)}
# What is given, and what the error says.
MISTAKES: list[tuple[dict[str, Any], str]] = [
    ({"gauges": GAUGE, "heads_per_matrix": 3}, "heads_per_matrix=3 at '"),
    ({"gauges": GAUGE, "heads_per_matrix": 0}, "heads_per_matrix=0 at '"),
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
    ({"gauges": NORM, "labels": {"qkv": LABELLED["qkv"][:2]}}, "nothing says which matrices 'qkv' holds"),
    ({"gauges": NORM, "labels": {"qkv": (*LABELLED["qkv"], "_ _=0:4")}}, "nothing says which matrices 'qkv' holds"),
]


@pytest.mark.parametrize(("given", "text"), MISTAKES)
def test_what_describes_no_matrices_is_refused(given: dict[str, Any], text: str) -> None:
    latent_tree = _latent(FUSED if given["gauges"] is OF_FUSED["gauges"] else LATENT, 0)
    with refused("", text):
        go.quotient_muon(0.05, **given).init(normal(0, SHAPES) | _fused(_tree(0)) | latent_tree)


def test_a_traced_number_of_heads_is_refused() -> None:
    with pytest.raises(ValueError, match="static_args"):
        optax.inject_hyperparams(go.quotient_muon)(0.1, GAUGE, heads_per_matrix=2).init(normal(0, SHAPES))


def test_a_fused_gate_and_up_of_unequal_parts(x64: None) -> None:
    """Bound as lone ranges, along the first axis, in stacked layers."""
    shapes = {"gate": (2, 10, 8), "up": (2, 6, 8), "gate_down": (2, 10, 8), "up_down": (2, 6, 8)}
    ranges = {"gate": "channel=0:10", "up": "channel=10:16"}

    def joined(tree: dict[str, jax.Array]) -> dict[str, jax.Array]:
        down = {name: x for name, x in tree.items() if "down" in name}
        return down | {"both": jnp.concatenate([tree["gate"], tree["up"]], 1)}

    def gauges(fused: bool) -> list[go.Gauge]:
        return [
            go.rescale(
                {"both": f"layer {span} _"} if fused else {name: "layer channel _"}, {f"{name}_down": "layer channel _"}
            )
            for name, span in ranges.items()
        ]

    trees = [normal(seed, shapes) for seed in range(3)]
    fused = _run(go.quotient_muon(0.05, gauges(True)), list(map(joined, trees)))
    _same(fused, joined(_run(go.quotient_muon(0.05, gauges(False)), trees)), joined(trees[0]))
    assert float(jnp.abs(fused["both"] - joined(trees[0])["both"]).max()) > 0.01


# The size of gradients ------------------------------------------------------------------------------------

TINY: dict[str, Any] = MAKERS | {
    "ddc_muon, log": lambda gauges: go.ddc_muon(0.05, gauges, radial="log"),
    "ddc_muon, balanced": lambda gauges: go.ddc_muon(0.05, gauges, rest="balanced"),
    "max_norm_muon": lambda gauges: go.max_norm_muon(0.05, gauges, {"a": "_ c", "b": "_ c"}),
    "hyperball": lambda _: optax.chain(
        optax.scale(-1.0), go.norms.hyperball({"a": "_ c", "b": "_ _"}, learning_rate=0.05)
    ),
}


@pytest.mark.slow_rows("*-float64-*", "*-bfloat16-rescale", "[!q]*-bfloat16-heads", "*, *-heads", "[hms]*-heads")
@pytest.mark.parametrize("gauge", ["rescale", "heads"])
@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
@pytest.mark.parametrize("name", TINY)
def test_steps_do_not_depend_on_the_size_of_gradients(name: str, dtype: str, gauge: str) -> None:
    """Three steps with gradients down to 1e-30, whose squares are no float32; none moves without a gradient."""
    with jax.enable_x64(dtype == "float64"):
        gauges: go.Gauge = go.rescale({"a": "_ channel"}, {"b": "channel _"})
        if gauge == "heads":
            gauges = go.head_rotation({"a": "_ (head basis)", "b": "(head basis) _"}, sizes={"head": 2})
        shapes, tx = {"a": (6, 8), "b": (8, 5)}, TINY[name](gauges)
        draw = lambda seed, c: jax.tree.map(lambda x: (c * x / 3).astype(dtype), normal(seed, shapes))  # noqa: E731
        trees = [[draw(0, 1.0), *(draw(seed, c) for seed in (2, 4, 6))] for c in (1.0, 1e-12, 1e-30, 1e6, 0.0)]
        after = [_run(tx, own) for own in trees]
        close = {"bfloat16": 6e-2, "float32": 2e-5, "float64": 1e-6}[dtype]
        for leaf, start in draw(0, 1.0).items():
            moved = float(jnp.linalg.norm((after[0][leaf] - start).astype(float)))
            assert moved > 0.01
            for other in after[1:4]:
                assert float(jnp.linalg.norm((other[leaf] - after[0][leaf]).astype(float))) <= close * moved
            np.testing.assert_allclose(after[4][leaf].astype(float), start.astype(float), atol=3e-6)
