# Every target makes its own environment in .venv, once, with what it needs.

PYTHON ?= python3
VENV := .venv
REQUIREMENTS := requirements-dev.txt
INSTALLED := $(VENV)/.installed
# All that is needed is there where everything is.
DEMO := $(or $(wildcard $(INSTALLED)),$(VENV)/.demo)
DOCS := $(or $(wildcard $(INSTALLED)),$(VENV)/.docs)
TORCH := $(shell grep '^torch==' $(REQUIREMENTS))
RUN := $(VENV)/bin/python
PYTEST := $(RUN) -m pytest
IN_PARALLEL := -n auto --dist worksteal
PORT := 8000

# Many tests start processes, which compile every module anew where this is set.
unexport PYTHONDONTWRITEBYTECODE

# Several processes run the tests at once: more threads would wait for each other's cores.
fast test wide soak: export OMP_NUM_THREADS ?= 1

.PHONY: demo style check fast matrix test wide soak gpu bench docs installed clean

demo: $(DEMO)  ## interrupt a training four times; compare it with one that ran through
	$(RUN) examples/demo.py

style: $(INSTALLED)  ## format, lint, types
	$(RUN) -m ruff format --check .
	$(RUN) -m ruff check .
	$(RUN) -m mypy

check: style fast  ## style, fast tests

fast: $(INSTALLED)  ## the tests that take three minutes
	$(PYTEST) -n $$(($$(nproc) + 1)) --dist worksteal \
		-m "not slow and not wide and not gpu and not soak"

matrix:  ## the fast tests on each Python that this machine has, and on the oldest and newest torch
	$(PYTHON) tests/matrix.py

test: $(INSTALLED)  ## what is promised, each in one way at least
	$(PYTEST) $(IN_PARALLEL) -m "not wide and not gpu and not soak"

wide: $(INSTALLED)  ## the same on more engines and in more variants: all else that CI runs
	$(PYTEST) $(IN_PARALLEL) -m "wide and not gpu and not soak"

soak: $(INSTALLED)  ## restarts at random for a long time
	$(PYTEST) -m soak

gpu: $(INSTALLED)  ## the tests that need a GPU
	$(PYTEST) -m gpu

bench: $(INSTALLED)  ## one JSON line a measurement
	@set -e; for script in benchmarks/[a-z]*.py; do $(RUN) $$script; done

docs: $(DOCS)  ## build the site of docs/ and the docstrings, and serve it on this machine
	$(RUN) docs/command_line.py
	$(RUN) docs/pictures/costs.py
	$(RUN) -m sphinx -q -E -W --keep-going -c docs . build/site
	printf '<meta http-equiv="refresh" content="0; url=docs/index.html">\n' >build/site/index.html
	$(RUN) -m http.server --bind 127.0.0.1 --directory build/site $(PORT)

clean:
	rm -rf $(VENV) .matrix .mypy_cache .pytest_cache .ruff_cache .hypothesis build *.egg-info

installed: $(INSTALLED)

$(INSTALLED): WANTED := --requirement $(REQUIREMENTS)
$(VENV)/.demo: WANTED := $(TORCH) --editable .[examples]
$(VENV)/.docs: WANTED := $(TORCH) --editable .[docs]
$(INSTALLED) $(VENV)/.demo $(VENV)/.docs: setup.py $(REQUIREMENTS)
	$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 10) and 'Python 3.10 or later is needed; name one: make PYTHON=python3.12')"
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install $(WANTED)
	touch $@
