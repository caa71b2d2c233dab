"""Large trees are searched on a small instance: the same gauges, proved on the large one."""

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import gauge_optax as go
from gauge_optax.discovery import report as reports
from gauge_optax.discovery import shrink, sketch, write
from gauge_optax.discovery.shrink import Small
from gauge_optax.discovery.views import Atom, Window
from models import lm
from tests.discovery.axes_nets import attention, norm
from tests.discovery.nets import FORMS, Net
from tests.discovery.test_layouts import drawn, fused, fused_params, half, inputs, interleaved

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
def searched(monkeypatch: pytest.MonkeyPatch) -> list[Small | None]:
    """The instances that `discover` searches, with every tree counted as large."""
    instances: list[Small | None] = []

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
def test_a_small_instance_has_the_same_gauges(
    make: Callable[[], Net], searched: list[Small | None], monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_shapes_are_enough(searched: list[Small | None]) -> None:
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), RELU.params)
    one, other = (found(RELU._replace(params=params), outputs="loss") for params in (shapes, RELU.params))
    assert one.code() == other.code() and None not in searched


def test_a_function_that_fixes_its_lengths_is_searched_as_it_is(searched: list[Small | None]) -> None:
    tokens = list(np.random.default_rng(1).integers(0, 11, (2, 2, 6)))
    go.discover(fused, fused_params(), tokens, progress=False)
    assert searched == [None]


@pytest.mark.parametrize("turn, values", [(half, 40), pytest.param(interleaved, 20, marks=pytest.mark.slow)])
def test_lengths_that_only_a_reshape_ties_are_short(
    turn: Callable[[jax.Array], jax.Array], values: int, searched: list[Small | None]
) -> None:
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


def test_a_gauge_of_the_small_instance_alone_is_rejected(searched: list[Small | None]) -> None:
    """Units past the thirtieth act otherwise: no small instance has them."""

    def fn(p: Any, x: Any) -> jax.Array:
        hidden = jax.nn.relu(x @ p["up"])
        late = jnp.arange(hidden.shape[-1]) >= 30
        return jnp.where(late, jnp.tanh(hidden), hidden) @ p["down"]

    report = found(wide(fn), outputs="loss")
    assert searched[0] is not None
    assert not report.gauges and "rescale of up, down: moves the outputs by" in report.rejected[-1]


def test_a_function_that_differs_between_calls_is_still_seen(searched: list[Small | None]) -> None:
    """Its operations are traced once for everything else; noise with fixed lengths, on short axes."""
    calls = itertools.count()

    def fn(p: Any, x: Any) -> jax.Array:
        noise = np.random.default_rng(next(calls)).normal(size=(7, 64))
        return (jax.nn.relu(x @ p["up"]).reshape(7, 64) * noise) @ p["down"]

    with pytest.raises(ValueError, match="two calls of fn differ"):
        found(wide(fn), outputs="loss")


@pytest.mark.parametrize("change, kept", [(5e-12, True), (2e-11, False)])
def test_roundoff_at_full_size_is_no_refutation(
    change: float, kept: bool, searched: list[Small | None], monkeypatch: pytest.MonkeyPatch
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
    heads, basis, sizes = Atom(("heads",), 2), Atom(("basis",), 4), dict[str, int]()
    text = write._axis_text(8, Window(0, 8, (heads, basis)), ["_", "channel"], sizes, "half", "channel")
    assert (text, sizes) == ("(_ channel)", {"channel": 2})
    with pytest.raises(write.Unwritable, match="two parts are free"):
        write._axis_text(8, Window(0, 8, (heads, basis)), ["_", "channel"], {}, "interleaved", "channel")
