"""How a batch is divided among the ranks of a learner: whole trajectories, evenly by tokens in each mini-batch."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from seed_async.learner.batch import UpdateBatch
from seed_async.learner.targets import TokenAdvantages


class Share(NamedTuple):
    """One rank's part of a batch: `mini_batches` are ranges of its own trajectories, empty where it has none."""

    batch: UpdateBatch
    mini_batches: tuple[range, ...]
    advantages: TokenAdvantages


def balance(num_tokens: Sequence[int], num_ranks: int) -> list[int]:
    """The rank of each trajectory, by its number of tokens: the longest first, each to the rank with the least so far.

    Every rank computes the same. The largest load is at most 4/3 - 1/(3 ranks) of the best possible (Graham 1969).
    """
    loads, owners = [0] * num_ranks, [0] * len(num_tokens)
    for index in sorted(range(len(num_tokens)), key=lambda index: -num_tokens[index]):
        owners[index] = loads.index(min(loads))
        loads[owners[index]] += num_tokens[index]
    return owners


def share_of(
    batch: UpdateBatch, mini_batches: Sequence[range], advantages: TokenAdvantages, rank: int, num_ranks: int
) -> Share:
    """Return what `rank` does of the mini-batches, each a range of the batch's trajectories.

    `advantages` are those of the whole batch: statistics of a group need all its members, whoever trains them.
    """
    chosen: list[int] = []
    ranges = []
    for mini in mini_batches:
        rows = [(*batch.trajectories[index].plain, *batch.trajectories[index].skill) for index in mini]
        owners = balance([sum(len(row.token_ids) for row in each) for each in rows], num_ranks)
        own = [index for index, owner in zip(mini, owners, strict=True) if owner == rank]
        ranges.append(range(len(chosen), len(chosen) + len(own)))
        chosen += own
    sizes = [len(trajectory.fresh) for trajectory in batch.trajectories]
    by_trajectory = np.split(advantages.advantage, np.cumsum(sizes)[:-1])
    advantage = [by_trajectory[index] for index in chosen]
    return Share(
        UpdateBatch(tuple(batch.trajectories[index] for index in chosen), share=True),
        tuple(ranges),
        TokenAdvantages(np.concatenate([np.empty(0, np.float32), *advantage]), advantages.metrics),
    )
