"""A made-up run directory with everything that the processes of a run leave."""

import json
from pathlib import Path

import numpy as np
import pytest

from seed_async.rundir import RunDir
from seed_async.timeline import Timeline
from seed_async.topology import Topology
from seed_async.topology_file import parse_topology

UPDATES = 60
START_S = 1_800_000_000.0


@pytest.fixture
def topology(tmp_path: Path) -> Topology:
    return parse_topology(f"run: {{dir: {tmp_path}, name: made-up}}\nmodel: {{path: /models/tiny}}\n", "t")


@pytest.fixture
def run_dir(topology: Topology) -> RunDir:
    """The run directory, empty."""
    run_dir = RunDir(topology.run_dir)
    run_dir.root.mkdir()
    return run_dir


@pytest.fixture
def full_run(run_dir: RunDir) -> RunDir:
    """The run directory of 60 updates at about 4 s each."""
    write_metrics(run_dir)
    write_evaluations(run_dir)
    counts = {
        "accepted": 2016,
        "trained": 1920,
        "dropped": {"stale": 8, "stale_group": 24},
        "buffered": 64,
        "leases": {"granted": 2050, "returned": 16, "failed": 2, "running": 16},
        "skills": {"parsed": 1900, "unparsed": 80, "timeout": 20, "late": 3},
        "ages": {"0": 500, "1": 1420},
        "balance_ok": True,
    }
    run_dir.counts.write_text(json.dumps(counts))
    write_timeline(run_dir)
    return run_dir


def write_metrics(run_dir: RunDir) -> None:
    rng = np.random.default_rng(0)
    with run_dir.metrics.open("w") as file:
        for version in range(1, UPDATES + 1):
            success = 0.3 + 0.4 * (1 - np.exp(-version / 20))
            line = {
                "version": version,
                "time_s": START_S + 30 + 4 * version + rng.random(),
                "success": float(np.clip(success + rng.normal(0, 0.08), 0, 1)),
                "kl": 0.02 * version / UPDATES,
                "entropy": 0.6 - 0.2 * version / UPDATES,
                "gradient_norm": float(rng.gamma(4, 0.2)),
                "sampler_gap_mean": float("nan") if version == 7 else 1e-4 * float(rng.lognormal(0, 0.3)),
                "sampler_gap_max": 5e-3 * float(rng.lognormal(0, 0.5)),
                "gate_mean": 0.5 + 0.05 * np.sin(version / 9),
                "opd_active_ratio": 0.95,
                "parse_rate": min(1.0, 0.93 + 0.05 * rng.random()),
                "response_tokens": float(rng.integers(4000, 6000)),
                "trajectories": 32.0,
                "step_s": 2.2 + 0.3 * rng.random(),
                "wait_s": 1.2 + rng.random(),
            }
            line |= {f"loss_{term}": float(rng.normal(0, 0.05)) for term in ("total", "policy", "kl", "distillation")}
            file.write(json.dumps(line) + "\n")
        file.write('{"version": 61, "cut by a ki')


def write_evaluations(run_dir: RunDir) -> None:
    with run_dir.evaluations.open("w") as file:
        for version, won in ((0, 36), (20, 60), (40, 72), (UPDATES, 84)):
            line = {
                "version": version,
                "games": 120,
                "won": won,
                "success": won / 120,
                "by_task_type": {"pick_and_place_simple": [won, 120]},
                "final": version == UPDATES,
            }
            file.write(json.dumps(line) + "\n")


def write_timeline(run_dir: RunDir) -> None:
    rng = np.random.default_rng(1)

    def spans(role: str, instance: int, kind: str, pairs: list[tuple[float, float]]) -> None:
        timeline = Timeline(run_dir.timeline / f"{role}-{instance}.jsonl", role, str(instance))
        for start_s, end_s in pairs:
            timeline.record(kind, START_S + float(start_s), START_S + float(end_s), 0)
        timeline.close()

    steps = [(30 + 4 * number, 32.4 + 4 * number) for number in range(UPDATES)]
    spans("learner", 0, "train", steps)
    spans("learner", 0, "publish", [(end, end + 0.3) for _, end in steps])
    spans("learner", 0, "wait", [(end + 0.3, end + 1.6) for _, end in steps])
    for actor in range(2):
        starts = np.sort(rng.uniform(29, 265, 400))
        spans("actor", actor, "act", [(start, start + rng.uniform(0.5, 2)) for start in starts])
    starts = np.sort(rng.uniform(32, 268, 250))
    spans("analyzer", 0, "analyse", [(start, start + rng.uniform(0.3, 1.2)) for start in starts])
    spans("policy", 0, "load_weights", [(end + 0.05, end + 0.2) for _, end in steps])
    spans("evaluation", 0, "evaluate", [(5, 28), (112, 130), (192, 210), (272, 296)])
