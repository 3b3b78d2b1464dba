"""Acknowledged requests over ZeroMQ: DEALER to ROUTER, resent until answered, handled once while the server lives.

Wire: a header frame `[protocol version, kind, sequence, oldest]`, then the frames of `codec`. A client numbers its
requests; `oldest` is the lowest number that it still waits for, so the server knows which answers it may forget.
ZeroMQ itself loses messages without a word when a peer dies; here a message counts as delivered when its reply is in.

Every class belongs to one thread (`AsyncClient` to one event loop): sockets are not thread safe.
"""

from seed_async.transport.client import AsyncClient, Client
from seed_async.transport.curve import ClientCurve, HandshakeError, KeyFileError, KeyPair, ServerCurve
from seed_async.transport.server import Request, Server
from seed_async.transport.wire import (
    MAX_MESSAGE_BYTES,
    EndpointError,
    EndpointInUseError,
    MessageTooLargeError,
    TransportTimeoutError,
)

__all__ = [
    "MAX_MESSAGE_BYTES",
    "AsyncClient",
    "Client",
    "ClientCurve",
    "EndpointError",
    "EndpointInUseError",
    "HandshakeError",
    "KeyFileError",
    "KeyPair",
    "MessageTooLargeError",
    "Request",
    "Server",
    "ServerCurve",
    "TransportTimeoutError",
]
