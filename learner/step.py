"""The math of one update: a batch of trajectories in, gradients and new weights out. No process plumbing.

Consumes an `UpdateBatch` of whole groups; produces new weights in the policy model and a dictionary of metrics. It
stops at the first non-finite loss or gradient by raising `NonFiniteError`, before the weights are touched by it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import PreTrainedModel

from seed_async.layouts import TokenRow
from seed_async.learner.algorithms.advantage import Statistics, group_advantage
from seed_async.learner.algorithms.losses import (
    SeedLoss,
    TokenLogprobs,
    add_sums,
    metrics_from_sums,
    seed_loss,
)
from seed_async.learner.algorithms.methods import get_method
from seed_async.learner.algorithms.terms import Gate, NonFiniteError, require_finite
from seed_async.learner.scoring import plan_micro_batches, score


@dataclass(frozen=True)
class LossConfig:
    """Hyper-parameters of an update (algorithm specification, sections 3, 4 and 6)."""

    method: str = "seed"
    clip: float = 0.2
    dual_clip: float = 3.0
    importance_cap: float = 2.0
    synchronous: bool = False
    """Force every importance weight to 1: the batch was sampled by the very weights that learn from it."""
    opd_beta: float = 5.0
    opd_coef: float = 0.01
    opd_gate: Gate = "sigmoid"
    kl_coef: float = 0.01
    """0 leaves the reference model out, with its forward pass."""
    entropy_coef: float = 0.001
    invalid_penalty: float = 0.1
    divide_by_std: bool = True
    statistics: Statistics = "rows"
    temperature: float = 1.0
    """The temperature that the responses were sampled at."""
    max_grad_norm: float = 1.0
    token_budget: int = 16384
    """Tokens of a packed micro-batch; bounds memory, never changes the result."""
    mini_batch_trajectories: int | None = None
    """Trajectories an optimizer step; None takes the whole batch at once."""


@dataclass(frozen=True, eq=False)
class UpdateTrajectory:
    """One trajectory as an update consumes it: T tokens, of which R were sampled, in some number of turns.

    `behaviour_logprob` float32 [R], by the engine at sampling time; `fresh` bool [R], True on tokens that the very
    version of this update sampled, where engine and learner must agree; `invalid` bool [turns], True where the action
    was unparsable; `episode_return` with the reward scale applied; `skill`, where there is one, is the same response
    ids in the skill-augmented context.
    """

    plain: TokenRow
    behaviour_logprob: np.ndarray
    fresh: np.ndarray
    invalid: np.ndarray
    episode_return: float
    group_id: str
    skill: TokenRow | None = None

    def __post_init__(self) -> None:
        """Refuse sizes that do not agree and a skill context whose response ids differ (oracle d)."""
        response = self.plain.token_ids[self.plain.response_mask]
        sizes = (len(self.behaviour_logprob), len(self.fresh), len(self.plain.turn_index))
        if set(sizes) != {len(response)}:
            raise ValueError(
                f"{len(response)} response tokens, but behaviour_logprob, fresh and turn_index have {sizes} entries"
            )
        if len(response) and not 0 <= self.plain.turn_index.min() <= self.plain.turn_index.max() < len(self.invalid):
            raise ValueError(f"turn indices must lie in the {len(self.invalid)} turns")
        if self.skill is not None and not np.array_equal(self.skill.token_ids[self.skill.response_mask], response):
            raise ValueError("the response ids of the skill context differ from those that were sampled")


@dataclass(frozen=True, eq=False)
class UpdateBatch:
    """Whole groups of trajectories; an update never sees part of a group."""

    trajectories: tuple[UpdateTrajectory, ...]

    def __post_init__(self) -> None:
        """Refuse a batch that cannot have a loss."""
        if not any(trajectory.plain.response_mask.any() for trajectory in self.trajectories):
            raise ValueError(f"{len(self.trajectories)} trajectories without any response token")


class TokenTargets(NamedTuple):
    """What the loss needs beside the current log-probs, for every response token of some trajectories, each [R].

    The names are those of `TokenLogprobs`; `proximal` None means equal to `current`, see `update`. `offsets` has one
    entry a trajectory and one more: the tokens of trajectory i are offsets[i] to offsets[i + 1].
    """

    advantage: torch.Tensor
    behaviour: torch.Tensor
    proximal: torch.Tensor | None
    reference: torch.Tensor | None
    skill: torch.Tensor | None
    skill_mask: torch.Tensor
    offsets: tuple[int, ...]


class Denominators(NamedTuple):
    """Response tokens, and those of them with a skill context, over a whole optimizer batch and all its ranks."""

    response: float
    skill: float


class _Clock:
    """Seconds spent in each named phase."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        start = perf_counter()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + perf_counter() - start


def update(
    batch: UpdateBatch,
    config: LossConfig,
    policy: PreTrainedModel,
    reference: PreTrainedModel | None,
    optimizer: torch.optim.Optimizer,
) -> dict[str, float]:
    """One epoch over the batch: score, accumulate gradients, clip, step. Returns the metrics.

    With a single mini-batch no optimizer step separates the proximal from the current weights, so that
    current.detach() *is* the proximal log-prob: rho is exactly 1, and the scoring pass is left out. With several
    mini-batches the proximal log-probs are scored once, before the first step.
    """
    clock = _Clock()
    trajectories = batch.trajectories
    size = config.mini_batch_trajectories or len(trajectories)
    runs = [range(start, min(start + size, len(trajectories))) for start in range(0, len(trajectories), size)]
    # A mini-batch without a response token has no loss, and gets no optimizer step.
    mini_batches = [run for run in runs if any(len(trajectories[index].fresh) for index in run)]
    targets = score_targets(batch, config, policy, reference, clock, with_proximal=len(mini_batches) > 1)
    parts: list[SeedLoss] = []
    gaps: list[torch.Tensor] = []
    norms: list[float] = []
    for mini in mini_batches:
        optimizer.zero_grad(set_to_none=True)
        with clock.phase("forward_backward"):
            losses, proximal = accumulate_gradients(batch, mini, targets, config, policy, denominators(targets, mini))
        with clock.phase("optimizer"):
            norms.append(_clip_gradients(policy, config.max_grad_norm))
            optimizer.step()
        parts += losses
        behaviour = targets.behaviour[targets.offsets[mini.start] : targets.offsets[mini.stop]]
        gaps.append((proximal - behaviour).abs())
    optimizer.zero_grad(set_to_none=True)
    return _metrics(batch, parts, torch.cat(gaps), norms, len(mini_batches), clock)


def score_targets(
    batch: UpdateBatch,
    config: LossConfig,
    policy: PreTrainedModel,
    reference: PreTrainedModel | None,
    clock: _Clock | None = None,
    *,
    with_proximal: bool = True,
) -> TokenTargets:
    """Everything that stays fixed during an update: advantages, and the log-probs under fixed weights, no gradients.

    The skill context is scored by the live weights before the first step, with the same code as the plain one.
    """
    method, clock = get_method(config.method), clock or _Clock()
    trajectories = batch.trajectories
    device = next(policy.parameters()).device
    plain = [trajectory.plain for trajectory in trajectories]
    lengths = [len(row.turn_index) for row in plain]
    advantage = torch.from_numpy(token_advantages(batch, config)).to(device)
    behaviour = np.concatenate([trajectory.behaviour_logprob for trajectory in trajectories]).astype(np.float32)
    with_skill = [trajectory.skill is not None and method.gated_distillation for trajectory in trajectories]
    skill_rows = [t.skill for t, wanted in zip(trajectories, with_skill, strict=True) if t.skill is not None and wanted]
    skill_mask = torch.from_numpy(np.repeat(with_skill, lengths)).to(device)
    if config.kl_coef > 0 and reference is None:
        raise ValueError(f"kl_coef {config.kl_coef} needs a reference model")

    def logprobs(model: PreTrainedModel, rows: list[TokenRow]) -> torch.Tensor:
        return score(model, rows, temperature=config.temperature, token_budget=config.token_budget).logprob

    proximal = reference_logprob = skill = None
    with torch.no_grad():
        if with_proximal:
            with clock.phase("score_proximal"):
                proximal = logprobs(policy, plain)
        if reference is not None and config.kl_coef > 0:
            with clock.phase("score_reference"):
                reference_logprob = logprobs(reference, plain)
        if skill_rows:
            with clock.phase("score_skill"):
                scored = logprobs(policy, skill_rows)
                # The rows keep their order, so the scores fall into the places of the mask one after the other.
                skill = torch.zeros_like(advantage, dtype=scored.dtype).masked_scatter(skill_mask, scored)
    offsets = tuple(int(offset) for offset in np.concatenate([[0], np.cumsum(lengths)]))
    behaviour_logprob = torch.from_numpy(behaviour).to(device)
    require_finite("behaviour_logprob", behaviour_logprob)
    return TokenTargets(advantage, behaviour_logprob, proximal, reference_logprob, skill, skill_mask, offsets)


def token_advantages(batch: UpdateBatch, config: LossConfig) -> np.ndarray:
    """The advantage of each response token, float32 [R]: that of its turn, a turn being one row of the statistics."""
    turns = [len(trajectory.invalid) for trajectory in batch.trajectories]
    per_turn = group_advantage(
        np.repeat([trajectory.episode_return for trajectory in batch.trajectories], turns),
        np.concatenate([trajectory.invalid for trajectory in batch.trajectories]),
        np.repeat([trajectory.group_id for trajectory in batch.trajectories], turns),
        np.repeat(np.arange(len(turns)), turns),
        penalty=config.invalid_penalty,
        divide_by_std=config.divide_by_std,
        statistics=config.statistics,
    ).advantage
    first_turn = np.cumsum(turns) - turns
    rows = [
        start + trajectory.plain.turn_index for start, trajectory in zip(first_turn, batch.trajectories, strict=True)
    ]
    tokens: np.ndarray = per_turn[np.concatenate(rows)].astype(np.float32)
    return tokens


def denominators(targets: TokenTargets, mini: range) -> Denominators:
    """Token counts of the trajectories `mini`."""
    whole = slice(targets.offsets[mini.start], targets.offsets[mini.stop])
    return Denominators(float(whole.stop - whole.start), float(targets.skill_mask[whole].sum()))


def accumulate_gradients(
    batch: UpdateBatch,
    mini: range,
    targets: TokenTargets,
    config: LossConfig,
    policy: PreTrainedModel,
    totals: Denominators,
) -> tuple[list[SeedLoss], torch.Tensor]:
    """Add the gradient of the joint loss over the trajectories `mini` to the policy's gradients.

    One packed micro-batch at a time, its graph freed by its backward. `totals` count the whole optimizer batch, so the
    micro-batches' losses add up to its loss, or to this rank's share. Returns them, and the proximal log-probs [R].
    """
    rows = [batch.trajectories[index].plain for index in mini]
    losses, proximals = [], []
    for micro in plan_micro_batches([len(row.token_ids) for row in rows], config.token_budget):
        part = slice(targets.offsets[mini.start + micro.start], targets.offsets[mini.start + micro.stop])
        if part.start == part.stop:
            continue
        scores = score(
            policy, rows[micro.start : micro.stop], temperature=config.temperature, token_budget=config.token_budget
        )
        loss = _loss_of_part(scores.logprob, scores.entropy, targets, part, config, totals)
        require_finite("loss", loss.total.detach())
        loss.total.backward()  # type: ignore[no-untyped-call]
        losses.append(loss._replace(total=loss.total.detach()))
        proximals.append(scores.logprob.detach() if targets.proximal is None else targets.proximal[part])
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
    return seed_loss(
        logprobs,
        entropy,
        targets.advantage[part],
        torch.ones_like(skill_mask),
        skill_mask,
        response_denominator=totals.response,
        skill_denominator=totals.skill,
        clip=config.clip,
        dual_clip=config.dual_clip,
        importance_cap=config.importance_cap,
        beta=config.opd_beta,
        gate=config.opd_gate,
        distillation_coef=config.opd_coef,
        kl_coef=config.kl_coef,
        entropy_coef=config.entropy_coef,
    )


def _clip_gradients(policy: PreTrainedModel, max_norm: float) -> float:
    """Scale the gradients down to `max_norm`; returns the norm before, refuses one that is not finite."""
    norm = float(torch.nn.utils.clip_grad_norm_(policy.parameters(), max_norm))
    if not np.isfinite(norm):
        raise NonFiniteError(f"the gradient norm is {norm}; the weights are unchanged")
    return norm


def _metrics(
    batch: UpdateBatch,
    parts: list[SeedLoss],
    gap: torch.Tensor,
    norms: list[float],
    num_steps: int,
    clock: _Clock,
) -> dict[str, float]:
    """Every metric of the update as a plain float; losses are means over its optimizer steps.

    `sampler_gap_*`, |proximal - behaviour| on fresh tokens, is left out when no token is fresh.
    """
    tensors: dict[str, Any] = metrics_from_sums(add_sums([part.sums for part in parts]))
    for name in ("total", "policy", "entropy", "kl", "distillation"):
        tensors[f"loss_{name}"] = torch.stack([getattr(part, name) for part in parts]).sum() / num_steps
    fresh = gap[
        torch.from_numpy(np.concatenate([trajectory.fresh for trajectory in batch.trajectories])).to(gap.device)
    ]
    if fresh.numel():
        tensors |= {"sampler_gap_mean": fresh.mean(), "sampler_gap_max": fresh.max()}
    metrics = {name: float(value) for name, value in tensors.items()}
    metrics |= {f"seconds_{name}": seconds for name, seconds in clock.seconds.items()}
    plain, skills = [t.plain for t in batch.trajectories], [t.skill for t in batch.trajectories]
    metrics |= {
        "gradient_norm": float(np.mean(norms)),
        "optimizer_steps": float(num_steps),
        "trajectories": float(len(plain)),
        "tokens": float(sum(len(row.token_ids) for row in plain)),
        "response_tokens": float(sum(len(row.turn_index) for row in plain)),
        "skill_context_tokens": float(sum(len(row.token_ids) for row in skills if row is not None)),
        "skill_trajectories": float(sum(row is not None for row in skills)),
    }
    return metrics
