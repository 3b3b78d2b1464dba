"""Metrics: one table, a private registry, and an endpoint that can be found and read."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from prometheus_client import generate_latest

from seed_async.metrics import FAMILIES, Metrics, Target, read_targets, scrape


def use_every_family(metrics: Metrics) -> None:
    for name, family in FAMILIES.items():
        labels = dict.fromkeys(family.labels, "x")
        if family.kind == "counter":
            metrics.counter(name, **labels).inc()
        elif family.kind == "gauge":
            metrics.gauge(name, **labels).set(1)
        else:
            metrics.histogram(name, **labels).observe(1)


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_every_declared_family_follows_the_naming_rules(name: str) -> None:
    family = FAMILIES[name]
    assert re.fullmatch(r"[a-z][a-z_]*", name)
    assert name.endswith("_total") == (family.kind == "counter")
    assert bool(family.buckets) == (family.kind == "histogram")
    assert family.help.endswith(".")
    assert not any(label.endswith("id") for label in family.labels)


def test_an_undeclared_name_or_another_kind_raises_key_error() -> None:
    metrics = Metrics("learner", "0")
    with pytest.raises(KeyError, match="surprise"):
        metrics.counter("surprise_total")
    with pytest.raises(KeyError, match="is a gauge, not a counter"):
        metrics.counter("policy_version")


def test_missing_or_unknown_labels_raise() -> None:
    metrics = Metrics("learner", "0")
    with pytest.raises(ValueError):
        metrics.counter("trajectories_total")
    with pytest.raises(ValueError):
        metrics.gauge("policy_version", actor="1")


def test_only_used_families_are_registered() -> None:
    metrics = Metrics("learner", "0")
    metrics.gauge("policy_version").set(3)
    metrics.gauge("policy_version").set(4)
    assert [family.name for family in metrics.registry.collect()] == ["seed_async_policy_version"]


def test_advance_follows_a_total_and_survives_its_restart() -> None:
    metrics = Metrics("policy", "0")
    for total in (5, 7, 7, 2):
        metrics.advance("rejected_frames_total", total, reason="schema")
    value = metrics.registry.get_sample_value("seed_async_rejected_frames_total", {"reason": "schema"})
    assert value == 9


def test_a_served_endpoint_is_announced_and_scraped_with_all_families(tmp_path: Path) -> None:
    metrics = Metrics("buffer", "0")
    use_every_family(metrics)
    port = metrics.serve(tmp_path / "targets")
    assert read_targets(tmp_path / "targets") == [Target(f"127.0.0.1:{port}", "buffer", "0")]
    assert json.loads((tmp_path / "targets" / "buffer-0.json").read_text()) == [
        {"targets": [f"127.0.0.1:{port}"], "labels": {"role": "buffer", "instance_name": "0"}}
    ]
    samples = scrape(f"127.0.0.1:{port}")
    assert samples["seed_async_policy_version"] == 1
    assert samples['seed_async_trajectories_total{status="x"}'] == 1
    assert samples['seed_async_trajectory_age_versions_bucket{le="8.0",stage="x"}'] == 1
    for name, family in FAMILIES.items():
        suffix = "_count" if family.kind == "histogram" else ""
        assert any(re.match(rf"seed_async_{name}{suffix}(\{{|$)", key) for key in samples), name
    assert not any("_created" in key for key in samples)


def test_a_new_incarnation_replaces_its_announcement(tmp_path: Path) -> None:
    Metrics("actor", "1").serve(tmp_path)
    port = Metrics("actor", "1").serve(tmp_path)
    assert read_targets(tmp_path) == [Target(f"127.0.0.1:{port}", "actor", "1")]
    assert [path.name for path in tmp_path.iterdir()] == ["actor-1.json"]


def test_two_roles_in_one_process_share_nothing(tmp_path: Path) -> None:
    first, second = Metrics("actor", "0"), Metrics("actor", "1")
    first.counter("environment_steps_total").inc(5)
    port = second.serve(tmp_path)
    assert scrape(f"127.0.0.1:{port}") == {}


def test_a_dead_endpoint_raises_os_error() -> None:
    with pytest.raises(OSError):
        scrape("127.0.0.1:1", timeout_s=0.5)


@pytest.mark.parametrize("name", ["", "a/b", "a b", "é"])
def test_a_name_that_is_no_file_name_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="is no name"):
        Metrics("actor", name)


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_promtool_accepts_every_family() -> None:
    metrics = Metrics("actor", "0")
    use_every_family(metrics)
    check = subprocess.run(["promtool", "check", "metrics"], input=generate_latest(metrics.registry), timeout=30)
    assert check.returncode == 0
