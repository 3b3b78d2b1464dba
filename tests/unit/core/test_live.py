"""The live view: only what the endpoints say, right over restarts, and one plain line where there is no terminal."""

import re
import time
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from seed_async import live
from seed_async.live import (
    History,
    LiveView,
    Progress,
    Scraper,
    Shown,
    by_label,
    plain_line,
    progress_of,
    read_fleet,
    render,
)
from seed_async.metrics import FAMILIES, Metrics, Target, scrape
from seed_async.rundir import RunDir
from seed_async.topology_file import parse_topology

TOPOLOGY = parse_topology("model: {path: /m}\nrun: {updates: 60}\n", "t")
GRPO = parse_topology("model: {path: /m}\nmethod: grpo\n", "t")
ACTORS = [Target(f"127.0.0.1:{port}", "actor", str(port)) for port in (1, 2)]
WON, LOST = 'seed_async_episodes_total{outcome="won"}', 'seed_async_episodes_total{outcome="lost"}'


def fleet_of_real_endpoints(run_dir: RunDir) -> None:
    learner, buffer, policy = Metrics("learner", "0"), Metrics("buffer", "0"), Metrics("policy", "0")
    learner.counter("updates_total").inc(7)
    learner.gauge("policy_version").set(7)
    learner.gauge("sampler_gap_mean").set(1e-4)
    learner.gauge("trajectory_age_oldest_versions").set(1)
    buffer.counter("trajectories_total", status="trained").inc(224)
    buffer.counter("trajectories_dropped_total", reason="stale").inc(3)
    buffer.gauge("trajectories_buffered").set(11)
    for age in (0, 1, 1, 1):
        buffer.histogram("trajectory_age_versions", stage="total").observe(age)
    buffer.gauge("analysis_parse_ratio").set(0.97)
    policy.gauge("policy_version").set(6)
    for metrics in (learner, buffer, policy):
        metrics.serve(run_dir.targets)


def test_what_is_shown_is_what_the_endpoints_say(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    fleet_of_real_endpoints(run_dir)
    fleet, history = read_fleet(run_dir), History()
    history.add(0.0, fleet)
    progress = progress_of(fleet, history)
    assert (progress.updates, progress.trained, progress.buffered) == (7, 224, 11)
    assert progress.age_mean == 0.75 and progress.age_max == 1
    assert progress.dropped == {"stale": 3} and progress.parse_ratio == 0.97
    assert progress.versions == {"learner-0": 7, "policy-0": 6}
    line = plain_line(Shown(progress, TOPOLOGY, 75.0, {"actor-1": 2}))
    for part in (
        "1:15 update 7/60",
        "mean 0.75, last batch max 1 of 1",
        "stale 3",
        "learner-0 7, policy-0 6",
        "restarts actor-1 2",
    ):
        assert part in line


def test_a_dead_endpoint_is_left_out(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    fleet_of_real_endpoints(run_dir)
    text = (run_dir.targets / "policy-0.json").read_text()
    port = int(text.split("127.0.0.1:")[1].split('"')[0])
    (run_dir.targets / "policy-0.json").write_text(text.replace(str(port), "1"))
    assert [target.role for target in read_fleet(run_dir)] == ["buffer", "learner"]


def test_success_is_over_recent_episodes_of_all_actors() -> None:
    history = History()
    history.add(0.0, {ACTORS[0]: {WON: 100.0, LOST: 0.0}, ACTORS[1]: {WON: 0.0, LOST: 0.0}})
    fleet = {ACTORS[0]: {WON: 101.0, LOST: 1.0}, ACTORS[1]: {WON: 2.0, LOST: 0.0}}
    history.add(10.0, fleet)
    assert progress_of(fleet, history).training_success == 0.75


def test_a_counter_that_begins_anew_after_a_restart_still_grows() -> None:
    history = History()
    for now_s, value in ((0.0, 50.0), (10.0, 60.0), (20.0, 5.0)):
        history.add(now_s, {ACTORS[0]: {WON: value}})
    assert history.total("episodes_total", outcome="won") == 65
    assert history.rate("episodes_total", outcome="won") == 0.75


def test_there_is_no_rate_before_two_scrapes() -> None:
    history = History()
    assert history.rate("updates_total") is None
    history.add(0.0, {})
    assert history.rate("updates_total") is None


def test_every_name_that_the_view_reads_is_declared() -> None:
    names = re.findall(r'"([a-z]+(?:_[a-z]+)+)"', Path(live.__file__).read_text())
    read = {name.removesuffix("_sum").removesuffix("_count") for name in names} - {"training_success"}
    assert len(read) > 10 and read <= set(FAMILIES)


def test_labels_are_read_from_a_real_scrape(tmp_path: Path) -> None:
    metrics = Metrics("buffer", "0")
    metrics.counter("trajectories_dropped_total", reason="stale").inc(2)
    metrics.counter("trajectories_dropped_total", reason="failed_group").inc(8)
    port = metrics.serve(tmp_path)
    assert by_label(scrape(f"127.0.0.1:{port}"), "trajectories_dropped_total") == {"stale": 2, "failed_group": 8}


@pytest.mark.parametrize("topology", [TOPOLOGY, GRPO])
def test_nothing_known_yet_can_be_shown(topology: object) -> None:
    shown = Shown(Progress(), topology, 0.0, {})  # type: ignore[arg-type]
    console = Console(file=StringIO(), width=100)
    console.print(render(shown))
    assert "training success" in console.file.getvalue()  # type: ignore[attr-defined]
    assert ("analyses parsed" in plain_line(shown)) == (topology is TOPOLOGY)


def test_the_scraper_follows_a_run_on_its_own_thread(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    scraper = Scraper(run_dir)
    fleet_of_real_endpoints(run_dir)
    deadline_s = time.monotonic() + 20
    while scraper.progress.updates != 7 and time.monotonic() < deadline_s:
        time.sleep(0.05)
    scraper.close()
    assert scraper.progress.updates == 7


def test_without_a_terminal_a_line_comes_now_and_then(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with LiveView(RunDir(tmp_path), TOPOLOGY, {}, plain_interval_s=0.0) as view:
        view.refresh()
    assert capsys.readouterr().out.startswith("0:00 update 0/60; training success -")
