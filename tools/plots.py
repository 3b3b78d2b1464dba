"""Plots of a run as PNG files, from what its processes left in the run directory."""

import json
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from matplotlib.typing import RcKeyType

from seed_async.rundir import RunDir
from seed_async.stats import wilson_interval
from seed_async.timeline import Span, load_timeline, union
from seed_async.tools.summary import Line, read_lines
from seed_async.topology import Topology

DPI = 120
ZOOM_S = 20.0
SMOOTHED_UPDATES = 5
VERSION_LABEL = "weight version"
COLOURS = {
    "act": "#4c9f70",
    "analyse": "#8e5ea2",
    "train": "#c0392b",
    "publish": "#e08e45",
    "load_weights": "#a9713a",
    "wait": "#d5d8dc",
    "score": "#7f8c8d",
    "evaluate": "#3b7dd8",
}
OTHER_COLOUR = "#95a5a6"
ROLE_ORDER = ("learner", "policy", "analyzer", "actor", "evaluation", "buffer")
STYLE: dict[RcKeyType, Any] = {
    "axes.grid": True,
    "grid.alpha": 0.25,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "legend.frameon": False,
    "font.size": 10,
}


class Records(NamedTuple):
    """Everything that the plots are drawn from."""

    topology: Topology
    metrics: list[Line]
    evaluations: list[Line]
    counts: dict[str, Any] | None
    spans: list[Span]


def read_records(run_dir: RunDir, topology: Topology) -> Records:
    """Read a run directory; what is missing is empty."""
    counts = json.loads(run_dir.counts.read_text(encoding="utf-8")) if run_dir.counts.is_file() else None
    return Records(
        topology, read_lines(run_dir.metrics), read_lines(run_dir.evaluations), counts, load_timeline(run_dir.timeline)
    )


def smooth(values: np.ndarray, width: int = SMOOTHED_UPDATES) -> np.ndarray:
    """Return the mean of the last `width` values at each place (fewer at the start); float [N] to float [N]."""
    sums = np.concatenate([[0.0], np.cumsum(values)])
    ends = np.arange(1, len(values) + 1)
    starts = np.maximum(ends - width, 0)
    return np.asarray((sums[ends] - sums[starts]) / (ends - starts))


def series(metrics: Sequence[Line], key: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the versions and values of a metric where it is a finite number."""
    pairs = [(line["version"], line[key]) for line in metrics if line.get(key) is not None and np.isfinite(line[key])]
    versions, values = zip(*pairs, strict=True) if pairs else ((), ())
    return np.array(versions, dtype=float), np.array(values, dtype=float)


def _panels(num_panels: int, columns: int = 2) -> tuple[Figure, list[Axes]]:
    rows = -(-num_panels // columns)
    figure = Figure(figsize=(5.5 * columns, 3.0 * rows), layout="constrained")
    return figure, [figure.add_subplot(rows, columns, index + 1) for index in range(num_panels)]


def _line(axes: Axes, metrics: Sequence[Line], key: str, label: str, colour: str | None = None) -> None:
    versions, values = series(metrics, key)
    if len(values):
        axes.plot(versions, values, label=label, color=colour, linewidth=1.4)


def _label(axes: Axes, title: str, y_label: str, x_label: str = VERSION_LABEL) -> None:
    axes.set_title(title, loc="left", fontsize=10.5)
    axes.set_ylabel(y_label)
    axes.set_xlabel(x_label)
    if x_label == VERSION_LABEL:
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def plot_learning(records: Records) -> Figure | None:
    """Training success by update, and the held-out evaluations with 95 % Wilson intervals."""
    if not records.metrics and not records.evaluations:
        return None
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    versions, success = series(records.metrics, "success")
    if len(success):
        axes.plot(versions, success, ".", color="#4c9f70", alpha=0.35, markersize=5, label="training batch")
        axes.plot(versions, smooth(success), color="#4c9f70", label=f"training, mean of {SMOOTHED_UPDATES} updates")
    if records.evaluations:
        rates = np.array([line["success"] for line in records.evaluations])
        ends = np.array([wilson_interval(line["won"], line["games"]) for line in records.evaluations])
        axes.errorbar(
            [line["version"] for line in records.evaluations],
            rates,
            yerr=np.abs(ends.T - rates),
            fmt="o-",
            color="#3b7dd8",
            capsize=4,
            zorder=3,
            label=f"held-out games ({records.evaluations[0]['games']}), 95 % interval",
        )
    axes.set_ylim(-0.02, 1.02)
    axes.legend(loc="best")
    _label(axes, f"Success with {records.topology.method}", "share of games won")
    return figure


def _instances(spans: Sequence[Span]) -> list[tuple[str, str]]:
    def order(name: tuple[str, str]) -> tuple[int, str, int, str]:
        role, instance = name
        place = ROLE_ORDER.index(role) if role in ROLE_ORDER else len(ROLE_ORDER)
        return place, role, len(instance), instance

    return sorted({(span.role, span.instance) for span in spans}, key=order)


def _gantt(axes: Axes, spans: Sequence[Span], rows: Mapping[tuple[str, str], int], start_s: float) -> None:
    grouped: dict[tuple[int, str], list[tuple[float, float]]] = defaultdict(list)
    for span in spans:
        grouped[rows[span.role, span.instance], span.kind].append((span.start_s - start_s, span.end_s - start_s))
    shown = set()
    # Idle time first, so that it never covers work.
    for (row, kind), intervals in sorted(grouped.items(), key=lambda item: item[0][1] != "wait"):
        axes.broken_barh(
            [(start, end - start) for start, end in union(intervals)],
            (row - 0.38, 0.76),
            # The edge keeps a bar visible that is narrower than a pixel.
            color=COLOURS.get(kind, OTHER_COLOUR),
            linewidth=0.4,
            label=None if kind in shown else kind,
        )
        shown.add(kind)
    axes.set_yticks(list(rows.values()), [f"{role} {instance}" for role, instance in rows])
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.grid(axis="y", visible=False)


def zoom_start(spans: Sequence[Span]) -> float:
    """Return where the zoomed window begins: around the middle training step, which has its neighbours in view."""
    steps = [span for span in spans if span.kind == "train"] or list(spans)
    return steps[len(steps) // 2].start_s - ZOOM_S / 2


def plot_timeline(records: Records) -> Figure | None:
    """What each process did when: the whole run, and a window from its middle."""
    if not records.spans:
        return None
    rows = {name: row for row, name in enumerate(_instances(records.spans))}
    figure = Figure(figsize=(11, 2.2 + 0.62 * len(rows)), layout="constrained")
    whole, zoomed = figure.subplots(2, 1)
    start_s = records.spans[0].start_s
    _gantt(whole, records.spans, rows, start_s)
    _label(whole, "Activity of every process, whole run", "", "seconds since the first activity")
    from_s = max(zoom_start(records.spans), start_s)
    inside = [span for span in records.spans if span.end_s >= from_s and span.start_s <= from_s + ZOOM_S]
    _gantt(zoomed, inside, rows, start_s)
    zoomed.set_xlim(from_s - start_s, from_s - start_s + ZOOM_S)
    _label(zoomed, f"{ZOOM_S:.0f} seconds from the middle", "", "seconds since the first activity")
    handles, labels = whole.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right upper")
    return figure


def plot_ages(records: Records) -> Figure | None:
    """Ages at training time against the bound, and what became of every accepted trajectory."""
    if records.counts is None:
        return None
    figure, (ages, fates) = _panels(2)
    bound = records.topology.staleness.max
    numbers = {int(age): number for age, number in records.counts["ages"].items()}
    places = np.arange(max([bound + 1, *numbers]) + 1)
    bars = ages.bar(places, [numbers.get(int(age), 0) for age in places], color="#3b7dd8", width=0.7)
    ages.bar_label(bars, fontsize=9)
    ages.axvline(bound + 0.5, color="#c0392b", linestyle="--", label=f"bound {bound}")
    ages.set_xticks(places)
    ages.margins(y=0.12)
    ages.legend()
    _label(ages, "Age when trained", "trajectories", "versions behind")
    outcome = {"trained": records.counts["trained"], **records.counts["dropped"], "unused": records.counts["buffered"]}
    colours = ["#4c9f70", *["#c0392b"] * len(records.counts["dropped"]), "#95a5a6"]
    bars = fates.barh(list(outcome), list(outcome.values()), color=colours, height=0.6)
    fates.bar_label(bars, padding=3, fontsize=9)
    fates.invert_yaxis()
    fates.margins(x=0.15)
    _label(fates, f"Fate of {records.counts['accepted']} accepted trajectories", "", "trajectories")
    return figure


def plot_losses(records: Records) -> Figure | None:
    """Loss terms, KL to the reference, token entropy and gradient norm."""
    if not records.metrics:
        return None
    figure, (loss, kl, entropy, norm) = _panels(4)
    for term in ("total", "policy", "kl", "entropy", "distillation"):
        _line(loss, records.metrics, f"loss_{term}", term)
    if loss.lines:
        loss.legend(fontsize=8, ncols=2)
    _label(loss, "Loss terms", "loss")
    _line(kl, records.metrics, "kl", "kl", "#8e5ea2")
    _label(kl, "KL to the reference", "nats a token")
    _line(entropy, records.metrics, "entropy", "entropy", "#4c9f70")
    entropy.set_ylim(bottom=0)
    _label(entropy, "Policy entropy", "nats a token")
    _line(norm, records.metrics, "gradient_norm", "norm", "#c0392b")
    norm.axhline(records.topology.optimizer.max_grad_norm, color="#7f8c8d", linestyle="--", label="clipped above")
    norm.set_ylim(bottom=0)
    norm.legend(fontsize=8)
    _label(norm, "Gradient norm before clipping", "L2 norm")
    return figure


def plot_distillation(records: Records) -> Figure | None:
    """The distillation gate, the share of trajectories with a skill, and the parse rate; None without analysis."""
    if not records.metrics or not records.topology.uses_skills:
        return None
    figure, (gate, shares) = _panels(2)
    _line(gate, records.metrics, "gate_mean", "gate", "#8e5ea2")
    gate.set_ylim(0, 1.02)
    _label(gate, "Distillation gate, mean over tokens", "gate")
    _line(shares, records.metrics, "opd_active_ratio", "with a distillation term", "#8e5ea2")
    _line(shares, records.metrics, "parse_rate", "whose analysis parsed", "#e08e45")
    shares.set_ylim(0, 1.02)
    if shares.lines:
        shares.legend(loc="lower right", fontsize=8)
    _label(shares, "Trajectories of the batch", "share")
    return figure


def plot_gap(records: Records) -> Figure | None:
    """How far the sampler's log-probs are from the learner's on tokens of the same version."""
    keys = {"sampler_gap_mean": ("mean", "#3b7dd8"), "sampler_gap_max": ("largest", "#c0392b")}
    if not any(len(series(records.metrics, key)[1]) for key in keys):
        return None
    figure = Figure(figsize=(8, 3.6), layout="constrained")
    axes = figure.add_subplot()
    for key, (label, colour) in keys.items():
        _line(axes, records.metrics, key, label, colour)
    axes.set_yscale("log")
    axes.legend()
    _label(axes, "Gap of sampler and learner on fresh tokens", "absolute log-prob gap (nats)")
    return figure


def plot_throughput(records: Records) -> Figure | None:
    """Tokens and trajectories trained a second of wall time, and where the learner's time went."""
    if len(records.metrics) < 2:
        return None
    figure, (tokens, trajectories, seconds) = _panels(3, columns=3)
    times = np.array([line["time_s"] for line in records.metrics], dtype=float)
    versions = np.array([line["version"] for line in records.metrics[1:]], dtype=float)
    elapsed = np.maximum(np.diff(times), 1e-9)
    for axes, key, name in (
        (tokens, "response_tokens", "response tokens"),
        (trajectories, "trajectories", "trajectories"),
    ):
        rates = np.array([line.get(key, np.nan) for line in records.metrics[1:]], dtype=float) / elapsed
        axes.plot(versions, rates, ".", color="#3b7dd8", alpha=0.35)
        axes.plot(versions, smooth(rates), color="#3b7dd8")
        axes.set_ylim(bottom=0)
        _label(axes, f"Trained {name}", f"{name}/s")
    for key, label, colour in (("step_s", "training", "#c0392b"), ("wait_s", "waiting for a batch", "#7f8c8d")):
        _line(seconds, records.metrics, key, label, colour)
    seconds.set_ylim(bottom=0)
    seconds.legend(fontsize=8)
    _label(seconds, "Learner's time an update", "seconds")
    return figure


PLOTS: dict[str, Callable[[Records], Figure | None]] = {
    "learning": plot_learning,
    "timeline": plot_timeline,
    "ages": plot_ages,
    "losses": plot_losses,
    "distillation": plot_distillation,
    "sampler_gap": plot_gap,
    "throughput": plot_throughput,
}


def write_plots(run_dir: RunDir, topology: Topology) -> list[Path]:
    """Draw every plot that there is data for into the run's plot folder; returns the files."""
    records = read_records(run_dir, topology)
    run_dir.plots.mkdir(parents=True, exist_ok=True)
    written = []
    with matplotlib.rc_context(STYLE):
        for name, draw in PLOTS.items():
            figure = draw(records)
            if figure is not None:
                path = run_dir.plots / f"{name}.png"
                # A bare Figure saves through the Agg canvas: no display, no global state.
                figure.savefig(path, dpi=DPI)
                written.append(path)
    return written
