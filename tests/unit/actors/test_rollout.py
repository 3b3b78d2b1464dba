"""Episodes: ids kept as sampled, a context that only grows, and every way in which an episode ends."""

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from seed_async.actors.rollout import Episode, EpisodePlayer, GenerationFailedError
from seed_async.envs.contract import TaskNotFoundError
from seed_async.topology import Rollout
from tests.fakes.chat import tiny_chat
from tests.fakes.play import Corridor, ScriptedGenerator

GO = "<action>go</action>"


def play(
    script: Callable[[int], str],
    corridor: Corridor | None = None,
    *,
    end: bool = True,
    task: str = "corridor",
    seed: int = 7,
    on_step: Callable[[], None] = lambda: None,
    **rollout: Any,
) -> tuple[Episode, ScriptedGenerator]:
    """Play one episode in the compact style."""
    generator = ScriptedGenerator(tiny_chat(), script, end=end)
    settings = Rollout(prompt_style="compact", **({"max_context_tokens": 400, "max_response_tokens": 40} | rollout))
    player = EpisodePlayer(tiny_chat(), generator, settings, temperature=1.0, kind="act", on_step=on_step)
    return asyncio.run(player.play(corridor or Corridor(), task, seed)), generator


def test_a_won_episode_keeps_what_was_said_and_seen() -> None:
    """One turn an environment step."""
    steps: list[int] = []
    corridor = Corridor()
    episode, _ = play(lambda _: GO, corridor, on_step=lambda: steps.append(1))
    assert (episode.status, episode.episode_return, episode.task_type) == ("won", 1.0, "corridor")
    assert corridor.commands == ["go", "go"] and len(steps) == 2
    assert [turn.observation for turn in episode.turns] == ["You are at door 0.", "You are at door 1."]
    assert episode.turns[0].opening.split("\n") == [episode.task_line, "You are at door 0."]
    assert not any(turn.opening for turn in episode.turns[1:])
    assert all(turn.parsed and turn.valid and turn.response == GO for turn in episode.turns)


@pytest.mark.parametrize("end", [True, False])
def test_each_context_is_the_one_before_with_the_sampled_ids_and_the_next_prompt(end: bool) -> None:
    """Nothing is decoded and encoded again, whether or not the response sampled its end."""
    episode, generator = play(lambda number: GO if number % 2 else f"héllo 🙂 {number}", end=end)
    context = np.zeros(0, dtype=np.int32)
    for turn, prompt in zip(episode.turns, generator.prompts, strict=True):
        context = np.concatenate([context, turn.prompt_ids])
        np.testing.assert_array_equal(context, prompt)
        context = np.concatenate([context, turn.response_ids])
    for array in (episode.turns[0].prompt_ids, episode.turns[1].response_ids, context):
        assert array.dtype == np.int32
    ends = np.flatnonzero(context == tiny_chat().eos_ids[0])
    assert ends.size == 2 * len(episode.turns) - (not end)  # one a message, never two in a row
    assert not (np.diff(ends) == 1).any()


def test_log_probs_and_versions_are_those_of_the_reply() -> None:
    """A trajectory may span versions; each token keeps its own."""
    episode, _ = play(lambda _: GO)
    for number, turn in enumerate(episode.turns):
        assert (turn.versions == number).all() and turn.versions.size == turn.response_ids.size
        assert (turn.behaviour_logprob == np.float32(-0.5)).all()


def test_an_unparsable_response_plays_the_empty_command_and_is_marked() -> None:
    """An action that the game does not know is parsed but not valid."""
    answers = ["I just walk", "<action>dance</action>", "<action>go</action><action>go</action>", GO, GO]
    corridor = Corridor()
    episode, _ = play(lambda number: answers[number], corridor)
    assert corridor.commands == ["", "dance", "", "go", "go"]
    assert [turn.parsed for turn in episode.turns] == [False, True, False, True, True]
    assert [turn.valid for turn in episode.turns] == [False, False, False, True, True]
    assert [turn.action for turn in episode.turns] == corridor.commands


def test_an_episode_is_lost_or_cut_off_as_the_game_says() -> None:
    """The step limit of the game is no loss."""
    assert play(lambda _: "<action>fall</action>")[0].status == "lost"
    episode, _ = play(lambda _: "hm", Corridor(max_steps=3))
    assert (episode.status, len(episode.turns), episode.episode_return) == ("truncated", 3, 0.0)


@pytest.mark.parametrize("limit", range(60, 160, 7))
def test_an_episode_ends_before_its_context_would_overflow(limit: int) -> None:
    """Prompt and response never exceed the limit, and the last turn is whole."""
    episode, generator = play(lambda _: "hm", Corridor(), max_context_tokens=limit, max_response_tokens=10)
    assert episode.status == "truncated"
    for prompt, sampling in zip(generator.prompts, generator.samplings, strict=True):
        assert prompt.size < limit and prompt.size + sampling.max_new_tokens <= limit
    total = sum(turn.prompt_ids.size + turn.response_ids.size for turn in episode.turns)
    assert total <= limit
    assert len(generator.prompts) == len(episode.turns)


def test_a_first_prompt_over_the_context_fails_the_episode() -> None:
    """There would be nothing to train."""
    with pytest.raises(GenerationFailedError, match=r"corridor has \d+ tokens"):
        play(lambda _: GO, max_context_tokens=12, max_response_tokens=2)


def test_an_unknown_task_is_reported_by_the_environment() -> None:
    """The actor turns it into a failed lease."""
    with pytest.raises(TaskNotFoundError):
        play(lambda _: GO, task="missing")


def test_each_turn_draws_from_its_own_stream_and_the_seed_decides_it() -> None:
    """Equal seeds, equal streams; temperature and end ids are passed on."""
    seeds = [[each.seed for each in play(lambda _: GO, seed=seed)[1].samplings] for seed in (1, 1, 2, 2**62)]
    assert seeds[0] == seeds[1] and not set(seeds[0]) & set(seeds[2])
    assert len(set(seeds[0])) == 2
    assert all(0 <= seed < 2**63 for seed in seeds[3])


def test_a_cut_response_is_closed_before_the_next_observation() -> None:
    """The token limit ends a response without its end id; the template adds it, unmasked."""
    episode, _ = play(lambda number: "long " * 20 if number == 0 else GO, max_response_tokens=12)
    first, second = episode.turns[:2]
    assert first.response_ids.size == 12 and first.response_ids[-1] not in tiny_chat().eos_ids
    assert second.prompt_ids[0] == tiny_chat().eos_ids[0]
    assert not first.parsed
