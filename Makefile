# Every target does its own set-up (.ci/setup.py), which is skipped when nothing has changed. GNU make 3.81 or newer.
#
#   ARGS        passed on to what the target runs:      make serve ARGS="-m model.gguf --port 9000"
#   CMAKE_ARGS  how llama.cpp is built:                 make serve CMAKE_ARGS="-DGGML_CUDA=on"
#   PYTHON      the interpreter that creates .venv:     make setup PYTHON=python3.12

PYTHON ?= python3
ARGS ?=

BIN := .venv/bin
CHECKS = set -e; $(BIN)/ruff check .; $(BIN)/ruff format --check .; $(BIN)/mypy; $(BIN)/lint-imports
SIDE_BY_SIDE = -n logical --maxprocesses 4 --dist loadfile --no-loadscope-reorder
define CHECK_AND_TEST
@{ $(CHECKS); } & checks=$$!; \
$(BIN)/python -m pytest $(SIDE_BY_SIDE) $(1) $(ARGS); tests=$$?; \
wait $$checks || { echo "a check failed: make check" >&2; exit 1; }; exit $$tests
endef
SETUP = @command -v $(PYTHON) >/dev/null 2>&1 || { echo "llamaslot setup: $(PYTHON) was not found: install Python 3.11 or newer (https://www.python.org/downloads), or name one: make PYTHON=/path/to/python3" >&2; exit 1; }; $(PYTHON) .ci/setup.py

# Hundreds of processes are started here: each would compile every module that it imports, which takes over a second.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: screenshots flags help serve setup test test-all test-slow check audit bench bench-peers bench-publish eval-demo dist size clean setup-dev setup-bench fuzz setup-fuzz soak test-clients test-remote test-real

help: ## list the targets (the default)
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' Makefile

serve: setup ## serve a model over HTTP; without ARGS, a small one that is downloaded once
	$(BIN)/llamaslot serve $(ARGS)

setup: ## only the set-up: leaves .venv/bin/llamaslot
	$(SETUP)

test: setup-dev ## the checks and, beside them, the tests that are not marked slow: 5 to 6 minutes
	$(call CHECK_AND_TEST,-m "not slow")

test-all: setup-dev ## the checks and all tests: a quarter of an hour
	$(call CHECK_AND_TEST)

test-slow: setup-dev ## all tests, the random ones 20 times as long: hours
	LLAMASLOT_TESTS=long $(BIN)/python -m pytest $(ARGS)

fuzz: setup-fuzz ## 10,000 mutated bodies, files, templates and messages, and schemathesis: a quarter of an hour
	LLAMASLOT_TESTS=long $(BIN)/python -m pytest tests/fuzz tests/processes/test_channel.py $(ARGS)

test-clients: setup ## other projects' clients against a server, each in an environment of its own: ARGS="litellm llm"
	$(BIN)/python .ci/clients.py $(ARGS)

screenshots: setup-dev ## the pictures of the page in README.md; needs chromium
	$(BIN)/python -m tests.browser.screenshots

flags: setup-dev ## docs/flags.md, from the tables of flags; fetches llama.cpp's source
	$(BIN)/python -m tests.app.flags_page

check: setup-dev ## ruff, mypy and the import contracts
	@$(CHECKS)

audit: setup-dev ## known vulnerabilities of the pinned packages; needs the network
	@$(BIN)/python .ci/audit.py

bench: setup-bench ## a chat with and without the cache; other benchmarks: bench/README.md
	$(BIN)/python -m bench $(ARGS)

bench-peers: setup-bench ## compare with llama-server and llama-cpp-python's server
	$(BIN)/python -m bench peers $(ARGS)

bench-publish: setup-bench ## the comparison that is published: two hours on 2 cores, at a clean commit
	$(BIN)/python -m bench publish $(ARGS)

test-remote: setup-dev ## the tests of the remote tier against redis-server, or ARGS="valkey-server"
	LLAMASLOT_TEST_STORE=$(or $(ARGS),redis-server) $(BIN)/python -m pytest -n 0 \
		tests/engine/test_remote_worker.py tests/app/test_remote_tier.py tests/app/test_remote_stores.py \
		tests/app/doctor/test_remote_checks.py

test-real: setup-dev ## the cache on real weights, beside llama-server: 20 to 30 minutes a model; ARGS="-k smollm2" for one model
	$(BIN)/python -m tests.real.models
	LLAMASLOT_TEST_REAL=1 LLAMASLOT_TESTS=long $(BIN)/python -m pytest -n logical --maxprocesses 2 --dist worksteal \
		-o faulthandler_timeout=0 \
		tests/real $(ARGS)

soak: setup-bench ## an hour of mixed requests to one server: does memory grow, does anything get stuck?
	$(BIN)/python -m bench soak $(ARGS)

eval-demo: setup-bench ## test the memory of the embedded model
	$(BIN)/python -m bench.demo.evaluate $(ARGS)

dist: setup-dev ## a wheel and a source distribution in dist/, which need no checkout
	$(BIN)/python -m build --no-isolation $(ARGS)

size: setup-dev ## code lines, modules, functions and comments of the package by folder
	$(BIN)/python -m bench size $(ARGS)

clean: ## remove .venv and everything generated; built wheels stay in the cache (docs/install.md)
	rm -rf .venv .venv-clients build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find llamaslot tests bench .ci -name __pycache__ -type d -prune -exec rm -rf {} +

setup-fuzz:
	$(SETUP) dev fuzz

setup-dev:
	$(SETUP) dev

setup-bench:
	$(SETUP) bench
