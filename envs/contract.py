"""The environment contract: what an actor needs of an environment, and nothing else.

Tasks are strings that any process can open: the same id gives the same game everywhere, so the members of a group
need no shared iterator. Everything here is plain data; nothing blocks and nothing loads torch.
"""

from collections.abc import Sequence
from typing import Protocol

import msgspec


class TaskNotFoundError(LookupError):
    """A task id or split that the suite does not have."""


class GameFormatError(ValueError):
    """A game file that cannot be played (truncated, foreign, with a goal out of reach), or a source without games."""


class GameFailedError(GameFormatError):
    """A game that broke off while it was played: the engine behind it died or did not answer in time.

    It costs its episode, like a game that cannot be played; the next `reset` starts afresh.
    """


class Info(msgspec.Struct, frozen=True, kw_only=True):
    """What is known beside the text of an observation.

    `valid` tells whether the environment understood the last command; `score` is the environment's own measure
    (for ALFWorld 1.0 when won).
    """

    task: str
    task_type: str
    won: bool = False
    valid: bool = True
    score: float = 0.0


class Observation(msgspec.Struct, frozen=True, kw_only=True):
    """One observation. `admissible` is the list of commands that act here (without `help`); `images` are PNG bytes."""

    text: str
    admissible: tuple[str, ...] = ()
    images: tuple[bytes, ...] = ()
    info: Info


class StepResult(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of one command. `reward` is unscaled; `truncated` means that the step limit was reached."""

    observation: Observation
    reward: float
    terminated: bool
    truncated: bool


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """One finished step as an annotator sees it: the observation acted on, the command, and whether it was valid."""

    observation: str
    action: str
    valid: bool


class Analysis(msgspec.Struct, frozen=True, kw_only=True):
    """The two fields of a hindsight analysis (algorithm specification, section 5)."""

    episode_summary: str
    episode_skill: str


class Environment(Protocol):
    """One running game. Not thread safe; cheap to reset."""

    def reset(self, task: str) -> Observation:
        """Open the game `task`. Raises TaskNotFoundError, GameFormatError or GameFailedError."""
        ...

    def step(self, command: str) -> StepResult:
        """Play one command, any string; an unknown one changes nothing and is reported by `info.valid`.

        Raises GameFailedError where an engine in another process plays and fails.
        """
        ...


class Expert(Protocol):
    """Plays from observations only, for demonstrations."""

    def reset(self, observation: Observation) -> None:
        """Start a new episode at its first observation."""
        ...

    def act(self, observation: Observation) -> str:
        """Return the command for this observation."""
        ...


class Suite(Protocol):
    """A family of games: what a topology's `env` section opens."""

    def tasks(self, split: str) -> Sequence[str]:
        """Return the indexable task ids of a split. Raises TaskNotFoundError for an unknown split."""
        ...

    def make(self) -> Environment:
        """Return a fresh environment object that can play any task of the suite."""
        ...

    def expert(self) -> Expert:
        """Return a fresh expert."""
        ...

    def solution(self, task: str) -> Sequence[str]:
        """Return a short command list that wins `task`, by full knowledge of the game."""
        ...

    def annotate(self, task: str, steps: Sequence[Step], won: bool) -> Analysis:
        """Write the hindsight analysis of a finished trajectory from the game's own solution (Stage 1 oracle)."""
        ...
