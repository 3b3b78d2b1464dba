"""A learning problem for a simulated schedule: softmax policies on a contextual bandit, trained by policy gradient.

A game belongs to one of `NUM_CLASSES` classes of rising difficulty, a token of its episodes is a choice between
`NUM_ACTIONS` actions of which one is right, and an episode returns the share of right choices. The policy has logits of
its own for each class: what is learned in one class helps in no other, so a class whose episodes are lost stays as it
was. Many independent learners live through one schedule at once, which tells the schedule from luck.
"""

from typing import Final

import numpy as np

NUM_CLASSES: Final = 16
NUM_ACTIONS: Final = 8
RIGHT: Final = 0
"""Number of the right action; which one it is makes no difference to a softmax."""
EASIEST_LOGIT: Final = 1.0
HARDEST_LOGIT: Final = -1.0
"""Logit of the right action in the easiest and the hardest class before training, the others' being 0."""
HARD_CLASSES: Final = NUM_CLASSES // 4
IMPORTANCE_CAP: Final = 2.0
"""As `loss.importance_cap` of a run."""
MIN_STD: Final = 1e-6


def first_logits() -> np.ndarray:
    """Return the logits before training [C, A]."""
    logits = np.zeros((NUM_CLASSES, NUM_ACTIONS))
    logits[:, RIGHT] = np.linspace(EASIEST_LOGIT, HARDEST_LOGIT, NUM_CLASSES)
    return logits


def softmax(logits: np.ndarray) -> np.ndarray:
    """Probabilities along the last axis [..., A]."""
    powers = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return np.asarray(powers / powers.sum(axis=-1, keepdims=True))


def advantages(returns: np.ndarray, group_size: int) -> np.ndarray:
    """Return (R - mean) / std over each group, 0 for equal returns; `returns` [L, N] has whole groups in order."""
    groups = returns.reshape(len(returns), -1, group_size)
    centred = groups - groups.mean(axis=-1, keepdims=True)
    return np.asarray(centred / np.maximum(groups.std(axis=-1, keepdims=True), MIN_STD)).reshape(returns.shape)


def policy_gradient(
    logits: np.ndarray, classes: np.ndarray, actions: np.ndarray, behaviour: np.ndarray, weights: np.ndarray
) -> np.ndarray:
    """Return sum_t min(pi(a_t) / b_t, cap) w_t grad log pi(a_t) of each learner [L, C, A].

    `logits` [L, C, A]; for the tokens: `classes` [T], `actions`, their probabilities `behaviour` under the policy that
    sampled them, and `weights` [L, T]. Truncated importance sampling: unbiased where nothing is truncated.
    """
    now = softmax(logits)[:, classes]  # [L, T, A]
    taken = np.take_along_axis(now, actions[..., None], axis=-1)[..., 0]
    factors = np.minimum(taken / behaviour, IMPORTANCE_CAP) * weights
    each = -factors[..., None] * now
    np.put_along_axis(
        each, actions[..., None], np.take_along_axis(each, actions[..., None], -1) + factors[..., None], axis=-1
    )
    gradient = np.zeros_like(logits)
    for number in np.unique(classes):
        gradient[:, number] = each[:, classes == number].sum(axis=1)
    return gradient


class BanditLearners:
    """Learners [L] that make every update of one schedule, each with samples of its own; keeps all their versions."""

    def __init__(self, num_learners: int, group_size: int, learning_rate: float, seed: int) -> None:
        """Version 0 is the policy before training."""
        self._group_size, self._learning_rate = group_size, learning_rate
        self._rng = np.random.default_rng(seed)
        self._versions = [np.repeat(first_logits()[None], num_learners, axis=0)]

    def update(self, classes: np.ndarray, episodes: np.ndarray, versions: np.ndarray, trained: np.ndarray) -> None:
        """Make the next version from whole groups in order; all arguments [T], one item a token.

        `episodes` numbers the episodes 0, 1, ...; a token is sampled with the logits of its version; only `trained`
        ones are in the loss, but all of an episode count in its return.
        """
        actions, behaviour = self._sample(classes, versions)
        lengths = np.bincount(episodes)
        right = np.stack([np.bincount(episodes, weights=each) for each in (actions == RIGHT).astype(float)])
        weights = advantages(right / lengths, self._group_size)[:, episodes[trained]] / max(1, trained.sum())
        now = self._versions[-1]
        step = policy_gradient(now, classes[trained], actions[:, trained], behaviour[:, trained], weights)
        self._versions.append(now + self._learning_rate * step)

    def _sample(self, classes: np.ndarray, versions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return actions and their probabilities [L, T]."""
        oldest = int(versions.min())
        policies = softmax(np.stack(self._versions[oldest:], axis=1))  # [L, V, C, A]
        policy = policies[:, versions - oldest, classes]  # [L, T, A]
        draws = self._rng.random(policy.shape[:2])
        actions = np.minimum((policy.cumsum(axis=-1) < draws[..., None]).sum(axis=-1), NUM_ACTIONS - 1)
        return actions, np.take_along_axis(policy, actions[..., None], axis=-1)[..., 0]

    def rewards(self) -> np.ndarray:
        """Return the expected return of the newest version in each class [L, C]."""
        return softmax(self._versions[-1])[..., RIGHT]
