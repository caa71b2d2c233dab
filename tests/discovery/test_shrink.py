"""Large trees are searched on a small instance: the same gauges, proved on the large one."""

import itertools
from collections.abc import Callable, Mapping
from typing import Any
from unittest.mock import Mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import gauge_optax as go
from gauge_optax.discovery import report as reports
from gauge_optax.discovery import shrink, sketch, write
from gauge_optax.discovery.shorten import Refused, shorter
from gauge_optax.discovery.shrink import Small
from gauge_optax.discovery.trace import Trace
from gauge_optax.discovery.views import Atom, Window
from models import lm
from tests import twins
from tests.discovery.axes_nets import attention, norm
from tests.discovery.nets import FORMS, Net
from tests.discovery.test_layouts import drawn, half, inputs, interleaved

Searched = list[Small | None]
SIZES: dict[str, Any] = dict(vocab=59, d_model=24, layers=2, heads=16, d_head=16, d_ff=40, max_len=6)
GPT = lm.LMConfig(**SIZES, kv_heads=16, mlp="relu", bias=True)
NETS: dict[str, Callable[[], Net]] = {
    "gpt": lambda: FORMS["unrolled"](GPT), "gpt, scanned": lambda: FORMS["scanned"](GPT),
    "llama, tied": lambda: FORMS["unrolled"](lm.llama_config(**SIZES, kv_heads=8, tied=True, norm_one_plus=True)),
    "qwen": lambda: FORMS["unrolled"](lm.llama_config(**SIZES, kv_heads=8, qk_norm=True)),
}


class Modules(nnx.Module):
    """A net of Flax's own modules, which check their shapes."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.embed, self.norm = nnx.Embed(61, 32, rngs=rngs), nnx.LayerNorm(32, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(4, 32, decode=False, rngs=rngs)
        self.up, self.down = nnx.Linear(32, 96, rngs=rngs), nnx.Linear(96, 61, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Logits."""
        x = self.embed(tokens)
        return self.down(nnx.relu(self.up(x + self.attention(self.norm(x)))))


@pytest.fixture
def searched(monkeypatch: pytest.MonkeyPatch) -> Searched:
    """The instances that `discover` searches, with every tree counted as large."""
    instances: Searched = []

    def recorded(*args: Any) -> Small | None:
        instances.append(shrink.smaller(*args))
        return instances[-1]

    monkeypatch.setattr(shrink, "LARGE", 0)
    monkeypatch.setattr(reports, "smaller", recorded)
    return instances


def of_modules() -> Net:
    graph, params = nnx.split(Modules(nnx.Rngs(0)))
    batches = list(np.random.default_rng(0).integers(0, 61, (2, 8, 6)))
    return Net(lambda p, x: nnx.merge(graph, p)(x), params, batches, lambda linear: [])


def wide(fn: Any) -> Net:
    """A function of two kernels."""
    return Net(fn, drawn({"up": (48, 64), "down": (64, 48)}), inputs(2, 7, 48), lambda linear: [])


RELU = wide(lambda p, x: jax.nn.relu(x @ p["up"]) @ p["down"])


def found(net: Net, **options: Any) -> reports.Report:
    return go.discover(net.fn, net.params, net.batches, progress=False, **options)


@pytest.mark.slow_rows("gpt*", "llama*", "qwen")
@pytest.mark.parametrize("make", [*NETS.values(), of_modules], ids=[*NETS, "Flax's own modules"])
def test_a_small_instance_has_the_same_gauges(make: Any, searched: Searched, monkeypatch: pytest.MonkeyPatch) -> None:
    net = make()
    small = found(net)
    (instance,) = searched
    assert instance is not None and len(instance.lengths) >= 3
    monkeypatch.setattr(shrink, "LARGE", 10**9)
    whole = found(net)
    assert searched[1] is None
    listed, expected = (sorted(repr(held.gauge) for held in one.held) for one in (small, whole))
    assert listed == expected  # they are listed by dimension, which depends on the lengths
    assert max(held.change for held in small.held) < 1e-11
    assert all(getattr(small, name) == getattr(whole, name) for name in ("uncovered", "dead", "ungauged"))


def test_shapes_are_enough(searched: Searched) -> None:
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), RELU.params)
    one, other = (found(RELU._replace(params=params), outputs="loss") for params in (shapes, RELU.params))
    assert one.code() == other.code() and None not in searched
    assert len(searched) == 2 and [gauge.name for gauge in one.gauges] == ["rescale"]


def test_a_function_that_fixes_its_lengths_and_its_indices_is_searched_as_it_is(searched: Searched) -> None:
    def fn(p: Any, x: Any) -> jax.Array:
        hidden = jax.nn.relu(x @ p["up"]).reshape(7, 64)
        return hidden @ p["down"] + hidden[:, np.array([60, 63])].sum()

    found(Net(fn, drawn({"up": (5, 64), "down": (64, 5)}), inputs(2, 7, 5), RELU.gauges), outputs="loss")
    assert searched == [None]


@pytest.mark.parametrize("turn, values", [(half, 40), pytest.param(interleaved, 20, marks=pytest.mark.slow)])
def test_lengths_that_only_a_reshape_ties_are_short(turn: Any, values: int, searched: Searched) -> None:
    """Values take the shape of queries, or half of it, by a reshape: neither basis can be short in a call alone."""

    def fn(p: Any, tokens: Any) -> jax.Array:
        x = p["embed"][tokens]
        q, k, v = (jnp.einsum("btd,dhe->bthe", norm(x), p[name]) for name in ("query", "key", "value"))
        mixed = attention(turn(q), *(jnp.repeat(y, 2, 2) for y in (turn(k), v)))
        mixed = mixed.reshape(*q.shape[:3], q.shape[-1] * values // 40)
        return norm(x + jnp.einsum("bthe,hed->btd", mixed, p["out"])) @ p["head"]

    params = drawn(dict(embed=(59, 52), query=(52, 2, 40), key=(52, 1, 40), value=(52, 1, values), out=(2, values, 52),
                        head=(52, 61)))
    tokens = list(np.random.default_rng(1).integers(0, 59, (2, 6, 9)))
    report = go.discover(fn, params, tokens, "logits", progress=False)
    (instance,) = searched
    assert instance is not None
    short = {name: instance.leaves[name].shape[-1] for name in ("value", "query")}
    assert 1.5 * short["query"] < 40 and 1.5 * short["value"] < values
    assert instance.full(short["value"]) == values and instance.full(short["query"]) == 40
    assert {held.call.kind for held in report.held} >= {"head_linear", "rope_linear"}
    assert values == 40 or (report.certificate.unexplained == 0 and report.certificate.explained > 0)


def test_a_gauge_of_the_small_instance_alone_is_rejected(searched: Searched) -> None:
    """Units past the thirtieth act otherwise: no small instance has them."""

    def fn(p: Any, x: Any) -> jax.Array:
        hidden = jax.nn.relu(x @ p["up"])
        late = jnp.arange(hidden.shape[-1]) >= 30
        return jnp.where(late, jnp.tanh(hidden), hidden) @ p["down"]

    report = found(wide(fn), outputs="loss")
    assert searched[0] is not None
    assert not report.gauges and "rescale of up, down: moves the outputs by" in report.rejected[-1]


def test_a_function_that_differs_between_calls_is_still_seen(searched: Searched) -> None:
    """Its operations are traced once for everything else; noise with fixed lengths, on short axes."""
    calls = itertools.count()

    def fn(p: Any, x: Any) -> jax.Array:
        noise = np.random.default_rng(next(calls)).normal(size=(7, 64))
        return (jax.nn.relu(x @ p["up"]).reshape(7, 64) * noise) @ p["down"]

    with pytest.raises(ValueError, match="two calls of fn differ"):
        found(wide(fn), outputs="loss")


@pytest.mark.parametrize("change, kept", [(5e-12, True), (2e-11, False)])
def test_roundoff_at_full_size_is_no_refutation(
    change: float, kept: bool, searched: Searched, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sums are longer there than in the small instance, where a gauge has to hold to 1e-12."""
    changes = reports.Prover.changes

    def at_size(self: Any, calls: Any, *args: Any) -> list[float]:
        return [change] * len(calls) if self._large else changes(self, calls, *args)

    monkeypatch.setattr(reports.Prover, "changes", at_size)
    report = found(RELU, outputs="loss")
    assert searched[0] is not None and [gauge.name for gauge in report.gauges] == ["rescale"] * kept
    assert kept or "moves the outputs by 2.0e-11" in report.rejected[-1]


def test_squared_gradients_are_those_of_whole_leaves(x64: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaf by leaf as all at once; a gradient that is not finite counts as zero."""
    fn, leaves, batches, _ = wide(lambda p, x: jnp.tanh(x @ p["up"]) @ p["down"])
    draw = np.random.default_rng
    outputs, backward = jax.vjp(lambda x: fn(x, batches[0]), leaves)
    expected = backward(draw(0).standard_normal(outputs.shape).astype(outputs.dtype))[0]
    for chunk in (sketch._CHUNK, 1):
        monkeypatch.setattr(sketch, "_CHUNK", chunk)
        squared = sketch.squared_gradients(fn, batches[:1], leaves, draw(0), list(leaves))
        for path in leaves:
            np.testing.assert_allclose(squared[path], np.square(expected[path]), rtol=1e-6, atol=1e-30)
    monkeypatch.undo()  # both leaves in one chunk
    point = {"a": np.zeros(3), "b": np.ones(3)}
    root = sketch.squared_gradients(lambda x, _: jnp.sqrt(x["a"]) + x["b"], [0], point, draw(0), ["a", "b"])
    assert not root["a"].any() and root["b"].all(), "the derivative of a square root at zero is infinite"


def test_free_axes_side_by_side_are_written_as_one() -> None:
    """A norm over all heads of which rotary planes share a factor: neither of two free lengths would be determined."""
    heads, basis, sizes = Atom((0,), 2), Atom((1,), 4), dict[str, int]()
    text = write._axis_text(8, Window(0, 8, (heads, basis)), ["_", "channel"], sizes, "half", "channel")
    assert (text, sizes) == ("(_ channel)", {"channel": 2})
    with pytest.raises(write.Unwritable, match="two parts are free"):
        write._axis_text(8, Window(0, 8, (heads, basis)), ["_", "channel"], {}, "interleaved", "channel")


# Operations on shorter axes compute what the function computes when it is called on them -------------------------

D, F, HEADS, SIZE, ROWS, TOKENS = 12, 20, 3, 8, 23, 5


def short_of(fn: Callable[[Any, Any], Any], shapes: Any, kept: Mapping[str, tuple[int, int]]) -> Any:
    """The shorter function and its leaves: the last component of an axis of each named leaf keeps so many indices."""

    def dropped(trace: Trace) -> set[int]:
        gone = set[int]()
        for path, (axis, n) in kept.items():
            ids = trace.spaces.atoms(np.asarray(trace.leaves[path][axis]))[-1]
            gone |= set(list(dict.fromkeys(trace.spaces.canon(ids).tolist()))[n:])
        return gone

    return shorter(lambda p, x: [fn(p, x)], jax.tree.map(np.asarray, twins.normal(0, shapes)), batch(), dropped)


def batch() -> Any:
    return np.arange(2 * TOKENS).reshape(2, TOKENS) % 4


def seen(turned: jax.Array) -> jax.Array:
    """What does not depend on angles: those of a shorter basis are others. The first token, and lengths of heads."""
    lengths = jnp.broadcast_to(jnp.linalg.norm(turned, axis=-1)[..., None], turned.shape)
    return jnp.concatenate([turned[:, :1], lengths], 1)


def by_head(p: Any, x: jax.Array) -> jax.Array:
    return jnp.einsum("btd,dhe->bthe", x, p["query"])


def convolved(x: jax.Array, kernel: jax.Array, groups: int) -> jax.Array:
    return jax.lax.conv_general_dilated(x, kernel, (1,), "SAME", None, None, ("NHC", "HIO", "NHC"), groups)


MEANS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "sum over length": lambda x: jnp.sum(x, -1, keepdims=True) / x.shape[-1],
    "times one over length": lambda x: jnp.sum(x, -1, keepdims=True) * (1 / x.shape[-1]),
    "product by a mean": lambda x: x @ jnp.full((x.shape[-1], 1), 1 / x.shape[-1]),
    "product by ones": lambda x: (x @ jnp.ones((x.shape[-1], 1))) / x.shape[-1],
    "two axes": lambda x: jnp.mean(x.reshape(*x.shape[:2], 2, -1), (2, 3))[..., None],
}
BLOCKS: dict[str, Callable[[Any, jax.Array], jax.Array]] = {
    "loop": lambda p, x: jax.lax.scan(lambda c, k: (jnp.tanh(c @ k), jnp.sum(c)), x, jnp.stack([p["square"]] * 3))[0],
    "reverse loop": lambda p, x: jax.lax.scan(
        lambda c, y: (c + y, c), jnp.zeros_like(x[:, 0]), x.swapaxes(0, 1), reverse=True)[1].swapaxes(0, 1),
    "condition": lambda p, x: jax.lax.cond(x.shape[0] > 1, lambda x: x @ p["square"], lambda x: x, x),
    "checkpoint": lambda p, x: jax.checkpoint(lambda x: jnp.sin(x) @ p["square"])(x),
    "custom derivative": lambda p, x: jax.nn.relu6(x) + jax.nn.logsumexp(x, -1, keepdims=True),
    "halves": lambda p, x: seen(half(by_head(p, x))),
    "neighbours": lambda p, x: seen(interleaved(by_head(p, x))),
    "split": lambda p, x: sum(jnp.split(by_head(p, x), 3, 2), start=jnp.zeros(())),
    "concatenation": lambda p, x: jnp.concatenate([x, x @ p["up"]], -1),
    "padding": lambda p, x: jnp.pad(x, ((0, 0), (1, 2), (0, 0))),
    "one-hot": lambda p, x: x + jax.nn.one_hot(batch(), ROWS) @ p["embed"],
    "taken along": lambda p, x: jnp.take_along_axis(x @ p["embed"].T, batch()[..., None], -1),
    "largest": lambda p, x: jax.lax.top_k(x, 3)[0] + jnp.argmax(x, -1)[..., None],
    "scattered": lambda p, x: jnp.zeros(x.shape).at[:, 1:3].set(x[:, 1:3]),
    "updated": lambda p, x: jax.lax.dynamic_update_slice(x, x[:, :1], (0, 2, 0)),
    "convolution": lambda p, x: convolved(x, p["filters"], 1),
    "depthwise convolution": lambda p, x: convolved(x, p["depthwise"], x.shape[-1]),
    "running sum": lambda p, x: jnp.cumsum(x, -1) + jnp.cumsum(x, 1),
    "stack": lambda p, x: jnp.stack([x, jnp.broadcast_to(p["scale"], x.shape)]).sum(0),
    "noise": lambda p, x: x * jax.random.normal(jax.random.key(0), (2, TOKENS, 1)),
}


LEAVES = dict(embed=(ROWS, D), scale=(D,), up=(D, F), square=(D, D), query=(D, HEADS, SIZE), filters=(3, D, F),
              depthwise=(3, 1, D))


@pytest.mark.parametrize("name", [*MEANS, *BLOCKS])
def test_outputs_are_those_of_a_call_on_shorter_axes(name: str, x64: None) -> None:
    """Stream, hidden units and table are short; the function takes its lengths from its arguments."""

    def fn(p: Any, tokens: Any) -> jax.Array:
        x = p["embed"][tokens]
        if name in MEANS:
            return norm(x - MEANS[name](x), p["scale"]) @ p["up"]
        return BLOCKS[name](p, norm(x, p["scale"]))

    kept, length = ({"embed": (1, 4)}, 8) if name == "two axes" else ({"embed": (1, 5)}, 5)
    kept |= {"up": (1, 7)} | ({"query": (2, 2)} if name in ("halves", "neighbours") else {})
    function, small = short_of(fn, LEAVES, kept)
    # What the embedding says of the stream holds of all leaves that the function reads it by.
    assert small["embed"].shape == (ROWS, length) and small["scale"].shape == (length,)
    for tokens in (batch(), batch()[:, :3]) if name in MEANS else (batch(),):
        np.testing.assert_allclose(function(small, tokens)[0], fn(small, tokens), rtol=1e-12, atol=1e-12)


def refused(rule: Callable[[Any, jax.Array], jax.Array], match: str | None = None) -> None:
    """The whole instance is searched then."""
    shapes = {name: LEAVES[name] for name in ("embed", "scale", "square")}
    with pytest.raises(Refused, match=match):
        function, small = short_of(lambda p, t: rule(p, p["embed"][t] * p["scale"]), shapes, {"embed": (1, 5)})
        function(small, batch())


@pytest.mark.parametrize("rule", [
    lambda p, x: jnp.sort(x, -1),
    lambda p, x: jax.lax.while_loop(lambda x: jnp.sum(x) < 1, lambda x: x + p["scale"], x),
    lambda p, x: x[..., 7:],
    lambda p, x: x * p["scale"][np.array([7, 9])].sum(),
], ids=["sort", "loop with a condition", "a part", "rows by number"])
def test_what_has_no_shorter_form_is_refused(rule: Callable[[Any, jax.Array], jax.Array], x64: None) -> None:
    refused(rule)


@pytest.mark.parametrize("error", [TypeError, ValueError])
def test_an_error_within_a_loop_is_a_refusal(error: Any, monkeypatch: pytest.MonkeyPatch, x64: None) -> None:
    """The whole tree is searched where JAX cannot take the shorter loop."""
    scan = Mock(side_effect=error("carry"))
    monkeypatch.setattr("gauge_optax.discovery.shorten._Evaluation._scan", scan)
    refused(BLOCKS["loop"], "scan: carry")
