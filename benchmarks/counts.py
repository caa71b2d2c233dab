"""What XLA compiles an update to for an H100 and for a TPU v5e, measured on a machine that has neither.

    pip install "jax[cuda12]" "jax[tpu]"                       # the compilers; both can be installed together
    JAX_PLATFORMS=cpu python -m benchmarks.counts              # half an hour on a CPU core
    JAX_PLATFORMS=cpu python -m benchmarks.counts --platforms tpu --sizes toy --only "*quotient*"
    python -m benchmarks.counts --show

XLA can compile for a device of which it has only a description. It then reports counts and no times: floating-point
operations, bytes that kernels read and write, the number of kernels, scratch memory. For comparison there is the least
number of bytes that an update must move: gradients, parameters and state are read once, parameters and state are
written once. Writes counts.json and counts.md to benchmarks/results/ after every row.
"""

import argparse
import dataclasses
import functools
import itertools
import math
import os
import re
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import optax
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

from benchmarks import compare
from benchmarks.sizes import LABELS, SIZES, Case, Size
from benchmarks.timing import benchmark, update_step
from examples.studies import harness
from examples.studies.report import plain
from models import lm

Tree = Any

H100 = """
gpu_device_info {
  threads_per_block_limit: 1024, threads_per_warp: 32, threads_per_core_limit: 2048, core_count: 132,
  fpus_per_core: 128, shared_memory_per_block: 49152, shared_memory_per_core: 233472,
  shared_memory_per_block_optin: 232448, registers_per_core_limit: 65536, registers_per_block_limit: 65536,
  block_dim_limit_x: 2147483647, block_dim_limit_y: 65535, block_dim_limit_z: 65535, clock_rate_ghz: 1.98,
  memory_bandwidth: 3352320000000, l2_cache_size: 52428800, device_memory_size: 84942979072,
  cuda_compute_capability { major: 9 }
}
platform_name: "CUDA", dnn_version_info { major: 9, minor: 10 }, device_description_str: "NVIDIA H100 80GB HBM3"
"""
"""The description of an H100: the limits of compute capability 9.0 from NVIDIA's tables, and sizes of the SXM card."""

PLATFORMS = {"cpu": "this CPU", "cuda": "NVIDIA H100 SXM", "tpu": "TPU v5e"}
ROWS = (
    "optax.adamw", "quotient(optax.adamw)", "quotient(optax.adamw), hold=False", "ddc_adamw", "optax.contrib.muon",
    "quotient_muon",
)


@functools.cache
def device(platform: str) -> Any:
    """The device to compile for."""
    if platform == "cpu":
        return jax.devices("cpu")[0]
    if platform == "tpu":
        # Say which TPU it is, so that no metadata server is asked.
        os.environ.update(TPU_SKIP_MDS_QUERY="1", TPU_ACCELERATOR_TYPE="v5litepod-4", TPU_WORKER_HOSTNAMES="localhost")
        return topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2").devices[0]
    return topologies.get_topology_desc(platform="cuda", target_config=H100, topology="1x1x1").devices[0]


def shapes(size: Size) -> Case:
    """The parameters and gradients of a size as shapes. No array is allocated."""
    params = jax.eval_shape(lambda key: lm.params_and_loss(size.config, key)[0], jax.random.key(0))
    return Case(params, params, lm.gauges(size.config), labels=LABELS)


def counted(tx: optax.GradientTransformation, params: Tree, platform: str) -> dict[str, float]:
    """Compiles one update with `apply_updates`, whose parameters and state are donated, and returns its counts."""
    to = SingleDeviceSharding(device(platform))

    def placed(tree: Tree) -> Tree:
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=to), tree)

    state, begun = jax.eval_shape(tx.init, params), time.monotonic()
    step = jax.jit(update_step(tx), donate_argnums=(0, 1))
    # Without autotuning, which runs kernels on the device.
    options: dict[str, str | bool] = {"xla_gpu_autotune_level": "0"} if platform == "cuda" else {}
    compiled = step.lower(*map(placed, (params, state, params))).compile(compiler_options=options)
    seconds, program, plan = time.monotonic() - begun, str(compiled.as_text()), compiled.memory_analysis()
    operations: Any = step.lower(params, state, params).cost_analysis()
    kernels, moved = traffic(program)
    of_params, of_state = (sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree)) for tree in (params, state))
    return {
        "gflop": operations["flops"] / 1e9, "gbyte": moved / 1e9, "limit_gbyte": (3 * of_params + 2 * of_state) / 1e9,
        "kernels": kernels, "scratch_mb": plan.temp_size_in_bytes / 1e6 if plan else 0.0, "state_mb": of_state / 1e6,
        "compile_s": seconds,
    }


# Operations of a program's entry that move no data.
FREE = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "partition-id", "after-all"}


def traffic(program: str) -> tuple[int, int]:
    """The number of kernels of a compiled program's entry, and the bytes that they read and write in main memory.

    It is assumed that every kernel reads each operand once and writes its result once. Arrays in a TPU's on-chip
    memory, marked S(1), are not counted. A loop counts as one kernel that runs once.

    >>> traffic("ENTRY %m {\\n  %p = f32[8]{0} parameter(0)\\n  ROOT %f = f32[2]{0} fusion(%p), kind=kLoop\\n}")
    (1, 40)
    """
    entry, kernels, moved = program[program.index("ENTRY ") :], 0, 0
    sizes: dict[str, int] = {}
    for line in entry.splitlines():
        found = re.match(r"\s+(?:ROOT )?(%?[\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\((.*)", line)
        if not found:
            continue
        name, shape, operation, rest = found.groups()
        sizes[name.lstrip("%")] = _shape_bytes(shape)
        if operation in FREE or operation.endswith("-done"):
            continue
        kernels += 1
        operands = re.findall(r"%([\w.\-]+)", rest.split("), ")[0])
        # The start of an asynchronous operation returns its operands with its result: do not count them as written.
        written = 0 if operation.endswith("-start") else sizes[name.lstrip("%")]
        moved += written + sum(sizes.get(operand, 0) for operand in operands)
    return kernels, moved


WIDTHS = {"f64": 8, "s64": 8, "u64": 8, "f32": 4, "s32": 4, "u32": 4, "bf16": 2, "f16": 2, "pred": 1, "s8": 1, "u8": 1}


def _shape_bytes(shape: str) -> int:
    """The bytes in main memory of a shape, or of all shapes of a tuple."""
    arrays = re.findall(r"(\w+)\[([\d,]*)\](\{[^}]*\})?", shape)
    return sum(WIDTHS.get(dtype, 0) * math.prod(int(n) for n in lengths.split(",") if n)
               for dtype, lengths, layout in arrays if "S(1)" not in layout)


def page(result: Mapping[str, Any]) -> str:
    """The results as a Markdown page, with a table per size and platform."""
    parts = [
        "# What an update is compiled to\n\n`JAX_PLATFORMS=cpu python -m benchmarks.counts`. XLA compiled these "
        "programs ahead of time, on a machine without the device: they are counts, and no time was measured. *GB* is "
        "what the program's kernels read from and write to main memory, each its operands and its result once, where a "
        "loop counts as one round; *limit* is the least: gradients, parameters and state read once, parameters and "
        "state written once. Operations are counted before the compiler's passes. float32, products at full precision, "
        f"{', '.join(f'{name} {number}' for name, number in result['versions'].items())}."
    ]
    heads = ["update", "GFLOP", "GB", "of the first row's", "of the limit", "limit GB", "kernels", "scratch MB",
             "state MB", "compile s"]
    for size, by_platform in result["sizes"].items():
        for platform, rows in by_platform.items():
            lines, base = [heads], next(iter(rows.values()))["gbyte"]
            for name, r in rows.items():
                exact = r["gflop"], r["gbyte"], r["gbyte"] / base, r["gbyte"] / r["limit_gbyte"], r["limit_gbyte"]
                whole = (f"{r[key]:.0f}" for key in ("kernels", "scratch_mb", "state_mb", "compile_s"))
                lines.append([name, *(f"{x:.2f}" for x in exact), *whole])
            parts.append(f"## {size}, {PLATFORMS[platform]}\n\n{plain(lines)}")
    return "\n\n".join(parts) + "\n"


@dataclasses.dataclass(frozen=True)
class Config:
    """Names of platforms and sizes; a width and a number of layers for all models (0 leaves each model as it is)."""

    platforms: str = "cuda tpu"
    sizes: str = "gpt2 1b_layer"
    width: int = 0
    layers: int = 0


def cells(c: Config, args: argparse.Namespace) -> harness.Cells:
    """One cell per size, platform and optimizer."""
    found: dict[harness.Address, Callable[[harness.Run], Any]] = {}
    for name in c.sizes.split():
        size = SIZES[name].at(c.width, c.layers)
        sized, title = shapes(size), f"{name}, {size.config.layers} layers of d = {size.config.d_model}"
        rows = {row: tx for block in compare.blocks(sized).values() for row, tx in block.items() if row in ROWS}
        for platform, row in itertools.product(c.platforms.split(), (row for row in ROWS if row in rows)):
            count = functools.partial(counted, rows[row], sized.params, platform)
            found["sizes", title, platform, row] = lambda run, count=count: count()  # type: ignore[misc]
    return found


STUDY = benchmark(
    __doc__, "counts", cells, page, config=Config(),
    head=lambda _: {"versions": harness.versions(), "sizes": {}},
)

if __name__ == "__main__":
    harness.main(STUDY)
