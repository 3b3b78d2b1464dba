"""The learning problem behind the rewards of a simulated schedule."""

import numpy as np
import pytest

from seed_async.tools.bandit import (
    IMPORTANCE_CAP,
    NUM_ACTIONS,
    NUM_CLASSES,
    BanditLearners,
    advantages,
    first_logits,
    policy_gradient,
    softmax,
)

GROUP = 8


def batch(groups: int, length: int = 32) -> tuple[np.ndarray, np.ndarray]:
    """Classes and episodes of the tokens of groups of equal episodes, a group on each class in turn."""
    episodes = np.repeat(np.arange(groups * GROUP), length)
    return (episodes // GROUP) % NUM_CLASSES, episodes


def test_the_gradient_is_that_of_its_definition_written_out() -> None:
    """Slowly, token by token, with a behaviour policy of its own."""
    rng = np.random.default_rng(0)
    logits, tokens = rng.standard_normal((2, NUM_CLASSES, NUM_ACTIONS)), 50
    classes, actions = rng.integers(0, NUM_CLASSES, tokens), rng.integers(0, NUM_ACTIONS, (2, tokens))
    behaviour, weights = rng.uniform(0.02, 1.0, (2, tokens)), rng.standard_normal((2, tokens))
    expected = np.zeros_like(logits)
    for learner in range(2):
        for token, number in enumerate(classes):
            now = np.exp(logits[learner, number]) / np.exp(logits[learner, number]).sum()
            score = np.eye(NUM_ACTIONS)[actions[learner, token]] - now
            ratio = now[actions[learner, token]] / behaviour[learner, token]
            expected[learner, number] += min(ratio, IMPORTANCE_CAP) * weights[learner, token] * score
    assert policy_gradient(logits, classes, actions, behaviour, weights) == pytest.approx(expected)


def test_sampled_on_policy_it_climbs_the_expected_return() -> None:
    """Its mean over many learners has the direction of the true gradient of the softmax bandit, in every class."""
    learners = BanditLearners(400, GROUP, 1.0, seed=0)
    classes, episodes = batch(groups=NUM_CLASSES)
    before = first_logits()
    learners.update(classes, episodes, np.zeros_like(classes), np.ones_like(classes, dtype=bool))
    step = (learners._versions[-1] - learners._versions[-2]).mean(axis=0)
    now = softmax(before)
    true = now[:, :1] * (np.eye(NUM_ACTIONS)[0] - now)
    cosine = (step * true).sum(axis=1) / np.linalg.norm(step, axis=1) / np.linalg.norm(true, axis=1)
    assert cosine.min() > 0.99


def test_advantages_are_normalised_in_each_group_and_zero_without_contrast() -> None:
    """As in GRPO."""
    returns = np.array([[1.0, 0.0, 0.0, 0.0, 0.5, 0.5, 0.5, 0.5]])
    normal = advantages(returns, 4)
    assert normal[0, :4] == pytest.approx((returns[0, :4] - 0.25) / np.std(returns[0, :4]))
    assert np.all(normal[0, 4:] == 0)


def test_a_class_whose_tokens_are_left_out_stays_as_it_was() -> None:
    """Masking and dropping cost exactly what they leave out; the others learn."""
    learners = BanditLearners(4, GROUP, 20.0, seed=0)
    classes, episodes = batch(groups=NUM_CLASSES)
    for version in range(30):
        learners.update(classes, episodes, np.full_like(classes, version), classes < NUM_CLASSES - 2)
    rewards, before = learners.rewards(), softmax(first_logits())[:, 0]
    assert np.all(rewards[:, -2:] == before[-2:])
    assert np.all(rewards[:, :-2] > before[:-2] + 0.2)


def test_each_token_is_sampled_by_its_own_version() -> None:
    """Old tokens come from the old policy: a learner that has learned still sees the old mistakes in them."""
    learners = BanditLearners(64, GROUP, 20.0, seed=0)
    classes, episodes = batch(groups=NUM_CLASSES)
    for version in range(60):
        learners.update(classes, episodes, np.full_like(classes, version), np.ones_like(classes, dtype=bool))
    versions = np.where(np.arange(classes.size) % 2, 60, 0)
    actions, behaviour = learners._sample(classes, versions)
    right = (actions == 0).mean(axis=0)
    policies = softmax(learners._versions[0])[0, :, 0], learners.rewards().mean(axis=0)
    assert right[versions == 0].mean() == pytest.approx(policies[0].mean(), abs=0.02)
    assert right[versions == 60].mean() == pytest.approx(policies[1].mean(), abs=0.02)
    assert behaviour.min() > 0


def test_equal_seeds_learn_the_same() -> None:
    """The table can be made again."""
    classes, episodes = batch(groups=2)
    both = [BanditLearners(3, GROUP, 20.0, seed=1) for _ in range(2)]
    for learners in both:
        learners.update(classes, episodes, np.zeros_like(classes), np.ones_like(classes, dtype=bool))
    assert np.array_equal(both[0].rewards(), both[1].rewards())
