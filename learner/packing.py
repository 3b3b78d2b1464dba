"""Rows side by side in one packed row, a prefix that several of them share held once.

The rows of an update repeat each other: siblings of a group open with the same prompt, the steps of a windowed episode
with the same task, a skill-augmented context with the front of the plain one. What a token's hidden state is depends on
the tokens before it only, so the shared front of two rows is computed once and both attend to it. Nothing is
approximated, and its gradient is the sum of what the rows would have given it.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch

from seed_async.learner.packed_attention import PackedLayout

BLOCK_TOKENS = 16
"""Prefixes are shared in whole blocks of so many tokens: what is looked up, and so the shortest prefix worth it."""
MAX_REUSE = 4
"""A micro-batch holds at most this many times its budget before sharing: each row gathers the keys and values of its
whole context, which in memory are about a fifteenth of what a token costs that is computed."""


class MaskedRow(Protocol):
    """What scoring reads of a training row; `layouts.TokenRow` is one."""

    @property
    def token_ids(self) -> np.ndarray:
        """Token ids, int [T]."""

    @property
    def response_mask(self) -> np.ndarray:
        """True on response tokens, bool [T]."""


class PackedRow(NamedTuple):
    """`input_ids` and `position_ids` [1, T], `predictors` [R] the positions whose output predicts `targets` [R]."""

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    predictors: torch.Tensor
    targets: torch.Tensor
    layout: PackedLayout


class _Shared(NamedTuple):
    """The first `tokens` tokens of a row stand in row `owner` as well; 0 of nobody."""

    tokens: int
    owner: int


class _PrefixTree:
    """Finds the longest prefix, in whole blocks, that a row shares with a row before it."""

    def __init__(self) -> None:
        """No rows yet."""
        self._children: dict[tuple[int, bytes], int] = {}
        self._owners = [-1]

    def shared(self, token_ids: np.ndarray) -> _Shared:
        """Look a row up without adding it."""
        node, blocks = self._descend(_blocks(token_ids))
        return _Shared(blocks * BLOCK_TOKENS, self._owners[node])

    def add(self, token_ids: np.ndarray, row: int) -> None:
        """Let later rows share the prefixes of this one."""
        blocks = _blocks(token_ids)
        node, known = self._descend(blocks)
        for block in blocks[known:]:
            self._owners.append(row)
            child = len(self._owners) - 1
            self._children[node, block] = child
            node = child

    def _descend(self, blocks: list[bytes]) -> tuple[int, int]:
        """The deepest node that the blocks lead to, and how many of them do."""
        node = 0
        for depth, block in enumerate(blocks):
            child = self._children.get((node, block))
            if child is None:
                return node, depth
            node = child
        return node, len(blocks)


def _blocks(token_ids: np.ndarray) -> list[bytes]:
    """The whole blocks of a row as bytes."""
    ids = np.ascontiguousarray(token_ids, dtype=np.int64)
    return [ids[end - BLOCK_TOKENS : end].tobytes() for end in range(BLOCK_TOKENS, len(ids) + 1, BLOCK_TOKENS)]


def plan_micro_batches(rows: Sequence[MaskedRow], token_budget: int) -> list[range]:
    """Cut a list of rows, in order, into runs of at most `token_budget` tokens; a longer row goes alone.

    Tokens of a prefix that is shared inside the run count once.
    """
    if token_budget < 1:
        raise ValueError(f"token_budget must be at least 1, not {token_budget}")
    plan, start, computed, total = [], 0, 0, 0
    tree = _PrefixTree()
    for index, row in enumerate(rows):
        size = len(row.token_ids)
        new = size - tree.shared(row.token_ids).tokens
        if index > start and (computed + new > token_budget or total + size > MAX_REUSE * token_budget):
            plan.append(range(start, index))
            start, computed, total, tree, new = index, 0, 0, _PrefixTree(), size
        tree.add(row.token_ids, index)
        computed, total = computed + new, total + size
    if len(rows) > start:
        plan.append(range(start, len(rows)))
    return plan


def pack(rows: Sequence[MaskedRow], device: torch.device) -> PackedRow:
    """Lay rows side by side, each without the prefix that it shares with a row before it; positions restart at 0.

    Raises ValueError for a row that cannot be scored.
    """
    tree, start = _PrefixTree(), 0
    places: list[np.ndarray] = []
    positions: list[np.ndarray] = []
    new_lengths: list[int] = []
    for index, row in enumerate(rows):
        _check(row)
        shared = tree.shared(row.token_ids)
        tree.add(row.token_ids, index)
        size = len(row.token_ids)
        new = size - shared.tokens
        front = places[shared.owner][: shared.tokens] if shared.tokens else np.empty(0, np.int64)
        places.append(np.concatenate([front, np.arange(start, start + new)]))
        positions.append(np.arange(shared.tokens, size))
        new_lengths.append(new)
        start += new
    masks = [row.response_mask for row in rows]
    ids = [row.token_ids[len(row.token_ids) - new :] for row, new in zip(rows, new_lengths, strict=True)]
    predictors = [place[np.flatnonzero(mask) - 1] for place, mask in zip(places, masks, strict=True)]
    targets = [row.token_ids[mask] for row, mask in zip(rows, masks, strict=True)]
    input_ids, position_ids, predicting, target_ids = (
        torch.from_numpy(np.concatenate(arrays).astype(np.int64)).to(device, non_blocking=True)
        for arrays in (ids, positions, predictors, targets)
    )
    layout = _layout(new_lengths, places, device)
    return PackedRow(input_ids[None], position_ids[None], predicting, target_ids, layout)


def _check(row: MaskedRow) -> None:
    if len(row.token_ids) != len(row.response_mask) or not len(row.token_ids):
        raise ValueError(f"{len(row.token_ids)} token ids with a mask of {len(row.response_mask)}")
    if row.response_mask[0]:
        raise ValueError("the first token of a row cannot be a response token: nothing predicts it")


def _layout(new_lengths: Sequence[int], places: Sequence[np.ndarray], device: torch.device) -> PackedLayout:
    """The layout of the rows that have tokens of their own; a row that is the front of another one has none."""
    kept = [index for index, new in enumerate(new_lengths) if new]
    query_lengths = tuple(new_lengths[index] for index in kept)
    key_lengths = tuple(len(places[index]) for index in kept)
    index = None
    if query_lengths != key_lengths:
        index = torch.from_numpy(np.concatenate([places[index] for index in kept])).to(device, non_blocking=True)
    bounds = [
        torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)).to(device, non_blocking=True)
        for lengths in (query_lengths, key_lengths)
    ]
    return PackedLayout(query_lengths, key_lengths, bounds[0], bounds[1], index)
