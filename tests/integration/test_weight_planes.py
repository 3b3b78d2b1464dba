"""Weight publication between real processes: both control planes, gloo, and receivers that fail in mid-transfer."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog

from seed_async.tools.bench_weights import Setting, make_tensors, measure, open_control, open_transport
from seed_async.weights import WeightPublisher
from tests.fakes.weight_receiver import DEADLINES
from tests.integration.runs import (
    ROOT,
    assert_gone,
    assert_went_on,
    finish,
    launch,
    roles_of,
    wait_for_updates,
)

START_S = 90.0
MEGABYTES = 20

pytestmark = pytest.mark.integration


class Group:
    """A publisher here and receivers in processes of their own."""

    def __init__(self, control: str, folder: Path) -> None:
        """Publish over gloo."""
        self.control, self.folder = control, folder
        setting, log = Setting(control, "gloo", 2, MEGABYTES), structlog.get_logger()
        transport = open_transport(setting, folder, DEADLINES.transfer_s, log)
        self.publisher = WeightPublisher(open_control(setting, folder, log), transport, DEADLINES, log)
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str, *fault: str) -> None:
        """Start a receiver; `fault` as in `tests.fakes.weight_receiver`."""
        command = [sys.executable, "-m", "tests.fakes.weight_receiver", str(self.folder), name, self.control, *fault]
        with (self.folder / f"{name}.log").open("wb") as log:
            self.processes[name] = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log)

    def log(self, name: str) -> str:
        """What a receiver has printed."""
        return (self.folder / f"{name}.log").read_text()

    def wait_for(self, name: str, version: int) -> None:
        """Wait until a receiver serves a version."""
        deadline_s = time.monotonic() + START_S
        while f"serves {version} " not in self.log(name):
            assert time.monotonic() < deadline_s, self.log(name)
            time.sleep(0.05)

    def publish(self, version: int, replicas: int = 2, timeout_s: float = START_S) -> tuple[str, ...]:
        """Publish and wait; the receivers given up."""
        self.publisher.publish(version, make_tensors(version, MEGABYTES))
        return self.publisher.wait_acknowledged(version, "policy", replicas, timeout_s)

    def close(self) -> None:
        """End everything."""
        for process in self.processes.values():
            process.send_signal(signal.SIGCONT)
            process.kill()
            process.wait()
        self.publisher.close()


@pytest.fixture(params=["zmq", "rpc"])
def group(request: pytest.FixtureRequest) -> Iterator[Group]:
    with tempfile.TemporaryDirectory() as folder:
        made = Group(request.param, Path(folder))
        yield made
        made.close()


@pytest.mark.parametrize("fault", ["kill", "stop"])
def test_a_receiver_that_fails_in_mid_transfer_is_given_up_and_the_others_hold_the_version(
    group: Group, fault: str
) -> None:
    group.start("policy-0:a")
    group.start("policy-1:a", fault, "1")
    group.publish(0)
    group.wait_for("policy-0:a", 0)
    group.wait_for("policy-1:a", 0)
    started_s = time.monotonic()
    assert group.publish(1) == ("policy-1:a",)
    assert time.monotonic() - started_s < DEADLINES.transfer_s + 2.0
    group.wait_for("policy-0:a", 1)
    assert "serves 1 " not in group.log("policy-1:a")
    # The group is formed anew without it, nobody waits for it again, and its successor pulls.
    started_s = time.monotonic()
    assert group.publish(2) == ()
    assert time.monotonic() - started_s < DEADLINES.transfer_s
    group.start("policy-1:b")
    group.wait_for("policy-1:b", 2)
    assert group.publish(3) == ()
    group.wait_for("policy-1:b", 3)


def test_a_receiver_that_stood_still_takes_part_again(group: Group) -> None:
    group.start("policy-0:a")
    group.start("policy-1:a")
    group.publish(0)
    group.wait_for("policy-0:a", 0)
    group.wait_for("policy-1:a", 0)
    os.kill(group.processes["policy-1:a"].pid, signal.SIGSTOP)
    assert group.publish(1) == ("policy-1:a",)
    os.kill(group.processes["policy-1:a"].pid, signal.SIGCONT)
    group.wait_for("policy-1:a", 1)
    assert group.publish(2) == ()


@pytest.mark.parametrize(("group", "fault"), [("rpc", "flip"), ("zmq", "cut")], indirect=["group"])
def test_damage_in_transit_is_refused_and_the_version_sent_again(group: Group, fault: str) -> None:
    group.start("policy-0:a", fault, "0")
    assert group.publish(0, replicas=1) == ()
    group.wait_for("policy-0:a", 0)
    assert "serves 0 refused 1" in group.log("policy-0:a") and group.publisher.num_refused >= 1


def test_the_bench_runs_with_shared_memory(tmp_path: Path) -> None:
    log = structlog.get_logger()
    result = measure(Setting("zmq", "shm", 2, 8), rounds=2, folder=tmp_path, deadline_s=3.0, log=log)
    assert min(result.publish_s) > 0 and result.refused >= 1
    assert result.given_up == ("policy-0:1",) and result.stopped_s is not None and result.stopped_s < 6.0


def test_a_run_over_rpc_and_gloo_survives_the_death_of_its_receivers_and_of_its_learner(tmp_path: Path) -> None:
    run_dir = tmp_path / "boxes"
    planes = ("weights.control=rpc", "weights.transport=gloo", "weights.in_flight=finish")
    process = launch(run_dir, "run.updates=14", "checkpoint.every=2", *planes)
    wait_for_updates(run_dir, 2)
    roles = roles_of(process)
    for victim in ("policy-0", "analyzer-0"):
        roles[victim].kill()
    wait_for_updates(run_dir, 8)
    roles = roles_of(process)
    roles["learner-0"].kill()
    output = finish(process)
    assert process.returncode == 0, output
    assert_went_on(run_dir, 14)
    log = (run_dir / "logs" / "learner-0.log").read_text()
    assert "going on" in log and log.count('because="the first"') == 2, "the second learner has a group of its own"
    assert_gone(roles.values())
