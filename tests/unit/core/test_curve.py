"""CURVE over real sockets: listed clients come in, strangers hear about it at once, keys are kept private."""

import asyncio
import stat
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from seed_async.messages import Ack, AnalysisRequest
from seed_async.transport import (
    AsyncClient,
    Client,
    ClientCurve,
    HandshakeError,
    KeyFileError,
    KeyPair,
    Server,
    ServerCurve,
    TransportTimeoutError,
)

SERVER, FRIEND, STRANGER = KeyPair.create(), KeyPair.create(), KeyPair.create()
ASK = AnalysisRequest(analyzer="a", max_jobs=1)


@pytest.fixture
def server() -> Iterator[Server]:
    opened = Server("tcp://127.0.0.1:0", curve=ServerCurve(SERVER, frozenset({FRIEND.public})))
    yield opened
    opened.close()


def answered(server: Server, client: Client, timeout_s: float = 10.0) -> bool:
    """Ask once and serve until the answer is in."""
    sequence = client.submit(ASK)
    deadline_s = time.monotonic() + timeout_s
    while time.monotonic() < deadline_s:
        for request in server.poll(0.01):
            request.reply(Ack(detail="welcome"))
        for number, reply in client.poll(0.01):
            return number == sequence and reply == Ack(detail="welcome")
    return False


def test_a_listed_client_is_answered(server: Server) -> None:
    client = Client(server.endpoint, "friend", curve=ClientCurve(FRIEND, SERVER.public))
    assert answered(server, client)
    client.close()


@pytest.mark.parametrize("keys", [ClientCurve(STRANGER, SERVER.public), ClientCurve(FRIEND, STRANGER.public)])
def test_a_wrong_key_on_either_side_is_an_error_that_says_so_and_never_a_hang(
    server: Server, keys: ClientCurve
) -> None:
    client = Client(server.endpoint, "stranger", curve=keys)
    with pytest.raises(HandshakeError, match=r"key mismatch at tcp://127\.0\.0\.1"):
        answered(server, client)
    client.close()
    friend = Client(server.endpoint, "friend", curve=ClientCurve(FRIEND, SERVER.public))
    assert answered(server, friend)
    friend.close()


def test_an_asyncio_caller_hears_of_a_wrong_key_too(server: Server) -> None:
    async def ask() -> None:
        client = AsyncClient(server.endpoint, "stranger", curve=ClientCurve(STRANGER, SERVER.public))
        try:
            await client.call(ASK, 10)
        finally:
            client.close()

    with pytest.raises(HandshakeError):
        asyncio.run(ask())


def test_a_wrong_key_is_told_to_every_call_also_when_nobody_waited_for_it_at_first(server: Server) -> None:
    async def ask() -> None:
        client = AsyncClient(server.endpoint, "stranger", curve=ClientCurve(STRANGER, SERVER.public))
        await asyncio.sleep(0.5)  # the handshake fails before the first call
        for _ in range(2):
            with pytest.raises(HandshakeError, match="key mismatch"):
                await client.call(ASK, 10)
        client.close()

    asyncio.run(ask())


def test_a_client_without_keys_gets_nothing_through(server: Server) -> None:
    client = Client(server.endpoint, "plain")
    with pytest.raises(TransportTimeoutError):
        client.call(ASK, 0.5)
    assert server.poll(0.1) == []
    client.close()


def test_keys_come_back_from_a_file_that_only_the_owner_can_read(tmp_path: Path) -> None:
    FRIEND.save(tmp_path / "key")
    assert stat.S_IMODE((tmp_path / "key").stat().st_mode) == 0o600
    assert KeyPair.load(tmp_path / "key") == FRIEND
    assert FRIEND.secret.decode() not in repr(FRIEND)
    with pytest.raises(FileExistsError):
        STRANGER.save(tmp_path / "key")


@pytest.mark.parametrize(
    ("content", "mode", "fault"),
    [
        (b"", 0o600, "holds 0 characters"),
        (b"short", 0o600, "holds 5 characters"),
        (b'"' * 40, 0o600, "no Z85 key"),
        (FRIEND.secret, 0o644, "read by others"),
    ],
    ids=["empty", "short", "no-key", "open"],
)
def test_a_bad_key_file_is_refused_by_name(tmp_path: Path, content: bytes, mode: int, fault: str) -> None:
    (tmp_path / "key").write_bytes(content)
    (tmp_path / "key").chmod(mode)
    with pytest.raises(KeyFileError, match=fault):
        KeyPair.load(tmp_path / "key")
    with pytest.raises(KeyFileError, match="missing: No such file"):
        KeyPair.load(tmp_path / "missing")
