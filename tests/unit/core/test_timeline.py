"""Timelines on disk, and the arithmetic of what overlaps."""

import itertools
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seed_async.timeline import Timeline, load_timeline, overlap_seconds, union

intervals = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=8)


def active_seconds(spans: list[tuple[int, int]]) -> set[int]:
    return {second for start, end in spans for second in range(start, end)}


@given(intervals)
def test_union_covers_the_same_seconds_in_disjoint_order(spans: list[tuple[int, int]]) -> None:
    merged = union(spans)
    assert active_seconds(merged) == active_seconds(spans)  # type: ignore[arg-type]  # ints stay ints
    assert all(start < end for start, end in merged)
    assert all(left[1] < right[0] for left, right in itertools.pairwise(merged))


@given(st.lists(intervals, max_size=4))
def test_overlap_counts_the_seconds_that_are_in_every_set(sets: list[list[tuple[int, int]]]) -> None:
    truth = set.intersection(*map(active_seconds, sets)) if sets else set()
    assert overlap_seconds(*sets) == len(truth)


def test_overlap_of_one_set_is_the_length_of_its_union() -> None:
    assert overlap_seconds([(0, 2), (1, 3), (5, 6)]) == 4


def test_spans_come_back_sorted_from_all_files(tmp_path: Path) -> None:
    late = Timeline(tmp_path / "learner-0.jsonl", "learner", "0")
    early = Timeline(tmp_path / "actor-1.jsonl", "actor", "1")
    late.record("update", 20.0, 21.0, 3)
    early.record("episode", 10.0, 15.0, 2)
    late.close()
    early.close()
    spans = load_timeline(tmp_path)
    assert [(span.role, span.instance, span.kind, span.version) for span in spans] == [
        ("actor", "1", "episode", 2),
        ("learner", "0", "update", 3),
    ]


def test_a_span_is_recorded_in_wall_time_also_when_its_block_raises(tmp_path: Path) -> None:
    timeline = Timeline(tmp_path / "a.jsonl", "learner", "0")
    before_s = time.time()
    with pytest.raises(KeyError), timeline.span("update", 4):
        raise KeyError
    timeline.close()
    timeline.close()
    [span] = load_timeline(tmp_path)
    assert before_s <= span.start_s <= span.end_s <= time.time()


def test_nothing_is_written_within_the_first_second(tmp_path: Path) -> None:
    timeline = Timeline(tmp_path / "a.jsonl", "learner", "0")
    timeline.record("update", 0.0, 1.0, 0)
    assert load_timeline(tmp_path) == []
    timeline.close()
    assert len(load_timeline(tmp_path)) == 1


def test_a_line_cut_by_a_kill_costs_only_itself(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    for _ in range(2):
        timeline = Timeline(path, "actor", "0")
        timeline.record("episode", 0.0, 1.0, 0)
        timeline.close()
        path.write_bytes(path.read_bytes() + b'{"role":"actor","inst')
    assert len(load_timeline(tmp_path)) == 2
