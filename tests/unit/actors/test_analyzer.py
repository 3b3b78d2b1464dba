"""What the analyzer is asked: the whole trajectory, or its ends, within its room."""

import pytest
from msgspec.structs import replace

from seed_async.actors.analyzer import analysis_text, first_version, outcome_of, read_skill
from seed_async.messages import Skill, StepSkill, Trajectory, TrajectoryStatus
from seed_async.topology import Analysis
from tests.fakes.chat import tiny_chat
from tests.fakes.episodes import make_lease, make_trajectory, make_turn, small_topology


def episode(num_turns: int, status: TrajectoryStatus = "won") -> Trajectory:
    """Numbered turns; every third is invalid."""
    turns = [
        replace(make_turn([0], valid=index % 3 != 2), observation=f"seen {index}.", response=f" said {index}. ")
        for index in range(num_turns)
    ]
    return make_trajectory(make_lease(), "i", turns, status=status)


@pytest.mark.parametrize(("status", "outcome"), [("won", "success"), ("lost", "failure"), ("truncated", "failure")])
def test_the_outcome_is_told_as_success_or_failure(status: TrajectoryStatus, outcome: str) -> None:
    """An episode that ran out of steps has failed."""
    assert outcome_of(episode(1, status)) == outcome
    text = analysis_text(episode(1, status), Analysis(), tiny_chat())
    assert text is not None and f"Outcome: {outcome}" in text


def test_every_step_is_shown_with_response_and_validity() -> None:
    """In the full style."""
    text = analysis_text(episode(4), Analysis(), tiny_chat())
    assert text is not None
    for index in range(4):
        assert f"[{index}] Observation: seen {index}.\n[{index}] Response: said {index}.\n" in text
        assert f"[{index}] Valid: {index % 3 != 2}" in text
    assert "Task: find the mug." in text


@pytest.mark.parametrize("room", [150, 200, 300, 400])
def test_a_long_trajectory_is_shortened_to_the_room_beside_the_answer(room: int) -> None:
    """First and last step stay."""
    settings = Analysis(prompt_style="compact", max_context_tokens=room + 32, max_output_tokens=32)
    text = analysis_text(episode(40), settings, tiny_chat())
    assert text is not None
    assert tiny_chat().first_prompt(text).size <= room
    assert "seen 0." in text and "seen 39." in text and "steps left out" in text


def test_without_room_for_both_ends_there_is_no_analysis() -> None:
    """The trajectory then trains with the RL terms only."""
    settings = Analysis(prompt_style="compact", max_context_tokens=40, max_output_tokens=20)
    assert analysis_text(episode(3), settings, tiny_chat()) is None


def test_step_skills_are_asked_for_and_read_with_their_steps() -> None:
    """Of opid; a step that was not played is left out."""
    text = analysis_text(episode(3), Analysis(), tiny_chat(), max_step_skills=5)
    assert text is not None and '"step_skills": at most 5 entries' in text
    output = (
        '{"episode_summary": "won", "episode_skill": "look",'
        ' "step_skills": [{"step": 2, "skill": "stop"}, {"step": 3, "skill": "go on"}]}'
    )
    assert read_skill(output, 3, version=4, max_step_skills=5) == Skill(
        episode_summary="won", episode_skill="look", version=4, step_skills=(StepSkill(step=2, skill="stop"),)
    )
    plain = read_skill(output, 3, version=4)
    assert plain is not None and plain.step_skills == ()
    assert read_skill("no json", 3, version=4, max_step_skills=5) is None


def test_a_static_analyzer_starts_at_version_0_and_every_other_waits_for_weights() -> None:
    """The initial checkpoint is version 0, also for an analyzer that starts again later."""
    assert first_version(small_topology(method="seed_static")) == 0
    assert first_version(small_topology(method="seed")) == -1
