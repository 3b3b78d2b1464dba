"""In which order the games of the training split are opened."""

from collections import deque
from collections.abc import Iterable

import numpy as np


class TaskOrder:
    """Every game once an epoch, in an order that only the run's seed and the epoch decide.

    `cursor` places of the endless list are used up. Games of groups that a restart ended come first; a quarantined game
    never comes again.
    """

    def __init__(self, seed: int, cursor: int = 0, replay: Iterable[int] = (), quarantined: Iterable[int] = ()) -> None:
        """Begin at `cursor`; the number of games is known later, from the first actor."""
        self.cursor = cursor
        self.num_tasks = 0
        self.quarantined = set(quarantined)
        self._seed = seed
        self._replay = deque(replay)
        self._order, self._epoch = np.zeros(0, dtype=np.int64), -1

    def next(self) -> int | None:
        """Return the next game; None when all are quarantined."""
        if self._replay:
            return self._replay.popleft()
        while len(self.quarantined) < self.num_tasks:
            epoch, place = divmod(self.cursor, self.num_tasks)
            if self._epoch != epoch:
                self._order = np.random.default_rng([self._seed, epoch]).permutation(self.num_tasks)
                self._epoch = epoch
            self.cursor += 1
            task = int(self._order[place])
            if task not in self.quarantined:
                return task
        return None
