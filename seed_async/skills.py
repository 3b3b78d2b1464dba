"""Reads the analyzer's answer: a tolerant parser for one JSON object with `episode_summary` and `episode_skill`.

Language models wrap JSON in fences and prose, leave trailing commas and use single quotes; all of these are read. The
work is bounded, so hostile output costs milliseconds.
"""

import ast
import json
import re
from typing import Any, NamedTuple

MAX_ANSWER_CHARACTERS = 65536
MAX_CANDIDATES = 16
"""An answer holds one object; a few more are looked at because prose may contain braces."""
_TRAILING_COMMA = re.compile(r",(\s*[}\]])")


class ParsedSkill(NamedTuple):
    """The two fields of an analysis."""

    episode_summary: str
    episode_skill: str


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


def _read_object(text: str) -> dict[str, Any] | None:
    # The repair comes last, because it would also change a text that holds a comma before a bracket.
    for read in (json.loads, ast.literal_eval, lambda raw: json.loads(_TRAILING_COMMA.sub(r"\1", raw))):
        try:
            value = read(text)
        # literal_eval reads single-quoted dictionaries; all report bad or too deeply nested input in these ways.
        except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
            continue
        if isinstance(value, dict):
            return value
    return None


def parse_analysis(answer: str) -> ParsedSkill | None:
    """Return the first object that has a non-empty `episode_skill` string, or None."""
    for candidate in _objects(answer[:MAX_ANSWER_CHARACTERS]):
        value = _read_object(candidate)
        if value is None:
            continue
        skill, summary = value.get("episode_skill"), value.get("episode_summary", "")
        if isinstance(skill, str) and skill.strip():
            return ParsedSkill(_clean(summary) if isinstance(summary, str) else "", _clean(skill))
    return None


def _clean(text: str) -> str:
    """One line; halves of surrogate pairs, which an escape can make and UTF-8 cannot hold, become question marks."""
    return " ".join(text.encode("utf-8", "replace").decode().split())
