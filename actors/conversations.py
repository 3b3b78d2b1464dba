"""How the prompt of each step of an episode is made: one class a layout, and the fallback of the transcript layout."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np

from seed_async.messages import Turn
from seed_async.prompts import PastStep, first_prompt, next_prompt, windowed_prompt
from seed_async.text import Chat, ChatTokenizer
from seed_async.topology import Rollout

FALLBACK_NOTE = (
    "the chat template rewrites earlier turns (it may strip their thinking), so in the transcript layout each turn is "
    "a context of its own, the whole chat rendered anew: right, but slower to sample and to train. "
    "rollout.layout windowed, or a template that keeps earlier turns, avoids it"
)
NOTHING_SEEN = "(nothing)"
"""Stands for an empty observation where it opens a context: an opening message is never empty."""


class StepPrompt(NamedTuple):
    """What a step is sampled from.

    `context` int32 [C]: all ids that the policy server sees; `new_ids` int32 [P]: those of them that the turn adds,
    all when it opens a context. `opening` and `whole_chat` are those of `messages.Turn`.
    """

    context: np.ndarray
    new_ids: np.ndarray
    opening: str = ""
    whole_chat: bool = False


class Conversation(Protocol):
    """One episode's prompts, made in the order of its steps."""

    def prompt(self, turns: Sequence[Turn], observation: str, admissible: Sequence[str]) -> StepPrompt | None:
        """The prompt of the step after `turns`, or None when it and a response would not fit the context."""
        ...


class _Transcript:
    """One chat that grows by the sampled ids and the ids of the next observation."""

    def __init__(self, tokenizer: ChatTokenizer, rollout: Rollout, task: str) -> None:
        self._tokenizer, self._rollout, self._task = tokenizer, rollout, task
        self._context = np.zeros(0, dtype=np.int32)

    def prompt(self, turns: Sequence[Turn], observation: str, admissible: Sequence[str]) -> StepPrompt | None:
        style, opening = self._rollout.prompt_style, ""
        if turns:
            last = turns[-1].response_ids
            after_eos = int(last[-1]) in self._tokenizer.eos_ids
            new_ids = self._tokenizer.next_prompt(next_prompt(style, observation, admissible), after_eos=after_eos)
            self._context = np.concatenate([self._context, last, new_ids])
        else:
            opening = first_prompt(style, self._task, observation, admissible).text
            self._context = new_ids = self._tokenizer.first_prompt(opening)
        return StepPrompt(self._context, new_ids, opening) if _fits(self._context, self._rollout) else None


class _WholeChat:
    """The transcript as the template renders it at each turn, where it rewrites what came before."""

    def __init__(self, tokenizer: ChatTokenizer, rollout: Rollout, task: str) -> None:
        self._tokenizer, self._rollout, self._task = tokenizer, rollout, task
        self._chat: list[Chat] = []

    def prompt(self, turns: Sequence[Turn], observation: str, admissible: Sequence[str]) -> StepPrompt | None:
        style = self._rollout.prompt_style
        if turns:
            opening = next_prompt(style, observation, admissible) or NOTHING_SEEN
            self._chat.append(Chat("assistant", turns[-1].response))
        else:
            opening = first_prompt(style, self._task, observation, admissible).text
        self._chat.append(Chat("user", opening))
        ids = self._tokenizer.chat_prompt(self._chat)
        return StepPrompt(ids, ids, opening, whole_chat=True) if _fits(ids, self._rollout) else None


class _Windowed:
    """Each step is a prompt of its own; earlier steps are text in its history block."""

    def __init__(self, tokenizer: ChatTokenizer, rollout: Rollout, task: str) -> None:
        self._tokenizer, self._rollout, self._task = tokenizer, rollout, task

    def prompt(self, turns: Sequence[Turn], observation: str, admissible: Sequence[str]) -> StepPrompt | None:
        prompt = windowed_prompt(
            self._rollout.prompt_style,
            self._task,
            [PastStep(turn.observation, turn.action) for turn in turns],
            self._rollout.history_window,
            observation,
            admissible,
            lambda text: _fits(self._tokenizer.first_prompt(text), self._rollout),
        )
        if prompt is None:
            return None
        ids = self._tokenizer.first_prompt(prompt.text)
        return StepPrompt(ids, ids, prompt.text)


def _fits(context: np.ndarray, rollout: Rollout) -> bool:
    """Whether a response of full length still fits after `context`."""
    return context.size + rollout.max_response_tokens <= rollout.max_context_tokens


def falls_back(tokenizer: ChatTokenizer, rollout: Rollout) -> bool:
    """Whether the transcript layout cannot keep one context an episode; FALLBACK_NOTE tells what happens then."""
    return rollout.layout == "transcript" and not tokenizer.append_only


def open_conversation(tokenizer: ChatTokenizer, rollout: Rollout, task: str) -> Conversation:
    """The conversation of a new episode, in the layout of `rollout`."""
    if rollout.layout == "windowed":
        return _Windowed(tokenizer, rollout, task)
    return (
        _WholeChat(tokenizer, rollout, task)
        if falls_back(tokenizer, rollout)
        else _Transcript(tokenizer, rollout, task)
    )
