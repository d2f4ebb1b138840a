# `make demo` and `make test` do all the set-up; a second run reuses `.venv` and starts at once.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PYTEST_FLAGS ?= -q
# One process for each processor; a test moves to the one that is free.
PARALLEL := -n auto --dist worksteal
EXAMPLES ?= 2000

# What says most about a processor: every kind of kernel, and code for others, which is interpreted.
TARGETS := haswell nehalem
QUICK := not whole_lines and not longer_than and not no_two_tiles
TARGET_TESTS := tests/conformance/test_kernels.py tests/runtime/test_host.py tests/polyhedral/test_transpose.py

.PHONY: demo test test-fast test-long test-targets lint docs

demo: $(VENV)/installed
	$(BIN)/python examples/demo.py

test: $(VENV)/installed
	$(BIN)/python -m pytest $(PARALLEL) $(PYTEST_FLAGS)

# One case of each slow test, or none if a case is slow: `tests/slow_tests.tsv`.
test-fast: $(VENV)/installed
	$(BIN)/python -m pytest $(PARALLEL) --fast $(PYTEST_FLAGS)

# Every case of every test, and the random suites: so many programs each, with new seeds, which are printed.
test-long: $(VENV)/installed
	$(BIN)/python -m pytest $(PARALLEL) --every-case $(PYTEST_FLAGS)
	$(BIN)/python -m tools.fuzz --examples $(EXAMPLES)

# The same with the processor taken for older ones.
test-targets: $(VENV)/installed
	for target in $(TARGETS); do \
	  TC_TARGET=$$target $(BIN)/python -m pytest $(PARALLEL) $(PYTEST_FLAGS) $(TARGET_TESTS) -k "$(QUICK)" || exit 1; \
	done

docs: $(VENV)/installed
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

lint: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

$(VENV)/installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) \
	  || { rm -rf $(VENV); echo "No venv module: install it first (Debian: apt-get install python3-venv)"; exit 1; }
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[test]'
	touch $@
