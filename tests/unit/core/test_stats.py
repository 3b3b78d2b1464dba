"""Wilson's interval: known values and what makes it fit for success rates."""

import pytest

from seed_async.stats import wilson_interval


@pytest.mark.parametrize(
    ("successes", "n", "low", "high"),
    [(50, 100, 0.4038, 0.5962), (1, 10, 0.0179, 0.4042), (0, 10, 0.0, 0.2775), (10, 10, 0.7225, 1.0)],
)
def test_known_values(successes: int, n: int, low: float, high: float) -> None:
    assert wilson_interval(successes, n) == pytest.approx((low, high), abs=1e-4)


def test_the_ends_solve_the_score_equation() -> None:
    for end in wilson_interval(37, 120):
        assert abs(37 / 120 - end) == pytest.approx(1.96 * (end * (1 - end) / 120) ** 0.5)


def test_no_observation_says_nothing() -> None:
    assert wilson_interval(0, 0) == (0.0, 1.0)


@pytest.mark.parametrize("n", [1, 3, 7, 49, 134])
def test_every_interval_holds_the_rate_and_stays_within_zero_and_one(n: int) -> None:
    for successes in range(n + 1):
        low, high = wilson_interval(successes, n)
        assert 0 <= low <= successes / n <= high <= 1


@pytest.mark.parametrize(("successes", "n"), [(3, 2), (-1, 2), (1, 0)])
def test_impossible_counts_are_refused(successes: int, n: int) -> None:
    with pytest.raises(ValueError, match="successes of"):
        wilson_interval(successes, n)
