# Two commands: `make demo` runs the main job, `make test` passes the tests. Both set everything up in .venv first.
SHELL := /bin/sh
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
LIBRARIES := .venv-integrations
LIBRARY_PIP = $(LIBRARIES)/bin/python -m pip install -q --disable-pip-version-check --no-deps --require-hashes
# uv reads the system's certificates, which a company proxy may need.
export UV_SYSTEM_CERTS ?= 1
export UV_NATIVE_TLS ?= 1
export UV_LINK_MODE ?= copy
# A stack is a dozen processes, and without kept bytecode each compiles a thousand modules before it works: where the
# environment forbids to keep it, as many container images do, that doubled the CPU of every start.
unexport PYTHONDONTWRITEBYTECODE
ARGS ?=
SUITE ?=

.PHONY: setup demo demo-bursting test test-integrations lint docs changelog format lock chaos chaos-copies chaos-instances properties kill-loops bench experiment experiment-pools clean

setup: $(VENV)/.ready

$(VENV)/.ready: requirements.lock requirements-uv.lock pyproject.toml sdk/pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "mizzen needs Python 3.11 or newer: make PYTHON=python3.12" >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@test -x $(BIN)/uv || $(BIN)/python -m pip install -q --disable-pip-version-check --require-hashes -r requirements-uv.lock
	@$(BIN)/uv pip sync -q --python $(BIN)/python --require-hashes requirements.lock
	@$(BIN)/uv pip install -q --python $(BIN)/python --no-deps --no-build-isolation -e sdk -e .
	@echo "compiling the schedulers' inner loops (half a minute, once for each version of them)"
	@$(BIN)/python -m activities.scheduling.precompile
	@touch $@

# What the demo does not use; tests and benches must not wait for it in their midst.
$(VENV)/.compiled: $(VENV)/.ready
	@echo "compiling the placement of tables (under a minute, once for each version of it)"
	@$(BIN)/python -m activities.scheduling.precompile tables
	@touch $@

demo: setup
	@$(BIN)/mizzen demo $(ARGS)

# Three regions, one of them on spot and one on EC2 (moto): pools grow, a zone is taken, gangs move on, nothing is left.
demo-bursting: setup
	@$(BIN)/python -m tests.stack.bursting

# In a fresh clone each of the four workers would compile all test modules, 15 s of CPU each: it is done once, on the core
# that the compilation of the loops leaves free. An error in a test module is reported by the run itself.
$(VENV)/.collected: $(VENV)/.ready
	@$(BIN)/python -m pytest --collect-only -qq >/dev/null 2>&1 || true
	@touch $@

test: setup
	@$(MAKE) -s -j2 $(VENV)/.compiled $(VENV)/.collected
	@$(BIN)/python -m pytest --numprocesses 4 --max-worker-restart 2 --dist loadfile --no-loadscope-reorder $(ARGS)

# The SDK against torch, transformers and lightning, in an environment of its own: they are large. It is installed by
# pip, which also looks where its user has put a build of torch for the CPU alone; else it is the registry's, which on
# Linux needs CUDA's packages.
test-integrations: $(LIBRARIES)/.ready
	@$(LIBRARIES)/bin/python -m pip install -q --disable-pip-version-check --no-deps --no-build-isolation --force-reinstall ./sdk
	@$(LIBRARIES)/bin/python -m pytest -c tests_integrations/pytest.ini --rootdir . tests_integrations $(ARGS)

$(LIBRARIES)/.ready: requirements-integrations.lock requirements-torch-cpu.lock requirements-torch.lock
	@test -x $(LIBRARIES)/bin/python || $(PYTHON) -m venv $(LIBRARIES)
	@echo "installing torch, transformers and lightning (about a minute)"
	@torch=requirements-torch-cpu.lock; \
	$(LIBRARY_PIP) --dry-run -r $$torch >/dev/null 2>&1 || torch=requirements-torch.lock; \
	$(LIBRARY_PIP) -r requirements-integrations.lock -r $$torch
	@touch $@

# Ten seeds of ten minutes of faults on a whole stack, judged from outside (docs/chaos.md).
chaos: setup $(VENV)/.compiled
	@$(BIN)/python -m tests.chaos --seeds 10 $(ARGS)

# Copies and nights, killed at random instants many times over; damaged tables; 500 damaged checkpoints.
chaos-copies: setup $(VENV)/.compiled
	@MIZZEN_CHAOS_ROUNDS=10 $(BIN)/python -m pytest -m chaos tests/objects tests/activities tests/sdk $(ARGS)

# Machines that are launched and ended while workers, Temporal and the provider's answers fail: 200 kills of each kind of
# provider, about twenty minutes.
chaos-instances: setup $(VENV)/.compiled
	@MIZZEN_CHAOS_ROUNDS=10 $(BIN)/python -m pytest -s tests/capacity/test_kills.py $(ARGS)

# The random tests with all of their examples, and reservations on a hundred random queues instead of four.
properties: setup $(VENV)/.compiled
	@MIZZEN_EXAMPLES=1 MIZZEN_RESERVE_ROUNDS=100 $(BIN)/python -m pytest --numprocesses 2 --timeout 3600 tests/decisions \
	  tests/simulation tests/api/test_generated.py tests/activities/test_scheduler_state.py $(ARGS)

# Five trainings (a CNN, a GPT, the Trainers of transformers and Lightning, DDP), each killed 20 times: about five minutes.
kill-loops: $(LIBRARIES)/.ready
	@$(LIBRARIES)/bin/python -m pip install -q --disable-pip-version-check --no-deps --no-build-isolation --force-reinstall ./sdk
	@OMP_NUM_THREADS=1 $(LIBRARIES)/bin/python -W ignore -m tests_integrations.kill_loops $(ARGS)

# All suites, or those of SUITE: names or beginnings of names, comma separated (SUITE=rms-bid,gms). The one of checkpoints
# needs torch.
bench: setup $(VENV)/.compiled $(if $(or $(if $(SUITE),,all),$(findstring ch,$(SUITE))),$(LIBRARIES)/.ready)
	@$(BIN)/python -m bench $(if $(SUITE),--suite '$(SUITE)') $(ARGS)

# Schedulers on real traces (docs/experiments.md): DATA is the folder of the traces, BEFORE another checkout to compare with.
# Hours on two cores; it goes on where it was interrupted.
OUT ?= .experiment
experiment: setup $(VENV)/.compiled
	@test -n '$(DATA)' || { echo "make experiment DATA=FOLDER: the folder with philly.csv and the two files of openb" >&2; exit 2; }
	@$(BIN)/python -m experiments --data '$(DATA)' --out '$(OUT)' $(if $(BEFORE),--before '$(BEFORE)') $(ARGS)

# The same scheduler on a fleet for the peak, and on half of the demand with pools (docs/experiments-pools.md): DATA has the
# folders ml-jobs, spot-availability and prices. Half an hour.
experiment-pools: setup $(VENV)/.compiled
	@test -n '$(DATA)' || { echo "make experiment-pools DATA=FOLDER: with ml-jobs, spot-availability and prices" >&2; exit 2; }
	@$(BIN)/python -m experiments.pools --data '$(DATA)' --out '$(OUT)' $(ARGS)

lint: setup
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check -q .
	@$(BIN)/mypy
	@$(BIN)/lint-imports
	@$(BIN)/pre-commit validate-config
	@$(BIN)/towncrier build --draft --version next >/dev/null
	@$(MAKE) -s docs

# Into site/; a link or an anchor that leads nowhere is an error.
docs: setup
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict 2>&1 | { ! grep -vE '^INFO '; }

# The fragments of changelog.d/ as the section of a release, at the top of CHANGELOG.md: make changelog VERSION=0.2.0
changelog: setup
	@test -n '$(VERSION)' || { echo "make changelog VERSION=0.2.0" >&2; exit 2; }
	@$(BIN)/towncrier build --yes --version '$(VERSION)'

format: setup
	@$(BIN)/ruff check -q --fix .
	@$(BIN)/ruff format -q .

# Writes the locks anew; they name no host.
lock:
	@$(BIN)/uv pip compile -q --universal --python-version 3.11 --generate-hashes --no-emit-index-url --no-emit-find-links --no-header --no-annotate --group dev --extra demo --no-emit-package mizzen --upgrade pyproject.toml -o requirements.lock
	@$(BIN)/python tests_integrations/lock.py $(BIN)/uv
	@printf 'uv\n' | $(BIN)/uv pip compile -q --universal --python-version 3.11 --generate-hashes --no-emit-index-url --no-emit-find-links --no-header --no-annotate - -o requirements-uv.lock

clean:
	rm -rf $(VENV) $(LIBRARIES)
