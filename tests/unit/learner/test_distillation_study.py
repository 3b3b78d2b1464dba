"""A numeric study with fixed seeds: which way the distillation terms pull, on-policy, stale, and stale but corrected.

Softmax policies over a few tokens in a few states; `skill` is the policy's own skill-conditioned self, `behaviour` an
older policy that sampled the tokens. Expectations are sums over all tokens, so that nothing but the last test is noisy.
"""

import numpy as np
import pytest
import torch

from seed_async.learner.algorithms.losses import TokenLogprobs, metrics_from_sums, seed_loss
from seed_async.learner.algorithms.terms import gated_distillation, importance_weight, reverse_kl_to_skill

STATES, TOKENS = 12, 8
BETA = 5.0
SEEDS = range(5)
# Nats: how much the skill changes log-probs, and how much the policy has moved since it sampled.
SHIFT, STALENESS = 0.05, 0.2


class Toy:
    """Logits [STATES, TOKENS] of the policy, and log-probs of its skill-conditioned self and of an older policy."""

    def __init__(self, seed: int, *, shift: float = SHIFT, staleness: float = 0.0) -> None:
        """`shift` and `staleness` are the sizes of the log-prob changes that the skill and the age make, in nats."""
        generator = torch.Generator().manual_seed(seed)
        normal = torch.randn(3, STATES, TOKENS, generator=generator, dtype=torch.float64)
        self.logits = normal[0].clone().requires_grad_()
        self.skill = torch.log_softmax(normal[0] + shift * normal[1], dim=-1).reshape(-1)
        self.behaviour = torch.log_softmax(normal[0] + staleness * normal[2], dim=-1).reshape(-1)

    def current(self) -> torch.Tensor:
        """Log-probs of every token in every state, with gradient, [STATES * TOKENS]."""
        return torch.log_softmax(self.logits, dim=-1).reshape(-1)

    def reverse_kl_gradient(self) -> torch.Tensor:
        """Gradient of the mean over states of KL(policy | skill), by autograd of its definition."""
        current = self.current()
        return self._gradient((current.exp() * (current - self.skill)).sum() / STATES)

    def opd_gradient(self, cap: float | None = None, gate: str = "sigmoid") -> torch.Tensor:
        """Expected gradient of the gated term over tokens that the behaviour policy samples; no cap: no weight."""
        current, everything = self.current(), torch.ones(STATES * TOKENS, dtype=torch.bool)
        value = gated_distillation(current, self.skill, self._weight(current, cap), everything, BETA, gate).value
        return self._gradient((self.behaviour.exp() * value).sum() / STATES)

    def plain_kl_gradient(self, cap: float | None) -> tuple[torch.Tensor, float]:
        """Expected gradient and value of the plain per-token reverse KL of opsd."""
        current, everything = self.current(), torch.ones(STATES * TOKENS, dtype=torch.bool)
        weight = self._weight(current, cap)
        value = reverse_kl_to_skill(current, current.detach(), self.skill, weight, everything).value
        mean = (self.behaviour.exp() * value).sum() / STATES
        return self._gradient(mean), mean.item()

    def _weight(self, current: torch.Tensor, cap: float | None) -> torch.Tensor:
        if cap is None:
            return torch.ones_like(current)
        return importance_weight(current.detach(), self.behaviour, cap).weight

    def _gradient(self, loss: torch.Tensor) -> torch.Tensor:
        (gradient,) = torch.autograd.grad(loss, self.logits)
        return gradient.reshape(-1)


def cosine(a: torch.Tensor, b: torch.Tensor) -> float:
    """Cosine of the angle between two gradients."""
    return float(torch.nn.functional.cosine_similarity(a, b, dim=0))


@pytest.mark.parametrize("seed", SEEDS)
def test_on_policy_the_opd_gradient_is_the_reverse_kl_pull(seed) -> None:
    """With coefficient beta / 4: the gate's constant half has no expected gradient on-policy."""
    toy = Toy(seed)
    opd, kl = toy.opd_gradient(), toy.reverse_kl_gradient()
    assert cosine(opd, kl) > 0.99
    assert float(opd.norm() / kl.norm()) == pytest.approx(BETA / 4, rel=0.05)


@pytest.mark.parametrize("seed", SEEDS)
def test_stale_and_uncorrected_it_pulls_to_the_stale_policy_instead(seed) -> None:
    """The half no longer cancels: it is the gradient of half the cross-entropy to the behaviour policy."""
    toy = Toy(seed, staleness=STALENESS)
    opd = toy.opd_gradient()
    to_stale = toy._gradient(-(toy.behaviour.exp() * toy.current()).sum() / STATES)
    assert cosine(opd, toy.reverse_kl_gradient()) < 0.7
    assert cosine(opd, to_stale) > max(0.7, cosine(opd, toy.reverse_kl_gradient()))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("correction", [{"cap": 2.0}, {"gate": "centered"}], ids=["weight", "centered"])
def test_stale_and_corrected_it_is_the_reverse_kl_pull_again(seed, correction) -> None:
    """Either by the importance weight, truncated at C = 2, or by the centred gate, which needs no ratio."""
    toy = Toy(seed, staleness=STALENESS)
    assert cosine(toy.opd_gradient(**correction), toy.reverse_kl_gradient()) > 0.99


@pytest.mark.parametrize("seed", SEEDS)
def test_a_tight_cap_breaks_the_cancellation(seed) -> None:
    """C = 1.2 truncates what C = 2 keeps."""
    toy = Toy(seed, staleness=0.3)
    kl = toy.reverse_kl_gradient()
    assert cosine(toy.opd_gradient(cap=1.2), kl) < 0.95 < 0.99 < cosine(toy.opd_gradient(cap=2.0), kl)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("staleness", [0.0, 0.4])
def test_the_plain_term_is_exactly_the_reverse_kl_at_any_age(seed, staleness) -> None:
    """Method opsd: value and gradient are without bias, for a large shift too, while no weight is truncated."""
    toy = Toy(seed, shift=1.0, staleness=staleness)
    gradient, value = toy.plain_kl_gradient(cap=1e9)
    current = toy.current().detach()
    torch.testing.assert_close(gradient, toy.reverse_kl_gradient(), rtol=1e-9, atol=1e-12)
    assert value == pytest.approx(float((current.exp() * (current - toy.skill)).sum()) / STATES, rel=1e-9)


def test_the_plain_term_without_its_weight_is_biased_on_stale_tokens() -> None:
    """So the weight is not decoration."""
    toy = Toy(0, shift=0.5, staleness=0.4)
    assert cosine(toy.plain_kl_gradient(None)[0], toy.reverse_kl_gradient()) < 0.99


@pytest.mark.parametrize(
    ("staleness", "options", "is_the_pull"),
    [
        (0.0, {}, True),
        (STALENESS, {"behaviour": None}, False),
        (STALENESS, {}, True),
        (STALENESS, {"behaviour": None, "gate": "centered"}, True),
    ],
    ids=["on-policy", "stale", "weight", "centered"],
)
def test_the_joint_loss_over_sampled_tokens_shows_the_same(staleness, options, is_the_pull) -> None:
    """The whole loss on a million sampled tokens; the staleness-bias ratio tells when the correction is needed."""
    toy, count = Toy(1, staleness=staleness), 1_000_000
    rng = np.random.default_rng(0)
    probabilities = toy.behaviour.exp().reshape(STATES, TOKENS).numpy()
    states = rng.integers(0, STATES, count)
    tokens = np.array([rng.choice(TOKENS, count, p=row) for row in probabilities])[states, np.arange(count)]
    at = torch.from_numpy(states * TOKENS + tokens)
    current, everything = toy.current()[at], torch.ones(count, dtype=torch.bool)
    behaviour = None if "behaviour" in options else toy.behaviour[at]
    loss = seed_loss(
        TokenLogprobs(current, current.detach(), behaviour, None, toy.skill[at]),
        torch.zeros(count, dtype=torch.float64),
        torch.zeros(count, dtype=torch.float64),
        everything,
        everything,
        response_denominator=float(count),
        skill_denominator=float(count),
        clip=0.2,
        dual_clip=3.0,
        importance_cap=2.0,
        beta=BETA,
        gate=options.get("gate", "sigmoid"),
        distillation="gated",
        distillation_coef=1.0,
        skill_advantage_coef=0.0,
        kl_coef=0.0,
        entropy_coef=0.0,
    )
    similarity = cosine(toy._gradient(loss.total), toy.reverse_kl_gradient())
    assert similarity > 0.98 if is_the_pull else similarity < 0.7
    if behaviour is not None:
        assert (float(metrics_from_sums(loss.sums)["staleness_bias_ratio"]) > 0.3) == (staleness > 0)
