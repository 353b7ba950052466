# `make train` and `make test` do everything that is needed, from a fresh checkout on.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory
# The one list of environment variables, and the venv's programs on the PATH.
ENV := . scripts/dev/env.sh;
PY := .venv/bin/python

# Folders too, whose time changes when a file in them is removed.
KERNELS := $(shell find kernels -name '*.cpp' -o -name '*.h' -o -type d)
STAMP := .venv/.kernels_stamp

.PHONY: help setup build train train-tf test test-all test-fast test-part test-launch test-emulator lint docs bench bench-net test-gpu bench-gpu figures fuzz sanitize soak clean

help: ## lists these targets
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' Makefile | expand -t 18

setup: ## makes .venv with the frameworks, Open MPI and Horovod (seven minutes the first time, then nothing)
	@scripts/dev/setup.sh

build: setup ## compiles the CPU kernels, and TensorFlow's operations, where they changed
	@$(MAKE) -s $(STAMP)

# The stamp has the time at which the compiler began, so that a file saved while it ran is compiled next time.
$(STAMP): $(KERNELS) setup.py hvd_deepreduce/resources.py constraints.txt requirements.lock
	@echo "kernels: compiling" >&2
	@begun=$$(mktemp $@.XXXXXX); $(ENV) flock .venv/.kernels_lock python setup.py -q build_ext --inplace; mv $$begun $@

# What this needs is a part of set-up: no TensorFlow.
train: ## trains the same model with and without compression, two ranks; ARGS="..." goes to the script
	@scripts/dev/setup.sh torch
	@$(MAKE) -s $(STAMP)
	@$(ENV) python scripts/train/compare.py $(ARGS)

train-tf: build ## the same in Keras; ARGS="..." goes to the script
	@$(ENV) python scripts/train/compare.py --framework tensorflow $(ARGS)

# Every test has a time limit. Three processes run the tests on two processors, since launchers wait a good deal; two of
# them begin with the tests that start launchers (tests/conftest.py).
PYTEST := python -m pytest -q -n 3
# Hypothesis' examples are fewer in the tests of `make test` than in the others (tests/selection.py). Tests start hundreds
# of processes, which would compile the package again and again if Python might not keep what it has compiled.
test test-fast: export HVD_TEST_EXAMPLES = 20
test-all test test-fast test-part test-launch test-emulator: export PYTHONDONTWRITEBYTECODE =
test: lint docs ## ruff, mypy, the site of the documents, and the tests of every change; ARGS="..." goes to pytest
	@$(ENV) $(PYTEST) -m 'not thorough and not elastic' $(ARGS)

test-all: test ## `make test`, and then all other tests; ARGS="..." goes to pytest
	@$(ENV) $(PYTEST) -m 'thorough and not elastic' $(ARGS)
	@$(ENV) python -m pytest -q -m elastic $(ARGS)

test-fast: build ## those of `make test` that start no launcher and run no CUDA kernel; ARGS="..." goes to pytest
	@$(ENV) $(PYTEST) -m 'not launch and not emulator and not thorough' $(ARGS)

test-part: build ## the tests that ARGS selects, as in ARGS="-m launch"
	@$(ENV) $(PYTEST) $(ARGS)

test-launch: build ## the tests that start ranks under mpirun and horovodrun; ARGS="..." goes to pytest
	@$(ENV) python -m pytest -q -m launch $(ARGS)

test-emulator: build ## the tests of the CUDA kernels, in an emulator on the CPU; ARGS="..." goes to pytest
	@$(ENV) $(PYTEST) -m emulator $(ARGS)

docs: build ## the documents as a site in build/site; a broken link is an error
	@$(ENV) NO_MKDOCS_2_WARNING=1 mkdocs build --strict

lint: build ## ruff and mypy
	@$(ENV) ruff check .
	@$(ENV) mypy
	@$(ENV) mypy --explicit-package-bases scripts/bench/bench_gpu.py scripts/dev/test_gpu.py

figures: build ## makes the documents' figures and the JSON behind them (hours); ARGS="NAME ..." some, ARGS=--list
	@$(ENV) python scripts/papers/figures.py $(ARGS)

bench: build ## times the codecs and exchanges; ARGS="..." goes to the script
	@$(ENV) python scripts/bench/bench.py $(ARGS)

bench-net: build ## the exchanges in a emulated network (root, iproute2); ARGS="..." goes to the script
	@$(ENV) python scripts/bench/bench_net.py $(ARGS)

# On a machine without a network, Horovod or MPI: scripts/dev/test_gpu.sh.
test-gpu: build ## the CUDA tests, sanitizers and benchmark on this machine's GPU; ARGS="..." goes to scripts/dev/test_gpu.sh
	@$(ENV) PYTHON=python scripts/dev/test_gpu.sh $(ARGS)
	@$(ENV) PYTHONPATH=$$PWD mpirun -np 2 python tests/adapters/torch_cases.py a_model_on_a_gpu

bench-gpu: build ## times the CUDA operations on this machine's GPU
	@$(ENV) python scripts/bench/bench_gpu.py $(ARGS)

# A second copy of the package, with address and undefined-behaviour checks in its kernels. The fuzzer and the tests
# import that copy. Python leaks by design: no leak check.
SANITIZED := build/sanitized
PACKAGE := $(shell find hvd_deepreduce configs -name '*.py' -o -name '*.yaml')
SANITIZED_ENV := export PYTHONPATH=$$PWD/$(SANITIZED)/lib ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1; \
    export LD_PRELOAD="$$(gcc -print-file-name=libasan.so) $$(gcc -print-file-name=libubsan.so) $$(gcc -print-file-name=libstdc++.so)"; \
    python -P -c 'import hvd_deepreduce as h; assert "$(SANITIZED)" in h.__file__, h.__file__';
SANITIZED_TESTS := $(addprefix tests/,entropy index joint sparsify value \
    test_all_pairs.py test_broken_sections.py test_container.py test_fused.py test_golden.py test_padding.py test_pipeline.py)

$(SANITIZED)/.stamp: $(KERNELS) $(PACKAGE) setup.py setup.cfg tests/fuzz/coverage.c
	@echo "kernels: compiling with sanitizers" >&2
	@rm -rf $(SANITIZED)/lib
	@$(ENV) HVD_DEEPREDUCE_SANITIZE=address,undefined \
	    python setup.py -q build --build-lib $(SANITIZED)/lib
	@gcc -O2 -shared -fPIC -Wall -Werror tests/fuzz/coverage.c -o $(SANITIZED)/coverage.so -ldl
	@touch $@

.PHONY: sanitized
sanitized: build
	@$(MAKE) -s $(SANITIZED)/.stamp

fuzz: sanitized ## feeds broken bytes to all readers, under the sanitizers; SECONDS_EACH=15, or TOTAL_SECONDS=...
	@$(ENV) $(SANITIZED_ENV) python -P tests/fuzz/run.py --jobs $$(nproc) \
	    $(if $(TOTAL_SECONDS),--total-seconds $(TOTAL_SECONDS),--seconds $(or $(SECONDS_EACH),15)) $(ARGS)

sanitize: sanitized ## the codecs' tests, under address and undefined-behaviour checks; ARGS="..." goes to pytest
	@$(ENV) $(SANITIZED_ENV) \
	    pytest -q -n 2 --import-mode=append -m 'not thorough' $(SANITIZED_TESTS) $(ARGS)

soak: build ## an hour of broken input and of jobs with faults (docs/reliability.md); TOTAL_SECONDS=..., ARGS="..."
	@$(ENV) python tests/soak/run.py --total-seconds $(or $(TOTAL_SECONDS),3600) $(ARGS)

clean: ## takes away what was made, .venv too; the built Horovod stays in the user's cache
	rm -rf .venv .venv.lock build dist runs *.egg-info hvd_deepreduce/*.so
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find hvd_deepreduce tests scripts examples -name __pycache__ -prune -exec rm -rf {} + 2>/dev/null || true
