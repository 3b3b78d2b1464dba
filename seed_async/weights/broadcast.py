"""Weights by collective broadcast, for receivers that are not on the publisher's host: gloo, or NCCL by the same code.

The bytes are asked for: a receiver that has seen an announcement asks through a TCPStore of the publisher, and whoever
asks within a moment gets the version in one broadcast. So a receiver that starts late or rejoins simply asks, and a
dead one is not in the next group. A process group lives as long as its members stay the same and nothing breaks.

Everything that may block runs on threads that can be abandoned. Torch is imported when an end is opened, never before.
The store and gloo accept anybody who reaches their ports: loopback or a private network only.
"""

import threading
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, Literal
from urllib.parse import urlsplit
from uuid import uuid4

import msgspec
import numpy as np
import structlog
from structlog.typing import FilteringBoundLogger

from seed_async.messages import WeightsManifest
from seed_async.weights.manifest import ByteBuffer, WeightsGoneError, build_manifest, transfer_ranges
from seed_async.weights.stores import connect_store, prefixed, serve_store, use_interface

Backend = Literal["gloo", "nccl"]
POLL_S = 0.02
GATHER_S = 0.3
"""How long the first asker of a version waits for the others that took part in the one before."""
GROUP_TRIES = 3
"""A broken transfer can be tried again this often within the deadline of the phase."""
ABANDON_MARGIN_S = 2.0


class Ask(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A receiver wants the version `key`; `group` is the process group that it still has, if any."""

    receiver: str
    key: str
    group: str = ""


class Route(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The answer: the group and the rank in it. Size 0: another version is the newest by now."""

    group: str
    rank: int
    size: int


def make_group(backend: Backend, store: Any, name: str, rank: int, size: int, timeout_s: float) -> Any:
    """Form a process group of its own, beside any other; blocks until all members are there or the time is up."""
    import torch.distributed as dist

    kind: Any = dist.ProcessGroupGloo if backend == "gloo" else dist.ProcessGroupNCCL
    return kind(prefixed(store, name), rank, size, timedelta(seconds=timeout_s))


def broadcast(group: Any, backend: Backend, manifest: WeightsManifest, buffer: Any, timeout_s: float) -> None:
    """Send or receive `buffer` (torch uint8 [N] on the CPU) range by range; rank 0 is the root."""
    import torch
    import torch.distributed as dist

    options = dist.BroadcastOptions()
    options.rootRank = options.rootTensor = 0
    for start, end in transfer_ranges(manifest):
        part = buffer[start:end]
        sent = part if backend == "gloo" else part.to("cuda")
        group.broadcast([sent], options).wait(timedelta(seconds=timeout_s))
        if sent is not part:
            torch.cuda.synchronize()
            part.copy_(sent)


def check_backend(backend: Backend) -> None:
    """Raise RuntimeError where the backend cannot work."""
    import torch

    if backend == "nccl" and not torch.cuda.is_available():
        raise RuntimeError("weights.transport nccl needs a CUDA device in every process: use gloo or shm here")


class BroadcastTransport:
    """A `WeightTransport`: a thread that answers those who ask for the newest version."""

    def __init__(
        self,
        backend: Backend,
        interface: str,
        host: str,
        timeout_s: float,
        log: FilteringBoundLogger | None = None,
    ) -> None:
        """Listen at a free port of `host`, which the manifests name; `timeout_s` bounds a transfer with its tries."""
        check_backend(backend)
        use_interface(interface)
        self._backend, self._timeout_s = backend, timeout_s / GROUP_TRIES
        self._log: FilteringBoundLogger = log or structlog.get_logger()
        self._store = serve_store(host, timeout_s)
        self._address = f"{backend}://{host}:{self._store.port}"
        self._offer: tuple[WeightsManifest, Any] | None = None
        self._asks: dict[int, Ask] = {}
        self._num_seen = 0
        self._asked_since_s = 0.0
        self._recent: dict[str, int] = {}
        self._group: tuple[str, tuple[str, ...], Any] | None = None
        self._closing = False
        self._thread = threading.Thread(target=self._serve, daemon=True, name="weights-broadcast")
        self._thread.start()

    def stage(self, version: int, tensors: Mapping[str, np.ndarray], attempt: int = 0) -> WeightsManifest:
        """Copy the tensors; from now on this version is sent to whoever asks for it."""
        import torch

        manifest, image = build_manifest(version, tensors, self._address, attempt)
        self._offer = manifest, torch.from_numpy(image)
        return manifest

    def close(self) -> None:
        """Stop the thread; a transfer that does not end is left behind."""
        self._closing = True
        self._thread.join(ABANDON_MARGIN_S)

    def _serve(self) -> None:
        while not self._closing:
            offer = self._offer
            self._take_asks(offer)
            if offer is None or not self._asks or not self._gathered(offer[0]):
                time.sleep(POLL_S)
                continue
            asks, self._asks = sorted(self._asks.items(), key=lambda item: item[1].receiver), {}
            self._send(*offer, asks)

    def _take_asks(self, offer: tuple[WeightsManifest, Any] | None) -> None:
        """Read new asks; those for another version than the newest are answered with size 0."""
        while self._num_seen < self._store.add("asks", 0) and self._store.check([f"ask/{self._num_seen + 1}"]):
            self._num_seen += 1
            ask = msgspec.msgpack.decode(self._store.get(f"ask/{self._num_seen}"), type=Ask)
            self._store.delete_key(f"ask/{self._num_seen}")
            if not self._asks:
                self._asked_since_s = time.monotonic()
            self._asks = {number: other for number, other in self._asks.items() if other.receiver != ask.receiver}
            self._asks[self._num_seen] = ask
        for number, ask in list(self._asks.items()):
            if offer is None or ask.key != offer[0].key:
                del self._asks[number]
                self._answer(number, Route(group="", rank=0, size=0))

    def _gathered(self, manifest: WeightsManifest) -> bool:
        """Whether everybody who took part lately has asked, or the others have been waited for long enough."""
        for ask in self._asks.values():
            self._recent[ask.receiver] = manifest.version
        self._recent = {name: asked for name, asked in self._recent.items() if asked >= manifest.version - 1}
        return len(self._asks) >= len(self._recent) or time.monotonic() > self._asked_since_s + GATHER_S

    def _answer(self, number: int, route: Route) -> None:
        self._store.set(f"answer/{number}", msgspec.msgpack.encode(route))

    def _send(self, manifest: WeightsManifest, image: Any, asks: Sequence[tuple[int, Ask]]) -> None:
        """One broadcast, watched from here: it ends, breaks, or is abandoned with its group."""
        members = tuple(ask.receiver for _, ask in asks)
        failure: list[Exception] = []

        def transfer() -> None:
            try:
                self._transfer(manifest, image, asks, members)
            except RuntimeError as error:  # what torch raises for a peer that is gone or late
                failure.append(error)

        started_s = time.monotonic()
        thread = threading.Thread(target=transfer, daemon=True, name="weights-send")
        thread.start()
        thread.join(2 * self._timeout_s + ABANDON_MARGIN_S)
        if thread.is_alive() or failure:
            self._group = None
            why = str(failure[0]).splitlines()[0] if failure else "not over by the deadline: abandoned"
            self._log.warning(
                "weights broadcast broke", version=manifest.version, receivers=", ".join(members), why=why
            )
        else:
            seconds = round(time.monotonic() - started_s, 3)
            self._log.info("weights broadcast", version=manifest.version, receivers=", ".join(members), seconds=seconds)

    def _transfer(
        self, manifest: WeightsManifest, image: Any, asks: Sequence[tuple[int, Ask]], members: tuple[str, ...]
    ) -> None:
        group, size = self._group, len(members) + 1
        reused = group is not None and group[1] == members and all(ask.group == group[0] for _, ask in asks)
        name = group[0] if group is not None and reused else uuid4().hex
        for rank, (number, _) in enumerate(asks, start=1):
            self._answer(number, Route(group=name, rank=rank, size=size))
        if group is None or not reused:
            self._group = None
            group = name, members, make_group(self._backend, self._store, name, 0, size, self._timeout_s)
        broadcast(group[2], self._backend, manifest, image, self._timeout_s)
        self._group = group


class BroadcastSource:
    """A `WeightSource`: asks, joins the group that it is told, receives."""

    def __init__(self, backend: Backend, interface: str, name: str) -> None:
        """`name` is this receiver's; nothing is connected yet."""
        check_backend(backend)
        use_interface(interface)
        self._backend, self._name = backend, name
        self._group: tuple[str, Any] | None = None

    def receive(self, manifest: WeightsManifest, timeout_s: float) -> ByteBuffer:
        """Take part in the next broadcast of `manifest`. Raises as `WeightSource` says."""
        import torch

        # Taken out while it is in use: a thread that was abandoned in here keeps it and nobody else has it.
        group, self._group = self._group, None
        try:
            store = self._connect(manifest, timeout_s)
            route = self._ask(store, manifest, group[0] if group else "", timeout_s)
            if route.size == 0:
                raise WeightsGoneError(f"version {manifest.version} is not offered any more")
            limit_s = timeout_s / GROUP_TRIES
            if group is None or group[0] != route.group:
                group = route.group, make_group(self._backend, store, route.group, route.rank, route.size, limit_s)
            buffer = torch.empty(manifest.num_bytes, dtype=torch.uint8)
            broadcast(group[1], self._backend, manifest, buffer, limit_s)
        except WeightsGoneError:
            self._group = group
            raise
        except RuntimeError as error:  # torch's own errors for peers that are gone or late derive from it
            raise ConnectionError(f"the transfer of version {manifest.version} broke: {error}") from error
        self._group = group
        return memoryview(buffer.numpy())  # type: ignore[arg-type]  # the stubs of Python 3.11 know no buffers

    def close(self) -> None:
        """Forget the group."""
        self._group = None

    @staticmethod
    def _connect(manifest: WeightsManifest, timeout_s: float) -> Any:
        address = urlsplit(manifest.segment)
        if address.hostname is None or address.port is None:
            raise ConnectionError(f"{manifest.segment} is no address of a broadcast")
        # A connection for each transfer: one that hangs in an abandoned thread would hold up the next.
        return connect_store(address.hostname, address.port, timeout_s)

    def _ask(self, store: Any, manifest: WeightsManifest, group: str, timeout_s: float) -> Route:
        number = store.add("asks", 1)
        store.set(f"ask/{number}", msgspec.msgpack.encode(Ask(self._name, manifest.key, group)))
        answer = f"answer/{number}"
        store.wait([answer], timedelta(seconds=timeout_s))
        route = msgspec.msgpack.decode(store.get(answer), type=Route)
        store.delete_key(answer)
        return route
