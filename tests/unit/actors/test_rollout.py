"""Episodes: ids kept as sampled, contexts as the layout makes them, and every way in which an episode ends."""

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from seed_async.actors.conversations import falls_back
from seed_async.actors.rollout import Episode, EpisodePlayer, GenerationFailedError
from seed_async.contexts import opening_prompt
from seed_async.envs.contract import TaskNotFoundError
from seed_async.envs.isolation import LocalHost
from seed_async.layouts import plain_rows, teacher_rows
from seed_async.prompts import PastStep, windowed_prompt
from seed_async.text import ChatTokenizer
from seed_async.topology import Rollout
from tests.fakes.chat import STRIPS_EARLIER_THINKING, tiny_chat
from tests.fakes.episodes import make_lease, make_trajectory
from tests.fakes.play import Corridor, ScriptedGenerator

GO = "<action>go</action>"


def play(
    script: Callable[[int], str],
    corridor: Corridor | None = None,
    *,
    end: bool = True,
    task: str = "corridor",
    seed: int = 7,
    chat: ChatTokenizer | None = None,
    on_step: Callable[[], None] = lambda: None,
    **rollout: Any,
) -> tuple[Episode, ScriptedGenerator]:
    """Play one episode in the compact style."""
    chat = chat or tiny_chat()
    generator = ScriptedGenerator(chat, script, end=end)
    given = {"prompt_style": "compact", "max_context_tokens": 400, "max_response_tokens": 40}
    settings = Rollout.model_validate(given | rollout)
    player = EpisodePlayer(chat, generator, settings, temperature=1.0, kind="act", on_step=on_step)
    return asyncio.run(player.play(LocalHost(lambda: corridor or Corridor()), task, seed)), generator


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
    with pytest.raises(GenerationFailedError, match=r"first prompt of corridor does not fit"):
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


def test_strict_admissible_counts_an_action_outside_the_list_as_unparsable() -> None:
    """It is played all the same; without the option the environment alone decides what is valid."""
    answers = ["<action>dance</action>", "<action>GO</action>", GO]
    for strict in (False, True):
        corridor = Corridor()
        episode, _ = play(lambda number: answers[number], corridor, strict_admissible=strict)
        assert corridor.commands == ["dance", "go", "go"]
        assert [turn.parsed for turn in episode.turns] == [not strict, True, True]
        assert [turn.valid for turn in episode.turns] == [False, True, True]


THINKS = "<think>a long reason</think><action>go</action>"


@pytest.mark.parametrize("window", [0, 1, 2, 5])
def test_in_the_windowed_layout_each_step_is_a_prompt_of_its_own(window: int) -> None:
    """The history block holds the last pairs; earlier responses are not in it, nor in the ids."""
    answers = [THINKS, "hm", "<action>dance</action>", THINKS, THINKS]
    episode, generator = play(
        lambda number: answers[number], Corridor(length=3), layout="windowed", history_window=window
    )
    assert episode.status == "won" and len(episode.turns) == 5
    past: list[PastStep] = []
    for turn, context in zip(episode.turns, generator.prompts, strict=True):
        text = windowed_prompt(
            "compact", "walk to the end.", past, window, turn.observation, ["go", "fall"], lambda _: True
        )
        assert text is not None and turn.opening == text.text and not turn.whole_chat
        assert episode.task_line == text.task_line and turn.opening.split("\n")[0] == episode.task_line
        np.testing.assert_array_equal(turn.prompt_ids, tiny_chat().first_prompt(turn.opening))
        np.testing.assert_array_equal(turn.prompt_ids, context)
        assert "reason" not in turn.opening
        past.append(PastStep(turn.observation, turn.action))


def test_the_full_windowed_prompt_lists_what_can_be_done_now() -> None:
    """And nothing that could be done before."""
    episode, _ = play(lambda _: GO, layout="windowed", history_window=5, prompt_style="full", max_context_tokens=2000)
    for turn in episode.turns:
        assert turn.opening.count("Admissible actions: [go, fall]") == 1
    assert "[0] Action: go\n" in episode.turns[1].opening


@pytest.mark.parametrize("limit", [50, 70, 90, 120, 150, 400])
def test_windowed_prompts_drop_history_before_they_overflow(limit: int) -> None:
    """An episode can thus be longer than any context; it ends early only when the bare prompt is too long."""
    episode, generator = play(
        lambda _: "hm", Corridor(max_steps=6), layout="windowed", max_context_tokens=limit, max_response_tokens=8
    )
    assert len(episode.turns) == 6
    assert all(prompt.size + 8 <= limit for prompt in generator.prompts)
    shown = [turn.opening.count("> ") for turn in episode.turns]
    assert shown == [min(step, max(shown)) for step in range(6)]
    assert (max(shown) < 5) == (limit < 400) and (max(shown) > 0) == (limit > 50)


def test_a_windowed_prompt_over_the_context_fails_or_ends_the_episode() -> None:
    """As in the transcript layout."""
    with pytest.raises(GenerationFailedError, match="first prompt of corridor does not fit"):
        play(lambda _: GO, layout="windowed", max_context_tokens=12, max_response_tokens=2)


def test_a_template_that_strips_thinking_gets_a_context_each_turn() -> None:
    """Each prompt is the whole chat rendered anew, the sampled ids stay; the learner can make the same prompts."""
    chat = tiny_chat(STRIPS_EARLIER_THINKING)
    answers = [THINKS, "<think>cut off", THINKS]
    episode, generator = play(lambda number: answers[number], chat=chat)
    assert episode.status == "won" and len(episode.turns) == 3
    for index, (turn, context) in enumerate(zip(episode.turns, generator.prompts, strict=True)):
        assert turn.opening and turn.whole_chat
        np.testing.assert_array_equal(turn.prompt_ids, context)
        np.testing.assert_array_equal(context, opening_prompt(episode.turns, index, episode.task_line, chat))
        assert chat.decode(turn.response_ids) == turn.response == answers[index]
    text = chat.decode(episode.turns[2].prompt_ids)
    assert "reason" not in text and text.count("You are at door 0.") == 1
    assert text.count("You are at door 1.") == 1 and "Nothing happens." in text


@pytest.mark.parametrize("limit", range(60, 200, 14))
def test_a_whole_chat_ends_the_episode_before_it_overflows(limit: int) -> None:
    """As a growing context does."""
    chat = tiny_chat(STRIPS_EARLIER_THINKING)
    episode, generator = play(lambda _: "hm", chat=chat, max_context_tokens=limit, max_response_tokens=10)
    assert episode.status == "truncated" and len(episode.turns) == len(generator.prompts)
    assert all(prompt.size + 10 <= limit for prompt in generator.prompts)


def test_only_the_transcript_layout_falls_back() -> None:
    """A windowed prompt is a chat of one message in any case."""
    stripping = tiny_chat(STRIPS_EARLIER_THINKING)
    assert falls_back(stripping, Rollout()) and not falls_back(tiny_chat(), Rollout())
    assert not falls_back(stripping, Rollout(layout="windowed"))
    episode, _ = play(lambda _: THINKS, chat=stripping, layout="windowed")
    assert not any(turn.whole_chat for turn in episode.turns)


@pytest.mark.parametrize("layout", ["transcript", "windowed"])
@pytest.mark.parametrize("template", [None, STRIPS_EARLIER_THINKING])
def test_what_was_acted_can_be_scored_again_with_a_skill(layout: str, template: str | None) -> None:
    """The learner's plain rows are the contexts that were sampled from; the teacher's hold the same responses."""
    chat = tiny_chat(template) if template else tiny_chat()
    answers = [THINKS, "hm", THINKS]
    episode, generator = play(lambda number: answers[number], chat=chat, layout=layout)
    trajectory = make_trajectory(make_lease(), "i", episode.turns, task_line=episode.task_line)
    plain = plain_rows(trajectory)
    teacher = teacher_rows(trajectory, "look first", {}, chat, max_tokens=2000).rows
    assert len(plain) == len(teacher) == (1 if layout == "transcript" and not template else 3)
    for row, skilled in zip(plain, teacher, strict=True):
        np.testing.assert_array_equal(row.token_ids[row.response_mask], skilled.token_ids[skilled.response_mask])
        assert chat.decode(skilled.token_ids).count("Skill: look first") == 1
    last = episode.turns[-1].response_ids
    np.testing.assert_array_equal(plain[-1].token_ids, np.concatenate([generator.prompts[-1], last]))
