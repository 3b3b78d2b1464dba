"""What the buffer asks of a trajectory before it takes it over."""

import math
from typing import Final

import numpy as np

from seed_async.messages import Trajectory, Turn

_IDS: Final = np.dtype(np.int32)
_LOGPROBS: Final = np.dtype(np.float32)


def trajectory_bytes(trajectory: Trajectory) -> int:
    """Bytes of a trajectory's arrays and observations: what holding it costs."""
    return sum(
        4 * (len(turn.prompt_ids) + 3 * len(turn.response_ids))  # every array has four bytes an item
        + len(turn.observation)
        + len(turn.response)
        + len(turn.opening)
        for turn in trajectory.turns
    )


def trajectory_fault(trajectory: Trajectory, newest_version: int, vocabulary_size: int) -> str:
    """Return what is wrong with a received trajectory, or an empty string.

    `newest_version` is the newest that a policy server may serve. Contents are checked over all turns at once: a check
    of each array would cost more than the rest of the intake.
    """
    turns = trajectory.turns
    if not turns or not turns[0].prompt_ids.size:
        return "no turns, or nothing before the first response"
    if not math.isfinite(trajectory.episode_return):
        return "episode return is not finite"
    for turn in turns:
        if fault := _turn_fault(turn):
            return fault
    logprobs = np.concatenate([turn.behaviour_logprob for turn in turns])
    if not np.isfinite(logprobs).all():
        return "log-prob is not finite"
    # As unsigned numbers, the negative ones are the largest: one comparison finds both.
    ids = np.concatenate([array for turn in turns for array in (turn.prompt_ids, turn.response_ids)])
    if ids.view(np.uint32).max() >= vocabulary_size:
        return "token id outside the vocabulary"
    versions = np.concatenate([turn.versions for turn in turns])
    if versions.view(np.uint32).max() > newest_version:
        return "version from the future"
    return ""


def _turn_fault(turn: Turn) -> str:
    """Return what is wrong with the form of one turn, or an empty string."""
    prompt, response, logprobs, versions = turn.prompt_ids, turn.response_ids, turn.behaviour_logprob, turn.versions
    if not (
        prompt.dtype == response.dtype == versions.dtype == _IDS
        and logprobs.dtype == _LOGPROBS
        and prompt.ndim == response.ndim == versions.ndim == logprobs.ndim == 1
    ):
        return "an array has another type or shape than declared"
    if not 0 < len(response) == len(logprobs) == len(versions):
        return "lengths of ids, log-probs and versions differ or are zero"
    if turn.opening and not len(prompt):
        return "a turn opens a context without a prompt"
    if turn.whole_chat and not turn.opening:
        return "a turn holds the whole chat without opening a context"
    return ""
