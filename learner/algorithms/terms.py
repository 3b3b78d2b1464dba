"""The terms of the joint loss, each a pure function of flat token vectors (algorithm specification, section 6).

All vectors are [T], one entry per response token, on any device. Sums are divided by a denominator that the caller
names, because it counts the whole optimizer batch: micro-batches and ranks then add up exactly.
"""

import math
from typing import Literal, NamedTuple

import torch

Gate = Literal["sigmoid", "centered", "positive_only"]

# exp() of a log-ratio above this overflows float32 sooner or later; both losses are flat long before it (their clips
# act below e^20), so that cutting the argument here changes neither a value nor a gradient.
MAX_LOG_RATIO = 20.0
# The k3 estimate is clamped to +-10 (the public recipe).
MAX_KL = 10.0


class NonFiniteError(ValueError):
    """A NaN or an infinity, in the tensor that the message names."""


class ImportanceWeight(NamedTuple):
    """`weight` [T], without gradient; `log_ratio` [T] is proximal - behaviour; `truncated` bool [T]."""

    weight: torch.Tensor
    log_ratio: torch.Tensor
    truncated: torch.Tensor


class PolicyLoss(NamedTuple):
    """`value` [T]; `clipped` and `dual_clipped` bool [T]: where that bound decides the value."""

    value: torch.Tensor
    clipped: torch.Tensor
    dual_clipped: torch.Tensor


class Distillation(NamedTuple):
    """`value` [T], zero outside the mask; `gate` and `delta` [T], without gradient; `gate` is 1 without a gate."""

    value: torch.Tensor
    gate: torch.Tensor
    delta: torch.Tensor


def require_finite(name: str, tensor: torch.Tensor) -> None:
    """Raise NonFiniteError, naming the tensor, when it holds a NaN or an infinity."""
    finite = torch.isfinite(tensor)
    if not bool(finite.all()):
        raise NonFiniteError(f"{name} has {int((~finite).sum())} non-finite values of {tensor.numel()}")


def masked_mean(values: torch.Tensor, mask: torch.Tensor, denominator: float) -> torch.Tensor:
    """sum(values over mask) / denominator, and 0 when the denominator is 0; values and mask [T] -> []."""
    return torch.where(mask, values, 0.0).sum() / max(denominator, 1.0)


def importance_weight(proximal_logprob: torch.Tensor, behaviour_logprob: torch.Tensor, cap: float) -> ImportanceWeight:
    """Truncated importance weight, the correction for the age of a sample: w = sg(min(exp(proximal - behaviour), C)).

    Source: algorithm specification, section 6. All [T]. The minimum is taken before exp, so that no ratio overflows.
    """
    log_ratio = (proximal_logprob - behaviour_logprob).detach()
    weight = log_ratio.clamp(max=math.log(cap)).exp()
    return ImportanceWeight(weight, log_ratio, log_ratio > math.log(cap))


def policy_loss(
    current_logprob: torch.Tensor,
    proximal_logprob: torch.Tensor,
    advantage: torch.Tensor,
    clip: float,
    dual_clip: float,
) -> PolicyLoss:
    """Clipped surrogate: pg = max(-A rho, -A clamp(rho, 1 - clip, 1 + clip)); where A < 0: min(pg, -dual_clip A).

    rho = exp(current - proximal). Source: algorithm specification, section 6. All [T].
    Gradient flows through `current_logprob` only.
    """
    ratio = (current_logprob - proximal_logprob.detach()).clamp(max=MAX_LOG_RATIO).exp()
    plain = -advantage * ratio
    bounded = -advantage * ratio.clamp(1.0 - clip, 1.0 + clip)
    value = torch.maximum(plain, bounded)
    dual_bound = -dual_clip * advantage
    dual_clipped = (advantage < 0) & (value > dual_bound)
    return PolicyLoss(torch.where(dual_clipped, dual_bound, value), bounded > plain, dual_clipped)


def kl_to_reference(current_logprob: torch.Tensor, reference_logprob: torch.Tensor) -> torch.Tensor:
    """Divergence from the reference: k3 = clamp(e^r - r - 1, -10, 10), r = reference - current.

    Source: algorithm specification, section 6. All [T]. Gradient flows through `current_logprob` only.
    """
    log_ratio = (reference_logprob.detach() - current_logprob).clamp(max=MAX_LOG_RATIO)
    return (log_ratio.exp() - log_ratio - 1.0).clamp(-MAX_KL, MAX_KL)


def gated_distillation(
    current_logprob: torch.Tensor,
    skill_logprob: torch.Tensor,
    weight: torch.Tensor,
    mask: torch.Tensor,
    beta: float,
    gate: Gate,
) -> Distillation:
    """Distillation of a skill: w g (sg(skill) - current), delta = sg(skill - current), g = sg(sigmoid(beta delta)).

    Source: algorithm specification, section 6. All [T].
    `mask` is m u: response tokens of rows with a skill. Its gradient by `current_logprob` is -m u w g.
    Variants of g: `centered` is g - 1/2, signed, so that it vanishes with delta and needs no importance weight;
    `positive_only` is g where delta > 0 and 0 elsewhere, so that a skill never lowers a token's probability.
    """
    shift = torch.where(mask, skill_logprob.detach() - current_logprob, 0.0)
    delta = shift.detach()
    strength = torch.sigmoid(beta * delta)
    if gate == "centered":
        strength = strength - 0.5
    elif gate == "positive_only":
        strength = torch.where(delta > 0, strength, 0.0)
    elif gate != "sigmoid":
        raise ValueError(f"unknown gate {gate!r}; known: sigmoid, centered, positive_only")
    return Distillation(torch.where(mask, weight.detach() * strength, 0.0) * shift, strength, delta)


def reverse_kl_to_skill(
    current_logprob: torch.Tensor,
    proximal_logprob: torch.Tensor,
    skill_logprob: torch.Tensor,
    weight: torch.Tensor,
    mask: torch.Tensor,
) -> Distillation:
    """Plain per-token reverse KL to the skill context, on the sampled tokens: w rho sg(current - skill).

    For the policy pi and its skill-conditioned self q at one position,
        KL(pi | q) = E_pi[log pi - log q],   grad KL(pi | q) = E_pi[(log pi - log q) grad log pi],
    because E_pi[grad log pi] = 0. The tokens were sampled by the behaviour policy mu; pi / mu is the product of
    rho = exp(current - proximal) and of w = sg(exp(proximal - behaviour)), which the loss truncates. Over samples from
    mu the mean of this value is the KL and the mean of its gradient w rho (current - skill) grad current is the
    gradient of the KL, both without bias but for the truncation of w. There is no gate and no clip.

    Source: algorithm specification, section 6 (opsd); the gradient is the score-function (likelihood-ratio) identity.
    All [T]; `mask` is m u. Gradient flows through `current_logprob` in rho only.
    """
    delta = torch.where(mask, skill_logprob.detach() - current_logprob.detach(), 0.0)
    ratio = (current_logprob - proximal_logprob.detach()).clamp(max=MAX_LOG_RATIO).exp()
    value = torch.where(mask, weight.detach() * ratio, 0.0) * -delta
    return Distillation(value, torch.ones_like(delta), delta)


def skill_advantage(
    advantage: torch.Tensor,
    skill_logprob: torch.Tensor,
    proximal_logprob: torch.Tensor,
    mask: torch.Tensor,
    coef: float,
) -> torch.Tensor:
    """Advantage with the shift of a skill added: A + coef sg(skill - proximal) where the mask is set, A elsewhere.

    Source: algorithm specification, section 6 (opid: coef 0.001, no gate). All [T], without gradient; `mask` is m u.
    """
    shift = torch.where(mask, skill_logprob.detach() - proximal_logprob.detach(), 0.0)
    return advantage + coef * shift
