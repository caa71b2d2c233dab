"""Parts: what each one promises the slice, what the order of a list means, and three faults of an earlier core."""

import ast
import functools
import inspect
import itertools
import random
import re
from collections.abc import Iterator
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
from tests.cases import FLAT_CASES, GAUGE_CASES, GaugeCase
from tests.quick import jit
from tests.twins import apart, stepper, train

Tree = Any
CASES = {case.name: case for case in (*GAUGE_CASES, *FLAT_CASES)}
PACKAGE = Path(go.__file__).parent


def _normal(seed: int, like: Tree) -> Tree:
    draw = np.random.default_rng(seed).normal
    return jax.tree.map(lambda x: jnp.asarray(draw(size=x.shape), x.dtype), like)


def _relative(a: Tree, b: Tree) -> float:
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return max(float(jnp.linalg.norm((x - y).ravel()) / (1e-30 + jnp.linalg.norm(y.ravel()))) for x, y in pairs)


# One part ----------------------------------------------------------------------------------------------------


def _parts() -> Iterator[tuple[str, Any, Tree]]:
    """Every class of part in the register, with a point that has what `act` asks for."""
    seen: set[type] = set()
    for case in CASES.values():
        params = case.params(jax.random.key(1))
        bound = go.bind(case.gauges(), params)
        for part in (*bound.slice.parts, *bound.slice.free):
            if type(part) not in seen:
                seen.add(type(part))
                yield case.name, part, bound
    assert len(seen) >= 11


def _element(part: Any, bound: Any, params: Tree) -> Any:
    drawn = tuple(g.sample(jax.random.key(3), params) for g in bound.gauges)
    return bound.elements(drawn)[part.label]


def test_steps_and_gradients_follow_from_the_action(x64: None) -> None:
    """`push` is the difference of two points, `pull` the transpose of the derivative, `undo` the inverse."""
    for name, part, bound in _parts():
        params = CASES[name].params(jax.random.key(1))
        x = bound.slice.values(params)
        e = _element(part, bound, params)
        moved = part.act(e, x)
        assert _relative(part.undo(e, moved), x) <= 1e-12, type(part)
        assert _relative(part.act(part.compose(e, part.inverse(e)), x), x) <= 1e-12, type(part)
        if isinstance(part, Stream):  # its own arrows hold where the scales of norms are 1
            x = x | {b.path: b.write(x[b.path], jnp.ones(b.view_shape)) for b in part.passes}
        u, g = (_normal(seed, x) for seed in (1, 2))
        if isinstance(part, Stream):
            u = u | {b.path: b.write(u[b.path], jnp.zeros(b.view_shape)) for b in part.passes}
        after = {path: y + 0.1 * u[path] for path, y in x.items()}
        pushed = part.push(e, {path: 0.1 * y for path, y in u.items()}, x)
        expected = {path: y - part.act(e, x)[path] for path, y in part.act(e, after).items()}
        assert _relative(pushed, expected) <= 1e-12, type(part)
        transposed = Part.pull(part, e, g, x)
        passed = {b.path for b in part.passes} if isinstance(part, Stream) else set()
        pulled = part.pull(e, g, x)
        assert _relative(
            {p: y for p, y in pulled.items() if p not in passed},
            {p: y for p, y in transposed.items() if p not in passed},
        ) <= 1e-12, type(part)


def test_a_norms_own_gradient_beside_a_rotation_of_the_stream(x64: None) -> None:
    """The rule (`completed`) gives what the rotation conjugated by the norm's scale gives by its transpose."""
    case = CASES["product/residual_layernorm"]
    params = case.params(jax.random.key(1))
    s = go.bind(case.gauges(), params).slice
    entered = s.enter(s.read(s.values(params)).elements, s.values(params))
    g = s.vectors(jax.grad(case.loss)(params))  # type: ignore[arg-type]
    fast = s.quiet(entered.point, entered.pull(g))
    slow = g
    for part, e, _, at in entered.parts:
        slow = Part.pull(part, e, slow, at) if isinstance(part, Stream) else part.pull(e, slow, at)
    assert _relative(fast, s.centred(slow)) <= 1e-10
    assert s.completed_sizes


# The interface ------------------------------------------------------------------------------------------------


def _own_members(cls: type) -> list[str]:
    tree = ast.parse(inspect.getsource(cls)).body[0]
    assert isinstance(tree, ast.ClassDef)
    names = [getattr(node, "name", None) or getattr(getattr(node, "target", None), "id", None) for node in tree.body]
    return [name for name in names if name]


def test_the_center_is_small() -> None:
    fields = {"label", "named", "shape", "blocks", "passes", "along", "anchors"}
    assert set(_own_members(Part)) - fields == {
        "identity", "inverse", "compose", "act", "undo", "push", "pull", "quiet", "beside", "beside_frozen",
    }
    inherited = set(_own_members(Part))
    for role in (Constant, Size, Turn):
        assert len(set(_own_members(role)) - inherited - {"last"}) <= 4, role


KIND = re.compile(
    r"isinstance\([^()]*\b(Factor|Stretch|Rotation|Planes|Stream|Mean|Logits|Trade|Absorption|ReadShift|Permutation|OfUser"
    r"|Constant|Size|Turn|Scale|Shift|Linear|Torus)\b|\.(keeps_place|known_by_action|affine|log_step)\b"
    r"|\.of_heads\b|\.turn is (not )?None|name_of\([a-z]+\) (==|in|!=)"
)


def test_nobody_outside_asks_for_a_kind() -> None:
    """What a consumer needs to know of a part is a `singledispatch` rule in the consumer's file."""
    found = [
        f"{path.relative_to(PACKAGE)}:{number}: {line.strip()}"
        for path in sorted(PACKAGE.rglob("*.py"))
        if path.relative_to(PACKAGE).parts[0] not in ("parts", "gauges", "slice.py")
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if KIND.search(line)
    ]
    assert found == []
    assert KIND.search("if isinstance(part, Factor):") and KIND.search("if not i.affine:")


# The order of a list ------------------------------------------------------------------------------------------

QUICK = ("product/semidirect", "product/chain", "product/linear", "norm_read_shift/trained_scale")
LISTS = [
    pytest.param(case, id=name, marks=() if name in QUICK else pytest.mark.slow)
    for name, case in CASES.items()
    if len(case.gauges()) > 1
]


@pytest.mark.parametrize("case", LISTS)
def test_a_shuffled_list_gives_the_same_bits(case: GaugeCase, x64: None) -> None:
    gauges, params = case.gauges(), case.params(jax.random.key(0))
    shuffled = random.Random(1).sample(gauges, len(gauges))
    shuffled = gauges[::-1] if shuffled == gauges else shuffled
    ends, structures = [], []
    for order in (gauges, shuffled):
        tx = go.quotient(optax.adamw(1e-2, weight_decay=0.1), order)
        state = jit(tx.init)(params)
        structures.append(jax.tree.structure(state))
        ends.append(train(lambda p, state=state: state, stepper(tx, case.loss), params, 5)[0])
    assert structures[0] == structures[1]
    for x, y in zip(jax.tree.leaves(ends[0]), jax.tree.leaves(ends[1]), strict=True):
        np.testing.assert_array_equal(x, y)


def test_every_order_of_a_whole_gpt_binds() -> None:
    config = lm.LMConfig(vocab=7, d_model=6, layers=1, heads=2, kv_heads=2, d_head=4, d_ff=5, max_len=4)
    params = jax.eval_shape(lambda: lm.params_and_loss(config, jax.random.key(0))[0])
    gauges = lm.whole_gauges(config, linear=False)
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


@pytest.mark.slow_rows("product/latent_fused-adamw", "product/latent_fused-lion")
@pytest.mark.parametrize("inner", ["adamw", "lion"])
@pytest.mark.parametrize(
    "name", ["product/linear", pytest.param("product/whole_gpt", marks=pytest.mark.slow), "product/latent_fused"]
)
def test_a_norm_may_change_sign_with_its_readers(name: str, inner: str, x64: None) -> None:
    """(γ, W) and (−γ, −W) are one function; they were two runs wherever heads are read from those rows."""
    case = CASES[name]
    gauges, params = case.gauges(), case.params(jax.random.key(0))
    twin = _with_signs(gauges, params, 0)
    assert apart(twin, params) and abs(float(case.loss(twin)) / float(case.loss(params)) - 1.0) < 1e-12  # type: ignore[misc]
    optimizer = optax.adamw(1e-2, weight_decay=0.1) if inner == "adamw" else optax.lion(1e-3)
    bound, tx = go.bind(gauges, params), go.quotient(optimizer, gauges)
    step = stepper(tx, case.loss)
    (end, losses), (other, others) = (train(jit(tx.init), step, p) for p in (params, twin))
    np.testing.assert_allclose(others, losses, rtol=1e-10)
    assert max(apart(bound.slice_point(other), bound.slice_point(end)).values()) <= 1e-10
    assert max(apart(other, end).values()) > 1e-3


def test_a_dead_unit_behind_a_read_shift_has_no_size(x64: None) -> None:
    """The roundoff that a read shift leaves of a dead unit was read as a size of 1e14."""
    config = lm.LMConfig(vocab=7, d_model=6, layers=1, heads=2, kv_heads=2, d_head=4, d_ff=5, max_len=4, mlp="relu2")
    params, _ = lm.params_and_loss(config, jax.random.key(0))
    params = jax.tree.map(lambda x, n: jnp.asarray(x, float) + 0.3 * n, params, _normal(1, params))
    leaves = leaves_by_path(params)
    up = next(path for path in leaves if path.endswith("mlp/up/kernel"))
    for path in (up, up.replace("kernel", "bias")):
        if path in leaves:
            leaves[path] = leaves[path].at[..., 0].set(0.0)
    gauges = lm.whole_gauges(config, linear=False)
    bound = go.bind(gauges, params)
    twin = jit(lambda p: bound.random_twin(jax.random.key(2), p, 0.5))(with_leaves(params, leaves))
    for start in (with_leaves(params, leaves), twin):
        point = jit(bound.slice_point)(start)
        largest = max(float(jnp.max(jnp.abs(x))) for x in jax.tree.leaves(point))
        assert largest < 1e3, largest


def test_a_stream_that_heads_turn_everywhere_is_refused() -> None:
    """It has nothing to be read from. It was accepted, and twins parted by 4e-2."""
    stream = go.residual_rotation({"q": "basis _ _"}, {"k": "basis _ _"})
    heads = go.head_rotation({"q": "_ head basis", "k": "_ head basis"})
    params = {"q": jnp.ones((6, 2, 4)), "k": jnp.ones((6, 2, 4))}
    with pytest.raises(ValueError, match="cyclic gauges"):
        go.bind([stream, heads], params)
    assert go.bind([stream], params).dim == 15


def _step(gauges: Any, params: Tree, updates: Tree) -> Tree:
    tx = go.quotient(optax.adam(1e-2), gauges)
    return tx.update(updates, tx.init(params), params)[0]


def test_a_norm_that_hides_a_channel_beside_a_rotation_of_the_stream_is_refused() -> None:
    """The rotation divides by its scale: the first update was NaN, without a word."""
    norm = go.norm_scale({"norm": "channel"}, {"read": "channel _"})
    params = {"norm": jnp.ones(4), "read": jnp.ones((4, 5)), "embed": jnp.eye(4)}
    stream = go.residual_rotation({"read": "basis _"}, {"embed": "_ basis"}, [norm])
    assert all(bool(jnp.all(jnp.isfinite(x))) for x in jax.tree.leaves(_step([norm, stream], params, params)))
    with pytest.raises(ValueError, match="a norm that hides a channel, 'norm'"):
        _step([norm, stream], params | {"norm": jnp.ones(4).at[1].set(0.0)}, params)


def test_a_state_says_what_sizes_are_read_from() -> None:
    """Two anchors are two slices: a state of one was taken by an optimizer of the other."""
    params = {"w": jnp.ones((3, 4)), "b": jnp.full(4, 2.0), "down": jnp.ones((4, 2))}
    up = {"w": "_ channel", "b": "channel"}
    one, other = (go.rescale(order, {"down": "channel _"}) for order in (up, dict(reversed(up.items()))))
    state = go.quotient(optax.adam(1e-2), one).init(params)
    with pytest.raises(ValueError, match="a state of other gauges"):
        go.quotient(optax.adam(1e-2), other).update(params, state, params)
    tables = {"x": "_ vocab", "y": "vocab"}
    shifts = [go.logit_shift(order) for order in (tables, dict(reversed(tables.items())))]
    leaves = {"x": jnp.ones((2, 3)), "y": jnp.arange(3.0)}
    first, second = (go.quotient(optax.adam(1e-2), shift) for shift in shifts)
    updates = [tx.update(leaves, first.init(leaves), leaves)[0] for tx in (first, second)]
    jax.tree.map(np.testing.assert_array_equal, *updates)


def test_a_number_may_stand_for_a_leaf() -> None:
    """As a preconditioner's scalar; a bound leaf may be a number too."""
    params = {"q": jnp.ones((4, 2, 3)), "k": jnp.ones((4, 2, 3))}
    heads = go.head_rotation({"q": "_ head basis", "k": "_ head basis"})
    assert _step(heads, params, {"q": 0.0, "k": params["k"]})["q"].shape == (4, 2, 3)
    unit = go.rescale({"w": "_"}, {"b": ""})
    assert float(_step(unit, {"w": jnp.ones(3), "b": 0.5}, {"w": jnp.ones(3), "b": 1.0})["b"]) != 0.0


# The bound object ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["product/llama", "product/linear", "rescale/layers", "norm_scale/one_plus"])
def test_a_bound_list_moves_reads_and_describes(name: str, x64: None) -> None:
    case = CASES[name]
    params = case.params(jax.random.key(1))
    bound = go.bind(case.gauges(), jax.eval_shape(lambda: params))
    twin = bound.random_twin(jax.random.key(2), params)
    assert _relative(twin, params) > 1e-2
    assert _relative(bound.slice_point(twin), bound.slice_point(params)) <= 1e-11
    assert _relative(bound.act(bound.read(params), bound.slice_point(params)), params) <= 1e-11
    assert bound.dim == case.dim
    assert all(gauge.name in repr(bound) for gauge in bound.gauges)


@pytest.mark.slow_rows("product/gpt", "product/llama")
@pytest.mark.parametrize("name", ["product/llama", "product/gpt", "rope_linear/half", "user_gauge/translation"])
def test_a_gradient_shows_what_is_no_symmetry(name: str, x64: None) -> None:
    case = CASES[name]
    params = case.params(jax.random.key(1))
    bound = go.bind(case.gauges(), params)

    def largest(loss: Any) -> float:
        found = jit(bound.asymmetry)(params, jax.grad(loss)(params))
        return max(float(x) for gauge in found for x in gauge.values())

    assert largest(case.loss) <= 1e-10
    lengths = functools.partial(sum, start=jnp.zeros(()))
    assert largest(lambda p: lengths(jnp.sum(jnp.abs(x) ** 3) for x in jax.tree.leaves(p))) > 1e-2


def test_a_frozen_leaf_stays_and_twins_stay_twins(x64: None) -> None:
    """Parts that move a frozen leaf are read at `init` and then left alone."""
    from gauge_optax.gauges.bound import bound

    case = CASES["product/llama"]
    gauges, params = case.gauges(), case.params(jax.random.key(1))
    group = go.product(gauges)
    for path in itertools.islice(leaves_by_path(params), 0, None, 3):
        s = bound(group.gauges, params, frozenset({path})).slice
        x = s.values(params)
        frame = s.read(x)
        entered = s.enter(frame.elements, x)
        u = {p: jnp.zeros_like(y) if p == path else 0.01 * y * y for p, y in entered.point.items()}
        _, after = s.fix({p: y + u[p] for p, y in entered.point.items()}, frame.live)
        step = entered.push(s.hold(entered.point, {p: y - entered.point[p] for p, y in after.items()}))
        if path in step:
            assert float(jnp.max(jnp.abs(step[path]))) == 0.0, path
