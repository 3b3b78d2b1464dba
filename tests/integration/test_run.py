"""Whole runs with the real processes, a tiny model and a tiny game."""

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import psutil
import pytest

from seed_async.rundir import RunDir
from seed_async.tools.audit import Audit, audit_run
from seed_async.topology_file import load_topology

ROOT = Path(__file__).resolve().parents[2]
TOPOLOGY = ROOT / "tests/integration/boxes.yaml"
RUN_TIMEOUT_S = 240.0

pytestmark = pytest.mark.integration


def launch(run_dir: Path, *sets: str, flags: Iterable[str] = ()) -> "subprocess.Popen[str]":
    overrides = [f"run.dir={run_dir.parent}", f"run.name={run_dir.name}", *sets]
    command = [sys.executable, "-m", "seed_async.cli", "launch", "--topology", str(TOPOLOGY), *flags]
    for override in overrides:
        command += ["--set", override]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def finish(process: "subprocess.Popen[str]") -> str:
    """Wait for the launcher; its output, whatever happens."""
    try:
        return process.communicate(timeout=RUN_TIMEOUT_S)[0]
    except subprocess.TimeoutExpired:
        process.kill()
        raise AssertionError(f"the run did not end in {RUN_TIMEOUT_S} s:\n{process.communicate()[0]}") from None


def roles_of(process: "subprocess.Popen[str]") -> dict[str, psutil.Process]:
    """The role processes of a launcher by name (`actor-0`), which they take as their title."""
    children = psutil.Process(process.pid).children(recursive=True)
    titles = {child: " ".join(child.cmdline()).split() for child in children}
    return {words[1]: child for child, words in titles.items() if words[:1] == ["seed-async"]}


def assert_gone(processes: Iterable[psutil.Process]) -> None:
    alive = psutil.wait_procs(list(processes), timeout=10)[1]
    assert alive == []


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def wait_for_updates(run_dir: Path, updates: int) -> None:
    deadline_s = time.monotonic() + RUN_TIMEOUT_S
    while time.monotonic() < deadline_s:
        if (run_dir / "metrics.jsonl").is_file() and len(lines(run_dir / "metrics.jsonl")) >= updates:
            return
        time.sleep(0.1)
    raise AssertionError(f"no {updates} updates in {RUN_TIMEOUT_S} s")


def assert_counts_add_up(run_dir: Path) -> dict[str, Any]:
    """The accounting balances, and agrees with the record of every single trajectory and with the learner's."""
    counts: dict[str, Any] = json.loads((run_dir / "counts.json").read_text())
    assert counts["balance_ok"], counts
    audit = audit_run(RunDir(run_dir), load_topology(run_dir / "topology.yaml"))
    assert audit.passed and audit.closed, audit.faults
    fates = Counter(line["fate"] for line in lines(run_dir / "trajectories.jsonl"))
    assert fates["trained"] == counts["trained"]
    assert fates["unused"] == counts["buffered"]
    assert sum(fates.values()) == counts["accepted"]
    assert counts["trained"] == sum(line["trajectories"] for line in lines(run_dir / "metrics.jsonl"))
    return counts


def test_a_run_trains_evaluates_accounts_and_leaves_no_process(tmp_path: Path) -> None:
    run_dir = tmp_path / "boxes"
    process = launch(run_dir)
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
    assert metrics[0]["sampler_gap_mean"] < 1e-4
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


def test_a_run_that_ends_by_its_time_limit_books_no_batch_that_was_not_trained(tmp_path: Path) -> None:
    run_dir = tmp_path / "boxes"
    process = launch(run_dir, "run.updates=1000", "run.max_minutes=0.1")
    output = finish(process)
    assert process.returncode == 0, output
    assert_counts_add_up(run_dir)
    updates = len(lines(run_dir / "metrics.jsonl"))
    assert 0 < updates < 1000
    assert lines(run_dir / "evaluations.jsonl")[-1]["version"] == updates


def test_ctrl_c_ends_a_run_cleanly_and_leaves_no_process(tmp_path: Path) -> None:
    run_dir = tmp_path / "boxes"
    process = launch(run_dir, "run.updates=1000")
    wait_for_updates(run_dir, 2)
    roles = roles_of(process)
    os.kill(process.pid, signal.SIGINT)
    output = finish(process)
    assert process.returncode == 130, output
    assert_gone(roles.values())
    assert_counts_add_up(run_dir)
    assert json.loads((run_dir / "summary.json").read_text())["status"] == "interrupted"


def test_a_killed_launcher_takes_every_process_with_it(tmp_path: Path) -> None:
    run_dir = tmp_path / "boxes"
    process = launch(run_dir, "run.updates=1000")
    wait_for_updates(run_dir, 1)
    roles = roles_of(process)
    assert len(roles) == 7
    process.kill()
    process.communicate()
    assert_gone(roles.values())


def assert_went_on(run_dir: Path, updates: int) -> Audit:
    """Every promise was kept, the versions only go up, and the last update was made and scored."""
    audit = audit_run(RunDir(run_dir), load_topology(run_dir / "topology.yaml"))
    assert audit.passed and audit.closed, audit.faults
    versions = [line["version"] for line in lines(run_dir / "metrics.jsonl")]
    assert versions == sorted(set(versions)) and versions[-1] == updates
    assert lines(run_dir / "evaluations.jsonl")[-1]["version"] == updates
    assert json.loads((run_dir / "summary.json").read_text())["status"] == "finished"
    return audit


@pytest.mark.parametrize(("victim", "every"), [("learner-0", 1), ("learner-0", 3), ("buffer-0", 1)])
def test_a_killed_learner_or_buffer_goes_on_from_what_is_on_disk(tmp_path: Path, victim: str, every: int) -> None:
    run_dir = tmp_path / "boxes"
    process = launch(run_dir, "run.updates=14", f"checkpoint.every={every}")
    wait_for_updates(run_dir, 5)
    roles = roles_of(process)
    roles[victim].kill()
    output = finish(process)
    assert process.returncode == 0, output
    audit = assert_went_on(run_dir, 14)
    assert_gone(roles.values())
    if victim == "buffer-0":
        assert audit.counts["reopened"] == 1
    else:
        assert audit.counts["reopened"] == 0
        assert audit.counts["lost_with_a_learner"] <= 16 * every
        assert "going on" in (run_dir / "logs" / "learner-0.log").read_text()


def test_an_interrupted_run_is_resumed_where_it_was_left(tmp_path: Path) -> None:
    run_dir = tmp_path / "boxes"
    process = launch(run_dir, "run.updates=1000")
    wait_for_updates(run_dir, 4)
    os.kill(process.pid, signal.SIGINT)
    finish(process)
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
