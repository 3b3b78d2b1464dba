"""What the games of real ALFRED scenes have in common, however they are stored."""

import re
from collections.abc import Sequence
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Final

import msgspec

from seed_async.envs.alfworld.model import Game, make_goal
from seed_async.envs.alfworld.pddl import parse_problem
from seed_async.envs.contract import GameFormatError, TaskNotFoundError

SPLITS: Final = ("train", "valid_seen", "valid_unseen")
_KIND_OF_HUNDRED = {0: "kitchen", 2: "living_room", 3: "bedroom", 4: "bathroom"}
_DRAW = 243
"""Prefix of the digests that draw the held-out rooms: the first number with which both validation splits get small and
large rooms of each kind."""


class Filter(msgspec.Struct, frozen=True, kw_only=True):
    """Which games of a source to use; None means no restriction."""

    task_types: tuple[str, ...] | None = None
    rooms: tuple[str, ...] | None = None
    max_receptacles: int | None = None

    def accepts(self, task_type: str, floor_plan: str, num_receptacles: int) -> bool:
        """Tell whether a game passes."""
        return (
            (self.task_types is None or task_type in self.task_types)
            and (self.rooms is None or room_kind(floor_plan) in self.rooms)
            and (self.max_receptacles is None or num_receptacles <= self.max_receptacles)
        )


def room_kind(floor_plan: str) -> str:
    """Return the room kind of an ALFRED floor plan (`FloorPlan1` to 30 are kitchens, 201 living rooms, and so on).

    The plan of a generated room begins with its kind.
    """
    first_word = floor_plan.partition(" ")[0]
    if first_word in _KIND_OF_HUNDRED.values():
        return first_word
    match = re.fullmatch(r"FloorPlan(\d{1,3})", floor_plan, re.ASCII)
    hundred, number = divmod(int(match[1]), 100) if match else (1, 0)
    kind = _KIND_OF_HUNDRED.get(hundred)
    if kind is None or not 1 <= number <= 30:
        raise GameFormatError(f"floor plan {floor_plan[:80]!r} is none of ALFRED's")
    return kind


@cache
def _held_out() -> dict[str, str]:
    """Return the split of every floor plan that is not for training: three of each kind's thirty for each split.

    The plans are drawn by a digest of their names, so the choice is the same everywhere, for any file and any filter.
    """
    splits = {}
    for hundred in _KIND_OF_HUNDRED:
        plans = [f"FloorPlan{100 * hundred + number}" for number in range(1, 31)]
        plans.sort(key=lambda plan: sha256(f"{_DRAW}{plan}".encode()).digest())
        splits.update(dict.fromkeys(plans[:3], "valid_seen") | dict.fromkeys(plans[3:6], "valid_unseen"))
    return splits


def room_split(floor_plan: str) -> str:
    """Return the split of a floor plan; the rooms of a validation split are never trained on."""
    room_kind(floor_plan)
    return _held_out().get(floor_plan, "train")


class TaskParams(msgspec.Struct, frozen=True):
    """ALFRED's parameters of a task."""

    object_target: str
    parent_target: str = ""
    toggle_target: str = ""
    mrecep_target: str = ""
    object_sliced: bool = False


def open_game(name: str, task_type: str, floor_plan: str, task: str, params: TaskParams, problem: str) -> Game:
    """Return the game of a problem text and ALFRED's parameters. Raises GameFormatError."""
    goal = make_goal(
        task_type,
        params.object_target,
        params.parent_target,
        params.toggle_target,
        sliced=params.object_sliced,
        movable=params.mrecep_target,
    )
    return parse_problem(problem, name=name, floor_plan=floor_plan, task=task, goal=goal)


def count_receptacles(problem: str) -> int:
    """Return how many receptacles a problem text declares, without reading the rest of it."""
    return problem.lower().count(" - receptacle\n")


def split_tasks(tasks: dict[str, list[str]], split: str, path: Path) -> Sequence[str]:
    """Return the ids of one split. Raises TaskNotFoundError for an unknown or an empty one."""
    if split not in tasks:
        raise TaskNotFoundError(f"no split {split!r} in {path}; there are {', '.join(tasks)}")
    if not tasks[split]:
        raise TaskNotFoundError(f"split {split!r} of {path} has no games left after the filter")
    return tuple(tasks[split])
