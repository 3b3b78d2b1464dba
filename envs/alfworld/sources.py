"""Where games come from: each source lists the task ids of its splits and opens a game by its id."""

import lzma
import re
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Protocol, overload

import msgspec

from seed_async.envs.alfworld.generator import Settings, generate
from seed_async.envs.alfworld.model import Game
from seed_async.envs.alfworld.official import DATA_VARIABLE, GAMES_FOLDER, OfficialGames, default_root
from seed_async.envs.alfworld.pddl import write_problem
from seed_async.envs.alfworld.scenes import (
    SPLITS,
    Filter,
    TaskParams,
    count_receptacles,
    open_game,
    room_split,
    split_tasks,
)
from seed_async.envs.contract import GameFormatError, TaskNotFoundError


class GameSource(Protocol):
    """A family of games by task id."""

    def tasks(self, split: str) -> Sequence[str]:
        """Return the task ids of a split. Raises TaskNotFoundError for an unknown one."""
        ...

    def game(self, task: str) -> Game:
        """Open a game. Raises TaskNotFoundError or GameFormatError."""
        ...

    def problem(self, task: str) -> str:
        """Return a game's own PDDL problem text, for the original engine. Raises TaskNotFoundError."""
        ...


class _GeneratedTasks(Sequence[str]):
    """The ids of a generated split, made on demand."""

    def __init__(self, split: str, count: int) -> None:
        self._split, self._numbers = split, range(count)

    def __len__(self) -> int:
        return len(self._numbers)

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[str]: ...
    def __getitem__(self, index: int | slice) -> str | Sequence[str]:
        if isinstance(index, slice):
            return tuple(self._name(number) for number in self._numbers[index])
        return self._name(self._numbers[index])

    def _name(self, number: int) -> str:
        return f"generated/{self._split}/{number:06d}"


class GeneratedGames:
    """Games of the generator. A task id holds split and index, so nothing is made in advance."""

    def __init__(self, settings: Settings, counts: dict[str, int]) -> None:
        """Offer `counts[split]` games of each split."""
        unknown = sorted(counts.keys() - set(SPLITS))
        if unknown or min(counts.values(), default=0) < 1:
            raise ValueError(f"counts is {counts}: the rule is one positive number for some of {', '.join(SPLITS)}")
        self._settings, self._counts = settings, dict(counts)

    def tasks(self, split: str) -> Sequence[str]:
        """Return the ids of a split."""
        if split not in self._counts:
            raise TaskNotFoundError(f"no split {split!r}; there are {', '.join(self._counts)}")
        return _GeneratedTasks(split, self._counts[split])

    def game(self, task: str) -> Game:
        """Make the game of a task id."""
        match = re.fullmatch(r"generated/(\w+)/(\d{6})", task, re.ASCII)
        if match is None or match[1] not in self._counts or int(match[2]) >= self._counts[match[1]]:
            raise TaskNotFoundError(f"no generated game {task[:200]!r}")
        return generate(self._settings, match[1], int(match[2]))

    def problem(self, task: str) -> str:
        """Write the PDDL problem text of a game."""
        return write_problem(self.game(task))


class _Record(msgspec.Struct, frozen=True):
    """One line of a compact file, as far as play needs it."""

    id: str
    task_type: str
    floor_plan: str
    task: str
    pddl_params: TaskParams
    pddl_problem: str


class CompactGames:
    """The games of one JSONL file, plain or xz. Its splits are carved by room: see `room_split`.

    Problem texts are kept compressed: a file of 4,391 games takes 25 MB instead of 180.
    """

    def __init__(self, path: Path, wanted: Filter) -> None:
        """Read the file. Raises GameFormatError for a damaged one, and when the filter leaves no game."""
        self._path = path
        self._packed: dict[str, bytes] = {}
        self._tasks: dict[str, list[str]] = {split: [] for split in SPLITS}
        decoder = msgspec.json.Decoder(_Record)
        for number, line in enumerate(_lines(path), start=1):
            try:
                record = decoder.decode(line)
                split = room_split(record.floor_plan)
                passes = wanted.accepts(record.task_type, record.floor_plan, count_receptacles(record.pddl_problem))
            except (msgspec.DecodeError, GameFormatError) as error:
                raise GameFormatError(f"{path}, line {number}: {error}") from error
            if passes:
                task = f"{split}/{record.id}"
                if task in self._packed:
                    raise GameFormatError(f"{path}, line {number}: the id {record.id!r} appears twice")
                self._tasks[split].append(task)
                self._packed[task] = zlib.compress(line, 1)
        if not self._packed:
            raise GameFormatError(f"{path}: no game passes the filter {wanted}")

    def tasks(self, split: str) -> Sequence[str]:
        """Return the ids of a split in the order of the file."""
        return split_tasks(self._tasks, split, self._path)

    def _record(self, task: str) -> _Record:
        packed = self._packed.get(task)
        if packed is None:
            raise TaskNotFoundError(f"no game {task[:200]!r} in {self._path}")
        return msgspec.json.decode(zlib.decompress(packed), type=_Record)

    def problem(self, task: str) -> str:
        """Return the PDDL problem text of a game."""
        return self._record(task).pddl_problem

    def game(self, task: str) -> Game:
        """Open a game."""
        record = self._record(task)
        return open_game(
            task, record.task_type, record.floor_plan, record.task, record.pddl_params, record.pddl_problem
        )


def _open_file(path: Path) -> IO[bytes]:
    return lzma.open(path, "rb") if path.suffix == ".xz" else path.open("rb")


def _lines(path: Path) -> Iterator[bytes]:
    with _open_file(path) as file:
        try:
            yield from file
        except (lzma.LZMAError, EOFError) as error:
            raise GameFormatError(f"{path} is not a whole xz file: {error}") from error


def open_source(games: str, wanted: Filter) -> GameSource:
    """Open the games at a path, a compact file or a folder in the official layout, or those of `official`.

    Raises FileNotFoundError, naming the path and how to get official games, and GameFormatError.
    """
    if games == "official":
        folder = default_root() / GAMES_FOLDER
        if not folder.is_dir():
            raise FileNotFoundError(
                f"env.games official: there is no folder {folder}; fetch it with the command alfworld-download (of the"
                f" alfworld package), or let {DATA_VARIABLE} name the folder that holds {GAMES_FOLDER}"
            )
        return OfficialGames(folder, wanted)
    path = Path(games).expanduser()
    if path.is_dir():
        return OfficialGames(path, wanted)
    if not path.is_file():
        raise FileNotFoundError(
            f"env.games: there is nothing at {path.absolute()}; the official games are fetched with the command"
            f" alfworld-download --data-dir FOLDER, a folder of generated ones is made by seed-async data alfworld"
        )
    return CompactGames(path, wanted)
