"""What a buffer that starts again must know, read back from its own journal.

A dead buffer takes its leases and its unfinished groups with it: they end, by name, and their games are played again
before any new one. What it had handed out, its counts, and how far it had come in the list of games, stay.
"""

from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from seed_async.journal import Entry
from seed_async.learner.selection_bias import SelectionBias

MAX_REMEMBERED_IDS = 100_000
"""Trajectory ids kept to recognise a resent one; a resend comes within seconds."""

_COUNTED = frozenset(
    {"leased", "returned", "failed", "accepted", "duplicate", "fenced", "refused", "trained", "lost", "unused"}
)
_GROUP_ENDS = frozenset({"trained", "dropped", "quarantined"})
_BROUGHT_DOWN = "restart"
"""The reason of what ends with a buffer; nobody chose it, so that it is in no figure of the bias."""


@dataclass
class Recovered:
    """The state of a buffer at the end of a journal.

    `cursor`: how many places of the endless list of games are used up. `replay`: the games of groups that had not
    ended, in order. `open_leases`, `open_trajectories`: what the new buffer has to end. `last_taken`: the version whose
    update the last batch was for, `handed_out`: its trajectories. `evaluated`: versions whose evaluation is in.
    """

    counts: Counter[str] = field(default_factory=Counter)
    dropped: Counter[str] = field(default_factory=Counter)
    ages: Counter[int] = field(default_factory=Counter)
    bias: SelectionBias = field(default_factory=SelectionBias)
    quarantined: set[int] = field(default_factory=set)
    num_groups: int = 0
    cursor: int = 0
    replay: list[int] = field(default_factory=list)
    open_leases: list[str] = field(default_factory=list)
    open_trajectories: dict[str, Entry] = field(default_factory=dict)
    accepted_ids: deque[str] = field(default_factory=lambda: deque(maxlen=MAX_REMEMBERED_IDS))
    last_taken: int = -1
    handed_out: list[str] = field(default_factory=list)
    evaluated: set[int] = field(default_factory=set)


class _Replay:
    """Reads a journal into a `Recovered`; some 2 us an entry, because a long run has millions."""

    def __init__(self) -> None:
        self.state = Recovered()
        self._leases: dict[str, None] = {}
        self._groups: dict[str, int] = {}
        self._waiting: list[int] = []  # games of groups that a restart ended and that are not opened again yet
        self._masked: dict[str, int] = {}
        self._batch_version = -1
        self._batch_has_tokens = False

    def run(self, entries: Iterable[Entry]) -> Recovered:
        state = self.state
        for entry in entries:
            if entry.event in _COUNTED:
                state.counts[entry.event] += 1
            if entry.event in _GROUP_ENDS:
                self._groups.pop(entry.group, None)
            match entry.event:
                case "leased":
                    self._leases[entry.lease] = None
                case "accepted":
                    self._accepted(entry)
                case "analysed":
                    state.counts[_skill_count(entry.reason)] += 1
                case "trained":
                    self._trained(entry)
                case "dropped":
                    self._dropped(entry)
                case "returned" | "failed":
                    self._leases.pop(entry.lease, None)
                case "unused":
                    state.open_trajectories.pop(entry.trajectory, None)
                case _:
                    self._rare(entry)
        state.replay, state.open_leases = [*self._waiting, *self._groups.values()], list(self._leases)
        return state

    def _rare(self, entry: Entry) -> None:
        state = self.state
        match entry.event:
            case "reopened":
                self._waiting += self._groups.values()
                self._groups.clear()
                self._batch_version = -1
            case "opened":
                del self._waiting[:1]  # they come before any new game
                self._groups[entry.group] = entry.task
                state.num_groups += 1
                state.cursor = entry.cursor
            case "lost":
                state.handed_out.remove(entry.trajectory)
            case "masked":
                state.counts["masked_tokens"] += entry.num_tokens
                self._masked[entry.trajectory] = entry.num_tokens
            case "late":
                state.counts["skill_late"] += 1
            case "quarantined":
                state.quarantined.add(entry.task)
            case "evaluated":
                state.evaluated.add(entry.version)

    def _accepted(self, entry: Entry) -> None:
        self._leases.pop(entry.lease, None)
        self.state.open_trajectories[entry.trajectory] = entry
        self.state.accepted_ids.append(entry.trajectory)
        self.state.counts["skill_missing"] += entry.reason == "no_entry"

    def _trained(self, entry: Entry) -> None:
        state = self.state
        in_loss = entry.age >= 0
        state.ages[entry.age] += in_loss
        state.counts["masked_trajectories"] += not in_loss
        if entry.version > state.last_taken:
            state.last_taken, state.handed_out = entry.version, []
        state.handed_out.append(entry.trajectory)
        if entry.version != self._batch_version:
            self._batch_version, self._batch_has_tokens = entry.version, False
            state.counts["masked_batches"] += 1
        if in_loss and not self._batch_has_tokens:
            self._batch_has_tokens = True
            state.counts["masked_batches"] -= 1
        ended = state.open_trajectories.pop(entry.trajectory, None)
        masked = self._masked.pop(entry.trajectory, 0)
        if ended is not None:
            state.bias.add(ended.seconds, ended.num_tokens, ended.num_tokens - masked, taken=True)

    def _dropped(self, entry: Entry) -> None:
        self.state.dropped[entry.reason] += 1
        ended = self.state.open_trajectories.pop(entry.trajectory, None)
        if ended is not None and entry.reason != _BROUGHT_DOWN:
            self.state.bias.add(ended.seconds, ended.num_tokens, 0, taken=False)


def _skill_count(reason: str) -> str:
    """The count that an analysis belongs to, by the reason why it gave no skill."""
    return {"": "skill_parsed", "timeout": "skill_timeout"}.get(reason, "skill_unparsed")


def recover(entries: Iterable[Entry]) -> Recovered:
    """Replay a journal."""
    return _Replay().run(entries)
