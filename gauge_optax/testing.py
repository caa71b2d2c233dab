"""Assertions for users: is this binding a symmetry of my loss, is this update horizontal, is my optimizer equivariant?

Every assertion returns None or raises AssertionError. The message names the gauge, the leaf and the relative error, and
ends with the report of `chex.assert_trees_all_close`. As in chex, two trees are close if |value − expected| is at most
atol + rtol·|expected| in every entry. By default `rtol` depends on the dtype (docs/design.md §7), and `atol` is `rtol`
times the largest entry, so that zeros need not be exact. Only this module needs chex, which
`pip install "gauge_optax[testing]"` installs.
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from gauge_optax.binding import leaves_by_path, match
from gauge_optax.errors import binding_error, counted
from gauge_optax.gauges.disconnected import disconnected
from gauge_optax.gauges.gauge import Gauge, Gauges, Product, product
from gauge_optax.parts.part import Arrays
from gauge_optax.transformation import (
    require_arrays,
    require_differentiable,
    require_key,
    require_traceable,
    require_transformation,
)
from gauge_optax.xla import jit_unfused, quick_options

LossFn = Callable[[Any], jax.Array]

_TOLERANCES = {
    "invariant": (1e-12, 1e-5, 5e-2),
    "horizontal": (1e-12, 1e-6, 5e-2),
    "equivariant": (1e-8, 1e-4, 5e-2),
    "loss": (1e-8, 1e-5, 5e-2),
}
_DTYPES = ("float64", "float32")  # the first two columns of `_TOLERANCES`; the third is for shorter dtypes
_DRAWS = 20  # so many elements are drawn again before a gauge counts as one that moves nothing


def tolerance(check: str, tree: Any) -> float:
    """Returns the default `rtol` of a check on a tree (docs/design.md §7), for the coarsest floating dtype in it.

    Args:
      check: "invariant", "horizontal", "equivariant" or "loss".
      tree: parameters.

    Returns:
      The relative tolerance.

    >>> go.testing.tolerance("equivariant", {"w": jnp.ones(2)})
    0.0001
    """
    dtypes = {jnp.asarray(leaf).dtype for leaf in jax.tree.leaves(tree)}
    floats = [d for d in dtypes if jnp.issubdtype(d, jnp.floating)]
    rank = max((_DTYPES.index(d.name) if d.name in _DTYPES else len(_DTYPES) for d in floats), default=0)
    return _TOLERANCES[check][rank]


def assert_invariant(
    loss_fn: LossFn,
    params: Any,
    gauges: Gauges,
    key: jax.Array,
    rtol: float | None = None,
    scale: float = 1.0,
    atol: float | None = None,
) -> None:
    """Asserts that a random element of every gauge, and of their product, does not change the loss.

    Half of the factors of a `norm_scale` are negative, and half of the matrices of a `head_rotation` are reflections.
    If an element moves no weight, another one is drawn, up to 20 times. A gauge passes if none of them moves a weight,
    such as a permutation of one head.

    Args:
      loss_fn: a function of params that returns a scalar, or an array or tree of outputs. Logits show more errors than
        their loss does. In a chex test it may be `self.variant(loss_fn)`.
      params: the weights at which to test. Take random ones: at a bias of zero, a gauge that forgets this bias passes.
      gauges: a gauge or a sequence of gauges.
      key: a PRNG key.
      rtol: largest change relative to each output; by default `tolerance("invariant", params)`.
      scale: size of the random elements, see `Gauge.sample`.
      atol: a change that is allowed in addition to `rtol`; by default `rtol` times the largest output.

    Raises:
      AssertionError: a gauge is no symmetry; the message names it, the leaves that it moves and the relative change.
        Or the loss is not finite at `params`. Some of several outputs may be infinite, if they stay the same infinity.
      ValueError: no gauges, a leaf that is no array, or a loss that returns no array.

    >>> params = {"up": jnp.ones((2, 3)), "down": jnp.ones((3, 1))}
    >>> relu = go.rescale({"up": "_ channel"}, {"down": "channel _"})
    >>> loss = lambda p: jnp.sum(jax.nn.relu(jnp.ones(2) @ p["up"]) @ p["down"])
    >>> go.testing.assert_invariant(loss, params, relu, jax.random.key(0))
    """
    require_key("assert_invariant", key)
    require_arrays("assert_invariant", params)
    require_traceable("assert_invariant", params)
    group = product(gauges)
    rtol = tolerance("invariant", params) if rtol is None else rtol
    before = loss_fn(params)
    if not group.gauges or not jax.tree.leaves(before):
        raise binding_error(
            "assert_invariant", "nothing to compare",
            f"{counted(len(group.gauges), 'gauge')} and {before!r:.60} from loss_fn",
            "gauges, and a loss or outputs", "return the loss from loss_fn, and pass the gauges to test",
        )
    _require_numbers(before)
    keys = jax.random.split(key, len(group.gauges) + 1)
    checks: list[Gauge] = [*group.gauges, *([group] if len(group.gauges) > 1 else [])]
    for gauge, gauge_key in zip(checks, keys, strict=False):
        twin = _compiled(functools.partial(_random_twin, gauge, scale))
        moved = twin(gauge_key, params)
        for again in jax.random.split(gauge_key, _DRAWS):  # a permutation of two heads is the identity every other time
            if _differ(params, moved, _leaves_of(gauge, params)):
                break
            moved = twin(again, params)
        after, first = _without_equal_infinities(loss_fn(moved), before)
        if (difference := _difference(after, first, rtol, atol)) is not None:
            raise AssertionError(
                f"{describe(gauge)} is no symmetry of this loss\n"
                f"  leaves:   {', '.join(_leaves_of(gauge, params))}\n"
                f"  found:    relative change {_relative(after, first):.2e} under a random element of scale {scale}\n"
                f"  expected: at most {rtol:.1e}\n"
                f"  remedy:   look for what usually breaks it: {gauge.breaks}\n{difference}"
            )


def _random_twin(gauge: Gauge, scale: float, key: jax.Array, params: Any) -> Any:
    """Weights moved by a random element that is not connected with the identity, where a gauge has such."""
    element = gauge.sample(key, params, scale)
    if not isinstance(gauge, Product):
        return gauge.act(disconnected(gauge, element), params)
    signed = (disconnected(one, x) for one, x in zip(gauge.gauges, element, strict=True))
    return gauge.act(tuple(signed), params)


def assert_horizontal(
    updates: Any, params: Any, gauges: Gauges, rtol: float | None = None, atol: float | None = None
) -> None:
    """Asserts that a tangent has no part along any orbit.

    Args:
      updates: a tangent, as `scale_by_ddc` or `gauge_project(kind="update")` returns it. A difference of two points
        on a curved path, as `gauge_retract` returns it, is no tangent.
      params: the weights that the tangent belongs to.
      gauges: a gauge or a sequence of gauges.
      rtol: largest difference between the update and its horizontal part, relative to each entry, both in slice
        coordinates; by default `tolerance("horizontal", params)`.
      atol: a difference that is allowed in addition to `rtol`; by default `rtol` times the update's largest entry.

    Raises:
      AssertionError: the tangent has a vertical part; the message names the gauge, the leaf with the largest vertical
        part and the relative error.
      ValueError: a leaf that is no array.

    >>> params = {"w": jnp.ones((1, 2))}
    >>> shift = go.logit_shift({"w": "_ vocab"})
    >>> go.testing.assert_horizontal({"w": jnp.array([[1.0, -1.0]])}, params, shift)
    """
    require_arrays("assert_horizontal", updates, params)
    require_traceable("assert_horizontal", updates, params)
    group = product(gauges)
    rtol = tolerance("horizontal", params) if rtol is None else rtol
    shapes = [{path: jnp.shape(x) for path, x in leaves_by_path(tree).items()} for tree in (updates, params)]
    if shapes[0] != shapes[1]:
        other = next(path for path in {**shapes[0], **shapes[1]} if shapes[0].get(path) != shapes[1].get(path))
        raise AssertionError(
            f"updates of another shape than params: {other}\n"
            f"  found:    {shapes[0].get(other, 'no leaf')}\n"
            f"  expected: {shapes[1].get(other, 'no leaf')}\n"
            f"  remedy:   pass what update returned for these params"
        )
    tangent, across = _compiled(lambda params, updates: _on_slice(group, params, updates))(params, updates)
    if (difference := _difference(across, tangent, rtol, atol)) is not None:
        # The message names the gauge along whose orbits the update has the largest part.
        blamed = max(group.gauges, key=lambda part: _norm(jax.tree.leaves(part.vertical(params, updates))))
        worst = max(_leaves_of(blamed, params), key=lambda path: _norm([across[path] - tangent[path]]))
        raise AssertionError(
            f"updates move along {describe(blamed)}\n"
            f"  leaf:     {worst}\n"
            f"  found:    {_relative(across, tangent):.2e} of the update's norm changes no output\n"
            f"  expected: at most {rtol:.1e}\n"
            "  remedy:   go.gauge_project(gauges, kind='update') last in the chain; updates of go.quotient, which are\n"
            f"            differences of points, need not be horizontal\n{difference}"
        )


def assert_equivariant_step(
    tx: optax.GradientTransformation,
    loss_fn: LossFn,
    params: Any,
    gauges: Gauges,
    key: jax.Array,
    steps: int = 20,
    ignore: Sequence[str] = (),
    rtol: float | None = None,
    scale: float = 1.0,
    atol: float | None = None,
) -> None:
    """Asserts that twins, two weight sets of one function, stay twins under an optimizer.

    Trains from θ and from g·θ, where g is a random element of all gauges together. After every step it compares g·θ_t
    with the second run's weights, and the two losses. The step is compiled with few optimizations, to save time.
    Functions that are wrapped already, such as `self.variant(tx.update)` of a chex test or `jax.jit(loss_fn)`, are
    called as they are, with arrays.

    Args:
      tx: an optimizer; `optax.GradientTransformation(tx.init, self.variant(tx.update))` in a chex test.
      loss_fn: a function of params that returns a scalar.
      params: the starting point θ.
      gauges: a gauge or a sequence of gauges.
      key: a PRNG key for g.
      steps: number of training steps.
      ignore: path patterns of leaves that are not compared, such as a key bias without rotary positions, whose gradient
        is only roundoff. Their effect on the loss is still compared.
      rtol: largest difference relative to each entry of a leaf, and largest relative difference of the loss; by
        default `tolerance("equivariant", params)` for leaves and `tolerance("loss", params)` for the loss.
      scale: size of g, see `Gauge.sample`.
      atol: a difference that is allowed in addition to `rtol`; by default `rtol` times the leaf's largest entry.

    Raises:
      AssertionError: the runs differ; the message names the step, the leaf (or the loss), the gauges that bind the leaf
        and the relative error. Or the loss is not finite at `params`. Or, if `rtol` is None, no leaf has moved by more
        than ten times the difference that is allowed, so that the runs of any optimizer would agree.
      ValueError: no steps, or a pattern of `ignore` that matches no leaf.

    >>> params = {"up": jnp.ones((2, 3)), "down": jnp.ones((3, 1))}
    >>> relu = go.rescale({"up": "_ channel"}, {"down": "channel _"})
    >>> hidden = lambda p: jax.nn.relu(jnp.ones(2) @ p["up"])
    >>> loss = lambda p: jnp.sum((hidden(p) @ p["down"] - 1.0) ** 2)
    >>> tx, key = go.ddc_adamw(1e-2, relu), jax.random.key(0)
    >>> go.testing.assert_equivariant_step(tx, loss, params, relu, key, steps=3)
    """
    require_transformation("assert_equivariant_step", tx, "tx")
    require_key("assert_equivariant_step", key)
    require_arrays("assert_equivariant_step", params)
    require_differentiable("assert_equivariant_step", params)
    group = product(gauges)
    leaf_tolerance = tolerance("equivariant", params) if rtol is None else rtol
    loss_tolerance = tolerance("loss", params) if rtol is None else rtol
    compared = _compared(params, [ignore] if isinstance(ignore, str) else ignore)
    if steps < 1:
        raise binding_error(
            "assert_equivariant_step", "no steps", f"steps={steps}", "a positive number", "leave steps out")

    def compare(number: int, where: str, value: Any, expected: Any, rtol: float) -> None:
        if (difference := _difference(value, expected, rtol, atol)) is None:
            return
        acting = [gauge for gauge in group.gauges if where in _leaves_of(gauge, params)]
        remedy = "go.quotient_adamw(learning_rate, gauges), or go.quotient(optimizer, gauges) with your own"
        if not jnp.all(jnp.isfinite(expected)):
            remedy = "finite weights, or a lower learning rate: the run from the given weights is not finite itself"
        raise AssertionError(
            f"twins came apart at step {number}: {f'leaf {where}' if where else 'the loss'}\n"
            f"  gauges:   {', '.join(map(describe, acting or group.gauges))}\n"
            f"  found:    relative error {_relative(value, expected):.2e}\n"
            f"  expected: at most {rtol:.1e}\n"
            f"  remedy:   {remedy}\n{difference}"
        )

    step, act = _step_of(tx, loss_fn), _compiled(group.act)
    element = _compiled(lambda key, params: group.sample(key, params, scale))(key, params)
    twins = [(point, _compiled(tx.init)(point)) for point in (params, act(element, params))]
    for number in range(1, steps + 1):
        runs = [step(*twin) for twin in twins]
        twins, (loss, twin_loss) = [run for run, _ in runs], (loss for _, loss in runs)
        if number == 1:
            _require_numbers(loss)
        compare(number, "", twin_loss, loss, loss_tolerance)
        moved, twin = leaves_by_path(act(element, twins[0][0])), leaves_by_path(twins[1][0])
        for path in compared:
            compare(number, path, twin[path], moved[path], leaf_tolerance)
    before, after = leaves_by_path(params), leaves_by_path(twins[0][0])
    far = max(_relative(before[path], after[path]) for path in after)
    if rtol is None and far <= 10.0 * leaf_tolerance:
        raise AssertionError(
            "the steps are too short to tell whether twins stay together\n"
            f"  found:    leaves that moved by {far:.1e} of their norm in {counted(steps, 'step')}\n"
            f"  expected: more than {10.0 * leaf_tolerance:.1e}, ten times the difference that is allowed\n"
            "  remedy:   a larger learning rate, more steps, or float64 weights"
        )


def _step_of(tx: optax.GradientTransformation, loss_fn: LossFn) -> Callable[[Any, Any], Any]:
    """Returns one training step, (params, state) → ((params, state), loss)."""
    gradient, update = jax.value_and_grad(loss_fn), tx.update
    wrapped = _is_wrapped(loss_fn), _is_wrapped(tx.update)
    if any(wrapped):  # the step is not compiled as a whole, because a variant of chex must be called with arrays
        gradient = gradient if wrapped[0] else _compiled(lambda params: jax.value_and_grad(loss_fn)(params))
        update = _compiled(update)

    def step(params: Any, state: Any) -> Any:
        loss, grads = gradient(params)
        updates, state = update(grads, state, params)
        return (optax.apply_updates(params, updates), state), loss

    return step if any(wrapped) else jit_unfused(step)


def _is_wrapped(function: Any) -> bool:
    """Whether the caller has wrapped a function by `jax.jit` or by a variant of chex."""
    return hasattr(function, "__wrapped__")


def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function compiled for a few calls; the function itself if the caller has wrapped it."""
    return function if _is_wrapped(function) else jax.jit(function, compiler_options=quick_options())


def _compared(params: Any, ignore: Sequence[str]) -> list[str]:
    """Returns the paths that no pattern matches. Raises ValueError for a pattern that matches no path."""
    paths, ignored = list(leaves_by_path(params)), set[str]()
    for pattern in ignore:
        hits = {path for path in paths if match("ignore", pattern, path) is not None}
        if not hits:
            raise binding_error(
                "assert_equivariant_step", f"no leaf matches ignore '{pattern}'", f"leaves {', '.join(paths[:3])}",
                "path patterns of leaves to leave out", "correct the pattern, or drop it",
            )
        ignored |= hits
    return [path for path in paths if path not in ignored]


def describe(gauge: Gauge) -> str:
    """Returns a gauge's name with the patterns it binds, for messages.

    Args:
      gauge: a gauge.

    Returns:
      One line.

    >>> go.testing.describe(go.logit_shift({"head/kernel": "_ vocab"}))
    "logit_shift('head/kernel')"
    """
    return gauge._description


def _leaves_of(gauge: Gauge, params: Any) -> Sequence[str]:
    """Returns the paths of the leaves that a gauge moves."""
    return tuple(gauge._bound(params).slice.added)


def _differ(before: Any, after: Any, paths: Sequence[str]) -> bool:
    """Returns whether two trees differ in some of these leaves."""
    one, other = leaves_by_path(before), leaves_by_path(after)
    return any(np.any(np.asarray(one[path]) != np.asarray(other[path])) for path in paths)


def _on_slice(group: Product, params: Any, updates: Any) -> tuple[Arrays, Arrays]:
    """Returns the bound leaves of a tangent, and those of its horizontal part, in slice coordinates."""
    s = group._bound(params).slice
    (_, live, _), entered = s.unturned_slice_point(params)
    tangent = jax.jvp(entered.enter, (s.values(params),), (s.vectors(updates),))[1]
    return tangent, s.horizontal(entered.point, tangent, live)


def _difference(value: Any, expected: Any, rtol: float, atol: float | None) -> str | None:
    """Returns the report of chex on the difference of two trees; None if they are close."""
    try:
        import chex
    except ImportError as error:
        raise ImportError('gauge_optax.testing compares by chex: pip install "gauge_optax[testing]"') from error
    if atol is None:
        atol = rtol * max((float(np.max(np.abs(x), initial=0.0)) for x in _on_host(expected)), default=0.0)
    try:
        chex.assert_tree_all_finite((value, expected))  # the next line would take two NaNs for equal
        chex.assert_trees_all_close(value, expected, rtol=rtol, atol=atol)
    except AssertionError as error:
        return str(error)
    return None


def _require_numbers(outputs: Any) -> None:
    """Raises AssertionError if a loss or outputs have NaN or nothing but infinities, before a gauge is blamed."""
    numbers = np.concatenate([np.ravel(x) for x in _on_host(outputs)])
    if np.isnan(numbers).any() or (numbers.size and not np.isfinite(numbers).any()):
        raise AssertionError(
            "the loss is not finite at the weights themselves\n"
            f"  found:    {'nan' if np.isnan(numbers).any() else 'inf'} in what loss_fn(params) returns\n"
            "  expected: a finite loss, or outputs of which some may be infinite, such as masked logits\n"
            "  remedy:   look for a leaf of params that is not finite, or pass smaller weights"
        )


def _without_equal_infinities(value: Any, expected: Any) -> tuple[Any, Any]:
    """Returns two trees with zeros where both have the same infinity, such as the −inf of a padded vocabulary."""
    if jax.tree.map(jnp.shape, value) != jax.tree.map(jnp.shape, expected):
        return value, expected
    alike = jax.tree.map(lambda x, y: np.isinf(x) & (np.asarray(x) == np.asarray(y)), value, expected)
    value, expected = (jax.tree.map(lambda x, y: jnp.where(y, 0, x), tree, alike) for tree in (value, expected))
    return value, expected


def _relative(value: Any, expected: Any) -> float:
    size, difference = _norm(_on_host(expected)), _norm(map(np.subtract, _on_host(value), _on_host(expected)))
    return difference / size if size else difference


def _norm(arrays: Iterable[Any]) -> float:
    return float(np.sqrt(sum(float(np.sum(np.square(np.abs(x)))) for x in arrays)))


def _on_host(tree: Any) -> list[np.ndarray]:
    """Returns the leaves as NumPy arrays in double precision."""
    return [np.asarray(x, np.complex128 if jnp.iscomplexobj(x) else np.float64) for x in jax.tree.leaves(tree)]
