"""A fixed panel of held-out games, played with the plain prompt: what would be deployed.

Used by the evaluation actor of a run and by `seed-async evaluate`.
"""

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from seed_async.actors.rollout import EpisodePlayer
from seed_async.envs.isolation import EnvironmentFailedError, Host

PANEL_SEED = 20260714
"""Chooses the games of a panel, the same in every run, so that scores can be compared."""


class PanelGame(NamedTuple):
    """The outcome of one game; the versions are those of its oldest and newest sampled token."""

    task_id: str
    task_type: str
    won: bool
    steps: int
    version_min: int
    version_max: int


def choose_panel(tasks: Sequence[str], num_games: int) -> tuple[str, ...]:
    """Return the panel of a split: `num_games` tasks (all, when there are fewer) in the split's order."""
    chosen = np.random.default_rng(PANEL_SEED).permutation(len(tasks))[:num_games]
    return tuple(tasks[int(index)] for index in np.sort(chosen))


async def play_panel(
    player: EpisodePlayer, open_game: Callable[[], Host], panel: Sequence[str], concurrency: int, seed: int
) -> list[PanelGame]:
    """Play every game of the panel once, `concurrency` at a time; the result is in panel order.

    A game whose environment fails is played again in a fresh one; when it fails again, that ends the panel.
    """
    results: dict[int, PanelGame] = {}
    waiting = iter(enumerate(panel))

    async def play_next() -> None:
        host = open_game()
        try:
            for index, task_id in waiting:
                await play(host, index, task_id)
        finally:
            host.close()

    async def play(host: Host, index: int, task_id: str) -> None:
        try:
            episode = await player.play(host, task_id, seed * len(panel) + index)
        except EnvironmentFailedError:
            episode = await player.play(host, task_id, seed * len(panel) + index)
        versions = np.concatenate([turn.versions for turn in episode.turns])
        results[index] = PanelGame(
            task_id=task_id,
            task_type=episode.task_type,
            won=episode.status == "won",
            steps=len(episode.turns),
            version_min=int(versions.min()),
            version_max=int(versions.max()),
        )

    async with asyncio.TaskGroup() as group:
        for _ in range(concurrency):
            group.create_task(play_next())
    return [results[index] for index in range(len(panel))]


def summarise_panel(games: Sequence[PanelGame], version: int, started_at_s: float, *, final: bool) -> dict[str, Any]:
    """Return one line of evaluations.jsonl: pooled and macro-average success, by task type, with the versions seen."""
    by_type: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for game in games:
        by_type[game.task_type][0] += game.won
        by_type[game.task_type][1] += 1
    won = sum(game.won for game in games)
    return {
        "version": version,
        "games": len(games),
        "won": won,
        "success": won / len(games),
        "macro_success": sum(each[0] / each[1] for each in by_type.values()) / len(by_type),
        "by_task_type": {name: list(each) for name, each in sorted(by_type.items())},
        "mean_steps": sum(game.steps for game in games) / len(games),
        "version_min": min(game.version_min for game in games),
        "version_max": max(game.version_max for game in games),
        "started_at_s": started_at_s,
        "seconds": time.time() - started_at_s,
        "final": final,
    }
