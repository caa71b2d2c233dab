"""Of many layers that are alike three are searched: the report is that on all of them."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gauge_optax as go
from gauge_optax.discovery import report as reports
from gauge_optax.discovery.calls import Call
from gauge_optax.discovery.layers import shallower

LAYERS = 6
Search = Callable[..., tuple[reports.Report, list[int]]]


def params(keys: Any = None) -> Any:
    """A table and residual blocks, in a list or under these keys."""
    rng = np.random.default_rng(0)
    blocks = [
        {"norm": {"scale": rng.uniform(0.5, 1.5, 4)}, "up": rng.normal(size=(4, 7)), "bias": rng.normal(size=7) / 5,
         "down": rng.normal(size=(7, 4)) / 3} for _ in range(LAYERS)]
    tables = {"embed": rng.normal(size=(11, 4)), "head": rng.normal(size=(4, 11))}
    return {"blocks": dict(zip(keys, blocks, strict=True)) if keys else blocks, **tables}


def forward(p: Any, tokens: Any, blocks: Any = None, active: Any = lambda h, k, count: jax.nn.relu(h)) -> Any:
    """Logits; `active` takes units before their ReLU, the number of the layer, and that of all."""
    x = p["embed"][tokens]
    blocks = blocks or (p["blocks"] if isinstance(p["blocks"], list) else list(p["blocks"].values()))
    for k, block in enumerate(blocks):
        h = x / jnp.sqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-6) * block["norm"]["scale"]
        x = x + active(h @ block["up"] + block["bias"], k, len(blocks)) @ block["down"]
    return x @ p["head"]


def one_other(h: Any, k: int, count: int) -> Any:
    """The fifth layer has the same operations, and no scale that a ReLU passes on."""
    return jax.nn.relu(h - 0.3 * (k == 4)) + 0.0


def first_and_last(h: Any, k: int, count: int) -> Any:
    """The first half of the layers has another operation."""
    return jnp.tanh(h) if k < count // 2 else jax.nn.relu(h)


BATCHES = list(np.random.default_rng(1).integers(0, 11, (2, 6, 8)))


@pytest.fixture
def search(monkeypatch: pytest.MonkeyPatch) -> Search:
    """`discover` on trees that count as large or as small, with the number of blocks in each instance searched."""
    searched = list[int]()
    plain = reports._searched

    def recorded(fn: Any, tree: Any, *rest: Any) -> reports.Report:
        searched.append(len(tree["blocks"]))
        return plain(fn, tree, *rest)

    monkeypatch.setattr(reports, "_searched", recorded)

    def found(fn: Any, tree: Any, large: bool) -> tuple[reports.Report, list[int]]:
        searched.clear()
        monkeypatch.setattr(reports, "LARGE", 0 if large else 10**9)
        return go.discover(fn, tree, BATCHES, "logits", progress=False), list(searched)

    return found


@pytest.fixture(scope="module")
def whole() -> reports.Report:
    """What all layers say, in a list."""
    return go.discover(forward, params(), BATCHES, "logits", progress=False)


def said(report: reports.Report) -> Any:
    """All that a report says but its numbers."""
    matrices = sorted(report.matrices.items())
    return (sorted(map(repr, report.whole)), str(report.axes), matrices, report.dead, report.uncovered, report.ungauged)


def test_three_layers_are_searched_for_all(search: Search, whole: reports.Report) -> None:
    short, blocks = search(forward, params(), large=True)
    assert blocks == [3]
    assert said(short) == said(whole)
    assert {"norm_scale", "rescale", "residual_rotation"} <= {gauge.name for gauge in short.whole}
    assert len(short.matrices) == len(whole.matrices) == 2 * LAYERS
    assert max(held.change for held in short.held) < 1e-12


def test_a_certificate_is_made_on_three_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reports, "LARGE", 0)
    rng = np.random.default_rng(0)
    tree, (x, y) = [rng.normal(size=(3, 3)) for _ in range(5)], rng.normal(size=(2, 20, 3))

    def fn(p: Any, x: Any) -> Any:
        for w in p:
            x = x + jnp.tanh(x @ w)
        return x

    report = go.discover(fn, tree, [x, y], "predictions", progress=False)
    assert report.certificate.parameters == 3 * 9
    assert report.certificate.unexplained == 0


def test_layers_that_are_numbered_keys_are_found(search: Search, whole: reports.Report) -> None:
    short, blocks = search(forward, params([f"layer_{k}" for k in range(1, LAYERS + 1)]), large=True)
    assert blocks == [3]
    named = {f"blocks/layer_{k + 1}/": f"blocks/{k}/" for k in range(LAYERS)} | {"blocks/layer_{i}/": "blocks/{i}/"}
    gauges = sorted(map(repr, short.whole))
    for name, number in named.items():
        gauges = [text.replace(name, number) for text in gauges]
    assert sorted(gauges) == sorted(map(repr, whole.whole))


def test_what_does_not_hold_of_all_layers_is_searched_on_all(search: Search) -> None:
    """Constants do not show in the operations; the proof on the whole tree finds them."""

    def fn(p: Any, tokens: Any) -> Any:
        return forward(p, tokens, active=one_other)

    tree = params()
    for block in tree["blocks"]:
        del block["bias"]

    def unbiased(p: Any, tokens: Any) -> Any:
        return fn({**p, "blocks": [{**block, "bias": jnp.zeros(7)} for block in p["blocks"]]}, tokens)

    short, blocks = search(unbiased, tree, large=True)
    assert blocks == [3, LAYERS]
    whole, _ = search(unbiased, tree, large=False)
    assert said(short) == said(whole)
    moved = "".join(repr(gauge) for gauge in short.whole if gauge.name == "rescale")
    assert "blocks/3/up" in moved and "blocks/4/up" not in moved


def test_layers_that_are_not_alike_are_all_searched() -> None:
    def halves(p: Any, tokens: Any) -> Any:
        return forward(p, tokens, active=first_and_last)

    def with_skips(p: Any, tokens: Any) -> Any:
        kept = list[Any]()

        def active(h: Any, k: int, count: int) -> Any:
            kept.append(h)
            return h if k < count // 2 else h * kept[count - 1 - k]

        return forward(p, tokens, active=active)

    def last_wider(p: Any, tokens: Any) -> Any:
        return forward(p, tokens) + p["blocks"][-1]["bias"].sum()

    tree = params()
    assert shallower(forward, tree, BATCHES[0]) is not None
    assert shallower(last_wider, tree, BATCHES[0]) is not None, "a last layer is among three, too"
    assert shallower(halves, tree, BATCHES[0]) is None
    assert shallower(with_skips, tree, BATCHES[0]) is None
    tree["blocks"][4]["up"] = np.ones((4, 8))
    tree["blocks"][4]["bias"], tree["blocks"][4]["down"] = np.ones(8), np.ones((8, 4))
    assert shallower(forward, tree, BATCHES[0]) is None


def test_layers_within_other_nodes_are_cut() -> None:
    """Tuples, dicts with numbers as keys, and a list beside another one, each with its own length."""
    tree = {"a": tuple(np.ones((2, 2)) for _ in range(5)), "b": {"c": {k: np.ones((2, 2)) for k in range(7)}}}

    def fn(p: Any, x: Any) -> Any:
        for w in (*p["a"], *p["b"]["c"].values()):
            x = jnp.tanh(x @ w)
        return x

    short = shallower(fn, tree, np.ones(2))
    assert short is not None and len(short.tree["a"]) == 3 and list(short.tree["b"]["c"]) == [0, 1, 2]
    assert isinstance(short.tree["a"], tuple)
    assert short.with_captures("a/4, b/c/6 + b/d/1") == "a/{i}, b/c/{i} + b/d/1"


def test_leaves_of_all_layers_stand_in_the_order_of_a_whole_search() -> None:
    """Kernels by path, then vectors by path; a leaf of no layer between them."""
    matrix = np.ones((2, 2))
    tree = {"l": [{"a": matrix, "b": np.ones(2), "c": matrix} for _ in range(4)], "z": matrix}
    short = shallower(lambda p, x: x @ p["z"] + sum(x @ q["a"] @ q["c"] + q["b"] for q in p["l"]), tree, np.ones(2))
    assert short is not None

    def blocks(layers: int) -> dict[str, str]:
        kernels = {f"l/{k}/{name}": "_ _" for k in range(layers) for name in "ac"}
        return {**kernels, "z": "_ _", **{f"l/{k}/b": "_" for k in range(layers)}}

    call = short.of_all_layers(Call("scale_invariant", {"blocks": blocks(3)}), tree)
    assert list(call.roles["blocks"].items()) == list(blocks(4).items())


# Functions that count their layers ------------------------------------------------------------------------


def counting(p: Any, tokens: Any, active: Any = lambda h, k, count: jax.nn.relu(h), count: int = LAYERS) -> Any:
    return forward(p, tokens, [p["blocks"][k] for k in range(count)], active)


def merged(p: Any, tokens: Any) -> Any:
    """An NNX module's way: the tree is put together from as many leaves as it was taken apart into."""
    return forward(jax.tree.unflatten(jax.tree.structure(params()), jax.tree.leaves(p)), tokens)


def rematerialized(p: Any, tokens: Any) -> Any:
    """Each layer under a checkpoint, and what takes all layers under `jit`."""

    def block(x: Any, layer: Any) -> Any:
        h = x / jnp.sqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-6) * layer["norm"]["scale"]
        return x + jax.nn.relu(h @ layer["up"] + layer["bias"]) @ layer["down"]

    x = p["embed"][tokens]
    for k in range(LAYERS):
        x = jax.checkpoint(block)(x, p["blocks"][k])
    return x @ p["head"]


COUNTING = {
    "counting": counting, "merged": merged, "jitted": jax.jit(counting), "rematerialized": rematerialized,
    "rematerialized and jitted": jax.jit(rematerialized),
}


@pytest.mark.parametrize("fn", COUNTING.values(), ids=COUNTING)
def test_a_function_that_counts_its_layers_is_cut(fn: Any) -> None:
    tree = params()
    short = shallower(fn, tree, BATCHES[0])
    assert short is not None and short.fn is not fn and len(short.tree["blocks"]) == 3
    of_three = forward(short.tree, BATCHES[0])
    np.testing.assert_allclose(short.fn(short.tree, BATCHES[0]), of_three, rtol=2e-5)
    narrow = np.asarray(BATCHES[0])[:2, :5]  # other shapes are traced anew
    np.testing.assert_allclose(short.fn(short.tree, narrow), forward(short.tree, narrow), rtol=2e-5)
    program = str(jax.make_jaxpr(short.fn)(short.tree, BATCHES[0]))
    assert program.count("rsqrt") + program.count("sqrt") <= 2 * 3, "nothing of the other layers is left"


def test_three_layers_of_a_function_that_counts_them_are_searched(search: Search, whole: reports.Report) -> None:
    short, blocks = search(merged, params(), large=True)
    assert blocks == [3]
    assert said(short) == said(whole)
    assert max(held.change for held in short.held) < 1e-12


def test_layers_that_read_the_first_or_what_no_layer_made_are_cut() -> None:
    """A mask that every layer makes anew, and a value of the first layer that all add."""

    def fn(p: Any, tokens: Any, count: int = LAYERS) -> Any:
        first = list[Any]()

        def active(h: Any, k: int, _: int) -> Any:
            h = jnp.tril(jnp.ones((8, 8))) @ h
            first.append(h)
            return jnp.tanh(h + first[0])

        return counting(p, tokens, active, count)

    short = shallower(fn, params(), BATCHES[0])
    assert short is not None
    np.testing.assert_allclose(short.fn(short.tree, BATCHES[0]), fn(short.tree, BATCHES[0], count=3), rtol=2e-5)


def test_layers_that_differ_are_not_cut() -> None:
    def of_all(p: Any, tokens: Any) -> Any:
        seen = list[Any]()

        def active(h: Any, k: int, _: int) -> Any:
            seen.append(h)
            return jax.nn.relu(h)

        return counting(p, tokens, active), seen

    def from_two_before(p: Any, tokens: Any) -> Any:
        seen = list[Any]()

        def active(h: Any, k: int, _: int) -> Any:
            seen.append(h)
            return jax.nn.relu(h + seen[max(k - 2, 0)])

        return counting(p, tokens, active)

    def swapped(p: Any, tokens: Any) -> Any:
        """The second layer reads of the first another value than all others read of the one before them."""
        seen = list[Any]()

        def active(h: Any, k: int, _: int) -> Any:
            seen.append((h, jnp.tanh(h)))
            return jax.nn.relu(h) + seen[max(k - 1, 0)][k == 1] + seen[max(k - 1, 0)][0]

        return counting(p, tokens, active)

    def by_table(p: Any, tokens: Any) -> Any:
        """A constant for each layer that is an array."""
        table = np.linspace(0.5, 1.5, 7 * LAYERS).reshape(LAYERS, 7)
        return counting(p, tokens, lambda h, k, _: jax.nn.relu(h) * jnp.asarray(table[k]))

    def within_jit(p: Any, tokens: Any) -> Any:
        """The constant stands in a function that is called."""
        return counting(p, tokens, lambda h, k, _: jax.jit(lambda h: jnp.where(h > k, h, 0.0))(h))

    def transposed(p: Any, tokens: Any) -> Any:
        """What differs is a parameter of an operation: along which axis it sums."""
        return counting(p, tokens, lambda h, k, _: jax.nn.relu(h - jax.lax.cumsum(h, axis=1, reverse=k == 3)))

    tree = params()
    for fn in (of_all, from_two_before, swapped, by_table, within_jit, transposed,
               lambda p, x: counting(p, x, active=one_other), lambda p, x: counting(p, x, active=first_and_last)):
        jax.eval_shape(fn, tree, BATCHES[0])
        assert shallower(fn, tree, BATCHES[0]) is None


def test_a_leaf_that_is_no_number_to_trace_is_left_to_a_search_of_all_layers(search: Search) -> None:
    """Integers among the parameters stay as they are in a search; a cut would trace them."""

    def fn(p: Any, tokens: Any) -> Any:
        return counting(p, tokens, count=int(p["count"]))

    tree = {**params(), "count": np.int32(LAYERS)}
    assert shallower(fn, tree, BATCHES[0]) is None
    report, blocks = search(fn, tree, large=True)
    assert blocks == [LAYERS]
    assert "residual_rotation" in {gauge.name for gauge in report.whole}


def test_lists_that_count_are_cut_at_once_or_one_after_the_other() -> None:
    """Attention and MLP that take turns; and an encoder before a decoder that reads its end."""
    rng = np.random.default_rng(0)
    tree = {f"{name}_{k}": rng.normal(size=(4, 4)) / 2 for name in ("a", "b") for k in range(1, 6)}
    x = rng.normal(size=(3, 4))

    def in_turn(p: Any, x: Any, numbers: Any = range(1, 6)) -> Any:
        for k in numbers:
            x = jnp.tanh(x @ p[f"a_{k}"]) + x
            x = jax.nn.relu(x @ p[f"b_{k}"]) + x
        return x

    def after(p: Any, x: Any, numbers: Any = range(1, 6)) -> Any:
        read = x
        for k in numbers:
            read = jnp.tanh(read @ p[f"a_{k}"]) + read
        for k in numbers:
            x = jax.nn.relu(x @ p[f"b_{k}"]) * read
        return x

    for fn in (in_turn, after):
        short = shallower(fn, tree, x)
        assert short is not None and len(short.tree) == 6
        np.testing.assert_allclose(short.fn(short.tree, x), fn(short.tree, x, range(1, 4)), rtol=1e-5)
