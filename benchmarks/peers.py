"""PyTorch optimizers beside ours, on the same matrices, on a CPU: HeavyBall's Muon and LoRA-RITE.

Needs the extra `peers` (torch, heavyball, pytorch-optimizer); torch is imported where a row is made, nowhere else.
"""

import importlib.util
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any

import jax
import numpy as np
import optax

from benchmarks.sizes import Case
from benchmarks.timing import Timed, cores, prepared

Matrices = list[np.ndarray]
RANK = 16

_PACKAGES = {"torch": "torch", "heavyball": "heavyball", "pytorch_optimizer": "pytorch-optimizer"}


def absent() -> str | None:
    """Why these rows are left out, if they are."""
    missing = [name for module, name in _PACKAGES.items() if importlib.util.find_spec(module) is None]
    if missing:
        return f"{', '.join(missing)} not installed (extra `peers`)"
    if jax.default_backend() != "cpu":
        return "PyTorch on a CPU is compared with JAX on a CPU only"
    return None


def versions() -> dict[str, str]:
    """Of the peers' packages."""
    return {name: version(name) for name in _PACKAGES.values()}


@dataclass
class TorchUpdate:
    """A PyTorch optimizer's step on parameters with gradients attached.

    Attributes:
      optimizer: a `torch.optim.Optimizer`.
      params: its parameters.
      grads: attached before every step.
      compile_seconds: of the first two steps: state is made and, where the optimizer compiles, code.
      seconds: of every timed call.
    """

    optimizer: Any
    params: list[Any]
    grads: list[Any]
    compile_seconds: float = 0.0
    seconds: list[float] = field(default_factory=list)

    def run(self, given: Any) -> float:
        """Takes one step; its wall time. The gradients are its own, whatever is given."""
        del given
        for param, grad in zip(self.params, self.grads, strict=True):
            param.grad = grad
        start = time.perf_counter()
        self.optimizer.step()
        return time.perf_counter() - start

    @property
    def state_bytes(self) -> int:
        """Of all tensors in the optimizer's state, however nested."""
        tensors = jax.tree.leaves(list(self.optimizer.state.values()))
        return sum(x.numel() * x.element_size() for x in tensors if hasattr(x, "element_size"))


def on_torch(make: Callable[[list[Any]], Any], values: Matrices, grads: Matrices) -> TorchUpdate:
    """An optimizer on its own copy of the values, past its first steps."""
    import torch

    torch.set_num_threads(cores())
    params = [torch.nn.Parameter(torch.tensor(x)) for x in values]
    update = TorchUpdate(make(params), params, [torch.tensor(g) for g in grads])
    update.compile_seconds = update.run(None) + update.run(None)
    return update


def muon_rows(case: Case, rate: float) -> dict[str, Callable[[], Timed]]:
    """Muon on the attention kernels; the first row is the base.

    HeavyBall flattens all axes but the first: it is given every kernel as the full matrix that the base sees.
    """

    def full(tree: Any) -> Matrices:
        # (d, heads, d_head) and (heads, d_head, d) are both d × d in memory.
        return [np.asarray(x).reshape(math.isqrt(x.size), -1) for x in jax.tree.leaves(tree)]

    def heavy(params: list[Any]) -> Any:
        import heavyball

        return heavyball.Muon(params, lr=rate, betas=(0.95, 0.99), consume_grad=False)

    return {
        "optax.contrib.muon": lambda: prepared(case.muon(rate), case.params, case.grads),
        "ddc_muon": lambda: prepared(case.ddc_muon(rate), case.params, case.grads),
        "heavyball.Muon": lambda: on_torch(heavy, full(case.params), full(case.grads)),
    }


def lora_case(pairs: int, width: int) -> Case:
    """`pairs` of A (RANK, width) and B (width, RANK), both drawn at random: past the start, where B is zero."""

    def factors(seed: int, size: float) -> Any:
        down, up = jax.random.split(jax.random.key(seed))
        a = size * jax.random.normal(down, (pairs, RANK, width)) * width**-0.5
        b = size * jax.random.normal(up, (pairs, width, RANK)) * RANK**-0.5
        return {"pairs": [{"a": a[i], "b": b[i]} for i in range(pairs)]}

    return Case(factors(3, 1.0), factors(4, 1e-3), [])


def lora_rows(case: Case, rate: float) -> dict[str, Callable[[], Timed]]:
    """Optimizers of LoRA factors; the first row is the base."""

    def adamw(params: list[Any]) -> Any:
        import torch

        return torch.optim.AdamW(params, lr=rate)

    def rite(params: list[Any]) -> Any:
        from pytorch_optimizer import LoRARite

        return LoRARite(params, lr=rate)

    # LoRARite takes A, B, A, B …: the order of the tree's leaves.
    values, slopes = ([np.asarray(x) for x in jax.tree.leaves(tree)] for tree in (case.params, case.grads))
    return {
        "optax.adamw": lambda: prepared(optax.adamw(rate), case.params, case.grads),
        "torch.optim.AdamW": lambda: on_torch(adamw, values, slopes),
        "pytorch_optimizer.LoRARite": lambda: on_torch(rite, values, slopes),
    }
