"""The clock of the phases: launches add up, and a kill costs seconds."""

from pathlib import Path

import pytest

from seed_async.phases import SAVE_INTERVAL_S, PhaseClock, read_phases


def test_launches_add_up_by_phase_also_when_one_ends_with_an_error(tmp_path: Path) -> None:
    path, now_s = tmp_path / "phases.json", [100.0]
    assert read_phases(path) == {}
    first = PhaseClock(path, {}, lambda: now_s[0])
    with first.timed("sft"):
        now_s[0] += 20
    with pytest.raises(KeyError), first.timed("rl"):
        now_s[0] += 7
        raise KeyError
    second = PhaseClock(path, read_phases(path), lambda: now_s[0])
    with second.timed("rl"):
        now_s[0] += 5
    assert second.seconds == read_phases(path) == {"sft": 20, "rl": 12}


def test_a_kill_costs_at_most_the_interval_of_saving(tmp_path: Path) -> None:
    path, now_s = tmp_path / "phases.json", [0.0]
    with PhaseClock(path, {"rl": 50.0}, lambda: now_s[0]).timed("rl") as tick:
        for _ in range(100):
            now_s[0] += 0.3
            tick()
            kept = read_phases(path).get("rl", 50.0)  # what a launcher killed now would leave
            assert 50.0 + now_s[0] - SAVE_INTERVAL_S <= kept <= 50.0 + now_s[0] + 1e-9
