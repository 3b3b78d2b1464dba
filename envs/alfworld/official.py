"""Reads games as `alfworld-download` leaves them: one folder a trial, with `game.tw-pddl` and `traj_data.json`.

The splits are the official folders (`train`, `valid_seen`, `valid_unseen`, ...), and as in ALFWorld a trial is left out
when it is about sliced objects or movable receptacles or is marked as unsolvable.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

from seed_async.envs.alfworld.model import Game
from seed_async.envs.alfworld.scenes import Filter, TaskParams, count_receptacles, open_game, split_tasks
from seed_async.envs.contract import GameFormatError, TaskNotFoundError

_Kind = TypeVar("_Kind")
_TASK = re.compile(r"Your task is to: (.*?)\.\s*\"")


class _Scene(msgspec.Struct, frozen=True):
    floor_plan: str


class _Trajectory(msgspec.Struct, frozen=True):
    """The part of traj_data.json that play needs."""

    task_type: str
    pddl_params: TaskParams
    scene: _Scene


class _GameFile(msgspec.Struct, frozen=True):
    """The part of game.tw-pddl that play needs."""

    pddl_problem: str
    grammar: str
    solvable: bool = True


def _decode(path: Path, kind: type[_Kind]) -> _Kind:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except msgspec.DecodeError as error:
        raise GameFormatError(f"{path}: {error}") from error


class OfficialGames:
    """The games of a folder in the official layout, or of the folder above it (`json_2.1.1`)."""

    def __init__(self, root: Path, wanted: Filter) -> None:
        """Find the games. Raises ValueError when there are none or the filter leaves none."""
        self._root = root
        self._folders: dict[str, Path] = {}
        self._tasks: dict[str, list[str]] = {}
        for file in sorted(root.rglob("game.tw-pddl")):
            folder = file.parent
            parts = [part for part in folder.relative_to(root).parts if not part.startswith("json_")]
            if len(parts) < 2 or "movable" in str(folder) or "Sliced" in str(folder):
                continue
            task = "/".join(parts)
            self._tasks.setdefault(parts[0], [])
            if self._passes(folder, wanted):
                self._tasks[parts[0]].append(task)
                self._folders[task] = folder
        if not self._folders:
            raise ValueError(f"{root.absolute()}: no folder SPLIT/.../TRIAL with a game.tw-pddl passes {wanted}")

    @staticmethod
    def _passes(folder: Path, wanted: Filter) -> bool:
        told = _decode(folder / "traj_data.json", _Trajectory)
        game = _decode(folder / "game.tw-pddl", _GameFile)
        num_receptacles = count_receptacles(game.pddl_problem)
        return game.solvable and wanted.accepts(told.task_type, told.scene.floor_plan, num_receptacles)

    def tasks(self, split: str) -> Sequence[str]:
        """Return the ids of a split, sorted."""
        return split_tasks(self._tasks, split, self._root)

    def game(self, task: str) -> Game:
        """Open a game."""
        folder = self._folders.get(task)
        if folder is None:
            raise TaskNotFoundError(f"no game {task[:200]!r} in {self._root}")
        told = _decode(folder / "traj_data.json", _Trajectory)
        file = _decode(folder / "game.tw-pddl", _GameFile)
        sentence = _TASK.search(file.grammar)
        if sentence is None:
            raise GameFormatError(f"{folder / 'game.tw-pddl'}: its grammar has no task sentence")
        return open_game(task, told.task_type, told.scene.floor_plan, sentence[1], told.pddl_params, file.pddl_problem)
