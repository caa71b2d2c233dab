"""bfloat16 parameters, float32 state, stochastic gradients at GPT-2 124M's shapes: does any number stop being finite?

    python -m benchmarks.stability                 # 200 steps of every case; half an hour on 2 CPU cores
    python -m benchmarks.stability --steps 5 --layers 1

Gradients are normal noise of a size drawn anew for every leaf and step from 1e-8 to 1e2; one in ten is zero. They are
not horizontal, which is harder on a projection than a loss's are. Writes benchmarks/results/stability.json.
"""

import argparse
import dataclasses
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
from tqdm import tqdm

import gauge_optax as go
from benchmarks.sizes import LABELS, SIZES
from benchmarks.timing import host
from models import lm

Tree = Any
RATE = 1e-3


def noise(key: jax.Array, like: Tree) -> Tree:
    """Gradients of every size, and some that are zero."""
    leaves, treedef = jax.tree.flatten(like)

    def drawn(key: jax.Array, leaf: jax.Array) -> jax.Array:
        normal, size, zero = jax.random.split(key, 3)
        scale = 10.0 ** jax.random.uniform(size, (), minval=-8.0, maxval=2.0)
        scale = jnp.where(jax.random.bernoulli(zero, 0.1), 0.0, scale)
        return (scale * jax.random.normal(normal, leaf.shape)).astype(leaf.dtype)

    return jax.tree.unflatten(treedef, list(map(drawn, jax.random.split(key, len(leaves)), leaves)))


def finite(tree: Tree) -> jax.Array:
    """Whether every number is."""
    return jnp.all(jnp.stack([jnp.all(jnp.isfinite(x)) for x in jax.tree.leaves(tree)]))


def run(tx: optax.GradientTransformation, config: lm.LMConfig, steps: int) -> dict[str, Any]:
    """Steps of one optimizer; the first step after which something is not finite, if there is one."""
    params, _ = lm.params_and_loss(config, jax.random.key(0))
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    state = jax.jit(tx.init)(params)

    def step(params: Tree, state: Tree, key: jax.Array) -> tuple[Tree, Tree, jax.Array]:
        updates, state = tx.update(noise(key, params), state, params)
        params = optax.apply_updates(params, updates)
        floats = [x for x in jax.tree.leaves(state) if jnp.issubdtype(x.dtype, jnp.floating)]
        return params, state, finite((params, floats))

    compiled = jax.jit(step, donate_argnums=(0, 1))
    start = time.perf_counter()
    for number in tqdm(range(steps), leave=False):
        params, state, fine = compiled(params, state, jax.random.key(number + 1))
        if not fine:
            return {"not_finite_after": number + 1}
    largest = max(float(jnp.max(jnp.abs(x.astype(jnp.float32)))) for x in jax.tree.leaves(params))
    return {"not_finite_after": None, "largest_parameter": largest, "seconds": time.perf_counter() - start}


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Run every case, print and write what came out."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--only", nargs="*", default=[""], help="cases whose name contains one of these")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    args = parser.parse_args(argv)
    config = dataclasses.replace(SIZES["gpt2"].config, layers=args.layers)
    gauges = lm.gauges(config)
    cases = {
        "ddc_adamw": go.ddc_adamw(RATE, gauges, weight_decay=0.1),
        "ddc_adamw, mu_dtype=bfloat16": go.ddc_adamw(RATE, gauges, weight_decay=0.1, mu_dtype=jnp.bfloat16),
        "ddc_muon": go.ddc_muon(RATE, gauges, labels=LABELS, weight_decay=0.1),
        "ddc_muon, mu_dtype=bfloat16": go.ddc_muon(
            RATE, gauges, labels=LABELS, weight_decay=0.1, mu_dtype=jnp.bfloat16
        ),
    }
    path = args.out / "stability.json"
    old = json.loads(path.read_text()) if path.exists() else {}
    settings = {"steps": args.steps, "layers": args.layers, "host": host(), "jax": jax.__version__}
    cases_run: dict[str, Any] = old.get("cases", {}) if old.get("settings") == settings else {}
    args.out.mkdir(parents=True, exist_ok=True)
    for name in (n for n in cases if any(part in n for part in args.only)):
        cases_run[name] = run(cases[name], config, args.steps)
        print(name, cases_run[name])
        path.write_text(json.dumps({"settings": settings, "cases": cases_run}, indent=1))
    return cases_run


if __name__ == "__main__":
    main()
