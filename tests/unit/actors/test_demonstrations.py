"""Stage 1 data: what is written, who is trained on, and step limits."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from seed_async.actors.demonstrations import make_demonstrations, play_expert, play_solution
from seed_async.envs.registry import open_suite
from seed_async.skills import parse_analysis
from seed_async.topology_file import parse_topology

TOPOLOGY = """
env: {{max_steps: {max_steps}, generated: {{train: 40}}}}
model: {{init: {{}}}}
stage1: {{demonstrations: 30, analysis_rows: 9, skill_share: 0.5, mistake_rate: 0.3}}
rollout: {{max_context_tokens: 1024, max_response_tokens: 16, prompt_style: compact}}
analysis: {{max_context_tokens: 2048, max_output_tokens: 100, prompt_style: compact}}
"""


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("max_steps", [1, 3, 30])
def test_stage_1_data_is_made_at_any_step_limit(tmp_path: Path, max_steps: int) -> None:
    make_demonstrations(parse_topology(TOPOLOGY.format(max_steps=max_steps), "test"), tmp_path)
    acts, analyses = rows(tmp_path / "demonstrations.jsonl"), rows(tmp_path / "analyses.jsonl")
    assert (len(acts), len(analyses)) == (30, 9)
    assert all(len(row["messages"]) <= 2 * max_steps for row in acts)
    assert {bool(row["skill"]) for row in acts} == {True, False}
    for row in acts:
        assert ("\nSkill: " in row["messages"][0]["content"]) == bool(row["skill"])
    for row in analyses:
        assert parse_analysis(row["messages"][1]["content"]) is not None


def test_a_random_command_carries_no_loss_and_every_other_response_does() -> None:
    topology = parse_topology(TOPOLOGY.format(max_steps=30), "test")
    suite = open_suite(topology.env)
    played = play_expert(suite, suite.make(), suite.tasks("train")[0], 0.5, np.random.default_rng(0))
    assert 0 < sum(played.by_expert) < len(played.by_expert)


def test_a_solution_wins_and_stops_at_the_step_limit() -> None:
    for max_steps, won in ((30, True), (1, False)):
        suite = open_suite(parse_topology(TOPOLOGY.format(max_steps=max_steps), "test").env)
        played = play_solution(suite, suite.make(), suite.tasks("train")[0])
        assert played.won is won
        assert len(played.commands) <= max_steps


def test_the_same_seed_writes_the_same_bytes(tmp_path: Path) -> None:
    topology = parse_topology(TOPOLOGY.format(max_steps=10), "test")
    for name in ("a", "b"):
        make_demonstrations(topology, tmp_path / name)
    for file in ("demonstrations.jsonl", "analyses.jsonl"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()
