"""What the buffer asks of a trajectory before it takes it over."""

import math

import numpy as np

from seed_async.messages import Trajectory


def trajectory_bytes(trajectory: Trajectory) -> int:
    """Bytes of a trajectory's arrays and observations: what holding it costs."""
    return sum(
        turn.prompt_ids.nbytes
        + turn.response_ids.nbytes
        + turn.behaviour_logprob.nbytes
        + turn.versions.nbytes
        + len(turn.observation)
        + len(turn.response)
        + len(turn.opening)
        for turn in trajectory.turns
    )


def trajectory_fault(trajectory: Trajectory, newest_version: int, vocabulary_size: int) -> str:
    """Return what is wrong with a received trajectory, or an empty string.

    `newest_version` is the newest that a policy server may serve.
    """
    if not trajectory.turns or not trajectory.turns[0].prompt_ids.size:
        return "no turns, or nothing before the first response"
    if any(turn.opening and not turn.prompt_ids.size for turn in trajectory.turns):
        return "a turn opens a context without a prompt"
    if any(turn.whole_chat and not turn.opening for turn in trajectory.turns):
        return "a turn holds the whole chat without opening a context"
    if not math.isfinite(trajectory.episode_return):
        return "episode return is not finite"
    for turn in trajectory.turns:
        arrays = (turn.prompt_ids, turn.response_ids, turn.versions, turn.behaviour_logprob)
        if any(array.ndim != 1 or array.dtype.kind != kind for array, kind in zip(arrays, "iiif", strict=True)):
            return "an array has another type or shape than declared"
        size = turn.response_ids.size
        if size == 0 or turn.behaviour_logprob.size != size or turn.versions.size != size:
            return "lengths of ids, log-probs and versions differ or are zero"
        if not np.isfinite(turn.behaviour_logprob).all():
            return "log-prob is not finite"
        ids = np.concatenate([turn.prompt_ids, turn.response_ids])
        if ids.min() < 0 or ids.max() >= vocabulary_size:
            return "token id outside the vocabulary"
        if turn.versions.min() < 0 or turn.versions.max() > newest_version:
            return "version from the future"
    return ""
