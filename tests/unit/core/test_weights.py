"""Weight publication over real sockets and real segments: verified, newest wins, and the dead are given up by name."""

import itertools
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from structlog.testing import capture_logs

from seed_async.messages import Ack, RunStateRequest, WeightsManifest, WeightsPoll
from seed_async.transport import Client, Server
from seed_async.weights import (
    KEPT_SEGMENTS,
    Deadlines,
    ReceiverRole,
    SegmentSource,
    SegmentStore,
    WeightPublisher,
    WeightReceiver,
    WeightsCorruptError,
    WeightsGoneError,
    WeightSource,
    read_segment,
)
from seed_async.weights.board import FORGET_AFTER_S, ReportBoard
from seed_async.weights.control_zmq import ZmqControl, ZmqLink
from seed_async.weights.manifest import ByteBuffer, build_manifest, transfer_ranges

WAIT_S = 5.0


def tensors(version: int) -> dict[str, np.ndarray]:
    """Tensors of several types and awkward sizes, all marked with the version."""
    return {
        "embedding": np.full((7, 3), version, dtype=np.float32),
        "scalar": np.array(version, dtype=np.float32),
        "bits": np.full(5, version, dtype=np.uint16),
        "transposed": np.full((4, 6), version, dtype=np.float32).T,
        "empty": np.zeros((0, 4), dtype=np.float32),
    }


class Setup:
    """A publisher with its receivers; everything is closed at the end of a test."""

    def __init__(self, folder: Path) -> None:
        """Listen below `folder`."""
        self.segments = folder / "segments"
        self.endpoint = f"ipc://{folder}/weights"
        self.deadlines = Deadlines(transfer_s=2.0, verify_s=2.0, acknowledge_s=2.0)
        self.publisher = WeightPublisher(ZmqControl(Server(self.endpoint)), SegmentStore(self.segments), self.deadlines)
        self.clients: list[Client] = []
        self.closed = False

    def receiver(self, name: str, role: ReceiverRole = "policy", source: WeightSource | None = None) -> WeightReceiver:
        """Connect one more receiver."""
        self.clients.append(Client(self.endpoint, name))
        link = ZmqLink(self.clients[-1])
        return WeightReceiver(link, source or SegmentSource(), name, role, self.deadlines)

    def close(self) -> None:
        """Close once."""
        if not self.closed:
            self.closed = True
            self.publisher.close()
            for client in self.clients:
                client.close()


@pytest.fixture
def setup(tmp_path: Path) -> Iterator[Setup]:
    """Give a running publisher."""
    made = Setup(tmp_path)
    yield made
    made.close()


def take(receiver: WeightReceiver) -> tuple[WeightsManifest, dict[str, np.ndarray]]:
    """Poll until a version comes."""
    deadline_s = time.monotonic() + WAIT_S
    while time.monotonic() < deadline_s:
        update = receiver.poll(0.05)
        if update is not None:
            return update
    raise AssertionError("no weights came")


def serve(receiver: WeightReceiver, stop: threading.Event) -> threading.Thread:
    """Take and acknowledge every version until told to stop."""

    def loop() -> None:
        while not stop.is_set():
            update = receiver.poll(0.02)
            if update is not None:
                receiver.acknowledge(update[0])

    thread = threading.Thread(target=loop)
    thread.start()
    return thread


def test_a_segment_reads_back_exactly_and_read_only(tmp_path: Path) -> None:
    """Every shape and dtype, zero-sized and non-contiguous ones too."""
    manifest = SegmentStore(tmp_path).stage(3, tensors(3))
    arrays = read_segment(manifest)
    for name, expected in tensors(3).items():
        assert arrays[name].dtype == expected.dtype
        np.testing.assert_array_equal(arrays[name], expected)
        assert not arrays[name].flags.writeable
    assert all(spec.offset_bytes % 64 == 0 for spec in manifest.tensors)


@pytest.mark.parametrize("damage", ["flip", "cut", "grow", "empty"])
def test_a_corrupt_segment_is_refused(tmp_path: Path, damage: str) -> None:
    """One changed byte, one missing, one too many."""
    manifest = SegmentStore(tmp_path).stage(0, tensors(0) | {"more": np.ones(10, np.float32)})
    content = bytearray(Path(manifest.segment).read_bytes())
    if damage == "flip":
        content[-30] ^= 1
    damaged = {"flip": content, "cut": content[:-1], "grow": content + b"\0", "empty": b""}[damage]
    Path(manifest.segment).write_bytes(damaged)
    with pytest.raises(WeightsCorruptError, match="version 0"):
        read_segment(manifest)


def test_old_segments_are_removed_and_what_was_read_stays(tmp_path: Path) -> None:
    """Memory stays bounded; a slow reader is not pulled down."""
    store = SegmentStore(tmp_path)
    first = store.stage(0, tensors(0))
    arrays = read_segment(first)
    for version in range(1, 6):
        store.stage(version, tensors(version))
        assert len(list(tmp_path.iterdir())) <= KEPT_SEGMENTS
    np.testing.assert_array_equal(arrays["embedding"], tensors(0)["embedding"])
    with pytest.raises(WeightsGoneError):
        read_segment(first)
    store.close()
    assert not list(tmp_path.iterdir())


def test_a_published_version_arrives_and_its_acknowledgement_is_seen(setup: Setup) -> None:
    """Publish, poll, acknowledge, wait."""
    receiver = setup.receiver("p0")
    assert receiver.poll(0.05) is None and receiver.pinned == -1
    published = setup.publisher.publish(0, tensors(0))
    manifest, arrays = take(receiver)
    assert manifest == published
    np.testing.assert_array_equal(arrays["embedding"], tensors(0)["embedding"])
    receiver.acknowledge(manifest)
    assert setup.publisher.wait_acknowledged(0, "policy", 1, WAIT_S) == ()


def test_a_version_that_is_not_acknowledged_does_not_count(setup: Setup) -> None:
    """Having been sent it is not enough: only then may admission open."""
    receiver = setup.receiver("p0")
    setup.publisher.publish(0, tensors(0))
    take(receiver)
    with pytest.raises(TimeoutError, match=r"no policy acknowledged version 0 .*p0"):
        setup.publisher.wait_acknowledged(0, "policy", 1, 0.2)


def test_a_late_receiver_gets_the_newest_version_only(setup: Setup) -> None:
    """A restarted policy server never serves an older one."""
    for version in range(4):
        setup.publisher.publish(version, tensors(version))
    receiver = setup.receiver("late")
    manifest, arrays = take(receiver)
    assert manifest.version == 3 and arrays["scalar"] == 3
    receiver.acknowledge(manifest)
    assert receiver.poll(0.2) is None


def test_a_receivers_version_never_goes_back(setup: Setup) -> None:
    """Not even when an older version is published after it."""
    receiver = setup.receiver("p0")
    setup.publisher.publish(5, tensors(5))
    manifest, _ = take(receiver)
    receiver.acknowledge(manifest)
    setup.publisher.publish(4, tensors(4))
    assert receiver.poll(0.3) is None


def test_an_acknowledgement_with_other_bytes_does_not_count(setup: Setup) -> None:
    """The digest is part of it."""
    setup.publisher.publish(0, tensors(0))
    client = Client(setup.endpoint, "p0")
    setup.clients.append(client)
    client.submit(WeightsPoll(receiver="p0", role="policy", version=0, digest="other"))
    client.poll(0.2)
    with pytest.raises(TimeoutError, match=r"no policy acknowledged version 0 .*p0"):
        setup.publisher.wait_acknowledged(0, "policy", 1, 0.3)


def test_nobody_at_all_is_an_error(setup: Setup) -> None:
    """The run cannot go on; an analyzer is no policy server."""
    stop = threading.Event()
    thread = serve(setup.receiver("a0", "analyzer"), stop)
    setup.publisher.publish(0, tensors(0))
    with pytest.raises(TimeoutError, match="no policy acknowledged version 0"):
        setup.publisher.wait_acknowledged(0, "policy", 1, 0.5)
    assert setup.publisher.wait_acknowledged(0, "analyzer", 1, WAIT_S) == ()
    stop.set()
    thread.join()


def test_a_dead_receiver_is_given_up_at_the_deadline_by_name_and_not_waited_for_again(setup: Setup) -> None:
    """Until it, or its successor, asks again."""
    stop = threading.Event()
    thread = serve(setup.receiver("alive"), stop)
    dead = setup.receiver("dead")
    setup.publisher.publish(0, tensors(0))
    dead.acknowledge(take(dead)[0])
    assert setup.publisher.wait_acknowledged(0, "policy", 2, WAIT_S) == ()

    setup.publisher.publish(1, tensors(1))
    assert setup.publisher.wait_acknowledged(1, "policy", 2, 0.5) == ("dead",)
    setup.publisher.publish(2, tensors(2))
    started_s = time.monotonic()
    assert setup.publisher.wait_acknowledged(2, "policy", 2, WAIT_S) == ()
    assert time.monotonic() - started_s < WAIT_S / 2

    successor = setup.receiver("dead-again")
    assert take(successor)[0].version == 2
    setup.publisher.publish(3, tensors(3))
    assert setup.publisher.wait_acknowledged(3, "policy", 2, 0.5) == ("dead-again",)
    stop.set()
    thread.join()


def test_a_receiver_that_has_never_reported_is_given_up_as_an_unknown_one(setup: Setup) -> None:
    """The log names it too: an empty list of names would help nobody."""
    stop = threading.Event()
    thread = serve(setup.receiver("alive"), stop)
    setup.publisher.publish(0, tensors(0))
    with capture_logs() as logs:
        assert setup.publisher.wait_acknowledged(0, "policy", 2, 0.5) == ()
    assert [each["receivers"] for each in logs if each["event"] == "weight receivers given up"] == ["unknown policy 0"]
    stop.set()
    thread.join()


def test_a_foreign_message_is_refused(setup: Setup) -> None:
    """And nothing dies of it."""
    client = Client(setup.endpoint, "stranger")
    setup.clients.append(client)
    reply = client.call(RunStateRequest(), WAIT_S)
    assert isinstance(reply, Ack) and reply.status == "refused"
    setup.publisher.publish(0, tensors(0))
    assert take(setup.receiver("p0"))[0].version == 0


def test_an_unanswered_poll_is_held_and_then_answered_empty(setup: Setup) -> None:
    """So that a receiver notices a publisher that is gone."""
    client = Client(setup.endpoint, "p0")
    setup.clients.append(client)
    started_s = time.monotonic()
    reply = client.call(WeightsPoll(receiver="p0", role="policy", version=-1, digest=""), WAIT_S)
    assert isinstance(reply, Ack) and reply.status == "accepted"
    assert 0.8 < time.monotonic() - started_s < 3


def test_closing_removes_the_segments(setup: Setup) -> None:
    """Shared memory outlives a process otherwise."""
    setup.publisher.publish(0, tensors(0))
    assert list(setup.segments.iterdir())
    setup.close()
    assert not list(setup.segments.iterdir())


@pytest.mark.parametrize("damage", ["flip", "cut"])
def test_bytes_damaged_on_their_way_are_refused_staged_again_and_never_served(setup: Setup, damage: str) -> None:
    """The receiver keeps what it has, says so, and gets the same version whole while the publisher waits for it."""
    receiver = setup.receiver("policy-0:a")
    setup.publisher.publish(0, tensors(0))
    receiver.acknowledge(take(receiver)[0])
    manifest = setup.publisher.publish(1, tensors(1))
    content = bytearray(Path(manifest.segment).read_bytes())
    content[3] ^= 1
    Path(manifest.segment).write_bytes(content if damage == "flip" else content[:-1])
    stop = threading.Event()
    seen: list[float] = []

    def loop() -> None:
        while not stop.is_set():
            update = receiver.poll(0.02)
            if update is not None:
                seen.append(float(update[1]["scalar"]))
                receiver.acknowledge(update[0])

    thread = threading.Thread(target=loop)
    thread.start()
    assert setup.publisher.wait_acknowledged(1, "policy", 1, WAIT_S) == ()
    stop.set()
    thread.join()
    assert seen == [1.0]
    assert receiver.num_refused == 1 and setup.publisher.num_refused == 1


def test_a_damaged_version_is_skipped_by_a_receiver_that_nobody_waits_for(setup: Setup) -> None:
    """An analyzer that got damaged bytes gets the next version."""
    receiver = setup.receiver("analyzer-0:a", "analyzer")
    manifest = setup.publisher.publish(0, tensors(0))
    Path(manifest.segment).write_bytes(b"x")
    for _ in range(20):
        assert receiver.poll(0.02) is None
    setup.publisher.publish(1, tensors(1))
    assert take(receiver)[0].version == 1
    assert receiver.num_refused >= 1


class Stuck:
    """A source that never returns, as a collective whose peer is stopped."""

    def __init__(self) -> None:
        """Nothing has been asked for."""
        self.asked = 0

    def receive(self, manifest: WeightsManifest, timeout_s: float) -> ByteBuffer:
        """Hang at the first version, deliver the second."""
        self.asked += 1
        if manifest.version == 0:
            time.sleep(3600)
        return SegmentSource().receive(manifest, timeout_s)

    def close(self) -> None:
        """Nothing is held."""


class Flipping:
    """A source that damages one byte of the first transfer."""

    def __init__(self) -> None:
        """Nothing has been damaged."""
        self.damaged = 0

    def receive(self, manifest: WeightsManifest, timeout_s: float) -> ByteBuffer:
        """Deliver, with a flipped bit the first time."""
        content = bytearray(SegmentSource().receive(manifest, timeout_s))
        if not self.damaged:
            content[5] ^= 4
            self.damaged += 1
        return content

    def close(self) -> None:
        """Nothing is held."""


def test_a_transfer_that_never_returns_is_abandoned_and_the_next_version_arrives(setup: Setup) -> None:
    """The loop of the receiver goes on all the while, and so do the others."""
    stop = threading.Event()
    thread = serve(setup.receiver("policy-0:a"), stop)
    stuck = setup.receiver("policy-1:b", source=Stuck())
    setup.publisher.publish(0, tensors(0))
    turns, started_s = 0, time.monotonic()
    while stuck._attempt is not None or turns == 0 or time.monotonic() - started_s < 0.5:
        assert stuck.poll(0.01) is None
        turns += 1
        assert time.monotonic() - started_s < WAIT_S
    assert turns > 50, "the loop turned while the transfer hung"
    assert setup.publisher.wait_acknowledged(0, "policy", 2, WAIT_S) == ("policy-1:b",)
    setup.publisher.publish(1, tensors(1))
    assert take(stuck)[0].version == 1
    stop.set()
    thread.join()


def test_a_byte_flipped_in_transit_is_refused_and_the_version_sent_again(setup: Setup) -> None:
    """What is served has the digest that was announced."""
    source = Flipping()
    receiver, stop = setup.receiver("policy-0:a", source=source), threading.Event()
    setup.publisher.publish(0, tensors(0))
    thread = serve(receiver, stop)
    assert setup.publisher.wait_acknowledged(0, "policy", 1, WAIT_S) == ()
    stop.set()
    thread.join()
    assert (source.damaged, receiver.num_refused, setup.publisher.num_refused) == (1, 1, 1)


def test_a_version_is_pinned_once_it_is_in_service(setup: Setup) -> None:
    """An analyzer starts jobs at it or at a newer one."""
    stop = threading.Event()
    analyzer, policy = setup.receiver("analyzer-0:a", "analyzer"), setup.receiver("policy-0:a")
    setup.publisher.publish(0, tensors(0))
    take(analyzer)
    assert analyzer.pinned == -1
    thread = serve(policy, stop)
    setup.publisher.wait_acknowledged(0, "policy", 1, WAIT_S)
    deadline_s = time.monotonic() + WAIT_S
    while analyzer.pinned < 0 and time.monotonic() < deadline_s:
        analyzer.poll(0.05)
    assert analyzer.pinned == 0
    stop.set()
    thread.join()


def test_a_successor_replaces_its_predecessor_at_once(setup: Setup) -> None:
    """A policy server that starts again is not waited for under its old name."""
    first = setup.receiver("policy-0:a")
    setup.publisher.publish(0, tensors(0))
    first.acknowledge(take(first)[0])
    setup.publisher.wait_acknowledged(0, "policy", 1, WAIT_S)
    setup.publisher.publish(1, tensors(1))
    stop = threading.Event()
    thread = serve(setup.receiver("policy-0:b"), stop)
    assert setup.publisher.wait_acknowledged(1, "policy", 1, WAIT_S) == ()
    assert list(setup.publisher._receivers) == ["policy-0:b"]
    stop.set()
    thread.join()


def test_dead_incarnations_are_forgotten() -> None:
    """A run of weeks with many restarts keeps as many names as it has receivers."""
    now_s = 0.0
    board = ReportBoard(lambda: now_s)
    for number in range(100):
        board.note(WeightsPoll(receiver=f"policy-0:{number}", role="policy", version=0, digest=""))
        now_s += FORGET_AFTER_S / 4
    assert len(board.ages_s()) <= 6 and len(board.take(0.0)) <= 6


def test_small_tensors_travel_together_and_large_ones_alone() -> None:
    """The ranges follow one another and cover every byte."""
    sizes = [10, 20, 4000, 30, 900, 900, 5000, 10]
    arrays = {str(index): np.zeros(size, np.uint8) for index, size in enumerate(sizes)}
    manifest, _ = build_manifest(0, arrays, "", 0)
    ranges = list(transfer_ranges(manifest, group_bytes=1024))
    assert ranges[0][0] == 0 and ranges[-1][1] == manifest.num_bytes
    assert all(end == start for (_, end), (start, _) in itertools.pairwise(ranges))
    large = {spec.offset_bytes for spec in manifest.tensors if spec.shape[0] >= 1024}
    assert large <= {start for start, _ in ranges}
    assert len(ranges) < len(sizes)
    assert list(transfer_ranges(build_manifest(0, {"one": np.zeros(8, np.uint8)}, "", 0)[0])) == [(0, 64)]


def test_damage_after_the_check_does_not_reach_what_is_served(setup: Setup) -> None:
    """The verified bytes are the receiver's own."""
    receiver = setup.receiver("p0")
    manifest = setup.publisher.publish(0, tensors(0) | {"ones": np.ones(4096, np.float32)})
    _, arrays = take(receiver)
    with Path(manifest.segment).open("r+b") as file:
        file.write(b"\xff" * manifest.num_bytes)
    np.testing.assert_array_equal(arrays["ones"], np.ones(4096, np.float32))


def test_a_publisher_that_starts_again_removes_what_a_killed_one_has_left(tmp_path: Path) -> None:
    """Shared memory is not filled by restarts."""
    SegmentStore(tmp_path).stage(3, tensors(3))
    store = SegmentStore(tmp_path)
    store.stage(4, tensors(4))
    assert [path.name for path in tmp_path.iterdir()] == ["weights-4"]
