# Every target first sets up .venv from the pinned requirements, once: what runs, then what only tests need.
PYTHON ?= python3
BIN    := .venv/bin
RUN    := .venv/.ready-to-run
TEST   := .venv/.ready-to-test
TRITON := .venv-triton/.ready
AIPERF := .venv-aiperf/.ready
# Bytecode is made of what gets imported, on its first import: compiling all of torch takes minutes.
INSTALL := -m pip install -qq --disable-pip-version-check --no-compile
PIP    := $(BIN)/python $(INSTALL)

.PHONY: demo test bench bench-serving lint clean

demo: $(RUN)
	@$(BIN)/python examples/smollm2/demo.py

bench: $(TEST)
	@$(BIN)/python -m benchmarks.convert
	@$(BIN)/python -m benchmarks.moe
	@$(BIN)/python -m benchmarks.nvfp4
	@$(BIN)/python -m benchmarks.quantize_memory
	@$(BIN)/python -m benchmarks.speculation

bench-serving: $(TEST) $(AIPERF)
	@$(BIN)/python -m benchmarks.serving --aiperf .venv-aiperf/bin/aiperf

# As many processes as cores, each with as many threads: threads that wait must not hold a core that others need.
test: lint $(TRITON)
	@OMP_WAIT_POLICY=PASSIVE $(BIN)/python -m pytest -n auto --dist loadfile

lint: $(TEST)
	@$(BIN)/ruff check
	@$(BIN)/mypy

$(RUN): pyproject.toml requirements.txt requirements-demo.txt requirements-nodeps.txt
	@echo "Setting up .venv (a minute, once) ..."
	@$(PYTHON) -m venv .venv
	@$(PIP) -r requirements-demo.txt
	@$(PIP) --no-deps -r requirements-nodeps.txt -e .
	@touch $@

$(TEST): $(RUN) requirements-dev.txt requirements-quantize.txt
	@echo "Adding what the tests need (torch: a few minutes, once) ..."
	@$(PIP) -r requirements-dev.txt
	@touch $@

# Servers and tools whose requirements do not go together with ours.
$(TRITON) $(AIPERF): .venv-%/.ready: requirements-%.txt
	@echo "Setting up .venv-$* (once) ..."
	@$(PYTHON) -m venv .venv-$*
	@.venv-$*/bin/python $(INSTALL) -r $<
	@touch $@

clean:
	rm -rf .venv .venv-* build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
