# Every target does its own set-up: a virtual environment per Python version, from the committed lock files.
#   make serve            fetch the demo model and serve it       PORT=8123 make serve
#   make test             all tests                               PYTHON=python3.12 make test
#   make check            format, lint, types, import contracts, generated code
#   make bench            all tables, the three parts below included; 75 minutes on two cores
#   make bench-serve      the demo model served, one JSON line of figures; minutes
#   make bench-quality    what quantised weights and caches cost in quality, a table and a JSON line
#   make bench-gateway    what the gateway costs, in front of a replica that emits scripted tokens
#   make budgets          what the TPU compiler makes of each deployment's decode steps, written anew (minutes)
#   make peers            tables beside vLLM and llama.cpp (installs them; an hour)
#   make lock / proto     renew the lock files / the generated gRPC code

PYTHON ?= python3
PORT ?= 8000

VERSION := $(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2] if sys.version_info >= (3, 11) else "")')
ifeq ($(VERSION),)
$(error podstream needs Python 3.11 or newer as $(PYTHON); name another one: PYTHON=python3.12 make ...)
endif

VENV := .venv/$(VERSION)
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
LOCK := $(BIN)/uv pip compile pyproject.toml --universal --python-version 3.11 --generate-hashes \
	--no-header --no-annotate --no-emit-index-url --no-emit-find-links --quiet --extra build
PROTO := serving/replica/proto/replica.proto
PROTOC = $(BIN)/python -m grpc_tools.protoc -I. --python_out=$(1) --pyi_out=$(1) --grpc_python_out=$(1) $(PROTO)

# Tests start many processes: what Python compiles for one is there for the next.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: serve chat test test-fast check bench bench-serve bench-quality bench-gateway budgets peers lock proto

serve: $(VENV)/.installed
	@$(BIN)/podstream serve --port $(PORT)

chat: $(VENV)/.installed
	@$(BIN)/podstream chat --url http://127.0.0.1:$(PORT)

# In two processes, shared out by tests/conftest.py.
BOTH = $(BIN)/pytest -n 2 --dist loadscope --no-loadscope-reorder

test: $(VENV)/.installed-dev
	$(BOTH)

test-fast: $(VENV)/.installed-dev
	$(BOTH) -m "not (e2e or slow)"

check: $(VENV)/.installed-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	@rm -rf build/proto && mkdir -p build/proto
	@$(call PROTOC,build/proto)
	@diff -r -x '*.proto' -x '__init__.py' -x '__pycache__' serving/replica/proto build/proto/serving/replica/proto \
		|| { echo "The generated gRPC code differs from $(PROTO): run make proto."; exit 1; }

bench: bench-serve bench-quality bench-gateway peers
	@$(BIN)/python -m tests.bench.schedulers
	@$(BIN)/python -m tests.bench.roofline
	@$(BIN)/python -m tests.bench.roofline --dtype bfloat16

bench-serve: $(VENV)/.installed-dev
	@$(BIN)/python -m tests.bench.serve

bench-quality: $(VENV)/.installed-dev
	@$(BIN)/python -m tests.bench.quality

bench-gateway: $(VENV)/.installed-dev
	@$(BIN)/python -m tests.bench.gateway

budgets: $(VENV)/.installed-dev
	@$(BIN)/python -m tests.tpu_configs.records

peers: $(VENV)/.installed-dev
	@$(BIN)/python -m tests.bench.peers

proto: $(VENV)/.installed-dev
	$(call PROTOC,.)

lock: $(VENV)/.installed-dev
	$(LOCK) --upgrade --output-file requirements.lock
	$(LOCK) --extra dev --extra tracing --extra aot --constraint requirements.lock --output-file requirements-dev.lock

# Wheels are checked against the hashes of the lock; podstream itself is installed in place.
$(VENV)/.installed: requirements.lock pyproject.toml | $(BIN)/python
	@echo "Installing what podstream needs into $(VENV): about 700 MB, a minute or two, once."
	$(PIP) install --require-hashes --requirement requirements.lock
	$(PIP) install --no-deps --no-build-isolation --editable .
	@touch $@

$(VENV)/.installed-dev: requirements-dev.lock pyproject.toml $(VENV)/.installed | $(BIN)/python
	@echo "Installing what the tests and checks need into $(VENV)."
	$(PIP) install --require-hashes --requirement requirements-dev.lock
	@touch $@

$(BIN)/python:
	@$(PYTHON) -m venv $(VENV) || { echo "$(PYTHON) cannot make virtual environments: install its venv module (python3-venv on Debian)."; exit 1; }
