"""Reads the two factors of Adam's step from an optimizer's state: an entrywise preconditioner and the first moment.

The functions find optax's `scale_by_adam` anywhere in a chain. The steps of `scale_by_ddc`, and of an Adam inside
`quotient` or another optimizer of this library, are no products of these two factors: their moments are in slice
coordinates, or their steps are changed afterwards. The functions refuse such states. Measure the steps themselves with
`step_leakage`.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from gauge_optax.errors import binding_error, kind_of
from gauge_optax.linalg import real_dtype
from gauge_optax.transformation import in_computing_dtype, require_number, require_numbers


class AdamFactors(NamedTuple):
    """The two factors of Adam's step; both have the structure of the parameters.

    Attributes:
      momentum: bias-corrected first moment, an average of cotangents.
      preconditioner: D = 1/(√v̂ + eps).
    """

    momentum: Any
    preconditioner: Any


def adam_factors(
    opt_state: Any, b1: float = 0.9, b2: float = 0.999, eps: float = 1e-8, eps_root: float = 0.0
) -> AdamFactors:
    """Returns the factors D and m̂ of the step that Adam has just taken: learning rate · D⊙m̂, without weight decay.

    Args:
      opt_state: the state after the step, of any chain with one `scale_by_adam` in it. Adamax, RAdam, ADOPT and
        Yogi store their moments in the same class, `optax.ScaleByAdamState`, and cannot be told from Adam: do not pass
        theirs.
      b1: decay of the first moment. The state does not contain the hyperparameters: pass the optimizer's.
      b2: decay of the second moment.
      eps: added to the root.
      eps_root: added under the root.

    Returns:
      First moment and preconditioner, in float32, or float64 under x64. They do not describe steps of `nesterov=True`.

    Raises:
      ValueError: no Adam in the state, or several; an Adam inside an optimizer of this library, such as `quotient`; the
        state before the first step (inside `jit` this cannot be checked, and the factors are NaN); a decay that is not
        at least 0 and below 1, a negative eps.

    >>> tx, params = optax.adamw(1e-3), {"w": jnp.array([1.0, -2.0])}
    >>> updates, state = tx.update({"w": jnp.array([0.5, 4.0])}, tx.init(params), params)
    >>> factors = go.measure.adam_factors(state)
    >>> (
    ...     factors.momentum["w"].round(3).tolist(),
    ...     factors.preconditioner["w"].round(3).tolist(),
    ... )
    ([0.5, 4.0], [2.0, 0.25])
    """
    _require_options("adam_factors", dict(b1=b1, b2=b2), dict(eps=eps, eps_root=eps_root))
    state = _only_adam("adam_factors", opt_state)
    if not isinstance(state.count, jax.core.Tracer) and np.any(np.asarray(state.count) == 0):
        raise binding_error(
            "adam_factors", "no step that Adam has taken", "count=0, the state that `init` returns",
            "the state after a step",
            "pass the state that update returns: updates, state = tx.update(grads, state, params)",
        )
    require_numbers("adam_factors", state.mu)
    mean = jax.tree.map(lambda m: in_computing_dtype(m) / (1 - b1**state.count), state.mu)
    return AdamFactors(mean, jax.tree.map(lambda v: _inverse_root(v, b2, eps, eps_root, state.count), state.nu))


def adam_precondition(
    opt_state: Any, grad_fn: Callable[[Any], Any], b2: float = 0.999, eps: float = 1e-8, eps_root: float = 0.0
) -> Callable[[Any, Any], Any]:
    """Returns Adam's preconditioner D as a function of the point, for `second_order_leakage`.

    D depends on the point θ through the second moment v = b2·v_old + (1 − b2)·g(θ)², with the gradient g. Along a step
    u the derivative of v is (1 − b2)·2g·Hu, with the Hessian H. Even at a fixed θ, v changes from step to step, because
    v_old does. That change is no part of this derivative. It enters the leakage of the next step, through that step's
    D.

    Args:
      opt_state: the state before the step, of any chain with one `scale_by_adam` in it. As for `adam_factors`, do not
        pass a state of Adamax, RAdam, ADOPT or Yogi.
      grad_fn: params → gradient.
      b2: decay of the second moment.
      eps: added to the root.
      eps_root: added under the root.

    Returns:
      A function (params, cotangent) → D(params)⊙cotangent. It does not use Adam's first moment.

    Raises:
      ValueError: no Adam in the state, or several; an Adam inside an optimizer of this library, such as `quotient`, or
        an Adam that sees only some of the leaves, because of a mask; a decay that is not at least 0 and below 1, a
        negative eps.

    >>> tx, grad_fn = optax.adam(1e-3), lambda p: p
    >>> precondition = go.measure.adam_precondition(tx.init(jnp.ones(2)), grad_fn)
    >>> # First step: D = 1/|g(θ)|.
    >>> precondition(jnp.array([1.0, 4.0]), jnp.array([1.0, 2.0])).round(3).tolist()
    [1.0, 0.5]
    """
    _require_options("adam_precondition", dict(b2=b2), dict(eps=eps, eps_root=eps_root))
    state = _only_adam("adam_precondition", opt_state)
    masked = lambda node: isinstance(node, optax.MaskedNode)  # noqa: E731
    hidden = [path for path, x in jax.tree.leaves_with_path(state.nu, is_leaf=masked) if masked(x)]
    if hidden:
        where = jax.tree_util.keystr(hidden[0], simple=True, separator="/")
        raise binding_error(
            "adam_precondition", f"an Adam that does not see '{where}'", "a state of optax.masked or optax.partition",
            "an Adam with second moments of every leaf", "measure the step itself, with step_leakage")

    def precondition(params: Any, gradient: Any) -> Any:
        require_numbers("adam_precondition", gradient)

        def stepped(v: jax.Array, at_point: jax.Array, g: jax.Array) -> jax.Array:
            at_point, g = in_computing_dtype(at_point), in_computing_dtype(g)
            fresh = b2 * v.astype(real_dtype()) + (1 - b2) * jnp.real(at_point * jnp.conj(at_point))
            return g * _inverse_root(fresh, b2, eps, eps_root, state.count + 1)

        return jax.tree.map(stepped, state.nu, grad_fn(params), gradient)

    return precondition


def _require_options(caller: str, decays: Mapping[str, Any], added: Mapping[str, Any]) -> None:
    """Raises ValueError for numbers that no Adam has: with a decay of 1, every factor would be zero or infinite."""
    for numbers, interval in ((decays, "[0, 1)"), (added, "[0, inf)")):
        for name, number in numbers.items():
            require_number(caller, name, number, interval, f"pass the {name} of the optimizer")


def _inverse_root(v: jax.Array, b2: float, eps: float, eps_root: float, count: jax.Array) -> jax.Array:
    """1/(√v̂ + eps), where v̂ is v with bias correction, plus `eps_root`."""
    square = v.astype(real_dtype()) / (1 - b2**count) + eps_root
    # √ has no derivative at 0, the value of an entry that never had a gradient. This form has the derivative 0 there.
    alive = square > 0
    return 1.0 / (jnp.where(alive, jnp.sqrt(jnp.where(alive, square, 1.0)), 0.0) + eps)


def _only_adam(caller: str, opt_state: Any) -> optax.ScaleByAdamState:
    found = _adams(opt_state)
    # This library's wrappers change the gradients or the steps of the optimizer inside, except those of `measure`.
    wraps = [node for node in jax.tree.leaves(opt_state, is_leaf=_wraps) if _wraps(node) and _adams(node)]
    if wraps:
        raise binding_error(
            caller, "an Adam whose step is no product of its two factors",
            f"a ScaleByAdamState inside a {type(wraps[0]).__name__}",
            "the state of an optimizer with one optax.scale_by_adam in it, inside no optimizer of this library",
            "measure the step itself: go.measure.step_leakage(gauge, params, step)",
        )
    if len(found) != 1:
        raise binding_error(
            caller, f"{len(found)} Adam states", kind_of(opt_state),
            "the state of an optimizer with one optax.scale_by_adam in it",
            "pass the one partition's state; of other optimizers measure the step itself, with step_leakage",
        )
    return found[0]


def _adams(tree: Any) -> list[optax.ScaleByAdamState]:
    leaves = jax.tree.leaves(tree, is_leaf=lambda node: isinstance(node, optax.ScaleByAdamState))
    return [node for node in leaves if isinstance(node, optax.ScaleByAdamState)]


def _wraps(node: Any) -> bool:
    """Whether a node is the state of an optimizer of this library.

    Optimizers that only record measurements, or only round second moments to two bytes, do not count.
    """
    kind = type(node)
    # The class is recognised by its name, because this folder imports no optimizer. With two bytes per entry `tops` is
    # (), and the stored second moments are numbers; with one byte they are codes.
    rounds = kind.__name__ == "CompressedState" and isinstance(node.tops, tuple)
    return kind.__module__.startswith("gauge_optax.") and not kind.__module__.startswith(__package__) and not rounds
