"""The replay-free on-policy buffer: leases for the members of groups, finished trajectories, their skills, batches.

Pure state, no sockets, no threads: `buffer_server` owns one and passes the time in. A group is N members of one game;
each member is a lease that one actor incarnation holds. A group is handed to the learner whole and once, or dropped
whole with its reason; nothing is ever trained twice.
"""

from collections import OrderedDict, deque
from dataclasses import dataclass
from hashlib import blake2b
from itertools import count
from typing import Literal

from seed_async.journal import Note
from seed_async.learner.analysis_queue import AnalysisQueue
from seed_async.learner.buffer_intake import trajectory_bytes, trajectory_fault
from seed_async.learner.groups import Group, Member, choose_groups
from seed_async.learner.ledger import Ledger, OnFate
from seed_async.learner.recovery import MAX_REMEMBERED_IDS, Recovered
from seed_async.learner.task_order import TaskOrder
from seed_async.messages import AckStatus, Lease, Sample, Skill, SkillResult, Trajectory
from seed_async.skill_library import SkillLibrary
from seed_async.staleness import StalenessBound
from seed_async.topology import Topology


class TaskListMismatchError(RuntimeError):
    """Two actors see different training splits, so a task index would not name one game."""


class NoTasksLeftError(RuntimeError):
    """No task can be played: the split is empty, or the games of all tasks failed; waiting would never end."""


@dataclass
class _Held:
    """A lease in the hands of an actor incarnation; `renewed_at_s` is its last sign of progress."""

    lease: Lease
    actor: str
    incarnation: str
    renewed_at_s: float


class GroupBuffer:
    """Leases, groups, skills and batches of one run (see the module's docstring)."""

    def __init__(
        self,
        topology: Topology,
        vocabulary_size: int,
        on_fate: OnFate = lambda *_: None,
        library: SkillLibrary | None = None,
        note: Note = lambda event, **_: None,
        recovered: Recovered | None = None,
    ) -> None:
        """Nothing is granted yet; `library` has the skills of a method that takes them from one.

        With `recovered` it goes on where a dead buffer's journal ends: see `recovery`.

        `on_fate(sample, fate, version, age)` is called once for each accepted trajectory, when its fate is known;
        `note` takes the entries of the provenance journal.
        """
        self._topology, self._library = topology, library
        self._vocabulary_size = vocabulary_size
        self._bound = StalenessBound(topology.staleness.max, topology.rollout.groups_per_update)
        self._tasks_digest = ""
        before = recovered or Recovered()
        self._note, self._ledger = note, Ledger(self._bound, on_fate, note, before)
        self._tasks = TaskOrder(topology.run.seed, before.cursor, before.replay, before.quarantined)
        self._group_numbers = count(before.num_groups)
        self._lease_numbers = count(before.counts["leased"])
        self._groups: OrderedDict[str, Group] = OrderedDict()
        self._vacant: deque[tuple[str, int]] = deque()
        self._held: dict[str, _Held] = {}
        self._incarnations: dict[str, str] = {}
        self._progress: dict[str, int] = {}
        self._complete: deque[str] = deque()
        self._analyses = AnalysisQueue()
        self._seen: OrderedDict[str, None] = OrderedDict.fromkeys(before.accepted_ids)
        self._last_taken = before.last_taken
        self._in_doubt = tuple(before.handed_out)
        self._handed_out: tuple[Sample, ...] = ()
        self._held_bytes = 0
        self._expected = -1
        self.version = -1
        if recovered is not None:
            self._ledger.reopen(recovered)

    # Actors ----------------------------------------------------------------------------------------------------

    def hello(self, actor: str, incarnation: str, num_tasks: int, tasks_digest: str) -> None:
        """Register an incarnation; the leases of its predecessor return. Raises TaskListMismatchError."""
        if not num_tasks:
            raise NoTasksLeftError(f"{actor} sees no training task")
        if self._tasks.num_tasks and tasks_digest != self._tasks_digest:
            raise TaskListMismatchError(f"{actor} sees other training tasks than the actors before it")
        if not self._tasks.num_tasks:
            self._tasks.num_tasks, self._tasks_digest = num_tasks, tasks_digest
        self._progress.pop(self._incarnations.get(actor, ""), None)
        self._incarnations[actor] = incarnation
        self._progress[incarnation] = -1
        for lease_id in [
            key for key, held in self._held.items() if held.actor == actor and held.incarnation != incarnation
        ]:
            self._return(lease_id, "returned", "a new incarnation said hello")

    def knows(self, actor: str) -> bool:
        """Whether some incarnation of the actor has said hello."""
        return actor in self._incarnations

    def is_superseded(self, actor: str, incarnation: str) -> bool:
        """Whether a later incarnation of the actor has said hello: this one gets no lease any more and must end."""
        return self._incarnations.get(actor, incarnation) != incarnation

    def beat(self, incarnation: str, progress: int, now_s: float) -> None:
        """Renew the leases of an incarnation that made progress since its last beat."""
        if progress <= self._progress.get(incarnation, progress):
            return
        self._progress[incarnation] = progress
        for held in self._held.values():
            if held.incarnation == incarnation:
                held.renewed_at_s = now_s

    def grant(self, actor: str, incarnation: str, slots: int, now_s: float) -> tuple[Lease, ...]:
        """Lease up to `slots` members: returned ones first, then members of new groups while admission allows.

        Raises NoTasksLeftError.
        """
        if self._incarnations.get(actor) != incarnation:
            return ()
        leases: list[Lease] = []
        while len(leases) < slots and (self._vacant or self._open_group()):
            group_id, member = self._vacant.popleft()
            group = self._groups[group_id]
            group.leased_at[member] = self.version
            number = next(self._lease_numbers)
            lease = Lease(
                lease_id=f"l{number}",
                group_id=group_id,
                member=member,
                task_index=group.task_index,
                seed=self._seed(group, member),
            )
            self._held[lease.lease_id] = _Held(lease, actor, incarnation, now_s)
            self._ledger.book(
                "leased",
                lease=lease.lease_id,
                group=group_id,
                member=member,
                task=group.task_index,
                incarnation=incarnation,
            )
            leases.append(lease)
        return tuple(leases)

    def submit(self, trajectory: Trajectory, now_s: float) -> tuple[AckStatus, str]:
        """Take over a finished trajectory; returns its status and, for a refusal, what is wrong with it."""
        if trajectory.trajectory_id in self._seen:
            self._ledger.book("duplicate", trajectory=trajectory.trajectory_id)
            return "duplicate", ""
        held = self._held.get(trajectory.lease_id)
        if held is None or held.incarnation != trajectory.incarnation:
            self._ledger.book("fenced", lease=trajectory.lease_id, trajectory=trajectory.trajectory_id)
            return "fenced", "the lease is no longer held by this incarnation"
        # A policy server may serve the next version before the learner has heard of all acknowledgements.
        newest = max(self.version + 1, self._expected)
        fault = trajectory_fault(trajectory, newest, self._vocabulary_size)
        if (trajectory.group_id, trajectory.member) != (held.lease.group_id, held.lease.member):
            fault = "another group or member than the lease's"
        if fault:
            self._ledger.book("refused", lease=trajectory.lease_id, trajectory=trajectory.trajectory_id, reason=fault)
            self._return(trajectory.lease_id, "failed", "its result was refused")
            return "refused", fault
        self._seen[trajectory.trajectory_id] = None
        if len(self._seen) > MAX_REMEMBERED_IDS:
            self._seen.popitem(last=False)
        del self._held[trajectory.lease_id]
        self._accept(trajectory, now_s)
        return "accepted", ""

    def fail(self, lease_id: str, incarnation: str, reason: str = "") -> bool:
        """Return a lease whose episode failed; False when the incarnation does not hold it."""
        held = self._held.get(lease_id)
        if held is None or held.incarnation != incarnation:
            self._ledger.book("fenced", lease=lease_id)
            return False
        self._return(lease_id, "failed", reason)
        return True

    def expire(self, now_s: float) -> None:
        """Return leases without progress, re-queue claims of dead analyzers, give up skills that come too late."""
        timeout_s = self._topology.buffer.lease_timeout_s
        for lease_id in [key for key, held in self._held.items() if now_s - held.renewed_at_s > timeout_s]:
            self._return(lease_id, "returned", "no progress")
        for group in self._groups.values():
            for member in group.members.values():
                if not member.resolved and now_s - member.arrived_at_s > self._topology.analysis.timeout_s:
                    self._ledger.count("skill_timeout")
                    self._resolve(member, Sample(trajectory=member.trajectory, skill=None, skill_reason="timeout"))

    # Analyzers -------------------------------------------------------------------------------------------------

    def claim_analyses(self, max_jobs: int, now_s: float) -> tuple[Trajectory, ...]:
        """Hand out trajectories to analyse, oldest first; see `AnalysisQueue`."""
        return self._analyses.claim(max_jobs, self._topology.analysis.timeout_s / 2, now_s)

    def add_skill(self, result: SkillResult) -> AckStatus:
        """Attach a skill, or the reason why there is none, to its trajectory; a late one is refused."""
        member = self._analyses.find(result.trajectory_id)
        if member is None:
            self._ledger.count("skill_late")
            self._note("late", trajectory=result.trajectory_id)
            return "refused"
        self._ledger.count("skill_parsed" if result.skill else "skill_unparsed")
        reason = "" if result.skill else (result.reason or "unparsed")
        self._resolve(member, Sample(trajectory=member.trajectory, skill=result.skill, skill_reason=reason))
        return "accepted"

    # Learner ---------------------------------------------------------------------------------------------------

    def expect(self, version: int) -> None:
        """Note that a learner begins with `version`: policy servers may serve it from now on."""
        self._expected = max(self._expected, version)

    def advance(self, version: int) -> None:
        """Note that `version` is acknowledged by the policy servers; admission opens accordingly."""
        self.version = max(self.version, version)
        # Versions that came without a batch of their own (a learner went back to a checkpoint) free no places.
        self._last_taken = max(self._last_taken, version - 1)

    def take_batch(self, version: int) -> tuple[Sample, ...]:
        """Return complete groups for the update from `version`, in the order in which they were opened.

        () while there are too few of them, or while `on_stale: wait` holds the learner. They are taken in the order of
        their completion; their order in the batch does not depend on who was faster. A learner that starts again before
        it has published gets the batch that it was given before; nobody else can ask twice.
        """
        if version == self._last_taken and self._handed_out:
            return self._handed_out
        self._settle_doubt(version)
        # Asking for this one says that all before are done, or lost with a learner: their places are used up or free.
        self._last_taken, self._handed_out = version - 1, ()
        choice = choose_groups(
            self._groups,
            self._complete,
            self._bound,
            self._topology.staleness.on_stale,
            version=version,
            present_version=self.version,
        )
        for key in choice.stale:
            self._drop_stale(self._groups[key], version)
        samples: list[Sample] = []
        trained_tokens = 0
        for group in [group for key, group in self._groups.items() if key in choice.chosen]:
            for member in group.in_order:
                trained_tokens += self._ledger.hand_out(member.sample, version)
                samples.append(member.sample)
            self._forget(group)
        if not samples:
            return ()
        self._ledger.count("masked_batches", by=not trained_tokens)
        self._last_taken, self._handed_out = version, tuple(samples)
        return self._handed_out

    # Accounting ------------------------------------------------------------------------------------------------

    @property
    def running(self) -> int:
        """Leases in the hands of actors."""
        return len(self._held)

    @property
    def groups_admitted(self) -> int:
        """Groups handed out, by the version of the last batch, and those that are open."""
        return (self._last_taken + 1) * self._bound.groups_per_update + len(self._groups)

    @property
    def buffered(self) -> int:
        """Accepted trajectories whose fate is still open."""
        return sum(len(group.members) for group in self._groups.values())

    @property
    def analysis_backlog(self) -> int:
        """Trajectories that wait for an analyzer or are with one."""
        return len(self._analyses)

    def accounting(self) -> dict[str, object]:
        """Every count of the run, and whether they add up: no trajectory and no lease is lost or counted twice."""
        return self._ledger.report(self.running, self.buffered, self._tasks.quarantined)

    def close(self) -> None:
        """Report the fate of what was never used."""
        for group in self._groups.values():
            for member in group.members.values():
                self._ledger.leave(member.sample, self.version)

    # Internals -------------------------------------------------------------------------------------------------

    def _settle_doubt(self, version: int) -> None:
        """Name what is lost: a learner that asks for the same update again never had the batch of the buffer before."""
        if version == self._last_taken:
            for trajectory in self._in_doubt:
                self._ledger.book("lost", trajectory=trajectory, version=version, reason="restart")
        self._in_doubt = ()

    def _seed(self, group: Group, member: int) -> int:
        """The seed of a member's sampling: the same when a lease comes back, another when its episode has failed."""
        place = f"{self._topology.run.seed} {group.group_id} {member} {group.tries[member]}"
        return int.from_bytes(blake2b(place.encode(), digest_size=4).digest(), "little")

    def _open_group(self) -> bool:
        # Over the limit, as many groups as a batch needs may still be open: with fewer the learner would wait for ever.
        enough = len(self._groups) >= self._bound.groups_per_update
        full = enough and self._held_bytes >= self._topology.buffer.max_bytes
        if full or not self._bound.may_open_group(self.version, self.groups_admitted):
            return False
        task_index = self._tasks.next()
        if task_index is None:
            tries = self._topology.buffer.max_tries
            raise NoTasksLeftError(f"all {self._tasks.num_tasks} training tasks failed {tries} times")
        group = Group(f"g{next(self._group_numbers)}", task_index, self._topology.rollout.group_size)
        self._groups[group.group_id] = group
        self._note("opened", group=group.group_id, task=task_index, cursor=self._tasks.cursor)
        self._vacant.extend((group.group_id, member) for member in range(group.size))
        return True

    def _accept(self, trajectory: Trajectory, now_s: float) -> None:
        group = self._groups[trajectory.group_id]
        wanted = self._topology.uses_analyzers
        sample = Sample(trajectory=trajectory, skill=None) if wanted else self._sample_without_analysis(trajectory)
        member = Member(
            trajectory=trajectory,
            num_bytes=trajectory_bytes(trajectory),
            oldest_version=trajectory.oldest_version,
            arrived_at_s=now_s,
            sample=sample,
            resolved=not wanted,
        )
        group.leased_at.pop(trajectory.member, None)
        group.members[trajectory.member] = member
        self._held_bytes += member.num_bytes
        self._ledger.accept(trajectory, "" if sample.skill_reason == "method" else sample.skill_reason)
        if wanted:
            self._analyses.add(member)
        if group.complete:
            self._complete.append(group.group_id)

    def _sample_without_analysis(self, trajectory: Trajectory) -> Sample:
        if self._topology.skill_source != "library" or self._library is None:
            return Sample(trajectory=trajectory, skill=None, skill_reason="method")
        text = self._library.skill(trajectory.task_type)
        if text is None:
            self._ledger.count("skill_missing")
            return Sample(trajectory=trajectory, skill=None, skill_reason="no_entry")
        return Sample(trajectory=trajectory, skill=Skill(episode_summary="", episode_skill=text, version=-1))

    def _return(self, lease_id: str, how: Literal["returned", "failed"], reason: str) -> None:
        held = self._held.pop(lease_id)
        self._ledger.book(how, lease=lease_id, reason=reason)
        group, member = self._groups[held.lease.group_id], held.lease.member
        group.leased_at.pop(member, None)
        group.tries[member] += how == "failed"
        if group.tries[member] >= self._topology.buffer.max_tries:
            self._drop_failed(group)
        else:
            self._vacant.appendleft((group.group_id, member))

    def _drop_failed(self, group: Group) -> None:
        self._tasks.quarantined.add(group.task_index)
        self._note("quarantined", group=group.group_id, task=group.task_index)
        for member in group.members.values():
            self._ledger.drop(member.sample, "failed_group", self.version)
        for lease_id in [key for key, held in self._held.items() if held.lease.group_id == group.group_id]:
            del self._held[lease_id]
            self._ledger.book("returned", lease=lease_id, reason="its group failed")
        self._vacant = deque(item for item in self._vacant if item[0] != group.group_id)
        self._forget(group)

    def _drop_stale(self, group: Group, version: int) -> None:
        for member in group.members.values():
            old = not self._bound.admits(version, member.oldest_version)
            self._ledger.drop(member.sample, "stale" if old else "stale_group", version)
        self._forget(group)

    def _resolve(self, member: Member, sample: Sample) -> None:
        self._note(
            "analysed",
            trajectory=member.trajectory.trajectory_id,
            reason=sample.skill_reason,
            version=sample.skill.version if sample.skill else -1,
        )
        member.sample, member.resolved = sample, True
        self._analyses.end(member)

    def _forget(self, group: Group) -> None:
        self._held_bytes -= group.num_bytes
        for member in group.members.values():
            self._analyses.end(member)
        if group.group_id in self._complete:
            self._complete.remove(group.group_id)
        del self._groups[group.group_id]
