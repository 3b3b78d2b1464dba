"""Reads a task sentence back into its parts."""

import re
from dataclasses import dataclass
from typing import Final

_PATTERNS: Final = tuple(
    (re.compile(rf"^{pattern}\.?$"), process, count)
    for pattern, process, count in (
        (r"(?:look at|examine the) (?P<item>\w+) (?:under|with) the (?P<lamp>\w+)", "", 1),
        (r"(?:put a clean|clean some) (?P<item>\w+) (?:in|and put it in) (?P<receptacle>\w+)", "clean", 1),
        (r"(?:put a hot|heat some) (?P<item>\w+) (?:in|and put it in) (?P<receptacle>\w+)", "heat", 1),
        (r"(?:put a cool|cool some) (?P<item>\w+) (?:in|and put it in) (?P<receptacle>\w+)", "cool", 1),
        (r"(?:put two|find two) (?P<item>\w+) (?:in|and put them in) (?P<receptacle>\w+)", "", 2),
        (r"put (?:a|some) (?P<item>\w+) (?:in|on) (?P<receptacle>\w+)", "", 1),
    )
)
_PROCESSORS: Final = {"clean": "sinkbasin", "heat": "microwave", "cool": "fridge"}


@dataclass(frozen=True, slots=True)
class TaskWords:
    """What a task sentence asks for. `process` is `clean`, `heat`, `cool` or empty."""

    item: str
    receptacle: str
    lamp: str
    process: str
    count: int

    @property
    def processor(self) -> str:
        """The receptacle type that does the process."""
        return _PROCESSORS.get(self.process, "")


def read_task(sentence: str) -> TaskWords:
    """Return the parts of a task in one of ALFWorld's wordings. Raises ValueError for any other sentence."""
    for pattern, process, count in _PATTERNS:
        match = pattern.match(sentence)
        if match is not None:
            parts = match.groupdict()
            return TaskWords(parts["item"], parts.get("receptacle", ""), parts.get("lamp", ""), process, count)
    raise ValueError(f"the task {sentence!r} is in none of ALFWorld's wordings")
