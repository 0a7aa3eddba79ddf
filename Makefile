# make demo: run the main job on the embedded model.   make serve: serve it.   make test: run the tests.
# Each makes its own virtual environment first, and does nothing twice. See constraints.txt for TORCH_INDEX and TORCH.

PYTHON ?= python3
VENV ?= .venv
PROMPT ?=
PORT ?= 8000
TORCH_INDEX ?=
TORCH ?=

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
CONSTRAINTS := $(if $(TORCH),$(VENV)/constraints-without-torch.txt,constraints.txt)
INDEX_FLAG := $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX),)

.DEFAULT_GOAL := help
.PHONY: help demo run serve test lint format clean

help:
	@echo "make demo    generate text with the embedded model, plain against DSpark  (PROMPT='...')"
	@echo "make serve   serve the embedded model to OpenAI clients, with a page for people   (PORT=8000)"
	@echo "make test    run the tests                                                (ARGS='-k name')"
	@echo "make lint    ruff and mypy"
	@echo "make format  let ruff rewrite the sources"
	@echo "make clean   remove the virtual environment and caches"

demo: $(VENV)/.stamp-run
	$(BIN)/dspark generate --compare --temperature 0.6 --max-tokens 160 $(if $(PROMPT),"$(PROMPT)")

run: demo

serve: $(VENV)/.stamp-serve
	$(BIN)/dspark serve --port $(PORT)

test: $(VENV)/.stamp-dev
	$(BIN)/python -m pytest $(ARGS)

lint: $(VENV)/.stamp-dev
	$(BIN)/ruff check src tests
	$(BIN)/ruff format --check src tests
	$(BIN)/mypy

format: $(VENV)/.stamp-dev
	$(BIN)/ruff check --fix src tests
	$(BIN)/ruff format src tests

clean:
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis src/*.egg-info

$(VENV)/.stamp-venv:
	@command -v $(PYTHON) >/dev/null || { echo "error: $(PYTHON) was not found: install Python 3.11 or newer, or name it with PYTHON=..." >&2; exit 2; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "error: dspark needs Python 3.11 or newer and $(PYTHON) is $$($(PYTHON) -V 2>&1): name a newer one with PYTHON=..." >&2; exit 2; }
	@test -x $(BIN)/python && $(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv $(VENV) || { \
	  echo "error: $(PYTHON) could not make a virtual environment: install python3-venv (apt-get install python3-venv)" >&2; exit 2; }
	@touch $@

# torch goes first and alone, so that an unknown place of the CPU build gives a message of its own.
$(VENV)/.stamp-torch: constraints.txt $(VENV)/.stamp-venv
	@grep -v '^torch==' constraints.txt > $(VENV)/constraints-without-torch.txt
	@$(PIP) install --quiet --constraint $(CONSTRAINTS) $(INDEX_FLAG) $(or $(TORCH),torch) || { \
	  echo "error: pip found no CPU build of torch for this Python: give the address of the PyTorch project's CPU wheel index with TORCH_INDEX=..., or take the large default build with TORCH=torch (constraints.txt explains both)" >&2; exit 2; }
	@touch $@

$(VENV)/.stamp-run: pyproject.toml $(VENV)/.stamp-torch
	@$(PIP) install --quiet --constraint $(CONSTRAINTS) --editable .
	@touch $@

$(VENV)/.stamp-serve: pyproject.toml $(VENV)/.stamp-torch
	@$(PIP) install --quiet --constraint $(CONSTRAINTS) --editable '.[serve]'
	@touch $@ $(VENV)/.stamp-run

$(VENV)/.stamp-dev: pyproject.toml $(VENV)/.stamp-torch
	@$(PIP) install --quiet --constraint $(CONSTRAINTS) --editable '.[dev]'
	@touch $@ $(VENV)/.stamp-run $(VENV)/.stamp-serve
