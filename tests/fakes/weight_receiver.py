"""A weight receiver as a process of its own, which dies, stops or receives damage when a chosen version is sent to it.

python -m tests.fakes.weight_receiver FOLDER NAME CONTROL [FAULT VERSION], FAULT one of kill, stop, flip, cut
"""

import os
import signal
import sys
from pathlib import Path
from typing import Any

import structlog

from seed_async.messages import WeightsManifest
from seed_async.tools.bench_weights import INTERFACE, open_link, serve
from seed_async.weights import Deadlines, WeightReceiver
from seed_async.weights.broadcast import BroadcastSource, Route
from seed_async.weights.manifest import ByteBuffer

DEADLINES = Deadlines(transfer_s=6.0, verify_s=6.0, acknowledge_s=6.0)


class FaultySource(BroadcastSource):
    """A gloo receiver with one fault at one version, in the middle of its transfer."""

    def __init__(self, name: str, fault: str, version: int) -> None:
        """`version` -1: none."""
        super().__init__("gloo", INTERFACE, name)
        self._fault, self._fault_version = fault, version

    def receive(self, manifest: WeightsManifest, timeout_s: float) -> ByteBuffer:
        """Receive, with damage on the way."""
        buffer = super().receive(manifest, timeout_s)
        if manifest.version != self._fault_version or manifest.attempt > 0:
            return buffer
        damaged = bytearray(buffer)
        damaged[3] ^= 1
        return {"flip": damaged, "cut": damaged[:-1]}.get(self._fault, damaged)

    def _ask(self, store: Any, manifest: WeightsManifest, group: str, timeout_s: float) -> Route:
        """Here the publisher counts on this process: it is in the group of the broadcast."""
        route = super()._ask(store, manifest, group, timeout_s)
        if manifest.version == self._fault_version and self._fault in ("kill", "stop"):
            os.kill(os.getpid(), signal.SIGKILL if self._fault == "kill" else signal.SIGSTOP)
        return route


def main() -> None:
    """Serve until SIGTERM."""
    folder, name, control, *fault = sys.argv[1:]
    log = structlog.get_logger()
    source = FaultySource(name, *(fault[:1] or ["none"]), int(fault[1]) if fault else -1)
    link = open_link(control, Path(folder), name, log)
    serve(WeightReceiver(link, source, name, "policy", DEADLINES, log), name)


if __name__ == "__main__":
    main()
