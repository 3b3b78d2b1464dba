"""The semantics of the game that are easy to miss, one by one, on a kitchen written by hand."""

import pytest
from hand_kitchen import KITCHEN, Table, make_game

from seed_async.envs.alfworld.pddl import parse_problem, write_problem
from seed_async.envs.contract import GameFormatError

NOTHING = "Nothing happens."
AT_COUNTER = "On the countertop 1, you see a apple 2, a apple 1, a fork 1, and a knife 1."


def test_the_first_observation_has_header_listing_and_task(kitchen: Table) -> None:
    assert kitchen.engine.reset() == (
        "-= Welcome to TextWorld, ALFRED! =-\n\nYou are in the middle of a room. Looking quickly around you, you see "
        "a cabinet 2, a cabinet 1, a countertop 1, a fridge 1, a microwave 1, a shelf 1, and a sinkbasin 1.\n\n"
        "Your task is to: put a hot apple in fridge."
    )


def test_names_run_downward_within_a_class(kitchen: Table) -> None:
    assert kitchen.play("go to countertop 1") == f"You arrive at countertop 1. {AT_COUNTER}"


def test_a_list_of_two_has_a_comma_before_and(kitchen: Table) -> None:
    assert kitchen.play("go to shelf 1") == "You arrive at shelf 1. On the shelf 1, you see a desklamp 1, and a fork 1."


def test_an_empty_list_reads_nothing(kitchen: Table) -> None:
    assert kitchen.play("go to fridge 1") == "You arrive at fridge 1. The fridge 1 is closed."
    assert kitchen.play("open fridge 1") == "You open the fridge 1. The fridge 1 is open. In it, you see nothing."
    assert kitchen.play("close fridge 1") == "You close the fridge 1."


def test_a_look_from_the_middle_of_the_room_sees_nothing(kitchen: Table) -> None:
    assert kitchen.play("look") == "You are in the middle of a room. Looking quickly around you, you see nothing."


def test_look_faces_every_receptacle_of_the_location(kitchen: Table) -> None:
    text = kitchen.play("go to countertop 1", "look")
    assert text == "You are facing the countertop 1, and shelf 1. Next to it, you see nothing."


def test_an_object_moved_within_a_location_lies_next_to_it(kitchen: Table) -> None:
    kitchen.play("go to countertop 1", "take apple 1 from countertop 1", "move apple 1 to shelf 1")
    assert kitchen.play("look").endswith("Next to it, you see a apple 1.")
    kitchen.play("take apple 1 from shelf 1", "move apple 1 to countertop 1")
    assert kitchen.play("look").endswith("Next to it, you see a apple 1."), "now it was taken from the shelf"


def test_go_to_is_refused_within_the_same_location(kitchen: Table) -> None:
    kitchen.play("go to countertop 1")
    assert not kitchen.can("go to shelf 1")
    assert kitchen.play("go to shelf 1") == NOTHING
    assert kitchen.play("go to countertop 1") == NOTHING


def test_receptacles_of_one_location_are_all_within_reach(kitchen: Table) -> None:
    kitchen.play("go to countertop 1", "take apple 1 from countertop 1")
    assert kitchen.play("move apple 1 to shelf 1") == "You move the apple 1 to the shelf 1."
    assert kitchen.play("go to cabinet 1", "open cabinet 2").startswith("You open the cabinet 2.")


def test_objects_are_examined_only_while_held(kitchen: Table) -> None:
    kitchen.play("go to countertop 1")
    assert kitchen.play("examine apple 1") == NOTHING
    assert kitchen.play("take apple 1 from countertop 1") == "You pick up the apple 1 from the countertop 1."
    assert kitchen.play("examine apple 1") == "There's nothing special about apple 1."
    assert kitchen.play("examine shelf 1") == "On the shelf 1, you see a desklamp 1, and a fork 1."
    assert kitchen.play("examine fridge 1") == NOTHING, "receptacles are examined where the agent is"


def test_hands_hold_one_object(kitchen: Table) -> None:
    kitchen.play("go to countertop 1", "take apple 1 from countertop 1")
    assert kitchen.play("take apple 2 from countertop 1") == NOTHING
    assert kitchen.play("inventory") == "You are carrying: a apple 1."


def test_closed_receptacles_give_and_take_nothing(kitchen: Table) -> None:
    kitchen.play("go to cabinet 2")
    assert kitchen.play("take mug 1 from cabinet 2") == NOTHING
    kitchen.play("open cabinet 2", "take mug 1 from cabinet 2", "close cabinet 2")
    assert kitchen.play("move mug 1 to cabinet 2") == NOTHING
    assert kitchen.play("examine mug 1") == "This is a normal mug 1. In it, you see nothing."


def test_a_closed_microwave_heats_and_heating_removes_cool(kitchen: Table) -> None:
    kitchen.play("go to countertop 1", "take apple 1 from countertop 1", "go to fridge 1")
    assert kitchen.play("cool apple 1 with fridge 1") == "You cool the apple 1 using the fridge 1."
    assert kitchen.play("examine apple 1") == "This is a cold apple 1."
    assert (
        kitchen.play("go to microwave 1", "heat apple 1 with microwave 1", "examine apple 1")
        == "This is a hot apple 1."
    )
    assert kitchen.play("go to sinkbasin 1", "clean apple 1 with sinkbasin 1", "examine apple 1") == (
        "This is a hot and clean apple 1."
    )
    kitchen.play("go to fridge 1", "cool apple 1 with fridge 1")
    assert kitchen.play("examine apple 1") == "This is a cool and clean apple 1."


def test_processing_needs_the_object_in_hand_and_the_right_receptacle(kitchen: Table) -> None:
    kitchen.play("go to microwave 1")
    assert kitchen.play("heat apple 1 with microwave 1") == NOTHING
    kitchen.play("go to countertop 1", "take apple 1 from countertop 1", "go to fridge 1")
    assert kitchen.play("heat apple 1 with fridge 1") == NOTHING
    assert kitchen.play("cool apple 1 with microwave 1") == NOTHING


def test_a_lamp_turns_on_again_and_again(kitchen: Table) -> None:
    kitchen.play("go to shelf 1")
    assert kitchen.play("use desklamp 1") == kitchen.play("use desklamp 1") == "You turn on the desklamp 1."
    assert kitchen.play("take desklamp 1 from shelf 1") == NOTHING


def test_a_receptacle_holds_only_what_its_type_may_contain(kitchen: Table) -> None:
    kitchen.play("go to countertop 1", "take knife 1 from countertop 1")
    assert not kitchen.can("move knife 1 to shelf 1")
    assert kitchen.play("move knife 1 to shelf 1") == NOTHING
    assert kitchen.play("move knife 1 to countertop 1") == "You move the knife 1 to the countertop 1."


def test_a_held_knife_slices_what_stands_here(kitchen: Table) -> None:
    kitchen.play("go to countertop 1", "take knife 1 from countertop 1")
    assert kitchen.can("slice apple 2 with knife 1")
    assert kitchen.play("slice apple 2 with knife 1") == "You sliced the apple 2 with the knife 1."
    kitchen.play("move knife 1 to countertop 1", "take apple 2 from countertop 1")
    assert kitchen.play("examine apple 2") == "This is a sliced apple 2."
    kitchen.play("move apple 2 to countertop 1", "take knife 1 from countertop 1", "go to fridge 1")
    assert not kitchen.can("slice apple 2 with knife 1")


def test_an_object_in_two_receptacles_leaves_only_one_when_taken(kitchen: Table) -> None:
    kitchen.play("go to countertop 1", "take fork 1 from countertop 1")
    assert kitchen.play("examine shelf 1") == "On the shelf 1, you see a desklamp 1, and a fork 1."
    kitchen.play("move fork 1 to shelf 1")
    assert kitchen.play("examine shelf 1") == "On the shelf 1, you see a desklamp 1, and a fork 1."


def test_the_admissible_list_is_sorted_complete_and_without_help(kitchen: Table) -> None:
    kitchen.play("go to cabinet 1", "open cabinet 2")
    assert kitchen.engine.admissible() == (
        "close cabinet 2",
        "examine cabinet 1",
        "examine cabinet 2",
        "go to countertop 1",
        "go to fridge 1",
        "go to microwave 1",
        "go to shelf 1",
        "go to sinkbasin 1",
        "inventory",
        "look",
        "open cabinet 1",
        "take mug 1 from cabinet 2",
    )
    assert kitchen.play("help").startswith("Available commands:\n  look:   ")
    assert kitchen.engine.valid


@pytest.mark.parametrize(
    "command",
    ["", " ", "go", "go to", "go to fridge", "Go to fridge 1", "go  to fridge 1", "look around", "go to fridge 1 now",
     "take", "take apple 1", "take apple 1 from", "open apple 1", "use shelf 1", "put apple 1 in/on fridge 1",
     "go to fridge\x001", "\x00", "dance", "slice", "heat apple 1 with", "help me", "inventory 1", "fridge 1" * 12_500],
)  # fmt: skip
def test_any_other_command_changes_nothing(kitchen: Table, command: str) -> None:
    before = kitchen.engine.admissible()
    assert kitchen.play(command) == NOTHING
    assert not kitchen.engine.valid
    assert kitchen.engine.admissible() == before


def test_commands_are_stripped(kitchen: Table) -> None:
    assert kitchen.play("  go to fridge 1\n").startswith("You arrive at fridge 1.")


def test_the_older_vocabulary_puts_and_arrives_at_locations() -> None:
    table = Table(make_game(), "put")
    assert table.play("go to countertop 1") == f"You arrive at loc 5. {AT_COUNTER}"
    table.play("take apple 1 from countertop 1")
    assert table.can("put apple 1 in/on shelf 1")
    assert table.play("move apple 1 to shelf 1") == NOTHING
    assert table.play("put apple 1 in/on shelf 1") == "You put the apple 1 in/on the shelf 1."


def test_a_hot_apple_wins_once_it_is_in_the_fridge(kitchen: Table) -> None:
    kitchen.play("go to countertop 1", "take apple 1 from countertop 1", "go to fridge 1", "open fridge 1")
    kitchen.play("move apple 1 to fridge 1")
    assert not kitchen.engine.won
    kitchen.play("take apple 1 from fridge 1", "go to microwave 1", "heat apple 1 with microwave 1", "go to fridge 1")
    kitchen.play("move apple 1 to fridge 1")
    assert kitchen.engine.won


def test_two_objects_must_share_one_receptacle() -> None:
    table = Table(make_game("pick_two_obj_and_place"))
    table.play("go to countertop 1", "take apple 1 from countertop 1", "go to fridge 1", "open fridge 1")
    table.play("move apple 1 to fridge 1", "go to countertop 1", "take apple 2 from countertop 1", "go to fridge 1")
    assert not table.engine.won
    table.play("move apple 2 to fridge 1")
    assert table.engine.won


def test_the_light_goal_needs_the_lamp_here_and_the_object_in_hand() -> None:
    table = Table(make_game("look_at_obj_in_light", item="Apple", receptacle="", lamp="DeskLamp"))
    table.play("go to countertop 1", "use desklamp 1")
    assert not table.engine.won
    table.play("take apple 1 from countertop 1")
    assert table.engine.won, "a lamp used before counts"
    table.play("go to fridge 1")
    assert not table.engine.won


def test_a_reset_forgets_everything(kitchen: Table) -> None:
    first = kitchen.engine.admissible()
    kitchen.play("go to countertop 1", "take apple 1 from countertop 1", "go to fridge 1", "open fridge 1")
    kitchen.engine.reset()
    assert kitchen.engine.admissible() == first
    assert kitchen.play("inventory") == "You are not carrying anything."


@pytest.mark.parametrize(
    ("goal", "complaint"),
    [
        ({"task_type": "look_at_obj_in_light", "lamp": "FloorLamp"}, "no floorlamp"),
        ({"task_type": "pick_and_place_simple", "receptacle": "Safe"}, "there is no safe"),
        ({"task_type": "pick_and_place_simple", "receptacle": "Cabinet"}, "cabinet cannot contain a apple"),
        ({"task_type": "pick_two_obj_and_place", "item": "Mug", "receptacle": "Cabinet"}, "needs 2 mug"),
        ({"task_type": "pick_clean_then_place_in_recep", "item": "Mug", "receptacle": "Cabinet"}, "needs 1 mug"),
        ({"task_type": "dance"}, "task type 'dance'"),
    ],
)
def test_a_goal_that_no_action_reaches_is_refused(goal: dict[str, str], complaint: str) -> None:
    with pytest.raises(GameFormatError, match=complaint):
        make_game(**goal)


@pytest.mark.parametrize(
    "problem",
    [
        "",
        "not a game",
        KITCHEN[:1500],
        KITCHEN.replace("(atLocation agent1 loc_bar_9)", ""),
        KITCHEN.replace("(receptacleAtLocation Fridge_bar_1 loc_bar_3)", ""),
        KITCHEN.replace("(inReceptacle Apple_bar_1 CounterTop_bar_1)", "(inReceptacle Apple_bar_1 Moon_bar_1)"),
        KITCHEN.replace("(inReceptacle Apple_bar_1 CounterTop_bar_1)", "(inReceptacle Apple_bar_1)"),
        KITCHEN.replace("(pickupable Apple_bar_1)", "(pickupable Ghost_bar_1)"),
        KITCHEN.replace("Knife_bar_1", "Knife"),
        KITCHEN.replace("(:init", "(:init (holds agent1 Apple_bar_1)"),
        KITCHEN.replace("(:init", "(:init (canContain FridgeType)"),
        KITCHEN.replace("(:init", "(:init (objectType Apple_bar_1 PearType)"),
    ],
)
def test_a_damaged_problem_is_refused_by_name(problem: str) -> None:
    with pytest.raises(GameFormatError):
        make_game(problem=problem)


def test_a_written_problem_reads_back_as_the_same_game() -> None:
    for task_type in ("pick_two_obj_and_place", "pick_cool_then_place_in_recep", "pick_and_place_simple"):
        game = make_game(task_type)
        again = parse_problem(
            write_problem(game), name=game.name, floor_plan=game.floor_plan, task=game.task, goal=game.goal
        )
        assert again == game
