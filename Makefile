# `make demo` runs the demo, `make test` the tests. Both first install everything in .venv.
SHELL := /bin/sh
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
LIBRARIES := .venv-integrations
SKYPILOT := .venv-skypilot
DEPLOY := .venv-deploy
LIBRARY_PIP = $(LIBRARIES)/bin/python -m pip install -q --disable-pip-version-check --no-deps --require-hashes
# Lets uv use the system's certificates, which a company proxy may require.
export UV_SYSTEM_CERTS ?= 1
export UV_NATIVE_TLS ?= 1
export UV_LINK_MODE ?= copy
# A stack has a dozen processes. Without cached bytecode each of them compiles a thousand modules, which doubled the CPU
# time of every start. Many container images set this variable.
unexport PYTHONDONTWRITEBYTECODE
ARGS ?=
SUITE ?=

.PHONY: setup demo demo-bursting demo-lending serve-demo serve-demo-faults spot-fleets spot-clock clean-clone test test-all test-failed test-console test-isolation test-slurm test-kubernetes test-integrations test-gpu test-deploy test-container lint docs changelog format lock chaos chaos-copies chaos-instances chaos-slurm chaos-kubernetes properties kill-loops kill-scripts bench size bench-skypilot experiment experiment-gaming experiment-pools experiment-reclaim clean damaged-trees

setup: $(VENV)/.ready

$(VENV)/.ready: requirements.lock requirements-uv.lock pyproject.toml client/pyproject.toml sdk/pyproject.toml research/pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "mizzen needs Python 3.11 or newer: make PYTHON=python3.12" >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@test -x $(BIN)/uv || $(BIN)/python -m pip install -q --disable-pip-version-check --require-hashes -r requirements-uv.lock
	@$(BIN)/uv pip sync -q --python $(BIN)/python --require-hashes requirements.lock
	@$(BIN)/uv pip install -q --python $(BIN)/python --no-deps --no-build-isolation -e sdk -e client -e . -e research
	@echo "compiling the inner loops of the schedulers (half a minute, once for each version)"
	@$(BIN)/python -m activities.scheduling.precompile
	@touch $@

# Loops that the demo does not use. Compiled in advance, so that tests and benchmarks do not wait for the compiler. The
# two parts have few loops in common, so that `make -j2` compiles them in less time.
$(VENV)/.compiled: $(VENV)/.compiled-search $(VENV)/.compiled-exact
	@touch $@

$(VENV)/.compiled-%: $(VENV)/.ready
	@echo "compiling the inner loops of the table placement, part $* (half a minute, once for each version)"
	@$(BIN)/python -m activities.scheduling.precompile $*
	@touch $@

demo: setup
	@$(BIN)/mizzen demo $(ARGS)

# Three regions, one with spot machines and one on EC2 (moto): pools grow, a zone is reclaimed, its gangs move, and no
# machine is left at the end.
demo-bursting: setup
	@$(BIN)/python -m rigs.demos.bursting

# Trainings on lent machines in two buildings, whose owners take them back and lend them again, for about two and a half
# minutes; another number of seconds between two events: ARGS=2. Writes demo-lending/timeline.svg.
demo-lending: setup
	@$(BIN)/python -m rigs.demos.lending $(ARGS)

# A service on simulated spot machines under load for ten minutes, while its machines, its replicas and mizzen's
# processes are killed: python -m rigs.demos.serving SECONDS REQUESTS_PER_S for another length. Writes serve-demo/.
serve-demo: setup
	@$(BIN)/python -m rigs.demos.serving $(ARGS)

# Replicas that answer 500, hang or are slow, an update, and scaling to zero and back, under load: 22 minutes;
# ARGS="SECONDS REQUESTS_PER_S ROUNDS" for another length. Fails if a figure misses its bar.
serve-demo-faults: setup
	@$(BIN)/python -m rigs.demos.serving.faults $(ARGS)

# A service on random fleets of an emulated cloud, a day of each in 20 minutes, against the replay: an hour and 40 minutes.
# ARGS="FLEETS MINUTES FIRST_SEED" for others. Fails if a figure misses its bar (docs/spot.md).
spot-fleets: setup
	@$(BIN)/python -m rigs.spot_fleets $(ARGS)

# The live controller on a simulated clock, on 200 random fleets, against the replay of each: about five minutes of CPU
# time. ARGS="FLEETS FIRST_SEED" for others. Prints each fleet, and fails if a figure misses its bar (docs/spot.md).
spot-clock: setup
	@$(BIN)/python -m rigs.spot_clock $(ARGS)

# In a fresh clone each of the four workers would compile all test modules, 15 s of CPU each. This target compiles them
# once, on the core that the compilation of the loops leaves idle first. The test run reports errors in test modules.
$(VENV)/.collected: $(VENV)/.ready
	@$(BIN)/python -m pytest --collect-only -qq >/dev/null 2>&1 || true
	@touch $@

PYTEST = $(BIN)/python -m pytest --numprocesses 4 --max-worker-restart 2 --dist loadfile --no-loadscope-reorder

# Without the tests marked `long`, with a third of those marked `rotating` (each day another one; TURN=0, 1 or 2 chooses),
# and with few examples of random tests (tests/depth.py).
TURN = $(shell echo $$(($$(date +%s) / 86400 % 3)))
test: setup
	@$(MAKE) -s -j2 $(VENV)/.compiled $(VENV)/.collected
	@MIZZEN_TURN=$(TURN) $(PYTEST) -m "not long" $(ARGS)

# The tests that failed in the last run, one after another. Fails also if the last run has recorded no failure.
test-failed: setup
	@$(BIN)/python -m pytest --last-failed --last-failed-no-failures none -m "not long" $(ARGS)

# Every test with all examples.
test-all: setup
	@$(MAKE) -s -j2 $(VENV)/.compiled $(VENV)/.collected
	@MIZZEN_EXAMPLES=1 $(PYTEST) --timeout 3600 $(ARGS)

# From a clean clone to a workload that a form in the console has submitted, in less than three minutes.
clean-clone: setup
	@$(BIN)/python -m rigs.clean_clone

# The console in a browser: Debian's package chromium.
test-console: setup
	@command -v chromium >/dev/null || { echo "make test-console needs the program chromium (Debian: apt-get install chromium)" >&2; exit 1; }
	@$(BIN)/python -m pytest -n 0 --timeout 900 tests/console $(ARGS)

# The tests of agents and tasks in each mode of isolation, then attacks, gangs and limits on whole stacks in all modes, with
# containers where Docker, its registry and busybox are installed (Debian: docker.io docker-registry busybox-static).
test-isolation: setup
	@failed=; for mode in none user sandbox; do \
	    echo "isolation $$mode"; \
	    MIZZEN_TEST_ISOLATION=$$mode $(PYTEST) -m "not long" tests/agent $(ARGS) || failed="$$failed tests/agent:$$mode"; \
	done; \
	$(PYTEST) tests/isolation $(ARGS) || failed="$$failed tests/isolation"; \
	test -z "$$failed" || { echo "failed:$$failed" >&2; exit 1; }

# Pilot jobs on a real Slurm cluster on loopback: Debian's packages slurm-wlm and munge, as root.
test-slurm: setup $(VENV)/.compiled
	@command -v sbatch >/dev/null || { echo "make test-slurm needs Slurm (Debian: apt-get install slurm-wlm munge)" >&2; exit 1; }
	@$(BIN)/python -m pytest -n 0 -m "slurm and not chaos" tests/slurm tests/capacity/test_conformance.py $(ARGS)

# Pods on a real API server, scheduler and controller manager on loopback, as root. The first run builds them from Debian
# 12's source package, which takes about 8 minutes of CPU time, into MIZZEN_KUBERNETES (~/.cache/mizzen-kubernetes).
test-kubernetes: setup $(VENV)/.compiled
	@sh tests/kubernetes/build-server.sh "$${MIZZEN_KUBERNETES:-$$HOME/.cache/mizzen-kubernetes}"
	@$(BIN)/python -m pytest -n 0 -m "kubernetes and not chaos" tests/kubernetes tests/capacity/test_conformance.py $(ARGS)

# The SDK with torch, transformers and lightning, in a separate environment because they are large. pip installs them:
# it uses a CPU-only build of torch if the user has configured an index that has one, otherwise the registry's build, which
# needs the CUDA packages on Linux.
test-integrations: $(LIBRARIES)/.ready
	@$(LIBRARIES)/bin/python -m pip install -q --disable-pip-version-check --no-deps --no-build-isolation --force-reinstall ./sdk
	@$(LIBRARIES)/bin/python -m tests_integrations.halves tests_integrations $(ARGS)

$(LIBRARIES)/.ready: requirements-integrations.lock requirements-torch-cpu.lock requirements-torch.lock
	@test -x $(LIBRARIES)/bin/python || $(PYTHON) -m venv $(LIBRARIES)
	@echo "installing torch, transformers and lightning (about a minute)"
	@torch=requirements-torch-cpu.lock; \
	$(LIBRARY_PIP) --dry-run -r $$torch >/dev/null 2>&1 || torch=requirements-torch.lock; \
	$(LIBRARY_PIP) -r requirements-integrations.lock -r $$torch
	@touch $@

# What needs a GPU of NVIDIA: copies, kills, NVML and the example torchtitan. GPU_PYTHON has torch for CUDA, pytest,
# pytest-timeout, nvidia-ml-py, accelerate, lightning and transformers; without torchtitan 0.2 its test is skipped.
GPU_PYTHON ?= python3
test-gpu: export CUDA_VISIBLE_DEVICES ?= 0
test-gpu: export PYTHONPATH := $(CURDIR)/sdk:$(CURDIR):$(PYTHONPATH)
# The trainings are forked, and CUDA must not be initialised before.
test-gpu: export PYTORCH_NVML_BASED_CUDA_CHECK := 1
test-gpu:
	@$(GPU_PYTHON) -m pytest -c tests_integrations/pytest.ini --rootdir . $(addprefix tests_integrations/test_, \
	  gpu_copies.py nvml.py torchtitan.py) $(ARGS)
	@$(GPU_PYTHON) -W ignore -m tests_integrations.kill_loops --training gpu

# The Helm chart, the compose file and the expressions of Prometheus, with their own programs in a separate environment.
test-deploy: $(DEPLOY)/.ready
	@$(DEPLOY)/bin/python -m pytest -c tests_deploy/pytest.ini --rootdir . tests_deploy $(ARGS)

$(DEPLOY)/.ready: requirements-deploy.lock | setup
	@test -x $(DEPLOY)/bin/python || $(PYTHON) -m venv $(DEPLOY)
	@$(BIN)/uv pip sync -q --python $(DEPLOY)/bin/python --require-hashes requirements-deploy.lock
	@touch $@

# The image of deploy/Containerfile on a root of debootstrap, built and run by podman; ten minutes, only for root.
test-container: setup
	@MIZZEN_TEST_CONTAINER=1 $(BIN)/python -m pytest -n 0 --timeout 1800 tests/deploy/test_container.py $(ARGS)

# Ten seeds of ten minutes of faults on a whole stack, checked from outside (docs/chaos.md).
chaos: setup $(VENV)/.compiled
	@$(BIN)/python -m tests.chaos --seeds 10 $(ARGS)

# Copies and placement runs killed at random instants; damaged tables; 500 damaged checkpoints.
chaos-copies: setup $(VENV)/.compiled
	@MIZZEN_CHAOS_ROUNDS=10 $(BIN)/python -m pytest -m chaos tests/objects tests/activities tests/sdk $(ARGS)

# 1,000 checkpoint roots that have lost their log, parts or tiers, or have files that are cut, changed or of another run;
# two minutes. `make test` has a seventh of them.
damaged-trees: setup
	@MIZZEN_EXAMPLES=1 $(BIN)/python -m pytest --timeout 3600 -m chaos -k no_damage tests/sdk/test_sdk_lost_records.py $(ARGS)

# Machines are launched and terminated while workers, Temporal and provider requests fail: 200 kills for each kind of
# provider, about twenty minutes.
chaos-instances: setup $(VENV)/.compiled
	@MIZZEN_CHAOS_ROUNDS=10 $(BIN)/python -m pytest -s tests/capacity/test_kills.py $(ARGS)

# Pilots on a real Slurm cluster while agents, pilots, nodes, slurmctld and mizzen's processes are killed, in rounds of 20
# faults of each of eight kinds, and slurmctld is away for five minutes; as root. ARGS="-k 'kills and 7'" is one round.
chaos-slurm: setup $(VENV)/.compiled
	@MIZZEN_CHAOS_ROUNDS=$${MIZZEN_CHAOS_ROUNDS:-10} $(BIN)/python -m pytest -s -n 0 tests/slurm/test_kills.py $(ARGS)

# The same with pods on a real API server, where nodes, the server, scheduler and controller manager fail.
chaos-kubernetes: setup $(VENV)/.compiled
	@sh tests/kubernetes/build-server.sh "$${MIZZEN_KUBERNETES:-$$HOME/.cache/mizzen-kubernetes}"
	@MIZZEN_CHAOS_ROUNDS=$${MIZZEN_CHAOS_ROUNDS:-10} $(BIN)/python -m pytest -s -n 0 tests/kubernetes/test_kills.py $(ARGS)

# The property tests with all of their examples, and reservations on a hundred random queues instead of three.
properties: setup $(VENV)/.compiled
	@MIZZEN_EXAMPLES=1 MIZZEN_RESERVE_ROUNDS=100 MIZZEN_URGENT_ROUNDS=100 $(BIN)/python -m pytest --numprocesses 2 --timeout 3600 tests/decisions \
	  tests/simulation tests/api/test_generated.py tests/activities/test_scheduler_state.py $(ARGS)

# Five trainings (a CNN, a GPT, the Trainers of transformers and Lightning, DDP), each killed 20 times; five minutes.
kill-loops: $(LIBRARIES)/.ready
	@$(LIBRARIES)/bin/python -m pip install -q --disable-pip-version-check --no-deps --no-build-isolation --force-reinstall ./sdk
	@OMP_NUM_THREADS=1 $(LIBRARIES)/bin/python -W ignore -m tests_integrations.kill_loops $(CHOSEN) $(ARGS)

# Short trainings as people write them, in seven frameworks (tests_integrations/exact), each killed 20 times at
# restores, iterators, commits and ends of epochs; twenty minutes. `make test-integrations` runs a tenth, by the day.
kill-scripts: CHOSEN := --training exact
kill-scripts: kill-loops

# Runs all suites, or those in SUITE: comma-separated names or prefixes of names (SUITE=rms-bid,gms). The suite
# `checkpoint` needs torch.
bench: setup $(VENV)/.compiled $(if $(or $(if $(SUITE),,all),$(findstring ch,$(SUITE))),$(LIBRARIES)/.ready)
	@$(BIN)/python -m bench $(if $(SUITE),--suite '$(SUITE)') $(ARGS)

# Lines of Python outside tests by folder and distribution, and those deleted since a commit: make size BASE=COMMIT
size: setup
	@$(BIN)/python -m bench.line_counts $(BASE)

# The balancer against SkyPilot's own, which is installed in a separate environment because it has many dependencies.
bench-skypilot: setup $(SKYPILOT)/.ready
	@$(BIN)/python -m bench.balance_skypilot --python $(SKYPILOT)/bin/python $(ARGS)

$(SKYPILOT)/.ready: requirements-skypilot.lock | setup
	@test -x $(SKYPILOT)/bin/python || $(PYTHON) -m venv $(SKYPILOT)
	@$(BIN)/uv pip sync -q --python $(SKYPILOT)/bin/python --require-hashes requirements-skypilot.lock
	@touch $@

# Compares schedulers and judges each cell (docs/experiments.md). DATA is the folder with the traces; without it, only the
# generated trace is run. An interrupted run resumes.
OUT ?= .experiment
experiment: setup
	@$(BIN)/python -m research.experiments $(if $(DATA),--data '$(DATA)') --out '$(OUT)' $(ARGS)

# What persons gain who try to get ahead of others (docs/gaming.md). DATA is the folder with philly.csv; without it, only
# the generated trace is run. An interrupted run resumes.
experiment-gaming: setup
	@$(BIN)/python -m research.experiments.gaming $(if $(DATA),--data '$(DATA)') --out '$(OUT)' $(ARGS)

# Compares a fleet sized for the peak demand with a smaller fleet plus pools (docs/experiments-pools.md). DATA is the
# folder with ml-jobs, spot-availability and prices. Takes half an hour.
experiment-pools: setup $(VENV)/.compiled
	@test -n '$(DATA)' || { echo "make experiment-pools needs DATA=FOLDER, the folder with ml-jobs, spot-availability and prices" >&2; exit 2; }
	@$(BIN)/python -m research.experiments.pools --data '$(DATA)' --out '$(OUT)' $(ARGS)

# Compares ReclaimNet with other systems (docs/reclaim-experiments.md). DATA is the folder with Grid'5000's failure
# trace; without it, only the drawn campus is run. Takes hours; an interrupted run resumes. SEEDS is their number.
SEEDS ?= 10
experiment-reclaim: setup
	@mkdir -p '$(OUT)'
	@$(BIN)/python -m research.experiments.reclaim.systems --scenario research/experiments/reclaim/scenarios/campus.yaml --out '$(OUT)/campus.jsonl' --seeds $(SEEDS) $(ARGS)
	@test -z '$(DATA)' || $(BIN)/python -m research.experiments.reclaim.systems --scenario research/experiments/reclaim/scenarios/grid5000.yaml --data '$(DATA)' --out '$(OUT)/grid5000.jsonl' --seeds $(SEEDS) $(ARGS)
	@$(BIN)/python -m research.experiments.reclaim.tables campus='$(OUT)/campus.jsonl' $(if $(DATA),grid5000='$(OUT)/grid5000.jsonl')

lint: setup
	@! git grep -nE '^(<{7}|>{7}) ' || { echo "lint: these lines are left of a merge" >&2; exit 1; }
	@! git ls-files -z | xargs -0 ls -l | awk '$$5 > 1000000 { print $$5, $$9 }' | grep . || { echo "lint: these files are larger than 1 MB" >&2; exit 1; }
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check -q .
	@$(BIN)/mypy
	@$(BIN)/lint-imports
	@$(BIN)/pre-commit validate-config
	@$(BIN)/towncrier build --draft --version next >/dev/null 2>&1 || $(BIN)/towncrier build --draft --version next
	@$(MAKE) -s docs

# Into site/; a link or an anchor that leads nowhere is an error.
docs: setup
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict 2>&1 | { ! grep -vE '^INFO '; }

# The fragments of changelog.d/ as the section of a release, at the top of CHANGELOG.md: make changelog VERSION=0.3.0
changelog: setup
	@test -n '$(VERSION)' || { echo "make changelog VERSION=0.3.0" >&2; exit 2; }
	@$(BIN)/towncrier build --yes --version '$(VERSION)'

format: setup
	@$(BIN)/ruff check -q --fix .
	@$(BIN)/ruff format -q .

# Updates the lock files. They contain no index URLs.
lock:
	@$(BIN)/uv pip compile -q --universal --python-version 3.11 --generate-hashes --no-emit-index-url --no-emit-find-links --no-header --no-annotate --group dev --extra demo --no-emit-package mizzen --no-emit-package mizzen-client $(patsubst %,--no-emit-package %,django asgiref sqlparse) --upgrade pyproject.toml -o requirements.lock
	@$(BIN)/python tests_integrations/lock.py $(BIN)/uv
	@printf 'skypilot\nsniffio\n' | $(BIN)/uv pip compile -q --universal --python-version 3.11 --generate-hashes --no-emit-index-url --no-emit-find-links --no-header --no-annotate - -o requirements-skypilot.lock
	@printf 'compose-spec\nhelm-python-sdk\nkubernetes-validate\npromql-parser\npytest\npyyaml\n' | $(BIN)/uv pip compile -q --universal --python-version 3.11 --generate-hashes --no-emit-index-url --no-emit-find-links --no-header --no-annotate - -o requirements-deploy.lock
	@printf 'uv\n' | $(BIN)/uv pip compile -q --universal --python-version 3.11 --generate-hashes --no-emit-index-url --no-emit-find-links --no-header --no-annotate - -o requirements-uv.lock

clean:
	rm -rf $(VENV) $(LIBRARIES) $(SKYPILOT) $(DEPLOY)
