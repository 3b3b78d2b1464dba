"""The static description of one game: its entities, where they are at the start, and its goal.

Entities are ordered by their PDDL id, compared as strings, and everything refers to them by position in that order: it
is the order in which every listing of the game runs.
"""

from collections import Counter
from dataclasses import dataclass
from typing import Final

from seed_async.envs.contract import GameFormatError

CLEAN: Final = 1
HOT: Final = 2
COOL: Final = 4
SLICED: Final = 8
TOGGLED: Final = 16
"""Bits of an object's state."""

TASK_TYPES: Final = (
    "pick_and_place_simple",
    "look_at_obj_in_light",
    "pick_clean_then_place_in_recep",
    "pick_heat_then_place_in_recep",
    "pick_cool_then_place_in_recep",
    "pick_two_obj_and_place",
)
WANTED_STATE: Final = {
    "pick_clean_then_place_in_recep": CLEAN,
    "pick_heat_then_place_in_recep": HOT,
    "pick_cool_then_place_in_recep": COOL,
}
"""The state bit that the goal object must have when it is placed, for the task types that ask for one."""

PROCESSOR: Final = {CLEAN: "sinkbasin", HOT: "microwave", COOL: "fridge"}
"""The receptacle type that gives an object the state."""

KNIVES: Final = frozenset({"knife", "butterknife"})


@dataclass(frozen=True, slots=True)
class Receptacle:
    """A place that holds objects. `kind` is its type in lower case without the suffix, as in `sinkbasin`."""

    id: str
    kind: str
    location: int
    openable: bool = False
    opened: bool = False


@dataclass(frozen=True, slots=True)
class Item:
    """An object. `receptacles` are the positions of those that hold it; `locations` where the game says it stands."""

    id: str
    kind: str
    receptacles: tuple[int, ...]
    locations: frozenset[int]
    pickupable: bool = True
    cleanable: bool = False
    heatable: bool = False
    coolable: bool = False
    sliceable: bool = False
    toggleable: bool = False
    container: bool = False
    state: int = 0

    def can_become(self, state: int) -> bool:
        """Tell whether the object can be brought to `state`, one of CLEAN, HOT and COOL."""
        return {CLEAN: self.cleanable, HOT: self.heatable, COOL: self.coolable}[state]


@dataclass(frozen=True, slots=True)
class Goal:
    """What wins: `count` objects of type `item` in one receptacle of type `receptacle`, or one held under a `lamp`."""

    task_type: str
    item: str
    receptacle: str = ""
    lamp: str = ""

    @property
    def count(self) -> int:
        """How many different objects must be placed."""
        return 2 if self.task_type == "pick_two_obj_and_place" else 1

    @property
    def state(self) -> int:
        """The state bit that a placed object must have, or 0."""
        return WANTED_STATE.get(self.task_type, 0)


@dataclass(frozen=True, slots=True)
class Game:
    """One game at its start. `receptacles`, `items` and `locations` are sorted by id; `fits` holds type pairs."""

    name: str
    floor_plan: str
    task: str
    goal: Goal
    receptacles: tuple[Receptacle, ...]
    items: tuple[Item, ...]
    locations: tuple[str, ...]
    start: int
    fits: frozenset[tuple[str, str]]

    def can_hold(self, receptacle: int, item: int) -> bool:
        """Tell whether the receptacle's type may contain the object's type."""
        return (self.receptacles[receptacle].kind, self.items[item].kind) in self.fits


def numbered_names(game: Game) -> dict[str, str]:
    """Return the display name of every id of a game.

    The class is the part before the first `_bar_` (with `basin` where the id has it anywhere), and the members of a
    class are numbered downward in the order of their ids: the first of three cabinets is `cabinet 3`.
    """
    ids = sorted((*(place.id for place in game.receptacles), *(item.id for item in game.items), *game.locations))
    classes = [name.split("_bar_", 1)[0] + ("basin" if "basin" in name else "") for name in ids]
    left = Counter(classes)
    names = {}
    for name, kind in zip(ids, classes, strict=True):
        names[name] = f"{kind} {left[kind]}"
        left[kind] -= 1
    return names


def make_goal(task_type: str, item: str, receptacle: str, lamp: str, *, sliced: bool, movable: str) -> Goal:
    """Return the goal of ALFRED's parameters. Raises GameFormatError for a task that this engine does not play."""
    if task_type not in TASK_TYPES:
        raise GameFormatError(f"task type {task_type!r} is none of {', '.join(TASK_TYPES)}")
    if sliced or movable:
        raise GameFormatError("tasks with sliced objects or movable receptacles are not played, as in ALFWorld")
    light = task_type == "look_at_obj_in_light"
    if not item or not (lamp if light else receptacle):
        raise GameFormatError(f"the goal of a {task_type} game lacks its object, receptacle or lamp type")
    return Goal(task_type, item.lower(), "" if light else receptacle.lower(), lamp.lower() if light else "")


def check_reachable(game: Game) -> None:
    """Refuse a goal that no action can reach.

    The real engine crashes on such a game; the common case is a FloorLamp, which stands in no receptacle.
    """
    goal = game.goal
    wanted = [item for item in game.items if item.kind == goal.item]
    movable = [item for item in wanted if item.pickupable and item.receptacles]
    if goal.lamp:
        lamps = [item for item in game.items if item.kind == goal.lamp and item.toggleable and item.receptacles]
        if not lamps:
            raise GameFormatError(f"game {game.name}: no {goal.lamp} that can be used stands in a receptacle")
        if not movable:
            raise GameFormatError(f"game {game.name}: no {goal.item} can be picked up")
        return
    targets = [place for place in game.receptacles if place.kind == goal.receptacle]
    if not targets:
        raise GameFormatError(f"game {game.name}: there is no {goal.receptacle} to put a {goal.item} in")
    if goal.state:
        processor = PROCESSOR[goal.state]
        movable = [item for item in movable if item.can_become(goal.state)]
        if not any(place.kind == processor for place in game.receptacles):
            raise GameFormatError(f"game {game.name}: there is no {processor}")
    if len(movable) < goal.count:
        raise GameFormatError(f"game {game.name}: needs {goal.count} {goal.item} that can be used, has {len(movable)}")
    if (goal.receptacle, goal.item) not in game.fits:
        raise GameFormatError(f"game {game.name}: a {goal.receptacle} cannot contain a {goal.item}")
