# Everything stays in this checkout: the environment in .venv, its stamp inside it. Nothing to install first.
.DEFAULT_GOAL := help
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:

PYTHON ?= python3
TORCH := 2.13.0
BIN := .venv/bin
LIGHT := .venv/.light
STAMP := .venv/.installed
ZOO := .venv/zoo/.installed
SITE := .venv/.site
# Tests that use several processes run alone on the machine.
ALONE := distributed or browser or gpu
# Two test processes on two cores: without this, torch would start two threads in each.
TEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest

.PHONY: help install web browser azurite zoo demo test check lint types contracts quick coverage marked foreign bench docs site build format clean

help:  ## show this list
	@grep -hE '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## (.*)/  make \1\t\2/' | expand -t 20

PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt 'torch==$(TORCH)'

$(LIGHT): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip uninstall --quiet --quiet --yes sonde  # the name of this package before 0.1.0
	$(PIP)
	$(PIP) -e .
	touch $(LIGHT)

$(STAMP): $(LIGHT)
	$(PIP) -e '.[dev]'
	touch $(STAMP)

install: $(STAMP)  ## create .venv with torch, sonde and the tools

web: $(STAMP)  ## rebuild the dashboard's front-end and the CPU kernel if their sources changed
	$(BIN)/python hatch_build.py

browser: $(STAMP)  ## install Chromium and Node for the browser tests, if missing
	scripts/browser.sh $(BIN)/python

azurite: browser  ## install the Azure emulator for the store tests
	$(BIN)/python scripts/azurite/install.py

# Rebuilds the front-end only where `make install` has brought the tools for it.
demo: $(LIGHT) $(if $(wildcard $(STAMP)),web)  ## train a small network with a planted fault, diagnose it and open the dashboard
	$(BIN)/python examples/demo.py

test: $(STAMP)  ## run everything that CI checks, and print how long each part took
	@$(BIN)/python scripts/parts.py $(MAKE) lint types contracts coverage marked

check: lint types contracts quick  ## run ruff, types, import contracts and the quick tests

lint: $(STAMP)  ## run ruff without changing anything
	$(BIN)/ruff check
	$(BIN)/ruff format --check

types: $(STAMP)  ## check types strictly
	$(BIN)/mypy

contracts: $(STAMP)  ## check which room may import which
	$(BIN)/lint-imports --no-logo --no-cache

$(ZOO): tests/foreign/requirements.txt | $(STAMP)
	rm -rf .venv/zoo
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target .venv/zoo -r tests/foreign/requirements.txt
	touch $(ZOO)

zoo: $(ZOO)  ## install torchvision, timm and diffusers for the foreign zoo, separately from the other packages

quick: web  ## run the quick tests; FILE=src/sonde/… runs those closest to one file
ifdef FILE
	tests=$$($(BIN)/python scripts/tests_of.py $(FILE)); $(TEST) -q $$tests
else
	$(TEST) -q -n 2
endif

# Separate from `quick`, which is run many times a day: following every line makes the tests slower.
coverage: export COVERAGE_FILE := .venv/.coverage
coverage: web  ## run the quick tests and measure their line coverage, shown in .venv/coverage/index.html
	$(TEST) -q -n 2 --cov=sonde --cov-report=html:.venv/coverage
	@echo "The quick tests cover $$($(BIN)/coverage report --format=total) % of the lines."

marked: web browser azurite zoo $(SITE)  ## run the slow, fault, distributed, browser and gpu tests; skip what the machine lacks
	$(TEST) -q -n 2 -m "(slow or fault) and not ($(ALONE))"
	$(TEST) -q -m "$(ALONE)"

foreign: web zoo  ## run the whole zoo of foreign models and trainers; writes benchmarks/results/foreign.md
	rm -rf .venv/foreign
	status=0; SONDE_TEST_FOREIGN_RESULTS=$(CURDIR)/.venv/foreign $(TEST) -q -n 2 -m "" tests/foreign || status=$$?; \
	$(BIN)/python tests/foreign/zoo_table.py .venv/foreign > benchmarks/results/foreign.md; exit $$status

bench: $(STAMP)  ## measure the overhead; writes benchmarks/results/
	$(BIN)/python benchmarks/overhead.py

docs: $(STAMP)  ## run every code block of README.md and docs/
	$(TEST) -q tests/test_docs.py -m ""

$(SITE): docs/requirements.txt constraints.txt | $(STAMP)
	$(PIP) -r docs/requirements.txt
	touch $(SITE)

site: $(SITE)  ## build the documentation site into site/, strictly
	$(BIN)/python docs/site.py

build: $(STAMP)  ## build the sdist and the wheel into dist/, and check them
	rm -rf dist
	$(BIN)/python -m build
	$(BIN)/twine check --strict dist/*

format: $(STAMP)  ## fix and format the code with ruff
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

clean:  ## remove everything built, including the environment
	rm -rf web/node_modules src/sonde/show/web/static .venv build dist site .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
