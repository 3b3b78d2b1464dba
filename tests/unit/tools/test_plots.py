"""Plots: one readable file each, drawn from whatever a run has left."""

import numpy as np
import pytest
from matplotlib.image import imread

from seed_async.rundir import RunDir
from seed_async.timeline import Span
from seed_async.tools.plots import PLOTS, read_records, series, smooth, write_plots, zoom_start
from seed_async.topology import Topology


def test_a_whole_run_gives_every_plot(full_run: RunDir, topology: Topology) -> None:
    paths = write_plots(full_run, topology)
    assert [path.stem for path in paths] == list(PLOTS)
    for path in paths:
        image = imread(path)
        assert min(image.shape[:2]) > 200 and image[..., :3].std() > 0.01


def test_a_run_without_analysis_has_no_distillation_plot(full_run: RunDir, topology: Topology) -> None:
    grpo = topology.model_copy(update={"method": "grpo"})
    assert [path.stem for path in write_plots(full_run, grpo)] == [name for name in PLOTS if name != "distillation"]


def test_an_empty_run_directory_gives_no_plot(run_dir: RunDir, topology: Topology) -> None:
    assert write_plots(run_dir, topology) == []


@pytest.mark.parametrize("name", ["metrics", "evaluations", "counts"])
def test_any_one_file_may_be_missing(full_run: RunDir, topology: Topology, name: str) -> None:
    getattr(full_run, name).unlink()
    assert len(write_plots(full_run, topology)) >= 3


def test_every_axis_is_labelled(full_run: RunDir, topology: Topology) -> None:
    records = read_records(full_run, topology)
    for draw in PLOTS.values():
        figure = draw(records)
        assert figure is not None
        assert all(axes.get_title(loc="left") and axes.get_xlabel() for axes in figure.axes)


def test_smoothing_is_the_mean_of_the_last_values() -> None:
    values = np.array([1.0, 2.0, 6.0, 3.0, 4.0])
    assert smooth(values, 3) == pytest.approx([np.mean(values[max(0, end - 3) : end]) for end in range(1, 6)])
    assert smooth(np.array([])).size == 0


def test_a_series_leaves_out_what_is_missing_or_not_finite() -> None:
    metrics = [{"version": 1, "x": 2.0}, {"version": 2}, {"version": 3, "x": float("nan")}, {"version": 4, "x": None}]
    versions, values = series(metrics, "x")
    assert versions.tolist() == [1.0] and values.tolist() == [2.0]


def test_the_zoomed_window_has_a_training_step_in_its_middle() -> None:
    spans = [
        Span(role="learner", instance="0", kind=kind, start_s=start_s, end_s=start_s + 1, version=0)
        for kind, start_s in (("train", 100.0), ("act", 0.0), ("train", 130.0), ("train", 160.0))
    ]
    assert zoom_start(spans) == 120.0
