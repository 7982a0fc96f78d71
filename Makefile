# lowkv: `make demo` shows all of it, `make test` tests it; each sets up what it needs, and is quick the second time.
.DEFAULT_GOAL := help
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c

RECIPE ?= build/recipes/smollm2.yaml
NAME   := $(notdir $(basename $(RECIPE)))
ENGINE ?= engines/$(NAME)
REPO   ?= repos/$(NAME)
WORKLOAD ?= loadtest/workloads/quick.yaml
# A Python of 3.11 or newer. PyTorch's CPU build and everything else here was tested with 3.11.
PYTHON ?= $(shell for p in python3.11 python3.12 python3; do \
	$$p -c 'import sys, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)

VENV := .venv
BIN  := $(VENV)/bin
# One stamp for the whole environment: touched when it matches pyproject.toml and the tested versions.
READY := $(VENV)/.lowkv-ready
PIP_FLAGS := -qq --disable-pip-version-check

.PHONY: help setup test test-long check format demo bench quality kernel-check engine-check gpu-check build-engine model-repo deploy load-test clean

help: ## List the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-13s %s\n", $$1, $$2}'
	@echo "Variables: RECIPE=$(RECIPE) ENGINE=$(ENGINE) REPO=$(REPO) WORKLOAD=$(WORKLOAD)"

setup: $(READY) ## Install everything into .venv

$(READY): pyproject.toml build/constraints.txt
	@test -x $(BIN)/python || { \
	  test -n "$(PYTHON)" || { echo "no Python of 3.11 or newer found; set PYTHON=/path/to/python3.11" >&2; exit 2; }; \
	  echo "creating $(VENV) with $(PYTHON)"; $(PYTHON) -m venv $(VENV); }
	@echo "installing lowkv and what it needs into $(VENV) (some minutes the first time)"
	@$(BIN)/python -m pip install $(PIP_FLAGS) -c build/constraints.txt -e '.[cpu,tensorrt,triton,loadtest,dev]'
	@touch $@

# TensorRT is native code that can end a process instead of raising, later and elsewhere than where it went wrong: what
# builds with it and what only calls it are each tested in a process of their own.
TENSORRT_TESTS := tests/engine/tensorrt tests/kvattention/tensorrt

test: $(READY) ## Run the tests
	@$(BIN)/python -m pytest $(PYTEST_FLAGS) $(addprefix --ignore=,$(TENSORRT_TESTS))
	@for tests in $(TENSORRT_TESTS); do $(BIN)/python -m pytest $(PYTEST_FLAGS) $$tests; done

test-long: $(READY) ## Run the tests that take minutes each
	@$(BIN)/python -m pytest -m long $(PYTEST_FLAGS)

check: $(READY) ## Formatting, lint, types and tests: what a change must pass
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy
	@$(MAKE) --no-print-directory test

format: $(READY) ## Format the code and mend what lint can mend
	@$(BIN)/ruff check --fix-only .
	@$(BIN)/ruff format .

demo: $(READY) ## Model to report, on a machine without a GPU (reports/demo/report.html)
	@$(BIN)/lowkv demo

bench: $(READY) ## Side-by-side measurements (reports/bench.json)
	@$(BIN)/python benchmarks/run_all.py

quality: $(READY) ## What every KV format costs in quality, on real models (reports/quality.json)
	@$(BIN)/python benchmarks/quality.py --out reports/quality.json

kernel-check: $(READY) ## Every GPU kernel for every GPU generation: shared memory, registers, spills (reports/kernels.json)
	@$(BIN)/python -m kvattention.gpu.check --out reports/kernels.json

engine-check: $(READY) ## TensorRT engines of a real model, built and inspected without a GPU (reports/engines.json)
	@$(BIN)/python benchmarks/engine_check.py --out reports/engines.json

# On a machine with a GPU, with its own Python: PyTorch for CUDA, triton and numpy are enough.
gpu-check: ## Kernels, attention and serving on an NVIDIA GPU (reports/gpu)
	@PYTHONPATH=.:plugins python3 benchmarks/gpu_check.py --out reports/gpu

# `lowkv build` itself sees whether the engine is the recipe's, and leaves it alone then.
build-engine: $(READY) ## Recipe to engine directory
	@$(BIN)/lowkv build $(RECIPE) --out $(ENGINE) --force

model-repo: build-engine ## Engine to Triton model repository
	@$(BIN)/lowkv repo $(ENGINE) --out $(REPO) --force

deploy: model-repo ## Serve the repository on a Triton Inference Server on this machine
	@$(BIN)/lowkv serve $(REPO)

load-test: model-repo ## Load-test the repository on servers of its own
	@$(BIN)/lowkv loadtest $(WORKLOAD) $(REPO) --out reports/$(NAME)

clean: ## Remove what was built (not .venv)
	rm -rf engines repos reports
