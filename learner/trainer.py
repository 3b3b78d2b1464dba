"""Learner: one joint update a batch, then the new weights go out.

Consumes batches of whole groups (buffer). Waits for a batch, and after each update until the policy servers hold the
new version. Produces weight versions, metrics.jsonl and, at the end, the exported policy. Unblocked by the buffer and
by acknowledgements, each wait with its deadline. Stops after the last update, when its time is up, or on SIGTERM.

With several ranks every one of them runs this loop, in step: the first leads (`leader`), the others are told.
"""

import os
import time

import torch

from seed_async.adapters import add_adapters
from seed_async.learner.adapters import choose_parameters
from seed_async.learner.checkpoint import (
    CheckpointWriter,
    newest_checkpoint,
    restore,
    take_snapshot,
    trained_parameters,
)
from seed_async.learner.export import export_weights
from seed_async.learner.leader import Leader
from seed_async.learner.ranks import Ranks
from seed_async.learner.scoring import load_policy, max_context_tokens, score_canary
from seed_async.learner.step import update
from seed_async.learner.update_rows import check_ages, loss_config, update_batch
from seed_async.messages import Batch
from seed_async.role import GROUP, RoleContext
from seed_async.skill_library import library_of
from seed_async.staleness import StalenessBound
from seed_async.text import ChatTokenizer
from seed_async.topology import Optimizer


def learning_rate(version: int, optimizer: Optimizer) -> float:
    """The rate of the update from `version`: lr * min(1, (version + 1) / warmup_updates)."""
    return optimizer.lr * min(1.0, (version + 1) / max(1, optimizer.warmup_updates))


class Learner:
    """The policy, its reference and optimizer, and for the leading rank the way to the rest of the system."""

    def __init__(self, context: RoleContext, ranks: Ranks) -> None:
        """Load the checkpoint as policy and, if the loss needs one, as reference."""
        topology, run_dir = context.topology, context.run_dir
        self._context, self._topology, self._ranks = context, topology, ranks
        self._bound = StalenessBound(topology.staleness.max, topology.rollout.groups_per_update)
        checkpoint = run_dir.initial_model(topology)
        self._tokenizer = ChatTokenizer.load(checkpoint)
        recompute = topology.roles.learner.activation_checkpointing
        policy = load_policy(checkpoint, activation_checkpointing=recompute)
        if topology.model.lora is not None:
            add_adapters(policy, topology.model.lora, topology.run.seed)
        self._policy = ranks.shard(policy)
        context.pulse.step()
        with_reference = topology.loss.kl_coef > 0
        self._reference = ranks.shard(load_policy(checkpoint).requires_grad_(False)) if with_reference else None
        context.pulse.step()
        for model in filter(None, (self._policy, self._reference)):
            model.base_model.register_forward_hook(lambda *_: context.pulse.beat())  # each micro-batch is a turn
        self._optimizer = torch.optim.AdamW(
            trained_parameters(self._policy).values(),
            lr=topology.optimizer.lr,
            betas=topology.optimizer.betas,
            weight_decay=topology.optimizer.weight_decay,
        )
        self._config = loss_config(topology)
        self._library = library_of(topology)
        self._first_batch_s: float | None = None
        self._training_s = 0.0
        self._saved = 0
        self._checkpoints = CheckpointWriter(run_dir.checkpoints, topology.checkpoint.keep, ranks.writers())
        self._leader = Leader(context) if ranks.leads else None

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
            if self._leader is not None:
                self._leader.record(batch, version, metrics | {"wait_s": wait_s, "publish_s": publish_s})
        self._save(version, due=True)
        self._checkpoints.wait()
        self._export()
        if self._leader is not None:
            self._leader.finish(version)
            self._leader.close()
        self._ranks.close()

    def _start(self) -> int:
        """Return the version to begin with: 0, or where a learner before this one has left off."""
        log, weights = self._context.log, 0
        found = newest_checkpoint(self._context.run_dir.checkpoints, lambda fault: log.warning(fault))
        if found is not None:
            folder, manifest = found
            restore(folder, self._policy, self._optimizer)
            weights, self._training_s = manifest.version, manifest.training_s
            self._saved = weights
            self._context.pulse.step()
        return self._ranks.tell_number(self._leader.first_version(weights) if self._leader is not None else 0)

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
        """Wait for the batch of the next update; None when told to stop or when the run's time is up."""
        batch = self._ranks.tell(self._leader.fetch(version, self._over) if self._leader is not None else None)
        if not isinstance(batch, Batch):
            return None
        self._first_batch_s = self._first_batch_s or time.monotonic()
        return batch

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
            metrics = update(rows, self._config, self._policy, self._reference, self._optimizer, self._ranks)
        if self._leader is not None:
            self._leader.note_trained(batch.samples, rows, version)
        return metrics | masked | {"step_s": time.monotonic() - started_s}

    def _publish(self, version: int) -> float:
        """Publish the policy as `version` and wait until the policy servers serve it; returns the seconds it took."""
        started_s = time.monotonic()
        weights = self._ranks.gather(self._policy, choose_parameters(self._topology.model))
        canary = score_canary(self._policy, self._config.compute_dtype)
        if self._leader is not None:
            self._leader.publish(version, weights, canary)
        return time.monotonic() - started_s

    def _export(self) -> None:
        weights, run_dir = self._ranks.gather(self._policy), self._context.run_dir
        if self._leader is not None:
            export_weights(weights, run_dir.initial_model(self._topology), run_dir.final)


def run(context: RoleContext) -> None:
    """Run one rank of the learner."""
    learner = context.topology.roles.learner
    torch.set_num_threads(learner.threads)
    meeting = context.run_dir.sockets() / f"learner-{os.environ.get(GROUP, '')}"
    interface = context.topology.weights.interface
    ranks = Ranks.join(context.index, learner.ranks, learner.device, meeting, interface, context.pulse.beat)
    Learner(context, ranks).run()
