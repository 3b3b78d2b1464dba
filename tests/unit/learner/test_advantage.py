"""Group advantages against the slow truth, and the rules for groups without a comparison."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from seed_async.learner.algorithms.advantage import group_advantage
from tests.reference.numpy_losses import advantage_truth

STATISTICS = st.sampled_from(["rows", "trajectories"])


@st.composite
def groups(draw):
    """Rows of trajectories of groups, in any order: returns, invalid flags, group ids, trajectory ids."""
    rows = []
    for trajectory in range(draw(st.integers(1, 8))):
        group = draw(st.sampled_from(["a", "b", "c"]))
        episode_return = draw(st.sampled_from([0.0, 0.1, 10.0, -3.3]))
        for _ in range(draw(st.integers(1, 4))):
            rows.append((episode_return, draw(st.booleans()), group, trajectory))
    return draw(st.permutations(rows))


@given(groups(), STATISTICS, st.booleans())
def test_advantage_follows_its_definition_for_any_order_of_rows(rows, statistics, divide) -> None:
    """Oracle (h) for section 4."""
    columns = [list(column) for column in zip(*rows, strict=True)]
    truth = advantage_truth(*columns, 0.1, divide, statistics)
    found = group_advantage(*map(np.array, columns), penalty=0.1, divide_by_std=divide, statistics=statistics).advantage
    np.testing.assert_allclose(found, truth, rtol=1e-7, atol=1e-7)


@given(groups(), STATISTICS)
def test_the_order_of_rows_does_not_matter(rows, statistics) -> None:
    """Shuffled rows carry their advantages with them."""
    order = np.random.default_rng(0).permutation(len(rows))
    columns = [np.array(column) for column in zip(*rows, strict=True)]
    options = {"penalty": 0.1, "divide_by_std": True, "statistics": statistics}
    straight = group_advantage(*columns, **options).advantage
    shuffled = group_advantage(*(column[order] for column in columns), **options).advantage
    np.testing.assert_allclose(shuffled, straight[order], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("statistics", ["rows", "trajectories"])
@pytest.mark.parametrize("episode_return", [0.1, 10.0, 1 / 3])
def test_equal_scores_have_advantage_zero_exactly(statistics, episode_return) -> None:
    """Rounding of the mean must not be divided by rounding of the std."""
    returns = np.full(7, episode_return)
    found = group_advantage(
        returns, np.ones(7), np.zeros(7), np.arange(7), penalty=0.1, divide_by_std=True, statistics=statistics
    )
    assert (found.advantage == 0).all() and not found.informative.any()


@pytest.mark.parametrize("statistics", ["rows", "trajectories"])
def test_a_group_of_one_has_advantage_zero(statistics) -> None:
    """Whatever its steps were."""
    found = group_advantage(
        np.full(3, 10.0), [0, 1, 0], ["g"] * 3, [5] * 3, penalty=0.1, divide_by_std=True, statistics=statistics
    )
    assert (found.advantage == 0).all()


def test_the_penalty_touches_its_own_row_only_under_trajectory_statistics() -> None:
    """The other rows of the trajectory keep the advantage they had without it."""
    rows = (np.array([10.0, 10.0, 0.0]), np.array([0, 0, 1]), np.zeros(3))
    options = {"penalty": 0.1, "divide_by_std": False, "statistics": "trajectories"}
    clean = group_advantage(rows[0], rows[2], rows[2], rows[1], **options).advantage
    fined = group_advantage(rows[0], [0, 1, 0], rows[2], rows[1], **options).advantage
    np.testing.assert_allclose(fined - clean, [0, -0.1, 0], atol=1e-12)


def test_equal_returns_leave_a_penalised_row_at_zero_under_trajectory_statistics() -> None:
    """Dividing the penalty by a std of zero would give -1e5."""
    found = group_advantage(
        [10.0, 10.0], [1, 0], [0, 0], [0, 1], penalty=0.1, divide_by_std=True, statistics="trajectories"
    )
    assert (found.advantage == 0).all()


def test_torch_vectors_are_taken_and_empty_ones_give_nothing() -> None:
    """Numpy and torch callers share the function."""
    options = {"penalty": 0.1, "divide_by_std": True, "statistics": "rows"}
    returns, zeros = torch.tensor([10.0, 0.0]), torch.zeros(2)
    np.testing.assert_allclose(
        group_advantage(returns, zeros, zeros, torch.arange(2), **options).advantage, [0.5**0.5, -(0.5**0.5)], rtol=1e-6
    )
    assert group_advantage([], [], [], [], **options).advantage.shape == (0,)


def test_a_non_finite_return_is_refused() -> None:
    """Not spread over its group."""
    with pytest.raises(ValueError, match="returns"):
        group_advantage([np.nan, 0.0], [0, 0], [0, 0], [0, 1], penalty=0.1, divide_by_std=True, statistics="rows")
