"""`max_norm_muon`: matrices and tokens beside the same by hand, and twins that train as one."""

import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gauge_optax as go
from benchmarks.training.links import EMBEDDINGS, NEURONS, TOKENS
from models import lm
from tests.quick import jit
from tests.refusals import refused
from tests.tolerances import tolerance
from tests.twins import stepper, train

CONFIG = lm.llama_config(vocab=7, d_model=8, layers=2, heads=2, kv_heads=2, d_head=4, d_ff=12, max_len=5)
NO_GAUGE = go.logit_shift({"shift": "vocab"})
"""On a leaf that no kernel is: a list of gauges may not be empty."""
READ = {**NEURONS, **TOKENS}


def noise(seed: int, *shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def test_twins_train_as_one(x64: None) -> None:
    """Weights of one function, far apart by all gauges at once; AdamW and the link without `quotient` differ."""
    params, loss = lm.params_and_loss(CONFIG, jax.random.key(0))
    params = jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), params)
    tokens = jax.random.randint(jax.random.key(1), (4, 6), 0, CONFIG.vocab)
    on_tokens = lambda p: loss(p, tokens)  # noqa: E731
    group = go.product(lm.gauges(CONFIG))
    twin = group.act(group.sample(jax.random.key(2), params, 1.0), params)
    muon = go.max_norm_muon(0.04, group, READ, EMBEDDINGS, weight_decay=0.1)
    plain = go.norms.max_norm(optax.adam(0.04), NEURONS, learning_rate=0.04)
    apart = {}
    for name, tx in {"adamw": optax.adamw(0.04), "plain": plain, "muon": muon}.items():
        step = stepper(tx, on_tokens)
        one, other = (train(jit(tx.init), step, start, 10)[1] for start in (params, twin))
        apart[name] = float(np.abs(one - other).max())
    assert apart["adamw"] > 1e-3
    assert apart["plain"] > 1e-3
    assert apart["muon"] <= tolerance("twins", "float64")


def test_the_axes_say_which_matrix_a_kernel_is() -> None:
    """Inputs last as in PyTorch, stacked layers, heads side by side, and one head's matrices in a fused kernel."""
    shapes = {
        "inputs_last": (6, 4), "scanned": (3, 4, 6), "heads": (4, 2, 3), "experts": (2, 4, 6), "fused": (4, 3, 6),
    }
    neurons = {
        "inputs_last": "neuron _", "scanned": "layer _ neuron", "heads": "_ head neuron", "experts": "expert _ neuron",
        "fused": ("_ qkv=0 neuron", "_ qkv=1 neuron", "_ qkv=2 neuron"),
    }
    params = {name: noise(n, *shape) for n, (name, shape) in enumerate(shapes.items())} | {"shift": jnp.zeros(3)}
    tx = go.max_norm_muon(1.0, NO_GAUGE, neurons, ns_coeffs="sharp", bound=1e6, nesterov=False)
    grads = jax.tree.map(lambda x: noise(9, *x.shape), params)
    steps = jit(tx.update)(grads, jit(tx.init)(params), params)[0]

    def stack(name: str, x: jax.Array) -> np.ndarray:
        """As matrices, inputs by outputs."""
        shaped = {
            "inputs_last": lambda: x.T[None], "heads": lambda: x.reshape(1, 4, 6), "fused": lambda: x.swapaxes(0, 1),
        }
        return np.asarray(shaped.get(name, lambda: x)())

    for name in neurons:
        # A polar factor of (4, 6) has orthonormal rows; steps of one length per column leave them near it.
        ours = stack(name, steps[name])
        np.testing.assert_allclose(np.linalg.norm(ours, axis=1), 1e6, rtol=1e-3, err_msg=name)
        u, _, v = np.linalg.svd(stack(name, grads[name]), full_matrices=False)
        expected = -u @ v / np.linalg.norm(u @ v, axis=1, keepdims=True)
        np.testing.assert_allclose(ours / 1e6, expected, atol=2e-2, err_msg=name)


def test_tokens_step_in_their_own_units_and_come_to_rest(x64: None) -> None:
    """By hand: a table and an unembedding whose tokens have gradients of 1e-4, 1, 1 for one step, and 0."""
    steps, tokens, d, rate = 40, 4, 9, 0.1
    gradients = np.random.default_rng(0).normal(size=(steps, tokens, d)) * np.array([1e-4, 1.0, 1.0, 0.0])[:, None]
    gradients[1:, 2] = 0.0
    params = {"table": jnp.zeros((tokens, d)), "head": jnp.zeros((d, tokens)), "w": jnp.ones((2, 2)),
              "shift": jnp.zeros(3)}
    tx = go.max_norm_muon(rate, NO_GAUGE, {"w": "_ neuron", "head": "_ token"}, {"table": "token _"}, nesterov=False)
    grads = {"table": jnp.asarray(gradients), "head": jnp.asarray(gradients.swapaxes(1, 2)),
             "w": jnp.ones((steps, 2, 2)), "shift": jnp.zeros((steps, 3))}

    def step(carry: Any, gradient: Any) -> Any:
        params, state = carry
        updates, state = tx.update(gradient, state, params)
        return (optax.apply_updates(params, updates), state), updates

    moves = jit(lambda p: jax.lax.scan(step, (p, tx.init(p)), grads)[1])(params)
    for name, unit in (("table", d**0.5), ("head", 1.0)):
        ours = np.asarray(moves[name] if name == "table" else moves[name].swapaxes(1, 2))
        momentum, square, weights = np.zeros((tokens, d)), np.zeros((tokens, 1)), np.zeros((tokens, d))
        for n in range(steps):
            momentum = 0.95 * momentum + gradients[n]
            square = 0.95 * square + 0.05 * np.sum(momentum**2, 1, keepdims=True)
            size = np.sqrt(square / (1.0 - 0.95 ** (n + 1)))
            wanted = weights - rate * unit * np.divide(momentum, size, out=np.zeros((tokens, d)), where=size > 0)
            if name == "table":
                wanted *= np.minimum(1.0, unit / np.maximum(np.linalg.norm(wanted, axis=1, keepdims=True), 1e-300))
            np.testing.assert_allclose(ours[n], wanted - weights, rtol=1e-6, atol=1e-12)
            weights = wanted
        lengths = np.linalg.norm(ours, axis=2) / unit
        np.testing.assert_allclose(lengths[0, :3], rate, rtol=1e-6)
        if name == "head":
            assert lengths[30, 2] < 0.6 * lengths[5, 2]  # absent since the first step
            assert np.linalg.norm(weights, axis=1).max() > 1.2  # without a bound
        else:
            assert np.linalg.norm(weights, axis=1).max() <= unit * (1.0 + 1e-12)
        assert not lengths[:, 3].any()


@pytest.mark.parametrize(
    "neurons", [{"w": "_ _"}, {"w": "a b", "v": "_ neuron"}, {"w": ("_ neuron=0", "neuron=1 _")}], ids=str
)
def test_neurons_that_are_no_matrix_are_refused(neurons: Any) -> None:
    params = {"w": jnp.ones((4, 4)), "v": jnp.ones((2, 2)), "head": jnp.ones((2, 3))}
    with refused("max_norm_muon", "'w'"):
        go.max_norm_muon(0.1, go.logit_shift({"head": "_ vocab"}), neurons).init(params)


def test_a_path_in_both_mappings_is_refused() -> None:
    with refused("'w' in two mappings"):
        go.max_norm_muon(0.1, NO_GAUGE, {"w": "_ token"}, {"w": "token _"})


@pytest.mark.parametrize(
    "mappings", [({"w": "a token"},), ({"v": "_ neuron"}, {"w": "a token"}), ({"v": "_ neuron"}, {"w": "_ _"})],
    ids=str,
)
def test_tokens_without_vectors_are_refused(mappings: Any) -> None:
    params = {"w": jnp.ones((4, 4)), "v": jnp.ones((2, 2)), "shift": jnp.ones(3)}
    with pytest.raises(ValueError, match="the tokens of 'w' have no vectors") as error:
        go.max_norm_muon(0.1, NO_GAUGE, *mappings).init(params)
    assert 'write "_ token"' in str(error.value)


@pytest.mark.parametrize(
    ("argument", "mappings"), [("neurons", (["w"],)), ("embeddings", ({"w": "_ neuron"}, ["v"]))], ids=str
)
def test_lists_in_place_of_mappings_are_refused(argument: str, mappings: Any) -> None:
    with refused(f"max_norm_muon: no blocks in '{argument}'", f"write {argument}="):
        go.max_norm_muon(0.1, NO_GAUGE, *mappings)


# Ranges of a fused kernel ------------------------------------------------------------------------------

SHIFT = {"shift": jnp.zeros(3)}
PARTS: dict[str, tuple[int, int]] = {"q": (0, 32), "k": (32, 40), "v": (40, 48)}


def _joined(tree: dict[str, jax.Array], axis: int) -> dict[str, jax.Array]:
    """The parts side by side in one kernel, and what else the tree has."""
    names = [name for name in PARTS if name in tree]
    others = {name: x for name, x in tree.items() if name not in names}
    return {"fused": jnp.concatenate([tree[name] for name in names], axis), **others}


# Name → the fused kernel's axes, the parts' axes, the shape of a part of some length, and the axis that is fused.
FUSED: dict[str, tuple[tuple[str, ...], str, Any, int]] = {
    "groups": (tuple(f"_ (head unit)={a}:{b}" for a, b in PARTS.values()), "_ unit", lambda n: (16, n), 1),
    "lone ranges": (tuple(f"_ unit={a}:{b}" for a, b in PARTS.values()), "_ unit", lambda n: (16, n), 1),
    "first axis": (tuple(f"(head unit)={a}:{b} _" for a, b in PARTS.values()), "unit _", lambda n: (n, 16), 0),
    "scanned": (tuple(f"layer _ (head unit)={a}:{b}" for a, b in PARTS.values()), "layer _ unit",
                lambda n: (3, 16, n), 2),
    "inputs in two axes": (tuple(f"_ _ unit={a}:{b}" for a, b in PARTS.values()), "_ _ unit", lambda n: (4, 4, n), 2),
    "ranges in an index": (("_ unit=0:32", "_ (kv=0 unit)=32:48", "_ (kv=1 unit)=32:48"), "_ unit",
                           lambda n: (16, n), 1),
}


@pytest.mark.slow_rows("[!f]*-False", "groups-True", "inputs in two axes-True")
@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("name", FUSED)
def test_ranges_step_as_kernels_of_their_own(name: str, nesterov: bool, x64: None) -> None:
    """Three steps, with momentum, from norms below and above the bound; one whole matrix takes other steps."""
    axes, part_axes, shape, axis = FUSED[name]
    draw = lambda seed: {part: noise(seed + n, *shape(b - a)).astype(float)  # noqa: E731
                         for n, (part, (a, b)) in enumerate(PARTS.items())}
    start = {part: x / (8 if part == "q" else 2) for part, x in draw(0).items()} | SHIFT
    options: dict[str, Any] = {"nesterov": nesterov}
    sizes = {"head": 2} if any("(head" in string for string in axes) else {"kv": 2} if "index" in name else {}
    fused = go.max_norm_muon(0.02, NO_GAUGE, {"fused": axes}, sizes=sizes, **options)
    plain = go.max_norm_muon(0.02, NO_GAUGE, dict.fromkeys(PARTS, part_axes), **options)
    whole = go.max_norm_muon(0.02, NO_GAUGE, {"fused": part_axes}, **options)
    one, two, three = _joined(start, axis), start, _joined(start, axis)
    states = [fused.init(one), plain.init(two), whole.init(three)]
    for n in range(3):
        grads = draw(10 * n + 10) | SHIFT
        u, states[0] = jit(fused.update)(_joined(grads, axis), states[0], one)
        v, states[1] = jit(plain.update)(grads, states[1], two)
        w, states[2] = jit(whole.update)(_joined(grads, axis), states[2], three)
        one, two, three = (optax.apply_updates(p, x) for p, x in ((one, u), (two, v), (three, w)))
    moved = float(jnp.linalg.norm(one["fused"] - _joined(start, axis)["fused"]))
    assert moved > 0.1
    assert float(jnp.linalg.norm(one["fused"] - _joined(two, axis)["fused"])) <= 1e-10 * moved
    assert float(jnp.linalg.norm(one["fused"] - three["fused"])) > 0.05 * moved


@pytest.mark.parametrize(
    "axes",
    [("_ unit=0:32", "_ unit=32:40"), "_ unit=40:48", ("_ (head unit)=0:32",), ("_ unit=0:32", "_ token=32:48")],
    ids=str,
)
def test_a_leaf_that_is_listed_in_part_is_refused(axes: Any) -> None:
    """Nothing says what the rest is; nor can a part of a kernel be a table of tokens."""
    params = {"fused": jnp.ones((16, 48)), **SHIFT}
    sizes = {"head": 2} if "(" in str(axes[0]) else None
    with refused(r"'fused' is listed in part|tokens and neurons in one leaf 'fused'", "max_norm_muon"):
        go.max_norm_muon(0.1, NO_GAUGE, {"fused": axes}, sizes=sizes).init(params)


# The size of gradients ----------------------------------------------------------------------------------


# The first step ------------------------------------------------------------------------------------------


# What init tells, and what a state is for ----------------------------------------------------------------


@pytest.mark.parametrize("gauge", [NO_GAUGE, go.rescale({"w": "_ channel"}, {"other": "channel _"})], ids=repr)
def test_matrices_that_no_mapping_lists_are_named(gauge: go.Gauge) -> None:
    """Whether a gauge binds them or not; vectors, single rows and scanned biases of a gauge are none."""
    params = {"w": jnp.ones((4, 4)), "other": jnp.ones((4, 2)), "row": jnp.ones((1, 4)), "bias": jnp.ones(4), **SHIFT}
    tx = go.max_norm_muon(0.1, gauge, {"w": "_ neuron"})
    with pytest.warns(UserWarning, match="no mapping lists 1 matrix") as told:
        state = tx.init(params)
    assert len(told) == 1
    for part in ("max_norm_muon", "found:    'other' (4, 2)", "expected:", "remedy:", "half of the learning rate"):
        assert part in str(told[0].message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        go.max_norm_muon(0.1, gauge, {"w": "_ neuron", "other": "_ neuron"}).init(params)
        go.max_norm_muon(0.1, gauge, {"w": "_ neuron"}, {"other": "token _"}).init(params)
        tx.update(params, state, params)
        tx.init({})


def test_scanned_biases_are_no_matrices() -> None:
    params = {"up": jnp.ones((2, 4, 4)), "bias": jnp.ones((2, 4)), "down": jnp.ones((2, 4, 4))}
    params["free"] = jnp.ones((2, 4))
    gauge = go.rescale({"up": "layer _ channel", "bias": "layer channel"}, {"down": "layer channel _"})
    with pytest.warns(UserWarning, match="'free'") as told:
        go.max_norm_muon(0.1, gauge, {"up": "layer _ n", "down": "layer _ n"}).init(params)
    assert "'bias'" not in str(told[0].message)


@pytest.mark.parametrize(
    "neurons", [{"w": "neuron _", "v": "_ neuron"}, {"w": "_ neuron"}, {"w": ("_ n=0:2", "_ n=2:4"), "v": "_ neuron"}],
    ids=str,
)
def test_a_state_of_other_neurons_is_refused(neurons: Any) -> None:
    params = {"w": jnp.ones((4, 4)), "v": jnp.ones((4, 4)), **SHIFT}
    tx = go.max_norm_muon(0.1, NO_GAUGE, {"w": "_ neuron", "v": "_ neuron"})
    state = go.max_norm_muon(0.1, NO_GAUGE, neurons).init(params)
    with refused("a state that was made for other vectors", "state = tx.init(params)"):
        jit(tx.update)(params, state, params)
