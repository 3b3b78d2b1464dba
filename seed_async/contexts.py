"""The prompt that opens a context of an episode, as it is acted and as the learner scores it again with a skill."""

from collections.abc import Sequence

import numpy as np

from seed_async.messages import Turn
from seed_async.prompts import insert_skill
from seed_async.text import Chat, ChatTokenizer


def opening_chat(turns: Sequence[Turn], index: int) -> list[Chat]:
    """The messages of the context that turn `index` opens: its user message, after all turns before if `whole_chat`.

    Raises ValueError when the turn opens none.
    """
    turn = turns[index]
    if not turn.opening:
        raise ValueError(f"turn {index} continues a context: it has no opening message")
    chat: list[Chat] = []
    for earlier in turns[:index] if turn.whole_chat else ():
        chat += [Chat("user", earlier.opening), Chat("assistant", earlier.response)]
    return [*chat, Chat("user", turn.opening)]


def opening_prompt(
    turns: Sequence[Turn], index: int, task_line: str, tokenizer: ChatTokenizer, skill: str = ""
) -> np.ndarray:
    """Ids of the whole prompt of turn `index`, int32 [P]; with a `skill`, that of the augmented context H(h, s).

    The skill goes into the first message, which is the one that holds the task. Without one these are the turn's
    `prompt_ids`, since an episode is acted by the same rendering. Raises ValueError when the turn opens no context.
    """
    first, *later = opening_chat(turns, index)
    if skill:
        first = first._replace(content=insert_skill(first.content, task_line, skill))
    return tokenizer.chat_prompt([first, *later])
