"""Packed scoring against plain forward passes, one sequence at a time."""

import inspect
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from seed_async.learner import scoring
from seed_async.learner.packed_attention import PackedLayout, packed_attention
from seed_async.learner.scoring import load_policy, score
from tests.reference.plain_update import plain_logprobs
from tests.unit.learner.builders import FAMILIES, gradients, packed, random_row, tiny_model

RNG_SEED = 11


def rows_of(count: int) -> list:
    """Rows of one to four turns."""
    rng = np.random.default_rng(RNG_SEED)
    return [random_row(rng, int(rng.integers(1, 5))) for _ in range(count)]


@pytest.mark.parametrize("temperature", [1.0, 0.4])
@pytest.mark.parametrize("family", FAMILIES)
def test_packed_scores_equal_a_plain_forward_of_each_sequence(family, temperature) -> None:
    """Llama, Qwen2 and Qwen3, grouped heads, several micro-batches."""
    model, rows = tiny_model(family), rows_of(9)
    with torch.no_grad():
        found = score(packed(model), rows, temperature=temperature, token_budget=70)
        truth = [plain_logprobs(model, row.token_ids, row.response_mask, temperature) for row in rows]
    torch.testing.assert_close(found.logprob, torch.cat([t[0] for t in truth]), rtol=0, atol=1e-5)
    torch.testing.assert_close(found.entropy, torch.cat([t[1] for t in truth]), rtol=0, atol=1e-5)
    assert not found.logprob.requires_grad


def test_positions_restart_at_zero_for_each_sequence() -> None:
    """Rotary scores hide a shift, but long rows would leave the trained range of positions."""
    model, rows, seen = packed(tiny_model()), rows_of(3), []
    model.base_model.register_forward_pre_hook(lambda _, __, kwargs: seen.append(kwargs), with_kwargs=True)
    with torch.no_grad():
        score(model, rows, temperature=1.0, token_budget=10_000)
    expected = np.concatenate([np.arange(len(row.token_ids)) for row in rows])
    assert np.array_equal(seen[0]["position_ids"].numpy(), expected[None])


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_gradients_equal_those_of_plain_forwards(family) -> None:
    """With a loss that weighs every log-prob and entropy differently."""
    model, rows = tiny_model(family), rows_of(6)
    weights = torch.randn(2, sum(int(row.response_mask.sum()) for row in rows))
    mine, plain = packed(model), model.double()
    scores = score(mine, rows, temperature=0.7, token_budget=10_000)
    (weights[0] * scores.logprob + weights[1] * scores.entropy).sum().backward()
    truth = [plain_logprobs(plain, row.token_ids, row.response_mask, 0.7) for row in rows]
    (weights[0] * torch.cat([t[0] for t in truth]) + weights[1] * torch.cat([t[1] for t in truth])).sum().backward()
    expected = gradients(plain)
    assert (gradients(mine) - expected).norm() <= 1e-5 * expected.norm()


def test_no_sequence_sees_another() -> None:
    """Changing the ids of one row leaves the scores of its neighbours as they were, bit for bit."""
    model, rows = packed(tiny_model()), rows_of(3)
    changed = [rows[0], rows[1]._replace(token_ids=(rows[1].token_ids + 1) % 40), rows[2]]
    sizes = [int(row.response_mask.sum()) for row in rows]
    with torch.no_grad():
        before = score(model, rows, temperature=1.0, token_budget=10_000).logprob.split(sizes)
        after = score(model, changed, temperature=1.0, token_budget=10_000).logprob.split(sizes)
    assert torch.equal(before[0], after[0]) and torch.equal(before[2], after[2])
    assert not torch.equal(before[1], after[1])


def test_the_projection_in_chunks_gives_the_same_scores_and_gradients(monkeypatch) -> None:
    """Chunking bounds memory and changes nothing."""
    whole, chunked, rows = packed(tiny_model()), packed(tiny_model()), rows_of(5)
    one = score(whole, rows, temperature=1.0, token_budget=10_000)
    (one.logprob + one.entropy).sum().backward()
    monkeypatch.setattr(scoring, "MAX_LOGIT_ELEMENTS", 48 * 4)
    many = score(chunked, rows, temperature=1.0, token_budget=10_000)
    (many.logprob + many.entropy).sum().backward()
    torch.testing.assert_close(many.logprob, one.logprob, rtol=0, atol=1e-5)
    assert (gradients(chunked) - gradients(whole)).norm() <= 1e-5 * gradients(whole).norm()


def test_a_saved_folder_is_loaded_with_packed_attention(tmp_path) -> None:
    """From the local disk, in float32."""
    model, rows = tiny_model("qwen3"), rows_of(4)
    model.save_pretrained(tmp_path)
    loaded = load_policy(tmp_path)
    assert loaded.dtype == torch.float32 and not loaded.training
    with torch.no_grad():
        found = score(loaded, rows, temperature=1.0, token_budget=64).logprob
        expected = score(packed(model), rows, temperature=1.0, token_budget=64).logprob
    assert torch.equal(found, expected)


def test_no_rows_and_rows_without_response_tokens_give_no_scores() -> None:
    """An empty answer, not an error."""
    model = packed(tiny_model())
    silent = SimpleNamespace(token_ids=np.arange(5, dtype=np.int32), response_mask=np.zeros(5, dtype=bool))
    assert score(model, [], temperature=1.0, token_budget=10).logprob.shape == (0,)
    assert score(model, [silent], temperature=1.0, token_budget=10).logprob.shape == (0,)


@pytest.mark.parametrize(
    ("mask", "temperature", "budget", "message"),
    [
        ([True, True, False], 1.0, 10, "first token"),
        ([False, True], 1.0, 10, "mask of 2"),
        ([False, True, True], 0.0, 10, "temperature"),
        ([False, True, True], 1.0, 0, "token_budget"),
    ],
)
def test_input_that_cannot_be_scored_is_refused(mask, temperature, budget, message) -> None:
    """Each with the reason."""
    row = SimpleNamespace(token_ids=np.arange(3, dtype=np.int32), response_mask=np.array(mask))
    with pytest.raises(ValueError, match=message):
        score(packed(tiny_model()), [row], temperature=temperature, token_budget=budget)


def test_torch_still_takes_the_arguments_that_the_cuda_kernel_passes() -> None:
    """The kernel itself needs a CUDA device; its signature can be checked anywhere."""
    varlen = pytest.importorskip("torch.nn.attention.varlen")
    bounds = torch.tensor([0, 6], dtype=torch.int32)
    options = {"scale": 1.0, "window_size": (-1, 0), "enable_gqa": True}
    inspect.signature(varlen.varlen_attn).bind("q", "k", "v", bounds, bounds, 6, 6, **options)


def test_packed_attention_refuses_calls_that_it_would_get_wrong() -> None:
    """No bounds, a mask, several rows, a sliding window shorter than a sequence."""
    q, module = torch.zeros(1, 2, 6, 4), torch.nn.Identity()
    ends = torch.tensor([0, 6])
    bounds = {"packed_layout": PackedLayout((6,), (6,), ends, ends, None)}
    with pytest.raises(ValueError, match="packed_layout"):
        packed_attention(module, q, q, q, None)
    with pytest.raises(ValueError, match="one row"):
        packed_attention(module, q, q, q, torch.zeros(1, 1, 6, 6), **bounds)
    with pytest.raises(ValueError, match="one row"):
        packed_attention(module, q.expand(2, -1, -1, -1), q, q, None, **bounds)
    with pytest.raises(ValueError, match="sliding window"):
        packed_attention(module, q, q, q, None, sliding_window=4, **bounds)
