"""Suites are opened by name or by `module:Class`; anything else is refused with the value."""

import pytest

from seed_async.envs.registry import UnknownEnvironmentError, open_suite, tasks_digest
from seed_async.topology import Env
from tests.fakes.boxes import BoxesSuite


def test_a_class_of_the_user_is_called_with_the_env_section() -> None:
    suite = open_suite(Env(id="tests.fakes.boxes:BoxesSuite", max_steps=2))
    assert isinstance(suite, BoxesSuite)
    game = suite.make()
    game.reset("train/0")
    game.step("nonsense")
    assert game.step("nonsense").truncated


@pytest.mark.parametrize(
    "name", ["webshop", "no.such:Thing", "os:nothing", "os:path", "tests.fakes.boxes:key_box", ":x"]
)
def test_a_name_that_opens_nothing_is_refused_with_the_name(name: str) -> None:
    with pytest.raises(UnknownEnvironmentError, match=repr(name)):
        open_suite(Env(id=name))


def test_the_digest_of_a_task_list_tells_order_and_borders() -> None:
    lists = [("a", "b"), ("b", "a"), ("ab",), ("a", "b", "c")]
    assert len({tasks_digest(tasks) for tasks in lists}) == len(lists)
