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


@pytest.mark.parametrize("name", MAKERS)
def test_twins_take_one_way(name: str) -> None:
    start = _start(False)
    twin, rng = dict(start), np.random.default_rng(2)
    for pair in SHAPES:
        s = rng.normal(size=(SHAPES[pair][0],) * 2)
        twin[f"{pair}.lora_A.default.weight"] = s @ start[f"{pair}.lora_A.default.weight"]
        twin[f"{pair}.lora_B.default.weight"] = start[f"{pair}.lora_B.default.weight"] @ np.linalg.inv(s)
    ends = [_in_torch(name, x, 20) for x in (start, twin)]
    for pair in SHAPES:
        one, two = (x[f"{pair}.lora_B.default.weight"] @ x[f"{pair}.lora_A.default.weight"] for x in ends)
        np.testing.assert_allclose(one, two, atol=1e-8)


def test_bindings_from_json_are_those_of_names() -> None:
    start = _start(False)
    gauges = go.to_json(go.lora({path: jnp.asarray(x) for path, x in start.items() if "lora" in path}))
    names = torch_lora.pairs_of(start)
    assert sorted(torch_lora.pairs_of(start, gauges)) == sorted(names) and len(names) == 3
    for path, value in _in_torch("adamw", start, 3, gauges).items():
        np.testing.assert_array_equal(value, _in_torch("adamw", start, 3)[path])


@pytest.mark.parametrize(
    ("names", "gauges", "message"),
    [
        (["layer.weight"], None, "no pair of LoRA factors"),
        (["q.lora_A.default.weight"], None, "a factor without its partner"),
        (["a"], go.to_json(go.logit_shift({"head": "_ vocab"})), "a gauge that is no pair of LoRA factors"),
        (["a", "b"], go.to_json(go.head_linear({"a": "_ basis"}, {"b": "basis _"})), "factors in another layout"),
    ],
)
def test_what_does_not_fit_says_what_to_pass(names: list[str], gauges: str | None, message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        torch_lora.pairs_of(names, gauges)
    assert all(part in str(error.value) for part in ("found:", "expected:", "remedy:"))


@pytest.mark.parametrize("name", MAKERS)
def test_a_state_is_saved_and_loaded(name: str, tmp_path: Path) -> None:
    start = _start(False)
    whole = _in_torch(name, start, 6)
    params = {path: torch.nn.Parameter(torch.tensor(x)) for path, x in start.items()}
    file = tmp_path / "state.pt"
    for part in range(2):
        optimizer = MAKERS[name][1](params.items(), lr=1e-2, **MAKERS[name][2])
        if part:
            optimizer.load_state_dict(torch.load(file, weights_only=True))
        for _ in range(3):
            optimizer.zero_grad()
            _loss(params, torch.sum).backward()
            optimizer.step()
        torch.save(optimizer.state_dict(), file)
    for path, value in whole.items():
        np.testing.assert_array_equal(params[path].detach().numpy(), value)
