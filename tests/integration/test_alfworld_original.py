"""The original package beside ours: it reads the games that we write, and it plays as a second backend of the suite."""

import contextlib
import io
import json
import lzma
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from seed_async.envs.alfworld import original
from seed_async.envs.alfworld.generator import Settings
from seed_async.envs.alfworld.model import TASK_TYPES
from seed_async.envs.alfworld.original_suite import OriginalEnvironment, OriginalSuite
from seed_async.envs.alfworld.suite import AlfworldSuite
from seed_async.envs.alfworld.writer import write_official
from seed_async.envs.contract import GameFailedError, GameFormatError, TaskNotFoundError
from seed_async.envs.registry import open_suite
from seed_async.topology import Env

_REASON = original.unavailable_reason()
pytestmark = [pytest.mark.integration, pytest.mark.skipif(bool(_REASON), reason=_REASON)]

SHARED = Path(__file__).resolve().parents[3] / "shared" / "data" / "alfworld"
SETTINGS = Settings(3, 4, 6, 5, TASK_TYPES, ("kitchen", "bedroom"))
COUNTS = {"train": 8, "valid_seen": 3, "valid_unseen": 2}
SPLITS = {"train": "train", "valid_seen": "eval_in_distribution", "valid_unseen": "eval_out_of_distribution"}
"""Our names of the splits, which are those of the folders, and those that AlfredTWEnv takes."""
HOSTILE = ("", "go to", "\x00\x07", "take \ud83c from x", "a" * 100_000, "Look", "inventory ")


def official_environment(folder: Path, split: str) -> Any:
    """Return ALFWorld's own environment class over the splits in `folder`."""
    config = {
        "dataset": {
            "data_path": str(folder / "train"),
            "eval_id_data_path": str(folder / "valid_seen"),
            "eval_ood_data_path": str(folder / "valid_unseen"),
            "num_train_games": -1,
            "num_eval_games": -1,
        },
        "env": {
            "goal_desc_human_anns_prob": 0,
            "task_types": [1, 2, 3, 4, 5, 6],
            "domain_randomization": False,
            "expert_type": "handcoded",
        },
        "general": {"training_method": "dqn"},
        "rl": {"training": {"max_nb_steps_per_episode": 50}},
    }
    module = original.import_original("alfworld.agents.environment.alfred_tw_env")
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        return module.AlfredTWEnv(config, train_eval=SPLITS[split])


def test_the_official_class_reads_and_plays_our_folder_unchanged(tmp_path: Path) -> None:
    folder = write_official(tmp_path, SETTINGS, COUNTS, "move")
    assert {split: official_environment(folder, split).num_games for split in COUNTS} == COUNTS
    suite = AlfworldSuite(str(tmp_path))
    games = official_environment(folder, "valid_seen").init_env(batch_size=1)
    try:
        for _ in range(COUNTS["valid_seen"]):
            (text,), infos = games.reset()
            task = "/".join(Path(infos["extra.gamefile"][0]).parts[-4:-1])
            ours = suite.make()
            assert text == ours.reset(task).text
            for command in suite.solution(task):
                (text,), _, (done,), infos = games.step([command])
                result = ours.step(command)
                assert text == result.observation.text
                assert done == result.terminated == infos["won"][0]
                theirs = tuple(name for name in infos["admissible_commands"][0] if name != "help")
                assert theirs == result.observation.admissible
            assert done
    finally:
        games.close()


def play_both(own: AlfworldSuite, textworld: AlfworldSuite, task: str) -> None:
    """Play hostile commands and the solution in both backends and compare everything."""
    ours, theirs = own.make(), textworld.make()
    assert theirs.reset(task) == ours.reset(task)
    for command in (*HOSTILE, *own.solution(task)):
        result = theirs.step(command)
        assert result == ours.step(command), command
    assert result.terminated and result.reward == 1.0


@pytest.mark.parametrize("vocabulary", ["move", "put"])
def test_generated_games_play_alike_in_both_backends(vocabulary: str) -> None:
    env = Env.model_validate({"vocabulary": vocabulary, "max_steps": 60})
    own, textworld = open_suite(env), open_suite(env.model_copy(update={"backend": "textworld"}))
    assert isinstance(own, AlfworldSuite) and isinstance(textworld, OriginalSuite)
    assert list(textworld.tasks("valid_seen")) == list(own.tasks("valid_seen"))
    play_both(own, textworld, own.tasks("train")[3])


def test_written_and_real_games_play_alike_in_both_backends(tmp_path: Path) -> None:
    write_official(tmp_path, SETTINGS, {"train": 2}, "move")
    sources = [str(tmp_path)]
    if SHARED.is_dir():
        with lzma.open(SHARED / "valid_seen.jsonl.xz", "rt", encoding="utf-8") as file:
            (tmp_path / "real.jsonl").write_text("".join(line for line, _ in zip(file, range(5), strict=False)))
        sources.append(str(tmp_path / "real.jsonl"))
    for games in sources:
        own, textworld = AlfworldSuite(games, max_steps=60), OriginalSuite(games, max_steps=60)
        play_both(own, textworld, own.tasks("train")[0])


@pytest.fixture
def environment() -> OriginalEnvironment:
    """Return an environment of the original engine with a game open."""
    suite = OriginalSuite()
    made = suite.make()
    made.reset(suite.tasks("train")[0])
    return made


def gone(pid: int, within_s: float = 10.0) -> bool:
    """Tell whether a process ends in time."""
    end = time.monotonic() + within_s
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


def test_each_environment_has_a_process_of_its_own_kept_over_games(environment: OriginalEnvironment) -> None:
    other, pid = environment.suite.make(), environment.worker.pid
    assert isinstance(other, OriginalEnvironment)
    other.reset("generated/train/000001")
    assert len({os.getpid(), pid, other.worker.pid}) == 3
    environment.reset("generated/train/000002")
    assert environment.worker.pid == pid


def test_a_step_without_an_answer_costs_the_episode_and_the_process(environment: OriginalEnvironment) -> None:
    pid = environment.worker.pid
    environment._step_timeout_s = 0.0001
    with pytest.raises(GameFailedError, match="no answer within"):
        environment.step("look")
    assert gone(pid)
    with pytest.raises(RuntimeError, match="call reset first"):
        environment.step("look")
    environment._step_timeout_s = 60.0
    assert environment.reset("generated/train/000001").info.valid
    assert environment.step("look").observation.info.valid


def test_the_death_of_the_process_costs_the_episode_only(environment: OriginalEnvironment) -> None:
    os.kill(environment.worker.pid, signal.SIGKILL)
    with pytest.raises(GameFailedError, match="has died"):
        environment.step("look")
    assert environment.reset("generated/train/000000").info.valid


def test_a_game_that_the_original_cannot_read_is_an_error_and_not_a_crash(tmp_path: Path) -> None:
    folder = write_official(tmp_path, SETTINGS, {"train": 2}, "move")
    file = sorted(folder.rglob("game.tw-pddl"))[0]
    told = json.loads(file.read_text())
    # Our reader does not read the goal section; the original does.
    told["pddl_problem"] = told["pddl_problem"].replace("(:goal (and", "(:goal (and (flies ?o)")
    file.write_text(json.dumps(told))
    suite = OriginalSuite(str(tmp_path))
    environment = suite.make()
    bad, good = suite.tasks("train")
    with pytest.raises(GameFailedError, match=r"the original engine failed|has died"):
        environment.reset(bad)
    assert environment.reset(good).info.valid
    with pytest.raises(TaskNotFoundError):
        environment.reset("train/no/such")
    assert issubclass(GameFailedError, GameFormatError)


_OWNER = """
import sys, time
from seed_async.envs.alfworld.original_suite import OriginalSuite
suite = OriginalSuite()
environment = suite.make()
environment.reset(suite.tasks("train")[0])
print(environment.worker.pid, flush=True)
if sys.argv[1] == "forget":
    del environment
    print("forgotten", flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("way", ["kill", "forget"])
def test_the_process_ends_with_its_owner_and_with_its_environment(way: str) -> None:
    owner = subprocess.Popen([sys.executable, "-c", _OWNER, way], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    try:
        pid = int(owner.stdout.readline())
        if way == "forget":
            assert owner.stdout.readline() == "forgotten\n"
            assert owner.poll() is None
        else:
            owner.kill()
        assert gone(pid)
    finally:
        owner.kill()
        owner.wait()
