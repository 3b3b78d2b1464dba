"""A run that publishes adapters alone, through the deaths of those who send and apply them."""

import re
import signal
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file

from seed_async.actors.engines.torch_engine import load_model
from seed_async.adapters import adapter_parameters
from seed_async.learner.checkpoint import newest_checkpoint
from seed_async.learner.export import merge_checkpoint
from seed_async.topology import Lora
from seed_async.weights.manifest import layout
from tests.integration.runs import (
    assert_went_on,
    finish,
    launch,
    lines,
    roles_of,
    stage1_model,
    wait_for_updates,
)

pytestmark = pytest.mark.integration
LORA = Lora(rank=4, alpha=8, publish="adapters")


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose learner goes on from a checkpoint of adapters, its policy server anew from the initial model."""
    run_dir = tmp_path_factory.mktemp("runs") / "adapters"
    sets = [f"model.lora.{key}={value}" for key, value in (("rank", 4), ("alpha", 8), ("publish", "adapters"))]
    sets += ["roles.actors.replicas=1", "roles.evaluation.games=4", "optimizer.lr=1.0e-2"]
    process = launch(run_dir, *sets, "run.updates=3", "checkpoint.every=1")
    wait_for_updates(run_dir, 1)
    before = roles_of(process)
    for name in ("learner-0", "policy-0"):
        before[name].send_signal(signal.SIGKILL)
    output = finish(process)
    assert process.returncode == 0, output
    return run_dir


def test_engines_apply_published_adapters_on_the_model_that_the_run_started_from(run_dir: Path) -> None:
    assert_went_on(run_dir, 3)
    served = adapter_parameters(load_model(stage1_model(), lora=LORA))
    _, num_bytes = layout({name: parameter.numpy() for name, parameter in served.items()})
    for name in ("policy-0", "analyzer-0"):
        log = (run_dir / "logs" / f"{name}.log").read_text()
        loaded = [line for line in log.splitlines() if "weights loaded" in line]
        assert len(loaded) >= 3 and all(f"num_bytes={num_bytes}" in line for line in loaded)
        gaps = [float(found) for found in re.findall(r"canary_gap_nats=(\S+)", "\n".join(loaded))]
        assert len(gaps) == len(loaded) and max(gaps) < 1e-5
    sampled = [line["sampler_gap_max"] for line in lines(run_dir / "metrics.jsonl") if "sampler_gap_max" in line]
    assert sampled and max(sampled) < 1e-3


def test_the_final_model_is_the_initial_one_merged_with_the_last_adapters(run_dir: Path, tmp_path: Path) -> None:
    """A plain model, of which the linear layers alone have changed."""
    found = newest_checkpoint(run_dir / "checkpoints")
    assert found is not None and found[1].version == 3
    assert merge_checkpoint(found[0], stage1_model(), tmp_path / "merged", LORA) == 3
    base, final, merged = (
        load_file(folder / "model.safetensors") for folder in (stage1_model(), run_dir / "final", tmp_path / "merged")
    )
    assert base.keys() == final.keys() == merged.keys()
    assert all((final[name] == merged[name]).all() for name in base)
    changed = {name for name in base if not np.array_equal(base[name], final[name])}
    assert {name.rsplit(".", 2)[1] for name in changed} == {
        *("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    }
