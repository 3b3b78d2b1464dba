"""Breaks a running system on purpose, bounded and seeded, and checks that every promise still holds.

    python -m seed_async.tools.nemesis --topology topo.yaml --faults 20 --seed 0

It launches the topology, does the planned faults (kill, pause, hang, a twin with the same name, damaged weights, a
publication that is cut), up to `--at-once` of them at the same time on different roles, measures how long each role
takes to work again, ends the run, and audits its journals. Everything is in `nemesis.json` of the run directory.
"""

import argparse
import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import mean
from typing import Final

from rich.console import Console
from rich.table import Table

from seed_async.launcher import role_processes
from seed_async.role import NEMESIS, ROLE_MODULES
from seed_async.rundir import RunDir
from seed_async.tools.audit import Audit, audit_run, print_audit
from seed_async.tools.losses import Losses, count_losses, print_losses
from seed_async.tools.nemesis_faults import FAULTS, POLL_S, AttackedRun, Blow, NoRunError, strike
from seed_async.topology import Topology
from seed_async.topology_file import load_topology

START_TIMEOUT_S: Final = 600.0
STANDSTILL_S: Final = 600.0
"""Without an update for this long the run has not survived, whatever its processes say."""
INTERRUPT_TIMEOUT_S: Final = 300.0
LOOKAHEAD: Final = 30
"""How far in the plan a blow is looked for whose roles are free: far enough that none waits for a slow role, near
enough that the slow ones are not all left for the end."""
RESTARTABLE: Final = ("actor", "analyzer", "evaluation")
HOLDING: Final = ("damage", "cut_during")
"""Faults of the learner for which a policy server must not have read the weights yet."""
RECEIVERS: Final = ("policy", "analyzer")


@dataclass(frozen=True)
class Result:
    """What one fault did: `recovered_s` until the role worked again, None when it never did."""

    time_s: float
    fault: str
    role: str
    recovered_s: float | None


def kind_of(role: str) -> str:
    """The kind of a role process: `actor` of `actor-1`."""
    return role.rsplit("-", 1)[0]


def suits(fault: str, role: str, topology: Topology) -> bool:
    """Whether a fault can be done to a role at all."""
    kind = kind_of(role)
    if fault == "twin":
        return kind in RESTARTABLE
    if fault == "damage":  # nobody but the learner publishes, and only files can be reached from outside
        return kind == "learner" and topology.weights.transport == "shm"
    if fault == "cut_during":
        return kind == "learner" or (kind in RECEIVERS and not (kind == "analyzer" and topology.pins_analyzer))
    return kind == "learner" or not fault.startswith("cut")


def make_plan(
    topology: Topology, num_faults: int, weights: Mapping[str, int], skip: Collection[str], rng: random.Random
) -> list[Blow]:
    """Draw the faults: in each round every process comes as often as its kind weighs (1), in random order."""
    roles = [f"{role}-{index}" for role, index, _ in role_processes(topology)]
    servers = [role for role in roles if kind_of(role) == "policy"]
    plan: list[Blow] = []
    while len(plan) < num_faults:
        one_round = [role for role in roles for _ in range(weights.get(kind_of(role), 1))]
        rng.shuffle(one_round)
        for role in one_round:
            fault = rng.choice([fault for fault in FAULTS if fault not in skip and suits(fault, role, topology)])
            held = fault in HOLDING and kind_of(role) == "learner"
            holds = rng.choice(servers) if held else ""
            plan.append(Blow(fault, role, rng.random(), holds))
    return plan[:num_faults]


def take_next(plan: list[Blow], busy: Collection[str]) -> Blow | None:
    """Take the first blow of the plan, within sight, that meets free roles only."""
    for place, blow in enumerate(plan[:LOOKAHEAD]):
        if blow.roles.isdisjoint(busy):
            return plan.pop(place)
    return None


@dataclass
class _Progress:
    """Counts the faults since the learner's last update, and the seconds."""

    run: AttackedRun
    num_faults: int = 0
    _updates_bytes: int = 0
    _moved_at_s: float = field(default_factory=time.monotonic)

    def faults_since(self) -> int:
        """Return how many faults began since the last update. Raises NoRunError when it is too long ago."""
        if self.run.updates_bytes() != self._updates_bytes:
            self._updates_bytes, self._moved_at_s, self.num_faults = self.run.updates_bytes(), time.monotonic(), 0
        if time.monotonic() > self._moved_at_s + STANDSTILL_S:
            raise NoRunError(f"the run stands still: no update for {STANDSTILL_S:.0f} s")
        return self.num_faults


@dataclass
class Nemesis:
    """Carries out a plan, `at_once` blows at a time; a role rests up to `pause_s` after each.

    At most `per_update` blows fall between two updates of the learner: the run has to go on in spite of them.
    """

    run: AttackedRun
    plan: list[Blow]
    at_once: int
    per_update: int
    pause_s: float
    results: list[Result] = field(default_factory=list)

    async def attack(self) -> None:
        """Do all that is planned. Raises NoRunError when the run ends before, or stands still."""
        total, progress = len(self.plan), _Progress(self.run)
        tasks: dict[asyncio.Task[None], frozenset[str]] = {}
        try:
            while self.plan or tasks:
                while len(tasks) < self.at_once and progress.faults_since() < self.per_update:
                    blow = take_next(self.plan, frozenset().union(*tasks.values()))
                    if blow is None:
                        break
                    tasks[asyncio.create_task(self._do(blow, total))] = blow.roles
                    progress.num_faults += 1
                await asyncio.sleep(POLL_S)
                for task in [task for task in tasks if task.done()]:
                    del tasks[task]
                    task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _do(self, blow: Blow, total: int) -> None:
        at_s = time.time()
        recovered_s = await strike(self.run, blow)
        self.results.append(Result(at_s, blow.fault, blow.role, recovered_s))
        print(f"{len(self.results)}/{total} {blow.fault} {blow.role}: {_seconds(recovered_s)}", flush=True)
        await asyncio.sleep(blow.draw * self.pause_s)


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f} s"


def print_results(results: Sequence[Result], console: Console) -> None:
    """Print the recovery times by fault and kind of role."""
    times: defaultdict[tuple[str, str], list[float | None]] = defaultdict(list)
    for result in results:
        times[kind_of(result.role), result.fault].append(result.recovered_s)
    table = Table("role", "fault", "times", "mean recovery", "longest", "never", title="nemesis")
    for (role, fault), values in sorted(times.items()):
        known = [value for value in values if value is not None]
        table.add_row(
            role,
            fault,
            str(len(values)),
            _seconds(mean(known) if known else None),
            _seconds(max(known, default=None)),
            str(len(values) - len(known)),
        )
    console.print(table)


def write_record(path: Path, nemesis: Nemesis, seconds: float, losses: Mapping[str, Losses], audit: Audit) -> None:
    """Write everything that is known of the attack as JSON."""
    record = {
        "seconds": seconds,
        "faults": [asdict(result) for result in nemesis.results],
        "losses": {role: asdict(lost) for role, lost in losses.items()},
        "audit": {
            "passed": audit.passed,
            "counts": audit.counts,
            "dropped": audit.dropped,
            "ages": audit.ages,
            "faults": audit.faults,
        },
    }
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def attack_run(topology: Topology, arguments: argparse.Namespace, console: Console) -> int:
    """Launch, attack, wait for the end, audit."""
    run_dir = RunDir(topology.run_dir)
    plan = make_plan(
        topology, arguments.faults, dict(arguments.weight), frozenset(arguments.skip), random.Random(arguments.seed)
    )
    command = [sys.executable, "-m", "seed_async.cli", "launch", "--topology", str(arguments.topology), "--overwrite"]
    command += [part for item in arguments.set for part in ("--set", item)]
    launcher = subprocess.Popen(command, env=os.environ | {NEMESIS: "1"}, stdout=subprocess.DEVNULL)
    run = AttackedRun(run_dir, launcher, topology.supervision.hang_timeout_s)
    nemesis = Nemesis(run, plan, arguments.at_once, arguments.per_update, arguments.pause_s)
    started_s = time.monotonic()

    async def attack() -> None:
        nonlocal started_s
        await run.wait(lambda: run.updates_bytes() > 0, START_TIMEOUT_S)  # Stage 1 comes first
        started_s = time.monotonic()
        await nemesis.attack()

    try:
        asyncio.run(attack())
        if not arguments.end_timeout_s:
            launcher.send_signal(signal.SIGINT)
        status = launcher.wait(arguments.end_timeout_s or INTERRUPT_TIMEOUT_S)
        status = 0 if status == 128 + signal.SIGINT and not arguments.end_timeout_s else status
    except (NoRunError, subprocess.TimeoutExpired) as error:
        console.print(f"{error}, after {len(nemesis.results)} faults")
        status = 1
    finally:
        launcher.terminate()
        launcher.wait()
    seconds = time.monotonic() - started_s
    print_results(nemesis.results, console)
    losses, audit = count_losses(run_dir), audit_run(run_dir, topology)
    print_losses(losses, console)
    print_audit(audit, console)
    write_record(run_dir.root / "nemesis.json", nemesis, seconds, losses, audit)
    recovered = all(result.recovered_s is not None for result in nemesis.results)
    return status or int(not (audit.passed and recovered))


def _weight(text: str) -> tuple[str, int]:
    role, _, number = text.partition("=")
    if role not in ROLE_MODULES or not number.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not ROLE=N with a role of {', '.join(sorted(ROLE_MODULES))}")
    return role, int(number)


def main() -> int:
    """Attack a run; exit status 0 means that every role recovered, it ended in order and its audit passed."""
    parser = argparse.ArgumentParser(prog="seed_async.tools.nemesis", description=__doc__)
    parser.add_argument("--topology", type=Path, required=True)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--faults", type=int, default=20)
    parser.add_argument("--at-once", type=int, default=1, help="faults at the same time, on different roles")
    parser.add_argument("--per-update", type=int, default=10, help="most faults between two updates of the learner")
    parser.add_argument("--pause-s", type=float, default=1.0, help="longest rest of a role after a fault")
    parser.add_argument(
        "--weight", action="append", default=[], type=_weight, metavar="ROLE=N", help="faults of a process in a round"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--end-timeout-s", type=float, default=0.0, help="let the run end by itself; 0 interrupts it")
    parser.add_argument("--skip", action="append", default=[], choices=tuple(FAULTS))
    arguments = parser.parse_args()
    topology = load_topology(arguments.topology, arguments.set)
    return attack_run(topology, arguments, Console())


if __name__ == "__main__":
    sys.exit(main())
