"""The result of a run in one file: reads what the processes left in the run directory, writes summary.json.

Whatever is missing, because the run was interrupted or has failed, is null.
"""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from seed_async.rundir import RunDir
from seed_async.stats import wilson_interval
from seed_async.timeline import Span, load_timeline, overlap_seconds, union
from seed_async.topology import Topology

Line = dict[str, Any]


def read_lines(path: Path) -> list[Line]:
    """Return the JSON lines of a file, none when it is missing; a last line cut by a kill is left out."""
    lines = []
    for text in path.read_text(encoding="utf-8").splitlines() if path.is_file() else ():
        try:
            lines.append(json.loads(text))
        except json.JSONDecodeError:
            continue
    return lines


def finite(lines: Sequence[Line], key: str) -> list[float]:
    """Return the finite values of a key, in order; lines without one are passed over."""
    values = [line.get(key) for line in lines]
    return [float(value) for value in values if value is not None and math.isfinite(value)]


def evaluation_summary(evaluations: Sequence[Line]) -> dict[str, Any]:
    """Return success before and after training on the panel, with 95 % Wilson intervals."""
    before = evaluations[0] if evaluations else None
    after = evaluations[-1] if len(evaluations) > 1 else None

    def interval(line: Line | None) -> list[float] | None:
        return list(wilson_interval(line["won"], line["games"])) if line else None

    return {
        "success_before": before["success"] if before else None,
        "success_before_interval": interval(before),
        "success_after": after["success"] if after else None,
        "success_after_interval": interval(after),
        "gain": after["success"] - before["success"] if before and after else None,
        "games": before["games"] if before else None,
        "evaluated_versions": [line["version"] for line in evaluations],
        "by_task_type_before": before["by_task_type"] if before else None,
        "by_task_type_after": after["by_task_type"] if after else None,
    }


def training_summary(metrics: Sequence[Line]) -> dict[str, Any]:
    """Return what the learner's lines say about the whole run."""
    means, maxima = finite(metrics, "sampler_gap_mean"), finite(metrics, "sampler_gap_max")
    return {
        "updates": len(metrics),
        "response_tokens": sum(finite(metrics, "response_tokens")),
        "sampler_gap_mean": sum(means) / len(means) if means else None,
        "sampler_gap_max": max(maxima, default=None),
        "seconds_training": sum(finite(metrics, "step_s")),
        "seconds_waiting": sum(finite(metrics, "wait_s")),
    }


def accounting_summary(counts: Mapping[str, Any] | None, bound: int) -> dict[str, Any]:
    """Return the buffer's accounting, whether it adds up, and the ages at training time against the bound."""
    if counts is None:
        missing = (
            "trajectories",
            "quarantined_tasks",
            "balance_ok",
            "ages",
            "max_age",
            "age_bound_held",
            "parse_rate",
            "masked",
            "bias",
        )
        return dict.fromkeys(missing) | {"age_bound": bound}
    ages = {int(age): number for age, number in counts["ages"].items() if number}
    skills = counts.get("skills", {})
    answered = sum(skills.get(key, 0) for key in ("parsed", "unparsed", "timeout"))
    return {
        "trajectories": {key: counts[key] for key in ("accepted", "trained", "dropped", "buffered", "leases")},
        "quarantined_tasks": counts.get("quarantined_tasks", []),
        "balance_ok": counts["balance_ok"],
        "ages": {str(age): number for age, number in sorted(ages.items())},
        "max_age": max(ages, default=None),
        "age_bound": bound,
        "age_bound_held": max(ages, default=0) <= bound,
        "parse_rate": skills["parsed"] / answered if answered else None,
        "masked": counts.get("masked"),
        "bias": counts.get("bias"),
    }


def overlap_summary(spans: Sequence[Span], uses_skills: bool) -> dict[str, Any]:
    """Return how long the activities ran, and how long all of them ran at the same moment."""
    kinds = ("act", "analyse", "train") if uses_skills else ("act", "train")
    intervals = {kind: union((span.start_s, span.end_s) for span in spans if span.kind == kind) for kind in kinds}
    return {
        "overlap_of": list(kinds),
        "overlap_seconds": overlap_seconds(*intervals.values()),
        "busy_seconds": {kind: sum(end - start for start, end in busy) for kind, busy in intervals.items()},
    }


def write_summary(run_dir: RunDir, topology: Topology, phases: Mapping[str, float], status: str) -> dict[str, Any]:
    """Gather the result of a run and write it to summary.json; `phases` holds wall seconds by name."""
    counts = json.loads(run_dir.counts.read_text(encoding="utf-8")) if run_dir.counts.is_file() else None
    summary = {
        "run": topology.run.name,
        "method": topology.method,
        "status": status,
        "seconds": dict(phases) | {"total": sum(phases.values())},
        **evaluation_summary(read_lines(run_dir.evaluations)),
        **training_summary(read_lines(run_dir.metrics)),
        **accounting_summary(counts, topology.staleness.max),
        **overlap_summary(load_timeline(run_dir.timeline), topology.uses_analyzers),
    }
    run_dir.summary.write_text(json.dumps(summary, indent=2, allow_nan=False) + "\n", encoding="utf-8")
    return summary


def _rate(value: float | None, interval: Sequence[float] | None) -> str:
    if value is None or interval is None:
        return "-"
    return f"{value:.1%}  (95 %: {interval[0]:.1%} .. {interval[1]:.1%})"


def _plain(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _count_rows(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    trajectories = summary["trajectories"]
    if trajectories is None:
        return [("trajectories", "- (the buffer left no accounting)")]
    dropped = ", ".join(f"{reason} {number}" for reason, number in trajectories["dropped"].items()) or "none"
    ages = ", ".join(f"age {age}: {number}" for age, number in summary["ages"].items()) or "-"
    return [
        ("trajectories", f"{trajectories['accepted']} accepted, {trajectories['trained']} trained"),
        ("dropped", dropped),
        ("unused at the end", str(trajectories["buffered"])),
        ("episodes failed", f"{trajectories['leases']['failed']}, {len(summary['quarantined_tasks'])} games given up"),
        ("accounting adds up", "yes" if summary["balance_ok"] else "NO"),
        ("age when trained", f"{ages}  (bound {summary['age_bound']}{'' if summary['age_bound_held'] else ' BROKEN'})"),
        *_bias_rows(summary),
    ]


def _bias_rows(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    bias, masked = summary["bias"] or {}, summary["masked"] or {}
    rows = []
    if masked.get("tokens"):
        rows.append(("too old, masked", f"{masked['tokens']} tokens, {masked['trajectories']} trajectories whole"))
    if bias.get("length_ratio") is not None:
        slowest, longest = bias["slowest_decile_trained"], bias["longest_decile_trained"]
        rows.append(("mean length trained / played", f"{bias['length_ratio']:.3f}"))
        rows.append(("trained of the slowest tenth", f"{slowest:.1%}; of the longest {longest:.1%}"))
    return rows


def summary_rows(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return a summary as (name, value) pairs to read."""
    seconds = ", ".join(f"{name} {value:.0f} s" for name, value in summary["seconds"].items())
    overlap = f"{summary['overlap_seconds']:.1f} s of {' + '.join(summary['overlap_of'])} at once"
    gap = f"mean {_plain(summary['sampler_gap_mean'], '.2g')}, max {_plain(summary['sampler_gap_max'], '.2g')}"
    return [
        ("status", summary["status"]),
        ("success before", _rate(summary["success_before"], summary["success_before_interval"])),
        ("success after", _rate(summary["success_after"], summary["success_after_interval"])),
        ("gain", _plain(summary["gain"], "+.1%")),
        ("held-out games", _plain(summary["games"], "d")),
        ("updates", str(summary["updates"])),
        *_count_rows(summary),
        ("analyses parsed", _plain(summary["parse_rate"], ".1%")),
        ("sampler-learner gap", f"{gap} nats"),
        ("overlap", overlap),
        ("wall time", seconds),
    ]


def print_summary(summary: Mapping[str, Any], console: Console | None = None) -> None:
    """Show a summary as a table."""
    table = Table(title=f"{summary['run']} ({summary['method']})", show_header=False, title_justify="left")
    table.add_column(style="dim", no_wrap=True)
    table.add_column()
    for name, value in summary_rows(summary):
        table.add_row(name, value)
    (console or Console()).print(table)
