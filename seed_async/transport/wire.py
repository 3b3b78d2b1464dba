"""What both ends of the transport share: the header frame, limits, endpoints, socket options, errors."""

import math
import os
import socket as unix
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import msgspec
import zmq

from seed_async.codec import Buffer, MalformedMessageError
from seed_async.messages import PROTOCOL_VERSION, Message

MAX_MESSAGE_BYTES = 64 * 2**20
# The high-water mark counts messages, so a queue's bytes are bounded by mark x largest message.
MAX_QUEUE_BYTES = 2**30
MAX_IPC_PATH_BYTES = 107  # sun_path holds 108, the closing NUL included
MAX_CACHED_REPLIES = 1024
MAX_CACHED_REPLY_BYTES = 64 * 2**20
# How far a request may be ahead of its client's oldest open one: bounds what the server remembers of a client.
MAX_OUTSTANDING = 65_536
MAX_PEERS = 4096
RECEIVE_BURST = 64  # messages a poll: a flood cannot keep the owner's loop from turning, and they stay in the cache
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


class Header(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True):
    """The first frame; `oldest` is the lowest number that the client still waits for."""

    version: int
    kind: Literal["request", "reply"]
    sequence: int
    oldest: int


def header_frame(kind: Literal["request", "reply"], sequence: int, oldest: int = 0) -> bytes:
    """Return the first frame of a request or a reply."""
    return msgspec.msgpack.encode(Header(PROTOCOL_VERSION, kind, sequence, oldest))


def read_header(frames: Sequence[Buffer], kind: Literal["request", "reply"]) -> Header:
    """Return the header of a received message. Raises MalformedMessageError.

    The version comes first and is checked first: other versions may have another header.
    """
    try:
        header = _HEADERS.decode(frames[0] if frames else b"")
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _bad_header(frames) from error
    if header.version != PROTOCOL_VERSION:
        raise _bad_header(frames)
    if header.kind != kind or not 0 <= header.oldest <= header.sequence:
        raise MalformedMessageError("header", f"{header} is no {kind}")
    return header


_HEADERS = msgspec.msgpack.Decoder(Header)


def _bad_header(frames: Sequence[Buffer]) -> MalformedMessageError:
    try:
        fields = msgspec.msgpack.decode(frames[0], type=list[Any]) if frames else []
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        return MalformedMessageError("header", str(error))
    if not fields or type(fields[0]) is not int:
        return MalformedMessageError("header", "no protocol version")
    if fields[0] != PROTOCOL_VERSION:
        return MalformedMessageError("protocol_version", f"{fields[0]} is not {PROTOCOL_VERSION}")
    return MalformedMessageError("header", f"{fields!r:.200} is no header of this version")


def frames_bytes(frames: Sequence[Buffer]) -> int:
    """Return the bytes of all frames together."""
    return sum(map(len, frames))


def check_size(frames: Sequence[Buffer], message: Message, max_message_bytes: int) -> None:
    """Raise MessageTooLargeError when the frames of `message` are over the limit."""
    num_bytes = frames_bytes(frames)
    if num_bytes > max_message_bytes:
        raise MessageTooLargeError(f"{type(message).__name__} of {num_bytes} bytes; the limit is {max_message_bytes}")


def receive_waiting(socket: "zmq.Socket[bytes]") -> Iterator[list[Buffer]]:
    """Yield the frames of every message that has arrived, large ones without a copy; never waits."""
    while True:
        try:
            frame = socket.recv(_NOW, copy=False)
        except zmq.Again:
            return
        frames = [_content(frame)]
        while frame.more:
            frame = socket.recv(_NOW, copy=False)
            frames.append(_content(frame))
        yield frames


def _content(frame: zmq.Frame) -> Buffer:
    """A frame's bytes. ZeroMQ keeps small frames in a block with others, which a view would hold on to: copied."""
    return frame.bytes if len(frame) < _VIEWED_BYTES else frame.buffer


_VIEWED_BYTES = 16 * 1024  # above the 8 KiB that ZeroMQ reads at once
# `recv_multipart` and `send_multipart` make pyzmq's enums anew for each frame, which costs more than the transfer.
_NOW = int(zmq.NOBLOCK)
_SEND_MORE_NOW = int(zmq.NOBLOCK | zmq.SNDMORE)


def send_now(socket: "zmq.Socket[bytes]", frames: Sequence[Buffer]) -> None:
    """Send one message without waiting. Raises zmq.Again when its pipe is full; then nothing was sent."""
    for frame in frames[:-1]:
        socket.send(frame, _SEND_MORE_NOW)
    socket.send(frames[-1], _NOW)


def wait_ms(seconds: float) -> int:
    """Return whole milliseconds, rounded up, or the last one of a wait would spin."""
    return max(0, math.ceil(seconds * 1000))


def check_endpoint(endpoint: str) -> None:
    """Raise EndpointError for an endpoint that no socket can take."""
    scheme, _, address = endpoint.partition("://")
    if scheme not in ("ipc", "tcp") or not address:
        raise EndpointError(f"endpoint {endpoint!r} is neither ipc://PATH nor tcp://HOST:PORT")
    if scheme == "ipc" and len(os.fsencode(address)) > MAX_IPC_PATH_BYTES:
        raise EndpointError(
            f"ipc path {address!r} has {len(os.fsencode(address))} bytes; the limit is {MAX_IPC_PATH_BYTES}: "
            "use a shorter run directory"
        )


def refuse_served_ipc_path(endpoint: str) -> None:
    """Raise EndpointInUseError when somebody serves this ipc path: binding would silently take it from them."""
    scheme, _, path = endpoint.partition("://")
    if scheme != "ipc":
        return
    with unix.socket(unix.AF_UNIX, unix.SOCK_STREAM) as probe:
        try:
            probe.connect(path)
        except OSError:
            return  # no file, or one left by a dead process
    raise EndpointInUseError(f"{endpoint} is already served by another process")


def set_options(socket: "zmq.Socket[bytes]", max_message_bytes: int) -> None:
    """Bound the queues in bytes, never linger, and notice a host that vanished."""
    high_water_mark = min(1000, max(2, MAX_QUEUE_BYTES // max_message_bytes))
    socket.set_hwm(high_water_mark)
    socket.linger = 0
    socket.maxmsgsize = max_message_bytes
    socket.heartbeat_ivl = HEARTBEAT_INTERVAL_MS
    socket.heartbeat_timeout = HEARTBEAT_TIMEOUT_MS
