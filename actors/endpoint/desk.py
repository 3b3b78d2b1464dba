"""Where threads leave requests for the one thread that advances an engine, and wait for what it samples.

Everything that is shared lies in queues and under one lock; the engine is touched by its owner's thread alone.
"""

import queue
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count

import numpy as np

from seed_async.ports import Generation, RequestRefusedError, Sampled, Sampling, ServingEngine

PREFIX = "http:"
"""Request ids of the desk; no other asker's begin with it."""


class DeskFullError(RuntimeError):
    """As many requests are open as may be: ask again later."""


class DeskClosedError(RequestRefusedError):
    """The server ends before the response does."""


@dataclass
class Ticket:
    """One request. Its asker reads `events`: parts of the response if it wants them, then the end or a refusal."""

    request_id: str
    prompt_ids: np.ndarray
    sampling: Sampling
    stream: bool
    images: tuple[bytes, ...] = ()
    events: "queue.SimpleQueue[Sampled | Generation | RequestRefusedError]" = field(default_factory=queue.SimpleQueue)
    left: threading.Event = field(default_factory=threading.Event)
    """Set by an asker that does not want the response any more."""
    num_shown: int = 0

    def show(self, sampled: Sampled) -> None:
        """Hand over what is new."""
        if sampled.token_ids.size > self.num_shown:
            self.events.put(Sampled(sampled.token_ids[self.num_shown :], sampled.logprobs[self.num_shown :]))
            self.num_shown = sampled.token_ids.size


class RequestDesk:
    """At most `max_open` requests, counted from `ask` until the engine has ended them."""

    def __init__(self, max_open: int) -> None:
        """Nothing is open and nothing served yet."""
        self._max_open = max_open
        self._new: queue.SimpleQueue[Ticket] = queue.SimpleQueue()
        self._running: dict[str, Ticket] = {}
        self._numbers = count()
        self._lock = threading.Lock()
        self._num_open = 0
        self._arrived = threading.Event()
        self._turned_at_s = time.monotonic()
        self.version = -1
        """The version that serves."""

    def ask(
        self, prompt_ids: np.ndarray, sampling: Sampling, *, stream: bool, images: tuple[bytes, ...] = ()
    ) -> Ticket:
        """Leave a request, from any thread. Raises DeskFullError."""
        with self._lock:
            if self._num_open >= self._max_open:
                raise DeskFullError(f"{self._max_open} requests are open already")
            self._num_open += 1
            ticket = Ticket(f"{PREFIX}{next(self._numbers)}", prompt_ids, sampling, stream, images)
        self._new.put(ticket)
        self._arrived.set()
        return ticket

    def silent_s(self) -> float:
        """Seconds since the engine's loop last turned."""
        return time.monotonic() - self._turned_at_s

    @property
    def num_running(self) -> int:
        """Requests in the engine's hands; for its thread."""
        return len(self._running)

    def exchange(self, engine: ServingEngine, version: int, *, admit: bool = True) -> None:
        """One turn of the engine's thread: submit what is new, cancel what is not wanted, show what is sampled."""
        self._turned_at_s, self.version = time.monotonic(), version
        for ticket in self._arrivals() if admit else ():
            try:
                engine.submit(ticket.request_id, ticket.prompt_ids, ticket.sampling, "chat", ticket.images)
            except RequestRefusedError as error:
                self._end(ticket, error)
            else:
                self._running[ticket.request_id] = ticket
            if ticket.images:  # decoding them takes time, which the requests that run wait for: more in the next turn
                self._arrived.set()
                break
        for ticket in self._running.values():
            if ticket.left.is_set():
                engine.cancel(ticket.request_id)
            elif ticket.stream:
                ticket.show(engine.sampled(ticket.request_id))

    def answer(self, generation: Generation) -> bool:
        """Hand over a finished response; False when the request is not the desk's. For the engine's thread."""
        ticket = self._running.pop(generation.request_id, None)
        if ticket is not None:
            self._end(ticket, generation)
        return ticket is not None

    def wait(self, timeout_s: float) -> None:
        """Wait for something new, up to `timeout_s`; for an engine's thread that has nothing else to do."""
        self._arrived.wait(timeout_s)

    def close(self) -> None:
        """Refuse everything that is open; for the engine's thread."""
        for ticket in [*self._arrivals(), *self._running.values()]:
            self._end(ticket, DeskClosedError("the server is ending"))
        self._running.clear()

    def _arrivals(self) -> Iterator[Ticket]:
        self._arrived.clear()
        while not self._new.empty():
            ticket = self._new.get_nowait()
            if ticket.left.is_set():
                self._end(ticket, RequestRefusedError("the client has left"))
            else:
                yield ticket

    def _end(self, ticket: Ticket, end: Generation | RequestRefusedError) -> None:
        with self._lock:
            self._num_open -= 1
        ticket.events.put(end)
