"""The asking side of the policy servers, for asyncio roles."""

import asyncio
import time
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

import numpy as np

from seed_async.actors.rollout import SEEDS_AN_EPISODE, GenerationFailedError
from seed_async.messages import Cancel, GenerateReply, GenerateRequest, Message, Ping
from seed_async.ports import RequestKind, Sampling
from seed_async.transport import AsyncClient, TransportTimeoutError

GENERATE_TIMEOUT_S = 300.0
"""A response on a busy laptop takes seconds; a server that is silent for this long is reported, not waited for."""
LOOK_INTERVAL_S = 0.1
"""How often it is looked whether the connections hold: a server that dies closes its own at once."""
PING_INTERVAL_S = 1.0
SILENT_S = 5.0
"""A server that answers no ping for this long is passed over: stopped, hung, or in one very long step. Passing over one
that only was slow costs its cached prefixes and what it had sampled, nothing else."""


class Health:
    """Which of several servers live. `changed` is a future that ends when that changes, and is then another one."""

    def __init__(self, clients: Sequence[AsyncClient], silent_s: float = SILENT_S) -> None:
        """All are taken to be alive until they had time to connect. Needs a running loop."""
        self._clients, self._silent_s = clients, silent_s
        self._heard_at_s = [time.monotonic()] * len(clients)
        self._met = [False] * len(clients)
        self.alive = [True] * len(clients)
        self.changed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._tasks = [asyncio.create_task(self._look())]
        self._tasks += [asyncio.create_task(self._ping(index)) for index in range(len(clients))]
        for task in self._tasks:
            task.add_done_callback(self._fail)

    def server_for(self, home: int) -> int:
        """`home` if it lives, else the next one that does; `home` when none does."""
        order = [(home + step) % len(self.alive) for step in range(len(self.alive))]
        return next((index for index in order if self.alive[index]), home)

    def heard(self, index: int) -> None:
        """A server has answered something."""
        self._heard_at_s[index], self._met[index] = time.monotonic(), True

    def close(self) -> None:
        """Stop looking."""
        for task in self._tasks:
            task.cancel()

    def _fail(self, task: "asyncio.Task[None]") -> None:
        """Whoever waits for a change raises what ended the looking (keys that do not fit, say)."""
        error = None if task.cancelled() else task.exception()
        if error is not None and not self.changed.done():
            self.changed.set_exception(error)

    async def _look(self) -> None:
        while True:
            now_s = time.monotonic()
            self._met = [met or client.connected for met, client in zip(self._met, self._clients, strict=True)]
            found = [
                (client.connected or not met) and now_s - heard_at_s < self._silent_s
                for client, met, heard_at_s in zip(self._clients, self._met, self._heard_at_s, strict=True)
            ]
            if found != self.alive:
                self.alive, changed = found, self.changed
                self.changed = asyncio.get_running_loop().create_future()
                changed.set_result(None)
            await asyncio.sleep(LOOK_INTERVAL_S)

    async def _ping(self, index: int) -> None:
        while True:
            try:
                await self._clients[index].call(Ping(), self._silent_s)
                self.heard(index)
            except TransportTimeoutError:
                continue
            await asyncio.sleep(PING_INTERVAL_S)


class PolicyClient:
    """Sends each request to the policy server of its episode, so that the episode's prefix stays cached there.

    With several servers, the open requests of one that dies or falls silent are asked of another at once, and the
    episode returns when its own lives again. With one, a restarted server gets its open requests again.
    """

    def __init__(
        self,
        clients: Sequence[AsyncClient],
        name: str,
        on_moved: Callable[[], None] = lambda: None,
        silent_s: float = SILENT_S,
    ) -> None:
        """Take over a client of every server; `name` makes request ids unique. `on_moved`: a request is asked anew."""
        self._clients, self._on_moved, self._silent_s = clients, on_moved, silent_s
        self._name, self._numbers = name, count()
        self._health: Health | None = None
        self._cancels: set[asyncio.Task[Message]] = set()

    async def generate(
        self, prompt_ids: np.ndarray, sampling: Sampling, kind: RequestKind, images: Sequence[bytes] = ()
    ) -> GenerateReply:
        """Sample one response; see `ports.Engine.submit`. Raises GenerationFailedError when the request is refused."""
        home = sampling.seed // SEEDS_AN_EPISODE % len(self._clients)
        deadline_s = time.monotonic() + GENERATE_TIMEOUT_S
        while True:
            # Each try has an id of its own: a server that was only silent may still hold the one before.
            request = GenerateRequest(
                request_id=f"{self._name}:{next(self._numbers)}",
                prompt_ids=prompt_ids,
                sampling=sampling,
                kind=kind,
                images=tuple(images),
            )
            reply = await self._ask(request, home, deadline_s - time.monotonic())
            if reply is not None:
                break
            self._on_moved()
        if not isinstance(reply, GenerateReply) or reply.error or not reply.token_ids.size:
            raise GenerationFailedError(getattr(reply, "error", "") or f"unexpected answer {type(reply).__name__}")
        return reply

    def close(self) -> None:
        """Close the sockets."""
        if self._health is not None:
            self._health.close()
        for client in self._clients:
            client.close()

    async def _ask(self, request: GenerateRequest, home: int, timeout_s: float) -> Message | None:
        """Ask the server of this moment; None when another one has to be asked instead."""
        if len(self._clients) == 1:
            return await self._clients[0].call(request, timeout_s)
        if self._health is None:
            self._health = Health(self._clients, self._silent_s)
        health, index = self._health, self._health.server_for(home)
        call = asyncio.ensure_future(self._clients[index].call(request, timeout_s))
        try:
            while not call.done() and (health.alive[index] or health.server_for(home) == index):
                changed = health.changed
                waited: set[asyncio.Future[Any]] = {call, changed}
                await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
                if changed.done():
                    changed.result()
            if not call.done():
                return None
            reply = await call
            health.heard(index)
            return reply
        finally:
            if not call.done():
                call.cancel()
                self._tell(index, Cancel(request_id=request.request_id))

    def _tell(self, index: int, message: Message) -> None:
        """Send without waiting; one that is dead will not miss it."""
        task = asyncio.ensure_future(self._clients[index].call(message, GENERATE_TIMEOUT_S))
        self._cancels.add(task)
        task.add_done_callback(self._told)

    def _told(self, task: "asyncio.Task[Message]") -> None:
        self._cancels.discard(task)
        if not task.cancelled():
            task.exception()  # looked at, so that nobody complains: there is nothing to do about it
