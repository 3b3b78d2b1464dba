"""Weights through shared memory, for receivers of one host: a file of a memory-backed directory.

A receiver verifies and uses a copy of its own. In a mapping, a byte that changes after the check would be served.
"""

import mmap
import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from seed_async.messages import WeightsManifest
from seed_async.weights.manifest import (
    ByteBuffer,
    WeightsCorruptError,
    WeightsGoneError,
    build_manifest,
    verified_arrays,
)

MAP_FLAGS = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
"""All pages at once where the system can: one fault for each of 4 KiB would take longer than the copy."""
KEPT_SEGMENTS = 2
"""The newest version and the one before, which a slow receiver may still be reading."""


class SegmentStore:
    """A `WeightTransport`: writes versions as files and removes the old ones."""

    def __init__(self, directory: Path) -> None:
        """Create the directory if needed; what a publisher that was killed has left there goes."""
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        for left in directory.glob("weights-*"):
            left.unlink(missing_ok=True)
        self._directory = directory
        self._segments: list[Path] = []

    def stage(self, version: int, tensors: Mapping[str, np.ndarray], attempt: int = 0) -> WeightsManifest:
        """Lay the tensors out in one file and return its manifest."""
        path = self._directory / f"weights-{version}"
        staging = path.with_suffix(".staging")

        def map_file(num_bytes: int) -> np.ndarray:
            with staging.open("w+b") as file:
                file.truncate(num_bytes)
                return np.frombuffer(mmap.mmap(file.fileno(), num_bytes, MAP_FLAGS), dtype=np.uint8)

        manifest, _ = build_manifest(version, tensors, str(path), attempt, map_file)
        # A rename makes the name appear with the whole content: nobody can map a half-written version.
        staging.rename(path)
        self._segments.append(path)
        self._segments = list(dict.fromkeys(self._segments))  # a version staged again has one name
        for old in self._segments[:-KEPT_SEGMENTS]:
            old.unlink(missing_ok=True)
        del self._segments[:-KEPT_SEGMENTS]
        return manifest

    def close(self) -> None:
        """Remove what is left; who reads a segment keeps it open."""
        for path in self._segments:
            path.unlink(missing_ok=True)
        self._segments.clear()


class SegmentSource:
    """A `WeightSource`: maps the announced file."""

    def receive(self, manifest: WeightsManifest, timeout_s: float) -> ByteBuffer:
        """Read a version. Raises WeightsGoneError or WeightsCorruptError; a copy in memory needs no deadline."""
        try:
            with open(manifest.segment, "rb") as file:
                if os.fstat(file.fileno()).st_size != manifest.num_bytes:
                    raise WeightsCorruptError(
                        f"version {manifest.version}: {manifest.segment} does not have the announced size"
                    )
                return file.read()
        except FileNotFoundError as error:
            raise WeightsGoneError(f"version {manifest.version}: {manifest.segment} is gone") from error

    def close(self) -> None:
        """Nothing is held."""


def read_segment(manifest: WeightsManifest) -> dict[str, np.ndarray]:
    """Read a published version and verify it; the arrays are read-only."""
    return verified_arrays(manifest, SegmentSource().receive(manifest, timeout_s=0.0))
