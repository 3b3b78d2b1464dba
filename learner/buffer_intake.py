"""What the buffer asks of a trajectory before it takes it over."""

import math
from typing import Final

import numpy as np

from seed_async.messages import Trajectory

_IDS: Final = np.dtype(np.int32)
_LOGPROBS: Final = np.dtype(np.float32)


def trajectory_bytes(trajectory: Trajectory) -> int:
    """Bytes of a trajectory's arrays and texts: what holding it costs."""
    arrays = 4 * (trajectory.prompt_ids.size + 3 * trajectory.response_ids.size)  # all have four bytes an item
    return arrays + sum(len(text.observation) + len(text.response) + len(text.opening) for text in trajectory.texts)


def trajectory_fault(trajectory: Trajectory, newest_version: int, vocabulary_size: int) -> str:
    """Return what is wrong with a received trajectory, or an empty string.

    `newest_version` is the newest that a policy server may serve.
    """
    if fault := _form_fault(trajectory):
        return fault
    if not math.isfinite(trajectory.episode_return):
        return "episode return is not finite"
    if not math.isfinite(trajectory.ended_at_s - trajectory.started_at_s):
        return "start or end is not a finite time"
    # A sum is finite only if no part is infinite or no number; float64, in which finite float32 cannot overflow.
    if not math.isfinite(trajectory.behaviour_logprob.sum(dtype=np.float64)):
        return "log-prob is not finite"
    # As unsigned numbers, the negative ones are the largest: one comparison finds both.
    for ids in (trajectory.prompt_ids, trajectory.response_ids):
        if ids.view(np.uint32).max() >= vocabulary_size:
            return "token id outside the vocabulary"
    if trajectory.versions.view(np.uint32).max() > newest_version:
        return "version from the future"
    return ""


def _form_fault(trajectory: Trajectory) -> str:
    """Return what is wrong with the arrays' form and the lengths of the turns, or an empty string."""
    prompt, response = trajectory.prompt_ids, trajectory.response_ids
    logprobs, versions = trajectory.behaviour_logprob, trajectory.versions
    if not (
        prompt.dtype == response.dtype == versions.dtype == _IDS
        and logprobs.dtype == _LOGPROBS
        and prompt.ndim == response.ndim == versions.ndim == logprobs.ndim == 1
    ):
        return "an array has another type or shape than declared"
    texts, prompts, responses = trajectory.texts, trajectory.prompt_lengths, trajectory.response_lengths
    if not 0 < len(texts) == len(prompts) == len(responses) or prompts[0] < 1:
        return "no turns, or nothing before the first response"
    if min(responses) < 1 or not sum(responses) == response.size == logprobs.size == versions.size:
        return "lengths of ids, log-probs and versions differ or are zero"
    if min(prompts) < 0 or sum(prompts) != prompt.size:
        return "lengths of prompts do not add up"
    for text, num_prompt in zip(texts, prompts, strict=True):
        if text.opening and not num_prompt:
            return "a turn opens a context without a prompt"
        if text.whole_chat and not text.opening:
            return "a turn holds the whole chat without opening a context"
    return ""
