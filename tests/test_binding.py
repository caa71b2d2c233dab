"""The binding language: paths, axes, sizes, blocks, and every complaint it makes."""

import dataclasses
import re
from collections import namedtuple
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.core import freeze
from flax.traverse_util import unflatten_dict

import gauge_optax as go
from gauge_optax import binding
from gauge_optax.binding import Axes, Matched, bind, leaves_by_path, with_leaves
from tests.refusals import complaint


def nested(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    return unflatten_dict({path: jax.ShapeDtypeStruct(shape, jnp.float32) for path, shape in shapes.items()}, sep="/")


def resolve(
    tree: Any, *roles: Mapping[str, Axes], sizes: Any = None, reserved: tuple[str, ...] = (), gauge: str = "gauge"
) -> tuple[Matched, ...]:
    specs = (binding.block_specs(gauge, f"role{k}", blocks, reserved) for k, blocks in enumerate(roles))
    return bind(gauge, sum(specs, ()), binding.frozen_sizes(gauge, sizes), tree, reserved)


def says(call: Callable[[], Any]) -> str:
    """The four lines of an error, of which the first quotes what is wrong."""
    text = complaint(call)
    assert re.search("['\"]", text.splitlines()[0]), text
    return text


def fails(tree: Any, *roles: Mapping[str, Axes], **kwargs: Any) -> str:
    return says(lambda: resolve(tree, *roles, **kwargs))


# --- paths -------------------------------------------------------------------------------------------------


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Attention:
    query: Any
    key: Any
    value: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Box:
    value: Any
    name: str = dataclasses.field(metadata={"static": True}, default="")


@pytest.mark.parametrize(("tree", "paths"), [
    ({"a": {"b": 1.0}, "c": [2.0, {"d": 3.0}]}, ["a/b", "c/0", "c/1/d"]), ({"a/b": {"c": 1.0}}, ["a/b/c"]),
    ((1.0, {1: {2: 1.0}}), ["0", "1/1/2"]), (1.0, [""]), ({"a": {"value": 1.0}, "value": 1.0}, ["a/value", "value"]),
    (Attention(1.0, 2.0, 3.0), ["query", "key", "value"]),
    ({"attn": Attention(1.0, None, 3.0)}, ["attn/query", "attn/value"]),
    ({"attn": Attention(None, None, 3.0)}, ["attn/value"]),
    ({"w": Box(1.0)}, ["w"]), ({"w": Box({"a": 1.0, "value": 2.0})}, ["w/value/a", "w/value/value"]),
    ({"w": Box(Box(1.0))}, ["w/value"]), (Box(1.0), [""]), (freeze({"a": {"b": 1.0}}), ["a/b"]),
    ({"a": None, "b": optax.MaskedNode()}, []), (optax.EmptyState(), []),
])
def test_normalised_paths(tree: Any, paths: list[str]) -> None:
    assert list(leaves_by_path(tree)) == paths
    marked = with_leaves(tree, {path: k for k, path in enumerate(paths)})
    assert list(leaves_by_path(marked).values()) == list(range(len(paths)))
    assert str(jax.tree.structure(marked)) == str(jax.tree.structure(tree))


def test_binding_sees_shapes_only() -> None:
    spec, arrays, others = {"up": "_ channel"}, {"up": jnp.ones((2, 3))}, {"act": jax.nn.relu, "name": "mlp", "rate": 1}
    wanted = resolve(arrays | others, spec)
    assert wanted == resolve({"up": jax.ShapeDtypeStruct((2, 3), jnp.bfloat16), "act": 1, "name": 1, "rate": 1}, spec)
    traced: list[tuple[Matched, ...]] = []
    jax.eval_shape(lambda t: traced.append(resolve(t, spec)), arrays)
    assert traced[0] is resolve(arrays, spec), "cached by paths and shapes"
    assert resolve({"gain": 1.0}, {"gain": ""})[0].blocks[0].view_shape == ()


def test_strangers_and_two_leaves_with_one_path_are_refused() -> None:
    assert "'a/b'" in says(lambda: leaves_by_path({"a/b": 1.0, "a": {"b": 2.0}}))
    tree = {"a": [1.0, None, optax.MaskedNode()], "b": 2.0}
    assert with_leaves(tree, {"b": 5.0}) == {"a": [1.0, None, optax.MaskedNode()], "b": 5.0}
    assert "'c'" in says(lambda: with_leaves(tree, {"c": 1.0}))


# --- patterns ----------------------------------------------------------------------------------------------


# Pattern → path → key of the instance; None where the path does not match.
MATCHES: dict[str, dict[str, str | None]] = {
    "a/b": {"a/b": "", "a/b/c": None}, "a.b": {"axb": None}, "": {"": ""}, "**": {"a/b": ""},
    "a/{i}/b": {"a/0/b": "i=0", "a/0/c/b": None, "a//b": None}, "{i}/{j}/{i}": {"1/2/1": "i=1,j=2", "1/2/3": None},
    "blocks_{i}/w": {"blocks_12/w": "i=12", "blocks_/w": None}, "{side}_{i}/w": {"enc_2/w": "side=enc,i=2"},
    "**/w": {"w": "", "a/b/w": "", "a/bw": None}, "a/**/w": {"a/w": "", "a/x/y/w": ""},
    "a/**": {"a": "", "a/b/c": "", "ab": None}, "**/blocks/{i}/**/w": {"net/blocks/3/attn/w": "i=3"},
    "w(0)+[a-z]": {"w(0)+[a-z]": ""},
}


@pytest.mark.parametrize("pattern", MATCHES)
def test_pattern_matches(pattern: str) -> None:
    spec = binding.BlockSpec("blocks", pattern, "_")
    assert {path: binding.copy_key([spec], spec, path) for path in MATCHES[pattern]} == MATCHES[pattern]


def test_captures_join_blocks_in_natural_order() -> None:
    tree = nested({f"blocks_{i}/{w}": (4, i + 1) for i in range(12) for w in ("up", "gate")})
    found = resolve(tree, {"blocks_{i}/up": "_ channel", "blocks_{i}/gate": "_ channel"})
    assert [(copy.key, copy.sizes) for copy in found] == [(f"i={i}", {"channel": i + 1}) for i in range(12)]
    assert [b.path for b in found[10].blocks] == ["blocks_10/up", "blocks_10/gate"]


def test_capture_order_is_the_first_pattern_s() -> None:
    (found,) = resolve(nested({"a/0/x/up": (2,), "b/x/0/down": (2,)}), {"a/{i}/{j}/up": "c"}, {"b/{j}/{i}/down": "c"})
    assert found.key == "i=0,j=x"


def test_several_leaves_of_one_double_star() -> None:
    found = resolve(nested({"a/q": (2, 3), "b/c/q": (5, 3), "b/k": (3, 3)}), {"**/q": "_ channel"})
    assert [b.path for b in found[0].blocks] == ["a/q", "b/c/q"]


# --- axes --------------------------------------------------------------------------------------------------


BASIS, VOCAB = ("basis",), ("vocab",)
MALFORMED_AXES = [
    *"a a|(a|a)|()|((a) b)|(a b) (c|(_ _)|(_ a=0:2)|(a=0:2 b=0:2)|_=0|1+a|a 1+|(1+ a)".split("|"),
    *"(a b)=0|(a b)=3:3|(a b)=0:|(a b)=4:2|(a b)=a:b|a=0:2)=3:4".split("|"),
    *"a=|a=b|a=-1|a=1.5|a=1:|a=:3|a=3:3|a=4:2|a=1:2:3|a-b|3|a,b|a=1²|a=0:4/0".split("|"),
    *"a=0:1+|a=0:1+1:2|a=2:3+0:1|a=0:2+1:3|a=0+1|a=0:1+2|a=0:1+3:4/3|a=2/4|(a b)=0:1+2:3|(a=0:1+2:3 _)".split("|"),
    "a=" + "9" * 5000,
]
# Blocks, reserved names, and what is said of them.
REFUSED: list[tuple[Any, tuple[str, ...], str]] = [
    *(({pattern: "_"}, (), f"gauge: malformed pattern '{pattern}'") for pattern in
      "a/*/b|a/b*|a**/b|***|a/{/b|a}|{i}}|{}|{0}|{a b}|{_}|{{i}}|{i-j}|a/{i".split("|")),
    *(({"w": axes}, (), "malformed axes") for axes in MALFORMED_AXES),
    *(({"w": value}, (), "axes of 'w'") for value in ((), None, 3, ["_"], ("_", 3), (("_",),), np.zeros(2))),
    *((blocks, (), "'blocks'") for blocks in (dict[str, Any](), None, [("w", "_")], "w")),
    ({3: "_"}, (), "3"),
    *(({"w": axes}, reserved, problem) for axes, reserved, problem in (
        ("_ head", BASIS, "out of place"), ("_ basis=3", BASIS, "out of place"), ("_ basis", VOCAB, "out of place"),
        ("_ basis", (), "reserved name"), ("_ vocab=1", (), "reserved name"), ("vocab basis", BASIS, "reserved name"),
        ("basis basis", BASIS, "malformed axes"))),
    *((blocks, (), "dangling capture") for blocks in (
        {"{i}/up": "_", "down": "_"}, {"up": "_", "{i}/down": "_"}, {"{i}/{j}/up": "_", "{i}/down": "_"})),
]


@pytest.mark.parametrize(("blocks", "reserved", "said"), REFUSED)
def test_blocks_that_say_nothing_are_refused(blocks: Any, reserved: tuple[str, ...], said: str) -> None:
    assert said in says(lambda: binding.block_specs("gauge", "blocks", blocks, reserved))


@pytest.mark.parametrize(
    ("a", "b"), [("head _", "_ _"), ("_ _", "head _"), ("kv=0 head", "kv head"), ("a=0:2 _", "a=0 _")]
)
def test_dangling_axes(a: str, b: str) -> None:
    """Of one argument and of two."""
    for roles in ([{"up": a, "down": b}], [{"up": a}, {"down": b}]):
        assert "dangling axis" in fails(nested({"up": (2, 2), "down": (2, 2)}), *roles)


# --- sizes -------------------------------------------------------------------------------------------------


def test_frozen_sizes() -> None:
    sizes: Any = {"b": np.int64(2), "a": 3}
    assert binding.frozen_sizes("gauge", None) == () and binding.frozen_sizes("gauge", sizes) == (("a", 3), ("b", 2))
    assert all(type(size) is int for _, size in binding.frozen_sizes("gauge", sizes))


@pytest.mark.parametrize("sizes", [
    *({"a": size} for size in (0, -1, 2.0, True, "3", None, np.ones(2), np.float32(1))), {3: 3}, 7])
def test_malformed_sizes(sizes: Any) -> None:
    said = "malformed size" if isinstance(sizes, dict) else "'sizes' is no mapping"
    assert said in says(lambda: binding.frozen_sizes("gauge", sizes))


@pytest.mark.parametrize(("shapes", "blocks", "sizes", "want"), [
    ({"q": (5, 12), "k": (3, 4)}, {"q": "_ (a b)", "k": "a b"}, None, {"a": 3, "b": 4}),
    ({"q": (5, 12), "k": (4, 3)}, {"q": "_ (a b)", "k": "b a"}, None, {"a": 3, "b": 4}),
    ({"q": (5, 24)}, {"q": "_ (qkv=0 a b)"}, {"qkv": 2, "b": 3}, {"a": 4, "b": 3}),
    ({"q": (5, 24), "k": (3, 4)}, {"q": "_ (qkv=1 a b)", "k": "a b"}, None, {"a": 3, "b": 4}),
    ({"q": (5, 2, 4)}, {"q": "_ a b=1:4"}, None, {"a": 2, "b": 3}),
    ({"q": (5, 8)}, {"q": "_ (a b=1:3)"}, {"a": 2}, {"a": 2, "b": 2}),
    ({"q": (5, 8), "k": (2, 2)}, {"q": "_ (a b=1:3)", "k": "a b"}, None, {"a": 2, "b": 2}),
    ({"q": (5, 8, 3), "k": (5, 2, 3)}, {"q": "_ (a _) b", "k": "_ a b"}, None, {"a": 2, "b": 3}),
    ({"w": (2, 5)}, {"w": "gate=1 c"}, {"gate": 2}, {"c": 5}), ({"w": (4,)}, {"w": "(a)"}, None, {"a": 4}),
    ({"w": (4, 0)}, {"w": "a _"}, None, {"a": 4}), ({"q": (0, 3)}, {"q": "(a _) b"}, {"a": 2}, {"a": 2, "b": 3}),
    ({"s": ()}, {"s": ""}, None, {}), ({"s": ()}, {"s": "1+"}, None, {}),
    ({"x": (12, 5), "y": (3, 20)}, {"x": "(p q) r", "y": "p (q r)"}, None, {"p": 3, "q": 4, "r": 5}),
    # p, then q, then r, each by dividing an axis that the one before made divisible.
    ({"x": (3, 5, 8), "y": (20, 3, 7), "z": (10, 12)}, {"z": "(r _) (p q)", "y": "(q r) p _", "x": "p (r _) (q _)"},
     None, {"p": 3, "q": 4, "r": 5}),
])
def test_sizes_by_fix_point(shapes: Any, blocks: Mapping[str, Axes], sizes: Any, want: Mapping[str, int]) -> None:
    assert resolve(nested(shapes), blocks, sizes=sizes)[0].sizes == want


# Shapes, blocks or a list of them by role, sizes, and what is said.
LAYERS = {"0/up": (2, 3), "0/down": (3, 2), "1/up": (2, 3)}
UNBOUND: list[tuple[Any, Any, Any, list[str]]] = [
    ({"q": (4, 3), "k": (4, 5)}, {"q": "_ c", "k": "_ c"}, None,
     ["unequal sizes of 'c' at 'k'", "c=3 from 'q' (4, 3)"]),
    ({"q": (4, 3)}, {"q": "_ c"}, {"c": 5}, ["unequal sizes of 'c' at 'q'", "c=5 from sizes="]),
    ({"q": (4, 6)}, {"q": "_ (c _)"}, {"c": 4}, ["does not split", "c=4 from sizes="]),
    ({"q": (4, 6)}, {"q": "_ (c d)"}, {"c": 2, "d": 2}, ["does not split", "d=2"]),
    *(({"q": (4, 6)}, {"q": f"_ ({group})"}, None, ["unknown lengths", f"sizes={{{needed}}}"]) for group, needed in (
        ("c d", '"c": ...'), ("c _", '"c": ...'), ("q=0 c d", '"q": ..., "c": ...'), ("c b=0:2", '"c": ...'))),
    *(({"q": (4, 6)}, {"q": axes}, sizes, [f"index out of range, '{part}' at 'q'", length])
      for axes, sizes, part, length in (
          ("_ c=0:7", None, "c=0:7", "length 6"), ("_ c=6", None, "c=6", "at least 7"),
          ("_ (c=2 d)", {"c": 2}, "c=2", "at least 3"), ("_ c=0:1+4:8", None, "c=0:1+4:8", "at least 8"),
          ("_ (c d=0:4)", {"c": 2}, "d=0:4", "length 3"))),
    ({"q": (4, 6)}, {"q": "_ c=0:4"}, {"c": 6}, ["unequal sizes of 'c' at 'q'", "length 4"]),
    ({"q": (4, 6), "k": (4, 3)}, {"q": "_ c=0:4", "k": "_ c"}, None, ["unequal sizes of 'c' at 'k'"]),
    ({"q": (2, 6), "k": (3, 6)}, {"q": "g=0 c", "k": "g=0 c"}, None, ["unequal sizes of 'g' at 'k'"]),
    ({"q": (4, 6)}, {"q": "_ c"}, {"d": 6}, ["unknown axis in sizes 'd'", "named axes: c"]),
    ({"q": (4, 6)}, {"q": "_ c _"}, None, ["wrong rank at 'q'", "shape (4, 6), rank 2", 'rank 3, axes "_ c _"']),
    ({"q": (4, 9)}, {"q": "_ _=0:2/8"}, None, ["unequal sizes of '_' at 'q'", "_=8 from '_=0:2/8'"]),
    ({"q": ()}, {"q": "c"}, None, ["wrong rank at 'q'"]), ({"q": (4,)}, {"q": ""}, None, ["wrong rank at 'q'"]),
    ({"w": (4, 10)}, {"w": "_ (a b)=4:12"}, {"a": 2}, ["range out of bounds"]),
    ({"w": (4, 10)}, {"w": "_ (a b)=4:9"}, {"a": 2, "b": 2}, ["does not split"]),
    ({}, {"w": "_"}, None, ["no leaves"]), ({"0/up": (2, 3), "1/up": (2, 4)}, {"{i}/up": "_ c"}, {"c": 3}, ["'1/up'"]),
    (LAYERS, [{"{i}/up": "_ c"}, {"{i}/down": "c _"}], None, ["no leaf for i=1 matches '{i}/down'", "1/up"]),
    (LAYERS, [{"{i}/down": "c _"}, {"{i}/up": "_ c"}], None, ["no leaf for i=1 matches '{i}/down'"]),
    ({"a/0/1": (2,)}, [{"a/{i}/1": "_"}, {"a/0/{i}": "_"}], None, ["no leaf for i=0"]),
    ({"a/0/0": (2,), "a/0/1": (2,), "a/1/1": (2,)}, [{"a/{i}/1": "_"}, {"a/0/{i}": "_"}], None, ["overlapping"]),
]


@pytest.mark.parametrize(("shapes", "blocks", "sizes", "words"), UNBOUND)
def test_what_does_not_fit_its_leaves_is_refused(shapes: Any, blocks: Any, sizes: Any, words: Sequence[str]) -> None:
    text = fails(nested(shapes), *(blocks if isinstance(blocks, list) else [blocks]), sizes=sizes)
    assert all(word in text for word in words), text


# --- copies ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("leaf", "absent"), [
    ("blocks/down/kernl", False), ("blocks/up/kernel", True), ("head/bias", True),
])
def test_a_leaf_that_is_absent_from_a_part_of_the_tree_is_not_replaced_by_another(leaf: str, absent: bool) -> None:
    """As where `wrt=` of `nnx.Optimizer` leaves it out: the remedy was to write the path of an unrelated leaf."""
    gauge = go.rescale({"blocks/up/kernel": "_ channel"}, {"blocks/down/kernel": "channel _"})
    up = {} if leaf == "head/bias" else {"blocks/up/kernel": (2, 3)}
    text = complaint(lambda: gauge.dim(nested(up | {leaf: (3, 2) if up else (5,)})))
    assert ("remedy:   take 'blocks/" in text) == absent == ("remedy:   write" not in text)


def test_no_match_names_the_nearest_and_the_remedy() -> None:
    shapes: dict[str, Any] = {f"blocks/{i}/attn/{n}_proj/kernel": (768, 12, 64) for i in range(3) for n in "qkv"}
    shapes |= {f"blocks/{i}/mlp/up/kernel": (768, 3072) for i in range(3)}
    blocks = {"blocks/{i}/attn/query/kernel": "_ head basis"}
    text = fails(nested(shapes), blocks, reserved=BASIS, gauge="head_rotation")
    assert text.startswith("head_rotation: no leaf matches 'blocks/{i}/attn/query/kernel'\n")
    assert "found:    nearest blocks/0/attn/q_proj/kernel (768, 12, 64), blocks/0/attn/" in text
    assert 'expected: one rank-3 leaf per block, axes "_ head basis"' in text
    assert text.endswith("remedy:   write 'blocks/{i}/attn/q_proj/kernel'")


PROPOSALS = [
    ("blocks_0/attn/kernel", "blocks_{i}/attn/kernl", "blocks_{i}/attn/kernel"),
    ("layers_0/attn/kernel", "blocks_{i}/attn/kernel", "layers_{i}/attn/kernel"),
    ("blocks_0/kernel", "blocks/{i}/kernel", "blocks_{i}/kernel"),
    ("model/blocks/0/kernel", "blocks/{i}/kernel", "model/blocks/{i}/kernel"),
    ("enc2/kernel", "{tower}/layer0/kernel", "enc{tower}/kernel"), ("a/w", "a/{i}_{j}/w", "a/w"),
    ("text/layer0/kern", "{tower}/layer0/kernel", "{tower}/layer0/kern"), ("x/y", "{i}/{j}/w", "x/y"),
    ("a/0/b/1/w", "a/{i}/b/{j}/kernel", "a/{i}/b/{j}/w"), ("head/kernel", "head/kernels", "head/kernel"),
    ("enc/0/up/kernel", "**/up/kernal", "**/up/kernel"), ("enc/0/up/kernel", "enc/**/upp", "enc/**/up/kernel"),
    ("enc/l_0/up", "**/l_{i}/upp", "**/l_{i}/up"), ("a/w", "a/b/c/**", "a/w"),
]


@pytest.mark.parametrize(("path", "pattern", "proposal"), PROPOSALS)
def test_proposals_put_captures_back(path: str, pattern: str, proposal: str) -> None:
    assert f"write '{proposal}'" in fails(nested({path: (2,)}), {pattern: "_"})


@pytest.mark.parametrize(("a", "b", "shape"), [
    ("_ c", "_ c", (2, 3)), ("g=0 c", "_ c", (2, 3)), ("c=0:2 _", "c=1:3 _", (4, 2)),
    ("(g=0 c) _", "(g=0 c) _", (6, 2)), ("", "", ())])
def test_overlap_raises_in_tuples_patterns_and_roles(a: str, b: str, shape: tuple[int, ...]) -> None:
    tree, sizes = nested({"x/w": shape}), {"g": 2} if "g" in a else None
    for roles in ([{"x/w": (a, b)}], [{"x/w": a, "**/w": b}], [{"x/w": a}, {"x/w": b}]):
        assert "overlapping blocks on 'x/w'" in fails(tree, *roles, sizes=sizes)


def test_one_plus_on_some_blocks_only(x64: None) -> None:
    """A scale stored less one beside a bias, in one leaf: the bias has no one to add."""
    params = {"norm": np.array([[0.5, -0.5, 0.0], [1.0, 2.0, 0.0]]), "w": np.ones((3, 2))}
    gauge = go.norm_scale({"norm": ("1+ part=0 channel", "part=1 channel")}, {"w": "channel _"})
    moved = gauge.act({"": np.log([2.0, 2.0, 3.0])}, params)
    np.testing.assert_allclose(moved["norm"], [[2.0, 0.0, 2.0], [2.0, 4.0, 0.0]], atol=1e-6)
    np.testing.assert_allclose(gauge.read(params)[""], np.log([1.5, 0.5, 1.0]), atol=1e-6)


def test_scales_on_ranges_of_a_group_and_free_ranges(x64: None) -> None:
    params, expected = {"w": np.ones((4, 10)), "v": np.ones((6, 2)), "u": np.ones(6)}, np.ones((4, 10))
    gauge = go.rescale({"w": "_=1:3 (head channel)=2:8"}, {"v": "(head channel) _"}, sizes={"head": 2})
    moved = gauge.act({"": np.full((2, 3), np.log(2.0))}, params)
    expected[1:3, 2:8] = 2.0
    np.testing.assert_allclose(moved["w"], expected)
    np.testing.assert_allclose(moved["v"], 0.5)
    np.testing.assert_allclose(gauge.read(params)[""], np.full((2, 3), 0.5 * np.log(2.0)), atol=1e-6)
    block = resolve(params, {"w": "_=1:3 (head channel)=2:8", "u": "(head channel)"}, sizes={"head": 2})[0].blocks[0]
    assert block.axis_ids(1, ("head", "channel")).tolist() == [-1, -1, 0, 1, 2, 3, 4, 5, -1, -1]
    assert block.spread(("head", "channel"), np.arange(6.0).reshape(2, 3), 9.0)[1].tolist() == [9, 9, *range(6), 9, 9]


class Named:
    """An array with axis names, in a box that tells jax no keys, as haliax's NamedArray is."""

    def __init__(self, array: Any, names: tuple[str, ...]) -> None:
        self.array, self.names = array, names


jax.tree_util.register_pytree_node(Named, lambda x: ((x.array,), x.names), lambda names, x: Named(x[0], names))


def test_a_box_without_keys_is_dropped_and_a_list_of_one_is_not() -> None:
    tree = {"up": Named(jnp.ones((2, 3)), ("embed", "mlp")), "layers": [{"w": jnp.ones(3)}], "one": [jnp.ones(2)]}
    assert sorted(leaves_by_path(tree)) == ["layers/0/w", "one/0", "up"]
    moved = go.rescale({"up": "_ channel"}, {"layers/0/w": "channel"}).act({"": np.log([2.0, 1.0, 1.0])}, tree)
    assert isinstance(moved["up"], Named) and float(moved["up"].array[0, 0]) == pytest.approx(2.0)


def test_axes_by_the_names_that_a_tree_carries() -> None:
    """haliax's axes, NNX's partitioning names and Linen's say the same."""
    mesh = jax.make_mesh((1, 1), ("embed", "mlp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    axis = namedtuple("axis", ["name", "size"])
    haliax: Any = Named(np.ones((2, 3)), ("embed", "mlp"))
    del haliax.names
    haliax.axes = (axis("embed", 2), axis("mlp", 3))
    with jax.set_mesh(mesh):
        init = nnx.with_partitioning(nnx.initializers.ones, ("embed", "mlp"))
        state = nnx.state(nnx.Linear(2, 3, rngs=nnx.Rngs(0), kernel_init=init))
    linen: Any = nn.Partitioned(jnp.ones((2, 3)), ("embed", "mlp"))
    named = {"layers/{i}/up": {"mlp": "channel"}}
    for kernel in (haliax, state["kernel"], linen):
        assert go.tools.axes_by_name({"layers": [{"up": kernel}]}, named) == {"layers/{i}/up": "_ channel"}
    for blocks, problem in (
        ({"layers/{i}/down": {}}, "no leaf matches"), ({"up": {"heads": "head"}}, "no axis 'heads' at 'up'"),
        ({"bare": {"embed": "_"}}, "no common axis names at 'bare'"), ({"square": {"embed": "a"}}, "two axes 'embed'"),
    ):
        tree = {"up": linen, "bare": np.ones(3), "square": nn.Partitioned(jnp.ones((2, 2)), ("embed", "embed"))}
        assert problem in says(partial(go.tools.axes_by_name, tree, blocks))
    odd: list[Any] = [["up"], {"up": ["mlp"]}, {"up": {"mlp": 3}}]
    for wrong in odd:
        assert "bad 'blocks'" in says(partial(go.tools.axes_by_name, {"up": linen}, wrong))


# --- masks -------------------------------------------------------------------------------------------------


UP, NEITHER = {"up": True, "down": False}, {"up": False, "down": False}
LAYER = {"up": jnp.ones((2, 3)), "down": jnp.ones((3, 2))}
PAIRS = {"layers/{i}/up": "_ c"}, {"layers/{i}/down": "c _"}


@pytest.mark.parametrize("first", [UP, NEITHER, True, False])
@pytest.mark.parametrize("second", [UP, NEITHER, False])
def test_hidden_blocks_raise(first: Any, second: Any) -> None:
    tree = jax.tree.map(lambda keep, part: part if keep else optax.MaskedNode(), [first, second], [LAYER, LAYER])
    text = fails({"layers": tree}, *PAIRS)
    assert "MaskedNode" in text and "own gauge list" in text.splitlines()[-1]


def test_a_hidden_parent_raises() -> None:
    tree: dict[str, Any] = {"net": optax.MaskedNode(), "head": jnp.ones(3)}
    assert "MaskedNode hides a leaf of 'net/layers/{i}/up'" in fails(tree, {"net/layers/{i}/up": "_ c"})
    text = fails(tree, {"**/up": "_ c"})
    assert "no leaf matches '**/up'" in text and "MaskedNode at net" in text and "own gauge list" in text
    image = {name: {"w": x} for name, x in LAYER.items()}
    tree = {"image": image, "text": image | {"down": optax.MaskedNode()}}
    text = fails(tree, {"{tower}/up/w": "_ c"}, {"{tower}/down/w": "c _"})
    assert "for tower=text matches '{tower}/down/w'" in text and "MaskedNode at text/down" in text


def test_a_mask_has_the_values_that_it_was_made_with() -> None:
    values: dict[str, Any] = {"up": 1}
    mask = go.tools.by_path(values, default=0)
    values["up"] = 2
    assert mask(LAYER) == {"up": 1, "down": 0}
    assert "'values' that are no dictionary" in says(partial(go.tools.by_path, [("up", 1)]))  # type: ignore[arg-type]


def test_hidden_leaves_of_other_gauges_do_not_matter() -> None:
    tree = {"layers": {"0": LAYER, "1": LAYER, "scale": optax.MaskedNode()}, "head": optax.MaskedNode()}
    assert len(resolve(tree, *PAIRS)) == 2


# --- blocks ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("asarray", [np.asarray, jnp.asarray])
def test_block_of_several_ranges(asarray: Any) -> None:
    leaf = asarray(np.arange(50, dtype=np.float16).reshape(10, 5))
    axes = {"w": "(head basis=0:1+3:5) _=1:2+3:4"}
    (found,) = resolve({"w": leaf}, axes, sizes={"head": 2}, reserved=BASIS)[0].blocks
    assert found.split == (2, 5, 5) and found.view_shape == (2, 3, 2) and not found.whole
    rows, expected = np.array([[0, 3, 4], [5, 8, 9]]), np.array(leaf)
    np.testing.assert_array_equal(found.view(leaf), expected[rows][:, :, [1, 3]])
    expected[rows[:, :, None], [1, 3]] = -np.arange(12.0).reshape(2, 3, 2)
    written = found.write(leaf, -asarray(np.arange(12, dtype=np.float32).reshape(2, 3, 2)))
    assert isinstance(written, type(leaf)) and written.dtype == leaf.dtype
    np.testing.assert_array_equal(written, expected)
    np.testing.assert_array_equal(leaf, np.arange(50).reshape(10, 5), err_msg="the input is left alone")
    assert found.axis_ids(0, ("head", "basis")).tolist() == [0, -1, -1, 1, 2, 3, -1, -1, 4, 5]
    assert found.axis_ids(0, ("head",)).tolist() == [0, -1, -1, 0, 0, 1, -1, -1, 1, 1]
    value, there = np.arange(1.0, 7.0).reshape(3, 2), np.zeros((10, 5))
    there[rows[:, :, None], [1, 3]] = value.T[:, :, None]
    np.testing.assert_array_equal(jnp.broadcast_to(found.spread(("basis", "head"), value), (10, 5)), there)
    np.testing.assert_array_equal(found.total(("basis", "head"), leaf), found.view(np.asarray(leaf)).sum(-1).T)
    for call in (lambda: found.total(("stranger",), leaf), lambda: found.spread(("stranger",), jnp.ones(1))):
        with pytest.raises(ValueError):
            call()


def test_a_whole_leaf_is_never_copied() -> None:
    (found,) = resolve({"w": jnp.ones((6, 4))}, {"w": "(a b) _"}, sizes={"a": 2})[0].blocks
    ops = str(jax.make_jaxpr(lambda leaf: found.write(leaf, found.view(leaf)))(jnp.ones((6, 4))))
    assert "slice" not in ops and "scatter" not in ops and "gather" not in ops


def test_bind_leaf_on_a_slice_of_a_leaf() -> None:
    leaf = partial(binding.bind_leaf, "gauge", binding.BlockSpec("up", "blocks/{i}/w", "_ (head basis)"), "blocks/3/w")
    found = leaf((5, 6), {"basis": 3, "head": 2, "other": 9})
    assert found is not None and found.split == (5, 2, 3) and found.argument == "up"
    for shape, sizes in (((5,), {"basis": 3}), ((5, 6), {"basis": 4}), ((5, 6), {})):
        says(partial(leaf, shape, sizes))


@pytest.mark.parametrize("rest", [(), (5,)])
def test_parts_of_a_fused_leaf_are_written_under_jit_as_without(rest: tuple[int, ...]) -> None:
    """jaxlib 0.10.2 wrote the planes of query and key in place, and read what it had overwritten."""
    parts = tuple(" ".join([f"(part={k} head basis)", *"_" * len(rest)]) for k in range(2))
    gauge = go.rope_torus({"qkv": parts}, sizes={"part": 3, "head": 4})
    params = {"qkv": jnp.cos(jnp.arange(48.0 * np.prod(rest))).reshape(48, *rest)}
    element = gauge.sample(jax.random.key(0), params)
    moved, expected = jax.jit(gauge.act)(element, params), gauge.act(element, params)
    np.testing.assert_allclose(moved["qkv"], expected["qkv"], atol=1e-5)
