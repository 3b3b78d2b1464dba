"""Writes generated games as a folder in the official layout, which ALFWorld's own code reads as it reads its data.

OUT/json_2.1.1/SPLIT/TASK_TYPE-OBJECT-None-TARGET-ROOM/trial_NUMBER/{game.tw-pddl,initial_state.pddl,traj_data.json}
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from seed_async.envs.alfworld.board import Board
from seed_async.envs.alfworld.gametexts import DOMAIN, grammar_text
from seed_async.envs.alfworld.generator import Settings
from seed_async.envs.alfworld.model import Game
from seed_async.envs.alfworld.official import GAME_FILE, GAMES_FOLDER, STATE_FILE, TRAJECTORY_FILE
from seed_async.envs.alfworld.oracle import solve
from seed_async.envs.alfworld.pddl import write_problem
from seed_async.envs.alfworld.sources import GeneratedGames
from seed_async.envs.alfworld.vocabulary import VocabularyName

UNFINISHED: Final = ".unfinished"
"""Ending of the folder that is being written; it gets its name when it is whole."""


def game_files(game: Game, vocabulary: VocabularyName) -> dict[str, str]:
    """Return the text of each file of a game's trial folder by file name."""
    problem, goal = write_problem(game), game.goal
    playable = {
        "pddl_domain": DOMAIN,
        "grammar": grammar_text(game.task, vocabulary),
        "pddl_problem": problem,
        "solvable": True,
        "walkthrough": solve(Board(game, vocabulary)),
    }
    told = {
        "task_id": _trial(game),
        "task_type": goal.task_type,
        "pddl_params": {
            "mrecep_target": "",
            "object_sliced": False,
            "object_target": goal.item,
            "parent_target": goal.receptacle,
            "toggle_target": goal.lamp,
        },
        "scene": {"floor_plan": game.floor_plan},
        "turk_annotations": {"anns": [{"task_desc": f"{game.task}.", "high_descs": []}]},
    }
    return {GAME_FILE: json.dumps(playable), STATE_FILE: problem, TRAJECTORY_FILE: json.dumps(told, indent=1)}


def _trial(game: Game) -> str:
    return f"trial_{game.name.rpartition('/')[2]}"


def _folder(game: Game) -> str:
    goal, room = game.goal, game.floor_plan.partition(" ")[0]
    return f"{goal.task_type}-{goal.item}-None-{goal.lamp or goal.receptacle}-{room}/{_trial(game)}"


def _games(settings: Settings, counts: dict[str, int]) -> Iterator[tuple[str, Game]]:
    source = GeneratedGames(settings, counts)
    for split in counts:
        for task in source.tasks(split):
            yield split, source.game(task)


def write_official(out: Path, settings: Settings, counts: dict[str, int], vocabulary: VocabularyName) -> Path:
    """Write `counts[split]` generated games of each split below `out`; return the folder that holds the splits.

    Raises FileExistsError when that folder is there already, ValueError for impossible counts, and GameFormatError
    when the settings leave a split no room.
    """
    folder = out / GAMES_FOLDER
    unfinished = out / (GAMES_FOLDER + UNFINISHED)
    for path in (folder, unfinished):
        if path.exists():
            raise FileExistsError(f"{path} is there already: remove it, or choose another folder")
    for split, game in _games(settings, counts):
        at = unfinished / split / _folder(game)
        at.mkdir(parents=True)
        for name, text in game_files(game, vocabulary).items():
            (at / name).write_text(text, encoding="utf-8")
    unfinished.rename(folder)
    return folder
