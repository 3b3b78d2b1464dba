"""What the deaths of a run's processes have cost, counted from its journals and told by the kind of role.

The journals name every loss with its reason. What was only done again (requests to a policy server, claims of an
analyzer, evaluations) is no loss and stands nowhere.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Final

from rich.console import Console
from rich.table import Table

from seed_async.journal import Entry, read_journal
from seed_async.rundir import RunDir

BUFFER_RESTART: Final = "restart"
GROUP_FAILED: Final = "its group failed"


@dataclass
class Losses:
    """Of one kind of role.

    `episodes` in play that had to be played again; accepted `trajectories` that were never trained; `updates` that were
    made and forgotten; `analyses` that were given up.
    """

    episodes: int = 0
    trajectories: int = 0
    updates: int = 0
    analyses: int = 0


def buffer_losses(entries: Iterable[Entry]) -> dict[str, Losses]:
    """What the buffer's journal tells of actors, analyzers and the buffer itself."""
    losses = {"actor": Losses(), "analyzer": Losses(), "buffer": Losses()}
    for entry in entries:
        match entry.event:
            case "returned" if entry.reason == BUFFER_RESTART:
                losses["buffer"].episodes += 1
            case "returned" if entry.reason != GROUP_FAILED:
                losses["actor"].episodes += 1
            case "dropped" | "lost" if entry.reason == BUFFER_RESTART:
                losses["buffer"].trajectories += 1
            case "analysed" if entry.reason == "timeout":
                losses["analyzer"].analyses += 1
    return losses


def learner_losses(entries: Iterable[Entry], lost_by_buffer: Collection[str] = ()) -> Losses:
    """What the learner's journal tells: updates from the weights on that a successor has begun with.

    Their trajectories are lost too, unless the successor was given them again; what the buffer has lost is its loss.
    """
    made: defaultdict[int, set[str]] = defaultdict(set)
    forgotten: set[str] = set()
    updates = 0
    for entry in entries:
        if entry.event == "trained":
            made[entry.version].add(entry.trajectory)
        elif entry.event == "started":
            for version in [version for version in made if version >= entry.weights]:
                updates += 1
                forgotten |= made.pop(version)
    return Losses(updates=updates, trajectories=len(forgotten.difference(lost_by_buffer, *made.values())))


def count_losses(run_dir: RunDir) -> dict[str, Losses]:
    """Count the losses of a run by the kind of role that caused them."""
    lost = {entry.trajectory for entry in read_journal(run_dir.journal) if entry.event == "lost"}
    learner = learner_losses(read_journal(run_dir.trained), lost) if run_dir.trained.is_file() else Losses()
    return buffer_losses(read_journal(run_dir.journal)) | {"learner": learner}


def print_losses(losses: dict[str, Losses], console: Console) -> None:
    """Print a row for each kind of role."""
    table = Table("role", "episodes", "trajectories", "updates", "analyses", title="lost")
    for role, lost in sorted(losses.items()):
        table.add_row(role, str(lost.episodes), str(lost.trajectories), str(lost.updates), str(lost.analyses))
    console.print(table)
