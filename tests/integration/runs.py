"""What tests of whole runs share: how to start one, look at its processes, wait for it, and check its accounts."""

import atexit
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import psutil

from seed_async.launcher import stage1_commands
from seed_async.rundir import RunDir
from seed_async.tools.audit import Audit, audit_run
from seed_async.topology_file import load_topology

ROOT = Path(__file__).resolve().parents[2]
TOPOLOGY = ROOT / "tests/integration/boxes.yaml"
RUN_TIMEOUT_S = 240.0


@cache
def stage1_model() -> Path:
    """The model of the topology's Stage 1, made once for all runs; they differ in what comes after."""
    folder = Path(tempfile.mkdtemp(prefix="seed-async-boxes-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    topology = load_topology(TOPOLOGY)
    for command in stage1_commands(topology, RunDir(folder)).values():
        given = [str(TOPOLOGY) if part == str(folder / "topology.yaml") else part for part in command]
        subprocess.run(given, cwd=ROOT, check=True, capture_output=True)
    return folder / "model"


def launch(run_dir: Path, *sets: str, flags: Iterable[str] = (), with_stage1: bool = False) -> "subprocess.Popen[str]":
    """Start a run of the boxes, of the shared model or with a Stage 1 of its own."""
    overrides = [f"run.dir={run_dir.parent}", f"run.name={run_dir.name}"]
    if not with_stage1:
        overrides += ["model.init=null", f"model.path={stage1_model()}"]
    overrides += sets
    command = [sys.executable, "-m", "seed_async.cli", "launch", "--topology", str(TOPOLOGY), *flags]
    for override in overrides:
        command += ["--set", override]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def finish(process: "subprocess.Popen[str]", timeout_s: float = RUN_TIMEOUT_S) -> str:
    """Wait for the launcher; its output, whatever happens."""
    try:
        return process.communicate(timeout=timeout_s)[0]
    except subprocess.TimeoutExpired:
        process.kill()
        raise AssertionError(f"the run did not end in {timeout_s} s:\n{process.communicate()[0]}") from None


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


def assert_went_on(run_dir: Path, updates: int) -> Audit:
    """Every promise was kept, the versions only go up, and the last update was made and scored."""
    audit = audit_run(RunDir(run_dir), load_topology(run_dir / "topology.yaml"))
    assert audit.passed and audit.closed, audit.faults
    versions = [line["version"] for line in lines(run_dir / "metrics.jsonl")]
    assert versions == sorted(set(versions)) and versions[-1] == updates
    assert lines(run_dir / "evaluations.jsonl")[-1]["version"] == updates
    assert json.loads((run_dir / "summary.json").read_text())["status"] == "finished"
    return audit
