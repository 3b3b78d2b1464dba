"""The supervisor with real processes: restarts, the end of a run, and that nothing is left behind."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from seed_async.pulse import read_counts
from seed_async.rundir import RunDir
from seed_async.supervisor import ChildStarter, RunFailedError, Supervisor, describe_exit, log_tail, role_command
from seed_async.topology import Supervision

RUN_ON = "import time; time.sleep(60)"
IGNORE_SIGTERM = "import signal, time; signal.signal(15, signal.SIG_IGN); print('ready', flush=True); time.sleep(60)"
QUICK = Supervision(max_restarts=3, window_s=60, backoff_max_s=0.05, stop_timeout_s=10)

Start = Callable[..., Supervisor]


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path / "run")


@pytest.fixture
def events() -> list[str]:
    return []


@pytest.fixture
def start(run_dir: RunDir, events: list[str]) -> Iterator[Start]:
    """Start a supervisor whose roles run the given Python text; each one is stopped at the end of the test."""
    started: list[Supervisor] = []
    starter = ChildStarter()

    def make(settings: Supervision = QUICK, **roles: str) -> Supervisor:
        def command(role: str, index: int, root: Path) -> list[str]:
            return [sys.executable, "-S", "-c", textwrap.dedent(roles[role]), str(root)]

        supervisor = Supervisor(run_dir, settings, starter, events.append, command)
        started.append(supervisor)
        for role in roles:
            supervisor.start(role)
        return supervisor

    yield make
    for supervisor in started:
        supervisor.kill()
        supervisor.stop()
    starter.close()


def wait_until(condition: Callable[[], bool], timeout_s: float = 15.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, "waited in vain"
        time.sleep(0.02)


def poll_to_the_end(supervisor: Supervisor) -> None:
    wait_until(supervisor.poll)


def is_gone(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


HANG_AFTER_START = """
import sys, time
from pathlib import Path
from seed_async.pulse import Pulse
Pulse(Path(sys.argv[1]) / "pulse" / "policy-0").beat()
time.sleep(60)
"""

START_IN_STEPS = """
import sys, time
from pathlib import Path
from seed_async.pulse import Pulse
pulse = Pulse(Path(sys.argv[1]) / "pulse" / "policy-0")
for _ in range(8):
    time.sleep(0.25)
    pulse.step()
while True:
    pulse.beat()
    time.sleep(0.02)
"""


def test_a_process_whose_main_loop_stands_still_is_killed_named_and_restarted(start: Start, events: list[str]) -> None:
    settings = Supervision(max_restarts=3, window_s=60, backoff_max_s=0.05, hang_timeout_s=0.3)
    supervisor = start(settings, policy=HANG_AFTER_START)
    first = supervisor.pids()["policy-0"]
    wait_until(lambda: not supervisor.poll() and supervisor.restarts["policy-0"] >= 1)
    assert is_gone(first)
    hung = [event for event in events if "policy-0 hangs" in event]
    assert len(hung) == supervisor.restarts["policy-0"] == 1


def test_a_start_that_makes_progress_is_no_hang_however_long_it_takes(start: Start, run_dir: RunDir) -> None:
    supervisor = start(Supervision(hang_timeout_s=5, start_timeout_s=1.5), policy=START_IN_STEPS)
    first = supervisor.pids()["policy-0"]
    wait_until(lambda: not supervisor.poll() and read_counts(run_dir.pulse("policy-0"))[0] > 10)
    assert supervisor.pids()["policy-0"] == first


def test_a_process_stopped_right_after_its_start_is_killed_named_and_restarted(
    start: Start, run_dir: RunDir, events: list[str]
) -> None:
    settings = Supervision(max_restarts=3, window_s=60, backoff_max_s=0.05, start_timeout_s=2)
    supervisor = start(settings, policy=START_IN_STEPS)
    first = supervisor.pids()["policy-0"]
    os.kill(first, signal.SIGSTOP)
    wait_until(lambda: not supervisor.poll() and read_counts(run_dir.pulse("policy-0"))[0] > 0)
    assert is_gone(first) and supervisor.restarts["policy-0"] == 1
    assert any(event.startswith("policy-0 hangs while it starts: no step of its start for 2 s") for event in events)


@pytest.mark.parametrize("role", ["actor", "analyzer", "policy", "evaluation"])
def test_a_killed_role_is_restarted_counted_and_named(start: Start, events: list[str], role: str) -> None:
    supervisor = start(**{role: RUN_ON})
    first = supervisor.pids()[f"{role}-0"]
    os.kill(first, signal.SIGKILL)
    wait_until(lambda: not supervisor.poll() and supervisor.restarts[f"{role}-0"] == 1)
    assert supervisor.pids()[f"{role}-0"] != first
    assert f"{role}-0 ended with signal SIGKILL; restart in 0.05 s" in events


def test_the_delay_before_a_restart_doubles_up_to_its_limit(start: Start, events: list[str]) -> None:
    settings = Supervision(max_restarts=3, window_s=60, backoff_max_s=1.5)
    supervisor = start(settings, actor="raise SystemExit(3)")
    with pytest.raises(RunFailedError):
        poll_to_the_end(supervisor)
    delays = [event.rpartition("restart in ")[2] for event in events if "restart in" in event]
    assert delays == ["1 s", "1.5 s", "1.5 s"]


def test_a_role_that_dies_too_often_ends_the_run_with_the_end_of_its_log(start: Start) -> None:
    supervisor = start(actor="print('line one'); raise RuntimeError('no such game')")
    with pytest.raises(RunFailedError) as caught:
        poll_to_the_end(supervisor)
    message = str(caught.value)
    assert "actor-0 ended with exit code 1 (4 deaths within 60 s, 3 restarts allowed)" in message
    assert "line one" in message and "RuntimeError: no such game" in message
    assert supervisor.restarts["actor-0"] == 3


def test_deaths_outside_the_window_are_forgotten(start: Start) -> None:
    supervisor = start(Supervision(max_restarts=1, window_s=0.01, backoff_max_s=0.05), actor="raise SystemExit(1)")
    wait_until(lambda: not supervisor.poll() and supervisor.restarts["actor-0"] >= 4)


@pytest.mark.parametrize("role", ["buffer", "learner"])
def test_the_death_of_a_role_with_state_ends_the_run(start: Start, role: str) -> None:
    supervisor = start(**{role: "raise FloatingPointError('loss is nan')", "actor": RUN_ON})
    with pytest.raises(RunFailedError, match=rf"(?s){role}-0 ended with exit code 1.*FloatingPointError: loss is nan"):
        poll_to_the_end(supervisor)
    assert supervisor.restarts.total() == 0


@pytest.mark.parametrize("role", ["buffer", "learner"])
def test_a_killed_role_with_state_goes_on_from_what_it_has_on_disk(start: Start, role: str) -> None:
    supervisor = start(**{role: RUN_ON})
    first = supervisor.pids()[f"{role}-0"]
    os.kill(first, signal.SIGKILL)
    wait_until(lambda: not supervisor.poll() and supervisor.restarts[f"{role}-0"] == 1)
    assert supervisor.pids()[f"{role}-0"] != first


def test_a_killed_learner_without_checkpoints_ends_the_run(run_dir: RunDir) -> None:
    starter = ChildStarter()
    command = [sys.executable, "-S", "-c", RUN_ON]
    supervisor = Supervisor(run_dir, QUICK, starter, command=lambda *_: command, recovering=frozenset({"buffer"}))
    supervisor.start("learner")
    os.kill(supervisor.pids()["learner-0"], signal.SIGKILL)
    with pytest.raises(RunFailedError, match="learner-0 ended with signal SIGKILL"):
        poll_to_the_end(supervisor)
    starter.close()


def test_a_buffer_that_ends_by_itself_ends_the_run_even_with_exit_code_zero(start: Start) -> None:
    with pytest.raises(RunFailedError, match="buffer-0 ended with exit code 0"):
        poll_to_the_end(start(buffer="pass"))


def test_the_learners_good_end_is_the_end_of_the_run(start: Start) -> None:
    poll_to_the_end(start(learner="pass", actor=RUN_ON))


def test_an_evaluation_that_is_done_is_not_restarted_but_an_actor_is(start: Start) -> None:
    supervisor = start(evaluation="pass", actor="pass")
    wait_until(lambda: not supervisor.poll() and supervisor.restarts["actor-0"] >= 2)
    assert supervisor.restarts["evaluation-0"] == 0


def test_the_log_keeps_the_output_of_every_incarnation(start: Start, run_dir: RunDir) -> None:
    supervisor = start(policy="import os, sys; print(os.getpid()); print('err', file=sys.stderr); sys.exit(1)")
    wait_until(lambda: not supervisor.poll() and supervisor.restarts["policy-0"] == 2)
    wait_until(lambda: (run_dir.logs / "policy-0.log").read_text().count("err") >= 2)


def test_a_child_is_told_its_threads_and_to_stay_off_the_network(start: Start, run_dir: RunDir) -> None:
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OMP_WAIT_POLICY", "HF_HUB_OFFLINE", "TOKENIZERS_PARALLELISM")
    supervisor = start(buffer=f"import os; print(*(os.environ[name] for name in {names})); import time; time.sleep(60)")
    wait_until(lambda: not supervisor.poll() and (run_dir.logs / "buffer-0.log").read_text() != "")
    assert (run_dir.logs / "buffer-0.log").read_text() == "1 1 PASSIVE 1 false\n"


NOTE_SIGTERM = """
    import pathlib, signal, sys, time
    def note(*_):
        time.sleep(0.2)
        with open(sys.argv[1] + "/ends", "a") as file:
            file.write("{name}\\n")
        sys.exit(0)
    signal.signal(signal.SIGTERM, note)
    print("ready", flush=True)
    time.sleep(60)
"""


def test_stop_lets_every_role_end_by_itself_and_the_buffer_last(start: Start, run_dir: RunDir) -> None:
    names = ("buffer", "learner", "actor")
    supervisor = start(**{name: NOTE_SIGTERM.format(name=name) for name in names})
    wait_until(lambda: all((run_dir.logs / f"{name}-0.log").read_text() for name in names))
    supervisor.stop()
    ends = (run_dir.root / "ends").read_text().split()
    assert sorted(ends) == sorted(names) and ends[-1] == "buffer"
    assert supervisor.pids() == {}


def test_what_ignores_sigterm_is_killed_after_the_timeout(start: Start, run_dir: RunDir) -> None:
    supervisor = start(Supervision(stop_timeout_s=0.3), actor=IGNORE_SIGTERM)
    wait_until(lambda: "ready" in (run_dir.logs / "actor-0.log").read_text())
    pid = supervisor.pids()["actor-0"]
    started_s = time.monotonic()
    supervisor.stop()
    assert 0.3 <= time.monotonic() - started_s < 5
    assert is_gone(pid)


def test_kill_ends_everything_at_once(start: Start, run_dir: RunDir) -> None:
    supervisor = start(Supervision(stop_timeout_s=30), actor=IGNORE_SIGTERM, buffer=IGNORE_SIGTERM)
    wait_until(lambda: all("ready" in (run_dir.logs / f"{name}-0.log").read_text() for name in ("actor", "buffer")))
    pids = supervisor.pids()
    started_s = time.monotonic()
    supervisor.kill()
    supervisor.stop()
    assert time.monotonic() - started_s < 5
    assert all(is_gone(pid) for pid in pids.values())


def test_what_a_role_has_started_ends_with_it(start: Start, run_dir: RunDir) -> None:
    grandchild = f"subprocess.Popen([sys.executable, '-S', '-c', '{RUN_ON}'])"
    supervisor = start(actor=f"import subprocess, sys, time; print({grandchild}.pid, flush=True); time.sleep(60)")
    log = run_dir.logs / "actor-0.log"
    wait_until(lambda: log.read_text().endswith("\n"))
    os.kill(supervisor.pids()["actor-0"], signal.SIGKILL)
    wait_until(lambda: not supervisor.poll() and supervisor.restarts["actor-0"] == 1)
    wait_until(lambda: is_gone(int(log.read_text().split()[0])))


LAUNCHER = """
    import sys, time
    from pathlib import Path
    from seed_async.rundir import RunDir
    from seed_async.supervisor import ChildStarter, Supervisor
    from seed_async.topology import Supervision
    CHILD = "import time; from seed_async import role; role.die_with_launcher(); print('up'); time.sleep(60)"
    supervisor = Supervisor(
        RunDir(Path(sys.argv[1])), Supervision(), ChildStarter(), command=lambda *_: [sys.executable, "-c", CHILD]
    )
    for index in range(2):
        supervisor.start("actor", index)
    print(*supervisor.pids().values(), flush=True)
    time.sleep(60)
"""


def test_children_end_when_the_launcher_is_killed(run_dir: RunDir) -> None:
    launcher = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(LAUNCHER), str(run_dir.root)], stdout=subprocess.PIPE, text=True
    )
    assert launcher.stdout is not None
    pids = [int(pid) for pid in launcher.stdout.readline().split()]
    assert len(pids) == 2
    wait_until(lambda: all("up" in log_tail(run_dir.logs / f"actor-{index}.log") for index in range(2)), timeout_s=60)
    launcher.kill()
    launcher.wait()
    launcher.stdout.close()
    wait_until(lambda: all(is_gone(pid) for pid in pids), timeout_s=10)


def test_the_command_of_a_role_is_its_module() -> None:
    command = role_command("actor", 3, Path("/runs/x"))
    assert command[1:] == ["-m", "seed_async.role", "actor", "--run-dir", "/runs/x", "--index", "3"]


@pytest.mark.parametrize(
    ("status", "text"), [(0, "exit code 0"), (7, "exit code 7"), (-11, "signal SIGSEGV"), (-63, "signal 63")]
)
def test_an_exit_is_described(status: int, text: str) -> None:
    assert describe_exit(status) == text


def test_the_tail_of_a_log_is_its_last_lines(tmp_path: Path) -> None:
    path = tmp_path / "x.log"
    assert log_tail(path) == "(the log is empty)"
    path.write_text("\n".join(str(number) for number in range(50_000)))
    assert log_tail(path, 2) == "49998\n49999"
