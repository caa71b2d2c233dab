"""Times compiled updates in turns, and measures their memory. `benchmarks.compare` says which updates."""

import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import optax
from tqdm import tqdm

from examples.studies import harness

Tree = Any
RESULTS = Path(__file__).parent / "results"


def benchmark(
    doc: str | None, name: Any, cells: Any, section: Callable[[Any], str], head: Any = lambda config: {},
    config: Any = None, page: bool = True,
) -> harness.Study:
    """Makes a study without seeds, at the device's default precision of matrix products.

    What it prints is also written to a Markdown page in `benchmarks/results`, if `page`.
    """
    return harness.Study(
        doc, name, cells, section, page=section if page else None, config=config, head=head, seeds=None, precision=None,
        partial=True, folder=RESULTS,
    )


class Timed(Protocol):
    """The interface of everything that `in_turns` can time."""

    seconds: list[float]

    def run(self, given: Tree) -> float:
        """Makes one call, and returns its wall time."""


@dataclass
class Update:
    """The update of one optimizer with `apply_updates`, compiled. Parameters and state are donated, as is usual.

    Attributes:
      params: a copy of the parameters, which the updates change.
      state: the optimizer's state.
      lowered: the program (params, state, given) → (params, state). `given` is gradients, or a batch for a whole step.
      compiled: the compiled program.
      compile_seconds: seconds of tracing and compiling.
      seconds: the seconds of every timed call.
    """

    params: Tree
    state: Tree
    lowered: Any
    compiled: Any
    compile_seconds: float
    seconds: list[float] = field(default_factory=list)

    def run(self, given: Tree) -> float:
        """Takes one step, and returns its wall time."""
        start = time.perf_counter()
        self.params, self.state = self.compiled(self.params, self.state, given)
        jax.block_until_ready((self.params, self.state))
        return time.perf_counter() - start

    @property
    def peak_bytes(self) -> int:
        """The memory of a call by the compiler's plan: arguments, results that do not reuse them, scratch memory."""
        return _planned(self.compiled)

    @property
    def least_peak_bytes(self) -> int | None:
        """The memory of a call if XLA orders operations for the least memory; None if XLA has no option for that."""
        if jax.default_backend() != "cpu" or jax.__version_info__ < (0, 9, 1):
            return None
        order = {"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"}
        return _planned(self.lowered.compile(compiler_options=order))

    @property
    def state_bytes(self) -> int:
        """The bytes of the optimizer's state."""
        return nbytes(self.state)


def _planned(compiled: Any) -> int:
    plan = compiled.memory_analysis()
    held = plan.argument_size_in_bytes + plan.output_size_in_bytes - plan.alias_size_in_bytes
    return int(held + plan.temp_size_in_bytes)


def update_step(tx: optax.GradientTransformation) -> Callable[[Tree, Tree, Tree], tuple[Tree, Tree]]:
    """Returns the function (params, state, grads) → (params, state) of one update."""

    def step(params: Tree, state: Tree, grads: Tree) -> tuple[Tree, Tree]:
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return step


def prepared(
    tx: optax.GradientTransformation, params: Tree, given: Tree, loss: Callable[[Tree, Tree], jax.Array] | None = None
) -> Update:
    """Compiles an optimizer's update for given gradients, or with `loss` a whole step for a given batch."""
    update = update_step(tx)

    def step(params: Tree, state: Tree, given: Tree) -> tuple[Tree, Tree]:
        return update(params, state, given if loss is None else jax.grad(loss)(params, given))

    donated = jax.tree.map(jnp.array, params)
    state = jax.jit(tx.init)(donated)
    start = time.perf_counter()
    lowered = jax.jit(step, donate_argnums=(0, 1)).lower(donated, state, given)
    compiled = lowered.compile()
    return Update(donated, state, lowered, compiled, time.perf_counter() - start)


def in_turns(updates: Mapping[str, Timed], given: Tree, repeats: int, warm: int = 2, pause: float = 0.0) -> None:
    """Times all updates, each once per round: if something slows the machine down, it slows all of them.

    Args:
      updates: name → update.
      given: the argument of every call.
      repeats: the number of rounds that are timed.
      warm: the number of rounds before them, which are not timed.
      pause: seconds of pause before every call, if another library's threads spin for a while after its calls.
    """
    for number in tqdm(range(warm + repeats), unit="round", leave=False):
        for update in updates.values():
            time.sleep(pause)
            seconds = update.run(given)
            if number >= warm:
                update.seconds.append(seconds)


def quartiles(update: Timed, base: Timed) -> tuple[float, float, float]:
    """The quartiles over rounds of (time / base's time in the same round). The second one is the median."""
    low, middle, high = np.percentile(np.array(update.seconds) / np.array(base.seconds), (25, 50, 75))
    return float(low), float(middle), float(high)


def nbytes(tree: Tree) -> int:
    """The bytes of all arrays in a tree."""
    return sum(x.nbytes for x in jax.tree.leaves(tree))


def device_peak(update: Update, given: Tree) -> int | None:
    """The peak memory of one call, by the device's own count; None if the device keeps none (CPU).

    The count is the peak of the whole process, and cannot be reset. Memory is therefore first filled up to this peak.
    What the call needs beyond its arguments then shows as a new peak.
    """

    def count(name: str) -> int:
        return int((jax.devices()[0].memory_stats() or {})[name])

    if not (jax.devices()[0].memory_stats() or {}).keys() >= {"bytes_in_use", "peak_bytes_in_use"}:
        return None
    filling = []
    while (missing := count("peak_bytes_in_use") - count("bytes_in_use")) > 0:
        try:
            filling.append(jax.block_until_ready(jnp.zeros(missing, jnp.uint8)))
        except jax.errors.JaxRuntimeError:  # free memory has no single piece of this size
            return None
    before = count("bytes_in_use")
    update.run(given)
    return nbytes((update.params, update.state, given)) + count("peak_bytes_in_use") - before


def alone(module: str, call: str, **env: str) -> Any:
    """Evaluates an expression in a new process, without the XLA flags and caches of this one.

    Args:
      module: the module whose names `call` may use.
      call: the expression, as Python source. JSON must be able to hold its value.
      **env: more environment variables.
    """
    ours = ("XLA_FLAGS", "JAX_COMPILATION_CACHE", "JAX_PERSISTENT_CACHE")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    source = f"import json; from {module} import *; print(json.dumps({call}))"
    done = subprocess.run([sys.executable, "-c", source], env=kept | env, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def cores() -> int:
    """The number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def host() -> str:
    """Text about the machine: cores, processor, accelerator."""
    info, device = Path("/proc/cpuinfo"), jax.devices()[0]
    lines = info.read_text().splitlines() if info.exists() else []
    model = next((x.split(":")[1].strip() for x in lines if x.startswith("model name")), "")
    processor = f"{cores()} cores {model} {platform.machine()}".replace("  ", " ")
    return processor if device.platform == "cpu" else f"{processor}, {device.device_kind}"
