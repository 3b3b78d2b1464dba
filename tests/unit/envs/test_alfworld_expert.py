"""The expert wins every game from observations alone."""

import pytest

from seed_async.envs.alfworld.suite import AlfworldSuite
from seed_async.envs.alfworld.tasks import TaskWords, read_task
from seed_async.envs.alfworld.vocabulary import VocabularyName
from seed_async.envs.contract import Observation


def play(suite: AlfworldSuite, task: str, show_admissible: bool = True) -> tuple[bool, int, int]:
    """Let the expert play; return won, steps and how many of its commands did nothing."""
    environment, expert = suite.make(), suite.expert()
    observation = environment.reset(task)
    expert.reset(observation)
    invalid = 0
    for step in range(1, suite.max_steps + 1):
        seen = observation if show_admissible else Observation(text=observation.text, info=observation.info)
        result = environment.step(expert.act(seen))
        observation = result.observation
        invalid += not observation.info.valid
        if result.terminated or result.truncated:
            return result.terminated, step, invalid
    raise AssertionError("the step limit did not truncate")


@pytest.mark.parametrize("vocabulary", ["move", "put"])
def test_the_expert_wins_every_generated_game_without_an_idle_command(vocabulary: VocabularyName) -> None:
    suite = AlfworldSuite(max_steps=60, vocabulary=vocabulary)
    played = [play(suite, task) for split in ("train", "valid_unseen") for task in suite.tasks(split)[:90]]
    assert all(won for won, _, _ in played)
    assert sum(invalid for _, _, invalid in played) == 0


def test_small_rooms_are_won_within_thirty_steps() -> None:
    suite = AlfworldSuite(max_steps=30, min_receptacles=4, max_receptacles=6, num_objects=5)
    assert all(play(suite, task)[0] for task in suite.tasks("train")[:90])


def test_large_rooms_are_won_too() -> None:
    suite = AlfworldSuite(max_steps=120, min_receptacles=12, max_receptacles=18, num_objects=30)
    assert all(play(suite, task)[0] for task in suite.tasks("train")[:60])


def test_the_expert_needs_no_admissible_list() -> None:
    suite = AlfworldSuite(max_steps=60)
    assert all(play(suite, task, show_admissible=False)[0] for task in suite.tasks("train")[:60])


@pytest.mark.parametrize(
    ("sentence", "parts"),
    [
        ("put some apple on fridge.", TaskWords("apple", "fridge", "", "", 1)),
        ("put a clean mug in shelf", TaskWords("mug", "shelf", "", "clean", 1)),
        ("heat some egg and put it in garbagecan.", TaskWords("egg", "garbagecan", "", "heat", 1)),
        ("cool some pan and put it in stoveburner.", TaskWords("pan", "stoveburner", "", "cool", 1)),
        ("find two cd and put them in safe.", TaskWords("cd", "safe", "", "", 2)),
        ("put two cd in safe.", TaskWords("cd", "safe", "", "", 2)),
        ("examine the book with the desklamp.", TaskWords("book", "", "desklamp", "", 1)),
    ],
)
def test_task_sentences_are_read_back(sentence: str, parts: TaskWords) -> None:
    assert read_task(sentence) == parts


def test_another_wording_is_refused() -> None:
    with pytest.raises(ValueError, match="none of ALFWorld's wordings"):
        read_task("move the clock to the stand")
