"""What odd model outputs are parsed to: the one action outside the reasoning, or none."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seed_async.prompts import parse_action

ADMISSIBLE = ("look", "go to shelf 1", "take mug 1 from shelf 1")
GO = "go to shelf 1"
READ = {
    "plain": ("<action>go to shelf 1</action>", GO),
    "thinking before": ("<think>why</think><action>go to shelf 1</action>", GO),
    "thinking and prose": ("<think>why</think> so <action>go to shelf 1</action> done", GO),
    "prose without thinking": ("I will go.\n<action>go to shelf 1</action>\nGood.", GO),
    "thinking after": ("<action>go to shelf 1</action><think>that was it</think>", GO),
    "thinking on both sides": ("<think>a</think><action>go to shelf 1</action><think>b</think>", GO),
    "thinking cut off after": ("<action>go to shelf 1</action><think>and next I", GO),
    "two thoughts": ("<think>a</think><think>b</think><action>go to shelf 1</action>", GO),
    "empty thinking": ("<think></think><action>go to shelf 1</action>", GO),
    "thinking opened by the prompt": ("so I go</think><action>go to shelf 1</action>", GO),
    "an action in the thinking, another after": (
        "<think><action>look</action></think><action>go to shelf 1</action>",
        GO,
    ),
    "an open tag in the thinking": ("<think>I write <action> now</think><action>go to shelf 1</action>", GO),
    "a closing tag in the thinking": ("<think>then </action></think><action>go to shelf 1</action>", GO),
    "an action in thinking opened by the prompt": ("<action>look</action></think><action>go to shelf 1</action>", GO),
    "a think tag named in the thinking": ("<think>use <think> tags</think><action>go to shelf 1</action>", GO),
    "nested thinking": ("<think>a<think>b</think>c</think><action>go to shelf 1</action>", GO),
    "thinking inside the action": ("<action>go to <think>which?</think>shelf 1</action>", GO),
    "spaces": ("<action>  go   to shelf  1 </action>", GO),
    "line breaks": ("<action>\ngo to\nshelf 1\n</action>", GO),
    "CRLF": ("<think>why</think>\r\n<action>\r\ngo to shelf 1\r\n</action>\r\n", GO),
    "tabs": ("<action>\tgo\tto shelf 1</action>", GO),
    "no-break spaces": ("<action>\u00a0go\u00a0to shelf 1</action>", GO),
    "ideographic space": ("<action>go\u3000to shelf 1</action>", GO),
    "upper-case tags": ("<THINK>why</THINK><ACTION>go to shelf 1</ACTION>", GO),
    "mixed-case tags": ("<Think>why</think><Action>go to shelf 1</aCTION>", GO),
    "upper-case command": ("<action>GO TO SHELF 1</action>", GO),
    "capitalised command": ("<action>Go to shelf 1</action>", GO),
    "emoji around": ("🙂<action>go to shelf 1</action>🙂", GO),
    "markdown around": ("**Action:** `<action>go to shelf 1</action>`", GO),
    "fence around": ("```\n<action>go to shelf 1</action>\n```", GO),
    "other tags around": ("<answer><action>go to shelf 1</action></answer>", GO),
    "a stray less-than sign": ("1 < 2 <action>go to shelf 1</action>", GO),
    "replacement character before": ("\ufffd<action>go to shelf 1</action>", GO),
    "nul before": ("\0<action>go to shelf 1</action>", GO),
}
KEPT = {
    "not admissible": ("<action>dance</action>", "dance"),
    "not admissible, upper case": ("<action>Dance</action>", "Dance"),
    "not admissible, Unicode": ("<action>aller à l'étagère</action>", "aller à l'étagère"),
    "a full stop too many": ("<action>go to shelf 1.</action>", "go to shelf 1."),
    "quotes": ('<action>"look"</action>', '"look"'),
    "two commands in one tag": ("<action>look\ngo to shelf 1</action>", "look go to shelf 1"),
    "markup inside": ("<action><b>look</b></action>", "<b>look</b>"),
    "comparison signs inside": ("<action>a < b > c</action>", "a < b > c"),
    "zero-width space": ("<action>look\u200b</action>", "look\u200b"),
    "control character": ("<action>look\x07</action>", "look\x07"),
    "very long": ("<action>" + "x" * 100_000 + "</action>", "x" * 100_000),
}
REFUSED = {
    "empty": "",
    "white space": " \n",
    "no tags": "go to shelf 1",
    "thinking only": "<think>I should look</think>",
    "empty action": "<action></action>",
    "blank action": "<action> \r\n\t</action>",
    "no-break space as action": "<action>\u00a0</action>",
    "two actions": "<action>look</action><action>go to shelf 1</action>",
    "the same action twice": "<action>look</action><action>look</action>",
    "two actions after thinking": "<think>a</think><action>look</action> or <action>look</action>",
    "nested actions": "<action><action>look</action></action>",
    "opened twice": "<action><action>look</action>",
    "closed twice": "<action>look</action></action>",
    "cut off in the command": "<think>why</think><action>go to sh",
    "cut off in the closing tag": "<action>look</act",
    "cut off in the thinking": "<think>I should",
    "an action in unfinished thinking": "<think>I should <action>look</action>",
    "an action in the thinking only": "<think>I should <action>look</action></think>",
    "an action before the end of thinking that nothing opened": "<action>look</action></think>",
    "never opened": "look</action>",
    "in the wrong order": "</action>look<action>",
    "space inside the tag": "<action >look</action>",
    "attribute": '<action type="move">look</action>',
    "self-closing": "<action/>look",
    "full-width brackets": "\uff1caction\uff1elook\uff1c/action\uff1e",
    "escaped": "&lt;action&gt;look&lt;/action&gt;",
    "square brackets": "[action]look[/action]",
    "another tag": "<act>look</act>",
    "a tag made by taking out the thinking": "<act<think>a</think>ion>look</action>",
    "only thinking inside the action": "<action><think>look</think></action>",
}


def test_the_table_is_as_large_as_it_should_be() -> None:
    assert len(READ) + len(KEPT) + len(REFUSED) >= 40


@pytest.mark.parametrize("name", READ)
@pytest.mark.parametrize("strict", [False, True])
def test_the_one_action_outside_the_reasoning_is_read(name: str, strict: bool) -> None:
    """White space and the case of tags and admissible commands are forgiven."""
    response, command = READ[name]
    assert parse_action(response, ADMISSIBLE, strict=strict) == (command, True)


@pytest.mark.parametrize("name", KEPT)
def test_a_command_that_is_not_admissible_is_kept_and_counts_as_the_option_says(name: str) -> None:
    """`strict_admissible` penalises it like an unparsable one; it is played all the same."""
    response, command = KEPT[name]
    assert parse_action(response, ADMISSIBLE) == (command, True)
    assert parse_action(response, ADMISSIBLE, strict=True) == (command, False)


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("strict", [False, True])
def test_anything_else_plays_the_empty_command(name: str, strict: bool) -> None:
    assert parse_action(REFUSED[name], ADMISSIBLE, strict=strict) == ("", False)


def test_without_an_admissible_list_every_command_counts() -> None:
    """The environment takes free text."""
    assert parse_action("<action>Search[Mug]</action>", strict=True) == ("Search[Mug]", True)


def test_an_admissible_command_is_never_exchanged_for_one_in_another_case() -> None:
    assert parse_action("<action>Look</action>", ("look", "Look")).command == "Look"
    assert parse_action("<action>look</action>", ("look", "Look")).command == "look"


HOSTILE = {
    "opening think tags": "<think>" * 150_000,
    "closing think tags": "</think>" * 130_000,
    "pairs of think tags": "<think></think>" * 70_000,
    "opening action tags": "<action>" * 130_000,
    "pairs of action tags": "<action></action>" * 60_000,
    "less-than signs": "<" * (1 << 20),
    "spaces": " " * (1 << 20),
    "half tags": "<actio" * 170_000,
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_megabyte_of_tags_costs_little(name: str) -> None:
    """An actor plays many games in one thread."""
    started_s = time.process_time()
    assert not parse_action(HOSTILE[name], ADMISSIBLE).parsed
    assert time.process_time() - started_s < 1.0


@given(st.text(alphabet="<>/actionhkACT \n"))
def test_no_response_makes_the_parser_raise(response: str) -> None:
    parse_action(response, ADMISSIBLE, strict=True)
