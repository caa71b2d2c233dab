"""Every gauge of the register obeys the protocol: action, laws, split, coordinates, at degenerate points too."""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

import gauge_optax as go
from gauge_optax.binding import leaves_by_path
from gauge_optax.gauges.gauge import Gauge
from gauge_optax.parts.sizes import Stretch
from tests import oracles
from tests.cases import DISCRETE_CASES, FLAT_CASES, GAUGE_CASES, GaugeCase
from tests.gauges.user_gauges import Translation
from tests.quick import jit
from tests.tolerances import tolerance
from tests.twins import normal_like

pytestmark = pytest.mark.slow_rows("*-float32", "product/latent_fused*")
Tree = Any

# Per constructor the shapes of an element, and of products of them: a tuple with an element per gauge.
ELEMENTS: dict[str, Any] = {
    "user_gauge/translation": {"": (4,)}, "logit_shift/kernel_bias": {"": {"kernel": (6,), "bias": ()}},
    "logit_shift/two_gauges": ({"": {"kernel": (2, 6)}}, {"": {"kernel": (2, 6)}}),
    "rescale/block": {"": ()}, "rescale/layers": {"i=0": (5,), "i=1": (3,)}, "multiplier_balance/mha": {"": (3,)},
    "norm_scale/one_plus": {"": (6,)}, "scale_invariant/kernel_bias": {"": (2,)}, "rope_torus/partial": {"": (2, 2)},
    "head_rotation/gqa": {"": (2, 4, 4)}, "head_rotation/mqa": {"": (4, 4)}, "rope_linear/half": {"": (2, 2, 2)},
    "head_rotation/scanned": {"": (2, 2, 4, 4)}, "head_linear/fused": {"": (2, 4, 4)}, "head_linear/lora": {"": (3, 3)},
    "product/semidirect": ({"": (6,)}, {"": {"kernel": (6,), "bias": ()}}),
    "product/llama": ({"i=0": (6,)}, {"i=0": (6,)}, {"": (6,)}, {"i=0": (2, 2)}, {"i=0": (2, 4, 4)}, {"i=0": (5,)},
                      {"": {"lm_head/kernel": (6,)}}),
}
# A case and a precision: all registers in float64, and the rows beside the dense oracle in float32 too.
PAIRS = [(c, "float64") for c in (*GAUGE_CASES, *FLAT_CASES, *DISCRETE_CASES)] + [(c, "float32") for c in GAUGE_CASES]
COMPACT = ("head_rotation", "rope_torus")
METHODS = ("act", "vertical", "horizontal", "coordinates", "balance", "inverse", "compose")
HOLONOMY = (*COMPACT, "head_linear", "rope_linear")  # no coordinate


def _name(value: Any) -> str:
    return value if isinstance(value, str) else value.name


@dataclasses.dataclass(frozen=True)
class Subject:
    """A case in one precision, with a leaf that no gauge binds; the gauge's methods and the loss are compiled once."""

    case: GaugeCase
    dtype: str

    def __getattr__(self, name: str) -> Any:
        if name not in (*METHODS, "loss"):
            raise AttributeError(name)
        return _compiled(self.case)[name]

    @property
    def gauge(self) -> Any:
        return _gauge(self.case)

    @property
    def params(self) -> Tree:
        return _cast(_params(self.case), self.dtype)

    def element(self, seed: int, scale: float = 1.0) -> Tree:
        """A random element; drawn in float64, so that both precisions see the same one."""
        return _cast(_element(self.case, seed, scale), self.dtype)

    def tangent(self, seed: int) -> Tree:
        """A random direction, of another stream than the parameters."""
        return jax.tree.map(np.asarray, normal_like(seed + 1, self.params))

    def tolerance(self, check: str) -> float:
        return tolerance(check, self.dtype)

    def balanced(self) -> Tree:
        return self.act(self.balance(self.params), self.params)

    def frame(self, params: Tree) -> Tree:
        """The element that takes the balanced representative to `params`."""
        return self.inverse(self.balance(params))

    def parts(self, *elements: Tree) -> Iterator[tuple[Any, ...]]:
        """Every gauge of the product with its part of each element."""
        gauges = getattr(self.gauge, "gauges", None)
        yield from zip(gauges, *elements, strict=True) if gauges else [(self.gauge, *elements)]


def _cast(tree: Tree, dtype: Any) -> Tree:
    """numpy leaves: a jax array made in float64 would keep its precision out of the x64 context. Indices stay."""
    arrays = jax.tree.map(np.asarray, tree)
    return jax.tree.map(lambda x: x if np.issubdtype(x.dtype, np.integer) else x.astype(dtype), arrays)


@functools.cache
def _gauge(case: GaugeCase) -> Gauge:
    gauges = case.gauges()
    return gauges[0] if len(gauges) == 1 else go.product(gauges)


@functools.cache
def _params(case: GaugeCase) -> Tree:
    with jax.enable_x64(True):
        return _cast(case.params(jax.random.key(0)) | {"unbound": jnp.arange(3.0)}, "float64")


@functools.cache
def _element(case: GaugeCase, seed: int, scale: float) -> Tree:
    with jax.enable_x64(True):
        return _cast(_gauge(case).sample(jax.random.key(seed), _params(case), scale), "float64")


@functools.cache
def _compiled(case: GaugeCase) -> dict[str, Callable[..., Any]]:
    loss: Any = case.loss
    methods = {name: jit(getattr(_gauge(case), name)) for name in METHODS}
    return methods | {"loss": jit(lambda p: loss({k: v for k, v in p.items() if k != "unbound"}))}


@functools.cache
def _oracle(case: GaugeCase) -> oracles.Dense:
    return oracles.dense(_gauge(case), _params(case))


@pytest.fixture(params=GAUGE_CASES, ids=lambda case: case.name)
def case(request: pytest.FixtureRequest) -> GaugeCase:
    return request.param


@pytest.fixture
def subject(case: GaugeCase, dtype: str) -> Subject:
    """In both precisions."""
    return Subject(case, dtype)


@pytest.fixture
def exact(case: GaugeCase, x64: None) -> Subject:
    """In float64."""
    return Subject(case, "float64")


def _map(combine: Callable[..., Any], *trees: Tree) -> Tree:
    """An operation of numpy on the leaves of trees."""
    return jax.tree.map(lambda *leaves: combine(*map(np.asarray, leaves)), *trees)


def _error(found: Tree, expected: Tree) -> float:
    """The largest relative difference of a leaf; absolute where the expected leaf is zero, but for rounding."""

    def error(a: Any, b: Any) -> float:
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        assert a.shape == b.shape
        size = np.linalg.norm(b)
        return float(np.linalg.norm(a - b) / (size if size > 1e-12 else 1.0))

    return max(jax.tree.leaves(jax.tree.map(error, found, expected)), default=0.0)


def _distance(found: Tree, expected: Tree) -> float:
    """The largest absolute difference of an entry."""
    differences = _map(lambda a, b: float(np.max(np.abs(a - b))), found, expected)
    return max(jax.tree.leaves(differences), default=0.0)


def _flat(tree: Tree) -> np.ndarray:
    """In the order of `ravel_pytree`."""
    return np.concatenate([np.ravel(x) for x in jax.tree.leaves(tree)])


def _shapes(tree: Tree) -> Tree:
    return jax.tree.map(lambda x: tuple(x.shape), tree)


# The action ---------------------------------------------------------------------------------------


@pytest.mark.slow_rows("product/whole_*", "permutation/whole_*")
@pytest.mark.parametrize(("case", "dtype"), PAIRS, indirect=["dtype"], ids=_name)
def test_act_moves_what_is_bound_and_keeps_the_loss(subject: Subject, case: GaugeCase, dtype: str) -> None:
    """A loss that can tell: moving every leaf at random by as little as 1e-3 is seen."""
    params, before = subject.params, float(subject.loss(subject.params))
    for seed in range(2):
        moved = subject.act(subject.element(seed), params)
        assert abs(float(subject.loss(moved)) - before) <= subject.tolerance("invariant") * abs(before)
    leaves, bound = leaves_by_path(moved), set(subject.gauge._bound(params).slice.added)
    changes = {path: _error(leaves[path], leaf) for path, leaf in leaves_by_path(params).items()}
    seen = {path for path, change in changes.items() if change > 1e-2}
    assert bound == seen if case in GAUGE_CASES else seen  # the rest only read some of what they bind
    assert {path for path, change in changes.items() if change > 0} <= bound and "unbound" not in bound
    if dtype == "float64":
        noise = _map(lambda x, y: x + 1e-3 * y, params, subject.tangent(0))
        assert abs(float(subject.loss(noise)) - before) > 1e-6 * abs(before)
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
        assert subject.gauge.dim(params) == subject.gauge.dim(shapes) == case.dim
    if case in FLAT_CASES and len(case.gauges()) == 1:
        assert 0 < _distance(subject.act(subject.element(5, 1e-3), params), params) < 2e-2


@pytest.mark.slow_rows("bias_absorption/[!n]*", "key_bias/fused*", "permutation/stacked*")
@pytest.mark.parametrize(("case", "dtype"), [
    pair for pair in PAIRS if pair[0] in GAUGE_CASES or len(pair[0].gauges()) == 1], indirect=["dtype"], ids=_name)
def test_elements_form_a_group(subject: Subject, case: GaugeCase) -> None:
    """Neither the identity nor an inverse leaves anything, and `compose` is one act after another."""
    compose, params = subject.compose, subject.params
    limit = 0.0 if case in DISCRETE_CASES else subject.tolerance("group")
    identity, (a, b, c) = subject.gauge.identity(params), (subject.element(seed) for seed in range(3))
    assert _shapes(identity) == _shapes(a) == _shapes(subject.gauge.read(params))
    assert _error(subject.act(identity, params), params) <= limit
    moved, undo = subject.act(a, params), subject.inverse(a)
    assert _error(moved, params) > 1e-2
    assert _error(subject.act(undo, moved), params) <= limit
    for nothing in (compose(a, undo), compose(undo, a)):
        assert _distance(nothing, identity) <= limit
    one_by_one = subject.act(a, subject.act(b, params))
    assert _error(one_by_one, moved) > 1e-2
    assert _error(subject.act(compose(a, b), params), one_by_one) <= limit
    assert _error(compose(compose(a, b), c), compose(a, compose(b, c))) <= limit


# Elements and dtypes ------------------------------------------------------------------------------


def test_every_constructor_states_its_elements() -> None:
    names = {case.name for case in GAUGE_CASES}
    assert set(ELEMENTS) <= names and {name.split("/")[0] for name in ELEMENTS} == {x.split("/")[0] for x in names}


@pytest.mark.parametrize("stored", ["bfloat16", "float32"])
def test_elements_have_the_structure_of_the_design(subject: Subject, stored: str) -> None:
    """Keys, shapes, and the computing dtype whatever the parameters are stored in."""
    params = _cast(subject.params, jnp.dtype(stored))
    gauge, a = subject.gauge, jax.eval_shape(subject.gauge.sample, jax.random.key(0), params)
    made = [a, gauge.identity(params), gauge.inverse(subject.element(0)), jax.eval_shape(gauge.balance, params)]
    for element in made:
        assert _shapes(element) == ELEMENTS.get(subject.case.name, _shapes(a))
        assert {str(x.dtype) for x in jax.tree.leaves(element)} == {subject.dtype}


@pytest.mark.slow_rows("product/whole_*")
@pytest.mark.parametrize("case", (*GAUGE_CASES, *FLAT_CASES), ids=_name)
def test_act_and_split_keep_every_leafs_dtype(exact: Subject) -> None:
    """And broadcast nothing of lower rank by accident."""
    names = ("bfloat16", "float32", "float64")
    leaves, treedef = jax.tree.flatten(exact.params)
    params = jax.tree.unflatten(treedef, [jax.ShapeDtypeStruct(x.shape, names[k % 3]) for k, x in enumerate(leaves)])
    methods = [exact.gauge.vertical, exact.gauge.horizontal]
    with jax.numpy_rank_promotion("raise" if exact.case in GAUGE_CASES else "allow"):
        moved = jax.eval_shape(exact.gauge.act, exact.element(0), params)
        for made in (moved, *(jax.eval_shape(part, params, params) for part in methods)):
            assert jax.tree.map(lambda x: x.dtype, made) == jax.tree.map(lambda x: x.dtype, params)
        if exact.case in GAUGE_CASES:
            jax.eval_shape(exact.gauge.balance, params)


def test_act_in_bfloat16_is_the_same_move(case: GaugeCase) -> None:
    """Computed in float32, rounded once."""
    with jax.enable_x64(False):
        subject = Subject(case, "float32")
        stored = _cast(subject.params, jnp.bfloat16)
        moved = subject.act(subject.element(0), stored)
        expected = subject.act(subject.element(0), _cast(stored, "float32"))
        assert _error(moved, expected) <= tolerance("group", jnp.bfloat16)


def test_samples_have_the_size_they_are_asked_for(exact: Subject) -> None:
    """In coordinates: angles reach π times the scale, and shifts are relative to the leaf that they move."""
    scale, params = 0.3, exact.params
    drawn = exact.element(0, scale)
    again = _cast(_element.__wrapped__(exact.case, 0, scale), exact.dtype)  # the function is cached
    assert _error(drawn, again) == 0.0 and _distance(drawn, exact.element(1, scale)) > 1e-2
    largest = max(float(np.std(x)) for x in jax.tree.leaves(params))
    limits = {
        "rope_torus": np.pi, "rope_linear": np.pi, "head_rotation": 2.0, "head_linear": 3.0,
        "logit_shift": 4.0 * largest,
    }
    for gauge, own, still in exact.parts(drawn, exact.gauge.identity(params)):
        if gauge.name == "head_rotation":
            assert _distance(_map(lambda x: x @ np.swapaxes(x, -1, -2), own), still) <= tolerance("group")
            assert all((np.linalg.det(x) > 0).all() for x in own.values())
        assert 0 < _distance(own, still) <= limits.get(gauge.name, 1.0) * scale


# The split ----------------------------------------------------------------------------------------


@pytest.mark.slow_rows("*/l[ao]*", "product/llama")
def test_vertical_is_along_the_orbit_and_horizontal_is_not_read(exact: Subject) -> None:
    """The span is that of the action's derivative, written out; along rotations and shifts the projector is too.

    But for rotations that share a kernel: they are read one after the other, each from blocks of its own.
    The two sum to the tangent and do not overlap. Leaves that no gauge binds are horizontal.
    """
    oracle, x, limit = _oracle(exact.case), exact.tangent(0), exact.tolerance("oracle")
    up, flat = exact.vertical(exact.params, x), exact.horizontal(exact.params, x)
    along, tangents = _flat(up), oracle.tangents
    left = along - tangents @ np.linalg.lstsq(tangents, along, rcond=None)[0]
    assert np.linalg.norm(left) <= limit * np.linalg.norm(along)
    # And the whole span is vertical.
    orbit = tangents @ np.random.default_rng(5).normal(size=tangents.shape[1])
    inside = _flat(exact.vertical(exact.params, ravel_pytree(x)[1](jnp.asarray(orbit))))
    assert np.linalg.norm(inside - orbit) <= limit * np.linalg.norm(orbit)
    _, read = jax.jvp(exact.gauge.coordinates, (exact.params,), (flat,))
    assert all(np.max(np.abs(r)) <= limit * np.linalg.norm(_flat(x)) for r in jax.tree.leaves(read))
    one_by_one = exact.case.name == "product/kernel_rotations"
    if not one_by_one and all(part.name in ("logit_shift", *COMPACT) for part, _ in exact.parts(exact.element(0))):
        expected = oracle.vertical(_flat(x).astype(np.float64))
        assert np.linalg.norm(along - expected) <= limit * np.linalg.norm(expected)
    assert _error(_map(np.add, up, flat), x) <= exact.tolerance("split")
    assert _error(exact.vertical(exact.params, up), up) <= exact.tolerance("split")
    assert _error(exact.horizontal(exact.params, flat), flat) <= exact.tolerance("split")
    assert not np.any(up["unbound"]) and np.array_equal(flat["unbound"], x["unbound"])


def test_frame_and_dim_are_those_of_the_dense_oracle(exact: Subject) -> None:
    """Log-scales, in element order; of a scale without a partner, where the root mean square is one."""
    found, oracle = [np.zeros(0)], _oracle(exact.case)
    for gauge, own in exact.parts(exact.frame(exact.params)):
        if gauge.name not in ("logit_shift", "translation", "head_linear", *COMPACT):
            found += [np.ravel(x[..., 0] if gauge.name == "rope_linear" else x) for x in own.values()]
    np.testing.assert_allclose(np.concatenate(found), oracle.frame, atol=exact.tolerance("oracle"))
    assert exact.case.dim == oracle.rank


def _pushed(subject: Subject, g: Tree, params: Tree, tangent: Tree) -> Tree:
    """g∗X = g·(θ + X) − g·θ, since `act` is affine."""
    return _map(np.subtract, subject.act(g, _map(np.add, params, tangent)), subject.act(g, params))


def _slack(subject: Subject) -> float:
    """A linear gauge's Gram matrix has the square of its factor's condition."""
    return 10.0 if "head_linear" in [gauge.name for gauge in go.product(subject.gauge).gauges] else 1.0


def test_vertical_is_equivariant(subject: Subject) -> None:
    """vertical(g·θ, g∗X) = g∗vertical(θ, X)."""
    g, x, params = subject.element(0), subject.tangent(0), subject.params
    here = _pushed(subject, g, params, subject.vertical(params, x))
    there = subject.vertical(subject.act(g, params), _pushed(subject, g, params, x))
    assert _error(there, here) <= _slack(subject) * subject.tolerance("split")


# Coordinates, balance, dimension ------------------------------------------------------------------


def test_frame_moves_with_the_group(subject: Subject) -> None:
    """F(g·θ) = g·F(θ), up to compact parts: F is the identity on rotations and has no angle.

    The balanced point, where F is the identity, is therefore the same for every twin, but for rotations.
    """
    g, limit = subject.element(0), subject.tolerance("coordinates")
    assert _distance(subject.gauge.balance(subject.balanced()), subject.gauge.identity(subject.params)) <= limit
    here, there = subject.frame(subject.params), subject.frame(subject.act(g, subject.params))
    for gauge, moved, expected in subject.parts(there, subject.compose(g, here)):
        if gauge.name in COMPACT:
            expected = gauge.identity(subject.params)
        elif gauge.name == "rope_linear":
            expected = _map(lambda x: x * [1.0, 0.0], expected)
        elif gauge.name == "head_linear":  # the two differ by a rotation
            turn = _map(lambda x, y: x @ np.linalg.inv(y), moved, expected)
            moved = _map(lambda x: x @ np.swapaxes(x, -1, -2), turn)
            expected = gauge.identity(subject.params)
        assert _distance(moved, expected) <= limit


def test_coordinates_move_with_the_group(exact: Subject) -> None:
    """Of scales by log α; of shifts to the mean of the moved leaf. Rotations have none."""
    g, limit = exact.element(0), exact.tolerance("coordinates")
    moved = exact.act(g, exact.params)
    for gauge, own, here, there in exact.parts(g, exact.coordinates(exact.params), exact.coordinates(moved)):
        if gauge.name in HOLONOMY:
            assert here == there == {}
            continue
        expected = _map(np.add, here, own) if gauge.name != "logit_shift" else {}
        if gauge.name == "logit_shift":
            leaves = leaves_by_path(moved)
            if exact.case.name == "logit_shift/grouped":
                leaves = {"kernel": leaves["kernel"].reshape(6, 2, 7)}
            # Of a leaf that two gauges share, each has its own entries.
            expected = {"": {path: leaves[path][..., :7].mean(-1) * (shift != 0) for path, shift in own[""].items()}}
        assert _distance(there, expected) <= limit < _distance(there, here)


@pytest.mark.slow_rows("product/llama")
@pytest.mark.parametrize("case", [c for c in GAUGE_CASES if not c.name.startswith("scale_invariant")], ids=_name)
def test_balance_has_the_least_norm(exact: Subject) -> None:
    def norm(params: Tree) -> float:
        return float(np.linalg.norm(_flat(params) + _oracle(exact.case).offset))

    balanced, rounding = exact.balanced(), 1.0 + exact.tolerance("group")
    for seed in range(20):
        element = exact.element(seed, (0.1, 1.0)[seed % 2])
        for other in (exact.params, exact.act(element, exact.params), exact.act(element, balanced)):
            assert norm(balanced) <= rounding * norm(other)


# Degenerate points --------------------------------------------------------------------------------


def _degenerate(params: Tree) -> Iterator[tuple[str, Tree]]:
    """Every leaf zero, each leaf zero, and each leaf zero in its first slice along each axis."""
    yield "all", jax.tree.map(np.zeros_like, params)
    leaves, treedef = jax.tree.flatten(params)
    for k, leaf in enumerate(leaves):
        for axis in range(-1, leaf.ndim):
            dead = leaf.copy()
            dead[(slice(None),) * axis + (0,) if axis >= 0 else ...] = 0.0
            yield f"leaf {k} axis {axis}", jax.tree.unflatten(treedef, [*leaves[:k], dead, *leaves[k + 1 :]])


def _has_a_frame(gauge: Gauge, params: Tree) -> bool:
    """Whether one side of every linear head has full rank: else a noncompact group keeps the point, and no split."""
    values = {path: jnp.asarray(x) for path, x in leaves_by_path(params).items()}
    heads = [part for part in gauge._bound(params).slice.parts if isinstance(part, Stretch)]
    ranks = [[np.linalg.matrix_rank(side.stacked(values)) for side in (head.left, head.right)] for head in heads]
    return all((np.maximum(*own) == head.size).all() for own, head in zip(ranks, heads, strict=True))


@pytest.mark.slow_rows("product/llama")
def test_degenerate_points_stay_finite_and_equivariant(exact: Subject) -> None:
    g, x, limit = exact.element(0), exact.tangent(0), _slack(exact) * exact.tolerance("oracle")
    for name, params in _degenerate(exact.params):
        up, balanced = exact.vertical(params, x), exact.act(exact.balance(params), params)
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves((up, balanced))), name
        assert _distance(exact.vertical(params, up), up) <= limit, name
        if _has_a_frame(exact.gauge, params):
            there = exact.vertical(exact.act(g, params), _pushed(exact, g, params, x))
            assert _distance(there, _pushed(exact, g, params, up)) <= limit, name


# A gauge is a value -------------------------------------------------------------------------------


@pytest.mark.parametrize("case", (*GAUGE_CASES, *FLAT_CASES, *DISCRETE_CASES), ids=_name)
def test_a_gauge_is_a_hashable_value(case: GaugeCase) -> None:
    """Also by its `repr`, which is the source that makes it, and by JSON."""
    (gauge, *_), whole = list[Any](case.gauges()), go.product(case.gauges())
    for value, again in ((gauge, case.gauges()[0]), (whole, go.product(case.gauges()))):
        text = repr(value)
        assert value == again and value is not again and hash(value) == hash(again)
        assert eval(text, {"go": go, "Translation": Translation}) == value and str(value) == text
        assert "Block" not in text and max(map(len, text.splitlines())) <= 120
    assert go.tools.from_json(go.tools.to_json(case.gauges()), classes=[Translation]) == list(whole.gauges)
    assert not any(isinstance(x, jax.Array | np.ndarray) for x in jax.tree.leaves(dataclasses.astuple(gauge)))


def test_products_are_flat_and_act_left_to_right(x64: None) -> None:
    (case,) = (c for c in GAUGE_CASES if c.name == "product/semidirect")
    subject, (norm, shift) = Subject(case, "float64"), case.gauges()
    nested = go.product([go.product([norm]), go.product(shift)])
    assert nested == subject.gauge and go.product(nested) == nested
    a = subject.element(0)
    one_by_one = shift.act(a[1], norm.act(a[0], subject.params))
    other_way = norm.act(a[0], shift.act(a[1], subject.params))
    assert _error(one_by_one, other_way) > 1e-2
    assert _error(nested.act(a, subject.params), one_by_one) <= subject.tolerance("group")
