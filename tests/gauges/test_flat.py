"""The residual stream and the dead directions beside it: each row of `FLAT_CASES` beside the network itself.

`test_conformance` has the laws of the action for all gauges, and a dense oracle for those whose products have an
inverse. Here the oracle is the network: along every orbit the loss is constant, and twins train alike.
"""

import functools
from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gauge_optax as go
from benchmarks.certificates import decoder
from models import lm
from tests.cases import FLAT_CASES, GPT, GaugeCase, lm_parts
from tests.orbit.test_canonicalize import apart
from tests.quick import jit
from tests.refusals import each_refused
from tests.tolerances import tolerance
from tests.twins import stepper, train

Tree = Any


rows = pytest.mark.parametrize("case", FLAT_CASES, ids=lambda case: case.name)


@pytest.mark.slow_rows("*value_gqa", "norm_read_shift/[ot]*", "product/*", "*stacked", "*fused", "norm_write_shift/*")
@rows
def test_vertical_is_the_orbit(case: GaugeCase, x64: None) -> None:
    """Of dimension `dim`; no gradient along it; idempotent."""
    gauge, params = go.product(case.gauges()), case.params(jax.random.key(1))
    draw, count = np.random.default_rng(0).normal, case.dim + 4
    vertical = jit(jax.vmap(lambda t: gauge.vertical(params, t)))
    up = vertical(jax.tree.map(lambda x: draw(size=(count, *x.shape)), params))
    assert apart(vertical(up), up) <= tolerance("split")
    flat = np.concatenate([np.asarray(x).reshape(count, -1) for x in jax.tree.leaves(up)], 1)
    sizes = np.linalg.svd(flat, compute_uv=False)
    assert np.sum(sizes > 1e-9 * sizes[0]) == case.dim - OVERLAP.get(case.name, 0)
    gradient = np.concatenate([np.ravel(x) for x in jax.tree.leaves(jit(jax.grad(case.loss))(params))])
    assert np.max(np.abs(flat @ gradient)) <= 1e-10 * np.linalg.norm(gradient) * np.max(np.linalg.norm(flat, axis=1))


INNER: dict[str, Callable[[list[go.Gauge]], optax.GradientTransformation]] = {
    "adamw": lambda gauges: go.quotient(optax.adamw(1e-2, weight_decay=0.1), gauges),
    "lion": lambda gauges: go.quotient(optax.lion(1e-3), gauges),
    "muon": lambda gauges: go.quotient_muon(1e-2, gauges),
    "free": lambda gauges: go.quotient(optax.adamw(1e-2), gauges, pin=False, hold=False),
}


# A constant that is added changes no gradient, so that Adam's steps are those of the twin; decay shrinks the constant.
ADAM_SEES_NOTHING = ("key_bias", "embedding_shift", "norm_write_shift", "norm_read_shift")
# Lion steps by signs. The sum behind one sign is near zero at step 8: in three of six twins it takes the other sign.
SLACK = {("product/whole_gpt", "lion"): 10.0}
# Rows of embeddings that all gain one number; all logits through all channels.
OVERLAP = {"product/whole_gpt": 2, "product/whole_gpt_linear": 2}


@pytest.mark.slow_rows(
    "*/stacked*", "norm_read_shift/one_plus_bias-*", "product/whole_*", "*/residual_layernorm-*", "*/latents-*",
    "product/normed_heads-*")
@pytest.mark.parametrize(("case", "inner", "dtype"), [
    pytest.param(
        case, inner, dtype, id=f"{case.name}-{inner}-{dtype}",
        marks=() if (inner, dtype) == ("adamw", "float64") and len(case.gauges()) > 1 else pytest.mark.slow,
    )
    for case in FLAT_CASES for inner in INNER for dtype in ("float64", "float32")
    if (inner, dtype) != ("free", "float32")
])
def test_twins_train_alike(case: GaugeCase, inner: str, dtype: str) -> None:
    with jax.enable_x64(dtype == "float64"):
        gauge, params, loss = go.product(case.gauges()), case.params(jax.random.key(1)), cast(Any, case.loss)
        element = gauge.sample(jax.random.key(2), params, 0.5)
        twin = gauge.act(element, params)
        limit = 1e-10 if dtype == "float64" else SLACK.get((case.name, inner), 1.0) * 1e-4
        tx, adamw = INNER[inner](case.gauges()), optax.adamw(1e-2, weight_decay=0.1)
        (end, losses), (other, others) = (train(tx.init, stepper(tx, loss), p) for p in (params, twin))
        assert apart(gauge.act(element, end), other) <= limit
        np.testing.assert_allclose(others, losses, rtol=limit)
        if inner == "adamw" and not (len(case.gauges()) == 1 and gauge.gauges[0].name in ADAM_SEES_NOTHING):
            (plain, _), (drifted, _) = (train(adamw.init, stepper(adamw, loss), p) for p in (params, twin))
            on_slice = go.bind(gauge, params).slice_point
            assert apart(on_slice(drifted), on_slice(plain)) > 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("hold", [True, False])
def test_a_held_stream_does_not_turn(hold: bool, x64: None) -> None:
    """The sum over 20 steps of how far the embedding turns, as the product sees it."""
    case = next(case for case in FLAT_CASES if case.name == "product/residual_layernorm")
    (_, norm), read, write = case.gauges(), {"up/kernel": "basis _"}, {"token": "_ basis", "bias": "basis"}
    group = go.product([go.residual_rotation(read, write, [norm], centred=True, hold=hold), norm])
    tx, params, turned = go.quotient(optax.adam(1e-2), group), case.params(jax.random.key(1)), 0.0
    step, vertical, state = stepper(tx, cast(Any, case.loss)), jit(group.vertical), tx.init(params)
    for _ in range(20):
        before, (params, state, _) = params, step(params, state)
        up = vertical(before, jax.tree.map(jnp.subtract, params, before))["token"]
        turned += float(jnp.linalg.norm(up) / jnp.linalg.norm(before["token"]))
    assert turned < 1e-5 if hold else turned > 1e-2


# Refusals --------------------------------------------------------------------------------


def _of_gpt(method: str) -> Any:
    """What depends on norms with scales, of a list whose moves depend on one another."""
    gauges, params = lm.whole_gauges(GPT, linear=False), jax.tree.map(lambda x: jnp.zeros(x.shape), lm_parts(GPT)[0])
    group = go.product(gauges)
    identity = group.identity(params)
    if method == "init":
        return jax.eval_shape(go.quotient(optax.adamw(1e-3), gauges[:1]).init, params)
    if method == "transport":
        element = (gauges[0].sample(jax.random.key(0), params), *identity[1:])
        return go.orbit.transport(optax.adam(1e-3).init(params), params, gauges, element)
    return group.compose(identity, identity) if method == "compose" else group.inverse(identity)


CHANNEL, READER = {"b": "channel"}, {"w": "channel _"}
LEAVES = {"b": jnp.zeros(3), "table": jnp.zeros((2, 3)), "w": jnp.zeros((3, 4)), "c": jnp.zeros(4), "d": jnp.zeros(5)}
NAMELESS = r"(?s)'table' has an axis without a name.*name every axis"
STREAM, OTHER = ({"w": "basis _"}, {"table": "_ basis"}), go.norm_scale({"c": "channel"}, {"w": "_ channel"})
SIGNS = [go.residual_rotation({"w": "basis _"}, {"table": "_ basis"}, [go.norm_scale(CHANNEL, READER)]),
         go.rescale(CHANNEL, READER)]
LAYERS = {"l": [{"b": jnp.zeros(6), "w": jnp.zeros((6, 6)), "c": jnp.zeros(6)} for _ in range(2)]}
# What is typed, and the words of the error.
test_lists_that_do_not_fit_are_refused = each_refused({
    "neither writers nor tables": (lambda: go.norm_write_shift(), "takes either `write` or `tied`"),
    "writers and tables": (lambda: go.norm_write_shift({"out": "_ channel"}, tied={"table": "vocab channel"}),
                           "takes either `write` or `tied`"),
    "a norm that is not divided out": (lambda: _of_gpt("init"), r"(?s)not divided out.*add it to the list of gauges"),
    # Its slice points have scales of −1, where a rotation is not what `push` takes it for: twins were trained apart.
    "a norm whose signs stay": (
        lambda: go.quotient(optax.sgd(1.0), SIGNS).init(LEAVES | {"b": -jnp.ones(3)}), "not divided out"),
    "a composition": (lambda: _of_gpt("compose"), "no compose of elements of a product"),
    "an inverse": (lambda: _of_gpt("inverse"), "no inverse of elements of a product"),
    "transport": (lambda: _of_gpt("transport"), "no rule for residual_rotation through norms with scales"),
    "a norm that is no norm": (
        lambda: go.residual_rotation(*STREAM, [go.logit_shift({"w": "_ vocab"})]), "no norm_scale"),
    "a norm of another axis": (
        lambda: go.residual_rotation(*STREAM, [OTHER]).dim(LEAVES), "another axis than the stream's"),
    "two kernels and one bias": (
        lambda: go.bias_absorption(CHANNEL, READER | {"v": "channel _"}, {"c": "_"}), "do not pair"),
    "a bias and no bias behind it": (lambda: go.norm_read_shift(READER, None, CHANNEL), "do not pair"),
    "a bias of another length": (
        lambda: go.bias_absorption(CHANNEL, READER, {"d": "_"}).dim(LEAVES), "another shape than the outputs of 'w'"),
    # These were accepted, and their first move raised an error of a tuple or of a transpose.
    "a bias of two axes": (
        lambda: go.bias_absorption({"table": "_ channel"}, READER, {"c": "_"}).dim(LEAVES), NAMELESS),
    "a carried bias of two axes": (
        lambda: go.bias_absorption(CHANNEL, READER, {"c": "_"}, residual={"table": "_ channel"}).dim(LEAVES), NAMELESS),
    "a norm of two axes": (lambda: go.norm_read_shift(READER, {"table": "_ channel"}).dim(LEAVES), NAMELESS),
    "a norm's bias of two axes": (
        lambda: go.norm_read_shift(READER, CHANNEL, {"table": "_ channel"}, {"c": "_"}).dim(LEAVES), NAMELESS),
    "several biases of one **": (
        lambda: go.bias_absorption({"**/b": "channel"}, {"**/w": "channel _"}, {"**/c": "_"}).dim(LAYERS),
        "(?s)`bias` matches 2 leaves in one layer.*as {i} in every pattern"),
    "more kernels than biases": (
        lambda: go.bias_absorption({"l/0/b": "channel"}, {"**/w": "channel _"}, {"l/0/c": "_"}).dim(LAYERS),
        "`into` matches 1 leaf in one"),
    "several norms": (
        lambda: go.norm_read_shift({"**/w": "channel _"}, {"**/b": "channel"}).dim(LAYERS), "`scale` matches 2 leaves"),
    "an axis that only a bias has": (
        lambda: go.bias_absorption(CHANNEL, {"w": "channel _"}, {"c": "head"}), "(?s)dangling axis head.*write '_'"),
    "an axis that only a reader has": (
        lambda: go.norm_read_shift({"w": "channel head"}, CHANNEL).dim(LEAVES), "(?s)'head' that 'b' lacks.*write '_'"),
})


SIZES: dict[str, Any] = dict(
    vocab=9, d_model=6, layers=2, heads=4, kv_heads=2, d_head=4, d_ff=7, max_len=5, norm_eps=0.0)


def _words(switches: dict[str, Any]) -> str:
    return " ".join(map(str, switches))


@pytest.mark.parametrize("switches", [
    {"mlp": "gelu"}, {"mlp": "relu", "bias": False}, {"mlp": "swiglu", "rope": True, "qk_norm": True}, {"tied": True},
    {"norm": "rmsnorm", "rope": True, "mlp": "swiglu", "bias": False}, {"norm": "rmsnorm", "tied": True},
    {"tied": True, "rope": True},
], ids=_words)
def test_the_formula_counts_what_the_gauges_have(switches: dict[str, Any]) -> None:
    config = lm.LMConfig(**(SIZES | switches))
    names = "layers d_model heads kv_heads d_head d_ff vocab norm bias rope qk_norm mlp tied".split()
    options = {name: getattr(config, name) for name in names} | {"positions": 0 if config.rope else config.max_len}
    by_formula = go.measure.transformer_redundancy(**options, eps=False)
    params = jax.eval_shape(lambda: lm.params_and_loss(config, jax.random.key(0))[0])
    by_gauges = go.measure.redundancy(lm.whole_gauges(config), params)
    assert type(by_gauges) is int
    assert by_formula.total == by_gauges + by_formula.parts["counted twice"]
    assert by_formula.parameters == sum(x.size for x in jax.tree.leaves(params))


@pytest.mark.parametrize(("vocab", "dead"), [(5, 115), (9, 119), (13, 123), (17, 127)])
def test_a_final_bias_without_a_bias_of_logits_hides_no_means(vocab: int, dead: int) -> None:
    """The null spaces of Jacobians of log-probabilities in float64, with LayerNorm and an untied output layer."""
    options: dict[str, Any] = dict(layers=1, d_model=6, heads=2, d_head=2, d_ff=3, positions=5, vocab=vocab)
    assert go.measure.transformer_redundancy(**options, head_bias=False).total == dead


def test_van_nierops_counts() -> None:
    """Table 1, and why the count of LLaMA differs: rotary embeddings commute with less than GL."""
    xl = go.measure.transformer_redundancy(
        layers=48, d_model=1600, heads=25, d_head=64, d_ff=6400, vocab=50257, positions=1024, head_bias=False,
        tied=True)
    llama = go.measure.transformer_redundancy(
        layers=80, d_model=8192, heads=64, d_head=128, d_ff=22016, vocab=32000, norm="rmsnorm", bias=False, rope=True,
        mlp="swiglu")
    assert (xl.paper, llama.paper) == (11_108_001, 201_314_305)
    assert llama.parts["queries and keys"] == 655_360 and llama.parts["values and outputs"] == 83_886_080
    assert "655,360" in str(llama) and "201,314,305" in str(llama)


TINY: dict[str, Any] = dict(layers=2, d_model=8, heads=4, d_head=4, d_ff=16, vocab=10)
test_no_decoder_is_refused = each_refused([
    (functools.partial(go.measure.transformer_redundancy, **TINY | wrong), said) for wrong, said in (
        ({"norm": "LayerNorm"}, "one of 'layernorm'"), ({"mlp": "silu"}, "bad mlp"), ({"layers": -1}, "pass layers=1"),
        ({"d_ff": 2.5}, "bad d_ff"), ({"kv_heads": 3}, "kv_heads=1"), ({"rope": True, "d_head": 3}, "pass d_head=4"),
        ({"head_bias": 5}, "head_bias=5"), ({"bias": None}, "True or False"), ({"eps": 1e-5}, "pass eps=True"))
])


def test_counts_of_numpys_integers_do_not_overflow() -> None:
    sizes: dict[str, Any] = dict(layers=80, d_model=8192, heads=64, d_head=128, d_ff=22016, vocab=32000)
    small: dict[str, Any] = {name: np.int32(size) for name, size in sizes.items()}
    found = go.measure.transformer_redundancy(**small)
    assert found == go.measure.transformer_redundancy(**sizes) and type(found.parameters) is int


@pytest.mark.slow
@pytest.mark.parametrize("switches", [
    {"mlp": "gelu"}, {"mlp": "swiglu", "rope": True, "norm": "rmsnorm", "bias": False},
    {"mlp": "gelu", "bias": False, "tied": True},
], ids=_words)
def test_a_census_explains_every_dead_direction(switches: dict[str, Any]) -> None:
    row = decoder(switches)
    found = go.measure.census(row.fn, row.params, row.batches, row.gauges, progress=False)
    assert found.unexplained == found.unreached == 0 and found.dead == found.explained == found.parameters - found.rank
    assert found.gap[0] < 1e-12 < 1e-8 < found.gap[1]
    assert max(count.seen for count in found.gauges) < 1e-11
    missing = go.measure.census(row.fn, row.params, row.batches, row.gauges[1:], progress=False)
    assert missing.unexplained == found.gauges[0].alone > 0
    assert sum(missing.by_leaf.values()) == pytest.approx(missing.unexplained)
    assert f"{missing.unexplained} unexplained" in str(missing) and row.gauges[1].name in str(missing)


