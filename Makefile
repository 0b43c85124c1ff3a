# Two commands do everything: `make demo` trains a swarm on this machine, `make test` runs the tests.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
# Hundreds of processes import the same files: bytecode is kept, whatever the environment says.
PYTEST = PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -m "not soak" --numprocesses $(WORKERS) $(OPTIONS)
# Of tests that wait for nodes one more than there are cores, up to 4.
WORKERS = $(shell $(PYTHON) -c 'import os; print(min(4, 1 + (os.cpu_count() or 1)))')

.PHONY: setup demo test test-quick test-tools check format proto table tables picture screenshots soak gpu fuzz installed release clean

setup: $(READY)

# pip, not a faster resolver: it finds a local build of torch where there is one. It unpacks on one core, so two of them
# take half of the lock each; the third run adds what the lock does not pin: the CUDA libraries, which torch's CUDA build
# pins itself. pip would compile every module, for a minute: only what nodes import is compiled, by importing it.
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile
$(READY): requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "lowcomm needs Python 3.11 or newer, this is " + sys.version.split()[0] + ": run make PYTHON=python3.11 ...")'
	@echo "setting up $(VENV): pip downloads gigabytes, which takes minutes, and is silent meanwhile"
	$(PYTHON) -m venv $(VENV)
	@for half in 0 1; do awk "NR % 2 == $$half" requirements.lock > $(VENV)/half-$$half.txt; done
	printf '%s\n' 0 1 | xargs -P 2 -I {} $(PIP) --no-deps -r $(VENV)/half-{}.txt
	$(PIP) -r requirements.lock
	$(PIP) --no-deps --no-build-isolation -e .
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -c 'import lowcomm_node.cli, lowcomm_node.node.node, lowcomm_node.trainer.loop'
	@touch $(READY)

demo: $(READY)  ## train a swarm of three nodes on this machine and show it
	$(BIN)/lowcomm-node demo

test: $(READY)  ## every test that CI runs; leaves out those that need what this system lacks. OPTIONS=--no-skips: they fail
	@$(PYTHON) tests/net/tools.py || true
	$(PYTEST)

test-quick: $(READY)  ## the tests that start no node: minutes, and nothing but Python is needed
	$(PYTEST) tests/unit

test-tools:  ## what the tests need of the system: installs it with apt-get, as root, where something is missing
	@$(PYTHON) tests/net/tools.py

CHECKS := check-format check-lint check-types check-imports check-dependencies check-tests
.PHONY: $(CHECKS)

check: $(READY)  ## format, lint, types, import rules, dependencies, fast tests, beside each other
	@$(MAKE) --no-print-directory --keep-going --jobs --output-sync=target $(CHECKS)

check-format:
	$(BIN)/ruff format --check --quiet .

check-lint:
	$(BIN)/ruff check --quiet .

check-types:
	$(BIN)/basedpyright

check-imports:
	$(BIN)/lint-imports

check-dependencies:
	$(BIN)/deptry .

check-tests:
	$(BIN)/python -m pytest -m "not soak and not slow" --numprocesses $(WORKERS) tests/unit

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

proto: $(READY)  ## regenerate the committed stubs
	$(BIN)/python -m grpc_tools.protoc -Iprotocol --python_out=protocol --pyi_out=protocol --grpc_python_out=protocol \
		protocol/lowcomm_protocol/messages/exchange.proto

table: $(READY)  ## the table of methods in docs/methods.md: real processes, three seeds
	$(BIN)/python benchmarks/methods.py

tables: $(READY)  ## write the tables in docs/ that come from the code
	$(BIN)/python docs/tables.py

picture: $(READY)  ## draw docs/panel.svg, the panel of a node in a demo, and docs/curve.svg
	$(BIN)/python docs/curve.py
	$(BIN)/python docs/picture.py

screenshots: $(READY)  ## write docs/page-*.png and docs/swarm.png: the pages of a node and of a swarm
	SCREENSHOTS=docs $(BIN)/python -m pytest tests/swarm/test_page_first_screen.py tests/swarm/test_page_of_a_swarm.py

MINUTES ?= 60
soak: $(READY)  ## a swarm of which a node is killed, stopped or started every few seconds
	PYTHONPATH=tests $(BIN)/python tests/chaos/soak.py --minutes $(MINUTES)

gpu: $(READY)  ## on a machine with a GPU: what it makes of a trainer, in less than ten minutes
	$(BIN)/python benchmarks/gpu.py
	$(BIN)/python benchmarks/gpu_nodes.py
	$(BIN)/python -m pytest tests/gpu

SECONDS ?= 600
fuzz: $(READY)  ## every decoder and message handler for SECONDS each, guided by coverage
	$(BIN)/python tests/fuzz/fuzz.py --seconds $(SECONDS)

installed: $(READY)  ## the wheel in an empty environment without a compiler: installs gigabytes, then trains a demo
	$(BIN)/python -m pytest -m soak tests/swarm/test_installed.py

release: $(READY)  ## wheel, sdist and images, built and checked; nothing is uploaded. ARGS=--trial: of what is not ready
	$(BIN)/python docker/release.py $(ARGS)

clean:
	rm -rf $(VENV) build dist out .pytest_cache .ruff_cache .hypothesis
