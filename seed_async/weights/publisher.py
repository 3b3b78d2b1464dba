"""The publisher's side of weight publication: stage, announce, then wait phase by phase with names and deadlines."""

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import IntEnum

import msgspec
import numpy as np
import structlog
from structlog.typing import FilteringBoundLogger

from seed_async.messages import Canary, WeightsManifest, WeightsPoll
from seed_async.weights.board import FORGET_AFTER_S
from seed_async.weights.seams import ControlPlane, Deadlines, ReceiverRole, WeightTransport

STOP_INTERVAL_S = 0.1
SAY_AFTER_S = 2.0
"""A phase that lasts longer than this is logged with the names of those that are waited for ..."""
SAY_AGAIN_S = 10.0
"""... and again this often."""


CANARY_ATTEMPTS = 3
"""A version whose canary a receiver has refused so often is not staged again for it: loading it again is no help."""


class WeightsRefusedError(RuntimeError):
    """Every receiver found another canary than the learner: nobody can serve the version."""


class Progress(IntEnum):
    """How far a receiver is with a version; each phase of a publication waits for the next step."""

    NOTHING = 0
    TRANSFERRED = 1
    VERIFIED = 2
    IN_USE = 3


PHASES = (("transfer", Progress.TRANSFERRED), ("verify", Progress.VERIFIED), ("acknowledge", Progress.IN_USE))


def progress_of(report: WeightsPoll, manifest: WeightsManifest) -> Progress:
    """How far the sender of `report` is with `manifest`; other bytes under the same number count for nothing."""
    if report.version == manifest.version:
        return Progress.IN_USE if report.digest == manifest.digest else Progress.NOTHING
    if report.seen != manifest.key:
        return Progress.NOTHING
    if report.staged == manifest.version:
        return Progress.VERIFIED
    return Progress.TRANSFERRED if report.phase == "verify" else Progress.NOTHING


def refused_for_good(report: WeightsPoll, manifest: WeightsManifest) -> bool:
    """Whether the sender of `report` has refused the canary of `manifest` in its last attempt."""
    last = manifest.attempt + 1 >= CANARY_ATTEMPTS
    return last and report.refusal == "canary" and report.refused == manifest.key


def process_of(receiver: str) -> str:
    """The process of a receiver's name, without its incarnation."""
    return receiver.partition(":")[0]


@dataclass(frozen=True)
class _Wait:
    """What one call of `wait_acknowledged` waits for."""

    version: int
    role: ReceiverRole
    replicas: int
    end_s: float
    stop: threading.Event | None
    on_wait: Callable[[], None]

    def stopped(self) -> bool:
        return self.stop is not None and self.stop.is_set()


class WeightPublisher:
    """`publish` and `wait_acknowledged` for the training loop. For one thread."""

    def __init__(
        self,
        control: ControlPlane,
        transport: WeightTransport,
        deadlines: Deadlines | None = None,
        log: FilteringBoundLogger | None = None,
    ) -> None:
        """Nothing is published yet; receivers may come already."""
        self._control, self._transport = control, transport
        self._deadlines = deadlines or Deadlines()
        self._log: FilteringBoundLogger = log or structlog.get_logger()
        self._newest: WeightsManifest | None = None
        self._tensors: Mapping[str, np.ndarray] = {}
        self._canary: Canary | None = None
        self._receivers: dict[str, WeightsPoll] = {}
        self._given_up: dict[ReceiverRole, set[str]] = {"policy": set(), "analyzer": set()}
        self.num_refused = 0
        """Times that a receiver found the announced bytes damaged, or another canary after loading them."""

    def publish(self, version: int, tensors: Mapping[str, np.ndarray], canary: Canary | None = None) -> WeightsManifest:
        """Stage a version and make it the newest; returns at once. `canary`: see `WeightsManifest`.

        `tensors` must not change while `wait_acknowledged` runs: a receiver that got damaged bytes has them staged
        again from there.
        """
        self._tensors, self._canary = tensors, canary
        return self._stage(version, 0)

    def wait_acknowledged(
        self,
        version: int,
        role: ReceiverRole,
        replicas: int,
        timeout_s: float,
        stop: threading.Event | None = None,
        on_wait: Callable[[], None] = lambda: None,
    ) -> tuple[str, ...]:
        """Wait until `replicas` receivers of `role` use `version`; returns the receivers given up at a deadline.

        Those are not waited for again (the run goes on without them) until they or their successors report. Once
        `stop` is set nobody is waited for: the receivers are ending too. `on_wait` is called several times a second
        (the caller's pulse). Afterwards `version` is pinned.
        Raises TimeoutError when no receiver at all uses the version after `timeout_s`, WeightsRefusedError as soon as
        every one of them has refused its canary for good.
        """
        wait = _Wait(version, role, replicas, time.monotonic() + timeout_s, stop, on_wait)
        given_up: list[str] = []
        limits_s = (self._deadlines.transfer_s, self._deadlines.verify_s, self._deadlines.acknowledge_s)
        for (phase, step), limit_s in zip(PHASES, limits_s, strict=True):
            if not self._wait(wait, phase, step, limit_s):
                given_up += self._give_up(wait, phase, step)
        if not wait.stopped():
            self._control.pin(version)
        return tuple(given_up)

    def close(self) -> None:
        """Leave the control plane and remove what is offered."""
        self._control.close()
        self._transport.close()

    def _stage(self, version: int, attempt: int) -> WeightsManifest:
        staged = self._transport.stage(version, self._tensors, attempt)
        self._newest = newest = msgspec.structs.replace(staged, canary=self._canary)
        self._control.announce(newest)
        return newest

    def _wait(self, wait: _Wait, phase: str, step: Progress, limit_s: float) -> bool:
        """Wait for one phase; False when its deadline has passed and somebody, but not everybody, is there."""
        started_s = time.monotonic()
        say_at_s, phase_end_s = started_s + SAY_AFTER_S, min(wait.end_s, started_s + limit_s)
        while True:
            there = self._there(wait, step)
            expected = max(1, wait.replicas - len(self._given_up[wait.role]))
            now_s = time.monotonic()
            if len(there) >= expected or wait.stopped():
                return True
            refused = self._refused(wait)
            all_refused = len(there) + len(refused) >= expected
            if there and (now_s >= phase_end_s or all_refused):
                return False
            if all_refused:
                raise WeightsRefusedError(
                    f"version {wait.version}: {', '.join(refused)} found another canary than the learner, "
                    f"{CANARY_ATTEMPTS} times"
                )
            if now_s >= wait.end_s:
                raise TimeoutError(
                    f"no {wait.role} acknowledged version {wait.version} by the deadline; its {phase} is not over "
                    f"({', '.join(self._behind(wait, step)) or 'none has ever asked for weights'})"
                )
            if now_s >= say_at_s:
                say_at_s = now_s + SAY_AGAIN_S
                behind = self._behind(wait, step)
                behind += [f"a {wait.role} that has not reported"] * (expected - len(there) - len(behind))
                self._log.warning(
                    "weights phase waits", phase=phase, version=wait.version, waiting_for=", ".join(behind)
                )
            wait.on_wait()
            self._take_reports(STOP_INTERVAL_S)

    def _there(self, wait: _Wait, step: Progress) -> list[str]:
        manifest = self._manifest(wait.version)
        return [name for name, each in self._of(wait.role) if progress_of(each, manifest) >= step]

    def _behind(self, wait: _Wait, step: Progress) -> list[str]:
        manifest = self._manifest(wait.version)
        return [f"{name} ({each.phase})" for name, each in self._of(wait.role) if progress_of(each, manifest) < step]

    def _refused(self, wait: _Wait) -> list[str]:
        manifest = self._manifest(wait.version)
        return [name for name, each in self._of(wait.role) if refused_for_good(each, manifest)]

    def _manifest(self, version: int) -> WeightsManifest:
        if self._newest is None or self._newest.version != version:
            raise ValueError(f"version {version} is not the newest one")
        return self._newest

    def _of(self, role: ReceiverRole) -> list[tuple[str, WeightsPoll]]:
        return [(name, each) for name, each in self._receivers.items() if each.role == role]

    def _give_up(self, wait: _Wait, phase: str, step: Progress) -> tuple[str, ...]:
        there, role = self._there(wait, step), wait.role
        behind = tuple(name for name, _ in self._of(role) if name not in there)
        for name in behind:
            del self._receivers[name]
            self._given_up[role].add(process_of(name))
        # Places that nobody has ever filled are not waited for either.
        unfilled = wait.replicas - len(there) - len(self._given_up[role])
        unknown = [f"unknown {role} {number}" for number in range(unfilled)]
        self._given_up[role].update(unknown)
        named = ", ".join([*behind, *unknown])
        self._log.warning("weight receivers given up", phase=phase, version=wait.version, receivers=named)
        return behind

    def _take_reports(self, timeout_s: float) -> None:
        reports = self._control.reports(timeout_s)
        ages_s = self._control.health()
        for name in [name for name in self._receivers if ages_s.get(name, FORGET_AFTER_S) >= FORGET_AFTER_S]:
            del self._receivers[name]
        newest, again = self._newest, False
        for report in reports:
            self._note(report)
            if newest is not None and report.refused == newest.key:
                self.num_refused += 1
                again |= not refused_for_good(report, newest)
        if again and newest is not None:
            self._stage(newest.version, newest.attempt + 1)

    def _note(self, report: WeightsPoll) -> None:
        process, given_up = process_of(report.receiver), self._given_up[report.role]
        known = {process_of(name) for name, _ in self._of(report.role)}
        if process in given_up:
            given_up.remove(process)
        elif process not in known and given_up:
            given_up.pop()
        for name in [name for name, _ in self._of(report.role) if process_of(name) == process]:
            del self._receivers[name]  # an earlier incarnation, or the last report of this one
        self._receivers[report.receiver] = report
