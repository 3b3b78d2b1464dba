"""The control plane over `torch.distributed.rpc`, for processes that hold torch and trust one another.

What torch 2.13 does, found by experiment (docs/asynchrony.md): a call to a dead peer fails at once and one to a stopped
peer at its timeout, but a group with dynamic membership does not survive a dead member. The dead one stays in
everybody's table, whoever joins must call it and fails, and leaves the group's membership token taken: from then on
nobody can join.

So the group has generations. The publisher forms an empty one; members join it dynamically; when a member is lost, or
somebody who joins complains, the publisher forms the next one and all who live move there (0.1 to 0.3 s). A small
TCPStore of the publisher, whose address lies in a file, holds the number of the generation. All of that happens on one
daemon thread in each process, each step with a deadline; the callers' threads only ever read and write memory.

Payloads are bytes of msgspec structs. RPC itself unpickles what it is sent and runs it: whoever reaches its port owns
the process. Loopback or a private network only.
"""

import importlib
import json
import random
import threading
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import structlog
from structlog.typing import FilteringBoundLogger

from seed_async.messages import WeightsManifest, WeightsOrders, WeightsPoll
from seed_async.weights.board import ReportBoard
from seed_async.weights.stores import connect_store, prefixed, serve_store, use_interface

CALL_TIMEOUT_S = 3.0
"""Deadline of a call, and of each step of joining a group."""
HEALTH_S = 1.0
"""A member reports at least this often."""
LOST_AFTER_S = 6.0
"""A member that was silent for this long is stopped or dead; its next words come from a later generation."""
TICK_S = 0.05
MIN_GENERATION_S = 1.0
"""Shortest life of a generation: complaints about the one before come within it."""
STALLED_S = 30.0
CLOSE_S = 5.0
PUBLISHER = "publisher"
PUBLISHER_ID = 0
_MAX_ID = 32_000  # torch holds worker ids in 16 bits

_poll_decoder = msgspec.msgpack.Decoder(WeightsPoll)
_orders_decoder = msgspec.msgpack.Decoder(WeightsOrders)


class ControlStalledError(RuntimeError):
    """The thread of the control plane has stood still in a step that torch should have ended by its deadline."""


class _Member:
    """This process's place in the group. There is one agent a process, as in torch.

    Torch binds a process to its worker id for life, so the id is drawn once and kept over the generations.
    """

    def __init__(self) -> None:
        self.worker_id = random.SystemRandom().randrange(1, _MAX_ID)
        self.on_report: Callable[[int, bytes], bytes] | None = None
        self.on_orders: Callable[[bytes], None] | None = None


_member = _Member()


def _remote_report(generation: int, body: bytes) -> bytes:
    """Run by torch in the publisher: the report of a member of `generation`; returns the orders."""
    if _member.on_report is None:
        raise RuntimeError("this process publishes nothing")
    return _member.on_report(generation, body)


def _remote_orders(body: bytes) -> None:
    """Run by torch in a member: new orders."""
    if _member.on_orders is not None:
        _member.on_orders(body)


def _worker(name: str, generation: int) -> str:
    """A worker's name: torch splits them at dashes and commas, so there are none."""
    plain = "".join(character if character.isalnum() else "_" for character in name)
    return f"{plain}_{generation}"


def _join(store: Any, generation: int, worker: str, worker_id: int) -> None:
    """Enter a generation; ends within a few times `CALL_TIMEOUT_S`, by RuntimeError when a member does not answer.

    These are the steps of `rpc.init_rpc`, which would look for the group under a prefix that counts this process's own
    joins: a process that restarts could never meet the others.
    """
    from torch.distributed import autograd
    from torch.distributed import rpc as torch_rpc

    rpc: Any = torch_rpc  # its steps below init_rpc are not public
    group = prefixed(store, f"generation-{generation}")
    group.set_timeout(timedelta(seconds=CALL_TIMEOUT_S))
    options = rpc.TensorPipeRpcBackendOptions(
        num_worker_threads=4, rpc_timeout=CALL_TIMEOUT_S, init_method="tcp://unused:0"
    )
    autograd._init(worker_id)  # type: ignore[attr-defined]
    rpc._init_rpc_backend(rpc.BackendType.TENSORPIPE, group, worker, worker_id, None, options)


def _leave() -> None:
    """Drop this process's agent without asking anybody, which a dead member could hold up."""
    from torch.distributed import rpc

    if rpc.api._is_current_rpc_agent_set():  # type: ignore[attr-defined]
        rpc.shutdown(graceful=False)


class _Thread:
    """The daemon thread of one end, and what it is doing, for the error when it stands still."""

    def __init__(self, work: Callable[[], None]) -> None:
        self._step = "starting"
        self._since_s = time.monotonic()
        self.closing = threading.Event()
        self._thread = threading.Thread(target=work, daemon=True, name="weights-rpc")

    def start(self) -> None:
        self._thread.start()

    def at(self, step: str) -> None:
        self._step, self._since_s = step, time.monotonic()

    def check(self) -> None:
        """Raise ControlStalledError when it has stood still or ended."""
        if self.closing.is_set():
            return
        silent_s = time.monotonic() - self._since_s
        if silent_s > STALLED_S:
            raise ControlStalledError(f"the rpc control plane has stood still for {silent_s:.0f} s: {self._step}")
        if not self._thread.is_alive():
            raise ControlStalledError(f"the thread of the rpc control plane has died: {self._step}")

    def close(self) -> None:
        self.closing.set()
        self._thread.join(CLOSE_S)


class RpcControl:
    """The publisher's end of the control plane."""

    def __init__(self, address_file: Path, interface: str, host: str, log: FilteringBoundLogger | None = None) -> None:
        """Listen at a free port of `host` and write it to `address_file`, where members look for it."""
        use_interface(interface)
        self._log: FilteringBoundLogger = log or structlog.get_logger()
        self._store = serve_store(host, CALL_TIMEOUT_S)
        self._board = ReportBoard()
        self._generation, self._formed_at_s = 0, 0.0
        self._members: dict[str, str] = {}
        self._told: dict[str, WeightsOrders] = {}
        _member.on_report = self._on_report
        self._thread = _Thread(self._run)
        self._form("the first")
        staging = address_file.with_suffix(".staging")
        staging.write_text(json.dumps({"host": host, "port": self._store.port}), encoding="utf-8")
        staging.rename(address_file)
        self._thread.start()

    def announce(self, manifest: WeightsManifest) -> None:
        """Sent to every member within a tick; others get it when they join."""
        self._board.announce(manifest)

    def pin(self, version: int) -> None:
        """Sent like an announcement."""
        self._board.pin(version)

    def reports(self, timeout_s: float) -> list[WeightsPoll]:
        """Return what members have said since the last call. Raises ControlStalledError."""
        self._thread.check()
        return self._board.take(timeout_s)

    def health(self) -> Mapping[str, float]:
        """Members report every second from a thread of their own."""
        return self._board.ages_s()

    def close(self) -> None:
        """Leave the group and stop."""
        self._thread.close()
        _member.on_report = None

    def _on_report(self, generation: int, body: bytes) -> bytes:
        if generation != self._generation:
            raise RuntimeError(f"generation {generation} is over")  # still under way when the next one was formed
        report = _poll_decoder.decode(body)
        self._board.note(report)
        orders = self._board.orders()
        self._members[report.receiver] = _worker(report.receiver, generation)
        self._told[report.receiver] = orders
        return msgspec.msgpack.encode(orders)

    def _run(self) -> None:
        while not self._thread.closing.wait(TICK_S):
            self._thread.at(f"looking at generation {self._generation}")
            lost = self._lost() or self._tell()
            old_enough = time.monotonic() > self._formed_at_s + MIN_GENERATION_S
            if lost:
                self._form(lost)
            elif old_enough and self._store.check([f"complaint/{self._generation}"]):
                self._form(self._store.get(f"complaint/{self._generation}").decode())
        self._thread.at("leaving")
        _leave()

    def _lost(self) -> str:
        """Name the members that have fallen silent."""
        ages_s = self._board.ages_s()
        silent = [name for name in list(self._members) if ages_s.get(name, LOST_AFTER_S) >= LOST_AFTER_S]
        return f"{', '.join(silent)} silent for {LOST_AFTER_S:g} s" if silent else ""

    def _tell(self) -> str:
        """Send changed orders to all members at once; name those that could not be told by the deadline."""
        from torch.distributed import rpc

        orders = self._board.orders()
        body = msgspec.msgpack.encode(orders)
        calls = {}
        for name, worker in list(self._members.items()):
            if self._told.get(name) != orders:
                self._told[name] = orders
                try:
                    calls[name] = rpc.rpc_async(worker, _remote_orders, args=(body,), timeout=CALL_TIMEOUT_S)
                except RuntimeError as error:
                    return f"{name}: {_first_line(error)}"
        lost = []
        for name, call in calls.items():
            self._thread.at(f"announcing to {name}")
            try:
                call.wait()
            except RuntimeError as error:
                lost.append(f"{name}: {_first_line(error)}")
        return "; ".join(lost)

    def _form(self, why: str) -> None:
        """Open the next generation; who lives follows."""
        generation = self._generation + 1
        self._thread.at(f"forming generation {generation}")
        self._generation = 0  # what is still under way belongs to nobody now
        self._members, self._told = {}, {}
        _leave()
        _join(self._store, generation, _worker(PUBLISHER, generation), PUBLISHER_ID)
        self._generation, self._formed_at_s = generation, time.monotonic()
        self._store.set("generation", str(generation))
        log = self._log.info if generation == 1 else self._log.warning
        log("rpc group formed", generation=generation, because=why)


class RpcLink:
    """A receiver's end of the control plane."""

    def __init__(self, address_file: Path, interface: str, name: str, log: FilteringBoundLogger | None = None) -> None:
        """Find the publisher in the background, now and whenever it is another one."""
        use_interface(interface)
        # Here and not in the thread: two threads that import torch at once get half of it.
        importlib.import_module("torch.distributed.rpc")
        self._log: FilteringBoundLogger = log or structlog.get_logger()
        self._address_file, self._name = address_file, name
        self._store: Any = None
        self._address: tuple[str, int] | None = None
        self._generation = 0
        self._changed = threading.Condition()
        self._report: WeightsPoll | None = None
        self._orders: WeightsOrders | None = None
        self._reported_at_s = 0.0
        self._dirty = threading.Event()
        _member.on_orders = self._on_orders
        self._thread = _Thread(self._run)
        self._thread.start()

    def report(self, report: WeightsPoll) -> None:
        """Sent by the thread as soon as it can; only the latest one matters."""
        self._report = report
        self._dirty.set()

    def orders(self, timeout_s: float) -> WeightsOrders | None:
        """Return orders that have come since the last call."""
        self._thread.check()
        with self._changed:
            if self._orders is None:
                self._changed.wait(timeout_s)
            orders, self._orders = self._orders, None
            return orders

    def close(self) -> None:
        """Leave the group and stop."""
        self._thread.close()
        _member.on_orders = None

    def _on_orders(self, body: bytes) -> None:
        with self._changed:
            self._orders = _orders_decoder.decode(body)
            self._changed.notify_all()

    def _run(self) -> None:
        while not self._thread.closing.is_set():
            self._dirty.wait(TICK_S)
            try:
                self._turn()
            except (RuntimeError, OSError, ValueError, KeyError) as error:
                # The publisher is gone or starts anew: look for it again, under its new address.
                if self._store is not None:
                    self._log.warning("rpc publisher lost", publisher=str(self._address), why=_first_line(error))
                self._store, self._generation = None, 0
                self._thread.closing.wait(4 * TICK_S)
        self._thread.at("leaving")
        _leave()

    def _turn(self) -> None:
        """Follow the generation, and report when there is something to say. Raises when the publisher is gone."""
        self._thread.at("looking for the publisher")
        self._connect()
        generation = int(self._store.get("generation"))
        if generation != self._generation:
            self._follow(generation)
        elif self._generation and (self._dirty.is_set() or time.monotonic() > self._reported_at_s + HEALTH_S):
            self._say(generation)

    def _connect(self) -> None:
        noted = json.loads(self._address_file.read_text(encoding="utf-8"))
        address = str(noted["host"]), int(noted["port"])
        if self._store is not None and address == self._address:
            return
        self._store, self._generation, self._address = None, 0, address
        self._store = connect_store(*address, CALL_TIMEOUT_S)

    def _follow(self, generation: int) -> None:
        """Move to the publisher's present generation, or complain that this one cannot be joined."""
        self._thread.at(f"joining generation {generation}")
        _leave()
        self._generation = 0
        try:
            _join(self._store, generation, _worker(self._name, generation), _member.worker_id)
        except RuntimeError as error:
            self._complain(generation, f"{self._name} cannot join: {_first_line(error)}")
            return
        self._generation = generation
        self._dirty.set()

    def _say(self, generation: int) -> None:
        from torch.distributed import rpc

        self._dirty.clear()
        if self._report is None:
            return
        self._thread.at("reporting to the publisher")
        try:
            body = rpc.rpc_sync(
                _worker(PUBLISHER, generation),
                _remote_report,
                args=(generation, msgspec.msgpack.encode(self._report)),
                timeout=CALL_TIMEOUT_S,
            )
        except RuntimeError as error:
            if int(self._store.get("generation")) == generation:
                self._complain(generation, f"{self._name} cannot reach the publisher: {_first_line(error)}")
            self._dirty.set()
            return
        self._reported_at_s = time.monotonic()
        self._on_orders(body)

    def _complain(self, generation: int, why: str) -> None:
        self._log.warning("rpc group broken", generation=generation, why=why)
        self._store.set(f"complaint/{generation}", why)
        self._thread.closing.wait(MIN_GENERATION_S)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]
