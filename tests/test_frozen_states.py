"""States that an earlier commit of this version wrote are loaded, and training goes on from them as it did there."""

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import nnx

from tests import frozen_states as frozen
from tests.cases import TransformCase
from tests.quick import jit
from tests.test_conformance import EVERY_KIND, _params
from tests.tolerances import tolerance
from tests.twins import normal_like


@pytest.fixture(scope="module")
def stored() -> dict[str, np.ndarray]:
    with np.load(frozen.FILE) as file:
        return dict(file)


def test_every_transformation_has_a_state(stored: dict[str, np.ndarray]) -> None:
    assert {key.split(" | ")[0] for key in stored} == {case.name for case in frozen.CASES}
    assert any(f"v{frozen.VERSION}" in key for key in stored), "labels of parts name the version of states"


@pytest.mark.parametrize("case", frozen.CASES, ids=lambda case: case.name)
def test_training_goes_on_from_a_stored_state(case: TransformCase, stored: dict[str, np.ndarray]) -> None:
    tx, template = case.make(EVERY_KIND), _params()

    def read(part: str, like: object) -> object:
        treedef = jax.tree.structure(like)
        leaves = frozen.named(like)
        prefix = f"{case.name} | {part} | "
        assert {prefix + name for name in leaves} == {key for key in stored if key.startswith(prefix)}
        arrays = [stored[prefix + name].view(leaf.dtype) for name, leaf in leaves.items()]
        return jax.tree.unflatten(treedef, [jnp.asarray(x) for x in arrays])

    params, update = read("params", template), read("update", template)
    state = read("state", jax.eval_shape(tx.init, template))
    found, _ = jit(tx.update)(normal_like(3, template), state, params)
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(update), strict=True):
        np.testing.assert_allclose(x, y, rtol=10 * tolerance("optax", x.dtype), atol=10 * tolerance("optax", x.dtype))


def test_an_nnx_optimizer_goes_on_from_an_orbax_checkpoint() -> None:
    model, by = frozen.optimizer()
    frozen.step(model, by)
    expected = frozen.step(model, by)
    model, by = frozen.optimizer()
    state = nnx.state((model, by))
    with ocp.StandardCheckpointer() as checkpointer:
        pure = checkpointer.restore(frozen.FOLDER.resolve(), jax.eval_shape(lambda: nnx.to_pure_dict(state)))
    nnx.replace_by_pure_dict(state, pure)
    nnx.update((model, by), state)
    assert frozen.step(model, by) == pytest.approx(expected, rel=1e-6)
