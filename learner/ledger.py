"""The buffer's books: what became of every lease and trajectory, as counts and as entries of the journal."""

from collections import Counter
from collections.abc import Callable, Collection
from typing import Literal, Unpack

import numpy as np

from seed_async.journal import Event, Fields, Note
from seed_async.learner.recovery import Recovered
from seed_async.messages import Sample, Trajectory
from seed_async.staleness import StalenessBound

Fate = Literal["trained", "stale", "stale_group", "failed_group", "unused"]
OnFate = Callable[[Sample, Fate, int, int], None]
"""Takes an accepted trajectory with its fate, the version and the age at that moment."""
NO_TOKENS = np.zeros(0, dtype=np.int32)
NO_AGE = -1
"""Of a trajectory in a batch with all its tokens masked: it counts in the statistics of its group only."""


class Ledger:
    """Counts of one run, over all incarnations of its buffer. `note` takes the entries of the provenance journal."""

    def __init__(self, bound: StalenessBound, on_fate: OnFate, note: Note, before: Recovered) -> None:
        """Go on from `before`."""
        self._bound, self._on_fate, self._note = bound, on_fate, note
        self._trained_ages = Counter(before.ages)
        self._bias = before.bias
        self._counts = Counter(before.counts)
        self._dropped = Counter(before.dropped)

    def reopen(self, before: Recovered) -> None:
        """End the leases and trajectories that died with the buffer before; their games are in `before.replay`."""
        self._note("reopened")
        for lease in before.open_leases:
            self.book("returned", lease=lease, reason="restart")
        for trajectory, entry in before.open_trajectories.items():
            self._dropped["restart"] += 1
            self._note("dropped", trajectory=trajectory, group=entry.group, member=entry.member, reason="restart")

    def book(self, event: Event, **fields: Unpack[Fields]) -> None:
        """Count an event and write it to the journal."""
        self._counts[event] += 1
        self._note(event, **fields)

    def count(self, figure: str, by: int = 1) -> None:
        """Count something that the journal holds in other words."""
        self._counts[figure] += by

    def accept(self, trajectory: Trajectory, skill_reason: str) -> None:
        """Book a finished trajectory."""
        self.book(
            "accepted",
            lease=trajectory.lease_id,
            trajectory=trajectory.trajectory_id,
            group=trajectory.group_id,
            member=trajectory.member,
            incarnation=trajectory.incarnation,
            version=trajectory.oldest_version,
            num_tokens=trajectory.response_ids.size,
            seconds=_seconds(trajectory),
            reason=skill_reason,
        )

    def hand_out(self, sample: Sample, version: int) -> int:
        """Book a trajectory into the update from `version`; returns how many of its tokens may be trained.

        The age of a trained trajectory counts from the oldest token that is trained; with none it has no age.
        """
        versions = sample.trajectory.versions
        young = versions[self._bound.admits_tokens(version, versions)]
        masked = versions.size - young.size
        self._counts["trained"] += 1
        self._counts["masked_tokens"] += masked
        self._counts["masked_trajectories"] += not young.size
        if masked:
            self._note(
                "masked",
                trajectory=sample.trajectory.trajectory_id,
                reason="stale",
                version=version,
                num_tokens=masked,
            )
        self._end(sample, "trained", version, young)
        return int(young.size)

    def drop(self, sample: Sample, fate: Literal["stale", "stale_group", "failed_group"], version: int) -> None:
        """Book an accepted trajectory as dropped."""
        self._dropped[fate] += 1
        self._end(sample, fate, version)

    def leave(self, sample: Sample, version: int) -> None:
        """Book an accepted trajectory that the run ended before."""
        self._end(sample, "unused", version)

    def report(self, running: int, buffered: int, quarantined: Collection[int]) -> dict[str, object]:
        """Every count of the run, and whether they add up: no trajectory and no lease is lost or counted twice.

        `running` leases and `buffered` trajectories are still open.
        """
        counts, accepted, trained = self._counts, self._counts["accepted"], self._counts["trained"]
        ended_leases = accepted + counts["returned"] + counts["failed"]
        return {
            "accepted": accepted,
            "trained": trained,
            "lost": counts["lost"],
            "dropped": dict(self._dropped),
            "buffered": buffered,
            "duplicate": counts["duplicate"],
            "fenced": counts["fenced"],
            "refused": counts["refused"],
            "leases": {
                "granted": counts["leased"],
                "returned": counts["returned"],
                "failed": counts["failed"],
                "running": running,
            },
            "skills": {key: counts[f"skill_{key}"] for key in ("parsed", "unparsed", "timeout", "late")},
            "skills_missing": counts["skill_missing"],
            "quarantined_tasks": sorted(quarantined),
            "ages": {str(age): number for age, number in sorted(self._trained_ages.items()) if number},
            "masked": {key: counts[f"masked_{key}"] for key in ("tokens", "trajectories", "batches")},
            "bias": self._bias.report(),
            "balance_ok": accepted == trained + sum(self._dropped.values()) + counts["unused"] + buffered
            and counts["leased"] == ended_leases + running,
        }

    def _end(self, sample: Sample, fate: Fate, version: int, trained: np.ndarray = NO_TOKENS) -> None:
        """Report the fate of an accepted trajectory; `trained` are the versions of its tokens that may be trained."""
        trajectory = sample.trajectory
        age = version - trajectory.oldest_version
        self._on_fate(sample, fate, version, age)
        if fate == "trained":
            age = version - int(trained.min()) if trained.size else NO_AGE
            self._trained_ages[age] += age != NO_AGE
        if fate != "unused":
            num_tokens = trajectory.versions.size
            self._bias.add(_seconds(trajectory), num_tokens, trained.size, taken=fate == "trained")
        self._note(
            fate if fate in ("trained", "unused") else "dropped",
            trajectory=trajectory.trajectory_id,
            group=trajectory.group_id,
            member=trajectory.member,
            reason="" if fate in ("trained", "unused") else fate,
            version=version,
            age=age,
        )


def _seconds(trajectory: Trajectory) -> float:
    """How long the episode was played, as the journal says it."""
    return round(trajectory.ended_at_s - trajectory.started_at_s, 3)
