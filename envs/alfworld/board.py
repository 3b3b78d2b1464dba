"""What does not change while a game is played: the names, the commands and texts derived from them, and caches.

The admissible list and the text of a receptacle are pure functions of a small part of the state, so each is computed
once for every value of that part that play reaches.
"""

from typing import Final

from seed_async.envs.alfworld.model import CLEAN, COOL, HOT, PROCESSOR, Game, numbered_names
from seed_async.envs.alfworld.vocabulary import HEADER, MIDDLE_OF_ROOM, VOCABULARIES, VocabularyName, help_text, listed

NOBODY: Final = -1
"""Stands for the held object when the hands are empty."""

MAX_CACHED: Final = 4096
"""Entries of a cache before it is emptied; an episode reaches some dozens."""

Contents = tuple[int, ...]
PlaceState = tuple[bool, Contents]
"""Whether a receptacle is open, and the sorted objects in it."""


class Board:
    """A game indexed for play in one vocabulary. Engines of the same game share it."""

    def __init__(self, game: Game, vocabulary: VocabularyName) -> None:
        """Index `game`."""
        self.game = game
        self.words = VOCABULARIES[vocabulary]
        names = numbered_names(game)
        self.receptacle_names = tuple(names[place.id] for place in game.receptacles)
        self.item_names = tuple(names[item.id] for item in game.items)
        self.receptacle_of = {name: place for place, name in enumerate(self.receptacle_names)}
        self.item_of = {name: item for item, name in enumerate(self.item_names)}
        here: list[list[int]] = [[] for _ in game.locations]
        for place, receptacle in enumerate(game.receptacles):
            here[receptacle.location].append(place)
        self.here = tuple(map(tuple, here))
        self.contents = self._initial_contents()
        self.goal_places = tuple(n for n, place in enumerate(game.receptacles) if place.kind == game.goal.receptacle)
        self.opened = tuple(place.opened for place in game.receptacles)
        self.states = tuple(item.state for item in game.items)
        self.standing = tuple(item.locations for item in game.items)
        self.first_text = f"{HEADER}{self._first_look()}\n\nYour task is to: {game.task}."
        self.help = help_text(self.words)
        self.arrivals = self._arrivals(names)
        self._texts: dict[tuple[int, bool, Contents], str] = {}
        self._admissible: dict[tuple[int, int, tuple[PlaceState, ...]], tuple[str, ...]] = {}

    def _initial_contents(self) -> tuple[Contents, ...]:
        contents: list[list[int]] = [[] for _ in self.game.receptacles]
        for number, item in enumerate(self.game.items):
            for place in item.receptacles:
                contents[place].append(number)
        return tuple(map(tuple, contents))

    def _arrivals(self, names: dict[str, str]) -> tuple[str, ...]:
        if not self.words.arrive_at_location:
            return tuple(f"You arrive at {name}. " for name in self.receptacle_names)
        locations = self.game.locations
        return tuple(f"You arrive at {names[locations[place.location]]}. " for place in self.game.receptacles)

    def _first_look(self) -> str:
        facing = self.here[self.game.start]
        if facing:
            return f"You are facing the {self.names_of(facing)}. Next to it, you see nothing."
        return f"{MIDDLE_OF_ROOM}{listed(['a ' + name for name in self.receptacle_names])}."

    def names_of(self, places: tuple[int, ...]) -> str:
        """Return the printed list of receptacle names."""
        return listed([self.receptacle_names[place] for place in places])

    def describe(self, place: int, opened: bool, contents: Contents) -> str:
        """Return what `examine` prints for a receptacle in the given state."""
        key = (place, opened, contents)
        text = self._texts.get(key)
        if text is None:
            name = self.receptacle_names[place]
            inside = listed(["a " + self.item_names[item] for item in contents])
            if not self.game.receptacles[place].openable:
                text = f"On the {name}, you see {inside}."
            else:
                text = f"The {name} is open. In it, you see {inside}." if opened else f"The {name} is closed."
            if len(self._texts) >= MAX_CACHED:
                self._texts.clear()
            self._texts[key] = text
        return text

    def process_place(self, item: int, location: int, state: int) -> list[int]:
        """Return the receptacles at `location` that bring `item` to `state`, one of CLEAN, HOT and COOL."""
        if not self.game.items[item].can_become(state):
            return []
        return [place for place in self.here[location] if self.game.receptacles[place].kind == PROCESSOR[state]]

    def admissible(self, location: int, held: int, places: tuple[PlaceState, ...]) -> tuple[str, ...]:
        """Return the sorted commands that act at `location`, whose receptacles are in the states `places`.

        Slicing is left out: it depends on more than these arguments.
        """
        key = (location, held, places)
        found = self._admissible.get(key)
        if found is None:
            commands = {"inventory", "look"}
            commands.update(self._travel_and_examine(location))
            if held != NOBODY:
                commands.update(self._with_held(location, held))
            for place, (opened, contents) in zip(self.here[location], places, strict=True):
                commands.update(self._at_place(place, held, opened, contents))
            if len(self._admissible) >= MAX_CACHED:
                self._admissible.clear()
            found = self._admissible[key] = tuple(sorted(commands))
        return found

    def _travel_and_examine(self, location: int) -> list[str]:
        here = self.here[location]
        return [f"{'examine' if place in here else 'go to'} {name}" for place, name in enumerate(self.receptacle_names)]

    def _with_held(self, location: int, held: int) -> list[str]:
        name = self.item_names[held]
        commands = [f"examine {name}"]
        for verb, state in (("clean", CLEAN), ("heat", HOT), ("cool", COOL)):
            for place in self.process_place(held, location, state):
                commands.append(f"{verb} {name} with {self.receptacle_names[place]}")
        return commands

    def _at_place(self, place: int, held: int, opened: bool, contents: Contents) -> list[str]:
        items, name = self.game.items, self.receptacle_names[place]
        openable = self.game.receptacles[place].openable
        commands = [f"use {self.item_names[item]}" for item in contents if items[item].toggleable]
        if openable:
            commands.append(f"{'close' if opened else 'open'} {name}")
        if opened or not openable:
            if held != NOBODY:
                if self.game.can_hold(place, held):
                    commands.append(self.words.place(self.item_names[held], name))
            else:
                commands += [f"take {self.item_names[item]} from {name}" for item in contents if items[item].pickupable]
        return commands
