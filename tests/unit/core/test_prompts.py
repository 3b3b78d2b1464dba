"""Prompts: what stands where, what a response says, and that inserting a skill changes nothing else."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seed_async.prompts import (
    YOUR_TURN,
    Outcome,
    PromptStyle,
    StepText,
    action_response,
    analysis_prompt,
    first_prompt,
    insert_skill,
    next_prompt,
    parse_action,
    plain_observation,
)

OPENING = (
    "-= Welcome to TextWorld, ALFRED! =-\n\nYou are in the middle of a room.\n\n"
    "Your task is to: put a clean mug in shelf."
)
STYLES: list[PromptStyle] = ["full", "compact"]


def steps(number: int, size: int = 10) -> list[StepText]:
    """Distinct steps of about `size` characters each."""
    return [StepText(f"seen {index} " + "o" * size, f"said {index}", index % 2 == 0) for index in range(number)]


def test_the_banner_and_the_task_sentence_leave_the_observation() -> None:
    """The prompt states the task itself, once."""
    assert plain_observation(OPENING) == "You are in the middle of a room."


@pytest.mark.parametrize("style", STYLES)
def test_the_task_line_is_a_line_of_the_first_prompt(style: PromptStyle) -> None:
    """Skill insertion looks for it."""
    prompt = first_prompt(style, "put a clean mug in shelf.", OPENING, ["look"])
    assert prompt.text.split("\n").count(prompt.task_line) == 1
    assert prompt.text.count("put a clean mug in shelf.") == 1


def test_the_full_style_lists_commands_and_ends_with_the_turn_line() -> None:
    """The compact style does neither."""
    full, compact = (first_prompt(style, "x.", "You see a mug.", ["look", "go to mug"]).text for style in STYLES)
    assert "[look, go to mug]" in full and full.endswith(YOUR_TURN)
    assert compact == "Task: x.\nYou see a mug."
    assert next_prompt("full", "Hm.", ["look"]).split("\n") == [
        "Observation: Hm.",
        "Admissible actions: [look]",
        YOUR_TURN,
    ]
    assert next_prompt("compact", "Hm.", ["look"]) == "Hm."


@pytest.mark.parametrize(
    ("response", "command"),
    [
        ("<action>go to shelf 1</action>", "go to shelf 1"),
        ("<think>why</think> so <action> go \n to  shelf 1 </action> done", "go to shelf 1"),
        ("go to shelf 1", None),
        ("<action></action>", None),
        ("<action>   </action>", None),
        ("<action>look</action><action>look</action>", None),
        ("<action><action>look</action>", None),
        ("<action>look</action></action>", None),
        ("<think>I write <action> tags</think><action>look</action>", None),
        ("<action>look", None),
        ("look</action>", None),
        ("<ACTION>look</ACTION>", None),
        ("</action>look<action>", None),
        ("", None),
    ],
)
def test_exactly_one_action_parses(response: str, command: str | None) -> None:
    """Anything else plays the empty command."""
    assert parse_action(response) == (command or "", command is not None)


@given(st.text(st.characters(codec="utf-8", exclude_characters="<>"), min_size=1))
def test_a_demonstrated_action_reads_back(command: str) -> None:
    """Up to white space."""
    assert parse_action(action_response(command)).command == " ".join(command.split())


def without_skill(augmented: str, skill: str) -> str:
    """Remove the one section again."""
    lines = augmented.split("\n")
    lines.remove(f"Skill: {skill}")
    return "\n".join(lines)


@pytest.mark.parametrize("style", STYLES)
def test_a_skill_stands_right_after_the_task_and_changes_no_other_byte(style: PromptStyle) -> None:
    """H(h, s) of the specification."""
    prompt = first_prompt(style, "x.", "You see a mug.", ["look"])
    augmented = insert_skill(prompt.text, prompt.task_line, "look first")
    lines = augmented.split("\n")
    assert lines[lines.index(prompt.task_line) + 1] == "Skill: look first"
    assert without_skill(augmented, "look first") == prompt.text


def test_without_a_task_line_a_skill_stands_before_the_last_turn_line_or_at_the_end() -> None:
    """The two fallbacks, in this order."""
    assert (
        insert_skill(f"a\n{YOUR_TURN}\nb\n{YOUR_TURN}", "Task: no", "s") == f"a\n{YOUR_TURN}\nb\nSkill: s\n{YOUR_TURN}"
    )
    assert insert_skill("a\nb", "Task: no", "s") == "a\nb\nSkill: s"


@given(st.text(alphabet="ab\n\r\tT: ", max_size=60), st.text(alphabet="abT: ", max_size=8))
def test_insertion_never_alters_the_prompt(prompt: str, task_line: str) -> None:
    """Whatever the prompt looks like."""
    assert without_skill(insert_skill(prompt, task_line, "#"), "#") == prompt


@pytest.mark.parametrize("outcome", ["success", "failure", "unknown"])
def test_the_analysis_prompt_holds_everything_when_it_fits(outcome: Outcome) -> None:
    """Every step with its index, response and validity; the outcome decides the meaning of the skill."""
    text = analysis_prompt("full", "x.", outcome, steps(3), lambda _: True)
    assert text is not None
    assert f"Outcome: {outcome}" in text and "Task: x." in text and "left out" not in text
    for index in range(3):
        assert f"[{index}] Observation: seen {index}" in text and f"[{index}] Response: said {index}" in text
    assert "[1] Valid: False" in text and "[2] Valid: True" in text
    assert ("avoidance" in text) == (outcome == "failure")


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("limit", range(200, 2200, 100))
def test_a_long_analysis_loses_middle_steps_only_and_says_so(style: PromptStyle, limit: int) -> None:
    """First and last step stay; the result fits; one step more would not."""
    whole = steps(20, 60)
    text = analysis_prompt(style, "x.", "failure", whole, lambda text: len(text) <= limit)
    if text is None:
        assert limit < 1200
        return
    assert len(text) <= limit
    shown = [index for index in range(20) if f"seen {index} " in text]
    left_out = 20 - len(shown)
    assert {0, 19} <= set(shown)
    if left_out:
        assert f"({left_out} steps left out)" in text
        assert shown == [*range((len(shown) + 1) // 2), *range(20 - len(shown) // 2, 20)]
    assert len(text) + 200 > limit or not left_out


@pytest.mark.parametrize("number", [1, 2, 3])
def test_an_analysis_that_cannot_hold_both_ends_is_given_up(number: int) -> None:
    """Nothing is ever cut at the front."""
    assert analysis_prompt("compact", "x.", "success", steps(number, 500), lambda text: len(text) <= 300) is None
