"""Which suite a test belongs to, by its file: the core, the parts beside it, or the studies.

*core* is what the library promises about bindings, gauges, the slice, optimizers and their states. *parts* are
discovery, orbits, measures, DDC and what stands beside other libraries. *studies* are examples, notebooks, benchmarks,
models and pages. `make test` runs the core and a sample of the others, `make test-core` one suite, `make test-all` all.
"""

import functools
import zlib
from fnmatch import fnmatchcase

# The first pattern that fits a file without "tests/" says its suite; what none fits is core.
PATTERNS: dict[str, str] = {
    "discovery/*": "parts",
    "orbit/*": "parts",
    "measure/*": "parts",
    "test_binding_fuzz.py*": "parts",
    "test_frozen_states.py*": "parts",
    "test_ddc*": "parts",
    "test_opposite_gram.py*": "parts",
    "test_compress.py*": "parts",
    "test_pack.py*": "parts",
    "test_multipliers.py*": "parts",
    "test_gauged_transformer.py*": "parts",
    "test_stress.py*": "parts",
    "test_sharding.py*": "parts",
    "test_presets.py*": "parts",
    "gauge_optax/discovery/*": "parts",
    "gauge_optax/orbit/*": "parts",
    "gauge_optax/measure/*": "parts",
    "gauge_optax/ddc/*": "parts",
    "test_benchmarks.py*": "studies",
    "test_docs.py*": "studies",
    "test_examples.py*": "studies",
    "test_gaugefix_example.py*": "studies",
    "test_grokking.py*": "studies",
    "test_harness.py*": "studies",
    "test_linen_multipliers.py*": "studies",
    "test_models.py*": "studies",
    "test_notebooks.py*": "studies",
    "test_readme.py*": "studies",
    "test_recent_optimizers.py*": "studies",
    "test_released_weights.py*": "studies",
    "test_results_page.py*": "studies",
    "test_rotational_examples.py*": "studies",
    "test_studies.py*": "studies",
    "test_torch_lora.py*": "studies",
    "test_train_sharded.py*": "studies",
    "test_training_studies.py*": "studies",
    "test_tuned.py*": "studies",
}
SUITES = ("core", "parts", "studies")
ONE_IN = 64  # of the tests of the other suites is in the sample of `make test`


@functools.cache
def suite_of(file: str) -> str:
    """The suite of a test's file."""
    name = file.removeprefix("tests/")
    return next((suite for pattern, suite in PATTERNS.items() if fnmatchcase(name, pattern)), "core")


def is_chosen(test: str, suite: str) -> bool:
    """Whether a run of a suite has this test; "quick" is the core and a sample of the others, which ids decide."""
    own = suite_of(test.partition("::")[0])
    if suite == "quick":
        return own == "core" or zlib.crc32(test.encode()) % ONE_IN == 0
    return own == suite
