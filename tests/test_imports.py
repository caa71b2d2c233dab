"""`import gauge_optax` is quick: a name is imported when it is first asked for."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import gauge_optax as go

ROOT = Path(__file__).resolve().parent.parent
SLOW = ("gauge_optax.discovery", "gauge_optax.measure", "tqdm", "scipy.optimize")
TRAINING = "import jax, optax, gauge_optax as go; go.quotient_adamw, go.ddc_muon, go.rescale, go.head_rotation"
PALLAS = "jax._src.pallas.core"  # what `jax.extend` imports, but not in JAX 0.8


def loaded(statement: str) -> set[str]:
    """Names of all modules that a fresh process has after a statement."""
    program = f"{statement}\nimport sys; print(*sys.modules)"
    return set(subprocess.check_output([sys.executable, "-c", program], cwd=ROOT, text=True).split())


@pytest.fixture(scope="module")
def others() -> set[str]:
    """What JAX and Optax import of themselves."""
    return loaded("import jax, optax")


@pytest.mark.parametrize("statement", ["import gauge_optax", "from gauge_optax import *; import gauge_optax", TRAINING])
def test_what_is_slow_is_imported_only_where_it_is_used(statement: str, others: set[str]) -> None:
    """All names together need all but scipy, which waits until units of two networks are paired."""
    slow = {*SLOW, PALLAS} - others
    used = slow - {"scipy.optimize"} if "*" in statement else set()
    assert "gauge_optax" not in others and used - {PALLAS} <= loaded(statement) & slow <= used


def test_every_public_name_can_be_got() -> None:
    assert all(getattr(go, name) is getattr(go, name) for name in go.__all__)
    for module in ("orbit", "norms", "links", "tools", "measure"):
        for name in getattr(go, module).__all__:
            assert getattr(go, name) is getattr(getattr(go, module), name), name
    with pytest.raises(AttributeError, match="module 'gauge_optax' has no attribute 'quotien'"):
        getattr(go, "quotien")  # noqa: B009


def test_type_checkers_and_python_read_the_same_names() -> None:
    tree = ast.parse(Path(go.__file__).read_text())
    branch = next(node for node in tree.body if isinstance(node, ast.If))
    imports = (node for node in branch.body if isinstance(node, ast.ImportFrom))
    listed = {alias.name: node.module for node in imports for alias in node.names}
    lazy = {name: f"gauge_optax.{module}" for name, module in vars(go)["_MODULE_OF"].items()}
    assert listed == lazy | dict.fromkeys(vars(go)["_MODULES"], "gauge_optax") and set(listed) == set(go.__all__)
