"""The joint loss and a whole update the slow way: float64, one plain forward pass a row, formulas written out again.

Nothing is packed, nothing is shared with the learner's own math; gradients come from autograd over the whole batch.
"""

import torch

from tests.reference.numpy_losses import advantage_truth, discounted_truth, step_advantage_truth

TEACHER_METHODS = ("seed", "seed_static", "sdar", "opid", "opsd")
GATED_METHODS = ("seed", "seed_static", "sdar")


def plain_logprobs(model, ids, mask, temperature):
    """Log-probs and entropies at the response tokens of one sequence; no packing, no padding."""
    logits = model(input_ids=torch.tensor(ids, dtype=torch.long)[None]).logits[0] / temperature
    everywhere = torch.log_softmax(logits, dim=-1)
    wanted = [t for t in range(len(ids)) if mask[t]]
    logprobs = torch.stack([everywhere[t - 1, int(ids[t])] for t in wanted])
    entropies = torch.stack([-(everywhere[t - 1].exp() * everywhere[t - 1]).sum() for t in wanted])
    return logprobs, entropies


def turn_logprobs(model, rows, temperature):
    """Log-probs and entropies of the scored tokens of some rows, as lists by turn."""
    answer = {}
    for row in rows:
        if not row.response_mask.any():
            continue
        logprobs, entropies = plain_logprobs(model, row.token_ids, row.response_mask, temperature)
        for place, turn in enumerate(row.turn_index.tolist()):
            answer.setdefault(turn, []).append((logprobs[place], entropies[place]))
    return answer


def frozen_scores(batch, config, policy):
    """Per trajectory the proximal and the skill log-probs by turn, under the present weights."""
    with torch.no_grad():
        return [
            (
                turn_logprobs(policy, t.plain, config.temperature),
                turn_logprobs(policy, t.skill, config.temperature) if config.method in TEACHER_METHODS else {},
            )
            for t in batch.trajectories
        ]


def plain_loss(batch, config, policy, reference, frozen=None, mini=None):
    """The joint loss of one optimizer step over the trajectories `mini`, with its graph; float64, plain attention.

    `frozen` are the scores under the weights before the update; None means that these are the present ones.
    """
    frozen = frozen or frozen_scores(batch, config, policy)
    mini = list(mini if mini is not None else range(len(batch.trajectories)))
    advantages = _turn_advantages(batch, config)
    trained = [_trained_by_turn(trajectory) for trajectory in batch.trajectories]
    num_response = sum(sum(tokens) for i in mini for tokens in trained[i].values())
    num_active = sum(sum(trained[i][turn]) for i in mini for turn in frozen[i][1])
    total = torch.zeros((), dtype=torch.float64)
    for i in mini:
        trajectory = batch.trajectories[i]
        current = turn_logprobs(policy, trajectory.plain, config.temperature)
        with torch.no_grad():
            fixed = turn_logprobs(reference, trajectory.plain, config.temperature) if config.kl_coef > 0 else None
        place = 0
        for turn in sorted(current):
            for at, (logprob, entropy) in enumerate(current[turn]):
                token = {
                    "current": logprob,
                    "proximal": frozen[i][0][turn][at][0],
                    "behaviour": float(trajectory.behaviour_logprob[place]),
                    "skill": frozen[i][1][turn][at][0] if turn in frozen[i][1] else None,
                    "reference": fixed[turn][at][0] if fixed else None,
                }
                place += 1
                if not trained[i][turn][at]:
                    continue
                response, active = _token_loss(token, float(advantages[i][turn]), config)
                total = total + (response - config.entropy_coef * entropy) / num_response
                if active is not None:
                    total = total + active / num_active
    return total


def _trained_by_turn(trajectory):
    """Whether each token is trained, as lists by turn."""
    answer = {}
    for turn, is_trained in zip(trajectory.turn_index.tolist(), trajectory.trained.tolist(), strict=True):
        answer.setdefault(turn, []).append(is_trained)
    return answer


def _token_loss(token, advantage, config):
    """The policy and KL terms of a token, and its distillation term or None; each with its coefficient."""
    current, proximal, skill = token["current"], token["proximal"], token["skill"]
    cap = torch.tensor(config.importance_cap, dtype=torch.float64)
    weight = 1.0 if config.synchronous else torch.minimum((proximal - token["behaviour"]).exp(), cap)
    if config.method == "opid" and skill is not None:
        advantage = advantage + config.opid_coef * float(skill - proximal)
    rho = (current - proximal).exp()
    value = torch.maximum(-advantage * rho, -advantage * rho.clamp(1 - config.clip, 1 + config.clip))
    if advantage < 0:
        value = torch.minimum(value, torch.tensor(-config.dual_clip * advantage, dtype=torch.float64))
    response = weight * value
    if token["reference"] is not None:
        r = token["reference"] - current
        response = response + config.kl_coef * (r.exp() - r - 1).clamp(-10, 10)
    if skill is None:
        return response, None
    shift = float(skill - current.detach())
    if config.method in GATED_METHODS:
        gate = float(torch.sigmoid(torch.tensor(config.opd_beta * shift, dtype=torch.float64)))
        if config.opd_gate == "centered":
            gate -= 0.5
        elif config.opd_gate == "positive_only":
            gate = gate if shift > 0 else 0.0
        return response, config.opd_coef * weight * gate * (skill - current)
    if config.method == "opsd":
        return response, config.opsd_coef * weight * rho * -shift
    return response, None


def plain_update(batch, config, policy, reference, lr):
    """One epoch of plain gradient descent, a step a mini-batch, gradients clipped by hand; changes `policy`."""
    frozen = frozen_scores(batch, config, policy)
    everyone = range(len(batch.trajectories))
    size = config.mini_batch_trajectories or len(everyone)
    for start in range(0, len(everyone), size):
        policy.zero_grad()
        plain_loss(batch, config, policy, reference, frozen, everyone[start : start + size]).backward()
        with torch.no_grad():
            norm = sum(float((p.grad**2).sum()) for p in policy.parameters() if p.grad is not None) ** 0.5
            for parameter in policy.parameters():
                if parameter.grad is not None:
                    parameter -= lr * parameter.grad * min(1.0, config.max_grad_norm / norm)
    policy.zero_grad()


def _turn_advantages(batch, config):
    """Advantages by trajectory and turn."""
    rows = [(i, turn) for i, t in enumerate(batch.trajectories) for turn in range(len(t.invalid))]
    returns = [batch.trajectories[i].episode_return for i, _ in rows]
    invalid = [bool(batch.trajectories[i].invalid[turn]) for i, turn in rows]
    groups = [batch.trajectories[i].group_id for i, _ in rows]
    members = [i for i, _ in rows]
    options = (config.invalid_penalty, config.divide_by_std, config.statistics)
    values = advantage_truth(returns, invalid, groups, members, *options)
    if config.method == "opsd" and not config.opsd_rl:
        values = 0 * values
    if config.method == "gigpo":
        last = [turn == len(batch.trajectories[i].invalid) - 1 for i, turn in rows]
        rewards = [value if is_last else 0.0 for value, is_last in zip(returns, last, strict=True)]
        gained = discounted_truth(rewards, members, config.gigpo_discount)
        seen = [int(batch.trajectories[i].observation_ids[turn]) for i, turn in rows]
        steps = step_advantage_truth(gained, invalid, groups, seen, *options)
        values = values + config.gigpo_step_weight * steps
    answer = [[] for _ in batch.trajectories]
    for (i, _), value in zip(rows, values, strict=True):
        answer[i].append(float(value))
    return answer
