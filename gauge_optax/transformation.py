"""Code that all transformations of this library share: checks of arguments and states, explicit meshes, dtypes.

A transformation is written as an `init` and an `update` that only compute. The function `transformation` adds the
checks and the handling of meshes to them.
"""

import contextlib
import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from gauge_optax.binding import has_dtype, is_empty, leaf_shape, leaves_by_path, structures_apart, with_leaves
from gauge_optax.errors import binding_error, kind_of
from gauge_optax.linalg import real_dtype
from gauge_optax.xla import quick_options, varying_together

Tree = TypeVar("Tree")
Found = TypeVar("Found")
Given = ParamSpec("Given")


class LeafRule(NamedTuple):
    """How an optimizer steps one leaf, for `go.plan`.

    Attributes:
      rule: name of the rule for its update: "Adam", "polar", "per-head polar" or "momentum".
      matrices: the matrices whose polar factors are taken, as in "4 × (8, 3)"; "" for other rules.
    """

    rule: str
    matrices: str = ""


Rules = Callable[[Any], Mapping[str, LeafRule]]
"""A function of parameters, or of their shapes, that returns leaf path → rule."""


class GaugeTransformation(optax.GradientTransformationExtraArgs):
    """An Optax transformation, a pair of `init` and `update`, with attributes that describe it.

    Optax's wrappers of it (`chain`, `masked`, `inject_hyperparams`) do not have these attributes; `wrapped` finds it
    inside them.

    Attributes:
      gauges: the gauges that it was given, with products split into their factors, followed by further gauges of the
        optimizer that it wraps.
      rules: a function of params that returns leaf path → `LeafRule`; None if unknown.
      preflight: a function of params that returns what `go.check` finds before training: errors that it raises, and
        sentences for its report.
      inner: for a `quotient`, the optimizer that it runs on the slice; else None.
      linked: for a link of DDC (such as `scale_by_ddc`), the transformation that it runs on the slice; else None. The
        step of a link leads off the slice.
    """

    gauges: tuple[Any, ...] = ()
    rules: Rules | None = None
    preflight: "Preflight"
    inner: Any = None
    linked: Any = None

    def __new__(
        cls,
        init: Any,
        update: Any,
        gauges: Iterable[Any] = (),
        rules: Rules | None = None,
        preflight: "Preflight | None" = None,
    ) -> "GaugeTransformation":
        """Takes `init` and `update` as Optax defines them, and the attributes above."""
        self = super().__new__(cls, init, update)
        self.gauges, self.rules = tuple(gauges), rules
        self.preflight = preflight or nothing_to_say
        return self

    def _replace(self, /, **functions: Any) -> "GaugeTransformation":
        """Returns a copy with another `init` or `update`. Unlike that of a NamedTuple, it keeps the attributes."""
        made = super()._replace(**functions)
        made.__dict__.update(self.__dict__)
        return made


Preflight = Callable[[Any], Sequence[str | ValueError]]


def nothing_to_say(params: Any) -> Sequence[str | ValueError]:
    """The preflight of a transformation that has none of its own: `wrapped.preflight_of` asks those inside it."""
    return ()


def with_gauges_of(inner: Any, gauges: Iterable[Any] = ()) -> tuple[Any, ...]:
    """Returns `gauges`, followed by those gauges of a transformation that are not among them."""
    return tuple(dict.fromkeys((*gauges, *getattr(inner, "gauges", ()))))


@contextlib.contextmanager
def own_settings(wide: bool | None = None) -> Iterator[None]:
    """Computes with JAX's usual promotion of ranks and dtypes, whatever the process has chosen for its own code.

    Under `jax_numpy_rank_promotion="raise"`, or `jax_numpy_dtype_promotion="strict"`, JAX would refuse the arithmetic
    of this library, with an error that names no leaf.

    Args:
      wide: True for 64-bit numbers, False for 32-bit numbers, None for those of the process.
    """
    bits: Any = contextlib.nullcontext() if wide is None else jax.enable_x64(wide)
    with bits, jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield


def transformation(
    name: str,
    init: Callable[[Any], Any],
    update: Callable[..., tuple[Any, Any]],
    state_type: type,
    init_empty: Callable[[Any], Any],
    gauges: Iterable[Any] = (),
    rules: Rules | None = None,
    preflight: Preflight | None = None,
    conversion: Callable[[Any, Any], str] | None = None,
) -> GaugeTransformation:
    """Makes an Optax transformation from an `init` and an `update` that only compute.

    Args:
      name: name of the public function, for messages.
      init: params → state.
      update: (updates, state, params, **extra) → (updates, state). It need not mention shardings. On a mesh with
        explicit axes the compiler chooses them inside, and results get the shardings of `updates` and `state`.
      state_type: the NamedTuple that `init` returns.
      init_empty: params → state, for a tree without leaves: `optax.tree.map_params` calls `init` with such a tree.
      gauges: see `GaugeTransformation`.
      rules: see `GaugeTransformation`.
      preflight: see `GaugeTransformation`.
      conversion: (a state of another optimizer, params) → what makes a state of this one from it, for messages; "" if
        nothing does.

    Returns:
      The transformation.
    """

    def init_fn(params: optax.Params) -> Any:
        if isinstance(params, optax.LookaheadParams):
            raise binding_error(
                name, "two sets of parameters", "optax.LookaheadParams", "the fast parameters alone",
                f"put lookahead around it: optax.lookahead(go.{name}(...), sync_period=6, slow_step_size=0.5)")
        require_numbers(name, params)
        with own_settings():
            return init_empty(params) if is_empty(params) else init(params)

    def update_fn(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        require_params(name, params)
        require_gradients(name, updates)
        updates = jax.tree.map(jnp.asarray, updates)  # Python numbers have no dtype
        # Inside `jax.shard_map` gradients may differ between devices, and parameters not. Both get one type.
        if jax.sharding.get_abstract_mesh().manual_axes:
            updates, params = varying_together(updates, params)
        # The names of fields are compared. `hasattr` would not do: every tuple has a method `count`.
        if not set(getattr(state_type, "_fields", ())) <= set(getattr(state, "_fields", ())):
            told = conversion(state, params) if conversion else ""
            raise _not_a_state(name, state, state_type, told)

        def plain(updates: Any, state: Any, params: Any, extra: Any) -> tuple[Any, Any]:
            return update(updates, state, params, **extra)

        # Only the outermost transformation records its gradient for `go.check`. Transformations inside it get slice
        # gradients, which are zero for a norm's scale, so that `go.check` would report this leaf as frozen.
        for record in _recorders if not _running else ():
            record.append((updates, None, None))
        _running.append(None)
        try:
            # The same as `own_settings`, written out: a context of its own would cost time in every update.
            with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
                return layout((updates, params)).run(plain, updates, state, params, extra, like=(updates, state))
        finally:
            _running.pop()

    made = GaugeTransformation(init_fn, update_fn, gauges, rules, preflight)
    init_fn.made_by = made  # type: ignore[attr-defined]  # `optax.chain` keeps only the functions
    return made


def checked_inner(name: str, inner: Any) -> GaugeTransformation:
    """Returns `inner` with support of extra arguments and an error message for another optimizer's state.

    Inside `recording()`, which `go.check` uses, its update also records its gradients, steps and parameters.

    Raises ValueError unless `inner` has `init` and `update`.
    """
    require_transformation(name, inner)
    gauges, rules, inner = with_gauges_of(inner), getattr(inner, "rules", None), optax.with_extra_args_support(inner)

    def without_search_results(state: Any, params: Any) -> Any:
        # A line search stores the value and the gradient at the weights where it ends. From there
        # `optax.value_and_grad_from_state` takes the next gradient. But these are not the user's weights: `inner` may
        # see slice points, and its step may be changed afterwards. If the stored value is not finite, Optax's function
        # computes both anew, so that the value is made infinite here. Line searches themselves read neither.
        paths = leaves_by_path(params).keys()

        def searched(node: Any) -> bool:
            return {"value", "grad"} <= set(getattr(node, "_fields", ())) and leaves_by_path(node.grad).keys() == paths

        def without(node: Any) -> Any:
            return node._replace(value=node.value + jnp.inf) if searched(node) else node

        return jax.tree.map(without, state, is_leaf=searched)

    def update_fn(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        before = [len(record) for record in _recorders]
        with explain_state_mismatch(name, inner, state, params):
            steps, state = inner.update(updates, state, params, **extra)
        state = without_search_results(state, params)
        for record, count in zip(_recorders, before, strict=True):
            # If a transformation inside has recorded, nothing is added: it may be a `quotient`, whose steps may be zero
            # on an anchor (a norm's scale), which `go.check` would report as frozen.
            if len(record) == count:
                record.append((updates, steps, params))
        return steps, state

    return GaugeTransformation(inner.init, update_fn, gauges, rules)


_recorders: list[list[tuple[Any, Any, Any]]] = []
_running: list[None] = []  # one per transformation of this library whose update is being traced


def record_gradient(gradient: Any) -> None:
    """Records the gradient of an optimizer that wraps no other. Its steps, which may be zero on anchors, are left out.
    """
    for record in _recorders:
        record.append((gradient, None, None))


@contextlib.contextmanager
def recording() -> Iterator[list[tuple[Any, Any, Any]]]:
    """Collects triples (gradients, steps, parameters) while an update runs.

    The outermost transformation of this library adds (its gradients, None, None). Every optimizer that such a
    transformation wraps adds the gradients that it gets, the steps that it returns, and the parameters that it sees,
    unless one inside has added something.
    """
    _recorders.append([])
    try:
        yield _recorders[-1]
    finally:
        _recorders.pop()


@contextlib.contextmanager
def unrecorded() -> Iterator[None]:
    """Keeps what runs inside out of `recording`. An example is an update that is traced only to see what it does."""
    held = [*_recorders]
    _recorders.clear()
    try:
        yield
    finally:
        _recorders.extend(held)


def in_computing_dtype(leaf: Any) -> jax.Array:
    """Returns a leaf in the dtype in which gauges compute; a complex leaf, which no gauge binds, as it is."""
    return jnp.asarray(leaf, None if jnp.iscomplexobj(leaf) else real_dtype())


def cast_like(leaves: Mapping[str, jax.Array], *trees: Any) -> dict[str, jax.Array]:
    """Returns leaves by path, each cast to the dtype that it has in a tree; of several trees, to the widest.

    An update that moves weights along an orbit is cast to the wider dtype of gradients and parameters: rounded to
    bfloat16, as gradients of float32 parameters may be, the move would change the function.
    """
    targets = [leaves_by_path(tree) for tree in trees]
    dtypes = {path: [jnp.result_type(x[path]) for x in targets] for path in leaves}
    return {path: leaf.astype(max(dtypes[path], key=lambda dtype: dtype.itemsize)) for path, leaf in leaves.items()}


def in_dtypes_of_state(kept: Tree, tree: Tree) -> Tree:
    """Returns a tree of arrays in the dtypes of `kept`, a part of a state, as far as JAX has these dtypes now.

    A state keeps its dtypes when x64 is switched on during a run, and is in float32 when it is switched off. The two
    branches of a `cond`, one with fresh arrays and one with those of the state, need equal dtypes. Both apply this
    function to their arrays.
    """
    return jax.tree.map(lambda x, like: x.astype(jax.dtypes.canonicalize_dtype(like.dtype)), tree, kept)


def in_dtype_of(tree: Any, leaves: Mapping[str, jax.Array], *others: Any) -> Any:
    """Returns `tree` with these leaves, each in the dtype of the leaf that it replaces, or a wider one in `others`."""
    return with_leaves(tree, cast_like(leaves, tree, *others))


def stepped(gauge: Any, params: Any, updates: Any) -> Any:
    """Returns the parameters with the updates added to the leaves that a gauge binds; other leaves do not change."""
    leaves, steps = leaves_by_path(params), gauge._bound(params).slice.vectors(updates)
    return in_dtype_of(params, {path: in_computing_dtype(leaves[path]) + step for path, step in steps.items()})


def once_per_tree(find: Callable[[Any], Found]) -> Callable[..., Found]:
    """Returns `find` with a cache, keyed on the paths, shapes and dtypes of a tree. `anew=True` calls `find` again."""
    known: dict[Any, Found] = {}  # here and not in an `lru_cache`: it may not outlive an optimizer that holds tracers

    def found(tree: Any, anew: bool = False) -> Found:
        leaves = leaves_by_path(tree).items()
        key = tuple((path, jnp.shape(leaf), getattr(leaf, "dtype", type(leaf))) for path, leaf in leaves)
        if anew or key not in known:
            known[key] = find(tree)
        return known[key]

    return found


def placeholder() -> jax.Array:
    """Returns a scalar that stands in place of the gauges' part of a state if a tree has no leaves (`is_empty`)."""
    return jnp.zeros(())


def at_once(function: Callable[..., Tree], static: tuple[Any, ...], *arrays: Any) -> Tree:
    """Returns function(*static, *arrays), computed by one program if it is called outside `jit` on one device.

    Run operation by operation, `init` would compile a hundred programs. On several devices the function runs like that
    all the same, so that every result is placed on the devices of its operands.
    """
    leaves = jax.tree.leaves(arrays)
    # Inside `jit` a new array is a tracer, even where `arrays` are constants: so a new one is looked at too. No program
    # takes shapes without values. The function itself gets them, and raises an error that names the leaf.
    if any(isinstance(leaf, jax.core.Tracer | jax.ShapeDtypeStruct) for leaf in (placeholder(), *leaves)):
        return function(*static, *arrays)
    if len({device for leaf in leaves if isinstance(leaf, jax.Array) for device in leaf.devices()}) > 1:
        return function(*static, *arrays)
    return _program(function)(static, *arrays)


@functools.cache
def _program(function: Callable[..., Any]) -> Callable[..., Any]:
    def program(static: tuple[Any, ...], *arrays: Any) -> Any:
        with own_settings():
            return function(*static, *arrays)

    return jax.jit(program, static_argnums=0, compiler_options=quick_options())


# Meshes ---------------------------------------------------------------------------------------------------
#
# On a mesh with explicit axes (`AxisType.Explicit`) an array's type contains its sharding, here called its layout. JAX
# then requires the caller to name the layout of every result that the operands do not determine, as for a reshape that
# merges a sharded axis, a contraction over such an axis, or a stack of heads from several leaves. `Layout` lets the
# compiler choose these layouts.


@dataclasses.dataclass(frozen=True)
class Layout:
    """A mesh some of whose axes are explicit.

    Attributes:
      mesh: the mesh; None if no axis is explicit, and then no method changes an array.
    """

    mesh: Mesh | AbstractMesh | None

    def left_open(self) -> contextlib.AbstractContextManager[Any]:
        """Returns a context in which the compiler chooses all layouts. Inside, first call `drop` on every operand."""
        if self.mesh is None:
            return contextlib.nullcontext()
        automatic = dict.fromkeys(self.mesh.explicit_axes, AxisType.Auto)
        return jax.sharding.use_abstract_mesh(self.mesh.abstract_mesh.update_axis_types(automatic))

    def drop(self, tree: Tree) -> Tree:
        """Returns arrays whose types do not name a layout. Call it inside the context of `left_open`."""
        if self.mesh is None:
            return tree
        return jax.tree.map(lambda x: x if _sharding(x) is None else jax.sharding.reshard(x, PartitionSpec()), tree)

    def restore(self, tree: Tree, like: Any = None) -> Tree:
        """Returns arrays with the layouts of the leaves of `like`, which by default is `tree` itself.

        If a leaf of `like` has no layout, the array is replicated. Call it outside the context of `left_open`. `like`
        has the structure of `tree`.
        """
        if self.mesh is None:
            return tree
        everywhere = NamedSharding(self.mesh, PartitionSpec())

        def laid_out(x: Any, target: Any) -> Any:
            return jax.sharding.reshard(x, _sharding(target) or everywhere) if isinstance(x, jax.Array) else x

        return jax.tree.map(laid_out, tree, tree if like is None else like)

    def as_placed(self, x: Any) -> Any:
        """Returns an array in the layout in which the compiler has left it. Call it outside the context of `left_open`.
        """
        placed = None if isinstance(x, jax.core.Tracer) else getattr(x, "sharding", None)
        if self.mesh is None or not isinstance(placed, NamedSharding):
            return x
        return jax.sharding.reshard(x, NamedSharding(self.mesh, placed.spec))

    def replicated(self, tree: Tree) -> Tree:
        """Returns arrays that are replicated on every device. Call it outside the context of `left_open`."""
        if self.mesh is None:
            return tree
        everywhere = NamedSharding(self.mesh, PartitionSpec())
        return jax.tree.map(lambda x: jax.sharding.reshard(x, everywhere), tree)

    def run(self, function: Callable[..., Tree], *arrays: Any, like: Any = None) -> Tree:
        """Returns function(*arrays), computed in the context of `left_open`, with the layouts of `restore`."""
        if self.mesh is None:
            return function(*arrays)
        with self.left_open():
            made = function(*self.drop(arrays))
        return self.restore(made, like=like)


def layout(tree: Any) -> Layout:
    """Returns the `Layout` of a tree: the mesh of its first array on a mesh with explicit axes, or None without one."""
    shardings = (sharding for leaf in jax.tree.leaves(tree) if (sharding := _sharding(leaf)) is not None)
    return Layout(next((sharding.mesh for sharding in shardings), None))


def _sharding(leaf: Any) -> NamedSharding | None:
    """Returns the sharding of an array on a mesh with explicit axes; None for everything else."""
    if not isinstance(leaf, jax.Array) or not (typed := jax.typeof(leaf).sharding).mesh.explicit_axes:
        return None
    # `reshard` outside `jit` needs devices, which the mesh of a type lacks: the sharding of the array has them.
    placed = None if isinstance(leaf, jax.core.Tracer) else leaf.sharding
    return NamedSharding(placed.mesh, typed.spec) if isinstance(placed, NamedSharding) else typed


def on_any_mesh(function: Callable[Given, Tree]) -> Callable[Given, Tree]:
    """Lets a function of arrays run on meshes with explicit axes: inside, the compiler chooses all layouts.

    The result has the layouts of the first argument if it is a tree of the same structure, and those that the compiler
    chose if it is not. A function of the user that is called inside runs on automatic axes.
    """

    @functools.wraps(function)
    def run(*args: Given.args, **kwargs: Given.kwargs) -> Tree:
        # The arrays of an iterator are not known before the function reads them.
        if any(isinstance(x, Iterator) for x in (*args, *kwargs.values())):
            return function(*args, **kwargs)
        mesh = layout((args, kwargs))
        if mesh.mesh is None:
            return function(*args, **kwargs)
        with mesh.left_open():
            given, named = mesh.drop((args, kwargs))
            made = function(*given, **named)
        alike = bool(args) and str(jax.tree.structure(made)) == str(jax.tree.structure(args[0]))
        return mesh.restore(made, like=args[0] if alike else jax.tree.map(mesh.as_placed, made))

    return run


# Under `jit` a constant does not depend on a sharded array, so that the compiler replicates it on every device. The
# next two functions add a dependency: `x > inf` is False for every x and for NaN, but the compiler does not know that,
# and gives the result the layout of x.


def zeros_like(tree: Tree, dtype: Any = None) -> Tree:
    """Returns zeros in the shapes of `tree`, which under `jit` are sharded like its leaves."""

    def zeros(leaf: Any) -> Any:
        if isinstance(leaf, jax.core.Tracer) and jnp.issubdtype(leaf.dtype, jnp.floating):
            return jnp.greater(leaf, jnp.inf).astype(dtype or leaf.dtype)
        return jnp.zeros_like(leaf, dtype)

    return jax.tree.map(zeros, tree)


def with_sharding_of(like: Tree, tree: Tree) -> Tree:
    """Returns `tree`, whose leaves under `jit` are sharded like those of `like`, a tree of the same shapes."""

    def tied(target: Any, x: Any) -> Any:
        if isinstance(target, jax.core.Tracer) and jnp.issubdtype(target.dtype, jnp.floating):
            return jnp.where(jnp.greater(target, jnp.inf), target.astype(x.dtype), x)
        return x

    return jax.tree.map(tied, like, tree)


# Checks of arguments -----------------------------------------------------------------------------------------
# `binding` checks the gauges, and whether they fit the tree.


def require_params(transformation: str, params: Any) -> None:
    """Raises ValueError if `update` was called without the parameters."""
    if params is None:
        raise binding_error(
            transformation, "update was called without params", "params=None",
            "the parameters that the updates belong to", "write tx.update(grads, state, params)")


def require_transformation(transformation: str, inner: Any, argument: str = "inner") -> None:
    """Raises ValueError unless `inner`, the value of an argument, is an Optax transformation."""
    if not (hasattr(inner, "init") and hasattr(inner, "update")):
        name = getattr(inner, "__name__", None)
        # The usual mistake is `optax.adamw` in place of `optax.adamw(1e-3)`.
        uncalled = callable(inner) and name
        remedy = f"call it: {name}(learning_rate)" if uncalled else "pass an optimizer, optax.adamw(1e-3)"
        if isinstance(inner, list | tuple) and inner and all(hasattr(link, "update") for link in inner):
            remedy = "chain them: optax.chain(*optimizers)"
        elif isinstance(inner, list | tuple | Mapping) or hasattr(inner, "act"):
            remedy = f"name the arguments: {transformation}({argument}=optax.adamw(1e-3), ...)"
        raise binding_error(
            transformation, f"{argument} is no transformation", name or type(inner).__name__,
            "an object with init and update", remedy)


def require_key(function: str, key: Any) -> None:
    """Raises ValueError unless `key` is one PRNG key, typed or raw (uint32). The usual mistake is to pass a seed."""
    dtype, ndim = getattr(key, "dtype", None), getattr(key, "ndim", None)
    typed = dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key)
    if not (typed and ndim == 0) and not (dtype == jnp.uint32 and ndim == 1):
        found = repr(key) if dtype is None else f"an array of {dtype}, shape {jnp.shape(key)}"
        seed = key if isinstance(key, int) else 0
        raise binding_error(function, "no PRNG key", found, "one key", f"write jax.random.key({seed})")


def require_gradients(transformation: str, updates: Any) -> None:
    """Raises ValueError if an update is float0, the type of a gradient of integers."""
    for path, leaf in jax.tree.leaves_with_path(updates):
        if getattr(leaf, "dtype", None) == jax.dtypes.float0:
            raise binding_error(
                transformation, f"no gradient for '{jax.tree_util.keystr(path, simple=True, separator='/')}'",
                "float0, what jax.grad(allow_int=True) gives for integers", "gradients of floating-point leaves",
                "differentiate floating-point leaves alone, or leave integers out by optax.masked")


def updates_at(transformation: str, paths: Iterable[str], updates: Any, params: Any) -> dict[str, Any]:
    """Returns path → update. Raises ValueError if a path has no update, one of another shape, or a complex one."""
    leaves, values = leaves_by_path(updates), leaves_by_path(params)
    shapes = {path: leaf_shape(leaf) for path, leaf in values.items()}
    for path in paths:
        shape = leaf_shape(leaves[path]) if path in leaves else None
        if shape != shapes[path]:
            raise binding_error(
                transformation, f"{'no update' if shape is None else 'an update of another shape'} for '{path}'",
                f"a tree with {', '.join(list(leaves)[:3]) or 'no leaves'}" if shape is None else f"{shape}",
                f"an update of shape {shapes[path]}, that of the leaf",
                "pass the updates of the very parameters that are passed",
            )
        if jnp.iscomplexobj(leaves[path]) and not jnp.iscomplexobj(values[path]):  # a cast would drop a part
            raise binding_error(
                transformation, f"a complex update for '{path}'", str(jnp.result_type(leaves[path])),
                "real numbers, as the leaf's", "take the real part: jnp.real(update)")
    return leaves


def require_traceable(function: str, *trees: Any) -> None:
    """Raises ValueError for a leaf that JAX cannot trace: a module of equinox may have functions and strings."""
    for path, leaf in jax.tree.leaves_with_path(trees):
        if not has_dtype(leaf):
            where = jax.tree_util.keystr(path[1:], simple=True, separator="/")
            raise binding_error(
                function, f"a leaf that is no array, '{where}'", type(leaf).__name__, "a tree of arrays",
                "write params, static = eqx.partition(model, eqx.is_inexact_array), and pass params; a function of "
                "them calls eqx.combine(params, static)")


def require_numbers(function: str, params: Any) -> None:
    """Raises ValueError for a leaf that holds no numbers, such as a function, a string or a typed PRNG key."""
    for path, leaf in jax.tree.leaves_with_path(params):
        dtype = getattr(leaf, "dtype", None)
        if not has_dtype(leaf) or (dtype is not None and jnp.issubdtype(dtype, jax.dtypes.extended)):
            where = jax.tree_util.keystr(path, simple=True, separator="/")
            raise binding_error(
                function, f"a leaf that is no array of numbers, '{where}'",
                str(dtype or type(leaf).__name__), "a tree of arrays of numbers",
                "filter the module first: nnx.state(model, nnx.Param), eqx.filter(model, eqx.is_inexact_array)")


def require_differentiable(function: str, params: Any) -> None:
    """Raises ValueError for a leaf by which a loss has no gradient: anything but real or complex numbers."""
    require_numbers(function, params)
    for path, leaf in leaves_by_path(params).items():
        if not jnp.issubdtype(jnp.result_type(leaf), jnp.inexact):
            raise binding_error(
                function, f"a leaf that has no gradient, '{path}'", str(jnp.result_type(leaf)), "floating-point leaves",
                "pass a tree without it, and let the function close over it")


def require_values(transformation: str, params: Any) -> None:
    """Raises ValueError if `init` was called with leaves that are not arrays, or with shapes in place of arrays."""
    require_numbers(transformation, params)
    if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(params)):
        raise binding_error(
            transformation, "init was called with shapes alone", "jax.ShapeDtypeStruct leaves",
            "arrays: init reads their values",
            "write jax.eval_shape(tx.init, params) for the shapes of the state")


def require_no_tracers(function: str, *trees: Any) -> None:
    """Raises ValueError inside `jit` and `vmap`, for a function that decides by the values of arrays."""
    if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(trees)):
        raise binding_error(
            function, "called inside jit, vmap or grad", "tracers", "arrays, whose values it looks at",
            f"call {function} outside jit, with arrays")


def require_no_shapes(function: str, *trees: Any) -> None:
    """Raises ValueError for `jax.ShapeDtypeStruct` leaves, for a function that reads the values of arrays."""
    for path, leaf in jax.tree.leaves_with_path(trees):
        if isinstance(leaf, jax.ShapeDtypeStruct):
            where = jax.tree_util.keystr(path[1:], simple=True, separator="/")
            raise binding_error(
                function, f"a shape without values at '{where}'", "a jax.ShapeDtypeStruct", "an array",
                f"call {function} with arrays")


def require_arrays(function: str, *trees: Any) -> None:
    """Raises ValueError for tracers and shapes, for a function that decides by the values of arrays."""
    require_no_tracers(function, *trees)
    require_no_shapes(function, *trees)


def overflow_check(function: str, leaves: Mapping[str, Any]) -> Callable[[Mapping[str, Any]], None]:
    """Returns a check of moved leaves: it raises ValueError if a finite leaf of float16 is not finite any more.

    It does not look at other dtypes, whose range is that of float32 or more, nor at tracers, which have no values.

    Args:
      function: the name of the public function.
      leaves: path → leaf, before the move. They may be donated before the check is called.
    """

    def infinite(leaf: Any) -> bool:
        return not isinstance(leaf, jax.core.Tracer) and not bool(jnp.all(jnp.isfinite(leaf)))

    finite = {
        path for path, leaf in leaves.items()
        if jnp.result_type(leaf) == jnp.float16 and not isinstance(leaf, jax.core.Tracer) and not infinite(leaf)
    }

    def check(moved: Mapping[str, Any]) -> None:
        for path in moved:
            if path in finite and infinite(moved[path]):
                raise binding_error(
                    function, f"'{path}' overflows float16", "infinities in a leaf that had none",
                    f"numbers up to {float(jnp.finfo(jnp.float16).max):.0f}",
                    "convert the weights first: optax.tree.cast(params, jnp.float32)")

    return check


def require_choice(transformation: str, argument: str, value: object, choices: Sequence[str]) -> None:
    """Raises ValueError if a string argument is not one of its choices."""
    if value not in choices:
        raise binding_error(
            transformation, f"bad {argument}", repr(value), f"one of {', '.join(map(repr, choices))}",
            f"write {argument}={choices[0]!r}")


def in_interval(value: Any, interval: str) -> bool:
    """Whether a user's argument is one real number in an interval such as "[0, 1)", whose end 1 is outside.

    Of a traced number, as `optax.inject_hyperparams` makes it, only the shape and the kind are known.

    >>> from gauge_optax.transformation import in_interval
    >>> [in_interval(x, "(0, inf)") for x in (0.5, 0.0, float("nan"), float("inf"), True, "1", None)]
    [True, False, False, False, False, False, False]
    """
    if isinstance(value, bool) or not isinstance(value, int | float | np.number | np.ndarray | jax.Array):
        return False
    if np.ndim(value) or not any(jnp.issubdtype(jnp.result_type(value), kind) for kind in (jnp.floating, jnp.integer)):
        return False
    low, high = map(float, interval[1:-1].split(","))
    if isinstance(value, jax.core.Tracer):
        return True
    return bool((low < value or (low == value and interval[0] == "["))
                and (value < high or (value == high and interval[-1] == "]")))


def require_number(function: str, argument: str, value: Any, interval: str, remedy: str) -> None:
    """Raises ValueError unless an argument is one real number in an interval, see `in_interval`."""
    if not in_interval(value, interval):
        raise binding_error(function, f"bad {argument}", f"{argument}={value!r}", f"one number in {interval}", remedy)


def require_rates(function: str, **numbers: Any) -> None:
    """Raises ValueError unless these learning rates and decays are schedules, or finite numbers."""
    for argument, value in numbers.items():
        if not callable(value):
            require_number(function, argument, value, "(-inf, inf)", f"write {argument}=0.01, or a schedule")


def require_moments(function: str, **numbers: Any) -> None:
    """Raises ValueError unless decays of moments are numbers in [0, 1), and `eps` is a number ≥ 0; no schedules.

    With a decay of 1, the correction for the first steps, 1 − decayᵗ, would be 0 and every step NaN.
    """
    require_no_schedule(function, **numbers)
    for argument, value in numbers.items():
        usual = 1e-8 if "eps" in argument else 0.9
        require_number(function, argument, value, "[0, inf)" if "eps" in argument else "[0, 1)",
                       f"write {argument}={usual:g}")


def require_no_schedule(function: str, **numbers: Any) -> None:
    """Raises ValueError if one of these arguments of an optimizer is a schedule: only rates and decays can be."""
    for argument, value in numbers.items():
        if callable(value):
            raise binding_error(
                function, f"a schedule for {argument}", f"{argument}={value!r:.60}", "one number",
                f"write optax.inject_hyperparams(lambda {argument}: go.{function}(..., {argument}={argument}))"
                f"({argument}=schedule)")


def require_count(function: str, argument: str, count: Any, least: int) -> None:
    """Raises ValueError unless an argument is an integer that is at least `least`."""
    if isinstance(count, bool) or not isinstance(count, int | np.integer) or count < least:
        raise binding_error(
            function, f"bad {argument}", f"{argument}={count!r}", f"an int, at least {least}",
            f"pass {argument}={least}")


def require_report(function: str, report: Any) -> None:
    """Raises ValueError unless an argument is a report of `go.discover`, or None."""
    if report is not None and not hasattr(report, "turning"):
        raise binding_error(
            function, "no report", kind_of(report), "what discover returned, or None",
            "pass report=go.discover(fn, params, batches), or leave it out")


def with_hash(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the function; or a `partial` of it if it has no hash, as some modules of equinox: `jit` needs a hash."""
    try:
        hash(function)
    except TypeError:
        return functools.partial(function)
    return function


def require_function(function: str, argument: str, value: Any, takes: str, remedy: str = "") -> None:
    """Raises ValueError unless an argument can be called with the arguments that `takes` names, as "params, batch"."""
    write = f"write {argument}=lambda {takes}: function({takes.replace('batch', '*batch')})"
    if "batch" not in takes:
        write = remedy or f"{write[:-1]}, ...), with its other arguments in place of ..."
    expected = f"a function of {takes.replace(', ', ' and ')}"
    if not callable(value):
        raise binding_error(function, f"{argument} is no function", f"{argument}={value!r:.60}", expected, write)
    try:
        signature = inspect.signature(value)
    except (TypeError, ValueError):  # some functions of C have none
        return
    try:
        signature.bind(*takes.split(", "))
    except TypeError as error:
        raise binding_error(
            function, f"{argument} is a function of other arguments", f"{signature}", expected, write) from error


def require_real(function: str, argument: str, value: Any) -> None:
    """Raises ValueError unless an argument is a real number, or an array or a list of real numbers."""
    try:
        dtype = value.dtype if hasattr(value, "dtype") else np.asarray(value).dtype
    except ValueError:  # rows of several lengths
        dtype = np.dtype(object)
    if not any(jnp.issubdtype(dtype, kind) for kind in (jnp.floating, jnp.integer, jnp.bool_)):
        parts = jnp.issubdtype(dtype, jnp.complexfloating)
        raise binding_error(
            function, f"complex numbers in {argument}" if parts else f"no numbers in {argument}",
            str(dtype) if parts else f"{argument}={value!r:.60}", "real numbers",
            "pass the real and the imaginary part one by one" if parts else "pass a number or an array of numbers")


def listed(function: str, batches: Any, argument: str = "batches") -> list[Any]:
    """Returns batches as a list. Raises ValueError for a dict, whose keys a loop would take for batches.

    >>> from gauge_optax.transformation import listed
    >>> listed("discover", (1.0, 2.0))
    [1.0, 2.0]
    """
    if isinstance(batches, Mapping):
        raise binding_error(
            function, f"{argument} is a dict", f"the keys {', '.join(map(repr, batches))}", f"a list of {argument}",
            f"pass list({argument}.values())" + ", or [batches] for one batch that is a dict" * (argument == "batches"))
    if isinstance(batches, str) or not isinstance(batches, Iterable):
        raise binding_error(
            function, f"{argument} is no list", f"{argument}={batches!r:.60}", f"a list of {argument}",
            f"write {argument}=[...]")
    return list(batches)


def require_batches(function: str, batches: Sequence[Any]) -> None:
    """Raises ValueError for a batch with anything but arrays and numbers in it, such as text."""
    for number, batch in enumerate(batches):
        if wrong := [leaf for leaf in jax.tree.leaves(batch) if not has_dtype(leaf)]:
            raise binding_error(
                function, f"batch {number} holds what is no array", f"{wrong[0]!r:.60}", "arrays, or trees of them",
                "pass batches=[x], with numbers such as tokens in an array x")


def require_scalar(function: str, value: Any, differentiable: bool = True) -> None:
    """Raises ValueError unless a loss has returned one real number, of a floating dtype if it is differentiated."""
    array = hasattr(value, "shape") or isinstance(value, int | float)
    dtype = jnp.result_type(value) if array else jnp.dtype(complex)
    kinds = (jnp.floating,) if differentiable else (jnp.floating, jnp.integer, jnp.bool_)
    if not array or jnp.shape(value) or not any(jnp.issubdtype(dtype, kind) for kind in kinds):
        raise binding_error(
            function, "a loss that is no scalar",
            f"an array of {dtype}, shape {jnp.shape(value)}" if array else kind_of(value),
            "one real number",
            "let the loss return jnp.mean(losses)" if array else
            "pass a function that returns the loss alone: lambda *args: loss(*args)[0]")


def require_every(transformation: str, every: Any, argument: str = "every") -> None:
    """Raises ValueError unless an argument, `every`, is a positive number of steps."""
    integer = isinstance(every, int | np.integer | jax.Array) and jnp.issubdtype(jnp.result_type(every), jnp.integer)
    # `optax.inject_hyperparams` traces the number, and then only its type can be checked.
    if not integer or (not isinstance(every, jax.core.Tracer) and (jnp.ndim(every) or every < 1)):
        raise binding_error(
            transformation, f"bad {argument}", repr(every),
            "a positive int, the number of steps from one time to the next", f"write {argument}=1 for every step")


def require_gauges_of_state(transformation: str, stored: Any, expected: Any, leaves: Mapping[str, str] = {}) -> None:
    """Raises ValueError unless what a state stores by gauge has the keys and the shapes of the optimizer's gauges.

    Args:
      transformation: its name, for the message.
      stored: arrays of the state, a tree that contains a dict. Its keys differ for gauges that bind different leaves.
      expected: a tree of arrays, or of their shapes, as `init` would store it.
      leaves: label → the leaves that it stands for, for the message.
    """
    found, wanted = (jax.tree.map(jnp.shape, tree) for tree in (stored, expected))
    if found != wanted:
        on = "".join(f"; {label} is on {text}" for label, text in leaves.items())
        raise binding_error(
            transformation, "a state of other gauges", f"{found}", f"{wanted}{on}",
            "give it the list that its state was made with, in that order, on leaves of those shapes; "
            "or start anew: tx.init(params)",
        )


def _not_a_state(transformation: str, state: Any, kind: type, conversion: str) -> ValueError:
    """The error for a state without the fields of the class that `init` returns."""
    if not isinstance(state, Mapping | list):
        return _wrong_state(transformation, type(state).__name__, kind.__name__, conversion)
    return binding_error(
        transformation, "a state that has lost its classes",
        f"{kind_of(state)}, as of a checkpoint that was restored without a target", f"a {kind.__name__}",
        "restore into jax.eval_shape(tx.init, params), for example "
        "checkpointer.restore(path, target=jax.eval_shape(tx.init, params))")


@contextlib.contextmanager
def explain_state_mismatch(transformation: str, inner: Any, state: Any, params: Any) -> Iterator[None]:
    """Turns an error of `inner.update` into a ValueError about its state, if another optimizer made the state.

    The states are compared only after an error, because a state of another structure can work, and because the
    comparison traces `inner.init`.
    """
    try:
        yield
    except Exception as error:
        told, *rest = str(error).splitlines() or [""]
        if "state" in told and any(line.startswith("  remedy:") for line in rest):
            raise  # a transformation inside has raised a better message about its state
        apart = structures_apart(state, jax.eval_shape(inner.init, params))
        if apart is None:
            raise
        raise _wrong_state(transformation, *apart) from error


def _wrong_state(transformation: str, actual: str, expected: str, conversion: str = "") -> ValueError:
    return binding_error(
        transformation,
        "a state of another optimizer",
        actual,
        expected,
        f"call tx.init(params) of this optimizer{conversion and '; ' + conversion}",
    )
