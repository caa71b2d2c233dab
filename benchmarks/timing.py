"""Compiled updates timed in turns, and what the machine could do at best.

Here: how a time is taken. Not here: of what (`update`).
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

Tree = Any


@dataclass
class Update:
    """One optimizer's update and `apply_updates`, compiled; parameters and state are donated, as a trainer does.

    Attributes:
      params: the parameters it moves, its own copy.
      state: the optimizer's.
      compiled: (params, state, grads) → (params, state).
      compile_seconds: tracing and compiling.
      seconds: of every timed call.
    """

    params: Tree
    state: Tree
    compiled: Any
    compile_seconds: float
    seconds: list[float] = field(default_factory=list)

    def run(self, grads: Tree) -> float:
        """Takes one step; its wall time."""
        start = time.perf_counter()
        self.params, self.state = self.compiled(self.params, self.state, grads)
        jax.block_until_ready(self.params)
        return time.perf_counter() - start

    @property
    def cost(self) -> dict[str, float]:
        """What the compiler counts of one call: floating-point operations, bytes, scratch memory."""
        analysis = self.compiled.cost_analysis()
        analysis = analysis[0] if isinstance(analysis, list) else analysis
        return {
            "gflop": analysis.get("flops", 0.0) / 1e9,
            "gbyte": analysis.get("bytes accessed", 0.0) / 1e9,
            "scratch_mb": self.compiled.memory_analysis().temp_size_in_bytes / 1e6,
        }


def prepared(tx: optax.GradientTransformation, params: Tree, grads: Tree) -> Update:
    """An optimizer ready to be timed."""

    def step(params: Tree, state: Tree, grads: Tree) -> tuple[Tree, Tree]:
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    own = jax.tree.map(jnp.array, params)
    state = jax.jit(tx.init)(own)
    start = time.perf_counter()
    compiled = jax.jit(step, donate_argnums=(0, 1)).lower(own, state, grads).compile()
    return Update(own, state, compiled, time.perf_counter() - start)


def in_turns(updates: Mapping[str, Update], grads: Tree, repeats: int, warm: int = 2) -> None:
    """Times all updates, each once per round, so that what slows the machine down slows all of them."""
    for number in range(warm + repeats):
        for update in updates.values():
            seconds = update.run(grads)
            if number >= warm:
                update.seconds.append(seconds)


def ratio(update: Update, base: Update) -> float:
    """Median over rounds of the time in units of the base's in the same round."""
    return float(np.median(np.array(update.seconds) / np.array(base.seconds)))


def best(call: Callable[[], Any], repeats: int = 7) -> float:
    """Shortest wall time of several calls."""
    jax.block_until_ready(call())
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(call())
        times.append(time.perf_counter() - start)
    return min(times)


def machine() -> dict[str, float]:
    """What the machine reaches at best: GB/s of memory (one array read and written in place), GFLOP/s of products."""
    vector = jnp.ones(2**25)
    add = jax.jit(lambda x: x + 1.0, donate_argnums=0)
    jax.block_until_ready(add(vector))
    times = []
    vector = jnp.ones(2**25)
    for _ in range(7):
        start = time.perf_counter()
        vector = jax.block_until_ready(add(vector))
        times.append(time.perf_counter() - start)
    large = jnp.ones((2048, 2048))
    heads = jnp.ones((12, 768, 64)), jnp.ones((12, 64, 64))
    square, turn = jax.jit(lambda a: a @ a), jax.jit(lambda w, u: w @ u)
    return {
        "memory_gb_s": 2 * 4 * 2**25 / min(times) / 1e9,
        "product_gflop_s": 2 * 2048**3 / best(lambda: square(large)) / 1e9,
        "heads_gflop_s": 2 * 12 * 768 * 64 * 64 / best(lambda: turn(*heads)) / 1e9,
    }
