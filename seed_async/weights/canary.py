"""The canary of a version: log-probs of a fixed text, by the learner's own weights, that every engine has to find too.

A digest proves that the right bytes arrived; the canary proves that an engine computes with them. A tensor that its
loading forgot, transposed or rounded changes the log-probs of nearly every text, so a short one of random ids will do.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

PROMPT_TOKENS = 24
RESPONSE_TOKENS = 16
SEED = 2607
"""Any number: learner and engines must only draw the same ids."""


class CanaryText(NamedTuple):
    """The text, int32 [PROMPT_TOKENS] and int32 [RESPONSE_TOKENS]."""

    prompt_ids: np.ndarray
    response_ids: np.ndarray


def canary_text(vocabulary: int) -> CanaryText:
    """The canary of a model whose ids are below `vocabulary`: the same for everybody who asks."""
    ids = np.random.Generator(np.random.PCG64(SEED)).integers(0, vocabulary, PROMPT_TOKENS + RESPONSE_TOKENS)
    return CanaryText(*np.split(ids.astype(np.int32), [PROMPT_TOKENS]))


def canary_gap_nats(expected: Sequence[float], found: np.ndarray) -> float:
    """The largest |difference| of two rows of log-probs [T]; infinite where one of them is no finite number."""
    gaps = np.abs(np.asarray(expected, dtype=np.float64) - found.astype(np.float64))
    return float(gaps.max()) if np.isfinite(gaps).all() else float("inf")
