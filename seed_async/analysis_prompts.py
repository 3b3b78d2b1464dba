"""What the analyzer is asked: the instruction, the task, the outcome, and the whole trajectory or its two ends.

(Algorithm specification, section 5.) With images the same text comes as parts, each image in its step's place.
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

from seed_async.prompts import PromptStyle, plain_observation

Outcome = Literal["success", "failure", "unknown"]

_FULL = """\
You analyse a finished episode of an agent so that the next attempt goes better. \
Answer with one JSON object only, no other text.
Fields:
- "episode_summary": what happened, in one or two sentences.
- "episode_skill": {skill_meaning}{step_field}
Constraints: short, reusable, addressed to the agent, no retelling of the episode in the skill.
Schema: {{"episode_summary": "string", "episode_skill": "string"{step_schema}}}"""
_STEP_FIELD = """
- "step_skills": at most {number} entries, for the steps that decided the outcome only. "step" is the step's index as \
shown in [brackets], "skill" what to do or to avoid in that very situation."""
_STEP_SCHEMA = ', "step_skills": [{"step": 0, "skill": "string"}]'
_COMPACT = "Analyse the episode. Answer in JSON: episode_summary, episode_skill{step_field}."
_COMPACT_STEP_FIELD = ", step_skills"
_SKILL_MEANING: dict[Outcome, str] = {
    "success": "the workflow: the core decision rule and the order of actions that made it work.",
    "failure": "an avoidance rule: the core mistake and its warning sign.",
    "unknown": "the rule that the evidence supports best: what to repeat or what to avoid.",
}


class StepText(NamedTuple):
    """One step of a finished trajectory, as the analyzer reads it; `images` came with its observation."""

    observation: str
    response: str
    valid: bool
    images: int = 0


class TextPart(NamedTuple):
    """Text of a message."""

    text: str


class ImagePart(NamedTuple):
    """The place of an image in a message: number `image` of step `step`, both from 0."""

    step: int
    image: int


Part = TextPart | ImagePart


def _instruction(style: PromptStyle, outcome: Outcome, step_skills: int) -> str:
    if style == "compact":
        return _COMPACT.format(step_field=_COMPACT_STEP_FIELD if step_skills else "")
    return _FULL.format(
        skill_meaning=_SKILL_MEANING[outcome],
        step_field=_STEP_FIELD.format(number=step_skills) if step_skills else "",
        step_schema=_STEP_SCHEMA if step_skills else "",
    )


def _step_parts(style: PromptStyle, index: int, step: StepText) -> list[Part]:
    images = [ImagePart(index, number) for number in range(step.images)]
    observation = plain_observation(step.observation)
    if style == "compact":
        note = "" if step.valid else " (invalid)"
        return [TextPart(f"[{index}] {observation}"), *images, TextPart(f"{step.response}{note}")]
    answer = f"[{index}] Response: {step.response}\n[{index}] Valid: {step.valid}"
    return [TextPart(f"[{index}] Observation: {observation}"), *images, TextPart(answer)]


def analysis_parts(
    style: PromptStyle,
    task: str,
    outcome: Outcome,
    steps: Sequence[StepText],
    fits: Callable[[Sequence[Part]], bool],
    *,
    step_skills: int = 0,
) -> list[Part] | None:
    """Build the analyzer's one user message as parts; None when not even the first and the last step fit.

    When the whole does not fit, middle steps are left out with their images and the text says so; the front is never
    cut. `fits` tells whether a message is short enough. `step_skills` is the number of step skills asked for at most.
    """
    head = [TextPart("\n".join([_instruction(style, outcome, step_skills), f"Task: {task}", f"Outcome: {outcome}"]))]
    shown = [_step_parts(style, index, step) for index, step in enumerate(steps)]

    def build(kept: int) -> list[Part]:
        first, last = (kept + 1) // 2, kept // 2
        left_out = len(shown) - kept
        middle: list[Part] = [TextPart(f"({left_out} steps left out)")] if left_out else []
        ends = (
            [part for step in shown[:first] for part in step],
            [part for step in shown[len(shown) - last :] for part in step],
        )
        return [*head, *ends[0], *middle, *ends[1]]

    if fits(build(len(shown))):
        return build(len(shown))
    low, high = 2, len(shown) - 1  # the largest number of steps that fits, by bisection
    while low < high:
        kept = (low + high + 1) // 2
        low, high = (kept, high) if fits(build(kept)) else (low, kept - 1)
    return build(low) if high >= 2 and fits(build(low)) else None


def as_text(parts: Sequence[Part]) -> str:
    """The text of a message, a line or more a part; images are left out."""
    return "\n".join(part.text for part in parts if isinstance(part, TextPart))


def as_content(parts: Sequence[Part]) -> list[dict[str, Any]]:
    """A message's content as chat templates for images take it: text runs, and a placeholder for each image.

    The images themselves go to the processor in the order of the placeholders.
    """
    content: list[dict[str, Any]] = []
    lines: list[str] = []
    for part in [*parts, None]:
        if isinstance(part, TextPart):
            lines.append(part.text)
            continue
        if lines:
            content.append({"type": "text", "text": "\n".join(lines)})
            lines = []
        if part is not None:
            content.append({"type": "image"})
    return content


def analysis_prompt(
    style: PromptStyle,
    task: str,
    outcome: Outcome,
    steps: Sequence[StepText],
    fits: Callable[[str], bool],
    *,
    step_skills: int = 0,
) -> str | None:
    """Build the analyzer's one user message as text (see `analysis_parts`)."""
    parts = analysis_parts(style, task, outcome, steps, lambda parts: fits(as_text(parts)), step_skills=step_skills)
    return None if parts is None else as_text(parts)
