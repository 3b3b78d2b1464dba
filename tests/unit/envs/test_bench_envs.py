"""The benchmark of the environments runs and prints its figures."""

import pytest

from seed_async.tools.bench_envs import bench_ours, main, rate


def test_a_rate_is_units_of_work_per_cpu_second() -> None:
    assert rate(lambda: sum(range(1000)) * 0 + 5, seconds=0.01) > 5


def test_our_figures_are_all_positive() -> None:
    figures = bench_ours("generated", seconds=0.02)
    assert set(figures) == {"steps/s", "resets/s", "games opened/s", "kB/game", "kB/environment", "MB/environment"}
    assert min(figures.values()) > 0


def test_the_command_prints_one_line_a_figure(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--seconds", "0.01"])
    assert "ours      steps/s" in capsys.readouterr().out
