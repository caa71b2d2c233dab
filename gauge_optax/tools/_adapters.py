"""Finds modules whose LoRA factors have no GL(rank) symmetry, by names and shapes of their leaves.

GL(rank), A·S and S⁻¹·B in place of the factors A and B, is a symmetry if the function depends on their product alone.
It does not if another leaf (a *mixer* or a gate) stands between the factors, if two matrices hold the factors of all
experts, or if the adapter method also uses one factor by itself. Every doubtful case is an error, because training with
a wrong gauge would go wrong without any error.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Collection, Mapping
from typing import NamedTuple

from gauge_optax.binding.axes import parse_axes
from gauge_optax.errors import binding_error

Shape = tuple[int, ...]
Names = tuple[str, ...]
Modules = dict[Names, list[tuple[str, Names]]]

# Names, in this order: of leaves that an adapter changes; of modules that hold such leaves; of DoRA's magnitudes; of
# leaves that belong to adapters; of leaves that several adapters may share.
_KERNELS = ("kernel", "weight", "w", "embedding", "bias")
_BASES = ("base_layer", "base_module", "base")
_MAGNITUDE = re.compile(r"magnitude|dora", re.IGNORECASE)
_OF_ADAPTERS = re.compile(r"lora|vera|hada|lokr|mixer|gate|lambda|diag|latent|singular|sigma", re.IGNORECASE)
_SHARED = re.compile(r"(lora|vera|hada|lokr)_|mixer", re.IGNORECASE)
_WHOLE_FACTOR = re.compile(r"lokr_w[12]")  # the other factor of a Kronecker product


class Adapter(NamedTuple):
    """Two factors with their axes.

    Attributes:
      a: path of A.
      b: path of B.
      module: names of the module that holds both.
      left: axes string of A; "" before it is known.
      right: axes string of B; "" before it is known.
      sizes: axis name → length, for axes inside parentheses of `left` and `right`.

    >>> adapter = Adapter("m/lora_a", "m/lora_b", ("m",), "_ basis", "basis _", {})
    >>> adapter.side("m/lora_a", (8, 2)), adapter.rank(2)
    ((2, (), (8,)), 2)
    """

    a: str
    b: str
    module: tuple[str, ...]
    left: str = ""
    right: str = ""
    sizes: Mapping[str, int] = {}

    def side(self, path: str, shape: Shape) -> tuple[int, Shape, Shape]:
        """Sorts the lengths of a factor's axes by what the axes hold.

        Returns:
          Three things: the length of the axis that holds the rank; the lengths of other axes with names (layers,
          experts); the lengths of free axes (`_`), which are inputs or outputs.
        """
        plan = parse_axes("lora", path, self.left if path == self.a else self.right)
        flat, batch, free = 1, [], []
        for parts, length in zip(plan.groups, shape, strict=False):
            names = [part.name for part in parts]
            if "basis" in names:
                flat = length
            elif names == ["_"]:
                free.append(length)
            else:
                batch.append(length)
        return flat, tuple(batch), tuple(free)

    def rank(self, flat: int) -> int:
        """The rank, from the length `flat` of the axis that holds it. That axis may be experts × rank, in one."""
        plan = parse_axes("lora", self.a, self.left)
        for parts in plan.groups:
            names = [part.name for part in parts]
            if "basis" in names and len(names) > 1:
                return self.sizes.get("basis") or flat // math.prod(self.sizes.get(x, 1) for x in names if x != "basis")
        return flat


def pattern_of(module: Collection[str]) -> str:
    """The path pattern of a module, given by the names on its path, as a key for the argument `axes` of `lora`.

    >>> pattern_of(("layer_0", "mlp")), pattern_of(())
    ('layer_0/mlp', '**')
    """
    return "/".join(module) or "**"


def refuse_method(prefix: str, a: str, b: str) -> None:
    """Raises ValueError if the names' prefix belongs to a method that uses more than the product of the two factors.

    >>> refuse_method("lora_", "lora_a", "lora_b")
    """
    hit = re.search(r"([A-Za-z]*)lora_(?:embedding_)?$", prefix)
    if (hit and hit[1].lower() not in ("", "q", "rs")) or re.search(r"(^|_)poly_lora_$", prefix):
        raise binding_error(
            "lora", f"factors of another method, '{a}' and '{b}'", f"names that begin with '{prefix}'",
            "a function of the product of two factors alone, as in LoRA; DeLoRA divides by the length of each row, "
            "GraLoRA exchanges parts of blocks, Poly averages factors",
            "pass the tree without them; if their product alone counts, bind them with go.head_linear")


def by_module(leaves: Mapping[str, Shape]) -> Modules:
    """Returns module → its leaves, those of modules inside it included. A leaf is (path, its names below the module).

    >>> by_module({"mlp/lora_a": (8, 2)})
    {(): [('mlp/lora_a', ('mlp', 'lora_a'))], ('mlp',): [('mlp/lora_a', ('lora_a',))]}
    """
    out: Modules = {}
    for path in leaves:
        names = tuple(re.split("[/.]", path))
        for k in range(len(names)):
            out.setdefault(names[:k], []).append((path, names[k:]))
    return out


def refuse_between(
    adapter: Adapter, leaves: Mapping[str, Shape], modules: Modules, bound: Collection[str]
) -> None:
    """Raises ValueError if another leaf of the module stands, or may stand, between two factors.

    Args:
      adapter: the two factors.
      leaves: path → shape of all leaves.
      modules: the leaves of every module, as `by_module` returns them.
      bound: paths of all factors in the tree, and of biases that move with them.

    >>> leaves = {"m/lora_a": (8, 2), "m/lora_b": (2, 8), "m/kernel": (8, 8)}
    >>> adapter = Adapter("m/lora_a", "m/lora_b", ("m",), "_ basis", "basis _", {})
    >>> refuse_between(adapter, leaves, by_module(leaves), ["m/lora_a", "m/lora_b"])
    """
    flat, batch, inputs = adapter.side(adapter.a, leaves[adapter.a])
    _, _, outputs = adapter.side(adapter.b, leaves[adapter.b])
    rank = adapter.rank(flat)
    marks = {flat, rank} - {1}
    tail = len(re.split("[/.]", adapter.a)) - len(adapter.module)
    for path, rest in [*_beside(adapter, modules), *_above(adapter, modules, bound)]:
        shape = leaves[path]
        at = [k for k, n in enumerate(shape) if n in marks]
        inner = shape[len(batch) :] if shape[: len(batch)] == batch else shape
        square = inner == (rank * rank,) and rank > 1  # a rank × rank matrix that is stored as one row
        if not (at or square) or path in bound or math.prod(shape) == 1 or len(rest) > tail + 1:
            continue
        if _harmless(adapter, rest, shape, batch, inputs, outputs):
            continue
        alike = rest[-1] != "bias" and all(n in marks | {1} for n in inner)
        if (at and len(rest) == 1) or _OF_ADAPTERS.search("/".join(rest)) or alike:
            raise binding_error(
                "lora", f"'{path}' stands between '{adapter.a}' and '{adapter.b}', or may",
                f"shape {shape}, beside factors of rank {rank}",
                "a function of the product of the two factors alone; GL(rank) is no symmetry otherwise",
                _remedy(adapter, path, inner, len(shape) - len(inner), rank))


def _beside(adapter: Adapter, modules: Modules) -> list[tuple[str, Names]]:
    """The leaves of the adapter's module. If its name says that it holds factors alone, also those around it."""
    module = adapter.module
    if module and re.search("lora|adapter", module[-1], re.IGNORECASE):  # a module for the factors alone
        above = [(path, rest) for path, rest in modules[module[:-1]] if rest[0] != module[-1]]
        return [*modules[module], *above]
    return modules[module]


def _above(adapter: Adapter, modules: Modules, bound: Collection[str]) -> list[tuple[str, Names]]:
    """Leaves of outer modules that belong to adapters and that several pairs may share, such as VeRA's matrices."""
    factors = {tuple(re.split("[/.]", path)) for path in bound}
    found = []
    for k in range(len(adapter.module)):
        scope = adapter.module[:k]
        for path, rest in modules[scope]:
            inside = (*scope, rest[0])
            if _SHARED.search(rest[0]) and not any(names[: len(inside)] == inside for names in factors):
                found.append((path, rest))
    return found


def _harmless(adapter: Adapter, rest: Names, shape: Shape, batch: Shape, inputs: Shape, outputs: Shape) -> bool:
    """Whether a leaf is known not to stand between the factors."""
    size, layers = math.prod(shape), math.prod(batch)
    ends = {math.prod(inputs), math.prod(outputs), *inputs, *outputs}
    if rest[0] in _BASES or _WHOLE_FACTOR.fullmatch(rest[0]):
        return True
    if any(_MAGNITUDE.search(name) for name in rest):
        return size // layers in ends
    of_b = re.split("[/.]", adapter.b)[len(adapter.module)]
    if rest[-1] == "bias" and rest[0] in (of_b, "bias"):
        return size == layers * math.prod(outputs)
    if re.search("alpha|scaling", rest[0]):
        return shape == batch
    if rest[0] in _names_of_kernels(adapter):
        return len(rest) > 1 or size % (layers * math.prod(inputs) * math.prod(outputs)) == 0
    return False


def _names_of_kernels(adapter: Adapter) -> set[str]:
    """The names that the adapted kernel may have, that is the leaf to which the product of the factors is added.

    For example, the factor `w_lora_a` belongs to the kernel `w`.
    """
    first = re.split("[/.]", adapter.a)[len(adapter.module)]
    return {*_KERNELS, re.sub("_?lora_.*$", "", first)} - {""}


def _remedy(adapter: Adapter, path: str, inner: Shape, lead: int, rank: int) -> str:
    """The advice of the error message: how to bind factors that have the leaf at `path` between them."""
    leave = "pass the tree without this adapter"
    elsewhere = (
        "if it stands elsewhere, bind the pair with "
        f"go.head_linear({{{adapter.a!r}: {adapter.left!r}}}, {{{adapter.b!r}: {adapter.right!r}}})")
    large = [k for k, n in enumerate(inner) if n > 1]
    names = [part.name for part in parse_axes("lora", adapter.a, adapter.left).items if part.name not in ("_", "basis")]
    if set(inner) <= {1, rank} and "(" not in adapter.left and lead == len(names):
        left, right = adapter.left, adapter.right
        if len(large) == 1:
            of_leaf = " ".join([*names, *("channel" if n > 1 else "_" for n in inner)])
            left, right = (side.replace("basis", "channel") for side in (left, right))
            return (
                f"{leave}, and bind it by hand: if '{path}' multiplies A's outputs one by one, "
                f"go.rescale({{{adapter.a!r}: {left!r}}}, {{{path!r}: {of_leaf!r}}}) and "
                f"go.rescale({{{path!r}: {of_leaf!r}}}, {{{adapter.b!r}: {right!r}}}); {elsewhere}")
        if len(large) == len(inner) == 2:
            torch = left.split().index("basis") == len(names)  # B·M·A
            one, two = ("_ basis", "basis _") if torch else ("basis _", "_ basis")
            of_a, of_b = (" ".join([*names, side]) for side in (one, two))
            return (
                f"{leave}, and bind it by hand: if the function is that of {'B·M·A' if torch else 'A·M·B'}, one of "
                f"go.head_linear({{{adapter.a!r}: {left!r}}}, {{{path!r}: {of_a!r}}}) or "
                f"go.head_linear({{{path!r}: {of_b!r}}}, {{{adapter.b!r}: {right!r}}}), since no list takes both; "
                f"{elsewhere}")
    return f"{leave}; {elsewhere}"


def refuse_flattened(adapter: Adapter, leaves: Mapping[str, Shape], modules: Modules) -> None:
    """Raises ValueError if two matrices hold, or may hold, the factors of several blocks or experts.

    If the adapted kernel is in the tree, its size shows it: it is a multiple of the size of the product of the factors.
    Otherwise only the module's name can show it.

    >>> leaves = {"m/lora_a": (8, 2), "m/lora_b": (2, 8), "m/kernel": (8, 8)}
    >>> adapter = Adapter("m/lora_a", "m/lora_b", ("m",), "_ basis", "basis _", {})
    >>> refuse_flattened(adapter, leaves, by_module(leaves))
    """
    a, b = leaves[adapter.a], leaves[adapter.b]
    flat, batch, _ = adapter.side(adapter.a, a)
    if flat == 1 or re.search("(hada|lokr)_w", adapter.a):
        return
    if len(a) == len(b) == 3 and len(batch) == 1:
        _refuse_scanned(adapter, a, b)
    if len(a) != 2 or len(b) != 2 or batch:
        return
    torch = adapter.left == "basis _"
    sides = ("({} basis) _", "_ (basis {})") if torch else ("_ ({} basis)", "(basis {}) _")
    one, key = (adapter.left, adapter.right), pattern_of(adapter.module)
    product = math.prod(a) // flat * (math.prod(b) // flat)
    kernels = {
        path: leaves[path]
        for path, rest in _beside(adapter, modules)
        if len(leaves[path]) > 1
        and (rest[0] in _BASES or (len(rest) == 1 and rest[0] in _names_of_kernels(adapter)))
        and not re.search("lora_", "/".join(rest))
    }
    sizes = {path: math.prod(shape) for path, shape in kernels.items()}
    if product in sizes.values():
        return
    for path, size in sizes.items():
        if size > product and size % product == 0:
            number, stacked = size // product, kernels[path][0] == size // product
            axes = tuple(side.format("expert") for side in sides)
            say = f"for experts that follow each other, axes={{{key!r}: {axes!r}}}, sizes={{'expert': {number}}}"
            if not stacked and torch:
                blocks = "('(block basis) _', '_ (block basis)')"
                say = f"for blocks on a diagonal, axes={{{key!r}: {blocks}}}, sizes={{'block': {number}}}"
            raise binding_error(
                "lora", f"'{adapter.a}' and '{adapter.b}' hold the factors of several "
                f"{'experts' if stacked else 'blocks'}, or of a part of the kernel",
                f"shapes {a} and {b}, whose product has {product} entries; '{path}' {kernels[path]} has {number} times "
                "as many", "a product of the kernel's size", f"{say}; for one pair, axes={{{key!r}: {one!r}}}")
    if _of_experts(adapter.module):
        axes = tuple(side.format("expert") for side in sides)
        raise binding_error(
            "lora", f"'{adapter.a}' and '{adapter.b}' may hold the factors of all experts",
            f"shapes {a} and {b} in a module of experts, without an axis for experts",
            "a layout that shapes or axes tell: one adapter of all experts, of rank "
            f"{flat}, or one for each in axes of length experts·rank",
            f"for one adapter, axes={{{key!r}: {one!r}}}; for PEFT's adapters of fused experts, "
            f"axes={{{key!r}: {axes!r}}}, sizes={{'expert': ...}} with their number")


def _refuse_scanned(adapter: Adapter, a: Shape, b: Shape) -> None:
    """Raises ValueError for experts in scanned layers: the leading axis of factors may count layers or experts."""
    names = [*adapter.module, ""]
    scanned = any(re.fullmatch("layers?|blocks?", x) and not y.isdigit() for x, y in itertools.pairwise(names))
    if scanned and _of_experts(adapter.module):
        one, key = (adapter.left, adapter.right), pattern_of(adapter.module)
        front = tuple(side.replace(side.split()[0], "expert") for side in one)
        split = (one[0].replace("basis", "(expert basis)"), one[1].replace("basis", "(basis expert)"))
        raise binding_error(
            "lora", f"'{adapter.a}' and '{adapter.b}' may hold the factors of all experts of a layer",
            f"shapes {a} and {b} in a module of experts in layers, with one axis in front",
            "to know whether this axis is that of layers or that of experts",
            f"for experts in front, axes={{{key!r}: {front!r}}}; for layers in front, with experts in PEFT's order, "
            f"axes={{{key!r}: {split!r}}}, sizes={{'expert': ...}} with their number")


def _of_experts(module: tuple[str, ...]) -> bool:
    """Whether a module holds several experts, and not shared experts, a single expert or the router."""
    names = [name.lower() for name in module if name not in _BASES]
    if any(re.search("shared|router|attn|attention", name) for name in names):
        return False
    experts = [k for k, name in enumerate(names) if "expert" in name]
    for k in experts:
        single = re.fullmatch(r".*expert_?\d+", names[k]) or any(name.isdigit() for name in names[k + 1 :])
        if not single:
            return True
    near = names[-2:] if not experts else []
    return any("moe" in name for name in near) and names[-1] != "gate"
