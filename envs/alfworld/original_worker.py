"""The process of one original engine: `python -m seed_async.envs.alfworld.original_worker DESCRIPTOR VOCABULARY`.

Consumes requests (reset or step) from the socket whose descriptor it is given. Waits for the next one. Produces one
reply for each. Unblocked by its owner, one environment object. Stops when its owner closes the socket or dies: the
owner holds the only writing end of this process's standard input, and a thread ends the process when that closes.
"""

import os
import signal
import sys
import threading
from multiprocessing.connection import Connection

import msgspec

from seed_async.envs.alfworld.engine import Seen
from seed_async.envs.alfworld.original import OriginalEngine
from seed_async.envs.alfworld.vocabulary import vocabulary_name


class ResetRequest(msgspec.Struct, frozen=True, tag="reset"):
    """Open the game of a problem text; `task` is its sentence without the full stop."""

    problem: str
    task: str


class StepRequest(msgspec.Struct, frozen=True, tag="step"):
    """Play a command in the open game."""

    command: str


class SeenReply(msgspec.Struct, frozen=True, tag="seen"):
    """What the player is shown."""

    text: str
    admissible: tuple[str, ...]
    won: bool
    valid: bool


class FailedReply(msgspec.Struct, frozen=True, tag="failed"):
    """The original raised; it is not to be trusted with another game."""

    reason: str


Request = ResetRequest | StepRequest
Reply = SeenReply | FailedReply


def _die_with_owner() -> None:
    def watch() -> None:
        os.read(sys.stdin.fileno(), 1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True, name="owner-watch").start()


def serve(connection: "Connection[bytes, bytes]", engine: OriginalEngine) -> None:
    """Answer requests until the other end closes."""
    decoder = msgspec.msgpack.Decoder(Request)
    while True:
        try:
            request = decoder.decode(connection.recv_bytes())
        except EOFError:  # the owner has closed its end
            return
        reply: Reply
        try:
            seen: Seen = (
                engine.reset(request.problem, request.task)
                if isinstance(request, ResetRequest)
                else engine.step(request.command)
            )
            reply = SeenReply(*seen)
        except Exception as error:  # the original raises KeyError, AssertionError, TatSu's own and more on a bad game
            reply = FailedReply(f"{type(error).__name__}: {str(error)[:500]}")
        connection.send_bytes(msgspec.msgpack.encode(reply))


def main() -> None:
    """Run the process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it reaches the whole process group; the owner decides
    _die_with_owner()
    descriptor, vocabulary = sys.argv[1:]
    serve(Connection(int(descriptor)), OriginalEngine(vocabulary_name(vocabulary)))


if __name__ == "__main__":
    main()
