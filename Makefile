# For people and for CI; `make help` lists the commands. All that it makes is in .venv/, .cache/ and build/.

PYTHON ?= $(shell for python in python3 python3.13 python3.12 python3.11; do \
	$$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$python && break; done)
BIN := $(CURDIR)/.venv/bin
PROJECT := {{cookiecutter.project_slug}}
READY := .venv/.ready
BAKE = DDP_TEMPLATE_PYTHON="$(BIN)/python" "$(BIN)/cookiecutter" . --default-config

# No caches in the template: cookiecutter copies all that lies there.
export RUFF_CACHE_DIR := $(CURDIR)/.cache/ruff
export MYPY_CACHE_DIR := $(CURDIR)/.cache/mypy
export PYTHONPYCACHEPREFIX := $(CURDIR)/.cache/pycache
PYTEST = "$(BIN)/python" -m pytest -o cache_dir="$(CURDIR)/.cache/pytest"

.DEFAULT_GOAL := help
.PHONY: help demo bake test test-fast test-project test-template lint format clean benchmark campaigns horovod test-cluster

help:  ## list the commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(READY)  ## generate a project, smoke-test it, train it on two CPU ranks and show the accuracy (about 2 minutes)
	rm -rf build/demo
	DDP_TEMPLATE_STRICT=1 $(BAKE) --no-input -o build/demo
	cd build/demo/ddp-experiment && "$(BIN)/python" run.py device_ids=cpu,cpu
	@cd build/demo/ddp-experiment && "$(BIN)/python" -c 'import json; \
	best = json.load(open("runs/baseline/summary.json"))["best"]; \
	print("\nvalidation accuracy {accuracy:.2%} (step {step})".format(**best))'
	@echo 'The project is build/demo/ddp-experiment. To go on there: . "$(BIN)/activate"; cd build/demo/ddp-experiment'

bake: $(READY)  ## answer the questions and generate a project in build/
	$(BAKE) -o build

test: lint test-project test-template  ## run every check and every test (20 to 30 minutes on two cores, once installed)

test-fast: lint  ## check style and types and run the tests that start no training
	$(PYTEST) -m "not smoke"

test-project: $(READY)  ## run the generated project's tests, in place
	cd "$(PROJECT)" && $(PYTEST)

test-template: $(READY)  ## run the template's own tests
	$(PYTEST)

test-cluster: $(READY)  ## train on two hosts (network namespaces) and under SLURM, as root; installs Debian's packages (6 to 12 minutes)
	tests/cluster/install_packages.sh
	$(PYTEST) tests/cluster

campaigns: $(READY)  ## inject faults by the hundred, with reports in build/campaigns (20 to 40 minutes)
	$(PYTEST) tests/campaigns --long

lint: $(READY)  ## check style and types of the template and, in place, of the generated project
	"$(BIN)/ruff" check .
	"$(BIN)/ruff" format --check .
	"$(BIN)/mypy" hooks tests "$(PROJECT)/template_only"
	cd "$(PROJECT)" && "$(BIN)/mypy" run.py template_package tests

benchmark: .cache/benchmark/.ready  ## measure the trainer against bare loops and other libraries (15 to 45 minutes)
	.cache/benchmark/bin/python benchmarks/run.py

.cache/benchmark/.ready: benchmarks/requirements.txt benchmarks/requirements-transformers.txt
	test -x .cache/benchmark/bin/python || $(PYTHON) -m venv .cache/benchmark
	.cache/benchmark/bin/python -m pip install torch==2.13.0
	.cache/benchmark/bin/python -m pip install -r benchmarks/requirements.txt
	.cache/benchmark/bin/python -m pip install --no-deps --target .cache/benchmark/only_transformers -r benchmarks/requirements-transformers.txt
	@touch $@

horovod: .cache/horovod/.ready  ## build Horovod (once: 3 to 15 minutes) and run the tests of its strategy
	cd "$(PROJECT)" && "$(CURDIR)/.cache/horovod/bin/python" -m pytest -o cache_dir="$(CURDIR)/.cache/pytest" \
	-k horovod tests/test_horovod.py tests/test_strategies.py

.cache/horovod/.ready: constraints.txt $(PROJECT)/scripts/install_horovod.sh
	test -x .cache/horovod/bin/python || $(PYTHON) -m venv .cache/horovod
	.cache/horovod/bin/python -m pip install -c constraints.txt torch
	.cache/horovod/bin/python -m pip install --quiet -r constraints.txt
	PYTHON="$(CURDIR)/.cache/horovod/bin/python" "$(PROJECT)/scripts/install_horovod.sh"
	@touch $@

format: $(READY)  ## put all files into the style that lint checks
	"$(BIN)/ruff" check --fix .
	"$(BIN)/ruff" format .

clean:  ## remove .venv, .cache and build, with the projects in it
	rm -rf .venv .cache build

$(READY): constraints.txt
	@test -n "$(PYTHON)" || { echo "No Python 3.11 or newer found; name one: make PYTHON=/path/to/python3" >&2; exit 1; }
	test -x "$(BIN)/python" || $(PYTHON) -m venv .venv
	"$(BIN)/python" -m pip install -c constraints.txt torch
	"$(BIN)/python" -m pip install --quiet -r constraints.txt
	@touch $@
