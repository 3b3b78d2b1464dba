"""The ALFWorld suite: games from any source, played by the exact engine."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Final

from seed_async.envs.alfworld.annotator import annotate
from seed_async.envs.alfworld.board import Board
from seed_async.envs.alfworld.catalogue import ROOM_KINDS
from seed_async.envs.alfworld.engine import Engine
from seed_async.envs.alfworld.expert import AlfworldExpert
from seed_async.envs.alfworld.generator import Settings, feasible_task_types
from seed_async.envs.alfworld.oracle import solve
from seed_async.envs.alfworld.scenes import Filter
from seed_async.envs.alfworld.sources import GameSource, GeneratedGames, open_source
from seed_async.envs.alfworld.vocabulary import VOCABULARIES, VocabularyName
from seed_async.envs.contract import Analysis, Info, Observation, Step, StepResult

DEFAULT_COUNTS: Final = {"train": 2000, "valid_seen": 140, "valid_unseen": 140}
_CACHED_BOARDS: Final = 64
"""The members of a group play the same game at about the same time, so a few dozen parsed games are worth keeping."""


class AlfworldEnvironment:
    """One running game of a suite."""

    def __init__(self, suite: "AlfworldSuite") -> None:
        """Play games of `suite`."""
        self._suite = suite
        self._engine: Engine | None = None
        self._steps = 0
        self._over = True

    def reset(self, task: str) -> Observation:
        """Open the game `task`."""
        engine = self._engine = Engine(self._suite.board(task))
        self._steps, self._over = 0, False
        goal = engine.board.game.goal
        self._task, self._task_type = f"{engine.board.game.task}.", goal.task_type
        return self._observe(engine, engine.board.first_text, engine.won)

    def step(self, command: str) -> StepResult:
        """Play one command. Raises RuntimeError when no game is running: the caller must reset after an end."""
        engine = self._engine
        if engine is None or self._over:
            raise RuntimeError("the episode is over or was never started: call reset first")
        text = engine.play(command)
        self._steps += 1
        won = engine.won
        truncated = not won and self._steps >= self._suite.max_steps
        self._over = won or truncated
        return StepResult(
            observation=self._observe(engine, text, won),
            reward=1.0 if won else 0.0,
            terminated=won,
            truncated=truncated,
        )

    def _observe(self, engine: Engine, text: str, won: bool) -> Observation:
        return Observation(
            text=text,
            admissible=engine.admissible(),
            info=Info(
                task=self._task, task_type=self._task_type, won=won, valid=engine.valid, score=1.0 if won else 0.0
            ),
        )


class AlfworldSuite:
    """Implements the Suite contract for ALFWorld games."""

    def __init__(
        self,
        games: str = "generated",
        max_steps: int = 30,
        vocabulary: VocabularyName = "move",
        seed: int = 0,
        counts: dict[str, int] | None = None,
        min_receptacles: int = 4,
        max_receptacles: int | None = None,
        num_objects: int = 6,
        task_types: Sequence[str] | None = None,
        rooms: Sequence[str] | None = None,
    ) -> None:
        """Open the games.

        Args:
            games: `generated`, or the path of a compact JSONL(.xz) file or of a folder in the official layout.
            max_steps: An episode is truncated after this many steps.
            vocabulary: `move` (ALFWorld 0.4) or `put` (older).
            seed: Decides generated games.
            counts: Number of generated games by split.
            min_receptacles: The fewest receptacles of a generated room.
            max_receptacles: The most receptacles of a room; None means 8 when generated and no limit otherwise.
            num_objects: Number of objects in a generated room.
            task_types: Use only these; None means all that the rooms allow.
            rooms: Use only these kinds of room; None means all.
        """
        if vocabulary not in VOCABULARIES:
            raise ValueError(f"vocabulary is {vocabulary!r}: the rule is one of {', '.join(VOCABULARIES)}")
        if max_steps < 1:
            raise ValueError(f"max_steps is {max_steps}: the rule is at least 1")
        self.max_steps = max_steps
        self.vocabulary: VocabularyName = vocabulary
        if games == "generated":
            room_kinds = tuple(rooms or ROOM_KINDS)
            settings = Settings(
                seed=seed,
                min_receptacles=min_receptacles,
                max_receptacles=8 if max_receptacles is None else max_receptacles,
                num_objects=num_objects,
                task_types=tuple(task_types or feasible_task_types(room_kinds)),
                rooms=room_kinds,
            )
            self._source: GameSource = GeneratedGames(settings, DEFAULT_COUNTS if counts is None else counts)
        else:
            wanted = Filter(
                task_types=tuple(task_types) if task_types else None,
                rooms=tuple(rooms) if rooms else None,
                max_receptacles=max_receptacles,
            )
            self._source = open_source(games, wanted)
        self._open = lru_cache(maxsize=_CACHED_BOARDS)(self.open_uncached)

    def open_uncached(self, task: str) -> Board:
        """Read or make the game of a task anew; `board` is the cached way."""
        return Board(self._source.game(task), self.vocabulary)

    def board(self, task: str) -> Board:
        """Return the indexed game of a task. Raises TaskNotFoundError or GameFormatError."""
        return self._open(task)

    def tasks(self, split: str) -> Sequence[str]:
        """Return the indexable task ids of a split. Raises TaskNotFoundError for an unknown split."""
        return self._source.tasks(split)

    def make(self) -> AlfworldEnvironment:
        """Return a fresh environment object that can play any task of the suite."""
        return AlfworldEnvironment(self)

    def expert(self) -> AlfworldExpert:
        """Return a fresh expert."""
        return AlfworldExpert(self.vocabulary)

    def solution(self, task: str) -> Sequence[str]:
        """Return a short command list that wins `task`."""
        return solve(self.board(task))

    def annotate(self, task: str, steps: Sequence[Step], won: bool) -> Analysis:
        """Write the hindsight analysis of a finished trajectory."""
        return annotate(self.board(task), steps, won)
