"""What every role process shares: `python -m seed_async.role ROLE --run-dir DIR --index I`.

It gives the process a name, a log, a /metrics endpoint, a timeline and a stop flag, dies with its launcher, and then
runs the role's own main loop.
"""

import argparse
import asyncio
import contextlib
import importlib
import os
import signal
import sys
import threading
import time
from collections.abc import Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import setproctitle
import structlog
from structlog.typing import FilteringBoundLogger

from seed_async.keys import RunKeys
from seed_async.metrics import Metrics
from seed_async.pulse import Pulse
from seed_async.reporting import RejectionLog
from seed_async.rundir import RunDir
from seed_async.timeline import Timeline
from seed_async.topology import Topology
from seed_async.topology_file import load_topology
from seed_async.transport import AsyncClient, Client, ClientCurve, Server

ROLE_MODULES = {
    "buffer": "seed_async.learner.buffer_server",
    "learner": "seed_async.learner.trainer",
    "policy": "seed_async.actors.policy_server",
    "analyzer": "seed_async.actors.analyzer",
    "actor": "seed_async.actors.environment_actor",
    "evaluation": "seed_async.actors.evaluation_actor",
}
"""The module of each role; its `run(context)` is the process's main loop."""

LAUNCHER_PIPE = "SEED_ASYNC_LAUNCHER_FD"
"""Environment variable with the read end of a pipe whose only writer is the launcher."""

GROUP = "SEED_ASYNC_GROUP"
"""Environment variable that names the present incarnation of a learner's ranks, by which they find each other."""

NEMESIS = "SEED_ASYNC_NEMESIS"
"""Environment variable that lets SIGUSR2 hang a process on purpose; set by `tools/nemesis.py` only."""

STOP_INTERVAL_S = 0.1
"""How soon an asyncio role sees its stop flag."""


@dataclass(frozen=True)
class RoleContext:
    """What a role's main loop is given. `stop` is set by SIGTERM: leave the loop, clean up, return.

    Each turn of the loop beats the `pulse`; a loop that stops beating is killed (`supervision.hang_timeout_s`). Before
    the first turn each part of the start that may take long ends with `pulse.step()` (`supervision.start_timeout_s`).
    """

    role: str
    index: int
    incarnation: str
    topology: Topology
    run_dir: RunDir
    metrics: Metrics
    timeline: Timeline
    pulse: Pulse
    log: FilteringBoundLogger
    stop: threading.Event

    @property
    def name(self) -> str:
        """The process's name, e.g. `actor-1`: the same after a restart, unlike the incarnation."""
        return f"{self.role}-{self.index}"

    def serve(self, endpoint: str) -> Server:
        """Bind `endpoint`, with the run's keys where it has some; what is refused is counted, and its sender logged."""
        rejections = RejectionLog(self.log, self.metrics)
        return Server(endpoint, curve=self._keys().server() if self._curve else None, on_rejected=rejections.note)

    def connect(self, endpoint: str, server: str) -> Client:
        """Return a client of the process `server` (`buffer-0`)."""
        return Client(endpoint, self.name, curve=self.client_curve(server))

    def connect_async(self, endpoint: str, server: str) -> AsyncClient:
        """Return a client of the process `server` (`buffer-0`) for an event loop."""
        return AsyncClient(endpoint, self.name, curve=self.client_curve(server))

    def client_curve(self, server: str) -> ClientCurve | None:
        """Return the keys for a connection to the process `server`; None in a run without."""
        return self._keys().client(server) if self._curve else None

    @property
    def _curve(self) -> bool:
        return self.topology.transport.curve

    def _keys(self) -> RunKeys:
        return RunKeys.load(self.run_dir.keys, self.name)


def die_with_launcher() -> None:
    """End this process when the launcher's end of the pipe closes, however the launcher died."""
    descriptor = os.environ.get(LAUNCHER_PIPE)
    if descriptor is None:
        return

    def watch(fd: int) -> None:
        os.read(fd, 1)
        os._exit(1)

    threading.Thread(target=watch, args=(int(descriptor),), daemon=True, name="launcher-watch").start()


async def run_until_stopped(context: RoleContext, work: Coroutine[Any, Any, None]) -> None:
    """Run an asyncio role to its end, or cancel it when SIGTERM sets the stop flag; its failure is raised."""
    task = asyncio.ensure_future(work)
    while not task.done() and not context.stop.is_set():
        context.pulse.beat()  # a turn of the event loop, which a blocked coroutine would hold up
        await asyncio.wait({task}, timeout=STOP_INTERVAL_S)
    if not task.done():
        task.cancel()
    with contextlib.suppress(asyncio.CancelledError):  # the cancellation above
        await task


def _configure_log(role: str, index: int) -> FilteringBoundLogger:
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso"),
            structlog.processors.LogfmtRenderer(key_order=["timestamp", "level", "event"], bool_as_flag=False),
        ],
        logger_factory=structlog.PrintLoggerFactory(file=sys.stderr),
    )
    log: FilteringBoundLogger = structlog.get_logger().bind(role=role, index=index)
    return log


def main() -> None:
    """Run one role until it is done or told to stop; exit status 0 means that it ended as it should."""
    parser = argparse.ArgumentParser(prog="seed_async.role")
    parser.add_argument("role", choices=sorted(ROLE_MODULES))
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--index", type=int, default=0)
    arguments = parser.parse_args()
    stop = threading.Event()
    # SIGINT reaches the whole foreground process group; the launcher alone decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    if NEMESIS in os.environ:
        # The main thread alone stands still; the threads of ZeroMQ go on answering.
        signal.signal(signal.SIGUSR2, lambda *_: time.sleep(3600))
    die_with_launcher()
    setproctitle.setproctitle(f"seed-async {arguments.role}-{arguments.index} {arguments.run_dir.name}")
    run_dir = RunDir(arguments.run_dir)
    metrics = Metrics(arguments.role, str(arguments.index))
    metrics.serve(run_dir.targets)
    timeline = Timeline(
        run_dir.timeline / f"{arguments.role}-{arguments.index}.jsonl", arguments.role, str(arguments.index)
    )
    context = RoleContext(
        role=arguments.role,
        index=arguments.index,
        incarnation=uuid4().hex[:12],
        topology=load_topology(run_dir.topology),
        run_dir=run_dir,
        metrics=metrics,
        timeline=timeline,
        pulse=Pulse(run_dir.pulse(f"{arguments.role}-{arguments.index}")),
        log=_configure_log(arguments.role, arguments.index),
        stop=stop,
    )
    context.log.info("started", pid=os.getpid(), incarnation=context.incarnation)
    try:
        module = importlib.import_module(ROLE_MODULES[arguments.role])
        context.pulse.step()
        module.run(context)
    finally:
        timeline.close()
    context.log.info("ended")


if __name__ == "__main__":
    main()
