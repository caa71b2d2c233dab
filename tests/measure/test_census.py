"""A census by blocks of entries, beside the dense one of the same model: what it counts, finds, and cannot find."""

import functools
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import scipy.linalg

import gauge_optax as go
from benchmarks.certificates import LLAMA, Row, decoder, design_block
from gauge_optax.binding import leaves_by_path, with_leaves
from gauge_optax.discovery.blocks import EntrySet, _weight_of_zero, blocks_of, rank_of, rows_of, upper_bound
from gauge_optax.discovery.trace import walk
from tests.refusals import refused

NAMES = ["residual_rotation", "norm1", "norm2", "final_norm", "query", "value", "rescale", "logits", "residual_scale"]


@functools.cache
def _llama() -> Row:
    return decoder(LLAMA | dict(kv_heads=1))


def _counted(row: Row, gauges: Any, **options: Any) -> Any:
    """In blocks, although the model is small."""
    return go.measure.census(row.fn, row.params, row.batches, gauges, whole=10, block=250, progress=False, **options)


@pytest.mark.slow
def test_a_block_has_the_dead_directions_that_the_whole_jacobian_has_in_it(x64: None) -> None:
    row, leaves = _llama(), jax.tree.map(np.asarray, leaves_by_path(_llama().params))
    found = _counted(row, row.gauges)

    def flat(leaves: Any) -> jax.Array:
        return jax.nn.log_softmax(row.fn(with_leaves(row.params, leaves), row.batches[0])).ravel()

    columns = {path: np.asarray(x).reshape(-1, leaves[path].size) for path, x in jax.jacobian(flat)(leaves).items()}
    closed = jax.make_jaxpr(lambda *x: [flat(dict(zip(leaves, x, strict=True)))])(*leaves.values())
    blocks, _ = blocks_of(walk(closed, list(leaves)), leaves, 250, np.random.default_rng(0))
    assert [block.name for block in blocks] == [count.name for count in found.blocks] and len(blocks) > 5
    for block, count in zip(blocks, found.blocks, strict=True):
        inside = np.concatenate([columns[path][:, at] for path, at in block.entries.items()], 1)
        rank = np.linalg.matrix_rank(inside / np.maximum(np.linalg.norm(inside, axis=0), 1e-300), 1e-10)
        assert (count.size, count.dead) == (block.size, block.size - rank) and count.size <= 250
    assert found.blocks[0].dead == 3 * 3 + 3 + 3  # three channels: three norms, rotations, the shift of their logits
    assert found.unexplained == 0 and found.dead == found.explained == go.measure.redundancy(row.gauges, row.params)
    assert max(gauge.seen for gauge in found.gauges) < 1e-12 and found.gap[0] < 1e-12 < 1e-6 < found.gap[1]
    assert "at least 67 dead directions" in str(found)


@pytest.mark.slow
@pytest.mark.parametrize(("omitted", "expected"), [
    ("residual_rotation", 3), ("rescale", 3), ("norm2", 3), ("query", 4), ("value", 8), ("logits", 3),
    ("residual_scale", 0),  # it moves all entries of the stream's writers: no block has them
])
def test_blocks_find_a_gauge_that_is_left_out(omitted: str, expected: int) -> None:
    named = dict(zip(NAMES, _llama().gauges, strict=True))
    found = _counted(_llama(), [gauge for name, gauge in named.items() if name != omitted])
    assert max(count.unexplained for count in found.blocks) == expected
    assert found.unexplained >= expected and sum(found.by_leaf.values()) == pytest.approx(found.unexplained)
    if omitted == "rescale":
        moved = {path for path, x in found.by_leaf.items() if x > 0.1}  # 0.015 of 3 on the stream's other writers
        assert moved == {"blocks/0/mlp/up/kernel", "blocks/0/mlp/down/kernel"}


def test_without_time_the_count_says_that_it_is_a_lower_bound() -> None:
    """Orbits are counted whatever the time; every block is named as one that is lacking."""
    found = _counted(_llama(), _llama().gauges[:6], seconds=0.0)
    assert found.blocks == () and len(found.skipped) > 3 and found.unexplained == 0
    assert found.dead == found.explained == sum(gauge.dim for gauge in found.gauges) > 0
    assert f"a lower bound: {len(found.skipped)} blocks were not counted" in str(found)
    assert all(name.endswith(": the time ended") for name in found.skipped)


def test_an_axis_without_a_block_is_named() -> None:
    """One index of the inputs' axis has 60 entries, more than a block: the count did not say that it is without it."""
    rng = np.random.default_rng(0)
    params, batch = {"up": rng.normal(size=(2, 60)), "down": rng.normal(size=(60, 3))}, rng.normal(size=(90, 2))
    gauge = go.rescale({"up": "_ channel"}, {"down": "channel _"})
    found = go.measure.census(
        lambda p, x: jax.nn.relu(x @ p["up"]) @ p["down"], params, [batch], gauge, whole=10, block=30, progress=False)
    assert len(found.blocks) == 1 and "a lower bound: 2 blocks were not counted" in str(found)
    assert "an axis of up, which has 60 entries at one index: pass block=60" in found.skipped


def test_the_upper_bound_is_above_the_count_and_sharp_after_as_many_steps_as_parameters(x64: None) -> None:
    pytest.importorskip("matfree")
    found = _counted(_llama(), _llama().gauges, probes=4)
    mean, error = found.bound
    assert 67 <= mean + 2 * error and mean < 150 and "at most" in str(found)
    leaves = {"w": np.random.default_rng(0).standard_normal((6, 2))}
    inputs, rng = np.random.default_rng(1).standard_normal((40, 6)), np.random.default_rng(2)
    mean, error = upper_bound(lambda p, x: [x @ p["w"].sum(1)], leaves, [inputs], 200, 12, rng, False)
    assert abs(mean - 6) <= 3 * error and error < 0.3


@pytest.mark.parametrize("dead", [5, 50])
def test_the_weight_of_zero_is_right_after_more_steps_than_there_are_eigenvalues(dead: int) -> None:
    rng = np.random.default_rng(0)
    basis = np.linalg.qr(rng.normal(size=(60, 60)))[0]
    small = scipy.linalg.hessenberg((basis * np.r_[np.zeros(dead), rng.uniform(1, 100, 60 - dead)]) @ basis.T)
    weight = _weight_of_zero(np.diag(small), np.abs(np.diag(small, 1)))
    assert weight == pytest.approx(np.sum(np.square(basis[0, :dead])))
    assert _weight_of_zero(np.array([0.0, np.nan]), np.zeros(1)) == 1.0  # of a function that is constant


def test_what_cannot_be_counted_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Too few outputs for a block, one probe, and a bound without matfree."""
    row = _llama()
    with refused("pass more batches"):
        go.measure.census(row.fn, row.params, [np.zeros((1, 5), int)], row.gauges, whole=10, progress=False)
    for wrong in ({"probes": 1}, {"probes": 2.5}, {"outputs": "logit"}):
        ((name, value),) = wrong.items()
        with refused(rf"{name}={value}|bad {name}"):
            _counted(row, row.gauges, **wrong)
    options: dict[str, Any]
    for options in {"cutoff": 0.0}, {"cutoff": np.nan}, {"cutoff": "a"}, {"seconds": 1j}:
        with refused(f"bad {next(iter(options))}"):
            _counted(row, row.gauges, **options)
    with refused("no block of 2 entries", "pass block=4"):
        go.measure.census(relu, {"up": UP, "down": DOWN}, [X], [], whole=1, block=2, progress=False)
    for params in ({"count": np.arange(3)}, {"a": jax.ShapeDtypeStruct((2,), float)}):
        with refused("no floating-point arrays in params"):
            go.measure.census(relu, params, [np.ones((9, 6))], [], progress=False)
    monkeypatch.setitem(sys.modules, "matfree", None)
    with pytest.raises(ImportError, match=r'pip install "gauge_optax\[measure\]"'):
        _counted(row, row.gauges, probes=2)


@pytest.mark.slow
@pytest.mark.parametrize("whole", [100, 10])
def test_a_function_that_ignores_its_parameters(whole: int) -> None:
    params = dict(zip(("up", "down"), drawn((6, 5), (5, 3)), strict=True))
    gauge = go.rescale({"up": "_ channel"}, {"down": "channel _"})
    found = go.measure.census(lambda p, x: x, params, [np.ones((40, 6))], [gauge], "loss", whole=whole, progress=False)
    assert found.unexplained == 0 and found.dead == (45 if whole == 100 else 5) and not np.isnan(found.gap).any()
    assert found.unreached == (40 if whole == 100 else 0) and found.gauges[0].seen == 0


def test_the_figure_names_gauges_and_leaves() -> None:
    matplotlib, row = pytest.importorskip("matplotlib"), _llama()
    matplotlib.use("Agg")
    axes = _counted(row, [*row.gauges[:6], *row.gauges[7:]]).plot()
    labels = [label.get_text() for label in axes.get_yticklabels()]
    assert labels[-3] == "no gauge explains, in all"
    assert set(labels[-2:]) == {f"of these, in blocks/0/mlp/{name}/kernel" for name in ("up", "down")}
    assert axes.get_title().startswith("Of 396 dimensions at least 63")
    matplotlib.pyplot.close(axes.figure)


@pytest.mark.parametrize("whole", [12_000, 10])
def test_roundoff_of_dead_directions_beside_flat_ones_needs_no_gauge(whole: int) -> None:
    """Singular vectors of 3e-12 and of zero mix by 1e-4: dead directions seem to lie outside the orbits by that."""

    def fn(p: Any, x: Any) -> jax.Array:
        bias = p["a"] + (1 + 1e-10 * jnp.square(x[:, :1])) * p["b"]  # a and b are nearly one
        return jax.nn.relu(x @ p["up"] + bias) @ p["down"]

    draw = np.random.default_rng(0).normal
    params = {"up": draw(size=(5, 7)), "down": draw(size=(7, 4)), "a": draw(size=7) / 9, "b": draw(size=7) / 9}
    gauge = go.rescale({"up": "_ channel", "a": "channel", "b": "channel"}, {"down": "channel _"})
    given = dict[str, Any](batches=[draw(size=(90, 5))], outputs="loss", cutoff=1e-13, whole=whole, progress=False)
    found = go.measure.census(fn, params, gauges=gauge, **given)
    assert 1e-13 < found.gap[1] < 1e-11
    assert (found.dead, found.explained, found.unreached, found.unexplained) == (7, 7, 0, 0)
    assert go.measure.census(fn, params, gauges=[], **given).unexplained == 7


def relu(p: Any, x: Any) -> jax.Array:
    return jax.nn.relu(x @ p["up"]) @ p["down"]


def drawn(*shapes: tuple[int, ...]) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.normal(size=shape).astype(np.float32) for shape in shapes]


UP, DOWN, X = drawn((3, 4), (4, 2), (200, 3))


@pytest.mark.parametrize("options", [{}, dict(whole=10, block=20)])
def test_what_stands_behind_stop_gradient_is_not_dead(options: dict[str, int]) -> None:
    params = {"up": UP, "down": DOWN, "mean": np.ones(3, np.float32)}
    fn = lambda p, x: relu(p, x - jax.lax.stop_gradient(p["mean"]))  # noqa: E731
    found = go.measure.census(fn, params, [X], [go.rescale({"up": "_ unit"}, {"down": "unit _"})], "loss",
                              progress=False, **options)
    assert found.dead == found.explained == 4 and found.constant == ("mean",) and "held constant" in str(found)


def test_the_gradient_of_a_maximum_is_counted_right() -> None:
    """Behind a norm; XLA's options, which the suite sets, made it 0/0."""

    def fn(p: Any, x: Any) -> jax.Array:
        y = x.reshape(40, 5, 3) @ p["up"] + p["in"]
        y = y - jnp.mean(y, -1, keepdims=True)
        y = y / jnp.sqrt(jnp.mean(y * y, -1, keepdims=True) + 1e-6) * p["scale"] + p["bias"]
        return jnp.max(jax.nn.relu(y), 1) @ p["down"]

    params = {"up": UP, "down": DOWN, "in": UP[0], "scale": 1 + UP[1] / 4, "bias": UP[2] / 4}
    assert go.measure.census(fn, params, [X], [], "loss", progress=False).dead == 3 + 1 + 4


def test_a_gauge_of_the_streams_mean_makes_an_optimizer_blind_to_it(x64: None) -> None:
    """It is defined as a user would."""
    row, key = design_block(), jax.random.key(3)
    gauge = row.gauges[-1]

    def loss(params: Any) -> jax.Array:
        return -jnp.mean(jax.nn.log_softmax(row.fn(params, row.batches[0]))[..., 0])

    go.testing.assert_invariant(loss, row.params, gauge, key, rtol=1e-12)
    with pytest.raises(AssertionError):
        go.testing.assert_equivariant_step(optax.adamw(1e-2), loss, row.params, gauge, key, rtol=1e-10)
    tx, none = go.quotient(optax.adamw(1e-2), gauge), ["key/bias"]  # whose gradient is roundoff
    go.testing.assert_equivariant_step(tx, loss, row.params, gauge, key, ignore=none, rtol=1e-10)


@pytest.mark.parametrize("whole", [10, 1000])
def test_an_orbit_along_which_outputs_change_explains_nothing(whole: int) -> None:
    draw = np.random.default_rng(0).normal
    params, blocks = {"up": draw(size=(3, 4)), "down": draw(size=(4, 2))}, ({"up": "_ c"}, {"down": "c _"})
    fn = lambda p, x: jax.nn.relu(x @ p["up"]) @ p["down"]  # noqa: E731
    for gauge, explained in ((go.rescale(*blocks), 4), (go.rescale(*blocks, degree=2), 0)):
        counted = go.measure.census(
            fn, params, [draw(size=(200, 3))], gauge, outputs="loss", whole=whole, block=8, progress=False)
        assert counted.explained == explained and counted.unreached == 0 and counted.dead <= 4
        assert ("no symmetries here" in str(counted)) == (explained == 0)


def test_rows_are_shared_out_over_batches() -> None:
    """Of forty small batches a few rows each: not as many of each as there are in all."""
    leaves, block = {"w": np.ones((3, 4))}, EntrySet("w", {"w": np.arange(12)})
    batches = list(np.random.default_rng(0).normal(size=(40, 2, 3)))
    (rows,) = rows_of(lambda p, x: [x @ p["w"]], leaves, batches, [block], 60, np.random.default_rng(1), False)
    assert 60 <= len(rows) <= 80 and np.linalg.matrix_rank(rows) == 12


@pytest.mark.parametrize(("sizes", "rank"), [
    ([1.0, 2e-10, 9e-11, 3e-11, 2e-16, 1e-16], 4), ([1.0, 0.5], 2), ([0.0, 0.0], 0),
    ([1.0, 1e-9, 1e-15, 1e-18], 2),  # zeros among each other have no gap
])
def test_what_is_flat_is_told_from_what_is_dead_by_a_gap(sizes: list[float], rank: int) -> None:
    assert rank_of(np.array(sizes), 1e-10) == rank
