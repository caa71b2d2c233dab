"""`quotient_adamw` and `quotient_muon` for LoRA factors in PyTorch. This file needs no other package than torch.

    python torch_lora.py        # a demonstration; needs no GPU and no download

An adapter adds B·A to a weight, with A (rank, in) and B (out, rank). For any invertible S, the factors S·A and B·S⁻¹
have the same product. AdamW's steps depend on S. Those of the two optimizers here do not: the product B·A is trained in
the same way from all factors of one product. They take the same steps as `gauge_optax.quotient_adamw` and
`gauge_optax.quotient_muon` (to 1e-6 over 20 steps, tests/test_torch_lora.py), whose documentation explains the method.

Pairs of factors are found by PEFT's names, `...lora_A.default.weight` and `...lora_B.default.weight`, or given by the
JSON that `gauge_optax.tools.to_json(gauge_optax.lora(shapes))` returns:

    model = peft.get_peft_model(...)
    optimizer = QuotientAdamW(model.named_parameters(), lr=1e-3)

In groups of parameters, tensors have no names. Pass the model too, in which their names are looked up:

    optimizer = QuotientAdamW([{"params": ..., "lr": 1e-3}, {"params": ...}], model=model)

`transformers.Trainer` makes such groups. It keeps a keyword called `model` for itself, so give it the names:

    names = dict(model.named_parameters())
    Trainer(model, optimizer_cls_and_kwargs=(QuotientAdamW, {"lr": 1e-3, "names": names}), ...)

An adapter that is not just a product of two factors raises an error: for example AdaLoRA's, which has `lora_E` between
them, or the factors of all experts in two matrices, unless `experts=` is their number.
"""

from __future__ import annotations

import abc
import contextlib
import json
import math
import re
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

LEAST = 1e-4  # after a step, a Gram matrix is inverted exactly for eigenvalues above this share of its norm
_OF_ADAPTERS = "pass go.tools.to_json(go.lora(params)) of the adapters alone"


State = dict[str, Any]


class Pair(NamedTuple):
    """The names of two factors, and the number of experts whose factors they hold.

    The axis of the rank then also counts experts: it is (experts·rank) in A, and (rank·experts) in B.
    """

    a: str
    b: str
    experts: int = 1


def _error(problem: str, found: Any, expected: str, remedy: str) -> ValueError:
    return ValueError(f"{problem}\n  found:    {found}\n  expected: {expected}\n  remedy:   {remedy}")


def _partner(name: str) -> str:
    """The name of factor B for the name of a factor A. Other names are returned as they are."""
    return re.sub(r"(lora_(?:embedding_)?)A(?=\.|$)", r"\1B", name)


def pairs_of(
    names: Iterable[str] | Mapping[str, Tensor], gauges: str | None = None, experts: int | None = None,
    frozen: Mapping[str, Tensor] | None = None) -> list[Pair]:
    """The pairs of factors among parameter names.

    Args:
      names: the names of all parameters that are trained. If it maps names to tensors, shapes are checked too.
      gauges: JSON from `gauge_optax.tools.to_json`; by default pairs are found by PEFT's names.
      experts: the number of experts whose factors are in two matrices (PEFT's `target_parameters`); 1 for one adapter.
      frozen: parameters of the model that are not trained. They may stand between two factors, which is an error.

    Raises:
      ValueError: no pair; JSON of another format, or with a gauge that is not LoRA's; a factor without its partner;
        another tensor between two factors, or a method that is no product of two; experts whose number is unknown.
    """
    shapes = {name: tuple(x.shape) for name, x in names.items()} if isinstance(names, Mapping) else {}
    names = list(names)
    if experts is not None and (isinstance(experts, bool) or not hasattr(experts, "__index__") or experts < 1):
        raise _error("bad experts", f"experts={experts!r}", "the number of experts, from 1", "pass experts=8, or None")
    if gauges is None:
        found = [Pair(name, _partner(name)) for name in names if _partner(name) != name and not name.endswith(".bias")]
    else:
        found = [pair for entry in _entries(gauges) for pair in _bound(entry, names)]
    known = set(names)
    missing = [name for pair in found for name in pair[:2] if name not in known]
    if gauges is None:
        of_b = [x for x in names if re.search(r"lora_(embedding_)?B(\.|$)", x) and not x.endswith(".bias")]
        missing += [name for name in of_b if name not in {pair.b for pair in found}]
    if missing or not found:
        raise _error(
            "a factor without its partner" if missing else "no pair of LoRA factors", missing[:1] or names[:4],
            "'...lora_A...weight' with '...lora_B...weight', both of them trained",
            "pass model.named_parameters() of a PEFT model with LoRA, or the JSON of its gauges")
    if gauges is None:
        everything = shapes | {name: tuple(x.shape) for name, x in (frozen or {}).items()}
        factors = {name for pair in found for name in pair[:2]}
        found = [_checked(pair, everything, experts, factors, known) for pair in found]
    for pair in found:
        if pair.a in shapes:
            _check_shapes(pair, shapes[pair.a], shapes[pair.b])
    return found


def _checked(
    pair: Pair, shapes: Mapping[str, tuple[int, ...]], experts: int | None, factors: set[str], known: set[str]
) -> Pair:
    """Returns a pair that was found by its names, with the number of its experts.

    Raises ValueError if GL(rank) between the factors is no symmetry, or may be none.
    """
    module, _, rest = re.split(r"((?:^|\.)[^.]*lora_(?:embedding_)?A(?:\.|$))", pair.a, maxsplit=1)
    method = pair.a[len(module) :].lstrip(".").split(".")[0]
    if not re.fullmatch(r"lora_(embedding_)?A", method):
        raise _error(
            f"factors of another method, {pair.a!r}", f"the name {method!r}", "'lora_A' or 'lora_embedding_A'",
            "leave these parameters to another optimizer; if only their product counts, pass gauges=")
    names = [name for name in module.lower().split(".") if name != "base_layer"]
    last = max((k for k, name in enumerate(names) if "expert" in name or "moe" in name), default=None)
    many = last is not None and not any(x.isdigit() or x in ("gate", "router") for x in names[last + 1 :])
    many = many and not any(re.search(r"shared|router|attn|attention|expert_?\d+$", name) for name in names)
    many = many and ("expert" in names[last or 0] or len(names) - 1 - (last or 0) < 2)
    if pair.a not in shapes:  # names alone
        between = [x for x in known if x not in factors and x.startswith(f"{module}." if module else "") and re.match(
            r"[^.]*lora_(?!magnitude|alpha|scaling|embedding_B\.bias|B\.)", x[len(module) :].lstrip("."))]
        if between or (many and experts is None):
            raise _error(
                f"{between[0]!r} may stand between {pair.a!r} and {pair.b!r}" if between
                else f"factors that may be those of all experts, {pair.a!r}", "names without shapes",
                "a product of two factors alone", "pass names with tensors, dict(model.named_parameters())")
        return pair._replace(experts=experts or 1) if many else pair
    flat, out = shapes[pair.a][0], shapes[pair.b][0]
    if many and experts is None and flat > 1 and len(shapes[pair.a]) == 2:
        raise _error(
            f"factors that may be those of all experts, {pair.a!r}", f"shape {shapes[pair.a]}",
            "to know whether they are one adapter or one for each expert",
            "pass experts= with the number of experts for PEFT's target_parameters, experts=1 for one adapter")
    number = (experts or 1) if many else 1
    rank = flat // number
    for name, shape in shapes.items():
        if name in factors or not name.startswith(f"{module}." if module else ""):
            continue
        inside = name[len(module) :].lstrip(".").split(".")
        marked = any(n in (rank, flat) and n > 1 for n in shape) or (shape == (rank * rank,) and rank > 1)
        near = len(inside) <= len(rest.split(".")) + 2 and inside[0] not in ("base_layer", "weight", "bias")
        of_ends = re.search(r"magnitude|dora", name) or (inside[0] == _partner(method) and inside[-1] == "bias")
        if marked and near and not (of_ends and (math.prod(shape) == out or math.prod(shape) == shapes[pair.a][1])):
            if "lora" in name or all(n in (1, rank, flat) for n in shape) or len(inside) == 1:
                raise _error(
                    f"{name!r} stands between {pair.a!r} and {pair.b!r}, or may", f"shape {shape}, rank {rank}",
                    "a product of two factors alone: otherwise S between them is no symmetry",
                    "train this adapter by another optimizer; if it stands elsewhere, pass gauges=")
    return pair._replace(experts=number)


def _check_shapes(pair: Pair, a: tuple[int, ...], b: tuple[int, ...]) -> None:
    """Raises ValueError unless A is (experts·rank, in, ...) and B is (out, rank·experts, 1, ...)."""
    if len(a) < 2 or len(b) < 2 or a[0] != b[1] or math.prod(b[2:]) != 1 or a[0] % pair.experts:
        of = f", for {pair.experts} experts" if pair.experts > 1 else ""
        raise _error(
            f"factors that do not fit each other, {pair.a!r} and {pair.b!r}", f"shapes {a} and {b}{of}",
            "A (rank, in) and B (out, rank); of experts (experts·rank, in) and (out, rank·experts)",
            "leave these parameters to another optimizer")


def _entries(gauges: str) -> list[State]:
    """The gauges of a JSON text, as one dictionary per gauge."""
    with contextlib.suppress(ValueError, KeyError, TypeError):
        data = json.loads(gauges)
        if data["format"] == 1 and all(isinstance(entry, dict) for entry in data["gauges"]):
            return list(data["gauges"])
    raise _error("no list of gauges", repr(gauges)[:60], "JSON of format 1", _OF_ADAPTERS)


def _bound(entry: State, names: Sequence[str]) -> Iterable[Pair]:
    """The pairs of one `head_linear` gauge. A capture `{i}` in its patterns matches text without "." and "/"."""
    sides = [entry.get(side) for side in ("left", "right")]
    if entry.get("kind") != "head_linear" or not all(isinstance(side, dict) and len(side) == 1 for side in sides):
        raise _error(
            "a gauge that is no pair of LoRA factors", entry, "'head_linear' with one path a side", _OF_ADAPTERS)
    (left, a_axes), (right, b_axes) = (next(iter(side.items())) for side in sides if side)
    a_axes, b_axes = str(a_axes), str(b_axes)  # a list (several blocks) becomes text that matches nothing below
    stacked = re.fullmatch(r"\((\w+) basis\) _", a_axes)
    sizes = entry.get("sizes") or {}
    several = stacked is not None and b_axes == f"_ (basis {stacked[1]})" and stacked[1] in sizes
    if not several and not (re.fullmatch("basis( _)+", a_axes) and re.fullmatch("_ basis( _)*", b_axes)):
        raise _error(
            "factors in another layout", f"{a_axes!r} and {b_axes!r}",
            "'basis _' and '_ basis', or '(expert basis) _' and '_ (basis expert)' with sizes={'expert': 8}",
            "write the JSON for PyTorch's tensors, A (rank, in) and B (out, rank)")
    experts = int(sizes[stacked[1]]) if several and stacked else 1
    pieces = re.split(r"(\{\w+\}|\*\*)", left)
    pattern = "".join(
        f"(?P<{x[1:-1]}>[^./]+)" if x[:1] == "{" else ".+" if x == "**" else re.escape(x) for x in pieces)
    for name in names:
        if hit := re.fullmatch(pattern, name):
            other = _partner(name) if "**" in right else right.format(**hit.groupdict())
            yield Pair(name, other, experts)


# Linear algebra -----------------------------------------------------------------------------------------


def fixed_noise(block: int, rows: int, columns: int, draw: int) -> Tensor:
    """Pseudo-random numbers in (−1, 1) that are the same on every machine, (rows, columns), float64."""
    mask = 2**32 - 1
    x = (torch.arange(rows * columns, dtype=torch.int64) + (20260 + block * 0x9E3779B9)) & mask
    x = x ^ ((0xC2B2AE35 * draw) & mask)
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        x = x ^ (x >> shift)
        # The low 32 bits of a product of 32-bit numbers, computed in two halves, because int64 would overflow.
        x = ((x * (factor & 0xFFFF)) + (((x * (factor >> 16)) & 0xFFFF) << 16)) & mask
    x = x ^ (x >> 16)
    return (x.to(torch.float32) / 2.0**31 - 1.0).reshape(rows, columns).to(torch.float64)


def root_of(m: Tensor) -> tuple[Tensor, Tensor]:
    """M^(1/2) of a positive matrix M, and its inverse, by products of matrices only.

    Directions whose eigenvalue is below `LEAST` (relative to the norm) get a larger root.
    """
    eye, eps = torch.eye(len(m), dtype=m.dtype, device=m.device), torch.finfo(m.dtype).eps
    if len(m) == 2:
        trace, determinant = m.trace(), torch.linalg.det(m)
        root = determinant.clamp(min=0.0).sqrt()
        divisor = torch.maximum(root, 0.5 * math.sqrt(LEAST) * trace)
        inverse = ((trace + divisor) * eye - m) / (divisor * (trace + 2.0 * root).sqrt())
        return (inverse.trace() * eye - inverse) / torch.linalg.det(inverse), inverse
    size = torch.linalg.norm(m)
    root, inverse, low, largest = m / size, eye, math.sqrt(LEAST), 1.0
    while 1.0 - low > eps:
        scale = math.sqrt(3.0 / (1.0 + low + low * low))
        step = scale * (1.5 * eye - 0.5 * scale**2 * (inverse @ root))
        root, inverse, largest = root @ step, step @ inverse, 1.5 * scale * largest
        low = 0.5 * scale * low * (3.0 - (scale * low) ** 2)
    inverse = inverse / size.sqrt()
    root = m @ inverse
    # Where M has a small eigenvalue, root·inverse is not yet 1. Each step of Newton's method squares what it lacks.
    root, lacking = root + size.sqrt() / largest * (eye - inverse @ root), 0.1
    while lacking > eps:
        root, lacking = root + root @ (eye - inverse @ root), lacking**2
    return root, inverse


def root_and_inverse(rows: Tensor) -> tuple[Tensor, Tensor] | None:
    """(RᵀR)^(1/2) and its inverse for a matrix R (`rows`); None if the columns of R are linearly dependent."""
    short = max(0, rows.shape[1] - rows.shape[0])
    r = torch.linalg.qr(torch.nn.functional.pad(rows, (0, 0, 0, short)), mode="r").R
    cutoff = 1e-12 if rows.dtype == torch.float64 else 1e-4
    if not bool((r.diagonal().abs() > cutoff * torch.linalg.norm(r, dim=0)).all()):
        return None
    _, sizes, vectors = torch.linalg.svd(r)
    return vectors.T * sizes @ vectors, vectors.T / sizes @ vectors


def without_frame(a: Tensor, b: Tensor) -> bool:
    """Whether S cannot be computed from two factors: both have linearly dependent columns, and not both are zero."""
    return bool(a.any() or b.any()) and root_and_inverse(a) is None and root_and_inverse(b) is None


def rotation_of(a: Tensor, b: Tensor) -> Tensor:
    """The rotation part of S for two factors: the polar factor of fixed random combinations of their rows.

    One factor has orthonormal columns here. If the other one is larger, it is scaled down.
    """
    size, eps = a.shape[1], torch.finfo(a.dtype).eps
    rows = [x * (size**0.25 / torch.linalg.norm(x.T @ x).sqrt().clamp(min=size**0.25)) for x in (a, b)]
    mixed = [sum(fixed_noise(k, len(x), size, draw).to(a).T @ x for k, x in enumerate(rows)) for draw in range(4)]
    sizes = torch.linalg.svdvals(torch.cat(mixed[:2]))
    best, rank = torch.eye(size, dtype=a.dtype, device=a.device), 0
    if not bool(sizes[-1] > 64 * eps * sizes[0]):
        return best  # less than full rank, which determines no rotation
    for m in mixed:
        u, kept, vt = torch.linalg.svd(m)
        found = int((kept > 1e3 * eps * sizes).sum())
        best, rank = (u @ vt, found) if found > rank else (best, rank)
    return best


def antisymmetric_solution(m: Tensor, k: Tensor, steps: int = 12) -> Tensor:
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


def rotation_back(m: Tensor, cross: Tensor) -> Tensor:
    """R − 1 for the rotation R that makes Wᵀ(W + U)R symmetric: it removes what a step U of W rotates.

    Args:
      m: WᵀW.
      cross: WᵀU.
    """
    eye, eps = torch.eye(len(m), dtype=m.dtype, device=m.device), torch.finfo(m.dtype).eps
    damped, back = m + math.sqrt(eps) / len(m) * m.trace() * eye, torch.zeros_like(m)
    for _ in range(2 if eps > 1e-10 else 3):
        end = cross + (m + cross) @ back
        x = 0.5 * antisymmetric_solution(damped + 0.5 * (end + end.T), -end)
        # Add the Cayley transform less 1, 2X(1 − X)⁻¹, with X scaled down to ‖X²‖ ≤ `most`. The inverse is computed as
        # (1 − X)⁻¹ = (1 + X)(1 + X²)(1 + X⁴)…
        power, most = x @ x, 2.0**-6
        scale = most / torch.linalg.norm(power).clamp(min=most)
        x, power = scale.sqrt() * x, scale * power
        series = eye + x
        while most > eps:
            series, power, most = series + series @ power, power @ power, most**2
        turn = 2.0 * x @ series
        back = back + turn + back @ turn
    return back


def polar(m: Tensor, eps: float) -> Tensor:
    """Nearly the polar factor U·Vᵀ: five Newton–Schulz steps, with Muon's coefficients."""
    x = m.T if m.shape[0] < m.shape[1] else m
    # Divided by the largest entry first, so that `eps` is small beside gradients of any size.
    x = x / x.abs().max().clamp_min(torch.finfo(x.dtype).tiny)
    x = x / (torch.linalg.norm(x) + eps)
    eye = torch.eye(x.shape[1], dtype=x.dtype, device=x.device)
    for _ in range(5):
        gram = x.T @ x
        x = x @ (3.4445 * eye - 4.775 * gram + 2.0315 * gram @ gram)
    return x.T if m.shape[0] < m.shape[1] else x


# The slice ----------------------------------------------------------------------------------------------


class Slice(NamedTuple):
    """The matrix S of one pair, which relates its stored factors to its slice point.

    The slice is a set with one point (Â, B̂) for every product. With rows of length rank, the stored factors are
    A = Â·S and B = B̂·S⁻ᵀ. S is computed once, from the factors at the start.

    Attributes:
      s: the matrix S.
      inverse: the inverse of S.
      live: whether A had full rank at the start. If True, every step keeps the columns of Â orthonormal.
    """

    s: Tensor
    inverse: Tensor
    live: Tensor

    @classmethod
    def of(cls, a: Tensor, b: Tensor) -> Slice:
        """Computes S from the factors `a`, (in, rank), and `b`, (out, rank)."""
        eye = torch.eye(a.shape[1], dtype=a.dtype, device=a.device)
        from_a = root_and_inverse(a)
        from_b = root_and_inverse(b) if from_a is None else None
        root, inverse = from_a or (from_b[::-1] if from_b is not None else (eye, eye))
        turn = rotation_of(a @ inverse, b @ root.T)
        return cls(turn @ root, inverse @ turn.T, torch.tensor(from_a is not None))

    def enter(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """The slice point (Â, B̂) of stored factors."""
        return a @ self.inverse, b @ self.s.T

    def enter_dual(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """The gradient at the slice point, from the gradient at the stored factors."""
        return a @ self.s.T, b @ self.inverse

    def leave(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """The step of stored factors, from the step of the slice point."""
        return a @ self.s, b @ self.inverse.T

    def step(self, a: Tensor, b: Tensor, da: Tensor, db: Tensor) -> tuple[Tensor, Tensor]:
        """The step from the slice point (a, b) to the slice point of what an optimizer's step (da, db) leads to."""
        end_a, end_b, _, _, turn = self.fixed(a, b, da, db)
        return end_a @ turn - a, end_b @ turn - b

    def fixed(self, a: Tensor, b: Tensor, da: Tensor, db: Tensor) -> tuple[Tensor, ...]:
        """Moves the end of a step (da, db) from (a, b) back to the slice, by a symmetric matrix between the factors.

        Returns:
          Both factors after this move, the symmetric matrix, its inverse, and a rotation R. Multiplied by R, the
          factors are the end of the step without the part that only rotates the basis of both.
        """
        end_a, end_b, root = a + da, b + db, torch.eye(a.shape[1], dtype=a.dtype, device=a.device)
        inverse = root
        if self.live:
            root, inverse = root_of(end_a.T @ end_a)
            end_a, end_b = end_a @ inverse, end_b @ root
        back = rotation_back(a.T @ a + b.T @ b, a.T @ (end_a - a) + b.T @ (end_b - b))
        return end_a, end_b, root, inverse, torch.eye(len(back), dtype=a.dtype, device=a.device) + back


# The optimizers -----------------------------------------------------------------------------------------


Params: TypeAlias = torch.nn.Module | Iterable[Any]  # a model; or tensors, pairs (name, tensor), or groups of these


class _Quotient(torch.optim.Optimizer, abc.ABC):
    """Steps pairs of factors on the slice, and all other parameters by AdamW."""

    matrices_alone = False  # whether factors of experts and of convolutions are refused

    def __init__(
        self, params: Params, defaults: State, gauges: str | None, model: torch.nn.Module | None,
        names: Mapping[str, Tensor] | None, experts: int | None) -> None:
        if isinstance(params, torch.nn.Module):
            model = model or params
            params = params.named_parameters()
        self._given = dict(names or {}) | (dict(model.named_parameters()) if model is not None else {})
        self._names = {x: name for name, x in self._given.items()}  # tensors are compared by identity
        self._pairing: tuple[str | None, int | None] = gauges, experts
        self.pairs: list[Pair] = []
        self._complete = False
        items: list[Any] = list(params)
        super().__init__(items if items and all(isinstance(x, dict) for x in items) else [{"params": items}], defaults)
        self._complete = True
        self._pair()

    def add_param_group(self, param_group: State) -> None:
        """Adds a group of tensors, or of pairs (name, tensor). Tensors that need no gradient are left out.

        Raises:
          ValueError: a tensor whose name is unknown; also the errors of `pairs_of` and of the class.
        """
        group, given = dict(param_group), param_group["params"]
        tensors = []
        for item in [given] if isinstance(given, Tensor) else list(given):
            if isinstance(item, dict):
                raise _error(
                    "dicts beside parameters", sorted(item), "groups or parameters, not both", "pass groups alone")
            name, x = (self._names.get(item), item) if isinstance(item, Tensor) else item
            if name is None:
                raise _error(
                    "a parameter whose name is unknown", f"a tensor of shape {tuple(x.shape)}",
                    "names, by which factors are found",
                    f"pass model.named_parameters(), or the model too: {type(self).__name__}(groups, model=model)")
            self._names[x] = name
            self._given[name] = x
            tensors += [x] if x.requires_grad else []
        group["params"] = tensors
        group.pop("param_names", None)
        super().add_param_group(self._options(group))
        if self._complete:
            self._pair()

    def load_state_dict(self, state_dict: State) -> None:
        """Loads a state with the dtypes in which it was saved.

        `torch.optim` would convert its tensors to the dtypes of parameters. If S and its inverse were rounded to
        bfloat16, their product would not be 1, and moments would differ from those of a run without interruption.
        """
        super().load_state_dict(state_dict)

        def on(device: torch.device, value: Any) -> Any:
            if isinstance(value, dict):
                return {key: on(device, x) for key, x in value.items()}
            return value.to(device) if isinstance(value, Tensor) else value

        for saved, own in zip(state_dict["param_groups"], self.param_groups, strict=True):
            for number, x in zip(saved["params"], own["params"], strict=True):
                self.state[x] = on(x.device, state_dict["state"].get(number, {}))

    def _options(self, group: State) -> State:
        """The options of a group, under the names that the steps use. Subclasses may rename options."""
        return group

    def _pair(self) -> None:
        """Finds the pairs among the parameters of all groups."""
        trained = {self._names[x]: x for group in self.param_groups for x in group["params"]}
        gauges, experts = self._pairing
        rest = {name: x for name, x in self._given.items() if name not in trained}
        self.pairs = pairs_of(trained, gauges, experts, rest)
        for pair in self.pairs if self.matrices_alone else ():
            if pair.experts > 1 or trained[pair.a].ndim > 2:
                raise _error(
                    f"factors that are no matrices, {pair.a!r}",
                    f"shape {tuple(trained[pair.a].shape)}, experts: {pair.experts}", "one matrix each",
                    "train this adapter by QuotientAdamW")
        self._groups()

    def _groups(self) -> dict[str, State]:
        """Name of a parameter → its group.

        Raises:
          ValueError: the two factors of a pair are in groups with different options.
        """
        of = {self._names[x]: group for group in self.param_groups for x in group["params"]}
        for a, b, _ in self.pairs:
            options = [key for key in of[a] if key not in ("params", "param_names")]
            unlike = [key for key in options if of[a] is not of[b] and of[a][key] != of[b].get(key)]
            if unlike:
                key = unlike[0]
                raise _error(
                    f"two factors in groups with other options, {a!r} and {b!r}",
                    f"{key} {of[a][key]} and {of[b][key]}", "the same options for both: a step moves them together",
                    "put both into one group, or give both groups the same options")
        return of

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Takes one step of all parameters that have a gradient. A pair needs the gradients of both factors."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        groups = self._groups()
        paired = {name for pair in self.pairs for name in pair[:2]}
        parameters = {self._names[x]: x for group in self.param_groups for x in group["params"]}
        for pair in self.pairs:
            self._step_pair(pair, parameters[pair.a], parameters[pair.b], groups[pair.a])
        for name, x in parameters.items():
            if name not in paired and x.grad is not None:
                x.add_(self._adamw(self.state[x], _wide(x.grad), _wide(x), groups[name]).to(x.dtype))
        return loss

    def _step_pair(self, pair: Pair, a: Tensor, b: Tensor, group: State) -> None:
        if a.grad is None or b.grad is None:
            if a.grad is not b.grad:
                raise _error(
                    f"a factor without a gradient, '{pair.a if a.grad is None else pair.b}'",
                    "a gradient of the other one", "gradients of both factors, which a step moves together",
                    "train both; or freeze one before the optimizer is made, and leave the other to torch.optim.AdamW")
            return
        state, number = self.state[a], pair.experts
        states = [state] if number == 1 else state.setdefault("experts", [{} for _ in range(number)])
        # Divide the factors into one pair per expert, (in, rank) and (out, rank). They are stored as (experts·rank, in)
        # and (out, rank·experts).
        of_a = [_wide(x).reshape(number, -1, math.prod(a.shape[1:])).mT for x in (a, a.grad)]
        of_b = [_wide(x).reshape(len(b), -1, number).permute(2, 0, 1) for x in (b, b.grad)]
        if count := sum(without_frame(of_a[0][k], of_b[0][k]) for k in range(number) if "s" not in states[k]):
            warnings.warn(str(_error(
                f"factors without full rank, {pair.a!r} and {pair.b!r}",
                f"both factors have less than full rank in {count} of {number} pairs",
                "a factor of full rank in every pair: these pairs train as if no gauge bound them",
                f"lower the rank to {of_a[0].shape[1]} or less, or start from an A of full rank")), stacklevel=2)
        steps = [
            self._step_factors(states[k], of_a[0][k], of_b[0][k], (of_a[1][k], of_b[1][k]), group)
            for k in range(number)
        ]
        a.add_(torch.stack([da.T for da, _ in steps]).reshape(a.shape).to(a.dtype))
        b.add_(torch.stack([db for _, db in steps], -1).reshape(b.shape).to(b.dtype))

    def _step_factors(
        self, state: State, a: Tensor, b: Tensor, gradient: tuple[Tensor, Tensor], group: State
    ) -> tuple[Tensor, Tensor]:
        """The step of one pair of factors with rows of length rank."""
        if "s" not in state:  # the state holds tensors and no `Slice`, so that `state_dict` can save it
            state |= Slice.of(a, b)._asdict()
        on = Slice(state["s"], state["inverse"], state["live"])
        point = on.enter(a, b)
        return on.leave(*on.step(*point, *self._inner(state, on, point, on.enter_dual(*gradient), group)))

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
    """AdamW whose steps depend on the product of LoRA factors, and not on how it is divided between them.

    Args:
      params: a model, its `named_parameters()`, or groups: dicts with "params" and options of their own, as
        `torch.optim` takes them. Tensors without names need `model` or `names`. Those that need no gradient are left
        out. Both factors of a pair must have the same options.
      lr: learning rate.
      betas: decays of the first and second moments.
      eps: added to the root of the second moment.
      weight_decay: decoupled decay, multiplied by the learning rate.
      gauges: JSON from `gauge_optax.tools.to_json`; by default pairs are found by PEFT's names.
      model: the model in which the names of parameters are looked up.
      names: the same as a mapping, `dict(model.named_parameters())`.
      experts: the number of experts, where PEFT keeps their factors in two matrices (`target_parameters`).

    Raises:
      ValueError: names that are unknown; the errors of `pairs_of`; two factors in groups with different options.

    Parameters that are in no pair get AdamW. If neither factor of a pair has full rank at the first step, for example
    because the rank is larger than both dimensions, its steps depend on how the product is divided. A warning names
    such pairs.
    """

    def __init__(
        self, params: Params, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8,
        weight_decay: float = 1e-4, gauges: str | None = None, model: torch.nn.Module | None = None,
        names: Mapping[str, Tensor] | None = None, experts: int | None = None
    ) -> None:
        """See the class."""
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "nesterov": False}
        super().__init__(params, defaults, gauges, model, names, experts)

    def _inner(
        self, state: State, on: Slice, point: Sequence[Tensor], gradient: Sequence[Tensor], group: State
    ) -> tuple[Tensor, Tensor]:
        factors = [state.setdefault(name, {}) for name in ("of_a", "of_b")]
        a, b = (self._adamw(*x, group) for x in zip(factors, gradient, point, strict=True))
        return a, b


class QuotientMuon(_Quotient):
    """Muon whose steps depend on the product of LoRA factors, and not on how it is divided between them.

    Args:
      params: a model, its `named_parameters()`, or groups: dicts with "params" and options of their own, as
        `torch.optim` takes them. Tensors without names need `model` or `names`. Those that need no gradient are left
        out. Both factors of a pair must have the same options.
      lr: learning rate.
      beta: decay of the first moment of factors, with Nesterov's look-ahead.
      eps: added to the norm of a momentum that was divided by its largest entry, and to AdamW's denominator.
      weight_decay: decoupled decay of factors, multiplied by the learning rate.
      gauges: JSON from `gauge_optax.tools.to_json`; by default pairs are found by PEFT's names.
      model: the model in which the names of parameters are looked up.
      names: the same as a mapping, `dict(model.named_parameters())`.
      experts: the number of experts, where PEFT keeps their factors in two matrices (`target_parameters`).

    Raises:
      ValueError: names that are unknown; the errors of `pairs_of`; two factors in groups with different options.

    Parameters that are in no pair get AdamW with Nesterov's look-ahead. They have no decay, unless their group has a
    `weight_decay` of its own. Muon sees factors whose sizes change as without a slice (`pin=False` in JAX). Factors of
    experts in two matrices, and of convolutions, raise an error. A warning names pairs as in `QuotientAdamW`.
    """

    matrices_alone = True

    def __init__(
        self, params: Params, lr: float = 1e-3, beta: float = 0.95, eps: float = 1e-8, weight_decay: float = 0.0,
        gauges: str | None = None, model: torch.nn.Module | None = None, names: Mapping[str, Tensor] | None = None,
        experts: int | None = None
    ) -> None:
        """See the class."""
        others = {"betas": (0.9, 0.999), "eps": eps, "weight_decay": 0.0, "nesterov": True}
        defaults = others | {"lr": lr, "beta": beta, "decay": weight_decay}
        super().__init__(params, defaults, gauges, model, names, experts)

    def _options(self, group: State) -> State:
        return group | ({"decay": group["weight_decay"]} if "weight_decay" in group else {})

    def _inner(
        self, state: State, on: Slice, point: Sequence[Tensor], gradient: Sequence[Tensor], group: State
    ) -> tuple[Tensor, Tensor]:
        if "offset" not in state:
            eye = torch.eye(point[0].shape[1], dtype=point[0].dtype, device=point[0].device)
            state |= {"offset": [eye, eye], "moments": [torch.zeros_like(x) for x in point], "number": 0}
        # Muon sees the point (Â·P, B̂·P⁻ᵀ). P is the product of all elements that `fixed` has undone.
        p, inverse = state["offset"]
        a, b = point[0] @ p, point[1] @ inverse.T
        gradient = gradient[0] @ inverse.T, gradient[1] @ p
        state["number"] += 1
        steps = []
        for number, (value, g) in enumerate(zip((a, b), gradient, strict=True)):
            state["moments"][number] = moment = group["beta"] * state["moments"][number] + (1 - group["beta"]) * g
            ahead = moment / (1 - group["beta"] ** (state["number"] + 1))
            mean = group["beta"] * ahead + (1 - group["beta"]) * g / (1 - group["beta"] ** state["number"])
            # Muon's factor for the shape needs the factor as PyTorch stores it, A (rank, in) and B (out, rank).
            stored = mean.T if number == 0 else mean
            factor = math.sqrt(max(1.0, stored.shape[1] / stored.shape[0])) * polar(stored, group["eps"])
            factor = factor.T if number == 0 else factor
            steps.append(-group["lr"] * (factor + group["decay"] * value))
        da, db = steps[0] @ inverse, steps[1] @ p.T
        _, _, root, back, turn = on.fixed(point[0], point[1], da, db)
        p, inverse = turn.T @ root @ p @ turn, turn.T @ inverse @ back @ turn
        # One step of Newton's method makes P the inverse of `inverse` again; roundoff would add up over the steps.
        state["offset"] = [p + p @ (torch.eye(len(p), dtype=p.dtype, device=p.device) - inverse @ p), inverse]
        return da, db


def _wide(x: Tensor) -> Tensor:
    """The tensor in float32, or in float64 if it has that."""
    return x if x.dtype == torch.float64 else x.to(torch.float32)


# Demonstration ------------------------------------------------------------------------------------------


class Adapter(torch.nn.Module):
    """A frozen weight with LoRA factors, which have PEFT's names."""

    def __init__(self, a: Tensor, b: Tensor, weight: Tensor) -> None:
        """Copies the factors."""
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
    """Trains two sets of factors of one product, by AdamW and by both optimizers here, and prints the losses."""
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
