# Two commands on a fresh machine: `make demo` runs the main job, `make test` passes the tests.
# Both make .venv the first time; a second run does not install again.

PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test slow lint clean

demo: .venv/demo-installed
	$(BIN)/vitkit demo

test: .venv/test-installed
	$(BIN)/python -m pytest -n 2 -m "not slow"

slow: .venv/test-installed
	$(BIN)/python -m pytest -n 2 -m slow

lint: .venv/test-installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

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
	rm -rf .venv .mypy_cache .ruff_cache
