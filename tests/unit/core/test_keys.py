"""The keys of a run: one pair a process, private, and no way in without one."""

import stat
from pathlib import Path

import pytest

from seed_async.keys import RunKeys, create_keys
from seed_async.messages import Ack, RunStateRequest
from seed_async.topology import Transport
from seed_async.transport import Client, KeyFileError, Server


def test_each_process_has_a_private_key_and_knows_the_public_ones(tmp_path: Path) -> None:
    create_keys(tmp_path / "keys", ["buffer-0", "actor-0"])
    assert stat.S_IMODE((tmp_path / "keys").stat().st_mode) == 0o700
    assert stat.S_IMODE((tmp_path / "keys" / "actor-0.key").stat().st_mode) == 0o600
    buffer, actor = RunKeys.load(tmp_path / "keys", "buffer-0"), RunKeys.load(tmp_path / "keys", "actor-0")
    assert buffer.public == actor.public == {"buffer-0": buffer.own.public, "actor-0": actor.own.public}
    server = Server("tcp://127.0.0.1:0", curve=buffer.server())
    client = Client(server.endpoint, "actor-0", curve=actor.client("buffer-0"))
    client.submit(RunStateRequest())
    replies: list[object] = []
    for _ in range(200):
        for request in server.poll(0.02):
            request.reply(Ack())
        replies += client.poll(0.02)
        if replies:
            break
    assert [reply for _, reply in replies] == [Ack()]  # type: ignore[misc]  # pairs of (sequence, reply)
    client.close()
    server.close()


def test_a_new_launch_makes_new_keys(tmp_path: Path) -> None:
    create_keys(tmp_path / "keys", ["buffer-0"])
    before = RunKeys.load(tmp_path / "keys", "buffer-0")
    create_keys(tmp_path / "keys", ["buffer-0"])
    assert RunKeys.load(tmp_path / "keys", "buffer-0") != before


def test_a_missing_or_damaged_key_is_named(tmp_path: Path) -> None:
    create_keys(tmp_path / "keys", ["buffer-0"])
    with pytest.raises(KeyFileError, match=r"actor-9\.key: No such file"):
        RunKeys.load(tmp_path / "keys", "actor-9")
    with pytest.raises(KeyFileError, match="no key of policy-3"):
        RunKeys.load(tmp_path / "keys", "buffer-0").client("policy-3")
    (tmp_path / "keys" / "public.json").write_text("{")
    with pytest.raises(KeyFileError, match=r"public\.json"):
        RunKeys.load(tmp_path / "keys", "buffer-0")


def test_curve_without_tcp_is_refused() -> None:
    with pytest.raises(ValueError, match=r"transport\.curve protects tcp; transport\.kind is ipc"):
        Transport(curve=True)
    assert Transport(kind="tcp", curve=True).curve
