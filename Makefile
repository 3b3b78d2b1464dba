# Everything lives in .venv; `setup` runs again only when pyproject.toml changes.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed
# Threads that wait must not spin: processes share the cores (docs/performance.md).
export OMP_WAIT_POLICY := PASSIVE

.PHONY: setup demo test test-unit test-integration lint clean

setup: $(STAMP)

$(STAMP): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check torch==2.13.0
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	touch $(STAMP)

# The main job on embedded defaults: Stage 1, then asynchronous SEED; e.g. make demo ARGS="--set method=grpo"
demo: $(STAMP)
	$(BIN)/seed-async launch --topology topologies/demo.yaml --overwrite $(ARGS)

test: $(STAMP) lint
	$(BIN)/python -m pytest $(ARGS)

test-unit: $(STAMP)
	$(BIN)/python -m pytest tests/unit $(ARGS)

test-integration: $(STAMP)
	$(BIN)/python -m pytest tests/integration $(ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf .venv build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
