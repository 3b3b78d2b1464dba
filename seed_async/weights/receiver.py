"""The receiver's side of weight publication: transfer and verify on a thread that can be abandoned; its owner flips.

Consumes orders (control plane) and bytes (transport). Waits for nothing beyond the timeout of `poll`. Produces verified
versions, newest first, each at most once. Unblocked by the two threads. Stops with its owner.
"""

import queue
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import structlog
from structlog.typing import FilteringBoundLogger

from seed_async.messages import Refusal, WeightsManifest, WeightsPhase, WeightsPoll
from seed_async.weights.manifest import WeightsCorruptError, WeightsGoneError, verified_arrays
from seed_async.weights.seams import ControlLink, Deadlines, ReceiverRole, WeightSource

Update = tuple[WeightsManifest, dict[str, np.ndarray]]
RETRY_S = 0.2
"""Pause after a transfer that failed."""
THREAD_POLL_S = 0.01


@dataclass
class _Attempt:
    """One transfer with its verification, on its own thread; what it ends with lies in `outcome`."""

    manifest: WeightsManifest
    started_s: float
    verifying_since_s: float | None = None
    outcome: "queue.SimpleQueue[Mapping[str, np.ndarray] | Exception]" = field(default_factory=queue.SimpleQueue)

    def run(self, source: WeightSource, timeout_s: float) -> None:
        try:
            buffer = source.receive(self.manifest, timeout_s)
            self.verifying_since_s = time.monotonic()
            self.outcome.put(verified_arrays(self.manifest, buffer))
        except Exception as error:  # handed to the owner's thread, which raises what it does not know
            self.outcome.put(error)

    def overdue(self, deadlines: Deadlines) -> str:
        """The phase whose deadline has passed, or an empty string."""
        now_s = time.monotonic()
        if self.verifying_since_s is None:
            return "transfer" if now_s > self.started_s + deadlines.transfer_s else ""
        return "verify" if now_s > self.verifying_since_s + deadlines.verify_s else ""


class WeightReceiver:
    """One receiver, advanced by its owner's loop. A version is served only after its digest was verified here."""

    def __init__(
        self,
        link: ControlLink,
        source: WeightSource,
        name: str,
        role: ReceiverRole,
        deadlines: Deadlines | None = None,
        log: FilteringBoundLogger | None = None,
    ) -> None:
        """`name` is the process and its incarnation, `policy-0:4f2a`."""
        self._link, self._source, self._name, self._role = link, source, name, role
        self._deadlines = deadlines or Deadlines()
        self._log: FilteringBoundLogger = log or structlog.get_logger()
        self._version, self._digest, self._staged, self._refused = -1, "", -1, ""
        self._refusal: Refusal = ""
        self._newest: WeightsManifest | None = None
        self._phase: WeightsPhase = "idle"
        self._attempt: _Attempt | None = None
        self._retry_at_s = 0.0
        self.pinned = -1
        """The version in service; an analysis starts at it or at a newer one."""
        self.num_refused = 0
        """Versions whose bytes did not have the announced digest, or that their owner has refused."""
        self._report()

    def poll(self, timeout_s: float = 0.0) -> Update | None:
        """Return a verified version newer than the one held, or None. Call `acknowledge` once it is in use.

        A damaged version is refused, and the publisher told so; the one in use stays.
        """
        deadline_s = time.monotonic() + timeout_s
        while True:
            left_s = max(0.0, deadline_s - time.monotonic())
            self._take_orders(0.0 if self._attempt else left_s)
            if self._attempt is None and self._wanted():
                self._begin()
            update = self._result(min(left_s, THREAD_POLL_S)) if self._attempt else None
            if update is not None or time.monotonic() >= deadline_s:
                return update

    def acknowledge(self, manifest: WeightsManifest) -> None:
        """Say that `manifest` is now the version in use."""
        self._version, self._digest = manifest.version, manifest.digest
        self._phase = "idle"
        self._report()

    def refuse(self, manifest: WeightsManifest) -> None:
        """Say that `manifest` gave another canary once it was loaded: what was in use before still is."""
        self.num_refused += 1
        self._refused, self._refusal, self._staged = manifest.key, "canary", self._version
        self._phase = "idle"
        self._report()

    def close(self) -> None:
        """Leave the control plane and the transport."""
        self._link.close()
        self._source.close()

    def _report(self) -> None:
        self._link.report(
            WeightsPoll(
                receiver=self._name,
                role=self._role,
                version=self._version,
                digest=self._digest,
                refused=self._refused,
                refusal=self._refusal,
                staged=self._staged,
                seen=self._newest.key if self._newest else "",
                pinned=self.pinned,
                phase=self._phase,
            )
        )

    def _take_orders(self, timeout_s: float) -> None:
        orders = self._link.orders(timeout_s)
        if orders is None:
            return
        self.pinned = max(self.pinned, orders.pinned)
        if orders.manifest is not None and orders.manifest != self._newest:
            self._newest, self._retry_at_s = orders.manifest, 0.0
        self._report()

    def _wanted(self) -> bool:
        newest = self._newest
        return (
            newest is not None
            and newest.version > max(self._version, self._staged)
            and newest.key != self._refused
            and time.monotonic() >= self._retry_at_s
        )

    def _begin(self) -> None:
        assert self._newest is not None
        self._attempt = attempt = _Attempt(self._newest, time.monotonic())
        # A daemon: a transfer that never returns must not keep the process.
        threading.Thread(
            target=attempt.run, args=(self._source, self._deadlines.transfer_s), daemon=True, name="weights-transfer"
        ).start()
        self._enter("transfer")

    def _enter(self, phase: WeightsPhase) -> None:
        if self._phase != phase:
            self._phase = phase
            self._report()

    def _result(self, wait_s: float) -> Update | None:
        attempt = self._attempt
        assert attempt is not None
        try:
            outcome = attempt.outcome.get(timeout=wait_s) if wait_s else attempt.outcome.get_nowait()
        except queue.Empty:
            if attempt.verifying_since_s is not None:
                self._enter("verify")
            overdue = attempt.overdue(self._deadlines)
            if overdue:
                self._failed(attempt.manifest, f"its {overdue} was not over by the deadline: abandoned")
            return None
        if isinstance(outcome, Exception):
            self._not_received(attempt.manifest, outcome)
            return None
        self._attempt, self._staged, self._phase = None, attempt.manifest.version, "resume"
        self._report()
        return attempt.manifest, dict(outcome)

    def _not_received(self, manifest: WeightsManifest, error: Exception) -> None:
        if isinstance(error, WeightsCorruptError):
            self.num_refused += 1
            self._refused, self._refusal = manifest.key, "digest"
        elif not isinstance(error, WeightsGoneError | TimeoutError | ConnectionError):
            raise error
        self._failed(manifest, str(error))

    def _failed(self, manifest: WeightsManifest, why: str) -> None:
        self._attempt, self._phase = None, "idle"
        self._retry_at_s = time.monotonic() + RETRY_S
        self._log.warning("weights not received", version=manifest.version, why=why)
        self._report()
