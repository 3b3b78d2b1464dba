"""The learner's own small rules; whole runs are tested with the real processes."""

from pathlib import Path

import pytest

from seed_async.journal import Journal
from seed_async.learner.leader import newest_published
from seed_async.learner.trainer import learning_rate
from seed_async.topology import Optimizer


@pytest.mark.parametrize(
    ("warmup", "rates"), [(0, [1.0, 1.0, 1.0]), (1, [1.0, 1.0, 1.0]), (4, [0.25, 0.5, 0.75, 1.0, 1.0])]
)
def test_the_learning_rate_rises_to_its_value_and_stays(warmup: int, rates: list[float]) -> None:
    optimizer = Optimizer(lr=1.0, warmup_updates=warmup)
    assert [learning_rate(version, optimizer) for version in range(len(rates))] == rates


def test_the_newest_version_that_any_learner_handed_out_is_found(tmp_path: Path) -> None:
    assert newest_published(tmp_path / "none") == -1
    journal = Journal(tmp_path / "trained")
    for version in (0, 1, 5, 3):
        journal.note("published", version=version)
    journal.note("trained", trajectory="t", version=9)
    journal.close()
    assert newest_published(tmp_path / "trained") == 5
