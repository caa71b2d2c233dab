"""Functions whose gauges are known: `models.lm` under every switch, unrolled and scanned."""

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import gauge_optax as go
from gauge_optax.gauges.gauge import Gauge
from models import lm
from models.random_decoders import Spec


class Net(NamedTuple):
    """What `go.discover` takes, and what it should find."""

    fn: Callable[[Any, Any], jax.Array]
    params: Any
    batches: list[np.ndarray]
    gauges: Callable[[bool], list[Gauge]]


def near(params: Any, seed: int) -> Any:
    """A float64 point that discovery has not seen."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda x: np.asarray(x, np.float64) + 0.3 * rng.standard_normal(np.shape(x)), params)


def _config(norm: Any, mlp: Any, kv_heads: int, **switches: Any) -> lm.LMConfig:
    sizes = dict[str, Any](vocab=11, d_model=8, layers=2, heads=4, d_head=4, d_ff=10, max_len=6)
    return lm.LMConfig(**sizes, norm=norm, mlp=mlp, kv_heads=kv_heads, **{"bias": False, **switches})


CONFIGS: Mapping[str, lm.LMConfig] = {
    "gpt": _config("layernorm", "relu", 4, bias=True),
    "llama": _config("rmsnorm", "swiglu", 2, rope=True),
    "qwen": _config("rmsnorm", "swiglu", 2, rope=True, qk_norm=True),
    "gpt_gqa": _config("layernorm", "relu", 2, bias=True),
    "gpt_mqa": _config("layernorm", "relu", 1, bias=True),
    "gpt_tied": _config("layernorm", "relu", 4, bias=True, tied=True),
    "gpt_swiglu": _config("layernorm", "swiglu", 4, bias=True),
    "rms_gelu_tied": _config("rmsnorm", "gelu", 2, tied=True),
    "rms_relu2_mqa": _config("rmsnorm", "relu2", 1, bias=True, tied=True, norm_one_plus=True),
    "gemma3": _config("rmsnorm", "swiglu", 2, rope=True, norm_one_plus=True, tied=True, qk_norm=True),
    "qwen_no_rope": _config("rmsnorm", "relu", 2, qk_norm=True, bias=True),
    "qwen_layernorm": _config("layernorm", "gelu", 1, rope=True, qk_norm=True, bias=True, tied=True),
}


def _batches(config: lm.LMConfig) -> list[np.ndarray]:
    return list(np.random.default_rng(0).integers(0, config.vocab, (2, 2, 6)))


def unrolled(config: lm.LMConfig) -> Net:
    """`models.lm` as it stands."""
    graph, state = nnx.split(lm.build(config, nnx.Rngs(0)))
    return Net(lambda p, tokens: nnx.merge(graph, p)(tokens), nnx.to_pure_dict(state), _batches(config),
               lambda linear: lm.whole_gauges(config, linear))


def scanned(config: lm.LMConfig) -> Net:
    """The same with its blocks stacked and scanned over."""
    model = lm.build(config, nnx.Rngs(0))
    params = nnx.to_pure_dict(nnx.state(model))
    block = nnx.split(model.blocks[0])[0]
    params["blocks"] = jax.tree.map(lambda *layers: jnp.stack(layers), *params["blocks"].values())

    def fn(p: Any, tokens: Any) -> jax.Array:
        x = p["embed"]["embedding"][tokens]
        x = x + p["pos"]["embedding"][: tokens.shape[1]] if "pos" in p else x
        x, _ = jax.lax.scan(lambda x, layer: (nnx.merge(block, layer)(x), None), x, p["blocks"])
        norm = nnx.merge(nnx.split(model.final_norm)[0], p["final_norm"])
        head = nnx.merge(nnx.split(model.lm_head)[0], p.get("lm_head", {}))
        return head(norm(x), p["embed"]["embedding"])

    return Net(fn, params, _batches(config), lambda linear: [_stacked(g) for g in lm.whole_gauges(config, linear)])


def _stacked(gauge: Any) -> Gauge:
    """A gauge of unrolled layers for stacked ones: the capture as an axis, free where all layers share one element."""
    roles: dict[str, dict[str, str]] = {}
    layer = "_" if gauge.name == "residual_rotation" else "layer"
    for spec in gauge.specs:
        axes = re.sub(r"^(1\+ )?", rf"\g<1>{layer} ", spec.axes) if "{i}" in spec.pattern else spec.axes
        roles.setdefault(spec.argument, {})[spec.pattern.replace("{i}/", "")] = axes
    options = {name: value for name, value in gauge.options if name in gauge._parameters and name != "norms"}
    if norms := dict(gauge.options).get("norms"):
        options["norms"] = [_stacked(norm) for norm in norms]
    if tied := roles.pop("tied", None):  # of `norm_write_shift`, which may have no `write`
        options["tied"] = tied
    return getattr(go, gauge.name)(*roles.values(), **options, sizes=dict(gauge.sizes) or None)


_LLAMA = Spec(
    layers=2, width=8, heads=2, kv_heads=1, head=4, hidden=7, norm="rms", scale="plain", norm_bias=False, eps=1e-6,
    place="before", qk_norm="none", bias="none", position="half", mlp="swiglu", gated_heads=False, layout="heads",
    parallel=False, tied=False, head_bias=False, cap=False, final=True, scanned=False, outlier=False,
)
_GAUGES = {"norm_scale": 3, "head_linear": 1, "rope_linear": 1, "rescale": 1, "logit_shift": 1, "residual_rotation": 1}
_SHIFTS = {"norm_read_shift": 3, "norm_write_shift": 5, "bias_absorption": 4}
_CENTRED = dict(norm="layer", norm_bias=True, bias="all", head_bias=True, mlp="relu", layers=1)
_STACK_OF_ONE: dict[str, Any] = dict(layers=1, scanned=True)


def _without(*names: str) -> dict[str, int]:
    return {name: count for name, count in _GAUGES.items() if name not in names}


# Kinds of decoders that gave another list for another seed, a crash, or no gauge where there is one; and what each has.
_SWITCHES: Mapping[str, tuple[dict[str, Any], dict[str, int]]] = {
    "qk_norm_scanned": (dict(qk_norm="rms", scanned=True, eps=1e-5), _without("rope_linear") | {"rescale": 2}),
    # Without eps the stream has a factor of its own. Gates see its sign, so that it is a `rescale`, not a `norm_scale`.
    "tied_without_eps": (
        dict(tied=True, eps=0.0, kv_heads=2),
        _without("logit_shift", "residual_rotation") | {"norm_scale": 2, "rescale": 2}),
    "outlier": (dict(tied=True, outlier=True), _without("logit_shift", "residual_rotation") | {"norm_scale": 2}),
    "one_interleaved_key": (dict(layers=1, position="interleaved", layout="flat", bias="qkv"), _GAUGES),
    "stack_of_one": (_CENTRED | _STACK_OF_ONE, _GAUGES | _SHIFTS),
    "parallel_stack_of_one": (
        _STACK_OF_ONE | dict(scale="one_plus", bias="all", parallel=True),
        _GAUGES | {"norm_scale": 2, "embedding_shift": 1, "bias_absorption": 1}),
    "no_scale": (_CENTRED | dict(scale="none"), _without("norm_scale") | _SHIFTS),
}
KINDS = {name: (dataclasses.replace(_LLAMA, **switches), gauges) for name, (switches, gauges) in _SWITCHES.items()}
FORMS: Mapping[str, Callable[[lm.LMConfig], Net]] = {"unrolled": unrolled, "scanned": scanned}


def every_net(*quick: tuple[str, str]) -> pytest.MarkDecorator:
    """A test's rows: the name and the form of every language model, slow but for these."""
    rows = [(name, form) for name in CONFIGS for form in FORMS]
    marks = {row: [] if row in quick else [pytest.mark.slow] for row in rows}
    return pytest.mark.parametrize(("name", "form"), [pytest.param(*row, marks=marks[row]) for row in rows])
