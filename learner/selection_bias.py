"""Who is trained: whether the bound on ages takes the long and slow episodes away.

Fixed memory: the episodes are counted in bins of seconds and of tokens, a sixteenth of an octave (4 %) wide.
"""

import math
from collections import defaultdict
from typing import Final

_BINS_AN_OCTAVE: Final = 16
_SMALLEST: Final = 1e-6
_SLOWEST: Final = 0.1
"""The slowest decile."""


class _TopShare:
    """How much of the top decile by some size is trained."""

    def __init__(self) -> None:
        self._episodes: defaultdict[int, int] = defaultdict(int)
        self._trained: defaultdict[int, float] = defaultdict(float)

    def add(self, size: float, share: float) -> None:
        place = math.floor(math.log2(max(size, _SMALLEST)) * _BINS_AN_OCTAVE)
        self._episodes[place] += 1
        self._trained[place] += share

    def share(self) -> float | None:
        """Take bins from the top until they hold a tenth of all; of the last one a part, as if it were even."""
        wanted = _SLOWEST * sum(self._episodes.values())
        if not wanted:
            return None
        taken = trained = 0.0
        for place in sorted(self._episodes, reverse=True):
            part = min(1.0, (wanted - taken) / self._episodes[place])
            if part <= 0:
                break
            taken += part * self._episodes[place]
            trained += part * self._trained[place]
        return trained / taken


class SelectionBias:
    """Counts the episodes whose fate is known, by length, duration, and the share of their tokens that was trained."""

    def __init__(self) -> None:
        """Nothing has ended yet."""
        self._episodes = self._tokens = self._taken = self._trained_tokens = 0
        self._by_seconds, self._by_tokens = _TopShare(), _TopShare()

    def add(self, seconds: float, num_tokens: int, num_trained: int, *, taken: bool) -> None:
        """Count an episode: its duration, its response tokens, those in the loss, and whether it was in a batch."""
        self._episodes += 1
        self._tokens += num_tokens
        self._taken += taken
        self._trained_tokens += num_trained
        for sizes, size in ((self._by_seconds, seconds), (self._by_tokens, float(num_tokens))):
            sizes.add(size, num_trained / num_tokens)

    def report(self) -> dict[str, float | None]:
        """Return the figures; None where nothing has ended yet.

        `length_ratio`: mean of trained tokens of the episodes that were taken over the mean length of all that ended;
        below 1 the long ones are lost. `trained_token_share`: trained tokens over all. `slowest_decile_trained`: the
        mean share of their tokens that was trained, for the tenth of the episodes that took longest;
        `longest_decile_trained`: for the tenth with the most tokens.
        """
        mean = self._tokens / self._episodes if self._episodes else None
        mean_trained = self._trained_tokens / self._taken if self._taken else None
        return {
            "length_ratio": mean_trained / mean if mean and mean_trained is not None else None,
            "trained_token_share": self._trained_tokens / self._tokens if self._tokens else None,
            "slowest_decile_trained": self._by_seconds.share(),
            "longest_decile_trained": self._by_tokens.share(),
        }
