"""The words of the game: the two vocabularies of ALFWorld's releases, and how lists are printed."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal, get_args

VocabularyName = Literal["move", "put"]

HEADER: Final = "-= Welcome to TextWorld, ALFRED! =-\n\n"
NOTHING_HAPPENS: Final = "Nothing happens."
MIDDLE_OF_ROOM: Final = "You are in the middle of a room. Looking quickly around you, you see "


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """One release's words. `place_between` stands between object and receptacle in the command that puts down."""

    place_verb: str
    place_between: str
    told_between: str
    arrive_at_location: bool
    help_line: str

    def place(self, item: str, receptacle: str) -> str:
        """Return the command that puts `item` down."""
        return f"{self.place_verb} {item}{self.place_between}{receptacle}"


VOCABULARIES: Final[dict[str, Vocabulary]] = {
    "move": Vocabulary("move", " to ", " to the ", False, "move (object) to (receptacle):  "),
    "put": Vocabulary("put", " in/on ", " in/on the ", True, "put (object) in/on (receptacle):  "),
}
"""`move` is ALFWorld 0.4; `put` is the older one of most papers and skill files."""


def vocabulary_name(name: str) -> VocabularyName:
    """Return `name` if it is that of a vocabulary. Raises ValueError otherwise."""
    for known in get_args(VocabularyName):
        if name == known:
            found: VocabularyName = known
            return found
    raise ValueError(f"vocabulary is {name!r}: the rule is one of {', '.join(VOCABULARIES)}")


_HELP_BEFORE = (
    ("look:", "look around your current location"),
    ("inventory:", "check your current inventory"),
    ("go to (receptacle):", "move to a receptacle"),
    ("open (receptacle):", "open a receptacle"),
    ("close (receptacle):", "close a receptacle"),
    ("take (object) from (receptacle):", "take an object from a receptacle"),
)
_HELP_AFTER = (
    ("examine (something):", "examine a receptacle or an object"),
    ("use (object):", "use an object"),
    ("heat (object) with (receptacle):", "heat an object using a receptacle"),
    ("clean (object) with (receptacle):", "clean an object using a receptacle"),
    ("cool (object) with (receptacle):", "cool an object using a receptacle"),
    ("slice (object) with (object):", "slice an object using a sharp object"),
)


def help_text(words: Vocabulary) -> str:
    """Return the answer to `help`. The line of the placing command is out of column in the original too."""
    before = "".join(f"  {left:<34}{right}\n" for left, right in _HELP_BEFORE)
    after = "".join(f"  {left:<34}{right}\n" for left, right in _HELP_AFTER)
    return f"Available commands:\n{before}  {words.help_line}place an object in or on a receptacle\n{after}"


def listed(names: Sequence[str]) -> str:
    """Return `nothing`, `x`, or `x, y, and z`; the comma before `and` stands even between two."""
    if len(names) > 1:
        return ", ".join(names[:-1]) + ", and " + names[-1]
    return names[0] if names else "nothing"
