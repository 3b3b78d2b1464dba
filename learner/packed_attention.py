"""Attention over one packed row: many sequences side by side, none sees another but for a prefix that they share.

A packed row is `input_ids` [1, T] with position ids that restart for each sequence. A sequence has tokens of its own,
its queries, which lie in one piece; in front of them it may have a prefix that lies in pieces of sequences before it.
Who sees what travels through the model's keyword arguments as a `PackedLayout`.
"""

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface

ATTENTION_NAME = "seed_packed"


class PackedLayout(NamedTuple):
    """Which keys the queries of each sequence see: all of its prefix, and its own tokens causally.

    Lengths are plain integers, so that no layer has to wait for the device to read them; the bounds are the same as
    int32 [sequences + 1], 0 first. `key_index` int64 [sum of key_lengths] holds for each sequence the places of its
    whole context in the packed row; None: nothing is shared, the keys of a sequence are its own.
    """

    query_lengths: tuple[int, ...]
    key_lengths: tuple[int, ...]
    query_bounds: torch.Tensor
    key_bounds: torch.Tensor
    key_index: torch.Tensor | None


# (query [Q, heads, head_dim], key and value [K, kv_heads, head_dim], layout, scale) -> [Q, heads, head_dim]
VarlenKernel = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, PackedLayout, float | None], torch.Tensor]


def use_packed_attention(model: PreTrainedModel) -> None:
    """Switch `model` to packed attention; from then on every call needs a `packed_layout`."""
    register_packed_attention()
    model.set_attn_implementation(ATTENTION_NAME)


def register_packed_attention() -> None:
    """Make the name known to transformers; calling it again changes nothing."""
    AttentionInterface.register(ATTENTION_NAME, packed_attention)
    AttentionMaskInterface.register(ATTENTION_NAME, _no_mask)


def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    packed_layout: PackedLayout | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention inside each sequence of the row, its shared prefix included, with grouped key and value heads.

    Shapes: query [1, heads, T, head_dim], key and value [1, kv_heads, T, head_dim] -> [1, T, heads, head_dim].
    Half-precision tensors on a CUDA device go through a variable-length kernel; everything else through an exact loop.
    """
    if packed_layout is None:
        raise ValueError("packed attention needs a packed_layout: call the model through scoring.score")
    if attention_mask is not None or dropout != 0.0 or query.shape[0] != 1:
        raise ValueError("packed attention takes one row, no mask and no dropout")
    longest = max(packed_layout.key_lengths)
    if sliding_window is not None and longest > sliding_window:
        raise ValueError(f"a sequence of {longest} tokens is longer than the sliding window of {sliding_window}")
    device = query.device.type
    if torch.is_autocast_enabled(device):
        # The backward of the CPU's bfloat16 attention takes 7 to 17 times as long as that of float32.
        dtype = torch.float32 if device == "cpu" else torch.get_autocast_dtype(device)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    with torch.autocast(device, enabled=False):
        return _attend(query, key, value, packed_layout, scaling), None


def _attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layout: PackedLayout, scale: float | None
) -> torch.Tensor:
    """Gather the keys and values of each sequence once for all where a prefix is shared; then kernel or loop."""
    if layout.key_index is not None:
        key, value = (tensor.index_select(2, layout.key_index) for tensor in (key, value))
    kernel = _varlen_kernel() if query.is_cuda and query.dtype in (torch.float16, torch.bfloat16) else None
    if kernel is None:
        return _loop(query, key, value, layout, scale)
    rows = [tensor[0].transpose(0, 1) for tensor in (query, key, value)]
    return kernel(rows[0], rows[1], rows[2], layout, scale)[None]


def _loop(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layout: PackedLayout, scale: float | None
) -> torch.Tensor:
    """One causal SDPA call a sequence: exact, and on a CPU faster than any mask over the whole row.

    The row is cut with `split`, whose backward is one concatenation; slicing would add a row of zeros per sequence.
    """
    queries = torch.split(query, list(layout.query_lengths), dim=2)
    keys, values = (torch.split(tensor, list(layout.key_lengths), dim=2) for tensor in (key, value))
    grouped = key.shape[1] != query.shape[1]
    outputs = []
    for q, k, v in zip(queries, keys, values, strict=True):
        num_queries, num_keys = q.shape[2], k.shape[2]
        mask = None
        if num_queries < num_keys:
            mask = torch.ones(num_queries, num_keys, dtype=torch.bool, device=q.device).tril(num_keys - num_queries)
        output = scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=grouped
        )
        outputs.append(output.transpose(1, 2))
    return torch.cat(outputs, dim=1)


@cache
def _varlen_kernel() -> VarlenKernel | None:
    """The variable-length kernel of this installation: flash-attn, else torch's own, else None (the loop).

    With fewer queries than keys both align causality at the last key, which is what a shared prefix needs.
    CUDA only; it was written against the published signatures and never ran on the CPU machines that the tests use.
    """
    try:
        from flash_attn import flash_attn_varlen_func  # type: ignore[import-not-found,unused-ignore]
    except ImportError:
        return _torch_varlen_kernel()

    def flash_attn_kernel(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        layout: PackedLayout,
        scale: float | None,
    ) -> torch.Tensor:
        output: torch.Tensor = flash_attn_varlen_func(
            query,
            key,
            value,
            layout.query_bounds,
            layout.key_bounds,
            max(layout.query_lengths),
            max(layout.key_lengths),
            softmax_scale=scale,
            causal=True,
        )
        return output

    return flash_attn_kernel


def _torch_varlen_kernel() -> VarlenKernel | None:
    """`torch.nn.attention.varlen`, where this torch has it; CUDA only and, like flash-attn's, not run on the CPU."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None

    def torch_kernel(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        layout: PackedLayout,
        scale: float | None,
    ) -> torch.Tensor:
        # A window of (-1, 0), everything to the left and nothing to the right, is this kernel's way to say causal.
        output = varlen_attn(
            query,
            key,
            value,
            layout.query_bounds,
            layout.key_bounds,
            max(layout.query_lengths),
            max(layout.key_lengths),
            scale=scale,
            window_size=(-1, 0),
            enable_gqa=key.shape[1] != query.shape[1],
        )
        assert isinstance(output, torch.Tensor)
        return output

    return torch_kernel


def _no_mask(*_: Any, **__: Any) -> None:
    """The bounds of the sequences say everything; no mask is ever built."""
