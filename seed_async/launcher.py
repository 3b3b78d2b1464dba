"""Launcher: a whole run from one command, as phases: Stage 1 (for a new model), training, report.

Consumes the topology. Waits for Stage 1's commands and then for the learner's end. Produces the run directory.
Unblocked by exits of its children and by signals. Stops when the learner is done, when the run fails, or on SIGINT or
SIGTERM: the first ends the children in order, the second kills them at once. No child outlives it, however it dies.
"""

import contextlib
import fcntl
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import IO, Any, Literal

import msgspec
import psutil

from seed_async.keys import create_keys
from seed_async.live import LiveView
from seed_async.phases import PhaseClock, read_phases
from seed_async.placement import CUDA_VISIBLE_DEVICES, place_gpus, visible_devices
from seed_async.rundir import RunDir
from seed_async.supervisor import (
    RECOVERING_ROLES,
    ChildStarter,
    CommandBuilder,
    RunFailedError,
    Supervisor,
    describe_exit,
    end_processes,
    kill_group,
    role_command,
)
from seed_async.topology import Topology
from seed_async.topology_file import dump_topology, load_topology

REFRESH_INTERVAL_S = 0.25
STAGE1_STOP_TIMEOUT_S = 5.0
"""Stage 1 has nothing to save when it is interrupted."""

MAY_CHANGE_ON_RESUME = frozenset(
    {"run.updates", "run.max_minutes", "run.dir", "roles.policy.gpus", "roles.analyzers.gpus"}
    | {f"roles.learner.{key}" for key in ("ranks", "device", "gpus", "threads", "activation_checkpointing")}
)
"""A resumed run may go on for longer, and with other machinery for the same updates; its directory may have moved."""
MADE_AGAIN = frozenset({"counts.json", "summary.json", "plots", "final", "targets", "pulse", "sockets"})
"""What a resumed run makes again."""

Status = Literal["finished", "interrupted", "failed"]
Report = Callable[[RunDir, Topology, dict[str, float], Status], None]
"""Writes the summary and plots of a run directory; given by the composition root."""


class LaunchError(ValueError):
    """A run that cannot be started; nothing has been, and the message is ready to print."""


class _InterruptedError(Exception):
    """A signal asked for the end of the run."""


def running_launcher(run_dir: RunDir) -> int | None:
    """Return the process id of the launcher at work in `run_dir`, if there is one."""
    try:
        noted = json.loads(run_dir.launcher.read_text(encoding="utf-8"))
        pid = int(noted["pid"])
        # The start time tells the launcher from a later process that was given the same id.
        return pid if psutil.Process(pid).create_time() == noted["process_started_at_s"] else None
    except (OSError, ValueError, KeyError, psutil.NoSuchProcess):
        return None


def role_processes(topology: Topology) -> Iterator[tuple[str, int, int]]:
    """Yield the (role, index, threads) of every process of a run, in the order of their start."""
    roles = topology.roles
    yield "buffer", 0, 1
    for rank in range(roles.learner.ranks):
        yield "learner", rank, roles.learner.threads
    for index in range(roles.policy.replicas):
        yield "policy", index, roles.policy.threads
    for index in range(roles.analyzers.replicas if topology.uses_analyzers else 0):
        yield "analyzer", index, roles.analyzers.threads
    for index in range(roles.actors.replicas):
        yield "actor", index, 1
    if roles.evaluation is not None:
        yield "evaluation", 0, 1


def stage1_commands(topology: Topology, run_dir: RunDir) -> dict[str, list[str]]:
    """Return the commands that make the initial model, by the name of their phase; none for an existing model."""
    if topology.model.init is None:
        return {}
    given = ["--topology", str(run_dir.topology)]
    data, initial = str(run_dir.stage1), str(run_dir.stage1 / "initial")
    program = [sys.executable, "-m", "seed_async.cli"]
    return {
        "demonstrations": [*program, "data", "demonstrations", *given, "--out", data],
        "init_model": [*program, "init-model", *given, "--data", data, "--out", initial],
        "sft": [*program, "sft", *given, "--model", initial, "--data", data, "--out", str(run_dir.model)],
    }


def check_resumable(topology: Topology, run_dir: RunDir) -> None:
    """Raise LaunchError when `run_dir` holds no run of this topology. Changes nothing."""
    if not run_dir.topology.is_file():
        raise LaunchError(f"{run_dir.root} holds no run to resume")
    before, now = load_topology(run_dir.topology).model_dump(), topology.model_dump()
    different = sorted(_different_keys(before, now) - MAY_CHANGE_ON_RESUME)
    if different:
        raise LaunchError(f"{run_dir.root} was made with another topology; different keys: {', '.join(different)}")
    if topology.model.init is not None and not (run_dir.model / "config.json").is_file():
        raise LaunchError(f"Stage 1 of {run_dir.root} did not end: start anew with --overwrite")


def _earlier_seconds(run_dir: RunDir) -> dict[str, float]:
    try:
        return read_phases(run_dir.phases)
    except msgspec.DecodeError as error:
        raise LaunchError(f"{run_dir.phases} is damaged ({error}): remove it to count the time anew") from error


def _different_keys(before: dict[str, Any], now: dict[str, Any], prefix: str = "") -> set[str]:
    keys: set[str] = set()
    for name in before.keys() | now.keys():
        old, new = before.get(name), now.get(name)
        if isinstance(old, dict) and isinstance(new, dict):
            keys |= _different_keys(old, new, f"{prefix}{name}.")
        elif old != new:
            keys.add(prefix + name)
    return keys


def check_startable(topology: Topology, run_dir: RunDir, *, overwrite: bool, resume: bool = False) -> None:
    """Raise LaunchError for whatever would end the run at once. Changes nothing."""
    if resume:
        check_resumable(topology, run_dir)
    path = topology.model.path
    if path is not None and not (path / "config.json").is_file():
        raise LaunchError(f"model.path {path} is no checkpoint folder: it holds no config.json")
    pid = running_launcher(run_dir)
    if pid is not None:
        raise LaunchError(f"{run_dir.root} is in use by the launcher with process id {pid}")
    if run_dir.root.exists() and not run_dir.root.is_dir():
        raise LaunchError(f"{run_dir.root} is a file, not a directory")
    if run_dir.root.is_dir() and any(run_dir.root.iterdir()):
        if not run_dir.topology.is_file():
            raise LaunchError(f"{run_dir.root} holds something that is not a run: choose another run.name or run.dir")
        if not overwrite and not resume:
            raise LaunchError(
                f"{run_dir.root} already holds a run: choose another run.name, or give --resume or --overwrite"
            )
    if topology.transport.kind == "tcp":
        _check_ports(topology)


def _check_ports(topology: Topology) -> None:
    first = topology.transport.base_port
    for port in range(first, first + 2 + topology.roles.policy.replicas):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError as error:
                raise LaunchError(f"port {port} (transport.base_port {first}): {error.strerror}") from error


def prepare(topology: Topology, run_dir: RunDir, *, resume: bool = False) -> None:
    """Claim the run directory, empty it unless the run is resumed, write the topology. Raises LaunchError."""
    try:
        run_dir.root.mkdir(parents=True, exist_ok=True)
        _claim(run_dir)
        # The directory itself stays: it may be a mount point.
        for entry in run_dir.root.iterdir():
            if resume and entry.name not in MADE_AGAIN:
                continue
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            else:
                entry.unlink()
        for directory in (run_dir.logs, run_dir.targets):
            directory.mkdir(exist_ok=True)
        _remove_shared(run_dir)
        run_dir.sockets().mkdir(parents=True, mode=0o700)
        run_dir.topology.write_text(dump_topology(topology), encoding="utf-8")
        if topology.transport.curve:
            create_keys(run_dir.keys, [f"{role}-{index}" for role, index, _ in role_processes(topology)])
        with run_dir.launcher.open("w", encoding="utf-8") as file:
            json.dump({"pid": os.getpid(), "process_started_at_s": psutil.Process().create_time()}, file)
    except OSError as error:
        raise LaunchError(f"{run_dir.root} cannot be written: {error.strerror} ({error.filename})") from error


def _claim(run_dir: RunDir) -> None:
    """Lock the run directory for as long as this process lives. Raises LaunchError when another launcher has it."""
    descriptor = os.open(run_dir.root, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(descriptor)
        raise LaunchError(f"{run_dir.root} is being started by another launcher") from error


def _remove_shared(run_dir: RunDir) -> None:
    """Remove what lies outside the run directory or means nothing without its processes."""
    for directory in (run_dir.segments(), run_dir.sockets()):
        shutil.rmtree(directory, ignore_errors=True)


class Launcher:
    """One run: its directory, its children, and what a signal has asked for."""

    def __init__(
        self,
        topology: Topology,
        *,
        command: CommandBuilder = role_command,
        stage1: Callable[[Topology, RunDir], dict[str, list[str]]] = stage1_commands,
    ) -> None:
        """Nothing is started or written; `command` and `stage1` give the command lines of the children."""
        self._topology, self._command, self._stage1 = topology, command, stage1
        self._run_dir = RunDir(topology.run_dir)
        self._gpus = place_gpus(topology)
        self._starter = ChildStarter()
        self._supervisor: Supervisor | None = None
        self._stage1_child: subprocess.Popen[bytes] | None = None
        self._signals: list[int] = []
        self._phases = PhaseClock(self._run_dir.phases, {})

    def run(self, report: Report, *, overwrite: bool = False, resume: bool = False) -> int:
        """Run all phases; returns the exit code: 0 finished, 1 failed, 128 + signal when interrupted.

        A resumed run goes on after Stage 1. Raises LaunchError when nothing was started.
        """
        check_startable(self._topology, self._run_dir, overwrite=overwrite, resume=resume)
        if resume:
            self._phases = PhaseClock(self._run_dir.phases, _earlier_seconds(self._run_dir))
        prepare(self._topology, self._run_dir, resume=resume)
        status: Status = "failed"
        with self._handling_signals():
            try:
                if not resume:
                    self._make_model()
                self._train()
                status = "finished"
            except _InterruptedError:
                status = "interrupted"
                print("interrupted: everything is stopped", file=sys.stderr)
            except RunFailedError as error:
                print(f"the run has failed: {error}", file=sys.stderr)
            finally:
                self._clean_up()
            report(self._run_dir, self._topology, self._phases.seconds, status)
        if status == "interrupted":
            return 128 + self._signals[0]
        return 0 if status == "finished" else 1

    def _make_model(self) -> None:
        for name, command in self._stage1(self._topology, self._run_dir).items():
            with self._phases.timed(name), (self._run_dir.logs / "stage1.log").open("ab") as log:
                print(f"stage 1: {name}", flush=True)
                threads, devices = self._topology.stage1.threads, self._devices("learner", 0)
                child = self._starter.start(command, threads, subprocess.PIPE, devices)
                self._stage1_child = child
                assert child.stdout is not None
                try:
                    self._raise_if_interrupted()
                    _copy_lines(child.stdout, log)
                    status = child.wait()
                finally:
                    end_processes([child], STAGE1_STOP_TIMEOUT_S)
            self._raise_if_interrupted()
            if status != 0:
                raise RunFailedError(f"stage 1 ({name}) ended with {describe_exit(status)}")

    def _train(self) -> None:
        with self._phases.timed("rl") as tick, (self._run_dir.logs / "launcher.log").open("a") as log:
            supervisor = Supervisor(
                self._run_dir,
                self._topology.supervision,
                self._starter,
                _event_writer(log),
                self._command,
                RECOVERING_ROLES if self._topology.checkpoint.every else RECOVERING_ROLES - {"learner"},
            )
            self._supervisor = supervisor
            try:
                for role, index, threads in role_processes(self._topology):
                    supervisor.start(role, index, threads, self._devices(role, index))
                with LiveView(self._run_dir, self._topology, supervisor.restarts) as view:
                    while not supervisor.poll():
                        self._raise_if_interrupted()
                        view.refresh()
                        tick()
                        time.sleep(REFRESH_INTERVAL_S)
            finally:
                supervisor.stop()

    def _devices(self, role: str, index: int) -> dict[str, str]:
        """The environment that shows a process its CUDA devices and no others; nothing for one that is given none."""
        gpus = self._gpus.get((role, index))
        return {} if gpus is None else {CUDA_VISIBLE_DEVICES: visible_devices(gpus, os.environ)}

    def _raise_if_interrupted(self) -> None:
        if self._signals:
            raise _InterruptedError

    @contextlib.contextmanager
    def _handling_signals(self) -> Iterator[None]:
        before = {number: signal.signal(number, self._on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        self._signals.append(number)
        if len(self._signals) > 1:
            if self._supervisor is not None:
                self._supervisor.kill()
            if self._stage1_child is not None and self._stage1_child.returncode is None:
                kill_group(self._stage1_child)
        elif self._stage1_child is not None and self._stage1_child.returncode is None:
            # The reading of its output ends with it.
            self._stage1_child.terminate()

    def _clean_up(self) -> None:
        self._starter.close()
        _remove_shared(self._run_dir)
        self._run_dir.launcher.unlink(missing_ok=True)


def _copy_lines(source: IO[bytes], log: IO[bytes]) -> None:
    """Show a child's output on the terminal as it comes, and keep it."""
    for line in source:
        log.write(line)
        log.flush()
        print(line.decode(errors="replace"), end="", flush=True)


def _event_writer(log: IO[str]) -> Callable[[str], None]:
    def write(event: str) -> None:
        log.write(f"{time.strftime('%Y-%m-%dT%H:%M:%S')} {event}\n")
        log.flush()

    return write


def launch(topology: Topology, report: Report, *, overwrite: bool = False, resume: bool = False) -> int:
    """Run `topology` from Stage 1, or from where it was left, to the report; returns the exit code.

    Raises LaunchError before anything starts.
    """
    return Launcher(topology).run(report, overwrite=overwrite, resume=resume)
