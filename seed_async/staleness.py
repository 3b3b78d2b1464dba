"""The staleness bound, in one small class: what may be trained, and how much may be started."""

from typing import NamedTuple


class StalenessBound(NamedTuple):
    """Bound K on the age of a trained token, and the admission gate that keeps waste small.

    age = version about to be updated - oldest sampling version of the trajectory; it may be at most K, inclusive.
    Groups may be opened while

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

    def may_open_group(self, version: int, admitted: int) -> bool:
        """Whether one more group may be started; never before a first version is acknowledged (version -1)."""
        return version >= 0 and admitted < (self.max_staleness + version + 1) * self.groups_per_update
