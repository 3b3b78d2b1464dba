"""The staleness bound: what may be trained, how much may be started, and when the learner has to wait."""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np


class StalenessBound(NamedTuple):
    """Bound K on the age of a trained token, and the admission gate that keeps waste small.

    age of a token = version about to be updated - version that sampled it; it may be at most K, inclusive. A whole
    trajectory is as old as its oldest token. Groups may be opened while

        admitted < (K + version + 1) * groups_per_update

    where `admitted` counts the groups trained, finished and running (dropped ones give their place back) and
    `version` is the newest that every policy server has acknowledged. Freeing places earlier, at the end of the
    update, would let the age reach K + 1.
    """

    max_staleness: int
    groups_per_update: int

    def admits(self, version: int, oldest_version: int) -> bool:
        """Whether a trajectory whose oldest token is from `oldest_version` may be trained from `version`."""
        return version - oldest_version <= self.max_staleness

    def admits_tokens(self, version: int, versions: np.ndarray) -> np.ndarray:
        """Which of the tokens, sampled by `versions` int [R], may be trained from `version`; bool [R]."""
        return (version - versions <= self.max_staleness).astype(bool)

    def may_open_group(self, version: int, admitted: int) -> bool:
        """Whether one more group may be started; never before a first version is acknowledged (version -1)."""
        return version >= 0 and admitted < (self.max_staleness + version + 1) * self.groups_per_update

    def deadline(self, oldest_version: int) -> int:
        """The last version from which something with a token of `oldest_version` may be trained whole: oldest + K."""
        return oldest_version + self.max_staleness

    def num_late(self, deadlines: Iterable[int], version: int) -> int:
        """How many open groups no order of updates can train in time, at best.

        The updates from `version`, `version` + 1, ... take `groups_per_update` (B) groups each. Earliest deadline first
        is best where all jobs are of one size: with m groups placed, the next one goes into the update from
        `version` + m // B, and is late when its deadline lies before that.
        """
        placed = late = 0
        for deadline in sorted(deadlines):
            in_time = deadline >= version + placed // self.groups_per_update
            placed, late = placed + in_time, late + (not in_time)
        return late

    def may_advance(self, taken: Iterable[int], left: Iterable[int], version: int) -> bool:
        """Whether the update from `version` may take groups of the deadlines `taken` and leave those of `left` open.

        Only when that makes no group late which would be in time otherwise (`on_stale: wait`). Then no group is ever
        late: a group opened under `version` has the deadline `version` + K, the gate leaves at most (K + 1) B groups
        open, so it can go into the update from `version` + K or an earlier one; and with every group finished, the B
        earliest deadlines may always be taken, so that the wait ends when the groups that hold it up end.
        """
        left = tuple(left)
        return self.num_late(left, version + 1) <= self.num_late((*taken, *left), version)
