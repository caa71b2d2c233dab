"""Times compiled updates in turns, and reads their memory; `compare` says which updates."""

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
    """A study without seeds at the device's own precision of products; what it prints is a page in `results` too."""
    return harness.Study(
        doc, name, cells, section, page=section if page else None, config=config, head=head, seeds=None, precision=None,
        partial=True, folder=RESULTS,
    )


class Timed(Protocol):
    """What can be timed in turns."""

    seconds: list[float]

    def run(self, given: Tree) -> float:
        """One call's wall time."""


@dataclass
class Update:
    """One optimizer's update and `apply_updates`, compiled; parameters and state are donated, as a trainer does.

    Attributes:
      params: the parameters it moves, its own copy.
      state: the optimizer's.
      lowered: (params, state, given) → (params, state); given: gradients, or for a whole step a batch.
      compiled: the same, ready to run.
      compile_seconds: tracing and compiling.
      seconds: of every timed call.
    """

    params: Tree
    state: Tree
    lowered: Any
    compiled: Any
    compile_seconds: float
    seconds: list[float] = field(default_factory=list)

    def run(self, given: Tree) -> float:
        """Takes one step; its wall time."""
        start = time.perf_counter()
        self.params, self.state = self.compiled(self.params, self.state, given)
        jax.block_until_ready((self.params, self.state))
        return time.perf_counter() - start

    @property
    def peak_bytes(self) -> int:
        """What a call holds at once by the compiler's plan: arguments, results that do not reuse them, scratch."""
        return _planned(self.compiled)

    @property
    def least_peak_bytes(self) -> int | None:
        """The same where operations are put in the order that holds least; None where XLA gives no choice."""
        if jax.default_backend() != "cpu" or jax.__version_info__ < (0, 9, 1):
            return None
        order = {"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"}
        return _planned(self.lowered.compile(compiler_options=order))

    @property
    def state_bytes(self) -> int:
        """Of the optimizer's state."""
        return nbytes(self.state)


def _planned(compiled: Any) -> int:
    plan = compiled.memory_analysis()
    held = plan.argument_size_in_bytes + plan.output_size_in_bytes - plan.alias_size_in_bytes
    return int(held + plan.temp_size_in_bytes)


def update_step(tx: optax.GradientTransformation) -> Callable[[Tree, Tree, Tree], tuple[Tree, Tree]]:
    """(params, state, grads) → (params, state)."""

    def step(params: Tree, state: Tree, grads: Tree) -> tuple[Tree, Tree]:
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return step


def prepared(
    tx: optax.GradientTransformation, params: Tree, given: Tree, loss: Callable[[Tree, Tree], jax.Array] | None = None
) -> Update:
    """An optimizer ready to be timed: its update on given gradients, or, with a loss, a step on a given batch."""
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
    """Times all updates, each once per round, so that what slows the machine down slows all of them.

    Args:
      updates: by name.
      given: what each is called with.
      repeats: rounds that count.
      warm: rounds before them.
      pause: seconds before every call; threads of another library spin for a while after theirs.
    """
    for number in tqdm(range(warm + repeats), unit="round", leave=False):
        for update in updates.values():
            time.sleep(pause)
            seconds = update.run(given)
            if number >= warm:
                update.seconds.append(seconds)


def quartiles(update: Timed, base: Timed) -> tuple[float, float, float]:
    """Quartiles over rounds of the time in units of the base's in the same round; the second is the median."""
    low, middle, high = np.percentile(np.array(update.seconds) / np.array(base.seconds), (25, 50, 75))
    return float(low), float(middle), float(high)


def nbytes(tree: Tree) -> int:
    """Of all arrays in a tree."""
    return sum(x.nbytes for x in jax.tree.leaves(tree))


def device_peak(update: Update, given: Tree) -> int | None:
    """Bytes one call holds at once by the device's own count; None where it keeps none (CPU).

    The count is the process's peak and is never reset, so memory is filled up to it first: whatever the call takes
    beyond its arguments then shows as a new peak.
    """

    def count(name: str) -> int:
        return int((jax.devices()[0].memory_stats() or {})[name])

    if not (jax.devices()[0].memory_stats() or {}).keys() >= {"bytes_in_use", "peak_bytes_in_use"}:
        return None
    filling = []
    while (missing := count("peak_bytes_in_use") - count("bytes_in_use")) > 0:
        try:
            filling.append(jax.block_until_ready(jnp.zeros(missing, jnp.uint8)))
        except jax.errors.JaxRuntimeError:  # no single piece that large
            return None
    before = count("bytes_in_use")
    update.run(given)
    return nbytes((update.params, update.state, given)) + count("peak_bytes_in_use") - before


def alone(module: str, call: str, **env: str) -> Any:
    """What a call of a module's functions gives in a new process, without this one's flags for XLA and its caches.

    Args:
      module: its names stand in `call`.
      call: Python source; it gives what JSON can say.
      **env: more environment variables.
    """
    ours = ("XLA_FLAGS", "JAX_COMPILATION_CACHE", "JAX_PERSISTENT_CACHE")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    source = f"import json; from {module} import *; print(json.dumps({call}))"
    done = subprocess.run([sys.executable, "-c", source], env=kept | env, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def cores() -> int:
    """How many this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def host() -> str:
    """The machine: cores, processor, accelerator."""
    info, device = Path("/proc/cpuinfo"), jax.devices()[0]
    lines = info.read_text().splitlines() if info.exists() else []
    model = next((x.split(":")[1].strip() for x in lines if x.startswith("model name")), "")
    processor = f"{cores()} cores {model} {platform.machine()}".replace("  ", " ")
    return processor if device.platform == "cpu" else f"{processor}, {device.device_kind}"
