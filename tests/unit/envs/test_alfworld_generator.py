"""What the generator promises: the same games everywhere, winnable, and rooms that belong to one split."""

import os
import subprocess
import sys
import time
from collections import Counter

import pytest

from seed_async.envs.alfworld.board import Board
from seed_async.envs.alfworld.engine import Engine
from seed_async.envs.alfworld.model import PROCESSOR, TASK_TYPES
from seed_async.envs.alfworld.oracle import solve
from seed_async.envs.alfworld.pddl import parse_problem, write_problem
from seed_async.envs.alfworld.scenes import SPLITS
from seed_async.envs.alfworld.suite import AlfworldSuite

_DIGEST = """
from hashlib import sha256
from seed_async.envs.alfworld.pddl import write_problem
from seed_async.envs.alfworld.suite import AlfworldSuite
suite = AlfworldSuite(seed=5)
games = [suite.board(task).game for split in ("train", "valid_unseen") for task in suite.tasks(split)[:30]]
print(sha256("".join(game.task + write_problem(game) for game in games).encode()).hexdigest())
"""


def _digest(hash_seed: str) -> str:
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
    done = subprocess.run([sys.executable, "-c", _DIGEST], env=environment, capture_output=True, text=True, check=True)
    return done.stdout


def test_a_seed_gives_the_same_bytes_under_another_hash_seed() -> None:
    assert _digest("1") == _digest("4242")


def test_games_differ_by_seed_split_and_index() -> None:
    first, second = AlfworldSuite(seed=0), AlfworldSuite(seed=1)
    texts = [
        suite.board(task).first_text
        for suite in (first, second)
        for task in ("generated/train/000000", "generated/train/000006", "generated/valid_seen/000000")
    ]
    assert len(set(texts)) == len(texts)


def test_a_game_does_not_depend_on_those_opened_before() -> None:
    one, other = AlfworldSuite(), AlfworldSuite()
    for task in one.tasks("train")[:20]:
        one.board(task)
    assert one.board("generated/train/000123").game == other.board("generated/train/000123").game


def test_every_split_has_every_task_type_and_all_games_are_winnable() -> None:
    suite = AlfworldSuite(counts=dict.fromkeys(SPLITS, 200))
    for split in SPLITS:
        types: Counter[str] = Counter()
        for task in suite.tasks(split):
            engine = Engine(suite.board(task))
            assert not engine.won
            for command in suite.solution(task):
                engine.play(command)
                assert engine.valid
            assert engine.won
            types[engine.board.game.goal.task_type] += 1
        assert set(types) == set(TASK_TYPES)


def test_two_hundred_verified_games_take_less_than_a_second_of_a_core() -> None:
    suite, started_s = AlfworldSuite(), time.process_time()
    for task in suite.tasks("train")[:200]:
        suite.open_uncached(task)
    assert time.process_time() - started_s < 1.0


def test_the_splits_share_no_room() -> None:
    suite = AlfworldSuite(counts={"train": 400, "valid_seen": 100, "valid_unseen": 100})
    rooms = {split: {suite.board(task).game.floor_plan for task in suite.tasks(split)} for split in SPLITS}
    assert not rooms["train"] & rooms["valid_seen"]
    assert not rooms["train"] & rooms["valid_unseen"]
    assert not rooms["valid_seen"] & rooms["valid_unseen"]
    assert all(len(found) > 50 for found in rooms.values())


def test_a_room_is_its_kind_and_its_receptacles() -> None:
    suite = AlfworldSuite()
    for task in suite.tasks("train")[:30]:
        game = suite.board(task).game
        kinds = sorted(place.kind for place in game.receptacles)
        assert game.floor_plan.split()[1:] == kinds


def test_difficulty_settings_are_kept() -> None:
    suite = AlfworldSuite(min_receptacles=4, max_receptacles=6, num_objects=4)
    for task in suite.tasks("train")[:60]:
        game = suite.board(task).game
        assert 4 <= len(game.receptacles) <= 6
        assert len(game.items) == 4


def test_task_types_and_rooms_can_be_restricted() -> None:
    suite = AlfworldSuite(task_types=("pick_heat_then_place_in_recep",), rooms=("kitchen",))
    for task in suite.tasks("train")[:20]:
        game = suite.board(task).game
        assert game.goal.task_type == "pick_heat_then_place_in_recep"
        assert game.floor_plan.startswith("kitchen ")
    only_bedrooms = AlfworldSuite(rooms=("bedroom",))
    types = {only_bedrooms.board(task).game.goal.task_type for task in only_bedrooms.tasks("train")[:30]}
    assert types == {"pick_and_place_simple", "look_at_obj_in_light", "pick_two_obj_and_place"}


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"min_receptacles": 9, "max_receptacles": 8}, "receptacles from 9 to 8"),
        ({"min_receptacles": 1}, "receptacles from 1"),
        ({"max_receptacles": 50}, "to 50"),
        ({"num_objects": 1}, "num_objects is 1"),
        ({"task_types": ("dance",)}, "task type 'dance'"),
        ({"rooms": ("cellar",)}, "room 'cellar'"),
        ({"rooms": ("bedroom",), "task_types": ("pick_heat_then_place_in_recep",)}, "no pick_heat"),
        ({"counts": {"test": 3}}, "counts is"),
        ({"counts": {"train": 0}}, "counts is"),
        ({"vocabulary": "sing"}, "vocabulary is 'sing'"),
        ({"max_steps": 0}, "max_steps is 0"),
    ],
)
def test_impossible_settings_are_refused_with_the_rule(settings: dict[str, object], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        AlfworldSuite(**settings)  # type: ignore[arg-type]


def test_the_oracle_processes_before_it_places() -> None:
    suite = AlfworldSuite(task_types=("pick_clean_then_place_in_recep",))
    board = suite.board(suite.tasks("train")[0])
    verbs = [command.split()[0] for command in solve(board)]
    assert verbs.index("take") < verbs.index("clean") < verbs.index("move")
    assert PROCESSOR[board.game.goal.state] == "sinkbasin"


def test_a_generated_game_survives_being_written_as_pddl() -> None:
    suite = AlfworldSuite(min_receptacles=10, max_receptacles=14, num_objects=20)
    for task in suite.tasks("train")[:12]:
        game = suite.board(task).game
        again = parse_problem(
            write_problem(game), name=game.name, floor_plan=game.floor_plan, task=game.task, goal=game.goal
        )
        assert Board(again, "move").first_text == Board(game, "move").first_text
        assert again == game
