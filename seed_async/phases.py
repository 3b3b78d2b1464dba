"""Wall seconds of a run's phases over all its launches, kept in the run directory."""

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import msgspec

SAVE_INTERVAL_S = 5.0
"""What a killed launcher's time may be short of."""


def read_phases(path: Path) -> dict[str, float]:
    """Return the seconds of each phase so far, none without a file. Raises msgspec.DecodeError."""
    return msgspec.json.decode(path.read_bytes(), type=dict[str, float]) if path.is_file() else {}


class PhaseClock:
    """Adds the seconds of this launch to those of the launches before it."""

    def __init__(self, path: Path, earlier: Mapping[str, float], clock_s: Callable[[], float] = time.monotonic) -> None:
        """Go on from the seconds of `earlier` launches; `path` is written from now on."""
        self.seconds = dict(earlier)
        self._path, self._clock_s = path, clock_s
        self._saved_at_s = clock_s()

    @contextmanager
    def timed(self, phase: str) -> Iterator[Callable[[], None]]:
        """Time the block, also when it raises; what it is given is to be called now and then, against a kill."""
        earlier_s, started_s = self.seconds.get(phase, 0.0), self._clock_s()

        def tick() -> None:
            self.seconds[phase] = earlier_s + self._clock_s() - started_s
            if self._clock_s() - self._saved_at_s >= SAVE_INTERVAL_S:
                self._save()

        try:
            yield tick
        finally:
            tick()
            self._save()

    def _save(self) -> None:
        """Replace the file at once: a kill leaves the one or the other."""
        self._saved_at_s = self._clock_s()
        staging = self._path.with_suffix(".new")
        staging.write_bytes(msgspec.json.encode(self.seconds) + b"\n")
        os.replace(staging, self._path)
