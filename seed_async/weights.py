"""Weights as a verified transaction between one publisher and many receivers of one host, without torch.

The publisher writes version v into a shared-memory file and announces its manifest (names, shapes, dtypes, offsets,
digest). Each receiver keeps one long poll open: "I hold version u with digest d, what is newer?". So a receiver that
starts late, restarts or was slow gets the newest version by itself, and its next poll is the acknowledgement.
"""

import mmap
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Literal

import numpy as np

from seed_async.messages import Ack, Message, TensorSpec, WeightsManifest, WeightsPoll
from seed_async.transport import Client, Request, Server

ReceiverRole = Literal["policy", "analyzer"]
ALIGNMENT_BYTES = 64
KEPT_SEGMENTS = 2
"""The newest version and the one before, which a slow receiver may still be reading."""
STOP_INTERVAL_S = 0.1
HOLD_S = 1.0
"""How long an unanswered poll is held; receivers ask again at once."""


class WeightsCorruptError(RuntimeError):
    """A segment whose bytes do not have the manifest's digest; the version is refused."""


def _digest(buffer: bytes | memoryview | mmap.mmap) -> str:
    return blake2b(buffer, digest_size=16).hexdigest()


class SegmentStore:
    """Writes versions as files of a memory-backed directory and removes the old ones."""

    def __init__(self, directory: Path) -> None:
        """Create the directory if needed."""
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._directory = directory
        self._segments: list[Path] = []

    def write(self, version: int, tensors: Mapping[str, np.ndarray]) -> WeightsManifest:
        """Lay the tensors out in one file, small ones beside large ones, and return its manifest."""
        specs, offset = [], 0
        for name, tensor in tensors.items():
            specs.append(TensorSpec(name=name, dtype=tensor.dtype.name, shape=tensor.shape, offset_bytes=offset))
            offset += -(-tensor.nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        image = np.zeros(offset, dtype=np.uint8)
        for spec, tensor in zip(specs, tensors.values(), strict=True):
            image[spec.offset_bytes : spec.offset_bytes + tensor.nbytes] = (
                np.ascontiguousarray(tensor).reshape(-1).view(np.uint8)
            )
        path = self._directory / f"weights-{version}"
        # A rename makes the name appear with the whole content: nobody can map a half-written version.
        staging = path.with_suffix(".staging")
        staging.write_bytes(image.data)
        staging.rename(path)
        self._segments.append(path)
        self._segments = list(dict.fromkeys(self._segments))  # a version staged again has one name
        for old in self._segments[:-KEPT_SEGMENTS]:
            old.unlink(missing_ok=True)
        del self._segments[:-KEPT_SEGMENTS]
        return WeightsManifest(
            version=version, segment=str(path), num_bytes=offset, digest=_digest(image.data), tensors=tuple(specs)
        )

    def close(self) -> None:
        """Remove what is left; readers that have a segment mapped keep their mapping."""
        for path in self._segments:
            path.unlink(missing_ok=True)
        self._segments.clear()


def read_segment(manifest: WeightsManifest) -> dict[str, np.ndarray]:
    """Map a published version and verify it; the arrays are read-only views of the mapping.

    Raises FileNotFoundError when a newer version has replaced it, WeightsCorruptError when the digest differs.
    """
    fault = f"version {manifest.version}: {manifest.segment} does not have the announced "
    with open(manifest.segment, "rb") as file:
        if os.fstat(file.fileno()).st_size != manifest.num_bytes:
            raise WeightsCorruptError(fault + "size")
        mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    if _digest(mapping) != manifest.digest:
        raise WeightsCorruptError(fault + "digest")
    arrays = {}
    for spec in manifest.tensors:
        size = int(np.prod(spec.shape, dtype=np.int64))
        flat = np.frombuffer(mapping, dtype=np.dtype(spec.dtype), count=size, offset=spec.offset_bytes)
        arrays[spec.name] = flat.reshape(spec.shape)
    return arrays


class WeightReceiver:
    """A receiver's side: one long poll at a time, advanced by its owner's loop."""

    def __init__(self, client: Client, name: str, role: ReceiverRole) -> None:
        """`client` is connected to the publisher; `name` identifies the process."""
        self._client, self._name, self._role = client, name, role
        self._version, self._digest, self._refused = -1, "", ""
        self._open_poll: int | None = None
        self.num_refused = 0
        """Versions whose bytes did not have the announced digest."""

    def poll(self, timeout_s: float = 0.0) -> tuple[WeightsManifest, dict[str, np.ndarray]] | None:
        """Return a verified version newer than the one held, or None. Call `acknowledge` once it is in use.

        A damaged version is refused, and the next poll tells the publisher so; the one in use stays.
        """
        if self._open_poll is None:
            self._open_poll = self._client.submit(
                WeightsPoll(
                    receiver=self._name,
                    role=self._role,
                    version=self._version,
                    digest=self._digest,
                    refused=self._refused,
                )
            )
        for sequence, reply in self._client.poll(timeout_s):
            if sequence != self._open_poll:
                continue
            self._open_poll = None
            if isinstance(reply, WeightsManifest):
                self._refused = ""
                try:
                    return reply, read_segment(reply)
                except FileNotFoundError:  # replaced meanwhile: the next poll brings the newest
                    return None
                except WeightsCorruptError:
                    self._refused = reply.digest
                    self.num_refused += 1
                    return None
        return None

    def acknowledge(self, manifest: WeightsManifest) -> None:
        """Say that `manifest` is now the version in use (by the next poll, which this sends)."""
        self._version, self._digest = manifest.version, manifest.digest
        self.poll()


@dataclass
class _Receiver:
    role: ReceiverRole
    version: int


class WeightPublisher:
    """The publisher's side: a thread that answers polls, and `publish` / `wait_acknowledged` for the training loop."""

    def __init__(self, server: Server, store: SegmentStore) -> None:
        """Start answering polls; nothing is published yet."""
        self._server, self._store = server, store
        self._changed = threading.Condition()
        self._newest: WeightsManifest | None = None
        self._tensors: Mapping[str, np.ndarray] = {}
        self._damaged = False
        self._receivers: dict[str, _Receiver] = {}
        self._given_up: Counter[ReceiverRole] = Counter()
        self.num_refused = 0
        """Times that a receiver found the announced bytes damaged."""
        self._closing = False
        self._thread = threading.Thread(target=self._serve, daemon=True, name="weight-publisher")
        self._thread.start()

    def publish(self, version: int, tensors: Mapping[str, np.ndarray]) -> WeightsManifest:
        """Stage a version and make it the newest; returns at once.

        `tensors` must not change while `wait_acknowledged` runs: a receiver that got damaged bytes has them staged
        again from there.
        """
        manifest = self._store.write(version, tensors)
        with self._changed:
            self._newest, self._tensors, self._damaged = manifest, tensors, False
        return manifest

    def wait_acknowledged(
        self,
        version: int,
        role: ReceiverRole,
        replicas: int,
        timeout_s: float,
        stop: threading.Event | None = None,
        on_wait: Callable[[], None] = lambda: None,
    ) -> tuple[str, ...]:
        """Wait until `replicas` receivers of `role` hold `version`; returns the receivers given up at the deadline.

        Those are forgotten and not waited for again (the run goes on without them) until they or their successors
        poll. Once `stop` is set nobody is waited for: the receivers are ending too. `on_wait` is called several times
        a second (the caller's pulse). Raises TimeoutError when no
        receiver at all holds the version by the deadline.
        """
        deadline_s = time.monotonic() + timeout_s

        def holders() -> int:
            return sum(each.role == role and each.version == version for each in self._receivers.values())

        def done() -> bool:
            return holders() >= max(1, replicas - self._given_up[role]) or (stop is not None and stop.is_set())

        with self._changed:
            while not done() and time.monotonic() < deadline_s:
                on_wait()
                if self._damaged:
                    self._newest, self._damaged = self._store.write(version, self._tensors), False
                self._changed.wait(min(STOP_INTERVAL_S, timeout_s))
            if done():
                return ()
            behind = tuple(
                name for name, each in self._receivers.items() if each.role == role and each.version != version
            )
            if not holders():
                waited_for = ", ".join(behind) or "none has ever asked for weights"
                raise TimeoutError(f"no {role} acknowledged version {version} in {timeout_s:.0f} s ({waited_for})")
            for name in behind:
                del self._receivers[name]
            self._given_up[role] = replicas - holders()
            return behind

    def versions(self) -> dict[str, int]:
        """Return the version that each known receiver holds."""
        with self._changed:
            return {name: receiver.version for name, receiver in self._receivers.items()}

    def close(self) -> None:
        """Stop the thread and remove the segments."""
        self._closing = True
        self._thread.join()
        self._server.close()
        self._store.close()

    def _serve(self) -> None:
        held: list[tuple[float, WeightsPoll, Request]] = []
        while not self._closing:
            for request in self._server.poll(0.02):
                if isinstance(request.message, WeightsPoll):
                    self._note(request.message)
                    held.append((time.monotonic() + HOLD_S, request.message, request))
                else:
                    request.reply(Ack(status="refused", detail="this endpoint answers WeightsPoll only"))
            held = [item for item in held if not self._answer(*item)]

    def _note(self, poll: WeightsPoll) -> None:
        with self._changed:
            newest = self._newest
            if newest and poll.version == newest.version and poll.digest != newest.digest:
                return  # it holds other bytes under this number: not an acknowledgement
            if poll.receiver not in self._receivers:
                self._given_up[poll.role] = max(0, self._given_up[poll.role] - 1)
            self._receivers[poll.receiver] = _Receiver(poll.role, poll.version)
            if newest and poll.refused == newest.digest:
                self._damaged = True
                self.num_refused += 1
            self._changed.notify_all()

    def _answer(self, deadline_s: float, poll: WeightsPoll, request: Request) -> bool:
        newest = self._newest
        answer: Message | None = None
        # Who has refused these very bytes waits until they are staged again.
        damaged = self._damaged and newest is not None and poll.refused == newest.digest
        if newest and newest.version > poll.version and not damaged:
            answer = newest
        elif time.monotonic() > deadline_s:
            answer = Ack(detail="nothing newer")
        if answer is None:
            return False
        request.reply(answer)
        return True
