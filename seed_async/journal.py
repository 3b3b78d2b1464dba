"""The provenance journal of a run: one line for each thing that happens to a lease or a trajectory.

Two writers, a file each: the buffer writes every fate, the learner what it really trained. `tools/audit.py` checks
that the two agree and that nothing is lost, counted twice or trained twice.
"""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, Protocol

import msgspec

Event = Literal[
    "leased",  # a member was granted to an actor incarnation
    "returned",  # its lease ended without a result: no progress, a dead incarnation, or its group ended
    "failed",  # its episode failed, or its result was refused
    "accepted",  # its trajectory was taken over
    "duplicate",  # a trajectory that had been accepted came again
    "fenced",  # a result of an incarnation that does not hold the lease
    "refused",  # a damaged result; the lease ends as failed
    "analysed",  # a skill, or the reason for none, came in time
    "trained",  # handed to the learner for the update from `version`; by the learner: the update is made
    "dropped",  # left out for good, with its reason
    "unused",  # still held when the run ended
    "closed",  # the writer ended in order: nothing follows
]


class Entry(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """One line of a journal.

    `task` is an index into the training split, `age` counts from the oldest token, `num_tokens` are response tokens.
    """

    event: Event
    time_s: float
    lease: str = ""
    trajectory: str = ""
    group: str = ""
    member: int = -1
    task: int = -1
    incarnation: str = ""
    reason: str = ""
    version: int = -1
    age: int = -1
    num_tokens: int = -1


class Note(Protocol):
    """Takes one entry: `Journal.note`, or what a test collects."""

    def __call__(
        self,
        event: Event,
        *,
        lease: str = "",
        trajectory: str = "",
        group: str = "",
        member: int = -1,
        task: int = -1,
        incarnation: str = "",
        reason: str = "",
        version: int = -1,
        age: int = -1,
        num_tokens: int = -1,
    ) -> None:
        """Record what happened; the fields are those of `Entry`."""
        ...


class JournalDamagedError(ValueError):
    """A journal line, other than a last one cut by a kill, that cannot be read."""


class Journal:
    """Appends entries, unbuffered: a kill costs at most the line being written."""

    def __init__(self, path: Path) -> None:
        """Open `path` for appending."""
        self._file = path.open("ab", buffering=0)
        self._encoder = msgspec.json.Encoder()

    def note(
        self,
        event: Event,
        *,
        lease: str = "",
        trajectory: str = "",
        group: str = "",
        member: int = -1,
        task: int = -1,
        incarnation: str = "",
        reason: str = "",
        version: int = -1,
        age: int = -1,
        num_tokens: int = -1,
    ) -> None:
        """Write one entry."""
        entry = Entry(
            event, time.time(), lease, trajectory, group, member, task, incarnation, reason, version, age, num_tokens
        )
        self._file.write(self._encoder.encode(entry) + b"\n")

    def close(self) -> None:
        """Write the last entry and close."""
        self.note("closed")
        self._file.close()


def read_journal(path: Path) -> Iterator[Entry]:
    """Yield the entries of a journal in order; a last line cut by a kill is left out. Raises JournalDamagedError."""
    decoder = msgspec.json.Decoder(Entry)
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                yield decoder.decode(line)
            except msgspec.DecodeError as error:
                if line.endswith(b"\n"):
                    raise JournalDamagedError(f"{path}, line {number}: {error}") from error
