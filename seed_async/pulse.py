"""The pulse of a process: counters in a shared file that its main loop moves on and the supervisor reads.

A process whose main loop is stuck still looks alive to the kernel and to ZeroMQ, whose threads go on answering: only
the loop itself can say that it turns.
"""

import mmap
import os
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

_COUNTERS = struct.Struct("<QQ")
"""Turns of the main loop, steps of the start."""


class Pulse:
    """The writer's side; the first beat says that the start is over."""

    def __init__(self, path: Path) -> None:
        """Create the file, with both counts 0."""
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(descriptor, _COUNTERS.size)
            self._mapping = mmap.mmap(descriptor, _COUNTERS.size)
        finally:
            os.close(descriptor)
        self._turns = self._steps = 0
        self._write()

    def beat(self) -> None:
        """Count one turn of the main loop; costs well under a microsecond."""
        self._turns += 1
        self._write()

    def step(self) -> None:
        """Count one part of the start that is done (modules imported, model loaded): the next one has its own time."""
        self._steps += 1
        self._write()

    def _write(self) -> None:
        _COUNTERS.pack_into(self._mapping, 0, self._turns, self._steps)


class Silence(NamedTuple):
    """For how long a process has shown nothing, and whether its main loop has yet to turn for the first time."""

    seconds: float
    starting: bool


class PulseWatch:
    """The reader's side: how long the counters have stood still."""

    def __init__(self, path: Path, clock_s: Callable[[], float] = time.monotonic) -> None:
        """Watch `path`, which may not exist yet, of a process that starts now."""
        self._path, self._clock_s = path, clock_s
        self._counts = (0, 0)
        self._moved_at_s = clock_s()

    def restart(self) -> None:
        """Forget the last process: its successor starts now."""
        self._path.unlink(missing_ok=True)
        self._counts, self._moved_at_s = (0, 0), self._clock_s()

    def silence(self) -> Silence:
        """Return how long the counters have stood still; before they move at all, the time since the start."""
        counts = read_counts(self._path)
        now_s = self._clock_s()
        if counts != self._counts:
            self._counts, self._moved_at_s = counts, now_s
        return Silence(now_s - self._moved_at_s, starting=counts[0] == 0)


def read_counts(path: Path) -> tuple[int, int]:
    """Return the turns of a main loop and the steps of its start; (0, 0) while there is no file."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return 0, 0
    turns, steps = _COUNTERS.unpack(data) if len(data) == _COUNTERS.size else (0, 0)
    return turns, steps
