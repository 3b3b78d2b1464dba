"""Random and mutated frames on every bound socket of a running system: counted, named, and nobody else notices."""

import contextlib
import os
import random
import signal
import socket as unix
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import zmq

from seed_async.codec import encode
from seed_async.messages import PROTOCOL_VERSION, Ack, Beat, GenerateReply, SkillResult
from seed_async.metrics import read_targets, scrape
from seed_async.rundir import RunDir
from seed_async.topology_file import load_topology
from seed_async.transport.wire import header_frame
from tests.fakes.episodes import make_lease, make_trajectory
from tests.integration.runs import (
    assert_counts_add_up,
    assert_gone,
    finish,
    launch,
    lines,
    roles_of,
    wait_for_updates,
)

pytestmark = pytest.mark.integration

MESSAGES_A_ROUND = 1500
ROUNDS = 3
SENDERS_A_ROUND = 20
MAX_GROWTH_BYTES = 16 << 20
SERVERS = {"buffer-0": "buffer", "learner-0": "weights", "policy-0": "policy-0"}


def honest_messages() -> list[list[bytes]]:
    """Frames of messages that a server would refuse or ignore when they arrive whole."""
    reply = GenerateReply(
        request_id="r",
        token_ids=make_trajectory(make_lease(), "a").turns[0].response_ids,
        logprobs=make_trajectory(make_lease(), "a").turns[0].behaviour_logprob,
        versions=make_trajectory(make_lease(), "a").turns[0].versions,
        finish_reason="stop",
        cached_tokens=0,
    )
    skill = SkillResult(analyzer="fuzz", trajectory_id="none", skill=None, output="", version=0)
    beat = Beat(actor="fuzz", incarnation="fuzz", progress=1)
    whole = [beat, reply, skill, Ack(), make_trajectory(make_lease(99_999), "fuzz")]
    return [[bytes(frame) for frame in encode(message)] for message in whole]


def mutate(rng: random.Random, frame: bytes) -> bytes:
    """Flip, cut, lengthen or replace."""
    data = bytearray(frame)
    for _ in range(rng.randint(1, 4)):
        kind = rng.randrange(5)
        place = rng.randrange(len(data) + 1)
        if kind == 0 and place < len(data):
            data[place] ^= 1 << rng.randrange(8)
        elif kind == 1:
            del data[place:]
        elif kind == 2:
            data[place:place] = rng.randbytes(rng.randint(1, 40))
        elif kind == 3 and place < len(data):
            data[place] = rng.choice(b"\x00\x7f\x80\x90\xc0\xc1\xc7\xd9\xdd\xdf\xff")
        else:
            data = bytearray(rng.randbytes(rng.randint(0, 200)))
    return bytes(data)


def bad_messages(rng: random.Random, number: int) -> Iterator[list[bytes]]:
    """Yield `number` messages, most of them malformed."""
    honest = honest_messages()
    for sequence in range(1, number + 1):
        header, frames = header_frame("request", sequence, sequence), list(rng.choice(honest))
        kind = rng.randrange(10)
        if kind == 0:
            header = mutate(rng, header)
        elif kind == 1:
            header = header_frame("request", rng.choice([0, 1, 10**6, 2**63]), rng.choice([0, 5, 2**62]))
        elif kind == 2:
            header = bytes([0x94, PROTOCOL_VERSION + 1]) + header[2:]
        elif kind == 3:
            frames = [b"\x91" * rng.choice([10, 5000])]
        elif kind == 4:
            frames = frames * rng.randint(2, 30)
        elif kind == 5:
            header, frames = b"", []
        elif kind == 6:
            frames = [rng.randbytes(rng.choice([0, 1, 100, 100_000]))]
        else:
            place = rng.randrange(len(frames))
            frames[place] = mutate(rng, frames[place])
        yield [header, *frames]


def attack(path: Path, seed: int) -> None:
    """Send one round of bad messages from many senders, and bytes that are no ZMTP at all."""
    rng = random.Random(seed)
    with zmq.Context() as context:
        for sender in range(SENDERS_A_ROUND):
            socket = context.socket(zmq.DEALER)
            socket.routing_id = b"fuzz-\xff%d-%d" % (seed, sender)
            socket.linger = 5000
            socket.connect(f"ipc://{path}")
            for frames in bad_messages(rng, MESSAGES_A_ROUND // SENDERS_A_ROUND):
                socket.send_multipart(frames)
            socket.close()
    for _ in range(20):
        with unix.socket(unix.AF_UNIX, unix.SOCK_STREAM) as raw:
            raw.connect(str(path))
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # cut off at the first bytes
                raw.sendall(rng.randbytes(4096))


def rejected(run_dir: RunDir, name: str) -> dict[str, float]:
    """What a process has refused, by reason, from its own metrics."""
    (address,) = [each.address for each in read_targets(run_dir.targets) if f"{each.role}-{each.instance}" == name]
    prefix = "seed_async_rejected_frames_total{"
    return {key.removeprefix(prefix): value for key, value in scrape(address).items() if key.startswith(prefix)}


def wait_until_taken(run_dir: RunDir, name: str, more_than: float) -> dict[str, float]:
    """Wait until a server has refused that many messages; a learner looks at its socket between two updates."""
    deadline_s = time.monotonic() + 60
    while sum((counts := rejected(run_dir, name)).values()) <= more_than:
        assert time.monotonic() < deadline_s, f"{name} has refused {counts}"
        time.sleep(0.2)
    return counts


def test_bad_frames_on_every_bound_socket_harm_nobody(tmp_path: Path) -> None:
    process = launch(tmp_path / "fuzz", "run.updates=1000")
    run_dir = RunDir(tmp_path / "fuzz")
    wait_for_updates(run_dir.root, 1)
    topology, roles = load_topology(run_dir.topology), roles_of(process)
    sockets = {path.name for path in run_dir.sockets().iterdir()}
    assert sockets == set(SERVERS.values()), "every socket that is bound is attacked"
    sizes: dict[str, list[int]] = {name: [] for name in SERVERS}
    for number in range(ROUNDS):
        for name, socket in SERVERS.items():
            before = sum(rejected(run_dir, name).values())
            attack(run_dir.sockets() / socket, seed=100 * number + len(name))
            counts = wait_until_taken(run_dir, name, before + MESSAGES_A_ROUND // 2)
            assert len(counts) >= 5, "by reason"
            sizes[name].append(psutil.Process(roles[name].pid).memory_info().rss)
    updates = len(lines(run_dir.metrics))
    wait_for_updates(run_dir.root, updates + 2)  # honest clients are served
    assert {name: each.pid for name, each in roles_of(process).items()} == {n: r.pid for n, r in roles.items()}
    os.kill(process.pid, signal.SIGINT)
    output = finish(process)
    assert process.returncode == 130, output
    assert_gone(roles.values())
    assert_counts_add_up(run_dir.root)
    assert topology.transport.kind == "ipc"
    for name, rss in sizes.items():
        assert rss[-1] - rss[0] < MAX_GROWTH_BYTES, f"{name} grows: {rss}"
        named = [text for text in (run_dir.logs / f"{name}.log").read_text().splitlines() if "message rejected" in text]
        assert any("peer=fuzz-" in text for text in named), "the sender is named"
        assert len(named) < MESSAGES_A_ROUND, "and the log is no second flood"
