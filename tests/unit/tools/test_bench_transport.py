"""The benchmark's short cut for 256 actors sends what an actor would, and the real buffer takes all of it."""

import socket

import pytest

from seed_async.codec import decode, encode
from seed_async.tools.bench_load import ANY_LEASE, NUM_TURNS, RESPONSE_TOKENS, make_trajectory, make_turns
from seed_async.tools.bench_transport import Encoder, bench_buffer


def test_the_encoder_makes_the_frames_of_the_codec() -> None:
    turns = make_turns()
    trajectory = make_trajectory(ANY_LEASE, "actor-7", turns)
    frames = Encoder(turns).frames(ANY_LEASE, "actor-7")
    assert [bytes(frame) for frame in encode(trajectory)] == frames
    assert sum(turn.response_ids.size for turn in decode(frames).turns) == NUM_TURNS * RESPONSE_TOKENS  # type: ignore[attr-defined]  # it is a Trajectory


@pytest.mark.parametrize("curve", [False, True])
def test_the_real_buffer_accepts_the_load(curve: bool) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = 20_000 + probe.getsockname()[1] % 7_000
    figures = bench_buffer(600, port, curve=curve, batches=not curve)
    assert figures.per_second > 0 and figures.buffer_cpu_us > 0
