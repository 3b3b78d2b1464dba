"""One run through the real processes that masks what is too old, and that its time limit ends."""

from pathlib import Path

import pytest

from seed_async.rundir import RunDir
from seed_async.tools.audit import audit_run
from seed_async.topology_file import load_topology
from tests.integration.runs import assert_counts_add_up, finish, launch, lines

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of the run."""
    run_dir = tmp_path_factory.mktemp("runs") / "boxes"
    # Few players for large groups: some episodes of a batch are played long before the others.
    masking = ("staleness.on_stale=mask", "method=grpo", "roles.actors.games_each=3")
    process = launch(run_dir, "run.updates=1000", "run.max_minutes=0.12", *masking)
    output = finish(process)
    assert process.returncode == 0, output
    return run_dir


def test_a_run_that_masks_drops_nothing_for_its_age_and_keeps_the_bound(ended: Path) -> None:
    """What the buffer masks is what the learner leaves out, token by token: the audit compares both journals."""
    counts = assert_counts_add_up(ended)
    audit = audit_run(RunDir(ended), load_topology(ended / "topology.yaml"))
    assert counts["dropped"] == {} and max(audit.ages) <= 1
    metrics = lines(ended / "metrics.jsonl")
    assert max(line["age_max"] for line in metrics) <= 1
    assert sum(line.get("masked_tokens_stale", 0) for line in metrics) == counts["masked"]["tokens"]
    assert sum(line["response_tokens"] for line in metrics) == sum(audit.tokens_in_loss.values())


def test_a_run_that_ends_by_its_time_limit_books_no_batch_that_was_not_trained(ended: Path) -> None:
    assert_counts_add_up(ended)
    updates = len(lines(ended / "metrics.jsonl"))
    assert 0 < updates < 1000
    assert lines(ended / "evaluations.jsonl")[-1]["version"] == updates
