"""The math of one update: a batch of trajectories in, gradients and new weights out. No process plumbing.

Consumes an `UpdateBatch` of whole groups; produces new weights in the policy model and a dictionary of metrics. It
stops at the first non-finite loss or gradient by raising `NonFiniteError`, before the weights are touched by it.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from seed_async.learner.algorithms.losses import (
    MetricSums,
    SeedLoss,
    TokenLogprobs,
    add_sums,
    metrics_from_sums,
    no_sums,
    seed_loss,
)
from seed_async.learner.algorithms.methods import get_method
from seed_async.learner.algorithms.terms import NonFiniteError, require_finite
from seed_async.learner.batch import LossConfig, UpdateBatch
from seed_async.learner.packing import plan_micro_batches
from seed_async.learner.ranks import Ranks
from seed_async.learner.scoring import IdleRow, score
from seed_async.learner.shares import share_of
from seed_async.learner.targets import (
    Clock,
    Denominators,
    TokenTargets,
    denominators,
    score_targets,
    token_advantages,
)


def update(
    batch: UpdateBatch,
    config: LossConfig,
    policy: PreTrainedModel,
    reference: PreTrainedModel | None,
    optimizer: torch.optim.Optimizer,
    ranks: Ranks | None = None,
) -> dict[str, float]:
    """One epoch over the batch: score, accumulate gradients, clip, step. Returns the metrics.

    With several `ranks`, each calls it with the same batch and its shards of the models; each does its share of the
    trajectories, and denominators, gradients and metrics are those of all.

    With a single mini-batch no optimizer step separates the proximal from the current weights, so that
    current.detach() *is* the proximal log-prob: rho is exactly 1, and the scoring pass is left out. With several
    mini-batches the proximal log-probs are scored once, before the first step. A batch with all its tokens too old
    leaves the weights as they are and has 0 optimizer steps.
    """
    clock, ranks = Clock(), ranks or Ranks()
    trajectories = batch.trajectories
    size = config.mini_batch_trajectories or len(trajectories)
    runs = [range(start, min(start + size, len(trajectories))) for start in range(0, len(trajectories), size)]
    # A mini-batch without a token to train has no loss, and gets no optimizer step.
    mini_batches = [run for run in runs if any(trajectories[index].trained.any() for index in run)]
    advantages = token_advantages(batch, config)
    if not mini_batches:
        return _metrics(batch, [], [], [], clock, ranks) | advantages.metrics
    share = share_of(batch, mini_batches, advantages, ranks.rank, ranks.size)
    most = partial(_most, ranks)
    targets = score_targets(
        share.batch,
        config,
        policy,
        reference,
        clock,
        with_proximal=len(mini_batches) > 1,
        advantages=share.advantages,
        most=most,
    )
    parts: list[SeedLoss] = []
    gaps: list[torch.Tensor] = []
    norms: list[float] = []
    for mini in share.mini_batches:
        optimizer.zero_grad(set_to_none=True)
        totals = Denominators(*ranks.total(torch.tensor(denominators(targets, mini))).tolist())
        with clock.phase("forward_backward"):
            losses, proximal = accumulate_gradients(share.batch, mini, targets, config, policy, totals, most)
        with clock.phase("optimizer"):
            norms.append(_clip_gradients(policy, config.max_grad_norm, ranks))
            optimizer.step()
        parts += losses
        behaviour = targets.behaviour[targets.offsets[mini.start] : targets.offsets[mini.stop]]
        own = [share.batch.trajectories[index] for index in mini]
        # Only trained tokens are scored for sure.
        fresh = np.concatenate([np.empty(0, bool), *(each.fresh & each.trained for each in own)])
        gaps.append((proximal - behaviour).abs()[torch.from_numpy(fresh).to(behaviour.device)])
    optimizer.zero_grad(set_to_none=True)
    return _metrics(batch, parts, gaps, norms, clock, ranks) | advantages.metrics


def _most(ranks: Ranks, count: int) -> int:
    return int(ranks.most(torch.tensor(count)))


def accumulate_gradients(
    batch: UpdateBatch,
    mini: range,
    targets: TokenTargets,
    config: LossConfig,
    policy: PreTrainedModel,
    totals: Denominators,
    most: Callable[[int], int] = int,
) -> tuple[list[SeedLoss], torch.Tensor]:
    """Add the gradient of the joint loss over the trajectories `mini` to the policy's gradients.

    One packed micro-batch at a time, its graph freed by its backward. `totals` count the whole optimizer batch, so the
    micro-batches' losses add up to its loss, or to this rank's share. One without a token to train is left out. Returns
    the losses, and the proximal log-probs [R], which where nothing was scored are those of the behaviour. `most`: see
    `scoring.score`; idle passes add nothing to any gradient.
    """
    rows = [row for index in mini for row in batch.trajectories[index].plain]
    ends = targets.offsets[mini.start] + np.cumsum([0] + [len(row.turn_index) for row in rows])
    plan = plan_micro_batches(rows, config.token_budget)
    parts = [slice(int(ends[micro.start]), int(ends[micro.stop])) for micro in plan]
    num_passes = sum(bool(targets.response_mask[part].any()) for part in parts)
    num_idle = most(num_passes) - num_passes
    losses, proximals = [], [targets.behaviour[:0]]
    for micro, part in zip(plan, parts, strict=True):
        if not targets.response_mask[part].any():
            proximals.append(targets.behaviour[part])
            continue
        scores = score(
            policy,
            rows[micro.start : micro.stop],
            temperature=config.temperature,
            token_budget=config.token_budget,
            compute_dtype=config.compute_dtype,
        )
        loss = _loss_of_part(scores.logprob, scores.entropy, targets, part, config, totals)
        require_finite("loss", loss.total.detach())
        loss.total.backward()  # type: ignore[no-untyped-call]
        losses.append(loss._replace(total=loss.total.detach()))
        proximals.append(scores.logprob.detach() if targets.proximal is None else targets.proximal[part])
    for _ in range(num_idle):
        idle = score(policy, [IdleRow()], temperature=config.temperature, token_budget=config.token_budget)
        (0.0 * idle.logprob.sum()).backward()  # type: ignore[no-untyped-call]
    return losses, torch.cat(proximals)


def _loss_of_part(
    current: torch.Tensor,
    entropy: torch.Tensor,
    targets: TokenTargets,
    part: slice,
    config: LossConfig,
    totals: Denominators,
) -> SeedLoss:
    """The joint loss of the response tokens `part`, of which `current` and `entropy` [tokens of the part] are given."""

    def cut(values: torch.Tensor | None) -> torch.Tensor | None:
        return None if values is None else values[part]

    logprobs = TokenLogprobs(
        current=current,
        proximal=current.detach() if targets.proximal is None else targets.proximal[part],
        behaviour=None if config.synchronous else targets.behaviour[part],
        reference=cut(targets.reference),
        skill=cut(targets.skill),
    )
    skill_mask = targets.skill_mask[part]
    method = get_method(config.method)
    return seed_loss(
        logprobs,
        entropy,
        targets.advantage[part],
        targets.response_mask[part],
        skill_mask,
        response_denominator=totals.response,
        skill_denominator=totals.skill,
        clip=config.clip,
        dual_clip=config.dual_clip,
        importance_cap=config.importance_cap,
        beta=config.opd_beta,
        gate=config.opd_gate,
        distillation=method.distillation,
        distillation_coef=config.opsd_coef if method.distillation == "reverse_kl" else config.opd_coef,
        skill_advantage_coef=config.opid_coef if "skill_shift" in method.advantage else 0.0,
        kl_coef=config.kl_coef,
        entropy_coef=config.entropy_coef,
    )


def _clip_gradients(policy: PreTrainedModel, max_norm: float, ranks: Ranks) -> float:
    """Scale the gradients down to `max_norm`; returns the norm before, refuses one that is not finite."""
    norm = float(ranks.whole(torch.nn.utils.clip_grad_norm_(policy.parameters(), max_norm)))
    if not np.isfinite(norm):
        raise NonFiniteError(f"the gradient norm is {norm}; the weights are unchanged")
    return norm


def _metrics(
    batch: UpdateBatch,
    parts: list[SeedLoss],
    gaps: list[torch.Tensor],
    norms: list[float],
    clock: Clock,
    ranks: Ranks,
) -> dict[str, float]:
    """Every metric of the update as a plain float, over all ranks; losses are means over its optimizer steps.

    Without a step everything is 0. `sampler_gap_*`, |proximal - behaviour| on fresh tokens (`gaps`, a part a step), is
    left out when no token is fresh.
    """
    own = add_sums([part.sums for part in parts]) if parts else no_sums()
    added = ranks.total(torch.stack([value.double().cpu() for value in own]))
    sums = MetricSums(*added)._replace(weight_max=ranks.most(own.weight_max.cpu()))
    tensors: dict[str, Any] = dict(metrics_from_sums(sums))
    for name in ("total", "policy", "entropy", "kl", "distillation"):
        loss = sum((getattr(part, name).double().cpu() for part in parts), torch.zeros((), dtype=torch.float64))
        tensors[f"loss_{name}"] = ranks.total(loss) / max(len(norms), 1)
    fresh = torch.cat([torch.zeros(0), *(gap.cpu() for gap in gaps)])
    num_fresh = int(ranks.total(torch.tensor(fresh.numel())))
    if num_fresh:
        tensors["sampler_gap_mean"] = ranks.total(fresh.double().sum()) / num_fresh
        tensors["sampler_gap_max"] = ranks.most(fresh.max() if fresh.numel() else torch.zeros(()))
    metrics = {name: float(value) for name, value in tensors.items()}
    metrics |= {f"seconds_{name}": seconds for name, seconds in clock.seconds.items()}
    trajectories = batch.trajectories
    with_skill = sum(bool(trajectory.skill) for trajectory in trajectories)
    metrics |= {
        "gradient_norm": float(np.mean(norms)) if norms else 0.0,
        "optimizer_steps": float(len(norms)),
        "trajectories": float(len(trajectories)),
        "rows": float(sum(len(trajectory.plain) for trajectory in trajectories)),
        "tokens": float(sum(len(row.token_ids) for trajectory in trajectories for row in trajectory.plain)),
        "response_tokens": float(sum(trajectory.trained.sum() for trajectory in trajectories)),
        "skill_rows": float(sum(len(trajectory.skill) for trajectory in trajectories)),
        "skill_context_tokens": float(sum(len(row.token_ids) for t in trajectories for row in t.skill)),
        "skill_trajectories": float(with_skill),
        "opd_active_ratio": with_skill / len(trajectories),
    }
    return metrics
