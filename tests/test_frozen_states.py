"""States of every transformation as this version writes them, kept in `tests/data`, are loaded, and training goes on.

    python -m tests.test_frozen_states   # writes them anew: only with a new `gauge_optax.slice.VERSION`

A state in the file is one after two steps, with the parameters there and the update of the third step.
"""

import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import nnx

import gauge_optax as go
from gauge_optax.slice import VERSION
from tests.cases import TRANSFORM_CASES, TransformCase
from tests.quick import jit
from tests.test_conformance import EVERY_KIND, FIRST_OF_ITS_KIND, _params
from tests.tolerances import tolerance
from tests.twins import driven, normal_like

Tree = Any
DATA = Path(__file__).parent / "data"
FILE = DATA / f"states.v{VERSION}.npz"
FOLDER = DATA / f"nnx_state.v{VERSION}"
CASES = [case for case in TRANSFORM_CASES if case.name in FIRST_OF_ITS_KIND]


def named(tree: Tree) -> dict[str, Any]:
    """Path of a leaf in any tree → the leaf."""
    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree.leaves_with_path(tree)}


def plain(leaf: jax.Array) -> np.ndarray:
    """The leaf as NumPy keeps it: the bits of a bfloat16, which is no dtype of its files."""
    return np.asarray(leaf).view(np.uint16) if leaf.dtype == jnp.bfloat16 else np.asarray(leaf)


def third_step(case: TransformCase) -> tuple[Tree, Tree, Tree]:
    """Parameters and state after two steps, and the update of the third."""
    tx, start = case.make(EVERY_KIND), _params()
    params, state = driven(tx, start, [normal_like(n + 1, start) for n in range(2)])
    return params, state, jax.jit(tx.update)(normal_like(3, params), state, params)[0]


class Net(nnx.Module):
    """Two kernels around a ReLU."""

    def __init__(self) -> None:
        self.up, self.down = nnx.Linear(3, 4, rngs=nnx.Rngs(0)), nnx.Linear(4, 3, rngs=nnx.Rngs(1))

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(nnx.relu(self.up(x)))


def optimizer() -> tuple[Net, nnx.Optimizer]:
    """A new network with a new optimizer."""
    model = Net()
    unit = go.rescale({"up/kernel": "_ channel", "up/bias": "channel"}, {"down/kernel": "channel _"})
    return model, nnx.Optimizer(model, go.quotient_adamw(0.01, unit), wrt=nnx.Param)


def step(model: Net, by: nnx.Optimizer) -> float:
    """One step; the loss before it."""
    x = jnp.arange(12.0).reshape(4, 3) / 12.0
    loss, grads = nnx.value_and_grad(lambda m: jnp.mean(jnp.square(m(x) - 1.0)))(model)
    by.update(model, grads)
    return float(loss)


def main() -> None:
    """Writes the file and the folder."""
    arrays: dict[str, Any] = {}
    for case in CASES:
        for part, tree in zip(("params", "state", "update"), third_step(case), strict=True):
            arrays |= {f"{case.name} | {part} | {path}": plain(leaf) for path, leaf in named(tree).items()}
    DATA.mkdir(exist_ok=True)
    np.savez_compressed(FILE, **arrays)
    model, by = optimizer()
    step(model, by)
    shutil.rmtree(FOLDER, ignore_errors=True)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(FOLDER.resolve(), nnx.to_pure_dict(nnx.state((model, by))))
    # Orbax names the folder of this machine there, and asks only whether the file is there.
    (FOLDER / "commit_success.txt").write_text(f"Checkpoint commit was successful to {FOLDER.name}")


@pytest.fixture(scope="module")
def stored() -> dict[str, np.ndarray]:
    with np.load(FILE) as file:
        return dict(file)


def test_every_transformation_has_a_state(stored: dict[str, np.ndarray]) -> None:
    assert {key.split(" | ")[0] for key in stored} == {case.name for case in CASES}
    assert any(f"v{VERSION}" in key for key in stored), "labels of parts name the version of states"


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_training_goes_on_from_a_stored_state(case: TransformCase, stored: dict[str, np.ndarray]) -> None:
    tx, template = case.make(EVERY_KIND), _params()

    def read(part: str, like: object) -> object:
        leaves, prefix = named(like), f"{case.name} | {part} | "
        assert {prefix + name for name in leaves} == {key for key in stored if key.startswith(prefix)}
        arrays = [jnp.asarray(stored[prefix + name].view(leaf.dtype)) for name, leaf in leaves.items()]
        return jax.tree.unflatten(jax.tree.structure(like), arrays)

    params, update = read("params", template), read("update", template)
    state = read("state", jax.eval_shape(tx.init, template))
    found, _ = jit(tx.update)(normal_like(3, template), state, params)
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(update), strict=True):
        np.testing.assert_allclose(x, y, rtol=10 * tolerance("optax", x.dtype), atol=10 * tolerance("optax", x.dtype))


def test_an_nnx_optimizer_goes_on_from_an_orbax_checkpoint() -> None:
    model, by = optimizer()
    _, _, expected = step(model, by), step(model, by), step(model, by)
    model, by = optimizer()
    state = nnx.state((model, by))
    with ocp.StandardCheckpointer() as checkpointer:
        pure = checkpointer.restore(FOLDER.resolve(), jax.eval_shape(lambda: nnx.to_pure_dict(state)))
    nnx.replace_by_pure_dict(state, pure)
    nnx.update((model, by), state)
    step(model, by)  # the next loss is the first that depends on the state of the optimizer
    assert step(model, by) == pytest.approx(expected, rel=1e-6)


if __name__ == "__main__":
    main()
