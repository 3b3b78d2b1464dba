"""The table of methods."""

from typing import get_args

import pytest

from seed_async.learner.algorithms.methods import METHODS, UnknownMethodError, get_method
from seed_async.topology import MethodName


def test_every_method_that_a_topology_may_name_is_declared() -> None:
    """The configuration and the math agree."""
    assert set(get_args(MethodName)) == set(METHODS)


def test_seed_distils_a_hindsight_skill_and_grpo_has_no_teacher() -> None:
    """The two rows of the table that exist now."""
    assert get_method("seed").gated_distillation and get_method("seed").teacher == "hindsight_skill"
    assert not get_method("grpo").gated_distillation and get_method("grpo").teacher == "none"


def test_an_unknown_method_is_refused_with_the_known_ones() -> None:
    """So that a typing error is seen at once."""
    with pytest.raises(UnknownMethodError, match=r"'ppo'.*grpo, seed"):
        get_method("ppo")
