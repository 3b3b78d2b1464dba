"""Games in the official folder layout: as alfworld-download leaves them, damaged, missing, and with states only."""

import json
from pathlib import Path

import pytest
from test_alfworld_suite import record, start

from seed_async.envs.alfworld.suite import AlfworldSuite
from seed_async.envs.alfworld.tasks import read_task
from seed_async.envs.contract import GameFormatError, TaskNotFoundError

GRAMMAR = '"rhs": "Your task is to: heat some apple and put it in fridge."\n'


def trial(root: Path, split: str, name: str, *, game: bool = True, state: bool = False, **changes: object) -> Path:
    """Write a trial folder in the official layout and return it; `changes` are keys of its game.tw-pddl."""
    folder = root / "json_2.1.1" / split / name / "trial_1"
    folder.mkdir(parents=True)
    line = record(1, "FloorPlan8")
    told = {key: line[key] for key in ("task_type", "pddl_params")} | {"scene": {"floor_plan": "FloorPlan8"}}
    (folder / "traj_data.json").write_text(json.dumps(told))
    if game:
        file = {"pddl_problem": line["pddl_problem"], "grammar": GRAMMAR, "solvable": True, **changes}
        (folder / "game.tw-pddl").write_text(json.dumps(file))
    if state:
        (folder / "initial_state.pddl").write_text(str(line["pddl_problem"]))
    return folder


def test_an_official_folder_is_read_with_its_own_splits(tmp_path: Path) -> None:
    trial(tmp_path, "train", "pick_heat-Apple-None-Fridge-8")
    trial(tmp_path, "valid_unseen", "pick_heat-Apple-None-Fridge-9")
    trial(tmp_path, "train", "pick_heat-AppleSliced-None-Fridge-8")
    trial(tmp_path, "train", "pick_and_place_with_movable_recep-Apple-Bowl-Fridge-8")
    suite = AlfworldSuite(str(tmp_path))
    assert suite.tasks("train") == ("train/pick_heat-Apple-None-Fridge-8/trial_1",)
    environment, observation = start(suite)
    assert observation.info.task == "heat some apple and put it in fridge."
    assert [environment.step(command).terminated for command in suite.solution(suite.tasks("train")[0])][-1]
    assert len(suite.tasks("valid_unseen")) == 1
    with pytest.raises(TaskNotFoundError, match="there are train, valid_unseen"):
        suite.tasks("eval_in_distribution")


def test_only_games_marked_as_solvable_are_played(tmp_path: Path) -> None:
    trial(tmp_path, "train", "good-8")
    trial(tmp_path, "train", "unsolvable-8", solvable=False)
    unmarked = trial(tmp_path, "train", "unmarked-8") / "game.tw-pddl"
    told = json.loads(unmarked.read_text())
    del told["solvable"]
    unmarked.write_text(json.dumps(told))
    assert AlfworldSuite(str(tmp_path)).tasks("train") == ("train/good-8/trial_1",)


def test_a_trial_without_a_game_is_left_out_where_others_have_one(tmp_path: Path) -> None:
    trial(tmp_path, "train", "good-8")
    trial(tmp_path, "train", "state-8", game=False, state=True)
    trial(tmp_path, "train", "bare-8", game=False)
    assert AlfworldSuite(str(tmp_path)).tasks("train") == ("train/good-8/trial_1",)


def test_states_alone_are_played_with_a_task_in_the_usual_words(tmp_path: Path) -> None:
    for number in range(6):
        trial(tmp_path, "train", f"pick_heat-{number}", game=False, state=True)
    suite = AlfworldSuite(str(tmp_path))
    sentences = {suite.board(task).game.task for task in suite.tasks("train")}
    assert sentences == {"put a hot apple in fridge", "heat some apple and put it in fridge"}
    assert {read_task(sentence).process for sentence in sentences} == {"heat"}
    environment, _ = start(suite)
    assert [environment.step(command).terminated for command in suite.solution(suite.tasks("train")[0])][-1]


def test_other_folders_beside_the_games_are_not_read(tmp_path: Path) -> None:
    trial(tmp_path, "train", "good-8")
    trial(tmp_path / "seq2seq", "train", "other-8")
    assert AlfworldSuite(str(tmp_path)).tasks("train") == ("train/good-8/trial_1",)


def test_official_names_the_folder_of_the_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trial(tmp_path, "valid_seen", "good-8")
    monkeypatch.setenv("ALFWORLD_DATA", str(tmp_path))
    assert len(AlfworldSuite("official").tasks("valid_seen")) == 1


def test_missing_official_games_name_the_path_and_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALFWORLD_DATA", str(tmp_path / "nowhere"))
    with pytest.raises(FileNotFoundError, match=r"nowhere/json_2\.1\.1.*alfworld-download"):
        AlfworldSuite("official")
    monkeypatch.delenv("ALFWORLD_DATA")
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(FileNotFoundError, match=rf"{tmp_path}/\.cache/alfworld/json_2\.1\.1"):
        AlfworldSuite("official")
    with pytest.raises(FileNotFoundError, match=r"no/such/folder.*alfworld-download"):
        AlfworldSuite("no/such/folder")


def test_a_folder_without_games_says_what_was_looked_for(tmp_path: Path) -> None:
    with pytest.raises(GameFormatError, match=r"no game passes.*game\.tw-pddl or initial_state\.pddl"):
        AlfworldSuite(str(tmp_path))
    trial(tmp_path, "train", "bare-8", game=False)
    with pytest.raises(GameFormatError, match="no game passes"):
        AlfworldSuite(str(tmp_path))


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("traj_data.json", b"{"),
        ("traj_data.json", b'{"task_type": "x"}'),
        ("game.tw-pddl", b'{"pddl_problem": "(define'),
        ("game.tw-pddl", b"\x89PNG\r\n"),
        ("game.tw-pddl", b'{"pddl_problem": "", "grammar": "Inform 7", "solvable": true}'),
    ],
)
def test_a_damaged_or_foreign_file_is_named(tmp_path: Path, file: str, content: bytes) -> None:
    (trial(tmp_path, "train", "cut-8") / file).write_bytes(content)
    with pytest.raises(GameFormatError, match=file):
        AlfworldSuite(str(tmp_path))


def test_a_state_that_is_no_text_is_named(tmp_path: Path) -> None:
    (trial(tmp_path, "train", "cut-8", game=False, state=True) / "initial_state.pddl").write_bytes(b"\xff\xfe")
    with pytest.raises(GameFormatError, match=r"initial_state\.pddl"):
        AlfworldSuite(str(tmp_path))


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda problem: problem[: len(problem) // 2], "truncated"),
        (lambda problem: problem.replace("(heatable Apple_bar_1)", "").replace("(heatable Apple_bar_2)", ""), "apple"),
        (lambda problem: "(define (problem chess) (:init (at king e1)) (:goal (mate)))", "needs one agent"),
    ],
)
def test_a_game_that_cannot_be_won_or_read_fails_when_it_is_opened(
    tmp_path: Path, change: "object", complaint: str
) -> None:
    assert callable(change)
    trial(tmp_path, "train", "odd-8", pddl_problem=change(str(record(1, "FloorPlan8")["pddl_problem"])))
    suite = AlfworldSuite(str(tmp_path))
    with pytest.raises(GameFormatError, match=complaint):
        suite.make().reset(suite.tasks("train")[0])
