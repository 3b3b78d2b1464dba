"""No token older than the bound reaches the loss, whatever `on_stale` says; `wait` loses nothing and never hangs."""

from collections import defaultdict, deque
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from seed_async.journal import Entry, Event
from seed_async.learner.buffer import GroupBuffer
from seed_async.learner.ledger import Fate
from seed_async.learner.recovery import recover
from seed_async.learner.update_rows import StaleBatchError, check_ages, trained_ages, update_batch
from seed_async.messages import Lease, Sample, Trajectory
from seed_async.staleness import StalenessBound
from seed_async.tools.audit import replay
from seed_async.topology import Staleness, Topology
from tests.fakes.chat import tiny_chat
from tests.fakes.episodes import VOCABULARY_SIZE, make_trajectory, make_turn, small_topology

MODES = get_args(Staleness.model_fields["on_stale"].annotation)
MAX_ROOM = 1000


def bounded(on_stale: str, max_staleness: int = 1, groups: int = 2, group_size: int = 2, **sections: Any) -> Topology:
    """Without skills: they change no age."""
    return small_topology(
        method="grpo",
        staleness={"max": max_staleness, "on_stale": on_stale},
        rollout={"groups_per_update": groups, "group_size": group_size},
        loss={"divide_by_std": group_size > 1},
        **sections,
    )


def open_buffer(topology: Topology, note: Any = lambda event, **_: None) -> GroupBuffer:
    """A buffer at version 0 with one actor `a`."""
    buffer = GroupBuffer(topology, VOCABULARY_SIZE, note=note)
    buffer.hello("a", "a1", 50, "digest")
    buffer.advance(0)
    return buffer


def submit(buffer: GroupBuffer, lease: Lease, *turns: list[int]) -> Trajectory:
    """Finish an episode whose turns have these token versions."""
    trajectory = make_trajectory(lease, "a1", [make_turn(versions) for versions in turns])
    assert buffer.submit(trajectory, 0.0) == ("accepted", "")
    return trajectory


def rows_of(samples: tuple[Sample, ...], version: int, topology: Topology) -> Any:
    """What the loss would read."""
    batch, masked = update_batch(samples, version, tiny_chat(), topology, MAX_ROOM)
    check_ages(samples, batch, version, StalenessBound(topology.staleness.max, topology.rollout.groups_per_update))
    return batch, masked


def assert_young(samples: tuple[Sample, ...], version: int, topology: Topology) -> int:
    """The mask of the loss is exactly the tokens within the bound; returns how many it leaves out."""
    batch, masked = rows_of(samples, version, topology)
    left_out = 0
    for sample, rows in zip(samples, batch.trajectories, strict=True):
        ages = version - sample.trajectory.versions
        assert np.array_equal(rows.trained, ages <= topology.staleness.max)
        left_out += int((~rows.trained).sum())
    assert masked.get("masked_tokens_stale", 0) == left_out
    assert topology.staleness.on_stale == "mask" or not left_out
    return left_out


# Mask ------------------------------------------------------------------------------------------------------------


def test_mask_leaves_out_the_old_tokens_only_and_writes_down_how_many() -> None:
    """The group is whole; the fate of its trajectories is trained."""
    entries: list[Entry] = []
    topology = bounded("mask")
    buffer = open_buffer(topology, lambda event, **fields: entries.append(Entry(event, 0.0, **fields)))
    leases = buffer.grant("a", "a1", 4, 0.0)
    buffer.advance(2)
    old = submit(buffer, leases[0], [0, 0, 0], [0, 2, 2], [2])
    whole = submit(buffer, leases[1], [0, 0])
    for lease in leases[2:]:
        submit(buffer, lease, [1, 2])
    samples = buffer.take_batch(2)
    assert assert_young(samples, 2, topology) == 6
    batch, masked = rows_of(samples, 2, topology)
    assert batch.trajectories[0].trained.tolist() == [False] * 4 + [True] * 3
    assert masked == {"masked_tokens_stale": 6.0}
    masks = {entry.trajectory: entry.num_tokens for entry in entries if entry.event == "masked"}
    assert masks == {old.trajectory_id: 4, whole.trajectory_id: 2}
    accounting: dict[str, Any] = buffer.accounting()
    assert accounting["masked"] == {"tokens": 6, "trajectories": 1, "batches": 0}
    assert accounting["ages"] == {"0": 1, "1": 2} and accounting["dropped"] == {} and accounting["balance_ok"]
    bound = StalenessBound(1, 2)
    assert trained_ages(samples, 2, bound) == [0, 1, 1]
    audit, _ = replay(entries, topology)
    assert audit.passed and audit.masked_tokens == 6 and audit.ages == {0: 1, 1: 2}
    assert audit.tokens_in_loss[old.trajectory_id] == 3 and audit.tokens_in_loss[whole.trajectory_id] == 0
    after = recover(entries)
    assert after.counts["masked_tokens"] == 6 and after.counts["masked_trajectories"] == 1
    assert +after.ages == {0: 1, 1: 2}


def test_a_batch_of_old_tokens_only_is_handed_out_and_counted() -> None:
    """Its update trains nothing; the version goes on."""
    topology = bounded("mask", max_staleness=0)
    buffer = open_buffer(topology)
    for lease in buffer.grant("a", "a1", 4, 0.0):
        submit(buffer, lease, [0, 0])
    buffer.advance(3)
    samples = buffer.take_batch(3)
    assert assert_young(samples, 3, topology) == 8
    assert buffer.accounting()["masked"] == {"tokens": 8, "trajectories": 4, "batches": 1}
    assert buffer.accounting()["ages"] == {}


@pytest.mark.parametrize("on_stale", ["drop", "wait"])
def test_a_token_that_nobody_masked_is_refused_before_the_forward_pass(on_stale: str) -> None:
    """Whatever the buffer says."""
    topology = bounded(on_stale)
    lease = open_buffer(topology).grant("a", "a1", 1, 0.0)[0]
    sample = Sample(trajectory=make_trajectory(lease, "a1", [make_turn([0, 1])]), skill=None)
    rows_of((sample,), 1, topology)
    with pytest.raises(StaleBatchError, match="1 tokens, the oldest of version 0, came for the update from version 2"):
        rows_of((sample,), 2, topology)
    assert_young((sample,), 2, bounded("mask"))


# Wait ------------------------------------------------------------------------------------------------------------


def test_wait_holds_the_learner_until_the_slow_group_is_in() -> None:
    """With K = 1 a group of version 0 must be trained from version 1: no other batch goes before it then."""
    topology = bounded("wait", groups=1)
    buffer = open_buffer(topology)
    slow = buffer.grant("a", "a1", 2, 0.0)
    for version in (0, 1):
        buffer.advance(version)
        for lease in buffer.grant("a", "a1", 2, 0.0):
            submit(buffer, lease, [version])
        assert bool(buffer.take_batch(version)) == (version == 0)
    submit(buffer, slow[0], [0, 1])
    assert buffer.take_batch(1) == ()
    submit(buffer, slow[1], [0, 1])
    batch = buffer.take_batch(1)
    assert {sample.trajectory.group_id for sample in batch} == {slow[0].group_id}, "the earliest deadline goes first"
    assert buffer.accounting()["dropped"] == {}


def test_wait_goes_on_when_the_group_that_holds_it_up_is_played_again_or_ends() -> None:
    """A dead actor's members are granted anew, at a newer version; a game that fails ends its group."""
    topology = bounded("wait", groups=1, buffer={"lease_timeout_s": 10, "max_tries": 1})
    buffer = open_buffer(topology)
    for ending in ("returned", "failed"):
        version = max(buffer.version, 0)
        slow = buffer.grant("a", "a1", 2, 0.0)
        for lease in buffer.grant("a", "a1", 2, 0.0):
            submit(buffer, lease, [version])
        assert len(buffer.take_batch(version)) == 2
        buffer.advance(version + 1)
        for lease in buffer.grant("a", "a1", 2, 0.0):
            submit(buffer, lease, [version + 1])
        assert buffer.take_batch(version + 1) == (), "held"
        if ending == "returned":
            buffer.expire(11.0)
            assert len(buffer.take_batch(version + 1)) == 2, "the vacant group will be played by newer weights"
            buffer.advance(version + 2)
            for lease in buffer.grant("a", "a1", 2, 20.0):
                submit(buffer, lease, [version + 2])
            assert len(buffer.take_batch(version + 2)) == 2
            buffer.advance(version + 3)
        else:
            buffer.fail(slow[0].lease_id, "a1")
            assert len(buffer.take_batch(version + 1)) == 2
    assert "stale" not in buffer.accounting()["dropped"]


def test_wait_drops_what_a_server_that_missed_a_version_sampled_instead_of_hanging() -> None:
    """Tokens older than their lease: no waiting makes them young."""
    buffer = open_buffer(bounded("wait", max_staleness=0, groups=1))
    for version in (1, 2):
        buffer.advance(version)
    for lease in buffer.grant("a", "a1", 2, 0.0):
        submit(buffer, lease, [1])
    assert buffer.take_batch(2) == () and buffer.accounting()["dropped"] == {"stale": 2}
    for lease in buffer.grant("a", "a1", 2, 0.0):
        submit(buffer, lease, [2])
    assert len(buffer.take_batch(2)) == 2


# The order of updates --------------------------------------------------------------------------------------------


def fewest_late(deadlines: tuple[int, ...], version: int, groups: int) -> int:
    """By trying every set: as many as possible such that by each version enough updates have been made."""
    best = 0
    for chosen in range(1 << len(deadlines)):
        kept = sorted(deadline for place, deadline in enumerate(deadlines) if chosen >> place & 1)
        if all(deadline >= version + place // groups for place, deadline in enumerate(kept)):
            best = max(best, len(kept))
    return len(deadlines) - best


@given(st.lists(st.integers(0, 5), max_size=8), st.integers(0, 3), st.integers(1, 3))
def test_the_number_of_late_groups_is_the_least_possible(deadlines: list[int], version: int, groups: int) -> None:
    """Against every choice."""
    assert StalenessBound(1, groups).num_late(deadlines, version) == fewest_late(tuple(deadlines), version, groups)


@given(st.lists(st.integers(0, 6), min_size=1, max_size=8), st.integers(0, 3), st.integers(1, 3))
def test_with_every_group_finished_the_earliest_deadlines_may_always_go(
    deadlines: list[int], version: int, groups: int
) -> None:
    """So the wait ends when the groups do: no deadlock, also where some are late whatever happens."""
    in_time = sorted(deadline for deadline in deadlines if deadline >= version)
    assert StalenessBound(1, groups).may_advance(in_time[:groups], in_time[groups:], version)


# Anything in any order -------------------------------------------------------------------------------------------


class AgeMachine(RuleBasedStateMachine):
    """Episodes of any duration, actors that die, games that fail, and a learner that goes on when it may.

    Policy servers keep their promise here: no token is older than the version under which its member was granted.
    """

    @initialize(
        on_stale=st.sampled_from(MODES),
        max_staleness=st.integers(0, 3),
        groups=st.integers(1, 2),
        group_size=st.integers(1, 2),
    )
    def start(self, on_stale: str, max_staleness: int, groups: int, group_size: int) -> None:
        """Choose a topology."""
        buffer = {"lease_timeout_s": 10, "max_tries": 2}
        self.topology = bounded(on_stale, max_staleness, groups, group_size, buffer=buffer)
        self.entries: list[Entry] = []
        self.buffer = GroupBuffer(self.topology, VOCABULARY_SIZE, self.note_fate, note=self.note_entry)
        self.dropped: defaultdict[str, int] = defaultdict(int)
        self.granted_at: dict[str, int] = {}
        self.playing: deque[Lease] = deque()
        self.incarnations = self.progress = 0
        self.version, self.masked, self.now_s = 0, 0, 0.0
        self.restart_actor(dies=True)
        self.buffer.advance(0)

    def note_fate(self, sample: Sample, fate: Fate, version: int, age: int) -> None:
        """Count what is dropped."""
        self.dropped[fate] += fate != "trained"

    def note_entry(self, event: Event, **fields: Any) -> None:
        """Keep the journal."""
        self.entries.append(Entry(event, self.now_s, **fields))

    @property
    def incarnation(self) -> str:
        """The living one."""
        return f"a{self.incarnations}"

    @rule(dies=st.sampled_from([False] * 5 + [True]))
    def restart_actor(self, dies: bool) -> None:
        """Now and then the actor dies with its episodes and starts again."""
        if not dies:
            return
        self.incarnations += 1
        self.playing.clear()
        self.buffer.hello("a", self.incarnation, 40, "digest")

    @rule(slots=st.integers(1, 8))
    def grant(self, slots: int) -> None:
        """Start episodes."""
        for lease in self.buffer.grant("a", self.incarnation, slots, self.now_s):
            self.granted_at[lease.lease_id] = self.version
            self.playing.append(lease)

    @precondition(lambda self: self.playing)
    @rule(place=st.integers(0, 30), number=st.integers(1, 6), switches=st.lists(st.integers(0, 5), max_size=3))
    def finish(self, place: int, number: int, switches: list[int]) -> None:
        """Some episodes end, not the oldest first; their tokens are of versions between their grant and now."""
        self.playing.rotate(place)
        for _ in range(min(number, len(self.playing))):
            lease = self.playing.popleft()
            first = self.granted_at[lease.lease_id]
            versions = sorted(min(self.version, first + step) for step in (0, *switches))
            turns = [make_turn(versions[:1]), make_turn(versions)]
            status, _ = self.buffer.submit(make_trajectory(lease, self.incarnation, turns), self.now_s)
            assert status in ("accepted", "fenced")  # fenced: its group has failed, or the lease has run out

    @precondition(lambda self: self.playing)
    @rule(slots=st.integers(1, 4), place=st.integers(0, 6), number=st.integers(1, 4))
    def work(self, slots: int, place: int, number: int) -> None:
        """All that goes on in a run without trouble."""
        self.grant(slots)
        self.finish(place, number, [1])
        self.train(again=False)

    @precondition(lambda self: self.playing)
    @rule()
    def fail(self) -> None:
        """An episode fails."""
        self.buffer.fail(self.playing.popleft().lease_id, self.incarnation)

    @rule(seconds=st.floats(0.1, 4))
    def expire(self, seconds: float) -> None:
        """Time passes; a lease that is not renewed runs out after 10 s."""
        self.now_s += seconds
        self.buffer.expire(self.now_s)

    @rule()
    def beat(self) -> None:
        """The actor makes progress."""
        self.progress += 1
        self.buffer.beat(self.incarnation, self.progress, self.now_s)

    @rule(again=st.booleans())
    def train(self, again: bool) -> None:
        """The learner asks for the batch of its update, and what it gets may reach the loss."""
        samples = self.buffer.take_batch(self.version)
        if not samples:
            return
        if again:  # a learner that starts again before it has published
            assert self.buffer.take_batch(self.version) == samples
        self.masked += assert_young(samples, self.version, self.topology)
        self.version += 1
        self.buffer.advance(self.version)

    def teardown(self) -> None:
        """Whatever happened: when everything is played, the learner goes on, and every promise was kept."""
        if not hasattr(self, "buffer") or len(self.buffer._tasks.quarantined) > 20:
            return
        goal = self.version + 6
        for _ in range(40):
            self.finish(0, len(self.playing), [])
            self.expire(25.0)
            self.grant(1000)
            self.finish(0, len(self.playing), [3])
            before = -1
            while self.version > before:
                before = self.version
                self.train(again=False)
            if self.version >= goal:
                break
        assert self.version >= goal, "the learner is held for ever"
        accounting: dict[str, Any] = self.buffer.accounting()
        assert accounting["balance_ok"] and accounting["masked"]["tokens"] == self.masked
        if self.topology.staleness.on_stale != "drop" or self.topology.staleness.max == 0:
            assert not self.dropped["stale"] and not self.dropped["stale_group"], "wait and mask drop nothing"
        assert self.masked == 0 or self.topology.staleness.max > 0, "synchronous operation wastes nothing"
        audit, _ = replay(self.entries, self.topology)
        assert audit.passed, audit.faults
        assert audit.masked_tokens == self.masked


AgeMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=50, deadline=None)
TestAgeMachine = AgeMachine.TestCase
