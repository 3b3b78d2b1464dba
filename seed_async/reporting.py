"""Brings the counters that parts keep for themselves into a process's metrics."""

from collections.abc import Mapping
from typing import Any

from seed_async.metrics import Metrics
from seed_async.ports import EngineHealth


def report_engine(metrics: Metrics, health: EngineHealth) -> None:
    """Report an engine's load and token counts."""
    metrics.gauge("generation_running").set(health.running)
    metrics.gauge("generation_waiting").set(health.waiting)
    metrics.advance("generated_tokens_total", health.generated_tokens)
    metrics.advance("prefilled_tokens_total", health.prefilled_tokens)
    metrics.advance("cached_tokens_total", health.cached_tokens)


def report_rejected(metrics: Metrics, rejected: Mapping[str, int]) -> None:
    """Report the frames that a server refused, by reason."""
    for reason, number in rejected.items():
        metrics.advance("rejected_frames_total", number, reason=reason)


def report_buffer(metrics: Metrics, accounting: Mapping[str, Any], backlog: int) -> None:
    """Report the buffer's accounting (`GroupBuffer.accounting`)."""
    leases, skills = accounting["leases"], accounting["skills"]
    totals = {key: accounting[key] for key in ("accepted", "trained", "duplicate", "fenced", "refused")}
    totals |= {"leased": leases["granted"], "returned": leases["returned"], "failed": leases["failed"]}
    for status, total in totals.items():
        metrics.advance("trajectories_total", total, status=status)
    for reason, total in accounting["dropped"].items():
        metrics.advance("trajectories_dropped_total", total, reason=reason)
    for result, total in skills.items():
        metrics.advance("analyses_total", total, result=result)
    answered = sum(skills.values())
    if answered:
        metrics.gauge("analysis_parse_ratio").set(skills["parsed"] / answered)
    metrics.gauge("trajectories_buffered").set(accounting["buffered"])
    metrics.gauge("trajectories_running").set(leases["running"])
    metrics.gauge("analyzer_queue").set(backlog)
