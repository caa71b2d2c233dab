"""What no single test can see: who imports whom, what is documented, what is registered."""

import ast
import functools
import inspect
import re
import sys
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType, ModuleType
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

# A module may import its own layer and those below. The slice knows parts, and no gauge; it is what reads
# them. `discovery`, `measure`, `testing` and `tools` treat an optimizer as a black box.
LAYERS: dict[str, int] = {
    "errors": -1,
    "traced": -1,
    "binding": 0,
    "linalg": 1,
    "xla": 1,
    "transformation": 1,
    "frozen": 1,
    "wrapped": 1,
    "parts": 2,
    "slice": 3,
    "gauges": 4,
    "optimizers": 5,
    "states": 5,
    "orbit": 5,
    "measure": 6,
    "ddc": 5,
    "norms": 5,
    "links": 6,
    "tools": 6,
    "discovery": 6,
    "testing": 6,
    "__init__": 7,
}
BLACK_BOX = ("discovery", "measure", "testing", "tools")


def imports(path: Path) -> Iterator[str]:
    """Dotted names that a file imports, at any depth; of `from a import b`, both a and a.b."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module, f"relative import in {path.name}"
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def part_of(path: Path) -> str:
    """The layer of a file: its folder, or its own name beside the folders."""
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


def imported_parts(path: Path) -> set[str]:
    """The layers of this package that a file imports."""
    names = {name.removeprefix("gauge_optax.") for name in imports(path) if name.startswith("gauge_optax.")}
    paths = {name: PACKAGE / name.replace(".", "/") for name in names}
    files = {name for name, path in paths.items() if path.is_dir() or path.with_suffix(".py").exists()}
    return {name.split(".")[0] for name in files} & set(LAYERS)


def test_every_module_has_a_layer() -> None:
    assert {part_of(path) for path in SOURCES} == set(LAYERS)


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_a_file_says_what_it_is_and_imports_what_it_may(path: Path) -> None:
    """Nothing of a higher layer; plain pytrees and public Optax alone; no optimizer where it is a black box."""
    layer, names = LAYERS[part_of(path)], set(imports(path))
    assert {name for name in imported_parts(path) if LAYERS[name] > layer} == set()
    assert "gauge_optax" not in names or layer == LAYERS["__init__"]
    assert part_of(path) not in BLACK_BOX or not {"optimizers", "ddc"} & imported_parts(path)
    for forbidden in ("flax", "optax._src", "jax._src", "models", "tests", "examples"):
        assert not [name for name in names if f"{name}.".startswith(f"{forbidden}.")]
    assert ast.get_docstring(ast.parse(path.read_text()))


def test_no_two_folders_import_each_other() -> None:
    """Directly or through others; a file beside the folders counts as one."""
    edges: dict[str, set[str]] = {}
    for path in SOURCES:
        if path != PACKAGE / "__init__.py":
            edges.setdefault(part_of(path), set()).update(imported_parts(path) - {part_of(path)})
    assert edges["ddc"] >= {"optimizers"} and edges["states"] >= {"optimizers"}
    reached = {part: set(others) for part, others in edges.items()}
    for _ in edges:  # so many steps reach whatever can be reached
        reached = {part: others.union(*(reached[other] for other in others)) for part, others in reached.items()}
    assert [part for part, others in reached.items() if part in others] == []


def test_the_check_sees_imports() -> None:
    assert imported_parts(PACKAGE / "optimizers" / "_max_norm_muon.py") >= {"norms", "optimizers"}
    assert imported_parts(PACKAGE / "slice.py") == {"binding", "errors", "linalg", "parts", "xla"}


@functools.cache
def kinds() -> set[str]:
    """Names of the classes of parts and of symmetries, and of all gauges but the two that a caller may hold."""
    files = [*(PACKAGE / "parts").rglob("*.py"), *(PACKAGE / "gauges").rglob("*.py")]
    nodes = [node for path in files for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ClassDef)]
    return {node.name for node in nodes} - {"Gauge", "Product"}


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
    edges = architecture.imports()
    assert edges["slice"] == imported_parts(PACKAGE / "slice.py") and set(edges) == set(LAYERS) - {"__init__"}
    assert architecture.PICTURE.read_text() == architecture.picture()
    rows = [line.split("|")[1] for line in ARCHITECTURE.splitlines() if line.startswith("| `")]
    assert set(re.findall(r"`(\w+)(?:/|\.py)`", " ".join(rows))) == set(LAYERS)


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


def public_functions(module: ModuleType) -> dict[str, Callable[..., object]]:
    """Functions that a module offers: of `__all__` where it has one, else its own without an underscore."""
    names = getattr(module, "__all__", None)
    if names is None:
        names = [n for n, f in inspect.getmembers(module, inspect.isfunction) if f.__module__ == module.__name__]
    members = {name: getattr(module, name) for name in names if not name.startswith("_")}
    return {name: member for name, member in members.items() if inspect.isfunction(member)}


MODULES = tuple(getattr(go, name) for name in go._MODULES)
FUNCTIONS = {
    f"{module.__name__}.{name}": function
    for module in (go, *MODULES) for name, function in public_functions(module).items()
}


def test_all_is_grouped_and_whole_and_the_reference_has_the_same_names() -> None:
    grouped = symbols.groups()
    assert len(grouped) > 1 and all(len(names) > 1 for names in grouped.values())
    assert [name for names in grouped.values() for name in names] == go.__all__
    assert dir(go) == sorted(set(go.__all__)) and len(go.__all__) <= 40
    pages = [path for paths in symbols.paths().values() for path in paths]
    classes = [f"gauge_optax.measure.{name}" for name in ("EmpiricalFisher", "Fisher", "GGN", "Hessian", "Recorder")]
    assert sorted(pages) == sorted([*FUNCTIONS, "gauge_optax.Gauge", *classes])
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


@pytest.fixture(scope="module")
def rows() -> dict[str, dict[str, int]]:
    return readability.rows()


def test_an_update_of_quotient_is_short(rows: dict[str, dict[str, int]]) -> None:
    assert 0 < rows["quotient"]["files"] <= 10
    assert 0 < rows["quotient"]["functions"] <= 80
    assert 0 < rows["quotient"]["nouns"] <= 15


def test_plain_ddc_passes_few_files(rows: dict[str, dict[str, int]]) -> None:
    assert rows["quotient"]["files"] < rows["ddc_adamw, plain"]["files"] <= 14
