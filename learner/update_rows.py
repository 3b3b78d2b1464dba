"""From received samples to what an update consumes: its hyper-parameters, its rows, and the bound on ages once more."""

from collections import Counter
from collections.abc import Sequence

import numpy as np

from seed_async.layouts import TokenRow, plain_rows, teacher_rows
from seed_async.learner.algorithms.methods import Method, get_method
from seed_async.learner.batch import LossConfig, UpdateBatch, UpdateTrajectory
from seed_async.messages import Sample
from seed_async.skill_library import SkillLibrary
from seed_async.staleness import StalenessBound
from seed_async.text import ChatTokenizer
from seed_async.topology import Topology


class StaleBatchError(RuntimeError):
    """A batch with a token older than the bound that nobody masked: it must never be trained."""


def loss_config(topology: Topology) -> LossConfig:
    """The update's hyper-parameters as the topology gives them."""
    loss, optimizer = topology.loss, topology.optimizer
    return LossConfig(
        method=topology.method,
        clip=loss.clip,
        dual_clip=loss.dual_clip,
        importance_cap=loss.importance_cap,
        synchronous=topology.staleness.max == 0,
        opd_beta=loss.opd_beta,
        opd_coef=loss.opd_coef,
        opd_gate=loss.opd_gate,
        opid_coef=loss.opid_coef,
        opsd_coef=loss.opsd_coef,
        opsd_rl=loss.opsd_rl,
        gigpo_discount=loss.gigpo_discount,
        gigpo_step_weight=loss.gigpo_step_weight,
        kl_coef=loss.kl_coef,
        entropy_coef=loss.entropy_coef,
        invalid_penalty=loss.invalid_penalty,
        divide_by_std=loss.divide_by_std,
        statistics=loss.statistics,
        temperature=topology.rollout.temperature,
        max_grad_norm=optimizer.max_grad_norm,
        token_budget=optimizer.token_budget,
        compute_dtype=topology.roles.learner.dtype,
        mini_batch_trajectories=optimizer.mini_batch_trajectories,
    )


def teacher_skill(sample: Sample, method: Method, library: SkillLibrary | None) -> tuple[str, dict[int, str]]:
    """The skill of the teacher's contexts, empty for none, and the step skills that replace it, by turn."""
    if method.has_teacher and sample.skill is not None:
        steps = {step.step: step.skill for step in sample.skill.step_skills} if method.step_skills else {}
        return sample.skill.episode_skill, steps
    if method.uses_library and library is not None:
        return library.skill(sample.trajectory.task_type) or "", {}
    return "", {}


def update_batch(
    samples: Sequence[Sample],
    version: int,
    tokenizer: ChatTokenizer,
    topology: Topology,
    max_skill_tokens: int,
    library: SkillLibrary | None = None,
) -> tuple[UpdateBatch, dict[str, float]]:
    """Turn received samples into an update's rows.

    Returns also the counts of what the distillation has to leave out: `masked_rows_REASON` and `masked_tokens_REASON`,
    rows and response tokens without a teacher because their trajectory has no skill (by the sample's reason)
    or because the augmented row is over `max_skill_tokens` (`over_long`). With `on_stale: mask` the response tokens
    older than the bound are out of every term: `masked_tokens_stale`.
    """
    method = get_method(topology.method)
    bound = StalenessBound(topology.staleness.max, topology.rollout.groups_per_update)
    masks = topology.staleness.on_stale == "mask"
    observation_ids: dict[str, int] = {}
    masked: Counter[str] = (
        Counter(masked_rows_over_long=0, masked_tokens_over_long=0) if method.has_teacher else Counter()
    )
    if masks:
        masked["masked_tokens_stale"] = 0
    trajectories = []
    for sample in samples:
        trajectory, versions = sample.trajectory, sample.trajectory.versions
        trained = bound.admits_tokens(version, versions) if masks else np.ones(versions.size, dtype=bool)
        if masks:
            masked["masked_tokens_stale"] += int((~trained).sum())
        plain = plain_rows(trajectory)
        skill: tuple[TokenRow, ...] = ()
        episode_skill, step_skills = teacher_skill(sample, method, library)
        if episode_skill:
            teacher = teacher_rows(trajectory, episode_skill, step_skills, tokenizer, max_skill_tokens)
            skill = teacher.rows
            masked["masked_rows_over_long"] += teacher.rows_left_out
            masked["masked_tokens_over_long"] += teacher.tokens_left_out
        elif method.has_teacher:
            reason = sample.skill_reason or "no_skill"
            masked[f"masked_rows_{reason}"] += len(plain)
            masked[f"masked_tokens_{reason}"] += sum(row.turn_index.size for row in plain)
        texts = trajectory.texts
        trajectories.append(
            UpdateTrajectory(
                plain=plain,
                behaviour_logprob=trajectory.behaviour_logprob,
                fresh=versions == version,
                trained=trained,
                invalid=np.array([not text.parsed for text in texts]),
                observation_ids=np.array(
                    [observation_ids.setdefault(text.observation, len(observation_ids)) for text in texts]
                ),
                episode_return=trajectory.episode_return * topology.loss.reward_scale,
                group_id=trajectory.group_id,
                skill=skill,
            )
        )
    return UpdateBatch(tuple(trajectories)), {name: float(count) for name, count in masked.items()}


def check_ages(samples: Sequence[Sample], batch: UpdateBatch, version: int, bound: StalenessBound) -> None:
    """The bound once more, just before the forward pass, on the very mask that the loss reads.

    Raises StaleBatchError: the buffer broke its promise, or the mask is wrong.
    """
    for sample, rows in zip(samples, batch.trajectories, strict=True):
        versions = sample.trajectory.versions
        too_old = rows.trained & ~bound.admits_tokens(version, versions)
        if too_old.any():
            raise StaleBatchError(
                f"trajectory {sample.trajectory.trajectory_id}: {int(too_old.sum())} tokens, the oldest of version "
                f"{int(versions[too_old].min())}, came for the update from version {version}: older than "
                f"{bound.max_staleness}"
            )


def trained_ages(samples: Sequence[Sample], version: int, bound: StalenessBound) -> list[int]:
    """The age of each trajectory by its oldest token that is trained; one with all its tokens masked has none."""
    versions = [sample.trajectory.versions for sample in samples]
    young = [each[bound.admits_tokens(version, each)] for each in versions]
    return [version - int(each.min()) for each in young if each.size]
