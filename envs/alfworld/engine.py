"""Plays a game: the state, the commands that act on it, and the text that the real engine prints for each.

Nothing is searched: a command is matched to a verb and up to two entities, checked against the state and applied.
"""

from collections.abc import Callable
from typing import NamedTuple

from seed_async.envs.alfworld.board import NOBODY, Board
from seed_async.envs.alfworld.model import CLEAN, COOL, HOT, KNIVES, SLICED, TOGGLED
from seed_async.envs.alfworld.vocabulary import MIDDLE_OF_ROOM, NOTHING_HAPPENS, listed

OBJECT_TEXTS = (
    (CLEAN | HOT | SLICED, "This is a hot and clean sliced {}."),
    (CLEAN | COOL | SLICED, "This is a cool and clean sliced {}."),
    (CLEAN | SLICED, "This is a clean sliced {}."),
    (HOT | SLICED, "This is a hot sliced {}."),
    (COOL | SLICED, "This is a cool sliced {}."),
    (CLEAN | HOT, "This is a hot and clean {}."),
    (CLEAN | COOL, "This is a cool and clean {}."),
    (HOT, "This is a hot {}."),
    (CLEAN, "This is a clean {}."),
    (COOL, "This is a cold {}."),
)
"""What `examine` says of an object; the first line whose bits are all set."""


class Seen(NamedTuple):
    """What a player is shown after a command: the text, the commands that act now (without `help`), and two flags."""

    text: str
    admissible: tuple[str, ...]
    won: bool
    valid: bool


class Engine:
    """One running game. `play` takes any string and never raises."""

    def __init__(self, board: Board) -> None:
        """Start the game of `board`."""
        self.board = board
        self._verbs: dict[str, Callable[[str], str | None]] = {
            "go": self._go,
            "open": self._open,
            "close": self._close,
            "take": self._take,
            board.words.place_verb: self._place,
            "use": self._use,
            "clean": lambda rest: self._process(rest, "clean", CLEAN, 0),
            "heat": lambda rest: self._process(rest, "heat", HOT, COOL),
            "cool": lambda rest: self._process(rest, "cool", COOL, HOT),
            "slice": self._slice,
            "examine": self._examine,
            "look": self._look,
            "inventory": self._inventory,
            "help": lambda rest: None if rest else self.board.help,
        }
        self.reset()

    def reset(self) -> str:
        """Go back to the start and return the first observation."""
        board = self.board
        self.location = board.game.start
        self.held = NOBODY
        self.opened = list(board.opened)
        self.contents = list(board.contents)
        self.states = list(board.states)
        # Where the game's facts say that an object stands; what a knife can slice and a later `look` can list.
        self.standing = list(board.standing)
        # The receptacles that an object was taken from and not put back to. The real engine lists such an object as
        # lying "next to" a receptacle that it was taken from once it stands at the same location again.
        self.left: dict[int, set[int]] = {}
        self.valid = True
        return board.first_text

    def play(self, command: str) -> str:
        """Apply one command and return the observation. `valid` tells whether it acted."""
        verb, _, rest = command.strip().partition(" ")
        act = self._verbs.get(verb)
        text = None if act is None else act(rest)
        self.valid = text is not None
        return NOTHING_HAPPENS if text is None else text

    def seen(self, text: str) -> Seen:
        """Return `text`, just printed, with what else a player is shown."""
        return Seen(text, self.admissible(), self.won, self.valid)

    def admissible(self) -> tuple[str, ...]:
        """Return the sorted commands that act now, without `help`."""
        here = self.board.here[self.location]
        places = tuple([(self.opened[place], self.contents[place]) for place in here])
        found = self.board.admissible(self.location, self.held, places)
        if self.held != NOBODY and self.board.game.items[self.held].kind in KNIVES:
            knife = self.board.item_names[self.held]
            cuts = [f"slice {self.board.item_names[item]} with {knife}" for item in self._sliceable_here()]
            return tuple(sorted((*found, *cuts)))
        return found

    @property
    def won(self) -> bool:
        """Whether the goal holds now."""
        items, goal = self.board.game.items, self.board.game.goal
        if goal.lamp:
            if self.held == NOBODY or items[self.held].kind != goal.item:
                return False
            return any(
                items[item].kind == goal.lamp and self.states[item] & TOGGLED and items[item].toggleable
                for place in self.board.here[self.location]
                for item in self.contents[place]
            )
        state, states = goal.state, self.states
        for place in self.board.goal_places:
            found = 0
            for item in self.contents[place]:
                if items[item].kind == goal.item and states[item] & state == state:
                    found += state == 0 or items[item].can_become(state)
            if found >= goal.count:
                return True
        return False

    def _sliceable_here(self) -> list[int]:
        items = self.board.game.items
        return [item for item, where in enumerate(self.standing) if self.location in where and items[item].sliceable]

    def _place_here(self, name: str) -> int | None:
        """Return the receptacle called `name` if it is at the agent's location."""
        place = self.board.receptacle_of.get(name)
        if place is None or self.board.game.receptacles[place].location != self.location:
            return None
        return place

    def _reachable(self, place: int) -> bool:
        return self.opened[place] or not self.board.game.receptacles[place].openable

    def _describe(self, place: int) -> str:
        return self.board.describe(place, self.opened[place], self.contents[place])

    def _go(self, rest: str) -> str | None:
        place = self.board.receptacle_of.get(rest[3:]) if rest.startswith("to ") else None
        if place is None or self.board.game.receptacles[place].location == self.location:
            return None
        self.location = self.board.game.receptacles[place].location
        return self.board.arrivals[place] + self._describe(place)

    def _open(self, rest: str) -> str | None:
        place = self._place_here(rest)
        if place is None or self._reachable(place):
            return None
        self.opened[place] = True
        return f"You open the {rest}. {self._describe(place)}"

    def _close(self, rest: str) -> str | None:
        place = self._place_here(rest)
        if place is None or not self.opened[place] or not self.board.game.receptacles[place].openable:
            return None
        self.opened[place] = False
        return f"You close the {rest}."

    def _take(self, rest: str) -> str | None:
        name, _, source = rest.partition(" from ")
        item, place = self.board.item_of.get(name), self._place_here(source)
        if item is None or place is None or self.held != NOBODY or item not in self.contents[place]:
            return None
        if not self._reachable(place) or not self.board.game.items[item].pickupable:
            return None
        self.contents[place] = tuple([other for other in self.contents[place] if other != item])
        self.standing[item] = self.standing[item] - {self.location}
        self.left.setdefault(item, set()).add(place)
        self.held = item
        return f"You pick up the {name} from the {source}."

    def _place(self, rest: str) -> str | None:
        words = self.board.words
        name, _, target = rest.partition(words.place_between)
        item, place = self.board.item_of.get(name), self._place_here(target)
        if item is None or item != self.held or place is None or not self._reachable(place):
            return None
        if not self.board.game.can_hold(place, item):
            return None
        # An object that stood in two receptacles may be put back beside its other self.
        self.contents[place] = tuple(sorted({*self.contents[place], item}))
        self.standing[item] = self.standing[item] | {self.location}
        self.left.get(item, set()).discard(place)
        self.held = NOBODY
        return f"You {words.place_verb} the {name}{words.told_between}{target}."

    def _use(self, rest: str) -> str | None:
        item = self.board.item_of.get(rest)
        if item is None or not self.board.game.items[item].toggleable:
            return None
        if not any(item in self.contents[place] for place in self.board.here[self.location]):
            return None
        self.states[item] |= TOGGLED
        return f"You turn on the {rest}."

    def _process(self, rest: str, verb: str, gained: int, lost: int) -> str | None:
        name, _, tool = rest.partition(" with ")
        item, place = self.board.item_of.get(name), self._place_here(tool)
        if item is None or item != self.held or place is None:
            return None
        if place not in self.board.process_place(item, self.location, gained):
            return None
        self.states[item] = self.states[item] & ~lost | gained
        return f"You {verb} the {name} using the {tool}."

    def _slice(self, rest: str) -> str | None:
        name, _, tool = rest.partition(" with ")
        item, knife = self.board.item_of.get(name), self.board.item_of.get(tool)
        items = self.board.game.items
        if item is None or knife is None or knife != self.held or items[knife].kind not in KNIVES:
            return None
        if not items[item].sliceable or self.location not in self.standing[item]:
            return None
        self.states[item] |= SLICED
        return f"You sliced the {name} with the {tool}."

    def _examine(self, rest: str) -> str | None:
        place = self._place_here(rest)
        if place is not None:
            return self._describe(place)
        item = self.board.item_of.get(rest)
        if item is None or item != self.held:
            return None
        held = self.board.game.items[item]
        if held.container:
            return f"This is a normal {rest}. In it, you see nothing."
        state = self.states[item]
        for bits, text in OBJECT_TEXTS:
            if state & bits == bits:
                return text.format(rest)
        if state & TOGGLED and held.toggleable:
            return f"This {rest} is on."
        if state & SLICED and held.sliceable:
            return f"This is a sliced {rest}."
        return f"There's nothing special about {rest}."

    def _inventory(self, rest: str) -> str | None:
        if rest:
            return None
        if self.held == NOBODY:
            return "You are not carrying anything."
        return f"You are carrying: a {self.board.item_names[self.held]}."

    def _look(self, rest: str) -> str | None:
        if rest:
            return None
        here = self.board.here[self.location]
        if not here:
            return f"{MIDDLE_OF_ROOM}nothing."
        beside = [
            "a " + self.board.item_names[item]
            for item in sorted(self.left)
            if self.location in self.standing[item]
            for place in here
            if place in self.left[item]
        ]
        return f"You are facing the {self.board.names_of(here)}. Next to it, you see {listed(beside)}."
