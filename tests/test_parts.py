"""Parts: what each one promises the slice, what the order of a list means, and three faults of an earlier core."""

import math
import random
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gauge_optax as go
from gauge_optax.binding import leaves_by_path, with_leaves
from gauge_optax.parts.part import Constant, Part, Size, Turn
from gauge_optax.parts.stream import Stream
from models import lm
from tests.cases import FLAT_CASES, GAUGE_CASES, GaugeCase, _lm_params
from tests.quick import jit
from tests.refusals import refused
from tests.twins import CONFIGS, SIZES, furthest, normal_like, stepper, structure, train, trained

Tree = Any
CASES = {case.name: case for case in (*GAUGE_CASES, *FLAT_CASES)}
PACKAGE = Path(go.__file__).parent


# One part ----------------------------------------------------------------------------------------------------


def _parts() -> list[tuple[Any, Any, Tree]]:
    """Every class of part in the register, with its list bound, and the weights."""
    found: dict[type, tuple[Any, Any, Tree]] = {}
    for case in CASES.values():
        params = case.params(jax.random.key(1))
        bound = go.bind(case.gauges(), params)
        for part in (*bound.slice.parts, *bound.slice.free):
            found.setdefault(type(part), (part, bound, params))
    assert len(found) >= 11
    return list(found.values())


# The axes of a kernel, its shape, and which of its axes are inputs.
KERNELS: list[tuple[Any, str, tuple[int, ...], tuple[int, ...]]] = [
    (go.rescale, "_ channel", (5, 6), (0,)), (go.rescale, "channel _", (6, 5), (1,)),
    (go.rescale, "_ _ _ channel", (3, 3, 4, 6), (0, 1, 2)), (go.rescale, "channel _ _ _", (6, 4, 3, 3), (1, 2, 3)),
    (go.rescale, "expert _ channel", (2, 5, 6), (1,)), (go.rescale, "head _ _", (2, 5, 3), (1,)),
    (go.rescale, "_ head _", (5, 2, 3), (0,)), (go.rescale, "(head _) _", (6, 5), (1,)),
    (go.rescale, "_ (head _) _", (5, 4, 3), (0,)), (go.rescale, "layer _ _", (2, 5, 3), (1,)),
    (go.rescale, "_ head _ _", (5, 2, 3, 4), (0,)),
    (go.rope_linear, "_ head basis", (5, 2, 8), (0,)), (go.rope_linear, "_ (head _) basis", (5, 6, 4), (0,)),
]


@pytest.mark.slow_rows("*[014569]-inputs*", "*11-inputs*")
@pytest.mark.parametrize(("make", "axes", "shape", "inputs"), KERNELS)
def test_columns_of_norm_one_stay_on_the_slice(make: Any, axes: str, shape: Any, inputs: Any, x64: None) -> None:
    """At the usual start the optimizer inside starts as itself, in any layout, and beside a bias, which is zero."""
    kernel = jax.random.normal(jax.random.key(0), shape, float)
    outputs = [k for k in range(len(shape)) if k not in inputs]
    bias_axes = " ".join(re.findall(r"\(.*?\)|\S+", axes)[k] for k in outputs)
    params = {
        "up": kernel / jnp.sqrt(jnp.sum(kernel**2, inputs, keepdims=True)),
        "bias": jnp.zeros([shape[k] for k in outputs]), "down": jnp.ones([*(shape[k] for k in outputs), 7]),
    }
    sizes = {"sizes": {"head": 2}} if "(" in axes else {}
    gauge = make({"up": axes, "bias": bias_axes}, {"down": f"{bias_axes} _"}, **sizes)
    bound = go.bind(gauge, params)
    (size,) = (place.part for place in bound.slice.sizes)
    of_input = math.prod(shape[k] for k in inputs)  # steps of DDC's lengths count entries
    assert size.up[0].entries(size.named) == of_input * size.natural[size.anchors[0]]
    norms = [jax.tree.map(jnp.linalg.norm, tree) for tree in (bound.slice_point(params), params)]
    assert furthest(*norms) <= 1e-12  # of leaves, because planes are turned too


@pytest.mark.slow
def test_steps_and_gradients_follow_from_the_action(x64: None) -> None:
    """`push` is the difference of two points, `pull` the transpose of the derivative, `undo` the inverse."""
    for part, bound, params in _parts():
        x = bound.slice.values(params)
        e = bound.elements(tuple(g.sample(jax.random.key(3), params) for g in bound.gauges))[part.label]
        moved = part.act(e, x)
        assert furthest(part.undo(e, moved), x) <= 1e-12, type(part)
        assert furthest(part.act(part.compose(e, part.inverse(e)), x), x) <= 1e-12, type(part)
        u, g = (jax.tree.map(lambda y: 0.1 * y, normal_like(seed, x)) for seed in (1, 2))
        passed = part.passes if isinstance(part, Stream) else ()  # its own arrows hold where norms have scales of 1
        x = x | {b.path: b.write(x[b.path], jnp.ones(b.view_shape)) for b in passed}
        u = u | {b.path: b.write(u[b.path], jnp.zeros(b.view_shape)) for b in passed}
        expected = jax.tree.map(jnp.subtract, part.act(e, jax.tree.map(jnp.add, x, u)), part.act(e, x))
        assert furthest(part.push(e, u, x), expected) <= 1e-12, type(part)
        pulled, transposed = part.pull(e, g, x), Part.pull(part, e, g, x)
        hidden = {b.path: jnp.zeros_like(x[b.path]) for b in passed}
        assert furthest(pulled | hidden, transposed | hidden) <= 1e-12, type(part)


@pytest.mark.slow
def test_a_norms_own_gradient_beside_a_rotation_of_the_stream(x64: None) -> None:
    """The rule (`completed`) gives what the rotation conjugated by the norm's scale gives by its transpose."""
    case: Any = CASES["product/residual_layernorm"]
    params = case.params(jax.random.key(1))
    s = go.bind(case.gauges(), params).slice
    entered = s.enter(s.read(s.values(params)).elements, s.values(params))
    slow = g = s.vectors(jax.grad(case.loss)(params))
    for part, e, _, at in entered.parts:
        slow = Part.pull(part, e, slow, at) if isinstance(part, Stream) else part.pull(e, slow, at)
    assert furthest(s.quiet(entered.point, entered.pull(g)), s.centred(slow)) <= 1e-10
    assert s.completed_sizes


# The interface ------------------------------------------------------------------------------------------------


def _own_members(cls: type) -> set[str]:
    return {name for name in (*vars(cls), *vars(cls).get("__annotations__", ())) if not name.startswith("_")}


def test_the_center_is_small() -> None:
    """A feature registers its rule in its own file, and adds no member here: there were 77 once."""
    members = _own_members(Part)
    assert len(members) <= 17
    assert all(len(_own_members(role) - members - {"last"}) <= 4 for role in (Constant, Size, Turn))


KIND = re.compile(
    r"isinstance\([^()]*\b(Factor|Stretch|Rotation|Planes|Stream|Mean|Logits|Trade|Absorption|ReadShift|Permutation|OfUser"
    r"|Constant|Size|Turn|Scale|Shift|Linear|Torus)\b|\.(keeps_place|known_by_action|affine|log_step)\b"
    r"|\.of_heads\b|\.turn is (not )?None|name_of\([a-z]+\) (==|in|!=)"
)


def test_nobody_outside_asks_for_a_kind() -> None:
    """What a consumer needs to know of a part is a `singledispatch` rule in the consumer's file."""
    owners = [PACKAGE / name for name in ("parts", "gauges", "slice.py")]
    consumers = [path for path in sorted(PACKAGE.rglob("*.py")) if not any(map(path.is_relative_to, owners))]
    assert [(path, line) for path in consumers for line in path.read_text().splitlines() if KIND.search(line)] == []
    assert KIND.search("if isinstance(part, Factor):") and KIND.search("if not i.affine:")


# The order of a list ------------------------------------------------------------------------------------------

QUICK = ("product/semidirect", "product/chain", "product/linear", "norm_read_shift/trained_scale")
LISTS = [
    pytest.param(case, id=name, marks=() if name in QUICK else pytest.mark.slow)
    for name, case in CASES.items() if len(case.gauges()) > 1
]


@pytest.mark.parametrize("case", LISTS)
def test_a_shuffled_list_gives_the_same_bits(case: GaugeCase, x64: None) -> None:
    gauges, params = case.gauges(), case.params(jax.random.key(0))
    shuffled, ends = random.Random(1).sample(gauges, len(gauges)), []
    for order in (gauges, gauges[::-1] if shuffled == gauges else shuffled):
        tx = go.quotient(optax.adamw(1e-2, weight_decay=0.1), order)
        ends.append(trained(tx, case.loss, params, 5))
    assert structure(ends[0]) == structure(ends[1])
    jax.tree.map(np.testing.assert_array_equal, *ends)


def test_every_order_of_a_whole_gpt_binds() -> None:
    params = jax.eval_shape(lambda: lm.params_and_loss(CONFIGS["gpt"], jax.random.key(0))[0])
    gauges = lm.whole_gauges(CONFIGS["gpt"], linear=False)
    slices = [go.bind(random.Random(seed).sample(gauges, len(gauges)), params).slice for seed in range(8)]
    assert len(set(slices)) == 1


# Faults of an earlier core -------------------------------------------------------------------------------------


def _with_signs(gauges: list[Any], params: Tree, seed: int) -> Tree:
    """A twin whose norms' scales and readers have other signs."""
    s, draw = go.bind(gauges, params).slice, np.random.default_rng(seed)
    x = s.values(params)
    for part, _, _ in s.sizes:
        if getattr(part, "signed", False):
            x = part.act(jnp.asarray(draw.choice([-1.0, 1.0], part.shape)), x)
    return with_leaves(params, leaves_by_path(params) | {p: y - s.added[p] for p, y in x.items()})


@pytest.mark.slow_rows("product/latent_fused-*", "product/whole_gpt-*", "product/linear-*")
@pytest.mark.parametrize("inner", [optax.adamw(1e-2, weight_decay=0.1), optax.lion(1e-3)], ids=["adamw", "lion"])
@pytest.mark.parametrize("name", ["product/linear", "product/whole_gpt", "product/latent_fused"])
def test_a_norm_may_change_sign_with_its_readers(name: str, inner: Any, x64: None) -> None:
    """(γ, W) and (−γ, −W) are one function; they were two runs wherever heads are read from those rows."""
    case: Any = CASES[name]
    gauges, params = case.gauges(), case.params(jax.random.key(0))
    twin = _with_signs(gauges, params, 0)
    assert furthest(twin, params) > 0.1 and abs(float(case.loss(twin)) / float(case.loss(params)) - 1.0) < 1e-12
    bound, tx = go.bind(gauges, params), go.quotient(inner, gauges)
    (end, losses), (other, others) = (train(jit(tx.init), stepper(tx, case.loss), p) for p in (params, twin))
    np.testing.assert_allclose(others, losses, rtol=1e-10)
    assert furthest(bound.slice_point(other), bound.slice_point(end)) <= 1e-10
    assert furthest(other, end) > 1e-3


@pytest.mark.slow
def test_a_dead_unit_behind_a_read_shift_has_no_size(x64: None) -> None:
    """The roundoff that a read shift leaves of a dead unit was read as a size of 1e14."""
    config = lm.LMConfig(**SIZES, mlp="relu2")
    params = _lm_params(config, jax.random.key(1))
    units = {p: x.at[..., 0].set(0.0) for p, x in leaves_by_path(params).items() if "mlp/up/" in p}
    params = with_leaves(params, leaves_by_path(params) | units)
    bound = go.bind(lm.whole_gauges(config, linear=False), params)
    slice_point, twin = jit(bound.slice_point), jit(lambda p: bound.random_twin(jax.random.key(2), p, 0.5))(params)
    for point in (slice_point(params), slice_point(twin)):
        assert units and max(float(jnp.max(jnp.abs(x))) for x in jax.tree.leaves(point)) < 1e3


HEADS = {"q": "_ head basis", "k": "_ head basis"}


def test_a_stream_that_heads_turn_everywhere_is_refused() -> None:
    """It has nothing to be read from. It was accepted, and twins parted by 4e-2."""
    stream = go.residual_rotation({"q": "basis _ _"}, {"k": "basis _ _"})
    params = {"q": jnp.ones((6, 2, 4)), "k": jnp.ones((6, 2, 4))}
    with refused("cyclic gauges"):
        go.bind([stream, go.head_rotation(HEADS)], params)
    assert go.bind([stream], params).dim == 15


def test_a_state_says_what_sizes_are_read_from() -> None:
    """Two anchors are two slices: a state of one was taken by an optimizer of the other."""
    params = {"w": jnp.ones((3, 4)), "b": jnp.full(4, 2.0), "down": jnp.ones((4, 2))}
    orders = {"w": "_ channel", "b": "channel"}, {"b": "channel", "w": "_ channel"}
    one, other = (go.quotient(optax.adam(1e-2), go.rescale(order, {"down": "channel _"})) for order in orders)
    with refused("a state of other gauges"):
        other.update(params, one.init(params), params)
    leaves, shifts = {"x": jnp.ones((2, 3)), "y": jnp.arange(3.0)}, {"x": "_ vocab", "y": "vocab"}
    orders = shifts, dict(reversed(shifts.items()))
    first, second = (go.quotient(optax.adam(1e-2), go.logit_shift(order)) for order in orders)
    updates = [tx.update(leaves, first.init(leaves), leaves)[0] for tx in (first, second)]
    jax.tree.map(np.testing.assert_array_equal, *updates)


def _step(gauge: go.Gauge, params: Tree, updates: Tree) -> Tree:
    tx = go.quotient(optax.adam(1e-2), gauge)
    return tx.update(updates, tx.init(params), params)[0]


def test_a_number_may_stand_for_a_leaf() -> None:
    """As a preconditioner's scalar; a bound leaf may be a number too."""
    params = {"q": jnp.ones((4, 2, 3)), "k": jnp.ones((4, 2, 3))}
    assert _step(go.head_rotation(HEADS), params, {"q": 0.0, "k": params["k"]})["q"].shape == (4, 2, 3)
    unit = go.rescale({"w": "_"}, {"b": ""})
    assert float(_step(unit, {"w": jnp.ones(3), "b": 0.5}, {"w": jnp.ones(3), "b": 1.0})["b"]) != 0.0
