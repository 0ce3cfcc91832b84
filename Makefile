# Everything lives in this checkout: the environment in .venv, its stamp inside it. Nothing has to be installed before.
.DEFAULT_GOAL := help
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:

PYTHON ?= python3
TORCH := 2.13.0
BIN := .venv/bin
STAMP := .venv/.installed
ZOO := .venv/zoo/.installed
# Tests that use several processes at once have the machine to themselves.
ALONE := distributed or browser or gpu
# Two test processes on two cores; without this torch would start as many threads in each of them.
TEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest

.PHONY: help install web browser azurite zoo demo test check lint types contracts quick coverage marked foreign bench docs format clean

help:  ## show this list
	@grep -hE '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## (.*)/  make \1\t\2/' | expand -t 20

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch==$(TORCH)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $(STAMP)

install: $(STAMP)  ## make .venv with torch, sonde and the tools

web: $(STAMP)  ## build the dashboard's front-end and the CPU kernel anew when their sources changed
	$(BIN)/python hatch_build.py

browser: $(STAMP)  ## what the browser tests need: a Chromium and a Node, where the machine has none
	scripts/browser.sh $(BIN)/python

azurite: browser  ## what the tests of the Azure store need: its server, into .venv
	$(BIN)/python scripts/azurite/install.py

demo: web  ## train a small network with a planted problem, and look at it
	$(BIN)/python examples/demo.py

test: $(STAMP)  ## everything that is checked on every change, and how long each part took
	@$(BIN)/python scripts/parts.py $(MAKE) lint types contracts coverage marked

check: lint types contracts quick  ## ruff, types, import contracts and the quick tests

lint: $(STAMP)  ## ruff, without changing anything
	$(BIN)/ruff check
	$(BIN)/ruff format --check

types: $(STAMP)  ## strict types
	$(BIN)/mypy

contracts: $(STAMP)  ## which room may import which
	$(BIN)/lint-imports --no-logo --no-cache

$(ZOO): tests/foreign/requirements.txt | $(STAMP)
	rm -rf .venv/zoo
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target .venv/zoo -r tests/foreign/requirements.txt
	touch $(ZOO)

zoo: $(ZOO)  ## install torchvision, timm and diffusers for the foreign zoo, apart from the other packages

quick: web  ## the quick tests; FILE=src/sonde/… for those closest to one file
ifdef FILE
	tests=$$($(BIN)/python scripts/tests_of.py $(FILE)); $(TEST) -q $$tests
else
	$(TEST) -q -n 2
endif

# Apart from `quick`, which is run many times a day: following every line makes the tests slower.
coverage: export COVERAGE_FILE := .venv/.coverage
coverage: web  ## the quick tests, and how many lines they run; .venv/coverage/index.html shows which
	$(TEST) -q -n 2 --cov=sonde --cov-report=html:.venv/coverage
	@echo "The quick tests run $$($(BIN)/coverage report --format=total) % of the lines."

marked: web browser azurite zoo  ## the slow, fault, distributed, browser and gpu tests; what the machine lacks is skipped
	$(TEST) -q -n 2 -m "(slow or fault) and not ($(ALONE))"
	$(TEST) -q -m "$(ALONE)"

foreign: web zoo  ## the whole zoo of foreign models and trainers; writes benchmarks/results/foreign.md
	rm -rf .venv/foreign
	status=0; SONDE_TEST_FOREIGN_RESULTS=$(CURDIR)/.venv/foreign $(TEST) -q -n 2 -m "" tests/foreign || status=$$?; \
	$(BIN)/python tests/foreign/zoo_table.py .venv/foreign > benchmarks/results/foreign.md; exit $$status

bench: $(STAMP)  ## what watching costs; writes benchmarks/results/
	$(BIN)/python benchmarks/overhead.py

docs: $(STAMP)  ## run every code block of README.md and docs/
	$(TEST) -q tests/test_docs.py -m ""

format: $(STAMP)  ## let ruff put the code in order
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

clean:  ## remove what was built, the environment too
	rm -rf web/node_modules src/sonde/show/web/static .venv build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
