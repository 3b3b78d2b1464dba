"""Learner: one joint update a batch, then the new weights go out.

Consumes batches of whole groups (buffer). Waits for a batch, and after each update until the policy servers hold the
new version. Produces weight versions, metrics.jsonl and, at the end, the exported policy. Unblocked by the buffer and
by acknowledgements, each wait with its deadline. Stops after the last update, when its time is up, or on SIGTERM.
"""

import json
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from seed_async.journal import Journal
from seed_async.layouts import TokenRow, plain_rows, teacher_rows
from seed_async.learner.algorithms.methods import Method, get_method
from seed_async.learner.batch import LossConfig, UpdateBatch, UpdateTrajectory
from seed_async.learner.export import export_policy
from seed_async.learner.scoring import load_policy
from seed_async.learner.step import update
from seed_async.messages import Batch, BatchRequest, Finished, RunFinished, Sample
from seed_async.role import RoleContext
from seed_async.skill_library import SkillLibrary, library_of
from seed_async.staleness import StalenessBound
from seed_async.text import ChatTokenizer
from seed_async.topology import Topology
from seed_async.transport import Client, Server
from seed_async.weights import SegmentStore, WeightPublisher

JOIN_TIMEOUT_S = 180.0
"""A policy server that starts, or starts again, loads torch and the model first: a minute on a busy laptop."""
BUFFER_TIMEOUT_S = 60.0
"""The buffer answers within seconds; a minute of silence means that it is gone."""


class StaleBatchError(RuntimeError):
    """A batch with a trajectory older than the bound, which must never be trained."""


def loss_config(topology: Topology) -> LossConfig:
    """The update's hyper-parameters as the topology gives them."""
    loss, optimizer = topology.loss, topology.optimizer
    return LossConfig(
        method=topology.method,
        clip=loss.clip,
        dual_clip=loss.dual_clip,
        importance_cap=loss.importance_cap,
        synchronous=topology.staleness.max == 0,
        opd_beta=loss.opd_beta,
        opd_coef=loss.opd_coef,
        opd_gate=loss.opd_gate,
        opid_coef=loss.opid_coef,
        opsd_coef=loss.opsd_coef,
        opsd_rl=loss.opsd_rl,
        gigpo_discount=loss.gigpo_discount,
        gigpo_step_weight=loss.gigpo_step_weight,
        kl_coef=loss.kl_coef,
        entropy_coef=loss.entropy_coef,
        invalid_penalty=loss.invalid_penalty,
        divide_by_std=loss.divide_by_std,
        statistics=loss.statistics,
        temperature=topology.rollout.temperature,
        max_grad_norm=optimizer.max_grad_norm,
        token_budget=optimizer.token_budget,
        mini_batch_trajectories=optimizer.mini_batch_trajectories,
    )


def numpy_weights(model: PreTrainedModel) -> dict[str, np.ndarray]:
    """Views of all parameters, tied ones once; bfloat16 as its bits in uint16."""
    return {
        name: (
            parameter.detach().view(torch.uint16) if parameter.dtype == torch.bfloat16 else parameter.detach()
        ).numpy()
        for name, parameter in model.named_parameters()
    }


def teacher_skill(sample: Sample, method: Method, library: SkillLibrary | None) -> tuple[str, dict[int, str]]:
    """The skill of the teacher's contexts, empty for none, and the step skills that replace it, by turn."""
    if method.has_teacher and sample.skill is not None:
        steps = {step.step: step.skill for step in sample.skill.step_skills} if method.step_skills else {}
        return sample.skill.episode_skill, steps
    if method.uses_library and library is not None:
        return library.skill(sample.trajectory.task_type) or "", {}
    return "", {}


def update_batch(
    samples: Sequence[Sample],
    version: int,
    tokenizer: ChatTokenizer,
    topology: Topology,
    max_skill_tokens: int,
    library: SkillLibrary | None = None,
) -> tuple[UpdateBatch, dict[str, float]]:
    """Turn received samples into an update's rows.

    Returns also the counts of what the distillation has to leave out: `masked_rows_REASON` and `masked_tokens_REASON`,
    rows and response tokens without a teacher because their trajectory has no skill (by the sample's reason)
    or because the augmented row is over `max_skill_tokens` (`over_long`).
    """
    method = get_method(topology.method)
    observation_ids: dict[str, int] = {}
    masked: Counter[str] = (
        Counter(masked_rows_over_long=0, masked_tokens_over_long=0) if method.has_teacher else Counter()
    )
    trajectories = []
    for sample in samples:
        trajectory = sample.trajectory
        plain = plain_rows(trajectory)
        skill: tuple[TokenRow, ...] = ()
        episode_skill, step_skills = teacher_skill(sample, method, library)
        if episode_skill:
            teacher = teacher_rows(trajectory, episode_skill, step_skills, tokenizer, max_skill_tokens)
            skill = teacher.rows
            masked["masked_rows_over_long"] += teacher.rows_left_out
            masked["masked_tokens_over_long"] += teacher.tokens_left_out
        elif method.has_teacher:
            reason = sample.skill_reason or "no_skill"
            masked[f"masked_rows_{reason}"] += len(plain)
            masked[f"masked_tokens_{reason}"] += sum(row.turn_index.size for row in plain)
        turns = trajectory.turns
        trajectories.append(
            UpdateTrajectory(
                plain=plain,
                behaviour_logprob=np.concatenate([turn.behaviour_logprob for turn in turns]),
                fresh=np.concatenate([turn.versions for turn in turns]) == version,
                invalid=np.array([not turn.parsed for turn in turns]),
                observation_ids=np.array(
                    [observation_ids.setdefault(turn.observation, len(observation_ids)) for turn in turns]
                ),
                episode_return=trajectory.episode_return * topology.loss.reward_scale,
                group_id=trajectory.group_id,
                skill=skill,
            )
        )
    return UpdateBatch(tuple(trajectories)), {name: float(count) for name, count in masked.items()}


class Learner:
    """The policy, its reference and optimizer, the publisher, and the way to the buffer."""

    def __init__(self, context: RoleContext) -> None:
        """Load the checkpoint as policy and, if the loss needs one, as reference."""
        topology, run_dir = context.topology, context.run_dir
        self._context, self._topology = context, topology
        self._bound = StalenessBound(topology.staleness.max, topology.rollout.groups_per_update)
        checkpoint = run_dir.initial_model(topology)
        self._tokenizer = ChatTokenizer.load(checkpoint)
        self._policy = load_policy(checkpoint)
        self._reference = load_policy(checkpoint).requires_grad_(False) if topology.loss.kl_coef > 0 else None
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
        self._publisher = WeightPublisher(Server(run_dir.weights_endpoint(topology)), SegmentStore(run_dir.segments()))
        self._buffer = Client(run_dir.buffer_endpoint(topology), context.name)
        self._metrics_file = run_dir.metrics.open("a")
        self._journal = Journal(run_dir.trained)

    def run(self) -> None:
        """Update until the end of the run, export the policy, wait for its evaluation."""
        version = 0
        self._publish(version)
        while version < self._topology.run.updates:
            waiting_since_s = time.monotonic()
            batch = self._fetch(version)
            if batch is None:
                break
            wait_s = time.monotonic() - waiting_since_s
            metrics = self._train(batch, version)
            for sample in batch.samples:
                self._journal.note("trained", trajectory=sample.trajectory.trajectory_id, version=version)
            version += 1
            publish_s = self._publish(version)
            self._record(batch, version, metrics | {"wait_s": wait_s, "publish_s": publish_s})
        export_policy(self._policy, self._context.run_dir.initial_model(self._topology), self._context.run_dir.final)
        self._finish(version)
        self._publisher.close()
        self._buffer.close()
        self._metrics_file.close()
        self._journal.close()

    def _over(self) -> bool:
        limit = self._topology.run.max_minutes
        if limit is None or self._first_batch_s is None:
            return self._context.stop.is_set()
        return self._context.stop.is_set() or time.monotonic() - self._first_batch_s > limit * 60

    def _fetch(self, version: int) -> Batch | None:
        """Wait for the batch of the next update; None when told to stop or when the run's time is up.

        What the buffer hands out counts as trained, so the end is looked at before asking and never after.
        """
        with (
            self._context.timeline.span("wait", version),
            self._context.metrics.histogram("wait_for_batch_seconds").time(),
        ):
            while not self._over():
                self._context.pulse.beat()
                reply = self._buffer.call(BatchRequest(version=version), BUFFER_TIMEOUT_S)
                if isinstance(reply, Batch) and reply.samples:
                    self._check_ages(reply)
                    # The clock of the run's time limit starts when the first batch can be trained.
                    self._first_batch_s = self._first_batch_s or time.monotonic()
                    return reply
        return None

    def _check_ages(self, batch: Batch) -> None:
        """The bound once more, just before the forward pass. Raises StaleBatchError: the buffer broke its promise."""
        for sample in batch.samples:
            if not self._bound.admits(batch.version, sample.trajectory.oldest_version):
                raise StaleBatchError(
                    f"trajectory {sample.trajectory.trajectory_id} of version {sample.trajectory.oldest_version} came "
                    f"for the update from version {batch.version}: older than {self._bound.max_staleness}"
                )

    def _train(self, batch: Batch, version: int) -> dict[str, float]:
        started_s = time.monotonic()
        with self._context.timeline.span("train", version):
            rows, masked = update_batch(
                batch.samples,
                version,
                self._tokenizer,
                self._topology,
                self._policy.config.max_position_embeddings,
                self._library,
            )
            metrics = update(rows, self._config, self._policy, self._reference, self._optimizer)
        return metrics | masked | {"step_s": time.monotonic() - started_s}

    def _publish(self, version: int) -> float:
        """Publish the policy as `version` and wait until the policy servers serve it; returns the seconds it took."""
        started_s = time.monotonic()
        with self._context.timeline.span("publish", version):
            self._publisher.publish(version, numpy_weights(self._policy))
            replicas = self._topology.roles.policy.replicas
            for name in self._publisher.wait_acknowledged(
                version, "policy", replicas, JOIN_TIMEOUT_S, self._context.stop, self._context.pulse.beat
            ):
                self._context.metrics.counter("weight_receivers_evicted_total").inc()
                self._context.log.warning("weight receiver given up", receiver=name, version=version)
        self._context.metrics.gauge("policy_version").set(version)
        return time.monotonic() - started_s

    def _record(self, batch: Batch, version: int, metrics: dict[str, float]) -> None:
        trajectories = [sample.trajectory for sample in batch.samples]
        ages = [batch.version - trajectory.oldest_version for trajectory in trajectories]
        line: dict[str, Any] = {"version": version, "time_s": time.time()} | metrics
        line |= {
            "age_mean": float(np.mean(ages)),
            "age_max": max(ages),
            "reward_mean": float(np.mean([trajectory.episode_return for trajectory in trajectories])),
            "success": float(np.mean([trajectory.won for trajectory in trajectories])),
            "turns_mean": float(np.mean([len(trajectory.turns) for trajectory in trajectories])),
        }
        if self._topology.uses_skills:
            line["parse_rate"] = float(np.mean([sample.skill is not None for sample in batch.samples]))
        self._metrics_file.write(json.dumps(line) + "\n")
        self._metrics_file.flush()
        report_update(self._context, line)

    def _finish(self, version: int) -> None:
        """Say that this was the last version; wait until its evaluation is done."""
        while not self._context.stop.is_set():
            self._context.pulse.beat()
            reply = self._buffer.call(RunFinished(version=version), BUFFER_TIMEOUT_S)
            if isinstance(reply, Finished) and reply.done:
                return


def report_update(context: RoleContext, line: dict[str, Any]) -> None:
    """Bring one line of metrics.jsonl into the learner's /metrics."""
    metrics = context.metrics
    metrics.counter("updates_total").inc()
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
        elif key.startswith("seconds_"):
            metrics.histogram("learner_phase_seconds", phase=key.removeprefix("seconds_")).observe(value)


def run(context: RoleContext) -> None:
    """Run the learner."""
    torch.set_num_threads(context.topology.roles.learner.threads)
    Learner(context).run()
