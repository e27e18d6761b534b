# Every target needs nothing but Python: the first one that needs it creates an environment in .venv.
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
JOBS   ?= 2
PYTHON ?= $(shell for python in python3.11 python3; do $$python -c '' 2>/dev/null && echo $$python && break; done)
PYTEST := $(BIN)/pytest -q -n $(JOBS)
# Tests of one file share their ranks and their captures, so a worker runs whole files.
BY_FILE := --dist loadfile --no-loadscope-reorder

.DEFAULT_GOAL := help
.PHONY: help check test test-all lint format demo bench clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-9s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# torch is installed first and pinned, so that an available CPU build is used: a range may download gigabytes.
$(READY): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q torch==2.13.0
	$(BIN)/pip install -q -e '.[test]'
	@touch $@

check: lint ## lint, types and the unit tests: under a minute
	$(PYTEST) -m "not ranks" tests/unit

test: lint ## lint, types and all tests but the slow sweeps (PYTEST_ARGS="-k halo" selects)
	$(PYTEST) $(BY_FILE) $(PYTEST_ARGS)

test-all: lint ## lint, types and all tests, including the slow sweeps
	$(PYTEST) $(BY_FILE) -m "" $(PYTEST_ARGS)

lint: $(READY) ## ruff and mypy
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy distfx

format: $(READY) ## format the code with ruff and fix what it can
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

demo: export OMP_NUM_THREADS ?= 1
demo: $(READY) ## train a small network on 4 ranks of this machine
	$(BIN)/torchrun --standalone --nproc-per-node 4 examples/demo.py

bench: $(READY) ## time convolution layers
	$(BIN)/python benchmarks/layers.py

clean: ## remove the environment, caches and build products
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
