"""What every test may ask for: float64 that ends with the test, and a watch that it did end."""

import gc
import itertools
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from tests.cases import VARIANTS
from tests.suites import is_chosen


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Rows of `cases.VARIANTS` are slow, unless `rows` names them, and those that a test's `slow_rows` name.

    `--suite` leaves the tests of other suites out.
    """
    for item in items:
        given = item.callspec.params.values() if isinstance(item, pytest.Function) and hasattr(item, "callspec") else ()
        row = item.name.partition("[")[2].removesuffix("]") or item.name
        patterns = [pattern for mark in item.iter_markers("slow_rows") for pattern in mark.args]
        is_variant = any(getattr(value, "name", None) in VARIANTS for value in given)
        is_variant &= item.get_closest_marker("quick_row") is None
        if is_variant or any(fnmatchcase(row, pattern) for pattern in patterns):
            item.add_marker(pytest.mark.slow)
    suite = config.getoption("--suite")
    if suite is not None:
        chosen = {item for item in items if is_chosen(item.nodeid, suite)}
        left_out = [item for item in items if item not in chosen]
        items[:] = [item for item in items if item in chosen]
        config.hook.pytest_deselected(items=left_out)


def pytest_collection_finish(session: pytest.Session) -> None:
    """The garbage collector no longer walks what is imported, and walks seldom: 12 files took 67 s, and then 50."""
    del session
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)


@pytest.fixture(autouse=True)
def _x64_restored() -> Iterator[None]:
    """No test starts in, or leaves behind, another precision than the process began with."""
    assert jnp.zeros(()).dtype == jnp.float32, "a test before this one left x64 on"
    yield
    assert jnp.zeros(()).dtype == jnp.float32, "this test left x64 on"


@pytest.fixture(autouse=True, scope="module")
def _programs_of_one_module() -> Iterator[None]:
    """Compiled programs go with the module that made them: thousands at once are more than a process may map."""
    yield
    jax.clear_caches()


_TESTS = itertools.count()


@pytest.fixture(autouse=True)
def _few_programs() -> Iterator[None]:
    """They go within a module, too, when they are many; XLA crashes where it cannot map another (65,530 on Linux)."""
    yield
    maps = Path("/proc/self/maps")
    if next(_TESTS) % 20 == 0 and maps.exists() and maps.read_bytes().count(b"\n") > 30_000:
        jax.clear_caches()


@pytest.fixture
def x64() -> Iterator[None]:
    """float64 for the length of one test."""
    with jax.enable_x64(True):
        yield


@pytest.fixture(params=["float64", "float32"])
def dtype(request: pytest.FixtureRequest) -> Iterator[str]:
    """Both precisions, each with x64 as it needs it for the length of one test."""
    with jax.enable_x64(request.param == "float64"):
        yield request.param


SETTINGS = (
    "jax_enable_x64", "jax_disable_most_optimizations", "jax_compilation_cache_dir",
    "jax_persistent_cache_min_compile_time_secs", "jax_persistent_cache_min_entry_size_bytes",
)


@pytest.fixture
def settings_kept() -> Iterator[None]:
    """What a notebook or a guide sets in JAX ends with the test."""
    before = {name: jax.config.values[name] for name in SETTINGS}
    yield
    for name, value in before.items():
        jax.config.update(name, value)
