"""A tied model with a head of its own computes what it did, and then its stream rotates."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax.core import FrozenDict

import gauge_optax as go
from gauge_optax.binding import leaves_by_path, with_leaves
from models import lm
from tests.cases import lm_parts
from tests.orbit.test_rotate import numbers
from tests.refusals import each_refused, refused

SIZES: dict[str, Any] = dict(vocab=11, d_model=8, layers=1, heads=2, kv_heads=2, d_head=4, d_ff=12, max_len=5)
TIED = {
    "rms": lm.llama_config(**SIZES, tied=True), "1+": lm.llama_config(**SIZES, tied=True, norm_one_plus=True),
    "layer": lm.LMConfig(**SIZES, tied=True),
}
TOKENS = np.arange(12).reshape(2, 6) % 11
TABLE, SCALE = "embed/embedding", "final_norm/scale"


def _params(norm: str, dtype: str = "float64") -> Any:
    return jax.tree.map(lambda x: jnp.asarray(x, dtype), numbers(TIED[norm]))


def _untied(params: Any, norm: str) -> Any:
    options = dict[str, Any](one_plus=norm == "1+", bias="final_norm/bias" if norm == "layer" else None)
    return go.orbit.untie(params, TABLE, "lm_head/kernel", SCALE, **options)


def _functions(norm: str) -> tuple[Any, Any, Any]:
    """The loss of the tied model and of the untied one, and the rotation of the latter's stream."""
    config = dataclasses.replace(TIED[norm], tied=False)
    (stream,) = (gauge for gauge in lm.whole_gauges(config) if gauge.name == "residual_rotation")
    return lm_parts(TIED[norm])[1], lm_parts(config)[1], stream


@pytest.mark.parametrize("norm", TIED)
def test_the_function_stays_and_then_the_stream_rotates(norm: str, x64: None) -> None:
    params, (tied, loss, stream) = _params(norm), _functions(norm)
    untied = _untied(params, norm)
    np.testing.assert_allclose(loss(untied, TOKENS), tied(params, TOKENS), rtol=1e-12)
    assert set(leaves_by_path(untied)) == {*leaves_by_path(params), "lm_head/kernel"}
    assert "lm_head/kernel" not in leaves_by_path(params)
    np.testing.assert_array_equal(untied["final_norm"]["scale"], 0.0 if norm == "1+" else 1.0)
    rotated = go.orbit.rotate(untied, stream, "random", fn=loss, batch=TOKENS)
    np.testing.assert_allclose(loss(rotated, TOKENS), loss(untied, TOKENS), rtol=1e-11)
    assert not np.allclose(rotated["embed"]["embedding"], untied["embed"]["embedding"], atol=0.1)


@pytest.mark.parametrize("norm", ["rms", "1+"])
def test_a_tied_table_does_not_rotate(norm: str, x64: None) -> None:
    """Read as a writer alone: without the function the weights are wrong, with it they are refused."""
    params, (tied, _, stream) = _params(norm), _functions(norm)
    read, write = ({x.pattern: x.axes for x in stream.specs if x.argument == role} for role in ("read", "write"))
    del read["lm_head/kernel"]
    norms = [gauge for gauge in lm.whole_gauges(TIED[norm]) if gauge.name == "norm_scale"]
    alone = go.residual_rotation(read, write, norms)
    rotated = functools.partial(go.orbit.rotate, params, alone, "random")
    assert abs(float(tied(rotated(), TOKENS) - tied(params, TOKENS))) > 0.1
    with refused("another function", "go.orbit.untie"):
        rotated(fn=tied, batch=TOKENS)
    with refused("another function", "by nan"):  # behind an output that stays
        rotated(fn=lambda p, t: (jnp.ones(2), jnp.nan * tied(p, t)), batch=TOKENS)
    with refused("nothing to compare", "int"):
        rotated(fn=lambda p, t: t, batch=TOKENS)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_roundoff_of_the_weights_is_no_other_function(dtype: str) -> None:
    untied, (_, loss, stream) = _untied(_params("rms", dtype), "rms"), _functions("rms")
    rotated = go.orbit.rotate(untied, stream, fn=loss, batch=TOKENS)
    assert {x.dtype.name for x in jax.tree.leaves((untied, rotated))} == {dtype}


@pytest.mark.parametrize("kind", [FrozenDict, nnx.State])
def test_a_tree_keeps_its_kind(kind: Any) -> None:
    tree: Any = kind({"e": {"table": jnp.ones((3, 2))}})
    untied = go.orbit.untie(tree, "e/table", "head/kernel")
    assert isinstance(untied, kind) and isinstance(untied["head"], kind)
    assert untied["head"]["kernel"].shape == (2, 3)


untie, MLP = functools.partial(go.orbit.untie, _params("rms", "float32")), "blocks/0/mlp"
NO_SCALE = with_leaves(_params("layer", "float32"), {SCALE: jnp.ones(8).at[3].set(0.0)})
test_errors = each_refused([
    (lambda: untie("embed", "head", SCALE), "no leaf at table='embed'"),
    (lambda: untie(f"{MLP}/gate/kernel", "head", SCALE), f"'{SCALE}' does not fit the table '{MLP}/gate/kernel'"),
    *((functools.partial(untie, TABLE, head), "no path for the head") for head in (None, "", "/head", "a//b")),
    (lambda: untie(TABLE, "head", SCALE, bias=SCALE), "one leaf as scale and as bias"),
    (lambda: untie(TABLE, "head", SCALE, one_plus=None), "bad one_plus"),  # type: ignore[arg-type]
    (lambda: untie(SCALE, "head"), f"no table at '{SCALE}'"),
    (lambda: untie(TABLE, f"{MLP}/up/kernel", SCALE), f"a leaf at head='{MLP}/up/kernel'"),
    (lambda: untie(TABLE, f"{MLP}/up", SCALE), f"(?s)a leaf at head='{MLP}/up'.*'{MLP}/up/kernel'"),  # and its leaves
    (lambda: untie(TABLE, "embed", SCALE), f"(?s)a leaf at head='embed'.*'{TABLE}'"),
    (lambda: untie(TABLE, f"{SCALE}/kernel", SCALE), f"(?s)no place .* '{SCALE}/kernel'.*not below '{SCALE}'"),
    (lambda: _untied(NO_SCALE, "layer"), f"a scale of zero at '{SCALE}'"),  # by which a bias would be divided
])
