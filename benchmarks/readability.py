"""Counts what one has to read to understand an update: files, functions, hops, classes, tree flattenings, and nouns.

    python -m benchmarks.readability

It traces `update` of `quotient` around Adam and of `ddc_adamw` (its two implementations), with five gauges on eight
leaves, and counts what runs in the package. A function counts once, however often it runs; nested functions and lambdas
count as part of the function around them. A *hop* is a call from one file of the package into another. *Nouns* are the
terms of the glossary (in CONTRIBUTING, under "Words") that occur in the code or docstrings of these functions.
"""

import collections
import inspect
import re
import sys
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import optax

import gauge_optax as go
from gauge_optax.ddc import fused as ddc_fused

PACKAGE, GLOSSARY = Path(go.__file__).parent, Path(go.__file__).parents[1] / "CONTRIBUTING.md"


def five_gauges() -> tuple[list[Any], dict[str, jax.Array]]:
    """Gauges of a norm, queries and keys, values and outputs, an MLP's units, and logits; and their eight leaves."""
    gauges = [
        go.norm_scale({"norm": "channel"}, {"query": "channel _ _", "key": "channel _ _", "value": "channel _ _"}),
        go.head_rotation({"query": "_ head basis", "key": "_ head basis"}),
        go.head_rotation({"value": "_ head basis", "out": "head basis _"}),
        go.rescale({"up": "_ channel"}, {"down": "channel _"}), go.logit_shift({"unembed": "_ vocab"})
    ]
    heads = {name: jnp.ones((6, 2, 4)) for name in ("query", "key", "value")}
    rest = {"norm": jnp.ones(6), "out": jnp.ones((2, 4, 6)), "up": jnp.ones((6, 5)), "down": jnp.ones((5, 6))}
    return gauges, heads | rest | {"unembed": jnp.ones((6, 7))}


def glossary() -> tuple[str, ...]:
    """The terms that CONTRIBUTING lists under "Words"."""
    listed = re.search(r"The terms are those of \[[^:]*\): ([^.]+)\.", GLOSSARY.read_text())
    assert listed is not None, f"{GLOSSARY.name} lists no terms"
    return tuple(" ".join(term.split()) for term in listed[1].split(","))


def traced(tx: optax.GradientTransformation, params: Any) -> dict[str, int]:
    """Traces `update` once, and returns the counts."""
    state = jax.eval_shape(tx.init, params)
    texts: dict[tuple[str, str], str] = {}  # (file, name of a function) → its source
    counts: collections.Counter[str] = collections.Counter()

    def of_package(frame: FrameType | None) -> str | None:
        name = frame.f_code.co_filename if frame is not None else ""
        return name if name.startswith(str(PACKAGE)) else None

    def watch(frame: FrameType, event: str, argument: Any) -> None:
        if event != "call" or (file := of_package(frame)) is None:
            return
        name = frame.f_code.co_qualname.split(".<locals>")[0] if sys.version_info >= (3, 11) else frame.f_code.co_name
        if (file, name) not in texts:
            texts[file, name] = inspect.getsource(frame.f_code)
        caller = of_package(frame.f_back)
        counts["hops"] += caller is not None and caller != file
        counts["flattenings"] += name == "_flatten"

    jax.clear_caches()  # a program that was traced before would not pass through its functions again
    sys.setprofile(watch)
    try:
        jax.make_jaxpr(tx.update)(params, state, params)
    finally:
        sys.setprofile(None)
    text = "\n".join(texts.values()).lower().replace("_", " ")
    return {
        "files": len({file for file, _ in texts}), "functions": len(texts), "hops": counts["hops"],
        "classes": len({name.split(".")[0] for _, name in texts if "." in name}), "flattenings": counts["flattenings"],
        "nouns": sum(re.search(rf"\b{term}s?\b", text) is not None for term in glossary()),
    }


def rows() -> dict[str, dict[str, int]]:
    """Name of an optimizer → its counts."""
    gauges, params = five_gauges()
    with mock.patch.object(ddc_fused, "_applies", lambda s: False):
        plain = traced(go.ddc_adamw(1e-3, gauges), params)
    return {"quotient": traced(go.quotient(optax.adam(1e-3), gauges), params), "ddc_adamw, plain": plain,
            "ddc_adamw, fused": traced(go.ddc_adamw(1e-3, gauges), params)}


if __name__ == "__main__":
    for name, row in rows().items():
        print(f"{name:18}", ", ".join(f"{count} {what}" for what, count in row.items()))
