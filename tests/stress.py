"""A program, for its threads are counted when JAX starts: many LAPACK calls at once, again and again.

    python -m tests.stress --threads 2 --times 50      # on 2 cores; one line of JSON

XLA:CPU has as many threads as the process has cores. Batched LAPACK calls that wait for each other's threads never end,
so whoever starts this program stops it after a while.
"""

import argparse
import json
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

LAYERS, HEADS, BASIS, WIDTH = 6, 8, 32, 64


def programs(devices: int) -> dict[str, Callable[[Any], Any]]:
    """What is run, as functions of a key."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding, PartitionSpec

    import gauge_optax as go
    from gauge_optax import linalg

    mesh = jax.make_mesh((devices,), ("model",), axis_types=(jax.sharding.AxisType.Auto,))

    def kernel(*shape: int) -> Any:
        """Its heads are dealt out."""
        spec = PartitionSpec(*("model" if size == HEADS else None for size in shape))
        return jax.device_put(1.0 + 0.1 * jax.random.normal(jax.random.key(0), shape), NamedSharding(mesh, spec))

    layer = {name: kernel(WIDTH, HEADS, BASIS) for name in ("query", "key", "value", "gate")}
    layer |= {name: kernel(HEADS, BASIS, WIDTH) for name in ("out", "down")}
    params = {"blocks": {str(k): layer for k in range(LAYERS)}}
    gauges = go.product([
        go.head_rotation({f"blocks/{{i}}/{name}": "_ head basis" for name in ("query", "key")}),
        go.head_rotation({"blocks/{i}/value": "_ head basis", "blocks/{i}/out": "head basis _"}),
        go.head_linear({"blocks/{i}/gate": "_ head basis"}, {"blocks/{i}/down": "head basis _"}),
    ])
    tx = go.quotient_adamw(1e-3, gauges)

    def moved(key: Any) -> Any:
        return gauges.act(gauges.sample(key, params), params)

    def kernels(key: Any) -> Any:
        stacks = jax.random.normal(key, (5, LAYERS * HEADS, BASIS, BASIS))
        spd = linalg.symmetric(stacks[0]) + 20.0 * jnp.eye(BASIS)
        return (
            linalg.symmetric_eigen(spd), linalg.svd(stacks[1]), linalg.qr(stacks[2]), linalg.solve(spd, stacks[3]),
            linalg.matrix_exponential(linalg.skew(stacks[4])), linalg.inverse(spd),
            linalg.balance(stacks[1], stacks[2]),
        )

    return {
        "sample and act": moved,
        "sample and act, vmapped": lambda key: jax.vmap(moved)(jax.random.split(key, 2)),
        "all kernels": kernels,
        "init": lambda key: tx.init(moved(key)),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs every program so many times."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for option, default in (("--threads", 2), ("--devices", 1), ("--times", 50)):
        parser.add_argument(option, type=int, default=default)
    args = parser.parse_args(arguments)
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ.pop("PJRT_NPROC", None)
    if args.threads <= os.cpu_count():  # XLA counts the cores that the process may run on
        os.sched_setaffinity(0, set(range(args.threads)))
    else:
        os.environ["PJRT_NPROC"] = str(args.threads)

    import jax

    from tests.quick import jit

    jax.config.update("jax_num_cpu_devices", args.devices)
    for name, function in programs(args.devices).items():
        run, start = jit(function), time.monotonic()
        for number in range(args.times):
            jax.block_until_ready(run(jax.random.key(number)))
        print(json.dumps({"program": name, "times": args.times, "seconds": time.monotonic() - start}), flush=True)


if __name__ == "__main__":
    main()
