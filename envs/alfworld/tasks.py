"""Task sentences: ALFWorld's wordings, where a grammar holds one, and reading one back into its parts."""

import re
from dataclasses import dataclass
from typing import Final

TEMPLATES: Final = {
    "pick_and_place_simple": ("put a {item} in {receptacle}", "put some {item} on {receptacle}"),
    "look_at_obj_in_light": ("look at {item} under the {lamp}", "examine the {item} with the {lamp}"),
    "pick_clean_then_place_in_recep": (
        "put a clean {item} in {receptacle}",
        "clean some {item} and put it in {receptacle}",
    ),
    "pick_heat_then_place_in_recep": (
        "put a hot {item} in {receptacle}",
        "heat some {item} and put it in {receptacle}",
    ),
    "pick_cool_then_place_in_recep": (
        "put a cool {item} in {receptacle}",
        "cool some {item} and put it in {receptacle}",
    ),
    "pick_two_obj_and_place": ("put two {item} in {receptacle}", "find two {item} and put them in {receptacle}"),
}
"""ALFWorld's wording of each task."""

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
_IN_GRAMMAR: Final = re.compile(r"Your task is to: (.*?)\.\s*\"")
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


def sentence_in_grammar(grammar: str) -> str:
    """Return the task sentence of a game file's grammar, without its full stop; empty when there is none."""
    match = _IN_GRAMMAR.search(grammar)
    return match[1] if match else ""


def read_task(sentence: str) -> TaskWords:
    """Return the parts of a task in one of ALFWorld's wordings. Raises ValueError for any other sentence."""
    for pattern, process, count in _PATTERNS:
        match = pattern.match(sentence)
        if match is not None:
            parts = match.groupdict()
            return TaskWords(parts["item"], parts.get("receptacle", ""), parts.get("lamp", ""), process, count)
    raise ValueError(f"the task {sentence!r} is in none of ALFWorld's wordings")
