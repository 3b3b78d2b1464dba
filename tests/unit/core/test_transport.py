"""The transport over real sockets: delivery across restarts, one handling a request, and hostile peers."""

import asyncio
import contextlib
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
import zmq
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from seed_async.codec import encode
from seed_async.messages import PROTOCOL_VERSION, Ack, AnalysisRequest, Finished, GenerateReply, Message
from seed_async.transport import (
    AsyncClient,
    Client,
    EndpointError,
    EndpointInUseError,
    MessageTooLargeError,
    Request,
    Server,
    TransportTimeoutError,
)
from seed_async.transport import server as server_module

LOOPBACK = "tcp://127.0.0.1:0"


def ask(name: str) -> AnalysisRequest:
    return AnalysisRequest(analyzer=name, max_jobs=1)


def asked(request: Request) -> str:
    assert isinstance(request.message, AnalysisRequest)
    return request.message.analyzer


def big_reply(num_tokens: int) -> GenerateReply:
    ids = np.zeros(num_tokens, np.int32)
    logprobs = np.zeros(0, np.float32)
    return GenerateReply(
        request_id="r", token_ids=ids, logprobs=logprobs, versions=ids[:0], finish_reason="stop", cached_tokens=0
    )


@pytest.fixture
def server() -> Iterator[Server]:
    with contextlib.closing(Server(LOOPBACK)) as server:
        yield server


@contextlib.contextmanager
def connected(endpoint: str, resend_after_s: float = 2.0, max_message_bytes: int = 2**26) -> Iterator[Client]:
    """A client whose `submit` sends at once, so that a test need not poll it."""
    client = Client(endpoint, "asker", resend_after_s=resend_after_s, max_message_bytes=max_message_bytes)
    with contextlib.closing(client):
        assert client._requester.socket.poll(5_000, zmq.POLLOUT)
        yield client


@pytest.fixture
def client(server: Server) -> Iterator[Client]:
    with connected(server.endpoint, resend_after_s=0.05) as client:
        yield client


@contextlib.contextmanager
def answering(server: Server, handler: Callable[[Request], None]) -> Iterator[None]:
    """Poll the server in a thread of its own, so that clients may block."""
    stop = threading.Event()

    def loop() -> None:
        while not stop.is_set():
            for request in server.poll(0.02):
                handler(request)

    thread = threading.Thread(target=loop)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


@contextlib.contextmanager
def raw_peer(endpoint: str, identity: bytes = b"raw") -> Iterator["zmq.Socket[bytes]"]:
    """A socket that speaks ZeroMQ but not necessarily our protocol."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.routing_id = identity
        socket.linger = 0
        socket.connect(endpoint)
        yield socket


def header(sequence: int = 1, oldest: int = 1, kind: str = "request", version: int = PROTOCOL_VERSION) -> bytes:
    return msgspec.msgpack.encode([version, kind, sequence, oldest])


def poll_until(server: Server, done: Callable[[], bool], timeout_s: float = 5.0) -> list[Request]:
    requests: list[Request] = []
    deadline_s = time.monotonic() + timeout_s
    while not done() and time.monotonic() < deadline_s:
        requests += server.poll(0.01)
    assert done()
    return requests


def one_request(server: Server) -> Request:
    [request] = server.poll(5.0)
    return request


# Asking and answering --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", ["tcp", "ipc"])
def test_a_call_gets_its_reply_and_the_server_sees_who_asked(scheme: str, tmp_path: Path) -> None:
    seen = []

    def handler(request: Request) -> None:
        seen.append(request.peer)
        request.reply(Ack(detail=asked(request)))

    endpoint = LOOPBACK if scheme == "tcp" else f"ipc://{tmp_path}/s"
    server = Server(endpoint)
    client = Client(server.endpoint, "actor-3")
    with contextlib.closing(server), contextlib.closing(client), answering(server, handler):
        assert client.call(ask("hello"), 5.0) == Ack(detail="hello")
    assert seen[0].startswith("actor-3:")


def test_replies_may_come_late_and_in_any_order(server: Server, client: Client) -> None:
    sequences = [client.submit(ask(str(number))) for number in range(3)]
    requests: list[Request] = []
    while len(requests) < 3:
        requests += server.poll(5.0)
    assert client.poll(0.2) == []
    for request in reversed(requests):
        request.reply(Ack(detail=asked(request)))
    replies: list[tuple[int, Message]] = []
    while len(replies) < 3:
        replies += client.poll(5.0)
    assert replies == [(sequences[number], Ack(detail=str(number))) for number in (2, 1, 0)]


def test_call_keeps_the_replies_to_other_requests_for_poll(server: Server, client: Client) -> None:
    first = client.submit(ask("first"))
    with answering(server, lambda request: request.reply(Ack(detail=asked(request)))):
        assert client.call(ask("second"), 5.0) == Ack(detail="second")
        assert client.poll(5.0) == [(first, Ack(detail="first"))]


def test_a_timeout_names_the_endpoint_and_the_message_and_abandons_the_request(server: Server, client: Client) -> None:
    with pytest.raises(TransportTimeoutError, match=f"AnalysisRequest from {server.endpoint} within 0.2 s"):
        client.call(ask("x"), 0.2)
    one_request(server).reply(Ack())
    assert client.poll(0.2) == []


def test_an_abandoned_request_is_neither_resent_nor_answered(server: Server, client: Client) -> None:
    client.abandon(client.submit(ask("x")))
    request = one_request(server)
    request.reply(Ack())
    assert client.poll(0.2) == []
    assert server.poll(0.1) == []
    assert server.duplicates == 0


def test_a_client_that_starts_before_its_server_is_served(tmp_path: Path) -> None:
    endpoint = f"ipc://{tmp_path}/s"
    with contextlib.closing(Client(endpoint, "early")) as client:
        client.submit(ask("x"))
        assert client.poll(0.1) == []
        with contextlib.closing(Server(endpoint)) as server:
            deadline_s = time.monotonic() + 5.0
            requests: list[Request] = []
            while not requests and time.monotonic() < deadline_s:
                client.poll(0.02)
                requests = server.poll(0.02)
    assert [asked(request) for request in requests] == ["x"]


# Resending -------------------------------------------------------------------------------------------------------


def test_a_resent_request_that_is_open_is_handled_once(server: Server, client: Client) -> None:
    client.submit(ask("x"))
    request = one_request(server)
    deadline_s = time.monotonic() + 5.0
    while server.duplicates < 2 and time.monotonic() < deadline_s:
        client.poll(0.02)
        assert server.poll(0.02) == []
    request.reply(Ack(detail="once"))
    assert [reply for _, reply in client.poll(5.0)] == [Ack(detail="once")]


def test_a_resent_request_that_was_answered_gets_the_same_reply_again(server: Server) -> None:
    with raw_peer(server.endpoint) as peer:
        peer.send_multipart([header(), *encode(ask("x"))])
        one_request(server).reply(Ack(detail="first"))
        first = peer.recv_multipart()
        peer.send_multipart([header(), *encode(ask("x"))])
        assert poll_until(server, lambda: server.duplicates == 1) == []
        assert peer.recv_multipart() == first


def test_only_the_first_answer_counts(server: Server, client: Client) -> None:
    client.submit(ask("x"))
    request = one_request(server)
    request.reply(Ack(detail="first"))
    request.reply(Ack(detail="second"))
    assert [reply for _, reply in client.poll(5.0)] == [Ack(detail="first")]
    assert client.poll(0.1) == []
    assert server.rejected["reply_unwanted"] == 1


def test_resends_back_off_while_the_reply_is_slow(server: Server, client: Client) -> None:
    client.submit(ask("x"))
    deadline_s = time.monotonic() + 1.0
    while time.monotonic() < deadline_s:
        client.poll(0.02)
        server.poll(0.02)
    # At 0.05 s and doubling: resent after 0.05, 0.15, 0.35, 0.75 s.
    assert 2 <= server.duplicates <= 4


def test_the_server_forgets_replies_that_the_client_has(server: Server) -> None:
    with raw_peer(server.endpoint) as peer:
        for sequence in range(1, 51):
            peer.send_multipart([header(sequence, oldest=sequence), *encode(ask("x"))])
            one_request(server).reply(Ack())
    [state] = server._peers.values()
    assert list(state.answered) == [50]


def test_kept_replies_are_bounded_and_a_forgotten_one_does_not_run_its_request_again(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "MAX_CACHED_REPLIES", 2)
    with raw_peer(server.endpoint) as peer:
        for sequence in range(1, 5):
            peer.send_multipart([header(sequence), *encode(ask("x"))])
            one_request(server).reply(Ack())
        [state] = server._peers.values()
        assert [sequence for sequence, frames in state.answered.items() if frames] == [3, 4]
        peer.send_multipart([header(1), *encode(ask("x"))])
        assert poll_until(server, lambda: server.duplicates == 1) == []


def test_kept_replies_are_bounded_in_bytes(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "MAX_CACHED_REPLY_BYTES", 10_000)
    with raw_peer(server.endpoint) as peer:
        for sequence in range(1, 6):
            peer.send_multipart([header(sequence), *encode(ask("x"))])
            one_request(server).reply(big_reply(1_000))
    [state] = server._peers.values()
    assert [sequence for sequence, frames in state.answered.items() if frames] == [4, 5]
    assert state.cached_bytes < 10_000


def test_the_least_recently_heard_idle_peer_is_forgotten(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "MAX_PEERS", 2)
    for identity in (b"open", b"idle", b"new"):
        with raw_peer(server.endpoint, identity) as peer:
            peer.send_multipart([header(), *encode(ask("x"))])
            request = one_request(server)
            if identity != b"open":
                request.reply(Ack())
    assert list(server._peers) == [b"open", b"new"]


# Death and restart -----------------------------------------------------------------------------------------------

RECEIVER = """
import sys
from seed_async.messages import Ack
from seed_async.transport import Server
endpoint, path = sys.argv[1:]
server = Server(endpoint)
with open(path, "a") as log:
    while True:
        for request in server.poll(1.0):
            print(request.message.analyzer, file=log, flush=True)
            request.reply(Ack(detail=request.message.analyzer))
"""


def test_killing_the_server_again_and_again_loses_no_acknowledged_message(tmp_path: Path) -> None:
    num_kills, endpoint, log = 3, f"ipc://{tmp_path}/s", tmp_path / "received"
    names = {str(number) for number in range(1_500)}
    unsent = sorted(names)
    acknowledged: list[str] = []
    outstanding = kills = 0
    receiver = subprocess.Popen([sys.executable, "-c", RECEIVER, endpoint, str(log)])
    deadline_s = time.monotonic() + 60.0
    with contextlib.closing(Client(endpoint, "sender", resend_after_s=0.2)) as client:
        while len(acknowledged) < len(names) and time.monotonic() < deadline_s:
            while unsent and outstanding < 50:
                client.submit(ask(unsent.pop()))
                outstanding += 1
            for _, reply in client.poll(0.1):
                assert isinstance(reply, Ack)
                acknowledged.append(reply.detail)
                outstanding -= 1
            if kills < num_kills and len(acknowledged) > 300 * (kills + 1):
                receiver.send_signal(signal.SIGKILL)
                receiver.wait()
                receiver = subprocess.Popen([sys.executable, "-c", RECEIVER, endpoint, str(log)])
                kills += 1
    receiver.kill()
    receiver.wait()
    assert kills == num_kills
    assert sorted(acknowledged) == sorted(names)
    assert set(log.read_text().split()) == names


def test_a_restarted_server_gets_an_open_request_as_a_new_one(tmp_path: Path) -> None:
    endpoint = f"ipc://{tmp_path}/s"
    with contextlib.closing(Client(endpoint, "asker", resend_after_s=0.1)) as client:
        for _ in range(2):
            with contextlib.closing(Server(endpoint)) as server:
                if not client._requester.pending:
                    client.submit(ask("x"))
                requests: list[Request] = []
                deadline_s = time.monotonic() + 5.0
                while not requests and time.monotonic() < deadline_s:
                    client.poll(0.02)
                    requests = server.poll(0.02)
                assert [asked(request) for request in requests] == ["x"]


def test_a_reply_to_a_vanished_peer_is_counted_not_raised(server: Server) -> None:
    with raw_peer(server.endpoint) as peer:
        peer.send_multipart([header(), *encode(ask("x"))])
        request = one_request(server)
    server.poll(0.3)  # the server's socket learns of the end of the connection
    request.reply(Ack())
    assert server.rejected["peer_gone"] == 1


def test_a_reply_after_close_is_counted_not_raised(client: Client, server: Server) -> None:
    client.submit(ask("x"))
    request = one_request(server)
    server.close()
    request.reply(Ack())
    assert server.rejected["reply_unwanted"] == 1


# Hostile and mistaken peers --------------------------------------------------------------------------------------


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(frames=st.lists(st.binary(max_size=48), min_size=1, max_size=5), with_header=st.booleans())
def test_random_frames_never_crash_the_server(server: Server, frames: list[bytes], with_header: bool) -> None:
    before = server.rejected.total()
    with raw_peer(server.endpoint) as peer:
        peer.send_multipart([header(), *frames] if with_header else frames)
        # A new connection a case, and identities are remembered: a fresh server state makes each case count.
        server._peers.clear()
        assert poll_until(server, lambda: server.rejected.total() > before) == []


@pytest.mark.parametrize(
    ("frames", "reason"),
    [
        ([b""], "header"),
        ([b"\xc1"], "header"),
        ([b"\x91" * 100_000], "header"),
        ([msgspec.msgpack.encode([])], "header"),
        ([msgspec.msgpack.encode(["1", "request", 1, 1])], "header"),
        ([msgspec.msgpack.encode([PROTOCOL_VERSION, "request", 1])], "header"),
        ([header(kind="reply")], "header"),
        ([header(kind="surprise")], "header"),
        ([header(sequence=-1, oldest=-1)], "header"),
        ([header(sequence=1, oldest=2)], "header"),
        ([header(sequence=1, oldest=2**64 - 1)], "header"),
        ([header(version=PROTOCOL_VERSION + 1), *encode(Ack())], "protocol_version"),
        ([msgspec.msgpack.encode([PROTOCOL_VERSION + 1, {"another": "layout"}])], "protocol_version"),
        ([header(sequence=2**40), *encode(Ack())], "outstanding"),
        ([header()], "frame_count"),
        ([header(), b"x", b"y", b"z"], "frame_count"),
        ([header(), msgspec.msgpack.encode({"type": "Ack", "surprise": 1})], "schema"),
        ([header(), encode(big_reply(10))[0], b"short"], "array_size"),
    ],
)
def test_bad_frames_are_counted_by_reason(server: Server, client: Client, frames: list[bytes], reason: str) -> None:
    with raw_peer(server.endpoint) as peer:
        peer.send_multipart(frames)
        assert poll_until(server, lambda: server.rejected[reason] == 1) == []
    client.submit(ask("still served"))
    assert asked(one_request(server)) == "still served"


def test_a_sender_of_an_unreadable_body_is_told_so_once(server: Server) -> None:
    with raw_peer(server.endpoint) as peer:
        for _ in range(2):
            peer.send_multipart([header(), b"\xc1"])
        poll_until(server, lambda: server.duplicates == 1)
        _, body = peer.recv_multipart()
        assert msgspec.msgpack.decode(body, type=Ack).status == "refused"
    assert server.rejected["msgpack"] == 1


def test_an_oversize_frame_cuts_the_connection_and_parts_over_the_limit_in_all_are_refused() -> None:
    with contextlib.closing(Server(LOOPBACK, max_message_bytes=10_000)) as server:
        with raw_peer(server.endpoint, b"huge") as peer:
            peer.send_multipart([header(), bytes(10_001)])
            assert server.poll(0.3) == []
        with raw_peer(server.endpoint, b"many") as peer:
            peer.send_multipart([header(), bytes(6_000), bytes(6_000)])
            poll_until(server, lambda: server.rejected["too_large"] == 1)
        with connected(server.endpoint) as client:
            client.submit(ask("still served"))
            assert asked(one_request(server)) == "still served"


def test_a_client_refuses_to_send_what_is_too_large(server: Server) -> None:
    with connected(server.endpoint, max_message_bytes=1_000) as client:
        with pytest.raises(MessageTooLargeError, match=r"GenerateReply of \d+ bytes; the limit is 1000"):
            client.submit(big_reply(1_000))
        client.submit(ask("small"))
        assert asked(one_request(server)) == "small"


def test_a_reply_that_is_too_large_raises_and_leaves_the_request_open() -> None:
    with (
        contextlib.closing(Server(LOOPBACK, max_message_bytes=1_000)) as server,
        connected(server.endpoint) as client,
    ):
        client.submit(ask("x"))
        request = one_request(server)
        with pytest.raises(MessageTooLargeError):
            request.reply(big_reply(1_000))
        request.reply(Ack(detail="instead"))
        assert [reply for _, reply in client.poll(5.0)] == [Ack(detail="instead")]


def test_a_client_counts_a_malformed_reply_and_still_takes_the_good_one() -> None:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        port = router.bind_to_random_port("tcp://127.0.0.1")
        with connected(f"tcp://127.0.0.1:{port}") as client:
            client.submit(ask("x"))
            identity = router.recv_multipart()[0]
            for frames in ([b"junk"], [header(kind="reply"), b"junk"], [header(99, kind="reply"), *encode(Ack())]):
                router.send_multipart([identity, *frames])
            router.send_multipart([identity, header(kind="reply"), *encode(Finished(done=True))])
            assert client.poll(5.0) == [(1, Finished(done=True))]
            assert client.rejected.total() == 2


def test_replies_that_fill_the_pipe_wait_for_room() -> None:
    with contextlib.closing(Server(LOOPBACK)) as server, connected(server.endpoint, resend_after_s=30.0) as client:
        for number in range(300):
            client.submit(ask(str(number)))
        requests: list[Request] = []
        while len(requests) < 300:
            client._requester.send_due()
            requests += server.poll(0.02)
        for request in requests:
            request.reply(big_reply(10_000))
        assert server._unsent
        num_replies = 0
        deadline_s = time.monotonic() + 10.0
        while num_replies < 300 and time.monotonic() < deadline_s:
            server.poll(0.0)
            num_replies += len(client.poll(0.01))
        assert num_replies == 300
        assert server.duplicates == 0


# Endpoints -------------------------------------------------------------------------------------------------------


def test_a_long_ipc_path_is_refused_with_the_limit_at_both_ends() -> None:
    path = "/tmp/" + "x" * 103
    with pytest.raises(EndpointError, match=rf"{path}' has 108 bytes; the limit is 107"):
        Server(f"ipc://{path}")
    with pytest.raises(EndpointError, match="the limit is 107"):
        Client(f"ipc://{path}", "asker")


@pytest.mark.parametrize("endpoint", ["", "udp://127.0.0.1:1", "ipc://", "127.0.0.1:5"])
def test_an_endpoint_of_another_kind_is_refused(endpoint: str) -> None:
    with pytest.raises(EndpointError, match="neither ipc://PATH nor tcp://HOST:PORT"):
        Client(endpoint, "asker")


@pytest.mark.parametrize("scheme", ["tcp", "ipc"])
def test_an_endpoint_that_is_served_is_not_taken(scheme: str, tmp_path: Path) -> None:
    first = Server(LOOPBACK if scheme == "tcp" else f"ipc://{tmp_path}/s")
    with contextlib.closing(first), pytest.raises(EndpointInUseError, match=first.endpoint):
        Server(first.endpoint)


def test_an_endpoint_that_cannot_be_bound_says_which(tmp_path: Path) -> None:
    with pytest.raises(EndpointError, match="missing/s: No such file"):
        Server(f"ipc://{tmp_path}/missing/s")


# asyncio ---------------------------------------------------------------------------------------------------------


def test_200_concurrent_calls_each_get_their_own_reply(server: Server) -> None:
    async def calls() -> list[Message]:
        with contextlib.closing(AsyncClient(server.endpoint, "asker")) as client:
            return await asyncio.gather(*(client.call(ask(str(number)), 20.0) for number in range(200)))

    with answering(server, lambda request: request.reply(Ack(detail=asked(request)))):
        assert asyncio.run(calls()) == [Ack(detail=str(number)) for number in range(200)]


def test_async_calls_survive_a_restart_of_the_server(tmp_path: Path) -> None:
    endpoint = f"ipc://{tmp_path}/s"

    async def scenario() -> list[Message]:
        with contextlib.closing(AsyncClient(endpoint, "asker", resend_after_s=0.1)) as client:
            calls = asyncio.gather(*(client.call(ask(str(number)), 20.0) for number in range(20)))
            for attempt in range(2):
                with contextlib.closing(Server(endpoint)) as server:
                    requests: list[Request] = []
                    while len(requests) < 20:
                        await asyncio.sleep(0.01)
                        requests += server.poll(0.0)
                    if attempt:
                        for request in requests:
                            request.reply(Ack(detail=asked(request)))
                        while not calls.done():
                            await asyncio.sleep(0.01)
                            server.poll(0.0)  # sends what did not fit into the pipe
            return await calls

    assert asyncio.run(scenario()) == [Ack(detail=str(number)) for number in range(20)]


def test_an_async_timeout_names_the_endpoint_and_leaves_nothing_pending(server: Server) -> None:
    async def scenario() -> None:
        with contextlib.closing(AsyncClient(server.endpoint, "asker")) as client:
            with pytest.raises(TransportTimeoutError, match=f"AnalysisRequest from {server.endpoint} within 0.1 s"):
                await client.call(ask("x"), 0.1)
            assert not client._requester.pending

    asyncio.run(scenario())


def test_a_cancelled_async_call_is_abandoned(server: Server) -> None:
    async def scenario() -> None:
        with contextlib.closing(AsyncClient(server.endpoint, "asker")) as client:
            call = asyncio.create_task(client.call(ask("x"), 20.0))
            await asyncio.sleep(0.05)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            assert not client._requester.pending

    asyncio.run(scenario())


def test_closing_an_async_client_fails_its_waiting_calls(server: Server) -> None:
    async def scenario() -> None:
        client = AsyncClient(server.endpoint, "asker")
        call = asyncio.create_task(client.call(ask("x"), 20.0))
        await asyncio.sleep(0.05)
        client.close()
        with pytest.raises(ConnectionError, match="was closed"):
            await call

    asyncio.run(scenario())
