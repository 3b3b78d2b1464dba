"""Every prompt of the system, in the style that the topology names, and how a response is read.

`full` is for instruction-tuned models: it explains the rules and lists the admissible commands. `compact` holds the
task and the observations only: a model of a few million parameters learns the rules in Stage 1 and pays for each token.
"""

import re
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

PromptStyle = Literal["full", "compact"]
Outcome = Literal["success", "failure", "unknown"]

YOUR_TURN = (
    "Now it is your turn. Reason step by step inside <think> </think>, "
    "then give exactly one admissible action inside <action> </action>."
)
_INTRODUCTION = (
    "You are an agent in a text world of one household room. You see what is around you and act with short commands."
)
_BANNER = "-= Welcome to TextWorld, ALFRED! =-"
_TASK_SENTENCE = re.compile(r"\n*Your task is to: .*", re.DOTALL)
_ACTION = re.compile(r"<action>(.*?)</action>", re.DOTALL)


class FirstPrompt(NamedTuple):
    """The first user message, and the line of it that holds the task (where a skill is inserted)."""

    text: str
    task_line: str


class StepText(NamedTuple):
    """One step of a finished trajectory, as the analyzer reads it."""

    observation: str
    response: str
    valid: bool


class ParsedAction(NamedTuple):
    """The command to play, and whether the response held exactly one."""

    command: str
    parsed: bool


def plain_observation(text: str) -> str:
    """Return an ALFWorld observation without the banner and the task sentence, which the prompt states itself."""
    return _TASK_SENTENCE.sub("", text.replace(_BANNER, "")).strip()


def _admissible(commands: Sequence[str]) -> str:
    return f"Admissible actions: [{', '.join(commands)}]"


def first_prompt(style: PromptStyle, task: str, observation: str, admissible: Sequence[str]) -> FirstPrompt:
    """Build the first user message of an episode."""
    task_line = f"Task: {task}"
    scene = plain_observation(observation)
    if style == "compact":
        return FirstPrompt(f"{task_line}\n{scene}", task_line)
    return FirstPrompt(
        "\n".join([_INTRODUCTION, task_line, f"Observation: {scene}", _admissible(admissible), YOUR_TURN]), task_line
    )


def next_prompt(style: PromptStyle, observation: str, admissible: Sequence[str]) -> str:
    """Build the user message of a later turn."""
    scene = plain_observation(observation)
    return scene if style == "compact" else "\n".join([f"Observation: {scene}", _admissible(admissible), YOUR_TURN])


def action_response(command: str) -> str:
    """The response of a demonstration."""
    return f"<action>{command}</action>"


def parse_action(response: str) -> ParsedAction:
    """Read the one `<action>` of a response; none, several, stray tags or an empty one is unparsable: plays nothing."""
    found = _ACTION.findall(response)
    single = len(found) == response.count("<action>") == response.count("</action>") == 1
    command = " ".join(found[0].split()) if single else ""
    return ParsedAction(command, bool(command))


def insert_skill(prompt: str, task_line: str, skill: str) -> str:
    """Return H(h, s): the prompt with a titled skill section, every other byte unchanged.

    The section stands right after the task's line, otherwise before the final "your turn" line, otherwise at the end
    (algorithm specification, section 5).
    """
    section = f"Skill: {skill}"
    lines = prompt.split("\n")
    if task_line in lines:
        position = lines.index(task_line) + 1
    elif YOUR_TURN in lines:
        position = len(lines) - 1 - lines[::-1].index(YOUR_TURN)
    else:
        position = len(lines)
    return "\n".join([*lines[:position], section, *lines[position:]])


_ANALYSIS_FULL = """\
You analyse a finished episode of an agent so that the next attempt goes better. \
Answer with one JSON object only, no other text.
Fields:
- "episode_summary": what happened, in one or two sentences.
- "episode_skill": {skill_meaning}
Constraints: short, reusable, addressed to the agent, no retelling of the episode in the skill.
Schema: {{"episode_summary": "string", "episode_skill": "string"}}"""
_ANALYSIS_COMPACT = "Analyse the episode. Answer in JSON: episode_summary, episode_skill."
_SKILL_MEANING: dict[Outcome, str] = {
    "success": "the workflow: the core decision rule and the order of actions that made it work.",
    "failure": "an avoidance rule: the core mistake and its warning sign.",
    "unknown": "the rule that the evidence supports best: what to repeat or what to avoid.",
}


def _step_lines(style: PromptStyle, index: int, step: StepText) -> str:
    note = "" if step.valid else " (invalid)"
    observation = plain_observation(step.observation)
    if style == "compact":
        return f"[{index}] {observation}\n{step.response}{note}"
    return f"[{index}] Observation: {observation}\n[{index}] Response: {step.response}\n[{index}] Valid: {step.valid}"


def analysis_prompt(
    style: PromptStyle, task: str, outcome: Outcome, steps: Sequence[StepText], fits: Callable[[str], bool]
) -> str | None:
    """Build the analyzer's one user message; None when not even the first and the last step fit.

    When the whole does not fit, middle steps are left out and the text says so; the front is never cut (algorithm
    specification, section 5). `fits` tells whether a text is short enough.
    """
    head = _ANALYSIS_COMPACT if style == "compact" else _ANALYSIS_FULL.format(skill_meaning=_SKILL_MEANING[outcome])
    lines = [_step_lines(style, index, step) for index, step in enumerate(steps)]

    def build(kept: int) -> str:
        first, last = (kept + 1) // 2, kept // 2
        left_out = len(lines) - kept
        middle = [f"({left_out} steps left out)"] if left_out else []
        body = [*lines[:first], *middle, *lines[len(lines) - last :]]
        return "\n".join([head, f"Task: {task}", f"Outcome: {outcome}", *body])

    if fits(build(len(lines))):
        return build(len(lines))
    low, high = 2, len(lines) - 1  # the largest number of steps that fits, by bisection
    while low < high:
        kept = (low + high + 1) // 2
        low, high = (kept, high) if fits(build(kept)) else (low, kept - 1)
    return build(low) if high >= 2 and fits(build(low)) else None
