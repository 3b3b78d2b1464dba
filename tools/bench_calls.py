"""The load of `bench_transport` over other stacks: remote calls of `torch.distributed.rpc` and of Ray.

Both pickle what they carry, and both accept anybody who reaches their port.
"""

import importlib
import os
import tempfile
import threading
import time
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from seed_async.journal import Journal
from seed_async.learner.buffer import GroupBuffer
from seed_async.messages import Lease, Trajectory
from seed_async.tools.bench_load import (
    LEASES_AT_ONCE,
    NUM_ACTORS,
    VOCABULARY,
    Figures,
    Measure,
    make_topology,
    make_trajectory,
    make_turns,
)


class BufferState:
    """What the other stacks call: the same buffer state and journal, without our transport."""

    def __init__(self, folder: str, trajectories: int) -> None:
        """Open the gate for all of them."""
        topology = make_topology(Path(folder), trajectories, 27500, curve=False, batches=False)
        journal = Journal(Path(folder) / "journal.jsonl")
        self._lock = threading.Lock()  # calls come from several threads
        self._buffer = GroupBuffer(topology, VOCABULARY, note=journal.note)
        self._buffer.advance(0)

    def pid(self) -> int:
        """Return this process's id."""
        return os.getpid()

    def lease(self, actor: str) -> tuple[Lease, ...]:
        """Say hello when new, and take leases."""
        with self._lock:
            if not self._buffer.knows(actor):
                self._buffer.hello(actor, actor, 1000, "bench")
            return self._buffer.grant(actor, actor, LEASES_AT_ONCE, time.monotonic())

    def submit(self, trajectory: Trajectory) -> str:
        """Validate and take over a trajectory."""
        with self._lock:
            status, detail = self._buffer.submit(trajectory, time.monotonic())
        if status != "accepted":
            raise RuntimeError(f"{status} {detail}")
        return status


Start = Callable[[str, tuple[Any, ...]], Any]
"""Starts a remote call of a method of `BufferState` with arguments; returns a handle."""


def bench_calls(name: str, trajectories: int, start: Start, wait: Callable[[Any], Any]) -> Figures:
    """Measure a stack of remote calls, with a call in flight for each actor."""
    turns = make_turns()
    measure = Measure(name, trajectories, wait(start("pid", ())))
    names = [f"actor-{number}" for number in range(NUM_ACTORS)]
    leases: list[list[Lease]] = [[] for _ in names]
    results = [False] * NUM_ACTORS
    calls = [start("lease", (actor,)) for actor in names]
    while True:
        for number, actor in enumerate(names):
            answer = wait(calls[number])
            if not results[number]:
                leases[number].extend(answer)
            if measure.add(results[number]):
                return measure.figures()
            results[number] = bool(leases[number])
            if leases[number]:
                calls[number] = start("submit", (make_trajectory(leases[number].pop(), actor, turns),))
            else:
                calls[number] = start("lease", (actor,))


_STATE: list[BufferState] = []


def rpc_call(method: str, arguments: tuple[Any, ...]) -> Any:
    """Run in the process with the state."""
    return getattr(_STATE[0], method)(*arguments)


def rpc_serve(folder: str, trajectories: int, port: int) -> None:
    """Be the process with the state."""
    from torch.distributed import rpc

    _STATE.append(BufferState(folder, trajectories))
    rpc.init_rpc("buffer", rank=0, world_size=2, rpc_backend_options=_rpc_options(port))  # type: ignore[no-untyped-call]  # torch
    rpc.shutdown()


def _rpc_options(port: int) -> Any:
    from torch.distributed import rpc

    os.environ.setdefault("TP_SOCKET_IFNAME", "lo")
    return rpc.TensorPipeRpcBackendOptions(init_method=f"tcp://127.0.0.1:{port}")


def bench_rpc(trajectories: int, port: int) -> Figures:
    """Measure `torch.distributed.rpc`, which pickles what it carries; the actors share one peer."""
    from torch.distributed import rpc

    with tempfile.TemporaryDirectory() as folder:
        server = get_context("spawn").Process(target=rpc_serve, args=(folder, trajectories, port))
        server.start()
        rpc.init_rpc("load", rank=1, world_size=2, rpc_backend_options=_rpc_options(port))  # type: ignore[no-untyped-call]  # torch

        def start(method: str, arguments: tuple[Any, ...]) -> Any:
            return rpc.rpc_async("buffer", rpc_call, args=(method, arguments))

        try:
            return bench_calls("torch.distributed.rpc", trajectories, start, lambda future: future.wait())
        finally:
            rpc.shutdown()
            server.join()


def bench_ray(trajectories: int) -> Figures:
    """Measure calls of a Ray actor."""
    ray: Any = importlib.import_module("ray")

    ray.init(num_cpus=2, include_dashboard=False, logging_level="error")
    with tempfile.TemporaryDirectory() as folder:
        state = ray.remote(BufferState).remote(folder, trajectories)

        def start(method: str, arguments: tuple[Any, ...]) -> Any:
            return getattr(state, method).remote(*arguments)

        try:
            return bench_calls("Ray actor calls", trajectories, start, ray.get)
        finally:
            ray.shutdown()
