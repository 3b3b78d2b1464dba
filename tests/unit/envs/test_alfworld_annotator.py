"""The annotator names the workflow that won, or the mistake that was made, in short regular sentences."""

import random
import re

import pytest
from hand_kitchen import KITCHEN, make_game

from seed_async.envs.alfworld.annotator import annotate
from seed_async.envs.alfworld.board import Board
from seed_async.envs.alfworld.engine import Engine
from seed_async.envs.alfworld.suite import AlfworldSuite
from seed_async.envs.contract import Analysis, Step

TAKE = ("go to countertop 1", "take apple 1 from countertop 1")
HEAT = ("go to microwave 1", "heat apple 1 with microwave 1")
PUT = ("go to fridge 1", "open fridge 1", "move apple 1 to fridge 1")
BEST = "find the apple (it was on countertop 1), take it, heat it with microwave 1, then move it to fridge 1."


def tell(*commands: str, board: Board | None = None) -> Analysis:
    """Play commands in the kitchen and annotate them."""
    engine = Engine(board or Board(make_game(), "move"))
    steps, text = [], engine.reset()
    for command in commands:
        after = engine.play(command)
        steps.append(Step(observation=text, action=command, valid=engine.valid))
        text = after
    return annotate(engine.board, steps, engine.won)


def test_a_success_is_told_as_its_workflow() -> None:
    told = tell(*TAKE, *HEAT, *PUT)
    assert told.episode_skill == BEST
    assert told.episode_summary == "won in 7 steps: found apple 1 on countertop 1, heated it, put it in fridge 1."


def test_a_success_is_told_by_what_was_done_and_not_by_the_shortest_plan() -> None:
    told = tell(
        "go to countertop 1",
        "take apple 2 from countertop 1",
        "move apple 2 to shelf 1",
        "take apple 2 from shelf 1",
        "go to microwave 1",
        "heat apple 2 with microwave 1",
        *PUT[:2],
        "move apple 2 to fridge 1",
    )
    assert "apple 2 on countertop 1" in told.episode_summary
    assert told.episode_skill == BEST


@pytest.mark.parametrize(
    ("commands", "happened", "rule"),
    [
        ((*TAKE, *PUT), "took apple 1 but did not heat it", "do not put apple 1 down before you heat it"),
        (TAKE, "took apple 1 but did not heat it", "do not carry apple 1 around before you heat it"),
        ((*TAKE, *HEAT), "took apple 1 but never put it in a fridge", "do not carry apple 1 around"),
        (
            (*TAKE, *HEAT, "go to countertop 1", "move apple 1 to shelf 1"),
            "put apple 1 on shelf 1",
            "do not put apple 1 on shelf 1",
        ),
        (
            ("go to countertop 1", "look"),
            "saw apple 2 on countertop 1 but never took it",
            "do not walk past apple 2 on countertop 1",
        ),
        (
            ("go to countertop 1", "take knife 1 from countertop 1", "look"),
            "took knife 1 instead of a apple",
            "do not take knife 1 when you need a apple",
        ),
        (
            ("go to cabinet 1", "go to fridge 1", "go to cabinet 1", "go to fridge 1", "go to cabinet 1"),
            "went to cabinet 1 3 times, never found the apple",
            "do not go back to cabinet 1 without need",
        ),
        (
            ("go to cabinet 1", "open cabinet 1"),
            "searched 1 places, never found the apple",
            "do not end the search at cabinet 1 without a apple",
        ),
        (("look", "look"), "went nowhere", "do not stand still"),
        (("take apple 1", "fly", "fly"), "3 commands did nothing", 'do not repeat "fly"'),
        (("x " * 500, "\x00", "\x00"), "3 commands did nothing", "do not repeat commands that do nothing"),
        ((), "went nowhere", "do not stand still"),
    ],
)
def test_a_failure_names_the_mistake_and_what_to_do_instead(
    commands: tuple[str, ...], happened: str, rule: str
) -> None:
    told = tell(*commands)
    assert told.episode_summary == f"failed after {len(commands)} steps: {happened}."
    assert told.episode_skill == f"{rule}. instead {BEST}"


def test_an_object_left_behind_a_door_is_told_as_a_door_left_closed() -> None:
    board = Board(make_game("pick_and_place_simple", item="Mug", receptacle="CounterTop"), "move")
    told = tell("go to cabinet 2", "go to fridge 1", board=board)
    assert told.episode_skill == (
        "do not leave cabinet 2 closed. instead find the mug (it was in closed cabinet 2), take it, then move it to "
        "countertop 1."
    )


def test_stopping_after_one_of_two_is_named() -> None:
    board = Board(make_game("pick_two_obj_and_place"), "move")
    told = tell(*TAKE, *PUT, board=board)
    assert told.episode_skill == (
        "do not stop after apple 1. instead find two apple (apple 2 was on countertop 1, apple 1 was on countertop 1), "
        "take one at a time and move both to fridge 1."
    )


def test_a_lamp_used_away_from_the_object_is_named() -> None:
    board = Board(make_game("look_at_obj_in_light", receptacle="", lamp="DeskLamp"), "move")
    won = tell("go to countertop 1", "use desklamp 1", "take apple 1 from countertop 1", board=board)
    assert won.episode_skill == ("find the apple (it was on countertop 1), take it, go to shelf 1 and use desklamp 1.")
    lost = tell(*TAKE, "use desklamp 2", "go to fridge 1", board=board)
    assert lost.episode_skill.startswith("do not carry apple 1 past the lamp. instead find the apple")


@pytest.mark.parametrize("vocabulary", ["move", "put"])
def test_every_analysis_is_short_and_names_only_what_the_game_has(vocabulary: str) -> None:
    suite = AlfworldSuite(vocabulary=vocabulary, max_steps=25, num_objects=8)  # type: ignore[arg-type]
    rng = random.Random(3)
    for task in suite.tasks("train")[:120]:
        environment, expert = suite.make(), suite.expert()
        observation = environment.reset(task)
        expert.reset(observation)
        noise, steps, done, won = rng.choice([0.0, 0.5, 1.0]), [], False, False
        while not done:
            wild = rng.random() < noise
            command = rng.choice([*observation.admissible, "take it", "go to bed"]) if wild else expert.act(observation)
            result = environment.step(command)
            steps.append(Step(observation=observation.text, action=command, valid=result.observation.info.valid))
            observation, won = result.observation, result.terminated
            done = result.terminated or result.truncated
        told = suite.annotate(task, steps, won)
        board = suite.board(task)
        assert 0 < len(told.episode_summary.split()) <= 25
        assert 0 < len(told.episode_skill.split()) <= 40
        unquoted = re.sub(r'"[^"]*"', "", told.episode_skill)
        named = set(re.findall(r"(?<!find )\b[a-z]{2,} \d+\b", unquoted))
        assert named <= {*board.item_names, *board.receptacle_names}, told
        assert told.episode_skill == told.episode_skill.lower()


def test_an_object_that_is_in_place_from_the_start_is_told_as_such() -> None:
    problem = KITCHEN.replace("(inReceptacle Apple_bar_2 CounterTop_bar_1)", "(inReceptacle Apple_bar_2 Fridge_bar_1)")
    board = Board(make_game("pick_two_obj_and_place", problem), "move")
    skill = "find one more apple (it was on countertop 1), take it, then move it to fridge 1 beside apple 1."
    name = "apple 2"
    won = tell(
        "go to countertop 1", f"take {name} from countertop 1", *PUT[:2], f"move {name} to fridge 1", board=board
    )
    assert won.episode_skill == skill
    assert tell("look", board=board).episode_skill == f"do not stand still. instead {skill}"


def test_a_trajectory_marked_as_won_that_the_replay_loses_is_told_by_the_oracle() -> None:
    told = annotate(Board(make_game(), "move"), [Step(observation="", action="look", valid=True)], won=True)
    assert told == Analysis(episode_summary="won in 1 steps.", episode_skill=BEST)
