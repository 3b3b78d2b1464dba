"""Slow numpy truths of the loss and advantage formulas: one token at a time, float64, straight from the definitions."""

import math

import numpy as np


def advantage_truth(returns, invalid, group_ids, row_trajectory, penalty, divide_by_std, statistics):
    """Section 4, row by row; the statistics recomputed for each row."""
    num_rows = len(returns)
    scores = [returns[i] - (penalty if invalid[i] else 0.0) for i in range(num_rows)]
    answer = []
    for i in range(num_rows):
        members = [j for j in range(num_rows) if group_ids[j] == group_ids[i]]
        return_of = {row_trajectory[j]: returns[j] for j in members}
        population = [scores[j] for j in members] if statistics == "rows" else list(return_of.values())
        if len(return_of) == 1 or all(value == population[0] for value in population):
            answer.append(0.0)
            continue
        mean = sum(population) / len(population)
        squares = sum((value - mean) ** 2 for value in population)
        std = math.sqrt(squares / (len(population) - 1 if statistics == "rows" else len(population)))
        answer.append((scores[i] - mean) / ((std + 1e-6) if divide_by_std else 1.0))
    return np.array(answer)


def capped_exp(x, cap=math.inf):
    """min(exp(x), cap) without overflow."""
    return cap if x >= 700 else min(math.exp(x), cap)


def sigmoid(x):
    """Logistic function without overflow."""
    return 1.0 / (1.0 + math.exp(-x)) if x >= 0 else math.exp(x) / (1.0 + math.exp(x))


def policy_truth(current, proximal, advantage, clip, dual_clip):
    """Clipped surrogate of one token, with its bound where the advantage is negative."""
    ratio = capped_exp(current - proximal, 1e300)
    value = max(-advantage * ratio, -advantage * min(max(ratio, 1 - clip), 1 + clip))
    return min(value, -dual_clip * advantage) if advantage < 0 else value


def k3_truth(current, reference):
    """Clamped k3 estimate of one token."""
    r = reference - current
    return min(max(capped_exp(r, 1e300) - r - 1, -10.0), 10.0)


def gate_truth(delta, beta, variant):
    """The gate of one token."""
    gate = sigmoid(beta * delta)
    if variant == "centered":
        return gate - 0.5
    return gate if variant == "sigmoid" or delta > 0 else 0.0


def loss_truth(
    tokens,
    *,
    clip,
    dual_clip,
    cap,
    beta,
    gate,
    opd_coef,
    kl_coef,
    entropy_coef,
    distillation="gated",
    skill_advantage_coef=0.0,
):
    """Section 6 over a list of token dictionaries; returns the loss and its named means."""
    response = [t for t in tokens if t["m"]]
    active = [t for t in response if t["u"]]
    policy = entropy = kl = opd = 0.0
    for t in response:
        weight = 1.0 if t["behaviour"] is None else capped_exp(t["proximal"] - t["behaviour"], cap)
        advantage = t["advantage"] + (skill_advantage_coef * (t["skill"] - t["proximal"]) if t["u"] else 0.0)
        policy += weight * policy_truth(t["current"], t["proximal"], advantage, clip, dual_clip) / len(response)
        entropy += t["entropy"] / len(response)
        kl += k3_truth(t["current"], t["reference"]) / len(response)
        if t["u"]:
            delta = t["skill"] - t["current"]
            if distillation == "gated":
                opd += weight * gate_truth(delta, beta, gate) * delta / len(active)
            elif distillation == "reverse_kl":
                # The learner cuts log-ratios at 20, where nothing but the scale of a broken sample is left.
                opd += weight * math.exp(min(t["current"] - t["proximal"], 20.0)) * -delta / len(active)
    total = policy - entropy_coef * entropy + kl_coef * kl + opd_coef * opd
    return {"total": total, "policy": policy, "entropy": entropy, "kl": kl, "distillation": opd}


def discounted_truth(rewards, row_trajectory, discount):
    """The step return of each row: later rewards of its trajectory, each discounted by how many steps it is away."""
    answer = []
    for i in range(len(rewards)):
        later = [j for j in range(i, len(rewards)) if row_trajectory[j] == row_trajectory[i]]
        answer.append(sum(discount**steps * rewards[j] for steps, j in enumerate(later)))
    return np.array(answer)


def step_advantage_truth(step_returns, invalid, group_ids, observations, penalty, divide_by_std, statistics):
    """Each row against the rows of its group with the same observation."""
    num_rows = len(step_returns)
    scores = [step_returns[i] - (penalty if invalid[i] else 0.0) for i in range(num_rows)]
    population = scores if statistics == "rows" else list(step_returns)
    answer = []
    for i in range(num_rows):
        anchor = [
            population[j]
            for j in range(num_rows)
            if group_ids[j] == group_ids[i] and observations[j] == observations[i]
        ]
        if len(anchor) == 1 or all(value == anchor[0] for value in anchor):
            answer.append(0.0)
            continue
        mean = sum(anchor) / len(anchor)
        squares = sum((value - mean) ** 2 for value in anchor)
        std = math.sqrt(squares / (len(anchor) - 1 if statistics == "rows" else len(anchor)))
        answer.append((scores[i] - mean) / ((std + 1e-6) if divide_by_std else 1.0))
    return np.array(answer)
