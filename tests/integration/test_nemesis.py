"""Faults over every role of one run: it goes on, ends in order, and its journals pass the audit."""

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.integration.runs import ROOT, TOPOLOGY, stage1_model

pytestmark = pytest.mark.integration

NUM_FAULTS = 14
SETS = (
    "model.init=null",
    "run.updates=100000",
    "checkpoint.every=1",
    "buffer.lease_timeout_s=8",
    "supervision.hang_timeout_s=5",
    "supervision.max_restarts=1000",
    "supervision.backoff_max_s=1",
)


def test_a_run_survives_faults_in_every_role_and_keeps_every_promise(tmp_path: Path) -> None:
    sets = [*SETS, f"model.path={stage1_model()}", f"run.dir={tmp_path}", "run.name=attacked"]
    command = [
        sys.executable,
        "-m",
        "seed_async.tools.nemesis",
        "--topology",
        str(TOPOLOGY),
        "--pause-s",
        "0.5",
        "--skip",
        "stop",
    ]
    command += ["--faults", str(NUM_FAULTS), "--seed", "7", *(part for item in sets for part in ("--set", item))]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "audit passed" in done.stdout and "journal closed in order" in done.stdout
    record = json.loads((tmp_path / "attacked" / "nemesis.json").read_text())
    results = record["faults"]
    assert len(results) == NUM_FAULTS and record["audit"]["passed"]
    roles = Counter(result["role"] for result in results)
    assert set(roles) == {
        "actor-0", "actor-1", "analyzer-0", "buffer-0", "evaluation-0", "learner-0", "policy-0"
    }  # fmt: skip
    assert not [result for result in results if result["recovered_s"] is None], "whoever was hit works again"
    started_s = [result["time_s"] for result in results]
    assert started_s == sorted(started_s), "one after the other"
