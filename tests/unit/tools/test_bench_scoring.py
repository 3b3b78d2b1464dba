"""The benchmark's two sides score the same, its rows are what it says, and its count of operations is right."""

import numpy as np
import pytest
import torch

from seed_async.learner.batch import LossConfig
from seed_async.learner.packing import pack
from seed_async.learner.scoring import ComputeDtype, score
from seed_async.learner.step import update
from seed_async.tools.bench_rows import GROUP_SIZE, make_batch, make_contexts
from seed_async.tools.bench_scoring import model_flops, padded_logprobs
from tests.unit.learner.builders import VOCABULARY, packed, tiny_model


def test_both_sides_compute_the_same_log_probs() -> None:
    model, rows = tiny_model(), [each.plain for each in make_contexts(4, VOCABULARY)]
    with torch.no_grad():
        ours = score(packed(model), rows, temperature=1.0, token_budget=2000).logprob
        theirs = padded_logprobs(model, rows, torch.device("cpu"), "float32")
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


def test_siblings_share_an_opening_and_responses_are_a_third() -> None:
    contexts = make_contexts(2 * GROUP_SIZE, 4096, shared_tokens=80)
    plain = [each.plain for each in contexts]
    total = sum(len(row.token_ids) for row in plain)
    assert pack(plain, torch.device("cpu")).input_ids.numel() == total - 80 * 2 * (GROUP_SIZE - 1)
    assert 0.2 < sum(row.response_mask.sum() for row in plain) / total < 0.35


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_its_batch_is_one_that_an_update_takes(dtype: ComputeDtype) -> None:
    model = packed(tiny_model())
    batch = make_batch(make_contexts(GROUP_SIZE, VOCABULARY))
    config = LossConfig(token_budget=1000, compute_dtype=dtype)
    metrics = update(batch, config, model, packed(tiny_model()), torch.optim.AdamW(model.parameters()))
    assert metrics["skill_trajectories"] == GROUP_SIZE and metrics["gradient_norm"] > 0


def test_operations_are_counted_by_weights_and_attention() -> None:
    model, contexts = tiny_model(), make_contexts(1, VOCABULARY)
    weights = sum(p.numel() for name, p in model.named_parameters() if "layers" in name or name == "model.norm.weight")
    expected = 0
    for row, times in ((contexts[0].plain, 3), (contexts[0].skill, 1)):
        attention = sum(4 * (t + 1) * 32 * 2 for t in range(len(row.token_ids)))
        head = 2 * VOCABULARY * 32 * int(row.response_mask.sum())
        expected += times * (2 * weights * len(row.token_ids) + head + attention)
    assert np.isclose(model_flops(model, contexts), expected, rtol=0.01)
