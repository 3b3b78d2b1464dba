"""Our own wording of the two texts that a `game.tw-pddl` carries beside its problem: rules (PDDL) and grammar (TWL2).

With them a written game needs no installed package, and the original engine plays it to the letter as ours does:
tests/integration/test_alfworld_official.py compares. What is printed comes from the same tables as our engine's text.
"""

import json
from typing import Final

from seed_async.envs.alfworld.engine import OBJECT_TEXTS
from seed_async.envs.alfworld.model import CLEAN, COOL, HOT, SLICED
from seed_async.envs.alfworld.vocabulary import (
    HEADER,
    MIDDLE_OF_ROOM,
    VOCABULARIES,
    Vocabulary,
    VocabularyName,
    help_text,
)

DOMAIN: Final = """\
; The household of ALFWorld's games: an agent goes between locations, opens receptacles, and carries one object.
(define (domain alfred)
(:requirements :adl :typing)
(:types agent location receptacle object rtype otype)
(:predicates
  (atLocation ?a - agent ?l - location)
  (receptacleAtLocation ?r - receptacle ?l - location)
  (objectAtLocation ?o - object ?l - location)
  (receptacleType ?r - receptacle ?t - rtype)
  (objectType ?o - object ?t - otype)
  (canContain ?rt - rtype ?ot - otype)
  (openable ?r - receptacle)
  (opened ?r - receptacle)
  (inReceptacle ?o - object ?r - receptacle)
  (isReceptacleObject ?o - object)
  (pickupable ?o - object)
  (holds ?a - agent ?o - object)
  (holdsAny ?a - agent)
  (cleanable ?o - object)
  (heatable ?o - object)
  (coolable ?o - object)
  (sliceable ?o - object)
  (toggleable ?o - object)
  (isClean ?o - object)
  (isHot ?o - object)
  (isCool ?o - object)
  (isSliced ?o - object)
  (isToggled ?o - object)
  (isOn ?o - object)
  ; Nothing reads `checked`: an action without an effect would be dropped by the planner's translator.
  (checked ?x)
)

(:action look
  :parameters (?a - agent ?l - location)
  :precondition (atLocation ?a ?l)
  :effect (checked ?l))

(:action inventory
  :parameters (?a - agent)
  :precondition ()
  :effect (checked ?a))

(:action help
  :parameters (?a - agent)
  :precondition ()
  :effect (checked ?a))

(:action examineReceptacle
  :parameters (?a - agent ?r - receptacle)
  :precondition (exists (?l - location) (and (receptacleAtLocation ?r ?l) (atLocation ?a ?l)))
  :effect (checked ?r))

; Objects are examined in the hand only.
(:action examineObject
  :parameters (?a - agent ?o - object)
  :precondition (holds ?a ?o)
  :effect (checked ?o))

; Going where one is changes nothing, and so is no move.
(:action GotoLocation
  :parameters (?a - agent ?lStart - location ?lEnd - location ?r - receptacle)
  :precondition (and (atLocation ?a ?lStart) (receptacleAtLocation ?r ?lEnd))
  :effect (and (not (atLocation ?a ?lStart)) (atLocation ?a ?lEnd)))

(:action OpenObject
  :parameters (?a - agent ?l - location ?r - receptacle)
  :precondition (and (atLocation ?a ?l) (receptacleAtLocation ?r ?l) (openable ?r) (not (opened ?r)))
  :effect (opened ?r))

(:action CloseObject
  :parameters (?a - agent ?l - location ?r - receptacle)
  :precondition (and (atLocation ?a ?l) (receptacleAtLocation ?r ?l) (openable ?r) (opened ?r))
  :effect (not (opened ?r)))

(:action PickupObject
  :parameters (?a - agent ?l - location ?o - object ?r - receptacle)
  :precondition (and
    (atLocation ?a ?l) (receptacleAtLocation ?r ?l) (inReceptacle ?o ?r) (pickupable ?o)
    (not (holdsAny ?a)) (or (opened ?r) (not (openable ?r))))
  :effect (and (holds ?a ?o) (holdsAny ?a) (not (inReceptacle ?o ?r)) (not (objectAtLocation ?o ?l))))

; A receptacle is never full.
(:action PutObject
  :parameters (?a - agent ?l - location ?o - object ?r - receptacle ?ot - otype ?rt - rtype)
  :precondition (and
    (atLocation ?a ?l) (receptacleAtLocation ?r ?l) (holds ?a ?o) (or (opened ?r) (not (openable ?r)))
    (objectType ?o ?ot) (receptacleType ?r ?rt) (canContain ?rt ?ot))
  :effect (and (inReceptacle ?o ?r) (objectAtLocation ?o ?l) (not (holds ?a ?o)) (not (holdsAny ?a))))

(:action CleanObject
  :parameters (?a - agent ?l - location ?r - receptacle ?o - object)
  :precondition (and
    (atLocation ?a ?l) (receptacleAtLocation ?r ?l) (receptacleType ?r SinkBasinType) (holds ?a ?o) (cleanable ?o))
  :effect (isClean ?o))

; A microwave or fridge may stay closed.
(:action HeatObject
  :parameters (?a - agent ?l - location ?r - receptacle ?o - object)
  :precondition (and
    (atLocation ?a ?l) (receptacleAtLocation ?r ?l) (receptacleType ?r MicrowaveType) (holds ?a ?o) (heatable ?o))
  :effect (and (isHot ?o) (not (isCool ?o))))

(:action CoolObject
  :parameters (?a - agent ?l - location ?r - receptacle ?o - object)
  :precondition (and
    (atLocation ?a ?l) (receptacleAtLocation ?r ?l) (receptacleType ?r FridgeType) (holds ?a ?o) (coolable ?o))
  :effect (and (isCool ?o) (not (isHot ?o))))

; `isToggled` says that a lamp was ever used, which is what goals ask for.
(:action ToggleObject
  :parameters (?a - agent ?l - location ?o - object ?r - receptacle)
  :precondition (and (atLocation ?a ?l) (receptacleAtLocation ?r ?l) (inReceptacle ?o ?r) (toggleable ?o))
  :effect (and (isToggled ?o) (when (isOn ?o) (not (isOn ?o))) (when (not (isOn ?o)) (isOn ?o))))

(:action SliceObject
  :parameters (?a - agent ?l - location ?co - object ?ko - object)
  :precondition (and
    (atLocation ?a ?l) (objectAtLocation ?co ?l) (sliceable ?co) (holds ?a ?ko)
    (or (objectType ?ko KnifeType) (objectType ?ko ButterKnifeType)))
  :effect (isSliced ?co))
)
"""

_BITS: Final = ((CLEAN, "isclean"), (HOT, "ishot"), (COOL, "iscool"), (SLICED, "issliced"))
_OBJECTS_IN_R: Final = "[{'a ' + o.name | inreceptacle(o:object, r:receptacle)}]"
_AT_AGENT: Final = "atlocation(a:agent, l:location) & receptacleatlocation(r:receptacle, l:location)"
_BESIDE: Final = (  # in this order: objects are listed first by themselves, then by receptacle
    "atlocation(a:agent, l:location) & objectatlocation(o:object, l:location)"
    " & receptacleatlocation(r:receptacle, l:location) & not_inreceptacle(o:object, r:receptacle)"
)

_Rule = tuple[str, str]
"""A condition (empty: always) and what is printed under it; the first rule whose condition holds is used."""


def _examine_object() -> list[_Rule]:
    rules = [("isreceptacleobject(o:object)", "This is a normal {o.name}. In it, you see nothing.")]
    for state, text in OBJECT_TEXTS:
        condition = " & ".join(f"{predicate}(o:object)" for bit, predicate in _BITS if state & bit)
        rules.append((condition, text.format("{o.name}")))
    return [
        *rules,
        ("toggleable(o:object) & istoggled(o:object)", "This {o.name} is on."),
        ("sliceable(o:object) & issliced(o:object)", "This is a sliced {o.name}."),
        ("", "There's nothing special about {o.name}."),
    ]


def _rules(task: str, words: Vocabulary) -> dict[str, list[_Rule]]:
    arrived = "lend" if words.arrive_at_location else "r"
    return {
        "intro": [("", f"{HEADER}#see#\n\n#task#")],
        "task": [("", f"Your task is to: {task}.")],
        "see": [
            (_AT_AGENT, f"You are facing the [{{r.name | {_AT_AGENT}}}]. Next to it, you see #beside#."),
            ("", f"{MIDDLE_OF_ROOM}[{{'a ' + r.name | receptacleatlocation(r:receptacle, l:location)}}]."),
        ],
        "beside": [(_BESIDE, f"[{{'a ' + o.name | {_BESIDE}}}]"), ("", "nothing")],
        "content": [
            (
                "openable(r:receptacle) & opened(r:receptacle)",
                f"The {{r.name}} is open. In it, you see {_OBJECTS_IN_R}.",
            ),
            ("openable(r:receptacle)", "The {r.name} is closed."),
            ("", f"On the {{r.name}}, you see {_OBJECTS_IN_R}."),
        ],
        "carried": [
            ("holdsany(a:agent)", "You are carrying: [{'a ' + o.name | holds(a:agent, o:object)}]."),
            ("", "You are not carrying anything."),
        ],
        "object": _examine_object(),
        "went": [("", f"You arrive at {{{arrived}.name}}. #content#")],
        "opened": [("", "You open the {r.name}. #content#")],
        "closed": [("", "You close the {r.name}.")],
        "taken": [("", "You pick up the {o.name} from the {r.name}.")],
        "put": [("", f"You {words.place_verb} the {{o.name}}{words.told_between}{{r.name}}.")],
        "used": [("", "You turn on the {o.name}.")],
        "cleaned": [("", "You clean the {o.name} using the {r.name}.")],
        "heated": [("", "You heat the {o.name} using the {r.name}.")],
        "cooled": [("", "You cool the {o.name} using the {r.name}.")],
        "cut": [("", "You sliced the {co.name} with the {ko.name}.")],
        "helped": [("", help_text(words))],
        # The names that textworld itself uses when it prints a list.
        "list_empty": [("", "nothing")],
        "list_separator": [("", ", ")],
        "list_last_separator": [("", ", and ")],
    }


def _commands(words: Vocabulary) -> dict[str, _Rule]:
    """Return the command and the printed rule of each action of the domain."""
    return {
        "GotoLocation": ("go to [{r.name | receptacleatlocation(r:receptacle, lend:location)}]", "went"),
        "OpenObject": ("open {r}", "opened"),
        "CloseObject": ("close {r}", "closed"),
        "PickupObject": ("take {o} from {r}", "taken"),
        "PutObject": (words.place("{o}", "{r}"), "put"),
        "ToggleObject": ("use {o}", "used"),
        "CleanObject": ("clean {o} with {r}", "cleaned"),
        "HeatObject": ("heat {o} with {r}", "heated"),
        "CoolObject": ("cool {o} with {r}", "cooled"),
        "SliceObject": ("slice {co} with {ko}", "cut"),
        "examineReceptacle": ("examine {r}", "content"),
        "examineObject": ("examine {o}", "object"),
        "inventory": ("inventory", "carried"),
        "look": ("look", "see"),
        "help": ("help", "helped"),
    }


def grammar_text(task: str, vocabulary: VocabularyName) -> str:
    """Return the TWL2 grammar of a game whose task sentence (without its full stop) is `task`."""
    words = VOCABULARIES[vocabulary]
    symbols = {
        name: [{"condition": condition, "rhs": text} if condition else {"rhs": text} for condition, text in rules]
        for name, rules in _rules(task, words).items()
    }
    actions = [
        f'action {name} {{\n    template :: "{command}";\n    feedback :: "#{rule}#";\n}}\n'
        for name, (command, rule) in _commands(words).items()
    ]
    return f'grammar :: """\n{json.dumps(symbols, indent=1)}\n""";\n\n' + "\n".join(actions)
