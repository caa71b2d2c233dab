"""The operations of a traced function on shorter axes compute what the function computes when it is called on them."""

from collections.abc import Callable, Mapping
from typing import Any
from unittest.mock import Mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gauge_optax.discovery.shorten import Refused, shorter
from gauge_optax.discovery.trace import Trace
from tests.discovery.axes_nets import norm
from tests.discovery.test_layouts import half, interleaved
from tests.twins import normal

D, F, HEADS, SIZE, ROWS, TOKENS = 12, 20, 3, 8, 23, 5


def short_of(fn: Callable[[Any, Any], Any], shapes: Any, kept: Mapping[str, tuple[int, int]]) -> Any:
    """The shorter function and its leaves: the last component of an axis of each named leaf keeps so many indices."""

    def dropped(trace: Trace) -> set[int]:
        gone = set[int]()
        for path, (axis, n) in kept.items():
            ids = trace.spaces.atoms(trace.leaves[path][axis])[-1]
            gone |= set(list(dict.fromkeys(trace.spaces.canon(ids).tolist()))[n:])
        return gone

    return shorter(lambda p, x: [fn(p, x)], jax.tree.map(np.asarray, normal(0, shapes)), batch(), dropped)


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
