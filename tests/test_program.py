"""What an update is traced and compiled to: equations, control flow, memory, beside `optax.adamw`'s.

Apart from the tests of the same transformations: programs of real sizes are more than a process may map beside theirs.
They are compiled from shapes alone, by the quick compiler of tests, which takes the memory that the usual one takes.
"""

import functools
import logging
from typing import Any
from unittest import mock

import chex
import jax
import jax.numpy as jnp
import optax
import pytest

import gauge_optax as go
from gauge_optax.gauges import bound
from gauge_optax.slice import Slice
from models import lm
from tests.cases import GAUGE_CASES
from tests.programs import primitives
from tests.quick import jit
from tests.tolerances import tolerance
from tests.twins import normal_like

LLAMA = lm.llama_config(vocab=256, d_model=64, layers=2, heads=4, kv_heads=2, d_head=16, d_ff=172, max_len=64)
WIDE = lm.llama_config(vocab=256, d_model=2048, layers=1, heads=16, kv_heads=16, d_head=128, d_ff=8192)
GPT2 = lm.LMConfig(
    vocab=50257, d_model=768, layers=12, heads=12, kv_heads=12, d_head=64, d_ff=3072, mlp="gelu", tied=True
)


def _shapes(config: lm.LMConfig) -> Any:
    return jax.eval_shape(lambda: lm.params_and_loss(config, jax.random.key(0))[0])


def _equations(tx: optax.GradientTransformation) -> list[str]:
    params = _shapes(LLAMA)
    return primitives(jax.make_jaxpr(tx.update)(params, jax.eval_shape(tx.init, params), params).jaxpr)


def _peak(tx: optax.GradientTransformation, config: lm.LMConfig) -> int:
    """Bytes that a compiled update holds at once, parameters and state donated."""
    params = _shapes(config)

    def step(params: Any, state: Any, grads: Any) -> tuple[Any, Any]:
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    state = jax.eval_shape(tx.init, params)
    plan = jit(step, donate_argnums=(0, 1)).lower(params, state, params).compile().memory_analysis()
    held = plan.argument_size_in_bytes + plan.output_size_in_bytes - plan.alias_size_in_bytes
    return int(held + plan.temp_size_in_bytes)


@pytest.mark.skipif(jax.__version_info__ < (0, 9), reason="the budgets are those of newer compilers")
@pytest.mark.parametrize("linear", [False, True])
def test_the_program_is_small_and_straight_without_callbacks_and_lapack(linear: bool) -> None:
    found = _equations(go.quotient(optax.adamw(1e-3), lm.gauges(LLAMA, linear)))
    print(f"{len(found)} equations")
    assert linear or (len(found) <= 1600 and not {"while", "cond"} & set(found))
    lapack = {"svd", "eigh", "qr", "geqrf", "householder_product", "lu", "cholesky", "triangular_solve"}
    assert not set(found) & lapack and not any("callback" in name for name in found), set(found)


@pytest.mark.skipif(jax.__version_info__ < (0, 9), reason="older versions trace to more equations")
def test_the_program_of_ddc_has_one_conditional_at_most() -> None:
    found, plain = _equations(go.ddc_adamw(1e-3, lm.gauges(LLAMA))), _equations(optax.adamw(1e-3))
    print(f"{len(found)} equations, AdamW {len(plain)}")
    assert len(found) <= 9.1 * len(plain)
    assert found.count("cond") <= 1 and "while" not in found


@pytest.mark.parametrize("name", ["quotient_adamw", "quotient_muon", "ddc_adamw", "ddc_muon"])
def test_a_trace_binds_the_product_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many transformations a chain has: a binding looks at all leaves."""
    params, tx = _shapes(LLAMA), getattr(go, name)(1e-3, lm.gauges(LLAMA))
    state, of = jax.eval_shape(tx.init, params), mock.Mock(side_effect=Slice.of)
    monkeypatch.setattr(Slice, "of", of)
    bound._by_shapes.cache_clear()
    bound._sliced.cache_clear()
    jax.make_jaxpr(tx.update)(params, state, params)
    assert of.call_count == 1


@pytest.mark.skipif(jax.__version_info__ < (0, 9), reason="the budgets are those of newer compilers")
@pytest.mark.slow_rows("*, GPT-2")
@pytest.mark.parametrize(("name", "config", "most"), [
    ("quotient_adamw", LLAMA, 1.35),  # what wide kernels hide shows here
    ("quotient_adamw", WIDE, 1.25), ("quotient_adamw", GPT2, 1.25),
    ("ddc_adamw", WIDE, 1.35), ("ddc_adamw", GPT2, 1.35),
], ids=["quotient, small", "quotient, 1B layer", "quotient, GPT-2", "ddc, 1B layer", "ddc, GPT-2"])
def test_compiled_memory_stays_near_adamws(name: str, config: lm.LMConfig, most: float) -> None:
    tx = getattr(go, name)(1e-3, lm.gauges(config), weight_decay=1e-4)
    ratio = _peak(tx, config) / _peak(optax.adamw(1e-3), config)
    print(f"peak {ratio:.2f} of AdamW's")
    assert ratio <= most


def test_equations_are_linear_in_unrolled_layers_and_flat_in_scanned_ones() -> None:
    def rotation(layers: int, scanned: bool) -> int:
        shape, axes = ((layers, 6, 2, 4), "layer _ head basis") if scanned else ((6, 2, 4), "_ head basis")
        params = {str(k): {n: jnp.ones(shape) for n in ("q", "k")} for k in range(1 if scanned else layers)}
        tx = go.quotient(optax.adamw(1e-3), go.head_rotation({"{i}/q": axes, "{i}/k": axes}))
        return len(primitives(jax.make_jaxpr(tx.update)(params, jax.eval_shape(tx.init, params), params).jaxpr))

    two, four, eight = (rotation(n, False) for n in (2, 4, 8))
    assert abs((eight - four) - 2 * (four - two)) <= 4
    assert rotation(2, True) == rotation(8, True)


@pytest.mark.slow_rows("*_muon-*", "ddc_*")
@pytest.mark.parametrize(("name", "width"), [  # widths of no other test: nothing is compiled yet
    ("quotient_adamw", 20), ("quotient_muon", 44), ("ddc_adamw", 28), ("ddc_muon", 36)
])
def test_init_outside_jit_compiles_few_programs(name: str, width: int, caplog: pytest.LogCaptureFixture) -> None:
    config = lm.LMConfig(vocab=13, d_model=width, layers=2, heads=2, kv_heads=2, d_head=width // 2, d_ff=3 * width)
    params, tx = normal_like(0, _shapes(config)), getattr(go, name)(1e-3, lm.gauges(config))

    def compiled() -> int:
        caplog.clear()
        with jax.log_compiles(), caplog.at_level(logging.WARNING):
            tx.init(params)
        return sum(record.getMessage().startswith("Compiling ") for record in caplog.records)

    assert 0 < compiled() <= 16
    assert compiled() == 0


MAKERS: dict[str, Any] = {
    **{name: functools.partial(getattr(go, name), 1e-2) for name in ("ddc_muon", "ddc_adamw", "quotient_muon")},
    "quotient": functools.partial(go.quotient, optax.adamw(1e-2)),
    "gauge_fix": functools.partial(go.orbit.gauge_fix, optax.adam(1e-2), on_unknown="keep"),
}
FUSED = ("head_rotation/fused", "rope_torus/partial", "rope_linear/partial", "logit_shift/padded",
         "logit_shift/two_heads", "head_linear/fused")


@pytest.mark.slow
@pytest.mark.parametrize(("name", "row"), [
    (name, row) for name in MAKERS for row in FUSED if not (name.startswith("ddc") and row.startswith("head_linear"))
])
def test_fusing_changes_no_number(name: str, row: str, x64: None) -> None:
    """A step on leaves of which gauges bind a part, compiled with and without the compiler's fusion of operations.

    XLA:CPU writes a part in place, in one loop with what computes it. Where the new part needs entries of the old one
    that the loop has overwritten, the result is wrong without a message (openxla/xla issue 49176).
    """
    case: Any = next(case for case in GAUGE_CASES if case.name == row)
    params, tx = case.params(jax.random.key(1)), MAKERS[name](gauges=case.gauges())

    def step(params: Any) -> Any:
        return tx.update(jax.grad(case.loss)(params), tx.init(params), params)[0]

    # A new function per program: one function is lowered once.
    fused = jit(lambda p: step(p))(params)
    # Without fusion, the older emitters, which tests use elsewhere, are wrong by 4e-2 here.
    unfused = {"xla_disable_hlo_passes": "fusion", "xla_cpu_use_fusion_emitters": True}
    plain = jax.jit(step, compiler_options=unfused)(params)
    chex.assert_trees_all_close(fused, plain, rtol=0.0, atol=tolerance("oracle"))
