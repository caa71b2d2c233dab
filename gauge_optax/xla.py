"""Tricks for the compiler that change no number; each states the memory, time or error that it saves.

XLA's CPU backend starts any operation whose inputs are ready. It therefore computes cheap arrays early and keeps them,
and it writes an array to memory if two operations read it. A *peak* is the peak memory of one compiled update on one
wide layer (d = 2048, f = 8192), divided by AdamW's peak.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np

Tree = TypeVar("Tree")


def one_after(finished: Any) -> jax.Array:
    """Returns 1.0 with a data dependency on `finished`: XLA computes whatever uses this number after `finished`.

    Args:
      finished: a pytree of arrays.
    """
    one = jnp.ones(())
    firsts = [x[(0,) * jnp.ndim(x)].astype(one.dtype) for x in jax.tree.leaves(finished) if jnp.size(x)]
    # The condition is never true: no number exceeds infinity, and comparisons with NaN are false. But the compiler does
    # not know that, and has to wait for `finished`.
    return jnp.where(sum(firsts, start=0.0 * one) > jnp.inf, 2.0, one)


def recomputed_after(finished: Any, arrays: Tree) -> Tree:
    """Returns `arrays` such that XLA computes them again after `finished`, instead of keeping them until then.

    This lowers the peak memory of `quotient(optax.adamw)` with rotary planes and full rotations from 1.29 to 1.23 times
    AdamW's.

    Args:
      finished: a pytree of arrays.
      arrays: a pytree of arrays that are cheap to make.
    """
    one = one_after(finished)
    return jax.tree.map(lambda x: one.astype(x.dtype) * x, arrays)


def not_fused_with_spread(rates: jax.Array, inverse: jax.Array) -> jax.Array:
    """Returns `rates`, such that XLA:CPU does not fuse the sum that made them with a product that uses them.

    XLA would make one library call of that sum and of the product that broadcasts `rates` over a leaf. The call takes
    several times as long as the two operations apart.

    Args:
      rates: sums times `inverse`.
      inverse: not negative. Where it is zero, `rates` are zero, so that the select changes no number.
    """
    return jax.lax.select(inverse > 0, rates, inverse)


def summed_apart(sums: jax.Array) -> jax.Array:
    """Returns `sums`, such that XLA:CPU does not make one library call of them and of a sum that reads them.

    jaxlib 0.10.2 computes that call wrongly if an operand is broadcast, as under `vmap` (jax issue 39103). *Measured*:
    a generalized Gauss–Newton matrix of 23 classes and 529 rows in float32 was off by twice its largest entry.
    """
    kind = jnp.finfo(sums.dtype)
    return jax.lax.reduce_precision(sums, kind.nexp, kind.nmant)


def computed_twice(numbers: jax.Array) -> jax.Array:
    """Returns `numbers` (with −0 in place of 0), such that XLA computes again what is computed from them.

    If two operations read an array, XLA computes it once and writes it to memory. It does not recognise the result of
    this function as `numbers`, and so computes what follows from it anew. `ddc.fused` computes the slice point and the
    sums along channels from one product, of a leaf and a factor per channel. Computing this product twice lowers the
    peak memory from 1.37 to 1.27 times AdamW's.
    """
    return jax.lax.select(jnp.abs(numbers) > 0, numbers, -numbers)


def unseen(tree: Tree) -> Tree:
    """Returns a tree in which NumPy arrays of 64-bit numbers are copies, which no compiled program has seen.

    A user's compiled step, for example, may close over a batch that is such an array. If JAX has compiled the step in
    32 bits, then as long as it keeps the program it reads this array in 32 bits, even under `jax.enable_x64(True)`.
    Programs in 64 bits then refuse the array, with an error of the runtime or of the lowering (JAX 0.10.2). They take a
    copy. Leaves that are one array share one copy.

    Args:
      tree: a pytree.
    """
    copies: dict[int, np.ndarray] = {}

    def copied(x: Any) -> Any:
        if isinstance(x, np.ndarray) and x.dtype.itemsize >= 8:
            if id(x) not in copies:
                copies[id(x)] = x.copy()
            return copies[id(x)]
        return x

    return jax.tree.map(copied, tree)


# Inside `jax.shard_map` an array's type says over which axes of the mesh it varies, that is, along which axes devices
# hold different numbers. A constant varies over none. JAX wants all branches of a `cond`, and all rounds of a loop, to
# return arrays of one type. Outside `shard_map` the next four functions add nothing to a program.


def varying_like(tree: Tree, kinds: Any) -> Tree:
    """Returns `tree`, whose arrays also vary over the mesh axes over which those of `kinds`, arrays or shapes, vary."""

    return jax.tree.map(lambda x, kind: _varying(x, _varies_over(kind)), tree, kinds)


def varying_together(*trees: Tree) -> tuple[Tree, ...]:
    """Returns trees whose arrays all vary over every mesh axis over which one of them varies."""
    axes = frozenset[str]().union(*map(_varies_over, jax.tree.leaves(trees)))
    return tuple(jax.tree.map(lambda x: _varying(x, axes), tree) for tree in trees)


def _varying(x: Any, over: frozenset[str]) -> Any:
    axes, lax = tuple(sorted(over - _varies_over(x))), cast(Any, jax.lax)
    if not axes:
        return x
    return lax.pcast(x, axes, to="varying") if hasattr(lax, "pcast") else lax.pvary(x, axes)  # up to JAX 0.8


def zeros_of(shapes: Any) -> Any:
    """Returns zeros like a tree that `jax.eval_shape` has made. They vary over the same mesh axes."""
    return varying_like(jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes), shapes)


def cond(predicate: jax.Array, first: Callable[..., Tree], second: Callable[..., Tree], *operands: Any) -> Tree:
    """Returns `jax.lax.cond` of the same arguments. Its branches may return arrays that vary over different mesh axes.
    """
    if not _in_shard_map():
        return jax.lax.cond(predicate, first, second, *operands)
    kinds = [jax.eval_shape(branch, *operands) for branch in (first, second)]

    def alike(branch: Callable[..., Tree]) -> Callable[..., Tree]:
        return lambda *x: functools.reduce(varying_like, kinds, branch(*x))

    return jax.lax.cond(predicate, alike(first), alike(second), *operands)


def while_loop(unfinished: Callable[[Tree], Any], body: Callable[[Tree], Tree], start: Tree) -> Tree:
    """Returns `jax.lax.while_loop` of the same arguments. A round may make arrays vary over further mesh axes."""
    if not _in_shard_map():
        return jax.lax.while_loop(unfinished, body, start)
    before = None
    while (types := jax.tree.map(jax.typeof, start)) != before:
        before, start = types, varying_like(start, jax.eval_shape(body, start))
    return jax.lax.while_loop(unfinished, lambda carry: varying_like(body(carry), start), start)


def _in_shard_map() -> bool:
    return bool(jax.sharding.get_abstract_mesh().manual_axes)


def _varies_over(x: Any) -> frozenset[str]:
    kind: Any = jax.typeof(x)
    return kind.manual_axis_type.varying if hasattr(kind, "manual_axis_type") else kind.vma  # up to JAX 0.8


_QUICK = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
    "xla_cpu_use_fusion_emitters": False,
}


# The emitters of fusions are on here: without them and without fusion, jaxlib 0.10.2 computes many programs wrongly.
_UNFUSED = _QUICK | {"xla_cpu_use_fusion_emitters": True, "xla_disable_hlo_passes": "fusion"}


@functools.cache
def quick_options() -> dict[str, Any]:
    """Returns `compiler_options` of `jax.jit` for a function that is called only a few times.

    On a CPU it then compiles four times faster. The result is {} on other devices, and if XLA does not know the
    options, because another version may have renamed them. Some gradients need `unfused_options`.
    """
    return _known(_QUICK)


def one_program(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compiles a function, and waits at each call until it has ended.

    On CPUs, two programs whose devices wait for each other can block each other forever if they run at once.
    """
    compiled = jax.jit(function, compiler_options=quick_options())
    return lambda *arrays: jax.block_until_ready(compiled(*arrays))


def quick_noise(like: jax.Array, seed: int | jax.Array) -> jax.Array:
    """Returns noise from −1 to 1, in the shape and dtype of an array of real numbers: hashes of its indices.

    It serves to shake weights, and not as statistics. *Measured* on a CPU: `jax.random.normal` compiles for 0.2 s per
    shape, or for 1.8 s with XLA's own options, which was half the time of `go.check` on a Llama of one layer; this
    compiles for 30 ms.

    Reference: the last steps of MurmurHash3 (Appleby), which mix the bits of an integer.

    >>> quick_noise(jnp.zeros((2, 2)), 0).shape
    (2, 2)
    """
    bits = jnp.arange(like.size, dtype=jnp.uint32).reshape(like.shape)
    bits += jnp.uint32(0x9E3779B9) * jnp.asarray(seed, jnp.uint32)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):
        bits = (bits ^ (bits >> shift)) * jnp.uint32(factor)
    return (bits.astype(jnp.float32) * 2.0**-31 - 1.0).astype(like.dtype)


@functools.cache
def unfused_options() -> dict[str, Any]:
    """Returns `compiler_options` of `jax.jit` for a gradient that `quick_options` may spoil.

    The gradient of a maximum looks for the entries of x that equal max(x). If XLA fuses operations, it may compute x in
    two places, where it is rounded in two ways. Then no entry equals the maximum, and the gradient is 0/0 or zero.
    *Measured*: behind a norm and a ReLU, the gradient of a maximum over points is NaN with `quick_options`, and that of
    a maximum over pixels is wrong at four of ten points with XLA's own options. Without fusion every number is computed
    once, and compiling takes twice as long as with `quick_options`. The result is {} on devices other than CPUs, and if
    XLA does not know the options.
    """
    return _known(_UNFUSED)


def jit_unfused(function: Callable[..., Any]) -> Callable[..., Any]:
    """`jax.jit` with `unfused_options`, or with `quick_options` if the function computes with complex numbers.

    Without fusion jaxlib 0.10.2 computes products of complex numbers wrongly, if a factor is transposed: it reads the
    factor as if it were not. *Measured*: so are gradients through `jnp.fft` along another axis than the last.
    """
    unfused, fused = (jax.jit(function, compiler_options=known()) for known in (unfused_options, quick_options))
    chosen = list[Callable[..., Any]]()

    @functools.wraps(function)
    def compiled(*arrays: Any) -> Any:
        if not chosen:
            chosen.append(fused if _is_complex(unfused.trace(*arrays).jaxpr) else unfused)
        return chosen[0](*arrays)

    return compiled


def _is_complex(jaxpr: Any) -> bool:
    """Whether a jaxpr, or one inside it, has a result of complex numbers.

    >>> [_is_complex(jax.make_jaxpr(jax.jit(f))(jnp.ones(2))) for f in (jnp.sin, lambda x: jnp.fft.rfft(x).real)]
    [False, True]
    """
    for eqn in jaxpr.eqns:
        if any(jnp.issubdtype(getattr(out.aval, "dtype", bool), jnp.complexfloating) for out in eqn.outvars):
            return True
        held = (inner for x in eqn.params.values() for inner in (x if isinstance(x, tuple | list) else [x]))
        if any(_is_complex(inner) for inner in held if hasattr(inner, "eqns")):
            return True
    return False


def _known(options: dict[str, Any]) -> dict[str, Any]:
    """Returns the options on a CPU whose XLA takes them, else {}."""
    if jax.default_backend() != "cpu":
        return {}
    try:
        jax.jit(lambda x: x, compiler_options=options)(0.0)
    except (RuntimeError, ValueError):
        return {}
    return options


_KEY = 20260


def fixed_noise(block: int, rows: int, columns: int, draw: int | jax.Array = 0) -> jax.Array:
    """Returns pseudo-random numbers from −1 to 1, (rows, columns), the same at every call.

    They are hashes of positions. `jax.random` would need a loop, which on a CPU can block for ever if another loop runs
    at the same time.

    Args:
      block: number of a block; every block has numbers of its own.
      rows: number of rows.
      columns: number of columns.
      draw: number of a draw; every draw has numbers of its own. It may be traced.
    """
    return hashed_positions((rows, columns), block, draw).astype(jnp.float32) / 2.0**31 - 1.0


def hashed_positions(shape: Sequence[int], block: int, draw: int | jax.Array) -> jax.Array:
    """Returns 32 pseudo-random bits per entry of an array, the same at every call; see `fixed_noise`.

    Positions are sums of one iota per axis, so that no device of a mesh needs more than its part of the array.
    """
    position, stride = jnp.zeros(shape, jnp.uint32), 1
    for axis in reversed(range(len(shape))):
        iota = jax.lax.broadcasted_iota(jnp.uint32, shape, axis)
        position, stride = position + iota * jnp.uint32(stride % 2**32), stride * shape[axis]
    x = position + jnp.uint32((_KEY + block * 0x9E3779B9) % 2**32)
    x = x ^ (jnp.uint32(0xC2B2AE35) * jnp.asarray(draw, jnp.uint32))
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        x = (x ^ (x >> shift)) * jnp.uint32(factor)
    return x ^ (x >> 16)
