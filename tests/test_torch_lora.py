"""The PyTorch file takes the steps of the JAX functions; without torch these tests are skipped."""

import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import gauge_optax as go
from tests.refusals import refused
from tests.twins import trained

torch = pytest.importorskip("torch")
Module: Any = torch.nn.Module

from examples import torch_lora  # noqa: E402

A, B = "lora_A.default.weight", "lora_B.default.weight"
MAKERS = {"adamw": torch_lora.QuotientAdamW, "muon": torch_lora.QuotientMuon}
by_maker = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)


def drawn(shapes: Mapping[str, tuple[int, ...]], seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {name: rng.normal(size=shape) for name, shape in shapes.items()}


def parameters(values: dict[str, np.ndarray]) -> dict[str, Any]:
    return {name: torch.nn.Parameter(torch.tensor(x)) for name, x in values.items()}


def arrays(named: Iterable[tuple[str, Any]]) -> dict[str, np.ndarray]:
    return {name: x.detach().double().numpy().copy() for name, x in named}


def take_steps(optimizer: Any, loss: Callable[[], Any], named: Any, steps: int) -> dict[str, np.ndarray]:
    """The arrays of these names after some steps."""
    for _ in range(steps):
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()
    return arrays(named)


# Steps --------------------------------------------------------------------------------------------------


def adapters_loss(p: Any, library: Any) -> Any:
    """Two layers and a head, each with a target, and a weight without factors."""
    total = (p["other.weight"] ** 4).sum()
    for name, target in TARGETS.items():
        total = total + ((p[f"{name}.{B}"] @ p[f"{name}.{A}"] - library.asarray(target)) ** 2).sum()
    return total


def product_loss(p: Any, library: Any) -> Any:
    """Experts as PEFT multiplies them: A is experts first, B experts last; or a convolution."""
    a, b = p.values()
    experts = a.ndim == 2
    equation, b_shape, a_shape = ("ore,eri->eoi", (5, 2, 3), (3, 2, 8)) if experts else ("or,rik->oik", (5, 2), a.shape)
    return ((library.einsum(equation, b.reshape(b_shape), a.reshape(a_shape)) - 1.0) ** 2).sum()


TARGETS = drawn({"layers.0.q": (5, 7), "layers.1.q": (5, 7), "head": (6, 4)}, seed=1)
RANKS = {"layers.0.q": 3, "layers.1.q": 3, "head": 2}
SHAPES = {f"{name}.{A}": (rank, TARGETS[name].shape[1]) for name, rank in RANKS.items()}
SHAPES |= {f"{name}.{B}": (TARGETS[name].shape[0], rank) for name, rank in RANKS.items()}
START = drawn(SHAPES | {"other.weight": (4, 3)})
EXPERTS = drawn({f"experts.{A}": (6, 8), f"experts.{B}": (5, 6)})
EXPERTS_GAUGES = go.lora(EXPERTS, axes={"**/experts": ("(expert basis) _", "_ (basis expert)")}, sizes={"expert": 3})
ZERO_B = {name: 0.0 * x if "lora_B" in name else x for name, x in START.items()}
CONVOLUTION = drawn({f"c.{A}": (2, 4, 3), f"c.{B}": (5, 2, 1)})


def in_torch(
    make: Any, start: dict[str, np.ndarray], loss: Any = adapters_loss, steps: int = 20, **options: Any
) -> dict[str, np.ndarray]:
    params = parameters(start)
    return take_steps(make(params.items(), lr=1e-2, **options), lambda: loss(params, torch), params.items(), steps)


def gauges_of(start: dict[str, np.ndarray]) -> Any:
    return go.lora({name: jnp.asarray(x) for name, x in start.items() if "lora" in name})


RUNS: dict[str, tuple[str, dict[str, np.ndarray], Any]] = {
    "adamw": ("adamw", START, adapters_loss), "muon": ("muon", START, adapters_loss),
    "adamw from B = 0": ("adamw", ZERO_B, adapters_loss), "muon from B = 0": ("muon", ZERO_B, adapters_loss),
    "experts": ("adamw", EXPERTS, product_loss), "convolution": ("adamw", CONVOLUTION, product_loss),
}


@pytest.mark.parametrize("row", RUNS)
def test_twenty_steps_are_those_of_the_jax_function(row: str, x64: None) -> None:
    """Whether bindings are found by names or given as JSON."""
    name, start, loss = RUNS[row]
    options: Any
    gauges, options = (EXPERTS_GAUGES, {"experts": np.int64(3)}) if row == "experts" else (gauges_of(start), {})
    ours = in_torch(MAKERS[name], start, loss, weight_decay=0.1, **options)
    from_json = in_torch(MAKERS[name], start, loss, weight_decay=0.1, gauges=go.tools.to_json(gauges))
    np.testing.assert_equal(from_json, ours)
    tx = getattr(go, f"quotient_{name}")(1e-2, gauges, weight_decay=0.1)
    params = {path: jnp.asarray(x) for path, x in start.items()}
    for path, value in trained(tx, lambda p: loss(p, jnp), params, 20)[0].items():
        np.testing.assert_allclose(ours[path], value, atol=1e-6, err_msg=path)
        assert np.abs(value - start[path]).max() > 1e-2


def test_experts_in_two_matrices_need_their_number() -> None:
    with refused("those of all experts, 'experts"):
        torch_lora.QuotientAdamW(parameters(EXPERTS).items())
    with refused("factors that are no matrices"):
        torch_lora.QuotientMuon(parameters(EXPERTS).items(), experts=3)


@pytest.mark.parametrize("size", [1e-12, 1e-30])
def test_a_step_of_muon_does_not_depend_on_the_size_of_gradients(size: float) -> None:
    losses = (lambda p, _, c=c: c * sum((x**3).sum() for x in p.values()) for c in (1.0, size))
    step, other = (in_torch(torch_lora.QuotientMuon, START, loss, 1) for loss in losses)
    for path in SHAPES:
        one, two = step[path] - START[path], other[path] - START[path]
        np.testing.assert_allclose(two, one, atol=1e-5 * np.abs(one).max())


# What is no product of two factors ----------------------------------------------------------------------


@pytest.mark.parametrize(("names", "gauges", "message"), [
    ("layer.weight", None, "no pair of LoRA factors"),
    ("q.lora_A.default.weight", None, "a factor without its partner"),
    ("a", go.logit_shift({"head": "_ vocab"}), "a gauge that is no pair of LoRA factors"),
    ("a b", go.head_linear({"a": "_ basis"}, {"b": "basis _"}), "factors in another layout"),
    ("q.lora_A.default q.lora_B.default q.lora_E.default", None, "may stand between"),
    ("experts.lora_A.default experts.lora_B.default", None, "may be those of all experts"),
    *[(f"q.{x}_A.default q.{x}_B.default", None, "of another method") for x in ("delora", "gralora", "poly_lora")],
])
def test_what_does_not_fit_says_what_to_pass(names: str, gauges: Any, message: str) -> None:
    with refused(message):
        torch_lora.pairs_of(names.split(), gauges and go.tools.to_json(gauges))


@pytest.mark.parametrize(("text", "message"), [
    *[(text, "no list of gauges") for text in ("[]", "{}", "text", '{"format": 2, "gauges": []}')],
    ('{"format": 1, "gauges": [{"kind": "head_linear"}]}', "a gauge that is no pair of LoRA factors"),
    ('{"format": 1, "gauges": [{"kind": "head_linear", "left": {"a": "(e basis) _"}, "right": {"b": "_ (basis e)"}}]}',
     "factors in another layout"),
])
def test_json_of_another_form_is_refused(text: str, message: str) -> None:
    with refused(message):
        torch_lora.pairs_of(["a", "b"], text)


@pytest.mark.parametrize("experts", [0, -1, 2.5, True])
def test_a_number_of_experts_that_is_none_is_refused(experts: Any) -> None:
    with refused("bad experts"):
        torch_lora.pairs_of([f"experts.{A}", f"experts.{B}"], experts=experts)


PLAIN = {f"q.{A}": (3, 8), f"q.{B}": (6, 3)}
BETWEEN = {
    "q.lora_E.default": (3, 1), "q.lora_mixer.default.weight": (3, 3), "q.lora_diag.default": (3,),
    "q.default_lora_latent_mapping.weight": (3, 3), "q.gate": (3,), "q.lora_xs.default": (9,),
    "q.vera_lambda_d.default": (3,), "q.lora_A.default.bias": (3,), "q.lora_magnitude.default": (3,),
}


@pytest.mark.parametrize("name", BETWEEN)
@pytest.mark.parametrize("is_trained", [True, False])
def test_a_tensor_between_the_factors_is_refused_by_name(name: str, is_trained: bool) -> None:
    params = parameters(drawn(PLAIN | {name: BETWEEN[name]}))
    params[name].requires_grad_(is_trained)
    with refused("stands between", name):
        torch_lora.QuotientAdamW(params.items())


@pytest.mark.parametrize("out", [6, 3])
def test_magnitudes_of_dora_and_biases_of_b_pass(out: int) -> None:
    shapes = {f"q.{A}": (3, 8), f"q.{B}": (out, 3), "q.lora_B.default.bias": (out,), "q.lora_alpha": (),
              "q.lora_magnitude_vector.default.weight": (out,), "q.base_layer.weight": (3, 3)}
    shapes |= {"e.lora_embedding_A.default": (3, 20), "e.lora_embedding_B.default": (8, 3)}
    shapes |= {f"c.{A}": (2, 8, 3), f"c.{B}": (8, 2, 1)}
    expected = [f"q.{A}", "e.lora_embedding_A.default", f"c.{A}"]
    assert [pair.a for pair in torch_lora.QuotientAdamW(parameters(drawn(shapes)).items()).pairs] == expected
    assert [pair.a for pair in torch_lora.pairs_of(list(shapes))] == expected


# Groups, and the Trainer --------------------------------------------------------------------------------


class Model(Module):
    """Two adapters and a bias, with PEFT's names."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.q, self.k = (torch_lora.Adapter(*map(torch.randn, (2, 3, 3), (4, 2, 4))).double() for _ in "qk")
        self.bias = torch.nn.Parameter(torch.ones(3, dtype=torch.float64))

    def loss(self) -> Any:
        x = torch.linspace(-1, 1, 20, dtype=self.bias.dtype).reshape(5, 4)
        return ((self.q(x) * self.k(x) + self.bias - 1.0) ** 2).mean()


def run(model: Model, optimizer: Any, steps: int = 5) -> dict[str, np.ndarray]:
    return take_steps(optimizer, model.loss, model.named_parameters(), steps)


def groups_of(model: Model, part: str, *options: dict[str, float]) -> list[dict[str, Any]]:
    """Two groups without names, as `transformers.Trainer` makes them: those whose name has the part are the second."""
    named = list(model.named_parameters())
    return [{"params": [x for name, x in named if (part in name) == own], **options[own]} for own in (False, True)]


def with_groups(make: Any, model: Model, decay: float = 0.0, **options: float) -> Any:
    """As the Trainer makes it: biases do not decay."""
    groups = groups_of(model, "bias", {"weight_decay": decay}, {"weight_decay": 0.0})
    return make(groups, model=model, **{"lr": 1e-2, **options})


OPTIONS = {"lr": 1e-2, "weight_decay": 0.0}
WAYS = {
    "names": lambda make, model: make(model.named_parameters(), **OPTIONS),
    "model": lambda make, model: make(model, **OPTIONS),
    "tensors and model": lambda make, model: make(model.parameters(), model=model, **OPTIONS),
    "tensors and names": lambda make, model: make(model.parameters(), names=dict(model.named_parameters()), **OPTIONS),
    "groups": with_groups,
    "groups with names": lambda make, model: make([{"params": list(model.named_parameters()), **OPTIONS}], lr=5.0),
    "a pair in two groups": lambda make, model: make(groups_of(model, "lora_B", {}, {}), model=model, **OPTIONS),
}


@by_maker
@pytest.mark.parametrize("way", WAYS)
def test_all_ways_to_pass_parameters_are_one_run(make: Any, way: str) -> None:
    model, other = Model(), Model()
    np.testing.assert_equal(run(other, WAYS[way](make, other)), run(model, WAYS["names"](make, model)))


@by_maker
def test_tensors_without_names_say_what_to_pass(make: Any) -> None:
    model, unknown = Model(), {"params": [torch.nn.Parameter(torch.ones(2))]}
    for params in (model.parameters(), groups_of(model, "q.", {}, {}), [{"params": model.bias}], [unknown]):
        with refused("a parameter whose name is unknown", f"{make.__name__}(groups, model=model)"):
            make(params, **({"model": model} if params == [unknown] else {}))


@by_maker
def test_options_of_groups_are_used(make: Any) -> None:
    """Decay of a group shrinks its products; a rate of zero holds its group."""
    models = Model(), Model()
    ends = [run(model, with_groups(make, model, decay)) for model, decay in zip(models, (0.0, 0.5), strict=True)]
    for part in "qk":
        free, decayed = (np.linalg.norm(end[f"{part}.{B}"] @ end[f"{part}.{A}"]) for end in ends)
        assert decayed < 0.99 * free
    model = Model()
    start = arrays(model.named_parameters())
    for path, value in run(model, make(groups_of(model, "q.", {"lr": 1e-2}, {"lr": 0.0}), model=model)).items():
        assert (np.abs(value - start[path]).max() > 1e-3) == (not path.startswith("q.")), path


@by_maker
def test_a_pair_in_two_groups_needs_the_same_options(make: Any) -> None:
    model = Model()
    with refused("two factors in groups with other options, 'q"):
        make(groups_of(model, "lora_B", {}, {"lr": 1e-2}), lr=1e-3, model=model)
    optimizer = WAYS["a pair in two groups"](make, model)
    run(model, optimizer)
    optimizer.param_groups[1]["lr"] = 0.5  # as a schedule of one group would
    with refused("two factors in groups with other options"):
        optimizer.step()


@by_maker
@pytest.mark.parametrize("dtype", ["float64", "bfloat16", "float16"])
def test_the_state_of_groups_is_saved_and_loaded(make: Any, dtype: str, tmp_path: Path) -> None:
    """Of factors of 16 bits too, whose state has float32."""
    whole, model = (Model().to(getattr(torch, dtype)) for _ in range(2))
    expected = run(whole, with_groups(make, whole, 0.1), 6)
    first, second = with_groups(make, model, 0.1), with_groups(make, model, 0.1, lr=3.0)
    run(model, first, 3)
    torch.save(first.state_dict(), tmp_path / "state.pt")
    second.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    np.testing.assert_equal(run(model, second, 3), expected)


@by_maker
@pytest.mark.parametrize(("a", "b", "said"), [
    ((8, 4), (6, 8), "lower the rank to 4 or less"), ((3, 1), (5, 3), ""), ((5, 4), (4, 5), "to 4 or less")])
def test_a_pair_without_a_factor_of_full_rank_is_told_once(make: Any, a: Any, b: Any, said: str) -> None:
    """Products of twins trained apart, without a word."""
    named = parameters(drawn({A: a, B: b}))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        take_steps(make(named.items()), lambda: ((named[B] @ named[A] - 1.0) ** 2).sum(), named.items(), 2)
    assert len(told) == bool(said) and all(said in str(x.message) and A in str(x.message) for x in told)


def test_a_group_that_is_added_later_brings_its_pairs() -> None:
    model = Model()
    optimizer = torch_lora.QuotientAdamW(model.q, lr=1e-2)
    optimizer.add_param_group({"params": [(f"k.{name}", x) for name, x in model.k.named_parameters()], "lr": 1e-3})
    assert [pair.a for pair in optimizer.pairs] == [A, f"k.{A}"]
    with refused("a parameter whose name is unknown"):
        optimizer.add_param_group({"params": [model.bias]})


@by_maker
def test_a_factor_that_is_frozen_later_is_named(make: Any) -> None:
    """Its partner alone would not be trained, without a word."""
    model = Model()
    optimizer = WAYS["model"](make, model)
    model.q.lora_A.default.weight.requires_grad_(False)
    with refused(f"a factor without a gradient, 'q.{A}'"):
        run(model, optimizer)
