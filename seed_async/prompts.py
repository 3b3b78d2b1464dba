"""The acting prompts, in the style and layout that the topology names, where a skill goes, and how a response is read.

`full` is for instruction-tuned models: it explains the rules and lists the admissible commands. `compact` holds the
task and the observations only: a model of a few million parameters learns the rules in Stage 1 and pays for each token.
"""

import re
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

PromptStyle = Literal["full", "compact"]

YOUR_TURN = (
    "Now it is your turn. Reason step by step inside <think> </think>, "
    "then give exactly one admissible action inside <action> </action>."
)
_INTRODUCTION = (
    "You are an agent in a text world of one household room. You see what is around you and act with short commands."
)
_BANNER = "-= Welcome to TextWorld, ALFRED! =-"
_TASK_SENTENCE = re.compile(r"\n*Your task is to: .*", re.DOTALL)
_THINK_TAG = re.compile(r"<(/?)think>", re.IGNORECASE)
_ACTION_TAG = re.compile(r"<(/?)action>", re.IGNORECASE)
_NO_ACTION = "(no action understood)"
_HELP = "help"
"""Some engines list it among the commands; it tells the agent nothing that the prompt does not."""


class FirstPrompt(NamedTuple):
    """The first user message, and the line of it that holds the task (where a skill is inserted)."""

    text: str
    task_line: str


class PastStep(NamedTuple):
    """One step of the history block: what was seen, and the command that was played (empty: none was understood)."""

    observation: str
    action: str


class ParsedAction(NamedTuple):
    """The command to play, and whether the response counts as holding exactly one."""

    command: str
    parsed: bool


def plain_observation(text: str) -> str:
    """Return an ALFWorld observation without the banner and the task sentence, which the prompt states itself."""
    return _TASK_SENTENCE.sub("", text.replace(_BANNER, "")).strip()


def _turn_lines(style: PromptStyle, observation: str, admissible: Sequence[str]) -> list[str]:
    """What is seen now and, in the full style, what can be done. An environment of free text lists no commands."""
    scene = plain_observation(observation)
    if style == "compact":
        return [scene]
    commands = ", ".join(command for command in admissible if command != _HELP)
    listed = [f"Admissible actions: [{commands}]"] if commands else []
    return [f"Observation: {scene}", *listed, YOUR_TURN]


def task_line(task: str) -> str:
    """The line of an opening message that holds the task."""
    return f"Task: {task}"


def first_prompt(style: PromptStyle, task: str, observation: str, admissible: Sequence[str]) -> FirstPrompt:
    """Build the first user message of an episode."""
    return _opening(style, task, [], observation, admissible)


def next_prompt(style: PromptStyle, observation: str, admissible: Sequence[str]) -> str:
    """Build the user message of a later turn."""
    return "\n".join(_turn_lines(style, observation, admissible))


def _opening(
    style: PromptStyle, task: str, history: Sequence[str], observation: str, admissible: Sequence[str]
) -> FirstPrompt:
    line = task_line(task)
    introduction = [_INTRODUCTION] if style == "full" else []
    turn = _turn_lines(style, observation, admissible)
    return FirstPrompt("\n".join([*introduction, line, *history, *turn]), line)


def _history_lines(style: PromptStyle, past: Sequence[PastStep], shown: int) -> list[str]:
    lines = [f"Steps so far: {len(past)}. The last {shown}:"] if style == "full" and shown else []
    for index in range(len(past) - shown, len(past)):
        observation, action = plain_observation(past[index].observation), past[index].action or _NO_ACTION
        if style == "compact":
            lines += [observation, f"> {action}"]
        else:
            lines += [f"[{index}] Observation: {observation}", f"[{index}] Action: {action}"]
    return lines


def windowed_prompt(
    style: PromptStyle,
    task: str,
    past: Sequence[PastStep],
    window: int,
    observation: str,
    admissible: Sequence[str],
    fits: Callable[[str], bool],
) -> FirstPrompt | None:
    """Build the one user message of a step in the windowed layout; None when it does not fit even without history.

    `past` holds every step before this one; the last `window` are shown, fewer when that would not fit (`fits` tells
    whether a text is short enough). At the first step it is the message of `first_prompt`.
    """
    for shown in range(min(window, len(past)), -1, -1):
        prompt = _opening(style, task, _history_lines(style, past, shown), observation, admissible)
        if fits(prompt.text):
            return prompt
    return None


def action_response(command: str) -> str:
    """The response of a demonstration."""
    return f"<action>{command}</action>"


def _without_thinking(response: str) -> str:
    """The response without its reasoning.

    Reasoning runs from `<think>` to the next `</think>`, or to the end when it was cut off. Before a `</think>` that
    nothing opened everything is reasoning: some chat templates write the `<think>` into the prompt.
    """
    spoken: list[str] = []
    thinking, start = False, 0
    for tag in _THINK_TAG.finditer(response):
        if tag[1]:
            spoken = spoken if thinking else []
            thinking, start = False, tag.end()
        elif not thinking:
            spoken.append(response[start : tag.start()])
            thinking = True
    return " ".join(spoken if thinking else [*spoken, response[start:]])


def parse_action(response: str, admissible: Sequence[str] = (), *, strict: bool = False) -> ParsedAction:
    """Read the one `<action>` that a response holds outside its reasoning, white space made single spaces.

    None, several, stray tags or an empty one is unparsable and plays the empty command. Tags may be in any case, and a
    command that differs from an admissible one in case only is that one. `strict`: a command that is not admissible is
    played as it is and counts as unparsable (without effect where the environment lists no commands).
    """
    text = _without_thinking(response)
    tags = list(_ACTION_TAG.finditer(text))
    if [tag[1] for tag in tags] != ["", "/"]:
        return ParsedAction("", parsed=False)
    command = " ".join(text[tags[0].end() : tags[1].start()].split())
    if command not in admissible:
        command = {each.lower(): each for each in admissible}.get(command.lower(), command)
    refused = strict and bool(admissible) and command not in admissible
    return ParsedAction(command, parsed=bool(command) and not refused)


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
