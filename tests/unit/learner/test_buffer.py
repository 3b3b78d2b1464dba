"""The group buffer: scenarios, and a state machine that does anything in any order and checks every invariant."""

from collections import Counter, defaultdict
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from msgspec.structs import replace

from seed_async.journal import Entry, Event
from seed_async.learner.buffer import GroupBuffer, NoTasksLeftError, TaskListMismatchError
from seed_async.learner.ledger import Fate
from seed_async.messages import Lease, Sample, Skill, SkillResult, Trajectory
from seed_async.skill_library import SkillLibrary
from seed_async.tools.audit import replay
from tests.fakes.episodes import (
    OPENING,
    VOCABULARY_SIZE,
    make_lease,
    make_trajectory,
    make_turn,
    skill_for,
    small_topology,
)

Fates = list[tuple[str, Fate]]


def open_buffer(
    version: int = 0,
    num_tasks: int = 50,
    fates: Fates | None = None,
    library: SkillLibrary | None = None,
    **sections: Any,
) -> GroupBuffer:
    """A buffer with one actor `a` (incarnation `a1`); `fates` collects what becomes of each trajectory."""

    def note(sample: Sample, fate: Fate, version: int, age: int) -> None:
        assert age == version - sample.trajectory.oldest_version
        if fates is not None:
            fates.append((sample.trajectory.trajectory_id, fate))

    buffer = GroupBuffer(small_topology(**sections), VOCABULARY_SIZE, note, library)
    buffer.hello("a", "a1", num_tasks, "digest")
    buffer.advance(version)
    return buffer


def play(buffer: GroupBuffer, leases: tuple[Lease, ...], version: int = 0, now_s: float = 0.0) -> list[Trajectory]:
    """Submit one trajectory for each lease of `a1`."""
    trajectories = [make_trajectory(lease, "a1", version=version) for lease in leases]
    for trajectory in trajectories:
        assert buffer.submit(trajectory, now_s) == ("accepted", "")
    return trajectories


def analyse_all(buffer: GroupBuffer, now_s: float = 0.0) -> None:
    """Claim and answer everything."""
    for trajectory in buffer.claim_analyses(1000, now_s):
        assert buffer.add_skill(skill_for(trajectory)) == "accepted"


def balanced(buffer: GroupBuffer) -> bool:
    """Whether the accounting adds up."""
    return buffer.accounting()["balance_ok"] is True


# Leases ----------------------------------------------------------------------------------------------------------


def test_nothing_is_granted_before_the_first_acknowledged_version() -> None:
    """No policy server could sample."""
    buffer = open_buffer(version=-1)
    assert buffer.grant("a", "a1", 4, 0.0) == ()
    buffer.advance(0)
    assert len(buffer.grant("a", "a1", 4, 0.0)) == 4


def test_the_members_of_a_group_play_one_game_with_different_seeds() -> None:
    """Groups are filled one after the other."""
    leases = open_buffer().grant("a", "a1", 4, 0.0)
    assert [lease.member for lease in leases] == [0, 1, 0, 1]
    assert len({(lease.group_id, lease.task_index) for lease in leases}) == 2
    assert len({lease.seed for lease in leases}) == 4


def test_the_admission_gate_is_never_exceeded_and_opens_with_the_version() -> None:
    """(K + version + 1) batches of groups."""
    buffer = open_buffer(method="grpo")
    leases = buffer.grant("a", "a1", 1000, 0.0)
    assert len(leases) == 2 * 2 * 2
    assert buffer.grant("a", "a1", 1, 0.0) == ()
    play(buffer, leases[:4])
    assert len(buffer.take_batch(0)) == 4
    assert buffer.grant("a", "a1", 1, 0.0) == ()  # only the acknowledged version frees places
    buffer.advance(1)
    assert len(buffer.grant("a", "a1", 1000, 0.0)) == 2 * 2
    buffer.advance(0)
    assert buffer.version == 1


def test_every_task_is_played_once_an_epoch_in_an_order_of_the_seed() -> None:
    """And the order of the second epoch differs."""

    def order(seed: int) -> list[int]:
        buffer = open_buffer(num_tasks=30, run={"seed": seed}, staleness={"max": 1000})
        return [lease.task_index for lease in buffer.grant("a", "a1", 120, 0.0)][::2]

    assert sorted(order(0)[:30]) == sorted(order(0)[30:]) == list(range(30))
    assert order(0) == order(0) and order(0) != order(1) and order(0)[:30] != order(0)[30:]


def test_an_unknown_or_replaced_incarnation_gets_no_lease() -> None:
    """A held request of a dead process must not eat leases."""
    buffer = open_buffer()
    assert buffer.grant("b", "b1", 4, 0.0) == ()
    buffer.hello("a", "a2", 50, "digest")
    assert buffer.grant("a", "a1", 4, 0.0) == ()


def test_a_restarted_actor_returns_the_leases_of_its_predecessor_at_once() -> None:
    """The same members are granted again; what the dead incarnation still sends is fenced."""
    buffer = open_buffer()
    before = buffer.grant("a", "a1", 4, 0.0)
    buffer.hello("a", "a2", 50, "digest")
    after = buffer.grant("a", "a2", 4, 0.0)
    assert {(lease.group_id, lease.member) for lease in after} == {(lease.group_id, lease.member) for lease in before}
    assert buffer.submit(make_trajectory(before[0], "a1"), 0.0)[0] == "fenced"
    assert not buffer.fail(before[1].lease_id, "a1")
    assert balanced(buffer)


def test_other_training_tasks_are_refused_and_none_at_all_too() -> None:
    """A task index must name one game."""
    buffer = open_buffer()
    with pytest.raises(TaskListMismatchError, match="b sees other"):
        buffer.hello("b", "b1", 50, "another")
    with pytest.raises(NoTasksLeftError, match="c sees no"):
        buffer.hello("c", "c1", 0, "none")


def test_a_lease_without_progress_returns_and_one_with_progress_does_not() -> None:
    """Beats alone do not renew: a hung actor beats too."""
    buffer = open_buffer()
    buffer.hello("b", "b1", 50, "digest")
    buffer.grant("a", "a1", 2, 0.0)
    buffer.grant("b", "b1", 2, 0.0)
    for now_s in range(1, 13):
        buffer.beat("a1", now_s, float(now_s))
        buffer.beat("b1", 0, float(now_s))
        buffer.beat("stranger", now_s, float(now_s))
        buffer.expire(float(now_s))
    assert buffer.running == 2
    assert buffer.accounting()["leases"] == {"granted": 4, "returned": 2, "failed": 0, "running": 2}


def test_progress_of_dead_incarnations_is_forgotten() -> None:
    """An actor that restarts for ever must not fill the memory."""
    buffer = open_buffer()
    for number in range(100):
        buffer.hello("a", f"again-{number}", 50, "digest")
    assert len(buffer._progress) == 1


def test_a_failed_member_is_tried_again_and_then_ends_its_group_whole() -> None:
    """Its siblings in play return, its finished siblings are dropped, the task is not opened again, a place is free."""
    fates: Fates = []
    buffer = open_buffer(num_tasks=5, fates=fates, rollout={"groups_per_update": 1, "group_size": 3})
    first = buffer.grant("a", "a1", 3, 0.0)
    (finished,) = play(buffer, first[:1])
    assert buffer.claim_analyses(5, 0.0) == (finished,)
    assert buffer.fail(first[1].lease_id, "a1")
    (again,) = buffer.grant("a", "a1", 1, 0.0)
    assert (again.group_id, again.member) == (first[1].group_id, first[1].member)
    assert again.seed != first[1].seed
    assert buffer.fail(again.lease_id, "a1")
    assert fates == [(finished.trajectory_id, "failed_group")]
    assert buffer.submit(make_trajectory(first[2], "a1"), 0.0)[0] == "fenced"
    assert buffer.add_skill(skill_for(finished)) == "refused"
    assert (buffer.running, buffer.buffered, buffer.analysis_backlog) == (0, 0, 0)
    assert buffer.accounting()["quarantined_tasks"] == [first[0].task_index]
    # The group's place is free again: two groups may be open at version 0 with K = 1.
    assert len(buffer.grant("a", "a1", 100, 0.0)) == 2 * 3
    assert balanced(buffer)


def test_a_quarantined_task_is_never_opened_again() -> None:
    """Not in the running epoch and not in a later one."""
    buffer = open_buffer(version=1000, num_tasks=3, buffer={"max_tries": 1})
    (lease,) = buffer.grant("a", "a1", 1, 0.0)
    buffer.fail(lease.lease_id, "a1")
    assert {each.task_index for each in buffer.grant("a", "a1", 60, 0.0)} == {0, 1, 2} - {lease.task_index}


def test_a_run_whose_tasks_all_failed_ends_with_an_error() -> None:
    """Waiting would never end."""
    buffer = open_buffer(num_tasks=2, buffer={"max_tries": 1})
    for _ in range(2):
        (lease,) = buffer.grant("a", "a1", 1, 0.0)
        buffer.fail(lease.lease_id, "a1")
    with pytest.raises(NoTasksLeftError, match="all 2 training tasks failed"):
        buffer.grant("a", "a1", 1, 0.0)


def long_trajectory(lease: Lease) -> Trajectory:
    """More bytes than the smallest limit allows."""
    return make_trajectory(lease, "a1", [replace(make_turn([0, 0]), observation="o" * (1 << 21))])


def test_back_pressure_opens_no_group_but_never_starves_a_batch() -> None:
    """Over the byte limit only as many groups as a batch needs are open; those are always completed."""
    buffer = open_buffer(version=3, buffer={"max_bytes": 1 << 20})
    (first,) = buffer.grant("a", "a1", 1, 0.0)
    assert buffer.submit(long_trajectory(first), 0.0)[0] == "accepted"
    leases = buffer.grant("a", "a1", 100, 0.0)
    assert len(leases) == 3
    for lease in leases:
        assert buffer.submit(long_trajectory(lease), 0.0)[0] == "accepted"
    analyse_all(buffer)
    assert buffer.grant("a", "a1", 100, 0.0) == ()
    assert len(buffer.take_batch(3)) == 0  # version 0 is too old for version 3 with K = 1
    assert buffer.accounting()["dropped"] == {"stale": 4}
    assert len(buffer.grant("a", "a1", 100, 0.0)) > 4


# Trajectories ----------------------------------------------------------------------------------------------------


def test_a_resent_trajectory_is_a_duplicate() -> None:
    """Accepted once, answered so that the actor stops."""
    buffer = open_buffer()
    (trajectory,) = play(buffer, buffer.grant("a", "a1", 1, 0.0))
    assert buffer.submit(trajectory, 0.0) == ("duplicate", "")
    assert buffer.buffered == 1 and balanced(buffer)


def test_tokens_of_the_version_that_is_being_published_are_accepted() -> None:
    """Policy servers serve it before the learner has heard of every acknowledgement."""
    buffer = open_buffer(version=0)
    one, two = buffer.grant("a", "a1", 2, 0.0)
    assert buffer.submit(make_trajectory(one, "a1", version=1), 0.0)[0] == "accepted"
    status, detail = buffer.submit(make_trajectory(two, "a1", version=2), 0.0)
    assert (status, detail) == ("refused", "version from the future")


def test_tokens_of_a_learner_that_goes_on_under_a_later_number_are_accepted() -> None:
    """Two learners died between publishing and asking for a batch: the third is two versions ahead of the buffer."""
    buffer = open_buffer(version=3)
    one, two = buffer.grant("a", "a1", 2, 0.0)
    buffer.expect(5)
    assert buffer.submit(make_trajectory(one, "a1", version=5), 0.0)[0] == "accepted"
    assert buffer.submit(make_trajectory(two, "a1", version=6), 0.0)[0] == "refused"
    assert buffer.version == 3, "nothing is acknowledged yet"


def damaged(lease: Lease, **changes: Any) -> Trajectory:
    """A trajectory of one turn, with other arrays or lengths."""
    return make_trajectory(lease, "a1", [make_turn([0, 0])], **changes)


@pytest.mark.parametrize(
    ("changes", "detail"),
    [
        ({"response_ids": np.array([5], np.int32)}, "lengths"),
        ({"response_ids": np.array([], np.int32)}, "lengths"),
        ({"behaviour_logprob": np.zeros(3, np.float32)}, "lengths"),
        ({"versions": np.zeros(1, np.int32)}, "lengths"),
        ({"behaviour_logprob": np.array([0, np.nan], np.float32)}, "finite"),
        ({"behaviour_logprob": np.array([0, -np.inf], np.float32)}, "finite"),
        ({"behaviour_logprob": np.zeros(2, np.int32)}, "type or shape"),
        ({"response_ids": np.zeros((2, 1), np.int32)}, "type or shape"),
        ({"response_ids": np.zeros(2, np.float32)}, "type or shape"),
        ({"response_ids": np.array([5, VOCABULARY_SIZE], np.int32)}, "vocabulary"),
        ({"response_ids": np.array([5, -1], np.int32)}, "vocabulary"),
        ({"prompt_ids": np.array([-1, 2, 3], np.int32)}, "vocabulary"),
        ({"prompt_ids": np.array([], np.int32), "prompt_lengths": (0,)}, "before the first response"),
        ({"prompt_ids": np.array([], np.int32)}, "do not add up"),
        ({"prompt_lengths": (2,)}, "do not add up"),
        ({"response_lengths": (1,)}, "lengths"),
        ({"prompt_lengths": (3, 0), "response_lengths": (1, 1)}, "no turns"),
        ({"texts": make_trajectory(make_lease(), "a1", [make_turn([0], whole_chat=True)]).texts}, "without opening"),
        ({"versions": np.array([0, 7], np.int32)}, "future"),
        ({"versions": np.array([-1, 0], np.int32)}, "future"),
    ],
)
def test_a_damaged_trajectory_is_refused_and_its_member_played_again(changes: dict[str, Any], detail: str) -> None:
    """Nothing of it reaches the learner."""
    buffer = open_buffer()
    (lease,) = buffer.grant("a", "a1", 1, 0.0)
    status, found = buffer.submit(damaged(lease, **changes), 0.0)
    assert status == "refused" and detail in found
    assert buffer.buffered == 0 and balanced(buffer)
    (again,) = buffer.grant("a", "a1", 1, 0.0)
    assert (again.group_id, again.member) == (lease.group_id, lease.member)


def test_a_later_turn_may_open_a_context_but_not_without_a_prompt() -> None:
    """The windowed layout; a turn that continues its context may add nothing."""
    buffer = open_buffer()
    first, second = buffer.grant("a", "a1", 2, 0.0)
    opening = make_turn([0, 0], opening=OPENING)
    bad = [opening, make_turn([0], opening=OPENING, prompt=())]
    assert buffer.submit(make_trajectory(first, "a1", bad), 0.0) == (
        "refused",
        "a turn opens a context without a prompt",
    )
    good = [opening, make_turn([0], opening=OPENING), make_turn([0], prompt=())]
    assert buffer.submit(make_trajectory(second, "a1", good), 0.0)[0] == "accepted"


@pytest.mark.parametrize(
    "changes",
    [
        {"texts": ()},
        {"episode_return": float("nan")},
        {"ended_at_s": float("inf")},
        {"member": 1},
        {"group_id": "g7"},
        {"group_id": "g1"},
    ],
)
def test_a_trajectory_that_contradicts_its_lease_is_refused(changes: dict[str, Any]) -> None:
    """It must not end the buffer or take another member's place."""
    buffer = open_buffer()
    lease, *_ = buffer.grant("a", "a1", 4, 0.0)
    assert buffer.submit(make_trajectory(lease, "a1", **changes), 0.0)[0] == "refused"
    assert balanced(buffer)


def test_a_lease_of_nobody_or_of_another_incarnation_is_fenced() -> None:
    """Of an earlier run, for instance; the holder keeps it."""
    buffer = open_buffer()
    (lease,) = buffer.grant("a", "a1", 1, 0.0)
    assert buffer.submit(make_trajectory(make_lease(99), "a1"), 0.0)[0] == "fenced"
    assert buffer.submit(make_trajectory(lease, "a0"), 0.0)[0] == "fenced"
    assert not buffer.fail(lease.lease_id, "a0")
    assert buffer.running == 1 and buffer.accounting()["fenced"] == 3


# Skills ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["grpo", "gigpo"])
def test_without_a_teacher_nothing_is_analysed_and_nothing_waited_for(method: str) -> None:
    """The batch is ready as soon as its groups are."""
    buffer = open_buffer(method=method)
    play(buffer, buffer.grant("a", "a1", 4, 0.0))
    assert buffer.claim_analyses(9, 0.0) == () and buffer.analysis_backlog == 0
    assert {(sample.skill, sample.skill_reason) for sample in buffer.take_batch(0)} == {(None, "method")}


def test_a_library_skill_is_there_at_once_and_a_missing_one_is_counted() -> None:
    """By task type; no weights wrote it."""
    buffer = open_buffer(method="sdar", library=SkillLibrary("s.md", {"find": "look first"}))
    leases = buffer.grant("a", "a1", 4, 0.0)
    play(buffer, leases[:3])
    assert buffer.submit(make_trajectory(leases[3], "a1", task_type="clean"), 0.0)[0] == "accepted"
    assert buffer.claim_analyses(9, 0.0) == ()
    *known, unknown = buffer.take_batch(0)
    assert all(sample.skill == Skill(episode_summary="", episode_skill="look first", version=-1) for sample in known)
    assert (unknown.skill, unknown.skill_reason) == (None, "no_entry")
    assert buffer.accounting()["skills_missing"] == 1 and balanced(buffer)


@pytest.mark.parametrize("method", ["seed", "seed_static", "opid", "opsd"])
def test_a_hindsight_method_waits_for_the_analysis(method: str) -> None:
    """Also opsd, whose library is for failed analyses only."""
    buffer = open_buffer(method=method, library=SkillLibrary("s.md", {"find": "look first"}))
    play(buffer, buffer.grant("a", "a1", 4, 0.0))
    assert buffer.take_batch(0) == ()
    analyse_all(buffer)
    assert len(buffer.take_batch(0)) == 4


def test_an_unanswered_claim_is_offered_again_in_order_and_the_first_answer_counts() -> None:
    """Also the answer of the slow analyzer whose claim was taken back, whether or not it is claimed anew."""
    buffer = open_buffer()
    trajectories = play(buffer, buffer.grant("a", "a1", 4, 0.0))
    assert list(buffer.claim_analyses(4, 0.0)) == trajectories
    assert buffer.claim_analyses(4, 10.0) == ()
    assert list(buffer.claim_analyses(1, 10.1)) == trajectories[:1]
    for trajectory in trajectories[:2]:
        assert buffer.add_skill(skill_for(trajectory)) == "accepted"
        assert buffer.add_skill(skill_for(trajectory)) == "refused"
    assert list(buffer.claim_analyses(4, 10.2)) == trajectories[2:]
    assert buffer.accounting()["skills"] == {"parsed": 2, "unparsed": 0, "timeout": 0, "late": 2}


def test_a_skill_that_comes_too_late_is_given_up_and_counted() -> None:
    """The group goes on without it, and no analyzer is asked any more."""
    buffer = open_buffer()
    trajectories = play(buffer, buffer.grant("a", "a1", 4, 0.0))
    buffer.claim_analyses(2, 0.0)
    assert buffer.take_batch(0) == ()
    buffer.expire(20.5)
    assert buffer.claim_analyses(4, 20.5) == () and buffer.analysis_backlog == 0
    assert buffer.add_skill(skill_for(trajectories[0])) == "refused"
    batch = buffer.take_batch(0)
    assert [sample.skill_reason for sample in batch] == ["timeout"] * 4
    assert buffer.accounting()["skills"] == {"parsed": 0, "unparsed": 0, "timeout": 4, "late": 1}


def test_a_skill_and_the_reason_for_none_reach_the_learner() -> None:
    """Each with its own trajectory."""
    buffer = open_buffer()
    play(buffer, buffer.grant("a", "a1", 4, 0.0))
    answers = [("look", ""), (None, ""), (None, "too_long"), ("put", "")]
    for trajectory, (text, reason) in zip(buffer.claim_analyses(9, 0.0), answers, strict=True):
        buffer.add_skill(skill_for(trajectory, text, reason))
    samples = buffer.take_batch(0)
    assert [sample.skill and sample.skill.episode_skill for sample in samples] == ["look", None, None, "put"]
    assert [sample.skill_reason for sample in samples] == ["", "unparsed", "too_long", ""]


def test_the_analysis_queue_does_not_grow_without_analyzers() -> None:
    """Everything that is trained or given up leaves it."""
    buffer = open_buffer()
    for version in range(20):
        buffer.advance(version)
        play(buffer, buffer.grant("a", "a1", 4, 100.0 * version), version, 100.0 * version)
        buffer.expire(100.0 * version + 50)
        assert len(buffer.take_batch(version)) == 4
        assert buffer.analysis_backlog == 0


# Batches ---------------------------------------------------------------------------------------------------------


def test_a_batch_takes_the_groups_that_completed_first_in_the_order_of_their_opening() -> None:
    """The others stay for the next batch; what is trained does not depend on who was faster within one."""
    buffer = open_buffer()
    leases = buffer.grant("a", "a1", 8, 0.0)
    play(buffer, (leases[4], leases[5], leases[1], leases[0], leases[3], leases[2], leases[6]))
    assert buffer.take_batch(0) == ()
    analyse_all(buffer)
    batch = buffer.take_batch(0)
    wanted = [leases[0], leases[1], leases[4], leases[5]]
    assert [sample.trajectory.lease_id for sample in batch] == [lease.lease_id for lease in wanted]
    assert buffer.take_batch(1) == ()
    play(buffer, (leases[7],))
    analyse_all(buffer)
    assert len(buffer.take_batch(1)) == 4
    assert buffer.accounting()["ages"] == {"0": 4, "1": 4}


def test_a_group_with_one_stale_member_is_dropped_whole_and_its_place_returns() -> None:
    """The age counts from the oldest token; the siblings are counted apart."""
    fates: Fates = []
    buffer = open_buffer(version=2, fates=fates)
    leases = buffer.grant("a", "a1", 4, 0.0)
    old = make_trajectory(leases[0], "a1", [make_turn([2, 2]), make_turn([0, 2])])
    buffer.submit(old, 0.0)
    play(buffer, leases[1:], version=2)
    analyse_all(buffer)
    admitted = len(buffer.grant("a", "a1", 1000, 0.0)) // 2 + 2
    assert buffer.take_batch(2) == ()
    assert buffer.accounting()["dropped"] == {"stale": 1, "stale_group": 1}
    assert dict(fates) == {old.trajectory_id: "stale", f"{leases[1].lease_id}-a1": "stale_group"}
    assert admitted == 4 and len(buffer.grant("a", "a1", 1000, 0.0)) == 2
    assert balanced(buffer)


def test_closing_reports_what_was_never_used() -> None:
    """Every accepted trajectory has exactly one fate."""
    fates: Fates = []
    buffer = open_buffer(fates=fates)
    play(buffer, buffer.grant("a", "a1", 6, 0.0))
    analyse_all(buffer)
    buffer.take_batch(0)
    buffer.close()
    assert Counter(fate for _, fate in fates) == {"trained": 4, "unused": 2}
    assert len({trajectory_id for trajectory_id, _ in fates}) == 6


# Anything in any order -------------------------------------------------------------------------------------------

ACTORS = ("a", "b", "c")


class BufferMachine(RuleBasedStateMachine):
    """Actors that die, analyzers that forget, a learner that advances, and a clock."""

    @initialize(
        group_size=st.integers(1, 3),
        groups=st.integers(1, 2),
        staleness=st.integers(0, 2),
        skills=st.booleans(),
        max_tries=st.integers(1, 2),
    )
    def start(self, group_size: int, groups: int, staleness: int, skills: bool, max_tries: int) -> None:
        """Choose a topology; the actors come up."""
        self.topology = small_topology(
            rollout={"groups_per_update": groups, "group_size": group_size},
            staleness={"max": staleness},
            loss={"divide_by_std": group_size > 1},
            method="seed" if skills else "grpo",
            buffer={"lease_timeout_s": 10, "max_tries": max_tries},
        )
        self.entries: list[Entry] = []
        self.buffer = GroupBuffer(self.topology, VOCABULARY_SIZE, self.note_fate, note=self.note_entry)
        self.now_s = 0.0
        self.published = -1  # the newest version that a policy server may serve
        self.incarnations: dict[str, str] = {}
        self.progress = 0
        self.leases: list[tuple[Lease, str]] = []  # all that were ever granted
        self.submitted: list[Trajectory] = []
        self.claimed: list[Trajectory] = []
        self.fates: dict[str, Fate] = {}
        self.tasks: dict[str, int] = {}
        for number, actor in enumerate(ACTORS):
            self.hello(actor, number)

    def note_fate(self, sample: Sample, fate: Fate, version: int, age: int) -> None:
        """Each trajectory has one fate; a trained one is young enough."""
        trajectory_id = sample.trajectory.trajectory_id
        assert trajectory_id not in self.fates, "a second fate"
        self.fates[trajectory_id] = fate
        assert fate != "trained" or 0 <= age <= self.topology.staleness.max

    @rule(actor=st.sampled_from(ACTORS), number=st.integers(0, 10**6))
    def hello(self, actor: str, number: int) -> None:
        """An actor starts, or starts again after its death."""
        self.incarnations[actor] = f"{actor}{number}"
        self.buffer.hello(actor, self.incarnations[actor], 40, "digest")

    def live(self) -> list[tuple[Lease, str]]:
        """The leases that actors hold."""
        return [(held.lease, held.incarnation) for held in self.buffer._held.values()]

    @rule(actor=st.sampled_from(ACTORS), slots=st.integers(1, 6))
    def grant(self, actor: str, slots: int) -> None:
        """Leases are new, of known incarnations, and every member of a group plays one task."""
        incarnation = self.incarnations.get(actor, "nobody")
        leases = self.buffer.grant(actor, incarnation, slots, self.now_s)
        assert len(leases) <= slots and (incarnation != "nobody" or not leases)
        for lease in leases:
            assert lease.lease_id not in {known.lease_id for known, _ in self.leases}
            assert self.tasks.setdefault(lease.group_id, lease.task_index) == lease.task_index
            self.leases.append((lease, incarnation))

    @precondition(lambda self: self.buffer.running)
    @rule(data=st.data(), number=st.integers(1, 4), age=st.sampled_from([0, 0, 0, 1, 2, 3]))
    def finish_episodes(self, data: st.DataObject, number: int, age: int) -> None:
        """Some episodes in play end, with their oldest token `age` versions behind."""
        for lease, incarnation in data.draw(st.permutations(self.live()))[:number]:
            versions = sorted({max(0, self.published - age), max(0, self.published)})
            self.submit(make_trajectory(lease, incarnation, [make_turn(versions)]))

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def submit_late(self, data: st.DataObject) -> None:
        """A trajectory for any lease ever granted: what a dead or slow incarnation still sends."""
        lease, incarnation = data.draw(st.sampled_from(self.leases))
        self.submit(make_trajectory(lease, incarnation, version=max(0, self.published)))

    def submit(self, trajectory: Trajectory) -> None:
        """Only the incarnation that lives is listened to."""
        incarnation = trajectory.incarnation
        status, _ = self.buffer.submit(trajectory, self.now_s)
        assert status in ("accepted", "duplicate", "fenced")
        if status == "accepted":
            assert self.incarnations[lease_actor(incarnation)] == incarnation, "a dead incarnation was not fenced"
            self.submitted.append(trajectory)

    @precondition(lambda self: self.submitted)
    @rule(data=st.data())
    def resend(self, data: st.DataObject) -> None:
        """At-least-once delivery: the second copy changes nothing."""
        before = self.buffer.accounting()["accepted"]
        assert self.buffer.submit(data.draw(st.sampled_from(self.submitted)), self.now_s)[0] == "duplicate"
        assert self.buffer.accounting()["accepted"] == before

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def fail(self, data: st.DataObject) -> None:
        """An episode fails, or an old failure arrives late."""
        lease, incarnation = data.draw(st.sampled_from(self.live() or self.leases))
        self.buffer.fail(lease.lease_id, incarnation)

    @rule(actor=st.sampled_from(ACTORS), steps=st.integers(0, 3))
    def beat(self, actor: str, steps: int) -> None:
        """With or without progress."""
        self.progress += steps
        self.buffer.beat(self.incarnations.get(actor, "nobody"), self.progress, self.now_s)

    @rule(seconds=st.floats(0.1, 15))
    def expire(self, seconds: float) -> None:
        """Time passes."""
        self.now_s += seconds
        self.buffer.expire(self.now_s)

    @rule(jobs=st.integers(1, 4))
    def claim(self, jobs: int) -> None:
        """An analyzer takes jobs, and may die with them."""
        claimed = self.buffer.claim_analyses(jobs, self.now_s)
        assert len(claimed) <= jobs
        assert all(trajectory.trajectory_id not in self.fates for trajectory in claimed)
        self.claimed += claimed

    @precondition(lambda self: self.claimed)
    @rule(data=st.data(), text=st.sampled_from(["look", None]))
    def answer(self, data: st.DataObject, text: str | None) -> None:
        """A skill comes, also late or twice."""
        self.buffer.add_skill(skill_for(data.draw(st.sampled_from(self.claimed)), text))

    @rule()
    def answer_everything(self) -> None:
        """A fast analyzer."""
        for trajectory in self.buffer.claim_analyses(1000, self.now_s):
            self.claimed.append(trajectory)
            assert self.buffer.add_skill(skill_for(trajectory)) == "accepted"

    @rule()
    def publish(self) -> None:
        """The next version reaches a policy server before the learner hears of it."""
        if self.published == self.buffer.version:
            self.published += 1

    @rule()
    def train(self) -> None:
        """The learner asks for its batch, which acknowledges the published version, and updates at once."""
        if self.published < 0:
            return
        self.buffer.advance(self.published)
        batch = self.buffer.take_batch(self.published)
        if not batch:
            return
        groups: dict[str, list[Sample]] = defaultdict(list)
        for sample in batch:
            groups[sample.trajectory.group_id].append(sample)
            assert self.fates[sample.trajectory.trajectory_id] == "trained"
            assert sample.skill is not None or sample.skill_reason
        assert len(groups) == self.topology.rollout.groups_per_update
        for members in groups.values():
            assert [each.trajectory.member for each in members] == list(range(self.topology.rollout.group_size))
            assert len({each.trajectory.task_id for each in members}) == 1
        self.published += 1

    @invariant()
    def everything_adds_up(self) -> None:
        """The accounting, the record of fates and the admission gate, after every step."""
        if not hasattr(self, "buffer"):
            return
        accounting: dict[str, Any] = self.buffer.accounting()
        assert accounting["balance_ok"], accounting
        fates = Counter(self.fates.values())
        assert accounting["accepted"] == len({each.trajectory_id for each in self.submitted})
        assert accounting["accepted"] == len(self.fates) + accounting["buffered"]
        assert accounting["trained"] == fates["trained"]
        assert accounting["dropped"] == {fate: number for fate, number in fates.items() if fate != "trained"}
        ahead = (self.topology.staleness.max + 1) * self.topology.rollout.groups_per_update
        assert len(self.buffer._groups) <= ahead
        assert self.buffer.groups_admitted <= ahead + self.buffer.version * self.topology.rollout.groups_per_update
        assert self.buffer._held_bytes >= 0 and (self.buffer._held_bytes > 0) == (self.buffer.buffered > 0)
        unresolved = sum(not each.resolved for group in self.buffer._groups.values() for each in group.members.values())
        assert self.buffer.analysis_backlog == unresolved

    def note_entry(self, event: Event, **fields: Any) -> None:
        """Keep the journal."""
        self.entries.append(Entry(event, self.now_s, **fields))

    def journal_passes_the_audit(self) -> None:
        """What the journal says alone keeps every promise, and agrees with the accounting."""
        audit, _ = replay(self.entries, self.topology)
        assert audit.passed, audit.faults
        accounting: dict[str, Any] = self.buffer.accounting()
        for count in ("accepted", "trained", "duplicate", "fenced", "refused"):
            assert audit.counts[count] == accounting[count]
        assert audit.dropped == accounting["dropped"]
        assert (audit.counts["held"], audit.counts["running"]) == (accounting["buffered"], self.buffer.running)

    def teardown(self) -> None:
        """No group is stranded: when everything is played and answered, every group ends and batches flow again."""
        if not hasattr(self, "buffer") or len(self.buffer._tasks.quarantined) > 20:
            return
        self.published = max(self.published, 0)
        self.buffer.advance(self.published)
        self.buffer.hello("last", "last1", 40, "digest")
        updates = 0
        for _ in range(60):
            self.now_s += 25  # longer than a lease and than an analysis may take
            self.buffer.expire(self.now_s)
            for lease in self.buffer.grant("last", "last1", 1000, self.now_s):
                trajectory = make_trajectory(lease, "last1", version=self.published)
                assert self.buffer.submit(trajectory, self.now_s)[0] == "accepted"
                self.submitted.append(trajectory)
            for trajectory in self.buffer.claim_analyses(1000, self.now_s):
                assert self.buffer.add_skill(skill_for(trajectory)) == "accepted"
            while self.buffer.take_batch(self.published):
                updates += 1
                self.published += 1
                self.buffer.advance(self.published)
            self.everything_adds_up()
            if updates >= 8:
                return self.journal_passes_the_audit()
        raise AssertionError(f"only {updates} updates: a group is stranded")


def lease_actor(incarnation: str) -> str:
    """The actor of an incarnation of the machine."""
    return incarnation[0]


BufferMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=50, deadline=None)
TestBufferMachine = BufferMachine.TestCase


def test_a_skill_result_of_a_stranger_is_late() -> None:
    """An id that was never handed out."""
    skill = Skill(episode_summary="", episode_skill="x", version=0)
    result = SkillResult(analyzer="x", trajectory_id="no", skill=skill, output="", version=0)
    assert open_buffer().add_skill(result) == "refused"


def test_a_superseded_incarnation_is_told_so() -> None:
    """It would otherwise ask for leases for ever."""
    buffer = open_buffer()
    assert not buffer.is_superseded("actor-0", "i1")  # said hello already, or has yet to
    buffer.hello("actor-0", "i2", 50, "digest")
    assert buffer.is_superseded("actor-0", "i1") and not buffer.is_superseded("actor-0", "i2")


def test_a_learner_that_starts_again_gets_the_batch_that_it_had_not_published() -> None:
    """The same samples, counted once; a later version says that they are done."""
    fates: Fates = []
    buffer = open_buffer(fates=fates, method="grpo")
    play(buffer, buffer.grant("a", "a1", 8, 0.0))
    batch = buffer.take_batch(0)
    assert buffer.take_batch(0) == batch and len(fates) == 4
    assert len(buffer.take_batch(1)) == 4 and len(fates) == 8
    assert buffer.accounting()["balance_ok"]


def test_versions_without_a_batch_of_their_own_free_no_places() -> None:
    """A learner that went back to a checkpoint publishes it under the next number."""
    buffer = open_buffer(method="grpo")
    buffer.grant("a", "a1", 1000, 0.0)
    buffer.advance(1)
    assert buffer.grant("a", "a1", 1000, 0.0) == ()
