"""The summary of a run, whole or interrupted."""

import json
from io import StringIO

import pytest
from rich.console import Console

from seed_async.rundir import RunDir
from seed_async.stats import wilson_interval
from seed_async.timeline import Span
from seed_async.tools.summary import accounting_summary, overlap_summary, print_summary, write_summary
from seed_async.topology import Topology


def printed(summary: dict[str, object]) -> str:
    console = Console(file=StringIO(), width=120)
    print_summary(summary, console)
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()


def test_a_whole_run_is_summarised(full_run: RunDir, topology: Topology) -> None:
    summary = write_summary(full_run, topology, {"sft": 20.0, "rl": 270.0}, "finished")
    assert json.loads(full_run.summary.read_text()) == summary
    assert (summary["success_before"], summary["success_after"]) == (0.3, 0.7)
    assert summary["gain"] == pytest.approx(0.4)
    assert summary["success_after_interval"] == list(wilson_interval(84, 120))
    assert summary["games"] == 120 and summary["updates"] == 60 and summary["status"] == "finished"
    assert summary["trajectories"]["accepted"] == 1920 + 8 + 24 + 64 and summary["balance_ok"]
    assert summary["max_age"] == 1 and summary["age_bound_held"]
    assert summary["parse_rate"] == 0.95
    assert summary["seconds"] == {"sft": 20.0, "rl": 270.0, "total": 290.0}
    assert 0 < summary["sampler_gap_mean"] < 1e-3 < summary["sampler_gap_max"]
    assert summary["overlap_of"] == ["act", "analyse", "train"]
    assert 0 < summary["overlap_seconds"] <= summary["busy_seconds"]["train"]


def test_the_printed_table_names_the_result(full_run: RunDir, topology: Topology) -> None:
    text = printed(write_summary(full_run, topology, {"rl": 270.0}, "finished"))
    for part in ("30.0%", "70.0%", "+40.0%", "stale_group 24", "age 1: 1420  (bound 1)", "95.0%", "adds up", "yes"):
        assert part in text


def test_an_empty_run_directory_gives_nulls(run_dir: RunDir, topology: Topology) -> None:
    summary = write_summary(run_dir, topology, {}, "interrupted")
    keys = ("success_before", "success_after", "gain", "trajectories", "balance_ok", "max_age", "parse_rate")
    assert [summary[key] for key in (*keys, "sampler_gap_mean", "sampler_gap_max")] == [None] * 9
    assert summary["updates"] == 0 and summary["overlap_seconds"] == 0
    assert "interrupted" in printed(summary)


def test_a_run_that_ended_before_its_second_evaluation_has_no_success_after(
    full_run: RunDir, topology: Topology
) -> None:
    full_run.evaluations.write_text(full_run.evaluations.read_text().splitlines()[0] + "\n")
    summary = write_summary(full_run, topology, {}, "interrupted")
    assert summary["success_before"] == 0.3
    assert summary["success_after"] is None and summary["gain"] is None


def test_a_broken_bound_or_balance_is_said_loudly(full_run: RunDir, topology: Topology) -> None:
    counts = json.loads(full_run.counts.read_text()) | {"balance_ok": False, "ages": {"0": 1, "2": 3}}
    full_run.counts.write_text(json.dumps(counts))
    summary = write_summary(full_run, topology, {}, "finished")
    assert summary["max_age"] == 2 and not summary["age_bound_held"]
    text = printed(summary)
    assert "BROKEN" in text and "NO" in text


def test_a_run_that_trained_nothing_broke_no_bound() -> None:
    counts = {
        "accepted": 0,
        "trained": 0,
        "dropped": {},
        "buffered": 0,
        "leases": {},
        "ages": {},
        "balance_ok": True,
    }
    summary = accounting_summary(counts, bound=1)
    assert summary["max_age"] is None and summary["age_bound_held"] and summary["parse_rate"] is None


def test_overlap_is_of_all_activities_of_the_method() -> None:
    times = {"act": (0.0, 10.0), "analyse": (4.0, 12.0), "train": (2.0, 6.0)}
    spans = [
        Span(role="r", instance="0", kind=kind, start_s=start_s, end_s=end_s, version=0)
        for kind, (start_s, end_s) in times.items()
    ]
    assert overlap_summary(spans, uses_skills=True)["overlap_seconds"] == 2.0
    assert overlap_summary(spans, uses_skills=False)["overlap_seconds"] == 4.0
    assert overlap_summary(spans, uses_skills=False)["overlap_of"] == ["act", "train"]


def test_masked_tokens_and_the_bias_of_dropping_are_in_the_summary(full_run: RunDir, topology: Topology) -> None:
    """Runs of before have no such counts."""
    assert "slowest" not in printed(write_summary(full_run, topology, {}, "finished"))
    figures = {
        "masked": {"tokens": 70, "trajectories": 2, "batches": 0},
        "bias": {
            "length_ratio": 0.8125,
            "trained_token_share": 0.8,
            "slowest_decile_trained": 0.25,
            "longest_decile_trained": 0.375,
        },
    }
    full_run.counts.write_text(json.dumps(json.loads(full_run.counts.read_text()) | figures))
    summary = write_summary(full_run, topology, {}, "finished")
    assert summary["masked"] == figures["masked"] and summary["bias"] == figures["bias"]
    text = printed(summary)
    for part in ("70 tokens, 2 trajectories whole", "0.812", "25.0%; of the longest 37.5%"):
        assert part in text
