"""Two policy servers of a real run: one serves a chat over HTTP, the other is killed, and the episodes go on."""

import json
import re
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from seed_async.metrics import read_targets, scrape
from tests.integration.runs import (
    assert_counts_add_up,
    assert_gone,
    assert_went_on,
    finish,
    launch,
    roles_of,
    wait_for_updates,
)

WAIT_S = 60.0

pytestmark = pytest.mark.integration


def total(run_dir: Path, role: str, metric: str) -> float:
    """The sum of a metric over the processes of a role that answer."""
    value = 0.0
    for target in read_targets(run_dir / "targets"):
        if target.role == role:
            try:
                value += scrape(target.address).get(f"seed_async_{metric}", 0.0)
            except OSError:
                continue
    return value


def until(holds: Callable[[], bool], what: str) -> float:
    """Wait for something; the seconds it took."""
    started_s = time.monotonic()
    while not holds():
        assert time.monotonic() - started_s < WAIT_S, what
        time.sleep(0.02)
    return time.monotonic() - started_s


def chat(address: str, model: str) -> Any:
    """The answer to a chat."""
    body = {"model": model, "messages": [{"role": "user", "content": "open box 1"}], "max_tokens": 4}
    request = urllib.request.Request(
        f"{address}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=WAIT_S) as response:
        return json.loads(response.read())


def test_a_killed_policy_server_costs_its_episodes_seconds_while_the_other_one_serves(tmp_path: Path) -> None:
    run_dir = tmp_path / "boxes"
    process = launch(
        run_dir, "run.updates=8", "staleness.max=4", "roles.policy.replicas=2", "roles.policy.http={port: 0}"
    )
    wait_for_updates(run_dir, 1)
    log = (run_dir / "logs" / "policy-0.log").read_text()
    (port,) = re.findall(r'event="serving chats" .*port=(\d+)', log)
    answer = chat(f"http://127.0.0.1:{port}", "boxes")
    assert answer["usage"]["completion_tokens"] >= 1 and int(answer["system_fingerprint"].removeprefix("v")) >= 1

    roles = roles_of(process)
    until(lambda: total(run_dir, "policy", "generation_running") > 1, "nobody plays")
    steps = total(run_dir, "actor", "environment_steps_total")
    roles["policy-1"].kill()
    seconds = until(lambda: total(run_dir, "actor", "requests_moved_total") > 0, "no request was asked elsewhere")
    seconds += until(lambda: total(run_dir, "actor", "environment_steps_total") >= steps + 16, "the episodes stand")
    assert seconds < 10
    victim = (run_dir / "logs" / "policy-1.log").read_text()
    assert victim.count("serving chats") == 1, "its successor had no part in it"

    output = finish(process)
    assert process.returncode == 0, output
    assert_went_on(run_dir, 8)
    counts = assert_counts_add_up(run_dir)
    assert counts["leases"]["failed"] == 0, "no episode was lost"
    assert_gone(roles.values())
