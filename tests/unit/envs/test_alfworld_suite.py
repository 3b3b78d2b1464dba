"""The suite as an actor sees it: the contract, bad input, and games from files."""

import json
import lzma
from pathlib import Path

import pytest
from hand_kitchen import KITCHEN

from seed_async.envs.alfworld.scenes import SPLITS, room_kind, room_split
from seed_async.envs.alfworld.suite import AlfworldEnvironment, AlfworldSuite
from seed_async.envs.contract import Environment, GameFormatError, Observation, Suite, TaskNotFoundError


def record(number: int, floor_plan: str, **changes: object) -> dict[str, object]:
    """Return one line of a compact file: the hand-written kitchen under some floor plan."""
    return {
        "id": f"trial_{number}",
        "task_type": "pick_heat_then_place_in_recep",
        "floor_plan": floor_plan,
        "task": "put a hot apple in fridge",
        "human_tasks": [],
        "pddl_params": {"object_target": "Apple", "parent_target": "Fridge", "toggle_target": "", "mrecep_target": ""},
        "pddl_problem": KITCHEN.replace("(:objects", "(:objects\nFridge_bar_1 - receptacle\n"),
        **changes,
    }


def write(path: Path, records: list[dict[str, object]]) -> str:
    """Write a compact file and return its path."""
    text = "".join(json.dumps(line) + "\n" for line in records).encode()
    path.write_bytes(lzma.compress(text) if path.suffix == ".xz" else text)
    return str(path)


@pytest.fixture
def compact(tmp_path: Path) -> str:
    """Return a compact file with one game in each of thirty kitchens."""
    return write(tmp_path / "games.jsonl.xz", [record(n, f"FloorPlan{n}") for n in range(1, 31)])


def start(suite: AlfworldSuite, number: int = 0) -> tuple[AlfworldEnvironment, Observation]:
    """Open a training game."""
    environment = suite.make()
    return environment, environment.reset(suite.tasks("train")[number])


def test_the_suite_and_its_environment_satisfy_the_contract() -> None:
    suite: Suite = AlfworldSuite()
    environment: Environment = suite.make()
    observation = environment.reset(suite.tasks("train")[0])
    assert observation.text.startswith("-= Welcome to TextWorld, ALFRED! =-\n\nYou are in the middle of a room.")
    assert observation.text.endswith(f"Your task is to: {observation.info.task}")
    assert observation.info.valid
    assert not observation.info.won
    assert "help" not in observation.admissible


def test_playing_the_solution_wins_with_reward_one_at_the_last_step_only() -> None:
    suite = AlfworldSuite()
    environment, _ = start(suite)
    *before, last = [environment.step(command) for command in suite.solution(suite.tasks("train")[0])]
    assert all(result.reward == 0.0 and not result.terminated for result in before)
    assert (last.reward, last.terminated, last.truncated) == (1.0, True, False)
    assert last.observation.info.won
    assert last.observation.info.score == 1.0


def test_the_step_limit_truncates_and_a_finished_episode_must_be_reset() -> None:
    environment, _ = start(AlfworldSuite(max_steps=3))
    results = [environment.step("look") for _ in range(3)]
    assert [result.truncated for result in results] == [False, False, True]
    with pytest.raises(RuntimeError, match="call reset first"):
        environment.step("look")


def test_an_environment_that_was_never_reset_says_so() -> None:
    with pytest.raises(RuntimeError, match="call reset first"):
        AlfworldSuite().make().step("look")


@pytest.mark.parametrize("command", ["", "\x00\x07", "a" * 100_000, "take \ud83c from x", "\n\n", "go to cabinet 99"])
def test_a_bad_command_is_reported_and_changes_nothing(command: str) -> None:
    environment, first = start(AlfworldSuite())
    result = environment.step(command)
    assert result.observation.text == "Nothing happens."
    assert not result.observation.info.valid
    assert result.observation.admissible == first.admissible
    assert environment.step("inventory").observation.info.valid


def test_members_of_a_group_see_the_same_game() -> None:
    suite = AlfworldSuite()
    assert start(suite)[1] == start(suite)[1] == start(AlfworldSuite())[1]


def test_environments_do_not_share_state() -> None:
    suite = AlfworldSuite()
    (one, first), (other, _) = start(suite), start(suite)
    for command in suite.solution(suite.tasks("train")[0]):
        one.step(command)
    assert other.step("look").observation.admissible == first.admissible


@pytest.mark.parametrize(
    "task",
    ["", "generated", "generated/train/1", "generated/test/000001", "generated/train/999999", "x" * 100_000,
     "generated/train/-00001", "../../etc/passwd", "generated/train/\u0661\u0661\u0661\u0661\u0661\u0661"],
)  # fmt: skip
def test_an_unknown_task_is_named_in_the_error(task: str) -> None:
    with pytest.raises(TaskNotFoundError):
        AlfworldSuite().make().reset(task)


def test_an_unknown_split_names_the_known_ones(compact: str) -> None:
    for suite in (AlfworldSuite(), AlfworldSuite(compact)):
        with pytest.raises(TaskNotFoundError, match="train"):
            suite.tasks("test")


def test_task_lists_are_indexed_and_sliced_without_making_games() -> None:
    tasks = AlfworldSuite(counts={"train": 10**6}).tasks("train")
    assert len(tasks) == 10**6
    assert tasks[-1] == "generated/train/999999"
    assert list(tasks[1:3]) == ["generated/train/000001", "generated/train/000002"]


def test_the_older_vocabulary_is_played_and_solved() -> None:
    suite = AlfworldSuite(vocabulary="put", task_types=("pick_and_place_simple",))
    environment, _ = start(suite)
    results = [environment.step(command) for command in suite.solution(suite.tasks("train")[0])]
    assert results[-1].terminated
    assert any(" loc " in result.observation.text for result in results)


def test_a_compact_file_is_split_by_room_into_all_three_splits(compact: str) -> None:
    suite = AlfworldSuite(compact)
    plans = {split: {suite.board(task).game.floor_plan for task in suite.tasks(split)} for split in SPLITS}
    assert sum(map(len, plans.values())) == 30
    assert all(room_split(plan) == split for split, found in plans.items() for plan in found)
    assert [len(plans[split]) for split in SPLITS] == [24, 3, 3]


def test_a_compact_game_is_played_to_the_end(compact: str) -> None:
    suite = AlfworldSuite(compact)
    environment, observation = start(suite)
    assert observation.info.task == "put a hot apple in fridge."
    assert [environment.step(command).terminated for command in suite.solution(suite.tasks("train")[0])][-1]


def test_plain_jsonl_reads_like_xz(tmp_path: Path) -> None:
    path = write(tmp_path / "games.jsonl", [record(1, "FloorPlan1")])
    assert len(AlfworldSuite(path).tasks(room_split("FloorPlan1"))) == 1


def test_a_missing_path_is_named() -> None:
    with pytest.raises(FileNotFoundError, match="no/such/games"):
        AlfworldSuite("no/such/games.jsonl")


@pytest.mark.parametrize(
    "wanted", [{"rooms": ("bedroom",)}, {"task_types": ("look_at_obj_in_light",)}, {"max_receptacles": 0}]
)
def test_a_filter_that_leaves_nothing_says_so(compact: str, wanted: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="no game passes"):
        AlfworldSuite(compact, **wanted)  # type: ignore[arg-type]


def test_an_empty_split_is_reported_when_it_is_asked_for(tmp_path: Path) -> None:
    suite = AlfworldSuite(write(tmp_path / "one.jsonl", [record(1, "FloorPlan1")]))
    empty = next(split for split in SPLITS if split != room_split("FloorPlan1"))
    with pytest.raises(TaskNotFoundError, match="no games left"):
        suite.tasks(empty)


@pytest.mark.parametrize(
    "lines",
    [b"not json\n", b"{}\n", b"\x00\xff\n", json.dumps(record(1, "House7")).encode() + b"\n",
     (json.dumps(record(1, "FloorPlan1")) + "\n").encode() * 2, json.dumps(record(1, "FloorPlan1")).encode()[:900]],
)  # fmt: skip
def test_a_damaged_compact_file_is_refused_with_its_line(tmp_path: Path, lines: bytes) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_bytes(lines)
    with pytest.raises(GameFormatError, match=r"bad\.jsonl, line [12]"):
        AlfworldSuite(str(path))


def test_a_truncated_xz_file_is_refused(tmp_path: Path, compact: str) -> None:
    path = tmp_path / "cut.jsonl.xz"
    path.write_bytes(Path(compact).read_bytes()[:-60])
    with pytest.raises(GameFormatError, match="not a whole xz file"):
        AlfworldSuite(str(path))


def test_a_foreign_game_fails_when_it_is_opened(tmp_path: Path) -> None:
    path = write(tmp_path / "foreign.jsonl", [record(1, "FloorPlan1", pddl_problem="(define (problem chess))")])
    suite = AlfworldSuite(path)
    with pytest.raises(GameFormatError, match="truncated"):
        suite.make().reset(suite.tasks(room_split("FloorPlan1"))[0])


def test_room_kinds_follow_the_floor_plan_numbers() -> None:
    numbers = {1: "kitchen", 30: "kitchen", 201: "living_room", 330: "bedroom", 401: "bathroom"}
    assert {number: room_kind(f"FloorPlan{number}") for number in numbers} == numbers
    with pytest.raises(GameFormatError):
        room_kind("FloorPlan150")
