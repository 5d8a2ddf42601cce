PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: run test lint
run: $(VENV)/.installed
	$(BIN)/benchbox run matrices/fsdp_vs_zero2.yaml

test: $(VENV)/.installed-dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/unit --numprocesses auto --maxprocesses 4 --dist loadfile
	$(BIN)/python -m pytest --ignore tests/unit

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python .ci/lint_names.py

# torch first: deepspeed's build needs it, and an unpinned torch brings gigabytes of CUDA packages
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
