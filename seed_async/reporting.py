"""Brings the counters that parts keep for themselves into a process's metrics."""

import time
from collections.abc import Mapping
from typing import Any

from structlog.typing import FilteringBoundLogger

from seed_async.metrics import Metrics
from seed_async.ports import EngineHealth

REJECTION_INTERVAL_S = 1.0
"""A flood of bad frames writes one line each so often, which tells how many were left out."""


class RejectionLog:
    """Counts what a server refuses or cannot deliver, and names the peers in the log, at most one line a second."""

    def __init__(self, log: FilteringBoundLogger, metrics: Metrics, interval_s: float = REJECTION_INTERVAL_S) -> None:
        """Nothing is remembered of a peer, so that many of them cost nothing."""
        self._log, self._metrics, self._interval_s = log, metrics, interval_s
        self._next_s = 0.0
        self._left_out = 0

    def note(self, peer: str, reason: str, detail: str) -> None:
        """Count a message by its reason; log it, or count it as left out of the log."""
        self._metrics.counter("rejected_frames_total", reason=reason).inc()
        if time.monotonic() < self._next_s:
            self._left_out += 1
            return
        self._next_s = time.monotonic() + self._interval_s
        self._log.warning("message rejected", peer=peer, reason=reason, detail=detail[:200], left_out=self._left_out)
        self._left_out = 0


def report_engine(metrics: Metrics, health: EngineHealth) -> None:
    """Report an engine's load and token counts."""
    metrics.gauge("generation_running").set(health.running)
    metrics.gauge("generation_waiting").set(health.waiting)
    metrics.advance("generated_tokens_total", health.generated_tokens)
    metrics.advance("prefilled_tokens_total", health.prefilled_tokens)
    metrics.advance("cached_tokens_total", health.cached_tokens)


def report_buffer(metrics: Metrics, accounting: Mapping[str, Any], backlog: int) -> None:
    """Report the buffer's accounting (`GroupBuffer.accounting`)."""
    leases, skills = accounting["leases"], accounting["skills"]
    totals = {key: accounting[key] for key in ("accepted", "trained", "lost", "duplicate", "fenced", "refused")}
    totals |= {"leased": leases["granted"], "returned": leases["returned"], "failed": leases["failed"]}
    for status, total in totals.items():
        metrics.advance("trajectories_total", total, status=status)
    for reason, total in accounting["dropped"].items():
        metrics.advance("trajectories_dropped_total", total, reason=reason)
    _report_bias(metrics, accounting["bias"])
    for result, total in skills.items():
        metrics.advance("analyses_total", total, result=result)
    answered = sum(skills.values())
    if answered:
        metrics.gauge("analysis_parse_ratio").set(skills["parsed"] / answered)
    metrics.gauge("trajectories_buffered").set(accounting["buffered"])
    metrics.gauge("trajectories_running").set(leases["running"])
    metrics.gauge("analyzer_queue").set(backlog)


def _report_bias(metrics: Metrics, bias: Mapping[str, float | None]) -> None:
    """Report who is trained, as far as anything has ended."""
    gauges = {
        "length_ratio": metrics.gauge("trained_length_ratio"),
        "trained_token_share": metrics.gauge("trained_token_ratio"),
        "slowest_decile_trained": metrics.gauge("slowest_decile_trained_ratio", by="seconds"),
        "longest_decile_trained": metrics.gauge("slowest_decile_trained_ratio", by="tokens"),
    }
    for name, gauge in gauges.items():
        value = bias[name]
        if value is not None:
            gauge.set(value)
