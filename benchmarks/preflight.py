"""Whether `go.check` is silent for right set-ups: every tree of `benchmarks.exactness`, in three precisions.

    pip install "transformers<5" equinox
    python -m benchmarks.preflight                # an hour on 2 CPU cores; goes on where it was stopped
    python -m benchmarks.preflight --only "*Llama*"      # rows of this name

A cell is the largest asymmetry of a gauge, or the first line of the error, which would be a false alarm. The loss is
the cross-entropy where outputs are logits, and a squared error elsewhere. In float32 and bfloat16 leaves and
gradients have that precision, the computation too where the function allows; in float64 the float32 model is lifted
by `loss_fn=`. Writes benchmarks/results/preflight.json and .md.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

import gauge_optax as go
from benchmarks.exactness import Model, models, study
from examples.studies import harness

DTYPES = ("float64", "float32", "bfloat16")


def loss_of(model: Model, params: Any, batch: Any) -> jax.Array:
    """A loss that all gauges of the model leave alone: of logits up to one number per row, else of the outputs."""
    total = jnp.zeros(())
    for out in jax.tree.leaves(model.fn(params, batch)):
        if out.ndim and jnp.issubdtype(out.dtype, jnp.floating):
            out = out.astype(jnp.promote_types(out.dtype, jnp.float32))
            labels = jnp.arange(out[..., 0].size).reshape(out.shape[:-1]) % out.shape[-1]
            per_row = (optax.softmax_cross_entropy_with_integer_labels(out, labels) if model.logits
                       else jnp.mean((out - 1.0) ** 2, axis=-1))
            total += per_row.mean()
    return total


def _as_float32(x: Any) -> Any:
    return x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x


def checked(model: Model, dtype: str) -> float | str:
    """The largest asymmetry that the check reports, or the first line of what it raises."""
    precision = "float32" if dtype == "float64" else dtype
    params = jax.tree.map(
        lambda x: jnp.asarray(x, precision) if jnp.issubdtype(jnp.result_type(x), jnp.floating) else x, model.params)
    tx = go.quotient_adamw(1e-2, [gauge for gauge in model.gauges if gauge.name != "permutation"])

    def loss(params: Any, batch: Any) -> jax.Array:
        return loss_of(model, params, batch)

    try:
        jax.eval_shape(loss, params, model.batch)
    except TypeError:  # its constants are float32: a scan's carry would change its type
        return checked(model._replace(fn=lambda p, x: model.fn(jax.tree.map(_as_float32, p), x)), dtype)
    lifted = dict(loss_fn=loss, batch=model.batch) if dtype == "float64" else {}
    grads = jax.jit(jax.grad(loss))(params, model.batch)
    try:
        report = go.check(tx, tx.init(params), params, grads, **lifted)
    except ValueError as error:
        return str(error).splitlines()[0]
    return max((number for *_, number in report.asymmetries), default=0.0)


def page(result: Mapping[str, Any]) -> str:
    """Markdown."""
    cells = [cell for row in result["rows"].values() for cell in row.values()]
    alarms = [cell for cell in cells if isinstance(cell, str)]
    lines = [
        "# The preflight on right set-ups", "",
        f"`python -m benchmarks.preflight`: {result['host']}. The largest asymmetry of a gauge; what `go.check` raised "
        "would stand in its place.", "",
        f"| {len(result['rows'])} trees | {' | '.join(DTYPES)} |", "|---" * (len(DTYPES) + 1) + "|",
    ]
    for name, row in result["rows"].items():
        shown = [cell if isinstance(cell, str) else f"{cell:.0e}" for cell in map(row.__getitem__, DTYPES)]
        lines.append(f"| {name} | {' | '.join(shown)} |")
    return "\n".join([*lines, "", f"{len(cells)} cells, {len(alarms)} alarms."]) + "\n"


def measured(name: str) -> dict[str, float | str]:
    """A row; clears the caches after it: thousands of programs, whose memory maps have a limit."""
    model = models()[name]()
    row = {dtype: checked(model, dtype) for dtype in DTYPES}
    jax.clear_caches()
    return row


STUDY = study(__doc__, "preflight", measured, page)

if __name__ == "__main__":
    harness.main(STUDY)
