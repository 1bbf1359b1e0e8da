# Two commands on a new machine: `make demo` trains and uses a classifier, `make test` runs the tests.
# Both create .venv the first time; a second run does not install again.

PYTHON ?= python3
BIN := .venv/bin
# two processes with one thread each, because more threads would compete for the same cores
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2

.PHONY: demo test slow gpu faults faults-push mutants lint package docs clean

demo: .venv/demo-installed
	$(BIN)/vitkit demo

test: .venv/test-installed
	$(PYTEST) -m "not slow and not faults"

slow: .venv/test-installed
	$(PYTEST) -m "slow and not faults" --durations=30

# All tests that need an NVIDIA GPU, with a record in docs/lab; GPU_PYTHON=... uses an existing environment
gpu: $(if $(GPU_PYTHON),,.venv/test-installed)
	$(or $(GPU_PYTHON),$(BIN)/python) tests/gpu/lane.py $(GPU_OPTIONS)

# Bad input and broken machines: a quick part for every change, and all of docs/contributing/reliability.md
faults-push: .venv/test-installed
	$(PYTEST) -m faults tests/faults

faults: .venv/test-installed
	VITKIT_FAULTS=full VITKIT_FAULTS_RECORD=tests/faults/record.json \
	$(PYTEST) tests/faults $$($(BIN)/python tests/faults/promises.py tests)
	$(BIN)/python tests/faults/promises.py

# Mutation tests: deliberate mistakes in the code, and whether the tests near them notice; resumable
mutants: .venv/test-installed
	OMP_NUM_THREADS=1 $(BIN)/python tests/mutants/mutants.py --jobs 2 $(MUTANTS)

lint: .venv/test-installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy --platform win32 --cache-dir .mypy_cache/win32
	$(BIN)/mypy --platform darwin --cache-dir .mypy_cache/darwin

# The source distribution and the wheel, checked with twine
package: .venv/test-installed
	rm -rf dist
	$(BIN)/python -m build --quiet --no-isolation
	$(BIN)/twine check --strict dist/*

# The documentation site, in site/; a broken link is an error
docs: .venv/test-installed
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict --clean

.venv/demo-installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet -c constraints.txt -e .
	touch $@

.venv/test-installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet -c constraints.txt torch
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[test,peers]"
	touch $@

clean:
	rm -rf .venv .mypy_cache .ruff_cache site
