"""The prompt that opens a context: its own message, or the whole chat; a skill goes into the message with the task."""

import numpy as np
import pytest
from msgspec.structs import replace

from seed_async.contexts import opening_chat, opening_prompt
from seed_async.messages import Turn
from seed_async.prompts import insert_skill
from seed_async.text import Chat
from tests.fakes.chat import tiny_chat
from tests.fakes.episodes import OPENING, make_turn

TASK_LINE = "Task: find the mug."


def turns(*, whole_chat: bool) -> list[Turn]:
    """Three turns that each open a context."""
    openings = [OPENING, "Nothing happens.", "You take the mug."]
    return [
        replace(make_turn([0], opening=opening, whole_chat=whole_chat), response=f"said {index}")
        for index, opening in enumerate(openings)
    ]


def test_a_context_of_its_own_is_one_message() -> None:
    assert opening_chat(turns(whole_chat=False), 2) == [Chat("user", "You take the mug.")]


def test_a_whole_chat_holds_every_turn_before() -> None:
    assert opening_chat(turns(whole_chat=True), 2) == [
        Chat("user", OPENING),
        Chat("assistant", "said 0"),
        Chat("user", "Nothing happens."),
        Chat("assistant", "said 1"),
        Chat("user", "You take the mug."),
    ]
    assert opening_chat(turns(whole_chat=True), 0) == [Chat("user", OPENING)]


def test_a_turn_that_continues_a_context_opens_none() -> None:
    with pytest.raises(ValueError, match="turn 1 continues a context"):
        opening_chat([*turns(whole_chat=False)[:1], make_turn([0])], 1)


@pytest.mark.parametrize("whole_chat", [False, True])
@pytest.mark.parametrize("index", [0, 1, 2])
def test_a_skill_changes_the_first_message_only(whole_chat: bool, index: int) -> None:
    chat = tiny_chat()
    plain = opening_chat(turns(whole_chat=whole_chat), index)
    first = Chat("user", insert_skill(plain[0].content, TASK_LINE, "look first"))
    prompt = opening_prompt(turns(whole_chat=whole_chat), index, TASK_LINE, chat, "look first")
    np.testing.assert_array_equal(prompt, chat.chat_prompt([first, *plain[1:]]))
    assert prompt.dtype == np.int32
    without = opening_prompt(turns(whole_chat=whole_chat), index, TASK_LINE, chat)
    np.testing.assert_array_equal(without, chat.chat_prompt(plain))
