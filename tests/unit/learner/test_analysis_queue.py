"""The queue of trajectories for the analyzers: who gets which, when a claim is taken back, whose answer counts."""

from seed_async.learner.analysis_queue import AnalysisQueue
from seed_async.learner.groups import Member
from seed_async.messages import Sample
from tests.fakes.episodes import make_lease, make_trajectory

RETRY_S = 10.0


def make_member(number: int) -> Member:
    """A finished member whose skill is not there yet."""
    trajectory = make_trajectory(make_lease(number), "a1")
    return Member(
        trajectory=trajectory,
        num_bytes=1,
        oldest_version=0,
        arrived_at_s=0.0,
        sample=Sample(trajectory=trajectory, skill=None, skill_reason=""),
        resolved=False,
    )


def queue_of(size: int) -> tuple[AnalysisQueue, list[Member]]:
    """A queue with members that came one after the other."""
    queue, members = AnalysisQueue(), [make_member(number) for number in range(size)]
    for member in members:
        queue.add(member)
    return queue, members


def claim(queue: AnalysisQueue, max_jobs: int, now_s: float) -> list[str]:
    """The leases whose trajectories an analyzer gets."""
    return [trajectory.lease_id for trajectory in queue.claim(max_jobs, RETRY_S, now_s)]


def test_trajectories_are_claimed_once_oldest_first() -> None:
    """Two analyzers never get the same one; those with an analyzer still count."""
    queue, _ = queue_of(4)
    assert claim(queue, 3, 0.0) == ["l0", "l1", "l2"]
    assert claim(queue, 3, 0.0) == ["l3"]
    assert claim(queue, 3, 0.0) == [] and len(queue) == 4


def test_a_claim_without_an_answer_is_offered_again_before_all_others() -> None:
    """Only after the retry time, which starts anew with each claim."""
    queue, _ = queue_of(4)
    assert claim(queue, 2, 0.0) == ["l0", "l1"]
    assert claim(queue, 1, RETRY_S) == ["l2"]
    assert claim(queue, 1, RETRY_S + 0.1) == ["l0"]
    assert claim(queue, 9, RETRY_S + 0.2) == ["l1", "l3"]
    assert claim(queue, 9, 2 * RETRY_S) == []
    assert claim(queue, 9, 3 * RETRY_S) == ["l2", "l0", "l1", "l3"]
    assert len(queue) == 4


def test_a_member_is_found_until_its_wait_ends_also_after_its_claim_was_taken_back() -> None:
    """The answer of the slow analyzer counts, whether or not it is claimed anew."""
    queue, (again, back, waiting) = queue_of(3)
    ids = [member.trajectory.trajectory_id for member in (again, back, waiting)]
    claim(queue, 2, 0.0)
    assert claim(queue, 1, RETRY_S + 0.1) == ["l0"]
    assert [queue.find(key) for key in ids] == [again, back, waiting]
    assert queue.find("of a stranger") is None


def test_who_waits_no_more_is_neither_found_nor_claimed() -> None:
    """Claimed, taken back, waiting, or ended already."""
    queue, (again, back, waiting, left) = queue_of(4)
    claim(queue, 2, 0.0)
    claim(queue, 1, RETRY_S + 0.1)
    for member in (again, back, waiting, waiting):
        queue.end(member)
        assert queue.find(member.trajectory.trajectory_id) is None
    assert len(queue) == 1
    assert claim(queue, 9, 5 * RETRY_S) == ["l3"]
    queue.end(left)
    assert len(queue) == 0 and claim(queue, 9, 9 * RETRY_S) == []
