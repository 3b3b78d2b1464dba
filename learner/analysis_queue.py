"""Which finished trajectories wait for an analyzer, and which are with one."""

from collections import OrderedDict

from seed_async.learner.groups import Member
from seed_async.messages import Trajectory


class AnalysisQueue:
    """Members whose skill is not there yet, oldest first, by trajectory id."""

    def __init__(self) -> None:
        """Nobody waits."""
        self._waiting: OrderedDict[str, Member] = OrderedDict()
        self._claimed: dict[str, tuple[Member, float]] = {}

    def __len__(self) -> int:
        """Members that wait or are with an analyzer."""
        return len(self._waiting) + len(self._claimed)

    def add(self, member: Member) -> None:
        """Let a member wait behind the others."""
        self._waiting[member.trajectory.trajectory_id] = member

    def claim(self, max_jobs: int, retry_s: float, now_s: float) -> tuple[Trajectory, ...]:
        """Hand out the oldest ones. A claim that stays unanswered for `retry_s` is offered again, before all others."""
        for trajectory_id, (member, claimed_at_s) in reversed(list(self._claimed.items())):
            if now_s - claimed_at_s > retry_s:
                del self._claimed[trajectory_id]
                self._waiting[trajectory_id] = member
                self._waiting.move_to_end(trajectory_id, last=False)
        jobs: list[Trajectory] = []
        while self._waiting and len(jobs) < max_jobs:
            trajectory_id, member = self._waiting.popitem(last=False)
            self._claimed[trajectory_id] = (member, now_s)
            jobs.append(member.trajectory)
        return tuple(jobs)

    def find(self, trajectory_id: str) -> Member | None:
        """The member of this id, if its skill is not there yet.

        Whoever answers first: a slow analyzer's answer counts although its claim was taken back.
        """
        if trajectory_id in self._claimed:
            return self._claimed[trajectory_id][0]
        return self._waiting.get(trajectory_id)

    def end(self, member: Member) -> None:
        """Wait for a member no more."""
        self._claimed.pop(member.trajectory.trajectory_id, None)
        self._waiting.pop(member.trajectory.trajectory_id, None)
