# Two commands that work on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin

.PHONY: demo test lint clean

demo: $(VENV)/installed-demo
	$(BIN)/pwjax demo --out out/demo

test: $(VENV)/installed-test
	$(BIN)/python -m pytest -q

lint: $(VENV)/installed-test
	$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/pyright --pythonpath $(BIN)/python

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/installed-demo: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --editable '.[plot]'
	touch $@

$(VENV)/installed-test: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) out build *.egg-info
