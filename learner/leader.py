"""What the leading rank of a learner does for all: the way to the buffer, the publisher, the journal and the metrics.

The loop is `trainer`'s. Every wait here has its deadline, and beats the pulse meanwhile.
"""

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from seed_async.journal import Journal, read_journal
from seed_async.learner.batch import UpdateBatch
from seed_async.learner.update_rows import trained_ages
from seed_async.messages import Batch, BatchRequest, Canary, Finished, LearnerStarted, Message, RunFinished, Sample
from seed_async.role import RoleContext
from seed_async.staleness import StalenessBound
from seed_async.transport import TransportTimeoutError
from seed_async.weights import open_publisher

PULSE_INTERVAL_S = 1.0


def numpy_weights(weights: dict[str, torch.Tensor]) -> dict[str, np.ndarray]:
    """The same tensors as arrays, without a copy where they lie in CPU memory; bfloat16 as its bits in uint16."""
    return {
        name: (tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).cpu().numpy()
        for name, tensor in weights.items()
    }


def newest_published(journal: Path) -> int:
    """The newest version that any learner of this run has handed out; -1 for none."""
    entries = read_journal(journal) if journal.is_file() else ()
    return max((entry.version for entry in entries if entry.event == "published"), default=-1)


class Leader:
    """The learner's connections to the rest of the system; the other ranks have none."""

    def __init__(self, context: RoleContext) -> None:
        """Bind the publisher and connect to the buffer."""
        topology, run_dir = context.topology, context.run_dir
        self._context, self._topology = context, topology
        self._bound = StalenessBound(topology.staleness.max, topology.rollout.groups_per_update)
        self._publisher = open_publisher(context)
        self._buffer = context.connect(run_dir.buffer_endpoint(topology), "buffer-0")
        self._metrics_file = run_dir.metrics.open("a")
        self._published = newest_published(run_dir.trained)
        self._journal = Journal(run_dir.trained)

    def first_version(self, weights: int) -> int:
        """The number under which a learner goes on with the weights of version `weights`.

        Versions never go back: weights of a checkpoint older than what was published get the next number.
        """
        version = weights if weights >= self._published else self._published + 1
        if self._published >= 0:
            self._context.log.warning("going on", version=version, weights=weights, published=self._published)
        self._journal.note("started", version=version, weights=weights)
        # Before anybody samples with it: after a death it may be further on than the next one.
        self._ask(LearnerStarted(version=version))
        return version

    def fetch(self, version: int, over: Callable[[], bool]) -> Batch | None:
        """Wait for the batch of the next update; None once the run is `over`.

        What the buffer hands out counts as trained, so the end is looked at before asking and never after.
        """
        with (
            self._context.timeline.span("wait", version),
            self._context.metrics.histogram("wait_for_batch_seconds").time(),
        ):
            while not over():
                reply = self._ask(BatchRequest(version=version))
                if isinstance(reply, Batch) and reply.samples:
                    return reply
        return None

    def _ask(self, message: Message) -> Message:
        """Ask the buffer; this loop goes on turning meanwhile. Raises TransportTimeoutError."""
        timeout_s = self._topology.supervision.replacement_timeout_s
        sequence, deadline_s = self._buffer.submit(message), time.monotonic() + timeout_s
        while time.monotonic() < deadline_s:
            self._context.pulse.beat()
            for number, reply in self._buffer.poll(PULSE_INTERVAL_S):
                if number == sequence:
                    return reply
        raise TransportTimeoutError(f"no reply of the buffer to {type(message).__name__} in {timeout_s:.0f} s")

    def note_trained(self, samples: Sequence[Sample], rows: UpdateBatch, version: int) -> None:
        """Write down what the update from `version` has trained."""
        for sample, trajectory in zip(samples, rows.trajectories, strict=True):
            self._journal.add(
                "trained",
                trajectory=sample.trajectory.trajectory_id,
                version=version,
                num_tokens=int(trajectory.trained.sum()),
            )
        self._journal.commit()

    def publish(self, version: int, weights: dict[str, torch.Tensor], canary: Canary) -> None:
        """Publish `weights` as `version` and wait until the policy servers serve them."""
        self._journal.note("published", version=version)
        with self._context.timeline.span("publish", version):
            self._publisher.publish(version, numpy_weights(weights), canary)
            replicas = self._topology.roles.policy.replicas
            timeout_s = self._topology.supervision.replacement_timeout_s
            for name in self._publisher.wait_acknowledged(
                version, "policy", replicas, timeout_s, self._context.stop, self._context.pulse.beat
            ):
                self._context.metrics.counter("weight_receivers_evicted_total").inc()
                self._context.log.warning("weight receiver given up", receiver=name, version=version)
        self._context.metrics.gauge("policy_version").set(version)

    def record(self, batch: Batch, version: int, metrics: dict[str, float]) -> None:
        """Write the line of an update that has made `version`, and bring it into /metrics."""
        trajectories = [sample.trajectory for sample in batch.samples]
        ages = trained_ages(batch.samples, batch.version, self._bound)
        line: dict[str, Any] = {"version": version, "time_s": time.time()} | metrics
        line |= {
            "age_mean": float(np.mean(ages)) if ages else 0.0,
            "age_max": max(ages, default=0),
            "reward_mean": float(np.mean([trajectory.episode_return for trajectory in trajectories])),
            "success": float(np.mean([trajectory.won for trajectory in trajectories])),
            "turns_mean": float(np.mean([len(trajectory.texts) for trajectory in trajectories])),
        }
        if self._topology.uses_skills:
            line["parse_rate"] = float(np.mean([sample.skill is not None for sample in batch.samples]))
        self._metrics_file.write(json.dumps(line) + "\n")
        self._metrics_file.flush()
        report_update(self._context, line)

    def finish(self, version: int) -> None:
        """Say that this was the last version; wait until its evaluation is done."""
        while not self._context.stop.is_set():
            reply = self._ask(RunFinished(version=version))
            if isinstance(reply, Finished) and reply.done:
                return

    def close(self) -> None:
        """Close everything."""
        self._publisher.close()
        self._buffer.close()
        self._metrics_file.close()
        self._journal.close()


def report_update(context: RoleContext, line: dict[str, Any]) -> None:
    """Bring one line of metrics.jsonl into the learner's /metrics."""
    metrics = context.metrics
    metrics.counter("updates_total").inc()
    metrics.counter("updates_without_tokens_total").inc(not line["response_tokens"])
    metrics.counter("trained_tokens_total").inc(line["response_tokens"])
    metrics.gauge("trajectory_age_oldest_versions").set(line["age_max"])
    gauges = {
        "gradient_norm": "grad_norm",
        "entropy": "entropy_nats",
        "sampler_gap_mean": "sampler_gap_mean",
        "sampler_gap_max": "sampler_gap_max",
        "gate_mean": "opd_gate_mean",
        "opd_active_ratio": "opd_active_ratio",
        "gate_above_half_fraction": "opd_gate_above_half_ratio",
        "staleness_bias_ratio": "opd_staleness_bias_ratio",
        "kl": "kl_nats",
        "weight_truncated_fraction": "importance_truncated_ratio",
        "effective_sample_share": "effective_sample_ratio",
        "zero_variance_groups": "zero_variance_groups",
    }
    for key, gauge in gauges.items():
        if line.get(key) is not None:
            metrics.gauge(gauge).set(line[key])
    for statistic in ("mean", "rms"):
        metrics.gauge("opd_gap_nats", statistic=statistic).set(line[f"delta_{statistic}"])
    for statistic in ("mean", "max"):
        metrics.gauge("importance_weight", statistic=statistic).set(line[f"weight_{statistic}"])
    for bound, key in (("ratio", "clip_fraction"), ("dual", "dual_clip_fraction")):
        metrics.gauge("clip_ratio", bound=bound).set(line[key])
    for key, value in line.items():
        if key.startswith("loss_"):
            metrics.gauge("loss", term=key.removeprefix("loss_")).set(value)
        elif key.startswith("masked_rows_"):
            metrics.counter("masked_rows_total", reason=key.removeprefix("masked_rows_")).inc(value)
        elif key.startswith("masked_tokens_"):
            metrics.counter("masked_tokens_total", reason=key.removeprefix("masked_tokens_")).inc(value)
        elif key.startswith("seconds_"):
            metrics.histogram("learner_phase_seconds", phase=key.removeprefix("seconds_")).observe(value)
