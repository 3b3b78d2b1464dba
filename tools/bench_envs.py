"""Measures the text environments: steps and resets a second and memory, for our engine and the original, and the ratio.

Run as `python -m seed_async.tools.bench_envs [--games PATH] [--seconds S]`. Rates are per second of this process's CPU
time, which is a core's, so that other load on the machine does not count. Both engines play the same games.
"""

import argparse
import random
import sys
import time
import tracemalloc
from collections.abc import Callable

import psutil

from seed_async.envs.alfworld import original
from seed_async.envs.alfworld.original_suite import OriginalSuite
from seed_async.envs.alfworld.suite import AlfworldEnvironment, AlfworldSuite

_NUM_GAMES = 40
"""Games played in turn; enough to mix sizes and task types."""


def rate(work: Callable[[], int], seconds: float) -> float:
    """Return units of work per CPU second; `work` returns how many units a call did."""
    done, start = 0, time.process_time()
    while (spent := time.process_time() - start) < seconds:
        done += work()
    return done / spent


def _random_episode(environment: AlfworldEnvironment, task: str, rng: random.Random) -> int:
    """Play random admissible commands to the end and return the number of steps."""
    observation, steps = environment.reset(task), 0
    while True:
        result = environment.step(rng.choice(observation.admissible))
        observation, steps = result.observation, steps + 1
        if result.terminated or result.truncated:
            return steps


def bench_ours(games: str, seconds: float) -> dict[str, float]:
    """Return the figures of our engine on the games of a suite.

    Environments of a suite share the games, so memory is told apart: of a game, and of an environment beside its game.
    `MB/environment` is their sum, for an environment alone with its game.
    """
    suite, rng = AlfworldSuite(games), random.Random(0)
    tasks = list(suite.tasks("train")[:_NUM_GAMES])
    environment = suite.make()

    def reset() -> int:
        environment.reset(rng.choice(tasks))
        return 1

    def open_game() -> int:
        suite.open_uncached(rng.choice(tasks))
        return 1

    steps = rate(lambda: _random_episode(environment, rng.choice(tasks), rng), seconds)
    figures = {"steps/s": steps, "resets/s": rate(reset, seconds), "games opened/s": rate(open_game, seconds)}
    tracemalloc.start()
    boards = [suite.open_uncached(task) for task in tasks]
    figures["kB/game"] = tracemalloc.get_traced_memory()[0] / len(boards) / 1e3
    tracemalloc.stop()
    tracemalloc.start()
    environments = [suite.make() for _ in range(_NUM_GAMES)]
    for member, task in zip(environments, tasks, strict=True):
        _random_episode(member, task, rng)
    figures["kB/environment"] = tracemalloc.get_traced_memory()[0] / len(environments) / 1e3
    tracemalloc.stop()
    figures["MB/environment"] = (figures["kB/game"] + figures["kB/environment"]) / 1e3
    return figures


def bench_original(games: str, seconds: float) -> dict[str, float]:
    """Return the figures of the original engine on the same games; memory is that of an environment's process."""
    suite, rng, engine = OriginalSuite(games), random.Random(0), original.OriginalEngine()
    tasks = list(suite.tasks("train")[:_NUM_GAMES])
    commands: list[str] = []

    def reset() -> int:
        task = rng.choice(tasks)
        commands[:] = engine.reset(suite.problem(task), suite.board(task).game.task).admissible
        return 1

    def step() -> int:
        commands[:] = engine.step(rng.choice(commands)).admissible
        return 1

    figures = {"resets/s": rate(reset, seconds), "steps/s": rate(step, seconds)}
    environment = suite.make()
    _random_episode(environment, tasks[0], rng)
    figures["MB/environment"] = psutil.Process(environment.worker.pid).memory_info().rss / 1e6
    return figures


def main(arguments: list[str]) -> None:
    """Print one line a figure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--games", default="generated", help="`generated`, or a path as in the topology's env.games")
    parser.add_argument("--seconds", type=float, default=2.0, help="CPU seconds of each measurement")
    options = parser.parse_args(arguments)
    ours = bench_ours(options.games, options.seconds)
    for name, value in ours.items():
        print(f"ours      {name:16} {value:12,.{2 if name.startswith('MB') else 1}f}")
    reason = original.unavailable_reason()
    if reason:
        print(f"original  not measured: {reason}")
        return
    theirs = bench_original(options.games, options.seconds)
    for name, value in theirs.items():
        print(f"original  {name:16} {value:12,.1f}")
    for name in ("steps/s", "resets/s"):
        print(f"ratio     {name:16} {ours[name] / theirs[name]:12,.0f}")
    print(f"ratio     {'MB/environment':16} {theirs['MB/environment'] / ours['MB/environment']:12,.0f}")


if __name__ == "__main__":
    main(sys.argv[1:])
