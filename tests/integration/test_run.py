"""Runs from the command line with the real processes: a tiny model on a game of four boxes."""

import json
import os
import re
import signal
from pathlib import Path

import pytest

from tests.integration.runs import (
    assert_counts_add_up,
    assert_gone,
    assert_went_on,
    finish,
    launch,
    lines,
    roles_of,
    wait_for_updates,
)

pytestmark = pytest.mark.integration


def test_a_run_trains_evaluates_accounts_and_leaves_no_process(tmp_path: Path) -> None:
    run_dir = tmp_path / "boxes"
    process = launch(run_dir, with_stage1=True)
    wait_for_updates(run_dir, 1)
    roles = roles_of(process)
    assert sorted(roles) == ["actor-0", "actor-1", "analyzer-0", "buffer-0", "evaluation-0", "learner-0", "policy-0"]
    output = finish(process)
    assert process.returncode == 0, output
    assert_gone(roles.values())
    counts = assert_counts_add_up(run_dir)
    metrics = lines(run_dir / "metrics.jsonl")
    assert [line["version"] for line in metrics] == [1, 2, 3, 4, 5, 6]
    assert max(line["age_max"] for line in metrics) == 1, "the actors ran ahead of the learner, within the bound"
    assert set(counts["ages"]) <= {"0", "1"}
    gaps = [line["sampler_gap_max"] for line in metrics if "sampler_gap_max" in line]
    assert gaps and max(gaps) < 1e-3, "sampler and learner differ by numeric noise, at every version"
    for engine in ("policy-0", "analyzer-0"):
        log = (run_dir / "logs" / f"{engine}.log").read_text()
        assert all(float(gap) < 1e-3 for gap in re.findall(r"canary_gap_nats=(\S+)", log))
        assert log.count("canary_gap_nats=") == log.count("weights loaded") > 0
    assert counts["skills"]["parsed"] > 0
    assert any(line["opd_active_ratio"] > 0 for line in metrics)
    evaluations = lines(run_dir / "evaluations.jsonl")
    assert [evaluations[0]["version"], evaluations[-1]["version"]] == [0, 6]
    for end in (evaluations[0], evaluations[-1]):
        assert end["version_min"] == end["version_max"] == end["version"], "the ends are scored at one version each"
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["success_before"] == evaluations[0]["success"]
    assert summary["success_after"] == evaluations[-1]["success"]
    assert (run_dir / "final" / "model.safetensors").is_file()
    assert list((run_dir / "plots").glob("*.png"))


def test_killed_actors_and_a_killed_policy_server_do_not_stop_the_run(tmp_path: Path) -> None:
    run_dir = tmp_path / "boxes"
    process = launch(run_dir, "run.updates=12", "buffer.lease_timeout_s=5")
    wait_for_updates(run_dir, 2)
    roles = roles_of(process)
    for victim in ("actor-0", "policy-0", "analyzer-0"):
        roles[victim].kill()
    output = finish(process)
    assert process.returncode == 0, output
    counts = assert_counts_add_up(run_dir)
    assert counts["leases"]["returned"] > 0, "the killed actor's leases came back"
    assert len(lines(run_dir / "metrics.jsonl")) == 12
    assert_gone(roles.values())


def test_a_killed_launcher_takes_every_process_with_it(tmp_path: Path) -> None:
    run_dir = tmp_path / "boxes"
    process = launch(run_dir, "run.updates=1000")
    wait_for_updates(run_dir, 1)
    roles = roles_of(process)
    assert len(roles) == 7
    process.kill()
    process.communicate()
    assert_gone(roles.values())


def test_a_killed_buffer_and_a_killed_learner_go_on_from_what_is_on_disk(tmp_path: Path) -> None:
    run_dir = tmp_path / "boxes"
    process = launch(run_dir, "run.updates=16", "checkpoint.every=3")
    wait_for_updates(run_dir, 4)
    roles = roles_of(process)
    roles["buffer-0"].kill()
    wait_for_updates(run_dir, 8)
    roles["learner-0"].kill()
    output = finish(process)
    assert process.returncode == 0, output
    audit = assert_went_on(run_dir, 16)
    assert_gone(roles.values())
    assert audit.counts["reopened"] == 1
    assert audit.counts["lost_with_a_learner"] <= 16 * 3
    assert "going on" in (run_dir / "logs" / "learner-0.log").read_text()


def test_ctrl_c_ends_a_run_in_order_and_it_is_resumed_where_it_was_left(tmp_path: Path) -> None:
    run_dir = tmp_path / "boxes"
    process = launch(run_dir, "run.updates=1000")
    wait_for_updates(run_dir, 4)
    roles = roles_of(process)
    os.kill(process.pid, signal.SIGINT)
    output = finish(process)
    assert process.returncode == 130, output
    assert_gone(roles.values())
    assert_counts_add_up(run_dir)
    first = json.loads((run_dir / "summary.json").read_text())
    assert first["status"] == "interrupted"
    before = lines(run_dir / "metrics.jsonl")
    other = launch(run_dir, "optimizer.lr=0.1", flags=["--resume"])
    assert "different keys: optimizer.lr" in finish(other) and other.returncode == 2
    updates = len(before) + 4
    resumed = launch(run_dir, f"run.updates={updates}", flags=["--resume"])
    output = finish(resumed)
    assert resumed.returncode == 0, output
    assert "stage 1" not in output
    audit = assert_went_on(run_dir, updates)
    assert lines(run_dir / "metrics.jsonl")[: len(before)] == before
    assert audit.counts["lost_with_a_learner"] == 0, "the end of the first part was saved"
    whole = json.loads((run_dir / "summary.json").read_text())
    assert whole["seconds"]["rl"] > first["seconds"]["rl"] + 1, "the time of both parts"
    parsed = [line["skill"] is not None for line in lines(run_dir / "trajectories.jsonl") if line["fate"] == "trained"]
    skills = json.loads((run_dir / "counts.json").read_text())["skills"]
    assert skills["parsed"] >= sum(parsed) > 0, "the analyses of both parts"
