"""Drawing one token a request from a batch of logits."""

from typing import NamedTuple

import numpy as np
import torch


class Draw(NamedTuple):
    """`token_ids` int64 [B] and `logprobs` float32 [B] of the drawn tokens."""

    token_ids: np.ndarray
    logprobs: np.ndarray


def draw_tokens(logits: torch.Tensor, temperatures: np.ndarray, uniforms: np.ndarray) -> Draw:
    """Draw by inverse CDF: the first token whose cumulative probability exceeds the request's uniform number.

    `logits` float32 [B, V]; `temperatures` float32 [B], 0 for greedy; `uniforms` float64 [B] in [0, 1). The log-prob
    is log_softmax(logits / temperature) at the token, with temperature 1 for greedy rows. A row depends on no other
    row. Raises FloatingPointError when logits are not finite.
    """
    greedy = temperatures == 0
    scale = torch.from_numpy(np.where(greedy, np.float32(1), temperatures)).to(logits.device)
    logprobs = torch.log_softmax(logits / scale[:, None], dim=-1)
    if greedy.all():
        chosen = logprobs.argmax(dim=-1)
    else:
        # float64 sums: over a large vocabulary float32 ones would move the edges between rare tokens.
        cumulative = logprobs.exp().cumsum(dim=-1, dtype=torch.float64)
        targets = torch.from_numpy(uniforms).to(logits.device)[:, None] * cumulative[:, -1:]
        chosen = torch.searchsorted(cumulative, targets, right=True)[:, 0].clamp_(max=logits.shape[-1] - 1)
        if greedy.any():
            chosen = torch.where(torch.from_numpy(greedy).to(logits.device), logprobs.argmax(dim=-1), chosen)
    taken = logprobs.gather(1, chosen[:, None])[:, 0].cpu().numpy()
    if np.isnan(taken).any():
        raise FloatingPointError("the model's logits are not finite")
    return Draw(chosen.cpu().numpy(), taken)
