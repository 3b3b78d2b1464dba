"""Plays from observations only: searches in listing order, opens what is closed, takes, processes and places."""

import re

from seed_async.envs.alfworld.tasks import TaskWords, read_task
from seed_async.envs.alfworld.vocabulary import VOCABULARIES, VocabularyName
from seed_async.envs.contract import Observation

_ENTITY = re.compile(r"\ba ([a-z]+ \d+)")
_SEEN = re.compile(r"(?:On|In) (?:the ([a-z]+ \d+)|it), you see (.*)\.$")
_TOLD_STATE = re.compile(r"The ([a-z]+ \d+) is (open|closed)\.")


def _kind(name: str) -> str:
    return name.partition(" ")[0]


class AlfworldExpert:
    """A systematic searcher. It remembers what it has seen and never looks at the game behind the text."""

    def __init__(self, vocabulary: VocabularyName = "move") -> None:
        """Speak the given vocabulary."""
        self._words = VOCABULARIES[vocabulary]

    def reset(self, observation: Observation) -> None:
        """Start a new episode at its first observation."""
        listing, _, _ = observation.text.partition("Your task is to:")
        self._task: TaskWords = read_task(observation.info.task)
        self._places: list[str] = _ENTITY.findall(listing)
        self._seen: dict[str, list[str]] = {}
        self._closed: set[str] = set()
        self._at = ""
        self._held = ""
        self._ready: set[str] = set()
        self._target = ""
        self._placed: set[str] = set()
        self._last = ""

    def act(self, observation: Observation) -> str:
        """Return the command for this observation."""
        self._learn(observation)
        command = self._decide(observation.admissible)
        self._last = command
        return command

    def _learn(self, observation: Observation) -> None:
        """Take in the outcome of the last command."""
        if not self._last or not observation.info.valid:
            return
        verb, _, rest = self._last.partition(" ")
        if verb == "go":
            self._at = rest.removeprefix("to ")
        elif verb == "take":
            self._held, _, source = rest.partition(" from ")
            self._seen[source] = [item for item in self._seen.get(source, ()) if item != self._held]
        elif verb == self._words.place_verb:
            item, _, place = rest.partition(self._words.place_between)
            self._seen.setdefault(place, []).append(item)
            self._placed.add(item)
            self._held, self._target = "", place
        elif verb in ("clean", "heat", "cool"):
            self._ready.add(self._held)
        self._read(observation.text)

    def _read(self, text: str) -> None:
        state = _TOLD_STATE.search(text)
        if state is not None:
            name, word = state.groups()
            (self._closed.add if word == "closed" else self._closed.discard)(name)
            self._at = name
        seen = _SEEN.search(text)
        if seen is not None:
            self._at = seen[1] or self._at
            self._seen[self._at] = _ENTITY.findall(seen[2])

    def _decide(self, admissible: tuple[str, ...]) -> str:
        task = self._task
        if self._held:
            if task.lamp:
                return self._use_lamp(admissible)
            if task.process and self._held not in self._ready:
                return self._process(admissible)
            return self._put_down(admissible)
        for place, items in self._seen.items():
            if place == self._target or (not task.process and task.count == 1 and _kind(place) == task.receptacle):
                continue
            for item in items:
                if _kind(item) == task.item and item not in self._placed:
                    return self._at_open(place, f"take {item} from {place}", admissible)
        return self._explore(admissible)

    def _explore(self, admissible: tuple[str, ...]) -> str:
        for place in self._places:
            if place not in self._seen:
                return self._at_open(place, f"examine {place}", admissible)
        return "look"

    def _at_open(self, place: str, command: str, admissible: tuple[str, ...]) -> str:
        """Return the next command on the way to doing `command` at an open `place`."""
        moving = self._move(place, admissible)
        if moving:
            return moving
        return f"open {place}" if place in self._closed else command

    def _move(self, place: str, admissible: tuple[str, ...]) -> str:
        """Return the command that goes to `place`, or nothing when it is within reach (receptacles share locations)."""
        travel = f"go to {place}"
        return "" if place == self._at or (admissible and travel not in admissible) else travel

    def _use_lamp(self, admissible: tuple[str, ...]) -> str:
        for place, items in self._seen.items():
            for item in items:
                if _kind(item) == self._task.lamp:
                    return self._move(place, admissible) or f"use {item}"
        return self._explore(admissible)

    def _process(self, admissible: tuple[str, ...]) -> str:
        for place in self._places:
            if _kind(place) == self._task.processor:
                return self._move(place, admissible) or f"{self._task.process} {self._held} with {place}"
        return "look"

    def _put_down(self, admissible: tuple[str, ...]) -> str:
        target = self._target or self._choose_target()
        if not target:
            return "look"
        return self._at_open(target, self._words.place(self._held, target), admissible)

    def _choose_target(self) -> str:
        """Return the receptacle to fill: for two objects, one that already holds one of them."""
        targets = [place for place in self._places if _kind(place) == self._task.receptacle]
        if self._task.count == 2:
            for place in targets:
                if any(_kind(item) == self._task.item for item in self._seen.get(place, ())):
                    return place
        return targets[0] if targets else ""
