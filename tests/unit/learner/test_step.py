"""One update, end to end, against a straight float64 reference; and the oracles of the specification."""

import copy
import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from seed_async.learner.algorithms.terms import NonFiniteError
from seed_async.learner.batch import UpdateBatch
from seed_async.learner.scoring import score
from seed_async.learner.step import accumulate_gradients, update
from seed_async.learner.targets import denominators, score_targets, token_advantages
from tests.unit.learner.builders import (
    LOUD,
    changed,
    gradients,
    loss_and_gradient,
    packed,
    random_batch,
    tiny_model,
)


def on_policy(batch: UpdateBatch, model, config) -> UpdateBatch:
    """The batch as if the model's own weights had sampled it."""
    with torch.no_grad():
        return changed(
            batch,
            behaviour_logprob=lambda t: score(
                model, t.plain, temperature=config.temperature, token_budget=1
            ).logprob.numpy(),
        )


@pytest.mark.parametrize("layout", ["transcript", "windowed"])
@pytest.mark.parametrize("method", ["seed", "seed_static", "sdar", "opid", "opsd"])
def test_a_method_without_any_skill_equals_grpo_bit_for_bit(method, layout) -> None:
    """Oracle (a): loss, gradient, and the weights after the step."""
    batch = changed(random_batch(layout=layout), skill=())
    answers, weights = [], []
    for name in (method, "grpo"):
        config = dataclasses.replace(LOUD, method=name, opsd_rl=True)
        answers.append(loss_and_gradient(batch, config))
        policy = packed(tiny_model())
        optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3)
        update(batch, config, policy, packed(tiny_model(seed=1)), optimizer)
        weights.append([p.detach() for p in policy.parameters()])
    assert answers[0][0] == answers[1][0] and torch.equal(answers[0][1], answers[1][1])
    assert all(torch.equal(a, b) for a, b in zip(*weights, strict=True))


def test_opsd_has_no_policy_term_unless_asked() -> None:
    """Without a skill nothing but KL and entropy is left."""
    batch = random_batch()
    policy = packed(tiny_model())
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.0)
    for with_rl in (False, True):
        config = dataclasses.replace(LOUD, method="opsd", opsd_rl=with_rl)
        metrics = update(batch, config, policy, packed(tiny_model(seed=1)), optimizer)
        assert (metrics["loss_policy"] != 0.0) == with_rl
        assert metrics["loss_distillation"] != 0.0 and metrics["gate_mean"] == pytest.approx(1.0)


def test_grpo_ignores_skills_that_a_batch_happens_to_carry() -> None:
    """Its teacher is none."""
    config = dataclasses.replace(LOUD, method="grpo")
    loss, gradient = loss_and_gradient(random_batch(), config)
    bare_loss, bare_gradient = loss_and_gradient(changed(random_batch(), skill=()), config)
    assert loss == bare_loss and torch.equal(gradient, bare_gradient)


def test_a_skill_context_equal_to_the_plain_one_has_no_shift() -> None:
    """Oracle (b) through the model: delta 0, gate 1/2, value 0, and a gradient all the same."""
    batch = changed(random_batch(), skill=lambda t: t.plain)
    policy = packed(tiny_model())
    metrics = update(batch, LOUD, policy, packed(tiny_model(seed=1)), torch.optim.SGD(policy.parameters(), lr=0.0))
    assert metrics["gate_mean"] == pytest.approx(0.5, abs=1e-5)
    assert metrics["delta_rms"] == pytest.approx(0.0, abs=1e-5)
    assert metrics["loss_distillation"] == pytest.approx(0.0, abs=1e-5)
    without = loss_and_gradient(batch, dataclasses.replace(LOUD, opd_coef=0.0))[1]
    assert (loss_and_gradient(batch, LOUD)[1] - without).norm() > 0.01


def test_other_response_ids_in_the_skill_context_are_refused() -> None:
    """Oracle (d)."""
    trajectory = next(t for t in random_batch().trajectories if t.skill)
    (row,) = trajectory.skill
    ids = row.token_ids.copy()
    ids[np.flatnonzero(row.response_mask)[-1]] += 1
    with pytest.raises(ValueError, match="response ids"):
        dataclasses.replace(trajectory, skill=(row._replace(token_ids=ids),))


@settings(deadline=None, max_examples=15)
@given(st.integers(1, 400))
def test_any_token_budget_gives_the_same_loss_and_gradient(token_budget) -> None:
    """Oracle (f), over micro-batches."""
    batch = random_batch(seed=5)
    loss, gradient = loss_and_gradient(batch, dataclasses.replace(LOUD, token_budget=10_000))
    other_loss, other = loss_and_gradient(batch, dataclasses.replace(LOUD, token_budget=token_budget))
    assert other_loss == pytest.approx(loss, abs=1e-5)
    assert (other - gradient).norm() <= 1e-5 * gradient.norm()


def test_ranks_that_take_parts_of_the_batch_add_up_to_the_whole() -> None:
    """Oracle (f), over ranks: each scores its trajectories under the denominators of all of them."""
    batch = random_batch(seed=5)
    policy, reference = packed(tiny_model()), packed(tiny_model(seed=1))
    targets = score_targets(batch, LOUD, policy, reference, with_proximal=False)
    everyone = range(len(batch.trajectories))
    totals = denominators(targets, everyone)
    accumulate_gradients(batch, everyone, targets, LOUD, policy, totals)
    whole, parts = gradients(policy), []
    for rank in (range(3), range(3, len(everyone))):
        policy.zero_grad()
        accumulate_gradients(batch, rank, targets, LOUD, policy, totals)
        parts.append(gradients(policy))
    assert (sum(parts) - whole).norm() <= 1e-5 * whole.norm()


def test_the_order_of_trajectories_does_not_matter() -> None:
    """Groups may arrive interleaved."""
    batch = random_batch(seed=6)
    order = np.random.default_rng(0).permutation(len(batch.trajectories))
    shuffled = UpdateBatch(tuple(batch.trajectories[i] for i in order))
    loss, gradient = loss_and_gradient(batch, LOUD)
    other_loss, other = loss_and_gradient(shuffled, LOUD)
    assert other_loss == pytest.approx(loss, abs=1e-5)
    assert (other - gradient).norm() <= 1e-5 * gradient.norm()


def test_fresh_samples_give_the_synchronous_loss_and_gradient() -> None:
    """Oracle (g): with staleness 0 the importance weights are 1 by themselves."""
    batch = on_policy(random_batch(), packed(tiny_model()), LOUD)
    loss, gradient = loss_and_gradient(batch, LOUD)
    sync_loss, sync = loss_and_gradient(batch, dataclasses.replace(LOUD, synchronous=True))
    assert loss == pytest.approx(sync_loss, abs=1e-5)
    assert (gradient - sync).norm() <= 1e-5 * sync.norm()


def test_leaving_out_the_proximal_pass_changes_nothing_with_one_mini_batch() -> None:
    """current.detach() is the proximal log-prob."""
    batch, policy, reference = random_batch(), packed(tiny_model()), packed(tiny_model(seed=1))
    everyone, found = range(len(batch.trajectories)), []
    for with_proximal in (False, True):
        policy.zero_grad()
        targets = score_targets(batch, LOUD, policy, reference, with_proximal=with_proximal)
        accumulate_gradients(batch, everyone, targets, LOUD, policy, denominators(targets, everyone))
        found.append(gradients(policy))
    assert (found[0] - found[1]).norm() <= 1e-5 * found[1].norm()


def test_mini_batches_take_one_step_each_and_clip_only_after_the_first() -> None:
    """The ratio rho leaves 1 once the weights have moved away from the proximal ones."""
    batch = random_batch(num_groups=2, group_size=4)
    config = dataclasses.replace(LOUD, mini_batch_trajectories=3)
    policy = packed(tiny_model())
    metrics = update(batch, config, policy, packed(tiny_model(seed=1)), torch.optim.SGD(policy.parameters(), lr=0.5))
    assert metrics["optimizer_steps"] == 3
    assert metrics["clip_fraction"] > 0
    assert metrics["seconds_score_contexts"] > 0


def test_an_update_moves_the_policy_by_the_clipped_gradient_and_leaves_the_reference() -> None:
    """With plain gradient descent the step is the gradient, scaled to the allowed norm."""
    batch, config = random_batch(), dataclasses.replace(LOUD, max_grad_norm=0.1)
    expected = loss_and_gradient(batch, config)[1]
    policy, reference = packed(tiny_model()), packed(tiny_model(seed=1))
    before = copy.deepcopy(policy)
    kept = copy.deepcopy(reference)
    metrics = update(batch, config, policy, reference, torch.optim.SGD(policy.parameters(), lr=1.0))
    moved = torch.cat(
        [(a - b).detach().double().reshape(-1) for a, b in zip(before.parameters(), policy.parameters(), strict=True)]
    )
    torch.testing.assert_close(moved, expected * 0.1 / expected.norm(), rtol=0, atol=1e-6)
    assert metrics["gradient_norm"] == pytest.approx(float(expected.norm()), rel=1e-5)
    assert all(torch.equal(a, b) for a, b in zip(kept.parameters(), reference.parameters(), strict=True))
    assert all(p.grad is None for p in policy.parameters())


def test_the_sampler_gap_is_measured_on_fresh_tokens_only() -> None:
    """Old tokens differ because the weights moved; fresh ones must agree."""
    policy, reference = packed(tiny_model()), packed(tiny_model(seed=1))
    sampled = on_policy(random_batch(), policy, LOUD)
    batch = changed(
        sampled, behaviour_logprob=lambda t: t.behaviour_logprob - np.where(t.fresh, 0.25, 5.0).astype(np.float32)
    )
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.0)
    metrics = update(batch, LOUD, policy, reference, optimizer)
    assert metrics["sampler_gap_mean"] == pytest.approx(0.25, abs=1e-4)
    assert metrics["sampler_gap_max"] == pytest.approx(0.25, abs=1e-4)
    old = changed(batch, fresh=lambda t: np.zeros_like(t.fresh))
    assert "sampler_gap_mean" not in update(old, LOUD, policy, reference, optimizer)


def test_metrics_count_tokens_and_time_each_phase() -> None:
    """All plain floats."""
    batch, policy = random_batch(), packed(tiny_model())
    metrics = update(batch, LOUD, policy, packed(tiny_model(seed=1)), torch.optim.SGD(policy.parameters(), lr=0.0))
    assert all(type(value) is float and np.isfinite(value) for value in metrics.values())
    with_skill = [t for t in batch.trajectories if t.skill]
    assert metrics["tokens"] == sum(len(row.token_ids) for t in batch.trajectories for row in t.plain)
    assert metrics["response_tokens"] == sum(len(t.fresh) for t in batch.trajectories)
    assert metrics["opd_active_tokens"] == sum(len(t.fresh) for t in with_skill)
    assert metrics["skill_trajectories"] == len(with_skill)
    phases = {name.removeprefix("seconds_") for name in metrics if name.startswith("seconds_")}
    assert phases == {"score_contexts", "score_reference", "forward_backward", "optimizer"}


def test_equal_rewards_leave_the_kl_entropy_and_distillation_terms() -> None:
    """The policy term is 0; the others still act."""
    batch = changed(random_batch(), episode_return=10.0, invalid=lambda t: np.zeros_like(t.invalid))
    policy = packed(tiny_model())
    metrics = update(batch, LOUD, policy, packed(tiny_model(seed=1)), torch.optim.SGD(policy.parameters(), lr=0.0))
    assert metrics["loss_policy"] == 0.0 and metrics["loss_kl"] > 0 and metrics["gradient_norm"] > 0


def test_a_diverged_model_raises_and_keeps_its_weights() -> None:
    """A NaN ends the update before the optimizer."""
    policy, reference = packed(tiny_model()), packed(tiny_model(seed=1))
    with torch.no_grad():
        policy.get_output_embeddings().weight[3] = float("nan")
    before = [p.clone() for p in policy.parameters()]
    with pytest.raises(NonFiniteError, match="logprob"):
        update(random_batch(), LOUD, policy, reference, torch.optim.AdamW(policy.parameters()))
    assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(before, policy.parameters(), strict=True))


def test_a_non_finite_gradient_raises_before_the_step() -> None:
    """Even when the loss itself was finite."""
    policy = packed(tiny_model())
    next(policy.parameters()).register_hook(lambda grad: grad * float("inf"))
    before = [p.clone() for p in policy.parameters()]
    with pytest.raises(NonFiniteError, match="gradient norm"):
        update(random_batch(), LOUD, policy, packed(tiny_model(seed=1)), torch.optim.SGD(policy.parameters(), lr=1.0))
    assert all(torch.equal(a, b) for a, b in zip(before, policy.parameters(), strict=True))


def test_a_non_finite_behaviour_log_prob_is_refused_by_name() -> None:
    """An engine that reports NaN is broken."""
    batch = changed(random_batch(), behaviour_logprob=lambda t: np.full_like(t.behaviour_logprob, np.nan))
    with pytest.raises(NonFiniteError, match="behaviour_logprob"):
        loss_and_gradient(batch, LOUD)


def test_batches_that_cannot_have_a_loss_are_refused() -> None:
    """No response token, a KL term without its reference, sizes that disagree."""
    trajectory = random_batch().trajectories[0]
    with pytest.raises(ValueError, match="without any response token"):
        UpdateBatch(())
    with pytest.raises(ValueError, match="reference model"):
        score_targets(random_batch(), LOUD, packed(tiny_model()), None)
    with pytest.raises(ValueError, match="entries"):
        dataclasses.replace(trajectory, fresh=trajectory.fresh[1:])
    with pytest.raises(ValueError, match="observation_ids"):
        dataclasses.replace(trajectory, invalid=trajectory.invalid[:0])
    with pytest.raises(ValueError, match="turn indices"):
        dataclasses.replace(trajectory, invalid=trajectory.invalid[:0], observation_ids=trajectory.invalid[:0])
    (row,) = trajectory.plain
    with pytest.raises(ValueError, match="turn_index has"):
        dataclasses.replace(trajectory, plain=(row._replace(turn_index=row.turn_index[1:]),))


def test_plain_rows_hold_each_turn_once_and_in_order_and_teachers_at_most_once() -> None:
    """Whatever the layout."""
    batch = random_batch(seed=3, layout="windowed", skill_share=1.0)
    trajectory = next(t for t in batch.trajectories if len(t.plain) == 3)
    with pytest.raises(ValueError, match="order of its turns"):
        dataclasses.replace(trajectory, plain=trajectory.plain[::-1])
    with pytest.raises(ValueError, match="more than one skill context"):
        dataclasses.replace(trajectory, skill=(*trajectory.skill, trajectory.skill[1]))
    with pytest.raises(ValueError, match="response ids"):
        dataclasses.replace(
            trajectory, skill=(trajectory.skill[1]._replace(turn_index=trajectory.skill[1].turn_index * 0),)
        )
    assert np.array_equal(np.sort(trajectory.skill_positions), np.arange(len(trajectory.fresh)))


def test_skill_scores_fall_on_their_own_tokens_whatever_the_order_of_the_teacher_rows() -> None:
    """Rows may be missing and come in any order; only tokens that were scored are active."""
    batch = random_batch(seed=4, layout="mixed", step_skills=True, left_out=True, skill_share=1.0)
    policy, reference = packed(tiny_model()), packed(tiny_model(seed=1))
    straight = score_targets(batch, LOUD, policy, reference)
    turned = score_targets(changed(batch, skill=lambda t: t.skill[::-1]), LOUD, policy, reference)
    assert torch.equal(straight.skill_mask, turned.skill_mask)
    torch.testing.assert_close(straight.skill, turned.skill, rtol=0, atol=1e-5)
    active = sum(len(row.turn_index) for t in batch.trajectories for row in t.skill)
    assert 0 < active < straight.offsets[-1] and int(straight.skill_mask.sum()) == active
    assert (straight.skill[straight.skill_mask] < 0).all() and (straight.skill[~straight.skill_mask] == 0).all()


def test_the_metrics_say_how_many_groups_had_nothing_to_compare() -> None:
    """Also of the step groups of gigpo."""
    batch = random_batch(seed=3)
    flat = changed(
        batch,
        episode_return=lambda t: 10.0 if t.group_id == "g0" else t.episode_return,
        invalid=lambda t: np.zeros_like(t.invalid),
        observation_ids=lambda t: np.arange(len(t.invalid)) + 100 * batch.trajectories.index(t),
    )
    metrics = token_advantages(flat, dataclasses.replace(LOUD, method="gigpo")).metrics
    assert metrics["groups"] == 2 and metrics["zero_variance_groups"] == 1
    assert (
        metrics["step_groups"]
        == metrics["zero_variance_step_groups"]
        == sum(len(t.invalid) for t in batch.trajectories)
    )
    policy = packed(tiny_model())
    found = update(flat, LOUD, policy, packed(tiny_model(seed=1)), torch.optim.SGD(policy.parameters(), lr=0.0))
    assert found["zero_variance_groups"] == 1 and "step_groups" not in found


def test_masked_tokens_reach_no_term_of_the_loss_bit_for_bit() -> None:
    """Whatever their log-probs are; their trajectories count in the statistics of their groups as ever."""
    batch = random_batch(seed=3, masked_share=0.4)
    loss, gradient = loss_and_gradient(batch, LOUD)
    other = changed(
        batch, behaviour_logprob=lambda t: np.where(t.trained, t.behaviour_logprob, -9.0).astype(np.float32)
    )
    other_loss, other_gradient = loss_and_gradient(other, LOUD)
    assert loss == other_loss and torch.equal(gradient, other_gradient)
    whole = changed(batch, trained=lambda t: np.ones_like(t.trained))
    assert np.array_equal(token_advantages(batch, LOUD).advantage, token_advantages(whole, LOUD).advantage)
    assert loss_and_gradient(whole, LOUD)[0] != loss


@pytest.mark.parametrize("mini_batch_trajectories", [None, 3])
def test_a_trajectory_that_is_masked_whole_still_counts_with_its_return(mini_batch_trajectories) -> None:
    """Its return moves the advantages of the others."""
    batch = random_batch(seed=3, num_groups=1)
    first, *rest = batch.trajectories
    config = dataclasses.replace(LOUD, mini_batch_trajectories=mini_batch_trajectories)
    losses = []
    for episode_return in (0.0, 100.0):
        masked = dataclasses.replace(
            first, trained=np.zeros_like(first.trained), fresh=np.zeros_like(first.fresh), episode_return=episode_return
        )
        policy = packed(tiny_model())
        metrics = update(
            UpdateBatch((masked, *rest)),
            config,
            policy,
            packed(tiny_model(seed=1)),
            torch.optim.SGD(policy.parameters(), lr=0.0),
        )
        assert metrics["response_tokens"] == sum(len(t.fresh) for t in rest)
        losses.append(metrics["loss_policy"])
    assert losses[0] != losses[1]


def test_a_batch_with_every_token_masked_leaves_the_weights_and_has_no_step() -> None:
    """Nothing is divided by zero, no moment of the optimizer moves, and every metric is a number."""
    batch = random_batch(seed=3, masked_share=1.0)
    policy, reference = packed(tiny_model()), packed(tiny_model(seed=1))
    optimizer = torch.optim.AdamW(policy.parameters(), lr=0.1)
    before = [p.clone() for p in policy.parameters()]
    metrics = update(batch, LOUD, policy, reference, optimizer)
    assert all(torch.equal(a, b) for a, b in zip(before, policy.parameters(), strict=True)) and not optimizer.state
    assert metrics["optimizer_steps"] == metrics["response_tokens"] == metrics["gradient_norm"] == 0.0
    assert all(type(value) is float and np.isfinite(value) for value in metrics.values())
    full = update(random_batch(seed=3), LOUD, policy, reference, optimizer)
    wanted = {name for name in full if not name.startswith(("seconds_", "sampler_gap"))}
    assert wanted == {name for name in metrics if not name.startswith("seconds_")}


def test_a_mini_batch_with_every_token_masked_gets_no_step() -> None:
    """The others do, and the sampler gap reads the tokens of its own mini-batches."""
    batch = random_batch(seed=3, num_groups=2, group_size=4)
    half = [
        dataclasses.replace(t, trained=np.full_like(t.trained, place >= 4), fresh=np.full_like(t.fresh, place >= 4))
        for place, t in enumerate(batch.trajectories)
    ]
    policy = packed(tiny_model())
    sampled = on_policy(UpdateBatch(tuple(half)), policy, LOUD)
    config = dataclasses.replace(LOUD, mini_batch_trajectories=4)
    metrics = update(sampled, config, policy, packed(tiny_model(seed=1)), torch.optim.SGD(policy.parameters(), lr=0.0))
    assert metrics["optimizer_steps"] == 1 and metrics["sampler_gap_max"] < 1e-4
