"""What the precision of products costs Muon's steps on a GPU, in time and in equivariance; one run, prints JSON.

    XLA_FLAGS="--xla_gpu_enable_triton_gemm=false --xla_gpu_autotune_level=0" python -m benchmarks.precision
"""

import functools
import json
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks import compare
from benchmarks.sizes import SIZES, case
from benchmarks.timing import host, prepared
from gauge_optax import linalg

KINDS = jax.lax.DotAlgorithmPreset
PRECISIONS = {
    "float32": jax.lax.Precision.HIGHEST, "TF32 × 3": KINDS.TF32_TF32_F32_X3, "bfloat16 × 6": KINDS.BF16_BF16_F32_X6,
    "bfloat16 × 3": KINDS.BF16_BF16_F32_X3, "TF32": KINDS.TF32_TF32_F32,
}
SHAPES = ((48, 768, 768), (24, 3072, 768))


def median_ms(call, *args) -> float:
    seconds = []
    for _ in range(8):
        start = time.perf_counter()
        jax.block_until_ready(call(*args))
        seconds.append(time.perf_counter() - start)
    return 1e3 * float(np.median(seconds))


def polar_factors(shape: tuple[int, int, int], precision) -> dict[str, float]:
    """Time of the polar factors of a stack; error of one beside float64; |f(MR) − f(M)R|, over the largest entry."""
    linalg.matmul = functools.partial(jnp.matmul, precision=precision)
    jax.clear_caches()
    schedule = linalg.ns_schedule("standard", 5)
    polar = jax.jit(lambda x: linalg._polar(schedule, x, 1e-8))
    x = jax.random.normal(jax.random.key(0), shape) * (jnp.arange(shape[-1]) + 1.0) ** -0.5
    one = np.asarray(x[0], np.float64)
    u, sizes, vt = np.linalg.svd(one / np.linalg.norm(one), full_matrices=False)
    for a, b, c in schedule:
        sizes = a * sizes + b * sizes**3 + c * sizes**5
    exact, turn = (u * sizes) @ vt, np.linalg.qr(np.random.default_rng(0).standard_normal((shape[-1],) * 2))[0]
    factor, turned = (np.asarray(polar(jnp.asarray(y[None], jnp.float32))[0], np.float64) for y in (one, one @ turn))
    largest = float(np.abs(exact).max())
    return {
        "ms": median_ms(polar, x), "error": float(np.abs(factor - exact).max()) / largest,
        "equivariance": float(np.abs(turned @ turn.T - factor).max()) / largest,
    }


def updates() -> dict[str, float]:
    """Milliseconds of GPT-2's updates, in turns."""
    sized = case(SIZES["gpt2"])
    made = {name: prepared(tx, sized.params, sized.grads) for name, tx in {
        "optax.adamw": optax.adamw(1e-6), "optax.contrib.muon": sized.muon(1e-6),
        "optax.contrib.muon, float32 products": compare.at_highest(sized.muon(1e-6)),
        "quotient_muon": sized.quotient_muon(1e-6), "max_norm_muon": sized.max_norm_muon(1e-6)}.items()}
    for _ in range(12):
        for update in made.values():
            update.seconds.append(update.run(sized.grads))
    return {name: 1e3 * float(np.median(update.seconds[2:])) for name, update in made.items()}


if __name__ == "__main__":
    polar = {f"{shape}": {name: polar_factors(shape, p) for name, p in PRECISIONS.items()} for shape in SHAPES}
    print(json.dumps({"machine": host(), "polar": polar, "updates": updates()}, indent=1))
