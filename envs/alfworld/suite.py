"""The ALFWorld suite: games from any source, played by the exact engine."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Final

from seed_async.envs.alfworld.annotator import annotate
from seed_async.envs.alfworld.board import Board
from seed_async.envs.alfworld.catalogue import ROOM_KINDS
from seed_async.envs.alfworld.engine import Engine, Seen
from seed_async.envs.alfworld.expert import AlfworldExpert
from seed_async.envs.alfworld.generator import Settings, feasible_task_types
from seed_async.envs.alfworld.oracle import solve
from seed_async.envs.alfworld.scenes import Filter
from seed_async.envs.alfworld.sources import GameSource, GeneratedGames, open_source
from seed_async.envs.alfworld.vocabulary import VocabularyName, vocabulary_name
from seed_async.envs.contract import Analysis, Info, Observation, Step, StepResult

DEFAULT_COUNTS: Final = {"train": 2000, "valid_seen": 140, "valid_unseen": 140}
_CACHED_BOARDS: Final = 64
"""The members of a group play the same game at about the same time, so a few dozen parsed games are worth keeping."""


class AlfworldEnvironment:
    """One running game of a suite."""

    def __init__(self, suite: "AlfworldSuite") -> None:
        """Play games of `suite`."""
        self.suite = suite
        self._steps = 0
        self._over = True

    def reset(self, task: str) -> Observation:
        """Open the game `task`."""
        self._steps, self._over = 0, True
        game = self.suite.board(task).game
        self._task, self._task_type = f"{game.task}.", game.goal.task_type
        seen = self.start(task)
        self._over = False
        return self._observe(seen)

    def step(self, command: str) -> StepResult:
        """Play one command. Raises RuntimeError when no game is running: the caller must reset after an end."""
        if self._over:
            raise RuntimeError("the episode is over or was never started: call reset first")
        self._over = True  # until the engine has answered
        seen = self.play(command)
        self._steps += 1
        truncated = not seen.won and self._steps >= self.suite.max_steps
        self._over = seen.won or truncated
        return StepResult(
            observation=self._observe(seen),
            reward=1.0 if seen.won else 0.0,
            terminated=seen.won,
            truncated=truncated,
        )

    def start(self, task: str) -> Seen:
        """Let the engine open `task`; another engine overrides this and `play`."""
        self._engine = Engine(self.suite.board(task))
        return self._engine.seen(self._engine.board.first_text)

    def play(self, command: str) -> Seen:
        """Let the engine play a command."""
        return self._engine.seen(self._engine.play(command))

    def _observe(self, seen: Seen) -> Observation:
        score = 1.0 if seen.won else 0.0
        info = Info(task=self._task, task_type=self._task_type, won=seen.won, valid=seen.valid, score=score)
        return Observation(text=seen.text, admissible=seen.admissible, info=info)


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
            games: `generated`; `official` for what alfworld-download has fetched; or the path of a compact
                JSONL(.xz) file or of a folder in the official layout.
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
        if max_steps < 1:
            raise ValueError(f"max_steps is {max_steps}: the rule is at least 1")
        self.max_steps = max_steps
        self.vocabulary = vocabulary_name(vocabulary)
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

    def problem(self, task: str) -> str:
        """Return the PDDL problem text of a task as its source holds it. Raises TaskNotFoundError."""
        return self._source.problem(task)

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
