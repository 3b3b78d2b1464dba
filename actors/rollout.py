"""Plays one episode through a policy server: shared by environment actors, the evaluation actor and `evaluate`.

Ids are kept as sampled, and the arrays that the policy server saw become the trajectory. How a step's prompt is made
is the layout's business (`conversations`).
"""

from collections.abc import Callable
from typing import NamedTuple, Protocol

import numpy as np

from seed_async.actors.conversations import open_conversation
from seed_async.envs.isolation import Host
from seed_async.messages import GenerateReply, TrajectoryStatus, Turn
from seed_async.ports import RequestKind, Sampling
from seed_async.prompts import parse_action, task_line
from seed_async.text import ChatTokenizer
from seed_async.topology import Rollout

SEEDS_AN_EPISODE = 1009
"""Each turn samples from a stream of its own: seed times this, plus the turn."""


class GenerationFailedError(RuntimeError):
    """The policy server refused or could not finish a request; the episode cannot go on."""


class Generator(Protocol):
    """Where responses come from."""

    async def generate(self, prompt_ids: np.ndarray, sampling: Sampling, kind: RequestKind) -> GenerateReply:
        """Sample one response to `prompt_ids`, int32 [P]. Raises GenerationFailedError."""
        ...


class Episode(NamedTuple):
    """A finished episode.

    `task_line` is the line of its prompts that holds the task, `episode_return` the sum of unscaled rewards.
    """

    task: str
    task_type: str
    task_line: str
    turns: tuple[Turn, ...]
    status: TrajectoryStatus
    episode_return: float


class EpisodePlayer:
    """How episodes of a run are played: prompts, limits and sampling."""

    def __init__(
        self,
        tokenizer: ChatTokenizer,
        generator: Generator,
        rollout: Rollout,
        *,
        temperature: float,
        kind: RequestKind,
        on_step: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_step` is called after each environment step (the actor's progress counter)."""
        self._tokenizer, self._generator, self._rollout = tokenizer, generator, rollout
        self._temperature, self._kind, self._on_step = temperature, kind, on_step

    async def play(self, host: Host, task_id: str, seed: int) -> Episode:
        """Play `task_id` to its end, or until the next turn would not fit the context (`truncated`).

        Raises what the host's `reset` and `step` raise, and GenerationFailedError.
        """
        observation = await host.reset(task_id)
        conversation = open_conversation(self._tokenizer, self._rollout, observation.info.task)
        turns: list[Turn] = []
        status: TrajectoryStatus = "truncated"
        episode_return = 0.0
        while (prompt := conversation.prompt(turns, observation.text, observation.admissible)) is not None:
            reply = await self._generator.generate(prompt.context, self._sampling(seed, len(turns)), self._kind)
            response = self._tokenizer.decode(reply.token_ids)
            action = parse_action(response, observation.admissible, strict=self._rollout.strict_admissible)
            result = await host.step(action.command)
            self._on_step()
            info = result.observation.info
            turns.append(
                Turn(
                    observation=observation.text,
                    response=response,
                    action=action.command,
                    parsed=action.parsed,
                    valid=action.parsed and info.valid,
                    opening=prompt.opening,
                    whole_chat=prompt.whole_chat,
                    prompt_ids=prompt.new_ids,
                    response_ids=reply.token_ids,
                    behaviour_logprob=reply.logprobs,
                    versions=reply.versions,
                )
            )
            episode_return += result.reward
            if result.terminated or result.truncated:
                status = "won" if info.won else "lost" if result.terminated else "truncated"
                break
            observation = result.observation
        info = observation.info
        if not turns:
            raise GenerationFailedError(
                f"the first prompt of {task_id} does not fit: with a response of {self._rollout.max_response_tokens} "
                f"tokens it is longer than rollout.max_context_tokens {self._rollout.max_context_tokens}"
            )
        return Episode(info.task, info.task_type, task_line(info.task), tuple(turns), status, episode_return)

    def _sampling(self, seed: int, turn: int) -> Sampling:
        return Sampling(
            temperature=self._temperature,
            max_new_tokens=self._rollout.max_response_tokens,
            seed=(seed * SEEDS_AN_EPISODE + turn) % (1 << 63),
            stop_ids=self._tokenizer.eos_ids,
            stop=self._rollout.stop,
        )
