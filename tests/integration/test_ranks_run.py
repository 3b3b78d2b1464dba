"""A run whose learner is two processes: they train one model, die together, and go on together."""

import signal
from pathlib import Path

import pytest
from safetensors.torch import load_file

from seed_async.learner.checkpoint import newest_checkpoint
from seed_async.learner.export import merge_checkpoint
from tests.integration.runs import (
    assert_gone,
    assert_went_on,
    finish,
    launch,
    lines,
    roles_of,
    stage1_model,
    wait_for_updates,
)

pytestmark = pytest.mark.integration


def test_two_ranks_train_one_model_die_together_and_are_followed_by_one(tmp_path: Path) -> None:
    run_dir = tmp_path / "ranks"
    process = launch(run_dir, "roles.learner.ranks=2", "checkpoint.every=1", "run.updates=5")
    wait_for_updates(run_dir, 2)
    before = roles_of(process)
    before["learner-1"].send_signal(signal.SIGKILL)
    assert_gone([before["learner-0"]])
    output = finish(process)
    assert process.returncode == 0, output
    assert_went_on(run_dir, 5)
    log = (run_dir / "logs" / "launcher.log").read_text()
    assert log.count("learner-0 started") == log.count("learner-1 started") == 2
    # A checkpoint of two ranks is one model, which is what was exported and served in the end.
    found = newest_checkpoint(run_dir / "checkpoints")
    assert found is not None and sorted(path.name for path in (found[0] / "policy").iterdir()) == [
        "shard-00001-model-00001-of-00001.safetensors",
        "shard-00002-model-00001-of-00001.safetensors",
    ]
    assert merge_checkpoint(found[0], stage1_model(), tmp_path / "merged") == found[1].version
    final, merged = (load_file(folder / "model.safetensors") for folder in (run_dir / "final", tmp_path / "merged"))
    assert final.keys() == merged.keys() and all((final[name] == merged[name]).all() for name in final)
    policy = (run_dir / "logs" / "policy-0.log").read_text()
    assert policy.count("canary_gap_nats=") == policy.count("weights loaded") > 1, "all ranks computed the canary"
    # And one rank alone makes the run longer.
    process = launch(run_dir, "checkpoint.every=1", "run.updates=6", flags=["--resume"])
    output = finish(process)
    assert process.returncode == 0, output
    assert_went_on(run_dir, 6)
    assert max(line["sampler_gap_max"] for line in lines(run_dir / "metrics.jsonl") if "sampler_gap_max" in line) < 1e-3
