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


def loss_truth(tokens, *, clip, dual_clip, cap, beta, gate, opd_coef, kl_coef, entropy_coef):
    """Section 6 over a list of token dictionaries; returns the loss and its named means."""
    response = [t for t in tokens if t["m"]]
    active = [t for t in response if t["u"]]
    policy = entropy = kl = opd = 0.0
    for t in response:
        weight = 1.0 if t["behaviour"] is None else capped_exp(t["proximal"] - t["behaviour"], cap)
        policy += weight * policy_truth(t["current"], t["proximal"], t["advantage"], clip, dual_clip) / len(response)
        entropy += t["entropy"] / len(response)
        kl += k3_truth(t["current"], t["reference"]) / len(response)
        if t["u"]:
            delta = t["skill"] - t["current"]
            opd += weight * gate_truth(delta, beta, gate) * delta / len(active)
    total = policy - entropy_coef * entropy + kl_coef * kl + opd_coef * opd
    return {"total": total, "policy": policy, "entropy": entropy, "kl": kl, "distillation": opd}
