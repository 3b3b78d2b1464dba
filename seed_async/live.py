"""The live view of a run, fed only by its /metrics endpoints: what a person sees is what Prometheus sees.

A background thread scrapes every endpoint announced in the run directory; the launcher's loop draws what is there.
"""

import sys
import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import NamedTuple, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from seed_async.metrics import PREFIX, Target, read_targets, scrape
from seed_async.rundir import RunDir
from seed_async.topology import Topology

SCRAPE_INTERVAL_S = 2.0
SCRAPE_TIMEOUT_S = 0.5
REDRAW_INTERVAL_S = 1.0
PLAIN_INTERVAL_S = 10.0
RATE_WINDOW_S = 20.0
"""Rates are over this long: an episode of the demo takes a few seconds."""
SUCCESS_WINDOW_S = 60.0

Samples = Mapping[str, float]
Fleet = Mapping[Target, Samples]


def read_fleet(run_dir: RunDir, timeout_s: float = SCRAPE_TIMEOUT_S) -> dict[Target, dict[str, float]]:
    """Scrape every announced endpoint of a run; one that does not answer is left out."""
    fleet = {}
    for target in read_targets(run_dir.targets):
        try:
            fleet[target] = scrape(target.address, timeout_s)
        except OSError:  # dead, or just about to start: the supervisor knows which
            continue
    return fleet


def by_label(samples: Samples, name: str) -> dict[str, float]:
    """Return the samples of a family with one label, by that label's value."""
    start = f"{PREFIX}{name}{{"
    return {key[len(start) :].split('"')[1]: value for key, value in samples.items() if key.startswith(start)}


def by_instance(fleet: Fleet, name: str) -> dict[str, float]:
    """Return the value of a family without labels for each process that has it."""
    return {
        f"{target.role}-{target.instance}": samples[PREFIX + name]
        for target, samples in fleet.items()
        if PREFIX + name in samples
    }


class History:
    """Counters of the whole fleet over time, as Prometheus' `increase` counts: a restart never makes one smaller."""

    def __init__(self) -> None:
        """Start with nothing seen."""
        self._last: dict[tuple[str, str, str], float] = {}
        self._totals: dict[str, float] = {}
        self._points: deque[tuple[float, dict[str, float]]] = deque()

    def add(self, now_s: float, fleet: Fleet) -> None:
        """Take in one scrape of the fleet."""
        for target, samples in fleet.items():
            for key, value in samples.items():
                if not key.partition("{")[0].endswith("_total"):
                    continue
                place = (target.role, target.instance, key)
                last = self._last.get(place, 0.0)
                grown = value - last if value >= last else value
                self._last[place] = value
                self._totals[key] = self._totals.get(key, 0.0) + grown
        self._points.append((now_s, dict(self._totals)))
        while now_s - self._points[0][0] > SUCCESS_WINDOW_S:
            self._points.popleft()

    def total(self, name: str, **labels: str) -> float:
        """Return a counter's value over the run, summed over the fleet."""
        return self._totals.get(_key(name, labels), 0.0)

    def increase(self, name: str, window_s: float, **labels: str) -> tuple[float, float]:
        """Return by how much a counter grew in the last `window_s`, and the seconds that this was seen over."""
        if not self._points:
            return 0.0, 0.0
        key, (now_s, newest) = _key(name, labels), self._points[-1]
        since_s, oldest = next(point for point in self._points if now_s - point[0] <= window_s)
        return newest.get(key, 0.0) - oldest.get(key, 0.0), now_s - since_s

    def rate(self, name: str, **labels: str) -> float | None:
        """Return a counter's growth a second, None before there are two scrapes."""
        grown, seconds = self.increase(name, RATE_WINDOW_S, **labels)
        return grown / seconds if seconds > 0 else None


def _key(name: str, labels: Mapping[str, str]) -> str:
    inner = ",".join(f'{label}="{value}"' for label, value in sorted(labels.items()))
    return f"{PREFIX}{name}{{{inner}}}" if labels else PREFIX + name


@dataclass(frozen=True)
class Progress:
    """What the view shows; None where nothing is known yet."""

    updates: int = 0
    training_success: float | None = None
    evaluations: tuple[float, ...] = ()
    trajectories_per_s: float | None = None
    tokens_per_s: float | None = None
    age_mean: float | None = None
    age_max: float | None = None
    trained: int = 0
    dropped: Mapping[str, float] = field(default_factory=dict)
    running: int = 0
    buffered: int = 0
    analyzer_queue: int = 0
    parse_ratio: float | None = None
    sampler_gap_mean: float | None = None
    sampler_gap_max: float | None = None
    versions: Mapping[str, float] = field(default_factory=dict)


def progress_of(fleet: Fleet, history: History, evaluations: tuple[float, ...] = ()) -> Progress:
    """Digest one scrape of the fleet and the counters before it."""
    merged = {key: value for samples in fleet.values() for key, value in samples.items()}

    def gauge(name: str) -> float | None:
        return merged.get(PREFIX + name)

    outcomes = {
        outcome: history.increase("episodes_total", SUCCESS_WINDOW_S, outcome=outcome)[0]
        for outcome in ("won", "lost", "truncated")
    }
    episodes = sum(outcomes.values())
    aged = merged.get(_key("trajectory_age_versions_count", {"stage": "total"}), 0.0)
    age_sum = merged.get(_key("trajectory_age_versions_sum", {"stage": "total"}), 0.0)
    return Progress(
        updates=int(history.total("updates_total")),
        training_success=outcomes["won"] / episodes if episodes else None,
        evaluations=evaluations,
        trajectories_per_s=history.rate("trajectories_total", status="accepted"),
        tokens_per_s=history.rate("generated_tokens_total"),
        age_mean=age_sum / aged if aged else None,
        age_max=gauge("trajectory_age_oldest_versions"),
        trained=int(history.total("trajectories_total", status="trained")),
        dropped=by_label(merged, "trajectories_dropped_total"),
        running=int(gauge("trajectories_running") or 0),
        buffered=int(gauge("trajectories_buffered") or 0),
        analyzer_queue=int(gauge("analyzer_queue") or 0),
        parse_ratio=gauge("analysis_parse_ratio"),
        sampler_gap_mean=gauge("sampler_gap_mean"),
        sampler_gap_max=gauge("sampler_gap_max"),
        versions=by_instance(fleet, "policy_version"),
    )


class Scraper:
    """Scrapes a run's endpoints on a thread of its own until closed."""

    def __init__(self, run_dir: RunDir) -> None:
        """Start the thread."""
        self._run_dir = run_dir
        self._history = History()
        self._evaluations: list[float] = []
        self._progress = Progress()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="live-scraper")
        self._thread.start()

    @property
    def progress(self) -> Progress:
        """The newest state; replaced whole, so that it may be read from any thread."""
        return self._progress

    def close(self) -> None:
        """Stop the thread."""
        self._closing.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._closing.wait(SCRAPE_INTERVAL_S):
            fleet = read_fleet(self._run_dir)
            self._history.add(time.monotonic(), fleet)
            self._note_evaluations(fleet)
            self._progress = progress_of(fleet, self._history, tuple(self._evaluations))

    def _note_evaluations(self, fleet: Fleet) -> None:
        for samples in fleet.values():
            for key, value in samples.items():
                is_success = key.partition("{")[0] == f"{PREFIX}evaluation_success_ratio"
                if is_success and self._evaluations[-1:] != [value]:
                    self._evaluations.append(value)


class Shown(NamedTuple):
    """A progress with what the launcher itself knows."""

    progress: Progress
    topology: Topology
    elapsed_s: float
    restarts: Mapping[str, int]


def _number(value: float | None, form: str = ".2f") -> str:
    return "-" if value is None else format(value, form)


def _rows(shown: Shown) -> list[tuple[str, str]]:
    """Return what is shown as (name, value) pairs, the same for a terminal and for a log."""
    progress = shown.progress
    dropped = ", ".join(f"{reason} {number:.0f}" for reason, number in sorted(progress.dropped.items()) if number)
    bound = shown.topology.staleness.max
    rows = [
        ("training success", _number(progress.training_success)),
        ("evaluations", " > ".join(_number(value) for value in progress.evaluations) or "-"),
        ("trajectories/s", _number(progress.trajectories_per_s, ".1f")),
        ("tokens/s", _number(progress.tokens_per_s, ".0f")),
        ("age", f"mean {_number(progress.age_mean)}, last batch max {_number(progress.age_max, '.0f')} of {bound}"),
        ("trained", str(progress.trained)),
        ("dropped", dropped or "none"),
        ("running / buffered", f"{progress.running} / {progress.buffered}"),
        (
            "sampler gap",
            f"mean {_number(progress.sampler_gap_mean, '.2g')}, max {_number(progress.sampler_gap_max, '.2g')}",
        ),
    ]
    if shown.topology.uses_analyzers:
        queue = f", {progress.analyzer_queue} waiting"
        rows.append(("analyses parsed", _number(progress.parse_ratio) + queue))
    rows.append(("versions", ", ".join(f"{name} {version:.0f}" for name, version in progress.versions.items()) or "-"))
    rows.append(("restarts", ", ".join(f"{name} {number}" for name, number in shown.restarts.items()) or "none"))
    return rows


def _clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes}:{rest:02d}"


def plain_line(shown: Shown) -> str:
    """Return the state as one line, for logs."""
    head = f"{_clock(shown.elapsed_s)} update {shown.progress.updates}/{shown.topology.run.updates}"
    return "; ".join([head, *(f"{name} {value}" for name, value in _rows(shown))])


def render(shown: Shown) -> RenderableType:
    """Return the state as a panel, for terminals."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column()
    for name, value in _rows(shown):
        table.add_row(name, value)
    run = shown.topology.run
    head = Text(f"update {shown.progress.updates} of {run.updates}, {_clock(shown.elapsed_s)} elapsed")
    bar = ProgressBar(total=run.updates, completed=shown.progress.updates)
    return Panel(Group(head, bar, table), title=f"{run.name} ({shown.topology.method})", expand=True)


class LiveView:
    """Draws the run while it is entered: a panel on a terminal, one line now and then elsewhere."""

    def __init__(
        self,
        run_dir: RunDir,
        topology: Topology,
        restarts: Mapping[str, int],
        plain_interval_s: float = PLAIN_INTERVAL_S,
    ) -> None:
        """`restarts` is the supervisor's own, read at each refresh."""
        self._topology, self._restarts, self._plain_interval_s = topology, restarts, plain_interval_s
        self._started_s = self._printed_s = time.monotonic()
        self._scraper = Scraper(run_dir)
        console = Console(file=sys.stdout)
        self._live = Live(console=console, auto_refresh=False) if console.is_terminal else None

    def refresh(self) -> None:
        """Draw the newest state."""
        now_s = time.monotonic()
        shown = Shown(self._scraper.progress, self._topology, now_s - self._started_s, self._restarts)
        if self._live is not None:
            if now_s - self._printed_s >= REDRAW_INTERVAL_S:
                self._printed_s = now_s
                self._live.update(render(shown), refresh=True)
        elif now_s - self._printed_s >= self._plain_interval_s:
            self._printed_s = now_s
            print(plain_line(shown), flush=True)

    def __enter__(self) -> Self:
        """Take over the terminal."""
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Give the terminal back and stop scraping."""
        self._scraper.close()
        if self._live is not None:
            self._live.stop()
