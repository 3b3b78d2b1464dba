"""Who is trained: ratios of lengths, and the share of the slowest tenth."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from seed_async.learner.selection_bias import SelectionBias


def test_nothing_is_known_before_anything_has_ended() -> None:
    """No division by zero."""
    assert set(SelectionBias().report().values()) == {None}


def test_all_trained_is_no_bias_and_nothing_trained_has_no_ratio() -> None:
    """The two ends."""
    whole, nothing = SelectionBias(), SelectionBias()
    for size in range(1, 50):
        whole.add(float(size), size, size, taken=True)
        nothing.add(float(size), size, 0, taken=False)
    assert set(whole.report().values()) == {1.0}
    wanted = {"length_ratio": None, "trained_token_share": 0, "slowest_decile_trained": 0, "longest_decile_trained": 0}
    assert nothing.report() == wanted


def test_losing_the_longest_shows_in_every_figure() -> None:
    """Ten of a hundred, ten times as long as the others."""
    bias = SelectionBias()
    for number in range(100):
        long = number % 10 == 0
        bias.add(20.0 if long else 2.0, 100 if long else 10, 0 if long else 10, taken=not long)
    report = bias.report()
    assert report["length_ratio"] == pytest.approx(10 / 19)
    assert report["trained_token_share"] == pytest.approx(900 / 1900)
    assert report["slowest_decile_trained"] == report["longest_decile_trained"] == 0.0


@settings(deadline=None)
@given(st.lists(st.tuples(st.floats(0, 1e5), st.booleans()), min_size=1, max_size=200))
def test_the_slowest_tenth_is_that_of_the_sorted_list_but_for_the_width_of_a_bin(
    episodes: list[tuple[float, bool]],
) -> None:
    """Between the least and the most that ties within 5 % of the threshold allow."""
    bias = SelectionBias()
    for seconds, trained in episodes:
        bias.add(seconds, 10, 10 if trained else 0, taken=trained)
    share = bias.report()["slowest_decile_trained"]
    assert share is not None and 0 <= share <= 1
    seconds, trained = np.array([each[0] for each in episodes]), np.array([each[1] for each in episodes])
    wanted = 0.1 * len(episodes)
    threshold = np.sort(seconds)[::-1][max(int(np.ceil(wanted)) - 1, 0)]
    sure = seconds > threshold * 1.05 + 1e-6
    unsure = (seconds <= threshold * 1.05 + 1e-6) & (seconds >= threshold / 1.05 - 1e-6)
    room = wanted - sure.sum()
    least = trained[sure].sum() + max(0.0, room - (~trained[unsure]).sum())
    most = trained[sure].sum() + min(room, trained[unsure].sum())
    assert least / wanted - 1e-9 <= share <= most / wanted + 1e-9
