"""What the nemesis does to a process, and how it sees that the process works again.

A fault is a coroutine: it is given the run and what is planned, and returns the seconds from the blow until the role
worked again, None when it did not within `RECOVERY_TIMEOUT_S`.
"""

import asyncio
import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import psutil

from seed_async.pulse import read_counts
from seed_async.rundir import RunDir
from seed_async.supervisor import ChildStarter, kill_group, role_command

RECOVERY_TIMEOUT_S: Final = 300.0
"""Starting torch takes minutes on a machine with other work to do."""
TWIN_LIFE_S: Final = 6.0
"""How long two processes of one name live beside each other once the second one has started."""
POLL_S: Final = 0.1
LOOK_S: Final = 0.2
"""How old the list of processes may be: looking at all of the system's costs milliseconds."""
WATCH_S: Final = 0.002
"""How soon a publication is seen: that of a small model takes a few hundredths of a second."""
PUBLICATION_S: Final = 0.2
"""Within this time after the learner's note its receivers are transferring, if nobody holds them up."""


class NoRunError(RuntimeError):
    """The run ended, or did not start, while faults were still to be done."""


@dataclass(frozen=True)
class Blow:
    """One planned fault. `draw` in [0, 1) decides what is left to chance in it; `holds`: a receiver that it stops."""

    fault: str
    role: str
    draw: float
    holds: str = ""

    @property
    def roles(self) -> frozenset[str]:
        """Every role that nothing else may happen to meanwhile."""
        return frozenset({self.role, self.holds} - {""})


@dataclass
class AttackedRun:
    """A run under attack, as seen from outside: its processes, their pulses, what the learner has noted."""

    run_dir: RunDir
    launcher: subprocess.Popen[bytes]
    hang_timeout_s: float
    _processes: dict[str, psutil.Process] = field(default_factory=dict)
    _looked_at_s: float = 0.0

    def processes(self) -> dict[str, psutil.Process]:
        """Return the running role processes by name, e.g. `actor-1`."""
        if time.monotonic() >= self._looked_at_s + LOOK_S:
            self._processes = {}
            with contextlib.suppress(psutil.NoSuchProcess):
                for child in psutil.Process(self.launcher.pid).children():
                    role = _title(child)
                    if role:
                        self._processes[role] = child
            self._looked_at_s = time.monotonic()
        return self._processes

    def beats(self, role: str) -> int:
        """Return how often the role's main loop has turned, 0 while it starts."""
        return read_counts(self.run_dir.pulse(role))[0]

    def is_up(self, role: str) -> bool:
        """Whether the role runs and its main loop has turned."""
        return role in self.processes() and self.beats(role) > 0

    def updates_bytes(self) -> int:
        """Return the size of the learner's record of updates, which grows when a version is in use everywhere."""
        path = self.run_dir.metrics
        return path.stat().st_size if path.is_file() else 0

    async def wait(self, condition: Callable[[], bool], timeout_s: float, poll_s: float = POLL_S) -> float | None:
        """Return the seconds until `condition` held, None when it never did. Raises NoRunError when the run ends."""
        started_s = time.monotonic()
        while time.monotonic() - started_s < timeout_s:
            if condition():
                return time.monotonic() - started_s
            if self.launcher.poll() is not None:
                raise NoRunError(f"the run ended with status {self.launcher.returncode}")
            await asyncio.sleep(poll_s)
        return None

    async def replaced(self, role: str, pid: int) -> float | None:
        """Wait until another process than `pid` does the role's work."""

        def found() -> bool:
            process = self.processes().get(role)
            return process is not None and process.pid != pid and self.beats(role) > 0

        return await self.wait(found, RECOVERY_TIMEOUT_S)

    async def turned(self, role: str, beats: int) -> float | None:
        """Wait until the role's main loop turns again, in whatever process; `beats` is where it stood."""
        return await self.wait(lambda: self.is_up(role) and self.beats(role) != beats, RECOVERY_TIMEOUT_S)

    async def publication(self, timeout_s: float) -> float | None:
        """Wait until the learner begins to publish a version."""
        path = self.run_dir.trained
        begin = path.stat().st_size if path.is_file() else 0

        def noted() -> bool:
            if not path.is_file() or path.stat().st_size <= begin:
                return False
            with path.open("rb") as file:
                file.seek(begin)
                return b'"published"' in file.read()

        return await self.wait(noted, timeout_s, WATCH_S)


Processes = Mapping[str, psutil.Process]
Fault = Callable[[AttackedRun, Blow, Processes], Awaitable[float | None]]
"""It is given the processes of `blow.roles`."""


async def strike(run: AttackedRun, blow: Blow) -> float | None:
    """Wait until the roles are up, do the planned fault, return the seconds that it took to work again."""
    found: dict[str, psutil.Process] = {}

    def all_up() -> bool:
        found.update({role: process for role, process in run.processes().items() if role in blow.roles})
        return all(run.is_up(role) for role in blow.roles)

    if await run.wait(all_up, RECOVERY_TIMEOUT_S) is None:
        return None
    return await FAULTS[blow.fault](run, blow, found)


def _title(process: psutil.Process) -> str:
    """Return the role that a process has taken as its title, e.g. `actor-1`; empty for none, or a dead process."""
    try:
        words = " ".join(process.cmdline()).split()
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return ""
    return words[1] if words[:1] == ["seed-async"] else ""


def _send(process: psutil.Process, number: signal.Signals) -> None:
    """Send a signal; the process may have died meanwhile, of what another fault did to its peers."""
    with contextlib.suppress(psutil.NoSuchProcess):
        process.send_signal(number)


async def kill(run: AttackedRun, blow: Blow, found: Processes) -> float | None:
    """SIGKILL."""
    _send(found[blow.role], signal.SIGKILL)
    return await run.replaced(blow.role, found[blow.role].pid)


async def pause(run: AttackedRun, blow: Blow, found: Processes) -> float | None:
    """SIGSTOP, and SIGCONT before the supervisor calls it a hang: nothing may need a restart."""
    _send(found[blow.role], signal.SIGSTOP)
    try:
        await asyncio.sleep((0.2 + 0.4 * blow.draw) * run.hang_timeout_s)
        before = run.beats(blow.role)
    finally:
        _send(found[blow.role], signal.SIGCONT)
    return await run.turned(blow.role, before)


async def stop(run: AttackedRun, blow: Blow, found: Processes) -> float | None:
    """SIGSTOP for good: the supervisor must notice. A policy server is then a receiver that never reads."""
    _send(found[blow.role], signal.SIGSTOP)
    return await run.replaced(blow.role, found[blow.role].pid)


async def hang(run: AttackedRun, blow: Blow, found: Processes) -> float | None:
    """Block the Python main thread only: sockets stay alive, the main loop stands still."""
    _send(found[blow.role], signal.SIGUSR2)
    return await run.replaced(blow.role, found[blow.role].pid)


async def twin(run: AttackedRun, blow: Blow, found: Processes) -> float | None:
    """Start a second process with the same name: one of the two is fenced, and nothing is counted twice."""
    role, index = blow.role.rsplit("-", 1)
    starter = ChildStarter()
    with (run.run_dir.logs / "nemesis.log").open("ab") as log:
        second = starter.start(role_command(role, int(index), run.run_dir.root), 1, log.fileno())
    try:
        await run.wait(lambda: _title(psutil.Process(second.pid)) == blow.role, RECOVERY_TIMEOUT_S)
        await asyncio.sleep(TWIN_LIFE_S)
    finally:
        kill_group(second)
        second.wait()
        starter.close()
    return await run.turned(blow.role, run.beats(blow.role))


async def _hold_at_publication(run: AttackedRun, role: str, receiver: psutil.Process) -> None:
    """Stop the receiver and return when the learner begins to publish to it; the caller lets it go on."""
    deadline_s = time.monotonic() + RECOVERY_TIMEOUT_S
    while time.monotonic() < deadline_s:
        _send(receiver, signal.SIGSTOP)
        if await run.publication(run.hang_timeout_s / 2) is not None:
            return
        before = run.beats(role)
        _send(receiver, signal.SIGCONT)  # before it counts as hung
        await run.turned(role, before)


async def damage(run: AttackedRun, blow: Blow, found: Processes) -> float | None:
    """Flip one byte of published weights before a receiver reads them: the digest must catch it."""
    folder = run.run_dir.segments()

    def newest() -> Path | None:
        segments = [path for path in folder.glob("weights-*") if path.suffix != ".staging"]
        return max(segments, key=lambda path: int(path.name.partition("-")[2]), default=None)

    known = newest()
    try:
        await _hold_at_publication(run, blow.holds, found[blow.holds])
        await run.wait(lambda: newest() != known, run.hang_timeout_s / 4, WATCH_S)
        path, before = newest(), run.updates_bytes()
        if path is not None:
            with path.open("r+b") as file:
                file.seek(int(blow.draw * path.stat().st_size))
                byte = file.read(1)
                file.seek(-1, os.SEEK_CUR)
                file.write(bytes([byte[0] ^ 1]))
    finally:
        _send(found[blow.holds], signal.SIGCONT)
    return await run.wait(lambda: run.updates_bytes() > before, RECOVERY_TIMEOUT_S)


async def cut_before(run: AttackedRun, blow: Blow, found: Processes) -> float | None:
    """SIGKILL the learner when it begins to publish: the bytes are staged at most, and hardly anybody knows."""
    await run.publication(RECOVERY_TIMEOUT_S)
    _send(found[blow.role], signal.SIGKILL)
    return await run.replaced(blow.role, found[blow.role].pid)


async def cut_during(run: AttackedRun, blow: Blow, found: Processes) -> float | None:
    """SIGKILL in mid-publication: the learner, while a stopped receiver holds it up, or that receiver itself."""
    held = blow.holds or blow.role
    receiver = found[held]
    try:
        await _hold_at_publication(run, held, receiver)
        await asyncio.sleep(blow.draw * PUBLICATION_S)
        _send(found[blow.role], signal.SIGKILL)
    finally:
        _send(receiver, signal.SIGCONT)
    return await run.replaced(blow.role, found[blow.role].pid)


async def cut_after(run: AttackedRun, blow: Blow, found: Processes) -> float | None:
    """SIGKILL the learner when a version has just been acknowledged and recorded."""
    before = run.updates_bytes()
    await run.wait(lambda: run.updates_bytes() > before, RECOVERY_TIMEOUT_S, WATCH_S)
    _send(found[blow.role], signal.SIGKILL)
    return await run.replaced(blow.role, found[blow.role].pid)


FAULTS: Final[dict[str, Fault]] = {
    each.__name__: each
    for each in (kill, pause, stop, hang, twin, damage, cut_before, cut_during, cut_after)
}  # fmt: skip
