# Everything happens in .venv beside this file; nothing else on the machine is touched
# but the data folder of the program itself. Installed again only when pyproject.toml or
# constraints.txt changed.

SHELL := bash
.SHELLFLAGS := -o pipefail -c

PYTHON ?= python3
PYTEST_ARGS ?=
BENCH_ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --constraint constraints.txt
INPUTS := pyproject.toml constraints.txt

export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PIP_ROOT_USER_ACTION := ignore
export PIP_NO_INPUT := 1
export PYTHONUNBUFFERED := 1

.DELETE_ON_ERROR:
.PHONY: help chat test test-screens test-app test-engine test-gptq lint bench soak wheel clean

help:
	@echo 'make chat    install into .venv and open the program'
	@echo 'make test    install with the test tools, then check everything'
	@echo 'make test-gptq  what needs GPTQModel, which is installed beside .venv for it'
	@echo 'make lint    ruff and the import rules only'
	@echo 'make bench   the full benches (minutes)'
	@echo 'make soak    long runs that look for leaks and rare faults'
	@echo 'make wheel   build dist/*.whl'
	@echo 'make clean   remove .venv and what builds and tests left behind'

$(VENV)/.made:
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if v >= (3, 11) else \
	    f"Python 3.11 or newer is needed, this is {v.major}.{v.minor}. Try: make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)
	@touch $@

# torch first and alone: its version is decided by constraints.txt, not by what wants it.
$(VENV)/.app: $(VENV)/.made $(INPUTS)
	$(PIP) torch==2.13.0
	$(PIP) --editable .
	@touch $@

$(VENV)/.test: $(VENV)/.app
	$(PIP) --editable '.[test,bench]'
	@touch $@

chat: $(VENV)/.app
	$(BIN)/mira-chat

# Side by side on two cores, whole lines of all as they come: two halves that compute, and the
# screens, which wait for two thirds of their time. They have a process of their own: beside torch
# and what it compiled, the garbage collector alone stops them for longer than they settle in.
test: lint
	@$(MAKE) --no-print-directory --jobs=3 --keep-going test-screens test-app test-engine

# Some of the engine's tests are with the app's, so that both halves take about as long, and
# all that want the built-in model are in one, which prepares it.
ENGINE_TESTS_BESIDE_APP := tests/gptq tests/simulator tests/families tests/integration/test_builtin.py
APP_TESTS := tests/unit tests/property tests/e2e $(ENGINE_TESTS_BESIDE_APP)
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest

test-screens: $(VENV)/.test
	$(PYTEST) tests/tui $(PYTEST_ARGS) | sed -u 's/^/screens | /'

test-app: $(VENV)/.test
	$(PYTEST) $(APP_TESTS) $(PYTEST_ARGS) | sed -u 's/^/app     | /'

test-engine: $(VENV)/.test
	$(PYTEST) $(addprefix --ignore=,tests/tui $(APP_TESTS)) $(PYTEST_ARGS) | sed -u 's/^/engine  | /'

# Beside the environment, not in it: transformers behaves otherwise where it finds the library,
# and its own wish for a newer torch is left aside.
$(VENV)/.gptq: $(VENV)/.test gptq-requirements.txt
	$(PIP) --no-deps --upgrade --target $(VENV)/gptq --requirement gptq-requirements.txt
	@touch $@

test-gptq: $(VENV)/.gptq
	PYTHONPATH=$(VENV)/gptq OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m gptq tests/gptq $(PYTEST_ARGS)

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

bench: $(VENV)/.test
	@for bench in tests/bench/*.py; do \
	    echo "== $$bench"; $(BIN)/python "$$bench" $(BENCH_ARGS) || exit 1; \
	done

soak: $(VENV)/.test
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m soak --timeout=0 $(PYTEST_ARGS)

wheel: $(VENV)/.made
	rm -rf build
	$(BIN)/python -m pip wheel --no-deps --wheel-dir dist .
	rm -rf build

clean:
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	rm -rf .grimp_cache snapshot_report.html .coverage *.egg-info
	find app assets engine kernels tests -name __pycache__ -type d -prune -exec rm -rf {} +
