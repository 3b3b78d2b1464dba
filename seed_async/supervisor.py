"""Starts the role processes, kills those that hang, restarts those that may die, and ends them all.

Consumes exit statuses and pulses. Waits for nothing: `poll` looks once. Produces restarts, or the end of the run.
Unblocked by its caller's loop. Stops when the learner has ended well, when a role that must live has died, or when one
died too often.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from seed_async.pulse import PulseWatch, Silence
from seed_async.role import GROUP, LAUNCHER_PIPE
from seed_async.rundir import RunDir
from seed_async.topology import Supervision

RESTARTED_ROLES = frozenset({"actor", "analyzer", "policy", "evaluation"})
"""Their state can be had again from the buffer and the learner."""
RECOVERING_ROLES = frozenset({"buffer", "learner"})
"""They go on from what they have on disk, when something outside has killed them. An error of their own would come
again: it ends the run."""
FIRST_BACKOFF_S = 1.0
POLL_INTERVAL_S = 0.05
LOG_TAIL_LINES = 30
LOG_TAIL_BYTES = 64 << 10

CommandBuilder = Callable[[str, int, Path], list[str]]


class RunFailedError(RuntimeError):
    """The run cannot go on; the message names the role, how it ended, and the end of its log."""


def role_command(role: str, index: int, run_dir: Path) -> list[str]:
    """Return the command line of a role process."""
    return [sys.executable, "-m", "seed_async.role", role, "--run-dir", str(run_dir), "--index", str(index)]


def describe_exit(status: int) -> str:
    """Say how a process ended, from its `Popen` return code."""
    if status >= 0:
        return f"exit code {status}"
    try:
        return f"signal {signal.Signals(-status).name}"
    except ValueError:
        return f"signal {-status}"


def log_tail(path: Path, num_lines: int = LOG_TAIL_LINES) -> str:
    """Return the last lines of a log, or a remark that there are none."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - LOG_TAIL_BYTES))
            lines = file.read().decode(errors="replace").splitlines()[-num_lines:]
    except OSError:
        lines = []
    return "\n".join(lines) or "(the log is empty)"


class ChildStarter:
    """Starts processes that end with this one: each holds the read end of a pipe whose only writer is here."""

    def __init__(self) -> None:
        """Open the pipe; its write end is never inherited."""
        self._read_end, self._write_end = os.pipe()

    def start(
        self, command: Sequence[str], threads: int, output: int, more: Mapping[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        """Start `command` in a process group of its own; stdout and stderr go to the descriptor `output`.

        `more` are environment variables of this command.
        """
        environment = os.environ | {
            LAUNCHER_PIPE: str(self._read_end),
            "OMP_NUM_THREADS": str(threads),
            "MKL_NUM_THREADS": str(threads),
            # Threads that wait must not spin: the processes share the cores.
            "OMP_WAIT_POLICY": "PASSIVE",
            "HF_HUB_OFFLINE": "1",
            # Loading a local checkpoint takes a moment; its bars would fill the logs.
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "PYTHONUNBUFFERED": "1",
        }
        environment |= more or {}
        # A group of its own: Ctrl-C on the terminal reaches the launcher alone, which decides what it means.
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            pass_fds=(self._read_end,),
            env=environment,
            process_group=0,
        )

    def close(self) -> None:
        """Close the pipe, which ends every child that is still there."""
        os.close(self._write_end)
        os.close(self._read_end)


def kill_group(process: subprocess.Popen[bytes]) -> None:
    """Send SIGKILL to a child and to whatever it has started."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


def end_processes(
    processes: Iterable[subprocess.Popen[bytes]], timeout_s: float, hurry: Callable[[], bool] = lambda: False
) -> None:
    """Send SIGTERM, wait until `timeout_s` is over or `hurry` says so, then SIGKILL; every process is reaped."""
    waiting = list(processes)
    for process in waiting:
        process.terminate()
    deadline_s = time.monotonic() + timeout_s
    while any(process.poll() is None for process in waiting) and time.monotonic() < deadline_s and not hurry():
        time.sleep(POLL_INTERVAL_S)
    for process in waiting:
        kill_group(process)
        process.wait()


@dataclass
class _Role:
    """One role process over its incarnations; `process` is None between a death and the restart."""

    role: str
    index: int
    threads: int
    environment: Mapping[str, str]
    pulse: PulseWatch
    process: subprocess.Popen[bytes] | None = None
    restart_at_s: float = 0.0
    done: bool = False
    deaths_s: deque[float] = field(default_factory=deque)

    @property
    def name(self) -> str:
        return f"{self.role}-{self.index}"


class Supervisor:
    """The role processes of one run. Use from one thread; only `kill` may be called from a signal handler."""

    def __init__(
        self,
        run_dir: RunDir,
        settings: Supervision,
        starter: ChildStarter,
        on_event: Callable[[str], None] = lambda _: None,
        command: CommandBuilder = role_command,
        recovering: frozenset[str] = RECOVERING_ROLES,
    ) -> None:
        """`on_event` is told of every start, death and restart in one line; `recovering` roles outlive a kill."""
        self.restarts: Counter[str] = Counter()
        self._run_dir, self._settings, self._starter = run_dir, settings, starter
        self._on_event, self._command, self._recovering = on_event, command, recovering
        self._roles: list[_Role] = []
        self._killed = False
        self._generation = 0
        run_dir.logs.mkdir(parents=True, exist_ok=True)

    def start(
        self, role: str, index: int = 0, threads: int = 1, environment: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        """Start a role process, with `environment` in addition to this process's own, and watch it from now on."""
        pulse = PulseWatch(self._run_dir.pulse(f"{role}-{index}"))
        self._roles.append(_Role(role, index, threads, environment, pulse))
        self._spawn(self._roles[-1])

    def poll(self) -> bool:
        """Look at every process once and restart what is due; True when the learner has ended well.

        Raises RunFailedError when the run cannot go on; the others are then still running, `stop` ends them.
        """
        for each in self._roles:
            if each.process is not None and each.process.poll() is not None:
                self._ended(each, each.process)
            elif each.process is not None and (fault := self._hang(each.pulse.silence())):
                self._on_event(f"{each.name} {fault}; killed")
                kill_group(each.process)
                each.pulse.restart()  # said once; the next look finds the process dead
            elif each.process is None and not each.done and time.monotonic() >= each.restart_at_s:
                self.restarts[each.name] += 1
                self._spawn(each)
        ranks = [each for each in self._roles if each.role == "learner"]
        return bool(ranks) and all(each.done for each in ranks)

    def stop(self) -> None:
        """End every process: SIGTERM, the buffer last because the others still report to it, then SIGKILL."""
        for is_buffer in (False, True):
            running = [each for each in self._roles if each.process and (each.role == "buffer") == is_buffer]
            end_processes(
                [each.process for each in running if each.process],
                self._settings.stop_timeout_s,
                hurry=lambda: self._killed,
            )
            for each in running:
                each.process, each.done = None, True

    def kill(self) -> None:
        """Send SIGKILL to everything at once; `stop`, then or already waiting, only reaps."""
        self._killed = True
        for each in self._roles:
            if each.process is not None:
                kill_group(each.process)

    def pids(self) -> dict[str, int]:
        """Return the process id of each running role process."""
        return {each.name: each.process.pid for each in self._roles if each.process is not None}

    def _hang(self, silence: Silence) -> str:
        """Say what is wrong with a process that was silent for too long; nothing when it was not."""
        if silence.starting and silence.seconds > self._settings.start_timeout_s:
            return f"hangs while it starts: no step of its start for {silence.seconds:.0f} s"
        if not silence.starting and silence.seconds > self._settings.hang_timeout_s:
            return f"hangs: no turn of its main loop for {silence.seconds:.0f} s"
        return ""

    def _spawn(self, each: _Role) -> None:
        each.pulse.restart()
        with self._log(each).open("ab") as log:
            command = self._command(each.role, each.index, self._run_dir.root)
            environment = {**each.environment, GROUP: f"{os.getpid()}-{self._generation}"}
            each.process = self._starter.start(command, each.threads, log.fileno(), environment)
        self._on_event(f"{each.name} started, pid {each.process.pid}")

    def _ended(self, each: _Role, process: subprocess.Popen[bytes]) -> None:
        status = process.returncode
        kill_group(process)
        each.process = None
        how = f"{each.name} ended with {describe_exit(status)}"
        if status == 0 and each.role in ("learner", "evaluation"):
            each.done = True
            self._on_event(how)
        elif each.role in RESTARTED_ROLES:
            self._schedule(each, how)
        elif each.role in self._recovering and self._was_killed(each, status):
            self._schedule(each, how)
            self._restart_ranks(each)
        else:
            raise RunFailedError("\n".join([self._with_log(each, how), *self._other_failures(each)]))

    def _ranks(self, each: _Role) -> list[_Role]:
        """The other processes that act as one with this one: the ranks of a learner."""
        return [other for other in self._roles if other.role == each.role == "learner" and other is not each]

    def _was_killed(self, each: _Role, status: int) -> bool:
        """Whether something outside has ended it, or another rank: then this one failed for want of the other."""
        others = [other.process.poll() for other in self._ranks(each) if other.process is not None]
        return any(code is not None and code < 0 for code in (status, *others))

    def _restart_ranks(self, each: _Role) -> None:
        """End the other ranks too: the shards of a model are of use only together, and start together."""
        self._generation += 1
        for other in self._ranks(each):
            if other.process is not None:
                kill_group(other.process)
                other.process.wait()
            other.process, other.done, other.restart_at_s = None, False, each.restart_at_s

    def _other_failures(self, each: _Role) -> list[str]:
        """What the other ranks say that have failed as well: the first fault may be theirs."""
        return [
            self._with_log(other, f"{other.name} ended with {describe_exit(other.process.returncode)}")
            for other in self._ranks(each)
            if other.process is not None and other.process.poll()
        ]

    def _schedule(self, each: _Role, how: str) -> None:
        """Restart after a delay that doubles with each death in the window, or give the run up."""
        now_s = time.monotonic()
        each.deaths_s.append(now_s)
        while now_s - each.deaths_s[0] > self._settings.window_s:
            each.deaths_s.popleft()
        number = len(each.deaths_s)
        if number > self._settings.max_restarts:
            times = (
                f"{number} deaths within {self._settings.window_s:g} s, {self._settings.max_restarts} restarts allowed"
            )
            raise RunFailedError(self._with_log(each, f"{how} ({times})"))
        delay_s = min(FIRST_BACKOFF_S * 2 ** (number - 1), self._settings.backoff_max_s)
        each.restart_at_s = now_s + delay_s
        self._on_event(f"{how}; restart in {delay_s:g} s")

    def _log(self, each: _Role) -> Path:
        return self._run_dir.logs / f"{each.name}.log"

    def _with_log(self, each: _Role, text: str) -> str:
        path = self._log(each)
        return f"{text}\n--- end of {path} ---\n{log_tail(path)}"
