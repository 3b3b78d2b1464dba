"""A group as the buffer holds it, and which groups make the batch of an update. No journal, no clock."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from seed_async.messages import Sample, Trajectory
from seed_async.staleness import StalenessBound
from seed_async.topology import OnStale


@dataclass
class Member:
    """A finished member. `resolved`: no skill is waited for; `sample` then has it, or the reason why there is none."""

    trajectory: Trajectory
    num_bytes: int
    oldest_version: int
    arrived_at_s: float
    sample: Sample
    resolved: bool


@dataclass
class Group:
    """The `size` members of one game, in play or finished."""

    group_id: str
    task_index: int
    size: int
    members: dict[int, Member] = field(default_factory=dict)
    tries: Counter[int] = field(default_factory=Counter)
    leased_at: dict[int, int] = field(default_factory=dict)
    """The version under which each member in play was granted: none of its tokens will be older."""

    @property
    def complete(self) -> bool:
        """Whether every member is finished."""
        return len(self.members) == self.size

    @property
    def resolved(self) -> bool:
        """Whether no finished member waits for its skill."""
        return all(member.resolved for member in self.members.values())

    @property
    def num_bytes(self) -> int:
        """Memory of the finished members."""
        return sum(member.num_bytes for member in self.members.values())

    @property
    def in_order(self) -> list[Member]:
        """The finished members by their number."""
        return [self.members[number] for number in sorted(self.members)]

    def deadline(self, bound: StalenessBound, present_version: int) -> int:
        """The last version from which the whole group may be trained, as far as is known now; it never comes nearer.

        A vacant member would be granted under `present_version`.
        """
        played = [member.oldest_version for member in self.members.values()]
        vacant = self.size - len(played) - len(self.leased_at)
        return bound.deadline(min([*played, *self.leased_at.values(), *[present_version] * (vacant > 0)]))


class BatchChoice(NamedTuple):
    """The ids of the groups of a batch, none as long as there can be no batch, and of those that have to be dropped."""

    chosen: frozenset[str]
    stale: tuple[str, ...]


def choose_groups(
    groups: Mapping[str, Group],
    complete: Iterable[str],
    bound: StalenessBound,
    on_stale: OnStale,
    *,
    version: int,
    present_version: int,
) -> BatchChoice:
    """Choose the groups of the update from `version`; `complete` are ids in the order of completion.

    The statistics of a group need all its members: unless old tokens are masked, a group with one trajectory older
    than the bound is dropped whole. With `wait` that happens only to tokens older than their lease (a policy server
    that missed a version), the earliest deadline goes first, and a group that would become too old is waited for.
    """
    ready = [key for key in complete if groups[key].resolved]
    # Asked whenever the learner waits, so only the deadlines that matter: none, of what is ready, of all groups.
    judged: Iterable[str] = {"mask": (), "drop": ready, "wait": groups}[on_stale]
    deadlines = {key: groups[key].deadline(bound, present_version) for key in judged}
    stale = tuple(key for key in ready if deadlines.get(key, version) < version)
    ready = [key for key in ready if key not in stale]
    if len(ready) < bound.groups_per_update:
        return BatchChoice(frozenset(), stale)
    if on_stale != "wait":
        return BatchChoice(frozenset(ready[: bound.groups_per_update]), stale)
    chosen = frozenset(sorted(ready, key=deadlines.__getitem__)[: bound.groups_per_update])
    left = [deadline for key, deadline in deadlines.items() if key not in chosen and key not in stale]
    if not bound.may_advance([deadlines[key] for key in chosen], left, version):
        return BatchChoice(frozenset(), stale)
    return BatchChoice(chosen, stale)
