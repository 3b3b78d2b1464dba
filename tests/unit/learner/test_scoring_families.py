"""Packed rows against padded ones against one row at a time, for every supported architecture and long rows."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from seed_async.learner.scoring import load_policy, score, use_activation_checkpointing
from tests.unit.learner.builders import FAMILIES, VOCABULARY, gradients, packed, tiny_model

LENGTHS = (1, 2, 15, 16, 17, 40, 180)
SHARED = (40, 100, 100, 33)
"""The last rows have so many tokens in common."""


def mixed_rows(seed: int, longest: int = 300) -> list[SimpleNamespace]:
    """Rows of 1 to `longest` tokens, some with a common prefix, a third of their tokens scored."""
    rng = np.random.default_rng(seed)
    rows = [rng.integers(2, VOCABULARY, size) for size in (*LENGTHS, longest)]
    opening = rng.integers(2, VOCABULARY, max(SHARED))
    for ids, shared in zip(rows[-len(SHARED) :], SHARED, strict=True):
        ids[:shared] = opening[: min(shared, len(ids))]
    masks = [(rng.random(len(ids)) < 1 / 3) & (np.arange(len(ids)) > 0) for ids in rows]
    order = rng.permutation(len(rows))
    return [SimpleNamespace(token_ids=rows[i].astype(np.int32), response_mask=masks[i]) for i in order]


def padded_scores(model, rows) -> torch.Tensor:
    """Log-probs by the library's own attention, all rows in one padded batch."""
    width = max(len(row.token_ids) for row in rows)
    ids, seen = torch.zeros(2, len(rows), width, dtype=torch.long)
    for index, row in enumerate(rows):
        ids[index, : len(row.token_ids)] = torch.from_numpy(row.token_ids)
        seen[index, : len(row.token_ids)] = 1
    logprobs = torch.log_softmax(model(input_ids=ids, attention_mask=seen).logits[:, :-1], dim=-1)
    chosen = logprobs.gather(2, ids[:, 1:, None])[..., 0]
    return torch.cat([chosen[i][: len(r.token_ids) - 1][r.response_mask[1:]] for i, r in enumerate(rows)])


@pytest.mark.parametrize(("seed", "longest"), [(0, 300), (1, 2000)])
@pytest.mark.parametrize("family", FAMILIES)
def test_packed_padded_and_single_rows_give_equal_log_probs_and_gradients(family, seed, longest) -> None:
    """In one micro-batch, in several that end exactly at a row, one row at a time, and padded by the library."""
    rows, base = mixed_rows(seed, longest), tiny_model(family)
    scores, found = {}, {}
    for name in ("padded", "whole", "exact", "single"):
        model = base if name == "padded" else packed(base)
        budget = {"whole": 100_000, "exact": longest, "single": 1}.get(name, 0)
        logprob = (
            score(model, rows, temperature=1.0, token_budget=budget).logprob if budget else padded_scores(model, rows)
        )
        weights = torch.linspace(-1, 1, len(logprob))
        (weights * logprob).sum().backward()
        scores[name], found[name] = logprob.detach(), gradients(model)
    for name in ("whole", "exact", "single"):
        torch.testing.assert_close(scores[name], scores["padded"], rtol=0, atol=1e-5)
        assert (found[name] - found["padded"]).norm() <= 1e-5 * found["padded"].norm()


@pytest.mark.parametrize("family", [name for name in FAMILIES if "vl" in name])
def test_a_vision_model_is_loaded_and_scores_rows_of_text(family, tmp_path) -> None:
    """Only the language model is used; its positions are the plain ones for each of the three axes."""
    model, rows = tiny_model(family), mixed_rows(0)[:4]
    model.save_pretrained(tmp_path)
    with torch.no_grad():
        found = score(load_policy(tmp_path), rows, temperature=1.0, token_budget=64).logprob
        torch.testing.assert_close(found, padded_scores(model, rows), rtol=0, atol=1e-5)


def test_an_architecture_that_was_not_checked_is_refused(tmp_path) -> None:
    """Its logits may be scaled or capped."""
    config = tmp_path / "config.json"
    config.write_text('{"model_type": "gemma2"}')
    with pytest.raises(ValueError, match="gemma2"):
        load_policy(tmp_path)


@pytest.mark.parametrize("family", FAMILIES)
def test_recomputed_activations_give_the_same_scores_and_gradients(family) -> None:
    """Shared prefixes included."""
    rows, plain, recomputed = mixed_rows(0), packed(tiny_model(family)), packed(tiny_model(family))
    use_activation_checkpointing(recomputed)
    calls = []
    layer = recomputed.base_model.get_decoder().layers[0]
    layer.self_attn.register_forward_pre_hook(lambda *_: calls.append(1))
    one, other = (score(model, rows, temperature=1.0, token_budget=10_000) for model in (plain, recomputed))
    for scores in (one, other):
        (scores.logprob + scores.entropy).sum().backward()
    assert torch.equal(one.logprob, other.logprob) and len(calls) == 2
    assert (gradients(recomputed) - gradients(plain)).norm() <= 1e-6 * gradients(plain).norm()


def test_recomputing_with_dropout_is_refused() -> None:
    """It would be drawn anew."""
    model = packed(tiny_model())
    model.config.attention_dropout = 0.1
    with pytest.raises(ValueError, match="attention_dropout"):
        use_activation_checkpointing(model)


def test_bfloat16_computes_the_layers_only() -> None:
    """Log-probs, gradients and weights stay float32, near those of float32."""
    rows, exact, half = mixed_rows(0), packed(tiny_model()), packed(tiny_model())
    one = score(exact, rows, temperature=1.0, token_budget=10_000)
    other = score(half, rows, temperature=1.0, token_budget=10_000, compute_dtype="bfloat16")
    for scores in (one, other):
        assert scores.logprob.dtype == scores.entropy.dtype == torch.float32
        scores.logprob.sum().backward()
    assert all(p.dtype == p.grad.dtype == torch.float32 for p in half.parameters() if p.grad is not None)
    assert 1e-5 < (one.logprob - other.logprob).abs().mean() < 0.05
    assert (gradients(half) - gradients(exact)).norm() < 0.1 * gradients(exact).norm()
