"""The staleness bound: inclusive at training time, and an admission gate that waits for acknowledgements."""

import pytest

from seed_async.staleness import StalenessBound


@pytest.mark.parametrize("max_staleness", [0, 1, 3])
def test_age_is_bounded_inclusively(max_staleness: int) -> None:
    """K is allowed, K + 1 is not."""
    bound = StalenessBound(max_staleness, 4)
    assert bound.admits(10, 10 - max_staleness)
    assert not bound.admits(10, 10 - max_staleness - 1)


def test_nothing_is_opened_before_a_version_is_acknowledged() -> None:
    """Version -1 means that no policy server can sample."""
    assert not StalenessBound(5, 4).may_open_group(-1, 0)


@pytest.mark.parametrize(("max_staleness", "version", "room"), [(0, 0, 4), (1, 0, 8), (2, 3, 24)])
def test_the_gate_opens_by_one_batch_a_version(max_staleness: int, version: int, room: int) -> None:
    """(K + version + 1) batches may have been admitted in total."""
    bound = StalenessBound(max_staleness, 4)
    assert bound.may_open_group(version, room - 1)
    assert not bound.may_open_group(version, room)
