"""Replays a trajectory and writes down what happened in it, for the annotator."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from seed_async.envs.alfworld.board import NOBODY, Board
from seed_async.envs.alfworld.engine import Engine
from seed_async.envs.alfworld.model import TOGGLED


@dataclass(slots=True)
class Record:
    """What happened. Numbers are positions of objects and receptacles in the game."""

    engine: Engine
    num_steps: int = 0
    invalid: list[str] = field(default_factory=list)
    visits: Counter[int] = field(default_factory=Counter)
    looked_into: set[int] = field(default_factory=set)
    seen: dict[int, int] = field(default_factory=dict)
    """Each object seen, and the receptacle where it was first seen."""
    takes: list[tuple[int, int]] = field(default_factory=list)
    puts: list[tuple[int, int]] = field(default_factory=list)
    tools: dict[int, int] = field(default_factory=dict)
    """Each object that was cleaned, heated or cooled, and the receptacle that last did it."""
    opened: set[int] = field(default_factory=set)
    """Receptacles that had to be opened before something was taken from or put in them."""
    lamp: tuple[int, int] | None = None
    """The lamp that was last used, and the receptacle that it stands on."""

    @property
    def first_sources(self) -> dict[int, int]:
        """Where each object was taken from the first time."""
        sources: dict[int, int] = {}
        for item, place in self.takes:
            sources.setdefault(item, place)
        return sources


def _note_contents(record: Record, place: int) -> None:
    engine = record.engine
    if engine.opened[place] or not engine.board.game.receptacles[place].openable:
        record.looked_into.add(place)
        for item in engine.contents[place]:
            record.seen.setdefault(item, place)


def _note(record: Record, command: str) -> None:
    """Take in a command that has just acted."""
    board, engine = record.engine.board, record.engine
    verb, _, rest = command.partition(" ")
    if verb == "go":
        place = board.receptacle_of[rest.removeprefix("to ")]
        record.visits[place] += 1
        _note_contents(record, place)
    elif verb in ("open", "examine") and rest in board.receptacle_of:
        place = board.receptacle_of[rest]
        if verb == "open":
            record.opened.add(place)
        _note_contents(record, place)
    elif verb == "take":
        name, _, source = rest.partition(" from ")
        record.takes.append((board.item_of[name], board.receptacle_of[source]))
    elif verb == board.words.place_verb:
        name, _, target = rest.partition(board.words.place_between)
        record.puts.append((board.item_of[name], board.receptacle_of[target]))
    elif verb in ("clean", "heat", "cool"):
        name, _, tool = rest.partition(" with ")
        record.tools[board.item_of[name]] = board.receptacle_of[tool]
    elif verb == "use":
        lamp = board.item_of[rest]
        record.lamp = lamp, next(place for place in board.here[engine.location] if lamp in engine.contents[place])


def replay(board: Board, commands: Iterable[str]) -> Record:
    """Return what happens when `commands` are played from the start of the game."""
    record = Record(Engine(board))
    for command in commands:
        record.engine.play(command)
        record.num_steps += 1
        if record.engine.valid:
            _note(record, command.strip())
        else:
            record.invalid.append(command)
    return record


def winning_items(record: Record) -> tuple[list[int], int]:
    """Return the objects that make the goal true at the end, and the receptacle that they are in (or NOBODY).

    For a lamp task it is the held object. The list is empty when the goal does not hold.
    """
    engine, game = record.engine, record.engine.board.game
    if not engine.won:
        return [], NOBODY
    if game.goal.lamp:
        return [engine.held], NOBODY
    for place in engine.board.goal_places:
        found = [
            item
            for item in engine.contents[place]
            if game.items[item].kind == game.goal.item and engine.states[item] & game.goal.state == game.goal.state
        ]
        if len(found) >= game.goal.count:
            # The latest arrivals are those that the trajectory brought.
            order = {item: number for number, (item, _) in enumerate(record.puts)}
            return sorted(found, key=lambda item: order.get(item, -1))[-game.goal.count :], place
    return [], NOBODY


def lamp_is_on(record: Record) -> bool:
    """Tell whether a lamp of the wanted type has been used."""
    engine, game = record.engine, record.engine.board.game
    return any(item.kind == game.goal.lamp and engine.states[n] & TOGGLED for n, item in enumerate(game.items))
