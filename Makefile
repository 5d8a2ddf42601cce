PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

# Bytecode is cached: otherwise every rank would compile its policy, and every command all of benchbox.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: run test test-all perf perf-baseline published site lint docs compat compat-requirements audit-corpus parity peers gpu gpu-bundle

# Measure matrices/fsdp_vs_zero2.yaml on this machine and write its report.
run: $(VENV)/.installed
	$(BIN)/benchbox run matrices/fsdp_vs_zero2.yaml

# All tests in parallel. `make test-all` also runs those marked `exhaustive`, and `make perf` those that compare times, which need
# the machine for themselves: see CONTRIBUTING.md.
test test-all: $(VENV)/.installed-dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --ignore tests/perf --durations 40 $(PARALLEL) $(if $(filter test-all,$@),--exhaustive)
# Files in the order of tests/conftest.py, each on one worker, which sets up its fixtures once. One worker more than cores: tests
# of processes wait for a third of their time.
PARALLEL := --numprocesses $(shell expr $$($(PYTHON) -c 'import os; print(min(3, os.cpu_count()))') + 1) --dist loadfile --no-loadscope-reorder

# Measure the ratios of tests/perf, those that fail once more (tests/support/perf_run.py), and check them against the bounds of the
# tests and the baseline of this machine.
PERF_JSON := build/perf.json
perf: $(VENV)/.installed-dev
	@mkdir -p $(dir $(PERF_JSON))
	$(BIN)/python -m tests.support.perf_run $(PERF_JSON)
	$(BIN)/benchbox check $(PERF_JSON)

# Measure that baseline anew by several runs of the tests, on an idle machine: they give the spread that the check allows. With
# ADD=FILE, a baseline that stays true, its runs are kept beside the new ones: those of one day alone show too little of the spread.
RUNS := 7
perf-baseline: $(VENV)/.installed-dev
	rm -rf build/perf-runs && mkdir -p build/perf-runs
	for run in $$(seq $(RUNS)); do \
		$(BIN)/python -m pytest tests/perf --benchmark-json build/perf-runs/$$run.json || exit 1; \
	done
	$(BIN)/benchbox baseline promote $(ADD) build/perf-runs/*.json

# Style, types, import directions, names and docstrings. mypy takes most of the time, and the others run beside it.
LINTS := lint-types lint-style lint-imports lint-names
.PHONY: $(LINTS)
lint: $(VENV)/.installed-dev
	@$(MAKE) --no-print-directory --jobs 2 --keep-going --output-sync $(LINTS)
lint-types:
	$(BIN)/mypy
lint-style:
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
lint-imports:
	$(BIN)/lint-imports
lint-names:
	$(BIN)/python .ci/lint_names.py

# The unit tests and a cell of three backends at the lowest and the highest versions of all dependencies: see CONTRIBUTING.md.
# ONLY=lowest selects an environment, IF_CHANGED=1 is for CI. The first call installs about 8 GB for each into build/compat.
compat: $(VENV)/.installed-dev
	$(BIN)/python -m tests.compat $(if $(ONLY),--only $(ONLY)) $(if $(IF_CHANGED),--if-changed)

# Write the versions of both environments anew, after a change of pyproject.toml or for new releases.
compat-requirements: $(VENV)/.installed-dev
	$(BIN)/python -m tests.compat --lock

# Audit training scripts of other libraries, each in an environment without benchbox: see docs/auditing.md. ONLY='lightning* ddp'
# selects cases, and RESUME=1 keeps earlier results. The first run installs the libraries into build/audit-corpus.
audit-corpus: $(VENV)/.installed-dev
	$(BIN)/python -m tests.audit_corpus $(foreach name,$(ONLY),--only '$(name)') $(if $(RESUME),--resume)

# Compare the policies with the peers' own code, and write reports/parity/parity.md. The first run installs lerobot into build/parity.
parity: $(VENV)/.installed-dev
	$(BIN)/python -m tests.parity

# Time training steps beside lerobot's own code, and write reports/peers. It needs an idle machine.
peers: $(VENV)/.installed-dev
	$(BIN)/python -m tests.peers

# Measure the published runs again, at the commit that is checked out, and publish them: see reports/measure.py. It needs an idle
# machine for hours, and a repeated call continues; ONLY='backends repeated/1' selects some.
published: $(VENV)/.installed-dev
	$(BIN)/python reports/measure.py $(ONLY)

# Write reports/site: trends of the runs that this repository has published, in all its commits.
site: $(VENV)/.installed-dev
	$(BIN)/benchbox site $(sort $(patsubst %/,%,$(dir $(wildcard reports/*/run.json reports/repeated/*/run.json)))) \
		$(sort $(filter-out %/perf.json,$(wildcard reports/baselines/*/*.json))) --history --out reports/site --title "Measurements of this repository"

# Regenerate docs/architecture.svg and docs/reference.md, and execute docs/python.ipynb anew.
docs: $(VENV)/.installed-dev
	$(BIN)/python docs/generate
	$(BIN)/python docs/generate/notebook.py

# Run tests/gpu and matrices/h200_single.yaml on this machine's NVIDIA GPU: see docs/gpu.md. A repeated call continues; LIMIT=450
# stops after 450 seconds. The wheels of `make gpu-bundle` are used if they are there, beside the packages of $(PYTHON).
GPU_BUNDLE := build/gpu-bundle
GPU_SITE := $(CURDIR)/build/gpu-site
GPU_BATTERY := tests/gpu/battery.py $(if $(LIMIT),--limit-s $(LIMIT))
gpu:
	@test -e /dev/nvidiactl || nvidia-smi -L >/dev/null 2>&1 || { echo "make gpu: this machine has no NVIDIA GPU" >&2; exit 2; }
ifneq ($(wildcard $(GPU_BUNDLE)/*.whl),)
	@$(MAKE) --no-print-directory $(GPU_SITE)/.installed
	PATH=$(GPU_SITE)/bin:$$PATH PYTHONPATH=$(GPU_SITE):$(CURDIR) $(PYTHON) $(GPU_BATTERY)
else
	@$(MAKE) --no-print-directory $(VENV)/.installed-dev
	$(BIN)/python $(GPU_BATTERY)
endif

# Collect wheels for a GPU machine without network, on one with network; GPU_PYTHON=3.12 is the version of that machine's Python.
gpu-bundle: $(VENV)/.installed-dev
	$(BIN)/python tests/gpu/bundle.py --out $(GPU_BUNDLE) $(if $(GPU_PYTHON),--python $(GPU_PYTHON))

# Packages that lie beside those of $(PYTHON): a virtual environment would not see them where $(PYTHON) is in one itself.
$(GPU_SITE)/.installed: $(wildcard $(GPU_BUNDLE)/*.whl)
	rm -rf $(GPU_SITE)
	$(PYTHON) -m pip install --quiet --no-index --no-deps --no-compile --target $(GPU_SITE) $(GPU_BUNDLE)/*.whl
	touch $@

# torch is installed first: an unpinned torch pulls in gigabytes of CUDA packages.
$(VENV)/.torch: constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt torch setuptools wheel
	touch $@

$(VENV)/.installed: $(VENV)/.torch pyproject.toml
	$(BIN)/python -m pip install --quiet -c constraints.txt -e .
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	touch $@
