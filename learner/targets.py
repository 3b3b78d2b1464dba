"""What stays fixed during an update, for every response token: advantages, and log-probs under fixed weights."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter
from typing import NamedTuple

import numpy as np
import torch
from transformers import PreTrainedModel

from seed_async.layouts import TokenRow
from seed_async.learner.algorithms.advantage import discounted_returns, group_advantage, step_advantage
from seed_async.learner.algorithms.methods import get_method
from seed_async.learner.algorithms.terms import require_finite
from seed_async.learner.batch import LossConfig, UpdateBatch
from seed_async.learner.scoring import score


class TokenTargets(NamedTuple):
    """What the loss needs beside the current log-probs, for every response token of some trajectories, each [R].

    The names are those of `TokenLogprobs`; `proximal` None means equal to `current`, see `step.update`. `offsets` has
    one entry a trajectory and one more: the tokens of trajectory i are offsets[i] to offsets[i + 1]. `response_mask` is
    False on tokens that are too old for any term of the loss. `group_metrics` tell what the advantages had to compare.
    """

    advantage: torch.Tensor
    behaviour: torch.Tensor
    proximal: torch.Tensor | None
    reference: torch.Tensor | None
    skill: torch.Tensor | None
    skill_mask: torch.Tensor
    response_mask: torch.Tensor
    offsets: tuple[int, ...]
    group_metrics: dict[str, float]


class Denominators(NamedTuple):
    """Trained response tokens, and those of them with a skill context, over an optimizer batch and all its ranks."""

    response: float
    skill: float


class TokenAdvantages(NamedTuple):
    """`advantage` float32 [R], before any shift of a skill; `metrics` count groups and those without a comparison."""

    advantage: np.ndarray
    metrics: dict[str, float]


class _Contexts(NamedTuple):
    """Log-probs of the response tokens of the plain rows [R] and of the skill rows [S]; None where not scored."""

    plain: torch.Tensor | None
    skill: torch.Tensor | None


class _ContextRows(NamedTuple):
    """Rows of both contexts; `of_skill` bool [rows] says which are of the skill context."""

    rows: list[TokenRow]
    of_skill: np.ndarray
    with_plain: bool

    def split(self, scored: torch.Tensor) -> _Contexts:
        """Tell the log-probs of the rows' response tokens apart."""
        mask = torch.from_numpy(np.repeat(self.of_skill, [len(row.turn_index) for row in self.rows])).to(scored.device)
        return _Contexts(scored[~mask] if self.with_plain else None, scored[mask] if self.of_skill.any() else None)


class Clock:
    """Seconds spent in each named phase."""

    def __init__(self) -> None:
        """Nothing is measured yet."""
        self.seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the time inside the block to the phase."""
        start = perf_counter()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + perf_counter() - start


def score_targets(
    batch: UpdateBatch,
    config: LossConfig,
    policy: PreTrainedModel,
    reference: PreTrainedModel | None,
    clock: Clock | None = None,
    *,
    with_proximal: bool = True,
    advantages: TokenAdvantages | None = None,
    most: Callable[[int], int] = int,
) -> TokenTargets:
    """Advantages, and every log-prob that needs no gradient.

    The skill context is scored by the live weights before the first step, with the same code as the plain one. Where
    `batch` is the share of a rank, `advantages` are its part of what the whole batch gave; `most`: see `score`.
    """
    method, clock = get_method(config.method), clock or Clock()
    trajectories = batch.trajectories
    device = next(policy.parameters()).device
    plain = [row for trajectory in trajectories for row in trajectory.plain]
    lengths = [len(trajectory.fresh) for trajectory in trajectories]
    offsets = tuple(int(offset) for offset in np.concatenate([[0], np.cumsum(lengths)]))
    advantages = advantages or token_advantages(batch, config)
    advantage = torch.from_numpy(advantages.advantage).to(device)
    skill_mask = torch.zeros(offsets[-1], dtype=torch.bool, device=device)
    if config.kl_coef > 0 and reference is None:
        raise ValueError(f"kl_coef {config.kl_coef} needs a reference model")

    reference_logprob = None
    if reference is not None and config.kl_coef > 0:
        with clock.phase("score_reference"):
            reference_logprob = _logprobs(reference, plain, config, most)
    with clock.phase("score_contexts"):
        rows = _context_rows(batch, with_plain=with_proximal, with_skill=method.has_teacher)
        contexts = rows.split(_logprobs(policy, rows.rows, config, most))
    skill = None
    if contexts.skill is not None:
        places = [t.skill_positions + start for t, start in zip(trajectories, offsets[:-1], strict=True)]
        at = torch.from_numpy(np.concatenate(places)).to(device)
        skill = torch.zeros_like(advantage, dtype=contexts.skill.dtype).index_copy(0, at, contexts.skill)
        skill_mask[at] = True
    behaviour = _joined([trajectory.behaviour_logprob for trajectory in trajectories], np.float32)
    behaviour_logprob = torch.from_numpy(behaviour).to(device)
    require_finite("behaviour_logprob", behaviour_logprob)
    return TokenTargets(
        advantage=advantage,
        behaviour=behaviour_logprob,
        proximal=contexts.plain,
        reference=reference_logprob,
        skill=skill,
        skill_mask=skill_mask,
        response_mask=torch.from_numpy(_joined([trajectory.trained for trajectory in trajectories], np.bool_)).to(
            device
        ),
        offsets=offsets,
        group_metrics=advantages.metrics,
    )


@torch.no_grad()
def _logprobs(
    model: PreTrainedModel, rows: Sequence[TokenRow], config: LossConfig, most: Callable[[int], int]
) -> torch.Tensor:
    """Log-probs of the response tokens of the rows, float32 [R]."""
    return score(
        model,
        rows,
        temperature=config.temperature,
        token_budget=config.token_budget,
        compute_dtype=config.compute_dtype,
        most=most,
    ).logprob


def _context_rows(batch: UpdateBatch, *, with_plain: bool, with_skill: bool) -> _ContextRows:
    """Both contexts of each trajectory side by side, in one stream of rows: what they share is computed once."""
    rows: list[TokenRow] = []
    of_skill: list[bool] = []
    for trajectory in batch.trajectories:
        plain = trajectory.plain if with_plain else ()
        skill = trajectory.skill if with_skill else ()
        rows += [*plain, *skill]
        of_skill += [False] * len(plain) + [True] * len(skill)
    return _ContextRows(rows, np.array(of_skill, dtype=bool), with_plain)


def _joined(arrays: list[np.ndarray], dtype: type[np.generic]) -> np.ndarray:
    """All arrays in one, of which there may be none."""
    joined: np.ndarray = np.concatenate([np.empty(0, dtype), *arrays]).astype(dtype, copy=False)
    return joined


def token_advantages(batch: UpdateBatch, config: LossConfig) -> TokenAdvantages:
    """The advantage of each response token is that of its turn, a turn being one row of the statistics.

    It is the sum of the method's terms: `episode` compares the returns of the group, `step_groups` the discounted step
    returns over equal observations, the reward of an episode being paid at its last turn. Without a term it is 0.
    """
    trajectories = batch.trajectories
    terms = get_method(config.method).advantage_terms(config.opsd_rl)
    turns = np.array([len(trajectory.invalid) for trajectory in trajectories])
    last_turn = np.cumsum(turns) - 1
    row_trajectory = np.repeat(np.arange(len(turns)), turns)
    returns = np.repeat([trajectory.episode_return for trajectory in trajectories], turns)
    invalid = np.concatenate([trajectory.invalid for trajectory in trajectories])
    groups = np.repeat([trajectory.group_id for trajectory in trajectories], turns)
    penalty, divide, statistics = config.invalid_penalty, config.divide_by_std, config.statistics
    episode = group_advantage(
        returns, invalid, groups, row_trajectory, penalty=penalty, divide_by_std=divide, statistics=statistics
    )
    metrics = {
        "groups": float(episode.informative.size),
        "zero_variance_groups": float((~episode.informative).sum()),
    }
    per_turn = episode.advantage if "episode" in terms else np.zeros_like(episode.advantage)
    if "step_groups" in terms:
        rewards = np.zeros_like(returns)
        rewards[last_turn[turns > 0]] = returns[last_turn[turns > 0]]
        step = step_advantage(
            discounted_returns(rewards, row_trajectory, config.gigpo_discount),
            invalid,
            groups,
            np.concatenate([trajectory.observation_ids for trajectory in trajectories]),
            penalty=penalty,
            divide_by_std=divide,
            statistics=statistics,
        )
        per_turn = per_turn + config.gigpo_step_weight * step.advantage
        metrics |= {
            "step_groups": float(step.informative.size),
            "zero_variance_step_groups": float((~step.informative).sum()),
        }
    rows = [start + t.turn_index for start, t in zip(np.cumsum(turns) - turns, trajectories, strict=True)]
    return TokenAdvantages(per_turn[np.concatenate(rows)].astype(np.float32), metrics)


def denominators(targets: TokenTargets, mini: range) -> Denominators:
    """Count the trained tokens of the trajectories `mini`."""
    whole = slice(targets.offsets[mini.start], targets.offsets[mini.stop])
    mask = targets.response_mask[whole]
    return Denominators(float(mask.sum()), float((mask & targets.skill_mask[whole]).sum()))
