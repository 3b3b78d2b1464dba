"""The table of methods."""

from typing import get_args

import pytest

from seed_async.learner.algorithms.methods import METHODS, UnknownMethodError, get_method
from seed_async.topology import MethodName


def test_every_method_that_a_topology_may_name_is_declared() -> None:
    """The configuration and the math agree."""
    assert set(get_args(MethodName)) == set(METHODS)


def test_the_table_is_that_of_the_specification() -> None:
    """Teacher, what the advantage adds up, and the term of the distillation."""
    table = {name: (m.teacher, m.step_skills, m.advantage, m.distillation) for name, m in METHODS.items()}
    episode = ("episode",)
    assert table == {
        "grpo": ("none", False, episode, "none"),
        "seed": ("hindsight", False, episode, "gated"),
        "seed_static": ("hindsight", False, episode, "gated"),
        "sdar": ("library", False, episode, "gated"),
        "opid": ("hindsight", True, ("episode", "skill_shift"), "none"),
        "opsd": ("hindsight_or_library", False, (), "reverse_kl"),
        "gigpo": ("none", False, ("episode", "step_groups"), "none"),
    }
    assert get_method("opsd").advantage_terms(True) == episode and get_method("opsd").advantage_terms(False) == ()
    assert all(m.has_teacher == (m.uses_hindsight or m.uses_library) for m in METHODS.values())


def test_an_unknown_method_is_refused_with_the_known_ones() -> None:
    """So that a typing error is seen at once."""
    with pytest.raises(UnknownMethodError, match=r"'ppo'.*gigpo, grpo"):
        get_method("ppo")
