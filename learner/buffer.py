"""The replay-free on-policy buffer: leases for the members of groups, finished trajectories, their skills, batches.

Pure state, no sockets, no threads: `buffer_server` owns one and passes the time in. A group is N members of one game;
each member is a lease that one actor incarnation holds. A group is handed to the learner whole and once, or dropped
whole with its reason; nothing is ever trained twice.
"""

from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import count
from typing import Literal

import numpy as np

from seed_async.journal import Note
from seed_async.learner.buffer_intake import trajectory_bytes, trajectory_fault
from seed_async.learner.recovery import MAX_REMEMBERED_IDS, Recovered
from seed_async.learner.task_order import TaskOrder
from seed_async.messages import AckStatus, Lease, Sample, Skill, SkillResult, Trajectory
from seed_async.skill_library import SkillLibrary
from seed_async.staleness import StalenessBound
from seed_async.topology import Topology

Fate = Literal["trained", "stale", "stale_group", "failed_group", "unused"]
NO_TOKENS = np.zeros(0, dtype=np.int32)
NO_AGE = -1
"""Of a trajectory in a batch with all its tokens masked: it counts in the statistics of its group only."""


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


@dataclass
class _Member:
    """A finished member. `skill_reason` says why it has no skill; `resolved`: nothing more is waited for."""

    trajectory: Trajectory
    num_bytes: int
    oldest_version: int
    arrived_at_s: float
    sample: Sample
    resolved: bool
    claimed_at_s: float | None = None


@dataclass
class _Group:
    group_id: str
    task_index: int
    members: dict[int, _Member] = field(default_factory=dict)
    tries: Counter[int] = field(default_factory=Counter)
    leased_at: dict[int, int] = field(default_factory=dict)
    """The version under which each member in play was granted: none of its tokens will be older."""


class GroupBuffer:
    """Leases, groups, skills and batches of one run (see the module's docstring)."""

    def __init__(
        self,
        topology: Topology,
        vocabulary_size: int,
        on_fate: Callable[[Sample, Fate, int, int], None] = lambda *_: None,
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
        self._on_fate, self._note = on_fate, note
        self._bound = StalenessBound(topology.staleness.max, topology.rollout.groups_per_update)
        self._tasks_digest = ""
        before = recovered or Recovered()
        self._tasks = TaskOrder(topology.run.seed, before.cursor, before.replay, before.quarantined)
        self._group_numbers = count(before.num_groups)
        self._lease_numbers = count(before.counts["leased"])
        self._groups: OrderedDict[str, _Group] = OrderedDict()
        self._vacant: deque[tuple[str, int]] = deque()
        self._held: dict[str, _Held] = {}
        self._incarnations: dict[str, str] = {}
        self._progress: dict[str, int] = {}
        self._complete: deque[str] = deque()
        self._analysis_queue: OrderedDict[str, tuple[str, int]] = OrderedDict()
        self._analysing: dict[str, tuple[str, int]] = {}
        self._seen: OrderedDict[str, None] = OrderedDict.fromkeys(before.accepted_ids)
        self._last_taken = before.last_taken
        self._in_doubt = tuple(before.handed_out)
        self._handed_out: tuple[Sample, ...] = ()
        self._held_bytes = 0
        self._trained_ages = Counter(before.ages)
        self._bias = before.bias
        self._expected = -1
        self.version = -1
        self.counts = Counter(before.counts)
        self.dropped = Counter(before.dropped)
        if recovered is not None:
            self._end_what_was_open(recovered)

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
            self._note(
                "leased",
                lease=lease.lease_id,
                group=group_id,
                member=member,
                task=group.task_index,
                incarnation=incarnation,
            )
            self.counts["leased"] += 1
            leases.append(lease)
        return tuple(leases)

    def submit(self, trajectory: Trajectory, now_s: float) -> tuple[AckStatus, str]:
        """Take over a finished trajectory; returns its status and, for a refusal, what is wrong with it."""
        if trajectory.trajectory_id in self._seen:
            self.counts["duplicate"] += 1
            self._note("duplicate", trajectory=trajectory.trajectory_id)
            return "duplicate", ""
        held = self._held.get(trajectory.lease_id)
        if held is None or held.incarnation != trajectory.incarnation:
            self.counts["fenced"] += 1
            self._note("fenced", lease=trajectory.lease_id, trajectory=trajectory.trajectory_id)
            return "fenced", "the lease is no longer held by this incarnation"
        # A policy server may serve the next version before the learner has heard of all acknowledgements.
        newest = max(self.version + 1, self._expected)
        fault = trajectory_fault(trajectory, newest, self._vocabulary_size)
        if (trajectory.group_id, trajectory.member) != (held.lease.group_id, held.lease.member):
            fault = "another group or member than the lease's"
        if fault:
            self.counts["refused"] += 1
            self._note("refused", lease=trajectory.lease_id, trajectory=trajectory.trajectory_id, reason=fault)
            self._return(trajectory.lease_id, "failed", "its result was refused")
            return "refused", fault
        self._remember(trajectory.trajectory_id)
        del self._held[trajectory.lease_id]
        self._accept(trajectory, now_s)
        return "accepted", ""

    def fail(self, lease_id: str, incarnation: str, reason: str = "") -> bool:
        """Return a lease whose episode failed; False when the incarnation does not hold it."""
        held = self._held.get(lease_id)
        if held is None or held.incarnation != incarnation:
            self.counts["fenced"] += 1
            self._note("fenced", lease=lease_id)
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
                    self.counts["skill_timeout"] += 1
                    self._resolve(member, Sample(trajectory=member.trajectory, skill=None, skill_reason="timeout"))

    # Analyzers -------------------------------------------------------------------------------------------------

    def claim_analyses(self, max_jobs: int, now_s: float) -> tuple[Trajectory, ...]:
        """Hand out trajectories to analyse, oldest first. A claim that stays unanswered is offered again."""
        retry_s = self._topology.analysis.timeout_s / 2
        for trajectory_id, place in reversed(list(self._analysing.items())):
            claimed = self._groups[place[0]].members[place[1]]
            if claimed.claimed_at_s is not None and now_s - claimed.claimed_at_s > retry_s:
                del self._analysing[trajectory_id]
                self._analysis_queue[trajectory_id] = place
                self._analysis_queue.move_to_end(trajectory_id, last=False)
        jobs: list[Trajectory] = []
        while self._analysis_queue and len(jobs) < max_jobs:
            trajectory_id, place = self._analysis_queue.popitem(last=False)
            member = self._groups[place[0]].members[place[1]]
            member.claimed_at_s = now_s
            self._analysing[trajectory_id] = place
            jobs.append(member.trajectory)
        return tuple(jobs)

    def add_skill(self, result: SkillResult) -> AckStatus:
        """Attach a skill, or the reason why there is none, to its trajectory; a late one is refused."""
        # Whoever answers first: a slow analyzer's answer counts although its claim was taken back.
        place = self._analysing.get(result.trajectory_id) or self._analysis_queue.get(result.trajectory_id)
        if place is None:
            self.counts["skill_late"] += 1
            self._note("late", trajectory=result.trajectory_id)
            return "refused"
        member = self._groups[place[0]].members[place[1]]
        self.counts["skill_parsed" if result.skill else "skill_unparsed"] += 1
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
        chosen = self._choose_groups(version)
        samples: list[Sample] = []
        trained_tokens = 0
        for group in [group for key, group in self._groups.items() if key in chosen]:
            for number in sorted(group.members):
                sample = group.members[number].sample
                trained_tokens += self._hand_out(sample, version)
                samples.append(sample)
            self._forget(group)
        if not samples:
            return ()
        self.counts["masked_batches"] += not trained_tokens
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
        return len(self._analysis_queue) + len(self._analysing)

    def accounting(self) -> dict[str, object]:
        """Every count of the run, and whether they add up: no trajectory and no lease is lost or counted twice."""
        accepted, trained = self.counts["accepted"], self.counts["trained"]
        ended_leases = accepted + self.counts["returned"] + self.counts["failed"]
        return {
            "accepted": accepted,
            "trained": trained,
            "lost": self.counts["lost"],
            "dropped": dict(self.dropped),
            "buffered": self.buffered,
            "duplicate": self.counts["duplicate"],
            "fenced": self.counts["fenced"],
            "refused": self.counts["refused"],
            "leases": {
                "granted": self.counts["leased"],
                "returned": self.counts["returned"],
                "failed": self.counts["failed"],
                "running": self.running,
            },
            "skills": {key: self.counts[f"skill_{key}"] for key in ("parsed", "unparsed", "timeout", "late")},
            "skills_missing": self.counts["skill_missing"],
            "quarantined_tasks": sorted(self._tasks.quarantined),
            "ages": {str(age): number for age, number in sorted(self._trained_ages.items()) if number},
            "masked": {key: self.counts[f"masked_{key}"] for key in ("tokens", "trajectories", "batches")},
            "bias": self._bias.report(),
            "balance_ok": accepted == trained + sum(self.dropped.values()) + self.counts["unused"] + self.buffered
            and self.counts["leased"] == ended_leases + self.running,
        }

    def close(self) -> None:
        """Report the fate of what was never used."""
        for group in self._groups.values():
            for member in group.members.values():
                self._end(member.sample, "unused", self.version)

    # Internals -------------------------------------------------------------------------------------------------

    def _end_what_was_open(self, recovered: Recovered) -> None:
        """End the leases and trajectories that died with the buffer before; their games are in `replay`."""
        self._note("reopened")
        for lease in recovered.open_leases:
            self.counts["returned"] += 1
            self._note("returned", lease=lease, reason="restart")
        for trajectory, entry in recovered.open_trajectories.items():
            self.dropped["restart"] += 1
            self._note("dropped", trajectory=trajectory, group=entry.group, member=entry.member, reason="restart")

    def _settle_doubt(self, version: int) -> None:
        """Name what is lost: a learner that asks for the same update again never had the batch of the buffer before."""
        if version == self._last_taken:
            for trajectory in self._in_doubt:
                self.counts["lost"] += 1
                self._note("lost", trajectory=trajectory, version=version, reason="restart")
        self._in_doubt = ()

    def _seed(self, group: _Group, member: int) -> int:
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
        group = _Group(f"g{next(self._group_numbers)}", task_index)
        self._groups[group.group_id] = group
        self._note("opened", group=group.group_id, task=task_index, cursor=self._tasks.cursor)
        self._vacant.extend((group.group_id, member) for member in range(self._topology.rollout.group_size))
        return True

    def _accept(self, trajectory: Trajectory, now_s: float) -> None:
        group = self._groups[trajectory.group_id]
        num_bytes, oldest = trajectory_bytes(trajectory), trajectory.oldest_version
        wanted = self._topology.uses_analyzers
        sample = Sample(trajectory=trajectory, skill=None) if wanted else self._sample_without_analysis(trajectory)
        group.leased_at.pop(trajectory.member, None)
        group.members[trajectory.member] = _Member(trajectory, num_bytes, oldest, now_s, sample, resolved=not wanted)
        self._held_bytes += num_bytes
        self.counts["accepted"] += 1
        self._note(
            "accepted",
            lease=trajectory.lease_id,
            trajectory=trajectory.trajectory_id,
            group=trajectory.group_id,
            member=trajectory.member,
            incarnation=trajectory.incarnation,
            version=oldest,
            num_tokens=trajectory.response_ids.size,
            seconds=_seconds(trajectory),
            reason="" if sample.skill_reason == "method" else sample.skill_reason,
        )
        if wanted:
            self._analysis_queue[trajectory.trajectory_id] = (trajectory.group_id, trajectory.member)
        if len(group.members) == self._topology.rollout.group_size:
            self._complete.append(group.group_id)

    def _sample_without_analysis(self, trajectory: Trajectory) -> Sample:
        if self._topology.skill_source != "library" or self._library is None:
            return Sample(trajectory=trajectory, skill=None, skill_reason="method")
        text = self._library.skill(trajectory.task_type)
        if text is None:
            self.counts["skill_missing"] += 1
            return Sample(trajectory=trajectory, skill=None, skill_reason="no_entry")
        return Sample(trajectory=trajectory, skill=Skill(episode_summary="", episode_skill=text, version=-1))

    def _return(self, lease_id: str, how: Literal["returned", "failed"], reason: str) -> None:
        held = self._held.pop(lease_id)
        self.counts[how] += 1
        self._note(how, lease=lease_id, reason=reason)
        group, member = self._groups[held.lease.group_id], held.lease.member
        group.leased_at.pop(member, None)
        group.tries[member] += how == "failed"
        if group.tries[member] >= self._topology.buffer.max_tries:
            self._drop_failed(group)
        else:
            self._vacant.appendleft((group.group_id, member))

    def _drop_failed(self, group: _Group) -> None:
        self._tasks.quarantined.add(group.task_index)
        self._note("quarantined", group=group.group_id, task=group.task_index)
        for member in group.members.values():
            self.dropped["failed_group"] += 1
            self._end(member.sample, "failed_group", self.version)
        for lease_id in [key for key, held in self._held.items() if held.lease.group_id == group.group_id]:
            del self._held[lease_id]
            self.counts["returned"] += 1
            self._note("returned", lease=lease_id, reason="its group failed")
        self._vacant = deque(item for item in self._vacant if item[0] != group.group_id)
        self._forget(group)

    def _choose_groups(self, version: int) -> set[str]:
        """Choose the groups of the update from `version`; none as long as there can be no batch.

        The statistics of a group need all its members: unless old tokens are masked, a group with one trajectory older
        than the bound is dropped whole. With `wait` that happens only to tokens older than their lease (a policy server
        that missed a version), the earliest deadline goes first, and a group that would become too old is waited for.
        """
        on_stale = self._topology.staleness.on_stale
        ready = [key for key in self._complete if self._ready(self._groups[key])]
        if on_stale != "mask":
            for key in [key for key in ready if self._deadline(self._groups[key]) < version]:
                self._drop_stale(self._groups[key], version)
                ready.remove(key)
        if len(ready) < self._bound.groups_per_update:
            return set()
        if on_stale != "wait":
            return set(ready[: self._bound.groups_per_update])
        deadlines = {key: self._deadline(group) for key, group in self._groups.items()}
        chosen = set(sorted(ready, key=deadlines.__getitem__)[: self._bound.groups_per_update])
        left = [deadline for key, deadline in deadlines.items() if key not in chosen]
        return chosen if self._bound.may_advance([deadlines[key] for key in chosen], left, version) else set()

    def _deadline(self, group: _Group) -> int:
        """The last version from which the whole group may be trained, as far as is known now; it never comes nearer."""
        played = [member.oldest_version for member in group.members.values()]
        vacant = self._topology.rollout.group_size - len(played) - len(group.leased_at)
        return self._bound.deadline(min([*played, *group.leased_at.values(), *[self.version] * (vacant > 0)]))

    def _hand_out(self, sample: Sample, version: int) -> int:
        """Record that a trajectory goes into the update from `version`; returns how many of its tokens may be trained.

        The age of a trained trajectory counts from the oldest token that is trained; with none it has no age.
        """
        versions = sample.trajectory.versions
        young = versions[self._bound.admits_tokens(version, versions)]
        masked = versions.size - young.size
        self.counts["trained"] += 1
        self.counts["masked_tokens"] += masked
        self.counts["masked_trajectories"] += not young.size
        if masked:
            self._note(
                "masked",
                trajectory=sample.trajectory.trajectory_id,
                reason="stale",
                version=version,
                num_tokens=masked,
            )
        self._end(sample, "trained", version, young)
        return int(young.size)

    def _drop_stale(self, group: _Group, version: int) -> None:
        for member in group.members.values():
            old = not self._bound.admits(version, member.oldest_version)
            reason: Fate = "stale" if old else "stale_group"
            self.dropped[reason] += 1
            self._end(member.sample, reason, version)
        self._forget(group)

    def _end(self, sample: Sample, fate: Fate, version: int, trained: np.ndarray = NO_TOKENS) -> None:
        """Report the fate of an accepted trajectory; `trained` are the versions of its tokens that may be trained."""
        trajectory = sample.trajectory
        age = version - trajectory.oldest_version
        self._on_fate(sample, fate, version, age)
        if fate == "trained":
            age = version - int(trained.min()) if trained.size else NO_AGE
            self._trained_ages[age] += age != NO_AGE
        if fate != "unused":
            num_tokens = trajectory.versions.size
            self._bias.add(_seconds(trajectory), num_tokens, trained.size, taken=fate == "trained")
        self._note(
            fate if fate in ("trained", "unused") else "dropped",
            trajectory=trajectory.trajectory_id,
            group=trajectory.group_id,
            member=trajectory.member,
            reason="" if fate in ("trained", "unused") else fate,
            version=version,
            age=age,
        )

    def _resolve(self, member: _Member, sample: Sample) -> None:
        self._note(
            "analysed",
            trajectory=member.trajectory.trajectory_id,
            reason=sample.skill_reason,
            version=sample.skill.version if sample.skill else -1,
        )
        member.sample, member.resolved = sample, True
        self._end_analysis(member)

    def _end_analysis(self, member: _Member) -> None:
        self._analysing.pop(member.trajectory.trajectory_id, None)
        self._analysis_queue.pop(member.trajectory.trajectory_id, None)

    def _ready(self, group: _Group) -> bool:
        return all(member.resolved for member in group.members.values())

    def _forget(self, group: _Group) -> None:
        self._held_bytes -= sum(member.num_bytes for member in group.members.values())
        for member in group.members.values():
            self._end_analysis(member)
        if group.group_id in self._complete:
            self._complete.remove(group.group_id)
        del self._groups[group.group_id]

    def _remember(self, trajectory_id: str) -> None:
        self._seen[trajectory_id] = None
        if len(self._seen) > MAX_REMEMBERED_IDS:
            self._seen.popitem(last=False)


def _seconds(trajectory: Trajectory) -> float:
    """How long the episode was played, as the journal says it."""
    return round(trajectory.ended_at_s - trajectory.started_at_s, 3)
