"""The operations of a traced function on shorter axes compute what the function computes when it is called on them."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gauge_optax as go
from gauge_optax.discovery import shrink
from gauge_optax.discovery.shorten import Refused, shorter
from gauge_optax.discovery.trace import Trace
from models import lm
from tests.discovery.axes_nets import norm
from tests.discovery.nets import FORMS
from tests.discovery.test_layouts import half, interleaved

D, F, HEADS, SIZE, ROWS, TOKENS = 12, 20, 3, 8, 23, 5


def short_of(fn: Callable[[Any, Any], Any], leaves: dict[str, Any], kept: dict[str, tuple[int, int]]) -> Any:
    """The shorter function and its leaves: the last component of an axis of each named leaf keeps so many indices."""

    def dropped(trace: Trace) -> set[int]:
        gone = set[int]()
        for path, (axis, n) in kept.items():
            ids = trace.leaves[path][axis]
            assert ids is not None
            gone |= set(list(dict.fromkeys(trace.spaces.canon(trace.spaces.atoms(ids)[-1]).tolist()))[n:])
        return gone

    return shorter(lambda p, x: [fn(p, x)], leaves, batch(), dropped)


def batch() -> Any:
    return np.arange(2 * TOKENS).reshape(2, TOKENS) % 4


def drawn(**shapes: tuple[int, ...]) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    return {name: rng.normal(size=shape) for name, shape in shapes.items()}


def seen(turned: jax.Array) -> jax.Array:
    """What does not depend on angles: those of a shorter basis are others. The first token, and lengths of heads."""
    lengths = jnp.broadcast_to(jnp.linalg.norm(turned, axis=-1)[..., None], turned.shape)
    return jnp.concatenate([turned[:, :1], lengths], 1)


def by_head(p: Any, x: jax.Array) -> jax.Array:
    return jnp.einsum("btd,dhe->bthe", x, p["query"])


def convolved(x: jax.Array, kernel: jax.Array, groups: int) -> jax.Array:
    return jax.lax.conv_general_dilated(x, kernel, (1,), "SAME", None, None, ("NHC", "HIO", "NHC"), groups)


MEANS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "jnp.mean": lambda x: jnp.mean(x, -1, keepdims=True),
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
    "updated": lambda p, x: jnp.zeros(x.shape).at[:, 1:3].set(x[:, 1:3]) + jax.lax.dynamic_update_slice(
        x, x[:, :1], (0, 2, 0)),
    "convolution": lambda p, x: convolved(x, p["filters"], 1),
    "depthwise convolution": lambda p, x: convolved(x, p["depthwise"], x.shape[-1]),
    "running sum": lambda p, x: jnp.cumsum(x, -1) + jnp.cumsum(x, 1),
    "stack": lambda p, x: jnp.stack([x, jnp.broadcast_to(p["scale"], x.shape)]).sum(0),
    "noise": lambda p, x: x * jax.random.normal(jax.random.key(0), (2, TOKENS, 1)),
}


@pytest.mark.parametrize("name", [*MEANS, *BLOCKS])
def test_outputs_are_those_of_a_call_on_shorter_axes(name: str) -> None:
    """Stream, hidden units and table are short; the function takes its lengths from its arguments."""

    def fn(p: Any, tokens: Any) -> jax.Array:
        x = p["embed"][tokens]
        if name in MEANS:
            x = x - MEANS[name](x)
            return norm(x, p["scale"]) @ p["up"]
        return BLOCKS[name](p, norm(x, p["scale"]))

    leaves = drawn(embed=(ROWS, D), scale=(D,), up=(D, F), square=(D, D), query=(D, HEADS, SIZE), filters=(3, D, F),
                   depthwise=(3, 1, D))
    kept, length = ({"embed": (1, 4)}, 8) if name == "two axes" else ({"embed": (1, 5)}, 5)
    kept |= {"up": (1, 7)} | ({"query": (2, 2)} if name in ("halves", "neighbours") else {})
    with jax.enable_x64(True):
        # What the embedding says of the stream holds of all leaves that the function reads it by.
        function, small = short_of(fn, leaves, kept)
        assert small["embed"].shape == (ROWS, length) and small["scale"].shape == (length,)
        for tokens in (batch(), batch()[:, :3]) if name in MEANS else (batch(),):
            found, expected = function(small, tokens)[0], fn(small, tokens)
            np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("error", [TypeError, ValueError])
def test_an_error_within_a_loop_is_a_refusal(error: type[Exception], monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole tree is searched where JAX cannot take the shorter loop."""

    def failing(*args: Any, **options: Any) -> Any:
        raise error("carry")

    def fn(p: Any, tokens: Any) -> jax.Array:
        return BLOCKS["loop"](p, p["embed"][tokens])

    with jax.enable_x64(True):
        function, small = short_of(fn, drawn(embed=(ROWS, D), square=(D, D)), {"embed": (1, 5)})
        monkeypatch.setattr("gauge_optax.discovery.shorten._Evaluation._scan", failing)
        with pytest.raises(Refused, match="scan: carry"):
            function(small, batch())


REFUSED: dict[str, Callable[[Any, jax.Array], jax.Array]] = {
    "sort": lambda p, x: jnp.sort(x, -1),
    "loop with a condition": lambda p, x: jax.lax.while_loop(lambda x: jnp.sum(x) < 1, lambda x: x + p["scale"], x),
    "reversal of a part": lambda p, x: x[..., 7:],
    "rows by number": lambda p, x: x * p["scale"][np.array([7, 9])].sum(),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_shorter_form_is_refused(name: str) -> None:
    """The whole instance is searched then."""
    leaves = drawn(embed=(ROWS, D), scale=(D,))
    with jax.enable_x64(True), pytest.raises(Refused):
        function, small = short_of(lambda p, t: REFUSED[name](p, p["embed"][t] * p["scale"]), leaves, {"embed": (1, 5)})
        function(small, batch())


@pytest.mark.parametrize("form", ["unrolled", "scanned"])
def test_a_transformer_gives_the_same_logits(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With heads that stay as they are, `models.lm`'s GPT can be called: that and the operations agree to roundoff."""
    sizes: dict[str, Any] = dict(vocab=59, d_model=24, layers=2, heads=4, kv_heads=4, d_head=6, d_ff=40, max_len=6)
    net = FORMS[form](lm.LMConfig(**sizes, norm="layernorm", mlp="relu", bias=True))

    def compared(fn: Any, trace: Any, leaves: Any, batches: Any) -> Any:
        def refusing(given: Any, batch: Any) -> Any:
            if jax.tree.map(jnp.shape, dict(given)) != jax.tree.map(jnp.shape, dict(leaves)):
                raise TypeError
            return fn(given, batch)

        small = shrink.smaller(refusing, trace, leaves, batches)
        assert small is not None and small.fn is not refusing and len(small.lengths) >= 3
        for given in small.batches:
            for x, y in zip(small.fn(small.leaves, given), fn(small.leaves, given), strict=True):
                np.testing.assert_allclose(x, y, rtol=1e-11, atol=1e-11)
        raise InterruptedError

    monkeypatch.setattr(shrink, "LARGE", 0)
    monkeypatch.setattr("gauge_optax.discovery.report.smaller", compared)
    with pytest.raises(InterruptedError):
        go.discover(net.fn, net.params, net.batches, progress=False)
