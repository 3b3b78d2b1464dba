"""Attention of the torch engine: one packed row of pending tokens, each segment over its own slot of the KV cache.

The keys and values of the row are written to the cache first. Then each run of neighbouring decoding slots attends in
one call on a view of the cache, and each prefill segment attends over its slot's prefix and itself. The function is
registered with transformers' attention interface, so it serves every model family that uses that interface.
"""

import math
from itertools import pairwise
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import PretrainedConfig
from transformers.modeling_utils import AttentionInterface

ATTENTION_NAME = "seed_slotted"


class SlotCache:
    """Keys and values of every slot, [2, layers, slots, kv_heads, context, head_dim] in one block."""

    def __init__(self, config: PretrainedConfig, num_slots: int, context: int, model: torch.nn.Module) -> None:
        """Reserve room for `num_slots` sequences of up to `context` tokens, in the model's dtype and on its device."""
        parameter = next(model.parameters())
        heads = config.num_attention_heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        self.kv_heads: int = getattr(config, "num_key_value_heads", None) or heads
        self.context = context
        self.dtype, self.device = parameter.dtype, parameter.device
        self._data = _lazy_zeros(
            (2, config.num_hidden_layers, num_slots, self.kv_heads, context, head_dim), self.dtype
        ).to(self.device)
        self.keys, self.values = self._data[0].unbind(0), self._data[1].unbind(0)

    def copy_prefix(self, source: int, target: int, num_tokens: int) -> None:
        """Give `target` the first `num_tokens` keys and values of `source`."""
        self._data[:, :, target, :, :num_tokens] = self._data[:, :, source, :, :num_tokens]


def _lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Zeros whose pages cost no memory before the first write: numpy asks calloc for them, torch.zeros writes them.

    They have to be zeros: a masked position has weight 0, and 0 times leftover NaN bytes would still be NaN.
    """
    return torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, dtype=np.uint8)).view(dtype).view(shape)


class Segment(NamedTuple):
    """One attention call: tokens `start:stop` of the packed row over `length` positions of slots `first:last`.

    A decode run has one token for each of its slots; a prefill segment has several tokens of one slot. `mask` is added
    to the scores: [slots, 1, 1, length] for a run, [tokens, length] for a prefill segment, None where none is needed.
    """

    start: int
    stop: int
    first: int
    last: int
    length: int
    mask: torch.Tensor | None


class AttentionPlan(NamedTuple):
    """What the attention of every layer needs in one step.

    `positions` int64 [T]; `rows` int64 [T * kv_heads], where each key goes in the cache seen as [-1, head_dim];
    `decode` and `prefill` together cover the packed row in order.
    """

    cache: SlotCache
    positions: torch.Tensor
    rows: torch.Tensor
    decode: tuple[Segment, ...]
    prefill: tuple[Segment, ...]


def make_plan(
    cache: SlotCache, slots: np.ndarray, counts: np.ndarray, prefixes: np.ndarray, num_decode: int
) -> AttentionPlan:
    """Plan a step that computes `counts` [B] tokens behind `prefixes` [B] cached ones in `slots` [B].

    The first `num_decode` entries have one token each and come in ascending order of slots.
    """
    stops = np.cumsum(counts)
    starts = stops - counts
    positions = np.arange(stops[-1]) + np.repeat(prefixes - starts, counts)
    heads = np.repeat(slots * cache.kv_heads, counts)[:, None] + np.arange(cache.kv_heads)
    rows = (heads * cache.context + positions[:, None]).reshape(-1)
    prefill = tuple(
        Segment(start, stop, slot, slot + 1, prefix + stop - start, _prefill_mask(cache, stop - start, prefix))
        for start, stop, slot, prefix in zip(
            starts[num_decode:].tolist(),
            stops[num_decode:].tolist(),
            slots[num_decode:].tolist(),
            prefixes[num_decode:].tolist(),
            strict=True,
        )
    )
    return AttentionPlan(
        cache,
        torch.from_numpy(positions).to(cache.device),
        torch.from_numpy(rows).to(cache.device),
        _decode_runs(cache, slots[:num_decode], prefixes[:num_decode] + 1),
        prefill,
    )


def _decode_runs(cache: SlotCache, slots: np.ndarray, lengths: np.ndarray) -> tuple[Segment, ...]:
    """Split ascending `slots` [D] at their gaps: each run is a view of the cache, so nothing is gathered or copied."""
    if slots.size == 0:
        return ()
    edges = [0, *(np.flatnonzero(np.diff(slots) != 1) + 1).tolist(), slots.size]
    runs = []
    for start, stop in pairwise(edges):
        run = lengths[start:stop]
        longest = int(run.max())
        mask = None
        if run.min() < longest:
            seen = torch.from_numpy(np.arange(longest) < run[:, None])
            mask = _additive(cache, seen)[:, None, None]
        runs.append(Segment(start, stop, int(slots[start]), int(slots[stop - 1]) + 1, longest, mask))
    return tuple(runs)


def _prefill_mask(cache: SlotCache, count: int, prefix: int) -> torch.Tensor | None:
    """Causal mask of a segment behind a prefix; None where plain causal attention does it."""
    if prefix == 0:
        return None
    return _additive(cache, torch.ones(count, prefix + count, dtype=torch.bool).tril_(prefix))


def _additive(cache: SlotCache, seen: torch.Tensor) -> torch.Tensor:
    """0 where `seen`, else -inf. Made once a step: SDPA would turn a bool mask into this in every layer."""
    mask = torch.zeros(seen.shape, dtype=cache.dtype).masked_fill_(~seen, -math.inf)
    return mask.to(cache.device)


def slotted_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    slot_plan: AttentionPlan,
    scaling: float | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Attend a packed row: query [1, heads, T, dim], key and value [1, kv_heads, T, dim] -> [1, T, heads, dim]."""
    layer = cast(int, module.layer_idx)
    keys, values = slot_plan.cache.keys[layer], slot_plan.cache.values[layer]
    heads, dim = query.shape[1], query.shape[3]
    keys.view(-1, dim).index_copy_(0, slot_plan.rows, key[0].transpose(0, 1).reshape(-1, dim))
    values.view(-1, dim).index_copy_(0, slot_plan.rows, value[0].transpose(0, 1).reshape(-1, dim))
    kv_heads = key.shape[1]
    by_token = query[0].transpose(0, 1)
    pieces = []
    for run in slot_plan.decode:
        # The query heads that share a key head are its rows: one small matrix product instead of repeated keys.
        attended = scaled_dot_product_attention(
            by_token[run.start : run.stop].reshape(-1, kv_heads, heads // kv_heads, dim),
            keys[run.first : run.last, :, : run.length],
            values[run.first : run.last, :, : run.length],
            attn_mask=run.mask,
            scale=scaling,
        )
        pieces.append(attended.reshape(-1, heads, dim))
    for part in slot_plan.prefill:
        attended = scaled_dot_product_attention(
            query[:, :, part.start : part.stop],
            keys[part.first : part.last, :, : part.length],
            values[part.first : part.last, :, : part.length],
            attn_mask=part.mask,
            is_causal=part.mask is None,
            scale=scaling,
            enable_gqa=heads != kv_heads,
        )
        pieces.append(attended[0].transpose(0, 1))
    return (pieces[0] if len(pieces) == 1 else torch.cat(pieces))[None], None


def register_slotted_attention() -> None:
    """Make the attention known to transformers under ATTENTION_NAME; repeating it changes nothing.

    No mask function goes with it: transformers then skips making masks, which the plan replaces.
    """
    AttentionInterface.register(ATTENTION_NAME, slotted_attention)
