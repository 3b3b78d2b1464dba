"""A small kitchen written by hand, for the tests of the engine."""

from seed_async.envs.alfworld.board import Board
from seed_async.envs.alfworld.engine import Engine
from seed_async.envs.alfworld.model import Game, Goal, make_goal
from seed_async.envs.alfworld.pddl import parse_problem
from seed_async.envs.alfworld.vocabulary import VocabularyName

KITCHEN = """
(define (problem hand) (:domain alfred)
(:objects agent1 - agent)
(:init
(atLocation agent1 loc_bar_9)
(receptacleType Cabinet_bar_1 CabinetType) (receptacleAtLocation Cabinet_bar_1 loc_bar_1) (openable Cabinet_bar_1)
(receptacleType Cabinet_bar_2 CabinetType) (receptacleAtLocation Cabinet_bar_2 loc_bar_1) (openable Cabinet_bar_2)
(receptacleType CounterTop_bar_1 CounterTopType) (receptacleAtLocation CounterTop_bar_1 loc_bar_2)
(receptacleType Fridge_bar_1 FridgeType) (receptacleAtLocation Fridge_bar_1 loc_bar_3) (openable Fridge_bar_1)
(receptacleType Microwave_bar_1 MicrowaveType) (receptacleAtLocation Microwave_bar_1 loc_bar_4)
(openable Microwave_bar_1)
(receptacleType Sink_bar_1_bar_SinkBasin SinkBasinType) (receptacleAtLocation Sink_bar_1_bar_SinkBasin loc_bar_5)
(receptacleType Shelf_bar_1 ShelfType) (receptacleAtLocation Shelf_bar_1 loc_bar_2)
(objectType Apple_bar_1 AppleType) (objectType Apple_bar_2 AppleType) (objectType Knife_bar_1 KnifeType)
(objectType Mug_bar_1 MugType) (objectType DeskLamp_bar_1 DeskLampType) (objectType Fork_bar_1 ForkType)
(pickupable Apple_bar_1) (pickupable Apple_bar_2) (pickupable Knife_bar_1) (pickupable Mug_bar_1)
(pickupable Fork_bar_1)
(cleanable Apple_bar_1) (heatable Apple_bar_1) (coolable Apple_bar_1) (sliceable Apple_bar_1) (sliceable Apple_bar_2)
(heatable Apple_bar_2) (coolable Apple_bar_2) (cleanable Apple_bar_2)
(isReceptacleObject Mug_bar_1) (heatable Mug_bar_1) (toggleable DeskLamp_bar_1)
(inReceptacle Apple_bar_1 CounterTop_bar_1) (objectAtLocation Apple_bar_1 loc_bar_2)
(inReceptacle Apple_bar_2 CounterTop_bar_1) (objectAtLocation Apple_bar_2 loc_bar_2)
(inReceptacle Knife_bar_1 CounterTop_bar_1) (objectAtLocation Knife_bar_1 loc_bar_2)
(inReceptacle Mug_bar_1 Cabinet_bar_1) (objectAtLocation Mug_bar_1 loc_bar_1)
(inReceptacle DeskLamp_bar_1 Shelf_bar_1) (objectAtLocation DeskLamp_bar_1 loc_bar_2)
(inReceptacle Fork_bar_1 CounterTop_bar_1) (inReceptacle Fork_bar_1 Shelf_bar_1) (objectAtLocation Fork_bar_1 loc_bar_2)
(canContain CounterTopType AppleType) (canContain FridgeType AppleType) (canContain MicrowaveType AppleType)
(canContain CabinetType MugType) (canContain CounterTopType MugType) (canContain MicrowaveType MugType)
(canContain CounterTopType KnifeType) (canContain CounterTopType ForkType) (canContain ShelfType ForkType)
(canContain ShelfType AppleType)
)
(:goal (and)))
"""


def make_game(task_type: str = "pick_heat_then_place_in_recep", problem: str = KITCHEN, **goal: str) -> Game:
    """Return the kitchen with a goal; by default to put a hot apple in the fridge."""
    wanted: Goal = make_goal(
        task_type,
        goal.get("item", "Apple"),
        goal.get("receptacle", "Fridge"),
        goal.get("lamp", ""),
        sliced=False,
        movable="",
    )
    return parse_problem(problem, name="hand", floor_plan="FloorPlan1", task="put a hot apple in fridge", goal=wanted)


class Table:
    """An engine that plays several commands at once."""

    def __init__(self, game: Game, vocabulary: VocabularyName = "move") -> None:
        """Start the game."""
        self.engine = Engine(Board(game, vocabulary))

    def play(self, *commands: str) -> str:
        """Play the commands and return the last observation."""
        text = ""
        for command in commands:
            text = self.engine.play(command)
        return text

    def can(self, command: str) -> bool:
        """Tell whether the command is in the admissible list."""
        return command in self.engine.admissible()
