"""Routing over several policy servers: an episode keeps to its own while it lives, and no request is answered twice."""

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from seed_async.actors.policy_client import PolicyClient
from seed_async.actors.rollout import SEEDS_AN_EPISODE, GenerationFailedError
from seed_async.messages import Ack, Cancel, GenerateReply, GenerateRequest, Ping
from seed_async.ports import Sampling
from seed_async.transport import AsyncClient, Request, Server

WAIT_S = 30.0
PROMPT = np.arange(3, dtype=np.int32)


def reply_to(request: Request, server: int, error: str = "") -> None:
    """Answer with the server's number as the only token."""
    assert isinstance(request.message, GenerateRequest)
    size = 0 if error else 1
    request.reply(
        GenerateReply(
            request_id=request.message.request_id,
            token_ids=np.full(size, server, dtype=np.int32),
            logprobs=np.zeros(size, dtype=np.float32),
            versions=np.zeros(size, dtype=np.int32),
            finish_reason="cancelled" if error else "stop",
            cached_tokens=0,
            error=error,
        )
    )


class FakeServer:
    """Answers pings, and requests unless it is to `hold` them; `pause` stops its loop."""

    def __init__(self, folder: Path, number: int) -> None:
        """Start at once."""
        self.number, self.endpoint = number, f"ipc://{folder}/policy-{number}"
        self.hold, self.error = False, ""
        self.held: list[Request] = []
        self.asked: list[str] = []
        self.images: list[tuple[bytes, ...]] = []
        self.cancelled: list[str] = []
        self._running = threading.Event()
        self._running.set()
        self._closing = False
        self.start()

    def start(self) -> None:
        """Begin, or begin again."""
        self._closing = False
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def pause(self) -> None:
        """Stand still: nothing is answered."""
        self._running.clear()

    def resume(self) -> None:
        """Go on, and answer what was held."""
        self.hold = False
        self._running.set()

    def die(self) -> None:
        """Close the socket; open requests are lost."""
        self._closing = True
        self._running.set()
        self._thread.join()
        self.held = []

    def _run(self) -> None:
        server = Server(self.endpoint)
        while not self._closing:
            self._running.wait()
            for request in server.poll(0.01):
                self._take(request)
            if not self.hold:
                for request in self.held:
                    reply_to(request, self.number, self.error)
                self.held = []
        server.close()

    def _take(self, request: Request) -> None:
        message = request.message
        if isinstance(message, GenerateRequest):
            self.asked.append(message.request_id)
            self.images.append(message.images)
            self.held.append(request)
        else:
            assert isinstance(message, Ping | Cancel)
            if isinstance(message, Cancel):
                self.cancelled.append(message.request_id)
                self.held = [each for each in self.held if each.message.request_id != message.request_id]  # type: ignore[attr-defined]  # checked above
            request.reply(Ack())


class Fleet:
    """Servers and a client of them all."""

    def __init__(self, folder: Path, size: int, silent_s: float = WAIT_S) -> None:
        """Start the servers; the client is made by `run`. Short silence is also that of a busy machine."""
        self._silent_s = silent_s
        self.servers = [FakeServer(folder, number) for number in range(size)]
        self.moved = 0

    def _count(self) -> None:
        self.moved += 1

    def run(self, work: Callable[["Fleet"], Coroutine[Any, Any, None]]) -> None:
        """Run `work` with an open client, then close everything."""

        async def main() -> None:
            clients = [AsyncClient(server.endpoint, "test", resend_after_s=0.2) for server in self.servers]
            self.client = PolicyClient(clients, "test", self._count, self._silent_s)
            try:
                async with asyncio.timeout(WAIT_S):
                    await work(self)
            finally:
                self.client.close()

        try:
            asyncio.run(main())
        finally:
            for server in self.servers:
                server.die()

    async def settled(self) -> None:
        """Wait until each server is known to live: at first nobody is connected."""
        for server in self.servers:
            while await self.ask(server.number) != server.number:
                await asyncio.sleep(0.02)
        self.moved = 0

    async def ask(self, episode: int) -> int:
        """The number of the server that answered a request of an episode."""
        sampling = Sampling(temperature=1.0, max_new_tokens=1, seed=episode * SEEDS_AN_EPISODE)
        reply = await self.client.generate(PROMPT, sampling, "act")
        return int(reply.token_ids[0])


async def until(holds: Callable[[], Any]) -> None:
    """Wait for something."""
    while not holds():
        await asyncio.sleep(0.01)


def test_episodes_keep_to_their_server_and_are_spread(tmp_path: Path) -> None:
    """By the seed of their sampling."""

    async def work(fleet: Fleet) -> None:
        await fleet.settled()
        assert [await fleet.ask(episode) for episode in (0, 1, 2, 3, 0, 1)] == [0, 1, 2, 0, 0, 1]

    Fleet(tmp_path, 3).run(work)


def test_images_go_to_the_server_as_they_are(tmp_path: Path) -> None:
    """And nothing where there are none."""

    async def work(fleet: Fleet) -> None:
        sampling = Sampling(temperature=1.0, max_new_tokens=1)
        for images in ([], [b"\x89PNG", b"\xff\xd8"]):
            await fleet.client.generate(PROMPT, sampling, "act", images)
        assert fleet.servers[0].images == [(), (b"\x89PNG", b"\xff\xd8")]

    Fleet(tmp_path, 1).run(work)


def test_the_requests_of_a_server_that_dies_are_asked_elsewhere_at_once_and_return_when_it_lives(
    tmp_path: Path,
) -> None:
    """Its connection closes with it."""

    async def work(fleet: Fleet) -> None:
        victim = fleet.servers[1]
        await fleet.settled()
        victim.hold = True
        calls = [asyncio.ensure_future(fleet.ask(1)) for _ in range(8)]
        await until(lambda: len(victim.held) == 8)
        started_s = time.monotonic()
        victim.die()
        assert await asyncio.gather(*calls) == [0] * 8
        assert time.monotonic() - started_s < 2.0 and fleet.moved == 8
        assert await fleet.ask(1) == 0
        victim.hold = False
        victim.start()
        while await fleet.ask(1) != 1:
            await asyncio.sleep(0.05)
        assert len(victim.asked) == len(set(victim.asked)), "nothing of before its death came again"

    Fleet(tmp_path, 2).run(work)


def test_a_silent_server_is_passed_over_its_late_answers_count_for_nothing_and_it_is_told(tmp_path: Path) -> None:
    """Stopped, hung, or slow: its connection stands."""

    async def work(fleet: Fleet) -> None:
        victim = fleet.servers[0]
        await fleet.settled()
        victim.hold = True
        call = asyncio.ensure_future(fleet.ask(0))
        await until(lambda: victim.held)
        request_id = victim.asked[-1]
        victim.pause()
        assert await call == 1 and fleet.moved >= 1
        assert await fleet.ask(0) == 1
        victim.resume()
        await until(lambda: request_id in victim.cancelled)
        while await fleet.ask(0) != 0:
            await asyncio.sleep(0.05)

    Fleet(tmp_path, 2, silent_s=1.0).run(work)


def test_with_every_server_dead_a_request_waits_for_the_first_that_comes_back(tmp_path: Path) -> None:
    """Whichever it is."""

    async def work(fleet: Fleet) -> None:
        await fleet.settled()
        for server in fleet.servers:
            server.die()
        call = asyncio.ensure_future(fleet.ask(0))
        await asyncio.sleep(0.5)
        assert not call.done()
        fleet.servers[1].start()
        assert await call == 1

    Fleet(tmp_path, 2).run(work)


def test_a_refusal_is_final(tmp_path: Path) -> None:
    """Another server would say the same."""

    async def work(fleet: Fleet) -> None:
        fleet.servers[0].error = "too long"
        with pytest.raises(GenerationFailedError, match="too long"):
            await fleet.ask(0)
        assert not fleet.servers[1].asked

    Fleet(tmp_path, 2).run(work)


def test_an_only_server_that_starts_again_gets_its_open_request_again(tmp_path: Path) -> None:
    """There is nobody else."""

    async def work(fleet: Fleet) -> None:
        (server,) = fleet.servers
        server.hold = True
        call = asyncio.ensure_future(fleet.ask(0))
        await until(lambda: server.held)
        server.die()
        server.hold = False
        server.start()
        assert await call == 0 and fleet.moved == 0

    Fleet(tmp_path, 1).run(work)
