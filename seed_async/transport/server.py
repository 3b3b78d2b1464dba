"""The answering end: a ROUTER that hands each request out once and remembers its answer."""

import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field

import zmq

from seed_async.codec import AnyMessage, Buffer, MalformedMessageError, decode, encode
from seed_async.messages import Ack, Message
from seed_async.transport.curve import ServerCurve, secure_server
from seed_async.transport.wire import (
    BLOCKED_RETRY_S,
    MAX_CACHED_REPLIES,
    MAX_CACHED_REPLY_BYTES,
    MAX_MESSAGE_BYTES,
    MAX_OUTSTANDING,
    MAX_PEERS,
    RECEIVE_BURST,
    EndpointError,
    EndpointInUseError,
    check_endpoint,
    check_size,
    frames_bytes,
    header_frame,
    read_header,
    receive_waiting,
    refuse_served_ipc_path,
    send_now,
    set_options,
    wait_ms,
)


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
        if self.open:
            self.open = {sequence for sequence in self.open if sequence >= oldest}
        for sequence in [sequence for sequence in self.answered if sequence < oldest]:
            self.cached_bytes -= frames_bytes(self.answered.pop(sequence))
        # In the order of the answers, not of the numbers.
        if self.cached and (len(self.cached) > 1 or self.cached[0] < oldest):
            self.cached = deque(sequence for sequence in self.cached if sequence >= oldest)

    def remember(self, sequence: int, frames: list[Buffer]) -> None:
        self.open.discard(sequence)
        self.answered[sequence] = frames
        self.cached.append(sequence)
        self.cached_bytes += frames_bytes(frames)
        while len(self.cached) > 1 and (
            len(self.cached) > MAX_CACHED_REPLIES or self.cached_bytes > MAX_CACHED_REPLY_BYTES
        ):
            forgotten = self.cached.popleft()
            self.cached_bytes -= frames_bytes(self.answered[forgotten])
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


def _peer_name(identity: bytes) -> str:
    return identity.decode(errors="backslashreplace")


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
        curve: ServerCurve | None = None,
        on_rejected: Callable[[str, str, str], None] = lambda *_: None,
    ) -> None:
        """Bind `endpoint`; tcp port 0 takes a free one, see `self.endpoint`. With `curve`, strangers are refused.

        `on_rejected(peer, reason, detail)` is told of everything that `rejected` counts.
        """
        check_endpoint(endpoint)
        refuse_served_ipc_path(endpoint)
        self.rejected: Counter[str] = Counter()
        self.duplicates = 0
        self._on_rejected = on_rejected
        self._max_message_bytes = max_message_bytes
        self._peers: OrderedDict[bytes, _Peer] = OrderedDict()
        self._unsent: deque[tuple[bytes, int]] = deque()
        self._own_context = context is None
        self._context = zmq.Context() if context is None else context
        self._socket = self._context.socket(zmq.ROUTER)
        set_options(self._socket, max_message_bytes)
        self._socket.router_mandatory = True
        # A client that reconnects before its dead connection is noticed must not be ignored.
        self._socket.router_handover = True
        self._authenticator = secure_server(self._context, self._socket, curve) if curve else None
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
            self._socket.poll(wait_ms(min(left_s, BLOCKED_RETRY_S) if self._unsent else left_s))

    def close(self, linger_s: float = 0.0) -> None:
        """Stop; replies not yet on the wire get `linger_s` to leave. Open requests go unanswered."""
        self._socket.close(linger=wait_ms(linger_s))
        if self._authenticator is not None:
            self._authenticator.stop()
        if self._own_context:
            self._context.term()

    def _receive(self) -> list[Request]:
        requests: list[Request] = []
        num_bytes = 0
        for count, (sender, *frames) in enumerate(receive_waiting(self._socket), start=1):
            identity = bytes(sender)
            try:
                requests.extend(self._accept(identity, frames))
            except MalformedMessageError as error:
                self._reject(identity, error.reason, str(error))
            num_bytes += frames_bytes(frames)
            if count >= RECEIVE_BURST or num_bytes >= self._max_message_bytes:
                break
        return requests

    def _accept(self, identity: bytes, frames: list[Buffer]) -> list[Request]:
        """Return the request if it is to be handled. Raises MalformedMessageError."""
        header = read_header(frames, "request")
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
            if frames_bytes(frames) > self._max_message_bytes:
                raise MalformedMessageError("too_large", f"the limit is {self._max_message_bytes} bytes")
            message = decode(frames[1:], AnyMessage)
        except MalformedMessageError as error:
            self._reply(identity, sequence, Ack(status="refused", detail=str(error)))
            raise
        return [Request(message, _peer_name(identity), self, identity, sequence)]

    def _reject(self, identity: bytes, reason: str, detail: str) -> None:
        self.rejected[reason] += 1
        self._on_rejected(_peer_name(identity), reason, detail)

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
            self._reject(identity, "reply_unwanted", f"{type(message).__name__} {sequence}")
            return
        frames = encode(message)
        check_size(frames, message, self._max_message_bytes)
        peer.remember(sequence, frames)
        self._send(identity, sequence)

    def _send(self, identity: bytes, sequence: int) -> None:
        """Send the reply if there is one; a full pipe is tried again at the next polls."""
        peer = self._peers.get(identity)
        frames = peer.answered.get(sequence) if peer else None
        if not frames:
            return
        try:
            send_now(self._socket, [identity, header_frame("reply", sequence), *frames])
        except zmq.Again:
            self._unsent.append((identity, sequence))
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            # The peer may only be reconnecting: its resend finds the reply.
            self._reject(identity, "peer_gone", f"the answer to {sequence}")

    def _flush_unsent(self) -> None:
        for _ in range(len(self._unsent)):
            self._send(*self._unsent.popleft())
