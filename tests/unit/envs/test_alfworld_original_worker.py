"""The worker of the original engine answers requests one by one and reports what its engine raises."""

import threading
from multiprocessing import Pipe
from typing import cast

import msgspec
import pytest

from seed_async.envs.alfworld.engine import Seen
from seed_async.envs.alfworld.original import OriginalEngine, missing_reason
from seed_async.envs.alfworld.original_worker import FailedReply, Reply, ResetRequest, SeenReply, StepRequest, serve
from seed_async.envs.registry import UnknownEnvironmentError, open_suite
from seed_async.topology import Env


class EchoEngine:
    """Stands in for the original: shows what it was asked, and fails on `crash`."""

    def reset(self, problem: str, task: str) -> Seen:
        """Show the task."""
        assert problem == "(define)"
        return Seen(task, ("look",), False, True)

    def step(self, command: str) -> Seen:
        """Show the command."""
        if command == "crash":
            raise KeyError("floorlamp")
        return Seen(command, (), command == "win", command != "odd")


def test_each_request_has_one_reply_and_a_failure_is_told() -> None:
    ours, theirs = Pipe()
    worker = threading.Thread(target=serve, args=(theirs, cast(OriginalEngine, EchoEngine())))
    worker.start()
    replies = []
    for request in (ResetRequest("(define)", "t"), StepRequest("win"), StepRequest("odd"), StepRequest("crash")):
        ours.send_bytes(msgspec.msgpack.encode(request))
        assert ours.poll(10)
        replies.append(msgspec.msgpack.decode(ours.recv_bytes(), type=Reply))
    ours.close()
    worker.join(10)
    assert not worker.is_alive()
    assert replies == [
        SeenReply("t", ("look",), False, True),
        SeenReply("win", (), True, True),
        SeenReply("odd", (), False, False),
        FailedReply("KeyError: 'floorlamp'"),
    ]


def test_a_missing_original_is_told_with_the_command_that_installs_it() -> None:
    if not missing_reason():
        pytest.skip("the original engine is installed here")
    with pytest.raises(UnknownEnvironmentError, match=r"textworld.*make alfworld.*pip install"):
        open_suite(Env(backend="textworld"))
