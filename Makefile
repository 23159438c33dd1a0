# One line each. `make` lists them; the environment is made first and kept as new as uv.lock.
PYTHON ?= python3
RUN := .venv/bin/python
BIN := .venv/bin

.DEFAULT_GOAL := help
.PHONY: help env demo test lint bench cluster-up cluster-down

help: ## list what there is
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 16

env: ## make .venv from uv.lock (all others do this first)
	@$(PYTHON) scripts/bootstrap.py

demo: env ## watch a RolloutReplica paused, given new weights and deleted, on a real Kubernetes
	@$(RUN) -m examples.demo

test: env ## all tiers: unit, wire, engine, verl, cluster (or: make test TIERS="unit wire")
	@$(RUN) tests/run.py $(TIERS)

lint: env ## ruff, mypy, import rules, shape of the tree
	@PATH="$(CURDIR)/$(BIN):$$PATH" scripts/lint

bench: env ## one measurement: make bench NAME=cancel
	@$(RUN) -m benchmarks $(NAME)

cluster-up: env ## start the one-node Kubernetes that demo and tests use
	@$(RUN) -m devcluster up

cluster-down: env ## stop it and remove all that it made
	@$(RUN) -m devcluster down
