"""Acknowledged requests over ZeroMQ: DEALER to ROUTER, resent until answered, handled once while the server lives.

Wire: a header frame `[protocol version, kind, sequence, oldest]`, then the frames of `codec`. A client numbers its
requests; `oldest` is the lowest number that it still waits for, so the server knows which answers it may forget.
ZeroMQ itself loses messages without a word when a peer dies; here a message counts as delivered when its reply is in.

Every class belongs to one thread (`AsyncClient` to one event loop): sockets are not thread safe.
"""

import asyncio
import math
import os
import secrets
import socket as unix
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec
import zmq

from seed_async.codec import AnyMessage, Buffer, MalformedMessageError, decode, encode
from seed_async.messages import PROTOCOL_VERSION, Ack, Message

MAX_MESSAGE_BYTES = 64 * 2**20
# The high-water mark counts messages, so a queue's bytes are bounded by mark x largest message.
MAX_QUEUE_BYTES = 2**30
MAX_IPC_PATH_BYTES = 107  # sun_path holds 108, the closing NUL included
MAX_CACHED_REPLIES = 1024
MAX_CACHED_REPLY_BYTES = 64 * 2**20
# How far a request may be ahead of its client's oldest open one: bounds what the server remembers of a client.
MAX_OUTSTANDING = 65_536
MAX_PEERS = 4096
RECEIVE_BURST = 256  # messages a poll, so that a flood cannot keep the owner's loop from turning
MAX_RESEND_INTERVAL_S = 10.0
BLOCKED_RETRY_S = 0.002  # a full ROUTER pipe has no event to wait for
HEARTBEAT_INTERVAL_MS = 2_000  # sees a host that vanished without closing its connection
HEARTBEAT_TIMEOUT_MS = 10_000


class EndpointError(ValueError):
    """An endpoint that cannot be used, and why."""


class EndpointInUseError(EndpointError):
    """Somebody already listens at the endpoint."""


class MessageTooLargeError(ValueError):
    """A message over the byte limit, refused before it is sent: the peer would cut the connection."""


class TransportTimeoutError(TimeoutError):
    """No reply within the time given."""


class _Header(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True):
    version: int
    kind: Literal["request", "reply"]
    sequence: int
    oldest: int


def _header_frame(kind: Literal["request", "reply"], sequence: int, oldest: int = 0) -> bytes:
    return msgspec.msgpack.encode(_Header(PROTOCOL_VERSION, kind, sequence, oldest))


def _read_header(frames: Sequence[bytes], kind: Literal["request", "reply"]) -> _Header:
    """The version comes first and is checked first: other versions may have another header."""
    try:
        fields = msgspec.msgpack.decode(frames[0], type=list[Any]) if frames else []
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise MalformedMessageError("header", str(error)) from error
    if not fields or type(fields[0]) is not int:
        raise MalformedMessageError("header", "no protocol version")
    if fields[0] != PROTOCOL_VERSION:
        raise MalformedMessageError("protocol_version", f"{fields[0]} is not {PROTOCOL_VERSION}")
    try:
        header = msgspec.convert(fields, _Header)
    except msgspec.ValidationError as error:
        raise MalformedMessageError("header", str(error)) from error
    if header.kind != kind or not 0 <= header.oldest <= header.sequence:
        raise MalformedMessageError("header", f"{header} is no {kind}")
    return header


def _num_bytes(frames: Sequence[Buffer]) -> int:
    return sum(len(frame) for frame in frames)


def _check_size(frames: Sequence[Buffer], message: Message, max_message_bytes: int) -> None:
    num_bytes = _num_bytes(frames)
    if num_bytes > max_message_bytes:
        raise MessageTooLargeError(f"{type(message).__name__} of {num_bytes} bytes; the limit is {max_message_bytes}")


def _receive_waiting(socket: "zmq.Socket[bytes]") -> Iterator[list[bytes]]:
    while True:
        try:
            yield socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return


def _wait_ms(seconds: float) -> int:
    """Round up, or the last millisecond of a wait would spin."""
    return max(0, math.ceil(seconds * 1000))


def _check_endpoint(endpoint: str) -> None:
    scheme, _, address = endpoint.partition("://")
    if scheme not in ("ipc", "tcp") or not address:
        raise EndpointError(f"endpoint {endpoint!r} is neither ipc://PATH nor tcp://HOST:PORT")
    if scheme == "ipc" and len(os.fsencode(address)) > MAX_IPC_PATH_BYTES:
        raise EndpointError(
            f"ipc path {address!r} has {len(os.fsencode(address))} bytes; the limit is {MAX_IPC_PATH_BYTES}: "
            "use a shorter run directory"
        )


def _refuse_served_ipc_path(endpoint: str) -> None:
    """Binding an ipc path takes it silently from the process that serves it, so ask first."""
    scheme, _, path = endpoint.partition("://")
    if scheme != "ipc":
        return
    with unix.socket(unix.AF_UNIX, unix.SOCK_STREAM) as probe:
        try:
            probe.connect(path)
        except OSError:
            return  # no file, or one left by a dead process
    raise EndpointInUseError(f"{endpoint} is already served by another process")


def _set_options(socket: "zmq.Socket[bytes]", max_message_bytes: int) -> None:
    high_water_mark = min(1000, max(2, MAX_QUEUE_BYTES // max_message_bytes))
    socket.set_hwm(high_water_mark)
    socket.linger = 0
    socket.maxmsgsize = max_message_bytes
    socket.heartbeat_ivl = HEARTBEAT_INTERVAL_MS
    socket.heartbeat_timeout = HEARTBEAT_TIMEOUT_MS


# Server ----------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Peer:
    """What the server remembers of one client incarnation."""

    floor: int = 0  # the client waits for nothing below
    open: set[int] = field(default_factory=set)
    answered: dict[int, list[Buffer]] = field(default_factory=dict)  # [] once the reply itself is forgotten
    cached: deque[int] = field(default_factory=deque)
    cached_bytes: int = 0

    def advance(self, oldest: int) -> None:
        if oldest <= self.floor:
            return
        self.floor = oldest
        self.open = {sequence for sequence in self.open if sequence >= oldest}
        for sequence in [sequence for sequence in self.answered if sequence < oldest]:
            self.cached_bytes -= _num_bytes(self.answered.pop(sequence))
        self.cached = deque(sequence for sequence in self.cached if sequence >= oldest)

    def remember(self, sequence: int, frames: list[Buffer]) -> None:
        self.open.discard(sequence)
        self.answered[sequence] = frames
        self.cached.append(sequence)
        self.cached_bytes += _num_bytes(frames)
        while len(self.cached) > 1 and (
            len(self.cached) > MAX_CACHED_REPLIES or self.cached_bytes > MAX_CACHED_REPLY_BYTES
        ):
            forgotten = self.cached.popleft()
            self.cached_bytes -= _num_bytes(self.answered[forgotten])
            self.answered[forgotten] = []


@dataclass(frozen=True, slots=True)
class Request:
    """A message that waits for its reply; `peer` names the sending process."""

    message: Message
    peer: str
    _server: "Server"
    _identity: bytes
    _sequence: int

    def reply(self, message: Message) -> None:
        """Answer, now or at any later time, from the server's thread. Only the first answer counts.

        A reply that finds its pipe full leaves with the server's next polls.

        Raises:
            MessageTooLargeError: The request is still open.
        """
        self._server._reply(self._identity, self._sequence, message)


class Server:
    """Answers requests at one endpoint.

    `rejected` counts, by reason, what was refused and replies that could not be delivered; `duplicates` counts
    resends. Bad frames with a readable header are answered with `Ack(status="refused")`, so that the sender stops.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
        context: "zmq.Context[zmq.Socket[bytes]] | None" = None,
    ) -> None:
        """Bind `endpoint`; tcp port 0 takes a free one, see `self.endpoint`."""
        _check_endpoint(endpoint)
        _refuse_served_ipc_path(endpoint)
        self.rejected: Counter[str] = Counter()
        self.duplicates = 0
        self._max_message_bytes = max_message_bytes
        self._peers: OrderedDict[bytes, _Peer] = OrderedDict()
        self._unsent: deque[tuple[bytes, int]] = deque()
        self._own_context = context is None
        self._context = zmq.Context() if context is None else context
        self._socket = self._context.socket(zmq.ROUTER)
        _set_options(self._socket, max_message_bytes)
        self._socket.router_mandatory = True
        # A client that reconnects before its dead connection is noticed must not be ignored.
        self._socket.router_handover = True
        try:
            self._socket.bind(endpoint)
        except zmq.ZMQError as error:
            self.close()
            kind = EndpointInUseError if error.errno == zmq.EADDRINUSE else EndpointError
            raise kind(f"cannot listen at {endpoint}: {error.strerror}") from error
        self.endpoint: str = self._socket.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")

    def poll(self, timeout_s: float) -> list[Request]:
        """Return the new requests; [] when none came within `timeout_s`. Never raises for what a peer sent."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            self._flush_unsent()
            requests = self._receive()
            left_s = deadline_s - time.monotonic()
            if requests or left_s <= 0:
                return requests
            self._socket.poll(_wait_ms(min(left_s, BLOCKED_RETRY_S) if self._unsent else left_s))

    def close(self, linger_s: float = 0.0) -> None:
        """Stop; replies not yet on the wire get `linger_s` to leave. Open requests go unanswered."""
        self._socket.close(linger=_wait_ms(linger_s))
        if self._own_context:
            self._context.term()

    def _receive(self) -> list[Request]:
        requests: list[Request] = []
        num_bytes = 0
        for count, (identity, *frames) in enumerate(_receive_waiting(self._socket), start=1):
            try:
                requests.extend(self._accept(identity, frames))
            except MalformedMessageError as error:
                self.rejected[error.reason] += 1
            num_bytes += _num_bytes(frames)
            if count >= RECEIVE_BURST or num_bytes >= self._max_message_bytes:
                break
        return requests

    def _accept(self, identity: bytes, frames: list[bytes]) -> list[Request]:
        """Return the request if it is to be handled. Raises MalformedMessageError."""
        header = _read_header(frames, "request")
        sequence = header.sequence
        peer = self._peer(identity)
        peer.advance(header.oldest)
        if sequence < peer.floor or sequence in peer.open or sequence in peer.answered:
            self.duplicates += 1
            self._send(identity, sequence)
            return []
        if sequence >= peer.floor + MAX_OUTSTANDING:
            raise MalformedMessageError("outstanding", f"{sequence} is too far ahead of {peer.floor}")
        peer.open.add(sequence)
        try:
            if _num_bytes(frames) > self._max_message_bytes:
                raise MalformedMessageError("too_large", f"the limit is {self._max_message_bytes} bytes")
            message = decode(frames[1:], AnyMessage)
        except MalformedMessageError as error:
            self._reply(identity, sequence, Ack(status="refused", detail=str(error)))
            raise
        return [Request(message, identity.decode(errors="backslashreplace"), self, identity, sequence)]

    def _peer(self, identity: bytes) -> _Peer:
        peer = self._peers.get(identity)
        if peer is None:
            peer = self._peers[identity] = _Peer()
            if len(self._peers) > MAX_PEERS:
                idle = (name for name, other in self._peers.items() if not other.open and other is not peer)
                del self._peers[next(idle, next(iter(self._peers)))]
        self._peers.move_to_end(identity)
        return peer

    def _reply(self, identity: bytes, sequence: int, message: Message) -> None:
        peer = self._peers.get(identity)
        if self._socket.closed or peer is None or sequence not in peer.open:
            self.rejected["reply_unwanted"] += 1
            return
        frames = encode(message)
        _check_size(frames, message, self._max_message_bytes)
        peer.remember(sequence, frames)
        self._send(identity, sequence)

    def _send(self, identity: bytes, sequence: int) -> None:
        """Send the reply if there is one; a full pipe is tried again at the next polls."""
        peer = self._peers.get(identity)
        frames = peer.answered.get(sequence) if peer else None
        if not frames:
            return
        try:
            self._socket.send_multipart([identity, _header_frame("reply", sequence), *frames], zmq.NOBLOCK)
        except zmq.Again:
            self._unsent.append((identity, sequence))
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            # The peer may only be reconnecting: its resend finds the reply.
            self.rejected["peer_gone"] += 1

    def _flush_unsent(self) -> None:
        for _ in range(len(self._unsent)):
            self._send(*self._unsent.popleft())


# Clients ---------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Pending:
    frames: list[Buffer]
    due_s: float
    interval_s: float


class _Requester:
    """What both clients share: the socket, and the requests that have no reply yet. Never blocks."""

    def __init__(
        self,
        endpoint: str,
        name: str,
        resend_after_s: float,
        max_message_bytes: int,
        context: "zmq.Context[zmq.Socket[bytes]] | None",
    ) -> None:
        _check_endpoint(endpoint)
        self.endpoint = endpoint
        self.rejected: Counter[str] = Counter()
        self.pending: dict[int, _Pending] = {}  # in the order of their sequence numbers
        self.blocked = False
        self._resend_after_s = resend_after_s
        self._max_message_bytes = max_message_bytes
        self._next_sequence = 1
        self._own_context = context is None
        self._context = zmq.Context() if context is None else context
        self.socket = self._context.socket(zmq.DEALER)
        _set_options(self.socket, max_message_bytes)
        # Two peers with one identity: ZeroMQ ignores the second, so it differs at each start of a process.
        self.socket.routing_id = f"{name[:200]}:{os.getpid()}:{secrets.token_hex(8)}".encode()[:255]
        # Without a connection nothing is queued, or each resend would add a copy while the server is down.
        self.socket.immediate = True
        self.socket.reconnect_ivl_max = 1_000
        try:
            self.socket.connect(endpoint)
        except zmq.ZMQError as error:
            self.close()
            raise EndpointError(f"cannot connect to {endpoint}: {error.strerror}") from error

    def submit(self, message: Message) -> int:
        frames = encode(message)
        _check_size(frames, message, self._max_message_bytes)
        sequence = self._next_sequence
        self._next_sequence += 1
        self.pending[sequence] = _Pending(frames, time.monotonic(), self._resend_after_s)
        return sequence

    def send_due(self) -> None:
        """Send what is new or unanswered for too long; stops at a full or absent pipe (`blocked`)."""
        self.blocked = False
        now_s = time.monotonic()
        for sequence, entry in self.pending.items():
            if entry.due_s > now_s:
                continue
            header = _header_frame("request", sequence, next(iter(self.pending)))
            try:
                self.socket.send_multipart([header, *entry.frames], zmq.NOBLOCK)
            except zmq.Again:
                self.blocked = True
                return
            entry.due_s = now_s + entry.interval_s
            entry.interval_s = max(self._resend_after_s, min(2 * entry.interval_s, MAX_RESEND_INTERVAL_S))

    def receive(self) -> list[tuple[int, Message]]:
        """Return every reply that has arrived; second copies are dropped."""
        replies: list[tuple[int, Message]] = []
        for frames in _receive_waiting(self.socket):
            try:
                header = _read_header(frames, "reply")
                if header.sequence in self.pending:
                    replies.append((header.sequence, decode(frames[1:], AnyMessage)))
                    del self.pending[header.sequence]
            except MalformedMessageError as error:
                self.rejected[error.reason] += 1
        return replies

    def next_due_s(self) -> float:
        return min((entry.due_s for entry in self.pending.values()), default=math.inf)

    def timeout_error(self, message: Message, timeout_s: float) -> TransportTimeoutError:
        return TransportTimeoutError(
            f"no reply to {type(message).__name__} from {self.endpoint} within {timeout_s:g} s"
        )

    def close(self) -> None:
        self.socket.close(linger=0)
        if self._own_context:
            self._context.term()


class Client:
    """Sends requests and collects replies for a loop that polls. Not thread safe.

    Unanswered requests are resent only inside `poll` and `call`. A restarted server gets them again, as new ones.
    """

    def __init__(
        self,
        endpoint: str,
        name: str,
        *,
        resend_after_s: float = 2.0,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
        context: "zmq.Context[zmq.Socket[bytes]] | None" = None,
    ) -> None:
        """Connect in the background; `name` says who asks and need not be unique."""
        self._requester = _Requester(endpoint, name, resend_after_s, max_message_bytes, context)
        self._ready: list[tuple[int, Message]] = []
        self.rejected = self._requester.rejected

    def submit(self, message: Message) -> int:
        """Queue a request and return its sequence number; it leaves at once when the connection allows.

        Raises MessageTooLargeError.
        """
        sequence = self._requester.submit(message)
        self._requester.send_due()
        return sequence

    def poll(self, timeout_s: float) -> list[tuple[int, Message]]:
        """Return replies with their sequence numbers; [] when none came within `timeout_s`."""
        if self._ready:
            ready, self._ready = self._ready, []
            return ready
        return self._wait(time.monotonic() + timeout_s)

    def call(self, message: Message, timeout_s: float) -> Message:
        """Send and wait for the reply; replies to other requests are kept for `poll`.

        Raises TransportTimeoutError, naming endpoint and message type; the request is then abandoned.
        """
        sequence = self.submit(message)
        deadline_s = time.monotonic() + timeout_s
        while time.monotonic() < deadline_s:
            found: Message | None = None
            for other, reply in self._wait(deadline_s):
                if other == sequence:
                    found = reply
                else:
                    self._ready.append((other, reply))
            if found is not None:
                return found
        self.abandon(sequence)
        raise self._requester.timeout_error(message, timeout_s)

    def abandon(self, sequence: int) -> None:
        """Forget a request: no resend, and a late reply is dropped."""
        self._requester.pending.pop(sequence, None)
        self._ready = [(other, reply) for other, reply in self._ready if other != sequence]

    def close(self) -> None:
        """Drop the connection and every unanswered request."""
        self._requester.close()

    def _wait(self, deadline_s: float) -> list[tuple[int, Message]]:
        requester = self._requester
        while True:
            requester.send_due()
            replies = requester.receive()
            now_s = time.monotonic()
            if replies or now_s >= deadline_s:
                return replies
            if requester.blocked:
                requester.socket.poll(_wait_ms(deadline_s - now_s), zmq.POLLIN | zmq.POLLOUT)
            else:
                requester.socket.poll(_wait_ms(min(deadline_s, requester.next_due_s()) - now_s))


class AsyncClient:
    """Many concurrent calls on one socket, for one event loop. Not thread safe.

    A plain socket driven by the loop: ZeroMQ's descriptor tells only of changes, so each use of the socket ends by
    receiving until nothing is left.
    """

    TICK_S = 0.05  # how late a resend may be

    def __init__(
        self,
        endpoint: str,
        name: str,
        *,
        resend_after_s: float = 2.0,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
        context: "zmq.Context[zmq.Socket[bytes]] | None" = None,
    ) -> None:
        """Connect in the background; `name` says who asks. Needs no running loop yet."""
        self._requester = _Requester(endpoint, name, resend_after_s, max_message_bytes, context)
        self._futures: dict[int, asyncio.Future[Message]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None
        self.rejected = self._requester.rejected

    async def call(self, message: Message, timeout_s: float) -> Message:
        """Send and wait for the reply. A cancelled or timed-out call is abandoned.

        Raises TransportTimeoutError, naming endpoint and message type, MessageTooLargeError, and ConnectionError when
        the client is closed meanwhile.
        """
        self._attach()
        sequence = self._requester.submit(message)
        future: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        self._futures[sequence] = future
        try:
            self._service()
            async with asyncio.timeout(timeout_s):
                return await future
        except TimeoutError as error:
            raise self._requester.timeout_error(message, timeout_s) from error
        finally:
            self._requester.pending.pop(sequence, None)
            self._futures.pop(sequence, None)

    def close(self) -> None:
        """Drop the connection; calls that still wait raise ConnectionError. Call it in the loop's thread."""
        if self._timer is not None:
            self._timer.cancel()
        if self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(self._requester.socket.fileno())
        self._fail(ConnectionError(f"the client of {self._requester.endpoint} was closed"))
        self._requester.close()

    def _attach(self) -> None:
        loop = asyncio.get_running_loop()
        if self._loop is None:
            self._loop = loop
            loop.add_reader(self._requester.socket.fileno(), self._on_event)
            self._tick()
        elif self._loop is not loop:
            raise RuntimeError("an AsyncClient belongs to the event loop of its first call")

    def _tick(self) -> None:
        assert self._loop is not None
        self._timer = self._loop.call_later(self.TICK_S, self._tick)
        self._on_event()

    def _on_event(self) -> None:
        try:
            self._service()
        except zmq.ZMQError as error:
            # In a callback nobody would see it: let every waiting call raise it.
            self._fail(error)

    def _service(self) -> None:
        self._requester.send_due()
        for sequence, reply in self._requester.receive():
            future = self._futures.get(sequence)
            if future is not None and not future.done():
                future.set_result(reply)

    def _fail(self, error: Exception) -> None:
        for future in self._futures.values():
            if not future.done():
                future.set_exception(error)
