# make test   set up once, then lint, types and tests
# make demo   set up once, then the whole pipeline on a small GPT-2 and four local workers
# make gpu    set up once, then what needs a GPU: the tests marked gpu, autopar profile, a training beside plain torch (gpu.json)
# make stacks set up once, then the tests of plans for other softwares, beside these softwares' own parsers (in a folder of their own)
# make lint   ruff and mypy alone
# make setup  the virtual environment alone; done again only when pyproject.toml or constraints.txt change

VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# The first interpreter that is there and new enough. A pyenv shim may exist and still not run, hence the call.
PYTHON ?= $(firstword $(foreach p,python3.11 python3 python3.12 python3.13 python3.14,\
	$(shell $(p) -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && echo $(p))))

.PHONY: setup test lint demo gpu stacks clean

setup: $(STAMP)

# torch goes first and alone, pinned: without it, another package's open range on torch would bring the newest CUDA build.
# What is installed is compiled when it is first imported, and the greater part never is.
$(STAMP): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "autopar needs Python 3.11 or newer; name one with make PYTHON=/path/to/python" >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo 'setting up $(VENV) (once; a minute or two)'
	$(BIN)/python -m pip install -qq --no-compile --disable-pip-version-check --constraint constraints.txt torch
	$(BIN)/python -m pip install -qq --no-compile --disable-pip-version-check --constraint constraints.txt --editable '.[test]'
	@touch $@

lint: $(STAMP)
	$(BIN)/ruff check
	$(BIN)/mypy

# Three files of tests at a time on two cores, since many tests wait for processes, which read compiled sources. What the tests import is
# compiled once, beside lint, which leaves a core: each of the three would do all of it at the same time.
TESTS := env -u PYTHONDONTWRITEBYTECODE $(BIN)/python -m pytest
test: $(STAMP)
	@$(TESTS) --collect-only -qq -n 0 >/dev/null 2>&1 & $(MAKE) --no-print-directory lint; code=$$?; wait; exit $$code
	$(TESTS) -n 3 --dist loadfile --no-loadscope-reorder $(PYTEST_ARGS)

# Without what they train with, and out of the way: what finds deepspeed beside it behaves otherwise.
$(VENV)/stacks: tests/stacks.txt $(STAMP)
	rm -rf $@
	DS_BUILD_OPS=0 $(BIN)/python -m pip install -qq --disable-pip-version-check --no-deps --no-build-isolation --target $@ -r tests/stacks.txt

stacks: $(VENV)/stacks
	PYTHONPATH=$(abspath $(VENV)/stacks) $(BIN)/python -m pytest -n 0 -rs tests/test_stack*.py $(PYTEST_ARGS)

demo: $(STAMP)
	env -u PYTHONDONTWRITEBYTECODE $(BIN)/autopar demo

gpu: $(STAMP)
	$(BIN)/python -m benchmarks gpu $(GPU_ARGS)

clean:
	rm -rf $(VENV) build *.egg-info .mypy_cache .pytest_cache .ruff_cache
