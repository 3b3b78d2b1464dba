"""The load of `bench_transport`: trajectories of 2,048 sampled tokens from 256 actors, and how it is measured."""

import time
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import psutil

from seed_async.messages import ActorHello, Lease, Trajectory, Turn
from seed_async.topology import Topology

NUM_ACTORS: Final = 256
NUM_TURNS: Final = 8
RESPONSE_TOKENS: Final = 256
"""A turn's; 2,048 sampled tokens a trajectory."""
PROMPT_TOKENS: Final = 64
CHARACTERS_A_TOKEN: Final = 4
VOCABULARY: Final = 32_000
LEASES_AT_ONCE: Final = 16
GROUP_SIZE: Final = 8
CALL_TIMEOUT_S: Final = 60.0


ANY_LEASE: Final = Lease(lease_id="l00000", group_id="g0000", member=0, task_index=0, seed=0)


class Figures(NamedTuple):
    """What one stack did; CPU in microseconds a trajectory, of the process with the buffer and of the load."""

    name: str
    per_second: float
    buffer_cpu_us: float
    load_cpu_us: float


def make_topology(folder: Path, trajectories: int, port: int, *, curve: bool, batches: bool) -> Topology:
    """Return a run whose gate lets `trajectories` in at once, or 64 groups an update where a learner takes batches."""
    groups = 64 if batches else -(-trajectories // GROUP_SIZE)
    return Topology.model_validate(
        {
            "run": {"name": "bench", "dir": folder},
            "method": "grpo",
            "model": {"path": folder / "model"},
            "rollout": {"groups_per_update": groups, "group_size": GROUP_SIZE},
            "staleness": {"max": 8 if batches else 0},
            "roles": {"evaluation": None, "actors": {"replicas": NUM_ACTORS}},
            "buffer": {"lease_timeout_s": 600, "max_bytes": 4 << 30},
            "transport": {"kind": "tcp", "base_port": port, "curve": curve},
        }
    )


def make_turns() -> tuple[Turn, ...]:
    """Return the turns of a trajectory, as a policy server samples them at version 0."""
    rng = np.random.default_rng(0)
    return tuple(
        Turn(
            observation="o" * (PROMPT_TOKENS * CHARACTERS_A_TOKEN),
            response="r" * (RESPONSE_TOKENS * CHARACTERS_A_TOKEN),
            action="go to shelf 1",
            parsed=True,
            valid=True,
            opening="" if number else "Task: find the mug.",
            prompt_ids=rng.integers(0, VOCABULARY, PROMPT_TOKENS, dtype=np.int32),
            response_ids=rng.integers(0, VOCABULARY, RESPONSE_TOKENS, dtype=np.int32),
            behaviour_logprob=-rng.random(RESPONSE_TOKENS, dtype=np.float32),
            versions=np.zeros(RESPONSE_TOKENS, dtype=np.int32),
        )
        for number in range(NUM_TURNS)
    )


def lease_fields(lease: Lease, actor: str) -> dict[str, str | int]:
    """Return the fields in which the trajectories of this load differ."""
    return {
        "trajectory_id": f"{lease.lease_id}-{actor}",
        "lease_id": lease.lease_id,
        "group_id": lease.group_id,
        "member": lease.member,
        "actor": actor,
        "incarnation": actor,
        "task_id": f"train/{lease.task_index}",
    }


def make_trajectory(lease: Lease, actor: str, turns: tuple[Turn, ...]) -> Trajectory:
    """Return what an actor sends for a lease."""
    return Trajectory.of(
        turns,
        **lease_fields(lease, actor),
        task="find the mug.",
        task_type="find",
        vocabulary="move",
        task_line="Task: find the mug.",
        status="won",
        episode_return=1.0,
        started_at_s=1.0,
        ended_at_s=2.0,
    )


def hello(actor: str) -> ActorHello:
    """Return an actor's first message."""
    return ActorHello(actor=actor, incarnation=actor, num_tasks=1000, tasks_digest="bench")


class Measure:
    """Counts accepted trajectories and the CPU time of both processes, after a warm-up of a tenth."""

    def __init__(self, name: str, trajectories: int, buffer_pid: int) -> None:
        """The clock starts when a tenth is accepted."""
        self._name, self._total, self._warm = name, trajectories, trajectories // 10
        self._processes = psutil.Process(buffer_pid), psutil.Process()
        self._started: tuple[int, float, list[float]] | None = None
        self.accepted = 0

    def add(self, accepted: int) -> bool:
        """Count; True when all are accepted."""
        self.accepted += accepted
        if self._started is None and self.accepted >= self._warm:
            self._started = self.accepted, time.perf_counter(), self._cpu_s()
        return self.accepted >= self._total

    def figures(self) -> Figures:
        """Return the result."""
        assert self._started is not None
        before, started_s, cpu_s = self._started
        counted, seconds = self.accepted - before, time.perf_counter() - started_s
        spent = [1e6 * (now_s - then_s) / counted for now_s, then_s in zip(self._cpu_s(), cpu_s, strict=True)]
        return Figures(self._name, counted / seconds, *spent)

    def _cpu_s(self) -> list[float]:
        return [sum(process.cpu_times()[:2]) for process in self._processes]
