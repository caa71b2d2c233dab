"""Of many layers that are alike three are searched: the report is that on all of them."""

import functools
import re
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gauge_optax as go
from gauge_optax.discovery import report as reports
from gauge_optax.discovery.layers import shallower

LAYERS = 6
Search = Callable[..., tuple[reports.Report, list[int]]]


def params(keys: Any = None) -> Any:
    """A table and residual blocks, in a list or under these keys."""
    rng = np.random.default_rng(0)
    blocks = [{"norm": {"scale": rng.uniform(0.5, 1.5, 4)}, "up": rng.normal(size=(4, 7)),
               "bias": rng.normal(size=7) / 5, "down": rng.normal(size=(7, 4)) / 3} for _ in range(LAYERS)]
    tables = {"embed": rng.normal(size=(11, 4)), "head": rng.normal(size=(4, 11))}
    return {"blocks": dict(zip(keys, blocks, strict=True)) if keys else blocks, **tables}


def forward(
    p: Any, tokens: Any, blocks: Any = None, active: Any = lambda h, k, count: jax.nn.relu(h),
    wrapped: Any = lambda layer: layer,
) -> Any:
    """Logits; `active` takes units before their ReLU, the number of the layer, and that of all."""
    x = p["embed"][tokens]
    blocks = blocks or (p["blocks"] if isinstance(p["blocks"], list) else list(p["blocks"].values()))
    for k, block in enumerate(blocks):

        def layer(x: Any, block: Any, k: int = k) -> Any:
            h = x / jnp.sqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-6) * block["norm"]["scale"]
            return x + active(h @ block["up"] + block["bias"], k, len(blocks)) @ block["down"]

        x = wrapped(layer)(x, block)
    return x @ p["head"]


def counting(p: Any, tokens: Any, count: int = LAYERS, **options: Any) -> Any:
    """A function that fixes the number of its layers."""
    return forward(p, tokens, [p["blocks"][k] for k in range(count)], **options)


def merged(p: Any, tokens: Any) -> Any:
    """An NNX module's way: the tree is put together from as many leaves as it was taken apart into."""
    return forward(jax.tree.unflatten(jax.tree.structure(params()), jax.tree.leaves(p)), tokens)


def remembering(rule: Callable[..., Any], fn: Any = counting, returned: bool = False) -> Callable[..., Any]:
    """Layers that see what those before them made, units and their tanh; and which may be returned, too."""

    def net(p: Any, tokens: Any, **options: Any) -> Any:
        seen = list[Any]()

        def active(h: Any, k: int, count: int) -> Any:
            seen.append((h, jnp.tanh(h)))
            return rule(h, seen, k, count)

        logits = fn(p, tokens, active=active, **options)
        return (logits, seen) if returned else logits

    return net


def one_other(h: Any, k: int, count: int) -> Any:
    """The fifth layer has the same operations, and a constant behind the ReLU that a unit's factor does not move."""
    return jax.nn.relu(h) + 0.3 * (k == 4)


def first_and_last(h: Any, k: int, count: int) -> Any:
    """The first half of the layers has another operation."""
    return jnp.tanh(h) if k < count // 2 else jax.nn.relu(h)


BATCHES = list(np.random.default_rng(1).integers(0, 11, (2, 6, 8)))


@pytest.fixture
def search(monkeypatch: pytest.MonkeyPatch) -> Search:
    """`discover` on trees that count as large or as small, with the number of blocks in each instance searched."""
    searched = Mock(wraps=reports.search_instance)
    monkeypatch.setattr(reports, "search_instance", searched)

    def found(fn: Any, tree: Any, large: bool) -> tuple[reports.Report, list[int]]:
        searched.reset_mock()
        monkeypatch.setattr(reports, "LARGE", 0 if large else 10**9)
        report = go.discover(fn, tree, BATCHES, "logits", progress=False)
        return report, [len(call.args[1]["blocks"]) for call in searched.call_args_list]

    return found


@pytest.fixture(scope="module")
def whole() -> reports.Report:
    """What all layers say, in a list."""
    return go.discover(forward, params(), BATCHES, "logits", progress=False)


def said(report: reports.Report) -> Any:
    """All that a report says but its numbers."""
    matrices = sorted(report.matrices.items())
    return (sorted(map(repr, report.whole)), str(report.axes), matrices, report.dead, report.uncovered, report.ungauged)


@pytest.mark.parametrize("fn", [forward, merged])
def test_three_layers_are_searched_for_all(fn: Any, search: Search, whole: reports.Report) -> None:
    short, blocks = search(fn, params(), large=True)
    assert blocks == [3] and said(short) == said(whole)
    assert {"norm_scale", "rescale", "residual_rotation"} <= {gauge.name for gauge in short.whole}
    assert len(short.matrices) == 2 * LAYERS
    assert max(held.change for held in short.held) < 1e-12
    three = {**params(), "blocks": params()["blocks"][:3]}
    assert short.certificate.parameters == sum(np.size(x) for x in jax.tree.leaves(three))
    assert short.certificate.explained == go.product(short.whole).dim(three)


def test_layers_that_are_numbered_keys_are_found(search: Search, whole: reports.Report) -> None:
    short, blocks = search(forward, params([f"layer_{k}" for k in range(LAYERS)]), large=True)
    assert blocks == [3]
    assert sorted(repr(gauge).replace("/layer_", "/") for gauge in short.whole) == sorted(map(repr, whole.whole))


def test_what_does_not_hold_of_all_layers_is_searched_on_all(search: Search) -> None:
    """Constants do not show in the operations; the proof on the whole tree finds them."""
    fn = functools.partial(forward, active=one_other)
    short, blocks = search(fn, params(), large=True)
    assert blocks == [3, LAYERS] and said(short) == said(search(fn, params(), large=False)[0])
    moved = "".join(repr(gauge) for gauge in short.whole if gauge.name == "rescale")
    assert "blocks/3/up" in moved and "blocks/4/up" not in moved


relu = jax.nn.relu
FACTORS = np.linspace(0.5, 1.5, 7 * LAYERS).reshape(LAYERS, 7)
UNLIKE: dict[str, Callable[..., Any]] = {
    "another operation": functools.partial(forward, active=first_and_last),
    "another parameter of an operation": functools.partial(
        forward, active=lambda h, k, _: relu(h - jax.lax.cumsum(h, axis=1, reverse=k == 4))),
    "a layer before reads into a later one": remembering(
        lambda h, seen, k, count: h if k < count // 2 else h * seen[count - 1 - k][0], forward),
    "counted, another operation": functools.partial(counting, active=first_and_last),
    "counted, another constant": functools.partial(counting, active=one_other),
    "counted, another constant that is an array": functools.partial(
        counting, active=lambda h, k, _: relu(h) * jnp.asarray(FACTORS[k])),
    "counted, another constant in a function that is called": functools.partial(
        counting, active=lambda h, k, _: jax.jit(lambda h: jnp.where(h > k, h, 0.0))(h)),
    "counted, another parameter of an operation": functools.partial(
        counting, active=lambda h, k, _: relu(h - jax.lax.cumsum(h, axis=1, reverse=k == 3))),
    "counted, each reads of the second before": remembering(lambda h, seen, k, _: relu(h + seen[max(k - 2, 0)][0])),
    "counted, the second reads another value of the one before": remembering(
        lambda h, seen, k, _: relu(h) + seen[max(k - 1, 0)][k == 1] + seen[max(k - 1, 0)][0]),
    "counted, units of all layers are returned": remembering(lambda h, seen, k, _: relu(h), returned=True),
}


@pytest.mark.parametrize("name", UNLIKE)
def test_layers_that_differ_are_all_searched(name: str) -> None:
    jax.eval_shape(UNLIKE[name], params(), BATCHES[0])
    assert shallower(UNLIKE[name], params(), BATCHES[0]) is None


def test_a_wider_layer_between_the_first_and_the_last_is_seen() -> None:
    tree = params()
    last = lambda p, tokens: forward(p, tokens) + p["blocks"][-1]["bias"].sum()  # noqa: E731
    assert shallower(last, tree, BATCHES[0]) is not None, "a last layer is among three, too"
    tree["blocks"][4] |= {"up": np.ones((4, 8)), "bias": np.ones(8), "down": np.ones((8, 4))}
    assert shallower(forward, tree, BATCHES[0]) is None


def test_layers_within_other_nodes_are_cut() -> None:
    """Tuples, dicts with numbers as keys, and a list beside another one, each with its own length."""
    tree = {"a": tuple(np.ones((2, 2)) for _ in range(5)), "b": {"c": {k: np.ones((2, 2)) for k in range(7)}}}

    def fn(p: Any, x: Any) -> Any:
        return functools.reduce(lambda x, w: jnp.tanh(x @ w), (*p["a"], *p["b"]["c"].values()), x)

    short = shallower(fn, tree, np.ones(2))
    assert short is not None and len(short.tree["a"]) == 3 and list(short.tree["b"]["c"]) == [0, 1, 2]
    assert isinstance(short.tree["a"], tuple)
    assert short.with_captures("a/4, b/c/6 + b/d/1") == "a/{i}, b/c/{i} + b/d/1"


# Functions that count their layers ------------------------------------------------------------------------

first_read = remembering(
    lambda h, seen, k, _: jnp.tanh(jnp.tril(jnp.ones((h.shape[-2], h.shape[-2]))) @ h + seen[0][0]))
COUNTING: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "counting": (counting, forward), "merged": (merged, forward),
    "rematerialized and jitted": (jax.jit(functools.partial(counting, wrapped=jax.checkpoint)), forward),
    "all add a value of the first, and make one mask anew": (first_read, functools.partial(first_read, count=3)),
}


@pytest.mark.parametrize("name", COUNTING)
def test_a_function_that_counts_its_layers_is_cut(name: str) -> None:
    fn, of_three = COUNTING[name]
    short = shallower(fn, params(), BATCHES[0])
    assert short is not None and short.fn is not fn and len(short.tree["blocks"]) == 3
    for tokens in (BATCHES[0], np.asarray(BATCHES[0])[:2, :5]):  # other shapes are traced anew
        np.testing.assert_allclose(short.fn(short.tree, tokens), of_three(short.tree, tokens), rtol=2e-5)
    program = str(jax.make_jaxpr(short.fn)(short.tree, BATCHES[0]))
    assert 0 < len(re.findall(r"\br?sqrt\b", program)) <= 3, "nothing of the other layers is left"


def test_a_leaf_that_is_no_number_to_trace_is_left_to_a_search_of_all_layers(search: Search) -> None:
    """Integers among the parameters stay as they are in a search; a cut would trace them."""

    def fn(p: Any, tokens: Any) -> Any:
        return counting(p, tokens, count=int(p["count"]))

    tree = {**params(), "count": np.int32(LAYERS)}
    assert shallower(fn, tree, BATCHES[0]) is None
    report, blocks = search(fn, tree, large=True)
    assert blocks == [LAYERS] and "residual_rotation" in {gauge.name for gauge in report.whole}


def in_turn(p: Any, x: Any, numbers: Any = range(1, 6)) -> Any:
    """Attention and MLP that take turns."""
    for k in numbers:
        x = jnp.tanh(x @ p[f"a_{k}"]) + x
        x = relu(x @ p[f"b_{k}"]) + x
    return x


def one_after_the_other(p: Any, x: Any, numbers: Any = range(1, 6)) -> Any:
    """An encoder before a decoder that reads its end."""
    read = functools.reduce(lambda read, k: jnp.tanh(read @ p[f"a_{k}"]) + read, numbers, x)
    return functools.reduce(lambda x, k: relu(x @ p[f"b_{k}"]) * read, numbers, x)


@pytest.mark.parametrize("fn", [in_turn, one_after_the_other])
def test_two_lists_that_count_are_cut(fn: Callable[..., Any]) -> None:
    rng = np.random.default_rng(0)
    tree = {f"{name}_{k}": rng.normal(size=(4, 4)) / 2 for name in ("a", "b") for k in range(1, 6)}
    x = rng.normal(size=(3, 4))
    short = shallower(fn, tree, x)
    assert short is not None and len(short.tree) == 6
    np.testing.assert_allclose(short.fn(short.tree, x), fn(short.tree, x, range(1, 4)), rtol=1e-5)
