"""Log-probs and entropies of response tokens, scored over packed rows; with or without gradients."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, PreTrainedModel

from seed_async.learner.packed_attention import ATTENTION_NAME, register_packed_attention

# Architectures whose logits are lm_head(hidden) and nothing else (no soft cap, no scale), checked against a plain
# forward pass in the tests.
SUPPORTED_MODEL_TYPES = ("llama", "qwen2", "qwen3")
# Logits that exist at once, in elements: 128 MiB in float32. More rows than fit are projected chunk by chunk.
MAX_LOGIT_ELEMENTS = 1 << 25


class MaskedRow(Protocol):
    """What scoring reads of a training row; `layouts.TokenRow` is one."""

    @property
    def token_ids(self) -> np.ndarray:
        """Token ids, int [T]."""

    @property
    def response_mask(self) -> np.ndarray:
        """True on response tokens, bool [T]."""


class Scores(NamedTuple):
    """Per response token, in the order of the rows: both float32 [R] (float64 for a float64 model).

    `logprob` of the token under softmax(logits / temperature), and `entropy` of that same distribution.
    """

    logprob: torch.Tensor
    entropy: torch.Tensor


class _PackedRow(NamedTuple):
    """`input_ids` and `position_ids` [1, T], `predictors` [R] the positions whose output predicts `targets` [R]."""

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    predictors: torch.Tensor
    targets: torch.Tensor
    cu_seqlens: torch.Tensor
    lengths: tuple[int, ...]


def load_policy(path: str | Path, *, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Load a Hugging Face folder from the local disk with packed attention; transformers returns it without dropout."""
    register_packed_attention()
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        path, local_files_only=True, dtype=dtype, attn_implementation=ATTENTION_NAME
    )
    if model.config.model_type not in SUPPORTED_MODEL_TYPES:
        raise ValueError(f"model type {model.config.model_type!r} is not one of {', '.join(SUPPORTED_MODEL_TYPES)}")
    return model


def plan_micro_batches(lengths: Sequence[int], token_budget: int) -> list[range]:
    """Cut a list of rows, in order, into runs of at most `token_budget` tokens; a longer row goes alone."""
    if token_budget < 1:
        raise ValueError(f"token_budget must be at least 1, not {token_budget}")
    plan, start, used = [], 0, 0
    for index, length in enumerate(lengths):
        if index > start and used + length > token_budget:
            plan.append(range(start, index))
            start, used = index, 0
        used += length
    if len(lengths) > start:
        plan.append(range(start, len(lengths)))
    return plan


def score(model: PreTrainedModel, rows: Sequence[MaskedRow], *, temperature: float, token_budget: int) -> Scores:
    """Score the response tokens of `rows` under the present weights of `model`.

    logprob_t = log softmax(z_{t-1} / temperature)[id_t], entropy_t = H(softmax(z_{t-1} / temperature)), z the logits;
    the log-softmax is taken in float32 or better. Rows are packed in order up to `token_budget` tokens. Gradients
    follow torch's grad mode: under `torch.no_grad()` this is plain scoring; with gradients the graphs of all
    micro-batches live until backward, so a trainer calls it with one micro-batch at a time.
    """
    if not temperature > 0:
        raise ValueError(f"temperature must be positive, not {temperature}")
    device = next(model.parameters()).device
    plan = plan_micro_batches([len(row.token_ids) for row in rows], token_budget)
    parts = [_score_packed(model, _pack([rows[i] for i in micro], device), temperature) for micro in plan]
    if not parts:
        return Scores(torch.empty(0, device=device), torch.empty(0, device=device))
    return Scores(torch.cat([part.logprob for part in parts]), torch.cat([part.entropy for part in parts]))


def _pack(rows: Sequence[MaskedRow], device: torch.device) -> _PackedRow:
    """Lay rows side by side; positions restart at 0 for each."""
    for row in rows:
        if len(row.token_ids) != len(row.response_mask) or not len(row.token_ids):
            raise ValueError(f"{len(row.token_ids)} token ids with a mask of {len(row.response_mask)}")
        if row.response_mask[0]:
            raise ValueError("the first token of a row cannot be a response token: nothing predicts it")
    lengths = tuple(len(row.token_ids) for row in rows)
    ids = np.concatenate([row.token_ids for row in rows]).astype(np.int64)
    response = np.flatnonzero(np.concatenate([row.response_mask for row in rows]))
    positions = np.concatenate([np.arange(length, dtype=np.int64) for length in lengths])
    bounds = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    arrays = (ids[None], positions[None], response - 1, ids[response], bounds)
    tensors = [torch.from_numpy(array).to(device, non_blocking=True) for array in arrays]
    return _PackedRow(tensors[0], tensors[1], tensors[2], tensors[3], tensors[4], lengths)


def _score_packed(model: PreTrainedModel, row: _PackedRow, temperature: float) -> Scores:
    """Run the base model over the packed row, and the vocabulary projection at the predicting positions only."""
    output = model.base_model(
        input_ids=row.input_ids,
        position_ids=row.position_ids,
        use_cache=False,
        cu_seqlens=row.cu_seqlens,
        lengths=row.lengths,
    )
    hidden = output.last_hidden_state[0].index_select(0, row.predictors)
    head = _output_head(model)
    chunk_rows = max(1, MAX_LOGIT_ELEMENTS // head.weight.shape[0])
    if hidden.shape[0] <= chunk_rows:
        return _project(head, hidden, row.targets, temperature)
    chunks = zip(torch.split(hidden, chunk_rows), torch.split(row.targets, chunk_rows), strict=True)
    # Several chunks: their logits are computed again in backward, so that only one chunk's logits ever exist.
    parts = [checkpoint(_project, head, part, ids, temperature, use_reentrant=False) for part, ids in chunks]
    return Scores(torch.cat([part.logprob for part in parts]), torch.cat([part.entropy for part in parts]))


def _output_head(model: Any) -> torch.nn.Linear:
    """The vocabulary projection."""
    head: torch.nn.Linear = model.get_output_embeddings()
    return head


def _project(head: torch.nn.Module, hidden: torch.Tensor, targets: torch.Tensor, temperature: float) -> Scores:
    """Hidden states [R, d] and target ids [R] -> log-probs and entropies [R]."""
    logits = head(hidden)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    log_probs = torch.log_softmax(logits if temperature == 1.0 else logits / temperature, dim=-1)
    chosen = log_probs.gather(1, targets[:, None])[:, 0]
    return Scores(chosen, -(log_probs.exp() * log_probs).sum(dim=-1))
