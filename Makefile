# The two commands of the README are `make demo` and `make test`. Both set everything up in .venv first.
#   PYTHON    interpreter to make .venv with (3.11 or 3.12)
#   PIP_ARGS  passed to every pip call, for example --index-url or --find-links of a mirror, or of CPU builds of torch

PYTHON ?= python3
PIP_ARGS ?=
VENV := .venv
BIN := $(VENV)/bin

.PHONY: help demo test check lint types imports unit setup setup-dev lock proposer clean deploy-check deploy-files harbor

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

setup: $(VENV)/app.stamp $(VENV)/programs.stamp

setup-dev: $(VENV)/dev.stamp $(VENV)/programs-dev.stamp

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

# What judged programs import lies apart from what tttd imports (docs/add-a-task.md): for the demo's problem, and for all of them.
$(VENV)/programs.stamp: tasks/circle_packing_26/environment/requirements.txt $(VENV)/app.stamp
	$(BIN)/tttd task build --pip-args='$(PIP_ARGS)' circle_packing_26
	touch $@

$(VENV)/programs-dev.stamp: $(wildcard tasks/*/environment/requirements.txt) $(VENV)/app.stamp
	$(BIN)/tttd task build --pip-args='$(PIP_ARGS)' --all
	touch $@

# help: make harbor     load and lint every task folder with the real Harbor (HARBOR_PYTHON: a Python 3.12)
# Not part of `make check`: Harbor needs Python 3.12 and 119 packages (470 MB, minutes), and is of use only when a task folder changes.
HARBOR_PYTHON ?= python3.12
harbor: setup $(VENV)-harbor/stamp
	$(VENV)-harbor/bin/python scripts/check_harbor.py

$(VENV)-harbor/stamp: requirements/harbor.txt
	$(HARBOR_PYTHON) -m venv $(VENV)-harbor
	$(VENV)-harbor/bin/python -m pip install --quiet --no-deps --only-binary :all: $(PIP_ARGS) -r requirements/harbor.txt
	touch $@

# help: make proposer   pre-train the demo's proposer again (about fifteen minutes on two cores)
proposer: setup
	$(BIN)/python scripts/proposer/pretrain.py

# help: make lock       resolve the lock files anew (needs uv)
lock:
	sh requirements/lock.sh

# help: make deploy-check  check compose file, Dockerfile, chart, dashboards and rules with the tools of their readers
deploy-check: $(VENV)-deploy/stamp
	$(VENV)-deploy/bin/python deploy/check.py

$(VENV)-deploy/stamp: requirements/deploy.txt
	$(PYTHON) -m venv $(VENV)-deploy
	$(VENV)-deploy/bin/python -m pip install --quiet --no-deps --only-binary :all: $(PIP_ARGS) -r requirements/deploy.txt
	touch $@

# help: make deploy-files  write dashboards and access policies anew, from scripts/dashboards.py and workers/rights.py
deploy-files: setup
	$(BIN)/python -m scripts.dashboards deploy/grafana/dashboards deploy/helm/tttd/dashboards
	$(BIN)/python -m scripts.access_policies --bucket tttd --output deploy/policies --seaweedfs deploy/seaweedfs/identities.json.in

clean:
	rm -rf $(VENV) $(VENV)-deploy $(VENV)-harbor .mypy_cache .ruff_cache .pytest_cache
