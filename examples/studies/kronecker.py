"""Shampoo and SOAP inside `quotient`: preconditioners of whole matrices, on the slice.

    python -m examples.studies kronecker            # some minutes on two cores

Both are examples of an inner optimizer, written from their papers for this comparison; Optax has neither. For a
gradient G, (rows, columns), they average G·Gᵀ and Gᵀ·G. *Shampoo* multiplies G by the inverse fourth roots of both
(Gupta et al. 2018, Algorithm 1). *SOAP* runs Adam in their eigenbases (Vyas et al. 2024, Algorithm 3), which it
computes again every few steps. Its first moment is kept in the original basis, and moved to the eigenbases at every
step.

Here SOAP has the paper's one-sided form: the longer side of a matrix keeps its basis. The average over that side does
not have full rank, so that rounding would choose among its eigenvectors. *Twins*, two sets of weights of one function,
would then train differently inside `quotient` too (*measured*: they differ by 0.7). For the same reason a small ramp is
added to the diagonal of the other side's average (*measured* without the ramp: 1e-5).

An attention kernel is one matrix, with all heads in one side. A small decoder is trained on bytes of text: from twins,
in float64, for 20 steps; and from three seeds in float32, with several learning rates, for the loss.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import gauge_optax as go
from examples import data
from examples.studies import harness, report
from examples.studies.harness import Result
from examples.studies.minimum import in_float64
from gauge_optax.linalg import matmul, symmetric_eigen, transpose
from models import lm

Tree = Any
Cell = dict[str, Any]


@dataclass(frozen=True)
class Config:
    """Sizes of the runs for the loss. Twins are trained on the first batches of these runs."""

    steps: int = 200
    twin_steps: int = 20
    width: int = 32
    batch: int = 8
    length: int = 32
    refresh: int = 10  # steps between eigendecompositions


FULL = Config(steps=1000, width=64, batch=16, length=64)
RATES = (1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2)
TWIN_RATE = 2e-3
SHOWN = 3.2  # losses above it are not drawn
DECAY = 0.01
TIE_BREAK = 5e-2  # the size of the ramp, as in the body frame of the library's DDC


# The two inner optimizers -------------------------------------------------------------------------------


class KroneckerState(NamedTuple):
    """State of `kronecker`. Each list has one array per leaf, in tree order; a leaf is taken as a matrix.

    Attributes:
      number: steps so far.
      left: averages of G·Gᵀ, (rows, rows).
      right: averages of Gᵀ·G, (columns, columns).
      of_left: what was computed from `left` last: inverse fourth roots (Shampoo), or eigenbases (SOAP).
      of_right: the same for `right`.
      mu: first moments.
      nu: second moments: for SOAP those in the eigenbases; Shampoo uses only those of vectors.
    """

    number: jax.Array
    left: list[jax.Array]
    right: list[jax.Array]
    of_left: list[jax.Array]
    of_right: list[jax.Array]
    mu: list[jax.Array]
    nu: list[jax.Array]


def _matrix(x: jax.Array) -> jax.Array:
    """A leaf as a matrix: (d, heads·size) for queries, keys, values, (heads·size, d) for outputs. A vector is a row."""
    if x.ndim == 3:
        return x.reshape(x.shape[0], -1) if x.shape[0] > x.shape[1] else x.reshape(-1, x.shape[-1])
    return x.reshape(1, -1) if x.ndim < 2 else x


def _root(average: jax.Array) -> jax.Array:
    """(average + floor)^(−1/4). The floor is relative to the largest eigenvalue, whatever the scale of the loss."""
    values, vectors = symmetric_eigen(average)
    values = jnp.maximum(values, 0.0) + 1e-6 * jnp.max(values, -1, keepdims=True) + 1e-30
    return matmul(vectors * values[..., None, :] ** -0.25, transpose(vectors))


def basis(average: jax.Array) -> jax.Array:
    """The eigenbasis of an average. A ramp on the diagonal makes it unique where eigenvalues are nearly equal."""
    mean = jnp.trace(average) / len(average)
    return symmetric_eigen(average + TIE_BREAK * mean * jnp.diag(jnp.linspace(0.0, 1.0, len(average))))[1]


def kronecker(
    make: Callable[[jax.Array], jax.Array], refresh: int, adam: bool, b1: float = 0.95, b2: float = 0.95
) -> optax.GradientTransformation:
    """Shampoo or SOAP, as a gradient transformation without a learning rate.

    Args:
      make: average → its inverse fourth root (Shampoo), or its eigenbasis (SOAP).
      refresh: the number of steps after which `make` is applied again.
      adam: True if `make` returns a basis, in which Adam is run (SOAP). False if it returns a factor for the gradient
        (Shampoo); the step then gets the size of one of Adam's.
      b1: decay of first moments.
      b2: decay of all second moments.

    Returns:
      The transformation. Leaves of one axis get Adam.
    """
    eps = 1e-8

    def init(params: Tree) -> KroneckerState:
        shapes = [_matrix(x) for x in jax.tree.leaves(params)]
        left, right = ([jnp.zeros((x.shape[k],) * 2, x.dtype) for x in shapes] for k in (0, 1))
        zeros = [jnp.zeros_like(x) for x in shapes]
        rows, columns = ([jnp.eye(x.shape[k], dtype=x.dtype) for x in shapes] for k in (0, 1))
        return KroneckerState(jnp.int32(0), left, right, rows, columns, zeros, zeros)

    def update(updates: Tree, state: KroneckerState, params: Tree = None) -> tuple[Tree, KroneckerState]:
        leaves, tree = jax.tree.flatten(updates)
        gradients, count = [_matrix(x) for x in leaves], state.number + 1
        left = [b2 * a + (1 - b2) * matmul(g, transpose(g)) for a, g in zip(state.left, gradients, strict=True)]
        right = [b2 * a + (1 - b2) * matmul(transpose(g), g) for a, g in zip(state.right, gradients, strict=True)]

        sides = list(zip(left, right, gradients, strict=True))

        def side(average: jax.Array, turned: bool) -> jax.Array:
            return make(average) if turned else jnp.eye(len(average), dtype=average.dtype)

        # A vector is one row, and gets Adam. SOAP changes the basis of the shorter side of a matrix only.
        def renewed() -> tuple[list[jax.Array], list[jax.Array]]:
            rows = [side(a, len(g) > 1 and (not adam or len(a) <= len(b))) for a, b, g in sides]
            columns = [side(b, len(g) > 1 and (not adam or len(b) <= len(a))) for a, b, g in sides]
            return rows, columns

        of_left, of_right = jax.lax.cond((count - 1) % refresh == 0, renewed, lambda: (state.of_left, state.of_right))
        mu = [b1 * m + (1 - b1) * g for m, g in zip(state.mu, gradients, strict=True)]
        steps, nu = [], []
        for a, b, m, v, g in zip(of_left, of_right, mu, state.nu, gradients, strict=True):
            mean = m / (1 - b1**count)
            if adam or len(g) == 1:
                seen, turned = (matmul(matmul(transpose(a), x), b) for x in (g, mean))
                v = b2 * v + (1 - b2) * jnp.square(seen)
                step = turned / (jnp.sqrt(v / (1 - b2**count)) + eps)
                steps.append(matmul(matmul(a, step), transpose(b)))
            else:
                step = matmul(matmul(a, mean), b)
                # Grafting: the direction is Shampoo's, and the size that of a step of ±1 per entry.
                steps.append(step * jnp.sqrt(step.size) / (jnp.linalg.norm(step) + 1e-30))
            nu.append(v)
        shaped = [step.reshape(x.shape) for step, x in zip(steps, leaves, strict=True)]
        return jax.tree.unflatten(tree, shaped), KroneckerState(count, left, right, of_left, of_right, mu, nu)

    return optax.GradientTransformation(init, update)


def shampoo(rate: float, refresh: int) -> optax.GradientTransformation:
    """Shampoo with decoupled decay."""
    inner = kronecker(_root, refresh, adam=False)
    return optax.chain(inner, optax.add_decayed_weights(DECAY), optax.scale_by_learning_rate(rate))


def soap(rate: float, refresh: int) -> optax.GradientTransformation:
    """SOAP with decoupled decay."""
    inner = kronecker(basis, refresh, adam=True)
    return optax.chain(inner, optax.add_decayed_weights(DECAY), optax.scale_by_learning_rate(rate))


def adamw(rate: float, refresh: int) -> optax.GradientTransformation:
    """AdamW with the same decay of moments."""
    return optax.adamw(rate, b1=0.95, b2=0.95, weight_decay=DECAY)


INNER: dict[str, Callable[[float, int], optax.GradientTransformation]] = {
    "AdamW": adamw,
    "Shampoo": shampoo,
    "SOAP": soap,
}
ARMS = [wrapped for name in INNER for wrapped in (name, f"quotient({name})")]


# Runs ---------------------------------------------------------------------------------------------------


def network(c: Config) -> lm.LMConfig:
    """The configuration of the decoder."""
    return lm.llama_config(
        vocab=data.VOCAB, d_model=c.width, layers=1, heads=2, kv_heads=2, d_head=c.width // 2, d_ff=3 * c.width
    )


def optimizer(c: Config, arm: str, rate: Any) -> optax.GradientTransformation:
    """The optimizer of an arm's name, such as "SOAP" or "quotient(SOAP)"."""
    name = arm.removeprefix("quotient(").removesuffix(")")
    inner = INNER[name](rate, c.refresh)
    return inner if name == arm else go.quotient(inner, lm.gauges(network(c)))


@functools.cache
def program(c: Config, arm: str, steps: int, wide: bool) -> Callable[..., Any]:
    """A compiled run: (parameters, rate) → last parameters, loss of every batch, held-out loss.

    `wide` only makes the cache keep the programs for float32 and for float64 apart.
    """
    train, held_out = data.batches(c.length, c.batch)
    batches, others = np.stack([train[n] for n in range(steps)]), np.stack(held_out)
    _, loss = lm.params_and_loss(network(c), jax.random.key(0))

    @jax.jit
    def whole(params: Tree, rate: jax.Array) -> Any:
        params, losses = harness.scanned(optimizer(c, arm, rate), loss, params, batches)
        return params, losses, jax.lax.map(functools.partial(loss, params), others).mean()

    return whole


def cell(c: Config, arm: str, seed: int) -> Cell:
    """One cell: how far twins differ in float64, and the held-out losses for all rates in float32."""
    start, _ = lm.params_and_loss(network(c), jax.random.key(seed))
    train = program(c, arm, c.steps, False)
    losses = [float(train(start, jnp.float32(rate))[2]) for rate in RATES]
    with jax.enable_x64(True):
        params, group = in_float64(start), go.product(lm.gauges(network(c)))
        element = group.sample(jax.random.key(seed), params)
        run = program(c, arm, c.twin_steps, True)
        ours, theirs = (run(p, jnp.float64(TWIN_RATE)) for p in (params, group.act(element, params)))
        moved = group.act(element, ours[0])
        pairs = zip(jax.tree.leaves(moved), jax.tree.leaves(theirs[0]), strict=True)
        gap = max(float(jnp.linalg.norm(a - b) / jnp.linalg.norm(a)) for a, b in pairs)
        apart = float(jnp.abs(ours[1] - theirs[1]).max())
    return {"losses": harness.rounded(losses), "gap": harness.rounded(gap, 3), "apart": harness.rounded(apart, 3)}


# Results ------------------------------------------------------------------------------------------------


def best(result: Result, arm: str) -> tuple[float, list[float]]:
    """The rate with the least mean loss, and the losses there."""
    losses = np.array([found["losses"] for found in result["cells"][arm].values()])
    at = int(np.argmin(np.where(np.isfinite(losses), losses, np.inf).mean(0)))
    return RATES[at], losses[:, at].tolist()


def values(result: Result, arm: str, key: str) -> list[float]:
    """One number of an arm, for every seed."""
    return [found[key] for found in result["cells"][arm].values()]


def section(result: Result) -> str:
    """The results as Markdown: a table, and sentences about it."""
    c = Config(**result["settings"])
    lines = [["arm", "gap of twins", "their losses differ by", "held-out loss, best rate", "rate"]]
    for arm in result["arms"]:
        rate, losses = best(result, arm)
        gap, apart = (report.listed(values(result, arm, key), ".0e") for key in ("gap", "apart"))
        lines.append([arm, gap, apart, report.listed(losses, ".3f"), f"{rate:g}"])
    wrapped = [arm for arm in result["arms"] if arm.startswith("quotient")]
    agree = [max(values(result, arm, "gap")[n] for arm in wrapped) <= 1e-10 for n in range(len(result["seeds"]))]
    part = [min(values(result, name, "gap")[n] for name in INNER) > 1e-3 for n in range(len(result["seeds"]))]
    return "\n\n".join([
        f"Inner optimizers that are examples, written from papers. One-layer Llama, width {c.width}, on bytes of text, "
        f"{c.steps} steps of {c.batch} × {c.length} tokens, moments of 0.95, decay {DECAY}, eigendecompositions "
        f"every {c.refresh} steps, {len(RATES)} rates. Shampoo's step has the size of one of ±1 per entry. SOAP is "
        f"one-sided, with a ramp of {TIE_BREAK:g} of the mean eigenvalue on the diagonal. {report.made_with(result)}",
        report.markdown(lines),
        f"*Gap* is the largest relative distance of a leaf between runs of twins after {c.twin_steps} steps in "
        f"float64. Inside `quotient` twins agree to 1e-10 {report.on_seeds(agree)}; plain ones are more than 1e-3 "
        f"apart under all three optimizers {report.on_seeds(part)}. {_losses(result)}",
    ])


def _losses(result: Result) -> str:
    said = []
    reference = best(result, "AdamW")[1]
    for arm in result["arms"][1:]:
        ratios = [100 * (a / b - 1) for a, b in zip(best(result, arm)[1], reference, strict=True)]
        said.append(f"{arm} {np.mean(ratios):+.1f} ± {np.std(ratios, ddof=len(ratios) > 1):.1f} %")
    edge = [arm for arm in result["arms"] if best(result, arm)[0] in (RATES[0], RATES[-1])]
    means = {arm: np.mean([x["losses"] for x in result["cells"][arm].values()], 0) for arm in result["arms"]}
    large = [f"{arm} at {RATES[at]:g} ({y[at]:.1f})" for arm, y in means.items() for at in np.flatnonzero(y > SHOWN)]
    return (
        f"Held-out losses beside AdamW's, mean ± standard deviation over seeds: {', '.join(said)}. Above "
        f"{SHOWN}, and left out of the figure: {', '.join(large) if large else 'none'}. Best "
        f"at an end of the rates that were tried, so that others may do better: {', '.join(edge) if edge else 'none'}."
    )


def figure(result: Result, path: Path) -> None:
    """Draws the differences of twins, and losses over learning rates."""
    fig, (gaps, losses) = report.panels(2, "Shampoo and SOAP inside quotient", grid=True)
    colors = dict(zip(INNER, ("tab:red", "tab:green", "tab:purple"), strict=True))
    for at, arm in enumerate(result["arms"]):
        color = colors[arm.removeprefix("quotient(").removesuffix(")")]
        inside = arm.startswith("quotient")
        gaps.plot(values(result, arm, "gap"), [at] * len(result["seeds"]), "o" if inside else "s", color=color)
        mean = np.array([found["losses"] for found in result["cells"][arm].values()]).mean(0)
        losses.plot(RATES, mean, "o-" if inside else "s--", color=color, label=arm)
    gaps.set(title="Twins after 20 steps, float64", xscale="log", xlabel="largest relative gap of a leaf")
    report.rows(gaps, result["arms"])
    losses.set(title="Held-out loss, mean over seeds", xscale="log", xlabel="learning rate", ylabel="nats per byte")
    losses.xaxis.set_minor_formatter("")
    losses.set_xticks(RATES, [f"{rate:g}" for rate in RATES])
    losses.set_ylim(top=SHOWN)
    report.save(fig, path)


STUDY = harness.Study(__doc__, "kronecker", harness.by_seed(ARMS, cell), section, figure, config=Config(), full=FULL)
