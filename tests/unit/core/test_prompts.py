"""Prompts: what stands where, what a response says, and that inserting a skill changes nothing else."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seed_async.prompts import (
    YOUR_TURN,
    FirstPrompt,
    PastStep,
    PromptStyle,
    action_response,
    first_prompt,
    insert_skill,
    next_prompt,
    parse_action,
    plain_observation,
    windowed_prompt,
)

OPENING = (
    "-= Welcome to TextWorld, ALFRED! =-\n\nYou are in the middle of a room.\n\n"
    "Your task is to: put a clean mug in shelf."
)
STYLES: list[PromptStyle] = ["full", "compact"]


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


PAST = [
    PastStep(OPENING, "go to shelf 1"),
    PastStep("You see a mug 1.", "take mug 1 from shelf 1"),
    PastStep("You take it.", ""),
]


def windowed(style: PromptStyle, past: list[PastStep], window: int = 5, max_characters: int = 10_000) -> FirstPrompt:
    """The prompt of a step in front of a shelf."""
    prompt = windowed_prompt(
        style, "x.", past, window, "A shelf.", ["look", "help"], lambda text: len(text) <= max_characters
    )
    assert prompt is not None
    return prompt


@pytest.mark.parametrize("style", STYLES)
def test_the_first_step_of_the_windowed_layout_is_the_first_prompt_of_a_transcript(style: PromptStyle) -> None:
    """There is no history yet."""
    assert windowed(style, []) == first_prompt(style, "x.", "A shelf.", ["look"])


def test_the_full_history_block_numbers_its_steps_and_says_how_many_there_were() -> None:
    """Observations without banner and task, commands as they were played."""
    assert windowed("full", PAST, window=2).text.split("\n")[1:] == [
        "Task: x.",
        "Steps so far: 3. The last 2:",
        "[1] Observation: You see a mug 1.",
        "[1] Action: take mug 1 from shelf 1",
        "[2] Observation: You take it.",
        "[2] Action: (no action understood)",
        "Observation: A shelf.",
        "Admissible actions: [look]",
        YOUR_TURN,
    ]


def test_the_compact_history_block_is_bare() -> None:
    """A tiny model pays for each token."""
    text = windowed("compact", PAST[:2]).text
    assert text == (
        "Task: x.\nYou are in the middle of a room.\n> go to shelf 1\n"
        "You see a mug 1.\n> take mug 1 from shelf 1\nA shelf."
    )


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("window", [0, 1, 2, 3, 9])
def test_the_last_steps_are_shown_and_at_most_the_window(style: PromptStyle, window: int) -> None:
    """Also more than there are, or none."""
    past = [PastStep(f"seen {index}.", f"do {index}") for index in range(7)]
    text = windowed(style, past, window).text
    shown = [index for index in range(7) if f"seen {index}." in text]
    assert shown == [index for index in range(7) if f"do {index}" in text] == list(range(7))[max(0, 7 - window) :]


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("limit", range(20, 600, 20))
def test_history_that_would_not_fit_loses_its_oldest_steps(style: PromptStyle, limit: int) -> None:
    """One step more would not fit; the task, the present and its commands stay whole, or there is no prompt."""
    past = [PastStep("o" * 50, f"do {index}") for index in range(5)]
    whole = [windowed(style, past, window).text for window in range(6)]
    fitting = [text for text in whole if len(text) <= limit]
    prompt = windowed_prompt(style, "x.", past, 5, "A shelf.", ["look"], lambda text: len(text) <= limit)
    assert (prompt.text if prompt else None) == (fitting[-1] if fitting else None)


@pytest.mark.parametrize("style", STYLES)
def test_a_skill_stands_before_the_history(style: PromptStyle) -> None:
    """Right after the task, in this layout too."""
    prompt = windowed(style, PAST)
    augmented = insert_skill(prompt.text, prompt.task_line, "look first")
    lines = augmented.split("\n")
    assert lines[lines.index("Task: x.") + 1] == "Skill: look first"
    assert without_skill(augmented, "look first") == prompt.text


def test_an_environment_of_free_text_lists_no_commands() -> None:
    """An empty list would read as if nothing could be done."""
    assert next_prompt("full", "Hm.", []).split("\n") == ["Observation: Hm.", YOUR_TURN]


def test_help_is_never_listed() -> None:
    """Whatever the environment says."""
    assert "[look, go]" in next_prompt("full", "Hm.", ["look", "help", "go"])
