SHELL := /bin/bash
.DEFAULT_GOAL := help
BIN := .venv/bin
# Extra arguments: make test ARGS="-k seccomp -x", make lock ARGS=--upgrade
ARGS ?=

.PHONY: help setup cluster-tools image image-twice demo demo-cluster test test-cluster lint format lock bench clean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-13s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

setup: ## Make this checkout ready: .venv, pinned packages, CRIU (the other targets call it)
	@scripts/setup.sh

cluster-tools: setup ## Build etcd, kube-apiserver and the like, once a machine (test-cluster calls it)
	@scripts/cluster-tools.sh

image: setup ## Build the agent's image without Docker (test-cluster and demo-cluster call it)
	@scripts/image.sh

image-twice: setup ## Build it twice from nothing, and say whether the two are the same (1 to 2 minutes)
	@scripts/image-twice.sh

demo: setup ## Freeze a warm worker and bring it back to life
	@$(BIN)/python scripts/demo.py $(ARGS)

demo-cluster: cluster-tools image ## The same in a real one-node cluster, by DaemonSet and controller
	@PYTHONPATH=. $(BIN)/python scripts/demo_cluster.py $(ARGS)

test: setup ## Run the tests (ARGS="-k word" to choose)
	@$(BIN)/python -m pytest -n 4 -m "not cluster and not bench" $(ARGS)

test-cluster: cluster-tools image ## Run the tests that need a real API server (ARGS as above)
	@$(BIN)/python -m pytest -m cluster tests/cluster $(ARGS)

lint: setup ## Check style, types and import contracts
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports

format: setup ## Lay out the code and fix what can be fixed
	@$(BIN)/ruff check --fix-only --quiet .
	@$(BIN)/ruff format .

# setuptools is pinned too: it builds the editable install.
# Without setup where uv is there: setup refuses a pyproject.toml that asks for more than is pinned.
lock: ## Pin every dependency again (ARGS=--upgrade for newer versions)
	@test -x $(BIN)/uv || scripts/setup.sh
	@$(BIN)/python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["build-system"]["requires"], sep="\n")' \
	| $(BIN)/uv pip compile --quiet --universal --python-version 3.11 --fork-strategy fewest --extra dev --extra nixl \
	  --generate-hashes --no-emit-index-url --no-emit-find-links \
	  --custom-compile-command "make lock" $(ARGS) \
	  --output-file requirements.lock pyproject.toml - >/dev/null

bench: setup ## Measure against bare criu and the disk (ARGS: see tests/bench)
	@$(BIN)/python -m tests.bench $(ARGS)

clean: ## Remove all that make made here, .venv too
	rm -rf .venv build .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis agent/*.egg-info
	find agent tests scripts -name __pycache__ -prune -exec rm -rf {} +
