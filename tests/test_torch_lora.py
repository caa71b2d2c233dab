"""The PyTorch file takes the steps of the JAX functions; without torch these tests are skipped."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gauge_optax as go

torch = pytest.importorskip("torch")

from examples import torch_lora  # noqa: E402

SHAPES = {"layers.0.q": (3, 7, 5), "layers.1.q": (3, 7, 5), "head": (2, 4, 6)}  # rank, inputs, outputs
MAKERS = {
    "adamw": (go.quotient_adamw, torch_lora.QuotientAdamW, {"weight_decay": 0.1}),
    "muon": (go.quotient_muon, torch_lora.QuotientMuon, {"weight_decay": 0.1}),
}


def _start(zero_b: bool) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    start = {}
    for name, (rank, inputs, outputs) in SHAPES.items():
        start[f"{name}.lora_A.default.weight"] = rng.normal(size=(rank, inputs))
        b = rng.normal(size=(outputs, rank))
        start[f"{name}.lora_B.default.weight"] = np.zeros_like(b) if zero_b else b
    return start | {"other.weight": rng.normal(size=(4, 3))}


def _targets() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(1)
    return {name: rng.normal(size=(outputs, inputs)) for name, (_, inputs, outputs) in SHAPES.items()}


def _loss(p: Any, sum_of: Any) -> Any:
    total = sum_of(p["other.weight"] ** 4)
    for name, target in _targets().items():
        product = p[f"{name}.lora_B.default.weight"] @ p[f"{name}.lora_A.default.weight"]
        total = total + sum_of((product - (torch.tensor(target) if sum_of is torch.sum else target)) ** 2)
    return total


def _in_jax(name: str, start: dict[str, np.ndarray], steps: int) -> dict[str, np.ndarray]:
    make, _, options = MAKERS[name]
    params = {path: jnp.asarray(x) for path, x in start.items()}
    gauges = go.lora({path: x for path, x in params.items() if "lora" in path})
    tx = make(1e-2, gauges, **options)
    state = tx.init(params)
    for _ in range(steps):
        updates, state = tx.update(jax.grad(lambda p: _loss(p, jnp.sum))(params), state, params)
        params = optax.apply_updates(params, updates)
    return {path: np.asarray(x) for path, x in params.items()}


def _in_torch(name: str, start: dict[str, np.ndarray], steps: int, gauges: str | None = None) -> dict[str, np.ndarray]:
    _, make, options = MAKERS[name]
    params = {path: torch.nn.Parameter(torch.tensor(x)) for path, x in start.items()}
    optimizer = make(params.items(), lr=1e-2, gauges=gauges, **options)
    for _ in range(steps):
        optimizer.zero_grad()
        _loss(params, torch.sum).backward()
        optimizer.step()
    return {path: x.detach().numpy() for path, x in params.items()}


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("zero_b", [False, True], ids=["drawn", "B = 0"])
def test_twenty_steps_are_those_of_the_jax_function(x64: None, name: str, zero_b: bool) -> None:
    start = _start(zero_b)
    ours, theirs = _in_torch(name, start, 20), _in_jax(name, start, 20)
    for path, value in theirs.items():
        np.testing.assert_allclose(ours[path], value, atol=1e-6, err_msg=path)
        assert np.abs(value - start[path]).max() > 1e-2


def test_bindings_from_json_are_those_of_names() -> None:
    start = _start(False)
    gauges = go.tools.to_json(go.lora({path: jnp.asarray(x) for path, x in start.items() if "lora" in path}))
    names = torch_lora.pairs_of(start)
    assert sorted(torch_lora.pairs_of(start, gauges)) == sorted(names) and len(names) == 3
    for path, value in _in_torch("adamw", start, 3, gauges).items():
        np.testing.assert_array_equal(value, _in_torch("adamw", start, 3)[path])


@pytest.mark.parametrize(
    ("names", "gauges", "message"),
    [
        (["layer.weight"], None, "no pair of LoRA factors"),
        (["q.lora_A.default.weight"], None, "a factor without its partner"),
        (["a"], go.tools.to_json(go.logit_shift({"head": "_ vocab"})), "a gauge that is no pair of LoRA factors"),
        (["a", "b"], go.tools.to_json(go.head_linear({"a": "_ basis"}, {"b": "basis _"})), "factors in another layout"),
    ],
)
def test_what_does_not_fit_says_what_to_pass(names: list[str], gauges: str | None, message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        torch_lora.pairs_of(names, gauges)
    assert all(part in str(error.value) for part in ("found:", "expected:", "remedy:"))


# What stands between the factors, and experts -----------------------------------------------------------


def _tensors(**shapes: tuple[int, ...]) -> dict[str, Any]:
    rng = np.random.default_rng(3)
    return {name.replace("__", "."): torch.nn.Parameter(torch.tensor(rng.normal(size=s))) for name, s in shapes.items()}


PLAIN = {"q__lora_A__default__weight": (3, 8), "q__lora_B__default__weight": (6, 3)}


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("q__lora_E__default", (3, 1)),
        ("q__lora_mixer__default__weight", (3, 3)),
        ("q__lora_diag__default", (3,)),
        ("q__default_lora_latent_mapping__weight", (3, 3)),
        ("q__gate", (3,)),
        ("q__lora_xs__default", (9,)),
        ("q__vera_lambda_d__default", (3,)),
        ("q__lora_A__default__bias", (3,)),
        ("q__lora_magnitude__default", (3,)),
    ],
)
def test_a_tensor_between_the_factors_is_refused_by_name(name: str, shape: tuple[int, ...], frozen: bool) -> None:
    params = _tensors(**PLAIN, **{name: shape})
    params[name.replace("__", ".")].requires_grad_(not frozen)
    with pytest.raises(ValueError, match="stands between") as error:
        torch_lora.QuotientAdamW(params.items())
    text = str(error.value)
    assert name.replace("__", ".") in text and all(part in text for part in ("found:", "expected:", "remedy:"))


def test_names_alone_are_enough_to_refuse() -> None:
    names = ["q.lora_A.default", "q.lora_B.default"]
    assert len(torch_lora.pairs_of([*names, "q.lora_magnitude_vector.default.weight", "q.lora_B.default.bias"])) == 1
    with pytest.raises(ValueError, match="may stand between"):
        torch_lora.pairs_of([*names, "q.lora_E.default"])
    with pytest.raises(ValueError, match="may be those of all experts"):
        torch_lora.pairs_of([name.replace("q.", "experts.") for name in names])


@pytest.mark.parametrize("out", [6, 3])
def test_magnitudes_of_dora_and_biases_of_b_pass(out: int) -> None:
    params = _tensors(
        q__lora_A__default__weight=(3, 8),
        q__lora_B__default__weight=(out, 3),
        q__lora_B__default__bias=(out,),
        q__lora_magnitude_vector__default__weight=(out,),
        q__base_layer__weight=(3, 3),
        q__lora_alpha=(),
        e__lora_embedding_A__default=(3, 20),
        e__lora_embedding_B__default=(8, 3),
        c__lora_A__default__weight=(2, 8, 3),
        c__lora_B__default__weight=(8, 2, 1),
    )
    assert [pair.a for pair in torch_lora.QuotientAdamW(params.items()).pairs] == [
        "q.lora_A.default.weight",
        "e.lora_embedding_A.default",
        "c.lora_A.default.weight",
    ]


@pytest.mark.parametrize("method", ["delora", "gralora", "poly_lora"])
def test_other_methods_are_refused(method: str) -> None:
    params = _tensors(**{f"q__{method}_A__default": (3, 8), f"q__{method}_B__default": (6, 3)})
    with pytest.raises(ValueError, match="factors of another method"):
        torch_lora.QuotientAdamW(params.items())


EXPERTS = {"experts.lora_A.default.weight": (6, 8), "experts.lora_B.default.weight": (5, 6)}


def _experts_loss(a: Any, b: Any, einsum: Any) -> Any:
    """As PEFT multiplies them: A is experts first, B experts last."""
    return ((einsum("ore,eri->eoi", b.reshape(5, 2, 3), a.reshape(3, 2, 8)) - 1.0) ** 2).sum()


def _run_experts(start: dict[str, np.ndarray], **options: Any) -> dict[str, np.ndarray]:
    params = {name: torch.nn.Parameter(torch.tensor(x)) for name, x in start.items()}
    optimizer = torch_lora.QuotientAdamW(params.items(), lr=1e-2, **options)
    for _ in range(20):
        optimizer.zero_grad()
        _experts_loss(*params.values(), torch.einsum).backward()
        optimizer.step()
    return {name: x.detach().numpy() for name, x in params.items()}


def test_experts_in_two_matrices_are_refused_or_take_the_steps_of_jax(x64: None) -> None:
    rng = np.random.default_rng(4)
    start = {name: rng.normal(size=shape) for name, shape in EXPERTS.items()}
    with pytest.raises(ValueError, match="those of all experts, 'experts"):
        _run_experts(start)
    axes = {"**/experts": ("(expert basis) _", "_ (basis expert)")}
    gauges = go.lora(start, axes=axes, sizes={"expert": 3})
    ours = _run_experts(start, experts=3, weight_decay=0.1)
    for path, value in _run_experts(start, gauges=go.tools.to_json(gauges), weight_decay=0.1).items():
        np.testing.assert_array_equal(ours[path], value)
    params: Any = {path: jnp.asarray(x) for path, x in start.items()}
    tx = go.quotient_adamw(1e-2, gauges, weight_decay=0.1)
    state = tx.init(params)
    step = jax.jit(lambda p, s: tx.update(jax.grad(lambda q: _experts_loss(*q.values(), jnp.einsum))(p), s, p))
    for _ in range(20):
        updates, state = step(params, state)
        params = optax.apply_updates(params, updates)
    for path, value in params.items():
        np.testing.assert_allclose(ours[path], value, atol=1e-6, err_msg=path)
    one = _run_experts(start, experts=1)
    assert max(np.abs(one[path] - ours[path]).max() for path in one) > 1e-3
    with pytest.raises(ValueError, match="factors that are no matrices"):
        torch_lora.QuotientMuon([(k, torch.nn.Parameter(torch.tensor(x))) for k, x in start.items()], experts=3)


def test_convolutions_take_the_steps_of_jax(x64: None) -> None:
    rng = np.random.default_rng(6)
    shapes = {"c.lora_A.default.weight": (2, 4, 3), "c.lora_B.default.weight": (5, 2, 1)}
    start = {name: rng.normal(size=shape) for name, shape in shapes.items()}
    loss = lambda a, b: ((b.reshape(5, 2) @ a.reshape(2, 12) - 1.0) ** 2).sum()  # noqa: E731
    params = {name: torch.nn.Parameter(torch.tensor(x)) for name, x in start.items()}
    optimizer = torch_lora.QuotientAdamW(params.items(), lr=1e-2)
    jax_params: Any = {path: jnp.asarray(x) for path, x in start.items()}
    tx = go.quotient_adamw(1e-2, go.lora(jax_params), weight_decay=1e-4)
    state = tx.init(jax_params)
    for _ in range(10):
        optimizer.zero_grad()
        loss(*params.values()).backward()
        optimizer.step()
        updates, state = tx.update(jax.grad(lambda p: loss(*p.values()))(jax_params), state, jax_params)
        jax_params = optax.apply_updates(jax_params, updates)
    for path, value in jax_params.items():
        np.testing.assert_allclose(params[path].detach().numpy(), value, atol=1e-6, err_msg=path)


# Groups, and the Trainer --------------------------------------------------------------------------------


class Model(torch.nn.Module):
    """Two adapters and a bias, with PEFT's names."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.q = torch_lora.Adapter(torch.randn(2, 4), torch.randn(3, 2), torch.randn(3, 4)).double()
        self.k = torch_lora.Adapter(torch.randn(2, 4), torch.randn(3, 2), torch.randn(3, 4)).double()
        self.bias = torch.nn.Parameter(torch.ones(3, dtype=torch.float64))

    def loss(self) -> Any:
        x = torch.linspace(-1, 1, 20, dtype=torch.float64).reshape(5, 4)
        return ((self.q(x) * self.k(x) + self.bias - 1.0) ** 2).mean()


def _steps(model: Model, optimizer: Any, steps: int = 5) -> dict[str, np.ndarray]:
    for _ in range(steps):
        optimizer.zero_grad()
        model.loss().backward()
        optimizer.step()
    return {name: x.detach().numpy().copy() for name, x in model.named_parameters()}


def _trainer_groups(model: Model, decay: float) -> list[dict[str, Any]]:
    """Groups without names, as `transformers.Trainer` makes them."""
    named = list(model.named_parameters())
    return [
        {"params": [x for name, x in named if "bias" not in name], "weight_decay": decay},
        {"params": [x for name, x in named if "bias" in name], "weight_decay": 0.0},
    ]


WAYS = {
    "names": lambda make, model: make(model.named_parameters(), lr=1e-2, weight_decay=0.0),
    "model": lambda make, model: make(model, lr=1e-2, weight_decay=0.0),
    "tensors and model": lambda make, model: make(model.parameters(), lr=1e-2, weight_decay=0.0, model=model),
    "tensors and names": lambda make, model: make(
        model.parameters(), lr=1e-2, weight_decay=0.0, names=dict(model.named_parameters())
    ),
    "groups": lambda make, model: make(_trainer_groups(model, 0.0), lr=1e-2, model=model),
    "groups with names": lambda make, model: make(
        [{"params": list(model.named_parameters()), "lr": 1e-2, "weight_decay": 0.0}], lr=5.0
    ),
}


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("way", WAYS)
def test_all_ways_to_pass_parameters_are_one_run(name: str, way: str) -> None:
    make = MAKERS[name][1]
    model, other = Model(), Model()
    expected = _steps(model, WAYS["names"](make, model))
    for path, value in _steps(other, WAYS[way](make, other)).items():
        np.testing.assert_array_equal(value, expected[path], err_msg=path)


@pytest.mark.parametrize("name", MAKERS)
def test_tensors_without_names_say_what_to_pass(name: str) -> None:
    model = Model()
    for params in (model.parameters(), _trainer_groups(model, 0.0), [{"params": model.bias}]):
        with pytest.raises(ValueError, match="a parameter whose name is unknown") as error:
            MAKERS[name][1](params)
        assert f"{MAKERS[name][1].__name__}(groups, model=model)" in str(error.value)
    with pytest.raises(ValueError, match="a parameter whose name is unknown"):
        MAKERS[name][1]([{"params": [torch.nn.Parameter(torch.ones(2))]}], model=model)


@pytest.mark.parametrize("name", MAKERS)
def test_options_of_groups_are_used(name: str) -> None:
    """Decay of a group shrinks its products; a rate of zero holds its group."""
    make, ends = MAKERS[name][1], []
    for decay in (0.0, 0.5):
        model = Model()
        ends.append(_steps(model, make(_trainer_groups(model, decay), lr=1e-2, model=model)))
        start = dict(Model().named_parameters())
    for part in ("q", "k"):
        sizes = [
            np.linalg.norm(end[f"{part}.lora_B.default.weight"] @ end[f"{part}.lora_A.default.weight"]) for end in ends
        ]
        assert sizes[1] < 0.99 * sizes[0]
    model = Model()
    named = dict(model.named_parameters())
    groups = [
        {"params": [x for p, x in named.items() if f"{part}." in p or p == part], "lr": lr}
        for part, lr in (("q", 0.0), ("k", 1e-2), ("bias", 1e-2))
    ]
    for path, value in _steps(model, make(groups, model=model)).items():
        assert (np.abs(value - start[path].detach().numpy()).max() > 1e-3) == (not path.startswith("q.")), path


@pytest.mark.parametrize("name", MAKERS)
def test_a_pair_in_two_groups_needs_the_same_options(name: str) -> None:
    make, model, other = MAKERS[name][1], Model(), Model()

    def split(model: Model, **options: float) -> list[dict[str, Any]]:
        named = dict(model.named_parameters())
        return [
            {"params": [x for p, x in named.items() if "lora_B" not in p]},
            {"params": [x for p, x in named.items() if "lora_B" in p], **options},
        ]

    with pytest.raises(ValueError, match="two factors in groups with other options, 'q"):
        make(split(model, lr=1e-2), lr=1e-3, model=model)
    optimizer = make(split(model), lr=1e-2, weight_decay=0.0, model=model)
    expected = _steps(other, WAYS["names"](make, other))
    for path, value in _steps(model, optimizer).items():
        np.testing.assert_array_equal(value, expected[path], err_msg=path)
    optimizer.param_groups[1]["lr"] = 0.5  # as a schedule of one group would
    with pytest.raises(ValueError, match="two factors in groups with other options"):
        optimizer.step()


@pytest.mark.parametrize("name", MAKERS)
def test_the_state_of_groups_is_saved_and_loaded(name: str, tmp_path: Path) -> None:
    make, whole = MAKERS[name][1], Model()
    expected = _steps(whole, make(_trainer_groups(whole, 0.1), lr=1e-2, model=whole), 6)
    model = Model()
    first = make(_trainer_groups(model, 0.1), lr=1e-2, model=model)
    _steps(model, first, 3)
    torch.save(first.state_dict(), tmp_path / "state.pt")
    second = make(_trainer_groups(model, 0.1), lr=3.0, model=model)
    second.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    for path, value in _steps(model, second, 3).items():
        np.testing.assert_array_equal(value, expected[path], err_msg=path)


def test_a_group_that_is_added_later_brings_its_pairs() -> None:
    model = Model()
    optimizer = torch_lora.QuotientAdamW(model.q, lr=1e-2)
    assert len(optimizer.pairs) == 1
    optimizer.add_param_group({"params": [(f"k.{name}", x) for name, x in model.k.named_parameters()], "lr": 1e-3})
    assert [pair.a for pair in optimizer.pairs] == ["lora_A.default.weight", "k.lora_A.default.weight"]
    with pytest.raises(ValueError, match="a parameter whose name is unknown"):
        optimizer.add_param_group({"params": [model.bias]})


@pytest.mark.parametrize("size", [1e-12, 1e-30])
def test_a_step_of_muon_does_not_depend_on_the_size_of_gradients(size: float) -> None:
    start, steps = _start(False), []
    for scale in (1.0, size):
        params = {path: torch.nn.Parameter(torch.tensor(x)) for path, x in start.items() if "lora" in path}
        optimizer = torch_lora.QuotientMuon(params.items(), lr=1e-2)
        (scale * torch.stack([torch.sum(x**3) for x in params.values()]).sum()).backward()
        optimizer.step()
        steps.append({path: x.detach().numpy() - start[path] for path, x in params.items()})
    for path, step in steps[0].items():
        np.testing.assert_allclose(steps[1][path], step, atol=1e-5 * np.abs(step).max())


@pytest.mark.parametrize("name", MAKERS)
def test_a_factor_that_is_frozen_later_is_named(name: str) -> None:
    """Its partner alone would not be trained, without a word."""
    params = {path: torch.nn.Parameter(torch.tensor(x)) for path, x in _start(False).items()}
    optimizer = MAKERS[name][1](params.items(), lr=1e-2)
    frozen = next(path for path in params if "lora_A" in path)
    params[frozen].requires_grad_(False)
    _loss(params, torch.sum).backward()
    with pytest.raises(ValueError, match=f"a factor without a gradient, '{frozen}'"):
        optimizer.step()
