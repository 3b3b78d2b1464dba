"""Plays environments for an event loop, so that one that fails costs its episode and nothing else.

`LocalHost` plays in this process, for engines that neither block nor crash. `ProcessHost` gives the environment a
spawned process of its own with deadlines: a hang, a crash, an exception or garbage on the pipe ends the episode with
`EnvironmentFailedError`, the process is killed, and the next reset starts another. Only msgpack crosses the pipe.
"""

import asyncio
import contextlib
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any, Final, Literal, NoReturn, Protocol, TypeVar

import msgspec
import psutil

from seed_async.envs.contract import (
    Environment,
    GameFailedError,
    GameFormatError,
    Observation,
    StepResult,
    Suite,
    TaskNotFoundError,
)
from seed_async.envs.worker import (
    FRAME_SIZE,
    MAX_FRAME_BYTES,
    FailedReply,
    OpenedReply,
    OpenRequest,
    Reply,
    Request,
    ResetReply,
    ResetRequest,
    StepReply,
    StepRequest,
    describe,
    plain,
)
from seed_async.topology import Env

REAP_TIMEOUT_S: Final = 1.0
"""A killed process is gone in milliseconds; one in an uninterruptible sleep is not waited for."""
EXIT_TIMEOUT_S: Final = 0.5
"""How long a process whose end of the pipe has closed may take to exit by itself, which tells why."""

Isolation = Literal["none", "process"]
Failure = Literal["timeout", "died", "raised", "garbage"]
Result = TypeVar("Result")
Answer = TypeVar("Answer", bound=Reply)


class EnvironmentFailedError(GameFailedError):
    """An environment that broke its contract; `kind` is a slug to count by. It was thrown away."""

    def __init__(self, kind: Failure, detail: str) -> None:
        """Keep the slug apart from the readable detail."""
        super().__init__(f"environment {kind}: {detail}")
        self.kind: Failure = kind


class Host(Protocol):
    """One environment object played from an event loop, one call at a time."""

    async def reset(self, task: str) -> Observation:
        """Open a game. Raises TaskNotFoundError, GameFormatError and, after a failure, EnvironmentFailedError."""
        ...

    async def step(self, command: str) -> StepResult:
        """Play a command. Raises GameFailedError, above all EnvironmentFailedError."""
        ...

    def close(self) -> None:
        """Let the environment go; a later reset makes another."""
        ...


def isolation_of(suite: Suite, env: Env) -> Isolation:
    """Return how environments are kept apart: as the topology says, or else as the suite declares (`may_block`)."""
    if env.isolation is not None:
        return env.isolation
    return "process" if getattr(suite, "may_block", False) else "none"


def open_host(suite: Suite, env: Env) -> Host:
    """Return a host for one environment of `suite`, which `env` has opened; nothing is made or started yet."""
    return ProcessHost(env) if isolation_of(suite, env) == "process" else LocalHost(suite.make)


class LocalHost:
    """An environment in this process. It must not block: the whole event loop would wait."""

    def __init__(self, make: Callable[[], Environment]) -> None:
        """The environment is made at the first reset, and again after a failure."""
        self._make = make
        self._environment: Environment | None = None

    async def reset(self, task: str) -> Observation:
        """Open a game."""
        return self._call("reset", task, Observation)

    async def step(self, command: str) -> StepResult:
        """Play a command."""
        return self._call("step", command, StepResult)

    def close(self) -> None:
        """Let the environment go."""
        self._environment = None

    def _call(self, method: Literal["reset", "step"], argument: str, kind: type[Result]) -> Result:
        try:
            if self._environment is None:
                self._environment = self._make()
            returned = getattr(self._environment, method)(argument)
            # There and back, as over a pipe: what is not of the declared types fails here and not in the buffer.
            return msgspec.msgpack.decode(msgspec.msgpack.encode(returned, enc_hook=plain), type=kind)
        except (TaskNotFoundError, GameFormatError):
            raise
        except (Exception, SystemExit) as error:  # whatever a user's environment raises costs its episode only
            self._environment = None
            raise EnvironmentFailedError("raised", f"in {method}: {describe(error)}") from error


class Worker:
    """The owner's side of one environment process."""

    def __init__(
        self, process: "subprocess.Popen[bytes]", reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Use `start`."""
        self._process, self._reader, self._writer = process, reader, writer
        self._decoder = msgspec.msgpack.Decoder(Reply)
        self._encoder = msgspec.msgpack.Encoder()

    @property
    def pid(self) -> int:
        """The process's id."""
        return self._process.pid

    @staticmethod
    async def start() -> "Worker":
        """Spawn a process, never a fork: this one holds sockets and threads. Raises EnvironmentFailedError."""
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                process = subprocess.Popen(
                    [sys.executable, "-m", "seed_async.envs.worker", str(theirs.fileno())],
                    stdin=subprocess.PIPE,  # its closing tells the process that this one is gone
                    stdout=2,  # an environment that prints, prints into the log
                    pass_fds=[theirs.fileno()],
                )
            except OSError as error:
                ours.close()
                raise EnvironmentFailedError("died", f"no process could be started: {error}") from error
        reader, writer = await asyncio.open_unix_connection(sock=ours)
        return Worker(process, reader, writer)

    async def ask(self, request: Request, timeout_s: float) -> Reply:
        """Return the answer to a request. After any failure, cancellation included, the process is killed."""
        name = type(request).__name__.removesuffix("Request").lower()
        try:
            async with asyncio.timeout(timeout_s):
                return await self._exchange(request)
        except TimeoutError as error:
            self.kill()
            raise EnvironmentFailedError("timeout", f"no answer to {name} within {timeout_s:.3g} s") from error
        except (EOFError, ConnectionError) as error:
            raise EnvironmentFailedError("died", f"in {name}: {self._exit()}") from error
        except msgspec.DecodeError as error:
            self.kill()
            raise EnvironmentFailedError("garbage", f"in the answer to {name}: {describe(error)}") from error
        except BaseException:
            self.kill()
            raise

    async def _exchange(self, request: Request) -> Reply:
        body = self._encoder.encode(request)
        self._writer.write(FRAME_SIZE.pack(len(body)) + body)
        await self._writer.drain()
        (size,) = FRAME_SIZE.unpack(await self._reader.readexactly(FRAME_SIZE.size))
        if size > MAX_FRAME_BYTES:
            raise msgspec.DecodeError(f"a frame of {size} bytes; the limit is {MAX_FRAME_BYTES}")
        reply = self._decoder.decode(await self._reader.readexactly(size))
        if reply.number != request.number:
            raise msgspec.DecodeError(f"an answer to request {reply.number} instead of {request.number}")
        return reply

    def kill(self) -> None:
        """End the process and whatever it has started, at once."""
        children: list[psutil.Process] = []
        with contextlib.suppress(psutil.Error):  # asked first: once the process is gone, nobody knows them
            children = psutil.Process(self._process.pid).children(recursive=True)
        self._process.kill()
        for child in children:
            with contextlib.suppress(psutil.Error):
                child.kill()
        self._writer.transport.abort()
        if self._process.stdin is not None:
            self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(REAP_TIMEOUT_S)

    def _exit(self) -> str:
        """Say how a process ended that has closed its pipe; it is gone afterwards."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(EXIT_TIMEOUT_S)
        status = self._process.returncode
        self.kill()
        if status is None:
            return "the process closed its pipe"
        if status >= 0:
            return f"the process ended with exit code {status}"
        return f"the process ended with signal {signal.Signals(-status).name}"


class ProcessHost:
    """An environment in a process of its own, started at the first reset and again after a failure."""

    def __init__(self, env: Env) -> None:
        """Nothing is started yet; `env` holds the deadlines, and the process opens the suite from it."""
        self._env = env
        self._worker: Worker | None = None
        self._number = 0
        self._spent_s = 0.0

    @property
    def pid(self) -> int | None:
        """The id of the environment's process, None without one."""
        return self._worker.pid if self._worker else None

    async def reset(self, task: str) -> Observation:
        """Open a game. The deadline of the episode counts from here, without the process's start."""
        if self._worker is None:
            self._worker = await Worker.start()
            request = OpenRequest(self._next(), self._env.model_dump_json())
            await self._ask(request, self._env.start_timeout_s, OpenedReply)
        self._spent_s = 0.0
        return (await self._timed(ResetRequest(self._next(), _text(task)), ResetReply)).observation

    async def step(self, command: str) -> StepResult:
        """Play a command."""
        return (await self._timed(StepRequest(self._next(), _text(command)), StepReply)).result

    def close(self) -> None:
        """Kill the process."""
        if self._worker is not None:
            self._worker.kill()
        self._worker = None

    def _next(self) -> int:
        self._number += 1
        return self._number

    async def _timed(self, request: ResetRequest | StepRequest, expected: type[Answer]) -> Answer:
        """Ask within both deadlines. Only time spent in the environment counts, not that of the policy."""
        left_s = self._env.episode_timeout_s - self._spent_s
        started_s = time.monotonic()
        answer = await self._ask(request, max(0.0, min(self._env.step_timeout_s, left_s)), expected)
        self._spent_s += time.monotonic() - started_s
        return answer

    async def _ask(self, request: Request, timeout_s: float, expected: type[Answer]) -> Answer:
        if self._worker is None:
            raise EnvironmentFailedError("died", "a step without a reset after a failure")
        worker, self._worker = self._worker, None  # until it has answered as it should
        reply = await worker.ask(request, timeout_s)
        if isinstance(reply, expected):
            self._worker = worker
            return reply
        if isinstance(reply, FailedReply) and reply.kind != "raised":
            self._worker = worker
            _raise_named(reply)
        worker.kill()
        if isinstance(reply, FailedReply):
            raise EnvironmentFailedError("raised", reply.reason)
        raise EnvironmentFailedError("garbage", f"{type(reply).__name__} instead of {expected.__name__}")


def _raise_named(reply: FailedReply) -> NoReturn:
    """Raise again, in this process, what the contract lets an environment raise."""
    errors: dict[str, type[Exception]] = {
        "not_found": TaskNotFoundError,
        "format": GameFormatError,
        "failed": GameFailedError,
    }
    raise errors[reply.kind](reply.reason.partition(": ")[2])


def _text(value: Any) -> str:
    """Return text that can be encoded: what is none (lone surrogates) is no command either."""
    return str(value).encode(errors="backslashreplace").decode()
