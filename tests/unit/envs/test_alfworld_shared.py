"""Checks on the shared games of real scenes, where the checkout has them beside it."""

import json
import lzma
from pathlib import Path

import pytest
from test_alfworld_expert import play

from seed_async.envs.alfworld.board import Board
from seed_async.envs.alfworld.engine import Engine
from seed_async.envs.alfworld.oracle import solve
from seed_async.envs.alfworld.scenes import SPLITS, TaskParams, open_game
from seed_async.envs.alfworld.suite import AlfworldSuite

SHARED = Path(__file__).resolve().parents[4] / "shared" / "data" / "alfworld"
pytestmark = pytest.mark.skipif(not SHARED.is_dir(), reason=f"the shared games are not at {SHARED}")


@pytest.mark.parametrize(("name", "count"), [("train", 4391), ("valid_seen", 168)])
def test_every_shared_game_loads_and_is_won_by_its_solution(name: str, count: int) -> None:
    played = 0
    with lzma.open(SHARED / f"{name}.jsonl.xz", "rt", encoding="utf-8") as file:
        for line in file:
            told = json.loads(line)
            params = TaskParams(**told["pddl_params"])
            game = open_game(
                told["id"], told["task_type"], told["floor_plan"], told["task"], params, told["pddl_problem"]
            )
            board = Board(game, "move")
            # The oracle is checked on every fourth game, to save seconds.
            for commands in (told["solution"], *([solve(board)] if played % 4 == 0 else [])):
                engine = Engine(board)
                for command in commands:
                    engine.play(command)
                    assert engine.valid, (told["id"], command)
                assert engine.won, told["id"]
            played += 1
    assert played == count


def test_the_expert_wins_real_scenes_without_an_idle_command() -> None:
    suite = AlfworldSuite(str(SHARED / "valid_seen.jsonl.xz"), max_steps=200)
    played = [play(suite, task) for split in SPLITS for task in suite.tasks(split)]
    assert all(won for won, _, _ in played)
    assert sum(invalid for _, _, invalid in played) == 0


def test_the_rooms_of_real_scenes_are_split_and_filtered_alike() -> None:
    suite = AlfworldSuite(str(SHARED / "train.jsonl.xz"), max_receptacles=10, rooms=("bathroom", "bedroom"))
    plans = {}
    for split in SPLITS:
        games = [suite.board(task).game for task in suite.tasks(split)[:30]]
        assert all(len(game.receptacles) <= 10 for game in games)
        plans[split] = {game.floor_plan for game in games}
        assert all(int(plan.removeprefix("FloorPlan")) > 300 for plan in plans[split])
    assert not plans["train"] & plans["valid_seen"] | plans["train"] & plans["valid_unseen"]
