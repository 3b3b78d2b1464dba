"""Measures trajectories through the buffer: acknowledged, validated, journalled; and the same load over other stacks.

    python -m seed_async.tools.bench_transport --trajectories 20000

The buffer is the real role process; the load is one process with a connection for each of 256 actors, which say hello,
ask for leases and send one trajectory after another, each when the one before is acknowledged. The other stacks
(`torch.distributed.rpc`, Ray) carry the same trajectories to the same buffer state behind a remote call, with as many
calls in flight. `--batches` adds a learner that takes every batch.
"""

import argparse
import contextlib
import importlib.util
import json
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import zmq

from seed_async.codec import Buffer, decode, encode
from seed_async.keys import RunKeys, create_keys
from seed_async.messages import Ack, Batch, BatchRequest, Lease, LeaseGrant, LeaseRequest, RunFinished, Turn
from seed_async.rundir import RunDir
from seed_async.supervisor import role_command
from seed_async.tools.bench_calls import bench_ray, bench_rpc
from seed_async.tools.bench_load import (
    ANY_LEASE,
    CALL_TIMEOUT_S,
    LEASES_AT_ONCE,
    NUM_ACTORS,
    NUM_TURNS,
    RESPONSE_TOKENS,
    VOCABULARY,
    Figures,
    Measure,
    hello,
    lease_fields,
    make_topology,
    make_trajectory,
    make_turns,
)
from seed_async.topology import Topology
from seed_async.topology_file import dump_topology
from seed_async.transport import Client, ClientCurve
from seed_async.transport.wire import header_frame, send_now


def make_run(topology: Topology) -> RunDir:
    """Write what the buffer's process reads: the topology, a model's configuration, and keys."""
    run_dir = RunDir(topology.run_dir)
    for folder in (run_dir.root, run_dir.targets, topology.run.dir / "model"):
        folder.mkdir(parents=True, exist_ok=True)
    run_dir.topology.write_text(dump_topology(topology), encoding="utf-8")
    (topology.run.dir / "model" / "config.json").write_text(json.dumps({"vocab_size": VOCABULARY}))
    if topology.transport.curve:
        create_keys(run_dir.keys, ["buffer-0", "learner-0", *(f"actor-{number}" for number in range(NUM_ACTORS))])
    return run_dir


class Encoder:
    """Encodes trajectories that differ in their lease only: one process does the work of 256 actors here."""

    def __init__(self, turns: tuple[Turn, ...]) -> None:
        """Keep the array frame, and each field of the body as its bytes."""
        body, self._arrays = map(bytes, encode(make_trajectory(ANY_LEASE, "", turns)))
        self._fields = {
            name: msgspec.Raw(msgspec.msgpack.encode(value)) for name, value in msgspec.msgpack.decode(body).items()
        }

    def frames(self, lease: Lease, actor: str) -> list[bytes]:
        """Return the frames of a trajectory, as `codec.encode` would."""
        return [msgspec.msgpack.encode(self._fields | lease_fields(lease, actor)), self._arrays]


class Actor:
    """One connection of the load: its leases in hand, and one request in flight. It sends nothing twice."""

    def __init__(self, socket: "zmq.Socket[bytes]", name: str, encoder: Encoder) -> None:
        """Say hello."""
        self._socket, self._name, self._encoder = socket, name, encoder
        self._leases: list[Lease] = []
        self._sends_result = False
        self._sequence = 0
        self._send(encode(hello(name)))

    def go_on(self) -> int:
        """Take the reply and send the next request; returns how many trajectories were accepted."""
        reply = decode(self._socket.recv_multipart()[1:])
        if isinstance(reply, LeaseGrant):
            self._leases.extend(reply.leases)
        elif not isinstance(reply, Ack) or reply.status != "accepted":
            raise RuntimeError(f"{self._name} was answered {reply}")
        accepted = int(self._sends_result)
        self._sends_result = bool(self._leases)
        if self._leases:
            self._send(self._encoder.frames(self._leases.pop(), self._name))
        else:
            self._send(encode(LeaseRequest(actor=self._name, incarnation=self._name, slots=LEASES_AT_ONCE)))
        return accepted

    def _send(self, frames: Sequence[Buffer]) -> None:
        self._sequence += 1
        send_now(self._socket, [header_frame("request", self._sequence, self._sequence), *frames])


@contextlib.contextmanager
def buffer_process(run_dir: RunDir) -> Iterator[int]:
    """Run the real buffer role; gives its process id."""
    with (run_dir.root / "buffer.log").open("wb") as log:
        process = subprocess.Popen(role_command("buffer", 0, run_dir.root), stdout=log, stderr=log)
        try:
            yield process.pid
        finally:
            process.terminate()
            process.wait()


def drain(client: Client, stop: threading.Event) -> None:
    """Be the learner: take one batch after the other."""
    version = 0
    while not stop.is_set():
        batch = client.call(BatchRequest(version=version), CALL_TIMEOUT_S)
        version += isinstance(batch, Batch) and bool(batch.samples)


def connect(context: "zmq.Context[zmq.Socket[bytes]]", endpoint: str, curve: ClientCurve | None) -> "zmq.Socket[bytes]":
    """Return the connection of one actor."""
    socket = context.socket(zmq.DEALER)
    if curve is not None:
        socket.curve_serverkey = curve.server
        socket.curve_publickey, socket.curve_secretkey = curve.keys.public, curve.keys.secret
    socket.connect(endpoint)
    return socket


def bench_buffer(trajectories: int, port: int, *, curve: bool, batches: bool) -> Figures:
    """Measure our buffer."""
    name = f"buffer role{', CURVE' if curve else ''}{', learner takes batches' if batches else ''}"
    with tempfile.TemporaryDirectory() as folder:
        topology = make_topology(Path(folder), trajectories, port, curve=curve, batches=batches)
        run_dir = make_run(topology)
        with buffer_process(run_dir) as pid, zmq.Context() as context:
            keys = RunKeys.load(run_dir.keys, "learner-0") if curve else None
            endpoint, server = run_dir.buffer_endpoint(topology), keys.client("buffer-0") if keys else None
            learner = Client(endpoint, "learner-0", curve=server)
            stop, thread = threading.Event(), None
            if batches:
                thread = threading.Thread(target=drain, args=(learner, stop), daemon=True)
                thread.start()
            else:  # opens the gate without asking for a batch
                learner.call(RunFinished(version=0), CALL_TIMEOUT_S)
            measure = Measure(name, trajectories, pid)
            sockets = [connect(context, endpoint, server) for _ in range(NUM_ACTORS)]
            try:
                run_load(sockets, measure)
            finally:
                stop.set()
                if thread is not None:
                    thread.join()
                learner.close()
                for socket in sockets:
                    socket.close(linger=0)
            return measure.figures()


def run_load(sockets: "list[zmq.Socket[bytes]]", measure: Measure) -> None:
    """Let every actor send until all trajectories are accepted."""
    encoder, poller = Encoder(make_turns()), zmq.Poller()
    actors: dict[Any, Actor] = {}
    for number, socket in enumerate(sockets):
        actors[socket] = Actor(socket, f"actor-{number}", encoder)
        poller.register(socket, zmq.POLLIN)
    while True:
        for socket, _ in poller.poll():
            if measure.add(actors[socket].go_on()):
                return


def main() -> None:
    """Print one line a stack."""
    parser = argparse.ArgumentParser(prog="seed_async.tools.bench_transport", description=__doc__)
    parser.add_argument("--trajectories", type=int, default=20_000)
    parser.add_argument("--port", type=int, default=28_500, help="first of a few free ports")
    parser.add_argument("--batches", action="store_true", help="also with a learner that takes every batch")
    parser.add_argument("--only-ours", action="store_true")
    options = parser.parse_args()
    num_bytes = sum(len(frame) for frame in encode(make_trajectory(ANY_LEASE, "actor-0", make_turns())))
    print(f"{NUM_TURNS * RESPONSE_TOKENS} sampled tokens, {num_bytes:,} bytes a trajectory; {NUM_ACTORS} actors")
    port = options.port
    for batches in (False, True) if options.batches else (False,):
        for curve in (False, True):
            report(bench_buffer(options.trajectories, port, curve=curve, batches=batches))
            port += 10
    if options.only_ours:
        return
    report(bench_rpc(options.trajectories, port))
    if importlib.util.find_spec("ray") is None:
        print("Ray actor calls: not measured, Ray is not installed (pip install 'seed-async[ray]')")
    else:
        report(bench_ray(options.trajectories))


def report(figures: Figures) -> None:
    """Print what a stack did."""
    print(
        f"{figures.name:45} {figures.per_second:9,.0f} /s   CPU a trajectory: buffer {figures.buffer_cpu_us:5,.0f} us, "
        f"load {figures.load_cpu_us:5,.0f} us",
        flush=True,
    )


if __name__ == "__main__":
    main()
