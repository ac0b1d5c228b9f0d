# Every target first sets up .venv from the pinned requirements, once.
PYTHON ?= python3
BIN    := .venv/bin
READY  := .venv/.ready
PIP    := $(BIN)/python -m pip install -qq --disable-pip-version-check

.PHONY: demo test bench lint clean

demo: $(READY)
	@$(BIN)/python examples/smollm2/demo.py

bench: $(READY)
	@$(BIN)/python benchmarks/smollm2.py

test: lint
	@$(BIN)/python -m pytest

lint: $(READY)
	@$(BIN)/ruff check
	@$(BIN)/mypy

$(READY): pyproject.toml requirements.txt requirements-dev.txt requirements-nodeps.txt
	@echo "Setting up .venv (a few minutes, once) ..."
	@$(PYTHON) -m venv .venv
	@$(PIP) -r requirements-dev.txt
	@$(PIP) --no-deps -r requirements-nodeps.txt
	@$(PIP) --no-deps -e .
	@touch $@

clean:
	rm -rf .venv build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
