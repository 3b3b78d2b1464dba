"""A whole run over tcp with CURVE: it trains, strangers are kept out, and a wrong key is an error that says so."""

import os
import signal
import socket
import stat
from pathlib import Path

import pytest

from seed_async.keys import RunKeys
from seed_async.messages import RunState, RunStateRequest
from seed_async.rundir import RunDir
from seed_async.topology_file import load_topology
from seed_async.transport import Client, ClientCurve, HandshakeError, KeyPair, TransportTimeoutError
from tests.integration.runs import assert_counts_add_up, assert_gone, finish, launch, roles_of, wait_for_updates

pytestmark = pytest.mark.integration


def curve_keys(*more: str) -> list[str]:
    """Overrides for tcp with CURVE on ports that are free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return ["transport.kind=tcp", "transport.curve=true", f"transport.base_port={20_000 + port % 7_000}", *more]


def test_a_run_over_tcp_with_curve_trains_and_keeps_strangers_out(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path / "curve")
    process = launch(run_dir.root, *curve_keys())
    wait_for_updates(run_dir.root, 1)
    topology, roles = load_topology(run_dir.topology), roles_of(process)
    assert stat.S_IMODE(run_dir.keys.stat().st_mode) == 0o700
    secrets = list(run_dir.keys.glob("*.key"))
    assert {path.stem for path in secrets} == set(roles)
    assert {stat.S_IMODE(path.stat().st_mode) for path in secrets} == {0o600}
    endpoint, keys = run_dir.buffer_endpoint(topology), RunKeys.load(run_dir.keys, "evaluation-0")
    member = Client(endpoint, "member", curve=keys.client("buffer-0"))
    assert isinstance(member.call(RunStateRequest(), 10), RunState)
    member.close()
    stranger = Client(endpoint, "stranger", curve=ClientCurve(KeyPair.create(), keys.public["buffer-0"]))
    with pytest.raises(HandshakeError, match="key mismatch"):
        stranger.call(RunStateRequest(), 10)
    stranger.close()
    plain = Client(endpoint, "plain")
    with pytest.raises(TransportTimeoutError):
        plain.call(RunStateRequest(), 1)
    plain.close()
    output = finish(process)
    assert process.returncode == 0, output
    assert_gone(roles.values())
    assert_counts_add_up(run_dir.root)


def test_a_process_with_a_wrong_key_ends_the_run_with_the_reason(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path / "curve")
    process = launch(run_dir.root, *curve_keys("run.updates=1000", "supervision.max_restarts=1"))
    wait_for_updates(run_dir.root, 1)
    roles = roles_of(process)
    (run_dir.keys / "actor-0.key").unlink()
    KeyPair.create().save(run_dir.keys / "actor-0.key")
    os.kill(roles["actor-0"].pid, signal.SIGKILL)
    output = finish(process)
    assert process.returncode == 1 and "key mismatch" in output, output
    assert_gone(roles.values())
