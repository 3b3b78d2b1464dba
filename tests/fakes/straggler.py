"""Boxes of which one game takes so long that others overtake it by two updates, however fast or slow the machine is."""

import os
import time
from pathlib import Path

from seed_async.envs.contract import Observation, StepResult
from seed_async.topology import Env
from tests.fakes.boxes import BoxesGame, BoxesSuite

NUM_OVERTAKING = 6
"""Episodes that end while the straggler waits: the other member of its group, two groups of two, and one more.

With one group of two an update and `staleness.max: 1` the gate leaves two groups open. So the
last of these episodes was granted after two updates that had not begun when the straggler sampled its first turn:
those tokens are two versions old then.
"""
GIVE_UP_S = 100.0


class OvertakenGame(BoxesGame):
    """The first training game of all processes to come to a second step waits there."""

    def __init__(self, max_steps: int, folder: Path) -> None:
        """Processes meet in files below `folder`."""
        super().__init__(max_steps)
        self._straggler, self._ended = folder / "straggler", folder / "ended"
        self._counts = False

    def reset(self, task: str) -> Observation:
        """Open the game of `task`."""
        self._counts = task.startswith("train/")
        return super().reset(task)

    def step(self, command: str) -> StepResult:
        """Open one box, which may take long."""
        if self._counts and self._steps == 1:
            self._perhaps_wait()
        result = super().step(command)
        if self._counts and (result.terminated or result.truncated):
            with self._ended.open("a") as file:
                file.write(".")
        return result

    def _perhaps_wait(self) -> None:
        try:
            os.close(os.open(self._straggler, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return
        self._ended.touch()
        wanted, give_up_s = self._ended.stat().st_size + NUM_OVERTAKING, time.monotonic() + GIVE_UP_S
        while self._ended.stat().st_size < wanted:
            if time.monotonic() > give_up_s:
                raise TimeoutError(f"{NUM_OVERTAKING} other games did not end in {GIVE_UP_S} s")
            time.sleep(0.01)


class StragglerSuite(BoxesSuite):
    """The suite that a topology names; its `env.games` is the folder in which the processes of the games meet."""

    def __init__(self, env: Env) -> None:
        """Take the step limit and the folder from the topology."""
        super().__init__(env)
        self._folder = Path(env.games)

    def make(self) -> OvertakenGame:
        """A fresh game."""
        return OvertakenGame(self._max_steps, self._folder)
