"""Measures what a journal costs: bytes a trajectory, and the time to read it again after a buffer's death.

    python -m seed_async.tools.bench_journal --trajectories 1000000

It plays trajectories through the buffer's own state (leases, analyses, batches of 16 groups of 8), with its journal on
disk. `recover` is what a buffer that starts again does before it answers, `audit` what `seed-async audit` does.
"""

import argparse
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import psutil
from rich.console import Console
from rich.table import Table

from seed_async.journal import Journal, read_journal
from seed_async.learner.buffer import GroupBuffer
from seed_async.learner.recovery import recover
from seed_async.messages import Skill, SkillResult, Trajectory, Turn
from seed_async.tools.audit import replay
from seed_async.tools.bench_load import VOCABULARY, make_trajectory
from seed_async.topology import Topology

INCARNATION: Final = "0123456789ab"
NUM_TASKS: Final = 2000
GROUPS: Final = 16
GROUP_SIZE: Final = 8


class Figures(NamedTuple):
    """Sizes in bytes a trajectory; wall and CPU seconds."""

    trajectories: int
    buffer_bytes: float
    learner_bytes: float
    recover_s: float
    recover_cpu_s: float
    audit_s: float
    audit_cpu_s: float


def make_topology() -> Topology:
    """Return a run of the paper's batch, 16 groups of 8."""
    return Topology.model_validate(
        {"model": {"path": "model"}, "rollout": {"groups_per_update": GROUPS, "group_size": GROUP_SIZE}}
    )


def play(topology: Topology, trajectories: int, note: Journal, trained: Journal) -> int:
    """Write the journals of buffer and learner; returns how many trajectories there are: whole batches."""
    buffer = GroupBuffer(topology, VOCABULARY, note=note.note)
    buffer.hello("actor-0", INCARNATION, NUM_TASKS, "bench")
    skill = Skill(episode_summary="won", episode_skill="look first", version=0)
    done = version = 0
    while done < trajectories:
        buffer.advance(version)
        for trajectory in _batch(buffer, version):
            buffer.submit(trajectory, 0.0)
        for job in buffer.claim_analyses(GROUPS * GROUP_SIZE, 0.0):
            buffer.add_skill(
                SkillResult(
                    analyzer="analyzer-0", trajectory_id=job.trajectory_id, skill=skill, output="", version=version
                )
            )
        for sample in buffer.take_batch(version):
            done += 1
            trained.note("trained", trajectory=sample.trajectory.trajectory_id, version=version, num_tokens=2048)
        version += 1
    return done


def _batch(buffer: GroupBuffer, version: int) -> Iterator[Trajectory]:
    nothing = np.zeros(1, dtype=np.int32)
    turn = Turn(
        observation="",
        response="",
        action="",
        parsed=True,
        valid=True,
        opening="Task: find the mug.",
        prompt_ids=nothing,
        response_ids=nothing,
        behaviour_logprob=np.zeros(1, dtype=np.float32),
        versions=np.array([version], dtype=np.int32),
    )
    for lease in buffer.grant("actor-0", INCARNATION, GROUPS * GROUP_SIZE, 0.0):
        yield make_trajectory(lease, INCARNATION, (turn,))


def measure(trajectories: int, folder: Path) -> Figures:
    """Write journals of at least `trajectories` below `folder` and read them again."""
    topology, path, learner_path = make_topology(), folder / "journal.jsonl", folder / "trained.jsonl"
    journal, trained = Journal(path), Journal(learner_path)
    done = play(topology, trajectories, journal, trained)
    journal.close()
    trained.close()
    recover_s, recover_cpu_s = _timed(lambda: recover(read_journal(path)))
    audit_s, audit_cpu_s = _timed(lambda: replay(read_journal(path), topology))
    buffer_bytes, learner_bytes = (file.stat().st_size / done for file in (path, learner_path))
    return Figures(done, buffer_bytes, learner_bytes, recover_s, recover_cpu_s, audit_s, audit_cpu_s)


def _timed(work: Callable[[], object]) -> tuple[float, float]:
    """Return the wall and CPU seconds of `work`."""
    started_s, before = time.perf_counter(), psutil.Process().cpu_times()
    work()
    after = psutil.Process().cpu_times()
    return time.perf_counter() - started_s, after.user + after.system - before.user - before.system


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(prog="seed_async.tools.bench_journal", description=__doc__)
    parser.add_argument("--trajectories", type=int, default=100_000)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        figures = measure(arguments.trajectories, Path(folder))
    table = Table("journal of", "buffer", "learner", "recover", "of it CPU", "audit", "of it CPU", title="a journal")
    table.add_row(
        f"{figures.trajectories:,}",
        f"{figures.buffer_bytes:.0f} B each",
        f"{figures.learner_bytes:.0f} B each",
        f"{figures.recover_s:.1f} s",
        f"{figures.recover_cpu_s:.1f} s",
        f"{figures.audit_s:.1f} s",
        f"{figures.audit_cpu_s:.1f} s",
    )
    Console().print(table)


if __name__ == "__main__":
    main()
