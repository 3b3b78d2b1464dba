"""The asking ends: one for loops that poll, one for asyncio; both resend until answered."""

import asyncio
import math
import os
import secrets
import time
from collections import Counter
from dataclasses import dataclass

import zmq

from seed_async.codec import AnyMessage, Buffer, MalformedMessageError, decode, encode
from seed_async.messages import Message
from seed_async.transport.curve import ClientCurve, Handshake, HandshakeError
from seed_async.transport.wire import (
    MAX_MESSAGE_BYTES,
    MAX_RESEND_INTERVAL_S,
    EndpointError,
    TransportTimeoutError,
    check_endpoint,
    check_size,
    header_frame,
    read_header,
    receive_waiting,
    send_now,
    set_options,
    wait_ms,
)


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
        curve: ClientCurve | None,
    ) -> None:
        check_endpoint(endpoint)
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
        set_options(self.socket, max_message_bytes)
        # Two peers with one identity: ZeroMQ ignores the second, so it differs at each start of a process.
        self.socket.routing_id = f"{name[:200]}:{os.getpid()}:{secrets.token_hex(8)}".encode()[:255]
        # Without a connection nothing is queued, or each resend would add a copy while the server is down.
        self.socket.immediate = True
        self.socket.reconnect_ivl_max = 1_000
        self._handshake = Handshake(self.socket, endpoint, curve) if curve else None
        try:
            self.socket.connect(endpoint)
        except zmq.ZMQError as error:
            self.close()
            raise EndpointError(f"cannot connect to {endpoint}: {error.strerror}") from error

    def submit(self, message: Message) -> int:
        frames = encode(message)
        check_size(frames, message, self._max_message_bytes)
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
            header = header_frame("request", sequence, next(iter(self.pending)))
            try:
                send_now(self.socket, [header, *entry.frames])
            except zmq.Again:
                self.blocked = True
                return
            entry.due_s = now_s + entry.interval_s
            entry.interval_s = max(self._resend_after_s, min(2 * entry.interval_s, MAX_RESEND_INTERVAL_S))

    def receive(self) -> list[tuple[int, Message]]:
        """Return every reply that has arrived; second copies are dropped. Raises HandshakeError."""
        if self._handshake is not None:
            self._handshake.check()
        replies: list[tuple[int, Message]] = []
        for frames in receive_waiting(self.socket):
            try:
                header = read_header(frames, "reply")
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
        if self._handshake is not None:
            self._handshake.close()
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
        curve: ClientCurve | None = None,
    ) -> None:
        """Connect in the background; `name` says who asks and need not be unique."""
        self._requester = _Requester(endpoint, name, resend_after_s, max_message_bytes, context, curve)
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
                requester.socket.poll(wait_ms(deadline_s - now_s), zmq.POLLIN | zmq.POLLOUT)
            else:
                requester.socket.poll(wait_ms(min(deadline_s, requester.next_due_s()) - now_s))


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
        curve: ClientCurve | None = None,
    ) -> None:
        """Connect in the background; `name` says who asks. Needs no running loop yet."""
        self._requester = _Requester(endpoint, name, resend_after_s, max_message_bytes, context, curve)
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

    @property
    def connected(self) -> bool:
        """Whether the server is there and takes messages: ZeroMQ drops the connection of one that has died at once."""
        self._attach()
        self._service()  # reading the state uses up the descriptor's news of arrivals
        return bool(self._requester.socket.poll(0, zmq.POLLOUT))

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
        except (zmq.ZMQError, HandshakeError) as error:
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
