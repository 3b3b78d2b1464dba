"""Stage 1 data: what is written, who is trained on, and step limits."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from seed_async.actors.conversations import open_conversation
from seed_async.actors.demonstrations import act_rows, make_demonstrations, play_expert, play_solution
from seed_async.envs.registry import open_suite
from seed_async.messages import Turn
from seed_async.prompts import action_response
from seed_async.skills import parse_analysis
from seed_async.topology_file import parse_topology
from tests.fakes.chat import tiny_chat
from tests.fakes.episodes import make_turn

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


WINDOWED = ("rollout.layout=windowed", "rollout.history_window=2", "rollout.max_context_tokens=1000")


@pytest.mark.parametrize("style", ["compact", "full"])
def test_windowed_demonstrations_are_the_prompts_that_are_acted(style: str) -> None:
    topology = parse_topology(TOPOLOGY.format(max_steps=30), "test", (*WINDOWED, f"rollout.prompt_style={style}"))
    suite = open_suite(topology.env)
    played = play_expert(suite, suite.make(), suite.tasks("train")[0], 0.3, np.random.default_rng(1))
    rows = list(act_rows(topology.rollout, "task", played, None))
    assert len(rows) == sum(played.by_expert) < len(played.commands)
    info = played.observations[0].info
    conversation = open_conversation(
        tiny_chat(), topology.rollout.model_copy(update={"max_context_tokens": 9999}), info.task
    )
    turns: list[Turn] = []
    acted = []
    for observation, command in zip(played.observations, played.commands, strict=True):
        prompt = conversation.prompt(turns, observation.text, observation.admissible)
        assert prompt is not None
        acted.append((prompt.opening, action_response(command)))
        turns.append(make_turn([0], observation=observation.text, action=command))
    expected = [pair for pair, by_expert in zip(acted, played.by_expert, strict=True) if by_expert]
    assert [tuple(message["content"] for message in row["messages"]) for row in rows] == expected
    assert all(row["messages"][1]["train"] for row in rows)


def test_every_windowed_row_of_a_skilled_demonstration_carries_the_skill(tmp_path: Path) -> None:
    make_demonstrations(parse_topology(TOPOLOGY.format(max_steps=10), "test", WINDOWED), tmp_path)
    acts = rows(tmp_path / "demonstrations.jsonl")
    assert len(acts) > 60 and {bool(row["skill"]) for row in acts} == {True, False}
    for row in acts:
        (user, answer) = row["messages"]
        assert ("\nSkill: " in user["content"]) == bool(row["skill"])
        assert user["content"].count("> ") <= 2 and answer["role"] == "assistant"


def test_a_small_context_shortens_windowed_demonstrations(tmp_path: Path) -> None:
    small = (*WINDOWED[:2], "rollout.max_context_tokens=180")
    make_demonstrations(parse_topology(TOPOLOGY.format(max_steps=10), "test", small), tmp_path)
    acts = rows(tmp_path / "demonstrations.jsonl")
    assert acts and all(len(row["messages"][0]["content"]) <= (180 - 16) * 3 for row in acts)


def test_analyses_for_opid_name_what_the_expert_would_have_done_at_a_mistake(tmp_path: Path) -> None:
    make_demonstrations(parse_topology(TOPOLOGY.format(max_steps=30), "test", ("method=opid",)), tmp_path)
    analyses = rows(tmp_path / "analyses.jsonl")
    found = 0
    for row in analyses:
        prompt, answer = (message["content"] for message in row["messages"])
        assert "step_skills" in prompt.split("\n")[0]
        parsed = parse_analysis(answer, num_steps=30, max_step_skills=5)
        assert parsed is not None and len(parsed.step_skills) == len(json.loads(answer)["step_skills"])
        assert all(step.skill.endswith(" here") for step in parsed.step_skills)
        found += len(parsed.step_skills)
    assert found > len(analyses)
