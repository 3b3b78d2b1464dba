"""What each process did when: spans on the wall clock as JSON lines, and how much of it happened at once."""

import itertools
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

FLUSH_INTERVAL_S = 1.0

Interval = tuple[float, float]


class Span(msgspec.Struct, frozen=True, kw_only=True):
    """One activity of one process; times are `time.time()`, comparable across the processes of a host."""

    role: str
    instance: str
    kind: str
    start_s: float
    end_s: float
    version: int


class Timeline:
    """Appends the spans of one process to its own file. Safe to use from several threads.

    Written at most once a second and on close: a process that is killed loses its last second.
    """

    def __init__(self, path: Path, role: str, instance: str) -> None:
        """Open `path` (*.jsonl) for appending; an earlier incarnation's spans are kept."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("ab")
        if self._file.tell():
            # A kill may have cut the last line; this ends it, and an empty line does no harm.
            self._file.write(b"\n")
        self._role = role
        self._instance = instance
        self._lines: list[bytes] = []
        self._flushed_at_s = time.monotonic()
        self._lock = threading.Lock()

    def record(self, kind: str, start_s: float, end_s: float, version: int) -> None:
        """Add a finished span."""
        span = Span(role=self._role, instance=self._instance, kind=kind, start_s=start_s, end_s=end_s, version=version)
        with self._lock:
            self._lines.append(msgspec.json.encode(span) + b"\n")
            if time.monotonic() - self._flushed_at_s >= FLUSH_INTERVAL_S:
                self._flush()

    @contextmanager
    def span(self, kind: str, version: int) -> Iterator[None]:
        """Record the time of the block, also when it raises."""
        start_s = time.time()
        try:
            yield
        finally:
            self.record(kind, start_s, time.time(), version)

    def close(self) -> None:
        """Write what is left; a second call does nothing."""
        with self._lock:
            if not self._file.closed:
                self._flush()
                self._file.close()

    def _flush(self) -> None:
        self._file.write(b"".join(self._lines))
        self._file.flush()
        self._lines.clear()
        self._flushed_at_s = time.monotonic()


def load_timeline(directory: Path) -> list[Span]:
    """Return the spans of every *.jsonl in `directory`, by start. Lines cut by a kill are left out."""
    decoder = msgspec.json.Decoder(Span)
    spans = []
    for path in sorted(directory.glob("*.jsonl")):
        for line in path.read_bytes().splitlines():
            try:
                spans.append(decoder.decode(line))
            except (msgspec.DecodeError, UnicodeDecodeError):
                continue
    return sorted(spans, key=lambda span: span.start_s)


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the same set of times as disjoint intervals in order; empty and backward intervals hold no time."""
    merged: list[Interval] = []
    for start, end in sorted(interval for interval in intervals if interval[0] < interval[1]):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def overlap_seconds(*interval_sets: Iterable[Interval]) -> float:
    """Return for how long all the sets are active at once: the measure of the intersection of their unions.

    No set at all has no overlap: 0.
    """
    edges = sorted(
        edge for interval_set in interval_sets for start, end in union(interval_set) for edge in ((start, 1), (end, -1))
    )
    total = 0.0
    num_active = 0
    for (time_s, step), (next_s, _) in itertools.pairwise(edges):
        num_active += step
        if num_active == len(interval_sets):
            total += next_s - time_s
    return total
