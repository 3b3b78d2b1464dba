"""The audit passes a clean journal and names each kind of broken promise."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from seed_async.journal import Journal, JournalDamagedError, read_journal
from seed_async.rundir import RunDir
from seed_async.tools.audit import Audit, audit_run
from tests.fakes.episodes import small_topology

TOPOLOGY = small_topology()


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path)


def take(journal: Journal, name: str, group: str = "g1", member: int = 0, num_tokens: int = 4) -> None:
    """Lease and deliver one trajectory."""
    journal.note("leased", lease=f"l-{name}", group=group, member=member, incarnation="i")
    journal.note(
        "accepted",
        lease=f"l-{name}",
        trajectory=name,
        group=group,
        member=member,
        incarnation="i",
        num_tokens=num_tokens,
    )


def train(journal: Journal, name: str, group: str, member: int, version: int = 0, age: int = 0) -> None:
    journal.note("trained", trajectory=name, group=group, member=member, version=version, age=age)


def audited(run_dir: RunDir, write: Callable[[Journal], None], learner: tuple[tuple[str, int], ...] = ()) -> Audit:
    """Audit a journal of one trained group, followed by what `write` adds, and what the learner says."""
    journal = Journal(run_dir.journal)
    for member, name in enumerate("ab"):
        take(journal, name, "g0", member)
    for member, name in enumerate("ab"):
        train(journal, name, "g0", member)
    write(journal)
    own = Journal(run_dir.trained)
    for name, version in (("a", 0), ("b", 0), *learner):
        own.note("trained", trajectory=name, version=version)
    own.close()
    return audit_run(run_dir, TOPOLOGY)


def test_a_clean_run_passes_and_is_counted(run_dir: RunDir) -> None:
    def more(journal: Journal) -> None:
        take(journal, "c", "g1", 0, num_tokens=12)
        journal.note("duplicate", trajectory="c")
        journal.note("leased", lease="l-d", group="g1", member=1, incarnation="i")
        journal.note("returned", lease="l-d", reason="no progress")
        journal.note("fenced", trajectory="d", lease="l-d")
        journal.note("dropped", trajectory="c", group="g1", member=0, reason="stale")
        journal.close()

    audit = audited(run_dir, more)
    assert audit.passed, audit.faults
    assert (audit.counts["accepted"], audit.counts["trained"], audit.counts["held"]) == (3, 2, 0)
    assert audit.dropped == {"stale": 1} and audit.ages == {0: 2} and audit.closed
    assert audit.length_bias == pytest.approx(4 / (20 / 3))


def test_a_running_run_passes_with_what_is_held(run_dir: RunDir) -> None:
    audit = audited(run_dir, lambda journal: take(journal, "c", "g1", 0))
    assert audit.passed and not audit.closed and audit.counts["held"] == 1


def train_unseen(journal: Journal, version: int, age: int, members: int = 2) -> None:
    """Deliver a second group and train some of it."""
    for member in range(2):
        take(journal, f"c{member}", "g1", member)
    for member in range(members):
        train(journal, f"c{member}", "g1", member, version, age)


def deliver_for_the_dead(journal: Journal) -> None:
    journal.note("leased", lease="l-c", incarnation="new")
    journal.note("accepted", lease="l-c", trajectory="c", incarnation="old")


def lose_one(journal: Journal) -> None:
    take(journal, "c")
    journal.close()


def write_after_the_end(journal: Journal) -> None:
    journal.note("closed")
    take(journal, "c")


def accept_twice(journal: Journal) -> None:
    take(journal, "c")
    journal.note("leased", lease="l-d", incarnation="i")
    journal.note("accepted", lease="l-d", trajectory="c", incarnation="i")


def mask_all(journal: Journal, num_tokens: int = 4, times: int = 1) -> None:
    """Train a group of which one member is masked."""
    for member in range(2):
        take(journal, f"c{member}", "g1", member)
    for _ in range(times):
        journal.note("masked", trajectory="c0", reason="stale", version=3, num_tokens=num_tokens)
    train(journal, "c0", "g1", 0, 3, age=-1)
    train(journal, "c1", "g1", 1, 3, age=1)


def lose_batch(journal: Journal, version: int = 1) -> None:
    """Hand out a second group, of which one entry was still written, and name it lost."""
    train_unseen(journal, 1, age=0, members=1)
    journal.note("reopened")
    journal.note("dropped", trajectory="c1", group="g1", member=1, reason="restart")
    journal.note("lost", trajectory="c0", version=version, reason="restart")


BROKEN: dict[str, tuple[Callable[[Journal], None], str]] = {
    "trained twice": (lambda j: train(j, "a", "g0", 0, version=1, age=1), "it was trained before"),
    "trained and dropped": (lambda j: j.note("dropped", trajectory="a", reason="stale"), "it was trained before"),
    "too old": (lambda j: train_unseen(j, 2, age=2), "was 2 versions old; the bound is 1"),
    "from the future": (lambda j: train_unseen(j, 2, age=-1), "was -1 versions old"),
    "masked in part only": (lambda j: mask_all(j, num_tokens=3), "was -1 versions old"),
    "masked more than there is": (lambda j: mask_all(j, num_tokens=5), "5 tokens masked, of 4"),
    "masked twice": (lambda j: mask_all(j, times=2), "it was masked or trained before"),
    "masked after training": (lambda j: j.note("masked", trajectory="a", num_tokens=1), "masked or trained before"),
    "half a group": (lambda j: train_unseen(j, 1, age=0, members=1), "group g1: 1 of 2 members"),
    "never accepted": (lambda j: train(j, "x", "g9", 0), "it was never accepted"),
    "accepted twice": (accept_twice, "it was accepted twice"),
    "lease ended twice": (lambda j: j.note("returned", lease="l-a"), "the lease had ended before"),
    "lease granted twice": (lambda j: j.note("leased", lease="l-a"), "the lease was granted twice"),
    "lease of nobody": (lambda j: j.note("returned", lease="l-x"), "the lease was never granted"),
    "a dead incarnation's result": (deliver_for_the_dead, "held by new, not by old"),
    "lost": (lose_one, "1 accepted trajectories have no fate"),
    "lost with another batch": (lambda j: lose_batch(j, version=2), "it was not handed out for the update from 2"),
    "lost but not handed out": (lambda j: j.note("lost", trajectory="x", version=0), "it was not handed out"),
    "after the end": (write_after_the_end, "came after the journal was closed"),
}


@pytest.mark.parametrize(("write", "fault"), BROKEN.values(), ids=BROKEN)
def test_each_broken_promise_is_named(run_dir: RunDir, write: Callable[[Journal], None], fault: str) -> None:
    audit = audited(run_dir, write)
    assert not audit.passed and any(fault in each for each in audit.faults), audit.faults


@pytest.mark.parametrize(
    ("learner", "fault"),
    [((("a", 1),), "trained it twice"), ((("z", 3),), "not handed out for the update from 3")],
)
def test_the_learner_cannot_train_what_it_was_not_handed(
    run_dir: RunDir, learner: tuple[tuple[str, int], ...], fault: str
) -> None:
    audit = audited(run_dir, lambda _: None, learner)
    assert any(fault in each for each in audit.faults)


@pytest.mark.parametrize("learner_tokens", [0, 4])
def test_the_learner_leaves_out_exactly_the_tokens_that_the_buffer_says(run_dir: RunDir, learner_tokens: int) -> None:
    """One trajectory masked whole has no age; its sibling is trained."""
    audited(run_dir, mask_all)
    own = Journal(run_dir.trained)
    own.note("trained", trajectory="c0", version=3, num_tokens=learner_tokens)
    own.note("trained", trajectory="c1", version=3, num_tokens=4)
    audit = audit_run(run_dir, TOPOLOGY)
    assert audit.masked_tokens == 4 and audit.ages == {0: 2, 1: 1}
    assert audit.faults == ([] if learner_tokens == 0 else ["trained c0: 4 tokens instead of 0"])


def test_only_the_last_batch_may_be_handed_out_and_not_trained(run_dir: RunDir) -> None:
    def two_more(journal: Journal) -> None:
        for version in (1, 2):
            for member in (0, 1):
                take(journal, f"v{version}-{member}", f"g{version}", member)
                train(journal, f"v{version}-{member}", f"g{version}", member, version)

    assert audited(run_dir, two_more, (("v1-0", 1), ("v1-1", 1))).passed
    run_dir.trained.unlink()
    run_dir.journal.unlink()
    audit = audited(run_dir, two_more, (("v2-0", 2), ("v2-1", 2)))
    assert audit.faults == ["batches of the versions [1] were handed out and never trained"]


def test_a_batch_that_died_with_the_buffer_is_excused_by_name_and_never_trained(run_dir: RunDir) -> None:
    """A learner that died with its update may have trained it; one that lives on may not."""

    def more(journal: Journal) -> None:
        lose_batch(journal)
        for member in range(2):
            take(journal, f"d{member}", "g2", member)
            train(journal, f"d{member}", "g2", member, version=2)

    audit = audited(run_dir, more, (("d0", 2), ("d1", 2)))
    assert audit.passed and audit.counts["lost"] == 1, audit.faults
    run_dir.trained.unlink()
    run_dir.journal.unlink()
    audit = audited(run_dir, more, (("c0", 1), ("d0", 2), ("d1", 2)))
    assert audit.faults == ["trained c0: the buffer had named it lost"]


def test_other_counts_in_counts_json_are_a_fault(run_dir: RunDir) -> None:
    counts: dict[str, object] = dict.fromkeys(("duplicate", "fenced", "refused", "lost"), 0)
    counts |= {"accepted": 2, "trained": 2, "dropped": {}, "balance_ok": True}
    run_dir.counts.write_text(json.dumps(counts))
    assert audited(run_dir, lambda _: None).passed
    run_dir.journal.unlink()
    run_dir.trained.unlink()
    run_dir.counts.write_text(json.dumps(counts | {"trained": 3}))
    assert audited(run_dir, lambda _: None).faults == ["counts.json says trained 3, the journal 2"]


def test_a_line_cut_by_a_kill_is_left_out_and_a_damaged_one_is_refused(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j")
    journal.note("leased", lease="l0")
    journal.close()
    whole = (tmp_path / "j").read_bytes()
    (tmp_path / "j").write_bytes(whole[:-5])
    assert [entry.event for entry in read_journal(tmp_path / "j")] == ["leased"]
    (tmp_path / "j").write_bytes(b"{]\n" + whole)
    with pytest.raises(JournalDamagedError, match="line 1"):
        list(read_journal(tmp_path / "j"))
