"""Rows and models for the learner's benchmarks: groups of siblings with a plain and a skill-augmented context each."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from seed_async.layouts import TokenRow
from seed_async.learner.batch import UpdateBatch, UpdateTrajectory
from seed_async.learner.packed_attention import use_packed_attention
from seed_async.learner.scoring import load_policy

GROUP_SIZE = 8
MEAN_TOKENS, MAX_TOKENS, MIN_TOKENS = 400, 2000, 120
SIGMA = 0.6
"""Spread of the log-normal lengths."""
SHARED_TOKENS = 80
"""What siblings have in common. It saves about as much as in the paper's layout (windowed, full style): 16 % of the
plain tokens. `bench_prefixes` counts the others: transcripts 2 % (full style) and 13 % (compact), windowed 34 %."""
TASK_TOKENS = 32
"""Up to the task's line, behind which the skill goes: the front that both contexts of a trajectory share."""
SKILL_TOKENS = 40
PROMPT_TOKENS, RESPONSE_TOKENS = 35, 15
"""Of a turn after the first prompt: 30 % are sampled, as in ALFWorld transcripts."""

ARCHITECTURES = {
    "llama-15m": LlamaConfig(
        vocab_size=4096,
        hidden_size=384,
        intermediate_size=1024,
        num_hidden_layers=8,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
    ),
    "smollm2-135m": LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
    ),
}
"""Architectures with random weights: speed and memory do not depend on what was learned."""


class Contexts(NamedTuple):
    """The two contexts of a trajectory: the same response ids after different prompts."""

    plain: TokenRow
    skill: TokenRow


def make_model(name: str, *, packed: bool) -> PreTrainedModel:
    """A random model of an architecture above, or the one in a folder; with packed or with the library's attention."""
    if name in ARCHITECTURES:
        torch.manual_seed(0)
        model: PreTrainedModel = LlamaForCausalLM(ARCHITECTURES[name]).eval()  # type: ignore[no-untyped-call]
    else:
        model = load_policy(Path(name))
    if packed:
        use_packed_attention(model)
    else:
        model.set_attn_implementation("sdpa")
    return model


def make_contexts(count: int, vocabulary: int, *, shared_tokens: int = SHARED_TOKENS, seed: int = 0) -> list[Contexts]:
    """Trajectories in groups of siblings that share their first tokens; each has a skill of its own."""
    rng = np.random.default_rng(seed)
    lengths = rng.lognormal(np.log(MEAN_TOKENS) - SIGMA**2 / 2, SIGMA, count)
    made = []
    for index, length in enumerate(np.clip(lengths, MIN_TOKENS, MAX_TOKENS).astype(int)):
        if index % GROUP_SIZE == 0:
            opening = rng.integers(0, vocabulary, shared_tokens)
        ids = rng.integers(0, vocabulary, max(int(length), MIN_TOKENS))
        front = min(shared_tokens, len(ids) - PROMPT_TOKENS)
        ids[:front] = opening[:front]
        mask = np.zeros(len(ids), dtype=bool)
        mask[front:] = np.arange(len(ids) - front) % (PROMPT_TOKENS + RESPONSE_TOKENS) >= PROMPT_TOKENS
        mask[-1] = True
        starts = mask & ~np.concatenate([[False], mask[:-1]])
        turns = (np.cumsum(starts) - 1)[mask].astype(np.int32)
        plain = TokenRow(ids.astype(np.int32), mask, turns)
        made.append(Contexts(plain, _with_skill(plain, rng.integers(0, vocabulary, SKILL_TOKENS))))
    return made


def _with_skill(row: TokenRow, skill_ids: np.ndarray) -> TokenRow:
    """The row with the skill behind the task's line."""
    ids = np.concatenate([row.token_ids[:TASK_TOKENS], skill_ids, row.token_ids[TASK_TOKENS:]]).astype(np.int32)
    mask = np.concatenate(
        [row.response_mask[:TASK_TOKENS], np.zeros(len(skill_ids), bool), row.response_mask[TASK_TOKENS:]]
    )
    return TokenRow(ids, mask, row.turn_index)


def make_batch(contexts: Sequence[Contexts], seed: int = 0) -> UpdateBatch:
    """An update's batch of these trajectories, half of them won, sampled by weights of one version before."""
    rng = np.random.default_rng(seed)
    trajectories = []
    for index, (plain, skill) in enumerate(contexts):
        num_tokens, num_turns = len(plain.turn_index), int(plain.turn_index[-1]) + 1
        trajectories.append(
            UpdateTrajectory(
                plain=(plain,),
                behaviour_logprob=rng.normal(-8.0, 0.5, num_tokens).astype(np.float32),
                fresh=np.zeros(num_tokens, dtype=bool),
                trained=np.ones(num_tokens, dtype=bool),
                invalid=np.zeros(num_turns, dtype=bool),
                observation_ids=np.arange(num_turns),
                episode_return=10.0 * (index % 2),
                group_id=f"g{index // GROUP_SIZE}",
                skill=(skill,),
            )
        )
    return UpdateBatch(tuple(trajectories))
