"""Learner: one joint update a batch, then the new weights go out.

Consumes batches of whole groups (buffer). Waits for a batch, and after each update until the policy servers hold the
new version. Produces weight versions, metrics.jsonl and, at the end, the exported policy. Unblocked by the buffer and
by acknowledgements, each wait with its deadline. Stops after the last update, when its time is up, or on SIGTERM.
"""

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from seed_async.journal import Journal, read_journal
from seed_async.learner.checkpoint import CheckpointWriter, newest_checkpoint, restore, take_snapshot
from seed_async.learner.export import export_policy
from seed_async.learner.scoring import load_policy, max_context_tokens
from seed_async.learner.step import update
from seed_async.learner.update_rows import check_ages, loss_config, trained_ages, update_batch
from seed_async.messages import Batch, BatchRequest, Finished, Message, RunFinished
from seed_async.role import RoleContext
from seed_async.skill_library import library_of
from seed_async.staleness import StalenessBound
from seed_async.text import ChatTokenizer
from seed_async.topology import Optimizer
from seed_async.transport import TransportTimeoutError
from seed_async.weights import open_publisher

PULSE_INTERVAL_S = 1.0


def numpy_weights(model: PreTrainedModel) -> dict[str, np.ndarray]:
    """Views of all parameters, tied ones once; bfloat16 as its bits in uint16."""
    return {
        name: (
            parameter.detach().view(torch.uint16) if parameter.dtype == torch.bfloat16 else parameter.detach()
        ).numpy()
        for name, parameter in model.named_parameters()
    }


def learning_rate(version: int, optimizer: Optimizer) -> float:
    """The rate of the update from `version`: lr * min(1, (version + 1) / warmup_updates)."""
    return optimizer.lr * min(1.0, (version + 1) / max(1, optimizer.warmup_updates))


def newest_published(journal: Path) -> int:
    """The newest version that any learner of this run has handed out; -1 for none."""
    entries = read_journal(journal) if journal.is_file() else ()
    return max((entry.version for entry in entries if entry.event == "published"), default=-1)


class Learner:
    """The policy, its reference and optimizer, the publisher, and the way to the buffer."""

    def __init__(self, context: RoleContext) -> None:
        """Load the checkpoint as policy and, if the loss needs one, as reference."""
        topology, run_dir = context.topology, context.run_dir
        self._context, self._topology = context, topology
        self._bound = StalenessBound(topology.staleness.max, topology.rollout.groups_per_update)
        checkpoint = run_dir.initial_model(topology)
        self._tokenizer = ChatTokenizer.load(checkpoint)
        recompute = topology.roles.learner.activation_checkpointing
        self._policy = load_policy(checkpoint, activation_checkpointing=recompute)
        context.pulse.step()
        self._reference = load_policy(checkpoint).requires_grad_(False) if topology.loss.kl_coef > 0 else None
        context.pulse.step()
        for model in filter(None, (self._policy, self._reference)):
            model.base_model.register_forward_hook(lambda *_: context.pulse.beat())  # each micro-batch is a turn
        self._optimizer = torch.optim.AdamW(
            self._policy.parameters(),
            lr=topology.optimizer.lr,
            betas=topology.optimizer.betas,
            weight_decay=topology.optimizer.weight_decay,
        )
        self._config = loss_config(topology)
        self._library = library_of(topology)
        self._first_batch_s: float | None = None
        self._publisher = open_publisher(context)
        self._buffer = context.connect(run_dir.buffer_endpoint(topology), "buffer-0")
        self._metrics_file = run_dir.metrics.open("a")
        self._training_s = 0.0
        self._saved = 0
        self._checkpoints = CheckpointWriter(run_dir.checkpoints, topology.checkpoint.keep)
        self._journal = Journal(run_dir.trained)

    def run(self) -> None:
        """Update until the end of the run, export the policy, wait for its evaluation."""
        version = self._start()
        self._publish(version)
        while version < self._topology.run.updates:
            waiting_since_s = time.monotonic()
            batch = self._fetch(version)
            if batch is None:
                break
            wait_s = time.monotonic() - waiting_since_s
            metrics = self._train(batch, version)
            version += 1
            self._save(version, due=version % (self._topology.checkpoint.every or 1) == 0)
            publish_s = self._publish(version)
            self._record(batch, version, metrics | {"wait_s": wait_s, "publish_s": publish_s})
        self._save(version, due=True)
        self._checkpoints.wait()
        export_policy(self._policy, self._context.run_dir.initial_model(self._topology), self._context.run_dir.final)
        self._finish(version)
        self._publisher.close()
        self._buffer.close()
        self._metrics_file.close()
        self._journal.close()

    def _start(self) -> int:
        """Return the version to begin with: 0, or where a learner before this one has left off.

        Versions never go back: weights of a checkpoint older than what was published get the next number.
        """
        log, weights = self._context.log, 0
        found = newest_checkpoint(self._context.run_dir.checkpoints, lambda fault: log.warning(fault))
        if found is not None:
            folder, manifest = found
            restore(folder, self._policy, self._optimizer)
            weights, self._training_s = manifest.version, manifest.training_s
            self._saved = weights
            self._context.pulse.step()
        published = newest_published(self._context.run_dir.trained)
        version = weights if weights >= published else published + 1
        if published >= 0:
            log.warning("going on", version=version, weights=weights, published=published)
        self._journal.note("started", version=version, weights=weights)
        return version

    def _save(self, version: int, *, due: bool) -> None:
        """Begin to write a checkpoint of `version` when one is due and wanted at all."""
        if due and self._topology.checkpoint.every and version > self._saved:
            self._saved = version
            with self._context.timeline.span("checkpoint", version):
                self._checkpoints.submit(take_snapshot(version, self._elapsed_s(), self._policy, self._optimizer))

    def _elapsed_s(self) -> float:
        """Seconds of training so far; the clock starts when the first batch can be trained."""
        return self._training_s + (time.monotonic() - self._first_batch_s if self._first_batch_s else 0.0)

    def _over(self) -> bool:
        limit = self._topology.run.max_minutes
        return self._context.stop.is_set() or (limit is not None and self._elapsed_s() > limit * 60)

    def _fetch(self, version: int) -> Batch | None:
        """Wait for the batch of the next update; None when told to stop or when the run's time is up.

        What the buffer hands out counts as trained, so the end is looked at before asking and never after.
        """
        with (
            self._context.timeline.span("wait", version),
            self._context.metrics.histogram("wait_for_batch_seconds").time(),
        ):
            while not self._over():
                reply = self._ask(BatchRequest(version=version))
                if isinstance(reply, Batch) and reply.samples:
                    self._first_batch_s = self._first_batch_s or time.monotonic()
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

    def _train(self, batch: Batch, version: int) -> dict[str, float]:
        started_s = time.monotonic()
        with self._context.timeline.span("train", version):
            rows, masked = update_batch(
                batch.samples,
                version,
                self._tokenizer,
                self._topology,
                max_context_tokens(self._policy),
                self._library,
            )
            check_ages(batch.samples, rows, version, self._bound)
            for group in self._optimizer.param_groups:
                group["lr"] = learning_rate(version, self._topology.optimizer)
            metrics = update(rows, self._config, self._policy, self._reference, self._optimizer)
        for sample, trajectory in zip(batch.samples, rows.trajectories, strict=True):
            self._journal.note(
                "trained",
                trajectory=sample.trajectory.trajectory_id,
                version=version,
                num_tokens=int(trajectory.trained.sum()),
            )
        return metrics | masked | {"step_s": time.monotonic() - started_s}

    def _publish(self, version: int) -> float:
        """Publish the policy as `version` and wait until the policy servers serve it; returns the seconds it took."""
        started_s = time.monotonic()
        self._journal.note("published", version=version)
        with self._context.timeline.span("publish", version):
            self._publisher.publish(version, numpy_weights(self._policy))
            replicas = self._topology.roles.policy.replicas
            timeout_s = self._topology.supervision.replacement_timeout_s
            for name in self._publisher.wait_acknowledged(
                version, "policy", replicas, timeout_s, self._context.stop, self._context.pulse.beat
            ):
                self._context.metrics.counter("weight_receivers_evicted_total").inc()
                self._context.log.warning("weight receiver given up", receiver=name, version=version)
        self._context.metrics.gauge("policy_version").set(version)
        return time.monotonic() - started_s

    def _record(self, batch: Batch, version: int, metrics: dict[str, float]) -> None:
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

    def _finish(self, version: int) -> None:
        """Say that this was the last version; wait until its evaluation is done."""
        while not self._context.stop.is_set():
            reply = self._ask(RunFinished(version=version))
            if isinstance(reply, Finished) and reply.done:
                return


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


def run(context: RoleContext) -> None:
    """Run the learner."""
    torch.set_num_threads(context.topology.roles.learner.threads)
    Learner(context).run()
