"""The journal's benchmark plays what a run plays: what it reads again is whole, and passes the audit."""

from pathlib import Path

from seed_async.journal import read_journal
from seed_async.learner.recovery import recover
from seed_async.tools.audit import replay
from seed_async.tools.bench_journal import GROUP_SIZE, GROUPS, make_topology, measure


def test_the_journals_hold_whole_batches_and_pass_the_audit(tmp_path: Path) -> None:
    figures = measure(300, tmp_path)
    batch = GROUPS * GROUP_SIZE
    assert figures.trajectories == 3 * batch
    state = recover(read_journal(tmp_path / "journal.jsonl"))
    assert state.counts["accepted"] == state.counts["trained"] == state.counts["skill_parsed"] == 3 * batch
    audit, _ = replay(read_journal(tmp_path / "journal.jsonl"), make_topology())
    assert audit.passed and audit.closed
    assert 300 < figures.buffer_bytes < 900 and 60 < figures.learner_bytes < 200
