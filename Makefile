# `make run` shows the main job on real upstream code, `make test` proves everything. Nothing needs to be installed
# by hand but Python 3.10 or newer (with venv and pip), git and make; the rest comes from the package registries.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

.PHONY: run test lint unit e2e proxy bench bench-dumps tree dry-run refresh-check wheel clean

run: $(STAMP)
	$(BIN)/patchctl apply --verl-commit v0.8.0 --source pypi
	$(BIN)/patchctl verify
	$(BIN)/patchctl status

test: lint unit e2e

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/patchctl verify

unit: $(STAMP)
	$(BIN)/python -m pytest -n 2 --dist loadgroup tests --ignore tests/e2e --ignore tests/proxy

# Real engines, the real msprobe, the real runner source; on a CPU.
e2e: $(STAMP)
	$(BIN)/python tests/e2e/run.py

# The chat proxy on real tokenizers, templates and clients, with a scripted engine.
proxy: $(STAMP) build/proxy/.installed
	build/proxy/bin/python -m pytest tests/proxy

build/proxy/.installed: tests/proxy/requirements.txt
	$(PYTHON) -m venv build/proxy
	build/proxy/bin/python -m pip install -q --disable-pip-version-check --no-deps -r $<
	@touch $@

# Medians and ratios against peers in the same run; docs/benchmarks.md has the results.
bench: $(STAMP)
	$(BIN)/python tests/bench/bench_series.py
	$(BIN)/python tests/bench/bench_dispatch_logger.py
	PYTHONPATH=$$($(BIN)/python tests/trees.py verl/v0.8.0) $$($(BIN)/python tests/e2e/setup_env.py) tests/bench/bench_bracket.py

# The dumps' part: needs duckdb for its peer and the end-to-end environment's msprobe.
bench-dumps: $(STAMP)
	$(BIN)/python -m pip install -q --disable-pip-version-check duckdb
	$(BIN)/python tests/bench/bench_pair.py
	$(BIN)/python tests/bench/bench_compare.py --msprobe $$(dirname $$($(BIN)/python tests/e2e/setup_env.py))/msprobe

# Patched trees under build/trees, for reading and for editors.
tree: $(STAMP)
	$(BIN)/python tests/trees.py

# Fetch every pin afresh, apply, verify, revert.
dry-run: $(STAMP)
	$(BIN)/python -m pytest -q tests/test_dry_run.py

refresh-check: $(STAMP)
	$(BIN)/patchctl refresh --check

wheel: $(STAMP)
	$(BIN)/python -m pip wheel -q --no-deps -w dist .

clean:
	rm -rf build dist $(VENV)

$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' \
	  || { echo "$(PYTHON) is older than 3.10; name a newer one: make PYTHON=python3.11 $(MAKECMDGOALS)" >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV) \
	  || { echo "$(PYTHON) can't make a virtual environment; install its venv module (Debian: apt install python3-venv)" >&2; exit 1; }
	$(BIN)/python -m pip install -q --disable-pip-version-check -e '.[dev]'
	@touch $@
