"""Breaks a running system on purpose, bounded and seeded, and checks that every promise still holds.

    python -m seed_async.tools.nemesis --topology topo.yaml --faults 20 --seed 0

It launches the topology, does one fault after another to a random role (kill, pause, hang, a twin with the same id,
damaged weights), measures how long the role takes to work again, ends the run, and audits its journals.
"""

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean
from typing import Final

import psutil
from rich.console import Console
from rich.table import Table

from seed_async.pulse import read_counts
from seed_async.role import NEMESIS
from seed_async.rundir import RunDir
from seed_async.supervisor import role_command
from seed_async.tools.audit import audit_run, print_audit
from seed_async.topology import Topology
from seed_async.topology_file import load_topology

RECOVERY_TIMEOUT_S: Final = 120.0
TWIN_LIFE_S: Final = 4.0
INTERRUPT_TIMEOUT_S: Final = 120.0
POLL_S: Final = 0.1


class NoRunError(RuntimeError):
    """The run ended, or did not start, while faults were still to be done."""


@dataclass
class Result:
    """What one fault did: `recovered_s` until the role worked again, None when it needed no recovery or never did."""

    fault: str
    role: str
    recovered_s: float | None


@dataclass
class Nemesis:
    """The run under attack. `launcher` is its process; faults are drawn from `rng`."""

    run_dir: RunDir
    launcher: subprocess.Popen[bytes]
    rng: random.Random
    hang_timeout_s: float
    results: list[Result] = field(default_factory=list)

    def roles(self) -> dict[str, psutil.Process]:
        """Return the running role processes by name, e.g. `actor-1`."""
        found = {}
        with contextlib.suppress(psutil.NoSuchProcess):
            for child in psutil.Process(self.launcher.pid).children():
                with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
                    title = child.cmdline()
                    if title and title[0].startswith("seed-async "):
                        found[title[0].split()[1]] = child
        return found

    def beats(self, role: str) -> int:
        """Return how often the role's main loop has turned, 0 while it starts."""
        return read_counts(self.run_dir.pulse(role))[0]

    def wait(self, condition: Callable[[], bool], timeout_s: float) -> float | None:
        """Return the seconds until `condition` held, None when it never did. Raises NoRunError when the run ends."""
        started_s = time.monotonic()
        while time.monotonic() - started_s < timeout_s:
            if condition():
                return time.monotonic() - started_s
            if self.launcher.poll() is not None:
                raise NoRunError(f"the run ended with status {self.launcher.returncode}")
            time.sleep(POLL_S)
        return None

    def _works_again(self, role: str, old_pid: int) -> bool:
        process = self.roles().get(role)
        return process is not None and process.pid != old_pid and self.beats(role) > 0

    # The faults; each takes the role's name and process -------------------------------------------------------------

    def kill(self, role: str, process: psutil.Process) -> float | None:
        """SIGKILL."""
        process.kill()
        return self.wait(lambda: self._works_again(role, process.pid), RECOVERY_TIMEOUT_S)

    def pause(self, role: str, process: psutil.Process) -> float | None:
        """SIGSTOP, and SIGCONT before the supervisor calls it a hang: nothing may need a restart."""
        process.suspend()
        time.sleep(self.rng.uniform(0.2, 0.6) * self.hang_timeout_s)
        before = self.beats(role)
        process.resume()
        return self.wait(lambda: self.beats(role) > before, RECOVERY_TIMEOUT_S)

    def stop(self, role: str, process: psutil.Process) -> float | None:
        """SIGSTOP for good: the supervisor must notice."""
        process.suspend()
        return self.wait(lambda: self._works_again(role, process.pid), RECOVERY_TIMEOUT_S)

    def hang(self, role: str, process: psutil.Process) -> float | None:
        """Block the Python main thread only: sockets stay alive, the main loop stands still."""
        process.send_signal(signal.SIGUSR2)
        return self.wait(lambda: self._works_again(role, process.pid), RECOVERY_TIMEOUT_S)

    def twin(self, role: str, process: psutil.Process) -> float | None:
        """Start a second process with the same name: one of the two is fenced, and nothing is counted twice."""
        name, index = role.rsplit("-", 1)
        with (self.run_dir.logs / "nemesis.log").open("ab") as log:
            twin = subprocess.Popen(role_command(name, int(index), self.run_dir.root), stdout=log, stderr=log)
            time.sleep(TWIN_LIFE_S)
            twin.kill()
            twin.wait()
        before = self.beats(role)
        return self.wait(lambda: self.beats(role) != before, RECOVERY_TIMEOUT_S)

    def damage(self, role: str, process: psutil.Process) -> float | None:
        """Flip one byte of the next published weights, or cut them: the digest must catch it."""
        folder = self.run_dir.segments()

        def newest() -> Path | None:
            segments = [path for path in folder.glob("weights-*") if path.suffix != ".staging"]
            return max(segments, key=lambda path: path.stat().st_mtime, default=None)

        known = newest()
        self.wait(lambda: newest() != known, RECOVERY_TIMEOUT_S)
        path = newest()
        with contextlib.suppress(FileNotFoundError):  # replaced meanwhile
            if path is not None:
                with path.open("r+b") as file:
                    file.seek(self.rng.randrange(path.stat().st_size))
                    byte = file.read(1)
                    file.seek(-1, os.SEEK_CUR)
                    file.write(bytes([byte[0] ^ 1]))
        return None

    # The attack ------------------------------------------------------------------------------------------------------

    def attack(self, num_faults: int, pause_s: float, skip: frozenset[str] = frozenset()) -> None:
        """Do `num_faults` faults, every role its turn in random order, with up to `pause_s` between two."""
        faults: dict[str, Callable[[str, psutil.Process], float | None]] = {
            name: getattr(self, name) for name in FAULTS if name not in skip
        }
        plan = self._plan(list(faults))
        while len(self.results) < num_faults:
            fault, role = next(plan)
            self.wait(lambda role=role: role in self.roles() and self.beats(role) > 0, RECOVERY_TIMEOUT_S)  # type: ignore[misc]
            process = self.roles().get(role)
            if process is None:
                continue
            recovered_s = faults[fault](role, process)
            self.results.append(Result(fault, role, recovered_s))
            print(f"{len(self.results)}/{num_faults} {fault} {role}: " + _seconds(recovered_s), flush=True)
            time.sleep(self.rng.uniform(0, pause_s))

    def _plan(self, faults: list[str]) -> Iterator[tuple[str, str]]:
        """Yield (fault, role) for ever: each role once a round in random order, with a fault that suits it."""
        while True:
            roles = sorted(self.roles())
            if not roles:
                raise NoRunError("no role process is left")
            self.rng.shuffle(roles)
            for role in roles:
                yield self.rng.choice([fault for fault in faults if self._makes_sense(fault, role)]), role

    @staticmethod
    def _makes_sense(fault: str, role: str) -> bool:
        if fault == "twin":
            return role.startswith(("actor", "analyzer", "evaluation"))
        # Nobody but the learner publishes weights.
        return fault != "damage" or role.startswith("learner")


FAULTS: Final = ("kill", "pause", "stop", "hang", "twin", "damage")


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f} s"


def print_results(results: list[Result], console: Console) -> None:
    """Print the recovery times by fault and kind of role."""
    times: defaultdict[tuple[str, str], list[float | None]] = defaultdict(list)
    for result in results:
        times[result.fault, result.role.rsplit("-", 1)[0]].append(result.recovered_s)
    table = Table("fault", "role", "times", "mean recovery", "longest", title="nemesis")
    for (fault, role), values in sorted(times.items()):
        known = [value for value in values if value is not None]
        table.add_row(
            fault,
            role,
            str(len(values)),
            _seconds(mean(known) if known else None),
            _seconds(max(known, default=None)),
        )
    console.print(table)


def main() -> int:
    """Attack a run; exit status 0 means that it ended in order and that its audit passed."""
    parser = argparse.ArgumentParser(prog="seed_async.tools.nemesis", description=__doc__)
    parser.add_argument("--topology", type=Path, required=True)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--faults", type=int, default=20)
    parser.add_argument("--pause-s", type=float, default=1.0, help="longest pause between two faults")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--end-timeout-s", type=float, default=0.0, help="let the run end by itself; 0 interrupts it")
    parser.add_argument("--skip", action="append", default=[], choices=FAULTS)
    arguments = parser.parse_args()
    topology = load_topology(arguments.topology, arguments.set)
    console = Console()
    return attack_run(topology, arguments, console)


def attack_run(topology: Topology, arguments: argparse.Namespace, console: Console) -> int:
    """Launch, attack, wait for the end, audit."""
    run_dir = RunDir(topology.run_dir)
    command = [sys.executable, "-m", "seed_async.cli", "launch", "--topology", str(arguments.topology), "--overwrite"]
    command += [part for item in arguments.set for part in ("--set", item)]
    launcher = subprocess.Popen(command, env=os.environ | {NEMESIS: "1"}, stdout=subprocess.DEVNULL)
    nemesis = Nemesis(run_dir, launcher, random.Random(arguments.seed), topology.supervision.hang_timeout_s)
    try:
        nemesis.wait(lambda: len(nemesis.roles()) > 1, RECOVERY_TIMEOUT_S * 5)
        nemesis.attack(arguments.faults, arguments.pause_s, frozenset(arguments.skip))
        (run_dir.root / "nemesis.json").write_text(json.dumps([vars(result) for result in nemesis.results]) + "\n")
        if not arguments.end_timeout_s:
            launcher.send_signal(signal.SIGINT)
        status = launcher.wait(arguments.end_timeout_s or INTERRUPT_TIMEOUT_S)
        status = 0 if status == 128 + signal.SIGINT and not arguments.end_timeout_s else status
    except NoRunError as error:
        console.print(f"{error}, after {len(nemesis.results)} faults")
        status = 1
    finally:
        launcher.terminate()
        launcher.wait()
    print_results(nemesis.results, console)
    audit = audit_run(run_dir, topology)
    print_audit(audit, console)
    return status or int(not audit.passed)


if __name__ == "__main__":
    sys.exit(main())
