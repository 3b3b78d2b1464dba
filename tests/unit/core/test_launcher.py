"""The launcher with real processes in place of the roles: what it refuses, how a run ends, what signals do."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from seed_async.launcher import (
    Launcher,
    LaunchError,
    Status,
    check_startable,
    role_processes,
    running_launcher,
    stage1_commands,
)
from seed_async.phases import read_phases
from seed_async.rundir import RunDir
from seed_async.topology import Model, TinyModel, Topology
from seed_async.topology_file import dump_topology, load_topology, parse_topology

RUN_ON = "import time; time.sleep(60)"
IGNORE_SIGTERM = "import signal, time; signal.signal(15, signal.SIG_IGN); print('ready', flush=True); time.sleep(60)"
DIE = "raise FloatingPointError('loss is nan')"

PROGRAM = """
import json, sys
from pathlib import Path
from seed_async.launcher import Launcher
from seed_async.topology_file import load_topology

roles, stage1 = json.loads(sys.argv[2]), json.loads(sys.argv[3])

def python(text):
    return [sys.executable, "-S", "-c", text]

def report(run_dir, topology, phases, status):
    (run_dir.root / "report").write_text(f"{status} {' '.join(phases)}")

launcher = Launcher(
    load_topology(Path(sys.argv[1])),
    command=lambda role, index, root: python(roles.get(role, "import time; time.sleep(60)")),
    stage1=lambda *_: {name: python(text) for name, text in stage1.items()},
)
sys.exit(launcher.run(report))
"""

StartRun = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A topology file whose run directory and model lie in a folder of the test."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    path = tmp_path / "t.yaml"
    path.write_text(
        f"run: {{dir: {tmp_path}/runs, name: r}}\nmodel: {{path: {model}}}\nsupervision: {{stop_timeout_s: 20}}\n"
    )
    return path


@pytest.fixture
def topology(file: Path) -> Topology:
    return load_topology(file)


@pytest.fixture
def start_run(file: Path) -> Iterator[StartRun]:
    started: list[subprocess.Popen[str]] = []

    def start(stage1: dict[str, str] | None = None, **roles: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", PROGRAM, str(file), json.dumps(roles), json.dumps(stage1 or {})]
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
        return started[-1]

    yield start
    for process in started:
        # In order, because the roles of these tests do not watch the launcher's pipe.
        if process.poll() is None:
            process.terminate()
        try:
            process.communicate(timeout=60)
        finally:
            process.kill()


def wait_until(condition: Callable[[], bool], timeout_s: float = 30.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, "waited in vain"
        time.sleep(0.02)


def read(path: Path) -> str:
    return path.read_text() if path.is_file() else ""


def role_pids(run_dir: RunDir) -> list[int]:
    return [int(pid) for pid in re.findall(r"pid (\d+)", read(run_dir.logs / "launcher.log"))]


def all_started(topology: Topology) -> bool:
    return len(role_pids(RunDir(topology.run_dir))) == len(list(role_processes(topology)))


def assert_nothing_is_left(topology: Topology) -> None:
    run_dir = RunDir(topology.run_dir)
    assert role_pids(run_dir) and not any(psutil.pid_exists(pid) for pid in role_pids(run_dir))
    assert not run_dir.launcher.exists() and not run_dir.sockets().exists() and not run_dir.segments().exists()


def no_report(_run_dir: RunDir, _topology: Topology, _phases: dict[str, float], _status: Status) -> None:
    """Stand for the summary."""


def test_the_learners_good_end_is_exit_code_zero(start_run: StartRun, topology: Topology) -> None:
    process = start_run(learner="import time; time.sleep(0.3)")
    assert process.wait(30) == 0
    assert read(topology.run_dir / "report") == "finished rl"
    assert load_topology(topology.run_dir / "topology.yaml") == topology
    assert_nothing_is_left(topology)


def test_the_learners_death_is_exit_code_one_with_its_traceback(start_run: StartRun, topology: Topology) -> None:
    process = start_run(learner=DIE)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 1
    assert (
        "the run has failed: learner-0 ended with exit code 1" in errors and "FloatingPointError: loss is nan" in errors
    )
    assert read(topology.run_dir / "report") == "failed rl"
    assert_nothing_is_left(topology)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_the_run_in_order_and_the_report_is_still_made(
    start_run: StartRun, topology: Topology, number: int, code: int
) -> None:
    process = start_run()
    wait_until(lambda: all_started(topology))
    process.send_signal(number)
    assert process.wait(30) == code
    assert read(topology.run_dir / "report") == "interrupted rl"
    assert_nothing_is_left(topology)


def test_each_process_is_shown_its_own_devices_among_those_that_the_launcher_sees(
    start_run: StartRun, file: Path, topology: Topology, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    with file.open("a") as opened:
        opened.write("roles:\n  learner: {device: cuda, ranks: 2}\n  policy: {device: cuda, replicas: 2}\n")
    tell = "import os, sys, time; print(os.environ['CUDA_VISIBLE_DEVICES'], flush=True); time.sleep(60)"
    start_run(**dict.fromkeys(("learner", "policy", "actor"), tell))
    shown = {"learner-0": "4,5", "learner-1": "4,5", "policy-0": "6", "policy-1": "7", "actor-0": "4,5,6,7"}
    logs = topology.run_dir / "logs"
    wait_until(lambda: {name: read(logs / f"{name}.log").strip() for name in shown} == shown)


def test_a_second_signal_kills_at_once(start_run: StartRun, topology: Topology) -> None:
    process = start_run(actor=IGNORE_SIGTERM)
    log = topology.run_dir / "logs" / "actor-0.log"
    wait_until(lambda: all_started(topology) and "ready" in read(log))
    process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    assert process.poll() is None
    started_s = time.monotonic()
    process.send_signal(signal.SIGINT)
    assert process.wait(30) == 130
    assert time.monotonic() - started_s < topology.supervision.stop_timeout_s / 2
    assert_nothing_is_left(topology)


def test_stage_1_runs_first_and_its_output_is_shown_and_kept(start_run: StartRun, topology: Topology) -> None:
    process = start_run({"one": "print('first')", "two": "print('second')"}, learner="pass")
    output, _ = process.communicate(timeout=30)
    assert process.returncode == 0
    assert output.index("first") < output.index("second")
    assert read(topology.run_dir / "logs" / "stage1.log") == "first\nsecond\n"
    assert read(topology.run_dir / "report") == "finished one two rl"


def test_a_failed_stage_1_ends_the_run_before_any_role_starts(start_run: StartRun, topology: Topology) -> None:
    process = start_run({"sft": DIE})
    output, errors = process.communicate(timeout=30)
    assert process.returncode == 1
    assert "stage 1 (sft) ended with exit code 1" in errors and "FloatingPointError: loss is nan" in output
    assert read(topology.run_dir / "report") == "failed sft"
    assert role_pids(RunDir(topology.run_dir)) == []


@pytest.mark.parametrize("num_signals", [1, 2])
def test_a_signal_during_stage_1_ends_its_command(start_run: StartRun, topology: Topology, num_signals: int) -> None:
    text = RUN_ON if num_signals == 1 else IGNORE_SIGTERM
    process = start_run({"sft": f"import os; print(os.getpid(), flush=True); {text}"})
    log = topology.run_dir / "logs" / "stage1.log"
    wait_until(lambda: len(read(log).splitlines()) >= num_signals)
    for _ in range(num_signals):
        process.send_signal(signal.SIGINT)
        time.sleep(0.2)
    assert process.wait(15) == 130
    assert not psutil.pid_exists(int(read(log).split()[0]))
    assert read(topology.run_dir / "report") == "interrupted sft"


def test_a_run_directory_in_use_is_refused_even_with_overwrite(start_run: StartRun, topology: Topology) -> None:
    process = start_run()
    wait_until(lambda: all_started(topology))
    assert running_launcher(RunDir(topology.run_dir)) == process.pid
    with pytest.raises(LaunchError, match=f"in use by the launcher with process id {process.pid}"):
        Launcher(topology).run(no_report, overwrite=True)
    assert process.poll() is None and all(psutil.pid_exists(pid) for pid in role_pids(RunDir(topology.run_dir)))


def test_a_process_that_has_the_id_of_an_old_launcher_is_none(topology: Topology) -> None:
    run_dir = RunDir(topology.run_dir)
    run_dir.root.mkdir(parents=True)
    run_dir.launcher.write_text(json.dumps({"pid": os.getpid(), "process_started_at_s": 1.0}))
    assert running_launcher(run_dir) is None


def test_an_earlier_run_is_refused_unless_it_may_be_overwritten(topology: Topology) -> None:
    run_dir = RunDir(topology.run_dir)
    run_dir.root.mkdir(parents=True)
    run_dir.topology.write_text("an old run")
    (run_dir.root / "metrics.jsonl").write_text("old")
    with pytest.raises(LaunchError, match="already holds a run"):
        check_startable(topology, run_dir, overwrite=False)
    check_startable(topology, run_dir, overwrite=True)


def test_a_directory_that_is_no_run_is_never_emptied(topology: Topology) -> None:
    run_dir = RunDir(topology.run_dir)
    run_dir.root.mkdir(parents=True)
    (run_dir.root / "thesis.tex").write_text("precious")
    with pytest.raises(LaunchError, match="something that is not a run"):
        Launcher(topology).run(no_report, overwrite=True)
    assert (run_dir.root / "thesis.tex").read_text() == "precious"


def test_overwriting_leaves_nothing_of_the_earlier_run(topology: Topology) -> None:
    run_dir = RunDir(topology.run_dir)
    run_dir.root.mkdir(parents=True)
    run_dir.topology.write_text("an old run")
    run_dir.metrics.write_text("old")
    launcher = Launcher(
        topology, command=lambda role, *_: [sys.executable, "-c", "pass" if role == "learner" else RUN_ON]
    )
    assert launcher.run(no_report, overwrite=True) == 0
    assert not run_dir.metrics.exists()


def test_the_seconds_of_every_launch_count(topology: Topology) -> None:
    run_dir = left_run(topology)
    run_dir.phases.write_text(json.dumps({"sft": 20.0, "rl": 100.0}))
    seconds: dict[str, float] = {}

    def report(_run_dir: RunDir, _topology: Topology, phases: dict[str, float], _status: Status) -> None:
        seconds.update(phases)

    launcher = Launcher(
        topology, command=lambda role, *_: [sys.executable, "-c", "pass" if role == "learner" else RUN_ON]
    )
    assert launcher.run(report, resume=True) == 0
    assert seconds["sft"] == 20.0 and 100.0 < seconds["rl"] < 130.0
    assert read_phases(run_dir.phases) == seconds


def test_a_damaged_record_of_phases_is_refused_before_anything_starts(topology: Topology) -> None:
    run_dir = left_run(topology)
    run_dir.phases.write_text('{"rl": "long"}')
    with pytest.raises(LaunchError, match=r"phases\.json is damaged .* remove it"):
        Launcher(topology).run(no_report, resume=True)
    assert run_dir.counts.exists() and not run_dir.launcher.exists()


def left_run(topology: Topology) -> RunDir:
    """A run of `topology` that was interrupted after Stage 1."""
    run_dir = RunDir(topology.run_dir)
    run_dir.root.mkdir(parents=True)
    run_dir.topology.write_text(dump_topology(topology))
    run_dir.metrics.write_text("kept")
    run_dir.counts.write_text("old")
    run_dir.model.mkdir()
    (run_dir.model / "config.json").write_text("{}")
    return run_dir


def test_resuming_keeps_the_run_and_makes_its_result_anew(topology: Topology) -> None:
    run_dir = left_run(topology)
    longer = topology.model_copy(update={"run": topology.run.model_copy(update={"updates": topology.run.updates + 1})})
    launcher = Launcher(
        longer,
        command=lambda role, *_: [sys.executable, "-c", "pass" if role == "learner" else RUN_ON],
        stage1=lambda *_: {"again": [sys.executable, "-c", "raise SystemExit(1)"]},
    )
    assert launcher.run(no_report, resume=True) == 0
    assert run_dir.metrics.read_text() == "kept" and not run_dir.counts.exists()
    assert load_topology(run_dir.topology) == longer
    assert list(read_phases(run_dir.phases)) == ["rl"]


def test_only_the_same_run_is_resumed(topology: Topology) -> None:
    with pytest.raises(LaunchError, match="holds no run to resume"):
        check_startable(topology, RunDir(topology.run_dir), overwrite=False, resume=True)
    run_dir = left_run(topology)
    check_startable(topology, run_dir, overwrite=False, resume=True)
    seed = topology.model_copy(update={"run": topology.run.model_copy(update={"seed": 9}), "method": "grpo"})
    with pytest.raises(LaunchError, match=r"different keys: method, run\.seed$"):
        check_startable(seed, run_dir, overwrite=False, resume=True)


def test_a_run_whose_stage_1_did_not_end_is_not_resumed(topology: Topology) -> None:
    made = topology.model_copy(update={"model": Model(init=TinyModel(max_context_tokens=16384))})
    run_dir = left_run(made)
    (run_dir.model / "config.json").unlink()
    with pytest.raises(LaunchError, match=r"Stage 1 of .* did not end"):
        check_startable(made, run_dir, overwrite=False, resume=True)


def test_a_run_directory_that_cannot_be_written_is_refused(topology: Topology) -> None:
    topology.run_dir.parent.mkdir()
    topology.run_dir.write_text("a file")
    with pytest.raises(LaunchError, match="is a file"):
        Launcher(topology).run(no_report)
    topology.run_dir.unlink()
    topology.run_dir.parent.rmdir()
    topology.run_dir.parent.write_text("a file where run.dir should be")
    with pytest.raises(LaunchError, match="cannot be written"):
        Launcher(topology).run(no_report)


def test_a_model_path_without_a_checkpoint_is_refused(topology: Topology, tmp_path: Path) -> None:
    (tmp_path / "model" / "config.json").unlink()
    with pytest.raises(LaunchError, match=r"holds no config\.json"):
        Launcher(topology).run(no_report)
    assert not topology.run_dir.exists()


def test_a_taken_port_is_refused_by_number(file: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        topology = load_topology(file, ("transport.kind=tcp", f"transport.base_port={port - 1}"))
        with pytest.raises(LaunchError, match=f"port {port} "):
            Launcher(topology).run(no_report)


def test_the_processes_follow_from_the_topology() -> None:
    def names(*overrides: str) -> list[str]:
        topology = parse_topology("model: {path: /m}\n", "t", overrides)
        return [f"{role}-{index}" for role, index, _ in role_processes(topology)]

    everything = ["buffer-0", "learner-0", "policy-0", "analyzer-0", "actor-0", "actor-1", "evaluation-0"]
    assert names() == everything
    assert names("method=grpo") == [name for name in everything if name != "analyzer-0"]
    assert names("roles.evaluation=null") == everything[:-1]
    assert names("roles.policy.replicas=2", "roles.actors.replicas=1")[2:4] == ["policy-0", "policy-1"]


def test_stage_1_is_for_a_new_model_only() -> None:
    run_dir = RunDir(Path("/runs/x"))
    assert stage1_commands(parse_topology("model: {path: /m}\n", "t"), run_dir) == {}
    text = "model: {init: {max_context_tokens: 16384}}\n"
    commands = stage1_commands(parse_topology(text, "t"), run_dir)
    assert list(commands) == ["demonstrations", "init_model", "sft"]
    assert commands["sft"][-2:] == ["--out", str(run_dir.model)]
