"""Every Prometheus family of the system in one table, and the registry and endpoint of one role process.

Names carry base units, counters end in `_total`, labels never hold ids. A role registers a family when it first uses
it, so an endpoint shows only what its role measures.
"""

import contextlib
import http.client
import json
import os
import re
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.parser import text_string_to_metric_families

PREFIX = "seed_async_"

# Prometheus' own buckets end at 10 s: too early for episodes and batches, too late for phases of small models.
SECONDS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0, 3000.0)
AGES = (0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0)

Kind = Literal["counter", "gauge", "histogram"]


class Family(NamedTuple):
    """A metric family as it is declared; `buckets` are for histograms."""

    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()


# Without PREFIX.
FAMILIES: dict[str, Family] = {
    # Weights, any role
    "policy_version": Family("gauge", "Weight version that this process uses."),
    "weight_sync_seconds": Family("histogram", "Time from learning of a new version to using it.", (), SECONDS),
    "canary_gap_nats": Family("gauge", "Largest log-prob gap to the learner on the canary of the last version loaded."),
    "canary_refusals_total": Family("counter", "Versions not served because the engine found another canary."),
    "weight_receivers_evicted_total": Family("counter", "Weight receivers given up on by the publisher."),
    # Learner
    "updates_total": Family("counter", "Optimizer updates."),
    "wait_for_batch_seconds": Family("histogram", "Time the learner waited for a batch.", (), SECONDS),
    "learner_phase_seconds": Family("histogram", "Time of one phase of an update.", ("phase",), SECONDS),
    "trained_tokens_total": Family("counter", "Response tokens that entered the loss."),
    "grad_norm": Family("gauge", "Gradient norm of the last update, before clipping."),
    "loss": Family("gauge", "Component of the loss of the last update.", ("term",)),
    "entropy_nats": Family("gauge", "Mean token entropy of the policy in the last batch."),
    "sampler_gap_mean": Family("gauge", "Mean absolute log-prob gap of sampler and learner on fresh samples."),
    "sampler_gap_max": Family("gauge", "Largest absolute log-prob gap of sampler and learner on fresh samples."),
    "opd_gate_mean": Family("gauge", "Mean distillation gate over the tokens of the last batch."),
    "opd_active_ratio": Family("gauge", "Share of the last batch's trajectories with a distillation term."),
    "opd_gate_above_half_ratio": Family("gauge", "Share of the tokens with a skill that the skill makes likelier."),
    "opd_gap_nats": Family("gauge", "Log-prob shift under the skill in the last batch: mean, rms.", ("statistic",)),
    "opd_staleness_bias_ratio": Family(
        "gauge", "Bias over signal of an unweighted distillation term; above 0.3 the importance weight is needed."
    ),
    "masked_rows_total": Family("counter", "Rows without a distillation term that should have one.", ("reason",)),
    "masked_tokens_total": Family(
        "counter", "Response tokens too old for any term (stale), or without a distillation term.", ("reason",)
    ),
    "updates_without_tokens_total": Family("counter", "Updates whose every token was too old: nothing was trained."),
    "kl_nats": Family("gauge", "Mean k3 estimate of the divergence from the reference in the last batch."),
    "clip_ratio": Family("gauge", "Share of the last batch's tokens at a clip: ratio, dual.", ("bound",)),
    "importance_weight": Family("gauge", "Truncated importance weights of the last batch: mean, max.", ("statistic",)),
    "importance_truncated_ratio": Family("gauge", "Share of the last batch's tokens whose weight was truncated."),
    "effective_sample_ratio": Family("gauge", "Effective sample size over the tokens of the last batch."),
    "zero_variance_groups": Family("gauge", "Groups of the last batch whose advantages are all 0."),
    # Buffer
    "trajectories_total": Family(
        "counter",
        "Trajectories by what became of them: leased, accepted, duplicate, fenced, returned, failed, trained.",
        ("status",),
    ),
    "trajectories_dropped_total": Family("counter", "Accepted trajectories that were never trained.", ("reason",)),
    "trained_length_ratio": Family("gauge", "Mean tokens trained over mean tokens played; below 1 long ones are lost."),
    "trained_token_ratio": Family("gauge", "Tokens trained over tokens of all trajectories that have ended."),
    "slowest_decile_trained_ratio": Family(
        "gauge", "Share of the tokens of the longest tenth that is trained, by seconds or by tokens.", ("by",)
    ),
    "trajectories_buffered": Family("gauge", "Accepted trajectories that wait to be trained."),
    "trajectories_running": Family("gauge", "Leases out with actors."),
    "groups_dropped_total": Family("counter", "Groups that were never trained.", ("reason",)),
    "trajectory_age_versions": Family(
        "histogram",
        "Versions that passed while a trajectory was in_flight, in_queue, and in all up to its training (total).",
        ("stage",),
        AGES,
    ),
    "trajectory_age_oldest_versions": Family("gauge", "Largest age in the last batch."),
    # Analyzer
    "analyses_total": Family("counter", "Analyses by result: parsed, unparsed, timeout.", ("result",)),
    "analysis_parse_ratio": Family("gauge", "Share of recent analyses that parsed."),
    "analyzer_queue": Family("gauge", "Trajectories that wait for an analyzer."),
    # Environment and evaluation actors
    "episodes_total": Family("counter", "Finished episodes by outcome: won, lost, truncated.", ("outcome",)),
    "episodes_failed_total": Family(
        "counter", "Episodes without a result by kind: timeout, died, raised, garbage, or a named error.", ("kind",)
    ),
    "environment_steps_total": Family("counter", "Environment steps."),
    "invalid_actions_total": Family("counter", "Steps whose action did not parse or was not understood."),
    "episode_seconds": Family("histogram", "Length of an episode.", (), SECONDS),
    "evaluation_success_ratio": Family("gauge", "Share of games won in the last complete evaluation."),
    "evaluation_games": Family("gauge", "Games in the last complete evaluation."),
    # Generation
    "generation_running": Family("gauge", "Requests that are decoding."),
    "generation_waiting": Family("gauge", "Requests that wait for a slot."),
    "generated_tokens_total": Family("counter", "Sampled tokens."),
    "prefilled_tokens_total": Family("counter", "Prompt tokens computed."),
    "cached_tokens_total": Family("counter", "Prompt tokens served from the prefix cache."),
    "http_requests_total": Family("counter", "Requests to the HTTP endpoint by the status of the answer.", ("status",)),
    "requests_moved_total": Family("counter", "Generation requests taken from a silent policy server to another one."),
    # Any role
    "rejected_frames_total": Family("counter", "Messages refused or not delivered.", ("reason",)),
    "event_loop_lag_seconds": Family("gauge", "How late the event loop last woke."),
}


class Metrics:
    """The metrics of one role process, in a registry of its own."""

    def __init__(self, role: str, instance: str) -> None:
        """`role` and `instance` name the target file and label the target."""
        for part in (role, instance):
            if not re.fullmatch(r"[A-Za-z0-9_.-]+", part):
                raise ValueError(f"{part!r} is no name of letters, digits, '_', '.' and '-'")
        # Otherwise each counter brings a `_created` family that no panel uses; the switch is global in the library.
        prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]  # the library has no annotation
        self.registry = CollectorRegistry()
        self._role = role
        self._instance = instance
        self._families: dict[str, Counter | Gauge | Histogram] = {}
        self._lock = threading.Lock()
        self._totals: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}

    def counter(self, name: str, **labels: str) -> Counter:
        """Return a declared counter, with its labels applied. Raises KeyError for any other name."""
        metric: Counter = self._get("counter", name, labels)
        return metric

    def gauge(self, name: str, **labels: str) -> Gauge:
        """Return a declared gauge, with its labels applied. Raises KeyError for any other name."""
        metric: Gauge = self._get("gauge", name, labels)
        return metric

    def histogram(self, name: str, **labels: str) -> Histogram:
        """Return a declared histogram, with its labels applied. Raises KeyError for any other name."""
        metric: Histogram = self._get("histogram", name, labels)
        return metric

    def advance(self, name: str, total: float, **labels: str) -> None:
        """Bring a counter up to a total that is counted elsewhere; a smaller total means that count began anew."""
        key = (name, tuple(sorted(labels.items())))
        last = self._totals.get(key, 0.0)
        self.counter(name, **labels).inc(total - last if total >= last else total)
        self._totals[key] = total

    def serve(self, targets_dir: Path, host: str = "127.0.0.1") -> int:
        """Serve /metrics on a free port until the process ends, announce it in `targets_dir`, return the port."""
        server, _thread = prometheus_client.start_http_server(0, addr=host, registry=self.registry)
        port = int(server.server_port)
        target = {
            "targets": [f"{host}:{port}"],
            "labels": {"role": self._role, "instance_name": self._instance},
        }
        targets_dir.mkdir(parents=True, exist_ok=True)
        path = targets_dir / f"{self._role}-{self._instance}.json"
        # Prometheus reads *.json at any moment: it must never see half a file.
        temporary = path.with_suffix(f".{os.getpid()}.tmp")
        temporary.write_text(json.dumps([target]) + "\n", encoding="utf-8")
        temporary.replace(path)
        return port

    def _get(self, kind: Kind, name: str, labels: Mapping[str, str]) -> Any:
        family = FAMILIES[name]
        if family.kind != kind:
            raise KeyError(f"{name} is a {family.kind}, not a {kind}")
        with self._lock:
            if name not in self._families:
                self._families[name] = _register(name, family, self.registry)
        metric = self._families[name]
        return metric.labels(**labels) if family.labels or labels else metric


def _register(name: str, family: Family, registry: CollectorRegistry) -> Counter | Gauge | Histogram:
    if family.kind == "histogram":
        return Histogram(PREFIX + name, family.help, family.labels, registry=registry, buckets=family.buckets)
    plain = Counter if family.kind == "counter" else Gauge
    return plain(PREFIX + name, family.help, family.labels, registry=registry)


class Target(NamedTuple):
    """One announced /metrics endpoint."""

    address: str
    role: str
    instance: str


def read_targets(targets_dir: Path) -> list[Target]:
    """Return the endpoints announced in `targets_dir`, in the order of their file names; some may be dead."""
    targets = []
    for path in sorted(targets_dir.glob("*.json")):
        for entry in json.loads(path.read_text(encoding="utf-8")):
            labels = entry["labels"]
            targets += [Target(address, labels["role"], labels["instance_name"]) for address in entry["targets"]]
    return targets


def scrape(address: str, timeout_s: float = 2.0) -> dict[str, float]:
    """Read the samples of the endpoint at HOST:PORT as {'name{label="value"}': value}. Raises OSError if it is dead.

    Goes straight to the address: proxies of the environment do not apply.
    """
    with contextlib.closing(http.client.HTTPConnection(address, timeout=timeout_s)) as connection:
        connection.request("GET", "/metrics")
        response = connection.getresponse()
        text = response.read().decode()
        if response.status != 200:
            raise ConnectionError(f"{address} answered {response.status} {response.reason}")
    samples = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = ",".join(f'{name}="{value}"' for name, value in sorted(sample.labels.items()))
            samples[f"{sample.name}{{{labels}}}" if labels else sample.name] = float(sample.value)
    return samples
