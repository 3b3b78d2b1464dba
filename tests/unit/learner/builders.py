"""Tiny random models and batches for the tests of the learner's math."""

import copy

import numpy as np
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from seed_async.layouts import TokenRow
from seed_async.learner.packed_attention import use_packed_attention
from seed_async.learner.step import UpdateBatch, UpdateTrajectory

VOCABULARY = 48
FAMILIES = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
}


def tiny_model(family: str = "llama", seed: int = 0) -> PreTrainedModel:
    """Two layers with grouped heads, weights large enough that probabilities differ visibly; plain attention."""
    torch.manual_seed(seed)
    config_type, model_type = FAMILIES[family]
    config = config_type(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=256,
        initializer_range=0.2,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=1,
    )
    return model_type(config).eval()


def packed(model: PreTrainedModel) -> PreTrainedModel:
    """A copy with packed attention."""
    model = copy.deepcopy(model)
    use_packed_attention(model)
    return model


def plain64(model: PreTrainedModel) -> PreTrainedModel:
    """A float64 copy with plain attention."""
    return copy.deepcopy(model).double()


def gradients(model: torch.nn.Module) -> torch.Tensor:
    """All gradients as one float64 vector, zeros where there is none."""
    parts = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
    return torch.cat([part.reshape(-1).double() for part in parts])


def random_row(rng: np.random.Generator, num_turns: int) -> TokenRow:
    """A transcript of prompts of 3 to 9 tokens and responses of 1 to 5."""
    pieces, masks, turns = [], [], []
    for turn in range(num_turns):
        prompt, response = int(rng.integers(3, 10)), int(rng.integers(1, 6))
        pieces.append(rng.integers(0, VOCABULARY, prompt + response))
        masks.append(np.arange(prompt + response) >= prompt)
        turns.append(np.full(response, turn))
    ids = np.concatenate(pieces).astype(np.int32)
    return TokenRow(ids, np.concatenate(masks), np.concatenate(turns).astype(np.int32))


def with_skill_tokens(row: TokenRow, skill_ids: np.ndarray, at: int = 2) -> TokenRow:
    """The row with extra prompt tokens near its front."""
    ids = np.concatenate([row.token_ids[:at], skill_ids, row.token_ids[at:]]).astype(np.int32)
    mask = np.concatenate([row.response_mask[:at], np.zeros(len(skill_ids), bool), row.response_mask[at:]])
    return TokenRow(ids, mask, row.turn_index)


def random_batch(
    seed: int = 0, num_groups: int = 2, group_size: int = 4, behaviour_noise: float = 0.5, skill_share: float = 0.7
) -> UpdateBatch:
    """Whole groups with mixed returns and invalid turns; behaviour log-probs around those of a uniform policy."""
    rng = np.random.default_rng(seed)
    trajectories = []
    for index in range(num_groups * group_size):
        row = random_row(rng, num_turns=int(rng.integers(1, 4)))
        skill = with_skill_tokens(row, rng.integers(0, VOCABULARY, 6)) if rng.random() < skill_share else None
        num_response = int(row.response_mask.sum())
        trajectories.append(
            UpdateTrajectory(
                plain=row,
                behaviour_logprob=(-4.0 + behaviour_noise * rng.normal(size=num_response)).astype(np.float32),
                fresh=rng.random(num_response) < 0.5,
                invalid=rng.random(int(row.turn_index.max()) + 1) < 0.3,
                episode_return=float(rng.integers(0, 2)) * 10.0,
                group_id=f"g{index // group_size}",
                skill=skill,
            )
        )
    return UpdateBatch(tuple(trajectories))
