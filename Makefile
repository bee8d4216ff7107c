# Each target makes the virtual environment first where it is missing; nothing else is needed but Python 3.10 or newer.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo test check format package clean
demo: $(READY)
	$(BIN)/farflung demo

test: $(READY)
	$(BIN)/python -m pytest -n 2 --dist loadfile

check: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest tests/test_house.py

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Builds the wheel, and installs, runs and uninstalls it far from the checkout.
package: $(READY)
	.ci/package $(BIN)/python

# torch comes first and alone, so that the pinned build is there before anything asks for a range.
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $(READY)

clean:
	rm -rf $(VENV)
