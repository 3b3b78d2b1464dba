"""Reads the analyzer's answer: a tolerant parser for one JSON object with a summary, a skill and maybe step skills.

Language models wrap JSON in fences and prose, leave trailing commas and use single quotes; all of these are read. The
work is bounded, so hostile output costs milliseconds.
"""

import ast
import json
import re
from typing import Any, NamedTuple

from seed_async.messages import StepSkill

MAX_ANSWER_CHARACTERS = 65536
MAX_CANDIDATES = 16
"""An answer holds one object; a few more are looked at because prose may contain braces."""
_TRAILING_COMMA = re.compile(r",(\s*[}\]])")


class ParsedSkill(NamedTuple):
    """The fields of an analysis."""

    episode_summary: str
    episode_skill: str
    step_skills: tuple[StepSkill, ...] = ()


def _objects(text: str) -> list[str]:
    """Return the outermost `{...}` substrings, braces inside strings not counted."""
    found: list[str] = []
    start, depth, quoted, escaped = 0, 0, False, False
    for position, character in enumerate(text):
        if quoted:
            quoted = escaped or character != '"'
            escaped = character == "\\" and not escaped
        elif character == '"' and depth:
            quoted, escaped = True, False
        elif character == "{":
            start = start if depth else position
            depth += 1
        elif character == "}" and depth:
            depth -= 1
            if depth == 0:
                found.append(text[start : position + 1])
                if len(found) == MAX_CANDIDATES:
                    break
    return found


def _loads(text: str) -> Any:
    """JSON, with raw line breaks in strings forgiven."""
    return json.loads(text, strict=False)


def _read_object(text: str) -> dict[str, Any] | None:
    # The repair comes last, because it would also change a text that holds a comma before a bracket.
    for read in (_loads, ast.literal_eval, lambda raw: _loads(_TRAILING_COMMA.sub(r"\1", raw))):
        try:
            value = read(text)
        # literal_eval reads single-quoted dictionaries; all report bad or too deeply nested input in these ways.
        except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
            continue
        if isinstance(value, dict):
            return value
    return None


def parse_analysis(answer: str, num_steps: int = 0, max_step_skills: int = 0) -> ParsedSkill | None:
    """Return the first object that has a non-empty `episode_skill` string, or None.

    Of `step_skills`, a list of {"step": int, "skill": str}, at most `max_step_skills` are kept: the first entry of each
    of the `num_steps` steps of the trajectory. Entries that are anything else are left out, never the whole answer.
    """
    for candidate in _objects(answer[:MAX_ANSWER_CHARACTERS]):
        value = _read_object(candidate)
        if value is None:
            continue
        skill, summary = value.get("episode_skill"), value.get("episode_summary", "")
        if isinstance(skill, str) and skill.strip():
            steps = _step_skills(value.get("step_skills"), num_steps)[:max_step_skills]
            return ParsedSkill(_clean(summary) if isinstance(summary, str) else "", _clean(skill), steps)
    return None


def _step_skills(entries: object, num_steps: int) -> tuple[StepSkill, ...]:
    found: dict[int, StepSkill] = {}
    for entry in entries if isinstance(entries, list) else ():
        step, skill = (entry.get("step"), entry.get("skill")) if isinstance(entry, dict) else (None, None)
        if type(step) is not int or step not in range(num_steps) or not isinstance(skill, str):  # True is an int too
            continue
        text = _clean(skill)
        if text and step not in found:
            found[step] = StepSkill(step=step, skill=text)
    return tuple(found.values())


def _clean(text: str) -> str:
    """One line; halves of surrogate pairs, which an escape can make and UTF-8 cannot hold, become question marks."""
    return " ".join(text.encode("utf-8", "replace").decode().split())
