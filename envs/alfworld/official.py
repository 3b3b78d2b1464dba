"""Reads games as `alfworld-download` leaves them: one folder a trial, with its game and `traj_data.json`.

The splits are the official folders (`train`, `valid_seen`, `valid_unseen`, ...). As in ALFWorld a trial is left out
when it is about sliced objects or movable receptacles, is marked as unsolvable, or has no `game.tw-pddl`; only where no
trial has one are the games read from `initial_state.pddl`.
"""

import os
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from seed_async.envs.alfworld.model import Game
from seed_async.envs.alfworld.scenes import Filter, TaskParams, count_receptacles, open_game, split_tasks
from seed_async.envs.alfworld.tasks import TEMPLATES, sentence_in_grammar
from seed_async.envs.contract import GameFormatError, TaskNotFoundError

DATA_VARIABLE: Final = "ALFWORLD_DATA"
DEFAULT_ROOT: Final = "~/.cache/alfworld"
GAMES_FOLDER: Final = "json_2.1.1"
GAME_FILE: Final = "game.tw-pddl"
STATE_FILE: Final = "initial_state.pddl"
TRAJECTORY_FILE: Final = "traj_data.json"

_Kind = TypeVar("_Kind")


class _Scene(msgspec.Struct, frozen=True):
    floor_plan: str


class _Trajectory(msgspec.Struct, frozen=True):
    """The part of traj_data.json that play needs."""

    task_type: str
    pddl_params: TaskParams
    scene: _Scene


class _GameFile(msgspec.Struct, frozen=True):
    """The part of game.tw-pddl that play needs. Without the mark the original plays no game, and neither do we."""

    pddl_problem: str
    grammar: str
    solvable: bool = False


def default_root() -> Path:
    """Return where `alfworld-download` puts its data: $ALFWORLD_DATA, or its folder in the user's cache."""
    return Path(os.environ.get(DATA_VARIABLE) or DEFAULT_ROOT).expanduser()


def _decode(path: Path, kind: type[_Kind]) -> _Kind:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except msgspec.DecodeError as error:
        raise GameFormatError(f"{path}: {error}") from error


def _templated(told: _Trajectory, task: str) -> str:
    """Return a task sentence in ALFWorld's words for a trial that has none; which wording, its name decides."""
    templates = TEMPLATES.get(told.task_type)
    if templates is None:
        raise GameFormatError(f"{task}: task type {told.task_type!r} is none of {', '.join(TEMPLATES)}")
    params = told.pddl_params
    return templates[sha256(task.encode()).digest()[0] % len(templates)].format(
        item=params.object_target.lower(), receptacle=params.parent_target.lower(), lamp=params.toggle_target.lower()
    )


class OfficialGames:
    """The games of a folder SPLIT/TASK/TRIAL, or of the folder above it (`json_2.1.1`)."""

    def __init__(self, root: Path, wanted: Filter) -> None:
        """Find the games. Raises GameFormatError when there are none, one is damaged, or the filter leaves none."""
        self._root = root / GAMES_FOLDER if (root / GAMES_FOLDER).is_dir() else root
        trials = {}
        for file in sorted(self._root.rglob(TRAJECTORY_FILE)):
            parts = file.parent.relative_to(self._root).parts
            task = "/".join(parts)
            if len(parts) >= 3 and "movable" not in task and "Sliced" not in task:
                trials[task] = file.parent
        names = (GAME_FILE, STATE_FILE)
        self._name = next((name for name in names if any((at / name).is_file() for at in trials.values())), GAME_FILE)
        self._tasks: dict[str, list[str]] = {}
        self._folders: dict[str, Path] = {}
        for task, folder in trials.items():
            if (folder / self._name).is_file():
                split = self._tasks.setdefault(task.partition("/")[0], [])
                if self._passes(folder, wanted):
                    split.append(task)
                    self._folders[task] = folder
        if not self._folders:
            raise GameFormatError(
                f"{self._root.absolute()}: no game passes {wanted}; looked for SPLIT/TASK/TRIAL folders with"
                f" {TRAJECTORY_FILE} and {GAME_FILE} or {STATE_FILE}, as alfworld-download leaves them"
            )

    def tasks(self, split: str) -> Sequence[str]:
        """Return the ids of a split, sorted."""
        return split_tasks(self._tasks, split, self._root)

    def problem(self, task: str) -> str:
        """Return the PDDL problem text of a game."""
        return self._read(self._folder(task))[0]

    def game(self, task: str) -> Game:
        """Open a game."""
        folder = self._folder(task)
        told = _decode(folder / TRAJECTORY_FILE, _Trajectory)
        problem, sentence, _ = self._read(folder)
        return open_game(
            task,
            told.task_type,
            told.scene.floor_plan,
            sentence or _templated(told, task),
            told.pddl_params,
            problem,
        )

    def _folder(self, task: str) -> Path:
        folder = self._folders.get(task)
        if folder is None:
            raise TaskNotFoundError(f"no game {task[:200]!r} in {self._root}")
        return folder

    def _passes(self, folder: Path, wanted: Filter) -> bool:
        told = _decode(folder / TRAJECTORY_FILE, _Trajectory)
        problem, _, solvable = self._read(folder)
        return solvable and wanted.accepts(told.task_type, told.scene.floor_plan, count_receptacles(problem))

    def _read(self, folder: Path) -> tuple[str, str, bool]:
        """Return problem text, task sentence (empty where the file has none), and whether it is known as solvable."""
        path = folder / self._name
        if self._name == STATE_FILE:
            try:
                # Nothing marks these: a goal out of reach is refused when the game is opened.
                return path.read_text(encoding="utf-8"), "", True
            except UnicodeDecodeError as error:
                raise GameFormatError(f"{path}: {error}") from error
        file = _decode(path, _GameFile)
        sentence = sentence_in_grammar(file.grammar)
        if not sentence:
            raise GameFormatError(f"{path}: its grammar has no task sentence")
        return file.pddl_problem, sentence, file.solvable
