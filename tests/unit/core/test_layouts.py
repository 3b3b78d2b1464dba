"""Rows of both layouts: ids as sampled, a mask on sampled tokens, and equal responses in both contexts."""

import numpy as np
import pytest

from seed_async.layouts import contexts, plain_rows, teacher_rows, transcript_row
from seed_async.messages import Trajectory
from seed_async.prompts import insert_skill
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


def episode(opening: str, *, windowed: bool = False) -> Trajectory:
    """Three turns whose opening prompts are really those of `opening`; windowed: each turn opens a context."""
    chat = tiny_chat()
    first = chat.first_prompt(opening).tolist()
    later = chat.next_prompt("Nothing happens.", after_eos=True).tolist()
    turns = [make_turn([0] * (2 + index), prompt=first, opening=opening) for index in range(3)]
    if not windowed:
        turns[1:] = [make_turn([0] * (3 + index), prompt=later) for index in range(2)]
    return make_trajectory(make_lease(), "i", turns)


OPENING = "Task: find the mug.\nYou see a mug."
LAYOUTS = pytest.mark.parametrize("windowed", [False, True], ids=["transcript", "windowed"])


@LAYOUTS
def test_the_plain_rows_are_what_was_acted_one_row_a_context(windowed: bool) -> None:
    """Every id of every turn once, in order; the turn index counts through the whole trajectory."""
    trajectory = episode(OPENING, windowed=windowed)
    rows = plain_rows(trajectory)
    assert len(rows) == len(contexts(trajectory)) == (3 if windowed else 1)
    expected = [part for turn in trajectory.turns for part in (turn.prompt_ids, turn.response_ids)]
    np.testing.assert_array_equal(np.concatenate([row.token_ids for row in rows]), np.concatenate(expected))
    assert np.concatenate([row.turn_index for row in rows]).tolist() == [0, 0, 1, 1, 1, 2, 2, 2, 2]
    assert [array.dtype.str for array in rows[-1]] == ["<i4", "|b1", "<i4"]


@pytest.mark.parametrize("opening", [OPENING, "no line holds the task"])
def test_the_teacher_row_of_a_transcript_differs_in_its_first_prompt_only(opening: str) -> None:
    """Oracle (d): the response ids, and everything after the first prompt, are equal in both contexts."""
    trajectory = episode(opening)
    (plain,) = plain_rows(trajectory)
    (skill,) = teacher_rows(trajectory, "look first", {}, tiny_chat(), 1000).rows
    np.testing.assert_array_equal(plain.token_ids[plain.response_mask], skill.token_ids[skill.response_mask])
    np.testing.assert_array_equal(plain.turn_index, skill.turn_index)
    tail = plain.token_ids.size - trajectory.turns[0].prompt_ids.size
    np.testing.assert_array_equal(plain.token_ids[-tail:], skill.token_ids[-tail:])
    assert "Skill: look first" in tiny_chat().decode(skill.token_ids)
    assert skill.token_ids.size > plain.token_ids.size


def test_the_windowed_layout_has_a_teacher_row_a_turn() -> None:
    """Each with the skill in its own opening prompt."""
    trajectory = episode(OPENING, windowed=True)
    rows = teacher_rows(trajectory, "look first", {}, tiny_chat(), 1000).rows
    prompt = tiny_chat().first_prompt(insert_skill(OPENING, trajectory.task_line, "look first"))
    for turn, row in enumerate(rows):
        np.testing.assert_array_equal(row.token_ids, np.concatenate([prompt, trajectory.turns[turn].response_ids]))
        assert set(row.turn_index) == {turn} and row.token_ids.size == prompt.size + row.turn_index.size
    assert len(rows) == 3


@LAYOUTS
@pytest.mark.parametrize("steps", [{}, {1: "open it"}, {0: "a", 1: "b", 2: "c"}, {1: "open it", 7: "never played"}])
def test_every_turn_is_scored_once_with_its_own_skill(windowed: bool, steps: dict[int, str]) -> None:
    """A step skill replaces the episode skill on its step; the ids stay those that were sampled (oracle d)."""
    trajectory, chat = episode(OPENING, windowed=windowed), tiny_chat()
    found = teacher_rows(trajectory, "look first", steps, chat, 1000)
    assert found.rows_left_out == found.tokens_left_out == 0
    skill_of: dict[int, str] = {}
    for row in found.rows:
        text = chat.decode(row.token_ids)
        for turn in sorted(set(row.turn_index.tolist())):
            assert turn not in skill_of
            skill_of[turn] = text.split("Skill: ")[1].split("\n")[0]
            scored = row.token_ids[row.response_mask][row.turn_index == turn]
            np.testing.assert_array_equal(scored, trajectory.turns[turn].response_ids)
    assert skill_of == {turn: steps.get(turn, "look first") for turn in range(3)}


def test_the_row_of_a_step_skill_holds_the_history_up_to_its_turn() -> None:
    """In a transcript the earlier responses are context, not targets; the later ones are not there."""
    trajectory = episode(OPENING)
    whole, step = teacher_rows(trajectory, "look first", {1: "open it"}, tiny_chat(), 1000).rows
    first, second, _ = trajectory.turns
    opening = tiny_chat().first_prompt(insert_skill(OPENING, trajectory.task_line, "open it"))
    pieces = [opening, first.response_ids, second.prompt_ids, second.response_ids]
    np.testing.assert_array_equal(step.token_ids, np.concatenate(pieces))
    assert (
        step.response_mask.sum() == second.response_ids.size and step.response_mask[-second.response_ids.size :].all()
    )
    assert set(whole.turn_index.tolist()) == {0, 2}


@LAYOUTS
def test_a_row_over_the_limit_is_left_out_and_counted_and_the_others_stay(windowed: bool) -> None:
    """Row by row, never truncated."""
    trajectory = episode(OPENING, windowed=windowed)
    fitting = teacher_rows(trajectory, "look first", {1: "open it"}, tiny_chat(), 1000).rows
    longest = max(row.token_ids.size for row in fitting)
    found = teacher_rows(trajectory, "look first", {1: "open it"}, tiny_chat(), longest - 1)
    kept = [row for row in fitting if row.token_ids.size < longest]
    assert 0 < len(found.rows) == len(kept) == len(fitting) - found.rows_left_out
    for row, expected in zip(found.rows, kept, strict=True):
        np.testing.assert_array_equal(row.token_ids, expected.token_ids)
    assert found.tokens_left_out == sum(row.turn_index.size for row in fitting) - sum(
        row.turn_index.size for row in kept
    )


def test_a_context_without_its_opening_message_has_no_teacher() -> None:
    """A skill cannot be inserted in a text that is not known."""
    with pytest.raises(ValueError, match="no opening message"):
        teacher_rows(make_trajectory(make_lease(), "i", [make_turn([0])]), "look", {}, tiny_chat(), 1000)
