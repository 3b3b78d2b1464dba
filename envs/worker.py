"""The process of one environment: `python -m seed_async.envs.worker DESCRIPTOR`.

Consumes requests (open, then resets and steps) from the socket whose descriptor it is given. Waits for the next one.
Produces one reply for each. Unblocked by its owner, one `isolation.ProcessHost`. Stops when its owner closes the socket
or dies: the kernel kills it with the thread that started it, and where it cannot, the closing of standard input does.
"""

import contextlib
import ctypes
import os
import resource
import signal
import socket
import struct
import sys
import threading
from typing import BinaryIO, Final, Literal

import msgspec
import numpy as np
import setproctitle

from seed_async.envs.contract import (
    Environment,
    GameFailedError,
    GameFormatError,
    Observation,
    StepResult,
    TaskNotFoundError,
)
from seed_async.envs.registry import open_suite
from seed_async.topology import Env

MAX_FRAME_BYTES: Final = 32 << 20
"""A reply longer than this is garbage; an observation with images stays far below."""
FRAME_SIZE: Final = struct.Struct("<I")
_PR_SET_PDEATHSIG: Final = 1
_MAX_REASON_CHARACTERS: Final = 500

FailureKind = Literal["not_found", "format", "failed", "raised"]


class OpenRequest(msgspec.Struct, frozen=True, tag="open"):
    """Make an environment of the suite that `env` (JSON of the topology's section) names, within a memory limit."""

    number: int
    env: str


class ResetRequest(msgspec.Struct, frozen=True, tag="reset"):
    """Open a game."""

    number: int
    task: str


class StepRequest(msgspec.Struct, frozen=True, tag="step"):
    """Play a command in the open game."""

    number: int
    command: str


class OpenedReply(msgspec.Struct, frozen=True, tag="opened", forbid_unknown_fields=True):
    """The environment is there."""

    number: int


class ResetReply(msgspec.Struct, frozen=True, tag="reset", forbid_unknown_fields=True):
    """The first observation of a game."""

    number: int
    observation: Observation


class StepReply(msgspec.Struct, frozen=True, tag="step", forbid_unknown_fields=True):
    """The outcome of a command."""

    number: int
    result: StepResult


class FailedReply(msgspec.Struct, frozen=True, tag="failed", forbid_unknown_fields=True):
    """The environment raised; after `raised` (an exception that its contract does not name) it is not used again."""

    number: int
    kind: FailureKind
    reason: str


Request = OpenRequest | ResetRequest | StepRequest
Reply = OpenedReply | ResetReply | StepReply | FailedReply


def plain(value: object) -> object:
    """Encode numpy's numbers, which environments like to return, as plain ones. Raises TypeError for anything else."""
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"a {type(value).__name__} is no plain data")


def describe(error: BaseException) -> str:
    """Say what was raised, in a bounded length and in text that can be encoded."""
    text = f"{type(error).__name__}: {str(error)[:_MAX_REASON_CHARACTERS]}"
    return text.encode(errors="backslashreplace").decode()


def write_frame(pipe: BinaryIO, body: bytes) -> None:
    """Send one frame: its size, then its bytes."""
    pipe.write(FRAME_SIZE.pack(len(body)) + body)
    pipe.flush()


def read_frame(pipe: BinaryIO) -> bytes:
    """Return the next frame. Raises EOFError when the other end has closed."""
    size = pipe.read(FRAME_SIZE.size)
    body = pipe.read(FRAME_SIZE.unpack(size)[0]) if len(size) == FRAME_SIZE.size else b""
    if not body:
        raise EOFError
    return body


class _Served:
    """The environment, once it is open, and how each request is answered."""

    def __init__(self) -> None:
        self._environment: Environment | None = None

    def answer(self, request: Request) -> Reply:
        """Do what is asked. Raises what the environment raises."""
        if isinstance(request, OpenRequest):
            env = Env.model_validate_json(request.env)
            limit_memory(env.max_memory_mb << 20)
            self._environment = open_suite(env).make()
            return OpenedReply(request.number)
        if self._environment is None:
            raise RuntimeError("no environment is open")
        if isinstance(request, ResetRequest):
            return ResetReply(request.number, self._environment.reset(request.task))
        return StepReply(request.number, self._environment.step(request.command))


def _failure(error: BaseException) -> FailureKind:
    if isinstance(error, TaskNotFoundError):
        return "not_found"
    if isinstance(error, GameFailedError):
        return "failed"
    return "format" if isinstance(error, GameFormatError) else "raised"


def serve(requests: BinaryIO, replies: BinaryIO) -> None:
    """Answer requests until the other end closes."""
    decoder, encoder = msgspec.msgpack.Decoder(Request), msgspec.msgpack.Encoder(enc_hook=plain)
    served = _Served()
    while True:
        try:
            request = decoder.decode(read_frame(requests))
        except EOFError:  # the owner has closed its end
            return
        try:
            reply = encoder.encode(served.answer(request))
        except (Exception, SystemExit) as error:  # whatever a user's environment raises costs its episode only
            reply = encoder.encode(FailedReply(request.number, _failure(error), describe(error)))
        write_frame(replies, reply)


def limit_memory(num_bytes: int) -> None:
    """Let private memory grow to `num_bytes`, then allocations fail (Linux; elsewhere without effect)."""
    with contextlib.suppress(ValueError, OSError):  # a lower hard limit is already there
        resource.setrlimit(resource.RLIMIT_DATA, (num_bytes, num_bytes))


def _die_with_owner() -> None:
    if sys.platform == "linux":
        # SIGKILL ends a stopped process too, which could not see its standard input close.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)

    def watch() -> None:
        os.read(sys.stdin.fileno(), 1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True, name="owner-watch").start()


def main() -> None:
    """Run the process."""
    setproctitle.setproctitle("seed-async-environment")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it reaches the whole process group; the owner decides
    _die_with_owner()
    with (
        socket.socket(fileno=int(sys.argv[1])) as connection,
        connection.makefile("rb") as requests,
        connection.makefile("wb") as replies,
    ):
        serve(requests, replies)


if __name__ == "__main__":
    main()
