"""Makes games: a room, its receptacles and objects, and a task that a full-knowledge oracle has been seen to win.

A game is a function of (settings, split, index) alone, so any process opens any of them without making the others.
Rooms belong to splits: a room is its kind and the receptacles that stand in it, and a digest of that says which split
may use it. A layout met in training is therefore never met in a validation split.
"""

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from hashlib import sha256
from typing import Final

from seed_async.envs.alfworld.board import Board
from seed_async.envs.alfworld.catalogue import (
    BASINS,
    ITEM_KINDS,
    LAMP,
    LAMP_PLACES,
    OPENABLE,
    ROOM_KINDS,
    ROOM_PLACES,
)
from seed_async.envs.alfworld.model import (
    CLEAN,
    COOL,
    HOT,
    PROCESSOR,
    TASK_TYPES,
    WANTED_STATE,
    Game,
    Goal,
    Item,
    Receptacle,
    check_reachable,
)
from seed_async.envs.alfworld.oracle import solve
from seed_async.envs.alfworld.scenes import SPLITS
from seed_async.envs.alfworld.tasks import TEMPLATES
from seed_async.envs.contract import GameFormatError

LAMP_ROOMS: Final = frozenset({"bedroom", "living_room"})
_USES: Final = {CLEAN: "clean", HOT: "heat", COOL: "cool"}
_MAX_ATTEMPTS: Final = 2000
"""A validation split accepts one layout in ten; failing this often means that the settings leave it none."""


def layout_split(floor_plan: str) -> str:
    """Return the split that a layout belongs to: 80 % train and 10 % for each validation split, by a digest."""
    share = int.from_bytes(sha256(floor_plan.encode()).digest()[:4]) % 10
    return SPLITS[max(0, share - 7)]


@dataclass(frozen=True, slots=True)
class Settings:
    """What decides the games, beside split and index. `min_receptacles` to `max_receptacles` is inclusive."""

    seed: int
    min_receptacles: int
    max_receptacles: int
    num_objects: int
    task_types: tuple[str, ...]
    rooms: tuple[str, ...]

    def __post_init__(self) -> None:
        """Refuse settings that cannot give a game."""
        if not 4 <= self.min_receptacles <= self.max_receptacles <= 20:
            raise ValueError(
                f"receptacles from {self.min_receptacles} to {self.max_receptacles}: the rule is 4 <= min <= max <= 20"
            )
        if not 2 <= self.num_objects <= 40:
            raise ValueError(f"num_objects is {self.num_objects}: the rule is 2 <= num_objects <= 40")
        for name, values, known in (("room", self.rooms, ROOM_KINDS), ("task type", self.task_types, TASK_TYPES)):
            unknown = [value for value in values if value not in known]
            if unknown or not values:
                raise ValueError(
                    f"unknown {name} {unknown[0] if unknown else '()'!r}: the rule is some of {', '.join(known)}"
                )
        for task_type in self.task_types:
            if not any(_goals(task_type, room) for room in self.rooms):
                raise ValueError(f"no {task_type} game can be made in {', '.join(self.rooms)}")


@cache
def _goals(task_type: str, room: str) -> tuple[tuple[str, str], ...]:
    """Return the (object, receptacle) types that a task of this type can ask for in a room."""
    items = [kind for kind in ITEM_KINDS.values() if room in kind.rooms]
    if not items:
        return ()
    if task_type == "look_at_obj_in_light":
        return tuple((kind.name, LAMP) for kind in items) if room in LAMP_ROOMS else ()
    state = WANTED_STATE.get(task_type)
    processor = PROCESSOR[state] if state else ""
    if processor and processor not in ROOM_PLACES[room]:
        return ()
    return tuple(
        (kind.name, place)
        for kind in items
        if not state or _USES[state] in kind.uses
        for place in sorted(kind.places & ROOM_PLACES[room].keys())
        if place != processor
    )


def feasible_task_types(rooms: Sequence[str]) -> tuple[str, ...]:
    """Return the task types that have a game in at least one of the rooms."""
    return tuple(task_type for task_type in TASK_TYPES if any(_goals(task_type, room) for room in rooms))


def _layout(rng: random.Random, settings: Settings, room: str, required: Sequence[str]) -> list[str] | None:
    """Return receptacle types of a room that has the required ones, sorted, or None when it would be too full."""
    count = rng.randint(settings.min_receptacles, settings.max_receptacles)
    most, places = ROOM_PLACES[room], Counter(required)
    if len(required) > count:
        return None
    while places.total() < count:
        free = [place for place, limit in most.items() if places[place] < limit]
        if not free:
            return None
        places[rng.choice(free)] += 1
    return sorted(places.elements())


def _draw_items(rng: random.Random, settings: Settings, room: str, goal: Goal, places: list[str]) -> list[str] | None:
    """Return the object types of a game: the goal's own, then others that the room has and that fit somewhere."""
    kinds = [goal.item] * goal.count + [LAMP] * bool(goal.lamp)
    fitting = [kind.name for kind in ITEM_KINDS.values() if room in kind.rooms and kind.places & set(places)]
    if len(kinds) > settings.num_objects:
        return None
    kinds += rng.choices(fitting, k=settings.num_objects - len(kinds))
    return kinds


def _home(rng: random.Random, goal: Goal, kind: str, places: list[str]) -> int | None:
    """Return where an object stands at the start: never where the task wants it, so that no game starts half won."""
    allowed = LAMP_PLACES if kind == LAMP else ITEM_KINDS[kind].places
    avoid = goal.receptacle if kind == goal.item else ""
    homes = [number for number, place in enumerate(places) if place in allowed and place != avoid]
    return rng.choice(homes) if homes else None


def _make_item(kind: str, serial: int, home: int, location: int) -> Item:
    uses = ITEM_KINDS[kind].uses if kind != LAMP else frozenset()
    return Item(
        id=f"{kind}_bar_{serial:02d}",
        kind=kind,
        receptacles=(home,),
        locations=frozenset({location}),
        pickupable=kind != LAMP,
        cleanable="clean" in uses,
        heatable="heat" in uses,
        coolable="cool" in uses,
        sliceable="slice" in uses,
        toggleable=kind == LAMP,
        container="hold" in uses,
    )


def _entity_id(kind: str, serial: int) -> str:
    return f"{BASINS[kind]}_bar_{serial:02d}_bar_{kind}" if kind in BASINS else f"{kind}_bar_{serial:02d}"


def _assemble(rng: random.Random, name: str, goal: Goal, places: list[str], items: list[tuple[str, int]]) -> Game:
    """Return the game of receptacle types and (object type, receptacle position) pairs."""
    spots = list(range(len(places) + 1))
    rng.shuffle(spots)
    serials: Counter[str] = Counter()

    def serial(kind: str) -> int:
        serials[kind] += 1
        return serials[kind]

    receptacles = [
        Receptacle(_entity_id(kind, serial(kind)), kind, spots[number], kind in OPENABLE)
        for number, kind in enumerate(places)
    ]
    order = sorted(range(len(places)), key=lambda number: receptacles[number].id)
    position = {number: new for new, number in enumerate(order)}
    made = [_make_item(kind, serial(kind), position[home], spots[home]) for kind, home in items]
    template = rng.choice(TEMPLATES[goal.task_type])
    present = {kind for kind, _ in items} - {LAMP}
    return Game(
        name=name,
        floor_plan="",
        task=template.format(item=goal.item, receptacle=goal.receptacle, lamp=goal.lamp),
        goal=goal,
        receptacles=tuple(receptacles[number] for number in order),
        items=tuple(sorted(made, key=lambda item: item.id)),
        locations=tuple(f"loc_bar_{number:02d}" for number in range(len(places) + 1)),
        start=spots[-1],
        fits=frozenset((place, kind) for place in places for kind in present if place in ITEM_KINDS[kind].places),
    )


def _attempt(rng: random.Random, settings: Settings, split: str, name: str, task_type: str) -> Game | None:
    room = rng.choice([room for room in settings.rooms if _goals(task_type, room)])
    item, target = rng.choice(_goals(task_type, room))
    if task_type == "look_at_obj_in_light":
        goal = Goal(task_type, item, lamp=target)
        required: list[str] = [rng.choice([place for place in LAMP_PLACES if place in ROOM_PLACES[room]])]
    else:
        goal = Goal(task_type, item, target)
        required = [target] + ([PROCESSOR[goal.state]] if goal.state else [])
    places = _layout(rng, settings, room, required)
    if places is None or layout_split(f"{room} {' '.join(places)}") != split:
        return None
    kinds = _draw_items(rng, settings, room, goal, places)
    if kinds is None:
        return None
    items: list[tuple[str, int]] = []
    for kind in kinds:
        home = _home(rng, goal, kind, places)
        if home is None:
            return None
        items.append((kind, home))
    game = _assemble(rng, name, goal, places, items)
    return replace(game, floor_plan=f"{room} {' '.join(places)}")


def generate(settings: Settings, split: str, index: int) -> Game:
    """Return game `index` of a split, verified to be winnable. Raises GameFormatError if the settings allow none."""
    # Seeding with a string hashes it with SHA-512, which is the same in every process.
    rng = random.Random(f"{settings}/{split}/{index}")
    task_type = settings.task_types[index % len(settings.task_types)]
    name = f"generated/{split}/{index:06d}"
    for _ in range(_MAX_ATTEMPTS):
        game = _attempt(rng, settings, split, name, task_type)
        if game is not None:
            check_reachable(game)
            solve(Board(game, "move"))
            return game
    raise GameFormatError(f"no {task_type} game found for split {split} with {settings}")
