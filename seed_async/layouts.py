"""Sample layouts: how a trajectory becomes rows of token ids with a response mask, in the plain and the skill context.

The turns of a trajectory fall into contexts: a turn that brings an opening message starts one, the others continue it.
One context over the whole episode is the transcript layout, one context a turn is the windowed layout (algorithm
specification, section 3); nothing here asks which it is.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from seed_async.contexts import opening_prompt
from seed_async.messages import Trajectory, Turn
from seed_async.text import ChatTokenizer


class TokenRow(NamedTuple):
    """One training row.

    `token_ids` int32 [T]; `response_mask` bool [T], True on the sampled tokens that this row scores; `turn_index` int32
    [R], the turn of the trajectory that each of these R tokens belongs to.
    """

    token_ids: np.ndarray
    response_mask: np.ndarray
    turn_index: np.ndarray


class TeacherRows(NamedTuple):
    """The rows of the skill contexts, and how many rows and response tokens were left out because they did not fit."""

    rows: tuple[TokenRow, ...]
    rows_left_out: int
    tokens_left_out: int


def transcript_row(prompts: Sequence[np.ndarray], responses: Sequence[np.ndarray]) -> TokenRow:
    """Concatenate the prompt ids and response ids of each turn, both int32, in order."""
    pieces = [piece for pair in zip(prompts, responses, strict=True) for piece in pair]
    masks = [np.full(piece.size, bool(index % 2)) for index, piece in enumerate(pieces)]
    turns = [np.full(response.size, index, dtype=np.int32) for index, response in enumerate(responses)]
    return TokenRow(np.concatenate(pieces).astype(np.int32), np.concatenate(masks), np.concatenate(turns))


def contexts(trajectory: Trajectory) -> list[range]:
    """The turns of each context, in order; the first turn opens one in any case."""
    texts = trajectory.texts
    starts = [index for index, text in enumerate(texts) if index == 0 or text.opening]
    return [range(start, stop) for start, stop in zip(starts, [*starts[1:], len(texts)], strict=True)]


def plain_rows(trajectory: Trajectory) -> tuple[TokenRow, ...]:
    """The rows that were acted, one a context: exactly the ids that the policy server saw and sampled.

    Together they hold each response token of each turn once, in the order of the turns.
    """
    turns = trajectory.turns
    return tuple(
        _context_row(turns, context, turns[context.start].prompt_ids, context) for context in contexts(trajectory)
    )


def teacher_rows(
    trajectory: Trajectory,
    episode_skill: str,
    step_skills: Mapping[int, str],
    tokenizer: ChatTokenizer,
    max_tokens: int,
) -> TeacherRows:
    """The same response ids in skill-augmented contexts: only the opening prompt of a row differs from the plain one.

    The row of a context holds the episode skill and scores its turns, but for those that have a step skill (by turn
    index): each of these gets a row of its own, which holds the step skill instead, ends with that turn and scores that
    turn alone. So each turn is scored in at most one row. A row longer than `max_tokens` is left out, never truncated,
    and counted. Step skills of turns that do not exist do nothing.
    """
    turns = trajectory.turns
    kept: list[TokenRow] = []
    rows_left_out = tokens_left_out = 0
    for context in contexts(trajectory):
        skills = [(step_skills[turn], [turn]) for turn in context if turn in step_skills]
        rest = [turn for turn in context if turn not in step_skills]
        for skill, scored in [(episode_skill, rest), *skills]:
            if not scored:
                continue
            opening = opening_prompt(turns, context.start, trajectory.task_line, tokenizer, skill)
            row = _context_row(turns, range(context.start, scored[-1] + 1), opening, scored)
            if row.token_ids.size > max_tokens:
                rows_left_out, tokens_left_out = rows_left_out + 1, tokens_left_out + row.turn_index.size
            else:
                kept.append(row)
    return TeacherRows(tuple(kept), rows_left_out, tokens_left_out)


def _context_row(turns: Sequence[Turn], context: range, opening: np.ndarray, scored: Sequence[int]) -> TokenRow:
    """The turns of (the front of) a context after the prompt ids `opening`; only the turns `scored` are masked in."""
    played = [turns[turn] for turn in context]
    prompts = [opening, *(turn.prompt_ids for turn in played[1:])]
    row = transcript_row(prompts, [turn.response_ids for turn in played])
    turn_index = row.turn_index + np.int32(context.start)
    wanted = np.isin(turn_index, np.asarray(scored))
    mask = row.response_mask.copy()
    mask[mask] = wanted
    return TokenRow(row.token_ids, mask, turn_index[wanted])
