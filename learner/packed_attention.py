"""Attention over one packed row: many sequences side by side, none sees another.

A packed row is `input_ids` [1, T] with position ids that restart at 0 for each sequence. The bounds of the sequences
travel through the model's keyword arguments as `cu_seqlens` (int32 [sequences + 1], 0 first and T last), and, so that
no layer has to wait for the device to read it, the same as plain integers in `lengths`.
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface

ATTENTION_NAME = "seed_packed"

# (query, key, value as [T, heads, head_dim], cu_seqlens, longest sequence, scale) -> [T, heads, head_dim]
VarlenKernel = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, int, float | None], torch.Tensor]


def use_packed_attention(model: PreTrainedModel) -> None:
    """Switch `model` to packed attention; from then on every call needs `cu_seqlens` and `lengths`."""
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
    cu_seqlens: torch.Tensor | None = None,
    lengths: Sequence[int] | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention inside each sequence of the row, with grouped key and value heads.

    Shapes: query [1, heads, T, head_dim], key and value [1, kv_heads, T, head_dim] -> [1, T, heads, head_dim].
    Half-precision tensors on a CUDA device go through a variable-length kernel; everything else through an exact loop.
    """
    if cu_seqlens is None or lengths is None:
        raise ValueError("packed attention needs cu_seqlens and lengths: call the model through scoring.score")
    if attention_mask is not None or dropout != 0.0 or query.shape[0] != 1:
        raise ValueError("packed attention takes one row, no mask and no dropout")
    if sliding_window is not None and max(lengths) > sliding_window:
        raise ValueError(f"a sequence of {max(lengths)} tokens is longer than the sliding window of {sliding_window}")
    kernel = _varlen_kernel() if query.is_cuda and query.dtype in (torch.float16, torch.bfloat16) else None
    if kernel is None:
        return _loop(query, key, value, lengths, scaling), None
    rows = [tensor[0].transpose(0, 1) for tensor in (query, key, value)]
    return kernel(rows[0], rows[1], rows[2], cu_seqlens, max(lengths), scaling)[None], None


def _loop(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, lengths: Sequence[int], scale: float | None
) -> torch.Tensor:
    """One causal SDPA call a sequence: exact, and on a CPU faster than any mask over the whole row.

    The row is cut with `split`, whose backward is one concatenation; slicing would add a row of zeros per sequence.
    """
    pieces = zip(*(torch.split(tensor, list(lengths), dim=2) for tensor in (query, key, value)), strict=True)
    grouped = key.shape[1] != query.shape[1]
    outputs = [
        scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=grouped).transpose(1, 2)
        for q, k, v in pieces
    ]
    return torch.cat(outputs, dim=1)


@cache
def _varlen_kernel() -> VarlenKernel | None:
    """The variable-length kernel of this installation: flash-attn, else torch's own, else None (the loop).

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
        cu_seqlens: torch.Tensor,
        longest: int,
        scale: float | None,
    ) -> torch.Tensor:
        output: torch.Tensor = flash_attn_varlen_func(
            query, key, value, cu_seqlens, cu_seqlens, longest, longest, softmax_scale=scale, causal=True
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
        cu_seqlens: torch.Tensor,
        longest: int,
        scale: float | None,
    ) -> torch.Tensor:
        # A window of (-1, 0), everything to the left and nothing to the right, is this kernel's way to say causal.
        output = varlen_attn(
            query,
            key,
            value,
            cu_seqlens,
            cu_seqlens,
            longest,
            longest,
            scale=scale,
            window_size=(-1, 0),
            enable_gqa=key.shape[1] != query.shape[1],
        )
        assert isinstance(output, torch.Tensor)
        return output

    return torch_kernel


def _no_mask(*_: Any, **__: Any) -> None:
    """The bounds of the sequences say everything; no mask is ever built."""
