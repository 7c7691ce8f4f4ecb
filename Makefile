# The two commands of the README are `make demo` and `make test`. Both set everything up in .venv first.
#   PYTHON    interpreter to make .venv with (3.11 or 3.12)
#   PIP_ARGS  passed to every pip call, for example --index-url or --find-links of a mirror, or of CPU builds of torch

PYTHON ?= python3
PIP_ARGS ?=
VENV := .venv
BIN := $(VENV)/bin

.PHONY: help demo test check lint types imports unit setup setup-dev lock proposer clean

help:
	@sed -n 's/^# help: //p' Makefile

# help: make demo       install what a run needs, then run circle_packing_26 on this machine
demo: setup
	$(BIN)/tttd demo

# help: make test       install what the tests need, then run all of them
test: setup-dev
	$(BIN)/python -m pytest

# help: make unit       the fast tests only
unit: setup-dev
	$(BIN)/python -m pytest -m "not slow"

# help: make check      lint, types, import rules
check: setup-dev lint types imports

lint:
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types:
	$(BIN)/mypy

imports:
	$(BIN)/lint-imports

setup: $(VENV)/app.stamp

setup-dev: $(VENV)/dev.stamp

$(VENV)/bin/python:
	$(PYTHON) -c 'import sys; sys.exit(0 if (3, 11) <= sys.version_info[:2] <= (3, 12) else "tttd needs Python 3.11 or 3.12, this is " + sys.version.split()[0] + ": set PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/app.stamp: requirements/app.txt pyproject.toml | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet $(PIP_ARGS) -r requirements/app.txt
	$(BIN)/python -m pip install --quiet $(PIP_ARGS) hatchling editables
	$(BIN)/python -m pip install --quiet $(PIP_ARGS) --no-deps --no-build-isolation --editable .
	touch $@

$(VENV)/dev.stamp: requirements/dev.txt $(VENV)/app.stamp
	$(BIN)/python -m pip install --quiet $(PIP_ARGS) -r requirements/dev.txt
	touch $@

# help: make proposer   pre-train the demo's proposer again (about fifteen minutes on two cores)
proposer: setup
	$(BIN)/python scripts/proposer/pretrain.py

# help: make lock       resolve the lock files anew (needs uv)
lock:
	sh requirements/lock.sh

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache
