"""Weight publication between real processes: bytes a second by transport, with a receiver stopped, with a flipped byte.

    python -m seed_async.tools.bench_weights --megabytes 100 --receivers 1 2 4

Each receiver is a process of its own that copies what it gets into its "model" and checks that every value belongs to
the version that it acknowledges: nothing half-received or damaged may ever be in use.
"""

import argparse
import contextlib
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import structlog
from rich.console import Console
from rich.table import Table
from structlog.typing import FilteringBoundLogger

from seed_async.messages import WeightsManifest
from seed_async.transport import Client, Server
from seed_async.weights import (
    ControlLink,
    ControlPlane,
    Deadlines,
    SegmentSource,
    SegmentStore,
    WeightPublisher,
    WeightReceiver,
    WeightSource,
    WeightTransport,
)
from seed_async.weights.broadcast import BroadcastSource, BroadcastTransport
from seed_async.weights.control_rpc import RpcControl, RpcLink
from seed_async.weights.control_zmq import ZmqControl, ZmqLink
from seed_async.weights.manifest import ByteBuffer

HOST, INTERFACE = "127.0.0.1", "lo"
START_TIMEOUT_S = 120.0
TABLE_WIDTH = 120
LARGE_ELEMENTS, SMALL_ELEMENTS = 1 << 20, 1 << 10
STOPPED_DEADLINE_S = 4.0
"""Transfer deadline of the bench; with one receiver stopped, a publication must be over within it."""


@dataclass(frozen=True)
class Setting:
    """One combination to measure."""

    control: str
    transport: str
    receivers: int
    megabytes: int


@dataclass(frozen=True)
class Measured:
    """What one setting gave.

    For each version: `stage_s` is the publisher's copy and digest, `publish_s` includes them and ends when every
    receiver uses the version. `stopped_s` is None with a single receiver.
    """

    setting: Setting
    stage_s: list[float]
    publish_s: list[float]
    stopped_s: float | None
    given_up: tuple[str, ...]
    refused: int


def make_tensors(version: int, megabytes: int) -> dict[str, np.ndarray]:
    """Large and small tensors, as in a model, filled with the version."""
    tensors = {}
    for index in range(max(1, megabytes * (1 << 20) // (4 * LARGE_ELEMENTS))):
        tensors[f"layer.{index}.weight"] = np.full(LARGE_ELEMENTS, version, dtype=np.float32)
        tensors[f"layer.{index}.norm"] = np.full(SMALL_ELEMENTS, version, dtype=np.float32)
    return tensors


class FlippedSource:
    """A `WeightSource` that changes one bit of the first transfer of `version`."""

    def __init__(self, inner: WeightSource, version: int) -> None:
        """Damage what `inner` delivers."""
        self._inner, self._version = inner, version

    def receive(self, manifest: WeightsManifest, timeout_s: float) -> ByteBuffer:
        """Deliver, damaged once."""
        buffer = self._inner.receive(manifest, timeout_s)
        if manifest.version != self._version or manifest.attempt > 0:
            return buffer
        damaged = bytearray(buffer)
        damaged[len(damaged) // 2] ^= 1
        return damaged

    def close(self) -> None:
        """Close the other one."""
        self._inner.close()


def open_control(setting: Setting, folder: Path, log: FilteringBoundLogger) -> ControlPlane:
    """The publisher's end of the control plane."""
    if setting.control == "rpc":
        return RpcControl(folder / "rendezvous.json", INTERFACE, HOST, log)
    return ZmqControl(Server(f"ipc://{folder}/weights"))


def open_transport(setting: Setting, folder: Path, deadline_s: float, log: FilteringBoundLogger) -> WeightTransport:
    """The publisher's end of the transport."""
    if setting.transport == "gloo":
        return BroadcastTransport("gloo", INTERFACE, HOST, deadline_s, log)
    return SegmentStore(folder / "segments")


def open_link(control: str, folder: Path, name: str, log: FilteringBoundLogger) -> ControlLink:
    """A receiver's end of the control plane."""
    if control == "rpc":
        return RpcLink(folder / "rendezvous.json", INTERFACE, name, log)
    return ZmqLink(Client(f"ipc://{folder}/weights", name))


def open_source(transport: str, name: str) -> WeightSource:
    """A receiver's end of the transport."""
    return BroadcastSource("gloo", INTERFACE, name) if transport == "gloo" else SegmentSource()


def receive(arguments: argparse.Namespace) -> None:
    """Be one receiver until told to end."""
    name, log = arguments.name, structlog.get_logger()
    source = open_source(arguments.transports[0], name)
    if arguments.flip_version >= 0:
        source = FlippedSource(source, arguments.flip_version)
    link = open_link(arguments.control, arguments.folder, name, log)
    serve(WeightReceiver(link, source, name, "policy", Deadlines(arguments.deadline_s, 30.0, 30.0), log), name)


def serve(receiver: WeightReceiver, name: str) -> None:
    """Take, copy, check, acknowledge, until SIGTERM."""
    stop: list[int] = []
    signal.signal(signal.SIGTERM, lambda *_: stop.append(1))
    model: dict[str, np.ndarray] = {}
    while not stop:
        update = receiver.poll(0.05)
        if update is None:
            continue
        manifest, tensors = update
        model = model or {key: np.empty_like(tensor) for key, tensor in tensors.items()}
        for key, tensor in tensors.items():
            np.copyto(model[key], tensor)
        wrong = [key for key, tensor in model.items() if not (tensor == manifest.version).all()]
        if wrong:
            raise RuntimeError(f"version {manifest.version} is in use with other values in {wrong[:3]}")
        receiver.acknowledge(manifest)
        print(f"{name} serves {manifest.version} refused {receiver.num_refused}", flush=True)
    receiver.close()


@contextlib.contextmanager
def receivers(
    setting: Setting, folder: Path, deadline_s: float, flip_version: int
) -> Iterator[list["subprocess.Popen[bytes]"]]:
    """Run the receiver processes; the last one damages `flip_version` on its way."""
    running = []
    for index in range(setting.receivers):
        command: list[Any] = [sys.executable, "-m", "seed_async.tools.bench_weights", "--receive", f"policy-{index}:1"]
        command += ["--control", setting.control, "--transports", setting.transport, "--folder", folder]
        command += ["--deadline-s", deadline_s]
        command += ["--flip-version", flip_version if index == setting.receivers - 1 else -1]
        with (folder / f"receiver-{index}.log").open("wb") as log:
            running.append(subprocess.Popen([str(part) for part in command], stdout=log, stderr=log))
    try:
        yield running
    finally:
        for process in running:
            process.send_signal(signal.SIGCONT)
            process.terminate()
        for process in running:
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def measure(setting: Setting, rounds: int, folder: Path, deadline_s: float, log: FilteringBoundLogger) -> Measured:
    """Publish `rounds` versions, one more that is damaged once, and one with a receiver stopped."""
    flip_version = rounds + 1
    transport = open_transport(setting, folder, deadline_s, log)
    publisher = WeightPublisher(open_control(setting, folder, log), transport, Deadlines(deadline_s, 30.0, 30.0), log)
    versions = iter(range(rounds + 10))
    stage_s: list[float] = []

    def publish(replicas: int, timeout_s: float = START_TIMEOUT_S) -> tuple[float, tuple[str, ...]]:
        version = next(versions)
        tensors = make_tensors(version, setting.megabytes)
        started_s = time.monotonic()
        publisher.publish(version, tensors)
        stage_s.append(time.monotonic() - started_s)
        given_up = publisher.wait_acknowledged(version, "policy", replicas, timeout_s)
        return time.monotonic() - started_s, given_up

    with receivers(setting, folder, deadline_s, flip_version) as running:
        wait_for_start(publisher, setting, lambda: next(versions))
        seconds = [publish(setting.receivers)[0] for _ in range(rounds)]
        publish(setting.receivers)  # the damaged one
        stopped_s: float | None = None
        given_up: tuple[str, ...] = ()
        if setting.receivers > 1:
            running[0].send_signal(signal.SIGSTOP)
            stopped_s, given_up = publish(setting.receivers)
            running[0].send_signal(signal.SIGCONT)
        for index, process in enumerate(running):
            if process.poll() is not None:
                raise RuntimeError(f"a receiver ended: {(folder / f'receiver-{index}.log').read_text()[-2000:]}")
    publisher.close()
    return Measured(setting, stage_s[:rounds], seconds, stopped_s, given_up, publisher.num_refused)


def wait_for_start(publisher: WeightPublisher, setting: Setting, next_version: Any) -> None:
    """Publish a first version and wait until every receiver has it: their start is not measured."""
    version = next_version()
    publisher.publish(version, make_tensors(version, setting.megabytes))
    deadline_s = time.monotonic() + START_TIMEOUT_S
    given_up: Sequence[str] = ("nobody yet",)
    while given_up:
        given_up = publisher.wait_acknowledged(version, "policy", setting.receivers, START_TIMEOUT_S)
        if time.monotonic() > deadline_s:
            raise RuntimeError(f"the receivers did not start: {given_up}")


def print_table(results: Sequence[Measured], console: Console) -> None:
    """One row a setting."""
    titles = (
        "control",
        "bytes",
        "to",
        "MB",
        "stage s",
        "publish s",
        "best s",
        "MB/s",
        "stopped s",
        "given up",
        "refused",
    )
    table = Table(*titles)
    for each in results:
        setting, best_s = each.setting, min(each.publish_s)
        table.add_row(
            setting.control,
            setting.transport,
            str(setting.receivers),
            str(setting.megabytes),
            f"{statistics.median(each.stage_s):.2f}",
            f"{statistics.median(each.publish_s):.2f}",
            f"{best_s:.2f}",
            f"{setting.megabytes / best_s:.0f}",
            "-" if each.stopped_s is None else f"{each.stopped_s:.1f}",
            ", ".join(each.given_up) or "-",
            str(each.refused),
        )
    console.print(table)


def main() -> None:
    """Measure every combination asked for."""
    parser = argparse.ArgumentParser(prog="seed_async.tools.bench_weights", description=__doc__)
    parser.add_argument("--megabytes", type=int, default=100)
    parser.add_argument("--receivers", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--transports", nargs="+", default=["shm", "gloo"], choices=["shm", "gloo"])
    parser.add_argument("--control", default="zmq", choices=["zmq", "rpc"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--deadline-s", type=float, default=STOPPED_DEADLINE_S)
    parser.add_argument("--receive", dest="name", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--flip-version", type=int, default=-1, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.name:
        receive(arguments)
        return
    results = []
    memory = Path("/dev/shm")
    for transport in arguments.transports:
        for number in arguments.receivers:
            setting = Setting(arguments.control, transport, number, arguments.megabytes)
            with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder:
                log: FilteringBoundLogger = structlog.get_logger()
                results.append(measure(setting, arguments.rounds, Path(folder), arguments.deadline_s, log))
    print_table(results, Console(width=TABLE_WIDTH))


if __name__ == "__main__":
    main()
