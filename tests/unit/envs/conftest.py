"""Fixtures of the environment tests."""

import pytest
from hand_kitchen import Table, make_game


@pytest.fixture
def kitchen() -> Table:
    """Return the hand-written kitchen at its start."""
    return Table(make_game())
