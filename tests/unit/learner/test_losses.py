"""The joint loss and its terms against slow numpy truths, across every clip and mask edge."""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from seed_async.learner.algorithms import losses, terms
from seed_async.learner.algorithms.losses import SeedLoss, TokenLogprobs, add_sums, metrics_from_sums, seed_loss
from tests.reference.numpy_losses import k3_truth, loss_truth

COEFFICIENTS = {
    "clip": 0.2,
    "dual_clip": 3.0,
    "importance_cap": 2.0,
    "beta": 5.0,
    "gate": "sigmoid",
    "distillation": "gated",
    "distillation_coef": 0.7,
    "skill_advantage_coef": 0.0,
    "kl_coef": 0.3,
    "entropy_coef": 0.1,
}
GATES = ["sigmoid", "centered", "positive_only"]
# How a skill enters: the distillation term and the coefficient of its shift in the advantage.
KINDS = [("gated", 0.0), ("reverse_kl", 0.0), ("none", 0.0), ("none", 0.4)]
# Steps of log-prob that land on both sides of every bound: ratio 0.8, 1.2, 2 and 3, a KL of 10, and far beyond.
NEAR = st.floats(-1.5, 1.5) | st.sampled_from([0.0, 4.0, -15.0, 1e4 - 1])


@st.composite
def token(draw):
    """One token; its log-probs lie near each other or, now and then, thousands of nats apart."""
    proximal = draw(st.floats(-20, -1e-3) | st.just(-1e4))

    def near() -> float:
        return min(proximal + draw(NEAR), 0.0)

    return {
        "proximal": proximal,
        "current": near(),
        "behaviour": near(),
        "reference": near(),
        "skill": near(),
        "entropy": draw(st.floats(0, 5)),
        "advantage": draw(st.sampled_from([0.0, 1.0, -1.0, 2.3, -0.4])),
        "m": draw(st.booleans()),
        "u": draw(st.booleans()),
    }


def evaluate(tokens: list[dict], part: slice = slice(None), **overrides) -> tuple[SeedLoss, torch.Tensor]:
    """The loss of some of the tokens under the denominators of all, and the leaf that holds `current`."""

    def column(name: str, dtype: torch.dtype = torch.float64) -> torch.Tensor:
        return torch.tensor([t[name] for t in tokens], dtype=dtype)[part]

    current = column("current").requires_grad_()
    logprobs = TokenLogprobs(current, column("proximal"), column("behaviour"), column("reference"), column("skill"))
    logprobs = logprobs._replace(**overrides.pop("logprobs", {}))
    loss = seed_loss(
        logprobs,
        column("entropy"),
        column("advantage"),
        column("m", torch.bool),
        column("u", torch.bool),
        response_denominator=float(sum(t["m"] for t in tokens)),
        skill_denominator=float(sum(t["m"] and t["u"] for t in tokens)),
        **(COEFFICIENTS | overrides),
    )
    return loss, current


def gradient(loss: torch.Tensor, leaf: torch.Tensor) -> torch.Tensor:
    """Derivative of the loss by the leaf."""
    (value,) = torch.autograd.grad(loss, leaf)
    return value


def random_tokens(seed: int, count: int = 40) -> list[dict]:
    """Tokens in the interior of every formula, for gradients."""
    rng = np.random.default_rng(seed)
    names = ("proximal", "current", "behaviour", "reference", "skill")
    return [
        {name: -2.0 + 0.5 * rng.normal() for name in names}
        | {"entropy": rng.random(), "advantage": rng.normal(), "m": rng.random() < 0.8, "u": rng.random() < 0.6}
        for _ in range(count)
    ]


@settings(deadline=None, max_examples=200)
@given(st.lists(token(), max_size=12), st.sampled_from(GATES), st.sampled_from([0.0, 1.0, 5.0]), st.sampled_from(KINDS))
def test_the_joint_loss_and_its_means_follow_their_definitions(tokens, gate, beta, kind) -> None:
    """Oracle (h), with empty masks and log-probs down to -1e4; the gradient is finite everywhere."""
    options = {"gate": gate, "beta": beta, "distillation": kind[0], "skill_advantage_coef": kind[1]}
    loss, current = evaluate(tokens, **options)
    truth = loss_truth(tokens, clip=0.2, dual_clip=3.0, cap=2.0, opd_coef=0.7, kl_coef=0.3, entropy_coef=0.1, **options)
    for name, value in truth.items():
        assert getattr(loss, name).item() == pytest.approx(value, rel=1e-6, abs=1e-6), name
    assert torch.isfinite(gradient(loss.total, current)).all()
    assert all(math.isfinite(float(value)) for value in metrics_from_sums(loss.sums).values())


@settings(deadline=None)
@given(st.lists(token(), min_size=1, max_size=12), st.sampled_from(KINDS))
def test_float32_stays_finite_at_extreme_log_probs(tokens, kind) -> None:
    """The same edges in the precision that training uses."""
    values = {n: torch.tensor([t[n] for t in tokens]) for n in TokenLogprobs._fields}
    values["current"].requires_grad_()
    ones = torch.ones(len(tokens), dtype=torch.bool)
    advantage = torch.tensor([t["advantage"] for t in tokens])
    loss = seed_loss(
        TokenLogprobs(**values),
        torch.zeros(len(tokens)),
        advantage,
        ones,
        ones,
        response_denominator=1.0,
        skill_denominator=1.0,
        **(COEFFICIENTS | {"distillation": kind[0], "skill_advantage_coef": kind[1]}),
    )
    assert torch.isfinite(loss.total) and torch.isfinite(gradient(loss.total, values["current"])).all()


@settings(deadline=None)
@given(st.lists(token(), min_size=2, max_size=12), st.sampled_from(KINDS), st.data())
def test_any_split_into_parts_adds_up_to_the_whole(tokens, kind, data) -> None:
    """Oracle (f) for the loss, its gradient, its components and its metrics."""
    cuts = sorted(data.draw(st.sets(st.integers(1, len(tokens) - 1), max_size=4)))
    bounds = [0, *cuts, len(tokens)]
    options = {"distillation": kind[0], "skill_advantage_coef": kind[1]}
    whole, current = evaluate(tokens, **options)
    parts = [evaluate(tokens, slice(a, b), **options) for a, b in pairwise(bounds)]
    joined = torch.cat([gradient(part.total, leaf) for part, leaf in parts])
    torch.testing.assert_close(joined, gradient(whole.total, current), rtol=1e-12, atol=1e-12)
    for name in ("total", "policy", "entropy", "kl", "distillation"):
        added = sum(getattr(part, name).item() for part, _ in parts)
        assert added == pytest.approx(getattr(whole, name).item(), rel=1e-9, abs=1e-9)
    sums = add_sums([part.sums for part, _ in parts])
    for mine, other in zip(sums, whole.sums, strict=True):
        assert float(mine) == pytest.approx(float(other), rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("gate", GATES)
def test_the_gradient_is_that_of_finite_differences(gate) -> None:
    """Oracle (c): with the stop-gradients held fixed, every term of the loss."""
    tokens = random_tokens(3)
    loss, current = evaluate(tokens, gate=gate)
    exact = gradient(loss.total, current)
    step = 1e-6
    for index, moved in enumerate(tokens):
        if not moved["m"]:
            assert exact[index] == 0
            continue
        at = moved["current"]
        # The gate is a constant of the differentiation: take its value where the gradient was taken.
        sigmoid = 1 / (1 + math.exp(-5.0 * (moved["skill"] - at)))
        fixed_gate = {
            "sigmoid": sigmoid,
            "centered": sigmoid - 0.5,
            "positive_only": sigmoid if moved["skill"] > at else 0.0,
        }[gate]
        weight = min(math.exp(moved["proximal"] - moved["behaviour"]), 2.0)
        values = []
        for offset in (-step, step):
            shifted = [dict(t) for t in tokens]
            shifted[index]["current"] = at + offset
            values.append(evaluate(shifted, distillation_coef=0.0)[0].total.item())
        num_active = sum(t["m"] and t["u"] for t in tokens)
        opd = -0.7 * moved["u"] * weight * fixed_gate / num_active
        assert float(exact[index]) == pytest.approx((values[1] - values[0]) / (2 * step) + opd, rel=1e-5, abs=1e-7)


@settings(deadline=None)
@given(st.lists(token(), min_size=1, max_size=12), st.sampled_from(KINDS), st.randoms(use_true_random=False))
def test_the_order_of_tokens_does_not_matter(tokens, kind, random) -> None:
    """A permutation carries the gradient with it."""
    options = {"distillation": kind[0], "skill_advantage_coef": kind[1]}
    order = random.sample(range(len(tokens)), len(tokens))
    loss, leaf = evaluate(tokens, **options)
    shuffled, other = evaluate([tokens[i] for i in order], **options)
    assert shuffled.total.item() == pytest.approx(loss.total.item(), rel=1e-9, abs=1e-9)
    torch.testing.assert_close(gradient(shuffled.total, other), gradient(loss.total, leaf)[order], rtol=1e-12, atol=0)


def test_the_shift_of_a_skill_moves_the_advantage_of_active_tokens_only() -> None:
    """Method opid: A + coef (skill - proximal), and no term of its own."""
    tokens = [t | {"proximal": t["current"]} for t in random_tokens(13)]
    loss, leaf = evaluate(tokens, distillation="none", skill_advantage_coef=0.4)
    moved = [
        t | {"advantage": t["advantage"] + (0.4 * (t["skill"] - t["proximal"]) if t["m"] and t["u"] else 0.0)}
        for t in tokens
    ]
    truth, other = evaluate(moved, logprobs={"skill": None})
    torch.testing.assert_close(loss.total, truth.total)
    torch.testing.assert_close(gradient(loss.total, leaf), gradient(truth.total, other))
    assert float(loss.distillation) == 0.0
    assert float(metrics_from_sums(loss.sums)["delta_rms"]) > 0, "the shift is reported all the same"


def test_the_gradient_of_the_reverse_kl_is_the_weighted_shift() -> None:
    """Method opsd: w rho (current - skill) / sum m u per active token, by hand."""
    tokens = random_tokens(14)
    loss, leaf = evaluate(tokens, distillation="reverse_kl")
    without, other = evaluate(tokens, distillation="none")
    found = (gradient(loss.total, leaf) - gradient(without.total, other)) / 0.7
    num_active = sum(t["m"] and t["u"] for t in tokens)
    expected = [
        min(math.exp(t["proximal"] - t["behaviour"]), 2.0)
        * math.exp(t["current"] - t["proximal"])
        * (t["current"] - t["skill"])
        * bool(t["m"] and t["u"])
        / num_active
        for t in tokens
    ]
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64))


def test_a_skill_that_changes_nothing_has_value_zero_and_half_a_gradient() -> None:
    """Oracle (b): delta = 0, g = 1/2, L_opd = 0, gradient -1/2 per active token over their count."""
    tokens = [t | {"skill": t["current"], "behaviour": t["proximal"], "m": True} for t in random_tokens(5)]
    loss, current = evaluate(tokens)
    alone = evaluate(tokens, distillation_coef=0.0)
    active = torch.tensor([t["u"] for t in tokens])
    assert float(loss.distillation) == 0.0
    assert float(metrics_from_sums(loss.sums)["gate_mean"]) == 0.5
    found = (gradient(loss.total, current) - gradient(alone[0].total, alone[1])) / 0.7
    torch.testing.assert_close(found, -0.5 * active.double() / active.sum())


def test_a_vanishing_beta_opens_every_gate_by_half() -> None:
    """Oracle (e)."""
    loss, _ = evaluate(random_tokens(6), beta=0.0)
    metrics = metrics_from_sums(loss.sums)
    assert float(metrics["gate_mean"]) == 0.5 and float(metrics["gate_above_half_fraction"]) == 0.0


def test_no_active_skill_equals_no_skill_bit_for_bit() -> None:
    """Oracle (a) at the level of the loss."""
    tokens = [t | {"u": False} for t in random_tokens(7)]
    with_term, leaf = evaluate(tokens)
    without, other = evaluate(tokens, logprobs={"skill": None})
    assert torch.equal(with_term.total, without.total)
    assert torch.equal(gradient(with_term.total, leaf), gradient(without.total, other))


def test_weights_forced_to_one_equal_a_behaviour_that_is_the_proximal_policy() -> None:
    """Oracle (g): the synchronous path is staleness 0 of the asynchronous one."""
    tokens = random_tokens(8)
    on_policy = [t | {"behaviour": t["proximal"]} for t in tokens]
    forced, leaf = evaluate(tokens, logprobs={"behaviour": None})
    weighted, other = evaluate(on_policy)
    assert torch.equal(forced.total, weighted.total)
    assert torch.equal(gradient(forced.total, leaf), gradient(weighted.total, other))


def test_metrics_follow_their_definitions() -> None:
    """Counts and moments, straight from the tokens."""
    tokens = random_tokens(9, count=200)
    metrics = {name: float(value) for name, value in metrics_from_sums(evaluate(tokens)[0].sums).items()}
    kept = [t for t in tokens if t["m"]]
    active = [t for t in kept if t["u"]]
    log_ratio = np.array([t["proximal"] - t["behaviour"] for t in kept])
    weight = np.minimum(np.exp(log_ratio), 2.0)
    delta = np.array([t["skill"] - t["current"] for t in active])
    rho = np.exp([t["current"] - t["proximal"] for t in kept])
    a = np.array([t["advantage"] for t in kept])
    clipped = (-a * np.clip(rho, 0.8, 1.2) > -a * rho).mean()
    rms = {name: math.sqrt((x**2).mean()) for name, x in (("ratio", log_ratio), ("delta", delta))}
    expected = {
        "clip_fraction": clipped,
        "dual_clip_fraction": ((a < 0) & (rho > 3)).mean(),
        "weight_mean": weight.mean(),
        "weight_max": weight.max(),
        "weight_truncated_tokens": (np.exp(log_ratio) > 2).sum(),
        "weight_truncated_fraction": (np.exp(log_ratio) > 2).mean(),
        "effective_sample_tokens": weight.sum() ** 2 / (weight**2).sum(),
        "effective_sample_share": weight.sum() ** 2 / (len(kept) * (weight**2).sum()),
        "log_ratio_rms": rms["ratio"],
        "entropy": np.mean([t["entropy"] for t in kept]),
        "opd_active_tokens": len(active),
        "opd_active_token_ratio": len(active) / len(kept),
        "kl": np.mean([k3_truth(t["current"], t["reference"]) for t in kept]),
        "gate_mean": (1 / (1 + np.exp(-5 * delta))).mean(),
        "gate_above_half_fraction": (delta > 0).mean(),
        "delta_mean": delta.mean(),
        "delta_rms": rms["delta"],
        "staleness_bias_ratio": 0.4 * rms["ratio"] / rms["delta"],
    }
    for name, value in expected.items():
        assert metrics[name] == pytest.approx(value, rel=1e-6), name


@pytest.mark.parametrize("name", [*TokenLogprobs._fields, "entropy", "advantage"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_non_finite_input_is_refused_by_its_name(name, bad) -> None:
    """Also where the mask would have hidden it."""
    tokens = random_tokens(1)
    tokens[2] |= {name: bad, "m": False}
    with pytest.raises(terms.NonFiniteError, match=name):
        evaluate(tokens)


def test_an_unknown_gate_is_refused() -> None:
    """By its name."""
    with pytest.raises(ValueError, match="tanh"):
        evaluate(random_tokens(1), gate="tanh")


def test_the_log_ratio_bound_lies_beyond_every_clip() -> None:
    """Cutting the argument of exp must not change a value: the clips have to act first."""
    assert math.exp(terms.MAX_LOG_RATIO) - terms.MAX_LOG_RATIO - 1 > terms.MAX_KL
    assert losses.STALENESS_BIAS_FACTOR == 0.4
