"""The bound by masking, through the real processes; the others are the default and a unit test's."""

from pathlib import Path

import pytest

from seed_async.rundir import RunDir
from seed_async.tools.audit import audit_run
from seed_async.topology_file import load_topology
from tests.integration.runs import assert_counts_add_up, finish, launch, lines

pytestmark = pytest.mark.integration


def test_a_run_that_masks_drops_nothing_for_its_age_and_keeps_the_bound(tmp_path: Path) -> None:
    """What the buffer masks is what the learner leaves out, token by token: the audit compares both journals."""
    run_dir = tmp_path / "boxes"
    sets = ["staleness.on_stale=mask", "run.updates=8", "roles.evaluation=null", "method=grpo"]
    # Few players for large groups: some episodes of a batch are played long before the others.
    sets += ["roles.actors.games_each=3"]
    process = launch(run_dir, *sets)
    output = finish(process)
    assert process.returncode == 0, output
    counts = assert_counts_add_up(run_dir)
    audit = audit_run(RunDir(run_dir), load_topology(run_dir / "topology.yaml"))
    assert counts["dropped"] == {} and max(audit.ages) <= 1
    metrics = lines(run_dir / "metrics.jsonl")
    assert max(line["age_max"] for line in metrics) <= 1
    assert sum(line.get("masked_tokens_stale", 0) for line in metrics) == counts["masked"]["tokens"]
    assert sum(line["response_tokens"] for line in metrics) == sum(audit.tokens_in_loss.values())
