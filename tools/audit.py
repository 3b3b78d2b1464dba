"""Checks the provenance journals of a run: in = out + held, nothing trained twice, nothing too old, groups whole.

It trusts no counter: every figure is counted again from the single entries, and compared with counts.json at the end.
"""

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.table import Table

from seed_async.journal import Entry, read_journal
from seed_async.rundir import RunDir
from seed_async.topology import Topology

MAX_SHOWN_FAULTS: Final = 20


@dataclass
class Audit:
    """What the journals say. `faults` is empty when every promise was kept."""

    counts: Counter[str] = field(default_factory=Counter)
    dropped: Counter[str] = field(default_factory=Counter)
    ages: Counter[int] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    closed: bool = False
    masked_tokens: int = 0
    tokens_in_loss: dict[str, int] = field(default_factory=dict)
    lost: set[str] = field(default_factory=set)
    mean_tokens_trained: float | None = None
    mean_tokens_accepted: float | None = None

    @property
    def passed(self) -> bool:
        """Whether nothing is wrong."""
        return not self.faults

    @property
    def length_bias(self) -> float | None:
        """Mean length of what was trained over mean length of what was accepted: below 1, long episodes are lost."""
        if not self.mean_tokens_trained or not self.mean_tokens_accepted:
            return None
        return self.mean_tokens_trained / self.mean_tokens_accepted


class _Ledger:
    """Replays the buffer's journal entry by entry."""

    def __init__(self, audit: Audit, max_staleness: int, group_size: int) -> None:
        self._audit, self._max_staleness, self._group_size = audit, max_staleness, group_size
        self._open_leases: dict[str, Entry] = {}
        self._ended_leases: set[str] = set()
        self._accepted: dict[str, Entry] = {}
        self._fates: dict[str, str] = {}
        self._masked_tokens: dict[str, int] = {}
        self._batches: defaultdict[tuple[str, int], set[int]] = defaultdict(set)
        self.trained: dict[str, int] = {}
        self._handlers: dict[str, Callable[[Entry], None]] = {
            "leased": self._leased,
            "returned": self._lease_ended,
            "failed": self._lease_ended,
            "accepted": self._taken_over,
            "trained": self._trained,
            "lost": self._lost,
            "masked": self._masked,
            "dropped": self._dropped,
            "unused": self._fate,
        }

    def replay(self, entries: Iterable[Entry]) -> None:
        for entry in entries:
            if self._audit.closed and entry.event != "reopened":
                self._fault(entry, "came after the journal was closed")
            self._audit.counts[entry.event] += 1
            self._audit.closed = entry.event == "closed"
            handler = self._handlers.get(entry.event)
            if handler is not None:
                handler(entry)
        self._check_groups()
        self._check_end()

    def _fault(self, entry: Entry, what: str) -> None:
        self._audit.faults.append(f"{entry.event} {entry.trajectory or entry.lease}: {what}")

    def _leased(self, entry: Entry) -> None:
        if entry.lease in self._open_leases or entry.lease in self._ended_leases:
            self._fault(entry, "the lease was granted twice")
        self._open_leases[entry.lease] = entry

    def _lease_ended(self, entry: Entry) -> None:
        granted = self._open_leases.pop(entry.lease, None)
        if granted is None:
            again = entry.lease in self._ended_leases
            self._fault(entry, "the lease had ended before" if again else "the lease was never granted")
        elif entry.event == "accepted" and granted.incarnation != entry.incarnation:
            self._fault(entry, f"the lease was held by {granted.incarnation}, not by {entry.incarnation}")
        self._ended_leases.add(entry.lease)

    def _taken_over(self, entry: Entry) -> None:
        self._lease_ended(entry)
        if entry.trajectory in self._accepted:
            self._fault(entry, "it was accepted twice")
        self._accepted[entry.trajectory] = entry

    def _fate(self, entry: Entry) -> None:
        if entry.trajectory not in self._accepted:
            self._fault(entry, "it was never accepted")
        elif entry.trajectory in self._fates:
            self._fault(entry, f"it was {self._fates[entry.trajectory]} before")
        self._fates[entry.trajectory] = entry.event

    def _trained(self, entry: Entry) -> None:
        self._fate(entry)
        self.trained[entry.trajectory] = entry.version
        self._batches[entry.group, entry.version].add(entry.member)
        accepted = self._accepted.get(entry.trajectory)
        if accepted is not None and accepted.num_tokens >= 0:
            left = accepted.num_tokens - self._masked_tokens.get(entry.trajectory, 0)
            self._audit.tokens_in_loss[entry.trajectory] = left
            if not left:
                return  # without a token in the loss it has no age
        self._audit.ages[entry.age] += 1
        if not 0 <= entry.age <= self._max_staleness:
            self._fault(entry, f"its oldest token was {entry.age} versions old; the bound is {self._max_staleness}")

    def _lost(self, entry: Entry) -> None:
        """No learner that lives on had it; the buffer may have died before it had noted the whole batch."""
        if self.trained.get(entry.trajectory) != entry.version:
            self._fault(entry, f"it was not handed out for the update from {entry.version}")
        self._audit.lost.add(entry.trajectory)
        accepted = self._accepted.get(entry.trajectory)
        if accepted is not None:
            self._batches[accepted.group, entry.version].discard(accepted.member)

    def _masked(self, entry: Entry) -> None:
        """It comes right before the trajectory is trained."""
        accepted = self._accepted.get(entry.trajectory)
        if accepted is None or not 0 < entry.num_tokens <= accepted.num_tokens:
            self._fault(entry, f"{entry.num_tokens} tokens masked, of {accepted.num_tokens if accepted else 'nothing'}")
        elif entry.trajectory in self._fates or entry.trajectory in self._masked_tokens:
            self._fault(entry, "it was masked or trained before")
        self._masked_tokens[entry.trajectory] = entry.num_tokens
        self._audit.masked_tokens += entry.num_tokens

    def _dropped(self, entry: Entry) -> None:
        self._fate(entry)
        self._audit.dropped[entry.reason] += 1

    def _check_groups(self) -> None:
        for (group, version), members in self._batches.items():
            if len(members) not in (0, self._group_size):
                self._audit.faults.append(
                    f"group {group}: {len(members)} of {self._group_size} members went into the update from {version}"
                )

    def _check_end(self) -> None:
        open_fates = self._accepted.keys() - self._fates.keys()
        if self._audit.closed and open_fates:
            self._audit.faults.append(f"{len(open_fates)} accepted trajectories have no fate, e.g. {min(open_fates)}")
        self._audit.counts["running"] = len(self._open_leases)
        self._audit.counts["held"] = len(open_fates)
        lengths = {key: entry.num_tokens for key, entry in self._accepted.items()}
        if lengths:
            self._audit.mean_tokens_accepted = sum(lengths.values()) / len(lengths)
        if self.trained:
            tokens = sum(lengths.get(key, 0) - self._masked_tokens.get(key, 0) for key in self.trained)
            self._audit.mean_tokens_trained = tokens / len(self.trained)


def _check_learner(audit: Audit, handed_out: dict[str, int], entries: Iterable[Entry]) -> None:
    """What the learner trained is what it was handed, once, for the same update.

    Only a last batch, the steps that were lost with a learner, and what died with the buffer may be missing.
    """
    trained: dict[str, int] = {}
    excused: set[int] = set()
    for entry in entries:
        if entry.event == "started":
            # What a dead learner trained from the weights of its successor on is lost with it, and may be done again.
            lost = [key for key, version in trained.items() if version >= entry.weights]
            audit.counts["lost_with_a_learner"] += len(lost)
            for key in lost:
                del trained[key]
            excused.update(range(entry.weights, entry.version + 1))
        if entry.event != "trained":
            continue
        if entry.trajectory in trained:
            audit.faults.append(f"trained {entry.trajectory}: the learner trained it twice")
        trained[entry.trajectory] = entry.version
        in_loss = audit.tokens_in_loss.get(entry.trajectory, entry.num_tokens)
        if entry.num_tokens not in (-1, in_loss):
            audit.faults.append(f"trained {entry.trajectory}: {entry.num_tokens} tokens instead of {in_loss}")
        if handed_out.get(entry.trajectory) != entry.version:
            audit.faults.append(
                f"trained {entry.trajectory}: it was not handed out for the update from {entry.version}"
            )
    for key in sorted(audit.lost & trained.keys()):
        audit.faults.append(f"trained {key}: the buffer had named it lost")
    missing = {version for key, version in handed_out.items() if key not in trained and key not in audit.lost}
    audit.counts["handed_out_untrained"] = len(handed_out.keys() - trained.keys())
    excused.add(max(handed_out.values(), default=-1))
    if missing - excused:
        audit.faults.append(f"batches of the versions {sorted(missing - excused)} were handed out and never trained")


def _check_counts(audit: Audit, path: Path) -> None:
    """The buffer's own accounting says the same."""
    counts = json.loads(path.read_text(encoding="utf-8"))
    ours = {
        "accepted": audit.counts["accepted"],
        "trained": audit.counts["trained"],
        "lost": audit.counts["lost"],
        "duplicate": audit.counts["duplicate"],
        "fenced": audit.counts["fenced"],
        "refused": audit.counts["refused"],
        "dropped": dict(audit.dropped),
    }
    for key, value in ours.items():
        if counts[key] != value:
            audit.faults.append(f"counts.json says {key} {counts[key]}, the journal {value}")
    if not counts["balance_ok"]:
        audit.faults.append("counts.json says that the buffer's own balance does not add up")


def replay(entries: Iterable[Entry], topology: Topology) -> tuple[Audit, dict[str, int]]:
    """Audit a buffer's journal alone; returns also the trajectories it handed out, with the version of their update."""
    audit = Audit()
    ledger = _Ledger(audit, topology.staleness.max, topology.rollout.group_size)
    ledger.replay(entries)
    return audit, ledger.trained


def audit_run(run_dir: RunDir, topology: Topology) -> Audit:
    """Audit a finished, interrupted or running run. Raises FileNotFoundError, JournalDamagedError."""
    audit, handed_out = replay(read_journal(run_dir.journal), topology)
    _check_learner(audit, handed_out, read_journal(run_dir.trained) if run_dir.trained.is_file() else ())
    if run_dir.counts.is_file():
        _check_counts(audit, run_dir.counts)
    return audit


def print_audit(audit: Audit, console: Console) -> None:
    """Print the counts and what is wrong."""
    table = Table(title="audit", show_header=False)
    rows = [(event, str(number)) for event, number in sorted(audit.counts.items()) if event != "closed"]
    rows += [(f"dropped: {reason}", str(number)) for reason, number in sorted(audit.dropped.items())]
    rows += [("masked tokens", str(audit.masked_tokens))] if audit.masked_tokens else []
    rows += [(f"trained at age {age}", str(number)) for age, number in sorted(audit.ages.items())]
    if audit.length_bias is not None:
        rows.append(("mean length trained / accepted", f"{audit.length_bias:.3f}"))
    rows.append(("journal closed in order", "yes" if audit.closed else "no"))
    for row in rows:
        table.add_row(*row)
    console.print(table)
    for fault in audit.faults[:MAX_SHOWN_FAULTS]:
        console.print(f"FAULT {fault}", markup=False)
    if len(audit.faults) > MAX_SHOWN_FAULTS:
        console.print(f"... and {len(audit.faults) - MAX_SHOWN_FAULTS} more")
    console.print("audit passed" if audit.passed else f"audit FAILED: {len(audit.faults)} faults")
