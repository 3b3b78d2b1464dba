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
    folder = tmp_path_factory.mktemp("runs")
    sets = ["staleness.on_stale=mask", "method=grpo", "run.updates=1000", "run.max_minutes=0.3"]
    # A game is overtaken by two updates of one group each: its first turn is too old when its group is trained.
    sets += ["env.id=tests.fakes.straggler:StragglerSuite", f"env.games={folder}", "buffer.lease_timeout_s=120"]
    sets += ["rollout.groups_per_update=1", "rollout.group_size=2"]
    # The straggler blocks all games of its actor.
    sets += ["roles.actors.replicas=2", "roles.actors.games_each=1"]
    sets += ["roles.evaluation.every=1000", "roles.evaluation.games=4"]
    process = launch(folder / "boxes", *sets)
    output = finish(process)
    assert process.returncode == 0, output
    return folder / "boxes"


def test_a_run_that_masks_drops_nothing_for_its_age_and_keeps_the_bound(ended: Path) -> None:
    """What the buffer masks is what the learner leaves out, token by token: the audit compares both journals."""
    counts = assert_counts_add_up(ended)
    audit = audit_run(RunDir(ended), load_topology(ended / "topology.yaml"))
    assert counts["masked"]["tokens"] > 0 and counts["dropped"] == {} and max(audit.ages) <= 1
    metrics = lines(ended / "metrics.jsonl")
    assert max(line["age_max"] for line in metrics) <= 1
    assert sum(line.get("masked_tokens_stale", 0) for line in metrics) == counts["masked"]["tokens"]
    assert sum(line["response_tokens"] for line in metrics) == sum(audit.tokens_in_loss.values())


def test_a_run_that_ends_by_its_time_limit_books_no_batch_that_was_not_trained(ended: Path) -> None:
    assert_counts_add_up(ended)
    updates = len(lines(ended / "metrics.jsonl"))
    assert 0 < updates < 1000
    assert lines(ended / "evaluations.jsonl")[-1]["version"] == updates
