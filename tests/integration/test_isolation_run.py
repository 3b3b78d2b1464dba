"""A whole run in which every fifth game hangs, crashes, raises, leaks or talks nonsense."""

import json
from pathlib import Path

import pytest

from tests.integration.runs import assert_counts_add_up, assert_gone, finish, launch, roles_of, wait_for_updates

pytestmark = pytest.mark.integration


def test_bad_games_are_given_up_and_cost_their_episodes_only(tmp_path: Path) -> None:
    run_dir = tmp_path / "trouble"
    process = launch(
        run_dir,
        "env.id=tests.fakes.trouble:TroubledBoxesSuite",
        "run.updates=6",
        "env.step_timeout_s=2",
        "env.max_memory_mb=512",
        "roles.actors.games_each=2",
        "roles.evaluation={every: 0, games: 10, concurrency: 4}",
        "buffer.max_tries=2",
    )
    wait_for_updates(run_dir, 1)
    roles = roles_of(process)
    output = finish(process)
    assert process.returncode == 0, output
    assert_gone(roles.values())
    counts = assert_counts_add_up(run_dir)
    assert counts["quarantined_tasks"] and all(task % 5 == 3 for task in counts["quarantined_tasks"])
    assert counts["leases"]["failed"] >= 2 * len(counts["quarantined_tasks"])
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["quarantined_tasks"] == counts["quarantined_tasks"]
    for actor in ("actor-0", "actor-1"):
        log = (run_dir / "logs" / f"{actor}.log").read_text()
        assert log.count("event=started") == 1, "no actor died of a bad game"
        assert "environment " in log and "episode failed" in log
