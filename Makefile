# Each target makes the virtual environment first where it is missing; nothing else is needed but Python 3.10 or newer.
# `make demo` installs what the demo needs and no more; the others add the tools for developers.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# Where torch comes from, such as https://download.pytorch.org/whl/cpu on Linux; empty: where all else comes from.
TORCH_INDEX ?=
FROM_INDEX := $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX))
# The torch of `make torch` and `make test-torch`: `torch` is the newest, which on Linux is a CUDA build; torch==2.11 is the oldest.
TORCH ?= torch
TORCH_PYTHON := $(VENV)-$(TORCH)/bin/python
# What depends most on torch's release and build: names inside it, gloo, its store and agent, sharding, compiling; and
# what nobody may miss on any of them: the laws, an everyday loop, a round of each recipe, checkpoints, the launcher.
# Folders and buckets are left out: what goes through them is bytes, which torch has no part in.
TORCH_TESTS := -k "not (test_elastic and (folder or bucket))" --ignore-glob "*/test_object*" tests/base tests/comm tests/process tests/strategy/test_fsdp.py \
	tests/accelerator/test_checkpoint_words.py tests/accelerator/test_sharded_checkpoints.py \
	tests/accelerator/test_equals_one_process.py tests/accelerator/test_outer_recipes.py \
	tests/outer/test_absent_gpu.py tests/outer/test_compile.py tests/outer/test_elastic.py tests/outer/test_laws.py \
	tests/outer/test_on_ranks.py tests/launch/test_checkpoint.py tests/launch/test_run.py
# constraints.txt has an exact version for each package, so that pip decides nothing. Large ones show their progress.
PIP := $(BIN)/python -m pip install --disable-pip-version-check --constraint constraints.txt
# Marks of what `make test` leaves out; pyproject.toml has them.
REST := server or namespace or package or long
TORCH_READY := $(VENV)/.ready-torch
DEMO_READY := $(VENV)/.ready-demo
TEST_READY := $(VENV)/.ready-test
DEV_READY := $(VENV)/.ready-dev
DOCS_READY := $(VENV)/.ready-docs
# Tests start Python a thousand times: without its bytecode each start would compile the sources again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo demo-elastic test test-all test-rest torch test-torch check docs format release clean
demo: $(DEMO_READY)
	$(BIN)/farflung demo

demo-elastic: $(DEMO_READY)
	folder=$$(mktemp -d) && $(BIN)/farflung launch --cpu --elastic 1:3 --replicas 3 --meet file://$$folder/run \
		examples/elastic.py --dies_at 400

# What to run before each commit. More workers than there may be cores: tests wait for processes, peers and time limits.
test: $(TEST_READY)
	$(BIN)/python -m pytest -n 4 --dist worksteal -m "not ($(REST))"

test-all: test test-rest

# What takes longer, starts real servers, or needs network namespaces or other packages; laws with more examples.
test-rest: $(DEV_READY)
	$(BIN)/python -m pytest -n 5 --dist worksteal -m "$(REST) or hypothesis" --hypothesis-profile=large

# An environment with a torch and what its tests need, no more. What is installed already stays. Not compiled: most of
# torch is never imported.
torch:
	@echo "== A virtual environment with $(TORCH) (minutes: gigabytes, unless it is there already)"
	$(PYTHON) -m venv $(VENV)-$(TORCH)
	$(TORCH_PYTHON) -m pip install --disable-pip-version-check --quiet --no-compile $(FROM_INDEX) '$(TORCH)'
	$(TORCH_PYTHON) -m pip install --disable-pip-version-check --quiet --editable '.[test]'

test-torch: torch
	$(TORCH_PYTHON) -m pytest -n 2 --dist worksteal $(TORCH_TESTS)

check: $(DEV_READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest tests/test_house.py

# The site, in site/: open site/index.html. docs/extension.py reads pages as GitHub does.
docs: $(DOCS_READY)
	PYTHONPATH=docs $(BIN)/python -m zensical build --clean --strict

format: $(DEV_READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Builds the last commit's sdist and wheel twice, compares them, and installs, runs and uninstalls the wheel elsewhere.
release: $(DEV_READY)
	TORCH_INDEX='$(TORCH_INDEX)' .ci/release $(BIN)/python

# torch comes first and alone, so that the pinned build is there before anything asks for a range.
$(TORCH_READY): constraints.txt
	@echo "== A virtual environment in $(VENV) (seconds)"
	$(PYTHON) -m venv $(VENV)
	@echo "== torch: 200 MB for CPUs, gigabytes with CUDA (minutes, as fast as your line; README: Set-up)"
	$(PIP) $(FROM_INDEX) torch
	@touch $@

$(DEMO_READY): $(TORCH_READY) pyproject.toml
	@echo "== Farflung and matplotlib: 40 MB (less than a minute)"
	$(PIP) --quiet --editable '.[plot]'
	@touch $@

$(TEST_READY): $(TORCH_READY) pyproject.toml
	@echo "== What the tests of 'make test' need: pytest, Accelerate, obstore, matplotlib, Kubernetes' client: 80 MB (less than a minute)"
	$(PIP) --editable '.[test]'
	@touch $@

$(DEV_READY): $(TEST_READY)
	@echo "== What all tests and checks need: ruff, mypy, transformers, Ray, trackers: 700 MB (two or three minutes)"
	$(PIP) --editable '.[dev]'
	@touch $@

$(DOCS_READY): $(TORCH_READY) pyproject.toml
	@echo "== Tools for the site: zensical, mkdocstrings (seconds)"
	$(PIP) --quiet --editable '.[docs]'
	@touch $@

clean:
	rm -rf $(VENV) $(VENV)-* site .cache
