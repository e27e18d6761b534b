# `make test` needs nothing but a Python: it makes its own environment in .venv, once.
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
JOBS   ?= 2
PYTHON ?= $(shell for python in python3.11 python3; do $$python -c '' 2>/dev/null && echo $$python && break; done)

.DEFAULT_GOAL := help
.PHONY: help test lint format demo bench clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-8s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# torch goes first and exactly pinned, so that a CPU build that is at hand is taken: a range may pull gigabytes.
$(READY): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q torch==2.13.0
	$(BIN)/pip install -q -e '.[test]'
	@touch $@

test: lint ## lint, check the types, run the tests (PYTEST_ARGS="-k halo" for some of them)
	$(BIN)/pytest -q -n $(JOBS) --dist loadfile --no-loadscope-reorder $(PYTEST_ARGS)

lint: $(READY) ## ruff and mypy
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy distfx

format: $(READY) ## let ruff format the code and repair what it can
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

demo: export OMP_NUM_THREADS ?= 1
demo: $(READY) ## a small network on 4 ranks of this machine
	$(BIN)/torchrun --standalone --nproc-per-node 4 examples/demo.py

bench: $(READY) ## time single layers
	$(BIN)/python benchmarks/layers.py

clean: ## remove the environment, caches and build products
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
