"""The joint loss of one optimizer step, composed from its terms, and the sums behind its metrics."""

from typing import NamedTuple

import torch

from seed_async.learner.algorithms.methods import DistillationTerm
from seed_async.learner.algorithms.terms import (
    Distillation,
    Gate,
    ImportanceWeight,
    PolicyLoss,
    gated_distillation,
    importance_weight,
    kl_to_reference,
    masked_mean,
    policy_loss,
    require_finite,
    reverse_kl_to_skill,
    skill_advantage,
)

# How the staleness bias of the distillation term compares with its signal, per unit of rms(log ratio) / rms(delta):
# algorithm specification, section 6. Above a ratio of 0.3 the importance weight is needed.
STALENESS_BIAS_FACTOR = 0.4


class TokenLogprobs(NamedTuple):
    """The log-probs of the same response tokens under each set of weights, each [T]; only `current` has a gradient.

    `behaviour` None: synchronous, every importance weight is 1. `reference` None: no KL term. `skill` None: no token
    has a skill; otherwise it is read only where the skill mask is set.
    """

    current: torch.Tensor
    proximal: torch.Tensor
    behaviour: torch.Tensor | None
    reference: torch.Tensor | None
    skill: torch.Tensor | None


class MetricSums(NamedTuple):
    """Detached scalars that add up over micro-batches and ranks (`weight_max`: by maximum)."""

    tokens: torch.Tensor
    clipped: torch.Tensor
    dual_clipped: torch.Tensor
    weight: torch.Tensor
    weight_square: torch.Tensor
    weight_max: torch.Tensor
    truncated: torch.Tensor
    log_ratio_square: torch.Tensor
    kl: torch.Tensor
    entropy: torch.Tensor
    skill_tokens: torch.Tensor
    gate: torch.Tensor
    gate_above_half: torch.Tensor
    delta: torch.Tensor
    delta_square: torch.Tensor


class SeedLoss(NamedTuple):
    """`total` [] is the joint loss; the components [] are its means before their coefficients, detached."""

    total: torch.Tensor
    policy: torch.Tensor
    entropy: torch.Tensor
    kl: torch.Tensor
    distillation: torch.Tensor
    sums: MetricSums


def seed_loss(
    logprobs: TokenLogprobs,
    entropy: torch.Tensor,
    advantage: torch.Tensor,
    response_mask: torch.Tensor,
    skill_mask: torch.Tensor,
    *,
    response_denominator: float,
    skill_denominator: float,
    clip: float,
    dual_clip: float,
    importance_cap: float,
    beta: float,
    gate: Gate,
    distillation: DistillationTerm,
    distillation_coef: float,
    skill_advantage_coef: float,
    kl_coef: float,
    entropy_coef: float,
) -> SeedLoss:
    """L = mean_m[w pg(A + c_skill m u (skill - proximal))] - c_ent mean_m[entropy] + c_kl mean_m[k3] + lambda L_d.

    L_d is the distillation term, a mean over m u: `gated`, sum(m u w g (sg(skill) - current)) / sum(m u);
    `reverse_kl`, sum(m u w rho sg(current - skill)) / sum(m u); or `none`. The terms are those of `terms.py`.

    Source: algorithm specification, section 6. All vectors [T]; `response_mask` is m and `skill_mask` is u, bool. The
    denominators are the token counts of m and of m u over the whole optimizer batch, of which these T tokens may be any
    part: the losses and gradients of the parts add up to those of the whole. A term without active tokens is 0.
    """
    mask, active = response_mask, response_mask & skill_mask
    _require_finite_inputs(logprobs, entropy, advantage)
    current = logprobs.current
    # Synchronous sampling is the case of a behaviour equal to the proximal policy: every weight is exactly 1.
    behaviour = logprobs.proximal if logprobs.behaviour is None else logprobs.behaviour
    importance = importance_weight(logprobs.proximal, behaviour, importance_cap)
    if logprobs.skill is not None and skill_advantage_coef:
        advantage = skill_advantage(advantage, logprobs.skill, logprobs.proximal, active, skill_advantage_coef)
    policy = policy_loss(current, logprobs.proximal, advantage, clip, dual_clip)
    policy_mean = masked_mean(importance.weight * policy.value, mask, response_denominator)
    entropy_mean = masked_mean(entropy, mask, response_denominator)
    total = policy_mean - entropy_coef * entropy_mean
    kl = term = None
    kl_mean = distillation_mean = torch.zeros_like(policy_mean)
    if logprobs.reference is not None:
        kl = kl_to_reference(current, logprobs.reference)
        kl_mean = masked_mean(kl, mask, response_denominator)
        total = total + kl_coef * kl_mean
    if logprobs.skill is not None:
        term = _distillation(distillation, logprobs, logprobs.skill, importance.weight, active, beta, gate)
        distillation_mean = masked_mean(term.value, active, skill_denominator)
        total = total + distillation_coef * distillation_mean
    sums = _metric_sums(policy, importance, entropy, kl, term, mask, active, beta)
    return SeedLoss(
        total, policy_mean.detach(), entropy_mean.detach(), kl_mean.detach(), distillation_mean.detach(), sums
    )


def _distillation(
    kind: DistillationTerm,
    logprobs: TokenLogprobs,
    skill: torch.Tensor,
    weight: torch.Tensor,
    active: torch.Tensor,
    beta: float,
    gate: Gate,
) -> Distillation:
    """The distillation term by its name; `none` has the value 0 and still reports the shift of the skill."""
    if kind == "gated":
        return gated_distillation(logprobs.current, skill, weight, active, beta, gate)
    term = reverse_kl_to_skill(logprobs.current, logprobs.proximal, skill, weight, active)
    return term if kind == "reverse_kl" else term._replace(value=torch.zeros_like(term.delta))


def _metric_sums(
    policy: PolicyLoss,
    importance: ImportanceWeight,
    entropy: torch.Tensor,
    kl: torch.Tensor | None,
    term: Distillation | None,
    mask: torch.Tensor,
    active: torch.Tensor,
    beta: float,
) -> MetricSums:
    """Sum each monitored vector over its mask; a missing term counts as zeros."""
    zeros = torch.zeros_like(importance.weight)
    gate, delta = (zeros, zeros) if term is None else (term.gate, term.delta)
    active = torch.zeros_like(active) if term is None else active

    def add_up(values: torch.Tensor, where: torch.Tensor) -> torch.Tensor:
        return torch.where(where, values.detach(), 0).sum()

    return MetricSums(
        tokens=mask.sum(),
        clipped=add_up(policy.clipped, mask),
        dual_clipped=add_up(policy.dual_clipped, mask),
        weight=add_up(importance.weight, mask),
        weight_square=add_up(importance.weight.square(), mask),
        weight_max=torch.where(mask, importance.weight, 0.0).amax() if mask.numel() else zeros.sum(),
        truncated=add_up(importance.truncated, mask),
        log_ratio_square=add_up(importance.log_ratio.square(), mask),
        kl=add_up(zeros if kl is None else kl, mask),
        entropy=add_up(entropy, mask),
        skill_tokens=active.sum(),
        gate=add_up(gate, active),
        gate_above_half=add_up(beta * delta > 0, active),
        delta=add_up(delta, active),
        delta_square=add_up(delta.square(), active),
    )


def add_sums(parts: list[MetricSums]) -> MetricSums:
    """The sums of the whole from the sums of its parts; at least one part."""
    added = MetricSums(*(torch.stack(list(column)).sum(dim=0) for column in zip(*parts, strict=True)))
    return added._replace(weight_max=torch.stack([part.weight_max for part in parts]).amax())


def no_sums() -> MetricSums:
    """The sums over no token."""
    return MetricSums(*(torch.zeros(()) for _ in MetricSums._fields))


def metrics_from_sums(sums: MetricSums) -> dict[str, torch.Tensor]:
    """Means, fractions and root mean squares [] from the sums; a quantity without tokens is 0.

    `effective_sample_tokens` = (sum w)^2 / sum w^2; its share of the tokens is 1 when all weights are equal.
    `staleness_bias_ratio` = 0.4 rms(log ratio) / rms(delta), the bias of an unweighted distillation term over its
    signal.
    `gate_above_half_fraction` counts sigmoid(beta delta) before a variant changes it; `gate_mean` is the gate applied,
    1 for a term without one. `delta` is the log-prob shift of the skill, skill - current, on the tokens that have one.
    """
    tokens, active = sums.tokens.clamp(min=1), sums.skill_tokens.clamp(min=1)
    log_ratio_rms = (sums.log_ratio_square / tokens).sqrt()
    delta_rms = (sums.delta_square / active).sqrt()
    effective_tokens = sums.weight.square() / sums.weight_square.clamp(min=1e-12)
    has_shift = delta_rms > 0
    return {
        "clip_fraction": sums.clipped / tokens,
        "dual_clip_fraction": sums.dual_clipped / tokens,
        "weight_mean": sums.weight / tokens,
        "weight_max": sums.weight_max,
        "weight_truncated_tokens": sums.truncated,
        "weight_truncated_fraction": sums.truncated / tokens,
        "effective_sample_share": effective_tokens / tokens,
        "effective_sample_tokens": effective_tokens,
        "log_ratio_rms": log_ratio_rms,
        "kl": sums.kl / tokens,
        "entropy": sums.entropy / tokens,
        "opd_active_tokens": sums.skill_tokens,
        "opd_active_token_ratio": sums.skill_tokens / tokens,
        "gate_mean": sums.gate / active,
        "gate_above_half_fraction": sums.gate_above_half / active,
        "delta_mean": sums.delta / active,
        "delta_rms": delta_rms,
        "staleness_bias_ratio": torch.where(
            has_shift, STALENESS_BIAS_FACTOR * log_ratio_rms / torch.where(has_shift, delta_rms, 1.0), 0.0
        ),
    }


def _require_finite_inputs(logprobs: TokenLogprobs, entropy: torch.Tensor, advantage: torch.Tensor) -> None:
    """Refuse a NaN or an infinity by the name of its tensor, before any mask can hide it."""
    for name, values in zip(TokenLogprobs._fields, logprobs, strict=True):
        if values is not None:
            require_finite(f"{name}_logprob", values)
    require_finite("entropy", entropy)
    require_finite("advantage", advantage)
