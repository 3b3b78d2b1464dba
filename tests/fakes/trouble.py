"""Environments that hang, crash, raise, leak or talk nonsense on demand; opened by `env.id`, as a user's own.

The task's name says what happens, e.g. `train/hang_step`; `train/fine-3` is a game that is won by `go`. Trouble in a
step starts with the second one.
"""

import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from seed_async.envs.contract import Analysis, Expert, GameFormatError, Info, Observation, Step, StepResult
from seed_async.topology import Env
from tests.fakes.boxes import BoxesGame, BoxesSuite

STEPS_TO_WIN = 4
IS_WORKER = "seed_async.envs.worker" in sys.orig_argv


def own_sockets() -> list[int]:
    """Descriptors of this process that are sockets: in a worker, its one connection to the owner."""
    folder = Path("/proc/self/fd")
    return [int(each.name) for each in folder.iterdir() if each.exists() and each.is_socket()]


def make_trouble(kind: str) -> None:
    """Do what `kind` says to this process."""
    leak: list[bytearray] = []
    if kind == "hang":
        time.sleep(3600)
    elif kind == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif kind == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    elif kind == "exit":
        raise SystemExit(3)
    elif kind == "raise":
        raise ZeroDivisionError("a bug of the user's")
    elif kind == "leak":
        while True:
            leak.append(bytearray(16 << 20))
    elif kind == "child":  # grandchildren die with the worker
        psutil.Popen(["sleep", "3600"])
        time.sleep(3600)
    elif kind == "garbage":
        os.write(own_sockets()[0], b"\x07\x00\x00\x00garbage")
    elif kind == "flood":
        for descriptor in own_sockets():
            os.write(descriptor, b"\xff" * 4096)


class TroubleGame:
    """Plays what the task says."""

    def __init__(self) -> None:
        """No game is open."""
        self._trouble, self._steps = "", 0

    def reset(self, task: str) -> Observation:
        """Open a game, or make trouble."""
        self._trouble, self._steps = task.partition("/")[2].partition("-")[0], 0
        if self._trouble == "unplayable":
            raise GameFormatError(f"{task} has no end")
        if self._trouble.endswith("_reset"):
            make_trouble(self._trouble.removesuffix("_reset"))
        return self._observe()

    def step(self, command: str) -> StepResult:
        """Walk, or make trouble."""
        self._steps += 1
        if self._trouble.endswith("_step") and self._steps > 1:
            make_trouble(self._trouble.removesuffix("_step"))
        if self._trouble == "slow":
            time.sleep(0.4)
        won = self._steps == STEPS_TO_WIN
        reward: object = "much" if self._trouble == "nonsense" else float(won)
        return StepResult(observation=self._observe(won=won), reward=reward, terminated=won, truncated=False)  # type: ignore[arg-type]  # what a user's environment may do

    def _observe(self, *, won: bool = False) -> Observation:
        info = Info(task="walk on.", task_type="walk", won=won)
        text = f"Step {self._steps} of {os.getpid()}."
        return Observation(text="\ud800" if self._trouble == "surrogate" else text, admissible=("go",), info=info)


class TroubleSuite:
    """The suite that a topology names; every tenth task makes trouble."""

    may_block = True
    kinds = ("fine",) * 9 + ("raise_step",)

    def __init__(self, env: Env) -> None:
        """Take nothing from the topology."""

    def tasks(self, split: str) -> Sequence[str]:
        """Return twenty tasks."""
        return [f"{split}/{self.kinds[number % len(self.kinds)]}-{number}" for number in range(20)]

    def make(self) -> TroubleGame:
        """Return a fresh game."""
        return TroubleGame()

    def expert(self) -> Expert:
        """Refuse: no test asks for one."""
        raise NotImplementedError

    def solution(self, task: str) -> Sequence[str]:
        """Return the way."""
        return ["go"] * STEPS_TO_WIN

    def annotate(self, task: str, steps: Sequence[Step], won: bool) -> Analysis:
        """Return the one thing to know."""
        return Analysis(episode_summary="walked", episode_skill="go")


class BrokenSuite(TroubleSuite):
    """Cannot make an environment."""

    def make(self) -> TroubleGame:
        """Raise."""
        raise OSError("the simulator is not installed")


class TroubledBoxesGame(BoxesGame):
    """Every fifth box game makes trouble in its first step, a kind of its own each."""

    kinds = ("hang", "crash", "raise", "garbage", "leak")

    def reset(self, task: str) -> Observation:
        """Open the game."""
        number = int(task.partition("/")[2])
        self._kind = self.kinds[number // 5 % len(self.kinds)] if number % 5 == 3 and task.startswith("train") else ""
        return super().reset(task)

    def step(self, command: str) -> StepResult:
        """Open one box, or make trouble."""
        if self._kind and IS_WORKER:
            make_trouble(self._kind)
        return super().step(command)


class TroubledBoxesSuite(BoxesSuite):
    """Boxes with trouble, in isolated processes only: Stage 1 plays in its own."""

    may_block = True

    def make(self) -> TroubledBoxesGame:
        """Return a fresh game."""
        return TroubledBoxesGame(self._max_steps)
