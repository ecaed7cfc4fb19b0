# Two commands that work on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV ?= .venv
WORKERS ?= 2
BIN = $(VENV)/bin

.PHONY: demo test lint gpu clean

demo: $(VENV)/installed-demo
	$(BIN)/pwjax demo --out out/demo

test: $(VENV)/installed-test
	$(BIN)/python -m pytest -q -n $(WORKERS) --dist loadfile

lint: $(VENV)/installed-test
	$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/pyright --pythonpath $(BIN)/python

# On a machine with an NVIDIA GPU, in an environment that has JAX for it (PYTHON=python3): all tests with the Triton
# kernels, then the serving scenes with another process holding the rest of the card.
gpu:
	PYTHONPATH=. XLA_PYTHON_CLIENT_PREALLOCATE=false $(PYTHON) -m pytest -q -p no:benchmark -n 8 --dist loadfile
	PYTHONPATH=. $(PYTHON) scripts/check_kernels.py
	test -f out/demo/model/manifest.json || PYTHONPATH=. $(PYTHON) -m pwjax.cli prepare checkpoints/demo-moe out/demo/model
	PYTHONPATH=. $(PYTHON) scripts/reproduce_serving.py out/demo/model --fill-card

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
