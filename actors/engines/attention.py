"""Attention of the torch engine: one packed row of pending tokens, each segment over its own slot of the KV cache.

The keys and values of the row are written to the cache first. Then the decoding tokens (one a slot) attend in one
vectorised call over the slots, and each prefill segment attends over its slot's prefix and itself. Registered with
transformers' attention interface, so any model family that uses it works; no cache object of transformers is involved.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import PretrainedConfig
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface

ATTENTION_NAME = "seed_slotted"


class SlotCache:
    """Keys and values of every slot, [slots, kv_heads, context, head_dim] a layer; zero pages cost nothing until written."""

    def __init__(self, config: PretrainedConfig, slots: int, context: int, dtype: torch.dtype) -> None:
        """Reserve the memory for `slots` sequences of up to `context` tokens."""
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        shape = (slots, config.num_key_value_heads, context, head_dim)
        self.keys = [torch.zeros(shape, dtype=dtype) for _ in range(config.num_hidden_layers)]
        self.values = [torch.zeros(shape, dtype=dtype) for _ in range(config.num_hidden_layers)]


@dataclass(frozen=True)
class PrefillSegment:
    """Tokens `start` to `stop` of the packed row, which continue `slot` behind `prefix` cached tokens."""

    start: int
    stop: int
    slot: int
    prefix: int
    mask: torch.Tensor | None


@dataclass(frozen=True)
class AttentionPlan:
    """Where each token of the packed row belongs.

    `slots` and `positions` int64 [T] place each token; the first `num_decode` tokens are one a slot, attended over the
    first `num_slots` slots and `longest` positions with `decode_mask` bool [num_slots, 1, 1, longest].
    """

    cache: SlotCache
    slots: torch.Tensor
    positions: torch.Tensor
    num_decode: int
    num_slots: int
    longest: int
    decode_mask: torch.Tensor | None
    prefill: tuple[PrefillSegment, ...]


def slotted_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    plan: AttentionPlan,
    scaling: float | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Attend a packed row: query [1, heads, T, head_dim], key and value [1, kv_heads, T, head_dim] -> [1, T, heads, head_dim]."""
    layer: int = module.layer_idx  # type: ignore[assignment]
    keys, values = plan.cache.keys[layer], plan.cache.values[layer]
    keys[plan.slots, :, plan.positions] = key[0].transpose(0, 1)
    values[plan.slots, :, plan.positions] = value[0].transpose(0, 1)
    heads, head_dim = query.shape[1], query.shape[3]
    grouped = heads != key.shape[1]
    out = query.new_empty(query.shape[2], heads, head_dim)
    if plan.num_decode:
        running = plan.slots[: plan.num_decode]
        rows = query.new_zeros(plan.num_slots, heads, 1, head_dim)
        rows[running, :, 0] = query[0, :, : plan.num_decode].transpose(0, 1)
        attended = scaled_dot_product_attention(
            rows,
            keys[: plan.num_slots, :, : plan.longest],
            values[: plan.num_slots, :, : plan.longest],
            attn_mask=plan.decode_mask,
            scale=scaling,
            enable_gqa=grouped,
        )
        out[: plan.num_decode] = attended[running, :, 0]
    for segment in plan.prefill:
        end = segment.prefix + segment.stop - segment.start
        attended = scaled_dot_product_attention(
            query[:, :, segment.start : segment.stop],
            keys[None, segment.slot, :, :end],
            values[None, segment.slot, :, :end],
            attn_mask=segment.mask,
            is_causal=segment.mask is None,
            scale=scaling,
            enable_gqa=grouped,
        )
        out[segment.start : segment.stop] = attended[0].transpose(0, 1)
    return out[None], None


def register_slotted_attention() -> None:
    """Make the attention known to transformers under ATTENTION_NAME; repeating it changes nothing."""
    AttentionInterface.register(ATTENTION_NAME, slotted_attention)
    AttentionMaskInterface.register(ATTENTION_NAME, lambda *_args, **_kwargs: None)
