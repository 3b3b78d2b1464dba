"""A buffer that starts again on its journal: nothing is lost unnoticed, no game is skipped, no id is used twice."""

import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from seed_async.journal import Entry, Event, Journal, read_journal
from seed_async.learner.buffer import GroupBuffer
from seed_async.learner.recovery import recover
from seed_async.skill_library import SkillLibrary
from seed_async.tools.audit import replay
from seed_async.topology import Topology
from tests.fakes.episodes import OPENING, VOCABULARY_SIZE, make_trajectory, make_turn, skill_for, small_topology

NUM_TASKS = 7
TOPOLOGY = small_topology(method="grpo", buffer={"max_tries": 1})


class Crashing:
    """A buffer that can die at any moment, leaving its journal."""

    def __init__(self, topology: Topology = TOPOLOGY, library: SkillLibrary | None = None, *, cut: int = 1) -> None:
        """Start for the first time; of a batch that it dies with `cut` entries are not written."""
        self.topology, self.library = topology, library
        self.entries: list[Entry] = []
        self.learned: list[tuple[str, int]] = []
        self.cut = cut
        self.starts = 0
        self.version = 0
        self.start()

    def start(self) -> None:
        """Start, or start again after a death."""
        recovered = recover(self.entries) if self.entries else None
        self.buffer = GroupBuffer(
            self.topology, VOCABULARY_SIZE, library=self.library, note=self.note, recovered=recovered
        )
        self.starts += 1
        self.buffer.hello("a", f"a{self.starts}", NUM_TASKS, "digest")
        self.buffer.advance(self.version)
        self.leases = list(self.buffer.grant("a", f"a{self.starts}", 1, 0.0))

    def note(self, event: Event, **fields: Any) -> None:
        """Keep the journal."""
        self.entries.append(Entry(event, 0.0, **fields))

    def act(self, action: str) -> None:
        """Do one thing that actors or the learner do."""
        match action:
            case "grant":
                self.leases += self.buffer.grant("a", f"a{self.starts}", 3, 0.0)
            case "submit" if self.leases:
                lease = self.leases.pop(0)
                self.buffer.submit(make_trajectory(lease, f"a{self.starts}", version=self.version), 0.0)
            case "submit a long one" if self.leases:
                lease = self.leases.pop(0)
                oldest = max(0, self.version - len(self.entries) % 3)
                turn = make_turn([oldest] * 3 + [self.version] * (len(self.entries) % 20), opening=OPENING)
                seconds = len(self.entries) / 7
                self.buffer.submit(make_trajectory(lease, f"a{self.starts}", [turn], ended_at_s=1.0 + seconds), 0.0)
            case "analyse":
                for number, trajectory in enumerate(self.buffer.claim_analyses(3, 0.0)):
                    self.buffer.add_skill(skill_for(trajectory, None if number else "look", "too_long" * number))
                    self.buffer.add_skill(skill_for(trajectory))  # the answer of a slower analyzer
            case "expire":
                self.buffer.expire(30.0)
            case "fail" if self.leases:
                self.buffer.fail(self.leases.pop().lease_id, f"a{self.starts}")
            case "train":
                if batch := self.buffer.take_batch(self.version):
                    self.learned += [(sample.trajectory.trajectory_id, self.version) for sample in batch]
                    self.version += 1
                    self.buffer.advance(self.version)
            case "die with a batch":  # while its last entries are being written; the learner never has it
                if self.buffer.take_batch(self.version):
                    del self.entries[-self.cut :]
                    self.start()
            case "crash":
                self.start()


def tasks_opened(entries: list[Entry]) -> Iterator[int]:
    """The games in the order in which groups were opened on them."""
    return (entry.task for entry in entries if entry.event == "opened")


ACTIONS = st.lists(
    st.sampled_from(["grant", "submit", "submit", "submit", "train", "crash", "fail", "die with a batch"]), max_size=120
)


@settings(max_examples=150, deadline=None)
@given(actions=ACTIONS, cut=st.integers(1, 4))
def test_whatever_the_moment_of_a_death_the_journal_passes_the_audit_and_the_counts_go_on(
    actions: list[str], cut: int
) -> None:
    crashing = Crashing(cut=cut)
    for action in actions:
        if len(crashing.buffer._tasks.quarantined) < NUM_TASKS - 2 or action != "fail":
            crashing.act(action)
        accounting: dict[str, Any] = crashing.buffer.accounting()
        assert accounting["balance_ok"]
    crashing.act("train")  # the learner asks for the batch that it waits for
    accounting = crashing.buffer.accounting()
    audit, handed_out = replay(crashing.entries, TOPOLOGY)
    assert audit.passed, audit.faults
    learned = dict(crashing.learned)
    assert len(learned) == len(crashing.learned), "nothing is trained twice"
    assert learned == {key: version for key, version in handed_out.items() if key not in audit.lost}
    for count in ("accepted", "trained", "lost", "fenced"):
        assert audit.counts[count] == accounting[count] if actions else True
    if actions:
        assert audit.dropped == accounting["dropped"] and audit.ages == Counter(
            {int(age): number for age, number in accounting["ages"].items()}
        )
    leases = [entry.lease for entry in crashing.entries if entry.event == "leased"]
    groups = [entry.group for entry in crashing.entries if entry.event == "opened"]
    assert len(set(leases)) == len(leases) and len(set(groups)) == len(groups)


WEIGHTS = {"grant": 4, "submit": 3, "submit a long one": 6, "analyse": 4, "train": 6, "expire": 0.5, "crash": 0.5}
RESTORED = (
    "accepted",
    "trained",
    "duplicate",
    "fenced",
    "refused",
    "skills",
    "skills_missing",
    "ages",
    "masked",
    "bias",
)


@settings(max_examples=60, deadline=None)
@given(
    method=st.sampled_from(["seed", "grpo", "sdar"]),
    on_stale=st.sampled_from(["drop", "mask", "wait"]),
    seed=st.integers(0, 1 << 30),
    length=st.integers(0, 400),
)
def test_every_figure_of_the_accounting_is_read_back_from_the_journal(
    method: str, on_stale: str, seed: int, length: int
) -> None:
    """At any moment of long runs, whose batches are masked in part or whole and whose analyses end in every way."""
    library = None if method != "sdar" else SkillLibrary("t", {"other": "look first"})
    topology = small_topology(
        method=method, staleness={"max": 1, "on_stale": on_stale}, buffer={"lease_timeout_s": 100, "max_tries": 1}
    )
    crashing = Crashing(topology, library)
    for action in random.Random(seed).choices(list(WEIGHTS), list(WEIGHTS.values()), k=length):
        crashing.act(action)
    live = crashing.buffer.accounting()
    crashing.buffer = GroupBuffer(topology, VOCABULARY_SIZE, recovered=recover(crashing.entries))
    again = crashing.buffer.accounting()
    assert {key: again[key] for key in RESTORED} == {key: live[key] for key in RESTORED}
    assert again["balance_ok"]


@settings(max_examples=100, deadline=None)
@given(actions=st.lists(st.sampled_from(["grant", "submit", "submit", "submit", "train", "crash"]), max_size=150))
def test_no_game_is_skipped_and_none_trained_out_of_turn(actions: list[str]) -> None:
    """Groups that a death ended are opened again, before new ones: every epoch trains or holds each game once."""
    crashing = Crashing()
    for action in actions:
        crashing.act(action)
    state = recover(crashing.entries)
    ended = {entry.group for entry in crashing.entries if entry.event == "trained"}
    played = Counter(entry.task for entry in crashing.entries if entry.event == "opened" and entry.group in ended)
    owed = played + Counter(state.replay)
    # Every game up to the cursor was trained or is still owed; none more often than the epochs so far.
    epochs, place = divmod(state.cursor, NUM_TASKS)
    assert sum(owed.values()) == state.cursor
    assert all(epochs <= owed[task] <= epochs + (place > 0) for task in range(NUM_TASKS))


def test_a_resend_of_what_the_dead_buffer_had_accepted_is_a_duplicate() -> None:
    crashing = Crashing()
    trajectory = make_trajectory(crashing.leases[0], "a1")
    assert crashing.buffer.submit(trajectory, 0.0) == ("accepted", "")
    crashing.start()
    assert crashing.buffer.submit(trajectory, 0.0) == ("duplicate", "")


def test_a_journal_on_disk_recovers_the_same_and_a_cut_line_is_taken_away(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal")
    buffer = GroupBuffer(TOPOLOGY, VOCABULARY_SIZE, note=journal.note)
    buffer.hello("a", "a1", NUM_TASKS, "digest")
    buffer.advance(0)
    leases = buffer.grant("a", "a1", 3, 0.0)
    buffer.submit(make_trajectory(leases[0], "a1"), 0.0)
    journal.note("evaluated", version=0)
    whole = (tmp_path / "journal").read_bytes()
    (tmp_path / "journal").write_bytes(whole + b'{"event":"lea')
    state = recover(read_journal(tmp_path / "journal"))
    assert (state.num_groups, state.cursor, state.counts["leased"], state.evaluated) == (2, 2, 3, {0})
    assert state.open_leases == [lease.lease_id for lease in leases[1:]] and len(state.replay) == 2
    again = Journal(tmp_path / "journal")
    again.note("reopened")
    assert (tmp_path / "journal").read_bytes().startswith(whole + b'{"event":"reopened"')
    assert [entry.event for entry in read_journal(tmp_path / "journal")][-1] == "reopened"
