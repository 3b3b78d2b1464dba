"""The end-to-end gradient test: the learner's whole step against a straight, unpacked float64 reference.

Every method, every layout, single and several mini-batches. The learner packs, cuts into micro-batches and runs in
float32; the reference does one plain forward pass a row and writes each formula out again.
"""

import dataclasses

import numpy as np
import pytest
import torch

from seed_async.layouts import TokenRow
from seed_async.learner.algorithms.methods import METHODS
from seed_async.learner.batch import UpdateBatch
from seed_async.learner.packing import pack
from seed_async.learner.step import update
from seed_async.learner.targets import score_targets
from tests.reference.plain_update import plain_loss, plain_update
from tests.unit.learner.builders import (
    LAYOUTS,
    LOUD,
    VOCABULARY,
    changed,
    gradients,
    loss_and_gradient,
    packed,
    plain64,
    random_batch,
    scored_turns,
    tiny_model,
)

# Large enough that the ratio of the later mini-batches meets the clips.
LEARNING_RATE = 0.3


def assert_equal_to_the_reference(batch, config) -> None:
    """Loss within 1e-5; gradient within 1e-5 of its size, as a whole and in every entry."""
    loss, gradient = loss_and_gradient(batch, config)
    policy = plain64(tiny_model())
    truth = plain_loss(batch, config, policy, plain64(tiny_model(seed=1)))
    truth.backward()
    expected = gradients(policy)
    assert loss == pytest.approx(truth.item(), abs=1e-5)
    assert (gradient - expected).abs().max() <= 1e-5 * max(1.0, float(expected.abs().max()))
    assert (gradient - expected).norm() <= 1e-5 * expected.norm()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("method", METHODS)
def test_loss_and_gradient_equal_the_unpacked_float64_reference(method, layout) -> None:
    """The key test: packing, micro-batches, contexts, step skills, masked teacher rows, denominators, formulas."""
    batch = random_batch(seed=3, layout=layout, step_skills=method == "opid", left_out=True)
    assert_equal_to_the_reference(batch, dataclasses.replace(LOUD, method=method))


def test_opsd_with_its_policy_term_equals_the_reference() -> None:
    """The optional term of the method."""
    assert_equal_to_the_reference(random_batch(seed=3), dataclasses.replace(LOUD, method="opsd", opsd_rl=True))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.7},
        {"synchronous": True},
        {"divide_by_std": False},
        {"statistics": "trajectories"},
        {"kl_coef": 0.0},
        {"opd_gate": "centered"},
        {"opd_gate": "positive_only"},
    ],
    ids=str,
)
@pytest.mark.parametrize("method", ["seed", "grpo"])
def test_loss_and_gradient_equal_the_reference_under_every_option(method, options) -> None:
    """Temperature, synchronous weights, statistics, gates, and no reference model."""
    config, batch = dataclasses.replace(LOUD, method=method, **options), random_batch(seed=3)
    assert_equal_to_the_reference(batch, config)


@pytest.mark.parametrize("method", METHODS)
def test_masked_tokens_are_left_out_of_every_term_as_in_the_reference(method) -> None:
    """And of every denominator, also where mini-batches and trajectories are masked whole."""
    batch = random_batch(seed=3, step_skills=method == "opid", left_out=True, masked_share=0.4)
    first = batch.trajectories[0]
    whole = dataclasses.replace(first, trained=np.zeros_like(first.trained))
    batch = UpdateBatch((whole, *batch.trajectories[1:]))
    assert_equal_to_the_reference(batch, dataclasses.replace(LOUD, method=method))


def with_openings(batch: UpdateBatch) -> UpdateBatch:
    """The batch with 40 prompt tokens in front of every row, the same for each context of a group."""

    def opened(row: TokenRow, group_id: str) -> TokenRow:
        opening = np.random.default_rng(int(group_id[1:])).integers(0, VOCABULARY, 40).astype(np.int32)
        mask = np.concatenate([np.zeros(40, dtype=bool), row.response_mask])
        return TokenRow(np.concatenate([opening, row.token_ids]), mask, row.turn_index)

    return changed(
        batch,
        plain=lambda t: tuple(opened(row, t.group_id) for row in t.plain),
        skill=lambda t: tuple(opened(row, t.group_id) for row in t.skill),
    )


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_prefix_that_rows_share_is_computed_once_and_changes_nothing(layout) -> None:
    """Neither the loss nor its gradient, nor the scores of both contexts in one stream."""
    batch = with_openings(random_batch(seed=3, layout=layout, left_out=True))
    rows = [row for t in batch.trajectories for row in (*t.plain, *t.skill)]
    num_tokens, num_openings = sum(len(row.token_ids) for row in rows), len({t.group_id for t in batch.trajectories})
    assert pack(rows, torch.device("cpu")).input_ids.numel() == num_tokens - 32 * (len(rows) - num_openings)
    config = dataclasses.replace(LOUD, token_budget=400)
    assert_equal_to_the_reference(batch, config)
    policy, reference = packed(tiny_model()), packed(tiny_model(seed=1))
    targets, alone = (
        score_targets(batch, dataclasses.replace(config, token_budget=budget), policy, reference) for budget in (400, 1)
    )
    torch.testing.assert_close(targets.proximal, alone.proximal, rtol=0, atol=1e-5)
    torch.testing.assert_close(targets.skill, alone.skill, rtol=0, atol=1e-5)


@pytest.mark.parametrize("layout", ["transcript", "windowed"])
@pytest.mark.parametrize("method", METHODS)
def test_several_mini_batches_move_the_weights_as_the_reference_does(method, layout) -> None:
    """Three steps, ratios that leave 1 and meet their clips, and log-probs frozen before the first step."""
    batch = random_batch(seed=3, layout=layout, step_skills=method == "opid", left_out=True)
    config = dataclasses.replace(LOUD, method=method, mini_batch_trajectories=3, max_grad_norm=1.0)
    start = torch.cat([p.detach().reshape(-1) for p in tiny_model().parameters()]).double()
    mine, reference = packed(tiny_model()), packed(tiny_model(seed=1))
    metrics = update(batch, config, mine, reference, torch.optim.SGD(mine.parameters(), lr=LEARNING_RATE))
    plain = plain64(tiny_model())
    plain_update(batch, config, plain, plain64(tiny_model(seed=1)), LEARNING_RATE)
    found, expected = (
        torch.cat([p.detach().double().reshape(-1) for p in model.parameters()]) for model in (mine, plain)
    )
    assert metrics["optimizer_steps"] == 3
    assert method == "opsd" or metrics["clip_fraction"] > 0
    assert (found - expected).norm() <= 1e-5 * (expected - start).norm()


def test_a_step_skill_equal_to_the_episode_skill_changes_nothing() -> None:
    """The extra row of a step skill gives what the row of the whole episode would have given."""
    config = dataclasses.replace(LOUD, method="opid")
    whole = random_batch(seed=7, skill_share=1.0)
    rows = []
    for trajectory in whole.trajectories:
        (row,) = trajectory.skill
        last = {int(row.turn_index.max())}
        rest = set(row.turn_index.tolist()) - last
        rows.append(tuple(scored_turns(row, turns) for turns in (rest, last) if turns))
    split = changed(whole, skill=lambda t: rows[whole.trajectories.index(t)])
    loss, gradient = loss_and_gradient(whole, config)
    other_loss, other = loss_and_gradient(split, config)
    assert other_loss == pytest.approx(loss, abs=1e-5)
    assert (other - gradient).norm() <= 1e-5 * gradient.norm()
