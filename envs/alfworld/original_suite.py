"""The second backend (`env.backend: textworld`): the same suite, played by the original engine.

That engine is slow and must not meet threads, so each environment object has a worker process of its own, started at
the first reset, kept over the games, and ended with its object or with this process. Only msgpack crosses the socket.
"""

import subprocess
import sys
import weakref
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Final

import msgspec

from seed_async.envs.alfworld.engine import Seen
from seed_async.envs.alfworld.original_worker import FailedReply, Reply, Request, ResetRequest, StepRequest
from seed_async.envs.alfworld.suite import AlfworldEnvironment, AlfworldSuite
from seed_async.envs.alfworld.vocabulary import VocabularyName
from seed_async.envs.contract import GameFailedError

RESET_TIMEOUT_S: Final = 120.0
"""A reset takes about a second, the first also the worker's start of some seconds; a loaded machine takes longer."""
STEP_TIMEOUT_S: Final = 60.0
"""A step takes 20 to 70 ms."""

_WORKER: Final = "seed_async.envs.alfworld.original_worker"


def _end(process: "subprocess.Popen[bytes]", connection: "Connection[bytes, bytes]") -> None:
    connection.close()
    if process.stdin is not None:
        process.stdin.close()
    process.kill()
    process.wait()


class OriginalWorker:
    """The owner's side of a worker process."""

    def __init__(self, vocabulary: VocabularyName) -> None:
        """Start the process; it is ready when it answers its first request."""
        self._connection, theirs = Pipe()
        self._process = subprocess.Popen(
            [sys.executable, "-m", _WORKER, str(theirs.fileno()), vocabulary],
            stdin=subprocess.PIPE,  # its closing tells the worker that this process is gone
            stdout=subprocess.DEVNULL,  # the planner library prints
            pass_fds=[theirs.fileno()],
        )
        theirs.close()
        self._decoder = msgspec.msgpack.Decoder(Reply)
        self.close = weakref.finalize(self, _end, self._process, self._connection)

    @property
    def pid(self) -> int:
        """The process's id."""
        return self._process.pid

    def ask(self, request: Request, timeout_s: float) -> Seen:
        """Return the answer to a request. Raises GameFailedError after which the worker has ended."""
        try:
            self._connection.send_bytes(msgspec.msgpack.encode(request))
            if not self._connection.poll(timeout_s):
                raise GameFailedError(f"the original engine gave no answer within {timeout_s:g} s")
            reply = self._decoder.decode(self._connection.recv_bytes())
        except (EOFError, ConnectionError) as error:
            self.close()
            raise GameFailedError(
                f"the process of the original engine has died (exit status {self._process.returncode})"
            ) from error
        except GameFailedError:
            self.close()
            raise
        if isinstance(reply, FailedReply):
            self.close()
            raise GameFailedError(f"the original engine failed: {reply.reason}")
        return Seen(reply.text, reply.admissible, reply.won, reply.valid)


class OriginalEnvironment(AlfworldEnvironment):
    """One running game of a suite in the original engine."""

    def __init__(self, suite: AlfworldSuite, reset_timeout_s: float, step_timeout_s: float) -> None:
        """Play games of `suite`; no process is started yet."""
        super().__init__(suite)
        self._reset_timeout_s, self._step_timeout_s = reset_timeout_s, step_timeout_s
        self._worker: OriginalWorker | None = None

    @property
    def worker(self) -> OriginalWorker:
        """The worker, started when there is none."""
        if self._worker is None or not self._worker.close.alive:
            self._worker = OriginalWorker(self.suite.vocabulary)
        return self._worker

    def start(self, task: str) -> Seen:
        """Open `task` in the worker."""
        request = ResetRequest(self.suite.problem(task), self.suite.board(task).game.task)
        return self.worker.ask(request, self._reset_timeout_s)

    def play(self, command: str) -> Seen:
        """Play a command in the worker."""
        # What is no text (lone surrogates) is no command either.
        text = command.encode(errors="backslashreplace").decode()
        return self.worker.ask(StepRequest(text), self._step_timeout_s)


class OriginalSuite(AlfworldSuite):
    """An ALFWorld suite whose environments play in the original engine; games, expert and solutions are the same."""

    reset_timeout_s = RESET_TIMEOUT_S
    step_timeout_s = STEP_TIMEOUT_S

    def make(self) -> OriginalEnvironment:
        """Return a fresh environment object, which gets a process of its own at its first reset."""
        return OriginalEnvironment(self, self.reset_timeout_s, self.step_timeout_s)
