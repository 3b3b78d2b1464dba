"""Tiny random models and batches for the tests of the learner's math."""

import copy
import dataclasses
from itertools import pairwise

import numpy as np
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)

from seed_async.layouts import TokenRow
from seed_async.learner.batch import LossConfig, UpdateBatch, UpdateTrajectory
from seed_async.learner.packed_attention import use_packed_attention
from seed_async.learner.step import accumulate_gradients
from seed_async.learner.targets import denominators, score_targets

VOCABULARY = 48
FAMILIES = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "qwen2_vl": (Qwen2VLConfig, Qwen2VLForConditionalGeneration),
    "qwen2_5_vl": (Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration),
    "qwen3_vl": (Qwen3VLConfig, Qwen3VLForConditionalGeneration),
}
# Each architecture's vision tower as small as it gets: rows of text never reach it.
VISION = {
    "qwen2_vl": {"depth": 1, "embed_dim": 16, "hidden_size": 32, "num_heads": 2},
    "qwen2_5_vl": {"depth": 1, "hidden_size": 16, "out_hidden_size": 32, "intermediate_size": 16, "num_heads": 2},
    "qwen3_vl": {
        "depth": 1,
        "hidden_size": 16,
        "out_hidden_size": 32,
        "intermediate_size": 16,
        "num_heads": 2,
        "deepstack_visual_indexes": [0],
    },
}


def tiny_model(family: str = "llama", seed: int = 0) -> PreTrainedModel:
    """Two layers with grouped heads, weights large enough that probabilities differ visibly; plain attention."""
    torch.manual_seed(seed)
    config_type, model_type = FAMILIES[family]
    text = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "initializer_range": 0.2,
        "pad_token_id": None,
        "bos_token_id": None,
        "eos_token_id": 1,
    }
    if family in VISION:
        # 8 entries of a head turn in pairs, split over the time, height and width of a position.
        rope = {"rope_type": "default", "mrope_section": [2, 1, 1], "rope_theta": 10000.0}
        extra = {"head_dim": 8} if family == "qwen3_vl" else {}
        return model_type(
            config_type(text_config=text | extra | {"rope_parameters": rope}, vision_config=VISION[family])
        ).eval()
    return model_type(config_type(**text, head_dim=8)).eval()


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


def split_row(row: TokenRow, starts: set[int]) -> tuple[TokenRow, ...]:
    """Cut a transcript into contexts: a new one before the prompt of turn 0 and of each turn in `starts`."""
    ends = [
        int(np.flatnonzero(row.response_mask)[row.turn_index == turn][-1]) + 1 for turn in np.unique(row.turn_index)
    ]
    bounds = [0, *(end for turn, end in enumerate(ends[:-1]) if turn + 1 in starts), ends[-1]]
    rows, done = [], 0
    for first, stop in pairwise(bounds):
        mask = row.response_mask[first:stop]
        turns = row.turn_index[done : done + int(mask.sum())]
        rows.append(TokenRow(row.token_ids[first:stop], mask, turns))
        done += len(turns)
    return tuple(rows)


def scored_turns(row: TokenRow, turns: set[int]) -> TokenRow:
    """The row up to the last of the turns, with only those masked in."""
    wanted = np.isin(row.turn_index, list(turns))
    mask = row.response_mask.copy()
    mask[mask] = wanted
    end = int(np.flatnonzero(mask)[-1]) + 1
    return TokenRow(row.token_ids[:end], mask[:end], row.turn_index[wanted])


def teacher_of(
    plain: tuple[TokenRow, ...], skill: np.ndarray, step_skills: dict[int, np.ndarray]
) -> tuple[TokenRow, ...]:
    """Teacher rows of plain rows: the skill near the front, a row of its own for each turn with a step skill."""
    rows = []
    for row in plain:
        turns = set(row.turn_index.tolist())
        if turns - set(step_skills):
            rows.append(with_skill_tokens(scored_turns(row, turns - set(step_skills)), skill))
        rows += [
            with_skill_tokens(scored_turns(row, {turn}), ids) for turn, ids in step_skills.items() if turn in turns
        ]
    return tuple(rows)


LAYOUTS = ("transcript", "windowed", "mixed")
# Coefficients large enough that every term of the loss shows in the gradient.
LOUD = LossConfig(
    opd_coef=0.5,
    opid_coef=0.3,
    opsd_coef=0.5,
    gigpo_step_weight=0.7,
    kl_coef=0.2,
    entropy_coef=0.05,
    max_grad_norm=1e9,
    token_budget=64,
)


def random_batch(
    seed: int = 0,
    num_groups: int = 2,
    group_size: int = 4,
    behaviour_noise: float = 0.5,
    skill_share: float = 0.7,
    layout: str = "transcript",
    step_skills: bool = False,
    left_out: bool = False,
    masked_share: float = 0.0,
) -> UpdateBatch:
    """Whole groups with mixed returns and invalid turns; behaviour log-probs around those of a uniform policy.

    `mixed`: contexts of two turns. `left_out`: every third teacher row is missing, as if it had been too long.
    `masked_share`: how many of the tokens are too old to be trained.
    """
    rng, extra, old = (np.random.default_rng(seed + offset) for offset in (0, 1000, 2000))
    trajectories = []
    for index in range(num_groups * group_size):
        row = random_row(rng, num_turns=int(rng.integers(1, 4)))
        skill_ids = rng.integers(0, VOCABULARY, 6) if rng.random() < skill_share else None
        num_response, num_turns = int(row.response_mask.sum()), int(row.turn_index.max()) + 1
        starts = {"transcript": set(), "windowed": {1, 2}, "mixed": {2}}[layout]
        plain = split_row(row, starts)
        steps = {num_turns - 1: extra.integers(0, VOCABULARY, 4)} if step_skills else {}
        skill = () if skill_ids is None else teacher_of(plain, skill_ids, steps)
        trajectories.append(
            UpdateTrajectory(
                plain=plain,
                behaviour_logprob=(-4.0 + behaviour_noise * rng.normal(size=num_response)).astype(np.float32),
                fresh=rng.random(num_response) < 0.5,
                trained=old.random(num_response) >= masked_share,
                invalid=rng.random(num_turns) < 0.3,
                observation_ids=extra.integers(0, 3, num_turns),
                episode_return=float(rng.integers(0, 2)) * 10.0,
                group_id=f"g{index // group_size}",
                skill=tuple(r for place, r in enumerate(skill) if not left_out or (index + place) % 3),
            )
        )
    return UpdateBatch(tuple(trajectories))


def loss_and_gradient(batch, config, seed: int = 0) -> tuple[float, torch.Tensor]:
    """The joint loss of the batch and its gradient as the learner computes them, packed and in micro-batches."""
    policy, reference = packed(tiny_model(seed=seed)), packed(tiny_model(seed=1))
    targets = score_targets(batch, config, policy, reference, with_proximal=False)
    everyone = range(len(batch.trajectories))
    parts, _ = accumulate_gradients(batch, everyone, targets, config, policy, denominators(targets, everyone))
    return sum(part.total.item() for part in parts), gradients(policy)


def changed(batch: UpdateBatch, **fields) -> UpdateBatch:
    """The batch with fields of every trajectory replaced; callables get the trajectory."""
    return UpdateBatch(
        tuple(
            dataclasses.replace(t, **{name: f(t) if callable(f) else f for name, f in fields.items()})
            for t in batch.trajectories
        )
    )
