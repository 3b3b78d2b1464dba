"""Transcript rows: ids as sampled, a mask on sampled tokens, and equal responses in both contexts."""

import numpy as np
import pytest

from seed_async.layouts import plain_row, skill_row, transcript_row
from seed_async.messages import Trajectory
from tests.fakes.chat import tiny_chat
from tests.fakes.episodes import make_lease, make_trajectory, make_turn


def test_prompts_and_responses_alternate_and_only_responses_are_masked_in() -> None:
    """The turn index belongs to sampled tokens."""
    pieces = [np.array(ids, dtype=np.int32) for ids in ([1, 2], [3], [4], [5, 6], [7, 8, 9], [])]
    row = transcript_row(pieces[0::2], pieces[1::2])
    assert row.token_ids.tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert row.token_ids[row.response_mask].tolist() == [3, 5, 6]
    assert row.turn_index.tolist() == [0, 1, 1]
    assert [array.dtype.str for array in row] == ["<i4", "|b1", "<i4"]


def test_a_prompt_without_its_response_is_refused() -> None:
    """Lengths must agree."""
    with pytest.raises(ValueError, match="shorter"):
        transcript_row([np.zeros(1, np.int32)] * 2, [np.zeros(1, np.int32)])


def episode(opening: str) -> Trajectory:
    """Two turns whose first prompt is really that of `opening`."""
    chat = tiny_chat()
    first = chat.first_prompt(opening).tolist()
    later = chat.next_prompt("Nothing happens.", after_eos=True).tolist()
    turns = [make_turn([0, 0], prompt=first, opening=opening), make_turn([0, 1, 1], prompt=later)]
    return make_trajectory(make_lease(), "i", turns)


def test_the_plain_row_is_what_was_acted() -> None:
    """Every id, in order."""
    trajectory = episode("Task: find the mug.\nYou see a mug.")
    expected = [part for turn in trajectory.turns for part in (turn.prompt_ids, turn.response_ids)]
    np.testing.assert_array_equal(plain_row(trajectory).token_ids, np.concatenate(expected))


@pytest.mark.parametrize("opening", ["Task: find the mug.\nYou see a mug.", "no line holds the task"])
def test_the_skill_row_differs_in_its_first_prompt_only(opening: str) -> None:
    """Oracle (d): the response ids, and everything after the first prompt, are equal in both contexts."""
    trajectory = episode(opening)
    plain, skill = plain_row(trajectory), skill_row(trajectory, "look first", tiny_chat())
    np.testing.assert_array_equal(plain.token_ids[plain.response_mask], skill.token_ids[skill.response_mask])
    np.testing.assert_array_equal(plain.turn_index, skill.turn_index)
    tail = plain.token_ids.size - trajectory.turns[0].prompt_ids.size
    np.testing.assert_array_equal(plain.token_ids[-tail:], skill.token_ids[-tail:])
    assert "Skill: look first" in tiny_chat().decode(skill.token_ids)
    assert skill.token_ids.size > plain.token_ids.size
