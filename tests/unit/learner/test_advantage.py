"""Group advantages against the slow truth, and the rules for groups without a comparison."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from seed_async.learner.algorithms.advantage import discounted_returns, group_advantage, step_advantage
from tests.reference.numpy_losses import advantage_truth, discounted_truth, step_advantage_truth

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


@given(st.lists(st.tuples(st.sampled_from([0.0, 1.0, -2.5, 10.0]), st.integers(0, 3)), max_size=20))
def test_discounted_returns_follow_their_definition(rows) -> None:
    """Oracle (h) for the step returns of gigpo; trajectories may be interleaved."""
    rewards, trajectories = [r for r, _ in rows], [t for _, t in rows]
    found = discounted_returns(rewards, trajectories, 0.95)
    np.testing.assert_allclose(found, discounted_truth(rewards, trajectories, 0.95), rtol=1e-9, atol=1e-9)


def test_a_reward_at_the_end_is_discounted_by_the_steps_before_it() -> None:
    """One trajectory of three steps, one of a single step."""
    np.testing.assert_allclose(discounted_returns([0, 0, 10, 4], ["a", "a", "a", "b"], 0.5), [2.5, 5, 10, 4])
    assert discounted_returns([], [], 0.95).shape == (0,)
    with pytest.raises(ValueError, match="rewards"):
        discounted_returns([np.nan], [0], 0.95)


@st.composite
def steps(draw):
    """Step returns, invalid flags, group ids and observation ids of some rows."""
    row = st.tuples(
        st.sampled_from([0.0, 0.1, 9.5, 10.0, -3.3]), st.booleans(), st.sampled_from("ab"), st.integers(0, 2)
    )
    return [list(column) for column in zip(*draw(st.lists(row, min_size=1, max_size=16)), strict=True)]


@given(steps(), STATISTICS, st.booleans())
def test_step_advantages_follow_their_definition_and_the_order_of_rows_does_not_matter(
    columns, statistics, divide
) -> None:
    """Oracle (h) for the step advantage of gigpo."""
    options = {"penalty": 0.1, "divide_by_std": divide, "statistics": statistics}
    found = step_advantage(*columns, **options).advantage
    truth = step_advantage_truth(*columns, 0.1, divide, statistics)
    np.testing.assert_allclose(found, truth, rtol=1e-7, atol=1e-7)
    order = np.random.default_rng(0).permutation(len(found))
    shuffled = step_advantage(*(np.array(column)[order] for column in columns), **options).advantage
    np.testing.assert_allclose(shuffled, found[order], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("statistics", ["rows", "trajectories"])
def test_an_observation_seen_once_or_with_equal_returns_has_no_step_advantage(statistics) -> None:
    """The same observation in another group is another anchor."""
    found = step_advantage(
        [1.0, 5.0, 3.0, 3.0],
        [0] * 4,
        ["a", "b", "a", "a"],
        [7, 7, 8, 8],
        penalty=0.1,
        divide_by_std=True,
        statistics=statistics,
    )
    assert (found.advantage == 0).all() and not found.informative.any() and found.informative.size == 3


def test_equal_observations_inside_a_group_compare_their_step_returns() -> None:
    """The sooner success gets the higher advantage; unbiased std of {9, 5} is 2 sqrt 2."""
    found = step_advantage(
        [9.0, 5.0, 1.0], [0, 0, 0], ["a"] * 3, [4, 4, 5], penalty=0.1, divide_by_std=True, statistics="rows"
    ).advantage
    np.testing.assert_allclose(found, [0.5**0.5, -(0.5**0.5), 0.0], rtol=1e-6)
