"""Reads and writes the PDDL problem text of a game, for ALFWorld's domain."""

from collections import defaultdict
from collections.abc import Iterable

from seed_async.envs.alfworld import model
from seed_async.envs.alfworld.model import Game, Goal, Item, Receptacle
from seed_async.envs.contract import GameFormatError

_FLAGS = {
    "pickupable": "pickupable",
    "cleanable": "cleanable",
    "heatable": "heatable",
    "coolable": "coolable",
    "sliceable": "sliceable",
    "toggleable": "toggleable",
    "isreceptacleobject": "container",
}
_STATES = {
    "isclean": model.CLEAN,
    "ishot": model.HOT,
    "iscool": model.COOL,
    "issliced": model.SLICED,
    "istoggled": model.TOGGLED,
}

Facts = dict[str, list[list[str]]]


def _facts(problem: str) -> Facts:
    """Return the arguments of every fact of the init section by predicate, in lower case as the real engine reads."""
    text = problem.lower()
    start, end = text.find("(:init"), text.find("(:goal")
    if start < 0 or end < start:
        raise GameFormatError("the problem has no :init followed by a :goal section; is it truncated?")
    facts: Facts = defaultdict(list)
    # Costs and distances, which official files may hold, nest: they fall out as predicates that nothing reads.
    for piece in text[start + len("(:init") : end].split("("):
        predicate, *arguments = piece.partition(")")[0].split() or [""]
        if arguments:
            facts[predicate].append(arguments)
    return facts


def _kind(type_name: str) -> str:
    return type_name.removesuffix("type")


def _pairs(facts: Facts, predicate: str) -> dict[str, str]:
    """Return a two-argument predicate as a mapping. Raises GameFormatError when an entity has two values."""
    pairs: dict[str, str] = {}
    for arguments in facts[predicate]:
        if len(arguments) != 2:
            raise GameFormatError(f"{predicate} takes two arguments, not {' '.join(arguments)!r}")
        if pairs.setdefault(arguments[0], arguments[1]) != arguments[1]:
            raise GameFormatError(f"{arguments[0]} has two values of {predicate}")
    return pairs


def _grouped(pairs: Iterable[list[str]], keys: dict[str, int], values: dict[str, int]) -> dict[str, list[int]]:
    grouped: dict[str, list[int]] = defaultdict(list)
    for arguments in pairs:
        if len(arguments) != 2 or arguments[0] not in keys or arguments[1] not in values:
            raise GameFormatError(f"a fact names an unknown entity: {' '.join(arguments)!r}")
        grouped[arguments[0]].append(values[arguments[1]])
    return grouped


def _positions(ids: Iterable[str]) -> dict[str, int]:
    return {name: position for position, name in enumerate(sorted(ids))}


def _items(facts: Facts, kinds: dict[str, str], places: dict[str, int], locations: dict[str, int]) -> tuple[Item, ...]:
    known = _positions(kinds)
    inside = _grouped(facts["inreceptacle"], known, places)
    standing = _grouped(facts["objectatlocation"], known, locations)
    flags: dict[str, dict[str, bool]] = {name: {"pickupable": False} for name in known}
    states = dict.fromkeys(known, 0)
    for predicate, attribute in _FLAGS.items():
        for name, *_ in facts[predicate]:
            if name not in known:
                raise GameFormatError(f"{predicate} names an unknown object: {name}")
            flags[name][attribute] = True
    for predicate, bit in _STATES.items():
        for name, *_ in facts[predicate]:
            if name in known:
                states[name] |= bit
    return tuple(
        Item(
            id=name,
            kind=_kind(kinds[name]),
            receptacles=tuple(sorted(inside[name])),
            locations=frozenset(standing[name]),
            state=states[name],
            **flags[name],
        )
        for name in known
    )


def parse_problem(problem: str, *, name: str, floor_plan: str, task: str, goal: Goal) -> Game:
    """Return the game of a PDDL problem text; the goal section itself is not read.

    Raises:
        GameFormatError: the text is truncated, names unknown entities, or has a goal that no action can reach.
    """
    facts = _facts(problem)
    receptacle_kinds, item_kinds = _pairs(facts, "receptacletype"), _pairs(facts, "objecttype")
    standing = _pairs(facts, "receptacleatlocation")
    start = _pairs(facts, "atlocation")
    if len(start) != 1 or not receptacle_kinds or not item_kinds:
        raise GameFormatError(f"game {name}: needs one agent with a location, receptacles and objects")
    nameless = [entity for entity in (*receptacle_kinds, *item_kinds) if "_bar_" not in entity]
    if nameless:
        raise GameFormatError(f"game {name}: the id {nameless[0][:80]!r} has no _bar_ after its class")
    if facts["holds"]:
        raise GameFormatError(f"game {name}: the agent holds an object at the start")
    missing = [place for place in receptacle_kinds if place not in standing]
    if missing:
        raise GameFormatError(f"game {name}: receptacle {missing[0]} has no location")
    # Only locations that some fact mentions are numbered by the real engine.
    where = {*standing.values(), *start.values(), *(pair[-1] for pair in facts["objectatlocation"])}
    locations = _positions(where)
    places = _positions(receptacle_kinds)
    openable = {arguments[0] for arguments in facts["openable"]}
    opened = {arguments[0] for arguments in facts["opened"]}
    game = Game(
        name=name,
        floor_plan=floor_plan,
        task=task,
        goal=goal,
        receptacles=tuple(
            Receptacle(
                place, _kind(receptacle_kinds[place]), locations[standing[place]], place in openable, place in opened
            )
            for place in places
        ),
        items=_items(facts, item_kinds, places, locations),
        locations=tuple(locations),
        start=locations[next(iter(start.values()))],
        fits=frozenset((_kind(a), _kind(b)) for a, b in map(_two, facts["cancontain"])),
    )
    model.check_reachable(game)
    return game


def _two(arguments: list[str]) -> tuple[str, str]:
    if len(arguments) != 2:
        raise GameFormatError(f"cancontain takes two arguments, not {' '.join(arguments)!r}")
    return arguments[0], arguments[1]


_GOAL_BODIES = {
    "pick_and_place_simple": "",
    "pick_clean_then_place_in_recep": " (cleanable ?o) (isClean ?o)",
    "pick_heat_then_place_in_recep": " (heatable ?o) (isHot ?o)",
    "pick_cool_then_place_in_recep": " (coolable ?o) (isCool ?o)",
}


def _goal_text(goal: Goal) -> str:
    if goal.lamp:
        return (
            "(and (exists (?ot - object ?r - receptacle ?a - agent ?l - location)"
            f" (and (objectType ?ot {goal.lamp}Type) (toggleable ?ot)"
            " (isToggled ?ot) (receptacleAtLocation ?r ?l) (atLocation ?a ?l) (inReceptacle ?ot ?r)))"
            f" (exists (?o - object ?a - agent) (and (objectType ?o {goal.item}Type) (holds ?a ?o))))"
        )
    place = f"(receptacleType ?r {goal.receptacle}Type)"
    if goal.count == 2:
        first, second = (f"(objectType {o} {goal.item}Type) {place} (inReceptacle {o} ?r)" for o in ("?o1", "?o2"))
        return (
            f"(and (exists (?r - receptacle) (exists (?o1 - object) (and {first}"
            f" (exists (?o2 - object) (and (not (= ?o1 ?o2)) {second}))))))"
        )
    body = f"(objectType ?o {goal.item}Type) {place} (inReceptacle ?o ?r){_GOAL_BODIES[goal.task_type]}"
    return f"(and (exists (?r - receptacle) (exists (?o - object) (and {body}))))"


def _init_facts(game: Game) -> Iterable[str]:
    yield f"atLocation agent1 {game.locations[game.start]}"
    for place in game.receptacles:
        yield f"receptacleType {place.id} {place.kind}Type"
        yield f"receptacleAtLocation {place.id} {game.locations[place.location]}"
        if place.openable:
            yield f"openable {place.id}"
        if place.opened:
            yield f"opened {place.id}"
    for item in game.items:
        yield f"objectType {item.id} {item.kind}Type"
        for predicate, attribute in _FLAGS.items():
            if getattr(item, attribute):
                yield f"{predicate} {item.id}"
        for predicate, bit in _STATES.items():
            if item.state & bit:
                yield f"{predicate} {item.id}"
        for number in item.receptacles:
            yield f"inReceptacle {item.id} {game.receptacles[number].id}"
        for location in sorted(item.locations):
            yield f"objectAtLocation {item.id} {game.locations[location]}"
    for place_kind, item_kind in sorted(game.fits):
        yield f"canContain {place_kind}Type {item_kind}Type"


def write_problem(game: Game) -> str:
    """Return the PDDL problem text of a game, which both the real engine and `parse_problem` read."""
    objects = ["agent1 - agent"]
    objects += [f"{kind}Type - otype" for kind in sorted({item.kind for item in game.items})]
    objects += [f"{kind}Type - rtype" for kind in sorted({place.kind for place in game.receptacles})]
    objects += [f"{item.id} - object" for item in game.items]
    objects += [f"{place.id} - receptacle" for place in game.receptacles]
    objects += [f"{location} - location" for location in game.locations]
    facts = "\n".join(f"({fact})" for fact in _init_facts(game))
    return (
        f"(define (problem plan_{game.name.replace('/', '_')})\n(:domain alfred)\n(:objects\n"
        + "\n".join(objects)
        + "\n)\n"
        f"(:init\n{facts}\n)\n(:goal {_goal_text(game.goal)})\n)\n"
    )
