"""`quotient_adamw` and `quotient_muon` for LoRA factors in PyTorch: this file needs torch alone.

    python torch_lora.py        # a demonstration; needs no GPU and no download

An adapter adds B·A to a weight, with A (rank, in) and B (out, rank), and any invertible S between the factors changes
nothing: (S·A, B·S⁻¹) is the same function. AdamW does notice S. These two optimizers do not: runs from equal products
stay equal. They take the same steps as `gauge_optax.quotient_adamw` and `gauge_optax.quotient_muon` (to 1e-6 over 20
steps, tests/test_torch_lora.py), whose documentation explains the method.

Pairs are found by PEFT's names, `...lora_A.default.weight` and `...lora_B.default.weight`, or given as the JSON that
`gauge_optax.to_json(gauge_optax.lora(shapes))` writes:

    model = peft.get_peft_model(...)
    optimizer = QuotientAdamW(model.named_parameters(), lr=1e-3)
"""

from __future__ import annotations

import abc
import json
import math
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

LEAST = 1e-4  # least eigenvalue, relative to the norm, from which a Gram matrix is inverted exactly after a step


State = dict[str, Any]


class Pair(NamedTuple):
    """Names of the two factors of an adapter."""

    a: str
    b: str


def pairs_of(names: Iterable[str], gauges: str | None = None) -> list[Pair]:
    """The pairs of factors among parameter names.

    Args:
      names: of all parameters.
      gauges: JSON from `gauge_optax.to_json`; by default pairs are found by PEFT's names.

    Raises:
      ValueError: no pair; JSON of another format, or with a gauge that is not LoRA's; a factor without its partner.
    """
    names = list(names)
    if gauges is None:
        found = [Pair(name, name.replace("lora_A", "lora_B")) for name in names if "lora_A" in name]
    else:
        found = [pair for entry in json.loads(gauges)["gauges"] for pair in _bound(entry, names)]
    missing = [name for pair in found for name in pair if name not in names]
    if missing or not found:
        raise ValueError(
            f"{'a factor without its partner' if missing else 'no pair of LoRA factors'}\n"
            f"  found:    {missing[:1] or names[:4]}\n"
            f"  expected: '...lora_A...weight' with '...lora_B...weight'\n"
            f"  remedy:   pass model.named_parameters() of a PEFT model with LoRA, or the JSON of its gauges"
        )
    return found


def _bound(entry: State, names: Sequence[str]) -> Iterable[Pair]:
    """The pairs of one `head_linear` entry: patterns with captures in braces, which hold no separator."""
    if entry.get("kind") != "head_linear" or len(entry["left"]) != 1 or len(entry["right"]) != 1:
        raise ValueError(
            f"a gauge that is no pair of LoRA factors\n  found:    {entry}\n"
            "  expected: 'head_linear' with one path a side\n"
            "  remedy:   pass go.to_json(go.lora(params)) of the adapters alone"
        )
    (left, a_axes), (right, b_axes) = (next(iter(entry[side].items())) for side in ("left", "right"))
    if a_axes != "basis _" or b_axes != "_ basis":
        raise ValueError(
            f"factors in another layout\n  found:    {a_axes!r} and {b_axes!r}\n  expected: 'basis _' and '_ basis'"
            "\n  remedy:   write the JSON for PyTorch's tensors, A (rank, in) and B (out, rank)"
        )
    pieces = re.split(r"(\{\w+\}|\*\*)", left)
    groups = {"**": r".+"}
    pattern = "".join(
        f"(?P<{piece[1:-1]}>[^./]+)" if piece.startswith("{") else groups.get(piece, re.escape(piece))
        for piece in pieces
    )
    for name in names:
        if hit := re.fullmatch(pattern, name):
            if "**" in right:
                yield Pair(name, name.replace("lora_A", "lora_B"))
            else:
                yield Pair(name, right.format(**hit.groupdict()))


# Linear algebra -----------------------------------------------------------------------------------------


def fixed_noise(block: int, rows: int, columns: int, draw: int) -> Tensor:
    """Pseudo-random numbers in (−1, 1) that are the same on every machine, (rows, columns), float64."""
    mask = 2**32 - 1
    x = (torch.arange(rows * columns, dtype=torch.int64) + (20260 + block * 0x9E3779B9)) & mask
    x = x ^ ((0xC2B2AE35 * draw) & mask)
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        x = x ^ (x >> shift)
        # Products of 32 bits, of which the low 32 are kept: in two halves, because int64 would overflow.
        x = ((x * (factor & 0xFFFF)) + (((x * (factor >> 16)) & 0xFFFF) << 16)) & mask
    x = x ^ (x >> 16)
    return (x.to(torch.float32) / 2.0**31 - 1.0).reshape(rows, columns).to(torch.float64)


def inverse_sqrt(m: Tensor) -> Tensor:
    """M^(−1/2) of a positive definite matrix by products alone; directions below `LEAST` get less."""
    eye = torch.eye(len(m), dtype=m.dtype, device=m.device)
    if len(m) == 2:
        trace, determinant = m.trace(), torch.linalg.det(m)
        root = determinant.clamp(min=0.0).sqrt()
        divisor = torch.maximum(root, 0.5 * math.sqrt(LEAST) * trace)
        return ((trace + divisor) * eye - m) / (divisor * (trace + 2.0 * root).sqrt())
    size = torch.linalg.norm(m)
    root, inverse, low = m / size, eye, math.sqrt(LEAST)
    while 1.0 - low > torch.finfo(m.dtype).eps:
        scale = math.sqrt(3.0 / (1.0 + low + low * low))
        step = scale * (1.5 * eye - 0.5 * scale**2 * (inverse @ root))
        root, inverse = root @ step, step @ inverse
        low = 0.5 * scale * low * (3.0 - (scale * low) ** 2)
    return inverse / size.sqrt()


def root_and_inverse(rows: Tensor) -> tuple[Tensor, Tensor] | None:
    """(RᵀR)^(1/2) of a matrix R with its inverse, or None where its columns depend on each other."""
    short = max(0, rows.shape[1] - rows.shape[0])
    r = torch.linalg.qr(torch.nn.functional.pad(rows, (0, 0, 0, short)), mode="r").R
    cutoff = 1e-12 if rows.dtype == torch.float64 else 1e-4
    if not bool((r.diagonal().abs() > cutoff * torch.linalg.norm(r, dim=0)).all()):
        return None
    _, sizes, vectors = torch.linalg.svd(r)
    return vectors.T * sizes @ vectors, vectors.T / sizes @ vectors


def rotation_of(a: Tensor, b: Tensor) -> Tensor:
    """The rotation that two factors read as: the polar factor of fixed combinations of their rows."""
    size, best, rank = a.shape[1], torch.eye(a.shape[1], dtype=a.dtype, device=a.device), 0
    for draw in range(4):
        noise = [fixed_noise(number, len(x), size, draw).to(a) for number, x in enumerate((a, b))]
        u, sizes, vt = torch.linalg.svd(noise[0].T @ a + noise[1].T @ b)
        live = sizes > 1e3 * torch.finfo(a.dtype).eps * sizes[0]
        if int(live.sum()) > rank:
            best, rank = (u * live) @ vt, int(live.sum())
        if rank == size:
            return best
    return torch.eye(size, dtype=a.dtype, device=a.device)  # of less than full rank: the basis stays


def antisymmetric_solution(m: Tensor, k: Tensor, steps: int = 24) -> Tensor:
    """The antisymmetric X of M·X + X·M = K − Kᵀ, by conjugate gradients with the diagonal as preconditioner."""
    size, diagonal = len(m), m.diagonal()
    weight = torch.nan_to_num(1.0 / (diagonal[:, None] + diagonal[None, :]), posinf=0.0)
    above = torch.triu(k - k.T, 1)
    residual = above - above.T
    direction = weight * residual
    energy = (residual * direction).sum()
    done = energy * (0.1 * torch.finfo(m.dtype).eps) ** 2
    solution = torch.zeros_like(k)
    for _ in range(min(steps, 2 + size * (size - 1) // 2)):
        if not bool(energy > done):
            break
        product = m @ direction
        rate = energy / (2.0 * (direction * product).sum())
        solution = solution + rate * direction
        residual = residual - rate * (product - product.T)
        scaled = weight * residual
        fresh = (residual * scaled).sum()
        direction, energy = scaled + fresh / energy * direction, fresh
    return solution


def polar(m: Tensor, eps: float) -> Tensor:
    """Nearly the polar factor U·Vᵀ: five Newton–Schulz steps, with Muon's coefficients."""
    x = m.T if m.shape[0] < m.shape[1] else m
    x = x / (torch.linalg.norm(x) + eps)
    eye = torch.eye(x.shape[1], dtype=x.dtype, device=x.device)
    for _ in range(5):
        gram = x.T @ x
        x = x @ (3.4445 * eye - 4.775 * gram + 2.0315 * gram @ gram)
    return x.T if m.shape[0] < m.shape[1] else x


# The slice ----------------------------------------------------------------------------------------------


class Slice(NamedTuple):
    """Where one pair stands on the set with one point per product: (A, B) = (Â·S, B̂·S⁻ᵀ), with rows of length rank.

    S is read once, from the factors at the start.

    Attributes:
      s: the matrix S.
      inverse: of S.
      live: whether A had full rank, so that every step keeps the columns of Â orthonormal.
    """

    s: Tensor
    inverse: Tensor
    live: Tensor

    @classmethod
    def of(cls, a: Tensor, b: Tensor) -> Slice:
        """Reads S from the factors `a`, (in, rank), and `b`, (out, rank)."""
        eye = torch.eye(a.shape[1], dtype=a.dtype, device=a.device)
        from_a = root_and_inverse(a)
        from_b = root_and_inverse(b) if from_a is None else None
        root, inverse = from_a or (from_b[::-1] if from_b is not None else (eye, eye))
        turn = rotation_of(a @ inverse, b @ root.T)
        return cls(turn @ root, inverse @ turn.T, torch.tensor(from_a is not None))

    def enter(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """The slice point of stored factors."""
        return a @ self.inverse, b @ self.s.T

    def enter_dual(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """The gradient at the slice point, from that of stored factors."""
        return a @ self.s.T, b @ self.inverse

    def leave(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """The step of stored factors, from that of slice points."""
        return a @ self.s, b @ self.inverse.T

    def step(self, a: Tensor, b: Tensor, da: Tensor, db: Tensor) -> tuple[Tensor, Tensor]:
        """The step from the slice point (a, b) to where an optimizer's step (da, db) ends on the slice."""
        end_a, end_b = self.fixed(a + da, b + db)[:2]
        da, db = end_a - a, end_b - b
        # Without the part that only turns the basis of both factors.
        generator = antisymmetric_solution(a.T @ a + b.T @ b, -(a.T @ da + b.T @ db))
        return da + a @ generator, db + b @ generator

    def fixed(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """A point moved back to the slice along its orbit, and the symmetric matrix that did it, with its inverse."""
        if not self.live:
            eye = torch.eye(a.shape[1], dtype=a.dtype, device=a.device)
            return a, b, eye, eye
        gram = a.T @ a
        inverse = inverse_sqrt(gram)
        root = gram @ inverse
        return a @ inverse, b @ root, root, inverse


# The optimizers -----------------------------------------------------------------------------------------


class _Quotient(torch.optim.Optimizer, abc.ABC):
    """Pairs on the slice; all other parameters by AdamW."""

    def __init__(
        self, named_parameters: Iterable[tuple[str, Tensor]], gauges: str | None, defaults: State
    ) -> None:
        named = [(name, x) for name, x in named_parameters if x.requires_grad]
        self.names = [name for name, _ in named]
        self.pairs = pairs_of(self.names, gauges)
        super().__init__([{"params": [x for _, x in named]}], defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of all parameters that have a gradient; a pair needs the gradients of both factors."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            parameters = dict(zip(self.names, group["params"], strict=True))
            paired = {name for pair in self.pairs for name in pair}
            for a, b in self.pairs:
                self._step_pair(parameters[a], parameters[b], group)
            for name, x in parameters.items():
                if name not in paired and x.grad is not None:
                    state = self.state[x]
                    x.add_(self._adamw(state, _wide(x.grad), _wide(x), group).to(x.dtype))
        return loss

    def _step_pair(self, a: Tensor, b: Tensor, group: State) -> None:
        if a.grad is None or b.grad is None:
            return
        state = self.state[a]
        wide_a, wide_b = _wide(a).T, _wide(b)
        if "s" not in state:  # tensors alone, which `state_dict` keeps
            state |= Slice.of(wide_a, wide_b)._asdict()
        on = Slice(state["s"], state["inverse"], state["live"])
        point = on.enter(wide_a, wide_b)
        gradient = on.enter_dual(_wide(a.grad).T, _wide(b.grad))
        da, db = on.leave(*on.step(*point, *self._inner(state, on, point, gradient, group)))
        a.add_(da.T.to(a.dtype))
        b.add_(db.to(b.dtype))

    @abc.abstractmethod
    def _inner(
        self, state: State, on: Slice, point: Sequence[Tensor], gradient: Sequence[Tensor], group: State
    ) -> tuple[Tensor, Tensor]:
        """The step of both factors at a slice point, from the gradient there."""

    @staticmethod
    def _adamw(state: State, gradient: Tensor, value: Tensor, group: State) -> Tensor:
        """AdamW's step, with decoupled decay."""
        b1, b2 = group["betas"]
        if "count" not in state:
            state |= {"count": 0, "mu": torch.zeros_like(gradient), "nu": torch.zeros_like(gradient)}
        state["count"] += 1
        state["mu"] = b1 * state["mu"] + (1 - b1) * gradient
        state["nu"] = b2 * state["nu"] + (1 - b2) * gradient**2
        mean = state["mu"] / (1 - b1 ** (state["count"] + group["nesterov"]))
        if group["nesterov"]:
            mean = b1 * mean + (1 - b1) * gradient / (1 - b1 ** state["count"])
        size = (state["nu"] / (1 - b2 ** state["count"])).sqrt() + group["eps"]
        return -group["lr"] * (mean / size + group["weight_decay"] * value)


class QuotientAdamW(_Quotient):
    """AdamW that does not notice how the product of LoRA factors is split between them.

    Args:
      named_parameters: as from `model.named_parameters()`; those that need no gradient are left out.
      lr: learning rate.
      betas: decays of the first and second moments.
      eps: added to the root of the second moment.
      weight_decay: decoupled decay, multiplied by the learning rate.
      gauges: JSON from `gauge_optax.to_json`; by default pairs are found by PEFT's names.

    Parameters that are in no pair get AdamW.
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, Tensor]],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-4,
        gauges: str | None = None,
    ) -> None:
        """See the class."""
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "nesterov": False}
        super().__init__(named_parameters, gauges, defaults)

    def _inner(
        self, state: State, on: Slice, point: Sequence[Tensor], gradient: Sequence[Tensor], group: State
    ) -> tuple[Tensor, Tensor]:
        factors = [state.setdefault(name, {}) for name in ("of_a", "of_b")]
        a, b = (self._adamw(*x, group) for x in zip(factors, gradient, point, strict=True))
        return a, b


class QuotientMuon(_Quotient):
    """Muon that does not notice how the product of LoRA factors is split between them.

    Args:
      named_parameters: as from `model.named_parameters()`; those that need no gradient are left out.
      lr: learning rate.
      beta: decay of the first moment of factors, with Nesterov's look-ahead.
      eps: added to norms, and to the root of AdamW's second moment.
      weight_decay: decoupled decay of factors, multiplied by the learning rate.
      gauges: JSON from `gauge_optax.to_json`; by default pairs are found by PEFT's names.

    Parameters that are in no pair get AdamW without decay, with Nesterov's look-ahead. The optimizer sees A grow and
    shrink, as Muon alone would.
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, Tensor]],
        lr: float = 1e-3,
        beta: float = 0.95,
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        gauges: str | None = None,
    ) -> None:
        """See the class."""
        others = {"betas": (0.9, 0.999), "eps": eps, "weight_decay": 0.0, "nesterov": True}
        defaults = others | {"lr": lr, "beta": beta, "decay": weight_decay}
        super().__init__(named_parameters, gauges, defaults)

    def _inner(
        self, state: State, on: Slice, point: Sequence[Tensor], gradient: Sequence[Tensor], group: State
    ) -> tuple[Tensor, Tensor]:
        if "offset" not in state:
            eye = torch.eye(point[0].shape[1], dtype=point[0].dtype, device=point[0].device)
            state |= {"offset": [eye, eye], "moments": [torch.zeros_like(x) for x in point], "number": 0}
        # The point that Muon sees, Â·P and B̂·P⁻ᵀ: P gathers what `fixed` has undone so far.
        p, inverse = state["offset"]
        a, b = point[0] @ p, point[1] @ inverse.T
        gradient = gradient[0] @ inverse.T, gradient[1] @ p
        state["number"] += 1
        steps = []
        for number, (value, g) in enumerate(zip((a, b), gradient, strict=True)):
            state["moments"][number] = moment = group["beta"] * state["moments"][number] + (1 - group["beta"]) * g
            ahead = moment / (1 - group["beta"] ** (state["number"] + 1))
            mean = group["beta"] * ahead + (1 - group["beta"]) * g / (1 - group["beta"] ** state["number"])
            # Rows are inputs of A (rank, in) and B (out, rank) as PyTorch stores them.
            stored = mean.T if number == 0 else mean
            factor = math.sqrt(max(1.0, stored.shape[1] / stored.shape[0])) * polar(stored, group["eps"])
            factor = factor.T if number == 0 else factor
            steps.append(-group["lr"] * (factor + group["decay"] * value))
        da, db = steps[0] @ inverse, steps[1] @ p.T
        _, _, root, back = on.fixed(point[0] + da, point[1] + db)
        state["offset"] = [root @ p, inverse @ back]
        return da, db


def _wide(x: Tensor) -> Tensor:
    """In float32 or better."""
    return x if x.dtype == torch.float64 else x.to(torch.float32)


# Demonstration ------------------------------------------------------------------------------------------


class Adapter(torch.nn.Module):
    """A frozen weight with LoRA factors, called as PEFT calls them."""

    def __init__(self, a: Tensor, b: Tensor, weight: Tensor) -> None:
        """Takes copies."""
        super().__init__()
        self.register_buffer("weight", weight)
        self.lora_A = torch.nn.ModuleDict({"default": torch.nn.Linear(a.shape[1], a.shape[0], bias=False)})
        self.lora_B = torch.nn.ModuleDict({"default": torch.nn.Linear(b.shape[1], b.shape[0], bias=False)})
        with torch.no_grad():
            self.lora_A["default"].weight.copy_(a)
            self.lora_B["default"].weight.copy_(b)

    def forward(self, x: Tensor) -> Tensor:
        """x·(weight + B·A)ᵀ."""
        return x @ self.weight.T + self.lora_B["default"](self.lora_A["default"](x))


def main() -> None:
    """Two sets of factors of one product, trained alike by AdamW and by both optimizers here."""
    torch.manual_seed(0)
    rank, inputs, outputs = 4, 16, 12
    a, b, weight = (torch.randn(shape) / 4 for shape in ((rank, inputs), (outputs, rank), (outputs, inputs)))
    x, target = torch.randn(64, inputs), torch.randn(64, outputs)
    s = torch.diag(torch.logspace(-1, 1, rank)) @ torch.linalg.qr(torch.randn(rank, rank)).Q
    makers: dict[str, Callable[[torch.nn.Module], torch.optim.Optimizer]] = {
        "AdamW": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2),
        "QuotientAdamW": lambda model: QuotientAdamW(model.named_parameters(), lr=1e-2),
        "QuotientMuon": lambda model: QuotientMuon(model.named_parameters(), lr=1e-2),
    }
    print("loss after 100 steps, from factors of one product: as drawn, and badly scaled")
    for name, make in makers.items():
        losses = []
        for factors in ((a, b), (s @ a, b @ torch.linalg.inv(s))):
            model = Adapter(*factors, weight)
            optimizer = make(model)
            for _ in range(100):
                optimizer.zero_grad()
                loss = torch.mean((model(x) - target) ** 2)
                loss.backward()
                optimizer.step()
            losses.append(torch.mean((model(x) - target) ** 2).item())
        print(f"{name:14s} {losses[0]:.6f} {losses[1]:.6f}")


if __name__ == "__main__":
    main()
