"""What a buffer that starts again must know, read back from its own journal.

A dead buffer takes its leases and its unfinished groups with it: they end, by name, and their games are played again
before any new one. What it had handed out, its counts, and how far it had come in the list of games, stay.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from seed_async.journal import Entry

_COUNTED = ("leased", "returned", "failed", "accepted", "duplicate", "fenced", "refused", "trained", "unused")
_GROUP_ENDS = ("trained", "dropped", "quarantined")


@dataclass
class Recovered:
    """The state of a buffer at the end of a journal.

    `cursor`: how many places of the endless list of games are used up. `replay`: the games of groups that had not
    ended, in order. `open_leases`, `open_trajectories`: what the new buffer has to end. `last_taken`: the version whose
    update the last batch was for. `evaluated`: versions whose evaluation is in.
    """

    counts: Counter[str] = field(default_factory=Counter)
    dropped: Counter[str] = field(default_factory=Counter)
    ages: Counter[int] = field(default_factory=Counter)
    quarantined: set[int] = field(default_factory=set)
    num_groups: int = 0
    cursor: int = 0
    replay: list[int] = field(default_factory=list)
    open_leases: list[str] = field(default_factory=list)
    open_trajectories: dict[str, Entry] = field(default_factory=dict)
    accepted_ids: list[str] = field(default_factory=list)
    last_taken: int = -1
    evaluated: set[int] = field(default_factory=set)


def recover(entries: Iterable[Entry]) -> Recovered:
    """Replay a journal."""
    state = Recovered()
    leases: dict[str, None] = {}
    groups: dict[str, int] = {}
    waiting: list[int] = []  # games of groups that a restart ended and that are not opened again yet
    for entry in entries:
        if entry.event in _COUNTED:
            state.counts[entry.event] += 1
        if entry.event in _GROUP_ENDS:
            groups.pop(entry.group, None)
        match entry.event:
            case "reopened":
                waiting += groups.values()
                groups.clear()
            case "opened":
                del waiting[:1]  # they come before any new game
                groups[entry.group] = entry.task
                state.num_groups += 1
                state.cursor = entry.cursor
            case "leased":
                leases[entry.lease] = None
            case "returned" | "failed":
                leases.pop(entry.lease, None)
            case "accepted":
                leases.pop(entry.lease, None)
                state.open_trajectories[entry.trajectory] = entry
                state.accepted_ids.append(entry.trajectory)
            case "trained":
                state.open_trajectories.pop(entry.trajectory, None)
                state.ages[entry.age] += entry.age >= 0
                state.counts["masked_trajectories"] += entry.age < 0
                state.last_taken = max(state.last_taken, entry.version)
            case "masked":
                state.counts["masked_tokens"] += entry.num_tokens
            case "dropped":
                state.open_trajectories.pop(entry.trajectory, None)
                state.dropped[entry.reason] += 1
            case "unused":
                state.open_trajectories.pop(entry.trajectory, None)
            case "quarantined":
                state.quarantined.add(entry.task)
            case "evaluated":
                state.evaluated.add(entry.version)
    state.replay, state.open_leases = [*waiting, *groups.values()], list(leases)
    return state
