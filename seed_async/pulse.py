"""The pulse of a process: a counter in a shared file that its main loop moves on and the supervisor reads.

A process whose main loop is stuck still looks alive to the kernel and to ZeroMQ, whose threads go on answering: only
the loop itself can say that it turns.
"""

import mmap
import os
import struct
import time
from collections.abc import Callable
from pathlib import Path

_COUNTER = struct.Struct("<Q")


class Pulse:
    """The writer's side; its first beat says that start-up is over, and from then on silence means trouble."""

    def __init__(self, path: Path) -> None:
        """Create the file, with a count of 0."""
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(descriptor, _COUNTER.size)
            self._mapping = mmap.mmap(descriptor, _COUNTER.size)
        finally:
            os.close(descriptor)
        self._count = 0
        _COUNTER.pack_into(self._mapping, 0, 0)

    def beat(self) -> None:
        """Count one turn of the main loop; costs well under a microsecond."""
        self._count += 1
        _COUNTER.pack_into(self._mapping, 0, self._count)


class PulseWatch:
    """The reader's side: how long the counter has stood still."""

    def __init__(self, path: Path, clock_s: Callable[[], float] = time.monotonic) -> None:
        """Watch `path`, which may not exist yet."""
        self._path, self._clock_s = path, clock_s
        self._count = 0
        self._moved_at_s = clock_s()

    def restart(self) -> None:
        """Forget the last process, whose successor starts now and has not beaten yet."""
        self._path.unlink(missing_ok=True)
        self._count = 0

    def silent_s(self) -> float:
        """Return the seconds since the counter last moved; 0 while start-up is not over."""
        try:
            data = self._path.read_bytes()
        except FileNotFoundError:
            return 0.0
        count = _COUNTER.unpack(data)[0] if len(data) == _COUNTER.size else 0
        now_s = self._clock_s()
        if count == 0 or count != self._count:
            self._count, self._moved_at_s = count, now_s
        return now_s - self._moved_at_s
