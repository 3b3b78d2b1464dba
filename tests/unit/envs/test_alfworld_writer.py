"""Generated games written in the official layout: the same bytes everywhere, and the same games when read back."""

import json
import os
import subprocess
import sys
from hashlib import sha256
from pathlib import Path

import pytest
from typer.testing import CliRunner

from seed_async.cli import app
from seed_async.envs.alfworld.board import Board
from seed_async.envs.alfworld.suite import AlfworldSuite
from seed_async.envs.alfworld.tasks import sentence_in_grammar

COUNTS = {"train": 12, "valid_seen": 6, "valid_unseen": 6}
WRITE = ["data", "alfworld", "--train", "12", "--seen", "6", "--unseen", "6", "--seed", "7"]


def write(out: Path, *more: str) -> Path:
    """Write games by the command and return the folder that holds the splits."""
    result = CliRunner().invoke(app, [*WRITE, "--out", str(out), *more])
    assert result.exit_code == 0, result.output
    return out / "json_2.1.1"


def digest(folder: Path) -> str:
    """Return a digest of names and bytes of all files below a folder."""
    total = sha256()
    for path in sorted(folder.rglob("*")):
        total.update(str(path.relative_to(folder)).encode())
        total.update(path.read_bytes() if path.is_file() else b"")
    return total.hexdigest()


@pytest.mark.parametrize("vocabulary", ["move", "put"])
def test_written_games_read_back_as_the_games_they_were(tmp_path: Path, vocabulary: str) -> None:
    write(tmp_path, "--vocabulary", vocabulary)
    made, read = AlfworldSuite(seed=7, counts=COUNTS), AlfworldSuite(str(tmp_path))
    for split, count in COUNTS.items():
        by_number = {task.rpartition("_")[2]: task for task in read.tasks(split)}
        assert len(by_number) == count
        for task in made.tasks(split):
            before = made.board(task)
            after = read.board(by_number[task.rpartition("/")[2]])
            assert after.first_text == before.first_text
            assert (after.item_names, after.receptacle_names) == (before.item_names, before.receptacle_names)
            assert after.game.goal == before.game.goal
            assert after.game.items == before.game.items
            assert after.game.floor_plan == before.game.floor_plan


def test_a_trial_holds_the_official_files_and_keys(tmp_path: Path) -> None:
    folder = write(tmp_path)
    (trial,) = folder.glob("valid_seen/pick_two_obj_and_place-*/trial_000005")
    assert {path.name for path in trial.iterdir()} == {"game.tw-pddl", "initial_state.pddl", "traj_data.json"}
    game, told = (json.loads((trial / name).read_text()) for name in ("game.tw-pddl", "traj_data.json"))
    assert set(game) == {"pddl_domain", "grammar", "pddl_problem", "solvable", "walkthrough"}
    assert game["solvable"] is True
    assert game["pddl_problem"] == (trial / "initial_state.pddl").read_text()
    assert set(told["pddl_params"]) == {
        "mrecep_target", "object_sliced", "object_target", "parent_target", "toggle_target"
    }  # fmt: skip
    assert told["turk_annotations"]["anns"][0]["task_desc"] == f"{sentence_in_grammar(game['grammar'])}."


def test_the_walkthrough_wins(tmp_path: Path) -> None:
    folder = write(tmp_path)
    suite = AlfworldSuite(str(tmp_path))
    for task in suite.tasks("train"):
        environment = suite.make()
        environment.reset(task)
        walkthrough = json.loads((folder / task / "game.tw-pddl").read_text())["walkthrough"]
        assert [environment.step(command).terminated for command in walkthrough][-1]


def test_a_seed_gives_the_same_bytes_under_another_hash_seed(tmp_path: Path) -> None:
    digests = set()
    for hash_seed in ("1", "4242"):
        command = [sys.executable, "-m", "seed_async.cli", *WRITE, "--out", str(tmp_path / hash_seed)]
        subprocess.run(command, env={**os.environ, "PYTHONHASHSEED": hash_seed}, capture_output=True, check=True)
        digests.add(digest(tmp_path / hash_seed))
    assert len(digests) == 1
    other = tmp_path / "other"
    write(other, "--seed", "8")
    assert digest(other) not in digests


def test_difficulty_options_and_filters_are_kept(tmp_path: Path) -> None:
    only = ("--task-type", "pick_and_place_simple", "--room", "bedroom", "--room", "bathroom")
    write(tmp_path, "--min-receptacles", "5", "--max-receptacles", "6", "--num-objects", "3", *only)
    suite = AlfworldSuite(str(tmp_path), rooms=("bedroom", "bathroom"))
    boards = [suite.board(task) for split in COUNTS for task in suite.tasks(split)]
    assert len(boards) == sum(COUNTS.values())
    for game in (board.game for board in boards):
        assert 5 <= len(game.receptacles) <= 6 and len(game.items) == 3
        assert game.goal.task_type == "pick_and_place_simple"


def test_what_was_written_is_never_overwritten(tmp_path: Path) -> None:
    before = digest(write(tmp_path))
    result = CliRunner().invoke(app, [*WRITE, "--out", str(tmp_path)])
    assert result.exit_code == 2
    assert "json_2.1.1 is there already" in result.stderr
    assert digest(tmp_path / "json_2.1.1") == before


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ([], "give at least one of --train"),
        (["--train", "3", "--room", "cellar"], "unknown room 'cellar'"),
        (["--train", "3", "--task-type", "dance"], "unknown task type 'dance'"),
        (["--train", "3", "--min-receptacles", "9"], "receptacles from 9 to 8"),
        (["--train", "3", "--num-objects", "1"], "num_objects is 1"),
        (["--train", "3", "--vocabulary", "sing"], "vocabulary is 'sing'"),
        (["--train", "3", "--room", "bedroom", "--task-type", "pick_heat_then_place_in_recep"], "no pick_heat"),
    ],
)
def test_impossible_options_are_one_line(tmp_path: Path, arguments: list[str], complaint: str) -> None:
    result = CliRunner().invoke(app, ["data", "alfworld", "--out", str(tmp_path / "out"), *arguments])
    assert result.exit_code == 2, result.output
    assert complaint in result.stderr and len(result.stderr.splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_the_oracle_speaks_the_vocabulary_of_the_files(tmp_path: Path) -> None:
    folder = write(tmp_path, "--vocabulary", "put")
    game = json.loads(next(folder.glob("train/pick_and_place_simple-*/*/game.tw-pddl")).read_text())
    assert " in/on " in game["walkthrough"][-1]
    assert '"put {o} in/on {r}"' in game["grammar"]
    suite = AlfworldSuite(str(tmp_path), vocabulary="put")
    assert isinstance(suite.board(suite.tasks("train")[0]), Board)
