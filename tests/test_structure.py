"""What no single test can see: who imports whom, what is documented, what is registered."""

import ast
import functools
import graphlib
import inspect
import re
import sys
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import jax
import optax
import pytest

import gauge_optax as go
from benchmarks import readability
from docs import architecture, symbols
from gauge_optax.gauges.gauge import Gauge
from tests.cases import DISCRETE_CASES, FLAT_CASES, GAUGE_CASES, TRANSFORM_CASES

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "gauge_optax"
SOURCES = sorted(PACKAGE.rglob("*.py"))

# From the bottom up. A module may import its own layer and those below. The slice knows parts, and no gauge; it is what
# reads them. `discovery`, `measure`, `testing` and `tools` treat an optimizer as a black box.
LAYERS = (
    {"errors", "traced"}, {"binding"}, {"linalg", "xla", "transformation", "frozen", "wrapped"}, {"parts"}, {"slice"},
    {"gauges"}, {"optimizers", "states", "orbit", "ddc", "norms"},
    {"measure", "links", "tools", "discovery", "testing"},
)
BLACK_BOX = ("discovery", "measure", "testing", "tools")
EDGES = architecture.imports()
"""Folder → the folders that its files import from; a file beside the folders counts as one."""


def imports(tree: ast.Module) -> Iterator[str]:
    """Dotted names that a file imports, at any depth; of `from a import b` and of `import a.b`, both a and a.b."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (name for alias in node.names for name in (alias.name, alias.name.partition(".")[0]))
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module, "a relative import"
            yield from (node.module, *(f"{node.module}.{alias.name}" for alias in node.names))


def part_of(path: Path) -> str:
    """The folder of a file, or its own name beside the folders."""
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


def test_imports_go_down() -> None:
    """Nothing of a higher layer; no optimizer where it is a black box; no circle, through other folders either."""
    assert {part_of(path) for path in SOURCES} - {"__init__"} == set(EDGES) == set().union(*LAYERS)
    assert EDGES["slice"] == {"binding", "errors", "linalg", "parts", "xla"} and "norms" in EDGES["optimizers"]
    layer = {part: height for height, parts in enumerate(LAYERS) for part in parts}
    assert [(part, other) for part in EDGES for other in EDGES[part] if layer[other] > layer[part]] == []
    assert not any({"optimizers", "ddc"} & EDGES[part] for part in BLACK_BOX)
    assert set(graphlib.TopologicalSorter(EDGES).static_order()) == set(EDGES)


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_a_file_says_what_it_is_and_uses_public_names(path: Path) -> None:
    """Plain pytrees and public Optax alone, and nothing of this repository around the package."""
    tree = ast.parse(path.read_text())
    for name in imports(tree):
        assert not f"{name}.".startswith(("flax.", "optax._src.", "jax._src.", "models.", "tests.", "examples."))
        assert name != "gauge_optax" or path == PACKAGE / "__init__.py"
    assert ast.get_docstring(tree)


@functools.cache
def kinds() -> set[str]:
    """Names of the classes of parts and of symmetries, and of all gauges but the two that a caller may hold."""
    trees = [ast.parse(path.read_text()) for path in SOURCES if part_of(path) in ("parts", "gauges")]
    return {x.name for tree in trees for x in ast.walk(tree) if isinstance(x, ast.ClassDef)} - {"Gauge", "Product"}


def questions(source: str) -> Iterator[str]:
    """Where a source asks of what kind something is: `isinstance` of a kind, or a comparison of `effect`."""
    for node in ast.walk(ast.parse(source)):
        leaves = list(ast.walk(node))
        attributes = {leaf.attr for leaf in leaves if isinstance(leaf, ast.Attribute)}
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "isinstance":
            if kinds() & {leaf.id for leaf in leaves if isinstance(leaf, ast.Name)}:
                yield ast.unparse(node)
        elif isinstance(node, ast.Compare) and {"effect", "kind"} & attributes and "dtype" not in attributes:
            yield ast.unparse(node)


def test_nobody_but_gauges_and_parts_asks_of_what_kind_a_part_is() -> None:
    """Consumers register a rule per class. The slice sorts parts by their three roles, discovery compares the names of
    constructors, and a move of a state has an effect of its own, which is no kind of gauge."""
    found = {
        (str(path.relative_to(PACKAGE)), question)
        for path in SOURCES if part_of(path) not in ("gauges", "parts", "discovery")
        for question in questions(path.read_text())
    }  # fmt: skip
    roles = ("Constant", "Size", "Turn", "Constant | Size | Turn")
    assert found == {("slice.py", f"isinstance(p, {role})") for role in roles} | {
        ("states/moves.py", "moving.effect in effects")
    }
    assert list(questions("isinstance(part, Factor) or gauge.effect == 'shift'")) != []


ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text()


def test_the_picture_of_the_architecture_is_drawn_from_the_code() -> None:
    """`python -m docs.architecture` draws it; the table names every folder, and every file beside the folders."""
    assert architecture.PICTURE.read_text() == architecture.picture()
    rows = [line.split("|")[1] for line in ARCHITECTURE.splitlines() if line.startswith("| `")]
    assert set(re.findall(r"`(\w+)(?:/|\.py)`", " ".join(rows))) == {*EDGES, "__init__"}


def test_an_update_takes_the_steps_that_the_page_and_the_picture_name() -> None:
    """In this order, by these functions of these files, and through no other folders than those in blue."""
    gauges, params = readability.five_gauges()
    tx = go.quotient(optax.adamw(3e-4), gauges)
    state = jax.eval_shape(tx.init, params)
    called: dict[tuple[str, str], None] = {}

    def watch(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and PACKAGE in (path := Path(frame.f_code.co_filename)).parents:
            called[str(path.relative_to(PACKAGE)), frame.f_code.co_qualname.split(".<locals>")[0]] = None

    sys.setprofile(watch)
    try:
        jax.eval_shape(tx.update, params, state, params)
    finally:
        sys.setprofile(None)
    steps = [(step.file, step.function) for step in architecture.STEPS]
    assert re.findall(r"\(`([\w/]+\.py)`, `([\w.]+)`\)", ARCHITECTURE) == steps == [x for x in called if x in steps]
    assert {part_of(PACKAGE / file) for file, _ in called} == architecture.PASSED
    assert {name for _, name in called} >= set(re.findall(r"`(Slice\.\w+)`", ARCHITECTURE))


# Documentation ------------------------------------------------------------------------------------


PUBLIC: dict[str, Any] = {
    path: functools.reduce(getattr, path.split(".")[1:], go) for paths in symbols.paths().values() for path in paths
}
"""What the reference has a page of."""
FUNCTIONS: dict[str, Callable[..., object]] = {path: x for path, x in PUBLIC.items() if inspect.isfunction(x)}


def test_all_is_grouped_and_whole_and_the_reference_has_the_same_names() -> None:
    grouped = symbols.groups()
    assert len(grouped) > 1 and all(len(names) > 1 for names in grouped.values())
    assert [name for names in grouped.values() for name in names] == go.__all__
    assert dir(go) == sorted(set(go.__all__)) and len(go.__all__) <= 40
    assert {*symbols.MODULES.values()} == {getattr(go, name) for name in vars(go)["_MODULES"]}
    classes = {f"gauge_optax.measure.{name}" for name in ("EmpiricalFisher", "Fisher", "GGN", "Hessian", "Recorder")}
    assert PUBLIC.keys() - FUNCTIONS.keys() == classes | {"gauge_optax.Gauge"}
    assert FUNCTIONS.keys() >= {
        "gauge_optax.rescale", "gauge_optax.measure.vertical_motion", "gauge_optax.testing.assert_invariant"
    }


@pytest.mark.parametrize("name", FUNCTIONS)
def test_public_functions_are_documented_with_a_running_example(name: str) -> None:
    """Args, then Returns, or Raises where there is nothing to return; doctest runs what stands behind `>>>`."""
    function = FUNCTIONS[name]
    text = inspect.getdoc(function) or ""
    returns_nothing = typing.get_type_hints(function)["return"] is type(None)
    for section in ("Args:", "Raises:" if returns_nothing else "Returns:", ">>>"):
        assert section in text, section
    arguments = text.split("Args:")[1].split("\n\n")[0]
    for parameter in inspect.signature(function).parameters:
        assert f"\n  {parameter}:" in arguments, parameter


# Registers ----------------------------------------------------------------------------------------


def returning(base: type) -> set[str]:
    """Names of public functions whose result is one of these."""
    functions = {name.split(".")[-1]: function for name, function in FUNCTIONS.items()}
    hints = {name: typing.get_type_hints(function)["return"] for name, function in functions.items()}
    return {name for name, hint in hints.items() if inspect.isclass(hint) and issubclass(hint, base)}


@pytest.mark.parametrize(("base", "cases", "besides"), [
    (Gauge, (*GAUGE_CASES, *FLAT_CASES, *DISCRETE_CASES), {"user_gauge"}),
    (optax.GradientTransformation, TRANSFORM_CASES, set()),
], ids=["gauges", "transforms"])
def test_everything_public_is_registered_under_a_name_of_its_own(base: type, cases: Any, besides: set[str]) -> None:
    assert {"product", "ddc_adamw"} & returning(base)
    names = [case.name for case in cases]
    assert {name.split("/")[0] for name in names} == returning(base) | besides
    assert len(set(names)) == len(names) and all(name.count("/") == 1 for name in names)


# How much of the package one update passes through ------------------------------------------------


def test_an_update_passes_few_files_and_functions() -> None:
    rows = readability.rows()
    for what, most in {"files": 10, "functions": 80, "nouns": 15}.items():
        assert 0 < rows["quotient"][what] <= most, what
    assert rows["quotient"]["files"] < rows["ddc_adamw, plain"]["files"] <= 14
