"""How far outputs move when a point of the orbit is chosen: every function of `orbit/` on every tree that we have.

    pip install "transformers<5" equinox
    python -m benchmarks.exactness                # an hour on 2 CPU cores; goes on where it was stopped
    python -m benchmarks.exactness --only "*Llama*"      # rows of this name

A row is a tree: the decoders of `benchmarks.certificates`, the trees of `models/presets`, and small random instances of
released architectures with the gauges that `discover` found (examples/results/released.json). A cell is the largest
change of an output, divided by the largest output; log-probabilities where the outputs are logits. Float64 leaves go
through the function as float64, whatever casts it has. Writes benchmarks/results/exactness.json and .md.
"""

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import gauge_optax as go
from benchmarks.certificates import ROWS, SIZES, decoder
from benchmarks.timing import benchmark, host
from examples import released
from examples.studies import harness
from examples.studies.report import bare
from gauge_optax.binding import leaves_by_path, with_leaves
from gauge_optax.discovery.lift import in_double
from models import lm
from tests.test_presets import TREES, T, V, stacked_numbers

LIMITS = {"float64": 1e-12, "float32": 1e-5}
ROTATIONS = ("residual_rotation", "head_rotation", "head_linear")
Fn = Callable[[Any, Any], Any]


class Model(NamedTuple):
    """What a row needs.

    Attributes:
      fn: (params, batch) to outputs.
      params: float32 leaves.
      batch: one batch.
      gauges: all gauges of the model, permutations of units and heads among them where they are known.
      logits: whether outputs count up to one number per row.
    """

    fn: Fn
    params: Any
    batch: Any
    gauges: Sequence[go.Gauge]
    logits: bool = True


def of_decoder(row: str) -> Model:
    """A decoder of `models/lm.py`: d = 8, of which LayerNorms and heads have Hadamard matrices."""
    switches = ROWS[row] | dict(d_model=8)
    with jax.enable_x64():
        made = decoder(switches)
    params = jax.tree.map(lambda x: np.asarray(x, np.float32), made.params)
    gauges = [*made.gauges, *lm.permutations(lm.LMConfig(**(SIZES | switches)))]
    return Model(made.fn, params, np.asarray(made.batches[0])[:8], gauges)


def of_preset(name: str) -> Model:
    """The tree of a preset, with the gauges that `discover` finds in it: the preset's, and those of the whole model."""
    tree, rng = TREES[name], np.random.default_rng(0)
    shapes = stacked_numbers(tree.shapes)
    params = {p: (0.4 * rng.standard_normal(s) + (len(s) == 1)).astype(np.float32) for p, s in shapes.items()}
    images = name == "vision_transformer"
    batches: Any = rng.standard_normal((2, 2, T, 6)) if images else rng.integers(0, V, (2, 2, T))
    report = go.discover(tree.fn, params, list(batches), "logits", progress=False)
    return Model(tree.fn, params, batches[0], report.whole)


def of_released(name: str) -> Model:
    """A released architecture, at random weights, with the gauges that `discover` wrote down."""
    code = json.loads(released.RESULT.read_text())[name]["code"]
    with jax.enable_x64(False):
        made = released.of_equinox() if name == "equinox" else released.of_transformers(*released.MODELS[name])
    fn, params, batches = made
    rng = np.random.default_rng(0)

    def drawn(x: Any) -> Any:  # fresh biases are zero, and fresh scales one: the easiest case
        return np.asarray(x) + 0.1 * rng.standard_normal(x.shape).astype(np.float32)

    params = jax.tree.map(drawn, params)
    return Model(fn, params, batches[0], eval(code, {"go": go}), logits=True)


def fourth_powers(params: Any) -> jax.Array:
    """An objective for `choose` that large entries dominate."""
    leaves = jax.tree.leaves(params)
    fourth, second = (jnp.stack([jnp.sum(x**power) for x in leaves]).sum() for power in (4, 2))
    return fourth / second**2


def points(model: Model, params: Any, other: Any) -> dict[str, Callable[[], Any]]:
    """Function of `orbit/` → the weights that it chooses."""
    group = go.product(model.gauges)
    turning = [gauge for gauge in model.gauges if gauge.name in ROTATIONS]
    search = functools.partial(
        go.orbit.choose, fourth_powers, optimizer=optax.adam(0.02), steps=5, progress=False)
    rotations = {"rotate, Hadamard": lambda: go.orbit.rotate(params, turning),
                 "rotate, random": lambda: go.orbit.rotate(params, turning, "random")}
    return {
        "canonicalize": lambda: go.orbit.canonicalize(params, model.gauges), **(rotations if turning else {}),
        "choose": lambda: group.act(search(params, group), params),
        "align": lambda: group.act(go.orbit.align(other, params, group), params),
    }


def moved_by(model: Model, dtype: str) -> dict[str, float | str]:
    """The change of outputs per function; the first line of the error where there is no such point."""
    with jax.enable_x64(dtype == "float64"):
        stored = leaves_by_path(model.params)
        params = jax.tree.map(lambda x: jnp.asarray(x, dtype), model.params)
        rng = np.random.default_rng(1)
        other = jax.tree.map(lambda x: jnp.asarray(x + 0.3 * rng.standard_normal(x.shape), dtype), model.params)

        def of_leaves(leaves: Mapping[str, Any], batch: Any) -> Any:
            return jax.tree.leaves(model.fn(with_leaves(model.params, dict(leaves)), batch))

        flat: Callable[..., Any] = of_leaves
        if dtype == "float64":
            doubled = {path: np.asarray(x, np.float64) for path, x in stored.items()}
            flat = in_double(of_leaves, doubled, {path: x.dtype for path, x in stored.items()}, model.batch)

        @jax.jit
        def outputs(params: Any) -> list[Any]:
            out = flat(leaves_by_path(params), model.batch)
            return [jax.nn.log_softmax(x) for x in out] if model.logits else out

        before = outputs(params)
        cells: dict[str, float | str] = {}
        for name, point in points(model, params, other).items():
            try:
                moved = point()
            except ValueError as error:
                cells[name] = str(error).splitlines()[0]
                continue
            after = outputs(moved)
            pairs = zip(before, after, strict=True)
            change = max(float(jnp.max(jnp.abs(x - y)) / jnp.max(jnp.abs(x))) for x, y in pairs)
            same = all(bool(jnp.all(x == y)) for x, y in zip(*map(jax.tree.leaves, (params, moved)), strict=True))
            cells[name] = "the same weights" if same else change
        return cells


def page(result: Mapping[str, Any]) -> str:
    """Markdown."""
    functions = ("canonicalize", "rotate, Hadamard", "rotate, random", "choose", "align")
    lines = [
        "# How far outputs move", "",
        f"`python -m benchmarks.exactness`: {result['host']}. The largest change of an output when another point of "
        "the orbit is chosen, divided by the largest output; log-probabilities where outputs are logits. Limits: "
        "1e-12 in float64, 1e-5 in float32. A dash: the model has no such rotation, or none of these sizes.", "",
    ]
    numbers = {(dtype, name, f): x for name, row in result["rows"].items() for dtype in LIMITS
               for f, x in row[dtype].items() if isinstance(x, float)}
    over = []
    for dtype, limit in LIMITS.items():
        rows = [["", *functions]]
        for name in result["rows"]:
            cells = {f: numbers[dtype, name, f] for f in functions if (dtype, name, f) in numbers}
            over += [f"{name}, {f}, {x:.1e}" for f, x in cells.items() if x > limit]
            rows.append([name, *(f"{cells[f]:.0e}" if f in cells else "–" for f in functions)])
        lines += [f"## {dtype}", "", bare(rows), ""]
    said = f"{len(numbers)} cells; {'none is' if not over else f'{len(over)} are'} over its limit"
    return "\n".join([*lines, said + (": " + "; ".join(over) if over else "") + "."]) + "\n"


MODELS: dict[str, Callable[[], Model]] = {
    **{row: functools.partial(of_decoder, row) for row in ROWS},
    **{f"preset {name}": functools.partial(of_preset, name) for name in TREES},
    **{f"released {x}": functools.partial(of_released, x) for x in (*released.MODELS, "equinox")},
}


def measured(name: str) -> dict[str, Any]:
    """A row; clears the caches of the one before: thousands of programs, whose memory maps have a limit."""
    jax.clear_caches()
    model = MODELS[name]()
    return {dtype: moved_by(model, dtype) for dtype in LIMITS}


STUDY = benchmark(
    __doc__, "exactness", harness.by_name(MODELS, lambda _, args, name: measured(name), "rows"), page,
    head=lambda _: {"host": host(), "rows": {}},
)

if __name__ == "__main__":
    harness.main(STUDY)
