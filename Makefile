PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: run test lint docs

# Measure matrices/fsdp_vs_zero2.yaml on this machine and write its report.
run: $(VENV)/.installed
	$(BIN)/benchbox run matrices/fsdp_vs_zero2.yaml

# Unit tests run in parallel. Integration tests start process groups of their own and run one after another.
test: $(VENV)/.installed-dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/unit --numprocesses auto --maxprocesses 4 --dist loadfile
	$(BIN)/python -m pytest --ignore tests/unit

# Style, types, import directions, names and docstrings.
lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python .ci/lint_names.py

# Regenerate docs/architecture.svg and docs/reference.md.
docs: $(VENV)/.installed-dev
	$(BIN)/python docs/generate

# torch is installed first: the build of deepspeed needs it, and an unpinned torch pulls in gigabytes of CUDA packages.
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
