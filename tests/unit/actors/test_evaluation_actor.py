"""When an evaluation is due: first, every so often, and last."""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import cast

import pytest

from seed_async.actors.evaluation_actor import EvaluationActor
from seed_async.messages import RunState
from seed_async.topology_roles import Evaluation


@dataclass
class Asked:
    """What `_due` reads of an evaluation actor, so that no socket is needed."""

    every: int
    evaluated: int

    def due(self, version: int, *, finished: bool = False) -> bool:
        """Ask the real rule."""
        actor = SimpleNamespace(_settings=Evaluation(every=self.every), _evaluated=self.evaluated)
        return EvaluationActor._due(cast(EvaluationActor, actor), RunState(version=version, finished=finished))


@pytest.mark.parametrize("every", [0, 5])
def test_the_first_version_is_always_due(every: int) -> None:
    """It is the score before training."""
    assert Asked(every, -1).due(0)
    assert not Asked(every, 0).due(0)


def test_a_version_is_due_after_every_so_many() -> None:
    """Counted from the last evaluated one; versions that were passed meanwhile are skipped."""
    assert not Asked(5, 0).due(4)
    assert Asked(5, 0).due(5) and Asked(5, 0).due(17)
    assert not Asked(0, 0).due(1000)


@pytest.mark.parametrize("every", [0, 5])
def test_the_last_version_is_due_once(every: int) -> None:
    """The learner waits for it."""
    assert Asked(every, 6).due(7, finished=True)
    assert not Asked(every, 7).due(7, finished=True)
