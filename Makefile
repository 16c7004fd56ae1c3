# Everything a checkout needs, from a machine with only Python (3.11 or later) and make.
#
#   make demo       convert, patch, verify and time the checkpoint that ships with the package
#   make test       the quick tests (under 8 minutes on two cores)
#   make test-all   every test; records the result in benchmarks/results/test_all.md when all is green
#   make test-oldest  the tests of patching under the oldest supported transformers, in an environment of their own;
#                   records the result in benchmarks/results/test_oldest.md when all are green
#   make broken     breaks each feature of patched models on purpose, and records which tests noticed in
#                   benchmarks/results/broken.md
#   make lint       ruff, and notebooks without output
#   make typecheck  mypy --strict
#   make typed      the tree of links through which type checkers and editors see the package
#   make bench      the benchmarks
#   make bench-convert  conversion at DeepSeek-V3's sizes: memory, and speed beside a copy and a matrix product
#   make kernel-report  every tile of the decode kernel compiled for every GPU: benchmarks/results/kernel_report.md
#
# PYTHON=python3.12 chooses the interpreter, VENV=dir the environment, ARGS="-k name -x" is handed to pytest, and JOBS=1
# runs the tests in one process (else one for each core, four at most).

PYTHON ?= python3
VENV ?= .venv
OLDEST ?= .venv-oldest
ARGS ?=
JOBS ?= logical

BIN := $(VENV)/bin
TESTS := tests $(addprefix --nbmake ,$(wildcard notebooks/*.ipynb))
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-input -c constraints.txt

# Tests share the cores by processes of one thread each: barriers between threads would cost more than they give.
test test-all test-oldest broken: export OMP_NUM_THREADS = 1
test test-all test-oldest: export PYTEST_ADDOPTS += --numprocesses=$(JOBS) --maxprocesses=4 --dist=worksteal

.PHONY: demo test test-all test-oldest broken lint typecheck typed bench bench-convert kernel-report

demo: $(VENV)/.runtime
	$(BIN)/mla-convert demo

test: $(VENV)/.dev
	$(BIN)/python -m pytest -m "not slow" $(ARGS) $(TESTS)

test-all: $(VENV)/.dev
	$(BIN)/python tools/test_all.py $(ARGS) $(TESTS)

test-oldest: $(OLDEST)/.oldest
	$(OLDEST)/bin/python tools/test_oldest.py $(ARGS)

broken: $(VENV)/.dev
	$(BIN)/python tools/broken.py $(ARGS)

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(if $(wildcard notebooks/*.ipynb),$(BIN)/nbstripout --verify $(wildcard notebooks/*.ipynb))

typecheck: $(VENV)/.dev typed
	cd build/typed && $(abspath $(BIN))/mypy --config-file ../../pyproject.toml --cache-dir ../../.mypy_cache

# mla_convert.kernels and mla_convert.patches are top-level folders; mypy and pyright don't read that mapping.
typed:
	rm -rf build/typed
	mkdir -p build/typed/mla_convert
	ln -s $(addprefix ../../../,$(wildcard mla_convert/*.py) mla_convert/py.typed kernels patches) build/typed/mla_convert/

bench-convert: $(VENV)/.runtime
	$(BIN)/python benchmarks/convert.py

bench: $(VENV)/.runtime
	$(foreach script,$(filter-out benchmarks/recording.py,$(wildcard benchmarks/*.py)),$(BIN)/python $(script) &&) true

kernel-report: $(VENV)/.dev
	$(BIN)/python tools/kernel_report.py

# A stamp is written last, so an interrupted installation is done again.
$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or later is needed, this is %d.%d: use make PYTHON=python3.12 ..." % sys.version_info[:2])'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.runtime: pyproject.toml constraints.txt | $(BIN)/python
	$(INSTALL) -e .
	@touch $@

$(VENV)/.dev: pyproject.toml constraints.txt | $(BIN)/python
	$(INSTALL) -e ".[dev]"
	@touch $@ $(VENV)/.runtime

# The pins of constraints.txt, less those that constraints-oldest.txt replaces.
$(OLDEST)/.oldest: pyproject.toml constraints.txt constraints-oldest.txt
	@$(MAKE) --no-print-directory VENV=$(OLDEST) $(OLDEST)/bin/python
	grep -v $(patsubst %,-e '^%==',$(shell sed -n 's/==.*//p' constraints-oldest.txt)) constraints.txt > $(OLDEST)/constraints.txt
	cat constraints-oldest.txt >> $(OLDEST)/constraints.txt
	$(OLDEST)/bin/python -m pip install --quiet --disable-pip-version-check --no-input -c $(OLDEST)/constraints.txt -e ".[dev]"
	@touch $@
