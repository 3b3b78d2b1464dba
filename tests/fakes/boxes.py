"""A tiny real environment for tests of the processes: find the key in one of a few boxes.

It is opened as a user's own suite, by `env.id: tests.fakes.boxes:BoxesSuite`.
"""

from collections.abc import Sequence
from random import Random

from seed_async.envs.contract import Analysis, Info, Observation, Step, StepResult, TaskNotFoundError
from seed_async.topology import Env

NUM_BOXES = 4
NUM_TASKS = {"train": 200, "valid_unseen": 24}
TASK = "open the box with the key."


def key_box(task: str) -> int:
    """The box that holds the key; the task id alone decides it."""
    return Random(task).randrange(NUM_BOXES)


class BoxesGame:
    """Open boxes until the key is found or the steps are over."""

    def __init__(self, max_steps: int) -> None:
        """No game is open yet."""
        self._max_steps = max_steps
        self._steps = self._key = 0

    def _observe(self, text: str, *, won: bool = False, valid: bool = True) -> Observation:
        commands = tuple(f"open box {number}" for number in range(NUM_BOXES))
        info = Info(task=TASK, task_type="boxes", won=won, valid=valid, score=float(won))
        return Observation(text=text, admissible=commands, info=info)

    def reset(self, task: str) -> Observation:
        """Open the game of `task`."""
        if task.partition("/")[0] not in NUM_TASKS:
            raise TaskNotFoundError(task)
        self._steps, self._key = 0, key_box(task)
        return self._observe("You see " + ", ".join(f"box {number}" for number in range(NUM_BOXES)) + ".")

    def step(self, command: str) -> StepResult:
        """Open one box."""
        self._steps += 1
        won = command == f"open box {self._key}"
        valid = command in {f"open box {number}" for number in range(NUM_BOXES)}
        text = "You found the key." if won else "It is empty." if valid else "Nothing happens."
        observation = self._observe(text, won=won, valid=valid)
        return StepResult(
            observation=observation,
            reward=float(won),
            terminated=won,
            truncated=not won and self._steps >= self._max_steps,
        )


class BoxesExpert:
    """Opens the boxes in order."""

    def reset(self, observation: Observation) -> None:
        """Start at the first box."""
        self._next = 0

    def act(self, observation: Observation) -> str:
        """Open the next box."""
        self._next += 1
        return f"open box {self._next - 1}"


class BoxesSuite:
    """The suite that a topology names."""

    def __init__(self, env: Env) -> None:
        """Take the step limit from the topology."""
        self._max_steps = env.max_steps

    def tasks(self, split: str) -> Sequence[str]:
        """Task ids of a split."""
        if split not in NUM_TASKS:
            raise TaskNotFoundError(f"no split {split!r}")
        return [f"{split}/{number}" for number in range(NUM_TASKS[split])]

    def make(self) -> BoxesGame:
        """A fresh game."""
        return BoxesGame(self._max_steps)

    def expert(self) -> BoxesExpert:
        """A fresh expert."""
        return BoxesExpert()

    def solution(self, task: str) -> Sequence[str]:
        """The one winning command."""
        return [f"open box {key_box(task)}"]

    def annotate(self, task: str, steps: Sequence[Step], won: bool) -> Analysis:
        """Name the box."""
        skill = f"open box {key_box(task)} first" if won else f"do not stop before box {key_box(task)}"
        return Analysis(episode_summary="opened boxes", episode_skill=skill)
