"""Which suite a test belongs to, by its file: the core, the parts beside it, or the studies.

*core* is what the library promises about bindings, gauges, the slice, optimizers and their states. *parts* are
discovery, orbits, measures, DDC and what stands beside other libraries. *studies* are examples, notebooks, benchmarks,
models and pages. `make test` runs the core and a sample of the others, `make test-core` one suite, `make test-all` all.
"""

import functools
import zlib
from fnmatch import fnmatchcase

# Patterns of files, without "tests/"; what none fits is core.
PATTERNS = {
    "parts": (
        *(f"{place}{folder}/*" for folder in ("discovery", "orbit", "measure") for place in ("", "gauge_optax/")),
        "gauge_optax/ddc/*", "test_binding_fuzz.py*", "test_frozen_states.py*", "test_ddc*", "test_opposite_gram.py*",
        "test_compress.py*", "test_pack.py*", "test_multipliers.py*", "test_gauged_transformer.py*", "test_stress.py*",
        "test_sharding.py*", "test_presets.py*", "test_process.py*", "test_options.py*",
    ),
    "studies": (
        "test_benchmarks.py*", "test_docs.py*", "test_examples.py*", "test_harness.py*", "test_models.py*",
        "test_notebooks.py*", "test_readme.py*", "test_released_weights.py*", "test_studies.py*",
        "test_torch_lora.py*", "test_tuned.py*",
    ),
}
ONE_IN = 64  # of the tests of the other suites is in the sample of `make test`


@functools.cache
def suite_of(file: str) -> str:
    """The suite of a test's file."""
    name = file.removeprefix("tests/")
    return next((suite for suite in PATTERNS if any(fnmatchcase(name, x) for x in PATTERNS[suite])), "core")


def is_chosen(test: str, suite: str) -> bool:
    """Whether a run of a suite has this test; "quick" is the core and a sample of the others, which ids decide."""
    own = suite_of(test.partition("::")[0])
    return own == suite if suite != "quick" else own == "core" or zlib.crc32(test.encode()) % ONE_IN == 0
