"""Log-probs and entropies of response tokens, scored over packed rows; with or without gradients."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel

from seed_async.learner.packed_attention import ATTENTION_NAME, register_packed_attention
from seed_async.learner.packing import MaskedRow, PackedRow, pack, plan_micro_batches
from seed_async.messages import Canary
from seed_async.weights.canary import canary_text

# Architectures whose logits are lm_head(hidden) and nothing else (no soft cap, no scale), checked against a plain
# forward pass in the tests.
TEXT_MODEL_TYPES = ("llama", "qwen2", "qwen3")
# Of these only the language model is used, on rows of text: images in a row are not supported.
VISION_MODEL_TYPES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
# Logits that exist at once, in elements: 128 MiB in float32. More rows than fit are projected chunk by chunk.
MAX_LOGIT_ELEMENTS = 1 << 25

SCORE_METHOD = "score_packed"
"""The method by which a sharded model (see `ranks`) runs `score_packed`, so that it gathers its shards for it."""

ComputeDtype = Literal["float32", "bfloat16"]
"""What layers compute in. Weights, log-probs, gradients and optimizer state are float32 with either."""


class IdleRow(NamedTuple):
    """The shortest row that can be scored: what a rank without rows of its own runs a sharded model on."""

    token_ids: np.ndarray = np.zeros(2, dtype=np.int32)
    response_mask: np.ndarray = np.array([False, True])


class CanaryRow(NamedTuple):
    """The canary as a row: `token_ids` int32 [T], `response_mask` bool [T]."""

    token_ids: np.ndarray
    response_mask: np.ndarray


class Scores(NamedTuple):
    """Per response token, in the order of the rows: both float32 [R] (float64 for a float64 model).

    `logprob` of the token under softmax(logits / temperature), and `entropy` of that same distribution.
    """

    logprob: torch.Tensor
    entropy: torch.Tensor


def load_policy(path: str | Path, *, activation_checkpointing: bool = False) -> PreTrainedModel:
    """Load a Hugging Face folder from the local disk in float32 with packed attention, without dropout.

    `activation_checkpointing` keeps one hidden state a layer for backward and computes the rest again. Raises
    ValueError for an architecture that was not checked.
    """
    register_packed_attention()
    model: PreTrainedModel = auto_class(path).from_pretrained(
        path, local_files_only=True, dtype=torch.float32, attn_implementation=ATTENTION_NAME
    )
    if activation_checkpointing:
        use_activation_checkpointing(model)
    return model


def auto_class(path: str | Path) -> Any:
    """The transformers class that loads a model folder. Raises ValueError for an architecture that was not checked."""
    model_type = AutoConfig.from_pretrained(path, local_files_only=True).model_type
    if model_type not in TEXT_MODEL_TYPES + VISION_MODEL_TYPES:
        known = ", ".join(TEXT_MODEL_TYPES + VISION_MODEL_TYPES)
        raise ValueError(f"model type {model_type!r} is not one of {known}")
    return AutoModelForImageTextToText if model_type in VISION_MODEL_TYPES else AutoModelForCausalLM


def use_activation_checkpointing(model: PreTrainedModel) -> None:
    """Compute each layer again in backward instead of keeping what it computed.

    transformers does it in training mode only, which must then not differ otherwise: raises ValueError for dropout.
    """
    text = model.config.get_text_config()
    rates = {name: value for name, value in text.to_dict().items() if "dropout" in name and value}
    if rates:
        raise ValueError(f"activation checkpointing needs a model without dropout, not {rates}")
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()


def max_context_tokens(model: PreTrainedModel) -> int:
    """The longest row that the model was made for."""
    return int(model.config.get_text_config().max_position_embeddings)


def score(
    model: PreTrainedModel,
    rows: Sequence[MaskedRow],
    *,
    temperature: float,
    token_budget: int,
    compute_dtype: ComputeDtype = "float32",
    most: Callable[[int], int] = int,
) -> Scores:
    """Score the response tokens of `rows` under the present weights of `model`.

    logprob_t = log softmax(z_{t-1} / temperature)[id_t], entropy_t = H(softmax(z_{t-1} / temperature)), z the logits;
    the log-softmax is taken in float32 or better. Rows are packed in order up to `token_budget` tokens, and a prefix
    that several rows of a micro-batch share is computed once. Gradients follow torch's grad mode: under
    `torch.no_grad()` this is plain scoring; with gradients the graphs of all micro-batches live until backward, so a
    trainer calls it with one micro-batch at a time.

    The ranks of a sharded model must run it equally often: `most` turns this rank's number of micro-batches into the
    largest of any rank, and the difference is made up by idle passes.
    """
    if not temperature > 0:
        raise ValueError(f"temperature must be positive, not {temperature}")
    device = next(model.parameters()).device
    plan = plan_micro_batches(rows, token_budget)
    forward = getattr(model, SCORE_METHOD, partial(score_packed, model))
    num_idle = most(len(plan)) - len(plan)
    parts = [forward(pack([rows[i] for i in micro], device), temperature, compute_dtype) for micro in plan]
    for _ in range(num_idle):
        forward(pack([IdleRow()], device), temperature, compute_dtype)
    if not parts:
        return Scores(torch.empty(0, device=device), torch.empty(0, device=device))
    return Scores(torch.cat([part.logprob for part in parts]), torch.cat([part.entropy for part in parts]))


@torch.no_grad()
def score_canary(model: PreTrainedModel, compute_dtype: ComputeDtype) -> Canary:
    """What the present weights give the canary at temperature 1; every rank of a sharded model must ask for it."""
    vocabulary = int(model.config.get_text_config().vocab_size)
    text = canary_text(vocabulary)
    ids = np.concatenate(text)
    row = CanaryRow(ids, np.arange(ids.size) >= text.prompt_ids.size)
    scores = score(model, [row], temperature=1.0, token_budget=ids.size, compute_dtype=compute_dtype)
    return Canary(vocabulary=vocabulary, logprobs=tuple(scores.logprob.tolist()))


def score_packed(model: PreTrainedModel, row: PackedRow, temperature: float, compute_dtype: ComputeDtype) -> Scores:
    """Run the base model over the packed row, and the vocabulary projection at the predicting positions only."""
    half = compute_dtype == "bfloat16"
    with torch.autocast(row.input_ids.device.type, dtype=torch.bfloat16, enabled=half):
        output = model.base_model(
            input_ids=row.input_ids,
            position_ids=row.position_ids,
            use_cache=False,
            packed_layout=row.layout,
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
    chosen = log_probs.gather(1, targets[:, None]).sum(dim=1)  # of one; no view, whose backward FSDP would lose
    return Scores(chosen, -(log_probs.exp() * log_probs).sum(dim=-1))
