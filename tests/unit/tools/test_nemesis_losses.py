"""What deaths cost, told from what the buffer really notes and from a learner's journal."""

from pathlib import Path

from seed_async.journal import Entry, Journal, read_journal
from seed_async.learner.buffer import GroupBuffer
from seed_async.learner.recovery import recover
from seed_async.rundir import RunDir
from seed_async.tools.losses import Losses, count_losses, learner_losses
from tests.fakes.episodes import VOCABULARY_SIZE, make_trajectory, skill_for, small_topology


def start(journal: Journal, path: Path, incarnation: str) -> GroupBuffer:
    """A buffer that goes on from its journal, with one actor."""
    entries = list(read_journal(path))
    buffer = GroupBuffer(
        small_topology(), VOCABULARY_SIZE, note=journal.note, recovered=recover(entries) if entries else None
    )
    buffer.hello("a", incarnation, 9, "digest")
    buffer.advance(0)
    return buffer


def test_each_loss_is_told_by_the_role_that_caused_it(tmp_path: Path) -> None:
    """Two groups of two, with skills: an actor dies, an analyzer is silent, then the buffer dies with a batch."""
    run_dir = RunDir(tmp_path)
    journal = Journal(run_dir.journal)
    buffer = start(journal, run_dir.journal, "a1")
    buffer.grant("a", "a1", 3, 0.0)
    buffer.hello("a", "a2", 9, "digest")  # three episodes of a1 are lost
    leases = buffer.grant("a", "a2", 7, 0.0)
    for lease in leases[:6]:
        assert buffer.submit(make_trajectory(lease, "a2"), 0.0)[0] == "accepted"
    jobs = buffer.claim_analyses(6, 0.0)
    for trajectory in jobs[:4]:
        buffer.add_skill(skill_for(trajectory))
    buffer.beat("a2", 1, 21.0)
    buffer.expire(21.0)  # two analyses are given up
    assert len(buffer.take_batch(0)) == 4
    buffer = start(journal, run_dir.journal, "a3")  # one episode, two trajectories, and the batch that was on its way
    assert buffer.take_batch(0) == ()
    assert count_losses(run_dir) == {
        "actor": Losses(episodes=3),
        "analyzer": Losses(analyses=2),
        "buffer": Losses(episodes=1, trajectories=2 + 4),
        "learner": Losses(),
    }


def test_an_update_is_lost_when_its_successor_begins_before_it_and_its_batch_may_be_trained_again() -> None:
    """Two updates forgotten; the trajectories of one of them are handed out again."""
    trained = [("a", 0), ("b", 1), ("c", 2)]
    entries = [Entry("trained", 0.0, trajectory=name, version=version) for name, version in trained]
    entries += [Entry("started", 0.0, version=4, weights=1), Entry("trained", 0.0, trajectory="c", version=4)]
    assert learner_losses(entries) == Losses(updates=2, trajectories=1)
    assert learner_losses(entries, {"b"}) == Losses(updates=2), "the buffer has lost it, and is counted for it"
