"""CURVE: encrypted and authenticated connections, for endpoints that are not on one host.

Each side has a key pair; a client knows the server's public key, a server lists the public keys that it lets in.
ZeroMQ says nothing to a client with a wrong key, so the client watches its own handshake.
"""

import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils.monitor import parse_monitor_message

KEY_CHARACTERS = 40
_DOMAIN = "seed-async"


class KeyFileError(ValueError):
    """A key file that is missing, malformed or readable by others."""


class HandshakeError(ConnectionError):
    """The other side refused our key, or has another one than we were told."""


@dataclass(frozen=True)
class KeyPair:
    """A public key and its secret, each 40 characters of Z85."""

    public: bytes
    secret: bytes = field(repr=False)

    @staticmethod
    def create() -> "KeyPair":
        """Make a new pair."""
        return KeyPair(*zmq.curve_keypair())

    @staticmethod
    def load(path: Path) -> "KeyPair":
        """Read a pair from the secret's file. Raises KeyFileError."""
        try:
            mode = path.stat().st_mode & 0o777
            secret = path.read_bytes().strip()
        except OSError as error:
            raise KeyFileError(f"{path}: {error.strerror}") from error
        if mode & 0o077:
            raise KeyFileError(f"{path} may be read by others (mode {mode:o}): chmod 600")
        if len(secret) != KEY_CHARACTERS:
            raise KeyFileError(f"{path} holds {len(secret)} characters, a secret key has {KEY_CHARACTERS}")
        try:
            return KeyPair(zmq.curve_public(secret), secret)
        except (zmq.ZMQError, ValueError) as error:
            raise KeyFileError(f"{path} is no Z85 key: {error}") from error

    def save(self, path: Path) -> None:
        """Write the secret to a new file that only its owner can read. Raises FileExistsError."""
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(self.secret + b"\n")


@dataclass(frozen=True)
class ServerCurve:
    """A server's keys, and whom it lets in."""

    keys: KeyPair
    clients: frozenset[bytes]


@dataclass(frozen=True)
class ClientCurve:
    """A client's keys, and the public key that the server must have."""

    keys: KeyPair
    server: bytes


class _Allowed:
    """Tells ZeroMQ's authenticator which public keys come in."""

    def __init__(self, clients: Iterable[bytes]) -> None:
        self._clients = frozenset(clients)

    def callback(self, domain: str, key: bytes) -> bool:
        return key in self._clients


def secure_server(
    context: "zmq.Context[zmq.Socket[bytes]]", socket: "zmq.Socket[bytes]", curve: ServerCurve
) -> ThreadAuthenticator:
    """Let only the listed clients connect to `socket`, before it is bound; stop the result when it is closed."""
    authenticator = ThreadAuthenticator(context)
    authenticator.start()
    authenticator.configure_curve_callback(domain=_DOMAIN, credentials_provider=_Allowed(curve.clients))
    socket.zap_domain = _DOMAIN.encode()
    socket.curve_server = True
    socket.curve_publickey = curve.keys.public
    socket.curve_secretkey = curve.keys.secret
    return authenticator


class Handshake:
    """A client's own view of its handshake."""

    def __init__(self, socket: "zmq.Socket[bytes]", endpoint: str, curve: ClientCurve) -> None:
        """Set the keys of `socket`, before it connects, and watch it."""
        socket.curve_serverkey = curve.server
        socket.curve_publickey = curve.keys.public
        socket.curve_secretkey = curve.keys.secret
        self._socket, self._endpoint = socket, endpoint
        self._failure = ""
        self._monitor = socket.get_monitor_socket(
            zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
        )

    def check(self) -> None:
        """Raise HandshakeError when the server refused us or is not the one that we know. Never waits.

        It is told once, and the socket does not try again: whoever asks later hears of it as well.
        """
        if not self._failure and self._monitor.poll(0):
            event = parse_monitor_message(self._monitor.recv_multipart())
            self._failure = f"key mismatch at {self._endpoint} ({zmq.Event(event['event'])!r})"
        if self._failure:
            raise HandshakeError(self._failure)

    def close(self) -> None:
        """Stop watching; call before the socket is closed."""
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
