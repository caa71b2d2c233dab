"""PyTorch optimizers, timed on a CPU on the same matrices as ours: HeavyBall's Muon and LoRA-RITE.

They need the package's extra `peers` (torch, heavyball, pytorch-optimizer). torch is imported only when a row is made.
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
    """The reason for which these rows are left out; None if they are not."""
    missing = [name for module, name in _PACKAGES.items() if importlib.util.find_spec(module) is None]
    if missing:
        return f"{', '.join(missing)} not installed (extra `peers`)"
    if jax.default_backend() != "cpu":
        return "PyTorch on a CPU is compared with JAX on a CPU only"
    return None


def versions() -> dict[str, str]:
    """The versions of the packages of these optimizers."""
    return {name: version(name) for name in _PACKAGES.values()}


@dataclass
class TorchUpdate:
    """A step of a PyTorch optimizer, which can be timed.

    Attributes:
      optimizer: a `torch.optim.Optimizer`.
      params: its parameters.
      grads: the gradients, which are assigned to the parameters before every step.
      compile_seconds: seconds of the first two steps, in which the state is made and code is compiled, if any is.
      seconds: the seconds of every timed call.
    """

    optimizer: Any
    params: list[Any]
    grads: list[Any]
    compile_seconds: float = 0.0
    seconds: list[float] = field(default_factory=list)

    def run(self, given: Any) -> float:
        """Takes one step with the gradients `grads`, and returns its wall time. `given` is ignored."""
        del given
        for param, grad in zip(self.params, self.grads, strict=True):
            param.grad = grad
        start = time.perf_counter()
        self.optimizer.step()
        return time.perf_counter() - start

    @property
    def state_bytes(self) -> int:
        """The bytes of all tensors in the optimizer's state."""
        tensors = jax.tree.leaves(list(self.optimizer.state.values()))
        return sum(x.numel() * x.element_size() for x in tensors if hasattr(x, "element_size"))


def on_torch(make: Callable[[list[Any]], Any], values: Matrices, grads: Matrices) -> TorchUpdate:
    """Makes an optimizer on a copy of the values, and takes its first two steps."""
    import torch

    torch.set_num_threads(cores())
    params = [torch.nn.Parameter(torch.tensor(x)) for x in values]
    update = TorchUpdate(make(params), params, [torch.tensor(g) for g in grads])
    update.compile_seconds = update.run(None) + update.run(None)
    return update


def muon_rows(case: Case, rate: float) -> dict[str, Callable[[], Timed]]:
    """Name of a row → a function that prepares Muon on the attention kernels. The first row is the base.

    HeavyBall's Muon joins all axes of a leaf but the first. It therefore gets every kernel as a matrix, the same one
    that the base orthogonalizes.
    """

    def full(tree: Any) -> Matrices:
        # In memory, (d, heads, d_head) and (heads, d_head, d) are both d × d matrices.
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
    """A case with pairs of factors A (RANK, width) and B (width, RANK). B is 0 only at the start: both are random."""

    def factors(seed: int, size: float) -> Any:
        down, up = jax.random.split(jax.random.key(seed))
        a = size * jax.random.normal(down, (pairs, RANK, width)) * width**-0.5
        b = size * jax.random.normal(up, (pairs, width, RANK)) * RANK**-0.5
        return {"pairs": [{"a": a[i], "b": b[i]} for i in range(pairs)]}

    return Case(factors(3, 1.0), factors(4, 1e-3), [])


def lora_rows(case: Case, rate: float) -> dict[str, Callable[[], Timed]]:
    """Name of a row → a function that prepares an optimizer of LoRA factors. The first row is the base."""

    def adamw(params: list[Any]) -> Any:
        import torch

        return torch.optim.AdamW(params, lr=rate)

    def rite(params: list[Any]) -> Any:
        from pytorch_optimizer import LoRARite

        return LoRARite(params, lr=rate)

    # LoRARite takes a list A, B, A, B, …, which is the order of the tree's leaves.
    values, slopes = ([np.asarray(x) for x in jax.tree.leaves(tree)] for tree in (case.params, case.grads))
    return {
        "optax.adamw": lambda: prepared(optax.adamw(rate), case.params, case.grads),
        "torch.optim.AdamW": lambda: on_torch(adamw, values, slopes),
        "pytorch_optimizer.LoRARite": lambda: on_torch(rite, values, slopes),
    }
