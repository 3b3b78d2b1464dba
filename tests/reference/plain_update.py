"""The joint loss of a batch the slow way: float64, one plain forward pass a trajectory, formulas written out again.

Nothing is packed, nothing is shared with the learner's own math; gradients come from autograd over the whole batch.
"""

import torch

from tests.reference.numpy_losses import advantage_truth


def plain_logprobs(model, ids, mask, temperature):
    """Log-probs and entropies at the response tokens of one sequence; no packing, no padding."""
    logits = model(input_ids=torch.tensor(ids, dtype=torch.long)[None]).logits[0] / temperature
    everywhere = torch.log_softmax(logits, dim=-1)
    wanted = [t for t in range(len(ids)) if mask[t]]
    logprobs = torch.stack([everywhere[t - 1, int(ids[t])] for t in wanted])
    entropies = torch.stack([-(everywhere[t - 1].exp() * everywhere[t - 1]).sum() for t in wanted])
    return logprobs, entropies


def plain_loss(batch, config, policy, reference):
    """The joint loss of one update with a single mini-batch, with its graph; float64 models, plain attention."""
    advantages = _turn_advantages(batch, config)
    num_response = sum(int(t.plain.response_mask.sum()) for t in batch.trajectories)
    use_skill = config.method == "seed"
    num_active = sum(int(t.plain.response_mask.sum()) for t in batch.trajectories if t.skill is not None and use_skill)
    total = torch.zeros((), dtype=torch.float64)
    for index, trajectory in enumerate(batch.trajectories):
        row = trajectory.plain
        current, entropy = plain_logprobs(policy, row.token_ids, row.response_mask, config.temperature)
        proximal = current.detach()
        behaviour = torch.tensor(trajectory.behaviour_logprob, dtype=torch.float64)
        weight = torch.minimum((proximal - behaviour).exp(), torch.tensor(float(config.importance_cap)))
        weight = torch.ones_like(weight) if config.synchronous else weight
        a = torch.tensor([advantages[index][turn] for turn in row.turn_index], dtype=torch.float64)
        rho = (current - proximal).exp()
        pg = torch.maximum(-a * rho, -a * rho.clamp(1 - config.clip, 1 + config.clip))
        pg = torch.where(a < 0, torch.minimum(pg, -config.dual_clip * a), pg)
        total = total + (weight * pg).sum() / num_response - config.entropy_coef * entropy.sum() / num_response
        if config.kl_coef > 0:
            with torch.no_grad():
                fixed = plain_logprobs(reference, row.token_ids, row.response_mask, config.temperature)[0]
            r = fixed - current
            total = total + config.kl_coef * (r.exp() - r - 1).clamp(-10, 10).sum() / num_response
        if trajectory.skill is not None and use_skill:
            extra = trajectory.skill
            with torch.no_grad():
                teacher = plain_logprobs(policy, extra.token_ids, extra.response_mask, config.temperature)[0]
            delta = teacher - current.detach()
            gate = 1 / (1 + (-config.opd_beta * delta).exp())
            total = total + config.opd_coef * (weight * gate * (teacher - current)).sum() / num_active
    return total


def _turn_advantages(batch, config):
    """Advantages by trajectory and turn."""
    rows = [(i, turn) for i, t in enumerate(batch.trajectories) for turn in range(len(t.invalid))]
    values = advantage_truth(
        [batch.trajectories[i].episode_return for i, _ in rows],
        [bool(batch.trajectories[i].invalid[turn]) for i, turn in rows],
        [batch.trajectories[i].group_id for i, _ in rows],
        [i for i, _ in rows],
        config.invalid_penalty,
        config.divide_by_std,
        config.statistics,
    )
    answer = [[] for _ in batch.trajectories]
    for (i, _), value in zip(rows, values, strict=True):
        answer[i].append(float(value))
    return answer
