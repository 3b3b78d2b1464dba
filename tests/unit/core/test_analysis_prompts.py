"""The analyzer's prompt: everything when it fits, both ends when not, step skills when asked for, images in place."""

from collections.abc import Sequence

import pytest

from seed_async.analysis_prompts import (
    ImagePart,
    Outcome,
    Part,
    StepText,
    TextPart,
    analysis_parts,
    analysis_prompt,
    as_content,
    as_text,
)
from seed_async.prompts import PromptStyle

STYLES: list[PromptStyle] = ["full", "compact"]


def steps(number: int, size: int = 10) -> list[StepText]:
    """Distinct steps of about `size` characters each."""
    return [StepText(f"seen {index} " + "o" * size, f"said {index}", index % 2 == 0) for index in range(number)]


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


@pytest.mark.parametrize("style", STYLES)
def test_step_skills_are_asked_for_only_where_the_method_wants_them(style: PromptStyle) -> None:
    """Every other byte stays."""
    without = analysis_prompt(style, "x.", "success", steps(2), lambda _: True)
    asked = analysis_prompt(style, "x.", "success", steps(2), lambda _: True, step_skills=5)
    assert without is not None and asked is not None
    assert "step_skills" not in without and "step_skills" in asked
    if style == "full":
        assert "at most 5 entries" in asked and '"step_skills": [{"step": 0, "skill": "string"}]}' in asked
    assert asked.endswith(without[without.index("\nTask: ") :])


def test_the_compact_instruction_is_one_short_line() -> None:
    """Stage 1 data of older runs holds these very bytes."""
    text = analysis_prompt("compact", "x.", "failure", steps(1), lambda _: True)
    assert text is not None
    assert text.startswith("Analyse the episode. Answer in JSON: episode_summary, episode_skill.\nTask: x.\n")
    asked = analysis_prompt("compact", "x.", "failure", steps(1), lambda _: True, step_skills=5)
    assert asked is not None and asked.startswith(
        "Analyse the episode. Answer in JSON: episode_summary, episode_skill, step_skills.\n"
    )


def pictured(number: int, images: int = 1) -> list[StepText]:
    """Steps whose observation comes with images."""
    return [step._replace(images=images) for step in steps(number)]


def images_of(parts: Sequence[Part]) -> list[ImagePart]:
    """The image places in order."""
    return [part for part in parts if isinstance(part, ImagePart)]


@pytest.mark.parametrize("style", STYLES)
def test_an_image_stands_between_its_observation_and_the_response(style: PromptStyle) -> None:
    """One placeholder an image, in the order of steps; the text is that without images."""
    parts = analysis_parts(style, "x.", "success", pictured(3, images=2), lambda _: True)
    assert parts is not None
    assert images_of(parts) == [ImagePart(step, image) for step in range(3) for image in range(2)]
    for step in range(3):
        place = parts.index(ImagePart(step, 0))
        before, after = parts[place - 1], parts[place + 2]
        assert isinstance(before, TextPart) and f"seen {step} " in before.text
        assert isinstance(after, TextPart) and f"said {step}" in after.text
    assert as_text(parts) == analysis_prompt(style, "x.", "success", steps(3), lambda _: True)


def test_content_has_one_placeholder_an_image_and_loses_no_text() -> None:
    """The form that chat templates for images take."""
    parts = analysis_parts("full", "x.", "success", pictured(2), lambda _: True)
    assert parts is not None
    content = as_content(parts)
    assert [each["type"] for each in content] == ["text", "image", "text", "image", "text"]
    assert "\n".join(each["text"] for each in content if each["type"] == "text") == as_text(parts)
    assert as_content([TextPart("a"), TextPart("b")]) == [{"type": "text", "text": "a\nb"}]
    assert as_content([ImagePart(0, 0)]) == [{"type": "image"}] and as_content([]) == []


def test_a_step_that_is_left_out_takes_its_image_with_it() -> None:
    """What fits may count images, which cost far more than text."""
    parts = analysis_parts("compact", "x.", "failure", pictured(9), lambda parts: len(images_of(parts)) <= 4)
    assert parts is not None
    assert [part.step for part in images_of(parts)] == [0, 1, 7, 8]
    assert "(5 steps left out)" in as_text(parts)
