# Commands for people and for CI; `make help` lists them. They write to .venv/, .cache/ and build/ only.

PYTHON ?= $(shell for python in python3 python3.13 python3.12 python3.11; do \
	$$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$python && break; done)
HAS_PYTHON = test -n "$(PYTHON)" || \
	{ echo "No Python 3.11 or newer was found. Name one: make PYTHON=/path/to/python3" >&2; exit 1; }
GPU_PYTHON ?= 3.12
GPU_MACHINE ?= x86_64
VENV ?= .venv
REQUIREMENTS ?= constraints.txt
BIN := $(CURDIR)/$(VENV)/bin
PROJECT := {{cookiecutter.project_slug}}
READY := $(VENV)/.ready
BAKE = DDP_TEMPLATE_PYTHON="$(BIN)/python" "$(BIN)/cookiecutter" . --default-config

# Caches must stay out of the project's folder, since cookiecutter copies every file there. Bytecode is not put elsewhere by
# PYTHONPYCACHEPREFIX: pip would compile torch there too, and processes that the tests start without that variable would
# compile it again, each for some 5 seconds.
export RUFF_CACHE_DIR := $(CURDIR)/.cache/ruff
export MYPY_CACHE_DIR := $(CURDIR)/.cache/mypy
export PYTHONDONTWRITEBYTECODE := 1
# torch's threads wait for each other by spinning. Of two processes on two cores, one then takes 150 seconds for what takes 40.
PYTEST = OMP_WAIT_POLICY=PASSIVE "$(BIN)/python" -m pytest -o cache_dir="$(CURDIR)/.cache/pytest"
# `make test WORKERS=0` runs one test after the other, and names each file.
WORKERS ?= 2
SIDE_BY_SIDE = $(PYTEST) -n $(WORKERS) --dist worksteal --durations 15

.DEFAULT_GOAL := help
.PHONY: help demo bake test test-all test-fork fork-size fork-tests test-gpu gpu-wheels test-fast test-cluster campaigns lint size format docs recording charts \
	benchmark benchmark-data gpu-report memory horovod clean

help:  ## list the commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(READY)  ## generate a project, smoke-test it, train it on two CPU ranks and show the accuracy (about 2 minutes)
	rm -rf build/demo
	DDP_TEMPLATE_STRICT=1 $(BAKE) --no-input -o build/demo
	cd build/demo/ddp-experiment && "$(BIN)/python" run.py device_ids=cpu,cpu
	@cd build/demo/ddp-experiment && "$(BIN)/python" -c 'import json; \
	best = json.load(open("runs/baseline/summary.json"))["best"]; \
	print("\nvalidation accuracy {accuracy:.2%} (step {step})".format(**best))'
	@echo 'The project is build/demo/ddp-experiment. To work in it: . "$(BIN)/activate"; cd build/demo/ddp-experiment'

bake: $(READY)  ## answer the questions and generate a project in build/
	$(BAKE) -o build

test: lint size  ## check style, types and size, run the project's own tests and the fast ones (10 minutes on two cores)
	cd "$(PROJECT)" && $(SIDE_BY_SIDE) --ignore=tests/machinery
	$(SIDE_BY_SIDE) -m "not slow"

test-all: $(READY) .cache/docs/.ready  ## run the tests that `make test` leaves out (40 minutes on two cores)
	cd "$(PROJECT)" && $(SIDE_BY_SIDE) tests/machinery
	$(SIDE_BY_SIDE) -m slow

# Its environment lacks what no fork needs: DeepSpeed, Accelerate, trackers, data sets of other libraries.
test-fork:  ## check what a fork breaks: style, types, every answer, links, each example (6 minutes on two busy cores, after an install of 1 to 2)
	$(MAKE) --keep-going VENV=.cache/fork REQUIREMENTS=.cache/fork-requirements.txt lint fork-size fork-tests

fork-size: $(READY)
	PYTHONPATH=tests "$(BIN)/python" tools/size.py --warn

# First what a mistake in one place would break everywhere.
fork-tests: $(READY)
	$(PYTEST) -m fork --tb=short tests/test_repository.py tests/test_docs.py
	$(SIDE_BY_SIDE) -m fork --tb=short --ignore=tests/test_repository.py --ignore=tests/test_docs.py

.cache/fork-requirements.txt: tools/fork_requirements.py pyproject.toml $(PROJECT)/pyproject.toml cookiecutter.json
	@$(HAS_PYTHON)
	mkdir -p .cache
	$(PYTHON) tools/fork_requirements.py >$@.new
	mv $@.new $@

test-gpu:  ## run what only a GPU can show, with PYTHON as it is: its torch must see the GPU (10 minutes)
	@$(HAS_PYTHON)
	@$(PYTHON) tools/gpu_packages.py
	python="$$($(PYTHON) -c 'import sys; print(sys.executable)')" && cd "$(PROJECT)" && \
	"$$python" -m pytest -o cache_dir="$(CURDIR)/.cache/pytest" -m gpu $$(grep -l mark.gpu tests/machinery/test_*.py)

gpu-wheels:  ## download what a GPU machine without a network lacks (for Python GPU_PYTHON=3.12, GPU_MACHINE=x86_64)
	@$(HAS_PYTHON)
	@$(PYTHON) tools/gpu_packages.py $(GPU_PYTHON) $(GPU_MACHINE)

test-fast: lint  ## check style and types, run the template's tests that train nothing (2 minutes)
	$(SIDE_BY_SIDE) -m "not smoke and not slow"

test-cluster: $(READY)  ## train on two hosts (network namespaces) and under SLURM; as root, installs Debian packages (12 minutes)
	tests/cluster/install_packages.sh
	$(PYTEST) tests/cluster

campaigns: $(READY)  ## inject hundreds of faults and write reports to build/campaigns (an hour)
	$(PYTEST) tests/campaigns --long

lint: $(READY)  ## check style and types, strictly in the generated project too
	"$(BIN)/ruff" check --config pyproject.toml .
	"$(BIN)/ruff" format --check .
	"$(BIN)/mypy" hooks tests tools "$(PROJECT)/template_only"
	cd "$(PROJECT)" && "$(BIN)/mypy" --strict --implicit-reexport --exclude "tests/(workload|machinery/faults)/" \
	run.py template_package tests

size: $(READY)  ## bake fresh projects and compare their size with the budget
	PYTHONPATH=tests "$(BIN)/python" tools/size.py

benchmark: .cache/benchmark/.ready  ## compare the trainer's speed with bare loops and other libraries (15 to 45 minutes)
	.cache/benchmark/bin/python benchmarks/run.py

benchmark-data: .cache/benchmark/.ready  ## the same on data sets as people write them (30 minutes)
	.cache/benchmark/bin/python benchmarks/run.py --case " on " --rounds 3 --output RESULTS-DATA.md

gpu-report:  ## measure on a GPU, with $(PYTHON) as it is, and write benchmarks/RESULTS-GPU.md (8 minutes); see benchmarks/README.md
	@$(HAS_PYTHON)
	@$(PYTHON) tools/gpu_packages.py
	$(PYTHON) benchmarks/gpu.py $(ARGS)

memory: $(READY)  ## measure what ranks hold in memory under FSDP and in each phase of a run, and how long saves block (4 minutes)
	"$(BIN)/python" benchmarks/memory.py

.cache/benchmark/.ready: benchmarks/requirements.txt benchmarks/requirements-transformers.txt
	test -x .cache/benchmark/bin/python || $(PYTHON) -m venv .cache/benchmark
	.cache/benchmark/bin/python -m pip install torch==2.13.0
	.cache/benchmark/bin/python -m pip install -r benchmarks/requirements.txt
	.cache/benchmark/bin/python -m pip install --no-deps --target .cache/benchmark/only_transformers -r benchmarks/requirements-transformers.txt
	@touch $@

docs: .cache/docs/.ready  ## build the documentation site, strictly, in build/site
	"$(BIN)/python" tools/reference.py
	NO_MKDOCS_2_WARNING=1 .cache/docs/bin/mkdocs build --strict --quiet

recording: .cache/docs/.ready $(READY)  ## record docs/recording.svg from a real session in /tmp/demo, and screenshots (5 minutes)
	.cache/docs/bin/python tools/recording.py .venv
	.cache/docs/bin/python tools/screenshots.py .venv

charts: .cache/docs/.ready  ## draw docs/charts/ from the reports
	.cache/docs/bin/python tools/charts.py

.cache/docs/.ready: docs/requirements.txt
	test -x .cache/docs/bin/python || $(PYTHON) -m venv .cache/docs
	.cache/docs/bin/python -m pip install --quiet -r docs/requirements.txt
	@touch $@

horovod: .cache/horovod/.ready  ## build Horovod (the first time: 3 to 15 minutes) and run the tests of its strategy
	cd "$(PROJECT)" && "$(CURDIR)/.cache/horovod/bin/python" -m pytest -o cache_dir="$(CURDIR)/.cache/pytest" \
	-k horovod tests/machinery

.cache/horovod/.ready: constraints.txt $(PROJECT)/scripts/install_horovod.sh
	test -x .cache/horovod/bin/python || $(PYTHON) -m venv .cache/horovod
	.cache/horovod/bin/python -m pip install -c constraints.txt torch
	.cache/horovod/bin/python -m pip install --quiet -r constraints.txt
	PYTHON="$(CURDIR)/.cache/horovod/bin/python" "$(PROJECT)/scripts/install_horovod.sh"
	@touch $@

format: $(READY)  ## format all files and fix what ruff can fix
	"$(BIN)/ruff" format .
	"$(BIN)/ruff" check --config pyproject.toml --fix .
	"$(BIN)/ruff" format .

clean:  ## remove .venv, .cache and build, including the projects in build
	rm -rf .venv .cache build

$(READY): constraints.txt $(REQUIREMENTS)
	@$(HAS_PYTHON)
	test -x "$(BIN)/python" || $(PYTHON) -m venv $(VENV)
	"$(BIN)/python" -m pip install -c constraints.txt torch
	"$(BIN)/python" -m pip install --quiet -c constraints.txt -r $(REQUIREMENTS)
	@touch $@
