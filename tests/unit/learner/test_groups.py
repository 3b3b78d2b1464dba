"""Which groups make a batch: by age, by order of completion, and by deadline where nothing may be wasted."""

import pytest

from seed_async.learner.groups import Group, Member, choose_groups
from seed_async.messages import Sample
from seed_async.staleness import StalenessBound
from seed_async.topology import OnStale
from tests.fakes.episodes import make_lease, make_trajectory

BOUND = StalenessBound(max_staleness=1, groups_per_update=2)
SIZE = 2


def group(name: str, *versions: int, resolved: bool = True, leased_at: int | None = None) -> Group:
    """A group whose finished members were sampled at `versions`; the next one may be in play since `leased_at`."""
    made = Group(name, task_index=0, size=SIZE)
    for number, version in enumerate(versions):
        trajectory = make_trajectory(make_lease(group=name, member=number), "a")
        sample = Sample(trajectory=trajectory, skill=None)
        made.members[number] = Member(trajectory, 100, version, 0.0, sample, resolved)
    if leased_at is not None:
        made.leased_at[len(versions)] = leased_at
    return made


def choose(groups: list[Group], on_stale: OnStale, *, version: int = 3) -> tuple[set[str], list[str]]:
    """Chosen and stale groups; they were completed in the order given."""
    choice = choose_groups(
        {each.group_id: each for each in groups},
        [each.group_id for each in groups if each.complete],
        BOUND,
        on_stale,
        version=version,
        present_version=version,
    )
    return set(choice.chosen), list(choice.stale)


def test_a_deadline_is_that_of_the_oldest_member_in_play_or_finished() -> None:
    assert group("a", 3, 2).deadline(BOUND, 5) == 3
    assert group("a", 3, leased_at=1).deadline(BOUND, 5) == 2
    assert group("a", 7).deadline(BOUND, 5) == 6, "a vacant member would be granted under the present version"


@pytest.mark.parametrize("on_stale", ["drop", "wait"])
def test_a_group_with_one_member_over_the_bound_is_dropped_whole(on_stale: OnStale) -> None:
    assert choose([group("a", 3, 1), group("b", 3, 3), group("c", 2, 3)], on_stale) == ({"b", "c"}, ["a"])


def test_masking_drops_no_group() -> None:
    assert choose([group("a", 3, 1), group("b", 3, 3), group("c", 2, 3)], "mask") == ({"a", "b"}, [])


def test_there_is_no_batch_as_long_as_a_group_is_missing_or_waits_for_a_skill() -> None:
    assert choose([group("a", 3, 3), group("b", 3)], "drop") == (set(), [])
    assert choose([group("a", 3, 3), group("b", 3, 3, resolved=False)], "drop") == (set(), [])


def test_waiting_takes_the_earliest_deadlines_and_lets_no_other_group_become_too_old() -> None:
    ready = [group("a", 3, 3), group("b", 3, 3), group("c", 2, 2)]
    assert choose(ready, "drop") == ({"a", "b"}, [])
    assert "c" in choose(ready, "wait")[0]
    late = group("d", 3, leased_at=2)
    assert choose([group("a", 3, 3), group("b", 3, 3), late], "wait") == (set(), []), (
        "version 4 would be too late for d"
    )
    assert choose([group("a", 3, 3), group("b", 3, 3), late], "drop") == ({"a", "b"}, [])
