"""The provenance journal of a run: one line for each thing that happens to a lease or a trajectory.

Two writers, a file each: the buffer writes every fate, the learner what it really trained. `tools/audit.py` checks
that the two agree and that nothing is lost, counted twice or trained twice.
"""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, Protocol, TypedDict, Unpack

import msgspec

Event = Literal[
    "reopened",  # the writer started again on its own journal
    "opened",  # a group on the game `task`; `cursor` places of the list of games are used up now
    "quarantined",  # the game `task` failed too often and is never opened again
    "leased",  # a member was granted to an actor incarnation
    "returned",  # its lease ended without a result: no progress, a dead incarnation, or its group ended
    "failed",  # its episode failed, or its result was refused
    "accepted",  # its trajectory was taken over; `reason` where no skill will come for it
    "duplicate",  # a trajectory that had been accepted came again
    "fenced",  # a result of an incarnation that does not hold the lease
    "refused",  # a damaged result; the lease ends as failed
    "analysed",  # a skill, or the reason for none, came in time
    "late",  # a skill came after its trajectory was given up, trained or dropped
    "trained",  # handed to the learner for the update from `version`; by the learner: the update is made
    "lost",  # it was handed out, but its batch died with the buffer and the learner asks for another
    "masked",  # of a trained trajectory `num_tokens` are too old: they are left out of the loss
    "dropped",  # left out for good, with its reason
    "evaluated",  # the evaluation of `version` is in, or was given up
    "started",  # a learner goes on with the weights of version `weights` under the number `version`
    "published",  # a learner hands out `version`
    "unused",  # still held when the run ended
    "closed",  # the writer ended in order: nothing follows
]


_BLOCK_BYTES = 1 << 16


class Entry(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """One line of a journal.

    `task` is an index into the training split; `age` counts from the oldest token, or from the oldest that is trained;
    `num_tokens` are response tokens; `seconds` is how long an accepted episode was played.
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
    cursor: int = -1
    weights: int = -1
    seconds: float = -1.0


class Fields(TypedDict, total=False):
    """The fields of an `Entry` beside event and time, for callers."""

    lease: str
    trajectory: str
    group: str
    member: int
    task: int
    incarnation: str
    reason: str
    version: int
    age: int
    num_tokens: int
    cursor: int
    weights: int
    seconds: float


class Note(Protocol):
    """Takes one entry: `Journal.add`, `Journal.note`, or what a test collects."""

    def __call__(self, event: Event, **fields: Unpack[Fields]) -> None:
        """Record what happened; the fields are those of `Entry`."""
        ...


class JournalDamagedError(ValueError):
    """A journal line, other than a last one cut by a kill, that cannot be read."""


class Journal:
    """Appends entries: a kill costs at most those that were added and not committed."""

    def __init__(self, path: Path) -> None:
        """Open `path` for appending; a last line cut by a kill is taken away."""
        self._file = path.open("ab", buffering=0)
        self._encoder = msgspec.json.Encoder()
        self._added: list[bytes] = []
        self._file.truncate(_whole_bytes(path))

    def add(self, event: Event, **fields: Unpack[Fields]) -> None:
        """Add one entry to those that the next `commit` writes."""
        self._added.append(self._encoder.encode(Entry(event, round(time.time(), 3), **fields)))

    def commit(self) -> None:
        """Hand what was added to the operating system, in one write."""
        if self._added:
            self._file.write(b"\n".join([*self._added, b""]))
            self._added.clear()

    def note(self, event: Event, **fields: Unpack[Fields]) -> None:
        """Add one entry and commit."""
        self.add(event, **fields)
        self.commit()

    def close(self) -> None:
        """Write the last entry and close."""
        self.note("closed")
        self._file.close()


def _whole_bytes(path: Path) -> int:
    """Return how many bytes of a journal are whole lines."""
    position = path.stat().st_size
    with path.open("rb") as file:
        while position:
            start = max(0, position - _BLOCK_BYTES)
            file.seek(start)
            newline = file.read(position - start).rfind(b"\n")
            if newline >= 0:
                return start + newline + 1
            position = start
    return 0


def read_journal(path: Path) -> Iterator[Entry]:
    """Yield the entries of a journal in order; a last line cut by a kill is left out. Raises JournalDamagedError."""
    decoder = msgspec.json.Decoder(Entry)
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                return
            try:
                yield decoder.decode(line)
            except msgspec.DecodeError as error:
                raise JournalDamagedError(f"{path}, line {number}: {error}") from error
