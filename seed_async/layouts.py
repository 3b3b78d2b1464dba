"""Sample layouts: how a trajectory becomes rows of token ids with a response mask, in the plain and the skill context.

Transcript layout: one row a trajectory, the whole episode as one append-only chat (algorithm specification, section 3).
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from seed_async.messages import Trajectory
from seed_async.prompts import insert_skill
from seed_async.text import ChatTokenizer


class TokenRow(NamedTuple):
    """One training row.

    `token_ids` int32 [T]; `response_mask` bool [T], True on sampled tokens; `turn_index` int32 [R], the turn of each
    of the R sampled tokens.
    """

    token_ids: np.ndarray
    response_mask: np.ndarray
    turn_index: np.ndarray


def transcript_row(prompts: Sequence[np.ndarray], responses: Sequence[np.ndarray]) -> TokenRow:
    """Concatenate the prompt ids and response ids of each turn, both int32, in order."""
    pieces = [piece for pair in zip(prompts, responses, strict=True) for piece in pair]
    masks = [np.full(piece.size, bool(index % 2)) for index, piece in enumerate(pieces)]
    turns = [np.full(response.size, index, dtype=np.int32) for index, response in enumerate(responses)]
    return TokenRow(np.concatenate(pieces).astype(np.int32), np.concatenate(masks), np.concatenate(turns))


def plain_row(trajectory: Trajectory) -> TokenRow:
    """The row that was acted: exactly the ids that the policy server saw and sampled."""
    turns = trajectory.turns
    return transcript_row([turn.prompt_ids for turn in turns], [turn.response_ids for turn in turns])


def skill_row(trajectory: Trajectory, skill: str, tokenizer: ChatTokenizer) -> TokenRow:
    """The same response ids in the skill-augmented context: only the first prompt differs."""
    turns = trajectory.turns
    opening = tokenizer.first_prompt(insert_skill(turns[0].opening, trajectory.task_line, skill))
    prompts = [opening, *(turn.prompt_ids for turn in turns[1:])]
    return transcript_row(prompts, [turn.response_ids for turn in turns])
