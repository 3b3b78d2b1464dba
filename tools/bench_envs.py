"""Measures the text environments: steps, resets and games a second, and memory, for our engine and the original.

Run as `python -m seed_async.tools.bench_envs [--games PATH] [--seconds S]`. Rates are per second of this process's CPU
time, so that other load on the machine does not count.
"""

import argparse
import random
import sys
import time
import tracemalloc
from collections.abc import Callable

from seed_async.envs.alfworld import original
from seed_async.envs.alfworld.pddl import write_problem
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
    return figures


def bench_original(games: str, seconds: float) -> dict[str, float]:
    """Return the figures of the original engine on the same games."""
    suite, rng, engine = AlfworldSuite(games), random.Random(0), original.OriginalEngine()
    boards = [suite.board(task) for task in suite.tasks("train")[:_NUM_GAMES]]
    commands: list[str] = []

    def reset() -> int:
        game = rng.choice(boards).game
        commands[:] = engine.reset(write_problem(game), game.task)[1]
        return 1

    def step() -> int:
        commands[:] = engine.step(rng.choice(commands))[1]
        return 1

    return {"resets/s": rate(reset, seconds), "steps/s": rate(step, seconds)}


def main(arguments: list[str]) -> None:
    """Print one line a figure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--games", default="generated", help="`generated`, or a path as in the topology's env.games")
    parser.add_argument("--seconds", type=float, default=2.0, help="CPU seconds of each measurement")
    options = parser.parse_args(arguments)
    for name, value in bench_ours(options.games, options.seconds).items():
        print(f"ours      {name:16} {value:12,.1f}")
    reason = original.unavailable_reason()
    if reason:
        print(f"original  not measured: {reason}")
        return
    for name, value in bench_original(options.games, options.seconds).items():
        print(f"original  {name:16} {value:12,.1f}")


if __name__ == "__main__":
    main(sys.argv[1:])
