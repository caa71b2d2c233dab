"""Every mode and gauge of DDC's Table 3: twins stay one function, and tangents stay horizontal in a stale eigenbasis.

All rotations, and all abelian gauges, train side by side as one tree: a sum of losses, so that one compiled trainer per
mode and dtype serves every group, seed, spectrum and check. The rate is 3e-3 in float32: at 1e-2 plain AdamW itself
turns a change of 6e-8 in its start into 1e-5 within 20 steps.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gauge_optax as go
from gauge_optax.binding import with_leaves
from gauge_optax.gauges._basis import HeadBasis, drift, grouped, stacked_gram
from gauge_optax.transforms._moments import V_MODES
from tests.cases import GAUGE_CASES
from tests.quick import jit
from tests.tolerances import tolerance

pytestmark = pytest.mark.slow  # minutes of compiling; test_slice.py keeps twins of `quotient` in the quick tests

Tree = Any
Move = Callable[[Tree], Tree]
CASES = {c.name: c for c in GAUGE_CASES}
DTYPES = ("float64", "float32")
STEPS = {"float64": 20, "float32": 50}
RATE = {"float64": 1e-2, "float32": 3e-3}
SEEDS = (42, 142, 242)
REFRESH = 0.03  # drift at which the twins' eigenbases are renewed, so that second moments travel


class Group(NamedTuple):
    """One row of Table 3: gauges on the leaves under the row's name, these leaves, and what the gauges keep."""

    gauges: list[go.Gauge]
    params: Callable[[jax.Array], Tree]
    loss: Callable[[Tree], jax.Array]


class History(NamedTuple):
    """A run: what was before and in each step, with a leading axis, and the end.

    Attributes:
      points: parameters before each step.
      tangents: what `scale_by_ddc` made of the gradients there.
      stale: per group of heads, the drift of the eigenbasis that was used; () for AdamW.
      refreshes: how many groups have been renewed so far; () for AdamW.
      losses: per row, rows by name.
      end: parameters after the last step.
    """

    points: Tree
    tangents: Tree
    stale: Any
    refreshes: Any
    losses: jax.Array
    end: Tree


Run = Callable[[Tree, float, float], History]


class Setting(NamedTuple):
    """Compiled trainers of a mode and of AdamW: run(params, rate, refresh_drift)."""

    dtype: str
    label: str
    ours: Run
    adamw: Run


# Table 3 ------------------------------------------------------------------------------------------


def _rotation(name: str, case: str, **axes: str) -> Group:
    make = go.rope_torus if case.startswith("rope") else go.head_rotation
    gauge = make({f"{name}/{leaf.replace('__', '/')}": spec for leaf, spec in axes.items()})
    return Group([gauge], CASES[case].params, CASES[case].loss)


_VALUES = {"value__kernel": "_ head basis", "value__bias": "head basis", "out": "head basis _"}
ROTATIONS = {
    "qk": _rotation("qk", "head_rotation/mha", query="_ head basis", key="_ head basis"),
    "vo": _rotation("vo", "head_rotation/value_out", **_VALUES),
    "gqa": _rotation("gqa", "head_rotation/gqa", query="_ (head _) basis", key="_ head basis"),
    "mqa": _rotation("mqa", "head_rotation/mqa", query="_ _ basis", key="_ basis"),
    "torus": _rotation("torus", "rope_torus/half", query="_ head basis", key="_ head basis"),
}


def _chain_params(key: jax.Array) -> Tree:
    draw = np.random.default_rng(np.asarray(jax.random.key_data(key))).normal
    return {f"w{n}": jnp.asarray(draw(size=shape), float) for n, shape in enumerate(((6, 5), (5, 4), (4, 5), (5, 3)))}


def _chain_loss(p: Tree) -> jax.Array:
    x = jnp.asarray(np.random.default_rng(0).normal(size=(32, 6)), p["w0"].dtype)
    for n in range(3):
        x = jax.nn.relu(x @ p[f"w{n}"])
    return jnp.mean(jnp.square(x @ p["w3"] / 10 - 1.0))


def _chain(name: str, up: str, down: str) -> Group:
    links = [go.rescale({f"{name}/w{n}": up}, {f"{name}/w{n + 1}": down}) for n in range(3)]
    return Group(links, _chain_params, _chain_loss)


def _abelian(gauge: go.Gauge, case: str) -> Group:
    return Group([gauge], CASES[case].params, CASES[case].loss)


_UP = {"relu/up/kernel": "_ channel", "relu/up/bias": "channel"}
_NORM = {"layernorm/scale": "channel", "layernorm/bias": "channel"}
ABELIAN = {
    "shift_bias": _abelian(go.logit_shift({"shift_bias/bias": "vocab"}), "logit_shift/bias"),
    "shift_row": _abelian(go.logit_shift({"shift_row/kernel": "_ vocab"}), "logit_shift/kernel"),
    "relu": _abelian(go.rescale(_UP, {"relu/down": "channel _"}), "rescale/channel"),
    "layernorm": _abelian(go.norm_scale(_NORM, {"layernorm/kernel": "channel _"}), "norm_scale/bias"),
    "chain": _chain("chain", "_ _", "_ _"),
    "chain_channels": _chain("chain_channels", "_ channel", "channel _"),
}


def _gauges(rows: dict[str, Group]) -> list[go.Gauge]:
    return [gauge for row in rows.values() for gauge in row.gauges]


def _start(rows: dict[str, Group], seed: int) -> Tree:
    keys = jax.random.split(jax.random.key(seed), len(rows))
    return {name: row.params(key) for (name, row), key in zip(rows.items(), keys, strict=True)}


def _with_twin(rows: dict[str, Group], seed: int, params: Tree) -> tuple[Tree, Move, Tree]:
    """θ, a random move of its own, and where that takes θ."""
    whole = go.product(_gauges(rows))
    move = functools.partial(whole.act, whole.sample(jax.random.key(seed + 1), params))
    return params, move, move(params)


# Training -----------------------------------------------------------------------------------------


def _trainer(rows: dict[str, Group], dtype: str, decay: float, **options: Any) -> Run:
    """DDC with these options, AdamW without any."""
    gauges = _gauges(rows)

    def loss(params: Tree) -> tuple[jax.Array, jax.Array]:
        each = jnp.stack([rows[name].loss(params[name]) for name in sorted(rows)])
        return jnp.sum(each), each

    def links(rate: jax.Array, refresh_drift: jax.Array) -> list[optax.GradientTransformationExtraArgs]:
        if not options:
            return [optax.scale_by_adam(), optax.chain(optax.add_decayed_weights(decay), optax.scale(-rate))]
        last = go.gauge_retract(gauges, options.get("radial", "linear"))
        return [
            optax.chain(go.gauge_project(gauges), go.scale_by_ddc(gauges, refresh_drift=refresh_drift, **options)),
            optax.chain(go.add_gauge_decay(decay, gauges), optax.scale(-rate), last),
        ]

    def run(params: Tree, rate: jax.Array, refresh_drift: jax.Array) -> History:
        first, second = links(rate, refresh_drift)

        def step(carry: Tree, _: None) -> tuple[Tree, Tree]:
            params, one, two = carry
            (_, losses), grads = jax.value_and_grad(loss, has_aux=True)(params)
            tangent, one = first.update(grads, one, params)
            chord, two = second.update(tangent, two, params)
            stale = (_drifts(gauges, params, one[-1].gauges), one[-1].gauges.refreshes) if options else ((), ())
            return (optax.apply_updates(params, chord), one, two), (params, tangent, *stale, losses)

        (end, _, _), seen = jax.lax.scan(step, (params, first.init(params), second.init(params)), None, STEPS[dtype])
        return History(*seen, end)

    return jit(run)


def _drifts(gauges: Sequence[go.Gauge], params: Tree, state: Tree) -> jax.Array:
    """How far the stored eigenbasis of each group of heads is from that of the point."""
    bound = go.product(gauges).bound(params)
    values, bases = bound.values(params), [x for x in jax.tree.leaves(state, is_leaf=_is_basis) if _is_basis(x)]
    grams = [stacked_gram(heads, values, values) for heads in grouped(bound.heads)]
    return jnp.stack([jnp.zeros(()), *(drift(b, g, 1e-3) for b, g in zip(bases, grams, strict=True))])


def _is_basis(x: Any) -> bool:
    return isinstance(x, HeadBasis)


@functools.cache
def _adamw(kind: str, dtype: str, decay: float) -> Run:
    return _trainer({"rotations": ROTATIONS, "abelian": ABELIAN}[kind], dtype, decay)


def _every(first: Sequence[str], slow: str) -> list[Any]:
    """Each of the first in both dtypes; one of them in float32 only where time is plenty."""
    marks = {(slow, "float32"): pytest.mark.slow}
    rows = [(name, dtype) for dtype in DTYPES for name in first]
    return [pytest.param(row, marks=marks.get(row, ()), id="/".join(row)) for row in rows]


@pytest.fixture(scope="module", params=_every(V_MODES, slow="none"))
def mode(request: pytest.FixtureRequest) -> Setting:
    """Of module scope, so that all tests of one mode come in a row."""
    name, dtype = request.param
    ours = _trainer(ROTATIONS, dtype, decay=0.1, v_mode=name)
    return Setting(dtype, f"{name} {dtype}", ours, _adamw("rotations", dtype, 0.1))


@pytest.fixture(scope="module", params=_every(("linear", "log"), slow="log"))
def radial(request: pytest.FixtureRequest) -> Setting:
    """The decay is all that AdamW notices of a shift."""
    name, dtype = request.param
    return Setting(dtype, f"{name} {dtype}", _trainer(ABELIAN, dtype, 1.0, radial=name), _adamw("abelian", dtype, 1.0))


# Twins --------------------------------------------------------------------------------------------


def test_rotated_twins_stay_together(mode: Setting) -> None:
    with jax.enable_x64(mode.dtype == "float64"):
        _compare(mode, [_with_twin(ROTATIONS, seed, _start(ROTATIONS, seed)) for seed in SEEDS])


def test_scaled_and_shifted_twins_stay_together(radial: Setting) -> None:
    with jax.enable_x64(radial.dtype == "float64"):
        _compare(radial, [_with_twin(ABELIAN, seed, _start(ABELIAN, seed)) for seed in SEEDS])


def test_dead_units_stay_together(radial: Setting) -> None:
    """A unit that is never on has no gradient but rounding, which no moment may turn into a step."""
    with jax.enable_x64(radial.dtype == "float64"):
        starts = [_start(ABELIAN, seed) for seed in SEEDS]
        for params in starts:
            chain = params["chain_channels"]
            chain["w1"] = chain["w1"].at[:, 0].set(-jnp.abs(chain["w1"][:, 0]))  # its inputs are positive
        twins = [_with_twin(ABELIAN, seed, params) for seed, params in zip(SEEDS, starts, strict=True)]
        _compare(radial, twins, "chain_channels")


def _compare(setting: Setting, twins: Sequence[tuple[Tree, Move, Tree]], *only: str) -> None:
    """AdamW fails on every row, the setting on none."""
    found = [_gaps(setting.ours, setting.dtype, *twin) for twin in twins]
    plain = [_gaps(setting.adamw, setting.dtype, *twin) for twin in twins]
    for name in only or found[0]:
        start = min(_apart(params, twin)[name] for params, _, twin in twins)
        leaf, loss = (max(gaps[name][k] for gaps in found) for k in range(2))
        beside = min(gaps[name][0] for gaps in plain)
        figures = f"{start:.0e} apart, then leaves {leaf:.1e}, loss {loss:.1e}; AdamW {beside:.0e}"
        print(f"{setting.label:24} {name:15} {figures}")
        assert start > 0.02, f"{name}: the twins are the same weights"
        assert beside > 30 * tolerance("twins", setting.dtype), f"{name}: AdamW keeps these twins together too"
        assert leaf <= tolerance("twins", setting.dtype), name
        # DESIGN's 1e-5 for the loss is of 20 steps; of 50 in float32 the issue asks 1e-4, and this is half of it.
        assert loss <= (5e-5 if setting.dtype == "float32" else tolerance("twin_loss", setting.dtype)), name


def _gaps(run: Run, dtype: str, params: Tree, move: Move, twin: Tree) -> dict[str, tuple[float, float]]:
    """Per row, the largest relative difference of a leaf at the end, and of the losses on the way."""
    here, there = (run(start, RATE[dtype], REFRESH) for start in (params, twin))
    ours, theirs = (np.asarray(history.losses, float) for history in (here, there))
    assert np.isfinite(ours).all() and np.isfinite(theirs).all()
    leaves = _apart(move(here.end), there.end)
    return {name: (leaves[name], _relative(theirs[:, n], ours[:, n])) for n, name in enumerate(sorted(leaves))}


def _apart(a: Tree, b: Tree) -> dict[str, float]:
    """Per row, the largest relative difference of a leaf."""
    return {name: max(jax.tree.leaves(jax.tree.map(_relative, b[name], a[name]))) for name in a}


def _relative(found: Any, expected: Any) -> float:
    size = float(np.linalg.norm(expected))
    return float(np.linalg.norm(np.asarray(found) - np.asarray(expected))) / (size or 1.0)


# Degenerate spectra -------------------------------------------------------------------------------

SPECTRA = {
    "orthogonal": (1.0, 1.0, 1.0, 1.0),
    "equal_pair": (1.0, 1.0, 2.0, 0.5),
    "rank_one": (1.0, 0.0, 0.0, 0.0),
    "zero_head": (2.0, 1.5, 1.0, 0.5),  # of the other heads
    "faint": (2.0, 3e-2, 2e-2, 1e-2),  # eigenvalues below the 1e-3 that body_frame_topk divides
}
ONLY = {"zero_head": ("qk", "vo", "gqa", "torus")}  # a single head that is zero has no twin


@pytest.mark.parametrize("kind", SPECTRA)
def test_degenerate_heads_stay_together(mode: Setting, kind: str) -> None:
    if kind == "faint" and mode.label.startswith("body_frame "):
        pytest.skip("divides faint directions: one float32 rounding of the start ends at 1e-3 to 1e-1, twin or not")
    with jax.enable_x64(mode.dtype == "float64"):
        twins = [_with_twin(ROTATIONS, seed, _degenerate(_start(ROTATIONS, seed), kind, seed)) for seed in SEEDS]
        _compare(mode, twins, *ONLY.get(kind, ()))


def _degenerate(params: Tree, kind: str, seed: int) -> Tree:
    """Every head's rows W replaced by W(WᵀW)^(−1/2)·QΣQᵀ: any singular values, in a random basis."""
    draw, bound = np.random.default_rng(seed).normal, go.product(_gauges(ROTATIONS)).bound(params)
    values = bound.values(params)
    for head in (head for heads in grouped(bound.heads) for head in heads):
        gram = np.asarray(head.gram(values, values), np.float64)
        sigma = np.tile(np.array(SPECTRA[kind])[: head.size], (*head.shape, 1))
        if kind == "zero_head":
            sigma.reshape(-1, head.size)[0] = 0.0
        lam, basis = np.linalg.eigh(gram)
        q = np.linalg.qr(draw(size=gram.shape))[0]
        white = (basis / np.sqrt(lam)[..., None, :]) @ np.swapaxes(basis, -1, -2)
        values |= head.turn(values, jnp.asarray(white @ (q * sigma[..., None, :]) @ np.swapaxes(q, -1, -2), float))
        found = np.linalg.eigvalsh(np.asarray(head.gram(values, values), np.float64))
        np.testing.assert_allclose(found, np.sort(sigma**2), atol=tolerance("kernel", jnp.float32) * 10)
    return with_leaves(params, values)


# Stale frames -------------------------------------------------------------------------------------


@pytest.mark.parametrize("refresh_drift", [0.03, 0.1])
def test_tangents_are_horizontal_before_a_refresh(mode: Setting, refresh_drift: float) -> None:
    with jax.enable_x64(mode.dtype == "float64"):
        seen = mode.ours(_start(ROTATIONS, SEEDS[0]), 0.02, refresh_drift)
        stale, due = np.max(seen.stale, 1), np.flatnonzero(np.diff(seen.refreshes) > 0)
        vertical = np.asarray(_vertical(mode.dtype)(seen.points, seen.tangents))
        print(f"{mode.label:24} {len(due)} refreshes, drift {stale[due].max():.3f}, vertical {vertical[due].max():.1e}")
        assert 0.7 * refresh_drift < stale[due].max() <= stale.max() <= refresh_drift, "no basis is stale"
        assert np.max(vertical) <= tolerance("horizontal", mode.dtype)


@functools.cache
def _vertical(dtype: str) -> Callable[[Tree, Tree], jax.Array]:
    """Per step and row, the vertical part of tangents relative to their norm there; compiled once per dtype."""

    def share(params: Tree, tangent: Tree) -> jax.Array:
        parts = {name: row.gauges[0].vertical(params, tangent)[name] for name, row in ROTATIONS.items()}
        return jnp.stack([optax.tree.norm(parts[name]) / optax.tree.norm(tangent[name]) for name in ROTATIONS])

    return jit(jax.vmap(share))
