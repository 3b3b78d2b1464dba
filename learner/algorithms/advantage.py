"""Group-relative advantages of environment steps (algorithm specification, section 4)."""

from typing import Any, Literal, NamedTuple

import numpy as np
import torch

Statistics = Literal["rows", "trajectories"]
Vector = np.ndarray[Any, Any] | torch.Tensor

# Keeps the division finite in groups of almost equal scores; the recipe's value.
STD_EPSILON = 1e-6


class GroupAdvantage(NamedTuple):
    """Advantages of the rows, and the group statistics behind them.

    `advantage` float64 [rows]; `mean` and `std` float64 [groups] in the order of the sorted group ids; `informative`
    bool [groups], False where every advantage is 0 by rule (a group of one, or all-equal scores).
    """

    advantage: np.ndarray
    mean: np.ndarray
    std: np.ndarray
    informative: np.ndarray


def group_advantage(
    returns: Vector,
    invalid: Vector,
    group_ids: Vector,
    row_trajectory: Vector,
    *,
    penalty: float,
    divide_by_std: bool,
    statistics: Statistics,
) -> GroupAdvantage:
    """Advantage of each row, a row being one environment step of one trajectory.

    S = R - penalty * invalid;  A = (S - mean_q) / (std_q + 1e-6), without the division when `divide_by_std` is off.
    `rows`: mean and unbiased std of S over all rows of the group. `trajectories`: mean and population std of the
    returns R of the group's trajectories, each counted once whatever its number of steps; the penalty then only moves
    its own row. A group of one trajectory, and a group whose scores are all equal, has advantage 0: the comparison is
    exact, because a rounded mean over a rounded std would be noise of order 1.

    Source: algorithm specification, section 4. Shapes: all four inputs [rows], numpy or torch; `returns` R is the
    trajectory's return repeated on its rows, `invalid` is 1 where the step's action was unparsable.
    """
    episode_return = np.asarray(returns, dtype=np.float64)
    unparsable = np.asarray(invalid, dtype=np.float64)
    if not (np.isfinite(episode_return).all() and np.isfinite(unparsable).all()):
        raise ValueError("returns and invalid must be finite")
    score = episode_return - penalty * unparsable
    group_of_row = np.unique(np.asarray(group_ids), return_inverse=True)[1]
    trajectory = np.asarray(row_trajectory)
    num_groups = int(group_of_row.max()) + 1 if group_of_row.size else 0
    advantage = np.zeros_like(score)
    mean, std, informative = np.zeros(num_groups), np.zeros(num_groups), np.zeros(num_groups, dtype=bool)
    for group in range(num_groups):
        rows = np.flatnonzero(group_of_row == group)
        first_rows = rows[np.unique(trajectory[rows], return_index=True)[1]]
        sample = score[rows] if statistics == "rows" else episode_return[first_rows]
        mean[group] = sample.mean()
        informative[group] = first_rows.size > 1 and sample.max() > sample.min()
        if informative[group]:
            std[group] = sample.std(ddof=1 if statistics == "rows" else 0)
            centred = score[rows] - mean[group]
            advantage[rows] = centred / (std[group] + STD_EPSILON) if divide_by_std else centred
    return GroupAdvantage(advantage, mean, std, informative)


def discounted_returns(rewards: Vector, row_trajectory: Vector, discount: float) -> np.ndarray:
    """What each row still gains: G_t = r_t + discount G_{t+1} within its trajectory; float64 [rows].

    Source: algorithm specification, section 6 (gigpo). Shapes: both inputs [rows]; the rows of a trajectory are in the
    order of time, but need not be next to each other.
    """
    gained = np.asarray(rewards, dtype=np.float64).copy()
    if not np.isfinite(gained).all():
        raise ValueError("rewards must be finite")
    following: dict[object, int] = {}
    trajectory = np.asarray(row_trajectory).tolist()
    for row in reversed(range(gained.size)):
        if trajectory[row] in following:
            gained[row] += discount * gained[following[trajectory[row]]]
        following[trajectory[row]] = row
    return gained


def step_advantage(
    step_returns: Vector,
    invalid: Vector,
    group_ids: Vector,
    observation_ids: Vector,
    *,
    penalty: float,
    divide_by_std: bool,
    statistics: Statistics,
) -> GroupAdvantage:
    """Advantage of each row among the rows of its group that saw an equal observation (its anchor).

    A = (S - mean_anchor) / (std_anchor + 1e-6), S = G - penalty * invalid: the formula of `group_advantage`, whose
    groups are here the anchors and whose samples are single rows, so that a trajectory which comes back to an
    observation is compared with itself too. Under the statistics `trajectories` mean and population std are those of G.
    An observation seen once, or with equal scores, gives 0. The groups of the result are the anchors.

    Source: algorithm specification, section 6 (gigpo). Shapes: all inputs [rows]; `step_returns` G are discounted
    returns, `observation_ids` integers that are equal where the observations are.
    """
    group = np.unique(np.asarray(group_ids), return_inverse=True)[1].reshape(-1)
    seen = np.asarray(observation_ids, dtype=np.int64)
    anchors = np.unique(np.stack([group, seen], axis=1), axis=0, return_inverse=True)[1].reshape(-1)
    return group_advantage(
        step_returns,
        invalid,
        anchors,
        np.arange(seen.size),
        penalty=penalty,
        divide_by_std=divide_by_std,
        statistics=statistics,
    )
