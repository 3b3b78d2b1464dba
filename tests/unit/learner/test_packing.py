"""Which rows share a micro-batch, and how their common prefixes are found and laid out."""

from types import SimpleNamespace

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from seed_async.learner.packing import BLOCK_TOKENS, MAX_REUSE, pack, plan_micro_batches

CPU = torch.device("cpu")


def row(ids) -> SimpleNamespace:
    """A row whose last token is the response."""
    return SimpleNamespace(token_ids=np.asarray(ids, dtype=np.int32), response_mask=np.arange(len(ids)) == len(ids) - 1)


@st.composite
def families(draw) -> list[SimpleNamespace]:
    """Rows that branch off one another at random places, some of them the front of another one."""
    seed = draw(st.integers(0, 10_000))
    rng, rows = np.random.default_rng(seed), []
    for _ in range(draw(st.integers(1, 12))):
        front = rows[int(rng.integers(len(rows)))].token_ids if rows and rng.random() < 0.8 else np.empty(0, np.int32)
        kept = front[: int(rng.integers(len(front) + 1))]
        new = rng.integers(0, 5, int(rng.integers(0 if len(kept) > 1 else 2, 60)))
        rows.append(row(np.concatenate([kept, new])))
    return rows


def shared_with_one_before(rows: list, index: int) -> int:
    """The longest prefix in whole blocks, by comparing with every row before."""
    ids, longest = rows[index].token_ids, 0
    for other in rows[:index]:
        size = min(len(ids), len(other.token_ids))
        different = np.flatnonzero(ids[:size] != other.token_ids[:size])
        longest = max(longest, int(different[0]) if len(different) else size)
    return longest - longest % BLOCK_TOKENS


@given(families())
def test_every_row_reads_its_own_tokens_at_its_own_positions(rows) -> None:
    """Wherever the pieces of its context lie in the packed row."""
    packed = pack(rows, CPU)
    ids, positions, layout = packed.input_ids[0], packed.position_ids[0], packed.layout
    own = [len(r.token_ids) - shared_with_one_before(rows, i) for i, r in enumerate(rows)]
    kept = [r for r, new in zip(rows, own, strict=True) if new]
    assert layout.query_lengths == tuple(new for new in own if new)
    assert layout.key_lengths == tuple(len(r.token_ids) for r in kept)
    index = torch.arange(len(ids)) if layout.key_index is None else layout.key_index
    for context, r in zip(index.split(list(layout.key_lengths)), kept, strict=True):
        assert ids[context].tolist() == r.token_ids.tolist()
        assert positions[context].tolist() == list(range(len(r.token_ids)))
    before = [r.token_ids[-2] for r in rows]
    assert ids[packed.predictors].tolist() == before
    assert packed.targets.tolist() == [r.token_ids[-1] for r in rows]


@given(families(), st.integers(1, 200))
def test_micro_batches_cover_the_rows_in_order_within_the_budget(rows, budget) -> None:
    """Only a row that is longer than the budget exceeds it, alone; a shared prefix counts once."""
    plan = plan_micro_batches(rows, budget)
    assert [index for micro in plan for index in micro] == list(range(len(rows)))
    for micro in plan:
        batch = [rows[index] for index in micro]
        assert len(micro) == 1 or pack(batch, CPU).input_ids.numel() <= budget
        assert len(micro) == 1 or sum(len(r.token_ids) for r in batch) <= MAX_REUSE * budget


def test_rows_that_end_exactly_at_the_budget_fill_it() -> None:
    """One token more begins the next micro-batch."""
    rng = np.random.default_rng(0)
    rows = [row(rng.integers(0, 1000, size)) for size in (30, 34, 64, 1, 64)]
    assert plan_micro_batches(rows, 64) == [range(0, 2), range(2, 3), range(3, 4), range(4, 5)]
    assert plan_micro_batches(rows, 65) == [range(0, 2), range(2, 4), range(4, 5)]


def test_the_part_of_a_micro_batch_that_only_repeats_is_bounded() -> None:
    """Each row gathers the keys of its whole context."""
    rows = [row(np.arange(64))] * 20
    assert plan_micro_batches(rows, 64) == [range(start, start + MAX_REUSE) for start in range(0, 20, MAX_REUSE)]
